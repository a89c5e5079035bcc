"""Tiles of kernels that read their operands once and multiply no matrices.

These kernels neither spill nor use shared memory, so the same tiles serve all architectures and
alignments. They are set here by hand; those of matrix products are tuned (`_table.py`). The shape
picks one of an operation's tiles.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal

from gradstats.kernels._config import TileConfig, parse

# TILES[operation], largest first, each written as in `_table.py`
TILES = {
    "rank_one_half": "2x1x2048w8s1 4x1x512w4s1 32x1x64w4s1",
    "rank_one_float": "1x1x2048w8s1 4x1x512w4s1 32x1x64w4s1",
    "vector": "1x128x64w8s1 1x32x64w4s1",
    "layer_norm": "2x4096x1w8s1 2x2048x1w4s1 2x1024x1w2s1 2x512x1w2s1 8x128x1w4s1",
    "group_norm": "1x1x8192w8s1 1x1x4096w4s1 1x1x2048w2s1 1x1x1024w1s1 1x1x256w1s1",
    "group_norm_walked": "1x1x8192w16s1 1x1x2048w8s1",
    "group_norm_wide": "1x1x8192w16s1 1x1x4096w8s1 1x1x2048w4s1 1x1x1024w2s1 1x1x512w1s1"
    " 1x1x256w1s1",
    "scale": "1x64x64w8s1 1x32x64w4s1 1x16x128w4s1",
    "scale_positions_adjacent": "1x8x256w8s1 1x16x128w8s1 1x64x32w8s1",
    "scale_one_position": "1x2048x1w8s1 1x512x1w4s1 1x128x1w2s1",
    "rows": "1x256x8w4s1 1x64x16w4s1",
    "runs": "1x256x16w1s1 1x64x16w1s1",
    "run_sums": "1x256x16w1s1 1x64x16w1s1",
    "long_run_sums": "1x256x32w4s1 1x64x64w4s1",
    "rows_pairs": "4x256x16w1s1 4x64x16w1s1",
    "depthwise": "16x1x256w8s1 16x4x64w8s1",
    "depthwise_channels_adjacent": "4x32x32w8s1 4x64x8w4s1",
    "depthwise_lines": "4x32x32w4s1 4x32x8w1s1",
}

LONG = 4096  # positions from which on runs of equal ids are long


MANY_CHANNELS = 16  # of a group, from which on it is walked in tiles


@functools.cache
def tiles(operation: str) -> tuple[TileConfig, ...]:
    """The tiles of one operation, largest first."""
    return tuple(parse(tile, "ieee") for tile in TILES[operation].split())


def _more_than_half_filled(
    operation: str, size: int, axis: Literal["columns", "inner"] = "columns"
) -> TileConfig:
    """The first tile that is more than half full along an axis, else the last."""
    configs = tiles(operation)
    return next((each for each in configs if 2 * size > getattr(each, axis)), configs[-1])


def choose_rank_one(features: int, itemsize: int) -> TileConfig:
    """Rows are examples, inner the features read per step, columns unused (1)."""
    configs = tiles("rank_one_half" if itemsize == 2 else "rank_one_float")
    return next((each for each in configs if features >= each.inner), configs[-1])


def choose_vector(features: int) -> TileConfig:
    """Columns are features, inner positions, rows unused (1)."""
    return _more_than_half_filled("vector", features)


def choose_layer_norm(features: int) -> TileConfig:
    """Rows are positions, columns features: the narrowest tile that holds a row, else the widest;
    inner unused (1)."""
    configs = tiles("layer_norm")
    return next((each for each in configs[::-1] if features <= each.columns), configs[0])


def choose_group_norm(features: int, positions: int, vectors: bool) -> TileConfig:
    """Columns are the channels of one group, inner positions, rows unused (1).

    The smallest tile that holds a whole group. Longer groups are walked in tiles, smaller ones if
    threads cannot load vectors, whose elements they would add up, and must keep every element. With
    many channels a tile is a third of the group: combining the threads' sums then costs more than
    reading the group again. The table gives the number of elements; the group gives the shape.
    """
    columns, inner = (1 << max(size - 1, 0).bit_length() for size in (features, positions))
    held = (each for each in tiles("group_norm")[::-1] if columns * inner <= each.inner)
    config = next(held, tiles("group_norm_walked")[0 if vectors else 1])
    if columns >= MANY_CHANNELS:
        within = range(columns, columns * positions // 3 + 1)
        thirds = (each for each in tiles("group_norm_wide") if each.inner in within)
        config = next(thirds, config)
    return dataclasses.replace(config, columns=columns, inner=max(config.inner // columns, 1))


def choose_scale(positions: int, features: int, positions_adjacent: bool = False) -> TileConfig:
    """Columns are features, inner positions, rows unused (1).

    Tiles are longest along the axis that is adjacent in memory; with one position they have no
    other.
    """
    if positions == 1:
        return _more_than_half_filled("scale_one_position", features)
    if positions_adjacent:
        return _more_than_half_filled("scale_positions_adjacent", positions, "inner")
    return _more_than_half_filled("scale", features)


def choose_rows(features: int) -> TileConfig:
    """Columns are features, inner positions read at once, rows unused (1)."""
    return _more_than_half_filled("rows", features)


def choose_runs(features: int) -> TileConfig:
    """Columns are features, inner the rows that a program adds up, which its one warp keeps in
    registers; rows unused (1)."""
    return _more_than_half_filled("runs", features)


def choose_run_sums(features: int, positions: int) -> TileConfig:
    """Columns are features, inner rows of a run read at once; rows unused (1).

    Most runs have one row; in longer examples they have more.
    """
    operation = "long_run_sums" if positions > LONG else "run_sums"
    return _more_than_half_filled(operation, features)


def choose_rows_pairs(features: int) -> TileConfig:
    """Rows are sums of the second factor multiplied at once with one of the first, columns
    features, inner ids looked up at once."""
    return _more_than_half_filled("rows_pairs", features)


def choose_depthwise(positions: int, channels_adjacent: bool = False) -> TileConfig:
    """Rows are taps, columns channels, inner positions."""
    name = "depthwise_channels_adjacent" if channels_adjacent else "depthwise"
    return _more_than_half_filled(name, positions, "inner")


def choose_depthwise_lines(positions: int) -> TileConfig:
    """As `choose_depthwise`, for blocks of lines.

    Each lane loads the operands that it multiplies, without shared memory: 8 channels of one
    position. A warp has 4 such blocks of channels at 8 positions; other warps have other positions.
    """
    several, one = tiles("depthwise_lines")
    return several if positions > 128 else one
