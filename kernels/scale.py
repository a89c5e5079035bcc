"""Per-example gradients of scales and shifts: sums over positions of x_hat g and of g.

x_hat is the input itself (a scale by broadcasting), or the input normalised by statistics that are
given or computed here: GroupNorm, InstanceNorm, BatchNorm in evaluation, and LayerNorm of rows too
long for `normalization.py`. Operands are (B, T, C); channels that come first are a transposed view.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from gradstats.kernels import _check, _config
from gradstats.kernels._tile import example_base, load_tile, segment


@triton.jit(do_not_specialize=["positions", "features", "batch", "groups"])
def statistics_kernel(
    x_ptr,  # (B, T, C)
    output_ptr,  # fp32 (2, B, groups) contiguous: mean, 1 / sqrt(variance + eps)
    stride_xb,
    stride_xg,  # from one group to the next
    stride_xt,
    stride_xd,
    batch,
    groups,
    positions,  # of one group
    features,  # of one group
    eps,
    RMS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):
    """Mean and inverse deviation over the positions and features of one group of one example.

    Every lane keeps the mean and the squared deviations of what it has seen, so that a mean far
    larger than the deviation costs no digits; lanes are joined at the end.
    """
    index = tl.program_id(0)
    example = index // groups
    group = index - example * groups
    base = x_ptr + tl.cast(example, tl.int64) * stride_xb + tl.cast(group, tl.int64) * stride_xg
    inner, lanes = tl.arange(0, INNER), tl.arange(0, COLUMNS)

    count = tl.zeros((INNER, COLUMNS), tl.float32)
    mean = tl.zeros((INNER, COLUMNS), tl.float32)
    squares = tl.zeros((INNER, COLUMNS), tl.float32)
    for column in range(0, features, COLUMNS):
        columns = column + lanes
        for row in range(0, positions, INNER):
            rows = row + inner
            x = load_tile(base, rows, stride_xt, positions, columns, stride_xd, features)
            inside = (rows < positions)[:, None] & (columns < features)[None, :]
            x = x.to(tl.float32)
            if RMS:
                squares += x * x
            else:
                count += tl.where(inside, 1.0, 0.0)
                apart = tl.where(inside, x - mean, 0.0)
                mean += apart / tl.maximum(count, 1.0)
                squares += apart * tl.where(inside, x - mean, 0.0)
    total = tl.cast(positions, tl.float32) * features
    if RMS:
        average = 0.0
        variance = tl.sum(squares) / total
    else:
        average = tl.sum(count * mean) / total
        apart = tl.where(count > 0.0, mean - average, 0.0)
        variance = (tl.sum(squares) + tl.sum(count * apart * apart)) / total
    tl.store(output_ptr + index, average)
    stride_output = tl.cast(batch, tl.int64) * groups
    tl.store(output_ptr + stride_output + index, 1.0 / tl.sqrt(variance + eps))


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


@dataclasses.dataclass(frozen=True)
class Statistics:
    """Mean and inverse deviation by which inputs are normalised, fp32 of one shape and layout.

    With `by_position` (B, T), or (N,) for packed rows; else (B, groups), or (groups,) for all
    examples alike, where a group is `features_per_group` adjacent channels.
    """

    mean: torch.Tensor
    rstd: torch.Tensor
    features_per_group: int = 1
    by_position: bool = False

    def strides(self) -> tuple[int, int, int]:
        """(example, position, group) strides."""
        example = 0 if self.mean.dim() == 1 else self.mean.stride(0)
        other = self.mean.stride(-1)
        return (example, other, 0) if self.by_position else (example, 0, other)


def group_statistics(x: torch.Tensor, groups: int, eps: float) -> Statistics:
    """Statistics of every group of channels of every example of x (B, T, C), from one read."""
    channels = x.shape[-1]
    if x.dim() != 3 or groups < 1 or channels % groups:
        raise _check.KernelInputError(
            f"expected (B, T, C) inputs whose C channels divide into the groups; got "
            f"{tuple(x.shape)} and {groups} groups: pass channels that come first as a transposed "
            "view"
        )
    width = channels // groups
    strides = (x.stride(0), width * x.stride(2), x.stride(1), x.stride(2))
    mean, rstd = _statistics(x, (x.shape[0], groups), strides, x.shape[1], width, eps, False)
    return Statistics(mean, rstd, max(width, 1))


def row_statistics(x: torch.Tensor, eps: float, rms: bool) -> Statistics:
    """Statistics of every row of x (B, T, D) or (N, D), however long; with `rms` the mean is 0."""
    rows = x if x.dim() == 3 else x[None]
    strides = (rows.stride(0), rows.stride(1), 0, rows.stride(2))
    mean, rstd = _statistics(rows, tuple(rows.shape[:2]), strides, 1, rows.shape[2], eps, rms)
    if x.dim() == 2:
        mean, rstd = mean[0], rstd[0]
    return Statistics(mean, rstd, by_position=True)


def _statistics(
    x: torch.Tensor,
    shape: tuple[int, ...],
    strides: tuple[int, int, int, int],
    positions: int,
    features: int,
    eps: float,
    rms: bool,
) -> torch.Tensor:
    """(mean, rstd), fp32 (2, *shape), of blocks of x at the first two strides."""
    if strides[2] == 1 and strides[3] == positions:
        # channels that come first: a group is one row of memory
        strides, positions, features = (*strides[:2], 0, 1), 1, positions * features
    config = _config.choose_statistics(
        positions, features, x.element_size(), _check.architecture(x.device)
    )
    output = torch.empty((2, *shape), dtype=torch.float32, device=x.device)
    if output.numel():
        statistics_kernel[(_check.check_programs(output[0].numel()),)](
            x,
            output,
            *strides,
            *shape,
            positions,
            features,
            eps,
            RMS=rms,
            COLUMNS=config.columns,
            INNER=config.inner,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
    return output


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


def group_norm_sqnorm(
    x: torch.Tensor,
    g: torch.Tensor,
    groups: int,
    eps: float,
    *,
    config: _config.TileConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `scale_sqnorm`, x normalised over positions and the channels of each of `groups` groups.

    Args:
        x, g: (B, T, C); with one channel in each group this is InstanceNorm.
        groups: a divisor of C.
        eps: what the layer adds to the variance.
    Cost: two reads of x, the second mostly from cache, and one of g.
    """
    segments = _check.check_pair(x, g)
    statistics = group_statistics(x, groups, eps)
    return squares(scale_products(x, g, segments, statistics, config, sums=False))


def group_norm_sum(
    x: torch.Tensor,
    g: torch.Tensor,
    groups: int,
    eps: float,
    *,
    config: _config.TileConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `scale_sum`, x normalised as by `group_norm_sqnorm`."""
    segments = _check.check_pair(x, g)
    statistics = group_statistics(x, groups, eps)
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
