"""Rows that are nobody's: rows of examples are padded, or joined to constants, and picked."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import gradstats as gs
from tests.oracle import assert_sqnorms, check_model, check_products, oracle_sqnorms

EXAMPLES, TOKENS, WIDTH = 3, 5, 4
ALL = EXAMPLES * TOKENS
LENGTHS = [4, 5, 6]
BOUNDS = torch.tensor([0, 4, 9, 15])


class Layers(nn.Module):
    """Layers before, among and behind rows that are filled up.

    Attributes:
        filled: called with the module and the rows of all examples (n, width), which are 15 of
            three examples; returns what is added to them.
    """

    def __init__(self, filled):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        self.inner, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.filled = filled

    def forward(self, x):
        hidden = self.first(x).reshape(-1, WIDTH)
        return self.last(hidden + self.filled(self, hidden)).view(*x.shape[:-1], 2)


def losses(model, x):
    return model(x).sin().square().flatten(1).sum(1)


def packed_losses(model, x):
    return torch.stack([own.sin().square().sum() for own in model(x).split(LENGTHS)])


def joined(h, rows=1):
    return torch.cat([h, h.new_zeros(rows, WIDTH)])


def padded(h, rows=1):
    return functional.pad(h, (0, 0, 0, rows))


def in_front(h, rows=1):
    """Nobody's rows come first, and are moved behind all."""
    return functional.pad(h, (0, 0, rows, 0)).roll(-rows, 0)


def in_blocks(m, h, wider):
    """A layer over blocks of four rows, of which some have rows of two examples."""
    return m.inner(wider(h, 1).unflatten(0, (-1, 4))).flatten(0, 1)[: len(h)]


def cropped(m, h, wider):
    return m.norm(m.inner(wider(h, 3))).tanh()[: len(h)]


