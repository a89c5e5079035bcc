"""Running the autograd engine directly, below its public functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor


class BackwardListener(Protocol):
    """Is told when the backward of a context starts and when it has ended."""

    def before_backward(
        self,
        losses: Sequence[Tensor],
        start: Sequence[Tensor | None],
        inputs: Sequence[Tensor] | None,
    ) -> None: ...

    def after_backward(self) -> None: ...


@contextmanager
def gradients_aside(leaves: Sequence[Tensor]) -> Iterator[None]:
    """Set aside the gradients of some tensors for a block: what backwards add there is dropped."""
    grads = [(leaf, leaf.grad) for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    try:
        yield
    finally:
        for leaf, grad in grads:
            leaf.grad = grad


def run_backward(
    tensors: tuple,
    gradients: tuple,
    retain_graph: bool | None = None,
    inputs: tuple = (),
    *,
    in_threads: bool = True,
) -> None:
    """Run the autograd engine, under whichever modes are on.

    Args:
        tensors, gradients, retain_graph, inputs: as the engine takes them.
        in_threads: use one thread for each device. In the calling thread alone, rules in Python
            take an eighth less time: the interpreter need not be handed over for each of them.
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
    # PyTorch shows this to modes as it shows them every operation; nobody needs to see it.
    with torch._C.DisableTorchFunction():
        torch._C._set_multithreading_enabled(allowed)


@contextmanager
def without_hooks(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Take off the parameters' hooks for a block: they change gradients, and expect to get one."""
    hooks = [parameter._backward_hooks for parameter in parameters]
    for parameter in parameters:
        parameter._backward_hooks = None
    try:
        yield
    finally:
        for parameter, own in zip(parameters, hooks, strict=True):
            parameter._backward_hooks = own
