"""Inner products of all pairs of per-example gradients of an embedding.

Rows of one id in one example are added up once, and only these sums are multiplied. A program takes
sixteen examples of either factor and some of the ids of the first factor. It looks each id up in
the second factor and multiplies the sums there with those here. Most ids are in few examples, and
examples without the id take no products.
"""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl
from gradstats.kernels import _check, _config, _runs, _streaming
from gradstats.kernels._launching import launch_kernel
from gradstats.kernels._results import added_pairs
from gradstats.kernels._row_sums import nan_where_bounds_decrease
from gradstats.kernels._runs import EXAMPLE_BITS, EXAMPLES, ID_BITS, NOBODY, keys_below
from gradstats.kernels._tile import load_rows, segment_length
from gradstats.kernels.pairwise import store_pairs

PER_PROCESSOR = 12  # programs that a processor has registers for at once


@triton.jit
def poison_of(cu_seqlens_ptr, first, batch, positions, total_rows):
    """[EXAMPLES] NaN for examples whose bounds are wrong, as in `_tile.segment`."""
    example = first + tl.arange(0, EXAMPLES)
    start = tl.load(cu_seqlens_ptr + example, mask=example < batch, other=0)
    end = tl.load(cu_seqlens_ptr + example + 1, mask=example < batch, other=0)
    _, valid = segment_length(start, end, positions, total_rows)
    return tl.where(valid, 0.0, float("nan"))


