"""Data written into tensors derived from parameters, which are data from then on."""

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
    """Run an operation that changes a tracked tensor in place and has data among its operands.

    The tensor first becomes data: what each example sees of it. Then it is changed as data are.
    """
    target = args[0]
    node = first_node(target)
    values = [*args[1:], *kwargs.values()]
    whole = _whole_of(node) if func is not Tensor.__setitem__ and len(values) == 1 else None
    if whole is None:
        _become_data(tracker, func, target, WRITES[func](*args, **kwargs))
    else:
        # x[i] += data: both the whole tensor and the part become data.
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
    """Data written into a tracked tensor or a copy of it, as by ``scatter``.

    A masked autoencoder does this: it writes tokens among copies of a mask token.
    """
    if node_of(input) is None or tracker.marks.packed:
        refuse(func, first_node(input, *args, *kwargs.values()))
    if func in IN_PLACE:
        return write_data(tracker, func, (input, *args), kwargs)
    node = first_node(input)
    layout = _layout_after(tracker.marks, input, WRITES[func](input, *args, **kwargs))
    if layout is None:
        refuse(func, node, "of data whose examples are not known has no rule")
    data = example_view(node, ExampleLayout(input.dim(), layout))
    tracker.marks.place(data, layout)
    result = run(tracker, func, data, *args, **kwargs)
    tracker.marks.mark(result, layout)
    return result


def _whole_of(node: Node) -> Tensor | None:
    """Return the tensor that a part is a view of by basic indexing, if user code still holds it."""
    if not isinstance(node, Derived) or node.function is not Tensor.__getitem__ or node.aliased:
        return None
    base = node.args[0]
    whole = base.shown() if isinstance(base, Derived) else None
    return whole if whole is not None and same_storage(node.value, base.value) else None


def _become_data(tracker: Context, func, target: Tensor, write: Write) -> Examples:
    """Turn a derived tensor into what each example sees of it; return where the examples lie."""
    node = first_node(target)
    layout = _layout_after(tracker.marks, target, write)
    if layout is None:
        refuse_change(func, node)
    become(func, target, lambda: example_view(node, ExampleLayout(target.dim(), layout)).clone())
    tracker.marks.place(target, layout)
    return layout


def become(func, target: Tensor, make: Callable[[], Tensor]) -> None:
    """Turn a derived tensor into the data that ``make`` returns, or refuse."""
    node = first_node(target)
    # A trace records operations; that one tensor takes the place of another is none.
    if not isinstance(node, Derived) or is_compiling() or not node.is_alone():
        refuse_change(func, node)
    data = make()
    if not same_storage(target, node.value):
        # The target shows the memory of a constant: other views of it must go on seeing the writes.
        data.data = target.detach().copy_(data.detach())
    node.shown = lambda: None
    _swap(func, node, target, data)


def _swap(func, node: Node, target: Tensor, data: Tensor) -> None:
    """Put data in the place of a tensor that user code holds."""
    try:
        torch.utils.swap_tensors(target, data)
        if node.value.retains_grad:
            target.retain_grad()
    except RuntimeError as error:  # something else, such as a view, holds the tensor
        reason = "changes a tensor in place that others show, which has no rule"
        refuse(func, node, reason, "Write it out of place.", error)


def _layout_after(marks: Marks, target: Tensor, write: Write) -> Examples | None:
    """Return where the examples will lie in a tensor of no example once data are written to it."""
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
