"""Convolutions of every geometry against float64, on tiles of 16."""

import pytest
import torch
from gradstats.kernels import _check, _reference, convolution, convolution_gram
from gradstats.kernels._config import TileConfig
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.kernels.cases import random
from tests.kernels.reference import assert_close

TILE = TileConfig(16, 32, 16, num_warps=1, num_stages=1)
DEPTHWISE = TileConfig(4, 4, 16, num_warps=1, num_stages=1)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@st.composite
def layers(draw):
    """(sizes of x, output channels, kernel, stride, padding, dilation, groups, layout)."""
    dims = draw(st.integers(1, 3))
    per_axis = st.lists(st.integers(1, 3), min_size=dims, max_size=dims)
    kernel, stride, dilation = draw(per_axis), draw(per_axis), draw(per_axis)
    padding = draw(st.lists(st.integers(0, 2), min_size=dims, max_size=dims))
    groups = draw(st.sampled_from((1, 1, 2, 3)))
    channels = groups * draw(st.sampled_from((1, 2, 5, 17)))
    outputs = groups * draw(st.sampled_from((1, 3, 18)))
    longest = {1: 20, 2: 5, 3: 3}[dims]
    size = [
        max(draw(st.integers(1, longest)), spread * (taps - 1) + 1 - 2 * pad, 1)
        for taps, pad, spread in zip(kernel, padding, dilation, strict=True)
    ]
    layout = draw(st.sampled_from(("first", "last", "sliced", "expanded")))
    return [channels, *size], outputs, (kernel, stride, padding, dilation, groups), layout


def build(sizes, outputs, layer, layout, dtype, batch=2, seed=1):
    """(x, g) in the given layout of memory."""
    kernel, stride, padding, dilation, _ = layer
    positions = [
        (size + 2 * pad - spread * (taps - 1) - 1) // step + 1
        for size, taps, step, pad, spread in zip(
            sizes[1:], kernel, stride, padding, dilation, strict=True
        )
    ]
    x = random((batch, *sizes), dtype, "cpu", seed)
    g = random((batch, outputs, *positions), dtype, "cpu", seed + 1)
    if layout == "last":
        return tuple(t.movedim(1, -1).contiguous().movedim(-1, 1) for t in (x, g))
    if layout == "sliced":
        wide = torch.full((*x.shape[:-1], 2 * x.shape[-1] + 3), float("nan"), dtype=dtype)
        wide[..., 1:-2:2] = x
        return wide[..., 1:-2:2], g
    if layout == "expanded":
        shape = g.shape
        return x, g.flatten(2)[..., :1].reshape(*shape[:2], *(1,) * (len(shape) - 2)).expand(shape)
    return x, g


def absolute(x, g, layer):
    """Per-example weight gradients of absolute values: what their elements round by."""
    own = _reference.convolution_gradients(x.double().abs(), g.double().abs(), *layer)
    return torch.stack([gradient.flatten() for gradient in own])


def exact(x, g, layer):
    own = _reference.convolution_gradients(x, g, *layer)
    return torch.stack([gradient.flatten() for gradient in own])


