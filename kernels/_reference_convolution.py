"""Convolutions in plain torch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from gradstats.kernels._reference_linear import collect, guarded, result_dtype
from torch import Tensor


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
    for x_example, g_example in zip(*map(_examples, (x, g)), strict=True):
        yield torch.ops.aten.convolution_backward(
            g_example, x_example, weight, None, stride, padding, dilation, False,
            [0] * len(kernel), groups, [False, True, False],
        )[1]  # fmt: skip


def _examples(operand: Tensor) -> tuple[Tensor, ...]:
    """The examples as batches of one, fp64; `split` would make one of none at all."""
    return operand.double().unsqueeze(1).unbind(0)


def convolution_sqnorm(
    x: Tensor,
    g: Tensor,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
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
    adding: float,
    products: float,
    cut_off: float,
    tolerance: float,
) -> tuple[Tensor, Tensor]:
    layer = kernel, stride, padding, dilation, groups
    sums: list[list[Tensor]] = [[], [], []]
    for own in _operands(x, g, *layer):
        terms = _terms(own, own)  # (groups, T, T)
        sizes = terms.diagonal(dim1=1, dim2=2).sqrt().sum(1)
        values = (terms.sum((1, 2)), terms.abs().sum((1, 2)), sizes)
        for column, value in zip(sums, values, strict=True):
            column += value.unbind()
    sqnorm, magnitude, size = (collect(column, x).view(len(x), groups) for column in sums)
    direct = convolution_sqnorm(x, g, *layer)
    return guarded(sqnorm, magnitude, size, direct, adding, products, cut_off, tolerance)


def _operands(
    x: Tensor,
    g: Tensor,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Of each example, patches (groups, C / groups * taps, T) and g (groups, O / groups, T)."""
    for x_example, g_example in zip(*map(_examples, (x, g)), strict=True):
        outputs = g_example.flatten(2).unflatten(1, (groups, g.shape[1] // groups))[0]
        patches = _patches(x_example, kernel, stride, padding, dilation)
        width = x.shape[1] // groups * patches.shape[1]
        yield patches.reshape(groups, width, outputs.shape[2]), outputs


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
    workspace: int = 0,
) -> Tensor:
    layer = (kernel, stride, padding, dilation, groups)
    products = x1.new_zeros((len(x1), len(x2)), dtype=result_dtype(x1))
    for i, first in enumerate(convolution_gradients(x1, g1, *layer)):
        for j, second in enumerate(convolution_gradients(x2, g2, *layer)):
            products[i, j] = (first * second).sum()
    return products


def convolution_inner_gram(
    x1: Tensor,
    g1: Tensor,
    x2: Tensor,
    g2: Tensor,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> tuple[Tensor, Tensor]:
    layer = (kernel, stride, padding, dilation, groups)
    inner, magnitudes = [], []
    for first, second in zip(_operands(x1, g1, *layer), _operands(x2, g2, *layer), strict=True):
        terms = _terms(first, second)
        inner.append(terms.sum())
        magnitudes.append(terms.abs().sum())
    return collect(inner, x1), collect(magnitudes, x1)


def pairwise_convolution_gram(
    x1: Tensor,
    g1: Tensor,
    x2: Tensor,
    g2: Tensor,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> Tensor:
    layer = (kernel, stride, padding, dilation, groups)
    products = x1.new_zeros((len(x1), len(x2)), dtype=result_dtype(x1))
    for i, first in enumerate(_operands(x1, g1, *layer)):
        for j, second in enumerate(_operands(x2, g2, *layer)):
            products[i, j] = _terms(first, second).sum()
    return products


def _terms(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> Tensor:
    """(groups, T1, T2) products of patches times products of output gradients."""
    (patches1, outputs1), (patches2, outputs2) = first, second
    return (patches1.mT @ patches2) * (outputs1.mT @ outputs2)


def convolution_direction(
    x: Tensor,
    g: Tensor,
    direction: Tensor,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> Tensor:
    own = convolution_gradients(x, g, kernel, stride, padding, dilation, groups)
    return collect([(gradient * direction.double()).sum() for gradient in own], x)
