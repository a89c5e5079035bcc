"""Data that is read several times, in whole or in part, with every example at a known position."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from gradstats.errors import LoaderError
from gradstats.scoring._batches import BatchLayout, Source, pick
from gradstats.scoring._content import ContentHash
from gradstats.scoring._order import (
    check_chosen,
    check_order,
    chooses_batches,
    index_lists,
    warn_of_dropped,
)

# A batch is compared with its first reading each time; larger tensors by about this many elements.
COMPARED = 1 << 18

# What a loader holds before its first pass; the last two are of torchdata's StatefulDataLoader,
# which goes on where a state that it was given says.
BEFORE_ITS_FIRST_PASS = {
    "_iterator": None, "next_iter_state": None, "_initial_iter_for_state_dict": False,
}  # fmt: skip


class Data:
    """The batches of a loader, readable again and in part.

    Attributes:
        layout: where the examples of each batch lie.
        sizes: (batches,) number of examples in each batch.
        ids: (N,) the id of each example; its position if the caller gave no ids.
        fingerprint: a hash of the sizes, the ids and the contents. It covers every batch if all had
            to be read, to collect ids or to count examples (always if they are packed), or once
            ``cover`` was called; else the first, the middle and the last batch.
    """

    def __init__(self, loader: Any, role: str, ids: Source, layout: BatchLayout):
        self._role = role
        self.layout = layout
        self._loader = loader
        check_order(loader, role, ids)
        chosen = (
            index_lists(loader, role, named=ids is not None) if chooses_batches(loader) else None
        )
        # Subclasses may do more between sampler and batch, so they are read from the start.
        self._index_lists = chosen if type(loader) is DataLoader else None
        content = ContentHash()
        self._hashes: dict[int, str] = {}
        self._counted = self._covered = True
        found: list[int | str] = []
        seen: set[int | str] = set()
        if self._index_lists is not None and ids is None and not layout.packed:
            # The sampler says how many examples each batch has.
            self._counted = self._covered = False
            self.sizes = np.array([len(each) for each in self._index_lists], dtype=np.int64)
            self._check_any()
            last = self.batches - 1
            for _, batch in self.read(sorted({0, last // 2, last})):
                content.add(batch)
        else:
            sizes, lists = [], self._index_lists
            reading = self._from_start() if lists is None else _loader_of(loader, lists)
            for number, batch in enumerate(reading):
                size = layout.count(batch)
                sizes.append(size)
                self._compare(number, batch)
                content.add(batch)
                if layout.packed:
                    content.add(layout.bounds(batch))
                if ids is not None:
                    new = pick(batch, ids, size)
                    found.extend(new)
                    if not seen.isdisjoint(new):
                        break  # refused below; a loader that repeats itself may have no end
                    seen.update(new)
            self.sizes = np.array(sizes, dtype=np.int64)
            self._check_any()
            if chosen is not None and ids is None:
                check_chosen(self.examples, chosen, role, layout.packed)
        self.ids = np.arange(self.examples) if ids is None else _as_ids(found)
        if self._index_lists is not None:
            warn_of_dropped(loader, role, self.examples)
        content.add([self.sizes, self.ids])
        self.fingerprint, self._unread = content.hexdigest(), content.unread

    def uncovered(self) -> range:
        """Return the numbers of the batches to pass to ``contents`` before ``cover``."""
        return range(0 if self._covered else self.batches)

    def contents(self, numbers: Iterable[int]) -> Iterator[tuple[int, str, set[str]]]:
        """Yield (number, hash, unread types) of some batches; see ``ContentHash``."""
        for number, batch in self.read(numbers):
            content = ContentHash()
            content.add(batch)
            yield number, content.hexdigest(), content.unread

    def cover(self, contents: Iterable[tuple[int, str, set[str]]]) -> None:
        """Make the fingerprint cover every batch, given what ``contents`` yields for all."""
        whole = ContentHash()
        whole.add(self.fingerprint)
        for number, digest, unread in sorted(contents, key=lambda each: each[0]):
            whole.add([number, digest])
            self._unread |= unread
        self.fingerprint, self._covered = whole.hexdigest(), True

    def description(self) -> dict[str, Any]:
        """Return what identifies the data, for a manifest.

        Raises:
            LoaderError: if the batches hold objects whose contents cannot be hashed.
        """
        assert self._covered, "a manifest must identify every batch"
        if self._unread:
            raise LoaderError(
                f"the batches of the {self._role} loader hold objects of type "
                f"{', '.join(sorted(self._unread))}, whose contents cannot be hashed, so results "
                "on disk could not be told from those of other data. Use batches of nested tuples, "
                "lists, mappings and dataclasses of tensors, arrays, strings and numbers, or leave "
                "out out=."
            )
        return {"examples": self.examples, "batches": self.batches, "hash": self.fingerprint}

    @property
    def examples(self) -> int:
        """Number of examples N."""
        return int(self.sizes.sum())

    @property
    def workers(self) -> int:
        """Number of the loader's worker processes."""
        return getattr(self._loader, "num_workers", 0)

    @property
    def batches(self) -> int:
        """Number of batches."""
        return len(self.sizes)

    @cached_property
    def spans(self) -> list[slice]:
        """The rows of each batch."""
        ends = np.cumsum(self.sizes)
        return [slice(int(e - n), int(e)) for e, n in zip(ends, self.sizes, strict=True)]

    def read(self, numbers: Iterable[int]) -> Iterator[tuple[int, Any]]:
        """Yield (number, batch) for some batches, in ascending order."""
        wanted = list(numbers)
        if not wanted:
            return
        if self._index_lists is not None:
            chosen = _loader_of(self._loader, [self._index_lists[number] for number in wanted])
            pairs: Iterable[tuple[int, Any]] = zip(wanted, chosen, strict=True)
        elif isinstance(self._loader, Sequence):
            pairs = ((number, self._loader[number]) for number in wanted)
        else:
            members = {*wanted, self.batches}  # one more, to notice a loader that has more now
            pairs = ((n, batch) for n, batch in enumerate(self._from_start()) if n in members)
        count, remedy = 0, "Pass a loader that yields the same batches each time."
        for number, batch in pairs:
            if number == self.batches:
                raise LoaderError(
                    f"the {self._role} loader gave more than the {self.batches} batches of its "
                    f"first pass. {remedy}"
                )
            size = self.layout.count(batch)
            if size != self.sizes[number]:
                reason = (
                    f"when it was first read. {remedy}"
                    if self._counted
                    else "its sampler chooses. If collate_fn leaves some out or adds others, pass "
                    "ids=, or list(loader), whose examples are counted as they come."
                )
                raise LoaderError(
                    f"batch {number} of the {self._role} loader has {size} examples, expected "
                    f"{self.sizes[number]} as {reason} For another example axis pass batch_dim=, "
                    "for examples packed into one row cu_seqlens=."
                )
            self._compare(number, batch)
            count += 1
            yield number, batch
            if count == len(wanted) and number + 1 < self.batches:
                return
        if count < len(wanted):
            raise LoaderError(
                f"the {self._role} loader gave {count} of the {len(wanted)} batches that were "
                f"asked for. {remedy}"
            )

    def example(self, position: int) -> Any:
        """Return the batch that holds an example, and the example's position in it."""
        number = int(np.searchsorted(np.cumsum(self.sizes), position, side="right"))
        ((_, batch),) = self.read([number])
        return batch, position - self.spans[number].start

    def _compare(self, number: int, batch: Any) -> None:
        """Raise unless a batch holds the same data as when it was first read."""
        content = ContentHash(COMPARED)
        content.add(batch)
        if self._hashes.setdefault(number, content.hexdigest()) != content.hexdigest():
            raise LoaderError(
                f"batch {number} of the {self._role} loader holds other data than when it was "
                "first read, so a score would be of different data at different checkpoints. Pass "
                "a loader without shuffling and random augmentation, or list(loader), which reads "
                "them once. If loss_fn writes into the batch, let it work on a copy."
            )

    def _from_start(self) -> Iterator[Any]:
        """Return the loader's batches from the start."""
        loader = self._loader
        return iter(_before_its_first_pass(loader) if isinstance(loader, DataLoader) else loader)

    def _check_any(self) -> None:
        if len(self.sizes) == 0:
            raise LoaderError(
                f"the {self._role} loader is empty: it gives no batch. Expected at least one. With "
                "fewer examples than batch_size pass drop_last=False."
            )


