"""What influence returns: scores of train × query, in memory or on disk, and their rankings."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gradstats.errors import GradStatsWarning, ScoreError
from gradstats.scoring._folder import read_results
from gradstats.scoring._loaders import Data

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NORMALIZATIONS = (None, "cosine")
# The files of a checkpoint's part, in the order of Partial's attributes.
PARTS = ("products", "train_sqnorm", "query_sqnorm")
# Two queries of different kinds share few of their strongest examples; above this share the lists
# say more about the training data than about the query.
OVERLAP = 0.5
LISTS_COMPARED = 32
# With fewer queries or shorter lists the share is left to chance.
FEWEST_QUERIES, SHORTEST_LIST = 4, 3


@dataclass(frozen=True)
class Ranking:
    """Training examples in the order of their influence on one query.

    Attributes:
        positions: (k,) rows of the score matrix.
        ids: (k,) what names them.
        scores: (k,) theirs.
    """

    positions: np.ndarray
    ids: np.ndarray
    scores: np.ndarray

    def __len__(self) -> int:
        return len(self.positions)

    def __iter__(self) -> Iterator[tuple[Any, float]]:
        """Yield (id, score)."""
        return iter(zip(self.ids.tolist(), self.scores.tolist(), strict=True))

    def __str__(self) -> str:
        """Return one line for each example, under a header."""
        lines = (f"{score:12.5g}  {name}" for name, score in self)
        return "\n".join([f"{'score':>12}  id", *lines])


class Rankings:
    """What full and streamed scores share: who helps and who harms a query.

    Attributes:
        train_ids, query_ids: (N,) and (Q,) what names the examples.
        normalize: None for raw scores, "cosine" for renormalised ones.
        checkpoints: names of those that were summed over.
    """

    def __init__(
        self,
        train_ids: np.ndarray,
        query_ids: np.ndarray,
        normalize: str | None,
        checkpoints: Sequence[str],
        data: tuple[Data, Data] | None,
    ):
        self.train_ids, self.query_ids = train_ids, query_ids
        self.normalize = normalize
        self.checkpoints = tuple(checkpoints)
        self._data = data

    def __getstate__(self) -> dict[str, Any]:
        """Leave the loaders behind, which only ``plot`` asks for pictures."""
        return {**self.__dict__, "_data": None}

    @property
    def shape(self) -> tuple[int, int]:
        """(N, Q)."""
        return len(self.train_ids), len(self.query_ids)

    def proponents(self, query: int, k: int = 10) -> Ranking:
        """Return the k training examples whose learning lowered the query's loss most.

        Args:
            query: its position, 0 … Q - 1.
            k: how many.

        Returns:
            Ranking: ``ids``, ``scores`` and ``positions``, the largest score first.

        Raises:
            ScoreError: for a query that is not there, or more examples than ``top_k`` kept.
        """
        return self._ranking(self._check_query(query), check_k(k), 1)

    def opponents(self, query: int, k: int = 10) -> Ranking:
        """Return the k training examples whose learning raised the query's loss most.

        Args:
            query: its position, 0 … Q - 1.
            k: how many.

        Returns:
            Ranking: the smallest score first; all else as for ``proponents``.
        """
        return self._ranking(self._check_query(query), check_k(k), -1)

    def plot(self, query: int, k: int = 5) -> Figure:
        """Return a figure of a query with its proponents and opponents.

        Pictures where the examples are images and the scores were not loaded from disk, else bars.

        Args:
            query: its position, 0 … Q - 1.
            k: how many of either.

        Raises:
            MissingPackageError: without matplotlib.
        """
        from gradstats.scoring._pictures import draw_query

        rankings = self.proponents(query, k), self.opponents(query, k)
        return draw_query(self.query_ids[query], rankings, self._data, query)

    def warn_if_alike(self, k: int = 10) -> None:
        """Warn if the strongest examples hardly differ between queries."""
        count, queries = self.shape
        k = min(k, count // 4)
        if queries < FEWEST_QUERIES or k < SHORTEST_LIST:
            return
        compared = np.unique(np.linspace(0, queries - 1, LISTS_COMPARED).round().astype(int))
        for sign, name in ((1, "proponents"), (-1, "opponents")):
            share = mean_overlap([self._ranking(int(q), k, sign).positions for q in compared])
            if share > OVERLAP:
                remedy = (
                    'a few examples with large gradients may dominate. Try normalize="cosine"'
                    if self.normalize is None
                    else "the queries may be of one kind"
                )
                warnings.warn(
                    f"the {k} strongest {name} hardly differ between queries: two queries share "
                    f"{share:.0%} of them on average, so they say more about the training data "
                    f"than about a query; {remedy}.",
                    GradStatsWarning,
                    stacklevel=3,
                )

    def _ranking(self, query: int, k: int, sign: int) -> Ranking:
        raise NotImplementedError

    def _check_query(self, query: int) -> int:
        if not isinstance(query, (int, np.integer)) or isinstance(query, bool):
            raise ScoreError(f"query is {query!r}, expected its position, a whole number.")
        if not -len(self.query_ids) <= query < len(self.query_ids):
            raise ScoreError(
                f"query is {query}, expected a position from 0 to {len(self.query_ids) - 1}."
            )
        return int(query) % len(self.query_ids)


@dataclass(frozen=True)
class Partial:
    """One checkpoint's part: learning rate times products, and the norms of both sides.

    Attributes:
        products: (N, Q), an array or a memory map.
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
        return np.divide(values, lengths, out=zeros, where=lengths != 0)


