"""GroupNorm and InstanceNorm: per-example gradients of scale and shift, and the whole backward.

A program takes one group of channels of one example. A group that fits a tile is read once and
kept. Longer groups are read twice, first for the sums, then for the input gradient; the second read
is mostly from cache. Operands are (B, T, C); channels that come first are a transposed view.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from gradstats.kernels import _check, _config, _streaming, finish
from gradstats.kernels._launching import launch_of, remembered
from gradstats.kernels._results import nothing
from gradstats.kernels.means import with_means
from gradstats.kernels.scale import Plan, run
from gradstats.kernels.scale import launch as launch_scale
from gradstats.kernels.scale_backward import whole_backward
from gradstats.kernels.scale_gradients import per_example_sums
from gradstats.kernels.statistics import group_statistics

# channels of a group that one program normalises on chip
WIDEST = 2048


@triton.jit
def places(
    row, stride_t, positions, stride_d, features,
    COLUMNS: tl.constexpr, INNER: tl.constexpr, T_RUN: tl.constexpr, C_RUN: tl.constexpr,
):  # fmt: skip
    """(offsets, mask) of INNER positions from `row`, with hints of what may be read as one vector.

    The compiler cannot know: kernels are not specialized on sizes that differ between layers.
    """
    rows, columns = row + tl.arange(0, INNER), tl.arange(0, COLUMNS)
    offsets = tl.cast(rows, tl.int64)[:, None] * stride_t
    offsets += tl.cast(columns, tl.int64)[None, :] * stride_d
    mask = (rows < positions)[:, None] & (columns < features)[None, :]
    return tl.multiple_of(offsets, [T_RUN, C_RUN]), tl.max_constancy(mask, [T_RUN, C_RUN])


@triton.jit
def load_vectors(
    base, row, stride_t, positions, stride_d, features, other,
    COLUMNS: tl.constexpr, INNER: tl.constexpr, T_RUN: tl.constexpr, C_RUN: tl.constexpr,
):  # fmt: skip
    """The tile of INNER positions from `row`; `other` past the end of the group."""
    offsets, mask = places(
        row, stride_t, positions, stride_d, features, COLUMNS, INNER, T_RUN, C_RUN
    )
    return tl.load(base + offsets, mask=mask, other=other)


@triton.jit
def sums_of_tile(x, g, pivot, COLUMNS: tl.constexpr, INNER: tl.constexpr, T_RUN: tl.constexpr):
    """Sums of d = x - pivot, d d, g d and g over the adjacent positions of one vector.

    One thread has these positions: it waits for no other, and keeps few numbers between tiles.
    """
    runs: tl.constexpr = (INNER // T_RUN, T_RUN, COLUMNS)
    apart = tl.reshape(x.to(tl.float32) - pivot, runs)
    g = tl.reshape(g.to(tl.float32), runs)
    return (
        tl.sum(apart, axis=1),
        tl.sum(apart * apart, axis=1),
        tl.sum(g * apart, axis=1),
        tl.sum(g, axis=1),
    )


@triton.jit
def two_sums(first, second):
    """Sums of both along the first axis, which all warps reduce together."""
    return tl.split(tl.sum(tl.join(first, second), axis=0))


@triton.jit
def input_gradient(x, g, weight, mean, rstd, shift_mean, scale_mean):
    """(g weight - shift_mean - x_hat scale_mean) rstd, with scalars multiplied before the tiles."""
    upstream = g.to(tl.float32) * (weight * rstd)[None, :] - shift_mean * rstd
    return upstream - (x.to(tl.float32) - mean) * (scale_mean * rstd * rstd)


@triton.jit(do_not_specialize=["batch", "positions", "groups", "features"])
def group_norm_kernel(
    x_ptr,  # (B, T, C)
    g_ptr,  # (B, T, C)
    weight_ptr,  # (C,) contiguous, read if WEIGHT
    input_gradient_ptr,  # (B, T, C)
    sums_ptr,  # fp32 (2, B, C), written if SUMS: of g x_hat and of g, of every example
    sqnorm_ptr,  # fp64 (2, B, groups): squares of every group's share
    stride_xb,
    stride_xt,
    stride_xd,
    stride_gb,
    stride_gt,
    stride_gd,
    stride_ob,
    stride_ot,
    stride_od,
    batch,
    positions,
    groups,
    features,  # of one group
    eps,
    WEIGHT: tl.constexpr,
    SUMS: tl.constexpr,
    WHOLE: tl.constexpr,  # one tile holds all positions: nothing is read twice
    T_RUN: tl.constexpr,  # positions, and channels, that are adjacent in memory at offsets that are
    C_RUN: tl.constexpr,  # multiples of their number: one of the two is 1
    COLUMNS: tl.constexpr,  # at least the number of features
    INNER: tl.constexpr,
):
    """The backward of one group of channels of one example."""
    index = tl.program_id(0)
    group = index % groups
    example = tl.cast(index // groups, tl.int64)
    columns = tl.arange(0, COLUMNS)
    inside = columns < features
    first_channel = tl.cast(group, tl.int64) * features
    start = example * stride_xb + first_channel * stride_xd
    x_base = x_ptr + tl.multiple_of(start, T_RUN * C_RUN)
    start = example * stride_gb + first_channel * stride_gd
    g_base = g_ptr + tl.multiple_of(start, T_RUN * C_RUN)
    start = example * stride_ob + first_channel * stride_od
    output = input_gradient_ptr + tl.multiple_of(start, T_RUN * C_RUN)

    x = load_vectors(
        x_base, 0, stride_xt, positions, stride_xd, features, 0.0, COLUMNS, INNER, T_RUN, C_RUN
    )
    g = load_vectors(
        g_base, 0, stride_gt, positions, stride_gd, features, 0.0, COLUMNS, INNER, T_RUN, C_RUN
    )
    if WEIGHT:
        weight = tl.load(weight_ptr + first_channel + columns, mask=inside, other=0.0)
        weight = weight.to(tl.float32)
    else:
        weight = tl.full((COLUMNS,), 1.0, tl.float32)
    # One pass finds all sums. Deviations are taken from the mean of the first tile, so that a mean
    # far larger than the deviation costs no digits: the mean of a share p of a group is at most
    # sqrt(1 / p) deviations off. The pivot is rounded to x's dtype, to stand for x past the end;
    # where that is coarse, the x are as coarse, and at least as far from their mean as the pivot.
    in_first_tile = tl.cast(tl.minimum(positions, INNER), tl.float32) * features
    pivot = (tl.sum(x.to(tl.float32)) / in_first_tile).to(x.dtype)
    wide_pivot = pivot.to(tl.float32)
    held = (tl.arange(0, INNER) < positions)[:, None] & inside[None, :]
    x = tl.where(held, x, pivot)
    apart, square, scale, shift = sums_of_tile(x, g, wide_pivot, COLUMNS, INNER, T_RUN)
    if not WHOLE:
        for row in range(INNER, positions, INNER):
            x = load_vectors(
                x_base, row, stride_xt, positions, stride_xd, features, pivot,
                COLUMNS, INNER, T_RUN, C_RUN,
            )  # fmt: skip
            g = load_vectors(
                g_base, row, stride_gt, positions, stride_gd, features, 0.0,
                COLUMNS, INNER, T_RUN, C_RUN,
            )  # fmt: skip
            more = sums_of_tile(x, g, wide_pivot, COLUMNS, INNER, T_RUN)
            apart += more[0]
            square += more[1]
            scale += more[2]
            shift += more[3]
    size: tl.constexpr = INNER // T_RUN * COLUMNS
    off, variance = two_sums(tl.reshape(apart, (size,)), tl.reshape(square, (size,)))
    scale, shift = two_sums(scale, shift)
    elements = tl.cast(positions, tl.float32) * features
    off /= elements
    mean = wide_pivot + off
    # rounding can make a zero variance negative
    variance = tl.maximum(variance / elements - off * off, 0.0)
    rstd = 1.0 / tl.sqrt(variance + eps)
    scale = (scale - off * shift) * rstd
    # the mean over the group of g * weight, and of g * weight * x_hat, need their sums
    squares, means = two_sums(
        tl.join(scale * scale, shift * shift), tl.join(scale * weight, shift * weight)
    )
    scale_square, shift_square = tl.split(squares)
    scale_mean, shift_mean = tl.split(means / elements)
    place = sqnorm_ptr + example * groups + group
    tl.store(place, scale_square)
    tl.store(place + tl.cast(batch, tl.int64) * groups, shift_square)
    if SUMS:
        channels = tl.cast(groups, tl.int64) * features
        place = sums_ptr + example * channels + first_channel + columns
        tl.store(place, scale, mask=inside)
        tl.store(place + batch * channels, shift, mask=inside)
    if WHOLE:
        gradient = input_gradient(x, g, weight, mean, rstd, shift_mean, scale_mean)
        offsets, mask = places(
            0, stride_ot, positions, stride_od, features, COLUMNS, INNER, T_RUN, C_RUN
        )
        tl.store(output + offsets, gradient.to(x.dtype), mask=mask)
    else:
        # backwards: the last tile is the likeliest to be in cache still
        last = (positions - 1) // INNER * INNER
        for before in range(0, positions, INNER):
            row = last - before
            x = load_vectors(
                x_base, row, stride_xt, positions, stride_xd, features, 0.0,
                COLUMNS, INNER, T_RUN, C_RUN,
            )  # fmt: skip
            g = load_vectors(
                g_base, row, stride_gt, positions, stride_gd, features, 0.0,
                COLUMNS, INNER, T_RUN, C_RUN,
            )  # fmt: skip
            gradient = input_gradient(x, g, weight, mean, rstd, shift_mean, scale_mean)
            offsets, mask = places(
                row, stride_ot, positions, stride_od, features, COLUMNS, INNER, T_RUN, C_RUN
            )
            tl.store(output + offsets, gradient.to(x.dtype), mask=mask)


def adjacent(width: int, *operands: torch.Tensor) -> tuple[int, int]:
    """How many (positions, channels) of a group are adjacent, see `_check.adjacent`: powers of two,
    one of which is 1. Groups start at multiples of them."""
    positions = _check.adjacent(1, *operands)
    return (positions, 1) if positions > 1 else (1, math.gcd(_check.adjacent(2, *operands), width))


def group_norm_sqnorm(
    x: torch.Tensor,
    g: torch.Tensor,
    groups: int,
    eps: float,
    *,
    config: _config.TileConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Squared norms of the per-example gradients of the scale and the shift of a GroupNorm.

    They are the squares of what `group_norm_sum` returns.

    Args:
        x, g: (B, T, C); with one channel in each group this is InstanceNorm.
        groups: a divisor of C.
        eps: what the layer adds to the variance.
    Returns:
        (scale_sqnorm, shift_sqnorm), each fp64 (B,).
    Cost: two reads of x, the second mostly from cache, and one of g.
    """
    segments = _check.check_pair(x, g)
    statistics = group_statistics(x, groups, eps)
    scale, shift = launch_scale(g, x, segments, statistics, config, sums=False).sqnorm
    return scale, shift


