"""Whether the compiler is in use, and the devices on which contexts run graphs."""

from __future__ import annotations

import sys
from functools import cache, wraps

import torch
from torch import nn

from gradstats._compiler import imported_compiler
from gradstats.capture.operations._modes import modes_here

# Devices on which contexts run the graphs of compiled models. Elsewhere compiled models run eagerly
# inside contexts: on two cores of an AMD EPYC that takes 0.65 to 1.0 of the time (the three models
# of benchmarks/step_overhead.py), and nothing has to be compiled.
GRAPHS_RUN_ON = frozenset({"cuda"})

_used = False


def compiler_is_used() -> bool:
    """Whether torch.compile has been used; until then contexts need not prepare for it."""
    global _used
    # Outside of compiled code flex_attention compiles itself.
    flex_attention = "torch.nn.attention.flex_attention" in sys.modules
    _used = _used or flex_attention or _compiler_holds_backends()
    return _used


def _compiler_holds_backends() -> bool:
    """Whether the compiler has been used since its last reset."""
    dynamo = imported_compiler()
    if dynamo is None:
        return False
    # An import says little: optimizers import the compiler without using it.
    backends = getattr(dynamo.eval_frame, "cached_backends", None)
    return backends is None or any(backend is not None for backend in backends.values())


@cache
def replace_compile() -> None:
    """From now on, tell the contexts in which torch.compile is called that it is in use."""
    native = torch.compile

    @wraps(native)
    def compile(*args, **kwargs):
        if not torch.compiler.is_dynamo_compiling():
            for mode in modes_here():
                mode.tracker.expect_compiler()
        return native(*args, **kwargs)

    torch.compile = compile


def is_compiled(module: nn.Module) -> bool:
    """Whether a module was compiled in place, or is the wrapper of a compiled one."""
    return "_orig_mod" in module._modules or module._compiled_call_impl is not None


def _holds_compiled(model: nn.Module) -> bool:
    """Whether a model or a part of it was compiled."""
    modules = {model: None}  # each once, in a third of the calls that ``model.modules()`` takes
    pending = [model]
    for module in pending:
        if is_compiled(module):
            return True
        for child in module._modules.values():
            if child is not None and child not in modules:
                modules[child] = None
                pending.append(child)
    return False


def runs_graphs(model: nn.Module, loss_fn: object) -> bool:
    """Whether a context may run compiled graphs of a model, or of its loss function."""
    if "torch._dynamo" not in sys.modules:
        return False
    compiled = hasattr(loss_fn, "_torchdynamo_orig_callable")
    if not (compiled or _holds_compiled(model)):
        return False
    return any(map(graphs_run_on, model.parameters()))


def graphs_run_on(parameter: nn.Parameter) -> bool:
    """Whether a context runs compiled graphs on the device of a parameter."""
    return parameter.device.type in GRAPHS_RUN_ON
