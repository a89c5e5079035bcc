"""Tiles of matrix products: a pure function of shape, dtype, architecture and alignment.

Nothing is timed at run time. Configurations come from the committed table in `_table.py`, which
`benchmarks/tune_linear_kernels.py` regenerates on a GPU; among each entry's candidates the shape
picks the one that covers it at least cost. The same holds for how work is divided among programs.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

from gradstats.kernels._table import TABLE

# kernels that multiply matrices; those that only stream have tiles of their own (`_streaming.py`)
MATMULS = (
    "gram",
    "direct",
    "weight_gradient",
    "weight_gradient_descriptor",
    "pairwise",
    "diagonal",
    "direction",
    "convolution",
    "convolution_fused",
    "convolution_gram",
)
KINDS = ("half", "ieee", "tf32x3", "tf32")
ARCHITECTURES = (80, 90, 100)

# shared memory that one program may use, in bytes, by compute capability
SHARED_LIMIT = {80: 166912, 86: 101376, 87: 166912, 89: 101376, 90: 232448, 100: 232448}
SMALLEST_SHARED_LIMIT = 101376

# streaming multiprocessors of the largest common part: fixed here, not read off the device, so
# that the order of summation depends on the architecture alone
MULTIPROCESSORS = {80: 108, 90: 132, 100: 148}

MAX_SPLITS = 16

# every layer of every step asks again, while the device waits for the launch
cached = functools.lru_cache(maxsize=1024)

# bytes of scratch memory for gradients that are formed a chunk of examples at a time
WORKSPACE = 256 * 2**20


@dataclasses.dataclass(frozen=True)
class TileConfig:
    """One kernel configuration.

    `rows` and `columns` are the tile held in registers, `inner` the length of one step of the
    contraction; the function that chooses the tile says what they index.
    """

    rows: int
    columns: int
    inner: int
    num_warps: int
    num_stages: int
    precision: str = "ieee"

    def __str__(self) -> str:
        """The tile as the table writes it; the precision is part of the table's key."""
        tile = f"{self.rows}x{self.columns}x{self.inner}"
        return f"{tile}w{self.num_warps}s{self.num_stages}"

    @functools.cached_property
    def options(self) -> dict[str, int]:
        """Triton's options of every launch with this tile."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}

    @functools.cached_property
    def of_gradients(self) -> dict[str, Any]:
        """Constants and options of kernels that form tiles of gradients."""
        sizes = {"ROWS": self.rows, "COLUMNS": self.columns, "INNER": self.inner}
        return {"PRECISION": self.precision, **sizes, **self.options}

    @functools.cached_property
    def of_positions(self) -> dict[str, Any]:
        """Constants and options of kernels that form square tiles of products of positions."""
        sizes = {"BLOCK": self.rows, "INNER": self.inner}
        return {"PRECISION": self.precision, **sizes, **self.options}

    @functools.cached_property
    def of_streams(self) -> dict[str, int]:
        """Constants and options of kernels that multiply no matrices."""
        return {"COLUMNS": self.columns, "INNER": self.inner, **self.options}

    def shared_bytes(self, itemsize: int) -> int:
        """Estimate of the shared memory that the pipelined operand tiles need."""
        return self.num_stages * (self.rows + self.columns) * self.inner * itemsize

    def is_valid(self, itemsize: int, architecture: int) -> bool:
        """Whether the estimate fits the architecture."""
        return self.shared_bytes(itemsize) <= shared_limit(architecture)


def cdiv(size: int, part: int) -> int:
    """size / part, rounded up; triton's own function takes as long as a small launch."""
    return -(-size // part)


def shared_limit(architecture: int) -> int:
    """Bytes of shared memory that one program may use."""
    return SHARED_LIMIT.get(architecture, SMALLEST_SHARED_LIMIT)


def family(architecture: int) -> int:
    """The tuned architecture whose table serves this one."""
    if architecture in (90, 100):
        return architecture
    if architecture == 103:
        return 100
    # consumer GPUs after Ampere keep its warp-level matrix instructions, with less shared memory
    return 80


def kind(itemsize: int, precision: str) -> str:
    """The row of the table: "half", or the precision of fp32 products."""
    return "half" if itemsize == 2 else precision


def parse(tile: str, precision: str) -> TileConfig:
    """The configuration that `str` of a TileConfig describes."""
    rows, columns, inner, num_warps, num_stages = map(int, re.findall(r"\d+", tile))
    return TileConfig(rows, columns, inner, num_warps, num_stages, precision)


@functools.cache
def shipped(operation: str) -> dict[tuple[int, str, bool], tuple[TileConfig, ...]]:
    """The table of one operation: (architecture, kind, aligned) to configurations."""
    return {
        key: tuple(parse(tile, "ieee" if key[1] == "half" else key[1]) for tile in tiles.split())
        for key, tiles in TABLE[operation].items()
    }


def candidates(
    operation: str, itemsize: int, precision: str, architecture: int, aligned: bool
) -> tuple[TileConfig, ...]:
    """The table's configurations for one class of inputs, largest tile first.

    "highest" takes the split tf32 products where the table lists them, else plain fp32 ones.
    """
    entries = shipped(operation)
    tuned = family(architecture)
    if precision == "highest":
        precision = "tf32x3" if (tuned, "tf32x3", aligned) in entries else "ieee"
    configs = entries[(tuned, kind(itemsize, precision), aligned)]
    return tuple(config for config in configs if config.is_valid(itemsize, architecture))


@cached
def choose(
    operation: str,
    rows: int,
    columns: int,
    itemsize: int,
    precision: str = "ieee",
    architecture: int = 90,
    aligned: bool = True,
    factors: int | None = None,
) -> TileConfig:
    """The tile that covers a rows x columns area of each of several factors at least cost.

    Cost is the area covered, padding included, over the tile's efficiency, which is taken to grow
    as its size to the power 0.3: a tile of twice the size shares operands and needs four fifths of
    the time. With fewer tiles than processors, an idle processor costs as much as a busy one.

    Args:
        operation: of the table, which says what rows, columns and the inner axis of a tile are.
            Products of positions (gram, pairwise, convolution_gram): positions of one factor, those
            of the other, features; tiles of the first and the last are square.
            Tiles of gradients (direct, diagonal, convolution, convolution_fused): output features,
            input features, positions.
            direction: positions of all examples, input features, output features.
        itemsize, precision, architecture, aligned: as of `_check.kind`.
        factors: how many; None for as many as occupy all processors.
    """
    processors = MULTIPROCESSORS[family(architecture)]

    def cost(config: TileConfig) -> float:
        tiles = tiles_of(config, max(rows, 1), max(columns, 1))
        if factors is not None:
            tiles = max(tiles * factors, processors)
        return tiles * (config.rows * config.columns) ** 0.7

    return min(candidates(operation, itemsize, precision, architecture, aligned), key=cost)


def choose_row_splits(row_blocks: int, steps: int, architecture: int = 90) -> int:
    """Number of parts that rows of `steps` steps are divided into: enough for four programs per
    processor, and for at most eight steps a part, beyond which programs hide no more latency."""
    wanted = cdiv(4 * MULTIPROCESSORS[family(architecture)], max(row_blocks, 1))
    return min(steps, max(wanted, cdiv(steps, 8)))


@cached
def choose_partition(
    batch: int, blocks: int, architecture: int = 90, per_processor: int = 4
) -> tuple[int, int]:
    """(examples per program, parts per example) for a walk over examples of `blocks` blocks each.

    Aims at a few programs per processor. With enough examples a program takes whole ones. Fewer are
    divided into the number of parts that finishes first, given that programs beyond those that run
    at once wait for a whole further round.
    """
    wanted = per_processor * MULTIPROCESSORS[family(architecture)]
    if batch >= wanted:
        return cdiv(batch, wanted), 1

    def time(parts: int) -> float:
        return cdiv(batch * parts, wanted) / parts

    most = max(1, min(blocks, cdiv(wanted, max(batch, 1)) + 1))
    return 1, min(range(1, most + 1), key=time)


@cached
def choose_weight_gradient(
    operation: str,
    d_out: int,
    d_in: int,
    batch: int,
    itemsize: int,
    precision: str = "ieee",
    architecture: int = 90,
    aligned: bool = True,
) -> TileConfig:
    """The tile with which the slowest processor finishes first.

    Rows are output features, columns input features, inner positions.
    """
    processors = MULTIPROCESSORS[family(architecture)]

    def cost(config: TileConfig) -> float:
        tiles = max(1, tiles_of(config, d_out, d_in))
        whole, splits = split_tiles(config, tiles, max(1, batch), architecture)
        at_once = programs_at_once(config, architecture)
        examples = cdiv(whole, at_once) * batch + (cdiv(batch, splits) if whole < tiles else 0)
        # programs that run at once share a processor
        sharing = cdiv(min(at_once, whole + (tiles - whole) * splits), processors)
        return examples * sharing * (config.rows * config.columns) ** 0.7

    return min(candidates(operation, itemsize, precision, architecture, aligned), key=cost)


def tiles_of(config: TileConfig, rows: int, columns: int) -> int:
    """Number of tiles that cover a rows x columns area."""
    return cdiv(rows, config.rows) * cdiv(columns, config.columns)


def programs_at_once(config: TileConfig, architecture: int = 90) -> int:
    """Number of programs, each with two accumulators of a tile, that the device runs at once."""
    each = max(1, min(8, 128 * 128 // (config.rows * config.columns)))
    return MULTIPROCESSORS[family(architecture)] * each


@cached
def split_tiles(
    config: TileConfig, tiles: int, batch: int, architecture: int = 90
) -> tuple[int, int]:
    """(tiles whose one program walks all examples, parts that the others' examples are split into).

    Programs run in rounds that fill the device. The tiles of a last, mostly empty round are split
    over examples, which costs an fp32 copy of the tile for each part, written and read once.
    """
    programs = programs_at_once(config, architecture)
    left = tiles % programs
    splits = min(batch, programs // left, MAX_SPLITS) if left else 1
    return (tiles, 1) if splits <= 1 else (tiles - left, splits)


@cached
def choose_splits(tiles: int, batch: int, architecture: int = 90) -> int:
    """Number of ranges of examples that a weight gradient of few tiles is split into.

    Every split costs one more fp32 copy of the gradient, written and read once, so this is the
    smallest number that keeps at least four fifths as much of the device busy as the best one.
    """
    processors = MULTIPROCESSORS[family(architecture)]

    def busy(splits: int) -> float:
        programs = max(1, tiles) * splits
        return programs / (cdiv(programs, processors) * processors)

    options = range(1, max(1, min(batch, MAX_SPLITS)) + 1)
    best = max(busy(splits) for splits in options)
    return next(splits for splits in options if busy(splits) >= 0.8 * best)
