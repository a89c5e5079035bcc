"""Custom autograd Functions, made visible.

PyTorch shows no mode and no subclass what is handed to a ``torch.autograd.Function``. From the
first context on every ``apply`` comes by here: one whose tensors are tracked parameters, what was
made of them and constants is an operation like others, whose result is derived. It is pulled back
by the Function's own backward (see ``_replay``). One that takes data is taken to leave the examples
where they are (see ``Data.run_function``); if it takes parameters as well, it shows in the autograd
graph as a use that was not seen (see ``_coverage``).
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.autograd import Function
from torch.overrides import handle_torch_function
from torch.utils.checkpoint import CheckpointFunction

from gradstats.capture._checkpoints import run_checkpoint
from gradstats.capture._graph import INNERMOST
from gradstats.capture._names import function_name
from gradstats.capture._nested import operands_of
from gradstats.capture._nodes import Derived, Node
from gradstats.capture._tensors import node_of
from gradstats.capture._transforms import innermost_mode
from gradstats.errors import UnsupportedOperationError

if TYPE_CHECKING:
    from gradstats.capture._tracker import Tracker

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
    """Let custom Functions be seen.

    For good: Python looks up what it knows of all subclasses anew whenever this changes, and
    outside of contexts ``apply`` takes a third of a microsecond longer.
    """
    HOST.apply = classmethod(show_function)  # type: ignore[attr-defined]


def show_function(cls, *args, **kwargs):
    """Run a custom Function, as an operation that can be seen where no data are among its operands.

    It stands in the place of ``apply``.
    """
    inner = super(SHARED_APPLY, cls).apply
    # Within a rule, whose own Functions take parameters as they are, no mode is on.
    if not (torch._C._is_torch_function_enabled() and torch._C._len_torch_function_stack()):
        return inner(*args, **kwargs)
    # Between graphs the compiler looks at every call; in here there is nothing to trace.
    run = _run if get_eval_frame_callback() is None else torch.compiler.disable(_run)
    return run(cls, inner, args, kwargs)


def _run(cls, inner, args: tuple[Any, ...], kwargs: dict[str, Any]):
    mode = innermost_mode()
    if mode is None:
        return inner(*args, **kwargs)
    tracker: Tracker = mode.tracker
    operands = operands_of(args, kwargs)
    nodes = [node for node in map(node_of, operands) if node is not None]
    tracked = nodes and torch.is_grad_enabled() and not nodes[0].tracker.closed
    if tracked and nodes[0].tracker.registered(cls.apply) is not None:
        # And somebody kept what was there before.
        return handle_torch_function(cls.apply, args, *args, **kwargs)
    if cls is CheckpointFunction:
        return run_checkpoint(inner, *args, **kwargs)
    if cls.__module__.startswith(OWN) and not cls.__module__.startswith(QUANTISATION):
        return inner(*args, **kwargs)
    data = [item for item in operands if node_of(item) is None and tracker.is_data(item)]
    if data:
        return tracker.run_function(inner, args, kwargs, data)
    if not tracked:
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
