"""Contractions by kernels, prepared once for all operands of the same layout in memory.

Shapes, strides, dtypes and alignment decide which form costs least, which kernels run, and by which
tiles. What is prepared holds these decisions and no tensor. It takes operands of that layout in any
view, since the kernels read addresses and know the strides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gradstats._factors import Elementwise, Outer, Patches, Vector, cast, weight_gradient
from gradstats.contractions import _triton, _vector
from gradstats.contractions._outer import cheapest_form, is_of_images, summed
from gradstats.contractions._patches import form_on_chip
from gradstats.contractions._result import Contraction, WellConditioned
from gradstats.contractions._tensor_cores import cut_off_of
from gradstats.contractions._triton_layers import NormGradients, Wanted, layer_of, stored

# From left and right operands, or from a gradient: a contraction, and Σ_i G_i or None.
OfOuter = Callable[[Tensor, Tensor], tuple[Contraction, Tensor | None]]
OfBias = Callable[[Tensor], tuple[Contraction, Tensor | None]]
# From gradient, data, scale and statistics: the backward of a normalisation layer.
OfNorm = Callable[..., NormGradients]

# What a layout holds for an operand that is None.
NOTHING = (None,)


def layout_of(*operands: Tensor | None) -> tuple[Any, ...] | None:
    """Return what decisions about CUDA operands depend on; None if nothing may be prepared."""
    from gradstats.kernels._calls import are_plain, is_here
    from gradstats.kernels._precision import tf32_allowed

    first = operands[0]
    assert first is not None
    if torch._C._is_any_autocast_enabled() or not (are_plain(*operands) and is_here(first)):
        return None
    layout: list[Any] = [first.dtype == torch.float32 and tf32_allowed()]
    for each in operands:
        if each is None:
            layout += NOTHING
        else:
            layout += each.shape, each.stride(), each.dtype, each.device, each.data_ptr() % 16
    return tuple(layout)


def of_outer(
    factor: Outer, *, with_sum: bool, again: Callable[[Tensor, Tensor], Any] | None = None
) -> OfOuter | None:
    """Return a function that does what ``sqnorm`` does; None if kernels cannot do it.

    Args:
        factor: of operands of the layout to prepare for, which the kernels serve.
        with_sum: whether the function returns Σ_i G_i too.
        again: makes the factor of other operands, if their positions are several axes.
    """
    (_, groups, positions, p), q = factor.left.shape, factor.right.shape[3]
    if groups > 1 or not positions or factor.permutation is not None:
        return None
    if factor.shape[:2] != (p, q):
        return None
    from gradstats.kernels import direct, gram, rank_one, weight_gradient

    a, g = _triton.operands_of(factor)
    in_one = with_sum and not is_of_images(factor)
    form = cheapest_form(factor, with_sum=in_one, on_chip=True)
    if form == "direct" and in_one:
        both, shape = weight_gradient.prepare(a, g), factor.shape

        def formed(left: Tensor, right: Tensor) -> tuple[Contraction, Tensor | None]:
            total, value = both(right, left)
            return WellConditioned(torch.float32, value=value), total.view(shape)

        return formed
    squares: Any  # takes operands as ``rank_one_sqnorm`` does
    if form == "gram":
        sides = factor.left, factor.right
        bounded = gram.prepare(a, g, _triton.rounding(*sides, cut_off_of(*sides)))
    elif form == "direct":
        squares = direct.prepare(a, g)
    else:
        squares = rank_one.prepare(a.squeeze(1), g.squeeze(1))

    def apart(left: Tensor, right: Tensor) -> tuple[Contraction, Tensor | None]:
        if form == "gram":
            norms = Contraction(*bounded(right, left))
        else:
            norms = WellConditioned(torch.float32, value=squares(right, left))
        if not with_sum:
            return norms, None
        if again is not None:
            return norms, summed(again(left, right))
        return norms, torch.mm(left.reshape(-1, p).t(), right.reshape(-1, q))

    return apart


def of_patches(factor: Patches, *, with_sum: bool) -> OfOuter:
    """Return the same as ``of_outer`` for a convolution's gradient and input."""
    from gradstats.kernels import convolution, convolution_gram, convolution_weight_gradient

    shape, geometry = factor.shape, factor.geometry
    if with_sum and shape[1] == 1:
        both = convolution_weight_gradient.prepare(*factor.sides, layer_of(factor))

        def in_one_pass(grad: Tensor, x: Tensor) -> tuple[Contraction, Tensor | None]:
            total, value = both(x, grad)
            return WellConditioned(torch.float32, value=value), total.reshape(shape)

        return in_one_pass
    layer, is_gram = layer_of(factor), form_on_chip(factor) == "gram"
    contract: Any
    if is_gram:
        numbers = _triton.rounding(*factor.sides, cut_off=0.0)
        contract = convolution_gram.prepare(*factor.sides, layer, numbers)
    else:
        contract = convolution.prepare(*factor.sides, layer)

    def contracted(grad: Tensor, x: Tensor) -> tuple[Contraction, Tensor | None]:
        found = contract(x, grad)
        norms = Contraction(*found) if is_gram else WellConditioned(torch.float32, value=found)
        return norms, weight_gradient(x, grad, shape, geometry) if with_sum else None

    return contracted


