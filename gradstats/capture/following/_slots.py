"""Rows along two axes, as the slots of experts have them, or filled up, told by numbers.

Experts of a fixed capacity take their rows from a tensor (experts, slots, width), into which the
rows of all examples were written. Their examples lie along no axis, but it is known whose each
element is, ``NOBODY``'s where nothing was written: see ``Values``. So are constant rows nobody's
that are joined to rows of examples, or with which these are padded.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from gradstats._compiler import is_compiling
from gradstats.capture.following._examples import Examples, Whole, axes_of, spread
from gradstats.capture.following._marks import Marks
from gradstats.capture.following._numbered import NOBODY, numbers_of
from gradstats.capture.following._reductions import ATTENTION, OF_TWO, OVER_AXES, runs_over
from gradstats.capture.following._reindexed import PICKS, first_behind, owner_of_picked
from gradstats.capture.operations._call import Call
from gradstats.capture.operations._operations import BROADCASTS, JOINS, PADS
from gradstats.capture.operations._rowwise import POINTWISE

# Operations whose results have an element for each of their operands', broadcast.
ELEMENT_BY_ELEMENT = (POINTWISE | BROADCASTS) - {torch.broadcast_tensors}

# Operations over axes whose results may have more axes than their first operand.
OF_SEVERAL = frozenset(OF_TWO) | {ATTENTION}


def placed(marks: Marks, result: Tensor, owner: Tensor | None) -> Examples | Whole | None:
    """Return where the examples lie, given that of each element, which is noted if along no axis.

    Columns that were sorted, or rows in two axes, may yet be moved back to one.
    """
    if owner is None:
        return None
    whole = not bool((owner == NOBODY).any())
    found = spread(owner, marks.batch_size) if whole else None
    if found is None:
        marks.values.note(result, owner=owner.expand(result.shape))
    return found


def picked_from(marks: Marks, result: Tensor, owner: Tensor | None) -> Examples | Whole | None:
    """Return the same of what was picked from such a tensor, and may be filled up from it.

    Where rows of each example stand side by side, with rows that are nobody's among them, as in
    padded sequences and lists of neighbours, these are supposed to be that example's.
    """
    if owner is not None and len(axes_of(owner)) > 1 and bool((owner == NOBODY).any()):
        found = supposed(marks, result, owner)
        if found is not None:
            return found
    return placed(marks, result, owner)


def supposed(marks: Marks, item: Tensor, owner: Tensor) -> Examples | Whole | None:
    """Return where the examples lie in a tensor with rows along one axis; None if along no axis.

    Rows that are nobody's are supposed to belong to the example whose place it is, or else to a
    neighbour's. Where another example's loss reads them, the two are found to meet.

    Args:
        item: the tensor.
        owner: the example of each of its elements, 1 standing for whole axes.
    """
    if not owner.numel():
        return None
    # First an axis whose rows are each one example's or nobody's as a whole.
    for whole in (True, False):
        for axis, size in enumerate(owner.shape):
            rows = owner.movedim(axis, 0).reshape(size, -1)
            own = rows.amax(1)
            fits = (rows == own[:, None]) | ((rows == NOBODY) & (not whole))
            if not bool(fits.all()):
                continue
            filled = _filled(marks, own).view(-1, *[1] * (owner.dim() - axis - 1))
            if bool((rows == NOBODY).any()):
                marks.meetings.suppose(item)
            return spread(filled.expand(item.shape), marks.batch_size)
    return None


def _filled(marks: Marks, own: Tensor) -> Tensor:
    """Return the example of each row, nobody's among them, given those of the others."""
    written = own != NOBODY
    places = torch.arange(len(own), device=own.device)
    before = places.where(written, int(written.int().argmax())).cummax(0).values
    filled = own[before].clamp(min=0)
    if not axes_of(filled):
        return filled  # all are one example's
    for each in (Examples(marks.batch_size, 0), marks.contract):
        count, rest = divmod(len(own), each.rows)
        likely = each.owner(own.device).int().repeat_interleave(count)
        if not rest and torch.equal(own, likely.where(written, own)):
            return likely  # as where an example has no rows, or a row no neighbours
    return filled


def settled(marks: Marks, item: Tensor) -> Examples | Whole | None:
    """Return where the examples lie in a tensor whose elements alone are known to be theirs.

    It is noted on the tensor, if they lie along an axis.
    """
    owner = slots_of(marks, item)
    layout = None if owner is None else supposed(marks, item, owner)
    if layout is not None:
        marks.place(item, layout)
    return layout


