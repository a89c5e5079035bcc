"""The passes over the data that one call of gs.influence makes, checkpoint after checkpoint."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import numpy as np
from tqdm import tqdm

from gradstats.errors import NonFiniteGradientError
from gradstats.scoring import _ranks
from gradstats.scoring._checkpoints import Checkpoint, WeightsOnly
from gradstats.scoring._folder import STRONGEST, Folder
from gradstats.scoring._loaders import Data
from gradstats.scoring._recognition import Recognition
from gradstats.scoring._scores import IDS, PARTS, Partial
from gradstats.scoring._stream import Stream
from gradstats.scoring._tiles import Array, Tiling
from gradstats.scoring._top import Chunk, Lists, TopLists, chunks
from gradstats.scoring._work import Work, amount, open_folder, open_tiles, plural


class Passes:
    """Computes what one call of gs.influence returns: a matrix in memory or on disk, or lists.

    Args:
        work: the model, its checkpoints and the options.
        queries: the query side's checkpoints; None if they are the train side's.
        train, query: the data of the two sides.
        budget: bytes of query gradients kept at once, and of scores where lists are made of them.
    """

    def __init__(
        self, work: Work, queries: WeightsOnly | None, train: Data, query: Data, budget: int
    ):
        self._work, self._queries, self._train, self._query = work, queries, train, query
        self._count = len(work.checkpoints)
        self._budget = budget
        self._stream = Stream(work, train, query, budget)
        self._recognition = Recognition(work, train)

    def matrix(self) -> dict[str | None, np.ndarray] | list[Partial]:
        """Compute the whole matrix; return both its forms, or its parts on disk."""
        return self._in_memory() if self._work.out is None else self._on_disk()

    def lists(self, k: int) -> Lists:
        """Compute the lists of the strongest examples without the matrix."""
        circumstances = self._work.circumstances()
        lists = TopLists.empty(self._query.examples, self._work.checkpoints.names, circumstances)
        # Identified before the chunks, each of which goes through all checkpoints.
        entries = {}
        for number in range(self._count):
            pair = _ranks.together(self._move_to, number)
            entries[str(number)] = self._recognition.entry(*pair)
            del entries[str(number)]["name"]
        if self._work.out is not None:
            description = self._description(STRONGEST)
            description["top_k"] = k
            description["summed"] = entries
            folder = open_folder(self._work, description, self._ids())
            lists, problem = _ranks.on_first(self._resumed, lists, folder, k)
            if problem is not None:
                self._work.say(f"{problem}: computing it again")
        first = lists.next_batch
        if first:
            self._work.usage.note_used("training", "query")
        left = list(chunks(self._train.sizes, self._query.examples, self._budget, first))

        def compute(part: range) -> tuple[Lists, bool]:
            rows = slice(self._train.spans[part[0]].start, self._train.spans[part[-1]].stop)
            chunk = Chunk(rows, self._query.examples, *self._spans)
            pending = self._tiles_of(slice(part.start, part.stop))
            for number in range(self._count):
                self._recognition.check_same(*self._move_to(number), entries[str(number)])
                if part.start == first and number == 0:
                    size = self._query.examples * min(k, self._train.examples) * 64
                    self._announce(self._tiles_of(slice(first, None)), size, "for the lists")
                self._stream.fill(pending, chunk.write, bar)
            return chunk.lists(k), chunk.finite

        with self._bar() as bar:
            bar.update(self._count * first * self._query.batches)
            for part in left:
                for found, finite in _ranks.gather(_ranks.together(compute, part)):
                    lists.add(found, k)
                    lists.finite = lists.finite and finite
                lists.next_batch = part.stop
                if self._work.out is not None:
                    _ranks.on_first(lists.save, self._work.out, k)
        return lists.lists

    def _resumed(self, lists: TopLists, folder: Folder, k: int) -> tuple[TopLists, str | None]:
        """Return the lists to continue with, and what is wrong with those of a folder."""
        held, problem = lists.resumed(folder.path, k)
        if self._work.nonfinite == "raise" and not held.finite:
            raise NonFiniteGradientError(
                f"{folder.path} holds lists of scores, some of them from gradients that are not "
                'finite. Name another folder with out=, or pass nonfinite="keep".'
            )
        if held.next_batch < self._train.batches:
            folder.check_circumstances(held.circumstances, lists.circumstances, "this call")
        return held, problem

    def _tiles_of(self, batches: slice) -> np.ndarray:
        """Return (train batches, query batches) bool: True for all tiles of some train batches."""
        chosen = np.zeros((self._train.batches, self._query.batches), dtype=bool)
        chosen[batches] = True
        return chosen

    def _in_memory(self) -> dict[str | None, np.ndarray]:
        """Return both forms of the whole matrix, each checkpoint added in place."""
        sums = Chunk(slice(0, self._train.examples), self._query.examples, *self._spans)
        everything = self._tiles_of(slice(None))
        with self._bar() as bar:
            for number in range(self._count):
                pair = _ranks.together(self._move_to, number)
                self._recognition.entry(*pair)
                if number == 0:
                    _ranks.together(self._announce, everything, sums.nbytes, "in memory")
                _ranks.together(self._stream.fill, everything, sums.write, bar)
        return sums.scores()

    def _on_disk(self) -> list[Partial]:
        """Compute the tiles that are missing on disk, and return all checkpoints' parts."""
        folder = open_folder(self._work, self._description("influence"), self._ids())
        arrays = {
            "products": Array(("row", "column"), self._work.dtype),
            "train_sqnorm": Array(("row",), np.dtype(np.float64)),
            "query_sqnorm": Array(("column",), np.dtype(np.float64)),
        }
        tiling = Tiling(arrays, *self._spans)
        parts: list[Partial] = []
        with self._bar() as bar:
            for number in range(self._count):
                train, query = _ranks.together(self._move_to, number)
                entry = self._recognition.entry(train, query)
                tiles, done = open_tiles(folder, tiling, entry, self._work)
                if done.any():
                    self._work.usage.note_used("training", "query")
                with closing(tiles):
                    norms = tiles.view("train_sqnorm"), tiles.view("query_sqnorm")
                    check = self._work.check_held
                    check(norms[0], done.any(1), self._train, train.name, "training")
                    check(norms[1], done.any(0), self._query, query.name, "query")
                    if number == 0:
                        size = tiling.nbytes * self._count
                        _ranks.together(self._announce, ~done, size, f"in {folder.path}")
                    bar.update(int(done.sum()))
                    _ranks.together(self._stream.fill, ~done, tiles.write, bar)
                parts.append(Partial(*map(tiles.view, PARTS)))
        return parts

    def _move_to(self, number: int) -> tuple[Checkpoint, Checkpoint]:
        """Load the checkpoints of the train and query sides, and give the model the train side's.

        Without query checkpoints, both are the same object.
        """
        work, queries = self._work, self._queries
        train = work.checkpoints.load(number, work.model, work.names)
        query = train if queries is None else queries.load(number, work.model)
        self._stream.move_to(train, query)
        return train, query

    @property
    def _spans(self) -> tuple[list[slice], list[slice]]:
        """The rows of each train batch, and the columns of each query batch."""
        return self._train.spans, self._query.spans

    def _bar(self) -> tqdm:
        tiles = self._train.batches * self._query.batches
        return self._work.bar(self._count * tiles, "influence")

    def _ids(self) -> dict[str, np.ndarray]:
        return dict(zip(IDS, (self._train.ids, self._query.ids), strict=True))

    def _description(self, kind: str) -> dict[str, Any]:
        return {
            "kind": kind,
            "settings": self._work.description(),
            "train": self._train.description(),
            "query": self._query.description(),
            "query_checkpoints": self._queries is not None,
        }

    def _announce(self, pending: np.ndarray, stored: int, where: str) -> None:
        """Print an estimate of size, memory and time, from a trial of one tile."""
        work, count = self._work, self._count
        if not work.reports:
            return
        expected = "the first checkpoint is already there"
        if pending.any():
            expected = self._stream.estimate(pending, count)
        work.say(
            f"influence of {plural(self._train.examples, 'training example')} on "
            f"{plural(self._query.examples, 'query example')} at {plural(count, 'checkpoint')}\n"
            f"  {amount(stored)} {where}; {expected}"
        )
