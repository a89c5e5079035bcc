"""Inner products of Outer factors, and of Ragged ones on a GPU.

Gram    ⟨G_i, G'_j⟩ = Σ_{t,s} (left_t·left'_s)(right_t·right'_s); for T = T' = 1 this is the
        elementwise product of two matrices of dot products
direct  products of tiles of both sides' gradients (``_tiles``); the cost does not grow with T·T'

The Gram form loses digits where the terms of both gradients cancel. Its error is at most
eps · (Σ_t ‖left_t‖‖right_t‖)(Σ_s ‖left'_s‖‖right'_s‖). Where that is large relative to ‖G_i‖‖G'_j‖,
the direct form computes the products again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

from gradstats import _cost
from gradstats._factors import (
    Factor,
    Outer,
    Patches,
    Ragged,
    Rows,
    add_at,
    compute_dtype,
    tensors_of,
)
from gradstats.contractions import _outer, _patches, _ragged, _tiles, _triton
from gradstats.contractions._multiply import multiply_groups
from gradstats.contractions._rounding import product_roundoff

# Bytes of a Gram tile and its partner; larger tiles are no faster.
GRAM_TILE_BYTES = 32 * 1024 * 1024

# ‖G_i‖ and ‖G'_j‖ of a parameter's whole gradients, (B,) and (B',) float64.
Sizes = tuple[Tensor, Tensor]


def pairs(first: Outer | Ragged, second: Outer | Ragged, workspace: int, sizes: Sizes) -> Tensor:
    """Return ⟨G_i, G'_j⟩ for all pairs, (B, B') float64, by the form that costs least.

    Packed examples come here only if the kernels take them as they are.
    """
    first, second = _plain(first, second)
    if 0 in (first.longest, second.longest):
        return _tiles.zeros([first], first.batch, second.batch)
    on_chip = _triton.serves(first, second)
    return by_form(
        first, second, sizes, _form(first, second, first.batch, second.batch, on_chip=on_chip),
        _triton.gram_pairs if on_chip else partial(gram_pairs, workspace=workspace),
        partial(_triton.direct_pairs if on_chip else formed_pairs, workspace=workspace),
    )  # fmt: skip


def diagonal(first: Outer | Ragged, second: Outer | Ragged, workspace: int, sizes: Sizes) -> Tensor:
    """Return ⟨G_i, G'_i⟩ for each example, (B,) float64, by the form that costs least."""
    first, second = _plain(first, second)
    if 0 in (first.longest, second.longest):
        return _tiles.zeros([first], first.batch)
    on_chip = _triton.serves(first, second)
    return by_form(
        first, second, sizes, _form(first, second, 1, 1, on_chip=on_chip),
        _triton.gram_diagonal if on_chip else partial(gram_diagonal, workspace=workspace),
        _triton.direct_diagonal if on_chip else partial(formed_diagonal, workspace=workspace),
    )  # fmt: skip


def _form(
    first: Outer | Ragged,
    second: Outer | Ragged,
    examples1: int,
    examples2: int,
    *,
    on_chip: bool,
) -> _cost.Form:
    p, q = first.left.shape[-1], first.right.shape[-1]
    return _cost.choose_pair_form(
        first.longest, second.longest, p, q, examples1, examples2, on_chip=on_chip,
        roundoff=product_roundoff(*tensors_of(first), *tensors_of(second)),
    )  # fmt: skip


def by_form(
    first: Factor,
    second: Factor,
    sizes: Sizes,
    form: _cost.Form,
    gram: Callable[[Any, Any], Tensor],
    direct: Callable[[Any, Any], Tensor],
) -> Tensor:
    """Return products of two factors in the chosen form, recomputing those that cancel.

    Args:
        first, second: the factors.
        sizes: norms of both sides' gradients.
        form: the chosen form.
        gram, direct: functions that contract the factors in either form, for all pairs or for
            equal indices.
    """
    if form == "direct":
        return direct(first, second)
    result = gram(first, second)
    if form != "gram":
        return result
    # √eps · Σ_t ‖left_t‖‖right_t‖ / ‖G‖ for each example of either side. The product of two of them
    # bounds the pair's error relative to ‖G_i‖‖G'_j‖. For zero gradients 0 / 0 counts as 0.
    roundoff = product_roundoff(*tensors_of(first), *tensors_of(second))
    conditions = [
        roundoff**0.5 * (MAGNITUDE[type(factor)](factor) / size).nan_to_num(nan=0.0)
        for factor, size in zip((first, second), sizes, strict=True)
    ]
    again = recompute_pairs if result.dim() == 2 else recompute_diagonal
    return again(result, first, second, conditions, direct)


