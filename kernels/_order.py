"""Looked-up rows in the order of their ids, so that equal ids of an example form a run.

The ids of one example are ranked on chip, each against all others; long examples are sorted.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from gradstats.kernels import _check, _config
from gradstats.kernels._launching import launch_kernel
from gradstats.kernels._tile import segment

BLOCK = 16  # ids that one program ranks
COMPARED = 128  # ids that these are compared with at once


@triton.jit(do_not_specialize=["positions", "total_rows", "blocks"])
def order_kernel(
    ids_ptr,  # int (B, T), or packed (N,)
    cu_seqlens_ptr,  # int (B + 1,), read if RAGGED
    places_ptr,  # int64 (2, N): offsets of rows in units, then the first slot of each one's run
    stride_ib,
    stride_it,
    stride_gb,
    stride_gt,
    positions,
    total_rows,
    blocks,
    RAGGED: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
    COMPARED: tl.constexpr,
):
    """The slots of some rows of one example: how many ids are less, or equal and earlier."""
    index = tl.program_id(0)
    example = index // blocks
    position = (index - example * blocks) * BLOCK + tl.arange(0, BLOCK)
    example = tl.cast(example, tl.int64)
    first_row, length, _ = segment(cu_seqlens_ptr, example, positions, total_rows, RAGGED)
    inside = position < length
    row = first_row + tl.cast(position, tl.int64)
    own = tl.load(ids_ptr + example * stride_ib + row * stride_it, mask=inside, other=0)

    # sum over lanes once, at the end: a reduction inside the loop would stall every load
    less = tl.zeros((BLOCK, COMPARED), tl.int32)
    equal = tl.zeros((BLOCK, COMPARED), tl.int32)
    begins = (index % blocks) * BLOCK
    for start in range(0, tl.where(begins < length, length, 0), COMPARED):
        other = start + tl.arange(0, COMPARED)
        rows = first_row + tl.cast(other, tl.int64)
        present = other < length
        ids = tl.load(ids_ptr + example * stride_ib + rows * stride_it, mask=present, other=0)
        below = (ids[None, :] < own[:, None]) & present[None, :]
        less += below.to(tl.int32)
        earlier = (ids[None, :] == own[:, None]) & (other[None, :] < position[:, None])
        equal += earlier.to(tl.int32)
    if RAGGED:
        first_slot = first_row
    else:
        first_slot = example * positions
    run = first_slot + tl.sum(less, axis=1)
    slot = run + tl.sum(equal, axis=1)
    offset = (example * stride_gb + row * stride_gt) // UNIT
    tl.store(places_ptr + slot, offset, mask=inside)
    tl.store(places_ptr + tl.cast(total_rows, tl.int64) + slot, run, mask=inside)


def places(
    ids: torch.Tensor,
    g: torch.Tensor,
    segments: _check.Segments,
    unit: int,
    longest_compared: int,
) -> torch.Tensor:
    """Where the rows of g stand in the order of their examples and ids, int64 (2, N).

    For each slot: the offset of its row in units of `unit` elements, and the first slot of its run
    of equal ids; -1 for packed rows outside every segment.
    """
    rows = segments.total_rows
    if segments.positions > longest_compared:
        return _sorted(ids, g, segments, unit)
    if segments.ragged:
        found = torch.full((2, rows), -1, dtype=torch.int64, device=g.device)
    else:
        found = torch.empty((2, rows), dtype=torch.int64, device=g.device)
    block = min(BLOCK, triton.next_power_of_2(max(segments.positions, 1)))
    blocks = _config.cdiv(segments.positions, block)
    if rows and blocks and segments.batch:
        launch_kernel(
            order_kernel,
            segments.batch * blocks,
            ids,
            segments.cu_seqlens,
            found,
            *segments.strides(ids[..., None])[:2],
            *segments.strides(g)[:2],
            segments.positions,
            rows,
            blocks,
            RAGGED=segments.ragged,
            UNIT=unit,
            BLOCK=block,
            COMPARED=min(COMPARED, triton.next_power_of_2(max(segments.positions, 1))),
            num_warps=4,
        )
    return found


def example_of_rows(segments: _check.Segments) -> torch.Tensor | None:
    """Example of each packed row; -1 or B for rows before and after all segments."""
    if segments.cu_seqlens is None:
        return None
    bounds = segments.cu_seqlens
    rows = torch.arange(segments.total_rows, device=bounds.device, dtype=bounds.dtype)
    return torch.searchsorted(bounds, rows, right=True) - 1


def _sorted(
    ids: torch.Tensor,
    g: torch.Tensor,
    segments: _check.Segments,
    unit: int,
) -> torch.Tensor:
    slots = torch.arange(segments.total_rows, device=g.device)
    example = example_of_rows(segments)
    stride_b, stride_t, _ = segments.strides(g)
    if example is None:
        example = slots // segments.positions
        by_id, order = torch.sort(ids.contiguous(), dim=1, stable=True)
        values, row = by_id.flatten(), order.flatten()
    else:
        by_id = torch.argsort(ids, stable=True)
        row = by_id[torch.argsort(example[by_id], stable=True)]
        values = ids[row]
    offset = (example * stride_b + row * stride_t) // unit
    first = torch.ones_like(slots, dtype=torch.bool)
    first[1:] = (values[1:] != values[:-1]) | (example[1:] != example[:-1])
    run = torch.where(first, slots, 0).cummax(0).values
    takes_part = (example >= 0) & (example < segments.batch)
    return torch.stack((offset, torch.where(takes_part, run, -1)))
