"""Where the examples lie in tensors that are concatenated or stacked."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradstats.capture.following._crossed import note_crossed
from gradstats.capture.following._examples import (
    Examples,
    Layout,
    Whole,
    same_rows,
    sole_of,
)
from gradstats.capture.following._marks import Marks
from gradstats.capture.following._operands import is_of_another, is_padding, sole_example
from gradstats.capture.operations._call import Call
from gradstats.capture.operations._operations import JOINS, PAD_SEQUENCE


def joined_layout(marks: Marks, call: Call) -> Layout:
    """Return the layout of the result of an operation of ``JOINS``, or of ``PAD_SEQUENCE``."""
    if call.func is PAD_SEQUENCE:
        return _of_padded_sequences(marks, call)
    tensors = list(call.argument(0, "tensors"))
    # Loops often start from an empty tensor. It counts only if no other tensor is data.
    full = [tensor for tensor in tensors if tensor.numel()]
    tensors = full if any(map(marks.is_of_data, full)) else tensors
    result, dim = call.result, JOINS[call.func]
    if dim is None:
        dim = call.argument(1, "dim", 0) % result.dim()
    elif any(tensor.dim() <= max(dim, 1) for tensor in tensors):
        return None  # they get an axis first, or are joined along another one
    owners = _owners(marks, tensors)
    stacked = call.func is torch.stack
    axes = [axis for axis in range(result.dim()) if not (stacked and axis == dim)]
    note_crossed(marks, tensors, [axes] * len(tensors), result)
    padding = [is_padding(marks, item) for item in tensors]
    if any(padding):
        owners = [sole_of(owned) for owned in owners]
    if not any(isinstance(owned, Whole) for owned in owners):
        found = _in_line(marks, tensors, owners, dim, result, stacked=stacked)
        alone = [sole_of(owned) for owned in owners]
        if found is not None or alone == owners:
            return found
        owners = alone
    layout = _side_by_side(marks, tensors, owners, dim, stacked=stacked)
    if not any(padding) or not isinstance(layout, (Examples, Whole)):
        return layout
    of_batch = dim == marks.batch_dim and marks.contract.fits(result)
    if isinstance(layout, Whole):
        if of_batch and sum(padding) == 1 and _are_in_place(marks, owners, padding):
            marks.meetings.suppose(result)  # of two examples, it may be in the other one's place
        return layout
    one = sole_example(marks, call.data)
    fills = [pads or owned is None for pads, owned in zip(padding, owners, strict=True)]
    if _are_in_place(marks, owners, fills):
        # Several forms show that each is an example's own; a single one may be that of the first.
        own = _are_in_place(marks, owners, [owned is None for owned in owners])
        forms = [owned for owned, pads in zip(owners, padding, strict=True) if pads]
        told = one is None or (own and forms != [Whole(0)])
        if not told:
            marks.meetings.suppose(result)  # it may fill up the batch or the example's rows
        if told or (own and of_batch):
            # What is in an example's place is its, whatever its form.
            places: list[Layout] = [Whole(place) for place in range(marks.batch_size)]
            return _side_by_side(marks, tensors, places, dim, stacked=stacked)
    elif one is None and layout.segments is not None:
        held = _held(marks, tensors, owners, padding)
        if 0 < len(held) < marks.batch_size:
            marks.meetings.suppose(result)  # it may be in the place of an example that has no rows
    return one or layout


def _of_padded_sequences(marks: Marks, call: Call) -> Layout:
    """Return the layout of sequences that ``PAD_SEQUENCE`` pads to one length and stacks."""
    parts = call.args[0]
    place = 0 if call.argument(1, "batch_first") else 1
    rest = [part for part in parts if part.requires_grad or marks.is_marked(part)]
    uneven = len({len(part) for part in parts}) > 1
    if uneven and not rest and len(parts) == marks.batch_size and not marks.packed:
        # One sequence for each example, even if some are as long as there are examples.
        return Examples(marks.batch_size, place)
    owners = [
        sole_of(owned) if part.numel() else None
        for part, owned in zip(parts, _owners(marks, parts), strict=True)
    ]
    return _side_by_side(marks, parts, owners, place, stacked=True)


def _held(
    marks: Marks, tensors: Sequence[Tensor], owners: Sequence[Layout], padding: Sequence[bool]
) -> set[int]:
    """Return the examples that have rows in tensors that are not padding."""
    held: set[int] = set()
    for tensor, owned, pads in zip(tensors, owners, padding, strict=True):
        if isinstance(owned, Examples):
            held.update(owned.owner(tensor.device).tolist())
        elif isinstance(owned, Whole) and not pads:
            held.add(owned.example)
    return held


def _are_in_place(marks: Marks, owners: Sequence[Layout], fills: Sequence[bool]) -> bool:
    """Whether there is one tensor for each example, in order, but for those that fill up."""
    return len(owners) == marks.batch_size and all(
        fills_up or owned == Whole(place)
        for place, (owned, fills_up) in enumerate(zip(owners, fills, strict=True))
    )


def _owners(marks: Marks, tensors: Sequence[Tensor]) -> list[Layout]:
    """Return the layout of each of several tensors; None for one without examples."""
    return [marks.owned(tensor) if marks.is_of_data(tensor) else None for tensor in tensors]


def _in_line(
    marks: Marks,
    tensors: Sequence[Tensor],
    owners: list[Layout],
    dim: int,
    result: Tensor,
    *,
    stacked: bool,
) -> Examples | None:
    """Return the layout of joined tensors, none of which belongs to one example as a whole."""
    trained = [tensor for tensor in tensors if tensor.requires_grad and marks.is_of_data(tensor)]
    others = not trained and any(is_of_another(marks, tensor) for tensor in tensors)
    if others or any(map(marks.is_lost, trained)):
        return None
    known = [owned for owned in owners if isinstance(owned, Examples)]
    if not known:
        told = any(marks.values.owner_of(tensor) is not None for tensor in tensors)
        return None if told or any(map(marks.is_marked, tensors)) else marks.by_contract(result)
    if stacked:
        known = [layout.along(layout.axis + (dim <= layout.axis)) for layout in known]
        dim = -1
    elif dim == known[0].axis and len(known) < len(tensors):
        placed = [
            owned if isinstance(owned, Examples) else _supposed(marks, tensor, dim)
            for tensor, owned in zip(tensors, owners, strict=True)
        ]
        known = [layout for layout in placed if layout is not None]
        if len(known) < len(tensors) or not trained:
            return None
        marks.meetings.suppose(result)
    return _joined(known, dim, result.device)


def _supposed(marks: Marks, constant: Tensor, axis: int) -> Examples | None:
    """Return the layout that a constant is supposed to have that is joined to packed rows.

    Its rows are nobody's, such as the weights of self-loops that a graph layer adds to those of
    edges. If they are taken for another example's, they are refused where they meet its rows.
    """
    if not marks.packed or marks.is_of_data(constant):
        return None
    rows = constant.shape[axis]
    if rows == marks.contract.rows:
        return marks.contract.along(axis)
    likely = [*marks.known_of(rows)]
    return likely[0].along(axis) if len(likely) == 1 else None


def _joined(layouts: Sequence[Examples], dim: int, device: torch.device) -> Examples | None:
    """Return the layout of tensors joined along ``dim``, given the layout of each of them."""
    first = layouts[0]
    if any(layout.axis != first.axis for layout in layouts):
        return None
    if dim != first.axis:
        return first if all(same_rows(first, layout) for layout in layouts) else None
    return first.owned_by(torch.cat([layout.owner(device) for layout in layouts]), dim)


def _side_by_side(
    marks: Marks, tensors: Sequence[Tensor], owners: list[Layout], dim: int, *, stacked: bool
) -> Layout:
    """Return the layout of tensors joined along ``dim``, some of them of one example each."""
    examples: list[int] = []
    of_data: set[int] = set()
    for tensor, owned in zip(tensors, owners, strict=True):
        rows = 1 if stacked else tensor.shape[dim]
        if isinstance(owned, Whole):
            examples += [owned.example] * rows
            of_data.add(owned.example)
        elif isinstance(owned, Examples) and owned.axis == dim and not stacked:
            of_rows = owned.owner(tensor.device).tolist()
            examples += of_rows
            of_data.update(of_rows)
        elif owned is None and not (tensor.numel() and marks.is_marked(tensor)):
            # A constant, or padding instead of rows that do not exist, counts for the examples in
            # whose places it is, if all others are in their places.
            examples += range(len(examples), len(examples) + rows)
        else:
            return None
    if any(owned is None for owned in owners):
        # Beside rows of a single example, a constant may belong to that one too.
        if examples != list(range(marks.batch_size)) or len(of_data) == 1 < marks.batch_size:
            return None
    if not examples:
        return None
    owner = torch.tensor(examples, device=tensors[0].device)
    return sole_of(Examples(marks.batch_size, dim).owned_by(owner, dim))
