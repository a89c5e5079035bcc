"""What every contraction returns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Contraction:
    """Squared norms with what rounding may have done to them.

    Attributes:
        value: (B,) float64.
        bound: (B,) float64, absolute: the products and sums of the contraction may be off by this
            much, given their operands.
    """

    value: Tensor
    bound: Tensor


def unit_roundoff(dtype: torch.dtype) -> float:
    """Return the relative error of one rounded operation in the accumulation dtype."""
    return torch.finfo(dtype).eps / 2


def squared(norms: Tensor) -> Tensor:
    """Return squared norms in float64, the dtype in which sums over parameters are kept."""
    return norms.double().square()
