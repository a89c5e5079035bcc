"""Several uses of one parameter as fewer factors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gradstats._factors import Factor, Images, Masked, Outer, Ragged, Rows, Vector
from gradstats.contractions import _images, _masked, _outer, _ragged, _rows, _vector
from gradstats.contractions._elementwise import lean

# Kinds of factors of which the sum of several is again one factor of that kind.
MERGE: dict[type, Callable[..., Factor]] = {
    Outer: _outer.merge,
    Images: _images.merge,
    Ragged: _ragged.merge,
    Rows: _rows.merge,
    Vector: _vector.merge,
    Masked: _masked.merge,
}


def merge(factors: Sequence[Factor]) -> list[Factor]:
    """Return factors with the same sum, merging those of one kind and layout."""
    kinds: dict[object, list[Factor]] = {}
    for index, factor in enumerate(map(lean, factors)):
        # Only factors that differ in nothing but their positions can be merged.
        key = (type(factor), getattr(factor, "layout", None), getattr(factor, "axis", None))
        kinds.setdefault(key if key[0] in MERGE else index, []).append(factor)
    return [
        group[0] if len(group) == 1 else MERGE[type(group[0])](group) for group in kinds.values()
    ]
