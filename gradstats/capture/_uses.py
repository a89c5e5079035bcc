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

from gradstats._cost import product
from gradstats._factors import (
    ConvolutionGeometry,
    Factor,
    Outer,
    Patches,
    Ragged,
    Vector,
    compute_dtype,
)
from gradstats.capture._consumers import Consumer
from gradstats.capture._layout import Examples
from gradstats.capture._lineage import pull_back
from gradstats.capture._nodes import Derived, Node, Root, make_report, unique_roots
from gradstats.contractions import Fused, sqnorm, sqnorm_and_sum
from gradstats.errors import UnsupportedOperationError


@dataclass(frozen=True)
class Settings:
    """What a context wants of its uses.

    Attributes:
        weight_gradients: the training gradients are wanted too.
        fused: weight gradients may come from gradstats' own pass over the data.
        workspace: bytes of scratch a contraction may allocate at once.
        consumer: what else is done with the factors of each parameter; None for norms alone.
    """

    weight_gradients: bool
    fused: bool
    workspace: int
    consumer: Consumer | None = None


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

    def reports(self, factors: Sequence[Factor | Fused | None]) -> list[Tensor | None]:
        """Return the gradients of the carriers, given the factor of each node in turn.

        ``Fused`` stands for a factor whose norms are computed already (a sole use); None for a node
        that the operation's gradient did not reach.
        """
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self.reports(factors)
        reports: list[Tensor | None] = []
        for root in self.roots:
            report: Tensor | None = None
            root.check_open()
            tracker = root.tracker
            for node, factor in zip(self.nodes, factors, strict=True):
                if factor is None or root not in node.roots:
                    continue
                pulled = factor
                if not isinstance(factor, Fused) and node is not root:
                    pulled = pull_back(factor, node, root)
                # A consumer waits for the hub, which knows the loss's backward from an inner one.
                if root.uses == 1 and tracker.settings.consumer is None:
                    report = make_report(tracker.contract(root, [pulled]), tracker.once)
                else:
                    root.deliver(pulled)
                    report = tracker.nothing
            reports.append(report)
        return reports


def carriers_for(nodes: Sequence[Node]) -> tuple[Use | None, list[Tensor]]:
    """Return the use and the carriers for an operation on ``nodes``."""
    if torch.compiler.is_compiling():
        return None, [node.probe for node in nodes]  # type: ignore[attr-defined]
    use = Use(nodes)
    return use, use.carriers


def _reports(use: Use | None, settings: Settings, factors) -> list[Tensor | None]:
    if use is not None:
        return use.reports(factors)
    if settings.consumer is not None:
        raise UnsupportedOperationError(
            "inner products were asked for in a graph that torch.compile traced inside the "
            "tracking context; they need the model in eager mode. Compile the model before the "
            "context is opened: then it runs eagerly inside it."
        )
    # In a compiled graph each root has one use.
    workspace = settings.workspace
    return [make_report(sqnorm([factor], workspace, guarded=False)) for factor in factors]


def unseen(again):
    """Make a backward of (ctx, grad, *saved) whose operations no function mode has to look at.

    Saved tensors are read first: reading them makes a checkpoint compute its part again, and that
    must be seen.

    Args:
        again: what to do with grad mode on, when an inner ``torch.autograd.grad(...,
            create_graph=True)`` is running: what it returns becomes part of the loss. Nothing is
            reported then; the gradients of the data come from tracked operations, in which the
            parameters are used once more. Called as again(ctx, grad, *saved); returns the position
            and the gradient of each input that is data.
    """

    def decorate(backward):
        def run(ctx, grad):
            saved = ctx.saved_tensors
            if ctx.use is None:
                return backward(ctx, grad, *saved)
            if torch.is_grad_enabled():
                gradients: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
                check_derivatives(ctx)
                for position, gradient in again(ctx, grad, *saved):
                    gradients[position] = gradient
                return tuple(gradients)
            with torch._C.DisableTorchFunction():
                return backward(ctx, grad, *saved)

        return run

    return decorate


