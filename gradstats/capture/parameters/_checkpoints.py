"""Activation checkpoints, whose recomputation must see the same tracked parameters as the forward.

A reentrant checkpoint builds its graph in its own backward: the forward does not show what happens
to the examples inside, and ``torch.autograd.grad`` finds no parameter there. So it is run as a
non-reentrant one, which takes the same memory and gives the same gradients.

A non-reentrant checkpoint saves its arguments. Inside another checkpoint, or under other hooks on
saved tensors, it gets copies back, on which nothing is noted. So tracked tensors bypass the saving,
and what is known about other tensors is noted on their copies. The recomputation is followed in
every backward, although ``torch.autograd.grad`` sets the context's mode aside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from gradstats.capture.following._notes import is_unusual, note_as, note_of
from gradstats.capture.operations._modes import innermost_mode, modes_here
from gradstats.capture.parameters._tensors import node_of

# The function that ``checkpoint`` calls, by name, and its counterpart from PyTorch 2.14 on.
SAVING = "_checkpoint_without_reentrant_generator"
SAVING_LISTS = f"{SAVING}_impl"


@cache
def replace_checkpoint() -> None:
    """From now on, have tracked tensors bypass what non-reentrant checkpoints save."""
    module = torch.utils.checkpoint
    if hasattr(module, SAVING_LISTS):
        setattr(module, SAVING_LISTS, _of_lists(getattr(module, SAVING_LISTS)))
    else:
        setattr(module, SAVING, _of_positions(getattr(module, SAVING)))


def _of_lists(native: Callable[..., Any]):
    def run(function, args, kwargs, **options):
        return native(*_bypassing(function, args), kwargs, **options)

    return run


def _of_positions(native: Callable[..., Any]):
    def run(function, preserve, context, determinism, debug, stop, *args, **kwargs):
        function, args = _bypassing(function, args)
        return native(function, preserve, context, determinism, debug, stop, *args, **kwargs)

    return run


def _bypassing(function: Callable[..., Any], args: tuple[Any, ...]):
    """Return a checkpoint's function, and its arguments with None in the place of tracked ones.

    The function holds these itself. It is followed wherever it runs, and notes what is known about
    the other arguments on the copies that it gets.
    """
    mode = innermost_mode()
    nodes = {place: node_of(item) for place, item in enumerate(args) if isinstance(item, Tensor)}
    tracked = {place: args[place] for place, node in nodes.items() if node is not None}
    if mode is None and not tracked:
        return function, args
    notes = {}
    if mode is not None:
        marks = mode.tracker.marks
        for place in nodes.keys() - tracked.keys():
            item = args[place]
            if is_unusual(marks, item) or not marks.is_data(item):
                notes[place] = note_of(marks, item)

    def run(*copies, **kwargs):
        given = [tracked.get(place, item) for place, item in enumerate(copies)]
        if mode is None or mode.tracker.closed:
            return function(*given, **kwargs)
        for place, note in notes.items():
            if note is not None:
                note_as(mode.tracker.marks, copies[place], note)
        here = nullcontext() if mode in modes_here() else mode
        # The torch.autograd.grad of a subclass hides the operations of all others, parameters too.
        with torch._C._EnableTorchFunction(), here:
            return function(*given, **kwargs)

    return run, tuple(None if place in tracked else item for place, item in enumerate(args))


def run_checkpoint(native: Callable[..., Any], function: Callable[..., Any], preserve: bool, *args):
    """Run a reentrant checkpoint as a non-reentrant one if gradients flow through it.

    Args:
        native: PyTorch's own implementation.
        function, preserve, args: what it is called with.
    """
    trained = any(isinstance(item, Tensor) and item.requires_grad for item in args)
    if not (trained and torch.is_grad_enabled()):
        return native(function, preserve, *args)
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve)


@contextmanager
def checkpoints_differentiable() -> Iterator[None]:
    """Have torch.autograd.grad find the parameters inside reentrant checkpoints."""
    native = CheckpointFunction.apply
    overridden = vars(CheckpointFunction).get("apply")

    def apply(function, preserve, *args):
        return run_checkpoint(native, function, preserve, *args)

    CheckpointFunction.apply = staticmethod(apply)  # type: ignore[method-assign]
    try:
        yield
    finally:
        if overridden is None:
            del CheckpointFunction.apply
        else:
            CheckpointFunction.apply = overridden  # type: ignore[method-assign]
