"""Functions that the compiler can record only outside of contexts.

The compiler skips a function that it could not compile ever after, and runs it eagerly. If that was
inside a context, the function is skipped inside contexts alone: elsewhere it may compile.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, wraps

from torch._C._dynamo.eval_frame import set_code_exec_strategy
from torch.utils.weak import WeakIdKeyDictionary

from gradstats.capture.operations._modes import modes_here

# Code objects that are skipped in contexts, by identity: different functions may have equal code.
SKIPPED: WeakIdKeyDictionary = WeakIdKeyDictionary()


@cache
def replace_frame_conversion() -> None:
    """From now on, note what the compiler skips inside contexts, until it is reset."""
    import torch._dynamo
    from torch._dynamo.convert_frame import ConvertFrame
    from torch._dynamo.types import FrameAction

    convert = ConvertFrame.__call__

    @wraps(convert)
    def call(self, frame, cache_entry, hooks, frame_state, skip=0):
        result = convert(self, frame, cache_entry, hooks, frame_state, skip=skip + 1)
        code, skips = frame.f_code, result.frame_exec_strategy.cur_action == FrameAction.SKIP
        if skips and modes_here():
            SKIPPED[code] = True
        else:
            SKIPPED.pop(code, None)
        return result

    ConvertFrame.__call__ = call  # type: ignore[method-assign]
    forget = torch._dynamo.reset

    @wraps(forget)
    def reset() -> None:
        SKIPPED.clear()
        forget()

    torch._dynamo.reset = reset


@contextmanager
def skipping() -> Iterator[None]:
    """Skip in a block what was skipped in earlier contexts."""
    from torch._dynamo.types import FrameAction, FrameExecStrategy

    def settle(action: FrameAction) -> None:
        for code in [*SKIPPED]:
            set_code_exec_strategy(code, FrameExecStrategy(action, FrameAction.DEFAULT))

    settle(FrameAction.SKIP)
    try:
        yield
    finally:
        settle(FrameAction.DEFAULT)
