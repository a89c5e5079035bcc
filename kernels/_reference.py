"""The operators in plain torch: linear layers, convolutions, embeddings.

Gradients are formed in fp64, one example at a time. `IMPLEMENTATIONS` returns per-example results
in fp64, all others in the precision of the operands. Nothing here needs triton.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

# The arguments of one call of an operator by name, None where one was left out.
Call = Mapping[str, Any]


def result_dtype(operand: Tensor) -> torch.dtype:
    """Dtype of an operator's results, except of those with one number per example."""
    return torch.float64 if operand.dtype == torch.float64 else torch.float32


def rows_of(operand: Tensor, cu_seqlens: Tensor | None) -> list[Tensor]:
    """The (T_i, d) rows of every example, fp64."""
    operand = operand.double()
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


def _operands(call: Call, side: str = "") -> Iterator[tuple[Tensor, Tensor]]:
    """a (T_i, d_in) and g (T_i, d_out) of every example."""
    bounds = call["cu_seqlens" + side]
    return zip(*(rows_of(call[name + side], bounds) for name in "ag"), strict=True)


def _linear(call: Call, side: str = "") -> Iterator[Tensor]:
    """G_i = sum_t g_it a_it^T of every example, (d_out, d_in)."""
    return (g.T @ a for a, g in _operands(call, side))