def check_derivatives(ctx) -> None:
    """Raise where a context cannot serve a loss that contains derivatives of the network."""
    if ctx.settings.weight_gradients and not ctx.settings.fused:
        raise UnsupportedOperationError(
            "the loss contains derivatives of the network (torch.autograd.grad with "
            f"create_graph=True ran through {ctx.use.nodes[0].describe()}), and with fused=False "
            "gradients are PyTorch's own to the bit, in which these derivatives cannot be told "
            "apart by example. Use fused=True."
        )


def _tap_again(ctx, grad: Tensor, *saved: Tensor | None):
    method = getattr(ctx.factors_of, "data_gradients", None)
    if method is None:
        raise UnsupportedOperationError(
            "the loss contains derivatives of the network (torch.autograd.grad with "
            f"create_graph=True ran through an operation on {ctx.use.nodes[0].describe()}), and "
            "how they depend on the parameter is known for linear layers, convolutions, "
            "normalisation layers, products and whatever broadcasts, not for this operation. Write "
            "it with such operations, or leave the parameter out by name with "
            f"exclude={[root.name for root in ctx.use.roots]!r}."
        )
    gradients = method(ctx.use.nodes, grad, *saved)
    if gradients is None:
        return ((4, grad),)
    return zip(ctx.data, gradients, strict=True)


def _linear_again(ctx, grad: Tensor, x: Tensor, weight: Tensor):
    weight_tracked, _, examples = ctx.tracked
    if not ctx.needs_input_grad[3]:
        return ()
    if not weight_tracked:
        return ((3, grad.matmul(weight.to(grad.dtype))),)
    (node, *_) = ctx.use.nodes
    transposed = derived(node, Tensor.t)
    if node.value.dtype != grad.dtype:
        transposed = derived(transposed, Tensor.to, grad.dtype)
    use = Use([transposed])
    tracked = (True, False, examples)
    gradient = LinearUse.apply(
        use, ctx.settings, tracked, grad, transposed.value, None, *use.carriers
    )
    return ((3, gradient),)


def _convolution_again(ctx, grad: Tensor, x: Tensor, weight: Tensor):
    weight_tracked, _, examples = ctx.tracked
    if not ctx.needs_input_grad[4]:
        return ()
    call = adjoint_convolution(ctx.call, x.shape[2:], weight.shape[2:], grad.shape[2:])
    if not weight_tracked:
        return ((4, torch.ops.aten.convolution(grad, weight, None, *call)),)
    node = ctx.use.nodes[0]
    if node.value.dtype != grad.dtype:
        node = derived(node, Tensor.to, grad.dtype)
    use = Use([node])
    gradient = ConvolutionUse.apply(
        use, ctx.settings, (True, False, examples), call, grad, node.value, None, *use.carriers
    )
    return ((4, gradient),)


def derived(node: Node, function, *args) -> Derived:
    """Return the node of ``function(node, *args)``, a tensor that belongs to no example."""
    with torch._C.DisableTorchFunctionSubclass():
        value = function(node.value, *args)
    return Derived(node.tracker, value, function, (node, *args), {}, None)


def adjoint_convolution(call, input, kernel, output):
    """Return the call that maps a convolution's output gradient to its input gradient.

    Args:
        call: (stride, padding, dilation, transposed, output padding, groups).
        input, kernel, output: spatial sizes.
    """
    stride, padding, dilation, transposed, _, groups = call
    rest = [
        0 if transposed else i - ((o - 1) * s - 2 * p + d * (k - 1) + 1)
        for i, k, o, s, p, d in zip(
            input, kernel, output, stride, padding, dilation, strict=True
        )
    ]  # fmt: skip
    return stride, padding, dilation, not transposed, tuple(rest), groups


