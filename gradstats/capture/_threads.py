"""Where a context sees what is computed: in its own thread, but for what makes data."""

from __future__ import annotations

from threading import get_ident

import torch

from gradstats.capture._names import function_name
from gradstats.errors import TrackingError

ELSEWHERE = (
    "in another thread than the one that opened the context, where it is not seen what is computed "
    "without parameters. Expected forward and backward in the thread that opens the context: open "
    "it there, or give the other thread a copy of the model."
)

FETCHING = (
    "while a DataLoader fetches a batch, where all that is computed counts as data. Expected a "
    "data set that uses the model without gradient, under torch.no_grad(), or a copy of the model."
)


class Threaded:
    """What was opened in one thread.

    Autograd's own threads, and what records no gradient, may use its parameters too.

    Attributes:
        fetching: how many DataLoaders are fetching, one inside of the other.
    """

    def belong_here(self) -> None:
        """Note which thread opens it."""
        self._thread = get_ident()
        self.fetching = 0

    def check_thread(self, func) -> None:
        """Refuse an operation on tracked parameters where its thread's operations are not seen."""
        # A graph that is traced knows no threads.
        here = torch.compiler.is_dynamo_compiling() or get_ident() == self._thread
        if here and not self.fetching:
            return
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
            where = FETCHING if here else ELSEWHERE
            raise TrackingError(f"{function_name(func)} uses tracked parameters {where}")

    def check_backward(self) -> None:
        """Refuse a backward where it is not seen."""
        if get_ident() != self._thread:
            raise TrackingError(f"tracker.backward was called {ELSEWHERE}")
