"""Outer factors: G_i = Σ_t left_t right_tᵀ, in three forms that give the same number.

rank one (T = 1)  ‖G_i‖² = ‖left‖²‖right‖²                            Goodfellow, arXiv 1510.01799
Gram              ‖G_i‖² = Σ_{t,s} (left_t·left_s)(right_t·right_s)   Rochette et al., 1912.06015
direct            G_i formed tile by tile, squared at once
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradstats import _cost
from gradstats._factors import Outer, cast, compute_dtype
from gradstats.contractions import _triton
from gradstats.contractions._result import (
    Contraction,
    WellConditioned,
    recompute_suspects,
    unit_roundoff,
    well_conditioned,
)


def sqnorm(factor: Outer, workspace: int, *, guarded: bool) -> Contraction:
    """Return ‖G_i‖² by the form that costs least for these shapes."""
    (_, _, positions, p), q = factor.left.shape, factor.right.shape[3]
    form = _cost.choose_outer_form(positions, p, q, guarded=guarded, on_chip=_triton.serves(factor))
    if form == "rank_one":
        return rank_one(factor)
    if form == "gram":
        return guarded_gram(factor, workspace)
    return direct(factor, workspace)


def sqnorm_and_sum(factor: Outer, workspace: int) -> tuple[Contraction, Tensor]:
    """Return ‖G_i‖² and Σ_i G_i; the direct form gives both from one product."""
    (_, groups, positions, p), q = factor.left.shape, factor.right.shape[3]
    on_chip = _triton.serves(factor)
    form = _cost.choose_outer_form(positions, p, q, with_sum=True, on_chip=on_chip)
    if form == "direct" and on_chip and groups == 1:
        result, total = _triton.direct_and_sum(factor)
        return result, _arrange(total, factor)
    if form == "direct":
        return _direct(factor, workspace, with_sum=True)
    result = rank_one(factor) if form == "rank_one" else guarded_gram(factor, workspace)
    return result, summed(factor)


def rank_one(factor: Outer) -> Contraction:
    """Return Σ_k ‖left_k‖²‖right_k‖² for factors with at most one position."""
    _, groups, positions, _ = factor.left.shape
    if positions == 0:
        zero = factor.left.new_zeros(factor.batch, dtype=torch.float64)
        return Contraction(zero, zero.clone())
    if _triton.serves(factor):
        return _triton.rank_one(factor)
    dtype = compute_dtype(factor.left, factor.right)
    left = torch.linalg.vector_norm(factor.left, dim=-1, dtype=dtype)
    right = torch.linalg.vector_norm(factor.right, dim=-1, dtype=dtype)
    if groups == 1:
        return WellConditioned(left.view(-1), right.view(-1), dtype=dtype)
    return well_conditioned((left.double() * right).square().sum((1, 2)), dtype)


def guarded_gram(factor: Outer, workspace: int) -> Contraction:
    """Return the Gram form's result, doubtful examples recomputed by the direct form."""
    return recompute_suspects(
        gram(factor, workspace), lambda rows: direct(factor.select(rows), workspace)
    )


def gram(factor: Outer, workspace: int) -> Contraction:
    """Return Σ_{t,s} (left_t·left_s)(right_t·right_s), block row by block row above the diagonal.

    Cost: T(T + block)/2 · (p + q) multiply-adds an example; scratch of two T × block tiles.
    """
    if _triton.serves(factor):
        return _triton.gram(factor)
    dtype = compute_dtype(factor.left, factor.right)
    batch, groups, positions, p = factor.left.shape
    q = factor.right.shape[3]
    itemsize = torch.finfo(dtype).bits // 8
    # Small examples are contracted whole: a second block would cost more to launch than it saves.
    block = positions if positions < 3 * _cost.GRAM_BLOCK else _cost.GRAM_BLOCK
    upcast = p + q if factor.left.dtype != dtype or factor.right.dtype != dtype else 0
    chunk = _cost.examples_per_chunk(
        groups * positions * (2 * block + upcast) * itemsize, batch, workspace
    )
    values, sizes = [], []
    for start in range(0, batch, chunk):
        left = factor.left[start : start + chunk].to(dtype).flatten(0, 1)  # (n·K, T, p)
        right = factor.right[start : start + chunk].to(dtype).flatten(0, 1)
        total = size = None
        for row in range(0, positions, block):
            here = slice(row, row + block)
            products = (left[:, here] @ left[:, row:].mT).mul_(right[:, here] @ right[:, row:].mT)
            # On the diagonal stand ‖left_t‖²‖right_t‖².
            lengths = products.diagonal(dim1=1, dim2=2).sqrt().sum(1)
            size = lengths if size is None else size + lengths
            if row + block < positions:
                # Tiles right of the diagonal tile stand for their mirror images too.
                products[:, :, block:] *= 2
            part = products.sum((1, 2))
            total = part.double() if total is None else total + part
        assert total is not None and size is not None
        values.append(total.view(-1, groups).sum(1) if groups > 1 else total)
        sizes.append(size.double().square_().view(-1, groups).sum(1))
    # (Σ_t ‖left_t‖‖right_t‖)² bounds Σ|terms|.
    return Contraction(torch.cat(values), unit_roundoff(dtype) * torch.cat(sizes))


