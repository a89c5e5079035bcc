"""Which tensors belong to no example: buffers, frozen parameters and what is computed from them.

A tensor of positions whose length happens to equal the batch size looks exactly like a batch. Shape
cannot tell them apart; where the tensor came from can. For the duration of a context a function
mode follows what is computed without any data: such tensors are *constants*, and what is computed
from parameters and constants alone stays derived until it meets data (see ``_derived``).

Random tensors, and tensors made of values that the caller gives, count as data where their example
axis has the batch's size: noise and time steps drawn inside a context are drawn for each example.
Where taking given values for data leads to a refusal, callers that can run the forward again do so
with these as constants.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
)
from torch.utils._device import _device_constructors

from gradstats._compiler import imported_compiler, is_compiling
from gradstats.capture._batch_norm import check_native_statistics, check_statistics
from gradstats.capture._derivation import Derived
from gradstats.capture._derivatives import backward, backward_of_one, gradients
from gradstats.capture._formats import NORMALISATIONS, settle_format
from gradstats.capture._functions import show_function
from gradstats.capture._layout import (
    CHANGES,
    ON_NESTED,
    PLAIN_VIEWS,
    aligned,
    is_followed,
    keeps_examples,
    keeps_rows,
    leaves,
    may_move,
    stays,
)
from gradstats.capture._marks import leave_graph
from gradstats.capture._names import function_name
from gradstats.capture._nested import flatten, operands_of
from gradstats.capture._opened import OPENED, OPENED_IF_TRACKED, opened
from gradstats.capture._operations import (
    BLANKS,
    CALLERS_VALUES,
    EXTREMES,
    FACTORIES,
    MOVES_IN_PLACE,
    OPAQUE,
    PRODUCTS,
    QUESTIONS,
    READS_ONLY_FIRST,
    RESHAPES,
    SCRAMBLES,
    TRANSPOSING_GETTERS,
    broadcasts,
    changed_by,
    is_in_place,
    keeps,
    places_changed,
    takes_batch_first,
)
from gradstats.capture._reductions import OVER_AXES, axes_of, is_over_axes, runs_over
from gradstats.capture._refusals import BACKWARD_OF_ONES_OWN, check_nested, refuse_on_derived
from gradstats.capture._repeated import NOTED
from gradstats.capture._sequences import PRESCRIBES, prescribed_layouts
from gradstats.capture._signatures import by_place, read_signatures
from gradstats.capture._tensors import TRACKED_TYPES, node_of, run
from gradstats.capture._transforms import check_hidden, transform_level
from gradstats.capture._writes import CHANGES_IN_PLACE, WRITES, is_write

if TYPE_CHECKING:
    from gradstats.capture._tracker import Tracker

# Functions that make tensors and that the compiler does not list as overridable.
HIDDEN_IN_GRAPHS = (torch.as_strided, torch.fill, torch.vander)

# What the compiler of PyTorch 2.14 shows in place of the getters that transpose.
TRANSPOSES_IN_GRAPHS = (
    torch.ops.aten.numpy_T,
    torch.ops.aten.mT,
    torch.ops.aten.matrix_H,
    torch.ops.aten.mH,
)
IN_GRAPHS = dict(zip(TRANSPOSES_IN_GRAPHS, TRANSPOSING_GETTERS, strict=True))

# Names that operations give their first operand.
FIRST_NAMES = frozenset({"input", "x", "A", "self", "query"})

# Operand types without a __torch_function__ of anybody else's.
ORDINARY_TYPES = TRACKED_TYPES | {Tensor}

# Operations of which ``keeps_examples`` cannot tell.
WATCHED = (
    frozenset(WRITES) | frozenset(OVER_AXES) | CHANGES | PRESCRIBES | FACTORIES
    | BLANKS | {torch.broadcast_tensors, torch.cdist}
)  # fmt: skip


def is_watched(func) -> bool:
    return func in WATCHED


def may_return_nothing(func) -> bool:
    """Whether an operation on tensors may return none, and change one instead."""
    return func is Tensor.__setitem__ or type(func) in OPAQUE


# Functions that look operations up in large tables. To a graph that is traced their results are
# constants: it would guard every entry of a table that it saw, and compare all of them each time
# it is entered, which takes longer than the graph itself.
LOOKS_UP = (
    is_watched, is_followed, is_over_axes, axes_of, may_move, keeps, broadcasts, takes_batch_first,
    is_in_place, is_write, places_changed,
)  # fmt: skip

# Getters that return a tensor which existed before.
FINDS = frozenset(getattr(Tensor, name).__get__ for name in ("grad", "_base"))


class ConstantTracking(TorchFunctionMode):
    """Marks what is computed from constants alone, and watches for what couples examples."""

    def __init__(self, tracker: Tracker):
        super().__init__()
        self.tracker = tracker
        if imported_compiler() is not None:
            prepare_for_compiler()

    def take_off(self) -> None:
        """Remove this mode from the thread's stack, wherever it stands and however often.

        Contexts may end in any order, and an interrupt may have left a mode on the stack twice.
        Modes of contexts that another thread closed are removed too.
        """
        modes = _get_current_function_mode_stack()
        stays = [mode for mode in modes if not (mode is self or _is_closed(mode))]
        first = next((n for n, mode in enumerate(modes) if mode not in stays), len(modes))
        for _ in modes[first:]:
            _pop_mode()
        for mode in stays[first:]:
            _push_mode(mode)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if is_compiling():
            result = func(*args, **kwargs)
            # But not where PyTorch itself inspects the operands of what it traces.
            followed = isinstance(result, (Tensor, tuple, list)) or may_return_nothing(func)
            if torch.compiler.is_dynamo_compiling() and followed:
                self.follow(IN_GRAPHS.get(func, func), args, kwargs, result)
            return result
        if get_eval_frame_callback() is None:
            return self.handle(func, types, args, kwargs)
        # Between graphs the compiler would try to trace this handler too.
        return outside_graphs()(self, func, types, args, kwargs)

    def handle(self, func, types, args, kwargs):
        """Run one operation of the user's code, eagerly."""
        if self.tracker.closed or self.tracker.fetching:
            # Another thread closed the context, or a loader is making data.
            return func(*args, **kwargs)
        tracked = not TRACKED_TYPES.isdisjoint(types)
        if func in OUT_OF_THE_ORDINARY:
            if func in QUESTIONS and not tracked:
                return func(*args, **kwargs)
            if func in INSTEAD:
                return INSTEAD[func](self, *args, **kwargs)
            if func in CHECKS:
                CHECKS[func](self, *args, **kwargs)
        if tracked and ORDINARY_TYPES.issuperset(types):
            # The call would end here as well; this saves parsing its arguments once more.
            result = run(func, args, kwargs)
            followed, self.tracker.followed = self.tracker.followed, None
            if followed is not None and followed is result:
                return result
        else:
            if tracked and not ORDINARY_TYPES.issuperset(types):
                check_nested(func, operands_of(args, kwargs))
            result = func(*args, **kwargs)
        if isinstance(result, (Tensor, tuple, list)) or may_return_nothing(func):
            if func in FINDS:
                return result
            if self.tracker.seen is not None:
                self.tracker.note_seen(result)
            if transform_level() is not None:
                check_hidden(self.tracker, func, args, kwargs, result)
            else:
                self._follow_repeated(func, args, kwargs, result)
                if func in NORMALISATIONS and node_of(result) is None:
                    settle_format(func, args, kwargs, result)
        return result

    def _note_training(self, tensor, requires_grad=True) -> None:
        self.tracker.note_training(tensor, bool(requires_grad))

    def _note_numbers(self, tensor, data) -> None:
        """Compute with the numbers that a tensor derived from parameters is being given."""
        node = node_of(tensor)
        if isinstance(node, Derived):
            node.take_numbers(data)

    def _check_hook(self, tensor, hook) -> None:
        refuse_on_derived(Tensor.register_hook, tensor, BACKWARD_OF_ONES_OWN)

    def _check_detached(self, tensor) -> None:
        refuse_on_derived(Tensor.detach_, tensor, "Write x = x.detach().")

    def _follow_repeated(self, func, args, kwargs, result) -> None:
        tracker = self.tracker
        alike = tracker.likeness(func, args, kwargs, result)
        if alike is None:
            self.follow(func, args, kwargs, result)
            return
        key, results = alike
        found = NOTED.get(key)
        if found is None:
            before = tracker.noted
            self.follow(func, args, kwargs, result)
            tracker.remember(key, results, before)
        elif found:
            tracker.note_again(results, found)

    def follow(self, func, args, kwargs, result) -> None:
        tracker = self.tracker
        if "axis" in kwargs:  # NumPy's name for dim
            kwargs = {**kwargs, "dim": kwargs["axis"]}
            del kwargs["axis"]
        named = False
        if kwargs and (not args or any(isinstance(item, Tensor) for item in kwargs.values())):
            if not torch.compiler.is_dynamo_compiling():
                read_signatures()
            args, kwargs = by_place(func, args, kwargs)
            left = [item for item in kwargs.values() if isinstance(item, Tensor)]
            named = any(node_of(item) is None and tracker.is_data(item) for item in left)
        if not args and not FIRST_NAMES.isdisjoint(kwargs):
            kwargs = dict(kwargs)
            args = (kwargs.pop(next(name for name in kwargs if name in FIRST_NAMES)),)
        if func in EXTREMES and len(args) > 1 and isinstance(args[1], Tensor):
            func = torch.maximum  # of two operands, whichever it is
        if args and not named and not tracker.follows_layouts and kwargs.get("out") is None:
            # Almost every operation has data as its first operand, and leaves the examples alone.
            first = args[0]
            if isinstance(first, Tensor) and node_of(first) is None and tracker.is_data(first):
                if not is_watched(func) and type(func) not in OPAQUE:
                    if keeps_examples(func, args, tracker.batch_dim, result):
                        return
                elif is_over_axes(func) and not runs_over(func, args, kwargs, tracker.batch_dim):
                    if aligned(func, args) and leaves(func, first, tracker.batch_dim, result):
                        return
                elif func in PRODUCTS:
                    # A tracked operand's rule has checked where the examples lie; but a stack of
                    # matrices puts axes of its own in front of them.
                    if node_of(args[-1]) is not None:
                        if result.dim() <= first.dim():
                            return
                    elif keeps_rows(args, tracker.batch_dim):
                        return
                if func in PLAIN_VIEWS and not kwargs:
                    found = (result,) if isinstance(result, Tensor) else result
                    layout = tracker.by_contract(first)
                    if layout is None or all(stays(func, first, layout, view) for view in found):
                        return
        every = operands_of(args, kwargs)
        operands = [t for t in every if node_of(t) is None]
        data = [t for t in operands if tracker.is_data(t)]
        if len(every) > len(operands):
            if func in SCRAMBLES or type(func) in OPAQUE:
                func = None  # a tracked operand's rule has checked where the examples lie
        if func in FACTORIES:
            data = []  # the size may come from data, the contents do not
        elif func in READS_ONLY_FIRST or func in RESHAPES:
            data = [t for t in data if t is args[0]]
        results = flatten(result) if isinstance(result, (tuple, list)) else [result]
        if data:
            if any(tensor.is_nested for tensor in data) and func not in ON_NESTED:
                for tensor in results:
                    if isinstance(tensor, Tensor):
                        tracker.place(tensor, None, function_name(func))
                return
            if type(func) in OPAQUE and not torch.is_grad_enabled():
                return  # inside a compiled graph, which was followed when it was traced
            for tensor in flatten((kwargs.get("out"),)):
                if isinstance(tensor, Tensor):
                    tracker.mark_data(tensor)
            if is_write(func) and node_of(args[0]) is None:
                self._follow_write(func, args, kwargs, data, result)
                return
            if func is torch.autograd.grad:
                tracker.follow_gradients(args, kwargs, results)
                return
            for target in changed_by(func, args, kwargs):
                if target.requires_grad and node_of(target) is None:
                    tracker.mark_data(target)
                    tracker.follow_change(func, args, kwargs, data, target)
            own = tracker.registered(func) if func is not None and not is_followed(func) else None
            if own is not None and torch.is_grad_enabled():
                own.follow(tracker, args, kwargs, results)
                return
            layouts = prescribed_layouts(tracker, func, args, kwargs, results)
            if layouts is not None:
                one = tracker.sole_example(data)
                for tensor, layout in zip(results, layouts, strict=False):
                    if isinstance(tensor, Tensor):
                        tracker.place(tensor, one or layout)
            else:
                for tensor in results:
                    if isinstance(tensor, Tensor) and not any(tensor is item for item in data):
                        tracker.follow_layout(func, args, kwargs, data, tensor)
            if func in BLANKS:
                tracker.mark_blank(result)
            return
        for tensor in results:
            if isinstance(tensor, Tensor) and node_of(tensor) is None:
                if func in CALLERS_VALUES and tracker.takes_for_data(func, tensor):
                    continue
                tracker.mark_constant(tensor)

    def _follow_write(self, func, args, kwargs, data, result) -> None:
        """Follow data that were written into a tensor, which is no constant any more."""
        tracker, target = self.tracker, args[0]
        over_axes, moves = is_over_axes(func), func in MOVES_IN_PLACE or func is Tensor.resize_
        before = tracker.is_data(target)
        if not (over_axes or moves or func in CHANGES_IN_PLACE):
            if torch.compiler.is_dynamo_compiling() and before and len(data) == 1:
                return  # constants, at constant places of data
            leave_graph("data that are written into a tensor")
        after = target if is_in_place(func) else result
        write = WRITES[func](*args, **kwargs)
        if tracker.packed and write.is_empty:
            if after is target:
                tracker.keep_marks(target)
            else:
                tracker.place_like(after, target)
            return
        if after is target:
            tracker.mark_data(target)
        if over_axes:
            tracker.follow_layout(func, args, kwargs, [target], target)
        elif moves:
            tracker.follow_move(target)
        elif func in CHANGES_IN_PLACE:
            tracker.follow_change(CHANGES_IN_PLACE[func], args, kwargs, data, target)
        else:
            tracker.follow_write(write, target, before, after)


