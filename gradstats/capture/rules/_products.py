"""Matrix products: linear, matmul, mm, bmm, addmm, baddbmm, einsum with one tracked operand."""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gradstats._complex import real_product
from gradstats._cost import product
from gradstats._factors import Outer, Ragged, compute_dtype
from gradstats.capture._dispatch import derive, refuse
from gradstats.capture._einsum import parse_equation
from gradstats.capture._examples import Examples, Whole
from gradstats.capture._grafted import Composed
from gradstats.capture._hooked import LINEAR, LINEAR_WITHOUT_BIAS, hooked
from gradstats.capture._linear import LinearFactors, LinearUse
from gradstats.capture._nodes import Derived, Node
from gradstats.capture._operations import PRODUCTS
from gradstats.capture._tensors import first_node, node_of, wrap
from gradstats.capture._uses import derived, free_of_views, tap, use_of
from gradstats.capture._views import ExampleLayout, example_view
from gradstats.capture.rules._common import (
    are_of_one,
    autocast_dtype,
    bare,
    cast_for_autocast,
    check_rows,
    common_rows,
    in_order,
    locate,
    plain,
    run,
)


def linear(tracker, func, input, weight, bias=None):
    """y = x Wᵀ + b: Outer(g, x) for the weight, Vector(Σ_t g) for the bias."""
    if node_of(input) is not None:
        refuse(func, first_node(input), "with a tracked input and data as its weight has no rule")
    if weight.dim() == 1:
        if bias is not None:
            refuse(func, first_node(weight, bias), "with a vector and a bias has no rule")
        return matmul(tracker, torch.matmul, input, weight)
    if weight.is_complex():
        return Composed(_complex_linear)(tracker, func, input, weight, bias)
    if bias is None or bias.shape == weight.shape[:1]:
        return _linear(
            tracker, func, input, weight, bias, lambda x: func(x, plain(weight), plain(bias))
        )
    x = cast_for_autocast(tracker, input)
    parts = []
    if node_of(weight) is not None:
        node = first_node(weight)
        examples = locate(tracker, func, node, x, folds=True, trailing=1)
        parts.append(Part(node, LinearFactors(True, False, examples, tuple(weight.shape))))
    result = func(x, plain(weight), plain(bias))
    return _summed(tracker, func, result, x, parts, (bias, 1), (x, None))


def _complex_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return input @ weight.mT if bias is None else input @ weight.mT + bias


def _linear(
    tracker, func, x, weight, bias, native: Callable[[Tensor], Tensor], *, inputs_first=False
):
    """Attach a linear layer's factors; ``native`` is the caller's own operation on the data."""
    settings, weight_node, bias_node = tracker.settings, node_of(weight), node_of(bias)
    nodes = [node for node in (weight_node, bias_node) if node is not None]
    examples = locate(tracker, func, nodes[0], x, folds=True, trailing=1)
    layer = LinearFactors(
        weight_node is not None,
        bias_node is not None,
        examples,
        tuple(weight.shape),
        inputs_first,
        (tracker.is_trained(weight), tracker.is_trained(bias)),
    )
    # Who takes inner products takes factors and the training gradient.
    if x.dim() == 2 and examples.plain and x.is_cpu and settings.consumer is None:
        place = LINEAR_WITHOUT_BIAS if bias is None else LINEAR
        result = hooked(tracker, place, (weight, bias), layer, examples, partial(layer.forward, x))
        if result is not None:
            return result
    autocast = autocast_dtype(x) is not None
    if autocast:
        x = cast_for_autocast(tracker, x)
    if settings.exact:
        return tap(tracker, nodes, free_of_views(native(x)), layer, x)
    use, probes = use_of(nodes)
    operands = bare(weight, autocast), bare(bias, autocast)
    result = LinearUse.apply(use, settings, layer, x, *operands, *probes)
    if len(nodes) == (1 if bias is None else 2):
        tracker.note_followed(result, examples)
    return result


