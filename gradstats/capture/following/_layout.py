"""Where the examples lie after an operation on one tensor of data.

By contract, data have their examples along the caller's ``batch_dim``. If code transposes or folds
that axis, shape alone would mislead: with as many positions as examples, a transposed batch looks
like an untransposed one. So such tensors carry their layout with them. If it is lost, they are
refused where they meet a parameter.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from gradstats.capture.following._examples import Examples, Whole
from gradstats.capture.following._reductions import OVER_AXES, QUANTILES, REDUCES, reduced
from gradstats.capture.following._reindexed import REINDEXES, moved, reshaped
from gradstats.capture.operations._call import Call
from gradstats.capture.operations._operations import (
    ADDED_PRODUCTS,
    BATCH_FIRST,
    BROADCASTS,
    CONVOLUTIONS,
    FORMS,
    JOINS,
    LOOKS_AT_FIRST,
    MOVES,
    POOLS,
    PRODUCTS,
    REGROUPS,
    RESHAPES,
    ROW_PRODUCTS,
    SHARED_WEIGHT,
    SOLVES,
    TENSOR_PRODUCTS,
    UNFOLLOWED,
    variants,
)
from gradstats.capture.operations._rowwise import POINTWISE


def follow(call: Call, source: Tensor, layout: Examples) -> Examples | Whole | None:
    """Return the layout of an operation's result, given the layout of its first data operand.

    Args:
        call: the operation.
        source: the operand.
        layout: its layout.

    Returns:
        The layout; None if the operation may have lost it.
    """
    func, result = call.func, call.result
    if takes_for_channels(func, source, layout) or is_one(func, source):
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
        # The result has more axes if it was broadcast against other operands, and reduced axes may
        # be kept with size 1.
        kept = result.shape[layout.axis] == source.shape[layout.axis]
        return layout if kept and result.dim() == source.dim() else None
    lead = layout.axis + 1
    return layout if result.shape[:lead] == source.shape[:lead] else None


def is_one(func, source: Tensor) -> bool:
    """Whether PyTorch takes the operand of a convolution for a single example."""
    return func in CONVOLUTIONS and source.dim() == CONVOLUTIONS[func] + 1


def takes_for_channels(func, source: Tensor, layout: Examples) -> bool:
    """Whether an operation on images treats the example axis as channels or positions."""
    if func not in BATCH_FIRST:
        return False
    if func is functional.interpolate:
        return layout.axis >= 2  # it keeps channels apart, as pooling does
    return layout.axis >= (source.dim() - POOLS[func] if func in POOLS else 1)


# Operations with an operand that all examples share, unless it was computed from data.
SHARED = LOOKS_AT_FIRST | ROW_PRODUCTS | SHARED_WEIGHT.keys()

# Operations whose effect on layouts is known.
FOLLOWED = frozenset().union(
    POINTWISE, BROADCASTS, SHARED, BATCH_FIRST, REGROUPS, FORMS, OVER_AXES, MOVES, RESHAPES, JOINS,
    REINDEXES, UNFOLLOWED, PRODUCTS, ADDED_PRODUCTS, SOLVES, TENSOR_PRODUCTS,
)  # fmt: skip

# Operations that are also followed on nested tensors, whose rows are examples.
ON_NESTED = (
    POINTWISE
    | BROADCASTS
    | frozenset([*REDUCES, torch._nested_view_from_jagged, *variants("unbind")])
)


def is_shared(call: Call, tensor: Tensor) -> bool:
    """Whether a tensor is the weight of an operation of ``SHARED_WEIGHT``."""
    place = SHARED_WEIGHT.get(call.func)
    return place is not None and tensor is call.argument(place, "weight")
