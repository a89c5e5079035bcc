"""Custom autograd Functions of parameters and constants alone, made visible as operations.

PyTorch shows no mode and no subclass what is handed to a ``torch.autograd.Function``. From the
first context on every ``apply`` comes by here: one whose tensors are tracked parameters, what was
made of them and constants is an operation like others, whose result is derived. It is pulled back
by the Function's own backward (see ``_replay``). A Function that takes data as well runs as
always, and shows in the autograd graph as a use that was not seen (see ``_coverage``).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.autograd import Function
from torch.overrides import handle_torch_function

from gradstats.capture._graph import INNERMOST
from gradstats.capture._nested import operands_of
from gradstats.capture._nodes import Derived, Node, function_name
from gradstats.capture._tensors import TRACKED_TYPES, node_of
from gradstats.errors import UnsupportedOperationError

# What ``Function.apply`` hands over to, also where somebody kept it from before all contexts.
SHARED_APPLY = torch.autograd.function._SingleLevelFunction

# Where ``apply`` is looked up: from PyTorch 2.14 on ``Function`` has PyTorch's innermost itself. An
# ``apply`` that was kept from before all contexts is then not seen, and refused.
HOST = Function if vars(Function)["apply"] is INNERMOST else SHARED_APPLY

# PyTorch's own Functions run code of the caller's, graphs or communication between processes; those
# of its quantisation are like anybody's. Those of gradstats say what they do with a parameter.
OWN, QUANTISATION = ("torch.", "gradstats."), "torch.ao."


@cache
def show_functions() -> None:
    """Let custom Functions of tracked parameters alone be seen.

    For good: Python looks up what it knows of all subclasses anew whenever this changes, and with
    nothing tracked ``apply`` takes a third of a microsecond longer.
    """
    HOST.apply = classmethod(show_function)  # type: ignore[attr-defined]


def show_function(cls, *args, **kwargs):
    """Run a custom Function, as an operation that can be seen where no data are among its operands.

    It stands in the place of ``apply``.
    """
    inner = super(SHARED_APPLY, cls).apply
    if (
        TRACKED_TYPES.isdisjoint(map(type, args))
        or not torch.is_grad_enabled()
        # Within a rule, whose own Functions take parameters as they are.
        or not torch._C._is_torch_function_enabled()
    ):
        return inner(*args, **kwargs)
    # Between graphs the compiler looks at every call; in here there is nothing to trace.
    run = _run if get_eval_frame_callback() is None else torch.compiler.disable(_run)
    return run(cls, inner, args, kwargs)


def _run(cls, inner, args: tuple[Any, ...], kwargs: dict[str, Any]):
    operands = operands_of(args, kwargs)
    nodes = [node for node in map(node_of, operands) if node is not None]
    tracker = nodes[0].tracker if nodes else None
    if tracker is None or tracker.closed:
        return inner(*args, **kwargs)
    if tracker.registered(cls.apply) is not None:  # and somebody kept what was there before
        return handle_torch_function(cls.apply, args, *args, **kwargs)
    own = cls.__module__.startswith(OWN) and not cls.__module__.startswith(QUANTISATION)
    if own or any(node_of(item) is None and tracker.is_data(item) for item in operands):
        return inner(*args, **kwargs)
    before = [node.value._version for node in nodes]
    result = handle_torch_function(inner, args, *args, **kwargs)
    for node, version in zip(nodes, before, strict=True):
        _check_unchanged(inner, node, version)
    return result


def _check_unchanged(function, node: Node, version: int) -> None:
    value = node._value if isinstance(node, Derived) else node.value
    if value._version != version:
        names = [root.name for root in node.roots]
        raise UnsupportedOperationError(
            f"{function_name(function)} changed {node.describe()} in place, so that what was "
            "computed from it before is not known any more. Expected a Function that leaves its "
            "operands as they are: return a new tensor, or leave the parameter out by name with "
            f"exclude={names!r}.",
            names,
        )
