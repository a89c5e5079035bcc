"""A cache of what was noted on the results of operations, for when they are repeated.

A model's layers do the same to operands of the same form, step after step. Two operations are alike
if they agree in everything that following reads: the function and its arguments, and of each tensor
the form, the layout and whether it requires grad. Operations are not cached if following them reads
values, or notes more than that a result is constant or where its examples lie.

The same cache holds what rules decided about operations of parameters and trained data. These are
alike if they also agree in what rules read in addition: dtypes, devices, numbers, what the context
asks of its uses, and whether saved tensors have hooks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gradstats.capture.following._examples import Examples
from gradstats.capture.following._layout import FOLLOWED
from gradstats.capture.following._marks import CONSTANTS, LAYOUT, Marks
from gradstats.capture.following._notes import Note, note_as, note_of
from gradstats.capture.following._reductions import ATTENTION, QUANTILES, runs_over
from gradstats.capture.following._reindexed import REINDEXES
from gradstats.capture.following._results import follow_results
from gradstats.capture.following._sequences import PRESCRIBES
from gradstats.capture.following._taken import is_drawn, is_given
from gradstats.capture.following._values import VALUES
from gradstats.capture.following._writes import WRITES
from gradstats.capture.operations._graph import hooks_on_saved
from gradstats.capture.operations._nested import operands_of
from gradstats.capture.operations._operations import (
    BLANKS,
    BROADCASTS,
    CALLERS_VALUES,
    EXPANDS,
    FACTORIES,
    IN_PLACE,
    SLICES,
    variants,
)
from gradstats.capture.parameters._tensors import (
    TRACKED_TYPES,
    DerivedTensor,
    TrackedParameter,
    node_of,
)

if TYPE_CHECKING:
    from gradstats.capture._context import Context

# Operations that pick rows by numbers among their arguments, not by values in tensors.
REINDEXES_BY_NUMBERS = EXPANDS.union(
    SLICES, variants("repeat", "tile", "flip", "roll"), {Tensor.__getitem__}
)

# Operations whose results have layouts that depend on forms only, and no other notes.
REPEATABLE = FOLLOWED.difference(
    REINDEXES.keys() - REINDEXES_BY_NUMBERS, WRITES, IN_PLACE, PRESCRIBES, QUANTILES, FACTORIES,
    BLANKS, CALLERS_VALUES,
)  # fmt: skip

# Types of arguments that can be compared by value.
COMPARABLE = frozenset(
    {int, bool, str, type(None), type(...), torch.Size, torch.dtype, torch.device, torch.layout,
     torch.memory_format}
)  # fmt: skip

# What a key holds of an operand that has no layout noted on it.
NOTHING, CONSTANT, DRAWN, JOINT = "nothing", "constant", "drawn", "joint"
NOTHING_NOTED = Note(False, None, {})

# What a key holds of a trained tensor that was not computed: unlike others, it cannot be lost.
LEAF = "leaf"

# For each kind of operation, the notes on its results, none if they have nothing to note; or what a
# rule decided about it. The cache is cleared at ``MOST`` entries.
NOTED: dict[tuple[Any, ...], Any] = {}
MOST = 8192


def follow_repeated(
    tracker: Context, func, args: tuple[Any, ...], kwargs: dict[str, Any], result
) -> None:
    """Do what ``follow_results`` does, from the cache if the operation is like an earlier one."""
    marks = tracker.marks
    alike = likeness(marks, func, args, kwargs, result)
    if alike is None:
        follow_results(tracker, func, args, kwargs, result)
        return
    key, results = alike
    found = NOTED.get(key)
    if found is None:
        before = noted(marks)
        follow_results(tracker, func, args, kwargs, result)
        # The values of the mask matter where attention runs over rows of several examples.
        if not (func is ATTENTION and _runs_over_rows(marks, operands_of(args, kwargs))):
            remember(marks, key, results, before)
    elif found:
        for tensor, note in zip(results, found, strict=True):
            note_as(marks, tensor, note)


def likeness(
    marks: Marks, func, args: tuple[Any, ...], kwargs: dict[str, Any], result
) -> tuple[tuple[Any, ...], list[Tensor]] | None:
    """Return a key of all that following an operation reads, and the operation's new results.

    None if following may read more than a key can hold.
    """
    constants = marks.constants
    try:
        form = _form_of(marks, func, args, kwargs)
        if form is None:
            return None
        key, operands = form
        if not operands or (func is Tensor.__getitem__ and len(operands) > 1):
            return None  # the numbers in an index tensor matter
        if func is torch.where and not isinstance(result, Tensor):
            return None  # so do the values of a condition without operands
        results: list[Tensor] = []
        for item in (result,) if isinstance(result, Tensor) else result:
            if item is operands[0]:
                key.append(NOTHING)  # its notes stay as they are
                continue
            number = id(item)
            if type(item) is not Tensor or item.__dict__:
                return None
            if number in constants or number in CONSTANTS:
                return None
            key += (item.shape, item.stride(), item.requires_grad)
            results.append(item)
    except RuntimeError:
        return None  # a sparse tensor, without strides
    if len(operands) > 1:
        _add_pattern(key, [*operands, *results])
    return tuple(key), results


def likeness_of_use(
    tracker: Context, func, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], list[Tensor]] | None:
    """Return a key of all that the rule of an operation reads, and the operation's operands.

    None if the rule may read more than a key can hold.
    """
    try:
        form = _form_of(tracker.marks, func, args, kwargs, tracker)
        if form is None:
            return None
        key, operands = form
        if torch._C._is_any_autocast_enabled():
            key.append(_autocast_of(operands))
    except RuntimeError:
        return None  # a sparse tensor, without strides, or a device without autocast
    if len(operands) > 1:
        _add_pattern(key, operands)
    return tuple(key), operands


def _autocast_of(operands: list[Tensor]) -> tuple[Any, ...]:
    """Return the state of autocast on the operands' devices, on which the casts of rules depend."""
    kinds = sorted({item.device.type for item in operands})
    return tuple([(torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds])


def _add_pattern(key: list[Any], tensors: list[Tensor]) -> None:
    """Add to a key which of the tensors are the same: following may depend on it."""
    if len({*map(id, tensors)}) < len(tensors):
        every = [*map(id, tensors)]
        key.append((*map(every.index, every),))


def _form_of(
    marks: Marks,
    func,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tracker: Context | None = None,
) -> tuple[list[Any], list[Tensor]] | None:
    """Return a key of an operation and its arguments, and the tensors among these.

    Args:
        marks: what is noted about the operands.
        func, args, kwargs: the operation.
        tracker: the context, for a key of what rules read; it is called with the handling of
            tracked tensors off.
    """
    if func not in REPEATABLE or marks.packed:
        return None
    if marks.written.storages or marks.rearranged.storages:
        return None
    constants, of_use = marks.constants, tracker is not None
    asked = None if tracker is None else (tracker.asked, hooks_on_saved() is not None)
    key: list[Any] = [func, marks.batch_size, marks.batch_dim, len(args), asked, (*kwargs,)]
    operands: list[Tensor] = []
    items = [*args, *kwargs.values()] if kwargs else [*args]
    for item in items:  # the loop appends the entries of lists
        kind = type(item)
        if kind is Tensor:
            number = id(item)
            note: Any = CONSTANT if number in constants or number in CONSTANTS else NOTHING
            if item.__dict__:
                note = _note_of(marks, item)
                if note is None:
                    return None
            trained: Any = item.requires_grad
            if trained and item.is_leaf:
                trained = LEAF
            if of_use and not (trained or note is CONSTANT) and func in BROADCASTS:
                return None  # rules treat masks from closures in another way
            key += (note, item.shape, item.stride(), trained)
            if of_use:
                key += (item.dtype, item.device, item.layout)
            operands.append(item)
        elif kind in COMPARABLE:
            key += (kind, item)
        elif of_use and (kind is TrackedParameter or kind is DerivedTensor):
            node = item._gradstats
            if node is None or node.tracker is not tracker:
                return None
            # Rules whose decisions are kept read neither how a derived tensor was made, nor values.
            key += (kind, item.shape, item.stride(), item.dtype, item.device)
            operands.append(item)
        elif (kind is tuple or kind is list) and COMPARABLE.issuperset(map(type, item)):
            key += (kind, (*map(type, item),), (*item,))
        elif kind is float:  # its value does not decide where examples lie
            key += (kind, item if of_use else None)
        elif kind is nn.Parameter:
            key += (kind, item.shape, item.stride(), item.requires_grad, item.dtype, item.device)
            operands.append(item)
        elif of_use:
            return None
        elif kind is tuple or kind is list:
            key += (kind, len(item))
            items += item
        elif kind is slice:
            ends = item.start, item.stop, item.step
            if not COMPARABLE.issuperset(map(type, ends)):
                return None
            key += (kind, ends)
        elif kind in TRACKED_TYPES and node_of(item) is not None:
            with torch._C.DisableTorchFunctionSubclass():
                key += (kind, item.shape)
            operands.append(item)
        else:
            return None
    return key, operands


def _runs_over_rows(marks: Marks, operands: list[Tensor]) -> bool:
    """Whether attention runs over rows of several examples, which only its mask can keep apart.

    The answer depends on nothing but the operands' forms and layouts.
    """
    layouts = ((item, marks.layout_of(item)) for item in operands if node_of(item) is None)
    return any(own and runs_over(ATTENTION, (item,), {}, own.axis) for item, own in layouts)


def _note_of(marks: Marks, tensor: Tensor) -> tuple[int | str, ...] | str | None:
    """Return what was noted on a tensor that has attributes; None if a key cannot hold that."""
    notes = tensor.__dict__
    constant = id(tensor) in marks.constants or id(tensor) in CONSTANTS
    if is_given(marks, tensor):
        return None  # its layout may have to yield to that of data beside it
    drawn = DRAWN if marks.taken is not None and is_drawn(marks, tensor) else NOTHING
    mark = notes.get(LAYOUT)
    if mark is None or mark[0] != marks.serial:
        if VALUES in notes and marks.values.owner_of(tensor) is not None:
            return None
        if marks.values.is_joint(tensor):
            return None if drawn is DRAWN else JOINT
        return CONSTANT if constant else drawn
    layout = mark[1]
    if constant or type(layout) is not Examples or layout.segments is not None:
        return None
    return layout.batch, layout.axis, layout.fold, drawn


def noted(marks: Marks) -> tuple[int, int]:
    """Return how many tensors are marked, and how many operations are noted as meetings."""
    meetings = marks.meetings
    met = meetings.coupled, meetings.added, meetings.crossed, meetings.beside
    return len(marks.marked), sum(map(len, met))


def remember(
    marks: Marks, key: tuple[Any, ...], results: list[Tensor], before: tuple[int, int]
) -> None:
    """Remember what was noted on the results of an operation, if the cache can hold that.

    Args:
        marks: what is noted about the results.
        key: the operation's, from ``likeness``.
        results: the new ones among its results.
        before: what ``noted`` returned before the operation was followed.
    """
    marked, met = before
    found: list[Note] = []
    for tensor in results:
        if marks.taken is not None and tensor.is_inference():
            return  # inference tensors cannot have a note that their values are drawn
        note = note_of(marks, tensor)
        if note is None or not (note.place is None or type(note.place) is Examples):
            return
        if not note.held.keys() <= {DRAWN, JOINT}:
            return
        found.append(note)
        marked += note.place is not None
    if (marked, met) == noted(marks):
        keep(key, () if found.count(NOTHING_NOTED) == len(found) else tuple(found))


def keep(key: tuple[Any, ...], found: Any) -> None:
    """Keep what was found out about a kind of operation."""
    if len(NOTED) >= MOST:
        NOTED.clear()
    NOTED[key] = found
