"""Where the examples lie in the results of the user's operations on data."""

from __future__ import annotations

import torch
from torch import Tensor

from gradstats.capture.following._apart import after_scores, attention_keeps_apart
from gradstats.capture.following._examples import (
    APART,
    MIXED,
    Examples,
    Layout,
    Mixed,
    Scores,
)
from gradstats.capture.following._families import FAMILIES
from gradstats.capture.following._joins import joined_layout
from gradstats.capture.following._marks import Marks
from gradstats.capture.following._meetings import BROUGHT_BACK, MEETS, NO_SUM
from gradstats.capture.following._operands import (
    Unchanged,
    agree,
    by_first,
    holds_one_alone,
    lacks_examples,
    sole_example,
)
from gradstats.capture.following._reductions import ATTENTION, OF_TWO, OVER_AXES, REDUCES, runs_over
from gradstats.capture.following._reindexed import REINDEXES
from gradstats.capture.following._separable import LOSSES, is_sum, power_of, root_of
from gradstats.capture.following._slots import follow_slots, settled, slots_of
from gradstats.capture.operations._call import Call
from gradstats.capture.operations._nested import is_among
from gradstats.capture.operations._operations import (
    BROADCASTS,
    JOINS,
    PAD_SEQUENCE,
    PADS,
    PRODUCTS,
    REPEATS_ROWS,
    RESHAPES,
    TRANSPOSES,
    variants,
)

# Operations that add axes in front, if the last axes of the result are those of the operand.
IN_FRONT = BROADCASTS | RESHAPES | TRANSPOSES

# Operations whose results have the same row for each example, if their operands have one or none.
SAME_ROWS = REPEATS_ROWS | {torch.full}

# Statistics of all rows or columns, which are not followed.
STATISTICS = frozenset(variants("cov", "corrcoef", "histc", "histogram"))

# Operations whose results may hold rows of constants beside those of data.
JOINS_OR_PADS = PADS.union(JOINS)


def follow_layout(marks: Marks, call: Call) -> None:
    """Note where the examples lie in the result of an operation on data."""
    func, _, _, data, result = call
    meetings = marks.meetings
    if result.numel() and not any(map(Tensor.numel, data)) and _are_of_nobody(marks, data):
        marks.mark_constant(result)  # such as a sum over no rows
        return
    if marks.batch_dim and not result.requires_grad and _has_no_axis(marks, call):
        # An axis with the size of the batch need not be that of the examples.
        marks.mark(result, None, call.name)
        return
    after = _layout_after(marks, call)
    if marks.values.joins and not (result.requires_grad or _has_same_rows(marks, call)):
        if any(map(marks.values.is_joint, data)) and not any(map(marks.owned, data)):
            after = None  # an axis with the size of the batch is not the examples'
    # Products handle scores among their operands themselves.
    if (marks.packed or marks.scored or isinstance(after, Scores)) and result.requires_grad:
        if not (func in PRODUCTS or func is torch.einsum):
            after = _kept_apart(marks, call, after)
    if isinstance(after, Unchanged):
        return
    if isinstance(after, Examples) and not after.fits(result):
        after = None  # for instance where an index takes only some of the rows
    apart = isinstance(after, APART) and not meetings.is_coupled(result)
    if not (apart and result.numel()) and (one := sole_example(marks, data)) is not None:
        # All that is computed from one example's values alone belongs to that example.
        meetings.coupled.pop(result.grad_fn, None)
        after = one
        if marks.packed and func in JOINS_OR_PADS and marks.has_example_axis(result):
            marks.meetings.suppose(result)  # the rows added may be those of other examples
    if after is None and not result.numel():
        # Such as the rows of an expert that no token was sent to.
        nobody = torch.empty(0, dtype=torch.long, device=result.device)
        after = marks.contract.owned_by(nobody, [*result.shape].index(0))
    if after is None:
        after = follow_slots(marks, call)
        told = after is not None or marks.values.owner_of(result) is not None
        # Rows that are nobody's are supposed to be an example's only if nothing else helps.
        if not told and any([settled(marks, item) is not None for item in data]):
            follow_layout(marks, call)
            return
    if after is None:
        note_lost(marks, result, data, call.name)
        if not (result.requires_grad or marks.is_marked(result)) and _is_joint(marks, call):
            marks.values.note(result, joint=True)
    else:
        marks.place(result, after)
    if marks.is_marked(result) and result.requires_grad and not isinstance(after, APART):
        _note_sum(marks, call, after)
    if result.requires_grad and (meetings.coupled or meetings.added):
        _note_added(marks, data, result)


