"""Inner products of all pairs of per-example weight gradients, through products of positions."""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from gradstats.kernels import _check, _config
from gradstats.kernels._launching import launch_kernel
from gradstats.kernels._results import added_pairs
from gradstats.kernels._tile import dot, load_rows, segment_length


@triton.jit
def packed_rows(
    cu_seqlens_ptr,  # int (B + 1,), read if RAGGED
    first_example,
    batch,
    positions,
    total_rows,
    RAGGED: tl.constexpr,
    EXAMPLES: tl.constexpr,
    POSITIONS: tl.constexpr,
):
    """Example and position of each of the EXAMPLES * POSITIONS rows of a tile.

    Returns (example, position in the block, first row, length, poison), each a vector.
    """
    lane = tl.arange(0, EXAMPLES * POSITIONS)
    example = first_example + lane // POSITIONS
    inside = example < batch
    if RAGGED:
        start = tl.load(cu_seqlens_ptr + example, mask=inside, other=0)
        end = tl.load(cu_seqlens_ptr + example + 1, mask=inside, other=0)
        length, valid = segment_length(start, end, positions, total_rows)
        first_row = tl.cast(start, tl.int64)
        poison = tl.where(valid, 0.0, float("nan"))
    else:
        length = tl.where(inside, positions, 0)
        first_row = tl.zeros((EXAMPLES * POSITIONS,), tl.int64)
        poison = tl.zeros((EXAMPLES * POSITIONS,), tl.float32)
    return example, lane % POSITIONS, first_row, length, poison


@triton.jit
def cross_tile(
    first_ptr,
    offsets1,
    inside1,
    feature_stride1,
    second_ptr,
    offsets2,
    inside2,
    feature_stride2,
    features,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):
    """[ROWS, COLUMNS] inner products of rows of the first operand with rows of the second."""
    inner = tl.arange(0, INNER)
    products = tl.zeros((ROWS, COLUMNS), tl.float32)
    for feature in range(0, features, INNER):
        columns = feature + inner
        left = load_rows(first_ptr, offsets1, inside1, columns, feature_stride1, features)
        right = load_rows(second_ptr, offsets2, inside2, columns, feature_stride2, features)
        products = dot(left, right.T, products, PRECISION)
    return products


@triton.jit
def store_pairs(
    partial_ptr,  # fp32 (splits, B1, B2) contiguous
    total,  # [EXAMPLES1, EXAMPLES2]
    split,
    first1,
    first2,
    batch1,
    batch2,
    EXAMPLES1: tl.constexpr,
    EXAMPLES2: tl.constexpr,
):
    """Stores a split's part of the products of the pairs of examples from (first1, first2) on."""
    rows = first1 + tl.arange(0, EXAMPLES1)
    columns = first2 + tl.arange(0, EXAMPLES2)
    offsets = (
        tl.cast(split, tl.int64) * batch1 + tl.cast(rows, tl.int64)[:, None]
    ) * batch2 + tl.cast(columns, tl.int64)[None, :]
    mask = (rows < batch1)[:, None] & (columns < batch2)[None, :]
    tl.store(partial_ptr + offsets, total, mask=mask)