class Tap(torch.autograd.Function):
    """Identity on an operation's result that turns its gradient into reports.

    The result is marked as changed in place so that it stays an ordinary tensor: a view could not
    be changed in place by a later ``relu_``.
    """

    @staticmethod
    def forward(ctx, use, settings, factors_of, carriers, result, *tensors):
        ctx.use, ctx.settings, ctx.factors_of = use, settings, factors_of
        ctx.data = range(5 + carriers, 5 + len(tensors))
        ctx.save_for_backward(*tensors[carriers:])
        ctx.mark_dirty(result)
        return result

    @staticmethod
    @unseen(_tap_again)
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
        factors_of: called as factors_of(grad, *saved); returns one factor for each node. Its
            method ``data_gradients(nodes, grad, *saved)``, where it has one, returns the gradients
            of ``saved`` as tracked operations compute them, or None where the tracked operands do
            not enter them.
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
    @unseen(_linear_again)
    def backward(ctx, grad, x, weight):
        use, settings = ctx.use, ctx.settings
        weight_tracked, bias_tracked, examples = ctx.tracked
        shape, weight_dtype, bias_dtype = ctx.shapes
        grad_weight = grad_bias = None
        want_weight = ctx.needs_input_grad[4] and settings.weight_gradients
        want_bias = bias_dtype is not None and ctx.needs_input_grad[5] and settings.weight_gradients
        factors: list[Factor | Fused] = []
        if weight_tracked:
            factor = linear_factor(examples, grad, x, tuple(shape))
            sole = use is not None and use.is_sole(use.nodes[0])
            if sole and want_weight and settings.fused:
                result, total = sqnorm_and_sum(factor, settings.workspace)
                grad_weight = total.to(weight_dtype)
                factors.append(Fused(factor, result, total))
            else:
                factors.append(factor)
        if want_weight and grad_weight is None:
            grad_weight = grad.flatten(0, -2).t() @ x.flatten(0, -2).to(grad.dtype)
        if bias_tracked:
            values = bias_gradient(examples, grad)
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
    @unseen(_convolution_again)
    def backward(ctx, grad, x, weight):
        use, settings = ctx.use, ctx.settings
        weight_tracked, bias_tracked, examples = ctx.tracked
        wanted = [
            ctx.needs_input_grad[4],
            ctx.needs_input_grad[5] and settings.weight_gradients,
            False,
        ]
        factors: list[Factor | Fused] = []
        grad_weight = grad_bias = None
        if weight_tracked:
            patches = convolution_factor(examples, grad, x, tuple(weight.shape), ctx.call)
            sole = use is not None and use.is_sole(use.nodes[0])
            if sole and wanted[1] and settings.fused:
                result, total = sqnorm_and_sum(patches, settings.workspace)
                grad_weight = total.to(weight.dtype)
                wanted[1] = False
                factors.append(Fused(patches, result, total))
            else:
                factors.append(patches)
        if bias_tracked or (ctx.bias_dtype is not None and ctx.needs_input_grad[6]):
            values = channel_gradient(examples, grad)
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
        examples: where the result's examples lie.
    """

    dims: int
    examples: Examples

    def padded(self, shape: Sequence[int]) -> tuple[int, ...]:
        return (1,) * (self.dims - len(shape)) + tuple(shape)

    def own_slices(self, shape: Sequence[int]) -> bool:
        """Whether each row sees its own slice of the tensor rather than the whole."""
        rows = self.examples.rows
        return self.padded(shape)[self.examples.axis] == rows and rows != 1

    def serves(self, shape: Sequence[int]) -> bool:
        """Whether the factor of a tensor of this shape can be told."""
        return self.examples.plain or not self.own_slices(shape)

    def view(self, value: Tensor) -> Tensor:
        shape = list(self.padded(value.shape))
        viewed = value.view(shape) if len(shape) != value.dim() else value.view_as(value)
        if self.own_slices(value.shape):
            return viewed
        shape[self.examples.axis] = self.examples.rows
        return viewed.expand(shape)

    def factor(self, grad: Tensor, shape: tuple[int, ...]) -> Vector:
        slices = self.examples.lead(grad)
        batch = self.examples.batch
        if self.own_slices(shape):
            axis = self.examples.axis - (self.dims - len(shape))
            rest = shape[:axis] + shape[axis + 1 :]
            return Vector(slices.reshape(batch, *rest), shape, axis)
        if not self.examples.plain:
            slices = self.examples.reduce(slices.to(compute_dtype(slices)))
        return Vector(slices.reshape(batch, *shape), shape)

    def total(self, grad: Tensor, shape: tuple[int, ...]) -> Tensor:
        if not self.own_slices(shape):
            grad = grad.sum(self.examples.axis, keepdim=True)
        return grad.reshape(shape)


def example_view(tracker, node: Node, layout: ExampleLayout) -> Tensor:
    """Return the node's value as each example sees it, with its statistics attached."""
    use, carriers = carriers_for([node])
    value = node.value if use is not None else node.parameter  # type: ignore[attr-defined]
    return ExampleView.apply(use, tracker.settings, layout, value, *carriers)


