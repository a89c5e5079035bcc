"""What gs.influence returns: train × query scores, in memory or on disk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gradstats.errors import ScoreError
from gradstats.scoring._folder import path_of, read_results
from gradstats.scoring._loaders import Data
from gradstats.scoring._rankings import Ranking, Rankings, strongest
from gradstats.scoring._work import plural

NORMALIZATIONS = (None, "cosine")
# The files of one checkpoint, in the order of Partial's attributes.
PARTS = ("products", "train_sqnorm", "query_sqnorm")
# The files of both sides' ids.
IDS = ("train_ids", "query_ids")


@dataclass(frozen=True)
class Partial:
    """One checkpoint's part of the scores, or a tile of it.

    Attributes:
        products: (N, Q) η ⟨∇ℓ_i, ∇ℓ_j⟩, an array or a memory map.
        train_sqnorm: (N,) float64.
        query_sqnorm: (Q,) float64.
    """

    products: np.ndarray
    train_sqnorm: np.ndarray
    query_sqnorm: np.ndarray

    def read(self, key: Any, normalize: str | None) -> np.ndarray:
        """Return some of the scores in float64."""
        values = np.asarray(self.products[key], dtype=np.float64)
        if normalize is None:
            return values
        shape = self.products.shape
        lengths = (
            np.broadcast_to(np.sqrt(self.train_sqnorm)[:, None], shape)[key]
            * (np.broadcast_to(np.sqrt(self.query_sqnorm)[None], shape)[key])
        )
        zeros = np.zeros(np.shape(lengths))
        with np.errstate(invalid="ignore"):  # the cosine of an infinite gradient is NaN
            return np.divide(values, lengths, out=zeros, where=lengths != 0)


class InfluenceScores(Rankings):
    """The train × query matrix, read like an array: ``scores[i, j]``, ``scores[:, j]``.

    A positive score says that a step on the training example lowers the query's loss. Scores are
    read-only; ``np.array(scores)`` is a copy that can be changed.

    Attributes:
        train_ids, query_ids: (N,) and (Q,) ids of the examples.
        normalize: None for Σ_c η_c ⟨∇ℓ_i(w_c), ∇ℓ_j(w_c)⟩, "cosine" for the same with each
            checkpoint's products divided by ‖∇ℓ_i(w_c)‖‖∇ℓ_j(w_c)‖.
        checkpoints: names of the checkpoints that were summed over.
        raw, cosine: the same scores in either form.
    """

    def __init__(
        self,
        source: Sequence[Partial] | dict[str | None, np.ndarray],
        train_ids: np.ndarray,
        query_ids: np.ndarray,
        normalize: str | None,
        checkpoints: Sequence[str],
        data: tuple[Data, Data] | None = None,
    ):
        super().__init__(train_ids, query_ids, normalize, checkpoints, data)
        self._source = source
        if isinstance(source, dict):
            protect(source.values())

    @classmethod
    def load(cls, folder: str | Path, normalize: str | None = None) -> InfluenceScores:
        """Return the results of ``gs.influence(out=folder)``, over all checkpoints there.

        Args:
            folder: of the results; neither model nor data are needed.
            normalize: None or "cosine": the form that the result shows first.

        Returns:
            InfluenceScores (N, Q), read from the files on access.

        Raises:
            ScoreError: ``normalize`` is neither None nor "cosine".
            StoreError: the folder holds something else, or an incomplete checkpoint.
        """
        check = check_normalize(normalize)
        names, ids, held = read_results(path_of(folder), "influence", IDS, PARTS)
        return cls([Partial(*each) for each in held], ids[0], ids[1], check, names)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(self._source, dict):
            return self._source[self.normalize][key]
        total = self._source[0].read(key, self.normalize)
        for partial in self._source[1:]:
            total = total + partial.read(key, self.normalize)
        return total[()]  # a single score as a number, as from an array in memory

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        values = self[:]
        if values.flags.writeable:  # a new array, added up from the disk for this call
            if copy is False:
                raise ValueError(
                    "copy=False of scores on disk, which are read and added up into a new array: "
                    "pass copy=None"
                )
            copy = None
        return np.array(values, dtype=dtype, copy=copy)

    def __len__(self) -> int:
        return len(self.train_ids)

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[row] for row in range(len(self)))

    def __repr__(self) -> str:
        return (
            f"InfluenceScores({len(self.train_ids)} train × {len(self.query_ids)} query, "
            f"normalize={self.normalize!r}, {plural(len(self.checkpoints), 'checkpoint')})"
        )

    def _ranking(self, query: int, k: int, sign: int) -> Ranking:
        scores = self[:, query]
        positions = strongest(scores, np.arange(len(scores)), k, sign)
        return Ranking(positions, self.train_ids[positions], scores[positions])


def protect(arrays: Iterable[np.ndarray]) -> None:
    """Make results read-only: slices are views, and writing to one would change the results."""
    for array in arrays:
        array.setflags(write=False)


def check_normalize(normalize: Any) -> str | None:
    """Return a normalisation, or raise."""
    named = normalize is None or isinstance(normalize, str)
    if not named or normalize not in NORMALIZATIONS:
        raise ScoreError(f'normalize is {normalize!r}, expected None or "cosine".')
    return normalize
