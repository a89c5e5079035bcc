"""Outer products of packed examples and of experts, whose rows differ in number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from gradstats._factors._factor import selected
from gradstats._factors._outer import Outer
from gradstats._factors._segments import padded, padding_index


@dataclass(frozen=True)
class Ragged:
    """G_i = Σ_t left_t right_tᵀ over the rows t of example i: products of packed examples.

    Attributes:
        left, right: (rows, p) and (rows, q), sorted by example.
        offsets: (B + 1,) where each example's rows begin and end.
        shape: of the parameter, (p, q), or (p, …) with q elements in each of the p rows.
    """

    left: Tensor
    right: Tensor
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    granule = 1
    spans_rows = True  # as in Outer

    @property
    def batch(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> list[int]:
        return [end - start for start, end in pairwise(self.offsets)]

    @cached_property
    def longest(self) -> int:
        """The largest number of rows of an example, at least one."""
        return max([1, *self.lengths])

    def select(self, rows) -> Ragged:
        chosen = selected(rows, self.batch)
        bounds = torch.tensor(self.offsets)
        lengths = bounds.diff()[chosen]
        offsets = (0, *lengths.cumsum(0).tolist())
        place = torch.arange(offsets[-1])
        index = place + (bounds[chosen] - torch.tensor(offsets[:-1])).repeat_interleave(lengths)
        index = index.to(self.left.device)
        return Ragged(self.left[index], self.right[index], offsets, self.shape)

    def dense(self) -> Tensor:
        return self.padded().dense()

    def narrow(self, start: int, stop: int) -> Ragged:
        shape = (stop - start, *self.shape[1:])
        return replace(self, left=self.left[:, start:stop], shape=shape)

    def padded(self, examples: Sequence[int] | None = None) -> Outer:
        """Return the same with zeros added to each example's rows, up to the largest number.

        Args:
            examples: which examples; None for all.
        """
        if examples is not None and len(examples) == 1:
            start, end = self.offsets[examples[0] : examples[0] + 2]
            left, right = (side[None, None, start:end] for side in (self.left, self.right))
            return Outer(left, right, self.shape)
        index, missing = padding_index(self.offsets, examples)
        left, right = (
            padded(side, index, missing).unsqueeze(1) for side in (self.left, self.right)
        )
        return Outer(left, right, self.shape)

    def transposed(self) -> Ragged:
        """Return the factor of the transpose of a two-dimensional parameter."""
        return Ragged(self.right, self.left, self.offsets, (self.shape[1], self.shape[0]))


@dataclass(frozen=True)
class Experts:
    """G_i[e] = Σ_t left_t right_tᵀ over the rows t of example i that expert e takes.

    Attributes:
        pairs: the products of each expert with each example's rows, E·B of them, expert by expert.
        batch: number of examples B.
        shape: of the parameter, (E, p, q).
    """

    pairs: Ragged
    batch: int
    shape: tuple[int, ...]

    granule = 1

    @property
    def busy(self) -> list[int]:
        """The experts that take any rows."""
        bounds = self.pairs.offsets[:: self.batch]
        return [number for number, (a, b) in enumerate(pairwise(bounds)) if b > a]

    def of_expert(self, number: int) -> Ragged:
        """Return the factor of one expert's slice."""
        first = number * self.batch
        offsets = self.pairs.offsets[first : first + self.batch + 1]
        rows = slice(offsets[0], offsets[-1])
        relative = tuple(offset - offsets[0] for offset in offsets)
        return Ragged(self.pairs.left[rows], self.pairs.right[rows], relative, self.shape[1:])

    def select(self, rows) -> Experts:
        chosen = selected(rows, self.batch)
        experts = torch.arange(self.shape[0]).unsqueeze(1) * self.batch
        return Experts(self.pairs.select((experts + chosen).flatten()), len(chosen), self.shape)

    def dense(self) -> Tensor:
        return self.pairs.dense().unflatten(0, (-1, self.batch)).transpose(0, 1)

    def narrow(self, start: int, stop: int) -> Experts:
        pairs = self.pairs.select(slice(start * self.batch, stop * self.batch))
        return Experts(pairs, self.batch, (stop - start, *self.shape[1:]))

    def transposed(self) -> Experts:
        """Return the factor of the parameter with its last two axes exchanged."""
        experts, p, q = self.shape
        return Experts(self.pairs.transposed(), self.batch, (experts, q, p))
