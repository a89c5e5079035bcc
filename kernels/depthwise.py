"""Depthwise convolutions: one input channel in each group, so there are no matrix products.

G_i[o, tap] = sum_t g_i[o, t] x_i[channel of o, position t under the tap]. The kernels stream.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from gradstats.kernels import _check, _config, _streaming
from gradstats.kernels._launching import Launch, launch_of
from gradstats.kernels._patches import Convolution


@triton.jit
def depthwise_gradient(
    x_base,  # pointer to one example of x
    g_base,  # pointer to one example of g
    tap,  # [TAPS]
    row,  # [CHANNELS] output channels
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
    outputs,  # output channels of one group
    rows,  # output channels of all groups
    WINDOW: tl.constexpr,
    TAPS: tl.constexpr,
    CHANNELS: tl.constexpr,
    INNER: tl.constexpr,
):
    """[TAPS, CHANNELS] tile of the weight gradient of one example."""
    inside_rows = (row < rows)[:, None]
    inside_taps = (tap < WINDOW[0] * WINDOW[1] * WINDOW[2])[:, None]
    g_rows = (tl.cast(row, tl.int64) * stride_gc)[:, None]
    x_rows = (tl.cast(row // outputs, tl.int64) * stride_xc)[None, :, None]
    tap_d = (tap // (WINDOW[1] * WINDOW[2]) * WINDOW[9] - WINDOW[6])[:, None]
    tap_h = (tap // WINDOW[2] % WINDOW[1] * WINDOW[10] - WINDOW[7])[:, None]
    tap_w = (tap % WINDOW[2] * WINDOW[11] - WINDOW[8])[:, None]

    # sum over lanes once, at the end: a reduction inside the loop would stall every load
    sums = tl.zeros((TAPS, CHANNELS, INNER), tl.float32)
    for start in range(0, positions, INNER):
        position = start + tl.arange(0, INNER)
        inside = (position < positions)[None, :]
        g = tl.load(
            g_base + g_rows + tl.cast(position, tl.int64)[None, :] * stride_gt,
            mask=inside_rows & inside,
            other=0.0,
        )
        rest = position // out_width
        d = ((rest // out_height) * WINDOW[3])[None, :] + tap_d
        h = ((rest % out_height) * WINDOW[4])[None, :] + tap_h
        w = ((position % out_width) * WINDOW[5])[None, :] + tap_w
        inside = inside & inside_taps & (d >= 0) & (d < depth)
        inside = inside & (h >= 0) & (h < height) & (w >= 0) & (w < width)
        places = (
            tl.cast(d, tl.int64) * stride_xd
            + tl.cast(h, tl.int64) * stride_xh
            + tl.cast(w, tl.int64) * stride_xw
        )
        x = tl.load(
            x_base + places[:, None, :] + x_rows,
            mask=inside[:, None, :] & inside_rows[None, :, :],
            other=0.0,
        )
        sums += x.to(tl.float32) * g.to(tl.float32)[None, :, :]
    return tl.sum(sums, axis=2)


@triton.jit
def depthwise_gradient_by_lines(
    x_base,  # pointer to one example of x
    g_base,  # pointer to one example of g
    tap,  # [TAPS]
    row,  # [CHANNELS] output channels
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
    outputs,  # output channels of one group
    rows,  # output channels of all groups
    WINDOW: tl.constexpr,
    TAPS: tl.constexpr,
    CHANNELS: tl.constexpr,
    INNER: tl.constexpr,
    ACROSS: tl.constexpr,  # positions of one line that a block holds
):
    """As `depthwise_gradient`, in blocks of LINES lines of an image.

    Channels are read in whole vectors, so that few products share an address. So its parts are
    computed once where possible, and positions need not be divided into axes.
    """
    LINES: tl.constexpr = INNER // ACROSS
    inside_rows = (row < rows)[:, None]
    inside_taps = (tap < WINDOW[0] * WINDOW[1] * WINDOW[2])[:, None]
    lane = tl.arange(0, INNER)
    below = lane // ACROSS
    beside = lane % ACROSS
    g_lanes = (below * out_width + beside)[None, :]
    g_lanes = tl.cast(g_lanes, tl.int64) * stride_gt
    g_lanes += (tl.cast(row, tl.int64) * stride_gc)[:, None]
    tap_d = (tap // (WINDOW[1] * WINDOW[2]) * WINDOW[9] - WINDOW[6])[:, None]
    tap_h = (tap // WINDOW[2] % WINDOW[1] * WINDOW[10] - WINDOW[7])[:, None]
    tap_w = (tap % WINDOW[2] * WINDOW[11] - WINDOW[8])[:, None]
    lane_h = tap_h + (below * WINDOW[4])[None, :]
    lane_w = tap_w + (beside * WINDOW[5])[None, :]
    lanes = tl.cast(lane_h, tl.int64) * stride_xh + tl.cast(lane_w, tl.int64) * stride_xw
    lanes = lanes + tl.cast(tap_d, tl.int64) * stride_xd
    x_lanes = lanes[:, None, :] + (tl.cast(row // outputs, tl.int64) * stride_xc)[None, :, None]

    sums = tl.zeros((TAPS, CHANNELS, INNER), tl.float32)
    for plane in range(0, positions // (out_height * out_width)):
        d = plane * WINDOW[3] + tap_d
        inside_plane = inside_taps & (d >= 0) & (d < depth)
        x_plane = x_base + tl.cast(plane, tl.int64) * WINDOW[3] * stride_xd
        for line in range(0, out_height, LINES):
            x_line = x_plane + tl.cast(line, tl.int64) * WINDOW[4] * stride_xh
            g_line = g_base + (tl.cast(plane, tl.int64) * out_height + line) * out_width * stride_gt
            h = line * WINDOW[4] + lane_h
            inside_lines = inside_plane & (h >= 0) & (h < height)
            for first in range(0, out_width, ACROSS):
                inside = ((line + below < out_height) & (first + beside < out_width))[None, :]
                start = tl.cast(first, tl.int64)
                g = tl.load(
                    g_line + start * stride_gt + g_lanes, mask=inside_rows & inside, other=0.0
                )
                w = first * WINDOW[5] + lane_w
                inside = inside & inside_lines & (w >= 0) & (w < width)
                x = tl.load(
                    x_line + start * WINDOW[5] * stride_xw + x_lanes,
                    mask=inside[:, None, :] & inside_rows[None, :, :],
                    other=0.0,
                )
                sums += x.to(tl.float32) * g.to(tl.float32)[None, :, :]
    return tl.sum(sums, axis=2)


@triton.jit
def example_gradient(
    x_base, g_base, tap, row, stride_xc, stride_xd, stride_xh, stride_xw, stride_gc, stride_gt,
    depth, height, width, out_height, out_width, positions, outputs, rows, WINDOW: tl.constexpr,
    TAPS: tl.constexpr, CHANNELS: tl.constexpr, INNER: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """[TAPS, CHANNELS] tile of the weight gradient of one example."""
    if ACROSS:
        return depthwise_gradient_by_lines(
            x_base, g_base, tap, row, stride_xc, stride_xd, stride_xh, stride_xw, stride_gc,
            stride_gt, depth, height, width, out_height, out_width, positions, outputs, rows,
            WINDOW, TAPS, CHANNELS, INNER, ACROSS,
        )  # fmt: skip
    else:
        return depthwise_gradient(
            x_base, g_base, tap, row, stride_xc, stride_xd, stride_xh, stride_xw, stride_gc,
            stride_gt, depth, height, width, out_height, out_width, positions, outputs, rows,
            WINDOW, TAPS, CHANNELS, INNER,
        )  # fmt: skip


@triton.jit(do_not_specialize=["batch", "examples_per_program"])
def depthwise_kernel(
    x1_ptr,  # (B, C, D, H, W)
    g1_ptr,  # (B, O, T)
    x2_ptr,  # a second factor of the same shapes, read if MODE is "inner"
    g2_ptr,
    weight_ptr,  # (O, taps) contiguous, read if MODE is "direction"
    output_ptr,  # fp64 (B, tiles); fp32 (B, O, taps) if MODE is "store"
    total_ptr,  # (programs / tiles, O, taps): sums over examples, written if MODE is "sum"
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
    outputs,
    rows,
    batch,
    examples_per_program,
    MODE: tl.constexpr,
    WINDOW: tl.constexpr,
    TAPS: tl.constexpr,
    CHANNELS: tl.constexpr,
    INNER: tl.constexpr,
    ACROSS: tl.constexpr,  # positions of one line in a block, 0 for blocks of any positions
):
    """One tile of the weight gradients of some examples: squares, products, sums, or the tiles."""
    ALL_TAPS: tl.constexpr = WINDOW[0] * WINDOW[1] * WINDOW[2]
    TAP_TILES: tl.constexpr = (ALL_TAPS + TAPS - 1) // TAPS
    index = tl.program_id(0)
    tiles = tl.cdiv(rows, CHANNELS) * TAP_TILES
    part = index // tiles
    tile = index - part * tiles
    tap = (tile % TAP_TILES) * TAPS + tl.arange(0, TAPS)
    row = (tile // TAP_TILES) * CHANNELS + tl.arange(0, CHANNELS)
    offsets = tl.cast(row, tl.int64)[None, :] * ALL_TAPS + tap[:, None]
    mask = (row < rows)[None, :] & (tap < ALL_TAPS)[:, None]
    if MODE == "direction":
        direction = tl.load(weight_ptr + offsets, mask=mask, other=0.0).to(tl.float32)

    total = tl.zeros((TAPS, CHANNELS), tl.float32)
    first = part * examples_per_program
    for number in range(first, tl.minimum(first + examples_per_program, batch)):
        example = tl.cast(number, tl.int64)
        gradient = example_gradient(
            x1_ptr + example * stride_x1b, g1_ptr + example * stride_g1b, tap, row, stride_x1c,
            stride_x1d, stride_x1h, stride_x1w, stride_g1c, stride_g1t, depth, height, width,
            out_height, out_width, positions, outputs, rows, WINDOW, TAPS, CHANNELS, INNER,
            ACROSS,
        )  # fmt: skip
        output = output_ptr + example * tiles + tile
        if MODE == "store":
            tl.store(output_ptr + example * rows * ALL_TAPS + offsets, gradient, mask=mask)
        elif MODE == "inner":
            second = example_gradient(
                x2_ptr + example * stride_x2b, g2_ptr + example * stride_g2b, tap, row, stride_x2c,
                stride_x2d, stride_x2h, stride_x2w, stride_g2c, stride_g2t, depth, height, width,
                out_height, out_width, positions, outputs, rows, WINDOW, TAPS, CHANNELS, INNER,
                ACROSS,
            )  # fmt: skip
            tl.store(output, tl.sum(gradient * second))
        elif MODE == "direction":
            tl.store(output, tl.sum(gradient * direction))
        else:
            tl.store(output, tl.sum(gradient * gradient))
            total += gradient
    if MODE == "sum":
        target = total_ptr + tl.cast(part, tl.int64) * rows * ALL_TAPS + offsets
        tl.store(target, total.to(total_ptr.dtype.element_ty), mask=mask)


def across(height: int, width: int, inner: int) -> int:
    """Positions of one line in a block of `inner`: as many as cover lines with fewest lanes."""
    options = [8 << shift for shift in range(10) if 8 << shift <= inner] or [inner]

    def lanes(size: int) -> tuple[int, int]:
        lines = inner // size
        return _config.cdiv(width, size) * size * _config.cdiv(height, lines) * lines, -size

    return min(options, key=lanes)


class Plan(NamedTuple):
    """All of a call but its tensors."""

    shape: tuple[int, ...]  # of the results: examples, and tiles or the weight's own
    dtype: torch.dtype  # of these
    sums: tuple[int, int, int]  # shape of the sums of every range of examples
    launch: Launch | None  # None where there is nothing to compute

    def __call__(self, *operands: torch.Tensor | None) -> torch.Tensor:
        """(B, tiles) or (B, weights), of inputs and gradients of two factors, and a direction."""
        return self.both(*operands)[0]

    def both(self, *operands: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The same and the sums, which are empty unless the mode is "sum"."""
        assert operands[0] is not None
        device = operands[0].device
        output = torch.empty(self.shape, dtype=self.dtype, device=device)
        sums = torch.empty(self.sums, dtype=torch.float32, device=device)
        if self.launch is not None:
            self.launch(*operands, output, sums)
        return output.flatten(1), sums


