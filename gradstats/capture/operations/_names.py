"""The names under which users know operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gradstats.capture.operations._operations import SCRIPTS


def function_class_of(function: Any) -> type[torch.autograd.Function] | None:
    """Return the autograd Function whose ``apply`` a function is; None for other functions."""
    owner = getattr(function, "__self__", None)
    if isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
        return owner
    return None


def function_name(function: Callable[..., Any]) -> str:
    """Return the name under which a user knows an operation."""
    owner = function_class_of(function)
    if owner is not None:
        return f"{owner.__module__}.{owner.__qualname__}.apply"
    if isinstance(function, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return f"torch.ops.{function}"
    if isinstance(function, SCRIPTS):
        return f"{function.name} of TorchScript"
    name = getattr(function, "__name__", repr(function))
    if name in ("__get__", "__set__"):
        owner = getattr(function, "__self__", None)
        return f"Tensor.{getattr(owner, '__name__', name)}"
    module = getattr(function, "__module__", None) or ""
    if module == "torch._C._nn":
        module = "torch.nn.functional"
    if isinstance(function, type(torch.Tensor.add)):
        module = "Tensor"
    return f"{module}.{name}" if module and not module.startswith("torch._") else name
