"""Batches from loaders: moved to a device, and where their examples, ids and bounds are."""

from __future__ import annotations

import copy
import reprlib
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradstats._factors import moved
from gradstats.errors import LoaderError
from gradstats.statistics._arguments import Options
from gradstats.statistics._batches import can_be_looked_into, map_tensors
from gradstats.statistics._division import Division
from gradstats.statistics._loss import checked_bounds, infer_batch_size

# Where a batch holds something: a key, a position, or a function of the batch; None for nowhere.
Source = str | int | Callable[[Any], Any] | None


def to_device(batch: Any, device: torch.device) -> Any:
    """Return the batch with its tensors on a device.

    A batch that cannot be looked into moves by its own method, on a copy: some move in place.
    """
    if not can_be_looked_into(batch) and hasattr(batch, "to"):
        return copy.copy(batch).to(device)
    return map_tensors(batch, lambda tensor: moved(tensor, device))


def look_up(batch: Any, source: str | int | Callable[[Any], Any], what: str) -> Any:
    """Return what a batch holds at a place; ``what`` names it in the message of the error."""
    try:
        return source(batch) if callable(source) else batch[source]
    except (KeyError, IndexError, TypeError) as error:
        raise LoaderError(
            f"a batch ({type(batch).__name__}) has no {what} at {source!r}: {error!r}. Expected a "
            "key of the batch, a position in it, or a function of it."
        ) from error


@dataclass(frozen=True)
class BatchLayout:
    """Where the examples of all batches of a call lie.

    Attributes:
        batch_dim: the example axis, or the axis of packed rows.
        cu_seqlens: where a batch holds the bounds of packed examples; None if they are not packed.
    """

    batch_dim: int = 0
    cu_seqlens: Source = None

    def __post_init__(self):
        source = self.cu_seqlens
        if not (source is None or isinstance(source, (str, int)) or callable(source)):
            raise LoaderError(
                f"cu_seqlens is {type(source).__name__}, expected the place where each batch "
                "holds the bounds of its examples: a key of the batch, a position in it, or a "
                "function of it."
            )

    @property
    def packed(self) -> bool:
        """Whether examples are packed."""
        return self.cu_seqlens is not None

    def bounds(self, batch: Any) -> Tensor | None:
        """Return a batch's bounds as integers, checked; None if its examples are not packed."""
        found = self._found(batch)
        return None if found is None else checked_bounds(found)

    def count(self, batch: Any) -> int:
        """Return the number of a batch's examples."""
        bounds = self.bounds(batch)
        return infer_batch_size(batch, self.batch_dim) if bounds is None else len(bounds) - 1

    def options(self, batch: Any) -> Options:
        """Return where a batch's examples lie, as options of the core's calls, which check it."""
        return {"batch_dim": self.batch_dim, "cu_seqlens": self._found(batch)}

    def part(self, batch: Any, start: int, stop: int, size: int) -> Any:
        """Return examples start … stop - 1 of a batch of ``size``; raise if it is indivisible."""
        bounds = self.bounds(batch)
        division = Division(
            size, self.batch_dim, None if bounds is None else tuple(bounds.tolist())
        )
        obstacle = division.obstacle(batch) or division.doubt(batch)
        if obstacle is not None:
            packed = "" if bounds is None else "packed "
            raise LoaderError(
                f"a batch of {size} {packed}examples cannot be divided: {obstacle}. Use smaller "
                "batches in the loader."
            )
        return division.take(batch, list(range(start, stop)))

    def _found(self, batch: Any) -> Any:
        """Return what a batch holds as its bounds; None if examples are not packed."""
        if self.cu_seqlens is None:
            return None
        return look_up(batch, self.cu_seqlens, "cu_seqlens")


def pick(batch: Any, ids: str | int | Callable[[Any], Any], size: int) -> list[int | str]:
    """Return the ids of a batch of ``size`` examples, as a list."""
    values = _plain(look_up(batch, ids, "ids"))
    expected = (
        "expected one integer or string for each example, in a list, an array or a tensor. Pass "
        "as ids= where the batch holds them: a key, a position or a function of the batch."
    )
    if isinstance(values, (str, bytes, Mapping, Set)) or not isinstance(values, Iterable):
        raise LoaderError(
            f"ids={ids!r} gives {_shown(values)} for a batch of {size} examples, {expected}"
        )
    found = [_plain(each) for each in values]
    for each in found:
        if not isinstance(each, (int, str)) or isinstance(each, bool):
            raise LoaderError(f"ids={ids!r} gives {_shown(each)} for an example, {expected}")
    if len(found) != size:
        count = f"{len(found)} id{'' if len(found) == 1 else 's'}"
        raise LoaderError(f"ids={ids!r} gives {count} for a batch of {size} examples, {expected}")
    return found


def _plain(value: Any) -> Any:
    """Return a tensor or array as Python's numbers, anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value


def _shown(value: Any) -> str:
    return f"{reprlib.repr(value)} ({type(value).__name__})"
