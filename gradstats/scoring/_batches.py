"""Batches as loaders give them: moved to a device, divided, and asked for their ids."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any

import torch
from torch import Tensor

from gradstats.errors import LoaderError
from gradstats.statistics._batches import map_tensors


def to_device(batch: Any, device: torch.device) -> Any:
    """Return the batch with its tensors on a device."""
    return map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=True))


def example_range(batch: Any, start: int, stop: int, size: int, batch_dim: int) -> Any:
    """Return some of a batch's examples.

    Args:
        batch: of ``size`` examples.
        start, stop: which of them.
        size: number of examples in the batch.
        batch_dim: the example axis.

    Raises:
        LoaderError: for a tensor that has no example axis of this size, which cannot be divided.
    """

    def cut(tensor: Tensor) -> Tensor:
        axis = min(batch_dim, tensor.dim() - 1)
        if tensor.dim() == 0 or tensor.shape[axis] != size:
            raise LoaderError(
                f"a batch of {size} examples cannot be divided: it holds a tensor of shape "
                f"{tuple(tensor.shape)} without an axis of {size} at {batch_dim}. Let the loader "
                "give smaller batches."
            )
        return tensor.narrow(axis, start, stop - start)

    return map_tensors(batch, cut)


def pick(batch: Any, ids: str | int | Callable[[Any], Any], size: int) -> list[int | str]:
    """Return the ids that a batch of so many examples carries, as a list."""
    try:
        values = ids(batch) if callable(ids) else batch[ids]
    except (KeyError, IndexError, TypeError) as error:
        raise LoaderError(
            f"a batch ({type(batch).__name__}) has no ids at {ids!r}: {error!r}. Expected a key of "
            "the batch, a position in it, or a function of it."
        ) from error
    values = _plain(values)
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
