"""What tensor cores do to sums that Gram matrices have on their diagonals.

NVIDIA documents none of this. Test vectors found (Fasi et al., PeerJ CS 7:e330; Khattak and
Mikaitis, arXiv 2512.07004) that a block of products is added to the accumulator at once: all are
aligned to the largest, cut off a bit or two below float32's last, added, and the sum is cut again,
not rounded. Where all terms have one sign, so have all errors: they grow with the number of blocks.
"""

from __future__ import annotations

import torch

# What one block of 16 products adds to the error of Hopper, in eps of float32 relative to the sum:
# 0.4 of bfloat16, whose products are short, 0.75 of float16 and, in two blocks of 8, 0.9 of the
# tf32 that float32 is made of, all in the emulation of test_tensor_cores.py. No GPU has confirmed
# it. Before Hopper blocks are half as long and one bit less is kept: twice the error.
EPS_PER_BLOCK = {torch.bfloat16: 0.5, torch.float16: 1.0, torch.float32: 1.0}


def gram_factor(dtype: torch.dtype, length: int, capability: tuple[int, int]) -> float:
    """By how many eps of float32 a Gram matrix's diagonal may be off, relative to itself.

    Args:
        dtype: of the operands.
        length: of the rows that are multiplied with themselves, those of both matrices together:
            the errors of two factors add up.
        capability: the device's.
    """
    return EPS_PER_BLOCK[dtype] * length / 16 * (1 if capability >= (9, 0) else 2)
