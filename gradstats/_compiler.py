"""What PyTorch's compiler does in this thread: PyTorch's own answers hold for all threads."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, wraps
from threading import Lock
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._guards import CompileContext, TracingContext

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_LOCK = Lock()

# The stance of each block that runs eagerly and has not ended.
_STANCES: list[Any] = []


def is_compiling() -> bool:
    """Whether the caller is being traced, or is called by what traces.

    PyTorch's own answer is yes in every thread while one of them compiles, and in PyTorch 2.11 no
    for what tracing calls.
    """
    if torch.compiler.is_dynamo_compiling():
        return True
    return torch._C._len_torch_dispatch_stack() > 0 and _compiles_here()


def _compiles_here() -> bool:
    """Whether this thread, in which a dispatch mode is on, compiles or exports a model."""
    contexts = CompileContext.try_get(), TracingContext.try_get()
    return contexts != (None, None) or torch.compiler.is_compiling()


def called_from_compiled() -> bool:
    """Whether the caller is called by a function that is being compiled, or has been."""
    # The callback is False where compiled code may run but nothing new is compiled.
    return torch.compiler.is_dynamo_compiling() or callable(get_eval_frame_callback())


def in_python(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Make a function run in Python, outside of all graphs, when compiled code calls it."""

    @wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if called_from_compiled():
            return torch.compiler.disable(function)(*args, **kwargs)
        return function(*args, **kwargs)

    return call


def leave_graph(what: str) -> None:
    """Stop recording a graph: what follows has to run in Python.

    Args:
        what: what cannot be part of a graph, for the message.
    """
    if torch.compiler.is_dynamo_compiling():
        # The user's function then becomes part of no graph. Under fullgraph=True the compiler
        # reports this error.
        raise RuntimeError(
            f"a compiled graph contains {what}, which can be followed in eager mode only. Compile "
            "without fullgraph=True: this part then runs eagerly inside a context."
        )


def remembered(function: Callable[..., Result]) -> Callable[..., Result]:
    """Cache the results of a pure function of plain values, except where code is traced.

    There sizes may be symbols, and the compiler would warn of the cache.
    """
    cached = lru_cache(maxsize=4096)(function)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Result:
        return (function if is_compiling() else cached)(*args, **kwargs)

    return call


def imported_compiler() -> ModuleType | None:
    """Return the compiler if it has been imported, which takes seconds; else None."""
    if "torch._dynamo" not in sys.modules:
        return None
    return importlib.import_module("torch._dynamo")  # waits while another thread imports it


@contextmanager
def running_eagerly() -> Iterator[None]:
    """Have compiled models run eagerly until the last of such blocks ends, in whichever order."""
    with _LOCK:
        stance: Any = torch.compiler.set_stance("force_eager")
        # The stance before the first of these blocks is restored after the last.
        _STANCES.append(_STANCES[0] if _STANCES else stance)
    try:
        yield
    finally:
        with _LOCK:
            stance = _STANCES.pop()
            if not _STANCES:
                stance.__exit__(None, None, None)
