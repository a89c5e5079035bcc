"""Steps back through operations that join, pad or reorder elements.

Running the operation on the elements' numbers tells which element is where. If it picks rows and
columns independently, an outer product stays one: its sides are picked.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradstats._compiler import is_compiling
from gradstats._factors import (
    Experts,
    Factor,
    Outer,
    Ragged,
    Rows,
    Vector,
    added,
    cast,
    compute_dtype,
)
from gradstats.capture.operations._nested import rebuild
from gradstats.capture.operations._operations import JOINS, PADS, variants
from gradstats.capture.parameters._derivation import Derived
from gradstats.capture.parameters._derived import OutOfPlace
from gradstats.capture.parameters._lean_normalisations import Flattened
from gradstats.capture.parameters._lean_products import numbers_of
from gradstats.capture.parameters._nodes import Node

# Operations whose operands all contribute elements.
OF_ALL = JOINS.keys() | {torch.block_diag}

# Operations whose first operand alone contributes elements; the others say which.
OF_FIRST = PADS | {
    *variants("flip", "fliplr", "flipud", "roll", "rot90", "repeat", "tile"),
    *variants("repeat_interleave", "index_select", "take", "take_along_dim", "gather"),
    *variants("diag", "diag_embed", "diagflat", "diagonal"),
}

# Operations whose results consist of their operands' elements and constants.
SELECTS = OF_ALL | OF_FIRST


def is_assignment(function: Any) -> bool:
    """Whether an operation is the out-of-place form of ``x[index] = w``, which selects as well."""
    changes = function.function if isinstance(function, OutOfPlace) else None
    return getattr(changes, "__wrapped__", changes) is Tensor.__setitem__


# If an operand has more than this many times the elements of the result, most are left out of it,
# and the operand's factor would be mostly zeros.
MOST_LEFT_OUT = 4

# Number of places that are processed at once.
SLICE = 2**17


def selected(factor: Factor | Flattened, node: Derived, parent: Node) -> Factor | None:
    """The gradient of an element is the sum of those at the places that it went to."""
    inner = factor.inner if isinstance(factor, Flattened) else factor
    count, places = parent.shape.numel(), node.shape.numel()
    if type(inner) not in PICKED or not 0 < count <= MOST_LEFT_OUT * places:
        return None
    if is_compiling() or _pads_with_numbers(node):
        return None  # while a graph is traced there are no values
    if node.function not in OF_ALL:
        node.check_step()  # indices may have changed
    # Once for all operands, of which there may be thousands.
    numbering = node.once(factor, lambda: Numbering(node))
    return PICKED[type(inner)](inner, numbering.places_of(parent))


def _pads_with_numbers(node: Derived) -> bool:
    """Whether a tensor was padded with anything but zeros."""
    others = (*node.args[2:], *node.kwargs.values())
    return node.function in PADS and any(item not in ("constant", None, 0) for item in others)


class Numbering:
    """The elements of an operation's operands, numbered from 1, and their places in its result.

    Attributes:
        first: operand → the number of its first element.
        size: number of places in the result.
        where: the place of each element, -1 for an element that is left out; None if any element
            has several places. Only then there are
        places, numbers: (M,) the places with elements and the elements' numbers, which ascend.
    """

    def __init__(self, node: Derived):
        operands = list(dict.fromkeys(node.parents))
        *starts, end = accumulate([each.shape.numel() for each in operands], initial=1)
        self.first = dict(zip(operands, starts, strict=True))
        self.size = node.shape.numel()
        # Numbers of 32 bits, if large enough, take half of the memory.
        dtype = torch.int32 if max(end, self.size) <= torch.iinfo(torch.int32).max else torch.int64
        numbers = self._run(node, dtype).reshape(-1)
        self.where: Tensor | None = numbers.new_full((end - 1,), -1)
        filled = 0
        for start in range(0, self.size, SLICE):
            part = numbers[start : start + SLICE]
            (here,) = part.nonzero(as_tuple=True)
            self.where[part[here].long() - 1] = (here + start).to(numbers.dtype)
            filled += len(here)
        if filled > int((self.where >= 0).sum()):
            self.where = None
            (places,) = numbers.nonzero(as_tuple=True)
            self.numbers, order = numbers[places].sort(stable=True)
            self.places = places[order]

    def _run(self, node: Derived, dtype: torch.dtype) -> Tensor:
        """Run the operation on the numbers of its operands' elements."""
        kind: dict[str, Any] = {"dtype": dtype, "device": node.value.device}

        def numbered(item):
            if item in self.first:
                start = self.first[item]
                return torch.arange(start, start + item.shape.numel(), **kind).view(item.shape)
            return torch.zeros(item.shape, **kind)

        if node.function in SELECTS:
            # Constants among several operands have elements in the result, others are indices.
            kinds = (Node, Tensor) if node.function in OF_ALL else Node
            args, kwargs = rebuild(
                (node.args, node.kwargs), lambda i: numbered(i) if isinstance(i, kinds) else i
            )
            return node.function(*args, **kwargs)
        base, index, value = node.args
        # With the strides of the base: a write into a view of it is repeated by as_strided.
        whole = torch.empty_like(numbers_of(base), **kind).copy_(numbered(base))
        written = numbered(value) if isinstance(value, (Node, Tensor)) else 0
        return node.function(whole, index, written)

    def places_of(self, operand: Node) -> Places:
        """Return the places of the elements of one operand."""
        shape, first = tuple(operand.shape), self.first[operand]
        end = first + operand.shape.numel()
        if self.where is None:
            bounds = self.numbers.new_tensor([first, end])
            part = slice(*torch.searchsorted(self.numbers, bounds).tolist())
            return Places(shape, self.size, self.places[part], self.numbers[part].long() - first)
        where = self.where[first - 1 : end - 1]
        if bool((where >= 0).all()):
            return Places(shape, self.size, where, None)
        (elements,) = (where >= 0).nonzero(as_tuple=True)
        return Places(shape, self.size, where[elements].long(), elements)


