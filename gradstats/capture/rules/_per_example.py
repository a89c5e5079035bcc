"""An operation of PyTorch's in which every example has its own view of each tracked operand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradstats.capture.following._examples import Examples
from gradstats.capture.operations._nested import flatten, rebuild
from gradstats.capture.operations._operations import (
    ELEMENTWISE,
    JOINS,
    function_variants,
    in_place_variants,
)
from gradstats.capture.parameters._derived import derive
from gradstats.capture.parameters._nodes import Node
from gradstats.capture.parameters._refusals import refuse
from gradstats.capture.parameters._tensors import first_node, node_of, value_of
from gradstats.capture.rules._common import in_order, slices_of
from gradstats.capture.uses._uses import tap
from gradstats.capture.uses._views import ExampleLayout, example_view

ELEMENTWISE_IN_PLACE = frozenset({*in_place_variants(*ELEMENTWISE), Tensor.copy_})

# Operations whose derivatives depend on no number of their operands, save where a condition holds.
AFFINE = frozenset(
    {
        *function_variants("add", "sub", "subtract", "where"),
        *in_place_variants("add", "sub", "subtract"),
        *JOINS,
        torch.rsub,
        Tensor.copy_,
    }
)


def per_example(tracker, func, layout: ExampleLayout, args, kwargs, axis: int | None = None):
    """Run ``func`` with every tracked operand replaced by what each example sees of it.

    Args:
        layout: where the examples lie in the operands, which line up from the right.
        args, kwargs: of the operation; an axis among them is counted from the side of the example
            axis on which it lies.
        axis: where the examples lie in the result; as in the operands by default.
    """
    for item in flatten((args, kwargs)):
        node = node_of(item)
        if node is not None and not layout.serves(item.shape):
            if layout.examples.even and func not in ELEMENTWISE_IN_PLACE:
                at = layout.examples.axis if axis is None else axis
                return _unfolded(tracker, func, layout, args, kwargs, at)
            refuse(
                func,
                node,
                "of data in which an example has several rows, each with its own part of the "
                "parameter, has no rule",
            )
    if tracker.settings.exact or changes_type((args, kwargs)):
        return _tapped(func, layout, args, kwargs)

    def view(item):
        node = node_of(item)
        return item if node is None else example_view(node, layout)

    return func(*rebuild(args, view), **rebuild(kwargs, view))


def changes_type(items) -> bool:
    """Whether operands give another dtype once a tracked number among them has axes.

    Beside tensors of lower precision a number leaves theirs to the result, and counts in its own.
    """
    tensors = [item for item in flatten(items) if isinstance(item, Tensor)]
    numbers = {item.dtype for item in tensors if not item.dim() and node_of(item) is not None}
    others = {item.dtype for item in tensors if item.dim() and item.is_floating_point()}
    return bool(numbers) and bool(others - numbers)


def _unfolded(tracker, func, layout: ExampleLayout, args, kwargs, result_axis: int):
    """Run ``func`` with an example's rows along an axis of their own, so that it has one slice."""
    examples = layout.examples
    axis, sizes = examples.axis, (examples.batch, examples.rows // examples.batch)

    def unfold(item):
        if not isinstance(item, Tensor) or item.dim() <= layout.dims - 1 - axis:
            return item
        own = axis - (layout.dims - item.dim())
        shape = sizes if item.shape[own] != 1 else (1, 1)
        order = None if item.shape[own] == 1 else examples.order
        if node_of(item) is None:
            return in_order(item, own, order).unflatten(own, shape)
        if order is not None:
            item = derive(tracker, in_order, (item, own, order), {})
        if shape == sizes:
            return slices_of(tracker, item, own, sizes)
        return derive(tracker, Tensor.unflatten, (item, own, shape), {})

    inner = ExampleLayout(layout.dims + 1, Examples(examples.batch, axis))
    unfolded = rebuild(args, unfold), rebuild(kwargs, unfold)
    result = per_example(tracker, func, inner, *unfolded).flatten(result_axis, result_axis + 1)
    if examples.order is not None:
        result = result.index_select(result_axis, examples.order.argsort())
    expected = _shape_of(func, args, kwargs)
    if result.shape != expected:
        refuse(
            func,
            first_node(*flatten((args, kwargs))),
            f"gave shape {tuple(result.shape)}, expected {tuple(expected)}, of data in which an "
            "example has several rows, and so has no rule",
        )
    return result


def _shape_of(func, args, kwargs) -> torch.Size:
    """Return the shape of an operation's result without computing it."""

    def empty(item):
        return torch.empty_like(value_of(item), device="meta") if isinstance(item, Tensor) else item

    with torch.no_grad():
        return func(*rebuild(args, empty), **rebuild(kwargs, empty)).shape


def _tapped(func, layout: ExampleLayout, args, kwargs):
    """Run ``func`` as PyTorch does and find the factors by differentiating it again in backward."""
    nodes: list[Node] = []
    tensors: list[Tensor] = []

    def keep(item):
        if not isinstance(item, Tensor):
            return item
        node = node_of(item)
        if node is not None:
            nodes.append(node)
        tensors.append(value_of(item))
        return Slot(len(tensors) - 1, node is not None)

    call = rebuild((args, kwargs), keep)
    saved = [tensor.detach() for tensor in tensors]
    if func in AFFINE:
        # PyTorch keeps none of them, and may find them changed when the backward runs.
        saved = [item if item.dtype == torch.bool else _shape_alone(item) for item in saved]
    elif func in ELEMENTWISE_IN_PLACE:
        saved[0] = saved[0].clone()
    result = func(*rebuild(args, value_of), **rebuild(kwargs, value_of))
    # The tap changes nothing, so an operation that needs its own result in backward may find it.
    with torch.autograd._unsafe_preserve_version_counter(result):
        return tap(nodes, result, RecomputedFactors(number_of(func), call, layout), *saved)


def _shape_alone(tensor: Tensor) -> Tensor:
    """Return a tensor that agrees with another in all but its numbers, of which it has one."""
    return tensor.new_zeros(()).expand(tensor.shape)


@dataclass(frozen=True)
class Slot:
    """Stands for a tensor in a call that will be made again."""

    index: int
    tracked: bool


# Operations that were recomputed. A graph holds numbers, and no functions to be called later.
OPERATIONS: list[Any] = []


def number_of(func) -> int:
    """Return the place of an operation among ``OPERATIONS``."""
    if func not in OPERATIONS:
        OPERATIONS.append(func)
    return OPERATIONS.index(func)


@dataclass(frozen=True)
class RecomputedFactors:
    """Factors of the tracked operands of a cheap operation, found by running it again.

    Attributes:
        number: of the operation.
        call: its positional and named arguments, with a ``Slot`` for each tensor.
        layout: where the examples lie.
    """

    number: int
    call: tuple[Any, Any]
    layout: ExampleLayout

    def __call__(self, grad: Tensor, *saved: Tensor) -> list:
        function = OPERATIONS[self.number]
        leaves: list[Tensor] = []
        shapes: list[tuple[int, ...]] = []

        def fill(item):
            if not isinstance(item, Slot):
                return item
            tensor = saved[item.index]
            if not item.tracked:
                changed = function in ELEMENTWISE_IN_PLACE and item.index == 0
                return tensor.clone() if changed else tensor
            leaf = self.layout.view(tensor.detach()).requires_grad_()
            leaves.append(leaf)
            shapes.append(tuple(tensor.shape))
            return leaf

        with torch.enable_grad():
            args, kwargs = rebuild(self.call, fill)
            result = function(*args, **kwargs)
            slices = torch.autograd.grad(result, leaves, grad)
        return [
            self.layout.factor(piece, shape) for piece, shape in zip(slices, shapes, strict=True)
        ]
