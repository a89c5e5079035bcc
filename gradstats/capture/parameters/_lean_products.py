"""Steps back through sums, multiples, elementwise functions and products with matrices.

G is one example's gradient of the tensor that met the data, M what a parameter w was multiplied by.
The gradient of w is M ∘ G for M ∘ w, summed over the axes along which w was broadcast; G Mᵀ for
w @ M; f'(w) ∘ G for an elementwise function f(w).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gradstats._factors import (
    Factor,
    Masked,
    Outer,
    Patches,
    Ragged,
    Rows,
    Vector,
    cast,
    compute_dtype,
    tensors_of,
)
from gradstats.capture.operations._nested import argument_of
from gradstats.capture.operations._operations import DIVIDES, SUBTRACTS
from gradstats.capture.parameters._derivation import Derived
from gradstats.capture.parameters._nodes import Node
from gradstats.capture.parameters._replay import FunctionStep
from gradstats.contractions import lean, row_products

Scaled: TypeAlias = Masked | Outer | Patches | Ragged | Rows | Vector

# Differences whose first operand is the one that is subtracted.
REVERSED = frozenset({Tensor.__rsub__, torch.rsub})


def summed(factor: Factor, node: Derived, parent: Node) -> Factor | None:
    """v + w and v - w: a sum has the gradient of each of its terms."""
    if not only_adds(node):
        return None
    is_first, is_reversed = node.args[0] is parent, node.function in REVERSED
    negative = node.function in SUBTRACTS and is_first == is_reversed
    if negative or node.shape != parent.shape:
        return _multiple(lean(factor), -1 if negative else 1, node, parent)
    return factor


def negated(factor: Factor, node: Derived, parent: Node) -> Factor | None:
    """-w."""
    return _multiple(factor, -1, node, parent)


def only_adds(node: Derived) -> bool:
    """Whether a sum has no ``alpha``, which may also be given as a third argument."""
    return len(node.args) <= 2 and node.kwargs.keys() <= {"other"}


def other_operand(node: Derived, parent: Node) -> Any:
    """Return the value of the other operand of a binary operation."""
    first, second = node.args[:2]
    other = second if first is parent else first
    return numbers_of(other)


def numbers_of(operand: Any) -> Any:
    """Return the plain value of an operand, tracked or not."""
    value = operand.value if isinstance(operand, Node) else operand
    return value.detach() if isinstance(value, Tensor) else value


def _multiple(factor: Factor, scale: Any, node: Derived, parent: Node) -> Factor | None:
    """Return the factor of ``scale`` ∘ G, summed over the axes along which w was broadcast."""
    if not isinstance(factor, Scaled):
        return None
    dtype = compute_dtype(node.value, *tensors_of(factor))
    scale = torch.as_tensor(scale, dtype=dtype, device=node.value.device)
    return times(factor, scale, parent.shape)


def scaled(factor: Factor, node: Derived, parent: Node) -> Factor | None:
    """M ∘ w, w / M and M / w."""
    if node.kwargs:
        return None
    value = scale = other_operand(node, parent)
    if node.function in DIVIDES:
        dtype = compute_dtype(node.value)
        scale, divisor = torch.as_tensor(value, dtype=dtype), numbers_of(parent).to(dtype)
        scale = scale.reciprocal() if node.args[0] is parent else -scale / divisor / divisor
    found = _multiple(factor, scale, node, parent)
    if found is not None and isinstance(value, Tensor):
        node.check_step()  # a number cannot change
    return found


def elementwise(factor: Factor, node: Derived, parent: Node) -> Factor | None:
    """f(w), element by element."""
    if node.shape != parent.shape or not isinstance(factor, Scaled):
        return None
    return _multiple(factor, node.slope(parent), node, parent)


def passed_through(factor: Factor, node: Derived, parent: Node) -> Factor | None:
    """f(w), by a custom Function with an elementwise backward, such as straight-through."""
    if node.shape != parent.shape or not isinstance(factor, Scaled):
        return None
    slope = FunctionStep(node, parent).slope(factor)
    if slope is None:
        return None
    if bool((slope == 1).all()):
        return factor
    return _multiple(factor, slope, node, parent)


def linear(factor: Factor, node: Derived, parent: Node) -> Factor | None:
    """X Wᵀ + b."""
    x, weight, bias = (
        argument_of(node.args, node.kwargs, place, name)
        for place, name in enumerate(("input", "weight", "bias"))
    )
    if parent is bias:
        return _multiple(factor, 1, node, parent)  # it may have been broadcast
    return _multiplied(factor, node, parent, x, weight, transposed=True)


def multiplied(factor: Factor, node: Derived, parent: Node) -> Factor | None:
    """X @ Y."""
    if node.kwargs or len(node.args) != 2:
        return None
    return _multiplied(factor, node, parent, *node.args, transposed=False)


def _multiplied(
    factor: Factor, node: Derived, parent: Node, first: Any, second: Any, *, transposed: bool
) -> Factor | None:
    """X Y or X Yᵀ, of rows or a vector X and a matrix or a vector Y."""
    shape, other = tuple(parent.shape), numbers_of(second if parent is first else first)
    axes = (len(shape), other.dim()) if parent is first else (other.dim(), len(shape))
    if axes[1] > 2 or other.layout != torch.strided:
        return None
    # As autocast rounded it for the product.
    other, is_vector = other.to(node.value.dtype), axes[1] == 1
    if transposed and parent is first and not is_vector:
        other = other.mT
    if isinstance(factor, (Outer, Ragged)):
        if axes != (2, 2) or not factor.spans_rows or math.prod(shape) > math.prod(factor.shape):
            return None  # the new side would be wider than the one it replaces
        node.check_step()
        left, right = _in_full(factor, node.value)
        other = other.to(left.dtype)
        if parent is first:
            return replace(factor, left=left, right=right @ other.mT, shape=shape)
        left = left @ other
        left, right = (right, left) if transposed else (left, right)
        return replace(factor, left=left, right=right, shape=shape)
    if not isinstance(factor, Vector):
        return None
    node.check_step()
    batch, dtype = factor.batch, compute_dtype(node.value, factor.values)
    other = other.to(dtype)
    grad = cast(factor.values, dtype).reshape(batch, -1, 1 if is_vector else factor.shape[-1])
    if parent is first and is_vector and len(shape) == 2:
        return Outer(grad.mT.unsqueeze(1), other.expand(batch, 1, 1, -1), shape)
    other = other.mT if parent is first and not is_vector else other.reshape(-1, other.shape[-1])
    if parent is second and not is_vector:
        rows, grad = other.expand(batch, 1, -1, -1), grad.unsqueeze(1)
        return Outer(grad, rows, shape) if transposed else Outer(rows, grad, shape)
    if batch * math.prod(shape) * dtype.itemsize > node.tracker.settings.workspace:
        return None
    values = (grad.mT if parent is second else grad) @ other
    return Vector(values.reshape(batch, *shape), shape)


def kronecker(factor: Factor, node: Derived, parent: Node) -> Factor | None:
    """X ⊗ Y of matrices.

    As matrices L and R, whose rows are X's and whose columns are Y's, the sides of each position
    give X the gradient L Y Rᵀ and Y the gradient Lᵀ X R. The number of positions is multiplied by
    the smaller side of the other matrix.
    """
    if node.kwargs or not isinstance(factor, Outer) or not factor.spans_rows:
        return None
    first, second = node.args
    if len(first.shape) != 2 or len(second.shape) != 2:
        return None
    node.check_step()
    left, right = _in_full(factor, node.value)
    left = left[:, 0].unflatten(2, (first.shape[0], second.shape[0]))
    right = right[:, 0].unflatten(2, (first.shape[1], second.shape[1]))
    if parent is second:
        left, right = left.mT, right.mT
    matrix = other_operand(node, parent).to(left.dtype)
    if matrix.shape[0] > matrix.shape[1]:
        left = left @ matrix
    else:
        right = right @ matrix.mT
    left, right = (side.mT.flatten(1, 2).unsqueeze(1) for side in (left, right))
    return Outer(left, right, tuple(parent.shape))


def times(factor: Scaled, scale: Tensor, shape: Sequence[int]) -> Factor | None:
    """Return the factor of ``scale`` ∘ G, summed over the axes along which ``shape`` was broadcast.

    ``factor`` describes G, with whose shape ``scale`` and ``shape`` broadcast.
    """
    if factor.shape == tuple(shape):
        return _times(factor, scale)
    return _summed(factor, scale, tuple(shape))


def _times(factor: Scaled, scale: Tensor) -> Factor | None:
    """Return the factor of ``scale`` ∘ G, with whose shape the scale broadcasts."""
    sizes = (1,) * (len(factor.shape) - scale.dim()) + tuple(scale.shape)
    if isinstance(factor, Vector):
        if factor.axis is not None:
            return None
        values = factor.values.reshape(factor.batch, *factor.shape).to(scale.dtype)
        return Vector(values * scale, factor.shape)
    if isinstance(factor, Masked):
        return replace(factor, mask=factor.mask * scale)
    if isinstance(factor, Rows):
        rows = scale.expand(factor.shape).reshape(factor.shape[0], -1)[factor.ids]
        return replace(factor, grad=factor.grad.to(scale.dtype) * rows)
    if max(sizes[1:], default=1) == 1 and isinstance(factor, Patches):
        per_row = scale.reshape(-1, *(1,) * (factor.grad.dim() - 2))
        return replace(factor, grad=factor.grad.to(scale.dtype) * per_row)
    if isinstance(factor, (Outer, Ragged)) and factor.spans_rows:
        left, right = _in_full(factor, scale)
        along_rows = max(sizes[1:], default=1) == 1
        if along_rows and (sizes[0] > 1 or left.shape[-1] < right.shape[-1]):
            return replace(factor, left=left * scale.reshape(-1), right=right)
        if sizes[0] == 1:
            row = scale.expand(1, *factor.shape[1:]).reshape(-1)
            return replace(factor, left=left, right=right * row)
    return Masked(factor, scale.expand(factor.shape))


def _summed(factor: Scaled, scale: Tensor, shape: tuple[int, ...]) -> Factor | None:
    """Return the factor of ``scale`` ∘ G, summed to a shape that was broadcast."""
    sizes = (1,) * (len(factor.shape) - len(shape)) + shape
    if isinstance(factor, Masked):
        return _summed(factor.inner, factor.mask * scale, shape)
    if isinstance(factor, Vector) and factor.axis is None:
        values = factor.values.reshape(factor.batch, *factor.shape).to(scale.dtype) * scale
        over = [axis + 1 for axis, size in enumerate(sizes) if size == 1]
        return Vector(values.sum(over).reshape(factor.batch, *shape), shape)
    if not (isinstance(factor, Patches) or (isinstance(factor, Outer) and factor.spans_rows)):
        return None
    constants = scale.expand(factor.shape)
    if sizes[0] == 1 and math.prod(sizes) > 1:
        if sizes[1:] != factor.shape[1:] or isinstance(factor, Patches):
            return None
        transposed = Outer(factor.right, factor.left, (factor.right.shape[3], factor.shape[0]))
        values = row_products(transposed, constants.reshape(factor.shape[0], -1).mT)
    else:
        if max(sizes[1:], default=1) > 1:
            return None
        values = row_products(factor, constants)
        if math.prod(sizes) == 1:
            values = values.sum(1)
    return Vector(values.reshape(factor.batch, *shape), shape)


def _in_full(factor: Outer | Ragged, *others: Tensor) -> tuple[Tensor, Tensor]:
    """Return both sides in the accumulation dtype, so that sides made of them lose no digits."""
    dtype = compute_dtype(factor.left, factor.right, *others)
    return cast(factor.left, dtype), cast(factor.right, dtype)
