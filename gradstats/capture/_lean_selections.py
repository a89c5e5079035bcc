"""Tensors of which every element is one of a parameter's, or none: joined, padded, reordered ones.

Which element stands where is found by running the operation on the elements' numbers. Where it
picks rows and columns apart from each other, an outer product stays one: its sides are picked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from gradstats._compiler import is_compiling
from gradstats._cost import product
from gradstats._factors import (
    Experts,
    Factor,
    Masked,
    Outer,
    Patches,
    Ragged,
    Rows,
    Vector,
    added,
    cast,
    compute_dtype,
)
from gradstats.capture._derivation import Derived
from gradstats.capture._derived import Changed
from gradstats.capture._lean_normalisations import Flattened
from gradstats.capture._nested import rebuild
from gradstats.capture._nodes import Node
from gradstats.capture._operations import variants
from gradstats.contractions import lean

# All of whose operands give elements.
JOINS = frozenset(
    {
        *variants("cat", "concat", "concatenate", "stack", "hstack", "vstack", "dstack"),
        *variants("row_stack", "column_stack", "block_diag"),
    }
)

PADS = frozenset({functional.pad, torch._C._nn.pad, torch.constant_pad_nd})

# Of which the first operand alone gives elements; others say which.
PICKS = PADS | {
    *variants("flip", "fliplr", "flipud", "roll", "rot90", "repeat", "tile"),
    *variants("repeat_interleave", "index_select", "take", "take_along_dim", "gather"),
    *variants("diag", "diag_embed", "diagflat", "diagonal"),
}


def selects(function: Any) -> bool:
    """Whether every element of an operation's result is one of its operands', or a constant."""
    return function in JOINS or function in PICKS or _writes(function)


def _writes(function: Any) -> bool:
    """Whether an operation is ``x[index] = w``, out of place."""
    changes = function.function if isinstance(function, Changed) else None
    return getattr(changes, "__wrapped__", changes) is Tensor.__setitem__


# Operands with more elements than this many times those of the tensor are mostly left out of it:
# what was picked tells more of them than factors that are mostly zeros.
MOST_LEFT_OUT = 4


def selected(factor: Factor | Flattened, node: Derived, parent: Node) -> Factor | None:
    """The gradient of an element is the sum of those in the places where it stands."""
    factor = factor.inner if isinstance(factor, Flattened) else lean(factor)
    count, places = parent.shape.numel(), node.shape.numel()
    if type(factor) not in PICKED or not 0 < count <= MOST_LEFT_OUT * places:
        return None
    if is_compiling() or _pads_with_numbers(node):
        return None  # a graph has no values to look at
    if node.function not in JOINS:
        node.check_step()  # indices may have changed
    found = Places(_numbers_in(node, parent).reshape(-1), tuple(parent.shape))
    return PICKED[type(factor)](factor, found)


def _pads_with_numbers(node: Derived) -> bool:
    """Whether a tensor was padded otherwise than with zeros."""
    if node.function not in PADS:
        return False
    named = [item for name, item in node.kwargs.items() if name not in ("input", "self", "pad")]
    return not {*node.args[2:], *named} <= {"constant", None, 0}


def _numbers_in(node: Derived, parent: Node) -> Tensor:
    """Return the number of the operand's element that stands in each place; 0 for no element."""
    device = parent.value.device
    own = torch.arange(1, 1 + parent.shape.numel(), dtype=torch.int32, device=device)
    own = own.view(parent.shape)

    def numbered(item):
        if item is parent:
            return own
        other = isinstance(item, (Node, Tensor))
        return torch.zeros(item.shape, dtype=torch.int32, device=device) if other else item

    args, kwargs = node.args, node.kwargs
    if node.function in JOINS:
        args, kwargs = rebuild(args, numbered), rebuild(kwargs, numbered)
    elif node.function in PICKS:
        args, kwargs = rebuild((args, kwargs), lambda item: own if item is parent else item)
    else:
        base, index, value = args
        args = numbered(base), index, numbered(value) if isinstance(value, (Node, Tensor)) else 0
    return node.function(*args, **kwargs)


