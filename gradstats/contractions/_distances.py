"""Distances factors: with one row of data, gradients are unit vectors, scaled."""

from __future__ import annotations

import torch
from torch import Tensor

from gradstats._compiler import is_compiling
from gradstats._factors import Distances
from gradstats.contractions import _dense
from gradstats.contractions._result import Contraction, WellConditioned
from gradstats.contractions._rounding import row_norms

# Number of pairs of rows subtracted at once.
CHUNK = 1024

# Distances come from a matrix product, whose rounding errors are relative to the squared norms of
# both sides. A squared distance below this many such errors is computed again, by subtraction.
UNSURE = 1e5


def sqnorm(factor: Distances, workspace: int) -> Contraction:
    """Return Σ_k grad_ik² for one row of data; for several, form the gradients.

    Distances that are small relative to the two points are computed again, accurately.
    """
    if factor.grad.shape[1] > 1 or is_compiling():
        return _dense.sqnorm(factor, workspace)
    weights, points, rows = factor.apart()
    weights, rows = weights[:, 0], rows[:, 0]
    distances = factor.distances[:, 0].to(weights.dtype)
    sizes = rows.square().sum(1, keepdim=True) + points.square().sum(1)
    near = distances.square() < UNSURE * torch.finfo(weights.dtype).eps * sizes
    lengths = weights * distances
    example, place = near.nonzero(as_tuple=True)
    for i, k in zip(example.split(CHUNK), place.split(CHUNK), strict=True):
        apart = torch.linalg.vector_norm(points[k] - rows[i], dim=1)
        lengths[i, k] = weights[i, k] * apart
    return WellConditioned(lengths.dtype, (row_norms(lengths, lengths.dtype),))


def direction(factor: Distances, direction: Tensor, workspace: int) -> Tensor:
    """Return ⟨G_i, V⟩ = Σ_t Σ_k weight_itk V_k·(points_k - rows_it)."""
    weights, points, rows = factor.centred()
    direction = direction.to(weights)
    of_points = weights.sum(1) @ (points * direction).sum(1)
    of_rows = (weights * (rows @ direction.mT)).sum((1, 2))
    return (of_points - of_rows).double()


def total(factor: Distances) -> Tensor:
    """Return Σ_i G_i."""
    return factor.together().dense()[0]
