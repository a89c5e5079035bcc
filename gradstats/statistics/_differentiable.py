"""``torch.autograd.grad`` on models that are meant for ``backward()``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn

from gradstats.capture._selection import data_parallel_within
from gradstats.capture.operations._engine import gradients_aside
from gradstats.capture.parameters._checkpoints import checkpoints_differentiable


@contextmanager
def differentiable(model: nn.Module) -> Iterator[None]:
    """Run a model so that torch.autograd.grad finds the gradients of its parameters.

    Take the gradients inside the block too. Checkpoints run again there, and those of other
    libraries add to the parameters' ``.grad``, which is put back.
    """
    aside = gradients_aside(list(model.parameters()))
    with (
        _recurrence_differentiable(model),
        checkpoints_differentiable(),
        apart_from_training(model),
        aside,
    ):
        yield


def apart_from_training(model: nn.Module) -> AbstractContextManager[None]:
    """Keep DistributedDataParallel from taking a backward inside for its first training step.

    With ``static_graph=True`` it learns from its first backward when gradients are complete. From
    one that computes no gradients it would learn never to average any.
    """
    parallel = [each for each in data_parallel_within(model) if each.static_graph]
    return _untold(parallel) if parallel else nullcontext()


@contextmanager
def _untold(parallel: list[nn.parallel.DistributedDataParallel]) -> Iterator[None]:
    told = [each._static_graph_delay_allreduce_enqueued for each in parallel]
    for each in parallel:
        each._static_graph_delay_allreduce_enqueued = True
    try:
        yield
    finally:
        for each, before in zip(parallel, told, strict=True):
            each._static_graph_delay_allreduce_enqueued = before


@contextmanager
def _recurrence_differentiable(model: nn.Module) -> Iterator[None]:
    """Run without cuDNN if recurrent layers are in eval mode, where it refuses their gradients.

    Not by torch.backends.cudnn.flags, which would reset the user's other settings, such as TF32 and
    deterministic convolutions.
    """
    refused = any(isinstance(m, nn.RNNBase) and not m.training for m in model.modules())
    if not (refused and torch.backends.cudnn.enabled):
        yield
        return
    torch.backends.cudnn.enabled = False
    try:
        yield
    finally:
        torch.backends.cudnn.enabled = True
