"""Weights that are normalised before they meet data, in single precision."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import gradstats as gs
from benchmarks.ledger import peak_memory
from tests.oracle import flat, oracle_gradients, oracle_sqnorms

Weight = Callable[[nn.Module], Tensor]


def spectral(m) -> Tensor:
    left, right = m.weight[:, 0].detach(), m.weight[0].detach()
    return m.weight / torch.dot(left, m.weight.mv(right))


def standardised(m) -> Tensor:
    variance, mean = torch.var_mean(m.weight, 1, keepdim=True)
    return (m.weight - mean) * torch.rsqrt(variance + 1e-5)


NORMALISED: dict[str, Weight] = {
    "weight norm": lambda m: torch._weight_norm(m.weight, m.length, 0),
    "unit rows": lambda m: functional.normalize(m.weight),
    "unit columns": lambda m: functional.normalize(m.weight, dim=0),
    "of unit norm": lambda m: functional.normalize(m.weight, dim=(0, 1)),
    "unit rows by hand": lambda m: m.weight / m.weight.norm(dim=1, keepdim=True),
    "centred": lambda m: m.weight - m.weight.mean(1, keepdim=True),
    "spectral norm": spectral,
    "standardised": standardised,
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


def check(model, x: Tensor, scale: Tensor, rtol: float) -> None:
    got = gs.per_example_norms(model, (x, scale), loss).norm
    expected = sum(oracle_sqnorms(model, (x, scale), loss).values())
    assert isinstance(expected, Tensor)
    torch.testing.assert_close(got.double(), expected.sqrt(), rtol=rtol, atol=0)


@pytest.mark.parametrize("make", NORMALISED.values(), ids=NORMALISED)
@pytest.mark.parametrize("positions", [1, 3])
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
