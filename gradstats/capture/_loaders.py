"""Batches that a DataLoader fetches inside a context.

What a data set returns is data, even if operations that take no data made it, or another process.
So from the first context on, every fetch passes through here. While one runs, the contexts of its
thread follow nothing; other function modes stay on.
"""

from __future__ import annotations

from functools import cache, wraps

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from gradstats.capture.operations._modes import modes_here


@cache
def replace_fetches() -> None:
    """Tell contexts when loaders fetch, through iterators made before any context too."""
    # A data set may make all its batches when iteration begins.
    DataLoader.__iter__ = _unseen(DataLoader.__iter__)  # type: ignore[method-assign]
    _replace_next(_BaseDataLoaderIter)
    _BaseDataLoaderIter.__init_subclass__ = classmethod(_init_subclass)  # type: ignore[assignment]


def _init_subclass(cls: type, **options) -> None:
    super(_BaseDataLoaderIter, cls).__init_subclass__(**options)  # type: ignore[misc]
    _replace_next(cls)


def _replace_next(kind: type) -> None:
    """Replace ``__next__`` in a class of iterators and its subclasses."""
    if "__next__" in vars(kind):
        kind.__next__ = _unseen(vars(kind)["__next__"])  # type: ignore[attr-defined]
    subclass: type
    for subclass in kind.__subclasses__():
        _replace_next(subclass)


def _unseen(native):
    @wraps(native)
    def fetch(iterated):
        trackers = [mode.tracker for mode in modes_here()]
        for tracker in trackers:
            tracker.fetching += 1
        try:
            return native(iterated)
        finally:
            for tracker in trackers:
                tracker.fetching -= 1

    return fetch
