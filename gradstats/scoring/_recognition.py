"""Identifying checkpoints, models and losses by their contents, not only by their names."""

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
    """Identifies the checkpoints of one call, and the results on disk that belong to it.

    Args:
        work: the model, its loss and checkpoints.
        data: the training side, whose first losses identify model and loss.
    """

    def __init__(self, work: Work, data: Data):
        self._work, self._data = work, data
        self._seen: dict[str, str] = {}

    def entry(self, train: Checkpoint, query: Checkpoint) -> dict[str, Any]:
        """Return what identifies a checkpoint, for a manifest.

        Different models or losses may have the same name. So the losses of the first training
        batch, which depend on the model, the loss, the weights and the data, are kept too.

        Args:
            train: the train side's checkpoint, whose weights the model has now.
            query: the query side's; the same object if there is only one.

        Raises:
            CheckpointError: if an earlier checkpoint holds the same weights, or the processes hold
                different weights or rates.
        """
        weights, query_weights = self._hashes(train, query)
        found = _ranks.gather((weights, query_weights, train.rates))
        if any(each[:2] != found[0][:2] for each in found):
            raise CheckpointError(
                f"{train.name} holds different weights in different processes, perhaps "
                "running statistics of different batches. Expected the same in all: save the state "
                "dict in one process, and pass the file."
            )
        if any(each[2] != found[0][2] for each in found):
            raise CheckpointError(
                f"{train.name} has different learning rates in different processes. Expected "
                "the same lr= in all, and files that are not being written."
            )
        if weights in self._seen:
            raise CheckpointError(
                f"{train.name} and {self._seen[weights]} hold the same weights, so these "
                "would count twice. List each checkpoint once."
            )
        self._seen[weights] = train.name
        entry = {
            "name": train.name,
            "weights": weights,
            "query_weights": query_weights,
            "rates": train.rates,
        }
        if self._work.out is not None:
            entry["first_losses"] = _ranks.on_first(self._first_losses)
        return entry

    def check_same(self, train: Checkpoint, query: Checkpoint, entry: dict[str, Any]) -> None:
        """Raise unless a checkpoint that was loaded again is the one that ``entry`` identifies."""
        weights, query_weights = self._hashes(train, query)
        for each, what, now, key in (
            (train, "weights", weights, "weights"),
            (train, "learning rates", train.rates, "rates"),
            (query, "weights", query_weights, "query_weights"),
        ):
            if now != entry[key]:
                raise CheckpointError(
                    f"{each.name} holds other {what} than when it was first read in this call, so "
                    "not all scores would be of the same checkpoint. Expected files that are not "
                    "being written: score copies of files that a training run replaces."
                )

    def _hashes(self, train: Checkpoint, query: Checkpoint) -> tuple[str, str | None]:
        """Return the hashes of both sides' weights; None for the query side's if it is the same."""
        model = self._work.model
        return weights_hash(model, train), None if query is train else weights_hash(model, query)

    def _first_losses(self) -> dict[str, Any]:
        """Return the first training batch's losses, and their relative tolerance."""
        work = self._work
        losses = work.first_losses(self._data, check=True)()
        return {
            "tolerance": half_the_digits(losses, *work.model.parameters()),
            # One line of the manifest.
            "values": " ".join(f"{loss:.9g}" for loss in losses.double().tolist()),
        }
