"""Tensors that a loss function takes from where it was written: of its closure and its globals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn


def enclosed_tensors(function: Any) -> list[Tensor]:
    """Return the tensors that a function finds in its closure, defaults, globals and object.

    In containers too, and by way of the functions that it calls there; not in modules.
    """
    found: dict[int, Tensor] = {}
    seen: set[int] = set()
    waiting = [function]
    while waiting:
        item = waiting.pop()
        if isinstance(item, Tensor):
            found[id(item)] = item
        elif id(item) not in seen:
            seen.add(id(item))
            waiting.extend(_inside(item))
    return list(found.values())


def _inside(item: Any) -> Iterator[Any]:
    if isinstance(item, Mapping):
        yield from item.values()
    elif isinstance(item, (list, tuple, set)):
        yield from item
    elif isinstance(item, partial):
        yield from (item.func, *item.args, *item.keywords.values())
    elif isinstance(item, MethodType):
        yield from (item.__func__, item.__self__)
    elif isinstance(item, FunctionType):
        yield from _inside_function(item)
    elif callable(item) and not isinstance(item, (type, nn.Module)):
        # An object that is called as a function; what it is called with is not asked.
        yield from (getattr(item, "__dict__", {}), type(item).__call__)


def _inside_function(function: FunctionType) -> Iterator[Any]:
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            pass  # it is empty
    package = function.__module__.partition(".")[0] if function.__module__ else None
    for name in _names_in(function.__code__):
        value = function.__globals__.get(name)
        # Functions of other packages know nothing of the caller's tensors.
        other = isinstance(value, FunctionType) and value.__module__.partition(".")[0] != package
        if not other:
            yield value


def _names_in(code: CodeType) -> Iterator[str]:
    """Yield the names that a function's code looks up, and the code written inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
