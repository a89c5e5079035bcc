"""Where the examples lie in a tensor that is written to piece by piece, told by numbers.

Each write is repeated on a tensor with the number of each element's example, ``NOBODY`` where no
example's value was written. Along the last axes, if writes cover them whole, one element stands for
all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradstats.capture.following._examples import (
    Examples,
    Scores,
    Whole,
    same_layout,
    sole_of,
)
from gradstats.capture.following._marks import Marks
from gradstats.capture.following._reindexed import first_behind
from gradstats.capture.following._writes import REPLACES, Write

NOBODY = -1

# Values that were written, with their layouts.
Owned = Sequence[tuple[Tensor, Examples | Whole]]


class Found(NamedTuple):
    """Where the examples lie after a write.

    Attributes:
        layout: None if it is unknown.
        numbers: the example of each element, if further writes may tell more.
        meets: whether values of several examples met.
        supposed: whether rows that nothing was written to were supposed to be of some examples.
    """

    layout: Examples | Whole | None
    numbers: Tensor | None = None
    meets: bool = False
    supposed: bool = False


def lies_after(
    marks: Marks,
    write: Write,
    target: Tensor,
    owned: Owned,
    known: Examples | None = None,
    writes: int = 0,
    *,
    blank: bool = True,
) -> Found:
    """Return where the examples lie after a write, given the layouts of what was written.

    Args:
        write, target: what was written, and into what.
        owned: the values, with their layouts.
        known: the layout of the target before.
        writes: the number of changes of the target that the write was: 1 in place, else 0.
        blank: whether the target is known to have held no example's values.
    """
    noted = marks.values.owner_of(target, writes)
    blank = (blank and noted is None) or marks.values.was_blank(target, writes)
    blank |= write.how == REPLACES and write.read is None  # everything was replaced
    layouts = [known] if known else []
    for layout in [*layouts, *_of_its_size(marks, target, owned[0][1])] if blank else layouts:
        if all(write.shares(layout, *value, blank=blank) for value in owned):
            if noted is None or blank:
                return Found(layout)
            return Found(layout, _numbers_after(write, target, noted, owned)[0])
    before = numbers_before(marks, target, writes, blank=blank)
    if before is None or write.at is None or not target.numel():
        return Found(None, meets=known is not None)
    numbers, met = _numbers_after(write, target, before, owned)
    if known and not met and torch.equal(numbers, before.expand_as(numbers)):
        return Found(known, noted)
    found = Found(None, None, True)
    if not (met or _some_replaced(marks, target, before, numbers)):
        found = _settled(marks, target, numbers, owned[0][1], known)
    inputs = not any(item.requires_grad for item in [target, *(value for value, _ in owned)])
    if found.layout is None and known and inputs and not marks.packed:
        if all(write.mixes(known, *value) for value in owned):
            return Found(known)  # inputs meet, as in CutMix and Mixup: the target decides
    return found


def lies_behind(
    marks: Marks, view: Tensor, owned: Examples | Whole, base: Tensor, *, blank: bool
) -> Found:
    """Return where the examples lie in a contiguous tensor, a view of which was written to.

    Args:
        view, owned: the view, and its layout now.
        base, blank: the tensor, and whether it is known to have held no example's values.
    """
    before = numbers_before(marks, base, 1, blank=blank)
    if before is None:
        return Found(None)
    numbers = before.expand(base.shape).clone(memory_format=torch.contiguous_format)
    offset = view.storage_offset() - base.storage_offset()
    seen = numbers.as_strided(view.shape, view.stride(), offset)
    seen.copy_(numbers_of(view, owned, 0))
    if _some_replaced(marks, base, before, numbers):
        return Found(None)
    rest = _alike_behind(before, base.dim(), [(view, owned)])
    one = first_behind(numbers, rest)
    return _settled(marks, base, one.clone() if bool((numbers == one).all()) else numbers, owned)


def _some_replaced(marks: Marks, tensor: Tensor, before: Tensor, after: Tensor) -> bool:
    """Whether other examples' values replaced a part of one example's tensor.

    Its rows may be positions then, so that none need belong to another example.
    """
    had, same = before != NOBODY, before == after
    alone = isinstance(sole_of(marks.owned(tensor)), Whole)
    return alone and bool((had & same).any() & (had & ~same).any())


def numbers_before(
    marks: Marks, target: Tensor, writes: int = 0, *, blank: bool = False
) -> Tensor | None:
    """Return the example of each element of a tensor before its last writes; None if unknown.

    Args:
        target, writes: the tensor, and the number of these writes.
        blank: whether it is known to have held no example's values.
    """
    numbers = marks.values.owner_of(target, writes)
    if numbers is not None:
        return numbers
    if blank or marks.values.was_blank(target, writes):
        sizes = (1,) * target.dim()
        return torch.full(sizes, NOBODY, dtype=torch.int32, device=target.device)
    known = marks.owned(target)
    if isinstance(known, Scores) or not isinstance(known, (Examples, Whole)):
        return None
    return numbers_of(target, known, target.dim())


def numbers_of(tensor: Tensor, layout: Examples | Whole, rest: int) -> Tensor:
    """Return the example of each element; along up to ``rest`` last axes, one stands for all."""
    if isinstance(layout, Whole):
        whose = torch.full((), layout.example, dtype=torch.int32, device=tensor.device)
        return first_behind(whose.expand(tensor.shape), min(rest, tensor.dim()))
    return first_behind(layout.of_elements(tensor), min(rest, tensor.dim() - 1 - layout.axis))


def _numbers_after(
    write: Write, target: Tensor, numbers: Tensor, owned: Owned
) -> tuple[Tensor, Tensor]:
    """Return the example of each element after a write, and whether values of several meet.

    Args:
        write, target: what was written, and into what.
        numbers: the example of each element before.
        owned: the values, with their layouts.
    """
    rest = _alike_behind(numbers, write.rest, owned)
    sizes = [*target.shape[: target.dim() - rest], *[1] * rest]
    numbers = numbers.expand(sizes).clone(memory_format=torch.contiguous_format)
    place, met = write.at(rest) if write.at else ..., numbers.new_zeros((), dtype=torch.bool)
    for value, layout in owned:
        new = write.part_of(numbers_of(value, layout, rest), rest)
        if write.how != REPLACES:
            before = numbers[place]
            met |= ((before != NOBODY) & (before != new)).any()
        numbers[place] = new
        met |= (numbers[place] != new).any()  # two examples' were written to one place
    return numbers, met


def _alike_behind(numbers: Tensor, rest: int, owned: Owned) -> int:
    """Return along how many of the last axes, at most ``rest``, the examples are the same."""
    for value, layout in owned:
        if isinstance(layout, Examples):
            rest = min(rest, value.dim() - 1 - layout.axis)
    while rest and numbers.shape[-rest:] != (1,) * rest:
        rest -= 1
    return rest


def _settled(
    marks: Marks,
    target: Tensor,
    numbers: Tensor,
    owned: Examples | Whole,
    known: Examples | None = None,
) -> Found:
    """Return where the examples lie in a tensor after a write.

    Args:
        target: the tensor.
        numbers: the example of each element.
        owned: the layout of what was written.
        known: the layout of the tensor before, which stays if it still fits.
    """
    if not numbers.numel():
        return Found(None)
    rows = dict(_rows(target, numbers))
    one = int(numbers.amax())
    alone = bool(((numbers == NOBODY) | (numbers == one)).all())
    if not alone and (told := [*_told(marks, rows)]):
        # If some elements were not written to, the layout by contract may fit as well.
        ordinary = [own for own in _of_its_size(marks, target, marks.contract) if _fits(rows, own)]
        differ = any(not same_layout(told[0], other) for other in (*told, *ordinary))
        if not differ or bool((numbers != NOBODY).all()):
            return Found(told[0])
        return Found((ordinary or told)[0], numbers, supposed=True)
    if known and _fits(rows, known):
        return Found(known, numbers)
    fitting = [own for own in _likely(marks, target, owned) if _fits(rows, own)]
    found = fitting[0] if fitting else None
    if marks.packed and not all(same_layout(found, other) for other in fitting):
        found = None  # rows that nothing was written to may be one example's or another's
    if found is None and alone and isinstance(owned, Whole):
        # In a tensor with as many rows as the batch, nobody's rows may be those of other examples.
        of_others = marks.packed and marks.has_example_axis(target) and int(numbers.amin()) != one
        return Found(owned, numbers, supposed=of_others)
    supposed = False
    if marks.packed and not marks.has_example_axis(target):
        # Rows that nothing was written to, such as nodes without neighbours after pooling, are
        # supposed to be those of the same examples as in other tensors with as many rows.
        others = [own.along(axis) for axis in rows for own in marks.known_of(target.shape[axis])]
        others = [own for own in others if _fits(rows, own)]
        alike = all(same_layout(others[0], other) for other in others)
        supposed = bool(others) and not (alike and same_layout(found, others[0]))
        found = others[0] if others and alike else found
    return Found(found, numbers, supposed=supposed)


def _rows(target: Tensor, numbers: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield each axis whose rows hold values of one example each, with the example of each row."""
    for axis, size in enumerate(target.shape):
        if numbers.shape[axis] == size:
            each = numbers.movedim(axis, 0).reshape(size, -1)
            owner = each.amax(1)
            if bool(((each == NOBODY) | (each == owner[:, None])).all()):
                yield axis, owner


