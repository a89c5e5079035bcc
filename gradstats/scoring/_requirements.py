"""Packages that only some results need."""

from __future__ import annotations

import importlib
from typing import Any

from gradstats.errors import GradStatsError


class MissingPackageError(GradStatsError):
    """A package of an optional extra cannot be imported."""


def require(module: str, extra: str) -> Any:
    """Return a module, or raise MissingPackageError naming the extra that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingPackageError(
            f"{module.partition('.')[0]} cannot be imported ({error}). Install it with the extra "
            f"{extra!r}: pip install 'gradstats[{extra}]'"
        ) from error
