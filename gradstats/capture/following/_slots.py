"""Rows along two axes, as in the slots of experts, or filled up, told by numbers.

Experts of a fixed capacity take their rows from a tensor (experts, slots, width), into which the
rows of all examples were written. The examples lie along no axis, but that of each element is
known (see ``Values``): ``NOBODY`` where nothing was written. Constant rows that are joined to rows
of examples, or pad them, are nobody's too.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from gradstats._compiler import is_compiling
from gradstats.capture.following._examples import Examples, Whole, axes_of, spread
from gradstats.capture.following._marks import Marks
from gradstats.capture.following._numbered import NOBODY, numbers_before, numbers_of
from gradstats.capture.following._reductions import (
    ATTENTION,
    OF_TWO,
    OVER_AXES,
    QUANTILES,
    runs_over,
)
from gradstats.capture.following._reindexed import (
    PICKS,
    first_behind,
    owner_in_reshaped,
    owner_of_picked,
)
from gradstats.capture.operations._call import Call
from gradstats.capture.operations._operations import BROADCASTS, JOINS, MOVES, PADS, RESHAPES
from gradstats.capture.operations._rowwise import POINTWISE

# Operations that only move or pick elements of their first operand.
REARRANGES = MOVES | RESHAPES | PICKS.keys()

# Operations whose results have an element for each of their operands', broadcast.
ELEMENT_BY_ELEMENT = (POINTWISE | BROADCASTS) - {torch.broadcast_tensors}

# Operations over axes whose results may have more axes than their first operand.
OF_SEVERAL = QUANTILES.union(OF_TWO, [ATTENTION])


def placed(marks: Marks, result: Tensor, owner: Tensor | None) -> Examples | Whole | None:
    """Note the example of each element of a result, and return where the examples lie.

    Columns that were sorted, or rows along two axes, may later be moved back to one axis.
    """
    if owner is None:
        return None
    marks.values.note(result, owner=owner)
    whole = not bool((owner == NOBODY).any())
    found = spread(owner, marks.batch_size) if whole else None
    marks.values.slots |= found is None
    return found


def supposed(marks: Marks, item: Tensor, owner: Tensor) -> Examples | Whole | None:
    """Return where the examples lie in a tensor; None if they lie along no axis.

    Rows that are nobody's are supposed to belong to the example whose place they are in, or else to
    a neighbour's. If another example's loss reads them, the two are found to meet.

    Args:
        item: the tensor.
        owner: the example of each of its elements, 1 standing for whole axes.
    """
    if not owner.numel():
        return None
    # Prefer an axis of which each row is one example's, or nobody's, as a whole.
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
    """Return the example of each row, also of those that are nobody's."""
    written = own != NOBODY
    places = torch.arange(len(own), device=own.device)
    before = places.where(written, int(written.int().argmax())).cummax(0).values
    filled = own[before].clamp(min=0)
    # Beside rows of a single example, the others are its too, unless all packed rows are here.
    if not axes_of(filled) and not (marks.packed and len(own) == marks.contract.rows):
        return filled
    for each in (marks.contract, Examples(marks.batch_size, 0)):
        count, rest = divmod(len(own), each.rows)
        likely = each.owner(own.device).int().repeat_interleave(count)
        if not rest and torch.equal(own, likely.where(written, own)):
            return likely  # such as if an example has no rows, or a row no neighbours
    return filled


