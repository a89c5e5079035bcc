"""Pulling factors of derived tensors back to the parameters they were derived from.

A factor describes per-example gradients of the tensor that met the data. If that tensor is a
transpose, a view, a cast or a multiple of a parameter, its product with a matrix, an embedding of
constant positions, a normalised parameter, or several joined, the parameter's factor is just as
lean. A parameter that is reached in several ways has one factor for each. Everything else is
pulled back by automatic differentiation, a few examples at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradstats._complex import real_shape
from gradstats._cost import pays_to_pull_apart, pulled_chunk
from gradstats._factors import Changed, Factor, Outer, Path, Undivided, Vector, compute_dtype
from gradstats.capture.following._indexing import is_sequence
from gradstats.capture.operations._memory import extent
from gradstats.capture.operations._nested import rebuild
from gradstats.capture.operations._operations import CASTS, SLICES
from gradstats.capture.parameters._derivation import Derived
from gradstats.capture.parameters._lean_normalisations import Flattened
from gradstats.capture.parameters._lean_products import only_adds, summed
from gradstats.capture.parameters._lean_steps import (
    ISOMETRIC_STEPS,
    LEAN_STEPS,
    OF_ANY_FACTOR,
    SAME_NUMBERS,
    index_items,
    lean_step,
)
from gradstats.capture.parameters._nodes import Node, Root, same_storage
from gradstats.capture.parameters._replay import FunctionReplay, Replay
from gradstats.contractions import (
    Contraction,
    WellConditioned,
    adds_up,
    lean,
    merge,
    rows_squared_norms,
    sqnorm,
)

# A longer chain of operations is pulled back at once, without lean steps: each of these takes two
# levels of Python's recursion limit.
DEEPEST = 200

# Examples to pull back through a custom Function between checks that its backward is linear, if the
# workspace allows.
FUNCTION_CHUNK = 8


@dataclass(frozen=True)
class Pulled(Undivided, Changed):
    """The factor of a parameter that is given by a factor of a tensor derived from it.

    Attributes:
        inner: factor of the derived tensor.
        node: the derived tensor.
        root: the parameter whose per-example gradients this describes.
        together: all parameters that ``inner`` is to be pulled back to from this tensor, with their
            norms once these are known.
    """

    inner: Factor
    node: Derived
    root: Root
    together: dict[Root, Contraction | None]

    @property
    def shape(self) -> tuple[int, ...]:
        return real_shape(self.root.parameter)

    @property
    def elements(self) -> int:
        return math.prod(self.shape) + self.node.widest

    @property
    def path(self) -> Path | None:
        """How the root's elements were rearranged; None if anything else was done to them."""
        return rearrangement(self.node)

    def dense(self) -> Tensor:
        (pulled,) = self.replay().pull_each(self.inner)
        return pulled

    def pull(self, cotangent: Tensor) -> Tensor:
        (pulled,) = self.replay().pull(cotangent)
        return pulled

    def push(self, direction: Tensor) -> Tensor | None:
        """Return the derivative of the derived tensor along a direction; None if not known.

        It is not for custom Functions, whose backward need not be differentiable.
        """
        return None if self.node.has_function else self.replay().push(direction)

    def replay(self, copies: bool = False) -> Replay:
        """Compute the derived tensor again; copies make that independent of later changes."""
        return replay_of(self.node, [self.root], copies)

    def frozen(self, replays: dict[tuple[Node, Root], Replay]) -> Frozen:
        """Return the same factor, independent of later changes to the model.

        Args:
            replays: those made so far, which all uses of a tensor share; a new one is added.
        """
        key = (self.node, self.root)
        if key not in replays:
            replays[key] = self.replay(copies=True)
        return Frozen(self.inner, replays[key], self.path)


