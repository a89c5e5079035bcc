"""Distances: gradients of one row of data are unit vectors times the gradients of the distances."""

from __future__ import annotations

import torch
from torch import Tensor

from gradstats._factors import Distances, compute_dtype
from gradstats.contractions import _dense
from gradstats.contractions._result import Contraction, WellConditioned


def sqnorm(factor: Distances, workspace: int, *, guarded: bool) -> Contraction:
    """Return Σ_k grad_ik² of one row of data; of several, form the gradients."""
    if factor.grad.shape[1] > 1:
        return _dense.sqnorm(factor, workspace, guarded=guarded)
    dtype = compute_dtype(factor.grad, factor.rows, factor.points)
    norms = torch.linalg.vector_norm(factor.counted().flatten(1), dim=1, dtype=dtype)
    return WellConditioned((norms,), dtype)


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
