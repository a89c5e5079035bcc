"""Operations that broadcast a parameter against data, or concatenate the two.

Each example gets its own view of the parameter (expanded, not copied). PyTorch's own operation and
gradient do the rest, so that no operation needs a formula. Products and sums have kernels on CUDA
(``_broadcast``), which do not write per-example gradients.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradstats._factors import cast, compute_dtype
from gradstats.capture.following._examples import MIXED, Examples, Whole
from gradstats.capture.following._operands import sole_example
from gradstats.capture.following._taken import as_constants, is_drawn, is_given
from gradstats.capture.operations._nested import operands_of, rebuild
from gradstats.capture.operations._operations import (
    ADDS,
    ADDS_IN_PLACE,
    ELEMENTWISE,
    EXTREMES,
    JOINS,
    MULTIPLIES,
    function_variants,
)
from gradstats.capture.parameters._derived import OutOfPlace, derive
from gradstats.capture.parameters._nodes import Node
from gradstats.capture.parameters._refusals import refuse
from gradstats.capture.parameters._slices import repeated_in
from gradstats.capture.parameters._tensors import first_node, node_of, nodes_of, value_of
from gradstats.capture.rules._common import (
    cast_for_autocast,
    check_rows,
    common_rows,
    lined_up,
    locate,
    run,
)
from gradstats.capture.rules._in_place import become, write_data
from gradstats.capture.rules._per_example import (
    ELEMENTWISE_IN_PLACE,
    changes_type,
    per_example,
    tapped,
)
from gradstats.capture.uses._broadcast import BroadcastUse, on_chip
from gradstats.capture.uses._decided import decide
from gradstats.capture.uses._hooked import ADDED, MULTIPLIED, hooked
from gradstats.capture.uses._tap import tap
from gradstats.capture.uses._together import Joinable
from gradstats.capture.uses._uses import Use, attach, free_of_views
from gradstats.capture.uses._views import ExampleLayout, Shared, example_view

if TYPE_CHECKING:
    from gradstats.capture._context import Context


def broadcast(tracker: Context, func, *args, **kwargs):
    """Elementwise operations of data and tracked tensors."""
    operands = operands_of(args, kwargs)
    nodes = nodes_of(operands)
    data = tracker.marks.data_among(operands)
    if func not in ELEMENTWISE_IN_PLACE:
        if _are_constants(tracker, nodes, data):
            args, kwargs = as_constants(tracker.marks, data, (args, kwargs))
            return run(tracker, func, *args, **kwargs)
        whole = _whole(tracker, data)
        if whole is not None:
            dims = max(operand.dim() for operand in operands)
            args, kwargs = _widen(tracker, (args, kwargs), whole, dims)
            return broadcast(tracker, func, *args, **kwargs).squeeze(0)
    elif node_of(args[0]) is not None:
        if func in ADDS_IN_PLACE and _is_added_to_losses(tracker, operands, data):
            return _add_losses(tracker, func, args, kwargs)
        return write_data(tracker, func, args, kwargs)
    if (func in ADDS or func in ADDS_IN_PLACE) and _is_added_to_losses(tracker, operands, data):
        return _added_to_losses(tracker, func, args, kwargs)
    layout = lined_up(tracker, func, nodes[0], operands)
    if func in PRODUCTS_AND_SUMS and not kwargs and len(args) == 2:
        if len(nodes) == len(data) == 1:
            result = _product_or_sum(tracker, func, nodes[0], layout, *args)
            if result is not None:
                return result
    return per_example(tracker, func, layout, args, kwargs)


def _is_added_to_losses(
    tracker: Context, operands: Sequence[Tensor], data: Sequence[Tensor]
) -> bool:
    """Whether a term of parameters alone, such as a penalty, is added to the sum of all losses.

    The sum or mean weighs all examples alike, so that each one's loss contains an equal share. The
    loss of an only example, a tensor without an example axis, contains the whole term.
    """
    if tracker.weight is None or len(data) > 1 or any(item.dim() > 1 for item in operands):
        return False
    marks = tracker.marks
    if tracker.batch_size == 1:
        return isinstance(_whole(tracker, data), Whole)
    return all(marks.owned(item) is MIXED and marks.values.is_sum(item) for item in data)


def _added_to_losses(tracker: Context, func, args, kwargs) -> Tensor:
    """Add a term computed from parameters alone to a loss of all examples."""
    return tapped(tracker, func, Shared(1, Examples(tracker.batch_size, 0)), args, kwargs)


def _add_losses(tracker: Context, func, args, kwargs) -> Tensor:
    """Add a loss of all examples to a term computed from parameters alone, in place."""
    target, losses = args[0], args[1] if len(args) > 1 else kwargs["other"]
    become(func, target, lambda: _added_to_losses(tracker, OutOfPlace(func), args, kwargs))
    tracker.marks.place_like(target, losses)
    return target


def _are_constants(tracker: Context, nodes: Sequence[Node], data: Sequence[Tensor]) -> bool:
    """Whether "data" are constants: earlier weights or masks in the code's scope, or noise.

    Only of tensors no larger than the parameters that they meet: the results would be exact for
    others too, but a tensor computed from parameters and constants should not outgrow these.
    """
    largest = max(node.value.numel() for node in nodes)
    if not all(
        not item.requires_grad
        and item.numel() <= largest
        and (_is_of_weights(tracker, nodes, item) or item in tracker.marks.enclosed)
        for item in data
    ):
        return False
    shapes = [node.shape for node in nodes]
    try:
        together = torch.broadcast_shapes(*shapes, *(item.shape for item in data))
        return together == torch.broadcast_shapes(*shapes)
    except RuntimeError:  # the shapes do not broadcast
        return False


def _is_of_weights(tracker: Context, nodes: Sequence[Node], item: Tensor) -> bool:
    """Whether given or drawn values were taken for data only because of their size.

    Such as the noise of a layer with as many units as there are examples. Where parameters were
    repeated for the batch, they are data if they have a row for each copy.
    """
    marks = tracker.marks
    if marks.taken is None or not (is_drawn(marks, item) or is_given(marks, item)):
        return False
    if not any(repeated_in(node, tracker.batch_size) for node in nodes):
        return True
    layout, dims = marks.layout_of(item), max(len(node.shape) for node in nodes)
    return layout is not None and layout.axis + dims - item.dim() > 0


def _product_or_sum(
    tracker: Context, func, node: Node, layout: ExampleLayout, first: Tensor, second: Tensor
):
    """Return x ∘ w or x + b with its factors attached; None if there is no short cut."""
    settings, multiply = tracker.settings, func in MULTIPLIES
    position = 0 if node_of(second) is not None else 1
    x, value = (first, second) if position == 0 else (second, first)
    plan = on_chip(layout, x, value, multiply=multiply)
    apart = settings.exact or changes_type((first, second))
    if plan is not None and apart:
        result = func(value_of(first), value_of(second))
        saved = (x.detach(),) if multiply else ()
        return tap([node], result, plan, *saved)
    if plan is not None:
        return decide(tracker, _in_one_pass, x, (value,), layout.examples, plan, multiply)
    shape, examples = tuple(value.shape), layout.examples
    if not layout.serves(shape):
        return None
    run = func if position == 0 else lambda x, parameter: func(parameter, x)
    # A hook reads the data once more for the norms. A view shares the sums of each example with the
    # training gradient, but not in half precision, in which PyTorch rounds them.
    large = x.numel() > SMALL and x.dtype.itemsize > 2
    reads_again = large and settings.weight_gradients and settings.fused
    if not (reads_again or x.dim() < layout.dims or x.is_complex() or value.is_complex()):
        factors = MultipliedFactors(layout, shape) if multiply else BroadcastFactors(layout, shape)
        place = MULTIPLIED[position] if multiply else ADDED[position]
        result = hooked(tracker, x, (value,), examples, place, factors, run)
        if result is not None:
            return result
    return None if apart else decide(tracker, _with_view, x, (value,), examples, layout, run)


def _in_one_pass(tracker: Context, x, parameters, examples: Examples, plan, multiply) -> Tensor:
    """Run a product or sum whose backward the kernels compute in one pass."""
    (node,) = nodes_of(parameters)
    result = attach(BroadcastUse)(Use([node]), plan, multiply, x, node.value)
    tracker.note_followed(result, examples)
    return result


def _with_view(tracker: Context, x, parameters, examples: Examples, layout, run) -> Tensor:
    """Run a product or sum with what each example sees of the parameter."""
    (node,) = nodes_of(parameters)
    result = run(x, example_view(node, layout))
    if x.dim() == layout.dims:
        tracker.note_followed(result, examples)
    return result


@dataclass(frozen=True)
class BroadcastFactors(Joinable):
    """The factor of a term that was broadcast to the result's shape."""

    layout: ExampleLayout
    shape: tuple[int, ...]

    @property
    def examples(self) -> Examples:  # type: ignore[override]
        return self.layout.examples

    def likeness(self) -> Hashable | None:
        whole = self.layout.rows_of(self.shape) == 1
        return (self.shape, self.layout.dims) if whole else None

    def joined(self, count: int) -> BroadcastFactors:
        layout = replace(self.layout, examples=self.examples.times(count))
        return replace(self, layout=layout)

    def data_gradients(self, nodes: Sequence[Node], grad: Tensor, *saved: Tensor) -> Any:
        """None: the gradients of a sum do not depend on its terms."""

    def __call__(self, grad: Tensor) -> list:
        sizes, along = self.layout.padded(self.shape), self.layout.examples.axis
        repeated = [axis for axis, size in enumerate(sizes) if size == 1 and axis != along]
        if repeated:
            dtype = None if grad.is_complex() else compute_dtype(grad)
            grad = grad.sum(repeated, keepdim=True, dtype=dtype)
        return [self.layout.factor(grad, self.shape)]


