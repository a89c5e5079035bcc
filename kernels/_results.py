"""What launchers return.

What belongs to an example is fp64, as it is added up: to round it would be one more operation for
each layer, as long as many a small kernel. Parts of it are fp64 in memory too, where they are few:
torch would copy others before it adds them up. Small results that were found together share memory;
for operators they part (`_calls.py`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch


def added(partial: torch.Tensor) -> torch.Tensor:
    """Sums of fp64 (B, parts) over the parts, (B,)."""
    return partial.view(-1) if partial.shape[1] == 1 else partial.sum(1)


def apart(partial: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Sums of fp64 (kinds, B, *) over all axes after the second, of each kind (B,)."""
    if partial.dim() > 3:
        partial = partial.flatten(2)
    return (partial.squeeze(2) if partial.shape[2] == 1 else partial.sum(2)).unbind(0)


def added_pairs(partial: torch.Tensor) -> torch.Tensor:
    """Sums of fp32 (parts, B1, B2) over the parts, in fp64, as fp32 (B1, B2)."""
    return partial[0] if len(partial) == 1 else partial.sum(0, dtype=torch.float64).float()


def empty_like(ragged: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    """What makes the gradient of an input, in its layout."""
    # rows that belong to no example are written by no program
    return torch.zeros_like if ragged else torch.empty_like


def nothing(device: torch.device, *dtypes: torch.dtype) -> tuple[torch.Tensor, ...]:
    """What is returned for results that are not wanted: one element-less tensor of each dtype."""
    return tuple(torch.empty(0, dtype=dtype, device=device) for dtype in dtypes)
