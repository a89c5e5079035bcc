"""Attention of packed examples with sinks, further columns that share the softmax of the scores."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import gradstats as gs
from tests.oracle import assert_sqnorms, oracle_sqnorms
from tests.test_packed_apart import (
    BOUNDS,
    LEAK,
    LENGTHS,
    NEGATIVE,
    OTHERS,
    ROWS,
    WIDTH,
    Attends,
    heads,
    loss_fn,
)


class Sinks(Attends):
    """Attention with two learned numbers beside the scores."""

    def __init__(self, attend):
        super().__init__(attend)
        self.sinks = nn.Parameter(torch.randn(2))

    def forward(self, rows):
        *first, last = self.layers
        attended = self.attend(*(layer(rows) for layer in first), self.sinks)
        return last(attended.reshape(ROWS, WIDTH))


def masked(q, k):
    return (q @ k.mT).masked_fill(OTHERS, -torch.inf)


def of_rows(sinks):
    return sinks.expand(ROWS, 2)


def joined(q, k, sinks, *, mask=NEGATIVE):
    """Scores of two heads, and behind them a sink for each head and row."""
    beside = sinks.view(1, 2, 1, 1).expand(1, -1, ROWS, -1)
    return torch.cat([heads(q) @ heads(k).mT + mask, beside], -1)


def by_heads(probabilities, v):
    return (probabilities @ heads(v)).transpose(1, 2)


def shifted(scores):
    """The largest score subtracted, as models do before a softmax in low precision."""
    return scores - scores.max(-1, keepdim=True).values


APART = {
    "behind": lambda q, k, v, s: torch.cat([masked(q, k), of_rows(s)], -1).softmax(-1)[:, :-2] @ v,
    "in front": lambda q, k, v, s: (
        torch.cat([of_rows(s), masked(q, k)], 1).softmax(1)[:, 2:] @ v
    ),
    "on both sides": lambda q, k, v, s: (
        torch.concat([of_rows(s), masked(q, k), of_rows(s)], 1).softmax(1)[:, 2:-2] @ v
    ),
    "heads": lambda q, k, v, s: by_heads(joined(q, k, s).softmax(-1)[..., :-1], v),
    "shifted": lambda q, k, v, s: by_heads(shifted(joined(q, k, s)).softmax(-1)[..., :-1], v),
    "a finite mask": lambda q, k, v, s: by_heads(
        shifted(joined(q, k, s, mask=-1e300 * OTHERS.to(v))).softmax(-1)[..., :-1], v
    ),
    "cast": lambda q, k, v, s: by_heads(
        shifted(joined(q, k, s).double() * 0.5).softmax(-1, dtype=v.dtype)[..., :-1], v
    ),
    "narrowed": lambda q, k, v, s: (
        torch.cat([masked(q, k), of_rows(s)], -1).softmax(-1).narrow(1, 0, ROWS) @ v
    ),
    "split": lambda q, k, v, s: (
        torch.cat([masked(q, k), of_rows(s)], -1).softmax(-1).split([ROWS, 2], 1)[0] @ v
    ),
    "of data": lambda q, k, v, s: (
        torch.cat([masked(q, k), q[:, :2] * s], -1).softmax(-1)[:, :-2] @ v
    ),
    "of a constant": lambda q, k, v, s: (
        torch.cat([masked(q, k), torch.ones(ROWS, 1).to(v)], -1).softmax(-1)[:, :-1] @ v * s.sum()
    ),
    "normalised": lambda q, k, v, s: (
        (masked(q, k) - torch.cat([masked(q, k), of_rows(s)], -1).logsumexp(-1, True)).exp() @ v
    ),
    "joined in two steps": lambda q, k, v, s: (
        torch.cat(
            [torch.ones(ROWS, 1).to(v), torch.cat([masked(q, k), v[:, :1]], -1), q[:, :1]], -1
        ).softmax(-1)[:, 1:-2] @ v * s.sum()
    ),
    "behind nothing": lambda q, k, v, s: (
        torch.cat([torch.tensor([]).to(v), masked(q, k), of_rows(s)], -1).softmax(-1)[:, :-2] @ v
    ),
    "joined to the same": lambda q, k, v, s: (
        torch.cat([torch.cat([masked(q, k), of_rows(s)], -1)] * 2, -1).softmax(-1)[:, :ROWS] @ v
    ),
    "the weight of the sinks": lambda q, k, v, s: (
        torch.cat([masked(q, k), of_rows(s)], -1).softmax(-1)[:, -2:].sum(1, keepdim=True) * v
    ),
}  # fmt: skip


@pytest.mark.parametrize("trained", [True, False], ids=["trained", "frozen"])
@pytest.mark.parametrize("name", APART)
def test_kept_apart(name, trained):
    torch.manual_seed(0)
    model, rows = Sinks(APART[name]).double(), torch.randn(ROWS, WIDTH).double()
    model.sinks.requires_grad_(trained)
    for fused in (True, False):
        got = gs.per_example_norms(model, rows, loss_fn, cu_seqlens=BOUNDS)
        assert_sqnorms(got, oracle_sqnorms(model, rows, loss_fn), 1e-9)
        with gs.track(model, batch_size=len(LENGTHS), cu_seqlens=BOUNDS, fused=fused) as tracker:
            tracker.backward(loss_fn(model, rows))
        assert_sqnorms(tracker.stats, oracle_sqnorms(model, rows, loss_fn), 1e-9)


MEET = {
    "no mask": lambda q, k, v, s: (
        torch.cat([q @ k.T, of_rows(s)], -1).softmax(-1)[:, :-2] @ v
    ),
    "a leak": lambda q, k, v, s: (
        torch.cat([(q @ k.T).masked_fill(LEAK, -torch.inf), of_rows(s)], -1).softmax(-1)[:, :-2] @ v
    ),
    "a faint mask": lambda q, k, v, s: (
        torch.cat([q @ k.T - 10.0 * OTHERS, of_rows(s)], -1).softmax(-1)[:, :-2] @ v
    ),
    "other columns dropped": lambda q, k, v, s: (
        torch.cat([masked(q, k), of_rows(s)], -1).softmax(-1)[:, 2:] @ v
    ),
    "columns in another order": lambda q, k, v, s: (
        torch.cat([masked(q, k), of_rows(s)], -1).softmax(-1)[:, :-2].flip(1) @ v
    ),
    "the largest without a mask": lambda q, k, v, s: (
        torch.cat([q @ k.T, of_rows(s)], -1).amax(-1, keepdim=True) * v
    ),
    "a sum": lambda q, k, v, s: (
        torch.cat([q @ k.T, of_rows(s)], -1).sum(-1, keepdim=True) * v
    ),
    "scores after the softmax": lambda q, k, v, s: (
        torch.cat([q @ k.T, of_rows(s)], -1)[:, :-2] @ v
    ),
    "over the rows": lambda q, k, v, s: (
        torch.cat([masked(q, k), of_rows(s)], -1).softmax(0)[:, :-2] @ v
    ),
    "over the rows, the sinks": lambda q, k, v, s: (
        torch.cat([masked(q, k), of_rows(s)], -1).softmax(0)[:, -2:].sum(1, keepdim=True) * v
    ),
    "transposed": lambda q, k, v, s: (
        (torch.cat([masked(q, k), of_rows(s)], -1).mT * s[:1]).softmax(0)[:-2].mT @ v
    ),
    "transposed, the sinks": lambda q, k, v, s: (
        (torch.cat([masked(q, k), 0 * of_rows(s)], -1).mT + q.sum(1)).logsumexp(1)[:ROWS, None] * v
    ),
    "as values": lambda q, k, v, s: torch.cat([q @ k.T, of_rows(s)], -1)[:, :WIDTH] * v,
    "below each other": lambda q, k, v, s: (
        torch.cat([masked(q, k), torch.ones(2, ROWS).to(v)], 0)[:-2].softmax(-1) @ v
    ),
    "of others": lambda q, k, v, s: (
        torch.cat([masked(q, k), q.flip(0)[:, :2] * s], -1).softmax(-1)[:, :-2] @ v
    ),
    "scores twice": lambda q, k, v, s: (
        torch.cat([masked(q, k), q @ k.T], -1).softmax(-1)[:, :ROWS] @ v * s.sum()
    ),
    "scores behind others that are detached": lambda q, k, v, s: (
        torch.cat([masked(q, k).detach(), q @ k.T], -1).softmax(-1)[:, ROWS:] @ v * s.sum()
    ),
    "scores behind constants": lambda q, k, v, s: (
        torch.cat([NEGATIVE, q @ k.T], -1).softmax(-1)[:, :ROWS] @ v * s.sum()
    ),
    "added to others": lambda q, k, v, s: (
        (torch.cat([masked(q, k), of_rows(s)], -1) + torch.cat([of_rows(s), q @ k.T], -1))
        .softmax(-1)[:, :-2] @ v
    ),
    "stacked": lambda q, k, v, s: (
        torch.stack([torch.cat([masked(q, k), of_rows(s)], -1)] * 2)[1].softmax(-1)[:, :-2] @ v
    ),
    "in an einsum": lambda q, k, v, s: torch.einsum(
        "qk,kd->qd", torch.cat([q @ k.T, q[:, :2]], -1), functional.pad(v, (0, 0, 0, 2))
    ) * s.sum(),
    "joined below each other": lambda q, k, v, s: (
        torch.cat([torch.cat([masked(q, k), of_rows(s)], -1), torch.ones(1, ROWS + 2).to(v)])[:-1]
        .softmax(-1)[:, :-2] @ v
    ),
    "times a column": lambda q, k, v, s: (
        torch.cat([q @ k.T, of_rows(s)], -1) @ torch.ones(ROWS + 2, 1).to(v) * v
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MEET)
def test_rows_that_meet_are_refused(name):
    torch.manual_seed(0)
    model, rows = Sinks(MEET[name]).double(), torch.randn(ROWS, WIDTH).double()
    with pytest.raises((gs.ExampleAxisError, gs.CoupledExamplesError)):
        gs.per_example_norms(model, rows, loss_fn, cu_seqlens=BOUNDS)


def packed_losses(model, batch):
    """Return the loss of each of several sequences in one row, of which a mask keeps them apart."""
    ids, bounds = batch
    lengths = bounds.diff()
    owner = torch.arange(len(lengths)).repeat_interleave(lengths)
    positions = torch.cat([torch.arange(length) for length in lengths.tolist()])
    causal = torch.ones(len(owner), len(owner)).tril().bool() & (owner[:, None] == owner)
    mask = torch.zeros(causal.shape).double().masked_fill(~causal, -torch.inf)[None, None]
    masks = {"full_attention": mask, "sliding_attention": mask}
    hidden = model(input_ids=ids, position_ids=positions[None], attention_mask=masks).logits[0]
    each = hidden.log_softmax(-1).gather(1, ids[0].roll(-1)[:, None])[:, 0]
    return each.new_zeros(len(lengths)).index_add(0, owner, -each)


def test_gpt_oss():
    """Its eager attention joins a sink of each head, and subtracts the largest."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        num_hidden_layers=2, hidden_size=16, intermediate_size=8, num_local_experts=3,
        num_experts_per_tok=2, num_attention_heads=4, num_key_value_heads=2, head_dim=4,
        vocab_size=19, sliding_window=64, attn_implementation="eager",
        experts_implementation="eager", pad_token_id=0,
    )  # fmt: skip
    model = transformers.GptOssForCausalLM(config).double().eval()
    nn.init.normal_(model.model.layers[0].self_attn.sinks)
    batch = torch.randint(19, (1, ROWS)), BOUNDS
    got = gs.per_example_norms(model, batch, packed_losses, cu_seqlens=BOUNDS)
    assert_sqnorms(got, oracle_sqnorms(model, batch, packed_losses), 1e-9)
    assert got.by_parameter["model.layers.0.self_attn.sinks"].min() > 0
