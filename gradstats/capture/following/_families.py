"""Where the examples lie in the results of operations on several operands, family by family."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from gradstats.capture.following._apart import attention_keeps_apart, scores, without_columns
from gradstats.capture.following._examples import Layout, Scores, same_layout
from gradstats.capture.following._layout import is_one
from gradstats.capture.following._marks import Marks
from gradstats.capture.following._multiplied import (
    by_equation,
    contraction,
    convolved,
    convolved_places,
)
from gradstats.capture.following._operands import Unchanged, broadcast, by_first
from gradstats.capture.following._reductions import ATTENTION
from gradstats.capture.operations._call import Call
from gradstats.capture.operations._einsum import matrix_product, parse_equation, tensor_product
from gradstats.capture.operations._formats import BATCH_NORMS
from gradstats.capture.operations._nested import is_among, operands_of
from gradstats.capture.operations._operations import (
    ADDED_PRODUCTS,
    BROADCASTS,
    CONVOLUTIONS,
    PRODUCTS,
    ROW_PRODUCTS,
    SOLVES,
    TENSOR_PRODUCTS,
    solves_vector,
)


def _of_linear(marks: Marks, call: Call) -> Layout | Unchanged:
    """All examples share the weight of a layer, unless it was computed from parameters and data."""
    first = call.args[0]
    layout = marks.layout_of(first) if marks.is_of_data(first) else None
    sums = layout is not None and layout.axis == first.dim() - 1
    if not sums and not any(map(marks.is_trained, call.args[1:])):
        return by_first(marks, call)
    after = _of_product(marks, call)
    bias = call.argument(2, "bias")
    biases = [tensor for tensor in call.data if tensor is bias]
    if biases and broadcast(marks, biases, call.result) != after:
        marks.meetings.note(call.result)
        return None
    return after


def _of_product(marks: Marks, call: Call) -> Layout:
    operands = operands_of(call.args, call.kwargs)[:2]
    return _by_matrices(marks, operands, call.result, of_rows=call.func in ROW_PRODUCTS)


def _by_matrices(
    marks: Marks, operands: Sequence[Tensor], result: Tensor, *, of_rows: bool = False
) -> Layout:
    first, second = (operand.dim() for operand in operands)
    equation = matrix_product(first, second, of_rows=of_rows)
    return by_equation(marks, operands, equation, result)


def _of_added_product(marks: Marks, call: Call) -> Layout:
    _, args, _, data, result = call
    # In PyTorch's older signatures the numbers alpha and beta stand between the tensors.
    first, *factors = [item for item in args if isinstance(item, Tensor)]
    of_data = any(is_among(item, data) for item in factors)
    after = _by_matrices(marks, factors, result) if of_data else None
    if not is_among(first, data):
        return after
    added = broadcast(marks, [first], result)
    if not of_data:
        return added
    if isinstance(after, Scores):
        if added is None and first.requires_grad:
            return None
        return scores([after] if added is None else [added, after], result)
    return after if same_layout(added, after) else None


def _of_solution(marks: Marks, call: Call) -> Layout:
    func, args, kwargs, data, result = call
    if solves_vector(func, args):
        # Axes in front of the matrices stay where they are; those of the matrices are summed over.
        first, second = (operand.dim() for operand in args[:2])
        places = [[*range(first - 2), -1, -1], [*range(second - 1), -1]]
        return contraction(marks, args[:2], places, result)
    after = broadcast(marks, data, result)
    if after is None or after.axis < result.dim() - 2:
        return after
    # If all examples share the matrix, each right-hand side has a solution of its own.
    sides = args[SOLVES[func]] if len(args) > SOLVES[func] else None
    shared = len(data) == 1 and data[0] is sides and data[0].dim() > 1
    axis_of_sides = result.dim() - (1 if kwargs.get("left", True) else 2)
    return after if shared and after.axis == axis_of_sides else None


def _of_einsum(marks: Marks, call: Call) -> Layout:
    operands = operands_of(call.args[1:], {})
    equation = parse_equation(call.args[0], operands)
    return by_equation(marks, operands, equation, call.result)


def _of_convolution(marks: Marks, call: Call) -> Layout | Unchanged:
    if is_one(call.func, call.args[0]):
        return by_first(marks, call)
    operands, lies = operands_of(call.args, {}), partial(convolved, call)
    return contraction(marks, operands, convolved_places(call, operands), call.result, lies)


def _of_tensor_product(marks: Marks, call: Call) -> Layout:
    operands = operands_of(call.args, call.kwargs)[:2]
    dims = call.argument(2, "dims", 2)
    equation = tensor_product(call.func, dims, *map(Tensor.dim, operands))
    return by_equation(marks, operands, equation, call.result)


def _of_batch_norm(marks: Marks, call: Call) -> Layout | Unchanged:
    if call.argument(5, "training") and call.result.requires_grad and marks.batch_size > 1:
        # Layers of the model were refused before; this one is of another module. The losses' graph
        # will show whether a gradient passes through it.
        how = "normalises by statistics of the batch, as a layer in training mode does"
        marks.meetings.couple(call.result, f"{how} (call .eval() on it)")
    return by_first(marks, call)


def _of_attention(marks: Marks, call: Call) -> Layout | Unchanged:
    trained = call.result.requires_grad
    if marks.packed and trained and not attention_keeps_apart(marks, call):
        marks.meetings.note(call.result)
        return None
    query = call.argument(0, "query")
    rows = marks.layout_of(query) if trained and marks.is_of_data(query) else None
    if rows is not None and rows.axis == query.dim() - 2:
        # The queries may differ from the keys, as when they are processed in pieces.
        return without_columns(rows).behind(call.result.dim() - query.dim())
    return by_first(marks, call)


def _of_broadcast(marks: Marks, call: Call) -> Layout | Unchanged:
    first = call.data[0]
    if len(call.data) > 1 or marks.is_marked(first) or call.result.dim() > first.dim():
        return broadcast(marks, call.data, call.result)
    return by_first(marks, call)


# Rules for operations on several operands, and for others that need a rule of their own.
FAMILIES: dict[Any, Callable[[Marks, Call], Layout | Unchanged]] = {
    **dict.fromkeys(PRODUCTS | ROW_PRODUCTS, _of_product),
    linear: _of_linear,
    **dict.fromkeys(ADDED_PRODUCTS, _of_added_product),
    **dict.fromkeys(SOLVES, _of_solution),
    torch.einsum: _of_einsum,
    **dict.fromkeys(CONVOLUTIONS, _of_convolution),
    **dict.fromkeys(TENSOR_PRODUCTS, _of_tensor_product),
    **dict.fromkeys(BATCH_NORMS, _of_batch_norm),
    ATTENTION: _of_attention,
    **dict.fromkeys(BROADCASTS, _of_broadcast),
}
