"""Convolutions of every geometry against float64, on tiles of 16."""

import pytest
import torch
from gradstats.kernels import (
    _check,
    _patches,
    convolution,
    convolution_pair_gram,
    convolution_pairs,
    convolution_weight_gradient,
    depthwise,
)
from gradstats.kernels._config import TileConfig
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.kernels.convolution_reference import (
    absolute,
    build,
    check_norms,
    check_pair_grams,
    check_pairs,
    exact,
)
from tests.kernels.reference import assert_close

TILE = TileConfig(16, 32, 16, num_warps=1, num_stages=1)
GRAM = TileConfig(16, 16, 32, num_warps=1, num_stages=1)
DEPTHWISE = TileConfig(4, 4, 16, num_warps=1, num_stages=1)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@st.composite
def layers(draw):
    """(sizes of x, output channels, kernel, stride, padding, dilation, groups, layout)."""
    dims = draw(st.integers(1, 3))
    per_axis = st.lists(st.integers(1, 3), min_size=dims, max_size=dims)
    kernel, stride, dilation = draw(per_axis), draw(per_axis), draw(per_axis)
    padding = draw(st.lists(st.integers(0, 2), min_size=dims, max_size=dims))
    groups = draw(st.sampled_from((1, 1, 2, 3, 4)))
    channels = groups * draw(st.sampled_from((1, 2, 5, 17)))
    outputs = groups * draw(st.sampled_from((1, 3, 18)))
    longest = {1: 20, 2: 5, 3: 3}[dims]
    size = [
        max(draw(st.integers(1, longest)), spread * (taps - 1) + 1 - 2 * pad, 1)
        for taps, pad, spread in zip(kernel, padding, dilation, strict=True)
    ]
    layout = draw(st.sampled_from(("first", "last", "sliced", "expanded")))
    return [channels, *size], outputs, (kernel, stride, padding, dilation, groups), layout


def check(sizes, outputs, layer, layout, dtype):
    x, g = build(sizes, outputs, layer, layout, dtype)
    config = DEPTHWISE if sizes[0] == layer[-1] else TILE
    check_norms(x, g, layer, config, config, GRAM, splits=2)


@settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(layer=layers(), dtype=st.sampled_from(DTYPES))
def test_norms_and_the_weight_gradient(layer, dtype):
    check(*layer, dtype)


@settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    layer=layers(),
    dtype=st.sampled_from(DTYPES),
    batches=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    layout=st.sampled_from(("first", "last", "sliced", "expanded")),
)
def test_products_of_patches(layer, dtype, batches, layout):
    sizes, outputs, own, first_layout = layer
    x1, g1 = build(sizes, outputs, own, first_layout, dtype, batches[0])
    larger = [sizes[0], *(size + 2 for size in sizes[1:])]
    for second_sizes in (sizes, larger):
        x2, g2 = build(second_sizes, outputs, own, layout, dtype, batches[1], seed=3)
        check_pair_grams(x1, g1, x2, g2, own, GRAM)


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


# (sizes of x, output channels, layer), whose channels are worth a copy where they come first
ARRANGED = {
    "images": ([16, 5, 9], 16, ([3, 3], [1, 2], [1, 1], [1, 1], 1)),
    "outputs that fill no vector": ([32, 4, 4], 6, ([2, 2], [1, 1], [1, 0], [1, 2], 2)),
    "lines": ([16, 11], 32, ([3], [1], [1], [2], 1)),
    "volumes": ([16, 2, 3, 4], 16, ([1, 2, 2], [1, 1, 1], [0, 1, 0], [1, 1, 1], 1)),
    "depthwise images": ([32, 5, 9], 32, ([3, 2], [1, 2], [1, 1], [1, 1], 32)),
    "depthwise lines": ([16, 37], 16, ([4], [1], [3], [2], 16)),
    "depthwise with several outputs": ([16, 7], 32, ([4], [1], [3], [2], 16)),
    "depthwise volumes": ([16, 3, 4, 9], 16, ([2, 1, 3], [2, 1, 1], [1, 0, 1], [1, 1, 2], 16)),
}


