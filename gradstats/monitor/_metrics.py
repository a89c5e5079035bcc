"""The metrics of one measured step that need no other step."""

from __future__ import annotations

import math

import numpy as np

from gradstats.monitor._measured import Measured
from gradstats.statistics._training import (
    StepGradients,
    cosines_to_mean,
    fraction_against,
    gradient_diversity,
    inner_product_test,
    m_coherence,
    norm_test,
    orthogonality_test,
    ratio,
    root,
)


def step_metrics(measured: Measured, clip: float | None) -> dict[str, float]:
    """Return name → number; ``Monitor`` and ``_training`` have the formulas.

    Args:
        measured: the step.
        clip: threshold of ``clip/frac``; None to leave it out.
    """
    step = measured.step
    diversity = gradient_diversity(step)
    norms = _finite_norms(step)
    metrics = {
        "grad_norm": measured.total_weight * root(step.mean_sqnorm),
        **_distribution("example_grad_norm", norms),
        "gradient_diversity": diversity,
        "gradient_diversity/batch_bound": diversity * step.effective_batch,
        "m_coherence": m_coherence(step),
        "norm_test/theta": norm_test(step),
        "nonfinite/examples": float(len(step.sqnorm) - len(norms)),
        "batch_loss": measured.loss,
        "cabs": ratio(measured.learning_rate * step.noise_scale[0], measured.loss),
    }
    if step.alignment is not None:
        with np.errstate(invalid="ignore", over="ignore"):
            cosines = cosines_to_mean(step)
            metrics["inner_test/theta"] = inner_product_test(step)
            metrics["ortho_test/nu"] = orthogonality_test(step)
            metrics["align/fraction_negative"] = fraction_against(step)
        known = cosines[np.isfinite(cosines)]
        metrics["align/mean_cos_to_mean"] = _mean(known)
        metrics["align/mean_cos_to_mean_se"] = (
            float(known.std(ddof=1)) / math.sqrt(len(known)) if len(known) > 1 else math.nan
        )
    if measured.gram is not None:
        names = ("stiffness/cos", "stiffness/sign", "confusion/min", "confusion/fraction_negative")
        metrics |= dict(zip(names, measured.gram.tolist(), strict=True))
    if clip is not None:
        metrics["clip/frac"] = _mean(norms > clip)
    for layer, gradients in measured.layers.items():
        metrics[f"grad_norm/{layer}"] = measured.total_weight * root(gradients.mean_sqnorm)
        metrics[f"example_grad_norm/{layer}/mean"] = _mean(_finite_norms(gradients))
    return metrics


def _finite_norms(step: StepGradients) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        norms = np.sqrt(step.sqnorm)
    return norms[np.isfinite(norms)]


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else math.nan


def _distribution(name: str, values: np.ndarray) -> dict[str, float]:
    if not len(values):
        return {f"{name}/{what}": math.nan for what in ("mean", "p05", "p50", "p95", "max")}
    ordered = np.sort(values)

    def quantile(share: float) -> float:
        # Linear interpolation, like np.percentile, which takes ten times as long.
        place, fraction = divmod(share * (len(ordered) - 1), 1)
        low, high = ordered[int(place)], ordered[min(int(place) + 1, len(ordered) - 1)]
        return float(low + fraction * (high - low))

    return {
        f"{name}/mean": float(values.mean()),
        f"{name}/p05": quantile(0.05),
        f"{name}/p50": quantile(0.5),
        f"{name}/p95": quantile(0.95),
        f"{name}/max": float(ordered[-1]),
    }
