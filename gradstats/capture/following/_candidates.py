"""Where the examples may lie in a tensor that holds nothing of them yet."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gradstats.capture.following._examples import Examples, Whole
from gradstats.capture.following._marks import Marks


def candidates(marks: Marks, target: Tensor, owned: Examples | Whole) -> Iterator[Examples]:
    """Yield the possible layouts of a tensor that held nothing of any example before a write.

    Args:
        target: the tensor.
        owned: whose the value is that is written into it.
    """
    contract, axes = marks.contract, range(target.dim())
    for layout in (contract, owned):
        if isinstance(layout, Examples):
            yield from (layout.along(a) for a in axes if target.shape[a] == layout.rows)
    if contract.batch:
        # Packed examples may get one row each, as pooled graphs do.
        fewest = 2 if contract.segments is None else 1
        yield from _several(target, Examples(contract.batch, 0), fewest)
    if contract.segments is not None and contract.rows:
        # Or several for each of their rows, as the nodes of graphs have for their neighbours.
        yield from _several(target, contract, 2)


def _several(target: Tensor, each: Examples, fewest: int) -> Iterator[Examples]:
    """Yield the layouts with equally many rows, ``fewest`` or more, for each row of ``each``."""
    for axis in range(target.dim()):
        count, rest = divmod(target.shape[axis], each.rows)
        if count < fewest or rest > 1:
            continue
        if each.plain and not rest:
            yield Examples(each.batch, axis, count)
            continue
        owner = each.owner(target.device).repeat_interleave(count)
        # A last one may take what overflows.
        yield each.owned_by(torch.cat([owner, owner[-1:]]) if rest else owner, axis)
