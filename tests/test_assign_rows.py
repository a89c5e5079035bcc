"""Data of which only the caller knows whose each row is: edges of graphs, for example."""

from copy import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradstats as gs
from tests.oracle import assert_sqnorms, check_model
from tests.test_packed import Packed, check_packed, sqnorms_alone

SIZES = [(3, 1, 5), (2, 2, 2), (1, 1, 1), (4,)]


class Graphs(nn.Module):
    """Messages that depend on features of the edges, as molecules' bonds have them."""

    def __init__(self, checkpoints=False):
        super().__init__()
        self.kind = nn.Embedding(4, 5)
        self.edge = nn.Linear(3, 5)
        self.node = nn.Linear(4, 5)
        self.filter = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 25))
        self.scale = nn.Parameter(torch.randn(5))
        self.attention = nn.Linear(15, 1)
        self.norm = nn.LayerNorm(5)
        self.head = nn.Linear(5, 1)
        self.checkpoints = checkpoints

    def between(self, kinds, features):
        return self.norm(self.kind(kinds) + self.edge(features).tanh()) * self.scale

    def forward(self, graphs):
        source, target = graphs.edges
        given = (graphs.kinds, graphs.features)
        if self.checkpoints:
            edges = checkpoint(self.between, *given, use_reentrant=False)
        else:
            edges = self.between(*given)
        nodes = self.node(graphs.nodes)
        ends = torch.cat([nodes[source], nodes[target], edges], 1)
        weights = self.attention(ends).exp()
        sent = weights * (nodes[source, None] @ self.filter(edges).view(-1, 5, 5))[:, 0]
        empty = torch.zeros_like(nodes)
        hidden = empty.index_add(0, target, sent) / (1 + empty[:, :1].index_add(0, target, weights))
        pooled = nodes.new_zeros(graphs.count, 5).index_add(0, graphs.owner, hidden.tanh())
        return self.head(pooled)[:, 0]


class Batch(Packed):
    """The edges, with features, stand one graph after the other, or in another order."""

    def __init__(self, *graphs, shuffled=False):
        super().__init__(*(graph[:2] for graph in graphs))
        kinds, features = (torch.cat([graph[n] for graph in graphs]) for n in (2, 3))
        order = torch.randperm(len(kinds)) if shuffled else torch.arange(len(kinds))
        self.edges, self.kinds, self.features = self.edges[:, order], kinds[order], features[order]


def graph(nodes):
    count = 2 * nodes + 1
    return (
        torch.randn(nodes, 4).double(),
        torch.randint(nodes, (2, count)),
        torch.randint(4, (count,)),
        torch.randn(count, 3).double(),
    )


def assigned(model, batch):
    owner = batch.owner[batch.edges[0]]
    for rows in (batch.kinds, batch.features):
        assert gs.assign_rows(rows, owner) is rows
    return model(batch)


