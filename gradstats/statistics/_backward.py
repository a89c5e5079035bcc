"""The forward and backward behind every function that is given a loss function."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gradstats.capture._coverage import leaves_of
from gradstats.capture._tracker import Tracker
from gradstats.capture.following._taken import ABOUT_EXAMPLES, explain, take_call, took_doubtful
from gradstats.capture.operations._graph import let_go
from gradstats.capture.parameters._consumers import Consumer
from gradstats.capture.uses._uses import Settings
from gradstats.errors import TrackingError
from gradstats.statistics._arguments import LossFunction, Options, check_workspace
from gradstats.statistics._batches import Given
from gradstats.statistics._differentiable import apart_from_training
from gradstats.statistics._division import Division
from gradstats.statistics._loss import check_batch_dim, check_losses, examples_in
from gradstats.statistics._state import Start

if TYPE_CHECKING:
    from typing_extensions import Unpack


class NothingUsedError(TrackingError):
    """The losses use none of the tracked parameters.

    Attributes:
        losses: (B,) their values, where they use other parameters of the model.
    """

    def __init__(self, losses: Tensor | None):
        super().__init__(
            "the losses use none of the tracked parameters: no backward reached them. Expected "
            "losses computed with the model that loss_fn is given as its first argument. Does "
            "loss_fn use another model? Or do parameters= and exclude= leave only parameters that "
            "it does not use, or that have no elements?"
        )
        self.losses = losses


def run(
    model: nn.Module,
    batch: Any,
    loss_fn: LossFunction,
    consumer: Consumer | None,
    **options: Unpack[Options],
) -> tuple[Tracker, Tensor]:
    """Run a forward and a backward without weight gradients that feed a consumer.

    Returns:
        The closed context and the (B,) losses.
    """
    batch_dim = check_batch_dim(options.get("batch_dim", 0))
    batch_size, segments = examples_in(batch, batch_dim, options.get("cu_seqlens"), model)
    return run_examples(
        model, batch, loss_fn, consumer, check_workspace(options.get("workspace")),
        batch_size=batch_size, batch_dim=batch_dim, segments=segments,
        parameters=options.get("parameters"), exclude=options.get("exclude", ()),
    )  # fmt: skip


def run_examples(
    model: nn.Module,
    batch: Any,
    loss_fn: LossFunction,
    consumer: Consumer | None,
    workspace: int,
    **options: Any,
) -> tuple[Tracker, Tensor]:
    """Do the same as ``run``, for a known number of examples.

    Args:
        model, batch, loss_fn, consumer: as for ``run``.
        workspace: bytes of scratch memory.
        options: the other arguments of Tracker.

    Raises:
        NothingUsedError: if the losses use none of the tracked parameters.
    """
    settings = Settings(weight_gradients=False, fused=True, workspace=workspace, consumer=consumer)
    let_go()
    given = Given(batch)
    tracker = Tracker(model, settings=settings, **options)
    start = Start(tracker.modules, tracker.attributes, tracker.marks.constants.values())
    try:
        losses = _differentiate(tracker, start, model, batch, given.tensors, loss_fn)
    except ABOUT_EXAMPLES as error:
        explain(tracker.marks, error)
        again = given.again()
        doubtful = took_doubtful(tracker.marks, loss_fn, model, given.tensors)
        if not doubtful or tracker.backward_ran or again is None or not start.restore():
            raise
        # Something was taken for data that may be none: as many values as examples that the forward
        # made or drew, tensors from closures or globals, or a list in the batch with as many
        # entries as examples. Run the forward once more with these as constants.
        tracker = Tracker(model, settings=settings, doubtful_are_data=False, **options)
        try:
            losses = _differentiate(tracker, start, model, *again, given.tensors, loss_fn)
        except (torch.OutOfMemoryError, MemoryError):
            raise
        except Exception:
            raise error from None
    return tracker, losses


def _differentiate(
    tracker: Tracker,
    start: Start,
    model: nn.Module,
    batch: Any,
    tensors: list[Tensor],
    loss_fn: LossFunction,
) -> Tensor:
    """Run the forward and the backward inside a context; return the losses' values.

    Args:
        tensors: in the batch.
    """
    division = Division(tracker.batch_size, tracker.marks.batch_dim)
    take_call(tracker.marks, loss_fn, model, tensors, division.lists_of_entries(batch))
    with torch.enable_grad(), apart_from_training(model):
        try:
            try:
                tracker.open()
                losses = loss_fn(model, batch)
                with torch._C.DisableTorchFunction():
                    losses = check_losses(losses, tracker.batch_size)
                    tracker.note_losses(losses)
                    total = losses.sum()
                tracker.backward_without_gradients(total)
                if not tracker.reports.any:
                    with torch._C.DisableTorchFunction():
                        leaves = set(map(id, leaves_of(total)))
                        used = any(id(parameter) in leaves for parameter in model.parameters())
                        raise NothingUsedError(losses.detach() if used else None)
            finally:
                if tracker.derived:
                    # Closing makes plain tensors of those that cannot be dropped.
                    tracker.derived = not start.drop_derived()
                tracker.close()
        finally:
            tracker.close()  # again, in case an interrupt hit the call above as it began
        with torch._C.DisableTorchFunction():
            measured = losses.detach()
    del losses, total
    let_go()
    return measured
