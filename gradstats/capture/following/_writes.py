"""Where the examples lie in a tensor that data were written into.

The values decide: the place written to must belong to the same examples. In a tensor that held no
example's values before, the examples may lie along any axis afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gradstats.capture.following._examples import Examples, Whole, same_rows, sole_of
from gradstats.capture.following._indexing import dims_at, items_of, read_at
from gradstats.capture.operations._operations import ADDS_IN_PLACE, IN_PLACE, variants
from gradstats.capture.operations._rowwise import is_elementwise_in_place


@dataclass(frozen=True)
class Write:
    """What an operation writes into its first operand, and where.

    Attributes:
        values: what is written; data among them determine to which examples it belongs.
        read: called with the operand and a layout of it, returns that of the place written to; None
            where the place is the whole operand.
        dims: number of axes of the place.
        index: where a number is written to some rows, which rows; where a mask is true, the mask.
        places: which places are written to, where these can be some of each example; where no data
            are written, they say to which examples it belongs.
        keeps_sums: whether places that held sums over the examples do so after such are written.
        is_part: tells whether some of what was there remains; None where that is not known.
        replaced: returns which elements of the operand are replaced; None where that is not known.
        reads: the operation that reads the place, and its arguments, where indices or masks tell
            which it is.
    """

    values: tuple[Any, ...]
    read: Callable[[Tensor, Examples], Examples | Whole | None] | None
    dims: int
    index: Tensor | None = None
    places: Tensor | None = None
    keeps_sums: bool = True
    is_part: Callable[[], bool] | None = None
    replaced: Callable[[], Tensor] | None = None
    reads: tuple[Any, tuple[Any, ...]] | None = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing is written, as for examples that have no rows."""
        return bool(self.values) and all(
            isinstance(value, Tensor) and not value.numel() for value in self.values
        )

    def agrees(
        self, target: Tensor, layout: Examples, value: Tensor, owned: Examples | Whole
    ) -> bool:
        """Whether a value is written to places of its own examples, under a layout of the operand.

        Args:
            target, layout: the operand, and its layout.
            value: what is written.
            owned: where the examples lie in ``value``.
        """
        place = layout if self.read is None else self.read(target, layout)
        if isinstance(place, Examples) and isinstance(owned, Examples):
            if place.axis == owned.axis + self.dims - value.dim() and same_rows(place, owned):
                return True
        # Rows that all belong to one example may lie along any axis.
        alone = sole_of(place)
        return isinstance(alone, Whole) and alone == sole_of(owned)

    def mixes(
        self, target: Tensor, layout: Examples, value: Tensor, owned: Examples | Whole
    ) -> bool:
        """Whether a value puts a part of another row into each row, under a plain layout."""
        place = layout if self.read is None or not layout.plain else self.read(target, layout)
        if not (isinstance(place, Examples) and isinstance(owned, Examples) and place.plain):
            return False
        same = place.axis == owned.axis + self.dims - value.dim() and place.rows == owned.rows
        return same and self.is_part is not None and self.is_part()


def _everywhere(target: Tensor, *values, **named) -> Write:
    return Write((*values, *named.values()), None, target.dim(), keeps_sums=False)


def _copied(target: Tensor, *values, **named) -> Write:
    return replace(_everywhere(target, *values, **named), keeps_sums=True)


def _added(target: Tensor, *values, **named) -> Write:
    return replace(_copied(target, *values, **named), is_part=lambda: True)


def _put(target: Tensor, indices, values, accumulate=False) -> Write:
    write = _assigned(target, tuple(indices), values)
    return replace(write, replaced=None) if accumulate else write


def _assigned(target: Tensor, index, value) -> Write:
    items = items_of(target, index)
    mask = items[0] if items else None
    reads = Tensor.__getitem__, (target, index)

    def replaced() -> Tensor:
        found = torch.zeros(target.shape, dtype=torch.bool, device=target.device)
        found[index] = True
        return found

    if isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.dim() and _is_number(value):
        # The mask says whose the rows are, of the whole operand, whose first axes it covers.
        return Write((), None, mask.dim(), mask, replaced=replaced, reads=reads)
    return Write(
        (value,),
        lambda target, layout: read_at(target, items, layout),
        dims_at(target, items),
        _rows_of_number(target, value, items[0] if items else None),
        is_part=lambda: target.detach()[index].numel() < target.numel(),
        replaced=replaced,
        reads=reads,
    )