@dataclass(frozen=True)
class MultipliedFactors(BroadcastFactors):
    """The factor of a parameter that multiplies data."""

    def __call__(self, grad: Tensor, x: Tensor) -> list:  # type: ignore[override]
        dtype = compute_dtype(grad, x)
        return super().__call__(cast(grad, dtype) * cast(x, dtype))

    def data_gradients(self, nodes: Sequence[Node], grad: Tensor, x: Tensor) -> tuple[Tensor]:  # type: ignore[override]
        """Return the gradient of the data as tracked operations compute it."""
        (node,) = nodes
        gradient = grad * example_view(node, self.layout)
        return (gradient.sum_to_size(x.shape).to(x.dtype),)


def _whole(tracker: Context, data: Sequence[Tensor]) -> Whole | None:
    """Return the single example that data without an example axis belong to; None otherwise."""
    if tracker.batch_size > 1:
        whole = sole_example(tracker.marks, data)
        known = (owner for owner in map(tracker.marks.owned, data) if owner is not None)
        return None if whole is None or isinstance(next(known), Examples) else whole
    # Data of the only example may lack an example axis even if other operands have one.
    owners = map(tracker.marks.owned, data)
    return next((owner for owner in owners if isinstance(owner, Whole)), None)


def _widen(tracker: Context, items, whole: Whole, dims: int):
    """Return operands with an example axis in front, along which the data have one row."""

    def widen(item):
        if not isinstance(item, Tensor):
            return item
        shape = (1,) * (dims + 1 - item.dim()) + tuple(item.shape)
        if node_of(item) is not None:
            return derive(tracker, Tensor.view, (item, shape), {})
        wide = item.view(shape)
        if tracker.marks.is_data(item):
            tracker.marks.place(wide, whole.row(tracker.batch_size, item.device))
        else:
            tracker.marks.mark_constant(wide)
        return wide

    return rebuild(items, widen)


