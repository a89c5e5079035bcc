"""Where rows of packed examples meet: followed if values show that none counts for another."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import gradstats as gs
from tests.oracle import (
    assert_sqnorms,
    check_model,
    check_products,
    oracle_on_the_batch,
    oracle_sqnorms,
)

LENGTHS, WIDTH = [3, 1, 4], 4
ROWS = sum(LENGTHS)
OWNER = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
BOUNDS = functional.pad(torch.tensor(LENGTHS).cumsum(0), (1, 0))
OTHERS = OWNER[:, None] != OWNER
LATER_LEAK = OTHERS.clone()
LATER_LEAK[-1, 0] = False
NEGATIVE = torch.where(OTHERS, -torch.inf, 0.0).double()
EDGES = torch.rand(ROWS, ROWS, generator=torch.Generator().manual_seed(0)).double() * ~OTHERS


class Attends(nn.Module):
    """Queries, keys and values of packed rows, what becomes of them, and another layer."""

    def __init__(self, attend):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.attend = attend

    def forward(self, rows):
        *first, last = self.layers
        return last(self.attend(*(layer(rows) for layer in first)).reshape(ROWS, WIDTH))


def loss_fn(model, rows):
    losses = model(rows).sin().sum(1)
    return torch.zeros(len(LENGTHS)).to(losses).index_add(0, OWNER, losses)


def heads(tensor):
    return tensor.view(1, ROWS, 2, WIDTH // 2).transpose(1, 2)


def by_heads(attend):
    return lambda q, k, v: attend(heads(q), heads(k), heads(v)).transpose(1, 2)


def by_heads_of(attend):
    return lambda q, k, v, o: attend(heads(q), heads(k), heads(v), o).transpose(1, 2)


def sdpa(**options):
    return by_heads(lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, **options))


def matrix_of(edges):
    matrix = torch.zeros(ROWS, ROWS).double()
    matrix[edges[:, 0], edges[:, 1]] = 1
    matrix.fill_diagonal_(2)
    return matrix / matrix.sum(1, keepdim=True)


def in_place(q, k, v):
    scores = q @ k.T
    scores *= 0.5
    return scores.masked_fill_(OTHERS, -torch.inf).softmax(-1) @ v


APART = {
    "masked": lambda q, k, v: (q @ k.T).masked_fill(OTHERS, -torch.inf).softmax(-1) @ v,
    "where": lambda q, k, v: torch.where(OTHERS, -1e9, q @ k.T * 0.5).softmax(1) @ v,
    "in place": in_place,
    "heads": by_heads(lambda q, k, v: (q @ k.mT + NEGATIVE).softmax(-1) @ v),
    "bmm": by_heads(
        lambda q, k, v: torch.bmm(
            torch.baddbmm(NEGATIVE.expand(2, ROWS, ROWS), q[0], k[0].mT).softmax(-1), v[0]
        )[None]
    ),
    "einsum": by_heads(
        lambda q, k, v: torch.einsum(
            "hqk,bhkd->bhqd", (torch.einsum("bhqd,bhkd->hqk", q, k) + NEGATIVE).softmax(-1), v
        )
    ),
    "tensordot": lambda q, k, v: torch.tensordot(
        (torch.tensordot(q, k, ([1], [1])) + NEGATIVE).softmax(-1), v, 1
    ),
    "columns first": lambda q, k, v: torch.einsum("kq,kd->qd", EDGES.T * q.detach()[:, 0], v) + k,
    "without softmax": lambda q, k, v: (q @ k.T).masked_fill(OTHERS, 0) @ v,
    "an einsum without softmax": lambda q, k, v: torch.einsum(
        "qk,kd->qd", (q @ k.T).masked_fill(OTHERS, 0), v
    ),
    "a factor that all share": lambda q, k, v: (
        ((q @ k.T).masked_fill(OTHERS, 0) * q[:, :1] * 0.5).exp().masked_fill(OTHERS, 0) @ v
    ),
    "masked scores times a constant": lambda q, k, v: (
        (q @ k.T).masked_fill(OTHERS, 0) @ torch.eye(ROWS, WIDTH).double() * v
    ),
    "normalised by hand": lambda q, k, v: (
        (w := (q @ k.T).exp() * ~OTHERS) / w.sum(-1, keepdim=True) @ v
    ),
    "dropout": lambda q, k, v: (
        functional.dropout((q @ k.T + NEGATIVE).softmax(-1), 0.5, training=False) @ v
    ),
    "a derivative of a sum": lambda q, k, v: (
        torch.autograd.grad((v.sin() * k).sum(), v, create_graph=True)[0] + q
    ),
    "pools of features": lambda q, k, v: (
        functional.max_pool1d(q[None], 3, 1, 1)[0] + functional.avg_pool1d(k, 3, 1, 1) * v
    ),
    "boolean mask": sdpa(attn_mask=~OTHERS),
    "added mask": sdpa(attn_mask=NEGATIVE.clamp(min=torch.finfo(torch.float32).min)[None, None]),
    "constant keys": lambda q, k, v: (
        functional.scaled_dot_product_attention(q, EDGES[:, :WIDTH], EDGES[:, WIDTH:]) + k * v
    ),
    "edges": lambda q, k, v: EDGES @ v + q * k,
    "edges for all heads": by_heads(lambda q, k, v: EDGES @ v + q * k),
    "edges and a vector": lambda q, k, v: (EDGES @ v[:, 0])[:, None] * q + k,
    "edges of a list": lambda q, k, v: matrix_of((~OTHERS).nonzero()) @ v + q * k,
    "sparse edges": lambda q, k, v: torch.sparse.mm(EDGES.to_sparse(), v) + q * k,
    "rows of CSR": lambda q, k, v: EDGES.to_sparse_csr() @ v + q * k,
}


def written(scores, index, value):
    scores[index] = value
    return scores


SLOPES = torch.linspace(-1, 1, WIDTH).double()
EARLIER = torch.ones(ROWS, ROWS).tril().bool()


def sent(q, k):
    """The scores of dense graph attention."""
    return functional.leaky_relu((q @ SLOPES)[:, None] + k @ SLOPES)


# Under a mask of pairs that may not meet.
MASKED = {
    "terms of rows and columns": lambda q, k, v, o: (
        sent(q, k).masked_fill(o, -9e15).softmax(-1) @ v
    ),
    "terms beside a product": lambda q, k, v, o: (
        (q @ k.T + q[:, :1] + k[:, 1]).masked_fill(o, -torch.inf).softmax(-1) @ v
    ),
    "terms for each head": by_heads_of(
        lambda q, k, v, o: (
            (q.sum(-1)[..., None] + k.sum(-1)[..., None, :])
            .masked_fill(o, -torch.inf).softmax(-1) @ v
        )
    ),
    "pairs": lambda q, k, v, o: (
        ((q[:, None] + k).tanh() @ SLOPES).masked_fill(o, -torch.inf).softmax(-1) @ v
    ),
    "pairs in an einsum": lambda q, k, v, o: (
        torch.einsum("qkd,d->qk", torch.einsum("qd,kd->qkd", q, k).tanh(), SLOPES)
        .masked_fill(o, 0) @ v
    ),
    "distances of pairs": lambda q, k, v, o: (
        (q[:, None] - k).square().sum(-1).neg().exp().masked_fill(o, 0) @ v
    ),
    "cdist": lambda q, k, v, o: torch.cdist(q, k).neg().masked_fill(o, -torch.inf).softmax(-1) @ v,
    "nearest": lambda q, k, v, o: (
        v * (q[:, None] - k).square().sum(-1).masked_fill(o, torch.inf).amin(1, keepdim=True)
    ),
    "columns first": lambda q, k, v, o: (
        (k @ q.T).masked_fill(o.T, -torch.inf).softmax(0).T @ v
    ),
    "softmax of columns": lambda q, k, v, o: (
        (q @ k.T).masked_fill(o, -torch.inf).softmax(0).T @ v
    ),
    "moved axes": by_heads_of(
        lambda q, k, v, o: (
            (q @ k.mT).permute(0, 2, 3, 1).tanh().permute(0, 3, 1, 2)
            .masked_fill(o, -torch.inf).softmax(-1) @ v
        )
    ),
    "logsumexp": lambda q, k, v, o: (
        ((s := (q @ k.T).masked_fill(o, -torch.inf)) - s.logsumexp(-1, keepdim=True)).exp() @ v
    ),
    "log_softmax": lambda q, k, v, o: (
        (q @ k.T).masked_fill(o, -torch.inf).log_softmax(-1).exp() @ v
    ),
    "the largest taken off": lambda q, k, v, o: (
        (w := ((s := (q @ k.T).masked_fill(o, -torch.inf)) - s.amax(-1, keepdim=True)).exp())
        / w.sum(-1, keepdim=True) @ v
    ),
    "normalised over columns": lambda q, k, v, o: (
        (w := (q @ k.T).exp() * ~o) / w.sum(0, keepdim=True) @ v
    ),
    "normalised over both": lambda q, k, v, o: (
        (w := (q @ k.T).sigmoid() * ~(o & o.T))
        * (d := (w + w.T).sum(-1).add(1).rsqrt())[:, None] * d @ v
    ),
    "decay": lambda q, k, v, o: (
        (q @ k.T * (k[:, :1].sin() - k[:, 0].sin()).masked_fill(o | ~EARLIER, -torch.inf).exp()) @ v
    ),
    "zeros written": lambda q, k, v, o: written(q @ k.T, o, 0.0) @ v,
    "zeros written at places": lambda q, k, v, o: (
        written(q @ k.T, o.nonzero(as_tuple=True), 0.0) @ v
    ),
    "zeros written for each head": by_heads_of(
        lambda q, k, v, o: written(q @ k.mT, (slice(None), slice(None), o), 0.0) @ v
    ),
    "pairs picked": lambda q, k, v, o: (
        v * torch.zeros(ROWS).to(v).index_add(0, (~o).nonzero()[:, 0], (q @ k.T)[~o])[:, None]
    ),
    "queries piece by piece": lambda q, k, v, o: torch.cat(
        [
            functional.scaled_dot_product_attention(part[None], k[None], v[None], ~mask)[0]
            for part, mask in zip(q.split(3), o.split(3), strict=True)
        ]
    ),
    "attention with trained terms": lambda q, k, v, o: (
        functional.scaled_dot_product_attention(
            q[None], k[None], v[None], (q[:, 0] + o.double().mul(-1e9))[None]
        )[0]
    ),
    "places of the batch": lambda q, k, v, o: (
        (q @ k.T * ((p := q.detach()[:, 0])[:, None] - p).cos()).masked_fill(o, 0) @ v
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MASKED)
def test_scores_under_a_mask(name):
    """Right under a mask of the examples; refused where it lets one pair of others through."""
    torch.manual_seed(0)
    model, rows = Attends(None).double(), torch.randn(ROWS, WIDTH).double()
    model.attend = lambda q, k, v: MASKED[name](q, k, v, OTHERS)
    got = gs.per_example_norms(model, rows, loss_fn, cu_seqlens=BOUNDS)
    assert_sqnorms(got, oracle_sqnorms(model, rows, loss_fn), 1e-9)
    shifted = OWNER.roll(1)
    for leak in (LATER_LEAK, shifted[:, None] != shifted, torch.zeros_like(OTHERS)):
        model.attend = lambda q, k, v, leak=leak: MASKED[name](q, k, v, leak)
        with pytest.raises((gs.ExampleAxisError, gs.CoupledExamplesError)):
            gs.per_example_norms(model, rows, loss_fn, cu_seqlens=BOUNDS)


@pytest.mark.parametrize("name", APART)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_kept_apart(name):
    torch.manual_seed(0)
    model, rows = Attends(APART[name]).double(), torch.randn(ROWS, WIDTH).double()
    got = gs.per_example_norms(model, rows, loss_fn, cu_seqlens=BOUNDS)
    assert_sqnorms(got, oracle_sqnorms(model, rows, loss_fn), 1e-9)


@pytest.mark.parametrize("lengths", [LENGTHS, [2, 2, 2, 2]])
@pytest.mark.parametrize("layer", [nn.LayerNorm(ROWS), nn.Linear(ROWS, ROWS)])
def test_layers_over_unmasked_scores(layer, lengths):
    """A mask that comes later hides what other examples added to a row's own scores."""
    owner = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    bounds = functional.pad(torch.tensor(lengths).cumsum(0), (1, 0))
    others = owner[:, None] != owner

    def attend(q, k, v):
        return layer(q @ k.mT).masked_fill(others, -torch.inf).softmax(-1) @ v

    def losses(model, rows):
        summed = model(rows).sin().sum(1)
        return torch.zeros(len(lengths)).to(summed).index_add(0, owner, summed)

    torch.manual_seed(0)
    model, rows = Attends(by_heads(attend)), torch.randn(ROWS, WIDTH).double()
    model.over = layer
    with pytest.raises((gs.ExampleAxisError, gs.CoupledExamplesError)):
        gs.per_example_norms(model.double(), rows, losses, cu_seqlens=bounds)
    if len(set(lengths)) == 1:
        with pytest.raises((gs.ExampleAxisError, gs.CoupledExamplesError)):
            gs.per_example_norms(
                model,
                rows.view(len(lengths), -1, WIDTH),
                lambda model, x: losses(model, x.flatten(0, 1)),
            )


