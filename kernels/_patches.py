"""Image patches, addressed in place: geometry on the host, tiles on the device.

All convolutions are lifted to three spatial axes. The columns of a patch are ordered by tap, then
by channel, so that a tile of columns reads adjacent channels under one tap.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from gradstats.kernels import _check
from gradstats.kernels._arranged import Arranged, channels_last, flat, flat_channels_last
from gradstats.kernels._tile import dot

# Channels up to which several groups share one tile.
SIDE_BY_SIDE = 64


@triton.jit
def patch_tile(
    base,  # pointer to the first channel of one group of one example
    position,  # [INNER] positions
    positions,  # positions at or past this index read as zero
    column,  # [COLUMNS] channels if ONE_TAP, else tap * channels + channel
    tap,  # the tap, if ONE_TAP
    channels,
    stride_xc,
    stride_xd,
    stride_xh,
    stride_xw,
    depth,
    height,
    width,
    out_height,
    out_width,
    WINDOW: tl.constexpr,  # kernel, stride, padding, dilation: three numbers each
    ONE_TAP: tl.constexpr,
):
    """The [INNER, COLUMNS] tile of the patches at `position`; zero in the padding and outside."""
    rest = position // out_width
    d = (rest // out_height) * WINDOW[3] - WINDOW[6]
    h = (rest % out_height) * WINDOW[4] - WINDOW[7]
    w = (position % out_width) * WINDOW[5] - WINDOW[8]
    if ONE_TAP:
        channel = column
        inside_columns = column < channels
    else:
        tap = column // channels
        channel = column - tap * channels
        inside_columns = tap < WINDOW[0] * WINDOW[1] * WINDOW[2]
    tap_d = (tap // (WINDOW[1] * WINDOW[2])) * WINDOW[9]
    tap_h = (tap // WINDOW[2] % WINDOW[1]) * WINDOW[10]
    tap_w = (tap % WINDOW[2]) * WINDOW[11]
    if ONE_TAP:
        d += tap_d
        h += tap_h
        w += tap_w
        inside = (position < positions) & (d >= 0) & (d < depth)
        inside = inside & (h >= 0) & (h < height) & (w >= 0) & (w < width)
        mask = inside[None, :] & inside_columns[:, None]
        columns = tl.cast(channel, tl.int64) * stride_xc
    else:
        mask = (position < positions)[None, :]
        mask = mask & inside_columns[:, None]
        at = h[None, :] + tap_h[:, None]
        mask = mask & (at >= 0) & (at < height)
        at = w[None, :] + tap_w[:, None]
        mask = mask & (at >= 0) & (at < width)
        at = d[None, :] + tap_d[:, None]
        mask = mask & (at >= 0) & (at < depth)
        columns = (
            tl.cast(channel, tl.int64) * stride_xc
            + tl.cast(tap_d, tl.int64) * stride_xd
            + tl.cast(tap_h, tl.int64) * stride_xh
            + tl.cast(tap_w, tl.int64) * stride_xw
        )
    rows = (
        tl.cast(d, tl.int64) * stride_xd
        + tl.cast(h, tl.int64) * stride_xh
        + tl.cast(w, tl.int64) * stride_xw
    )
    # Positions are the last axis: where channels come first, the compiler cannot see that positions
    # are adjacent, and lets lanes run along the last axis.
    offsets = rows[None, :] + columns[:, None]
    return tl.load(base + offsets, mask=mask, other=0.0).T


@triton.jit
def patch_products(
    x1_base,  # pointer to the first channel of one group of an example, or [1, ROWS] of them
    position1,  # [ROWS] positions; at or past `positions1` they read as zero
    positions1,
    stride_x1c,
    stride_x1d,
    stride_x1h,
    stride_x1w,
    depth1,
    height1,
    width1,
    out_height1,
    out_width1,
    x2_base,  # the same of the second factor, or [1, COLUMNS]
    position2,
    positions2,
    stride_x2c,
    stride_x2d,
    stride_x2h,
    stride_x2w,
    depth2,
    height2,
    width2,
    out_height2,
    out_width2,
    channels,
    WINDOW: tl.constexpr,
    ONE_TAP: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    OWN: tl.constexpr = False,  # both factors are one, and are read once
):
    """[ROWS, COLUMNS] inner products of patches of the first factor with patches of the second."""
    TAPS: tl.constexpr = WINDOW[0] * WINDOW[1] * WINDOW[2]
    inner = tl.arange(0, INNER)
    products = tl.zeros((ROWS, COLUMNS), tl.float32)
    if ONE_TAP:
        steps_per_tap = tl.cdiv(channels, INNER)
        steps = steps_per_tap * TAPS
    else:
        steps_per_tap = tl.cdiv(channels * TAPS, INNER)
        steps = steps_per_tap
    for step in range(0, steps):
        tap = step // steps_per_tap
        column = (step % steps_per_tap) * INNER + inner
        left = patch_tile(
            x1_base, position1, positions1, column, tap, channels, stride_x1c, stride_x1d,
            stride_x1h, stride_x1w, depth1, height1, width1, out_height1, out_width1, WINDOW,
            ONE_TAP,
        )  # fmt: skip
        right = left
        if not OWN:
            right = patch_tile(
                x2_base, position2, positions2, column, tap, channels, stride_x2c, stride_x2d,
                stride_x2h, stride_x2w, depth2, height2, width2, out_height2, out_width2, WINDOW,
                ONE_TAP,
            )  # fmt: skip
        products = dot(left, right.T, products, PRECISION)
    return products


@triton.jit
def weight_tiles(
    channels,
    outputs,
    TAPS: tl.constexpr,
    ONE_TAP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Number of tiles of the weight of one group."""
    if ONE_TAP:
        return tl.cdiv(outputs, ROWS) * tl.cdiv(channels, COLUMNS) * TAPS
    else:
        return tl.cdiv(outputs, ROWS) * tl.cdiv(channels * TAPS, COLUMNS)