def settled(marks: Marks, item: Tensor) -> Examples | Whole | None:
    """Return where the examples lie in a tensor of which the example of each element is noted.

    If they lie along an axis, that is noted on the tensor.
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
    return None if owner is None or marks.owned(item) is not None else owner


def follow_slots(marks: Marks, call: Call) -> Examples | Whole | None:
    """Return where the examples lie in a result, told by the example of each operand's elements.

    The example of each of its own elements is noted, even if they lie along no axis.
    """
    func, _, _, data, result = call
    if marks.batch_size == 1 or is_compiling() or marks.values.owner_of(result) is not None:
        return None
    rearranges, joins = _rearranges(call), func in JOINS
    told = data[:1] if rearranges else [item for item in data if joins or item.requires_grad]
    alone = rearranges or joins or func in PADS
    if not alone and all(marks.values.owner_of(item) is None for item in told):
        return None
    known = [_numbers_of(marks, item) for item in told]
    numbers = [each for each in known if each is not None]
    if not numbers or len(numbers) < len(known):
        return None
    return placed(marks, result, _owner_after(marks, call, told, numbers))


def _owner_after(
    marks: Marks, call: Call, told: list[Tensor], numbers: list[Tensor]
) -> Tensor | None:
    """Return the example of each element of a result, or None; note if those of several meet.

    Args:
        call: the operation.
        told, numbers: the operands that tell it, and the examples of their elements.
    """
    func, args, result = call.func, call.args, call.result
    if _rearranges(call):
        return _rearranged(call, told[0], numbers[0])
    if func in JOINS:
        owner = _joined(call, dict(zip(map(id, told), numbers, strict=True)))
        along_several = len(axes_of(owner)) > 1
        if along_several and not (marks.values.slots or bool((owner == NOBODY).any())):
            # They may all come from parameters, whose gradients belong to whoever reads them.
            return None
        return owner
    if func in PADS:
        return _padded(call, numbers[0])
    if func in ELEMENT_BY_ELEMENT:
        # Other results have an axis more or less, such as complex numbers seen as real ones.
        if result.shape != torch.broadcast_shapes(*(item.shape for item in told)):
            return None
        combined = _combined(numbers)
        if combined is None:
            marks.meetings.note(result)
        return combined
    if func in OVER_AXES and func not in OF_SEVERAL and [*map(id, told)] == [id(args[0])]:
        reduced, meets = _over_axes(call, numbers[0])
        if meets and result.dim():
            marks.meetings.note(result)
        return reduced
    return None


def _rearranges(call: Call) -> bool:
    """Whether an operation only moves or picks elements of its first operand, which is data."""
    first = call.data[0]
    return call.func in REARRANGES and first is call.args[0] and first.dim() > 0


def _numbers_of(marks: Marks, item: Tensor) -> Tensor | None:
    """Return the example of each element of an operand, 1 standing for whole axes."""
    # A layout also tells whose rows are that nothing was written to.
    owned = marks.owned(item)
    if isinstance(owned, Whole) or type(owned) is Examples:
        return numbers_of(item, owned, item.dim())
    return numbers_before(marks, item)


def _rearranged(call: Call, source: Tensor, numbers: Tensor) -> Tensor | None:
    """Return the example of each element that was moved or picked, given those of the operand."""
    owner = numbers.expand(source.shape)
    last = max((axis for axis, size in enumerate(numbers.shape) if size > 1), default=0)
    if call.func in RESHAPES:
        return owner_in_reshaped(source, owner, last, call.result)
    return owner_of_picked(call, source, owner, last)


def _joined(call: Call, numbers: dict[int, Tensor]) -> Tensor:
    """Return the example of each element of joined tensors, given that of data's, by their ids."""
    nobodys = torch.full((), NOBODY, dtype=torch.int32, device=call.result.device)
    tensors = call.argument(0, "tensors")
    parts = [numbers.get(id(tensor), nobodys).expand(tensor.shape) for tensor in tensors]
    owner = call.func(parts, *call.args[1:], **call.kwargs)
    axes = axes_of(owner)
    return first_behind(owner, owner.dim() - axes[-1] - 1).clone() if axes else owner


def _padded(call: Call, numbers: Tensor) -> Tensor | None:
    """Return the example of each element after padding with a constant."""
    if call.argument(2, "mode", "constant") in ("reflect", "replicate", "circular"):
        return None
    widths = list(call.argument(1, "pad"))
    for place, axis in zip(range(0, len(widths), 2), reversed(range(numbers.dim())), strict=False):
        if numbers.shape[axis] == 1:
            widths[place : place + 2] = 0, 0  # it stands for the whole axis
    return functional.pad(numbers, widths, value=NOBODY)


def _combined(numbers: list[Tensor]) -> Tensor | None:
    """Return the example of each element of a result; None where those of several meet."""
    every = torch.broadcast_tensors(*numbers)
    owner = torch.stack(every).amax(0)
    meet = any(bool(((each != owner) & (each != NOBODY)).any()) for each in every)
    return None if meet else owner


def _over_axes(call: Call, numbers: Tensor) -> tuple[Tensor | None, bool]:
    """Return the example of each element after an operation over axes, and whether several meet."""
    func, args, kwargs, _, result = call
    dims = args[0].dim()
    over = [axis for axis in range(dims) if runs_over(func, args, kwargs, axis)]
    owner = numbers.amax(over, keepdim=True) if over else numbers
    if bool(((numbers != owner) & (numbers != NOBODY)).any()):
        return None, True
    if result.dim() < dims:
        owner = owner.squeeze(over)
    owner = owner.view([*owner.shape, *[1] * (result.dim() - owner.dim())])
    fits = owner.dim() == result.dim() and all(
        count in (1, size) for count, size in zip(owner.shape, result.shape, strict=True)
    )
    return owner if fits else None, False
