"""What a model of the zoo is: how to build it, its batch, its losses, and what must come out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.oracle import to_float64

BATCH = 3


@dataclass(frozen=True)
class Case:
    """One model.

    Attributes:
        name: how the table calls it.
        build: returns the model, in float32.
        batch: returns a batch of BATCH examples.
        loss_fn: returns their losses, (BATCH,).
        single: the model computes parts in float32 whatever its dtype, so that agreement with the
            oracle is to float32's rounding.
        refused: the error that names what has no answer, and a pattern of its text; None where the
            result must be exact.
        options: passed on to gradstats.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Any]
    loss_fn: Callable[[nn.Module, Any], Tensor]
    single: bool = False
    refused: tuple[type[Exception], str] | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def tolerances(self) -> dict[str, float]:
        """Relative, of squared norms and of fused gradients."""
        return {"rtol": 1e-5, "gradient_rtol": 1e-6} if self.single else {"rtol": 1e-9}

    def prepare(self) -> tuple[nn.Module, Any]:
        """Return model and batch in float64, the same ones on every call."""
        torch.manual_seed(0)
        model, batch = self.build().double(), to_float64(self.batch())
        with torch.no_grad():
            # Some models finish building themselves in their first forward.
            self.loss_fn(model, batch)
        return model, batch


def tokens(positions: int = 5, vocabulary: int = 40):
    """Return token ids and their targets, (BATCH, positions) each."""
    ids = torch.randint(3, vocabulary, (BATCH, positions + 1))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def sequence_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of each sequence, (B,)."""
    losses = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return losses.view_as(targets).mean(1)


def uneven(out: Tensor) -> Tensor:
    """Return losses whose gradient differs from output to output, (B,)."""
    out = out.flatten(1)
    slope = torch.linspace(0.5, 1.5, out.shape[1], dtype=out.dtype)
    return (out * slope + out.square() / 3).sum(1)


def classify(model: nn.Module, batch) -> Tensor:
    """Return the cross-entropy of each example, (B,), for a batch of inputs and a label."""
    *inputs, labels = batch
    return functional.cross_entropy(model(*inputs), labels, reduction="none")


def labelled(*shape: int):
    """Return a function that makes inputs (BATCH, *shape) and labels of four classes."""
    return lambda: (torch.randn(BATCH, *shape), torch.randint(4, (BATCH,)))