def bias_gradient(examples: Examples, grad: Tensor) -> Tensor:
    """Return Σ_t g_t for each example: (B, width) in the accumulation dtype."""
    rows = examples.lead(grad)
    if rows.dim() == 2 and examples.plain:
        return rows
    dtype = compute_dtype(grad)
    if examples.segments is None:
        return examples.first(grad).flatten(1, -2).sum(1, dtype=dtype)
    return examples.reduce(
        rows.to(dtype) if rows.dim() == 2 else rows.flatten(1, -2).sum(1, dtype=dtype)
    )


def linear_factor(
    examples: Examples, grad: Tensor, x: Tensor, shape: tuple[int, ...]
) -> Outer | Ragged:
    """Return the factor of a weight that multiplies x (…, d_in) to give grad (…, d_out)."""
    if examples.segments is None:
        return Outer(as_positions(examples.first(grad)), as_positions(examples.first(x)), shape)
    left, right = examples.segments.sorted(examples.lead(grad)), examples.lead(x)
    right = examples.segments.sorted(right)
    positions = product(left.shape[1:-1])
    offsets = tuple(bound * positions for bound in examples.segments.offsets)
    return Ragged(left.flatten(0, -2), right.flatten(0, -2), offsets, shape)


def as_positions(tensor: Tensor) -> Tensor:
    """Return (B, *, width) as (B, 1, T, width), an ``Outer`` operand with one group."""
    if tensor.dim() == 2:
        return tensor[:, None, None]
    if tensor.dim() == 3:
        return tensor[:, None]
    return tensor.flatten(1, -2)[:, None]


def channel_gradient(examples: Examples, grad: Tensor) -> Tensor:
    """Return the sum over positions of (rows, C, *) for each example: (B, C)."""
    return examples.reduce(grad.to(compute_dtype(grad)).flatten(2).sum(2))


def convolution_factor(
    examples: Examples, grad: Tensor, x: Tensor, shape: tuple[int, ...], call
) -> Factor:
    """Return the factor of a convolution's weight; 1×1 convolutions are plain products."""
    stride, padding, dilation, transposed, output_padding, groups = call
    if transposed:
        x, grad = grad, x
        if any(extra >= step for extra, step in zip(output_padding, stride, strict=True)):
            # With the same padding on both sides there would be more positions than in the input.
            sides = [(p, p - extra) for p, extra in zip(padding, output_padding, strict=True)]
            x = torch.nn.functional.pad(x, [amount for side in reversed(sides) for amount in side])
            padding = (0,) * len(padding)
    if examples.fold != 1:
        # An example's frames are one more axis, along which the kernel has size 1.
        x, grad = (examples.first(side).transpose(1, 2) for side in (x, grad))
        stride, padding, dilation = (1, *stride), (0, *padding), (1, *dilation)
    pointwise = all(k == 1 for k in shape[2:]) and set(stride) == {1} and set(padding) == {0}
    if pointwise:
        left = grad.flatten(2).unflatten(1, (groups, -1)).mT  # (B, K, T, O / K)
        right = x.flatten(2).unflatten(1, (groups, -1)).mT
        return Outer(left, right, shape)
    geometry = ConvolutionGeometry(tuple(stride), tuple(padding), tuple(dilation), groups)
    return Patches(x, grad, shape, geometry)
