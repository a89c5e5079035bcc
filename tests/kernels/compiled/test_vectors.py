"""What lies side by side in memory is read in vectors of 16 bytes, whichever axis it is.

Read one number at a time, an operand takes eight loads in place of one, and kernels that stream
wait for their loads.
"""

import collections
import re
from unittest import mock

import pytest
import torch
from gradstats.kernels import (
    _check,
    direct,
    gram,
    group_norm,
    layer_norm,
    means,
    rank_one,
    scale_backward,
    statistics,
    vector,
)
from gradstats.kernels.statistics import Statistics

from tests.kernels.compiled import aot, launches
from tests.kernels.reference import ROUNDING


def on_meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


FEATURES = on_meta(8, 784, 256)  # adjacent, as rows of a sequence and images with channels last
POSITIONS = on_meta(8, 256, 784).mT  # adjacent, as images with channels first
WIDE = on_meta(8, 784, 8192)
WEIGHT, CHANNELS = on_meta(256), on_meta(256, dtype=torch.float32)
ROWS = on_meta(8, 784, dtype=torch.float32)
NORMALISED = {"mean": CHANNELS, "rstd": CHANNELS}
NORMS_ALONE = {"input_gradient": False, "sums": False}

# What is read, by how many loads of one number at most (statistics, a channel's weight).
READ = {
    "rank one": (0, lambda _: rank_one.rank_one_sqnorm(FEATURES[:, 0], FEATURES[:, 0])),
    "vector": (0, vector.vector_sqnorm),
    "sums of a vector": (0, vector.vector_sum),
    "shift": (0, lambda x: scale_backward.scale_backward(x, None, input_gradient=False)),
    "scale": (2, lambda x: scale_backward.scale_backward(x, x, **NORMALISED, **NORMS_ALONE)),
    "scale and input": (
        3,
        lambda x: scale_backward.scale_backward(x, x, weight=WEIGHT, **NORMALISED),
    ),
    "layer norm": (0, lambda _: layer_norm.layer_norm_sqnorm(FEATURES, FEATURES, 1e-5)),
    "group norm": (0, lambda x: group_norm.group_norm_backward(x, x, None, 32, 1e-5)),
    "statistics of rows": (0, lambda _: statistics.row_statistics(WIDE, 1e-5, False)),
    "statistics of groups": (0, lambda x: statistics.group_statistics(x, 1, 1e-5)),
    "means of rows": (
        2,
        lambda _: means.with_means(Statistics(ROWS, ROWS, by_position=True), WIDE, WIDE, None),
    ),
    "gram": (0, lambda x: gram.gram_sqnorm(x, x, 1, *ROUNDING)),
    "direct": (0, lambda x: direct.direct_sqnorm(x, x)),
}


def loads_of(ptx: str) -> collections.Counter[int]:
    """How many loads there are of so many bytes."""
    found: collections.Counter[int] = collections.Counter()
    for vector_of, bits in re.findall(
        r"ld\.global(?:\.\w+(?:::\w+)*?)*?(?:\.v(\d))?\.[bufs](\d+)", ptx
    ):
        found[int(vector_of or 1) * int(bits) // 8] += 1
    for size in re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^]]*\], \[[^]]*\], 0x(\w+)", ptx):
        found[int(size, 16)] += 1
    return found


@pytest.mark.parametrize("axis", ["features", "positions"])
@pytest.mark.parametrize("name", READ)
def test_what_is_adjacent_is_read_in_vectors(name, axis):
    narrow, launch = READ[name]
    with (
        aot.recorded(*launches.MODULES) as recorded,
        mock.patch.object(_check, "_runs_here", lambda device: True),
    ):
        launch(FEATURES if axis == "features" else POSITIONS)
    loads = loads_of(aot.compile_launch(recorded[0], 90).ptx)
    assert loads[16] >= 1
    assert sum(count for size, count in loads.items() if size < 16) <= narrow, loads
