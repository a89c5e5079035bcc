"""Convolution statistics prepared for one layout, on copies of operands where that is faster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

Copy = Callable[[torch.Tensor], torch.Tensor]


def channels_last(operand: torch.Tensor) -> torch.Tensor:
    """The operand (B, C, ...) with channels adjacent, copied if they are not."""
    if operand.stride(1) <= 1 or operand.numel() == 0:
        return operand
    # copy the elements of an expanded axis once
    own = operand[tuple(slice(0, 1 if step == 0 else None) for step in operand.stride())]
    return own.movedim(1, -1).contiguous().movedim(-1, 1).expand(operand.shape)


def flat(g: torch.Tensor) -> torch.Tensor:
    """Gradients (B, O, *positions) with their positions along one axis."""
    return g.flatten(2)


def flat_channels_last(g: torch.Tensor) -> torch.Tensor:
    """The same with channels adjacent."""
    return channels_last(flat(g))


class Arranged(NamedTuple):
    """A computation on a convolution's operands, prepared for all operands of one layout.

    Attributes:
        copy_x, copy_g: make the copies that the kernel reads; None if it reads the operand itself.
        compute: takes the operands or their copies.
    """

    copy_x: Copy | None
    copy_g: Copy | None
    compute: Callable[[torch.Tensor, torch.Tensor], Any]

    def __call__(self, x: torch.Tensor, g: torch.Tensor) -> Any:
        if self.copy_x is not None:
            x = self.copy_x(x)
        if self.copy_g is not None:
            g = self.copy_g(g)
        return self.compute(x, g)
