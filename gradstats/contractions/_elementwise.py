"""Elementwise factors: scales and shifts whose sums over positions stay on chip.

They are made only for kernels. PyTorch sums them only if they were cast to float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradstats._factors import Elementwise, Factor, Vector
from gradstats.contractions import _triton, _triton_layers, _vector
from gradstats.contractions._result import Contraction


def summed(factor: Elementwise) -> Vector:
    """Return a factor as the vector of its sums."""
    on_chip = _triton.streams(factor.grad, factor.input)
    values = _triton_layers.elementwise_sums(factor) if on_chip else factor.dense()
    return Vector(values, factor.shape)


def lean(factor: Factor) -> Factor:
    """Return a factor in the form in which to keep it until others arrive.

    Of a scale or a shift, the gradients themselves are kept, (B, C).
    """
    return summed(factor) if isinstance(factor, Elementwise) else factor


def sqnorm(factor: Elementwise, workspace: int) -> Contraction:
    """Return ‖Σ_t input_t ∘ grad_t‖²."""
    return _triton_layers.elementwise(factor, None, (False, None))[0]


def sqnorm_and_sum(
    factor: Elementwise, workspace: int, dtype: torch.dtype | None = None
) -> tuple[Contraction, Tensor]:
    """Return squared norms and Σ_i G_i, in one pass.

    Args:
        factor: what is contracted.
        workspace: bytes of scratch memory.
        dtype: the preferred one for the sum, which may come in another; None for any.
    """
    norms, total, _ = _triton_layers.elementwise(factor, None, (False, dtype or torch.float32))
    assert total is not None
    return norms, total


def direction(factor: Elementwise, direction: Tensor, workspace: int) -> Tensor:
    """Return ⟨G_i, V⟩."""
    return _triton_layers.elementwise_direction(factor, direction)


def total(factor: Elementwise) -> Tensor:
    """Return Σ_i G_i in the accumulation dtype."""
    return _vector.total(summed(factor))