def plan(
    first: Convolution,
    second: Convolution,
    mode: str,
    config: _config.TileConfig | None,
    splits: int | None = None,
) -> Plan:
    """The launch for operands of this layout; a direction is contiguous.

    Modes are those of `depthwise_kernel`.
    """
    batch, rows = first.batch, first.g.shape[1]
    adjacent = first.channels_last and first.g.stride(1) == 1
    by_lines = adjacent and first.outputs == 1 and first.aligned and second.aligned
    if config is None and by_lines:
        config = _streaming.choose_depthwise_lines(first.positions)
    elif config is None:
        config = _streaming.choose_depthwise(first.positions, adjacent)
    tiles = _config.tiles_of(config, first.taps, rows)
    parts = batch
    if mode == "sum":
        architecture = _check.architecture(first.x.device)
        parts = min(splits or _config.choose_row_splits(tiles, batch, architecture), batch)
    per_program = _config.cdiv(batch, max(parts, 1))
    parts = _config.cdiv(batch, max(per_program, 1))
    shape = (batch, rows, first.taps) if mode == "store" else (batch, tiles)
    launch = None
    if math.prod(shape):
        launch = launch_of(
            depthwise_kernel,
            parts * tiles,
            *first.strides,
            *second.strides,
            *first.sizes,
            first.outputs,
            rows,
            batch,
            per_program,
            MODE=mode,
            WINDOW=first.window,
            TAPS=config.rows,
            CHANNELS=config.columns,
            INNER=config.inner,
            ACROSS=across(first.out[1], first.out[2], config.inner) if by_lines else 0,
            **config.options,
        )
    dtype = torch.float32 if mode == "store" else torch.float64
    return Plan(shape, dtype, (parts if mode == "sum" else 0, rows, first.taps), launch)
