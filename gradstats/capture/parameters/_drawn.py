"""Operations that draw random numbers, and draw the same ones when they are run again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

DRAWS: frozenset[Callable[..., Any]] = frozenset(
    getattr(owner, name)
    for owner in (torch, functional)
    for name in (
        "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_dropout",
        "feature_alpha_dropout", "rrelu", "scaled_dot_product_attention",
        "multi_head_attention_forward",
    )
    if hasattr(owner, name)
)  # fmt: skip


class Draw:
    """An operation that can be run again with the same random numbers."""

    def __init__(self, function: Callable[..., Any], device: torch.device):
        self.function = function
        on_gpu = device.type == "cuda"
        self.generator: torch.Generator = (
            torch.cuda.default_generators[device.index] if on_gpu else torch.default_generator
        )
        self.state: Tensor = self.generator.get_state()
        self.__name__ = getattr(function, "__name__", "draw")
        self.__module__ = function.__module__

    def __call__(self, *args, **kwargs):
        """Run the operation again, without changing what is drawn afterwards."""
        now = self.generator.get_state()
        self.generator.set_state(self.state)
        try:
            return self.function(*args, **kwargs)
        finally:
            self.generator.set_state(now)
