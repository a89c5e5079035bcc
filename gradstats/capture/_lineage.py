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

from gradstats._complex import real_shape
from gradstats._cost import product
from gradstats._factors import (
    Elementwise,
    Experts,
    Factor,
    Outer,
    Path,
    Rows,
    Vector,
)
from gradstats.capture._nodes import Derived, Node, Root, flatten, same_storage
from gradstats.capture._replay import FunctionReplay, Replay
from gradstats.contractions import Contraction, lean, sqnorm


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
        return real_shape(self.root.parameter)

    @property
    def granule(self) -> int:
        return 0

    @property
    def path(self) -> Path | tuple[()] | None:
        """How the root's elements were rearranged, None if anything else was done to them."""
        return rearrangement(self.node)

    def select(self, rows) -> Pulled:
        return replace(self, inner=self.inner.select(rows))

    def narrow(self, start: int, stop: int) -> Factor:
        raise NotImplementedError

    def dense(self) -> Tensor:
        return self.replay().pull_each(self.inner)

    def pull(self, cotangent: Tensor) -> Tensor:
        return self.replay().pull(cotangent)

    def push(self, direction: Tensor) -> Tensor | None:
        """Return how the derived tensor changes along a direction, None if that is not known.

        A custom Function's backward need have no derivative.
        """
        return None if self.node.has_function else self.replay().push(direction)

    def replay(self, copies: bool = False) -> Replay:
        """Compute the derived tensor again; from copies it outlives changes of the weights."""
        kind = FunctionReplay if self.node.has_function else Replay
        return kind(self.node, self.root, copies)

    def frozen(self, replays: dict[tuple[Node, Root], Replay]) -> Frozen:
        """Return the same factor independent of what becomes of the model.

        Args:
            replays: what was computed again for other uses of the same tensor.
        """
        key = (self.node, self.root)
        if key not in replays:
            replays[key] = self.replay(copies=True)
        return Frozen(self.inner, replays[key], self.path)


@dataclass(frozen=True)
class Frozen:
    """A ``Pulled`` factor that outlives its context and later changes of the model's weights.

    Attributes:
        inner: factor of the derived tensor.
        replay: the derived tensor as it was computed from the root.
        path: how the root's elements were rearranged, None if anything else was done to them.
    """

    inner: Factor
    replay: Replay
    path: Path | tuple[()] | None

    @property
    def batch(self) -> int:
        return self.inner.batch

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.replay.leaf.shape)

    @property
    def granule(self) -> int:
        return 0

    def select(self, rows) -> Frozen:
        return replace(self, inner=self.inner.select(rows))

    def narrow(self, start: int, stop: int) -> Factor:
        raise NotImplementedError

    def dense(self) -> Tensor:
        return self.replay.pull_each(self.inner)


def pull_back(factor: Factor, node: Node, root: Root) -> Factor:
    """Return the factor of ``root`` that a factor of ``node`` induces."""
    while isinstance(node, Derived):
        if len(node.parents) == 1 and node.parents[0].roots == (root,):
            step = _lean_step(node)
            found = None if step is None else step(factor, node)
            if found is not None:
                factor, node = found, node.parents[0]
                continue
        return Pulled(lean(factor), node, root)
    return factor


def _lean_step(node: Derived):
    """Return how factors of a tensor become factors of the only one it is made of, if known.

    Shapes that are moved about are those of real tensors.
    """
    if node.function in SAME_NUMBERS or not (
        node.value.is_complex() or node.parents[0].value.is_complex()
    ):
        return LEAN_STEPS.get(node.function)
    return None


def rearranged_root(node: Node) -> Root | None:
    """Return the parameter of which a tensor is a cast, a reshape or a shift by a constant.

    All have the same per-example gradients. None if it is anything else.
    """
    while isinstance(node, Derived):
        step = _lean_step(node)
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


def rearrangement(node: Node) -> Path | tuple[()] | None:
    """Return how a derived tensor picks and arranges elements of its root, each at most once.

    Two tensors with the same answer hold the same elements of the parameter in the same places.

    Returns:
        The path from the root; () for the root itself, None if a step does anything else.
    """
    if len(node.roots) != 1:
        return None  # computed from several: not a rearrangement of one
    steps: list[tuple] = []
    (root,) = node.roots
    view: Tensor | None = None
    while isinstance(node, Derived):
        if not _is_isometric(node):
            return None
        # What a cast or a copy takes beside the tensor has no bearing on the elements.
        plain = LEAN_STEPS.get(node.function) is _same_shape
        arguments = "" if plain else repr((node.args[1:], node.kwargs))
        steps.append((node.function, arguments, node.index))
        if view is None and same_storage(node.value, root.value):
            view = node.value
        node = node.parents[0]
    if not steps:
        return ()
    view = root.value if view is None else view
    last = sum((size - 1) * step for size, step in zip(view.shape, view.stride(), strict=True))
    first = int(view.storage_offset())
    return Path(tuple(reversed(steps)), first, first + int(last))