def join(tracker: Context, func, tensors, dim=0, **kwargs):
    """cat and stack of data and of tracked tensors, which each example sees as they are."""
    tensors = list(tensors)
    nodes = nodes_of(tensors)
    data = tracker.marks.data_among(tensors)
    whole = sole_example(tracker.marks, data) if tracker.batch_size > 1 else _whole(tracker, data)
    # All are of one example: put an example axis in front unless each has one, with one row.
    owners = map(tracker.marks.owned, data)
    if whole is not None and any(not isinstance(o, Examples) or o.rows != 1 for o in owners):
        tensors = _widen(tracker, tensors, whole, max(tensor.dim() for tensor in tensors))
        return join(tracker, func, tensors, dim + (dim >= 0), **kwargs).squeeze(0)
    dims = max(tensor.dim() for tensor in tensors)
    stacked = func is torch.stack
    dim %= dims + stacked
    layouts = [locate(tracker, func, nodes[0], tensor, folds=True) for tensor in data]
    examples = common_rows(func, nodes[0], layouts)
    if not stacked and dim == examples.axis:
        if any(node.value.numel() for node in nodes):
            refuse(func, nodes[0], "along the example axis has no rule")
        # The parameters are empty, but still affect the dtype of the result.
        return func(
            [value_of(item).detach() if node_of(item) else item for item in tensors], dim, **kwargs
        )
    layout = ExampleLayout(dims, examples)
    check_rows(func, nodes[0], layout, tensors)
    return per_example(tracker, func, layout, (tensors, dim), kwargs)