@dataclass(frozen=True)
class Frozen(Undivided, Changed):
    """A ``Pulled`` factor that outlives its context and later changes of the model's weights.

    Attributes:
        inner: factor of the derived tensor.
        replay: the computation of the derived tensor from the root.
        path: how the root's elements were rearranged; None if anything else was done to them.
    """

    inner: Factor
    replay: Replay
    path: Path | None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.replay.leaves[0].shape)

    @property
    def elements(self) -> int:
        return math.prod(self.shape) + self.replay.widest

    def dense(self) -> Tensor:
        (pulled,) = self.replay.pull_each(self.inner)
        return pulled


def pull_back(factor: Factor, node: Node, roots: Sequence[Root]) -> dict[Root, list[Factor]]:
    """Return the factors of several roots, given a factor of ``node``.

    A root has a factor for each way in which it is reached; they add up.
    """
    if isinstance(node, Root):
        return {node: [factor]}
    assert isinstance(node, Derived)
    found = _pulled_apart(factor, node, roots)
    if len(found) == len(roots):
        return found
    together: dict[Root, Contraction | None] = {root: None for root in roots if root not in found}
    factor = lean(factor)
    return found | {root: [Pulled(factor, node, root, together)] for root in together}


def _pulled_apart(factor: Factor, node: Derived, roots: Sequence[Root]) -> dict[Root, list[Factor]]:
    """Return the factors of those roots that lean steps reach."""
    step = lean_step(node) if node.depth <= DEEPEST else None
    if step is None:
        return {}
    if step not in OF_ANY_FACTOR:
        factor = lean(factor)
        if isinstance(factor, Vector) and factor.axis is not None:
            return {}
    parents = dict.fromkeys(node.parents)
    branches: dict[Root, int] = {}
    for parent in parents:
        for root in parent.roots:
            branches[root] = branches.get(root, 0) + 1
    found: dict[Root, list[Factor]] = {
        r: [] for r in roots if branches[r] == 1 or _may_branch(factor, node.paths[r])
    }
    for parent in parents:
        sought = [root for root in parent.roots if root in found]
        result = step(factor, node, parent) if sought else None
        above = {} if result is None else pull_back(result, parent, sought)
        for root in sought:
            if root not in above or any(map(_is_flattened, above[root])):
                del found[root]
            else:
                found[root] += above[root]
    node.forget()
    sums: dict[Root, list[Factor]] = {}
    for root, factors in found.items():
        if added := _sum(factors):
            sums[root] = added
    return sums


def _is_flattened(factor) -> bool:
    """Whether a factor did not get back into the shape of its weight."""
    return isinstance(factor.inner if isinstance(factor, Pulled) else factor, Flattened)


def _may_branch(factor: Factor, ways: int) -> bool:
    """Whether it pays to pull a factor back along several ways separately."""
    if not isinstance(factor, Outer) or not factor.spans_rows:
        return False
    return pays_to_pull_apart(factor.left.shape[2], ways)


def _sum(factors: list[Factor]) -> list[Factor] | None:
    """Return a root's factors, merged; None if pulling back once, all ways together, is better.

    It is if the gradients of several factors would have to be formed one after the other.
    """
    if len(factors) == 1:
        return factors
    if any(isinstance(factor, Pulled) for factor in factors):
        return None
    merged = merge(factors)
    return merged if adds_up(merged) else None


def pulled_sqnorm(factor: Pulled, workspace: int) -> Contraction:
    """Return the squared norms of a pulled-back factor that is its root's only one.

    Unless the way back changes no norms, examples are pulled back and squared in chunks, at once
    for all parameters that have no other use.
    """
    known = factor.together.get(factor.root)
    if known is not None:
        return known
    if isometric_root(factor.node) is factor.root:
        return sqnorm([factor.inner], workspace)
    alone = [root for root in factor.together if root.has_one_use or root is factor.root]
    found = sqnorms_together(factor.inner, factor.node, alone, workspace)
    factor.together.update(found)
    return found[factor.root]


