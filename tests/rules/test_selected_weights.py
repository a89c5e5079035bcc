"""Weights that are joined, padded, repeated or put in another order before they meet data."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import gradstats as gs
from benchmarks.ledger import peak_memory
from gradstats.capture.parameters import _lineage
from tests.oracle import assert_sqnorms, oracle_sqnorms
from tests.rules.operation import Operation, check_operation, normal, uneven_loss
from tests.rules.test_experts import SINGLE, multiply

BATCH, POSITIONS, WIDTH = 3, 5, 4


def joined(axis):
    return lambda m: torch.cat([m.v, m.u, m.w], axis)


def quaternion(m):
    """Return the matrix that multiplies by quaternions, each part of which stands four times."""
    r, i, j, k = m.v, m.u, m.w, m.k
    rows = [[r, -i, -j, -k], [i, r, -k, j], [j, k, r, -i], [k, -j, i, r]]
    return torch.cat([torch.cat(row, 1) for row in rows])


def in_steps(m):
    """Return a triangle whose rows and diagonal are written one after the other."""
    whole = torch.zeros(WIDTH, WIDTH).double()
    whole[torch.tril_indices(WIDTH, WIDTH, -1).unbind()] = m.w
    whole[range(WIDTH), range(WIDTH)] = m.v.exp()
    return whole


def written_across(m):
    """Write into a constant whose columns, not rows, are contiguous."""
    whole = torch.zeros(WIDTH, 3).double().t().clone()
    whole[1] = m.w
    return whole


def written_over(m):
    whole = 1 + m.v
    whole[:, :] = m.w
    return whole


def written_into(m):
    whole = m.v.sin()
    whole[1, 2] = m.w[0]
    return whole


# name: (shapes of the parameters, what makes a matrix of them)
MATRICES = {
    "rows": ({"v": (2, WIDTH), "u": (1, WIDTH), "w": (3, WIDTH)}, joined(0)),
    "columns": ({"v": (3, 1), "u": (3, 1), "w": (3, 2)}, joined(1)),
    "blocks": ({"v": (2, 3), "w": (3, 1)}, lambda m: torch.block_diag(m.v, m.w)),
    "quaternion": (dict.fromkeys("vuwk", (2, 1)), quaternion),
    "beside constants": ({"v": (2, 3)}, lambda m: functional.pad(m.v, (1, 0), value=2.0)),
    "a row beside ones": ({"v": (1, 3)}, lambda m: functional.pad(m.v, (1, 0), value=1.0)),
    "circular": ({"v": (2, 2)}, lambda m: functional.pad(m.v[None], (1, 1), mode="circular")[0]),
    "several axes": (
        {"v": (2, 2, 3), "w": (2, 2, 3)},
        lambda m: torch.stack([m.v, m.w]).permute(1, 3, 0, 2).reshape(6, 4),
    ),
    "slices of a stack": ({"v": (3, 4), "w": (3, 4)}, lambda m: torch.stack([m.v, m.w.tanh()])[1]),
    "reversed": ({"v": (3, WIDTH)}, lambda m: m.v.flip(0, 1)),
    "twice": ({"v": (3, WIDTH)}, lambda m: torch.cat([m.v, m.v.flip(1)])),
    "repeated": ({"v": (2, 2)}, lambda m: m.v.repeat_interleave(2, 1).repeat(2, 1)),
    "a diagonal": ({"v": (WIDTH,)}, lambda m: torch.diag_embed(m.v)),
    "a row": ({"v": (1, WIDTH), "u": (2, 1)}, lambda m: torch.cat([m.v, m.u @ m.v])),
    "circulant": ({"v": (WIDTH,)}, lambda m: torch.stack([m.v.roll(i) for i in range(3)])),
    "columns picked": ({"v": (3, 2)}, lambda m: m.v.index_select(1, torch.tensor([1, 0, 1, 1]))),
    "masked": (
        {"v": (2, WIDTH), "w": (1, WIDTH)},
        lambda m: torch.cat([m.v.exp(), m.w]).tanh().flip(1),
    ),
    "written": ({"v": (WIDTH,), "w": (6,)}, in_steps),
    "written across": ({"w": (WIDTH,)}, written_across),
    "written over": ({"v": (3, WIDTH), "w": (3, WIDTH)}, written_over),
    "written into": ({"v": (3, WIDTH), "w": (2,)}, written_into),
}


@pytest.mark.parametrize("case", MATRICES.values(), ids=MATRICES)
@pytest.mark.parametrize("options", [{}, {"workspace": 1}], ids=str)
def test_matrices(case, options):
    shapes, make = case
    for sizes in ((BATCH, WIDTH), (BATCH, POSITIONS, WIDTH))[len(options) :]:

        def function(m, x):
            weight = make(m)
            return functional.linear(x[..., : weight.shape[1]], weight)

        check_operation(function, shapes, normal(*sizes), **options)


# Rows and columns of each part are picked independently, or it has few elements.
LEAN = (
    "rows", "columns", "blocks", "quaternion", "reversed", "twice", "repeated", "a diagonal",
    "circulant", "columns picked", "written over",
)  # fmt: skip


@pytest.mark.parametrize("name", LEAN)
def test_matrices_whose_gradients_are_not_formed(name, monkeypatch):
    monkeypatch.setattr(_lineage, "sqnorms_together", None)  # what would form and pull them back
    shapes, make = MATRICES[name]

    def function(m, x):
        weight = make(m)
        return functional.linear(x[..., : weight.shape[1]], weight)

    model = Operation(function, shapes, upstream=False)
    gs.per_example_norms(model, (normal(BATCH, POSITIONS, WIDTH),), uneven_loss)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("kernel", [(2,), (2, 3)], ids=str)
def test_filters_and_channels(axis, kernel):
    shapes = {"v": [2, 2, *kernel], "u": [2, 2, *kernel], "w": [2, 2, *kernel]}
    shapes["u"][axis] = 1
    convolve = {1: functional.conv1d, 2: functional.conv2d}[len(kernel)]

    def function(m, x):
        weight = joined(axis)(m)
        return convolve(x[:, : weight.shape[1]], weight, stride=2, padding=1)

    def turned(m, x):
        first = convolve(x[:, :2], m.v.flip(-1).tanh())
        return first + convolve(x[:, :3], m.v.flip(0)[:, [1, 0, 0]])

    x = normal(BATCH, 5, *(5 for _ in kernel))
    check_operation(function, shapes, x)
    check_operation(turned, {"v": (3, 2, *kernel)}, x)
    groups = {"v": (2, 1, *kernel), "u": (1, 1, *kernel), "w": (1, 1, *kernel)}
    check_operation(lambda m, x: convolve(x[:, :4], joined(0)(m), groups=4), groups, x)


def test_tables():
    def function(m, ids):
        table = torch.cat([m.old, functional.pad(m.new, (0, 1))])
        return functional.embedding(ids, table, padding_idx=2)

    ids = torch.randint(7, (BATCH, POSITIONS))
    check_operation(function, {"old": (4, 3), "new": (3, 2)}, ids)

    def moved(m, ids):
        return functional.embedding(ids, functional.pad(m.table, (1, -1)))

    check_operation(moved, {"table": (7, 3)}, ids)


def with_numbers(m):
    """Return a table of two trained numbers, which have no axes."""
    whole = torch.ones(3, 2).double()
    whole[1, 1], whole[0, 0] = m.s, m.s * m.t
    return whole


def test_numbers_in_tables():
    ids = torch.randint(3, (BATCH, POSITIONS))
    check_operation(lambda m, x: functional.embedding(x, with_numbers(m)), {"s": (), "t": ()}, ids)


@pytest.mark.parametrize("form", [lambda w: w, lambda w: w.flip(1), lambda w: w.flip(0)])
def test_experts_of_their_own(form):
    def function(m, x):
        ends = torch.tensor([2, 3, 6], dtype=torch.int32)
        return multiply(x, form(torch.stack([m.first, m.second, m.third])), ends)

    shapes = dict.fromkeys(["first", "second", "third"], (WIDTH, 8))
    check_operation(function, shapes, normal(6, WIDTH), **SINGLE)


@pytest.mark.parametrize(
    "case",
    [
        (dict.fromkeys("vuw", (2, WIDTH)), joined(0)),
        ({"v": (3, WIDTH), "u": (3, 2), "w": (3, 1)}, joined(1)),
        ({"s": (), "t": ()}, with_numbers),
    ],
    ids=["rows", "columns", "numbers"],
)
def test_packed_examples(case):
    shapes, make = case

    def function(m, x):
        weight = make(m)
        return functional.linear(x[:, : weight.shape[1]], weight.flip(0)).tanh()

    model = Operation(function, shapes, upstream=False)
    bounds, rows = torch.tensor([0, 2, 3, 7]), normal(7, 12)

    def packed(model, x):
        return torch.stack([part.square().sum() for part in model(x).split([2, 1, 4])])

    expected = [
        oracle_sqnorms(model, rows[a:b][None], lambda m, x: m(x[0]).square().sum().view(1))
        for a, b in bounds.unfold(0, 2, 1)
    ]
    expected = {name: torch.cat([each[name] for each in expected]) for name in shapes}
    assert_sqnorms(gs.per_example_norms(model, rows, packed, cu_seqlens=bounds), expected, 1e-10)


def test_no_gradient_of_the_whole_is_formed():
    class Joined(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ParameterList(torch.randn(128, 256) for _ in range(2))

        def forward(self, x):
            return functional.linear(x, torch.cat(list(self.parts)))

    model, batch = Joined(), torch.randn(16, 8, 256)
    ledger = peak_memory(
        lambda: gs.per_example_norms(model, batch, lambda m, x: m(x).square().mean((1, 2)))
    )
    assert ledger.largest == 256 * 256  # the weight itself, as the forward has it


def test_indices_that_change_after_the_forward_are_refused():
    ids = torch.tensor([2, 0, 1, 1])
    model = Operation(lambda m, x: x @ m.w.index_select(0, m.ids), {"w": (3, 2)}, upstream=False)
    model.register_buffer("ids", ids)
    with gs.track(model, batch_size=BATCH) as tracked:
        losses = uneven_loss(model, (normal(BATCH, WIDTH),))
        ids.add_(1).remainder_(3)
        with pytest.raises(gs.UnsupportedOperationError, match="computed again"):
            tracked.backward(losses)


@pytest.mark.parametrize(
    "repeat",
    [
        lambda w: w.repeat(1024),
        lambda w: w.repeat_interleave(1024),
        lambda w: w[torch.arange(4096) % 4],
        lambda w: w.index_select(0, torch.arange(4096) % 4),
        lambda w: (torch.zeros(1024, 4, dtype=w.dtype) - w).flatten(),
    ],
)
def test_repeated_elements_of_half_precision_are_added_up_in_single(repeat):
    model = Operation(lambda m, x: x * repeat(m.w), {"w": (4,)}, upstream=False).bfloat16()
    x = (torch.rand(BATCH, 4096) + 0.5).bfloat16()

    def losses(model, batch):
        return model(batch).double().sum(1)

    # The products are rounded before they are added up.
    expected = oracle_sqnorms(copy.deepcopy(model).double(), x.double(), losses)
    assert_sqnorms(gs.per_example_norms(model, x, losses), expected, 1e-3)


def test_long_chains_of_lean_steps_form_no_gradients():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 64))
            self.scales = nn.ParameterList(torch.ones(()) for _ in range(100))

        def forward(self, x):
            weight = self.weight
            for scale in self.scales:
                weight = weight * scale
            return functional.linear(x, weight)

    model, batch = Scaled(), torch.randn(16, 64)
    ledger = peak_memory(
        lambda: gs.per_example_norms(model, batch, lambda m, x: m(x).square().mean(1), gram=True)
    )
    assert ledger.largest == 64 * 64


def test_groups_of_their_own():
    """A part is the weight of one of several products that are computed at once."""

    def function(m, x):
        weight = torch.stack([m.v, m.u.flip(1), m.w][: x.shape[2]])
        return torch.einsum("btgi,goi->btgo", x, weight)

    for groups in (2, 3):
        x = normal(BATCH, POSITIONS, groups, WIDTH)
        check_operation(function, dict.fromkeys("vuw", (2, WIDTH)), x)


def test_stacks_of_groups_that_are_joined():
    """A part is the weights of several products that are computed at once."""

    def function(m, x):
        return torch.einsum("btgi,goi->btgo", x, torch.cat([m.v, m.w]))

    x = normal(BATCH, POSITIONS, 3, WIDTH)
    check_operation(function, {"v": (2, 2, WIDTH), "w": (1, 2, WIDTH)}, x)


def test_groups_that_are_written_over():
    def function(m, x):
        weight = torch.stack([m.v, m.w])
        weight[:] = m.u
        return torch.einsum("btgi,goi->btgo", x, weight)

    shapes = {"v": (3, WIDTH), "w": (3, WIDTH), "u": (2, 3, WIDTH)}
    check_operation(function, shapes, normal(BATCH, POSITIONS, 2, WIDTH))


def test_groups_whose_axes_stand_in_another_order():
    def function(m, x):
        return torch.einsum("btgi,gio->btgo", x, torch.stack([m.v, m.w]))

    x = normal(BATCH, POSITIONS, 2, WIDTH)
    check_operation(function, dict.fromkeys("vw", (WIDTH, WIDTH)), x)
