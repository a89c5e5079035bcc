"""Activation checkpoints: what they run again finds the parameters that it found before.

The graph of a reentrant checkpoint appears in its own backward only: no forward shows what happens
to the examples inside, and ``torch.autograd.grad`` finds no parameter there. The other kind takes
the same memory and gives the same gradients.

That one saves the tensors that it is given. Inside of another checkpoint, or of other hooks on
saved tensors, it gets copies back, which nothing tells from data: a tracked tensor is kept as the
object that it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from gradstats.capture._tensors import node_of

# What ``checkpoint`` hands over to, by name, and what that is from PyTorch 2.14 on.
SAVING = "_checkpoint_without_reentrant_generator"
SAVING_LISTS = f"{SAVING}_impl"


@cache
def show_checkpoints() -> None:
    """Let checkpoints that are not reentrant keep tracked tensors as they are, from now on."""
    module = torch.utils.checkpoint
    if hasattr(module, SAVING_LISTS):
        setattr(module, SAVING_LISTS, _of_lists(getattr(module, SAVING_LISTS)))
    else:
        setattr(module, SAVING, _of_positions(getattr(module, SAVING)))


def _of_lists(native: Callable[..., Any]):
    def run(function, args, kwargs, **options):
        return native(*_without_tracked(function, args), kwargs, **options)

    return run


def _of_positions(native: Callable[..., Any]):
    def run(function, preserve, context, determinism, debug, stop, *args, **kwargs):
        function, args = _without_tracked(function, args)
        return native(function, preserve, context, determinism, debug, stop, *args, **kwargs)

    return run


def _without_tracked(function: Callable[..., Any], args: tuple[Any, ...]):
    """Return a function that knows the tracked tensors among its arguments, and the others."""
    tracked = {
        place: item
        for place, item in enumerate(args)
        if isinstance(item, Tensor) and node_of(item) is not None
    }
    if not tracked:
        return function, args

    def complete(*others, **kwargs):
        given = (tracked.get(place, item) for place, item in enumerate(others))
        return function(*given, **kwargs)

    return complete, tuple(None if place in tracked else item for place, item in enumerate(args))


def run_checkpoint(native: Callable[..., Any], function: Callable[..., Any], preserve: bool, *args):
    """Run a reentrant checkpoint.

    Args:
        native: what PyTorch would run.
        function, preserve, args: what it takes.
    """
    flows = any(isinstance(item, Tensor) and item.requires_grad for item in args)
    if not (flows and torch.is_grad_enabled()):
        return native(function, preserve, *args)  # no gradient comes through, to anything
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve)


@contextmanager
def checkpoints_differentiable() -> Iterator[None]:
    """Have torch.autograd.grad find the parameters inside of reentrant checkpoints."""
    native = CheckpointFunction.apply
    own = vars(CheckpointFunction).get("apply")

    def apply(function, preserve, *args):
        return run_checkpoint(native, function, preserve, *args)

    CheckpointFunction.apply = staticmethod(apply)  # type: ignore[method-assign]
    try:
        yield
    finally:
        if own is None:
            del CheckpointFunction.apply
        else:
            CheckpointFunction.apply = own  # type: ignore[method-assign]
