"""Work shared by the processes of torch.distributed; one process alone where none was started."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import distributed

from gradstats.errors import GradStatsError

Item = TypeVar("Item")


def rank() -> int:
    """Return this process's number, 0 without torch.distributed."""
    return distributed.get_rank() if _started() else 0


def size() -> int:
    """Return the number of processes."""
    return distributed.get_world_size() if _started() else 1


def share(items: Sequence[Item]) -> list[Item]:
    """Return the part of the items that is this process's work."""
    return list(items[rank() :: size()])


def on_first(action: Callable[[], Item]) -> Item:
    """Run something in the first process; return its result, or raise its error, in all."""
    if not _started():
        return action()
    outcome: list[Any] = [None, None]
    if rank() == 0:
        try:
            outcome[0] = action()
        except Exception as error:
            outcome[1] = error
    distributed.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def together(action: Callable[[], Item]) -> Item:
    """Run something in every process; where it fails in one, raise in all, so that none waits."""
    if not _started():
        return action()
    result, error = None, None
    try:
        result = action()
    except Exception as raised:
        error = raised
    messages = gather(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    for number, message in enumerate(messages):
        if message is not None:
            raise GradStatsError(f"process {number} of {size()} failed: {message}")
    return result  # type: ignore[return-value]


def gather(item: Item) -> list[Item]:
    """Return what every process has, in the order of their numbers."""
    if not _started():
        return [item]
    items: list[Any] = [None] * size()
    distributed.all_gather_object(items, item)
    return items


def add_up(array: np.ndarray) -> None:
    """Replace an array by its sum over the processes; each element is non-zero in one at most."""
    if not _started():
        return
    device = "cuda" if distributed.get_backend() == "nccl" else "cpu"
    tensor = torch.from_numpy(array).to(device)
    distributed.all_reduce(tensor)
    array[...] = tensor.cpu().numpy()


def _started() -> bool:
    return distributed.is_available() and distributed.is_initialized()
