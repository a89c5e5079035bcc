"""Sums of per-row results over the rows of each example."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from gradstats.kernels import _check
from gradstats.kernels._launching import launch_kernel
from gradstats.kernels._tile import segment

CHUNK = 1024  # numbers that a program reads at once


@triton.jit(do_not_specialize=["positions", "rows", "outputs"])
def segment_sum_kernel(
    partial_ptr,  # fp32 or fp64 (rows, outputs) contiguous
    cu_seqlens_ptr,  # int (B + 1,)
    sums_ptr,  # fp64 (B,)
    positions,
    rows,
    outputs,
    CHUNK: tl.constexpr,
):
    """Sum of all outputs of one example's rows, in fp64."""
    example = tl.program_id(0)
    first_row, length, poison = segment(cu_seqlens_ptr, example, positions, rows, RAGGED=True)
    base = partial_ptr + first_row * outputs
    size = tl.cast(length, tl.int64) * outputs
    total = tl.zeros((CHUNK,), tl.float64)
    for start in range(0, size, CHUNK):
        offsets = start + tl.arange(0, CHUNK)
        total += tl.load(base + offsets, mask=offsets < size, other=0.0).to(tl.float64)
    tl.store(sums_ptr + example, tl.sum(total) + poison)


def sum_rows(partial: torch.Tensor, segments: _check.Segments) -> torch.Tensor:
    """Sums of (rows, outputs) over the outputs and rows of each example, fp64 (B,)."""
    if not segments.ragged:
        per_example = partial.view(segments.batch, segments.positions * partial.shape[1])
        return per_example.sum(1, dtype=torch.float64)
    sums = torch.empty((segments.batch,), dtype=torch.float64, device=partial.device)
    if segments.batch:
        launch_kernel(
            segment_sum_kernel,
            segments.batch,
            partial,
            segments.cu_seqlens,
            sums,
            segments.positions,
            partial.shape[0],
            partial.shape[1],
            CHUNK=CHUNK,
            num_warps=4,
        )
    return sums


def nan_where_bounds_decrease(sums: torch.Tensor, segments: _check.Segments) -> torch.Tensor:
    """The sums; all NaN if bounds decrease, as rows of any example may then count for another."""
    if segments.cu_seqlens is None:
        return sums
    return torch.where((segments.cu_seqlens.diff() < 0).any(), float("nan"), sums)