def _is_closed(mode: TorchFunctionMode) -> bool:
    return isinstance(mode, ConstantTracking) and mode.tracker.closed


def _opening(function, *, always: bool) -> Callable[..., Any]:
    """Return what the mode runs in place of a function that can be taken apart.

    Args:
        function: the function.
        always: take it apart even where PyTorch shows all tracked operands.
    """

    def call(mode: ConstantTracking, *args, **kwargs):
        tracked = [node_of(item) is not None for item in operands_of(args, kwargs)]
        if (always or (any(tracked) and not tracked[0])) and not mode.tracker.registered(function):
            with mode:
                return opened(function)(*args, **kwargs)
        result = run(function, args, kwargs) if any(tracked) else function(*args, **kwargs)
        mode.follow(function, args, kwargs, result)
        return result

    return call


# What the mode runs in place of a call, and what it checks before one.
INSTEAD: dict[Any, Callable[..., Any]] = {
    Tensor.backward: backward_of_one,
    torch.autograd.backward: backward,
    torch.autograd.grad: gradients,
    **{function: _opening(function, always=True) for function in OPENED},
    **{function: _opening(function, always=False) for function in OPENED_IF_TRACKED},
}
CHECKS: dict[Any, Callable[..., None]] = {
    torch.nn.functional.batch_norm: check_statistics,
    torch.batch_norm: check_native_statistics,
    Tensor.requires_grad_: ConstantTracking._note_training,
    Tensor.requires_grad.__set__: ConstantTracking._note_training,  # type: ignore[attr-defined]
    Tensor.data.__set__: ConstantTracking._note_numbers,  # type: ignore[attr-defined]
    Tensor.register_hook: ConstantTracking._check_hook,
    Tensor.detach_: ConstantTracking._check_detached,
}
OUT_OF_THE_ORDINARY = QUESTIONS | INSTEAD.keys() | CHECKS.keys()


@cache
def prepare_for_compiler() -> None:
    """Let the compiler trace what the mode does in graphs, but not the mode's own functions.

    Traced as a frame of its own, the handler would believe that it runs inside a graph. So would
    the function in place of ``apply``, and ``is_compiling`` itself.
    """
    read_signatures()
    for function in (ConstantTracking.__torch_function__, show_function, is_compiling):
        torch._dynamo.eval_frame.skip_code(function.__code__)
    for function in LOOKS_UP:
        torch.compiler.assume_constant_result(function)
    # While a graph is traced, functions missing in this table make tensors that the mode does not
    # see: with PyTorch 2.11 torch.arange and most other factories, with any version the others.
    shown = torch._dynamo.variables.torch.get_overridable_functions()
    shown.update(_device_constructors(), HIDDEN_IN_GRAPHS)


@cache
def outside_graphs():
    """Return the mode's handler in a form that the compiler does not trace."""
    return torch.compiler.disable(ConstantTracking.handle)
