"""Which algorithm contracts a convolution's factor, decided from shapes alone (see ``_cost``)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from gradstats._cost import CACHE_BYTES

ConvolutionWay = Literal["patches", "groups", "alone"]

# Elements of patches that can be written and multiplied in the time that oneDNN takes for even the
# smallest grouped convolution, about 150 µs.
FEW_PATCHES = 2**16

# Elements of one example's patches above which oneDNN is faster example by example, if channels do
# not divide into its blocks: gradients of 14 channels take twice as long as gradients of 16.
MANY_PATCHES = 400_000
CHANNEL_BLOCK = 8

# Positions from which convolutions over one axis are as fast with few channels as with many.
LONG_SEQUENCE = 1024


def convolution_chunk(operands: int, gradient: int, examples: int, workspace: int) -> int:
    """Return how many examples become the groups of one grouped weight-gradient call.

    Computing several small gradients at once takes as little as a fifth of the time that they take
    one by one (two cores of an AMD EPYC, 3×3 convolutions of 16 to 512 channels). Calls for 4 MiB
    of gradients take 0.90 to 0.99 of the time of calls for 1 MiB, but for 8 MiB up to 1.4 times as
    long if the C library maps fresh pages (one core, gradients of 36 KiB to 2.3 MiB each).

    Args:
        operands, gradient: bytes of one example's operands and of its gradient.
        examples: number of examples B.
        workspace: bytes of scratch.
    """
    fits = min(4 * CACHE_BYTES // max(1, gradient), workspace // max(1, operands + gradient))
    return max(1, min(examples, 64, fits))


def convolution_way(
    channels: int, outputs: int, kernel: Sequence[int], positions: int, groups: int, examples: int
) -> ConvolutionWay:
    """Choose how the norms of a convolution's per-example gradients are computed.

    The chosen way takes 1.05 to 1.12 times as long as the fastest (two cores of an AMD EPYC, 2600
    convolutions over one to three axes with 1 to 256 channels). Patches are best for pointwise
    kernels, whose patches are the input itself; for few positions with many outputs; for few
    channels, which a convolution pads to a block, except over long sequences; and if writing them
    takes less time than calling a convolution. Large images and volumes with padded channels take a
    third of the time if they are convolved one by one.

    Args:
        channels: number of input channels in one group.
        outputs: number of output channels of all groups.
        kernel: its size along each axis.
        positions: number of positions T of one example.
        groups: number of groups.
        examples: number of examples B.

    Returns:
        "patches" for outer products with patches that are written out, "groups" for one convolution
        with the examples as its groups, "alone" for one convolution for each example.
    """
    size, rows = math.prod(kernel), outputs // groups
    if len(kernel) == 1 and channels < CHANNEL_BLOCK and positions >= LONG_SEQUENCE:
        return "groups"
    if 1 in (positions, size) or rows**2 > 64 * positions:
        return "patches"
    if groups > 1:
        return "groups"
    padded = channels % CHANNEL_BLOCK > 0
    patches = positions * channels * size
    if patches > MANY_PATCHES and len(kernel) > 1 and (padded or outputs % CHANNEL_BLOCK > 0):
        return "alone"
    if (padded and channels < 2 * CHANNEL_BLOCK) or examples * patches <= FEW_PATCHES:
        return "patches"
    return "groups"