class Packs(Attends):
    """The same for padded examples, which the model itself puts into one row."""

    def forward(self, padded):
        parts = zip(padded, LENGTHS, strict=True)
        return super().forward(torch.cat([example[:length] for example, length in parts]))


IN_THE_MODEL = {
    "boolean mask": sdpa(attn_mask=~OTHERS),
    "added mask": sdpa(attn_mask=NEGATIVE.clamp(min=torch.finfo(torch.float32).min)),
    "added mask in half precision": sdpa(attn_mask=NEGATIVE.clamp(min=-1e4).bfloat16().double()),
    "added mask above zero": sdpa(attn_mask=NEGATIVE.clamp(min=-1e9) + 2e9),
    "a row of which nothing is left": sdpa(
        attn_mask=NEGATIVE.index_fill(0, torch.tensor(1), -torch.inf)
    ),
    "queries piece by piece": lambda q, k, v: MASKED["queries piece by piece"](q, k, v, OTHERS),
}


@pytest.mark.parametrize("name", IN_THE_MODEL)
def test_packed_by_the_model_and_kept_apart(name):
    torch.manual_seed(0)
    model = Packs(IN_THE_MODEL[name]).double()
    padded = torch.randn(len(LENGTHS), max(LENGTHS), WIDTH).double()
    check_model(model, padded, loss_fn)
    check_products(model, padded, loss_fn)


