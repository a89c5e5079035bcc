"""Examples of uneven length packed into one row, as padding-free training does."""

import itertools
import re

import pytest
import torch
from torch import nn
from torch.nn import functional

import gradstats as gs
from tests.oracle import (
    assert_sqnorms,
    flat,
    gradients_of,
    oracle_on_the_batch,
    oracle_sqnorms,
)

LENGTHS = [(3, 1, 5), (2, 2, 2), (4, 0, 1, 3), (1,)]


class Tagger(nn.Module):
    """A small language model with tied weights that keeps packed examples apart."""

    def __init__(self, vocabulary=11, width=8, positions=6):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(positions, width)
        self.norm = nn.LayerNorm(width)
        self.project = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width, bias=False)
        self.scale = nn.Parameter(torch.ones(width))
        self.up = nn.Parameter(torch.randn(width, 2))
        self.down = nn.Parameter(torch.randn(2, width))
        self.head = nn.Linear(width, vocabulary)
        self.head.weight = self.embedding.weight

    def forward(self, ids, positions, owner):
        """(*, N) ids, positions and owners → (*, N, vocabulary)."""
        hidden = self.embedding(ids) + self.position(positions)
        q, k, v = self.project(self.norm(hidden)).chunk(3, dim=-1)
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        apart = owner.unsqueeze(-1) != owner.unsqueeze(-2)
        mixed = scores.masked_fill(apart, -torch.inf).softmax(-1) @ v
        adapted = functional.linear(mixed, self.out.weight + 0.5 * (self.up @ self.down))
        return self.head(hidden * self.scale + adapted)


def packed(lengths):
    counts = torch.tensor(lengths)
    rows = int(counts.sum())
    owner = torch.arange(len(lengths)).repeat_interleave(counts)
    positions = torch.cat([torch.arange(n) for n in lengths])
    ids = torch.randint(11, (rows,))
    bounds = functional.pad(counts.cumsum(0), (1, 0))
    return (ids, positions, owner, ids.roll(1)), bounds


def losses_of(lengths, leading):
    def loss_fn(model, batch):
        ids, positions, owner, targets = batch
        if leading:
            ids, positions, owner = ids[None], positions[None], owner[None]
        logits = model(ids, positions, owner).view(-1, 11)
        tokens = functional.cross_entropy(logits, targets.view(-1), reduction="none")
        return torch.stack([part.sum() for part in tokens.split(list(lengths))])

    return loss_fn


def expected_sqnorms(model, batch, lengths, loss_fn_of):
    """One example at a time: its own rows and nothing else."""
    rows, start = [], 0
    for length in lengths:
        if length:
            example = tuple(tensor[start : start + length] for tensor in batch)
            alone = oracle_sqnorms(
                model, tuple(t[None] for t in example), lambda m, b: loss_fn_of(m, b)
            )
            rows.append({name: value[0] for name, value in alone.items()})
        else:
            rows.append(None)
        start += length
    zero = torch.zeros((), dtype=torch.float64)
    names = next(row for row in rows if row is not None)
    return {n: torch.stack([zero if r is None else r[n] for r in rows]) for n in names}


def alone(model, batch):
    ids, positions, owner, targets = batch
    logits = model(ids, positions, owner)
    return functional.cross_entropy(logits.mT, targets, reduction="none").sum(1)


def sqnorms_alone(model, examples, loss_of):
    """Squared norms by the oracle of examples each of which is given to ``loss_of`` alone."""
    each = [oracle_sqnorms(model, (), lambda m, _, own=own: loss_of(m, own)) for own in examples]
    return {name: torch.cat([one[name] for one in each]) for name in each[0]}


def check_packed(model, batch, loss_fn, bounds, expected):
    """Check norms alone and beside training, fused and not, and the training gradients."""
    got = gs.per_example_norms(model, batch, loss_fn, cu_seqlens=bounds)
    assert_sqnorms(got, expected, 1e-9)

    loss_fn(model, batch).sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    for fused, rtol, atol in ((True, 1e-11, 1e-13), (False, 0, 0)):
        model.zero_grad()
        with gs.track(
            model, batch_size=len(bounds) - 1, cu_seqlens=bounds, loss_reduction="sum", fused=fused
        ) as tracker:
            loss_fn(model, batch).sum().backward()
        assert_sqnorms(tracker.stats, expected, 1e-9)
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=rtol, atol=atol)


