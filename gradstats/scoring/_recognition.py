"""Identifying checkpoints, models and losses by what they are and do, not by their names."""

from __future__ import annotations

from typing import Any

from gradstats._comparison import half_the_digits
from gradstats.errors import CheckpointError
from gradstats.scoring import _ranks
from gradstats.scoring._checkpoints import Checkpoint
from gradstats.scoring._loaders import Data
from gradstats.scoring._weights import weights_hash
from gradstats.scoring._work import Work


class Recognition:
    """Tells the checkpoints of one call apart, and whether results on disk belong to the call.

    The losses that tell the latter are those of ``data``, the training side.
    """

    def __init__(self, work: Work, data: Data):
        self._work, self._data = work, data
        self._seen: dict[str, str] = {}

    def entry(self, checkpoint: Checkpoint, query: Checkpoint | None) -> dict[str, Any]:
        """Return what identifies a checkpoint, for a manifest.

        Two models or losses may have one name, and two names one model: so, beside the weights, the
        losses of the first training batch are compared, which follow from all of them.

        Args:
            checkpoint: whose weights the model has now.
            query: of the query side, None where it is the same.

        Raises:
            CheckpointError: if an earlier checkpoint holds the same weights, or other processes
                hold other weights or rates.
        """
        weights, query_weights = self._hashes(checkpoint, query)
        held = _ranks.gather((weights, query_weights, checkpoint.rates))
        if any(each[:2] != held[0][:2] for each in held):
            raise CheckpointError(
                f"{checkpoint.name} holds other weights in each process, as the state dict of a "
                "model does whose processes have seen other batches (running statistics). Expected "
                "the same in all: save it in one of them, and pass the file."
            )
        if any(each[2] != held[0][2] for each in held):
            raise CheckpointError(
                f"{checkpoint.name} has other learning rates in each process. Expected the same "
                "lr= in all, and files that nobody writes meanwhile."
            )
        if weights in self._seen:
            raise CheckpointError(
                f"{checkpoint.name} and {self._seen[weights]} hold the same weights, so these "
                "would count twice. List each checkpoint once."
            )
        self._seen[weights] = checkpoint.name
        entry = {
            "name": checkpoint.name,
            "weights": weights,
            "query_weights": query_weights,
            "rates": checkpoint.rates,
        }
        if self._work.out is not None:
            entry["first_losses"] = _ranks.on_first(self._first_losses)
        return entry

    def check_same(
        self, checkpoint: Checkpoint, query: Checkpoint | None, entry: dict[str, Any]
    ) -> None:
        """Raise unless a checkpoint that was loaded again holds what it did for its entry."""
        weights, query_weights = self._hashes(checkpoint, query)
        for each, what, now, key in (
            (checkpoint, "weights", weights, "weights"),
            (checkpoint, "learning rates", checkpoint.rates, "rates"),
            (query or checkpoint, "weights", query_weights, "query_weights"),
        ):
            if now != entry[key]:
                raise CheckpointError(
                    f"{each.name} holds other {what} than when it was first read in this call, so "
                    f"scores of some examples would be at other {what} than those of the rest. "
                    "Expected files that nobody writes meanwhile: score copies of those that a "
                    "training run replaces."
                )

    def _hashes(self, checkpoint: Checkpoint, query: Checkpoint | None) -> tuple[str, str | None]:
        """Return the hashes of both sides' weights."""
        model = self._work.model
        query_hash = None if query is None else weights_hash(model, query)
        return weights_hash(model, checkpoint), query_hash

    def _first_losses(self) -> dict[str, Any]:
        """Return the first training batch's losses, and how far those of another machine may be."""
        work = self._work
        losses = work.first_losses(self._data, check=True)()
        return {
            "tolerance": half_the_digits(losses, *work.model.parameters()),
            # One line of the manifest.
            "values": " ".join(f"{loss:.9g}" for loss in losses.double().tolist()),
        }
