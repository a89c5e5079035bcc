"""Embeddings in two batches: inner products of the i-th per-example gradients.

Every row of the first factor is multiplied by the sum of the second factor's rows of equal id.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from gradstats.kernels import _check, _config, _order, _streaming
from gradstats.kernels._launching import launch_kernel
from gradstats.kernels._row_sums import nan_where_bounds_decrease, sum_rows
from gradstats.kernels._tile import load_rows, segment

COMPARED = 256  # ids compared at once


@triton.jit
def sum_of_equal(
    ids_ptr,
    ids_base,  # offset of the example's first id
    stride_it,
    g_ptr,
    g_base,  # offset of the example's first row
    stride_gt,
    stride_gd,
    length,
    own,  # the id whose rows are summed
    columns,
    features,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    COMPARED: tl.constexpr,
):
    """[COLUMNS] sum of the rows whose id is `own`."""
    compared = tl.arange(0, COMPARED)
    inner = tl.arange(0, INNER)
    sums = tl.zeros((INNER, COLUMNS), tl.float32)
    for start in range(0, length, COMPARED):
        block = start + compared
        block_ids = tl.load(
            ids_ptr + ids_base + tl.cast(block, tl.int64) * stride_it,
            mask=block < length,
            other=-1,
        )
        # most ids occur once: few blocks hold an equal one, and those hold few
        if tl.sum(tl.where((block < length) & (block_ids == own), 1, 0)) > 0:
            for step in range(0, COMPARED, INNER):
                positions = start + step + inner
                places = ids_base + tl.cast(positions, tl.int64) * stride_it
                ids = tl.load(ids_ptr + places, mask=positions < length, other=-1)
                equal = (positions < length) & (ids == own)
                if tl.sum(tl.where(equal, 1, 0)) > 0:
                    rows = g_base + tl.cast(positions, tl.int64) * stride_gt
                    tile = load_rows(g_ptr, rows, equal, columns, stride_gd, features)
                    sums += tile.to(tl.float32)
    return tl.sum(sums, axis=0)


@triton.jit(do_not_specialize=["positions1", "positions2", "total_rows1", "total_rows2", "tiles"])
def rows_inner_kernel(
    ids1_ptr,  # int (B, T1), or packed (N1,)
    g1_ptr,  # (B, T1, d) or packed (N1, d)
    ids2_ptr,  # int (B, T2), or packed (N2,)
    g2_ptr,  # (B, T2, d) or packed (N2, d)
    example_ptr,  # int64 (N1,): example of each row, read if RAGGED
    cu_seqlens1_ptr,  # int (B + 1,), read if RAGGED
    cu_seqlens2_ptr,  # int (B + 1,), read if RAGGED
    partial_ptr,  # fp64 (rows, tiles)
    stride_i1b,
    stride_i1t,
    stride_g1b,
    stride_g1t,
    stride_g1d,
    stride_i2b,
    stride_i2t,
    stride_g2b,
    stride_g2t,
    stride_g2d,
    batch,
    positions1,
    positions2,
    total_rows1,
    total_rows2,
    features,
    tiles,
    RAGGED: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    COMPARED: tl.constexpr,
):
    """One row's part of <G1_b, G2_b>, over the features of one tile."""
    index = tl.program_id(0)
    row = index // tiles
    columns = (index - row * tiles) * COLUMNS + tl.arange(0, COLUMNS)
    if RAGGED:
        example = tl.load(example_ptr + row)
        known = (example >= 0) & (example < batch)
        example = tl.where(known, example, 0)
        first1, length1, _ = segment(cu_seqlens1_ptr, example, positions1, total_rows1, RAGGED)
        position = tl.cast(row - first1, tl.int32)
    else:
        example = tl.cast(row // positions1, tl.int64)
        known = True
        first1, length1, _ = segment(cu_seqlens1_ptr, example, positions1, total_rows1, RAGGED)
        position = row % positions1
    i1_base = example * stride_i1b + first1 * stride_i1t
    g1_base = example * stride_g1b + first1 * stride_g1t
    takes_part = known & (position < length1)
    own = tl.load(
        ids1_ptr + i1_base + tl.cast(position, tl.int64) * stride_i1t, mask=takes_part, other=-1
    )
    first2, length2, _ = segment(cu_seqlens2_ptr, example, positions2, total_rows2, RAGGED)
    sums = sum_of_equal(
        ids2_ptr, example * stride_i2b + first2 * stride_i2t, stride_i2t,
        g2_ptr, example * stride_g2b + first2 * stride_g2t, stride_g2t, stride_g2d,
        tl.where(takes_part, length2, 0),
        own, columns, features, COLUMNS, INNER, COMPARED,
    )  # fmt: skip
    place = g1_base + tl.cast(position, tl.int64) * stride_g1t
    mine = tl.load(
        g1_ptr + place + tl.cast(columns, tl.int64) * stride_g1d,
        mask=columns < tl.where(takes_part, features, 0),
        other=0.0,
    )
    tl.store(partial_ptr + index, tl.sum(sums * mine.to(tl.float32)))


def rows_inner(
    ids1: torch.Tensor,
    g1: torch.Tensor,
    ids2: torch.Tensor,
    g2: torch.Tensor,
    *,
    cu_seqlens1: torch.Tensor | None = None,
    cu_seqlens2: torch.Tensor | None = None,
    max_seqlen1: int | None = None,
    max_seqlen2: int | None = None,
    config: _config.TileConfig | None = None,
) -> torch.Tensor:
    """Inner products of the i-th per-example gradients of an embedding in two batches.

    inner_i = sum_{t,s: id1_it = id2_is} g1_it . g2_is

    Args, returns, raises: as `rows.rows_sqnorm`, for two factors of equal B and d.
    Cost: T1 T2 comparisons of ids an example, and one read of g2 for every match.
    """
    first = _check.check_rows(ids1, g1, cu_seqlens1, max_seqlen1)
    second = _check.check_rows(ids2, g2, cu_seqlens2, max_seqlen2)
    _check.check_match(g1, g2, "width")
    _check.check_layouts(first, second)
    _check.check_batches(first.batch, second.batch)

    features = g1.shape[-1]
    config = config or _streaming.choose_rows(features)
    tiles = _config.cdiv(features, config.columns)
    partial = torch.empty((first.total_rows, tiles), dtype=torch.float64, device=g1.device)
    if partial.numel():
        launch_kernel(
            rows_inner_kernel,
            partial.numel(),
            ids1,
            g1,
            ids2,
            g2,
            _order.example_of_rows(first),
            first.cu_seqlens,
            second.cu_seqlens,
            partial,
            *first.strides(ids1[..., None])[:2],
            *first.strides(g1),
            *second.strides(ids2[..., None])[:2],
            *second.strides(g2),
            first.batch,
            first.positions,
            second.positions,
            first.total_rows,
            second.total_rows,
            features,
            tiles,
            RAGGED=first.ragged,
            COLUMNS=config.columns,
            INNER=config.inner,
            COMPARED=COMPARED,
            **config.options,
        )
    sums = sum_rows(partial, first)
    if second.ragged:
        # NaN for examples whose bounds in this factor are wrong, else zero
        nothing = torch.zeros((second.total_rows, 1), dtype=torch.float64, device=g2.device)
        sums = sums + sum_rows(nothing, second)
    return nan_where_bounds_decrease(nan_where_bounds_decrease(sums, first), second)
