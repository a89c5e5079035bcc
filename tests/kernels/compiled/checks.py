"""What a compiled kernel must satisfy, as functions that raise AssertionError."""

from __future__ import annotations

import re

from gradstats.kernels._config import TileConfig

from tests.kernels.compiled.aot import Compiled
from tests.kernels.compiled.sass import Local

NONE = Local()

# Bytes per thread that any kernel may move to and from local memory outside its innermost loops:
# eight words set aside and fetched again, once for a whole sum.
OUTSIDE = 64

# What may move beyond that, by operation, architecture and tile: the most that any of the supported
# compilers, triton 3.6, 3.7 and 3.9, makes of it.
ALLOWED_SPILLS = {
    # Once per program, around the loop over positions or features. A tile of this size that spills
    # nowhere halves the length of every step.
    ("gram", 80, "64x64x16w4s3"): Local(once=92),
    ("gram", 90, "64x64x32w4s3"): Local(once=76),
    # The same, of kernels that take the tile of another that it suits.
    ("tied", 80, "64x64x32w4s3"): Local(once=120),
    ("tied", 100, "64x64x32w4s3"): Local(once=120),
    # The same, where every tile of the size whose loads are pipelined spills as much on one of the
    # compilers: fp32 products, plain or of split operands.
    ("gram", 100, "128x128x16w8s3"): Local(once=76),
    ("pairwise", 80, "64x64x16w8s2"): Local(once=76, outer=36),
    ("pairwise", 90, "64x64x16w8s2"): Local(once=92, outer=28),
    ("pairwise", 90, "64x64x16w8s3"): Local(once=116, outer=36),
    # Five words read again in a step of sixty-four positions, on one compiler; the tile of this
    # size that spills nowhere halves the step.
    ("convolution", 90, "128x128x64w8s3"): Local(once=20, inner=20),
}

# Of kernels that have work for suspects of Gram forms alone, with tiles of those that always have:
# a few words in a step, which of them differs from compiler to compiler.
RARE = Local(once=44, inner=44)

# Outside the loop over positions, of kernels that wait for memory: the assembler keeps them to at
# most half of the registers, so that several programs run side by side.
ALLOWED_SPILLS |= {
    ("depthwise", 80, "16x1x256w8s1"): Local(once=44, outer=52),
    ("depthwise", 90, "16x1x256w8s1"): Local(once=40, outer=44),
    ("depthwise", 100, "16x1x256w8s1"): Local(once=40, outer=44),
    ("scale_one_position", 80, "1x2048x1w8s1"): Local(once=108),
    ("scale_one_position", 80, "1x512x1w4s1"): Local(once=108),
    ("scale_one_position", 80, "1x128x1w2s1"): Local(once=108),
}

TENSOR_CORES = {80: r"\bmma\.sync", 90: r"wgmma\.mma_async", 100: r"tcgen05\.mma"}
WARP_LEVEL = r"\bmma\.sync"


def check_shared(compiled: Compiled, limit: int) -> None:
    assert compiled.shared <= limit, f"{compiled.name}: {compiled.shared} bytes of shared memory"


def allowed_spills(operation: str, architecture: int, config: TileConfig) -> Local:
    return ALLOWED_SPILLS.get((operation, architecture, str(config)), Local())


def check_spills(compiled: Compiled, allowed: Local = NONE) -> None:
    """No local memory in an innermost loop and little outside, save what is listed."""
    if compiled.name.endswith("recompute_kernel"):
        allowed = Local(*map(max, allowed, RARE))
    spills = compiled.spills
    outside = max(OUTSIDE, allowed.once + allowed.outer)
    assert spills.inner <= allowed.inner and spills.once + spills.outer <= outside, (
        f"{compiled.name}: bytes are spilled at {compiled.registers} registers: {spills}; allowed: "
        f"{outside} outside innermost loops, {allowed.inner} inside"
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
