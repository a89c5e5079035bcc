"""Operands that are given by name, moved to the place where following looks for them.

``torch.mul(x, other=y)`` does to the examples what ``torch.mul(x, y)`` does.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch

from gradstats.capture._layout import FOLLOWED
from gradstats.capture._rowwise import OVERLOADS
from gradstats.capture._sequences import PRESCRIBES
from gradstats.capture._writes import WRITES

# The names of an operation's positional parameters, in order, for each of its overloads.
NAMES: dict[Any, tuple[tuple[str, ...], ...]] = {}

POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@cache
def read_signatures() -> None:
    """Fill ``NAMES``. Apart from looking them up, since the compiler cannot trace this."""
    for function in FOLLOWED | PRESCRIBES.keys() | WRITES.keys():
        NAMES[function] = _names_of(function)


def by_place(
    func, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of an operation with those that follow ``args`` moved out of ``kwargs``.

    An argument behind one that is left out stays where it is.
    """
    moved: tuple[str, ...] = ()
    for names in NAMES.get(func, ()):
        place = len(args)
        while place < len(names) and names[place] in kwargs:
            place += 1
        found = names[len(args) : place]
        if len(found) > len(moved):
            moved = found
    if not moved:
        return args, kwargs
    left = {name: item for name, item in kwargs.items() if name not in moved}
    return (*args, *[kwargs[name] for name in moved]), left


def _names_of(function: Any) -> tuple[tuple[str, ...], ...]:
    try:
        parameters = inspect.signature(function).parameters.values()
        found = [[each.name for each in parameters if each.kind in POSITIONAL]]
    except (TypeError, ValueError):  # it is not written in Python
        operator = f"aten::{function.__name__}"
        found = [
            [each.name for each in schema.arguments if not each.kwarg_only]
            for schema in (
                torch._C._get_schema(operator, overload) for overload in OVERLOADS.get(operator, ())
            )
        ]
    # What schemas call ``self`` has another name in Python.
    return tuple(tuple("input" if name == "self" else name for name in names) for names in found)
