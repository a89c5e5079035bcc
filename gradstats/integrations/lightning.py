"""Gradient statistics in a Lightning run, with ``lightning`` or ``pytorch_lightning``.

from gradstats.integrations.lightning import GradStatsCallback
Trainer(callbacks=[GradStatsCallback(every=50)])
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sized
from typing import Any

import torch
from torch import Tensor

from gradstats._requirements import require
from gradstats.errors import TrackingError
from gradstats.integrations._callback import check_options, monitor_of_run
from gradstats.monitor._context import MonitorStep
from gradstats.monitor._monitor import Monitor
from gradstats.monitor._ranks import group_of
from gradstats.statistics._loss import infer_batch_size


def _callback_class() -> type:
    # The one that the user has imported: the two differ only in their names.
    packages = ("lightning.pytorch", "pytorch_lightning")
    first, second = sorted(packages, key=lambda name: name not in sys.modules)
    with require("lightning"):
        try:
            return importlib.import_module(first).Callback
        except ImportError:
            return importlib.import_module(second).Callback


class GradStatsCallback(_callback_class()):  # type: ignore[misc]
    """Logs what ``gs.Monitor`` measures to the trainer's loggers, and keeps it in checkpoints.

    An optimizer step is measured if ``trainer.global_step`` is a multiple of ``every``; in other
    steps the callback does nothing. Values go to every logger at that step, regardless of
    ``log_every_n_steps``, and into ``trainer.callback_metrics``. The trainer says how gradients are
    accumulated, scaled (GradScaler), and averaged over processes (DDP, ``fully_shard``). Norms are
    taken before clipping. ``training_step`` must return the mean loss of the batch, or the sum with
    ``loss_reduction="sum"``.

    Args:
        every: interval of the measured optimizer steps.
        ids: where a batch holds the ids of its examples, (B,) integers, for
            ``monitor.self_influence`` and ``monitor.examples``: a key or index into the batch, or
            a function of it.
        batch_size: a function of the batch that returns B; by default B is the length of the first
            tensor in the batch.
        histograms: also log the distributions over examples (TensorBoard and W&B loggers).
        options: all other arguments of ``gs.Monitor``.

    Attributes:
        monitor: the Monitor, once training has started. Another ``fit`` of the same module
            continues it.

    Raises:
        TrackingError: an argument of the wrong type or value. In training: the module optimizes
            manually.
        TypeError: an option that ``gs.Monitor`` does not have.

    Cost:
        In measured steps that of ``gs.Monitor``; none in others.
    """

    def __init__(
        self,
        every: int = 50,
        *,
        ids: str | int | Callable[[Any], Any] | None = None,
        batch_size: Callable[[Any], int] | None = None,
        histograms: bool = False,
        **options: Any,
    ):
        super().__init__()
        if isinstance(ids, bool) or not (
            ids is None or isinstance(ids, (str, int)) or callable(ids)
        ):
            raise TrackingError(
                f"ids is {ids!r}, expected a key or index into the batch, or a function of it."
            )
        if batch_size is not None and not callable(batch_size):
            raise TrackingError(
                f"batch_size is {batch_size!r}, expected a function of the batch: "
                "lambda batch: len(batch[0])."
            )
        check_options(every, options)
        self.every = every
        self.monitor: Monitor | None = None
        self._ids, self._batch_size, self._histograms = ids, batch_size, histograms
        self._options = options
        self._saved: dict[str, Any] | None = None
        self._resumes = True
        self._step: MonitorStep | None = None
        self._last = False
        self._number = 0

    def setup(self, trainer, pl_module, stage) -> None:
        # Validating or testing a checkpoint restores the callbacks' states too.
        self._resumes = stage == "fit"

    def on_train_start(self, trainer, pl_module) -> None:
        if not pl_module.automatic_optimization:
            raise TrackingError(
                "the module optimizes manually, so it is not known which backwards make one "
                "optimizer step. Use gs.Monitor inside training_step instead of this callback."
            )
        run = {
            "optimizer": trainer.optimizers,
            "scaler": getattr(trainer.precision_plugin, "scaler", None),
            "process_group": group_of(trainer.strategy.model),
            **self._options,
        }
        self.monitor = monitor_of_run(self.monitor, pl_module, self.every, **run)
        if self._saved is not None:
            self.monitor.load_state_dict(self._saved)
            self._saved = None

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        assert self.monitor is not None
        count = trainer.accumulate_grad_batches
        first = batch_idx % count == 0
        if first:
            self._number = self.monitor.steps = trainer.global_step
        self._last = (batch_idx + 1) % count == 0 or trainer.is_last_batch
        if self._number % self.every:
            return
        size = infer_batch_size(batch, 0) if self._batch_size is None else self._batch_size(batch)
        self._step = MonitorStep(
            self.monitor, size, self._ids_of(batch), first=first, last=self._last, divisor=count
        )
        self._step.open()

    def on_after_backward(self, trainer, pl_module) -> None:
        step = self._taken()
        if step is not None:
            step.close(self._last)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        assert self.monitor is not None
        step = self._taken()
        if step is not None:  # training_step returned None, and no backward ran
            step.leave_out(self._last)
        if not self._last:
            return
        self.monitor.steps = trainer.global_step  # the monitor counts only measured steps
        if self._number % self.every:
            return
        metrics = self.monitor.metrics()
        if not metrics:
            return
        trainer.callback_metrics.update(
            {name: torch.tensor(value) for name, value in metrics.items()}
        )
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=self._number)
            if self._histograms and trainer.is_global_zero:
                _log_histograms(logger, self.monitor.histograms(), self._number)

    def on_train_epoch_end(self, trainer, pl_module) -> None:
        # A module may skip the rest of an epoch after a batch has started.
        self._abandon()

    def on_exception(self, trainer, pl_module, exception) -> None:
        self._abandon()

    def on_train_end(self, trainer, pl_module) -> None:
        self._abandon()

    def state_dict(self) -> dict[str, Any]:
        return {} if self.monitor is None else {"monitor": self.monitor.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._resumes:
            self._saved = state_dict.get("monitor")

    def _abandon(self) -> None:
        """Close a context whose backward never came."""
        step = self._taken()
        if step is not None:
            step.abandon()

    def _taken(self) -> MonitorStep | None:
        """Return the open context, if any, and leave it to the caller."""
        step, self._step = self._step, None
        return step

    def _ids_of(self, batch) -> Tensor | None:
        if self._ids is None or callable(self._ids):
            return None if self._ids is None else self._ids(batch)
        try:
            if isinstance(batch, Mapping) or isinstance(self._ids, int):
                return batch[self._ids]
            found = getattr(batch, self._ids)
            if callable(found):  # a list has methods such as index
                raise TypeError(f"{self._ids!r} is a method")
            return found
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            holds = f"a {type(batch).__name__}"
            if isinstance(batch, Mapping):
                holds += f" of {sorted(map(str, batch))}"
            elif isinstance(batch, Sized):
                holds += f" of {len(batch)}"
            raise TrackingError(
                f"the batch is {holds} and has no {self._ids!r}, which ids= names. Expected a key "
                "or index into the batch, or a function of it, that gives (B,) integers."
            ) from error


def _log_histograms(logger, columns: dict, step: int) -> None:
    experiment = logger.experiment
    columns = {name: values for name, values in columns.items() if len(values)}
    if hasattr(experiment, "add_histogram"):
        for name, values in columns.items():
            experiment.add_histogram(name, values, global_step=step)
    elif columns and any(kind.__name__ == "WandbLogger" for kind in type(logger).__mro__):
        wandb = importlib.import_module("wandb")
        shown = {name: wandb.Histogram(values) for name, values in columns.items()}
        # Lightning makes this the horizontal axis of what it logs to W&B.
        experiment.log({**shown, "trainer/global_step": step})
