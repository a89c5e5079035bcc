"""Which module contracts a factor: a new kind of factor needs an entry here.

Each module defines, for G_i the per-example gradients that a factor of its kind describes,

    sqnorm(factor, workspace)                   ‖G_i‖², a Contraction
    direction(factor, direction, workspace)     ⟨G_i, V⟩ for a dense V, (B,) float64
    total(factor)                               Σ_i G_i, in the accumulation dtype

and, if that saves time,

    sqnorm_and_sum(factor, workspace)           both, from one pass over the operands
    merge(factors)                              the sum of several uses as one factor of this kind

Factors that pull the factor of a derived tensor back to the parameter have no module. Their norms
are contracted by definition (``_dense``), all else through the inner factor where possible.
"""

from __future__ import annotations

from types import ModuleType

from gradstats._factors import (
    Distances,
    Elementwise,
    Experts,
    Images,
    Masked,
    Outer,
    Patches,
    Ragged,
    Rows,
    Tangent,
    Vector,
)
from gradstats.contractions import (
    _distances,
    _elementwise,
    _experts,
    _images,
    _masked,
    _outer,
    _patches,
    _ragged,
    _rows,
    _tangent,
    _vector,
)

# Modules rather than functions: modules of factors that contain other factors import this table
# while it is made.
MODULES: dict[type, ModuleType] = {
    Outer: _outer,
    Patches: _patches,
    Images: _images,
    Ragged: _ragged,
    Experts: _experts,
    Rows: _rows,
    Vector: _vector,
    Elementwise: _elementwise,
    Masked: _masked,
    Tangent: _tangent,
    Distances: _distances,
}
