"""Checks of the arguments of the monitor."""

from __future__ import annotations

import reprlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradstats._values import integer, is_real, unlike_numbers
from gradstats.errors import TrackingError
from gradstats.monitor._measured import REDUCTIONS
from gradstats.monitor._rates import optimizers_of
from gradstats.statistics._arguments import (
    check_flags,
    check_model,
    check_scaler,
    check_workspace,
)
from gradstats.statistics._loss import loss_weights


def check_monitor(
    model,
    every,
    loss_reduction,
    optimizer,
    scaler,
    decay,
    spike,
    top,
    clip,
    workspace,
    process_group,
    **flags,
) -> None:
    """Raise unless these are valid arguments of a monitor."""
    check_model(model)
    reductions = f"one of {REDUCTIONS}; for anything else pass weights= to monitor.step"
    is_reduction = isinstance(loss_reduction, str) and loss_reduction in REDUCTIONS
    optimizers = optimizers_of(optimizer)
    optimizes = all(hasattr(each, "param_groups") for each in optimizers)
    optimizes = optimizes and len(set(map(id, optimizers))) == len(optimizers)
    several = "a torch.optim.Optimizer instance, or a list of them, each once"
    groups = process_group is None or isinstance(process_group, dist.ProcessGroup)
    for name, value, is_good, expected in (
        ("every", every, integer(every, 1) is not None, "a positive integer: steps"),
        ("loss_reduction", loss_reduction, is_reduction, reductions),
        ("optimizer", optimizer, optimizes, several),
        ("decay", decay, is_real(decay) and 0 <= decay < 1, "a number in [0, 1)"),
        ("spike", spike, is_real(spike) and spike > 1, "a factor above 1"),
        ("top", top, integer(top, 0) is not None, "a number of examples"),
        ("process_group", process_group, groups, "a torch.distributed process group"),
        ("clip", clip, clip is None or (is_real(clip) and clip > 0), "a positive norm"),
    ):
        if not is_good:
            raise TrackingError(f"{name} is {reprlib.repr(value)}, expected {expected}.")
    check_scaler(scaler)
    check_workspace(workspace)
    check_flags(**flags)


def checked_accumulation(accumulation, optimizer: Any) -> tuple[int, int]:
    """Return (k, K), or raise; (0, 1) if it was not given."""
    if accumulation is None:
        _check_not_accelerated(optimizer)
        return 0, 1
    is_pair = isinstance(accumulation, (tuple, list)) and len(accumulation) == 2
    index, count = (integer(each, 0) for each in (accumulation if is_pair else (None, None)))
    if index is None or count is None or index >= count:
        raise TrackingError(
            f"accumulation is {accumulation!r}, expected (k, K) with 0 ≤ k < K: micro-batch k of K."
        )
    return index, count


def _check_not_accelerated(optimizer: Any) -> None:
    """Raise if accelerate divides the losses by a number of micro-batches."""
    for each in optimizers_of(optimizer):
        count = getattr(getattr(each, "gradient_state", None), "num_steps", 1)
        if count != 1:
            raise TrackingError(
                f"the optimizer is accelerate's, with gradient_accumulation_steps={count}, so its "
                f"backward divides each loss by {count}, but accumulation= was not given. Pass "
                f"accumulation=(k, {count}) for micro-batch k of an optimizer step, or "
                "accumulation=(0, 1) if the losses are not divided."
            )


def checked_weights(weights, batch_size: int) -> Tensor:
    """Return (B,) float64 positive weights, or raise."""
    checked = loss_weights("mean", weights, batch_size)
    assert isinstance(checked, Tensor)
    if not bool((checked > 0).all()):
        raise TrackingError(
            f"weights are {checked.tolist()}, expected positive numbers. Statistics of examples "
            "that count negatively have no meaning."
        )
    return checked


def checked_ids(ids, batch_size: int) -> Tensor:
    """Return (B,) integers, or raise; whether they are too large is checked on the host."""
    expected = f"expected ({batch_size},) integers: one for each example"
    try:
        ids = torch.as_tensor(ids)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TrackingError(
            f"ids are {reprlib.repr(ids)} ({error}), {expected}. Replace names by numbers."
        ) from error
    if (found := unlike_numbers(ids)) is not None:
        raise TrackingError(f"ids are {found}, {expected}.")
    inexact = ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool
    if tuple(ids.shape) != (batch_size,) or inexact:
        raise TrackingError(f"ids have shape {tuple(ids.shape)} and dtype {ids.dtype}, {expected}.")
    # A copy, because the caller may reuse the memory for the next batch.
    return ids.clone()
