"""Which examples the batches of a loader hold, and whether they come in order."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, islice
from operator import length_hint
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler

from gradstats._warnings import warn
from gradstats.errors import LoaderError
from gradstats.scoring._batches import Source

PASS_IDS = (
    "pass as ids= (train_ids= and query_ids= in gs.influence) where a batch holds the ids of its "
    "examples: a key, a position or a function of the batch."
)


def check_order(loader: Any, role: str, ids: Source) -> None:
    """Raise if an argument is no loader, or does not give examples in the data set's order."""
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
            f"the {role} loader is an iterator ({type(loader).__name__}), which can be read only "
            "once, but each checkpoint reads the data again. Pass a DataLoader or a list of "
            "batches."
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
            "alternate, so an example's position in the loader is not its position in the data "
            f"set. Pass num_workers=0, or {PASS_IDS}"
        )


def _check_whole_batches(loader: DataLoader, role: str) -> None:
    """Raise if a loader without a batch sampler does not go through its data set in order."""
    with _undrawn(loader):
        drawn = [*islice(loader.sampler, length_hint(loader.dataset, sys.maxsize))]
    lists = (each if isinstance(each, Iterable) else [each] for each in drawn)
    _check_in_order(lists, role, "sampler")


def _check_in_order(lists: Iterable[Iterable[int]], role: str, chooser: str) -> None:
    order = [*chain.from_iterable(lists)]
    if order != list(range(len(order))):
        raise _unordered(role, f"its {chooser} does not go through them in order")


def _single_batch(loader: Any) -> str | None:
    """Return what kind of batch was passed as a loader; None if it may be a loader."""
    name = type(loader).__name__
    if isinstance(loader, (torch.Tensor, np.ndarray, Mapping)):
        return name
    if not isinstance(loader, (tuple, list)):
        return None
    if not all(isinstance(each, torch.Tensor) for each in loader):
        return None
    # Batches of one loader are of one kind; inputs and labels are of two.
    kinds = {(each.dtype, each.dim()) for each in loader}
    return f"{name} of tensors" if len(kinds) > 1 else None


def _unordered(role: str, reason: str) -> LoaderError:
    return LoaderError(
        f"the {role} loader does not give the examples in the order of its data set ({reason}), so "
        "it is not known which example a score is of. Pass a DataLoader with shuffle=False (it "
        "need not be the one you train with; under torch.distributed every process passes the "
        f"whole data), or {PASS_IDS}"
    )


def chooses_batches(loader: Any) -> bool:
    """Whether a loader's batch sampler says which examples each batch holds."""
    return (
        isinstance(loader, DataLoader)
        and loader.batch_sampler is not None
        and not isinstance(loader.dataset, torch.utils.data.IterableDataset)
    )


def index_lists(loader: DataLoader, role: str, named: bool) -> list[list[int]]:
    """Return the indices of the examples in each batch.

    If the examples have ids (``named``), a shuffled loader is read in sorted order, so that a
    resumed call has the same batches; otherwise a loader that is out of order is refused.
    """
    batches = loader.batch_sampler
    if not named or type(batches) is not BatchSampler:
        # Some subclasses keep their workers alive with a sampler that never ends; their own length
        # says how many batches a pass has.
        most = None if type(loader) is DataLoader else length_hint(loader, sys.maxsize)
        with _undrawn(loader):
            lists = list(islice(_drawn(loader, role), most))
        if not named:
            _check_in_order(lists, role, "batch sampler")
        return lists
    with _undrawn(loader):
        indices, again = ([i for b in _drawn(loader, role) for i in b] for _ in range(2))
    with suppress(TypeError):  # keys that have no order must be drawn in the same order twice
        indices, again = sorted(indices), sorted(again)
    if indices != again:
        raise LoaderError(
            f"the {role} loader draws other examples in each pass (its sampler is "
            f"{type(batches.sampler).__name__}, drop_last={batches.drop_last}), so scores at "
            "different checkpoints would be of different examples. Pass a DataLoader of the "
            "examples that you mean, such as a torch.utils.data.Subset, with shuffle=False or "
            "drop_last=False."
        )
    size = batches.batch_size
    return [indices[start : start + size] for start in range(0, len(indices), size)]


def check_chosen(examples: int, lists: Iterable[Sequence[int]], role: str, packed: bool) -> None:
    """Raise unless a loader's batches hold the examples that its batch sampler chooses.

    Args:
        examples: how many the batches hold.
        lists: the indices of the data set's items in each batch.
        packed: whether each item may hold several examples.
    """
    chosen = sum(map(len, lists))
    if examples < chosen or (examples > chosen and not packed):
        raise LoaderError(
            f"the {role} loader gives {examples} examples, expected {chosen} as its batch sampler "
            "chooses, so it is not known which example a score is of. If it goes on where an "
            "earlier pass ended, pass a new one. If it leaves examples out, such as empty ones, or "
            f"adds others, pass list(loader), in which they are counted, or {PASS_IDS}"
        )


def warn_of_dropped(loader: DataLoader, role: str, examples: int) -> None:
    """Warn if a loader leaves out a short last batch, whose examples then have no score."""
    batches = loader.batch_sampler
    if type(batches) is not BatchSampler or not batches.drop_last:
        return
    dropped = length_hint(batches.sampler, examples) - examples
    if dropped > 0:
        warn(
            f"the {role} loader leaves out {dropped} of {examples + dropped} examples, which have "
            "no score: its last batch is short. Pass a DataLoader with drop_last=False to score "
            "them too."
        )


def _drawn(loader: DataLoader, role: str) -> Iterator[list[int]]:
    """Yield the indices that a batch sampler draws; raise beyond the data set's length."""
    assert loader.batch_sampler is not None
    most, count = length_hint(loader.dataset, sys.maxsize), 0
    for indices in loader.batch_sampler:
        try:
            drawn = [*indices]
        except TypeError as error:
            raise LoaderError(
                f"the batch sampler of the {role} loader gives {indices!r} for a batch, expected a "
                "list of its examples' indices. If the data set takes slices or gives whole "
                "batches, pass a list of its batches."
            ) from error
        yield drawn
        count += len(drawn)
        if count > most:
            raise LoaderError(
                f"the {role} loader draws more examples than the {most} of its data set (its "
                f"sampler is {type(loader.sampler).__name__}, its batch sampler "
                f"{type(loader.batch_sampler).__name__}), so some are repeated, perhaps without "
                "end. Expected each example once: pass a DataLoader of the same data set with "
                "shuffle=False and no sampler."
            )


@contextmanager
def _undrawn(loader: DataLoader) -> Iterator[None]:
    """Restore the generators that a loader's samplers have drawn from in the context."""
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
