"""Tangent factors: gradients without their components along some unit vectors."""

from __future__ import annotations

from torch import Tensor

from gradstats._factors import Tangent, compute_dtype
from gradstats.contractions import _table
from gradstats.contractions._dense import sqnorm_of_sum
from gradstats.contractions._result import Contraction, recompute_suspects
from gradstats.contractions._rounding import relative_bound


def sqnorm(factor: Tangent, workspace: int) -> Contraction:
    """Return ‖inner_i‖² - s(2 - s)‖along_i‖² for a share s, by Pythagoras."""
    whole = _table.MODULES[type(factor.inner)].sqnorm(factor.inner, workspace)
    removed = factor.along.double().square() * (factor.share * (2 - factor.share))
    along = removed.reshape(factor.batch, -1).sum(1)
    bound = whole.bound + relative_bound(factor.unit.dtype) * (whole.value + along)
    result = Contraction((whole.value - along).clamp(min=0), bound)
    return recompute_suspects(result, lambda rows: sqnorm_of_sum([factor.select(rows)], workspace))


def direction(factor: Tangent, direction: Tensor, workspace: int) -> Tensor:
    """Return ⟨G_i, V⟩. The projection is symmetric, so it is applied to V instead."""
    inner = factor.inner
    return _table.MODULES[type(inner)].direction(inner, _projected(factor, direction), workspace)


def total(factor: Tangent) -> Tensor:
    """Return Σ_i G_i in the accumulation dtype."""
    return _projected(factor, _table.MODULES[type(factor.inner)].total(factor.inner))


def _projected(factor: Tangent, direction: Tensor) -> Tensor:
    """Return a direction less the share of its components along the unit vectors."""
    unit = factor.unit.to(compute_dtype(factor.unit, direction))
    over = [axis for axis, size in enumerate(factor.along.shape[1:]) if size == 1]
    direction = direction.to(unit)
    return direction - (direction * unit).sum(over, keepdim=True) * factor.share * unit
