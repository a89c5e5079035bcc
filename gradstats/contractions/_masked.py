"""Masked factors: products of a gradient, element by element, with constants."""

from __future__ import annotations

import torch
from torch import Tensor

from gradstats import _cost
from gradstats._factors import Masked, Outer, cast
from gradstats.contractions import _dense
from gradstats.contractions._result import Contraction, squared_norms, well_conditioned
from gradstats.contractions._tiles import chunks


def sqnorm(factor: Masked, workspace: int, *, guarded: bool) -> Contraction:
    """Return ‖M ∘ G_i‖².

    Of one position, G = l rᵀ, it is Σ_pq M_pq² l_p² r_q², a product with the squares of the mask;
    otherwise gradients are formed, those of a few examples at a time.
    """
    inner = factor.inner
    if isinstance(inner, Outer) and inner.left.shape[1] == 1 and factor.mask.numel():
        left, right = inner.left[:, 0], inner.right[:, 0]
        if inner.permutation is None:
            mask = factor.mask.reshape(left.shape[2], right.shape[2])
            contract = _formed if left.shape[1] > 1 else _one_position
            return contract(left, right, mask, workspace)
    return _dense.sqnorm(factor, workspace, guarded=guarded)


def _one_position(left: Tensor, right: Tensor, mask: Tensor, workspace: int) -> Contraction:
    """Return Σ_pq M_pq² l_p² r_q² of (B, 1, p) and (B, 1, q)."""
    dtype = mask.dtype
    sides, sizes = [], mask.new_ones((), dtype=torch.float64)
    for side in (left[:, 0], right[:, 0]):
        # Relative to the largest element, so that squares of squares stay in range.
        largest = cast(side, dtype).abs().amax(1, keepdim=True)
        largest = torch.where(largest > 0, largest, 1)
        sides.append((cast(side, dtype) / largest).square())
        sizes = sizes * largest.squeeze(1).double()
    # The squares of a few rows at a time: they are multiplied while they are in the cache.
    budget = workspace if mask.is_cuda else min(workspace, _cost.CACHE_BYTES)
    rows = _cost.rows_per_tile(len(mask), mask.shape[1] * mask.itemsize, budget)
    sums = torch.zeros_like(sides[1])
    for here in chunks(len(mask), rows):
        sums.addmm_(sides[0][:, here], mask[here].square())
    value = (sums * sides[1]).sum(1, dtype=torch.float64)
    return well_conditioned(value * sizes.square(), dtype)


def _formed(left: Tensor, right: Tensor, mask: Tensor, workspace: int) -> Contraction:
    """Return ‖M ∘ (Σ_t left_t right_tᵀ)‖² of (B, T, p) and (B, T, q).

    All gradients are formed in one piece of memory: fresh pages would cost more than the products.
    """
    dtype, batch = mask.dtype, len(left)
    size = mask.numel() * mask.itemsize
    chunk = _cost.direct_chunk(size, batch, workspace, launched=mask.is_cuda)
    scratch = mask.new_empty(chunk, *mask.shape)
    values = []
    for here in chunks(batch, chunk):
        a, b = cast(left[here], dtype), cast(right[here], dtype)
        gradients = torch.bmm(a.mT, b, out=scratch[: len(a)]).mul_(mask)
        values.append(squared_norms(gradients, dtype))
    return well_conditioned(torch.cat(values), dtype)