def _linear_terms(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> Tensor:
    """(1, T1, T2) products of inputs times products of output gradients."""
    (a1, g1), (a2, g2) = first, second
    return ((a1 @ a2.T) * (g1 @ g2.T)).unsqueeze(0)


def convolution_gradients(x: Tensor, g: Tensor, *layer: Any) -> Iterator[Tensor]:
    """The weight gradients of a convolution, (O, C / groups, *kernel) of every example.

    The layer is kernel, stride, padding, dilation and groups.
    """
    kernel, *geometry, groups = layer
    weight = x.new_empty(1, dtype=torch.float64).expand(g.shape[1], x.shape[1] // groups, *kernel)
    for x_example, g_example in zip(_alone(x), _alone(g), strict=True):
        yield torch.ops.aten.convolution_backward(
            g_example, x_example, weight, None, *geometry, False, [0] * len(kernel), groups,
            [False, True, False],
        )[1]  # fmt: skip


def _alone(operand: Tensor) -> tuple[Tensor, ...]:
    """The examples as batches of one, fp64; of no examples, `split` would make one."""
    return operand.double().unsqueeze(1).unbind(0)


def _layer(call: Call) -> tuple:
    return tuple(call[name] for name in ("kernel", "stride", "padding", "dilation", "groups"))


def _convolution(call: Call, side: str = "") -> Iterator[Tensor]:
    return convolution_gradients(call["x" + side], call["g" + side], *_layer(call))


def _images(call: Call, side: str = "") -> Iterator[tuple[Tensor, Tensor]]:
    """Patches (groups, C / groups * taps, T) and g (groups, O / groups, T) of each example."""
    *geometry, groups = _layer(call)
    for x, g in zip(_alone(call["x" + side]), _alone(call["g" + side]), strict=True):
        outputs = g.flatten(2).unflatten(1, (groups, g.shape[1] // groups))[0]
        patches = _patches(x, *geometry)
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


def _image_terms(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> Tensor:
    """(groups, T1, T2) products of patches times products of output gradients."""
    (patches1, outputs1), (patches2, outputs2) = first, second
    return (patches1.mT @ patches2) * (outputs1.mT @ outputs2)


def _tables(ids: Tensor, g: Tensor, cu_seqlens: Tensor | None, rows: int) -> Iterator[Tensor]:
    """The gradients of an embedding, (rows, d) of every example."""
    flat = ids if cu_seqlens is None else ids[:, None]
    for own, each in zip(rows_of(flat, cu_seqlens), rows_of(g, cu_seqlens), strict=True):
        yield each.new_zeros((rows, g.shape[-1])).index_add_(0, own.flatten().long(), each)


def _both_tables(call: Call) -> tuple[Iterator[Tensor], Iterator[Tensor]]:
    """The gradients of both factors, or twice those of one."""
    sides = ("", "") if "ids" in call else ("1", "2")
    ids = [call["ids" + side] for side in sides]
    rows = max((int(each.max()) + 1 for each in ids if each.numel()), default=0)
    first, second = (
        _tables(call["ids" + side], call["g" + side], call["cu_seqlens" + side], rows)
        for side in sides
    )
    return first, second


def stacked(values: Iterable[Tensor], *shape: int) -> Tensor:
    """Results of one shape, one for each example, as one tensor (B, *shape)."""
    found = list(values)
    return torch.stack(found) if found else torch.zeros((0, *shape), dtype=torch.float64)


def _squares(gradients: Iterable[Tensor]) -> Tensor:
    return stacked(gradient.square().sum() for gradient in gradients)


def _inner(first: Iterable[Tensor], second: Iterable[Tensor]) -> Tensor:
    return stacked((one * two).sum() for one, two in zip(first, second, strict=True))


def _along(gradients: Iterable[Tensor], direction: Tensor) -> Tensor:
    return stacked((gradient * direction.double()).sum() for gradient in gradients)


def _pairs(first: Iterable[Tensor], second: Iterable[Tensor], g: Tensor) -> Tensor:
    one, two = list(first), list(second)
    values = stacked((mine * theirs).sum() for mine in one for theirs in two)
    return values.view(len(one), len(two)).to(result_dtype(g))


def _and_sum(gradients: Iterator[Tensor], shape: tuple[int, ...], call: Call, like: Tensor):
    squares, total = [], torch.zeros(shape, dtype=torch.float64)
    for gradient in gradients:
        squares.append(gradient.square().sum())
        total += gradient
    return total.to(call["gradient_dtype"] or like.dtype), stacked(squares)


def _inner_gram(
    multiply: Callable[[Any, Any], Tensor], first: Iterable, second: Iterable
) -> tuple[Tensor, Tensor]:
    found = [multiply(*both) for both in zip(first, second, strict=True)]
    return stacked(each.sum() for each in found), stacked(each.abs().sum() for each in found)


def _gram(terms: Iterable[Tensor], direct: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Results of a Gram form, from terms (groups, T, T) and the direct form's results (B,)."""
    sums = stacked(
        (
            torch.stack((each.sum(), each.abs().sum(), each.diagonal().sqrt().sum()))
            for groups in terms
            for each in groups
        ),
        3,
    )
    values, magnitude, size = sums.view(-1, call["groups"], 3).unbind(2)
    products, cut_off = call["products"] * size.square(), call["cut_off"] * magnitude
    bound = (call["adding"] * magnitude + torch.maximum(products, cut_off)).sum(1)
    value, better = values.sum(1), call["adding"] * direct
    suspect = bound > call["tolerance"] * value
    return torch.where(suspect, direct, value), torch.where(suspect, better, bound)


def _rank_one(call: Call) -> Tensor:
    one_position = {name: call[name][:, None] for name in "ag"}
    return _squares(_linear({**one_position, "cu_seqlens": None}))


def _gram_sqnorm(call: Call) -> tuple[Tensor, Tensor]:
    terms = (_linear_terms(each, each) for each in _operands(call))
    direct = _squares(_linear(call)).view(-1, call["groups"]).sum(1)
    return _gram(terms, direct, call)


def _convolution_gram_sqnorm(call: Call) -> tuple[Tensor, Tensor]:
    terms = (_image_terms(each, each) for each in _images(call))
    return _gram(terms, _squares(_convolution(call)), call)


def _weight_gradient(call: Call) -> tuple[Tensor, Tensor]:
    a, g = call["a"], call["g"]
    return _and_sum(_linear(call), (g.shape[-1], a.shape[-1]), call, a)


def _convolution_weight_gradient(call: Call) -> tuple[Tensor, Tensor]:
    x, g = call["x"], call["g"]
    shape = (g.shape[1], x.shape[1] // call["groups"], *call["kernel"])
    return _and_sum(_convolution(call), shape, call, x)


def _rows_direction(call: Call) -> Tensor:
    ids, g, direction = call["ids"], call["g"], call["direction"]
    return _along(_tables(ids, g, call["cu_seqlens"], len(direction)), direction)


def _tied_inner(call: Call) -> Tensor:
    bounds1, bounds2 = call["cu_seqlens1"], call["cu_seqlens2"]
    embedded = _tables(call["ids"], call["rows"], bounds2, call["g"].shape[-1])
    return _inner(_linear({"a": call["a"], "g": call["g"], "cu_seqlens": bounds1}), embedded)


def _linear_pairs(call: Call) -> Tensor:
    return _pairs(_linear(call, "1"), _linear(call, "2"), call["g1"])


def _convolution_pairs(call: Call) -> Tensor:
    return _pairs(_convolution(call, "1"), _convolution(call, "2"), call["g1"])


IMPLEMENTATIONS: dict[str, Callable[[Call], Any]] = {
    "rank_one_sqnorm": _rank_one,
    "gram_sqnorm": _gram_sqnorm,
    "direct_sqnorm": lambda call: _squares(_linear(call)),
    "direct_inner": lambda call: _inner(_linear(call, "1"), _linear(call, "2")),
    "diagonal_gram": lambda call: _inner_gram(
        _linear_terms, _operands(call, "1"), _operands(call, "2")
    ),
    "weight_gradient_sqnorm": _weight_gradient,
    "pairwise_gram": _linear_pairs,
    "pairwise_direct": _linear_pairs,
    "direction_inner": lambda call: _along(_linear(call), call["direction"]),
    "convolution_sqnorm": lambda call: _squares(_convolution(call)),
    "convolution_gram_sqnorm": _convolution_gram_sqnorm,
    "convolution_weight_gradient_sqnorm": _convolution_weight_gradient,
    "convolution_inner": lambda call: _inner(_convolution(call, "1"), _convolution(call, "2")),
    "convolution_inner_gram": lambda call: _inner_gram(
        _image_terms, _images(call, "1"), _images(call, "2")
    ),
    "pairwise_convolution": _convolution_pairs,
    "pairwise_convolution_gram": _convolution_pairs,
    "convolution_direction": lambda call: _along(_convolution(call), call["direction"]),
    "rows_sqnorm": lambda call: _inner(*_both_tables(call)),
    "rows_inner": lambda call: _inner(*_both_tables(call)),
    "pairwise_rows": lambda call: _pairs(*_both_tables(call), call["g1"]),
    "rows_direction": _rows_direction,
    "tied_inner": _tied_inner,
}