@pytest.mark.parametrize("shuffled", [False, True], ids=["in order", "shuffled"])
@pytest.mark.parametrize("checkpoints", [False, True], ids=["plain", "checkpoints"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_features_of_edges(sizes, checkpoints, shuffled):
    torch.manual_seed(0)
    model = Graphs(checkpoints).double()
    graphs = [graph(size) for size in sizes]
    expected = sqnorms_alone(model, graphs, lambda m, graph: m(Batch(graph)))
    batch = Batch(*graphs, shuffled=shuffled)
    check_packed(model, batch, assigned, batch.bounds, expected)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_features_that_are_made_in_the_call(sizes):
    """Made of values that the caller has, without any data, they are the examples' all the same."""
    torch.manual_seed(0)
    model = Graphs().double()
    graphs = [graph(size) for size in sizes]
    expected = sqnorms_alone(model, graphs, lambda m, graph: m(Batch(graph)))
    batch = Batch(*graphs)

    def made(model, batch):
        again = copy(batch)
        again.features = torch.tensor(batch.features.tolist(), dtype=torch.float64)
        return assigned(model, again)

    check_packed(model, batch, made, batch.bounds, expected)


def test_inner_products_of_graphs_with_features_of_edges():
    torch.manual_seed(0)
    model = Graphs().double()
    graphs = [graph(size) for size in (3, 1, 5)]
    batch, other = Batch(*graphs), Batch(*graphs[:2])

    def gradients(graph):
        loss = model(Batch(graph)).sum()
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, model.parameters())])

    expected = torch.stack([gradients(graph) for graph in graphs])
    got = gs.inner_products(
        model, batch, model, other, assigned, cu_seqlens=(batch.bounds, other.bounds)
    )
    torch.testing.assert_close(got, expected @ expected[:2].T, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dim", [1, -2])
def test_rows_along_another_axis_of_an_ordinary_batch(dim):
    """Boxes found in images, say: some in each, beside one label for each image."""
    torch.manual_seed(0)
    owner = torch.tensor([2, 0, 0, 2, 2])
    model = nn.Linear(3, 4).double()
    labels, boxes = torch.randn(3, 4).double(), torch.randn(2, 5, 3).double()

    def loss_fn(model, batch):
        labels, boxes = batch
        found = model(gs.assign_rows(boxes, owner, dim=dim)).tanh().sum(0)
        return (labels + torch.zeros_like(labels).index_add(0, owner, found)).square().sum(1)

    def alone(model, example):
        boxes = batch[1][:, owner == example]
        return (batch[0][example] + model(boxes).tanh().sum((0, 1))).square().sum()[None]

    batch = (labels, boxes)
    expected = sqnorms_alone(model, range(3), alone)
    assert_sqnorms(gs.per_example_norms(model, batch, loss_fn), expected, 1e-9)


def test_what_the_model_keeps_and_what_was_lost_belong_to_examples_once_assigned():
    """The caller's word is taken: for a buffer, and for what no rule could follow."""
    torch.manual_seed(0)
    model = nn.Linear(3, 3).double()
    model.register_buffer("rows", torch.randn(4, 3).double())
    order = torch.tensor([1, 0, 3, 2])

    def loss_fn(model, batch):
        rows = gs.assign_rows(model.rows, order)
        hidden = model(rows + batch[order])
        moved = hidden.view(-1).as_strided((4, 3), (3, 1))
        return model(gs.assign_rows(moved, order)).square().sum(1)[order]

    batch = torch.randn(4, 3).double()
    got = gs.per_example_norms(model, batch, loss_fn)
    each = []
    for example in range(4):
        rows = model.rows[order[example]] + batch[example]
        loss = model(model(rows)).square().sum()
        gradients = torch.autograd.grad(loss, [model.weight, model.bias])
        each.append([gradient.square().sum() for gradient in gradients])
    expected = torch.tensor(each).T
    assert_sqnorms(got, {"weight": expected[0], "bias": expected[1]}, 1e-9)


def test_outside_of_contexts_nothing_is_asked():
    rows = torch.randn(4, 3)
    assert gs.assign_rows(rows, None) is rows
    assert not vars(rows)


@pytest.mark.parametrize(
    ("owner", "dim", "message"),
    [
        (torch.tensor([0, 1]), 0, r"shape \(2,\), expected a vector of 3 integers in \[0, 2\)"),
        (torch.tensor([0, 1, 2]), 0, r"numbers from 0 to 2, expected .* in \[0, 2\)"),
        (torch.tensor([0, -1, 1]), 0, r"numbers from -1 to 1"),
        (torch.tensor([0.0, 1.0, 1.0]), 0, r"dtype torch.float32"),
        (torch.tensor([True, False, True]), 0, r"dtype torch.bool"),
        ([0, 1, 1], 0, r"owner is list, expected a vector of 3 integers"),
        (torch.tensor([0, 1, 1]), 2, r"dim=2 for a tensor of shape \(3, 4\)"),
        (torch.tensor([0, 1, 1]), -3, r"dim=-3 for a tensor of shape \(3, 4\)"),
    ],
    ids=["length", "too large", "negative", "float", "bool", "list", "axis", "negative axis"],
)
def test_owners_that_say_nothing(owner, dim, message):
    model, rows = nn.Linear(4, 1), torch.randn(3, 4)

    def loss_fn(model, batch):
        return model(gs.assign_rows(rows, owner, dim)).sum() + batch.sum(1)

    with pytest.raises(gs.ExampleAxisError, match=message):
        gs.per_example_norms(model, torch.randn(2, 4), loss_fn)
    assert type(model.weight) is nn.Parameter


def test_rows_of_an_array():
    model, rows = nn.Linear(4, 1), torch.randn(3, 4)

    def loss_fn(model, batch):
        return model(gs.assign_rows(rows.numpy(), torch.tensor([0, 1, 1]))).sum() + batch.sum(1)

    with pytest.raises(gs.ExampleAxisError, match="assign_rows got ndarray, expected a tensor"):
        gs.per_example_norms(model, torch.randn(2, 4), loss_fn)


@pytest.mark.parametrize("computed", [False, True], ids=["parameter", "computed"])
def test_parameters_belong_to_no_example(computed):
    def loss_fn(model, batch):
        weight = model.weight.exp() if computed else model.weight
        return batch @ gs.assign_rows(weight, torch.tensor([0, 1]))[0]

    with pytest.raises(gs.ExampleAxisError, match=r"assign_rows got .*weight.*no example"):
        gs.per_example_norms(nn.Linear(3, 2), torch.randn(2, 3), loss_fn)


def test_refusals_of_unknown_rows_name_it():
    with pytest.raises(gs.ExampleAxisError, match=r"gs\.assign_rows"):
        gs.per_example_norms(
            nn.Linear(3, 2), (torch.randn(2, 3), torch.randn(5, 3)), lambda m, b: m(b[1]).sum(1)
        )


@pytest.mark.parametrize("graphs", ["eager inside", "graphs inside"])
def test_compiled_models_that_assign_rows(graphs, request):
    if graphs == "graphs inside":
        request.getfixturevalue("graphs_run_on_cpus")
    torch.manual_seed(0)
    owner = torch.tensor([1, 0, 1])

    class Pools(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 4)

        def forward(self, rows):
            hidden = self.linear(gs.assign_rows(rows, owner)).tanh()
            return hidden.new_zeros(2, 4).index_add(0, owner, hidden)

    model, rows = Pools().double(), torch.randn(3, 3).double()
    batch = (torch.randn(2, 4).double(), rows)

    def loss_fn(model, batch):
        return (model(batch[1]) - batch[0]).square().sum(1)

    def alone(model, example):
        hidden = model.linear(rows[owner == example]).tanh().sum(0)
        return (hidden - batch[0][example]).square().sum()[None]

    expected = sqnorms_alone(model, range(2), alone)
    whole = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(loss_fn(whole, batch), loss_fn(model, batch))
    compiled = torch.compile(model, backend="aot_eager")
    assert_sqnorms(gs.per_example_norms(compiled, batch, loss_fn), expected, 1e-9)


LENGTH, WIDTH = 4, 3
BESIDE = {
    "times a parameter": lambda m, h, mask: h + mask.T[:, :, None] * m.weight[0],
    "where": lambda m, h, mask: torch.where(mask.T[:, :, None] > 0, h, m.weight[0]),
    "numbers to look up": lambda m, h, mask: h + m.weight[mask.long()].transpose(0, 1),
}


@pytest.mark.parametrize("name", BESIDE)
def test_a_mask_with_its_examples_along_another_axis_than_batch_dim(name):
    """As many positions as examples: what is not said is refused, with what to say."""

    def losses(model, batch, assign=True):
        x, mask = batch
        if assign:
            gs.assign_rows(mask, torch.arange(LENGTH), 0)
        return model(BESIDE[name](model, model(x), mask)).sin().sum((0, 2))

    torch.manual_seed(0)
    model = nn.Linear(WIDTH, WIDTH).double()
    batch = torch.randn(LENGTH, LENGTH, WIDTH).double(), torch.randint(2, (LENGTH, LENGTH)).double()
    check_model(model, batch, losses, batch_dim=1)
    assert "gs.assign_rows(mask, torch.arange(B), 0)" in gs.ExampleAxisError.__doc__
    with pytest.raises(gs.GradStatsError, match=r"help\(gs.ExampleAxisError\)|gs.assign_rows"):
        gs.per_example_norms(model, batch, lambda m, b: losses(m, b, assign=False), batch_dim=1)
