"""Opening the context of a micro-batch at the model's first forward in a Trainer's step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gradstats.capture.following._assigned import assign_rows
from gradstats.capture.operations._nested import tensors_in
from gradstats.errors import TrackingError
from gradstats.monitor._context import MonitorStep
from gradstats.statistics._loss import infer_batch_size


class Forwards:
    """Opens the context of each micro-batch at its first forward, which shows how many examples.

    Args:
        called: the module through which the whole model is called.
        main_input: the name of the input that has one row for each example; None if unknown.
        ids: the name of the input that holds the examples' ids, or None.
        rows_per_example: how many rows each example has.
        padding: the token with which the collator fills packed rows up; None if it does not.
        begin: makes the context, given the number of examples, their ids and, if they are packed
            into one row, their bounds.

    Attributes:
        in_step: whether the Trainer is in a training step; other calls are ignored.
    """

    def __init__(
        self,
        called: nn.Module,
        main_input: str | None,
        ids: str | None,
        rows_per_example: int,
        padding: int | None,
        begin: Callable[[int, Tensor | None, Tensor | None], MonitorStep],
    ):
        self.in_step = False
        self._called, self._begin = called, begin
        self._main_input, self._ids = main_input, ids
        self._rows_per_example, self._padding = rows_per_example, padding
        self._hooks: list[Any] = []
        self._step: MonitorStep | None = None
        self._examples = 0
        self._rows: int | None = None
        self._named = False

    def wait(self) -> None:
        """Wait for the forward of the next micro-batch."""
        before, after = Hook(self._before, self.close), Hook(self._after, self.close)
        self._hooks = [
            self._called.register_forward_pre_hook(before, with_kwargs=True),
            self._called.register_forward_hook(after, always_call=True),
        ]

    def take(self) -> MonitorStep | None:
        """Stop waiting, and return the context that was opened; None if there was no forward."""
        for hook in self._hooks:
            hook.remove()
        step, self._step, self._hooks = self._step, None, []
        return step

    def close(self) -> None:
        """Restore the model, in whatever state the step is."""
        step = self.take()
        if step is not None:
            step.abandon()

    def _before(self, model, args, kwargs) -> None:
        if not (self.in_step and model.training and torch.is_grad_enabled()):
            return
        try:
            if self._step is None:
                self._open(args, kwargs)
            else:
                self._check_rows(args, kwargs)
            if self._rows_per_example != 1:
                self._assign_rows([*args, *kwargs.values()])
        except BaseException:
            # Not left to _after: forward hooks may not be removed while they run.
            self.close()
            raise

    def _after(self, model, args, output) -> None:
        if output is None:  # the forward raised
            self.close()

    def _open(self, args, kwargs) -> None:
        """Open the context of a micro-batch, given what the model is called with."""
        inputs = self._main_input_in(kwargs)
        given = [*args, *kwargs.values()] if inputs is None else inputs
        rows, bounds = infer_batch_size(given, 0), None
        if rows == 1 and (bounds := bounds_in(kwargs)) is not None:
            if inputs is not None and self._padding is not None:
                bounds = without_padding(bounds, inputs[0], self._padding)
            rows = len(bounds) - 1
            if self._rows_per_example != 1:
                raise TrackingError(
                    f"the collator packed {rows} examples into one row, but rows_per_example="
                    f"{self._rows_per_example} expects rows of their own. Train without "
                    "padding_free, or without rows_per_example=."
                )
        self._examples, left = divmod(rows, self._rows_per_example)
        if left:
            raise TrackingError(
                f"the model was called with {left} more than {self._examples} times the "
                f"{self._rows_per_example} rows that rows_per_example= says each example has."
            )
        self._rows, self._named = self._rows_in(args, kwargs), inputs is not None
        self._step = self._begin(self._examples, self._ids_in(kwargs), bounds)
        self._step.open()

    def _assign_rows(self, inputs: list[Any]) -> None:
        """Assign each row of the model's inputs to its example."""
        owner = torch.arange(self._examples).repeat(self._rows_per_example)
        for item in inputs:
            if isinstance(item, Tensor) and item.dim() and len(item) == len(owner):
                assign_rows(item, owner)

    def _main_input_in(self, kwargs) -> Tensor | None:
        """Return the model's main input, if it was passed by name."""
        inputs = kwargs.get(self._main_input)
        return inputs if isinstance(inputs, Tensor) else None

    def _rows_in(self, args, kwargs) -> int | None:
        """Return how many rows the model is called with; None if it is given no tensors."""
        inputs = self._main_input_in(kwargs)
        if inputs is not None:
            return len(inputs)
        given = [*args, *kwargs.values()]
        return infer_batch_size(given, 0) if any(map(Tensor.dim, tensors_in(given))) else None

    def _check_rows(self, args, kwargs) -> None:
        """Raise if a later call in a micro-batch has another number of rows than the first."""
        named = self._named and self._main_input_in(kwargs) is not None
        # Rows of other examples are refused where the model uses them, unless there is only one.
        if not named and self._examples > 1:
            return
        rows = self._rows_in(args, kwargs)
        if rows not in (None, self._rows):
            raise TrackingError(
                f"the model was called with {self._rows} rows and then, in the same training step, "
                f"with {rows}, so it is not known which are the examples. Expected one row "
                "for each example in every call: run other calls under torch.no_grad(), or measure "
                "with gs.Monitor in your own loop."
            )

    def _ids_in(self, kwargs) -> Tensor | None:
        if self._ids is None:
            return None
        if self._ids not in kwargs:
            raise TrackingError(
                f"the model was not given the input {self._ids!r} that ids= names, only "
                f"{sorted(kwargs)}. Set remove_unused_columns=False and let the data collator "
                "return it."
            )
        return kwargs[self._ids]


