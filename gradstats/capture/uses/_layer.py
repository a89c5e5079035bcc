"""Layers with a weight and a bias whose backward computes gradients and norms together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from gradstats._compiler import is_compiling
from gradstats._factors import Elementwise, Factor, Images, Vector, cast, compute_dtype
from gradstats.capture.following._examples import Examples
from gradstats.capture.parameters._nodes import Node
from gradstats.capture.uses._prepared import Preparable
from gradstats.capture.uses._uses import Settings, Use, attach, derived, free_of_views, fuse, unseen
from gradstats.contractions import Contraction, Fused, _prepared, _triton, on_chip, summed
from gradstats.contractions._prepared import OfOuter

# Takes the result's gradient and the data. Returns the squared norms of the parameters, and the
# gradients of weight and bias if they are wanted and come with the norms.
Report = Callable[[Tensor, Tensor], tuple[Sequence[Contraction], Tensor | None, Tensor | None]]


@dataclass(frozen=True, slots=True)
class Layer(Preparable):
    """The factors of a linear layer or a convolution.

    Attributes:
        weight, bias: whether each is tracked.
        examples: where the examples lie in the data and in the result.
        shape: of the weight as the operation takes it.
        data: whether weight and bias were computed from trained data, as in hypernetworks. Such a
            gradient leads on to tracked parameters, and is needed even for norms alone.
        channel: the axis of the bias in the result.
        reads_weight: whether ``gradients`` takes the weight's values even for its own gradient.
        reads_data: whether ``gradients`` takes the data even if only their gradient is wanted.
    """

    weight: bool
    bias: bool
    examples: Examples
    shape: tuple[int, ...]
    data: tuple[bool, bool]
    plans: dict = field(default_factory=dict, init=False, repr=False, compare=False)

    channel: ClassVar[int]
    reads_weight: ClassVar[bool]
    reads_data: ClassVar[bool]

    def __call__(self, grad: Tensor, x: Tensor) -> list:
        factors: list = [self.of_weight(grad, x)] if self.weight else []
        return [*factors, self.of_bias(grad)] if self.bias else factors

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return what PyTorch computes."""
        raise NotImplementedError

    def cast(self, x: Tensor, parameters: list[Tensor | None]) -> list[Tensor | None]:
        """Return weight and bias for data that were cast as under autocast.

        By default PyTorch casts them, and caches the casts.
        """
        return parameters

    def of_weight(self, grad: Tensor, x: Tensor) -> Factor:
        """Return the weight's factor."""
        raise NotImplementedError

    def adjoint(self, grad: Tensor, x: Tensor) -> Layer:
        """Return the layer of the same weight that takes the result's gradient to that of x."""
        raise NotImplementedError

    def gradients(
        self, settings: Settings, grad: Tensor, x: Tensor, weight: Tensor, wanted: Sequence[bool]
    ) -> Sequence[Tensor | None]:
        """Return the gradients of x and of the weight, each None if not ``wanted``.

        The weight is None if neither gradient needs it.
        """
        raise NotImplementedError

    def is_contracted_here(self, use: Use, factor: Factor, want_sum: bool) -> bool:
        """Whether the weight's gradient comes from the same pass as the norms of its factor.

        In a graph only if a kernel computes both: loops over examples would be unrolled there.
        """
        if not (want_sum and use.settings.fused):
            return False
        if isinstance(factor, Images) or (is_compiling() and not on_chip(factor)):
            return False  # summing images takes a separate product
        return use.is_sole(0) or (use.settings.consumer is None and use.is_tied(factor))

    def prepared_weight(self, grad: Tensor, x: Tensor, want_weight: bool) -> OfOuter | None:
        """Return what contracts gradient and data that lie like these, with Σ_i G_i if wanted.

        None if that has to be decided each time.
        """
        raise NotImplementedError

    def prepare(
        self,
        use: Use,
        wanted: tuple[bool, torch.dtype | None],
        grad: Tensor,
        x: Tensor | None,
    ) -> Report | None:
        """Return the ``Report`` for such operands; see ``Preparable``.

        Args:
            wanted: whether the weight's gradient is wanted, and the dtype of the bias's or None.
        """
        examples, settings, (want_weight, bias_dtype) = self.examples, use.settings, wanted
        operands = (grad,) if x is None else (grad, x)
        if settings.consumer is not None or settings.exact or not _triton.runs(*operands):
            return None
        if examples.axis or examples.segments is not None or any(self.data):
            return None
        if bias_dtype is not None and not self.bias:
            return None
        weight = bias = None
        if self.weight:
            assert x is not None  # the weight's factor holds it
            weight = self.prepared_weight(grad, x, want_weight)
            if weight is None:
                return None
        if self.bias:
            rows = self.of_bias(grad)
            values = rows.values if isinstance(rows, Vector) else rows.grad
            if values.data_ptr() != grad.data_ptr():
                return None
            bias = _prepared.of_bias(rows, bias_dtype)

        def report(grad: Tensor, x: Tensor):
            norms: list[Contraction] = []
            total = grad_bias = None
            if weight is not None:
                result, total = weight(grad, x)
                norms.append(result)
            if bias is not None:
                result, grad_bias = bias(grad)
                norms.append(result)
            return norms, total, grad_bias

        return report

    def of_bias(self, grad: Tensor) -> Vector | Elementwise:
        """Return the factor of the bias."""
        return bias_factor(self.examples, grad, channel=self.channel)

    def bias_sum(self, grad: Tensor) -> Tensor:
        """Return the gradient of an untracked bias, in the accumulation dtype."""
        axes = [axis for axis in range(grad.dim()) if axis != self.channel % grad.dim()]
        return grad.sum(axes, dtype=compute_dtype(grad))

    def data_gradients(self, nodes: Sequence[Node], grad: Tensor, x: Tensor) -> tuple[Tensor]:
        """Return the gradient of x, computed by one more use of the weight."""
        node = nodes[0]
        if node.value.dtype != grad.dtype:
            node = derived(node, Tensor.to, grad.dtype)
        again = self.adjoint(grad, x)
        return (attach(LayerUse)(Use([node]), again, grad, node.value, None),)


