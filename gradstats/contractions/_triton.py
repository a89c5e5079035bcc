"""The CUDA backend of products' contractions: registered operators that launch Triton kernels.

Results agree with the PyTorch backend's; nothing of size (B, d) or (B, T, T) is written to memory.
"""

from __future__ import annotations

import importlib.util
import os
from functools import cache, reduce

import torch
from torch import Tensor

from gradstats._factors import Outer, Ragged
from gradstats.contractions._result import Contraction, unit_roundoff, well_conditioned
from gradstats.errors import BackendError

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# Set to "torch" to contract with PyTorch's own operations on CUDA too.
BACKEND_VARIABLE = "GRADSTATS_BACKEND"


def serves(*factors: Outer | Ragged) -> bool:
    """Whether the kernels contract these factors; the PyTorch backend contracts every other."""
    operands = [operand for factor in factors for operand in (factor.left, factor.right)]
    dtype = operands[0].dtype
    if dtype not in DTYPES or any(x.dtype != dtype for x in operands):
        return False
    if any(x.device.type != "cuda" for x in operands):
        return False
    if os.environ.get(BACKEND_VARIABLE) == "torch":
        return False
    require_triton()
    return True


@cache
def require_triton() -> None:
    """Raise unless Triton can be imported."""
    if importlib.util.find_spec("triton") is None:
        raise BackendError(
            "the model is on CUDA, where gradstats contracts with Triton kernels, but triton is "
            "not installed. Install triton>=3.6, or set the environment variable "
            f"{BACKEND_VARIABLE}=torch to contract with PyTorch's own operations, more slowly."
        )


def rank_one(factor: Outer) -> Contraction:
    """Return ‖left‖²‖right‖² in one pass over both operands."""
    from gradstats.kernels import operators

    a, g = _operands(factor)
    value, _ = operators.rank_one_sqnorm(a.squeeze(1), g.squeeze(1))
    return well_conditioned(_over_groups(value, factor), torch.float32)


def gram(factor: Outer) -> Contraction:
    """Return Σ_{t,s} (left_t·left_s)(right_t·right_s) with the bound eps·Σ|terms|."""
    from gradstats.kernels import operators

    value, magnitude, _, _ = operators.gram_sqnorm(*_operands(factor))
    bound = 4 * unit_roundoff(torch.float32) * _over_groups(magnitude, factor)
    return Contraction(_over_groups(value, factor), bound)


def direct(factor: Outer) -> Contraction:
    """Return the squares of gradient tiles that never leave the chip."""
    from gradstats.kernels import operators

    value = operators.direct_sqnorm(*_operands(factor))
    return well_conditioned(_over_groups(value, factor), torch.float32)


def direct_and_sum(factor: Outer) -> tuple[Contraction, Tensor]:
    """Return squared norms and Σ_i G_i (1, p, q) from one kernel; for factors of one group."""
    from gradstats.kernels import operators

    gradient, value = operators.weight_gradient_sqnorm(*_operands(factor))
    return well_conditioned(value.double(), torch.float32), gradient.unsqueeze(0)


def ragged_gram(factor: Ragged, longest: int) -> Contraction:
    """Return the Gram form of packed examples, the longest of which has ``longest`` rows."""
    from gradstats.kernels import operators

    value, magnitude, _, _ = operators.gram_sqnorm(*_packed(factor), max_seqlen=longest)
    bound = 4 * unit_roundoff(torch.float32) * magnitude.double()
    return Contraction(value.double(), bound)


def ragged_direct(factor: Ragged, longest: int) -> Contraction:
    """Return the squares of gradient tiles of packed examples."""
    from gradstats.kernels import operators

    value = operators.direct_sqnorm(*_packed(factor), max_seqlen=longest)
    return well_conditioned(value.double(), torch.float32)


def ragged_and_sum(factor: Ragged, longest: int) -> tuple[Contraction, Tensor]:
    """Return squared norms and Σ_i G_i (p, q) of packed examples from one kernel."""
    from gradstats.kernels import operators

    gradient, value = operators.weight_gradient_sqnorm(*_packed(factor), max_seqlen=longest)
    return well_conditioned(value.double(), torch.float32), gradient.reshape(factor.shape)


def _packed(factor: Ragged) -> tuple[Tensor, Tensor, Tensor]:
    """Return a, g and the bounds of the examples as the kernels take them."""
    return factor.right, factor.left, torch.tensor(factor.offsets)


def gram_pairs(first: Outer, second: Outer) -> Tensor:
    """Return Σ_{t,s} (left_t·left'_s)(right_t·right'_s) for all pairs, (B, B') float64."""
    from gradstats.kernels import operators

    products = (operators.pairwise_gram(*both) for both in _groups(first, second))
    return reduce(torch.add, (part.double() for part in products))


def direct_pairs(first: Outer, second: Outer, workspace: int) -> Tensor:
    """Return all pairs' products of gradients formed chunk by chunk, (B, B') float64."""
    from gradstats.kernels import operators

    products = (
        operators.pairwise_direct(*both, workspace=workspace) for both in _groups(first, second)
    )
    return reduce(torch.add, (part.double() for part in products))


def gram_diagonal(first: Outer, second: Outer) -> Tensor:
    """Return Σ_{t,s} (left_t·left'_s)(right_t·right'_s) of each example, (B,) float64."""
    from gradstats.kernels import operators

    value, _ = operators.diagonal_gram(*_operands(first), *_operands(second))
    return _over_groups(value, first)


def direct_diagonal(first: Outer, second: Outer) -> Tensor:
    """Return the products of gradient tiles that never leave the chip, (B,) float64."""
    from gradstats.kernels import operators

    value = operators.direct_inner(*_operands(first), *_operands(second))
    return _over_groups(value, first)


def direction(factor: Outer, direction: Tensor) -> Tensor:
    """Return Σ_k Σ_t left_tᵀ V_k right_t of each example, (B,) float64.

    Args:
        factor: what is contracted.
        direction: V (K, p, q).
    """
    from gradstats.kernels import operators

    if direction.dtype != factor.left.dtype:
        direction = direction.float()
    a, g = factor.right.transpose(0, 1), factor.left.transpose(0, 1)  # (K, B, T, ·)
    products = map(operators.direction_inner, a, g, direction)
    return reduce(torch.add, (part.double() for part in products))


def _groups(first: Outer, second: Outer) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Return a, g of both factors for each group: examples of different groups never meet."""
    operands = (first.right, first.left, second.right, second.left)
    groups = [tuple(operand[:, k] for operand in operands) for k in range(first.left.shape[1])]
    if first is second:
        return [(a, g, a, g) for a, g, _, _ in groups]
    return groups  # type: ignore[return-value]


def _operands(factor: Outer) -> tuple[Tensor, Tensor]:
    """Return a and g of (B·K, T, ·) as the kernels name them: G = Σ_t g_t a_tᵀ."""
    return factor.right.flatten(0, 1), factor.left.flatten(0, 1)


def _over_groups(values: Tensor, factor: Outer) -> Tensor:
    return values.double().view(factor.batch, -1).sum(1)
