"""Reentrant activation checkpoints, run as those of the other kind.

The graph of a reentrant checkpoint appears in its own backward only: no forward shows what happens
to the examples inside, and ``torch.autograd.grad`` finds no parameter there. The other kind takes
the same memory and gives the same gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from gradstats.capture._nodes import Node, unique_roots
from gradstats.errors import UnsupportedOperationError


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


def check_arguments(nodes: Sequence[Node]) -> None:
    """Raise if a checkpoint would find copies of tracked arguments when it runs again.

    Args:
        nodes: of its arguments.
    """
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        return
    names = [root.name for root in unique_roots(nodes)]
    raise UnsupportedOperationError(
        f"torch.utils.checkpoint.checkpoint was given {nodes[0].describe()} as an argument inside "
        "of another checkpoint, or of other hooks on saved tensors, so that a copy of it would "
        "stand there when it runs again. Expected a function that takes the parameter from its "
        "module, checkpoint(lambda x: f(x, self.weight), x); or leave it out by name with "
        f"exclude={names!r}.",
        names,
    )


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
