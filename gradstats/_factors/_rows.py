"""Rows of a table: embeddings and integer indexing."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from gradstats._factors._factor import cast, compute_dtype
from gradstats._factors._segments import added


class Lookup:
    """One look-up of a table, by ids that are known in the forward pass.

    Attributes:
        ids: (N,) the rows of the table that are read.
        example: (N,) the example that each row belongs to, ascending.
        examples: number of examples B if all read the same number of rows, else None.
    """

    def __init__(self, find: Callable[[], tuple[Tensor, Tensor]], examples: int | None = None):
        self._find = find
        self.examples = examples

    @cached_property
    def _rows(self) -> tuple[Tensor, Tensor]:
        return self._find()

    @property
    def ids(self) -> Tensor:
        return self._rows[0]

    @property
    def example(self) -> Tensor:
        return self._rows[1]

    @property
    def each(self) -> int | None:
        """Number of rows that each example reads; None if it may differ."""
        return self.ids.numel() // self.examples if self.examples else None


@dataclass(frozen=True)
class Rows:
    """G_i = Σ_n e_{ids[n]} grad[n]ᵀ over the rows n of example i: embeddings and integer indexing.

    Attributes:
        ids: (N,) the row of the parameter that each gradient row belongs to.
        grad: (N, width).
        example: (N,) example of each row, ascending.
        batch: number of examples B.
        shape: shape of the parameter, (rows, ...) with width = product of the rest.
        longest: the largest number of rows of one example; None if only ``example`` tells.
        lookup: the look-up that this is the gradient of, if the forward pass noted it.
    """

    ids: Tensor
    grad: Tensor
    example: Tensor
    batch: int
    shape: tuple[int, ...]
    longest: int | None = None
    lookup: Lookup | None = None

    granule = 1

    @property
    def each(self) -> int | None:
        """Number of rows of each example; None if it differs, or if only ``example`` tells."""
        longest = self.longest
        return longest if longest and self.batch * longest == self.ids.numel() else None

    def select(self, rows) -> Rows:
        number = torch.full((self.batch,), -1, device=self.ids.device)
        chosen = torch.arange(self.batch, device=self.ids.device)[rows]
        number[chosen] = torch.arange(chosen.numel(), device=self.ids.device)
        keep = (number[self.example] >= 0).nonzero().squeeze(1)
        ids, grad, example = self.ids[keep], self.grad[keep], number[self.example[keep]]
        found = Rows(ids, grad, example, chosen.numel(), self.shape, self.longest)
        return found.in_order() if isinstance(rows, Tensor) else found

    def in_order(self) -> Rows:
        """Return the rows sorted by example, as a factor requires."""
        example, order = self.example.sort(stable=True)
        return replace(self, ids=self.ids[order], grad=self.grad[order], example=example)

    def narrow(self, start: int, stop: int) -> Rows:
        keep = ((self.ids >= start) & (self.ids < stop)).nonzero().squeeze(1)
        shape = (stop - start, *self.shape[1:])
        return Rows(self.ids[keep] - start, self.grad[keep], self.example[keep], self.batch, shape)

    def dense(self) -> Tensor:
        place = self.example * self.shape[0] + self.ids
        values = cast(self.grad, compute_dtype(self.grad))
        gradient = added(values, place, self.batch * self.shape[0])
        return gradient.view(self.batch, *self.shape)


def embedding_rows(
    ids: Tensor, grad: Tensor, table: tuple[int, ...], padding_idx: int | None
) -> Rows:
    """Return the factor of a table for ids (B, *) and gradients (B, *, width)."""
    flat, example = rows_looked_up(ids)
    grad = grad.reshape(flat.numel(), math.prod(table[1:]))
    if padding_idx is not None:
        grad = grad.masked_fill((flat == padding_idx % table[0]).unsqueeze(1), 0)
    positions = flat.numel() // max(1, ids.shape[0])
    return Rows(flat, grad, example, ids.shape[0], table, positions)


def rows_looked_up(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows that ids (B, *) look up, and the example of each: (N,) both."""
    positions = ids.numel() // max(1, ids.shape[0])
    example = torch.arange(ids.shape[0], device=ids.device).repeat_interleave(positions)
    return ids.reshape(-1).long(), example
