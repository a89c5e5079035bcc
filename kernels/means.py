"""Means that the input gradient of a norm layer subtracts, for rows and groups of any width.

Rows and groups that one program holds on chip need no such pass (`layer_norm.py`, `group_norm.py`);
wider ones are walked block by block.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from gradstats.kernels import _streaming
from gradstats.kernels._launching import launch_kernel
from gradstats.kernels._tile import load_tile
from gradstats.kernels.statistics import Statistics


@triton.jit(do_not_specialize=["batch", "groups", "positions"])
def means_kernel(
    x_ptr,  # (B, T, C)
    g_ptr,  # (B, T, C)
    weight_ptr,  # (C,) contiguous, read if WEIGHT
    mean_ptr,  # fp32 (B, groups)
    rstd_ptr,  # fp32 (B, groups)
    output_ptr,  # fp32 (2, B, groups) contiguous: means of g weight, of g weight x_hat
    stride_xb,
    stride_xg,  # from one group to the next
    stride_xt,
    stride_xd,
    stride_gb,
    stride_gg,
    stride_gt,
    stride_gd,
    stride_wg,  # from the weights of one group to those of the next
    batch,
    groups,
    positions,  # of one group
    features,  # of one group
    RMS: tl.constexpr,
    WEIGHT: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):
    """Means over the positions and features of one group of one example."""
    index = tl.program_id(0)
    example = tl.cast(index // groups, tl.int64)
    group = tl.cast(index % groups, tl.int64)
    x_base = x_ptr + example * stride_xb + group * stride_xg
    g_base = g_ptr + example * stride_gb + group * stride_gg
    mean, rstd = tl.load(mean_ptr + index), tl.load(rstd_ptr + index)
    lanes, inner = tl.arange(0, COLUMNS), tl.arange(0, INNER)
    shift = tl.zeros((INNER, COLUMNS), tl.float32)
    scale = tl.zeros((INNER, COLUMNS), tl.float32)
    for column in range(0, features, COLUMNS):
        columns = column + lanes
        if WEIGHT:
            weight = tl.load(
                weight_ptr + group * stride_wg + columns, mask=columns < features, other=0.0
            ).to(tl.float32)
        for row in range(0, positions, INNER):
            rows = row + inner
            x = load_tile(x_base, rows, stride_xt, positions, columns, stride_xd, features)
            g = load_tile(g_base, rows, stride_gt, positions, columns, stride_gd, features)
            g = g.to(tl.float32)
            if WEIGHT:
                g = g * weight[None, :]
            if not RMS:
                shift += g
            scale += g * ((x.to(tl.float32) - mean) * rstd)
    elements = tl.cast(positions, tl.float32) * features
    tl.store(output_ptr + index, tl.sum(shift) / elements)
    stride_output = tl.cast(batch, tl.int64) * groups
    tl.store(output_ptr + stride_output + index, tl.sum(scale) / elements)


def with_means(
    statistics: Statistics,
    x: torch.Tensor,
    g: torch.Tensor,
    weight: torch.Tensor | None,
    rms: bool = False,
) -> Statistics:
    """Statistics of x, of rows or of groups of channels, completed by the means of its gradient.

    Args:
        statistics: as `row_statistics` or `group_statistics` return them for x.
        x, g: (B, T, C), or packed (N, C) for rows.
        weight: (C,) the layer's scale; None for 1.
        rms: the mean was not subtracted, so the gradient has no mean of g weight.
    Cost: one read of both operands.
    """
    if x.dim() == 2:
        x, g = x[None], g[None]
    batch, positions, channels = x.shape
    if statistics.by_position:
        groups, positions, features, step = positions, 1, channels, 0
        strides = [(s.stride(0), s.stride(1), 0, s.stride(2)) for s in (x, g)]
    else:
        features = statistics.features_per_group
        groups, step = channels // features, features
        strides = [(s.stride(0), features * s.stride(2), s.stride(1), s.stride(2)) for s in (x, g)]
    config = _streaming.choose_scale(positions, features)
    output = torch.empty((2, batch, groups), dtype=torch.float32, device=x.device)
    if x.numel():
        launch_kernel(
            means_kernel,
            batch * groups,
            x,
            g,
            None if weight is None else weight.contiguous(),
            statistics.mean,
            statistics.rstd,
            output,
            *strides[0],
            *strides[1],
            step,
            batch,
            groups,
            positions,
            features,
            RMS=rms,
            WEIGHT=weight is not None,
            **config.of_streams,
        )
    shift, scale = output.view(2, *statistics.mean.shape)
    return dataclasses.replace(statistics, shift_mean=shift, scale_mean=scale)
