"""The digits bundled with scikit-learn, with some training labels flipped."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

CLASSES = 10
LARGEST_PIXEL = 16.0


@dataclass(frozen=True)
class NoisyDigits:
    """A training set with known label errors, and a clean held-out set.

    Attributes:
        ids: (N,) positions of the training digits in scikit-learn's data set.
        images: (N, 1, 8, 8) float32 in [0, 1].
        given: (N,) int64 labels to train on.
        true: (N,) int64 labels as published.
        held_out_images: (M, 1, 8, 8) float32.
        held_out_labels: (M,) int64, as published.
    """

    ids: np.ndarray
    images: Tensor
    given: np.ndarray
    true: np.ndarray
    held_out_images: Tensor
    held_out_labels: np.ndarray

    @property
    def flipped(self) -> np.ndarray:
        """(N,) whether the given label differs from the true one."""
        return self.given != self.true


def load_noisy_digits(
    random: np.random.Generator, held_out: float, noise_rate: float
) -> NoisyDigits:
    """Return the 1797 digits, split at random, with training labels flipped symmetrically.

    Args:
        random: source of the split and the flips.
        held_out: fraction of the digits that stays out of training.
        noise_rate: fraction of training labels replaced by one of the nine others, all equally
            likely.

    Returns:
        NoisyDigits: the two sets.
    """
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    labels = labels.astype(np.int64)
    images = torch.from_numpy(pixels).float().reshape(-1, 1, 8, 8) / LARGEST_PIXEL
    order = random.permutation(len(labels))
    kept_out = round(held_out * len(labels))
    test, train = order[:kept_out], np.sort(order[kept_out:])
    true = labels[train]
    return NoisyDigits(
        ids=train,
        images=images[train],
        given=flip_labels(true, noise_rate, random),
        true=true,
        held_out_images=images[test],
        held_out_labels=labels[test],
    )


def flip_labels(labels: np.ndarray, rate: float, random: np.random.Generator) -> np.ndarray:
    """Return a copy of the labels (N,) of which ``rate`` · N, rounded, became another class."""
    chosen = random.choice(len(labels), size=round(rate * len(labels)), replace=False)
    flipped = labels.copy()
    flipped[chosen] = (labels[chosen] + random.integers(1, CLASSES, size=len(chosen))) % CLASSES
    return flipped
