"""What every contraction returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gradstats._factors import Factor

# Relative error bound above which a result is recomputed by the direct form, whose error grows with
# the square root of the condition number where the Gram form's grows with the number itself.
GUARD_TOLERANCE = 1e-4


@dataclass
class Contraction:
    """Squared norms with what rounding may have done to them.

    Attributes:
        value: (B,) float64.
        bound: (B,) float64, absolute: how far ``value`` may be from the squared norm of the
            gradient as the accumulation dtype forms it. Direct forms add a few roundings to that
            gradient; the Gram form may lose all digits where its terms cancel, and says so here.
    """

    value: Tensor
    bound: Tensor


@dataclass(frozen=True)
class Fused:
    """A factor whose squared norms came with its sum over examples, from one pass.

    Attributes:
        factor: what was contracted; None where nobody else needs it.
        norms: its squared norms.
        total: Σ_i F[i] in the parameter's shape; None where nobody wants it.
    """

    factor: Factor | None
    norms: Contraction
    total: Tensor | None


def well_conditioned(value: Tensor, dtype: torch.dtype) -> Contraction:
    """Return a result whose terms are squares, so that rounding is relative to itself."""
    return Contraction(value, 4 * unit_roundoff(dtype) * value)


def sum_of_two(first: Contraction, second: Contraction, cross: Tensor) -> Contraction:
    """Return ‖F[i] + F'[i]‖² from both squared norms and ⟨F[i], F'[i]⟩, (B,) float64."""
    parts = first.value + second.value
    # Each part's bound is relative to its own size: where the parts cancel, that is what is lost.
    rounding = 4 * unit_roundoff(torch.float32) * (parts + 2 * cross.abs())
    return Contraction(parts + 2 * cross, first.bound + second.bound + rounding)


def unit_roundoff(dtype: torch.dtype) -> float:
    """Return the relative error of one rounded operation in the accumulation dtype."""
    return torch.finfo(dtype).eps / 2


def squared_norms(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ‖tensor[i]‖² in float64, for any number of axes after the first.

    The last axis is reduced in the accumulation dtype and everything before it in float64: a single
    float32 reduction over a million elements would be off by 1e-5.
    """
    norms = torch.linalg.vector_norm(tensor, dim=-1, dtype=dtype).double().square()
    return norms.flatten(1).sum(1) if norms.dim() > 1 else norms


def recompute_suspects(result: Contraction, again: Callable[[Tensor], Contraction]) -> Contraction:
    """Replace results whose error bound is too large by ``again`` of their examples (ascending)."""
    suspect = result.bound > GUARD_TOLERANCE * result.value
    if bool(suspect.any()):
        rows = suspect.nonzero().squeeze(1)
        better = again(rows)
        result.value[rows] = better.value
        result.bound[rows] = better.bound
    return result