def stack_along(tracker: Context, func, tensors):
    """hstack, vstack and dstack: cat along a fixed axis, if all operands have it."""
    dim, tensors = JOINS[func], list(tensors)
    assert dim is not None
    if any(tensor.dim() < max(2, dim + 1) for tensor in tensors):
        refuse(
            func, first_node(*tensors), "of vectors has no rule", "Use torch.cat or torch.stack."
        )
    return join(tracker, torch.cat, tensors, dim)


def broadcast_tensors(tracker: Context, func, *tensors):
    """All operands in their common shape, tracked ones as each example sees them."""
    layout = lined_up(tracker, func, first_node(*tensors), list(tensors))
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))

    def expanded(item):
        if node_of(item) is None:
            return item.expand(shape)
        return per_example(tracker, _expand, layout, (item, shape), {})

    return tuple(map(expanded, tensors))


def _expand(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """A tensor in a larger shape."""
    return free_of_views(tensor.expand(shape))


def prelu(tracker: Context, func, input, weight):
    """max(0, x) + w·min(0, x), with w of shape (1,) or (channels,)."""
    if node_of(weight) is None:
        refuse(func, first_node(input), "of a derived input has no rule")
    channels = (1, -1, *(1 for _ in range(input.dim() - 2))) if input.dim() > 1 else (-1,)
    scale = derive(tracker, Tensor.view, (weight, channels), {})
    input = cast_for_autocast(tracker, input)
    if scale.dtype != input.dtype:
        scale = derive(tracker, Tensor.to, (scale, input.dtype), {})
    positive = input > 0
    # Not the input itself: its infinities would be multiplied by a gradient of zero.
    negative = input.masked_fill(positive, 0)
    tracker.marks.place_like(negative, input)
    return torch.where(positive, input, broadcast(tracker, torch.mul, negative, scale))


# Operations that the kernels differentiate where they broadcast.
PRODUCTS_AND_SUMS = MULTIPLIES | frozenset(function_variants("add"))

# Up to this many elements, reading the data again is faster than calling an autograd Function.
SMALL = 65536

RULES = {
    **dict.fromkeys((*function_variants(*ELEMENTWISE), *ELEMENTWISE_IN_PLACE), broadcast),
    **dict.fromkeys(EXTREMES, broadcast),
    **dict.fromkeys((torch.special.xlog1py, torch.complex, torch.polar, torch.rsub), broadcast),
    **{func: join if axis is None else stack_along for func, axis in JOINS.items()},
    torch.broadcast_tensors: broadcast_tensors,
    torch.prelu: prelu,
}
