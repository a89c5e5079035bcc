"""Vector factors: gradients that are already summed over positions."""

from __future__ import annotations

from functools import reduce

import torch

from gradstats._factors import Vector, compute_dtype
from gradstats.contractions._result import Contraction, squared, unit_roundoff


def sqnorm(factor: Vector, workspace: int, *, guarded: bool) -> Contraction:
    """Return ‖values[i]‖²."""
    dtype = compute_dtype(factor.values)
    norms = torch.linalg.vector_norm(factor.values.reshape(factor.batch, -1), dim=1, dtype=dtype)
    value = squared(norms)
    return Contraction(value, 4 * unit_roundoff(dtype) * value)


def merge(factors: list[Vector]) -> Vector:
    """Return the sum of several uses as one."""
    first = factors[0]
    dtype = compute_dtype(*(factor.values for factor in factors))
    total = reduce(torch.add, (factor.values.to(dtype) for factor in factors))
    return Vector(total, first.shape, first.axis, first.slices)
