"""Rules: how each operation that a parameter and data meet in delivers factors.

A rule is called as ``rule(tracker, function, *args, **kwargs)`` with the operation's own arguments,
of which at least one is tracked and at least one is data. It returns the operation's result. There
is one file for each family of operations.

_common         what several families need; _misplaced its errors
_products       linear layers and matrix products; _bilinear, _experts
_convolution    convolutions and transposed convolutions
_embedding      look-ups by integers
_normalization  normalisation layers; _affine the factors of their scale and shift
_elementwise    everything that broadcasts; _per_example those without a short cut
_assigned       parameters written into data
_losses         losses of elements and of classes
_sampling       grid_sample
_in_place       data written into tensors computed from parameters, or into a copy of them
_attention, _recurrent    layers that arrive as one operation and are taken apart
_composed       operations written as compositions of others
_single         operations on the data of a single example, without an example axis
"""

from typing import Any

from gradstats.capture.rules import (
    _assigned,
    _attention,
    _bilinear,
    _composed,
    _convolution,
    _elementwise,
    _embedding,
    _experts,
    _in_place,
    _losses,
    _normalization,
    _products,
    _recurrent,
    _sampling,
    _single,
)
from gradstats.capture.uses._grafted import Registered

RULES: dict[Any, Any] = {
    **_products.RULES,
    **_convolution.RULES,
    **_embedding.RULES,
    **_experts.RULES,
    **_normalization.RULES,
    **_elementwise.RULES,
    **_assigned.RULES,
    **_losses.RULES,
    **_in_place.RULES,
    **_bilinear.RULES,
    **_composed.RULES,
    **_attention.RULES,
    **_recurrent.RULES,
    **_sampling.RULES,
}
RULES.update({function: _single.alone(function, RULES[function]) for function in _single.SINGLE})


def is_registered(function: Any) -> bool:
    """Whether a user registered the rule of an operation."""
    return isinstance(RULES.get(function), Registered)
