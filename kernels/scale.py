"""Per-example gradients of scales and shifts: sums over positions of x_hat g and of g.

x_hat is the input itself (a scale by broadcasting), or the input normalised by statistics that are
given or computed here: GroupNorm, InstanceNorm, BatchNorm in evaluation, and LayerNorm of rows too
long for `layer_norm.py`. Operands are (B, T, C); channels that come first are a transposed view.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from gradstats.kernels import _check, _config
from gradstats.kernels._tile import example_base, load_tile, segment
from gradstats.kernels.statistics import Statistics


@triton.jit(do_not_specialize=["batch", "positions", "total_rows", "tiles"])
def scale_kernel(
    x_ptr,  # (B, T, C) or packed (N, C)
    g_ptr,  # (B, T, C) or packed (N, C)
    mean_ptr,  # fp32, read if NORMALISED
    rstd_ptr,  # fp32, as the mean
    cu_seqlens_ptr,  # int (B + 1,), read if RAGGED
    output_ptr,  # fp32 (2, B, C) if SUMS, else (2, B, tiles): of x_hat g, then of g
    stride_xb,
    stride_xt,
    stride_xd,
    stride_gb,
    stride_gt,
    stride_gd,
    stride_mb,
    stride_mt,
    stride_md,
    batch,
    positions,
    total_rows,
    features,
    features_per_group,  # channels that share their statistics
    tiles,
    NORMALISED: tl.constexpr,
    BY_POSITION: tl.constexpr,  # statistics belong to a position rather than to a channel
    SUMS: tl.constexpr,
    RAGGED: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):
    """Sums over positions of x_hat g and of g for the channels of one tile, or their squares."""
    index = tl.program_id(0)
    example = index // tiles
    tile = index - example * tiles
    columns = tile * COLUMNS + tl.arange(0, COLUMNS)
    inner = tl.arange(0, INNER)
    inside = columns < features
    first_row, length, poison = segment(cu_seqlens_ptr, example, positions, total_rows, RAGGED)
    x_base = example_base(x_ptr, example, stride_xb, first_row, stride_xt)
    g_base = example_base(g_ptr, example, stride_gb, first_row, stride_gt)
    statistic = tl.cast(example, tl.int64) * stride_mb + first_row * stride_mt
    if NORMALISED and not BY_POSITION:
        channel = statistic + tl.cast(columns // features_per_group, tl.int64) * stride_md
        mean = tl.load(mean_ptr + channel, mask=inside, other=0.0)
        rstd = tl.load(rstd_ptr + channel, mask=inside, other=0.0)

    # lanes are summed once at the end: a reduction inside the loop would stall every load
    scale_sums = tl.zeros((INNER, COLUMNS), tl.float32)
    shift_sums = tl.zeros((INNER, COLUMNS), tl.float32)
    for row in range(0, length, INNER):
        rows = row + inner
        x = load_tile(x_base, rows, stride_xt, length, columns, stride_xd, features)
        g = load_tile(g_base, rows, stride_gt, length, columns, stride_gd, features)
        x, g = x.to(tl.float32), g.to(tl.float32)
        if NORMALISED:
            if BY_POSITION:
                place = statistic + tl.cast(rows, tl.int64) * stride_mt
                row_mean = tl.load(mean_ptr + place, mask=rows < length, other=0.0)
                row_rstd = tl.load(rstd_ptr + place, mask=rows < length, other=0.0)
                x = (x - row_mean[:, None]) * row_rstd[:, None]
            else:
                x = (x - mean[None, :]) * rstd[None, :]
        scale_sums += x * g
        shift_sums += g
    scale = tl.sum(scale_sums, axis=0)
    shift = tl.sum(shift_sums, axis=0)
    if SUMS:
        output = output_ptr + tl.cast(example, tl.int64) * features + columns
        stride_output = tl.cast(batch, tl.int64) * features
        tl.store(output, scale + poison, mask=inside)
        tl.store(output + stride_output, shift + poison, mask=inside)
    else:
        stride_output = tl.cast(batch, tl.int64) * tiles
        tl.store(output_ptr + index, tl.sum(scale * scale) + poison)
        tl.store(output_ptr + stride_output + index, tl.sum(shift * shift) + poison)


def scale_sqnorm(
    x: torch.Tensor,
    g: torch.Tensor,
    *,
    mean: torch.Tensor | None = None,
    rstd: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    config: _config.TileConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Squared norms of the per-example gradients of a scale and a shift.

    scale_sqnorm_i = |sum_t g_it x_hat_it|^2,  shift_sqnorm_i = |sum_t g_it|^2,
    x_hat = x, or (x - mean) rstd where statistics are given

    Args:
        x: what is scaled, (B, T, C), or packed (N, C) with cu_seqlens; bf16, fp16 or fp32, any
            strides: channels that come first are the view (B, C, T).mT.
        g: gradients with respect to the outputs, same shape and dtype.
        mean, rstd: fp32 statistics of the channels, (C,) for all examples alike or (B, C).
        cu_seqlens: int (B + 1,) first rows of the examples, on the host or the device.
        max_seqlen: with device bounds, the longest segment; avoids a wait for the device.
        config: overrides the tile table.
    Returns:
        (scale_sqnorm, shift_sqnorm), each fp32 (B,).
    Raises:
        KernelInputError: before any launch, for inputs that no kernel serves.
    Cost: one read of both operands; workspace 8 bytes per tile.
    """
    segments = _check.check_pair(x, g, cu_seqlens, max_seqlen)
    statistics = _given(mean, rstd, segments, x)
    return squares(scale_products(x, g, segments, statistics, config, sums=False))


