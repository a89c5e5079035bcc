"""Tangent factors: gradients without their components along some unit vectors."""

from __future__ import annotations

from collections.abc import Callable

from gradstats._factors import Outer, Patches, Tangent
from gradstats.contractions import _outer, _patches
from gradstats.contractions._dense import sqnorm_of_sum
from gradstats.contractions._result import Contraction, recompute_suspects, relative_bound


def sqnorm(factor: Tangent, workspace: int) -> Contraction:
    """Return ‖inner_i‖² - ‖along_i‖², by Pythagoras; for a share s, less s(2 - s)‖along_i‖²."""
    contract = CONTRACT[type(factor.inner)]
    whole = contract(factor.inner, workspace)
    removed = factor.along.double().square() * (factor.share * (2 - factor.share))
    along = removed.reshape(factor.batch, -1).sum(1)
    bound = whole.bound + relative_bound(factor.unit.dtype) * (whole.value + along)
    result = Contraction((whole.value - along).clamp(min=0), bound)
    return recompute_suspects(result, lambda rows: sqnorm_of_sum([factor.select(rows)], workspace))


CONTRACT: dict[type, Callable[..., Contraction]] = {
    Outer: _outer.sqnorm,
    Patches: _patches.sqnorm,
    Tangent: sqnorm,
}
