"""Where the examples lie in a tensor that data were written into.

The values decide: they must be written to places of their own examples. In a tensor that held no
example's values before, the examples may lie along any axis afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gradstats.capture.following._examples import Examples, Whole, same_rows, sole_of
from gradstats.capture.following._indexing import axes_until, dims_at, items_of, read_at
from gradstats.capture.following._reindexed import first_behind, same_behind
from gradstats.capture.operations._operations import ADDS_IN_PLACE, IN_PLACE, variants
from gradstats.capture.operations._rowwise import is_elementwise_in_place

# What a write does to the values that were there: it replaces them, adds to them, or changes them
# otherwise.
REPLACES, ADDS, CHANGES = "replaces", "adds", "changes"


@dataclass(frozen=True)
class Write:
    """What an operation writes into its first operand, and where.

    Attributes:
        values: what is written; data among them tell to which examples it belongs.
        dims: number of axes of the place.
        rest: how many of the operand's last axes the place covers whole.
        at: called with a number up to ``rest``, returns an index of the place in a tensor like the
            operand, but with size 1 along so many last axes; None if the values have another form.
        read: called with a layout of the operand, returns that of the place, or None if an index
            along the example axis does not tell it; None if the place is the whole operand.
        part_of: called with a value and the same number as ``at``, returns the part of the value
            that is written.
        how: what becomes of the values that were there.
        places: the index or mask by which a number is written, which then tells to which examples
            the places belong.
        reads: the operation that reads the place, and its arguments, if indices or masks give it.
    """

    values: tuple[Any, ...]
    dims: int
    rest: int
    at: Callable[[int], Any] | None = lambda rest: ...
    read: Callable[[Examples], Examples | Whole | None] | None = None
    part_of: Callable[[Tensor, int], Tensor] = lambda value, rest: value
    how: str = REPLACES
    places: Tensor | None = None
    reads: tuple[Any, tuple[Any, ...]] | None = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing is written, such as for examples without rows."""
        return bool(self.values) and all(
            isinstance(value, Tensor) and not value.numel() for value in self.values
        )

    def shares(
        self, layout: Examples, value: Tensor, owned: Examples | Whole, *, blank: bool
    ) -> bool:
        """Whether a value is written to places of its own examples, under a layout of the operand.

        Args:
            layout: of the operand.
            value, owned: what is written, and its layout.
            blank: whether the operand held nothing: then each row must be written to.
        """
        place = layout if self.read is None else self.read(layout)
        if isinstance(place, Examples) and isinstance(owned, Examples):
            if place.axis == owned.axis + self.dims - value.dim() and same_rows(place, owned):
                every = layout.plain and place.segments is None
                return every or not blank or self._reaches_all(layout, value.device)
        # If all rows belong to one example, they may lie along any axis.
        alone = sole_of(place)
        return not blank and isinstance(alone, Whole) and alone == sole_of(owned)

    def _reaches_all(self, layout: Examples, device: torch.device) -> bool:
        """Whether each row along the axis of a layout of the operand is written to."""
        rows = Examples(layout.rows, layout.axis)  # as if each were an example
        place = rows if self.read is None else self.read(rows)
        return isinstance(place, Examples) and len(place.owner(device).unique()) == layout.rows

    def mixes(self, layout: Examples, value: Tensor, owned: Examples | Whole) -> bool:
        """Whether each row gets values of another example's row beside its own."""
        place = layout if self.read is None or not layout.plain else self.read(layout)
        if not (isinstance(place, Examples) and isinstance(owned, Examples) and place.plain):
            return False
        return place.axis == owned.axis + self.dims - value.dim() and place.rows == owned.rows


def _everywhere(target: Tensor, *values, **named) -> Write:
    return Write((*values, *named.values()), target.dim(), target.dim())


def _put(target: Tensor, indices, values, accumulate=False) -> Write:
    return replace(_assigned(target, tuple(indices), values), how=ADDS if accumulate else REPLACES)


def _assigned(target: Tensor, index, value) -> Write:
    items = items_of(target, index)
    first = items[0] if items and isinstance(items[0], Tensor) else None
    reads = Tensor.__getitem__, (target, index)
    number = not isinstance(value, Tensor) or (value.dim() == 0 and not value.requires_grad)
    if number and first is not None and first.dtype == torch.bool and first.dim():
        # The mask covers the operand's first axes, and tells whose the rows are.
        behind = (1,) * (target.dim() - first.dim())
        return Write(
            (), first.dim(), 0, part_of=lambda mask, rest: mask.reshape(*mask.shape, *behind),
            places=first, reads=reads,
        )  # fmt: skip
    rows = first if number and target.dim() == 1 else None
    return Write(
        (value,) if rows is None else (), dims_at(target, items), target.dim() - axes_until(items),
        lambda rest: index, lambda layout: read_at(target, items, layout), places=rows, reads=reads,
    )  # fmt: skip


