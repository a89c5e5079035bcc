"""The autograd engine, called below all of its public ways in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor


class BackwardListener(Protocol):
    """What wants to know when the backward of a context starts and when it has ended."""

    def before_backward(self, losses: Sequence[Tensor], start: Sequence[Tensor | None]) -> None: ...

    def after_backward(self) -> None: ...


@contextmanager
def gradients_aside(leaves: Sequence[Tensor]) -> Iterator[None]:
    """Take back for a block what backwards add to the gradients of some tensors."""
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
        in_threads: in one for each device. In this one alone, rules in Python take an eighth less
            time: no other has to be given the interpreter for each of them.
    """
    before = torch._C._is_multithreading_enabled()
    with torch.autograd.set_multithreading_enabled(before and in_threads):
        torch.autograd.Variable._execution_engine.run_backward(
            tensors,
            gradients,
            bool(retain_graph),
            False,  # create_graph: refused before
            inputs,
            allow_unreachable=True,
            accumulate_grad=True,
        )


@contextmanager
def without_hooks(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Run a backward without the parameters' hooks, which change gradients and expect some."""
    hooks = [parameter._backward_hooks for parameter in parameters]
    for parameter in parameters:
        parameter._backward_hooks = None
    try:
        yield
    finally:
        for parameter, own in zip(parameters, hooks, strict=True):
            parameter._backward_hooks = own
