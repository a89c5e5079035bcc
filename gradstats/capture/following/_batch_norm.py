"""Batch normalisation, refused if it takes its statistics from several examples.

It is allowed where no gradient of a loss passes through it, as its results are given values then.
This is the case where no gradients are recorded. It may be the case in layers of other modules than
the model, such as a generator or a teacher: those are refused later, if the losses' graph shows
that a gradient passes.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from gradstats.capture.operations._modes import ContextMode
from gradstats.capture.parameters._tensors import node_of
from gradstats.errors import CoupledExamplesError


def check_statistics(
    mode: ContextMode, input, running_mean, running_var,
    weight=None, bias=None, training=False, *_, **__,
) -> None:  # fmt: skip
    """Check a call of ``functional.batch_norm`` before it runs."""
    if _mixes(mode, input, running_mean, training):
        _take_back_count(mode, running_mean)
        refuse_statistics(running_mean, weight, bias)


def check_native_statistics(
    mode: ContextMode, input, weight, bias, running_mean, running_var, training, *_, **__
) -> None:
    """Do the same for ``torch.batch_norm``, which all other functions call."""
    if _mixes(mode, input, running_mean, training):
        refuse_statistics(running_mean, weight, bias)


def _mixes(mode: ContextMode, input, running_mean, training: bool) -> bool:
    """Whether a layer takes its statistics from several examples where it must not."""
    if not training and running_mean is not None:
        return False  # the most frequent case, decided before the model is searched for the layer
    if mode.tracker.batch_size == 1:
        return False
    return mode.tracker.marks.is_of_data(input) and not _may_mix(mode, running_mean)


def _may_mix(mode: ContextMode, running_mean) -> bool:
    """Whether no gradient passes through a layer, or the losses' graph will show if one does.

    The graph does not show what is computed inside an autograd Function.
    """
    if mode.tracker.functions.seen is not None:
        return False
    if not torch.is_grad_enabled():
        return True
    modules = mode.tracker.modules
    if running_mean is None or not modules:
        return False
    return all(buffer is not running_mean for buffer in modules[0].buffers())


def _take_back_count(mode: ContextMode, running_mean) -> None:
    """Undo that a layer counted the batch, just before its statistics were refused."""
    for module in mode.tracker.modules:
        if isinstance(module, _BatchNorm) and module.training:
            if module.running_mean is running_mean and module.num_batches_tracked is not None:
                module.num_batches_tracked.sub_(1)


def refuse_statistics(running_mean, weight, bias) -> NoReturn:
    """Raise for batch normalisation that takes its statistics from several examples."""
    node = node_of(weight) or node_of(bias)
    owner = f" ({node.describe()})" if node is not None else ""
    if running_mean is None:
        mode = "without running statistics"
        remedy = (
            "Replace these layers by GroupNorm, or train them with track_running_stats=True and "
            "call .eval() on them before you measure."
        )
    else:
        mode = "in training mode"
        remedy = (
            "Got statistics of the batch, expected running statistics. Call model.eval() first, or "
            ".eval() on these layers alone, or replace them by GroupNorm. If no gradient needs to "
            "pass through them, as in a teacher, run them under torch.no_grad()."
        )
    raise CoupledExamplesError(
        f"batch normalisation {mode}{owner} mixes the examples of a batch: each loss depends on "
        f"all examples, so per-example gradients do not exist. {remedy}"
    )
