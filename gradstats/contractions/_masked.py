"""Masked factors: gradients multiplied element by element by constants."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce

import torch
from torch import Tensor

from gradstats import _cost
from gradstats._factors import Masked, Outer, cast, compute_dtype
from gradstats.contractions import _dense, _table
from gradstats.contractions._result import Contraction, WellConditioned, squared_norms
from gradstats.contractions._tiles import chunks


def sqnorm(factor: Masked, workspace: int) -> Contraction:
    """Return ‖M ∘ G_i‖².

    With one position, G = l rᵀ and this is Σ_pq M_pq² l_p² r_q², a product with the squared mask.
    Otherwise the gradients of a few examples at a time are formed.
    """
    if not factor.mask.numel():
        return _dense.sqnorm(factor, workspace)
    if factor.is_rank_one:
        return WellConditioned(factor.mask.dtype, value=inner(factor, factor, workspace))
    outer = factor.inner
    if isinstance(outer, Outer) and outer.left.shape[1] == 1 and outer.permutation is None:
        left, right = outer.left[:, 0], outer.right[:, 0]
        return _formed(left, right, factor.mask.reshape(left.shape[2], right.shape[2]), workspace)
    return _dense.sqnorm(factor, workspace)


def direction(factor: Masked, direction: Tensor, workspace: int) -> Tensor:
    """Return ⟨M ∘ G_i, V⟩ = ⟨G_i, M ∘ V⟩."""
    inner = factor.inner
    return _table.MODULES[type(inner)].direction(inner, direction * factor.mask, workspace)


def total(factor: Masked) -> Tensor:
    """Return Σ_i M ∘ G_i in the accumulation dtype."""
    return _table.MODULES[type(factor.inner)].total(factor.inner) * factor.mask


def merge(factors: list[Masked]) -> Masked:
    """Return the sum of factors that differ only in their masks as one factor."""
    return replace(factors[0], mask=reduce(torch.add, [factor.mask for factor in factors]))


def inner(first: Masked, second: Masked, workspace: int) -> Tensor:
    """Return ⟨M ∘ l rᵀ, M' ∘ l' r'ᵀ⟩ = Σ_pq (M ∘ M')_pq (l ∘ l')_p (r ∘ r')_q, (B,) float64."""
    dtype = compute_dtype(first.mask, second.mask)
    sides, scale = _multiplied(first.inner, second.inner, slice(None), dtype)
    left, right = (side.squeeze(1) for side in sides)
    masks = [factor.mask.reshape(left.shape[1], right.shape[1]) for factor in (first, second)]
    # A few rows at a time, so that their products stay in the cache.
    budget = workspace if left.is_cuda else min(workspace, _cost.CACHE_BYTES)
    rows = _cost.fitting(right.shape[1] * dtype.itemsize, left.shape[1], budget)
    sums = torch.zeros_like(right)
    for here in chunks(left.shape[1], rows):
        sums.addmm_(left[:, here], cast(masks[0][here], dtype) * masks[1][here])
    return (sums * right).sum(1, dtype=torch.float64) * scale


def inner_with_outer(factor: Outer, masked: Masked, workspace: int) -> Tensor:
    """Return ⟨Σ_t a_t b_tᵀ, M ∘ l rᵀ⟩ = Σ_t (a_t ∘ l)ᵀ M (b_t ∘ r), (B,) float64."""
    dtype = compute_dtype(factor.left, factor.right, masked.mask)
    positions, p, q = *factor.left.shape[2:], factor.right.shape[3]
    mask = cast(masked.mask, dtype).reshape(p, q)
    size = 2 * positions * (p + q) * dtype.itemsize
    budget = workspace if mask.is_cuda else min(workspace, _cost.CACHE_BYTES)
    result = mask.new_zeros(factor.batch, dtype=torch.float64)
    if not size or not mask.numel():
        return result
    for here in chunks(factor.batch, max(1, budget // size)):
        (left, right), scale = _multiplied(factor, masked.inner, here, dtype)
        # Multiply the mask with the wider side: the result has the width of the narrower.
        one, other = (right @ mask.mT, left) if p <= q else (left @ mask, right)
        result[here] = one.mul_(other).sum(2).sum(1, dtype=torch.float64) * scale
    return result


def _multiplied(first, second, rows: slice, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """Return l ∘ l' and r ∘ r' of two outer factors, (b, T, p) and (b, T, q), and their scale.

    Each operand is divided by its largest element, so that products of products stay in range. The
    scale, (b,) float64, is the product of these elements.
    """
    sides, scale = [], torch.ones((), dtype=torch.float64, device=first.left.device)
    for operands in ((first.left, second.left), (first.right, second.right)):
        parts = []
        for operand in operands:
            part = cast(operand[rows, 0], dtype)
            largest = part.abs().amax((1, 2), keepdim=True)
            largest = torch.where(largest > 0, largest, 1)
            parts.append(part / largest)
            scale = scale * largest.reshape(-1).double()
        sides.append(parts[0] * parts[1])
    return sides, scale


def _formed(left: Tensor, right: Tensor, mask: Tensor, workspace: int) -> Contraction:
    """Return ‖M ∘ (Σ_t left_t right_tᵀ)‖² of (B, T, p) and (B, T, q).

    All gradients are formed in the same memory: fresh pages would cost more than the products.
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
    return WellConditioned(dtype, value=torch.cat(values))
