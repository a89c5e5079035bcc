"""Batches: searched, divided into examples, and converted to another precision."""

from __future__ import annotations

import copy
import dataclasses
import enum
import itertools
import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import BuiltinFunctionType, FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradstats.capture.operations._nested import fields_of, tensors_in
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
        change: of a tensor.
        replace: of all else inside the batch: what stands in its place, in a tuple, or None to look
            into it.
    """

    def inside(item: Any) -> Any:
        found = None if replace is None or isinstance(item, Tensor) else replace(item)
        return map_tensors(item, change, replace) if found is None else found[0]

    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        changed = {key: inside(item) for key, item in batch.items()}
        if type(batch) is dict:
            return changed
        # A mapping may offer more than its items (attributes, methods): change a copy.
        again: Any = copy.copy(batch)
        try:
            for key, item in changed.items():
                held = batch[key]
                again[key] = item
                if batch[key] is not held:
                    # A copy that is no copy: the batch itself was written to.
                    again[key] = held
                    return changed
        except TypeError:
            return changed
        return again
    if isinstance(batch, (tuple, list)):
        return _with_items(batch, [inside(item) for item in batch])
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        # A constructor may change what it is given, and takes not all fields.
        again = copy.copy(batch)
        for field in dataclasses.fields(batch):
            if hasattr(batch, field.name):
                value = inside(getattr(batch, field.name))
                object.__setattr__(again, field.name, value)
        return again
    return batch


def _with_items(batch: tuple | list, items: list[Any]) -> Any:
    """Return a tuple or list of the same type and attributes that holds other items."""
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

    None if it is of a type of the user's that does not let itself be made again.
    """
    try:
        return (map_tensors(batch, lambda tensor: tensor),)
    except Exception:
        return None


def on_a_copy(loss_fn: LossFunction) -> LossFunction:
    """Return a loss function that is given a copy of the batch, if one can be made.

    What it takes out of it (``batch.pop("labels")``) is there the next time it is called.
    """
    return lambda model, batch: loss_fn(model, *(copied(batch) or (batch,)))


class Given:
    """A batch before a loss function is called with it."""

    def __init__(self, batch: Any):
        self._versions = Versions(tensors_in(batch))
        # What cannot be looked into would not be copied.
        opaque = any(True for _ in opaque_in(batch))
        self._copy = None if opaque else copied(batch)

    def again(self) -> tuple[Any] | None:
        """Return the batch as it was, in a tuple; None if that is not possible."""
        return None if self._versions.are_old else self._copy


# What holds no examples.
PLAIN = (
    str, bytes, numbers.Number, np.generic, type(None), torch.dtype, torch.device, enum.Enum, slice,
    range, FunctionType, BuiltinFunctionType,
)  # fmt: skip


def opaque_in(batch: Any) -> Iterator[Any]:
    """Yield objects in a batch that may hold examples but cannot be searched."""
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        batch = fields_of(batch)
    if isinstance(batch, (tuple, list)):
        for item in batch:
            yield from opaque_in(item)
    elif not _can_be_looked_into(batch):
        yield batch


def _can_be_looked_into(item: Any) -> bool:
    if isinstance(item, (Tensor, Mapping, tuple, list, type, *PLAIN)):
        return True
    if isinstance(item, np.ndarray):
        return item.ndim == 0
    if dataclasses.is_dataclass(item):
        return True
    settings = getattr(item, "__dict__", {}).values()
    return bool(settings) and all(isinstance(each, PLAIN) for each in settings)


def _is_alike(entries: Sequence[Any]) -> bool:
    """Whether entries are of one kind, as those of examples are."""
    if len({*map(type, entries)}) > 1:
        return False
    if isinstance(entries[0], Tensor):
        return len({(each.dim(), each.shape[1:]) for each in entries}) == 1
    if isinstance(entries[0], Mapping):
        return all(each.keys() == entries[0].keys() for each in entries)
    return True


def _is_list(item: Any) -> bool:
    """Whether an item is a list, or a tuple without names."""
    return isinstance(item, list) or type(item) is tuple


def _is_size(item: Any) -> bool:
    """Whether an item is a tuple of numbers."""
    return type(item) is tuple and all(isinstance(each, numbers.Number) for each in item)


