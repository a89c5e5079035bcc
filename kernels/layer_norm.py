"""LayerNorm and RMSNorm: per-example gradients of scale and shift, and the whole backward.

Rows are normalised on chip: the normalised input is computed again from the input and never stored.
One pass over the data yields the input gradient, the summed gradients and the squared norms.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from gradstats.kernels import _check, _config, _streaming, finish
from gradstats.kernels._launching import launch_of, remembered
from gradstats.kernels._results import empty_like, nothing
from gradstats.kernels._tile import example_base, load_tile, segment
from gradstats.kernels.means import with_means
from gradstats.kernels.scale import Plan, run
from gradstats.kernels.scale import launch as launch_scale
from gradstats.kernels.scale_backward import whole_backward
from gradstats.kernels.scale_gradients import per_example_sums
from gradstats.kernels.statistics import row_statistics

# features of a row that one program normalises on chip
WIDEST = _streaming.tiles("layer_norm")[0].columns


@triton.jit
def normalised(x, inside, valid, features, eps, RMS: tl.constexpr):
    """(x_hat, 1 / deviation) of the rows of a tile; zero past the features and past the rows."""
    if not RMS:
        mean = tl.sum(x, axis=1) / features
        x = tl.where(inside[None, :], x - mean[:, None], 0.0)
    # without eps, rows past the end would be divided by a deviation of zero
    variance = tl.where(valid, tl.sum(x * x, axis=1) / features + eps, 1.0)
    rstd = 1.0 / tl.sqrt(variance)
    return x * rstd[:, None], rstd


@triton.jit(
    do_not_specialize=["batch", "positions", "total_rows", "examples_per_program", "splits"]
)
def layer_norm_kernel(
    x_ptr,  # (B, T, D) or packed (N, D)
    g_ptr,  # (B, T, D) or packed (N, D)
    weight_ptr,  # (D,) contiguous, read if WEIGHT
    cu_seqlens_ptr,  # int (B + 1,), read if RAGGED
    input_gradient_ptr,  # (B, T, D) or packed (N, D), written if INPUT_GRADIENT
    sums_ptr,  # fp32 (2, programs, D): scale's and shift's of every program, written if SUMS
    sqnorm_ptr,  # fp64 (2, B), written if SQUARES
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
    total_rows,
    features,
    examples_per_program,
    splits,
    eps,
    RMS: tl.constexpr,
    WEIGHT: tl.constexpr,
    INPUT_GRADIENT: tl.constexpr,
    SUMS: tl.constexpr,
    SQUARES: tl.constexpr,
    RAGGED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,  # at least the number of features
):
    """Sums over positions of g x_hat and of g, of a range of examples or a part of one example.

    A program takes either whole examples, and squares their sums on chip, or one of `splits`
    interleaved parts of a single example, and leaves its sums to be added.
    """
    index = tl.program_id(0)
    split = index % splits
    first_example = (index // splits) * examples_per_program
    last_example = tl.minimum(first_example + examples_per_program, batch)
    columns = tl.arange(0, COLUMNS)
    inside = columns < features
    lanes = tl.arange(0, ROWS)
    if WEIGHT:
        weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)

    scale_total = tl.zeros((COLUMNS,), tl.float32)
    shift_total = tl.zeros((COLUMNS,), tl.float32)
    for example in range(first_example, last_example):
        first_row, length, poison = segment(cu_seqlens_ptr, example, positions, total_rows, RAGGED)
        x_base = example_base(x_ptr, example, stride_xb, first_row, stride_xt)
        g_base = example_base(g_ptr, example, stride_gb, first_row, stride_gt)
        if INPUT_GRADIENT:
            o_base = example_base(input_gradient_ptr, example, stride_ob, first_row, stride_ot)
        # sum over rows once per example: a reduction inside the loop would stall loads
        scale_sums = tl.zeros((ROWS, COLUMNS), tl.float32)
        shift_sums = tl.zeros((ROWS, COLUMNS), tl.float32)
        for row in range(split * ROWS, length, splits * ROWS):
            rows = row + lanes
            x = load_tile(x_base, rows, stride_xt, length, columns, stride_xd, features)
            g = load_tile(g_base, rows, stride_gt, length, columns, stride_gd, features)
            g = g.to(tl.float32)
            x_hat, rstd = normalised(x.to(tl.float32), inside, rows < length, features, eps, RMS)
            scale_sums += g * x_hat
            shift_sums += g
            if INPUT_GRADIENT:
                if WEIGHT:
                    g = g * weight[None, :]
                g -= x_hat * (tl.sum(g * x_hat, axis=1) / features)[:, None]
                if not RMS:
                    # x_hat sums to zero over a row, so the mean is still that of g * weight
                    g -= (tl.sum(g, axis=1) / features)[:, None]
                g = g * rstd[:, None]
                target = tl.cast(rows, tl.int64)[:, None] * stride_ot
                target += tl.cast(columns, tl.int64)[None, :] * stride_od
                tl.store(
                    o_base + target,
                    g.to(input_gradient_ptr.dtype.element_ty),
                    mask=(rows < length)[:, None] & inside[None, :],
                )
        scale_sum = tl.sum(scale_sums, axis=0) + poison
        shift_sum = tl.sum(shift_sums, axis=0) + poison
        if SQUARES:
            # poison reaches lanes past the features too, which then must not count as zeros
            tl.store(sqnorm_ptr + example, tl.sum(scale_sum * scale_sum))
            tl.store(sqnorm_ptr + batch + example, tl.sum(shift_sum * shift_sum))
        scale_total += scale_sum
        shift_total += shift_sum
    if SUMS:
        output = tl.cast(index, tl.int64) * features + columns
        tl.store(sums_ptr + output, scale_total, mask=inside)
        output += tl.cast(tl.num_programs(0), tl.int64) * features
        tl.store(sums_ptr + output, shift_total, mask=inside)


def layer_norm_sqnorm(
    x: torch.Tensor,
    g: torch.Tensor,
    eps: float,
    *,
    rms: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    config: _config.TileConfig | None = None,
    splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Squared norms of the per-example gradients of the scale and the shift of a LayerNorm.

    scale_sqnorm_i = |sum_t g_it x_hat_it|^2,  shift_sqnorm_i = |sum_t g_it|^2,
    x_hat = (x - mean(x)) / sqrt(var(x) + eps), for RMSNorm x / sqrt(mean(x^2) + eps)

    Args:
        x: inputs (B, T, D), or packed (N, D) with cu_seqlens; bf16, fp16 or fp32, any strides.
        g: gradients with respect to the outputs, same shape and dtype.
        eps: what the layer adds to the variance.
        rms: the layer is an RMSNorm.
        cu_seqlens: int (B + 1,) first rows of the examples, on the host or the device.
        max_seqlen: with device bounds, the longest segment; avoids a wait for the device.
        config: overrides the tile table.
        splits: overrides into how many parts the positions of an example are divided.
    Returns:
        (scale_sqnorm, shift_sqnorm), each fp64 (B,).
    Raises:
        KernelInputError: before any launch, for inputs that no kernel serves.
    Cost: one read of both operands; workspace of a few sums for each processor of the device.
    Rows too long to be held on chip take two reads of x.
    """
    options = (cu_seqlens, max_seqlen, float(eps), rms, config, splits, False, False, False, None)
    segments, plan = _plan(layer_norm_kernel, (x, g, None), *options)
    if plan is None:
        statistics = row_statistics(x, eps, rms)
        scale, shift = launch_scale(g, x, segments, statistics, sums=False).sqnorm
    else:
        scale, shift = run(plan, x, x, g, None, segments.cu_seqlens).sqnorm
    return scale, shift