def _layer_again(ctx, grad: Tensor, x: Tensor, weight: Tensor):
    layer = ctx.layer
    _, _, _, want_weight, want_bias = ctx.needs_input_grad
    if ctx.needs_input_grad[2] and layer.weight:
        yield 2, *layer.data_gradients(ctx.use.nodes, grad, x)
    elif ctx.needs_input_grad[2]:
        yield 2, layer.adjoint(grad, x).forward(grad, weight.to(grad.dtype), None)
    if want_weight and not layer.weight:
        _, gradient = layer.gradients(ctx.use.settings, grad, x, weight, (False, True))
        yield 3, cast(gradient, ctx.dtypes[0])
    if want_bias and not layer.bias:
        yield 4, cast(layer.bias_sum(grad), ctx.dtypes[1])


class LayerUse(torch.autograd.Function):
    """A layer whose backward computes norms together with the weight gradient.

    Shapes: x (B, *, d_in) or (B, C, *spatial), the weight as its ``Layer`` has it.
    """

    @staticmethod
    def forward(ctx, use, layer, x, weight, bias):
        ctx.use, ctx.layer = use, layer
        # What the backward does not read may be changed before it.
        keeps_weight = ctx.needs_input_grad[2] or layer.reads_weight or is_compiling()
        keeps_data = layer.weight or ctx.needs_input_grad[3] or layer.reads_data
        ctx.save_for_backward(x if keeps_data else None, weight if keeps_weight else None)
        ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
        result = layer.forward(x, weight, bias)
        if not result._is_view():
            return result
        # A later relu_ could not change a view in place. In a graph detach would lose the gradient.
        return free_of_views(result) if is_compiling() else result.detach()

    @staticmethod
    @unseen(_layer_again)
    def backward(ctx, grad, x, weight):
        use, settings, layer = ctx.use, ctx.use.settings, ctx.layer
        weight_dtype, bias_dtype = ctx.dtypes
        _, _, want_x, want_weight, want_bias = ctx.needs_input_grad
        trains = use.tracker.trains
        want_weight = want_weight and (trains or layer.data[0])
        want_bias = want_bias and (trains or layer.data[1])
        if not want_bias:
            bias_dtype = None
        report = layer.prepared(use, (want_weight, bias_dtype), grad, x)
        if report is not None:
            norms, total, grad_bias = report(grad, x)
            if use.is_due():
                use.finish(norms)
        else:
            total, grad_bias = _deliver(use, layer, grad, x, want_weight, bias_dtype)
        # Last, so that the layer below finds its gradient in the cache.
        wanted = want_x, want_weight and total is None
        grad_x, grad_weight = layer.gradients(settings, grad, x, weight, wanted)
        grad_weight = total if grad_weight is None else grad_weight
        if grad_weight is not None:
            grad_weight = cast(grad_weight, weight_dtype)
        return None, None, grad_x, grad_weight, grad_bias


