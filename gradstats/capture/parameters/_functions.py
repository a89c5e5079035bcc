"""Custom autograd Functions, made visible.

PyTorch shows calls of a ``torch.autograd.Function`` neither to modes nor to tensor subclasses, so
from the first context on every ``apply`` passes through here. A Function of parameters, tensors
derived from them and constants is an operation like any other: its result is derived, and factors
are pulled back by the Function's own backward (see ``_replay``). A Function of data is assumed to
leave the examples where they are (see ``_returned``); if it takes parameters as well, the autograd
graph shows it as a use that was not seen (see ``_coverage``).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.autograd import Function
from torch.autograd.function import BackwardCFunction
from torch.nn.modules._functions import BackwardHookFunction, SyncBatchNorm
from torch.overrides import handle_torch_function
from torch.utils.checkpoint import CheckpointFunction

from gradstats._compiler import is_compiling
from gradstats.capture.following._returned import follow_unchanged, note_exchanged
from gradstats.capture.operations._graph import KEPT_APPLY_IS_UNSEEN
from gradstats.capture.operations._modes import innermost_mode, run_shown, run_unseen
from gradstats.capture.operations._names import function_name
from gradstats.capture.operations._nested import operands_of, tensors_in
from gradstats.capture.parameters._checkpoints import run_checkpoint
from gradstats.capture.parameters._derivation import Derived
from gradstats.capture.parameters._differentiated import check_hooks, differs
from gradstats.capture.parameters._nodes import Node
from gradstats.capture.parameters._tensors import node_of, nodes_of, value_of, wrap
from gradstats.errors import UnsupportedOperationError

if TYPE_CHECKING:
    from gradstats.capture._context import Context

# The class whose ``apply`` every ``Function.apply`` calls, even one kept from before any context.
SHARED_APPLY = torch.autograd.function._SingleLevelFunction

# The class in which ``apply`` is replaced. From PyTorch 2.14 on, ``Function`` itself has the
# innermost ``apply``. One that was kept from before any context is then not seen, and is refused if
# it takes parameters, or data whose examples do not lie as the contract says.
HOST = Function if KEPT_APPLY_IS_UNSEEN else SHARED_APPLY

# Modules whose Functions are not followed, and the exception. PyTorch's own run the caller's code,
# compiled graphs or communication between processes; only those of its quantisation are like a
# user's. Those of gradstats report their uses of parameters themselves.
NOT_FOLLOWED, QUANTISATION = ("torch.", "gradstats."), "torch.ao."

# The module of PyTorch's Functions that send data to other processes.
COLLECTIVES = "torch.distributed.nn.functional"

# The module of the Functions that run compiled graphs.
COMPILED = "torch._functorch._aot_autograd.runtime_wrappers"


@cache
def replace_apply() -> None:
    """From now on, show custom Functions to contexts."""
    HOST.apply = classmethod(apply_function)  # type: ignore[attr-defined]


def apply_function(cls, *args, **kwargs):
    """Run a custom Function, one without data as an operation that modes see.

    Replaces ``Function.apply``.
    """
    inner = super(SHARED_APPLY, cls).apply
    if not torch._C._len_torch_function_stack():
        return inner(*args, **kwargs)
    if cls.__module__ == COMPILED:
        return run_unseen(inner, args)
    # Between graphs the compiler would try to trace this as well.
    run = _run if get_eval_frame_callback() is None else torch.compiler.disable(_run)
    return run(cls, inner, args, kwargs)


def _run(cls, inner, args: tuple[Any, ...], kwargs: dict[str, Any]):
    # Inside a rule no mode is on, and the rule's Functions take parameters directly.
    enabled = torch._C._is_torch_function_enabled()
    return note_shown(_follow(cls, inner, args, kwargs) if enabled else inner(*args, **kwargs))


def note_shown(result: Any) -> Any:
    """Note on the results of a custom Function that its call was seen."""
    if KEPT_APPLY_IS_UNSEEN and not is_compiling():
        for tensor in tensors_in(result):
            if isinstance(tensor.grad_fn, BackwardCFunction):
                tensor.grad_fn.was_shown = True  # type: ignore[attr-defined]
    return result


def _follow(cls, inner, args: tuple[Any, ...], kwargs: dict[str, Any]):
    mode = innermost_mode()
    if mode is None:
        return inner(*args, **kwargs)
    tracker = mode.tracker
    if tracker.along_tangents and not cls.__module__.startswith("gradstats."):
        raise differs(f"the autograd Function {cls.__name__}")
    operands = operands_of(args, kwargs)
    nodes = nodes_of(operands)
    tracked = nodes and torch.is_grad_enabled() and not nodes[0].tracker.closed
    if tracked and nodes[0].tracker.registered(cls.apply) is not None:
        # The user registered a rule, but calls an ``apply`` kept from before the registration.
        return handle_torch_function(cls.apply, args, *args, **kwargs)
    if cls is CheckpointFunction:
        return run_checkpoint(inner, *args, **kwargs)
    if cls is BackwardHookFunction:
        check_hooks(tracker)
        if tracked:
            return _hook_module(tracker, inner, args)
    if cls.__module__.startswith(NOT_FOLLOWED) and not cls.__module__.startswith(QUANTISATION):
        result = inner(*args, **kwargs)
        follow_unchanged(tracker.marks, operands, result)
        if cls.__module__ == COLLECTIVES or cls is SyncBatchNorm:
            note_exchanged(tracker.marks, operands, result)
        return result
    data = tracker.marks.data_among(operands)
    if data:
        return tracker.functions.run(inner, args, kwargs, data)
    if not tracked:
        return inner(*args, **kwargs)
    before = [node.value._version for node in nodes]
    result = run_shown(mode, inner, operands, args, kwargs)
    for node, version in zip(nodes, before, strict=True):
        _check_unchanged(inner, node, version)
    return result


def _hook_module(tracker: Context, inner, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Run the Function that returns its operands, on whose node a module's backward hooks are set.

    The operands of a module may be data, parameters and derived tensors, side by side.
    """
    results = inner(*map(value_of, tensors))
    follow_unchanged(tracker.marks, tensors, results)

    def shown(node: Node | None, result: Tensor) -> Tensor:
        if node is None:
            return result
        # Of a tensor x the Function returns x.view_as(x).
        return wrap(Derived(tracker, result, Tensor.view_as, (node, node), {}, None))

    with torch._C.DisableTorchFunction():
        return tuple(map(shown, map(node_of, tensors), results))


def _check_unchanged(function, node: Node, version: int) -> None:
    value = node._value if isinstance(node, Derived) else node.value
    if value._version != version:
        raise UnsupportedOperationError(
            f"{function_name(function)} changed {node.describe()} in place, so that earlier uses "
            "of it can no longer be followed. Expected a Function that leaves its operands as they "
            "are: return a new tensor, or leave the parameter out by name with "
            f"exclude={node.names!r}.",
            node.names,
        )
