"""Inner products of every per-example weight gradient with one dense direction."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from gradstats.kernels import _check, _config
from gradstats.kernels._launching import launch_kernel
from gradstats.kernels._row_sums import sum_rows
from gradstats.kernels._tile import dot, load_rows, load_tile


@triton.jit(do_not_specialize=["total_rows", "positions", "tiles"])
def direction_kernel(
    a_ptr,  # (B, T, d_in) or packed (N, d_in)
    g_ptr,  # (B, T, d_out) or packed (N, d_out)
    direction_ptr,  # (d_out, d_in), in the operands' dtype or fp32
    partial_ptr,  # fp32 (rows, tiles)
    stride_ab,
    stride_at,
    stride_ad,
    stride_gb,
    stride_gt,
    stride_gd,
    stride_direction_out,
    stride_direction_in,
    total_rows,
    positions,
    d_in,
    d_out,
    tiles,
    RAGGED: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):
    """partial[n, c] = g_n^T V[:, c] a_n[c] for the c-th tile of columns."""
    index = tl.program_id(0)
    column_tile = index % tiles
    rows = (index // tiles) * ROWS + tl.arange(0, ROWS)
    inside = rows < total_rows
    columns = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    inner = tl.arange(0, INNER)
    if RAGGED:
        example = tl.zeros((ROWS,), tl.int64)
        position = tl.cast(rows, tl.int64)
    else:
        example = tl.cast(rows // positions, tl.int64)
        position = tl.cast(rows % positions, tl.int64)
    a_rows = example * stride_ab + position * stride_at
    g_rows = example * stride_gb + position * stride_gt

    projected = tl.zeros((ROWS, COLUMNS), tl.float32)
    for feature in range(0, d_out, INNER):
        g = load_rows(g_ptr, g_rows, inside, feature + inner, stride_gd, d_out)
        direction = load_tile(
            direction_ptr, feature + inner, stride_direction_out, d_out, columns,
            stride_direction_in, d_in,
        )  # fmt: skip
        projected = dot(g.to(direction.dtype), direction, projected, PRECISION)
    a = load_rows(a_ptr, a_rows, inside, columns, stride_ad, d_in)
    dots = tl.sum(projected * a.to(tl.float32), axis=1)
    tl.store(partial_ptr + tl.cast(rows, tl.int64) * tiles + column_tile, dots, mask=inside)


def direction_inner(
    a: torch.Tensor,
    g: torch.Tensor,
    direction: torch.Tensor,
    *,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    config: _config.TileConfig | None = None,
) -> torch.Tensor:
    """Inner products of every per-example gradient with one direction in weight space.

    inner_i = <G_i, V> = sum_t g_it^T V a_it

    Args:
        a: layer inputs (B, T, d_in), or packed (N, d_in) with cu_seqlens; bf16, fp16 or fp32,
            any strides.
        g: gradients with respect to the outputs, (B, T, d_out) or (N, d_out), same dtype.
        direction: V (d_out, d_in), in the operands' dtype or fp32, any strides.
        cu_seqlens: int (B + 1,) first rows of the examples, on the host or the device.
        max_seqlen: with device bounds, the longest segment; avoids a wait for the device.
        config: overrides the tile table.
    Returns:
        fp64 (B,).
    Raises:
        KernelInputError: before any launch, for inputs that no kernel serves.
    Cost: 2 T d_in d_out flops per example; workspace 4 bytes per row and column tile.
    """
    segments = _check.check_operands(a, g, cu_seqlens, max_seqlen)
    d_in, d_out = a.shape[-1], g.shape[-1]
    if tuple(direction.shape) != (d_out, d_in):
        raise _check.KernelInputError(
            f"direction must have the parameter's shape {(d_out, d_in)}; got "
            f"{tuple(direction.shape)}: reshape or transpose it"
        )
    dtypes = (a.dtype, torch.float32)
    if direction.dtype not in dtypes or direction.device != a.device:
        raise _check.KernelInputError(
            f"direction must be one of {dtypes} on {a.device}; got {direction.dtype} on "
            f"{direction.device}: cast or move it"
        )
    kind = _check.kind(direction, _check.is_aligned(a, g, direction))
    config = config or _config.choose("direction", segments.total_rows, d_in, *kind)
    tiles = _config.cdiv(d_in, config.columns)
    rows = segments.total_rows
    partial = torch.empty((rows, tiles), dtype=torch.float32, device=a.device)
    if partial.numel():
        launch_kernel(
            direction_kernel,
            _config.cdiv(rows, config.rows) * tiles,
            a,
            g,
            direction,
            partial,
            *segments.strides(a),
            *segments.strides(g),
            *direction.stride(),
            rows,
            segments.positions,
            d_in,
            d_out,
            tiles,
            RAGGED=segments.ragged,
            **config.of_gradients,
        )
    return sum_rows(partial, segments)