def _rows_of_number(target: Tensor, value, index) -> Tensor | None:
    """Return the rows that a number is written to; None for other values and other places."""
    rows = target.dim() == 1 and isinstance(index, Tensor) and index.dtype != torch.bool
    return index if rows and _is_number(value) else None


def _is_number(value) -> bool:
    return not isinstance(value, Tensor) or (value.dim() == 0 and not value.requires_grad)


def _rows(target: Tensor, dim: int, index: Tensor, *values, **named) -> Write:
    value = values[0] if values else named.get("source", named.get("value"))
    dim %= max(1, target.dim())  # as PyTorch has it, a number lies along one axis

    def read(target: Tensor, layout: Examples) -> Examples:
        if layout.axis != dim:
            return layout
        return layout.owned_by(layout.owner(index.device)[index.view(-1)], dim)

    of_number = _rows_of_number(target, value, index)
    reduces = len(values) > 1 or "reduce" in named
    return Write((value,), read, target.dim(), of_number, keeps_sums=not reduces)


def _scattered(target: Tensor, dim: int, index: Tensor, value=None, *reduction, **others) -> Write:
    value = others.get("src", others.get("value", value))
    dim %= max(1, target.dim())  # as PyTorch has it, a number lies along one axis

    def read(target: Tensor, layout: Examples) -> Examples | None:
        if layout.axis != dim:
            return layout if index.shape[layout.axis] == target.shape[layout.axis] else None
        # Rows move as a whole if all elements of one go to the same place.
        rows = index.movedim(dim, 0).flatten(1) if index.dim() > 1 else index.unsqueeze(1)
        if rows.shape[1] == 0 or not bool((rows == rows[:, :1]).all()):
            return None
        return layout.owned_by(layout.owner(index.device)[rows[:, 0]], dim)

    reduces = bool(reduction) or "reduce" in others
    reads = Tensor.gather, (target, dim, index)
    return Write((value,), read, target.dim(), places=index, keeps_sums=not reduces, reads=reads)


def _masked(target: Tensor, mask: Tensor, source: Tensor) -> Write:
    """The elements of the value, in order, written where the mask is true.

    So each row of the mask takes as many of them as it has true elements.
    """

    rows, width = source.shape[:1].numel(), source.shape[1:].numel() if source.dim() else 0

    def read(target: Tensor, layout: Examples) -> Examples | None:
        if torch.broadcast_shapes(mask.shape, target.shape) != target.shape:
            return None  # the mask repeats the target
        counts = layout.lead(mask.expand(target.shape)).reshape(layout.rows, -1).sum(1)
        if layout.axis != 0 or not width or bool((counts % width).any()):
            return None
        owner = layout.owner(target.device).repeat_interleave(counts // width)
        return layout.owned_by(owner, 0) if len(owner) == rows else None

    return Write((source,), read, source.dim(), reads=(Tensor.masked_select, (target, mask)))


# Operations that write into their first operand, or into a copy of it.
WRITES: dict[Any, Callable[..., Write]] = {
    **dict.fromkeys(IN_PLACE, _everywhere),
    **dict.fromkeys(ADDS_IN_PLACE, _added),
    Tensor.copy_: _copied,
    Tensor.__setitem__: _assigned,
    **{
        function: write
        for write, names in (
            (_rows, ("index_add", "index_copy", "index_fill", "index_reduce")),
            (_scattered, ("scatter", "scatter_add", "scatter_reduce")),
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


# What in-place methods that change each element on its own do, in the form that returns a new
# tensor.
OUT_OF_PLACE = {
    method: _out_of_place(method)
    for method in IN_PLACE
    if is_elementwise_in_place(method) and _out_of_place(method) is not None
}

# In-place methods that are followed like the form that returns a new tensor.
CHANGES_IN_PLACE = {
    method: _out_of_place(method)
    for method in IN_PLACE
    if WRITES[method] is _everywhere and not is_elementwise_in_place(method)
}