# Products with a vector that only the functions above hold.
ENCLOSED = {"pairs", "pairs in an einsum"}


@pytest.mark.parametrize("name", [name for name in MASKED if name not in ENCLOSED])
def test_scores_under_a_mask_of_the_model(name):
    """Of examples that the model itself puts into one row."""
    torch.manual_seed(0)
    model = Packs(lambda q, k, v: MASKED[name](q, k, v, OTHERS)).double()
    padded = torch.randn(len(LENGTHS), max(LENGTHS), WIDTH).double()
    check_model(model, padded, loss_fn)
    shifted = OWNER.roll(1)
    for leak in (LATER_LEAK, shifted[:, None] != shifted, torch.zeros_like(OTHERS)):
        model.attend = lambda q, k, v, leak=leak: MASKED[name](q, k, v, leak)
        with pytest.raises((gs.ExampleAxisError, gs.CoupledExamplesError)):
            gs.per_example_norms(model, padded, loss_fn)


@pytest.mark.parametrize("name", APART)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_kept_apart_by_the_model(name):
    torch.manual_seed(0)
    model = Packs(APART[name]).double()
    padded = torch.randn(len(LENGTHS), max(LENGTHS), WIDTH).double()
    check_model(model, padded, loss_fn)


def pooled(rows):
    """Means of neighbouring rows, some of which are of different examples."""
    return functional.avg_pool1d(rows.T[None], 3, 1, 1)[0].T