def _rows(target: Tensor, dim: int, index: Tensor, *values, **named) -> Write:
    value = values[0] if values else named.get("source", named.get("value"))
    if not target.dim():  # a number
        return _everywhere(target, value)
    axes = [slice(None)] * (dim % target.dim())
    return replace(_assigned(target, (*axes, index.reshape(-1)), value), reads=None)


def _scattered(target: Tensor, dim: int, index: Tensor, value=None, *reduction, **others) -> Write:
    value = others.get("src", others.get("value", value))
    if not target.dim():  # a number
        return replace(_everywhere(target, value), places=index)
    dim %= target.dim()

    def at(rest: int) -> tuple[Tensor, ...]:
        sizes = index.shape[: index.dim() - rest]
        ranges = [torch.arange(size, device=index.device) for size in sizes]
        places = [*torch.meshgrid(*ranges, indexing="ij")]
        places[dim] = first_behind(index, rest).reshape(sizes)
        return tuple(places)

    def read(layout: Examples) -> Examples | None:
        if layout.axis != dim:
            return layout if index.shape[layout.axis] == target.shape[layout.axis] else None
        # A row moves as a whole if all its elements go to the same place.
        rows = index.movedim(dim, 0).unsqueeze(-1).flatten(1)
        if rows.shape[1] == 0 or not bool((rows == rows[:, :1]).all()):
            return None
        return layout.owned_by(layout.owner(index.device)[rows[:, 0]], dim)

    def part_of(value: Tensor, rest: int) -> Tensor:
        return value[tuple(map(slice, index.shape[: index.dim() - rest]))]

    rest = min(_expanded_behind(index, target), target.dim() - 1 - dim)
    how = CHANGES if reduction or "reduce" in others else REPLACES
    return Write(
        (value,), target.dim(), rest, at, read, part_of, how, index,
        (Tensor.gather, (target, dim, index)),
    )  # fmt: skip


def _masked(target: Tensor, mask: Tensor, source: Tensor) -> Write:
    """The value's elements, in order, are written where the mask is true."""
    covered = mask.expand(torch.broadcast_shapes(mask.shape, target.shape))
    if covered.shape != target.shape:  # the result repeats the target
        return Write((source,), source.dim(), 0, None, lambda layout: None)
    same = same_behind(source.shape[1:], target.shape)

    def part_of(value: Tensor, rest: int) -> Tensor:
        return value.reshape(-1)[: int(first_behind(covered, rest).sum())]

    return Write(
        (source,), source.dim(), min(_expanded_behind(covered, target), same),
        lambda rest: first_behind(covered, rest), lambda layout: None, part_of,
        reads=(Tensor.masked_select, (target, mask)),
    )  # fmt: skip


def _expanded_behind(index: Tensor, target: Tensor) -> int:
    """Return along how many last axes an index that covers the operand is expanded."""
    axes = zip(reversed(index.stride()), reversed(index.shape), reversed(target.shape))  # noqa: B905
    return len([*takewhile(lambda axis: axis[0] == 0 and axis[1] == axis[2], axes)])


def _how(how: str, write: Callable[..., Write], **others: Any) -> Callable[..., Write]:
    return lambda *args, **named: replace(write(*args, **named), how=how, **others)


_CHANGED = _how(CHANGES, _everywhere, at=None)

# Operations that write into their first operand, or into a copy of it.
WRITES: dict[Any, Callable[..., Write]] = {
    **dict.fromkeys(IN_PLACE, _CHANGED),
    **dict.fromkeys(ADDS_IN_PLACE, _how(ADDS, _everywhere)),
    **dict.fromkeys((Tensor.copy_, Tensor.fill_diagonal_), _everywhere),
    Tensor.__setitem__: _assigned,
    **{
        function: write
        for write, names in (
            (_rows, ("index_copy", "index_fill")),
            (_how(ADDS, _rows), ("index_add",)),
            (_how(CHANGES, _rows), ("index_reduce",)),
            (_scattered, ("scatter",)),
            (_how(ADDS, _scattered), ("scatter_add",)),
            (_how(CHANGES, _scattered), ("scatter_reduce",)),
            (_put, ("index_put",)),
            (_masked, ("masked_scatter",)),
        )
        for name in names
        for function in variants(name, f"{name}_")
    },
}


def _out_of_place(method: Any) -> Any:
    name = method.__name__
    name = f"__{name[3:]}" if name.startswith("__i") else name[:-1]
    return getattr(Tensor, name, getattr(functional, name, None))


# In-place methods that change each element on its own, with the form that returns a new tensor.
OUT_OF_PLACE = {
    method: _out_of_place(method)
    for method in IN_PLACE
    if is_elementwise_in_place(method) and _out_of_place(method) is not None
}

# Other in-place methods, which are followed like the form that returns a new tensor.
CHANGES_IN_PLACE = {
    method: _out_of_place(method)
    for method in IN_PLACE
    if WRITES[method] is _CHANGED and not is_elementwise_in_place(method)
}
