"""Statistics of a training step, from per-example norms and inner products alone.

Of one optimizer step: gradients g_i of N examples with weights w_i, Σ w_i = 1 (1/N for a mean),
n_i = ‖g_i‖², ḡ = Σ w_i g_i, Ḡ² = ‖ḡ‖², and p_i = ⟨g_i, ḡ_k⟩ with ḡ_k the mean of the micro-batch k
that i belongs to, which is ḡ where nothing is accumulated.

Everything is float64. An estimate that has no meaning is NaN, never a clamped number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

NAN = math.nan

# More than the float32 sums behind a squared norm may be off by, relative to it.
ROUNDING = 1e-5


@dataclass(frozen=True)
class StepGradients:
    """What is known about the gradients of one optimizer step.

    Attributes:
        sqnorm: (N,) n_i.
        weight: (N,) w_i, positive, with sum one.
        mean_sqnorm: Ḡ².
        batch: (N,) the number of the micro-batch that each example belongs to.
        alignment: (N,) p_i, or None if inner products were not measured.
    """

    sqnorm: np.ndarray
    weight: np.ndarray
    mean_sqnorm: float
    batch: np.ndarray
    alignment: np.ndarray | None = None

    @cached_property
    def mean_of_sqnorms(self) -> float:
        """N̄ = Σ w_i n_i."""
        return float(self.weight @ self.sqnorm)

    @cached_property
    def effective_batch(self) -> float:
        """1 / Σ w_i²: the number of examples, if all weigh the same."""
        return 1 / float(self.weight @ self.weight)

    @cached_property
    def noise_scale(self) -> tuple[float, float]:
        """Unbiased estimates (Ŝ, Ĝ²) of tr Σ and of the squared norm of the true gradient.

        Ĝ² = (Ḡ² − Σ w_i² n_i) / (1 − Σ w_i²), the mean of ⟨g_i, g_j⟩ over i ≠ j; for a plain mean
        (N Ḡ² − N̄) / (N − 1). Ŝ = N̄ − Ĝ²; for a plain mean N / (N − 1) · (N̄ − Ḡ²). Ĝ² may be
        negative.

        Source:
            McCandlish et al., arXiv 1812.06162, appendix A.1, with batches of one and of N.
        """
        if len(self.sqnorm) < 2:
            return NAN, NAN
        diagonal = float(self.weight**2 @ self.sqnorm)
        gradient = ratio(self.mean_sqnorm - diagonal, 1 - 1 / self.effective_batch)
        return self.mean_of_sqnorms - gradient, gradient


def gradient_diversity(step: StepGradients) -> float:
    """Return Δ = Σ n_i / ‖Σ g_i‖² = N̄ / (N Ḡ²): 1 / N for equal gradients, 1 for orthogonal ones.

    Source:
        Yin et al., arXiv 1706.05699; N Δ bounds the batch size that still speeds training up.
    """
    return ratio(step.mean_of_sqnorms, step.effective_batch * step.mean_sqnorm)


def m_coherence(step: StepGradients) -> float:
    """Return N Ḡ² / N̄ = 1 / Δ: 1 for orthogonal gradients, N for equal ones.

    Source:
        Chatterjee and Zielinski, arXiv 2008.01217.
    """
    return ratio(step.effective_batch * step.mean_sqnorm, step.mean_of_sqnorms)


def norm_test(step: StepGradients) -> float:
    """Return θ = √(Ŝ / (N Ḡ²)): the batch is large enough for the norm test if θ is below 1.

    Source:
        Byrd et al., Sample size selection in optimization methods for machine learning, 2012.
    """
    return root(ratio(step.noise_scale[0], step.effective_batch * step.mean_sqnorm))


def inner_product_test(step: StepGradients) -> float:
    """Return θ = √(Var_i(p_i) / (B Ḡ⁴)), within micro-batches.

    θ² = Σ w_i (p_i − Ḡ²)² / ((B − 1) Ḡ⁴) with B = 1 / Σ w_i² where examples weigh differently, its
    numerators and denominators averaged over micro-batches.

    Source:
        Bollapragada et al., arXiv 1710.11258.
    """
    above = below = 0.0
    for part in _micro_batches(step):
        if part.size > 1:
            spread = float(part.weight @ (part.alignment - part.square) ** 2)
            above += spread * part.size / (part.size - 1)
            below += part.size * part.square * part.square
    return root(ratio(above, below))


def orthogonality_test(step: StepGradients) -> float:
    """Return ν = √(Σ w_i (n_i − p_i² / Ḡ²) / ((B − 1) Ḡ²)), within micro-batches.

    B and averages over micro-batches are those of ``inner_product_test``.

    Source:
        Bollapragada et al., arXiv 1710.11258.
    """
    above = below = 0.0
    for part in _micro_batches(step):
        if part.size > 1:
            along = ratio(float(part.weight @ part.alignment**2), part.square)
            across = float(part.weight @ part.sqnorm) - along
            # By Cauchy and Schwarz it is negative only through rounding.
            across = max(across, 0.0) if math.isfinite(across) else NAN
            above += across * part.size / (part.size - 1)
            below += part.size * part.square
    return root(ratio(above, below))


def lengths_along_mean(step: StepGradients) -> np.ndarray:
    """Return (N,) p_i / Ḡ_k, the length of g_i along ḡ_k; NaN where Ḡ_k is zero."""
    return np.concatenate([
        part.alignment / (math.sqrt(part.square) if 0 < part.square < math.inf else NAN)
        for part in _micro_batches(step)
    ])  # fmt: skip


def cosines_to_mean(step: StepGradients) -> np.ndarray:
    """Return (N,) cos(g_i, ḡ_k) = p_i / (√n_i · Ḡ_k); NaN for gradients of zero."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return lengths_along_mean(step) / np.sqrt(step.sqnorm)