def check(sizes, outputs, layer, layout, dtype):
    x, g = build(sizes, outputs, layer, layout, dtype)
    gram = TileConfig(16, 16, 32, num_warps=1, num_stages=1)
    config = DEPTHWISE if sizes[0] == layer[-1] else TILE
    want, terms = exact(x, g, layer), absolute(x, g, layer)
    sqnorm, scale = want.square().sum(1), (want.abs() * terms).sum(1)
    assert_close(convolution.convolution_sqnorm(x, g, *layer, config=config), sqnorm, 2 * scale)
    gradient, fused = convolution.convolution_weight_gradient_sqnorm(
        x, g, *layer, config=config, splits=2, gradient_dtype=torch.float32
    )
    assert_close(fused, sqnorm, 2 * scale)
    shape = (outputs, sizes[0] // layer[-1], *layer[0])
    assert_close(gradient, want.sum(0).view(shape), terms.sum(0).view(shape))
    got, magnitude = convolution_gram.convolution_gram_sqnorm(x, g, *layer, config=gram)
    _, want_magnitude = _reference.convolution_gram_sqnorm(x, g, *layer)
    assert_close(got, sqnorm, want_magnitude)
    assert_close(magnitude, want_magnitude)


@settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(layer=layers(), dtype=st.sampled_from(DTYPES))
def test_norms_and_the_weight_gradient(layer, dtype):
    check(*layer, dtype)


NAMED = {
    "stem": ([3, 9, 8], 17, ([5, 5], [2, 2], [2, 2], [1, 1], 1)),
    "one tap, strided": ([34, 7, 6], 17, ([1, 1], [2, 2], [0, 0], [1, 1], 1)),
    "several tiles of channels": ([35, 3, 4], 18, ([2, 2], [1, 1], [1, 1], [1, 1], 1)),
    "grouped": ([36, 4, 4], 6, ([2, 2], [1, 1], [1, 0], [1, 2], 2)),
    "depthwise": ([5, 6, 5], 5, ([5, 3], [1, 2], [2, 1], [1, 1], 5)),
    "depthwise with several outputs": ([3, 20], 12, ([5], [1], [2], [2], 3)),
    "patches of three axes": ([4, 4, 5, 3], 6, ([2, 3, 2], [2, 1, 1], [1, 1, 0], [1, 1, 2], 2)),
}


@pytest.mark.parametrize("name", NAMED)
def test_named_layers(name):
    layout = "first" if len(name) % 2 else "last"
    check(*NAMED[name], layout, torch.float32)


@pytest.mark.parametrize("name", ["one tap, strided", "depthwise", "patches of three axes"])
def test_pairs_and_directions(name):
    sizes, outputs, layer = NAMED[name]
    dtype = torch.bfloat16 if name.startswith("one") else torch.float32
    x1, g1 = build(sizes, outputs, layer, "first", dtype)
    x2, g2 = build(sizes, outputs, layer, "last", dtype, seed=5)
    config = DEPTHWISE if sizes[0] == layer[-1] else TILE
    first, second = exact(x1, g1, layer), exact(x2, g2, layer)
    limit = absolute(x1, g1, layer) @ absolute(x2, g2, layer).T
    factors = (x1, g1, x2, g2, *layer)
    got = convolution.convolution_inner(*factors, config=config)
    assert_close(got, (first * second).sum(1), limit.diagonal())
    for workspace in (1, 10**8) if outputs == 6 else (3000,):
        got = convolution.pairwise_convolution(*factors, workspace=workspace, config=config)
        assert_close(got, first @ second.T, limit)
    shape = (outputs, sizes[0] // layer[-1], *layer[0])
    direction = random(shape[::-1], torch.float32, "cpu", 9).permute(*range(len(shape))[::-1])
    got = convolution.convolution_direction(x1, g1, direction, *layer, config=config)
    flat = direction.double().flatten()
    assert_close(got, first @ flat, absolute(x1, g1, layer) @ flat.abs())


def test_pairs_of_a_batch_with_itself():
    sizes, outputs, layer = NAMED["patches of three axes"]
    x, g = build(sizes, outputs, layer, "sliced", torch.float32)
    want, terms = exact(x, g, layer), absolute(x, g, layer)
    got = convolution.pairwise_convolution(x, g, x, g, *layer, config=TILE)
    assert_close(got, want @ want.T, terms @ terms.T)


def test_pairs_of_images_of_two_sizes():
    sizes, outputs, layer = NAMED["grouped"]
    x1, g1 = build(sizes, outputs, layer, "first", torch.float32)
    x2, g2 = build([36, 3, 5], outputs, layer, "first", torch.float32, 3)
    got = convolution.pairwise_convolution(x1, g1, x2, g2, *layer, config=TILE)
    limit = absolute(x1, g1, layer) @ absolute(x2, g2, layer).T
    assert_close(got, exact(x1, g1, layer) @ exact(x2, g2, layer).T, limit)


def test_an_empty_batch():
    sizes, outputs, layer = NAMED["grouped"]
    x, g = (operand[:0] for operand in build(sizes, outputs, layer, "first", torch.float32))
    assert convolution.convolution_sqnorm(x, g, *layer).shape == (0,)
    gradient, sqnorm = convolution.convolution_weight_gradient_sqnorm(x, g, *layer)
    assert sqnorm.shape == (0,) and (gradient == 0).all()
    sizes, outputs, layer = NAMED["depthwise"]
    x, g = (operand[:0] for operand in build(sizes, outputs, layer, "first", torch.float32))
    gradient, sqnorm = convolution.convolution_weight_gradient_sqnorm(x, g, *layer)
    assert sqnorm.shape == (0,) and gradient.shape == (5, 1, 5, 3) and (gradient == 0).all()


def test_what_no_kernel_serves_is_refused():
    sizes, outputs, layer = NAMED["grouped"]
    x, g = build(sizes, outputs, layer, "first", torch.float32)
    with pytest.raises(_check.KernelInputError, match=r"has \(6, 2\) positions .* got gradients"):
        convolution.convolution_sqnorm(x, g, [1, 2], *layer[1:])
    with pytest.raises(_check.KernelInputError, match="groups must divide the 36 input and 6"):
        convolution.convolution_sqnorm(x, g, *layer[:4], 5)
    with pytest.raises(_check.KernelInputError, match="one batch; got 2 and 1"):
        convolution.convolution_sqnorm(x, g[:1], *layer)
    with pytest.raises(_check.KernelInputError, match="as many axes as the kernel"):
        convolution.convolution_sqnorm(x, g, [3], [1], [1], [1], 2)
    with pytest.raises(_check.KernelInputError, match="need 2 numbers each"):
        convolution.convolution_sqnorm(x, g, [2, 2], [1], [1, 0], [1, 2], 2)
    with pytest.raises(_check.KernelInputError, match="float64"):
        convolution.convolution_sqnorm(x.double(), g.double(), *layer)
    with pytest.raises(_check.KernelInputError, match="images of one size"):
        convolution.convolution_inner(x, g, x[:, :, :3], g[:, :, :4], *layer)
    with pytest.raises(_check.KernelInputError, match="must be of one weight"):
        convolution.pairwise_convolution(x, g, x, g[:, :4], *layer)
    with pytest.raises(_check.KernelInputError, match=r"direction must be \(6, 18, 2, 2\)"):
        convolution.convolution_direction(x, g, torch.zeros(6, 36, 2, 2), *layer)
