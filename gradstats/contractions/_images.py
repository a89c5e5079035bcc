"""Images factors: examples with images of the same sizes are contracted together."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from gradstats import _cost
from gradstats._factors import Factor, Images, Outer, Patches
from gradstats.contractions import _outer, _patches
from gradstats.contractions._dense import sqnorm_of_sum
from gradstats.contractions._result import Contraction


def alike(factor: Images, workspace: int) -> Iterator[tuple[Tensor, list[Factor]]]:
    """Yield groups of examples, as an index, and the factors that add up to their gradients."""
    for examples, parts in factor.alike(min(workspace, _cost.MERGED_BYTES)):
        yield torch.tensor(examples, device=factor.pieces[0].grad.device), parts


def sqnorm(factor: Images, workspace: int) -> Contraction:
    """Return ‖G_i‖²; for images of one size by the form that costs least."""
    value = factor.pieces[0].grad.new_zeros(factor.batch, dtype=torch.float64)
    bound = torch.zeros_like(value)
    for examples, parts in alike(factor, workspace):
        if len(parts) == 1:
            result = CONTRACT[type(parts[0])](parts[0], workspace)
        else:
            result = sqnorm_of_sum(parts, workspace)
        value[examples], bound[examples] = result.value, result.bound
    return Contraction(value, bound)


def merge(factors: list[Images]) -> Images:
    """Return the sum of several uses as one: the pieces of all."""
    pieces = tuple(piece for factor in factors for piece in factor.pieces)
    owners = tuple(owner for factor in factors for owner in factor.owners)
    return Images(pieces, owners, factors[0].batch)


CONTRACT: dict[type, Callable[..., Contraction]] = {Outer: _outer.sqnorm, Patches: _patches.sqnorm}