def neighbours(h, own=lambda row: row // TOKENS):
    """The places of up to three rows of the same example, filled up with the row behind all."""
    near = [[row - 1, row + 1] for row in range(len(h))]
    inside = [[j if own(j) == own(i) else ALL for j in each] for i, each in enumerate(near)]
    return torch.tensor([[*each, ALL] for each in inside])


def of_neighbours(m, h, wider):
    for _ in range(2):
        h = h + m.inner(wider(h)[neighbours(h)]).relu().sum(1)
    return h


def of_other_neighbours(m, h, wider):
    """Two picks of one form that fill up at other places."""
    first, second = neighbours(h), neighbours(h).flip(1).roll(1, 1)
    h = h + wider(h)[first].sum(1)
    return m.inner(wider(h)[second.flatten()].view(ALL, 3, WIDTH)).relu().sum(1)


def places(lengths):
    """The rows of each example, one longer than the longest, filled up with the row behind all."""
    rows = torch.arange(sum(lengths)).split(lengths)
    padding = [torch.full((1 + max(lengths) - len(own),), ALL) for own in rows]
    return torch.stack([torch.cat(each) for each in zip(rows, padding, strict=True)])


def attended(lengths):
    def filled(m, h, wider):
        at = places(lengths)
        rows = wider(h)[at]
        out = m.attention(rows, rows, rows, key_padding_mask=at == ALL, need_weights=False)[0]
        return out[at != ALL]

    return filled


def compared(m, h, wider):
    """Rows of one example with each other, before any parameter meets those that fill them up."""
    at = places([TOKENS] * EXAMPLES)
    rows = wider(h)[at]
    shares = (rows @ rows.mT).masked_fill((at == ALL)[:, None], -torch.inf).softmax(-1)
    return m.inner((shares @ rows)[at != ALL])


def smoothed(m, h, wider):
    """Sums and running sums over each example's places, with those that fill them up."""
    at = places([TOKENS] * EXAMPLES)
    rows = wider(h)[at]
    rows = rows.cumsum(1) - rows.mean(1, keepdim=True)
    return m.inner(rows[at != ALL])


SERVED = {
    "blocks": in_blocks,
    "cropped": cropped,
    "neighbours": of_neighbours,
    "other neighbours": of_other_neighbours,
    "sequences": attended([TOKENS] * EXAMPLES),
    "compared": compared,
    "smoothed": smoothed,
}
WIDER = {"joined": joined, "padded": padded, "in front": in_front}


def made(filled, wider):
    torch.manual_seed(0)
    model = Layers(lambda m, h: filled(m, h, wider)).double()
    return model, torch.randn(EXAMPLES, TOKENS, WIDTH).double()


@pytest.mark.parametrize("wider", WIDER.values(), ids=WIDER)
@pytest.mark.parametrize("name", SERVED)
def test_rows_of_examples_filled_up(name, wider):
    model, x = made(SERVED[name], wider)
    check_model(model, x, losses)
    check_products(model, x, losses)


@pytest.mark.parametrize("wider", WIDER.values(), ids=WIDER)
@pytest.mark.parametrize("filled", [in_blocks, cropped, attended(LENGTHS)])
def test_packed_rows_filled_up(filled, wider):
    model, x = made(filled, wider)
    check_model(model, x.flatten(0, 1), packed_losses, cu_seqlens=BOUNDS)


@pytest.mark.parametrize("wider", WIDER.values(), ids=WIDER)
@pytest.mark.parametrize("lengths", [[0, 7, 8], [7, 0, 8], [7, 8, 0], [7, 0, 0, 8]], ids=str)
def test_an_example_without_rows(lengths, wider):
    """All rows in its place are nobody's."""
    model, x = made(None, wider)
    bounds = functional.pad(torch.tensor(lengths).cumsum(0), (1, 0))

    def each(model, x):
        rows = wider(model.first(x))[places(lengths)]
        return model.last(model.inner(rows).tanh().sum(1)).sin().sum(1)

    check_model(model, x.flatten(0, 1), each, cu_seqlens=bounds)


@pytest.mark.parametrize("wider", WIDER.values(), ids=WIDER)
@pytest.mark.parametrize("alone", range(EXAMPLES))
def test_an_example_without_neighbours(alone, wider):
    model, x = made(None, wider)

    def each(model, x):
        h = model.first(x)
        near = torch.arange(ALL).view(EXAMPLES, TOKENS).clone()
        near[alone] = ALL
        return losses(lambda x: model.inner(wider(h.flatten(0, 1))[near]) + h, x)

    check_model(model, x, each)


@pytest.mark.parametrize("wider", WIDER.values(), ids=WIDER)
@pytest.mark.parametrize("alone", range(EXAMPLES))
def test_rows_of_one_example_put_back_and_filled_up(alone, wider):
    """The others are the zeros of the examples in whose places they are."""
    model, x = made(None, wider)
    kept = torch.arange(ALL) // TOKENS == alone

    def each(model, x):
        h = model.first(x).flatten(0, 1)
        out = torch.zeros_like(h)
        out[kept] = model.inner(h[kept])
        rows = wider(out)[places([TOKENS] * EXAMPLES)]
        return model.last(rows).sin().sum((1, 2)) + rows.amax(1).sin().sum(1)

    check_model(model, x, each)


def test_examples_filled_up():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).double()

    def each(model, x):
        h = functional.pad(model[0](x), (0, 0, 0, 2))
        return model[1](h.relu()).sin()[:EXAMPLES].sum(1)

    check_model(model, torch.randn(EXAMPLES, WIDTH).double(), each)


@pytest.mark.parametrize("front", [False, True])
def test_losses_filled_up(front):
    """As many losses as rows, though one row of each packed sequence predicts nothing."""
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, WIDTH).double()
    whose = torch.repeat_interleave(torch.arange(EXAMPLES), torch.tensor(LENGTHS))

    def each(model, x):
        own = (model(x)[:-1] - x[1:]).sin().square().sum(1) * (whose[1:] == whose[:-1])
        rows = torch.cat([own.new_zeros(1), own]) if front else functional.pad(own, (0, 1))
        return own.new_zeros(EXAMPLES).index_add(0, whose, rows.roll(-1, 0) if front else rows)

    check_model(model, torch.randn(ALL, WIDTH).double(), each, cu_seqlens=BOUNDS)


def filled_after_a_layer(m, h, wider):
    """All examples read one row, to which a layer's shift was added."""
    return m.inner(wider(h))[neighbours(h)].sum(1)


def of_all(m, h, wider):
    at = neighbours(h)
    at[0, 2] = TOKENS  # another example's row
    return m.inner(wider(h)[at]).sum(1)


def mean_of_blocks(m, h, wider):
    blocks = m.inner(wider(h, 1).unflatten(0, (-1, 4)))
    return (blocks + blocks.mean(1, keepdim=True)).flatten(0, 1)[: len(h)]


