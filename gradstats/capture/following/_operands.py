"""Which operands decide where the examples lie in the result of an operation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from gradstats.capture.following._apart import packs, scores, without_columns
from gradstats.capture.following._crossed import (
    is_lost_beside,
    note_crossed,
    note_picked,
    places_in_rows,
)
from gradstats.capture.following._examples import (
    Examples,
    Layout,
    Whole,
    same_layout,
    sole_of,
)
from gradstats.capture.following._indexing import looked_up
from gradstats.capture.following._layout import FOLLOWED, SHARED, follow, is_shared
from gradstats.capture.following._marks import Marks
from gradstats.capture.following._reindexed import REINDEXES
from gradstats.capture.operations._call import Call
from gradstats.capture.operations._nested import is_among, operands_of
from gradstats.capture.operations._operations import (
    LOOKS_AT_FIRST,
    OPAQUE,
    READS_ONLY_FIRST,
    REPEATS_ROWS,
    RESHAPES,
    SHARED_WEIGHT,
    UNFOLLOWED,
    is_trusted,
)
from gradstats.capture.parameters._tensors import node_of


class Unchanged:
    """Stands for a layout that need not be noted, since the result's shape tells it."""


UNCHANGED = Unchanged()


# Operations that do not broadcast all operands: some are weights, indices, or only give a shape.
ROLES = SHARED | REINDEXES.keys() | RESHAPES | READS_ONLY_FIRST


def sole_example(marks: Marks, data: Sequence[Tensor]) -> Whole | None:
    """Return the one example to which all data operands belong; None if there is none.

    Beside trained operands, which alone receive gradients, untrained ones about which nothing is
    known do not count (targets, positions within an image). Empty ones and padding never do, unless
    there are no others.
    """
    if marks.batch_size == 1 or not marks.marked:
        return None
    data = [item for item in data if item.numel() and not is_padding(marks, item)] or data
    known = [item for item in data if item.requires_grad or marks.owned(item) is not None]
    if len(known) < len(data) and not any(item.requires_grad for item in known):
        return None
    owners = [sole_of(marks.owned(item)) if marks.is_marked(item) else None for item in known]
    first = owners[0]
    if not isinstance(first, Whole):
        return None
    return first if all(other == first for other in owners) else None


def is_padding(marks: Marks, item: Tensor) -> bool:
    """Whether a tensor has the form of one example's values but holds none: ``zeros_like(x[0])``.

    Such zeros fill up the rows of other examples too.
    """
    return (
        marks.values.was_blank(item)
        and not item.requires_grad
        and isinstance(sole_of(marks.owned(item)), Whole)
    )


def by_first(marks: Marks, call: Call) -> Layout | Unchanged:
    """Return the layout of a result whose examples lie as those of one operand do."""
    func, args, kwargs, data, result = call
    constant = not args or not is_among(args[0], data)
    lost = _loses(marks, call, constant)
    indices: list[Tensor] = []
    if func in REINDEXES and not constant:
        data, indices = data[:1], data[1:]  # the indexed operand decides
    elif len(data) > 1 and not agree(marks, call):
        lost = True
    source, layout = _deciding(marks, data)
    beside = data if func in ROLES else operands_of(args, kwargs)
    beside = [item for item in beside if not is_shared(call, item)]
    dims = max((item.dim() for item in beside if node_of(item) is None), default=0)
    if any(item.dim() < dims for item in data if item is source or item.requires_grad):
        lost = True  # broadcasting counts axes from the right
    if layout is None:
        return _of_unplaced(marks, call, source)
    if func in SHARED_WEIGHT and layout.axis == source.dim() - 1:
        lost = True  # these operations sum over the last axis
    after: Examples | Whole | None
    if lost:
        after = None
    elif func in REINDEXES and constant:
        after = looked_up(call, source, layout)
    else:
        after = follow(call, source, layout)
    if source.requires_grad:
        note_picked(marks, call, indices, layout, after)
    if after is layout and not marks.is_marked(source):
        # Shape does not tell of memory that data were written into; nor of packed rows behind an
        # axis of size 1, which may have become as long as the rows.
        tells = layout is marks.contract and not marks.written.storages
        return UNCHANGED if tells or marks.layout_of(result) == layout else after
    if after is None and is_trusted(func):
        # The shape still tells if no other axis has the size of the batch.
        alone = marks.is_distinct(source) and marks.is_distinct(result)
        if alone and layout == marks.by_contract(source) and marks.has_example_axis(result):
            return UNCHANGED
    return after


def lacks_examples(marks: Marks, item: Tensor, result: Tensor) -> bool:
    """Whether an operand has no axis, or one of size 1, where the result has its examples."""
    axis = marks.batch_dim - result.dim()
    return -axis > item.dim() or item.shape[axis] == 1


def _of_unplaced(marks: Marks, call: Call, source: Tensor) -> Unchanged | None:
    """Return the layout of a result whose operand has its examples along no known axis."""
    if call.func in REPEATS_ROWS and not source.requires_grad:
        if marks.has_example_axis(call.result) and lacks_examples(marks, source, call.result):
            return UNCHANGED  # each example gets the same given values
    if marks.is_marked(source) or marks.is_lost(source):
        return None
    told = marks.values.owner_of(source) is not None  # element by element
    return None if told else UNCHANGED


