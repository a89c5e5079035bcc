"""Tensors computed from parameters before they meet data, and parameters used more than once."""

import copy
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import gradstats as gs
from gradstats.capture.parameters import _lineage
from gradstats.capture.parameters._derivation import Derived
from gradstats.contractions import _dense
from tests.oracle import (
    assert_sqnorms,
    check_model,
    check_products,
    oracle_gradients,
    oracle_sqnorms,
)
from tests.rules.operation import Operation, check_operation, check_refused, normal, uneven_loss

BATCH, POSITIONS, WIDTH = 3, 5, 4


def mixed(rows, columns):
    """Return a constant matrix."""
    return torch.arange(rows * columns).double().sin().reshape(rows, columns)


# name: (shape of the parameter, what makes a (WIDTH, 2) matrix of it)
MATRICES = {
    "t": ((2, WIDTH), lambda w: w.t()),
    "T": ((2, WIDTH), lambda w: w.T),
    "mT": ((2, WIDTH), lambda w: w.mT),
    "transpose": ((2, WIDTH), lambda w: w.transpose(0, 1)),
    "transpose back": ((2, WIDTH), lambda w: w.transpose(-1, 0).transpose(1, -1)),
    "transpose of an axis with itself": ((WIDTH, 2), lambda w: w.transpose(0, -2)),
    "permute": ((2, WIDTH), lambda w: w.permute(1, 0)),
    "swapaxes": ((2, WIDTH), lambda w: w.swapaxes(0, 1)),
    "view": ((2 * WIDTH,), lambda w: w.view(WIDTH, 2)),
    "reshape": ((2, WIDTH), lambda w: w.reshape(WIDTH, -1)),
    "reshape of a transpose": ((2, WIDTH), lambda w: w.t().reshape(WIDTH, 2)),
    "flatten and unflatten": ((WIDTH, 2), lambda w: w.flatten().unflatten(0, (WIDTH, 2))),
    "squeeze": ((1, WIDTH, 2), lambda w: w.squeeze(0)),
    "select": ((3, WIDTH, 2), lambda w: w.select(0, 1)),
    "getitem": ((3, WIDTH, 2), lambda w: w[-1]),
    "slice": ((2 * WIDTH, 3), lambda w: w[::2, 1:]),
    "narrow": ((WIDTH, 5), lambda w: w.narrow(1, 2, 2)),
    "index with repetition": ((3, 2), lambda w: w[torch.tensor([0, 2, 2, 1])]),
    "list with repetition": ((3, 2), lambda w: w[[0, 2, 2, 1]]),
    "tuple with repetition": ((3, 2), lambda w: w[(0, 2, 2, 1), :]),
    "array with repetition": ((3, 2), lambda w: w[np.array([0, 2, 2, 1])]),
    "array of truth values": ((5, 2), lambda w: w[np.arange(5) != 2]),
    "number of an array": ((3, WIDTH, 2), lambda w: w[np.arange(3)[1]]),
    "chunk": ((WIDTH, 6), lambda w: w.chunk(3, dim=1)[1]),
    "split": ((WIDTH, 5), lambda w: w.split([3, 2], 1)[1]),
    "unbind": ((WIDTH, 3, 2), lambda w: w.unbind(1)[2]),
    "two chunks": ((WIDTH, 4), lambda w: w.chunk(2, 1)[0] + 2 * w.chunk(2, 1)[1]),
    "1 + w": ((WIDTH, 2), lambda w: 1 + w),
    "1 - w": ((WIDTH, 2), lambda w: 1 - w),
    "chunk of a sum": ((WIDTH, 4), lambda w: (w + mixed(WIDTH, 4)).chunk(2, 1)[1]),
    "chunk of a sum with itself": ((WIDTH, 4), lambda w: (w + w.exp()).chunk(2, 1)[0]),
    "chunk of a multiple added": (
        (WIDTH, 4),
        lambda w: torch.add(mixed(WIDTH, 4), w, alpha=3).chunk(2, 1)[0],
    ),
    "chunk of a row added to all": ((1, 4), lambda w: (mixed(WIDTH, 4) + w).chunk(2, 1)[1]),
    "exp": ((WIDTH, 2), lambda w: w.exp()),
    "-exp": ((WIDTH, 2), lambda w: -torch.exp(w)),
    "softplus": ((WIDTH, 2), functional.softplus),
    "softmax": ((WIDTH, 2), lambda w: w.softmax(0)),
    "w * w": ((WIDTH, 2), lambda w: w * w),
    "norm": ((WIDTH, 2), lambda w: w / w.norm(dim=0, keepdim=True)),
    "to": ((WIDTH, 2), lambda w: w.to(w.device, w.dtype, copy=True)),
    "clone": ((WIDTH, 2), lambda w: w.clone().contiguous()),
    "expand": ((WIDTH, 1), lambda w: w.expand(WIDTH, 2)),
    "expand of a vector": ((2,), lambda w: w.expand(WIDTH, 2)),
    "expand of one number for each": ((2, 1, 1), lambda w: w.expand(2, WIDTH, 2)[1]),
    "expand along two axes": ((1, 1, 2), lambda w: w.expand(WIDTH, 3, 2)[:, 1]),
    "repeat": ((1, 2), lambda w: w.repeat(WIDTH, 1)),
    "cat": ((2, 2), lambda w: torch.cat([w, w.exp()])),
    "mask": ((WIDTH, 2), lambda w: w * torch.ones(WIDTH, 2).double().tril()),
    "triangle": ((WIDTH, 2), lambda w: w.tril()),
    "outer": ((WIDTH,), lambda w: w[:, None] * w[None, :2]),
    "product with itself": ((WIDTH, WIDTH), lambda w: (w @ w.T)[:, :2]),
    "product with its own": ((WIDTH, WIDTH), lambda w: w @ w[:, :2]),
    "product with a matrix": ((WIDTH, 2), lambda w: w @ mixed(2, 2)),
    "product with a wider matrix": ((WIDTH, 3), lambda w: torch.mm(w, mixed(3, 2))),
    "matrix times it": ((3, 2), lambda w: torch.matmul(mixed(WIDTH, 3), w)),
    "product of a transpose": ((2, WIDTH), lambda w: w.T.matmul(mixed(2, 2))),
    "transpose of a product": ((3, WIDTH), lambda w: mixed(2, 3).mm(w).T),
    "chain of products": ((3, 2), lambda w: mixed(WIDTH, 3) @ (3 * (w @ mixed(2, 2)) / 7)),
    "product with a vector": ((WIDTH, 3), lambda w: (w @ mixed(3, 1)).expand(-1, 2)),
    "multiple": ((WIDTH, 2), lambda w: 0.7 * w),
    "multiple of a reshape": ((WIDTH, 2), lambda w: (-2.5 * w.reshape(WIDTH, 2)).view(WIDTH, 2)),
    "fraction": ((WIDTH, 2), lambda w: w / torch.tensor([[3.0]]).double()),
    "number over it": ((WIDTH, 2), lambda w: 3 / w),
    "clamp": ((WIDTH, 2), lambda w: w.clamp(-0.3, 0.6)),
    "functions of functions": ((WIDTH, 2), lambda w: torch.sigmoid(w.exp() ** 0.5).square()),
    "where": ((WIDTH, 2), lambda w: torch.where(mixed(WIDTH, 2) > 0, w, -w.detach())),
    "function of a transpose": ((2, WIDTH), lambda w: functional.softplus(w.T)),
    "mask of a function": ((2, WIDTH), lambda w: (mixed(2, WIDTH) * w.exp()).T * mixed(WIDTH, 1)),
    "product of a function": ((WIDTH, 3), lambda w: w.tanh() @ mixed(3, 2)),
    "scaled rows": ((WIDTH, 2), lambda w: mixed(WIDTH, 1) * w),
    "scaled columns": ((WIDTH, 2), lambda w: w * mixed(1, 2)),
    "divided columns": ((WIDTH, 2), lambda w: w / (2 + mixed(1, 2)[0])),
    "masked and scaled": ((WIDTH, 2), lambda w: (w * mixed(WIDTH, 2)) * mixed(WIDTH, 1)),
    "masked transpose": ((2, WIDTH), lambda w: (w * mixed(2, WIDTH)).T),
    "rows of a constant": ((WIDTH, 1), lambda w: w * mixed(WIDTH, 2)),
    "columns of a constant": ((2,), lambda w: mixed(WIDTH, 2) * w),
    "one number times a constant": ((1, 1), lambda w: mixed(WIDTH, 2) * w),
    "a scalar times a constant": ((), lambda w: mixed(WIDTH, 2) * w),
    "permuted table": (
        (3, 5),
        lambda w: w[torch.tensor([[0, 2], [2, -1]])].permute(2, 0, 1)[:4, 1],
    ),
    "kronecker product": ((2, 1), lambda w: torch.kron(w, mixed(2, 2))),
    "kronecker product of functions": ((1, 2), lambda w: mixed(4, 1).kron(w.exp()).tanh()),
    "kronecker product of vectors": ((2,), lambda w: torch.kron(w, mixed(4, 1)[:, 0]).view(4, 2)),
    "kronecker product of itself": ((2, 1), lambda w: torch.kron(w, w) @ mixed(1, 2)),
    "kronecker product of stacks": ((1, 2, 1), lambda w: torch.kron(w, mixed(2, 2)[None])[0]),
    "sparse matrix times a vector": (
        (3,),
        lambda w: torch.mv(mixed(WIDTH * 2, 3).to_sparse(), w).view(WIDTH, 2),
    ),
    "larger of a constant": ((WIDTH, 2), lambda w: torch.max(w, mixed(WIDTH, 2))),
    "determinants of a stack": ((WIDTH, 2, 2, 2), torch.linalg.det),
    "largest along a middle axis": ((WIDTH, 3, 2), lambda w: w.amax(1)),
    "one number each": ((1, 1), lambda w: (w * 3 / 7).expand(WIDTH, 2)),
    "multiple added": ((WIDTH, 2), lambda w: torch.add(mixed(WIDTH, 2), w, alpha=3)),
    "added to a multiple": ((WIDTH, 2), lambda w: w.add(mixed(WIDTH, 2), alpha=3)),
    "rounded fraction": ((WIDTH, 2), lambda w: w + torch.div(w, 0.3, rounding_mode="floor")),
    "stack of matrices times it": ((3,), lambda w: mixed(WIDTH * 2, 3).view(WIDTH, 2, 3) @ w),
}
LONG = {
    # The ways back to the parameter double with every step.
    "orthonormal": ((WIDTH, 2), lambda w: repeated(lambda m: 1.5 * m - m @ m.T @ m / 2, w / 4, 50)),
    # More steps than Python's stack is deep.
    "400 sines": ((WIDTH, 2), lambda w: repeated(lambda m: 1.001 * torch.sin(m), w, 400)),
}


