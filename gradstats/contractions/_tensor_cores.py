"""How tensor cores truncate the sums on the diagonals of Gram matrices.

NVIDIA does not document this. Experiments (Fasi et al., PeerJ CS 7:e330; Khattak and Mikaitis,
arXiv 2512.07004) found that a block of products is added to the accumulator at once: all are
aligned to the largest, truncated a bit or two below float32's last bit, and added, and the sum is
truncated again rather than rounded. If all terms have one sign, so have all errors: they grow with
the number of blocks, and rows as long as a vocabulary lose more than the Gram form may.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from gradstats._compiler import is_compiling

# The error that one block of 16 products adds on Hopper, in eps of float32 relative to the sum. The
# emulation in tests/kernels/test_tensor_cores.py gives 0.4 for bfloat16, whose products are short,
# 0.75 for float16 and, in two blocks of 8, 0.9 for the TF32 parts of float32. Measured on an H100:
# 0.61 for bfloat16 with rows of 51,025 elements, 0.35 with 3840. Before Hopper, blocks are half as
# long and one bit less is kept: twice the error.
EPS_PER_BLOCK = {torch.bfloat16: 0.75, torch.float16: 1.0, torch.float32: 1.0}


def cut_off(dtype: torch.dtype, length: int, capability: tuple[int, int]) -> float:
    """Return how much of a Gram matrix's diagonal truncation may lose, relative to itself.

    Args:
        dtype: of the operands.
        length: of the rows of both Gram matrices together, since the errors of two factors add up.
        capability: of the device.
    """
    blocks = length / 16 * (1 if capability >= (9, 0) else 2)
    return EPS_PER_BLOCK[dtype] * blocks * torch.finfo(torch.float32).eps


def cut_off_of(left: Tensor, right: Tensor) -> float:
    """Return how much truncation may cost the Gram form of two operands; 0 if none happens."""
    if not left.is_cuda or left.dtype not in EPS_PER_BLOCK or is_compiling():
        return 0.0
    return cut_off(left.dtype, left.shape[-1] + right.shape[-1], _capability(left.device))


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
