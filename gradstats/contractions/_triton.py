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
from gradstats.contractions._result import (
    Contraction,
    product_roundoff,
    relative_bound,
    well_conditioned,
)
from gradstats.contractions._tensor_cores import cut_off_of
from gradstats.errors import BackendError

HALF = (torch.bfloat16, torch.float16)
DTYPES = (*HALF, torch.float32)

# Looked for once, here: the compiler warns of functions that remember their results.
HAS_TRITON = importlib.util.find_spec("triton") is not None

# Set to "torch" to contract with PyTorch's own operations on CUDA too.
BACKEND_VARIABLE = "GRADSTATS_BACKEND"


def serves(*factors: Outer | Ragged) -> bool:
    """Whether the kernels contract these factors; the PyTorch backend contracts every other."""
    return runs(*(side for each in factors for side in (each.left, each.right)))


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
    """Whether the kernels that multiply no matrices take these operands, each of its own dtype."""
    for operand in operands:
        if operand is not None and not runs(operand):
            return False
    return True


def convolves(*factors: Patches) -> bool:
    """Whether the kernels contract these convolutions, alone or with each other."""
    first = factors[0]
    if len(first.geometry.stride) > 3 or any(each.geometry != first.geometry for each in factors):
        return False
    return runs(*(side for each in factors for side in each.sides))


def require_triton() -> None:
    """Raise unless Triton can be imported."""
    if not HAS_TRITON:
        raise BackendError(
            "the model is on CUDA, where gradstats contracts with Triton kernels, but triton is "
            "not installed. Install triton>=3.6, or set the environment variable "
            f"{BACKEND_VARIABLE}=torch to contract with PyTorch's own operations, more slowly."
        )


def operators() -> Any:
    """Return the kernels' operators, which programs on CPUs need not have registered."""
    from gradstats.kernels import operators

    return operators


def rank_one(factor: Outer) -> Contraction:
    """Return ‖left‖²‖right‖² in one pass over both operands."""
    a, g = operands_of(factor)
    value = operators().rank_one_sqnorm(a.squeeze(1), g.squeeze(1))
    return well_conditioned(_over_groups(value, factor), torch.float32)


def gram(factor: Outer) -> Contraction:
    """Return Σ_{t,s} (left_t·left_s)(right_t·right_s), what cancels replaced by the direct form."""
    operands = factor.left, factor.right
    numbers = rounding(*operands, cut_off_of(*operands))
    return Contraction(
        *operators().gram_sqnorm(*operands_of(factor), factor.left.shape[1], *numbers)
    )


def rounding(left: Tensor, right: Tensor, cut_off: float) -> tuple[float, float, float, float]:
    """Return what Gram kernels need to bound their errors, and to replace what is off by too much.

    Adding the terms rounds by their magnitudes. An inner product of two rows rounds by the product
    of their norms, however small it comes out, and all terms together by (Σ_t ‖left_t‖‖right_t‖)².
    One that does not come out small loses what the hardware cuts off, in proportion to itself: the
    larger of the two counts, as few products of rows lose both.

    Args:
        left, right: the operands.
        cut_off: what may be cut off an inner product of rows and its partner, relative to both.
    """
    adding = relative_bound(torch.float32)
    return adding, product_roundoff(left, right), cut_off, GUARD_TOLERANCE


def direct(factor: Outer) -> Contraction:
    """Return the squares of gradient tiles that never leave the chip."""
    value = operators().direct_sqnorm(*operands_of(factor))
    return well_conditioned(_over_groups(value, factor), torch.float32)


def direct_and_sum(factor: Outer) -> tuple[Contraction, Tensor]:
    """Return squared norms and Σ_i G_i (1, p, q) from one kernel; for factors of one group."""
    gradient, value = operators().weight_gradient_sqnorm(*operands_of(factor))
    return well_conditioned(value, torch.float32), gradient.unsqueeze(0)


def ragged_gram(factor: Ragged) -> Contraction:
    """Return the Gram form of packed examples, what cancels replaced by the direct form."""
    a, g, bounds = _packed(factor)
    operands = factor.left, factor.right
    numbers = rounding(*operands, cut_off_of(*operands))
    return Contraction(
        *operators().gram_sqnorm(a, g, 1, *numbers, cu_seqlens=bounds, max_seqlen=factor.longest)
    )


def ragged_direct(factor: Ragged) -> Contraction:
    """Return the squares of gradient tiles of packed examples."""
    value = operators().direct_sqnorm(*_packed(factor), max_seqlen=factor.longest)
    return well_conditioned(value, torch.float32)


def ragged_and_sum(factor: Ragged) -> tuple[Contraction, Tensor]:
    """Return squared norms and Σ_i G_i (p, q) of packed examples from one kernel."""
    operands = _packed(factor)
    gradient, value = operators().weight_gradient_sqnorm(*operands, max_seqlen=factor.longest)
    return well_conditioned(value, torch.float32), gradient.reshape(factor.shape)


