"""What PyTorch's compiler does in this thread; PyTorch's own answers are for all threads."""

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

# For each open block of ``running_eagerly``, the stance to end with.
_STANCES: list[Any] = []


def is_compiling() -> bool:
    """Whether the caller is being traced, or is called by tracing code.

    torch.compiler.is_compiling is true in every thread while one of them compiles and, in PyTorch
    2.11, false for code that tracing calls.
    """
    if torch.compiler.is_dynamo_compiling():
        return True
    return torch._C._len_torch_dispatch_stack() > 0 and _compiles_here()


def _compiles_here() -> bool:
    """Whether this thread, which has a dispatch mode on, compiles or exports a model."""
    contexts = CompileContext.try_get(), TracingContext.try_get()
    return contexts != (None, None) or torch.compiler.is_compiling()


def called_from_compiled() -> bool:
    """Whether the caller is called by a function that is being or has been compiled."""
    # The callback is False where compiled code may run but nothing new is compiled.
    return torch.compiler.is_dynamo_compiling() or callable(get_eval_frame_callback())


def in_python(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Make a function run in Python, outside all graphs, when compiled code calls it."""

    @wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if called_from_compiled():
            return torch.compiler.disable(function)(*args, **kwargs)
        return function(*args, **kwargs)

    return call


def leave_graph(what: str) -> None:
    """Stop recording a graph, because what follows has to run in Python.

    Args:
        what: describes what cannot be part of a graph, for the message.
    """
    if torch.compiler.is_dynamo_compiling():
        # The compiler then leaves the user's function out of all graphs. Under fullgraph=True it
        # reports this error.
        raise RuntimeError(
            f"a compiled graph contains {what}, which can be followed only in eager mode. Compile "
            "without fullgraph=True: this part then runs eagerly inside a context."
        )


def remembered(function: Callable[..., Result]) -> Callable[..., Result]:
    """Cache the results of a pure function of plain values, except while code is traced.

    Then sizes may be symbols, and the compiler would warn of the cache.
    """
    cached = lru_cache(maxsize=4096)(function)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Result:
        return (function if is_compiling() else cached)(*args, **kwargs)

    return call


def imported_compiler() -> ModuleType | None:
    """Return torch._dynamo if it has been imported, which takes seconds; else None."""
    if "torch._dynamo" not in sys.modules:
        return None
    return importlib.import_module("torch._dynamo")  # waits while another thread imports it


@contextmanager
def running_eagerly() -> Iterator[None]:
    """Run compiled models eagerly until the last open block of this kind ends, in any order."""
    with _LOCK:
        stance: Any = torch.compiler.set_stance("force_eager")
        # The last block to end restores the stance before the first.
        _STANCES.append(_STANCES[0] if _STANCES else stance)
    try:
        yield
    finally:
        with _LOCK:
            stance = _STANCES.pop()
            if not _STANCES:
                stance.__exit__(None, None, None)
