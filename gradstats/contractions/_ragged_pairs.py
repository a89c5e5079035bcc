"""Inner products of packed examples by the kernels: none is padded to another's length.

Forms and guard as in ``_outer_pairs``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradstats import _cost
from gradstats._factors import Ragged
from gradstats.contractions import _ragged, _triton
from gradstats.contractions._outer_pairs import (
    Sizes,
    condition,
    recompute_diagonal,
    recompute_pairs,
)
from gradstats.contractions._result import product_roundoff


def pairs(first: Ragged, second: Ragged, workspace: int, sizes: Sizes) -> Tensor:
    """Return ⟨G_i, G'_j⟩ for all pairs, (B, B') float64, by the form that costs least."""

    def direct(one: Ragged, two: Ragged) -> Tensor:
        return _triton.ragged_direct_pairs(one, two, workspace)

    if _form(first, second, first.batch, second.batch) == "direct":
        return direct(first, second)
    result = _triton.ragged_gram_pairs(first, second)
    return recompute_pairs(result, first, second, _conditions(first, second, sizes), direct)


def diagonal(first: Ragged, second: Ragged, workspace: int, sizes: Sizes) -> Tensor:
    """Return ⟨G_i, G'_i⟩ for each example, (B,) float64, by the form that costs least."""
    direct = _triton.ragged_direct_diagonal
    if _form(first, second, 1, 1) == "direct":
        return direct(first, second)
    result = _triton.ragged_gram_diagonal(first, second)
    return recompute_diagonal(result, first, second, _conditions(first, second, sizes), direct)


def _form(first: Ragged, second: Ragged, examples1: int, examples2: int) -> _cost.Form:
    p, q = first.left.shape[1], first.right.shape[1]
    return _cost.choose_pair_form(
        first.longest, second.longest, p, q, examples1, examples2, on_chip=True,
        roundoff=_roundoff(first, second),
    )  # fmt: skip


def _roundoff(first: Ragged, second: Ragged) -> float:
    return product_roundoff(first.left, first.right, second.left, second.right)


def _conditions(first: Ragged, second: Ragged, sizes: Sizes) -> tuple[Tensor, Tensor]:
    one, two = (_ragged.magnitude(factor, torch.float32) for factor in (first, second))
    roundoff = _roundoff(first, second)
    return condition(one, sizes[0], roundoff), condition(two, sizes[1], roundoff)
