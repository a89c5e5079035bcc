"""Whole models: sharing, positions, checkpoints, and the stock GPT-2 of Hugging Face."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import gradstats as gs
from benchmarks.workloads import Transformer, next_token
from tests.losses import losses_of as classify
from tests.oracle import assert_sqnorms, check_model, oracle_on_the_batch, oracle_sqnorms

B = 6


def token_batch(batch, positions, vocabulary=50):
    tokens = torch.randint(vocabulary, (batch, positions + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


# With T = B a table of positions looks exactly like a batch.
@pytest.mark.parametrize("positions", [4, B, 9])
@pytest.mark.parametrize("tied", [True, False])
def test_transformer_with_arange_positions(positions, tied):
    model = Transformer(layers=2, width=16, heads=2, vocabulary=50, positions=12).double()
    if tied:
        model.head.weight = model.tokens.weight
    check_model(model, token_batch(B, positions), next_token)


@pytest.mark.parametrize(
    "positions",
    [
        lambda ids: ids.new_zeros(B),
        lambda ids: ids.new_ones(B).cumsum(0) - 1,
        lambda ids: ids.new_full((B,), 2),
        lambda ids: ids.new_empty(B).fill_(1),
    ],
    ids=["new_zeros", "new_ones", "new_full", "new_empty"],
)
def test_positions_that_only_take_their_kind_from_data(positions):
    """With as many positions as examples, what is filled in belongs to no example."""

    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.place = nn.Embedding(11, 6), nn.Embedding(B, 6)
            self.head = nn.Linear(6, 3)

        def forward(self, ids):
            return self.head(torch.tanh(self.tokens(ids) + self.place(positions(ids))))

    model = Positions().double()
    ids = torch.randint(11, (B, B))
    check_model(model, ids, lambda model, ids: model(ids).square().sum((1, 2)))


def gpt2(**options):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=2, n_head=2, n_embd=16, vocab_size=50, n_positions=32, bos_token_id=0,
        eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **options,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def sequence_losses(model, batch):
    tokens, targets = batch
    logits = model(input_ids=tokens).logits
    losses = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return losses.view_as(targets).mean(1)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("positions", [1, 2])
def test_a_single_example_or_position(batch, positions):
    """Axes of size one cannot be told apart, and need not be."""
    torch.manual_seed(0)
    model = Transformer(layers=1, width=8, heads=2, vocabulary=11, positions=4).double()
    tokens = torch.randint(11, (batch, positions)), torch.randint(11, (batch, positions))
    check_model(model, tokens, next_token)


@pytest.mark.parametrize("positions", [5, B, 9])
@pytest.mark.parametrize("tied", [True, False])
def test_stock_gpt2(positions, tied):
    model = gpt2(tie_word_embeddings=tied).double()
    assert (model.lm_head.weight is model.transformer.wte.weight) == tied
    check_model(model, token_batch(B, positions), sequence_losses)


def test_stock_gpt2_in_float32():
    check_model(gpt2(), token_batch(B, 9), sequence_losses, rtol=2e-5, gradient_rtol=1e-6)


def test_gpt2_with_a_batch_that_is_a_mapping():
    model = gpt2().double()
    tokens, targets = token_batch(B, 7)

    def losses(model, batch):
        return sequence_losses(model, (batch["input_ids"], batch["labels"]))

    check_model(model, {"input_ids": tokens, "labels": targets}, losses)


class Checkpointed(nn.Module):
    """Blocks under activation checkpointing, one of them used twice, inside and outside."""

    def __init__(self, reentrant: bool, shared: bool):
        super().__init__()
        self.reentrant, self.shared = reentrant, shared
        self.embed = nn.Embedding(20, 8)
        self.position = nn.Embedding(5, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh()) for _ in range(2)
        )
        self.head = nn.Linear(8, 20)

    def forward(self, ids):
        x = self.embed(ids)

        def inside(x, block):
            return x + block(x) + self.position(torch.arange(x.shape[1]))

        for block in self.blocks:
            x = checkpoint(inside, x, block, use_reentrant=self.reentrant)
        return self.head(self.blocks[0](x) if self.shared else x)


@pytest.mark.parametrize("positions", [4, 5])
def test_checkpoints(positions):
    model = Checkpointed(reentrant=False, shared=True).double()
    check_model(model, token_batch(5, positions, 20), next_token)


def test_an_inner_gradient_does_not_count():
    """torch.autograd.grad of something else, inside the context, runs the uses' backward too."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    shared = nn.Sequential(model[0], nn.Tanh(), model[0], nn.Tanh(), model[2])
    batch = torch.randn(B, 4, dtype=torch.float64), torch.randint(3, (B,))

    def losses(model, batch):
        x = batch[0].clone().requires_grad_()
        out = model(x)
        saliency = torch.autograd.grad(out.sum(), x, retain_graph=True)[0].detach()
        return functional.cross_entropy(out, batch[1], reduction="none") * saliency.norm(dim=1)

    for candidate in (model, shared):
        expected = oracle_sqnorms(candidate, batch, losses)
        assert_sqnorms(gs.per_example_norms(candidate, batch, losses), expected, 1e-9)


