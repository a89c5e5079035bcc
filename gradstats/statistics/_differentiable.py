"""Plain autograd, by ``torch.autograd.grad``, of models that are trained by ``backward()``."""

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
    """Have a model run so that torch.autograd.grad finds the gradients of its parameters.

    The gradients are to be taken inside as well: checkpoints run again then, and those of other
    libraries add to the parameters' own, which are put back.
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
    """Have what is DistributedDataParallel take nothing that runs inside for a training step.

    With ``static_graph=True`` the first backward tells it when the gradients are complete from then
    on. After one that computes none it would never average any.
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
    """Have recurrent layers in evaluation mode run without cuDNN, which refuses their gradients.

    Where there are none, cuDNN stays for everything else. torch.backends.cudnn.flags would reset
    the user's other settings with it, TF32 and deterministic convolutions among them.
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
