"""Data written into what was made of parameters, which holds the examples from then on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gradstats.capture._dispatch import refusal
from gradstats.capture._examples import Examples, Whole
from gradstats.capture._nodes import Derived, operands_of, same_storage
from gradstats.capture._tensors import first_node, node_of
from gradstats.capture._views import ExampleLayout, example_view
from gradstats.capture._writes import WRITES
from gradstats.capture.rules._common import run


def write_data(tracker, func, args: tuple[Any, ...], kwargs: dict[str, Any]):
    """Run an operation that changes a tracked tensor in place with data among its operands.

    The tensor becomes what each example sees of it, and is changed as any data are.
    """
    target = args[0]
    node = first_node(target)
    layout = _layout_after(tracker, func, args, kwargs)
    if layout is None or not isinstance(node, Derived) or not node.is_alone():
        reason = "changes a tensor in place that belongs to no example, which has no rule"
        raise refusal(func, node, reason, "Write it out of place.")
    seen = example_view(tracker, node, ExampleLayout(target.dim(), layout)).clone()
    tracker.place(seen, layout)
    if not same_storage(target, node.value):
        # Whatever else shows the memory of a constant goes on doing so.
        seen.data = target.detach().copy_(seen.detach())
    node.shown = lambda: None
    try:
        torch.utils.swap_tensors(target, seen)
    except RuntimeError as error:  # something else holds it, such as a view
        reason = "changes a tensor in place that others show, which has no rule"
        raise refusal(func, node, reason, "Write it out of place.") from error
    if any(node_of(item) is not None for item in operands_of(args, kwargs)):
        return run(tracker, func, *args, **kwargs)
    return func(*args, **kwargs)


def _layout_after(tracker, func, args, kwargs) -> Examples | None:
    """Return where examples lie in a tensor that holds nothing of any, once data are written."""
    target = args[0]
    write = WRITES[func](*args, **kwargs)
    owned = [
        (item, tracker.owned(item))
        for item in write.values
        if isinstance(item, Tensor) and node_of(item) is None and tracker.is_data(item)
    ]
    if not owned or any(not isinstance(layout, (Examples, Whole)) for _, layout in owned):
        return None
    for layout in tracker.candidates(target, owned[0][1]):
        line = ExampleLayout(target.dim(), layout)
        if line.serves(target.shape) and all(write.agrees(layout, *value) for value in owned):
            return layout
    return None
