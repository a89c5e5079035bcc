"""Results of launchers.

Per-example results stay fp64, the precision in which they are summed: rounding them would take one
more operation per layer, as long as many a small kernel. Their partial sums are fp64 in memory too
where they are few, because torch would copy others before it sums them. Small results of one launch
share memory; operators copy them apart (`_calls.py`).
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
    """The function that allocates the gradient of an input, in its layout."""
    # no program writes rows outside every segment
    return torch.zeros_like if ragged else torch.empty_like


def nothing(device: torch.device, *dtypes: torch.dtype) -> tuple[torch.Tensor, ...]:
    """An empty tensor of each dtype, for results that are not wanted."""
    return tuple(torch.empty(0, dtype=dtype, device=device) for dtype in dtypes)
