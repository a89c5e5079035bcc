"""The strongest training examples of every query, without the matrix.

A score is a sum over checkpoints, so its rank is known only when all have been added. Therefore
chunks of training examples, as many as fit the budget, go through all checkpoints one by one.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from gradstats.errors import ScoreError, StoreError
from gradstats.scoring import _ranks
from gradstats.scoring._folder import STRONGEST, locked, path_of, read_manifest_of, write_whole
from gradstats.scoring._loaders import Data
from gradstats.scoring._rankings import Ranking, Rankings, strongest
from gradstats.scoring._scores import IDS, NORMALIZATIONS, Partial, check_normalize, protect
from gradstats.scoring._stream import Tile
from gradstats.scoring._tiles import DAMAGED
from gradstats.scoring._work import plural

STATE = "top.npz"
KINDS = [(normalize, sign) for normalize in NORMALIZATIONS for sign in (1, -1)]
# What reading damaged lists may raise.
UNREADABLE = (OSError, KeyError, RuntimeError, zipfile.BadZipFile, *DAMAGED)

# (normalize, sign) → (Q, k) positions and (Q, k) scores of the strongest.
Lists = dict[tuple[str | None, int], tuple[np.ndarray, np.ndarray]]


@dataclass
class TopLists:
    """The lists so far, as a folder holds them.

    Attributes:
        lists: the strongest first.
        checkpoints: names of the checkpoints that are summed over.
        circumstances: what the bits of the scores depend on.
        next_batch: the first train batch that has not been counted.
        finite: whether everything counted was finite, including what is not listed.
    """

    lists: Lists
    checkpoints: tuple[str, ...]
    circumstances: dict[str, str]
    next_batch: int = 0
    finite: bool = True

    @classmethod
    def empty(
        cls, queries: int, checkpoints: Sequence[str], circumstances: dict[str, str]
    ) -> TopLists:
        """Return the lists before the first train batch."""
        lists: Lists = {
            kind: (np.zeros((queries, 0), np.int64), np.zeros((queries, 0))) for kind in KINDS
        }
        return cls(lists, tuple(checkpoints), circumstances)

    @classmethod
    def read(cls, folder: Path) -> TopLists:
        """Return what a folder holds, or raise one of UNREADABLE."""
        with (folder / STATE).open("rb") as file, np.load(file, allow_pickle=False) as held:
            lists = {kind: tuple(held[name] for name in names_of(*kind)) for kind in KINDS}
            names = tuple(map(str, held["checkpoints"]))
            circumstances = json.loads(str(held["circumstances"]))
            state = int(held["next_batch"]), bool(held["finite"])
            return cls(lists, names, circumstances, *state)

    def add(self, lists: Lists, k: int) -> None:
        """Merge other lists into these, keeping k entries."""
        for kind in KINDS:
            positions, scores = (
                np.concatenate(both, axis=1)
                for both in zip(self.lists[kind], lists[kind], strict=True)
            )
            kept = np.stack(
                [
                    strongest(row, places, k, kind[1])
                    for row, places in zip(scores, positions, strict=True)
                ]
            )
            self.lists[kind] = (
                np.take_along_axis(positions, kept, 1), np.take_along_axis(scores, kept, 1),
            )  # fmt: skip

    def save(self, folder: Path, k: int) -> None:
        """Write the lists to a folder, unless another process has written more complete ones.

        A kill leaves either these lists or the ones before.
        """
        arrays: dict[str, Any] = {
            "next_batch": np.array(self.next_batch), "finite": np.array(self.finite),
            "checkpoints": np.array(self.checkpoints),
            "circumstances": np.array(json.dumps(self.circumstances)),
        }  # fmt: skip
        for kind, pair in self.lists.items():
            arrays |= zip(names_of(*kind), pair, strict=True)
        with locked(folder):
            if self.resumed(folder, k)[0].next_batch <= self.next_batch:
                write_whole(folder / STATE, lambda file: np.savez(file, **arrays))

    def resumed(self, folder: Path, k: int) -> tuple[TopLists, str | None]:
        """Return a folder's lists and None; or these lists, with what is wrong with the folder's.

        A folder without lists has nothing wrong with it.
        """
        if not (folder / STATE).exists():
            return self, None
        try:
            held = TopLists.read(folder)
            for kind, (positions, scores) in held.lists.items():
                shape = len(self.lists[kind][0]), min([k, *positions.shape[-1:]])
                if not positions.shape == scores.shape == shape:
                    name = names_of(*kind)[1]
                    raise ValueError(f"{name} has shape {scores.shape}, expected {shape}")
        except UNREADABLE as error:
            return self, f"{folder / STATE} is damaged ({error})"
        return replace(held, checkpoints=self.checkpoints), None


class Chunk:
    """Scores of some training examples, while checkpoints are added up.

    Args:
        rows: the training examples.
        queries: number of queries.
        row_spans, column_spans: the rows of each train batch, the columns of each query batch.

    Attributes:
        finite: whether all products and norms were finite.
    """

    def __init__(
        self, rows: slice, queries: int, row_spans: list[slice], column_spans: list[slice]
    ):
        self._start = rows.start
        self._spans = row_spans, column_spans
        self._held = np.zeros(rows.stop - rows.start, dtype=bool)
        self.finite = True
        self._scores: dict[str | None, np.ndarray] = {
            normalize: np.zeros((rows.stop - rows.start, queries), order="F")
            for normalize in NORMALIZATIONS
        }

    def write(self, row: int, column: int, tile: Tile) -> None:
        """Add one tile of one checkpoint."""
        span, columns = self._spans[0][row], self._spans[1][column]
        rows = slice(span.start - self._start, span.stop - self._start)
        part = Partial(**tile)
        for normalize, scores in self._scores.items():
            scores[rows, columns] += part.read(..., normalize)
        self._held[rows] = True
        self.finite = self.finite and all(np.isfinite(each).all() for each in tile.values())

    @property
    def nbytes(self) -> int:
        """Bytes of both forms of the scores."""
        return sum(scores.nbytes for scores in self._scores.values())

    def scores(self) -> dict[str | None, np.ndarray]:
        """Return both forms of the scores, with the rows of all processes."""
        for scores in self._scores.values():
            _ranks.add_up(scores)
        return self._scores

    def lists(self, k: int) -> Lists:
        """Return the strongest of this process's rows for every query."""
        rows = np.flatnonzero(self._held)
        found = {}
        for normalize, sign in KINDS:
            columns = self._scores[normalize][rows].T
            kept = np.stack([strongest(column, rows, k, sign) for column in columns])
            found[normalize, sign] = (
                rows[kept] + self._start, np.take_along_axis(columns, kept, 1),
            )  # fmt: skip
        return found


