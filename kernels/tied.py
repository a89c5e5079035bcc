"""An embedding beside the output projection that shares its table: their cross term.

An embedding is a linear layer of one-hot inputs. Their products with the projection's output
gradients are the output gradients at the embedding's ids.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from gradstats.kernels import _check, _config
from gradstats.kernels._launching import launch_kernel
from gradstats.kernels._results import added
from gradstats.kernels._tile import example_base, segment
from gradstats.kernels.gram import gram_tile

LARGEST_TILE = 64  # a larger tile leaves no registers for the addresses to gather from


@triton.jit(
    do_not_specialize=[
        "positions1", "positions2", "total_rows1", "total_rows2", "row_tiles", "column_tiles",
    ]
)  # fmt: skip
def tied_kernel(
    a_ptr,  # (B, T1, d) or packed (N1, d): inputs of the output projection
    g_ptr,  # (B, T1, V) or packed (N1, V): its output gradients
    ids_ptr,  # int (B, T2) or packed (N2,)
    rows_ptr,  # (B, T2, d) or packed (N2, d): gradients of the looked-up rows
    cu_seqlens1_ptr,  # int (B + 1,), read if RAGGED
    cu_seqlens2_ptr,  # int (B + 1,), read if RAGGED
    partial_ptr,  # fp64 (B, row_tiles * column_tiles)
    stride_ab,
    stride_at,
    stride_ad,
    stride_gb,
    stride_gt,
    stride_gd,
    stride_ib,
    stride_it,
    stride_rb,
    stride_rt,
    stride_rd,
    positions1,
    positions2,
    total_rows1,
    total_rows2,
    features,
    row_tiles,
    column_tiles,
    RAGGED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
    INNER: tl.constexpr,
):
    """One tile of sum_{t,s} g_t[id_s] (a_t . r_s)."""
    index = tl.program_id(0)
    tiles = row_tiles * column_tiles
    example = index // tiles
    row_tile = (index - example * tiles) // column_tiles
    column_tile = index - example * tiles - row_tile * column_tiles
    row1, length1, poison1 = segment(cu_seqlens1_ptr, example, positions1, total_rows1, RAGGED)
    row2, length2, poison2 = segment(cu_seqlens2_ptr, example, positions2, total_rows2, RAGGED)

    total = poison1 + poison2
    if (row_tile * BLOCK < length1) & (column_tile * BLOCK < length2):
        rows = row_tile * BLOCK + tl.arange(0, BLOCK)
        columns = column_tile * BLOCK + tl.arange(0, BLOCK)
        ids_base = example_base(ids_ptr, example, stride_ib, row2, stride_it)
        ids = tl.load(
            ids_base + tl.cast(columns, tl.int64) * stride_it, mask=columns < length2, other=0
        )
        products = gram_tile(
            example_base(a_ptr, example, stride_ab, row1, stride_at),
            example_base(rows_ptr, example, stride_rb, row2, stride_rt),
            rows, columns, stride_at, stride_ad, stride_rt, stride_rd, length1, length2, features,
            PRECISION, BLOCK, INNER,
        )  # fmt: skip
        places = (
            tl.cast(rows, tl.int64)[:, None] * stride_gt
            + tl.cast(ids, tl.int64)[None, :] * stride_gd
        )
        gathered = tl.load(
            example_base(g_ptr, example, stride_gb, row1, stride_gt) + places,
            mask=(rows < length1)[:, None] & (columns < length2)[None, :],
            other=0.0,
        )
        total += tl.sum(products * gathered.to(tl.float32))
    tl.store(partial_ptr + index, total)


def tied_inner(
    a: torch.Tensor,
    g: torch.Tensor,
    ids: torch.Tensor,
    rows: torch.Tensor,
    *,
    cu_seqlens1: torch.Tensor | None = None,
    cu_seqlens2: torch.Tensor | None = None,
    max_seqlen1: int | None = None,
    max_seqlen2: int | None = None,
    config: _config.TileConfig | None = None,
) -> torch.Tensor:
    """Cross terms of an embedding and the output projection that shares its table.

    inner_i = <sum_t g_it a_it^T, sum_s e_{id_is} r_is^T> = sum_{t,s} g_it[id_is] (a_it . r_is)

    Args:
        a: inputs of the projection (B, T1, d), or packed (N1, d) with cu_seqlens1; bf16, fp16 or
            fp32, any strides.
        g: its output gradients (B, T1, V) or (N1, V), read at the batch's own ids alone.
        ids: int32 or int64 (B, T2), or packed (N2,) with cu_seqlens2; in [0, V).
        rows: gradients r of the looked-up rows (B, T2, d) or (N2, d), dtype of `a`.
        Others as `pairwise.pairwise_gram`.
    Returns:
        fp64 (B,).
    Raises:
        KernelInputError: before any launch, for inputs that no kernel serves.
    Cost: 2 T1 T2 d flops and T1 T2 scattered reads of g an example; workspace 8 bytes per tile.
    """
    first = _check.check_operands(a, g, cu_seqlens1, max_seqlen1)
    second = _check.check_rows(ids, rows, cu_seqlens2, max_seqlen2)
    _check.check_match(a, rows, "width")
    _check.check_layouts(first, second)
    _check.check_batches(first.batch, second.batch)
    kind = _check.kind(a, _check.is_aligned(a, rows))
    positions = min(max(first.positions, second.positions), LARGEST_TILE)
    config = config or _config.choose("gram", positions, positions, *kind, first.batch)
    row_tiles = _config.cdiv(first.positions, config.rows)
    column_tiles = _config.cdiv(second.positions, config.rows)
    partial = torch.empty(
        (first.batch, row_tiles * column_tiles), dtype=torch.float64, device=a.device
    )
    if partial.numel():
        launch_kernel(
            tied_kernel,
            partial.numel(),
            a,
            g,
            ids,
            rows,
            first.cu_seqlens,
            second.cu_seqlens,
            partial,
            *first.strides(a),
            *first.strides(g),
            *second.strides(ids[..., None])[:2],
            *second.strides(rows),
            first.positions,
            second.positions,
            first.total_rows,
            second.total_rows,
            a.shape[-1],
            row_tiles,
            column_tiles,
            RAGGED=first.ragged,
            **config.of_positions,
        )
    return added(partial)
