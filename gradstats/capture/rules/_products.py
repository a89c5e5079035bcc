"""Products with one tracked operand: linear, matmul, mm, bmm, addmm, baddbmm, einsum, tensordot."""

from __future__ import annotations

import string
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from gradstats.capture.following._examples import Examples, Whole
from gradstats.capture.following._signatures import by_place
from gradstats.capture.operations._einsum import (
    Equation,
    matrix_product,
    parse_equation,
    tensor_product,
)
from gradstats.capture.operations._nested import argument_of
from gradstats.capture.operations._operations import (
    AXES_OF_FACTORS,
    PRODUCTS,
    TENSOR_PRODUCTS,
    variants,
)
from gradstats.capture.parameters._derivation import Derived
from gradstats.capture.parameters._nodes import Node
from gradstats.capture.parameters._refusals import refuse
from gradstats.capture.parameters._tensors import first_node, node_of, nodes_of, value_of, wrap
from gradstats.capture.rules._common import (
    are_of_one,
    as_data,
    autocast_dtype,
    cast_for_autocast,
    in_dtype,
    layered,
    locate,
    run,
)
from gradstats.capture.uses._decided import decide
from gradstats.capture.uses._grafted import Composed
from gradstats.capture.uses._hooked import LINEAR, LINEAR_WITHOUT_BIAS, hooked
from gradstats.capture.uses._linear import LinearFactors, by_rows, is_pytorchs_own
from gradstats.capture.uses._product import ProductFactor
from gradstats.capture.uses._tap import tap
from gradstats.capture.uses._uses import free_of_views
from gradstats.contractions._precision import without_autocast

if TYPE_CHECKING:
    from gradstats.capture._context import Context


def linear(tracker: Context, func, input, weight, bias=None):
    """y = x Wᵀ + b: Outer(g, x) for the weight, Vector(Σ_t g) for the bias."""
    if node_of(input) is not None:
        refuse(func, first_node(input), "with a tracked input and data as its weight has no rule")
    if weight.dim() == 1:
        if bias is not None:
            refuse(func, first_node(weight, bias), "with a vector and a bias has no rule")
        return matmul(tracker, torch.matmul, input, weight)
    if weight.is_complex():
        return Composed(_complex_linear)(tracker, func, input, weight, bias)
    apart = tracker.marks.is_trained(weight) and not are_of_one(tracker, (input, weight))
    fits = bias is None or bias.shape == weight.shape[:1]
    if apart or not fits or not tracker.marks.is_of_data(input):
        return Composed(_bias_apart, rounds=not fits)(tracker, func, input, weight, bias)
    return linear_layer(tracker, func, input, weight, bias)