BY_THE_MODEL_AND_MEET = {
    "no mask": sdpa(),
    "causal": sdpa(is_causal=True),
    "faint mask": sdpa(attn_mask=-10.0 * OTHERS),
    "leak": sdpa(attn_mask=~LATER_LEAK),
    "a row of which all is masked alike": sdpa(
        attn_mask=NEGATIVE.clamp(min=-1e9).index_fill(0, torch.tensor(1), -1e9)
    ),
    "large scores": lambda q, k, v: sdpa(attn_mask=NEGATIVE.clamp(min=-1e4))(q * 1e5, k, v),
    "large scale": sdpa(attn_mask=NEGATIVE.clamp(min=-1e4), scale=-1e5),
    "mixed keys": lambda q, k, v: sdpa(attn_mask=~OTHERS)(q, pooled(k), v),
    "mixed values": lambda q, k, v: sdpa(attn_mask=~OTHERS)(q, k, pooled(v)),
    "mixed keys and values": lambda q, k, v: sdpa(attn_mask=~OTHERS)(q, pooled(k), pooled(v)),
    "mixed keys and values without a mask": lambda q, k, v: sdpa()(q, pooled(k), pooled(v)),
    "features": lambda q, k, v: functional.scaled_dot_product_attention(q.T, k.T, v.T).T,
    "keys of a batch": lambda q, k, v: functional.scaled_dot_product_attention(
        q[None], *(torch.stack([part[:1] for part in x.split(LENGTHS)]) for x in (k, v))
    ).sum(0),
    "queries of a batch": lambda q, k, v: (
        v
        + functional.scaled_dot_product_attention(
            torch.stack([part[:1] for part in q.split(LENGTHS)]), k[None], v[None]
        ).mean()
    ),
}


@pytest.mark.parametrize("name", BY_THE_MODEL_AND_MEET)
def test_packed_by_the_model_and_meeting(name):
    torch.manual_seed(0)
    model = Packs(BY_THE_MODEL_AND_MEET[name]).double()
    padded = torch.randn(len(LENGTHS), max(LENGTHS), WIDTH).double()
    with pytest.raises((gs.ExampleAxisError, gs.CoupledExamplesError)):
        gs.per_example_norms(model, padded, loss_fn)
    rows = torch.cat([each[:length] for each, length in zip(padded, LENGTHS, strict=True)])
    model = Attends(model.attend).double()
    with pytest.raises((gs.ExampleAxisError, gs.CoupledExamplesError)):
        gs.per_example_norms(model, rows, loss_fn, cu_seqlens=BOUNDS)


def by_products(q, k, v, attn_mask):
    return (q @ k.mT).masked_fill(~attn_mask, -torch.inf).softmax(-1) @ v


def by_zeros(q, k, v, attn_mask):
    return (q @ k.mT * attn_mask) @ v


ATTENTIONS = [functional.scaled_dot_product_attention, by_products, by_zeros]


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("rows_of_each", [2, 3])
def test_one_layer_alone_lets_examples_meet(attention, rows_of_each):
    """The masks of two layers, or of two calls, differ in their values alone."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)
            self.masks = []

        def forward(self, x):
            rows = x.flatten(0, 1)[None]
            for mask in self.masks:
                q = self.layer(rows)
                rows = attention(q, q, q, attn_mask=mask)
            return rows.view_as(x).sin().sum((1, 2))

    torch.manual_seed(0)
    model, x = Twice().double(), torch.randn(3, rows_of_each, WIDTH).double()
    owner = torch.arange(3).repeat_interleave(rows_of_each)
    apart = owner[:, None] == owner
    leak = apart | (torch.arange(len(owner))[:, None] == len(owner) - 1)
    model.masks = [apart, apart]
    for _ in range(2):
        check_model(model, x, lambda model, x: model(x))
        for model.masks in ([apart, leak], [leak, apart], [apart, apart]):
            if model.masks[0] is not model.masks[1]:
                with pytest.raises((gs.ExampleAxisError, gs.CoupledExamplesError)):
                    gs.per_example_norms(model, x, lambda model, x: model(x))


TO_THE_FIRST = {
    "keys and values": lambda q, k, v: (q[:, 0], k[0], v[0]),
    "keys": lambda q, k, v: (q[:, 0], k[0], v[:, 0]),
    "values": lambda q, k, v: (q[:, 0], k[:, 0], v[0]),
    "queries": lambda q, k, v: (q[0], k[:, 0], v[:, 0]),
}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", TO_THE_FIRST)
def test_rows_of_all_examples_meet_those_of_one(name, masked):
    """There are as many of either."""

    def losses(model, x):
        *layers, last = model.layers
        rows = TO_THE_FIRST[name](*(layer(x) for layer in layers))
        mask = torch.eye(3).bool() if masked else None
        return last(functional.scaled_dot_product_attention(*rows, mask)).sin().sum(1)

    torch.manual_seed(0)
    model, x = Attends(None).double(), torch.randn(3, 3, WIDTH).double()
    with pytest.raises((gs.ExampleAxisError, gs.CoupledExamplesError)):
        gs.per_example_norms(model, x, losses)


def test_rows_of_all_examples_attend_to_given_ones():
    """Those of the first example, without a gradient."""

    def losses(model, x):
        query, key, value, last = model.layers
        given = key(x[0]).detach(), value(x[0]).detach()
        return last(functional.scaled_dot_product_attention(query(x[:, 0]), *given)).sin().sum(1)

    torch.manual_seed(0)
    model, x = Attends(None).double(), torch.randn(3, 3, WIDTH).double()
    expected = oracle_on_the_batch(model, x, losses)
    assert_sqnorms(gs.per_example_norms(model, x, losses), expected, 1e-9)


TERMS = {
    "rows": lambda t: t,
    "columns": lambda t: t.mT,
    "columns alike": lambda t: t[:, 0].expand(3, 3),
    "rows in another order": lambda t: t.flip(0),
    "columns of one row": lambda t: t[:, 0][None].expand(3, 3),
    "of another axis": lambda t: t[:, None].expand(3, 3, 3),
    "products": lambda t: t @ t.mT,
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", TERMS)
def test_trained_terms_of_scores_with_constant_keys(name, packed):
    """Only terms of its own row may be added to a query's scores."""
    torch.manual_seed(0)
    model, x = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)]).double(), torch.randn(3, 3)
    model.register_buffer("pairs", torch.randn(2, 3, 3).double())
    x = x.double()

    def losses(model, x):
        query, (key, value) = model[0](x), model.pairs
        if name == "of another axis":
            query, key, value = (each.expand(3, 3, 3) for each in (query, key, value))
        terms = TERMS[name](model[1](x))
        rows = functional.scaled_dot_product_attention(query, key, value, terms)
        return rows.sin().reshape(3, -1).sum(1)

    options = {"cu_seqlens": range(4)} if packed else {}
    if name == "rows":
        expected = oracle_on_the_batch(model, x, losses)
        assert_sqnorms(gs.per_example_norms(model, x, losses, **options), expected, 1e-9)
        return
    with pytest.raises((gs.ExampleAxisError, gs.CoupledExamplesError)):
        gs.per_example_norms(model, x, losses, **options)


