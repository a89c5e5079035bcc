"""Examples that differ in their number of rows, and sums over their rows."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor


class Segments:
    """Which example each row of an axis belongs to, where examples differ in their number of rows.

    All else is computed on first use: the order of a graph's edges, for example, may never be.

    Attributes:
        owner: (rows,) int64, the example of each row.
        batch: number of examples B.
    """

    def __init__(self, owner: Tensor, batch: int):
        self.owner, self.batch = owner, batch
        self._copies: dict[torch.device, Segments] = {}

    def on(self, device: torch.device) -> Segments:
        """Return the same with its tensors on another device, one copy for each."""
        if device not in self._copies:
            self._copies[device] = Segments(self.owner.to(device), self.batch)
        return self._copies[device]

    @cached_property
    def rows(self) -> int:
        return len(self.owner)

    @cached_property
    def counts(self) -> Tensor:
        """How many rows each example has: (B,) int64."""
        return torch.bincount(self.owner, minlength=self.batch)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each example's rows begin and end, once sorted by example: (B + 1,)."""
        return (0, *self.counts.cumsum(0).tolist())

    @cached_property
    def order(self) -> Tensor | None:
        """The rows sorted by example, (rows,); None if they are in that order already."""
        ascending = bool((self.owner[1:] >= self.owner[:-1]).all())
        return None if ascending else torch.argsort(self.owner, stable=True)

    @cached_property
    def most(self) -> int:
        """The largest number of rows that an example has."""
        return max(end - start for start, end in pairwise(self.offsets))

    @cached_property
    def sole(self) -> int | None:
        """The example that has all the rows; None if several examples have rows, or none has."""
        # No loop over examples: a model that is called for each example has as many segments.
        first = bisect_right(self.offsets, 0) - 1
        has_all = 0 < self.offsets[-1] == self.offsets[first + 1]
        return first if has_all else None

    def offsets_of(self, rows: int) -> tuple[int, ...]:
        """Return ``offsets`` in ``rows`` rows, if each row of the axis stands for several."""
        each = rows // max(1, self.rows)
        if each == 1:
            return self.offsets
        return tuple(each * bound for bound in self.offsets)

    def sorted(self, tensor: Tensor) -> Tensor:
        """Return (rows, *) in the order of the examples."""
        return tensor if self.order is None else tensor.index_select(0, self.order)

    def padded(self, tensor: Tensor) -> Tensor:
        """Return (rows, *) as (B, most, *), padded by zeros."""
        return padded(self.sorted(tensor), *padding_index(self.offsets))

    def sum(self, tensor: Tensor) -> Tensor:
        """Return Σ over each example's rows of (rows, *): (B, *); no rows give zero."""
        return segment_sum(self.sorted(tensor), self.counts)


def padding_index(
    offsets: tuple[int, ...], examples: Sequence[int] | None = None
) -> tuple[Tensor, Tensor]:
    """Return the index that pads examples' rows to one length.

    Args:
        offsets: (B + 1,) where each example's rows begin and end.
        examples: which examples; None for all.

    Returns:
        The rows to take, (n, longest), and the flat indices among these of padding.
    """
    bounds = torch.tensor(offsets)
    starts, ends = bounds[:-1], bounds[1:]
    if examples is not None:
        starts, ends = starts[examples], ends[examples]
    place = torch.arange(max([1, *(ends - starts).tolist()]))
    index = starts.unsqueeze(1) + place
    missing = index >= ends.unsqueeze(1)
    return index.masked_fill_(missing, 0), missing.flatten().nonzero().squeeze(1)


def padded(rows: Tensor, index: Tensor, missing: Tensor) -> Tensor:
    """Return (n, *), sorted by example, as (B, longest, *), zeros for the ``missing`` rows."""
    if not len(rows):
        return rows.new_zeros(*index.shape, *rows.shape[1:])
    # Three to five times as fast as indexing by (B, longest) and filling by a mask.
    found = rows.index_select(0, index.flatten().to(rows.device))
    found.index_fill_(0, missing.to(rows.device), 0)
    return found.view(*index.shape, *rows.shape[1:])


def segment_sum(values: Tensor, counts: Tensor) -> Tensor:
    """Return the sums over consecutive rows of (rows, *), ``counts`` (n,) of them each: (n, *)."""
    if values.is_cpu:  # segment_reduce takes 5 to 10 times as long there
        index = torch.arange(len(counts)).repeat_interleave(counts, output_size=len(values))
        return added(values, index, len(counts))
    return torch.segment_reduce(values, "sum", lengths=counts, axis=0, unsafe=True, initial=0)


def added(values: Tensor, index: Tensor, size: int) -> Tensor:
    """Return the sums of the rows of (n, *) that have the same index: (size, *).

    The same bits in every run: an embedding's backward adds in a fixed order, unlike ``index_add_``
    on CUDA, which adds atomically.
    """
    if values.is_cpu:
        return values.new_zeros(size, *values.shape[1:]).index_add_(0, index, values)
    rows = values.unsqueeze(1) if values.dim() == 1 else values.flatten(1)
    result = torch.ops.aten.embedding_dense_backward(rows, index, size, -1, False)
    return result.view(size, *values.shape[1:])


def add_at(result: Tensor, index: Tensor, values: Tensor) -> None:
    """Add the rows of (n, *) to those of ``result`` at an index; the same bits in every run."""
    if result.is_cpu:
        result.index_add_(0, index, values)
    else:
        result += added(values, index, len(result))
