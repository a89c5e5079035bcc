"""Records of single examples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from gradstats._values import integer
from gradstats.errors import TrackingError

# How many ids the repr of a spike shows.
SHOWN = 4


@dataclass(frozen=True)
class ExampleRecord:
    """One example of a measured step.

    Attributes:
        id: the caller's id; None if the step was given no ids.
        position: its position in the step: by rank of the process, then micro-batch, then row.
        norm: ‖g_i‖.
        alignment: p_i / Ḡ, the component of g_i along the mean gradient; NaN if not measured.
        layer: the layer (or parameter, if the monitor has no ``layers=``) with the largest share of
            ‖g_i‖².
        share: that share.
    """

    id: int | None
    position: int
    norm: float
    alignment: float
    layer: str
    share: float

    def __repr__(self) -> str:
        return (
            f"ExampleRecord(id={self.id}, position={self.position}, norm={self.norm:.4g}, "
            f"alignment={self.alignment:.4g}, layer={self.layer!r}, share={self.share:.4g})"
        )


@dataclass(frozen=True)
class Spike:
    """A step at which a norm stood out from the preceding steps.

    Attributes:
        step: the optimizer step's number.
        quantity: the metric that stood out.
        value: of that metric.
        typical: its median over the preceding measured steps.
        examples: those of largest norm and of largest alignment, by decreasing norm.
    """

    step: int
    quantity: str
    value: float
    typical: float
    examples: tuple[ExampleRecord, ...]

    def __repr__(self) -> str:
        names = [e.position if e.id is None else e.id for e in self.examples[:SHOWN]]
        more = ", …" if len(self.examples) > SHOWN else ""
        return (
            f"Spike(step={self.step}, {self.quantity}={self.value:.4g}, "
            f"typical={self.typical:.4g}, examples=[{', '.join(map(str, names))}{more}])"
        )

    @staticmethod
    def from_state(state: dict) -> Spike:
        """Return the spike that ``dataclasses.asdict`` turned into ``state``."""
        examples = tuple(ExampleRecord(**example) for example in state["examples"])
        return Spike(**{**state, "examples": examples})


class RunningSelfInfluence:
    """S_i = Σ_t η_t ‖∇ℓ_i(w_t)‖² over the measured steps t at which example i was in the batch.

    If every step is measured and all examples are visited equally often, this is TracIn's
    self-influence with a checkpoint at every step. With ``every`` > 1, visits are random: divide by
    ``visits``.
    Steps whose gradient is not finite do not count: GradScaler skips them.

    Source:
        Pruthi et al., arXiv 2002.08484.
    """

    def __init__(self):
        self._place: dict[int, int] = {}
        self._values = np.zeros(0)
        self._visits = np.zeros(0, dtype=np.int64)
        self._lacked: str | None = None

    def __len__(self) -> int:
        return len(self._place)

    def __repr__(self) -> str:
        return f"RunningSelfInfluence(examples={len(self)})"

    def add(self, ids: np.ndarray | None, contributions: np.ndarray | None) -> None:
        """Add η ‖g‖² for each id; contributions that are not finite are left out.

        Args:
            ids: (N,) integers; None if the step was given none.
            contributions: (N,) η ‖g‖²; None without an optimizer.
        """
        if contributions is None:
            self._lacked = "an optimizer, whose learning rates weight it: Monitor(optimizer=...)"
        elif ids is None:
            self._lacked = "the examples' ids: monitor.step(..., ids=...)"
        elif not np.isfinite(contributions).any():
            self._lacked = "a learning rate, or gradients that are finite"
        if ids is None or contributions is None:
            return
        finite = np.isfinite(contributions)
        ids, contributions = ids[finite], contributions[finite]
        places = np.array([self._place.setdefault(int(i), len(self._place)) for i in ids], int)
        missing = len(self._place) - len(self._values)
        if missing > 0:
            room = max(missing, len(self._values))
            self._values = np.concatenate([self._values, np.zeros(room)])
            self._visits = np.concatenate([self._visits, np.zeros(room, dtype=np.int64)])
        np.add.at(self._values, places, contributions)
        np.add.at(self._visits, places, 1)

    @property
    def ids(self) -> np.ndarray:
        """(N,) int64, in increasing order."""
        return np.sort(np.fromiter(self._place, dtype=np.int64, count=len(self)))

    @property
    def values(self) -> np.ndarray:
        """(N,) S_i in the order of ``ids``."""
        return self._values[self._order()]

    @property
    def visits(self) -> np.ndarray:
        """(N,) how many measured steps each example was in, in the order of ``ids``."""
        return self._visits[self._order()]

    def items(self) -> Iterator[tuple[int, float]]:
        """Yield (id, S_i)."""
        return zip(self.ids.tolist(), self.values.tolist(), strict=True)

    def top(self, k: int) -> list[tuple[int, float]]:
        """Return the k examples of largest S_i.

        Args:
            k: how many.

        Returns:
            (id, S_i) of each, in decreasing order.

        Raises:
            TrackingError: k is not a number of examples, or no measured step could be counted.
        """
        if integer(k, 0) is None:
            raise TrackingError(f"k is {k!r}, expected a number of examples.")
        if self._lacked and not self._place:
            raise TrackingError(
                f"no example has a self-influence yet: the last measured step lacked "
                f"{self._lacked}. Expected steps with ids (the trainers' callbacks also take ids=) "
                "and an optimizer with learning rates."
            )
        return sorted(self.items(), key=lambda item: -item[1])[:k]

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return three tensors (N,): ids int64, values float64, visits int64."""
        columns = {"ids": self.ids, "values": self.values, "visits": self.visits}
        return {name: torch.from_numpy(column) for name, column in columns.items()}

    def load_state_dict(self, state: dict) -> None:
        """Continue from a saved state."""
        ids = torch.as_tensor(state["ids"]).tolist()
        self._place = {int(i): place for place, i in enumerate(ids)}
        self._values = np.array(torch.as_tensor(state["values"]).tolist(), dtype=np.float64)
        self._visits = np.array(torch.as_tensor(state["visits"]).tolist(), dtype=np.int64)
        if not len(self._place) == len(self._values) == len(self._visits):
            raise ValueError("the self-influence of some examples is missing")

    def _order(self) -> list[int]:
        return [self._place[i] for i in self.ids.tolist()]
