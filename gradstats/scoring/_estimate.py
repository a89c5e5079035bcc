"""How much memory and time a train × query matrix takes, from a trial of one of its tiles."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from gradstats.scoring import _ranks
from gradstats.scoring._stream import Stream
from gradstats.scoring._work import amount, duration, plural


@dataclass(frozen=True)
class Estimate:
    """What the tiles of all checkpoints take.

    Attributes:
        query_bytes: of the gradients of all queries.
        held_bytes: of those that are kept at once.
        blocks: how often the training data are passed at each checkpoint.
        seconds: for everything.
    """

    query_bytes: float
    held_bytes: float
    blocks: int
    seconds: float

    def __str__(self) -> str:
        kept = f"query gradients take {amount(self.query_bytes)}"
        if self.blocks > 1:
            kept += f", {amount(self.held_bytes)} at once in {plural(self.blocks, 'block')}"
        return f"{kept}; about {duration(self.seconds)}"


def estimate(stream: Stream, pending: np.ndarray, checkpoints: int) -> Estimate:
    """Return what is expected after a trial of the first pending tile.

    Args:
        stream: computes the tiles.
        pending: (train batches, query batches) bool, the tiles of the first checkpoint.
        checkpoints: how many there are; of the others all tiles count.
    """
    train, query = stream.train, stream.query
    row, column = map(int, np.argwhere(pending)[0])
    trial = stream.trial(row, column)
    rows, columns = train.sizes[row], query.sizes[column]
    query_bytes = trial.nbytes / columns * query.examples
    blocks = min(query.batches, math.ceil(query_bytes / stream.budget))
    # A pass is a forward and backward, as keeping is, and a product with each kept query.
    keeping = trial.keeping / columns
    passing = min(trial.passing / rows, keeping)
    product = max(0.0, trial.passing / rows - keeping) / columns
    examples = float(train.sizes[pending.any(1)].sum()) + (checkpoints - 1) * train.examples
    seconds = (passing * blocks + product * query.examples) * examples / _ranks.size()
    seconds += checkpoints * keeping * query.examples
    held_bytes = min(query_bytes, max(stream.budget, trial.nbytes))
    return Estimate(query_bytes, held_bytes, blocks, seconds)