OF_TWO = torch.tensor([[1, 1, 0, 0, 0], [0, 0, 1, 1, 1]]).double()
EVERY = torch.arange(ROWS).repeat_interleave(ROWS)
LEAK = OTHERS.clone()
LEAK[0, -1] = False
WHOLE = EDGES.clone()
WHOLE[-1, 0] = 1e-9

MEET = {
    "no mask": lambda q, k, v: (q @ k.T).softmax(-1) @ v,
    "a mask with a leak": lambda q, k, v: (q @ k.T).masked_fill(LEAK, -torch.inf).softmax(-1) @ v,
    "a leak in a tensordot": lambda q, k, v: torch.tensordot(
        (q @ k.T).masked_fill(LEAK, -torch.inf).softmax(-1), v, 1
    ),
    "a faint mask": lambda q, k, v: (q @ k.T - 10.0 * OTHERS).softmax(-1) @ v,
    "a mask after softmax": lambda q, k, v: (q @ k.T).softmax(-1).masked_fill(OTHERS, 0) @ v,
    "a mask after the norm": lambda q, k, v: (
        functional.normalize(q @ k.T, dim=-1).masked_fill(OTHERS, 0) @ v
    ),
    "a mask after a sum": lambda q, k, v: (
        (q @ k.T).masked_fill(OTHERS, 0) / (q @ k.T).exp().sum(-1, keepdim=True) @ v
    ),
    "scores times a constant": lambda q, k, v: (q @ k.T) @ torch.eye(ROWS, WIDTH).double() * v,
    "columns of scores times a constant": lambda q, k, v: (
        (q @ k.T).T @ torch.eye(ROWS, WIDTH).double() * v
    ),
    "rows times a sum over all rows in an einsum": lambda q, k, v: (
        torch.einsum("qd,kd->qd", q, k) * v
    ),
    "rows times a sum over all rows in an einsum of three": lambda q, k, v: torch.einsum(
        "kj,qd,kd->qd", k, q, v
    ),
    "scores times a constant in an einsum": lambda q, k, v: (
        torch.einsum("qk,kd->qd", q @ k.T, torch.eye(ROWS, WIDTH).double()) * v
    ),
    "masked scores times scores": lambda q, k, v: (
        ((q @ k.T).masked_fill(OTHERS, 0) @ (k @ v.T)).sum(1, keepdim=True) * v
    ),
    "one row of scores for each": lambda q, k, v: (
        v * torch.stack([row.sum() for row in (q @ k.T).exp()])[:, None]
    ),
    "scores of one example's rows": lambda q, k, v: (
        v * torch.cat([(part @ k.T).amax(1, keepdim=True) for part in q.split(LENGTHS)])
    ),
    "the largest score": lambda q, k, v: (q @ k.T).amax(-1, keepdim=True) * v,
    "pairs of columns as complex numbers": lambda q, k, v: (
        torch.view_as_complex((q @ k.T)[:, 1:3].contiguous()).abs()[:, None] * v
    ),
    "keys in two orders": lambda q, k, v: (
        (q @ k.T + q @ k.flip(0).T).masked_fill(OTHERS, -torch.inf).softmax(-1) @ v
    ),
    "queries in two orders": lambda q, k, v: (
        (q @ k.T).masked_fill(OTHERS, 0) * (q.flip(0) @ k.T) @ v
    ),
    "terms in two orders": lambda q, k, v: (
        (q @ k.T + k.flip(0)[:, 0]).masked_fill(OTHERS, -torch.inf).softmax(-1) @ v
    ),
    "scores in another order": lambda q, k, v: (
        (q @ k.T).flip(1).masked_fill(OTHERS, -torch.inf).softmax(-1) @ v
    ),
    "one head without a mask": by_heads(
        lambda q, k, v: written(q @ k.mT, (slice(None), slice(1), OTHERS), 0.0) @ v
    ),
    "terms after a mask": lambda q, k, v: (
        ((q @ k.T).masked_fill(OTHERS, 0) + k[:, 0]).sum(-1, keepdim=True) * v
    ),
    "terms added in place after a mask": lambda q, k, v: (
        (q @ k.T).masked_fill(OTHERS, 0).add_(q[:, :1]).sum(0)[:, None] * v
    ),
    "logarithms under a mask that is finite": lambda q, k, v: (
        (q @ k.T - 1e9 * OTHERS).log_softmax(-1).mean(-1, keepdim=True) * v
    ),
    "pairs of others picked": lambda q, k, v: (
        v * torch.zeros(ROWS).to(v).index_add(0, OTHERS.nonzero()[:, 0], (q @ k.T)[OTHERS])[:, None]
    ),
    "heads": by_heads(lambda q, k, v: (q @ k.mT).softmax(-1) @ v),
    "einsum": lambda q, k, v: torch.einsum(
        "qk,kd->qd", torch.einsum("qd,kd->qk", q, k).softmax(-1), v
    ),
    "edges between examples in an einsum": lambda q, k, v: torch.einsum("qk,kd->qd", WHOLE, v) + k,
    "summed heads": by_heads(
        lambda q, k, v: (
            v * (q @ k.mT).masked_fill(OTHERS, 0).sum(1, True).exp().sum(-1, keepdim=True)
        )
    ),
    "flattened scores": lambda q, k, v: (
        v * torch.zeros(ROWS, 1).to(v).index_add(0, EVERY, (q @ k.T).exp().view(-1, 1))
    ),
    "written scores": lambda q, k, v: (
        v * torch.zeros(ROWS, ROWS).to(v).copy_(q @ k.T).exp().sum(-1, keepdim=True)
    ),
    "attention without a mask": sdpa(),
    "causal attention": sdpa(is_causal=True),
    "attention with a faint mask": sdpa(attn_mask=-10.0 * OTHERS),
    "attention with a leak": sdpa(attn_mask=~LEAK),
    "attention with trained terms in another order": lambda q, k, v: (
        functional.scaled_dot_product_attention(
            q[None], k[None], v[None], (q.flip(0)[:, 0] + NEGATIVE)[None]
        )[0]
    ),
    "attention with trained scores in another order": lambda q, k, v: (
        functional.scaled_dot_product_attention(
            q[None], k[None], v[None], (q @ k.flip(0).T + NEGATIVE)[None]
        )[0]
    ),
    "attention among features": lambda q, k, v: (
        functional.scaled_dot_product_attention(q.T, k.T, v.T).T
    ),
    "attention to values of all rows": lambda q, k, v: functional.scaled_dot_product_attention(
        q.detach(), k.detach(), v
    ),
    "attention of constants to all rows": lambda q, k, v: (
        functional.scaled_dot_product_attention(EDGES[:, :WIDTH], k, v) + q
    ),
    "an edge between examples": lambda q, k, v: WHOLE @ v + q * k,
    "an edge between examples for all heads": by_heads(lambda q, k, v: WHOLE @ v + q * k),
    "an edge of a list between examples": lambda q, k, v: matrix_of(WHOLE.nonzero()) @ v + q * k,
    "a sparse edge between examples": lambda q, k, v: WHOLE.to_sparse() @ v + q * k,
    "keys normalised over rows": lambda q, k, v: q.softmax(-1) @ (k.softmax(0).T @ v),
    "pairs": lambda q, k, v: (q[:, None] - k[None]).exp().sum(1) * v,
    "distances": lambda q, k, v: torch.cdist(q, k) @ v,
    "mean": lambda q, k, v: v - v.mean(0),
    "largest": lambda q, k, v: v / v.amax(0),
    "cumulative": lambda q, k, v: v.cumsum(0),
    "normalised": lambda q, k, v: functional.normalize(v, dim=0),
    "a derivative of a root": lambda q, k, v: (
        torch.autograd.grad((v * k).square().sum().sqrt(), v, create_graph=True)[0] + q
    ),
    "a window": lambda q, k, v: functional.avg_pool1d(v.T, 3, 1, 1).T,
    "moved": lambda q, k, v: v + q.roll(1, 0),
    "normalised as channels": lambda q, k, v: functional.group_norm(v[None], 1)[0] + q * k,
    "pooled as pixels": lambda q, k, v: (
        functional.max_pool2d(v[None], (3, 1), 1, (1, 0))[0] + q * k
    ),
    "shuffled as channels": lambda q, k, v: functional.channel_shuffle(v[None], 2)[0] + q * k,
}


