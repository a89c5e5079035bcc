"""Plain autograd, by ``torch.autograd.grad``, of models that are trained by ``backward()``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from gradstats.capture._engine import gradients_aside


@contextmanager
def differentiable(model: nn.Module) -> Iterator[None]:
    """Have a model run so that torch.autograd.grad finds the gradients of its parameters.

    The gradients are to be taken inside as well: checkpoints run again then, and those of other
    libraries add to the parameters' own, which are put back.
    """
    aside = gradients_aside(list(model.parameters()))
    with _recurrence_differentiable(model), checkpoints_differentiable(), aside:
        yield


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


@contextmanager
def checkpoints_differentiable() -> Iterator[None]:
    """Have reentrant checkpoints run as those of the other kind.

    Their parameters appear in their backward alone, where torch.autograd.grad does not look.
    """
    native = CheckpointFunction.apply
    own = vars(CheckpointFunction).get("apply")

    def apply(function, preserve, *args):
        flows = any(isinstance(item, Tensor) and item.requires_grad for item in args)
        if not (flows and torch.is_grad_enabled()):
            return native(function, preserve, *args)  # no gradient comes through, to anything
        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve)

    CheckpointFunction.apply = staticmethod(apply)  # type: ignore[method-assign]
    try:
        yield
    finally:
        if own is None:
            del CheckpointFunction.apply
        else:
            CheckpointFunction.apply = own  # type: ignore[method-assign]
