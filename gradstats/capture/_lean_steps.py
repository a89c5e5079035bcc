"""Steps from a derived tensor back to one that it was made of that keep factors lean.

The factor of a cast, a reshape, an expansion or a multiple of a parameter, or of its product with a
matrix, becomes one of the same kind for the parameter itself. A step is called with the factor, the
derived tensor and the one operand that depends on the parameter; it returns the operand's factor,
or None where this would not be lean.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from gradstats._cost import product
from gradstats._factors import (
    Elementwise,
    Experts,
    Factor,
    Outer,
    Ragged,
    Rows,
    Vector,
    cast,
    compute_dtype,
)
from gradstats.capture._nested import flatten
from gradstats.capture._nodes import Derived, Node, Root
from gradstats.contractions import lean


def lean_step(node: Derived):
    """Return the function that takes factors of a tensor back to an operand; None if unknown.

    Factors see complex tensors as real ones with one more axis, for which most steps do not hold.
    """
    if node.function not in SAME_NUMBERS and (
        node.value.is_complex() or any(parent.value.is_complex() for parent in node.parents)
    ):
        return None
    step = LEAN_STEPS.get(node.function)
    return step if len(node.parents) == 1 or step in LINEAR_STEPS else None


def rearranged_root(node: Node) -> Root | None:
    """Return the parameter of which a tensor is a cast, a reshape or a shift by a constant.

    These all have the parameter's own per-example gradients. None for any other tensor.
    """
    while isinstance(node, Derived):
        step = lean_step(node)
        same = (
            step in (_same_shape, _reshaped)
            or (step is _axes_added and _only_adds_axes(node))
            or (step is _shifted and _only_adds(node))
        )
        if not same or len(node.parents) != 1:
            return None
        if node.value.numel() != node.parents[0].value.numel():
            return None
        node = node.parents[0]
    return node if isinstance(node, Root) else None


def index_items(node: Derived):
    index = node.args[1] if len(node.args) > 1 else ()
    return index if isinstance(index, tuple) else (index,)


def _transpose(factor: Factor, node: Derived, parent: Node) -> Factor | None:
    if isinstance(factor, Experts):
        same = node.value.shape == parent.value.mT.shape
        last = node.value.mT.stride() == parent.value.stride()
        return factor.transposed() if same and last and node.value.dim() == 3 else None
    if isinstance(factor, Outer) and factor.permutation is None and node.value.dim() == 2:
        dims = [d for d in flatten((node.args[1:], node.kwargs)) if isinstance(d, int)]
        if len(dims) == 2 and dims[0] % 2 == dims[1] % 2:
            return factor  # an axis exchanged with itself
        return factor.transposed() if factor.left.shape[1] == 1 else None
    return None


def _same_shape(factor: Factor, node: Derived, parent: Node) -> Factor | None:
    """Casts and copies: the gradient has the same numbers, in the root's dtype."""
    return factor if node.value.shape == parent.shape else None


def _same_numbers(factor: Factor, node: Derived, parent: Node) -> Factor:
    """A complex tensor viewed as pairs of real numbers, or the reverse: alike to factors."""
    return factor


def _shifted(factor: Factor, node: Derived, parent: Node) -> Factor | None:
    """v + w: a sum has the gradient of each of its terms."""
    return _same_shape(factor, node, parent) if _only_adds(node) else None


def _only_adds(node: Derived) -> bool:
    """Whether a sum has no factor ``alpha``, which may also be given as a third argument."""
    return "alpha" not in node.kwargs and len(node.args) <= 2


def _scaled(factor: Factor, node: Derived, parent: Node) -> Factor | None:
    """s · w and w / s, where s is one number."""
    if node.kwargs or len(node.args) != 2 or node.value.shape != parent.shape:
        return None
    first, second = node.args
    other = second if first is parent else first
    if (isinstance(other, (Node, Tensor)) and product(other.shape) != 1) or not isinstance(
        factor, (Outer, Ragged, Vector)
    ):
        return None
    divides = node.function in DIVISIONS
    if divides and first is not parent:
        return None
    node.check_step()
    scale = other.value.detach() if isinstance(other, Node) else other
    if isinstance(scale, Tensor):
        scale = scale.reshape(())
    apply = torch.div if divides else torch.mul
    if isinstance(factor, Vector):
        dtype = compute_dtype(factor.values, node.value)
        return replace(factor, values=apply(factor.values.to(dtype), scale))
    left, right = _in_full(factor, node)
    if left.shape[-1] < right.shape[-1]:
        return replace(factor, left=apply(left, scale), right=right)
    return replace(factor, left=left, right=apply(right, scale))


