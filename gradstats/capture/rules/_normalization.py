"""Normalisation layers: Vector(Σ_t g·x̂) for the scale and Vector(Σ_t g) for the shift."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from gradstats._factors import compute_dtype
from gradstats.capture.following._batch_norm import refuse_statistics
from gradstats.capture.parameters._refusals import refuse
from gradstats.capture.parameters._tensors import first_node, node_of, nodes_of, value_of
from gradstats.capture.rules._affine import AffineFactors
from gradstats.capture.rules._common import locate
from gradstats.capture.uses._decided import decide
from gradstats.capture.uses._grafted import Grafted
from gradstats.capture.uses._hooked import NORMALISED, NORMALISED_IN_GROUPS, hooked
from gradstats.capture.uses._normalization import NormalisationUse
from gradstats.capture.uses._tap import tap
from gradstats.capture.uses._uses import Use, attach, free_of_views
from gradstats.contractions import _prepared, _triton_layers
from gradstats.contractions._prepared import OfNorm
from gradstats.contractions._result import ones
from gradstats.contractions._triton_layers import NormGradients

if TYPE_CHECKING:
    from gradstats.capture._context import Context


def _attach(
    tracker: Context,
    func,
    run,
    normalise,
    input,
    weight,
    bias,
    *statistics,
    trailing=0,
    place=None,
    noted=True,
):
    """Run the layer with the factors of its parameters attached.

    Args:
        func: the operation that the user called.
        run: does the same, called as run(input, weight, bias, *statistics).
        statistics: what ``normalise`` needs besides the input.
        trailing: how many of the last axes it normalises over; 0 for layers of channels.
        place: where PyTorch's node for the operation keeps the input.
        noted: whether it may be repeated at once for operations that are alike. Not if ``run``
            reads tensors other than its arguments.
    """
    node = node_of(input)
    if node is not None:
        refuse(
            func,
            node,
            "with a scale or shift that is computed from data has no rule",
            "Apply them after the normalisation: norm(x) * scale + shift.",
        )
    node, axis = first_node(weight, bias), None if trailing else 0
    examples = locate(tracker, func, node, input, axis=axis, folds=True, trailing=trailing)
    scale, shift = node_of(weight) is not None, node_of(bias) is not None
    shape = tuple((weight if scale else bias).shape)
    factors = AffineFactors(examples, normalise, not trailing, scale, shift, shape)
    from_data = tracker.marks.is_trained(weight) or tracker.marks.is_trained(bias)
    if from_data and scale and not tracker.settings.exact:
        # A shift computed from data is added outside, where derivatives of the network reach it.
        result = _attach(
            tracker, func, run, normalise, input, weight, None, *statistics,
            trailing=trailing, noted=False,
        )  # fmt: skip
        axes = () if trailing else (1,) * (input.dim() - 2)
        return result + bias.view(*bias.shape, *axes)
    # Statistics that require a gradient are left to PyTorch, which refuses them.
    fixed = not any([each is not None and each.requires_grad for each in statistics])
    if fixed and not from_data and factors.one_pass(tracker.settings, input):
        operands = input, (weight, bias, *statistics), examples, factors, run
        if noted:
            return decide(tracker, _in_one_pass, *operands)
        return _attached(tracker, *operands)
    if place is not None and not from_data:
        found = hooked(tracker, input, (weight, bias), examples, place, factors, run)
        if found is not None:
            return found
    result = free_of_views(run(input, value_of(weight), value_of(bias), *statistics))
    return tap(nodes_of((weight, bias)), result, factors, input, *statistics)


def _in_one_pass(tracker: Context, input, parameters, examples, factors, run) -> Tensor:
    """Run a layer whose backward the kernels compute in one pass.

    Args:
        parameters: scale, shift and statistics.
    """
    result = _attached(tracker, input, parameters, examples, factors, run)
    tracker.note_followed(result, examples)
    return result


def _attached(tracker: Context, input, parameters, examples, factors, run) -> Tensor:
    values, use = map(value_of, parameters), Use(nodes_of(parameters[:2]))
    return attach(NormalisationUse)(use, factors, run, input, *values)


def layer_norm(
    tracker: Context,
    func,
    input,
    normalized_shape,
    weight=None,
    bias=None,
    eps=1e-5,
    cudnn_enable=True,
):
    """Normalisation over the last axes."""
    shape = tuple(normalized_shape)

    def run(x, weight, bias):
        return torch.layer_norm(x, shape, weight, bias, eps)

    options = {"trailing": len(shape), "place": NORMALISED}
    return _attach(tracker, func, run, RowNormalise(shape, eps), input, weight, bias, **options)


@dataclass(frozen=True, slots=True)
class RowNormalise:
    shape: tuple[int, ...]
    eps: float
    rms: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        if self.rms:
            return functional.rms_norm(x, self.shape, None, self.eps)
        # Without a weight PyTorch takes twice as long.
        return torch.layer_norm(x, self.shape, ones(self.shape, x.dtype, x.device), None, self.eps)

    def sums(self, x, g, offsets) -> tuple[Tensor, Tensor]:
        return _triton_layers.layer_norm_sum(x, g, self.eps, self.rms, offsets)

    def backward(self, x, g, weight, offsets, wanted) -> NormGradients:
        return _triton_layers.layer_norm_backward(x, g, weight, self.eps, self.rms, offsets, wanted)

    def prepare(self, x, g, weight, wanted) -> OfNorm | None:
        return _prepared.of_layer_norm(x, g, weight, self.eps, self.rms, wanted[1])


def rms_norm(tracker: Context, func, input, normalized_shape, weight=None, eps=None):
    """Division by the root mean square over the last axes."""
    shape = tuple(normalized_shape)

    def run(x, weight, bias):
        return func(x, shape, weight, eps)

    # Without eps PyTorch takes the machine epsilon of the dtype that it computes in: float32 for
    # half inputs, whether autocast widens them or PyTorch itself does (ATen, rms_norm_composite).
    floor = torch.finfo(compute_dtype(input)).eps if eps is None else eps
    normalise = RowNormalise(shape, floor, rms=True)
    return _attach(tracker, func, run, normalise, input, weight, None, trailing=len(shape))


def group_norm(
    tracker: Context, func, input, num_groups, weight=None, bias=None, eps=1e-5, cudnn_enabled=True
):
    """Normalisation over groups of channels and all positions."""

    def run(x, weight, bias):
        return func(x, num_groups, weight, bias, eps)

    normalise, place = GroupNormalise(num_groups, eps), NORMALISED_IN_GROUPS
    return _attach(tracker, func, run, normalise, input, weight, bias, place=place)


@dataclass(frozen=True, slots=True)
class GroupNormalise:
    groups: int
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return functional.group_norm(x, self.groups, None, None, self.eps)

    def sums(self, x, g, offsets) -> tuple[Tensor, Tensor]:
        return _triton_layers.group_norm_sum(x, g, self.groups, self.eps)

    def backward(self, x, g, weight, offsets, wanted) -> NormGradients:
        return _triton_layers.group_norm_backward(x, g, weight, self.groups, self.eps, wanted)

    def prepare(self, x, g, weight, wanted) -> OfNorm | None:
        return _prepared.of_group_norm(x, g, weight, self.groups, self.eps, wanted[1])


def instance_norm(
    tracker: Context,
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

    def run(x, weight, bias, *statistics):
        return func(x, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)

    statistics: tuple[Tensor, ...] = ()
    normalise: GroupNormalise | RunningNormalise = GroupNormalise(input.shape[1], eps)
    if not use_input_stats:
        statistics, normalise = (running_mean, running_var), RunningNormalise(eps)
    return _attach(tracker, func, run, normalise, input, weight, bias, *statistics, noted=False)


def batch_norm(
    tracker: Context,
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
    """Normalisation by running statistics; those of the batch would couple its examples."""
    if training or running_mean is None:
        if tracker.batch_size > 1:
            refuse_statistics(running_mean, weight, bias)
        rule = Grafted(by_own_statistics)
        return rule(
            tracker, func, input, running_mean, running_var, weight, bias, training, momentum, eps
        )

    def run(x, weight, bias, mean, variance):
        return func(x, mean, variance, weight, bias, training, momentum, eps)

    statistics = running_mean, running_var
    # With an axis of size 1 the gradient may need another memory format (see ``settle_format``).
    noted, normalise = 1 not in input.shape, RunningNormalise(eps)
    return _attach(tracker, func, run, normalise, input, weight, bias, *statistics, noted=noted)


def by_own_statistics(
    input, running_mean, running_var, weight, bias, training, momentum, eps
) -> Tensor:
    """Batch normalisation by the batch's own statistics.

    It leaves the running statistics alone: the operation that it runs beside updates them.
    """
    axes = (1,) * (input.dim() - 2)
    result = functional.batch_norm(input, None, None, None, None, True, 0.0, eps)
    if weight is not None:
        result = result * weight.view(-1, *axes)
    return result if bias is None else result + bias.view(-1, *axes)


@dataclass(frozen=True, slots=True)
class RunningNormalise:
    eps: float

    def __call__(self, x: Tensor, *statistics: Tensor) -> Tensor:
        mean, variance = statistics
        return functional.batch_norm(
            x, mean.to(x.dtype), variance.to(x.dtype), None, None, False, 0.0, self.eps
        )

    def sums(self, x, g, offsets, *statistics: Tensor) -> tuple[Tensor, Tensor]:
        return _triton_layers.scale_sum(x, g, *self._mean_and_rstd(*statistics))

    def backward(self, x, g, weight, offsets, wanted, *statistics) -> NormGradients:
        return _triton_layers.scale_backward(
            x, g, weight, *self._mean_and_rstd(*statistics), wanted
        )

    def prepare(self, x, g, weight, wanted, *statistics) -> OfNorm:
        found = _prepared.of_scale(x, g, weight, *self._mean_and_rstd(*statistics), wanted)
        return lambda g, x, weight, *given: found(g, x, weight, *self._mean_and_rstd(*given))

    def _mean_and_rstd(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        return mean.float(), (variance.float() + self.eps).rsqrt()


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
