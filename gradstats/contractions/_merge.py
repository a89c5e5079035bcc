"""Several uses of one parameter as fewer factors."""

from __future__ import annotations

from collections.abc import Sequence

from gradstats._factors import Factor
from gradstats.contractions._elementwise import lean
from gradstats.contractions._table import MODULES


def merge(factors: Sequence[Factor]) -> list[Factor]:
    """Return factors with the same sum, merging those of one kind and layout."""
    kinds: dict[object, list[Factor]] = {}
    for index, factor in enumerate(map(lean, factors)):
        # Only factors that differ in nothing but their positions can be merged.
        key = (type(factor), getattr(factor, "layout", None), getattr(factor, "axis", None))
        merged = hasattr(MODULES.get(type(factor)), "merge")
        kinds.setdefault(key if merged else index, []).append(factor)
    return [
        group[0] if len(group) == 1 else MODULES[type(group[0])].merge(group)
        for group in kinds.values()
    ]
