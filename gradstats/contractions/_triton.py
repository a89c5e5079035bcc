"""The CUDA backend of contractions: registered operators that launch Triton kernels.

Results agree with the PyTorch backend's; nothing of size (B, d) or (B, T, T) is written to memory.
"""

from __future__ import annotations

import importlib.util
import os
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from gradstats._cost import GUARD_TOLERANCE
from gradstats._factors import Outer, Patches, Ragged
from gradstats.contractions._result import Contraction, WellConditioned
from gradstats.contractions._rounding import UNIT_ROUNDOFF, product_roundoff
from gradstats.contractions._tensor_cores import cut_off_of
from gradstats.errors import BackendError

HALF = (torch.bfloat16, torch.float16)
DTYPES = (*HALF, torch.float32)

# The relative error of adding up the terms of a tile on the chip; tiles are added up in float64.
ADDING = 4 * UNIT_ROUNDOFF[torch.float32]

# Determined here, not in a cached function, of which the compiler warns.
HAS_TRITON = importlib.util.find_spec("triton") is not None

# Set to "torch" to contract with PyTorch's own operations on CUDA too.
BACKEND_VARIABLE = "GRADSTATS_BACKEND"


def serves(*factors: Outer | Ragged) -> bool:
    """Whether the kernels contract these factors; otherwise the PyTorch backend does."""
    return runs(*[side for each in factors for side in (each.left, each.right)])


def runs(*operands: Tensor) -> bool:
    """Whether the kernels take these operands together."""
    dtype = operands[0].dtype
    if dtype not in DTYPES:
        return False
    for operand in operands:
        if not operand.is_cuda or operand.dtype != dtype:
            return False
    if os.environ.get(BACKEND_VARIABLE) == "torch":
        return False
    require_triton()
    return True


def streams(*operands: Tensor | None) -> bool:
    """Whether kernels without matrix products take these operands, which may differ in dtype."""
    for operand in operands:
        if operand is not None and not runs(operand):
            return False
    return True


def convolves(*factors: Patches) -> bool:
    """Whether the kernels contract this convolution, or several with each other."""
    first = factors[0]
    if len(first.geometry.stride) > 3 or any(each.geometry != first.geometry for each in factors):
        return False
    return runs(*(side for each in factors for side in each.sides))


def require_triton() -> None:
    """Raise unless Triton can be imported."""
    if not HAS_TRITON:
        raise BackendError(
            "the model is on CUDA, where gradstats uses Triton kernels, but triton is not "
            "installed. Install triton>=3.6, or set the environment variable "
            f"{BACKEND_VARIABLE}=torch to use PyTorch's own operations, which are slower."
        )


def operators() -> Any:
    """Return the kernels' operators, imported on first use: programs on CPUs need none."""
    # Not by "from gradstats.kernels import", which runs Python code each time.
    import gradstats.kernels.operators as operators

    return operators


def rank_one(factor: Outer) -> Contraction:
    """Return ‖left‖²‖right‖² in one pass over both operands."""
    a, g = operands_of(factor)
    value = operators().rank_one_sqnorm(a.squeeze(1), g.squeeze(1))
    return WellConditioned(torch.float32, value=_over_groups(value, factor))


def gram(factor: Outer | Ragged) -> Contraction:
    """Return Σ_{t,s} (left_t·left_s)(right_t·right_s), recomputed directly where it cancels."""
    operands = factor.left, factor.right
    numbers = rounding(*operands, cut_off_of(*operands))
    groups = 1 if isinstance(factor, Ragged) else factor.left.shape[1]
    a, g = operands_of(factor)
    return Contraction(*operators().gram_sqnorm(a, g, groups, *numbers, *_bounds(factor)))


def rounding(left: Tensor, right: Tensor, cut_off: float) -> tuple[float, float, float, float]:
    """Return the constants by which Gram kernels bound their errors and find inaccurate results.

    These are the rounding error of adding terms, relative to their magnitudes; that of an inner
    product of two rows, relative to the product of the rows' norms, so that all terms together
    round relative to (Σ_t ‖left_t‖‖right_t‖)²; what truncation may take from a large inner product,
    relative to itself; and the tolerance. The larger of the middle two counts, since few inner
    products lose both.

    Args:
        left, right: the operands.
        cut_off: how much truncation may take from inner products of rows, relative to these.
    """
    return ADDING, product_roundoff(left, right), cut_off, GUARD_TOLERANCE


def direct(factor: Outer | Ragged) -> Contraction:
    """Return the squares of gradient tiles that never leave the chip."""
    value = operators().direct_sqnorm(*operands_of(factor), *_bounds(factor))
    return WellConditioned(torch.float32, value=_over_groups(value, factor))


