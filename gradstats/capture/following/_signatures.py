"""Operands that are given by name, moved to the position where following expects them.

``torch.mul(x, other=y)`` is then followed as ``torch.mul(x, y)`` is.
"""

from __future__ import annotations

import inspect
from functools import cache
from itertools import takewhile
from typing import Any

import torch

from gradstats.capture.following._layout import FOLLOWED
from gradstats.capture.following._sequences import PRESCRIBES
from gradstats.capture.following._writes import WRITES
from gradstats.capture.operations._rowwise import OVERLOADS

# Operations whose operands are found by position.
BY_PLACE = FOLLOWED | PRESCRIBES.keys() | WRITES.keys()

# From the names that NumPy gives to arguments, which PyTorch's functions take too, to PyTorch's.
PYTORCHS = {"axis": "dim", "x": "input", "a": "input", "x1": "input", "x2": "other"}
NUMPYS = frozenset(PYTORCHS)
# Names that ``in_pytorchs_names`` handles.
RENAMED = NUMPYS | {"out"}

POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def in_pytorchs_names(func, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the named arguments of an operation, with NumPy's names replaced by PyTorch's.

    An ``out`` of None is left out, as it says nothing.
    """
    # In a user's own operations NumPy's names may mean anything.
    kept = NUMPYS - {"axis"}
    if func in BY_PLACE:
        kept = frozenset(name for names in names_of(func) for name in names)
    return {
        name if name in kept else PYTORCHS.get(name, name): item
        for name, item in kwargs.items()
        if not (name == "out" and item is None)
    }


def by_place(
    func, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return an operation's arguments with named ones moved behind ``args``, as far as possible.

    An argument that comes after one that is left out stays in ``kwargs``.
    """
    moved: list[str] = []
    for names in names_of(func) if func in BY_PLACE else ():
        found = [*takewhile(kwargs.__contains__, names[len(args) :])]
        moved = max(moved, found, key=len)
    if not moved:
        return args, kwargs
    left = {name: item for name, item in kwargs.items() if name not in moved}
    return (*args, *[kwargs[name] for name in moved]), left


@cache
def names_of(function: Any) -> tuple[tuple[str, ...], ...]:
    """Return the names of an operation's positional parameters for each of its overloads."""
    try:
        parameters = inspect.signature(function).parameters.values()
        named = [each.name for each in parameters if each.kind in POSITIONAL]
        found = [[name for name in named if name != "out"]]  # outputs are found by that name
    except (TypeError, ValueError):  # the function is not written in Python
        operator = f"aten::{function.__name__}"
        found = [
            [each.name for each in schema.arguments if not each.kwarg_only]
            for schema in (
                torch._C._get_schema(operator, overload) for overload in OVERLOADS.get(operator, ())
            )
        ]
    # What schemas call ``self`` has another name in Python.
    return tuple(tuple("input" if name == "self" else name for name in names) for names in found)
