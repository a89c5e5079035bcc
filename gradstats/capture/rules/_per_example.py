"""PyTorch's own operations, run with each example's view of the tracked operands."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradstats._complex import as_real
from gradstats._factors import Rows
from gradstats.capture.operations._nested import flatten, rebuild
from gradstats.capture.operations._operations import (
    ADDS,
    ADDS_IN_PLACE,
    ELEMENTWISE,
    JOINS,
    in_place_variants,
    variants,
)
from gradstats.capture.parameters._derived import real_numbers
from gradstats.capture.parameters._nodes import Node
from gradstats.capture.parameters._tensors import first_node, node_of, value_of
from gradstats.capture.rules._common import as_data
from gradstats.capture.rules._embedding import leading_axes, table_rows
from gradstats.capture.uses._tap import Factors, tap
from gradstats.capture.uses._views import ExampleLayout, example_view

if TYPE_CHECKING:
    from gradstats.capture._context import Context

ELEMENTWISE_IN_PLACE = frozenset({*in_place_variants(*ELEMENTWISE), Tensor.copy_})

# Operations whose derivatives do not depend on the values of operands, except for conditions.
AFFINE = ADDS | ADDS_IN_PLACE | JOINS.keys() | {*variants("where"), Tensor.copy_}
CONDITIONS = frozenset({torch.bool, torch.uint8})


def per_example(tracker: Context, func, layout: ExampleLayout, args, kwargs):
    """Run ``func`` with every tracked operand replaced by what each example sees of it.

    Args:
        layout: where the examples lie in the operands, which line up from the right.
    """
    if tracker.settings.exact:
        return tapped(tracker, func, layout, args, kwargs)
    args, kwargs = rebuild((args, kwargs), partial(_own_rows, tracker, func, layout))
    if changes_type((args, kwargs)):
        return tapped(tracker, func, layout, args, kwargs)

    def view(item):
        node = node_of(item)
        return item if node is None else example_view(node, layout)

    return func(*rebuild(args, view), **rebuild(kwargs, view))


def _own_rows(tracker: Context, func, layout: ExampleLayout, item):
    """Return an operand, as data if it is tracked and has a slice for each row of an example."""
    node = node_of(item)
    if node is None or layout.serves(item.shape):
        return item
    axis = layout.examples.axis - (layout.dims - item.dim())
    return as_data(tracker, func, node, item, layout.examples.along(axis))


def changes_type(items) -> bool:
    """Whether the result's dtype would change if a tracked 0-dim operand had axes.

    PyTorch ignores the precision of 0-dim operands beside tensors with axes.
    """
    tensors = [item for item in flatten(items) if isinstance(item, Tensor)]
    numbers = {item.dtype for item in tensors if not item.dim() and node_of(item) is not None}
    others = {item.dtype for item in tensors if item.dim() and item.is_floating_point()}
    return bool(numbers) and bool(others - numbers)


def tapped(tracker: Context, func, layout: ExampleLayout, args, kwargs):
    """Run ``func`` as PyTorch does; the backward runs it again to find the factors."""
    nodes: list[Node] = []
    tensors: list[Tensor] = []

    def keep(item):
        if not isinstance(item, Tensor):
            return item
        node = node_of(item)
        if node is not None:
            served = layout.serves(item.shape)
            nodes.append(node if served else first_node(_as_table(tracker, layout, item)))
        tensors.append(value_of(item))
        return Slot(len(tensors) - 1, node is not None)

    call = rebuild((args, kwargs), keep)
    saved = [tensor.detach() for tensor in tensors]
    if func in AFFINE:
        saved = [*map(_form_of, saved)]
    elif func in ELEMENTWISE_IN_PLACE:
        saved[0] = saved[0].clone()
    result = func(*rebuild(args, value_of), **rebuild(kwargs, value_of))
    # The tap changes no values, so an operation may still need its own result in its backward.
    with torch.autograd._unsafe_preserve_version_counter(result):
        return tap(nodes, result, RecomputedFactors(func, call, layout), *saved)


def _form_of(operand: Tensor) -> Tensor:
    """Return what the derivatives of an ``AFFINE`` operation depend on in an operand.

    Like PyTorch, which saves only conditions, it keeps no values that the user may still change.
    """
    if operand.dtype in CONDITIONS:
        return operand
    # alpha= may be a 0-dim tensor. Of others only the shape counts: a zero stands for all values.
    return operand.new_zeros(()).expand(operand.shape) if operand.dim() else operand.clone()


@dataclass(frozen=True)
class Slot:
    """The place of a tensor in a call that is made again."""

    index: int
    tracked: bool


@dataclass(frozen=True)
class RecomputedFactors(Factors):
    """Factors of the tracked operands of a cheap operation, found by running it again.

    Attributes:
        function: the operation.
        call: its positional and named arguments, with a ``Slot`` for each tensor.
        layout: where the examples lie.
    """

    function: Any
    call: tuple[Any, Any]
    layout: ExampleLayout

    def __call__(self, grad: Tensor, *saved: Tensor) -> list:
        leaves: list[Tensor] = []
        shapes: list[tuple[int, ...]] = []

        def fill(item):
            if not isinstance(item, Slot):
                return item
            tensor = saved[item.index]
            if not item.tracked:
                changed = self.function in ELEMENTWISE_IN_PLACE and item.index == 0
                return tensor.clone() if changed else tensor
            leaf = self.layout.view(tensor.detach()).requires_grad_()
            leaves.append(leaf)
            shapes.append(tuple(tensor.shape))
            if tensor.dim():
                return leaf
            # Now that it has axes, its precision would count (see ``changes_type``).
            return leaf.to(grad.dtype.to_complex() if leaf.is_complex() else grad.dtype.to_real())

        with torch.enable_grad():
            args, kwargs = rebuild(self.call, fill)
            result = self.function(*args, **kwargs)
            slices = torch.autograd.grad(result, leaves, grad)
        return [
            self.layout.factor(piece, shape)
            if self.layout.serves(shape)
            else _looked_up(self.layout, piece, shape)
            for piece, shape in zip(slices, shapes, strict=True)
        ]


def _as_table(tracker: Context, layout: ExampleLayout, item: Tensor) -> Tensor:
    """Return a tracked tensor with the axis of the examples' rows in front."""
    axis = layout.examples.axis - (layout.dims - item.dim())
    if item.is_complex():
        item = real_numbers(tracker, item)
    return leading_axes(tracker, item, [axis])


def _looked_up(layout: ExampleLayout, grad: Tensor, shape: tuple[int, ...]) -> Rows:
    """Return the factor of a tensor with a slice for each row of the examples."""
    axis = layout.examples.axis - (layout.dims - len(shape))
    grad = grad.reshape(shape)
    grad = (as_real(grad) if grad.is_complex() else grad).movedim(axis, 0)
    ids = torch.arange(len(grad), device=grad.device)
    return table_rows(layout.examples.along(0), ids, grad, tuple(grad.shape), None)
