"""Convolutions with few positions: squared norms through products of patches, guarded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from gradstats.kernels import _check, _config, guard
from gradstats.kernels._arranged import Arranged
from gradstats.kernels._launching import launch_of, remembered
from gradstats.kernels._patches import (
    check_convolution,
    patch_products,
    weight_tile,
)
from gradstats.kernels._tile import triangle
from gradstats.kernels.convolution import choose_tiles, convolution_gradient, in_one_group
from gradstats.kernels.gram import gram_tile, row_sizes, unless_zero
from gradstats.kernels.guard import first_square, is_suspect


@triton.jit(do_not_specialize=["batch", "groups", "pairs"])
def convolution_gram_kernel(
    x_ptr,  # (B, C, D, H, W)
    g_ptr,  # (B, O, T)
    partial_ptr,  # fp64 (3, B, groups, pairs): of terms, absolute terms, |patch_t| |g_t|
    stride_xb,
    stride_xc,
    stride_xd,
    stride_xh,
    stride_xw,
    stride_gb,
    stride_gc,
    stride_gt,
    depth,
    height,
    width,
    out_height,
    out_width,
    positions,
    channels,
    outputs,
    groups,
    batch,
    pairs,  # tiles of the lower triangle
    WINDOW: tl.constexpr,
    ONE_TAP: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
    INNER: tl.constexpr,
):
    """One tile (r, c), c <= r, of sum_{t,s} (patch_t . patch_s)(g_t . g_s) of one group.

    The matrix of terms is symmetric, so a tile below the diagonal stands for its mirror image too.
    """
    index = tl.program_id(0)
    row_tile, column_tile = triangle(index % pairs)
    block = index // pairs
    example = tl.cast(block // groups, tl.int64)
    group = tl.cast(block % groups, tl.int64)
    rows = row_tile * BLOCK + tl.arange(0, BLOCK)
    columns = column_tile * BLOCK + tl.arange(0, BLOCK)
    x_base = x_ptr + example * stride_xb + group * channels * stride_xc
    g_base = g_ptr + example * stride_gb + group * outputs * stride_gc

    size = 0.0
    if row_tile == column_tile:
        # with few positions all tiles are on the diagonal, and reading them takes the time
        products = patch_products(
            x_base, rows, positions, stride_xc, stride_xd, stride_xh, stride_xw,
            depth, height, width, out_height, out_width,
            x_base, rows, positions, stride_xc, stride_xd, stride_xh, stride_xw,
            depth, height, width, out_height, out_width,
            channels, WINDOW, ONE_TAP, PRECISION, BLOCK, BLOCK, INNER, OWN=True,
        )  # fmt: skip
        g_products = gram_tile(
            g_base, g_base, rows, rows, stride_gt, stride_gc, stride_gt, stride_gc,
            positions, positions, outputs, PRECISION, BLOCK, INNER, OWN=True,
        )  # fmt: skip
        terms = products * g_products
        total = tl.sum(terms)
        magnitude = tl.sum(tl.abs(terms))
        sizes, doubtful = row_sizes(products, g_products, rows, columns)
        doubtful = unless_zero(
            doubtful, g_base, rows, stride_gt, stride_gc, positions, outputs, BLOCK, INNER
        )
        size += tl.sum(sizes) + tl.sum(doubtful)
    else:
        products = patch_products(
            x_base, rows, positions, stride_xc, stride_xd, stride_xh, stride_xw,
            depth, height, width, out_height, out_width,
            x_base, columns, positions, stride_xc, stride_xd, stride_xh, stride_xw,
            depth, height, width, out_height, out_width,
            channels, WINDOW, ONE_TAP, PRECISION, BLOCK, BLOCK, INNER,
        )  # fmt: skip
        g_products = gram_tile(
            g_base, g_base, rows, columns, stride_gt, stride_gc, stride_gt, stride_gc,
            positions, positions, outputs, PRECISION, BLOCK, INNER,
        )  # fmt: skip
        terms = products * g_products
        total = 2.0 * tl.sum(terms)
        magnitude = 2.0 * tl.sum(tl.abs(terms))
    stride_output = tl.cast(batch, tl.int64) * groups * pairs
    tl.store(partial_ptr + index, total)
    tl.store(partial_ptr + stride_output + index, magnitude)
    tl.store(partial_ptr + 2 * stride_output + index, size)


@triton.jit(do_not_specialize=["batch", "groups", "pairs", "parts", "programs"])
def convolution_recompute_kernel(
    x_ptr,  # (B, C, D, H, W)
    g_ptr,  # (B, O, T)
    scratch_ptr,  # fp64: the sums that `is_suspect` reads, then squares (B, parts) of suspects
    result_ptr,  # fp64 (2, B), as `is_suspect` leaves it
    stride_xb,
    stride_xc,
    stride_xd,
    stride_xh,
    stride_xw,
    stride_gb,
    stride_gc,
    stride_gt,
    depth,
    height,
    width,
    out_height,
    out_width,
    positions,
    channels,  # of BLOCKS groups
    outputs,
    batch,
    groups,
    pairs,
    parts,  # tiles of all groups of one example
    programs,  # that share the parts of one example
    adding,
    products,
    cut_off,
    tolerance,
    WINDOW: tl.constexpr,
    ONE_TAP: tl.constexpr,
    BLOCKS: tl.constexpr,  # of the layer's groups side by side in one
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    GROUPS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """The squares of some tiles of one example's weight gradient, if its Gram form is suspect."""
    TAPS: tl.constexpr = WINDOW[0] * WINDOW[1] * WINDOW[2]
    index = tl.program_id(0)
    example = index // programs
    first_part = index - example * programs
    if is_suspect(
        scratch_ptr, result_ptr, example, first_part == 0, batch, groups, pairs, adding, products,
        cut_off, tolerance, GROUPS, PAIRS,
    ):  # fmt: skip
        x_base = x_ptr + tl.cast(example, tl.int64) * stride_xb
        g_base = g_ptr + tl.cast(example, tl.int64) * stride_gb
        squares = first_square(example, batch, groups, pairs, parts)
        # recompute for each tile what all have in common: registers are the scarcest resource
        for part in tl.range(first_part, parts, programs, disable_licm=True):
            group, first_row, tap, first_column = weight_tile(
                part, channels, outputs, TAPS, ONE_TAP, ROWS, COLUMNS
            )
            rows = first_row + tl.arange(0, ROWS)
            column = first_column + tl.arange(0, COLUMNS)
            gradient = convolution_gradient(
                x_base + tl.cast(group, tl.int64) * channels * stride_xc,
                g_base + tl.cast(group, tl.int64) * outputs * stride_gc,
                rows, column, tap, stride_xc, stride_xd, stride_xh, stride_xw, stride_gc,
                stride_gt, depth, height, width, out_height, out_width, positions, channels,
                outputs, WINDOW, ONE_TAP, PRECISION, ROWS, COLUMNS, INNER,
            )  # fmt: skip
            if BLOCKS > 1:
                own = in_one_group(rows, column, channels, outputs, BLOCKS)
                gradient = tl.where(own, gradient, 0.0)
            tl.store(scratch_ptr + squares + part, tl.sum(gradient * gradient))