@pytest.mark.parametrize("name", MEET)
@pytest.mark.parametrize("last", [True, False], ids=["before a layer", "in the losses"])
def test_rows_that_meet_are_refused(name, last):
    torch.manual_seed(0)
    model, rows = Attends(MEET[name]).double(), torch.randn(ROWS, WIDTH).double()
    if not last:
        model.layers[-1] = nn.Identity()
    with pytest.raises((gs.ExampleAxisError, gs.CoupledExamplesError)):
        gs.per_example_norms(model, rows, loss_fn, cu_seqlens=BOUNDS)


ZERO_AT_FIRST = {
    "products": lambda q, k, v: (q @ k.T) @ v,
    "products in an einsum": lambda q, k, v: torch.einsum("qk,kd->qd", q @ k.T, v),
    "sums": lambda q, k, v: (q @ k.T).sum(1, keepdim=True) * v,
    "gates": lambda q, k, v: ((v @ k.T) * q[:, :1]) @ v,
    "terms": lambda q, k, v: ((v @ k.T).masked_fill(OTHERS, 0) + q[:, :1]).sum(0)[:, None] * v,
    "terms in place": lambda q, k, v: (
        (v @ k.T).masked_fill(OTHERS, 0).add_(q[:, :1]).sum(0)[:, None] * v
    ),
    "differences": lambda q, k, v: (q[:, :1] - q[:, 0]) @ v,
    "multiples": lambda q, k, v: torch.sub(q[:, :1], q[:, 0], alpha=0.5) @ v,
    "angles": lambda q, k, v: torch.atan2(q[:, :1] - q[:, 0], torch.ones(ROWS, ROWS).to(v)) @ v,
    "clamped": lambda q, k, v: (q @ k.T).clamp(max=0) @ v,
    "the smaller": lambda q, k, v: (q @ k.T).minimum(torch.zeros(ROWS, ROWS).to(v)) @ v,
    "zeros added to those of others": lambda q, k, v: (
        (q @ k.T).index_put(OTHERS.nonzero(as_tuple=True), torch.zeros(()).to(v), accumulate=True)
        @ v
    ),
    "a row of zeros": lambda q, k, v: (q @ k.T).index_fill(0, torch.tensor(1), 0) @ v,
    "zeros scattered into a column": lambda q, k, v: torch.cat(
        [v[:2], (q[2:4] @ k[:3].T).scatter(1, torch.tensor([[0], [0]]), 0.0) @ v[:3], v[4:]]
    ),
}