@pytest.mark.parametrize("name", ARRANGED)
def test_channels_that_come_first_are_copied_to_come_last(name):
    sizes, outputs, layer = ARRANGED[name]
    x, g = build(sizes, outputs, layer, "first", torch.float32, 3)
    config = DEPTHWISE if sizes[0] == layer[-1] else TILE
    arranged = _patches.check_convolution(x, g, *layer).arranged()
    assert arranged.channels_last and arranged.x.is_contiguous() is False
    torch.testing.assert_close(arranged.x.flatten(2), x.flatten(2), rtol=0, atol=0)
    assert (arranged.g.stride(1) == 1) == (outputs % 16 == 0)
    check_direct(x, g, layer, config)
    if outputs % 16 == 0:
        last = [operand.movedim(1, -1).contiguous().movedim(-1, 1) for operand in (x, g)]
        first = convolution.convolution_sqnorm(x, g, *layer, config=config)
        got = convolution.convolution_sqnorm(*last, *layer, config=config)
        torch.testing.assert_close(first, got, rtol=0, atol=0)


def check_direct(x, g, layer, config=None):
    want, terms = exact(x, g, layer), absolute(x, g, layer)
    got = convolution.convolution_sqnorm(x, g, *layer, config=config)
    assert_close(got, want.square().sum(1), terms.square().sum(1))
    if x.shape[1] == layer[-1]:
        gradient, squares = convolution_weight_gradient.convolution_weight_gradient_sqnorm(
            x, g, *layer, config=config, splits=2, gradient_dtype=torch.float32
        )
        assert_close(squares, want.square().sum(1), terms.square().sum(1))
        assert_close(gradient.flatten(), want.sum(0), terms.sum(0))


def test_pairs_of_channels_that_come_first_and_last():
    sizes, outputs, layer = ARRANGED["images"]
    x, g = build(sizes, outputs, layer, "first", torch.float32)
    x2, g2 = build(sizes, outputs, layer, "last", torch.float32, seed=5)
    check_pairs(x, g, x2, g2, layer, TILE, gram=GRAM)


@pytest.mark.parametrize("expanded", ["batch", "positions", "channels"])
def test_what_is_expanded_is_copied_once(expanded):
    sizes, outputs, layer = ARRANGED["images"]
    x, g = build(sizes, outputs, layer, "first", torch.float32, 3)
    axes = {"batch": (0,), "positions": (2, 3), "channels": (1,)}[expanded]
    for axis in axes:
        x = x.narrow(axis, 1, 1).expand_as(x)
    arranged = _patches.check_convolution(x, g, *layer).arranged()
    assert arranged.x.untyped_storage().nbytes() <= x.untyped_storage().nbytes()
    check_direct(x, g, layer, TILE)


@pytest.mark.parametrize("name", ["stem", "grouped", "depthwise", "several tiles of channels"])
def test_few_channels_and_odd_ones_stay_where_they_are(name):
    sizes, outputs, layer = NAMED[name]
    x, g = build(sizes, outputs, layer, "first", torch.float32)
    arranged = _patches.check_convolution(x, g, *layer).arranged()
    assert arranged.x.data_ptr() == x.data_ptr() and arranged.g.data_ptr() == g.data_ptr()


def test_one_position_has_channels_adjacent_already():
    layer = ([1, 1], [1, 1], [0, 0], [1, 1], 1)
    x, g = build([16, 1, 1], 16, layer, "first", torch.float32)
    arranged = _patches.check_convolution(x, g, *layer).arranged()
    assert arranged.x.data_ptr() == x.data_ptr() and arranged.g.data_ptr() == g.data_ptr()