def direct(factor: Outer, workspace: int) -> Contraction:
    """Return Σ over tiles of ‖left_tileᵀ right‖²; never negative, well conditioned.

    Cost: T·p·q multiply-adds an example; scratch of one tile.
    """
    if _triton.serves(factor):
        return _triton.direct(factor)
    return _direct(factor, workspace, with_sum=False)[0]


def _direct(factor: Outer, workspace: int, *, with_sum: bool):
    dtype = compute_dtype(factor.left, factor.right)
    batch, groups, _, p = factor.left.shape
    q = factor.right.shape[3]
    itemsize = torch.finfo(dtype).bits // 8
    rows = _cost.rows_per_tile(p, groups * q * itemsize, workspace)
    chunk = _cost.examples_per_chunk(groups * rows * q * itemsize, batch, workspace)
    total: Tensor | None = None
    norms = []
    # One piece of memory for all tiles: fresh pages would cost more than the products.
    scratch = None
    if rows >= p and chunk < batch and not torch.compiler.is_compiling():
        scratch = factor.left.new_empty(chunk * groups, p, q, dtype=dtype)
    for start in range(0, batch, chunk):
        left = cast(factor.left[start : start + chunk], dtype).mT
        right = cast(factor.right[start : start + chunk], dtype)
        if rows >= p:
            out = None if scratch is None else scratch[: len(left) * groups]
            tile = torch.bmm(left.flatten(0, 1), right.flatten(0, 1), out=out)
            tile = tile.view(-1, groups, p, q)
            norms.append(torch.linalg.vector_norm(tile, dim=-1))
            if with_sum:
                part = tile.sum(0) if chunk > 1 else tile[0]
                if total is not None:
                    total += part
                else:
                    total = part if chunk > 1 or scratch is None else part.clone()
            continue
        if with_sum and total is None:
            total = left.new_zeros(groups, p, q)
        parts = []
        for row in range(0, p, rows):
            tile = left[..., row : row + rows, :] @ right  # (n, K, rows, q)
            parts.append(torch.linalg.vector_norm(tile, dim=-1))
            if total is not None:
                total[:, row : row + rows] += tile.sum(0)
        norms.append(torch.cat(parts, -1))
    # What is summed over rows of the gradient is summed in float64, once for all examples.
    value = torch.cat(norms).double().square_().flatten(1).sum(1)
    result = well_conditioned(value, dtype)
    return result, None if total is None else _arrange(total, factor)


def merge(factors: list[Outer]) -> Outer:
    """Return the sum of several uses as one: their positions stand one after the other."""
    first = factors[0]
    left = torch.cat([factor.left for factor in factors], dim=2)
    right = torch.cat([factor.right for factor in factors], dim=2)
    return Outer(left, right, first.shape, first.permutation, first.unfolded)


def magnitude(factor: Outer, dtype: torch.dtype) -> Tensor:
    """Return Σ_t ‖left_t‖‖right_t‖ of shape (B, K); its square bounds Σ|terms| of the Gram form."""
    left = torch.linalg.vector_norm(factor.left, dim=-1, dtype=dtype)
    right = torch.linalg.vector_norm(factor.right, dim=-1, dtype=dtype)
    return (left * right).sum(2, dtype=torch.float64)


def summed(factor: Outer) -> Tensor:
    """Return Σ_i G_i in the parameter's shape by one product over examples and positions."""
    if factor.left.shape[1] == 1:
        left, right = factor.left.flatten(0, 2), factor.right.flatten(0, 2)
        return _arrange(torch.mm(left.t(), right), factor)
    left = factor.left.transpose(0, 1).flatten(1, 2)  # (K, B·T, p)
    right = factor.right.transpose(0, 1).flatten(1, 2)
    return _arrange(left.mT @ right, factor)


def _arrange(total: Tensor, factor: Outer) -> Tensor:
    if factor.permutation is not None:
        assert factor.unfolded is not None
        total = total.reshape(factor.unfolded).permute(factor.permutation)
    return total if total.shape == factor.shape else total.reshape(factor.shape)
