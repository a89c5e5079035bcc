"""Steps from a derived tensor back to one of its operands that keep factors lean.

The factor of a cast, a reshape, an expansion or a multiple of a parameter, or of its product with a
matrix, becomes a factor of the same kind for the parameter itself. A step is called with the
factor, the derived tensor and one of the operands that depend on parameters. It returns the
operand's factor, or None if that would not be lean.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from gradstats._factors import (
    Elementwise,
    Experts,
    Factor,
    Masked,
    Outer,
    Patches,
    Ragged,
    Vector,
    added,
    cast,
    compute_dtype,
    embedding_rows,
    map_tensors,
)
from gradstats.capture.following._reductions import REDUCES
from gradstats.capture.operations._names import function_class_of
from gradstats.capture.operations._operations import (
    ADDS,
    CASTS,
    DIVIDES,
    EXPANDS,
    MULTIPLIES,
    RESHAPES,
    TRANSPOSES,
    function_variants,
    variants,
)
from gradstats.capture.operations._rowwise import POINTWISE, POINTWISE_OF_SEVERAL
from gradstats.capture.parameters._derivation import Derived
from gradstats.capture.parameters._lean_normalisations import (
    Flattened,
    in_shape,
    normalised,
    standardised,
    weight_normalised,
)
from gradstats.capture.parameters._lean_products import (
    elementwise,
    kronecker,
    linear,
    multiplied,
    negated,
    passed_through,
    scaled,
    summed,
)
from gradstats.capture.parameters._lean_reductions import MEASURES, reduced
from gradstats.capture.parameters._lean_selections import SELECTS, is_assignment, selected
from gradstats.capture.parameters._nodes import Node
from gradstats.contractions import lean


def lean_step(node: Derived):
    """Return the step from a tensor back to its operands; None if there is none.

    Most steps would be wrong for complex tensors, which to factors are real ones with an axis more.
    """
    if node.function not in SAME_NUMBERS and (
        node.value.is_complex() or any([parent.value.is_complex() for parent in node.parents])
    ):
        return None
    step = LEAN_STEPS.get(node.function)
    if function_class_of(node.function) is not None:
        step = passed_through
    elif is_assignment(node.function):
        step = selected
    if len(set(node.parents)) < len(node.parents) and step is not selected:
        # Only the step of elementwise functions accounts for both places of an operand given twice.
        return elementwise if node.function in ELEMENTWISE else None
    # An operand that gives only a type or a shape counts as a parent where autograd cannot tell it
    # from the one that is rearranged, as in ``w.float().view_as(w)``.
    return None if len(node.parents) > 1 and step in ISOMETRIC_STEPS else step


def index_items(node: Derived):
    """Return the items of the index by which a tensor was picked from its operand."""
    index = node.args[1] if len(node.args) > 1 else ()
    return index if isinstance(index, tuple) else (index,)


def _permuted(factor: Factor, node: Derived, parent: Node) -> Factor | None:
    """Axes in another order."""
    count = len(parent.shape)
    # The strides of this tensor number its axes, and so tell their order afterwards.
    axes = torch.empty_strided(tuple(parent.shape), tuple(range(count)), device="meta")
    order = node.function(axes, *node.args[1:], **node.kwargs).stride()
    if order == tuple(range(count)):
        return factor
    factor = lean(factor)
    if isinstance(factor, Vector) and factor.axis is None:
        values = factor.values.reshape(factor.batch, *node.shape)
        values = values.permute(0, *(1 + order.index(axis) for axis in range(count)))
        return Vector(values, tuple(parent.shape))
    if isinstance(factor, Experts):
        return factor.transposed() if order == (0, 2, 1) else None
    inner = factor.inner if isinstance(factor, Masked) else factor
    if isinstance(inner, Outer) and not inner.spans_rows:
        return None  # one side may span both axes, or none
    if isinstance(factor, (Outer, Ragged, Masked)) and count == 2:
        return factor.transposed()
    return None


def _same_numbers(factor: Factor, node: Derived, parent: Node) -> Factor:
    """Casts, copies, and complex numbers viewed as pairs of real ones, or the reverse."""
    device = parent.value.device
    if node.value.device == device:
        return factor
    return map_tensors(factor, lambda tensor: tensor.to(device))


def _reshaped(factor: Factor | Flattened, node: Derived, parent: Node):
    """Reshapes, for factors whose numbers do not depend on the shape."""
    shape = tuple(parent.shape)
    if node.value.shape == shape:
        return factor
    if isinstance(factor, Flattened):
        inner = in_shape(factor.inner, shape)
        return inner if inner.shape == shape else Flattened(inner, shape)
    if isinstance(factor, Vector) and factor.axis is None:
        return Vector(factor.values.reshape(factor.batch, *shape), shape)
    if isinstance(factor, (Elementwise, Outer)):
        return replace(factor, shape=shape)
    if isinstance(factor, Masked) and isinstance(factor.inner, Outer):
        return Masked(replace(factor.inner, shape=shape), factor.mask.reshape(shape))
    return Flattened(factor, shape) if isinstance(factor, Patches) else None


def _indexed(factor: Factor, node: Derived, parent: Node) -> Factor | None:
    """w[:, None], which picks every element once, and w[ids], rows of a table."""
    if _only_adds_axes(node):
        return _reshaped(factor, node, parent)
    ids = node.args[1]
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int64, torch.int32):
        return None
    factor = lean(factor)
    if not isinstance(factor, Vector) or factor.axis is not None:
        return None
    node.check_step()
    ids = ids.to(factor.values.device) % len(parent.value)
    return _of_table(factor, ids, parent)


def _of_table(factor: Vector, ids: Tensor, parent: Node, padding: int | None = None) -> Factor:
    """Return the factor of a table of which the same rows were looked up for all examples."""
    table = tuple(parent.shape)
    if math.prod(table) > math.prod(factor.shape):
        ids = ids.expand(factor.batch, *ids.shape)
        return embedding_rows(ids, factor.values, table, padding)
    grad = cast(factor.values, compute_dtype(factor.values))
    # Add the rows of all examples side by side: adding narrow rows takes many times as long.
    grad = grad.reshape(factor.batch, ids.numel(), *table[1:]).transpose(0, 1)
    values = added(grad, ids.reshape(-1), table[0])
    if padding is not None:
        values[padding] = 0
    return Vector(values.transpose(0, 1), table)


def _only_adds_axes(node: Derived) -> bool:
    return all(
        item is None or item is ... or (isinstance(item, slice) and item == slice(None))
        for item in index_items(node)
    )


def _expanded(factor: Factor, node: Derived, parent: Node) -> Factor | None:
    """Expansion: the gradient is summed over the repeated axes."""
    factor = lean(factor)
    if not isinstance(factor, Vector):
        return None
    source = tuple(parent.shape)
    padded = (1,) * (len(factor.shape) - len(source)) + source
    values = factor.values
    if factor.axis is not None:
        # Each example has its own slice along this axis, which must be a copy of the only one.
        if padded[factor.axis] != 1:
            return None
        values = values.unsqueeze(factor.axis + 1)
    repeated = [axis + 1 for axis, size in enumerate(padded) if size == 1]
    if repeated:
        values = values.sum(repeated, keepdim=True)
    return Vector(values.reshape(factor.batch, *source), source)


def _embedded(factor: Factor, node: Derived, parent: Node) -> Factor | None:
    """Constant ids looked up in a table, as of position embeddings."""
    if node.kwargs.get("scale_grad_by_freq") or node.kwargs.get("max_norm"):
        return None
    if not isinstance(factor, Vector):
        return None
    node.check_constants()
    return _of_table(factor, node.args[0], parent, node.kwargs.get("padding_idx"))


ELEMENTWISE = POINTWISE | POINTWISE_OF_SEVERAL

# To factors a complex number is two real ones, so these operations change nothing.
SAME_NUMBERS = frozenset({torch.view_as_real, torch.view_as_complex})

LEAN_STEPS = {
    **dict.fromkeys(ELEMENTWISE, elementwise),
    **dict.fromkeys(REDUCES.keys() | MEASURES, reduced),
    **dict.fromkeys(SELECTS, selected),
    # Some of the following are elementwise too; their own steps are leaner.
    **dict.fromkeys(TRANSPOSES, _permuted),
    **dict.fromkeys(CASTS | SAME_NUMBERS, _same_numbers),
    **dict.fromkeys(ADDS, summed),
    **dict.fromkeys(function_variants("neg", "negative"), negated),
    **dict.fromkeys(MULTIPLIES | DIVIDES, scaled),
    **dict.fromkeys(variants("mm", "matmul", "mv", "dot", "vdot"), multiplied),
    Tensor.__matmul__: multiplied,
    torch.nn.functional.linear: linear,
    **dict.fromkeys(variants("kron"), kronecker),
    torch.nn.functional.normalize: normalised,
    torch._weight_norm: weight_normalised,
    torch.nn.functional.batch_norm: standardised,
    torch.nn.functional.layer_norm: standardised,
    **dict.fromkeys(RESHAPES, _reshaped),
    Tensor.__getitem__: _indexed,
    **dict.fromkeys(EXPANDS, _expanded),
    torch.nn.functional.embedding: _embedded,
}

# Steps that only rearrange the elements of a gradient.
ISOMETRIC_STEPS = frozenset({_permuted, _reshaped, _same_numbers})

# Steps that take any factor. Others are given it made lean, and no vector with an example axis.
OF_ANY_FACTOR = ISOMETRIC_STEPS | {_expanded, _indexed, summed}
