"""Which module contracts a factor: here a new kind of factor is entered, once it has a module.

Each module defines, for G_i the per-example gradients that a factor of its kind describes,

    sqnorm(factor, workspace)                   ‖G_i‖², a Contraction
    direction(factor, direction, workspace)     ⟨G_i, V⟩ for a dense V, (B,) float64
    total(factor)                               Σ_i G_i, in the accumulation dtype

and, if there is something to gain,

    sqnorm_and_sum(factor, workspace)           both, from one pass over the operands
    merge(factors)                              the sum of several uses as one factor of this kind

What pulls the factor of a derived tensor back to the parameter has no module: its norms are
contracted by definition (``_dense``), all else through that factor where that can be.
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

# Modules, whose functions are looked up only when they are called: modules of factors that are made
# of others import this table, to contract these.
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