@pytest.mark.parametrize("leading", [False, True], ids=["(N,)", "(1, N)"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_packed_examples(lengths, leading):
    torch.manual_seed(0)
    model = Tagger().double()
    batch, bounds = packed(lengths)
    expected = expected_sqnorms(model, batch, lengths, alone)
    check_packed(model, batch, losses_of(lengths, leading), bounds, expected)


def test_packed_rows_as_many_as_examples():
    """With one row each, packing changes nothing."""
    torch.manual_seed(0)
    model = Tagger().double()
    batch, bounds = packed((1, 1, 1, 1))
    expected = expected_sqnorms(model, batch, (1, 1, 1, 1), alone)
    got = gs.per_example_norms(model, batch, losses_of((1, 1, 1, 1), True), cu_seqlens=bounds)
    assert_sqnorms(got, expected, 1e-9)


@pytest.mark.parametrize(
    "bounds, message",
    [
        (torch.tensor([0.0, 9.0]), r"torch.float32.*B \+ 1 integers"),
        (torch.tensor([[0, 9]]), r"\(1, 2\)"),
        (torch.tensor([0]), r"shape \(1,\)"),
        (torch.tensor([1, 9]), "begin with 0"),
        (torch.tensor([0, 5, 4, 9]), "never decrease"),
        # Three rows may be those of the batch, or one for each example.
        (torch.tensor([0, 1, 1, 3]), "as many rows as examples.*Leave out the empty examples"),
        (torch.tensor([0, 4]), r"ends with 4 rows.*shape \(9,\)"),
    ],
)
def test_bounds_that_do_not_fit(bounds, message):
    model = Tagger()
    batch, _ = packed((3, 1, 5))
    with pytest.raises(gs.ExampleAxisError, match=message):
        gs.per_example_norms(model, batch, losses_of((3, 1, 5), True), cu_seqlens=bounds)


@pytest.mark.parametrize("bounds", [[0, 1, 1], [0, 0, 1]])
def test_a_single_row_of_a_single_number(bounds):
    """Beside examples that have none it is one example's all the same, not a constant."""
    model, x = nn.Linear(1, 1).double(), torch.randn(1, 1).double()
    with gs.track(
        model, batch_size=2, cu_seqlens=torch.tensor(bounds), loss_reduction="sum"
    ) as tracker:
        (x * model.weight).exp().sum().backward()
    expected = torch.tensor(bounds).diff() * model.weight.grad.square().sum()
    torch.testing.assert_close(tracker.stats.sqnorm, expected)


def test_batch_size_that_does_not_fit():
    with pytest.raises(gs.ExampleAxisError, match="2 examples, but batch_size is 3"):
        gs.track(Tagger(), batch_size=3, cu_seqlens=torch.tensor([0, 4, 9]))


def test_data_with_other_rows_are_told_what_is_expected():
    x, others = torch.randn(9, 4), torch.randn(3, 4)
    with pytest.raises(
        gs.ExampleAxisError,
        match=r"shape \(3, 4\)\n +expected: the 9 rows of 3 packed examples along axis 0",
    ):
        gs.per_example_norms(
            nn.Linear(4, 1), x, lambda model, _: model(others)[:, 0], cu_seqlens=[0, 3, 4, 9]
        )


class Slices(nn.Module):
    """A function of packed rows and of a parameter, which has a slice for each of them."""

    def __init__(self, function, slices):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.slices = nn.Parameter(slices)
        self.function = function

    def forward(self, x):
        return self.function(self.layer(x), self.slices)


def expanded(w):
    return w.expand(1, 9, 4)


def sunk(x, w):
    """As attention with a sink is rescaled, whose score is the same for all rows."""
    total = torch.logsumexp(torch.cat([x, w.view(1, 1, -1).expand(1, 9, -1)], -1), -1, True)
    return (x.logsumexp(-1, keepdim=True) - total).exp() * x


OWN_SLICES = {
    "expanded, joined": (lambda x, w: torch.cat([x, expanded(w)], -1), (4,)),
    "expanded, stacked": (lambda x, w: torch.stack([expanded(w), x], 1).prod(1), (4,)),
    "expanded, added": (lambda x, w: x + expanded(w), (4,)),
    "expanded, in place": (lambda x, w: x.clone().mul_(expanded(w)), (4,)),
    "expanded, added as powers": (lambda x, w: torch.logaddexp(x, expanded(w)), (4,)),
    "turned": (lambda x, w: torch.atan2(x, w.T), (4, 9)),
    "expanded, chosen": (lambda x, w: torch.where(x > 0, x, expanded(w)), (4,)),
    "a sink": (sunk, (4,)),
    "repeated": (lambda x, w: x * w.repeat(9, 1), (4,)),
    "added": (lambda x, w: x + w, (9, 4)),
    "multiplied": (lambda x, w: w.softmax(0) * x, (9, 4)),
    "complex": (lambda x, w: torch.view_as_real(torch.view_as_complex(w) * x), (9, 4, 2)),
    "complex, conjugated": (
        lambda x, w: torch.view_as_real(torch.view_as_complex(w).conj() * (x + 1j)),
        (9, 4, 2),
    ),
    "joined": (lambda x, w: torch.cat([w[None], x], 2), (9, 4)),
    "positions": (lambda x, w: x + w[torch.arange(9)], (12, 4)),
    "embedded": (lambda x, w: x + functional.embedding(torch.arange(9), w), (12, 4)),
    "larger": (lambda x, w: torch.maximum(x, w[2:11]), (12, 4)),
    "given shape": (lambda x, w: sum(torch.broadcast_tensors(x, w)), (9, 4)),
    "differences": (lambda x, w: torch.addcmul(x, x - w, w, value=2), (9, 4)),
}


@pytest.mark.parametrize("function, shape", OWN_SLICES.values(), ids=OWN_SLICES)
@pytest.mark.parametrize("lengths", [[4, 2, 3], [3, 3, 3], [9], [2, 0, 7]], ids=str)
def test_slices_of_a_parameter_for_packed_rows(function, shape, lengths):
    torch.manual_seed(0)
    model = Slices(function, torch.randn(shape)).double()
    check_slices(model, torch.randn(1, 9, 4, dtype=torch.float64), lengths)


def test_products_with_slices_for_packed_rows_of_one_row_each():
    def scaled(x, w):
        return torch.einsum("...nd,nd->...n", x, w.softmax(0)).unsqueeze(-1) * x

    torch.manual_seed(0)
    model = Slices(scaled, torch.randn(9, 4)).double()
    check_slices(model, torch.randn(1, 9, 4, dtype=torch.float64), [1] * 9)


class Same(torch.autograd.Function):
    """The mean of all slices in place of each, and each one's own gradient, as quantised."""

    @staticmethod
    def forward(ctx, w):
        return w.mean(0, keepdim=True).expand_as(w)

    @staticmethod
    def backward(ctx, grad):
        return grad


@pytest.mark.parametrize("lengths", [[4, 2, 3], [3, 3, 3]], ids=str)
def test_slices_that_are_one_in_memory_alone(lengths):
    torch.manual_seed(0)
    rows = torch.randn(1, 9, 4, dtype=torch.float64)
    model = Slices(torch.mul, torch.zeros(0)).double()
    model.slices = nn.Parameter(torch.randn(1, 4).double().expand(9, 4))
    check_slices(model, rows, lengths)
    check_slices(Slices(lambda x, w: x * Same.apply(w), torch.randn(9, 4)).double(), rows, lengths)


def check_slices(model, rows, lengths):
    def losses(model, rows):
        found = model(rows)[0].flatten(1).square().sum(1)
        return torch.stack([part.sum() for part in found.split(lengths)])

    expected = sqnorms_alone(model, range(len(lengths)), lambda m, own: losses(m, rows)[own, None])
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    check_packed(model, rows, losses, bounds, expected)


def oracle_gradients(model, batch, lengths):
    """∇ℓ_i of packed examples, each computed alone."""
    examples = zip(*(tensor[None].split(lengths, 1) for tensor in batch), strict=True)
    losses = [alone(model, example).sum() for example in examples]
    return flat(gradients_of(model, torch.stack(losses)))


def test_inner_products_of_packed_examples():
    torch.manual_seed(0)
    one, other = Tagger().double(), Tagger().double()
    lengths, theirs = (3, 1, 5), (2, 6)
    (batch, bounds), (batch_b, bounds_b) = packed(lengths), packed(theirs)
    first, second = oracle_gradients(one, batch, lengths), oracle_gradients(other, batch_b, theirs)

    def loss_fn(model, batch):
        sizes = lengths if len(batch[0]) == sum(lengths) else theirs
        return losses_of(sizes, True)(model, batch)

    got = gs.inner_products(one, batch, other, batch_b, loss_fn, cu_seqlens=(bounds, bounds_b))
    torch.testing.assert_close(got, first @ second.T, rtol=1e-9, atol=1e-12)
    got = gs.inner_products(one, batch, one, batch, loss_fn, cu_seqlens=bounds)
    torch.testing.assert_close(got, first @ first.T, rtol=1e-9, atol=1e-12)
    # One batch given twice with bounds of its own for either side is two batches.
    sizes = itertools.cycle([lengths, (1, 3, 5)])

    def cut(batch, sizes):
        owner = torch.arange(3).repeat_interleave(torch.tensor(sizes))
        return *batch[:2], owner, batch[3]

    def loss_of_either(model, batch):
        own = next(sizes)
        return losses_of(own, True)(model, cut(batch, own))

    both = bounds, torch.tensor([0, 1, 4, 9])
    got = gs.inner_products(one, batch, one, batch, loss_of_either, cu_seqlens=both)
    theirs = oracle_gradients(one, cut(batch, (1, 3, 5)), (1, 3, 5))
    torch.testing.assert_close(got, first @ theirs.T, rtol=1e-9, atol=1e-12)
    direction = {name: torch.randn_like(p) for name, p in one.named_parameters()}
    flat = torch.cat([value.flatten() for value in direction.values()])
    got = gs.alignment(one, batch, loss_fn, direction, cu_seqlens=bounds)
    torch.testing.assert_close(got, first @ flat, rtol=1e-9, atol=1e-12)
    got = gs.alignment(one, batch, loss_fn, "mean", cu_seqlens=bounds)
    torch.testing.assert_close(got, first @ first.mean(0), rtol=1e-9, atol=1e-12)


class Graphs(nn.Module):
    """Messages along edges between the nodes of each graph, which are pooled before the head."""

    def __init__(self, pool):
        super().__init__()
        self.message = nn.Linear(4, 6)
        self.update = nn.Linear(6, 6)
        self.whole = nn.Parameter(torch.randn(1, 6))
        self.head = nn.Linear(6, 1)
        self.pool = pool

    def forward(self, graphs):
        source, target = graphs.edges
        sent = self.message(graphs.nodes)[source]
        hidden = torch.zeros(len(graphs.nodes), 6).to(sent).index_add_(0, target, sent)
        hidden = self.update(hidden.tanh()) + self.whole.expand(graphs.count, -1)[graphs.owner]
        return self.head(self.pool(hidden, graphs).tanh())[:, 0]


class Packed:
    """A batch of graphs that is no mapping of tensors, as torch_geometric has it."""

    def __init__(self, *graphs):
        counts = torch.tensor([len(nodes) for nodes, _ in graphs])
        self.count, self.bounds = len(graphs), functional.pad(counts.cumsum(0), (1, 0))
        self.nodes = torch.cat([nodes for nodes, _ in graphs])
        self.owner = torch.arange(len(graphs)).repeat_interleave(counts)
        pairs = zip(graphs, self.bounds, strict=False)
        self.edges = torch.cat([edges + first for (_, edges), first in pairs], 1)

    def places(self, most):
        """Where each node lies among ``most`` places for the nodes of every graph."""
        return torch.arange(len(self.nodes)) - self.bounds[self.owner] + self.owner * most


def sums(hidden, graphs):
    return hidden.new_zeros(graphs.count, 6).index_add_(0, graphs.owner, hidden)


def largest(hidden, graphs):
    places = graphs.owner[:, None].expand_as(hidden)
    none = hidden.new_zeros(graphs.count, 6)
    return none.scatter_reduce(0, places, hidden, "amax", include_self=False)


def filled_up(hidden, graphs):
    parts = hidden.split(graphs.bounds.diff().tolist())
    squares = nn.utils.rnn.pad_sequence(parts, batch_first=True).square().sum(1)
    return squares + nn.utils.rnn.pad_sequence(parts).sin().sum(0)


def dense(hidden, graphs):
    """As torch_geometric makes a dense batch: a row behind the last is for nodes too many."""
    most = int(graphs.bounds.diff().max())
    places = graphs.places(most)
    rows = torch.tensor(0.0).to(hidden).repeat(graphs.count * most + 1, 6)
    rows[places] = hidden
    filled = torch.zeros(len(rows), dtype=torch.bool).index_fill(0, places, True)
    rows, filled = (item[:-1].unflatten(0, (graphs.count, most)) for item in (rows, filled))
    weights = (rows @ rows.mT).masked_fill(~filled[:, None], -torch.inf).softmax(-1)
    return sums((weights @ rows)[filled], graphs)


def segments(hidden, graphs):
    lengths = graphs.bounds.diff()
    added = torch.segment_reduce(hidden, "sum", offsets=graphs.bounds, initial=0)
    return added + torch.segment_reduce(hidden.sin(), "max", lengths=lengths, initial=-1)


def last_first(hidden, graphs):
    return sums(hidden, graphs).flip(0)


def medians(hidden, graphs):
    """Sorted by value, then by graph, as torch_geometric finds them for each feature."""
    values, order = hidden.sort(0)
    owner = graphs.owner[:, None].expand_as(hidden).take_along_dim(order, 0)
    values = values.take_along_dim(owner.sort(dim=0, stable=True).indices, 0)
    return values[graphs.bounds[:-1] + (graphs.bounds.diff() - 1) // 2]


POOLS = [sums, largest, filled_up, segments, last_first]


@pytest.mark.parametrize(
    "sizes, pool",
    [
        *itertools.product([(3, 1, 5), (2, 2, 2), (1, 1, 1)], [*POOLS, dense, medians]),
        *itertools.product([(2, 0, 4)], POOLS),
    ],
)
def test_graphs_in_one_batch(sizes, pool):
    torch.manual_seed(0)
    model = Graphs(pool).double()
    graphs = [
        (torch.randn(size, 4).double(), torch.randint(max(1, size), (2, 2 * size)))
        for size in sizes
    ]
    batch = Packed(*graphs)
    got = gs.per_example_norms(model, batch, lambda m, b: m(b), cu_seqlens=batch.bounds)
    # Norms stand in the order of the losses.
    ordered = graphs[::-1] if pool is last_first else graphs
    expected = sqnorms_alone(model, ordered, lambda m, graph: m(Packed(graph)))
    assert_sqnorms(got, expected, 1e-9)


@pytest.mark.parametrize("more", [0, 1], ids=["", "a row behind the last"])
def test_neighbours_one_after_the_other(more):
    """Each node has places for its neighbours, as layers with a recurrence over them have."""
    bounds, source = torch.tensor([0, 2, 5]), torch.tensor([1, 0, 0, 4, 2, 3, 4])
    places = torch.tensor([0, 1, 3, 6, 9, 10, 11])
    model = nn.ModuleList([nn.Linear(4, 4), nn.LSTM(4, 3, batch_first=True)]).double()

    def loss_fn(model, nodes):
        rows = torch.zeros(5 * 3 + more, 4).double()
        rows[places] = model[0](nodes)[source]
        hidden = model[1](rows[:15].view(5, 3, 4))[0].sum(1).sin()
        sums = torch.zeros(2, 3).double().index_add(0, torch.tensor([0, 0, 1, 1, 1]), hidden)
        return sums.square().sum(1)

    nodes = torch.randn(5, 4).double()
    expected = oracle_sqnorms(model, nodes, loss_fn)
    check_packed(model, nodes, loss_fn, bounds, expected)


@pytest.mark.parametrize("added", [False, True], ids=["scatter", "scatter_add_"])
def test_matrices_of_the_edges_of_each_graph(added):
    """Ones at places that the batch names, as dense layers on graphs have them."""

    class Dense(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 2)

        def forward(self, graphs):
            most = int(graphs.bounds.diff().max())
            first, last = (graphs.edges - graphs.bounds[graphs.owner][graphs.edges]).unbind()
            places = (graphs.owner[graphs.edges[0]] * most + first) * most + last
            edges = torch.zeros(graphs.count * most**2).double()
            ones = torch.ones(len(places)).double()
            edges = edges.scatter_add_(0, places, ones) if added else edges.scatter(0, places, ones)
            edges = edges.view(graphs.count, most, most)
            rows = torch.zeros(graphs.count * most, 4).double()
            rows[graphs.places(most)] = graphs.nodes
            hidden = edges @ self.first(rows.view(graphs.count, most, 4)).sin()
            return self.last(edges @ hidden).sin().sum((1, 2))

    torch.manual_seed(0)
    model = Dense().double()
    graphs = [(torch.randn(n, 4).double(), torch.randint(n, (2, 2 * n))) for n in (5, 5, 5)]
    batch = Packed(*graphs)
    got = gs.per_example_norms(model, batch, lambda m, b: m(b), cu_seqlens=batch.bounds)
    expected = sqnorms_alone(model, graphs, lambda m, graph: m(Packed(graph)))
    assert_sqnorms(got, expected, 1e-9)


@pytest.mark.parametrize("fill", ["assigned", "index_fill", "index_put"])
def test_attention_among_the_nodes_of_each_graph(fill):
    """As graph transformers attend: where there are nodes is written down as numbers."""

    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.attention = nn.Linear(4, 6), nn.MultiheadAttention(6, 2)
            self.head = nn.Linear(6, 1)

        def forward(self, graphs):
            most = int(graphs.bounds.diff().max())
            places = graphs.places(most)
            rows = torch.zeros(graphs.count * most + 1, 6).double()
            rows[places] = self.first(graphs.nodes)
            empty = torch.ones(len(rows), dtype=torch.bool)
            if fill == "assigned":
                empty[places] = False
            elif fill == "index_fill":
                empty = empty.index_fill(0, places, False)
            else:
                empty.index_put_((places,), torch.tensor(False))
            rows, empty = (t[:-1].unflatten(0, (graphs.count, most)) for t in (rows, empty))
            rows = rows.transpose(0, 1)
            mixed, _ = self.attention(rows, rows, rows, key_padding_mask=empty)
            return sums(mixed.transpose(0, 1)[~empty], graphs) @ self.head.weight[0]

    torch.manual_seed(0)
    model = Attends().double()
    graphs = [(torch.randn(n, 4).double(), torch.randint(n, (2, n))) for n in (3, 1, 5)]
    batch = Packed(*graphs)
    got = gs.per_example_norms(model, batch, lambda m, b: m(b), cu_seqlens=batch.bounds)
    expected = sqnorms_alone(model, graphs, lambda m, graph: m(Packed(graph)))
    assert_sqnorms(got, expected, 1e-9)


@pytest.mark.parametrize(
    ("users", "items"),
    [([0, 0, 1, 1, 1], [0, 1, 1, 1, 1]), ([0, 0, 0, 0, 0, 1, 1], [0, 0, 0, 0, 1, 1, 1])],
)
def test_items_that_no_user_chose_are_not_known_by_as_many_users(users, items):
    """There are as many of both, but not in each of the graphs."""
    model = nn.ModuleList([nn.Linear(3, 5), nn.Linear(3, 5), nn.Linear(5, 5)]).double()
    given, chosen = (torch.randn(len(of), 3).double() for of in (users, items))
    lone = items.index(1)
    edges = torch.tensor([(a, b) for a, b in enumerate(range(len(items))) if b != lone])
    edges = edges[[users[a] == items[b] for a, b in edges.tolist()]].repeat(2, 1)
    with (
        gs.track(model, batch_size=2, cu_seqlens=torch.tensor([0, 4, 20]), loss_reduction="sum"),
        pytest.raises(gs.ExampleAxisError, match=r"not known"),
    ):
        given = model[0](gs.assign_rows(given, torch.tensor(users))).tanh()
        chosen = model[1](gs.assign_rows(chosen, torch.tensor(items)))
        received = torch.zeros(len(items), 5).double().index_add(0, edges[:, 1], given[edges[:, 0]])
        (model[2](received).sin().sum() + chosen.sum()).backward()


@pytest.mark.parametrize("reached", [[0, 2, 3, 6], [0, 1, 3, 6], [5]])
def test_nodes_that_pooling_left_without_neighbours(reached):
    """They lie as the nodes that were kept; a loss over all examples does not tell."""
    model = nn.ModuleList([nn.Linear(3, 4), nn.Linear(4, 4)]).double()
    nodes, owner = torch.randn(10, 3).double(), torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2, 2])
    kept, reached = torch.tensor([1, 2, 3, 4, 5, 7, 8]), torch.tensor(reached)

    def loss_fn(model, batch):
        nodes, owner = batch
        hidden = model[0](nodes).tanh()[kept]
        received = torch.zeros(7, 4).double().index_add(0, reached, hidden[reached])
        sums = torch.zeros(3, 4).double().index_add(0, owner[kept], model[1](received).sin())
        return sums.square().sum(1)

    batch, bounds = (nodes, owner), torch.tensor([0, 3, 6, 10])
    got = gs.per_example_norms(model, batch, loss_fn, cu_seqlens=bounds)
    assert_sqnorms(got, oracle_on_the_batch(model, batch, loss_fn), 1e-9)
    with (
        gs.track(model, batch_size=3, cu_seqlens=bounds),
        pytest.raises(gs.ExampleAxisError, match=r"nothing was written to some rows"),
    ):
        loss_fn(model, batch).mean().backward()


class Weighed(nn.Module):
    """A graph layer with trained weights of edges, beside those of self-loops, which are ones."""

    def __init__(self):
        super().__init__()
        self.of_edge, self.of_node = nn.Linear(2, 1), nn.Linear(3, 4)
        self.shift, self.last = nn.Parameter(torch.randn(4)), nn.Linear(4, 2)

    def forward(self, nodes, edges, features, loops):
        weights = self.of_edge(features).squeeze(1).sigmoid()
        weights = torch.cat([weights, weights.new_ones(len(nodes))])
        source, target = torch.cat([edges, loops.expand(2, -1)], 1)
        degrees = torch.zeros(len(nodes)).to(nodes).scatter_add_(0, target, weights)
        weights = degrees[source].rsqrt() * weights * degrees[target].rsqrt()
        sent = weights[:, None] * self.of_node(nodes)[source]
        received = nodes.new_zeros(len(nodes), 4).index_add_(0, target, sent)
        return self.last((received + self.shift).tanh())


def loss_of_weighed(sizes, loops=None):
    owner = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    loops = torch.arange(len(owner)) if loops is None else loops

    def losses(model, batch):
        nodes, edges, features, labels = batch
        gs.assign_rows(features, owner[edges[0]])
        rows = model(nodes, edges, features, loops)
        pooled = torch.zeros(len(sizes), 2).to(rows).index_add(0, owner, rows)
        return functional.cross_entropy(pooled, labels, reduction="none")

    return losses


def weighed_graphs(sizes):
    first = itertools.accumulate(sizes[:-1], initial=0)
    edges = [
        start + torch.randint(n, (2, 2 * (n - 1))) for start, n in zip(first, sizes, strict=True)
    ]
    edges = torch.cat(edges, 1)
    nodes, features = torch.randn(sum(sizes), 3), torch.randn(edges.shape[1], 2)
    bounds = functional.pad(torch.tensor(sizes).cumsum(0), (1, 0))
    return (nodes.double(), edges, features.double(), torch.randint(2, (len(sizes),))), bounds


@pytest.mark.parametrize("sizes", [(3, 5, 4), (2, 2, 2), (4, 1, 1, 2), (5, 3), (4,)], ids=str)
def test_constants_that_are_joined_to_the_rows_of_examples(sizes):
    torch.manual_seed(0)
    model, (batch, bounds) = Weighed().double(), weighed_graphs(sizes)
    losses = loss_of_weighed(sizes)
    expected = oracle_on_the_batch(model, batch, losses)
    assert_sqnorms(gs.per_example_norms(model, batch, losses, cu_seqlens=bounds), expected, 1e-9)
    with gs.track(model, batch_size=len(sizes), cu_seqlens=bounds) as tracker:
        tracker.backward(losses(model, batch))
    assert_sqnorms(tracker.stats, expected, 1e-9)
    if len(sizes) > 1:
        with (
            gs.track(model, batch_size=len(sizes), cu_seqlens=bounds),
            pytest.raises(gs.ExampleAxisError, match=r"constants were joined to its rows"),
        ):
            losses(model, batch).mean().backward()


@pytest.mark.parametrize("sizes", [(3, 5, 4), (2, 2, 2)], ids=str)
def test_joined_constants_of_other_nodes_than_they_are_taken_for(sizes):
    """Self-loops in another order: those of other examples meet the edges' weights."""
    torch.manual_seed(0)
    model, (batch, bounds) = Weighed().double(), weighed_graphs(sizes)
    losses = loss_of_weighed(sizes, torch.arange(sum(sizes)).flip(0))
    with pytest.raises((gs.ExampleAxisError, gs.CoupledExamplesError)):
        gs.per_example_norms(model, batch, losses, cu_seqlens=bounds)


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [0, 1, 3, 2]])
def test_joined_constants_that_meet_no_rows_of_other_examples(order):
    """Those of two examples could be taken for each other's where they meet given values alone."""
    order = torch.tensor(order)
    model, nodes = nn.ModuleList([nn.Linear(2, 1), nn.Linear(1, 1)]).double(), torch.randn(4, 1)
    batch = nodes.double(), torch.randn(3, 2).double()

    def losses(model, batch):
        nodes, edges = batch
        weights = model[0](gs.assign_rows(edges, torch.zeros(3, dtype=torch.long)))[:, 0].exp()
        weights = torch.cat([weights, torch.arange(1, 5).to(weights)])
        sent = (
            model[1](weights[:, None])[:, 0]
            * nodes[torch.cat([torch.tensor([0, 1, 1]), order])][:, 0]
        )
        targets = torch.cat([torch.tensor([1, 0, 0]), order])
        received = torch.zeros(4).to(sent).index_add(0, targets, sent)
        return torch.zeros(3).to(sent).index_add(0, torch.tensor([0, 0, 1, 2]), received).square()

    bounds = torch.tensor([0, 2, 3, 4])
    if order.tolist() == [0, 1, 2, 3]:
        got = gs.per_example_norms(model, batch, losses, cu_seqlens=bounds)
        assert_sqnorms(got, oracle_on_the_batch(model, batch, losses), 1e-9)
    else:
        with pytest.raises(gs.ExampleAxisError, match=r"order of the batch"):
            gs.per_example_norms(model, batch, losses, cu_seqlens=bounds)


