"""Weights that are normalised before they meet data, in single precision."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import gradstats as gs
from benchmarks.ledger import peak_memory
from gradstats.capture.parameters import _lineage
from tests.oracle import assert_sqnorms, flat, oracle_gradients, oracle_sqnorms
from tests.rules.operation import check_operation, normal

Weight = Callable[[nn.Module], Tensor]


def spectral(m) -> Tensor:
    left, right = m.weight[:, 0].detach(), m.weight[0].detach()
    return m.weight / torch.dot(left, m.weight.mv(right))


def standardised(m) -> Tensor:
    variance, mean = torch.var_mean(m.weight, 1, keepdim=True)
    return (m.weight - mean) * torch.rsqrt(variance + 1e-5)


def by_batch_norm(m) -> Tensor:
    """As timm and transformers write it, here with all that may be trained."""
    rows = m.weight.reshape(1, len(m.weight), -1)
    scale, shift = m.length.flatten() / 3, getattr(m, "shift", None)
    options = {"training": True, "momentum": 0.0, "eps": 0.05}
    out = functional.batch_norm(rows, None, None, scale, shift, **options)
    return out.reshape_as(m.weight)


def by_layer_norm(m) -> Tensor:
    rows = m.weight.flatten(1)
    return functional.layer_norm(rows, rows.shape[1:], eps=0.05).view_as(m.weight)


NORMALISED: dict[str, Weight] = {
    "weight norm": lambda m: torch._weight_norm(m.weight, m.length, 0),
    "unit rows": lambda m: functional.normalize(m.weight),
    "unit columns": lambda m: functional.normalize(m.weight, dim=0),
    "of unit norm": lambda m: functional.normalize(m.weight, dim=(0, 1)),
    "unit columns by hand": lambda m: m.weight / m.weight.norm(dim=0, keepdim=True),
    "unit rows by hand": lambda m: m.weight / m.weight.norm(dim=1, keepdim=True),
    "centred": lambda m: m.weight - m.weight.mean(1, keepdim=True),
    "spectral norm": spectral,
    "standardised": standardised,
    "standardised by batch_norm": by_batch_norm,
    "standardised by layer_norm": by_layer_norm,
}


class Layer(nn.Module):
    """A linear layer without bias, with a weight that is computed from a parameter."""

    def __init__(self, make: Weight, width: int = 12, rows: int = 7):
        super().__init__()
        torch.manual_seed(0)
        self.make = make
        self.weight = nn.Parameter(torch.randn(rows, width))
        self.length = nn.Parameter(1 + torch.rand(rows, 1))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.make(self))


def loss(model, batch) -> Tensor:
    x, scale = batch
    out = model(x).flatten(1)
    return (out * torch.linspace(0.5, 1.5, out.shape[1], dtype=out.dtype)).sum(1) * scale


class Convolution(nn.Module):
    """A convolution with a weight that is computed from a parameter."""

    def __init__(
        self, make: Weight, groups: int = 1, size: int = 3, stride: int = 1, rows: int = 6
    ):
        super().__init__()
        torch.manual_seed(0)
        padding = size // 2
        self.make, self.options = make, {"groups": groups, "stride": stride, "padding": padding}
        self.weight = nn.Parameter(torch.randn(rows, 4 // groups, size, size))
        self.length = nn.Parameter(1 + torch.rand(rows, 1, 1, 1))
        self.shift = nn.Parameter(torch.randn(rows))

    def forward(self, x: Tensor) -> Tensor:
        return functional.conv2d(x, self.make(self), **self.options)


def check(model, x: Tensor, scale: Tensor, rtol: float) -> None:
    got = gs.per_example_norms(model, (x, scale), loss).norm
    expected = sum(oracle_sqnorms(model, (x, scale), loss).values())
    assert isinstance(expected, Tensor)
    torch.testing.assert_close(got.double(), expected.sqrt(), rtol=rtol, atol=0)


def unit_sums(m) -> Tensor:
    return functional.normalize(m.weight, 1.0)


@pytest.mark.parametrize("make", [*NORMALISED.values(), unit_sums], ids=[*NORMALISED, "unit sums"])
@pytest.mark.parametrize("positions", [1, 3, 90])
def test_norms(make, positions):
    check(Layer(make), torch.randn(5, positions, 12), torch.ones(5), 1e-5)


@pytest.mark.parametrize("make", NORMALISED.values(), ids=NORMALISED)
def test_gradients_of_any_size(make):
    """What is multiplied on the way must neither vanish nor overflow."""
    model = Layer(make)
    x = torch.randn(4, 1, 12) * torch.tensor([1e-9, 1e-9, 1, 1e12]).reshape(-1, 1, 1)
    check(model, x, torch.tensor([1e-8, 1e-3, 1, 1e6]), 1e-5)


@pytest.mark.parametrize(
    "name", ["weight norm", "unit rows", "unit rows by hand", "of unit norm", "spectral norm"]
)
def test_gradients_along_the_weight_itself(name):
    """Hardly anything is left of them: the difference of two squares would have no digit."""
    model = Layer(NORMALISED[name], rows=1)
    torch.manual_seed(1)
    x = model.weight.detach() * torch.rand(5, 1) + 1e-4 * torch.randn(5, 12)
    model.length.requires_grad_(False)
    check(model, x, torch.ones(5), 2e-2)


def test_rows_of_zeros():
    model = Layer(NORMALISED["unit rows"])
    with torch.no_grad():
        model.weight[2] = 0
        model.weight[3] = 1e-14
    check(model, torch.randn(5, 1, 12), torch.ones(5), 1e-5)


@pytest.mark.parametrize("make", NORMALISED.values(), ids=NORMALISED)
def test_no_gradient_is_formed(make):
    model = Layer(make, 96, 64)
    batch = torch.randn(32, 96), torch.ones(32)
    ledger = peak_memory(lambda: gs.per_example_norms(model, batch, loss))
    assert ledger.largest <= 2 * model.weight.numel()


@pytest.mark.parametrize("make", NORMALISED.values(), ids=NORMALISED)
@pytest.mark.parametrize("positions", [1, 3])
def test_inner_products(make, positions):
    model, batch = Layer(make), (torch.randn(5, positions, 12), torch.ones(5))
    other = torch.randn(4, positions, 12), torch.ones(4)
    one, two = (flat(oracle_gradients(model, each, loss)) for each in (batch, other))
    got = gs.inner_products(model, batch, model, other, loss)
    scale = float(one.norm(dim=1).max() * two.norm(dim=1).max())
    torch.testing.assert_close(got.double(), one @ two.T, rtol=0, atol=1e-5 * scale)
    stats = gs.per_example_norms(model, batch, loss, alignment=True)
    assert stats.alignment is not None
    aligned = (one @ one.T).mean(1)
    torch.testing.assert_close(stats.alignment.double(), aligned, rtol=0, atol=1e-5 * scale)


CONVOLUTIONS = {
    "batch_norm": (by_batch_norm, {}),
    "batch_norm, groups": (by_batch_norm, {"groups": 2}),
    "batch_norm, depthwise": (by_batch_norm, {"groups": 4, "rows": 8}),
    "batch_norm, 1 × 1": (by_batch_norm, {"size": 1, "stride": 2}),
    "batch_norm, 1 × 1, groups": (by_batch_norm, {"size": 1, "groups": 2}),
    "batch_norm of named operands": (
        lambda m: functional.batch_norm(
            running_mean=None, running_var=None, bias=m.shift, training=True, eps=0.05,
            input=m.weight.view(1, 6, -1)
        ).view_as(m.weight), {}
    ),
    "batch_norm of a constant": (
        lambda m: functional.batch_norm(
            m.weight.detach()[None], None, None, m.length.view(-1), m.shift, True, 0.1, 0.05
        ).squeeze(0), {}
    ),
    "batch_norm of two": (
        lambda m: functional.batch_norm(
            m.weight.reshape(2, 6, -1), None, None, m.length.view(-1), m.shift, True
        ).view_as(m.weight), {}
    ),
    "layer_norm": (by_layer_norm, {"stride": 2}),
    "layer_norm of all axes": (
        lambda m: functional.layer_norm(m.weight, m.weight.shape[1:], eps=0.05), {}
    ),
    "weight norm of a constant": (
        lambda m: torch._weight_norm(m.weight.detach(), m.length, 0), {}
    ),
    "unit taps by hand": (
        lambda m: m.weight / m.weight.norm(dim=(0, 1), keepdim=True), {}
    ),
    "layer_norm of some axes": (
        lambda m: functional.layer_norm(m.weight, m.weight.shape[2:], eps=0.05), {}
    ),
    "a channel's running statistics": (
        lambda m: functional.batch_norm(
            m.weight.reshape(1, 6, -1), m.shift.detach(), m.shift.detach().exp(), m.length.flatten()
        ).view_as(m.weight), {}
    ),
    "seen in another shape": (lambda m: m.weight.reshape(-1).reshape(m.weight.shape), {}),
    "multiplied in another shape": (
        lambda m: (m.weight.reshape(1, 6, -1) * m.length.view(1, 6, 1)).view_as(m.weight), {}
    ),
    "standardised twice": (
        lambda m: by_layer_norm(m) + by_batch_norm(m), {}
    ),
}  # fmt: skip


@pytest.mark.parametrize("size", [6, 13])
@pytest.mark.parametrize(("make", "options"), CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_convolutions(make, options, size):
    model = Convolution(make, **options).double()
    with torch.no_grad():
        model.weight[1] = 0.5  # a row without any deviation
    batch = torch.randn(5, 4, size, 7).double(), torch.ones(5).double()
    assert_sqnorms(
        gs.per_example_norms(model, batch, loss), oracle_sqnorms(model, batch, loss), 1e-10
    )
    other = torch.randn(3, 4, size, 7).double(), torch.ones(3).double()
    one, two = (flat(oracle_gradients(model, each, loss)) for each in (batch, other))
    got = gs.inner_products(model, batch, model, other, loss)
    torch.testing.assert_close(got, one @ two.T, rtol=1e-10, atol=1e-10)
    direction = {name: torch.randn_like(each) for name, each in model.named_parameters()}
    along = gs.alignment(model, batch, loss, direction)
    towards = torch.cat([each.flatten() for each in direction.values()])
    torch.testing.assert_close(along, one @ towards)


def test_groups_that_are_standardised_each_as_a_whole():
    def function(m, x):
        weight = functional.layer_norm(m.w, m.w.shape[1:])
        return torch.einsum("btgi,goi->btgo", x, weight)

    check_operation(function, {"w": (2, 3, 4)}, normal(3, 5, 2, 4))


def test_rows_that_are_standardised_then_scaled_and_shifted():
    for beside in ({"weight": "v"}, {"bias": "v"}):

        def function(m, x, beside=beside):
            named = {name: getattr(m, own) for name, own in beside.items()}
            return functional.linear(x, functional.layer_norm(m.w, (4,), **named))

        check_operation(function, {"w": (3, 4), "v": (4,)}, normal(3, 5, 4))


@pytest.mark.parametrize("shape", [(3, 1), (4,), (3, 4), (1,), ()])
def test_several_lengths_of_a_weight_normalised_as_a_whole(shape):
    def function(m, x):
        return functional.linear(x, torch._weight_norm(m.w, m.length, -1))

    check_operation(function, {"w": (3, 4), "length": shape}, normal(3, 5, 4))


@pytest.mark.parametrize("positional", [0, 1])
def test_weight_norm_of_arguments_by_name(positional):
    def function(m, x):
        named = {"v": m.w, "g": m.length}
        given = [named.pop(name) for name in ("v", "g")[:positional]]
        return functional.linear(x, torch._weight_norm(*given, **named))

    check_operation(function, {"w": (3, 4), "length": (3, 1)}, normal(3, 5, 4))


def test_rows_of_one_element():
    def function(m, x):
        return functional.linear(x, functional.normalize(m.w, eps=10.0))

    check_operation(function, {"w": (6, 1)}, normal(5, 1))


@pytest.mark.parametrize("dim", [0, 1, (0, 1)])
def test_normalised_scales(dim):
    def function(m, x):
        return x * functional.normalize(m.w, dim=dim)

    check_operation(function, {"w": (3, 4)}, normal(5, 3, 4))


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("make", [by_batch_norm, by_layer_norm])
def test_no_gradient_of_a_standardised_convolution_is_formed(make, size, monkeypatch):
    monkeypatch.setattr(_lineage, "sqnorms_together", None)  # what would form and pull it back
    model, batch = Convolution(make, size=size), (torch.randn(5, 4, 6, 7), torch.ones(5))
    assert_sqnorms(
        gs.per_example_norms(model, batch, loss), oracle_sqnorms(model, batch, loss), 1e-5
    )