def test_autocast():
    """Under bfloat16 autocast the gradient is that of the cast operands."""
    model = nn.Sequential(
        nn.Conv1d(3, 8, 3), nn.Flatten(), nn.Linear(64, 32), nn.LayerNorm(32), nn.Linear(32, 4)
    )
    batch = torch.randn(B, 3, 10), torch.randint(4, (B,))

    def losses(model, batch):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(batch[0])
        return functional.cross_entropy(out.float(), batch[1], reduction="none")

    # Float32 gradients of bfloat16 products: agreement is to bfloat16's rounding.
    expected = oracle_on_the_batch(model, batch, losses)
    assert_sqnorms(gs.per_example_norms(model, batch, losses), expected, 0.02)
    for fused in (True, False):
        with gs.track(model, batch_size=B, fused=fused) as tracker:
            tracker.backward(losses(model, batch))
        assert_sqnorms(tracker.stats, expected, 0.02)
        assert all(p.grad.dtype == torch.float32 for p in model.parameters())
        model.zero_grad()


def test_examples_along_another_axis():
    class SequenceFirst(nn.Module):
        def __init__(self):
            super().__init__()
            self.expand = nn.Linear(4, 8)
            self.norm = nn.LayerNorm(8)
            self.head = nn.Linear(8, 3)

        def forward(self, x):
            return self.head(self.norm(self.expand(x))).mean(0)

    model = SequenceFirst().double()
    for positions in (3, B + 1):
        batch = torch.randn(positions, B, 4, dtype=torch.float64), torch.randint(3, (B,))
        losses = lambda m, b: functional.cross_entropy(m(b[0]), b[1], reduction="none")  # noqa: E731
        check_model(model, batch, losses, batch_dim=1)


class Transposes(nn.Module):
    """Works sequence first inside, as torch.nn's own sequence modules do by default."""

    def __init__(self, last: str):
        super().__init__()
        self.expand = nn.Linear(4, 8)
        self.norm = nn.LayerNorm(8)
        self.shift = nn.Parameter(torch.randn(8))
        self.head = nn.Linear(8, 3)
        self.last = last

    def forward(self, x):
        x = self.expand(x.transpose(0, 1)).tanh()
        x = self.norm(x.permute(1, 0, 2)).movedim(0, 1) + self.shift
        if self.last == "fold":
            positions, batch, width = x.shape
            x = self.head(x.transpose(0, 1).reshape(batch * positions, width).relu())
            return x.view(batch, positions, -1).mean(1)
        if self.last == "back":
            return self.head(x.transpose(0, 1)).mean(1)
        if self.last == "sum":
            return self.head(x.sum(0))
        return self.head(torch.tensordot(torch.ones(len(x), dtype=x.dtype), x, dims=1))


@pytest.mark.parametrize("positions", [3, B])
@pytest.mark.parametrize("last", ["fold", "back", "sum"])
def test_a_transposed_example_axis_is_followed(positions, last):
    batch = torch.randn(B, positions, 4, dtype=torch.float64), torch.randint(3, (B,))
    check_model(Transposes(last).double(), batch, classify)


@pytest.mark.parametrize("positions", [3, B])
def test_the_example_axis_of_a_contraction(positions):
    batch = torch.randn(B, positions, 4, dtype=torch.float64), torch.randint(3, (B,))
    check_model(Transposes("tensordot").double(), batch, classify)


def test_reordered_rows_are_followed():
    """As in expert routing: rows of the folded batch in another order belong to other examples."""

    class Routes(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x):
            flat = x.reshape(-1, 4)
            order = flat.sum(1).argsort()
            out = self.layer(flat[order])
            zeros = torch.zeros(len(flat), 3, dtype=x.dtype)
            return zeros.index_copy(0, order, out).view(*x.shape[:2], 3).mean(1)

    batch = torch.randn(B, 4, 4, dtype=torch.float64), torch.randint(3, (B,))
    check_model(Routes().double(), batch, classify)
