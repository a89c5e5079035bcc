"""Pulling factors of derived tensors back to the parameters they were derived from.

A factor describes per-example gradients of the tensor that met the data. If that tensor is a
transpose, a view, a cast or a multiple of a parameter, its product with a matrix, an embedding of
constant positions, normalised, standardised, or joined from several parameters, the factor of the
parameter is just as lean; if several ways lead to the parameter, there is one factor for each.
Everything else is pulled back by automatic differentiation, a few examples at a time.
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

# Tensors behind a longer chain of operations are pulled back through all of them at once: each lean
# step takes two levels of Python's recursion limit.
DEEPEST = 200

# Examples to pull back through a custom Function, if the workspace allows, for each check that its
# backward is linear.
FUNCTION_CHUNK = 8


@dataclass(frozen=True)
class Pulled(Undivided, Changed):
    """The factor of a parameter that is given by a factor of a tensor derived from it.

    Attributes:
        inner: factor of the derived tensor.
        node: the derived tensor.
        root: the parameter whose per-example gradients this describes.
        together: all parameters to which ``inner`` has to be pulled back from this tensor, with
            their norms once these are known.
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

        The backward of a custom Function need not be differentiable.
        """
        return None if self.node.has_function else self.replay().push(direction)

    def replay(self, copies: bool = False) -> Replay:
        """Compute the derived tensor again; with copies, it survives changes of the weights."""
        return replay_of(self.node, [self.root], copies)

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
    """Return the factors of several roots that result from a factor of ``node``.

    A root's factors add up; it has one for each way in which it is reached.
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
    """Return the factors of the roots that are reached by lean steps."""
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
        own = [root for root in parent.roots if root in found]
        result = step(factor, node, parent) if own else None
        above = {} if result is None else pull_back(result, parent, own)
        for root in own:
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
    """Whether a factor stayed in another shape than its weight's."""
    return isinstance(factor.inner if isinstance(factor, Pulled) else factor, Flattened)


def _may_branch(factor: Factor, ways: int) -> bool:
    """Whether to pull a factor back along several ways separately."""
    if not isinstance(factor, Outer) or not factor.spans_rows:
        return False
    return pays_to_pull_apart(factor.left.shape[2], ways)


def _sum(factors: list[Factor]) -> list[Factor] | None:
    """Return all factors of a root merged; None if a single one, pulled back at once, is better.

    It is better if the gradients of several would have to be formed one after the other.
    """
    if len(factors) == 1:
        return factors
    if any(isinstance(factor, Pulled) for factor in factors):
        return None
    merged = merge(factors)
    return merged if adds_up(merged) else None


def pulled_sqnorm(factor: Pulled, workspace: int) -> Contraction:
    """Return the squared norms of a pulled-back factor that is its root's only one.

    Unless norms do not change on the way back, examples are pulled back and squared in chunks, for
    all parameters at once that have no other use.
    """
    known = factor.together.get(factor.root)
    if known is not None:
        return known
    if isometric_root(factor.node) is factor.root:
        return sqnorm([factor.inner], workspace)
    alone = [root for root in factor.together if root.has_one_use or root is factor.root]
    norms = sqnorms_together(factor.inner, factor.node, alone, workspace)
    factor.together.update(zip(alone, norms, strict=True))
    return pulled_sqnorm(factor, workspace)


def sqnorms_together(
    factor, node: Derived, roots: Sequence[Root], workspace: int
) -> list[Contraction]:
    """Return the squared norms of several parameters to which a factor is pulled back at once."""
    replay = replay_of(node, roots)
    dtype = compute_dtype(node.value)
    size = dtype.itemsize * (node.widest + sum(root.parameter.numel() for root in roots))
    chunk = pulled_chunk(size, factor.batch, workspace, launched=node.value.is_cuda)
    if node.has_function:
        # Its backward is checked once for each chunk, which takes as long as two examples.
        chunk = max(2, chunk, min(FUNCTION_CHUNK, workspace // size))
    norms: list[list[Tensor]] = [[] for _ in roots]
    for start in range(0, factor.batch, chunk):
        inner = factor.select(slice(start, start + chunk))
        for found, pulled in zip(norms, replay.pull_each(inner), strict=True):
            found.append(rows_squared_norms(pulled))
    return [WellConditioned(dtype, value=torch.cat(found)) for found in norms]


def replay_of(node: Derived, roots: Sequence[Root], copies: bool = False) -> Replay:
    """Compute a tensor again from parameters; with copies, it survives changes of the weights."""
    return (FunctionReplay if node.has_function else Replay)(node, roots, copies)


def rearrangement(node: Node) -> Path | None:
    """Return how a derived tensor picks and arranges elements of its root, each at most once.

    Two tensors with the same path hold the same elements of the parameter in the same places.

    Returns:
        The path from the root; None if a step does anything else.
    """
    if len(node.roots) != 1:
        return None  # computed from several: not a rearrangement of one
    steps: list[tuple] = []
    (root,) = node.roots
    view: Tensor | None = None
    while isinstance(node, Derived):
        if not is_isometric(node):
            return None
        # The arguments of a cast or a copy do not affect which elements it holds.
        casts = node.function in CASTS
        arguments = "" if casts else repr(rebuild((node.args[1:], node.kwargs), _form_of))
        steps.append((node.function, arguments, node.index))
        if view is None and same_storage(node.value, root.value):
            view = node.value
        node = node.parents[0]
    view = root.value if view is None else view
    # In bytes, since views of a complex parameter may have complex or real elements. Relative to
    # the parameter, which may itself be a view of something larger.
    size = view.element_size()
    first = view.storage_offset() * size - root.value.storage_offset() * root.value.element_size()
    last = first + (extent(view) + 1) * size - 1
    memory = (*root.value.stride(), root.value.element_size())
    return Path(tuple(reversed(steps)), int(first), int(last), memory)


def isometric_root(node: Node) -> Root | None:
    """Return the parameter whose per-example gradients have the norms of a tensor's, if known.

    Views and reshapes put each of its elements into the tensor at most once, and what is added to
    all of them changes nothing.
    """
    while isinstance(node, Derived):
        parent = node.parents[0]
        adds = lean_step(node) is summed and only_adds(node) and node.shape == parent.shape
        if not (adds and len(node.parents) == 1) and not is_isometric(node):
            return None
        node = parent
    return node if isinstance(node, Root) else None


def _form_of(argument: Any) -> Any:
    """Return an argument, or the shape if it is a tensor: all that a rearrangement depends on."""
    value = argument.value if isinstance(argument, Node) else argument
    return tuple(value.shape) if isinstance(value, Tensor) and value.dim() else value


def is_isometric(node: Derived) -> bool:
    """Whether a tensor has elements of its only operand, each at most once."""
    if node.function not in SAME_NUMBERS and (
        node.value.is_complex() != node.parents[0].value.is_complex()
    ):
        return False  # a cast between real and complex drops an imaginary part
    if node.function in ISOMETRIC:
        return True
    # Basic indexing selects each element at most once; an index tensor may repeat some.
    items = index_items(node)
    basic = not any(is_sequence(i) or (isinstance(i, Tensor) and i.dim()) for i in items)
    return node.function is Tensor.__getitem__ and basic


ISOMETRIC = SLICES.union(
    [function for function, step in LEAN_STEPS.items() if step in ISOMETRIC_STEPS]
)