@triton.jit
def weight_tile(
    index,  # of the tile within the weight
    channels,
    outputs,
    TAPS: tl.constexpr,
    ONE_TAP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """(group, first row, tap, first column) of a tile; columns are channels if ONE_TAP."""
    row_tiles = tl.cdiv(outputs, ROWS)
    if ONE_TAP:
        column_tiles = tl.cdiv(channels, COLUMNS)
        tiles = row_tiles * column_tiles * TAPS
    else:
        column_tiles = tl.cdiv(channels * TAPS, COLUMNS)
        tiles = row_tiles * column_tiles
    group = index // tiles
    index -= group * tiles
    # neighbours share the rows of g, and their patches overlap
    row = index // (tiles // row_tiles)
    index -= row * (tiles // row_tiles)
    return group, row * ROWS, index // column_tiles, (index % column_tiles) * COLUMNS


@triton.jit
def weight_offsets(rows, column, tap, channels, outputs, TAPS: tl.constexpr, ONE_TAP: tl.constexpr):
    """(offsets, mask), [ROWS, COLUMNS], in one group's weight (outputs, channels, taps)."""
    if ONE_TAP:
        channel = column
        inside = column < channels
    else:
        tap = column // channels
        channel = column - tap * channels
        inside = tap < TAPS
    columns = tl.cast(channel, tl.int64) * TAPS + tap
    offsets = tl.cast(rows, tl.int64)[:, None] * channels * TAPS + columns[None, :]
    return offsets, (rows < outputs)[:, None] & inside[None, :]


@dataclasses.dataclass(frozen=True)
class Convolution:
    """A checked convolution: x (B, C, D, H, W), g (B, O, T), and how patches are cut.

    Attributes:
        x: input, lifted to three spatial axes, any strides.
        g: output gradient, positions flattened.
        window: kernel, stride, padding and dilation, three numbers each.
        out: sizes of the three axes of positions.
        groups: how channels divide.
        kernel: sizes of the kernel's own axes, as the caller gave them.
        blocks: number of the layer's groups that are put side by side in each of ``groups``.
    """

    x: torch.Tensor
    g: torch.Tensor
    window: tuple[int, ...]
    out: tuple[int, int, int]
    groups: int
    kernel: tuple[int, ...]
    blocks: int = 1

    @property
    def batch(self) -> int:
        return self.x.shape[0]

    @property
    def positions(self) -> int:
        return self.g.shape[2]

    @property
    def channels(self) -> int:
        """Input channels of one group."""
        return self.x.shape[1] // self.groups

    @property
    def outputs(self) -> int:
        """Output channels of one group."""
        return self.g.shape[1] // self.groups

    @property
    def taps(self) -> int:
        return math.prod(self.window[:3])

    @property
    def one_tap(self) -> bool:
        """Whether a tile of columns holds channels of one tap.

        With few channels such a tile would be mostly empty, so it runs over taps too.
        """
        return self.channels >= 16

    @property
    def weight_shape(self) -> tuple[int, ...]:
        return (self.g.shape[1], self.channels // self.blocks, *self.kernel)

    @property
    def channels_last(self) -> bool:
        return self.x.stride(1) == 1 and self.x.shape[1] > 1

    @property
    def aligned(self) -> bool:
        """Whether both operands have rows that can be copied in whole vectors."""
        rows = self.g.mT if self.g.stride(1) == 1 else self.g
        x = self.x.permute(0, 2, 3, 4, 1)
        return self.channels_last and _check.is_aligned(rows) and _check.is_aligned(x)

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides of x, then of g."""
        return *self.x.stride(), *self.g.stride()

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the three axes of x and the last two of positions; number of positions."""
        return *self.x.shape[2:], *self.out[1:], self.positions

    @property
    def divisions(self) -> tuple[int, int, int]:
        """Input and output channels of one group, and the number of groups."""
        return self.channels, self.outputs, self.groups

    def arranged(self) -> Convolution:
        """The same with channels adjacent, copied where the kernels gain more than the copy costs.

        Patches can be read in whole vectors only along adjacent channels, in multiples of 16.
        """
        if self.x.shape[1] % 16 or not (self.widened().one_tap or self.channels == 1):
            return self
        g = self.g if self.g.shape[1] % 16 else channels_last(self.g)
        return dataclasses.replace(self, x=channels_last(self.x), g=g)

    def computed(
        self,
        operands: tuple[torch.Tensor, torch.Tensor],
        compute: Callable[[torch.Tensor, torch.Tensor], Any],
    ) -> Arranged:
        """Prepare a computation on this for all operands of the layout it was arranged from."""
        x, g = operands
        copy_x = None if self.x.data_ptr() == x.data_ptr() else channels_last
        copy_g = None
        if self.g.data_ptr() != g.data_ptr():
            copy_g = flat_channels_last if self.g.stride(1) == 1 else flat
        return Arranged(copy_x, copy_g, compute)

    def widened(self) -> Convolution:
        """The same with narrow groups put side by side, as many as fill a tile of one tap.

        Only the blocks on such a tile's diagonal are gradients. Computing the others too costs less
        than reading few channels at a time.
        """
        if self.groups == 1 or self.channels <= 1:  # depthwise layers have kernels of their own
            return self
        most = max(1, SIDE_BY_SIDE // max(self.channels, self.outputs))
        blocks = max(each for each in range(1, most + 1) if self.groups % each == 0)
        wide = dataclasses.replace(self, groups=self.groups // blocks, blocks=blocks)
        return wide if wide.one_tap else self

    def select(self, groups: slice, rows: slice) -> Convolution:
        """The part of the weight of some whole groups, or of some rows of one group."""
        x = self.x.unflatten(1, (self.groups, self.channels))[:, groups]
        g = self.g.unflatten(1, (self.groups, self.outputs))[:, groups, rows]
        count = x.shape[1]
        return dataclasses.replace(self, x=x.flatten(1, 2), g=g.flatten(1, 2), groups=count)


def check_convolution(
    x: torch.Tensor,
    g: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Convolution:
    """Checks a convolution's operands and lifts them to three spatial axes.

    Raises: KernelInputError for anything that no kernel serves.
    """
    dims = len(kernel)
    if not 1 <= dims <= 3 or x.dim() != dims + 2 or g.dim() != dims + 2:
        raise _check.KernelInputError(
            f"expected x (B, C, *spatial) and g (B, O, *positions) with as many axes as the kernel "
            f"{tuple(kernel)}, one to three; got {tuple(x.shape)} and {tuple(g.shape)}: "
            "add a batch axis, or pass the kernel's own sizes alone"
        )
    if any(len(values) != dims for values in (stride, padding, dilation)):
        raise _check.KernelInputError(
            f"stride, padding and dilation need {dims} numbers each; got {tuple(stride)}, "
            f"{tuple(padding)} and {tuple(dilation)}: repeat a number that all axes share"
        )
    if groups < 1 or x.shape[1] % groups or g.shape[1] % groups:
        raise _check.KernelInputError(
            f"groups must divide the {x.shape[1]} input and {g.shape[1]} output channels; got "
            f"{groups}: pass the groups of the layer that was called"
        )
    if x.shape[0] != g.shape[0]:
        raise _check.KernelInputError(
            f"x and g must have one batch; got {x.shape[0]} and {g.shape[0]}: pass the input and "
            "the output gradient of one layer call"
        )
    _check.check_tensors(x, g)
    expected = tuple(
        (size + 2 * pad - spread * (taps - 1) - 1) // step + 1
        for size, taps, step, pad, spread in zip(
            x.shape[2:], kernel, stride, padding, dilation, strict=True
        )
    )
    if tuple(g.shape[2:]) != expected:
        raise _check.KernelInputError(
            f"an input of shape {tuple(x.shape)} has {expected} positions for kernel "
            f"{tuple(kernel)}, stride {tuple(stride)}, padding {tuple(padding)} and dilation "
            f"{tuple(dilation)}; got gradients of shape {tuple(g.shape)}: pass the input and the "
            "output gradient of one layer call"
        )
    lead = 3 - dims
    ones, zeros = (1,) * lead, (0,) * lead
    window = (*ones, *kernel, *ones, *stride, *zeros, *padding, *ones, *dilation)
    for _ in range(lead):
        x = x.unsqueeze(2)
    out = (*ones, *g.shape[2:])
    return Convolution(
        x, g.flatten(2), tuple(map(int, window)), out, groups, tuple(map(int, kernel))
    )
