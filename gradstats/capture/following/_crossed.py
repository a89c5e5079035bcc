"""Operations in which a row for each example may have been taken for one of each position.

With as many positions as examples, ``x + e`` of inputs x (B, T, d) and values e (B, d) adds e's
rows to positions of all examples. Each value of e still belongs to one example, but a loss over all
examples is then no sum of what its own inputs make of each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from gradstats.capture.following._examples import Examples, Layout, Whole
from gradstats.capture.following._indexing import MASKS, places_of_index, places_of_mask
from gradstats.capture.following._marks import Marks
from gradstats.capture.following._reductions import ROW_LOSSES
from gradstats.capture.following._taken import is_given
from gradstats.capture.operations._call import Call


def note_crossed(
    marks: Marks, operands: Sequence[Tensor], places: Sequence[Sequence[int]], result: Tensor
) -> None:
    """Note if trained values have their examples where inputs have something else.

    Args:
        operands: of an operation.
        places: for each of them, which axis of the result each of its axes becomes, before the
            operation reduces it; a negative number for each index that it sums.
        result: of the operation.
    """
    inputs = []
    own = None
    for item, axes in zip(operands, places, strict=True):
        if not marks.is_of_data(item) or is_given(marks, item):
            continue
        if not item.requires_grad:
            inputs.append((item, axes))
        elif own is None and (layout := marks.layout_of(item)) is not None:
            own = layout.along(axes[layout.axis])
    if own is not None:
        note_inputs(marks, own, inputs, result)


def note_inputs(
    marks: Marks, own: Examples, inputs: Iterable[tuple[Tensor, Sequence[int]]], result: Tensor
) -> None:
    """Do the same, given where the examples of the trained values lie, and the other operands."""
    if result.requires_grad and marks.batch_size > 1:
        if any(_crosses(marks, own, *each) for each in inputs):
            marks.meetings.cross(result)


def _crosses(marks: Marks, own: Examples, item: Tensor, axes: Sequence[int]) -> bool:
    """Whether an input has other examples, or something else, where the trained values have theirs.

    Beside inputs of all examples, along an axis of these alone, trained values keep the batch's.
    """
    owned = marks.owned(item)
    extends = {axis for axis, size in zip(axes, item.shape, strict=True) if size > 1}
    if is_lost_beside(marks, own, item):
        return own.axis in extends
    if not isinstance(owned, (Examples, Whole)):
        return False
    if isinstance(owned, Whole):
        # The first example's may stand for all, as a grid does that they share.
        return owned.example > 0 and own.axis in extends
    if (axis := axes[owned.axis]) != own.axis:
        return own.axis in extends or (own.axis != marks.batch_dim == axis)
    # Rows of the same position follow each other, beside all rows of each example.
    return own.segments is not None and owned.segments is None and owned.fold > 1


def is_lost_beside(marks: Marks, own: Examples, item: Tensor) -> bool:
    """Whether an input lost its axis, which need not be that of others then, if not the first one.

    As where inputs were added that have their examples along different axes. With another
    ``batch_dim``, inputs without such an axis are marked so too, whatever theirs is.
    """
    if own.axis == 0 or marks.batch_dim or marks.packed:
        return False
    return marks.is_marked(item) and marks.owned(item) is None


def note_picked(
    marks: Marks, call: Call, indices: Iterable[Tensor], layout: Examples, after: Layout
) -> None:
    """Do the same for indices and masks, given where the examples of the indexed values lie.

    Args:
        call: the operation; or the one that reads what is written to.
        indices: operands that tell what it picks.
        layout, after: where the examples lie in its first operand, and in what it picks.
    """
    for index in indices:
        masks = index.dtype in MASKS
        own = layout if masks else after
        places = places_of_mask(call, index) if masks else places_of_index(call, index)
        if isinstance(own, Examples) and places is not None:
            note_inputs(marks, own, [(index, places)], call.result)


def places_in_rows(func, operands: Sequence[Tensor]) -> list[Sequence[int]]:
    """Return the places of operands that are broadcast, or compared row by row, as in a loss."""
    dims = max(map(Tensor.dim, operands))
    classes = ROW_LOSSES.get(func)

    def places(item: Tensor) -> Sequence[int]:
        if item.dim() == dims - 1 and isinstance(classes, int):
            # A class for each row, which has an axis of scores beside it.
            return [axis for axis in range(dims) if axis != classes % dims]
        return range(dims - item.dim(), dims)

    return [places(item) for item in operands]