def _told(marks: Marks, rows: dict[int, Tensor]) -> Iterator[Examples]:
    """Yield the layout along each axis of which all rows hold values of an example."""
    for axis, owner in rows.items():
        if bool((owner != NOBODY).all()):
            yield marks.contract.owned_by(owner.long(), axis)


def _fits(rows: dict[int, Tensor], layout: Examples) -> bool:
    """Whether a layout agrees with the rows' examples; rows that are nobody's fit any.

    Args:
        rows: the example of each row, by axis.
    """
    if (own := rows.get(layout.axis)) is None:
        return False
    return bool(((own == NOBODY) | (own == layout.owner(own.device))).all())


def _likely(marks: Marks, target: Tensor, owned: Examples | Whole) -> Iterator[Examples]:
    """Yield the layouts that a tensor may have, the likeliest first.

    Args:
        target: the tensor.
        owned: the layout of what was written into it.
    """
    yield from _of_its_size(marks, target, owned)
    contract = marks.contract
    # Packed examples may have one row each, as pooled graphs do.
    yield from _several(target, Examples(contract.batch, 0), 1 if marks.packed else 2)
    if marks.packed:
        # Or several for each of their rows, as the nodes of graphs have for their neighbours.
        yield from _several(target, contract, 2)


def _of_its_size(marks: Marks, target: Tensor, owned: Examples | Whole) -> Iterator[Examples]:
    """Yield the contract's layout, and a value's, along each axis with as many rows."""
    for layout in (marks.contract, owned):
        if isinstance(layout, Examples):
            sizes = enumerate(target.shape)
            yield from (layout.along(axis) for axis, size in sizes if size == layout.rows)


def _several(target: Tensor, each: Examples, fewest: int) -> Iterator[Examples]:
    """Yield layouts with as many rows, at least ``fewest``, for each row of another layout."""
    for axis, size in enumerate(target.shape):
        count, rest = divmod(size, each.rows)
        if count >= fewest and rest < 2:
            owner = each.owner(target.device).repeat_interleave(count)
            # One more row may take what overflows.
            yield each.owned_by(torch.cat([owner, owner[-1:]]) if rest else owner, axis)