def sqnorms_together(
    factor, node: Derived, roots: Sequence[Root], workspace: int
) -> dict[Root, Contraction]:
    """Return the squared norms of several parameters that a factor is pulled back to at once."""
    replay = replay_of(node, roots)
    dtype = compute_dtype(node.value)
    size = dtype.itemsize * (node.widest + sum(root.parameter.numel() for root in roots))
    chunk = pulled_chunk(size, factor.batch, workspace, launched=node.value.is_cuda)
    if node.has_function:
        # The check of its backward, once for each chunk, takes as long as two examples.
        chunk = max(2, chunk, min(FUNCTION_CHUNK, workspace // size))
    norms: dict[Root, list[Tensor]] = {root: [] for root in roots}
    for start in range(0, factor.batch, chunk):
        inner = factor.select(slice(start, start + chunk))
        for root, pulled in zip(roots, replay.pull_each(inner), strict=True):
            norms[root].append(rows_squared_norms(pulled))
    return {root: WellConditioned(dtype, value=torch.cat(parts)) for root, parts in norms.items()}


def replay_of(node: Derived, roots: Sequence[Root], copies: bool = False) -> Replay:
    """Compute a tensor again from parameters; copies make that independent of later changes."""
    return (FunctionReplay if node.has_function else Replay)(node, roots, copies)


def rearrangement(node: Node) -> Path | None:
    """Return how a derived tensor picks and arranges elements of its root, each at most once.

    Two tensors with the same path hold the same elements of the parameter in the same places.

    Returns:
        The path from the root; None if a step does anything else.
    """
    if len(node.roots) != 1:
        return None
    steps: list[tuple] = []
    (root,) = node.roots
    view: Tensor | None = None
    while isinstance(node, Derived):
        if not is_isometric(node):
            return None
        # The arguments of a cast or a copy do not tell which elements it holds.
        casts = node.function in CASTS
        arguments = "" if casts else repr(rebuild((node.args[1:], node.kwargs), _form_of))
        steps.append((node.function, arguments, node.index))
        if view is None and same_storage(node.value, root.value):
            view = node.value
        node = node.parents[0]
    view = root.value if view is None else view
    # In bytes, since views of a complex parameter may have real elements, and from the parameter's
    # first one, since it may itself be a view of something larger.
    size = view.element_size()
    first = view.storage_offset() * size - root.value.storage_offset() * root.value.element_size()
    last = first + (extent(view) + 1) * size - 1
    memory = (*root.value.stride(), root.value.element_size())
    return Path(tuple(reversed(steps)), int(first), int(last), memory)


def isometric_root(node: Node) -> Root | None:
    """Return the parameter whose per-example gradients have the same norms as a tensor's, if any.

    Views and reshapes put each of its elements into the tensor at most once, and adding something
    to the elements changes no gradient.
    """
    while isinstance(node, Derived):
        parent = node.parents[0]
        adds = lean_step(node) is summed and only_adds(node) and node.shape == parent.shape
        if not (adds and len(node.parents) == 1) and not is_isometric(node):
            return None
        node = parent
    return node if isinstance(node, Root) else None


def _form_of(argument: Any) -> Any:
    """Return an argument, or if it is a tensor its shape: all that a rearrangement depends on."""
    value = argument.value if isinstance(argument, Node) else argument
    return tuple(value.shape) if isinstance(value, Tensor) and value.dim() else value


def is_isometric(node: Derived) -> bool:
    """Whether a tensor consists of elements of its only operand, each at most once."""
    if node.function not in SAME_NUMBERS and (
        node.value.is_complex() != node.parents[0].value.is_complex()
    ):
        return False  # a cast between real and complex drops an imaginary part
    if node.function in ISOMETRIC:
        return True
    if node.function is not Tensor.__getitem__:
        return False
    # Basic indexing picks each element at most once; an index tensor may repeat some.
    items = index_items(node)
    return not any(is_sequence(i) or (isinstance(i, Tensor) and i.dim()) for i in items)


ISOMETRIC = SLICES.union(
    [function for function, step in LEAN_STEPS.items() if step in ISOMETRIC_STEPS]
)
