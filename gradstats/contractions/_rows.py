"""Rows factors: gradients of embeddings, in which positions with equal ids are added."""

from __future__ import annotations

import torch
from torch import Tensor

from gradstats import _cost
from gradstats._compiler import is_compiling
from gradstats._factors import Rows, add_at, added, cast, compute_dtype
from gradstats.contractions import _triton, _triton_layers
from gradstats.contractions._result import (
    Contraction,
    WellConditioned,
    squared_norms,
)
from gradstats.contractions._rounding import row_norms
from gradstats.contractions._tiles import chunks, zeros

# Rows of an example up to which comparing all pairs is faster than sorting.
FEW = 32
# Bytes of scratch for comparing pairs.
SCRATCH = 8 * 1024 * 1024
# Bytes of rows that are summed at once.
BLOCK = 512 * 1024


def sqnorm(factor: Rows, workspace: int) -> Contraction:
    """Return Σ_v ‖Σ_{n: ids[n] = v} grad[n]‖² over the rows of each example.

    Rows are sorted by (example, id). Runs of equal keys are summed, squared and added up for their
    example, on a CPU a few examples at a time; on other devices and in graphs all at once, so that
    all shapes are known beforehand. Nothing of the parameter's size is formed.

    Cost: a sort of N keys and two passes over (N, width); scratch of the rows of a few examples,
    within the workspace.
    """
    if _triton.runs(factor.grad):
        return _triton_layers.rows_sqnorm(factor)
    dtype = compute_dtype(factor.grad)
    count, width = factor.grad.shape
    value = factor.grad.new_zeros(factor.batch, dtype=torch.float64)
    if count == 0:
        return Contraction(value, value.clone())
    keys = factor.example * factor.shape[0] + factor.ids
    if not is_compiling() and bool((keys[1:] > keys[:-1]).all()):
        # Each row is a run of its own, as for position embeddings.
        add_at(value, factor.example, squared_norms(factor.grad, dtype))
        return WellConditioned(dtype, value=value)
    run, run_example, place = _runs(keys, factor.example)
    del keys
    bounds, runs = [0, count], [0, count]
    if factor.grad.device.type == "cpu" and not is_compiling():
        # Whole examples, with no more rows than fit the cache unless a single example has more.
        rows = _cost.fitting(width * dtype.itemsize, count, BLOCK)
        cuts = torch.searchsorted(factor.example, factor.example[::rows].contiguous()).unique()
        bounds = [*cuts.tolist(), count]
        runs = [*run[cuts].tolist(), int(run[-1]) + 1]
    for begin, end, low, high in zip(bounds, bounds[1:], runs, runs[1:], strict=False):
        columns = _cost.fitting(2 * (end - begin) * dtype.itemsize, width, workspace)
        for start in range(0, width, columns):
            part = cast(factor.grad[begin:end, start : start + columns], dtype)
            sums = added(part, place[begin:end] - low, high - low)
            add_at(value, run_example[low:high], squared_norms(sums, dtype))
    return WellConditioned(dtype, value=value)


def _runs(keys: Tensor, example: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Number the runs of equal keys.

    Args:
        keys, example: (N,) of each row.

    Returns:
        Each (N,): the run of each row once sorted by key; the example of each run; and the run of
        each row in the given order.
    """
    keys, order = torch.sort(keys, stable=True)
    run = torch.cat([keys.new_zeros(1), (keys[1:] != keys[:-1]).cumsum(0)])
    # Rows are in order of their examples, and sorting by key keeps that order.
    run_example = torch.zeros_like(run).scatter(0, run, example)
    return run, run_example, torch.zeros_like(run).scatter(0, order, run)


def sqnorm_of_few(ids: Tensor, grad: Tensor) -> Contraction:
    """Return Σ_v ‖Σ_{t: ids[i,t] = v} grad[i,t]‖² for examples with few rows each.

    With s_t the sum over the n_t positions that have the id of position t: Σ_t ‖s_t‖² / n_t.

    Args:
        ids: (B, T).
        grad: (B, T, width).

    Cost: T multiplications per element of the gradient instead of sorting, which is faster up to
    ``FEW`` positions. Scratch within ``SCRATCH``.
    """
    dtype = compute_dtype(grad)
    _, positions, width = grad.shape
    if positions == 1:
        return WellConditioned(dtype, (row_norms(grad.squeeze(1), dtype),))
    chunk = max(1, SCRATCH // (positions * (positions + 2 * width) * dtype.itemsize))
    if chunk >= len(ids):
        return WellConditioned(dtype, value=_sums_of_equals(ids, grad, dtype))
    pieces = zip(ids.split(chunk), grad.split(chunk), strict=True)
    sums = [_sums_of_equals(*each, dtype) for each in pieces]
    return WellConditioned(dtype, value=torch.cat(sums))


def _sums_of_equals(ids: Tensor, grad: Tensor, dtype: torch.dtype) -> Tensor:
    """Return Σ_t ‖s_t‖² / n_t of ids (n, T) and gradients (n, T, width), (n,) float64."""
    equal = (ids.unsqueeze(1) == ids.unsqueeze(2)).to(dtype)
    norms = row_norms(torch.bmm(equal, cast(grad, dtype)), dtype).double()
    return norms.square_().div_(equal.sum(2)).sum(1)


def direction(factor: Rows, direction: Tensor, workspace: int) -> Tensor:
    """Return ⟨G_i, V⟩, from the rows of V that an example looks up."""
    dtype = compute_dtype(factor.grad, direction)
    count, width = factor.grad.shape
    table = direction.reshape(factor.shape[0], width)
    if _triton.runs(factor.grad):
        return _triton_layers.rows_direction(factor, table)
    result = zeros([factor], factor.batch)
    for here in chunks(count, _cost.fitting(3 * width * dtype.itemsize, count, workspace)):
        products = table[factor.ids[here]].to(dtype) * factor.grad[here].to(dtype)
        add_at(result, factor.example[here], products.sum(1, dtype=torch.float64))
    return result


def total(factor: Rows) -> Tensor:
    """Return Σ_i G_i in the accumulation dtype."""
    rows = cast(factor.grad, compute_dtype(factor.grad))
    return added(rows, factor.ids, factor.shape[0]).reshape(factor.shape)


def merge(factors: list[Rows]) -> Rows:
    """Return the sum of several uses as one, rows in ascending order of example."""
    example = torch.cat([factor.example for factor in factors])
    ids = torch.cat([factor.ids for factor in factors])
    grad = torch.cat([factor.grad for factor in factors])
    first = factors[0]
    lengths = [factor.longest for factor in factors if factor.longest is not None]
    longest = sum(lengths) if len(lengths) == len(factors) else None
    return Rows(ids, grad, example, first.batch, first.shape, longest).in_order()
