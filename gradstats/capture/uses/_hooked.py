"""Operations that PyTorch runs as usual, with a hook on their autograd node.

For operations whose norms cannot share work with the training gradient. The operation and its
backward stay PyTorch's, and a hook reports after the backward. That costs less than an autograd
Function, which would take longer than a small operation itself.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node as GraphNode

from gradstats._compiler import is_compiling
from gradstats._factors import Lookup
from gradstats.capture.following._examples import Examples
from gradstats.capture.operations._graph import (
    ADD,
    ADDMM,
    CONVOLUTION,
    COPY_SLICES,
    EMBEDDING,
    GROUP_NORM,
    LAYER_NORM,
    MM,
    MUL,
    VIEWS,
    hooks_on_saved,
)
from gradstats.capture.parameters._nodes import Root
from gradstats.capture.parameters._tensors import TrackedParameter
from gradstats.capture.uses._decided import Decided
from gradstats.capture.uses._together import Group, Joinable, kind_of, norms_of
from gradstats.capture.uses._uses import KEY, Use, check_derivatives

if TYPE_CHECKING:
    from gradstats.capture._context import Context

Gradients = tuple[Tensor | None, ...]

# Stands for the kind of an operation that was not asked whether it may wait for others.
UNDECIDED = object()


class Place(NamedTuple):
    """Where the autograd node of an operation keeps its data.

    Attributes:
        kind: the type of the node.
        saved: the attribute that holds the data; None if the factors need none.
        edge: the position of the edge to the node that computed the data; None if data never have
            a gradient.
    """

    kind: type
    saved: str | None
    edge: int | None


LINEAR = Place(ADDMM, "_saved_mat1", 1)
LINEAR_WITHOUT_BIAS = Place(MM, "_saved_self", 0)
CONVOLVED = Place(CONVOLUTION, "_saved_input", 0)
NORMALISED = Place(LAYER_NORM, "_saved_input", 0)
NORMALISED_IN_GROUPS = Place(GROUP_NORM, "_saved_input", 0)
LOOKED_UP = Place(EMBEDDING, "_saved_indices", None)
# By the position of the data.
MULTIPLIED = Place(MUL, "_saved_self", 0), Place(MUL, "_saved_other", 1)
ADDED = Place(ADD, None, 0), Place(ADD, None, 1)

KINDS = frozenset({ADDMM, MM, CONVOLUTION, LAYER_NORM, GROUP_NORM, EMBEDDING, MUL, ADD})


class Hooked(Use):
    """The use of parameters by an operation whose node has a hook that reports.

    Attributes:
        place: where the node keeps its data.
        factors_of: makes the factors.
        group: the operations that it may wait for; None if it may not wait.
        behind: the node that computed the data, until it was asked for; None if there is none.
    """

    place: Place
    factors_of: Joinable
    group: Group | None
    behind: GraphNode | None

    def expect(self) -> None:
        super().expect()
        if self.group is not None:
            self.group.expected += 1

    def edges_to_data(self, node: GraphNode) -> tuple[tuple[GraphNode | None, int], ...]:
        """Return the edges of its node that lead to data; the others lead to parameters.

        ``next_functions`` is avoided: the Python objects that it makes for the other edges live as
        long as the graph, and take longer to make than all else here. This skips the nodes of views
        that the operation takes of the data, which matter only if tensors were given other values.
        """
        if self.place.edge is None:
            return ()
        if self.behind is None or self.tracker.renumbered:
            return (node.next_functions[self.place.edge],)
        behind, self.behind = self.behind, None
        return ((behind, 0),)

    def after_backward(self, grads: Gradients, given: Gradients) -> Gradients | None:
        """Report the factors; in a differentiated backward return tracked gradients instead.

        Args:
            grads: the gradients of the operation's operands.
            given: the gradients of its results, after the user's hooks.
        """
        grad = given[0]
        if torch.is_grad_enabled():
            check_derivatives(self)
            return self._with_tracked(grads, grad)
        if self.is_due():
            if grad is None:
                self.take([None for _ in self.nodes])
            else:
                saved = self._saved()
                with torch._C.DisableTorchFunction():
                    self._report(grad, *saved)
        return None

    def _saved(self) -> tuple[Tensor, ...]:
        name = self.place.saved
        return () if name is None else (getattr(torch._C._current_autograd_node(), name),)

    def _report(self, grad: Tensor, *saved: Tensor) -> None:
        if self.settings.consumer is None and self.all_sole:
            if self.group is not None and self.group.take(self.roots, grad, *saved):
                return
            self.finish(norms_of(self.factors_of, self.settings.workspace, grad, *saved))
            return
        self.take(self.factors_of(grad, *saved))

    def _with_tracked(self, grads: Gradients, grad: Tensor | None) -> Gradients | None:
        """Return the gradients, with the data's computed by tracked operations."""
        edge = self.place.edge
        if edge is None or grad is None:
            return None
        found = self.factors_of.data_gradients(self.nodes, grad, *self._saved())
        return None if found is None else (*grads[:edge], found[0], *grads[edge + 1 :])


