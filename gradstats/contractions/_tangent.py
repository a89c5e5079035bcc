"""Tangent factors: gradients without their parts along some unit vectors."""

from __future__ import annotations

import torch

from gradstats._factors import Outer, Tangent
from gradstats.contractions import _outer, _patches
from gradstats.contractions._dense import sqnorm_of_sum
from gradstats.contractions._result import Contraction, recompute_suspects, relative_bound


def sqnorm(factor: Tangent, workspace: int, *, guarded: bool) -> Contraction:
    """Return ‖inner_i‖² - ‖along_i‖², as Pythagoras has it."""
    contract = _outer.sqnorm if isinstance(factor.inner, Outer) else _patches.sqnorm
    whole = contract(factor.inner, workspace, guarded=guarded)  # type: ignore[arg-type]
    along = factor.along.reshape(factor.batch, -1).double().square().sum(1)
    bound = whole.bound + relative_bound(torch.float32) * (whole.value + along)
    result = Contraction((whole.value - along).clamp(min=0), bound)
    return recompute_suspects(result, lambda rows: sqnorm_of_sum([factor.select(rows)], workspace))
