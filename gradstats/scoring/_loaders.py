"""Data that is read several times, in parts, with every example at a known position."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from itertools import islice
from operator import length_hint
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler

from gradstats.errors import LoaderError
from gradstats.scoring._batches import Source, pick
from gradstats.scoring._content import ContentHash
from gradstats.scoring._layout import BatchLayout

# Batches are compared at every reading, larger tensors by about so many of their elements.
COMPARED = 1 << 18

WHERE_IDS = (
    "where a batch holds the ids of its examples with ids= (train_ids= and query_ids= in "
    "gs.influence): a key, a position or a function of the batch."
)


class Data:
    """The batches of a loader, readable again and in part.

    Attributes:
        layout: where the examples of each batch lie.
        sizes: (batches,) number of examples in each batch.
        ids: (N,) what names each example; its position where the caller gave no ids.
        fingerprint: a hash of the sizes, the ids and the contents by which data are the same. Of
            the contents of every batch if all had to be read to count examples (packed ones always)
            or to collect ids, or once ``cover`` was called; else of the first, the middle and the
            last.
    """

    def __init__(self, loader: Any, role: str, ids: Source, layout: BatchLayout):
        self._role = role
        self.layout = layout
        self._loader = loader
        _check_order(loader, role, ids)
        self._index_lists: list[list[int]] | None = None
        # Loaders of other classes may do more between sampler and batch, so they are read in order.
        indexable = type(loader) is DataLoader
        if (indexable or ids is None) and _chooses_batches(loader):
            lists = _index_lists(loader, role, named=ids is not None)
            order = [i for each in lists for i in each]
            if ids is None and order != list(range(len(order))):
                raise _unordered(role, "its batch sampler does not go through them in order")
            self._index_lists = lists if indexable else None
        content = ContentHash()
        self._hashes: dict[int, str] = {}
        self._counted = self._covered = True
        named: list[int | str] = []
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
            sizes = []
            for number, batch in enumerate(self._all()):
                size = layout.count(batch)
                sizes.append(size)
                self._compare(number, batch)
                content.add(batch)
                if layout.packed:
                    content.add(layout.bounds(batch))
                if ids is not None:
                    own = pick(batch, ids, size)
                    named.extend(own)
                    if not seen.isdisjoint(own):
                        break  # refused below; a loader that goes round has no end
                    seen.update(own)
            self.sizes = np.array(sizes, dtype=np.int64)
            self._check_any()
        self.ids = np.arange(self.examples) if ids is None else _as_ids(named)
        content.add([self.sizes, self.ids])
        self.fingerprint, self._unread = content.hexdigest(), content.unread

    def uncovered(self) -> range:
        """Return the batches whose contents the fingerprint is to cover and does not."""
        return range(0 if self._covered else self.batches)

    def contents(self, numbers: Iterable[int]) -> Iterator[tuple[int, str, set[str]]]:
        """Yield the hashes of some batches, with the types in each whose contents are not known."""
        for number, batch in self.read(numbers):
            content = ContentHash()
            content.add(batch)
            yield number, content.hexdigest(), content.unread

    def cover(self, contents: Iterable[tuple[int, str, set[str]]]) -> None:
        """Have the fingerprint cover the contents of every batch, as ``contents`` gave them."""
        whole = ContentHash()
        whole.add(self.fingerprint)
        for number, digest, unread in sorted(contents, key=lambda each: each[0]):
            whole.add([number, digest])
            self._unread |= unread
        self.fingerprint, self._covered = whole.hexdigest(), True

    def description(self) -> dict[str, Any]:
        """Return what identifies the data, for a manifest.

        Raises:
            LoaderError: if the batches hold objects whose contents are not known.
        """
        assert self._covered, "a manifest has to tell any batch from another"
        if self._unread:
            raise LoaderError(
                f"the batches of the {self._role} loader hold objects of type "
                f"{', '.join(sorted(self._unread))}, whose contents are not known, so results on "
                "disk could not be told from those of other data. Let batches be nested tuples, "
                "lists, mappings and dataclasses of tensors, arrays, strings and numbers, or do "
                "not pass out=."
            )
        return {"examples": self.examples, "batches": self.batches, "hash": self.fingerprint}

    @property
    def examples(self) -> int:
        """Number of examples N."""
        return int(self.sizes.sum())

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
            chosen = _again(self._loader, [self._index_lists[number] for number in wanted])
            pairs: Iterable[tuple[int, Any]] = zip(wanted, chosen, strict=True)
        elif isinstance(self._loader, Sequence):
            pairs = ((number, self._loader[number]) for number in wanted)
        else:
            members = set(wanted)
            pairs = ((n, batch) for n, batch in enumerate(self._begun()) if n in members)
        count = 0
        for number, batch in pairs:
            size = self.layout.count(batch)
            if size != self.sizes[number]:
                reason = (
                    "when it was first read. Give a loader that yields the same batches each time"
                    if self._counted
                    else "its sampler chooses. If collate_fn leaves some out or adds others, say "
                    "where a batch holds the ids of its examples, or pass list(loader), whose "
                    "examples are counted as they come"
                )
                raise LoaderError(
                    f"batch {number} of the {self._role} loader has {size} examples, expected "
                    f"{self.sizes[number]} as {reason}; for another example axis pass batch_dim=, "
                    "for examples packed into one row cu_seqlens=."
                )
            self._compare(number, batch)
            count += 1
            yield number, batch
            if count == len(wanted):
                return
        raise LoaderError(
            f"the {self._role} loader gave {count} of the {len(wanted)} batches that were asked "
            "for. Give a loader that yields the same batches each time."
        )

    def example(self, position: int) -> Any:
        """Return the batch that holds an example, and its place there."""
        number = int(np.searchsorted(np.cumsum(self.sizes), position, side="right"))
        ((_, batch),) = self.read([number])
        return batch, position - self.spans[number].start

    def _compare(self, number: int, batch: Any) -> None:
        """Raise unless a batch holds what it held when it was first read."""
        content = ContentHash(COMPARED)
        content.add(batch)
        if self._hashes.setdefault(number, content.hexdigest()) != content.hexdigest():
            raise LoaderError(
                f"batch {number} of the {self._role} loader holds other data than when it was "
                "first read, so a score would be of different data at different checkpoints. Give "
                "a loader that yields the same batches each time, without shuffling and random "
                "augmentation, or read it once and pass list(loader); and a loss_fn that does not "
                "write into the batch."
            )

    def _all(self) -> Iterable[Any]:
        if self._index_lists is not None:
            return _again(self._loader, self._index_lists)
        return self._begun()

    def _begun(self) -> Iterator[Any]:
        """Return the loader's batches from the start."""
        loader = self._loader
        if not isinstance(loader, DataLoader):
            return iter(loader)
        # Workers that persist serve one pass at a time: those of the caller's loader stay there.
        own = copy.copy(loader)
        own.generator = _own_generator()
        own._iterator = None
        return iter(own)

    def _check_any(self) -> None:
        if len(self.sizes) == 0:
            raise LoaderError(f"the {self._role} loader is empty: it gives no batch.")


