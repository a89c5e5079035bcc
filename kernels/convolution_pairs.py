"""Convolutions: inner products of all pairs of per-example weight gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from gradstats.kernels import _config
from gradstats.kernels.convolution import check_two_convolutions, stored


def pairwise_convolution(
    x1: torch.Tensor,
    g1: torch.Tensor,
    x2: torch.Tensor,
    g2: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    *,
    workspace: int = _config.WORKSPACE,
    config: _config.TileConfig | None = None,
) -> torch.Tensor:
    """Inner products of all pairs of per-example weight gradients, chunk by chunk of the weight.

    K[i, j] = sum over chunks c of <G1_i[c], G2_j[c]>: the per-example gradients of some output
    channels are formed in fp32, multiplied over examples, and overwritten by those of the next.

    Args, raises: as `convolution.convolution_sqnorm`, for two factors of one layer, and
        workspace: bytes for the chunks of both factors; a chunk is at least one output channel.
            The product over examples follows torch's fp32 matmul precision.
    Returns:
        fp32 (B1, B2); chunks are summed in fp64.
    Cost: that of both weight gradients, 2 B1 B2 flops per weight, and one write and read of every
    chunk; the copies of `convolution.convolution_sqnorm`.
    """
    layer = kernel, stride, padding, dilation, groups
    first, second = check_two_convolutions(x1, g1, x2, g2, *layer)
    total = torch.zeros((first.batch, second.batch), dtype=torch.float64, device=x1.device)
    if total.numel() == 0:
        return total.float()
    same = x1 is x2 and g1 is g2
    row_bytes = 4 * (first.batch + second.batch) * max(1, first.channels * first.taps)
    rows = max(1, workspace // row_bytes)
    groups_at_once = max(1, rows // max(1, first.outputs))
    rows_at_once = max(1, min(rows, first.outputs))
    for group in range(0, groups, groups_at_once):
        chosen = slice(group, min(group + groups_at_once, groups))
        for row in range(0, first.outputs, rows_at_once):
            part = slice(row, min(row + rows_at_once, first.outputs))
            left = stored(first.select(chosen, part), config)
            right = left if same else stored(second.select(chosen, part), config)
            total += left @ right.T
    return total.float()
