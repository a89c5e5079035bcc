"""Margin and EL2N, from the logits and labels that a loss function gives to a cross-entropy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from gradstats.errors import GradStatsError
from gradstats.statistics._loss import order_here

# Losses of one class among several, with what turns their input into probabilities (B, K), and the
# label that they ignore by default.
SEVERAL = {
    functional.cross_entropy: lambda logits: logits.softmax(1),
    functional.nll_loss: lambda logarithms: logarithms.exp(),
}
IGNORED = -100
# Losses of two classes, with what turns their input (B,) into probabilities (B, 2).
BINARY = {
    functional.binary_cross_entropy_with_logits: lambda logits: torch.stack(
        [-logits, logits], 1
    ).sigmoid(),
    functional.binary_cross_entropy: lambda one: torch.stack([1 - one, one], 1),
}


def margin(probability: np.ndarray, given: np.ndarray) -> np.ndarray:
    """Return p_y - max_{k≠y} p_k (..., N) from probabilities (..., N, K) and labels y (N,)."""
    is_given = np.eye(probability.shape[-1], dtype=bool)[given]
    other = np.where(is_given, -np.inf, probability).max(-1)
    return np.where(is_given, probability, 0.0).sum(-1) - other


def el2n(probability: np.ndarray, given: np.ndarray) -> np.ndarray:
    """Return ‖p - onehot(y)‖ (..., N) from probabilities (..., N, K) and labels y (N,).

    Source: Paul et al., arXiv 2107.07075.
    """
    return np.linalg.norm(probability - np.eye(probability.shape[-1])[given], axis=-1)


class CrossEntropyWatch(TorchFunctionMode):
    """Sees the logits and labels that are given to a cross-entropy inside the context.

    A binary cross-entropy counts, as one of two classes, only if there is no other cross-entropy.

    Attributes:
        reason: why the labels of some examples are unknown; None if all are known.
    """

    def __init__(self):
        super().__init__()
        self._seen: list[tuple[Callable, Tensor, Tensor, int]] = []
        # Which example each row of the logits is of, None for the batch's order; why it is unknown.
        self._order: Tensor | None = None
        self._problem: str | None = None
        self.reason: str | None = None

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in SEVERAL or func in BINARY:
            # However they were called: input and target by position, all else by keyword.
            logits, labels = args
            self._seen.append((func, logits, labels, kwargs.get("ignore_index", IGNORED)))
        return func(*args, **kwargs)

    def __enter__(self) -> CrossEntropyWatch:
        self._seen = []
        return super().__enter__()

    def __exit__(self, kind, value, traceback) -> None:
        super().__exit__(kind, value, traceback)
        if kind is None:
            self._settle()

    def _settle(self) -> None:
        """Find which example each row of the logits is of: compiled functions tell when done."""
        self._order = self._problem = None
        self._seen = [seen for seen in self._seen if seen[0] in SEVERAL] or self._seen
        for _, logits, *_ in self._seen[:1]:
            try:
                self._order = order_here(logits)
            except GradStatsError as error:
                self._problem = str(error)

    def columns(self, batch_size: int) -> dict[str, np.ndarray]:
        """Return column → (B,), NaN where unknown; {}, with a ``reason``, without a classification.

        The columns are margin, el2n, label, predicted (the class of highest probability), and
        classes (their number).
        """
        seen, self._seen = self._seen, []
        if len(seen) != 1:
            self.reason = (
                "the loss calls cross_entropy (or nll_loss, or a binary_cross_entropy) "
                f"{len(seen)} times, expected once"
            )
            return {}
        func, logits, labels, ignored = seen[0]
        if not _is_one_for_each(func, logits, labels, batch_size):
            self.reason = (
                f"the cross-entropy of {batch_size} examples sees logits of shape "
                f"{tuple(logits.shape)} and labels of shape {tuple(labels.shape)}, expected one "
                "classification for each example"
            )
            return {}
        if self._problem is not None:
            self.reason = f"which example each row of the logits is of is unknown: {self._problem}"
            return {}
        logits, labels = logits.detach().double(), labels.detach()
        if self._order is not None:
            place = self._order.argsort()
            logits, labels = logits[place], labels[place]
        if func in BINARY:
            logits, labels = logits.reshape(batch_size), labels.reshape(batch_size)
            if not bool(((labels == 0) | (labels == 1)).all()):
                self.reason = "some labels of the binary cross-entropy are neither 0 nor 1"
                return {}
        probability = (SEVERAL | BINARY)[func](logits).cpu().numpy()
        label, classes = labels.long().cpu().numpy(), probability.shape[1]
        labelled = (label != ignored) & (label >= 0) & (label < classes)
        if not labelled.all():
            self.reason = "some labels are ignored by the cross-entropy"
        # An unknown label or infinite logit makes only its own example's values unknown.
        finite = np.isfinite(probability).all(1)
        probability, given = np.where(finite[:, None], probability, 0), np.where(labelled, label, 0)
        found = {
            "margin": (labelled & finite, margin(probability, given)),
            "el2n": (labelled & finite, el2n(probability, given)),
            "label": (labelled, label),
            "predicted": (finite, probability.argmax(1)),
            "classes": (True, np.full(batch_size, classes)),
        }
        return {name: np.where(known, held, np.nan) for name, (known, held) in found.items()}


def _is_one_for_each(func: Callable, logits: Tensor, labels: Tensor, batch_size: int) -> bool:
    """Whether each of B examples has one row of logits, or one number, and one label."""
    if func in BINARY:
        return logits.shape[:1].numel() == logits.numel() == batch_size
    return logits.dim() == 2 and tuple(labels.shape) == (batch_size,)
