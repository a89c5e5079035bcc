"""Per-example squared norms and diagonal inner products, tile by tile of the weight gradient."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from gradstats.kernels import _check, _config
from gradstats.kernels._launching import Launch, launch_of, remembered
from gradstats.kernels._results import added
from gradstats.kernels._tile import dot, example_base, grouped, load_tile, multiple, segment

GROUP = 8  # rows of tiles walked together, so that neighbours share operands in L2


@triton.jit
def gradient_tile(
    a_base,  # pointer to the first row of one example's inputs
    g_base,  # pointer to the first row of its output gradients
    rows,  # [ROWS] output features
    columns,  # [COLUMNS] input features
    stride_at,
    stride_ad,
    stride_gt,
    stride_gd,
    length,
    d_in,
    d_out,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):
    """[ROWS, COLUMNS] tile of one example's weight gradient sum_t g_t a_t^T."""
    inner = tl.arange(0, INNER)
    gradient = tl.zeros((ROWS, COLUMNS), tl.float32)
    for position in range(0, length, INNER):
        # the bases move and the offsets inside the tile stay, so they are computed once
        g = load_tile(g_base, inner, stride_gt, length - position, rows, stride_gd, d_out)
        a = load_tile(a_base, inner, stride_at, length - position, columns, stride_ad, d_in)
        gradient = dot(g.T, a, gradient, PRECISION)
        g_base += tl.cast(INNER, tl.int64) * stride_gt
        a_base += tl.cast(INNER, tl.int64) * stride_at
    return gradient


@triton.jit(do_not_specialize=["positions1", "positions2", "total_rows1", "total_rows2"])
def direct_kernel(
    a1_ptr,  # (B, T, d_in) or packed (N, d_in) inputs of the first factor
    g1_ptr,  # (B, T, d_out) or packed (N, d_out) output gradients of the first factor
    a2_ptr,  # the second factor, read if PAIRED
    g2_ptr,
    cu_seqlens1_ptr,  # int (B + 1,), read if RAGGED
    cu_seqlens2_ptr,
    partial_ptr,  # fp64 (B, tiles)
    stride_a1b,
    stride_a1t,
    stride_a1d,
    stride_g1b,
    stride_g1t,
    stride_g1d,
    stride_a2b,
    stride_a2t,
    stride_a2d,
    stride_g2b,
    stride_g2t,
    stride_g2d,
    positions1,
    positions2,
    total_rows1,
    total_rows2,
    d_in,
    d_out,
    PAIRED: tl.constexpr,
    RAGGED: tl.constexpr,
    RUN: tl.constexpr,  # positions that are adjacent, see `_check.Segments`
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
):
    """partial[b, tile] = sum over one tile of G1_b * G2_b, or of G1_b squared."""
    if RUN > 1:
        positions1, positions2 = multiple(positions1, RUN), multiple(positions2, RUN)
        stride_a1b, stride_a1d = multiple(stride_a1b, RUN), multiple(stride_a1d, RUN)
        stride_g1b, stride_g1d = multiple(stride_g1b, RUN), multiple(stride_g1d, RUN)
        stride_a2b, stride_a2d = multiple(stride_a2b, RUN), multiple(stride_a2d, RUN)
        stride_g2b, stride_g2d = multiple(stride_g2b, RUN), multiple(stride_g2d, RUN)
    index = tl.program_id(0)
    row_tiles = tl.cdiv(d_out, ROWS)
    column_tiles = tl.cdiv(d_in, COLUMNS)
    tiles = row_tiles * column_tiles
    example = index // tiles
    row_tile, column_tile = grouped(index - example * tiles, row_tiles, column_tiles, GROUP_ROWS)
    rows = row_tile * ROWS + tl.arange(0, ROWS)
    columns = column_tile * COLUMNS + tl.arange(0, COLUMNS)

    first_row, length, poison = segment(cu_seqlens1_ptr, example, positions1, total_rows1, RAGGED)
    first = gradient_tile(
        example_base(a1_ptr, example, stride_a1b, first_row, stride_a1t),
        example_base(g1_ptr, example, stride_g1b, first_row, stride_g1t),
        rows, columns, stride_a1t, stride_a1d, stride_g1t, stride_g1d, length, d_in, d_out,
        PRECISION, ROWS, COLUMNS, INNER,
    )  # fmt: skip
    second = first
    if PAIRED:
        first_row, length, poison2 = segment(
            cu_seqlens2_ptr, example, positions2, total_rows2, RAGGED
        )
        poison += poison2
        second = gradient_tile(
            example_base(a2_ptr, example, stride_a2b, first_row, stride_a2t),
            example_base(g2_ptr, example, stride_g2b, first_row, stride_g2t),
            rows, columns, stride_a2t, stride_a2d, stride_g2t, stride_g2d, length, d_in, d_out,
            PRECISION, ROWS, COLUMNS, INNER,
        )  # fmt: skip
    tl.store(partial_ptr + index, tl.sum(first * second) + poison)