def test_graphs_without_bounds_are_refused():
    batch = Packed((torch.randn(3, 4), torch.randint(3, (2, 6))))
    with pytest.raises(gs.ExampleAxisError, match=r"Packed.*cu_seqlens="):
        gs.per_example_norms(Graphs(sums), batch, lambda m, b: m(b))


def test_packed_examples_whose_bounds_were_not_given():
    def loss_fn(model, rows):
        return torch.zeros(2).index_add(0, torch.tensor([0, 0, 1, 1, 1]), model(rows[0]).sum(1))

    message = (
        "the losses have shape (2,), expected (1,): one loss for each example. Reduce every axis "
        "but the example axis. If the number of examples is wrong: it is batch_size= of a context, "
        "elsewhere the size of the batch's first tensor along batch_dim=, and for packed examples "
        "what cu_seqlens= says."
    )
    with pytest.raises(gs.LossShapeError, match=f"^{re.escape(message)}$"):
        gs.per_example_norms(nn.Linear(3, 4), torch.randn(1, 5, 3), loss_fn)


def test_rows_that_fall_on_other_examples_are_refused():
    """As many edges as nodes, of which the graphs have other numbers."""

    def loss_fn(model, batch):
        sent, target = model(batch), torch.tensor([1, 2, 5, 4, 4, 5])
        nodes = torch.zeros(6, 4).index_add(0, target, sent).tanh()
        return torch.zeros(2, 4).index_add(0, torch.tensor([0, 0, 0, 0, 1, 1]), nodes).sum(1)

    with pytest.raises(gs.CoupledExamplesError, match="different examples"):
        gs.per_example_norms(
            nn.Linear(3, 4), torch.randn(6, 3), loss_fn, cu_seqlens=torch.tensor([0, 4, 6])
        )