@pytest.mark.parametrize("attend", ZERO_AT_FIRST.values(), ids=ZERO_AT_FIRST)
def test_zeros_of_weights_that_begin_with_zero_are_no_mask(attend):
    model, rows = Attends(attend).double(), torch.randn(ROWS, WIDTH).double()
    for parameter in model.layers[0].parameters():
        nn.init.zeros_(parameter)
    with pytest.raises((gs.ExampleAxisError, gs.CoupledExamplesError)):
        gs.per_example_norms(model, rows, loss_fn, cu_seqlens=BOUNDS)
    model.attend = APART["without softmax"]
    got = gs.per_example_norms(model, rows, loss_fn, cu_seqlens=BOUNDS)
    assert_sqnorms(got, oracle_sqnorms(model, rows, loss_fn), 1e-9)


@pytest.mark.usefixtures("graphs_run_on_cpus")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_in_graphs():
    torch._dynamo.reset()
    model, rows = Attends(APART["masked"]).double(), torch.randn(ROWS, WIDTH).double()
    compiled = torch.compile(model, backend="aot_eager")
    got = gs.per_example_norms(compiled, rows, loss_fn, cu_seqlens=BOUNDS)
    assert_sqnorms(got, oracle_sqnorms(model, rows, loss_fn), 1e-9)
    model.attend = MEET["no mask"]
    with pytest.raises(gs.ExampleAxisError):
        gs.per_example_norms(compiled, rows, loss_fn, cu_seqlens=BOUNDS)


def test_attention_of_one_example_needs_no_mask():
    torch.manual_seed(0)
    model, rows = Attends(APART["masked"]).double(), torch.randn(ROWS, WIDTH).double()
    for attend in (MEET["no mask"], MEET["attention without a mask"], MEET["causal attention"]):
        model.attend = attend
        alone = lambda m, rows: m(rows).sin().sum()[None]  # noqa: E731
        got = gs.per_example_norms(model, rows, alone, cu_seqlens=torch.tensor([0, ROWS]))
        assert_sqnorms(got, oracle_sqnorms(model, rows, alone), 1e-9)


NONE = torch.zeros(0, dtype=torch.long)


def masked(target, rows):
    """As experts write, of which the first has no rows."""
    for chosen in (rows[:, 0] > torch.inf, rows[:, 0] <= torch.inf):
        target[chosen] = rows[chosen].sin()
    return target


@pytest.mark.parametrize(
    "write",
    [
        lambda target, rows: target.index_add(0, NONE, rows[NONE]) + rows,
        lambda target, rows: target.index_add_(0, NONE, rows[NONE]) + rows,
        lambda target, rows: (
            target.scatter_add(0, NONE[:, None].expand(0, WIDTH), rows[NONE]) + rows
        ),
        lambda target, rows: rows.index_add(0, NONE, rows[NONE]),
        masked,
    ],
    ids=["out of place", "in place", "scattered", "into data", "rows of experts"],
)
def test_writes_of_nothing(write):
    """As the messages of a kind of edges of which a batch has none."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)]).double()

    def loss(model, rows):
        hidden = write(torch.zeros(ROWS, WIDTH).to(rows), model[0](rows))
        losses = model[1](hidden).sin().sum(1)
        return torch.zeros(len(LENGTHS)).to(losses).index_add(0, OWNER, losses)

    rows = torch.randn(ROWS, WIDTH).double()
    got = gs.per_example_norms(model, rows, loss, cu_seqlens=BOUNDS)
    assert_sqnorms(got, oracle_sqnorms(model, rows, loss), 1e-9)


@pytest.mark.parametrize("lengths", [(5, 0), (0, 3, 0, 2), (4, 0, 1)], ids=str)
@pytest.mark.parametrize("form", ["index_add", "stack", "pad_sequence"])
def test_examples_without_rows(lengths, form):
    """They have no values, but the layers behind the sum over their rows have gradients."""
    torch.manual_seed(0)
    counts = torch.tensor(lengths)
    owner = torch.arange(len(lengths)).repeat_interleave(counts)
    model = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)]).double()

    def loss(model, rows):
        hidden = model[0](rows).tanh()
        if form == "index_add":
            sums = torch.zeros(len(lengths), WIDTH).to(rows).index_add(0, owner, hidden)
        elif form == "stack":
            sums = torch.stack([part.sum(0) for part in hidden.split(lengths)])
        else:
            sums = nn.utils.rnn.pad_sequence(hidden.split(lengths), batch_first=True).sum(1)
        return model[1](sums).sin().sum(1)

    rows = torch.randn(int(counts.sum()), WIDTH).double()
    bounds = functional.pad(counts.cumsum(0), (1, 0))
    alone = int((counts > 0).sum()) == 1
    if alone and form != "index_add":
        # Zeros beside the rows of a single example may be that one's padding.
        with pytest.raises(gs.ExampleAxisError):
            gs.per_example_norms(model, rows, loss, cu_seqlens=bounds)
        return
    got = gs.per_example_norms(model, rows, loss, cu_seqlens=bounds)
    assert_sqnorms(got, oracle_sqnorms(model, rows, loss), 1e-9)


def test_inputs_counted_through_all_rows():
    """What has no gradient lets no loss depend on other examples' rows."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Embedding(ROWS + 1, WIDTH), nn.Linear(WIDTH, 2)]).double()

    def loss(model, rows):
        places = (rows[:, 0] > 0).long().cumsum(0)
        losses = model[1](rows / rows.amax(0) + model[0](places)).sin().sum(1)
        return torch.zeros(len(LENGTHS)).to(losses).index_add(0, OWNER, losses)

    rows = torch.randn(ROWS, WIDTH).double()
    got = gs.per_example_norms(model, rows, loss, cu_seqlens=BOUNDS)
    assert_sqnorms(got, oracle_sqnorms(model, rows, loss), 1e-9)


