"""A parameter expanded along the example axis, for all operations that broadcast."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradstats._complex import as_real
from gradstats._factors import Vector, compute_dtype
from gradstats.capture.following._examples import Examples
from gradstats.capture.parameters._nodes import Node, Root
from gradstats.capture.uses._uses import Use, attach


class ExampleView(torch.autograd.Function):
    """A tracked tensor as each example sees it: expanded, not copied, along the example axis.

    The operation on the view is PyTorch's own, and so is the view's gradient, which has one slice
    for each example.
    """

    @staticmethod
    def forward(ctx, use, layout, value):
        ctx.use, ctx.layout = use, layout
        ctx.shape = tuple(value.shape)
        return layout.view(value)

    @staticmethod
    def backward(ctx, grad):
        layout = ctx.layout
        with torch._C.DisableTorchFunction():
            ctx.use.deliver([layout.factor(grad.detach(), ctx.shape)])
        grad_value = None
        if ctx.use.tracker.trains and ctx.needs_input_grad[2]:
            grad_value = layout.total(grad, ctx.shape)
        return None, None, grad_value


@dataclass(frozen=True)
class ExampleLayout:
    """How tensors align with the example axis of an operation's result, by broadcasting.

    Attributes:
        dims: number of axes of the operation's result.
        examples: where the result's examples lie.
    """

    dims: int
    examples: Examples

    def padded(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return a shape with axes of size 1 in front, so that it has as many as the result."""
        return (1,) * (self.dims - len(shape)) + tuple(shape)

    def rows_of(self, shape: Sequence[int]) -> int:
        """Return the size of a tensor along the example axis."""
        axis = self.examples.axis - (self.dims - len(shape))
        return shape[axis] if axis >= 0 else 1

    def own_slices(self, shape: Sequence[int]) -> bool:
        """Whether each row sees its own slice of the tensor rather than the whole."""
        return self.rows_of(shape) == self.examples.rows != 1

    def serves(self, shape: Sequence[int]) -> bool:
        """Whether the factor of a tensor of this shape is known."""
        alone = self.examples.batch == 1
        return self.examples.plain or alone or not self.own_slices(shape)

    def view(self, value: Tensor) -> Tensor:
        shape = list(self.padded(value.shape))
        shape[self.examples.axis] = self.examples.rows
        return value.expand(shape)

    def factor(self, grad: Tensor, shape: tuple[int, ...]) -> Vector:
        if grad.is_complex():
            return replace(self, dims=self.dims + 1).factor(as_real(grad), (*shape, 2))
        slices = self.examples.lead(grad)
        batch = self.examples.batch
        if self.own_slices(shape) and batch == 1:
            return Vector(grad.reshape(1, *shape), shape)
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


@dataclass(frozen=True)
class Shared(ExampleLayout):
    """How a term of no example enters a sum over all examples: as an equal share of each."""

    def serves(self, shape: Sequence[int]) -> bool:
        return True

    def view(self, value: Tensor) -> Tensor:
        return value

    def factor(self, grad: Tensor, shape: tuple[int, ...]) -> Vector:
        share = grad.to(compute_dtype(grad)) / self.examples.batch
        return Vector(share.expand(self.examples.batch, *shape), shape)


def example_view(node: Node, layout: ExampleLayout) -> Tensor:
    """Return the node's value as each example sees it, with its statistics attached."""
    # The parameter itself is used rather than its alias, unless training gradients are to be
    # PyTorch's own to the bit: then those of all uses are added up at the alias.
    bare = isinstance(node, Root) and not node.tracker.settings.exact
    value = node.parameter if bare else node.value  # type: ignore[attr-defined]
    return attach(ExampleView)(Use([node]), layout, value)