# Constants that bfloat16 rounds to ones, each multiplied by a parameter of whole numbers.
ROUNDED = torch.full((WIDTH, WIDTH), 1 + 2**-9)


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: x @ (m.w @ ROUNDED),
        lambda m, x: x @ (ROUNDED @ m.w),
        lambda m, x: x * (m.w @ ROUNDED[0]),
        lambda m, x: x * (ROUNDED @ m.w[0]),
        lambda m, x: x * (ROUNDED[0] @ m.w),
        lambda m, x: (x[:, None] * functional.linear(ROUNDED, m.w)).sum(1),
        lambda m, x: (x[:, None] * functional.linear(m.w, ROUNDED)).sum(1),
    ],
)
def test_products_with_constants_that_autocast_rounds(function):
    model = Operation(function, {"w": torch.randint(-1, 2, (WIDTH, WIDTH))}, upstream=False).float()
    x, scale = torch.randint(-1, 2, (BATCH, WIDTH)).float(), torch.tensor([1.0, -2.0, 4.0, 1.0])

    def loss(model, x):
        with torch.autocast("cpu", torch.bfloat16):
            return (model(x).float() * scale).sum(1)

    got = gs.per_example_norms(model, x, loss).by_parameter["w"]
    for row, sqnorm in zip(x, got, strict=True):
        (gradient,) = torch.autograd.grad(loss(model, row[None]).sum(), model.w)
        assert gradient.square().sum().item() == pytest.approx(sqnorm.item(), rel=1e-6)


@pytest.mark.parametrize(
    ("function", "kept"),
    [
        (
            lambda m, x: (x @ m.w[:12].T).square() + x @ m.w[12:].T,
            lambda w: torch.cat([w, w, w])[2 * len(w) :],
        ),
        (lambda m, x: x[:, 12:] @ m.w[12:, :1], lambda w: w.t().contiguous().t()),
    ],
    ids=["in a larger tensor", "by columns"],
)
def test_pieces_of_weights_that_two_models_keep_in_memory_differently(function, kept):
    width = 24  # so that gradients take more memory than their factors
    model = Operation(function, {"w": (width, width)}, upstream=False)
    other = Operation(function, {"w": kept(normal(width, width))}, upstream=False)
    batch, theirs = (normal(BATCH, width),), (normal(BATCH + 1, width),)
    one = oracle_gradients(model, batch, uneven_loss)["w"].flatten(1)
    two = oracle_gradients(other, theirs, uneven_loss)["w"].flatten(1)
    got = gs.inner_products(model, batch, other, theirs, uneven_loss)
    torch.testing.assert_close(got, one @ two.T)


def repeated(function, value, times):
    for _ in range(times):
        value = function(value)
    return value


def part_changed_by_name(w):
    whole = w.T.clone()
    torch.select(input=whole, dim=0, index=1).mul_(2)
    return whole


BY_NAME = {
    "transpose": lambda w: torch.transpose(input=w, dim0=0, dim1=1),
    "permute": lambda w: torch.permute(dims=(1, 0), input=w),
    "movedim": lambda w: torch.movedim(input=w, source=0, destination=1),
    "t": lambda w: torch.t(input=w.exp()),
    "product": lambda w: torch.matmul(other=w.T, input=mixed(WIDTH, WIDTH)),
    "quotient": lambda w: torch.div(other=w.T + 9, input=w.T),
    "where": lambda w: torch.where(other=w.T, input=2 * w.T, condition=mixed(WIDTH, 2) > 0),
    "embedding": lambda w: torch.embedding(indices=torch.arange(WIDTH), weight=w.T),
    "changed": lambda w: torch.relu_(input=w.T.clone()),
    "a part changed": part_changed_by_name,
}


@pytest.mark.parametrize("make", BY_NAME.values(), ids=BY_NAME)
def test_operands_by_name(make):
    x = normal(BATCH, POSITIONS, WIDTH)
    check_operation(lambda m, x: x @ make(m.w), {"w": (2, WIDTH)}, x)


SAME_TWICE = {
    "type": lambda w: w.contiguous().type_as(w),
    "type and device": lambda w: w.double().to(w),
    "copy": lambda w: w.double().to(w, copy=True),
    "view": lambda w: w.contiguous().view_as(w),
    "reshape": lambda w: (lambda made: made.double().reshape_as(made))(w.exp()),
    "expansion": lambda w: w.contiguous().expand_as(w),
}


@pytest.mark.parametrize("make", SAME_TWICE.values(), ids=SAME_TWICE)
def test_an_operand_beside_itself_that_gives_its_type_or_shape_alone(make):
    """Calls that return their operand make a tensor that autograd does not tell from it."""
    x = normal(BATCH, POSITIONS, WIDTH)
    check_operation(lambda m, x: x @ make(m.w), {"w": (WIDTH, 2)}, x)
    check_operation(lambda m, x: x * make(m.w), {"w": (WIDTH,)}, x)


@pytest.mark.parametrize("case", MATRICES.values(), ids=MATRICES)
def test_matrices(case):
    shape, make = case
    check_operation(lambda m, x: x @ make(m.w), {"w": shape}, normal(BATCH, POSITIONS, WIDTH))
    # Beside data and times data: the same tensor through the rules for broadcasting.
    check_operation(lambda m, x: x * make(m.w) - make(m.w), {"w": shape}, normal(BATCH, WIDTH, 2))
    # Beside another use, which elements of the parameter met the data counts, not their norm alone.
    check_operation(
        lambda m, x: x @ make(m.w) + x[..., :1] * m.w.flatten()[:2],
        {"w": shape},
        normal(BATCH, POSITIONS, WIDTH),
    )


@pytest.mark.parametrize("case", LONG.values(), ids=LONG)
def test_long_ways_back(case):
    shape, make = case
    x = normal(BATCH, POSITIONS, WIDTH)
    check_operation(lambda m, x: x @ make(m.w), {"w": shape}, x)


CASTS = {
    "float": lambda w: w.float().double(),
    "to": lambda w: w.to(torch.float32).to(w.dtype),
    "type_as": lambda w: w.float().type_as(w),
    "to of a tensor": lambda w: w.to(torch.zeros(1)).to(w),
    "type": lambda w: w.type(torch.float32).type(torch.float64),
}


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
def test_casts(cast):
    # The cast rounds the whole batch's gradient to float32, one example's only in the oracle.
    x = normal(BATCH, POSITIONS, WIDTH)
    tolerances = {"rtol": 1e-6, "gradient_rtol": 1e-6}
    check_operation(lambda m, x: x @ cast(m.w), {"w": (WIDTH, 2)}, x, **tolerances)
    check_operation(lambda m, x: x * cast(m.w), {"w": (POSITIONS, WIDTH)}, x, **tolerances)


@pytest.mark.parametrize("case", [*MATRICES.values(), *LONG.values()], ids=[*MATRICES, *LONG])
def test_matrices_with_a_tiny_workspace(case):
    shape, make = case
    model = Operation(lambda m, x: x @ make(m.w), {"w": shape}, upstream=False)
    x = normal(BATCH, POSITIONS, WIDTH)
    whole = gs.per_example_norms(model, (x,), uneven_loss)
    tiny = gs.per_example_norms(model, (x,), uneven_loss, workspace=1)
    torch.testing.assert_close(tiny.sqnorm, whole.sqnorm, rtol=1e-12, atol=0)


@settings(max_examples=25)
@given(st.data())
def test_chain_of_derivations_sweep(data):
    """Views, casts and functions in any order, then a product or a sum with data."""
    steps = data.draw(
        st.lists(
            st.sampled_from(["t", "permute", "exp", "view", "clone", "slice", "twice", "expand"]),
            max_size=4,
        )
    )
    product = data.draw(st.booleans())

    def make(w):
        for step in steps:
            w = {
                "t": lambda w: w.t(),
                "permute": lambda w: w.permute(1, 0),
                "exp": lambda w: (w / 4).exp(),
                "view": lambda w: w.reshape(w.shape[1], w.shape[0]),
                "clone": lambda w: w.clone(),
                "slice": lambda w: w[:, : max(1, w.shape[1] - 1)],
                "twice": lambda w: w + 0.5 * w.flip(0),
                "expand": lambda w: w[:, None].expand(-1, 2, -1).flatten(0, 1)[: w.shape[0]],
            }[step](w)
        return w

    rows, columns = make(torch.zeros(WIDTH, 3)).shape
    if product:
        x = normal(BATCH, POSITIONS, rows)
        check_operation(lambda m, x: x @ make(m.w), {"w": (WIDTH, 3)}, x)
    else:
        x = normal(BATCH, rows, columns)
        check_operation(lambda m, x: x * make(m.w), {"w": (WIDTH, 3)}, x)