def test_edges_of_one_example_alone():
    """What they hold belongs to that one as a whole; the other rows are still the others'."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)]).double()
    source, target, order = torch.tensor([[0, 2, 1], [1, 0, 2], [2, 0, 1]])

    def loss(model, rows):
        sent = model[0](rows)[source]
        ordered = torch.empty_like(sent)
        ordered[order] = sent[order]
        nodes = torch.zeros(ROWS, WIDTH).to(rows).index_add(0, target, ordered)
        losses = model[1](nodes).sin().sum(1)
        return torch.zeros(len(LENGTHS)).to(losses).index_add(0, OWNER, losses)

    rows = torch.randn(ROWS, WIDTH).double()
    got = gs.per_example_norms(model, rows, loss, cu_seqlens=BOUNDS)
    assert_sqnorms(got, oracle_sqnorms(model, rows, loss), 1e-9)


def test_losses_of_one_example_alone_are_refused():
    model, rows = nn.Linear(WIDTH, 3).double(), torch.randn(5, WIDTH).double()
    with pytest.raises(gs.ExampleAxisError, match=r"belong to the examples \[0, 0, 0\]"):
        gs.per_example_norms(
            model, rows, lambda m, rows: m(rows[0]).sin(), cu_seqlens=torch.tensor([0, 3, 4, 5])
        )


def test_losses_that_cannot_be_followed_may_be_assigned():
    model, rows = nn.Linear(WIDTH, 1).double(), torch.randn(5, WIDTH).double()
    bounds = torch.tensor([0, 2, 5])

    def loss(model, rows):
        weights = torch.linspace(1, 2, 5).double()
        return torch.einsum("nt,t,t->n", OF_TWO, weights, model(rows).sin()[:, 0])

    with pytest.raises(gs.ExampleAxisError, match=r"(?s)lost at .*einsum.*gs\.assign_rows"):
        gs.per_example_norms(model, rows, loss, cu_seqlens=bounds)
    got = gs.per_example_norms(
        model, rows, lambda m, b: gs.assign_rows(loss(m, b), torch.arange(2)), cu_seqlens=bounds
    )
    assert_sqnorms(got, oracle_sqnorms(model, rows, loss), 1e-9)


# Inner products over all rows, which are sums over the examples.
INNER = {
    "dot": lambda h: torch.dot(h.flatten(), h.sin().flatten()),
    "trace": lambda h: (h.T @ h.sin()).trace(),
    "einsum": lambda h: torch.einsum("td,td->", h, h.sin()),
}


@pytest.mark.parametrize("inner", INNER.values(), ids=INNER)
def test_inner_products_over_all_rows(inner):
    model, rows = nn.Linear(WIDTH, 2).double(), torch.randn(5, WIDTH).double()
    bounds = torch.tensor([0, 2, 5])
    packed = {"batch_size": 2, "cu_seqlens": bounds, "loss_reduction": "sum"}
    with gs.track(model, **packed) as tracker:
        inner(model(rows)).backward()
    for i, part in enumerate(rows.tensor_split(bounds[1:-1])):
        gradients = torch.autograd.grad(inner(model(part)), [*model.parameters()])
        expected = sum(gradient.square().sum() for gradient in gradients)
        torch.testing.assert_close(tracker.stats.sqnorm[i], expected)
    with pytest.raises(gs.CoupledExamplesError, match="more than a sum of the values of several"):
        with gs.track(model, **packed):
            inner(model(rows)).square().backward()


REPEATS = {
    "expand": lambda h: h[None].expand(ROWS, ROWS, WIDTH),
    "repeat": lambda h: h[None].repeat(ROWS, 1, 1),
    "repeat_interleave": lambda h: h[None].repeat_interleave(ROWS, 0),
    "index": lambda h: h[None][torch.zeros(ROWS, dtype=torch.long)],
    "broadcast": lambda h: torch.broadcast_to(h[None], (ROWS, ROWS, WIDTH)),
}


@pytest.mark.parametrize("name", REPEATS)
def test_rows_repeated_before_their_own_axis(name):
    """As many times as there are rows, as in pairs of them: rows lie along the second axis."""
    torch.manual_seed(0)
    model, rows = nn.Linear(WIDTH, WIDTH).double(), torch.randn(ROWS, WIDTH).double()
    scales = torch.linspace(1, 2, ROWS).double()[:, None, None]

    def losses(model, rows, axis):
        own = (REPEATS[name](model(rows)) * scales).sin().sum(2).sum(axis)
        return torch.zeros(len(LENGTHS)).to(own).index_add(0, OWNER, own)

    def own(model, rows):
        return losses(model, rows, 0)

    expected = oracle_on_the_batch(model, rows, own)
    assert_sqnorms(gs.per_example_norms(model, rows, own, cu_seqlens=BOUNDS), expected, 1e-9)
    with pytest.raises((gs.ExampleAxisError, gs.CoupledExamplesError)):
        gs.per_example_norms(model, rows, lambda m, x: losses(m, x, 1), cu_seqlens=BOUNDS)
