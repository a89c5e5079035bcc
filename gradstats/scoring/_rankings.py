"""Who helps and who harms a query: training examples in the order of their scores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gradstats._notebooks import Printed
from gradstats._requirements import require
from gradstats._values import integer
from gradstats._warnings import warn
from gradstats.errors import ScoreError
from gradstats.scoring._loaders import Data

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure
    from typing_extensions import Self

# Default length of a list, and of a figure's lists.
LISTED, PICTURED = 10, 5

# Two queries of different kinds share few of their strongest examples. If they share more than
# this, the lists say more about the training data than about the query.
OVERLAP = 0.5
LISTS_COMPARED = 32
# With fewer queries or shorter lists, chance decides the share.
FEWEST_QUERIES, SHORTEST_LIST = 4, 3


# Not compared by value: comparing arrays gives no bool.
@dataclass(frozen=True, eq=False)
class Ranking(Printed):
    """Training examples in the order of their influence on one query.

    Attributes:
        positions: (k,) rows of the score matrix.
        ids: (k,) of these examples.
        scores: (k,) their scores.
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
    """The base of ``InfluenceScores`` and ``TopScores``: who helps and who harms a query.

    Attributes:
        train_ids, query_ids: (N,) and (Q,) ids of the examples.
        normalize: None for raw scores, "cosine" for renormalised ones.
        checkpoints: names of the checkpoints that were summed over.
        raw, cosine: the same scores in either form.
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
        """Do not pickle the loaders, which only the pictures of ``plot`` need."""
        return {**self.__dict__, "_data": None}

    @property
    def raw(self) -> Self:
        """The same scores, Σ_c η_c ⟨∇ℓ_i(w_c), ∇ℓ_j(w_c)⟩."""
        return self._as(None)

    @property
    def cosine(self) -> Self:
        """The same scores, each checkpoint's products divided by ‖∇ℓ_i(w_c)‖‖∇ℓ_j(w_c)‖."""
        return self._as("cosine")

    def _as(self, normalize: str | None) -> Self:
        # Not copy.copy, which would drop the loaders.
        scores = object.__new__(type(self))
        vars(scores).update(vars(self), normalize=normalize)
        return scores

    @property
    def shape(self) -> tuple[int, int]:
        """(N, Q)."""
        return len(self.train_ids), len(self.query_ids)

    def proponents(self, query: int | str, k: int | None = None) -> Ranking:
        """Return the k training examples that lowered the query's loss most.

        These have the largest scores, even if some are negative.

        Args:
            query: its position, 0 … Q - 1, or -Q … -1 from the end; or its id, if that is a string.
            k: how many; ten by default, or ``top_k`` if fewer were kept.

        Returns:
            Ranking: ``ids``, ``scores`` and ``positions``, the largest score first.

        Raises:
            ScoreError: there is no such query, or k exceeds the ``top_k`` examples that were kept.
        """
        return self._ranking(self._check_query(query), self._number(k), 1)

    def opponents(self, query: int | str, k: int | None = None) -> Ranking:
        """Return the k training examples that raised the query's loss most.

        These have the smallest scores, even if some are positive.

        Args:
            query: its position, 0 … Q - 1, or -Q … -1 from the end; or its id, if that is a string.
            k: how many, as for ``proponents``.

        Returns:
            Ranking: ``ids``, ``scores`` and ``positions``, the smallest score first.

        Raises:
            ScoreError: as for ``proponents``.
        """
        return self._ranking(self._check_query(query), self._number(k), -1)

    def plot(self, query: int | str, k: int | None = None) -> Figure:
        """Return a figure of a query with its proponents and opponents.

        It shows pictures if the examples are images and the scores were not loaded from disk, else
        bars.

        Args:
            query: its position, 0 … Q - 1, or -Q … -1 from the end; or its id, if that is a string.
            k: how many of each; five by default, or ``top_k`` if fewer were kept.

        Returns:
            A matplotlib figure: ``figure.savefig("query.png")``.

        Raises:
            MissingPackageError: without matplotlib.
            ScoreError: as for ``proponents``.
        """
        from gradstats.scoring._pictures import draw_query

        position = self._check_query(query)
        k = min(PICTURED, self._listed) if k is None else k
        rankings = self.proponents(position, k), self.opponents(position, k)
        form = self.normalize or "raw"
        return draw_query(self.query_ids[position], rankings, self._data, position, form)

    def to_pandas(self, k: int | None = None) -> pandas.DataFrame:
        """Return the strongest training examples of all queries as one pandas DataFrame.

        Args:
            k: how many proponents, and how many opponents, of each query; as for ``proponents``.

        Returns:
            A row for each query and example, in the order of the lists: ``query``, the query's id;
            ``kind``, "proponent" or "opponent"; ``rank``, from 1; ``id`` and ``score``.

        Raises:
            MissingPackageError: without pandas.
            ScoreError: as for ``proponents``.
        """
        with require("tables"):
            import pandas
        number = self._number(k)
        lists = [
            {
                "query": self.query_ids[query],
                "kind": kind,
                "rank": np.arange(1, len(ranking) + 1),
                "id": ranking.ids,
                "score": ranking.scores,
            }
            for query in range(len(self.query_ids))
            for kind, sign in (("proponent", 1), ("opponent", -1))
            for ranking in [self._ranking(query, number, sign)]
        ]
        return pandas.concat(map(pandas.DataFrame, lists), ignore_index=True)

    def warn_if_alike(self, k: int) -> None:
        """Warn if the strongest examples hardly differ between queries.

        Args:
            k: how many are compared, at most a quarter of the training examples.
        """
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
                warn(
                    f"the {k} strongest {name} hardly differ between queries: two queries share "
                    f"{share:.0%} of them on average, so they say more about the training data "
                    f"than about a query; {remedy}.",
                )

    def _ranking(self, query: int, k: int, sign: int) -> Ranking:
        raise NotImplementedError

    @property
    def _listed(self) -> int:
        """The default length of a list."""
        return LISTED

    def _number(self, k: int | None) -> int:
        return self._listed if k is None else check_k(k)

    def _check_query(self, query: int | str) -> int:
        """Return the position of a query."""
        names = self.query_ids.tolist()
        if isinstance(query, str) and query in names:
            return names.index(query)
        number, count = integer(query), len(names)
        if number is None or not -count <= number < count:
            raise ScoreError(
                f"query is {query!r}, expected its position, an integer from 0 to {count - 1}, or "
                "its id, if query_ids= named strings."
            )
        return number % count


def strongest(scores: np.ndarray, positions: np.ndarray, k: int, sign: int) -> np.ndarray:
    """Return the indices of the k largest (sign 1) or smallest (-1) scores, strongest first.

    NaN comes last; of equal scores the lower position comes first.
    """
    values = -sign * scores
    candidates = np.arange(len(values))
    if k < len(values):
        candidates = np.flatnonzero(~(values > np.partition(values, k - 1)[k - 1]))
    order = np.lexsort((positions[candidates], values[candidates]))
    return candidates[order[:k]]


def mean_overlap(lists: Sequence[np.ndarray]) -> float:
    """Return the share of entries that two lists have in common, averaged over all pairs."""
    sets = [set(each.tolist()) for each in lists]
    shares = [
        len(one & other) / min(len(one), len(other))
        for number, one in enumerate(sets)
        for other in sets[:number]
    ]
    return float(np.mean(shares))


def check_k(k: Any, name: str = "k") -> int:
    """Return a number of examples, or raise an error that names the argument."""
    number = integer(k, 1)
    if number is None:
        raise ScoreError(f"{name} is {k!r}, expected a positive integer, a number of examples.")
    return number
