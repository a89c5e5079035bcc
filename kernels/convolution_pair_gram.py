"""Convolutions with few positions: inner products of two factors through products of patches."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from gradstats.kernels import _check, _config
from gradstats.kernels._launching import launch_kernel
from gradstats.kernels._patches import Convolution, patch_products
from gradstats.kernels._results import added_pairs, apart
from gradstats.kernels.convolution import check_two_convolutions
from gradstats.kernels.pairwise import cross_tile, store_pairs


@triton.jit
def packed_positions(
    first, batch, block, positions, EXAMPLES: tl.constexpr, POSITIONS: tl.constexpr
):
    """(example, position) of each row of the tile; position is `positions` for rows of neither."""
    lane = tl.arange(0, EXAMPLES * POSITIONS)
    example = first + lane // POSITIONS
    position = block * POSITIONS + lane % POSITIONS
    inside = (example < batch) & (position < positions)
    return tl.cast(example, tl.int64), tl.where(inside, position, positions)


@triton.jit(do_not_specialize=["groups", "batch1", "batch2", "blocks1", "blocks2", "column_tiles"])
def convolution_pair_gram_kernel(
    x1_ptr,  # (B1, C, D1, H1, W1)
    g1_ptr,  # (B1, O, T1)
    x2_ptr,  # (B2, C, D2, H2, W2)
    g2_ptr,  # (B2, O, T2)
    partial_ptr,  # fp32 (splits, B1, B2); else fp64 (2, splits, B): terms, then absolute terms
    stride_x1b,
    stride_x1c,
    stride_x1d,
    stride_x1h,
    stride_x1w,
    stride_g1b,
    stride_g1c,
    stride_g1t,
    depth1,
    height1,
    width1,
    out_height1,
    out_width1,
    positions1,
    stride_x2b,
    stride_x2c,
    stride_x2d,
    stride_x2h,
    stride_x2w,
    stride_g2b,
    stride_g2c,
    stride_g2t,
    depth2,
    height2,
    width2,
    out_height2,
    out_width2,
    positions2,
    channels,
    outputs,
    groups,
    batch1,
    batch2,
    blocks1,  # of POSITIONS1 positions
    blocks2,
    column_tiles,
    ALL_PAIRS: tl.constexpr,  # else the i-th example with the i-th, one pair to a tile
    WINDOW: tl.constexpr,
    ONE_TAP: tl.constexpr,
    PRECISION: tl.constexpr,
    EXAMPLES1: tl.constexpr,  # examples side by side in one tile, each padded to POSITIONS
    POSITIONS1: tl.constexpr,
    EXAMPLES2: tl.constexpr,
    POSITIONS2: tl.constexpr,
    INNER: tl.constexpr,
):
    """One tile of sum_{t,s} (patch1_it . patch2_js)(g1_it . g2_js) of one group, for some (i, j).

    Every group and every pair of position blocks is a split, and adds its part to partial[split].
    """
    index = tl.program_id(0)
    splits = groups * blocks1 * blocks2
    split = index % splits
    tile = index // splits
    block2 = split % blocks2
    block1 = split // blocks2 % blocks1
    group = tl.cast(split // blocks2 // blocks1, tl.int64)
    if ALL_PAIRS:
        first1 = (tile // column_tiles) * EXAMPLES1
        first2 = (tile % column_tiles) * EXAMPLES2
    else:
        first1 = tile
        first2 = tile
    ROWS: tl.constexpr = EXAMPLES1 * POSITIONS1
    COLUMNS: tl.constexpr = EXAMPLES2 * POSITIONS2
    example1, position1 = packed_positions(
        first1, batch1, block1, positions1, EXAMPLES1, POSITIONS1
    )
    example2, position2 = packed_positions(
        first2, batch2, block2, positions2, EXAMPLES2, POSITIONS2
    )
    products = patch_products(
        x1_ptr + group * channels * stride_x1c + (example1 * stride_x1b)[None, :],
        position1, positions1, stride_x1c, stride_x1d, stride_x1h, stride_x1w,
        depth1, height1, width1, out_height1, out_width1,
        x2_ptr + group * channels * stride_x2c + (example2 * stride_x2b)[None, :],
        position2, positions2, stride_x2c, stride_x2d, stride_x2h, stride_x2w,
        depth2, height2, width2, out_height2, out_width2,
        channels, WINDOW, ONE_TAP, PRECISION, ROWS, COLUMNS, INNER,
    )  # fmt: skip
    g_products = cross_tile(
        g1_ptr + group * outputs * stride_g1c,
        example1 * stride_g1b + tl.cast(position1, tl.int64) * stride_g1t,
        position1 < positions1, stride_g1c,
        g2_ptr + group * outputs * stride_g2c,
        example2 * stride_g2b + tl.cast(position2, tl.int64) * stride_g2t,
        position2 < positions2, stride_g2c,
        outputs, PRECISION, ROWS, COLUMNS, INNER,
    )  # fmt: skip
    terms = products * g_products
    if ALL_PAIRS:
        blocks = terms.reshape(EXAMPLES1, POSITIONS1, EXAMPLES2, POSITIONS2)
        total = tl.sum(tl.sum(blocks, axis=3), axis=1)
        store_pairs(partial_ptr, total, split, first1, first2, batch1, batch2, EXAMPLES1, EXAMPLES2)
    else:
        row = tl.cast(split, tl.int64) * batch1 + first1
        tl.store(partial_ptr + row, tl.sum(terms))
        stride_output = tl.cast(splits, tl.int64) * batch1
        tl.store(partial_ptr + stride_output + row, tl.sum(tl.abs(terms)))


def convolution_inner_gram(
    x1: torch.Tensor,
    g1: torch.Tensor,
    x2: torch.Tensor,
    g2: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    *,
    config: _config.TileConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Inner products of the i-th per-example weight gradients of a convolution in two batches,
    through products of patches.

    inner_i = sum over groups and positions t, s of (patch1_it . patch2_is)(g1_it . g2_is),
    magnitude_i = the same of absolute terms

    The rounding error is about eps * magnitude_i; where that is too much use
    `convolution.convolution_inner`.

    Args, raises: as `convolution.convolution_sqnorm`, for two factors of one layer and of equal
        batch; their images may differ in size.
    Returns:
        (inner, magnitude), each fp64 (B,).
    Cost: 2 T1 T2 ((C / groups) taps + O / groups) flops per example and group; workspace 16 bytes
    for each example, group and pair of blocks of positions, and the copies of
    `convolution.convolution_sqnorm`.
    """
    layer = kernel, stride, padding, dilation, groups
    first, second = check_two_convolutions(x1, g1, x2, g2, *layer)
    _check.check_batches(first.batch, second.batch)
    longest = max(first.positions, second.positions)
    config = config or _choose_config(first, second, longest, longest)
    partial = _launch(first, second, config, all_pairs=False)
    inner, magnitude = apart(partial.mT)
    return inner, magnitude