def direct_sqnorm(
    a: torch.Tensor,
    g: torch.Tensor,
    *,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    config: _config.TileConfig | None = None,
) -> torch.Tensor:
    """Squared norms of per-example weight gradients, formed tile by tile and never stored.

    sqnorm_i = |sum_t g_it a_it^T|_F^2: a sum of squares, so never negative and well conditioned.

    Args:
        a: layer inputs (B, T, d_in), or packed (N, d_in) with cu_seqlens; bf16, fp16 or fp32,
            any strides.
        g: gradients with respect to the outputs, (B, T, d_out) or (N, d_out), same dtype.
        cu_seqlens: int (B + 1,) first rows of the examples, on the host or the device.
        max_seqlen: with device bounds, the longest segment; avoids a wait for the device.
        config: overrides the tile table.
    Returns:
        fp64 (B,).
    Raises:
        KernelInputError: before any launch, for inputs that no kernel serves.
    Cost: 2 T d_in d_out flops per example, as the weight gradient; workspace 8 bytes per tile.
    Source: Rochette et al., arXiv 1912.06015.
    """
    precision = _check.precision_of(a.dtype)
    plan = _plan_squares(direct_kernel, (a, g), cu_seqlens, max_seqlen, precision, config)
    return plan(a, g)


def prepare(a: torch.Tensor, g: torch.Tensor) -> _Plan:
    """What `direct_sqnorm` does, for dense operands of the same layout."""
    precision = _check.precision_of(a.dtype)
    return _plan_squares(direct_kernel, (a, g), None, None, precision, None)


def direct_inner(
    a1: torch.Tensor,
    g1: torch.Tensor,
    a2: torch.Tensor,
    g2: torch.Tensor,
    *,
    cu_seqlens1: torch.Tensor | None = None,
    cu_seqlens2: torch.Tensor | None = None,
    max_seqlen1: int | None = None,
    max_seqlen2: int | None = None,
    config: _config.TileConfig | None = None,
) -> torch.Tensor:
    """Inner products of the i-th per-example weight gradients of two factors, tile by tile.

    inner_i = <sum_t g1_it a1_it^T, sum_s g2_is a2_is^T>; the factors may differ in T.

    Args, returns, raises: as `direct_sqnorm`, for two factors of equal B, d_in and d_out.
    Cost: 2 (T1 + T2) d_in d_out flops per pair.
    """
    first, second = _check.check_two_factors(
        a1, g1, a2, g2, cu_seqlens1, cu_seqlens2, max_seqlen1, max_seqlen2
    )
    _check.check_batches(first.batch, second.batch)
    plan = _plan(direct_kernel, (a1, g1, a2, g2), first, second, config, paired=True)
    return plan(a1, g1, a2, g2)


class _Plan(NamedTuple):
    """All of a call but its tensors; dense operands have no bounds."""

    bounds: tuple[torch.Tensor | None, torch.Tensor | None]
    shape: tuple[int, int]  # of the partial results: examples and tiles
    launch: Launch | None  # None where there is nothing to compute

    def __call__(self, a: torch.Tensor, g: torch.Tensor, *second: torch.Tensor) -> torch.Tensor:
        """Inner products of two factors of the plan's layout, or squared norms of one."""
        partial = torch.empty(self.shape, dtype=torch.float64, device=a.device)
        if self.launch is not None:
            self.launch(a, g, *(second or (a, g)), *self.bounds, partial)
        return added(partial)


@remembered
def _plan_squares(
    kernel: Any,
    operands: tuple[torch.Tensor, torch.Tensor],
    cu_seqlens: torch.Tensor | None,
    max_seqlen: int | None,
    _precision: str,  # part of the cache's key
    config: _config.TileConfig | None,
) -> _Plan:
    segments = _check.check_operands(*operands, cu_seqlens, max_seqlen)
    return _plan(kernel, (*operands, *operands), segments, segments, config)


def _plan(
    kernel: Any,
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    segments1: _check.Segments,
    segments2: _check.Segments,
    config: _config.TileConfig | None,
    *,
    paired: bool = False,
) -> _Plan:
    a1, g1, a2, g2 = operands
    d_in, d_out = a1.shape[-1], g1.shape[-1]
    run = segments1.adjacent_positions(*operands)
    kind = _check.kind(a1, run > 1 or _check.is_aligned(*operands))
    operation = "diagonal" if paired else "direct"
    config = config or _config.choose(operation, d_out, d_in, *kind, segments1.batch)
    tiles = _config.tiles_of(config, d_out, d_in)
    launch = None
    if segments1.batch * tiles:
        launch = launch_of(
            kernel,
            segments1.batch * tiles,
            *segments1.strides(a1),
            *segments1.strides(g1),
            *segments2.strides(a2),
            *segments2.strides(g2),
            segments1.positions,
            segments2.positions,
            segments1.total_rows,
            segments2.total_rows,
            d_in,
            d_out,
            PAIRED=paired,
            RAGGED=segments1.ragged,
            RUN=run,
            GROUP_ROWS=GROUP,
            **config.of_gradients,
        )
    bounds = (segments1.cu_seqlens, segments2.cu_seqlens)
    return _Plan(bounds, (segments1.batch, tiles), launch)
