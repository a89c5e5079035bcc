"""Batches from loaders: moved to a device, and searched for ids and bounds."""

from __future__ import annotations

import copy
import reprlib
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any

import torch

from gradstats.errors import LoaderError
from gradstats.statistics._batches import can_be_looked_into, map_tensors

# Where a batch holds something: a key, a position, or a function of the batch; None for nowhere.
Source = str | int | Callable[[Any], Any] | None


def to_device(batch: Any, device: torch.device) -> Any:
    """Return the batch with its tensors on a device.

    A batch that cannot be looked into moves itself: a copy does, because some are changed by it.
    """
    if not can_be_looked_into(batch) and hasattr(batch, "to"):
        return copy.copy(batch).to(device)
    return map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=True))


def look_up(batch: Any, source: str | int | Callable[[Any], Any], what: str) -> Any:
    """Return what a batch holds at a place; ``what`` that should be, a message says."""
    try:
        return source(batch) if callable(source) else batch[source]
    except (KeyError, IndexError, TypeError) as error:
        raise LoaderError(
            f"a batch ({type(batch).__name__}) has no {what} at {source!r}: {error!r}. Expected a "
            "key of the batch, a position in it, or a function of it."
        ) from error


def pick(batch: Any, ids: str | int | Callable[[Any], Any], size: int) -> list[int | str]:
    """Return the ids that a batch of so many examples carries, as a list."""
    values = _plain(look_up(batch, ids, "ids"))
    expected = (
        "expected one integer or string for each example, in a list, an array or a tensor. Let "
        "ids= name where the batch holds them: a key, a position or a function of the batch."
    )
    if isinstance(values, (str, bytes, Mapping, Set)) or not isinstance(values, Iterable):
        raise LoaderError(
            f"ids={ids!r} gives {_shown(values)} for a batch of {size} examples, {expected}"
        )
    named = [_plain(each) for each in values]
    for each in named:
        if not isinstance(each, (int, str)) or isinstance(each, bool):
            raise LoaderError(f"ids={ids!r} gives {_shown(each)} for an example, {expected}")
    if len(named) != size:
        count = f"{len(named)} id{'' if len(named) == 1 else 's'}"
        raise LoaderError(f"ids={ids!r} gives {count} for a batch of {size} examples, {expected}")
    return named


def _plain(value: Any) -> Any:
    """Return the numbers of a tensor or an array as Python's."""
    return value.tolist() if hasattr(value, "tolist") else value


def _shown(value: Any) -> str:
    return f"{reprlib.repr(value)} ({type(value).__name__})"
