"""Layers with an axis for a batch, on slices of packed rows that belong to one example each."""

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


def check(model, rows, refused=False):
    if refused:
        with pytest.raises((gs.ExampleAxisError, gs.CoupledExamplesError)):
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
    "batch norm": (nn.BatchNorm1d(WIDTH).eval(), turned),
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
