"""What launchers return: no two outputs of an operator share memory.

Compiled code takes every output of an operator to begin an allocation of its own, and PyTorch
forbids operators outputs that alias. So kernels write large outputs to tensors allocated one by
one, and sums that were found together part here. What belongs to an example is fp64, as it is added
up: to round it would be one more operation for each layer, as long as many a small kernel. Parts
of it are fp64 in memory too, where they are few: torch would copy others before it adds them up.
"""

from __future__ import annotations

import torch


def empty(count: int, shape: tuple[int, ...], device: torch.device) -> tuple[torch.Tensor, ...]:
    """As many uninitialised fp32 tensors, each in memory of its own."""
    return tuple(torch.empty(shape, dtype=torch.float32, device=device) for _ in range(count))


def apart(partial: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Sums of fp64 (kinds, B, *) over all axes after the second, of each kind (B,)."""
    return tuple(part.flatten(1).sum(1) for part in partial.unbind(0))
