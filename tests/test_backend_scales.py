"""Scales, shifts and biases through the operators that serve them on CUDA, on the CPU."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional

import gradstats as gs
from gradstats._factors import Vector
from gradstats.capture.parameters._nodes import Root
from gradstats.contractions import _triton
from tests.dispatched import Operations, shapes
from tests.losses import mean_square
from tests.oracle import assert_sqnorms, check_products, oracle_sqnorms

BATCH = 5


class Broadcast(nn.Module):
    """A trained map, then x ∘ w + b by broadcasting, in any of the ways that people write it."""

    def __init__(self, shape, size, write, *, width=6):
        super().__init__()
        self.map = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.randn(shape))
        self.shift = nn.Parameter(torch.randn(shape))
        self.size, self.write = size, write

    def forward(self, x):
        return self.write(torch.sin(self.map(x)).reshape(-1, *self.size), self.scale, self.shift)


def rms_norm(x, scale, shift):
    normalised = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    return scale * normalised.to(x.dtype) + shift


def plain(x, scale, shift):
    return shift + x * scale


def shifted(x, scale, shift):
    return x * (1 + scale.float()) + torch.add(shift, 2.0)


def transposed(x, scale, shift):
    return (x.transpose(1, 2) * scale + shift).transpose(1, 2)


def methods(x, scale, shift):
    return x.mul(scale).add(shift)


def viewed(x, scale, shift):
    return x * scale.view(1, -1, 1, 1) + shift.to(x.dtype)[None, :, None, None]


def expanded(x, scale, shift):
    return x.sum(1, keepdim=True).expand_as(x) * scale + shift


# name: parameter's shape, size of an example, how it is written, operators called for both
CASES = {
    "RMSNorm": ((6,), (4, 6), rms_norm, ("scale_backward", "vector_sqnorm")),
    "shifted": ((6,), (4, 6), shifted, ("scale_backward", "vector_sqnorm")),
    "no positions": ((24,), (24,), plain, ("scale_backward",)),
    "last of four": ((6,), (2, 2, 6), plain, ("scale_backward", "vector_sqnorm")),
    "channels first": ((2, 1, 1), (2, 3, 4), plain, ("scale_backward", "vector_sqnorm")),
    "channels viewed": ((2,), (2, 3, 4), viewed, ("scale_backward", "vector_sqnorm")),
    "scalar": ((), (4, 6), plain, ("scale_direction", "scale_direction")),
    "scalar of one": ((1,), (2, 3, 4), methods, ("scale_direction", "scale_direction")),
    "two axes kept": ((3, 4), (2, 3, 4), plain, ("scale_backward", "vector_sqnorm")),
    "outer axes kept": ((2, 3, 1), (2, 3, 4), plain, ("scale_backward", "vector_sqnorm")),
    "ends kept": ((2, 1, 4), (2, 3, 4), plain, None),
    "each position": ((4, 6), (4, 6), plain, ("scale_backward",)),
    "transposed": ((4,), (4, 6), transposed, ("scale_backward", "vector_sqnorm")),
    "expanded": ((6,), (4, 6), expanded, ("scale_backward", "vector_sqnorm")),
}
OF_BROADCASTS = {"scale_backward", "scale_direction", "scale_sum", "vector_sum", "vector_sqnorm"}


def case(name):
    shape, size, write, expected = CASES[name]
    model = Broadcast(shape, size, write)
    model.map.bias.requires_grad_(False)
    batch = torch.randn(BATCH, torch.Size(size).numel() // 6, 6), torch.randn(BATCH)
    return model, batch, expected


def called(kernels):
    return sorted(set(kernels) & OF_BROADCASTS)


@pytest.mark.parametrize("name", CASES)
def test_norms_alone(kernels, name):
    model, batch, expected = case(name)
    stats = gs.per_example_norms(model, batch, mean_square)
    assert_sqnorms(stats, oracle_sqnorms(model, batch, mean_square), 1e-4)
    assert called(kernels) == sorted(set(expected or ()))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_norms_beside_training(kernels, name, fused):
    model, batch, expected = case(name)
    check_training(model, batch, fused=fused)
    beside = set(expected or ())
    if fused:
        # what sums for the norms sums for the gradients too
        beside = {operator.replace("vector_sqnorm", "scale_backward") for operator in beside}
    assert called(kernels) == sorted(beside)


@pytest.mark.parametrize("name", CASES)
def test_products(kernels, name):
    model, batch, expected = case(name)
    check_products(model, batch, mean_square, rtol=1e-5)
    if expected:
        assert "scale_direction" in kernels
        assert {"scale_sum", "scale_direction"} & set(kernels)


def check_training(model, batch, losses=mean_square, fused=True):
    expected = oracle_sqnorms(model, batch, losses)
    model.zero_grad()
    losses(model, batch).mean().backward()
    want = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    with gs.track(model, batch_size=BATCH, fused=fused) as tracker:
        tracker.backward(losses(model, batch))
    assert_sqnorms(tracker.stats, expected, 1e-4)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and fused:
            torch.testing.assert_close(parameter.grad, want[name], rtol=1e-4, atol=1e-6)
        elif parameter.requires_grad:
            assert torch.equal(parameter.grad, want[name])


class Written(nn.Module):
    """Any function of a module's parameters and input."""

    def __init__(self, function, **parameters):
        super().__init__()
        self.map = nn.Linear(6, 6)
        self.function = function
        for name, shape in parameters.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))

    def forward(self, x):
        return self.function(self, torch.sin(self.map(x)))


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: x * m.w * m.w,
        lambda m, x: x * m.w + m.w,
        lambda m, x: x * (1 + m.w),
        lambda m, x: x * torch.add(torch.ones(6).to(x), m.w, alpha=2),
        lambda m, x: x * (m.w + torch.arange(4)[:, None]),
        lambda m, x: x * (1 + m.w) + (m.w - 1) * (m.w + m.w),
        lambda m, x: x * m.w.exp() + m.w.expand(4, 6),
        lambda m, x: x * m.w[:3].repeat(2) + m.w.view(2, 3).flatten(),
        lambda m, x: functional.linear(x, m.v, m.w) * m.v[0],
        lambda m, x: x * m.w[torch.tensor([0, 0, 5, 4, 3, 3])] + m.w[None].flatten()[:],
        lambda m, x: x * m.w[torch.tensor([0, 0, 5, 4, 3, 3])],
        lambda m, x: (x.unsqueeze(1) * m.w[:, None, None]).sum(1),
    ],
    ids=[
        "twice",
        "scale and shift",
        "1 + w",
        "1 + 2 w",
        "sum that widens",
        "1 + w among others",
        "exp",
        "parts",
        "row of a matrix",
        "repeated and flattened",
        "repeated",
        "all of each",
    ],
)
def test_parameters_used_in_other_ways_too(kernels, function):
    model = Written(function, w=(6,), v=(6, 6))
    model.v.requires_grad_("v" in function.__code__.co_names)
    batch = torch.randn(BATCH, 4, 6), torch.randn(BATCH)
    stats = gs.per_example_norms(model, batch, mean_square)
    assert_sqnorms(stats, oracle_sqnorms(model, batch, mean_square), 1e-4)
    check_training(model, batch)
    model.zero_grad()
    check_products(model, batch, mean_square, rtol=1e-5)


