"""Per-example squared norms of sequences through two Gram matrices that never leave registers."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from gradstats.kernels import _check, _config, guard
from gradstats.kernels._launching import launch_of, remembered
from gradstats.kernels._tile import (
    dot,
    example_base,
    grouped,
    load_tile,
    multiple,
    segment,
    triangle,
)
from gradstats.kernels.direct import GROUP, gradient_tile
from gradstats.kernels.guard import first_square, is_suspect

# In bounds of rounding errors, a product of two rows' squared norms, and a squared norm, count as
# at least these: a rounding error of them, 2^-24, covers what underflow loses in one product, and
# in a sum of 2^17 products.
LEAST_PRODUCT = tl.constexpr(2.0**-125)
LEAST_SQUARE = tl.constexpr(2.0**-107)

# A row whose squared norm is zero may hold values whose squares underflow. Beside a squared norm of
# at most this the row may count as zero: its product with 2^12 such squares would underflow too.
MOST_BESIDE_ZERO = tl.constexpr(2.0**12)


@triton.jit
def gram_tile(
    base1,  # pointer to the first row of one example of the first factor
    base2,  # pointer to the first row of one example of the second factor
    rows,
    columns,
    row_stride1,
    feature_stride1,
    row_stride2,
    feature_stride2,
    length1,
    length2,
    features,
    PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
    INNER: tl.constexpr,
    OWN: tl.constexpr = False,  # both factors are one, and are read once
):
    """[BLOCK, BLOCK] inner products of positions of one example with positions of another."""
    inner = tl.arange(0, INNER)
    products = tl.zeros((BLOCK, BLOCK), tl.float32)
    for feature in range(0, features, INNER):
        channel = feature + inner
        left = load_tile(base1, rows, row_stride1, length1, channel, feature_stride1, features)
        right = left
        if not OWN:
            right = load_tile(
                base2, columns, row_stride2, length2, channel, feature_stride2, features
            )
        products = dot(left, right.T, products, PRECISION)
    return products


@triton.jit
def row_sizes(a_products, g_products, rows, columns):
    """(sizes, doubtful), [BLOCK]: |a_t| |g_t| of positions t of a tile, to bound rounding errors.

    Rows so small that their products leave the range of normal numbers get sizes so large that the
    bound covers the loss. Rows of zeros lose nothing and count for nothing. A row whose squares are
    zero may be one, or one whose squares underflow: if its partner is so large that much would be
    lost then, its size is in `doubtful`, and zero in `sizes`.
    """
    diagonal = rows[:, None] == columns[None, :]
    a_squares = tl.sum(tl.where(diagonal, a_products, 0.0), axis=1)
    g_squares = tl.sum(tl.where(diagonal, g_products, 0.0), axis=1)
    sizes = tl.sqrt((a_squares + LEAST_SQUARE) * (g_squares + LEAST_SQUARE) + LEAST_PRODUCT)
    vanished = a_squares * g_squares == 0.0
    large = tl.maximum(a_squares, g_squares) > MOST_BESIDE_ZERO
    return tl.where(vanished, 0.0, sizes), tl.where(vanished & large, sizes, 0.0)


@triton.jit
def unless_zero(
    sizes,
    base,  # pointer to the first row of one example
    rows,
    row_stride,
    feature_stride,
    length,
    features,
    BLOCK: tl.constexpr,
    INNER: tl.constexpr,
):
    """Sizes [BLOCK], with 0 for rows of zeros; rows are read only if some size is positive.

    Training masks whole examples, whose gradients are then zero. Without this they would all be
    suspect, and forming their gradients takes as long as those of any others.
    """
    if tl.max(sizes, axis=0) > 0.0:
        inner = tl.arange(0, INNER)
        largest = tl.zeros((BLOCK,), tl.float32)
        for feature in range(0, features, INNER):
            channel = feature + inner
            tile = load_tile(base, rows, row_stride, length, channel, feature_stride, features)
            largest = tl.maximum(largest, tl.max(tl.abs(tile), axis=1).to(tl.float32))
        sizes = tl.where(largest == 0.0, 0.0, sizes)
    return sizes


@triton.jit(do_not_specialize=["batch", "positions", "total_rows", "pairs"])
def gram_kernel(
    a_ptr,  # (B, T, d_in) or packed (N, d_in)
    g_ptr,  # (B, T, d_out) or packed (N, d_out)
    cu_seqlens_ptr,  # int (B + 1,), read if RAGGED
    partial_ptr,  # fp64 (3, B, pairs): sums of terms, of absolute terms, of |a_t| |g_t|
    stride_ab,
    stride_at,
    stride_ad,
    stride_gb,
    stride_gt,
    stride_gd,
    batch,
    positions,
    total_rows,
    d_in,
    d_out,
    pairs,  # tiles of the lower triangle of the longest example
    RAGGED: tl.constexpr,
    RUN: tl.constexpr,  # positions that are adjacent, see `_check.Segments`
    PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
    INNER: tl.constexpr,
):
    """One tile (r, c), c <= r, of sum_{t,s} (a_t . a_s)(g_t . g_s) of one example.

    The matrix of terms is symmetric, so a tile below the diagonal stands for its mirror image too.
    """
    if RUN > 1:
        positions = multiple(positions, RUN)
        stride_ab, stride_ad = multiple(stride_ab, RUN), multiple(stride_ad, RUN)
        stride_gb, stride_gd = multiple(stride_gb, RUN), multiple(stride_gd, RUN)
    index = tl.program_id(0)
    example = index // pairs
    row_tile, column_tile = triangle(index - example * pairs)
    first_row, length, poison = segment(cu_seqlens_ptr, example, positions, total_rows, RAGGED)
    output = partial_ptr + index
    stride_output = tl.cast(batch, tl.int64) * pairs

    total = poison
    magnitude = poison
    size = poison
    if row_tile * BLOCK < length:
        rows = row_tile * BLOCK + tl.arange(0, BLOCK)
        columns = column_tile * BLOCK + tl.arange(0, BLOCK)
        a_base = example_base(a_ptr, example, stride_ab, first_row, stride_at)
        g_base = example_base(g_ptr, example, stride_gb, first_row, stride_gt)
        if row_tile == column_tile:
            # most tiles of short examples are on the diagonal, and reading them takes the time
            a_products = gram_tile(
                a_base, a_base, rows, rows, stride_at, stride_ad, stride_at, stride_ad,
                length, length, d_in, PRECISION, BLOCK, INNER, OWN=True,
            )  # fmt: skip
            g_products = gram_tile(
                g_base, g_base, rows, rows, stride_gt, stride_gd, stride_gt, stride_gd,
                length, length, d_out, PRECISION, BLOCK, INNER, OWN=True,
            )  # fmt: skip
            terms = a_products * g_products
            total += tl.sum(terms)
            magnitude += tl.sum(tl.abs(terms))
            sizes, doubtful = row_sizes(a_products, g_products, rows, columns)
            doubtful = unless_zero(
                doubtful, g_base, rows, stride_gt, stride_gd, length, d_out, BLOCK, INNER
            )
            size += tl.sum(sizes) + tl.sum(doubtful)
        else:
            a_products = gram_tile(
                a_base, a_base, rows, columns, stride_at, stride_ad, stride_at, stride_ad,
                length, length, d_in, PRECISION, BLOCK, INNER,
            )  # fmt: skip
            g_products = gram_tile(
                g_base, g_base, rows, columns, stride_gt, stride_gd, stride_gt, stride_gd,
                length, length, d_out, PRECISION, BLOCK, INNER,
            )  # fmt: skip
            terms = a_products * g_products
            total += 2.0 * tl.sum(terms)
            magnitude += 2.0 * tl.sum(tl.abs(terms))
    tl.store(output, total)
    tl.store(output + stride_output, magnitude)
    tl.store(output + 2 * stride_output, size)


@triton.jit(
    do_not_specialize=["positions", "total_rows", "batch", "groups", "pairs", "parts", "programs"]
)
def recompute_kernel(
    a_ptr,  # (B * groups, T, d_in) or packed (N, d_in)
    g_ptr,  # (B * groups, T, d_out) or packed (N, d_out)
    cu_seqlens_ptr,  # int (B + 1,), read if RAGGED, of one group
    scratch_ptr,  # fp64: the sums that `is_suspect` reads, then squares (B, parts) of suspects
    result_ptr,  # fp64 (2, B), as `is_suspect` leaves it
    stride_ab,
    stride_at,
    stride_ad,
    stride_gb,
    stride_gt,
    stride_gd,
    positions,
    total_rows,
    d_in,
    d_out,
    batch,
    groups,
    pairs,
    parts,  # tiles of all groups of one example
    programs,  # that share the parts of one example
    adding,
    products,
    cut_off,
    tolerance,
    RAGGED: tl.constexpr,
    RUN: tl.constexpr,  # positions that are adjacent, see `_check.Segments`
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """The squares of some tiles of one example's weight gradients, if its Gram form is suspect."""
    if RUN > 1:
        positions = multiple(positions, RUN)
        stride_ab, stride_ad = multiple(stride_ab, RUN), multiple(stride_ad, RUN)
        stride_gb, stride_gd = multiple(stride_gb, RUN), multiple(stride_gd, RUN)
    index = tl.program_id(0)
    example = index // programs
    first_part = index - example * programs
    if is_suspect(
        scratch_ptr, result_ptr, example, first_part == 0, batch, groups, pairs, adding, products,
        cut_off, tolerance, GROUPS, PAIRS,
    ):  # fmt: skip
        # wrong bounds leave NaN, which is not suspect
        first_row, length, _ = segment(cu_seqlens_ptr, example, positions, total_rows, RAGGED)
        row_tiles = tl.cdiv(d_out, ROWS)
        column_tiles = tl.cdiv(d_in, COLUMNS)
        tiles = row_tiles * column_tiles
        squares = first_square(example, batch, groups, pairs, parts)
        # recompute for each tile what all have in common: registers are the scarcest resource
        for part in tl.range(first_part, parts, programs, disable_licm=True):
            factor = example * groups + part // tiles
            row_tile, column_tile = grouped(part % tiles, row_tiles, column_tiles, GROUP_ROWS)
            gradient = gradient_tile(
                example_base(a_ptr, factor, stride_ab, first_row, stride_at),
                example_base(g_ptr, factor, stride_gb, first_row, stride_gt),
                row_tile * ROWS + tl.arange(0, ROWS),
                column_tile * COLUMNS + tl.arange(0, COLUMNS),
                stride_at, stride_ad, stride_gt, stride_gd, length, d_in, d_out,
                PRECISION, ROWS, COLUMNS, INNER,
            )  # fmt: skip
            tl.store(scratch_ptr + squares + part, tl.sum(gradient * gradient))