@pytest.mark.parametrize("positions", [BATCH, POSITIONS], ids=["T == B", "T != B"])
@pytest.mark.parametrize(
    "ids",
    [
        lambda x: torch.arange(x.shape[1]),
        lambda x: torch.arange(x.shape[1]).unsqueeze(0),
        lambda x: torch.arange(x.shape[1], device=x.device).expand(1, -1),
        lambda x: torch.arange(7)[None, : x.shape[1]],
        lambda x: torch.arange(x.shape[1]).expand(x.shape[0], -1),
        lambda x: torch.arange(x.shape[1]) // 2,
        lambda x: torch.full((x.shape[1],), 2),
    ],
    ids=["(T,)", "(1, T)", "expand", "buffer", "(B, T)", "repeated", "the same"],
)
def test_position_embedding(ids, positions):
    parameters = {"table": nn.Embedding(7, WIDTH)}
    x = normal(BATCH, positions, WIDTH)
    check_operation(lambda m, x: x + m.table(ids(x)), parameters, x)
    check_operation(lambda m, x: m.table(ids(x)) * x, parameters, x)


@pytest.mark.parametrize("turn", ["t", "transpose", "permute", "swapaxes", "movedim"])
def test_axes_in_another_order_form_no_gradients(turn, monkeypatch):
    monkeypatch.setattr(_lineage, "sqnorms_together", None)
    order = {"t": (), "permute": ((1, 0),)}.get(turn, (0, 1))
    model = Operation(lambda m, x: x @ getattr(m.w.tanh(), turn)(*order), {"w": (6, 4)}, False)
    gs.per_example_norms(model, (normal(BATCH, 4),), uneven_loss)


@pytest.mark.parametrize(
    ("shapes", "make"),
    [
        ({"w": (24,)}, lambda m: m.w.tanh().view(4, 6)),
        ({"w": (2, 12)}, lambda m: (m.w.exp() * mixed(2, 12)).reshape(4, 6)),
        ({"w": (2, 12)}, lambda m: functional.normalize(m.w.view(6, 4)).T),
        ({"w": (4, 2), "v": (6, 2)}, lambda m: functional.linear(m.w, m.v)),
        ({"w": (6, 3), "v": (4, 3)}, lambda m: functional.linear(m.v.tanh(), m.w, mixed(1, 6)[0])),
        ({"w": (4, 6), "v": (4, 6)}, lambda m: m.w * (2 + torch.dist(m.w, m.v))),
        ({"w": (6, 4)}, lambda m: m.w.exp().moveaxis(0, 1)),
        ({"w": (24,)}, lambda m: m.w.exp().unflatten(0, (4, 6))),
    ],
)
def test_other_matrices_form_no_gradients(shapes, make, monkeypatch):
    x = normal(BATCH, 4)
    check_operation(lambda m, x: x @ make(m), shapes, x)
    monkeypatch.setattr(_lineage, "sqnorms_together", None)
    model = Operation(lambda m, x: x @ make(m), shapes, False)
    gs.per_example_norms(model, (x,), uneven_loss)


def test_positions_picked_by_truth_values():
    def function(m, x):
        return x * m.w[torch.ones(POSITIONS).bool()]

    check_operation(function, {"w": (POSITIONS, WIDTH)}, normal(BATCH, POSITIONS, WIDTH))


def test_a_number_for_each_example_expanded_to_all_positions():
    x = normal(BATCH, POSITIONS, WIDTH)
    for axes in ((BATCH, 1), (1, BATCH, 1)):
        check_operation(
            lambda m, x, axes=axes: (x.sum(2) * m.w.expand(*axes[:-1], POSITIONS)).reshape(
                x.shape[:2]
            ),
            {"w": axes},
            x,
        )


def test_position_embedding_with_padding_and_with_registered_ids():
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(7, WIDTH, padding_idx=1)
            self.register_buffer("ids", torch.arange(7)[None])

        def forward(self, x):
            return x + self.table(self.ids[:, : x.shape[1]])

    for positions in (BATCH, POSITIONS):
        x = normal(BATCH, positions, WIDTH)
        check_operation(lambda m, x: m.layer(x), {"layer": Positions()}, x)


@pytest.mark.parametrize("options", [(1,), (-1, True)], ids=["padding", "by frequency"])
def test_positions_looked_up_by_an_operator(options):
    """As in exported programs, which give the options by place."""

    def function(m, x):
        ids = torch.arange(x.shape[1]) // 2 % 4
        return x + torch.ops.aten.embedding(m.w, ids, *options)

    for positions in (BATCH, 3 * POSITIONS):
        check_operation(function, {"w": (4, WIDTH)}, normal(BATCH, positions, WIDTH))


