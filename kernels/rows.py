"""Embeddings: only positions of equal ids meet, so nothing of the table's size is ever formed.

The per-example gradient of a table is G_i = sum_t e_{id_it} g_it^T. Short sequences are grouped by
comparing ids on chip; long ones are sorted, so that equal ids stand side by side.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from gradstats.kernels import _check, _config
from gradstats.kernels._launching import launch_kernel
from gradstats.kernels._tile import load_rows, segment
from gradstats.kernels.direction import segment_sum_kernel

CHUNK = 256  # ids compared at once
LONGEST_COMPARED = 2048  # beyond, comparing every id with every other costs more than sorting


@triton.jit
def sum_of_equal(
    ids_ptr,
    ids_base,  # offset of the example's first id
    stride_it,
    g_ptr,
    g_base,  # offset of the example's first row
    stride_gt,
    stride_gd,
    first,  # position to start at
    length,
    own,  # the id whose rows are summed
    columns,
    features,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    COMPARED: tl.constexpr,
):
    """[COLUMNS] sums of the rows from `first` on whose id is `own`."""
    compared = tl.arange(0, COMPARED)
    inner = tl.arange(0, INNER)
    sums = tl.zeros((INNER, COLUMNS), tl.float32)
    for start in range(first, length, COMPARED):
        block = start + compared
        block_ids = tl.load(
            ids_ptr + ids_base + tl.cast(block, tl.int64) * stride_it,
            mask=block < length,
            other=-1,
        )
        # most ids occur once: few blocks hold another, and of those few rows
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
def rows_kernel(
    ids1_ptr,  # int (B, T1), or packed (N1,); those of one example ascending if SORTED
    g1_ptr,  # (B, T1, d) or packed (N1, d)
    order_ptr,  # int64 like ids1: rows of g1 in the order of the ids, read if SORTED
    ids2_ptr,  # int (B, T2), or packed (N2,), read if PAIRED
    g2_ptr,  # (B, T2, d) or packed (N2, d), read if PAIRED
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
    padding,  # this id's row takes no part, if PADDED
    tiles,
    PADDED: tl.constexpr,
    SORTED: tl.constexpr,
    PAIRED: tl.constexpr,
    RAGGED: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    COMPARED: tl.constexpr,
):
    """One row's part of |G_b|^2, or of <G1_b, G2_b> if PAIRED, over the features of one tile.

    A norm is the squares of the sums of equal ids: the first row of each id answers for all.
    """
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
    if PADDED:
        takes_part = takes_part & (own != padding)

    total = 0.0
    if PAIRED:
        first2, length2, _ = segment(cu_seqlens2_ptr, example, positions2, total_rows2, RAGGED)
        sums = sum_of_equal(
            ids2_ptr,
            example * stride_i2b + first2 * stride_i2t,
            stride_i2t,
            g2_ptr,
            example * stride_g2b + first2 * stride_g2t,
            stride_g2t,
            stride_g2d,
            0,
            tl.where(takes_part, length2, 0),
            own,
            columns,
            features,
            COLUMNS,
            INNER,
            COMPARED,
        )
        place = g1_base + tl.cast(position, tl.int64) * stride_g1t
        mine = tl.load(
            g1_ptr + place + tl.cast(columns, tl.int64) * stride_g1d,
            mask=columns < tl.where(takes_part, features, 0),
            other=0.0,
        )
        total += tl.sum(sums * mine.to(tl.float32))
    elif SORTED:
        before = tl.load(
            ids1_ptr + i1_base + tl.cast(position - 1, tl.int64) * stride_i1t,
            mask=takes_part & (position > 0),
            other=-1,
        )
        inner = tl.arange(0, INNER)
        lanes = tl.zeros((INNER, COLUMNS), tl.float32)
        start = position
        more = takes_part & (before != own)
        while more:
            positions = start + inner
            places = i1_base + tl.cast(positions, tl.int64) * stride_i1t
            ids = tl.load(ids1_ptr + places, mask=positions < length1, other=-1)
            equal = (positions < length1) & (ids == own)
            source = tl.load(order_ptr + places, mask=equal, other=0)
            rows = g1_base + source * stride_g1t
            lanes += load_rows(g1_ptr, rows, equal, columns, stride_g1d, features).to(tl.float32)
            start += INNER
            more = tl.sum(tl.where(equal, 1, 0)) == INNER
        sums = tl.sum(lanes, axis=0)
        total += tl.sum(sums * sums)
    else:
        earlier = 0
        compared = tl.arange(0, COMPARED)
        for start in range(0, tl.where(takes_part, position, 0), COMPARED):
            positions = start + compared
            places = i1_base + tl.cast(positions, tl.int64) * stride_i1t
            ids = tl.load(ids1_ptr + places, mask=positions < position, other=-1)
            earlier += tl.sum(tl.where((positions < position) & (ids == own), 1, 0))
        sums = sum_of_equal(
            ids1_ptr,
            i1_base,
            stride_i1t,
            g1_ptr,
            g1_base,
            stride_g1t,
            stride_g1d,
            position,
            tl.where(takes_part & (earlier == 0), length1, 0),
            own,
            columns,
            features,
            COLUMNS,
            INNER,
            COMPARED,
        )
        total += tl.sum(sums * sums)
    tl.store(partial_ptr + index, total)


def rows_sqnorm(
    ids: torch.Tensor,
    g: torch.Tensor,
    *,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    padding_idx: int | None = None,
    longest_compared: int = LONGEST_COMPARED,
    config: _config.TileConfig | None = None,
) -> torch.Tensor:
    """Squared norms of the per-example gradients of an embedding.

    sqnorm_i = sum_v |sum_{t: id_it = v} g_it|^2

    Args:
        ids: int32 or int64 (B, T), or packed (N,) with cu_seqlens; at least 0.
        g: gradients with respect to the looked-up rows, (B, T, d) or (N, d); bf16, fp16 or fp32,
            any strides.
        cu_seqlens: int (B + 1,) first rows of the examples, on the host or the device.
        max_seqlen: with device bounds, the longest segment; avoids a wait for the device.
        padding_idx: positions with this id have no gradient.
        longest_compared: sequences longer than this are sorted.
        config: overrides the tile table.
    Returns:
        fp64 (B,).
    Raises:
        KernelInputError: before any launch, for inputs that no kernel serves.
    Cost: one read of g, and T^2 comparisons of ids an example or one sort; workspace 8 bytes per
    row and tile.
    """
    segments = _check.check_rows(ids, g, cu_seqlens, max_seqlen)
    order = None
    if segments.positions > longest_compared:
        ids, order = sorted_ids(ids, segments)
    return _products(ids, g, segments, order, ids, g, segments, padding_idx, False, config)


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
    padding_idx: int | None = None,
    config: _config.TileConfig | None = None,
) -> torch.Tensor:
    """Inner products of the i-th per-example gradients of an embedding in two batches.

    inner_i = sum_{t,s: id1_it = id2_is} g1_it . g2_is

    Args, returns, raises: as `rows_sqnorm`, for two factors of equal B and d.
    Cost: T1 T2 comparisons of ids an example, and one read of g2 for every match.
    """
    first = _check.check_rows(ids1, g1, cu_seqlens1, max_seqlen1)
    second = _check.check_rows(ids2, g2, cu_seqlens2, max_seqlen2)
    _check.check_match(g1, g2, "width")
    _check.check_layouts(first, second)
    _check.check_batches(first.batch, second.batch)
    return _products(ids1, g1, first, None, ids2, g2, second, padding_idx, True, config)


def sum_rows(partial: torch.Tensor, segments: _check.Segments) -> torch.Tensor:
    """Sums of (rows, outputs) over the outputs and rows of each example, fp64 (B,)."""
    if not segments.ragged:
        per_example = partial.view(segments.batch, segments.positions * partial.shape[1])
        return per_example.sum(1, dtype=torch.float64)
    sums = torch.empty((segments.batch,), dtype=torch.float64, device=partial.device)
    if segments.batch:
        launch_kernel(
            segment_sum_kernel,
            segments.batch,
            partial,
            segments.cu_seqlens,
            sums,
            segments.positions,
            partial.shape[0],
            partial.shape[1],
            CHUNK=1024,
            num_warps=4,
        )
    return sums


def example_of_rows(segments: _check.Segments) -> torch.Tensor | None:
    """Example of each packed row; -1 or B for rows before and after all segments."""
    if segments.cu_seqlens is None:
        return None
    bounds = segments.cu_seqlens
    rows = torch.arange(segments.total_rows, device=bounds.device, dtype=bounds.dtype)
    return torch.searchsorted(bounds, rows, right=True) - 1


def sorted_ids(ids: torch.Tensor, segments: _check.Segments) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids ascending within each example, the position that each came from), contiguous."""
    if not segments.ragged:
        values, order = torch.sort(ids.contiguous(), dim=1, stable=True)
        return values, order
    example = example_of_rows(segments)
    assert example is not None and segments.cu_seqlens is not None
    by_id = torch.argsort(ids, stable=True)
    order = by_id[torch.argsort(example[by_id], stable=True)]
    first_row = segments.cu_seqlens[example.clamp(0, segments.batch - 1)]
    # rows outside all segments are never read
    return ids[order], order - first_row


