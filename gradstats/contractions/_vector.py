"""Vector factors: gradients that are already summed over positions."""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

from gradstats._factors import Vector, compute_dtype
from gradstats.contractions._result import (
    Contraction,
    WellConditioned,
    squared_norms,
    well_conditioned,
)


def sqnorm(factor: Vector, workspace: int) -> Contraction:
    """Return ‖values[i]‖²."""
    return sqnorm_of(factor.values)


def sqnorm_of(values: Tensor) -> Contraction:
    """Return ‖values[i]‖² of a factor's values (B, *)."""
    dtype = compute_dtype(values)
    if values.dim() == 1:
        values = values.unsqueeze(1)
    if values.dim() == 2:
        return WellConditioned((torch.linalg.vector_norm(values, dim=1, dtype=dtype),), dtype)
    return well_conditioned(squared_norms(values, dtype), dtype)


def adds_to(factor: Vector, other: Vector) -> bool:
    """Whether two factors of one parameter hold gradients of all its elements, laid out alike."""
    whole = factor.axis is None and other.axis is None
    return whole and factor.values.shape == other.values.shape


def merge(factors: list[Vector]) -> Vector:
    """Return the sum of several uses as one."""
    first = factors[0]
    dtype = compute_dtype(*(factor.values for factor in factors))
    total = reduce(torch.add, (factor.values.to(dtype) for factor in factors))
    return Vector(total, first.shape, first.axis, first.slices)