def layer_norm_sum(
    x: torch.Tensor,
    g: torch.Tensor,
    eps: float,
    *,
    rms: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    config: _config.TileConfig | None = None,
    splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Per-example gradients of the scale and the shift of a LayerNorm.

    scale_i = sum_t g_it x_hat_it,  shift_i = sum_t g_it

    Args, raises and cost: as `layer_norm_sqnorm`.
    Returns:
        (scale, shift), each fp32 (B, D).
    """
    options = (cu_seqlens, max_seqlen, float(eps), rms, config, splits, True, False, True, None)
    segments, plan = _plan(layer_norm_kernel, (x, g, None), *options)
    if plan is None:
        scale, shift = per_example_sums(g, x, segments, row_statistics(x, eps, rms))
    else:
        sums = run(plan, x, x, g, None, segments.cu_seqlens).sums
        scale, shift = sums.sum(2).unbind(0)
    return scale, shift


def layer_norm_backward(
    x: torch.Tensor,
    g: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    *,
    rms: bool = False,
    sums: bool = True,
    gradient_dtype: torch.dtype | None = None,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    config: _config.TileConfig | None = None,
    splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The whole backward of a LayerNorm and the squared norm of every example's share in it.

    Args, raises: as `layer_norm_sqnorm`, and
        weight: (D,) the layer's scale; None for 1.
        sums: whether the summed gradients are wanted; without them they are empty.
        gradient_dtype: dtype of the summed gradients; None for fp32. Sums are fp32 either way.
    Returns:
        (input_gradient like x, scale_gradient (D,), shift_gradient (D,), scale_sqnorm fp64 (B,),
        shift_sqnorm fp64 (B,)). Rows outside every segment have input
        gradient zero.
    Cost: one read of both operands and one write of the input gradient, those of the backward
    alone; workspace as `layer_norm_sqnorm`. Rows too long to be held on chip take three reads of x
    and two of g.
    """
    options = (
        cu_seqlens, max_seqlen, float(eps), rms, config, splits, sums, True, False, gradient_dtype
    )  # fmt: skip
    segments, plan = _plan(layer_norm_kernel, (x, g, weight), *options)
    if plan is None:
        statistics = with_means(row_statistics(x, eps, rms), x, g, weight, rms)
        return whole_backward(
            g, x, segments, statistics,
            weight=weight, sums=sums, gradient_dtype=gradient_dtype,
        )  # fmt: skip
    scaled = None if weight is None else weight.contiguous()
    found = run(plan, x, x, g, scaled, segments.cu_seqlens)
    gradient, _, totals, (scale_sqnorm, shift_sqnorm) = found
    assert gradient is not None
    scale, shift = totals or nothing(x.device, *2 * (gradient_dtype or torch.float32,))
    return gradient, scale, shift, scale_sqnorm, shift_sqnorm


def prepare(
    x: torch.Tensor,
    g: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    rms: bool,
    *,
    sums: bool,
    gradient_dtype: torch.dtype | None,
) -> Plan | None:
    """What `scale.run` needs to do as `layer_norm_backward`, for operands of the same layout.

    None where rows are too long to be held on chip.
    """
    options = (None, None, float(eps), rms, None, None, sums, True, False, gradient_dtype)
    return _plan(layer_norm_kernel, (x, g, weight), *options)[1]


@remembered
def _plan(
    kernel: Any,
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    cu_seqlens: torch.Tensor | None,
    max_seqlen: int | None,
    eps: float,
    rms: bool,
    config: _config.TileConfig | None,
    splits: int | None,
    sums: bool,
    input_gradient: bool,
    every_example: bool,
    gradient_dtype: torch.dtype | None,
) -> tuple[_check.Segments, Plan | None]:
    """(segments, launches): None where rows are too long to be held on chip.

    Sums of every example alone are found with `every_example`.
    """
    x, g, weight = operands
    segments = _check.check_pair(x, g, cu_seqlens, max_seqlen)
    _check.check_scale(weight, x)
    batch, features = segments.batch, x.shape[-1]
    if features > WIDEST and config is None:
        return segments, None
    config = config or _streaming.choose_layer_norm(features)
    if features > config.columns:
        raise _check.KernelInputError(
            f"rows of at most {config.columns} features fit this tile; got {features}: leave the "
            "choice of the tile to the table"
        )
    blocks = _config.cdiv(segments.positions, config.rows)
    # the sums of every part are added later, so make no more parts than hide latency
    at_once = max(1, 8 // config.num_warps)
    per_program, parts = _config.choose_partition(
        batch, blocks, _check.architecture(x.device), at_once
    )
    splits = max(1, min(splits or parts, max(blocks, 1)))
    per_program = 1 if splits > 1 or every_example else per_program
    programs = _config.cdiv(batch, per_program) * splits
    store = sums or splits > 1
    launch = None
    if batch:
        like = torch.empty_like(x, device="meta")
        launch = launch_of(
            kernel,
            programs,
            *segments.strides(x),
            *segments.strides(g),
            *(segments.strides(like) if input_gradient else (0, 0, 0)),
            batch,
            segments.positions,
            segments.total_rows,
            features,
            per_program,
            splits,
            eps,
            RMS=rms,
            WEIGHT=weight is not None,
            INPUT_GRADIENT=input_gradient,
            SUMS=store,
            SQUARES=splits == 1,
            RAGGED=segments.ragged,
            ROWS=config.rows,
            COLUMNS=config.columns,
            **config.options,
        )
    shape = (2, programs // splits if store else 0, splits, features)
    totals = sums and not every_example
    squares = splits > 1 and not every_example
    finished = None
    if totals or squares:
        finished = finish.prepare(shape, totals, squares, gradient_dtype)
    whole = (2, batch) if splits == 1 else None
    empty = empty_like(segments.ragged) if input_gradient else None
    return segments, Plan(shape, whole, empty, launch, finished)