def scale_sum(
    x: torch.Tensor,
    g: torch.Tensor,
    *,
    mean: torch.Tensor | None = None,
    rstd: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    config: _config.TileConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Per-example gradients of a scale and a shift.

    scale_i = sum_t g_it x_hat_it,  shift_i = sum_t g_it

    Args, raises: as `scale_sqnorm`.
    Returns:
        (scale, shift), each fp32 (B, C).
    Cost: one read of both operands.
    """
    segments = _check.check_pair(x, g, cu_seqlens, max_seqlen)
    statistics = _given(mean, rstd, segments, x)
    scale, shift = scale_products(x, g, segments, statistics, config, sums=True)
    return scale, shift


def squares(partial: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(scale, shift) squared norms out of (2, B, tiles) partial ones."""
    scale, shift = partial.sum(2, dtype=torch.float64).float()
    return scale, shift


def scale_products(
    x: torch.Tensor,
    g: torch.Tensor,
    segments: _check.Segments,
    statistics: Statistics | None,
    config: _config.TileConfig | None,
    *,
    sums: bool,
) -> torch.Tensor:
    """Per-example sums of x_hat g and of g, fp32 (2, B, C), or their squares (2, B, tiles)."""
    features = x.shape[-1]
    config = config or _config.choose_scale(
        segments.positions,
        features,
        x.element_size(),
        _check.architecture(x.device),
        positions_adjacent=x.stride(-2) == 1 and g.stride(-2) == 1,
    )
    tiles = triton.cdiv(features, config.columns)
    shape = (2, segments.batch, features if sums else tiles)
    output = torch.empty(shape, dtype=torch.float32, device=x.device)
    if output.numel():
        scale_kernel[(_check.check_programs(segments.batch * tiles),)](
            x,
            g,
            None if statistics is None else statistics.mean,
            None if statistics is None else statistics.rstd,
            segments.cu_seqlens,
            output,
            *segments.strides(x),
            *segments.strides(g),
            *((0, 0, 0) if statistics is None else statistics.strides()),
            segments.batch,
            segments.positions,
            segments.total_rows,
            features,
            1 if statistics is None else statistics.features_per_group,
            tiles,
            NORMALISED=statistics is not None,
            BY_POSITION=statistics is not None and statistics.by_position,
            SUMS=sums,
            RAGGED=segments.ragged,
            COLUMNS=config.columns,
            INNER=config.inner,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
    return output


def _given(
    mean: torch.Tensor | None,
    rstd: torch.Tensor | None,
    segments: _check.Segments,
    x: torch.Tensor,
) -> Statistics | None:
    if mean is None and rstd is None:
        return None
    allowed: list[tuple[int, ...]] = [(x.shape[-1],)]
    if not segments.ragged:
        allowed.append((segments.batch, x.shape[-1]))
    layouts = {
        None
        if statistic is None
        else (tuple(statistic.shape), statistic.stride(), statistic.dtype, statistic.device)
        for statistic in (mean, rstd)
    }
    if (
        mean is None
        or rstd is None
        or len(layouts) > 1
        or tuple(mean.shape) not in allowed
        or mean.dtype != torch.float32
        or mean.device != x.device
    ):
        raise _check.KernelInputError(
            "mean and rstd must both be given, fp32 on the inputs' device, of one layout, and one "
            f"number for each channel: {' or '.join(map(str, allowed))}; got {layouts}"
        )
    return Statistics(mean, rstd)
