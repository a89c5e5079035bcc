"""Searching and copying batches, and converting them to another precision."""

from __future__ import annotations

import copy
import dataclasses
import enum
import numbers
from collections.abc import Callable, Mapping
from types import BuiltinFunctionType, FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradstats.capture.operations._nested import held_by, tensors_in
from gradstats.statistics._arguments import LossFunction
from gradstats.statistics._state import Versions


def map_tensors(
    batch: Any,
    change: Callable[[Tensor], Tensor],
    replace: Callable[[Any], tuple[Any] | None] | None = None,
) -> Any:
    """Return a batch of the same structure with ``change`` applied to each of its tensors.

    Args:
        batch: tensors in tuples, lists, mappings and dataclasses.
        change: called with each tensor.
        replace: called with everything else inside the batch. Returns its replacement in a tuple,
            or None to search it.
    """

    def inside(item: Any) -> Any:
        if isinstance(item, Tensor):
            return change(item)
        found = None if replace is None else replace(item)
        return map_tensors(item, change, replace) if found is None else found[0]

    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        changed = {key: inside(item) for key, item in batch.items()}
        if type(batch) is dict:
            return changed
        # A mapping may have attributes and methods too: change a copy of it.
        again: Any = copy.copy(batch)
        try:
            for key, item in changed.items():
                held = batch[key]
                again[key] = item
                if batch[key] is not held:
                    # copy.copy returned the batch itself, which was written to: undo that.
                    again[key] = held
                    return changed
        except TypeError:
            return changed
        return again
    if isinstance(batch, (tuple, list)):
        return with_items(batch, [inside(item) for item in batch])
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        # Not by the constructor, which may change its arguments and need not take all fields.
        again = copy.copy(batch)
        for field in dataclasses.fields(batch):
            if hasattr(batch, field.name):
                value = inside(getattr(batch, field.name))
                object.__setattr__(again, field.name, value)
        return again
    return batch


def with_items(batch: tuple | list, items: list[Any]) -> Any:
    """Return a tuple or list of the same type, with the same attributes but other items."""
    if isinstance(batch, list):
        if type(batch) is list:
            return items
        again = copy.copy(batch)
        list.__setitem__(again, slice(None), items)
        return again
    kind: Any = type(batch)
    if kind is tuple:
        return tuple(items)
    if all(new is old for new, old in zip(items, batch, strict=True)):
        return batch
    try:
        made = tuple.__new__(kind, items)
    except TypeError:  # a type that is written in C
        return kind(items)
    if hasattr(batch, "__dict__"):
        vars(made).update(vars(batch))
    return made


def copied(batch: Any) -> tuple[Any] | None:
    """Return, in a tuple, a copy of a batch's containers with the same tensors.

    None if a type of the user's cannot be copied.
    """
    if type(batch) is tuple and all([isinstance(item, Tensor) for item in batch]):
        return (batch,)  # immutable
    try:
        return (map_tensors(batch, lambda tensor: tensor),)
    except Exception:
        return None


def on_a_copy(loss_fn: LossFunction) -> LossFunction:
    """Return a loss function that passes on a copy of its batch, if one can be made.

    What the original takes out of the batch (``batch.pop("labels")``) is there in the next call.
    """
    return lambda model, batch: loss_fn(model, *(copied(batch) or (batch,)))


class Given:
    """A batch before a loss function is called with it.

    Attributes:
        tensors: in the batch, in order.
    """

    def __init__(self, batch: Any):
        self.tensors = tensors_in(batch)
        self._versions = Versions(self.tensors)
        # Objects that cannot be searched would not be copied.
        self._copy = None if opaque_in(batch) else copied(batch)

    def again(self) -> tuple[Any] | None:
        """Return the batch as it was, in a tuple; None if that is not possible."""
        return None if self._versions.changed else self._copy


# Types whose values hold no examples.
PLAIN = (
    str, bytes, numbers.Number, np.generic, type(None), torch.dtype, torch.device, enum.Enum, slice,
    range, FunctionType, BuiltinFunctionType,
)  # fmt: skip


def opaque_in(batch: Any) -> list[Any]:
    """Return the objects in a batch that may hold examples but cannot be searched."""
    held = held_by(batch)
    if held is None:
        return [] if can_be_looked_into(batch) else [batch]
    return [each for item in held if not isinstance(item, Tensor) for each in opaque_in(item)]


def can_be_looked_into(item: Any) -> bool:
    """Whether it is known what an item holds, apart from what is inside containers."""
    if isinstance(item, (Tensor, Mapping, tuple, list, type, *PLAIN)):
        return True
    if isinstance(item, np.ndarray):
        return item.ndim == 0
    if dataclasses.is_dataclass(item):
        return True
    settings = getattr(item, "__dict__", {}).values()
    return bool(settings) and all(isinstance(each, PLAIN) for each in settings)


def model_to_float64(model: nn.Module) -> nn.Module:
    """Return a copy of the model in double precision.

    Raises:
        ValueError: if the copy shares tensors with the model, which would be converted too.
    """
    wide = copy.deepcopy(model)
    originals = set(map(id, (*model.parameters(), *model.buffers())))
    if not originals.isdisjoint(map(id, (*wide.parameters(), *wide.buffers()))):
        raise ValueError("its tensors are the model's own")
    wide.double()
    for tensor in (*wide.parameters(), *wide.buffers()):
        if tensor.is_complex():
            tensor.data = tensor.data.to(torch.complex128)
    return wide


def to_float64(batch: Any) -> Any:
    """Return the batch with its floating-point and complex tensors in double precision."""

    def widen(tensor: Tensor) -> Tensor:
        if not (tensor.is_floating_point() or tensor.is_complex()):
            return tensor
        wide = torch.complex128 if tensor.is_complex() else torch.float64
        return tensor.detach().to(wide).requires_grad_(tensor.requires_grad)

    return map_tensors(batch, widen)