def pairwise_convolution_gram(
    x1: torch.Tensor,
    g1: torch.Tensor,
    x2: torch.Tensor,
    g2: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    *,
    config: _config.TileConfig | None = None,
) -> torch.Tensor:
    """Inner products of all pairs of per-example weight gradients of a convolution, through
    products of patches.

    K[i, j] = sum over groups and positions t, s of (patch1_it . patch2_js)(g1_it . g2_js)

    The right form for few positions; its cost grows with T1 T2, that of
    `convolution_pairs.pairwise_convolution` does not. Examples of few positions share a tile.

    Args, raises: as `convolution.convolution_sqnorm`, for two factors of one layer, whose batches
        and images may differ in size.
    Returns:
        fp32 (B1, B2).
    Cost: 2 T1 T2 ((C / groups) taps + O / groups) flops per pair and group; workspace
    one fp32 copy of K for each group and each pair of blocks of positions, and the copies of
    `convolution.convolution_sqnorm`.
    """
    layer = kernel, stride, padding, dilation, groups
    first, second = check_two_convolutions(x1, g1, x2, g2, *layer)
    rows, columns = first.batch * first.positions, second.batch * second.positions
    config = config or _choose_config(first, second, rows, columns)
    return added_pairs(_launch(first, second, config, all_pairs=True))


def largest_tile(first: Convolution, second: Convolution) -> int:
    """Largest rows, columns and step that leave registers for the addresses of both sides.

    Addresses take few registers if operands have half precision, are read in whole vectors, and no
    tile of columns holds several taps.
    """
    aligned = first.aligned and second.aligned
    return 64 if first.x.element_size() == 2 and aligned and first.one_tap else 32


def _choose_config(
    first: Convolution, second: Convolution, rows: int, columns: int
) -> _config.TileConfig:
    largest = largest_tile(first, second)
    kind = _check.kind(first.x, first.aligned and second.aligned)
    rows, columns = min(rows, largest), min(columns, largest)
    config = _config.choose("convolution_gram", rows, columns, *kind)
    return dataclasses.replace(config, inner=min(config.inner, largest))


def _launch(
    first: Convolution, second: Convolution, config: _config.TileConfig, *, all_pairs: bool
) -> torch.Tensor:
    """Sums of terms of every split: (splits, B1, B2), else (2, splits, B) with absolute terms."""
    block1, block2 = config.rows, config.columns
    if all_pairs:
        block1 = min(block1, triton.next_power_of_2(max(first.positions, 1)))
        block2 = min(block2, triton.next_power_of_2(max(second.positions, 1)))
    examples1, examples2 = config.rows // block1, config.columns // block2
    blocks1 = _config.cdiv(first.positions, block1)
    blocks2 = _config.cdiv(second.positions, block2)
    splits = first.groups * blocks1 * blocks2
    column_tiles = _config.cdiv(second.batch, examples2) if all_pairs else 1
    shape = (splits, first.batch, second.batch) if all_pairs else (2, splits, first.batch)
    dtype = torch.float32 if all_pairs else torch.float64
    partial = torch.empty(shape, dtype=dtype, device=first.x.device)
    if partial.numel():
        programs = _config.cdiv(first.batch, examples1) * column_tiles * splits
        launch_kernel(
            convolution_pair_gram_kernel,
            programs,
            first.x,
            first.g,
            second.x,
            second.g,
            partial,
            *first.strides,
            *first.sizes,
            *second.strides,
            *second.sizes,
            *first.divisions,
            first.batch,
            second.batch,
            blocks1,
            blocks2,
            column_tiles,
            ALL_PAIRS=all_pairs,
            WINDOW=first.window,
            ONE_TAP=first.one_tap,
            PRECISION=config.precision,
            EXAMPLES1=examples1,
            POSITIONS1=block1,
            EXAMPLES2=examples2,
            POSITIONS2=block2,
            INNER=config.inner,
            **config.options,
        )
    return partial
