"""The operations that PyTorch dispatches while something runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Operations(TorchDispatchMode):
    """Keeps what a function finds of each operation inside the context: its name by default.

    Args:
        find: (name, inputs, result) → what is kept; None for nothing. Names have no "aten::".

    Attributes:
        found: what was kept, in order.
    """

    def __init__(self, find: Callable[[str, tuple, Any], Any] = lambda name, *_: name):
        super().__init__()
        self._find = find
        self.found: list[Any] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        found = self._find(func.name().removeprefix("aten::"), (*args, *kwargs.values()), result)
        if found is not None:
            self.found.append(found)
        return result


def tensors_in(held: Any) -> list[Tensor]:
    return [item for item in tree_leaves(held) if isinstance(item, Tensor)]


def shapes(name: str, inputs: tuple, result: Any) -> list[tuple[int, ...]]:
    """Find the shapes of what an operation returns."""
    return [tuple(tensor.shape) for tensor in tensors_in(result)]