@dataclass(eq=False)
class Places:
    """The places of an operand's elements in a tensor.

    Attributes:
        shape: of the operand.
        size: number of places in the tensor.
        where: (M,) the places with elements, in the order of the elements.
        elements: (M,) the element in each of them; None if each element has exactly one place.
    """

    shape: tuple[int, ...]
    size: int
    where: Tensor
    elements: Tensor | None

    def within(self, parts: int) -> tuple[int, Places] | None:
        """Return the number of the only equal part with elements, and the places in it, if any."""
        size = self.size // parts
        if not len(self.where):
            return None
        part = int(self.where[0]) // size
        where = self.where - part * size
        if bool((where < 0).any() or (where >= size).any()):
            return None
        return part, replace(self, size=size, where=where)

    def of_matrix(self, rows: int) -> Picks | None:
        """Return which rows and columns of the operand those of the tensor hold.

        Args:
            rows: number of the tensor's rows.

        Returns:
            None if rows and columns are not picked independently, whichever of the operand's axes
            are taken for rows.
        """
        for axis in (*range(1, len(self.shape) + 1), 0):
            picks = self._divided(rows, self.size // rows, math.prod(self.shape[axis:]))
            if picks is not None:
                return picks
        return None

    def of_rows(self, rows: int) -> Picks | None:
        """Return the same, with the operand's first axis taken for rows."""
        if not self.shape:
            return None
        return self._divided(rows, self.size // rows, math.prod(self.shape[1:]))

    def _divided(self, rows: int, columns: int, width: int) -> Picks | None:
        """Return the same, with ``width`` elements in each of the operand's rows."""
        height = math.prod(self.shape) // width
        of_rows, of_columns = (self.where.new_zeros(n, dtype=torch.long) for n in (rows, columns))
        if self.elements is None:
            where = self.where.view(height, width)
            row, column = where[:, 0] // columns, where[0] % columns
            of_rows[row.long()], of_columns[column.long()] = (
                torch.arange(1, 1 + n, device=where.device) for n in (height, width)
            )
            same = torch.equal(row[:, None] * columns + column, where)
        else:
            row, column = self.where // columns, self.where % columns
            down, across = self.elements // width + 1, self.elements % width + 1
            of_rows[row], of_columns[column] = down, across
            same = torch.equal(of_rows[row], down) and torch.equal(of_columns[column], across)
            crossings = of_rows.count_nonzero() * of_columns.count_nonzero()
            same = same and int(crossings) == len(self.where)
        return Picks(of_rows, of_columns, height, width) if same else None

    def added(self, values: Tensor) -> Vector:
        """Return the operand's gradient, to which each place adds one of the values (B, M)."""
        values = cast(values, compute_dtype(values))
        if self.elements is not None:
            values = added(values.mT, self.elements, math.prod(self.shape)).mT
        return Vector(values.reshape(-1, *self.shape), self.shape)


class Picks(NamedTuple):
    """Which rows and columns of an operand those of a tensor hold, counted from 1; 0 for none.

    Attributes:
        rows, columns: the operand's row in each row of the tensor, and the same for columns.
        height, width: number of the operand's rows and columns.
    """

    rows: Tensor
    columns: Tensor
    height: int
    width: int

    def of(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sides of an outer product for the operand, given those for the tensor."""
        return _picked(left, self.rows, self.height), _picked(right, self.columns, self.width)


def _picked(side: Tensor, picks: Tensor, size: int) -> Tensor:
    """Return (*, size) sums of the columns of a side (*, n) with the same number in ``picks``."""
    if int(picks.count_nonzero()) == size:
        order = picks.argsort()[len(picks) - size :]
        numbers = torch.arange(size, device=picks.device)
        if torch.equal(picks[order] - 1, numbers):
            together = torch.equal(order - order[0], numbers)
            return side.narrow(-1, int(order[0]), size) if together else side[..., order]
    values = cast(side, compute_dtype(side)).reshape(-1, len(picks))
    return added(values.mT, picks, size + 1)[1:].mT.reshape(*side.shape[:-1], size)


def _of_vector(factor: Vector, places: Places) -> Factor | None:
    return places.added(factor.values.reshape(factor.batch, -1)[:, places.where])


def _of_outer(factor: Outer, places: Places) -> Factor | None:
    left, right = factor.left, factor.right
    if factor.permutation is not None:
        return None
    if left.shape[1] > 1:
        found = places.within(left.shape[1])
        if found is None:
            return None
        group, places = found
        left, right = left[:, group, None], right[:, group, None]
    rows, columns = left.shape[3], right.shape[3]
    picks = places.of_matrix(rows)
    if picks is not None:
        left, right = picks.of(left, right)
        if min(picks.height, picks.width) > 1:
            return Outer(left, right, places.shape)
        values = (cast(left, compute_dtype(left, right)) * right).sum((1, 2))
        return Vector(values.reshape(-1, *places.shape), places.shape)
    if len(places.where) > rows + columns:
        return None
    row, column = places.where.long() // columns, places.where.long() % columns
    values = cast(left[..., row], compute_dtype(left, right)) * right[..., column]
    return places.added(values.sum((1, 2)))


def _of_ragged(factor: Ragged, places: Places) -> Factor | None:
    picks = places.of_rows(factor.left.shape[1])
    if picks is None:
        return None
    left, right = picks.of(factor.left, factor.right)
    return replace(factor, left=left, right=right, shape=places.shape)


def _of_experts(factor: Experts, places: Places) -> Factor | None:
    found = places.within(factor.shape[0])
    return None if found is None else _of_ragged(factor.of_expert(found[0]), found[1])


def _of_rows(factor: Rows, places: Places) -> Factor | None:
    """Of whole rows of a table that are rows of another."""
    picks = places.of_rows(factor.shape[0])
    if picks is None:
        return None
    whole = torch.arange(1, 1 + picks.width, device=picks.columns.device)
    if not torch.equal(picks.columns, whole):
        return None
    number = picks.rows[factor.ids]
    grad = factor.grad.masked_fill((number == 0).unsqueeze(1), 0)
    ids = (number - 1).clamp(min=0)
    return replace(factor, ids=ids, grad=grad, shape=places.shape, lookup=None)


PICKED: dict[type, Callable[[Any, Places], Factor | None]] = {
    Experts: _of_experts,
    Outer: _of_outer,
    Ragged: _of_ragged,
    Rows: _of_rows,
    Vector: _of_vector,
}
