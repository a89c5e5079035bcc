"""Inner products with one dense direction, and the sum of per-example gradients.

Both are sums, over the factors, of what their modules return (``_table``). The factor of a derived
tensor is multiplied with the direction in which that tensor moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from gradstats import _cost
from gradstats._factors import Factor, Outer, Patches, cast, compute_dtype
from gradstats.contractions import _patches, _tiles
from gradstats.contractions._multiply import multiply
from gradstats.contractions._precision import in_full_precision
from gradstats.contractions._table import MODULES


@in_full_precision
def direction_inner(factors: Sequence[Factor], direction: Tensor, workspace: int) -> Tensor:
    """Return ⟨Σ_u F_u[i], V⟩ for each example, (B,) float64.

    Args:
        factors: of one parameter, one for each use.
        direction: V, of the parameter's shape.
        workspace: bytes of scratch memory that may be allocated at once.

    Cost: for matrix products and convolutions, as much as their forward pass.
    """
    parts = []
    for factor in factors:
        module = MODULES.get(type(factor))
        if module is not None:
            parts.append(module.direction(factor, direction, workspace))
            continue
        # Push the direction forward to the derived tensor.
        pushed = factor.push(direction)  # type: ignore[attr-defined]
        if pushed is None:
            parts.append(_formed_direction(factor, direction, workspace))
        else:
            products = direction_inner([factor.inner], pushed, workspace)  # type: ignore[attr-defined]
            parts.append(products.to(direction.device))  # the tensor may be on another device
    return reduce(torch.add, parts)


@in_full_precision
def total(factors: Sequence[Factor]) -> Tensor:
    """Return Σ_i Σ_u F_u[i], the gradient of the summed losses, in the accumulation dtype."""
    parts = []
    for factor in factors:
        module = MODULES.get(type(factor))
        if module is not None:
            parts.append(module.total(factor))
        else:
            parts.append(factor.pull(total([factor.inner])))  # type: ignore[attr-defined]
    return reduce(torch.add, parts)


@in_full_precision
def row_products(factor: Outer | Patches, direction: Tensor) -> Tensor:
    """Return ⟨G_i[p], V[p]⟩ for each row p of the parameter, (B, p) in the accumulation dtype.

    Args:
        factor: of a convolution, or with a ``left`` that spans the parameter's rows.
        direction: V, of the parameter's shape.

    Cost: as much as the forward pass.
    """
    # More than a core's cache holds, since V is read once for each chunk, and products of few rows
    # take a third longer (one core of an AMD EPYC).
    budget = _cost.FRESH_BYTES if direction.is_cuda else 4 * _cost.CACHE_BYTES
    if isinstance(factor, Patches):
        if not factor.batch:
            return factor.grad.new_empty(0, factor.shape[0], dtype=direction.dtype)
        return torch.cat([each for _, each in _patches.row_products(factor, direction, budget)])
    dtype = compute_dtype(factor.left, factor.right, direction)
    left, right = factor.left[:, 0], factor.right[:, 0]
    matrix = cast(direction, dtype).reshape(left.shape[2], right.shape[2])
    result = matrix.new_empty(factor.batch, left.shape[2])
    size = left.shape[1] * (2 * left.shape[2] + right.shape[2]) * dtype.itemsize
    for here in _tiles.chunks(factor.batch, _cost.fitting(size, factor.batch, budget)):
        products = multiply(cast(right[here], dtype).flatten(0, 1), matrix.mT)
        products = products.view(-1, *left.shape[1:]).mul_(left[here])
        torch.sum(products, 1, out=result[here])
    return result


@in_full_precision
def row_sums(factor: Outer | Patches) -> Tensor:
    """Return the sum of each row of G_i, (B, p) in the accumulation dtype.

    Args:
        factor: as for ``row_products``.

    Cost: as much as a forward pass with one input channel for each group.
    """
    if isinstance(factor, Outer):
        dtype = compute_dtype(factor.left, factor.right)
        left, sums = cast(factor.left[:, 0], dtype), factor.right[:, 0].sum(2, dtype=dtype)
    else:
        dtype, groups = compute_dtype(*factor.sides), factor.geometry.groups
        channels = factor.input.unflatten(1, (groups, -1)).sum(2, dtype=dtype)
        weight = channels.new_ones(1).expand(groups, 1, *factor.kernel)
        sums = _patches.convolve(channels, weight, factor)
        left = cast(factor.grad, dtype).unflatten(1, (groups, -1)).flatten(3).mT
        sums = sums.flatten(2)
    return (left.mT @ sums.unsqueeze(-1)).flatten(1)


def _formed_direction(factor: Factor, direction: Tensor, workspace: int) -> Tensor:
    """Return ⟨F[i], V⟩ from gradients that are formed a few examples at a time."""
    result = _tiles.zeros([factor], factor.batch)
    flat = direction.flatten()
    size = 2 * flat.numel() * _tiles.dtype_of([factor]).itemsize
    for here in _tiles.chunks(
        factor.batch, _cost.examples_per_chunk(size, factor.batch, workspace)
    ):
        formed = _tiles.gradients([factor], here)
        result[here] = (formed * flat.to(formed)).sum(1, dtype=torch.float64)
    return result