def test_attention_between_packed_examples_says_what_keeps_them_apart():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, rows):
            h = self.first(rows)[None]
            return self.last(functional.scaled_dot_product_attention(h, h, h, is_causal=True)[0])

    def loss_fn(model, rows):
        return torch.zeros(2).index_add(0, torch.tensor([0, 0, 0, 1, 1]), model(rows).sum(1))

    with pytest.raises(
        gs.ExampleAxisError, match=r"rows of their own example only.*use_cache=False"
    ):
        gs.per_example_norms(
            Attention(), torch.randn(5, 3), loss_fn, cu_seqlens=torch.tensor([0, 3, 5])
        )


@pytest.mark.parametrize("product", [torch.sparse.mm, torch.matmul, torch.spmm])
def test_products_with_a_sparse_matrix_of_edges(product):
    """As many graphs in one have it: blocks along the diagonal."""
    torch.manual_seed(0)
    bounds = torch.tensor([0, 3, 4, 8])
    blocks = torch.block_diag(*(torch.rand(n, n).double() for n in bounds.diff().tolist()))
    owner = torch.arange(3).repeat_interleave(bounds.diff())
    model = nn.ModuleList([nn.Linear(3, 5), nn.Linear(5, 2)]).double()

    def loss_fn(model, batch):
        nodes, edges = batch
        hidden = product(edges, model[0](nodes)).relu()
        outputs = model[1](product(edges, hidden))
        return torch.zeros(3, 2).to(outputs).index_add(0, owner, outputs.sin()).sum(1)

    nodes = torch.randn(8, 3).double()
    expected = oracle_sqnorms(model, (nodes, blocks), loss_fn)
    batch = (nodes, blocks.to_sparse())
    got = gs.per_example_norms(model, batch, loss_fn, cu_seqlens=bounds)
    assert_sqnorms(got, expected, 1e-9)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors():
    """Refused where they meet parameters; where the packed rows are nested, they are followed."""
    torch.manual_seed(0)
    model, bounds = nn.Linear(3, 2).double(), torch.tensor([0, 2, 6])
    rows = torch.randn(6, 3).double()

    def loss_fn(model, rows):
        hidden = torch.nested.nested_tensor_from_jagged(model(rows).tanh(), bounds)
        return torch.stack([part.sum() for part in hidden.sin().unbind()])

    got = gs.per_example_norms(model, rows, loss_fn, cu_seqlens=bounds)
    assert_sqnorms(got, oracle_sqnorms(model, rows, loss_fn), 1e-9)

    nested = torch.nested.nested_tensor_from_jagged(rows, bounds)

    def loss(model, batch):
        return torch.stack([part.sum() for part in model(batch).unbind()])

    with pytest.raises(gs.ExampleAxisError, match=r"nested tensor.*cu_seqlens=x\.offsets"):
        gs.per_example_norms(model, nested, loss)
    checkpoints = gs.Checkpoints([model.state_dict()], lr=1.0)
    for each in (nested, torch.nested.nested_tensor([*nested.unbind()])):
        with pytest.raises(gs.ExampleAxisError, match=r"nested tensor.*cu_seqlens=x\.offsets"):
            gs.self_influence(model, [each], loss, checkpoints, progress=False)
        with pytest.raises(gs.ExampleAxisError, match=r"nested tensor.*cu_seqlens=x\.offsets"):
            gs.influence(model, [each], [each], loss, checkpoints, progress=False)

    def strided(model, rows):
        hidden = torch.nested.as_nested_tensor([*model(rows).tensor_split(bounds[1:-1])])
        return torch.stack([part.sum() for part in hidden.unbind()])

    with pytest.raises(
        gs.UnsupportedOperationError, match=r"nested_tensor.* makes .* strided layout"
    ):
        gs.per_example_norms(model, rows, strided, cu_seqlens=bounds)
    with pytest.raises(gs.UnsupportedOperationError, match=r"linear of nested.*'weight'.*offsets"):
        with gs.track(model, batch_size=2):
            loss(model, nested)
    assert type(model.weight) is nn.Parameter