def _multiplied(factor: Factor, node: Derived, parent: Node) -> Factor | None:
    """X @ Y of matrices, whose gradients are G Yᵀ and Xᵀ G: one operand of G is multiplied."""
    if node.kwargs or len(node.args) != 2 or not isinstance(factor, (Outer, Ragged)):
        return None
    first, second = node.args
    if len(first.shape) != 2 or len(second.shape) != 2 or not _is_one_matrix(factor, node):
        return None
    other = second if first is parent else first
    matrix = (other.value if isinstance(other, Node) else other).detach()
    if matrix.layout != torch.strided or parent.shape.numel() > node.shape.numel():
        return None  # the operand would be wider than the one it replaces
    node.check_step()
    left, right = _in_full(factor, node)
    # Autocast may have rounded it first.
    matrix = matrix.to(node.value.dtype).to(left.dtype)
    shape = tuple(parent.shape)
    if first is parent:
        return replace(factor, right=right @ matrix.mT, shape=shape)
    return replace(factor, left=left @ matrix, shape=shape)


def _is_one_matrix(factor: Outer | Ragged, node: Derived) -> bool:
    """Whether both operands of a factor span the axes of a matrix as it stands."""
    if factor.shape != tuple(node.shape):
        return False
    if isinstance(factor, Outer) and (factor.permutation is not None or factor.left.shape[1] != 1):
        return False
    return (factor.left.shape[-1], factor.right.shape[-1]) == factor.shape


def _in_full(factor: Outer | Ragged, node: Derived) -> tuple[Tensor, Tensor]:
    """Return both operands in the accumulation dtype, so that new ones are not rounded further."""
    dtype = compute_dtype(factor.left, factor.right, node.value)
    return cast(factor.left, dtype), cast(factor.right, dtype)


def _reshaped(factor: Factor, node: Derived, parent: Node) -> Factor | None:
    """Reshapes, for factors that hold gradients element by element."""
    if node.value.shape == parent.shape:
        return factor
    if isinstance(factor, Vector) and factor.axis is None:
        shape = tuple(parent.shape)
        return Vector(factor.values.reshape(factor.batch, *shape), shape)
    if isinstance(factor, Elementwise):
        return replace(factor, shape=tuple(parent.shape))
    return None


def _axes_added(factor: Factor, node: Derived, parent: Node) -> Factor | None:
    """w[:, None]: an index that picks every element once, in order."""
    return _reshaped(factor, node, parent) if _only_adds_axes(node) else None


def _only_adds_axes(node: Derived) -> bool:
    return all(
        item is None or item is ... or (isinstance(item, slice) and item == slice(None))
        for item in index_items(node)
    )


def _expanded(factor: Factor, node: Derived, parent: Node) -> Factor | None:
    """Expansion: the gradient is summed over the axes that were repeated."""
    factor = lean(factor)
    if not isinstance(factor, Vector):
        return None
    source = tuple(parent.shape)
    padded = (1,) * (len(factor.shape) - len(source)) + source
    values = factor.values
    if factor.axis is not None:
        # Along this axis each example has its own copy; all of them are copies of one.
        if padded[factor.axis] != 1:
            return None
        values = values.unsqueeze(factor.axis + 1)
    repeated = [axis + 1 for axis, size in enumerate(padded) if size == 1]
    if repeated:
        values = values.sum(repeated, keepdim=True)
    return Vector(values.reshape(factor.batch, *source), source)