def test_uses_that_must_meet_hold_no_positions(kernels, monkeypatch):
    held = []
    deliver = Root.deliver

    def noted(root, factor):
        held.append(type(factor))
        deliver(root, factor)

    monkeypatch.setattr(Root, "deliver", noted)
    model = Written(lambda m, x: x * m.w * m.w + m.b[None], w=(6,), b=(6,))
    model.map.requires_grad_(False)
    batch = torch.randn(BATCH, 4, 6), torch.randn(BATCH)
    stats = gs.per_example_norms(model, batch, mean_square)
    assert_sqnorms(stats, oracle_sqnorms(model, batch, mean_square), 1e-4)
    # the shift is used once: its norms come without a factor
    assert held == [Vector, Vector]


def test_examples_along_another_axis(kernels):
    model = Written(lambda m, x: rms_norm(x, m.w, m.b), w=(6,), b=(6,))

    def along_columns(model, batch):
        return model(batch[0]).square().sum((0, 2)).sin()

    def along_rows(model, batch):
        return along_columns(model, (batch[0].transpose(0, 1),))

    x = torch.randn(4, BATCH, 6)
    expected = oracle_sqnorms(model, (x.transpose(0, 1),), along_rows)
    assert_sqnorms(gs.per_example_norms(model, (x,), along_columns, batch_dim=1), expected, 1e-4)
    assert {"scale_backward", "vector_sqnorm"} <= set(kernels)


def test_rows_folded_into_the_example_axis(kernels):
    model = Written(lambda m, x: rms_norm(x, m.w, m.b), w=(6,), b=(6,))

    def folded(model, batch):
        output = model(batch[0].flatten(0, 1))
        return output.unflatten(0, (-1, 4)).square().mean((1, 2))

    batch = torch.randn(BATCH, 4, 6), torch.zeros(BATCH)
    stats = gs.per_example_norms(model, batch, folded)
    assert_sqnorms(stats, oracle_sqnorms(model, batch, folded), 1e-4)
    check_training(model, batch, folded)
    assert {"scale_backward", "vector_sqnorm"} <= set(kernels)