def hooked(
    tracker: Context,
    x: Tensor,
    parameters: Sequence[Tensor | None],
    examples: Examples,
    place: Place,
    factors_of: Joinable,
    run: Callable[..., Tensor],
) -> Tensor | None:
    """Do what ``hook`` does and remember it, to be repeated for operations that are alike."""
    if not may_hook():
        return None
    result = hook(tracker, x, parameters, examples, place, factors_of, run)
    if result is not None:
        rest = place, factors_of, run, None, kind_of(tracker.settings, factors_of, result)
        tracker.decided = Decided(result, hook, x, parameters, examples, rest)
    return result


def may_hook() -> bool:
    """Whether operations may be hooked here and now; the same for operations that are alike."""
    # Autocast caches casts of leaves, and would reuse one made where no gradient is recorded. Hooks
    # on saved tensors, such as checkpoints', may unpack each tensor only once.
    return not (
        is_compiling() or torch._C._is_any_autocast_enabled() or hooks_on_saved() is not None
    )


def hook(
    tracker: Context,
    x: Tensor,
    parameters: Sequence[Tensor | None],
    examples: Examples,
    place: Place,
    factors_of: Joinable,
    run: Callable[..., Tensor],
    lookup: Lookup | None = None,
    kind: Hashable = UNDECIDED,
) -> Tensor | None:
    """Return PyTorch's result of an operation, with a hook on its node; None if not possible.

    Call it only if ``may_hook`` holds.

    Args:
        x: the data.
        parameters: the other operands; those that are not None must be parameters.
        examples: where the examples lie in the result.
        place: where the operation's node is expected to keep its data.
        factors_of: makes the factors.
        run: the operation, called with the data and the plain tensors for ``parameters``; it holds
            no tensors.
        lookup: as ``tap`` takes it.
        kind: what ``kind_of`` returned for an operation that is alike.
    """
    exact = tracker.settings.exact
    roots: list[Root] = []
    operands: list[Tensor | None] = []
    for item in parameters:
        if item is None:
            operands.append(None)
            continue
        if type(item) is not TrackedParameter:
            return None
        root = item._gradstats
        assert isinstance(root, Root)
        roots.append(root)
        # A parameter's gradients are summed in PyTorch's order only if all meet at its alias.
        operands.append(root.value if exact else root.parameter)
    behind = None if place.edge is None else x.grad_fn
    result = run(x, *operands)
    node: Any = result.grad_fn  # PyTorch's annotations take its metadata for a method
    if type(node) in VIEWS:
        node = node.next_functions[0][0]
    found: type = type(node)
    if found is not place.kind:
        return None
    if kind is UNDECIDED:
        kind = kind_of(tracker.settings, factors_of, result)
    use = Hooked(roots)
    use.place, use.factors_of, use.lookup, use.behind = place, factors_of, lookup, behind
    use.group = None if kind is None else tracker.together.group(kind, factors_of)
    node.metadata[KEY] = use
    node.register_hook(use.after_backward)
    tracker.note_followed(result, examples)
    return result


def hooked_on(node: Any) -> Hooked | None:
    """Return the use that a node's hook reports; None for nodes without such a hook."""
    return node.metadata.get(KEY) if type(node) in KINDS else None


def use_at(node: Any) -> Use | None:
    """Return the use that a node reports; None for all other nodes."""
    partial = type(node) is COPY_SLICES
    use = node.metadata.get(KEY) if partial else hooked_on(node) or getattr(node, "use", None)
    return use if isinstance(use, Use) else None  # a user's Function may keep others by this name
