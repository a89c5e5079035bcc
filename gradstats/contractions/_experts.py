"""Experts factors: norms of all experts at once, inner products expert by expert."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gradstats._factors import Experts, Outer, Ragged, compute_dtype
from gradstats.contractions import _outer_pairs, _ragged, _triton
from gradstats.contractions._outer_pairs import Sizes
from gradstats.contractions._result import Contraction
from gradstats.contractions._tiles import zeros


def sqnorm(factor: Experts, workspace: int) -> Contraction:
    """Return ‖G_i‖², the sum over the experts."""
    result = _ragged.sqnorm(factor.pairs, workspace)
    value, bound = (t.unflatten(0, (-1, factor.batch)).sum(0) for t in (result.value, result.bound))
    return Contraction(value, bound)


def pairs(first: Experts, second: Experts, workspace: int, sizes: Sizes) -> Tensor:
    """Return ⟨G_i, G'_j⟩ for all pairs, (B, B') float64."""
    result = zeros([first], first.batch, second.batch)
    for one, two in _by_expert(first, second):
        result += _outer_pairs.pairs(one, two, workspace, sizes)
    return result


def diagonal(first: Experts, second: Experts, workspace: int, sizes: Sizes) -> Tensor:
    """Return ⟨G_i, G'_i⟩ for each example, (B,) float64."""
    result = zeros([first], first.batch)
    for one, two in _by_expert(first, second):
        result += _outer_pairs.diagonal(one, two, workspace, sizes)
    return result


def direction(factor: Experts, direction: Tensor, workspace: int) -> Tensor:
    """Return ⟨G_i, V⟩, the sum over the experts."""
    result = zeros([factor], factor.batch)
    for number in factor.busy:
        result += _ragged.direction(factor.of_expert(number), direction[number], workspace)
    return result


def total(factor: Experts) -> Tensor:
    """Return Σ_i G_i, one product for each expert, in the accumulation dtype."""
    dtype = compute_dtype(factor.pairs.left, factor.pairs.right)
    result = factor.pairs.left.new_zeros(factor.shape, dtype=dtype)
    for number in factor.busy:
        expert = factor.of_expert(number)
        torch.mm(expert.left.to(dtype).t(), expert.right.to(dtype), out=result[number])
    return result


def _by_expert(
    first: Experts, second: Experts
) -> Iterator[tuple[Ragged, Ragged] | tuple[Outer, Outer]]:
    """Yield both factors of each expert that takes rows of both batches, as the rules take them."""
    for number in sorted({*first.busy} & {*second.busy}):
        one, two = first.of_expert(number), second.of_expert(number)
        yield (one, two) if _triton.serves(one, two) else (one.padded(), two.padded())