def addmm(tracker, func, input, mat1, mat2, *, beta=1, alpha=1):
    """β·input + α·mat1 mat2; with β = α = 1 and a vector of full width it is a linear layer."""
    layer = (beta, alpha) == (1, 1) and input.shape == mat2.shape[1:]
    layer = layer and node_of(mat1) is None and tracker.is_data(mat1)
    # A matrix that was computed from other examples is no layer's weight.
    if layer and (not tracker.is_trained(mat2) or are_of_one(tracker, (mat1, mat2))):
        return _linear(
            tracker,
            func,
            mat1,
            mat2,
            input,
            lambda x: func(plain(input), x, plain(mat2)),
            inputs_first=True,
        )
    return _scaled_sum(tracker, func, torch.mm, input, mat1, mat2, beta, alpha)


def baddbmm(tracker, func, input, batch1, batch2, *, beta=1, alpha=1):
    """β·input + α·batch1 batch2."""
    return _scaled_sum(tracker, func, torch.bmm, input, batch1, batch2, beta, alpha)


def _scaled_sum(tracker, func, multiply, input, first, second, beta, alpha):
    tracked = [node_of(item) is not None for item in (first, second)]
    constant = [not tracker.is_data(item) for item in (first, second)]
    x = None
    parts: list[Part] = []
    terms: list[tuple[Tensor, float | None]] = [(input, beta)]
    if any(tracked) and all(t or c for t, c in zip(tracked, constant, strict=True)):
        # The product belongs to no example: a derived tensor is added to data.
        terms.append((derive(tracker, multiply, (first, second), {}), alpha))
    elif any(tracked):
        first, second = _cast_data(tracker, first), _cast_data(tracker, second)
        node, x, factors = _product_factors(tracker, func, first, second)
        parts.append(Part(node, factors, alpha))
        terms.append((second if tracked[0] else first, None))
    elif not any(constant) and are_of_one(tracker, (first, second)):
        terms.append((first, None))
    else:
        for item, summed in ((first, -1), (second, -2)):
            terms.append((item, None))
            if not tracker.is_data(item):
                continue
            node = first_node(input)
            if locate(tracker, func, node, item, folds=True).axis == item.dim() + summed:
                refuse(func, node, "sums over the examples of its data, which has no rule")
    result = func(plain(input), plain(first), plain(second), beta=beta, alpha=alpha)
    return _summed(tracker, func, result, x, parts, *terms)


def _summed(tracker, func, result, x, parts, *terms):
    """Attach the factors of ``parts`` and of the tracked terms that are added to them.

    Args:
        result: what the operation returned.
        x: the data that the parts' factors need, None without parts.
        parts: the factors of a product that is one of the terms.
        terms: operands with the number that multiplies them; None for operands of a product, which
            only say where the examples lie.
    """
    nodes = [part.node for part in parts] + [node_of(t) for t, _ in terms if node_of(t) is not None]
    layouts = []
    for term, _ in terms:
        if node_of(term) is None and tracker.is_data(term):
            examples = locate(tracker, func, nodes[0], term, folds=True)
            layouts.append(examples.along(result.dim() - term.dim() + examples.axis))
    layout = ExampleLayout(result.dim(), common_rows(func, nodes[0], layouts))
    check_rows(func, nodes[0], layout, [result])
    if any(node_of(term) is not None and not layout.serves(term.shape) for term, _ in terms):
        refuse(func, nodes[0], "with a part for each of an example's rows has no rule")
    for term, scale in terms:
        node = node_of(term)
        if node is not None:
            parts.append(Part(node, BroadcastFactors(layout, tuple(term.shape)), scale))
    factors = SumFactors(tuple(part.factors for part in parts), tuple(part.scale for part in parts))
    nodes = [part.node for part in parts]
    return tap(tracker, nodes, free_of_views(result), factors, x)


@dataclass(frozen=True)
class Part:
    """A tracked operand of a sum, with its factors and the number that multiplies it."""

    node: Node
    factors: Callable[..., list]
    scale: float = 1


@dataclass(frozen=True, eq=False)
class SumFactors:
    """The factors of a sum of scaled terms."""

    factors: tuple[Callable[..., list], ...]
    scales: tuple[float, ...]

    def __call__(self, grad: Tensor, x: Tensor | None) -> list:
        return [
            factor
            for factors, scale in zip(self.factors, self.scales, strict=True)
            for factor in factors(grad if scale == 1 else grad * scale, x)
        ]


