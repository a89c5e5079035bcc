"""Inner products of all pairs of per-example gradients of an embedding.

In the products of `pairwise.py` the inputs of an embedding are one-hot, so that their inner
products are comparisons of ids.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from gradstats.kernels import _check, _config
from gradstats.kernels._launching import launch_kernel
from gradstats.kernels._results import added_pairs
from gradstats.kernels.pairwise import choose_pair_tiles, cross_tile, packed_rows, store_pairs


@triton.jit(
    do_not_specialize=[
        "batch1",
        "batch2",
        "positions1",
        "positions2",
        "total_rows1",
        "total_rows2",
        "column_tiles",
        "splits",
    ]
)
def pairwise_rows_kernel(
    ids1_ptr,  # int (B1, T1) or packed (N1,)
    g1_ptr,  # (B1, T1, d) or packed (N1, d)
    ids2_ptr,  # int (B2, T2) or packed (N2,)
    g2_ptr,  # (B2, T2, d) or packed (N2, d)
    cu_seqlens1_ptr,  # int (B1 + 1,), read if RAGGED
    cu_seqlens2_ptr,  # int (B2 + 1,), read if RAGGED
    partial_ptr,  # fp32 (splits, B1, B2)
    stride_i1b,
    stride_i1t,
    stride_g1b,
    stride_g1t,
    stride_g1d,
    stride_i2b,
    stride_i2t,
    stride_g2b,
    stride_g2t,
    stride_g2d,
    batch1,
    batch2,
    positions1,
    positions2,
    total_rows1,
    total_rows2,
    features,
    padding,
    column_tiles,
    splits,
    PADDED: tl.constexpr,
    RAGGED: tl.constexpr,
    PRECISION: tl.constexpr,
    EXAMPLES1: tl.constexpr,
    POSITIONS1: tl.constexpr,
    EXAMPLES2: tl.constexpr,
    POSITIONS2: tl.constexpr,
    INNER: tl.constexpr,
):
    """K[i, j] = sum_{t,s: id1_it = id2_js} g1_it . g2_js for one tile of pairs (i, j).

    Tiles without a match are common and cost two reads of ids.
    """
    index = tl.program_id(0)
    split = index % splits
    tile = index // splits
    first1 = (tile // column_tiles) * EXAMPLES1
    first2 = (tile % column_tiles) * EXAMPLES2
    ROWS: tl.constexpr = EXAMPLES1 * POSITIONS1
    COLUMNS: tl.constexpr = EXAMPLES2 * POSITIONS2

    example1, place1, row1, length1, poison1 = packed_rows(
        cu_seqlens1_ptr, first1, batch1, positions1, total_rows1, RAGGED, EXAMPLES1, POSITIONS1
    )
    example2, place2, row2, length2, poison2 = packed_rows(
        cu_seqlens2_ptr, first2, batch2, positions2, total_rows2, RAGGED, EXAMPLES2, POSITIONS2
    )
    example1 = tl.cast(example1, tl.int64)
    example2 = tl.cast(example2, tl.int64)
    longest1 = tl.max(length1, axis=0)
    longest2 = tl.max(length2, axis=0)

    total = tl.zeros((EXAMPLES1, EXAMPLES2), tl.float32)
    for block1 in range(split * POSITIONS1, longest1, splits * POSITIONS1):
        inside1 = block1 + place1 < length1
        position1 = row1 + block1 + place1
        own = tl.load(
            ids1_ptr + example1 * stride_i1b + position1 * stride_i1t, mask=inside1, other=0
        )
        if PADDED:
            inside1 = inside1 & (own != padding)
        for block2 in range(0, longest2, POSITIONS2):
            inside2 = block2 + place2 < length2
            position2 = row2 + block2 + place2
            other = tl.load(
                ids2_ptr + example2 * stride_i2b + position2 * stride_i2t, mask=inside2, other=0
            )
            equal = (own[:, None] == other[None, :]) & inside1[:, None] & inside2[None, :]
            if tl.max(tl.max(equal.to(tl.int32), axis=1), axis=0) > 0:
                g_products = cross_tile(
                    g1_ptr,
                    example1 * stride_g1b + position1 * stride_g1t,
                    inside1,
                    stride_g1d,
                    g2_ptr,
                    example2 * stride_g2b + position2 * stride_g2t,
                    inside2,
                    stride_g2d,
                    features,
                    PRECISION,
                    ROWS,
                    COLUMNS,
                    INNER,
                )
                terms = tl.where(equal, g_products, 0.0)
                blocks = terms.reshape(EXAMPLES1, POSITIONS1, EXAMPLES2, POSITIONS2)
                total += tl.sum(tl.sum(blocks, axis=3), axis=1)
    if RAGGED:
        total += tl.sum(poison1.reshape(EXAMPLES1, POSITIONS1), axis=1)[:, None]
        total += tl.sum(poison2.reshape(EXAMPLES2, POSITIONS2), axis=1)[None, :]
    store_pairs(partial_ptr, total, split, first1, first2, batch1, batch2, EXAMPLES1, EXAMPLES2)


def pairwise_rows(
    ids1: torch.Tensor,
    g1: torch.Tensor,
    ids2: torch.Tensor,
    g2: torch.Tensor,
    *,
    cu_seqlens1: torch.Tensor | None = None,
    cu_seqlens2: torch.Tensor | None = None,
    max_seqlen1: int | None = None,
    max_seqlen2: int | None = None,
    padding_idx: int | None = None,
    precision: str | None = None,
    config: _config.TileConfig | None = None,
    splits: int | None = None,
) -> torch.Tensor:
    """Inner products of all pairs of per-example gradients of an embedding.

    K[i, j] = sum_{t,s: id1_it = id2_js} g1_it . g2_js

    Args:
        ids1, g1: first factor: int (B1, T1) and (B1, T1, d), or packed rows with cu_seqlens1.
        ids2, g2: second factor, same layout (dense or packed), dtype and width.
        padding_idx: positions with this id have no gradient.
        Others as `pairwise.pairwise_gram`.
    Returns:
        fp32 (B1, B2).
    Raises:
        KernelInputError: before any launch, for inputs that no kernel serves.
    Cost: T1 T2 comparisons for each pair, and 2 T1 T2 d flops where tiles hold a match.
    """
    first = _check.check_rows(ids1, g1, cu_seqlens1, max_seqlen1)
    second = _check.check_rows(ids2, g2, cu_seqlens2, max_seqlen2)
    _check.check_match(g1, g2, "width")
    _check.check_layouts(first, second)
    tiles = choose_pair_tiles(first, second, (g1, g2), precision, config, splits, "pairwise_rows")
    partial = torch.empty(
        (tiles.splits, first.batch, second.batch), dtype=torch.float32, device=g1.device
    )
    if partial.numel():
        launch_kernel(
            pairwise_rows_kernel,
            tiles.programs,
            ids1,
            g1,
            ids2,
            g2,
            first.cu_seqlens,
            second.cu_seqlens,
            partial,
            *first.strides(ids1[..., None])[:2],
            *first.strides(g1),
            *second.strides(ids2[..., None])[:2],
            *second.strides(g2),
            first.batch,
            second.batch,
            first.positions,
            second.positions,
            first.total_rows,
            second.total_rows,
            g1.shape[-1],
            -1 if padding_idx is None else padding_idx,
            tiles.column_tiles,
            tiles.splits,
            PADDED=padding_idx is not None,
            RAGGED=first.ragged,
            **tiles.constants(),
        )
    return added_pairs(partial)
