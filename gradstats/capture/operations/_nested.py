"""Nested tuples, lists and dicts, such as arguments, results and batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

# Types whose items are leaves or nests themselves.
NESTS = (tuple, list, dict)


def flatten(items) -> list[Any]:
    """Return the leaves of nested tuples, lists and dicts, in order."""
    leaves: list[Any] = []
    for item in items.values() if isinstance(items, dict) else items:
        if isinstance(item, NESTS):
            leaves.extend(flatten(item))
        else:
            leaves.append(item)
    return leaves


def tensors_in(batch: Any) -> list[Tensor]:
    """Return the tensors of nested tuples, lists, mappings and dataclasses, in order."""
    if isinstance(batch, Tensor):
        return [batch]
    found: list[Tensor] = []
    held = held_by(batch)
    for item in () if held is None else held:
        if isinstance(item, Tensor):
            found.append(item)
        else:
            found += tensors_in(item)
    return found


def held_by(batch: Any) -> Collection[Any] | None:
    """Return what a tuple, list, mapping or dataclass holds; None for anything else."""
    if isinstance(batch, (tuple, list)):
        return batch
    if isinstance(batch, Mapping):
        return batch.values()
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        names = [field.name for field in dataclasses.fields(batch)]
        return [getattr(batch, name) for name in names if hasattr(batch, name)]  # some may be unset
    return None


def operands_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors among an operation's arguments, in order."""
    found: list[Tensor] = []
    for item in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, NESTS):
            found += [leaf for leaf in flatten(item) if isinstance(leaf, Tensor)]
    return found


def is_among(item: Any, items: Iterable[Any]) -> bool:
    """Whether an item is one of several objects; equal ones, as tensors compare, do not count."""
    return id(item) in map(id, items)


def argument_of(
    args: Sequence[Any], kwargs: Mapping[str, Any], position: int, name: str, default: Any = None
):
    """Return an operation's argument given by name or by position, else its default."""
    if name in kwargs:
        return kwargs[name]
    return args[position] if len(args) > position else default


def rebuild(items, change: Callable[[Any], Any]):
    """Return nested tuples, lists and dicts with every leaf replaced by ``change(leaf)``."""
    if not isinstance(items, NESTS):
        return change(items)
    leaves = items.values() if isinstance(items, dict) else items
    return like(items, [rebuild(i, change) if isinstance(i, NESTS) else change(i) for i in leaves])


def replace(items, others: Mapping[int, Any]):
    """Return nested tuples, lists and dicts with the leaves of some ids replaced.

    Faster than ``rebuild``: nothing is called for each leaf.
    """
    leaves = items.values() if isinstance(items, dict) else items
    return like(
        items,
        [replace(i, others) if isinstance(i, NESTS) else others.get(id(i), i) for i in leaves],
    )


def like(items, changed: list[Any]):
    """Return a tuple, list or dict of the same type with other items."""
    if isinstance(items, dict):
        return dict(zip(items, changed, strict=True))
    if isinstance(items, tuple) and hasattr(items, "_fields"):
        return type(items)(*changed)
    # PyTorch's named results are made from one list, as tuples are. A torch.Size holds no tensors.
    same = type(items) in (tuple, list) or hasattr(items, "n_fields")
    return type(items)(changed) if same else tuple(changed)


def of_numbers(part: slice) -> slice:
    """Return a slice with ends that are tensors read now: ``start += length`` may change them."""
    start, stop = part.start, part.stop
    if not (isinstance(start, Tensor) or isinstance(stop, Tensor)):
        return part
    return slice(
        *(int(end) if isinstance(end, Tensor) else end for end in (start, stop, part.step))
    )
