"""The operators on tensors that no kernel runs on: plain torch, one example at a time.

Sums are fp64. Results are fp32, or fp64 for fp64 operands. At most two examples' weight gradients
exist at once. Nothing here needs triton.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor


def result_dtype(operand: Tensor) -> torch.dtype:
    """What every operator returns for operands of this dtype."""
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
    """Per-example scalars as one vector."""
    if not values:
        return operand.new_zeros((0,), dtype=result_dtype(operand))
    return torch.stack(values).to(result_dtype(operand))


def rank_one_inner(a1: Tensor, g1: Tensor, a2: Tensor, g2: Tensor) -> tuple[Tensor, Tensor]:
    inputs = (a1.double() * a2.double()).sum(1)
    outputs = (g1.double() * g2.double()).sum(1)
    dtype = result_dtype(a1)
    return (inputs * outputs).to(dtype), outputs.to(dtype)


def rank_one_sqnorm(a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    return rank_one_inner(a, g, a, g)


def vector_inner(
    v1: Tensor, v2: Tensor, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None
) -> Tensor:
    pairs = zip(rows_of(v1, cu_seqlens), rows_of(v2, cu_seqlens), strict=True)
    return collect([x.double().sum(0) @ y.double().sum(0) for x, y in pairs], v1)


def vector_sqnorm(
    v: Tensor, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None
) -> Tensor:
    return vector_inner(v, v, cu_seqlens)


def gram_sqnorm(
    a: Tensor,
    g: Tensor,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    precision: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    sums: list[list[Tensor]] = [[], [], []]
    for a_rows, g_rows in zip(rows_of(a, cu_seqlens), rows_of(g, cu_seqlens), strict=True):
        terms = (a_rows.double() @ a_rows.double().T) * (g_rows.double() @ g_rows.double().T)
        values = (terms.sum(), terms.abs().sum(), terms.diagonal().sqrt().sum())
        for column, value in zip(sums, values, strict=True):
            column.append(value)
    sqnorm, magnitude, size = (collect(column, a) for column in sums)
    return sqnorm, magnitude, size


def direct_sqnorm(
    a: Tensor,
    g: Tensor,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    precision: str | None = None,
) -> Tensor:
    return collect([gradient.square().sum() for gradient in gradients(a, g, cu_seqlens)], a)


def direct_inner(
    a1: Tensor,
    g1: Tensor,
    a2: Tensor,
    g2: Tensor,
    cu_seqlens1: Tensor | None = None,
    cu_seqlens2: Tensor | None = None,
    max_seqlen1: int | None = None,
    max_seqlen2: int | None = None,
    precision: str | None = None,
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
    bias: bool = False,
    precision: str | None = None,
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
        g_products = g1_rows.double() @ g2_rows.double().T
        terms = (a1_rows.double() @ a2_rows.double().T) * g_products
        total, magnitude = terms.sum(), terms.abs().sum()
        if bias:
            total, magnitude = total + g_products.sum(), magnitude + g_products.abs().sum()
        sums.append(total)
        magnitudes.append(magnitude)
    return collect(sums, a1), collect(magnitudes, a1)


def weight_gradient_sqnorm(
    a: Tensor,
    g: Tensor,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    precision: str | None = None,
    gradient_dtype: torch.dtype | None = None,
    descriptors: bool = False,
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
    bias: bool = False,
    precision: str | None = None,
) -> Tensor:
    rows1 = list(zip(rows_of(a1, cu_seqlens1), rows_of(g1, cu_seqlens1), strict=True))
    rows2 = list(zip(rows_of(a2, cu_seqlens2), rows_of(g2, cu_seqlens2), strict=True))
    products = a1.new_zeros((len(rows1), len(rows2)), dtype=result_dtype(a1))
    for i, (a1_rows, g1_rows) in enumerate(rows1):
        first = g1_rows.double().T @ a1_rows.double()
        bias_first = g1_rows.double().sum(0)
        for j, (a2_rows, g2_rows) in enumerate(rows2):
            value = (first * (g2_rows.double().T @ a2_rows.double())).sum()
            products[i, j] = value + (bias_first @ g2_rows.double().sum(0) if bias else 0)
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
    bias: bool = False,
    precision: str | None = None,
    workspace: int = 0,
) -> Tensor:
    return pairwise_gram(a1, g1, a2, g2, cu_seqlens1, cu_seqlens2, bias=bias)


def direction_inner(
    a: Tensor,
    g: Tensor,
    direction: Tensor,
    bias_direction: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    precision: str | None = None,
) -> Tensor:
    weight = direction.double()
    values = []
    for a_rows, g_rows in zip(rows_of(a, cu_seqlens), rows_of(g, cu_seqlens), strict=True):
        value = ((g_rows.double() @ weight) * a_rows.double()).sum()
        if bias_direction is not None:
            value = value + g_rows.double().sum(0) @ bias_direction.double()
        values.append(value)
    return collect(values, a)


def scale_sum(
    x: Tensor,
    g: Tensor,
    mean: Tensor | None = None,
    rstd: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> tuple[Tensor, Tensor]:
    scales, shifts = [], []
    pairs = zip(rows_of(x, cu_seqlens), rows_of(g, cu_seqlens), strict=True)
    for example, (x_rows, g_rows) in enumerate(pairs):
        x_hat = x_rows.double()
        if mean is not None and rstd is not None:
            own = ... if mean.dim() == 1 else example
            x_hat = (x_hat - mean[own]) * rstd[own]
        scales.append((x_hat * g_rows.double()).sum(0))
        shifts.append(g_rows.double().sum(0))
    return _stacked(scales, x), _stacked(shifts, x)


def layer_norm_sum(
    x: Tensor,
    g: Tensor,
    eps: float,
    rms: bool = False,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> tuple[Tensor, Tensor]:
    scale, shift = scale_sum(_normalised(x, eps, rms), g, cu_seqlens=cu_seqlens)
    return scale.to(result_dtype(x)), shift.to(result_dtype(x))


def group_norm_sum(x: Tensor, g: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor]:
    batch, positions, channels = x.shape
    blocks = x.double().mT.reshape(batch, groups, -1)
    x_hat = _normalised(blocks, eps, False).reshape(batch, channels, positions).mT
    scale, shift = scale_sum(x_hat, g)
    return scale.to(result_dtype(x)), shift.to(result_dtype(x))


def scale_sqnorm(
    x: Tensor,
    g: Tensor,
    mean: Tensor | None = None,
    rstd: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> tuple[Tensor, Tensor]:
    return _squares(scale_sum(x.double(), g, mean, rstd, cu_seqlens), x)


def layer_norm_sqnorm(
    x: Tensor,
    g: Tensor,
    eps: float,
    rms: bool = False,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> tuple[Tensor, Tensor]:
    return _squares(layer_norm_sum(x.double(), g, eps, rms, cu_seqlens), x)


def group_norm_sqnorm(x: Tensor, g: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor]:
    return _squares(group_norm_sum(x.double(), g, groups, eps), x)


def layer_norm_backward(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    eps: float,
    rms: bool = False,
    sums: bool = True,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    both = layer_norm_sum(x.double(), g, eps, rms, cu_seqlens)
    gradient = _norm_gradient(x, g if weight is None else g.double() * weight, eps, rms)
    if cu_seqlens is not None:
        outside = torch.ones(len(x), dtype=torch.bool)
        for start, end in itertools.pairwise(cu_seqlens.tolist()):
            outside[start:end] = False
        gradient[outside] = 0
    return _whole_backward(x, gradient, both, sums)


def group_norm_backward(
    x: Tensor, g: Tensor, weight: Tensor | None, groups: int, eps: float, sums: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    batch, positions, channels = x.shape
    both = group_norm_sum(x.double(), g, groups, eps)
    weighted = g.double() if weight is None else g.double() * weight
    blocks, own = (side.double().mT.reshape(batch, groups, -1) for side in (x, weighted))
    gradient = _norm_gradient(blocks, own, eps, False).reshape(batch, channels, positions).mT
    return _whole_backward(x, gradient, both, sums)


def _norm_gradient(x: Tensor, weighted: Tensor, eps: float, rms: bool) -> Tensor:
    """The input gradient of rows that are normalised, fp64, given the weighted output gradient."""
    x_hat, weighted = _normalised(x, eps, rms), weighted.double()
    gradient = weighted - x_hat * (weighted * x_hat).mean(-1, keepdim=True)
    if not rms:
        gradient = gradient - weighted.mean(-1, keepdim=True)
    return gradient * _deviation(x, eps, rms)


def _whole_backward(
    x: Tensor, gradient: Tensor, both: tuple[Tensor, Tensor], sums: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Results of a layer's backward out of its input gradient and per-example gradients."""
    dtype = result_dtype(x)
    scale, shift = (
        values.sum(0).to(dtype) if sums else values.new_empty(0, dtype=dtype) for values in both
    )
    return torch.empty_like(x).copy_(gradient), scale, shift, *_squares(both, x)


