"""One pass over the data that yields gradient norms, losses and probabilities together."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gradstats as gs

EXAMPLES_PER_PASS = 256


@dataclass(frozen=True)
class Measurement:
    """What one set of weights says about N examples, in float64.

    Attributes:
        sqnorm: (N,) squared per-example gradient norms.
        loss: (N,) cross-entropies.
        probability: (N, K) softmax outputs.
    """

    sqnorm: np.ndarray
    loss: np.ndarray
    probability: np.ndarray


def measure(model: nn.Module, images: Tensor, labels: Tensor) -> Measurement:
    """Return the norms of every example's gradient, with what the same forward pass shows.

    Args:
        model: a classifier.
        images: (N, ...) inputs.
        labels: (N,) given labels.

    Returns:
        Measurement: arrays over the N examples.
    """
    sqnorms, losses, logits = [], [], []

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, targets = batch
        outputs = model(inputs)
        logits.append(outputs.detach())
        return F.cross_entropy(outputs, targets, reduction="none")

    for start in range(0, len(images), EXAMPLES_PER_PASS):
        part = slice(start, start + EXAMPLES_PER_PASS)
        stats = gs.per_example_norms(model, (images[part], labels[part]), loss_fn)
        assert stats.loss is not None
        sqnorms.append(stats.sqnorm)
        losses.append(stats.loss)
    probability = torch.cat(logits).double().softmax(1)
    return Measurement(
        torch.cat(sqnorms).double().numpy(), torch.cat(losses).double().numpy(), probability.numpy()
    )
