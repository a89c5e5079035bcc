"""Calls of a contraction: through its torch operator, or straight to its launcher.

Calling an operator takes longer than a small launch. It is needed in compiled graphs, under modes
and transforms of torch, and to refuse derivatives; everywhere else the launcher is called.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

# Types of tensors whose memory holds their values, unless their negative or zero bit is set.
PLAIN = frozenset({Tensor, Parameter})

# Types that most options have; none is a tensor.
VALUES = frozenset({type(None), bool, int, float, str, tuple, torch.dtype})


def launcher(name: str, module: str, leading: int, names: Callable[[], list[str]]) -> Callable:
    """Return a contraction's launcher, imported at its first call, behind its operator's signature.

    Args:
        name: of the contraction and of its launcher.
        module: of this package, with the launcher.
        leading: how many arguments the launcher takes by position: the operands.
        names: returns those of all arguments; called after the operator is defined.
    """
    launch: Callable | None = None

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal launch
        if launch is None:
            try:
                launch = getattr(importlib.import_module(f"gradstats.kernels.{module}"), name)
            except ImportError as error:
                raise RuntimeError(
                    f"gradstats::{name} on CUDA needs triton, which cannot be imported ({error}): "
                    "install triton>=3.6, or choose the PyTorch backend"
                ) from error
        if len(args) > leading:
            # launchers take everything after the operands by name
            kwargs |= zip(names()[leading:], args[leading:], strict=False)
            args = args[:leading]
        if is_here(args[0]):
            return launch(*args, **kwargs)
        # a kernel is launched on the current device, wherever its operands are
        with torch.cuda.device(args[0].device):
            return launch(*args, **kwargs)

    return call


def parted(call: Callable) -> Callable:
    """Copy results that share memory, so that each fills an allocation of its own.

    Compiled code assumes that every output of an operator begins its own allocation, and PyTorch
    forbids outputs that alias.
    """

    @functools.wraps(call)
    def call_and_part(*args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        return tuple(map(_alone, result)) if isinstance(result, tuple) else _alone(result)

    return call_and_part


def _alone(result: Tensor) -> Tensor:
    # launchers return the same empty tensor for every result that is not wanted
    own = result.numel() and result.untyped_storage().nbytes() == result.nbytes
    return result if own else result.clone()


def at_once(operator: Callable, call: Callable) -> Callable:
    """Return a contraction that calls the launcher where the operator would add nothing."""

    def contract(*args: Any, **kwargs: Any) -> Any:
        if args and args[0].is_cuda and are_plain(*args, *kwargs.values()):
            return call(*args, **kwargs)
        return operator(*args, **kwargs)

    return contract


def are_plain(*arguments: Any) -> bool:
    """Whether an operator would add nothing: plain tensors, and no mode or transform of torch."""
    if _observed():
        return False
    for each in arguments:
        kind = type(each)
        if kind in PLAIN:
            if each.is_neg() or each._is_zerotensor():
                return False
        elif kind not in VALUES and isinstance(each, Tensor):
            return False
    return True


def is_here(tensor: Tensor) -> bool:
    """Whether a tensor is on the current CUDA device, where launches go, or on none."""
    device = tensor.device
    if device.type != "cuda" or _has_one_device():
        return True  # asking for the current device takes longer
    return device.index == torch.cuda.current_device()


@functools.cache
def _has_one_device() -> bool:
    return torch.cuda.device_count() == 1


def _observed() -> bool:
    """Whether torch would do more than compute: differentiate, transform, trace, or call modes."""
    return (
        torch.compiler.is_dynamo_compiling()
        or torch.is_grad_enabled()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._is_torch_function_mode_enabled()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
    )
