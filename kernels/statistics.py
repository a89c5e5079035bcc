"""Mean and inverse deviation of groups of channels and of rows, which normalise inputs."""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from gradstats.kernels import _check, _streaming
from gradstats.kernels._launching import launch_kernel
from gradstats.kernels._tile import load_tile


@triton.jit
def block_statistics(
    base,  # pointer to the first element of the block
    stride_t,
    stride_d,
    positions,
    features,
    eps,
    RMS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):
    """(mean, 1 / sqrt(variance + eps)) of a block of positions x features; with RMS the mean is 0.

    Every lane keeps a running mean and squared deviations from it, so that a mean far larger than
    the deviation costs no digits. Lanes are combined at the end.
    """
    inner, lanes = tl.arange(0, INNER), tl.arange(0, COLUMNS)
    count = tl.zeros((INNER, COLUMNS), tl.float32)
    mean = tl.zeros((INNER, COLUMNS), tl.float32)
    squares = tl.zeros((INNER, COLUMNS), tl.float32)
    for column in range(0, features, COLUMNS):
        columns = column + lanes
        for row in range(0, positions, INNER):
            rows = row + inner
            x = load_tile(base, rows, stride_t, positions, columns, stride_d, features)
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
        average = 0.0 * total
        variance = tl.sum(squares) / total
    else:
        average = tl.sum(count * mean) / total
        apart = tl.where(count > 0.0, mean - average, 0.0)
        variance = (tl.sum(squares) + tl.sum(count * apart * apart)) / total
    return average, 1.0 / tl.sqrt(variance + eps)


@triton.jit(do_not_specialize=["positions", "batch", "groups"])
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
    """Mean and inverse deviation over the positions and features of one group of one example."""
    index = tl.program_id(0)
    example = index // groups
    group = index - example * groups
    base = x_ptr + tl.cast(example, tl.int64) * stride_xb + tl.cast(group, tl.int64) * stride_xg
    mean, rstd = block_statistics(
        base, stride_xt, stride_xd, positions, features, eps, RMS, COLUMNS, INNER
    )
    tl.store(output_ptr + index, mean)
    stride_output = tl.cast(batch, tl.int64) * groups
    tl.store(output_ptr + stride_output + index, rstd)


@dataclasses.dataclass(frozen=True)
class Statistics:
    """Mean and inverse deviation that normalise inputs, fp32, of one shape and layout.

    With `by_position` (B, T), or (N,) for packed rows; else (B, groups), or (groups,) if all
    examples share them, where a group is `features_per_group` adjacent channels. If they depend on
    the input, its gradient also needs `shift_mean` and `scale_mean`, of the same shape and layout:
    the means of g weight and of g weight x_hat over the elements that are normalised together.
    """

    mean: torch.Tensor
    rstd: torch.Tensor
    features_per_group: int = 1
    by_position: bool = False
    shift_mean: torch.Tensor | None = None
    scale_mean: torch.Tensor | None = None


def strides_of(statistic: torch.Tensor, by_position: bool) -> tuple[int, int, int]:
    """(example, position, group) strides."""
    example = 0 if statistic.dim() == 1 else statistic.stride(0)
    other = statistic.stride(-1)
    return (example, other, 0) if by_position else (example, 0, other)


def given_statistics(
    mean: torch.Tensor | None, rstd: torch.Tensor | None, x: torch.Tensor
) -> Statistics | None:
    """The caller's statistics of channels, checked; None if there are none."""
    if mean is None and rstd is None:
        return None
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
        or tuple(mean.shape) != (x.shape[-1],)
        or mean.dtype != torch.float32
        or mean.device != x.device
    ):
        raise _check.KernelInputError(
            "mean and rstd must both be given, fp32 on the inputs' device, of one layout, and one "
            f"number for each channel, ({x.shape[-1]},); got {layouts}: make both so, or pass "
            "neither"
        )
    return Statistics(mean, rstd)


def group_statistics(x: torch.Tensor, groups: int, eps: float) -> Statistics:
    """Statistics of every group of channels of every example of x (B, T, C), from one read."""
    _check.check_groups(x, groups)
    width = x.shape[-1] // groups
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
    config = _streaming.choose_scale(positions, features)
    output = torch.empty((2, *shape), dtype=torch.float32, device=x.device)
    if x.numel():  # without elements nothing is multiplied by the statistics
        launch_kernel(
            statistics_kernel,
            output[0].numel(),
            x,
            output,
            *strides,
            *shape,
            positions,
            features,
            eps,
            RMS=rms,
            **config.of_streams,
        )
    return output
