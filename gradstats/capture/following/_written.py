"""Where the examples lie in tensors that data are written into, or that are changed in place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradstats.capture.following._apart import weights_keep_apart
from gradstats.capture.following._crossed import note_picked
from gradstats.capture.following._examples import (
    APART,
    MIXED,
    Examples,
    Layout,
    Scores,
    Whole,
    same_layout,
    sole_of,
)
from gradstats.capture.following._following import follow_layout
from gradstats.capture.following._layout import FOLLOWED
from gradstats.capture.following._marks import Marks
from gradstats.capture.following._meetings import BROUGHT_BACK
from gradstats.capture.following._numbered import Found, Owned, lies_after, lies_behind
from gradstats.capture.following._operands import holds_one_alone, sole_example
from gradstats.capture.following._reductions import OVER_AXES
from gradstats.capture.following._slots import settled
from gradstats.capture.following._writes import CHANGES, REPLACES, Write
from gradstats.capture.operations._call import Call
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


def follow_write(marks: Marks, change: Change) -> None:
    """Note where the examples lie in a tensor that data were written into."""
    write, target, before, after = change
    sums = write.how != CHANGES and after.requires_grad and _stays_sum(marks, change)
    brings_back = before and _is_brought_back(marks, write, target)
    _place_written(marks, change)
    own = marks.owned(after)
    if isinstance(own, Scores):
        marks.place(after, replace(own, fixed=_are_fixed_after(write, after, own)))
    elif isinstance(own, Examples) and write.reads is not None and after.requires_grad:
        call = Call(*write.reads, {}, [], after)
        place = None if write.read is None else write.read(own)
        note_picked(marks, call, marks.data_among(tensors_in(call.args[1:])), own, place)
    if brings_back:
        marks.meetings.couple(after, BROUGHT_BACK)
    if sums and marks.is_marked(after) and not isinstance(marks.owned(after), Examples):
        marks.values.note(after, sum=True)


def _are_fixed_after(write: Write, after: Tensor, own: Scores) -> bool:
    """Whether scores between different examples are still fixed after a write.

    Args:
        write, after: the write, and the scores after it.
        own: the layout of the scores before it.
    """
    if any(item.requires_grad for item in tensors_in(write.values)):
        return False
    if own.fixed or write.how != REPLACES or write.reads is None:
        return own.fixed
    func, (_, *index) = write.reads
    if func is not Tensor.__getitem__:
        return False
    kept = torch.ones(after.shape, dtype=torch.bool, device=after.device)
    kept[index[0]] = False
    return weights_keep_apart(kept, *own.sides)


def note_sums(marks: Marks, base: Tensor, total: bool) -> None:
    """Note that a tensor holds sums after a sum was written into a view of it.

    Args:
        base: the tensor, such as ``losses`` in ``losses[0] *= gain``.
        total: whether it held no data before.
    """
    held = marks.values.held_by(base, writes=1)
    kept = total or "sum" in held or "blank" in held
    if kept and marks.is_marked(base) and not isinstance(marks.owned(base), APART):
        marks.mark(base, MIXED)
        marks.values.note(base, sum=True)


def _stays_sum(marks: Marks, change: Change) -> bool:
    """Whether a tensor that sums were written into holds nothing but sums."""
    write, target, before, _ = change
    writes = int(change.in_place)
    blank = not before or marks.values.was_blank(target, writes)
    kept = blank or marks.values.is_sum(target, writes) or isinstance(marks.owned(target), Whole)
    kept = kept or not _had_gradient(change, target)
    given = [item for item in write.values if marks.is_trained(item)]
    # A view that is written into its base, as by ``losses[0] *= gain``, counts as it was before.
    return kept and all(
        marks.is_additive(item, writes=writes if item._base is target else 0) for item in given
    )


def _had_gradient(change: Change, tensor: Tensor) -> bool:
    """Whether the operand, or what it is a view of, passed on a gradient before a write.

    A total that starts as a number did not.
    """
    if not change.in_place:
        return tensor.requires_grad
    node = tensor.grad_fn
    # The first edge of an operation in place leads to the tensor as it was before.
    return node is not None and node.next_functions[0][0] is not None


def _is_brought_back(marks: Marks, write: Write, target: Tensor) -> bool:
    """Whether what was computed over all examples is written to each of them."""
    if not isinstance(marks.owned(target), Examples) or marks.values.was_blank(target, writes=1):
        return False
    trained = [value for value in write.values if marks.is_trained(value)]
    return any(marks.owned(value) is MIXED for value in trained)


def _place_written(marks: Marks, change: Change) -> None:
    write, target, before, after = change
    values = _written_by(marks, change)
    numbers = marks.values.owner_of(target, int(change.in_place))
    if before and numbers is None and (one := sole_example(marks, [target, *values])):
        marks.place(after, one)
        return
    fresh = not before or _shows_unknown(marks, change)
    if not fresh and write.read is None and not any(map(marks.is_marked, (target, *values))):
        if all(value.shape == target.shape for value in values):
            return  # like every ``x += y`` and ``relu_``
    owned = _owned_of(marks, change, values)
    if owned is None:
        return
    if not owned:
        _place_unowned(marks, change, fresh)
        return
    known = marks.layout_of(target) if before else None
    found = lies_after(marks, write, target, owned, known, int(change.in_place), blank=fresh)
    if _goes_into_row(marks, change, found.layout):
        return
    alone = found.layout is None and before and holds_one_alone(marks, [target, *values])
    _place_after(marks, change, found.layout, fresh=fresh)
    if alone:
        marks.values.note(after, of_one=True)
    if marks.packed and found.meets and any(value.requires_grad for value, _ in owned):
        marks.meetings.note(after)
    _note_found(marks, after, found)


def _written_by(marks: Marks, change: Change) -> list[Tensor]:
    """Return the data that say to which examples what is written belongs."""
    write, _, before, after = change
    written = marks.data_among(write.values)
    if written or before or (marks.is_distinct(after) and marks.has_example_axis(after)):
        return written
    return marks.data_among([write.places])


def _owned_of(marks: Marks, change: Change, values: list[Tensor]) -> Owned | None:
    """Return the values of which the examples are known, with their layouts.

    If those of any value were lost, those of the result are too, and None is returned.
    """
    owned: list[tuple[Tensor, Examples | Whole]] = []
    for value in values:
        layout = marks.owned(value) or settled(marks, value)
        if isinstance(layout, Scores):
            layout = None  # which of them count for other examples is not followed
        if isinstance(layout, (Examples, Whole)):
            owned.append((value, layout))
        elif marks.is_marked(value):
            if not _goes_into_row(marks, change, None):
                _place_after(marks, change, layout)
            return None
    return owned


def _goes_into_row(marks: Marks, change: Change, found: Layout) -> bool:
    """Whether inputs are written into a row of one example, or a part of it: then the row decides.

    Not if the operand, of which ``found`` is the layout now, is a whole row moved from elsewhere.
    """
    write, target, before, after = change
    base = target if target._base is None else target._base
    rows, own = marks.layout_of(base), sole_of(marks.owned(target))
    held = [*marks.values.held_by(target, writes=1), *marks.values.held_by(base, writes=1)]
    inputs = before and change.in_place and not (after.requires_grad or marks.packed)
    if rows is None or not inputs or "blank" in held or "owner" in held:
        return False  # not an input, or some rows may be nobody's
    if isinstance(own, Whole):
        moved = isinstance(sole_of(found), Whole) and target.numel() * rows.rows == base.numel()
        return base is not target and not moved
    place = write.read(own) if isinstance(own, Examples) and write.read else None
    return isinstance(sole_of(place), Whole) and found is None


def _place_unowned(marks: Marks, change: Change, fresh: bool) -> None:
    """Note where the examples lie if what was written does not tell.

    Args:
        change: the write.
        fresh: whether nothing was known of the tensor that the operand shows.
    """
    write, target, before, after = change
    known = marks.layout_of(target) if before else None
    joint = marks.values.is_joint(target, int(change.in_place))
    if joint or (not before and any(map(marks.values.is_joint, tensors_in(write.values)))):
        for shown in (after, target._base if change.in_place and not before else None):
            if shown is not None and node_of(shown) is None:
                marks.place(shown, None)
                marks.values.note(shown, joint=True)
    elif not before and not marks.is_distinct(after):
        # A matrix with a row and a column for each packed row, as of a graph's edges, is taken for
        # one of the batch: where rows meet, its values are read.
        packs = marks.packed and not after.requires_grad
        marks.place(after, marks.by_contract(after) if packs else None)
    elif marks.is_marked(target):
        marks.place(after, known)
    if change.in_place and before and fresh and target.requires_grad:
        _place_base(marks, target, known, fresh=True)


def _place_after(marks: Marks, change: Change, layout: Layout, *, fresh: bool = False) -> None:
    """Note where the examples lie after a write.

    Args:
        change: the write.
        layout: where they lie now; None where that is not known.
        fresh: as for ``_place_unowned``.
    """
    target = change.target
    if change.in_place:
        assumed = marks.owned(target) if change.before else marks.by_contract(target)
        moves = layout is None or not same_layout(layout, assumed)
        if fresh or moves:
            _place_base(marks, target, layout, fresh=fresh, moves=moves)
    marks.place(change.after, layout)


def _shows_unknown(marks: Marks, change: Change) -> bool:
    """Whether the operand is, or shows, data of which neither marks nor shape tell anything.

    Such data are inputs without an example axis. What an operation made only to return a view of it
    is none, such as the matrix behind the result of a linear layer with three axes.
    """
    base = change.target if change.target._base is None else change.target._base
    unmarked = marks.is_of_data(base) and not marks.is_marked(base)
    return unmarked and marks.layout_of(base) is None and not _had_gradient(change, base)


def _place_base(
    marks: Marks, view: Tensor, owned: Layout, *, fresh: bool = False, moves: bool = False
) -> None:
    """Note where the examples lie in the base of a view that was written into.

    Args:
        view: the view, or a tensor that is none.
        owned: its layout now; None if unknown.
        fresh: whether the base held no example's values before, or none that are known.
        moves: whether the write moved examples, so that layouts of other views are wrong.
    """
    base, found = view._base, Found(None)
    if base is not None and node_of(base) is not None:
        base = None
    if base is not None and base.is_contiguous() and isinstance(owned, APART):
        found = lies_behind(marks, view, owned, base, blank=fresh)
    if moves:
        marks.note_rearranged(view)
    if base is not None:
        marks.place(base, found.layout)
        _note_found(marks, base, found)


def _note_found(marks: Marks, tensor: Tensor, found: Found) -> None:
    """Note what was found about a tensor beside its layout."""
    if found.numbers is not None:
        marks.values.note(tensor, owner=found.numbers)
        marks.values.slots |= found.layout is None
    if found.supposed:
        marks.meetings.suppose(tensor)


def follow_change(marks: Marks, call: Call) -> None:
    """Note where the examples lie in a tensor that an operation changed in place.

    Args:
        call: the operation, in the form that returns a new tensor; its result is the operand
            that was changed.
    """
    func, target = call.func, call.result
    if func is Tensor.as_strided:
        # It does not show any more where its elements were in memory.
        marks.place(target, None, call.name)
        return
    if not (target.requires_grad or func in OVER_AXES):
        return
    before = marks.owned(target)
    if func in FOLLOWED or type(func) in OPAQUE:
        follow_layout(marks, call)
    else:
        marks.place(target, None, call.name)
    after = marks.owned(target)
    stays = isinstance(after, APART) and not isinstance(after, Scores)
    if target.requires_grad and not (stays and same_layout(before, after)):
        # Other tensors may show its memory.
        _place_base(marks, target, None, moves=True)
        marks.place(target, after, call.name)


def follow_move(marks: Marks, func, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Note where the examples lie in a tensor whose axes were moved in place."""
    tensor, move = args[0], MOVES_IN_PLACE.get(func)
    if move is None or move is Tensor.squeeze:  # it does not show how many axes there were
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
