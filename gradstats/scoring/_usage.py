"""Whether the losses use any of the parameters that are scored.

Those of a batch may use none, such as an expert that none of its examples was sent to: its
gradients are zero. Where that holds of all batches, other parameters were meant.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from gradstats.errors import TrackingError
from gradstats.scoring import _ranks
from gradstats.statistics._backward import NothingUsedError

Result = TypeVar("Result")


class Usage:
    """What is known of the batches that were measured so far."""

    def __init__(self) -> None:
        self._used: dict[str, bool] = {}

    def measured(
        self, role: str, measure: Callable[[], Result], zeros: Callable[[Tensor], Result]
    ) -> Result:
        """Return what is measured of a batch, or what it is where all gradients are zero.

        Args:
            role: of the batch, "training" or "query".
            measure: raises NothingUsedError where its losses use none of the parameters.
            zeros: takes the (B,) values of the losses.
        """
        try:
            result = measure()
        except NothingUsedError as error:
            if error.losses is None:
                raise
            losses = error.losses
        else:
            self.note_used(role)
            return result
        self._used.setdefault(role, False)
        return zeros(losses)

    def note_used(self, *roles: str) -> None:
        """Note that a batch uses some; of those that an earlier call measured it is not asked."""
        self._used.update(dict.fromkeys(roles, True))

    def check(self) -> None:
        """Raise in every process unless some batch of each role uses some, in whichever process."""
        found = _ranks.gather(self._used)
        for role in dict.fromkeys(role for each in found for role in each):
            if not any(each.get(role) for each in found):
                raise TrackingError(
                    f"no {role} batch uses any of the parameters that are scored, so that all "
                    "their gradients are zero, while other parameters of the model are used. Do "
                    "parameters= and exclude= leave only what the losses do not depend on?"
                )
