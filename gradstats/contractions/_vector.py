"""Vector factors: gradients that are already summed over positions."""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

from gradstats import _cost
from gradstats._factors import Vector, compute_dtype
from gradstats.contractions._result import (
    Contraction,
    WellConditioned,
    squared_norms,
)
from gradstats.contractions._rounding import ROW_ELEMENTS
from gradstats.contractions._tiles import chunks, zeros


def sqnorm(factor: Vector, workspace: int) -> Contraction:
    """Return ‖values[i]‖²."""
    return sqnorm_of(factor.values)


def sqnorm_of(values: Tensor) -> Contraction:
    """Return ‖values[i]‖² for the values (B, *) of a factor."""
    dtype = compute_dtype(values)
    if values.dim() == 1:
        values = values.unsqueeze(1)
    if values.dim() == 2 and values.shape[1] <= ROW_ELEMENTS:
        return WellConditioned(dtype, (torch.linalg.vector_norm(values, dim=1, dtype=dtype),))
    return WellConditioned(dtype, value=squared_norms(values, dtype))


def adds_to(factor: Vector, other: Vector) -> bool:
    """Whether two factors hold gradients of a whole parameter in the same layout."""
    whole = factor.axis is None and other.axis is None
    return whole and factor.values.shape == other.values.shape


def direction(factor: Vector, direction: Tensor, workspace: int) -> Tensor:
    """Return ⟨values_i, V⟩; a slice is multiplied with V's slice."""
    dtype = compute_dtype(factor.values, direction)
    values = factor.values.reshape(factor.batch, -1)
    result = zeros([factor], factor.batch)
    size = 2 * values.shape[1] * dtype.itemsize
    for here in chunks(factor.batch, _cost.examples_per_chunk(size, factor.batch, workspace)):
        if factor.axis is None:
            chosen = direction.reshape(1, -1)
        else:
            slices = direction.reshape(factor.shape).movedim(factor.axis, 0)
            index = factor.own_slices[here]
            chosen = slices[index].flatten(1) if slices.dim() > 1 else slices[index, None]
        products = values[here].to(dtype) * chosen.to(dtype)
        result[here] = products.sum(1, dtype=torch.float64)
    return result


def total(factor: Vector) -> Tensor:
    """Return Σ_i G_i in the accumulation dtype."""
    dtype = compute_dtype(factor.values)
    if factor.axis is None:
        return factor.values.sum(0, dtype=dtype).reshape(factor.shape)
    result = factor.values.new_zeros(factor.shape, dtype=dtype)
    places = factor.own_slices
    result.movedim(factor.axis, 0).index_add_(0, places, factor.values.to(dtype))
    return result


def merge(factors: list[Vector]) -> Vector:
    """Return the sum of several uses as one; each example has the same slice in all of them."""
    first = factors[0]
    dtype = compute_dtype(*(factor.values for factor in factors))
    total = reduce(torch.add, (factor.values.to(dtype) for factor in factors))
    return Vector(total, first.shape, first.axis, first.slices)
