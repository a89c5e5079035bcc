"""Pulling factors of derived tensors back to the parameters they were derived from.

A factor describes per-example gradients of the tensor that met the data. Where that tensor is a
transpose, a view or a cast of a parameter, or an embedding of constant positions, the factor of the
parameter is just as lean. Everything else is pulled back by automatic differentiation, a few
examples at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradstats._factors import Factor, Outer, Rows, Vector, compute_dtype
from gradstats.capture._nodes import Derived, Node, Root, flatten
from gradstats.contractions import Contraction, sqnorm


@dataclass(frozen=True)
class Pulled:
    """The per-example gradient of ``root`` that ``inner``, a factor of ``node``, induces.

    Attributes:
        inner: factor of the derived tensor.
        node: the derived tensor.
        root: the parameter whose gradient this describes.
    """

    inner: Factor
    node: Derived
    root: Root

    @property
    def batch(self) -> int:
        return self.inner.batch

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.root.parameter.shape)

    def select(self, rows) -> Pulled:
        return replace(self, inner=self.inner.select(rows))

    def dense(self) -> Tensor:
        leaf, again = self.node.replay_from(self.root)
        cotangents = self.inner.dense().to(again.dtype)
        (pulled,) = torch.autograd.grad(again, leaf, cotangents, is_grads_batched=True)
        return pulled.to(compute_dtype(pulled))


def pull_back(factor: Factor, node: Node, root: Root) -> Factor:
    """Return the factor of ``root`` that a factor of ``node`` induces."""
    while isinstance(node, Derived):
        if len(node.parents) == 1 and node.parents[0].roots == (root,):
            step = LEAN_STEPS.get(node.function)
            lean = None if step is None else step(factor, node)
            if lean is not None:
                factor, node = lean, node.parents[0]
                continue
        return Pulled(factor, node, root)
    return factor


def pulled_sqnorm(factor: Pulled, workspace: int) -> Contraction:
    """Return the squared norms of a pulled-back factor that is its root's only one.

    Views and reshapes put every element of the root at most once into the derived tensor, so norms
    do not change on the way back. Otherwise chunks of examples are pulled back and squared.
    """
    node: Node = factor.node
    while isinstance(node, Derived) and _is_isometric(node):
        node = node.parents[0]
    if node is factor.root:
        return sqnorm([factor.inner], workspace)
    return sqnorm([factor], workspace)


def _is_isometric(node: Derived) -> bool:
    if node.function in ISOMETRIC:
        return True
    # Basic indexing selects each element at most once; an index tensor may repeat some.
    basic = not any(isinstance(item, (Tensor, list)) for item in _index_items(node))
    return node.function is Tensor.__getitem__ and basic


def _index_items(node: Derived):
    index = node.args[1] if len(node.args) > 1 else ()
    return index if isinstance(index, tuple) else (index,)


def _transpose(factor: Factor, node: Derived) -> Factor | None:
    if isinstance(factor, Outer) and factor.permutation is None and node.value.dim() == 2:
        dims = [d for d in flatten((node.args[1:], node.kwargs)) if isinstance(d, int)]
        if len(dims) == 2 and dims[0] % 2 == dims[1] % 2 and node.function is not Tensor.permute:
            return factor
        return factor.transposed() if factor.left.shape[1] == 1 else None
    return None


def _same_shape(factor: Factor, node: Derived) -> Factor | None:
    """Casts and copies: the gradient is the same numbers in the root's dtype."""
    return factor if node.value.shape == node.parents[0].shape else None


def _reshaped(factor: Factor, node: Derived) -> Factor | None:
    """Reshapes of gradients that are written out anyway."""
    if isinstance(factor, Vector) and factor.axis is None:
        shape = tuple(node.parents[0].shape)
        return Vector(factor.values.reshape(factor.batch, *shape), shape)
    return None


def _expanded(factor: Factor, node: Derived) -> Factor | None:
    """Expansion: the gradient is summed over the axes that were repeated."""
    if not isinstance(factor, Vector):
        return None
    source = tuple(node.parents[0].shape)
    padded = (1,) * (len(factor.shape) - len(source)) + source
    values = factor.values
    if factor.axis is not None:
        # Each example touches its own copy along the example axis; all are copies of one.
        if padded[factor.axis] != 1:
            return None
        values = values.unsqueeze(factor.axis + 1)
    repeated = [axis + 1 for axis, size in enumerate(padded) if size == 1]
    if repeated:
        values = values.sum(repeated, keepdim=True)
    return Vector(values.reshape(factor.batch, *source), source)


def _embedded(factor: Factor, node: Derived) -> Factor | None:
    """Constant ids looked up in a table, as position embeddings are."""
    if not isinstance(factor, Vector) or factor.axis is not None:
        return None
    ids = node.args[0]
    if isinstance(ids, Node) or any(node.kwargs.get(k) for k in ("scale_grad_by_freq", "max_norm")):
        return None
    if any(node.args[3:4]) or any(node.args[5:6]):
        return None
    table = tuple(node.parents[0].shape)
    padding = node.args[2] if len(node.args) > 2 else node.kwargs.get("padding_idx")
    return embedding_rows(ids.expand(factor.batch, *ids.shape), factor.values, table, padding)


def embedding_rows(
    ids: Tensor, grad: Tensor, table: tuple[int, ...], padding_idx: int | None
) -> Rows:
    """Return the factor of a table for ids (B, *) and gradients (B, *, width)."""
    examples = ids.shape[0]
    flat = ids.reshape(-1)
    grad = grad.reshape(flat.numel(), -1)
    if padding_idx is not None:
        padding_idx %= table[0]
        grad = grad.masked_fill((flat == padding_idx).unsqueeze(1), 0)
    positions = flat.numel() // max(1, examples)
    example = torch.arange(examples, device=flat.device).repeat_interleave(positions)
    return Rows(flat.long(), grad, example, examples, table, positions)


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
    Tensor.view: _reshaped,
    Tensor.reshape: _reshaped,
    torch.reshape: _reshaped,
    Tensor.unsqueeze: _reshaped,
    torch.unsqueeze: _reshaped,
    Tensor.squeeze: _reshaped,
    torch.squeeze: _reshaped,
    Tensor.flatten: _reshaped,
    torch.flatten: _reshaped,
    Tensor.expand: _expanded,
    Tensor.expand_as: _expanded,
    torch.broadcast_to: _expanded,
    torch.nn.functional.embedding: _embedded,
}

ISOMETRIC = frozenset(
    {
        function
        for function, step in LEAN_STEPS.items()
        if step in (_transpose, _same_shape, _reshaped)
    }
    | {
        Tensor.permute,
        torch.permute,
        Tensor.chunk,
        torch.chunk,
        Tensor.split,
        torch.split,
        Tensor.split_with_sizes,
        Tensor.unbind,
        torch.unbind,
        Tensor.narrow,
        torch.narrow,
        Tensor.select,
        torch.select,
        Tensor.movedim,
        torch.movedim,
        Tensor.unflatten,
        torch.unflatten,
    }
)