@dataclass(eq=False)
class Places:
    """Where the elements of an operand stand in a tensor.

    Attributes:
        numbers: (N,) the element in each place, counted from 1; 0 where there is none.
        shape: the operand's.
    """

    numbers: Tensor
    shape: tuple[int, ...]

    def within(self, parts: int) -> tuple[int, Places] | None:
        """Return the only one of several equal parts that holds elements, and the places in it."""
        numbers = self.numbers.view(parts, -1)
        (busy,) = numbers.any(1).nonzero(as_tuple=True)
        if len(busy) != 1:
            return None
        part = int(busy)
        return part, Places(numbers[part], self.shape)

    def of_matrix(self, rows: int) -> Picks | None:
        """Return which rows and columns of the operand stand in those of the tensor.

        Args:
            rows: into which the tensor is divided.

        Returns:
            None if the operand is not picked so, in whatever way it is divided.
        """
        matrix = self.numbers.view(rows, -1)
        some = matrix > 0
        in_rows, in_columns = some.any(1), some.any(0)
        part = matrix[in_rows][:, in_columns]
        axes = (*range(1, len(self.shape) + 1), 0) if part.numel() else ()
        for axis in axes:
            width = product(self.shape[axis:])
            picked, across = (part[:, 0] - 1) // width, (part[0] - 1) % width
            if torch.equal(picked[:, None] * width + across + 1, part):
                of_rows, of_columns = (here.to(part.dtype) for here in (in_rows, in_columns))
                of_rows[in_rows], of_columns[in_columns] = picked + 1, across + 1
                return Picks(of_rows, of_columns, product(self.shape) // width, width)
        return None

    def added(self, values: Tensor, numbers: Tensor) -> Vector:
        """Return the gradient that is the sum of values (B, n) of elements with these numbers."""
        count = product(self.shape)
        values = added(values.mT, numbers, count + 1)[1:].mT
        return Vector(values.reshape(-1, *self.shape), self.shape)


class Picks(NamedTuple):
    """Rows and columns of an operand in those of a tensor, counted from 1; 0 where there is none.

    Attributes:
        rows, columns: which stands in each of the tensor's.
        height, width: how many the operand has.
    """

    rows: Tensor
    columns: Tensor
    height: int
    width: int

    def of(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """Return the operand's sides of an outer product, given those of the tensor."""
        return _picked(left, self.rows, self.height), _picked(right, self.columns, self.width)


def _picked(side: Tensor, picks: Tensor, size: int) -> Tensor:
    """Return (*, size) sums of those columns of a side (*, n) that have the same number."""
    if int(picks.count_nonzero()) == size:
        order = picks.argsort()[len(picks) - size :]
        numbers = torch.arange(size, device=picks.device)
        if torch.equal(picks[order] - 1, numbers):
            together = torch.equal(order - order[0], numbers)
            return side.narrow(-1, int(order[0]), size) if together else side[..., order]
    values = cast(side, compute_dtype(side)).reshape(-1, len(picks))
    return added(values.mT, picks, size + 1)[1:].mT.reshape(*side.shape[:-1], size)


def _of_vector(factor: Vector, places: Places) -> Factor | None:
    if factor.axis is not None:
        return None
    return places.added(factor.values.reshape(factor.batch, -1), places.numbers)


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
    picks = places.of_matrix(left.shape[3])
    if picks is not None:
        left, right = picks.of(left, right)
        if min(picks.height, picks.width) > 1:
            return Outer(left, right, places.shape)
        values = (cast(left, compute_dtype(left, right)) * right).sum((1, 2))
        return Vector(values.reshape(-1, *places.shape), places.shape)
    matrix = places.numbers.view(left.shape[3], -1)
    row, column = matrix.nonzero(as_tuple=True)
    if len(row) > sum(matrix.shape):
        return None
    values = cast(left[..., row], compute_dtype(left, right)) * right[..., column]
    return places.added(values.sum((1, 2)), matrix[row, column])


def _of_ragged(factor: Ragged, places: Places) -> Factor | None:
    picks = places.of_matrix(factor.left.shape[1])
    if picks is None or picks.height != places.shape[0]:
        return None
    left, right = picks.of(factor.left, factor.right)
    return replace(factor, left=left, right=right, shape=places.shape)


def _of_experts(factor: Experts, places: Places) -> Factor | None:
    found = places.within(factor.shape[0])
    return None if found is None else _of_ragged(factor.of_expert(found[0]), found[1])


def _of_rows(factor: Rows, places: Places) -> Factor | None:
    """Rows of a table that stand in another, as they are."""
    picks = places.of_matrix(factor.shape[0])
    if picks is None or picks.height != places.shape[0] or len(picks.columns) != picks.width:
        return None
    if not bool((picks.columns.diff() == 1).all()):
        return None
    number = picks.rows[factor.ids]
    grad = factor.grad.masked_fill((number == 0).unsqueeze(1), 0)
    ids = (number - 1).clamp(min=0).long()
    return replace(factor, ids=ids, grad=grad, shape=places.shape, lookup=None)


def _of_patches(factor: Patches, places: Places) -> Factor | None:
    """Filters, and channels of them."""
    kernel = factor.shape[2:]
    picks = places.of_matrix(factor.shape[0])
    if picks is None or factor.geometry.groups > 1 or places.shape[2:] != kernel:
        return None
    if picks.height != places.shape[0]:
        return None
    columns = picks.columns.view(factor.shape[1], -1)
    size = columns.shape[1]
    channels = (columns[:, 0] - 1).div(size, rounding_mode="floor") + 1
    expected = (channels[:, None] - 1) * size + torch.arange(1, 1 + size, device=channels.device)
    if not torch.equal(expected * (channels > 0)[:, None], columns):
        return None
    grad = _picked(factor.grad.movedim(1, -1), picks.rows, picks.height).movedim(-1, 1)
    x = _picked(factor.input.movedim(1, -1), channels, picks.width // size).movedim(-1, 1)
    return replace(factor, input=x, grad=grad, shape=places.shape)


def _of_masked(factor: Masked, places: Places) -> Factor | None:
    """Elements that were multiplied, each of which stands in one place."""
    inner = PICKED[type(factor.inner)](factor.inner, places)
    counts = places.numbers.bincount(minlength=1 + product(places.shape))[1:]
    if not isinstance(inner, (Outer, Patches, Ragged)) or int(counts.max()) > 1:
        return None
    mask = factor.mask.new_zeros(1 + len(counts))
    mask[places.numbers] = factor.mask.reshape(-1)
    return Masked(inner, mask[1:].view(places.shape))


PICKED: dict[type, Callable[[Any, Places], Factor | None]] = {
    Experts: _of_experts,
    Masked: _of_masked,
    Outer: _of_outer,
    Patches: _of_patches,
    Ragged: _of_ragged,
    Rows: _of_rows,
    Vector: _of_vector,
}
