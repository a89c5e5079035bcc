"""Train × query products: query gradients are kept in blocks, and train batches stream by."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from gradstats.scoring import _ranks
from gradstats.scoring._batches import to_device
from gradstats.scoring._checkpoints import Checkpoint
from gradstats.scoring._loaders import Data
from gradstats.scoring._memory import Halving
from gradstats.scoring._rates import as_numpy, weighed
from gradstats.scoring._weights import load_weights
from gradstats.scoring._work import Work, amount, duration, plural
from gradstats.statistics._arguments import shapes_of
from gradstats.statistics._kept import KeptGradients, Products, keep, products

Tile = dict[str, np.ndarray]


@dataclass(frozen=True)
class KeptBatch:
    """The kept gradients of one query batch, in several parts if it did not fit at once."""

    number: int
    parts: list[KeptGradients]

    @property
    def nbytes(self) -> int:
        """Bytes of the kept gradients."""
        return sum(part.nbytes for part in self.parts)

    def release(self) -> None:
        """Free the factors: variables still refer to this batch while the next block is kept."""
        for part in self.parts:
            part.parameters.clear()

    @property
    def sqnorm(self) -> np.ndarray:
        """(B,) squared norms."""
        return np.concatenate([as_numpy(part.sqnorm) for part in self.parts])


class Stream:
    """Computes tiles of one call, checkpoint by checkpoint.

    Attributes:
        train, query: the data of the two sides.
        budget: bytes of query gradients that are kept at once, at least one query batch.
    """

    # Set by ``move_to``.
    _train_at: Checkpoint
    _query_at: Checkpoint

    def __init__(self, work: Work, train: Data, query: Data, budget: int):
        self._work = work
        self.train, self.query, self.budget = train, query, budget
        self._keeping = Halving("query examples", work.layout)
        self._passing = Halving("training examples", work.layout)
        self._loaded: Checkpoint | None = None

    def move_to(self, train: Checkpoint, query: Checkpoint) -> None:
        """Set the checkpoints of both sides, and give the model the train side's."""
        self._train_at, self._query_at = train, query
        self._use(train)

    def fill(self, pending: np.ndarray, write: Callable[[int, int, Tile], None], bar: tqdm) -> None:
        """Compute this process's share of the pending tiles.

        Args:
            pending: (train batches, query batches) bool.
            write: takes the row and column of a tile, its products, and the squared norms of its
                examples.
        """
        if not _ranks.share(np.flatnonzero(pending.any(1)).tolist()):
            return
        for block in self._blocks(np.flatnonzero(pending.any(0)).tolist()):
            self._fill_rows(block, pending, write, bar)
            for kept in block:
                kept.release()

    def _fill_rows(
        self,
        block: Sequence[KeptBatch],
        pending: np.ndarray,
        write: Callable[[int, int, Tile], None],
        bar: tqdm,
    ) -> None:
        """Compute the pending tiles of the kept query batches."""
        rows = np.flatnonzero(pending[:, [kept.number for kept in block]].any(1)).tolist()
        for row, batch in self.train.read(_ranks.share(rows)):
            for kept, tile in zip(block, self._pass(block, row, batch), strict=True):
                if pending[row, kept.number]:
                    write(row, kept.number, tile)
                    bar.update(min(_ranks.size(), bar.total - bar.n))

    def estimate(self, pending: np.ndarray, checkpoints: int) -> str:
        """Return the memory and time that all tiles will take, as text, from a trial of one.

        Args:
            pending: (train batches, query batches) bool, the tiles of the first checkpoint.
            checkpoints: how many there are; all tiles of the others are taken to be pending.
        """
        row, column = map(int, np.argwhere(pending)[0])
        ((_, query),) = self.query.read([column])
        ((_, train),) = self.train.read([row])
        start = time.perf_counter()
        self._use(self._query_at)
        kept = self._keep(column, query)
        middle = time.perf_counter()
        self._pass([kept], row, train)
        end = time.perf_counter()
        query_bytes = kept.nbytes / self.query.sizes[column] * self.query.examples
        # The training data are read once for each block of queries.
        blocks = min(self.query.batches, math.ceil(query_bytes / self.budget))
        # Passing a train batch takes a forward and backward, as keeping a query batch does, and the
        # products with the kept queries.
        keeping = (middle - start) / self.query.sizes[column]
        each = (end - middle) / self.train.sizes[row]
        passing = min(each, keeping)
        product = max(0.0, each - keeping) / self.query.sizes[column]
        examples = float(self.train.sizes[pending.any(1)].sum())
        examples += (checkpoints - 1) * self.train.examples
        seconds = (passing * blocks + product * self.query.examples) * examples / _ranks.size()
        seconds += checkpoints * keeping * self.query.examples
        held = f"query gradients take {amount(query_bytes)}"
        if blocks > 1:
            at_once = min(query_bytes, max(self.budget, kept.nbytes))
            held += f", {amount(at_once)} at once in {plural(blocks, 'block')}"
        return f"{held}; about {duration(seconds)}"

    def _blocks(self, numbers: Sequence[int]) -> Iterator[list[KeptBatch]]:
        """Yield kept query batches, as many at once as the budget holds."""
        block: list[KeptBatch] = []
        held, each = 0, 0.0
        for number, batch in self.query.read(numbers):
            size = int(self.query.sizes[number])
            if block and held + each * size > self.budget:
                yield block
                block, held = [], 0
            self._use(self._query_at)
            block.append(self._keep(number, batch))
            held += block[-1].nbytes
            each = block[-1].nbytes / size
        yield block

    def _keep(self, number: int, batch: Any) -> KeptBatch:
        work = self._work

        def part(batch: Any) -> KeptGradients:
            options = work.options_of(batch)

            def measure() -> KeptGradients:
                return keep(work.model, batch, work.losses, nonfinite="keep", **options)

            def zeros(losses: Tensor) -> KeptGradients:
                return KeptGradients(_zeros(losses), shapes_of(work.model, options), {})

            return work.usage.measured("query", measure, zeros)

        batch = to_device(batch, work.device)
        size = int(self.query.sizes[number])
        kept = KeptBatch(number, self._keeping.run(part, batch, size))
        ids = self.query.ids[self.query.spans[number]]
        work.check_finite(kept.sqnorm, ids, self._query_at.name, "query")
        return kept

    def _pass(self, block: Sequence[KeptBatch], row: int, batch: Any) -> list[Tile]:
        """Return a train batch's tile with each of the kept query batches, from one backward."""
        work = self._work
        rates = self._train_at.rates
        assert rates is not None
        self._use(self._train_at)
        kept = [part for each in block for part in each.parts]
        per_parameter = isinstance(rates, dict)

        def part(batch: Any) -> list[Products]:
            def measure() -> list[Products]:
                return products(
                    kept, work.model, batch, work.losses,
                    nonfinite="keep", per_parameter=per_parameter, **work.options_of(batch),
                )  # fmt: skip

            def zeros(losses: Tensor) -> list[Products]:
                sqnorm = _zeros(losses)
                values = [sqnorm.expand(len(each), -1) for each in kept]
                return [Products(v, sqnorm, dict.fromkeys(work.names, v)) for v in values]

            return work.usage.measured("training", measure, zeros)

        batch = to_device(batch, work.device)
        parts = self._passing.run(part, batch, int(self.train.sizes[row]))
        sqnorm = np.concatenate([as_numpy(found[0].sqnorm) for found in parts])
        ids = self.train.ids[self.train.spans[row]]
        work.check_finite(sqnorm, ids, self._train_at.name, "training")
        rows = work.narrowed(
            np.concatenate(
                [
                    np.concatenate([weighed(rates, p.values, p.by_parameter) for p in found]).T
                    for found in parts
                ]
            ),
            self._train_at.name,
        )
        ends = np.cumsum([len(each.sqnorm) for each in block])
        return [
            {"products": values, "train_sqnorm": sqnorm, "query_sqnorm": each.sqnorm}
            for each, values in zip(block, np.split(rows, ends[:-1], axis=1), strict=True)
        ]

    def _use(self, checkpoint: Checkpoint) -> None:
        """Give the model a checkpoint's weights unless it has them."""
        if checkpoint is not self._loaded:
            load_weights(self._work.model, checkpoint, self._work.renewal)
            self._loaded = checkpoint


def _zeros(losses: Tensor) -> Tensor:
    return torch.zeros_like(losses, dtype=torch.float64)