def _deviation(x: Tensor, eps: float, rms: bool) -> Tensor:
    """1 / sqrt(variance + eps) of every row, fp64 (..., 1)."""
    x = x.double()
    centred = x if rms else x - x.mean(-1, keepdim=True)
    return (centred.square().mean(-1, keepdim=True) + eps).rsqrt()


def _normalised(x: Tensor, eps: float, rms: bool) -> Tensor:
    rstd = _deviation(x, eps, rms)
    x = x.double()
    return (x if rms else x - x.mean(-1, keepdim=True)) * rstd


def _stacked(values: list[Tensor], operand: Tensor) -> Tensor:
    """Per-example vectors as one matrix."""
    if not values:
        return operand.new_zeros((0, operand.shape[-1]), dtype=result_dtype(operand))
    return torch.stack(values).to(result_dtype(operand))


def _squares(sums: tuple[Tensor, Tensor], operand: Tensor) -> tuple[Tensor, Tensor]:
    scale, shift = (values.double().square().sum(1) for values in sums)
    dtype = result_dtype(operand)
    return scale.to(dtype), shift.to(dtype)


def tables(
    ids: Tensor, g: Tensor, cu_seqlens: Tensor | None, padding_idx: int | None, rows: int
) -> list[Tensor]:
    """Per-example gradients of an embedding, fp64 (rows, d) each."""
    flat = ids if cu_seqlens is None else ids[:, None]
    result = []
    for own, g_rows in zip(rows_of(flat, cu_seqlens), rows_of(g, cu_seqlens), strict=True):
        own = own.reshape(-1).long()
        kept = torch.ones_like(own, dtype=torch.bool)
        if padding_idx is not None:
            kept = own != padding_idx
        table = g.new_zeros((rows, g.shape[-1]), dtype=torch.float64)
        result.append(table.index_add_(0, own[kept], g_rows.double()[kept]))
    return result


