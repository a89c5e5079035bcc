"""Normalisation layers: Vector(Σ_t g·x̂) for the scale and Vector(Σ_t g) for the shift.

PyTorch computes the layer and its gradients; in backward the normalised input x̂ is computed again
from the input, which the layer keeps anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from gradstats._cost import product
from gradstats._factors import Vector, cast, compute_dtype, segment_sum
from gradstats.capture._constants import check_batch_norm
from gradstats.capture._hooked import NORMALISED, NORMALISED_IN_GROUPS, hooked
from gradstats.capture._nodes import Node
from gradstats.capture._normalization import NormalisationUse
from gradstats.capture._tensors import first_node, node_of
from gradstats.capture._uses import Settings, attach, derived, tap, use_of
from gradstats.capture._views import ExampleLayout, example_view
from gradstats.capture.rules._common import Examples, locate, plain
from gradstats.contractions import Contraction, _triton, _triton_layers
from gradstats.contractions._triton_layers import NormGradients, Wanted

# Bytes of x̂ and its product with the gradient that are computed at once.
SCRATCH = 8 * 1024 * 1024


class Normalise(Protocol):
    """How a layer normalises."""

    def __call__(self, x: Tensor, *statistics: Tensor) -> Tensor:
        """Return x̂."""

    def sums(
        self, x: Tensor, g: Tensor, offsets: Sequence[int] | None, *statistics: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return Σ_t g·x̂ and Σ_t g by the kernels, of operands as ``backward`` takes them."""

    def backward(
        self,
        x: Tensor,
        g: Tensor,
        weight: Tensor | None,
        offsets: Sequence[int] | None,
        wanted: Wanted,
        *statistics: Tensor,
    ) -> NormGradients:
        """Return it, where ``one_pass``, of operands (B, T, features) or packed (N, features)."""


