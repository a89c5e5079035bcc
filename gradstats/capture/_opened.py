"""Functions of PyTorch's own that are written in Python, taken apart into the operations in them.

A function mode is off while it handles a call. What such a function computes from data, and what it
does with parameters that PyTorch does not show among its operands, would not be seen: a learned
temperature, what a function of the caller's uses.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

from torch.nn import functional

# Functions that compute with other arguments than those that PyTorch shows.
OPENED: tuple[Callable[..., Any], ...] = (
    functional.gumbel_softmax,
    functional.triplet_margin_with_distance_loss,
    functional.local_response_norm,
    functional.lp_pool1d,
    functional.lp_pool2d,
    functional.lp_pool3d,
)

# The same, where an argument is tracked: otherwise they are followed as they are.
OPENED_IF_TRACKED: tuple[Callable[..., Any], ...] = (functional.normalize,)


def opened(function: Any) -> Callable[..., Any]:
    """Return a function of PyTorch's that does not hand itself over to who overrides functions."""

    def no(*_) -> bool:
        return False

    names = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    scope = {**function.__globals__, **dict.fromkeys(names, no)}
    result = FunctionType(
        function.__code__, scope, function.__name__, function.__defaults__, function.__closure__
    )
    result.__kwdefaults__ = function.__kwdefaults__
    return result
