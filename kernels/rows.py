"""Embeddings: only positions of equal ids meet, so nothing of the table's size is ever formed.

The per-example gradient of a table is G_i = sum_t e_{id_it} g_it^T. For its norm the rows are read
in the order of their ids, so that equal ids stand side by side.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from gradstats.kernels import _check, _config, _order
from gradstats.kernels._tile import load_rows, segment
from gradstats.kernels.direction import segment_sum_kernel

CHUNK = 256  # ids compared at once
LONGEST_COMPARED = 8192  # beyond, comparing every id with every other costs more than sorting
ROWS = 16  # that one program adds up; its one warp holds them in registers
AHEAD = 8  # blocks that a run is followed through at once


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
    """[COLUMNS] sums of the rows whose id is `own`."""
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


@triton.jit(do_not_specialize=["total_rows", "tiles"])
def run_squares_kernel(
    g_ptr,
    places_ptr,  # int64 (2, N) of `_order.places`
    partial_ptr,  # fp32 (N, tiles), by slots
    edges_ptr,  # fp32 (blocks, 2, features): sums of runs that lie in several blocks
    stride_gd,
    total_rows,
    features,
    tiles,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Of a block of slots: the squares of the sums of runs that it holds, at their last slots, and
    the sums of the run that it goes on with and of the one that goes on after it."""
    index = tl.program_id(0)
    block = tl.cast(index // tiles, tl.int64)
    tile = index % tiles
    columns = tl.cast(tile * COLUMNS + tl.arange(0, COLUMNS), tl.int64)
    slots = tl.arange(0, ROWS)
    first = block * ROWS
    runs_ptr = places_ptr + total_rows

    opening = tl.load(runs_ptr + first)
    run = opening
    previous = opening
    sums = tl.zeros((COLUMNS,), tl.float32)
    earlier = tl.zeros((COLUMNS,), tl.float32)
    squares = tl.zeros((ROWS,), tl.float32)
    # unrolled, and without a branch or a store between, so that all rows are loaded ahead
    for step in tl.static_range(0, ROWS):
        slot = first + step
        offset = tl.load(places_ptr + slot, mask=slot < total_rows, other=0) * UNIT
        width = tl.where(run >= 0, features, 0)
        row = tl.load(g_ptr + offset + columns * stride_gd, mask=columns < width, other=0.0)
        row = row.to(tl.float32)
        sums = tl.where(run == previous, sums + row, row)
        earlier = tl.where((run >= 0) & (run < first), sums, earlier)
        following = tl.load(runs_ptr + slot + 1, mask=slot + 1 < total_rows, other=-1)
        whole = (run >= first) & (run != following)
        squares = tl.where((slots == step) & whole, tl.sum(sums * sums), squares)
        previous = run
        run = following
    places = (first + slots) * tiles + tile
    tl.store(partial_ptr + places, squares, mask=first + slots < total_rows)
    edges = edges_ptr + block * 2 * features + columns
    width = tl.where((opening >= 0) & (opening < first), features, 0)
    tl.store(edges, earlier, mask=columns < width)
    width = tl.where((previous >= first) & (run == previous), features, 0)
    tl.store(edges + features, sums, mask=columns < width)


@triton.jit(do_not_specialize=["total_rows", "tiles", "blocks"])
def long_runs_kernel(
    places_ptr,  # int64 (2, N) of `_order.places`
    edges_ptr,  # fp32 (blocks, 2, features)
    partial_ptr,  # fp32 (N, tiles)
    total_rows,
    features,
    tiles,
    blocks,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """The square of the sum of the run that begins in a block and goes on after it."""
    index = tl.program_id(0)
    block = tl.cast(index // tiles, tl.int64)
    tile = index % tiles
    runs_ptr = places_ptr + total_rows
    after = (block + 1) * ROWS
    run = tl.load(runs_ptr + after - 1, mask=after < total_rows, other=-1)
    following = tl.load(runs_ptr + after, mask=after < total_rows, other=-1)
    if (run >= block * ROWS) & (run == following):
        columns = tl.cast(tile * COLUMNS + tl.arange(0, COLUMNS), tl.int64)
        edges = edges_ptr + block * 2 * features + features + columns
        lanes = tl.zeros((AHEAD, COLUMNS), tl.float32)
        start = block + 1
        more = True
        while more:
            ahead = start + tl.arange(0, AHEAD)
            goes_on = ahead < blocks
            goes_on = goes_on & (tl.load(runs_ptr + ahead * ROWS, mask=goes_on, other=-1) == run)
            lanes += load_rows(edges_ptr, ahead * 2 * features, goes_on, columns, 1, features)
            start += AHEAD
            more = tl.sum(tl.where(goes_on, 1, 0)) == AHEAD
        sums = tl.load(edges, mask=columns < features, other=0.0) + tl.sum(lanes, axis=0)
        tl.store(partial_ptr + run * tiles + tile, tl.sum(sums * sums))


@triton.jit(do_not_specialize=["positions1", "positions2", "total_rows1", "total_rows2", "tiles"])
def rows_kernel(
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
    padding,  # this id's row takes no part, if PADDED
    tiles,
    PADDED: tl.constexpr,
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
    if PADDED:
        takes_part = takes_part & (own != padding)
    first2, length2, _ = segment(cu_seqlens2_ptr, example, positions2, total_rows2, RAGGED)
    sums = sum_of_equal(
        ids2_ptr,
        example * stride_i2b + first2 * stride_i2t,
        stride_i2t,
        g2_ptr,
        example * stride_g2b + first2 * stride_g2t,
        stride_g2t,
        stride_g2d,
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
    tl.store(partial_ptr + index, tl.sum(sums * mine.to(tl.float32)))


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
    Cost: one read of g, and T^2 comparisons of ids an example or one sort; workspace 16 bytes per
    row, 4 per row and tile, and 8 per feature for each block of rows.
    """
    segments = _check.check_rows(ids, g, cu_seqlens, max_seqlen)
    features = g.shape[-1]
    aligned = _check.is_aligned(g)
    if config is None:
        config = _config.choose_rows(
            features, g.element_size(), _check.architecture(g.device), aligned
        )
        config = dataclasses.replace(config, inner=ROWS, num_warps=1)
    rows, tiles = segments.total_rows, triton.cdiv(features, config.columns)
    blocks = triton.cdiv(rows, config.inner)
    partial = torch.empty((rows, tiles), dtype=torch.float32, device=g.device)
    if partial.numel():
        unit = 16 if aligned else 1
        places = _order.places(ids, g, segments, padding_idx, unit, longest_compared)
        edges = torch.empty((blocks, 2, features), dtype=torch.float32, device=g.device)
        programs = blocks * tiles
        options = {"ROWS": config.inner, "COLUMNS": config.columns, "num_warps": config.num_warps}
        run_squares_kernel[(_check.check_programs(programs),)](
            g, places, partial, edges, g.stride(-1), rows, features, tiles, UNIT=unit, **options
        )
        if blocks > 1:
            long_runs_kernel[(_check.check_programs(programs),)](
                places, edges, partial, rows, features, tiles, blocks, AHEAD=AHEAD, **options
            )
    return _refused(sum_rows(partial, segments), segments)


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

    features = g1.shape[-1]
    config = config or _config.choose_rows(
        features, g1.element_size(), _check.architecture(g1.device), _check.is_aligned(g1, g2)
    )
    tiles = triton.cdiv(features, config.columns)
    partial = torch.empty((first.total_rows, tiles), dtype=torch.float64, device=g1.device)
    if partial.numel():
        rows_kernel[(_check.check_programs(partial.numel()),)](
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
            -1 if padding_idx is None else padding_idx,
            tiles,
            PADDED=padding_idx is not None,
            RAGGED=first.ragged,
            COLUMNS=config.columns,
            INNER=config.inner,
            COMPARED=CHUNK,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
    sums = sum_rows(partial, first)
    if second.ragged:
        nothing = torch.zeros((second.total_rows, 1), dtype=torch.float64, device=g2.device)
        sums = sums + sum_rows(nothing, second)
    return _refused(sums, first, second)


def sum_rows(partial: torch.Tensor, segments: _check.Segments) -> torch.Tensor:
    """Sums of (rows, outputs) over the outputs and rows of each example, fp64 (B,)."""
    if not segments.ragged:
        per_example = partial.view(segments.batch, segments.positions * partial.shape[1])
        return per_example.sum(1, dtype=torch.float64)
    sums = torch.empty((segments.batch,), dtype=torch.float64, device=partial.device)
    if segments.batch:
        segment_sum_kernel[(_check.check_programs(segments.batch),)](
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


def _refused(sums: torch.Tensor, *sides: _check.Segments) -> torch.Tensor:
    """The sums; NaN where bounds decrease, so that rows of any example may have gone astray."""
    for segments in sides:
        if segments.cu_seqlens is not None:
            sums = torch.where((segments.cu_seqlens.diff() < 0).any(), float("nan"), sums)
    return sums
