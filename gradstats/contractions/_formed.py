"""Norms and sums of outer products whose gradients are formed: singly, at once, or in chunks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gradstats._compiler import is_compiling
from gradstats._factors import cast
from gradstats.contractions._multiply import by_onednn
from gradstats.contractions._rounding import ROW_ELEMENTS, row_norms


def form_each(
    left: Sequence[Tensor],
    right: Sequence[Tensor],
    dtype: torch.dtype,
    *,
    with_sum: bool,
    reuse: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Return norms of parts of each left @ right, (B, parts), and the sum of all, (1, p, q).

    Each gradient is formed by one matrix product.

    Args:
        left, right: B matrices (p, T) and (T, q), which may differ in T.
        dtype: the accumulation dtype.
        with_sum: whether to return the sum; else None.
        reuse: whether PyTorch forms all gradients in the same memory; else oneDNN forms each anew.
    """
    parts = _parts(len(left[0]), right[0].shape[1])
    norms = left[0].new_empty(len(left), parts[0], dtype=dtype)
    total = place = None
    for a, b, norm in zip(left, right, norms.unbind(), strict=True):
        a, b = cast(a, dtype), cast(b, dtype)
        formed = torch.mm(a, b, out=place) if reuse else by_onednn(a, b)
        row_norms(formed.view(parts), dtype, out=norm)
        if with_sum and total is None:
            total = formed
            continue
        if total is not None:
            total += formed
        place = formed if reuse else None
        del formed
    return norms, None if total is None else total.unsqueeze(0)


def form_at_once(
    left: Tensor, right: Tensor, dtype: torch.dtype, with_sum: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the norms of small gradients, (B,), and their sum, (K, p, q), by one product."""
    (batch, groups, _, p), q = left.shape, right.shape[3]
    left, right = cast(left, dtype).flatten(0, 1), cast(right, dtype).flatten(0, 1)
    formed = torch.bmm(left.mT, right)
    norms = torch.linalg.vector_norm(formed.view(batch, groups * p * q), dim=1)
    return norms, formed.view(batch, groups, p, q).sum(0) if with_sum else None


def form_chunks(
    left: Tensor, right: Tensor, dtype: torch.dtype, with_sum: bool, chunk: int, rows: int
) -> tuple[Tensor, Tensor | None]:
    """Return the same as ``form_each`` for K groups, (B, K, parts) and (K, p, q), in chunks.

    Args:
        left, right: (B, K, T, p) and (B, K, T, q).
        dtype: the accumulation dtype.
        with_sum: whether to return the sum; else None.
        chunk: number of examples at a time.
        rows: number of rows of their gradients at a time.
    """
    (batch, groups, _, p), q = left.shape, right.shape[3]
    # Form all tiles in the same memory: fresh pages would cost more than the products.
    scratch = None
    if chunk < batch and rows >= p and not is_compiling():
        scratch = left.new_empty(chunk * groups, p, q, dtype=dtype)
    norms, total = [], None
    # Run once even without examples, so that the sum is zeros.
    for start in range(0, max(1, batch), chunk):
        a, b = left, right
        if chunk < batch:
            a, b = a[start : start + chunk], b[start : start + chunk]
        count = len(a)
        a, b = cast(a, dtype).flatten(0, 1).mT, cast(b, dtype).flatten(0, 1)
        lengths, sums = [], []
        for row in range(0, max(1, p), rows):
            part = a if rows >= p else a[:, row : row + rows]
            out = None if scratch is None else scratch[: len(b)]
            tile = torch.bmm(part, b, out=out)
            height = tile.shape[1]
            sizes = count, groups, *_parts(height, q)
            lengths.append(row_norms(tile.view(sizes), dtype))
            if with_sum:
                sums.append(tile.view(count, groups, height, q).sum(0))
        del a, b, part  # these may be copies
        norms.append(_concatenated(lengths, 2))
        if with_sum:
            formed = _concatenated(sums, 1)
            total = formed if total is None else total.add_(formed)
    return _concatenated(norms, 0), total


def _parts(rows: int, columns: int) -> tuple[int, int]:
    """Return the sizes of a matrix reshaped so that a power of two of its rows are one row."""
    most = max(1, ROW_ELEMENTS // max(1, columns))
    together = math.gcd(rows, 1 << most.bit_length() - 1)
    return rows // together, together * columns


def _concatenated(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)
