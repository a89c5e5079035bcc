"""Hooks that the user's code has set on autograd nodes, as modules do for it.

What a hook makes of the gradient of a tensor that was computed from parameters alone, or of the
gradients that an operation on parameters hands on, reaches no factor. Hooks that only read are let
be; a context whose backward forms no such gradients forms them for these.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeAlias

from torch import Tensor
from torch.autograd.graph import Node as GraphNode

from gradstats.capture.operations._graph import ACCUMULATE_GRAD
from gradstats.capture.parameters._nodes import Root
from gradstats.capture.parameters._tensors import node_of
from gradstats.errors import UnsupportedOperationError

Gradients: TypeAlias = tuple[Tensor | None, ...]


def watch_derived(
    nodes: Iterable[GraphNode], uses: Collection[GraphNode], roots: Sequence[Root]
) -> bool:
    """Watch the nodes between parameters and their uses; return whether any has hooks.

    Args:
        nodes: of the losses' graph, but perhaps without those between operations and parameters.
        uses: those of operations on parameters and data, and of compiled graphs.
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
    own = {*roots}
    made_of: dict[GraphNode, set[Root]] = defaultdict(set)
    places: list[tuple[Any, GraphNode]] = [
        (node_of(leaf.variable), leaf)  # type: ignore[attr-defined]
        for leaf in found
        if type(leaf) is ACCUMULATE_GRAD
    ]
    places += [(root, alias) for root in roots for alias in root.alias_nodes]
    while places:
        root, node = places.pop()
        if root in own and root not in made_of[node]:
            made_of[node].add(root)
            places += [(root, each) for each in above[node]]
    hooked = False
    for node, those in made_of.items():
        if type(node) is ACCUMULATE_GRAD:
            continue  # hooks there are for training alone, as the parameters' own are
        behind = [root for root in roots if root in those]
        described = f"a tensor computed from {', '.join([root.describe() for root in behind])}"
        names = [root.name for root in behind]
        for register in (node.register_hook, node.register_prehook):
            hooked |= Watched(described, names).begin(register)
    return hooked


class Watched:
    """The gradients that a node hands on, or is given, before the user's hooks and after."""

    def __init__(self, described: str, names: Sequence[str]):
        """Describe what hooks may not change the gradients of, and name the parameters."""
        self._described, self._names = described, names
        self._found: list[tuple[Tensor | None, int]] = []

    def begin(self, register: Callable[..., Any], own: int = 0) -> bool:
        """Compare these in the backward that is about to run; return whether there are any hooks.

        Args:
            register: ``register_hook`` or ``register_prehook`` of the node.
            own: how many hooks the context has set there, before the user's code had the node.
        """
        handle = register(self._note)
        hooks = handle.hooks_dict_ref()
        others = [*hooks][own:-1]
        if not others:
            handle.remove()
            return False
        for key in others:
            hooks[key] = hooks.pop(key)  # so that they run after the one that was set last
        register(self._check)
        return True

    def _note(self, gradients: Gradients, *_: Gradients) -> None:
        self._found = _versions(gradients)

    def _check(self, gradients: Gradients, *_: Gradients) -> None:
        found, self._found = self._found, []  # the gradients are not kept for as long as the graph
        pairs = zip(found, _versions(gradients), strict=True)
        if any(one is not other or before != now for (one, before), (other, now) in pairs):
            raise UnsupportedOperationError(
                f"a hook on the autograd node of {self._described}, set by a module's backward "
                "hook or the register_hook of a node, changed gradients, which does not reach the "
                "per-example gradients. Expected hooks that only read there: register one that "
                "changes gradients on the parameter, if that is for training alone; otherwise "
                "have a torch.autograd.Function change the gradient in backward.",
                self._names,
            )


def _versions(gradients: Gradients) -> list[tuple[Tensor | None, int]]:
    return [(each, 0 if each is None else each._version) for each in gradients]
