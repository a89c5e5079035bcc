"""The autograd Functions that stand where a parameter meets data.

    Tap             identity on the result of an operation that PyTorch computed as always
    LinearUse       a product with a weight matrix: one backward for gradient and norms
    ConvolutionUse  the same for convolutions
    ExampleView     a parameter as each example sees it, for everything that broadcasts

Each passes its roots' carriers through and returns reports as their gradients. In eager mode a
``Use`` says which roots; in a compiled graph there is no Python object to ask, each parameter has
one use, and the carrier is the root's slice of the probe itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradstats._factors import (
    ConvolutionGeometry,
    Factor,
    Outer,
    Patches,
    Vector,
    compute_dtype,
)
from gradstats.capture._lineage import pull_back
from gradstats.capture._nodes import Node, Root, make_report, unique_roots
from gradstats.contractions import Contraction, sqnorm, sqnorm_and_sum
from gradstats.errors import UnsupportedOperationError


@dataclass(frozen=True)
class Settings:
    """What a context wants of its uses.

    Attributes:
        weight_gradients: the training gradients are wanted too.
        fused: weight gradients may come from gradstats' own pass over the data.
        workspace: bytes of scratch a contraction may allocate at once.
    """

    weight_gradients: bool
    fused: bool
    workspace: int


class Use:
    """One operation's use of some tracked tensors, in eager mode."""

    def __init__(self, nodes: Sequence[Node]):
        self.nodes = tuple(nodes)
        self.roots = unique_roots(self.nodes)
        # A root that enters twice (through two operands) is used twice: its factors must meet.
        carriers = {root: root.register_use() for node in self.nodes for root in node.roots}
        self.carriers = [carriers[root] for root in self.roots]

    def is_sole(self, node: Node) -> bool:
        """Whether ``node`` is a parameter that this use alone contributes to."""
        return isinstance(node, Root) and node.uses == 1

    def reports(self, factors: Sequence[Factor | Contraction | None]) -> list[Tensor | None]:
        """Return the gradients of the carriers, given the factor of each node in turn.

        A ``Contraction`` stands for a factor whose norms are computed already (a sole use); None
        for a node that the operation's gradient did not reach.
        """
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self.reports(factors)
        reports: list[Tensor | None] = []
        for root in self.roots:
            report: Tensor | None = None
            tracker = root.tracker
            for node, factor in zip(self.nodes, factors, strict=True):
                if factor is None or root not in node.roots:
                    continue
                if isinstance(factor, Contraction):
                    report = make_report(factor, tracker.once)
                    continue
                pulled = factor if node is root else pull_back(factor, node, root)
                if root.uses == 1:
                    report = make_report(tracker.contract([pulled]), tracker.once)
                else:
                    root.deliver(pulled)
                    report = tracker.nothing
            reports.append(report)
        return reports

    def refuse_derivatives(self) -> None:
        """Raise if this backward is itself being differentiated."""
        if torch.is_grad_enabled():
            raise UnsupportedOperationError(
                "the loss contains derivatives of the network (a backward with create_graph=True "
                f"ran through {self.nodes[0].describe()}), where the parameter is used once more "
                "in a way that is not counted. Compute the derivative terms outside the context, "
                "or exclude the parameter."
            )


def carriers_for(nodes: Sequence[Node]) -> tuple[Use | None, list[Tensor]]:
    """Return the use and the carriers for an operation on ``nodes``."""
    if torch.compiler.is_compiling():
        return None, [node.probe for node in nodes]  # type: ignore[attr-defined]
    use = Use(nodes)
    return use, use.carriers


def _reports(use: Use | None, settings: Settings, factors) -> list[Tensor | None]:
    if use is not None:
        return use.reports(factors)
    # In a compiled graph each root has one use.
    workspace = settings.workspace
    return [make_report(sqnorm([factor], workspace, guarded=False)) for factor in factors]


def unseen(backward):
    """Make a backward of (ctx, grad, *saved) whose operations no function mode has to look at.

    Saved tensors are read first: reading them makes a checkpoint compute its part again, and that
    must be seen.
    """

    def run(ctx, grad):
        saved = ctx.saved_tensors
        if ctx.use is None:
            return backward(ctx, grad, *saved)
        ctx.use.refuse_derivatives()
        with torch._C.DisableTorchFunction():
            return backward(ctx, grad, *saved)

    return run


class Tap(torch.autograd.Function):
    """Identity on an operation's result that turns its gradient into reports.

    The result is marked as changed in place so that it stays an ordinary tensor: a view could not
    be changed in place by a later ``relu_``.
    """

    @staticmethod
    def forward(ctx, use, settings, factors_of, carriers, result, *tensors):
        ctx.use, ctx.settings, ctx.factors_of = use, settings, factors_of
        ctx.save_for_backward(*tensors[carriers:])
        ctx.mark_dirty(result)
        return result

    @staticmethod
    @unseen
    def backward(ctx, grad, *saved):
        reports = _reports(ctx.use, ctx.settings, ctx.factors_of(grad, *saved))
        return (None, None, None, None, grad, *reports, *(None for _ in saved))


