"""Inner products of all pairs of per-example weight gradients, chunk by chunk of the weight."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from gradstats.kernels import _check, _config
from gradstats.kernels._launching import launch_kernel
from gradstats.kernels._tile import example_base, segment
from gradstats.kernels.direct import gradient_tile


@triton.jit(do_not_specialize=["positions", "total_rows"])
def example_tiles_kernel(
    a_ptr,  # (B, T, C) or packed (N, C): the input features of one chunk of the weight
    g_ptr,  # (B, T, R) or packed (N, R): its output features
    cu_seqlens_ptr,  # int (B + 1,), read if RAGGED
    gradient_ptr,  # fp32 (B, R, C) contiguous
    stride_ab,
    stride_at,
    stride_ad,
    stride_gb,
    stride_gt,
    stride_gd,
    positions,
    total_rows,
    d_in,
    d_out,
    RAGGED: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):
    """One tile of one example's weight gradient, stored for a product over examples."""
    index = tl.program_id(0)
    column_tiles = tl.cdiv(d_in, COLUMNS)
    tiles = tl.cdiv(d_out, ROWS) * column_tiles
    example = index // tiles
    row_tile = (index - example * tiles) // column_tiles
    column_tile = index - example * tiles - row_tile * column_tiles
    rows = row_tile * ROWS + tl.arange(0, ROWS)
    columns = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    first_row, length, poison = segment(cu_seqlens_ptr, example, positions, total_rows, RAGGED)
    gradient = gradient_tile(
        example_base(a_ptr, example, stride_ab, first_row, stride_at),
        example_base(g_ptr, example, stride_gb, first_row, stride_gt),
        rows, columns, stride_at, stride_ad, stride_gt, stride_gd, length, d_in, d_out, PRECISION,
        ROWS, COLUMNS, INNER,
    )  # fmt: skip
    output = gradient_ptr + tl.cast(example, tl.int64) * d_out * d_in
    offsets = tl.cast(rows, tl.int64)[:, None] * d_in + tl.cast(columns, tl.int64)[None, :]
    mask = (rows < d_out)[:, None] & (columns < d_in)[None, :]
    tl.store(output + offsets, gradient + poison, mask=mask)


def pairwise_direct(
    a1: torch.Tensor,
    g1: torch.Tensor,
    a2: torch.Tensor,
    g2: torch.Tensor,
    *,
    cu_seqlens1: torch.Tensor | None = None,
    cu_seqlens2: torch.Tensor | None = None,
    max_seqlen1: int | None = None,
    max_seqlen2: int | None = None,
    workspace: int = _config.WORKSPACE,
    config: _config.TileConfig | None = None,
) -> torch.Tensor:
    """Inner products of all pairs of per-example weight gradients, chunk by chunk of the weight.

    K[i, j] = sum over chunks c of <G1_i[c], G2_j[c]>: the per-example gradients of one chunk are
    formed in fp32, multiplied over examples, and overwritten by the next chunk's.

    Args, raises: as `pairwise.pairwise_gram`, and
        workspace: bytes for the chunks of both factors; a chunk is at least one weight. The
            product over examples follows torch's fp32 matmul precision.
    Returns:
        fp32 (B1, B2); chunks are summed in fp64.
    Cost: 2 (B1 T1 + B2 T2 + B1 B2) d_in d_out flops, and one write and read of every chunk.
    """
    first, second = _check.check_two_factors(
        a1, g1, a2, g2, cu_seqlens1, cu_seqlens2, max_seqlen1, max_seqlen2
    )
    d_in, d_out = a1.shape[-1], g1.shape[-1]
    total = torch.zeros((first.batch, second.batch), dtype=torch.float64, device=a1.device)
    if total.numel() == 0:
        return total.float()
    chunk_rows, chunk_columns = chunk_shape(d_out, d_in, first.batch + second.batch, workspace)
    for row in range(0, d_out, chunk_rows):
        for column in range(0, d_in, chunk_columns):
            rows = slice(row, min(row + chunk_rows, d_out))
            columns = slice(column, min(column + chunk_columns, d_in))
            left = _example_tiles(a1[..., columns], g1[..., rows], first, config)
            same = a1 is a2 and g1 is g2 and cu_seqlens1 is cu_seqlens2
            right = (
                left if same else _example_tiles(a2[..., columns], g2[..., rows], second, config)
            )
            total += left @ right.T
    return total.float()


def chunk_shape(d_out: int, d_in: int, examples: int, workspace: int) -> tuple[int, int]:
    """(rows, columns) of a chunk of the weight whose fp32 copies per example fit the workspace.

    Whole rows if they fit; else at most 64 rows of as many columns as fit, for full tiles. Both are
    multiples of 16 unless fewer fit, so that chunks of aligned rows are aligned.
    """

    def rounded(size: int, whole: int) -> int:
        if size >= whole:
            return max(whole, 1)
        return size - size % 16 if size >= 16 else max(size, 1)

    weights = max(1, workspace // (4 * max(examples, 1)))
    if weights >= d_in * min(d_out, 64):
        return rounded(weights // max(d_in, 1), d_out), max(d_in, 1)
    rows = rounded(min(64, int(weights**0.5)), d_out)
    return rows, rounded(weights // rows, d_in)


def _example_tiles(
    a: torch.Tensor,
    g: torch.Tensor,
    segments: _check.Segments,
    config: _config.TileConfig | None,
) -> torch.Tensor:
    """Per-example gradients of the chunk of weights of `a`'s and `g`'s features, fp32 (B, R C)."""
    d_in, d_out = a.shape[-1], g.shape[-1]
    kind = _check.kind(a, _check.is_aligned(a, g))
    config = config or _config.choose("direct", d_out, d_in, *kind, segments.batch)
    tiles = _config.tiles_of(config, d_out, d_in)
    gradient = torch.empty((segments.batch, d_out, d_in), dtype=torch.float32, device=a.device)
    launch_kernel(
        example_tiles_kernel,
        segments.batch * tiles,
        a,
        g,
        segments.cu_seqlens,
        gradient,
        *segments.strides(a),
        *segments.strides(g),
        segments.positions,
        segments.total_rows,
        d_in,
        d_out,
        RAGGED=segments.ragged,
        **config.of_gradients,
    )
    return gradient.flatten(1)
