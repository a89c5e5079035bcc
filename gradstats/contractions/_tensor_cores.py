"""How tensor cores truncate the sums on the diagonals of Gram matrices.

NVIDIA documents none of this. Test vectors found (Fasi et al., PeerJ CS 7:e330; Khattak and
Mikaitis, arXiv 2512.07004) that a block of products is added to the accumulator at once: all are
aligned to the largest, truncated a bit or two below float32's last bit, added, and the sum is
truncated again, not rounded. If all terms have one sign, so have all errors: they grow with the
number of blocks, so that rows as long as a vocabulary lose more than the Gram form may.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from gradstats._compiler import is_compiling

# The error that one block of 16 products adds on Hopper, in eps of float32 relative to the sum: 0.4
# for bfloat16, whose products are short, 0.75 for float16 and, in two blocks of 8, 0.9 for the tf32
# parts of float32, all in the emulation of tests/kernels/test_tensor_cores.py. On an H100 it was
# 0.61 for bfloat16 with rows of 51,025 elements and 0.35 with 3840. Before Hopper, blocks are half
# as long and one bit less is kept: twice the error.
EPS_PER_BLOCK = {torch.bfloat16: 0.75, torch.float16: 1.0, torch.float32: 1.0}


def cut_off(dtype: torch.dtype, length: int, capability: tuple[int, int]) -> float:
    """Return how much of a Gram matrix's diagonal truncation may lose, relative to itself.

    Args:
        dtype: of the operands.
        length: of the rows that are multiplied with themselves, those of both matrices together:
            the errors of two factors add up.
        capability: the device's.
    """
    blocks = length / 16 * (1 if capability >= (9, 0) else 2)
    return EPS_PER_BLOCK[dtype] * blocks * torch.finfo(torch.float32).eps


def cut_off_of(left: Tensor, right: Tensor) -> float:
    """Return what truncation may cost the Gram form of two operands; 0 if nothing is truncated."""
    if not left.is_cuda or left.dtype not in EPS_PER_BLOCK or is_compiling():
        return 0.0
    return cut_off(left.dtype, left.shape[-1] + right.shape[-1], _capability(left.device))


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
