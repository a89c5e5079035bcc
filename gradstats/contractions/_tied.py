"""A projection and the look-ups of its weight, without keeping the projection's output gradient.

An output projection delivers first, with a gradient (B, T, vocabulary); the embedding that it is
tied to delivers last. The cross term is Σ_n grad[n]·(Σ_t left_t[ids[n]] right_t). The inner sum can
be formed when the projection delivers, since the ids are known from the forward pass, and is no
larger than the embedding's output (Ding et al., arXiv 2405.18194, form the same product).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradstats import _cost
from gradstats._factors import Lookup, Outer, Ragged, Rows, compute_dtype, segment_sum
from gradstats.contractions import _rows, _triton, _triton_layers
from gradstats.contractions._outer_pairs import Sizes
from gradstats.contractions._precision import in_full_precision
from gradstats.contractions._result import Contraction, sum_of_parts


@dataclass(frozen=True)
class Projected:
    """What is kept of a projection's factor: its norms, and what cross terms with look-ups need.

    Attributes:
        norms: squared norms of the projection's factor.
        gathered: look-up → Σ_t left_t[ids[n]] right_t for each of its rows, (N, width).
    """

    norms: Contraction
    gathered: dict[Lookup, Tensor]


@in_full_precision
def project(
    factor: Outer | Ragged, norms: Contraction, lookups: Sequence[Lookup], workspace: int
) -> Projected:
    """Return what the cross terms with some look-ups need of a projection's factor."""
    return Projected(norms, {lookup: gather(factor, lookup, workspace) for lookup in lookups})


def gather(factor: Outer | Ragged, lookup: Lookup, workspace: int) -> Tensor:
    """Return Σ_t left_t[ids[n]] right_t for each row n of a look-up, (N, width)."""
    dtype = compute_dtype(factor.left, factor.right)
    gathered = factor.right.new_empty(lookup.ids.numel(), factor.right.shape[-1], dtype=dtype)
    for here, columns in _gathered(factor, lookup, workspace):
        gathered[here] = columns
    return gathered


def inner_with_rows(
    factor: Outer | Ragged, rows: Rows, workspace: int, sizes: Sizes | None = None
) -> Tensor:
    """Return ⟨P_i, R_i⟩ of a projection and a look-up, (B,) float64.

    Args:
        factor: one group whose ``left`` spans the parameter's rows.
        rows: factor over the same rows.
        workspace: bytes of scratch.
        sizes: unused.
    """
    if isinstance(factor, Outer) and _triton.runs(factor.left, factor.right, rows.grad):
        return _triton_layers.inner_with_rows(factor, rows)
    products = rows.grad.new_empty(rows.ids.numel(), dtype=torch.float64)
    for here, columns in _gathered(factor, rows, workspace):
        products[here] = (columns * rows.grad[here]).sum(1, dtype=torch.float64)
    return _by_example(products, rows)


def _gathered(factor, rows: Lookup | Rows, workspace: int) -> Iterator:
    """Yield slices of rows with Σ_t left_t[ids[n]] right_t for the rows n of the slice.

    Only the columns of ``left`` at an example's own ids are read; or all, if there are more ids
    than columns, as in long texts of few characters. The number of rows of each example is not read
    from the device if shapes tell it: a backward begins with the projection, and reading would wait
    for the whole forward pass.
    """
    dtype = compute_dtype(factor.left, factor.right)
    ids = rows.ids
    if rows.each is None:
        counts = torch.bincount(rows.example, minlength=factor.batch).tolist()
    else:
        counts = [rows.each] * factor.batch
    if isinstance(factor, Outer) and len(set(counts)) == 1:
        yield from _gathered_together(factor, ids.view(factor.batch, -1), dtype, workspace)
        return
    start = 0
    for number, count in enumerate(counts):
        left, right = _of_example(factor, number)
        if left.shape[1] <= count:
            here = slice(start, start + count)
            yield here, (left.to(dtype).mT @ right.to(dtype))[ids[here]]
            start += count
            continue
        scratch = 2 * (left.shape[0] + right.shape[1]) * dtype.itemsize
        chunk = _cost.fitting(scratch, count, workspace)
        for first in range(start, start + count, chunk):
            here = slice(first, min(first + chunk, start + count))
            columns = left.index_select(1, ids[here]).to(dtype)  # (T, n)
            yield here, columns.mT @ right.to(dtype)
        start += count


def _gathered_together(factor: Outer, ids: Tensor, dtype, workspace: int) -> Iterator:
    """Yield the same for examples that look up equally many rows, several at a time: ids (B, n)."""
    left, right = factor.left[:, 0], factor.right[:, 0]  # (B, T, vocabulary), (B, T, width)
    positions, count = left.shape[1], ids.shape[1]
    few = left.shape[2] <= count
    columns = left.shape[2] if few else count
    width = 2 * columns * positions + (positions + columns + count) * right.shape[2]
    scratch = width * dtype.itemsize
    # On a GPU there is no core's cache to stay in, and every launch costs.
    fit = _cost.examples_per_chunk if left.is_cpu else _cost.fitting
    chunk = fit(scratch, factor.batch, workspace)
    for start in range(0, factor.batch, chunk):
        here = slice(start, min(start + chunk, factor.batch))
        if few:
            whole = _products(left[here], right[here], dtype)  # (b, vocabulary, width)
            gathered = whole.gather(1, ids[here, :, None].expand(-1, -1, whole.shape[2]))
        else:
            index = ids[here, None].expand(-1, positions, -1)
            chosen = left[here].gather(2, index)  # (b, T, n)
            gathered = _products(chosen, right[here], dtype)
        yield slice(here.start * count, here.stop * count), gathered.flatten(0, 1)


def _products(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Return leftᵀ right in `dtype`, for (b, T, n) and (b, T, width)."""
    half = left.dtype == right.dtype and left.dtype in _triton.HALF
    if left.is_cuda and half and dtype == torch.float32:
        # Tensor cores multiply half precision exactly and add in single precision.
        return torch.bmm(left.mT, right, out_dtype=dtype)
    return left.to(dtype).mT @ right.to(dtype)


def _by_example(products: Tensor, rows: Rows) -> Tensor:
    """Return the sums of (N,) over the rows of each example, (B,)."""
    if rows.each is not None:
        return products.view(rows.batch, rows.each).sum(1)
    return segment_sum(products, torch.bincount(rows.example, minlength=rows.batch))


@in_full_precision
def tied_sqnorm(projected: Projected, rows: Sequence[Rows], workspace: int) -> Contraction:
    """Return ‖P_i + Σ_u R_u[i]‖² for a projection P and the look-ups R tied to it."""
    if not rows:
        return projected.norms
    table = rows[0] if len(rows) == 1 else _rows.merge(list(rows))
    squares = _rows.sqnorm(table, workspace)
    cross = torch.zeros_like(squares.value)
    for factor in rows:
        assert factor.lookup is not None
        products = (projected.gathered[factor.lookup] * factor.grad).sum(1, dtype=torch.float64)
        cross += _by_example(products, factor)
    dtype = compute_dtype(table.grad, *projected.gathered.values())
    return sum_of_parts([projected.norms, squares], [cross], dtype)


def _of_example(factor: Outer | Ragged, example: int) -> tuple[Tensor, Tensor]:
    """Return (T, vocabulary) and (T, width) of one example."""
    if isinstance(factor, Ragged):
        rows = slice(*factor.offsets[example : example + 2])
        return factor.left[rows], factor.right[rows]
    return factor.left[example, 0], factor.right[example, 0]
