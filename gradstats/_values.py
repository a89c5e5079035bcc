"""What an argument holds: an integer of any library, or a plain array of numbers."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor


def integer(value: Any) -> int | None:
    """Return an integer of any library as an int; None for anything else, including bools."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except (TypeError, RuntimeError):  # of tensors that hold no value
        return None


def unlike_numbers(tensor: Tensor) -> str | None:
    """Return what a tensor is that is no plain array of numbers, for a message; else None."""
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.is_quantized:
        return "a quantised tensor"
    if tensor.is_meta:
        return "a meta tensor, which holds no values"
    return None if tensor.layout == torch.strided else f"a {tensor.layout} tensor"