def _is_isometric(node: Derived) -> bool:
    if node.function not in SAME_NUMBERS and (
        node.value.is_complex() != node.parents[0].value.is_complex()
    ):
        return False  # a cast drops the imaginary part of the gradient
    if node.function in ISOMETRIC:
        return True
    # Basic indexing selects each element at most once; an index tensor may repeat some.
    items = _index_items(node)
    basic = not any(isinstance(i, list) or (isinstance(i, Tensor) and i.dim()) for i in items)
    return node.function is Tensor.__getitem__ and basic


def _index_items(node: Derived):
    index = node.args[1] if len(node.args) > 1 else ()
    return index if isinstance(index, tuple) else (index,)


def _transpose(factor: Factor, node: Derived) -> Factor | None:
    if isinstance(factor, Experts):
        same = node.value.shape == node.parents[0].value.mT.shape
        last = node.value.mT.stride() == node.parents[0].value.stride()
        return factor.transposed() if same and last and node.value.dim() == 3 else None
    if isinstance(factor, Outer) and factor.permutation is None and node.value.dim() == 2:
        dims = [d for d in flatten((node.args[1:], node.kwargs)) if isinstance(d, int)]
        if len(dims) == 2 and dims[0] % 2 == dims[1] % 2 and node.function is not Tensor.permute:
            return factor
        return factor.transposed() if factor.left.shape[1] == 1 else None
    return None


def _same_shape(factor: Factor, node: Derived) -> Factor | None:
    """Casts and copies: the gradient is the same numbers in the root's dtype."""
    return factor if node.value.shape == node.parents[0].shape else None


def _same_numbers(factor: Factor, node: Derived) -> Factor:
    """A complex tensor seen as pairs of real numbers, or the other way: as factors see it."""
    return factor


def _shifted(factor: Factor, node: Derived) -> Factor | None:
    """1 + w: a constant has no gradient."""
    return _same_shape(factor, node) if _only_adds(node) else None


def _only_adds(node: Derived) -> bool:
    """Whether a sum has no factor ``alpha``, which may stand between its operands too."""
    return "alpha" not in node.kwargs and len(node.args) <= 2


def _reshaped(factor: Factor, node: Derived) -> Factor | None:
    """Reshapes of gradients that are written out anyway."""
    if isinstance(factor, Vector) and factor.axis is None:
        shape = tuple(node.parents[0].shape)
        return Vector(factor.values.reshape(factor.batch, *shape), shape)
    if isinstance(factor, Elementwise):
        return replace(factor, shape=tuple(node.parents[0].shape))
    return None


def _axes_added(factor: Factor, node: Derived) -> Factor | None:
    """w[:, None]: indexing that picks every element once, in order."""
    return _reshaped(factor, node) if _only_adds_axes(node) else None


def _only_adds_axes(node: Derived) -> bool:
    return all(
        item is None or item is ... or (isinstance(item, slice) and item == slice(None))
        for item in _index_items(node)
    )


def _expanded(factor: Factor, node: Derived) -> Factor | None:
    """Expansion: the gradient is summed over the axes that were repeated."""
    factor = lean(factor)
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
    factor = lean(factor)
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
    flat, example = rows_looked_up(ids)
    grad = grad.reshape(flat.numel(), product(table[1:]))
    if padding_idx is not None:
        grad = grad.masked_fill((flat == padding_idx % table[0]).unsqueeze(1), 0)
    positions = flat.numel() // max(1, ids.shape[0])
    return Rows(flat, grad, example, ids.shape[0], table, positions)


def rows_looked_up(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows that ids (B, *) look up, and whose each is: (N,) both."""
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

SAME_NUMBERS = frozenset({torch.view_as_real, torch.view_as_complex})

ISOMETRIC = frozenset(
    {
        function
        for function, step in LEAN_STEPS.items()
        if step in (_transpose, _same_shape, _reshaped, _same_numbers)
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
