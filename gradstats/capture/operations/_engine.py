"""Running the autograd engine directly, below its public functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import Tensor


class BackwardListener(Protocol):
    """Is called before and after the backward of a context."""

    def before_backward(
        self,
        losses: Sequence[Tensor],
        start: Sequence[Tensor | None],
        inputs: Sequence[Tensor] | None,
    ) -> None: ...

    def after_backward(self) -> None: ...


@contextmanager
def _aside(tensors: Sequence[Tensor], attribute: str) -> Iterator[None]:
    """Set an attribute of some tensors to None for a block."""
    before = [getattr(tensor, attribute) for tensor in tensors]
    for tensor in tensors:
        setattr(tensor, attribute, None)
    try:
        yield
    finally:
        for tensor, value in zip(tensors, before, strict=True):
            setattr(tensor, attribute, value)


def gradients_aside(leaves: Sequence[Tensor]) -> AbstractContextManager[None]:
    """Set aside the gradients of some tensors for a block, and drop what backwards add."""
    return _aside(leaves, "grad")


def without_hooks(parameters: Sequence[Tensor]) -> AbstractContextManager[None]:
    """Remove the parameters' hooks for a block: they change gradients, and expect to get one."""
    return _aside(parameters, "_backward_hooks")


def run_backward(
    tensors: tuple,
    gradients: tuple,
    retain_graph: bool | None = None,
    inputs: tuple = (),
    *,
    in_threads: bool = True,
) -> None:
    """Run the autograd engine, under the active modes.

    Args:
        tensors, gradients, retain_graph, inputs: as for the engine.
        in_threads: use one thread for each device. In the calling thread alone, rules in Python
            take an eighth less time: the interpreter lock need not be handed over for each.
    """
    alone = not in_threads and torch._C._is_multithreading_enabled()
    try:
        if alone:
            _allow_threads(False)
        torch.autograd.Variable._execution_engine.run_backward(
            tensors,
            gradients,
            bool(retain_graph),
            False,  # create_graph: refused before
            inputs,
            allow_unreachable=True,
            accumulate_grad=True,
        )
    finally:
        if alone:
            _allow_threads(True)


def _allow_threads(allowed: bool) -> None:
    # PyTorch would show this to modes like an operation.
    with torch._C.DisableTorchFunction():
        torch._C._set_multithreading_enabled(allowed)
