"""Products in the precision of their operands, even under autocast."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def without_autocast() -> ExitStack:
    """Return a context in which operations compute in the dtype of their operands."""
    stack = ExitStack()
    if torch._C._is_any_autocast_enabled():
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
    return stack


def in_full_precision(contract: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Protect a contraction from autocast, inside which a backward may run."""

    @wraps(contract)
    def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        if not torch._C._is_any_autocast_enabled():
            return contract(*args, **kwargs)
        with without_autocast():
            return contract(*args, **kwargs)

    return run
