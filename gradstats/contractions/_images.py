"""Images factors: examples with images of the same sizes are contracted together."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce

import torch
from torch import Tensor

from gradstats import _cost
from gradstats._factors import Factor, Images
from gradstats.contractions import _table
from gradstats.contractions._dense import sqnorm_of_sum
from gradstats.contractions._result import Contraction
from gradstats.contractions._tiles import zeros


def alike(factor: Images, workspace: int) -> Iterator[tuple[Tensor, list[Factor]]]:
    """Yield an index of a group of examples, and the factors that add up to their gradients."""
    for examples, parts in factor.alike(min(workspace, _cost.MERGED_BYTES)):
        yield torch.tensor(examples, device=factor.pieces[0].grad.device), parts


def sqnorm(factor: Images, workspace: int) -> Contraction:
    """Return ‖G_i‖²; for images of one size by the form that costs least."""
    value = factor.pieces[0].grad.new_zeros(factor.batch, dtype=torch.float64)
    bound = torch.zeros_like(value)
    for examples, parts in alike(factor, workspace):
        if len(parts) == 1:
            result = _table.MODULES[type(parts[0])].sqnorm(parts[0], workspace)
        else:
            result = sqnorm_of_sum(parts, workspace)
        value[examples], bound[examples] = result.value, result.bound
    return Contraction(value, bound)


def direction(factor: Images, direction: Tensor, workspace: int) -> Tensor:
    """Return ⟨G_i, V⟩, the sum over the parts."""
    result = zeros([factor], factor.batch)
    for examples, parts in alike(factor, workspace):
        for part in parts:
            result[examples] += _table.MODULES[type(part)].direction(part, direction, workspace)
    return result


def total(factor: Images) -> Tensor:
    """Return Σ_i G_i in the accumulation dtype."""
    parts = (
        reduce(torch.add, (_table.MODULES[type(part)].total(part) for part in parts))
        for _, parts in alike(factor, _cost.MERGED_BYTES)
    )
    return reduce(torch.add, parts, factor.select(slice(0)).dense().sum(0))


def merge(factors: list[Images]) -> Images:
    """Return the sum of several uses as one: the pieces of all."""
    pieces = tuple(piece for factor in factors for piece in factor.pieces)
    owners = tuple(owner for factor in factors for owner in factor.owners)
    return Images(pieces, owners, factors[0].batch)
