"""Regenerates kernels/_table.py, the tile configurations of kernels that multiply matrices.

    python -m benchmarks.tune_linear_kernels                # on a GPU: the fastest of each class
    python -m benchmarks.tune_linear_kernels --compile-only # anywhere: the first without spills
    python -m benchmarks.tune_linear_kernels --repair       # anywhere: replaces tiles that spill

Candidates are grouped in classes by tile size, preferred first. A candidate that spills registers
or exceeds the shared memory of its architecture is out. Without a GPU the first that remains
stands for its class; with one, all that remain are timed on the class's shape and the fastest
stands. Only the entries of the architectures asked for are replaced.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from gradstats.kernels import _config, _table
from gradstats.kernels._config import TileConfig

from benchmarks.kernel_harness import ROUNDING

TABLE_PATH = Path(_table.__file__)


def candidates(operation: str, kind: str) -> list[list[tuple[int, int, int, int, int]]]:
    """Classes of (rows, columns, inner, warps, stages), largest tile first, preferred first."""
    # one step of the contraction is one 128-byte line of each operand row
    line = 64 if kind == "half" else 32
    half = line // 2

    def tiles(rows, columns, *options):
        return [(rows, columns, inner, warps, stages) for inner, warps, stages in options]

    usual = ((line, 8, 3), (half, 8, 3), (half, 8, 2), (16, 8, 3), (16, 8, 2))
    small = ((line, 4, 3), (line, 4, 2), (half, 4, 3), (half, 4, 2), (half, 8, 2), (16, 8, 2))
    tiny = ((2 * line, 2, 3), (line, 2, 3), (line, 2, 2), (16, 4, 2))
    if operation == "gram":
        return [
            tiles(128, 128, *usual),
            tiles(64, 64, *small),
            tiles(32, 32, *small),
            tiles(16, 16, *tiny),
        ]
    if operation == "pairwise":
        return [
            tiles(128, 128, *usual),
            tiles(64, 64, *small, (half, 8, 3), (16, 8, 1)),
            tiles(32, 32, *small, (16, 4, 2), (16, 8, 1)),
            tiles(16, 16, *tiny),
        ]
    # addresses of patches take registers of their own, so tiles stop at what leaves room for them
    if operation == "convolution":
        return [
            tiles(128, 128, (line, 8, 3), (half, 8, 3), (half, 8, 2), (16, 8, 2)),
            tiles(64, 64, (line, 4, 3), (half, 4, 3), (half, 4, 2), (half, 8, 2), (16, 8, 2)),
            tiles(16, 64, (line, 4, 3), (half, 4, 2), (16, 4, 2)),
        ]
    if operation == "convolution_fused":
        return [
            tiles(128, 64, (line, 8, 3), (half, 8, 3), (half, 8, 2), (16, 8, 2)),
            tiles(64, 64, (line, 4, 3), (half, 4, 3), (half, 4, 2), (half, 8, 2), (16, 8, 2)),
            tiles(16, 64, (line, 4, 3), (half, 4, 2), (16, 4, 2)),
        ]
    if operation == "convolution_gram":
        return [
            tiles(
                64,
                64,
                (line, 8, 3),
                (line, 4, 3),
                (half, 4, 3),
                (half, 4, 2),
                (half, 8, 2),
                (16, 8, 2),
            ),
            tiles(32, 32, (line, 4, 3), (half, 4, 2), (16, 4, 2)),
            tiles(16, 16, (line, 2, 2), (16, 4, 2)),
        ]
    if operation == "direct":
        return [
            tiles(128, 256, *usual),
            tiles(128, 128, (line, 8, 4), *usual),
            tiles(64, 64, (line, 4, 4), *small),
            tiles(16, 64, *small),
        ]
    if operation == "direction":
        return [
            tiles(128, 128, *usual),
            tiles(64, 128, *small),
            tiles(64, 64, *small),
            tiles(16, 64, *small),
        ]
    descriptors = operation.endswith("_descriptor")
    return [
        tiles(128, 128, (line, 8, 5), (line, 8, 4), *usual),
        tiles(64, 256, (line, 8, 5), (line, 8, 4), (line, 8, 3), (line, 8, 2)),
        tiles(64, 128, *small, (line, 8, 3), (half, 8, 3)),
        tiles(64, 64, (line, 4, 4), *small),
        *([] if descriptors else [tiles(16, 64, *small)]),
    ]


def classes_of_inputs(operation: str, architectures: Iterable[int]):
    """(architecture, kind, aligned) of every entry that the table needs."""
    for key in itertools.product(architectures, _config.KINDS, (True, False)):
        if operation.endswith("_descriptor") and (key[0] < 90 or not key[2]):
            continue
        yield key


def is_clean(
    operation: str, config: TileConfig, key: tuple[int, str, bool], store: Path | None = None
) -> bool:
    """Whether every launch of the operation compiles within its limits.

    Args:
        operation, config, key: the entry of the table, and the tile.
        store: file of what is known of launches, as `tests.kernels.compiled.sweep` keeps it.
    """
    cases = importlib.import_module("tests.kernels.compiled.cases")
    sweep = importlib.import_module("tests.kernels.compiled.sweep")
    sharing = [name for name, other in cases.SHARED_TILES.items() if other == operation]
    chosen = [
        cases.Case(name, *key, config, layout, 0, False)
        for name in (operation, *sharing)
        if cases.takes(name, config)
        for layout in cases.layouts(name)
    ]
    facts = sweep.sweep(chosen, sweep.Store(store))
    return not any(sweep.findings(found, case) for case, found in facts)


def repaired(operation: str, key: tuple[int, str, bool], store: Path | None) -> str:
    """The table's entry with tiles that do not compile within their limits replaced.

    A tile that does stands. Another gives way to the first candidate of its size that does.
    """
    kept, itemsize = [], 2 if key[1] == "half" else 4
    for config in _config.shipped(operation)[key]:
        options = [config]
        for candidate in itertools.chain(*candidates(operation, key[1])):
            if candidate[:2] == (config.rows, config.columns):
                options.append(TileConfig(*candidate, config.precision))
        options = [each for each in options if each.is_valid(itemsize, key[0])]
        found = next((each for each in options if is_clean(operation, each, key, store)), None)
        if found is not None:
            kept.append(str(found))
    return " ".join(kept)


def measure(operation: str, config: TileConfig, kind: str, aligned: bool) -> float:
    """Milliseconds of the operation on a shape that fills this configuration's tile."""
    from triton.testing import do_bench

    dtype = torch.bfloat16 if kind == "half" else torch.float32
    call_of = convolution_call if operation.startswith("convolution") else linear_call
    call = call_of(operation, config, dtype, aligned)
    return do_bench(call, warmup=50, rep=200, return_mode="median")


