"""The compiler, told apart by thread: what PyTorch says of it, and to it, holds for all of them."""

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
    """Whether the code that asks is traced, or runs inside what traces it.

    PyTorch's answer is yes in every thread while one of them compiles, and PyTorch 2.11's is no to
    what runs inside.
    """
    if torch.compiler.is_dynamo_compiling():
        return True
    return torch._C._len_torch_dispatch_stack() > 0 and _compiles_here()


def _compiles_here() -> bool:
    """Whether this thread, in which a dispatch mode is on, compiles a model or exports one."""
    contexts = CompileContext.try_get(), TracingContext.try_get()
    return contexts != (None, None) or torch.compiler.is_compiling()


def called_from_compiled() -> bool:
    """Whether the code that asks was called inside a function that is being compiled, or was."""
    # Where compiled code may run, and nothing is compiled anew, there is False for a callback.
    return torch.compiler.is_dynamo_compiling() or callable(get_eval_frame_callback())


def in_python(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Make a function that compiled code calls run in Python, outside of all graphs."""

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
        # The user's function stands in no graph then. Under fullgraph=True the compiler reports
        # this error.
        raise RuntimeError(
            f"a compiled graph contains {what}, which can be followed in eager mode only. Compile "
            "without fullgraph=True: this part then runs eagerly inside a context."
        )


def remembered(function: Callable[..., Result]) -> Callable[..., Result]:
    """Make a pure function of plain values remember its results, except where code is traced.

    There sizes may be symbols, and the compiler would warn.
    """
    cached = lru_cache(maxsize=4096)(function)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Result:
        return (function if is_compiling() else cached)(*args, **kwargs)

    return call


def imported_compiler() -> ModuleType | None:
    """Return the compiler; None before anybody imported it, which takes seconds."""
    if "torch._dynamo" not in sys.modules:
        return None
    return importlib.import_module("torch._dynamo")  # waits where another thread imports it


@contextmanager
def running_eagerly() -> Iterator[None]:
    """Have compiled models run eagerly until the last such block ends, in whichever order."""
    with _LOCK:
        stance: Any = torch.compiler.set_stance("force_eager")
        # What was there before the first of them is what is there after the last.
        _STANCES.append(_STANCES[0] if _STANCES else stance)
    try:
        yield
    finally:
        with _LOCK:
            stance = _STANCES.pop()
            if not _STANCES:
                stance.__exit__(None, None, None)
