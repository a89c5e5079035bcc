"""Inner products of packed examples by the kernels: none is padded to another's length.

Forms and guard as in ``_outer_pairs``.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from gradstats import _cost
from gradstats._factors import Ragged, tensors_of
from gradstats.contractions import _ragged, _triton
from gradstats.contractions._outer_pairs import (
    Sizes,
    by_form,
    recompute_diagonal,
    recompute_pairs,
)
from gradstats.contractions._result import product_roundoff


def pairs(first: Ragged, second: Ragged, workspace: int, sizes: Sizes) -> Tensor:
    """Return ⟨G_i, G'_j⟩ for all pairs, (B, B') float64, by the form that costs least."""
    return by_form(
        first, second, sizes, _form(first, second, first.batch, second.batch),
        _triton.ragged_gram_pairs, partial(_triton.ragged_direct_pairs, workspace=workspace),
        _ragged.magnitude, recompute_pairs,
    )  # fmt: skip


def diagonal(first: Ragged, second: Ragged, workspace: int, sizes: Sizes) -> Tensor:
    """Return ⟨G_i, G'_i⟩ for each example, (B,) float64, by the form that costs least."""
    return by_form(
        first, second, sizes, _form(first, second, 1, 1),
        _triton.ragged_gram_diagonal, _triton.ragged_direct_diagonal,
        _ragged.magnitude, recompute_diagonal,
    )  # fmt: skip


def _form(first: Ragged, second: Ragged, examples1: int, examples2: int) -> _cost.Form:
    p, q = first.left.shape[1], first.right.shape[1]
    return _cost.choose_pair_form(
        first.longest, second.longest, p, q, examples1, examples2, on_chip=True,
        roundoff=product_roundoff(*tensors_of(first), *tensors_of(second)),
    )  # fmt: skip