@dataclasses.dataclass(frozen=True)
class Division:
    """How a batch divides into examples.

    Attributes:
        batch_size: number of examples B.
        batch_dim: the example axis; a tensor of fewer axes counts examples along its last, as
            labels do.
        bounds: where packed examples begin, and the number of rows; None where each example is
            one slice.
    """

    batch_size: int
    batch_dim: int
    bounds: tuple[int, ...] | None = None

    def axis(self, tensor: Tensor) -> int | None:
        """Return the axis of one slice for each example, None if all share the tensor."""
        axis = self._axis(tensor)
        return axis if tensor.dim() > 0 and tensor.shape[axis] == self.batch_size else None

    def _axis(self, values: Tensor | np.ndarray) -> int:
        return min(self.batch_dim, values.ndim - 1)

    def entries(self, held: Any) -> int | None:
        """Return how many entries of examples a list, tuple or array holds; None if it holds none.

        There is one for each example, or for each packed row: strings, numbers, tensors of one
        example each, which are all alike. A list whose tensors hold all examples has no entries of
        examples, nor has a tuple of numbers, such as a size.
        """
        if isinstance(held, np.ndarray):
            count = held.shape[self._axis(held)] if held.ndim else -1
        elif _is_list(held):
            divided = list(map(self._is_divided, tensors_in(held)))
            whole = all(divided) or not _is_alike(held) if divided else _is_size(held)
            count = -1 if whole else len(held)
        else:
            return None
        rows = self.batch_size if self.bounds is None else self.bounds[-1]
        return count if count in (self.batch_size, rows) else None

    def _is_divided(self, tensor: Tensor) -> bool:
        return self.axis(tensor) is not None or self.packed_axis(tensor) is not None

    def has_entries(self, batch: Any) -> bool:
        """Whether a batch holds entries of examples outside of tensors that hold all."""
        return bool(self._parts(batch)[1])

    def _parts(self, batch: Any) -> tuple[list[Tensor], list[Any], list[Any]]:
        """Return a batch's tensors, the lists and arrays of entries of examples, and all else."""
        tensors: list[Tensor] = []
        entries: list[Any] = []
        others: list[Any] = []

        def see(tensor: Tensor) -> Tensor:
            tensors.append(tensor)
            return tensor

        def ask(held: Any) -> tuple[Any] | None:
            if self.entries(held) is None:
                others.append(held)
                return None
            entries.append(held)
            return (held,)  # what they are is not looked into

        map_tensors(batch, see, ask)
        return tensors, entries, others

    def packed_axis(self, tensor: Tensor) -> int | None:
        """Return the axis of packed rows, perhaps the one after an axis of size 1."""
        if self.bounds is None or tensor.dim() <= self.batch_dim:
            return None
        sizes = tensor.shape[self.batch_dim : self.batch_dim + 2]
        if sizes[0] == self.bounds[-1]:
            return self.batch_dim
        return self.batch_dim + 1 if tuple(sizes) == (1, self.bounds[-1]) else None

    def obstacle(self, batch: Any) -> str | None:
        """Return why ``take`` may not return the examples of a batch; None if it does."""
        tensors, _, others = self._parts(batch)
        for held in (batch, *others):
            if not _can_be_looked_into(held):
                return f"the batch holds a {type(held).__name__}, which cannot be taken apart"
        if self.bounds is None:
            return None
        for tensor in tensors:
            known = self._is_owner(tensor) or self._bounds_in(tensor)
            axis = self.axis(tensor) if self.packed_axis(tensor) is None else 0
            if not known and axis is None and tensor.dim() > 0 and not tensor.is_floating_point():
                return (
                    f"the batch holds integers of shape {tuple(tensor.shape)}, which may be "
                    "numbers of rows or examples (edges of graphs) that are others in another batch"
                )
        return None

    def doubt(self, batch: Any) -> str | None:
        """Return what ``take`` may wrongly leave undivided; None if there is nothing.

        It divides what has the size of the examples; of what has not, it does not know.
        """
        tensors, entries, others = self._parts(batch)
        for held in entries:
            if len(held) and isinstance(held[0], numbers.Number):
                return (
                    f"it holds a {type(held).__name__} of {len(held)} numbers, which may be others "
                    "than one for each example (if they are, make it a tensor)"
                )
        for held in filter(_is_list, others):
            of_tensors = any(True for _ in tensors_in(held))
            # As many tensors that have rows of all examples may be one for each after all.
            if len(held) == self.batch_size or (held and not (of_tensors or _is_size(held))):
                what = "tensors" if of_tensors else "entries"
                return f"it holds a {type(held).__name__} of {len(held)} {what}"
        for tensor in tensors:
            if self.bounds is None and self.axis(tensor) is None:
                return (
                    f"it holds a tensor of shape {tuple(tensor.shape)} without an axis of "
                    f"{self.batch_size} at {self.batch_dim}"
                )
            if self._bounds_in(tensor) == self.batch_size:
                return (
                    f"it holds integers of shape {tuple(tensor.shape)} that may say where its "
                    "examples begin, or be one for each of them, such as labels"
                )
        return None

    def _bounds_in(self, tensor: Tensor) -> int:
        """Return how many bounds a tensor holds: all, all but the last as bags have them, or 0."""
        if self.bounds is None or tensor.dim() != 1 or tensor.is_floating_point():
            return 0
        count = len(tensor)
        starts = count == self.batch_size and max(self._lengths) > 1
        known = (starts or count == len(self.bounds)) and tensor.tolist() == [*self.bounds[:count]]
        return count if known else 0

    def _is_owner(self, tensor: Tensor) -> bool:
        """Whether a tensor says whose each row is."""
        if self.bounds is None or max(self._lengths) < 2 or tensor.is_floating_point():
            return False
        return tuple(tensor.shape) in ((self.bounds[-1],), (1, self.bounds[-1])) and (
            tensor.flatten().tolist() == _owners(self._lengths)
        )

    @property
    def _lengths(self) -> list[int]:
        assert self.bounds is not None
        return [end - start for start, end in itertools.pairwise(self.bounds)]

    def take(self, batch: Any, examples: list[int]) -> Any:
        """Return the batch of some of the examples, in the order given."""
        rows, bounds = list(examples), [0]
        if self.bounds is not None:
            spans = [range(self.bounds[i], self.bounds[i + 1]) for i in examples]
            rows = [row for span in spans for row in span]
            for span in spans:
                bounds.append(bounds[-1] + len(span))

        def pick(tensor: Tensor) -> Tensor:
            held = self._bounds_in(tensor)
            if held:
                return tensor.new_tensor(bounds[:-1] if held == self.batch_size else bounds)
            if self._is_owner(tensor):
                owners = _owners([self._lengths[i] for i in examples])
                return tensor.new_tensor(owners).view(*tensor.shape[:-1], -1)
            axis, indices = self.packed_axis(tensor), rows
            if axis is None:
                axis, indices = self.axis(tensor), examples
            if axis is None:
                return tensor
            index = torch.tensor(indices, dtype=torch.long, device=tensor.device)
            return tensor.detach().index_select(axis, index).requires_grad_(tensor.requires_grad)

        def choose(held: Any) -> tuple[Any] | None:
            count = self.entries(held)
            if count is None:
                return None
            chosen = examples if count == self.batch_size else rows
            if isinstance(held, np.ndarray):
                return (held.take(chosen, self._axis(held)),)
            return (_with_items(held, [held[place] for place in chosen]),)

        return map_tensors(batch, pick, choose)


def _owners(lengths: Sequence[int]) -> list[int]:
    return [number for number, length in enumerate(lengths) for _ in range(length)]


def model_to_float64(model: nn.Module) -> nn.Module:
    """Return a copy of the model with its numbers in double precision.

    Raises:
        ValueError: if the copy shares tensors with the model, which would be converted too.
    """
    copied = copy.deepcopy(model)
    own = set(map(id, (*model.parameters(), *model.buffers())))
    if not own.isdisjoint(map(id, (*copied.parameters(), *copied.buffers()))):
        raise ValueError("its tensors are the model's own")
    copied.double()
    for tensor in (*copied.parameters(), *copied.buffers()):
        if tensor.is_complex():
            tensor.data = tensor.data.to(torch.complex128)
    return copied


def to_float64(batch: Any) -> Any:
    """Return the batch with its floating-point and complex tensors in double precision."""

    def widen(tensor: Tensor) -> Tensor:
        if tensor.is_complex():
            return tensor.detach().to(torch.complex128).requires_grad_(tensor.requires_grad)
        if not tensor.is_floating_point():
            return tensor
        return tensor.detach().double().requires_grad_(tensor.requires_grad)

    return map_tensors(batch, widen)
