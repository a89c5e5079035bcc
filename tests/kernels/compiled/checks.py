"""What a compiled kernel must satisfy, as functions that raise AssertionError."""

from __future__ import annotations

import re

import triton
from gradstats.kernels._config import TileConfig

from tests.kernels.compiled.aot import Compiled

# bytes that may spill, stores and loads together, by operation, architecture and tile
ALLOWED_SPILLS = {
    # two accumulators of this tile are the whole register file; what spills is a few words of the
    # sum over examples, touched where an example ends and not in the loop over positions
    ("weight_gradient_descriptor", 90, "128x256x64w8s3"): 320,
    ("weight_gradient_descriptor", 90, "128x256x64w8s4"): 320,
    # plain fp32 products: every tile spills on one of the supported compilers, these least
    ("pairwise", 80, "64x64x16w8s2"): 128,
    ("pairwise", 90, "64x64x16w8s2"): 88,
    ("pairwise", 90, "64x64x16w8s3"): 116,
    # once a tile, behind the loops over features: row norms, addresses of what is gathered
    ("gram", 80, "64x64x64w4s2"): 12,
    ("gram", 80, "64x64x32w4s2"): 12,
    ("gram", 100, "16x16x32w2s3"): 12,
    ("tied", 80, "32x32x64w4s3"): 8,
    ("tied", 80, "64x64x16w4s3"): 32,
}

# a row that is normalised on chip and its sums are held at once; a few words of them spill, outside
# the loop over positions
ALLOWED_SPILLS |= {
    ("layer_norm", architecture, tile): 32
    for architecture in (80, 90, 100)
    for tile in (
        "1x4096x1w16s1",
        "1x2048x1w8s1",
        "2x1024x1w8s1",
        "4x512x1w8s1",
        "8x128x1w4s1",
    )
}

# what the three walks over a group share is kept between them
ALLOWED_SPILLS |= {
    ("group_norm", architecture, tile): 80
    for architecture in (80, 90, 100)
    for tile in ("1x128x16w8s1", "1x32x64w8s1", "1x8x256w8s1", "1x1x1024w8s1")
}

# sums are held while 64-bit addresses of the next tile are formed
ALLOWED_SPILLS |= {
    (operation, architecture, tile): 24
    for architecture in (80, 90, 100)
    for operation, tile in (
        ("depthwise", "16x4x64w8s1"),
        ("depthwise_channels_adjacent", "4x32x32w8s1"),
        ("rows", "1x64x16w4s1"),
    )
}

# of which the oldest supported compiler spills more
ALLOWED_SPILLS |= {
    ("depthwise", architecture, "16x1x256w8s1"): 84 for architecture in (80, 90, 100)
}

# the division that keeps running means
ALLOWED_SPILLS |= {
    ("statistics", 80, tile): 12 for tile in ("1x2048x1w8s1", "1x512x1w4s1", "1x128x1w2s1")
}

TENSOR_CORES = {80: r"\bmma\.sync", 90: r"wgmma\.mma_async", 100: r"tcgen05\.mma"}
WARP_LEVEL = r"\bmma\.sync"


def check_shared(compiled: Compiled, limit: int) -> None:
    assert compiled.shared <= limit, f"{compiled.name}: {compiled.shared} bytes of shared memory"


# The tiles were chosen with this compiler. Another may spill a few words of what they hold: a tile
# that is right for the GPU is not given up for that.
CHOSEN_WITH = "3.7."
FEW = 64


def allowed_spills(operation: str, architecture: int, config: TileConfig) -> int:
    few = 0 if triton.__version__.startswith(CHOSEN_WITH) else FEW
    return max(few, ALLOWED_SPILLS.get((operation, architecture, str(config)), 0))


def check_spills(compiled: Compiled, allowed: int = 0) -> None:
    assert compiled.spilled_bytes <= allowed, (
        f"{compiled.name}: {compiled.spilled_bytes} bytes spilled at {compiled.registers} registers"
    )


def check_tensor_cores(compiled: Compiled, architecture: int, rows: int) -> None:
    """Tiles of at least 64 rows must use the architecture's own instruction, smaller ones any."""
    pattern = TENSOR_CORES[architecture] if rows >= 64 else WARP_LEVEL
    found = re.search(pattern, compiled.ptx) or (rows < 64 and re.search("mma", compiled.ptx))
    assert found, f"{compiled.name}: no {pattern} for sm_{architecture}"


def check_no_atomics(compiled: Compiled) -> None:
    found = re.search(r"^\s*(?:@%p\d+ )?(atom|red)\.", compiled.ptx, re.MULTILINE)
    assert not found and "tt.atomic" not in compiled.ttir, f"{compiled.name}: atomic operation"


def check_offsets(compiled: Compiled) -> None:
    """No 32-bit product contains a stride, directly or after it was spread over a tile."""
    narrow = set(re.findall(r"(%stride\w*): i32", compiled.ttir))
    for line in compiled.ttir.splitlines():
        spread = re.match(r"\s*(%\w+) = tt\.(?:splat|broadcast|expand_dims) (%\w+)\b.*i32>?", line)
        if spread and spread[2] in narrow:
            narrow.add(spread[1])
        product = re.match(r"\s*%\w+ = arith\.muli (%\w+), (%\w+).*: (?:i32|tensor<\w*xi32>)", line)
        assert not (product and narrow & {product[1], product[2]}), (
            f"{compiled.name}: 32-bit offset: {line.strip()}"
        )
    if narrow:
        assert re.search(r"arith\.muli .*: (?:i64|tensor<\w*xi64>)", compiled.ttir)