@pytest.mark.parametrize("filled", [filled_after_a_layer, of_all, mean_of_blocks])
@pytest.mark.parametrize("wider", WIDER.values(), ids=WIDER)
def test_examples_that_meet_are_refused(filled, wider):
    model, x = made(filled, wider)
    with pytest.raises(gs.GradStatsError):
        gs.per_example_norms(model, x, losses)


def test_rows_filled_up_with_copies_are_refused():
    def repeated(h, rows=1):
        return functional.pad(h.T[None], (0, rows), mode="replicate")[0].T

    model, x = made(of_neighbours, repeated)
    with pytest.raises(gs.GradStatsError):
        gs.per_example_norms(model, x, losses)


@pytest.mark.parametrize(
    "last",
    [
        lambda m, rows: m.inner(rows),
        lambda m, rows: torch.cat([rows, m.norm.bias.expand_as(rows)], -1),
    ],
    ids=["layer", "joined to parameters"],
)
def test_a_loss_over_all_examples_is_refused(last):
    """It does not tell whose the rows are that fill up the others."""
    model, x = made(None, joined)
    with pytest.raises(gs.ExampleAxisError, match="does not tell"):
        with gs.track(model, batch_size=EXAMPLES):
            h = model.first(x).flatten(0, 1)
            last(model, joined(h)[neighbours(h)]).sin().mean().backward()


def test_a_loss_over_all_examples_of_rows_that_the_caller_assigns():
    """Then it is known whose the row is that fills up the last block."""
    whose = torch.tensor([*(row // TOKENS for row in range(ALL)), 0])
    model, x = made(in_blocks, lambda h, _: gs.assign_rows(joined(h), whose))
    check_mean(model, x, losses)


def put(row):
    rows = row.new_zeros(ALL, WIDTH)
    rows[0] = row[0]
    return rows


@pytest.mark.parametrize(
    "fill",
    [
        put,
        lambda row: row.new_zeros(ALL, WIDTH).index_add(0, torch.tensor([0]), row),
        lambda row: joined(row, ALL - 1),
        lambda row: padded(row, ALL - 1),
    ],
    ids=["written", "added", "joined", "padded"],
)
def test_a_row_that_is_filled_up_to_those_of_all_packed_examples(fill):
    """The others may be those of the others."""
    model, x = made(None, None)
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0)
    with gs.track(model, batch_size=EXAMPLES, cu_seqlens=bounds):
        with pytest.raises(gs.ExampleAxisError, match="does not tell"):
            rows = fill(model.first(x.flatten(0, 1))[0][None])
            model.last(rows).sin().mean().backward()


def pick(m, rows):
    m.logged = joined(rows)[places([TOKENS] * EXAMPLES)].mean().item()


def add_up(m, rows):
    whose = torch.arange(1 + ALL) // TOKENS
    m.logged = rows.new_zeros(4, WIDTH).index_add(0, whose, padded(rows)).mean().item()


def use(m, rows):
    m.logged = m.norm(in_blocks(m, rows, joined)).std().item()


@pytest.mark.parametrize("logged", [pick, add_up, use])
def test_rows_that_are_filled_up_to_be_logged(logged):
    """A loss over all examples does not depend on them."""
    model, x = made(lambda m, h, _: logged(m, h) or h.sin(), None)
    check_mean(model, x, losses)


def by_places(own):
    return padded(own)[places([TOKENS] * EXAMPLES)].sum((1, 2))


def in_columns(own):
    return joined(own)[places([TOKENS] * EXAMPLES).T].sum((0, 2))


def added_up(own):
    whose = torch.arange(1 + ALL) // TOKENS
    return own.new_zeros(4, WIDTH).index_add(0, whose, padded(own)).sum(1)[:EXAMPLES]


@pytest.mark.parametrize("total", [by_places, in_columns, added_up])
def test_a_loss_over_all_examples_of_losses_that_are_filled_up(total):
    """Behind the last layer it does not matter whose nobody's rows are."""
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, WIDTH).double()
    x = torch.randn(EXAMPLES, TOKENS, WIDTH).double()
    check_mean(model, x, lambda model, x: total(model(x).sin().square().flatten(0, 1)))


def check_mean(model, x, losses):
    with gs.track(model, batch_size=EXAMPLES) as tracker:
        losses(model, x).mean().backward()
    assert_sqnorms(tracker.stats, oracle_sqnorms(model, x, losses), rtol=1e-9)
