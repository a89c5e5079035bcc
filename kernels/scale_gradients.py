"""Per-example gradients of scales and shifts: themselves, and along a direction."""

from __future__ import annotations

import torch
from gradstats.kernels import _check, _config, scale
from gradstats.kernels.statistics import Statistics, given_statistics


def scale_sum(
    x: torch.Tensor,
    g: torch.Tensor,
    *,
    mean: torch.Tensor | None = None,
    rstd: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    config: _config.TileConfig | None = None,
    splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Per-example gradients of a scale and a shift.

    scale_i = sum_t g_it x_hat_it,  shift_i = sum_t g_it,
    x_hat = x, or (x - mean) rstd where statistics are given

    Args:
        x: what is scaled, (B, T, C), or packed (N, C) with cu_seqlens; bf16, fp16 or fp32, any
            strides: channels that come first are the view (B, C, T).mT.
        g: gradients with respect to the outputs, same shape, of any of these dtypes.
        mean, rstd: fp32 statistics of the channels (C,), of all examples alike.
        cu_seqlens: int (B + 1,) first rows of the examples, on the host or the device.
        max_seqlen: with device bounds, the longest segment; avoids a wait for the device.
        config: overrides the tile table.
        splits: overrides into how many parts the positions of an example are divided.
    Returns:
        (scale, shift), each fp32 (B, C).
    Raises:
        KernelInputError: before any launch, for inputs that no kernel serves.
    Cost: one read of both operands; workspace of a few sums for each processor of the device.
    """
    segments = _check.check_pair(x, g, cu_seqlens, max_seqlen, mixed=True)
    statistics = given_statistics(mean, rstd, x)
    scale_sum, shift_sum = per_example_sums(g, x, segments, statistics, config, splits)
    return scale_sum, shift_sum


def per_example_sums(
    g: torch.Tensor,
    x: torch.Tensor | None,
    segments: _check.Segments,
    statistics: Statistics | None,
    config: _config.TileConfig | None = None,
    splits: int | None = None,
) -> tuple[torch.Tensor, ...]:
    """Sums of x_hat g and of g for every example, each fp32 (B, C); of g alone without x."""
    sums = scale.launch(g, x, segments, statistics, config, splits, every_example=True).sums
    return (sums.squeeze(2) if sums.shape[2] == 1 else sums.sum(2)).unbind(0)


def scale_direction(
    g: torch.Tensor,
    x: torch.Tensor | None,
    direction: torch.Tensor,
    *,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    config: _config.TileConfig | None = None,
    splits: int | None = None,
) -> torch.Tensor:
    """Inner products of the per-example gradients of a scale, or of a shift, with a direction.

    inner_i = sum_t (g_it x_it) . direction, without x  sum_t g_it . direction

    Args, raises and cost: as `scale_sum`, and
        direction: (C,); ones give the gradient of a scale that all channels share.
    Returns:
        fp64 (B,).
    """
    segments = scale.check_scaled(g, x, direction, cu_seqlens, max_seqlen)
    return scale.launch(
        g, x, segments, None, config, splits,
        weight=direction, shift=x is None, sums=False, along=True,
    ).sqnorm[0]  # fmt: skip
