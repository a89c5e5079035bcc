"""Inner products of the per-example gradients of an embedding with one direction."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from gradstats.kernels import _check, _config, _streaming
from gradstats.kernels._launching import launch_kernel
from gradstats.kernels._row_sums import sum_rows
from gradstats.kernels._tile import load_rows


@triton.jit(do_not_specialize=["total_rows", "positions"])
def rows_direction_kernel(
    ids_ptr,  # int (B, T), or packed (N,)
    g_ptr,  # (B, T, d) or packed (N, d)
    direction_ptr,  # (V, d)
    partial_ptr,  # fp64 (rows, 1)
    stride_ib,
    stride_it,
    stride_gb,
    stride_gt,
    stride_gd,
    stride_direction_row,
    stride_direction_feature,
    positions,
    total_rows,
    features,
    RAGGED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """partial[n] = g_n . V[id_n]."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < total_rows
    if RAGGED:
        example = tl.zeros((ROWS,), tl.int64)
        position = tl.cast(rows, tl.int64)
    else:
        example = tl.cast(rows // positions, tl.int64)
        position = tl.cast(rows % positions, tl.int64)
    ids = tl.load(ids_ptr + example * stride_ib + position * stride_it, mask=inside, other=0)
    g_rows = example * stride_gb + position * stride_gt
    direction_rows = tl.cast(ids, tl.int64) * stride_direction_row
    dots = tl.zeros((ROWS, COLUMNS), tl.float32)
    for feature in range(0, features, COLUMNS):
        columns = feature + tl.arange(0, COLUMNS)
        g = load_rows(g_ptr, g_rows, inside, columns, stride_gd, features)
        direction = load_rows(
            direction_ptr, direction_rows, inside, columns, stride_direction_feature, features
        )
        dots += g.to(tl.float32) * direction.to(tl.float32)
    tl.store(partial_ptr + rows, tl.sum(dots, axis=1), mask=inside)


def rows_direction(
    ids: torch.Tensor,
    g: torch.Tensor,
    direction: torch.Tensor,
    *,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    config: _config.TileConfig | None = None,
) -> torch.Tensor:
    """Inner products of every per-example gradient of an embedding with one direction.

    inner_i = sum_t g_it . V[id_it]

    Args: as `rows.rows_sqnorm`, and
        direction: V (rows of the table, d), bf16, fp16 or fp32, any strides. Ids must lie in it.
    Returns, raises: as `rows.rows_sqnorm`.
    Cost: one read of g and of as many rows of V.
    """
    segments = _check.check_rows(ids, g, cu_seqlens, max_seqlen)
    if direction.dim() != 2 or direction.shape[1] != g.shape[-1] or direction.device != g.device:
        raise _check.KernelInputError(
            f"direction must be (rows, {g.shape[-1]}) on {g.device}; got "
            f"{tuple(direction.shape)} on {direction.device}: pass a direction of the table's "
            "shape, where the gradients lie"
        )
    config = config or _streaming.choose_rows(g.shape[-1])
    rows = segments.total_rows
    partial = torch.empty((rows, 1), dtype=torch.float64, device=g.device)
    if rows:
        launch_kernel(
            rows_direction_kernel,
            _config.cdiv(rows, config.inner),
            ids,
            g,
            direction,
            partial,
            *segments.strides(ids[..., None])[:2],
            *segments.strides(g),
            *direction.stride(),
            segments.positions,
            rows,
            g.shape[-1],
            RAGGED=segments.ragged,
            ROWS=config.inner,
            COLUMNS=config.columns,
            **config.options,
        )
    return sum_rows(partial, segments)