def of_bias(factor: Elementwise | Vector, wanted: torch.dtype | None) -> OfBias:
    """Return a function that contracts the gradients of a bias.

    Args:
        factor: of a gradient of the layout to prepare for.
        wanted: the dtype of the sum to return too; None for no sum.
    """
    if isinstance(factor, Vector):

        def summed(grad: Tensor) -> tuple[Contraction, Tensor | None]:
            total = None if wanted is None else cast(grad.sum(0), wanted)
            return _vector.sqnorm_of(grad), total

        return summed
    from gradstats.kernels import scale, scale_backward, vector

    if wanted is None:
        squares = vector.prepare(factor.grad)
        return lambda grad: (WellConditioned(torch.float32, value=squares(grad)), None)
    plan = scale_backward.prepare(factor.grad, None, gradient_dtype=stored(wanted))

    def in_one_pass(grad: Tensor) -> tuple[Contraction, Tensor | None]:
        _, _, (total,), (value,) = scale.run(plan, grad, None, grad, *(None,) * 6)
        return WellConditioned(torch.float32, value=value), cast(total, wanted)

    return in_one_pass


def of_layer_norm(
    x: Tensor, g: Tensor, weight: Tensor | None, eps: float, rms: bool, dtype: torch.dtype | None
) -> OfNorm | None:
    """Return a function like ``layer_norm_backward``; None for rows too long for the kernel.

    It always computes the gradient of the input.
    """
    from gradstats.kernels import layer_norm

    sums, kept = dtype is not None, stored(dtype)
    plan = layer_norm.prepare(x, g, weight, eps, rms, sums=sums, gradient_dtype=kept)
    return _normalised(plan, None)


def of_group_norm(
    x: Tensor, g: Tensor, weight: Tensor | None, groups: int, eps: float, dtype: torch.dtype | None
) -> OfNorm | None:
    """Return a function like ``group_norm_backward``; None for groups too large for the kernel."""
    from gradstats.kernels import group_norm

    sums, kept = dtype is not None, stored(dtype)
    plan = group_norm.prepare(x, g, weight, groups, eps, sums=sums, gradient_dtype=kept)
    return _normalised(plan)


def of_scale(
    x: Tensor, g: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, wanted: Wanted
) -> OfNorm:
    """Return a function like ``scale_backward``, which takes the statistics after the scale."""
    from gradstats.kernels import scale_backward

    want_input, dtype = wanted
    plan = scale_backward.prepare(
        g, x, weight=weight, mean=mean, rstd=rstd, input_gradient=want_input,
        sums=dtype is not None, gradient_dtype=stored(dtype),
    )  # fmt: skip
    return _normalised(plan, None, None, None)


def _normalised(plan: Any, *rest: None) -> Any:
    """Return a function that runs a plan; None if there is no plan.

    Args:
        plan: of the kernel's launches.
        rest: the kernel's last operands, which are absent here, such as the bounds of packed rows.
    """
    from gradstats.kernels.scale import run

    def backward(g: Tensor, x: Tensor, *read: Tensor | None) -> NormGradients:
        gradient, _, totals, squares = run(plan, x, x, g, *read, *rest)
        norms = [WellConditioned(torch.float32, value=value) for value in squares]
        return NormGradients(gradient, *(totals or (None, None)), *norms)

    return None if plan is None else backward
