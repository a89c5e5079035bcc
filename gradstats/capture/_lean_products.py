"""Multiples and elementwise functions of a parameter and its products with matrices.

G is the gradient of the tensor that met the data, of one example; M what a parameter w was
multiplied by. Of M ∘ w with an M that broadcasts along w the gradient is M ∘ G; where it is w that
broadcasts, M ∘ G is summed over what w lacks; of w @ M it is G Mᵀ; of f(w), element by element,
f'(w) ∘ G.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor

from gradstats._cost import product
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
from gradstats.capture._nodes import Derived, Node
from gradstats.contractions import lean

Scaled: TypeAlias = Masked | Outer | Patches | Ragged | Rows | Vector

DIVISIONS = frozenset({Tensor.div, Tensor.__truediv__, torch.div})


def scaled(factor: Factor, node: Derived, parent: Node) -> Factor | None:
    """M ∘ w and w / M."""
    if node.kwargs or len(node.args) != 2:
        return None
    first, second = node.args
    divides = node.function in DIVISIONS
    if divides and first is not parent:
        return None
    factor = lean(factor)
    if not isinstance(factor, Scaled):
        return None
    other = second if first is parent else first
    value = other.value.detach() if isinstance(other, Node) else other
    if isinstance(value, Tensor) and value.layout != torch.strided:
        return None
    dtype = compute_dtype(node.value, *tensors_of(factor))
    scale = torch.as_tensor(value, dtype=dtype, device=node.value.device)
    if divides:
        scale = scale.reciprocal()
    whole = node.shape == parent.shape
    found = _times(factor, scale) if whole else _summed(factor, scale, node, parent)
    if found is not None and isinstance(other, (Node, Tensor)):
        node.check_step()  # a number does not change
    return found


def elementwise(factor: Factor, node: Derived, parent: Node) -> Factor | None:
    """f(w), element by element."""
    factor = lean(factor)
    if node.shape != parent.shape or not isinstance(factor, Scaled):
        return None
    if isinstance(factor, Vector) and factor.axis is not None:
        return None
    return _times(factor, node.slope(parent).to(compute_dtype(node.value, *tensors_of(factor))))


def multiplied(factor: Factor, node: Derived, parent: Node) -> Factor | None:
    """X @ Y of matrices: one operand of G is multiplied."""
    if node.kwargs or len(node.args) != 2 or not isinstance(factor, (Outer, Ragged)):
        return None
    first, second = node.args
    if len(first.shape) != 2 or len(second.shape) != 2 or not factor.spans_rows:
        return None
    other = second if first is parent else first
    matrix = (other.value if isinstance(other, Node) else other).detach()
    if matrix.layout != torch.strided or parent.shape.numel() > node.shape.numel():
        return None  # the operand would be wider than the one it replaces
    node.check_step()
    left, right = _in_full(factor, node.value)
    # Autocast may have rounded it first.
    matrix = matrix.to(node.value.dtype).to(left.dtype)
    shape = tuple(parent.shape)
    if first is parent:
        return replace(factor, right=right @ matrix.mT, shape=shape)
    return replace(factor, left=left @ matrix, shape=shape)


def _times(factor: Scaled, scale: Tensor) -> Factor | None:
    """Return the factor of ``scale`` ∘ G, for a scale that broadcasts along it."""
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


def _summed(factor: Scaled, scale: Tensor, node: Derived, parent: Node) -> Factor | None:
    """Return the factor of ``scale`` ∘ G, summed over the axes that the parent lacks."""
    shape = tuple(parent.shape)
    sizes = (1,) * (len(node.shape) - len(shape)) + shape
    if isinstance(factor, Vector) and factor.axis is None:
        values = factor.values.reshape(factor.batch, *node.shape).to(scale.dtype) * scale
        over = [axis + 1 for axis, size in enumerate(sizes) if size == 1]
        return Vector(values.sum(over).reshape(factor.batch, *shape), shape)
    if not isinstance(factor, Outer) or not factor.spans_rows:
        return None
    left, right = (side[:, 0] for side in _in_full(factor, scale))
    matrix = scale.expand(node.shape).reshape(left.shape[-1], right.shape[-1])
    if sizes[0] == 1 and product(sizes) > 1:
        if sizes[1:] != node.shape[1:]:
            return None
        values = ((left @ matrix) * right).sum(1)
    else:
        if max(sizes[1:], default=1) > 1:
            return None
        values = ((right @ matrix.mT) * left).sum(1)
        if product(sizes) == 1:
            values = values.sum(1)
    return Vector(values.reshape(factor.batch, *shape), shape)


def _in_full(factor: Outer | Ragged, *others: Tensor) -> tuple[Tensor, Tensor]:
    """Return both operands in the accumulation dtype, so that new ones are not rounded further."""
    dtype = compute_dtype(factor.left, factor.right, *others)
    return cast(factor.left, dtype), cast(factor.right, dtype)