def _products(
    ids1: torch.Tensor,
    g1: torch.Tensor,
    first: _check.Segments,
    order: torch.Tensor | None,
    ids2: torch.Tensor,
    g2: torch.Tensor,
    second: _check.Segments,
    padding_idx: int | None,
    paired: bool,
    config: _config.TileConfig | None,
) -> torch.Tensor:
    features = g1.shape[-1]
    config = config or _config.choose_rows(
        features, g1.element_size(), _check.architecture(g1.device), _check.is_aligned(g1, g2)
    )
    tiles = triton.cdiv(features, config.columns)
    partial = torch.empty((first.total_rows, tiles), dtype=torch.float64, device=g1.device)
    if partial.numel():
        launch_kernel(
            rows_kernel,
            partial.numel(),
            ids1,
            g1,
            order,
            ids2,
            g2,
            example_of_rows(first),
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
            -1 if padding_idx is None else padding_idx,
            tiles,
            PADDED=padding_idx is not None,
            SORTED=order is not None,
            PAIRED=paired,
            RAGGED=first.ragged,
            COLUMNS=config.columns,
            INNER=config.inner,
            COMPARED=CHUNK,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
    sums = sum_rows(partial, first)
    if first.cu_seqlens is not None and second.cu_seqlens is not None:
        # where bounds decrease, the search for a row's example may go astray anywhere
        wrong = (first.cu_seqlens.diff() < 0).any()
        if paired:
            wrong = wrong | (second.cu_seqlens.diff() < 0).any()
            nothing = torch.zeros((second.total_rows, 1), dtype=torch.float64, device=g2.device)
            sums = sums + sum_rows(nothing, second)
        sums = torch.where(wrong, float("nan"), sums)
    return sums
