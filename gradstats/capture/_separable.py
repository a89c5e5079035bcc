"""Which values of several examples are sums of terms that depend on one example each.

A derivative of such a sum with respect to one example's values does not depend on the others, as in
``torch.autograd.grad(model(x).sum(), x, create_graph=True)``. That of anything else, as of the root
of a mean, does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gradstats.capture._examples import Examples, Whole, same_layout
from gradstats.capture._operations import (
    ADDED_PRODUCTS,
    ELEMENT_LOSSES,
    JOINS,
    MOVES,
    OUTER_PRODUCTS,
    PRODUCTS,
    RESHAPES,
    TENSOR_PRODUCTS,
    function_variants,
    in_place_variants,
    variants,
)

ADDED = ("add", "sub", "subtract")
ADDS_IN_PLACE = frozenset(in_place_variants(*ADDED))

# Sums, and what takes or moves elements: of sums they return sums.
KEEPS_SUMS = (
    (MOVES - {torch.einsum})
    | RESHAPES
    | JOINS.keys()
    | frozenset(
        [
            *function_variants(*ADDED, "sum", "mean", "nansum", "neg", "negative", "positive"),
            *variants(
                "rsub", "clone", "contiguous", "to", "float", "double", "half", "bfloat16",
                "type_as", "select", "narrow", "unbind", "chunk", "split", "expand", "expand_as",
                "broadcast_to", "index_select", "diagonal", "diag",
            ),
            Tensor.__getitem__,
        ]
    )
)  # fmt: skip

# Sums over the examples, and the largest of their values: which that is does not change.
JOINS_EXAMPLES = ELEMENT_LOSSES | frozenset(
    [
        functional.cross_entropy,
        *(getattr(functional, name) for name in dir(functional) if name.endswith("_loss")),
        *variants("max", "min", "amax", "amin", "nanmean", "dot", "vdot"),
    ]
)

# Products: sums if one of their operands has a gradient.
MULTIPLIES = (
    PRODUCTS
    | ADDED_PRODUCTS.keys()
    | (TENSOR_PRODUCTS - OUTER_PRODUCTS)
    | frozenset([torch.einsum, functional.linear, *function_variants("mul", "multiply")])
)

# By their second operand.
DIVIDES = frozenset(
    [*variants("div", "divide", "true_divide"), Tensor.__div__, Tensor.__truediv__]
)  # fmt: skip


def is_sum(func, args: Sequence[Any], trained: Sequence[Tensor], owned: Sequence[Any]) -> bool:
    """Whether the result of an operation is a sum of terms of one example each.

    Args:
        func: the operation.
        args: its arguments.
        trained: its operands of data that have a gradient; where they are of several examples, such
            sums themselves.
        owned: for each of them, where the examples lie in it.
    """
    joint = any(not isinstance(each, (Examples, Whole)) for each in owned)
    if func in KEEPS_SUMS:
        return True
    if len(trained) == 1:
        multiplied = func in MULTIPLIES or (func in DIVIDES and trained[0] is args[0])
        return multiplied or (func in JOINS_EXAMPLES and not joint)
    # Values of one example with others of the same, not with those of another.
    together = all(same_layout(owned[0], each) for each in owned)
    aligned = together and len({tensor.dim() for tensor in trained}) == 1 and not joint
    vectors = func in PRODUCTS and trained[0].dim() == 1
    return aligned and (func in JOINS_EXAMPLES or vectors)
