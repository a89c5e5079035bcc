"""Inner products by definition: tiles of per-example gradients, multiplied and overwritten.

Both sides are formed for a few rows of the parameter at a time, so few that all examples fit
(``_cost.PAIR_TILE_BYTES``, and the workspace) and every tile is formed once. If even one row is too
large, it is formed for as many examples as the workspace holds. Tiles are summed in float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gradstats import _convolution_cost, _cost
from gradstats._factors import Factor, Images, Patches, compute_dtype, elements_of, tensors_of
from gradstats.contractions._multiply import multiply

# The most elements of one example's tile: longer float32 sums would lose digits.
TILE_ELEMENTS = 2**18

# Examples that become the groups of one grouped convolution; see convolution_chunk.
GROUPED_EXAMPLES = 32


def dense_pairs(first: Sequence[Factor], second: Sequence[Factor], workspace: int) -> Tensor:
    """Return ⟨Σ_u F_u[i], Σ_v F'_v[j]⟩ for all pairs of examples, (B, B') float64.

    Cost: forming the gradients of both sides, and B·B'·d multiply-adds.
    """
    same = first is second
    rows, columns = first[0].batch, second[0].batch
    examples = rows if same else rows + columns
    result = zeros(first, rows, columns)
    for left, right, size in _tiles(first, second, examples, workspace):
        chunk = max(rows, columns)
        if size * examples > workspace:
            chunk = max(1, workspace // (2 * size))
        for here in chunks(rows, chunk):
            formed = gradients(left, here)
            for there in chunks(columns, chunk):
                # ⟨i, j⟩ = ⟨j, i⟩: the part below the diagonal is known already.
                if same and there.start < here.start:
                    continue
                other = formed if same and here == there else gradients(right, there)
                wide = torch.promote_types(formed.dtype, other.dtype)
                products = multiply(formed.to(wide), other.to(wide).t())
                result[here, there] += products
                if same and here != there:
                    result[there, here] += products.mT
    return result


def dense_diagonal(first: Sequence[Factor], second: Sequence[Factor], workspace: int) -> Tensor:
    """Return ⟨Σ_u F_u[i], Σ_v F'_v[i]⟩ for each example, (B,) float64.

    Cost: forming the gradients of both sides.
    """
    batch = first[0].batch
    result = zeros(first, batch)
    for left, right, size in _tiles(first, second, 3, workspace):
        # The product of the two sides takes as much memory as each of them.
        for here in chunks(batch, _cost.examples_per_chunk(3 * size, batch, workspace)):
            formed = gradients(left, here)
            other = formed if first is second else gradients(right, here)
            result[here] += (formed * other).sum(1, dtype=torch.float64)
    return result


def gradients(factors: Sequence[Factor], examples: slice) -> Tensor:
    """Return per-example gradients of the sum of factors, flattened: (n, elements)."""
    total: Tensor | None = None
    for factor in factors:
        chosen = factor.select(examples)
        if isinstance(chosen, (Patches, Images)) and chosen.batch > GROUPED_EXAMPLES:
            elements, sides = math.prod(chosen.shape), tensors_of(chosen)
            formed = sides[0].new_empty(chosen.batch, elements, dtype=compute_dtype(*sides))
            for rows in chunks(chosen.batch, GROUPED_EXAMPLES):
                formed[rows] = chosen.select(rows).dense().flatten(1)
        else:
            formed = chosen.dense().reshape(chosen.batch, -1)
        total = formed if total is None else total + formed
    assert total is not None
    return total.to(compute_dtype(total))


def zeros(factors: Sequence[Factor], *sizes: int) -> Tensor:
    """Return float64 zeros on the device of the factors."""
    return tensors_of(factors[0])[0].new_zeros(sizes, dtype=torch.float64)


def _tiles(
    first: Sequence[Factor], second: Sequence[Factor], examples: int, workspace: int
) -> Iterator[tuple[Sequence[Factor], Sequence[Factor], int]]:
    """Yield both sides restricted to some rows of the parameter, and bytes for each example."""
    shape = first[0].shape
    factors = [*first, *second]
    itemsize = dtype_of(factors).itemsize
    convolved = all(isinstance(factor, Patches) for factor in factors)
    if len(first) + len(second) > 2:
        held = 2 * examples  # a sum and its next term
    elif convolved:
        held = examples + min(examples, GROUPED_EXAMPLES)
    else:
        held = examples
    size = math.ceil(itemsize * held / max(1, examples))
    granules = [factor.granule for factor in factors]
    if not shape or 0 in granules:
        yield first, second, max(map(elements_of, factors)) * size
        return
    granule = math.lcm(*granules)
    row = math.prod(shape[1:])
    budget = min(workspace, _cost.PAIR_TILE_BYTES)
    fitting = min(TILE_ELEMENTS // max(1, row), budget // max(1, itemsize * held * row))
    if convolved and granule == 1 and fitting >= _convolution_cost.CHANNEL_BLOCK:
        granule = _convolution_cost.CHANNEL_BLOCK
    step = max(1, fitting // granule) * granule
    if step >= shape[0]:
        yield first, second, math.prod(shape) * size
        return
    for start in range(0, shape[0], step):
        stop = min(start + step, shape[0])
        left = [factor.narrow(start, stop) for factor in first]
        right = left if first is second else [factor.narrow(start, stop) for factor in second]
        yield left, right, (stop - start) * row * size


def dtype_of(factors: Sequence[Factor]) -> torch.dtype:
    """Return the accumulation dtype of a sum of factors."""
    return compute_dtype(*(tensor for factor in factors for tensor in tensors_of(factor)))


def chunks(count: int, size: int) -> Iterator[slice]:
    """Yield slices of at most ``size`` that cover ``count``."""
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))