def group_norm_sum(
    x: torch.Tensor,
    g: torch.Tensor,
    groups: int,
    eps: float,
    *,
    config: _config.TileConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `scale_gradients.scale_sum`, x normalised as by `group_norm_sqnorm`."""
    segments = _check.check_pair(x, g)
    statistics = group_statistics(x, groups, eps)
    scale, shift = per_example_sums(g, x, segments, statistics, config)
    return scale, shift


def group_norm_backward(
    x: torch.Tensor,
    g: torch.Tensor,
    weight: torch.Tensor | None,
    groups: int,
    eps: float,
    *,
    sums: bool = True,
    gradient_dtype: torch.dtype | None = None,
    config: _config.TileConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The whole backward of a GroupNorm and the squared norm of every example's share in it.

    Args:
        x, g, groups, eps: as `group_norm_sqnorm`.
        weight: (C,) the layer's scale; None for 1.
        sums: whether the summed gradients are wanted; without them they are empty.
        gradient_dtype: dtype of the summed gradients; None for fp32. Sums are fp32 either way.
        config: overrides the tile table.
    Returns:
        (input_gradient like x, scale_gradient (C,), shift_gradient (C,), scale_sqnorm fp64 (B,),
        shift_sqnorm fp64 (B,)).
    Raises:
        KernelInputError: before any launch, for inputs that no kernel serves.
    Cost: one read of both operands from memory, the second of long groups mostly from cache, and
    one write of the input gradient; workspace 16 bytes for every group of every example, and for
    the sums 8 for every channel of every example. Groups too wide to be held on chip
    take three reads of x and two of g.
    """
    plan = _plan(
        group_norm_kernel, (x, g, weight), groups, float(eps), sums, gradient_dtype, config
    )
    if plan is None:
        statistics = with_means(group_statistics(x, groups, eps), x, g, weight)
        return whole_backward(
            g, x, _check.check_pair(x, g), statistics,
            weight=weight, sums=sums, gradient_dtype=gradient_dtype,
        )  # fmt: skip
    found = run(plan, x, x, g, None if weight is None else weight.contiguous())
    gradient, _, totals, (scale_sqnorm, shift_sqnorm) = found
    assert gradient is not None
    scale, shift = totals or nothing(x.device, *2 * (gradient_dtype or torch.float32,))
    return gradient, scale, shift, scale_sqnorm, shift_sqnorm


def prepare(
    x: torch.Tensor,
    g: torch.Tensor,
    weight: torch.Tensor | None,
    groups: int,
    eps: float,
    *,
    sums: bool,
    gradient_dtype: torch.dtype | None,
) -> Plan | None:
    """What `scale.run` needs to do as `group_norm_backward`, for operands of the same layout.

    None where groups are too wide to be held on chip.
    """
    options = (groups, float(eps), sums, gradient_dtype, None)
    return _plan(group_norm_kernel, (x, g, weight), *options)


@remembered
def _plan(
    kernel: Any,
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    groups: int,
    eps: float,
    sums: bool,
    gradient_dtype: torch.dtype | None,
    config: _config.TileConfig | None,
) -> Plan | None:
    """None where groups are too wide to be held on chip."""
    x, g, weight = operands
    _check.check_pair(x, g)
    _check.check_groups(x, groups)
    batch, positions, channels = x.shape
    _check.check_scale(weight, x)
    width = channels // groups
    if width > WIDEST and config is None:
        return None
    gradient = torch.empty_like(x, device="meta")
    runs = adjacent(width, x, g, gradient)
    config = config or _streaming.choose_group_norm(width, positions, max(runs) > 1)
    if width > config.columns:
        raise _check.KernelInputError(
            f"groups of at most {config.columns} channels fit this tile; got {width}: leave the "
            "choice of the tile to the table"
        )
    if not x.numel():
        nothing_summed = (2, 0, 1, channels)
        finished = finish.prepare(nothing_summed, True, False, gradient_dtype) if sums else None
        return Plan(nothing_summed, (2, batch, 0), torch.empty_like, None, finished)
    launch = launch_of(
        kernel,
        batch * groups,
        *x.stride(),
        *g.stride(),
        *gradient.stride(),
        batch,
        positions,
        groups,
        width,
        eps,
        WEIGHT=weight is not None,
        SUMS=sums,
        WHOLE=positions <= config.inner,
        T_RUN=min(runs[0], config.inner),
        C_RUN=min(runs[1], config.columns),
        **config.of_streams,
    )
    shape = (2, batch if sums else 0, 1, channels)
    finished = finish.prepare(shape, True, False, gradient_dtype) if sums else None
    return Plan(shape, (2, batch, groups), torch.empty_like, launch, finished)
