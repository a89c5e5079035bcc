"""The function mode of a context, which sees every operation of the user's code.

It tells constants from data by where a tensor came from. Its shape cannot tell: with as many
positions as examples, a tensor of positions looks exactly like a batch. Buffers, frozen parameters
and everything computed from them without data are *constants*. What is computed from parameters
and constants alone stays *derived* until it meets data (see ``parameters/``).

Random tensors, and tensors made from values that the caller gives, count as data if their example
axis has the batch's size: noise and time steps drawn inside a context are drawn for each example.
If counting given values as data leads to a refusal, callers that can run the forward again do so
with these as constants.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import get_eval_frame_callback

from gradstats._compiler import imported_compiler, is_compiling, leave_graph
from gradstats.capture._context import Context
from gradstats.capture.following._batch_norm import check_native_statistics, check_statistics
from gradstats.capture.following._derivatives import (
    backward,
    backward_of_one,
    gradients,
    refuse_forward_mode,
)
from gradstats.capture.following._flex_attention import FLEX_ATTENTION, check_flex_attention
from gradstats.capture.following._marks import Marks
from gradstats.capture.following._repeated import follow_repeated
from gradstats.capture.following._sequences import MULTI_HEAD_ATTENTION, is_out_of_the_ordinary
from gradstats.capture.operations._formats import NORMALISATIONS, settle_format
from gradstats.capture.operations._modes import ContextMode, remove_modes
from gradstats.capture.operations._names import function_name
from gradstats.capture.operations._nested import operands_of
from gradstats.capture.operations._opened import OPENED, as_operands_say, opened
from gradstats.capture.operations._operations import OPAQUE, QUESTIONS
from gradstats.capture.operations._operators import OPERATORS, as_function
from gradstats.capture.parameters._branches import COND, take_branch
from gradstats.capture.parameters._derivation import Derived
from gradstats.capture.parameters._differentiated import check_hook
from gradstats.capture.parameters._functions import apply_function
from gradstats.capture.parameters._nodes import Root
from gradstats.capture.parameters._refusals import check_nested, refuse_on_derived
from gradstats.capture.parameters._tensors import (
    TRACED,
    TRACKED_TYPES,
    as_subclass,
    node_of,
    run_followed,
)
from gradstats.capture.parameters._transforms import check_hidden, transform_level
from gradstats.capture.rules import is_registered

# Operand types whose __torch_function__ is PyTorch's or our own.
ORDINARY_TYPES = TRACKED_TYPES | {Tensor}

# Getters that return a tensor which existed before.
FINDS = frozenset(getattr(Tensor, name).__get__ for name in ("grad", "_base"))


class FollowingMode(ContextMode):
    """Follows each operation: which results are constant, where examples lie, what mixes them."""

    def __init__(self, tracker: Context):
        super().__init__(tracker)
        if imported_compiler() is not None:
            prepare_for_compiler()

    def remove(self) -> None:
        """Remove this mode from the thread's stack, wherever and however often it is there.

        Contexts may end in any order, and an interrupt may leave a mode on the stack twice. Modes
        of contexts that another thread has closed are removed too.
        """

        def is_over(mode) -> bool:
            return mode is self or (isinstance(mode, ContextMode) and mode.tracker.closed)

        remove_modes(is_over)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        # The second test, which is_compiling repeats, saves that call where no dispatch mode is on.
        if torch.compiler.is_dynamo_compiling() or (
            torch._C._len_torch_dispatch_stack() and is_compiling()
        ):
            return self._record(func, args, kwargs)
        if get_eval_frame_callback() is None:
            return self.handle(func, types, args, kwargs)
        # Between graphs the compiler would try to trace this handler too.
        return outside_graphs()(self, func, types, args, kwargs)

    def _record(self, func, args, kwargs):
        """Run an operation that the compiler records, or with which it inspects operands.

        What it records is followed when the graph is traced (see ``_graphs``).
        """
        if torch.compiler.is_dynamo_compiling():
            # The compiler guards on this comparison: a context of another form gets a new graph.
            if self.tracker.form == "":
                leave_graph("what is followed by a context that runs no graphs")
            if is_registered(func):
                leave_graph(f"{function_name(func)}, which has a registered rule")
        if func is Tensor.unflatten:  # its super() in Python cannot be traced
            func = torch.unflatten
        return func(*args, **kwargs)

    def handle(self, func, types, args, kwargs):
        """Run one operation of the user's code."""
        tracker = self.tracker
        if tracker.closed or tracker.fetching:
            # Another thread closed the context, or a loader is making data.
            return func(*args, **kwargs)
        ordinary = not types or ORDINARY_TYPES.issuperset(types)
        if not ordinary:
            shown = tuple(kind for kind in types if kind not in TRACKED_TYPES)
            result = as_operands_say(self, func, shown, args, kwargs)
            if result is not NotImplemented:
                return result
        if type(func) in OPERATORS and torch.is_grad_enabled() and not is_registered(func):
            func, args, kwargs = as_function(func, args, kwargs)
        tracked = bool(types) and not TRACKED_TYPES.isdisjoint(types)
        if func in OUT_OF_THE_ORDINARY:
            if func in QUESTIONS and not tracked:
                return func(*args, **kwargs)
            if func in INSTEAD:
                return INSTEAD[func](self, *args, **kwargs)
            if func in OPENS and OPENS[func](tracker.marks, *args, **kwargs):
                if not tracker.registered(func):
                    with self:
                        return opened(func)(*args, **kwargs)
            if func in CHECKS:
                CHECKS[func](self, *args, **kwargs)
        if tracked and ordinary:
            # Calling func would end here too; this saves parsing its arguments once more.
            result = run_followed(func, args, kwargs)
            followed, tracker.followed = tracker.followed, None
            if followed is not None and followed is result:
                return result
        else:
            if tracked:
                check_nested(func, operands_of(args, kwargs))
            result = func(*args, **kwargs)
        returns = type(result) is Tensor or isinstance(result, (Tensor, tuple, list))
        # The last two change an operand, and may return no tensor.
        if returns or func is Tensor.__setitem__ or type(func) in OPAQUE:
            if func in FINDS:
                return result
            if tracker.functions.seen is not None:
                tracker.functions.note_seen(result)
            if transform_level() is not None:
                check_hidden(tracker, func, args, kwargs, result)
            else:
                follow_repeated(tracker, func, args, kwargs, result)
                if func in NORMALISATIONS and node_of(result) is None:
                    settle_format(func, args, kwargs, result)
        return result

    def _note_training(self, tensor, requires_grad=True) -> None:
        self.tracker.note_training(tensor, bool(requires_grad))

    def _note_detached(self, tensor) -> None:
        """Note that a tensor is detached in place, which freezes a parameter."""
        refuse_on_derived(Tensor.detach_, tensor, "Write x = x.detach().")
        if isinstance(node_of(tensor), Root):
            self._note_training(tensor, False)

    def _note_numbers(self, tensor, data) -> None:
        """Note that a tensor is given other values; a derived tensor computes with them."""
        node = node_of(tensor)
        if isinstance(node, Root):
            node.note_place(data)
            return
        if isinstance(node, Derived):
            node.take_numbers(data)
            tensor = node.value
        if tensor.grad_fn is not None:
            made = tensor.grad_fn, tensor.output_nr
            self.tracker.renumbered[made] = torch._C._autograd._get_sequence_nr()
        elif self.tracker.marks.is_of_data(tensor) and self.tracker.marks.is_data(data):
            self.tracker.marks.place_like(tensor, data)

    def _grad_fn(self, tensor) -> Any:
        """Return the autograd node of a tensor, derived ones included: module hooks need it."""
        tracker, node = self.tracker, node_of(tensor)
        tracker.shows_graph = True
        with torch._C.DisableTorchFunctionSubclass():
            shown = (node.value if isinstance(node, Derived) else tensor).grad_fn
        if shown is not None and (tracker.transformed or tracker.slicewise):
            tracker.transformed_nodes.append(shown)
        return shown

    def _reduce(self, tensor, protocol) -> Any:
        """Return what pickle and copy need of a tensor, without the notes on it."""
        with self.tracker.marks.aside(tensor):
            return Tensor.__reduce_ex__(tensor, protocol)

    def _copy(self, tensor, memo) -> Tensor:
        """Return a deep copy with the same notes as the tensor."""
        marks = self.tracker.marks
        with marks.aside(tensor):
            result = Tensor.__deepcopy__(tensor, memo)
        marks.place_like(result, tensor)
        marks.values.note(result, **marks.values.held_by(tensor))
        return result