def test_positions_whose_gradients_are_divided_by_how_often_they_occur():
    table = nn.Embedding(7, WIDTH, scale_grad_by_freq=True)
    check_operation(
        lambda m, x: x + m.table(torch.arange(x.shape[1]) // 2),
        {"table": table},
        normal(BATCH, POSITIONS, WIDTH),
    )


@pytest.mark.parametrize("padding", [1, -2])
def test_more_positions_than_rows_of_a_table_with_padding(padding):
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(4, WIDTH, padding_idx=padding)
            self.register_buffer("ids", torch.arange(3 * POSITIONS) % 4)

        def forward(self, x):
            return x + self.table(self.ids)

    check_operation(lambda m, x: m.layer(x), {"layer": Positions()}, normal(BATCH, 15, WIDTH))


def test_position_table_indexed_and_sliced():
    x = normal(BATCH, BATCH, WIDTH)
    check_operation(lambda m, x: x + m.w[torch.arange(x.shape[1])], {"w": (7, WIDTH)}, x)
    check_operation(lambda m, x: x + m.w[: x.shape[1]], {"w": (7, WIDTH)}, x)
    check_operation(lambda m, x: x + m.w[:, : x.shape[1]], {"w": (1, 7, WIDTH)}, x)


SEVERAL = {
    "product element by element": lambda m: m.v * m.w,
    "rows scaled by another": lambda m: m.v[:, :1] * m.w,
    "magnitudes beside directions": lambda m: m.v[:, :1] * (m.w / m.w.norm(dim=1, keepdim=True)),
    "detached norms": lambda m: m.v[:1] * m.w / m.w.norm(dim=1, keepdim=True).detach(),
    "sum of products": lambda m: m.v + (m.w @ m.w.T @ m.v) / 3,
    "difference, by NumPy's names": lambda m: torch.sub(x1=m.v, x2=m.w[:, :1]),
    "difference, by other names": lambda m: torch.rsub(other=m.v, a=m.w[:, :1]),
    "quotient": lambda m: m.v / (3 + m.w),
    "choice": lambda m: torch.where(m.v > 0, m.v, m.w),
    "power": lambda m: (1 + m.v.square()) ** m.w,
    "interpolation": lambda m: torch.lerp(m.v, m.w, 0.3),
    "weight norm": lambda m: torch._weight_norm(m.v, m.w[:, :1], 0),
    "kronecker product": lambda m: torch.kron(m.v[:2, :1], m.w[:2].exp()),
}


@pytest.mark.parametrize("make", SEVERAL.values(), ids=SEVERAL)
@pytest.mark.parametrize(
    ("shape", "options"),
    [((BATCH, WIDTH), {}), ((BATCH, POSITIONS, WIDTH), {"workspace": 1})],
    ids=str,
)
def test_matrices_of_two_parameters(make, shape, options):
    parameters = {"v": (WIDTH, 3), "w": (WIDTH, 3)}
    check_operation(lambda m, x: x @ make(m), parameters, normal(*shape), **options)


def test_masks_of_gradients_of_any_size():
    """One position: the squares that are multiplied must neither vanish nor overflow."""
    torch.manual_seed(0)
    weight, mask = nn.Parameter(torch.randn(6, 8)), (torch.rand(6, 8) > 0.5).float()
    x = torch.randn(5, 8) * torch.tensor([[1e-18], [1e-9], [0], [1], [1e12]])

    def loss(model, batch):
        inputs, scale = batch
        return functional.linear(inputs, model.weight * model.mask).sum(1) * scale

    model = nn.Module()
    model.weight = weight
    model.register_buffer("mask", mask)
    scale = torch.tensor([1e-10, 1e-18, 1, 1, 1e6])
    got = gs.per_example_norms(model, (x, scale), loss).norm
    expected = (mask.double() * (x * 1.0).double()[:, None]).flatten(1).norm(dim=1) * scale.double()
    torch.testing.assert_close(got.double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "derive",
    [
        lambda w, v: w.type_as(v),
        lambda w, v: w.to(v),
        lambda w, v: w.expand_as(v).exp(),
        lambda w, v: w * torch.zeros_like(v) + w.sum_to_size(v.shape),
        lambda w, v: torch.where(v > 0, w, 2 * w),
    ],
    ids=["type_as", "to", "expand_as", "zeros_like", "where"],
)
def test_operands_that_give_no_numbers(derive):
    parameters = {"w": (WIDTH, 3), "v": (WIDTH, 3)}
    x = normal(BATCH, POSITIONS, WIDTH)
    check_operation(lambda m, x: x @ derive(m.w, m.v) + x @ m.v, parameters, x)


def test_low_rank_adaptation():
    def function(m, x):
        return functional.linear(x, m.w + 0.5 * (m.b @ m.a))

    parameters = {"w": (3, WIDTH), "a": (2, WIDTH), "b": (3, 2)}
    check_operation(function, parameters, normal(BATCH, POSITIONS, WIDTH))

    def scaled(m, x):
        return functional.linear(x, (m.w + (m.a.T @ m.b.T).T / m.s).view(3, WIDTH))

    check_operation(scaled, {**parameters, "s": ()}, normal(BATCH, POSITIONS, WIDTH))

    def beside(m, x):
        return functional.linear(x, m.w) + functional.linear(functional.linear(x, m.a), m.b)

    check_operation(beside, parameters, normal(BATCH, POSITIONS, WIDTH))


@pytest.mark.parametrize(
    "layer, shape",
    [
        (nn.Linear(WIDTH, 3), (BATCH, POSITIONS, WIDTH)),
        (nn.Conv1d(WIDTH, 3, 2), (BATCH, WIDTH, POSITIONS)),
        (nn.ConvTranspose1d(WIDTH, 3, 2), (BATCH, WIDTH, POSITIONS)),
    ],
    ids=str,
)
def test_weight_norm(layer, shape):
    layer = parametrizations.weight_norm(layer)
    check_operation(lambda m, x: m.layer(x), {"layer": layer}, normal(*shape))


def test_spectral_norm_and_orthogonal_in_evaluation():
    for wrap in (parametrizations.spectral_norm, parametrizations.orthogonal):
        layer = wrap(nn.Linear(WIDTH, WIDTH, bias=False)).double().eval()
        check_operation(lambda m, x: m.layer(x), {"layer": layer}, normal(BATCH, WIDTH))


@pytest.mark.parametrize("wrap", [parametrizations.weight_norm, parametrizations.orthogonal])
def test_parametrization_that_is_cached(wrap):
    layer = wrap(nn.Linear(WIDTH, WIDTH))

    def function(m, x):
        with parametrize.cached():
            return m.layer(m.layer(m.layer(x).tanh()).tanh() + x)

    check_operation(function, {"layer": layer}, normal(BATCH, WIDTH))


# what makes two (WIDTH, WIDTH) weights of (2, WIDTH, WIDTH)
PARTS = {
    "unbind": lambda w: w.unbind(),
    "split": lambda w: [part.view(WIDTH, WIDTH) for part in w.flatten().split(WIDTH**2)],
    "index": lambda w: (w[1], w.transpose(1, 2)[0]),
    "overlapping": lambda w: (w.flatten()[: WIDTH**2].view(WIDTH, WIDTH), w[:, 1:3].flatten(0, 1)),
    "the whole": lambda w: (w[0], w.sum(0) + w[1], w.view(2 * WIDTH, WIDTH)[WIDTH:]),
    "a cast": lambda w: (w[0].to(torch.complex128).real, w[1]),
    "twice": lambda w: (w[0], w[0], w[1, 1:3].repeat(2, 1)),
}


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("options", [{}, {"workspace": 1}], ids=str)
def test_parts_of_what_a_network_made(parts, options):
    def function(m, x, apart):
        # Further uses of either parameter, before the parts are used and after it.
        x = x * m.v[:, :1] if apart == "v" else x * m.w[0, :WIDTH] if apart == "w" else x
        made = parts((m.v.tanh() @ m.w).view(2, WIDTH, WIDTH).sin())
        for number, weight in enumerate(made):
            x = functional.linear(x, weight).tanh()
            x = x * m.w.cumsum(1)[0, :WIDTH] if (apart, number) == ("between", 0) else x
        return x * m.w.mean() if apart == "mean" else x

    shapes = {"v": (1, 3), "w": (3, 2 * WIDTH**2)}
    for apart in (None, "v", "w", "mean", "between"):
        used = partial(function, apart=apart)
        check_operation(used, shapes, normal(BATCH, POSITIONS, WIDTH), **options)


def test_parts_of_what_a_network_made_in_another_precision():
    def function(m, x):
        for weight in (m.v.tanh() @ m.w).view(2, WIDTH, WIDTH).sin().float().unbind():
            x = functional.linear(x.float(), weight).tanh()
        return x.double()

    model = Operation(function, {"v": (1, 3), "w": (3, 2 * WIDTH**2)}, upstream=False)
    batch = (normal(BATCH, WIDTH),)
    expected = oracle_sqnorms(model, batch, uneven_loss)
    assert_sqnorms(gs.per_example_norms(model, batch, uneven_loss), expected, 1e-5)


@pytest.fixture
def replayed(monkeypatch):
    """The derived tensors that have been computed again from their parameters."""
    found, replay_from = [], Derived.replay_from
    monkeypatch.setattr(
        Derived, "replay_from", lambda *args: found.append(args[0]) or replay_from(*args)
    )
    return found


@pytest.mark.parametrize("parts", [5, 250])
def test_parts_of_one_derived_tensor_are_pulled_back_together(replayed, parts):
    def function(m, x):
        for weight in (m.v.tanh() @ m.w).view(-1, WIDTH, WIDTH):
            x = functional.linear(x, weight).tanh() + x
        return x

    model = Operation(function, {"v": (1, 3), "w": (3, parts * WIDTH**2)}, upstream=False)
    with torch.no_grad():
        model.w.mul_(0.1)
    batch = (normal(BATCH, WIDTH),)
    expected = oracle_sqnorms(model, batch, uneven_loss)
    assert_sqnorms(gs.per_example_norms(model, batch, uneven_loss), expected, 1e-9)
    assert len(replayed) == 1


def test_uses_of_one_derived_tensor_are_pulled_back_together(replayed):
    def function(m, x):
        weight = torch.matrix_exp(m.w)
        for _ in range(5):
            x = (x @ weight).tanh()
        return x

    model = Operation(function, {"w": (WIDTH, WIDTH)}, upstream=False)
    gs.per_example_norms(model, (normal(BATCH, WIDTH),), uneven_loss)
    assert len(replayed) == 1


def test_under_anomaly_detection():
    """Some libraries turn it on for good."""

    def function(m, x):
        positions = torch.arange(POSITIONS).expand(x.shape[:2])
        return functional.linear(x + functional.embedding(positions, m.table), m.w.exp())

    parameters = {"table": (POSITIONS, WIDTH), "w": (2, WIDTH)}
    with torch.autograd.set_detect_anomaly(True):
        check_operation(function, parameters, normal(BATCH, POSITIONS, WIDTH))


def test_pruning_mask():
    def function(m, x):
        mask = torch.tensor([[1.0, 0.0, 1.0, 1.0], [0.0, 1.0, 0.0, 1.0]]).double()
        return functional.linear(x, m.w * mask)

    check_operation(function, {"w": (2, WIDTH)}, normal(BATCH, WIDTH))


def test_state_space_decay():
    # Mamba: A = -exp(A_log), discretised with a step that depends on the data.
    def function(m, x):
        step = functional.softplus(m.step(x))
        decay = torch.exp(step.unsqueeze(-1) * -torch.exp(m.log_decay))
        return (decay * x.unsqueeze(-1)).sum(-1) + x * m.skip

    parameters = {
        "step": nn.Linear(WIDTH, WIDTH),
        "log_decay": (WIDTH, 3),
        "skip": (WIDTH,),
    }
    check_operation(function, parameters, normal(BATCH, POSITIONS, WIDTH))


def test_a_parameter_through_random_operations_is_refused_or_exact():
    # What draws anew when it is computed again must not go unnoticed.
    check_refused(
        lambda m, x: x @ m.layers(m.w)[0],
        {"w": (WIDTH, WIDTH), "layers": nn.LSTM(WIDTH, WIDTH, 2, dropout=0.5)},
        normal(BATCH, WIDTH),
        match="derived by .*'w'.*random",
    )


def signed(w):
    w.data = w.data.sign()
    return w


@pytest.mark.parametrize(
    "derive", [torch.clone, torch.t, lambda w: 1.5 * w], ids=["clone", "transpose", "multiple"]
)
def test_other_numbers_under_the_same_gradient(derive):
    """Binary weights as older code has them: the forward computed with the numbers before."""
    shape = (4, 5) if derive is torch.t else (5, 4)
    check_operation(lambda m, x: x @ signed(derive(m.w)), {"w": shape}, normal(BATCH, 3, 5))
    # What is computed from the other numbers has its slopes there.
    check_operation(lambda m, x: x @ signed(derive(m.w)).exp(), {"w": shape}, normal(BATCH, 3, 5))


@pytest.mark.parametrize("operation", [torch.matmul, torch.mul], ids=["product", "multiple"])
def test_a_constant_that_changed_since_it_met_a_parameter_is_refused(operation):
    def function(m, x):
        constant = torch.ones((5, 5) if operation is torch.matmul else ()).double()
        weight = operation(constant, m.w)
        constant.data = constant.data + 1
        return x @ weight

    check_refused(
        function,
        {"w": (5, 4)},
        normal(BATCH, 5),
        match=r"(mat)?mul.*'w'.*cannot be computed again with the same result",
    )


@pytest.mark.parametrize("trained", [False, True], ids=["constant", "parameter"])
@pytest.mark.parametrize("added", [False, True], ids=["product", "weight"])
def test_what_changed_since_its_product_with_zeros_is_refused(added, trained):
    """As low-rank updates start: the product is the same as before."""

    def function(m, x):
        down = m.down if trained else torch.ones(2, 5).double()
        weight = m.up @ down
        if added:
            weight = torch.eye(5).double() + weight
        with torch.no_grad():
            down.mul_(2)
        return x @ weight

    up = nn.Parameter(torch.zeros(5, 2).double())
    check_refused(
        function,
        {"up": up, "down": (2, 5)} if trained else {"up": up},
        normal(BATCH, 5),
        match="'up'.*cannot be computed again with the same result",
    )


@pytest.mark.parametrize(
    ("derive", "overwrite"),
    [
        (torch.square, torch.neg_),
        (torch.abs, torch.neg_),
        (lambda w: w * w, torch.neg_),
        (torch.max, lambda w: w.copy_(w.flip(0))),
    ],
    ids=["square", "abs", "times itself", "largest"],
)
def test_a_parameter_overwritten_after_what_does_not_show_it_is_refused(derive, overwrite):
    def function(m, x):
        result = x * derive(m.w)
        with torch.no_grad():
            overwrite(m.w)
        return result

    check_refused(
        function,
        {"w": (5,)},
        normal(BATCH, 5),
        match="'w'.*cannot be computed again with the same result",
    )


@pytest.mark.parametrize(
    "derive",
    [
        lambda w: torch.cat([w, w]).clone(),
        lambda w: w.double().unsqueeze(0).flatten() + 1,
    ],
    ids=["joined", "reshaped"],
)
def test_a_parameter_written_anew_with_the_same_numbers_is_served(derive):
    def function(m, x):
        weight = derive(m.w)
        with torch.no_grad():
            m.w.copy_(m.w.clone())
        return x * (1 + weight.cumsum(0)[:5])

    model, batch = Operation(function, {"w": (5,)}, False), (normal(BATCH, 5),)
    stats = gs.per_example_norms(model, batch, uneven_loss)
    assert_sqnorms(stats, oracle_sqnorms(model, batch, uneven_loss), 1e-12)


@pytest.mark.parametrize(
    ("make", "fill", "constant"),
    [
        (lambda w, k: w[:5] / k, 0.0, lambda: torch.ones(5).double()),
        (
            lambda w, k: functional.conv1d(w[None, None], k[None, None]),
            0.0,
            lambda: torch.ones(5).double(),
        ),
        (lambda w, k: torch.where(k, w[:5], 0), 0.0, lambda: torch.arange(5) > 2),
        (lambda w, k: w[k], 1.0, lambda: torch.arange(5)),
        (lambda w, k: w.gather(0, k), 1.0, lambda: torch.arange(5)),
        (lambda w, k: torch.atan2(w[:5], k), 0.0, lambda: torch.ones(5).double()),
    ],
    ids=["quotient", "convolution", "mask", "index", "gather", "angle"],
)
def test_what_changed_where_a_parameter_does_not_show_it_is_refused(make, fill, constant):
    """As parameters of zeros or ones start: the result is the same as before."""

    def function(m, x):
        other = constant()
        weight = make(m.w, other)
        with torch.no_grad():
            other.copy_(other.logical_not() if other.dtype == torch.bool else other + 2)
        return x * weight.flatten()

    check_refused(
        function,
        {"w": nn.Parameter(torch.full((9,), fill).double())},
        normal(BATCH, 5),
        match="'w'.*cannot be computed again with the same result",
    )


def test_what_was_written_anew_with_the_same_numbers_is_served():
    """As observers of quantised training write scales, whose weights are used once more."""

    def function(m, x):
        scale, zero = torch.ones(()), torch.zeros((), dtype=torch.int32)
        first = torch.fake_quantize_per_tensor_affine(m.w, scale, zero, -8, 7)
        with torch.no_grad():
            scale.fill_(1)
            zero.fill_(0)
        return x @ first.double()

    check_operation(function, {"w": nn.Parameter(torch.randn(5, 4))}, normal(BATCH, 5))


def test_scales_that_were_written_anew_with_other_numbers_are_those_of_the_forward():
    """Autograd keeps which elements were in range; here the result is of zeros in any case."""

    def function(m, x):
        scale, zero = torch.full((1,), 0.1), torch.zeros(1, dtype=torch.int32)
        weight = torch.fake_quantize_per_tensor_affine(m.w, scale, zero, 0, 255)
        with torch.no_grad():
            scale.fill_(1)
        return x @ (m.w + weight).double()

    check_operation(function, {"w": nn.Parameter(torch.full((5, 4), -0.4))}, normal(BATCH, 5))


@pytest.mark.parametrize("uses", [1, 2])
def test_observers_that_move_on_are_as_without_measuring(uses):
    """The default of quantised training: one operation observes the weight and rounds it."""
    quantise = torch.ao.quantization.default_fused_per_channel_wt_fake_quant()

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.quantise = nn.Parameter(torch.randn(5, 5)), quantise

        def forward(self, x):
            for _ in range(uses):
                x = torch.tanh(x @ self.quantise(self.w))
            return x

    model, x = Model(), torch.randn(BATCH, 5)
    model(x)
    with torch.no_grad():
        model.w.mul_(1.5)  # as an optimizer does
    plain = copy.deepcopy(model)
    expected = []
    for index in range(BATCH):
        one = copy.deepcopy(model)
        (grad,) = torch.autograd.grad(one(x)[index].square().sum(), one.w)
        expected.append(grad.norm())
    stats = gs.per_example_norms(model, x, lambda m, x: m(x).square().sum(1))
    torch.testing.assert_close(stats.norm, torch.stack(expected))
    plain(x)
    for name, value in plain.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name


@pytest.mark.parametrize(
    "make",
    [
        lambda w, k: torch.add(torch.ones(5).double(), w, alpha=k[0]),
        lambda w, k: torch.rsub(w, torch.ones(5).double(), alpha=k[0]),
        lambda w, k: functional.batch_norm(w[None], torch.zeros(5).double(), k)[0],
        lambda w, k: functional.batch_norm(w[None], 0 * k, torch.ones(5).double(), k)[0],
    ],
    ids=["sum", "difference", "variance", "scale"],
)
def test_what_changed_and_multiplies_within_a_sum_or_normalisation_is_refused(make):
    def function(m, x):
        other = torch.ones(5).double()
        weight = make(m.w, other)
        other.add_(2)
        return x * weight

    check_refused(
        function,
        {"w": nn.Parameter(torch.zeros(5).double())},
        normal(BATCH, 5),
        match="'w'.*cannot be computed again with the same result",
    )


@pytest.mark.parametrize("look_up", [functional.embedding, lambda ids, w: w[ids]])
def test_ids_that_changed_since_they_were_looked_up_are_refused(look_up):
    """As a counter of positions that the model keeps may."""

    def function(m, x):
        ids = torch.arange(3)
        rows = look_up(ids, m.w)
        ids.add_(2)
        return x * rows

    batch = normal(BATCH, 3, 4)
    check_refused(function, {"w": (5, 4)}, batch, match="'w'.*cannot be computed again")


def test_other_numbers_of_what_has_to_be_computed_again_are_refused():
    check_refused(
        lambda m, x: x @ signed(m.w.softmax(1)),
        {"w": (5, 4)},
        normal(BATCH, 5),
        match=r"cannot be computed again with the same result.*x \+ \(numbers - x\).detach",
    )


def halved_by_hook(w):
    w.register_hook(lambda grad: grad / 2)
    return w


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w):
        return w.view_as(w)

    @staticmethod
    def backward(ctx, grad):
        return grad / 2


