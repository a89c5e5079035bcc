"""Where in a parameter the elements of a tensor lie that was derived from it."""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise
from typing import Any, NamedTuple


class Path(NamedTuple):
    """How a tensor picks and arranges elements of the parameter it is derived from.

    Attributes:
        steps: (operation, its arguments, which of its results) for each step from the parameter.
        first, last: between these bytes of the parameter's memory lie all the elements.
        memory: how the parameter lies there, its strides and the size of an element: in memory of
            another form, as another model may have it, the same bytes hold other elements.
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
                # Different pieces of the same split.
                return step[:2] == its[:2] and None not in (step[2], its[2])
        return False


def in_a_row(paths: Collection[Any]) -> bool:
    """Whether several tensors lie one behind the other, so that no two share an element.

    Args:
        paths: also () for all of the parameter, and None for one that is made in another way.
    """
    if not all(paths) or len({path.memory for path in paths}) > 1:
        return False
    ordered = sorted(paths, key=lambda path: path.first)
    return all(path.last < after.first for path, after in pairwise(ordered))
