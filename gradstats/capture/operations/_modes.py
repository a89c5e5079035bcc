"""The function modes of contexts on this thread's stack, and running code without them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
)

from gradstats.capture.operations._graph import hooks_on_saved
from gradstats.capture.operations._nested import tensors_in

if TYPE_CHECKING:
    from gradstats.capture._context import Context


class ContextMode(TorchFunctionMode):
    """The function mode of a context."""

    def __init__(self, tracker: Context):
        super().__init__()
        self.tracker = tracker


def is_of_context(mode: TorchFunctionMode) -> bool:
    """Whether a function mode is that of a context."""
    return isinstance(mode, ContextMode)


def modes_here() -> list[ContextMode]:
    """Return the modes of the contexts that are open in this thread, the innermost last."""
    modes = _get_current_function_mode_stack()
    return [each for each in modes if isinstance(each, ContextMode) and not each.tracker.closed]


def innermost_mode() -> ContextMode | None:
    """Return the mode of the innermost context that is not fetching data; None without one."""
    return next((mode for mode in reversed(modes_here()) if not mode.tracker.fetching), None)


def remove_modes(chosen: Callable[[TorchFunctionMode], bool]) -> None:
    """Remove the chosen function modes from this thread's stack, wherever they stand."""
    modes = _get_current_function_mode_stack()
    left = [mode for mode in modes if not chosen(mode)]
    if len(left) < len(modes):
        first = next(n for n, mode in enumerate(modes) if chosen(mode))
        _replace(len(modes) - first, left[first:])


def _replace(count: int, modes: list[Any]) -> None:
    """Replace the last ``count`` function modes of this thread by others."""
    for _ in range(count):
        _pop_mode()
    for mode in modes:
        _push_mode(mode)


def run_shown(
    mode: ContextMode, function: Callable[..., Any], operands: Sequence[Tensor], args, kwargs
) -> Any:
    """Have a context's mode handle a function that PyTorch does not show to modes.

    This mode and those above it on the stack are off meanwhile, as when PyTorch calls it.

    Args:
        mode: of the context, on the stack.
        function, args, kwargs: the call.
        operands: the tensors among the arguments.
    """
    modes = _get_current_function_mode_stack()
    place = max(number for number, each in enumerate(modes) if each is mode)
    kinds = dict.fromkeys(map(type, operands))
    plain = Tensor.__torch_function__, torch._C._disabled_torch_function_impl
    types = [kind for kind in kinds if kind.__torch_function__ not in plain]  # type: ignore[attr-defined]
    _replace(len(modes) - place, [])
    try:
        return mode.__torch_function__(function, tuple(types), args, kwargs)
    finally:
        _replace(0, modes[place:])


@contextmanager
def without_contexts() -> Iterator[None]:
    """Hide what runs inside from all contexts; modes of others still see it."""
    before = _get_current_function_mode_stack()
    remove_modes(is_of_context)
    try:
        with torch._C._EnableTorchFunction():
            yield
    finally:
        _replace(torch._C._len_torch_function_stack(), before)


def run_unseen(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Run a compiled graph, and later its backward, without the modes of contexts.

    Its operations were followed when it was traced. Other modes stay on, since a graph may run
    functions that use modes of their own.
    """
    modes = modes_here()
    with without_contexts(), torch._C.DisableTorchFunctionSubclass(), _unpacking_seen(modes):
        result = function(*args)
    with torch._C.DisableTorchFunction():  # the mode would take this for the user's
        for item in tensors_in(result):
            if item.grad_fn is not None:
                item.grad_fn.register_prehook(_unseen_in_backward)
                break  # all results have the same node
    return result


def _unpacking_seen(modes: Sequence[ContextMode]) -> AbstractContextManager[object]:
    """Turn these modes on while tensors that a graph saved for its backward are unpacked.

    If there is a checkpoint around the graph, unpacking runs that part of the forward again.
    """
    hooks = hooks_on_saved()
    if hooks is None:
        return nullcontext()
    pack, unpack = hooks

    def unpack_seen(packed: Any) -> Tensor:
        before = _get_current_function_mode_stack()
        for mode in modes:
            if not mode.tracker.closed and mode not in before:
                _push_mode(mode)
        try:
            with torch._C._EnableTorchFunction():
                return unpack(packed)
        finally:
            _replace(torch._C._len_torch_function_stack(), before)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack_seen)


def _unseen_in_backward(gradients: tuple[Tensor | None, ...]) -> None:
    """Remove the modes of contexts for one node of an autograd graph.

    The engine restores them before the next node.
    """
    remove_modes(is_of_context)
    torch._C.DisableTorchFunctionSubclass().__enter__()
