"""Every shipped configuration as a case, and which of them the gate compiles."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from gradstats.kernels import _config, _streaming
from gradstats.kernels._config import TileConfig
from gradstats.kernels._table import TABLE
from gradstats.kernels.tied import LARGEST_TILE

# kernels that take the tiles of another operation
SHARED_TILES = {"example_tiles": "direct", "tied": "gram"}

# kernels that are alike on all architectures: the gate compiles them for one
ALIKE = {*_streaming.TILES} - {"rank_one_half", "rank_one_float", "vector"}

# kernels that take tiles of their own for one kind of operands
KINDS = {"rank_one_half": ("half",), "rank_one_float": ("ieee",)}
ALIGNMENTS = {"depthwise_lines": (True,)}

PATCHES_AND_ROWS = {
    "tied",
    "convolution",
    "convolution_fused",
    "convolution_gram",
}


class Case(NamedTuple):
    """One configuration of one operation.

    Attributes:
        rank: its place in its entry of the table.
        default: the gate compiles it.
    """

    operation: str
    architecture: int
    kind: str
    aligned: bool
    config: TileConfig
    layout: str
    rank: int
    default: bool

    def __str__(self) -> str:
        alignment = "aligned" if self.aligned else "unaligned"
        target = f"{self.operation}-sm_{self.architecture}-{self.kind}"
        return f"{target}-{alignment}-{self.config}-{self.layout}"


def layouts(operation: str) -> tuple[str, ...]:
    """The layouts of operands that an operation's kernels differ by."""
    if operation.endswith("_descriptor") or operation.startswith("depthwise"):
        return ("dense",)
    if operation.startswith("group_norm"):
        return ("dense", "first")
    if operation == "convolution":
        return ("dense", "stem", "grouped")
    if operation == "convolution_gram":
        return ("dense", "stem")
    return ("dense",) if operation == "convolution_fused" else ("dense", "ragged")


def takes(operation: str, config: TileConfig) -> bool:
    """Whether an operation is ever launched with a tile of its entry."""
    return operation != "tied" or config.rows <= LARGEST_TILE


def entries(operation: str) -> dict[tuple[int, str, bool], tuple[TileConfig, ...]]:
    """(architecture, kind, aligned) of operands to the tiles that an operation takes."""
    if operation not in _streaming.TILES:
        return _config.shipped(SHARED_TILES.get(operation, operation))
    kinds = KINDS.get(operation, ("half", "ieee"))
    alignments = ALIGNMENTS.get(operation, (False, True))
    keys = itertools.product(_config.ARCHITECTURES, kinds, alignments)
    return dict.fromkeys(keys, _streaming.tiles(operation))


def is_compiled_by_the_gate(
    operation: str, architecture: int, kind: str, aligned: bool, layout: str
) -> bool:
    """Whether the gate compiles the first tile of an entry of the table.

    Each architecture, alignment and layout of an operation is among them, not each combination.
    """
    if operation.endswith("_descriptor"):
        return kind == "half" or (kind == "tf32x3" and architecture == 90)
    if kind == "tf32x3":
        first = architecture == 90 and not aligned and layout == "dense"
        return first and operation not in PATCHES_AND_ROWS
    own = layouts(operation)
    if kind != "half" or layout != own[-1 if aligned else 0]:
        return False
    return architecture == 90 if operation in ALIKE else aligned == (architecture != 80)


def cases() -> Iterator[Case]:
    """Every case of both tables."""
    for operation in (*_streaming.TILES, *TABLE, *SHARED_TILES):
        for (architecture, kind, aligned), configs in entries(operation).items():
            for rank, config in enumerate(each for each in configs if takes(operation, each)):
                for layout in layouts(operation):
                    target = (operation, architecture, kind, aligned)
                    default = rank == 0 and is_compiled_by_the_gate(*target, layout)
                    yield Case(*target, config, layout, rank, default)


def needs_tensor_cores(case: Case, kernel: str) -> bool:
    """Whether a kernel that a case launches multiplies matrices on tensor cores."""
    multiplies = SHARED_TILES.get(case.operation, case.operation) in _config.MATMULS
    adds = kernel.startswith(("segment_sum", "add_parts", "replace"))
    return multiplies and case.kind != "ieee" and not adds
