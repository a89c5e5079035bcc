"""What several families of rules need.

``func`` and ``node`` are the operation and the tracked operand that messages name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradstats.capture.following._examples import IF_KNOWN, Examples, same_rows
from gradstats.capture.following._marks import Marks
from gradstats.capture.following._operands import sole_example
from gradstats.capture.operations._nested import operands_of
from gradstats.capture.parameters._derivation import Derived
from gradstats.capture.parameters._derived import derive, real_numbers
from gradstats.capture.parameters._nodes import Node, Root
from gradstats.capture.parameters._refusals import refuse
from gradstats.capture.parameters._tensors import node_of, wrap
from gradstats.capture.rules._misplaced import (
    along_another_axis,
    of_reduced_losses,
    reduced_over,
    unknown,
)
from gradstats.capture.uses._layer import Layer, LayerUse
from gradstats.capture.uses._uses import Use, attach, derived
from gradstats.capture.uses._views import ExampleLayout, example_view

if TYPE_CHECKING:
    from gradstats.capture._context import Context


def layered(
    tracker: Context,
    x: Tensor,
    parameters: Sequence[Tensor | None],
    examples: Examples,
    layer: Layer,
    autocast: bool,
) -> Tensor:
    """Run a layer whose backward computes norms together with the weight gradient.

    Args:
        x: the data.
        parameters: weight and bias.
        examples: where the examples lie in the result.
        autocast: whether autocast is on where the data lie.
    """
    nodes: list[Node] = []
    operands: list[Tensor | None] = []
    untracked = False
    for item in parameters:
        node = node_of(item)
        if node is None:
            untracked = untracked or item is not None
            operands.append(item)
            continue
        nodes.append(node)
        # Not the alias: the walk over the graph knows the Function's edges. But autocast caches its
        # cast of a leaf, and would reuse this one, made where no gradient is recorded.
        bare = isinstance(node, Root) and not autocast
        operands.append(node.parameter if bare else node.value)  # type: ignore[attr-defined]
    if autocast:
        x = cast_for_autocast(tracker, x)
        operands = layer.cast(x, operands)
    result = attach(LayerUse)(Use(nodes), layer, x, *operands)
    if not untracked:
        tracker.note_followed(result, examples)
    return result


def are_of_one(tracker: Context, data: Sequence[Tensor]) -> bool:
    """Whether several tensors of data all belong to the same single example."""
    return tracker.batch_size == 1 or sole_example(tracker.marks, list(data)) is not None


def locate(
    tracker: Context,
    func,
    node: Node,
    data: Tensor,
    *,
    axis: int | None = None,
    folds: bool = False,
    trailing: int = 0,
) -> Examples:
    """Return where the examples of ``data`` lie, or raise.

    Args:
        data: the operand that carries the examples.
        axis: the example axis that the operation prescribes; None if it can be any.
        folds: whether the rule supports several rows for an example.
        trailing: how many of the last axes the operation sums or normalises over.
    """
    layout = tracker.marks.layout_of(data)
    if layout is not None and tracker.batch_size == 1:
        layout = _of_the_only(layout, data, axis, trailing)
    misplaced = layout is None or axis not in (None, layout.axis)
    if misplaced and folds and (axis or 0) < data.dim() - trailing:
        # If all of the data are one example's, any axis will do.
        layout = tracker.marks.rows_of_one(data, axis or 0) or layout
    if layout is not None and axis not in (None, layout.axis):
        raise along_another_axis(tracker.marks, func, node, data, layout, axis)
    if layout is None and _is_of_reduced_losses(tracker.marks, node, data):
        raise of_reduced_losses(func, node, data, tracker.batch_size)
    if layout is None or not (layout.plain or folds):
        raise unknown(tracker.marks, func, node, data, tracker.batch_dim if axis is None else axis)
    if layout.axis >= data.dim() - trailing:
        raise reduced_over(func, node, data, layout, trailing)
    return layout


def _is_of_reduced_losses(marks: Marks, node: Node, data: Tensor) -> bool:
    """Whether the data may be one or several reduced losses, and the operand a number for each."""
    if data.dim() == 0 and node.value.dim() == 0:
        return True
    return data.dim() <= 1 and node.value.dim() <= 1 and marks.values.is_sum(data)


def _of_the_only(layout: Examples, data: Tensor, axis: int | None, trailing: int) -> Examples:
    """Return a layout of the only example that suits the operation: any axis is all its own."""
    if axis in (None, layout.axis) and layout.axis < data.dim() - trailing:
        return layout
    axis = axis or 0
    return Examples(1, axis, data.shape[axis])


def check_rows(func, node: Node, layout: ExampleLayout, operands: Sequence[Tensor]) -> None:
    """Raise if operands have several rows along the example axis, and the only example one."""
    if layout.examples.rows != 1:
        return  # PyTorch refuses sizes that do not fit
    for operand in operands:
        if layout.rows_of(operand.shape) != 1:
            refuse(
                func,
                node,
                f"repeats the only example along axis {layout.examples.axis}, which has no rule",
                "Add an axis for the other operand to broadcast along, as x.unsqueeze(1) does.",
            )


def lined_up(tracker: Context, func, node: Node, operands: Sequence[Tensor]) -> ExampleLayout:
    """Return where the examples lie in operands that broadcast against each other."""
    dims = max([operand.dim() for operand in operands])
    layouts = []
    data = tracker.marks.data_among(operands)
    for operand in [*filter(tracker.marks.may_hold_rows, data)] or data:
        examples = locate(tracker, func, node, operand, folds=True)
        layouts.append(examples.along(dims - operand.dim() + examples.axis))
    layout = ExampleLayout(dims, common_rows(func, node, layouts))
    check_rows(func, node, layout, operands)
    return layout


def common_rows(func, node: Node, layouts: list[Examples]) -> Examples:
    """Return the layout that all operands share; refuse if they differ."""
    first = layouts[0]
    if any(other.axis != first.axis or not same_rows(first, other) for other in layouts[1:]):
        refuse(
            func,
            node,
            "of operands whose examples lie along different axes has no rule",
            f"Move them to the same axis. {IF_KNOWN} Otherwise per_example_norms(..., "
            'fallback="vmap") computes this parameter one example at a time.',
        )
    return first


def autocast_dtype(data: Tensor) -> torch.dtype | None:
    """Return the dtype in which autocast computes on the data's device; None where it is off."""
    if not torch._C._is_any_autocast_enabled():
        return None
    device = data.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def product_dtype(data: Tensor) -> torch.dtype:
    """Return the dtype in which PyTorch multiplies data with weights; autocast skips float64."""
    dtype = autocast_dtype(data)
    eligible = data.is_floating_point() and data.dtype != torch.float64
    return dtype if dtype is not None and eligible else data.dtype


