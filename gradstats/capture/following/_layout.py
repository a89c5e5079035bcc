"""Where the examples lie in a tensor of data after each of the user's operations on it.

By contract, data have their examples along the caller's ``batch_dim``. If code transposes or folds
that axis, shape alone would mislead: with as many positions as examples, a transposed batch looks
like an untransposed one. Such tensors carry their layout with them. If it is lost, they are refused
when they meet a parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradstats.capture.following._examples import Examples, Grid, Whole
from gradstats.capture.following._reductions import OVER_AXES, QUANTILES, REDUCES, reduced
from gradstats.capture.following._reindexed import REINDEXES, moved, reshaped
from gradstats.capture.operations._call import Call
from gradstats.capture.operations._nested import flatten
from gradstats.capture.operations._operations import (
    ADDED_PRODUCTS,
    BATCH_FIRST,
    BROADCASTS,
    CONVOLUTIONS,
    JOINS,
    KEEPS,
    LOOKS_AT_FIRST,
    MOVES,
    POINTWISE,
    POOLS,
    PRODUCTS,
    RESHAPES,
    ROW_PRODUCTS,
    SCRAMBLES,
    SHARED_WEIGHT,
    SOLVES,
    SUM_LAST,
    TENSOR_PRODUCTS,
    UNFOLLOWED,
    variants,
)
from gradstats.capture.parameters._tensors import node_of


def follow(call: Call, source: Tensor, layout: Examples) -> Examples | Whole | Grid | None:
    """Return the layout of an operation's result, given the layout of its first data operand.

    Args:
        call: the operation.
        source: the operand.
        layout: its layout.

    Returns:
        The layout; None if the operation may have lost it.
    """
    func, result = call.func, call.result
    if func in SCRAMBLES or takes_for_channels(func, source, layout) or is_one(func, source):
        return None
    if func in MOVES:
        return moved(source, layout, result)
    if func in RESHAPES:
        return reshaped(source, layout, result)
    if func in REINDEXES:
        return REINDEXES[func](call, source, layout)
    if func in OVER_AXES:
        if func in QUANTILES or result.dim() < source.dim():
            return reduced(call, source, layout)
        # The result may have more axes if it was broadcast against other operands, and reduced axes
        # may be kept with size 1.
        kept = result.shape[layout.axis] == source.shape[layout.axis]
        return layout if kept and result.dim() == source.dim() else None
    if result.dim() <= layout.axis:
        return None
    lead = layout.axis + 1
    return layout if result.shape[:lead] == source.shape[:lead] else None


def stays(func, source: Tensor, layout: Examples, result: Tensor) -> bool:
    """Whether a result of ``PLAIN_VIEWS`` obviously has its examples where the operand has them.

    If this is not obvious, ``follow`` has the answer, but takes ten times as long.
    """
    lead = layout.axis + 1
    if result.shape[:lead] != source.shape[:lead]:
        return False
    if func not in MOVES:
        return True
    # As in ``moved``: the axis has kept its stride, and no other axis has the same.
    stride, strides = source.stride(layout.axis), result.stride()
    return strides[layout.axis] == stride and strides.count(stride) == 1


def is_one(func, source: Tensor) -> bool:
    """Whether a convolution takes its operand for a single example."""
    return func in CONVOLUTIONS and source.dim() == CONVOLUTIONS[func] + 1


def takes_for_channels(func, source: Tensor, layout: Examples) -> bool:
    """Whether an operation on images takes the example axis for channels or positions."""
    apart = source.dim() - POOLS[func] if func in POOLS else 1
    return func in BATCH_FIRST and layout.axis >= apart


def aligned(func, args: Sequence[Any]) -> bool:
    """Whether trained operands obviously have their examples where the first operand has them.

    Broadcasting aligns axes from the right, so the examples of one may meet positions of another.
    """
    for item in args[1:]:
        if not isinstance(item, Tensor) or node_of(item) is not None:
            continue
        if item.requires_grad or item.dim() > args[0].dim():
            if func in SHARED or item.dim() != args[0].dim():
                return False
    return True


def keeps_examples(func, args: Sequence[Any], axis: int, result) -> bool:
    """Whether an operation obviously leaves the examples where they are.

    Not for operations in ``WATCHED``.

    Args:
        func: the operation.
        args: its operands; the first is data.
        axis: the example axis.
        result: what it returned.
    """
    if not isinstance(result, Tensor):
        return not any(isinstance(item, Tensor) and item.requires_grad for item in flatten(result))
    first = args[0]
    if func in BROADCASTS and not all(
        item.dim() in (0, result.dim())
        for item in args
        if isinstance(item, Tensor) and node_of(item) is None
    ):
        return False
    if is_one(func, first) or not aligned(func, args):
        return False
    if func in SUM_LAST and first.dim() == axis + 1:
        return False  # the examples' axis is summed
    if func in BATCH_FIRST and axis != 0:
        return False  # it takes the examples' axis for channels or positions
    if not result.requires_grad:
        return not first.dim() <= axis < result.dim()  # it may have got that axis here
    if func not in KEEPS:
        return False
    if first.dim() <= axis:
        return True
    return result.dim() > axis and result.shape[axis] == first.shape[axis]


def leaves(func, source: Tensor, axis: int, result) -> bool:
    """Whether an operation over other axes leaves the example axis where it is."""
    if not isinstance(result, Tensor):
        result = result[0]
    if func in QUANTILES:
        return False  # several add an axis
    return 0 < result.dim() <= source.dim() if axis == 0 else result.dim() == source.dim()


def keeps_rows(operands: Sequence[Tensor], axis: int) -> bool:
    """Whether a product only multiplies entries with the same index along an axis."""
    if len(operands) != 2:
        return False
    first, second = operands
    return first.dim() == second.dim() > axis + 2 and second.shape[axis] != 1


# Operations whose result may have another layout than the contract's.
CHANGES = frozenset().union(
    MOVES, RESHAPES, JOINS, REINDEXES, UNFOLLOWED, SCRAMBLES, PRODUCTS, ADDED_PRODUCTS,
    SOLVES, TENSOR_PRODUCTS,
)  # fmt: skip

# Views of one operand that keep the order of the rows along the example axis.
PLAIN_VIEWS = (MOVES - {torch.einsum}) | RESHAPES | frozenset(variants("chunk"))

# Operations whose effect on layouts is known.
FOLLOWED = KEEPS | CHANGES | frozenset(OVER_AXES) | frozenset({torch.broadcast_tensors})

# Operations that are followed on nested tensors, whose rows are examples, too.
ON_NESTED = (
    POINTWISE
    | BROADCASTS
    | frozenset([*REDUCES, torch._nested_view_from_jagged, *variants("unbind")])
)


def is_shared(call: Call, tensor: Tensor) -> bool:
    """Whether a tensor is the weight of an operation of ``SHARED_WEIGHT``."""
    place = SHARED_WEIGHT.get(call.func)
    return place is not None and tensor is call.argument(place, "weight")


# Operations with an operand that all examples share, unless it was computed from data.
SHARED = LOOKS_AT_FIRST | ROW_PRODUCTS | frozenset(SHARED_WEIGHT)