def _are_of_nobody(marks: Marks, data: list[Tensor]) -> bool:
    """Whether empty data belong to no example: neither as a whole nor by rows."""
    of_rows = any(layout is not None and layout.rows for layout in map(marks.layout_of, data))
    return not of_rows and sole_example(marks, data) is None


def _has_same_rows(marks: Marks, call: Call) -> bool:
    """Whether a result has the same row for each example, of an operand without their axis."""
    if call.func not in SAME_ROWS:
        return False
    return not marks.has_example_axis(call.result) or all(
        lacks_examples(marks, item, call.result) for item in call.data
    )


def _is_joint(marks: Marks, call: Call) -> bool:
    """Whether an untrained result without an axis for the examples is a statistic of all."""
    combines = call.func in OVER_AXES or call.func in FAMILIES or call.func in STATISTICS
    return any(
        marks.values.is_joint(item)
        or marks.owned(item) is MIXED
        or (combines and marks.layout_of(item) is not None)
        for item in call.data
    )


def _has_no_axis(marks: Marks, call: Call) -> bool:
    """Whether a result got an axis at ``batch_dim`` from data with too few axes to have one.

    Not if all new axes are in front, as where labels (B,) are expanded to (T, B).
    """
    func, args, _, data, result = call
    dims = marks.batch_dim
    if result.dim() <= dims:
        return False
    picks = func in REINDEXES and is_among(args[0], data)
    in_front = picks or func in IN_FRONT
    for item in data:
        if marks.owned(item) is not None or not (item.dim() <= dims or marks.is_marked(item)):
            return False
        if in_front and item.shape == result.shape[dims:]:
            return False
    return True


def _note_sum(marks: Marks, call: Call, after: Layout) -> None:
    """Note whether a result of several examples is a sum of terms of one example each."""
    meetings, result, behind = marks.meetings, call.result, call.data[0].grad_fn
    sums = is_sum(marks, call)
    if sums:
        marks.values.note(result, sum=True)
    elif sums is False and after is MIXED:
        if not meetings.is_coupled(result):
            meetings.couple(result, NO_SUM)
        if (order := root_of(marks, call)) is not None:
            meetings.roots_of_sums[result.grad_fn] = order
    elif behind in meetings.roots_of_sums and power_of(call) == meetings.roots_of_sums[behind]:
        marks.values.note(result, sum=True)
        meetings.added[behind] = meetings.coupled.pop(behind, NO_SUM)


def _note_added(marks: Marks, data: list[Tensor], result: Tensor) -> None:
    """Note where values of different examples are added, and where more is computed from a sum.

    A loss of all examples may be a sum of such sums: its terms can still be told apart.
    """
    meetings, node = marks.meetings, result.grad_fn
    if meetings.coupled.get(node) in (MEETS, BROUGHT_BACK) and marks.values.is_sum(result):
        meetings.added[node] = meetings.coupled.pop(node)
        return
    # The new node of a tensor that was changed in place leads to its former one.
    behind = [] if node is None else [child for child, _ in node.next_functions]
    behind += [item.grad_fn for item in data if item.requires_grad]
    if any(each in meetings.added for each in behind):
        if marks.values.is_sum(result):
            meetings.added[node] = MEETS
        elif not meetings.is_coupled(result):
            meetings.couple(result, MEETS)