def _takes_data_first(marks: Marks, *args, **kwargs) -> bool:
    """Whether only an operand other than the first is tracked; for the first there is a rule."""
    tracked = [node_of(item) is not None for item in operands_of(args, kwargs)]
    return any(tracked) and not tracked[0]


def _takes_variance_of_rows(marks: Marks, input, target, var, *args, **kwargs) -> bool:
    """Whether a variance lacks the last axis, so that it is not broadcast as operands mostly are.

    Or whether only operands other than the first are tracked, as above.
    """
    lacks_axis = isinstance(var, Tensor) and var.dim() < input.dim()
    return lacks_axis or _takes_data_first(marks, input, target, var)


# Functions that the mode takes apart to see the operations inside them, if the predicate holds. It
# is called with the context's marks and the arguments.
OPENS: dict[Any, Callable[..., bool]] = {
    **dict.fromkeys(OPENED, lambda *_, **__: True),
    torch.nn.functional.normalize: _takes_data_first,
    torch.nn.functional.gaussian_nll_loss: _takes_variance_of_rows,
    MULTI_HEAD_ATTENTION: is_out_of_the_ordinary,
}

# What the mode runs in place of a call, and what it runs before one.
INSTEAD: dict[Any, Callable[..., Any]] = {
    Tensor.backward: backward_of_one,
    torch.autograd.backward: backward,
    torch.autograd.grad: gradients,
    Tensor.grad_fn.__get__: FollowingMode._grad_fn,  # type: ignore[union-attr,attr-defined]
    COND: take_branch,
    Tensor.__reduce_ex__: FollowingMode._reduce,
    Tensor.__deepcopy__: FollowingMode._copy,
}
CHECKS: dict[Any, Callable[..., None]] = {
    torch.nn.functional.batch_norm: check_statistics,
    torch.batch_norm: check_native_statistics,
    Tensor.requires_grad_: FollowingMode._note_training,
    Tensor.requires_grad.__set__: FollowingMode._note_training,  # type: ignore[attr-defined]
    Tensor.data.__set__: FollowingMode._note_numbers,  # type: ignore[attr-defined]
    Tensor.register_hook: lambda mode, tensor, hook: check_hook(mode.tracker, tensor),
    Tensor.detach_: FollowingMode._note_detached,
    torch.detach_: FollowingMode._note_detached,
    torch._make_dual: refuse_forward_mode,
    FLEX_ATTENTION: check_flex_attention,
}
OUT_OF_THE_ORDINARY = QUESTIONS | INSTEAD.keys() | CHECKS.keys() | OPENS.keys()


@cache
def prepare_for_compiler() -> None:
    """Make the compiler inline the mode's functions in graphs, but not compile them as frames.

    Compiled as a frame of its own, the handler would think that it runs inside a graph. The same
    holds for the functions that replace PyTorch's own, and for ``is_compiling``.
    """
    handler = FollowingMode.__torch_function__
    replaced = apply_function, as_subclass
    for function in (handler, outside_graphs.__wrapped__, *replaced, is_compiling):
        torch._dynamo.eval_frame.skip_code(function.__code__)
    TRACED.append(True)
    # Without this, graphs would be guarded on every entry of the table of rules.
    torch.compiler.assume_constant_result(is_registered)


@cache
def outside_graphs():
    """Return the mode's handler in a form that the compiler does not trace."""
    return torch.compiler.disable(FollowingMode.handle)