def recompute_pairs(result: Tensor, first, second, conditions, again) -> Tensor:
    """Recompute the rows, or the columns, that hold inaccurate pairs.

    Args:
        result: (B, B') by the Gram form.
        first, second: the factors.
        conditions: one for each example of either side; the product of two bounds the relative
            error of the pair.
        again: called as again(first, second) with the examples concerned.
    """
    if not result.numel():
        return result
    of_first, of_second = conditions
    rows = (of_first * of_second.max() > _cost.GUARD_TOLERANCE).nonzero().squeeze(1)
    columns = (of_second * of_first.max() > _cost.GUARD_TOLERANCE).nonzero().squeeze(1)
    # The rows alone, and the columns alone, cover all inaccurate pairs.
    if rows.numel() * second.batch <= columns.numel() * first.batch:
        if rows.numel():
            result[rows] = again(first.select(rows), second)
    else:
        result[:, columns] = again(first, second.select(columns))
    return result


def recompute_diagonal(result: Tensor, first, second, conditions, again) -> Tensor:
    """Recompute the inaccurate products of equal indices, (B,); as ``recompute_pairs``."""
    of_first, of_second = conditions
    rows = (of_first * of_second > _cost.GUARD_TOLERANCE).nonzero().squeeze(1)
    if rows.numel():
        result[rows] = again(first.select(rows), second.select(rows))
    return result


