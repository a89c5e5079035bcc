"""Autograd nodes that the user's code asks for, to set hooks on them, as modules do.

What a hook makes of the gradient of a tensor that was computed from parameters alone, or of the
gradients that an operation on parameters hands on, reaches no factor. Hooks that only read are let
be; a context whose backward forms no such gradients forms them for these.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from torch import Tensor
from torch.autograd.graph import Node as GraphNode

from gradstats.errors import UnsupportedOperationError

Gradients: TypeAlias = tuple[Tensor | None, ...]


class Watched:
    """One such node, whose gradients are compared before the user's hooks and after."""

    def __init__(self, node: GraphNode, described: str, names: Sequence[str], *, derived: bool):
        """Begin before the user's code has the node.

        Args:
            node: of a tensor that parameters were computed with.
            described, names: what hooks may not change the gradients of, and the parameters.
            derived: whether the gradients that it is given count as well as those it hands on. What
                an operation of data is given is changed before the factors are made.
        """
        self._described, self._names = described, names
        self._found: dict[bool, list[tuple[Tensor | None, int]]] = {}
        handles = [node.register_hook(lambda handed, _: self._note(True, handed))]
        if derived:
            handles.append(node.register_prehook(lambda given: self._note(False, given)))
        self._hooks = [handle.hooks_dict_ref for handle in handles]
        self._own = self._count()

    def _count(self) -> int:
        return sum(len(hooks() or ()) for hooks in self._hooks)

    def is_hooked(self) -> bool:
        """Whether the user's code has set hooks on the node since."""
        return self._count() > self._own

    def begin(self, node: GraphNode) -> None:
        """Compare in the backward that is about to run."""
        node.register_hook(lambda handed, _: self._check(True, handed))
        if len(self._hooks) > 1:
            node.register_prehook(lambda given: self._check(False, given))

    def _note(self, handed_on: bool, gradients: Gradients) -> None:
        self._found[handed_on] = _versions(gradients)

    def _check(self, handed_on: bool, gradients: Gradients) -> None:
        pairs = zip(self._found.pop(handed_on), _versions(gradients), strict=True)
        if any(one is not other or before != now for (one, before), (other, now) in pairs):
            raise UnsupportedOperationError(
                f"a hook on the autograd node of {self._described}, set by a module's backward "
                "hook or grad_fn.register_hook, changed gradients, which does not reach the "
                "per-example gradients. Expected hooks that only read there: register one that "
                "changes gradients on the parameter, if that is for training alone; otherwise "
                "have a torch.autograd.Function change the gradient in backward.",
                self._names,
            )


def _versions(gradients: Gradients) -> list[tuple[Tensor | None, int]]:
    return [(each, 0 if each is None else each._version) for each in gradients]
