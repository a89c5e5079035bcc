"""The limits of Gram matrices' errors in units of float32's eps, as ``assert_close`` takes them."""

from __future__ import annotations

import torch

from gradstats.contractions._tensor_cores import cut_off


def gram_factor(dtype: torch.dtype, length: int, capability: tuple[int, int]) -> float:
    """By how many eps of float32 a Gram matrix's diagonal may be off, as `cut_off` takes it."""
    return cut_off(dtype, length, capability) / torch.finfo(torch.float32).eps
