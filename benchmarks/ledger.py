"""A ledger of every tensor that is created, and of the bytes alive at each moment.

Tensors' bytes are counted as operations make them. What NumPy and Python allocate is counted beside
them on request: a result that is an array takes as much room as one that is a tensor.
"""

from __future__ import annotations

import gc
import tracemalloc
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class MemoryLedger(TorchDispatchMode):
    """Records the storages that operations allocate inside the context.

    Attributes:
        alive: bytes of the storages that were allocated inside the context and are alive.
        peak: most bytes alive at once, counting only what was allocated inside the context.
        largest: elements of the largest tensor created, views and expansions not counted.
    """

    def __init__(self):
        super().__init__()
        self.alive = 0
        self.peak = 0
        self.largest = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        inputs = {
            item.untyped_storage()._cdata
            for item in tree_leaves((args, kwargs))
            if isinstance(item, torch.Tensor)
        }
        for item in tree_leaves(result):
            if isinstance(item, torch.Tensor):
                storage = item.untyped_storage()
                if storage._cdata not in inputs:
                    self._enter(storage, item.element_size())
        return result

    def note_others(self) -> None:
        """Count what others have allocated since the tensors alive last changed; here nothing."""

    def _enter(self, storage, itemsize: int) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.note_others()
        self.alive += size
        self.peak = max(self.peak, self.alive)
        self.largest = max(self.largest, size // itemsize)
        weakref.finalize(storage, self._leave, key, size)

    def _leave(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.note_others()
        self.alive -= size


def peak_memory(run) -> MemoryLedger:
    """Return the ledger of one call of ``run``, garbage of earlier work left out."""
    gc.collect()
    with MemoryLedger() as ledger:
        run()
    return ledger


class HostLedger(MemoryLedger):
    """A ledger whose peak is of tensors together with what NumPy and Python allocate."""

    def __enter__(self):
        tracemalloc.start()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self.note_others()
        tracemalloc.stop()

    def note_others(self) -> None:
        self.peak = max(self.peak, self.alive + tracemalloc.get_traced_memory()[1])
        tracemalloc.reset_peak()


def host_peak(run) -> int:
    """Return the most bytes that a call of ``run`` holds at once: tensors, arrays and objects."""
    gc.collect()
    with HostLedger() as ledger:
        run()
    return ledger.peak
