"""The operators in plain torch: vectors, scales, norm layers; see `_reference.py`."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from gradstats.kernels._reference import Call, result_dtype, rows_of, stacked
from torch import Tensor


def _deviation(x: Tensor, eps: float, rms: bool) -> Tensor:
    """1 / sqrt(variance + eps) of every row, (..., 1)."""
    centred = x if rms else x - x.mean(-1, keepdim=True)
    return (centred.square().mean(-1, keepdim=True) + eps).rsqrt()


def _normalised(x: Tensor, eps: float, rms: bool) -> Tensor:
    return (x if rms else x - x.mean(-1, keepdim=True)) * _deviation(x, eps, rms)


def _groups(x: Tensor, groups: int) -> Tensor:
    """(B, groups, positions * channels of a group) of x (B, T, C)."""
    batch, positions, channels = x.shape
    return x.mT.reshape(batch, groups, positions * (channels // groups))


def _of_groups(blocks: Tensor, x: Tensor) -> Tensor:
    return blocks.reshape(x.shape[0], x.shape[2], x.shape[1]).mT


def _x_hat(call: Call) -> Tensor:
    """The factor of the gradients: the input, normalised as the layer does it."""
    x = (call["g"] if call["x"] is None else call["x"]).double()
    if "eps" not in call:
        normalised = call.get("rstd") is not None
        return (x - call["mean"]) * call["rstd"] if normalised else x
    if "groups" not in call:
        return _normalised(x, call["eps"], call["rms"])
    return _of_groups(_normalised(_groups(x, call["groups"]), call["eps"], False), x)


def _input_gradient(call: Call) -> Tensor:
    g = call["g"].double()
    g = g if call["weight"] is None else g * call["weight"]
    if "eps" not in call:
        return g if call["rstd"] is None else g * call["rstd"]
    x, eps = call["x"].double(), call["eps"]
    if "groups" not in call:
        return _norm_gradient(x, g, eps, call["rms"])
    blocks, own = (_groups(side, call["groups"]) for side in (x, g))
    return _of_groups(_norm_gradient(blocks, own, eps, False), x)


def _norm_gradient(x: Tensor, weighted: Tensor, eps: float, rms: bool) -> Tensor:
    """The input gradient of normalised rows, given the weighted output gradient."""
    x_hat = _normalised(x, eps, rms)
    gradient = weighted - x_hat * (weighted * x_hat).mean(-1, keepdim=True)
    if not rms:
        gradient = gradient - weighted.mean(-1, keepdim=True)
    return gradient * _deviation(x, eps, rms)


def _sums(x_hat: Tensor, g: Tensor, bounds: Tensor | None) -> tuple[Tensor, Tensor]:
    """Sums of g x_hat and of g over the positions of every example, each (B, C)."""
    rows = [rows_of(each, bounds) for each in (x_hat, g)]
    scale = (mine * theirs for mine, theirs in zip(*rows, strict=True))
    both = ((each.sum(0) for each in own) for own in (scale, rows[1]))
    scale_sum, shift_sum = (stacked(own, g.shape[-1]) for own in both)
    return scale_sum, shift_sum


def _both_sums(call: Call) -> tuple[Tensor, Tensor]:
    return _sums(_x_hat(call), call["g"], call.get("cu_seqlens"))


def _both_gradients(call: Call) -> tuple[Tensor, ...]:
    return tuple(each.to(result_dtype(call["x"])) for each in _both_sums(call))


def _both_squares(call: Call) -> tuple[Tensor, ...]:
    return tuple(each.square().sum(1) for each in _both_sums(call))


def _vector_sum(call: Call) -> Tensor:
    v = call["v"]
    return _sums(v, v, call["cu_seqlens"])[1]


def _direction(call: Call) -> Tensor:
    scale, shift = _both_sums(call)
    return (shift if call["x"] is None else scale) @ call["direction"].double()


def _backward(call: Call) -> tuple[Tensor, ...]:
    """The whole backward of a layer; results that are not wanted are empty."""
    like = call["g"] if call["x"] is None else call["x"]
    gradient, bounds = _input_gradient(call), call.get("cu_seqlens")
    if bounds is not None:
        outside = torch.ones(len(gradient), dtype=torch.bool)
        for start, end in itertools.pairwise(bounds.tolist()):
            outside[start:end] = False
        gradient = gradient.masked_fill(outside[:, None], 0.0)
    wanted = call["x"] is not None, call.get("shift", True)
    dtype = call["gradient_dtype"] or result_dtype(like)
    own = like.new_empty(0)
    if call.get("input_gradient", True):
        own = torch.empty_like(like).copy_(gradient)
    sums = _both_sums(call)
    totals = (each.sum(0) if call["sums"] else each.new_empty(0) for each in sums)
    squares = (each.square().sum(1) for each in sums)
    parts = [each.to(dtype) for each in totals], list(squares)
    return own, *(
        part if kind else part.new_empty(0)
        for both in parts
        for part, kind in zip(both, wanted, strict=True)
    )


IMPLEMENTATIONS: dict[str, Callable[[Call], Any]] = {
    "vector_sqnorm": lambda call: _vector_sum(call).square().sum(1),
    "vector_sum": lambda call: _vector_sum(call).to(result_dtype(call["v"])),
    "scale_sum": _both_gradients,
    "scale_direction": _direction,
    "scale_backward": _backward,
    "layer_norm_sqnorm": _both_squares,
    "layer_norm_sum": _both_gradients,
    "layer_norm_backward": _backward,
    "group_norm_sqnorm": _both_squares,
    "group_norm_sum": _both_gradients,
    "group_norm_backward": _backward,
}
