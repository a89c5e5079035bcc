"""A call of an operation on data."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from gradstats.capture.operations._names import function_name
from gradstats.capture.operations._nested import argument_of


class Call(NamedTuple):
    """A call of an operation on data.

    Attributes:
        func, args, kwargs: the operation and its arguments.
        data: the operands that are data.
        result: one of the tensors that the operation returned.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    data: list[Tensor]
    result: Tensor

    @property
    def name(self) -> str | None:
        """The name under which users know the operation; None if the operation is not known."""
        return None if self.func is None else function_name(self.func)

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """Return an argument given by name or by position, else its default."""
        return argument_of(self.args, self.kwargs, position, name, default)
