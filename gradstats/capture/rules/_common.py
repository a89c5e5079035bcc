"""What several families of rules need.

``func`` and ``node`` are the operation and the tracked operand that messages name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradstats.capture.following._examples import (
    IF_A_CONSTANT,
    IF_ATTENDING,
    IF_KNOWN,
    MIXED,
    WHERE_THE_NUMBER_IS_FROM,
    Examples,
    same_rows,
)
from gradstats.capture.following._marks import Marks
from gradstats.capture.following._operands import sole_example
from gradstats.capture.operations._names import function_name
from gradstats.capture.operations._nested import operands_of
from gradstats.capture.parameters._derivation import Derived
from gradstats.capture.parameters._derived import derive, real_numbers
from gradstats.capture.parameters._nodes import Node, Root
from gradstats.capture.parameters._refusals import refuse
from gradstats.capture.parameters._tensors import node_of, wrap
from gradstats.capture.uses._layer import Layer, LayerUse
from gradstats.capture.uses._uses import Use, attach, derived
from gradstats.capture.uses._views import ExampleLayout, example_view
from gradstats.errors import ExampleAxisError

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
        # A parameter enters as it is: the walk over the graph knows the Function's edges. Not under
        # autocast, which would keep its cast of a leaf, made where no gradient is recorded, for
        # others.
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
    """Whether all of several tensors of data belong to one and the same example."""
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
        axis: the example axis that the operation itself prescribes; the caller's by default.
        folds: the rule can serve data in which an example has several rows.
        trailing: number of last axes that the operation sums or normalises over.
    """
    layout = tracker.marks.layout_of(data)
    if layout is not None and tracker.batch_size == 1:
        layout = _of_the_only(layout, data, axis, trailing)
    misplaced = layout is None or axis not in (None, layout.axis)
    if misplaced and folds and (axis or 0) < data.dim() - trailing:
        # All of it may be one example's, along every axis.
        layout = tracker.marks.rows_of_one(data, axis or 0) or layout
    if layout is not None and axis not in (None, layout.axis):
        remedy = (
            "move the axis in front of this operation; recurrent and attention layers take "
            f"batch_first=. {IF_KNOWN}"
        )
        if tracker.marks.packed:
            remedy = "as packed rows are its positions, call it on each example's slice."
        raise ExampleAxisError(
            f"{function_name(func)} on {node.describe()} takes axis {axis} of its data, of shape "
            f"{tuple(data.shape)}, for the examples, which lie along axis {layout.axis}: it mixes "
            f"them. Expected the examples along axis {axis}: {remedy}",
            node.names,
        )
    if layout is None and _is_of_reduced_losses(tracker.marks, node, data):
        raise ExampleAxisError(
            f"{function_name(func)} on {node.describe()}: what is computed from parameters alone, "
            "such as a penalty on the weights or a trained weight of a loss, meets "
            f"{'values' if data.dim() else 'a scalar'} in which the {tracker.batch_size} examples "
            "were summed, so that its share in the loss of each is not known. Combine it with the "
            "unreduced losses, (weight * losses + penalty).mean(), so that each example's loss "
            "contains it. So that none does, leave out parameters of no other use with exclude=; "
            "run a penalty's own backward once the context has closed, or use weight_decay.",
            node.names,
        )
    if layout is None or not (layout.plain or folds):
        raise _refusal(tracker.marks, func, node, data, tracker.batch_dim if axis is None else axis)
    if layout.axis >= data.dim() - trailing:
        raise ExampleAxisError(
            f"{function_name(func)} on {node.describe()} reduces over the last {trailing} of "
            f"{data.dim()} axes of data of shape {tuple(data.shape)}, expected the {layout.batch} "
            f"examples along another axis than {layout.axis}: otherwise it mixes them. Give each a "
            "row of its own (a single one as x[None], a list of them stacked), or correct "
            f"batch_dim=. {WHERE_THE_NUMBER_IS_FROM}",
            node.names,
        )
    return layout


def _is_of_reduced_losses(marks: Marks, node: Node, data: Tensor) -> bool:
    """Whether data may be a reduced loss, or several, and a tracked operand a number for each."""
    if data.dim() == 0 and node.value.dim() == 0:
        return True
    return data.dim() <= 1 and node.value.dim() <= 1 and marks.values.is_sum(data)


def _refusal(marks: Marks, func, node: Node, data: Tensor, axis: int) -> ExampleAxisError:
    """Return the error about data whose rows cannot be told apart by example."""
    got, expected = f"data of shape {tuple(data.shape)}", marks.expected_along(axis)
    lost, met = marks.lost_at(data), marks.meetings.behind(data)
    why = []
    if met is not None:
        why.append(f"Before it {met.name()} {marks.meetings.how_met(met)}.")
    if lost is not None:
        why.append(f"Which row is whose was lost at {lost}, or rows of several meet there.")
    if not why and marks.owned(data) is MIXED:
        why.append("It was computed from all examples together, by a sum or a mean for instance.")
    if why:
        got, expected = f"{got}. {' '.join(why)}", f"rows of one example each, {expected}"
        remedies = [
            "Combine each example with its own values alone, or detach what comes from others.",
            IF_A_CONSTANT,
        ]
        if marks.packed:
            remedies.insert(0, IF_ATTENDING)
    else:
        remedies = [
            WHERE_THE_NUMBER_IS_FROM,
            "If the examples lie along another axis, pass batch_dim=.",
            "If these are no data of the batch, but weights or a mask that is the same for all "
            "examples, keep them in the model (an attribute will do).",
        ]
    remedies += [
        "If examples are folded together with positions or moved to another axis, keep the example "
        "axis as it is up to this operation; if they are taken out one by one, take x[i : i + 1].",
        IF_KNOWN,
    ]
    alone = "If each loss is that of its example alone all the same, which is checked,"
    remedies.append(
        f'{"Otherwise" if met is None else alone} per_example_norms(..., fallback="vmap") computes '
        "this parameter one example at a time, and exclude= leaves it out."
    )
    listed = "".join(f"\n  - {remedy}" for remedy in remedies)
    return ExampleAxisError(
        f"{function_name(func)} on {node.describe()}: which example each row of its data belongs "
        "to is not known, and is not guessed.\n"
        f"  got:      {got}\n"
        f"  expected: {expected}{listed}",
        node.names,
    )