def convolution_gram_sqnorm(
    x: torch.Tensor,
    g: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    adding: float,
    products: float,
    cut_off: float,
    tolerance: float,
    *,
    config: _config.TileConfig | None = None,
    direct_config: _config.TileConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Squared norms of the per-example weight gradients of a convolution, through Gram matrices.

    sqnorm_i = sum over groups and positions t, s of (patch_t . patch_s)(g_it . g_is)

    Its bound, and what is replaced by the squares of `convolution.convolution_sqnorm`, are as in
    `gram.gram_sqnorm`.

    Args, raises: as `convolution.convolution_sqnorm`, and
        adding, products, cut_off, tolerance: as of `guard.Rounding`.
        config, direct_config: override the tile table, for the two forms.
    Returns:
        (sqnorm, bound), each fp64 (B,).
    Cost: T^2 ((C / groups) taps + O / groups)(1 + BLOCK / T) flops per example and group, and that
    of `convolution.convolution_sqnorm` for examples that are replaced; workspace 24 bytes per tile
    pair, 8 per tile of the weight at most, and the copies of `convolution.convolution_sqnorm`.
    """
    layer = (tuple(kernel), tuple(stride), tuple(padding), tuple(dilation), groups)
    plan = _plan(
        convolution_gram_kernel, (x, g), layer, _check.precision_of(x.dtype),
        adding, products, cut_off, tolerance, config, direct_config,
    )  # fmt: skip
    sqnorm, bound = plan(x, g)
    return sqnorm, bound


def prepare(
    x: torch.Tensor, g: torch.Tensor, geometry: tuple, rounding: tuple[float, float, float, float]
) -> Arranged:
    """What `convolution_gram_sqnorm` does, for operands of the same layout."""
    precision = _check.precision_of(x.dtype)
    return _plan(convolution_gram_kernel, (x, g), geometry, precision, *rounding, None, None)


@remembered
def _plan(
    kernel: Any,
    operands: tuple[torch.Tensor, torch.Tensor],
    geometry: tuple,
    _precision: str,  # part of the cache's key
    adding: float,
    products: float,
    cut_off: float,
    tolerance: float,
    config: _config.TileConfig | None,
    direct_config: _config.TileConfig | None,
) -> Arranged:
    layer = check_convolution(*operands, *geometry).arranged()
    batch, positions, groups = layer.batch, layer.positions, layer.groups
    if not batch * positions:
        return Arranged(None, None, guard.nothing_to_compute(batch))
    kind = _check.kind(layer.x, layer.aligned)
    config = config or _config.choose(
        "convolution_gram", positions, positions, *kind, batch * groups
    )
    wide = layer.widened()
    direct_config, one_tap, tiles = choose_tiles(wide, wide, direct_config, "convolution")
    side = _config.cdiv(positions, config.rows)
    pairs = side * (side + 1) // 2
    sums = guard.Sums(batch, groups, pairs, max(1, tiles))
    rounding = guard.Rounding(adding, products, cut_off, tolerance)
    launch = launch_of(
        kernel,
        batch * groups * pairs,
        *layer.strides,
        *layer.sizes,
        *layer.divisions,
        batch,
        pairs,
        WINDOW=layer.window,
        ONE_TAP=layer.one_tap,
        **config.of_positions,
    )
    again = sums.recompute(
        convolution_recompute_kernel,
        *wide.strides,
        *wide.sizes,
        wide.channels,
        wide.outputs,
        rounding=rounding,
        WINDOW=wide.window,
        ONE_TAP=one_tap,
        BLOCKS=wide.blocks,
        **direct_config.of_gradients,
    )
    return layer.computed(operands, sums.guarded(launch, again, rounding))
