"""The steps of recurrent layers, and how states are carried through them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

States = list[Tensor]


@dataclass(frozen=True)
class Steps:
    """How the rows of a layer are ordered: the first step of all sequences, then the second, ….

    Attributes:
        sizes: number of sequences in each step, not increasing.
        reverse: whether the layer reads the last step first.
    """

    sizes: tuple[int, ...]
    reverse: bool

    @property
    def even(self) -> bool:
        """Whether all sequences have the same number of steps."""
        return self.sizes[0] == self.sizes[-1]

    def split(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Return the rows of each step."""
        return rows.split(self.sizes)

    def walk(
        self, starts: States, advance: Callable[[int, States], States], *, back: bool = False
    ) -> States:
        """Carry states from step to step; return those after each sequence's last step.

        Args:
            starts: (sequences, width) each: the states before each sequence's first step.
            advance: called as advance(step, states) with the states of the sequences in it;
                returns those after the step.
            back: walk from the step that the layer reads last to the one that it reads first.
        """
        order = range(len(self.sizes))
        states, alive = [start[:0] for start in starts], 0
        left: list[States] = []
        for step in reversed(order) if self.reverse != back else order:
            size = self.sizes[step]
            if alive == 0:
                states = [start[:size] for start in starts]
            elif size > alive:
                pairs = zip(states, starts, strict=True)
                states = [torch.cat([state, start[alive:size]]) for state, start in pairs]
            elif size < alive:
                left.append([state[size:] for state in states])
                states = [state[:size] for state in states]
            states, alive = advance(step, states), size
        if not left:
            return states
        return [torch.cat(parts) for parts in zip(states, *reversed(left), strict=True)]

    def before(self, rows: Tensor, start: Tensor) -> Tensor:
        """Return, in place of each row, its sequence's row at the step that is read before it."""
        if self.even:
            size = self.sizes[0]
            return torch.cat([rows[size:], start] if self.reverse else [start, rows[:-size]])
        after, found = self.split(rows), [rows] * len(self.sizes)

        def note(step: int, states: States) -> States:
            found[step] = states[0]
            return [after[step]]

        self.walk([start], note)
        return torch.cat(found)