def _deliver(
    use: Use,
    layer: Layer,
    grad: Tensor,
    x: Tensor,
    want_weight: bool,
    bias_dtype: torch.dtype | None,
) -> tuple[Tensor | None, Tensor | None]:
    """Deliver the factors; return the gradients of weight and bias that come with them."""
    factors: list[Factor | Fused] = []
    total = grad_bias = None
    if layer.weight:
        factor = layer.of_weight(grad, x)
        if layer.is_contracted_here(use, factor, want_weight):
            fused = fuse(factor, use.settings, want_weight)
            total = fused.total
            factors.append(fused)
        else:
            factors.append(factor)
    if layer.bias:
        reported, grad_bias = bias_report(use, layer.of_bias(grad), len(factors), bias_dtype)
        factors.append(reported)
    elif bias_dtype is not None:
        grad_bias = cast(layer.bias_sum(grad), bias_dtype)
    use.deliver(factors)
    return total, grad_bias


def bias_gradient(examples: Examples, grad: Tensor) -> Tensor:
    """Return Σ_t g_t for each example: (B, width) in the accumulation dtype."""
    rows = examples.lead(grad)
    if rows.dim() == 2 and examples.plain:
        return rows
    dtype = compute_dtype(grad)
    if examples.segments is None:
        first = examples.first(grad)
        return first.sum(tuple(range(1, first.dim() - 1)), dtype=dtype)
    return examples.reduce(
        rows.to(dtype) if rows.dim() == 2 else rows.flatten(1, -2).sum(1, dtype=dtype)
    )


def bias_factor(examples: Examples, grad: Tensor, *, channel: int = -1) -> Vector | Elementwise:
    """Return the factor of a bias, Σ_t g_t of each example, summed unless a kernel sums it later.

    Args:
        examples: where the examples of ``grad`` lie.
        grad: (…, width), or with the width along ``channel``.
        channel: the axis of the bias.
    """
    if channel != -1:
        grad = grad.movedim(channel, -1)
    segments, shape = examples.segments, tuple(grad.shape[-1:])
    alone = grad.dim() == 2 and examples.plain
    if alone or not _triton.streams(grad) or (segments is not None and segments.order is not None):
        return Vector(bias_gradient(examples, grad), shape)
    if segments is None:
        return Elementwise(examples.positions(grad), None, shape)
    rows = examples.lead(grad).flatten(0, -2)
    return Elementwise(rows, None, shape, segments.offsets_of(len(rows)))


def bias_report(
    use: Use,
    factor: Vector | Elementwise,
    place: int,
    wanted: torch.dtype | None,
) -> tuple[Factor | Fused, Tensor | None]:
    """Return what to deliver for a bias, and Σ_i G_i if wanted, in one pass if possible.

    Args:
        use: of the operation.
        factor: the factor of the bias.
        place: the bias's position among the use's nodes.
        wanted: the dtype of the bias's gradient; None if it is not wanted.
    """
    sole = use.settings.consumer is None and use.is_sole(place)
    if sole and isinstance(factor, Elementwise):
        fused = fuse(factor, use.settings, wanted is not None, wanted)
        return fused, None if fused.total is None else fused.total.to(wanted)
    if wanted is None:
        return factor, None
    vector = summed(factor) if isinstance(factor, Elementwise) else factor
    return vector, cast(vector.values.sum(0), wanted)
