"""Distances: gradients of one row of data are unit vectors times the gradients of the distances."""

from __future__ import annotations

import torch
from torch import Tensor

from gradstats._compiler import is_compiling
from gradstats._factors import Distances
from gradstats.contractions import _dense
from gradstats.contractions._result import Contraction, WellConditioned

# Pairs of rows that are subtracted at once.
CHUNK = 1024

# What rounding may do to a distance found by products, relative to the squares of both sides: below
# this many roundings of them the square of a distance is not taken for what it is.
UNSURE = 1e5


def sqnorm(factor: Distances, workspace: int) -> Contraction:
    """Return Σ_k grad_ik² of one row of data; of several, form the gradients.

    Where a distance is small beside its sides, what it is exactly is computed for that pair.
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
    for some, others in zip(example.split(CHUNK), place.split(CHUNK), strict=True):
        apart = torch.linalg.vector_norm(points[others] - rows[some], dim=1)
        lengths[some, others] = weights[some, others] * apart
    norms = torch.linalg.vector_norm(lengths, dim=1)
    return WellConditioned((norms,), norms.dtype)


def direction(factor: Distances, direction: Tensor, workspace: int) -> Tensor:
    """Return ⟨G_i, V⟩: V's rows times the points, less V's rows times the data, weighted."""
    weights, points, rows = factor.apart()
    direction = direction.to(weights)
    of_points = weights.sum(1) @ (points * direction).sum(1)
    of_rows = (weights * (rows @ direction.mT)).sum((1, 2))
    return (of_points - of_rows).double()


def total(factor: Distances) -> Tensor:
    """Return Σ_i G_i."""
    return factor.together().dense()[0]
