"""Whether an argument is a number of any library, or a plain array of numbers."""

from __future__ import annotations

import operator
from numbers import Real
from typing import Any, TypeGuard

import torch
from torch import Tensor


def integer(value: Any, least: int | None = None) -> int | None:
    """Return an integer of any library as an int; None for anything else, including bools.

    Also None if it is below ``least``.
    """
    if isinstance(value, bool):
        return None
    try:
        number = operator.index(value)
    except (TypeError, RuntimeError):  # RuntimeError for meta tensors
        return None
    return None if least is not None and number < least else number


def is_real(value: Any) -> TypeGuard[float]:
    """Whether an argument is a real number, not a bool, in the range of a float."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        float(value)
    except OverflowError:  # a huge integer
        return False
    return True


def unlike_numbers(tensor: Tensor) -> str | None:
    """Describe, for a message, a tensor that is not a plain array of numbers; None if it is one."""
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.is_quantized:
        return "a quantised tensor"
    if tensor.is_meta:
        return "a meta tensor, which holds no values"
    return None if tensor.layout == torch.strided else f"a {tensor.layout} tensor"
