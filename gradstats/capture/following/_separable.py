"""Which values over several examples are sums of terms that depend on one example each.

The derivative of such a sum by one example's values does not depend on the other examples, as in
``torch.autograd.grad(model(x).sum(), x, create_graph=True)``. The derivative of any other value,
such as the root of a mean, does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gradstats.capture.following._apart import sums_own
from gradstats.capture.following._examples import APART, MIXED, Examples, Scores, same_layout
from gradstats.capture.following._marks import Marks
from gradstats.capture.following._reindexed import PICKS
from gradstats.capture.operations._call import Call
from gradstats.capture.operations._graph import nodes_behind
from gradstats.capture.operations._nested import is_among
from gradstats.capture.operations._operations import (
    ADDED_PRODUCTS,
    ADDS,
    CASTS,
    CONVOLUTIONS,
    DIVIDES,
    ELEMENT_LOSSES,
    JOINS,
    MULTIPLIES,
    OUTER_PRODUCTS,
    PAD_SEQUENCE,
    PADS,
    PRODUCTS,
    RESHAPES,
    TENSOR_PRODUCTS,
    TRANSPOSES,
    VIEW_GETTERS,
    function_variants,
    is_trusted,
    variants,
)

# Operations that return one of several values. A small change does not change which one, so their
# results depend on no other.
CHOOSES = frozenset(variants("max", "min", "amax", "amin", "median"))

# Piecewise linear functions: they turn a sum over all examples into another, as a small change does
# not change the piece. Only of real numbers: absolute values of complex ones are roots.
PIECEWISE_LINEAR = CHOOSES | frozenset(
    [
        functional.relu,
        *variants(
            "relu", "abs", "absolute", "clamp", "clamp_min", "clamp_max", "clip", "nan_to_num",
            "where", "maximum", "minimum", "aminmax", "fmax", "fmin", "sort", "msort", "topk",
            "kthvalue", "cummax", "cummin", "sign", "round", "floor", "ceil", "trunc",
        ),
        functional.relu6,
        functional.leaky_relu,
        functional.hardtanh,
        functional.threshold,
        functional.l1_loss,
    ]
)  # fmt: skip

# Norms, also of a difference, with the position and the name of their order. Those of order 1 and
# infinity of real numbers are piecewise linear; those of another order are roots of sums.
NORMS = {
    **dict.fromkeys(variants("norm"), (1, "p")),
    **dict.fromkeys((torch.linalg.vector_norm, torch.linalg.norm), (1, "ord")),
    **dict.fromkeys(variants("dist"), (2, "p")),
}
ROOTS, SQUARES = frozenset(variants("sqrt")), frozenset(variants("square"))
POWERS = frozenset([*variants("pow"), Tensor.__pow__])

# Sums, and operations that pick or move elements: of sums they make sums.
KEEPS_SUMS = (
    TRANSPOSES
    | RESHAPES
    | JOINS.keys()
    | PADS
    | PICKS.keys()
    | ADDS
    | CASTS
    | frozenset(
        [
            *function_variants(
                "sum", "mean", "nansum", "nanmean", "neg", "negative", "positive",
            ),
            *variants(
                "diag_embed", "trace", "tril", "triu", "masked_fill", "cumsum", "diff",
                "sum_to_size", "real", "imag", "conj", "cpu", "cuda", "atleast_1d", "atleast_2d",
                "atleast_3d", "broadcast_tensors", "dropout", "block_diag", "complex",
                "view_as_real", "view_as_complex", "cfloat", "cdouble", "resolve_conj",
                "resolve_neg",
            ),
            *VIEW_GETTERS,
            functional.dropout,
            PAD_SEQUENCE,
        ]
    )
)  # fmt: skip

# Losses, which return one number for all examples unless told otherwise.
LOSSES = ELEMENT_LOSSES | frozenset(
    [
        functional.cross_entropy,
        *(getattr(functional, name) for name in dir(functional) if name.endswith("_loss")),
    ]
)

# Losses that multiply their errors by weights, the operand at ``WEIGHT``; a mean is then divided
# by the sum of the weights.
WEIGHTED = frozenset({functional.mse_loss, functional.l1_loss})
WEIGHT = 5, "weight"

# Operations that sum over the examples, or pick one value.
JOINS_EXAMPLES = LOSSES | CHOOSES | frozenset(variants("nanmedian"))

# Products: linear in each operand, so that they keep sums if only one operand is trained.
LINEAR_IN_EACH = (
    PRODUCTS
    | ADDED_PRODUCTS
    | (TENSOR_PRODUCTS - OUTER_PRODUCTS)
    | CONVOLUTIONS.keys()
    | MULTIPLIES
    | frozenset([torch.einsum, functional.linear, torch.linalg.vecdot, *variants("addcmul")])
)

# Interpolation from one operand to the other.
BETWEEN = frozenset(variants("lerp"))

# Quotients, with the position and the name of the divisor.
DIVISORS = {
    **dict.fromkeys(DIVIDES, (1, "other")),
    **dict.fromkeys(variants("addcdiv"), (2, "tensor2")),
}


def is_sum(marks: Marks, call: Call) -> bool | None:
    """Whether the result of an operation is a sum of terms of one example each.

    Args:
        marks: what is noted about the operands.
        call: the operation; the examples are not apart in its result.

    Returns:
        The answer; None if it is not known of an operand.
    """
    func, _, _, operands, result = call
    trained = [tensor for tensor in operands if tensor.requires_grad]
    placed = [marks.owned(tensor) for tensor in trained]
    apart = [isinstance(each, APART) for each in placed]
    of_scores = [each for each in placed if isinstance(each, Scores)]
    if of_scores:
        return len(trained) == 1 and sums_own(func, trained[0], of_scores[0])
    # An operand that was changed in place counts as it was before.
    additive = [marks.is_additive(tensor, writes=int(tensor is result)) for tensor in trained]
    if not trained or not all(additive):
        return None
    if func in WEIGHTED and is_among(call.argument(*WEIGHT), trained):
        if not (all(apart) and _adds_errors(call)):
            return False
    if func in KEEPS_SUMS:
        return True
    # The user's own operations are trusted to sum what is apart, and to keep a loss a sum.
    if is_trusted(func) and (all(apart) or not result.dim()):
        return True
    if func is torch.segment_reduce and call.argument(1, "reduce") in ("sum", "mean"):
        return True
    real = not any(tensor.is_complex() for tensor in trained)
    if real and func in PIECEWISE_LINEAR and not any(apart):
        return True
    if func in NORMS:
        return real and _order_of(call) in (1, math.inf) and _lie_side_by_side(marks, operands)
    if func in BETWEEN and not is_among(call.argument(2, "weight"), trained):
        return True
    if len(trained) == 1:
        divided = func in DIVISORS and trained[0] is not call.argument(*DIVISORS[func])
        multiplied = func in LINEAR_IN_EACH or divided or exponent_of(call) == 1
        return multiplied or (func in JOINS_EXAMPLES and apart[0])
    if all(apart) and func in LINEAR_IN_EACH and marks.owned(result) is MIXED:
        return not marks.meetings.is_coupled(result)
    # Each row then meets rows of its own example alone.
    return func in JOINS_EXAMPLES and all(apart) and _lie_side_by_side(marks, trained)


def _lie_side_by_side(marks: Marks, tensors: Sequence[Tensor]) -> bool:
    """Whether tensors have as many axes, and their examples in the same places, if any."""
    placed = [owned for owned in map(marks.owned, tensors) if owned is not None]
    together = all(same_layout(placed[0], each) for each in placed)
    return together and len({tensor.dim() for tensor in tensors}) == 1


def _adds_errors(call: Call) -> bool:
    """Whether a loss of ``WEIGHTED`` is the sum of its errors, not their mean."""
    # PyTorch's older flags, if given, count in the place of ``reduction``.
    average, reduce = call.argument(2, "size_average"), call.argument(3, "reduce")
    if average is None and reduce is None:
        return call.argument(4, "reduction", "mean") == "sum"
    return average is False


def root_of(marks: Marks, call: Call) -> float | None:
    """Return which root of a sum over examples an operation takes, as norms do; None if none."""
    operand = call.data[0]
    if call.func in ROOTS:
        return 2 if marks.values.is_sum(operand) else None
    trained = [tensor for tensor in call.data if tensor.requires_grad]
    if call.func not in NORMS or _is_of_matrices(call):
        return None
    if not all([isinstance(marks.owned(tensor), Examples) for tensor in trained]):
        return None
    return _order_of(call) if _lie_side_by_side(marks, call.data) else None


def _order_of(call: Call) -> float:
    """Return the order of a norm; NaN for those with another name than the Frobenius norm."""
    order = call.argument(*NORMS[call.func])
    if order in (None, "fro"):
        return 2
    return order if isinstance(order, (int, float)) else math.nan


def _is_of_matrices(call: Call) -> bool:
    """Whether a norm with a number for its order is that of matrices, as of singular values."""
    if call.func is not torch.linalg.norm or call.argument(1, "ord") in (None, "fro"):
        return False
    axes = call.argument(2, "dim")
    if axes is None:
        return call.data[0].dim() == 2
    return isinstance(axes, (tuple, list)) and len(axes) == 2


def power_of(call: Call) -> float | None:
    """Return the number to whose power an operation raises its operand; None for others."""
    return 2 if call.func in SQUARES else exponent_of(call)


def exponent_of(call: Call) -> float | None:
    """Return the exponent of a power by a number; None for other operations."""
    exponent = call.argument(1, "exponent") if call.func in POWERS else None
    return exponent if isinstance(exponent, (int, float)) else None


def joins_examples(marks: Marks, output: Any) -> bool:
    """Whether derivatives of a tensor may depend on values of several examples."""
    met = {*marks.meetings.coupled, *marks.meetings.weighed}
    if met and any(node in met for node in nodes_behind(output)):
        return True
    return not marks.is_additive(output)
