"""The CUDA backend of convolutions, embeddings, normalisation layers, scales and shifts.

Also of the cross terms of embeddings and projections. See ``_triton``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradstats._factors import Elementwise, Outer, Patches, Rows
from gradstats.contractions._result import Contraction, WellConditioned
from gradstats.contractions._triton import DTYPES, narrow, operands_of, operators, rounding


def convolution(factor: Patches) -> Contraction:
    """Return squared norms by gradient tiles, without patches in memory."""
    value = operators().convolution_sqnorm(*factor.sides, *layer_of(factor))
    return WellConditioned(torch.float32, value=value)


def convolution_gram(factor: Patches) -> Contraction:
    """Return Σ_{t,s} (patch_t·patch_s)(grad_t·grad_s), recomputed by tiles where it cancels."""
    numbers = rounding(*factor.sides, cut_off=0.0)
    return Contraction(
        *operators().convolution_gram_sqnorm(*factor.sides, *layer_of(factor), *numbers)
    )


def depthwise_and_sum(factor: Patches) -> tuple[Contraction, Tensor]:
    """Return squared norms and Σ_i G_i from one kernel, for layers with one channel in a group."""
    gradient, value = operators().convolution_weight_gradient_sqnorm(
        *factor.sides, *layer_of(factor)
    )
    gradient = gradient.reshape(factor.shape)
    return WellConditioned(torch.float32, value=value), gradient


def convolution_pairs(first: Patches, second: Patches, workspace: int) -> Tensor:
    """Return products of all pairs of gradients, formed chunk by chunk, (B, B') float64."""
    both = *first.sides, *second.sides, *layer_of(first)
    return operators().pairwise_convolution(*both, workspace=workspace).double()


def convolution_diagonal(first: Patches, second: Patches, workspace: int) -> Tensor:
    """Return the products of gradient tiles that never leave the chip, (B,) float64."""
    if first.input.shape != second.input.shape:
        # The kernel forms the tiles of both sides from images of one size.
        rows = [slice(row, row + 1) for row in range(first.batch)]
        each = (convolution_pairs(first.select(row), second.select(row), workspace) for row in rows)
        return torch.cat([first.grad.new_empty((0,), dtype=torch.float64), *map(torch.ravel, each)])
    return operators().convolution_inner(*first.sides, *second.sides, *layer_of(first))


def convolution_gram_pairs(first: Patches, second: Patches) -> Tensor:
    """Return Σ_{t,s} (patch_t·patch'_s)(grad_t·grad'_s) for all pairs, (B, B') float64."""
    both = *first.sides, *second.sides, *layer_of(first)
    return operators().pairwise_convolution_gram(*both).double()


def convolution_gram_diagonal(first: Patches, second: Patches) -> Tensor:
    """Return the same of each example with its partner, (B,) float64."""
    value, _ = operators().convolution_inner_gram(*first.sides, *second.sides, *layer_of(first))
    return value


def convolution_direction(factor: Patches, direction: Tensor) -> Tensor:
    """Return Σ_t grad_tᵀ V patch_t of each example, (B,) float64, for V like the weight."""
    direction = narrow(direction, factor.grad)
    return operators().convolution_direction(*factor.sides, direction, *layer_of(factor))


def layer_of(factor: Patches) -> tuple:
    """Return a convolution's geometry as the kernels take it."""
    geometry = factor.geometry
    return factor.kernel, geometry.stride, geometry.padding, geometry.dilation, geometry.groups


def rows_sqnorm(factor: Rows) -> Contraction:
    """Return Σ_v ‖Σ_{n: ids[n] = v} grad[n]‖², equal ids grouped without a table."""
    value = operators().rows_sqnorm(*_rows(factor))
    return WellConditioned(torch.float32, value=value)


def rows_pairs(first: Rows, second: Rows) -> Tensor:
    """Return Σ_v ⟨Σ_{n: id v} grad[n], Σ_{m: id v} grad'[m]⟩ of all pairs, (B, B') float64."""
    return operators().pairwise_rows(*_both_rows(first, second)).double()


def rows_diagonal(first: Rows, second: Rows) -> Tensor:
    """Return the same of each example with its partner, (B,) float64."""
    return operators().rows_inner(*_both_rows(first, second))


def rows_direction(factor: Rows, table: Tensor) -> Tensor:
    """Return Σ_n grad[n]·V[ids[n]] of each example, (B,) float64, for V (rows, width)."""
    ids, grad, bounds, longest = _rows(factor)
    table = narrow(table, grad)
    return operators().rows_direction(ids, grad, table, bounds, longest)


def inner_with_rows(outer: Outer, rows: Rows) -> Tensor:
    """Return the cross term of an embedding and a projection that share a table, (B,) float64."""
    a, g = operands_of(outer)
    ids, grad, bounds, longest = _rows(rows)
    if bounds is None:
        return operators().tied_inner(a, g, ids, grad)
    batch, positions = a.shape[:2]
    own = torch.arange(batch + 1, device=a.device) * positions
    return operators().tied_inner(
        a.flatten(0, 1), g.flatten(0, 1), ids, grad, own, bounds, positions, longest
    )


def _rows(factor: Rows) -> tuple[Tensor, Tensor, Tensor | None, int | None]:
    """Return (ids, grad, bounds, longest): (B, T) if all examples have T rows, else packed."""
    if factor.each is not None:
        shape = (factor.batch, factor.each)
        return factor.ids.view(shape), factor.grad.view(*shape, -1), None, None
    return factor.ids, factor.grad, *_bounds(factor)


def _bounds(factor: Rows) -> tuple[Tensor, int]:
    """Return where each example's rows begin and end, and the most rows that one may have."""
    numbers = torch.arange(factor.batch + 1, device=factor.example.device)
    longest = factor.ids.numel() if factor.longest is None else factor.longest
    return torch.searchsorted(factor.example, numbers), longest


def _both_rows(first: Rows, second: Rows) -> tuple:
    """Return the operands of two factors, both packed if one of them has to be."""
    (ids, grad, bounds, longest), (ids2, grad2, bounds2, longest2) = _rows(first), _rows(second)
    if (bounds is None) != (bounds2 is None):
        ids, grad, ids2, grad2 = first.ids, first.grad, second.ids, second.grad
        (bounds, longest), (bounds2, longest2) = _bounds(first), _bounds(second)
    return ids, grad, ids2, grad2, bounds, bounds2, longest, longest2


def layer_norm_sum(
    x: Tensor, g: Tensor, eps: float, rms: bool, offsets: Sequence[int] | None
) -> tuple[Tensor, Tensor]:
    """Return Σ_t g·x̂ and Σ_t g (B, D) of rows (B, T, D), or packed (N, D), normalised over D."""
    bounds = None if offsets is None else torch.tensor(offsets)
    return operators().layer_norm_sum(x, g, eps, rms, bounds)


def group_norm_sum(x: Tensor, g: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor]:
    """Return Σ_t g·x̂ and Σ_t g (B, C) of channels (B, T, C) normalised by groups."""
    return operators().group_norm_sum(x, g, groups, eps)


# Whether the input's gradient is wanted, and the dtype of the parameters' gradients; None for no
# gradients of parameters.
Wanted = tuple[bool, torch.dtype | None]


def stored(dtype: torch.dtype | None) -> torch.dtype | None:
    """Return the dtype if the kernels can store it, else None: they store the dtype of sums."""
    return dtype if dtype in DTYPES else None


class NormGradients(NamedTuple):
    """The backward of a normalisation layer.

    Attributes:
        input: the input's gradient, in the shape that the kernels took; None if not wanted.
        scale, shift: Σ_i of the examples' gradients, (features,), in the dtype that is wanted if
            the kernels can store it, else float32; None if not wanted.
        scale_norms, shift_norms: squared norms of the examples' gradients.
    """

    input: Tensor | None
    scale: Tensor | None
    shift: Tensor | None
    scale_norms: Contraction
    shift_norms: Contraction


def layer_norm_backward(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    eps: float,
    rms: bool,
    offsets: Sequence[int] | None,
    wanted: Wanted,
) -> NormGradients:
    """Return the backward of rows (B, T, D), or packed (N, D), normalised over D.

    Args:
        x, g: inputs and output gradients.
        weight: the scale (D,); None for 1.
        eps: what the layer adds to the variance.
        rms: whether the layer is an RMSNorm.
        offsets: where the examples of packed rows begin and end; None for dense rows.
        wanted: which gradients to return.
    """
    bounds = None if offsets is None else torch.tensor(offsets)
    want_input, dtype = wanted
    if not want_input and dtype is None:
        return _norms_alone(*operators().layer_norm_sqnorm(x, g, eps, rms=rms, cu_seqlens=bounds))
    sums = dtype is not None
    result = operators().layer_norm_backward(
        x, g, weight, eps, rms=rms, sums=sums, cu_seqlens=bounds, gradient_dtype=stored(dtype)
    )
    return _norm_gradients(result, sums)


def group_norm_backward(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    groups: int,
    eps: float,
    wanted: Wanted,
) -> NormGradients:
    """Return the backward of channels (B, T, C) normalised by groups; as `layer_norm_backward`."""
    want_input, dtype = wanted
    if not want_input and dtype is None:
        return _norms_alone(*operators().group_norm_sqnorm(x, g, groups, eps))
    sums = dtype is not None
    result = operators().group_norm_backward(
        x, g, weight, groups, eps, sums=sums, gradient_dtype=stored(dtype)
    )
    return _norm_gradients(result, sums)


def _norms_alone(scale: Tensor, shift: Tensor) -> NormGradients:
    norms = [WellConditioned(torch.float32, value=value) for value in (scale, shift)]
    return NormGradients(None, None, None, *norms)


def _norm_gradients(result: tuple[Tensor, ...], sums: bool) -> NormGradients:
    gradient, scale, shift, *squares = result
    norms = [WellConditioned(torch.float32, value=value) for value in squares]
    return NormGradients(gradient, *((scale, shift) if sums else (None, None)), *norms)


def scale_sum(
    x: Tensor, g: Tensor, mean: Tensor | None = None, rstd: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return Σ_t g·x̂ and Σ_t g (B, C) of channels (B, T, C) with the statistics (C,)."""
    return operators().scale_sum(x, g, mean, rstd)


def scale_backward(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    wanted: Wanted,
) -> NormGradients:
    """Return the backward of channels (B, T, C) with the statistics (C,); `layer_norm_backward`."""
    want_input, dtype = wanted
    sums = dtype is not None
    result = operators().scale_backward(
        g, x, weight=weight, mean=mean, rstd=rstd, input_gradient=want_input, sums=sums,
        gradient_dtype=stored(dtype),
    )  # fmt: skip
    gradients = _norm_gradients(result, sums)
    return gradients if want_input else gradients._replace(input=None)


def elementwise(
    factor: Elementwise, weight: Tensor | None, wanted: Wanted
) -> tuple[Contraction, Tensor | None, Tensor | None]:
    """Return squared norms, Σ_i G_i and grad ∘ weight; of the last two None if not wanted.

    Args:
        factor: the factor to contract. If the input's gradient is wanted, channels must not share
            the parameter.
        weight: (C,).
        wanted: whether the input's gradient is wanted, and the dtype of the sum, which is float32
            if the kernels cannot store that dtype; None for no sum.
    """
    want_input, dtype = wanted
    sums = dtype is not None
    g, x, bounds = factor.grad, factor.input, _offsets(factor)
    if factor.shared:
        assert not want_input
        values = operators().scale_direction(g, x, _ones(factor), bounds)
        total = values.sum().float().reshape(factor.shape) if sums else None
        return WellConditioned(torch.float32, value=values.square()), total, None
    if x is None and not sums:
        value = operators().vector_sqnorm(g, cu_seqlens=bounds)
        return WellConditioned(torch.float32, value=value), None, None
    gradient, *both = operators().scale_backward(
        g, x, weight=weight, shift=x is None, input_gradient=want_input, sums=sums,
        cu_seqlens=bounds, gradient_dtype=stored(dtype),
    )  # fmt: skip
    kind = int(x is None)  # 0 for a scale, 1 for a shift
    total, value = both[kind], both[2 + kind]
    return (
        WellConditioned(torch.float32, value=value),
        total.reshape(factor.shape) if sums else None,
        gradient if want_input else None,
    )


def elementwise_sums(factor: Elementwise) -> Tensor:
    """Return the gradients (B, *shape) float32 of each example."""
    g, x, bounds = factor.grad, factor.input, _offsets(factor)
    if factor.shared:
        sums = operators().scale_direction(g, x, _ones(factor), bounds).float()
    elif x is not None:
        sums, _ = operators().scale_sum(x, g, None, None, bounds)
    else:
        sums = operators().vector_sum(g, bounds)
    return sums.reshape(factor.batch, *factor.shape)


def elementwise_direction(factor: Elementwise, direction: Tensor) -> Tensor:
    """Return Σ_t ⟨input_t ∘ grad_t, V⟩ of each example, (B,) float64, for V like the parameter."""
    direction = direction.reshape(-1).float()
    if factor.shared:
        direction = direction.expand(factor.grad.shape[-1])
    operands = factor.grad, factor.input, direction
    return operators().scale_direction(*operands, _offsets(factor))


def _offsets(factor: Elementwise) -> Tensor | None:
    return None if factor.offsets is None else torch.tensor(factor.offsets)


def _ones(factor: Elementwise) -> Tensor:
    return factor.grad.new_ones(factor.grad.shape[-1], dtype=torch.float32)