@dataclass(frozen=True, eq=False)
class BroadcastFactors:
    """The factor of a term that was broadcast to the result's shape."""

    layout: ExampleLayout
    shape: tuple[int, ...]

    def norms(self, grad: Tensor, *saved: Tensor) -> None:
        """The factor is formed in any case."""

    def data_gradients(self, nodes: Sequence[Node], grad: Tensor, *saved: Tensor) -> Any:
        """What a sum hands on does not depend on its terms: None."""

    def __call__(self, grad: Tensor, x: Tensor | None = None) -> list:
        sizes, own = self.layout.padded(self.shape), self.layout.examples.axis
        repeated = [axis for axis, size in enumerate(sizes) if size == 1 and axis != own]
        if repeated:
            dtype = None if grad.is_complex() else compute_dtype(grad)
            grad = grad.sum(repeated, keepdim=True, dtype=dtype)
        return [self.layout.factor(grad, self.shape)]


def matmul(tracker, func, input, other=None, **kwargs):
    """x W, W x and their batched forms."""
    other = kwargs.get("mat2", kwargs.get("tensor2", other)) if other is None else other
    if node_of(input) is None and other.dim() == 2 <= input.dim() and not other.is_complex():
        return _linear(
            tracker, func, input, other, None, lambda x: func(x, plain(other)), inputs_first=True
        )
    rows = _own_rows(tracker, [input, other], *_specs(input, other))
    if rows is not None:
        return Composed(rows)(tracker, func, input, other)
    input, other = _own_slices(tracker, input, other)
    if node_of(input) is None and node_of(other) is None:
        return func(input, other)
    input, other = _cast_data(tracker, input), _cast_data(tracker, other)
    node, x, factors = _product_factors(tracker, func, input, other)
    result = func(plain(input), plain(other))
    return tap(tracker, [node], free_of_views(result), factors, x)


def _own_slices(tracker, *operands: Tensor) -> list[Tensor]:
    """Show each example its own slice of a tracked operand that has one for every example.

    What was made of parameters after they were repeated for the batch is such an operand: latent
    queries, relative positions. It meets data as data do. A parameter itself holds nothing of any
    example, even where a size agrees with the batch's.
    """
    shown = list(operands)
    for position, operand in enumerate(operands):
        data = operands[1 - position]
        node = node_of(operand)
        if not isinstance(node, Derived) or node_of(data) is not None or not tracker.is_data(data):
            continue
        layout = tracker.layout_of(data)
        if layout is None or not layout.plain:
            continue
        # Batch axes line up from the right.
        shape, axis = _repeated_source(operand, data).shape, layout.axis - data.dim()
        if -len(shape) <= axis < -2 and shape[axis] == tracker.batch_size:
            own = ExampleLayout(operand.dim(), layout.along(operand.dim() + axis))
            shown[position] = example_view(tracker, node, own)
    return shown


def _cast_data(tracker, item: Tensor) -> Tensor:
    return cast_for_autocast(tracker, item) if node_of(item) is None else item


def _specs(input: Tensor, other: Tensor) -> tuple[list[list[str]], list[str]]:
    """Return the indices of the operands of a matrix product, and of its result."""
    letters = iter(string.ascii_letters)
    row, inner, column = next(letters), next(letters), next(letters)
    specs: list[list[str]] = []
    batch = [next(letters) for _ in range(max(input.dim(), other.dim()) - 2)]
    for operand, both in zip((input, other), ((row, inner), (inner, column)), strict=True):
        core = (inner,) if operand.dim() < 2 else both
        lead = operand.dim() - len(core)
        specs.append([*(batch[len(batch) - lead :] if lead else []), *core])
    out = [*batch, *([row] if input.dim() > 1 else []), *([column] if other.dim() > 1 else [])]
    return specs, out


