"""Tensors without rows: of an expert that no token was sent to, or an image without objects."""

from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.oracle import check_model, check_products

EXAMPLES, TOKENS, WIDTH = 3, 4, 2


class Expert(nn.Module):
    """A layer of the chosen tokens alone, which something else happens to first.

    Attributes:
        change: called with the tokens, (n, width).
    """

    def __init__(self, change):
        super().__init__()
        self.change = change
        self.first, self.expert = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)


class Routed(Expert):
    """The tokens of all examples at once."""

    def forward(self, x, chosen):
        hidden = self.first(x).flatten(0, 1)
        places = chosen.flatten().nonzero().squeeze(1)
        after = self.expert(self.change(hidden[places]))
        return hidden.index_add(0, places, after).view(x.shape)


class Looped(Expert):
    """Those of one example after the other, from which a number of rows is made."""

    def __init__(self, change, rows=lambda own: own.sum(0)):
        super().__init__(change)
        self.rows = rows

    def forward(self, x, chosen):
        hidden = self.first(x)
        own = [tokens[where] for tokens, where in zip(hidden, chosen, strict=True)]
        return torch.stack([self.expert(self.rows(self.change(each))).sin() for each in own])


def losses(model, batch):
    return model(*batch).square().flatten(1).sum(1)


def check(model, chosen, tokens=TOKENS):
    chosen = torch.tensor(chosen)
    x = torch.randn(len(chosen), tokens, WIDTH).double()
    where = torch.arange(tokens) < chosen[:, None]
    check_model(model.double(), (x, where), losses)
    check_products(model, (x, where), losses)


CHANGES = {
    "repeated": lambda own: own.repeat(2, 2)[: len(own), :WIDTH],
    "with a new axis": lambda own: own.unsqueeze(0).expand(3, -1, -1).sum(0),
    "joined": lambda own: torch.cat([own, own])[: len(own)],
    "normalised": lambda own: functional.layer_norm(own, (WIDTH,)).softmax(1),
    "changed in place": lambda own: own.clone().mul_(own.detach()),
    "cut": lambda own: torch.cat(own.tensor_split(2)),
}

# They mix the rows of examples that have some.
ORDERED = {
    "reversed": lambda own: own.flipud(),
    "sorted": lambda own: own.sort(0).values,
    "picked": lambda own: own.take_along_dim(own.detach().argsort(0), 0),
}


@pytest.mark.parametrize("name", [*CHANGES, *ORDERED])
def test_an_expert_without_tokens(name):
    check(Routed((CHANGES | ORDERED)[name]), [0] * EXAMPLES)


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("chosen", [[0, 2, 0], [1, 0, 3]])
def test_an_expert_with_tokens_of_some_examples(name, chosen):
    check(Routed(CHANGES[name]), chosen)


@pytest.mark.parametrize("name", [*CHANGES, *ORDERED])
@pytest.mark.parametrize("chosen", [[0, 0, 0], [0, 2, 0], [1, 0, 3]])
def test_examples_without_rows_one_by_one(name, chosen):
    check(Looped((CHANGES | ORDERED)[name]), chosen)


def padded(own):
    return torch.cat([own, own.new_zeros(EXAMPLES - len(own), WIDTH)])


@pytest.mark.parametrize("chosen", [[0, 0, 0], [0, 2, 0], [1, 0, 3]])
@pytest.mark.parametrize(
    "rows", [padded, lambda own: functional.pad(own, (0, 0, 0, EXAMPLES - len(own)))]
)
def test_padded_to_as_many_rows_as_there_are_examples(chosen, rows):
    check(Looped(torch.tanh, rows), chosen, tokens=EXAMPLES)


class Met(nn.Module):
    """Tokens that meet a parameter.

    Attributes:
        meets: called with the tokens, (n, width), and the parameter, (width, width).
    """

    def __init__(self, meets):
        super().__init__()
        self.meets = meets
        self.first, self.weight = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x, chosen):
        hidden = self.first(x)
        return self.gathered(hidden, chosen) + hidden.sum(1)

    def gathered(self, hidden, chosen):
        """All tokens at once, in pieces afterwards."""
        found = [tokens[where] for tokens, where in zip(hidden, chosen, strict=True)]
        met = self.meets(torch.cat(found), self.weight)
        return torch.stack([own.sum(0) for own in met.split(list(map(len, found)))])