def cast_for_autocast(tracker: Context, data: Tensor) -> Tensor:
    """Return data in the dtype in which autocast computes matrix products on their device.

    Cast here, the operation and its factor share one copy, which is marked as the data are. The
    weight is left to PyTorch, which caches its cast.
    """
    dtype = product_dtype(data)
    return data if data.dtype == dtype else in_dtype(tracker, data, dtype)


def in_dtype(tracker: Context, data: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a copy of data in another dtype, which is marked as they are."""
    cast = data.to(dtype)
    tracker.marks.place_like(cast, data)
    return cast


def run(tracker: Context, func, *args, **kwargs):
    """Run an operation from within a rule, by its own rule if an operand is tracked."""
    if any(node_of(item) is not None for item in operands_of(args, kwargs)):
        return tracker.dispatch(func, args, kwargs)
    return func(*args, **kwargs)


def rows_along(
    tracker: Context, func, node: Node, operands: Sequence[Tensor], axis: int
) -> Examples:
    """Return where the examples lie along the axis that an operation prescribes.

    Args:
        operands: those that are data must agree; if none is, each example has one row.
        axis: the example axis.
    """
    layouts = [
        locate(tracker, func, node, item, axis=axis, folds=True)
        for item in tracker.marks.data_among(operands)
    ]
    if any(not same_rows(layouts[0], other) for other in layouts[1:]):
        refuse(func, node, "of operands whose rows belong to different examples has no rule")
    return layouts[0] if layouts else Examples(tracker.batch_size, axis)


def _copies(tracker: Context, node: Node, axis: int, sizes: tuple[int, int]) -> Tensor | None:
    """Return a tensor repeated for the batch as (examples, rows, *), expanded instead; else None.

    The gradient of an example is then one of the tensor that was repeated, not of its copies.

    Args:
        axis, sizes: the axis of all rows; how many examples there are, and rows of each.
    """
    transposes: list[Derived] = []
    while isinstance(node, Derived) and _transposes_later_axes(node):
        transposes.append(node)
        node = node.parents[0]
    repeated = isinstance(node, Derived) and node.function is Tensor.repeat
    if not repeated or axis or tracker.settings.exact:
        return None
    assert isinstance(node, Derived)
    source: Node = node.parents[0]
    if tuple(source.shape) != (sizes[1], *node.shape[1:]):
        return None
    for step in reversed(transposes):
        source = derived(source, step.function, *step.args[1:])
    copies = derived(source, Tensor.unsqueeze, 0)
    return wrap(derived(copies, Tensor.expand, sizes[0], *source.shape))


def _transposes_later_axes(node: Derived) -> bool:
    """Whether a tensor is another with two axes exchanged, neither of them the first."""
    if node.function not in (Tensor.transpose, torch.transpose) or node.kwargs:
        return False
    return 0 not in (axis % len(node.shape) for axis in node.args[1:])


def _rows_of(tracker: Context, func, node: Node, item: Tensor, examples: Examples) -> Tensor:
    """Return a tracked tensor's slices for the rows of the examples, as data.

    If all are one slice, return that slice, still tracked.
    """
    axis = examples.axis
    if item.shape[axis] and _is_expanded(node, axis) and not tracker.settings.exact:
        return derive(tracker, Tensor.narrow, (item, axis, 0, 1), {})
    if examples.segments is None:
        # With an axis of its own for the rows, each example has one slice.
        sizes = examples.batch, examples.fold
        apart = _copies(tracker, node, axis, sizes)
        if apart is None:
            apart = derive(tracker, Tensor.unflatten, (item, axis, sizes), {})
        slices = as_data(tracker, func, node, apart, Examples(examples.batch, axis))
        return slices.flatten(axis, axis + 1)
    ids = torch.arange(examples.rows, device=item.device)
    tracker.marks.place(ids, examples.along(0))
    if not item.is_complex():
        return run(tracker, Tensor.index_select, item, axis, ids)
    pairs = real_numbers(tracker, item)
    return torch.view_as_complex(run(tracker, Tensor.index_select, pairs, axis, ids))


def _is_expanded(node: Node, axis: int) -> bool:
    """Whether all slices along an axis are one tensor, in memory and to autograd.

    Slices that only share memory have separate gradients: those of a parameter whose own memory is
    expanded, and perhaps those that a Function returned.
    """
    if node.value.stride(axis) or not isinstance(node, Derived) or node.has_function:
        return False
    return all(0 not in root.value.stride() for root in node.roots)


def as_data(tracker: Context, func, node: Node, item: Tensor, examples: Examples) -> Tensor:
    """Return an operand with a slice for each row of the examples, as data.

    Args:
        item: data; or a tracked or constant tensor with a slice for each row, such as learned
            queries or initial states that were expanded to the batch.
        examples: where the examples lie in it.
    """
    if tracker.marks.is_of_data(item):
        return item
    item_node = node_of(item)
    layout = ExampleLayout(item.dim(), examples)
    slices = item.shape[examples.axis]
    if slices != examples.rows:
        refuse(
            func,
            item_node or node,
            f"with {slices} slices along axis {examples.axis} for {examples.rows} rows of "
            f"{examples.batch} examples has no rule",
        )
    if item_node is not None and not layout.serves(item.shape):
        item = _rows_of(tracker, func, item_node, item, examples)
        item_node = node_of(item)
        if item_node is None:
            tracker.marks.place(item, examples)
            return item
    # A view of constants too, so that no mark is left on a tensor of the user's.
    item = item.view_as(item) if item_node is None else example_view(item_node, layout)
    tracker.marks.place(item, examples)
    return item
