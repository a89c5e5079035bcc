"""Linear layers and vectors in plain torch, and what the other references share.

References compute one example at a time. Sums are fp64, and so is what is one number for each
example; other results are fp32, or fp64 for fp64 operands. At most two examples' weight gradients
exist at once. Nothing in them needs triton.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor


def result_dtype(operand: Tensor) -> torch.dtype:
    """What operators return for operands of this dtype, except what is one number an example."""
    return torch.float64 if operand.dtype == torch.float64 else torch.float32


def rows_of(operand: Tensor, cu_seqlens: Tensor | None) -> list[Tensor]:
    """The (T_i, d) rows of every example."""
    if cu_seqlens is None:
        return list(operand.unbind(0))
    bounds = cu_seqlens.tolist()
    if any(end < start for start, end in itertools.pairwise(bounds)) or (
        bounds[0] < 0 or bounds[-1] > operand.shape[0]
    ):
        raise ValueError(
            f"cu_seqlens must not decrease and must stay within the {operand.shape[0]} packed "
            f"rows; got {bounds}: pass cumulative sums of the lengths"
        )
    return [operand[start:end] for start, end in itertools.pairwise(bounds)]


def gradients(a: Tensor, g: Tensor, cu_seqlens: Tensor | None) -> Iterator[Tensor]:
    """G_i = sum_t g_it a_it^T of one example after the other, fp64 (d_out, d_in)."""
    for a_rows, g_rows in zip(rows_of(a, cu_seqlens), rows_of(g, cu_seqlens), strict=True):
        yield g_rows.double().T @ a_rows.double()


def collect(values: list[Tensor], operand: Tensor) -> Tensor:
    """Per-example scalars as one fp64 vector."""
    return torch.stack(values) if values else operand.new_zeros((0,), dtype=torch.float64)


def rank_one_sqnorm(a: Tensor, g: Tensor) -> Tensor:
    return a.double().square().sum(1) * g.double().square().sum(1)


def vector_sqnorm(
    v: Tensor, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None
) -> Tensor:
    return collect([rows.double().sum(0).square().sum() for rows in rows_of(v, cu_seqlens)], v)


def gram_sqnorm(
    a: Tensor,
    g: Tensor,
    groups: int,
    adding: float,
    products: float,
    cut_off: float,
    tolerance: float,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> tuple[Tensor, Tensor]:
    sums: list[list[Tensor]] = [[], [], []]
    for a_rows, g_rows in zip(rows_of(a, cu_seqlens), rows_of(g, cu_seqlens), strict=True):
        terms = (a_rows.double() @ a_rows.double().T) * (g_rows.double() @ g_rows.double().T)
        values = (terms.sum(), terms.abs().sum(), terms.diagonal().sqrt().sum())
        for column, value in zip(sums, values, strict=True):
            column.append(value)
    shape = len(sums[0]) // groups, groups
    direct = direct_sqnorm(a, g, cu_seqlens).view(shape).sum(1)
    sqnorm, magnitude, size = (collect(column, a).view(shape) for column in sums)
    return guarded(sqnorm, magnitude, size, direct, adding, products, cut_off, tolerance)


def guarded(
    sqnorm: Tensor,
    magnitude: Tensor,
    size: Tensor,
    direct: Tensor,
    adding: float,
    products: float,
    cut_off: float,
    tolerance: float,
) -> tuple[Tensor, Tensor]:
    """What a Gram form returns, of sums (B, groups) and of what the direct form returns (B,)."""
    bound = adding * magnitude + torch.maximum(products * size.square(), cut_off * magnitude)
    value, bound = sqnorm.sum(1), bound.sum(1)
    suspect = bound > tolerance * value
    return torch.where(suspect, direct, value), torch.where(suspect, adding * direct, bound)


def direct_sqnorm(
    a: Tensor,
    g: Tensor,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    return collect([each.square().sum() for each in gradients(a, g, cu_seqlens)], a)


def direct_inner(
    a1: Tensor,
    g1: Tensor,
    a2: Tensor,
    g2: Tensor,
    cu_seqlens1: Tensor | None = None,
    cu_seqlens2: Tensor | None = None,
    max_seqlen1: int | None = None,
    max_seqlen2: int | None = None,
) -> Tensor:
    pairs = zip(gradients(a1, g1, cu_seqlens1), gradients(a2, g2, cu_seqlens2), strict=True)
    return collect([(first * second).sum() for first, second in pairs], a1)


def diagonal_gram(
    a1: Tensor,
    g1: Tensor,
    a2: Tensor,
    g2: Tensor,
    cu_seqlens1: Tensor | None = None,
    cu_seqlens2: Tensor | None = None,
    max_seqlen1: int | None = None,
    max_seqlen2: int | None = None,
) -> tuple[Tensor, Tensor]:
    sums: list[Tensor] = []
    magnitudes: list[Tensor] = []
    for a1_rows, g1_rows, a2_rows, g2_rows in zip(
        rows_of(a1, cu_seqlens1),
        rows_of(g1, cu_seqlens1),
        rows_of(a2, cu_seqlens2),
        rows_of(g2, cu_seqlens2),
        strict=True,
    ):
        a_products = a1_rows.double() @ a2_rows.double().T
        terms = a_products * (g1_rows.double() @ g2_rows.double().T)
        sums.append(terms.sum())
        magnitudes.append(terms.abs().sum())
    return collect(sums, a1), collect(magnitudes, a1)


def weight_gradient_sqnorm(
    a: Tensor,
    g: Tensor,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    gradient_dtype: torch.dtype | None = None,
    descriptors: bool | None = None,
) -> tuple[Tensor, Tensor]:
    total = a.new_zeros((g.shape[-1], a.shape[-1]), dtype=torch.float64)
    squares = []
    for gradient in gradients(a, g, cu_seqlens):
        squares.append(gradient.square().sum())
        total += gradient
    return total.to(gradient_dtype or a.dtype), collect(squares, a)


def pairwise_gram(
    a1: Tensor,
    g1: Tensor,
    a2: Tensor,
    g2: Tensor,
    cu_seqlens1: Tensor | None = None,
    cu_seqlens2: Tensor | None = None,
    max_seqlen1: int | None = None,
    max_seqlen2: int | None = None,
) -> Tensor:
    rows1 = list(zip(rows_of(a1, cu_seqlens1), rows_of(g1, cu_seqlens1), strict=True))
    rows2 = list(zip(rows_of(a2, cu_seqlens2), rows_of(g2, cu_seqlens2), strict=True))
    products = a1.new_zeros((len(rows1), len(rows2)), dtype=result_dtype(a1))
    for i, (a1_rows, g1_rows) in enumerate(rows1):
        first = g1_rows.double().T @ a1_rows.double()
        for j, (a2_rows, g2_rows) in enumerate(rows2):
            products[i, j] = (first * (g2_rows.double().T @ a2_rows.double())).sum()
    return products


def pairwise_direct(
    a1: Tensor,
    g1: Tensor,
    a2: Tensor,
    g2: Tensor,
    cu_seqlens1: Tensor | None = None,
    cu_seqlens2: Tensor | None = None,
    max_seqlen1: int | None = None,
    max_seqlen2: int | None = None,
    workspace: int = 0,
) -> Tensor:
    return pairwise_gram(a1, g1, a2, g2, cu_seqlens1, cu_seqlens2)


def direction_inner(
    a: Tensor,
    g: Tensor,
    direction: Tensor,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    weight = direction.double()
    values = []
    for a_rows, g_rows in zip(rows_of(a, cu_seqlens), rows_of(g, cu_seqlens), strict=True):
        values.append(((g_rows.double() @ weight) * a_rows.double()).sum())
    return collect(values, a)