def direct_and_sum(factor: Outer | Ragged) -> tuple[Contraction, Tensor]:
    """Return squared norms and Σ_i G_i (p, q) from one kernel; for factors of one group."""
    operands = operands_of(factor)
    gradient, value = operators().weight_gradient_sqnorm(*operands, *_bounds(factor))
    return WellConditioned(torch.float32, value=value), gradient


def gram_pairs(first: Outer | Ragged, second: Outer | Ragged) -> Tensor:
    """Return Σ_{t,s} (left_t·left'_s)(right_t·right'_s) for all pairs, (B, B') float64."""
    rows = isinstance(first, Outer) and first.longest == second.longest == 1
    rows = rows and first.left.dtype in HALF
    product = _row_pairs if rows else operators().pairwise_gram
    products = (product(*both) for both in _groups(first, second))
    return reduce(torch.add, (part.double() for part in products))


def _row_pairs(a1: Tensor, g1: Tensor, a2: Tensor, g2: Tensor) -> Tensor:
    """Return (A A'ᵀ) ∘ (G G'ᵀ), (B, B') float32, of factors with one position each.

    By PyTorch, whose half-precision products take less than half the kernel's time.
    """
    result, other = (
        torch.mm(first[:, 0], second[:, 0].T, out_dtype=torch.float32)
        for first, second in ((a1, a2), (g1, g2))
    )
    return result.mul_(other)


def direct_pairs(first: Outer | Ragged, second: Outer | Ragged, workspace: int) -> Tensor:
    """Return products of all pairs of gradients, formed chunk by chunk, (B, B') float64."""
    products = (
        operators().pairwise_direct(*both, workspace=workspace) for both in _groups(first, second)
    )
    return reduce(torch.add, (part.double() for part in products))


def gram_diagonal(first: Outer | Ragged, second: Outer | Ragged) -> Tensor:
    """Return Σ_{t,s} (left_t·left'_s)(right_t·right'_s) of each example, (B,) float64."""
    value, _ = operators().diagonal_gram(*_both(first, second))
    return _over_groups(value, first)


def direct_diagonal(first: Outer | Ragged, second: Outer | Ragged) -> Tensor:
    """Return the products of gradient tiles that never leave the chip, (B,) float64."""
    value = operators().direct_inner(*_both(first, second))
    return _over_groups(value, first)


def direction(factor: Outer, direction: Tensor) -> Tensor:
    """Return Σ_k Σ_t left_tᵀ V_k right_t of each example, (B,) float64.

    Args:
        factor: the factor to contract.
        direction: V (K, p, q).
    """
    direction = narrow(direction, factor.left)
    a, g = factor.right.transpose(0, 1), factor.left.transpose(0, 1)  # (K, B, T, ·)
    return reduce(torch.add, map(operators().direction_inner, a, g, direction))


def ragged_direction(factor: Ragged, direction: Tensor) -> Tensor:
    """Return Σ_t left_tᵀ V right_t of packed examples, (B,) float64, for V (p, q)."""
    direction = narrow(direction, factor.right)
    return operators().direction_inner(*operands_of(factor), direction, *_bounds(factor))


def _both(first: Outer | Ragged, second: Outer | Ragged) -> tuple:
    """Return the operands of two factors, and the bounds of the packed examples of each."""
    bounds = _bounds(first)[0], _bounds(second)[0]
    return *operands_of(first), *operands_of(second), *bounds


def _groups(first: Outer | Ragged, second: Outer | Ragged) -> list[tuple]:
    """Return the same for each group; rows of different groups are never multiplied."""
    if isinstance(first, Ragged):
        return [_both(first, second)]
    one, two = (
        list(zip(each.right.unbind(1), each.left.unbind(1), strict=True))
        for each in (first, second)
    )
    return [(*a, *b) for a, b in zip(one, one if first is second else two, strict=True)]


def narrow(direction: Tensor, operand: Tensor) -> Tensor:
    """Return a direction in a dtype that the kernels can multiply with an operand."""
    return direction if direction.dtype == operand.dtype else direction.float()


def operands_of(factor: Outer | Ragged) -> tuple[Tensor, Tensor]:
    """Return a and g as the kernels name them, G = Σ_t g_t a_tᵀ: (B·K, T, ·), or packed rows."""
    if isinstance(factor, Ragged):
        return factor.right, factor.left
    return factor.right.flatten(0, 1), factor.left.flatten(0, 1)


def _bounds(factor: Outer | Ragged) -> tuple[Tensor | None, int | None]:
    """Return the bounds of packed examples and the most rows of one; None for dense examples."""
    if isinstance(factor, Ragged):
        return torch.tensor(factor.offsets), factor.longest
    return None, None


def _over_groups(values: Tensor, factor: Outer | Ragged) -> Tensor:
    return values if values.shape[0] == factor.batch else values.view(factor.batch, -1).sum(1)