class InfluenceScores(Rankings):
    """The train × query matrix, read like an array: ``scores[i, j]``, ``scores[:, j]``.

    A score above zero says that a step on the training example lowers the query's loss. Scores are
    read-only: ``np.array(scores)`` is a copy that may be changed.

    Attributes:
        train_ids, query_ids: (N,) and (Q,) what names the examples.
        normalize: None for Σ_c η_c ⟨∇ℓ_i(w_c), ∇ℓ_j(w_c)⟩, "cosine" for the same with each
            checkpoint's products divided by ‖∇ℓ_i(w_c)‖‖∇ℓ_j(w_c)‖.
        checkpoints: names of those that were summed over.
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
            _protect(source.values())

    @classmethod
    def load(cls, folder: str | Path, normalize: str | None = None) -> InfluenceScores:
        """Return what ``gs.influence(out=folder)`` left, over all its checkpoints.

        Args:
            folder: of the results; read without the model and the data.
            normalize: None or "cosine": which form the result shows first.

        Raises:
            StoreError: if the folder holds something else, or a checkpoint that is not complete.
        """
        check = check_normalize(normalize)
        names, ids, held = read_results(
            Path(folder), "influence", "gs.influence", ("train_ids", "query_ids"), PARTS
        )
        return cls([Partial(*each) for each in held], ids[0], ids[1], check, names)

    @property
    def raw(self) -> InfluenceScores:
        """The same scores, Σ_c η_c ⟨∇ℓ_i(w_c), ∇ℓ_j(w_c)⟩."""
        return self._as(None)

    @property
    def cosine(self) -> InfluenceScores:
        """The same scores, each checkpoint's products divided by ‖∇ℓ_i(w_c)‖‖∇ℓ_j(w_c)‖."""
        return self._as("cosine")

    def __getitem__(self, key: Any) -> Any:
        if isinstance(self._source, dict):
            return self._source[self.normalize][key]
        total = self._source[0].read(key, self.normalize)
        for partial in self._source[1:]:
            total = total + partial.read(key, self.normalize)
        return total

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        values = self[:]
        if not isinstance(self._source, dict) and values.flags.writeable:
            # Made for this call: nobody else's.
            if copy is False:
                raise ValueError("scores on disk are read and added up into an array: copy=None")
            return np.asarray(values, dtype=dtype)
        return np.array(values, dtype=dtype, copy=copy)

    def __len__(self) -> int:
        return len(self.train_ids)

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[row] for row in range(len(self)))

    def __repr__(self) -> str:
        return (
            f"InfluenceScores({len(self.train_ids)} train × {len(self.query_ids)} query, "
            f"normalize={self.normalize!r}, {len(self.checkpoints)} checkpoints)"
        )

    def _as(self, normalize: str | None) -> InfluenceScores:
        return InfluenceScores(
            self._source, self.train_ids, self.query_ids, normalize, self.checkpoints, self._data
        )

    def _ranking(self, query: int, k: int, sign: int) -> Ranking:
        scores = self[:, query]
        positions = strongest(scores, np.arange(len(scores)), k, sign)
        return Ranking(positions, self.train_ids[positions], scores[positions])