GRADIENTS_CHANGED = {
    "hook": (halved_by_hook, "register_hook.*'w'.*torch.autograd.Function"),
    "hook without gradients": (
        torch.no_grad()(halved_by_hook),
        "register_hook.*'w'.*torch.autograd.Function",
    ),
    "detach_": (lambda w: w.detach_(), r"detach_.*'w'.*x.detach\(\)"),
}


@pytest.mark.parametrize("change, match", GRADIENTS_CHANGED.values(), ids=GRADIENTS_CHANGED)
def test_gradients_of_a_derived_tensor_changed_unseen_are_refused(change, match):
    """Its uses read another tensor than the user's code has, whose hooks never ran."""
    check_refused(
        lambda m, x: x @ change(m.w * 2) + x @ m.v,
        {"w": (4, 2), "v": (4, 2)},
        normal(BATCH, 4),
        match=match,
    )


def test_gradients_of_a_derived_tensor_changed_by_a_function():
    check_operation(lambda m, x: x @ Halved.apply(m.w * 2).exp(), {"w": (4, 2)}, normal(BATCH, 4))


def test_detached_copies_are_constants():
    check_operation(
        lambda m, x: x * m.w + x * m.w.detach() + x @ m.w.data.outer(m.w.detach()),
        {"w": (2,)},
        normal(BATCH, 2),
    )