def linear_call(operation: str, config: TileConfig, dtype: torch.dtype, aligned: bool) -> Callable:
    """The operation on sequences whose features and positions fill the tile."""
    from gradstats.kernels import direct, direction, gram, pairwise, weight_gradient

    large = config.rows * config.columns >= 128 * 128
    width = 2048 if large else 512 if config.rows >= 64 else 48
    features = width if aligned else width - 7
    positions = 1024 if large else 256 if config.rows >= 64 else config.rows
    batch = 16 if large else 64
    if operation in ("gram", "pairwise"):
        features, positions = 1024 if aligned else 1017, 8 * config.rows
    a, g = (torch.randn(batch, positions, features, device="cuda", dtype=dtype) for _ in range(2))
    weight = torch.randn(features, features, device="cuda", dtype=dtype)
    if operation.startswith("weight_gradient"):
        descriptors = operation.endswith("_descriptor")
        fused = weight_gradient.weight_gradient_sqnorm
        return lambda: fused(a, g, config=config, descriptors=descriptors)
    functions: dict[str, tuple[Callable, tuple]] = {
        "gram": (gram.gram_sqnorm, (a, g, 1, *ROUNDING)),
        "direct": (direct.direct_sqnorm, (a, g)),
        "diagonal": (direct.direct_inner, (a, g, a, g)),
        "pairwise": (pairwise.pairwise_gram, (a[:, :4], g[:, :4]) * 2),
        "direction": (direction.direction_inner, (a, g, weight)),
    }
    function, operands = functions[operation]
    return lambda: function(*operands, config=config)


