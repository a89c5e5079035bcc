"""An operation on data, as it was called."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from gradstats.capture.operations._nested import argument_of


class Call(NamedTuple):
    """An operation on data.

    Attributes:
        func, args, kwargs: as it was called.
        data: its operands of data.
        result: one of the tensors that it returned.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    data: list[Tensor]
    result: Tensor

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """Return an argument, whether it was given by name, by position or not at all."""
        return argument_of(self.args, self.kwargs, position, name, default)
