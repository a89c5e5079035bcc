"""What launchers return: no two outputs of an operator share memory.

Compiled code takes every output of an operator to begin an allocation of its own, and PyTorch
forbids operators outputs that alias. So kernels write large outputs to tensors allocated one by
one, and sums that were found together part here.
"""

from __future__ import annotations

import torch


def empty(count: int, shape: tuple[int, ...], device: torch.device) -> tuple[torch.Tensor, ...]:
    """As many uninitialised fp32 tensors, each in memory of its own."""
    return tuple(torch.empty(shape, dtype=torch.float32, device=device) for _ in range(count))


def rounded(sums: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The slices of fp64 sums along their first axis in fp32, each in memory of its own."""
    return tuple(part.float() for part in sums.unbind(0))
