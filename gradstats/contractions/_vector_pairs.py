"""Inner products of Vector factors."""

from __future__ import annotations

import torch
from torch import Tensor

from gradstats import _cost
from gradstats._factors import Vector, compute_dtype
from gradstats.contractions import _tiles
from gradstats.contractions._multiply import multiply
from gradstats.contractions._outer_pairs import Sizes


def pairs(first: Vector, second: Vector, workspace: int, sizes: Sizes) -> Tensor:
    """Return ⟨values_i, values'_j⟩ for all pairs, (B, B') float64.

    If examples have slices, only those with equal slices have a product other than zero.
    """
    dtype = compute_dtype(first.values, second.values)
    left, right = _flat(first), _flat(second)
    result = _tiles.zeros([first], first.batch, second.batch)
    for span in _tiles.chunks(left.shape[1], _tiles.TILE_ELEMENTS):
        result += multiply(left[:, span].to(dtype), right[:, span].to(dtype).t())
    if first.axis is not None:
        result *= first.own_slices[:, None] == second.own_slices
    return result


def diagonal(first: Vector, second: Vector, workspace: int, sizes: Sizes) -> Tensor:
    """Return ⟨values_i, values'_i⟩ for each example, (B,) float64."""
    dtype = compute_dtype(first.values, second.values)
    left, right = _flat(first), _flat(second)
    result = _tiles.zeros([first], first.batch)
    size = 3 * left.shape[1] * dtype.itemsize
    for here in _tiles.chunks(first.batch, _cost.examples_per_chunk(size, first.batch, workspace)):
        products = left[here].to(dtype) * right[here].to(dtype)
        result[here] = products.sum(1, dtype=torch.float64)
    if first.axis is not None:
        result *= first.own_slices == second.own_slices
    return result


def _flat(factor: Vector) -> Tensor:
    return factor.values.reshape(factor.batch, -1)