def gram_pairs(first: Outer, second: Outer, workspace: int) -> Tensor:
    """Return Σ_{t,s} (left_t·left'_s)(right_t·right'_s) for all pairs of examples.

    Cost: T·T'·(p + q) multiply-adds a pair; scratch of two tiles of products.
    """
    dtype = compute_dtype(first.left, first.right, second.left, second.right)
    same = first is second
    groups, positions = first.left.shape[1:3]
    longest = second.left.shape[2]
    result = _tiles.zeros([first], first.batch, second.batch)
    budget = min(workspace, GRAM_TILE_BYTES) // (2 * dtype.itemsize)
    step = max(1, min(positions, budget // (groups * longest)))  # positions at once
    tile = max(1, budget // (groups * step * longest))  # pairs of examples at once
    # Operands may have to be copied, to cast them or to make their positions adjacent.
    width = groups * (first.left.shape[3] + first.right.shape[3]) * dtype.itemsize
    columns = min(second.batch, int(tile**0.5), workspace // (4 * longest * width))
    rows = min(first.batch, tile // max(1, columns), workspace // (4 * positions * width))
    columns, rows = max(1, columns), max(1, rows)
    if same:
        columns = rows = min(columns, rows)
    for there in _tiles.chunks(second.batch, columns):
        left2, right2 = _rows_of(second.left[there], dtype), _rows_of(second.right[there], dtype)
        for here in _tiles.chunks(first.batch, rows):
            # ⟨i, j⟩ = ⟨j, i⟩: the part below the diagonal mirrors the part above.
            if same and here.start > there.start:
                continue
            size = (groups, here.stop - here.start, -1, there.stop - there.start, longest)
            for span in _tiles.chunks(positions, step):
                left1 = _rows_of(first.left[here, :, span], dtype)
                products = _in_parts(multiply_groups, left1, left2.mT)
                # With one position on each side the product is the result: do not round it again.
                products = products.double() if positions * longest == 1 else products
                right1 = _rows_of(first.right[here, :, span], dtype)
                products.mul_(_in_parts(multiply_groups, right1, right2.mT))
                result[here, there] += products.view(size).sum((0, 2, 4))
            if same and here != there:
                result[there, here] = result[here, there].mT
    return result


def _in_parts(product: Callable[[Tensor, Tensor], Tensor], rows: Tensor, others: Tensor) -> Tensor:
    """Return rows @ others, (…, n, width) and (…, width, m), in parts: long sums lose digits."""
    width = rows.shape[-1]
    if width <= _tiles.TILE_ELEMENTS:
        return product(rows, others)
    spans = _tiles.chunks(width, _tiles.TILE_ELEMENTS)
    return reduce(torch.add, (product(rows[..., span], others[..., span, :]) for span in spans))


def _rows_of(operand: Tensor, dtype: torch.dtype) -> Tensor:
    """Return (n, K, T, width) as (K, n·T, width)."""
    return operand.to(dtype).transpose(0, 1).flatten(1, 2)


def gram_diagonal(first: Outer, second: Outer, workspace: int) -> Tensor:
    """Return Σ_{t,s} (left_t·left'_s)(right_t·right'_s) of each example with its partner."""
    dtype = compute_dtype(first.left, first.right, second.left, second.right)
    groups, positions, longest = *first.left.shape[1:3], second.left.shape[2]
    itemsize = dtype.itemsize
    step = _cost.fitting(2 * groups * longest * itemsize, positions, workspace)
    size = 2 * groups * step * longest * itemsize
    result = _tiles.zeros([first], first.batch)
    for here in _tiles.chunks(first.batch, _cost.examples_per_chunk(size, first.batch, workspace)):
        left2, right2 = second.left[here].to(dtype).mT, second.right[here].to(dtype).mT
        for span in _tiles.chunks(positions, step):
            products = _in_parts(torch.matmul, first.left[here, :, span].to(dtype), left2)
            products = products.double() if step * longest == 1 else products
            products.mul_(_in_parts(torch.matmul, first.right[here, :, span].to(dtype), right2))
            result[here] += products.sum((1, 2, 3))
    return result


def pairs_with_rows(outer: Outer, rows: Rows, workspace: int, sizes: Sizes) -> Tensor:
    """Return ⟨Σ_t left_t right_tᵀ, Σ_n e_{ids[n]} grad[n]ᵀ⟩ for all pairs, (B, B') float64.

    That is Σ_n Σ_t left_t[ids[n]] (right_t·grad[n]): nothing of the parameter's size is formed.

    Args:
        outer: a factor of one group, with a ``left`` that spans the parameter's rows.
        rows: a factor over the same rows.
        workspace: bytes of scratch.
        sizes: unused.
    """
    dtype = compute_dtype(outer.left, outer.right, rows.grad)
    left, right = outer.left.squeeze(1), outer.right.squeeze(1)
    positions = left.shape[1]
    result = _tiles.zeros([outer], outer.batch, rows.batch)
    budget = min(workspace, GRAM_TILE_BYTES) // (2 * dtype.itemsize)
    step = max(1, budget // max(1, positions))  # rows at once, for one example
    for piece in _tiles.chunks(rows.ids.numel(), step):
        grad, ids = rows.grad[piece].to(dtype).mT, rows.ids[piece]
        for example in range(outer.batch):
            products = (right[example].to(dtype) @ grad).mul_(left[example].index_select(1, ids))
            columns = products.sum(0, dtype=torch.float64)
            add_at(result[example], rows.example[piece], columns)
    return result


def _plain(first: Outer | Ragged, second: Outer | Ragged) -> tuple:
    """Drop the permutation of axes: being the same on both sides, it changes no product."""

    def plain(factor: Outer | Ragged) -> Outer | Ragged:
        if isinstance(factor, Ragged):
            return factor
        groups, p, q = factor.left.shape[1], factor.left.shape[3], factor.right.shape[3]
        return replace(factor, shape=(groups * p, q), permutation=None, unfolded=None)

    one = plain(first)
    return one, one if second is first else plain(second)


def formed_pairs(first: Factor, second: Factor, workspace: int) -> Tensor:
    """Return ⟨G_i, G'_j⟩ for all pairs, (B, B') float64, by forming gradients."""
    one = [first]
    return _tiles.dense_pairs(one, one if second is first else [second], workspace)


def formed_diagonal(first: Factor, second: Factor, workspace: int) -> Tensor:
    """Return ⟨G_i, G'_i⟩ for each example, (B,) float64, by forming gradients."""
    return _tiles.dense_diagonal([first], [second], workspace)


# Type of factor → a function for Σ_t ‖left_t‖‖right_t‖, (B,), which bounds Gram's rounding errors.
MAGNITUDE: dict[type, Callable[[Any], Tensor]] = {
    Outer: _outer.magnitude,
    Patches: _patches.magnitude,
    Ragged: _ragged.magnitude,
}
