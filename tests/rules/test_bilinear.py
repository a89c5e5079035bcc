"""Bilinear layers."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import gradstats as gs
from gradstats._factors import Segments
from gradstats.capture.following._examples import Examples
from gradstats.capture.rules._bilinear import BilinearFactors
from tests.rules.operation import check_operation, check_refused, normal

BATCH = 3


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("between", [(), (5,), (2, BATCH)], ids=str)
@pytest.mark.parametrize("sizes", [(4, 3, 2), (2, 3, 4), (1, 1, 1)], ids=str)
def test_bilinear(sizes, between, bias):
    layer = nn.Bilinear(*sizes, bias=bias)
    first, second = (normal(BATCH, *between, size) for size in sizes[:2])
    check_operation(lambda m, x, y: m.layer(x, y), {"layer": layer}, first, second)


def test_a_bias_of_several_axes_is_refused():
    """PyTorch asks that the first be as many as the results; each position has a row of it."""
    check_refused(
        lambda m, x, y: functional.bilinear(x, y, m.w, m.b),
        {"w": (2, 4, 5), "b": (2, 1, 2)},
        normal(3, 2, 3, 4),
        normal(3, 2, 3, 5),
        match="bilinear.*bias of several axes.*Add it to the result",
    )


def test_bilinear_of_one_input_and_used_twice():
    layer = nn.Bilinear(4, 4, 4)

    def function(m, x):
        y = m.layer(x, x).tanh()
        return m.layer(y, x)

    check_operation(function, {"layer": layer}, normal(BATCH, 5, 4))


def test_bilinear_with_positions_folded_or_moved():
    def function(m, x, y):
        rows = m.layer(x.flatten(0, 1), y.flatten(0, 1)).view(BATCH, 5, -1)
        return rows + m.layer(x.transpose(0, 1), y.transpose(0, 1)).transpose(0, 1)

    check_operation(
        function, {"layer": nn.Bilinear(4, 2, 3)}, normal(BATCH, 5, 4), normal(BATCH, 5, 2)
    )


def test_bilinear_of_examples_along_different_axes_is_refused():
    check_refused(
        lambda m, x: m.layer(x, x.transpose(0, 1)),
        {"layer": nn.Bilinear(4, 4, 3)},
        normal(BATCH, BATCH, 4),
        match="bilinear.*different axes",
    )
    for order in (1, -1):
        check_refused(
            lambda m, x, order=order: m.layer(*(x, m.queries.expand(BATCH, 4))[::order]),
            {"layer": nn.Bilinear(4, 4, 3), "queries": (4,)},
            normal(BATCH, 4),
            error=gs.UnsupportedOperationError,
            match="bilinear.*tracked input",
        )
    check_refused(
        lambda m, x: m.layer(x, x),
        {"layer": nn.Bilinear(4, 4, 3)},
        normal(4, 4),
        error=gs.ExampleAxisError,
        match="bilinear.*reduces over the last 1 of 2 axes.*the 4 examples.*number of examples is",
        batch_dim=1,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sizes", [(2, 3, 8), (4, 5, 3)], ids=str)
def test_pairs_of_low_precision_are_not_rounded(sizes, dtype):
    """Nor do those of large data overflow, where neither gradients nor PyTorch's results do."""
    torch.manual_seed(0)
    layer = nn.Bilinear(*sizes).to(dtype)
    x, y = (300 * torch.randn(BATCH, 20, size).to(dtype) for size in sizes[:2])
    slope = 1e-4 * torch.randn(sizes[2]).to(dtype)
    stats = gs.per_example_norms(layer, (x, y), lambda m, b: (m(*b).float() * slope).sum((1, 2)))
    gradients = torch.einsum("o,btp,btq->bopq", *(side.double() for side in (slope, x, y)))
    expected = gradients.square().sum((1, 2, 3))
    torch.testing.assert_close(stats.by_parameter["weight"].double(), expected, rtol=1e-5, atol=0)


def test_memory_is_not_that_of_a_gradient():
    """What is written out is a pair of operands, the smaller: never (B, d)."""
    layer = nn.Bilinear(6, 5, 300)
    x, y = torch.randn(BATCH, 6), torch.randn(BATCH, 5)
    factors = BilinearFactors(True, False, Examples(BATCH, 0), tuple(layer.weight.shape))
    (outer,) = factors(torch.randn(BATCH, 300), x, y)
    assert outer.left.numel() + outer.right.numel() == BATCH * (300 + 30)


def test_rows_of_the_weight_are_cut_from_factors_of_packed_examples():
    """There the gradient spans the rows: it is not multiplied with data, though it is smaller."""
    owner = torch.tensor([0, 0, 1])
    examples = Examples(2, 0, segments=Segments(owner, 2))
    factors = BilinearFactors(True, False, examples, (2, 3, 4))
    (factor,) = factors(normal(3, 2), normal(3, 3), normal(3, 4))
    assert torch.equal(factor.narrow(1, 2).dense(), factor.dense()[:, 1:])


def test_a_weight_that_was_computed_from_data_is_refused():
    for batch in (3, 1):
        check_refused(
            lambda m, x: functional.bilinear(m.layer(x), x, m.layer(x).expand(2, 3, 3), m.b),
            {"layer": nn.Linear(3, 3), "b": (2,)},
            normal(batch, 3),
            match="bilinear with a weight that was computed from data.*'b'",
        )