def convolution_call(
    operation: str, config: TileConfig, dtype: torch.dtype, aligned: bool
) -> Callable:
    """The operation on a 3x3 layer whose channels fill the tile, channels last where aligned."""
    from gradstats.kernels import convolution, convolution_gram

    side = 7 if operation.endswith("gram") else 28
    outputs = 256 if config.rows >= 64 else config.rows
    layout = torch.channels_last if aligned else torch.contiguous_format
    x, g = (
        torch.randn(64, channels, side, side, device="cuda", dtype=dtype).to(memory_format=layout)
        for channels in (256, outputs)
    )
    function = {
        "convolution": convolution.convolution_sqnorm,
        "convolution_fused": lambda x, g, *layer, config: convolution.convolution_inner(
            x, g, x, g, *layer, config=config
        ),
        "convolution_gram": lambda x, g, *layer, config: convolution_gram.convolution_gram_sqnorm(
            x, g, *layer, *ROUNDING, config=config
        ),
    }[operation]
    return lambda: function(x, g, (3, 3), (1, 1), (1, 1), (1, 1), 1, config=config)


def tune(operation: str, key: tuple[int, str, bool], timed: bool) -> str:
    """The table entry of one class of inputs: one configuration per class of tiles."""
    architecture, kind, aligned = key
    itemsize = 2 if kind == "half" else 4
    chosen = []
    for group in candidates(operation, kind):
        best: tuple[float, TileConfig] | None = None
        for row in dict.fromkeys(group):
            config = TileConfig(*row, precision="ieee" if kind == "half" else kind)
            if not config.is_valid(itemsize, architecture):
                continue
            if not is_clean(operation, config, key):
                continue
            if not timed:
                best = (0.0, config)
                break
            milliseconds = measure(operation, config, kind, aligned)
            print(f"  {operation} {key} {config}: {milliseconds:.4f} ms", flush=True)
            if best is None or milliseconds < best[0]:
                best = (milliseconds, config)
        if best is not None:
            chosen.append(str(best[1]))
    return " ".join(chosen)


def render(table: dict[str, dict[tuple[int, str, bool], str]]) -> str:
    """The source of kernels/_table.py."""
    lines = [
        '"""Tile configurations, generated by benchmarks/tune_linear_kernels.py.',
        "",
        "TABLE[operation][architecture, kind, aligned] lists tiles, largest first, each written",
        "{rows}x{columns}x{inner}w{num_warps}s{num_stages}; `_config.py` says what they mean.",
        '"""',
        "",
        "TABLE: dict[str, dict[tuple[int, str, bool], str]] = {",
    ]
    for operation, entries in table.items():
        lines.append(f'    "{operation}": {{')
        for (architecture, kind, aligned), tiles in sorted(entries.items()):
            lines.append(f'        ({architecture}, "{kind}", {aligned}): "{tiles}",')
        lines.append("    },")
    return "\n".join([*lines, "}", ""])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compile-only", action="store_true", help="choose without timing")
    parser.add_argument("--repair", action="store_true", help="replace only tiles that spill")
    parser.add_argument("--store", type=Path, help="with --repair, the store of a sweep")
    parser.add_argument(
        "--operations", nargs="+", choices=_config.MATMULS, default=list(_config.MATMULS)
    )
    parser.add_argument(
        "--architectures", nargs="+", type=int, choices=_config.ARCHITECTURES, default=None
    )
    parser.add_argument("--out", type=Path, default=TABLE_PATH)
    options = parser.parse_args(arguments)
    timed = not (options.compile_only or options.repair)
    if timed and not torch.cuda.is_available():
        parser.error("timing needs a CUDA device; pass --compile-only to choose without one")
    if options.architectures is None:
        own = torch.cuda.get_device_capability() if timed else None
        options.architectures = (
            [_config.family(10 * own[0] + own[1])] if timed else list(_config.ARCHITECTURES)
        )

    table = {name: dict(_table.TABLE.get(name, {})) for name in _config.MATMULS}
    for operation in options.operations:
        for key in classes_of_inputs(operation, options.architectures):
            if options.repair and key not in table[operation]:
                continue
            if options.repair:
                tiles = repaired(operation, key, options.store)
            else:
                tiles = tune(operation, key, timed)
            if tiles != table[operation].get(key):
                print(operation, key, table[operation].get(key), "->", tiles, flush=True)
            if tiles:
                table[operation][key] = tiles
            else:
                table[operation].pop(key, None)
    options.out.write_text(render(table))


if __name__ == "__main__":
    main()
