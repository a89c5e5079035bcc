"""Which elements of a parameter a tensor derived from it has, and where."""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise
from typing import Any, NamedTuple


class Path(NamedTuple):
    """How a tensor picks and arranges elements of the parameter it is derived from.

    Attributes:
        steps: (operation, its arguments, which of its results) for each step from the parameter.
        first, last: bytes of the parameter's memory between which all the elements lie.
        memory: the parameter's strides and element size: with others, as another model may have,
            the same bytes hold other elements.
    """

    steps: tuple[tuple, ...]
    first: int
    last: int
    memory: tuple = ()

    def is_disjoint(self, other: Path) -> bool:
        """Whether the two tensors share no element, as far as can be told."""
        apart = self.last < other.first or other.last < self.first
        if apart and self.memory == other.memory:
            return True
        for step, its in zip(self.steps, other.steps, strict=False):
            if step != its:
                # They are disjoint if these are different pieces of one split.
                return step[:2] == its[:2] and None not in (step[2], its[2])
        return False


def in_a_row(paths: Collection[Any]) -> bool:
    """Whether several tensors lie one after the other in memory, so that no two share an element.

    Args:
        paths: including () for the whole parameter, and None for tensors derived in other ways.
    """
    if not all(paths) or len({path.memory for path in paths}) > 1:
        return False
    ordered = sorted(paths, key=lambda path: path.first)
    return all(path.last < after.first for path, after in pairwise(ordered))