@pytest.mark.parametrize(
    ("height", "width", "inner", "expected"),
    [(56, 56, 32, 8), (14, 14, 32, 16), (7, 7, 8, 8), (1, 2048, 32, 32), (28, 28, 32, 32),
     (5, 3, 4, 4)],
)  # fmt: skip
def test_blocks_of_lines_leave_few_lanes_empty(height, width, inner, expected):
    assert depthwise.across(height, width, inner) == expected


@pytest.mark.parametrize(("size", "kernel"), [((5, 6), [4, 4]), ((9, 17), [3, 1])])
def test_depthwise_channels_of_whole_vectors_with_the_tiles_that_ship(size, kernel):
    layer = (kernel, [1, 1], [2, 2], [1, 1], 32)
    for dtype in (torch.float32, torch.bfloat16):
        check_direct(*build([32, *size], 32, layer, "first", dtype), layer)


@pytest.mark.parametrize("name", ["one tap, strided", "depthwise", "patches of three axes"])
def test_pairs_and_directions(name):
    sizes, outputs, layer = NAMED[name]
    dtype = torch.bfloat16 if name.startswith("one") else torch.float32
    x1, g1 = build(sizes, outputs, layer, "first", dtype)
    x2, g2 = build(sizes, outputs, layer, "last", dtype, seed=5)
    config = DEPTHWISE if sizes[0] == layer[-1] else TILE
    for workspace in (1, 10**8) if outputs == 6 else (3000,):
        check_pairs(x1, g1, x2, g2, layer, config, workspace, GRAM)


def test_pairs_of_a_batch_with_itself():
    sizes, outputs, layer = NAMED["patches of three axes"]
    x, g = build(sizes, outputs, layer, "sliced", torch.float32)
    want, terms = exact(x, g, layer), absolute(x, g, layer)
    got = convolution_pairs.pairwise_convolution(x, g, x, g, *layer, config=TILE)
    assert_close(got, want @ want.T, terms @ terms.T)


def test_pairs_of_images_of_two_sizes():
    sizes, outputs, layer = NAMED["grouped"]
    x1, g1 = build(sizes, outputs, layer, "first", torch.float32)
    x2, g2 = build([36, 3, 5], outputs, layer, "first", torch.float32, 3)
    got = convolution_pairs.pairwise_convolution(x1, g1, x2, g2, *layer, config=TILE)
    limit = absolute(x1, g1, layer) @ absolute(x2, g2, layer).T
    assert_close(got, exact(x1, g1, layer) @ exact(x2, g2, layer).T, limit)
    for name in NAMED:
        sizes, outputs, layer = NAMED[name]
        x1, g1 = build(sizes, outputs, layer, "last", torch.float32, 3)
        sizes = [sizes[0], sizes[1] + 1, *(size + 3 for size in sizes[2:])]
        x2, g2 = build(sizes, outputs, layer, "first", torch.float32, 3, seed=3)
        check_pair_grams(x1, g1, x2, g2, layer, GRAM)


def test_tiles_of_patches_read_nothing_beside_the_examples():
    # positions that fill no tile, of batches that fill none, in memory that is not a number beside
    sizes, outputs, layer = NAMED["grouped"]

    def surrounded(operand):
        wide = operand.new_full([size + 2 for size in operand.shape], float("nan"))
        inner = wide[tuple(slice(1, -1) for _ in operand.shape)]
        return inner.copy_(operand)

    for dtype in (torch.float32, torch.bfloat16):
        x1, g1 = map(surrounded, build(sizes, outputs, layer, "first", dtype, 3))
        x2, g2 = map(surrounded, build([36, 3, 5], outputs, layer, "first", dtype, 3, seed=3))
        check_pair_grams(x1, g1, x2, g2, layer, GRAM)
        check_pair_grams(x2, g2, x1, g1, layer, GRAM)


