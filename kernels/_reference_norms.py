"""Scales and norm layers in plain torch."""

from __future__ import annotations

import itertools

import torch
from gradstats.kernels._reference_linear import result_dtype, rows_of
from torch import Tensor


def scale_sum(
    x: Tensor,
    g: Tensor,
    mean: Tensor | None = None,
    rstd: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> tuple[Tensor, Tensor]:
    scales, shifts = [], []
    for x_rows, g_rows in zip(rows_of(x, cu_seqlens), rows_of(g, cu_seqlens), strict=True):
        x_hat = x_rows.double()
        if mean is not None and rstd is not None:
            x_hat = (x_hat - mean) * rstd
        scales.append((x_hat * g_rows.double()).sum(0))
        shifts.append(g_rows.double().sum(0))
    return _stacked(scales, x), _stacked(shifts, x)


def layer_norm_sum(
    x: Tensor,
    g: Tensor,
    eps: float,
    rms: bool = False,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> tuple[Tensor, Tensor]:
    scale, shift = scale_sum(_normalised(x, eps, rms), g, cu_seqlens=cu_seqlens)
    return scale.to(result_dtype(x)), shift.to(result_dtype(x))


def group_norm_sum(x: Tensor, g: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor]:
    batch, positions, channels = x.shape
    blocks = x.double().mT.reshape(batch, groups, positions * (channels // groups))
    x_hat = _normalised(blocks, eps, False).reshape(batch, channels, positions).mT
    scale, shift = scale_sum(x_hat, g)
    return scale.to(result_dtype(x)), shift.to(result_dtype(x))


def vector_sum(
    v: Tensor, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None
) -> Tensor:
    return scale_sum(v, v, cu_seqlens=cu_seqlens)[1]


def scale_backward(
    g: Tensor,
    x: Tensor | None,
    weight: Tensor | None = None,
    mean: Tensor | None = None,
    rstd: Tensor | None = None,
    shift: bool = True,
    input_gradient: bool = True,
    sums: bool = True,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    gradient_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    gradients = scale_sum((g if x is None else x).double(), g, mean, rstd, cu_seqlens)
    gradient = g.double() * (1.0 if weight is None else weight)
    if rstd is not None:
        gradient = gradient * rstd
    _clear_outside(gradient, cu_seqlens)
    like = g if x is None else x
    own, *both = _whole_backward(like, gradient, gradients, sums, gradient_dtype)
    scale, shift_, scale_sqnorm, shift_sqnorm = (
        part if wanted else part.new_empty(0)
        for part, wanted in zip(both, (x is not None, shift) * 2, strict=True)
    )
    return (
        own if input_gradient else like.new_empty(0), scale, shift_, scale_sqnorm, shift_sqnorm
    )  # fmt: skip


def scale_direction(
    g: Tensor,
    x: Tensor | None,
    direction: Tensor,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    scale, shift = scale_sum((g if x is None else x).double(), g, cu_seqlens=cu_seqlens)
    return (shift if x is None else scale) @ direction.double()


def layer_norm_sqnorm(
    x: Tensor,
    g: Tensor,
    eps: float,
    rms: bool = False,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> tuple[Tensor, Tensor]:
    return _squares(layer_norm_sum(x.double(), g, eps, rms, cu_seqlens))


def group_norm_sqnorm(x: Tensor, g: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor]:
    return _squares(group_norm_sum(x.double(), g, groups, eps))


def layer_norm_backward(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    eps: float,
    rms: bool = False,
    sums: bool = True,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    gradient_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    both = layer_norm_sum(x.double(), g, eps, rms, cu_seqlens)
    gradient = _norm_gradient(x, g if weight is None else g.double() * weight, eps, rms)
    _clear_outside(gradient, cu_seqlens)
    return _whole_backward(x, gradient, both, sums, gradient_dtype)


def group_norm_backward(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    groups: int,
    eps: float,
    sums: bool = True,
    gradient_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    batch, positions, channels = x.shape
    both = group_norm_sum(x.double(), g, groups, eps)
    weighted = g.double() if weight is None else g.double() * weight
    sizes = batch, groups, positions * (channels // groups)
    blocks, own = (side.double().mT.reshape(sizes) for side in (x, weighted))
    gradient = _norm_gradient(blocks, own, eps, False).reshape(batch, channels, positions).mT
    return _whole_backward(x, gradient, both, sums, gradient_dtype)


def _clear_outside(gradient: Tensor, cu_seqlens: Tensor | None) -> None:
    """Sets the gradient of rows that belong to no example to zero."""
    if cu_seqlens is not None:
        outside = torch.ones(len(gradient), dtype=torch.bool)
        for start, end in itertools.pairwise(cu_seqlens.tolist()):
            outside[start:end] = False
        gradient[outside] = 0


def _norm_gradient(x: Tensor, weighted: Tensor, eps: float, rms: bool) -> Tensor:
    """The input gradient of rows that are normalised, fp64, given the weighted output gradient."""
    x_hat, weighted = _normalised(x, eps, rms), weighted.double()
    gradient = weighted - x_hat * (weighted * x_hat).mean(-1, keepdim=True)
    if not rms:
        gradient = gradient - weighted.mean(-1, keepdim=True)
    return gradient * _deviation(x, eps, rms)


def _whole_backward(
    x: Tensor,
    gradient: Tensor,
    both: tuple[Tensor, Tensor],
    sums: bool,
    gradient_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Results of a layer's backward out of its input gradient and per-example gradients."""
    dtype = gradient_dtype or result_dtype(x)
    scale, shift = (
        values.sum(0).to(dtype) if sums else values.new_empty(0, dtype=dtype) for values in both
    )
    return torch.empty_like(x).copy_(gradient), scale, shift, *_squares(both)


def _deviation(x: Tensor, eps: float, rms: bool) -> Tensor:
    """1 / sqrt(variance + eps) of every row, fp64 (..., 1)."""
    x = x.double()
    centred = x if rms else x - x.mean(-1, keepdim=True)
    return (centred.square().mean(-1, keepdim=True) + eps).rsqrt()


def _normalised(x: Tensor, eps: float, rms: bool) -> Tensor:
    rstd = _deviation(x, eps, rms)
    x = x.double()
    return (x if rms else x - x.mean(-1, keepdim=True)) * rstd


def _stacked(values: list[Tensor], operand: Tensor) -> Tensor:
    """Per-example vectors as one matrix."""
    if not values:
        return operand.new_zeros((0, operand.shape[-1]), dtype=result_dtype(operand))
    return torch.stack(values).to(result_dtype(operand))


def _squares(sums: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    scale, shift = (values.double().square().sum(1) for values in sums)
    return scale, shift
