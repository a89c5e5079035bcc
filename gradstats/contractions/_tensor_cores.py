"""What tensor cores do to sums that Gram matrices have on their diagonals.

NVIDIA documents none of this. Test vectors found (Fasi et al., PeerJ CS 7:e330; Khattak and
Mikaitis, arXiv 2512.07004) that a block of products is added to the accumulator at once: all are
aligned to the largest, cut off a bit or two below float32's last, added, and the sum is cut again,
not rounded. Where all terms have one sign, so have all errors: they grow with the number of blocks,
so that rows as long as a vocabulary lose more than the Gram form may.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from gradstats._compiler import is_compiling

# What one block of 16 products adds to the error of Hopper, in eps of float32 relative to the sum:
# 0.4 of bfloat16, whose products are short, 0.75 of float16 and, in two blocks of 8, 0.9 of the
# tf32 that float32 is made of, all in the emulation of tests/kernels/test_tensor_cores.py. On an
# H100 it was 0.61 of bfloat16 for rows of 51,025 elements and 0.35 for 3840. Before Hopper blocks
# are half as long and one bit less is kept: twice the error.
EPS_PER_BLOCK = {torch.bfloat16: 0.75, torch.float16: 1.0, torch.float32: 1.0}


def cut_off(dtype: torch.dtype, length: int, capability: tuple[int, int]) -> float:
    """Return how much of a Gram matrix's diagonal may be cut off, relative to itself.

    Args:
        dtype: of the operands.
        length: of the rows that are multiplied with themselves, those of both matrices together:
            the errors of two factors add up.
        capability: the device's.
    """
    blocks = length / 16 * (1 if capability >= (9, 0) else 2)
    return EPS_PER_BLOCK[dtype] * blocks * torch.finfo(torch.float32).eps


def cut_off_of(left: Tensor, right: Tensor) -> float:
    """Return what the Gram form of two operands may lose so, 0 where nothing is cut off."""
    if not left.is_cuda or left.dtype not in EPS_PER_BLOCK or is_compiling():
        return 0.0
    return cut_off(left.dtype, left.shape[-1] + right.shape[-1], _capability(left.device))


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