class Bags(nn.Module):
    """A classifier of bags of words, whose words may have learned weights."""

    def __init__(self, mode="sum", share=None):
        super().__init__()
        self.table = nn.EmbeddingBag(11, 4, mode=mode)
        self.shares = nn.Parameter(torch.randn(11)) if share else None
        self.share, self.head = share, nn.Linear(4, 3)

    def forward(self, ids, offsets):
        shares = None if self.share is None else self.share(self.shares, ids)
        return self.head(torch.tanh(self.table(ids, offsets, per_sample_weights=shares)))


def losses_of_bags(model, batch):
    ids, offsets, labels = batch
    return functional.cross_entropy(model(ids, offsets), labels, reduction="none")


def bags(lengths):
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    ids = torch.randint(11, (int(bounds[-1]),))
    return (ids, bounds[:-1], torch.randint(3, (len(lengths),))), bounds


@pytest.mark.parametrize(
    ("mode", "share"),
    [
        ("sum", None),
        ("mean", None),
        ("max", None),
        ("sum", lambda shares, ids: shares.gather(0, ids)),
        ("sum", lambda shares, ids: torch.sigmoid(shares[ids])),
    ],
    ids=["sum", "mean", "max", "gathered shares", "indexed shares"],
)
@pytest.mark.parametrize("lengths", [*LENGTHS, (1, 1, 1)], ids=str)
def test_bags_of_words(lengths, mode, share):
    """Text and offsets as PyTorch's tutorials have them, and the shares of recommenders."""
    torch.manual_seed(0)
    model, (batch, bounds) = Bags(mode, share).double(), bags(lengths)
    ids, _, labels = batch
    examples = [
        (ids[start:end], torch.tensor([0]), labels[[example]])
        for example, (start, end) in enumerate(itertools.pairwise(bounds.tolist()))
    ]
    expected = sqnorms_alone(model, examples, losses_of_bags)
    check_packed(model, batch, losses_of_bags, bounds, expected)
    if max(lengths) > 1:  # or the offsets could as well be numbers of the examples
        report = gs.verify(model, batch, losses_of_bags, cu_seqlens=bounds)
        assert report.ok, str(report)


