"""Convolutions with few positions: squared norms through products of patches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from gradstats.kernels import _check, _config
from gradstats.kernels._launching import launch_kernel
from gradstats.kernels._patches import check_convolution, patch_products, patch_tile
from gradstats.kernels._results import apart
from gradstats.kernels._tile import dot, triangle
from gradstats.kernels.gram import gram_tile, own_gram_tile, row_sizes


@triton.jit
def own_patch_products(
    x_base,  # pointer to the first channel of one group of an example
    position,  # [BLOCK] positions; at or past `positions` they read as zero
    positions,
    stride_xc,
    stride_xd,
    stride_xh,
    stride_xw,
    depth,
    height,
    width,
    out_height,
    out_width,
    channels,
    WINDOW: tl.constexpr,
    ONE_TAP: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
    INNER: tl.constexpr,
):
    """[BLOCK, BLOCK] inner products of patches with each other, each read once."""
    TAPS: tl.constexpr = WINDOW[0] * WINDOW[1] * WINDOW[2]
    inner = tl.arange(0, INNER)
    products = tl.zeros((BLOCK, BLOCK), tl.float32)
    steps_per_tap = tl.cdiv(channels if ONE_TAP else channels * TAPS, INNER)
    for step in range(0, steps_per_tap * TAPS if ONE_TAP else steps_per_tap):
        column = (step % steps_per_tap) * INNER + inner
        patches = patch_tile(
            x_base, position, positions, column, step // steps_per_tap, channels, stride_xc,
            stride_xd, stride_xh, stride_xw, depth, height, width, out_height, out_width, WINDOW,
            ONE_TAP,
        )  # fmt: skip
        products = dot(patches, patches.T, products, PRECISION)
    return products


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
        # of few positions all tiles are such, and what is read decides
        products = own_patch_products(
            x_base, rows, positions, stride_xc, stride_xd, stride_xh, stride_xw,
            depth, height, width, out_height, out_width,
            channels, WINDOW, ONE_TAP, PRECISION, BLOCK, INNER,
        )  # fmt: skip
        g_products = own_gram_tile(
            g_base, rows, stride_gt, stride_gc, positions, outputs, PRECISION, BLOCK, INNER
        )
        terms = products * g_products
        total = tl.sum(terms)
        magnitude = tl.sum(tl.abs(terms))
        size += row_sizes(products, g_products, rows, columns)
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


def convolution_gram_sqnorm(
    x: torch.Tensor,
    g: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    *,
    precision: str | None = None,
    config: _config.TileConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Squared norms of the per-example weight gradients of a convolution, through Gram matrices.

    sqnorm_i = sum over groups and positions t, s of (patch_t . patch_s)(g_it . g_is),
    magnitude_i = the same of absolute terms,
    size_i^2 = sum over groups of (sum_t |patch_t| |g_it|)^2

    Rounding errors are those of `gram.gram_sqnorm`; where they are too much use
    `convolution_sqnorm`.

    Args, raises: as `convolution.convolution_sqnorm`.
    Returns:
        (sqnorm, magnitude, size), each fp64 (B,).
    Cost: T^2 ((C / groups) taps + O / groups)(1 + BLOCK / T) flops per example and group;
    workspace 24 bytes per tile pair, and the copies of `convolution.convolution_sqnorm`.
    """
    layer = check_convolution(x, g, kernel, stride, padding, dilation, groups).arranged()
    config = config or _config.choose_gram(
        layer.positions,
        x.element_size(),
        _check.check_precision(x.dtype, precision),
        _check.architecture(x.device),
        layer.aligned,
        "convolution_gram",
    )
    side = _config.cdiv(layer.positions, config.rows)
    pairs = side * (side + 1) // 2
    shape = (3, layer.batch, groups, pairs)
    partial = torch.empty(shape, dtype=torch.float64, device=x.device)
    if partial.numel():
        launch_kernel(
            convolution_gram_kernel,
            partial[0].numel(),
            layer.x,
            layer.g,
            partial,
            *layer.strides,
            *layer.sizes,
            *layer.divisions,
            layer.batch,
            pairs,
            WINDOW=layer.window,
            ONE_TAP=layer.one_tap,
            PRECISION=config.precision,
            BLOCK=config.rows,
            INNER=config.inner,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
    sqnorm, magnitude = apart(partial[:2])
    return sqnorm, magnitude, partial[2].sum(2).square().sum(1).sqrt()
