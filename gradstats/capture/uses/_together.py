"""Small operations that differ only in the values of their operands, contracted together.

With small operands, a contraction spends most of its time on calls of PyTorch. An example's norms
depend only on its own rows of the operands. So several uses, with their operands concatenated along
the example axis, are one use by a larger batch, with as many calls as a single one. Operands are
copied when they arrive, so that it does not matter what happens to them afterwards.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from gradstats._compiler import is_compiling
from gradstats.capture.following._examples import Examples
from gradstats.capture.parameters._nodes import Root
from gradstats.capture.uses._tap import Factors
from gradstats.capture.uses._uses import Settings
from gradstats.contractions import Contraction, sqnorm

# Up to this size of an operation's result, in bytes, calls dominate the time of its contraction.
SMALL = 16 * 1024
# The most operations, and bytes of operands, that are contracted at once.
MOST, MOST_BYTES = 64, 256 * 1024
# The most bytes of operands, of all kinds together, that may wait.
HELD = 4 * 1024 * 1024
# For fewer operations, copying costs as much as it saves.
FEWEST = 3


def is_small(settings: Settings, x: Tensor, width: int, outputs: int) -> bool:
    """Whether operations on data like these may wait for each other.

    Args:
        x: the data.
        width: how many numbers the operation takes at each position.
        outputs: how many it returns there.
    """
    if settings.consumer is not None or is_compiling() or not x.is_cpu:
        return False
    return 0 < x.nbytes * max(width, outputs) <= SMALL * width


def kind_of(settings: Settings, factors_of: Joinable, result: Tensor) -> Hashable | None:
    """Return the key that operations share that may wait for each other; None if it may not wait.

    Args:
        factors_of, result: the operation's.
    """
    if settings.consumer is not None or not result.is_cpu:
        return None
    examples = factors_of.examples
    if not (examples.joinable and 0 < result.nbytes <= SMALL):
        return None
    likeness = factors_of.likeness()
    if likeness is None:
        return None
    return type(factors_of), likeness, examples.fold, result.shape, result.dtype


class Joinable(Factors):
    """Factors of an operation that can be joined with those of others.

    Attributes:
        examples: where the examples lie in all operands.
    """

    __slots__ = ()

    examples: Examples

    def likeness(self) -> Hashable | None:
        """Return what joined operations must share besides type and sizes; None if never joined."""

    def joined(self, count: int) -> Any:
        """Return the factors of ``count`` such operations, joined along their first axis."""
        return replace(self, examples=self.examples.times(count))  # type: ignore[type-var]


class Together:
    """The operations of one context that may wait for each other."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self._groups: dict[Hashable, Group] = {}
        self._held = 0

    def group(self, kind: Hashable, factors_of: Joinable) -> Group:
        """Return the group of the operations of a kind."""
        group = self._groups.get(kind)
        if group is None:
            group = self._groups[kind] = Group(self, factors_of)
        return group

    def reserve(self, operands: Sequence[Tensor], expected: int) -> list[Tensor]:
        """Return memory (count, *) for several operations, of at most ``expected``."""
        size = sum(operand.nbytes for operand in operands)
        count = max(1, min(expected, MOST, MOST_BYTES // size))
        if self._held + count * size > HELD:
            self.contract()
        self._held += count * size
        return [operand.new_empty(count, *operand.shape) for operand in operands]

    def contract(self) -> None:
        """Contract all that waits, and release the memory."""
        for group in self._groups.values():
            group.contract()
        self.drop()

    def drop(self) -> None:
        """Drop all that waits, and release the memory."""
        for group in self._groups.values():
            group.drop()
        self._held = 0

    def close(self) -> None:
        """Drop what waits, and the groups, which refer back to this."""
        self.drop()
        self._groups.clear()


class Group:
    """Operations of one kind.

    Attributes:
        expected: how many of them the graph of the losses contains.
    """

    def __init__(self, together: Together, factors_of: Joinable):
        self.expected = 0
        self._together = together
        self._factors_of = factors_of
        self.drop()

    def drop(self) -> None:
        """Drop all that waits, and release the memory."""
        self._memory: list[Tensor] = []
        self._places: list[tuple[Tensor, ...]] = []
        self._waiting: list[Sequence[Root]] = []

    def take(self, roots: Sequence[Root], *operands: Tensor) -> bool:
        """Copy the operands of the only use of some roots; return False if it cannot wait."""
        if self.expected < FEWEST:
            return False
        if not self._memory:
            self._memory = self._together.reserve(operands, self.expected)
            self._places = [memory.unbind() for memory in self._memory]
        position = len(self._waiting)
        for places, operand in zip(self._places, operands, strict=True):
            place = places[position]
            if place.shape != operand.shape or place.dtype != operand.dtype:
                return False
            place.copy_(operand)
        self._waiting.append(roots)
        for root in roots:
            root.expected -= 1
        if position + 1 == len(self._memory[0]):
            self.contract()
        return True

    def contract(self) -> None:
        """Hand the roots of all uses that wait their squared norms."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        count = len(waiting)
        operands = [memory[:count].flatten(0, 1) for memory in self._memory]
        workspace = self._together.settings.workspace
        results = norms_of(self._factors_of.joined(count), workspace, *operands)
        for roots, *parts in zip(waiting, *(each.split(count) for each in results), strict=True):
            for root, part in zip(roots, parts, strict=True):
                root.finish(part)


def norms_of(
    factors_of: Joinable, workspace: int, grad: Tensor, *saved: Tensor
) -> list[Contraction]:
    """Return the squared norms of the factors of an operation, one for each node."""
    norms = factors_of.norms(grad, *saved)
    if norms is None:
        norms = [sqnorm([factor], workspace) for factor in factors_of(grad, *saved)]
    return norms
