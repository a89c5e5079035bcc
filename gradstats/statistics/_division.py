"""How a batch divides into examples."""

from __future__ import annotations

import dataclasses
import itertools
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradstats.capture.operations._nested import held_by, tensors_in
from gradstats.statistics._batches import can_be_looked_into, map_tensors, with_items


def _is_alike(entries: Sequence[Any]) -> bool:
    """Whether all entries are of one kind, as one entry for each example would be."""
    if len({*map(type, entries)}) > 1:
        return False
    if isinstance(entries[0], Tensor):
        return len({each.dim() for each in entries}) == 1
    if isinstance(entries[0], Mapping):
        return all(each.keys() == entries[0].keys() for each in entries)
    return True


def _is_list(item: Any) -> bool:
    """Whether an item is a list or a plain tuple, not a named one."""
    return isinstance(item, list) or type(item) is tuple


def _is_size(item: Any) -> bool:
    """Whether an item is a tuple of numbers."""
    return type(item) is tuple and all(isinstance(each, numbers.Number) for each in item)


@dataclasses.dataclass(frozen=True)
class Division:
    """How a batch divides into examples.

    Attributes:
        batch_size: number of examples B.
        batch_dim: the example axis; in a tensor of fewer axes, such as labels, it is the last.
        bounds: where packed examples begin, and the number of rows; None if each example is one
            slice.
    """

    batch_size: int
    batch_dim: int
    bounds: tuple[int, ...] | None = None

    def axis(self, tensor: Tensor) -> int | None:
        """Return the axis with one slice for each example; None if all share the tensor."""
        axis = self._axis(tensor)
        return axis if tensor.dim() > 0 and tensor.shape[axis] == self.batch_size else None

    def _axis(self, values: Tensor | np.ndarray) -> int:
        return min(self.batch_dim, values.ndim - 1)

    def entries(self, held: Any) -> int | None:
        """Return the length of a list, tuple or array of entries of examples; None for any other.

        Such a list holds one entry for each example or packed row, all of one kind: strings,
        numbers, or tensors of one example each. A list of tensors that hold all examples is none,
        nor is a tuple of numbers, such as a size.
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
        """Whether a batch holds lists or arrays of entries of examples."""
        return bool(self._parts(batch)[1])

    def lists_of_entries(self, batch: Any) -> list[Any]:
        """Return the lists and tuples in a batch that hold one entry for each example."""
        held = held_by(batch)
        if held is None or all([isinstance(each, Tensor) for each in held]):
            return []  # most batches
        return list(filter(_is_list, self._parts(batch)[1]))

    def lists_with_targets(self, batch: Any) -> list[Any]:
        """Return the lists that make up a batch of images and targets; empty for other batches.

        The targets are mappings with tensors that do not divide. They show that an entry of each
        list is an example, even if the images have as many channels as there are examples.
        """
        held = batch.values() if isinstance(batch, Mapping) else batch
        lists = list(held) if isinstance(held, Iterable) and not isinstance(held, Tensor) else []
        if not all(map(_is_list, lists)) or len(set(map(len, lists))) != 1:
            return []
        targets = [each for each in lists if each and isinstance(each[0], Mapping)]
        return [] if all(map(self._is_divided, tensors_in(targets))) else lists

    def _entries_in(self, batch: Any) -> Callable[[Any], int | None]:
        """Return a function that does what ``entries`` does for the items of a batch."""
        lists = [held for held in self.lists_with_targets(batch) if len(held) == self.batch_size]
        known = dict.fromkeys(map(id, lists), self.batch_size)
        return lambda held: known.get(id(held)) or self.entries(held)

    def _parts(self, batch: Any) -> tuple[list[Tensor], list[Any], list[Any]]:
        """Return a batch's tensors, the lists and arrays of entries of examples, and all else."""
        tensors: list[Tensor] = []
        entries: list[Any] = []
        others: list[Any] = []
        entries_of = self._entries_in(batch)

        def see(tensor: Tensor) -> Tensor:
            tensors.append(tensor)
            return tensor

        def ask(held: Any) -> tuple[Any] | None:
            if entries_of(held) is None:
                others.append(held)
                return None
            entries.append(held)
            return (held,)  # the entries are not searched

        map_tensors(batch, see, ask)
        return tensors, entries, others

    def packed_axis(self, tensor: Tensor) -> int | None:
        """Return the axis of packed rows, which may follow an axis of size 1; None if none is."""
        if self.bounds is None or tensor.dim() <= self.batch_dim:
            return None
        sizes = tensor.shape[self.batch_dim : self.batch_dim + 2]
        if sizes[0] == self.bounds[-1]:
            return self.batch_dim
        return self.batch_dim + 1 if tuple(sizes) == (1, self.bounds[-1]) else None

    def obstacle(self, batch: Any) -> str | None:
        """Return why ``take`` may fail to pick out examples of a batch; None if it does not."""
        tensors, _, others = self._parts(batch)
        for held in (batch, *others):
            if not can_be_looked_into(held):
                return f"the batch holds a {type(held).__name__}, which cannot be taken apart"
        if self.bounds is None:
            return None
        for tensor in tensors:
            known = self._is_owner(tensor) or self._bounds_in(tensor)
            axis = self.axis(tensor) if self.packed_axis(tensor) is None else 0
            if not known and axis is None and tensor.dim() > 0 and not tensor.is_floating_point():
                return (
                    f"the batch holds integers of shape {tuple(tensor.shape)}, which may number "
                    "rows or examples (edges of graphs) and would be wrong in another batch"
                )
        return None

    def has_sizes(self, batch: Any) -> bool:
        """Whether packed examples, or examples in lists, have different sizes."""
        if self.bounds is not None and len(set(self._lengths)) > 1:
            return True
        lists = self._parts(batch)[1]
        shapes = ([[each.shape for each in tensors_in(entry)] for entry in held] for held in lists)
        return any(entry != held[0] for held in shapes for entry in held)

    def doubt(self, batch: Any) -> str | None:
        """Return what ``take`` may wrongly divide or leave whole; None if there is no doubt.

        It goes by sizes alone: what has as many slices or entries as there are examples is divided.
        """
        tensors, entries, others = self._parts(batch)
        for held in entries:
            if len(held) and isinstance(held[0], numbers.Number):
                return (
                    f"it holds a {type(held).__name__} of {len(held)} numbers, which may not be "
                    "one for each example (if they are, make it a tensor)"
                )
        for held in filter(_is_list, others):
            of_tensors = bool(tensors_in(held))
            # As many tensors as examples may be one for each, though each has rows for all.
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
        """Return how many of the bounds a tensor holds: all, all but the last (bags), or 0."""
        if self.bounds is None or tensor.dim() != 1 or tensor.is_floating_point():
            return 0
        count = len(tensor)
        starts = count == self.batch_size and max(self._lengths) > 1
        known = (starts or count == len(self.bounds)) and tensor.tolist() == [*self.bounds[:count]]
        return count if known else 0

    def _is_owner(self, tensor: Tensor) -> bool:
        """Whether a tensor holds the example of each row."""
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
        entries_of = self._entries_in(batch)
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
            count = entries_of(held)
            if count is None:
                return None
            chosen = examples if count == self.batch_size else rows
            if isinstance(held, np.ndarray):
                return (held.take(chosen, self._axis(held)),)
            return (with_items(held, [held[place] for place in chosen]),)

        return map_tensors(batch, pick, choose)


def _owners(lengths: Sequence[int]) -> list[int]:
    return [number for number, length in enumerate(lengths) for _ in range(length)]


def listed_with_labels(batch: Any, batch_dim: int) -> int | None:
    """Return the length of a batch's first list, if its tensors are one example each; else None.

    They are if another tensor of the batch, such as labels, has as many rows as the list has
    entries, unless the tensors of the list agree in their rows and another tensor has as many.
    """
    held = list(batch.values()) if isinstance(batch, Mapping) else batch
    first = next(iter(held), None) if _is_list(held) else None
    if not (_is_list(first) and first and _is_alike(first)):
        return None
    tensors, others = tensors_in(first), tensors_in(held[1:])
    if len(tensors) != len(first) or not all(each.dim() for each in (*tensors, *others)):
        return None
    rows, labels = (
        {each.shape[min(batch_dim, each.dim() - 1)] for each in found}
        for found in (tensors, others)
    )
    divided = len(rows) == 1 and rows <= labels
    return len(first) if len(first) in labels and not divided else None