def _embedded(factor: Factor, node: Derived, parent: Node) -> Factor | None:
    """Constant ids looked up in a table, as position embeddings are."""
    factor = lean(factor)
    if not isinstance(factor, Vector) or factor.axis is not None:
        return None
    ids = node.args[0]
    if isinstance(ids, Node) or any(node.kwargs.get(k) for k in ("scale_grad_by_freq", "max_norm")):
        return None
    if any(node.args[3:4]) or any(node.args[5:6]):
        return None
    table = tuple(parent.shape)
    padding = node.args[2] if len(node.args) > 2 else node.kwargs.get("padding_idx")
    return embedding_rows(ids.expand(factor.batch, *ids.shape), factor.values, table, padding)


def embedding_rows(
    ids: Tensor, grad: Tensor, table: tuple[int, ...], padding_idx: int | None
) -> Rows:
    """Return the factor of a table for ids (B, *) and gradients (B, *, width)."""
    flat, example = rows_looked_up(ids)
    grad = grad.reshape(flat.numel(), product(table[1:]))
    if padding_idx is not None:
        grad = grad.masked_fill((flat == padding_idx % table[0]).unsqueeze(1), 0)
    positions = flat.numel() // max(1, ids.shape[0])
    return Rows(flat, grad, example, ids.shape[0], table, positions)


def rows_looked_up(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows that ids (B, *) look up, and the example of each: (N,) both."""
    positions = ids.numel() // max(1, ids.shape[0])
    example = torch.arange(ids.shape[0], device=ids.device).repeat_interleave(positions)
    return ids.reshape(-1).long(), example


LEAN_STEPS = {
    Tensor.t: _transpose,
    torch.t: _transpose,
    Tensor.T.__get__: _transpose,  # type: ignore[attr-defined]
    Tensor.mT.__get__: _transpose,  # type: ignore[attr-defined]
    Tensor.transpose: _transpose,
    torch.transpose: _transpose,
    Tensor.to: _same_shape,
    Tensor.float: _same_shape,
    Tensor.double: _same_shape,
    Tensor.half: _same_shape,
    Tensor.bfloat16: _same_shape,
    Tensor.type_as: _same_shape,
    Tensor.contiguous: _same_shape,
    Tensor.clone: _same_shape,
    torch.clone: _same_shape,
    Tensor.add: _shifted,
    Tensor.__add__: _shifted,
    Tensor.__radd__: _shifted,
    torch.add: _shifted,
    Tensor.mul: _scaled,
    Tensor.__mul__: _scaled,
    Tensor.__rmul__: _scaled,
    torch.mul: _scaled,
    Tensor.div: _scaled,
    Tensor.__truediv__: _scaled,
    torch.div: _scaled,
    Tensor.mm: _multiplied,
    torch.mm: _multiplied,
    Tensor.matmul: _multiplied,
    Tensor.__matmul__: _multiplied,
    torch.matmul: _multiplied,
    torch.view_as_real: _same_numbers,
    torch.view_as_complex: _same_numbers,
    Tensor.view: _reshaped,
    Tensor.reshape: _reshaped,
    torch.reshape: _reshaped,
    Tensor.unsqueeze: _reshaped,
    torch.unsqueeze: _reshaped,
    Tensor.squeeze: _reshaped,
    torch.squeeze: _reshaped,
    Tensor.flatten: _reshaped,
    torch.flatten: _reshaped,
    Tensor.__getitem__: _axes_added,
    Tensor.expand: _expanded,
    Tensor.expand_as: _expanded,
    torch.broadcast_to: _expanded,
    torch.nn.functional.embedding: _embedded,
}

DIVISIONS = frozenset({Tensor.div, Tensor.__truediv__, torch.div})

# Steps of operations whose gradient reaches each of several operands. Of all others, as
# ``w.type_as(v)``, an operand may have none.
LINEAR_STEPS = frozenset({_shifted, _scaled, _multiplied})

SAME_NUMBERS = frozenset({torch.view_as_real, torch.view_as_complex})

# Steps that only rearrange the elements of the gradient.
ISOMETRIC_STEPS = frozenset({_transpose, _same_shape, _reshaped, _same_numbers})


def is_cast(node: Derived) -> bool:
    """Whether a tensor is a cast or a copy."""
    return LEAN_STEPS.get(node.function) is _same_shape
