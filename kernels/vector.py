"""Per-example gradients that are a sum of vectors over positions: biases, scales, shifts."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from gradstats.kernels import _check, _config, _streaming
from gradstats.kernels._launching import Launch, launch_of, remembered
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

    Lanes are summed once, at the end: a reduction inside the loop would stall every load.
    """
    inner = tl.arange(0, INNER)
    sums = tl.zeros((INNER, COLUMNS), tl.float32)
    for row in range(0, length, INNER):
        tile = load_tile(base, row + inner, row_stride, length, columns, column_stride, features)
        sums += tile.to(tl.float32)
    return tl.sum(sums, axis=0)


@triton.jit(do_not_specialize=["positions", "total_rows", "tiles"])
def vector_kernel(
    v_ptr,  # (B, T, d) or packed (N, d)
    cu_seqlens_ptr,  # int (B + 1,), read if RAGGED
    output_ptr,  # fp64 (B, tiles) if SQUARES, else fp32 (B, d) contiguous
    stride_b,
    stride_t,
    stride_d,
    positions,
    total_rows,
    features,
    tiles,
    SQUARES: tl.constexpr,
    RAGGED: tl.constexpr,
    RUN: tl.constexpr,  # positions that are adjacent, see `_check.Segments`
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):
    """sum_t v_bt of the features of one tile, or |sum_t v_bt|^2 over them."""
    if RUN > 1:
        positions = multiple(positions, RUN)
        stride_b, stride_d = multiple(stride_b, RUN), multiple(stride_d, RUN)
    index = tl.program_id(0)
    example = index // tiles
    columns = (index % tiles) * COLUMNS + tl.arange(0, COLUMNS)
    first_row, length, poison = segment(cu_seqlens_ptr, example, positions, total_rows, RAGGED)
    base = example_base(v_ptr, example, stride_b, first_row, stride_t)
    sums = column_sums(base, stride_t, length, columns, stride_d, features, COLUMNS, INNER)
    if SQUARES:
        tl.store(output_ptr + index, tl.sum(sums * sums) + poison)
    else:
        output = output_ptr + tl.cast(example, tl.int64) * features + columns
        tl.store(output, sums + poison, mask=columns < features)


def vector_sum(
    v: torch.Tensor,
    *,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    config: _config.TileConfig | None = None,
) -> torch.Tensor:
    """Per-example sums over positions: the gradients of a bias.

    sum_i = sum_t v_it

    Args: as `vector_sqnorm`.
    Returns:
        fp32 (B, d).
    Raises, cost: as `vector_sqnorm`.
    """
    return _plan(vector_kernel, (v,), cu_seqlens, max_seqlen, False, config)(v)


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
    return _plan(vector_kernel, (v,), cu_seqlens, max_seqlen, True, config)(v)


def prepare(v: torch.Tensor) -> _Plan:
    """What `vector_sqnorm` does, for a dense operand of the same layout."""
    return _plan(vector_kernel, (v,), None, None, True, None)


class _Plan(NamedTuple):
    """All of a call but its operand."""

    squares: bool
    bounds: torch.Tensor | None
    shape: tuple[int, int]  # of the launch's output
    launch: Launch | None  # None where there is nothing to compute

    def __call__(self, v: torch.Tensor) -> torch.Tensor:
        """Sums or squared norms of an operand of the plan's layout."""
        dtype = torch.float64 if self.squares else torch.float32
        output = torch.empty(self.shape, dtype=dtype, device=v.device)
        if self.launch is not None:
            self.launch(v, self.bounds, output)
        return added(output) if self.squares else output


@remembered
def _plan(
    kernel: Any,
    operands: tuple[torch.Tensor],
    cu_seqlens: torch.Tensor | None,
    max_seqlen: int | None,
    squares: bool,
    config: _config.TileConfig | None,
) -> _Plan:
    (v,) = operands
    segments = _check.check_operands(v, v, cu_seqlens, max_seqlen)
    features = v.shape[-1]
    config = config or _streaming.choose_vector(features)
    tiles = _config.cdiv(features, config.columns)
    launch = None
    if segments.batch * tiles:
        launch = launch_of(
            kernel,
            segments.batch * tiles,
            *segments.strides(v),
            segments.positions,
            segments.total_rows,
            features,
            tiles,
            SQUARES=squares,
            RAGGED=segments.ragged,
            RUN=segments.adjacent_positions(v),
            **config.of_streams,
        )
    shape = segments.batch, tiles if squares else features
    return _Plan(squares, segments.cu_seqlens, shape, launch)