def _kept_apart(marks: Marks, call: Call, after: Layout | Unchanged) -> Layout | Unchanged:
    """Return the layout of a result; None if scores of different packed examples met in it."""
    known = marks.by_contract(call.result) if isinstance(after, Unchanged) else after
    trained = filter(marks.is_trained, call.data)
    of_scores = any(isinstance(marks.owned(item), Scores) for item in trained)
    if isinstance(known, Mixed) or not (of_scores or isinstance(known, Scores)):
        return after
    rows = known if isinstance(known, Examples) else None
    apart = after_scores(marks, call, rows)
    if apart is None and rows is not None:
        marks.meetings.note(call.result)
    return after if apart is known else apart


def note_lost(marks: Marks, result: Tensor, data: list[Tensor], at: str | None) -> None:
    """Note that the examples of a result were lost at the operation named ``at``."""
    lost = next(filter(marks.is_lost, data), None)
    alone = holds_one_alone(marks, data)
    if alone:
        marks.values.note(result, of_one=True)
    if lost is not None:
        # Name the first of several operations that could not be followed.
        blamed = marks.is_marked(lost) and slots_of(marks, lost) is None
        marks.mark(result, None, marks.lost_at(lost) if blamed else at)
    elif alone or marks.contract.rows in result.shape:
        marks.mark(result, None, at)  # an axis with the size of the batch is not the examples'
    else:
        marks.place(result, None, at)


def _layout_after(marks: Marks, call: Call) -> Layout | Unchanged:
    func, _, _, data, result = call
    if spans_examples(marks, data, result):
        return MIXED
    if func in JOINS or func is PAD_SEQUENCE:
        return joined_layout(marks, call)
    if func in OVER_AXES and _runs_over_examples(marks, call):
        if not result.requires_grad or marks.batch_size == 1:
            return None
        if func not in REDUCES:
            marks.meetings.couple(result, "runs over the examples")
        return MIXED
    if func in LOSSES and _is_joined(marks, call):
        return MIXED
    family = FAMILIES.get(func)
    return by_first(marks, call) if family is None else family(marks, call)


def _is_joined(marks: Marks, call: Call) -> bool:
    """Whether a loss function reduced all examples to one number; note if different ones met."""
    if call.result.dim() or not call.result.requires_grad or marks.batch_size == 1:
        return False
    trained = [tensor for tensor in call.data if tensor.requires_grad]
    if not all(isinstance(marks.owned(tensor), Examples) for tensor in trained):
        return False
    return agree(marks, call) or marks.meetings.is_coupled(call.result)


def _runs_over_examples(marks: Marks, call: Call) -> bool:
    func, args, kwargs, _, result = call
    count = 3 if func is ATTENTION else 2 if func in OF_TWO else 1
    operands = [item for item in args[:count] if isinstance(item, Tensor)]
    if marks.packed and (func is ATTENTION or not result.requires_grad):
        # Packed rows are positions too: masks keep those of different examples apart, and values
        # without a gradient, such as counts, may run over all of them.
        return False
    if func is ATTENTION and attention_keeps_apart(marks, call):
        return False  # the model itself packed them
    for item in filter(marks.is_of_data, operands):
        layout = marks.layout_of(item)
        if layout is None or isinstance(layout, Scores):
            continue  # the values of scores tell whether examples meet
        # Axes refer to the shape that the operands are broadcast to.
        widest = max((item, *operands), key=Tensor.dim) if func in OF_TWO else item
        axis = layout.axis + widest.dim() - item.dim()
        if runs_over(func, (widest, *args[1:]), kwargs, axis):
            return True
    return False


def spans_examples(marks: Marks, data: list[Tensor], result: Tensor) -> bool:
    """Whether a result has trained values over all examples; note if those of one join them."""
    trained = [marks.owned(tensor) for tensor in data if tensor.requires_grad]
    if not any(owned is MIXED for owned in trained) or not result.requires_grad:
        return False
    if any(isinstance(owned, APART) for owned in trained):
        marks.meetings.couple(result, BROUGHT_BACK)
    return True