@dataclass(frozen=True, eq=False)
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
        if self._on_chip(grad, x):
            # (B, features) is what uses or batches that meet must hold: the factor itself.
            both = self.normalise.sums(*self._operands(x, grad), *statistics)
            values = zip((self.scale, self.shift), both, strict=True)
            return [Vector(v.view(-1, *self.shape), self.shape) for wanted, v in values if wanted]
        grad, x = self.examples.lead(grad), self.examples.lead(x)
        offsets = self._offsets()
        # x̂ and its product with the gradient are used at once and dropped.
        example = 2 * grad.numel() // max(1, len(offsets) - 1) * dtype.itemsize
        chunk = max(1, SCRATCH // max(1, example))
        scales, shifts = [], []
        for start in range(0, len(offsets) - 1, chunk):
            bounds = offsets[start : start + chunk + 1]
            g = cast(self._rows(grad, bounds), dtype)
            if self.scale:
                rows = cast(self._rows(x, bounds), dtype)
                scales.append(self._sum(self.normalise(rows, *statistics).mul_(g), bounds))
            if self.shift:
                shifts.append(self._sum(g, bounds))
        return [
            Vector(torch.cat(values) if len(values) > 1 else values[0], self.shape)
            for values in (scales, shifts)
            if values
        ]

    def norms(self, grad: Tensor, x: Tensor, *statistics: Tensor) -> list[Contraction] | None:
        """Return squared norms where the kernels take them without writing a gradient."""
        if not self._on_chip(grad, x):
            return None
        found = self.backward(grad, x, None, (False, None), *statistics)
        both = zip((self.scale, self.shift), (found.scale_norms, found.shift_norms), strict=True)
        return [norms for wanted, norms in both if wanted]

    def _on_chip(self, grad: Tensor, x: Tensor) -> bool:
        """Whether the kernels take the rows of examples as they lie."""
        segments = self.examples.segments
        apart = segments is None or segments.order is None
        if self.channel_axis is not None:
            apart = self.examples.plain
        return apart and _triton.runs(grad, x)

    def _operands(self, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, tuple[int, ...] | None]:
        """Return both as (B, T, features), or packed (rows, features) with bounds of examples."""
        examples = self.examples
        if examples.segments is None:
            rows, g = self._positions(examples.first(x), examples.first(grad))
            return rows, g, None
        features = product(self.shape)
        rows, g = (examples.lead(side).reshape(-1, features) for side in (x, grad))
        return rows, g, examples.segments.offsets_of(len(rows))

    def _positions(self, *operands: Tensor) -> list[Tensor]:
        """Return the operands as (B, T, features), channels that come first as a view."""
        if self.channel_axis is None:
            features = product(self.shape)
            return [
                operand
                if operand.dim() == 3 and operand.shape[2] == features
                else operand.reshape(operand.shape[0], -1, features)
                for operand in operands
            ]
        return [operand.reshape(*operand.shape[:2], -1).mT for operand in operands]

    def one_pass(self, settings: Settings, x: Tensor) -> bool:
        """Whether the kernels compute the layer's backward: gradients and norms in one pass."""
        if torch.compiler.is_compiling() or settings.consumer is not None or settings.exact:
            return False
        return self._on_chip(x, x)

    def backward(
        self,
        grad: Tensor,
        x: Tensor,
        weight: Tensor | None,
        wanted: Wanted,
        *statistics: Tensor,
    ) -> NormGradients:
        """Return gradients and squared norms, by the kernels."""
        examples = self.examples
        if weight is not None:
            weight = weight.flatten()
        rows, g, offsets = self._operands(x, grad)
        leading = examples.first(x) if offsets is None else examples.lead(x)
        result = self.normalise.backward(rows, g, weight, offsets, wanted, *statistics)
        if result.input is None:
            return result
        gradient = result.input if self.channel_axis is None else result.input.mT
        if gradient.shape != leading.shape:
            gradient = gradient.reshape(leading.shape)
        if examples.segments is None and examples.fold != 1:
            gradient = gradient.flatten(0, 1)
        if examples.axis != 0:
            gradient = gradient.movedim(0, examples.axis)
        return result if gradient is result.input else result._replace(input=gradient)

    def _offsets(self) -> Sequence[int]:
        """Return where each example's rows begin, once sorted by example."""
        if self.examples.segments is not None:
            return self.examples.segments.offsets
        return range(0, self.examples.rows + 1, self.examples.fold)

    def _rows(self, tensor: Tensor, bounds: Sequence[int]) -> Tensor:
        segments = self.examples.segments
        if segments is None or segments.order is None:
            whole = bounds[-1] - bounds[0] == len(tensor)
            return tensor if whole else tensor[bounds[0] : bounds[-1]]
        return tensor[segments.order[bounds[0] : bounds[-1]]]

    def _sum(self, product: Tensor, bounds: Sequence[int]) -> Tensor:
        """Return the sum over all but the parameters' axes, for each example: (n, *shape)."""
        if self.channel_axis is None:
            if product.dim() == 1 + len(self.shape) and self.examples.plain:
                return product
            rows = product.unsqueeze(1).flatten(1, -1 - len(self.shape))
        else:
            rows = product.unsqueeze(-1).flatten(2).mT
        if self.examples.segments is None:
            # One sum over rows and positions.
            if self.examples.fold != 1:
                rows = rows.unflatten(0, (len(bounds) - 1, self.examples.fold)).flatten(1, 2)
            return rows.sum(1)
        counts = torch.tensor(bounds, device=product.device).diff()
        return segment_sum(rows.sum(1), counts)

    def data_gradients(self, nodes: Sequence[Node], grad: Tensor, x: Tensor, *statistics: Tensor):
        """Differentiate x̂·w, of which each example sees a scale of its own."""
        if not self.scale:
            return None
        gradient = self.input_gradient(nodes, grad, x, None, *statistics)
        return gradient, *(None for _ in statistics)

    def input_gradient(
        self,
        nodes: Sequence[Node],
        grad: Tensor,
        x: Tensor,
        weight: Tensor | None,
        *statistics: Tensor,
    ) -> Tensor:
        """Return the input's gradient as tracked operations compute it.

        Args:
            nodes: of the tracked parameters.
            grad, x: the output's gradient and the input.
            weight: the scale where it is not tracked; None for 1.
            statistics: as they were saved.
        """
        normalised = self.normalise(self.examples.lead(x).to(grad.dtype), *statistics)
        ones = (1,) * (normalised.dim() - 2)
        if self.scale:
            node = nodes[0]
            if self.channel_axis is not None:
                node = derived(node, Tensor.view, (-1, *ones))
            layout = ExampleLayout(normalised.dim(), self.examples.along(0))
            normalised = normalised * example_view(node.tracker, node, layout)
        elif weight is not None:
            normalised = normalised * (
                weight if self.channel_axis is None else weight.view(-1, *ones)
            )
        gradients = torch.autograd.grad(normalised, x, self.examples.lead(grad), create_graph=True)
        return gradients[0]


def _attach(
    tracker, run, weight, bias, examples, normalise, channel_axis, input, *statistics, place=None
):
    """Run the layer with the factors of its parameters attached.

    Args:
        run: called as run(input, weight, bias), the caller's own operation.
        statistics: what ``normalise`` needs beside the input.
        place: where PyTorch's node for the operation has the input.
    """
    nodes = [node for node in (node_of(weight), node_of(bias)) if node is not None]
    shape = tuple((weight if node_of(weight) is not None else bias).shape)
    scale, shift = node_of(weight) is not None, node_of(bias) is not None
    factors = AffineFactors(examples, normalise, channel_axis, scale, shift, shape)
    own = tracker.is_trained(weight) or tracker.is_trained(bias)
    if own and scale and not tracker.settings.exact:
        # Derivatives of the network reach what is added outside.
        result = _attach(tracker, run, weight, None, examples, normalise, channel_axis, input,
                         *statistics)  # fmt: skip
        ones = () if channel_axis is None else (1,) * (input.dim() - 2)
        return result + bias.view(*bias.shape, *ones)
    if not own and factors.one_pass(tracker.settings, input):
        use, probes = use_of(nodes)
        result = attach(
            NormalisationUse, use, tracker.settings, factors, run, len(probes), input,
            plain(weight), plain(bias), *probes, *statistics,
        )  # fmt: skip
        if place is not None:
            tracker.note_followed(result, examples)
        return result
    if place is not None and not own:
        found = hooked(tracker, place, (weight, bias), factors, examples, partial(run, input))
        if found is not None:
            return found
    result = run(input, plain(weight), plain(bias))
    return tap(tracker, nodes, result, factors, input, *statistics)


def layer_norm(
    tracker, func, input, normalized_shape, weight=None, bias=None, eps=1e-5, cudnn=True
):
    """Normalisation over the last axes."""
    shape = tuple(normalized_shape)
    node = first_node(weight, bias)
    examples = locate(tracker, func, node, input, folds=True, trailing=len(shape))

    def run(x, weight, bias):
        return func(x, shape, weight, bias, eps)

    normalise = LayerNormalise(shape, eps)
    return _attach(tracker, run, weight, bias, examples, normalise, None, input, place=NORMALISED)


@dataclass(frozen=True, eq=False)
class LayerNormalise:
    shape: tuple[int, ...]
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        # PyTorch takes twice as long without a weight.
        return torch.layer_norm(x, self.shape, x.new_ones(self.shape), None, self.eps)

    def sums(self, x, g, offsets) -> tuple[Tensor, Tensor]:
        return _triton_layers.layer_norm_sum(x, g, self.eps, False, offsets)

    def backward(self, x, g, weight, offsets, wanted) -> NormGradients:
        return _triton_layers.layer_norm_backward(x, g, weight, self.eps, False, offsets, wanted)


def rms_norm(tracker, func, input, normalized_shape, weight=None, eps=None):
    """Division by the root mean square over the last axes."""
    shape = tuple(normalized_shape)
    examples = locate(tracker, func, first_node(weight), input, folds=True, trailing=len(shape))

    def run(x, weight, bias):
        return func(x, shape, weight, eps)

    # Without eps PyTorch takes the machine epsilon of the dtype it computes in: float32 for half
    # inputs, whether autocast widens them or it does so itself (ATen, rms_norm_composite).
    own = torch.finfo(compute_dtype(input)).eps if eps is None else eps
    normalise = RootMeanSquareNormalise(shape, own)
    return _attach(tracker, run, weight, None, examples, normalise, None, input)


@dataclass(frozen=True, eq=False)
class RootMeanSquareNormalise:
    shape: tuple[int, ...]
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.shape, None, self.eps)

    def sums(self, x, g, offsets) -> tuple[Tensor, Tensor]:
        return _triton_layers.layer_norm_sum(x, g, self.eps, True, offsets)

    def backward(self, x, g, weight, offsets, wanted) -> NormGradients:
        return _triton_layers.layer_norm_backward(x, g, weight, self.eps, True, offsets, wanted)


