"""Embeddings in plain torch."""

from __future__ import annotations

import torch
from gradstats.kernels._reference_linear import collect, gradients, result_dtype, rows_of
from torch import Tensor


def tables(ids: Tensor, g: Tensor, cu_seqlens: Tensor | None, rows: int) -> list[Tensor]:
    """Per-example gradients of an embedding, fp64 (rows, d) each."""
    flat = ids if cu_seqlens is None else ids[:, None]
    result = []
    for own, g_rows in zip(rows_of(flat, cu_seqlens), rows_of(g, cu_seqlens), strict=True):
        table = g.new_zeros((rows, g.shape[-1]), dtype=torch.float64)
        result.append(table.index_add_(0, own.reshape(-1).long(), g_rows.double()))
    return result


def _table_rows(*ids: Tensor) -> int:
    return max((int(each.max()) + 1 for each in ids if each.numel()), default=0)


def rows_sqnorm(
    ids: Tensor,
    g: Tensor,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    return rows_inner(ids, g, ids, g, cu_seqlens, cu_seqlens)


def rows_inner(
    ids1: Tensor,
    g1: Tensor,
    ids2: Tensor,
    g2: Tensor,
    cu_seqlens1: Tensor | None = None,
    cu_seqlens2: Tensor | None = None,
    max_seqlen1: int | None = None,
    max_seqlen2: int | None = None,
) -> Tensor:
    rows = _table_rows(ids1, ids2)
    first = tables(ids1, g1, cu_seqlens1, rows)
    second = tables(ids2, g2, cu_seqlens2, rows)
    return collect([(one * two).sum() for one, two in zip(first, second, strict=True)], g1)


def pairwise_rows(
    ids1: Tensor,
    g1: Tensor,
    ids2: Tensor,
    g2: Tensor,
    cu_seqlens1: Tensor | None = None,
    cu_seqlens2: Tensor | None = None,
    max_seqlen1: int | None = None,
    max_seqlen2: int | None = None,
) -> Tensor:
    rows = _table_rows(ids1, ids2)
    second = tables(ids2, g2, cu_seqlens2, rows)
    first = tables(ids1, g1, cu_seqlens1, rows)
    products = g1.new_zeros((len(first), len(second)), dtype=result_dtype(g1))
    for i, one in enumerate(first):
        for j, two in enumerate(second):
            products[i, j] = (one * two).sum()
    return products


def rows_direction(
    ids: Tensor,
    g: Tensor,
    direction: Tensor,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    own = tables(ids, g, cu_seqlens, direction.shape[0])
    return collect([(table * direction.double()).sum() for table in own], g)


def tied_inner(
    a: Tensor,
    g: Tensor,
    ids: Tensor,
    rows: Tensor,
    cu_seqlens1: Tensor | None = None,
    cu_seqlens2: Tensor | None = None,
    max_seqlen1: int | None = None,
    max_seqlen2: int | None = None,
) -> Tensor:
    embedded = tables(ids, rows, cu_seqlens2, g.shape[-1])
    projected = gradients(a, g, cu_seqlens1)
    return collect([(x * y).sum() for x, y in zip(projected, embedded, strict=True)], a)