def _of_the_only(layout: Examples, data: Tensor, axis: int | None, trailing: int) -> Examples:
    """Return where the only example lies for an operation: along every axis all is its own."""
    if axis in (None, layout.axis) and layout.axis < data.dim() - trailing:
        return layout
    axis = axis or 0
    return Examples(1, axis, data.shape[axis])


def check_rows(func, node: Node, layout: ExampleLayout, operands: Sequence[Tensor]) -> None:
    """Raise where operands have more rows along the example axis than there are of the examples."""
    sizes = (1, layout.examples.rows)
    for operand in operands:
        if layout.rows_of(operand.shape) not in sizes:
            refuse(
                func,
                node,
                f"repeats the only example along axis {layout.examples.axis}, which has no rule",
                "Give the example axis a place of its own, as x.unsqueeze(1) does.",
            )


def lined_up(tracker: Context, func, node: Node, operands: Sequence[Tensor]) -> ExampleLayout:
    """Return where the examples lie in operands that are broadcast against each other."""
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
    """Return the layout that all operands share, or refuse."""
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
    """Return the dtype in which PyTorch multiplies data with weights: autocast leaves float64."""
    dtype = autocast_dtype(data)
    eligible = data.is_floating_point() and data.dtype != torch.float64
    return dtype if dtype is not None and eligible else data.dtype


def cast_for_autocast(tracker: Context, data: Tensor) -> Tensor:
    """Return data in the dtype in which autocast computes matrix products on its device.

    Casting here lets the operation and its factor share one copy; the weight is cast by PyTorch,
    which caches it. What is known of the data is so of the copy.
    """
    dtype = product_dtype(data)
    if data.dtype == dtype:
        return data
    cast = data.to(dtype)
    tracker.marks.place_like(cast, data)
    return cast


def run(tracker: Context, func, *args, **kwargs):
    """Run an operation from within a rule: through its own rule where an operand is tracked."""
    if any(node_of(item) is not None for item in operands_of(args, kwargs)):
        return tracker.dispatch(func, args, kwargs)
    return func(*args, **kwargs)


def rows_along(
    tracker: Context, func, node: Node, operands: Sequence[Tensor], axis: int
) -> Examples:
    """Return where the examples lie along an axis that an operation prescribes for its operands.

    Args:
        operands: of which those that are data must agree; with none, the contract's.
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
    """Return a tensor that was repeated for the batch, with an axis divided, as an expansion.

    Of that the gradient of an example is one of what was repeated. None where it was not, or along
    another axis.

    Args:
        axis, sizes: the axis, divided into that of the examples and that of their rows.
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
    """Whether a tensor is another with two axes exchanged, none of which is the first."""
    if node.function not in (Tensor.transpose, torch.transpose) or node.kwargs:
        return False
    return 0 not in (axis % len(node.shape) for axis in node.args[1:])


def _rows_of(tracker: Context, func, node: Node, item: Tensor, examples: Examples) -> Tensor:
    """Return a tracked tensor with a slice for each of an example's rows as data.

    Or the slice that they all have, still tracked.
    """
    axis = examples.axis
    if item.shape[axis] and _is_expanded(node, axis) and not tracker.settings.exact:
        return derive(tracker, Tensor.narrow, (item, axis, 0, 1), {})
    if examples.segments is None:
        # Along an axis of their own an example's rows are one slice.
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
    """Whether all slices along an axis are one, to autograd too and not in memory alone.

    A parameter whose own memory was expanded has a gradient for each slice; so may a Function.
    """
    if node.value.stride(axis) or not isinstance(node, Derived) or node.has_function:
        return False
    return all(0 not in root.value.stride() for root in node.roots)


def as_data(tracker: Context, func, node: Node, item: Tensor, examples: Examples) -> Tensor:
    """Return an operand that has a slice for each row of the examples along their axis.

    Args:
        item: data; or a tracked or constant tensor that holds a slice for each example, as learned
            queries and initial states do that were expanded to the batch.
        examples: where the examples lie in it.
    """
    if tracker.marks.is_of_data(item):
        return item
    own = node_of(item)
    layout = ExampleLayout(item.dim(), examples)
    axis, fits = examples.axis, item.shape[examples.axis] == examples.rows
    if fits and own is not None and not layout.serves(item.shape):
        item = _rows_of(tracker, func, own, item, examples)
        own = node_of(item)
        if own is None:
            tracker.marks.place(item, examples)
            return item
    elif not fits:
        refuse(
            func,
            own or node,
            f"with {item.shape[axis]} slices along axis {axis} for "
            f"{examples.rows} rows of {examples.batch} examples has no rule",
        )
    # A view also where nothing is tracked, so that no mark is left on a tensor of the user's.
    item = item.view_as(item) if own is None else example_view(own, layout)
    tracker.marks.place(item, examples)
    return item
