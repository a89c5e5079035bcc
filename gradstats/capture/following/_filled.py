"""Tensors that are filled piece by piece with rows of any examples.

If rows are grouped, for instance by expert, the results of each group are often written one after
the other into an empty tensor. Its layout is known only at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradstats.capture.following._examples import Examples, Whole


class Piece(NamedTuple):
    """What one write put into a tensor.

    Attributes:
        read: called with the tensor and a layout of it, returns the layout of the written place.
        more: how many more axes the place has than the values.
        owned: the layout of the values.
    """

    read: Callable[[Tensor, Examples], Examples | Whole | None]
    more: int
    owned: Examples | Whole


@dataclass
class Filling:
    """What has been written into a tensor that was blank.

    Attributes:
        pieces: every write so far.
        size: how many elements they wrote.
        meetings: autograd nodes of writes at which different examples seemed to meet.
    """

    pieces: list[Piece] = field(default_factory=list)
    size: int = 0
    meetings: list[Any] = field(default_factory=list)

    def copy(self) -> Filling:
        """Return what a copy of the tensor holds."""
        return Filling([*self.pieces], self.size, [*self.meetings])

    def layout(self, target: Tensor, contract: Examples) -> Examples | None:
        """Return where the examples lie once everything is written; None before."""
        if self.size < target.numel():
            return None
        layouts = (self._along(axis, target, contract) for axis in range(target.dim()))
        return next((layout for layout in layouts if layout is not None), None)

    def _along(self, axis: int, target: Tensor, contract: Examples) -> Examples | None:
        """Return the layout with the examples along an axis, if that is where they lie."""
        rows = Examples(target.shape[axis], axis)  # as if each row were an example of its own
        owner = torch.full((rows.batch,), -1, device=target.device)
        for read, more, owned in self.pieces:
            place = read(target, rows)
            if isinstance(owned, Examples):
                if not isinstance(place, Examples) or place.axis != owned.axis + more:
                    return None
            elif place is None:
                return None
            index, examples = (_numbers(each, target.device) for each in (place, owned))
            if len(examples) not in (1, len(index)):
                return None
            before = owner[index]
            owner[index] = examples
            # A row written for two examples belongs to neither.
            kept = (before == -1) | (before == examples)
            if not bool((kept & (owner[index] == examples)).all()):
                return None
        return contract.owned_by(owner, axis) if bool((owner >= 0).all()) else None


def _numbers(owned: Examples | Whole, device: torch.device) -> Tensor:
    """Return the example of each row, or the only one."""
    if isinstance(owned, Whole):
        return torch.tensor([owned.example], device=device)
    return owned.owner(device)