def test_parts_of_one_parameter_stay_lean(monkeypatch):
    """Chunks and slices that share no element: squared norms add up, no gradient is formed."""

    def forbidden(*args):
        raise AssertionError("per-example gradients were formed")

    monkeypatch.setattr(_dense, "sqnorm_of_sum", forbidden)

    def function(m, x):
        q, k, v = m.projection.chunk(3)
        hidden = torch.tanh(functional.linear(x, q) * functional.linear(x, k))
        for expert in range(2):
            hidden = torch.tanh(functional.linear(hidden, m.experts[torch.tensor(expert)]))
        left, right = m.wide.split([4, 4], dim=1)
        return functional.linear(hidden, left) + functional.linear(x, right) + x @ v.t()

    parameters = {"projection": (12, 4), "experts": (3, 4, 4), "wide": (4, 8)}
    check_operation(function, parameters, normal(3, 5, 4))


def test_overlapping_parts_of_one_parameter():
    check_operation(
        lambda m, x: functional.linear(x, m.w[:4]) * functional.linear(x, m.w[2:6]),
        {"w": (6, 4)},
        normal(3, 5, 4),
    )


def test_views_like_tensors_of_many_elements():
    """Tensors of thousands of numbers are printed alike whatever their shapes."""
    tall, wide = torch.zeros(40, 30).double(), torch.zeros(30, 40).double()
    check_operation(
        lambda m, x: (x @ m.w.view_as(wide).t()).sum(1) + (x @ m.w.view_as(tall)).sum(1),
        {"w": (1200,)},
        normal(BATCH, 40),
    )


@pytest.mark.parametrize("shape", [(), (1,), (2, WIDTH), (2, 1)], ids=str)
def test_biases_that_broadcast_in_layers_of_parameters(shape):
    """A linear layer takes a bias of any shape that broadcasts along its result."""
    check_operation(
        lambda m, x: x * functional.linear(m.v, m.w, m.b),
        {"v": (2, 3), "w": (WIDTH, 3), "b": shape},
        normal(BATCH, 2, 1),
    )


@pytest.mark.parametrize("second", [(4,), (4, 3)], ids=str)
@pytest.mark.parametrize("first", [(4,), (2, 4), (5, 2, 4)], ids=str)
def test_products_of_parameters_that_scale_data(first, second, monkeypatch):
    """Of rows or a vector and a matrix or a vector: no gradient of the product is pulled back."""

    def forbidden(*args):
        raise AssertionError("per-example gradients were pulled back")

    monkeypatch.setattr(_lineage, "sqnorms_together", forbidden)
    shape = torch.matmul(torch.zeros(first), torch.zeros(second)).shape
    check_operation(lambda m, x: x * (m.v @ m.w), {"v": first, "w": second}, normal(BATCH, *shape))


class Product(torch.autograd.Function):
    """Takes data beside a weight."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad @ w.t(), x.flatten(0, -2).t() @ grad.flatten(0, -2)


# What takes a derived tensor past the classes that show its operations.
UNSEEN = {
    "autograd Function": lambda x, w: Product.apply(x, w[:WIDTH] * 2),
    "one of several parts": lambda x, w: Product.apply(x, (w * 2).chunk(2, 0)[0]),
}


@pytest.mark.parametrize("use", UNSEEN.values(), ids=UNSEEN)
def test_a_derived_tensor_used_out_of_sight_is_refused(use):
    """A parameter that other operations use too: it would report those alone."""
    check_refused(
        lambda m, x: use(x, m.w) + m.w[0, 0],
        {"w": (2 * WIDTH, 2)},
        normal(BATCH, POSITIONS, WIDTH),
        error=gs.UnsupportedOperationError,
        match=r"without passing through.*'w'|derived.*'w'.*without passing through",
    )


def test_a_function_of_data_and_a_parameter_is_told_how_to_register_it():
    check_refused(
        lambda m, x: Product.apply(x, m.w), {"w": (WIDTH, 2)}, normal(BATCH, POSITIONS, WIDTH),
        error=gs.UnsupportedOperationError,
        match=r"'w'.* Product is a custom autograd Function.* gs\.register_rule\(Product, \.\.\.\)",
    )  # fmt: skip


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_derived_tensor_made_in_a_checkpoint(reentrant):
    def with_exponential(run):
        def function(m, x):
            return x @ run(torch.exp, m.w + 1)[:WIDTH] + m.w[0, 0]

        torch.manual_seed(0)
        return Operation(function, {"w": (2 * WIDTH, 2)}, False)

    batch = (normal(BATCH, POSITIONS, WIDTH),)
    model = with_exponential(partial(checkpoint, use_reentrant=reentrant))
    plain = with_exponential(lambda function, w: function(w))
    stats = gs.per_example_norms(model, batch, uneven_loss)
    assert_sqnorms(stats, oracle_sqnorms(plain, batch, uneven_loss), 1e-12)


def test_a_derived_tensor_used_out_of_sight_with_the_fallback():
    model = Operation(
        lambda m, x: Product.apply(x, m.w * 2) + m.b, {"w": (WIDTH, 2), "b": (2,)}, False
    )
    batch = (normal(BATCH, POSITIONS, WIDTH),)
    stats = gs.per_example_norms(model, batch, uneven_loss, fallback="vmap")
    assert_sqnorms(stats, oracle_sqnorms(model, batch, uneven_loss), 1e-12)


class Stores(nn.Module):
    """Leaves what it computes from its parameter where it can be found afterwards."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))
        self.found = {}
        self.listed = []
        self.nested = ()

    def forward(self, x):
        self.last = self.weight * 2
        self.found["scale"] = self.weight * 3
        self.listed.append({"scale": self.weight * 4})
        self.nested = (1, (self.weight * 5,))
        return x * (self.last + self.found["scale"])


def test_derived_tensors_that_a_forward_stores_become_plain():
    """After a context of one's own; a call leaves none of them."""
    model, x = Stores().double(), normal(BATCH, WIDTH)
    found, listed = model.found, model.listed
    gs.per_example_norms(model, x, uneven_loss_of)
    assert model.found is found and model.listed is listed
    assert not (found or listed or model.nested or hasattr(model, "last"))
    with gs.track(model, batch_size=BATCH) as tracker:
        tracker.backward(uneven_loss_of(model, x))
    assert model.found is found and model.listed is listed
    stored = [model.last, found["scale"], listed[0]["scale"], model.nested[1][0]]
    for factor, tensor in enumerate(stored, start=2):
        assert type(tensor) is torch.Tensor
        torch.testing.assert_close(tensor, model.weight * factor)


def uneven_loss_of(model, x):
    return uneven_loss(model, (x,))


SEVERAL_RESULTS = {
    "meshgrid": lambda m: torch.meshgrid(m.p, m.q, indexing="ij"),
    "broadcast_tensors": lambda m: torch.broadcast_tensors(m.p[:, None], m.q),
    "broadcast_tensors of what is derived": lambda m: torch.broadcast_tensors(
        m.p[:, None].exp(), m.p[:, None] * m.q
    ),
    "atleast_2d": lambda m: torch.atleast_2d(m.q, m.p[:, None]),
}


@pytest.mark.parametrize(
    "of_sign",
    [lambda sign: sign, lambda sign: sign.softmax(0), lambda sign: sign.sort()[0].repeat(2)[3:]],
    ids=["one", "in a chain", "pulled back"],
)
def test_signs_of_determinants_which_have_no_gradient(of_sign):
    def function(m, x):
        sign, logarithm = torch.linalg.slogdet(m.w)
        return x * of_sign(sign)[:WIDTH] * m.v + logarithm.exp()[:WIDTH]

    check_operation(function, {"w": (2 * WIDTH, 3, 3), "v": (WIDTH,)}, normal(BATCH, WIDTH))
    model = Operation(function, {"w": (2 * WIDTH, 3, 3), "v": (WIDTH,)}, False)
    direction = {name: torch.randn_like(each) for name, each in model.named_parameters()}
    batch = (normal(BATCH, WIDTH),)
    gradients = oracle_gradients(model, batch, uneven_loss)
    expected = sum(gradients[name].flatten(1) @ direction[name].flatten() for name in direction)
    torch.testing.assert_close(gs.alignment(model, batch, uneven_loss, direction), expected)


@pytest.mark.parametrize("operation", SEVERAL_RESULTS.values(), ids=SEVERAL_RESULTS)
def test_operations_of_several_results_that_depend_on_one_operand_each(operation):
    def both(m, x):
        first, second = operation(m)
        return x * first.sin() + x.square() * second

    check_operation(both, {"p": (3,), "q": (2,)}, normal(4, 3, 2))


class Scaled(NamedTuple):
    weight: torch.Tensor
    scale: torch.Tensor


def scaled(weight):
    if torch.overrides.has_torch_function((weight,)):
        return torch.overrides.handle_torch_function(scaled, (weight,), weight)
    scale = weight.abs().amax()
    return Scaled(weight / scale, scale)


def test_an_operation_whose_results_have_names():
    def function(m, x):
        found = scaled(m.w)
        return x * found.weight + found.scale

    check_operation(function, {"w": (WIDTH,)}, normal(BATCH, WIDTH))


NORMALISED = {
    "batch": lambda: nn.BatchNorm1d(3),
    "batch, cumulative": lambda: nn.BatchNorm1d(3, momentum=None, affine=False),
    "instance": lambda: nn.InstanceNorm1d(7, track_running_stats=True),
}


