"""The context that a monitor opens around one forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from gradstats._warnings import warn
from gradstats.capture._tracker import Tracker
from gradstats.capture.following._taken import explain
from gradstats.monitor._arguments import checked_ids, checked_weights
from gradstats.statistics._arguments import check_recording
from gradstats.statistics._loss import check_batch_dim, check_batch_size, packed_segments

if TYPE_CHECKING:
    from gradstats.monitor._monitor import Monitor
    from gradstats.monitor._step import Collector


class MonitorStep:
    """The context of one micro-batch: forward and backward run inside it.

    Attributes:
        measured: whether this step is measured; known once the context is open.
    """

    def __init__(
        self,
        monitor: Monitor,
        batch_size: int,
        ids: Sequence[int] | np.ndarray | Tensor | None,
        weights: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        batch_dim: int = 0,
        *,
        first: bool,
        last: bool | None,
        divisor: int,
    ):
        """Prepare the context of a micro-batch.

        Args:
            monitor: the monitor that measures it.
            batch_size, ids, weights, cu_seqlens, batch_dim: as ``Monitor.step`` takes them.
            first: whether it is the first micro-batch of the optimizer step.
            last: whether it is the last one; None if that is known only at its end.
            divisor: what its scalar is divided by.
        """
        self._monitor = monitor
        self._batch_size, self._weights = batch_size, weights
        self._ids: Any = ids
        self._cu_seqlens, self._batch_dim = cu_seqlens, batch_dim
        self._first, self._last, self._divisor = first, last, divisor
        self._context: Tracker | None = None
        self.measured = False

    def __repr__(self) -> str:
        return f"MonitorStep(batch_size={self._batch_size}, measured={self.measured})"

    def __enter__(self) -> MonitorStep:
        try:
            self.open()
        except BaseException:
            self.abandon()
            raise
        return self

    def __exit__(self, kind, value, traceback) -> None:
        if kind is None:
            self.close(self._last)
            return
        if self._context is not None:
            explain(self._context.marks, value)
        self.abandon()

    def open(self) -> None:
        """Start measuring, if this step is one of those measured."""
        collector = self._begun()
        if collector is None or collector.skipped:
            return
        check_recording()
        self._batch_size = check_batch_size(self._batch_size)
        if self._weights is not None:
            self._weights = checked_weights(self._weights, self._batch_size)
        if self._ids is not None:
            self._ids = checked_ids(self._ids, self._batch_size)
        segments = None
        if self._cu_seqlens is not None:
            segments = packed_segments(self._cu_seqlens, self._monitor.model, self._batch_size)
        batch_dim = check_batch_dim(self._batch_dim)
        self._context = collector.open(self._batch_size, batch_dim, segments)
        if self._weights is not None:
            self._context.weight = None
        self.measured = True

    def close(self, last: bool | None) -> None:
        """Stop measuring, after the backward.

        Args:
            last: whether this was the last micro-batch of the optimizer step.
        """
        monitor, collector = self._monitor, self._monitor._collector
        context = self._context
        if context is not None:
            try:
                context.close()
                self._context = None
                if collector is None:
                    self.measured = False  # another state was loaded inside the step
                elif context.reports.any:
                    collector.add(
                        context, self._batch_size, self._ids, self._weights, self._divisor
                    )
                else:
                    self._skip_step(
                        collector,
                        "no backward reached the measured parameters inside this step of "
                        "gradstats.Monitor, so its optimizer step is not measured. Unless that is "
                        "intended, compute the losses and run loss.backward() inside the with "
                        "block; what torch.autograd.grad returns is not measured.",
                    )
            except BaseException:
                self.abandon()
                raise
        monitor._end(last)

    def skip(self, last: bool, reason: str) -> None:
        """Leave out the optimizer step of a micro-batch that cannot be measured, without opening.

        Other processes, which may have measured theirs, learn of it when the step ends.

        Args:
            last: whether this is the last micro-batch of the optimizer step.
            reason: the text of the warning, given if the step is to be measured.
        """
        collector = self._begun()
        if collector is not None and not collector.skipped:
            self._skip_step(collector, reason)
        self.close(last)

    def leave_out(self, last: bool) -> None:
        """Leave this micro-batch, for which no backward runs, out of its optimizer step.

        Args:
            last: as for ``close``.
        """
        if self._context is not None:
            self._context.close()
        self._context, self.measured = None, False
        self.close(last)

    def _begun(self) -> Collector | None:
        """Return the collector of this micro-batch's optimizer step; None if it is not measured."""
        if self._first:
            self._monitor._begin(single=self._last is True)
        return self._monitor._collector

    def _skip_step(self, collector: Collector, reason: str) -> None:
        """Leave out an optimizer step, with a warning."""
        collector.skipped, self.measured = True, False
        warn(reason)

    def abandon(self) -> None:
        """Restore the model, and leave out the optimizer step.

        A loop that catches the error may go on with the step's micro-batches, or take one again.
        """
        context, self._context, self.measured = self._context, None, False
        monitor = self._monitor
        if self._last is None or (self._first and self._last):
            monitor._collector, monitor._next = None, 0
        else:
            monitor._next = None
            if monitor._collector is not None:
                monitor._collector.skipped = True
        if context is not None:
            context.close()