@pytest.mark.parametrize(
    ("channels", "dtype", "layout", "expected"),
    [
        (16, torch.bfloat16, "last", 64),
        (16, torch.bfloat16, "first", 64),
        (20, torch.bfloat16, "first", 32),
        (16, torch.float32, "last", 32),
        (15, torch.bfloat16, "last", 32),
    ],
    ids=str,
)
def test_tiles_of_products_of_patches_leave_registers(
    monkeypatch, channels, dtype, layout, expected
):
    layer = ([3, 3], [1, 1], [1, 1], [1, 1], 1)
    x, g = build([channels, 12, 12], 16, layer, layout, dtype, 2)
    chosen = []

    def launch(first, second, config, *, all_pairs):
        chosen.append((config.rows, config.columns, config.inner))
        return torch.zeros((1, 2, 2) if all_pairs else (2, 1, 2))

    monkeypatch.setattr(convolution_pair_gram, "_launch", launch)
    convolution_pair_gram.pairwise_convolution_gram(x, g, x, g, *layer)
    convolution_pair_gram.convolution_inner_gram(x, g, x, g, *layer)
    assert chosen == [(expected,) * 3] * 2


def test_products_of_patches_are_repeatable():
    sizes, outputs, layer = NAMED["several tiles of channels"]
    x, g = build(sizes, outputs, layer, "last", torch.float32)
    for launcher in (
        convolution_pair_gram.pairwise_convolution_gram,
        convolution_pair_gram.convolution_inner_gram,
    ):
        once, again = (launcher(x, g, x, g, *layer, config=GRAM) for _ in range(2))
        torch.testing.assert_close(once, again, rtol=0, atol=0)


def test_an_empty_batch():
    sizes, outputs, layer = NAMED["grouped"]
    x, g = (operand[:0] for operand in build(sizes, outputs, layer, "first", torch.float32))
    assert convolution.convolution_sqnorm(x, g, *layer).shape == (0,)
    inner, magnitude = convolution_pair_gram.convolution_inner_gram(x, g, x, g, *layer)
    assert inner.shape == magnitude.shape == (0,)
    full = build(sizes, outputs, layer, "first", torch.float32)
    pairwise = convolution_pair_gram.pairwise_convolution_gram
    assert pairwise(x, g, *full, *layer).shape == (0, 2)
    assert pairwise(*full, x, g, *layer).shape == (2, 0)
    sizes, outputs, layer = NAMED["depthwise"]
    x, g = (operand[:0] for operand in build(sizes, outputs, layer, "first", torch.float32))
    gradient, sqnorm = convolution_weight_gradient.convolution_weight_gradient_sqnorm(x, g, *layer)
    assert sqnorm.shape == (0,) and gradient.shape == (5, 1, 5, 3) and (gradient == 0).all()


def test_what_no_kernel_serves_is_refused():
    sizes, outputs, layer = NAMED["grouped"]
    x, g = build(sizes, outputs, layer, "first", torch.float32)
    with pytest.raises(_check.KernelInputError, match=r"depthwise.*take PyTorch's weight gradient"):
        convolution_weight_gradient.convolution_weight_gradient_sqnorm(x, g, *layer)
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
        convolution_pairs.pairwise_convolution(x, g, x, g[:, :4], *layer)
    gram = convolution_pair_gram
    with pytest.raises(_check.KernelInputError, match="must be of one weight"):
        gram.pairwise_convolution_gram(x, g, x, g[:, :4], *layer)
    with pytest.raises(_check.KernelInputError, match="must share one dtype"):
        gram.pairwise_convolution_gram(x, g, x.half(), g.half(), *layer)
    with pytest.raises(_check.KernelInputError, match="need equal batches; got 2 and 1"):
        gram.convolution_inner_gram(x, g, x[:1], g[:1], *layer)
    with pytest.raises(_check.KernelInputError, match=r"direction must be \(6, 18, 2, 2\)"):
        convolution.convolution_direction(x, g, torch.zeros(6, 36, 2, 2), *layer)
