"""Depthwise convolutions: the weight gradient and per-example squared norms from one kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from gradstats.kernels import _check, _config, depthwise
from gradstats.kernels._arranged import Arranged
from gradstats.kernels._launching import remembered
from gradstats.kernels._patches import check_convolution
from gradstats.kernels._results import added


def convolution_weight_gradient_sqnorm(
    x: torch.Tensor,
    g: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    *,
    gradient_dtype: torch.dtype | None = None,
    config: _config.TileConfig | None = None,
    splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A depthwise layer's weight gradient and the squared norm of every example's share in it.

    Args, raises: as `convolution.convolution_sqnorm`, and
        gradient_dtype: dtype of the gradient; None means that of x. Sums are fp32 either way.
        splits: overrides the number of ranges that the examples are split into.
        KernelInputError also for layers with several input channels in each group.
    Returns:
        (gradient (O, 1, *kernel), sqnorm fp64 (B,)).
    Cost: that of the weight gradient alone; workspace 8 bytes per example and tile, 4 bytes per
    split and weight where the examples are split, and the copies of
    `convolution.convolution_sqnorm`.
    """
    layer = (tuple(kernel), tuple(stride), tuple(padding), tuple(dilation), groups)
    plan = _plan(depthwise.depthwise_kernel, (x, g), layer, gradient_dtype, config, splits)
    gradient, value = plan(x, g)
    return gradient, value


def prepare(x: torch.Tensor, g: torch.Tensor, geometry: tuple) -> Arranged:
    """What `convolution_weight_gradient_sqnorm` does, for operands of the same layout."""
    return _plan(depthwise.depthwise_kernel, (x, g), geometry, None, None, None)


@remembered
def _plan(
    _: Any,
    operands: tuple[torch.Tensor, torch.Tensor],
    geometry: tuple,
    gradient_dtype: torch.dtype | None,
    config: _config.TileConfig | None,
    splits: int | None,
) -> Arranged:
    layer = check_convolution(*operands, *geometry).arranged()
    if layer.channels != 1:
        raise _check.KernelInputError(
            "this kernel is for depthwise convolutions, with one input channel in each group; got "
            f"{layer.channels}: take PyTorch's weight gradient, and convolution_sqnorm beside it"
        )
    plan = depthwise.plan(layer, layer, "sum", config, splits)
    shape, dtype = layer.weight_shape, gradient_dtype or layer.x.dtype

    def summed(x: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output, total = plan.both(x, g, x, g, None)
        # without examples there is nothing to sum
        return total.sum(0).view(shape).to(dtype), added(output)

    return layer.computed(operands, summed)
