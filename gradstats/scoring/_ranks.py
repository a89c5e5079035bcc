"""Work shared by the processes of torch.distributed; without it, there is one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch import distributed

from gradstats import errors
from gradstats.capture._selection import has_processes

Item = TypeVar("Item")
Arguments = ParamSpec("Arguments")


def rank() -> int:
    """Return this process's rank, 0 without torch.distributed."""
    return distributed.get_rank() if has_processes() else 0


def size() -> int:
    """Return the number of processes."""
    return distributed.get_world_size() if has_processes() else 1


def share(items: Sequence[Item]) -> list[Item]:
    """Return this process's share of the items."""
    return list(items[rank() :: size()])


def on_first(
    action: Callable[Arguments, Item], *args: Arguments.args, **kwargs: Arguments.kwargs
) -> Item:
    """Run something in the first process; return its result, or raise, in all processes."""
    found = together(lambda: action(*args, **kwargs) if rank() == 0 else None)
    return gather(found)[0]  # type: ignore[return-value]


def together(
    action: Callable[Arguments, Item], *args: Arguments.args, **kwargs: Arguments.kwargs
) -> Item:
    """Run something in every process; if it fails in one, raise in all, so that none waits.

    The other processes raise an error of the same class if it is one of gradstats; they are sent
    its message, not the error itself.
    """
    if not has_processes():
        return action(*args, **kwargs)
    result, error = None, None
    try:
        result = action(*args, **kwargs)
    except Exception as raised:
        error = raised
    failures = gather(None if error is None else (type(error).__name__, str(error)))
    if error is not None:
        raise error
    for number, failure in enumerate(failures):
        if failure is not None:
            name, message = failure
            kind = getattr(errors, name, errors.GradStatsError)
            raise kind(f"process {number} of {size()} failed: {name}: {message}")
    return result  # type: ignore[return-value]


def gather(item: Item) -> list[Item]:
    """Return every process's item, in the order of their ranks."""
    if not has_processes():
        return [item]
    items: list[Any] = [None] * size()
    distributed.all_gather_object(items, item)
    return items


def add_up(array: np.ndarray) -> None:
    """Replace an array by its sum over the processes; at most one holds a non-zero element."""
    if not has_processes():
        return
    device = "cuda" if distributed.get_backend() == "nccl" else "cpu"
    tensor = torch.from_numpy(array).to(device)
    distributed.all_reduce(tensor)
    array[...] = tensor.cpu().numpy()
