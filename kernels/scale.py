"""Sums over positions of x_hat g and of g: the gradients of scales and shifts.

x_hat is the input itself (a scale by broadcasting), or the input normalised by given statistics:
GroupNorm, InstanceNorm, BatchNorm in evaluation, and LayerNorm of rows too long for
`layer_norm.py`. One launch yields all that is wanted: see `scale_gradients.py` and
`scale_backward.py`. Operands are (B, T, C); channels that come first are a transposed
view.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from gradstats.kernels import _check, _config, _streaming, finish
from gradstats.kernels._launching import Launch, launch_of, remembered
from gradstats.kernels._results import apart, empty_like
from gradstats.kernels._tile import example_base, load_tile, multiple, segment
from gradstats.kernels.statistics import Statistics, strides_of


@triton.jit
def channel_values(pointer, places, inside, SPREAD: tl.constexpr):
    """A [1, C] row of statistics of channels, or an [R, 1] column of those of positions."""
    values = tl.load(pointer + places, mask=inside, other=0.0)
    return values[:, None] if SPREAD else values[None, :]


@triton.jit(
    do_not_specialize=[
        "batch", "positions", "total_rows", "tiles", "examples_per_program", "splits",
    ]
)  # fmt: skip
def scale_kernel(
    x_ptr,  # (B, T, C) or packed (N, C), read if SCALE
    g_ptr,  # (B, T, C) or packed (N, C)
    weight_ptr,  # (C,) contiguous, read if WEIGHT: the scale, or the direction if ALONG
    mean_ptr,  # fp32, read if NORMALISED
    rstd_ptr,  # fp32, as the mean
    shift_mean_ptr,  # fp32, as the mean, read if MEANS
    scale_mean_ptr,  # fp32, as the mean, read if MEANS
    cu_seqlens_ptr,  # int (B + 1,), read if RAGGED
    input_gradient_ptr,  # (B, T, C) or packed (N, C), written if INPUT_GRADIENT
    sums_ptr,  # fp32 (kinds, parts, splits, C), written if SUMS: sums of every program
    values_ptr,  # fp64 (kinds, B, tiles, splits), written if VALUES: of every example and tile
    stride_xb,
    stride_xt,
    stride_xd,
    stride_gb,
    stride_gt,
    stride_gd,
    stride_ob,
    stride_ot,
    stride_od,
    stride_mb,
    stride_mt,
    stride_md,
    batch,
    positions,
    total_rows,
    features,
    features_per_group,  # channels that share their statistics
    tiles,
    examples_per_program,
    splits,
    SCALE: tl.constexpr,  # the first of the kinds: sums of x_hat g
    SHIFT: tl.constexpr,  # the last of the kinds: sums of g
    WEIGHT: tl.constexpr,
    NORMALISED: tl.constexpr,
    BY_POSITION: tl.constexpr,  # statistics belong to a position rather than to a channel
    MEANS: tl.constexpr,  # statistics depend on x
    INPUT_GRADIENT: tl.constexpr,
    SUMS: tl.constexpr,
    VALUES: tl.constexpr,
    ALONG: tl.constexpr,  # values are products with the direction, not squares
    RAGGED: tl.constexpr,
    RUN: tl.constexpr,  # positions that are adjacent, see `_check.Segments`
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):
    """Sums over positions of x_hat g and of g for the channels of one tile.

    A program takes either a range of whole examples, and squares their sums on chip, or one of
    `splits` interleaved parts of a single example, and leaves its sums to be added.
    """
    if RUN > 1:
        positions = multiple(positions, RUN)
        stride_xb, stride_xd = multiple(stride_xb, RUN), multiple(stride_xd, RUN)
        stride_gb, stride_gd = multiple(stride_gb, RUN), multiple(stride_gd, RUN)
        stride_ob, stride_od = multiple(stride_ob, RUN), multiple(stride_od, RUN)
    index = tl.program_id(0)
    tile = index % tiles
    program = index // tiles
    split = program % splits
    first_example = (program // splits) * examples_per_program
    last_example = tl.minimum(first_example + examples_per_program, batch)
    columns = tile * COLUMNS + tl.arange(0, COLUMNS)
    inner = tl.arange(0, INNER)
    inside = columns < features
    if WEIGHT:
        weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)

    scale_total = tl.zeros((COLUMNS,), tl.float32)
    shift_total = tl.zeros((COLUMNS,), tl.float32)
    for example in range(first_example, last_example):
        first_row, length, poison = segment(cu_seqlens_ptr, example, positions, total_rows, RAGGED)
        g_base = example_base(g_ptr, example, stride_gb, first_row, stride_gt)
        if SCALE:
            x_base = example_base(x_ptr, example, stride_xb, first_row, stride_xt)
        if INPUT_GRADIENT:
            o_base = example_base(input_gradient_ptr, example, stride_ob, first_row, stride_ot)
        statistic = tl.cast(example, tl.int64) * stride_mb + first_row * stride_mt
        if NORMALISED and not BY_POSITION:
            place = statistic + tl.cast(columns // features_per_group, tl.int64) * stride_md
            mean = channel_values(mean_ptr, place, inside, False)
            rstd = channel_values(rstd_ptr, place, inside, False)
            if MEANS:
                shift_mean = channel_values(shift_mean_ptr, place, inside, False)
                scale_mean = channel_values(scale_mean_ptr, place, inside, False)
        # sum over lanes once per example: a reduction inside the loop would stall every load
        scale_sums = tl.zeros((INNER, COLUMNS), tl.float32)
        shift_sums = tl.zeros((INNER, COLUMNS), tl.float32)
        for row in range(split * INNER, length, splits * INNER):
            rows = row + inner
            # x first: triton 3.9.0 crashes on this kernel where g is loaded before it
            if SCALE:
                x = load_tile(x_base, rows, stride_xt, length, columns, stride_xd, features)
                x = x.to(tl.float32)
            g = load_tile(g_base, rows, stride_gt, length, columns, stride_gd, features)
            g = g.to(tl.float32)
            if NORMALISED and BY_POSITION:
                place = statistic + tl.cast(rows, tl.int64) * stride_mt
                mean = channel_values(mean_ptr, place, rows < length, True)
                rstd = channel_values(rstd_ptr, place, rows < length, True)
                if MEANS:
                    shift_mean = channel_values(shift_mean_ptr, place, rows < length, True)
                    scale_mean = channel_values(scale_mean_ptr, place, rows < length, True)
            if SCALE:
                if NORMALISED:
                    x = (x - mean) * rstd
                scale_sums += x * g
            if SHIFT:
                shift_sums += g
            if INPUT_GRADIENT:
                if WEIGHT:
                    g = g * weight[None, :]
                if MEANS:
                    g = g - shift_mean - x * scale_mean
                if NORMALISED:
                    g = g * rstd
                target = tl.cast(rows, tl.int64)[:, None] * stride_ot
                target += tl.cast(columns, tl.int64)[None, :] * stride_od
                tl.store(
                    o_base + target,
                    g.to(input_gradient_ptr.dtype.element_ty),
                    mask=(rows < length)[:, None] & inside[None, :],
                )
        if SCALE:
            scale_sum = tl.sum(scale_sums, axis=0) + poison
            scale_total += scale_sum
        if SHIFT:
            shift_sum = tl.sum(shift_sums, axis=0) + poison
            shift_total += shift_sum
        if VALUES:
            value = values_ptr + (tl.cast(example, tl.int64) * tiles + tile) * splits + split
            if SCALE:
                tl.store(value, tl.sum(scale_sum * (weight if ALONG else scale_sum)))
                value += tl.cast(batch, tl.int64) * tiles * splits
            if SHIFT:
                tl.store(value, tl.sum(shift_sum * (weight if ALONG else shift_sum)))
    if SUMS:
        place = tl.cast(program, tl.int64) * features + columns
        if SCALE:
            tl.store(sums_ptr + place, scale_total, mask=inside)
            place += tl.cast(tl.num_programs(0) // tiles, tl.int64) * features
        if SHIFT:
            tl.store(sums_ptr + place, shift_total, mask=inside)


def check_scaled(
    g: torch.Tensor,
    x: torch.Tensor | None,
    weight: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    max_seqlen: int | None,
) -> _check.Segments:
    """Checks the operands of a scale, or without x of a shift, and returns their segments."""
    segments = _check.check_pair(g if x is None else x, g, cu_seqlens, max_seqlen, mixed=True)
    _check.check_scale(weight, g)
    return segments


class Products(NamedTuple):
    """The results of one launch that were asked for, of each kind: scale, then shift.

    Attributes:
        input_gradient: like the inputs.
        sums: fp32 (kinds, parts, splits, C), over the examples of every part of the batch.
        totals: each (C,), over all examples; empty where every example is wanted alone.
        sqnorm: each fp64 (B,), or products along the direction.
    """

    input_gradient: torch.Tensor | None
    sums: torch.Tensor
    totals: tuple[torch.Tensor, ...]
    sqnorm: tuple[torch.Tensor, ...]


def launch(
    g: torch.Tensor,
    x: torch.Tensor | None,
    segments: _check.Segments,
    statistics: Statistics | None,
    config: _config.TileConfig | None = None,
    splits: int | None = None,
    *,
    weight: torch.Tensor | None = None,
    shift: bool = True,
    input_gradient: bool = False,
    sums: bool = True,
    along: bool = False,
    every_example: bool = False,
    gradient_dtype: torch.dtype | None = None,
) -> Products:
    """Launches the kernel, for the scale if there is an x, and for the shift if wanted.

    Operands and segments are checked already. `weight` is the scale by which the input gradient is
    multiplied, or with `along` the direction. With `every_example`, sums are of each example.
    """
    normalised: Normalised = (None, None, None, None)
    features_per_group, by_position = 1, False
    if statistics is not None:
        normalised = (
            statistics.mean,
            statistics.rstd,
            statistics.shift_mean,
            statistics.scale_mean,
        )
        features_per_group, by_position = statistics.features_per_group, statistics.by_position
    plan = _plan(
        scale_kernel, (x, g, weight, *normalised),
        segments.batch, segments.positions, segments.total_rows, segments.ragged,
        features_per_group, by_position,
        config, splits, shift, input_gradient, sums, along, every_example, gradient_dtype,
    )  # fmt: skip
    own = None if weight is None else weight.contiguous()
    return run(plan, g if x is None else x, x, g, own, *normalised, segments.cu_seqlens)


Normalised = tuple[
    torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None
]


class Plan(NamedTuple):
    """All of a call but its tensors, here, in `layer_norm.py` and in `group_norm.py`.

    Attributes:
        sums: shape of the sums of programs.
        values: shape of the per-example results of each kind, in parts or not; None if the sums are
            squared instead.
        empty: allocates the input gradient like an operand; None if it is not wanted.
        launch: None where there is nothing to compute.
        finish: completes the sums; None where nothing is left to do.
    """

    sums: tuple[int, int, int, int]
    values: tuple[int, ...] | None
    empty: Callable[[torch.Tensor], torch.Tensor] | None
    launch: Launch | None
    finish: finish.Finish | None


def run(plan: Plan, like: torch.Tensor, *operands: torch.Tensor | None) -> Products:
    """Launches a plan for operands of its layouts; an input gradient is allocated `like` one.

    The operands are all tensors that the kernel reads, in its order.
    """
    shape, values, empty, launched, finished = plan
    device = like.device
    partial = torch.empty(shape, dtype=torch.float32, device=device)
    own = None
    if values is not None:
        own = torch.empty(values, dtype=torch.float64, device=device)
    gradient = None if empty is None else empty(like)
    if launched is not None:
        launched(*operands, gradient, partial, own)
    totals: tuple[torch.Tensor, ...] = ()
    sqnorm: tuple[torch.Tensor, ...] = ()
    if finished is not None:
        totals, sqnorm = finish.run(finished, partial)
    if own is not None:
        sqnorm = own.unbind(0) if own.dim() == 2 else apart(own)
    return Products(gradient, partial, totals, sqnorm)


@remembered
def _plan(
    kernel: Any,
    operands: tuple[torch.Tensor | None, ...],
    batch: int,
    positions: int,
    total_rows: int,
    ragged: bool,
    *options: Any,
) -> Plan:
    # kernels read the bounds: here only their presence counts
    bounds = operands[1] if ragged else None
    return prepare(
        kernel, operands, _check.Segments(batch, positions, total_rows, bounds), *options
    )


def prepare(
    kernel: Any,
    operands: tuple[torch.Tensor | None, ...],
    segments: _check.Segments,
    features_per_group: int,
    by_position: bool,
    config: _config.TileConfig | None,
    splits: int | None,
    shift: bool,
    input_gradient: bool,
    sums: bool,
    along: bool,
    every_example: bool,
    gradient_dtype: torch.dtype | None,
) -> Plan:
    """The plan for `run`; operands are (x, g, weight, *normalised), arguments as of `launch`."""
    x, g, weight, mean, _, shift_mean, _ = operands
    assert g is not None
    batch, positions, ragged = segments.batch, segments.positions, segments.ragged
    features = g.shape[-1]
    read = [g] if x is None else [x, g]
    config = config or _streaming.choose_scale(
        positions, features, all(operand.stride(-2) == 1 for operand in read)
    )
    tiles = _config.cdiv(features, config.columns)
    blocks = _config.cdiv(positions, config.inner)
    architecture = _check.architecture(g.device)
    per_program, parts = _config.choose_partition(batch * tiles, blocks, architecture)
    splits = max(1, min(splits or parts, max(blocks, 1)))
    per_program = 1 if splits > 1 or not sums or every_example else per_program
    programs = _config.cdiv(batch, per_program) * splits
    kinds = (x is not None) + shift
    store, values = sums or not (along or splits == 1), along or splits == 1
    launch = None
    if batch * tiles:
        like = torch.empty_like(read[0], device="meta")
        launch = launch_of(
            kernel,
            programs * tiles,
            *((0, 0, 0) if x is None else segments.strides(x)),
            *segments.strides(g),
            *(segments.strides(like) if input_gradient else (0, 0, 0)),
            *((0, 0, 0) if mean is None else strides_of(mean, by_position)),
            batch,
            positions,
            segments.total_rows,
            features,
            features_per_group,
            tiles,
            per_program,
            splits,
            SCALE=x is not None,
            SHIFT=shift,
            WEIGHT=weight is not None,
            NORMALISED=mean is not None,
            BY_POSITION=by_position,
            MEANS=shift_mean is not None,
            INPUT_GRADIENT=input_gradient,
            SUMS=store,
            VALUES=values,
            ALONG=along,
            RAGGED=ragged,
            RUN=segments.adjacent_positions(*read, like),
            **config.of_streams,
        )
    shape = (kinds, programs // splits if store else 0, splits, features)
    totals = sums and not every_example
    return Plan(
        shape,
        (kinds, batch, tiles, splits) if values else None,
        empty_like(ragged) if input_gradient else None,
        launch,
        finish.prepare(shape, totals, not values, gradient_dtype) if totals or not values else None,
    )