def _loader_of(loader: DataLoader, index_lists: list[list[int]]) -> DataLoader:
    """Return a loader of the batches with these indices, made in the same way as another."""
    return DataLoader(
        loader.dataset,
        batch_sampler=index_lists,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        generator=_own_generator(),
        prefetch_factor=loader.prefetch_factor,
        multiprocessing_context=loader.multiprocessing_context,
    )


def _before_its_first_pass(loader: DataLoader) -> DataLoader:
    """Return a copy of a loader without persistent workers.

    These serve one pass at a time and are the caller's.
    """
    loader = copy.copy(loader)
    loader.generator = _own_generator()
    loader.in_order = True  # the position of a batch says which examples it holds
    vars(loader).update(BEFORE_ITS_FIRST_PASS)
    # accelerate keeps the loader that reads inside its own, which may skip what a resumed epoch has
    # had, and tells gradient accumulation when a pass begins and ends.
    inner = vars(loader).get("base_dataloader")
    if isinstance(inner, DataLoader):
        inner = _before_its_first_pass(inner)
        vars(loader).update(
            base_dataloader=inner, skip_batches=0, begin=lambda: None, end=lambda: None
        )
    return loader


def _own_generator() -> torch.Generator:
    """Return a generator from which a loader draws the seed of its workers.

    It spares the caller's random numbers, and differs in each pass, so that random augmentation
    shows as other data.
    """
    generator = torch.Generator()
    generator.seed()
    return generator


def _as_ids(values: list) -> np.ndarray:
    """Return ids as an array, or raise unless they are of one kind and unique."""
    kinds = {type(each) for each in values}
    if {int, str} <= kinds:
        raise LoaderError("the ids are integers and strings, expected all of one kind.")
    # NumPy would round integers on both sides of 2^63 to float64.
    large = kinds == {int} and 2**63 <= max(values) < 2**64 and min(values) >= 0
    ids = np.array(values, dtype=np.uint64 if large else None)
    if ids.dtype.kind not in "iuU":
        raise LoaderError(
            f"the ids have dtype {ids.dtype}, expected strings, or integers of 64 bits."
        )
    distinct, counts = np.unique(ids, return_counts=True)
    if len(distinct) != len(ids):
        raise LoaderError(
            f"the ids are not unique: {distinct[counts > 1][:4].tolist()} occur more than once. "
            "Expected each example once."
        )
    return ids