def gram_sqnorm(
    a: torch.Tensor,
    g: torch.Tensor,
    groups: int,
    adding: float,
    products: float,
    cut_off: float,
    tolerance: float,
    *,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    config: _config.TileConfig | None = None,
    direct_config: _config.TileConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Squared norms of per-example weight gradients from Gram matrices, doubtful ones recomputed.

    sqnorm_i = sum_{t,s} (a_it . a_is)(g_it . g_is),  magnitude_i = the same of absolute terms,
    size_i = sum_t |a_it| |g_it|,
    bound_i = adding * magnitude_i + max(products * size_i^2, cut_off * magnitude_i),
    each summed over the groups of an example. Where bound_i > tolerance * sqnorm_i both are
    replaced: sqnorm_i by that of `direct.direct_sqnorm`, and bound_i by adding * sqnorm_i.

    The sum can cancel. Adding its terms rounds by about eps * magnitude_i; the inner products of
    rows, however small they are, round by eps * |a_it| |a_is|, eps * size_i^2 in all. Rows of norms
    below 1e-16 are counted larger in size_i, because their products may leave the range of float32.

    Args:
        a: layer inputs (B * groups, T, d_in), or packed (N, d_in) with cu_seqlens; bf16, fp16 or
            fp32, any strides.
        g: gradients with respect to the outputs, (B * groups, T, d_out) or (N, d_out), same dtype.
        groups: factors of one example, adjacent in the batch; 1 for packed rows.
        adding, products, cut_off, tolerance: as of `guard.Rounding`.
        cu_seqlens: int (B + 1,) first rows of the examples, on the host or the device.
        max_seqlen: with device bounds, the longest segment; avoids a wait for the device.
        config, direct_config: override the tile table, for the two forms.
    Returns:
        (sqnorm, bound), each fp64 (B,).
    Raises:
        KernelInputError: before any launch, for inputs that no kernel serves.
    Cost: T^2 (d_in + d_out)(1 + BLOCK / T) flops per example and that of `direct.direct_sqnorm` for
    those that are replaced; workspace 24 bytes per tile pair, 8 per tile of the weight at most.
    Source: Li et al., arXiv 2110.05679.
    """
    plan = _plan(
        gram_kernel, (a, g), cu_seqlens, max_seqlen, _check.precision_of(a.dtype),
        groups, adding, products, cut_off, tolerance, config, direct_config,
    )  # fmt: skip
    sqnorm, bound = plan(a, g)
    return sqnorm, bound


def prepare(
    a: torch.Tensor, g: torch.Tensor, rounding: tuple[float, float, float, float]
) -> guard.Guarded:
    """What `gram_sqnorm` does with one group, for dense operands of the same layout."""
    precision = _check.precision_of(a.dtype)
    return _plan(gram_kernel, (a, g), None, None, precision, 1, *rounding, None, None)


@remembered
def _plan(
    kernel: Any,
    operands: tuple[torch.Tensor, torch.Tensor],
    cu_seqlens: torch.Tensor | None,
    max_seqlen: int | None,
    _precision: str,  # part of the cache's key
    groups: int,
    adding: float,
    products: float,
    cut_off: float,
    tolerance: float,
    config: _config.TileConfig | None,
    direct_config: _config.TileConfig | None,
) -> guard.Guarded:
    a, g = operands
    segments = _check.check_operands(a, g, cu_seqlens, max_seqlen)
    factors, positions = segments.batch, segments.positions
    _check.check_factors(factors, groups, segments.ragged)
    batch = factors // groups
    if not factors * positions:
        return guard.nothing_to_compute(batch)
    run = segments.adjacent_positions(a, g)
    d_in, d_out = a.shape[-1], g.shape[-1]
    kind = _check.kind(a, run > 1 or _check.is_aligned(a, g))
    config = config or _config.choose("gram", positions, positions, *kind, factors)
    direct_config = direct_config or _config.choose("direct", d_out, d_in, *kind)
    side = _config.cdiv(positions, config.rows)
    pairs = side * (side + 1) // 2
    tiles = groups * _config.tiles_of(direct_config, d_out, d_in)
    sums = guard.Sums(batch, groups, pairs, max(1, tiles))
    rounding = guard.Rounding(adding, products, cut_off, tolerance)
    launch = launch_of(
        kernel,
        factors * pairs,
        *segments.strides(a),
        *segments.strides(g),
        factors,
        positions,
        segments.total_rows,
        d_in,
        d_out,
        pairs,
        RAGGED=segments.ragged,
        RUN=run,
        **config.of_positions,
    )
    again = sums.recompute(
        recompute_kernel,
        *segments.strides(a),
        *segments.strides(g),
        positions,
        segments.total_rows,
        d_in,
        d_out,
        rounding=rounding,
        RAGGED=segments.ragged,
        RUN=run,
        GROUP_ROWS=GROUP,
        **direct_config.of_gradients,
    )
    return sums.guarded(launch, again, rounding, segments.cu_seqlens)
