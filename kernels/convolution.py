"""Convolutions: per-example weight gradients tile by tile, patches addressed and never unfolded.

G_i[k] = sum_t g_i[k, t] patch_t(x_i[k])^T for each group k. A transposed convolution is the same
with its input and its output gradient exchanged. One input channel in each group (depthwise) is
memory-bound and has a kernel of its own, `depthwise.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from gradstats.kernels import _check, _config, depthwise
from gradstats.kernels._arranged import Arranged
from gradstats.kernels._launching import Launch, launch_of, remembered
from gradstats.kernels._patches import (
    Convolution,
    check_convolution,
    patch_tile,
    weight_offsets,
    weight_tile,
    weight_tiles,
)
from gradstats.kernels._results import added
from gradstats.kernels._tile import dot, load_tile


@triton.jit
def convolution_gradient(
    x_base,  # pointer to one group of one example of x
    g_base,  # pointer to one group of one example of g
    rows,  # [ROWS] output channels
    column,  # [COLUMNS] channels if ONE_TAP, else tap * channels + channel
    tap,
    stride_xc,
    stride_xd,
    stride_xh,
    stride_xw,
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
    WINDOW: tl.constexpr,
    ONE_TAP: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):
    """[ROWS, COLUMNS] tile of the weight gradient of one group of one example."""
    inner = tl.arange(0, INNER)
    gradient = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, positions, INNER):
        position = start + inner
        g = load_tile(g_base, rows, stride_gc, outputs, position, stride_gt, positions)
        patches = patch_tile(
            x_base, position, positions, column, tap, channels, stride_xc, stride_xd, stride_xh,
            stride_xw, depth, height, width, out_height, out_width, WINDOW, ONE_TAP,
        )  # fmt: skip
        gradient = dot(g, patches, gradient, PRECISION)
    return gradient


@triton.jit
def in_one_group(rows, column, channels, outputs, BLOCKS: tl.constexpr):
    """[ROWS, COLUMNS]: whether two channels are of one group, of BLOCKS groups side by side."""
    return (rows // (outputs // BLOCKS))[:, None] == (column // (channels // BLOCKS))[None, :]


@triton.jit(do_not_specialize=["groups"])
def convolution_kernel(
    x1_ptr,  # (B, C, D, H, W)
    g1_ptr,  # (B, O, T)
    x2_ptr,  # a second factor of the same shapes, read if MODE is "inner"
    g2_ptr,
    weight_ptr,  # (O, C / groups, taps) contiguous, read if MODE is "direction"
    output_ptr,  # fp64 (B, tiles); fp32 (B, O, C / groups, taps) if MODE is "store"
    stride_x1b,
    stride_x1c,
    stride_x1d,
    stride_x1h,
    stride_x1w,
    stride_g1b,
    stride_g1c,
    stride_g1t,
    stride_x2b,
    stride_x2c,
    stride_x2d,
    stride_x2h,
    stride_x2w,
    stride_g2b,
    stride_g2c,
    stride_g2t,
    depth,
    height,
    width,
    out_height,
    out_width,
    positions,
    channels,
    outputs,
    groups,
    MODE: tl.constexpr,
    WINDOW: tl.constexpr,
    ONE_TAP: tl.constexpr,
    BLOCKS: tl.constexpr,  # of the layer's groups side by side in one
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):
    """One tile of one example's weight gradient: its squares, its products, or the tile itself."""
    TAPS: tl.constexpr = WINDOW[0] * WINDOW[1] * WINDOW[2]
    index = tl.program_id(0)
    tiles = groups * weight_tiles(channels, outputs, TAPS, ONE_TAP, ROWS, COLUMNS)
    example = tl.cast(index // tiles, tl.int64)
    group, first_row, tap, first_column = weight_tile(
        index % tiles, channels, outputs, TAPS, ONE_TAP, ROWS, COLUMNS
    )
    rows = first_row + tl.arange(0, ROWS)
    column = first_column + tl.arange(0, COLUMNS)
    x_channel = tl.cast(group, tl.int64) * channels
    g_channel = tl.cast(group, tl.int64) * outputs
    gradient = convolution_gradient(
        x1_ptr + example * stride_x1b + x_channel * stride_x1c,
        g1_ptr + example * stride_g1b + g_channel * stride_g1c,
        rows, column, tap, stride_x1c, stride_x1d, stride_x1h, stride_x1w, stride_g1c, stride_g1t,
        depth, height, width, out_height, out_width, positions, channels, outputs, WINDOW, ONE_TAP,
        PRECISION, ROWS, COLUMNS, INNER,
    )  # fmt: skip
    if BLOCKS > 1:
        own = in_one_group(rows, column, channels, outputs, BLOCKS)
        gradient = tl.where(own, gradient, 0.0)
    if MODE == "square":
        tl.store(output_ptr + index, tl.sum(gradient * gradient))
    elif MODE == "inner":
        second = convolution_gradient(
            x2_ptr + example * stride_x2b + x_channel * stride_x2c,
            g2_ptr + example * stride_g2b + g_channel * stride_g2c,
            rows, column, tap, stride_x2c, stride_x2d, stride_x2h, stride_x2w, stride_g2c,
            stride_g2t, depth, height, width, out_height, out_width, positions, channels, outputs,
            WINDOW, ONE_TAP, PRECISION, ROWS, COLUMNS, INNER,
        )  # fmt: skip
        tl.store(output_ptr + index, tl.sum(gradient * second))
    else:
        own_channels = channels // BLOCKS
        if BLOCKS > 1:
            offsets, mask = weight_offsets(
                rows, column % own_channels, tap, own_channels, outputs, TAPS, ONE_TAP
            )
            mask = mask & own & (column < channels)[None, :]
        else:
            offsets, mask = weight_offsets(rows, column, tap, channels, outputs, TAPS, ONE_TAP)
        offsets += g_channel * own_channels * TAPS
        if MODE == "direction":
            direction = tl.load(weight_ptr + offsets, mask=mask, other=0.0)
            tl.store(output_ptr + index, tl.sum(gradient * direction.to(tl.float32)))
        else:
            output = output_ptr + example * groups * outputs * own_channels * TAPS
            tl.store(output + offsets, gradient, mask=mask)


def convolution_sqnorm(
    x: torch.Tensor,
    g: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    *,
    config: _config.TileConfig | None = None,
) -> torch.Tensor:
    """Squared norms of the per-example weight gradients of a convolution, tile by tile.

    sqnorm_i = sum_k |sum_t g_i[k, t] patch_t(x_i[k])^T|_F^2 over the groups k

    Args:
        x: inputs (B, C, *spatial), one to three spatial axes; bf16, fp16 or fp32, any strides,
            channels last or first.
        g: gradients with respect to the outputs, (B, O, *positions), same dtype. Positions that
            cannot be addressed as one axis are copied.
        kernel, stride, padding, dilation: one number for each spatial axis.
        groups: how channels divide.
        config: overrides the tile table.
    Returns:
        fp64 (B,).
    Raises:
        KernelInputError: before any launch, for inputs that no kernel serves.
    Cost: 2 T O (C / groups) taps flops per example, as the weight gradient; workspace 8 bytes per
    tile, and a copy of each operand whose channels are not adjacent where that is faster.
    """
    layer = (tuple(kernel), tuple(stride), tuple(padding), tuple(dilation), groups)
    precision = _check.precision_of(x.dtype)
    return _plan_squares(convolution_kernel, (x, g), layer, precision, config)(x, g)


def prepare(x: torch.Tensor, g: torch.Tensor, geometry: tuple) -> Arranged:
    """What `convolution_sqnorm` does, for operands of the same layout."""
    precision = _check.precision_of(x.dtype)
    return _plan_squares(convolution_kernel, (x, g), geometry, precision, None)


def convolution_inner(
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
    """Inner products of the i-th per-example weight gradients of a convolution in two batches.

    Args, returns, raises: as `convolution_sqnorm`, for two factors of equal shapes.
    Cost: twice that of `convolution_sqnorm`.
    """
    layer = kernel, stride, padding, dilation, groups
    first, second = check_two_convolutions(x1, g1, x2, g2, *layer)
    if first.x.shape != second.x.shape:
        raise _check.KernelInputError(
            "diagonal pairs need equal batches of images of one size; got inputs "
            f"{tuple(first.x.shape)} and {tuple(second.x.shape)}: pass images of other sizes to "
            "convolution_inner_gram or pairwise_convolution"
        )
    return added(_launch(first, second, None, "inner", config))


def convolution_direction(
    x: torch.Tensor,
    g: torch.Tensor,
    direction: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    *,
    config: _config.TileConfig | None = None,
) -> torch.Tensor:
    """Inner products of every per-example weight gradient with one direction in weight space.

    Args, raises: as `convolution_sqnorm`, and
        direction: (O, C / groups, *kernel), bf16, fp16 or fp32.
    Returns:
        fp64 (B,).
    Cost: that of `convolution_sqnorm`, and one read of the direction for each example.
    """
    layer = check_convolution(x, g, kernel, stride, padding, dilation, groups).arranged()
    if tuple(direction.shape) != layer.weight_shape or direction.device != x.device:
        raise _check.KernelInputError(
            f"direction must be {layer.weight_shape} on {x.device}; got {tuple(direction.shape)} "
            f"on {direction.device}: pass a direction of the weight's shape, where the inputs lie"
        )
    return added(_launch(layer, layer, direction, "direction", config))


def check_two_convolutions(
    x1: torch.Tensor,
    g1: torch.Tensor,
    x2: torch.Tensor,
    g2: torch.Tensor,
    *layer: Sequence[int] | int,
) -> tuple[Convolution, Convolution]:
    """Checks two factors, each as `check_convolution` does, and that their weights have one shape.

    Returns both as `Convolution.arranged` does.
    """
    first, second = check_convolution(x1, g1, *layer), check_convolution(x2, g2, *layer)
    _check.check_tensors(first.x, second.x)
    if first.weight_shape != second.weight_shape:
        raise _check.KernelInputError(
            f"the two factors must be of one weight; got {first.weight_shape} and "
            f"{second.weight_shape}: both must come from the same layer"
        )
    same = x1 is x2 and g1 is g2
    first = first.arranged()
    return first, first if same else second.arranged()


def stored(layer: Convolution, config: _config.TileConfig | None) -> torch.Tensor:
    """Per-example gradients of the layer's weight, fp32 (B, weights)."""
    return _launch(layer, layer, None, "store", config)


def choose_tiles(
    first: Convolution,
    second: Convolution,
    config: _config.TileConfig | None,
    operation: str,
) -> tuple[_config.TileConfig, bool, int]:
    """(configuration, whether tiles stay within one tap, number of tiles of the weight)."""
    one_tap = first.one_tap
    columns = first.channels if one_tap else first.channels * first.taps
    kind = _check.kind(first.x, first.aligned and second.aligned)
    factors = first.batch * first.groups * (first.taps if one_tap else 1)
    config = config or _config.choose(operation, first.outputs, columns, *kind, factors)
    tiles = _config.tiles_of(config, first.outputs, columns)
    return config, one_tap, first.groups * tiles * (first.taps if one_tap else 1)


class _Plan(NamedTuple):
    """All of a call but its tensors."""

    shape: tuple[int, ...]  # of the results: examples, and tiles or the weight's own
    dtype: torch.dtype  # of these
    launch: Launch | None  # None where there is nothing to compute

    def __call__(self, *operands: torch.Tensor | None) -> torch.Tensor:
        """(B, tiles) or (B, weights), of inputs and gradients of two factors, and a direction."""
        assert operands[0] is not None
        output = torch.empty(self.shape, dtype=self.dtype, device=operands[0].device)
        if self.launch is not None:
            self.launch(*operands, output)
        return output.flatten(1)


@remembered
def _plan_squares(
    kernel: Any,
    operands: tuple[torch.Tensor, torch.Tensor],
    geometry: tuple,
    _precision: str,  # part of the cache's key
    config: _config.TileConfig | None,
) -> Arranged:
    layer = check_convolution(*operands, *geometry).arranged()
    plan: Any
    if layer.channels == 1:
        plan = depthwise.plan(layer, layer, "square", config)
    else:
        plan = _plan(kernel, layer, layer, "square", config)

    def squares(x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        return added(plan(x, g, x, g, None))

    return layer.computed(operands, squares)


def _launch(
    first: Convolution,
    second: Convolution,
    direction: torch.Tensor | None,
    mode: str,
    config: _config.TileConfig | None,
) -> torch.Tensor:
    if direction is not None:
        direction = direction.contiguous()
    if first.channels == 1:
        whole = depthwise.plan(first, second, mode, config)
        return whole(first.x, first.g, second.x, second.g, direction)
    plan = _plan(convolution_kernel, first, second, mode, config)
    return plan(first.x, first.g, second.x, second.g, direction)


def _plan(
    kernel: Any,
    first: Convolution,
    second: Convolution,
    mode: str,
    config: _config.TileConfig | None,
) -> _Plan:
    first, second = first.widened(), second.widened()
    operation = "convolution_fused" if mode == "inner" else "convolution"
    config, one_tap, tiles = choose_tiles(first, second, config, operation)
    shape = (first.batch, *first.weight_shape) if mode == "store" else (first.batch, tiles)
    dtype = torch.float32 if mode == "store" else torch.float64
    launch = None
    if math.prod(shape):
        launch = launch_of(
            kernel,
            first.batch * tiles,
            *first.strides,
            *second.strides,
            *first.sizes,
            *first.divisions,
            MODE=mode,
            WINDOW=first.window,
            ONE_TAP=one_tap,
            BLOCKS=first.blocks,
            **config.of_gradients,
        )
    return _Plan(shape, dtype, launch)