def _packed(factor: Ragged) -> tuple[Tensor, Tensor, Tensor]:
    """Return a, g and the bounds of the examples as the kernels take them."""
    return factor.right, factor.left, torch.tensor(factor.offsets)


def _both_packed(first: Ragged, second: Ragged) -> tuple:
    (a1, g1, bounds1), (a2, g2, bounds2) = _packed(first), _packed(second)
    return a1, g1, a2, g2, bounds1, bounds2


def ragged_gram_pairs(first: Ragged, second: Ragged) -> Tensor:
    """Return all pairs' products of packed examples through products of rows, (B, B') float64."""
    return operators().pairwise_gram(*_both_packed(first, second)).double()


def ragged_direct_pairs(first: Ragged, second: Ragged, workspace: int) -> Tensor:
    """Return the same from gradients formed chunk by chunk, (B, B') float64."""
    operands = _both_packed(first, second)
    return operators().pairwise_direct(*operands, workspace=workspace).double()


def ragged_gram_diagonal(first: Ragged, second: Ragged) -> Tensor:
    """Return the products of equal indices through products of rows, (B,) float64."""
    value, _ = operators().diagonal_gram(*_both_packed(first, second))
    return value


def ragged_direct_diagonal(first: Ragged, second: Ragged) -> Tensor:
    """Return the same from gradient tiles that never leave the chip, (B,) float64."""
    return operators().direct_inner(*_both_packed(first, second))


def gram_pairs(first: Outer, second: Outer) -> Tensor:
    """Return Σ_{t,s} (left_t·left'_s)(right_t·right'_s) for all pairs, (B, B') float64."""
    rows = first.left.shape[2] == second.left.shape[2] == 1 and first.left.dtype in HALF
    product = _row_pairs if rows else operators().pairwise_gram
    products = (product(*both) for both in _groups(first, second))
    return reduce(torch.add, (part.double() for part in products))


def _row_pairs(a1: Tensor, g1: Tensor, a2: Tensor, g2: Tensor) -> Tensor:
    """Return (A A'ᵀ) ∘ (G G'ᵀ), (B, B') float32, of factors with one position each.

    By PyTorch, whose products of half precision take less than half of the kernel's time.
    """
    result, other = (
        torch.mm(first[:, 0], second[:, 0].T, out_dtype=torch.float32)
        for first, second in ((a1, a2), (g1, g2))
    )
    return result.mul_(other)


def direct_pairs(first: Outer, second: Outer, workspace: int) -> Tensor:
    """Return all pairs' products of gradients formed chunk by chunk, (B, B') float64."""
    products = (
        operators().pairwise_direct(*both, workspace=workspace) for both in _groups(first, second)
    )
    return reduce(torch.add, (part.double() for part in products))


def gram_diagonal(first: Outer, second: Outer) -> Tensor:
    """Return Σ_{t,s} (left_t·left'_s)(right_t·right'_s) of each example, (B,) float64."""
    value, _ = operators().diagonal_gram(*operands_of(first), *operands_of(second))
    return _over_groups(value, first)


def direct_diagonal(first: Outer, second: Outer) -> Tensor:
    """Return the products of gradient tiles that never leave the chip, (B,) float64."""
    value = operators().direct_inner(*operands_of(first), *operands_of(second))
    return _over_groups(value, first)


def direction(factor: Outer, direction: Tensor) -> Tensor:
    """Return Σ_k Σ_t left_tᵀ V_k right_t of each example, (B,) float64.

    Args:
        factor: what is contracted.
        direction: V (K, p, q).
    """
    direction = narrow(direction, factor.left)
    a, g = factor.right.transpose(0, 1), factor.left.transpose(0, 1)  # (K, B, T, ·)
    return reduce(torch.add, map(operators().direction_inner, a, g, direction))


def ragged_direction(factor: Ragged, direction: Tensor) -> Tensor:
    """Return Σ_t left_tᵀ V right_t of packed examples, (B,) float64, for V (p, q)."""
    a, g, bounds = _packed(factor)
    return operators().direction_inner(
        a, g, narrow(direction, a), cu_seqlens=bounds, max_seqlen=factor.longest
    )


def _groups(first: Outer, second: Outer) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Return a, g of both factors for each group: examples of different groups never meet."""
    one, two = (
        list(zip(each.right.unbind(1), each.left.unbind(1), strict=True))
        for each in (first, second)
    )
    return [(*a, *b) for a, b in zip(one, one if first is second else two, strict=True)]


def narrow(direction: Tensor, operand: Tensor) -> Tensor:
    """Return a direction in a dtype that the kernels multiply with an operand."""
    return direction if direction.dtype == operand.dtype else direction.float()


def operands_of(factor: Outer) -> tuple[Tensor, Tensor]:
    """Return a and g of (B·K, T, ·) as the kernels name them: G = Σ_t g_t a_tᵀ."""
    return factor.right.flatten(0, 1), factor.left.flatten(0, 1)


def _over_groups(values: Tensor, factor: Outer) -> Tensor:
    return values if len(values) == factor.batch else values.view(factor.batch, -1).sum(1)
