"""Rules: which factor an operation's use of a parameter has. One file for each family.

A rule is called as ``rule(tracker, function, *args, **kwargs)`` with the operation's own arguments,
at least one of them tracked and at least one of them data, and returns the operation's result.
"""

from typing import Any

from gradstats.capture.rules import (
    _attention,
    _bilinear,
    _composed,
    _convolution,
    _elementwise,
    _embedding,
    _experts,
    _normalization,
    _products,
    _recurrent,
    _single,
)

RULES: dict[Any, Any] = {
    **_products.RULES,
    **_convolution.RULES,
    **_embedding.RULES,
    **_experts.RULES,
    **_normalization.RULES,
    **_elementwise.RULES,
    **_bilinear.RULES,
    **_composed.RULES,
    **_attention.RULES,
    **_recurrent.RULES,
}
RULES.update({function: _single.alone(function, RULES[function]) for function in _single.SINGLE})
