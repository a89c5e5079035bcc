"""The models and batches that benchmarks run, each a plain PyTorch training step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Workload:
    """A model, a batch, and the per-example loss that ties them.

    Attributes:
        bar_norms, bar_training: the ratios to plain training that are aimed at.
    """

    name: str
    model: nn.Module
    batch: tuple[Tensor, Tensor]
    loss_fn: Callable[[nn.Module, tuple[Tensor, Tensor]], Tensor]
    bar_norms: float | None = None
    bar_training: float | None = None


def classification(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return one cross-entropy for each example."""
    inputs, labels = batch
    return functional.cross_entropy(model(inputs), labels, reduction="none")


def next_token(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean cross-entropy of each sequence."""
    tokens, targets = batch
    logits = model(tokens)
    losses = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return losses.view_as(targets).mean(1)


def mlp() -> Workload:
    """MLP 784-2048-2048-10, B = 256."""
    model = nn.Sequential(
        nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10)
    )
    batch = (torch.randn(256, 784), torch.randint(10, (256,)))
    return Workload("MLP 784-2048-2048-10, B=256", model, batch, classification, 0.70, 1.05)


def cnn() -> Workload:
    """The network of PyTorch's per-sample-gradients tutorial, B = 64."""
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(9216, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip
    batch = (torch.randn(64, 1, 28, 28), torch.randint(10, (64,)))
    return Workload("CNN of the tutorial, B=64", model, batch, classification, 1.10, 1.20)


class Block(nn.Module):
    """A pre-norm transformer block with causal attention."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, positions, width = x.shape
        q, k, v = (
            part.view(batch, positions, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm_attention(x)).chunk(3, dim=-1)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, positions, width))
        return x + self.contract(functional.gelu(self.expand(self.norm_mlp(x))))


class Transformer(nn.Module):
    """A decoder-only transformer with learned positions."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int, positions: int):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(positions, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        return self.head(self.norm(self.blocks(x)))


def gpt() -> Workload:
    """4 layers, width 256, T = 128, B = 16, V = 1000."""
    model = Transformer(layers=4, width=256, heads=4, vocabulary=1000, positions=128)
    tokens = torch.randint(1000, (16, 129))
    batch = (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    return Workload("GPT 4×256, T=128, B=16, V=1000", model, batch, next_token, 0.90, 1.10)


WORKLOADS = {"mlp": mlp, "cnn": cnn, "gpt": gpt}
