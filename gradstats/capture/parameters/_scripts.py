"""Functions and methods of TorchScript, made visible as operations.

PyTorch does not show function modes what TorchScript runs, so from the first context on every call
passes through here. A function that neither writes in place nor draws random numbers is followed
through the Python function that it was compiled from, if that still exists. All others are opaque.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from typing import Any

import torch
from torch.overrides import handle_torch_function

from gradstats._compiler import is_compiling
from gradstats.capture.following._results import follow_results
from gradstats.capture.operations._modes import innermost_mode
from gradstats.capture.operations._nested import operands_of
from gradstats.capture.operations._operations import SCRIPTS
from gradstats.capture.parameters._transforms import transform_level


@cache
def replace_script_calls(follow_through: Callable[[Any, Callable[..., Any]], None]) -> None:
    """From now on, show calls of TorchScript to contexts, also of what was compiled before.

    Args:
        follow_through: called with a script and the Python function through which to follow it.
    """
    for kind in SCRIPTS:
        kind.__call__ = _following(kind.__call__, follow_through)  # type: ignore[method-assign]


def _following(call, follow_through):
    def run(script, *args, **kwargs):
        mode = innermost_mode() if torch._C._is_torch_function_enabled() else None
        if mode is None or transform_level() is not None or is_compiling():
            return call(script, *args, **kwargs)
        operands = operands_of(args, kwargs)
        source = _source(script) if mode.tracker.marks.data_among(operands) else None
        if source is not None:
            follow_through(script, source)
            return handle_torch_function(script, operands, *args, **kwargs)
        result = call(script, *args, **kwargs)
        follow_results(mode.tracker, script, args, kwargs, result)
        return result

    return run


@lru_cache(maxsize=256)
def _source(script) -> Callable[..., Any] | None:
    """Return the Python function that a script was compiled from, if it may run once more."""
    # A traced script, which has no name, need not do what its function does: it took one branch.
    scripted = getattr(script, "__name__", None) == "ScriptFunction"
    source = vars(script).get("_torchdynamo_inline") if scripted else None
    if source is None:
        return None
    graph = script.inlined_graph
    # Drop branches that are never taken, such as the one in place of silu(x, inplace=False).
    torch._C._jit_pass_constant_propagation(graph)
    return source if all(map(_is_pure, _steps(graph))) else None


def _steps(graph) -> Iterator[Any]:
    for step in graph.nodes():
        yield step
        for block in step.blocks():
            yield from _steps(block)


def _is_pure(step) -> bool:
    """Whether a step of a script's graph neither writes, nor draws, nor runs Python."""
    if not step.kind().startswith("aten::"):
        return step.kind().startswith("prim::") and step.kind() != "prim::PythonOp"
    name, _, overload = step.schema().partition("(")[0].removeprefix("aten::").partition(".")
    operator = getattr(getattr(torch.ops.aten, name, None), overload or "default", None)
    tags = getattr(operator, "tags", ())
    return "Tensor(a!" not in step.schema() and torch.Tag.nondeterministic_seeded not in tags
