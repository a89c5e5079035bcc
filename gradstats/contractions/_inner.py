"""Inner products of the gradients that two lists of factors of one parameter describe.

Inner products are bilinear: ⟨Σ_u F_u, Σ_v F'_v⟩ = Σ_u Σ_v ⟨F_u, F'_v⟩. Two tables say which
functions contract a pair of factors. If any pair has no rule, the per-example gradients of both
sums are formed tile by tile (``_tiles``).

If a tensor only rearranges elements of the parameter (``path`` says how), its factor is contracted
directly with factors that are rearranged in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from gradstats._factors import (
    Experts,
    Factor,
    Masked,
    Outer,
    Patches,
    Ragged,
    Rows,
    Vector,
    in_a_row,
    map_tensors,
    tensors_of,
)
from gradstats.contractions import (
    _experts,
    _masked,
    _outer_pairs,
    _patch_pairs,
    _row_pairs,
    _tied,
    _tiles,
    _triton,
    _vector_pairs,
)
from gradstats.contractions._merge import merge
from gradstats.contractions._outer_pairs import Sizes
from gradstats.contractions._precision import in_full_precision

Rule = Callable[[Any, Any, int, Sizes], Tensor]


def _swapped_pairs(rows: Rows, outer: Outer, workspace: int, sizes: Sizes) -> Tensor:
    return _outer_pairs.pairs_with_rows(outer, rows, workspace, sizes).mT


def _swapped_diagonal(rows: Rows, outer: Outer, workspace: int, sizes: Sizes) -> Tensor:
    return _tied.inner_with_rows(outer, rows, workspace)


# The types of two factors → the rules for all pairs of examples, and for equal indices.
RULES: dict[tuple[type, type], tuple[Rule, Rule]] = {
    (Outer, Outer): (_outer_pairs.pairs, _outer_pairs.diagonal),
    (Outer, Rows): (_outer_pairs.pairs_with_rows, _tied.inner_with_rows),
    (Rows, Outer): (_swapped_pairs, _swapped_diagonal),
    (Rows, Rows): (_row_pairs.pairs, _row_pairs.diagonal),
    (Patches, Patches): (_patch_pairs.pairs, _patch_pairs.diagonal),
    (Ragged, Ragged): (_outer_pairs.pairs, _outer_pairs.diagonal),
    (Experts, Experts): (_experts.pairs, _experts.diagonal),
    (Vector, Vector): (_vector_pairs.pairs, _vector_pairs.diagonal),
}

# The same for sums that have a pair without a rule; and which of the two is which.
DEFINITIONS = _tiles.dense_pairs, _tiles.dense_diagonal
PAIRS, DIAGONAL = range(2)

# The rules for two uses in one norm, whose sizes are not known yet.
CROSS: dict[tuple[type, type], Callable[[Any, Any, int], Tensor]] = {
    (Outer, Rows): _tied.inner_with_rows,
    (Ragged, Rows): _tied.inner_with_rows,
    (Outer, Masked): _masked.inner_with_outer,
    (Masked, Masked): _masked.inner,
}

# How much more memory gradients may take than the factors that they replace.
FOLDED = 2

# Between these norms, products of two float32 gradients neither underflow nor overflow.
FLOAT32_RANGE = (1e-12, 1e15)


@in_full_precision
def inner_pairs(
    first: Sequence[Factor], second: Sequence[Factor], workspace: int, sizes: Sizes
) -> Tensor:
    """Return ⟨Σ_u F_u[i], Σ_v F'_v[j]⟩ for all pairs of examples of two batches.

    Args:
        first, second: factors of one parameter, one for each use; the same list for products of a
            batch with itself.
        workspace: bytes of scratch memory that may be allocated at once.
        sizes: norms of the two sums, (B,) and (B',) float64; rounding errors are relative to these.

    Returns:
        (B, B') float64.
    """
    result = _contract(first, second, workspace, sizes, PAIRS)
    rows, columns = (_extreme(*side) for side in zip((first, second), sizes, strict=True))
    if rows.numel():
        again, norms = _wide(first, rows), (sizes[0][rows], sizes[1])
        result[rows] = _contract(again, second, workspace, norms, PAIRS)
    if columns.numel():
        again, norms = _wide(second, columns), (sizes[0], sizes[1][columns])
        result[:, columns] = _contract(first, again, workspace, norms, PAIRS)
    return result


@in_full_precision
def inner_diagonal(
    first: Sequence[Factor], second: Sequence[Factor], workspace: int, sizes: Sizes
) -> Tensor:
    """Return ⟨Σ_u F_u[i], Σ_v F'_v[i]⟩ for each example of two batches of B, (B,) float64.

    Args: as for ``inner_pairs``.
    """
    result = _contract(first, second, workspace, sizes, DIAGONAL)
    rows = torch.cat([_extreme(*side) for side in zip((first, second), sizes, strict=True)])
    rows = rows.unique()
    if rows.numel():
        one, two = _wide(first, rows), _wide(second, rows)
        norms = (sizes[0][rows], sizes[1][rows])
        result[rows] = _contract(one, two, workspace, norms, DIAGONAL)
    return result


@in_full_precision
def fold(factors: Sequence[Factor]) -> list[Factor]:
    """Return merged factors, or the gradients if these are at most ``FOLDED`` times as large.

    With so many positions, a gradient costs less to contract than its factors, and need not be
    formed again for every product.
    """
    factors = merge(factors)
    if len(factors) == 1 and isinstance(factors[0], Vector):
        return factors
    elements = factors[0].batch * math.prod(factors[0].shape)
    if elements > FOLDED * sum(
        tensor.numel() for factor in factors for tensor in tensors_of(factor)
    ):
        return factors
    shape = factors[0].shape
    # A few examples at a time: forming gradients takes more memory than the gradients.
    parts = [
        _tiles.gradients(factors, rows)
        for rows in _tiles.chunks(factors[0].batch, _tiles.GROUPED_EXAMPLES)
    ]
    formed = parts[0] if len(parts) == 1 else torch.cat(parts)
    return [Vector(formed.reshape(-1, *shape), shape)]


def _contract(first, second, workspace: int, sizes: Sizes, which: int) -> Tensor:
    same = first is second
    groups = by_path(first)
    partners = groups if same else by_path(second)
    if not _packed_on_chip(groups, partners):
        groups = _padded(groups)
        partners = groups if same else _padded(partners)
    apart = in_a_row({*groups, *partners})
    terms: list[tuple[Rule, Factor, Factor]] = []
    for path, left in groups.items():
        for other in (path,) if apart else partners:
            if other not in partners or (path and other and path.is_disjoint(other)):
                continue
            same_part = path is not None and path == other
            found = _rules(left, partners[other], which) if same_part else None
            if found is None:
                first = merge(first)
                return DEFINITIONS[which](first, first if same else merge(second), workspace)
            terms += found
    total = None
    for rule, one, two in terms:
        value = rule(one, two, workspace, sizes)
        total = value if total is None else total + value
    if total is None:  # no two factors share an element
        batches = (first[0].batch, second[0].batch) if which == PAIRS else (first[0].batch,)
        return _tiles.zeros(first, *batches)
    return total


def _rules(first: list[Factor], second: list[Factor], which: int):
    """Return a rule for every pair of the factors; None if a pair has none."""
    several = len(first) + len(second) > 2
    terms = []
    for one in first:
        for two in second:
            if several and isinstance(one, Patches):
                return None  # forming the sum once is cheaper than forming each term repeatedly
            if not _fit(one, two):
                return None
            terms.append((RULES[type(one), type(two)][which], one, two))
    return terms


def _fit(one: Factor, two: Factor) -> bool:
    """Whether there is a rule for two factors of one parameter, which meet its conditions."""
    if isinstance(one, Rows):
        one, two = two, one
    if isinstance(one, Outer):
        if isinstance(two, Rows):
            return one.spans_rows
        return isinstance(two, Outer) and one.layout == two.layout
    if isinstance(one, Vector):
        return isinstance(two, Vector) and one.axis == two.axis
    return (type(one), type(two)) in RULES


def crosses_of(factors: Sequence[Factor]) -> list[Callable[[int], Tensor]] | None:
    """Return a rule for each pair, to be called with the workspace; None if a pair has none."""
    found = []
    for pair in combinations(factors, 2):
        rule = _cross_of(*pair)
        if rule is None:
            return None
        found.append(rule)
    return found


def _cross_of(one: Factor, other: Factor) -> Callable[[int], Tensor] | None:
    """Return the rule for two factors of one parameter, in either order; None if there is none."""
    for first, second in ((one, other), (other, one)):
        rule = CROSS.get((type(first), type(second)))
        if rule is not None and _spans_rows(first) and _spans_rows(second):
            return partial(rule, first, second)
    return None


def _spans_rows(factor: Factor) -> bool:
    """Whether a factor has one group, whose rows are the parameter's."""
    if isinstance(factor, Masked):
        return factor.is_rank_one and factor.inner.spans_rows  # type: ignore[union-attr]
    return isinstance(factor, Rows) or factor.spans_rows  # type: ignore[attr-defined]


def by_path(factors: Sequence[Factor]) -> dict[Any, list[Factor]]:
    """Return path → merged factors: () for the parameter itself, None for other derivations."""
    groups: dict[Any, list[Factor]] = {}
    for factor in factors:
        path = getattr(factor, "path", ())
        groups.setdefault(path, []).append(factor.inner if path else factor)  # type: ignore
    return {path: merge(group) for path, group in groups.items()}


def _packed_on_chip(*sides: dict[Any, list[Factor]]) -> bool:
    """Whether all factors are packed examples that the kernels take as they are."""
    factors = [factor for side in sides for group in side.values() for factor in group]
    packed = [factor for factor in factors if isinstance(factor, Ragged)]
    return bool(packed) and len(packed) == len(factors) and _triton.serves(*packed)


def _padded(groups: dict[Any, list[Factor]]) -> dict[Any, list[Factor]]:
    """Return packed examples padded to one length, as most rules take them."""
    return {
        path: [factor.padded() if isinstance(factor, Ragged) else factor for factor in group]
        for path, group in groups.items()
    }


def _extreme(factors: Sequence[Factor], sizes: Tensor) -> Tensor:
    """Return the examples whose products may leave the range of float32."""
    if any(t.dtype == torch.float64 for factor in factors for t in tensors_of(factor)):
        return sizes.new_zeros(0, dtype=torch.long)
    low, high = FLOAT32_RANGE
    extreme = ((sizes > 0) & (sizes < low)) | ((sizes > high) & sizes.isfinite())
    return extreme.nonzero().squeeze(1)


def _wide(factors: Sequence[Factor], rows: Tensor) -> list[Factor]:
    def wide(tensor: Tensor) -> Tensor:
        return tensor.double() if tensor.is_floating_point() else tensor

    return [map_tensors(factor.select(rows), wide) for factor in factors]
