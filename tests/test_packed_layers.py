"""Layers with an axis for a batch, on packed rows: on slices of one example each, or on all."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import gradstats as gs
from tests.oracle import assert_sqnorms, oracle_sqnorms

LENGTHS, SHIFTED, WIDTH = [3, 2, 4], [4, 1, 4], 4
OWNER = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
BOUNDS = functional.pad(torch.tensor(LENGTHS).cumsum(0), (1, 0))
OTHERS = OWNER[:, None] != OWNER
LEAK = OTHERS.clone()
LEAK[-1, 0] = False
LATER = torch.ones_like(OTHERS).triu(1)


class Packed(nn.Module):
    """A layer that ``apply`` runs on rows, between two others."""

    def __init__(self, layer, apply):
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(WIDTH, WIDTH), layer, nn.Linear(WIDTH, WIDTH)
        self.apply_to = apply

    def forward(self, rows):
        return self.last(self.apply_to(self.layer, self.first(rows)).reshape(len(rows), WIDTH))


def loss_fn(model, rows):
    losses = model(rows).sin().sum(1)
    return torch.zeros(len(LENGTHS)).to(losses).index_add(0, OWNER, losses)


def check(model, rows, refused=False, match=None):
    if refused:
        with pytest.raises((gs.ExampleAxisError, gs.CoupledExamplesError), match=match):
            gs.per_example_norms(model, rows, loss_fn, cu_seqlens=BOUNDS)
        return
    expected = oracle_sqnorms(model, rows, loss_fn)
    assert_sqnorms(gs.per_example_norms(model, rows, loss_fn, cu_seqlens=BOUNDS), expected, 1e-9)
    losses = loss_fn(model, rows)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    wanted = torch.autograd.grad(losses.sum(), trained)
    for fused in (True, False):
        model.zero_grad()
        with gs.track(
            model, batch_size=len(LENGTHS), cu_seqlens=BOUNDS, loss_reduction="sum", fused=fused
        ) as tracker:
            loss_fn(model, rows).sum().backward()
        assert_sqnorms(tracker.stats, expected, 1e-9)
        for parameter, gradient in zip(trained, wanted, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-10, atol=1e-12)


def recurrent(kind, **options):
    width = WIDTH // 2 if options.get("bidirectional") else WIDTH
    return kind(WIDTH, width, **options), lambda layer, own: layer(own)[0]


def hidden(layer, own):
    states = layer(own)[1]
    return (states[0] if isinstance(states, tuple) else states)[-1].expand(own.shape)


def turned(layer, own):
    return layer(own.mT).mT


# On a slice (1, n, WIDTH).
ON_SLICES = {
    "GRU": recurrent(nn.GRU, batch_first=True),
    "LSTM": recurrent(nn.LSTM, batch_first=True),
    "RNN": recurrent(nn.RNN, batch_first=True),
    "both directions": recurrent(nn.LSTM, batch_first=True, num_layers=2, bidirectional=True),
    "last state": (nn.GRU(WIDTH, WIDTH, batch_first=True), hidden),
    "steps first": (
        nn.GRU(WIDTH, WIDTH), lambda layer, own: layer(own.transpose(0, 1))[0].transpose(0, 1)
    ),
    "steps alone": (nn.LSTM(WIDTH, WIDTH), lambda layer, own: layer(own[0])[0]),
    "first state": (
        nn.GRU(WIDTH, WIDTH, batch_first=True),
        lambda layer, own: layer(own, own.mean(1)[None])[0],
    ),
    "convolution": (nn.Conv1d(WIDTH, WIDTH, 3, padding=1), turned),
    "depthwise": (
        nn.Conv1d(WIDTH, WIDTH, 2, padding=1, groups=WIDTH),
        lambda layer, own: layer(own.mT)[..., :-1].mT,
    ),
    "group norm": (nn.GroupNorm(2, WIDTH), turned),
    "instance norm": (nn.InstanceNorm1d(WIDTH, affine=True), turned),
    "attention": (
        nn.MultiheadAttention(WIDTH, 2, batch_first=True),
        lambda layer, own: layer(own, own, own)[0],
    ),
    "encoder": (
        nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True),
        lambda layer, own: layer(own),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ON_SLICES)
@pytest.mark.parametrize("cut", ["rows", "rows behind a batch axis"])
def test_slices_of_one_example(name, cut):
    layer, apply = ON_SLICES[name]
    torch.manual_seed(0)
    rows = torch.randn(len(OWNER), WIDTH).double()

    def by(lengths):
        def on_slices(layer, rows):
            if cut == "rows":
                parts = [part[None] for part in rows.split(lengths)]
            else:
                parts = rows[None].split(lengths, 1)
            return torch.cat([apply(layer, part).reshape(-1, WIDTH) for part in parts])

        return on_slices

    model = Packed(layer, by(LENGTHS)).double()
    check(model, rows)
    model.apply_to = by(SHIFTED)
    check(model, rows, refused=True)


OVER_POSITIONS = {
    "convolution on each": nn.Conv1d(WIDTH, WIDTH, 1),
    "batch norm": nn.BatchNorm1d(WIDTH).eval(),
    "convolution": nn.Conv1d(WIDTH, WIDTH, 3, padding=1),
    "shift": nn.Conv1d(WIDTH, WIDTH, 1, stride=2, padding=4),
    "group norm": nn.GroupNorm(2, WIDTH),
    "instance norm": nn.InstanceNorm1d(WIDTH, affine=True),
}


@pytest.mark.parametrize("name", OVER_POSITIONS)
def test_layers_over_positions_are_refused(name):
    model = Packed(OVER_POSITIONS[name], lambda layer, x: turned(layer, x[None])[0]).double()
    check(model, torch.randn(len(OWNER), WIDTH).double(), refused=True, match="each .* slice")


def attention(**options):
    return nn.MultiheadAttention(WIDTH, 2, **options)


def encoder(**options):
    return nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, **options)


def added(mask):
    return torch.zeros(mask.shape).double().masked_fill(mask, -torch.inf)


MASKED = {
    "rows": (attention(), lambda layer, x, mask: layer(x, x, x, attn_mask=mask)[0]),
    "without weights": (
        attention(),
        lambda layer, x, mask: layer(x, x.sin(), x, attn_mask=mask, need_weights=False)[0],
    ),
    "added": (attention(), lambda layer, x, mask: layer(x, x, x, attn_mask=added(mask))[0]),
    "for each head": (
        attention(bias=False),
        lambda layer, x, mask: layer(x, x, x, attn_mask=mask.expand(2, *mask.shape))[0],
    ),
    "causal": (attention(), lambda layer, x, mask: layer(x, x, x, attn_mask=mask | LATER)[0]),
    "behind a batch axis": (
        attention(batch_first=True),
        lambda layer, x, mask: layer(x[None], x[None], x[None], attn_mask=mask)[0],
    ),
    "batch axis second": (
        attention(),
        lambda layer, x, mask: layer(x[:, None], x[:, None], x[:, None], attn_mask=mask)[0],
    ),
    "other keys": (
        attention(kdim=3, vdim=2),
        lambda layer, x, mask: layer(x, x[:, :3], x[:, 2:], attn_mask=mask)[0],
    ),
    "the weights too": (
        attention(),
        lambda layer, x, mask: (both := layer(x, x, x, attn_mask=mask))[0] + both[1] @ x,
    ),
    "frozen": (
        attention().requires_grad_(False),
        lambda layer, x, mask: layer(x, x, x, attn_mask=mask)[0],
    ),
    "encoder": (encoder(), lambda layer, x, mask: layer(x, src_mask=mask)),
    "encoders": (
        nn.TransformerEncoder(encoder(batch_first=True), 2),
        lambda layer, x, mask: layer(x[None], mask=added(mask)),
    ),
    "decoder": (
        nn.TransformerDecoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True),
        lambda layer, x, mask: layer(x[None], x.cos()[None], tgt_mask=mask, memory_mask=mask),
    ),
}


@pytest.mark.parametrize("name", MASKED)
def test_attention_layers_under_a_mask(name):
    layer, attend = MASKED[name]
    torch.manual_seed(0)
    rows = torch.randn(len(OWNER), WIDTH).double()
    model = Packed(layer, lambda layer, x: attend(layer, x, OTHERS)).double()
    model.layer.requires_grad_(name != "frozen")
    check(model, rows)
    for mask in (LEAK, LATER):
        model.apply_to = lambda layer, x, mask=mask: attend(layer, x, mask)
        check(model, rows, refused=True)


def test_a_mask_of_one_head_that_leaks():
    mask = torch.stack([OTHERS, LEAK])
    model = Packed(attention(), lambda layer, x: layer(x, x, x, attn_mask=mask)[0]).double()
    check(model, torch.randn(len(OWNER), WIDTH).double(), refused=True)


# Of the edges within each example, in the order of the rows; that of one other example leaks.
EDGES = (torch.rand(9, 9, generator=torch.Generator().manual_seed(0)) + 0.1).masked_fill(OTHERS, 0)
LEAKING = EDGES + LEAK.logical_not() * OTHERS
TURNED_ROWS = [8, 2, 5, 0, 7, 3, 1, 6, 4]
BACK = [3, 6, 1, 5, 8, 2, 7, 4, 0]

PROPAGATED = {
    "transposed": lambda a, h: a.T @ h,
    "and multiplied": lambda a, h: torch.mm(a.mT, h) + a.t().matmul(h.sin()),
    "contracted": lambda a, h: torch.einsum("nm,nd->md", a, h),
    "contracted the other way": lambda a, h: torch.einsum("nd,nm->dm", h, a).T,
    "from the right": lambda a, h: (h.T @ a).T,
    "with an axis in front": lambda a, h: (a.T[None] @ h[None])[0],
    "normalised": lambda a, h: (a / (a.sum(0) + 1e-9)).T @ h,
    "sparse": lambda a, h: torch.sparse.mm(a.to_sparse().t(), h),
    "of rows in another order": lambda a, h: (a.T[TURNED_ROWS] @ h)[BACK],
    "twice": lambda a, h: a.T @ (a.T @ h).tanh(),
    "there and back": lambda a, h: a.T @ (a @ h).tanh(),
}


def propagated(name, given):
    """A model with edges among its data, or as constants, between two layers."""

    def apply(edges, h):
        return PROPAGATED[name](edges, h)

    class Graphs(Packed):
        def forward(self, batch):
            rows, edges = batch if given else (batch, self.edges)
            return self.last(self.apply_to(edges, self.first(rows)))

    model = Graphs(nn.Identity(), apply)
    model.register_buffer("edges", EDGES.double(), persistent=False)
    return model.double()


@pytest.mark.parametrize("given", [True, False], ids=["given", "constants"])
@pytest.mark.parametrize("name", PROPAGATED)
def test_products_with_the_edges_turned_around(name, given):
    torch.manual_seed(0)
    rows, edges = torch.randn(len(OWNER), WIDTH).double(), EDGES.double()
    model = propagated(name, given)
    check(model, (rows, edges) if given else rows)
    # Numbers that were seen to keep the examples apart may change.
    model.edges = LEAKING.double()
    check(model, (rows, LEAKING.double()) if given else rows, refused=True)


@pytest.mark.parametrize("name", ["transposed", "of rows in another order"])
def test_edges_turned_around_that_leave_rows_without_any(name):
    """What sums nothing still meets the last layer's bias, and counts for its own example."""
    torch.manual_seed(0)
    rows, edges = torch.randn(len(OWNER), WIDTH).double(), EDGES.double()
    edges[:, [0, 1, 3, 8]] = 0
    model = propagated(name, True)
    expected = oracle_sqnorms(model, (rows, edges), loss_fn)
    got = gs.per_example_norms(model, (rows, edges), loss_fn, cu_seqlens=BOUNDS)
    assert_sqnorms(got, expected, 1e-9)
    with (
        gs.track(model, batch_size=len(LENGTHS), cu_seqlens=BOUNDS),
        pytest.raises(gs.ExampleAxisError, match="not known which example"),
    ):
        model((rows, edges)).square().mean().backward()


