"""Pulling factors of derived tensors back to the parameters they were derived from.

A factor describes per-example gradients of the tensor that met the data. Where that tensor is a
transpose, a view or a cast of a parameter, or an embedding of constant positions, the factor of the
parameter is just as lean. Everything else is pulled back by automatic differentiation, a few
examples at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from gradstats._complex import real_shape
from gradstats._factors import Factor, Path
from gradstats.capture._lean_steps import (
    ISOMETRIC_STEPS,
    LEAN_STEPS,
    SAME_NUMBERS,
    index_items,
    is_cast,
    lean_step,
)
from gradstats.capture._nodes import Derived, Node, Root, same_storage
from gradstats.capture._operations import variants
from gradstats.capture._replay import FunctionReplay, Replay
from gradstats.contractions import Contraction, lean, sqnorm


@dataclass(frozen=True)
class Pulled:
    """The factor of a parameter that is given by a factor of a tensor derived from it.

    Attributes:
        inner: factor of the derived tensor.
        node: the derived tensor.
        root: the parameter whose per-example gradients this describes.
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
        """How the root's elements were rearranged; None if anything else was done to them."""
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
        """Return how the derived tensor changes along a direction; None if that is not known.

        The backward of a custom Function need not be differentiable.
        """
        return None if self.node.has_function else self.replay().push(direction)

    def replay(self, copies: bool = False) -> Replay:
        """Compute the derived tensor again; from copies, it outlives changes of the weights."""
        kind = FunctionReplay if self.node.has_function else Replay
        return kind(self.node, self.root, copies)

    def frozen(self, replays: dict[tuple[Node, Root], Replay]) -> Frozen:
        """Return the same factor, independent of later changes to the model.

        Args:
            replays: the replays made so far, shared by all uses of a tensor; may be added to.
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
        replay: the computation of the derived tensor from the root.
        path: how the root's elements were rearranged; None if anything else was done to them.
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
    """Return the factor of ``root`` that results from a factor of ``node``."""
    while isinstance(node, Derived):
        if len(node.parents) == 1 and node.parents[0].roots == (root,):
            step = lean_step(node)
            found = None if step is None else step(factor, node)
            if found is not None:
                factor, node = found, node.parents[0]
                continue
        return Pulled(lean(factor), node, root)
    return factor


def pulled_sqnorm(factor: Pulled, workspace: int) -> Contraction:
    """Return the squared norms of a pulled-back factor that is its root's only one.

    Views and reshapes put each element of the root into the derived tensor at most once, so that
    norms do not change on the way back. Otherwise examples are pulled back and squared in chunks.
    """
    node: Node = factor.node
    while isinstance(node, Derived) and _is_isometric(node):
        node = node.parents[0]
    if node is factor.root:
        return sqnorm([factor.inner], workspace)
    return sqnorm([factor], workspace)


def rearrangement(node: Node) -> Path | tuple[()] | None:
    """Return how a derived tensor picks and arranges elements of its root, each at most once.

    Two tensors with the same path hold the same elements of the parameter in the same places.

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
        # The other arguments of a cast or a copy do not affect which elements it holds.
        arguments = "" if is_cast(node) else repr((node.args[1:], node.kwargs))
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
        return False  # a cast between real and complex drops an imaginary part
    if node.function in ISOMETRIC:
        return True
    # Basic indexing selects each element at most once; an index tensor may repeat some.
    items = index_items(node)
    basic = not any(isinstance(i, list) or (isinstance(i, Tensor) and i.dim()) for i in items)
    return node.function is Tensor.__getitem__ and basic


ISOMETRIC = frozenset(
    [
        *(function for function, step in LEAN_STEPS.items() if step in ISOMETRIC_STEPS),
        *variants(
            "permute", "chunk", "split", "unbind", "narrow", "select", "movedim", "unflatten"
        ),
        Tensor.split_with_sizes,
    ]
)  # fmt: skip
