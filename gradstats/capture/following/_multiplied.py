"""Where the examples lie in products and convolutions of data."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import chain

import torch
from torch import Tensor

from gradstats._compiler import is_compiling
from gradstats.capture.following._apart import (
    differing_pairs,
    packs,
    scores,
    scores_keep_apart,
    weights_keep_apart,
    without_columns,
)
from gradstats.capture.following._crossed import note_crossed
from gradstats.capture.following._examples import (
    MIXED,
    Examples,
    Layout,
    Mixed,
    Scores,
    Whole,
    axes_of,
    same_layout,
    same_rows,
)
from gradstats.capture.following._marks import Marks
from gradstats.capture.following._numbered import NOBODY
from gradstats.capture.following._slots import placed, slots_of
from gradstats.capture.following._taken import without_given
from gradstats.capture.operations._call import Call
from gradstats.capture.operations._einsum import Equation
from gradstats.capture.operations._nested import is_among
from gradstats.capture.operations._operations import TRANSPOSED_CONVOLUTIONS


def by_equation(
    marks: Marks, operands: Sequence[Tensor], equation: Equation, result: Tensor
) -> Layout:
    """Return the layout of a contraction that an equation describes."""
    inputs, out = equation
    summed = dict.fromkeys(index for index in chain(*inputs) if index not in out)
    numbers = {index: -place for place, index in enumerate(summed, 1)}
    numbers |= {index: axis for axis, index in enumerate(out)}
    places = [[numbers[index] for index in indices] for indices in inputs]
    return contraction(marks, operands, places, result)


def contraction(
    marks: Marks,
    operands: Sequence[Tensor],
    places: Sequence[Sequence[int]],
    result: Tensor,
    lies: Callable[[int, Examples], Examples | None] | None = None,
) -> Layout:
    """Return the layout of a contraction.

    Args:
        operands: what is contracted.
        places: for each operand, which axis of the result each of its axes becomes; a negative
            number for each index that is summed.
        result: of the contraction.
        lies: called with the position and the layout of an operand, returns where its examples lie
            in the result, or None if they are summed; by default ``places`` tell.
    """
    if not marks.packed:  # of packed rows, values tell
        note_crossed(marks, operands, places, result)

    def kept_along(at: int, layout: Examples) -> Examples | None:
        axis = places[at][layout.axis]
        return None if axis < 0 else layout.along(axis)

    lies = lies or kept_along
    kept, gone = [], []
    indices = set()
    every = marks.data_among(operands)
    data = without_given(marks, every)
    for at, tensor in enumerate(operands):
        if not is_among(tensor, data):
            continue
        layout = marks.layout_of(tensor)
        if layout is None:
            if not marks.is_marked(tensor):
                continue
            if isinstance(marks.owned(tensor), Whole):
                marks.meetings.note(result)
                return None
            by_slots = _of_slots(marks, operands, places, result)
            return by_slots or _of_weighted_sums(marks, operands, places, result)
        if isinstance(layout, Scores):
            rows, columns = (lies(at, side) for side in layout.sides)
            if rows and columns and len(every) == 1:
                return scores([rows, columns], result)
            if not scores_keep_apart(tensor, layout):
                marks.meetings.note(result)
                return None
            layout = without_columns(layout)
        after = lies(at, layout)
        if after is not None:
            kept.append((tensor, after))
            continue
        if kept and packs(marks, [layout]):
            if len(places) == 2 and _sums_own_rows(marks, operands[0], places, layout, result):
                # This depends on values, so it must not be cached, which an owner prevents.
                marks.values.note(result, owner=kept[0][1].of_elements(result))
                continue
            if marks.packed or layout.segments is not None:
                marks.meetings.note(result)
                return None
        gone.append((tensor, layout))
        if tensor.requires_grad:
            indices.add(places[at][layout.axis])
    if not kept:
        found = _of_weighted_sums(marks, operands, places, result)
        if found is not None or marks.values.owner_of(result) is not None:
            return found
    if len(indices) > 1 and marks.batch_size > 1:
        _couple_all(marks, result)
        return MIXED
    return _product(marks, kept, gone, result)


def convolved(call: Call, place: int, layout: Examples) -> Examples | None:
    """Return the layout of a convolution's result by that of an operand; None if it is summed.

    Examples along the channels, in groups of as many for each, have kernels of their own.

    Args:
        call: the convolution.
        place, layout: the operand's position, and where its examples lie.
    """
    result = call.result
    if place == 0 and layout.axis == 0:
        return layout
    if layout.axis != (1 if place == 0 else 0):
        return None
    owner = layout.owner(result.device)
    if place == 0 or (place == 1 and call.func in TRANSPOSED_CONVOLUTIONS):
        groups = call.argument(6, "groups", 1)
        owners = owner.view(groups, -1)
        if not bool((owners == owners[:, :1]).all()):
            return None  # examples are summed
        owner = owners[:, 0].repeat_interleave(result.shape[1] // groups)
    return layout.owned_by(owner, 1)


def convolved_places(call: Call, operands: Sequence[Tensor]) -> list[list[int]]:
    """Return which axis of a convolution's result each axis of its operands becomes.

    Channels of the input and positions in the kernels are summed: negative numbers.
    """
    channels = -1 if call.argument(6, "groups", 1) == 1 else 1
    data, kernels = [0, channels], [1, -1]
    if call.func in TRANSPOSED_CONVOLUTIONS:
        kernels = [channels, 1]
    for axis in range(2, call.result.dim()):
        data.append(axis)
        kernels.append(-axis)
    return [data, kernels, [1]][: len(operands)]


def _sums_own_rows(
    marks: Marks,
    weights: Tensor,
    places: Sequence[Sequence[int]],
    rows: Examples,
    result: Tensor,
) -> bool:
    """Whether the weights by which packed rows are summed are zero for rows of other examples.

    Args:
        weights: the first of two operands.
        places: as for ``contraction``.
        rows: the layout of the second operand.
        result: the sums.
    """
    of_weights, summed = marks.layout_of(weights), places[1][rows.axis]
    if of_weights is None or summed not in places[0]:
        return False
    if not result.requires_grad:
        return True
    apart = weights_keep_apart(weights, of_weights, rows.along(places[0].index(summed)))
    if apart and weights.requires_grad and not isinstance(of_weights, Scores):
        if bool(differing_pairs(of_weights, rows, weights.device).any()):
            marks.meetings.weighed.add(result.grad_fn)
    return apart


def _of_weighted_sums(
    marks: Marks, operands: Sequence[Tensor], places: Sequence[Sequence[int]], result: Tensor
) -> Examples | Whole | None:
    """Return the layout of sums of rows, if each sums rows of one example, to which it belongs.

    Such are products with a transposed adjacency matrix, pooling by a matrix, and rows dispatched
    to the slots of experts. The weights must be given: a trained weight passes on a gradient even
    where it is zero.

    Args:
        operands, places, result: as for ``contraction``.
    """
    trained = [at for at, operand in enumerate(operands) if operand.requires_grad]
    if len(operands) != 2 or len(trained) != 1 or marks.batch_size == 1 or is_compiling():
        return None
    (at,) = trained
    rows, weights, kept_at = operands[at], operands[1 - at], places[1 - at]
    layout = marks.layout_of_rows(rows)
    if layout is None:
        return None
    several = [axis for axis, size in enumerate(weights.shape) if size > 1]
    sums = sorted((a for a in several if kept_at[a] >= 0), key=kept_at.__getitem__)
    summed = [axis for axis in several if kept_at[axis] == places[at][layout.axis] < 0]
    if not sums or len(summed) != 1 or len(several) != len(sums) + 1:
        return None
    owner = _owner_of_sums(weights, (*sums, *summed), layout)
    if owner is None:
        return None
    sizes = [1] * result.dim()
    for axis in sums:
        sizes[kept_at[axis]] = weights.shape[axis]
    return placed(marks, result, owner.int().view(sizes))


def _owner_of_sums(weights: Tensor, axes: Sequence[int], rows: Examples) -> Tensor | None:
    """Return the example whose rows each sum counts, ``NOBODY`` for those that count none.

    Args:
        weights: of the rows in each sum.
        axes: of the weights: those of the sums, then that of the rows.
        rows: the layout of the rows.

    Returns:
        The examples, one for each sum; None if a sum counts rows of several.
    """
    values = weights.detach()
    if values.layout is torch.strided:
        places = values.nonzero()
    else:
        values = values.to_sparse_coo().coalesce()
        places = values.indices().T[values.values().ne(0)]
    *sums, summed = axes
    of_rows, of_sums = rows.owner(values.device)[places[:, summed]], places.new_zeros(len(places))
    for axis in sums:
        of_sums = of_sums * weights.shape[axis] + places[:, axis]
    none = of_rows.new_full((math.prod(weights.shape[axis] for axis in sums),), NOBODY)
    first, last = (
        none.scatter_reduce(0, of_sums, of_rows, each, include_self=False)
        for each in ("amin", "amax")
    )
    return first if torch.equal(first, last) else None


def _of_slots(
    marks: Marks, operands: Sequence[Tensor], places: Sequence[Sequence[int]], result: Tensor
) -> Examples | None:
    """Return the layout of rows that are combined from those in experts' slots.

    Args:
        operands, places, result: as for ``contraction``.
    """
    if len(operands) != 2:
        return None
    found = [slots_of(marks, operand) for operand in operands]
    if (found[0] is None) == (found[1] is None):
        return None
    at = 0 if found[1] is None else 1
    owner, weights = found[at], operands[1 - at]
    assert owner is not None
    own = marks.layout_of_rows(weights)
    if own is None:
        return None
    of_slots, of_weights = places[at], places[1 - at]
    kept, axes = of_weights[own.axis], axes_of(owner)
    if kept < 0 or kept in of_slots or not {of_slots[axis] for axis in axes} <= {*of_weights}:
        return None
    # The examples of the slots, in the order of the weights' axes.
    order = [of_weights.index(of_slots[axis]) for axis in axes]
    if any(
        weights.shape[axis] != owner.shape[mine] for axis, mine in zip(order, axes, strict=True)
    ):
        return None
    first: tuple[slice | int, ...] = tuple(
        slice(None) if axis in axes else 0 for axis in range(owner.dim())
    )
    numbers = owner[first].permute([order.index(axis) for axis in sorted(order)])
    sizes = [weights.shape[axis] if axis in order else 1 for axis in range(weights.dim())]
    others = numbers.view(sizes) != own.of_elements(weights)
    if bool((others & weights.detach().ne(0)).any()):
        marks.meetings.note(result)
        return None
    if weights.requires_grad and bool(others.any()):
        marks.meetings.weighed.add(result.grad_fn)
    return own.along(kept)


def _product(
    marks: Marks,
    kept: Sequence[tuple[Tensor, Examples]],
    gone: Sequence[tuple[Tensor, Examples]],
    result: Tensor,
) -> Examples | Mixed | None:
    """Return the layout of a product.

    Args:
        kept: operands of data, with where their examples lie in the product.
        gone: those whose examples are summed, with where they lie in the operand.
        result: the product.
    """
    trained = [layout for tensor, layout in kept if tensor.requires_grad]
    if gone:
        return _summed(marks, bool(trained), gone, result)
    found = trained or [layout for _, layout in kept]
    if not found:
        return marks.by_contract(result)
    axes = {layout.axis for layout in found} if marks.batch_size > 1 else ()
    layouts = [layout for _, layout in kept]
    if len({layout.axis for layout in layouts}) > 1:
        if marks.packed and not result.requires_grad:
            return layouts[0]
        pack = result.requires_grad and packs(marks, layouts)
        pairs = scores(layouts, result) if pack else None
        if pairs is not None or marks.packed:
            return pairs
    if not trained and len(axes) > 1:
        return None  # such as by a matrix with as many positions as there are examples
    if len(axes) > 1:
        _couple_all(marks, result)
    elif any(not same_layout(trained[0], other) for other in trained[1:]):
        marks.meetings.note(result)
        return None
    return found[0]


def _summed(
    marks: Marks, meets: bool, gone: Sequence[tuple[Tensor, Examples]], result: Tensor
) -> Mixed | None:
    """Return the layout of a product that sums over the examples of some operands.

    Args:
        meets: whether they meet trained values whose examples are not summed.
        gone: these operands, with where their examples lie.
        result: the product.
    """
    trained = [layout for tensor, layout in gone if tensor.requires_grad]
    if not trained or marks.batch_size == 1:
        return None
    if marks.packed and len(trained) == 1:
        return None  # the other factor may sum the rows of each example, as in pooling
    if meets:
        _couple_all(marks, result)
    elif not all(same_rows(trained[0], other) for other in trained[1:]):
        marks.meetings.note(result)
    return MIXED


def _couple_all(marks: Marks, result: Tensor) -> None:
    """Note that every example meets every other; the losses' graph shows if they depend on it."""
    size = marks.batch_size
    marks.meetings.couple(
        result,
        f"multiplies every example with every other ({size} × {size} products of trained values, "
        "as contrastive losses form them)",
    )
