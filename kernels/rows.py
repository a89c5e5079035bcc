"""Embeddings: only rows of equal ids are combined, so nothing of the table's size is formed.

The per-example gradient of a table is G_i = sum_t e_{id_it} g_it^T. For its norm the rows are read
in the order of their ids, which puts equal ids side by side.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from gradstats.kernels import _check, _config, _order, _streaming
from gradstats.kernels._launching import launch_kernel
from gradstats.kernels._row_sums import nan_where_bounds_decrease, sum_rows
from gradstats.kernels._tile import load_rows

LONGEST_COMPARED = 8192  # beyond, comparing all pairs of ids takes longer than sorting
AHEAD = 8  # blocks through which a run is followed at once


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
    """Sums of the runs in a block of slots.

    Of runs within the block it stores the squares, at their last slots; of a run that began before
    the block and of one that goes on after it, the sums within the block.
    """
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
    # unrolled, without branches or stores in between, so that all rows are loaded ahead
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
    """The squared sum of the run that begins in a block and goes on after it."""
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


def rows_sqnorm(
    ids: torch.Tensor,
    g: torch.Tensor,
    *,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
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
    config = config or _streaming.choose_runs(features)
    rows, tiles = segments.total_rows, _config.cdiv(features, config.columns)
    blocks = _config.cdiv(rows, config.inner)
    partial = torch.empty((rows, tiles), dtype=torch.float32, device=g.device)
    if partial.numel():
        unit = 16 if aligned else 1
        places = _order.places(ids, g, segments, unit, longest_compared)
        edges = torch.empty((blocks, 2, features), dtype=torch.float32, device=g.device)
        programs = blocks * tiles
        options = {"ROWS": config.inner, "COLUMNS": config.columns, "num_warps": config.num_warps}
        launch_kernel(
            run_squares_kernel,
            programs,
            g,
            places,
            partial,
            edges,
            g.stride(-1),
            rows,
            features,
            tiles,
            UNIT=unit,
            **options,
        )
        if blocks > 1:
            launch_kernel(
                long_runs_kernel,
                programs,
                places,
                edges,
                partial,
                rows,
                features,
                tiles,
                blocks,
                AHEAD=AHEAD,
                **options,
            )
    return nan_where_bounds_decrease(sum_rows(partial, segments), segments)
