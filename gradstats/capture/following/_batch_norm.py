"""Batch normalisation, refused if it takes its statistics from several examples.

By layers of other modules than the model, such as a generator or a teacher, it is refused only
where a loss's gradient passes through it: what they make of the batch is given. So is what the
model's own layers make where no gradients are recorded.
"""

from __future__ import annotations

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from gradstats.capture.operations._modes import ContextMode
from gradstats.capture.parameters._tensors import node_of
from gradstats.errors import CoupledExamplesError


def check_statistics(
    mode: ContextMode, input, running_mean, running_var,
    weight=None, bias=None, training=False, *_, **__,
) -> None:  # fmt: skip
    """Check a batch normalisation of data before it runs."""
    if not _is_seen_to_mix(mode, input, running_mean, training):
        return
    try:
        check_batch_norm(running_mean, weight, bias, training)
    except CoupledExamplesError:
        _take_back_count(mode, running_mean)
        raise


def check_native_statistics(
    mode: ContextMode, input, weight, bias, running_mean, running_var, training, *_, **__
) -> None:
    """The same for ``torch.batch_norm``, which all others call."""
    if _is_seen_to_mix(mode, input, running_mean, training):
        check_batch_norm(running_mean, weight, bias, training)


def _is_seen_to_mix(mode: ContextMode, input, running_mean, training: bool) -> bool:
    """Whether a layer takes its statistics from data here, rather than in what is given."""
    if not training and running_mean is not None:
        return False  # as most do: whose the layer is would take a look at all of the model
    if mode.tracker.batch_size == 1:
        return False
    return mode.tracker.marks.is_of_data(input) and not _is_given(mode, running_mean)


def _is_given(mode: ContextMode, running_mean) -> bool:
    """Whether no gradient passes, or the graph shows if one does: by a layer of another module.

    It does not show what is computed inside an autograd Function.
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
    """Take back a layer's count of the batch, made just before its statistics were refused."""
    for module in mode.tracker.modules:
        if isinstance(module, _BatchNorm) and module.training:
            if module.running_mean is running_mean and module.num_batches_tracked is not None:
                module.num_batches_tracked.sub_(1)


def check_batch_norm(running_mean, weight, bias, training: bool) -> None:
    """Raise if batch normalisation takes its statistics from the batch."""
    if not training and running_mean is not None:
        return
    node = node_of(weight) or node_of(bias)
    owner = f" ({node.describe()})" if node is not None else ""
    if running_mean is None:
        mode = "without running statistics"
        remedy = "Replace these layers by GroupNorm, or train them with track_running_stats=True."
    else:
        mode = "in training mode"
        remedy = (
            "Got statistics of the batch, expected running statistics. Call model.eval() first, or "
            ".eval() on these layers alone, or replace them by GroupNorm. Where no gradient is to "
            "pass, as through a teacher's layers, run them under torch.no_grad()."
        )
    raise CoupledExamplesError(
        f"batch normalisation {mode}{owner} mixes the examples of a batch: each loss depends on "
        f"all examples, so per-example gradients do not exist. {remedy}"
    )
