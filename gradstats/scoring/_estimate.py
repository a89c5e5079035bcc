"""How much memory and time a train × query matrix takes, from a trial of one of its tiles."""

from __future__ import annotations

import math

import numpy as np

from gradstats.scoring import _ranks
from gradstats.scoring._stream import Stream
from gradstats.scoring._work import amount, duration, plural


def estimate(stream: Stream, pending: np.ndarray, checkpoints: int) -> str:
    """Return what the tiles of all checkpoints are expected to take, for people.

    Args:
        stream: computes the tiles; tries the first pending one.
        pending: (train batches, query batches) bool, the tiles of the first checkpoint.
        checkpoints: how many there are; of the others all tiles count.
    """
    train, query = stream.train, stream.query
    row, column = map(int, np.argwhere(pending)[0])
    trial = stream.trial(row, column)
    rows, columns = train.sizes[row], query.sizes[column]
    query_bytes = trial.nbytes / columns * query.examples
    # How often the training data are passed at each checkpoint.
    blocks = min(query.batches, math.ceil(query_bytes / stream.budget))
    # A pass is a forward and backward, as keeping is, and a product with each kept query.
    keeping = trial.keeping / columns
    passing = min(trial.passing / rows, keeping)
    product = max(0.0, trial.passing / rows - keeping) / columns
    examples = float(train.sizes[pending.any(1)].sum()) + (checkpoints - 1) * train.examples
    seconds = (passing * blocks + product * query.examples) * examples / _ranks.size()
    seconds += checkpoints * keeping * query.examples
    kept = f"query gradients take {amount(query_bytes)}"
    if blocks > 1:
        held_bytes = min(query_bytes, max(stream.budget, trial.nbytes))
        kept += f", {amount(held_bytes)} at once in {plural(blocks, 'block')}"
    return f"{kept}; about {duration(seconds)}"
