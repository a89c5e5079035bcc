"""What the kernels contract, prepared for operands that lie in memory alike.

Which form costs least, which kernels run, and by which tiles, is decided from shapes, strides,
dtypes and alignment. What is prepared holds the decisions and no tensor. It takes operands of the
same layout in any view, as the kernels read addresses and know the strides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gradstats._factors import Elementwise, Outer, Patches, Vector, cast, weight_gradient
from gradstats.contractions import _triton, _vector
from gradstats.contractions._outer import cheapest_form, is_of_images
from gradstats.contractions._patches import form_on_chip
from gradstats.contractions._result import Contraction, WellConditioned
from gradstats.contractions._tensor_cores import cut_off_of
from gradstats.contractions._triton_layers import layer_of, stored

# A contraction with Σ_i G_i, if that is wanted, of left and right operands or of a gradient.
OfOuter = Callable[[Tensor, Tensor], tuple[Contraction, Tensor | None]]
OfBias = Callable[[Tensor], tuple[Contraction, Tensor | None]]


def layout_of(grad: Tensor, x: Tensor) -> tuple[Any, ...] | None:
    """Return what decisions about CUDA operands depend upon; None if they are made each time."""
    from gradstats.kernels._calls import are_plain, is_here
    from gradstats.kernels._precision import tf32_allowed

    if torch._C._is_any_autocast_enabled() or not (are_plain(grad, x) and is_here(grad)):
        return None
    return (
        grad.dtype == torch.float32 and tf32_allowed(),
        grad.shape, grad.stride(), grad.dtype, grad.device, grad.data_ptr() % 16,
        x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16,
    )  # fmt: skip


def of_outer(factor: Outer, *, with_sum: bool) -> OfOuter | None:
    """Return what ``sqnorm_and_sum`` does, or ``sqnorm``; None where that is not the kernels' work.

    Args:
        factor: of the operands to prepare for, which the kernels serve.
        with_sum: Σ_i G_i is wanted too.
    """
    (_, groups, positions, p), q = factor.left.shape, factor.right.shape[3]
    if groups > 1 or not positions or factor.permutation is not None or factor.shape != (p, q):
        return None
    if with_sum and is_of_images(factor):
        return None
    from gradstats.kernels import direct, gram, rank_one, weight_gradient

    a, g = _triton.operands_of(factor)
    form = cheapest_form(factor, with_sum=with_sum, on_chip=True)
    if form == "direct" and with_sum:
        both = weight_gradient.prepare(a, g)

        def formed(left: Tensor, right: Tensor) -> tuple[Contraction, Tensor | None]:
            total, value = both(right, left)
            return WellConditioned((), torch.float32, value), total

        return formed
    squares: Any  # as ``rank_one_sqnorm`` takes operands
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
            norms = WellConditioned((), torch.float32, squares(right, left))
        if not with_sum:
            return norms, None
        return norms, torch.mm(left.reshape(-1, p).t(), right.reshape(-1, q))

    return apart


def of_patches(factor: Patches, *, with_sum: bool) -> OfOuter | None:
    """Return the same for a convolution's gradient and input; None for a depthwise one."""
    if factor.shape[1] == 1:
        return None
    from gradstats.kernels import convolution, convolution_gram

    layer, is_gram = layer_of(factor), form_on_chip(factor) == "gram"
    contract: Any
    if is_gram:
        numbers = _triton.rounding(*factor.sides, cut_off=0.0)
        contract = convolution_gram.prepare(*factor.sides, layer, numbers)
    else:
        contract = convolution.prepare(*factor.sides, layer)
    shape, geometry = factor.shape, factor.geometry

    def contracted(grad: Tensor, x: Tensor) -> tuple[Contraction, Tensor | None]:
        found = contract(x, grad)
        norms = Contraction(*found) if is_gram else WellConditioned((), torch.float32, found)
        return norms, weight_gradient(x, grad, shape, geometry) if with_sum else None

    return contracted


def of_bias(factor: Elementwise | Vector, wanted: torch.dtype | None) -> OfBias:
    """Return what contracts the gradients of a bias, whose sum is wanted in a dtype, or not."""
    if isinstance(factor, Vector):

        def summed(grad: Tensor) -> tuple[Contraction, Tensor | None]:
            total = None if wanted is None else cast(grad.sum(0), wanted)
            return _vector.sqnorm_of(grad), total

        return summed
    from gradstats.kernels import scale_backward, vector

    if wanted is None:
        squares = vector.prepare(factor.grad)
        return lambda grad: (WellConditioned((), torch.float32, squares(grad)), None)
    both = scale_backward.prepare_shift(factor.grad, stored(wanted))

    def in_one_pass(grad: Tensor) -> tuple[Contraction, Tensor | None]:
        total, value = both(grad)
        return WellConditioned((), torch.float32, value), cast(total, wanted)

    return in_one_pass