def _bias_apart(input: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The layer as a product and a sum.

    For examples that lie in the bias alone, or along the rows of a weight computed from data, and
    for a bias that is broadcast.
    """
    result = functional.linear(input, weight)
    return result + bias.to(result.dtype)  # which autocast may have changed


def _complex_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return input @ weight.mT if bias is None else input @ weight.mT + bias


def linear_layer(tracker: Context, func, x, weight, bias, *, inputs_first=False):
    """Run a linear layer with its factors attached."""
    settings, weight_node, bias_node = tracker.settings, node_of(weight), node_of(bias)
    nodes = [node for node in (weight_node, bias_node) if node is not None]
    examples = locate(tracker, func, nodes[0], x, folds=True, trailing=1)
    of_weight, of_bias = weight_node is not None, bias_node is not None
    data = tracker.marks.is_trained(weight), tracker.marks.is_trained(bias)
    rest = tuple(weight.shape), data, inputs_first, weight.stride(0) == 1
    if is_pytorchs_own(settings, x, weight, examples, inputs_first):
        place = LINEAR_WITHOUT_BIAS if bias is None else LINEAR
        rows = examples if x.dim() == 2 else by_rows(examples, x)
        own = LinearFactors(of_weight, of_bias, rows, *rest)
        result = hooked(tracker, x, (weight, bias), examples, place, own, own.forward)
        if result is not None:
            return result
    layer = LinearFactors(of_weight, of_bias, examples, *rest)
    if settings.exact:
        x = cast_for_autocast(tracker, x)
        result = layer.forward(x, value_of(weight), value_of(bias))
        return tap(nodes, free_of_views(result), layer, x if of_weight else None)
    autocast = autocast_dtype(x) is not None
    return decide(tracker, layered, x, (weight, bias), examples, layer, autocast)


def matmul(tracker: Context, func, input, other=None, **kwargs):
    """x W, W x and their batched forms."""
    if kwargs:
        other = next((kwargs.pop(name) for name in SECOND if name in kwargs), other)
    if kwargs:
        refuse(func, first_node(input, other), f"with {', '.join(kwargs)}= has no rule")
    axes = AXES_OF_FACTORS.get(func)
    if axes is not None and axes != (input.dim(), other.dim()):
        return func(value_of(input), value_of(other))  # which PyTorch refuses
    if node_of(input) is None and other.dim() == 2 <= input.dim() and not other.is_complex():
        return linear_layer(tracker, func, input, other, None, inputs_first=True)
    if axes != (2, 1) or input.device.type != "cpu":  # there autocast leaves mv alone
        input, other = _cast_data(tracker, input), _cast_data(tracker, other)
    operands = input, other
    sources = _repeated_source(input, other), _repeated_source(other, input)
    shown = _own_slices(tracker, func, operands, sources, *matrix_product(input.dim(), other.dim()))
    if not nodes_of(shown):
        return func(*shown)
    result = func(*map(value_of, operands))
    specs, out = matrix_product(*(source.dim() for source in sources))
    node, x, factors = _factors_between(tracker, func, sources, specs, out)
    return tap([node], free_of_views(result), factors, x)


def added_product(tracker: Context, func, *args, **kwargs):
    """β·input + α·first second, perhaps in place; β and α by name, or by place as in old code.

    With β = α = 1 and a vector of full width, addmm is a linear layer.
    """
    args, kwargs = by_place(func, args, kwargs)
    if func in IN_PLACE and node_of(args[0]) is not None:
        refuse(func, first_node(args[0]), "to a tensor that belongs to no example has no rule")
    numbers = [item for item in args if not isinstance(item, Tensor)]
    scales = {"beta": 1, "alpha": 1} | dict(zip(("beta", "alpha"), numbers, strict=False)) | kwargs
    input, first, second = [item for item in args if isinstance(item, Tensor)]
    one = IN_PLACE.get(func, func)
    layer = one in ADDMM and input.shape == second.shape[1:] and {*scales.values()} == {1}
    layer = layer and tracker.marks.is_of_data(first) and not second.is_complex()
    # A matrix that was computed from other examples is not a layer's weight.
    layer = layer and (not tracker.marks.is_trained(second) or are_of_one(tracker, (first, second)))
    # Autocast does not apply to operations in place.
    with without_autocast() if func in IN_PLACE else nullcontext():
        if layer:
            result = linear_layer(tracker, one, first, second, input, inputs_first=True)
        else:
            composed = Composed(partial(_scaled_sum, ADDED[one]), rounds=True)
            result = composed(tracker, one, input, first, second, **scales)
    return args[0].copy_(result) if func in IN_PLACE else result


def _scaled_sum(product, input: Tensor, first: Tensor, second: Tensor, *, beta, alpha) -> Tensor:
    multiplied = product(first, second)
    if not beta:  # PyTorch does not read the input then, but gives it a gradient of zeros
        input = input.masked_fill(torch.ones((), dtype=torch.bool, device=input.device), 0)
    input = input.to(multiplied.dtype)  # which autocast may have changed
    input = input if beta == 1 else beta * input
    return input + (multiplied if alpha == 1 else alpha * multiplied)


def _own_slices(
    tracker: Context,
    func,
    operands: Sequence[Tensor],
    sources: Sequence[Tensor],
    specs: Sequence[list[str]],
    out: list[str],
) -> list[Tensor]:
    """Return two operands; a tracked one with a slice for each row of the examples becomes data.

    Such operands were computed from parameters that had been repeated for the batch: latent
    queries, relative positions. A parameter itself belongs to no example, even if one of its sizes
    happens to be the batch's.

    Args:
        sources: what the operands were before they were repeated.
        specs, out: the index lists of the operands and of the result.
    """
    shown = list(operands)
    for place, (item, source) in enumerate(zip(operands, sources, strict=True)):
        node, x = node_of(item), operands[1 - place]
        if not isinstance(node, Derived) or not tracker.marks.is_of_data(x):
            continue
        layout = tracker.marks.layout_of(x)
        letter = None if layout is None else specs[1 - place][layout.axis]
        if layout is None or letter not in out or letter not in specs[place]:
            continue
        axis = specs[place].index(letter)
        axis_of_source = axis - item.dim() + source.dim()
        if axis_of_source >= 0 and source.shape[axis_of_source] == layout.rows:
            shown[place] = as_data(tracker, func, node, item, layout.along(axis))
    return shown


def _cast_data(tracker: Context, item: Tensor) -> Tensor:
    return cast_for_autocast(tracker, item) if node_of(item) is None else item


def _factors_between(
    tracker: Context, func, operands: Sequence[Tensor], specs: Sequence[list[str]], out: list[str]
) -> tuple[Node, Tensor, ProductFactor]:
    """Return the tracked operand's node, the data, and the factors of a contraction.

    Args:
        operands: two, of which one is tracked.
        specs, out: the index lists of the operands and of the result.
    """
    operands, specs = list(operands), list(specs)
    param, data = (0, 1) if node_of(operands[0]) is not None else (1, 0)
    node = first_node(operands[param])
    x = operands[data]
    whole = _whole_of(tracker, x, specs[data], operands[param], specs[param], out)
    if whole is not None:
        letter = next(c for c in string.ascii_letters if not any(c in s for s in (*specs, out)))
        operands[data], specs[data], out = x.unsqueeze(0), [letter, *specs[data]], [letter, *out]
        examples = whole.row(tracker.batch_size, x.device)
    else:
        examples = locate(tracker, func, node, x, folds=True)
        letter = specs[data][examples.axis]
    every = [
        zip(spec, operand.shape, strict=True) for spec, operand in zip(specs, operands, strict=True)
    ]
    several = {index for pairs in every for index, size in pairs if size != 1}
    if examples.rows == 1 and letter in several:
        refuse(func, node, "repeats the only example, which has no rule")
    for position, repeated in ((data, several), (param, several | {letter})):
        operands[position], specs[position] = _without_ones(
            tracker, operands[position], specs[position], repeated
        )
    alone = [axis for axis, i in enumerate(specs[param]) if i not in specs[data] and i not in out]
    if alone:
        operands[param] = run(tracker, Tensor.sum, operands[param], alone)
        specs[param] = [index for axis, index in enumerate(specs[param]) if axis not in alone]
    node = first_node(operands[param])
    shape = operands[param].shape
    factors = ProductFactor.between(
        func, node, shape, specs[param], letter, specs[data], out, examples,
        alone=whole is not None,
    )  # fmt: skip
    return node, operands[data], factors


def _whole_of(
    tracker: Context, x: Tensor, indices: list[str], parameter: Tensor, others: list[str],
    out: list[str],
) -> Whole | None:  # fmt: skip
    """Return the example that all of the data belong to, without an example axis; else None.

    Args:
        x, indices: the data, and their indices.
        parameter, others: the tracked operand, and its indices.
        out: the indices of the result.
    """
    owned = tracker.marks.owned(x) if tracker.marks.is_data(x) else None
    if tracker.batch_size > 1 or not isinstance(owned, Examples):
        return owned if isinstance(owned, Whole) else None
    layout = tracker.marks.layout_of(x)  # as ``locate`` takes it
    assert layout is not None
    # The only example's rows may be summed, or meet a slice of the parameter each: then all of the
    # data are the example's, without an example axis.
    index, sizes = indices[layout.axis], dict(zip(others, parameter.shape, strict=True))
    ends = index not in sizes and index not in out
    return Whole(0) if ends or sizes.get(index) == layout.rows else None


def _without_ones(
    tracker: Context, operand: Tensor, spec: list[str], repeated: set[str]
) -> tuple[Tensor, list[str]]:
    """Return an operand and its indices without axes of size 1, of those that are ``repeated``."""
    for axis in reversed(range(len(spec))):
        if operand.shape[axis] == 1 and spec[axis] in repeated:
            operand = run(tracker, Tensor.squeeze, operand, axis)
            spec = [*spec[:axis], *spec[axis + 1 :]]
    return operand, spec


def einsum(tracker: Context, func, equation, *operands):
    """Two-operand contractions in Einstein's notation, one operand tracked."""
    run = partial(func, equation)
    return _contracted(tracker, func, run, operands, parse_equation(equation, operands))


def tensor_products(tracker: Context, func, *args, **kwargs):
    """tensordot, inner, outer and dot."""
    (first, second, *rest), kwargs = by_place(func, args, kwargs)

    def run(first: Tensor, second: Tensor) -> Tensor:
        return func(first, second, *rest, **kwargs)

    try:
        dims = argument_of(rest, kwargs, 0, "dims", 2)
        equation = tensor_product(func, dims, first.dim(), second.dim())
    except (IndexError, ValueError):
        return run(value_of(first), value_of(second))  # which PyTorch refuses
    return _contracted(tracker, func, run, (first, second), equation)


def _contracted(
    tracker: Context, func, run, operands: tuple[Tensor, ...], equation: Equation
) -> Tensor:
    """Run a contraction of two operands, as run(*operands), with its factor attached."""
    inputs, out = equation
    operands = tuple(_own_slices(tracker, func, operands, operands, inputs, out))
    if not nodes_of(operands):
        return run(*operands)
    result = run(*map(value_of, operands))
    if result.dtype == autocast_dtype(result):
        # On a CPU autocast rounds only the matrices that are multiplied, after sums over the
        # indices that a single operand has.
        late = result.device.type == "cpu"
        operands = tuple(
            operand if late and {*spec} - {*other, *out} else _cast_data(tracker, operand)
            for operand, spec, other in zip(operands, inputs, reversed(inputs), strict=True)
        )
    operands = tuple(_of_kind(tracker, operand, result.dtype) for operand in operands)
    node, x, factors = _factors_between(tracker, func, operands, inputs, out)
    return tap([node], free_of_views(result), factors, x)


def _of_kind(tracker: Context, item: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an operand as complex or floating-point numbers, as the result has them.

    Contractions without a sum multiply real numbers with complex ones, and integers with both.
    """
    if item.is_complex() or (item.is_floating_point() and not dtype.is_complex):
        return item
    if node_of(item) is None:
        return in_dtype(tracker, item, dtype)
    return run(tracker, Tensor.to, item, dtype)


def _repeated_source(operand: Tensor, other: Tensor) -> Tensor:
    """Return what a tracked operand of a product was before it was repeated for each example.

    A product broadcasts by itself, so the repetition only makes the gradient larger. Unless the
    other operand has no such axes: then it makes several products.
    """
    node = node_of(operand)
    lead = other.shape[:-2]

    def repeats(source: Node, repeated: Node) -> bool:
        sizes = (torch.broadcast_shapes(lead, item.shape[:-2]) for item in (source, repeated))
        return len(set(sizes)) == 1

    while (
        isinstance(node, Derived)
        and node.function in (Tensor.expand, Tensor.expand_as)
        and node.parents[0].value.dim() >= 2
        and node.parents[0].shape[-2:] == node.shape[-2:]
        and repeats(node.parents[0], node)
    ):
        node = node.parents[0]
        operand = wrap(node) if isinstance(node, Derived) else node.parameter  # type: ignore[attr-defined]
    return operand


# Names of the second operand in products that do not call it ``other``.
SECOND = ("mat2", "tensor2", "vec")

ADDMM = (torch.addmm, Tensor.addmm)

# Products that are added to an input, with the product alone.
ADDED = {
    **dict.fromkeys(ADDMM, torch.mm),
    **dict.fromkeys(variants("baddbmm"), torch.bmm),
    **dict.fromkeys(variants("addr"), torch.outer),
    **dict.fromkeys(variants("addmv"), torch.mv),
}

# Those that change the input in place, with those that return a new tensor.
IN_PLACE = {Tensor.addmm_: Tensor.addmm, Tensor.baddbmm_: Tensor.baddbmm}

RULES = {
    functional.linear: linear,
    **dict.fromkeys((*ADDED, *IN_PLACE), added_product),
    **dict.fromkeys(PRODUCTS, matmul),
    **dict.fromkeys(TENSOR_PRODUCTS.difference(variants("vdot")), tensor_products),
}