@pytest.mark.parametrize("form", NORMALISED)
def test_running_statistics_of_prototypes_are_updated_once(form):
    """A tensor that is computed again for its gradients leaves the user's statistics alone."""

    class Prototypes(nn.Module):
        def __init__(self):
            super().__init__()
            self.prototypes = nn.Parameter(torch.randn(7, 3))
            self.norm = NORMALISED[form]()
            self.layer = nn.Linear(3, 3)

        def forward(self, x):
            table = self.prototypes[None] if form == "instance" else self.prototypes
            return self.layer(x) @ self.norm(table).reshape(7, 3).t()

    def loss(model, x):
        return model(x).square().sum(1)

    torch.manual_seed(0)
    model, x = Prototypes().double(), normal(BATCH, 3)
    plain = copy.deepcopy(model)
    expected = oracle_sqnorms(model, x, loss)
    for _ in range(2):
        stats = gs.per_example_norms(model, x, loss, workspace=1, gram=True)
        assert_sqnorms(stats, expected, 1e-9)
        loss(plain, x)
        for (name, buffer), other in zip(model.named_buffers(), plain.buffers(), strict=True):
            assert torch.equal(buffer, other), name
    gs.inner_products(model, x, model, x, loss)
    with gs.track(model, batch_size=BATCH) as tracker:
        tracker.backward(loss(model, x))
    assert_sqnorms(tracker.stats, expected, 1e-9)


def test_derived_weights_that_are_not_a_number():
    """They are what they were computed to be, and no sign of an operation that is random."""
    layer = parametrizations.weight_norm(nn.Linear(WIDTH, 3)).double()
    with torch.no_grad():
        layer.parametrizations.weight.original0[1] = float("nan")
    x = normal(BATCH, WIDTH)

    def loss(model, x):
        return model(x)[:, :1].square().sum(1) + 0 * model(x).sum(1)

    stats = gs.per_example_norms(layer, x, loss, nonfinite="keep")
    assert stats.norm.isnan().all()
    with pytest.raises(gs.NonFiniteGradientError):
        gs.per_example_norms(layer, x, loss)

    # Of a loss that does not meet them, the gradients are as ever.
    def function(m, x):
        spoilt = m.v.exp() + torch.tensor([0, complex("nan+1j")])
        return x @ torch.log(m.w)[:, :1] + spoilt[0].abs()

    parameters = {"w": torch.ones(WIDTH, 2), "v": torch.ones(2, dtype=torch.complex128)}
    model = Operation(function, parameters, upstream=False)
    expected = oracle_sqnorms(model, (x,), uneven_loss)
    with torch.no_grad():
        model.w[:, 1] = -1  # whose logarithm is none
    stats = gs.per_example_norms(model, (x,), uneven_loss, workspace=1)
    assert_sqnorms(stats, expected, 1e-9)


def test_the_log_density_of_a_normal_distribution_of_parameters_alone():
    check_operation(
        lambda m, x: torch.distributions.Normal(m.mu, m.log_std.exp()).log_prob(x),
        {"mu": (3,), "log_std": (1,)},
        normal(4, 3),
    )


class SelfAttention(nn.MultiheadAttention):
    def forward(self, x):
        return super().forward(x, x, x)


ENCODERS = {
    "attention": lambda: SelfAttention(8, 2, batch_first=True),
    "transformer": lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
    "GRU": lambda: nn.GRU(8, 8, batch_first=True),
    "LSTM, 2 layers": lambda: nn.LSTM(8, 8, 2, batch_first=True),
}


@pytest.mark.parametrize("encoder", ENCODERS.values(), ids=ENCODERS)
def test_weights_that_a_sequence_model_makes_of_parameters(encoder):
    """Of trained prompts, as many as examples."""

    def function(m, x):
        encoded = m.encoder(m.prompts)
        encoded = encoded[0] if isinstance(encoded, tuple) else encoded
        return m.image(x) @ encoded.mean(1).T

    parameters = {
        "prompts": (BATCH, 2, 8),
        "encoder": encoder(),
        "image": nn.Linear(WIDTH, 8),
    }
    check_operation(function, parameters, normal(BATCH, WIDTH))


def test_what_is_used_several_times_is_computed_again_once():
    """Not once for each way that leads to it, of which residual layers make very many."""
    calls = []

    class Counted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, w):
            calls.append(w)
            return w.exp()

        @staticmethod
        def backward(ctx, grad):
            return grad * calls[0].exp()

    def function(m, x):
        w = Counted.apply(m.w)
        for _ in range(6):
            w = w + 0.1 * functional.silu(w)
        return x @ w

    model = Operation(function, {"w": (WIDTH, 2)}, upstream=False)
    x = normal(BATCH, POSITIONS, WIDTH)
    expected = oracle_sqnorms(model, (x,), uneven_loss)
    calls.clear()
    assert_sqnorms(gs.per_example_norms(model, (x,), uneven_loss), expected, 1e-9)
    assert len(calls) == 2


def test_a_backward_whose_derivative_is_not_a_number():
    """Filters of sinc functions: a direction is not pushed through them at zero."""

    def function(m, x):
        times = torch.arange(-2, 3, dtype=torch.float64)
        return x @ torch.sinc(m.w[:, None] * times)

    check_operation(function, {"w": (WIDTH,)}, normal(BATCH, POSITIONS, WIDTH))


FLAT = {
    "sign": lambda w: w.sign(),
    "sign of a part": lambda w: w[:, :2].sign().repeat(1, 2),
    "round of another": lambda w: (4 * w.exp()).round(),
}


@pytest.mark.parametrize("flat", FLAT.values(), ids=FLAT)
def test_what_does_not_change_with_the_parameter(flat):
    """Its backward returns zeros that depend on no gradient."""
    parameters = {"w": torch.eye(WIDTH) + 0.1 * torch.randn(WIDTH, WIDTH)}
    check_operation(
        lambda m, x: x @ flat(m.w) + x * m.w[0], parameters, normal(BATCH, POSITIONS, WIDTH)
    )


def seeded(function):
    """Draw the same numbers in each forward."""

    def again(m, x):
        torch.manual_seed(0)
        return function(m, x)

    return again


DRAWN = {
    "dropped weights": lambda m, x: x @ functional.dropout(m.w, 0.5),
    "dropped twice": lambda m, x: x @ functional.dropout(functional.alpha_dropout(m.w, 0.4), 0.3),
    "dropped rows": lambda m, x: x @ functional.dropout1d(m.w.exp(), 0.5) + m.w[0],
    "hard choices": lambda m, x: x @ functional.gumbel_softmax(m.w, tau=0.7, hard=True),
    "slopes": lambda m, x: x @ functional.rrelu(m.w, training=True),
    "dropped for each": lambda m, x: x + functional.dropout(m.w[0].expand(len(x), 5, -1), 0.5),
}


@pytest.mark.parametrize("draw", DRAWN.values(), ids=DRAWN)
def test_what_is_drawn_for_parameters_is_drawn_again(draw):
    check_operation(seeded(draw), {"w": (WIDTH, WIDTH)}, normal(BATCH, POSITIONS, WIDTH))


def test_queries_that_attend_to_each_other_with_dropout():
    """As the first layer of DETR's decoder has them; they are as many as examples."""
    decoder = nn.TransformerDecoderLayer(8, 2, 16, dropout=0.3)

    def function(m, x):
        queries = m.queries.unsqueeze(1).repeat(1, len(x), 1)
        return m.decoder(queries, x.transpose(0, 1)).transpose(0, 1)

    parameters = {"queries": (BATCH, 8), "decoder": decoder}
    check_operation(seeded(function), parameters, normal(BATCH, 5, 8))


def test_numbers_drawn_afterwards_are_as_without():
    model = Operation(lambda m, x: x @ functional.dropout(m.w), {"w": (WIDTH, 2)}, upstream=False)
    x = normal(BATCH, WIDTH)
    following = []
    for loss in (uneven_loss, lambda *case: gs.per_example_norms(*case, uneven_loss).loss):
        torch.manual_seed(0)
        loss(model, (x,))
        following.append(torch.rand(3))
    assert torch.equal(*following)


def broadcast_together(m, x):
    a, b = torch.broadcast_tensors(m.a, m.b)
    return (x - a) * b


def changed_in_place(m, x):
    scale = m.a * 2
    scale += m.b
    scale[1:] *= m.b[1:]
    return x * scale


def written_in_turn(m, x):
    scale = torch.zeros(4).double()
    scale[:2] = m.a[:2]
    scale[1:] += m.b[1:]
    return x * scale


SHARED_OPERATIONS = {
    "two results": broadcast_together,
    "changed in place": changed_in_place,
    "written in turn": written_in_turn,
    "a shape": lambda m, x: x * m.a.expand_as(m.b) + m.b,
    "a density": lambda m, x: torch.distributions.Normal(m.a, m.b.exp()).log_prob(x),
}


@pytest.mark.parametrize("name", ["a", "b"])
@pytest.mark.parametrize("function", SHARED_OPERATIONS.values(), ids=SHARED_OPERATIONS)
def test_an_operation_on_a_parameter_that_counts_and_one_that_does_not(function, name):
    model = Operation(function, {"a": (4,), "b": (4,)}, upstream=False)
    batch = (normal(3, 4),)
    expected = oracle_sqnorms(model, batch, uneven_loss)
    del expected[name]
    assert_sqnorms(gs.per_example_norms(model, batch, uneven_loss, exclude=[name]), expected, 1e-9)
    with gs.track(model, batch_size=3, exclude=[name]) as tracker:
        tracker.backward(uneven_loss(model, batch))
    assert_sqnorms(tracker.stats, expected, 1e-9)