def tap(
    tracker, nodes: Sequence[Node], result: Tensor, factors_of, *saved: Tensor | None
) -> Tensor:
    """Return ``result`` with the factors of ``nodes`` attached to its gradient.

    Args:
        tracker: the context.
        nodes: the tracked operands of the operation.
        result: what the operation returned, still connected to the operands as PyTorch connects it.
        factors_of: called as factors_of(grad, *saved); returns one factor for each node.
        saved: tensors that ``factors_of`` needs; kept as any operation keeps its operands.
    """
    use, carriers = carriers_for(nodes)
    return Tap.apply(use, tracker.settings, factors_of, len(carriers), result, *carriers, *saved)


class LinearUse(torch.autograd.Function):
    """y = x Wᵀ + b with a backward that contracts while it makes the weight gradient.

    Shapes: x (B, *, d_in), weight (d_out, d_in), bias (d_out,) or None.
    """

    @staticmethod
    def forward(ctx, use, settings, tracked, x, weight, bias, *carriers):
        ctx.use, ctx.settings, ctx.tracked = use, settings, tracked
        ctx.save_for_backward(x, weight)
        ctx.shapes = (weight.shape, weight.dtype, None if bias is None else bias.dtype)
        result = torch.nn.functional.linear(x, weight, bias)
        # For more than two axes PyTorch returns a view, which a later relu_ could not change.
        return torch.ops.aten._unsafe_view(result, result.shape)

    @staticmethod
    @unseen
    def backward(ctx, grad, x, weight):
        use, settings = ctx.use, ctx.settings
        weight_tracked, bias_tracked, examples = ctx.tracked
        shape, weight_dtype, bias_dtype = ctx.shapes
        grad_weight = grad_bias = None
        want_weight = ctx.needs_input_grad[4] and settings.weight_gradients
        want_bias = bias_dtype is not None and ctx.needs_input_grad[5] and settings.weight_gradients
        factors: list[Factor | Contraction] = []
        left, right = examples.first(grad), examples.first(x)
        if weight_tracked:
            outer = Outer(as_positions(left), as_positions(right), tuple(shape))
            sole = use is not None and use.is_sole(use.nodes[0])
            if sole and want_weight and settings.fused:
                result, total = sqnorm_and_sum(outer, settings.workspace)
                grad_weight = total.to(weight_dtype)
                factors.append(result)
            else:
                factors.append(outer)
        if want_weight and grad_weight is None:
            grad_weight = grad.flatten(0, -2).t() @ x.flatten(0, -2).to(grad.dtype)
        if bias_tracked:
            values = over_positions(left)
            factors.append(Vector(values, (shape[0],)))
            if want_bias:
                grad_bias = values.sum(0).to(bias_dtype)
        elif want_bias:
            grad_bias = grad.flatten(0, -2).sum(0)
        reports = _reports(use, settings, factors)
        # Last, so that the layer below finds its gradient still in the cache.
        grad_x = grad.matmul(weight.to(grad.dtype)) if ctx.needs_input_grad[3] else None
        return (None, None, None, grad_x, grad_weight, grad_bias, *reports)