def _table_rows(*ids: Tensor) -> int:
    return max((int(each.max()) + 1 for each in ids if each.numel()), default=0)


def rows_sqnorm(
    ids: Tensor,
    g: Tensor,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    padding_idx: int | None = None,
) -> Tensor:
    return rows_inner(ids, g, ids, g, cu_seqlens, cu_seqlens, padding_idx=padding_idx)


def rows_inner(
    ids1: Tensor,
    g1: Tensor,
    ids2: Tensor,
    g2: Tensor,
    cu_seqlens1: Tensor | None = None,
    cu_seqlens2: Tensor | None = None,
    max_seqlen1: int | None = None,
    max_seqlen2: int | None = None,
    padding_idx: int | None = None,
) -> Tensor:
    rows = _table_rows(ids1, ids2)
    first = tables(ids1, g1, cu_seqlens1, padding_idx, rows)
    second = tables(ids2, g2, cu_seqlens2, padding_idx, rows)
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
    padding_idx: int | None = None,
    precision: str | None = None,
) -> Tensor:
    rows = _table_rows(ids1, ids2)
    second = tables(ids2, g2, cu_seqlens2, padding_idx, rows)
    first = tables(ids1, g1, cu_seqlens1, padding_idx, rows)
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
    padding_idx: int | None = None,
) -> Tensor:
    own = tables(ids, g, cu_seqlens, padding_idx, direction.shape[0])
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
    padding_idx: int | None = None,
    precision: str | None = None,
) -> Tensor:
    embedded = tables(ids, rows, cu_seqlens2, padding_idx, g.shape[-1])
    projected = gradients(a, g, cu_seqlens1)
    return collect([(x * y).sum() for x, y in zip(projected, embedded, strict=True)], a)


