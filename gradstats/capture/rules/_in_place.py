"""Data written into derived tensors, which are data from then on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradstats._compiler import is_compiling
from gradstats.capture.following._examples import Examples, Whole
from gradstats.capture.following._marks import Marks
from gradstats.capture.following._numbered import lies_after
from gradstats.capture.following._writes import WRITES, Write
from gradstats.capture.operations._nested import operands_of
from gradstats.capture.operations._operations import variants
from gradstats.capture.parameters._derivation import Derived
from gradstats.capture.parameters._nodes import Node, same_storage
from gradstats.capture.parameters._refusals import refuse, refuse_change
from gradstats.capture.parameters._tensors import first_node, node_of
from gradstats.capture.rules._common import run
from gradstats.capture.uses._views import ExampleLayout, example_view

if TYPE_CHECKING:
    from gradstats.capture._context import Context


def write_data(tracker: Context, func, args: tuple[Any, ...], kwargs: dict[str, Any]):
    """Run an operation that changes a tracked tensor in place with data among its operands.

    The tensor becomes what each example sees of it, and is changed as any data are.
    """
    target = args[0]
    node = first_node(target)
    values = [*args[1:], *kwargs.values()]
    whole = _whole_of(node) if func is not Tensor.__setitem__ and len(values) == 1 else None
    if whole is None:
        _become_data(tracker, func, target, WRITES[func](*args, **kwargs))
    else:
        # x[i] += data: the tensor that the part was taken of becomes data, and so does the part.
        index = node.args[1]  # type: ignore[attr-defined]
        write = WRITES[Tensor.__setitem__](whole, index, *values)
        node.shown = lambda: None  # type: ignore[attr-defined]
        layout = _become_data(tracker, func, whole, write)
        _swap(func, node, target, whole[index])
        tracker.marks.place(target, write.read(layout) if write.read else layout)
    if any(node_of(item) is not None for item in operands_of(args, kwargs)):
        return run(tracker, func, *args, **kwargs)
    return func(*args, **kwargs)


def write_into(tracker: Context, func, input, *args, **kwargs):
    """Data written into a tracked tensor or a copy of it, as ``scatter`` does.

    As the tokens of a masked autoencoder are, among copies of a mask token.
    """
    if node_of(input) is None or tracker.marks.packed:
        refuse(func, first_node(input, *args, *kwargs.values()))
    if func in IN_PLACE:
        return write_data(tracker, func, (input, *args), kwargs)
    node = first_node(input)
    layout = _layout_after(tracker.marks, input, WRITES[func](input, *args, **kwargs))
    if layout is None:
        refuse(func, node, "of data whose examples are not known has no rule")
    seen = example_view(node, ExampleLayout(input.dim(), layout))
    tracker.marks.place(seen, layout)
    result = run(tracker, func, seen, *args, **kwargs)
    tracker.marks.mark(result, layout)
    return result


def _whole_of(node: Node) -> Tensor | None:
    """Return the tensor that a part shows by basic indexing, where the user's code has it."""
    if not isinstance(node, Derived) or node.function is not Tensor.__getitem__ or node.aliased:
        return None
    base = node.args[0]
    whole = base.shown() if isinstance(base, Derived) else None
    return whole if whole is not None and same_storage(node.value, base.value) else None


def _become_data(tracker: Context, func, target: Tensor, write: Write) -> Examples:
    """Have a derived tensor hold what each example sees of it; return where the examples lie."""
    node = first_node(target)
    layout = _layout_after(tracker.marks, target, write)
    if layout is None:
        refuse_change(func, node)
    become(func, target, lambda: example_view(node, ExampleLayout(target.dim(), layout)).clone())
    tracker.marks.place(target, layout)
    return layout


def become(func, target: Tensor, make: Callable[[], Tensor]) -> None:
    """Let a derived tensor be the data that ``make`` returns from now on, or refuse it."""
    node = first_node(target)
    # In a trace no tensor can take the place of another: the graph runs operation by operation.
    if not isinstance(node, Derived) or is_compiling() or not node.is_alone():
        refuse_change(func, node)
    data = make()
    if not same_storage(target, node.value):
        # Whatever else shows the memory of a constant goes on doing so.
        data.data = target.detach().copy_(data.detach())
    node.shown = lambda: None
    _swap(func, node, target, data)


def _swap(func, node: Node, target: Tensor, data: Tensor) -> None:
    """Let a tensor of the user's code be data from now on."""
    try:
        torch.utils.swap_tensors(target, data)
        if node.value.retains_grad:
            target.retain_grad()
    except RuntimeError as error:  # something else holds it, such as a view
        reason = "changes a tensor in place that others show, which has no rule"
        refuse(func, node, reason, "Write it out of place.", error)


def _layout_after(marks: Marks, target: Tensor, write: Write) -> Examples | None:
    """Return where examples lie in a tensor that holds nothing of any, once data are written."""
    values = marks.data_among(write.values) or marks.data_among([write.places])
    layouts = [marks.owned(item) for item in values]
    known = [each for each in layouts if isinstance(each, (Examples, Whole))]
    if not known or len(known) < len(values):
        return None
    layout = lies_after(marks, write, target, list(zip(values, known, strict=True))).layout
    if not isinstance(layout, Examples):
        return None
    return layout if ExampleLayout(target.dim(), layout).serves(target.shape) else None


IN_PLACE = variants("scatter_", "scatter_add_", "index_put_", "masked_scatter_")
RULES = dict.fromkeys(
    [*IN_PLACE, *variants("scatter", "scatter_add", "index_put", "masked_scatter")], write_into
)
