"""Per-example gradients that are a sum of vectors over positions: biases, scales, shifts."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from gradstats.kernels import _check, _config, _streaming
from gradstats.kernels._launching import Launch, launch_kernel, remembered
from gradstats.kernels._results import added
from gradstats.kernels._tile import example_base, load_tile, multiple, segment


@triton.jit
def column_sums(
    base,  # pointer to the first row of one example
    row_stride,
    length,
    columns,  # [COLUMNS] features
    column_stride,
    features,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):
    """[COLUMNS] sums over the rows of one example.

    Lanes are summed once at the end: a reduction inside the loop would stall every load.
    """
    inner = tl.arange(0, INNER)
    sums = tl.zeros((INNER, COLUMNS), tl.float32)
    for row in range(0, length, INNER):
        tile = load_tile(base, row + inner, row_stride, length, columns, column_stride, features)
        sums += tile.to(tl.float32)
    return tl.sum(sums, axis=0)


@triton.jit(do_not_specialize=["batch", "positions", "total_rows", "tiles"])
def vector_kernel(
    v1_ptr,  # (B, T, d) or packed (N, d)
    v2_ptr,  # a second operand with the same segments, read if PAIRED
    cu_seqlens_ptr,  # int (B + 1,), read if RAGGED
    partial_ptr,  # fp64 (B, tiles)
    stride_1b,
    stride_1t,
    stride_1d,
    stride_2b,
    stride_2t,
    stride_2d,
    batch,
    positions,
    total_rows,
    features,
    tiles,
    PAIRED: tl.constexpr,
    RAGGED: tl.constexpr,
    RUN: tl.constexpr,  # positions that are adjacent, see `_check.Segments`
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):
    """partial[b, tile] = (sum_t v1_bt) . (sum_t v2_bt) over the features of one tile."""
    if RUN > 1:
        positions = multiple(positions, RUN)
        stride_1b, stride_1d = multiple(stride_1b, RUN), multiple(stride_1d, RUN)
        stride_2b, stride_2d = multiple(stride_2b, RUN), multiple(stride_2d, RUN)
    index = tl.program_id(0)
    example = index // tiles
    columns = (index % tiles) * COLUMNS + tl.arange(0, COLUMNS)
    first_row, length, poison = segment(cu_seqlens_ptr, example, positions, total_rows, RAGGED)

    base = example_base(v1_ptr, example, stride_1b, first_row, stride_1t)
    first = column_sums(base, stride_1t, length, columns, stride_1d, features, COLUMNS, INNER)
    second = first
    if PAIRED:
        base = example_base(v2_ptr, example, stride_2b, first_row, stride_2t)
        second = column_sums(base, stride_2t, length, columns, stride_2d, features, COLUMNS, INNER)
    tl.store(partial_ptr + index, tl.sum(first * second) + poison)


@triton.jit(do_not_specialize=["positions", "total_rows", "tiles"])
def vector_sum_kernel(
    v_ptr,  # (B, T, d) or packed (N, d)
    cu_seqlens_ptr,  # int (B + 1,), read if RAGGED
    sums_ptr,  # fp32 (B, d) contiguous
    stride_b,
    stride_t,
    stride_d,
    positions,
    total_rows,
    features,
    tiles,
    RAGGED: tl.constexpr,
    RUN: tl.constexpr,  # as of `vector_kernel`
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):
    """sums[b] = sum_t v_bt over the features of one tile."""
    if RUN > 1:
        positions = multiple(positions, RUN)
        stride_b, stride_d = multiple(stride_b, RUN), multiple(stride_d, RUN)
    index = tl.program_id(0)
    example = index // tiles
    columns = (index % tiles) * COLUMNS + tl.arange(0, COLUMNS)
    first_row, length, poison = segment(cu_seqlens_ptr, example, positions, total_rows, RAGGED)
    base = example_base(v_ptr, example, stride_b, first_row, stride_t)
    sums = column_sums(base, stride_t, length, columns, stride_d, features, COLUMNS, INNER)
    output = sums_ptr + tl.cast(example, tl.int64) * features + columns
    tl.store(output, sums + poison, mask=columns < features)


def vector_sum(
    v: torch.Tensor,
    *,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    segments: _check.Segments | None = None,
    config: _config.TileConfig | None = None,
) -> torch.Tensor:
    """Per-example sums over positions: the gradients of a bias.

    sum_i = sum_t v_it

    Args: as `vector_sqnorm`; `segments` passes bounds that were checked already.
    Returns:
        fp32 (B, d).
    Raises, cost: as `vector_sqnorm`.
    """
    segments = segments or _check.check_operands(v, v, cu_seqlens, max_seqlen)
    features = v.shape[-1]
    config = config or _streaming.choose_vector(features)
    tiles = _config.cdiv(features, config.columns)
    sums = torch.empty((segments.batch, features), dtype=torch.float32, device=v.device)
    if sums.numel():
        launch_kernel(
            vector_sum_kernel,
            segments.batch * tiles,
            v,
            segments.cu_seqlens,
            sums,
            *segments.strides(v),
            segments.positions,
            segments.total_rows,
            features,
            tiles,
            RAGGED=segments.ragged,
            RUN=segments.adjacent_positions(v),
            COLUMNS=config.columns,
            INNER=config.inner,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
    return sums


def vector_sqnorm(
    v: torch.Tensor,
    *,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    config: _config.TileConfig | None = None,
) -> torch.Tensor:
    """Squared norms of per-example sums over positions.

    sqnorm_i = |sum_t v_it|^2

    Args:
        v: (B, T, d), or packed (N, d) with cu_seqlens; bf16, fp16 or fp32, any strides.
        cu_seqlens: int (B + 1,) first rows of the examples, on the host or the device.
        max_seqlen: with device bounds, the longest segment; avoids a wait for the device.
        config: overrides the tile table.
    Returns:
        fp64 (B,).
    Raises:
        KernelInputError: before any launch, for inputs that no kernel serves.
    Cost: one read of `v`.
    """
    return _vector_products(v, v, cu_seqlens, max_seqlen, paired=False, config=config)


def vector_inner(
    v1: torch.Tensor,
    v2: torch.Tensor,
    *,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    config: _config.TileConfig | None = None,
) -> torch.Tensor:
    """Inner products of the i-th per-example sums of two operands with the same segments.

    inner_i = (sum_t v1_it) . (sum_t v2_it)

    Args, returns, raises and cost: as `vector_sqnorm`.
    """
    if v1.shape != v2.shape:
        raise _check.KernelInputError(
            f"both operands must have one shape; got {tuple(v1.shape)} and {tuple(v2.shape)}: "
            "pass output gradients of one layer, with as many examples and positions on either side"
        )
    return _vector_products(v1, v2, cu_seqlens, max_seqlen, paired=True, config=config)


def _vector_products(
    v1: torch.Tensor,
    v2: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    max_seqlen: int | None,
    *,
    paired: bool,
    config: _config.TileConfig | None,
) -> torch.Tensor:
    bounds, shape, launch = _plan(vector_kernel, (v1, v2), cu_seqlens, max_seqlen, paired, config)
    partial = torch.empty(shape, dtype=torch.float64, device=v1.device)
    if launch is not None:
        launch(v1, v2, bounds, partial)
    return added(partial)


@remembered
def _plan(
    kernel: Any,
    operands: tuple[torch.Tensor, torch.Tensor],
    cu_seqlens: torch.Tensor | None,
    max_seqlen: int | None,
    paired: bool,
    config: _config.TileConfig | None,
) -> tuple[torch.Tensor | None, tuple[int, int], Launch | None]:
    """(bounds, shape of the partial results, launch): None where there is nothing to compute."""
    v1, v2 = operands
    segments = _check.check_operands(v1, v2, cu_seqlens, max_seqlen)
    features = v1.shape[-1]
    config = config or _streaming.choose_vector(features)
    tiles = _config.cdiv(features, config.columns)
    launch = None
    if segments.batch * tiles:
        launch = Launch(
            kernel,
            segments.batch * tiles,
            *segments.strides(v1),
            *segments.strides(v2),
            segments.batch,
            segments.positions,
            segments.total_rows,
            features,
            tiles,
            PAIRED=paired,
            RAGGED=segments.ragged,
            RUN=segments.adjacent_positions(v1, v2),
            COLUMNS=config.columns,
            INNER=config.inner,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
    return segments.cu_seqlens, (segments.batch, tiles), launch
