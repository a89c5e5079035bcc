"""Hooks that the user's code has set on autograd nodes, directly or through modules.

A change that a hook makes to the gradient of a derived tensor, or to the gradients that an
operation on parameters hands on, reaches no factor, and is refused. Hooks that only read may stay:
a backward that would form no such gradients forms them for these hooks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeAlias

from torch import Tensor
from torch.autograd.graph import Node as GraphNode

from gradstats.capture.operations._graph import ACCUMULATE_GRAD
from gradstats.capture.parameters._nodes import Root
from gradstats.capture.parameters._refusals import HOOK_ELSEWHERE
from gradstats.capture.parameters._tensors import node_of
from gradstats.errors import UnsupportedOperationError

Gradients: TypeAlias = tuple[Tensor | None, ...]


def watch_derived(
    nodes: Iterable[GraphNode], uses: Collection[GraphNode], roots: Sequence[Root]
) -> bool:
    """Watch the nodes between parameters and their uses; return whether any has hooks.

    Args:
        nodes: the nodes of the losses' graph, perhaps without those between uses and parameters.
        uses: the nodes of operations on parameters and data, and of compiled graphs.
        roots: the parameters.
    """
    above: dict[GraphNode, list[GraphNode]] = defaultdict(list)
    found, stack = {*nodes}, [*nodes]
    while stack:
        node = stack.pop()
        for child, _ in node.next_functions:
            if child is None:
                continue
            if node not in uses:
                above[child].append(node)
            if child not in found:
                found.add(child)
                stack.append(child)
    tracked = {*roots}
    made_of: dict[GraphNode, set[Root]] = defaultdict(set)
    places: list[tuple[Any, GraphNode]] = [
        (node_of(leaf.variable), leaf)  # type: ignore[attr-defined]
        for leaf in found
        if type(leaf) is ACCUMULATE_GRAD
    ]
    places += [(root, alias) for root in roots for alias in root.alias_nodes]
    while places:
        root, node = places.pop()
        if root in tracked and root not in made_of[node]:
            made_of[node].add(root)
            places += [(root, each) for each in above[node]]
    hooked = False
    for node, found_roots in made_of.items():
        if type(node) is ACCUMULATE_GRAD:
            continue  # hooks there are for training alone, as those on parameters are
        behind = [root for root in roots if root in found_roots]
        described = f"a tensor computed from {', '.join([root.describe() for root in behind])}"
        names = [root.name for root in behind]
        for register in (node.register_hook, node.register_prehook):
            hooked |= Watched(described, names).begin(register)
    return hooked


def has_hooks(node: GraphNode, set_by_context: int) -> bool:
    """Whether the user's code has set hooks on a node, beside those that the context has set."""
    try:
        handles: list[Any] = [node.register_hook(_ignore), node.register_prehook(_ignore)]
    except RuntimeError:  # in PyTorch 2.11, where a Function's node is gone and its hooks with it
        return False
    counts = [len(handle.hooks_dict_ref()) - 1 for handle in handles]
    for handle in handles:
        handle.remove()
    return sum(counts) > set_by_context


def _ignore(*_) -> None:
    """Do nothing."""


class Watched:
    """Compares the gradients that a node hands on, or is given, before and after users' hooks."""

    def __init__(self, described: str, names: Sequence[str]):
        """Say, for errors, whose gradients hooks may not change, and name the parameters."""
        self._described, self._names = described, names
        self._before: list[tuple[Tensor | None, int]] = []

    def begin(self, register: Callable[..., Any], set_by_context: int = 0) -> bool:
        """Watch the backward that is about to run; return whether the user's code has set hooks.

        Args:
            register: ``register_hook`` or ``register_prehook`` of the node.
            set_by_context: number of hooks that the context has set there, which come first.
        """
        handle = register(self._note)
        hooks = handle.hooks_dict_ref()
        of_users = [*hooks][set_by_context:-1]
        if not of_users:
            handle.remove()
            return False
        for key in of_users:
            hooks[key] = hooks.pop(key)  # so that it runs after ``_note``
        register(self._check)
        return True

    def _note(self, gradients: Gradients, *_: Gradients) -> None:
        self._before = _versions(gradients)

    def _check(self, gradients: Gradients, *_: Gradients) -> None:
        before, self._before = self._before, []  # the graph, which may stay, keeps no gradients
        pairs = zip(before, _versions(gradients), strict=True)
        if any(old is not new or old_at != new_at for (old, old_at), (new, new_at) in pairs):
            raise UnsupportedOperationError(
                f"a hook on the autograd node of {self._described}, a module's backward hook or "
                "one set by the register_hook of a node, changed gradients, which does not reach "
                f"the per-example gradients. Expected hooks that only read there. {HOOK_ELSEWHERE}",
                self._names,
            )


def _versions(gradients: Gradients) -> list[tuple[Tensor | None, int]]:
    return [(each, 0 if each is None else each._version) for each in gradients]
