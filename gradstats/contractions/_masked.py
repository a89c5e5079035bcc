"""Masked factors: products of a gradient, element by element, with constants."""

from __future__ import annotations

import torch
from torch import Tensor

from gradstats._factors import Masked, Outer, cast
from gradstats.contractions import _dense
from gradstats.contractions._result import Contraction, well_conditioned


def sqnorm(factor: Masked, workspace: int, *, guarded: bool) -> Contraction:
    """Return ‖M ∘ G_i‖².

    Of one position, G = l rᵀ, it is Σ_pq M_pq² l_p² r_q², a product with the squares of the mask;
    otherwise gradients are formed, those of a few examples at a time.
    """
    inner = factor.inner
    if isinstance(inner, Outer) and inner.permutation is None and factor.mask.numel():
        if inner.left.shape[1:3] == (1, 1):
            return _one_position(inner.left[:, 0, 0], inner.right[:, 0, 0], factor.mask)
    return _dense.sqnorm(factor, workspace, guarded=guarded)


def _one_position(left: Tensor, right: Tensor, mask: Tensor) -> Contraction:
    """Return Σ_pq M_pq² l_p² r_q² of rows (B, p) and (B, q)."""
    dtype = mask.dtype
    sides, sizes = [], mask.new_ones((), dtype=torch.float64)
    for side in (left, right):
        # Relative to the largest element, so that squares of squares stay in range.
        largest = cast(side, dtype).abs().amax(1, keepdim=True)
        largest = torch.where(largest > 0, largest, 1)
        sides.append((cast(side, dtype) / largest).square())
        sizes = sizes * largest.squeeze(1).double()
    squares = mask.reshape(left.shape[1], right.shape[1]).square()
    value = ((sides[0] @ squares) * sides[1]).sum(1, dtype=torch.float64)
    return well_conditioned(value * sizes.square(), dtype)
