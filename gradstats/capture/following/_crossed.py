"""Operations in which the examples' rows may have been taken for rows of positions.

With as many positions as examples, ``x + e`` of inputs x (B, T, d) and trained values e (B, d) adds
row i of e to position i of every example. Each value of e still belongs to one example, but a loss
over all examples is then no sum of terms that depend on one example's inputs each.
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
    """Note if trained values have their examples along an axis where inputs have something else.

    Args:
        marks: where to note it.
        operands: of an operation.
        places: for each operand, which axis of the result each of its axes becomes, before the
            operation reduces it; a negative number for each index that it sums.
        result: of the operation.
    """
    inputs = []
    trained = None
    for item, axes in zip(operands, places, strict=True):
        if not marks.is_of_data(item) or is_given(marks, item):
            continue
        if not item.requires_grad:
            inputs.append((item, axes))
        elif trained is None and (layout := marks.layout_of(item)) is not None:
            trained = layout.along(axes[layout.axis])
    if trained is not None:
        note_inputs(marks, trained, inputs, result)


def note_inputs(
    marks: Marks, trained: Examples, inputs: Iterable[tuple[Tensor, Sequence[int]]], result: Tensor
) -> None:
    """Do the same, given the layout of the trained values in the result, and the inputs.

    Args:
        marks, result: as above.
        trained: where the examples of the trained values lie in the result.
        inputs: the other operands of data, each with its places.
    """
    if result.requires_grad and marks.batch_size > 1:
        if any(_crosses(marks, trained, *each) for each in inputs):
            marks.meetings.cross(result)


def _crosses(marks: Marks, trained: Examples, item: Tensor, axes: Sequence[int]) -> bool:
    """Whether an input has other examples, or something else, where the trained values have theirs.

    It also crosses if the contract's axis is its own alone, and the trained values have another.
    """
    owned = marks.owned(item)
    extends = {axis for axis, size in zip(axes, item.shape, strict=True) if size > 1}
    if is_lost_beside(marks, trained, item):
        return trained.axis in extends
    if not isinstance(owned, (Examples, Whole)):
        return False
    if isinstance(owned, Whole):
        # The first example's input may stand for all, such as a grid that the examples share.
        return owned.example > 0 and trained.axis in extends
    if (axis := axes[owned.axis]) != trained.axis:
        return trained.axis in extends or (trained.axis != marks.batch_dim == axis)
    # The trained rows may be sorted by position, and those of the input by example.
    return trained.segments is not None and owned.segments is None and owned.fold > 1


def is_lost_beside(marks: Marks, trained: Examples, item: Tensor) -> bool:
    """Whether an input lost its example axis, as the sum of inputs with different ones does.

    Trained values along the first axis are assumed to fit such an input. With another ``batch_dim``
    this tells nothing: inputs without that axis are marked in the same way.
    """
    if trained.axis == 0 or marks.batch_dim or marks.packed:
        return False
    return marks.is_marked(item) and marks.owned(item) is None


def note_picked(
    marks: Marks, call: Call, indices: Iterable[Tensor], layout: Examples, after: Layout
) -> None:
    """Do the same for the indices and masks of an operation that picks trained values.

    Args:
        marks: where to note it.
        call: the operation; for a write, the one that would read what is written to.
        indices: operands that tell what it picks.
        layout: where the examples lie in its first operand.
        after: where they lie in what it picks.
    """
    for index in indices:
        masks = index.dtype in MASKS
        trained = layout if masks else after
        places = places_of_mask(call, index) if masks else places_of_index(call, index)
        if isinstance(trained, Examples) and places is not None:
            note_inputs(marks, trained, [(index, places)], call.result)


def places_in_rows(func, operands: Sequence[Tensor]) -> list[Sequence[int]]:
    """Return the places of operands that are broadcast, or compared row by row as in a loss."""
    dims = max(map(Tensor.dim, operands))
    classes = ROW_LOSSES.get(func)

    def places(item: Tensor) -> Sequence[int]:
        if item.dim() == dims - 1 and isinstance(classes, int):
            # One class for each row, without the axis of scores that the other operand has.
            return [axis for axis in range(dims) if axis != classes % dims]
        return range(dims - item.dim(), dims)

    return [places(item) for item in operands]