class ConvolutionUse(torch.autograd.Function):
    """A convolution with a backward that makes weight gradient and squared norms in one pass.

    Shapes: x (B, C, *spatial); weight (O, C / groups, *kernel), transposed (C, O / groups,
    *kernel).
    """

    @staticmethod
    def forward(ctx, use, settings, tracked, call, x, weight, bias, *carriers):
        ctx.use, ctx.settings, ctx.tracked, ctx.call = use, settings, tracked, call
        ctx.save_for_backward(x, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return torch.ops.aten.convolution(x, weight, bias, *call)

    @staticmethod
    @unseen
    def backward(ctx, grad, x, weight):
        use, settings = ctx.use, ctx.settings
        weight_tracked, bias_tracked = ctx.tracked
        wanted = [
            ctx.needs_input_grad[4],
            ctx.needs_input_grad[5] and settings.weight_gradients,
            False,
        ]
        factors: list[Factor | Contraction] = []
        grad_weight = grad_bias = None
        if weight_tracked:
            patches = convolution_factor(grad, x, tuple(weight.shape), ctx.call)
            sole = use is not None and use.is_sole(use.nodes[0])
            if sole and wanted[1] and settings.fused:
                result, total = sqnorm_and_sum(patches, settings.workspace)
                grad_weight = total.to(weight.dtype)
                wanted[1] = False
                factors.append(result)
            else:
                factors.append(patches)
        if bias_tracked or (ctx.bias_dtype is not None and ctx.needs_input_grad[6]):
            values = grad.flatten(2).sum(2, dtype=compute_dtype(grad))
            if bias_tracked:
                factors.append(Vector(values, (grad.shape[1],)))
            if settings.weight_gradients and ctx.needs_input_grad[6]:
                grad_bias = values.sum(0).to(ctx.bias_dtype)
        reports = _reports(use, settings, factors)
        stride, padding, dilation, transposed, output_padding, groups = ctx.call
        grad_x = None
        if wanted[0] or wanted[1]:
            grad_x, native, _ = torch.ops.aten.convolution_backward(
                grad, x, weight, None, stride, padding, dilation, transposed, output_padding,
                groups, wanted,
            )  # fmt: skip
            grad_weight = native if wanted[1] else grad_weight
        return (None, None, None, None, grad_x, grad_weight, grad_bias, *reports)


class ExampleView(torch.autograd.Function):
    """A tracked tensor as each example sees it: expanded, not copied, along the example axis.

    The operation that follows is PyTorch's own, and so is the gradient that comes back: one slice
    for each example.
    """

    @staticmethod
    def forward(ctx, use, settings, layout, value, *carriers):
        ctx.use, ctx.settings, ctx.layout = use, settings, layout
        ctx.shape = tuple(value.shape)
        return layout.view(value)

    @staticmethod
    def backward(ctx, grad):
        layout = ctx.layout
        factor = layout.factor(grad.detach(), ctx.shape)
        reports = _reports(ctx.use, ctx.settings, [factor])
        grad_value = None
        if ctx.settings.weight_gradients and ctx.needs_input_grad[3]:
            grad_value = layout.total(grad, ctx.shape)
        return (None, None, None, grad_value, *reports)


@dataclass(frozen=True)
class ExampleLayout:
    """How a tensor of some shape lines up with the examples of an operation's result.

    Attributes:
        dims: number of axes of the operation's result.
        axis: the result's example axis.
        batch: number of examples.
    """

    dims: int
    axis: int
    batch: int

    def padded(self, shape: Sequence[int]) -> tuple[int, ...]:
        return (1,) * (self.dims - len(shape)) + tuple(shape)

    def own_slices(self, shape: Sequence[int]) -> bool:
        """Whether each example sees its own slice of the tensor rather than the whole."""
        return self.padded(shape)[self.axis] == self.batch and self.batch != 1

    def view(self, value: Tensor) -> Tensor:
        shape = list(self.padded(value.shape))
        viewed = value.view(shape) if len(shape) != value.dim() else value.view_as(value)
        if self.own_slices(value.shape):
            return viewed
        shape[self.axis] = self.batch
        return viewed.expand(shape)

    def factor(self, grad: Tensor, shape: tuple[int, ...]) -> Vector:
        slices = grad.movedim(self.axis, 0)
        if self.own_slices(shape):
            axis = self.axis - (self.dims - len(shape))
            rest = shape[:axis] + shape[axis + 1 :]
            return Vector(slices.reshape(self.batch, *rest), shape, axis)
        return Vector(slices.reshape(self.batch, *shape), shape)

    def total(self, grad: Tensor, shape: tuple[int, ...]) -> Tensor:
        if not self.own_slices(shape):
            grad = grad.sum(self.axis, keepdim=True)
        return grad.reshape(shape)


def example_view(tracker, node: Node, layout: ExampleLayout) -> Tensor:
    """Return the node's value as each example sees it, with its statistics attached."""
    use, carriers = carriers_for([node])
    value = node.value if use is not None else node.parameter  # type: ignore[attr-defined]
    return ExampleView.apply(use, tracker.settings, layout, value, *carriers)


def over_positions(tensor: Tensor) -> Tensor:
    """Return Σ_t of (B, *, width), the gradient of a bias: (B, width) in the accumulation dtype."""
    if tensor.dim() == 2:
        return tensor
    return tensor.flatten(1, -2).sum(1, dtype=compute_dtype(tensor))


def as_positions(tensor: Tensor) -> Tensor:
    """Return (B, *, width) as (B, 1, T, width), an ``Outer`` operand with one group."""
    if tensor.dim() == 2:
        return tensor[:, None, None]
    if tensor.dim() == 3:
        return tensor[:, None]
    return tensor.flatten(1, -2)[:, None]


def convolution_factor(grad: Tensor, x: Tensor, shape: tuple[int, ...], call) -> Factor:
    """Return the factor of a convolution's weight; 1×1 convolutions are plain products."""
    stride, padding, dilation, transposed, output_padding, groups = call
    if transposed:
        x, grad = grad, x
        if any(extra >= step for extra, step in zip(output_padding, stride, strict=True)):
            # With the same padding on both sides there would be more positions than in the input.
            sides = [(p, p - extra) for p, extra in zip(padding, output_padding, strict=True)]
            x = torch.nn.functional.pad(x, [amount for side in reversed(sides) for amount in side])
            padding = (0,) * len(padding)
    pointwise = all(k == 1 for k in shape[2:]) and set(stride) == {1} and set(padding) == {0}
    if pointwise:
        left = grad.flatten(2).unflatten(1, (groups, -1)).mT  # (B, K, T, O / K)
        right = x.flatten(2).unflatten(1, (groups, -1)).mT
        return Outer(left, right, shape)
    geometry = ConvolutionGeometry(tuple(stride), tuple(padding), tuple(dilation), groups)
    return Patches(x, grad, shape, geometry)
