"""Plain-torch references of every launcher, and the inputs that kernels are checked on.

Dense operands are (B, T, d); packed ones are given as a list of (T_i, d) per example. References
compute in float64 and form whole per-example gradients, which only tests may do.
"""

from __future__ import annotations

import itertools

import torch


def examples_of(operand: torch.Tensor, cu_seqlens: torch.Tensor | None) -> list[torch.Tensor]:
    """The float64 (T_i, d) rows of each example, copied off padding."""
    if cu_seqlens is None:
        return list(operand.double().cpu())
    bounds = cu_seqlens.tolist()
    host = operand.cpu()
    return [host[start:end].double() for start, end in itertools.pairwise(bounds)]


def gradients(
    a: torch.Tensor, g: torch.Tensor, cu_seqlens: torch.Tensor | None = None
) -> torch.Tensor:
    """G_i = sum_t g_it a_it^T, float64 (B, d_out, d_in)."""
    pairs = zip(examples_of(a, cu_seqlens), examples_of(g, cu_seqlens), strict=True)
    return torch.stack([g_rows.T @ a_rows for a_rows, g_rows in pairs])


def sqnorm_reference(a, g, cu_seqlens=None):
    return gradients(a, g, cu_seqlens).square().sum((1, 2))


def magnitude_reference(a, g, cu_seqlens=None):
    """sum_{t,s} |a_t . a_s| |g_t . g_s|, what bounds the rounding of the Gram form."""
    pairs = zip(examples_of(a, cu_seqlens), examples_of(g, cu_seqlens), strict=True)
    return torch.stack([((x @ x.T) * (y @ y.T)).abs().sum() for x, y in pairs])


def size_reference(a, g, cu_seqlens=None):
    """sum_t |a_t| |g_t|, whose square bounds the rounding of the rows' inner products."""
    pairs = zip(examples_of(a, cu_seqlens), examples_of(g, cu_seqlens), strict=True)
    return torch.stack([(x.norm(dim=1) * y.norm(dim=1)).sum() for x, y in pairs])


def bias_gradients(g, cu_seqlens=None):
    """sum_t g_it, float64 (B, d_out)."""
    return torch.stack([rows.sum(0) for rows in examples_of(g, cu_seqlens)])


def bias_sqnorm_reference(g, cu_seqlens=None):
    return bias_gradients(g, cu_seqlens).square().sum(1)


def bias_magnitude_reference(g, cu_seqlens=None):
    return torch.stack([(rows @ rows.T).abs().sum() for rows in examples_of(g, cu_seqlens)])


def weight_gradient_reference(a, g, cu_seqlens=None):
    return gradients(a, g, cu_seqlens).sum(0)


def pairwise_reference(a1, g1, a2, g2, cu_seqlens1=None, cu_seqlens2=None):
    first, second = gradients(a1, g1, cu_seqlens1), gradients(a2, g2, cu_seqlens2)
    return first.flatten(1) @ second.flatten(1).T


def diagonal_reference(a1, g1, a2, g2, cu_seqlens1=None, cu_seqlens2=None):
    return (gradients(a1, g1, cu_seqlens1) * gradients(a2, g2, cu_seqlens2)).sum((1, 2))


def direction_reference(a, g, direction, cu_seqlens=None):
    return (gradients(a, g, cu_seqlens) * direction.double().cpu()).sum((1, 2))


# adding, products, cut_off and tolerance of Gram forms, as gradstats passes them for bfloat16
ROUNDING = (2.0**-22, 2.0**-24, 0.0, 1e-4)
# a tolerance that no bound exceeds
NOBODY_SUSPECT = float("nan")


def gram_sums(gram):
    """(sqnorm, magnitude, size) of a Gram form, a function of adding, products, cut_off, tolerance.

    Its bound is the magnitude where adding alone rounds, and the size squared where products do.
    """
    sqnorm, magnitude = gram(1.0, 0.0, 0.0, NOBODY_SUSPECT)
    again, squared_size = gram(0.0, 1.0, 0.0, NOBODY_SUSPECT)
    assert torch.equal(sqnorm, again) or sqnorm.isnan().any()
    return sqnorm, magnitude, squared_size.sqrt()


# unit roundoff of products' inputs is zero (they are exact); what remains is fp32 accumulation
FLOAT32_EPS = torch.finfo(torch.float32).eps


def assert_close(got: torch.Tensor, want: torch.Tensor, magnitude=None, factor: float = 32.0):
    """Asserts |got - want| <= factor * eps32 * magnitude; magnitude defaults to |want|."""
    got, want = got.double().cpu(), want.double().cpu()
    assert got.shape == want.shape, (got.shape, want.shape)
    assert torch.isfinite(got).all(), f"not finite: {got}"
    scale = want.abs() if magnitude is None else magnitude.double().cpu()
    error = (got - want).abs()
    limit = factor * FLOAT32_EPS * scale + 1e-30
    worst = (error / limit).max() if error.numel() else 0.0
    assert (error <= limit).all(), f"error is {worst:.3g} times the limit: {got} != {want}"
