"""Gradient statistics in a run of Hugging Face's Trainer.

from gradstats.integrations.transformers import GradStatsCallback
Trainer(..., callbacks=[GradStatsCallback(every=50)])
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gradstats._requirements import require
from gradstats._values import integer
from gradstats._warnings import warn
from gradstats.errors import CoupledExamplesError, TrackingError
from gradstats.integrations._callback import check_options, monitor_of_run
from gradstats.integrations._forwards import Forwards, close_all, nothing, padding_of
from gradstats.integrations._trainer import (
    PAIRS,
    calling_trainer,
    from_json,
    refuse_what_cannot_be_measured,
    to_json,
)
from gradstats.integrations._trl import register_rules
from gradstats.monitor._context import MonitorStep
from gradstats.monitor._monitor import Monitor
from gradstats.monitor._ranks import group_of

with require("transformers"):
    from transformers import Trainer
    from transformers.trainer_callback import CallbackHandler, ExportableState, TrainerCallback


class GradStatsCallback(TrainerCallback, ExportableState):
    """Logs what ``gs.Monitor`` measures like the Trainer's own logs, and saves it in checkpoints.

    An optimizer step is measured if ``state.global_step`` is a multiple of ``every`` when it
    starts; in other steps the callback does nothing. At the end of the step, metrics go to
    ``state.log_history`` and to every reporting integration, under the Trainer's step number. Norms
    are taken before clipping. Measurements are saved with each checkpoint, and restored on resuming
    if ``restore_callback_states_from_checkpoint=True``. As with every restored callback, the
    Trainer then continues with a new one, made with the saved arguments: it is in
    ``trainer.callback_handler.callbacks``, and the one that you passed measures nothing.

    The Trainer differentiates one scalar per micro-batch. Their sum over the micro-batches of an
    optimizer step, averaged over its processes, is taken to be (1/N) Σ ℓ_i over the step's N
    examples, which defines ℓ_i. With K micro-batches of B examples on each of R processes, ℓ_i is

        N / #tokens · the sum of its token losses    if the loss is divided by the token count
        N / (K R B) · its own loss                   if the loss is the mean over the micro-batch:
                                                     its own loss, if all are of the same size
        N / B · its own loss                         if the loss is such a mean, but the Trainer
                                                     takes it to be divided by the token count:
                                                     K R times its own loss, likewise

    #tokens is the Trainer's ``num_items_in_batch``: all labels that are not -100, including the
    first of a row, which nothing predicts. Transformers 5 excludes that one for causal language
    models, which it recognises by their class name (not ``GPT2LMHeadModel``). The Trainer takes a
    loss to be divided by the count if it comes from a ``compute_loss_func``, or if there are
    ``labels`` and the model takes ``**kwargs``. BERT and T5 in Transformers 5 do so without
    dividing, and so may your ``compute_loss``. With ``average_tokens_across_devices=False``,
    #tokens is R times the count of the process, and the third line is N / (R B) · its own loss. In
    each case the gradient is the one that the Trainer trains with.

    Examples are the rows of the batch; or, if ``DataCollatorWithFlattening`` packs several into one
    row, those between its bounds: the model must be given ``cu_seq_lens_q``, or ``position_ids``
    that restart with each example and no ``attention_mask``. Tokens with which TRL fills such a row
    up (``pad_to_multiple_of``) are no examples. With ``rows_per_example=2``, an example is a pair
    of rows, all second rows being stacked below all first rows, as in TRL's ``DPOTrainer`` and
    ``RewardTrainer``.

    TRL's trainers compute log-probabilities and divergences in autograd Functions that never hold
    the logits of all tokens; measured steps do form these logits.

    After an exception in a training step, the model is restored and the exception raised again.
    Calls of the model outside the Trainer's training steps are not measured.

    Args:
        every: interval of the measured optimizer steps.
        rows_per_example: k if the batch holds B examples of k rows each: the rows r, r + B,
            r + 2 B, … belong to example r. This is trusted: a loss that combines rows in another
            way (interleaved pairs) and is averaged by the Trainer is not always detected.
        ids: the name of the model input, (B,) integers, that holds the ids of a batch's examples,
            for ``monitor.self_influence`` and ``monitor.examples``. The model receives it too; set
            ``remove_unused_columns=False`` if its forward takes it only through ``**kwargs``.
        options: all other arguments of ``gs.Monitor`` that can be written as JSON.

    Attributes:
        monitor: the Monitor, once training has started. Another ``train()`` of the same model
            continues it.

    Raises:
        TrackingError: an argument of the wrong type or value. In training: the Trainer runs the
            model in DataParallel or DeepSpeed, which cannot be measured.
        TypeError: an option that ``gs.Monitor`` does not have.

    Cost:
        In measured steps that of ``gs.Monitor``; none in others.
    """

    def __init__(
        self,
        every: int = 50,
        *,
        ids: str | None = None,
        rows_per_example: int = 1,
        **options: Any,
    ):
        if not (ids is None or isinstance(ids, str)):
            raise TrackingError(f"ids is {ids!r}, expected the name of an input of the model.")
        check_options(every, options)
        self.every = int(every)
        self.monitor: Monitor | None = None
        self.saved: dict[str, Any] | None = None
        self._ids, self._options = ids, options
        rows = integer(rows_per_example, 1)
        if rows is None:
            raise TrackingError(
                f"rows_per_example is {rows_per_example!r}, expected a positive number of rows."
            )
        self._rows_per_example = rows
        self._forwards: Forwards | None = None
        self._handler: CallbackHandler | None = None
        self._before: dict[str, Any] | None = None
        self._leave_trainer: Callable[[], None] = nothing
        self._first = self._measures = self._unfinished = False
        self._accumulation = 1
        try:
            json.dumps([ids, options])
        except TypeError as error:
            raise TrackingError(
                f"ids and the options {sorted(options)} are saved with the Trainer's state as "
                f"JSON, expected values that JSON can hold ({error})."
            ) from error

    def on_train_begin(self, args, state, control, model=None, optimizer=None, **kwargs) -> None:
        self.close()
        starts_again = args.auto_find_batch_size and self._leave_trainer is not nothing
        self._leave_trainer()
        self._unfinished = False
        refuse_what_cannot_be_measured(args)
        trainer = calling_trainer()
        self._handler = trainer.callback_handler
        # Hooks of a compiled model are compiled with it; those of its wrapper are not.
        wrapper = trainer.model_wrapped
        called = wrapper if "_orig_mod" in wrapper._modules else model
        close_all(wrapper)
        self._forwards = Forwards(
            called, getattr(model, "main_input_name", None), self._ids, self._rows_per_example,
            padding_of(trainer.data_collator), self._begin,
        )  # fmt: skip
        self._accumulation = args.gradient_accumulation_steps
        group = group_of(model)
        if group is None and args.world_size > 1:
            group = torch.distributed.group.WORLD
        run = {
            "optimizer": optimizer,
            "scaler": getattr(optimizer, "scaler", None),
            "process_group": group,
            "loss_reduction": "step_mean",
            **self._options,
        }
        before = self.monitor
        monitor = self.monitor = monitor_of_run(before, model, self.every, **run)
        resumes = state.global_step > 0 and monitor is not before
        if starts_again and self._before is not None:
            # With smaller batches, after running out of memory: the Trainer's log starts anew too.
            monitor.load_state_dict(self._before)
        elif self.saved is not None:
            monitor.load_state_dict(from_json(self.saved))
            self.saved = None
        elif resumes and not args.restore_callback_states_from_checkpoint:
            warn(
                "the run resumes from a checkpoint, but gradstats' averages and self-influence "
                "start anew: set restore_callback_states_from_checkpoint=True to restore them.",
            )
        if args.auto_find_batch_size:
            self._before = monitor.state_dict()
        self._enter_trainer(trainer, self._forwards)

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        assert self.monitor is not None
        self.monitor.steps = state.global_step
        self._first, self._measures = True, state.global_step % self.every == 0
        if self._unfinished:
            # The next micro-batch, for which hooks may still wait, did not come.
            self.close()
            if self._measures:
                self._measures = False
                warn(
                    f"optimizer step {state.global_step} was not measured: it spans two epochs, "
                    "since the last one ended between its micro-batches. Expected epochs of whole "
                    "steps: a number of batches that gradient_accumulation_steps divides, or a "
                    "data set of known length.",
                )
        self._unfinished = True
        self._wait()

    def on_substep_end(self, args, state, control, **kwargs) -> None:
        self._close(last=False)
        self._wait()

    def on_pre_optimizer_step(self, args, state, control, **kwargs) -> None:
        self._close(last=True)
        self._unfinished = False

    def on_step_end(self, args, state, control, **kwargs) -> None:
        assert self.monitor is not None and self._handler is not None
        self.monitor.steps = state.global_step  # the monitor counts only measured steps
        if not self._measures:
            return
        self._measures = False
        logs = self.monitor.metrics()
        if not logs:
            return
        # As in Trainer.log; with a copy of the control, whose flags the handler clears.
        logs["epoch"] = state.epoch
        state.log_history.append({**logs, "step": state.global_step})
        self._handler.on_log(args, state, dataclasses.replace(control), logs)

    def on_train_end(self, args, state, control, **kwargs) -> None:
        self.close()
        self._leave_trainer()

    def _enter_trainer(self, trainer: Trainer, forwards: Forwards) -> None:
        """Wrap the Trainer's training step: callbacks are not told of its exceptions."""
        step, rules = trainer.training_step, register_rules()

        @functools.wraps(step)
        def training_step(*args, **kwargs):
            forwards.in_step = True
            try:
                return step(*args, **kwargs)
            except BaseException as error:
                forwards.close()
                rules.close()
                if isinstance(error, CoupledExamplesError) and self._rows_per_example == 1:
                    raise CoupledExamplesError(f"{error} {PAIRS}", error.parameters) from error
                raise
            finally:
                forwards.in_step = False

        replaced = vars(trainer).get("training_step")  # None if it is a method of the class
        trainer.training_step = training_step

        def leave() -> None:
            """Restore the Trainer's step, unless another callback has wrapped it since."""
            if vars(trainer).get("training_step") is training_step:
                del trainer.training_step
                if replaced is not None:
                    trainer.training_step = replaced
            rules.close()
            self._leave_trainer = nothing

        self._leave_trainer = leave

    def state(self) -> dict[str, Any]:
        """Return what the Trainer saves as JSON: arguments and attributes."""
        saved = None if self.monitor is None else to_json(self.monitor.state_dict())
        return {
            "args": {
                "every": self.every,
                "ids": self._ids,
                "rows_per_example": self._rows_per_example,
                **self._options,
            },
            "attributes": {"saved": saved},
        }

    def _wait(self) -> None:
        """Wait for the forward of the next micro-batch, if its step is measured."""
        if self._measures:
            assert self._forwards is not None
            self._forwards.wait()

    def _begin(self, size: int, ids: Tensor | None, bounds: Tensor | None) -> MonitorStep:
        """Return the context of the next micro-batch."""
        assert self.monitor is not None
        first, self._first = self._first, False
        last = True if self._accumulation == 1 else None
        return MonitorStep(
            self.monitor, size, ids, cu_seqlens=bounds, first=first, last=last, divisor=1
        )

    def _close(self, last: bool) -> None:
        """End the current micro-batch."""
        assert self.monitor is not None and self._forwards is not None
        step = self._forwards.take()
        if step is not None:
            step.close(last)
        elif self._measures:
            self._begin(0, None, None).skip(
                last,
                f"optimizer step {self.monitor.steps} was not measured: no forward of the model in "
                "training mode was seen in one of its micro-batches. Expected a call of the whole "
                "model, model(**inputs), with gradients and in training mode: not model.forward, "
                "nor only a part of the model.",
            )

    def close(self) -> None:
        """Restore the model, in whatever state the step is."""
        if self._forwards is not None:
            self._forwards.close()
