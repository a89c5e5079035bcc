"""Where the examples lie in tensors that data are written into, or that are changed in place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradstats.capture.following._apart import weights_keep_apart
from gradstats.capture.following._candidates import candidates
from gradstats.capture.following._crossed import note_picked
from gradstats.capture.following._examples import MIXED, Examples, Mixed, Scores, Whole, same_layout
from gradstats.capture.following._filled import Filling, Piece
from gradstats.capture.following._following import follow_layout
from gradstats.capture.following._layout import FOLLOWED
from gradstats.capture.following._marks import Marks
from gradstats.capture.following._meetings import BROUGHT_BACK
from gradstats.capture.following._operands import sole_example
from gradstats.capture.following._writes import Write
from gradstats.capture.operations._call import Call
from gradstats.capture.operations._names import function_name
from gradstats.capture.operations._nested import tensors_in
from gradstats.capture.operations._operations import MOVES_IN_PLACE, OPAQUE
from gradstats.capture.parameters._tensors import node_of


class Change(NamedTuple):
    """A write into a tensor.

    Attributes:
        write: what was written, and where.
        target: the operand.
        before: whether it held data already.
        after: what holds the data now: the operand, or a copy of it.
    """

    write: Write
    target: Tensor
    before: bool
    after: Tensor

    @property
    def in_place(self) -> bool:
        """Whether the operand itself holds the data now."""
        return self.after is self.target


# Values that were written of which the examples are known, and where these lie.
Owned = list[tuple[Tensor, Examples | Whole]]


def follow_write(marks: Marks, change: Change) -> None:
    """Note where the examples lie in a tensor that data were written into."""
    write, target, before, after = change
    sums = write.keeps_sums and after.requires_grad and _stays_sum(marks, change)
    brings_back = before and _is_brought_back(marks, write, target)
    _place_written(marks, change)
    own = marks.owned(after)
    if isinstance(own, Scores):
        marks.place(after, replace(own, fixed=_are_fixed_after(write, own)))
    elif isinstance(own, Examples) and write.reads is not None and after.requires_grad:
        call = Call(*write.reads, {}, [], after)
        place = None if write.read is None else write.read(after, own)
        note_picked(marks, call, marks.data_among(tensors_in(call.args[1:])), own, place)
    if brings_back:
        marks.meetings.couple(after, BROUGHT_BACK)
    if sums and marks.is_marked(after) and not isinstance(marks.owned(after), Examples):
        marks.values.mark_sum(after)


def _are_fixed_after(write: Write, own: Scores) -> bool:
    """Whether scores between different examples are still fixed after a write.

    Args:
        write: the write.
        own: the layout of the scores before it.
    """
    if any(item.requires_grad for item in tensors_in(write.values)):
        return False
    if own.fixed or write.replaced is None:
        return own.fixed
    return weights_keep_apart(~write.replaced(), *own.sides)


def _stays_sum(marks: Marks, change: Change) -> bool:
    """Whether a tensor that sums were written into holds nothing else."""
    write, target, before, _ = change
    writes = int(change.in_place)
    blank = not before or marks.values.was_blank(target, writes)
    kept = blank or marks.values.is_sum(target, writes) or isinstance(marks.owned(target), Whole)
    given = [item for item in write.values if marks.is_trained(item)]
    return kept and all(map(marks.is_additive, given))


def _is_brought_back(marks: Marks, write: Write, target: Tensor) -> bool:
    """Whether what was computed over all examples is written to each of them."""
    if not isinstance(marks.owned(target), Examples) or marks.values.was_blank(target, writes=1):
        return False
    trained = [value for value in write.values if marks.is_trained(value)]
    return any(marks.owned(value) is MIXED for value in trained)


def _place_written(marks: Marks, change: Change) -> None:
    write, target, before, after = change
    values = _written_by(marks, change)
    if before and (one := sole_example(marks, [target, *values])):
        marks.place(after, one)
        return
    fresh = not before or _shows_unknown(marks, target)
    if not fresh and write.read is None and not any(map(marks.is_marked, (target, *values))):
        if all(value.shape == target.shape for value in values):
            return  # as every ``x += y`` and ``relu_``
    owned = _owned_of(marks, change, values)
    if owned is None:
        return
    known = marks.layout_of(target) if before else None
    lost = before and known is None and marks.is_marked(target)
    filling = _continued(marks, change, values, owned)
    if not owned or (lost and filling is None):
        _place_unowned(marks, change, owned, known, fresh)
        return
    found, ambiguous = _lies_now(marks, change, owned, known, lost)
    if found is None and filling is not None:
        found = filling.layout(target, marks.contract)
        for node in filling.meetings if found else ():
            marks.meetings.coupled.pop(node, None)
    if marks.packed and not known and not isinstance(found, Whole):
        found = _as_in_others(marks, change, found, owned)
    _place_after(marks, change, found)
    trained = any(value.requires_grad for value, _ in owned)
    if marks.packed and trained and found is None and not ambiguous:
        marks.meetings.note(after)
        if filling is not None:
            filling.meetings.append(after.grad_fn)
    if filling is not None:
        marks.values.note(after, filling=filling)
    if change.in_place and (found is None or fresh):
        _note_base(marks, target, found, first=fresh)


def _as_in_others(
    marks: Marks, change: Change, found: Examples | None, owned: Owned
) -> Examples | None:
    """Return where packed examples lie after a write, as in other tensors of as many rows.

    Rows that nothing was written to, as nodes that pooling left without neighbours, are then taken
    for those of the same examples. Note if they could be those of others.

    Args:
        marks, change: the write.
        found: where the examples lie as far as what was written says.
        owned: the values.
    """
    others = [*_fitting_others(marks, change, owned)]
    alike = all(same_layout(others[0], other) for other in others)
    if others and not (alike and same_layout(found, others[0])):
        marks.supposed = True
    return others[0] if others and alike else found


def _fitting_others(marks: Marks, change: Change, owned: Owned) -> Iterator[Examples]:
    """Yield where packed examples, not all, lie in other tensors of as many rows, if that fits."""
    write, target = change.write, change.target
    if marks.has_example_axis(target):
        return
    for axis, rows in enumerate(target.shape):
        for own in marks.known_of(rows):
            if all(write.agrees(target, own.along(axis), *value) for value in owned):
                yield own.along(axis)


def _written_by(marks: Marks, change: Change) -> list[Tensor]:
    """Return the data that say to which examples what is written belongs."""
    write, _, before, after = change
    given = write.values
    if write.index is not None and not (before or marks.is_distinct(after)):
        # Only the place where a number is put says whose it is; a mask by its rows.
        rows = write.index.dtype != torch.bool or isinstance(marks.owned(write.index), Examples)
        given = (write.index,) if rows else ()
    return marks.data_among(given) or marks.data_among([write.places])


def _owned_of(marks: Marks, change: Change, values: list[Tensor]) -> Owned | None:
    """Return those of several values of which the examples are known.

    None, and the result has no known examples either, where those of one were lost.
    """
    owned: Owned = []
    for value in values:
        layout = marks.owned(value)
        if isinstance(layout, Scores):
            marks.meetings.note(change.after)  # which count for other examples is not followed
            layout = None
        if isinstance(layout, (Examples, Whole)):
            owned.append((value, layout))
        elif marks.is_marked(value):
            _place_after(marks, change, layout)
            if change.in_place:
                _note_base(marks, change.target, None, first=False)
            return None
    return owned


def _place_unowned(
    marks: Marks, change: Change, owned: Owned, known: Examples | None, fresh: bool
) -> None:
    """Note where the examples lie where what was written does not say it.

    Args:
        change: the write.
        owned: the values, into a tensor whose examples were lost; or none.
        known: where the examples lay before.
        fresh: whether nothing was known of the tensor that the operand shows.
    """
    write, target, before, after = change
    if not before and not marks.is_distinct(after):
        marks.place(after, None)
    elif marks.is_marked(target):
        marks.place(after, known)
    if not change.in_place:
        return
    if owned:
        # Nothing is known of the view itself, but perhaps of the tensor that it shows.
        one = _one_of(owned) if write.read is None else None
        _note_base(marks, target, one, first=False)
    elif before and fresh and target.requires_grad:
        _note_base(marks, target, known, first=True)


def _lies_now(
    marks: Marks, change: Change, owned: Owned, known: Examples | None, lost: bool
) -> tuple[Examples | Whole | None, bool]:
    """Return where the examples lie after a write, as what was written says.

    Args:
        change: the write.
        owned: the values.
        known: where the examples lay before.
        lost: whether that had been lost.

    Returns:
        The layout, or None; and whether there are several, as ``agreed`` says.
    """
    write, target, before, _ = change
    layouts = [known] if known else []
    if not (known or lost) or marks.values.was_blank(target, writes=int(change.in_place)):
        layouts = [*layouts, *candidates(marks, target, owned[0][1])]
    found: Examples | Whole | None
    found, ambiguous = agreed(marks, write, target, layouts, owned, known)
    if found is None and not ambiguous:
        # A tensor that held nothing of any example may now belong to one example as a whole.
        empty = not known if write.read is None else not before
        found = _one_of(owned) if empty else None
    if found is None and known and not (target.requires_grad or marks.packed):
        # Inputs of different examples meet, as in CutMix: those written into decide.
        if all(write.mixes(target, known, *value) for value in owned):
            found = known
    return found, ambiguous


def agreed(
    marks: Marks,
    write: Write,
    target: Tensor,
    layouts: Iterable[Examples],
    owned: Owned,
    known: Examples | None = None,
) -> tuple[Examples | None, bool]:
    """Return the layout under which values are written to places of their own examples.

    Args:
        write, target: what was written, and into what.
        layouts: those that the target may have, the likeliest first.
        owned: the values, and where their examples lie.
        known: the layout that the target had before, which decides if it is among these.

    Returns:
        The layout, or None; and whether there are several, of packed examples: then places
        where nothing was written may be one example's or another's.
    """
    fitting = (
        layout for layout in layouts if all(write.agrees(target, layout, *value) for value in owned)
    )
    found = next(fitting, None)
    if not marks.packed or found is None or found is known:
        return found, False
    ambiguous = not all(same_layout(found, other) for other in fitting)
    return (None, True) if ambiguous else (found, False)


def _place_after(marks: Marks, change: Change, layout: Examples | Whole | Mixed | None) -> None:
    """Note where the examples lie after a write; None where that is not known."""
    if change.in_place:
        _note_moved(marks, change.target, change.before, layout)
    marks.place(change.after, layout)


def _note_moved(
    marks: Marks, target: Tensor, before: bool, layout: Examples | Whole | Mixed | None
) -> None:
    """Note that no other view of a tensor shows its examples, if a change in place moved them.

    Args:
        target: the tensor.
        before: whether it held data already.
        layout: where the examples lie now; None where that is not known.
    """
    if marks.batch_size == 1:
        return
    assumed = marks.owned(target) if before else marks.by_contract(target)
    if layout is None or assumed is None or not same_layout(layout, assumed):
        marks.note_rearranged(target)


def _continued(marks: Marks, change: Change, values: list[Tensor], owned: Owned) -> Filling | None:
    """Return all that was written into a tensor, if it was blank at first; None otherwise.

    Args:
        change: the last write.
        values: the data that were written.
        owned: those of them of which the examples are known.
    """
    write, target, before, _ = change
    if write.read is None or target._base is not None or not len(values) == len(owned) == 1:
        return None
    writes = int(change.in_place)
    blank = not before or marks.values.was_blank(target, writes)
    filling = Filling() if blank else marks.values.filling_of(target, writes)
    if filling is None:
        return None
    ((value, layout),) = owned
    filling = filling if change.in_place else filling.copy()
    filling.pieces.append(Piece(write.read, write.dims - value.dim(), layout))
    filling.size += value.numel()
    return filling


def _shows_unknown(marks: Marks, view: Tensor) -> bool:
    """Whether a tensor is a view of data of which nothing was noted and shape says nothing.

    Such data are inputs that have no example axis by contract.
    """
    base = view._base
    if base is None or node_of(base) is not None or not marks.is_data(base):
        return False
    return not marks.is_marked(base) and marks.layout_of(base) is None


def _note_base(marks: Marks, view: Tensor, owned: Examples | Whole | None, *, first: bool) -> None:
    """Note where the examples lie in the base of a view that was written into.

    Args:
        view: the view.
        owned: whose it is now.
        first: before the write, the base held nothing of any example, or nothing known.
    """
    base = view._base
    if base is None or node_of(base) is not None:
        return
    known: Iterable[Examples] = ()
    if owned is not None and base.is_contiguous():
        own = None if first else marks.layout_of(base)
        known = candidates(marks, base, owned) if first else [own] if own else ()
    found: Examples | Whole | None = None
    found = next((own for own in known if _lies(view, owned, base, own)), None)
    if found is None and isinstance(owned, Whole) and (first or marks.owned(base) == owned):
        found = owned  # such as a batch of one example
    marks.place(base, found)


def follow_change(marks: Marks, call: Call) -> None:
    """Note where the examples lie in a tensor that an operation changed in place.

    Args:
        call: the operation, in the form that returns a new tensor; its result is the operand
            that was changed.
    """
    func, target = call.func, call.result
    if func is Tensor.as_strided:
        # Where its elements were in memory does not show any more.
        marks.place(target, None, function_name(func))
        return
    if not target.requires_grad:
        return
    if func in FOLLOWED or type(func) in OPAQUE:
        follow_layout(marks, call)
    else:
        name = None if func is None else function_name(func)
        _note_moved(marks, target, True, None)
        marks.place(target, None, name)
    _note_base(marks, target, None, first=False)


def follow_move(marks: Marks, func, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Note where the examples lie in a tensor whose axes were moved in place."""
    tensor, move = args[0], MOVES_IN_PLACE.get(func)
    if move is None or move is Tensor.squeeze:  # how many axes there were is not known any more
        plain = not marks.is_marked(tensor) and marks.is_distinct(tensor)
        sizes = list(tensor.shape)
        own = marks.contract.along(sizes.index(marks.contract.rows)) if plain else None
        marks.place(tensor, own)
        return
    back = Tensor.squeeze if move is Tensor.unsqueeze else move
    before = back(tensor, *args[1:], **kwargs)
    if marks.is_marked(tensor):
        marks.place(before, marks.owned(tensor))
    follow_layout(marks, Call(move, (before, *args[1:]), kwargs, [before], tensor))


def _one_of(owned: Owned) -> Whole | None:
    """Return the one example to which several values belong as a whole; None if there is none."""
    first = owned[0][1]
    return first if isinstance(first, Whole) and all(own == first for _, own in owned) else None


def _lies(view: Tensor, owned: Examples | Whole | None, base: Tensor, layout: Examples) -> bool:
    """Whether a view holds the examples that the layout of its contiguous base gives it."""
    if not isinstance(owned, (Examples, Whole)):
        return False
    offset = view.storage_offset() - base.storage_offset()
    seen = layout.of_elements(base).contiguous().as_strided(view.shape, view.stride(), offset)
    expected = owned.example if isinstance(owned, Whole) else owned.of_elements(view)
    return bool((seen == expected).all())
