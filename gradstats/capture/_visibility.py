"""When a context sees what is computed.

It does in the thread that opened it, while no later context is open there and no loader fetches.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import get_ident

import torch

from gradstats.capture.operations._modes import modes_here
from gradstats.capture.operations._names import function_name
from gradstats.capture.operations._operations import QUESTIONS, is_about_object
from gradstats.errors import TrackingError

ELSEWHERE = (
    "in another thread than the one that opened the context, where operations without parameters "
    "are not seen. Open the context in the thread that runs forward and backward, or give the "
    "other thread a copy of the model."
)

COVERED = (
    "while a context of another model, opened later, is still open: that one takes every backward "
    "and hides operations without parameters. Close the later context first, or open one context "
    "for both models: track a torch.nn.ModuleList of them."
)

FETCHING = (
    "while a DataLoader fetches a batch, when everything that is computed counts as data. Use the "
    "model under torch.no_grad() in the data set, or use a copy of it."
)


class Visibility:
    """Whether a context sees everything: in the thread that opened it, while no other covers it.

    Autograd's own threads, and code that records no gradient, may use its parameters too.

    Attributes:
        thread: the thread that opened it.
        later: the visibilities of open contexts that this thread opened later.
    """

    def __init__(self) -> None:
        self._earlier: Sequence[Visibility] = ()
        self.later: set[Visibility] = set()

    def begin(self) -> None:
        """Note which thread opens the context, and cover the contexts that are open in it."""
        self.thread = get_ident()
        found = [mode.tracker.visibility for mode in modes_here()]
        self._earlier = [each for each in found if each is not None]
        for earlier in self._earlier:
            earlier.later.add(self)

    def end(self) -> None:
        """Uncover the contexts that were opened before."""
        for earlier in self._earlier:
            earlier.later.discard(self)
        self._earlier = ()

    def check_operation(self, func, *, fetching: bool) -> None:
        """Refuse an operation on tracked parameters where other operations are not seen."""
        here = get_ident() == self.thread
        if func in QUESTIONS or is_about_object(func):
            return
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
            where = ELSEWHERE if not here else FETCHING if fetching else COVERED
            raise TrackingError(f"{function_name(func)} uses tracked parameters {where}")

    def check_backward(self) -> None:
        """Refuse a backward that the context would not see."""
        here = get_ident() == self.thread
        if not here or self.later:
            where = COVERED if here else ELSEWHERE
            raise TrackingError(f"tracker.backward was called {where}")
