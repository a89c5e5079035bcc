"""PyTorch functions written in Python, run so that the operations inside them are seen.

A function mode is off while it handles a call, so it would not see the operations inside such a
function. They matter if the function uses parameters that PyTorch does not report among its
operands, such as a learned temperature, or what a given callable uses. They also matter if an
operand is not a tensor but holds some, and its own ``__torch_function__`` decides what is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import cache
from types import FunctionType
from typing import Any

from torch import Tensor
from torch.nn import functional
from torch.overrides import handle_torch_function

# Functions that use arguments that PyTorch does not report as operands, or that only call functions
# that have rules.
OPENED: tuple[Callable[..., Any], ...] = (
    functional.gumbel_softmax,
    functional.triplet_margin_with_distance_loss,
    functional.local_response_norm,
    functional.lp_pool1d,
    functional.lp_pool2d,
    functional.lp_pool3d,
    # PyTorch 2.11 does not have it.
    *filter(None, [getattr(functional, "linear_cross_entropy", None)]),
)


def opened(function: Any) -> Callable[..., Any]:
    """Return a copy of a PyTorch function that skips its ``__torch_function__`` dispatch."""
    names = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    scope = {**function.__globals__, **dict.fromkeys(names, lambda *_: False)}
    result = FunctionType(
        function.__code__, scope, function.__name__, function.__defaults__, function.__closure__
    )
    result.__kwdefaults__ = function.__kwdefaults__
    return result


def as_operands_say(
    mode: AbstractContextManager, function: Any, types, args: tuple[Any, ...], kwargs
) -> Any:
    """Run a function as operands that are not tensors define it; NotImplemented if none does.

    Such operands are containers of named tensors, quantised values with their scales, and lazy
    matrices.

    Args:
        mode: sees the operations that are run instead.
        function, args, kwargs: the call.
        types: of the operands that have a ``__torch_function__``, without tracked ones, which have
            none outside a context.
    """
    for kind in types:
        if issubclass(kind, Tensor):
            continue
        # Of the operand, not its class: PyTorch still accepts ones that are no class methods.
        handler = next(_held(args, kwargs, kind), kind).__torch_function__
        with mode:
            result = handler(function, types, args, kwargs)
        if result is not NotImplemented:
            return result
    return NotImplemented


def _held(args: tuple[Any, ...], kwargs: dict[str, Any], kind: type) -> Iterator[Any]:
    """Yield the operands of a class, in order, also those in lists and tuples."""
    for item in (*args, *kwargs.values()):
        if type(item) is kind:
            yield item
        elif isinstance(item, (tuple, list)):
            yield from _held(tuple(item), {}, kind)


@cache
def show_weight_of_l1_loss() -> None:
    """Have ``l1_loss`` pass its weight to modes: PyTorch lists it as an operand but drops it."""
    name = "_show_weight"
    setattr(functional, name, _with_weight)
    code = functional.l1_loss.__code__
    names = (name if each == "handle_torch_function" else each for each in code.co_names)
    functional.l1_loss.__code__ = code.replace(co_names=tuple(names))


def _with_weight(function, operands, *args, **kwargs):
    if len(operands) > 2:
        kwargs.setdefault("weight", operands[2])
    return handle_torch_function(function, operands, *args, **kwargs)