class Hook:
    """A hook that does nothing in copies of the model, such as averages of its weights.

    A bound method as hook would be copied with the object it is bound to, and act on that copy.
    """

    def __init__(self, call: Callable[..., None], close: Callable[[], None]):
        self._call, self.close = call, close

    def __call__(self, *args) -> None:
        self._call(*args)

    def __reduce__(self):
        return Hook, (nothing, nothing)


def nothing(*args) -> None:
    """Do nothing."""


def close_all(model: nn.Module) -> None:
    """Close what callbacks of aborted runs have opened, or wait to open, on a model."""
    for module in model.modules():
        for hook in [*module._forward_pre_hooks.values()]:
            if isinstance(hook, Hook):
                hook.close()


def bounds_in(inputs: dict[str, Any]) -> Tensor | None:
    """Return the bounds of examples that a collator packed into one row; None if not packed.

    Args:
        inputs: of the model, by name.
    """
    bounds = inputs.get("cu_seq_lens_q")
    if isinstance(bounds, Tensor):
        return bounds
    positions = inputs.get("position_ids")
    # With a mask, models attend to the whole row: positions may restart only in padding.
    masked = inputs.get("attention_mask") is not None
    if masked or not isinstance(positions, Tensor) or positions.dim() != 2:
        return None
    # Positions are counted from 0, or from 2 as RoBERTa does.
    starts = (positions[0] == positions[0].min()).nonzero()[:, 0]
    if len(starts) < 2 or starts[0] != 0:
        return None
    return torch.cat([starts, starts.new_tensor([positions.shape[1]])])


def padding_of(collator: Any) -> int | None:
    """Return the token with which a collator of TRL fills packed rows up; None if it does not."""
    fills_up = getattr(collator, "pad_to_multiple_of", None) is not None
    return getattr(collator, "pad_token_id", None) if fills_up else None


def without_padding(bounds: Tensor, tokens: Tensor, padding: int) -> Tensor:
    """Return bounds in which the tokens that fill a packed row up belong to its last example.

    To attention each of them is a sequence of its own, of one token without a loss.

    Args:
        bounds: (S + 1,) of the S sequences in the row.
        tokens: (T,) of the row.
        padding: the token that fills it up.
    """
    alone = (bounds.diff() == 1) & (tokens[bounds[:-1].long()] == padding)
    count = int(alone[1:].flip(0).long().cumprod(0).sum())
    return torch.cat([bounds[: len(bounds) - 1 - count], bounds[-1:]]) if count else bounds