def group_norm(tracker, func, input, num_groups, weight=None, bias=None, eps=1e-5, cudnn=True):
    """Normalisation over groups of channels and all positions."""
    examples = locate(tracker, func, first_node(weight, bias), input, axis=0, folds=True)

    def run(x, weight, bias):
        return func(x, num_groups, weight, bias, eps)

    normalise, place = GroupNormalise(num_groups, eps), NORMALISED_IN_GROUPS
    return _attach(tracker, run, weight, bias, examples, normalise, 1, input, place=place)


@dataclass(frozen=True, eq=False)
class GroupNormalise:
    groups: int
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return functional.group_norm(x, self.groups, None, None, self.eps)

    def sums(self, x, g, offsets) -> tuple[Tensor, Tensor]:
        return _triton_layers.group_norm_sum(x, g, self.groups, self.eps)

    def backward(self, x, g, weight, offsets, wanted) -> NormGradients:
        return _triton_layers.group_norm_backward(x, g, weight, self.groups, self.eps, wanted)


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
    examples = locate(tracker, func, first_node(weight, bias), input, axis=0, folds=True)

    def run(x, weight, bias):
        return func(x, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)

    if use_input_stats:
        own = GroupNormalise(input.shape[1], eps)
        return _attach(tracker, run, weight, bias, examples, own, 1, input)
    statistics = running_mean, running_var
    normalise = RunningNormalise(eps)
    return _attach(tracker, run, weight, bias, examples, normalise, 1, input, *statistics)


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
    examples = locate(tracker, func, first_node(weight, bias), input, axis=0, folds=True)

    def run(x, weight, bias):
        return func(x, running_mean, running_var, weight, bias, training, momentum, eps)

    statistics = running_mean, running_var
    normalise = RunningNormalise(eps)
    return _attach(tracker, run, weight, bias, examples, normalise, 1, input, *statistics)


@dataclass(frozen=True, eq=False)
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
