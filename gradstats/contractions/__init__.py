"""Contractions of factors: squared norms, inner products, and sums over examples.

One table says which module contracts a factor (_table), two more which functions contract a pair
of factors (_inner). All others are contracted by definition: the per-example gradients of a few
examples at a time are formed within the workspace, multiplied and summed.

One factor: squared norms, products with a dense direction, sums over the examples
    _table       which module has them for which factor
    _outer, _patches, _images, _rows, _vector, _elementwise, _ragged, _experts, _masked, _tangent,
    _distances   the modules
    _merge       several uses of one parameter as fewer factors
    _tied        a projection and the look-ups tied to it
    _gram        outer products, through products between positions
    _dense       by definition
    _formed      outer products whose gradients are formed: one by one, all at once, or in chunks

Inner products
    _inner       of two lists of factors, pair by pair
    _outer_pairs, _patch_pairs, _row_pairs, _vector_pairs    of two factors
    _tiles       by definition
    _direction   of a list of factors with one dense direction; also their sum over the examples

Used by all of them
    _result      what contractions return; inaccurate results are found and recomputed
    _rounding    how much one operation rounds
    _precision, _multiply, _tensor_cores    products: their precision, their library, their hardware
    _triton, _triton_layers    the kernels, on CUDA
    _prepared    the same kernels, decided upon once for all layers that are alike
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import torch
from torch import Tensor

from gradstats._factors import Elementwise, Factor, Outer, Patches, Ragged, in_a_row
from gradstats.contractions import _dense, _elementwise, _outer, _triton
from gradstats.contractions._dense import rows_squared_norms as rows_squared_norms
from gradstats.contractions._direction import direction_inner as direction_inner
from gradstats.contractions._direction import row_products as row_products
from gradstats.contractions._direction import row_sums as row_sums
from gradstats.contractions._direction import total as total
from gradstats.contractions._elementwise import lean as lean
from gradstats.contractions._elementwise import summed as summed
from gradstats.contractions._inner import by_path, crosses_of
from gradstats.contractions._inner import fold as fold
from gradstats.contractions._inner import inner_diagonal as inner_diagonal
from gradstats.contractions._inner import inner_pairs as inner_pairs
from gradstats.contractions._merge import merge as merge
from gradstats.contractions._outer import one_position as one_position
from gradstats.contractions._precision import in_full_precision
from gradstats.contractions._result import Contraction as Contraction
from gradstats.contractions._result import Fused as Fused
from gradstats.contractions._result import Reported as Reported
from gradstats.contractions._result import WellConditioned as WellConditioned
from gradstats.contractions._result import concatenated, recompute_suspects, sum_of_parts
from gradstats.contractions._result import relative_error as relative_error
from gradstats.contractions._result import stack as stack
from gradstats.contractions._rows import FEW as FEW
from gradstats.contractions._rows import sqnorm_of_few as sqnorm_of_few
from gradstats.contractions._table import MODULES
from gradstats.contractions._tied import Projected as Projected
from gradstats.contractions._tied import project as project
from gradstats.contractions._tied import tied_sqnorm as tied_sqnorm
from gradstats.contractions._tiles import dtype_of
from gradstats.contractions._vector import adds_to as adds_to
from gradstats.contractions._vector import merge as add_vectors  # noqa: F401


def on_chip(factor: Factor) -> bool:
    """Whether kernels contract a factor without writing its gradients."""
    if isinstance(factor, Patches):
        return _triton.convolves(factor)
    return isinstance(factor, (Outer, Ragged)) and _triton.serves(factor)


@in_full_precision
def sqnorm(factors: list[Factor], workspace: int) -> Contraction:
    """Return ‖Σ_u F_u[i]‖² for each example i, where the F_u describe uses of one parameter.

    Args:
        factors: one factor for each use, all of the same parameter and batch.
        workspace: bytes of scratch memory that may be allocated at once.

    Returns:
        Squared norms and their absolute error bounds, float64 of shape (B,).
    """
    if len(factors) == 1:
        return MODULES.get(type(factors[0]), _dense).sqnorm(factors[0], workspace)
    apart = _disjoint_parts(factors)
    if apart is not None:
        results = [sqnorm(part, workspace) for part in apart]
        value = sum((result.value for result in results[1:]), results[0].value)
        bound = sum((result.bound for result in results[1:]), results[0].bound)
        return Contraction(value, bound)
    result = _sqnorm_of_sum(factors, workspace)
    return recompute_suspects(
        result, lambda rows: _dense.sqnorm_of_sum([f.select(rows) for f in factors], workspace)
    )


@in_full_precision
def sqnorm_and_sum(
    factor: Factor, workspace: int, dtype: torch.dtype | None = None
) -> tuple[Contraction, Tensor]:
    """Return ‖F[i]‖² for each example and Σ_i F[i], in one pass where that pays.

    ``dtype`` is the preferred one for the sum, which may come in another.
    """
    if isinstance(factor, Elementwise):
        return _elementwise.sqnorm_and_sum(factor, workspace, dtype)
    return MODULES[type(factor)].sqnorm_and_sum(factor, workspace)


def _disjoint_parts(factors: list[Factor]) -> list[list[Factor]] | None:
    """Return the factors grouped by disjoint parts of the parameter; None if parts may overlap.

    The squared norm of the whole is then the sum of those of its parts, such as chunks of one
    projection, or experts that are slices of one tensor.
    """
    if not any(getattr(factor, "path", ()) for factor in factors):
        return None
    groups = by_path(factors)
    paths = list(groups)
    if None in paths or () in paths:
        return None
    if in_a_row(paths) or all(one.is_disjoint(other) for one, other in combinations(paths, 2)):
        return list(groups.values())
    return None


def _sqnorm_of_sum(factors: list[Factor], workspace: int) -> Contraction:
    pieces = _outer.pieces(factors, workspace)
    if len(pieces) > 1:
        return concatenated([_outer.sqnorm(_outer.merge(piece), workspace) for piece in pieces])
    merged = merge(factors)
    if len(merged) == 1:
        return MODULES[type(merged[0])].sqnorm(merged[0], workspace)
    crosses = crosses_of(merged)
    if crosses is None:
        return _dense.sqnorm_of_sum(merged, workspace)
    parts = [MODULES[type(factor)].sqnorm(factor, workspace) for factor in merged]
    return sum_of_parts(parts, [cross(workspace) for cross in crosses], dtype_of(merged))


def adds_up(merged: Sequence[Factor]) -> bool:
    """Whether the norm of a sum of merged factors needs no gradients to be formed."""
    return crosses_of(merged) is not None