def _own_rows(
    tracker, operands: list[Tensor], specs: list[list[str]], out: list[str]
) -> Callable[..., Tensor] | None:
    """Return what computes a product in which every row of folded examples has a part of its own.

    As relative positions have that were repeated for the batch and its heads. None for other
    products, unless rows must be sorted by example first. Called with the operands behind whatever
    stands before them.
    """
    tracked = [isinstance(node_of(operand), Derived) for operand in operands]
    if tracked not in ([True, False], [False, True]):
        return None
    param, data = tracked.index(True), tracked.index(False)
    layout = tracker.layout_of(operands[data]) if tracker.is_data(operands[data]) else None
    if layout is None or layout.plain or not layout.even:
        return None
    letter = specs[data][layout.axis]
    if letter not in out or letter not in specs[param]:
        return None
    if operands[param].shape[specs[param].index(letter)] != layout.rows:
        return None
    row = _unused((*specs, out))
    terms = ["".join(_beside(letter, row, spec)) for spec in (*specs, out)]
    equation = "{},{}->{}".format(*terms)
    axes = [spec.index(letter) for spec in (*specs, out)]
    sizes = (layout.batch, layout.rows // layout.batch)
    order = layout.order
    if order is not None:
        tracker.mark_constant(order)

    def multiply(*items) -> Tensor:
        unfolded = [
            in_order(item, axis, order).unflatten(axis, sizes)
            for item, axis in zip(items[-2:], axes, strict=False)
        ]
        result = torch.einsum(equation, *unfolded).flatten(axes[2], axes[2] + 1)
        return in_order(result, axes[2], None if order is None else order.argsort())

    return multiply


def _product_factors(tracker, func, input, other) -> tuple[Node, Tensor, ProductFactor]:
    """Return the tracked operand's node and the factors of a product, with the data they need."""
    operands = [_repeated_source(input, other), _repeated_source(other, input)]
    specs, out = _specs(*operands)
    return _factors_between(tracker, func, operands, specs, out)


def _factors_between(
    tracker, func, operands: Sequence[Tensor], specs: Sequence[list[str]], out: list[str]
) -> tuple[Node, Tensor, ProductFactor]:
    """Return the tracked operand's node and the factors of a contraction, with the data they need.

    Args:
        operands: two, one of them tracked.
        specs, out: the index lists of the operands and of the result.
    """
    operands, specs = list(operands), list(specs)
    param, data = (0, 1) if node_of(operands[0]) is not None else (1, 0)
    node = first_node(operands[param])
    x = operands[data]
    whole = tracker.owned(x) if tracker.is_data(x) else None
    if isinstance(whole, Whole):
        letter = _unused((*specs, out))
        operands[data], specs[data], out = x.unsqueeze(0), [letter, *specs[data]], [letter, *out]
        examples = whole.row(tracker.batch_size, x.device)
    else:
        examples = locate(tracker, func, node, x, folds=True)
        letter = specs[data][examples.axis]
    every = [
        zip(spec, operand.shape, strict=True) for spec, operand in zip(specs, operands, strict=True)
    ]
    several = {index for pairs in every for index, size in pairs if size != 1}
    # An axis of size 1 that is broadcast is not an axis of that operand at all.
    for position, repeated in ((data, several), (param, several | {letter})):
        operand, spec = operands[position], specs[position]
        for axis in reversed(range(len(spec))):
            if operand.shape[axis] != 1 or spec[axis] not in repeated:
                continue
            if position == data and spec[axis] == letter:
                refuse(func, node, "repeats the only example, which has no rule")
            operand = run(tracker, Tensor.squeeze, operand, axis)
            spec = [*spec[:axis], *spec[axis + 1 :]]
        operands[position], specs[position] = operand, spec
    alone = [axis for axis, i in enumerate(specs[param]) if i not in specs[data] and i not in out]
    if alone:
        operands[param] = run(tracker, Tensor.sum, operands[param], alone)
        specs[param] = [index for axis, index in enumerate(specs[param]) if axis not in alone]
    node = first_node(operands[param])
    shape = operands[param].shape
    factors = ProductFactor.between(
        func, node, shape, specs[param], letter, specs[data], out, examples,
        alone=isinstance(whole, Whole),
    )  # fmt: skip
    return node, operands[data], factors


def _unused(specs: Sequence[list[str]]) -> str:
    """Return an index that none of some index lists has."""
    return next(c for c in string.ascii_letters if not any(c in spec for spec in specs))


def _beside(index: str, new: str, spec: list[str]) -> list[str]:
    """Return an index list with a new index behind another."""
    return [item for old in spec for item in ([old, new] if old == index else [old])]


def einsum(tracker, func, equation, *operands):
    """Two-operand contractions in Einstein's notation, one operand tracked."""
    tracked = [index for index, operand in enumerate(operands) if node_of(operand) is not None]
    node = node_of(operands[tracked[0]])
    assert node is not None
    if not isinstance(equation, str) or len(operands) != 2 or len(tracked) != 1:
        refuse(func, node, "with other than two operands, one of them tracked, has no rule")
    inputs, out = parse_equation(equation, [operand.dim() for operand in operands])
    param, data = tracked[0], 1 - tracked[0]
    rows = _own_rows(tracker, list(operands), inputs, out)
    if rows is not None:
        return Composed(rows)(tracker, func, equation, *operands)
    layout = tracker.layout_of(operands[data]) if tracker.is_data(operands[data]) else None
    repeats = isinstance(node, Derived) and layout is not None and layout.plain
    if layout is not None and repeats and inputs[data][layout.axis] in {*out} & {*inputs[param]}:
        # Each example has its own slice of the parameter.
        axis = inputs[param].index(inputs[data][layout.axis])
        own = ExampleLayout(len(inputs[param]), layout.along(axis))
        check_rows(func, node, own, [operands[param]])
        views = list(operands)
        views[param] = example_view(tracker, node, own)
        return func(equation, *views)
    result = func(equation, *(plain(operand) for operand in operands))
    operands = tuple(_cast_data(tracker, operand) for operand in operands)
    node, x, factors = _factors_between(tracker, func, operands, inputs, out)
    return tap(tracker, [node], free_of_views(result), factors, x)


@dataclass(frozen=True, eq=False)
class ProductFactor:
    """The factor of the tracked operand of a two-operand contraction.

    Each index is of one kind: the example's; groups K, in both operands and the result; positions
    T, in data and result; p, in parameter and result; q, in parameter and data; and indices of the
    data alone, which are summed away.

    Attributes:
        examples: whose the rows of the example's axis are.
        left: order of the result's axes (example, K, T, p), and right: of the data's (example, K,
            T, q, data alone).
        sizes: sizes of K, p and q, axis by axis.
        shape: shape of the parameter.
        permutation: order of the axes (K, p, q) that gives the parameter's own.
        alone: the result, all of which is one example's, lacks the example's axis in front.
    """

    examples: Examples
    left: tuple[int, ...]
    right: tuple[int, ...]
    sizes: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    shape: tuple[int, ...]
    permutation: tuple[int, ...]
    alone: bool = False

    @staticmethod
    def between(func, node: Node, shape, param, letter: str, data_spec, out, examples, *, alone):
        """Return the factor for index lists of parameter, data and result, or refuse.

        Args:
            func, node: the operation, and the tracked operand.
            shape: of the parameter, and ``param``, its indices.
            letter: the index of the examples.
            data_spec, out: the indices of data and result.
            examples, alone: as the attributes.
        """
        size = dict(zip(param, shape, strict=True))
        if any(len(set(spec)) != len(spec) for spec in (param, data_spec, out)):
            refuse(func, node, f"with repeated indices ({param}, {data_spec}) has no rule")
        if letter in param or letter not in out:
            refuse(func, node, "contracts the example axis with the parameter, which has no rule")
        k = [i for i in param if i in data_spec and i in out]
        p = [i for i in param if i in out and i not in data_spec]
        q = [i for i in param if i in data_spec and i not in out]
        t = [i for i in data_spec if i in out and i not in param and i != letter]
        rest = [i for i in data_spec if i not in out and i not in param]
        order = [*k, *p, *q]
        return ProductFactor(
            examples,
            tuple(out.index(i) for i in [letter, *k, *t, *p]),
            tuple(data_spec.index(i) for i in [letter, *k, *t, *q, *rest]),
            (tuple(size[i] for i in k), tuple(size[i] for i in p), tuple(size[i] for i in q)),
            tuple(shape),
            tuple(order.index(i) for i in param),
            alone,
        )

    def _left(self, grad: Tensor) -> Tensor:
        """Return the result's gradient by rows: (rows, K, T, p)."""
        grad = (grad.unsqueeze(0) if self.alone else grad).permute(self.left)
        groups, p, _ = (product(sizes) for sizes in self.sizes)
        return grad.reshape(len(grad), groups, -1, p)

    def _right(self, x: Tensor) -> Tensor:
        """Return the data by rows: (rows, K, T, q)."""
        kept = len(self.left) - len(self.sizes[1]) + len(self.sizes[2])
        right = x.permute(self.right)
        if right.dim() > kept:
            right = right.sum(tuple(range(kept, right.dim())))
        groups, _, q = (product(sizes) for sizes in self.sizes)
        return right.reshape(len(right), groups, -1, q)

    def _by_example(self, rows: Tensor) -> Tensor:
        """Return (rows, K, T, width) by example, whose rows are positions: (B, K, T, width)."""
        if self.examples.plain:
            return rows
        return self.examples.along(0).first(rows).movedim(1, 2).flatten(2, 3)

    def __call__(self, grad: Tensor, x: Tensor) -> list:
        left, right = self._left(grad), self._right(x)
        segments = self.examples.segments
        ordered = self.permutation == tuple(range(len(self.permutation)))
        if segments is not None and ordered and not left.is_complex():
            if not self.sizes[0] and len(self.sizes[1]) == 1:
                left, right = (segments.sorted(side).flatten(0, 2) for side in (left, right))
                return [Ragged(left, right, segments.offsets_of(len(left)), self.shape)]
        left, right = self._by_example(left), self._by_example(right)
        if left.is_complex():
            # The imaginary unit is one more index of parameter and data.
            left, right = real_product(left, right)
            within = self.permutation
            sizes_of_k, sizes_of_p, sizes_of_q = self.sizes
            unfolded = (*sizes_of_k, *sizes_of_p, *sizes_of_q, 2)
            return [Outer(left, right, (*self.shape, 2), (*within, len(within)), unfolded)]
        if ordered:
            return [Outer(left, right, self.shape)]
        n_p, n_q = len(self.sizes[1]), len(self.sizes[2])
        if left.shape[1] == 1 and self.permutation == (*range(n_p, n_p + n_q), *range(n_p)):
            return [Outer(right, left, self.shape)]
        unfolded = tuple(size for sizes in self.sizes for size in sizes)
        return [Outer(left, right, self.shape, self.permutation, unfolded)]

    def data_gradients(self, nodes: Sequence[Node], grad: Tensor, x: Tensor) -> list[Tensor]:
        """One more product with the parameter, brought to the form (K, p, q)."""
        (node,) = nodes
        groups, p, q = (product(sizes) for sizes in self.sizes)
        order = [self.permutation.index(axis) for axis in range(len(self.permutation))]
        if node.value.is_complex():
            node = derived(node, Tensor.conj)
        matrix = derived(derived(node, Tensor.permute, order), Tensor.reshape, (groups, p, q))
        left = self._left(grad)
        again = ProductFactor(
            self.examples,
            (0, 1, 2, 3),
            (0, 1, 2, 3),
            ((groups,), (q,), (p,)),
            (groups, p, q),
            (0, 2, 1),
        )
        result = torch.einsum("bktp,kpq->bktq", left, matrix.value)
        result = tap(node.tracker, [matrix], result, again, left)
        # Axes that the product summed away see the same gradient everywhere.
        sizes = [x.shape[axis] for axis in self.right]
        kept = len(self.left) - len(self.sizes[1]) + len(self.sizes[2])
        result = result.reshape(*sizes[:kept], *(1 for _ in sizes[kept:])).expand(sizes)
        return [result.permute([self.right.index(axis) for axis in range(x.dim())])]


def _repeated_source(operand: Tensor, other: Tensor) -> Tensor:
    """Return what a tracked operand of a product was before it was repeated for each example.

    A product broadcasts by itself, so the repetition changes nothing but the gradient's size. What
    the other operand would not be broadcast to is no repetition for it: a stack of products.
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


RULES = {
    functional.linear: linear,
    torch.addmm: addmm,
    Tensor.addmm: addmm,
    torch.baddbmm: baddbmm,
    Tensor.baddbmm: baddbmm,
    **dict.fromkeys(PRODUCTS, matmul),
}