@triton.jit
def add_products(
    total,  # [EXAMPLES, EXAMPLES]
    keys1_ptr,
    sums1_ptr,
    begin1,  # first run of the id in the first factor's tile
    group1,  # the part that the keys of its runs have in common
    total_rows1,
    keys2_ptr,
    sums2_ptr,
    begin2,
    group2,
    total_rows2,
    width,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """total + the products of all sums of one id, at the places of their examples."""
    examples = tl.arange(0, EXAMPLES)
    run2 = begin2
    more = True
    while more:
        runs2 = run2 + tl.arange(0, ROWS)
        keys2 = tl.load(keys2_ptr + runs2, mask=runs2 < total_rows2, other=NOBODY)
        present = (keys2 >> EXAMPLE_BITS) == group2
        own2 = tl.where(present, tl.cast(keys2 & (EXAMPLES - 1), tl.int32), -1)
        run1 = begin1
        key1 = tl.load(keys1_ptr + run1)
        while (key1 >> EXAMPLE_BITS) == group1:
            run1 += 1
            following = tl.load(keys1_ptr + run1, mask=run1 < total_rows1, other=NOBODY)
            products = tl.zeros((ROWS, COLUMNS), tl.float32)
            for start in range(0, width, COLUMNS):
                columns = start + tl.arange(0, COLUMNS)
                one = tl.load(
                    sums1_ptr + (run1 - 1) * width + columns, mask=columns < width, other=0.0
                )
                others = load_rows(sums2_ptr, runs2 * width, present, columns, 1, width)
                products += one[None, :] * others
            each = tl.sum(products, axis=1)
            # selected, not multiplied by zeros: infinities and NaN stay with their examples
            picked = tl.where(own2[None, :] == examples[:, None], each[None, :], 0.0)
            own1 = tl.cast(key1 & (EXAMPLES - 1), tl.int32)
            total += tl.where((examples == own1)[:, None], tl.sum(picked, axis=1)[None, :], 0.0)
            key1 = following
        run2 += ROWS
        more = tl.sum(present.to(tl.int32)) == ROWS
    return total


@triton.jit(
    do_not_specialize=[
        "batch1", "batch2", "positions1", "positions2", "total_rows1", "total_rows2", "top1",
        "top2", "tiles2", "splits",
    ]
)  # fmt: skip
def pairwise_rows_kernel(
    keys1_ptr,  # int64 (N1,): keys of runs in ascending order, as `_runs` has them
    sums1_ptr,  # fp32 (N1, width)
    keys2_ptr,  # int64 (N2,)
    sums2_ptr,  # fp32 (N2, width)
    cu_seqlens1_ptr,  # int (B1 + 1,), read if RAGGED
    cu_seqlens2_ptr,  # int (B2 + 1,), read if RAGGED
    partial_ptr,  # fp32 (splits, B1, B2)
    batch1,
    batch2,
    positions1,
    positions2,
    total_rows1,
    total_rows2,
    top1,
    top2,
    width,
    tiles2,
    splits,
    RAGGED: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """K[i, j] = sum_v s1_iv . s2_jv for one tile of pairs (i, j), over some of the ids v."""
    index = tl.program_id(0)
    split = index % splits
    tile = index // splits
    tile1 = tl.cast(tile // tiles2, tl.int64)
    tile2 = tl.cast(tile % tiles2, tl.int64)
    GROUP_BITS: tl.constexpr = ID_BITS + EXAMPLE_BITS
    begin = keys_below(keys1_ptr, tile1 << GROUP_BITS, total_rows1, top1)
    end = keys_below(keys1_ptr, (tile1 + 1) << GROUP_BITS, total_rows1, top1)

    lanes = tl.arange(0, BLOCK)
    total = tl.zeros((EXAMPLES, EXAMPLES), tl.float32)
    for block in range(begin + split * BLOCK, end, splits * BLOCK):
        runs1 = block + tl.cast(lanes, tl.int64)
        inside = runs1 < end
        keys = tl.load(keys1_ptr + runs1, mask=inside, other=NOBODY)
        group1 = keys >> EXAMPLE_BITS
        before = tl.load(keys1_ptr + runs1 - 1, mask=inside & (runs1 > begin), other=NOBODY)
        group2 = group1 + ((tile2 - tile1) << ID_BITS)
        runs2 = keys_below(keys2_ptr, group2 << EXAMPLE_BITS, total_rows2, top2)
        found = tl.load(keys2_ptr + runs2, mask=runs2 < total_rows2, other=NOBODY)
        meets = inside & (group1 != before >> EXAMPLE_BITS) & (group2 == found >> EXAMPLE_BITS)

        lane = tl.min(tl.where(meets, lanes, BLOCK))
        while lane < BLOCK:
            chosen = lanes == lane
            total = add_products(
                total, keys1_ptr, sums1_ptr,
                tl.sum(tl.where(chosen, runs1, 0)),
                tl.sum(tl.where(chosen, group1, 0)),
                total_rows1, keys2_ptr, sums2_ptr,
                tl.sum(tl.where(chosen, runs2, 0)),
                tl.sum(tl.where(chosen, group2, 0)),
                total_rows2, width, ROWS, COLUMNS,
            )  # fmt: skip
            lane = tl.min(tl.where(meets & (lanes > lane), lanes, BLOCK))

    first1 = tl.cast(tile1, tl.int32) * EXAMPLES
    first2 = tl.cast(tile2, tl.int32) * EXAMPLES
    if RAGGED:
        poison1 = poison_of(cu_seqlens1_ptr, first1, batch1, positions1, total_rows1)
        poison2 = poison_of(cu_seqlens2_ptr, first2, batch2, positions2, total_rows2)
        total += poison1[:, None] + poison2[None, :]
    store_pairs(partial_ptr, total, split, first1, first2, batch1, batch2, EXAMPLES, EXAMPLES)


def pairwise_rows(
    ids1: torch.Tensor,
    g1: torch.Tensor,
    ids2: torch.Tensor,
    g2: torch.Tensor,
    *,
    cu_seqlens1: torch.Tensor | None = None,
    cu_seqlens2: torch.Tensor | None = None,
    max_seqlen1: int | None = None,
    max_seqlen2: int | None = None,
    workspace: int = _config.WORKSPACE,
    config: _config.TileConfig | None = None,
    splits: int | None = None,
) -> torch.Tensor:
    """Inner products of all pairs of per-example gradients of an embedding.

    K[i, j] = sum_{t,s: id1_it = id2_js} g1_it . g2_js

    Args:
        ids1, g1: first factor: int (B1, T1), at least 0 and less than 2^40, and (B1, T1, d), or
            packed rows with cu_seqlens1.
        ids2, g2: second factor, same layout (dense or packed), dtype and width.
        workspace: bytes for the sums of rows, which are formed for some of the features at a time
            where they take more; at least 64 features.
        config: overrides the tile table.
        splits: overrides into how many parts the first factor's ids are divided.
        Others as `pairwise.pairwise_gram`.
    Returns:
        fp32 (B1, B2).
    Raises:
        KernelInputError: before any launch, for inputs that no kernel serves.
    Cost: one sort of each factor's rows, one read of g, and 2 d flops for each id that two examples
    share; some 60 bytes per row beside the workspace, and `splits` copies of K.
    """
    first = _check.check_rows(ids1, g1, cu_seqlens1, max_seqlen1)
    second = _check.check_rows(ids2, g2, cu_seqlens2, max_seqlen2)
    _check.check_match(g1, g2, "width")
    _check.check_layouts(first, second)
    features = g1.shape[-1]
    config = config or _streaming.choose_rows_pairs(features)
    if splits is None:
        rows = min(EXAMPLES.value * first.positions, first.total_rows)
        tiles = [_config.cdiv(each.batch, EXAMPLES.value) for each in (first, second)]
        blocks, architecture = _config.cdiv(rows, config.inner), _check.architecture(g1.device)
        _, splits = _config.choose_partition(math.prod(tiles), blocks, architecture, PER_PROCESSOR)
    if not first.batch or not second.batch:
        return g1.new_empty((first.batch, second.batch), dtype=torch.float32)
    itself = all(map(_is, (ids1, g1, cu_seqlens1), (ids2, g2, cu_seqlens2)))
    one = _runs.sort_rows(ids1, g1, first)
    two = one if itself else _runs.sort_rows(ids2, g2, second)
    rows = one.count if itself else one.count + two.count
    step = max(64, workspace // (4 * max(1, rows)) // 64 * 64)
    starts = range(0, max(1, features), step)
    parts = (_products(one, two, start, step, config, splits) for start in starts)
    products = functools.reduce(torch.add, parts)
    for each in (first, second):
        products = nan_where_bounds_decrease(products, each)
    return products


def _products(
    one: _runs.SortedRows,
    two: _runs.SortedRows,
    start: int,
    step: int,
    config: _config.TileConfig,
    splits: int,
) -> torch.Tensor:
    """The part of the products of at most `step` features from `start` on, fp32 (B1, B2)."""
    first, second = one.segments, two.segments
    # rows of sums are read in vectors, padded with zeros
    width = 16 * _config.cdiv(min(step, one.g.shape[-1] - start), 16)
    keys1, sums1 = one.sums(start, width)
    keys2, sums2 = (keys1, sums1) if two is one else two.sums(start, width)
    shape = (splits, first.batch, second.batch)
    partial = torch.empty(shape, dtype=torch.float32, device=sums1.device)
    tiles1, tiles2 = (_config.cdiv(each.batch, EXAMPLES.value) for each in (first, second))
    launch_kernel(
        pairwise_rows_kernel,
        tiles1 * tiles2 * splits,
        keys1,
        sums1,
        keys2,
        sums2,
        first.cu_seqlens,
        second.cu_seqlens,
        partial,
        first.batch,
        second.batch,
        first.positions,
        second.positions,
        first.total_rows,
        second.total_rows,
        one.top,
        two.top,
        width,
        tiles2,
        splits,
        RAGGED=first.ragged,
        BLOCK=config.inner,
        ROWS=config.rows,
        COLUMNS=config.columns,
        num_warps=config.num_warps,
    )
    return added_pairs(partial)


def _is(first: torch.Tensor | None, second: torch.Tensor | None) -> bool:
    """Whether two tensors are the same memory in the same layout."""
    if first is None or second is None:
        return first is second
    same = (first.data_ptr(), first.dtype, first.shape, first.stride())
    return same == (second.data_ptr(), second.dtype, second.shape, second.stride())
