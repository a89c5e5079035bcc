"""The whole backward of scales and shifts, and their per-example gradients along a direction.

One pass over the data yields the input gradient, the summed gradients and the squared norms: of
broadcast multiplications and additions, of biases, of BatchNorm in evaluation.
"""

from __future__ import annotations

from typing import Any

import torch
from gradstats.kernels import _check, _config
from gradstats.kernels._launching import remembered
from gradstats.kernels.scale import launch, scale_kernel
from gradstats.kernels.statistics import Statistics, given_statistics


def scale_backward(
    g: torch.Tensor,
    x: torch.Tensor | None,
    *,
    weight: torch.Tensor | None = None,
    mean: torch.Tensor | None = None,
    rstd: torch.Tensor | None = None,
    shift: bool = True,
    input_gradient: bool = True,
    sums: bool = True,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    config: _config.TileConfig | None = None,
    splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The backward of y = weight x_hat + bias and the squared norm of every example's share in it.

    input_gradient = g weight rstd,  scale = sum_it g_it x_hat_it,  shift = sum_it g_it,
    x_hat = x, or (x - mean) rstd where statistics are given

    Args:
        g, x, mean, rstd, cu_seqlens, max_seqlen, config, splits: as `scale_sqnorm`; without x there
            is no scale.
        weight: (C,) the scale; None for 1.
        shift: whether there is a shift.
        input_gradient: whether it is wanted.
        sums: whether the summed gradients are wanted.
    Returns:
        (input_gradient like x, scale_gradient fp32 (C,), shift_gradient fp32 (C,), scale_sqnorm
        fp64 (B,), shift_sqnorm fp64 (B,)); what is not wanted is empty. Rows outside every segment
        have input gradient zero.
    Raises:
        KernelInputError: before any launch, for inputs that no kernel serves.
    Cost: one read of the operands and one write of the input gradient; workspace of a few sums for
    each processor of the device.
    """
    segments = _checked(scale_kernel, (g, x, weight), cu_seqlens, max_seqlen)
    statistics = given_statistics(mean, rstd, segments, g)
    return whole_backward(
        g, x, segments, statistics, config, splits,
        weight=weight, shift=shift, input_gradient=input_gradient, sums=sums,
    )  # fmt: skip


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

    Args, raises and cost: as `scale_sqnorm`, and
        direction: (C,); ones give the gradient of a scale that all channels share.
    Returns:
        fp64 (B,).
    """
    segments = _checked(scale_kernel, (g, x, direction), cu_seqlens, max_seqlen)
    return launch(
        g, x, segments, None, config, splits,
        weight=direction, shift=x is None, sums=False, along=True,
    ).sqnorm[0]  # fmt: skip


@remembered
def _checked(
    kernel: Any,
    operands: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None],
    cu_seqlens: torch.Tensor | None,
    max_seqlen: int | None,
) -> _check.Segments:
    g, x, weight = operands
    segments = _check.check_pair(g if x is None else x, g, cu_seqlens, max_seqlen, mixed=True)
    _check.check_scale(weight, g)
    return segments


def whole_backward(
    g: torch.Tensor,
    x: torch.Tensor | None,
    segments: _check.Segments,
    statistics: Statistics | None,
    config: _config.TileConfig | None = None,
    splits: int | None = None,
    *,
    weight: torch.Tensor | None,
    shift: bool = True,
    input_gradient: bool = True,
    sums: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `scale_backward`, of operands that are checked already and any statistics."""
    found = launch(
        g, x, segments, statistics, config, splits,
        weight=weight if input_gradient else None, shift=shift, input_gradient=input_gradient,
        sums=sums,
    )  # fmt: skip
    gradient = found.input_gradient
    if gradient is None:
        gradient = (g if x is None else x).new_empty(0)
    # kinds stand one after the other as far as there are any
    kinds = (0 if x is not None else None, -1 if shift else None)

    def total(kind: int | None) -> torch.Tensor:
        if kind is None or not sums:
            return g.new_empty(0, dtype=torch.float32)
        return found.totals[kind]

    def square(kind: int | None) -> torch.Tensor:
        return g.new_empty(0, dtype=torch.float64) if kind is None else found.sqnorm[kind]

    return gradient, total(kinds[0]), total(kinds[1]), square(kinds[0]), square(kinds[1])
