"""Whether packed examples are kept apart by attention with sinks: further columns beside scores.

The scores of a row, and a learned number or several, share one softmax: torch.cat([scores, sinks],
-1).softmax(-1)[..., :-1]. What stands in a further column belongs to the example of its row.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from gradstats.capture.following._apart import along, are_fixed
from gradstats.capture.following._examples import Examples, Layout, Scores, Widened, same_rows
from gradstats.capture.following._marks import Marks
from gradstats.capture.operations._call import Call
from gradstats.capture.operations._operations import BROADCASTS
from gradstats.capture.operations._rowwise import POINTWISE

CONCATENATES = frozenset({torch.cat, torch.concat, torch.concatenate})


def meets_sinks(marks: Marks, call: Call) -> bool:
    """Whether an operation joins further columns to scores, or an operand has such columns."""
    if not (marks.packed and call.result.requires_grad):
        return False
    trained = [item for item in call.data if item.requires_grad]
    if any(isinstance(marks.placed(item), Widened) for item in trained):
        return True
    if call.func not in CONCATENATES:
        return False
    owned = [own for own in map(marks.owned, trained) if isinstance(own, Scores)]
    dim = call.argument(1, "dim", 0) % call.result.dim()
    return len(owned) == 1 and owned[0].columns.axis == dim


def after_sinks(marks: Marks, call: Call) -> Examples | Widened | None:
    """Return the layout of the result of an operation of which ``meets_sinks`` holds."""
    func = call.func
    if func in CONCATENATES:
        return _widened(marks, call)
    if func in POINTWISE or func in BROADCASTS:
        return _element_by_element(marks, call)
    item = call.argument(0, "input")
    own = marks.placed(item) if isinstance(item, Tensor) else None
    trained = [each for each in call.data if each.requires_grad]
    over = call.argument(1, "dim")
    if not isinstance(own, Widened) or len(trained) > 1 or not isinstance(over, int):
        return None
    if over % item.dim() != own.sides[1].axis:
        return None
    return along(call, item, own, over % item.dim())


def _widened(marks: Marks, call: Call) -> Widened | None:
    """Return the layout of scores to which columns are joined; None if these are of others."""
    tensors = call.argument(0, "tensors")
    placed = [marks.placed(item) if marks.is_of_data(item) else None for item in tensors]
    pairs = list(zip(tensors, placed, strict=True))
    wide = [
        (place, own)
        for place, (item, own) in enumerate(pairs)
        if isinstance(own, (Scores, Widened)) and item.requires_grad
    ]
    if len(wide) != 1:
        return None
    ((at, scores),) = wide
    rows, columns = scores.sides
    if call.argument(1, "dim", 0) % call.result.dim() != columns.axis:
        return None
    for item, own in pairs[:at] + pairs[at + 1 :]:
        # A constant, or what a parameter's rule has put beside the rows, has none.
        known = own is None and not marks.is_trained(item)
        if not (known or _are(own, rows)):
            return None
    # A tensor of shape (0,) joins any others.
    front = sum(item.shape[columns.axis] for item in tensors[:at] if item.numel())
    if isinstance(scores, Widened):
        return replace(scores, start=scores.start + front)
    return Widened(scores, front)


def _element_by_element(marks: Marks, call: Call) -> Widened | None:
    """Return the layout of a result whose elements come from the same places of the operands."""
    result = call.result
    trained = [item for item in call.data if item.requires_grad]
    placed = [(item, marks.placed(item)) for item in trained]
    item, wide = next((item, own) for item, own in placed if isinstance(own, Widened))
    if result.shape != item.shape:
        return None
    for item, own in placed:
        if isinstance(own, Examples):
            own = own.behind(result.dim() - item.dim())
        if own != wide and not _are(own, wide.sides[0]):
            return None
    return replace(wide, scores=replace(wide.scores, fixed=are_fixed(marks, call, wide)))


def _are(own: Layout, rows: Examples) -> bool:
    """Whether values belong, row by row, to the examples of the rows."""
    return type(own) is Examples and own.axis == rows.axis and same_rows(own, rows)
