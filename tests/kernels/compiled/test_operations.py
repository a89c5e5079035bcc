"""How much a launcher asks of the device beside its kernel: every operation is a launch too.

In a training step that is waited for by nobody each costs the host as long as a kernel's launch
takes, and the device about three microseconds, whatever its size.
"""

from unittest import mock

import pytest
import torch
from gradstats.kernels import (
    _check,
    convolution_gram,
    direct,
    gram,
    group_norm,
    layer_norm,
    rank_one,
    scale_backward,
    vector,
    weight_gradient,
)
from torch.utils._python_dispatch import TorchDispatchMode

from tests.kernels.compiled import aot, launches
from tests.kernels.reference import ROUNDING

# what moves no data
FREE = {"empty", "new_empty", "empty_like", "view", "unbind", "select", "slice"}
FREE |= {"unsqueeze", "flatten", "_unsafe_view", "transpose", "permute"}


class Operations(TorchDispatchMode):
    """Notes the operations that would be launched."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        if name not in FREE:
            self.names.append(name)
        dtype = (kwargs or {}).get("dtype")
        if name == "sum" and dtype not in (None, args[0].dtype):
            self.names.append("copied for the sum")  # as torch does on CUDA, save half to float
        return func(*args, **(kwargs or {}))


def on_meta(*shape):
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


A, G, WEIGHT = on_meta(8, 1024, 768), on_meta(8, 1024, 768), on_meta(768)
X = on_meta(8, 64, 14, 14).to(memory_format=torch.channels_last)
LAYER = ((3, 3), (1, 1), (1, 1), (1, 1), 1)
BOUNDS = torch.empty(5, dtype=torch.int32, device="meta")
LAUNCHED = {
    "rank one": (1, 2, lambda: rank_one.rank_one_sqnorm(A[:, 0], G[:, 0])),
    "vector": (1, 1, lambda: vector.vector_sqnorm(G)),
    "gram": (3, 0, lambda: gram.gram_sqnorm(A, G, 1, *ROUNDING)),
    "gram, ragged": (
        3,
        1,
        lambda: gram.gram_sqnorm(A[0], G[0], 1, *ROUNDING, cu_seqlens=BOUNDS, max_seqlen=512),
    ),
    "gram of patches": (
        3,
        0,
        lambda: convolution_gram.convolution_gram_sqnorm(X, X, *LAYER, *ROUNDING),
    ),
    "direct": (1, 1, lambda: direct.direct_sqnorm(A, G)),
    "weight gradient": (1, 1, lambda: weight_gradient.weight_gradient_sqnorm(A, G, splits=1)),
    "its examples split": (2, 1, lambda: weight_gradient.weight_gradient_sqnorm(A, G, splits=4)),
    "bias": (2, 0, lambda: scale_backward.scale_backward(G, None, input_gradient=False)),
    "layer norm": (2, 0, lambda: layer_norm.layer_norm_backward(A, G, WEIGHT, 1e-5)),
    "layer norm, whole examples": (
        2,
        0,
        lambda: layer_norm.layer_norm_backward(A, G, WEIGHT, 1e-5, splits=1),
    ),
    "group norm": (2, 1, lambda: group_norm.group_norm_backward(A, G, WEIGHT, 16, 1e-5)),
}


@pytest.mark.parametrize("name", LAUNCHED)
def test_launchers_add_few_operations_to_their_kernel(name):
    launched, most, launch = LAUNCHED[name]
    with (
        aot.recorded(*launches.MODULES) as kernels,
        mock.patch.object(_check, "_runs_here", lambda device: True),
        Operations() as operations,
    ):
        launch()
    assert len(kernels) == launched
    assert len(operations.names) <= most, operations.names