def chunks(sizes: np.ndarray, queries: int, budget: int, start: int) -> Iterator[range]:
    """Yield ranges of train batches, at least one each, whose scores in both forms fit a budget."""
    first, rows = start, 0
    for number in range(start, len(sizes)):
        if number > first and (rows + sizes[number]) * queries * 16 > budget:
            yield range(first, number)
            first, rows = number, 0
        rows += int(sizes[number])
    if first < len(sizes):
        yield range(first, len(sizes))


class TopScores(Rankings):
    """The strongest training examples for every query, without the matrix.

    Attributes:
        train_ids, query_ids: (N,) and (Q,) ids of the examples.
        normalize: None or "cosine".
        checkpoints: names of the checkpoints that were summed over.
        top_k: how many proponents, and how many opponents, were kept for each query.
        raw, cosine: the same lists in either form.
    """

    def __init__(
        self,
        lists: Lists,
        train_ids: np.ndarray,
        query_ids: np.ndarray,
        normalize: str | None,
        checkpoints: Sequence[str],
        data: tuple[Data, Data] | None,
    ):
        super().__init__(train_ids, query_ids, normalize, checkpoints, data)
        self._lists = lists
        for arrays in lists.values():
            protect(arrays)
        self.top_k = next(iter(lists.values()))[0].shape[1]

    @classmethod
    def load(cls, folder: str | Path, normalize: str | None = None) -> TopScores:
        """Return the results of ``gs.influence(top_k=k, out=folder)``.

        Args:
            folder: of the lists; neither model nor data are needed.
            normalize: None or "cosine": the form that the result shows first.

        Returns:
            TopScores: the kept proponents and opponents.

        Raises:
            ScoreError: ``normalize`` is neither None nor "cosine".
            StoreError: the folder holds something else, or incomplete lists.
        """
        check, path = check_normalize(normalize), path_of(folder)
        manifest = read_manifest_of(path, STRONGEST)
        again = "Call gs.influence with the same arguments again to"
        try:
            held = TopLists.read(path)
            ids = [np.load(path / f"{name}.npy", allow_pickle=False) for name in IDS]
            batches, sizes = int(manifest["train"]["batches"]), [len(each) for each in ids]
            for positions, _ in held.lists.values():
                if len(positions) != sizes[1] or positions.max(initial=0) >= sizes[0]:
                    raise ValueError(f"its ids are of {sizes} examples, its lists of others")
        except (*UNREADABLE, TypeError) as error:
            raise StoreError(f"{path} cannot be read: {error}. {again} repair it.") from error
        if held.next_batch < batches:
            raise StoreError(f"{path} is not complete. {again} continue.")
        return cls(held.lists, ids[0], ids[1], check, held.checkpoints, None)

    def __getitem__(self, key: Any) -> Any:
        self._refuse_matrix()

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        self._refuse_matrix()

    def _refuse_matrix(self) -> NoReturn:
        raise ScoreError(
            f"only the {self.top_k} strongest examples of each query were kept (top_k="
            f"{self.top_k}), so there is no matrix to index. Use .proponents(query) and "
            ".opponents(query), or call gs.influence without top_k."
        )

    def __repr__(self) -> str:
        return (
            f"TopScores({len(self.train_ids)} train × {len(self.query_ids)} query, "
            f"top_k={self.top_k}, normalize={self.normalize!r}, "
            f"{plural(len(self.checkpoints), 'checkpoint')})"
        )

    @property
    def _listed(self) -> int:
        return min(super()._listed, self.top_k)

    def _ranking(self, query: int, k: int, sign: int) -> Ranking:
        if k > self.top_k and self.top_k < len(self.train_ids):
            raise ScoreError(
                f"k is {k}, expected at most the {self.top_k} of each kind that were kept. For "
                f"more call gs.influence with top_k={k}."
            )
        positions, scores = (each[query][:k] for each in self._lists[self.normalize, sign])
        return Ranking(positions, self.train_ids[positions], scores)


def names_of(normalize: str | None, sign: int) -> tuple[str, str]:
    """Return the names of one kind of list's positions and scores in a file."""
    name = f"{normalize or 'raw'}_{'proponents' if sign > 0 else 'opponents'}"
    return f"{name}_positions", f"{name}_scores"