def test_bags_whose_shares_are_of_other_examples_are_refused():
    batch, bounds = bags((2, 2, 2))
    model = Bags(share=lambda shares, ids: shares[ids].roll(1)).double()
    with pytest.raises(gs.UnsupportedOperationError, match="of several examples"):
        gs.per_example_norms(model, batch, losses_of_bags, cu_seqlens=bounds)


def test_packed_rows_of_several_axes():
    model, rows = nn.Linear(4, 3).double(), torch.randn(7, 2, 3, 4, dtype=torch.float64)
    lengths = [2, 1, 4]

    def losses(model, x):
        return torch.stack([part.sum() for part in model(x).sin().split(lengths)])

    def loss(model, x):
        return model(x[0]).sin().sum().view(1)

    expected = [oracle_sqnorms(model, part[None], loss) for part in rows.split(lengths)]
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    assert_sqnorms(
        gs.per_example_norms(model, rows, losses, cu_seqlens=bounds),
        {name: torch.cat([each[name] for each in expected]) for name in expected[0]},
        1e-10,
    )


def test_the_first_row_of_an_input_that_is_expanded_beside_all_rows():
    lengths, model = [2, 3], nn.Linear(4, 4).double()
    rows, bounds = torch.randn(5, 4, dtype=torch.float64), torch.tensor([0, 2, 5])

    def losses(model, rows):
        hidden = model(rows[:1].expand(len(rows), -1) * rows)  # the first may stand for all
        return torch.stack([part.sum() for part in hidden.sin().split(lengths)])

    expected = oracle_on_the_batch(model, rows, losses)
    assert_sqnorms(gs.per_example_norms(model, rows, losses, cu_seqlens=bounds), expected, 1e-10)