@pytest.mark.parametrize("name", ["transposed", "from the right", "with an axis in front"])
@pytest.mark.parametrize("graph", [*range(len(LENGTHS)), None])
def test_edges_of_one_graph_or_none(name, graph):
    """Rows of the others sum nothing, and count for their own examples."""
    torch.manual_seed(0)
    rows, edges = torch.randn(len(OWNER), WIDTH).double(), EDGES.double()
    edges *= OWNER == (-1 if graph is None else graph)
    model = propagated(name, True)
    got = gs.per_example_norms(model, (rows, edges), loss_fn, cu_seqlens=BOUNDS)
    assert_sqnorms(got, oracle_sqnorms(model, (rows, edges), loss_fn), 1e-9)


@pytest.mark.parametrize("turned", [True, False])
def test_trained_edges_between_examples_are_refused(turned):
    """Zeros between examples have gradients, of the loss that the row belongs to."""

    class Weighed(Packed):
        def forward(self, batch):
            rows, edges = batch
            weights = self.layer(edges[..., None])[..., 0] * edges
            return self.last((weights.T if turned else weights) @ self.first(rows))

    batch = torch.randn(len(OWNER), WIDTH).double(), LEAKING.double()
    check(Weighed(nn.Linear(1, 1), None).double(), batch, refused=True)