def _chooses_batches(loader: Any) -> bool:
    """Whether a sampler says which examples of a data set stand in which batch."""
    return (
        isinstance(loader, DataLoader)
        and loader.batch_sampler is not None
        and not isinstance(loader.dataset, torch.utils.data.IterableDataset)
    )


def _index_lists(loader: DataLoader, role: str, named: bool) -> list[list[int]]:
    """Return which examples stand in which batch.

    Where the examples carry their names, a shuffled loader is read in the order of its data set, so
    that another process can go on.
    """
    batches = loader.batch_sampler
    if not named or type(batches) is not BatchSampler:
        # Loaders of other classes may keep their workers by a sampler that never ends, and say
        # themselves how many batches a pass has.
        most = None if type(loader) is DataLoader else length_hint(loader, sys.maxsize)
        with _undrawn(loader):
            return list(islice(_drawn(loader, role), most))
    with _undrawn(loader):
        indices, others = ([i for b in _drawn(loader, role) for i in b] for _ in range(2))
    with suppress(TypeError):  # keys of no order are to be drawn in the same one
        indices, others = sorted(indices), sorted(others)
    if indices != others:
        raise LoaderError(
            f"the {role} loader draws other examples in each pass (its sampler is "
            f"{type(batches.sampler).__name__}, drop_last={batches.drop_last}), so another call "
            "could not go on with their scores. Give a DataLoader of the examples that you mean, "
            "such as one with torch.utils.data.Subset, with shuffle=False or drop_last=False."
        )
    size = batches.batch_size
    return [indices[start : start + size] for start in range(0, len(indices), size)]


def _drawn(loader: DataLoader, role: str) -> Iterator[list[int]]:
    """Yield which examples a sampler draws for each batch, no more than the data set has."""
    assert loader.batch_sampler is not None
    most, count = length_hint(loader.dataset, sys.maxsize), 0
    for indices in loader.batch_sampler:
        try:
            drawn = [*indices]
        except TypeError as error:
            raise LoaderError(
                f"the batch sampler of the {role} loader gives {indices!r} for a batch, expected a "
                "list of its examples' indices: where a data set takes slices or gives whole "
                "batches, pass its batches in a list, or list the indices."
            ) from error
        yield drawn
        count += len(drawn)
        if count > most:
            raise LoaderError(
                f"the {role} loader draws more examples than the {most} of its data set (its "
                f"sampler is {type(loader.sampler).__name__}, its batch sampler "
                f"{type(loader.batch_sampler).__name__}): with repetitions, perhaps without end. "
                "Expected each example once: give a DataLoader of the same data set with "
                "shuffle=False and no sampler of its own."
            )


