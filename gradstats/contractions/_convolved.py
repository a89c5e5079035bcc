"""PyTorch's own weight gradient of a convolution, as a training step has it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradstats._factors import ConvolutionGeometry


def weight_gradient(
    x: Tensor, grad: Tensor, sizes: Sequence[int], geometry: ConvolutionGeometry
) -> Tensor:
    """Return Σ_i G_i of a convolution's weight, in the operands' dtype.

    Args:
        x: (B, C, *spatial).
        grad: (B, O, *positions).
        sizes: of the weight, (O, C / groups, *kernel).
        geometry: how patches are cut.
    """
    # Only the weight's shape is read: one number stands for all of it.
    weight = x.new_empty(1).expand(tuple(sizes))
    return torch.ops.aten.convolution_backward(
        grad, x, weight, None, geometry.stride, geometry.padding, geometry.dilation, False,
        [0] * len(geometry.stride), geometry.groups, [False, True, False],
    )[1]  # fmt: skip