class TopScores(Rankings):
    """The strongest training examples of every query; the matrix was never formed.

    Attributes:
        train_ids, query_ids: (N,) and (Q,) what names the examples.
        normalize: None or "cosine".
        checkpoints: names of those that were summed over.
        top_k: how many were kept of each kind.
        raw, cosine: the same in either form.
    """

    def __init__(
        self,
        lists: dict[str, tuple[np.ndarray, np.ndarray]],
        train_ids: np.ndarray,
        query_ids: np.ndarray,
        normalize: str | None,
        checkpoints: Sequence[str],
        data: tuple[Data, Data] | None,
    ):
        super().__init__(train_ids, query_ids, normalize, checkpoints, data)
        self._lists = lists
        for arrays in lists.values():
            _protect(arrays)
        self.top_k = next(iter(lists.values()))[0].shape[1]

    @property
    def raw(self) -> TopScores:
        """The same scores, Σ_c η_c ⟨∇ℓ_i(w_c), ∇ℓ_j(w_c)⟩."""
        return self._as(None)

    @property
    def cosine(self) -> TopScores:
        """The same scores, each checkpoint's products divided by ‖∇ℓ_i(w_c)‖‖∇ℓ_j(w_c)‖."""
        return self._as("cosine")

    def __getitem__(self, key: Any) -> Any:
        raise ScoreError(
            f"only the {self.top_k} strongest examples of each query were kept (top_k="
            f"{self.top_k}), so there is no matrix to index. Use .proponents(query) and "
            ".opponents(query), or call gs.influence without top_k."
        )

    def __repr__(self) -> str:
        return (
            f"TopScores({len(self.train_ids)} train × {len(self.query_ids)} query, "
            f"top_k={self.top_k}, normalize={self.normalize!r})"
        )

    def _as(self, normalize: str | None) -> TopScores:
        return TopScores(
            self._lists, self.train_ids, self.query_ids, normalize, self.checkpoints, self._data
        )

    def _ranking(self, query: int, k: int, sign: int) -> Ranking:
        if k > self.top_k and self.top_k < len(self.train_ids):
            raise ScoreError(
                f"k is {k}, and {self.top_k} of each kind were kept. Call gs.influence with "
                f"top_k={k} or more."
            )
        positions, scores = (
            each[query][:k] for each in self._lists[list_name(self.normalize, sign)]
        )
        return Ranking(positions, self.train_ids[positions], scores)


def _protect(arrays: Iterable[np.ndarray]) -> None:
    """Make results read-only: slices of them are given out, and a change would be to all."""
    for array in arrays:
        array.setflags(write=False)


def list_name(normalize: str | None, sign: int) -> str:
    """Return the name of one kind of list."""
    return f"{normalize or 'raw'}_{'proponents' if sign > 0 else 'opponents'}"


def strongest(scores: np.ndarray, positions: np.ndarray, k: int, sign: int) -> np.ndarray:
    """Return the indices of the k largest (sign 1) or smallest (-1); lower positions win ties."""
    values = -sign * scores
    if k < len(values):
        values = np.where(np.isnan(values), np.inf, values)
        bound = np.partition(values, k - 1)[k - 1]
        candidates = np.flatnonzero(values <= bound)
    else:
        candidates = np.arange(len(values))
    order = np.lexsort((positions[candidates], values[candidates]))
    return candidates[order[:k]]


def mean_overlap(lists: Sequence[np.ndarray]) -> float:
    """Return the mean share of entries that two of the lists have in common."""
    sets = [set(each.tolist()) for each in lists]
    shares = [
        len(one & other) / min(len(one), len(other))
        for number, one in enumerate(sets)
        for other in sets[:number]
    ]
    return float(np.mean(shares)) if shares else 0.0


def check_k(k: Any) -> int:
    """Return a number of examples, or raise."""
    if not isinstance(k, (int, np.integer)) or isinstance(k, bool) or k < 1:
        raise ScoreError(f"k is {k!r}, expected a positive number of examples.")
    return int(k)


def check_normalize(normalize: Any) -> str | None:
    """Return a normalisation, or raise."""
    if normalize not in NORMALIZATIONS:
        raise ScoreError(f'normalize is {normalize!r}, expected None or "cosine".')
    return normalize
