"""Inner products of Rows factors: only rows with equal ids contribute."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradstats import _cost
from gradstats._factors import Rows, add_at, added, compute_dtype
from gradstats.contractions import _tiles, _triton, _triton_layers
from gradstats.contractions._outer_pairs import Sizes


@dataclass(frozen=True)
class Runs:
    """The rows of a factor grouped by (id, example), in ascending order of both.

    Attributes:
        ids, example: (R,) of each run.
        run: (N,) the run of each row of the factor.
        grad: (N, width) the factor's rows.
    """

    ids: Tensor
    example: Tensor
    run: Tensor
    grad: Tensor

    def sums(self, columns: slice, dtype: torch.dtype) -> Tensor:
        """Return Σ grad over each run, (R, columns)."""
        return added(self.grad[:, columns].to(dtype), self.run, self.ids.numel())


def pairs(first: Rows, second: Rows, workspace: int, sizes: Sizes) -> Tensor:
    """Return Σ_v ⟨Σ_{n: id v} grad[n], Σ_{m: id v} grad'[m]⟩ for all pairs, (B, B') float64.

    Rows of ids that most examples of both sides have are multiplied in one dense product. For other
    ids, each pair of runs with equal ids is multiplied separately.

    Cost: at most B·B'·width multiply-adds for each id that both sides have; scratch within the
    workspace.
    """
    if _triton.runs(first.grad, second.grad):
        return _triton_layers.rows_pairs(first, second)
    dtype = compute_dtype(first.grad, second.grad)
    result = _tiles.zeros([first], first.batch, second.batch)
    one, two = _runs(first), _runs(second)
    counts1 = torch.bincount(one.ids, minlength=first.shape[0])
    counts2 = torch.bincount(two.ids, minlength=first.shape[0])
    meetings = counts1 * counts2
    every = first.batch * second.batch
    dense = meetings * 2 * _cost.ELEMENT_COST > every
    common = dense.nonzero().squeeze(1)
    sparse = (~dense)[one.ids] & (counts2[one.ids] > 0)
    chosen = sparse.nonzero().squeeze(1)
    itemsize = dtype.itemsize
    width = first.grad.shape[1]
    rows = first.grad.shape[0] + second.grad.shape[0] + one.ids.numel() + two.ids.numel()
    # Columns in the outer loop, so that the sums of runs fit the workspace too.
    for columns in _tiles.chunks(width, _cost.fitting(itemsize * rows, width, workspace)):
        span = columns.stop - columns.start
        sums1, sums2 = one.sums(columns, dtype), two.sums(columns, dtype)
        step = max(1, workspace // (itemsize * span * (first.batch + second.batch)))
        for part in _tiles.chunks(common.numel(), step):
            left = _tile(one, sums1, common[part], first)
            right = _tile(two, sums2, common[part], second)
            result += left @ right.mT
        # A run of the first side has an equal id in at most one run of each example of the second.
        step = max(1, workspace // (4 * (itemsize * span + 16) * second.batch))
        for part in _tiles.chunks(chosen.numel(), step):
            i, j = _meetings(chosen[part], one.ids, counts2)
            products = (sums1[i] * sums2[j]).sum(1, dtype=torch.float64)
            place = one.example[i] * second.batch + two.example[j]
            add_at(result.view(-1), place, products)
    return result


def diagonal(first: Rows, second: Rows, workspace: int, sizes: Sizes) -> Tensor:
    """Return Σ_v ⟨Σ_{n: id v} grad[n], Σ_{m: id v} grad'[m]⟩ of each example, (B,) float64."""
    if _triton.runs(first.grad, second.grad):
        return _triton_layers.rows_diagonal(first, second)
    dtype = compute_dtype(first.grad, second.grad)
    result = _tiles.zeros([first], first.batch)
    one, two = _runs(first), _runs(second)
    if not two.ids.numel():
        return result
    keys1, keys2 = (runs.ids * first.batch + runs.example for runs in (one, two))
    place = torch.searchsorted(keys2, keys1).clamp_(max=keys2.numel() - 1)
    here = (keys2[place] == keys1).nonzero().squeeze(1)
    there = place[here]
    width = first.grad.shape[1]
    rows = first.grad.shape[0] + second.grad.shape[0] + 5 * one.ids.numel()
    for columns in _tiles.chunks(width, _cost.fitting(dtype.itemsize * rows, width, workspace)):
        products = one.sums(columns, dtype)[here] * two.sums(columns, dtype)[there]
        add_at(result, one.example[here], products.sum(1, dtype=torch.float64))
    return result


def _runs(rows: Rows) -> Runs:
    keys = rows.ids * rows.batch + rows.example
    unique, run = torch.unique(keys, return_inverse=True)
    return Runs(unique // rows.batch, unique % rows.batch, run, rows.grad)


def _meetings(chosen: Tensor, ids: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return all pairs of a chosen run of the first side and a run of the second with that id."""
    partners = counts[ids[chosen]]
    starts = counts.cumsum(0) - counts  # (rows,) the first run of each id on the second side
    here = chosen.repeat_interleave(partners)
    ends = partners.cumsum(0)
    within = torch.arange(here.numel(), device=here.device) - (ends - partners).repeat_interleave(
        partners
    )
    return here, starts[ids[here]] + within


def _tile(runs: Runs, sums: Tensor, ids: Tensor, rows: Rows) -> Tensor:
    """Return some ids' (ascending) rows of every example's gradient, (B, ids · columns)."""
    place = torch.searchsorted(ids, runs.ids).clamp_(max=ids.numel() - 1)
    inside = (ids[place] == runs.ids).nonzero().squeeze(1)
    tile = sums.new_zeros(rows.batch, ids.numel(), sums.shape[1])
    tile[runs.example[inside], place[inside]] = sums[inside]
    return tile.flatten(1)
