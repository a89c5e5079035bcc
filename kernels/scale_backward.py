"""The whole backward of scales and shifts.

One pass over the data yields the input gradient, the summed gradients and the squared norms: of
broadcast multiplications and additions, of biases, of BatchNorm in evaluation.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from gradstats.kernels import _check, _config, scale
from gradstats.kernels._launching import remembered
from gradstats.kernels._results import nothing
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
    gradient_dtype: torch.dtype | None = None,
    config: _config.TileConfig | None = None,
    splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The backward of y = weight x_hat + bias and the squared norm of every example's share in it.

    input_gradient = g weight rstd,  scale = sum_it g_it x_hat_it,  shift = sum_it g_it,
    x_hat = x, or (x - mean) rstd where statistics are given

    Args:
        g, x, mean, rstd, cu_seqlens, max_seqlen, config, splits: as
            `scale_gradients.scale_sum`; without x there is no scale.
        weight: (C,) the scale; None for 1.
        shift: whether there is a shift.
        input_gradient: whether it is wanted.
        sums: whether the summed gradients are wanted.
        gradient_dtype: dtype of the summed gradients; None for fp32. Sums are fp32 either way.
    Returns:
        (input_gradient like x, scale_gradient (C,), shift_gradient (C,), scale_sqnorm fp64 (B,),
        shift_sqnorm fp64 (B,)); what is not wanted is empty. Rows outside every segment have input
        gradient zero.
    Raises:
        KernelInputError: before any launch, for inputs that no kernel serves.
    Cost: one read of the operands and one write of the input gradient; workspace of a few sums for
    each processor of the device.
    """
    plan = _plan(
        scale.scale_kernel, (x, g, weight, mean, rstd), cu_seqlens, max_seqlen,
        config, splits, shift, input_gradient, sums, gradient_dtype,
    )  # fmt: skip
    scaled = None if weight is None or not input_gradient else weight.contiguous()
    like = g if x is None else x
    found = scale.run(plan.launches, like, x, g, scaled, mean, rstd, None, None, plan.bounds)
    return _results(found, plan.nothing, x is not None, shift)


def prepare(
    g: torch.Tensor,
    x: torch.Tensor | None,
    *,
    weight: torch.Tensor | None = None,
    mean: torch.Tensor | None = None,
    rstd: torch.Tensor | None = None,
    input_gradient: bool = False,
    sums: bool = True,
    gradient_dtype: torch.dtype | None,
) -> scale.Plan:
    """What `scale.run` needs to do as `scale_backward`, for dense operands of the same layout."""
    options = (None, None, None, None, True, input_gradient, sums, gradient_dtype)
    return _plan(scale.scale_kernel, (x, g, weight, mean, rstd), *options).launches


class _Plan(NamedTuple):
    """All of a call but its tensors.

    Attributes:
        bounds: of packed examples.
        launches: of the operands.
        nothing: stand for an input gradient, a sum and squares that are not wanted.
    """

    bounds: torch.Tensor | None
    launches: scale.Plan
    nothing: tuple[torch.Tensor, ...]


@remembered
def _plan(
    kernel: Any,
    operands: tuple[torch.Tensor | None, ...],
    cu_seqlens: torch.Tensor | None,
    max_seqlen: int | None,
    config: _config.TileConfig | None,
    splits: int | None,
    shift: bool,
    input_gradient: bool,
    sums: bool,
    gradient_dtype: torch.dtype | None,
) -> _Plan:
    x, g, weight, mean, rstd = operands
    assert g is not None
    segments = scale.check_scaled(g, x, weight, cu_seqlens, max_seqlen)
    given_statistics(mean, rstd, g)
    read = (x, g, weight if input_gradient else None, mean, rstd, None, None)
    launches = scale.prepare(
        kernel, read, segments, 1, False, config, splits, shift, input_gradient, sums, False,
        False, gradient_dtype,
    )  # fmt: skip
    return _Plan(segments.cu_seqlens, launches, _nothing(g if x is None else x, gradient_dtype))


def _nothing(like: torch.Tensor, gradient_dtype: torch.dtype | None) -> tuple[torch.Tensor, ...]:
    return nothing(like.device, like.dtype, gradient_dtype or torch.float32, torch.float64)


def whole_backward(
    g: torch.Tensor,
    x: torch.Tensor,
    segments: _check.Segments,
    statistics: Statistics,
    *,
    weight: torch.Tensor | None,
    sums: bool,
    gradient_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `scale_backward` of scale and shift, of operands checked already and any statistics."""
    found = scale.launch(
        g, x, segments, statistics,
        weight=weight, input_gradient=True, sums=sums, gradient_dtype=gradient_dtype,
    )  # fmt: skip
    return _results(found, _nothing(x, gradient_dtype), True, True)


def _results(
    found: scale.Products, unwanted: tuple[torch.Tensor, ...], first: bool, last: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Results of the scale, which is first where there is one, and of the shift, which is last."""
    gradient, _, totals, squares = found
    no_gradient, no_total, no_square = unwanted
    return (
        no_gradient if gradient is None else gradient,
        totals[0] if first and totals else no_total,
        totals[-1] if last and totals else no_total,
        squares[0] if first else no_square,
        squares[-1] if last else no_square,
    )
