"""Normalisation layers by the kernels, with gradients and squared norms in one pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradstats._factors import Factor, cast
from gradstats.capture.uses._uses import Use, free_of_views, unseen
from gradstats.contractions import Fused
from gradstats.contractions._triton_layers import NormGradients

if TYPE_CHECKING:
    from gradstats.capture.rules._affine import AffineFactors


def _normalisation_again(ctx, grad: Tensor, x: Tensor, weight: Tensor | None, *statistics: Tensor):
    if not ctx.needs_input_grad[3]:
        return ()
    return ((3, ctx.layer.input_gradient(ctx.use.nodes, grad, x, weight, *statistics)),)


class NormalisationUse(torch.autograd.Function):
    """x̂ w + b, whose backward computes all gradients and the squared norms in one pass.

    Shapes: x (B, *, features) or (B, C, *); weight and bias as the layer has them, or None.
    """

    @staticmethod
    def forward(ctx, use, layer, run: Callable, x, weight, bias, *statistics):
        ctx.use, ctx.layer = use, layer
        ctx.save_for_backward(x, weight, *statistics)
        ctx.parameters = [None if p is None else (p.shape, p.dtype) for p in (weight, bias)]
        return free_of_views(run(x, weight, bias, *statistics))

    @staticmethod
    @unseen(_normalisation_again)
    def backward(ctx, grad, x, weight, *statistics):
        use, layer = ctx.use, ctx.layer
        wanted = [need and use.tracker.trains for need in ctx.needs_input_grad[4:6]]
        # Under autocast layers normalise in a wider dtype than the input's, which the gradient has.
        input_dtype = x.dtype
        if grad.dtype != input_dtype:
            dtype = torch.promote_types(input_dtype, grad.dtype)
            grad, x = cast(grad, dtype), cast(x, dtype)
        # The kernel returns both sums in one dtype; if the parameters' differ, each is cast.
        dtypes = [ctx.parameters[index][1] for index in range(2) if wanted[index]]
        total_dtype = dtypes[0] if dtypes else None
        if len(dtypes) == 2 and dtypes[0] != dtypes[1]:
            total_dtype = torch.float32
        asked = ctx.needs_input_grad[3], total_dtype
        prepared = layer.prepared(use, asked, grad, x, weight, *statistics)
        if prepared is not None:
            result = prepared(grad, x, weight, *statistics)
        else:
            result = layer.backward(grad, x, weight, asked, *statistics)
        totals: list[Tensor | None] = [None, None]
        for index, total in enumerate((result.scale, result.shift)):
            if wanted[index]:
                assert total is not None
                shape, dtype = ctx.parameters[index]
                totals[index] = cast(total.view(shape), dtype)
        if prepared is not None or (use.direct and use.all_sole):
            if use.is_due():
                use.finish(layer.of_tracked(result.scale_norms, result.shift_norms))
        else:
            use.deliver(_factors(use, layer, result, totals, grad, x, *statistics))
        grad_x = None if result.input is None else cast(result.input, input_dtype)
        return (None, None, None, grad_x, *totals, *(None for _ in statistics))


def _factors(
    use: Use,
    layer: AffineFactors,
    result: NormGradients,
    totals: list[Tensor | None],
    grad: Tensor,
    x: Tensor,
    *statistics: Tensor,
) -> list[Factor | Fused]:
    """Return what to deliver for each tracked parameter; factors only if it has several uses."""
    sole = [use.is_sole(position) for position in range(len(use.nodes))]
    factors: list = [None] * len(sole) if all(sole) else layer(grad, x, *statistics)
    norms = layer.of_tracked(result.scale_norms, result.shift_norms)
    return [
        Fused(factor, norm, total) if alone else factor
        for alone, factor, norm, total in zip(
            sole, factors, norms, layer.of_tracked(*totals), strict=True
        )
    ]