NOISE = {
    "noise": lambda m, x: functional.linear(x, m.w + m.s * torch.randn_like(m.w)),
    "noise in the form of a buffer": lambda m, x: functional.linear(x, m.w * torch.rand_like(m.c)),
    "connections that are dropped": lambda m, x: functional.linear(
        x, m.w * (torch.rand_like(m.w) > 0.5)
    ),
    "noise of its size": lambda m, x: functional.linear(x, m.w + m.s.exp() * torch.randn(8, 4)),
    "factors of noise": lambda m, x: functional.linear(
        x, m.w + m.s * torch.outer(torch.randn(8).double().sign(), torch.randn(4).double())
    ),
    "connections chosen by size": lambda m, x: functional.linear(
        x, torch.where(torch.rand(8, 4) > 0.5, m.w, m.s)
    ),
    "noise in a buffer": lambda m, x: functional.linear(
        x, m.w * m.c.copy_(torch.randn(8)[:, None] * torch.randn(4))
    ),
    "given factors": lambda m, x: functional.linear(x, m.w * torch.tensor([[0.5]] * 8)),
    "given rows": lambda m, x: functional.linear(x, m.w.index_copy(0, torch.tensor(ROWS), m.s)),
    "levels of repeated queries": lambda m, x: (
        m.w.expand(len(x), 8, 4) / torch.tensor([[2.0]] * 8) * x[:, None]
    ).sum(1),
    "noise of repeated queries": lambda m, x: (
        (m.w.expand(len(x), 8, 4) + torch.randn(len(x), 1, 1)) * x[:, None]
    ).sum(1),
}
ROWS = [3, 1, 0, 2, 7, 6, 4, 5]


@pytest.mark.parametrize("examples", [5, 8])
@pytest.mark.parametrize("function", NOISE.values(), ids=NOISE)
def test_noise_and_values_for_parameters_are_no_data(function, examples):
    """Even if it has as many rows as there are examples."""

    def drawn(m, x):
        torch.manual_seed(1)
        return function(m, x)

    model = Operation(drawn, {"w": (8, 4), "s": (8, 4)}, upstream=True)
    model.register_buffer("c", normal(8, 4))
    model(normal(examples, 4))  # which may fill the buffer
    check_model(model, (normal(examples, 4),), uneven_loss)


WITHOUT_ELEMENTS = {
    "sum": lambda m, x: x * m.w + m.e.sum(0),
    "penalty": lambda m, x: x * m.w + m.e.square().sum(),
    "prototypes": lambda m, x: torch.cat([x * m.w, x @ functional.normalize(m.e).T], 1),
    "products": lambda m, x: x * m.w + torch.einsum("bi,ri,rj->bj", x, m.e, m.e),
    "linear": lambda m, x: torch.cat([x * m.w, functional.linear(x, m.e)], 1),
}


@pytest.mark.parametrize("function", WITHOUT_ELEMENTS.values(), ids=WITHOUT_ELEMENTS)
def test_parameters_without_elements(function):
    model = Operation(function, {"w": (4,), "e": (0, 4)}, upstream=True)
    batch = (normal(3, 4),)
    check_model(model, batch, uneven_loss)
    check_products(model, batch, uneven_loss)
    with pytest.raises(gs.TrackingError, match="that have no elements"):
        gs.per_example_norms(model, batch, uneven_loss, parameters="e")


class Graph(nn.Module):
    """Embeddings that a constant sparse matrix passes along the edges of a graph."""

    def __init__(self, links):
        super().__init__()
        self.table = nn.Embedding(5, 3)
        self.register_buffer("links", links)

    def forward(self, ids):
        return (self.links @ (self.links @ self.table.weight))[ids]


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
def test_products_of_sparse_constants_and_parameters(layout):
    """Their backward takes one gradient at a time."""
    torch.manual_seed(0)
    links = ((torch.rand(5, 5) < 0.5) + torch.eye(5)).double()
    dense, ids = Graph(links).double(), torch.tensor([0, 1, 2, 2])
    sparse = Graph(links.to_sparse(layout=layout)).double()  # which PyTorch cannot copy
    sparse.table.load_state_dict(dense.table.state_dict())

    def losses(model, ids):
        return (model(ids) + model.table(ids)).square().sum(1)

    expected = oracle_sqnorms(dense, ids, losses)
    assert_sqnorms(gs.per_example_norms(sparse, ids, losses), expected, 1e-9)
    with gs.track(sparse, batch_size=4) as tracker:
        tracker.backward(losses(sparse, ids))
    assert_sqnorms(tracker.stats, expected, 1e-9)
    losses(dense, ids).mean().backward()
    torch.testing.assert_close(sparse.table.weight.grad, dense.table.weight.grad)


@pytest.mark.parametrize("derived", [False, True])
def test_sparse_matrices_of_parameters_are_refused(derived):
    model = nn.Linear(3, 3)

    def losses(model, x):
        weight = model.weight * 2 if derived else model.weight
        return torch.sparse.mm(weight.to_sparse(), x.T).T.square().sum(1)

    with pytest.raises(gs.UnsupportedOperationError, match="to_sparse makes a sparse"):
        gs.per_example_norms(model, torch.randn(4, 3), losses)
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())


SIZED = {
    "interpolate": lambda w, n: functional.interpolate(w[None, None], size=(2, n))[0, 0].T,
    "narrow": lambda w, n: w.narrow(0, 0, n),
    "pad": lambda w, n: functional.pad(w[0], (0, n))[:, None],
    "repeat": lambda w, n: w.sum(1).repeat(n, 1),
    "repeat_interleave": lambda w, n: w.repeat_interleave(n, 0),
    "reshape": lambda w, n: w.T.reshape(n, -1),
    "roll": lambda w, n: w.roll(n, 0),
    "split": lambda w, n: torch.cat([part.cumsum(0) for part in w.split(n)]),
}


@pytest.mark.parametrize("sized", SIZED.values(), ids=SIZED)
def test_sizes_that_stand_in_the_batch(sized):
    """As those of images do, for which a table of positions is resized."""
    sizes = torch.tensor([1, 2, 1])

    def function(m, x):
        made = torch.stack([sized(m.table, n).sum(0).exp().sum() for n in sizes * len(x) // 3])
        return (x * made[:, None]).sin() + sized(m.table, sizes[1]).sin().sum()

    check_operation(function, {"table": (4, 4)}, normal(3, 2))


def test_numbers_of_the_batch_where_tensors_are_wanted():
    def asked(m, x):
        most = (x[:, 0] > 5).long().max()
        return x * m.w * (1 + torch.equal(m.w, most))

    check_operation(asked, {"w": (2,)}, normal(3, 2))
    check_operation(
        lambda m, x: x * m.w.index_fill(0, (x[:, 0] > 5).long().max(), 0.0),
        {"w": (2,)},
        normal(3, 2),
    )
    check_refused(
        lambda m, x: torch.stack([row * m.w.index_fill(0, (row[0] > 5).long(), 0.0) for row in x]),
        {"w": (2,)},
        normal(3, 2),
        match="index_fill has no rule",
    )


class Scattered(nn.Module):
    """A fixed matrix some of whose elements are trained."""

    def __init__(self, sparse: bool):
        super().__init__()
        self.sparse, self.values = sparse, nn.Parameter(torch.randn(4).double())
        self.register_buffer("places", torch.tensor([[0, 1, 1, 0], [1, 2, 3, 3]]))
        self.register_buffer("matrix", mixed(2, 4))

    def forward(self, x):
        if self.sparse:
            trained = torch.sparse_coo_tensor(self.places, self.values, (2, 4))
        else:
            trained = torch.zeros(2, 4).double().index_put(tuple(self.places), self.values)
        return functional.linear(x, self.matrix + trained)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
def test_sparse_matrices_of_parameters_are_refused_and_dense_ones_served():
    batch = (normal(BATCH, 4),)
    check_model(Scattered(sparse=False), batch, uneven_loss)
    with pytest.raises(gs.UnsupportedOperationError, match="sparse tensor of parameter 'values'"):
        gs.per_example_norms(Scattered(sparse=True), batch, uneven_loss)


@pytest.mark.parametrize(
    "equation", ["btg,gi->btgi", "btgi,gi->btg", "btgi,gi->bti", "btg,gi->bti"]
)
def test_transposes_in_products_of_groups(equation):
    sizes = {"b": BATCH, "t": 2, "g": 3, "i": 7}
    x = normal(*(sizes[axis] for axis in equation.partition(",")[0]))
    check_operation(lambda m, x: torch.einsum(equation, x, m.w.t()), {"w": (7, 3)}, x)


@pytest.mark.parametrize(
    "shape", [(1, 2, 1), (1, 2, 3), (4, 1, 3), (4, 1, 1), (2, 1), (3,), (1, 1, 1)], ids=str
)
def test_filters_that_are_multiples_of_constant_ones(shape):
    def function(m, x):
        return functional.conv1d(x, mixed(8, 3).view(4, 2, 3) * m.w)

    check_operation(function, {"w": shape}, normal(BATCH, 2, 6))


@pytest.mark.parametrize("shape", [(1, 2, 1), (1, 2, 3), (4, 1, 3), (2, 1), (3,)], ids=str)
def test_matrices_that_are_multiples_of_constant_stacks(shape):
    def function(m, x):
        return functional.linear(x, (mixed(8, 3).view(4, 2, 3) * m.w).flatten(1))

    check_operation(function, {"w": shape}, normal(BATCH, 2, 6))
