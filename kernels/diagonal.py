"""Inner products of the i-th per-example weight gradients, through products of positions."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from gradstats.kernels import _check, _config
from gradstats.kernels._launching import launch_kernel
from gradstats.kernels._results import apart
from gradstats.kernels._tile import example_base, segment
from gradstats.kernels.gram import gram_tile


@triton.jit(
    do_not_specialize=[
        "batch", "positions1", "positions2", "total_rows1", "total_rows2", "row_tiles",
        "column_tiles",
    ]
)  # fmt: skip
def diagonal_gram_kernel(
    a1_ptr,  # (B, T1, d_in) or packed (N1, d_in)
    g1_ptr,  # (B, T1, d_out) or packed (N1, d_out)
    a2_ptr,  # (B, T2, d_in) or packed (N2, d_in)
    g2_ptr,  # (B, T2, d_out) or packed (N2, d_out)
    cu_seqlens1_ptr,  # int (B + 1,), read if RAGGED
    cu_seqlens2_ptr,  # int (B + 1,), read if RAGGED
    partial_ptr,  # fp64 (2, B, row_tiles * column_tiles): sums of terms, then of absolute terms
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
    batch,
    positions1,
    positions2,
    total_rows1,
    total_rows2,
    d_in,
    d_out,
    row_tiles,
    column_tiles,
    RAGGED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
    INNER: tl.constexpr,
):
    """One tile of sum_{t,s} (a1_it . a2_is)(g1_it . g2_is); not symmetric, so all tiles count."""
    index = tl.program_id(0)
    tiles = row_tiles * column_tiles
    example = index // tiles
    row_tile = (index - example * tiles) // column_tiles
    column_tile = index - example * tiles - row_tile * column_tiles
    row1, length1, poison1 = segment(cu_seqlens1_ptr, example, positions1, total_rows1, RAGGED)
    row2, length2, poison2 = segment(cu_seqlens2_ptr, example, positions2, total_rows2, RAGGED)

    total = poison1 + poison2
    magnitude = poison1 + poison2
    if (row_tile * BLOCK < length1) & (column_tile * BLOCK < length2):
        rows = row_tile * BLOCK + tl.arange(0, BLOCK)
        columns = column_tile * BLOCK + tl.arange(0, BLOCK)
        a_products = gram_tile(
            example_base(a1_ptr, example, stride_a1b, row1, stride_a1t),
            example_base(a2_ptr, example, stride_a2b, row2, stride_a2t),
            rows, columns, stride_a1t, stride_a1d, stride_a2t, stride_a2d, length1, length2, d_in,
            PRECISION, BLOCK, INNER,
        )  # fmt: skip
        g_products = gram_tile(
            example_base(g1_ptr, example, stride_g1b, row1, stride_g1t),
            example_base(g2_ptr, example, stride_g2b, row2, stride_g2t),
            rows, columns, stride_g1t, stride_g1d, stride_g2t, stride_g2d, length1, length2, d_out,
            PRECISION, BLOCK, INNER,
        )  # fmt: skip
        terms = a_products * g_products
        total += tl.sum(terms)
        magnitude += tl.sum(tl.abs(terms))
    tl.store(partial_ptr + index, total)
    tl.store(partial_ptr + tl.cast(batch, tl.int64) * tiles + index, magnitude)


def diagonal_gram(
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
) -> tuple[torch.Tensor, torch.Tensor]:
    """Inner products of the i-th per-example weight gradients, through products of positions.

    inner_i = sum_{t,s} (a1_it . a2_is)(g1_it . g2_is),  magnitude_i = the same of absolute terms

    The rounding error is about eps * magnitude_i; where that is too much use `direct_inner`.

    Args and raises: as `pairwise.pairwise_gram`, for two factors of equal batch.
    Returns:
        (inner, magnitude), each fp64 (B,).
    Cost: 2 T1 T2 (d_in + d_out) flops per example; workspace 16 bytes per tile.
    """
    first, second = _check.check_two_factors(
        a1, g1, a2, g2, cu_seqlens1, cu_seqlens2, max_seqlen1, max_seqlen2
    )
    _check.check_batches(first.batch, second.batch)
    kind = _check.kind(a1, _check.is_aligned(a1, g1, a2, g2))
    positions = max(first.positions, second.positions)
    config = config or _config.choose("gram", positions, positions, *kind, first.batch)
    row_tiles = _config.cdiv(first.positions, config.rows)
    column_tiles = _config.cdiv(second.positions, config.rows)
    partial = torch.empty(
        (2, first.batch, row_tiles * column_tiles), dtype=torch.float64, device=a1.device
    )
    if partial.numel():
        launch_kernel(
            diagonal_gram_kernel,
            partial[0].numel(),
            a1,
            g1,
            a2,
            g2,
            first.cu_seqlens,
            second.cu_seqlens,
            partial,
            *first.strides(a1),
            *first.strides(g1),
            *second.strides(a2),
            *second.strides(g2),
            first.batch,
            first.positions,
            second.positions,
            first.total_rows,
            second.total_rows,
            a1.shape[-1],
            g1.shape[-1],
            row_tiles,
            column_tiles,
            RAGGED=first.ragged,
            **config.of_positions,
        )
    inner, magnitude = apart(partial)
    return inner, magnitude
