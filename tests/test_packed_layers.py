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
