"""What a monitor must say of a step, from its per-example gradients themselves."""

from __future__ import annotations

import numpy as np
import torch

from tests.oracle import oracle_gradients


def gradient_rows(model, batch, loss_fn) -> np.ndarray:
    """Return the per-example gradients as rows, (B, d) float64."""
    gradients = oracle_gradients(model, batch, loss_fn)
    return torch.cat([gradient.flatten(1) for gradient in gradients.values()], 1).numpy()


def noise(rows: np.ndarray) -> tuple[float, float]:
    """Return the trace of the sample covariance, and the mean inner product of distinct rows."""
    count = len(rows)
    gram = rows @ rows.T
    apart = gram[~np.eye(count, dtype=bool)]
    return float(np.cov(rows, rowvar=False).trace()), float(apart.mean())


def metrics_of(rows: np.ndarray) -> dict[str, float]:
    """Return the metrics of one step whose N examples weigh the same and come in one batch."""
    count, mean, norm = len(rows), rows.mean(0), np.linalg.norm(rows, axis=1)
    square = mean @ mean
    spread, gradient = noise(rows)
    along = rows @ mean
    cosine = along / (norm * np.sqrt(square))
    others = (count * mean - rows) / (count - 1)
    across = rows - np.outer(along / square, mean)
    gram = rows @ rows.T
    apart = ~np.eye(count, dtype=bool)
    pairs = gram[apart]
    return {
        "grad_norm": np.sqrt(square),
        "example_grad_norm/mean": norm.mean(),
        "example_grad_norm/p05": np.quantile(norm, 0.05),
        "example_grad_norm/p50": np.median(norm),
        "example_grad_norm/p95": np.quantile(norm, 0.95),
        "example_grad_norm/max": norm.max(),
        "gns/tr_sigma": spread,
        "gns/g2": gradient,
        "gradient_diversity": (norm**2).sum() / np.linalg.norm(rows.sum(0)) ** 2,
        "m_coherence": np.linalg.norm(rows.sum(0)) ** 2 / (norm**2).sum(),
        "norm_test/theta": np.sqrt(spread / (count * square)),
        "align/mean_cos_to_mean": cosine.mean(),
        "align/mean_cos_to_mean_se": cosine.std(ddof=1) / np.sqrt(count),
        "align/fraction_negative": ((rows * others).sum(1) < 0).mean(),
        "inner_test/theta": np.sqrt(along.var(ddof=1) / (count * square**2)),
        "ortho_test/nu": np.sqrt((across**2).sum() / ((count - 1) * count * square)),
        "stiffness/cos": (pairs / np.outer(norm, norm)[apart]).mean(),
        "stiffness/sign": np.sign(pairs).mean(),
        "confusion/min": pairs.min(),
        "confusion/fraction_negative": (pairs < 0).mean(),
    }


def weighted_tests(rows: np.ndarray, weight: np.ndarray) -> dict[str, float]:
    """Return inner product and orthogonality test of one batch under weights of sum one."""
    mean, count = weight @ rows, 1 / (weight @ weight)
    square = mean @ mean
    along = rows @ mean
    across = rows - np.outer(along / square, mean)
    variance = weight @ (along - square) ** 2
    return {
        "inner_test/theta": np.sqrt(variance / ((count - 1) * square**2)),
        "ortho_test/nu": np.sqrt(weight @ (across**2).sum(1) / ((count - 1) * square)),
    }


def assert_metrics(got: dict[str, float], expected: dict[str, float], rtol: float = 1e-9) -> None:
    """Compare every expected metric that was measured; alignments may not have been."""
    for name, value in expected.items():
        if name in got or not name.startswith(("align", "inner", "ortho", "stiff", "confusion")):
            np.testing.assert_allclose(got[name], value, rtol=rtol, err_msg=name)