def convolution_gradients(
    x: Tensor,
    g: Tensor,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> Iterator[Tensor]:
    """Per-example weight gradients of a convolution, fp64 (O, C / groups, *kernel) each."""
    weight = x.new_empty(1, dtype=torch.float64).expand(g.shape[1], x.shape[1] // groups, *kernel)
    for x_example, g_example in zip(x.double().split(1), g.double().split(1), strict=True):
        yield torch.ops.aten.convolution_backward(
            g_example, x_example, weight, None, stride, padding, dilation, False,
            [0] * len(kernel), groups, [False, True, False],
        )[1]  # fmt: skip


def convolution_sqnorm(
    x: Tensor,
    g: Tensor,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    precision: str | None = None,
) -> Tensor:
    own = convolution_gradients(x, g, kernel, stride, padding, dilation, groups)
    return collect([gradient.square().sum() for gradient in own], x)


def convolution_gram_sqnorm(
    x: Tensor,
    g: Tensor,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    precision: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    sqnorms, magnitudes, sizes = [], [], []
    for x_example, g_example in zip(x.double().split(1), g.double().split(1), strict=True):
        outputs = g_example.reshape(groups, g.shape[1] // groups, -1)
        products = outputs.mT @ outputs  # (groups, T, T)
        patches = _patches(x_example, kernel, stride, padding, dilation)
        patches = patches.reshape(groups, -1, products.shape[-1])
        terms = (patches.mT @ patches) * products
        sqnorms.append(terms.sum())
        magnitudes.append(terms.abs().sum())
        own = terms.diagonal(dim1=1, dim2=2).sqrt().sum(1)  # (groups,)
        sizes.append(own.square().sum().sqrt())
    return collect(sqnorms, x), collect(magnitudes, x), collect(sizes, x)


def _patches(
    x: Tensor, kernel: list[int], stride: list[int], padding: list[int], dilation: list[int]
) -> Tensor:
    """(C, taps, T) patches of one example, of any number of spatial axes."""
    x = torch.nn.functional.pad(x, [amount for side in padding[::-1] for amount in (side, side)])
    for axis, (taps, step, spread) in enumerate(zip(kernel, stride, dilation, strict=True)):
        size = (x.shape[2 + axis] - spread * (taps - 1) - 1) // step + 1
        at = torch.arange(size) * step + torch.arange(taps)[:, None] * spread  # (taps, size)
        # taps of this axis go last, so that later axes keep their places
        x = x.index_select(2 + axis, at.flatten()).unflatten(2 + axis, (taps, size))
        x = x.movedim(2 + axis, -1)
    dims = len(kernel)
    order = (1, *range(2 + dims, 2 + 2 * dims), *range(2, 2 + dims))
    return x.permute(0, *order)[0].flatten(1, dims).flatten(2)


def convolution_weight_gradient_sqnorm(
    x: Tensor,
    g: Tensor,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    precision: str | None = None,
    gradient_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    shape = (g.shape[1], x.shape[1] // groups, *kernel)
    total = x.new_zeros(shape, dtype=torch.float64)
    squares = []
    for gradient in convolution_gradients(x, g, kernel, stride, padding, dilation, groups):
        squares.append(gradient.square().sum())
        total += gradient
    return total.to(gradient_dtype or x.dtype), collect(squares, x)


def convolution_inner(
    x1: Tensor,
    g1: Tensor,
    x2: Tensor,
    g2: Tensor,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    precision: str | None = None,
) -> Tensor:
    layer = (kernel, stride, padding, dilation, groups)
    pairs = zip(
        convolution_gradients(x1, g1, *layer), convolution_gradients(x2, g2, *layer), strict=True
    )
    return collect([(first * second).sum() for first, second in pairs], x1)


def pairwise_convolution(
    x1: Tensor,
    g1: Tensor,
    x2: Tensor,
    g2: Tensor,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    precision: str | None = None,
    workspace: int = 0,
) -> Tensor:
    layer = (kernel, stride, padding, dilation, groups)
    products = x1.new_zeros((len(x1), len(x2)), dtype=result_dtype(x1))
    for i, first in enumerate(convolution_gradients(x1, g1, *layer)):
        for j, second in enumerate(convolution_gradients(x2, g2, *layer)):
            products[i, j] = (first * second).sum()
    return products


def convolution_direction(
    x: Tensor,
    g: Tensor,
    direction: Tensor,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    precision: str | None = None,
) -> Tensor:
    own = convolution_gradients(x, g, kernel, stride, padding, dilation, groups)
    return collect([(gradient * direction.double()).sum() for gradient in own], x)