def _loses(marks: Marks, call: Call, constant: bool) -> bool:
    """Whether an operation puts the examples of its first operand in unknown places.

    Args:
        call: the operation.
        constant: whether its first operand is not data.
    """
    func, _, _, data, result = call
    return (
        func in UNFOLLOWED
        or type(func) in OPAQUE
        or (func not in FOLLOWED and func is not None and result.requires_grad)
        or (func in LOOKS_AT_FIRST and constant)
        or any(tensor.requires_grad and is_shared(call, tensor) for tensor in data)
    )


def agree(marks: Marks, call: Call) -> bool:
    """Whether trained operands have the same examples in the same places; note if not."""
    func, args, _, data, result = call
    trained = [tensor for tensor in data if tensor.requires_grad]
    if not trained:
        # Beside values of one example, what seems to have a row for each example may have one for
        # each position.
        return not any(is_of_another(marks, tensor) for tensor in data)
    if any(marks.is_lost(tensor) for tensor in trained):
        return False
    if marks.batch_size > 1 and any(isinstance(marks.owned(tensor), Whole) for tensor in trained):
        return False  # other operands do not belong to this example
    if func in LOOKS_AT_FIRST and any(tensor is not args[0] for tensor in trained):
        marks.meetings.note(result)
        return False
    if func not in LOOKS_AT_FIRST:
        beside = [tensor for tensor in data if not is_shared(call, tensor)]
        note_crossed(marks, beside, places_in_rows(func, beside), result)
    # Count axes from the right, as in broadcasting.
    places = [
        owned.behind(-tensor.dim()) if isinstance(owned, Examples) else owned
        for tensor, owned in zip(trained, map(marks.owned, trained), strict=True)
        if owned is not None
    ]
    if all(same_layout(places[0], other) for other in places[1:]):
        return True
    marks.meetings.note(result)
    return False


def _meets_others(marks: Marks, tensor: Tensor, data: list[Tensor]) -> bool:
    """Whether one example's values are combined with trained values of others."""
    owned = marks.owned(tensor)
    if not isinstance(owned, Whole):
        return False
    others = [marks.owned(other) for other in data if other.requires_grad]
    known = [other for other in others if isinstance(other, (Examples, Whole))]
    return any(sole_of(other) != owned for other in known)


def is_of_another(marks: Marks, tensor: Tensor) -> bool:
    """Whether values belong to one example other than the first, whose may stand for all."""
    owned = marks.owned(tensor)
    other = isinstance(owned, Whole) and owned.example > 0
    return tensor.numel() > 1 and (other or marks.values.is_of_one(tensor))


def holds_one_alone(marks: Marks, data: Iterable[Tensor]) -> bool:
    """Whether any tensor belongs to one example, or was lost where such a one met others."""
    return any(
        isinstance(sole_of(marks.owned(item)), Whole) or marks.values.is_of_one(item)
        for item in data
    )


def _deciding(marks: Marks, data: list[Tensor]) -> tuple[Tensor, Examples | None]:
    """Return the operand that determines the result's layout, and its layout."""
    layouts = [(tensor, marks.layout_of(tensor)) for tensor in data]
    known = [(tensor, layout) for tensor, layout in layouts if layout is not None]
    trained = [(tensor, layout) for tensor, layout in known if tensor.requires_grad]
    deciding = trained or known or layouts
    # If in doubt, the first one about which something was noted.
    return next((each for each in deciding if marks.is_marked(each[0])), deciding[0])


def broadcast(marks: Marks, data: list[Tensor], result: Tensor) -> Examples | None:
    """Return the layout of operands that are broadcast against each other."""
    if any(tensor.dim() > result.dim() for tensor in data):
        return None  # a loss function that reduced its result
    aligned = []
    for tensor in data:
        layout = marks.layout_of(tensor)
        if layout is not None:
            layout = layout.behind(result.dim() - tensor.dim())
            aligned.append((tensor, layout))
        elif tensor.requires_grad and (marks.is_marked(tensor) or marks.is_lost(tensor)):
            if _meets_others(marks, tensor, data):
                marks.meetings.note(result)
            return None
    if not aligned:
        return None if any(map(marks.is_marked, data)) else marks.by_contract(result)
    trained = [layout for tensor, layout in aligned if tensor.requires_grad]
    if not trained:
        return _of_inputs(marks, data, [layout for _, layout in aligned], result)
    if packs(marks, trained) and (pairs := scores(trained, result)) is not None:
        return pairs
    first = trained[0]
    if not all(same_layout(first, layout) for layout in trained[1:]):
        marks.meetings.note(result)
        return None
    note_crossed(marks, data, places_in_rows(None, [*data, result])[:-1], result)
    return first


def _of_inputs(
    marks: Marks, data: list[Tensor], layouts: Sequence[Examples], result: Tensor
) -> Examples | None:
    """Return the layout of operands without a gradient that are broadcast against each other.

    Args:
        data: the operands.
        layouts: where the examples of those that have a layout lie in the result.
        result: of the operation.
    """
    first = layouts[0]
    place = first.axis - result.dim()
    if any(
        is_of_another(marks, item) and item.dim() >= -place and item.shape[place] > 1
        for item in data
    ):
        return None  # rows of one example beside others: see agree()
    if marks.packed and (pairs := scores(layouts, result)) is not None:
        return without_columns(pairs)  # pairs without a gradient count as values of their rows
    if any(is_lost_beside(marks, first, item) for item in data):
        return None
    if all(same_layout(first, layout) for layout in layouts[1:]):
        return first
    # Inputs of different examples meet: the one in the batch's order decides.
    if any(layout.axis != first.axis for layout in layouts):
        return None
    return next((layout for layout in layouts if layout.plain), None)
