"""Batches as loaders give them: nested tuples, lists, mappings and dataclasses of tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from gradstats.errors import LoaderError


def map_leaves(change: Callable[[Any], Any], batch: Any) -> Any:
    """Return the batch with each leaf changed, in containers of the same types."""
    if isinstance(batch, Mapping):
        changed = {key: map_leaves(change, item) for key, item in batch.items()}
        return changed if type(batch) is dict else type(batch)(changed)  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_leaves(change, item) for item in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(map_leaves(change, item) for item in batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = dataclasses.fields(batch)
        return dataclasses.replace(
            batch, **{each.name: map_leaves(change, getattr(batch, each.name)) for each in fields}
        )
    return change(batch)


def to_device(batch: Any, device: torch.device) -> Any:
    """Return the batch with its tensors on a device."""
    return map_leaves(
        lambda leaf: leaf.to(device, non_blocking=True) if isinstance(leaf, Tensor) else leaf, batch
    )


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

    def cut(leaf):
        if not isinstance(leaf, Tensor):
            return leaf
        axis = min(batch_dim, leaf.dim() - 1)
        if leaf.dim() == 0 or leaf.shape[axis] != size:
            raise LoaderError(
                f"a batch of {size} examples cannot be divided: it holds a tensor of shape "
                f"{tuple(leaf.shape)} without an axis of {size} at {batch_dim}. Let the loader "
                "give smaller batches."
            )
        return leaf.narrow(axis, start, stop - start)

    return map_leaves(cut, batch)


def pick(batch: Any, ids: str | int | Callable[[Any], Any]) -> list:
    """Return the ids that a batch carries, as a list."""
    try:
        values = ids(batch) if callable(ids) else batch[ids]
    except (KeyError, IndexError, TypeError) as error:
        raise LoaderError(
            f"a batch ({type(batch).__name__}) has no ids at {ids!r}: {error!r}. Expected a key of "
            "the batch, a position in it, or a function of it."
        ) from error
    return values.tolist() if hasattr(values, "tolist") else list(values)
