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
        memory: the parameter's strides and element size. Another model's parameter may have others,
            and then the same bytes hold other elements.
    """

    steps: tuple[tuple, ...]
    first: int
    last: int
    memory: tuple = ()

    def is_disjoint(self, other: Path) -> bool:
        """Whether two tensors are known to share no element."""
        apart = self.last < other.first or other.last < self.first
        if apart and self.memory == other.memory:
            return True
        for step, other_step in zip(self.steps, other.steps, strict=False):
            if step != other_step:
                # Different pieces of one split are disjoint.
                return step[:2] == other_step[:2] and None not in (step[2], other_step[2])
        return False


def in_a_row(paths: Collection[Any]) -> bool:
    """Whether several tensors lie one after the other in memory, so that no two share an element.

    Args:
        paths: () stands for the whole parameter, None for a tensor derived in another way.
    """
    if not all(paths) or len({path.memory for path in paths}) > 1:
        return False
    ordered = sorted(paths, key=lambda path: path.first)
    return all(path.last < after.first for path, after in pairwise(ordered))
