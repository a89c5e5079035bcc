"""Parameters that are repeated for the batch and pass through layers before they meet data."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import gradstats as gs
from benchmarks.ledger import peak_memory
from gradstats.capture._context import Context
from gradstats.capture.parameters import _slices
from tests.oracle import assert_sqnorms, check_model, oracle_on_the_batch, oracle_sqnorms

BATCH, POSITIONS, QUERIES, WIDTH = 3, 5, 4, 6

attention = functional.scaled_dot_product_attention


class Queries(nn.Module):
    """Learned queries that look at data, once a function has made something of them.

    Attributes:
        before: called with the model and the queries, repeated for the batch.
    """

    def __init__(self, before, queries: int = QUERIES):
        super().__init__()
        self.before = before
        self.queries = nn.Parameter(torch.randn(queries, WIDTH))
        self.start = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.keys = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("numbers", torch.linspace(0.5, 2, WIDTH))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        made = self.before(self, self.queries.expand(len(x), -1, -1))
        return made + attention(made, self.keys(x), x)


def residual(m, q):
    for layer in m.layers[:3]:
        q = m.norm(q + layer(q).relu())
    return q


def among_themselves(m, q):
    first, second, third, fourth = m.layers
    return q + fourth(attention(first(q), second(q), third(q)))


def in_heads(m, q):
    parts = (layer(q).unflatten(-1, (2, -1)).transpose(1, 2) for layer in m.layers[:3])
    return attention(*parts).transpose(1, 2).flatten(2)


def with_first_states(m, q):
    first, second, third, _ = m.layers
    hidden = torch.zeros_like(q)
    return hidden + attention(first(q) + second(hidden), first(q), third(hidden) * q)


def scaled_by_numbers(m, q):
    return functional.linear(m.layers[1](q * m.numbers).tanh(), m.layers[0].weight * m.numbers)


def of_two(m, q):
    start = m.start.repeat(len(q), 1, 1)
    joined = m.norm(torch.cat([m.layers[0](start).sigmoid(), m.layers[1](q)], 1))
    return joined[:, 1:] * joined[:, :1]


def with_merged_weights(m, q):
    weight = m.layers[0].weight + m.layers[1].weight @ m.layers[2].weight.T
    return functional.linear(q.tanh(), weight) @ m.layers[3].weight


def less_their_mean(m, q):
    made = m.layers[0](q)
    return made - made.tanh().mean(0)


def of_the_next(m, q):
    return m.layers[0](q).roll(1, 0) * m.layers[1](q).exp()


def made_before(m, q):
    """Repeated late, by a number that is that of the examples."""
    return m.layers[1](m.layers[0](m.queries).relu().expand(len(q), -1, -1)).sigmoid()


class Mirrored(torch.autograd.Function):
    """Each example beside the one as far from the end of the batch."""

    @staticmethod
    def forward(ctx, x):
        return x * 2 + x.flip(0)

    @staticmethod
    def backward(ctx, grad):
        return grad * 2 + grad.flip(0)


def mirrored(m, q):
    return m.layers[1](Mirrored.apply(m.layers[0](q))).sigmoid()


TOWERS = {
    "residual": residual,
    "among themselves": among_themselves,
    "in heads": in_heads,
    "with first states": with_first_states,
    "scaled by numbers": scaled_by_numbers,
    "of two": of_two,
    "with merged weights": with_merged_weights,
    "made before": made_before,
    "less their mean": less_their_mean,
    "of the next": of_the_next,
    "mirrored": mirrored,
}


def losses(model, batch):
    (x,) = batch
    return model(x).sin().flatten(1).sum(1)


@pytest.mark.parametrize("queries", [QUERIES, BATCH])
@pytest.mark.parametrize("tower", TOWERS.values(), ids=TOWERS)
def test_norms_and_training(tower, queries):
    torch.manual_seed(0)
    model, x = Queries(tower, queries), torch.randn(BATCH, POSITIONS, WIDTH).double()
    check_model(model, (x,), losses)


class Layered(nn.Module):
    """What queries give is used in every layer, whose weights data go through as well."""

    def __init__(self, layers: int = 3):
        super().__init__()
        self.queries = nn.Parameter(torch.randn(QUERIES, WIDTH))
        self.places = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        queries = self.queries.expand(len(x), -1, -1)
        places, hidden = self.places(queries).sigmoid(), torch.zeros_like(queries)
        for layer in self.layers:
            query = layer(queries) + layer(hidden) * places
            hidden = hidden + attention(query, query, hidden + places)
            hidden = hidden + attention(query, layer(x), x)
        return hidden


def test_layers_that_all_use_them():
    torch.manual_seed(0)
    check_model(Layered(), (torch.randn(BATCH, POSITIONS, WIDTH).double(),), losses)


class Relative(nn.Module):
    """Relative positions whose keys come of the same layer as those of data, repeated for heads.

    As DeBERTa has them.
    """

    def __init__(self, heads: int = 2):
        super().__init__()
        self.heads = heads
        self.table = nn.Embedding(POSITIONS, WIDTH)
        self.norm, self.keys = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.queries = nn.Linear(WIDTH, WIDTH)
        self.double()

    def apart(self, rows: Tensor) -> Tensor:
        """Return (B · heads, T, width of a head)."""
        rows = rows.view(*rows.shape[:-1], self.heads, -1).permute(0, 2, 1, 3)
        return rows.contiguous().view(-1, *rows.shape[2:])

    def forward(self, x: Tensor) -> Tensor:
        table = self.norm(self.table.weight).unsqueeze(0)
        query, key = self.apart(self.queries(x)), self.apart(self.keys(x))
        of_places = [
            self.apart(layer(table)).repeat(len(query) // self.heads, 1, 1)
            for layer in (self.keys, self.queries)
        ]
        scores = query @ (key + of_places[1].sin()).mT
        scores = scores + torch.bmm(query, of_places[0].transpose(-1, -2))
        mixed = torch.bmm(scores.softmax(-1), key + of_places[0])
        return mixed.view(len(x), self.heads, *mixed.shape[1:]).flatten(1)


@pytest.mark.parametrize("heads", [2, BATCH])
def test_relative_positions(heads):
    torch.manual_seed(0)
    model, x = Relative(heads), torch.randn(BATCH, POSITIONS, WIDTH).double()
    check_model(model, (x,), losses)


class OfTable(nn.Module):
    """A table that all examples share goes through layers before it meets them."""

    def __init__(self, before):
        super().__init__()
        self.before = before
        self.table = nn.Parameter(torch.randn(POSITIONS, 4))
        self.up, self.down = nn.Linear(4, 12), nn.Linear(12, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.before(self)).cumsum(1)


TABLES = {
    "two layers": lambda m: m.down(m.up(m.table).tanh()),
    "normalised": lambda m: m.norm(m.down(m.up(m.table).relu())),
    "by name": lambda m: functional.linear(
        weight=m.down.weight, bias=m.up(m.table).sum(0)[:WIDTH], input=m.up(m.table)
    ),
    "a weight of its own": lambda m: functional.linear(m.table, m.down.weight[:, :4] * 2),
    "one row": lambda m: m.down(m.up(m.table[0])).sin(),
    "three axes": lambda m: m.down(m.up(m.table[None].expand(2, -1, -1)).exp()).prod(0),
    "a constant": lambda m: functional.linear(m.table.detach(), m.up.weight) @ m.down.weight.T,
}


@pytest.mark.parametrize("before", TABLES.values(), ids=TABLES)
def test_tables_through_layers(before):
    torch.manual_seed(0)
    model, x = OfTable(before), torch.randn(BATCH, POSITIONS, WIDTH).double()
    check_model(model, (x,), losses)


def test_they_are_pulled_back_together(monkeypatch):
    found, once = [], _slices.factors_of_slices

    def noted(*args):
        found.append(once(*args))
        return found[-1]

    monkeypatch.setattr(_slices, "factors_of_slices", noted)
    torch.manual_seed(0)
    x = torch.randn(BATCH, POSITIONS, WIDTH).double()
    mixing = less_their_mean, of_the_next, mirrored
    kept_apart = [tower for tower in TOWERS.values() if tower not in mixing]
    for tower in kept_apart:
        gs.per_example_norms(Queries(tower), (x,), losses)
    gs.per_example_norms(Layered(), (x,), losses)
    assert len(found) == len(kept_apart) + 1
    assert all(each is not None for each in found)
    # Where examples would meet they are pulled back one by one.
    gs.per_example_norms(Queries(less_their_mean), (x,), losses)
    assert found[-1] is None


def test_no_gradient_of_all_slices_is_made_for_each_example():
    torch.manual_seed(0)
    batch, x = 16, torch.randn(16, POSITIONS, WIDTH).double()
    model = Queries(among_themselves)
    ledger = peak_memory(lambda: gs.per_example_norms(model, (x,), losses))
    assert ledger.largest < batch * batch * QUERIES * WIDTH


def test_nothing_of_a_step_stays_behind():
    torch.manual_seed(0)
    model, x = Queries(among_themselves), torch.randn(BATCH, POSITIONS, WIDTH).double()

    def contexts() -> int:
        return sum(issubclass(type(each), Context) for each in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        before = contexts()
        for tower in (among_themselves, less_their_mean):
            model.before = tower
            gs.per_example_norms(model, (x,), losses)
            with gs.track(model, batch_size=BATCH) as tracker:
                tracker.backward(losses(model, (x,)))
            del tracker
        assert contexts() == before
    finally:
        gc.enable()


def test_under_dropout():
    """The same numbers are dropped when they are computed again."""

    def dropped(m, q):
        return functional.dropout(m.layers[0](q), 0.4) * functional.dropout(q, 0.4)

    torch.manual_seed(0)
    model, x = Queries(dropped), torch.randn(BATCH, POSITIONS, WIDTH).double()

    def seeded(model, batch):
        torch.manual_seed(1)
        return losses(model, batch)

    expected = oracle_on_the_batch(model, (x,), seeded)
    assert_sqnorms(gs.per_example_norms(model, (x,), seeded), expected, 1e-9)


def test_in_low_precision():
    torch.manual_seed(0)
    model, x = Queries(residual).float(), torch.randn(BATCH, POSITIONS, WIDTH)
    expected = oracle_sqnorms(model, (x,), losses)
    with torch.autocast("cpu", torch.bfloat16):
        found = gs.per_example_norms(model, (x,), losses)
    for name, row in found.by_parameter.items():
        torch.testing.assert_close(row, expected[name].float(), rtol=0.2, atol=1e-3)


def test_weights_that_are_updated_during_the_backward():
    torch.manual_seed(0)
    model, x = Queries(residual), torch.randn(BATCH, POSITIONS, WIDTH).double()
    expected = oracle_sqnorms(model, (x,), losses)

    def update(parameter):
        with torch.no_grad():
            parameter.sub_(parameter.grad)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    with gs.track(model, batch_size=BATCH) as tracker:
        tracker.backward(losses(model, (x,)))
    assert_sqnorms(tracker.stats, expected, 1e-9)


def test_constants_that_change_after_the_forward_are_refused():
    model = Queries(lambda m, q: m.layers[0](q) * m.scale)
    model.register_buffer("scale", torch.rand(WIDTH).double())
    x = torch.randn(BATCH, POSITIONS, WIDTH, dtype=torch.float64)
    with pytest.raises(gs.UnsupportedOperationError, match="computed again"):
        with gs.track(model, batch_size=BATCH) as tracker:
            made = losses(model, (x,))
            model.scale.data.mul_(2)
            tracker.backward(made)
