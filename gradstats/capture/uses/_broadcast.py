"""Broadcast products and sums by the kernels, with gradients and squared norms in one pass."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gradstats._compiler import is_compiling
from gradstats._factors import Elementwise, Vector
from gradstats.capture.parameters._lineage import isometric_root
from gradstats.capture.uses._tap import Factors
from gradstats.capture.uses._uses import fuse, unseen
from gradstats.capture.uses._views import ExampleLayout, example_view
from gradstats.contractions import Fused, _triton, _triton_layers, summed


@dataclass(frozen=True)
class Broadcast(Factors):
    """How the axes of data divide into positions and channels of the parameter.

    Attributes:
        layout: where the examples lie.
        shape: shape of the parameter.
        order: the axes of the data after the leading examples (see ``Examples.first``): first the
            positions, then the channels.
        positions: how many of these axes are positions.
    """

    layout: ExampleLayout
    shape: tuple[int, ...]
    order: tuple[int, ...]
    positions: int

    def __call__(self, grad: Tensor, x: Tensor | None = None) -> list[Elementwise]:
        """Return the factors, if PyTorch computes the gradients."""
        return [self.factor(grad, x)]

    def _leading(self, tensor: Tensor) -> Tensor:
        """Return a view with axes (examples, positions, channels)."""
        examples = self.layout.examples
        leading = examples.first(tensor) if examples.segments is None else examples.lead(tensor)
        return leading.permute(0, *self.order)

    def _sizes(self, leading: Tensor) -> tuple[int, ...]:
        first, *sizes = leading.shape
        positions, channels = sizes[: self.positions], sizes[self.positions :]
        if self.layout.examples.segments is None:
            return first, math.prod(positions), math.prod(channels)
        return first * math.prod(positions), math.prod(channels)

    def is_view(self, tensor: Tensor) -> bool:
        """Whether the kernels can read the rows of data without a copy."""
        leading = self._leading(tensor.detach())
        try:
            leading.view(self._sizes(leading))
        except RuntimeError:
            return False
        return True

    def rows(self, tensor: Tensor) -> Tensor:
        """Return data as (B, T, C), or packed (rows, C)."""
        leading = self._leading(tensor)
        return leading.reshape(self._sizes(leading))

    def restore(self, rows: Tensor, like: Tensor) -> Tensor:
        """Return rows, laid out as by ``rows``, in the shape of the data ``like``."""
        examples, leading = self.layout.examples, self._leading(like)
        inverse = sorted(range(len(self.order)), key=self.order.__getitem__)
        tensor = rows.reshape(leading.shape).permute(0, *(axis + 1 for axis in inverse))
        if examples.segments is None and examples.fold != 1:
            tensor = tensor.flatten(0, 1)
        return tensor.movedim(0, examples.axis)

    def factor(self, grad: Tensor, x: Tensor | None) -> Elementwise:
        """Return the factor of a parameter that multiplies x, or that is added if x is None."""
        rows, segments = self.rows(grad), self.layout.examples.segments
        offsets = None if segments is None else segments.offsets_of(len(rows))
        return Elementwise(rows, None if x is None else self.rows(x), self.shape, offsets)


def on_chip(layout: ExampleLayout, x: Tensor, value: Tensor, *, multiply: bool) -> Broadcast | None:
    """Return how the kernels are to handle x ∘ value or x + value; None where they cannot.

    Args:
        layout: where the examples of the result lie.
        x: the data.
        value: the tracked tensor.
        multiply: the operation is a product.
    """
    if is_compiling() or not _triton.streams(x, value):
        return None
    segments = layout.examples.segments
    padded = layout.padded(value.shape)
    served = (
        x.dim() == layout.dims
        and not layout.own_slices(value.shape)
        and all(size in (1, full) for size, full in zip(padded, x.shape, strict=True))
        and (segments is None or segments.order is None)
    )
    if not served:
        return None
    axis, fold = layout.examples.axis, segments is None and layout.examples.fold != 1
    rest = [(n, *both) for n, both in enumerate(zip(padded, x.shape, strict=True)) if n != axis]
    # The places of the other axes once the examples lead: after the axis of the examples, and that
    # of each example's rows if it has several.
    places = range(1 + fold, 1 + fold + len(rest))
    strides = {place: x.stride(n) for place, (n, *_) in zip(places, rest, strict=True)}
    channels = [place for place, (_, size, _) in zip(places, rest, strict=True) if size != 1]
    positions = sorted(
        (place for place in places if place not in channels), key=lambda p: -strides[p]
    )
    if not channels and positions:
        channels = [positions.pop()]  # a parameter of one element, shared by this axis
    positions = [1] * fold + positions
    if not (multiply or positions or segments is not None):
        return None  # an example's gradient is the result's: there is nothing to sum
    found = Broadcast(layout, tuple(value.shape), (*positions, *channels), len(positions))
    return found if found.is_view(x) else None


def _broadcast_again(ctx, grad: Tensor, x: Tensor | None = None, value: Tensor | None = None):
    if not ctx.needs_input_grad[3]:
        return ()
    if ctx.multiply:
        node = ctx.use.nodes[0]
        grad = grad * example_view(node, ctx.plan.layout)
    return ((3, grad.to(ctx.dtypes[0])),)


class BroadcastUse(torch.autograd.Function):
    """x ∘ w or x + b whose backward computes all gradients and the squared norms in one pass."""

    @staticmethod
    def forward(ctx, use, plan, multiply, x, value):
        ctx.use, ctx.plan, ctx.multiply = use, plan, multiply
        ctx.dtypes = x.dtype, value.dtype
        if not multiply:
            return x + value
        ctx.save_for_backward(x, value)
        return x * value

    @staticmethod
    @unseen(_broadcast_again)
    def backward(ctx, grad, x=None, value=None):
        use, settings, plan = ctx.use, ctx.use.settings, ctx.plan
        _, _, _, want_x, want_value = ctx.needs_input_grad
        want_value = want_value and use.tracker.trains
        factor = plan.factor(grad, x)
        (node,) = use.nodes
        root = isometric_root(node)
        grad_x = total = None
        if settings.consumer is not None or root is None or not root.has_one_use:
            reported: Elementwise | Vector = factor
            if want_value:
                reported = summed(factor)
                total = reported.values.sum(0)
            use.deliver([reported])
        elif want_x and ctx.multiply and not factor.shared:
            wanted = True, ctx.dtypes[1] if want_value else None
            norms, total, rows = _triton_layers.elementwise(factor, value.flatten(), wanted)
            assert rows is not None
            grad_x = plan.restore(rows, x)
            use.deliver([Fused(None, norms, total)])
        else:
            fused = fuse(factor, settings, want_value, ctx.dtypes[1])
            total = fused.total
            use.deliver([fused])
        if want_x and grad_x is None:
            grad_x = (grad * value if ctx.multiply else grad).to(ctx.dtypes[0])
        if total is not None:
            total = total.to(ctx.dtypes[1])
        return None, None, None, grad_x, total
