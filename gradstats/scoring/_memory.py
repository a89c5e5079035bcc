"""Continuing with smaller batches after running out of memory."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from tqdm import tqdm

from gradstats.capture.operations._graph import let_go
from gradstats.scoring._batches import BatchLayout

Result = TypeVar("Result")

# What PyTorch says when the host, not the device, runs out of memory.
HOST_MESSAGES = ("not enough memory", "can't allocate memory", "cannot allocate memory")


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error says that memory ran out, on a device or on the host."""
    said = str(error).lower()
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(
        message in said for message in HOST_MESSAGES
    )


class Halving:
    """Runs work on whole batches, or in parts once a batch has not fitted into memory.

    A batch is halved until its parts are smaller than any that failed. So its division, and with
    it the bits of a result, follow from its size and from what fits, not from earlier batches.

    Attributes:
        failed: fewest examples at once that did not fit; None before memory ran out.
    """

    def __init__(self, what: str, layout: BatchLayout):
        self._what = what
        self._layout = layout
        self.failed: int | None = None

    def run(self, work: Callable[[Any], Result], batch: Any, size: int) -> list[Result]:
        """Return the results of work on a batch of ``size`` examples, or on its parts in order."""
        results: list[Result] = []
        start, step = 0, size
        while start < size:
            while step > 1 and self.failed is not None and step >= self.failed:
                step //= 2
            stop = min(size, start + step)
            part = batch
            if stop - start < size:
                part = self._layout.part(batch, start, stop, size)
            try:
                results.append(work(part))
                start = stop
                continue
            except Exception as error:
                if not is_out_of_memory(error) or stop - start == 1:
                    raise
                reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            # After the except clause: inside it, the traceback keeps tensors alive.
            self.failed = stop - start
            let_go()
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            tqdm.write(
                f"out of memory with {self.failed} {self._what} at once ({reason}): continuing "
                f"with {self.failed // 2} at once",
                file=sys.stderr,
            )
        return results