POOLS = functional.one_hot(OWNER).T.double()


def pooled(pool):
    """A matrix that pools the rows, as one loss for each example or as several rows each."""

    class Pooled(Packed):
        def forward(self, batch):
            rows, pool = batch
            return self.last(pool @ self.first(rows).tanh()).square().sum(1)

    return Pooled(nn.Identity(), None).double()


@pytest.mark.parametrize(
    "pool", [POOLS, POOLS / POOLS.sum(1, keepdim=True), POOLS.flip(0)], ids=["sum", "mean", "flip"]
)
def test_pools_by_a_matrix(pool):
    torch.manual_seed(0)
    batch = torch.randn(len(OWNER), WIDTH).double(), pool

    def losses(model, batch):
        return model(batch)

    model = pooled(pool)
    got = gs.per_example_norms(model, batch, losses, cu_seqlens=BOUNDS)
    assert_sqnorms(got, oracle_sqnorms(model, batch, losses), 1e-9)


def test_clusters_pooled_by_a_matrix():
    """Each example has clusters of its own: several rows, of some of the nodes."""
    torch.manual_seed(0)
    clusters = torch.tensor([0, 0, 1, 2, 2, 3, 4, 4, 3])
    pool = functional.one_hot(clusters).T.double()
    model = pooled(pool)
    batch = torch.randn(len(OWNER), WIDTH).double(), pool

    def losses(model, batch):
        values = model(batch)
        return torch.zeros(3).to(values).index_add(0, torch.tensor([0, 0, 1, 2, 2]), values)

    got = gs.per_example_norms(model, batch, losses, cu_seqlens=BOUNDS)
    assert_sqnorms(got, oracle_sqnorms(model, batch, losses), 1e-9)
    mixed = pool.clone()
    mixed[1, 3] = 1
    with pytest.raises((gs.ExampleAxisError, gs.CoupledExamplesError)):
        gs.per_example_norms(model, (batch[0], mixed), losses, cu_seqlens=BOUNDS)
