"""Convolutions: the weight gradient and per-example squared norms from one kernel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from gradstats.kernels import _check, _config, depthwise
from gradstats.kernels._launching import launch_kernel
from gradstats.kernels._patches import (
    check_convolution,
    patch_tile,
    weight_offsets,
    weight_tile,
    weight_tiles,
)
from gradstats.kernels._results import added
from gradstats.kernels._tile import dot, load_tile
from gradstats.kernels.convolution import choose_tiles


@triton.jit(do_not_specialize=["batch", "groups", "examples_per_split"])
def convolution_weight_gradient_kernel(
    x_ptr,  # (B, C, D, H, W)
    g_ptr,  # (B, O, T)
    gradient_ptr,  # (splits, O, C / groups, taps) contiguous: sums over each range of examples
    partial_ptr,  # fp64 (B, tiles)
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
    examples_per_split,
    WINDOW: tl.constexpr,
    ONE_TAP: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):
    """One tile of sum_b G_b over a range of examples, and partial[b, tile] = |tile of G_b|^2.

    One flat loop over (example, block of positions), as for linear layers.
    """
    TAPS: tl.constexpr = WINDOW[0] * WINDOW[1] * WINDOW[2]
    index = tl.program_id(0)
    tiles = groups * weight_tiles(channels, outputs, TAPS, ONE_TAP, ROWS, COLUMNS)
    split = index // tiles
    tile = index - split * tiles
    group, first_row, tap, first_column = weight_tile(
        tile, channels, outputs, TAPS, ONE_TAP, ROWS, COLUMNS
    )
    rows = first_row + tl.arange(0, ROWS)
    column = first_column + tl.arange(0, COLUMNS)
    inner = tl.arange(0, INNER)
    g_channel = tl.cast(group, tl.int64) * outputs
    x_group = x_ptr + tl.cast(group, tl.int64) * channels * stride_xc
    g_group = g_ptr + g_channel * stride_gc

    example = split * examples_per_split
    last_example = tl.minimum(example + examples_per_split, batch)
    start = 0
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    gradient = tl.zeros((ROWS, COLUMNS), tl.float32)
    for _ in range(0, (last_example - example) * tl.cdiv(positions, INNER)):
        position = start + inner
        g_base = g_group + tl.cast(example, tl.int64) * stride_gb
        x_base = x_group + tl.cast(example, tl.int64) * stride_xb
        g = load_tile(g_base, rows, stride_gc, outputs, position, stride_gt, positions)
        patches = patch_tile(
            x_base, position, positions, column, tap, channels, stride_xc, stride_xd, stride_xh,
            stride_xw, depth, height, width, out_height, out_width, WINDOW, ONE_TAP,
        )  # fmt: skip
        gradient = dot(g, patches, gradient, PRECISION)

        ends = start + INNER >= positions
        if ends:
            squares = tl.sum(gradient * gradient)
            tl.store(partial_ptr + tl.cast(example, tl.int64) * tiles + tile, squares)
            total += gradient
            gradient = tl.zeros((ROWS, COLUMNS), tl.float32)
        # where the walk stands is kept apart from the sums, so that loads can run ahead of them
        start = tl.where(ends, 0, start + INNER)
        example = tl.where(ends, example + 1, example)

    offsets, mask = weight_offsets(rows, column, tap, channels, outputs, TAPS, ONE_TAP)
    offsets += (tl.cast(split, tl.int64) * groups * outputs + g_channel) * channels * TAPS
    tl.store(gradient_ptr + offsets, total.to(gradient_ptr.dtype.element_ty), mask=mask)


def convolution_weight_gradient_sqnorm(
    x: torch.Tensor,
    g: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    *,
    precision: str | None = None,
    gradient_dtype: torch.dtype | None = None,
    config: _config.TileConfig | None = None,
    splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight gradient of the summed loss and the squared norm of every example's share in it.

    Args, raises: as `convolution.convolution_sqnorm`, and
        gradient_dtype: dtype of the gradient; None means that of x. Sums are fp32 either way.
        splits: overrides the number of ranges that the examples are split into.
    Returns:
        (gradient (O, C / groups, *kernel), sqnorm fp64 (B,)).
    Cost: that of the weight gradient alone, positions rounded up to a multiple of the
    configuration's `inner`; workspace 8 bytes per example and tile, 4 bytes per split and weight
    where the examples are split, and the copies of `convolution.convolution_sqnorm`.
    """
    layer = check_convolution(x, g, kernel, stride, padding, dilation, groups).arranged()
    gradient_dtype = gradient_dtype or x.dtype
    if layer.channels == 1:
        return depthwise.summed(layer, gradient_dtype, config, splits)
    config, one_tap, tiles = choose_tiles(layer, layer, precision, config, "convolution_fused")
    batch, shape = layer.batch, layer.weight_shape
    partial = torch.empty((batch, tiles), dtype=torch.float64, device=x.device)
    if not partial.numel() or not layer.positions:
        gradient = torch.zeros(shape, dtype=gradient_dtype, device=x.device)
        return gradient, torch.zeros(batch, dtype=torch.float64, device=x.device)
    architecture = _check.architecture(x.device)
    splits = min(splits or _config.choose_splits(tiles, batch, architecture), batch)
    examples_per_split = _config.cdiv(batch, splits)
    splits = _config.cdiv(batch, examples_per_split)
    gradient = torch.empty(
        (splits, *shape),
        dtype=gradient_dtype if splits == 1 else torch.float32,
        device=x.device,
    )
    launch_kernel(
        convolution_weight_gradient_kernel,
        tiles * splits,
        layer.x,
        layer.g,
        gradient,
        partial,
        *layer.strides,
        *layer.sizes,
        *layer.divisions,
        batch,
        examples_per_split,
        WINDOW=layer.window,
        ONE_TAP=one_tap,
        PRECISION=config.precision,
        ROWS=config.rows,
        COLUMNS=config.columns,
        INNER=config.inner,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    summed = gradient[0] if splits == 1 else gradient.sum(0).to(gradient_dtype)
    return summed, added(partial)