class MetApart(Met):
    """The same, each example's alone."""

    def gathered(self, hidden, chosen):
        found = [tokens[where] for tokens, where in zip(hidden, chosen, strict=True)]
        return torch.stack([self.meets(own, self.weight).sum(0) for own in found])


class Packed(MetApart):
    """The same of packed examples."""

    def forward(self, x, chosen, starts):
        rows = [slice(*pair) for pair in pairwise(starts.tolist())]
        apart = [x[own] for own in rows], [chosen[own] for own in rows]
        return self.gathered([self.first(own) for own in apart[0]], apart[1])


MEETINGS = {
    "layer": functional.linear,
    "contracted": lambda own, weight: torch.einsum("ij,jk->ik", own, weight),
    "from the left": lambda own, weight: (weight @ own.T).T,
    "cell": lambda own, weight: torch.rnn_tanh_cell(own, own, weight, weight),
    "a copy for each": lambda own, weight: own * weight[0].expand(len(own), WIDTH),
    "of groups": lambda own, weight: functional.group_norm(own, 1, weight[0]),
    "rows of a derived table": lambda own, weight: (
        own + functional.embedding(torch.zeros(len(own)).long(), weight.exp())
    ),
}


class Prompted(nn.Module):
    """Attention of a prompt of no tokens."""

    def __init__(self):
        super().__init__()
        self.first, self.attention = nn.Linear(WIDTH, WIDTH), nn.MultiheadAttention(WIDTH, 1)

    def forward(self, x, chosen):
        hidden = self.first(x).transpose(0, 1)
        prompt = self.attention(hidden[:0], hidden, hidden)[0]
        return torch.cat([prompt, self.attention(hidden, hidden, hidden)[0]]).transpose(0, 1)


def test_attention_of_no_tokens():
    check(Prompted(), [0] * EXAMPLES)


@pytest.mark.parametrize("meets", MEETINGS)
@pytest.mark.parametrize("chosen", [[0, 0, 0], [1, 0, 3]])
@pytest.mark.parametrize("kind", [Met, MetApart])
def test_parameters_that_meet_no_rows(meets, chosen, kind):
    check(kind(MEETINGS[meets]), chosen)


@pytest.mark.parametrize("meets", MEETINGS)
@pytest.mark.parametrize("chosen", [[0, 0, 0], [0, 2, 0], [1, 0, 3]])
def test_packed_examples_without_chosen_rows(meets, chosen):
    starts = torch.arange(EXAMPLES + 1) * TOKENS
    where = torch.arange(TOKENS) < torch.tensor(chosen)[:, None]
    batch = torch.randn(EXAMPLES * TOKENS, WIDTH).double(), where.flatten(), starts
    check_model(Packed(MEETINGS[meets]).double(), batch, losses, cu_seqlens=starts)


class Sequence(Expert):
    """Sequences of no tokens, from which a number of rows is made."""

    def forward(self, x, chosen):
        return self.expert(self.change(self.first(x[:, :0])))


@pytest.mark.parametrize("examples", [1, EXAMPLES])
@pytest.mark.parametrize(
    "change",
    [
        lambda own: own.sum(1),
        lambda own: own.prod(1),
        lambda own: functional.pad(own, (0, 0, 0, 2), value=1.0),
        lambda own: own.mT @ own,
        lambda own: own.flatten(1) @ own.new_ones(0, WIDTH),
    ],
    ids=["summed", "multiplied", "padded", "of features", "of a vector"],
)
def test_sequences_of_no_tokens(change, examples):
    check(Sequence(change), [0] * examples)


class Continued(nn.Module):
    """Positions of which some are picked by index, here none, and others follow."""

    def __init__(self, picks):
        super().__init__()
        self.layer, self.last, self.picks = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), picks

    def forward(self, x):
        hidden = self.layer(x)
        return self.last(torch.cat([hidden, self.picks(hidden)], 1))


@pytest.mark.parametrize(
    "picks",
    [
        lambda h: h[torch.arange(len(h))[:, None], torch.zeros(len(h), 0, dtype=torch.long)],
        lambda h: h[:, torch.zeros(0, dtype=torch.long)],
        lambda h: h.flatten(0, 1)[torch.zeros(len(h), 0, dtype=torch.long)],
    ],
    ids=["of each example", "of all examples", "of rows"],
)
@pytest.mark.parametrize("examples", [EXAMPLES, TOKENS])
def test_an_index_without_columns(picks, examples):
    model, x = Continued(picks).double(), torch.randn(examples, TOKENS, WIDTH).double()
    check_model(model, x, lambda model, x: losses(model, (x,)))