@pytest.mark.parametrize("width", [(), (2,)], ids=["rows", "rows of several"])
def test_packed_examples(kernels, width):
    lengths = torch.tensor([3, 1, 0, 4, 2])
    bounds = functional.pad(lengths.cumsum(0), (1, 0))
    model = Written(lambda m, x: m.s * rms_norm(x, m.w, m.b), w=(6,), b=(6,), s=())
    x = torch.randn(10, *width, 6)

    def packed(model, x):
        values = model(x).square().flatten(1).sum(1)
        owner = torch.arange(BATCH).repeat_interleave(lengths)
        return values.new_zeros(BATCH).index_add(0, owner, values)

    for fused in (None, True):
        kernels.clear()
        model.zero_grad()
        if fused is None:
            stats = gs.per_example_norms(model, x, packed, cu_seqlens=bounds)
        else:
            with gs.track(
                model, batch_size=BATCH, cu_seqlens=bounds, loss_reduction="sum"
            ) as tracker:
                packed(model, x).sum().backward()
            stats = tracker.stats
        for example, (start, end) in enumerate(itertools.pairwise(bounds.tolist())):
            copy = {
                name: p.detach().double().requires_grad_() for name, p in model.named_parameters()
            }
            output = torch.func.functional_call(model, copy, (x[start:end].double(),))
            gradients = torch.autograd.grad(output.square().sum(), list(copy.values()))
            for name, gradient in zip(copy, gradients, strict=True):
                got = stats.by_parameter[name][example].double()
                want = gradient.square().sum()
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-9)
        assert {"scale_backward", "scale_direction"} <= set(kernels)
    total = torch.autograd.grad(packed(model, x).sum(), list(model.parameters()))
    for (name, parameter), want in zip(model.named_parameters(), total, strict=True):
        torch.testing.assert_close(parameter.grad, want, rtol=1e-4, atol=1e-5, msg=name)
    direction = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    alignment = gs.alignment(model, x, packed, direction, cu_seqlens=bounds)
    assert "scale_direction" in kernels
    assert alignment.shape == (BATCH,) and float(alignment[2]) == 0


@pytest.mark.parametrize("tracked", [True, False])
def test_losses_with_derivatives(kernels, tracked):
    model = Written(lambda m, x: torch.tanh(x * m.w + m.b), w=(6,), b=(6,))
    model.w.requires_grad_(tracked)

    def penalty(model, batch):
        x = batch[0].detach().requires_grad_()
        output = model(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        return output.flatten(1).sum(1) * batch[1] + slope.square().flatten(1).sum(1)

    batch = torch.randn(BATCH, 4, 6), torch.randn(BATCH)
    expected = oracle_sqnorms(model, batch, penalty)
    assert_sqnorms(gs.per_example_norms(model, batch, penalty), expected, 1e-4)


def test_a_scale_that_widens_its_input(kernels, monkeypatch):
    monkeypatch.setattr(_triton, "runs", lambda *operands: True)
    model = Written(lambda m, x: x.bfloat16() * m.w + m.b, w=(6,), b=(6,))
    batch = torch.randn(BATCH, 4, 6), torch.randn(BATCH)
    check = gs.per_example_norms(model, batch, mean_square).by_parameter
    monkeypatch.setattr(_triton, "runs", lambda *operands: False)
    want = gs.per_example_norms(model, batch, mean_square).by_parameter
    for name in ("w", "b"):
        torch.testing.assert_close(check[name], want[name], rtol=1e-4, atol=0)
    assert "scale_backward" in kernels


LAYERS = {
    "linear": lambda: (nn.Linear(11, 11), (13, 11)),
    "convolution": lambda: (nn.Conv1d(11, 11, 3, padding=1), (11, 13)),
    "layer norm": lambda: (nn.LayerNorm(11), (13, 11)),
    "group norm": lambda: (nn.GroupNorm(1, 11), (11, 13)),
    "batch norm": lambda: (nn.BatchNorm1d(11).eval(), (11, 13)),
    "LayerScale": lambda: (Written(lambda m, x: x * m.w + m.b, w=(11,), b=(11,)), (13, 11)),
}


@pytest.mark.parametrize("training", [None, {}, {"fused": False}, {"exclude": ["1*.b*"]}])
@pytest.mark.parametrize("name", LAYERS)
def test_no_gradient_of_an_example_is_written(kernels, name, training):
    layer, size = LAYERS[name]()
    if isinstance(layer, Written):
        layer.map = nn.Identity()
    model = nn.Sequential(nn.Linear(size[-1], size[-1]), layer)
    batch = torch.randn(7, *size), torch.randn(7)
    # its kernels take (B, 13, 11); what is summed over 13 positions would be (7, 11)
    with Operations(shapes) as operations:
        if training is not None:
            with gs.track(model, batch_size=7, **training) as tracker:
                tracker.backward(mean_square(model, batch))
        else:
            gs.per_example_norms(model, batch, mean_square)
    written = {shape for shapes in operations.found for shape in shapes}
    assert not [shape for shape in written if torch.Size(shape).numel() == 7 * 11], written