def fraction_against(step: StepGradients) -> float:
    """Return the share of examples with ⟨g_i, mean of the others⟩ < 0, within micro-batches.

    That is (p_i − w_i n_i) / (1 − w_i), or (B p_i − n_i) / (B − 1) for a plain mean: it leaves out
    the example's product with itself, which is positive whatever the others do. Values that may be
    negative only by the rounding of p_i and n_i do not count. NaN if a product is not finite.
    """
    beyond = [
        part.alignment - (1 - ROUNDING) * part.weight * part.sqnorm for part in _micro_batches(step)
    ]
    kept = [rows for rows in beyond if len(rows) > 1]
    if not kept or not all(np.isfinite(rows).all() for rows in kept):
        return NAN
    return float((np.concatenate(kept) < 0).mean())


class RunningRatio:
    """The ratio of two exponential averages over steps, with its standard error.

    R = Σ_t ω_t y_t / Σ_t ω_t x_t with ω_t a weight that falls by ``decay`` a step. The ratio of
    averages is consistent where the average of ratios is not: x_t may be near zero or negative on
    single steps. Its standard error is the delta method's, √(Σ ω² · s²) / |x̄| with Σ ω = 1 and s²
    the variance of the residuals y_t − R x_t; steps count as independent, drift counts as noise.

    Args:
        decay: in [0, 1); 1 / (1 − decay) is the number of steps that count.
    """

    def __init__(self, decay: float):
        self.decay = decay
        # Σω, Σω², Σωy, Σωx, Σωy², Σωxy, Σωx²
        self._sums = [0.0] * 7

    def add(self, numerator: float, denominator: float, weight: float = 1.0) -> None:
        """Add one step, if both values are finite."""
        if not (math.isfinite(numerator) and math.isfinite(denominator)):
            return
        y, x = numerator, denominator
        terms = (1.0, weight, y, x, y * y, x * y, x * x)
        kept = [self.decay] * 7
        kept[1] = self.decay**2
        self._sums = [
            k * s + weight * term for k, s, term in zip(kept, self._sums, terms, strict=True)
        ]

    @property
    def value(self) -> float:
        """The ratio; NaN before the first step and while the average denominator is ≤ 0."""
        _, _, y, x, *_ = self._sums
        return ratio(y, x)

    @property
    def standard_error(self) -> float:
        """The standard error of ``value``; NaN before the second step that counts."""
        total, squares, _, x, yy, xy, xx = self._sums
        value = self.value
        share = squares / (total * total) if total else 1.0
        if math.isnan(value) or share == 1:
            return NAN
        spread = max((yy - 2 * value * xy + value * value * xx) / total, 0.0) / (1 - share)
        return math.sqrt(spread * share) / (x / total)

    def state_dict(self) -> dict:
        """Return the state as plain numbers, for ``load_state_dict``."""
        return {"sums": list(self._sums)}

    def load_state_dict(self, state: dict) -> None:
        """Continue from a saved state."""
        self._sums = [float(entry) for entry in state["sums"]]


class _MicroBatch(NamedTuple):
    """The examples of one micro-batch: n_i, p_i, weights of sum one; 1 / Σ w_i², and Ḡ_k²."""

    sqnorm: np.ndarray
    alignment: np.ndarray
    weight: np.ndarray
    size: float
    square: float


def _micro_batches(step: StepGradients) -> Iterator[_MicroBatch]:
    """Yield the micro-batches of a step whose inner products were measured."""
    assert step.alignment is not None
    for number in np.unique(step.batch):
        rows = step.batch == number
        alignment, weight = step.alignment[rows], step.weight[rows] / step.weight[rows].sum()
        with np.errstate(invalid="ignore"):  # infinite products of both signs
            square = float(weight @ alignment)
        size = 1 / float(weight @ weight)
        yield _MicroBatch(step.sqnorm[rows], alignment, weight, size, square)


def ratio(above: float, below: float) -> float:
    """Return a quotient; NaN where it has no meaning."""
    return above / below if below > 0 else NAN


def root(square: float) -> float:
    """Return a square root; NaN where there is none."""
    return math.sqrt(square) if square >= 0 else NAN
