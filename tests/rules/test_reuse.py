"""Parameters used several times, by several kinds of operation, or not at all."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import gradstats as gs
from gradstats.capture import _reports
from gradstats.contractions import _tied
from tests.functions import ScaleGradient
from tests.oracle import assert_sqnorms, oracle_sqnorms
from tests.rules.operation import Operation, check_operation, normal, uneven_loss

BATCH, POSITIONS, WIDTH = 3, 5, 4


def test_tied_embedding_and_projection():
    def function(m, ids):
        return functional.linear(m.w[ids], m.w)

    ids = torch.randint(0, 6, (BATCH, POSITIONS))
    check_operation(function, {"w": (6, WIDTH)}, ids)

    def modules(m, ids):
        return m.norm(m.table(ids)) @ m.table.weight.T

    table = nn.Embedding(6, WIDTH, padding_idx=2)
    check_operation(modules, {"table": table, "norm": nn.LayerNorm(WIDTH)}, ids)


def test_one_parameter_of_two_modules():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(6, WIDTH)
            self.head = nn.Linear(WIDTH, 6)
            self.head.weight = self.table.weight

        def forward(self, ids):
            return self.head(self.table(ids) + self.table(torch.arange(ids.shape[1])))

    ids = torch.randint(0, 6, (BATCH, POSITIONS))
    check_operation(lambda m, ids: m.layer(ids), {"layer": Tied()}, ids)
    stats = gs.per_example_norms(Tied(), ids, lambda m, b: m(b).square().sum((1, 2)))
    assert list(stats.by_parameter) == ["table.weight", "head.bias"]


def shrunk(monkeypatch) -> list:
    """Return a list that takes an entry for each projection of which only the needed is kept."""
    found = []

    def project(*args):
        found.append(args)
        return _tied.project(*args)

    monkeypatch.setattr(_reports, "project", project)
    return found


LOOK_UPS = {
    "one": lambda m, ids: functional.embedding(ids, m.w),
    "several": lambda m, ids: functional.embedding(ids, m.w) + functional.embedding(5 - ids, m.w),
    "not used": lambda m, ids: (functional.embedding(ids, m.w), 0)[1],
    "detached": lambda m, ids: functional.embedding(ids, m.w).detach(),
    "one more that is not used": lambda m, ids: (
        functional.embedding(ids, m.w),
        functional.embedding(ids[:, :2], m.w),
    )[0],
    "in a checkpoint": lambda m, ids: checkpoint(
        lambda ids: functional.embedding(ids, m.w).tanh(), ids, use_reentrant=False
    ),
    "in a checkpoint and not used": lambda m, ids: (
        checkpoint(lambda ids: functional.embedding(ids, m.w), ids, use_reentrant=False),
        functional.embedding(ids, m.w),
    )[1],
}


@pytest.mark.parametrize("name", LOOK_UPS)
def test_look_ups_that_the_loss_uses_or_not(name, monkeypatch):
    """A projection beside look-ups keeps what those need that the loss holds, and no others."""
    look_up = LOOK_UPS[name]
    found = shrunk(monkeypatch)
    parameters = {"w": (6, WIDTH), "table": nn.Embedding(6, WIDTH)}
    ids = torch.randint(0, 6, (BATCH, POSITIONS))
    used = name not in ("not used", "detached")

    def once(m, ids):
        return functional.linear(m.table(ids) + look_up(m, ids), m.w)

    check_operation(once, parameters, ids)
    assert bool(found) == used
    found.clear()

    def twice(m, ids):
        hidden = functional.linear(m.table(ids) + look_up(m, ids), m.w).tanh()
        return functional.linear(hidden[..., :WIDTH], m.w)

    check_operation(twice, parameters, ids)
    assert not found


def test_a_look_up_beside_a_layer_that_uses_the_table_twice(monkeypatch):
    found = shrunk(monkeypatch)
    ids = torch.randint(0, WIDTH, (BATCH, POSITIONS))
    check_operation(
        lambda m, ids: functional.linear(functional.embedding(ids, m.w), m.w, m.w[:, 0]),
        {"w": (WIDTH, WIDTH)},
        ids,
    )
    assert not found


def test_look_ups_without_gradients_beside_a_projection():
    """A Function in front of the projection stops them, which shows in the backward alone."""

    def function(m, ids):
        hidden = m.layer(ScaleGradient.apply(functional.embedding(ids, m.w), None)).tanh()
        return functional.linear(hidden, m.w)

    ids = torch.randint(0, 6, (BATCH, POSITIONS))
    check_operation(function, {"w": (6, WIDTH), "layer": nn.Linear(WIDTH, WIDTH)}, ids)


def test_transposed_autoencoder():
    def function(m, x):
        hidden = functional.linear(x, m.w, m.b).tanh()
        return functional.linear(hidden, m.w.t())

    check_operation(function, {"w": (3, WIDTH), "b": (3,)}, normal(BATCH, POSITIONS, WIDTH))
    check_operation(function, {"w": (3, WIDTH), "b": (3,)}, normal(BATCH, WIDTH))


# How a product can meet a transposed matrix: both axes in its result, both summed, and one each.
TRANSPOSED_PRODUCTS = {
    "kept": "pq,bk->bpqk",
    "summed": "pq,bqp->b",
    "summed at positions": "pq,btqp->bt",
    "one of each": "pq,btq->btp",
    "the same in both": "pq,bqp->bpq",
}


@pytest.mark.parametrize("equation", TRANSPOSED_PRODUCTS.values(), ids=TRANSPOSED_PRODUCTS)
@pytest.mark.parametrize(
    "transposed",
    [torch.t, lambda w: w.t() * torch.ones(2, 3).triu().double()],
    ids=["as is", "masked"],
)
def test_a_transposed_matrix_in_any_product(equation, transposed):
    sizes = {"b": BATCH, "t": POSITIONS, "p": 2, "q": 3, "k": WIDTH}
    shape = [sizes[index] for index in equation.partition(",")[2].partition("->")[0]]

    def function(m, x, rows):
        product = torch.einsum(equation, transposed(m.w), x).reshape(BATCH, -1)
        return torch.cat([product, rows @ m.w], 1)

    check_operation(
        lambda m, x: torch.einsum(equation, transposed(m.w), x), {"w": (3, 2)}, normal(*shape)
    )
    check_operation(function, {"w": (3, 2)}, normal(*shape), normal(BATCH, 3))


@pytest.mark.parametrize("times", [2, 3])
@pytest.mark.parametrize(
    "layer, shape",
    [
        (nn.Linear(WIDTH, WIDTH), (BATCH, WIDTH)),
        (nn.Linear(WIDTH, WIDTH), (BATCH, POSITIONS, WIDTH)),
        (nn.Linear(WIDTH, WIDTH), (1, POSITIONS, WIDTH)),
        (nn.Conv2d(2, 2, 3, padding=1), (BATCH, 2, 4, 4)),
        (nn.Conv1d(2, 2, 1), (BATCH, 2, 4)),
        (nn.LayerNorm(WIDTH), (BATCH, POSITIONS, WIDTH)),
        (nn.PReLU(), (BATCH, WIDTH)),
    ],
    ids=str,
)
def test_a_module_called_several_times(layer, shape, times):
    def function(m, x):
        for _ in range(times):
            x = torch.tanh(m.layer(x)) + 0.5 * x
        return x

    check_operation(function, {"layer": layer}, normal(*shape))


def test_recurrence():
    def function(m, x):
        state = torch.zeros_like(x[:, 0])
        for step in x.unbind(1):
            state = m.cell(step, state)
        return state

    class Cell(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

        def forward(self, x, state):
            return torch.tanh(self.inner(x) + self.outer(state))

    check_operation(function, {"cell": Cell()}, normal(BATCH, POSITIONS, WIDTH))


# Uses of one (WIDTH, WIDTH) parameter by different kinds of operation, in pairs.
KINDS = {
    "linear": lambda x, w: functional.linear(x, w),
    "transposed": lambda x, w: x @ w,
    "scale": lambda x, w: x * w[0],
    "shift": lambda x, w: x + w[:, 1],
    "table": lambda x, w: x + w[torch.arange(x.shape[1]) % WIDTH],
    "looked up": lambda x, w: x + functional.embedding((x[..., 0] > 0).long(), w),
    "convolution": lambda x, w: functional.conv1d(x.mT, w[..., None]).mT,
    "square": lambda x, w: x @ (w @ w),
    "normalised": lambda x, w: functional.layer_norm(x, (WIDTH,), w[2], w[3]),
    "einsum": lambda x, w: torch.einsum("btd,ed->bte", x, w),
    "einsum in groups": lambda x, w: torch.einsum("btd,de->btde", x, w).sum(2),
    "heads": lambda x, w: torch.einsum("bthd,hde->bthe", x.unflatten(-1, (2, 2)), w.view(2, 2, 4))[
        ..., :2
    ].flatten(2),
}


@pytest.mark.parametrize("first", KINDS)
@pytest.mark.parametrize("second", KINDS)
def test_a_parameter_used_by_two_kinds_of_operation(first, second):
    def function(m, x):
        return KINDS[second](torch.tanh(KINDS[first](x, m.w)), m.w)

    shapes, x = {"w": (WIDTH, WIDTH)}, normal(BATCH, POSITIONS, WIDTH)
    if first <= second:
        check_operation(function, shapes, x)
        return
    # In the other order the norms alone: their factors meet the other way round.
    model = Operation(function, shapes, upstream=False)
    expected = oracle_sqnorms(model, (x,), uneven_loss)
    assert_sqnorms(gs.per_example_norms(model, (x,), uneven_loss), expected, 1e-9)


def test_a_parameter_used_twice_in_one_operation():
    check_operation(lambda m, x: torch.addcmul(x, m.w, m.w), {"w": (WIDTH,)}, normal(BATCH, WIDTH))
    check_operation(
        lambda m, x: functional.linear(x, m.w, m.w[:, 0]), {"w": (2, WIDTH)}, normal(BATCH, WIDTH)
    )
    check_operation(
        lambda m, x: functional.layer_norm(x, (WIDTH,), m.w, m.w),
        {"w": (WIDTH,)},
        normal(BATCH, WIDTH),
    )
    check_operation(
        lambda m, x: torch.cat([m.w.expand(BATCH, 1), x, m.w.expand(BATCH, 1)], 1),
        {"w": (1, 1)},
        normal(BATCH, WIDTH),
    )
    check_operation(
        lambda m, x: torch.addmm(m.w, x, m.w, alpha=2), {"w": (BATCH, BATCH)}, normal(BATCH, BATCH)
    )


def test_unused_parameters_have_zero_norms():
    model = Operation(lambda m, x: x * m.used, {"used": (2,), "unused": (3,)}, upstream=False)
    x = normal(BATCH, 2)
    stats = gs.per_example_norms(model, (x,), uneven_loss)
    assert torch.equal(stats.by_parameter["unused"], torch.zeros(BATCH, dtype=torch.float64))
    assert (stats.by_parameter["used"] > 0).all()
    parameters = {"used": (2,), "other": (2,), "unused": (3,)}
    check_operation(lambda m, x: x * m.used + m.other, parameters, x)


def test_a_loss_that_uses_no_tracked_parameter():
    """An error, and no gradient of anything else is left behind."""
    model = Operation(lambda m, x: x * m.used, {"used": (2,), "unused": (3,)}, upstream=False)
    with pytest.raises(gs.TrackingError, match="no backward reached"):
        gs.per_example_norms(model, (normal(BATCH, 2),), uneven_loss, parameters="unused")
    assert all(parameter.grad is None for parameter in model.parameters())


def test_uses_that_the_loss_does_not_reach():
    def function(m, x):
        _ = m.layer(x) * m.scale  # thrown away
        detached = m.layer(x).detach()
        with torch.no_grad():
            detached = detached + m.layer(x)
        return m.layer(x) + detached

    check_operation(function, {"layer": nn.Linear(2, 2), "scale": (2,)}, normal(BATCH, 2))


def test_example_that_a_parameter_does_not_reach():
    def function(m, x):
        return torch.where(x[:, :1] > 0, m.first(x), m.second(x))

    x = normal(BATCH, 2)
    x[0, 0], x[1, 0] = 1, -1
    check_operation(function, {"first": nn.Linear(2, 3), "second": nn.Linear(2, 3)}, x)


def test_beside_a_tensor_derived_from_two_parameters():
    def function(m, x):
        return x @ (m.a + m.b)[:, :2] + x @ m.a[:, 2:]

    check_operation(function, {"a": (4, 4), "b": (4, 4)}, normal(BATCH, POSITIONS, WIDTH))
