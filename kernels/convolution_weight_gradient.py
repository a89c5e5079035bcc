"""Depthwise convolutions: the weight gradient and per-example squared norms from one kernel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from gradstats.kernels import _check, _config, depthwise
from gradstats.kernels._patches import check_convolution


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
    layer = check_convolution(x, g, kernel, stride, padding, dilation, groups)
    if layer.channels != 1:
        raise _check.KernelInputError(
            "this kernel is for depthwise convolutions, with one input channel in each group; got "
            f"{layer.channels}: take PyTorch's weight gradient, and convolution_sqnorm beside it"
        )
    return depthwise.summed(layer.arranged(), gradient_dtype or x.dtype, config, splits)