def slots_of(marks: Marks, item: Tensor) -> Tensor | None:
    """Return the example of each element of a trained tensor, if they lie along no axis."""
    if not (marks.values.slots and item.requires_grad):
        return None
    owner = marks.values.owner_of(item)
    return None if owner is None or marks.layout_of(item) is not None else owner


def follow_slots(marks: Marks, call: Call) -> None:
    """Note the example of each element of a result, where its operands' are known."""
    func, result = call.func, call.result
    trained = [item for item in call.data if item.requires_grad]
    if not trained or marks.batch_size == 1 or is_compiling():
        return
    if marks.values.owner_of(result) is not None:
        return
    joins, pads = func in JOINS, func in PADS
    if (joins and _adds_nobodys(marks, call)) or pads:
        marks.values.slots = True
    picks = func in PICKS and trained[0] is call.args[0] and trained[0].dim() > 0
    if joins and not marks.values.slots:
        return
    if not (joins or picks or pads) and all(slots_of(marks, item) is None for item in trained):
        return
    known = [_numbers_of(marks, item) for item in trained]
    numbers = [each for each in known if each is not None]
    owner: Tensor | None = None
    if len(numbers) < len(known):
        return
    if joins:
        own = dict(zip(map(id, trained), numbers, strict=True))
        tensors = call.argument(0, "tensors")
        if not any(id(tensor) not in own and marks.is_of_data(tensor) for tensor in tensors):
            nobodys = torch.full((), NOBODY, dtype=torch.int32, device=result.device)
            parts = [own.get(id(tensor), nobodys).expand(tensor.shape) for tensor in tensors]
            owner = func(parts, *call.args[1:], **call.kwargs)
            axes = axes_of(owner)
            owner = first_behind(owner, owner.dim() - axes[-1] - 1).clone() if axes else owner
    elif pads:
        owner = _padded(call, numbers[0])
    elif picks:
        source = trained[0]
        owner = owner_of_picked(call, source, numbers[0].expand(source.shape), source.dim() - 1)
    elif func in ELEMENT_BY_ELEMENT:
        # Other results have an axis more or less, as complex numbers seen as real ones.
        if result.shape == torch.broadcast_shapes(*(item.shape for item in trained)):
            owner = _combined(numbers)
            if owner is None:
                marks.meetings.note(result)
    elif func in OVER_AXES and func not in OF_SEVERAL and [*map(id, trained)] == [id(call.args[0])]:
        axes = axes_of(numbers[0])
        lead = axes[-1] + 1 if axes else 0
        over = [axis for axis in range(lead) if runs_over(func, call.args, call.kwargs, axis)]
        if result.dim() and not {*axes}.isdisjoint(over):
            marks.meetings.note(result)
        elif not over and result.shape[:lead] == trained[0].shape[:lead]:
            owner = _leading(numbers[0], lead, result.dim())
    if owner is not None:
        marks.values.note(result, owner=owner)


def _adds_nobodys(marks: Marks, call: Call) -> bool:
    """Whether constants are joined to rows of examples: their rows are nobody's."""
    return not all(marks.is_of_data(tensor) for tensor in call.argument(0, "tensors"))


def _padded(call: Call, numbers: Tensor) -> Tensor | None:
    """Return the example of each element after padding with a constant."""
    if call.argument(2, "mode", "constant") in ("reflect", "replicate", "circular"):
        return None
    widths = list(call.argument(1, "pad"))
    for place, axis in zip(range(0, len(widths), 2), reversed(range(numbers.dim())), strict=False):
        if numbers.shape[axis] == 1:
            widths[place : place + 2] = 0, 0  # it stands for the whole axis
    return functional.pad(numbers, widths, value=NOBODY)


def _numbers_of(marks: Marks, item: Tensor) -> Tensor | None:
    """Return the example of each element of a tensor, 1 standing for whole axes."""
    owned = marks.owned(item)
    if isinstance(owned, Whole) or type(owned) is Examples:
        return numbers_of(item, owned, item.dim())
    return marks.values.owner_of(item) if owned is None else None


def _combined(numbers: list[Tensor]) -> Tensor | None:
    """Return the example of each element of a result; None where those of several meet."""
    every = torch.broadcast_tensors(*numbers)
    owner = torch.stack(every).amax(0)
    meet = any(bool(((each != owner) & (each != NOBODY)).any()) for each in every)
    return None if meet else owner


def _leading(numbers: Tensor, lead: int, dims: int) -> Tensor:
    """Return the numbers of the first axes, for a tensor of so many."""
    return first_behind(numbers, numbers.dim() - lead).reshape(
        [*numbers.shape[:lead], *[1] * (dims - lead)]
    )
