"""The strongest training examples of every query, without the matrix.

A score is a sum over checkpoints, so its rank is known once all have been added: rows go through
all checkpoints in chunks that fit the budget.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from gradstats.scoring import _ranks
from gradstats.scoring._folder import write_whole
from gradstats.scoring._rankings import strongest
from gradstats.scoring._scores import NORMALIZATIONS, list_name
from gradstats.scoring._stream import Tile, cosine_of
from gradstats.scoring._tiles import DAMAGED

STATE = "top.npz"
KINDS = [(normalize, sign) for normalize in NORMALIZATIONS for sign in (1, -1)]

Lists = dict[str, tuple[np.ndarray, np.ndarray]]


class TopLists:
    """The lists so far.

    Attributes:
        lists: kind → (Q, k) positions and scores, the strongest first.
        next_batch: the first train batch that has not been counted.
    """

    def __init__(self, queries: int, k: int):
        self._k = k
        self.lists: Lists = {
            list_name(*kind): (np.zeros((queries, 0), np.int64), np.zeros((queries, 0)))
            for kind in KINDS
        }
        self.next_batch = 0

    def add(self, lists: Lists) -> None:
        """Merge other lists into these."""
        for normalize, sign in KINDS:
            name = list_name(normalize, sign)
            positions, scores = (
                np.concatenate([own, new], axis=1)
                for own, new in zip(self.lists[name], lists[name], strict=True)
            )
            kept = np.stack(
                [
                    strongest(row, places, self._k, sign)
                    for row, places in zip(scores, positions, strict=True)
                ]
            )
            self.lists[name] = (
                np.take_along_axis(positions, kept, 1), np.take_along_axis(scores, kept, 1),
            )  # fmt: skip

    def save(self, folder: Path) -> None:
        """Write the lists so that a kill leaves these or the ones before."""
        arrays: dict[str, Any] = {"next_batch": np.array(self.next_batch)}
        for name, (positions, scores) in self.lists.items():
            arrays[f"{name}_positions"], arrays[f"{name}_scores"] = positions, scores
        write_whole(folder / STATE, lambda file: np.savez(file, **arrays))

    def restore(self, folder: Path) -> str | None:
        """Go on with the lists of a folder; return what is wrong with them, if anything."""
        if not (folder / STATE).exists():
            return None
        try:
            with (folder / STATE).open("rb") as file, np.load(file, allow_pickle=False) as held:
                lists = {
                    name: (held[f"{name}_positions"], held[f"{name}_scores"]) for name in self.lists
                }
                next_batch = int(held["next_batch"])
            for name, (positions, scores) in lists.items():
                own = len(self.lists[name][0]), min([self._k, *positions.shape[-1:]])
                if not positions.shape == scores.shape == own:
                    raise ValueError(f"{name} has shape {scores.shape}, expected {own}")
        except (OSError, KeyError, RuntimeError, zipfile.BadZipFile, *DAMAGED) as error:
            return f"{folder / STATE} is damaged ({error})"
        self.lists, self.next_batch = lists, next_batch
        return None


class Chunk:
    """Scores of some rows, while checkpoints are added up."""

    def __init__(
        self, rows: slice, queries: int, row_spans: list[slice], column_spans: list[slice]
    ):
        self._start = rows.start
        self._spans = row_spans, column_spans
        self._held = np.zeros(rows.stop - rows.start, dtype=bool)
        self._scores: dict[str | None, np.ndarray] = {
            normalize: np.zeros((rows.stop - rows.start, queries), order="F")
            for normalize in NORMALIZATIONS
        }

    def write(self, row: int, column: int, tile: Tile) -> None:
        """Add one tile of one checkpoint."""
        span, columns = self._spans[0][row], self._spans[1][column]
        rows = slice(span.start - self._start, span.stop - self._start)
        self._scores[None][rows, columns] += tile["products"]
        self._scores["cosine"][rows, columns] += cosine_of(tile)
        self._held[rows] = True

    @property
    def nbytes(self) -> int:
        """Bytes of both forms."""
        return sum(scores.nbytes for scores in self._scores.values())

    def scores(self) -> dict[str | None, np.ndarray]:
        """Return both forms, with the rows of all processes."""
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
            found[list_name(normalize, sign)] = (
                rows[kept] + self._start, np.take_along_axis(columns, kept, 1),
            )  # fmt: skip
        return found


def chunks(sizes: np.ndarray, queries: int, budget: int, start: int) -> Iterator[range]:
    """Yield ranges of train batches whose two score matrices fit the budget; one batch at least."""
    first, rows = start, 0
    for number in range(start, len(sizes)):
        if number > first and (rows + sizes[number]) * queries * 16 > budget:
            yield range(first, number)
            first, rows = number, 0
        rows += int(sizes[number])
    if first < len(sizes):
        yield range(first, len(sizes))
