"""Normalisation layers: Vector(Σ_t g·x̂) for the scale and Vector(Σ_t g) for the shift.

PyTorch computes the layer and its gradients; in backward the normalised input x̂ is computed again
from the input, which the layer keeps anyway.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from gradstats._cost import product
from gradstats._factors import Vector, compute_dtype
from gradstats.capture._constants import check_batch_norm
from gradstats.capture._tensors import first_node, node_of
from gradstats.capture._uses import tap
from gradstats.capture.rules._common import Examples, locate, plain
from gradstats.contractions import _triton

# Bytes of x̂ and its product with the gradient that are computed at once.
SCRATCH = 8 * 1024 * 1024


class Normalise(Protocol):
    """How a layer normalises."""

    def __call__(self, x: Tensor, *statistics: Tensor) -> Tensor:
        """Return x̂."""

    def sums(self, x: Tensor, g: Tensor, *statistics: Tensor) -> tuple[Tensor, Tensor]:
        """Return Σ_t g·x̂ and Σ_t g of operands (B, T, features), by the kernels."""


@dataclass(frozen=True)
class AffineFactors:
    """The factors of scale and shift.

    Attributes:
        examples: where the examples lie.
        normalise: how x̂ comes from what was saved.
        channel_axis: the parameters' axis in the input (channel layers); None where the parameters
            span the last axes.
        scale, shift: which of the two are tracked.
        shape: shape of both.
    """

    examples: Examples
    normalise: Normalise
    channel_axis: int | None
    scale: bool
    shift: bool
    shape: tuple[int, ...]

    def __call__(self, grad: Tensor, x: Tensor, *statistics: Tensor) -> list:
        dtype = compute_dtype(grad)
        grad, x = self.examples.first(grad), self.examples.first(x)
        if _triton.runs(grad, x):
            both = self.normalise.sums(*self._positions(x, grad), *statistics)
            values = zip((self.scale, self.shift), both, strict=True)
            return [Vector(v.view(-1, *self.shape), self.shape) for wanted, v in values if wanted]
        batch = grad.shape[0]
        # x̂ and its product with the gradient are used at once and dropped.
        chunk = max(1, min(batch, SCRATCH // (2 * grad[0].numel() * torch.finfo(dtype).bits // 8)))
        scales, shifts = [], []
        for start in range(0, batch, chunk):
            rows = slice(start, start + chunk)
            g = grad[rows].to(dtype)
            if self.scale:
                scales.append(self._sum(g * self.normalise(x[rows].to(dtype), *statistics)))
            if self.shift:
                shifts.append(self._sum(g))
        return [Vector(torch.cat(values), self.shape) for values in (scales, shifts) if values]

    def _positions(self, *operands: Tensor) -> list[Tensor]:
        """Return the operands as (B, T, features), channels that come first as a view."""
        if self.channel_axis is None:
            features = product(self.shape)
            return [operand.reshape(len(operand), -1, features) for operand in operands]
        return [operand.reshape(*operand.shape[:2], -1).mT for operand in operands]

    def _sum(self, terms: Tensor) -> Tensor:
        if self.channel_axis is None:
            return terms.reshape(terms.shape[0], -1, *self.shape).sum(1)
        return terms.reshape(terms.shape[0], self.shape[0], -1).sum(2)


def _attach(tracker, func, result, weight, bias, examples, normalise, channel_axis, *saved):
    nodes = [node for node in (node_of(weight), node_of(bias)) if node is not None]
    shape = tuple((weight if node_of(weight) is not None else bias).shape)
    scale, shift = node_of(weight) is not None, node_of(bias) is not None
    factors = AffineFactors(examples, normalise, channel_axis, scale, shift, shape)
    return tap(tracker, nodes, result, factors, *saved)


def layer_norm(
    tracker, func, input, normalized_shape, weight=None, bias=None, eps=1e-5, cudnn=True
):
    """Normalisation over the last axes."""
    shape = tuple(normalized_shape)
    node = first_node(weight, bias)
    examples = locate(tracker, func, node, input, folds=True, trailing=len(shape))
    result = func(input, shape, plain(weight), plain(bias), eps)
    normalise = LayerNormalise(shape, eps)
    return _attach(tracker, func, result, weight, bias, examples, normalise, None, input)


@dataclass(frozen=True)
class LayerNormalise:
    shape: tuple[int, ...]
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, self.shape, None, None, self.eps)

    def sums(self, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        return _triton.layer_norm_sum(x, g, self.eps, False)


def rms_norm(tracker, func, input, normalized_shape, weight=None, eps=None):
    """Division by the root mean square over the last axes."""
    shape = tuple(normalized_shape)
    examples = locate(tracker, func, first_node(weight), input, folds=True, trailing=len(shape))
    result = func(input, shape, plain(weight), eps)
    # Without eps PyTorch takes the machine epsilon of the input's own dtype.
    normalise = RootMeanSquareNormalise(shape, torch.finfo(input.dtype).eps if eps is None else eps)
    return _attach(tracker, func, result, weight, None, examples, normalise, None, input)


@dataclass(frozen=True)
class RootMeanSquareNormalise:
    shape: tuple[int, ...]
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.shape, None, self.eps)

    def sums(self, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        return _triton.layer_norm_sum(x, g, self.eps, True)


def group_norm(tracker, func, input, num_groups, weight=None, bias=None, eps=1e-5, cudnn=True):
    """Normalisation over groups of channels and all positions."""
    examples = locate(tracker, func, first_node(weight, bias), input, axis=0)
    result = func(input, num_groups, plain(weight), plain(bias), eps)
    normalise = GroupNormalise(num_groups, eps)
    return _attach(tracker, func, result, weight, bias, examples, normalise, 1, input)


@dataclass(frozen=True)
class GroupNormalise:
    groups: int
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return functional.group_norm(x, self.groups, None, None, self.eps)

    def sums(self, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        return _triton.group_norm_sum(x, g, self.groups, self.eps)


def instance_norm(
    tracker,
    func,
    input,
    running_mean=None,
    running_var=None,
    weight=None,
    bias=None,
    use_input_stats=True,
    momentum=0.1,
    eps=1e-5,
):
    """Normalisation over the positions of each channel of each example."""
    examples = locate(tracker, func, first_node(weight, bias), input, axis=0)
    result = func(
        input, running_mean, running_var, plain(weight), plain(bias), use_input_stats, momentum, eps
    )
    if use_input_stats:
        own = GroupNormalise(input.shape[1], eps)
        return _attach(tracker, func, result, weight, bias, examples, own, 1, input)
    normalise = RunningNormalise(eps)
    return _attach(
        tracker,
        func,
        result,
        weight,
        bias,
        examples,
        normalise,
        1,
        input,
        running_mean,
        running_var,
    )


def batch_norm(
    tracker,
    func,
    input,
    running_mean,
    running_var,
    weight=None,
    bias=None,
    training=False,
    momentum=0.1,
    eps=1e-5,
):
    """Normalisation by running statistics; by the batch's own it couples examples: refused."""
    check_batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    examples = locate(tracker, func, first_node(weight, bias), input, axis=0)
    result = func(
        input, running_mean, running_var, plain(weight), plain(bias), training, momentum, eps
    )
    normalise = RunningNormalise(eps)
    return _attach(
        tracker,
        func,
        result,
        weight,
        bias,
        examples,
        normalise,
        1,
        input,
        running_mean,
        running_var,
    )


@dataclass(frozen=True)
class RunningNormalise:
    eps: float

    def __call__(self, x: Tensor, *statistics: Tensor) -> Tensor:
        mean, variance = statistics
        return functional.batch_norm(
            x, mean.to(x.dtype), variance.to(x.dtype), None, None, False, 0.0, self.eps
        )

    def sums(self, x: Tensor, g: Tensor, *statistics: Tensor) -> tuple[Tensor, Tensor]:
        mean, variance = statistics
        return _triton.scale_sum(x, g, mean.float(), (variance.float() + self.eps).rsqrt())


RULES = {
    functional.layer_norm: layer_norm,
    torch.layer_norm: layer_norm,
    functional.rms_norm: rms_norm,
    torch.rms_norm: rms_norm,
    functional.group_norm: group_norm,
    torch.group_norm: group_norm,
    functional.instance_norm: instance_norm,
    functional.batch_norm: batch_norm,
}
