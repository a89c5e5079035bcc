"""Steps back through reductions of a parameter, such as the norms that it is divided by.

For a reduction r_p of each row of w the gradient is c_p ∂r_p/∂w_pq, with a number c_p for each
example and row: a constant matrix, scaled row by row. The same holds for columns, and for
reductions of all of w to one number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradstats._factors import Factor, Masked, Outer, Vector, cast, compute_dtype
from gradstats.capture.following._reductions import OVER_MATRICES, REDUCES
from gradstats.capture.operations._nested import argument_of
from gradstats.capture.parameters._derivation import Derived
from gradstats.capture.parameters._nodes import Node

# Functions that reduce all of w if their result is one number.
MEASURES = OVER_MATRICES | {torch.linalg.norm, torch.linalg.matrix_norm}


def reduced(factor: Factor, node: Derived, parent: Node) -> Factor | None:
    """r(w), over some of its axes."""
    axes = _reduced_axes(node, parent)
    if axes is None or not isinstance(factor, Vector):
        return None
    slope = node.slope(parent)
    dtype = compute_dtype(slope, factor.values)
    shape = [1 if axis in axes else size for axis, size in enumerate(parent.shape)]
    return _spread(cast(factor.values, dtype).reshape(factor.batch, *shape), slope.to(dtype))


def _spread(values: Tensor, slope: Tensor) -> Factor | None:
    """Return the factor of ``values`` ∘ ``slope``, with which the values (B, *) broadcast."""
    shape = tuple(slope.shape)
    batch, *sizes = values.shape
    if slope.dim() < 2:
        return Vector(values * slope, shape)
    left = right = values.new_ones(())
    if max(sizes[1:]) == 1:
        left = values.reshape(batch, 1, 1, -1)
    elif sizes[0] == 1 and tuple(sizes[1:]) == shape[1:]:
        right = values.reshape(batch, 1, 1, -1)
    else:
        return None
    left, right = left.expand(batch, 1, 1, shape[0]), right.expand(batch, 1, 1, slope[0].numel())
    return Masked(Outer(left, right, shape), slope)


def _reduced_axes(node: Derived, parent: Node) -> Sequence[int] | None:
    """Return the axes that a reduction runs over; None if not known."""
    count = len(parent.shape)
    if node.value.numel() == 1:
        return range(count)
    if node.function not in REDUCES:
        return None
    position = REDUCES[node.function]
    dim = argument_of(node.args, node.kwargs, position, "dim")
    dims: Sequence[Any] = dim if isinstance(dim, (tuple, list)) else (dim,)
    if not all(isinstance(axis, int) for axis in dims):
        return None  # the other operand of a maximum, for example
    return [axis % count for axis in dims]
