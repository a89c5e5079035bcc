"""How well a score finds flipped labels.

Examples of equal scores are inspected together. Curves are linear between such groups, so areas
under them and fractions read off them are expectations over ties broken at random.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Detection:
    """What is found when examples are inspected from the most suspicious down.

    Attributes:
        inspected: (P,) numbers of examples inspected, from 0 to N, after each group of equal
            scores.
        found: (P,) numbers of flipped labels among them.
    """

    inspected: np.ndarray
    found: np.ndarray

    def __repr__(self) -> str:
        return (
            f"Detection(auroc={self.auroc:.4f}, average_precision={self.average_precision:.4f}, "
            f"recall_at_noise_rate={self.recall_at_noise_rate:.4f})"
        )

    @property
    def found_fraction(self) -> np.ndarray:
        """(P,) fraction of the flipped labels that was found: the true positive rate."""
        return self.found / self.found[-1]

    @property
    def inspected_fraction(self) -> np.ndarray:
        """(P,) fraction of the examples that was inspected."""
        return self.inspected / self.inspected[-1]

    @property
    def false_alarm_fraction(self) -> np.ndarray:
        """(P,) fraction of the unflipped labels that was inspected: the false positive rate."""
        clean = self.inspected - self.found
        return clean / clean[-1]

    @property
    def auroc(self) -> float:
        """Probability that a flipped label scores above an unflipped one, ties counting half."""
        heights = (self.found_fraction[1:] + self.found_fraction[:-1]) / 2
        return float(np.sum(np.diff(self.false_alarm_fraction) * heights))

    @property
    def average_precision(self) -> float:
        """Mean, over the flipped labels in the order found, of the share flipped so far."""
        found = self.found[1:]
        return float(np.sum(np.diff(self.found_fraction) * found / self.inspected[1:]))

    @property
    def recall_at_noise_rate(self) -> float:
        """Fraction of the flipped labels found by inspecting as many examples as were flipped."""
        return float(np.interp(self.found[-1], self.inspected, self.found_fraction))


def detect(values: np.ndarray, flipped: np.ndarray) -> Detection:
    """Return the inspection of examples in descending order of their score.

    Args:
        values: (N,) scores.
        flipped: (N,) bool, neither all True nor all False.

    Returns:
        Detection: counts where the score changes.
    """
    order = np.argsort(-values, kind="stable")
    ordered = values[order]
    group_ends = np.flatnonzero(np.append(ordered[1:] != ordered[:-1], True))
    found = np.cumsum(flipped[order])[group_ends]
    return Detection(np.append(0, group_ends + 1), np.append(0, found))


def chance_halfwidth(flipped: np.ndarray) -> float:
    """Return the half-width around 0.5 that holds the AUROC of 95% of random rankings.

    Args:
        flipped: (N,) bool.

    Returns:
        float: 1.96 standard deviations of the Mann-Whitney statistic under random order.
    """
    positive, total = int(flipped.sum()), len(flipped)
    return 1.96 * float(np.sqrt((total + 1) / (12 * positive * (total - positive))))