@contextmanager
def _undrawn(loader: DataLoader) -> Iterator[None]:
    """Restore, after a block, the generators that a sampler draws from."""
    batches = loader.batch_sampler
    holders = (loader, loader.sampler, batches, getattr(batches, "sampler", None))
    found = {id(each): each for each in (getattr(h, "generator", None) for h in holders)}
    generators = [each for each in found.values() if isinstance(each, torch.Generator)]
    states = [each.get_state() for each in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def _again(loader: DataLoader, index_lists: list[list[int]]) -> DataLoader:
    """Return a loader of some of the batches of another, made in the same way."""
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


def _own_generator() -> torch.Generator:
    """Return what a loader draws the seed of its workers from as it begins.

    Not the caller's random numbers, and others in each pass, so that what is random in them shows.
    """
    generator = torch.Generator()
    generator.seed()
    return generator


def _check_order(loader: Any, role: str, ids: Source) -> None:
    single = _single_batch(loader)
    if single is not None:
        raise LoaderError(
            f"the {role} loader is a single batch ({single}). Wrap it in a list: [batch]."
        )
    if isinstance(loader, Dataset) and not hasattr(loader, "__iter__"):
        raise LoaderError(
            f"the {role} loader is a data set ({type(loader).__name__}), which gives single "
            "examples, expected batches. Wrap it: torch.utils.data.DataLoader(data, batch_size=64)."
        )
    if not hasattr(loader, "__iter__") or isinstance(loader, str):
        raise LoaderError(
            f"the {role} loader is {type(loader).__name__}, expected a DataLoader or a list of "
            "batches."
        )
    if isinstance(loader, Iterator):
        raise LoaderError(
            f"the {role} loader is an iterator ({type(loader).__name__}), which can be read once, "
            "and each checkpoint reads the data again. Give a DataLoader or a list of batches."
        )
    sampler = getattr(loader, "sampler", None)
    iterable = isinstance(getattr(loader, "dataset", None), torch.utils.data.IterableDataset)
    if ids is None and sampler is not None and not iterable:
        inner = sampler.sampler if isinstance(sampler, BatchSampler) else sampler
        if not isinstance(inner, SequentialSampler):
            raise _unordered(role, f"its sampler is {type(inner).__name__}")
        if isinstance(loader, DataLoader) and loader.batch_sampler is None:
            _check_whole_batches(loader, role)
    workers = getattr(loader, "num_workers", 0)
    if ids is None and iterable and workers > 1:
        raise LoaderError(
            f"the {role} loader reads an iterable data set in {workers} workers, whose batches "
            "alternate, so that an example's position among them is not that in the data set. Pass "
            f"num_workers=0, or say {WHERE_IDS}"
        )


def _check_whole_batches(loader: DataLoader, role: str) -> None:
    """Raise where the whole batches that a data set gives are not in its order."""
    with _undrawn(loader):
        drawn = [*islice(loader.sampler, length_hint(loader.dataset, sys.maxsize))]
    order = [i for each in drawn for i in (each if isinstance(each, Iterable) else [each])]
    if order != list(range(len(order))):
        raise _unordered(role, "its sampler does not go through them in order")


def _single_batch(loader: Any) -> str | None:
    """Return what kind of batch was passed as a loader; None where it may well be a loader."""
    name = type(loader).__name__
    if isinstance(loader, (torch.Tensor, Mapping)):
        return name
    if not isinstance(loader, (tuple, list)) or not loader:
        return None
    if not all(isinstance(each, torch.Tensor) for each in loader):
        return None
    # Batches of one loader are of one kind; inputs and labels are of two.
    kinds = {(each.dtype, each.dim()) for each in loader}
    return f"{name} of tensors" if len(kinds) > 1 else None


def _unordered(role: str, reason: str) -> LoaderError:
    return LoaderError(
        f"the {role} loader does not give the examples in the order of its data set ({reason}), so "
        "scores could not be told apart. Pass a DataLoader with shuffle=False (it need not be the "
        "one you train with; under torch.distributed every process passes the whole data), or say "
        f"{WHERE_IDS}"
    )


def _as_ids(named: list) -> np.ndarray:
    kinds = {type(each) for each in named}
    if {int, str} <= kinds:
        raise LoaderError("the ids are integers and strings, expected all of one kind.")
    # Of integers on both sides of 2^63 NumPy would make rounded ones.
    large = kinds == {int} and 2**63 <= max(named) < 2**64 and min(named) >= 0
    ids = np.array(named, dtype=np.uint64 if large else None)
    if ids.dtype.kind not in "iuU":
        raise LoaderError(
            f"the ids have dtype {ids.dtype}, expected strings, or integers of 64 bits."
        )
    if len(np.unique(ids)) != len(ids):
        values, counts = np.unique(ids, return_counts=True)
        raise LoaderError(
            f"the ids are not unique: {values[counts > 1][:4].tolist()} occur more than once. "
            "Expected each example once."
        )
    return ids
