"""Which results of an operation of the user's code are constant, and which are data.

Without data among the operands, the results are constants. Otherwise ``_following`` and
``_written`` tell where the examples lie in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradstats.capture.following._examples import MIXED, Whole, sole_of
from gradstats.capture.following._following import follow_layout
from gradstats.capture.following._layout import FOLLOWED, ON_NESTED
from gradstats.capture.following._marks import Marks
from gradstats.capture.following._operands import is_padding, sole_example
from gradstats.capture.following._returned import follow_gradients, note_beside
from gradstats.capture.following._sequences import PRESCRIBES
from gradstats.capture.following._signatures import RENAMED, by_place, in_pytorchs_names
from gradstats.capture.following._taken import note_made, takes_for_data, took_given, without_given
from gradstats.capture.following._writes import (
    CHANGES,
    CHANGES_IN_PLACE,
    OUT_OF_PLACE,
    WRITES,
    Write,
)
from gradstats.capture.following._written import (
    Change,
    follow_change,
    follow_move,
    follow_write,
    note_sums,
)
from gradstats.capture.operations._call import Call
from gradstats.capture.operations._names import function_name
from gradstats.capture.operations._nested import flatten, is_among, operands_of, tensors_in
from gradstats.capture.operations._operations import (
    BLANKS,
    CALLERS_VALUES,
    EXTREMES,
    FACTORIES,
    FILLS,
    FORMS,
    IN_PLACE,
    MOVES_IN_PLACE,
    MULTIPLIES,
    ON_EACH,
    OPAQUE,
    READS_ONLY_FIRST,
    RESHAPES,
    UNFOLLOWED,
    changed_by,
)
from gradstats.capture.parameters._refusals import check_has_sizes
from gradstats.capture.parameters._tensors import node_of

if TYPE_CHECKING:
    from gradstats.capture._context import Context


def follow_results(
    tracker: Context, func, args: tuple[Any, ...], kwargs: dict[str, Any], result
) -> None:
    """Note which results of an operation are constant, and where the examples lie in the others."""
    marks = tracker.marks
    func, args, kwargs = _by_place(func, args, kwargs)
    given = tensors_in(kwargs.get("out")) if kwargs else []
    if given:
        _follow_copied(tracker, func, args, kwargs, given)
        return
    if func in ON_EACH:
        for number, entry in enumerate(result):
            entries = [each[number] if isinstance(each, (list, tuple)) else each for each in args]
            follow_results(tracker, ON_EACH[func], tuple(entries), kwargs, entry)
        return
    every = operands_of(args, kwargs)
    operands = [t for t in every if node_of(t) is None]
    data = [t for t in operands if marks.is_data(t)]
    if len(every) > len(operands):
        if func in UNFOLLOWED or type(func) in OPAQUE:
            func = None  # the rule of a tracked operand has checked where the examples lie
    if func in FACTORIES:
        data = []  # which may set the size, but not the contents
    elif func in MULTIPLIES and _cancels(marks, data, (*args, *kwargs.values())):
        data = []  # such as outputs that are added to a loss times 0, so that all are used
    elif func is Tensor.new_tensor:
        data = [t for t in data if t is not args[0]]  # which only sets dtype and device
    elif func in READS_ONLY_FIRST or func in RESHAPES:
        data = [t for t in data if t is args[0]]
    results = flatten(result) if isinstance(result, (tuple, list)) else [result]
    if data:
        changed = args[0] if func in IN_PLACE else None
        decisive = data
        if took_given(marks) and len(data) > 1 and func not in WRITES:
            decisive = without_given(marks, data)
        _follow_data(tracker, func, args, kwargs, decisive, results)
        for tensor in results if marks.meetings.coupled else ():
            if isinstance(tensor, Tensor):
                marks.meetings.couple_base(tensor, operands)
        if len(operands) > len(data):
            note_beside(marks, Call(func, args, kwargs, operands, result))
        if marks.taken is not None:
            note_made(marks, func, results, data, changed)
        return
    # Values in the form of the model's own tensors, such as noise for weights, are no data.
    may_be_data = func in CALLERS_VALUES and not (
        len(every) > len(operands) or any(map(marks.is_kept, operands))
    )
    for tensor in results:
        if isinstance(tensor, Tensor) and node_of(tensor) is None:
            if may_be_data and takes_for_data(marks, func, tensor):
                continue
            marks.mark_constant(tensor)
            if tensor.requires_grad:
                note_beside(marks, Call(func, args, kwargs, operands, tensor))


def _follow_copied(
    tracker: Context, func, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Tensor]
) -> None:
    """Follow an operation that writes its results to tensors given as ``out``.

    This is done as if it had made new tensors, which were then copied to the given ones.
    """
    without_out = {name: item for name, item in kwargs.items() if name != "out"}
    made = [item.clone() for item in given]
    follow_results(tracker, func, args, without_out, made)
    for target, source in zip(given, made, strict=True):
        follow_results(tracker, Tensor.copy_, (target, source), {}, target)


def _cancels(marks: Marks, data: list[Tensor], operands: Sequence[Any]) -> bool:
    """Whether a product with the number 0 cancels data in which several examples are mixed."""
    return _has_zero(operands) and len(data) == 1 and marks.owned(data[0]) is MIXED


def _has_zero(operands: Sequence[Any]) -> bool:
    """Whether the number 0 is among the operands of a product."""
    return any(isinstance(item, (int, float)) and item == 0 for item in operands)


def _by_place(func, args: tuple[Any, ...], kwargs: dict[str, Any]):
    """Return an operation in a canonical form, with its operands given by position."""
    if kwargs and not RENAMED.isdisjoint(kwargs):
        kwargs = in_pytorchs_names(func, kwargs)
    if kwargs and (not args or any([isinstance(item, Tensor) for item in kwargs.values()])):
        args, kwargs = by_place(func, args, kwargs)
    if func in EXTREMES and len(args) > 1 and isinstance(args[1], Tensor):
        func = torch.maximum  # torch.min of two operands is followed in the same way
    if func is torch.where and len(args) + len(kwargs) == 1:
        func = torch.nonzero  # with as_tuple=True
    return func, args, kwargs


def _follow_data(
    tracker: Context, func, args, kwargs, data: list[Tensor], results: list[Any]
) -> None:
    """Note where the examples lie in the results of an operation on data.

    Args:
        tracker: the context.
        func, args, kwargs: the operation.
        data: the operands that determine where the examples lie.
        results: the leaves of its result; that of a write is one.
    """
    marks = tracker.marks
    tensors = [item for item in results if isinstance(item, Tensor)]
    for tensor in tensors:
        if tensor.is_nested:
            check_has_sizes(func, tensor)
    if any(tensor.is_nested for tensor in data) and func not in ON_NESTED:
        for tensor in tensors:
            marks.place(tensor, None, function_name(func))
        return
    if type(func) in OPAQUE and not torch.is_grad_enabled():
        return  # a compiled graph was followed when it was traced
    if func in WRITES and node_of(args[0]) is None:
        _follow_write(marks, func, args, kwargs, data, results[0])
        return
    if func in WRITES and marks.is_marked(results[0]):
        return  # each example wrote to its own copy of a tracked tensor; the rule has placed them
    if func is torch.autograd.grad:
        follow_gradients(marks, args, kwargs, results)
        return
    for target in changed_by(func, args, kwargs):
        if target.requires_grad and node_of(target) is None:
            marks.mark_data(target)
            follow_change(marks, Call(func, args, kwargs, data, target))
    registered = None if func in FOLLOWED else tracker.registered(func)
    if registered is not None and torch.is_grad_enabled():
        registered.follow(tracker, func, args, kwargs, results)
        return
    prescribed = PRESCRIBES.get(func)
    layouts = None if prescribed is None else prescribed(marks, args, kwargs, results)
    if layouts is not None:
        sole = sole_example(marks, data)
        for tensor, layout in zip(results, layouts, strict=False):
            if isinstance(tensor, Tensor):
                placed = sole or layout
                marks.place(tensor, placed, function_name(func) if placed is None else None)
    else:
        for tensor in tensors:
            if not is_among(tensor, data):
                follow_layout(marks, Call(func, args, kwargs, data, tensor))
    blank = func in BLANKS or all([is_padding(marks, tensor) for tensor in data])
    times_zero = func in MULTIPLIES and not data[0].requires_grad and _has_zero(args)
    if func in FORMS or times_zero:
        blank |= isinstance(sole_of(marks.owned(data[0])), Whole)
    for tensor in tensors if blank else ():
        marks.values.note(tensor, blank=True)


def _follow_write(marks: Marks, func, args, kwargs, data: list[Tensor], result) -> None:
    """Follow a write of data into a tensor, which makes it data."""
    target = args[0]
    before = marks.is_data(target)
    after = target if func in IN_PLACE else result
    base = target._base if after is target else None
    total = base is not None and not marks.is_data(base)  # it starts as a number
    write = WRITES[func](*args, **kwargs)
    written = [item for item in data if item is not target]
    pads = bool(written) and all([is_padding(marks, item) for item in written])
    if pads or (marks.packed and write.is_empty):
        if after is target:
            marks.values.note(target, **marks.values.held_by(target, writes=1))
        else:
            marks.place_like(after, target)
        return
    if after is target:
        marks.mark_data(target)
    if func in MOVES_IN_PLACE or func is Tensor.resize_:
        follow_move(marks, func, args, kwargs)
    elif func in CHANGES_IN_PLACE:
        follow_change(marks, Call(CHANGES_IN_PLACE[func], args, kwargs, data, target))
    elif func in OUT_OF_PLACE and before and _takes_sums(marks, write, target):
        follow_change(marks, Call(OUT_OF_PLACE[func], args, kwargs, data, target))
    else:
        follow_write(marks, Change(write, target, before, after))
        if marks.is_marked(after) and marks.owned(after) is None:
            marks.mark(after, None, function_name(func))
    if func in FILLS and not written and isinstance(sole_of(marks.owned(target)), Whole):
        marks.values.note(target, blank=True)
    if base is not None and marks.values.is_sum(target):
        note_sums(marks, base, total)


def _takes_sums(marks: Marks, write: Write, target: Tensor) -> bool:
    """Whether an operand that was changed held sums over the examples, or values of several."""
    owned = marks.owned(target)
    lost = owned is None and write.how == CHANGES
    return owned is MIXED or (lost and marks.values.is_sum(target, writes=1))