@triton.jit(
    do_not_specialize=[
        "batch1", "batch2", "positions1", "positions2", "total_rows1", "total_rows2",
        "column_tiles", "splits",
    ]
)  # fmt: skip
def pairwise_kernel(
    a1_ptr,  # (B1, T1, d_in) or packed (N1, d_in)
    g1_ptr,  # (B1, T1, d_out) or packed (N1, d_out)
    a2_ptr,  # (B2, T2, d_in) or packed (N2, d_in)
    g2_ptr,  # (B2, T2, d_out) or packed (N2, d_out)
    cu_seqlens1_ptr,  # int (B1 + 1,), read if RAGGED
    cu_seqlens2_ptr,  # int (B2 + 1,), read if RAGGED
    partial_ptr,  # fp32 (splits, B1, B2)
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
    batch1,
    batch2,
    positions1,
    positions2,
    total_rows1,
    total_rows2,
    d_in,
    d_out,
    column_tiles,
    splits,
    RAGGED: tl.constexpr,
    PRECISION: tl.constexpr,
    EXAMPLES1: tl.constexpr,  # examples side by side in one tile, each padded to POSITIONS
    POSITIONS1: tl.constexpr,
    EXAMPLES2: tl.constexpr,
    POSITIONS2: tl.constexpr,
    INNER: tl.constexpr,
):
    """K[i, j] = sum_{t,s} (a1_it . a2_js)(g1_it . g2_js) for one tile of pairs (i, j).

    Split s of the position blocks of the first factor goes to partial[s].
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
        for block2 in range(0, longest2, POSITIONS2):
            inside2 = block2 + place2 < length2
            position2 = row2 + block2 + place2
            a_products = cross_tile(
                a1_ptr, example1 * stride_a1b + position1 * stride_a1t, inside1, stride_a1d,
                a2_ptr, example2 * stride_a2b + position2 * stride_a2t, inside2, stride_a2d,
                d_in, PRECISION, ROWS, COLUMNS, INNER,
            )  # fmt: skip
            g_products = cross_tile(
                g1_ptr, example1 * stride_g1b + position1 * stride_g1t, inside1, stride_g1d,
                g2_ptr, example2 * stride_g2b + position2 * stride_g2t, inside2, stride_g2d,
                d_out, PRECISION, ROWS, COLUMNS, INNER,
            )  # fmt: skip
            terms = a_products * g_products
            blocks = terms.reshape(EXAMPLES1, POSITIONS1, EXAMPLES2, POSITIONS2)
            total += tl.sum(tl.sum(blocks, axis=3), axis=1)
    if RAGGED:
        total += tl.sum(poison1.reshape(EXAMPLES1, POSITIONS1), axis=1)[:, None]
        total += tl.sum(poison2.reshape(EXAMPLES2, POSITIONS2), axis=1)[None, :]
    store_pairs(partial_ptr, total, split, first1, first2, batch1, batch2, EXAMPLES1, EXAMPLES2)


@dataclasses.dataclass(frozen=True)
class PairTiles:
    """How a tile of rows x columns divides into examples and their positions.

    If an example has fewer positions than the tile has rows, the tile holds several examples.
    """

    config: _config.TileConfig
    positions1: int
    positions2: int
    row_tiles: int
    column_tiles: int
    splits: int

    @property
    def programs(self) -> int:
        return self.row_tiles * self.column_tiles * self.splits

    def constants(self) -> dict[str, int | str]:
        """The constants and options of a launch."""
        return {
            "PRECISION": self.config.precision,
            "EXAMPLES1": self.config.rows // self.positions1,
            "POSITIONS1": self.positions1,
            "EXAMPLES2": self.config.columns // self.positions2,
            "POSITIONS2": self.positions2,
            "INNER": self.config.inner,
            **self.config.options,
        }


def choose_pair_tiles(
    first: _check.Segments,
    second: _check.Segments,
    operands: tuple[torch.Tensor, ...],
    config: _config.TileConfig | None,
    splits: int | None,
) -> PairTiles:
    """The tiles for the products of all pairs of two factors.

    Args:
        first, second: how the factors' rows divide into examples.
        operands: what the kernel multiplies.
        config, splits: override the table and the number of parts of the positions.
    """
    kind = _check.kind(operands[0], _check.is_aligned(*operands))
    config = config or _config.choose(
        "pairwise", first.batch * first.positions, second.batch * second.positions, *kind
    )
    positions1 = min(config.rows, triton.next_power_of_2(max(first.positions, 1)))
    positions2 = min(config.columns, triton.next_power_of_2(max(second.positions, 1)))
    row_tiles = _config.cdiv(first.batch, config.rows // positions1)
    column_tiles = _config.cdiv(second.batch, config.columns // positions2)
    splits = splits or _config.choose_splits(
        row_tiles * column_tiles, _config.cdiv(first.positions, positions1), kind[2]
    )
    return PairTiles(config, positions1, positions2, row_tiles, column_tiles, splits)


def pairwise_gram(
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
    splits: int | None = None,
) -> torch.Tensor:
    """Inner products of all pairs of per-example weight gradients, through products of positions.

    K[i, j] = sum_{t,s} (a1_it . a2_js)(g1_it . g2_js)

    With T = 1 this is (A1 A2^T) o (G1 G2^T). The right form for few positions; its cost grows with
    T1 T2, that of `pairwise_direct.pairwise_direct` does not.

    Args:
        a1, g1: first factor (B1, T1, d_in) and (B1, T1, d_out), or packed rows with cu_seqlens1;
            bf16, fp16 or fp32, any strides.
        a2, g2: second factor, same layout (dense or packed), dtype and features.
        cu_seqlens1, cu_seqlens2: int (B1 + 1,) and (B2 + 1,) first rows of the examples.
        max_seqlen1, max_seqlen2: with device bounds, the longest segments; avoids a wait.
        config: overrides the tile table.
        splits: overrides into how many parts the first factor's positions are divided.
    Returns:
        fp32 (B1, B2).
    Raises:
        KernelInputError: before any launch, for inputs that no kernel serves.
    Cost: 2 T1 T2 (d_in + d_out) flops per pair; no workspace beyond splits copies of K.
    """
    first, second = _check.check_two_factors(
        a1, g1, a2, g2, cu_seqlens1, cu_seqlens2, max_seqlen1, max_seqlen2
    )
    tiles = choose_pair_tiles(first, second, (a1, g1, a2, g2), config, splits)
    partial = torch.empty(
        (tiles.splits, first.batch, second.batch), dtype=torch.float32, device=a1.device
    )
    if partial.numel():
        launch_kernel(
            pairwise_kernel,
            tiles.programs,
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
            second.batch,
            first.positions,
            second.positions,
            first.total_rows,
            second.total_rows,
            a1.shape[-1],
            g1.shape[-1],
            tiles.column_tiles,
            tiles.splits,
            RAGGED=first.ragged,
            **tiles.constants(),
        )
    return added_pairs(partial)
