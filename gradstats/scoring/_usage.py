"""Whether the losses use any of the parameters that are scored.

The losses of one batch may use none, such as an expert to which none of its examples was sent:
their gradients are zero. If no batch uses any, the caller probably meant other parameters.
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
    """Records, for each role, whether some measured batch used any of the parameters."""

    def __init__(self) -> None:
        self._used: dict[str, bool] = {}

    def measured(
        self, role: str, measure: Callable[[], Result], zeros: Callable[[Tensor], Result]
    ) -> Result:
        """Return what ``measure`` does, or ``zeros`` if a batch's losses use no parameter.

        Args:
            role: of the batch, "training" or "query".
            measure: raises NothingUsedError if the losses use none of the parameters.
            zeros: given the (B,) values of the losses, returns the result for zero gradients.
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
        """Note that a batch uses some; batches that an earlier call measured count as such."""
        self._used.update(dict.fromkeys(roles, True))

    def check(self) -> None:
        """Raise in every process unless some batch of each role, in any process, uses some."""
        found = _ranks.gather(self._used)
        for role in dict.fromkeys(role for each in found for role in each):
            if not any(each.get(role) for each in found):
                raise TrackingError(
                    f"no {role} batch uses any of the parameters that are scored, so all their "
                    "gradients are zero, while other parameters of the model are used. Expected "
                    "parameters that the losses depend on: check parameters= and exclude=."
                )
