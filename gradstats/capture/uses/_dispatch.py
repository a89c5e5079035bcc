"""What happens to an operation with a tracked operand.

no data among its operands    the result is derived: it belongs to no example yet
data, and a rule              the rule attaches the use's factor to the result's gradient
data, no rule                 refused, naming the operation and the parameter
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradstats._compiler import is_compiling
from gradstats.capture.following._repeated import NOTED, keep, likeness_of_use
from gradstats.capture.following._signatures import RENAMED, by_place, in_pytorchs_names
from gradstats.capture.following._taken import as_constants, is_given
from gradstats.capture.operations._memory import unwrapped
from gradstats.capture.operations._names import function_name
from gradstats.capture.operations._nested import operands_of, rebuild, tensors_in
from gradstats.capture.operations._operations import (
    ADDED_PRODUCTS,
    COMPLEX,
    IN_PLACE,
    PRODUCTS,
    READS_ONLY_FIRST,
    SCRIPTS,
    changed_by,
    reads_property,
    variants,
)
from gradstats.capture.parameters._derived import change, derive, note_alias
from gradstats.capture.parameters._nodes import Node, unique_roots
from gradstats.capture.parameters._refusals import check_nested, refuse, refuse_change
from gradstats.capture.parameters._tensors import node_of
from gradstats.capture.parameters._transforms import HiddenError, transform_level, wraps_results
from gradstats.capture.uses._grafted import Grafted, Registered
from gradstats.capture.uses._slots import run_on_slots
from gradstats.errors import TrackingError

if TYPE_CHECKING:
    from gradstats.capture._context import Context

INTEGERS = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8})

AUTOGRAD = torch._C.DispatchKey.AutogradFunctionality
DETACHES = frozenset(variants("detach"))

# Operations of sparse data and a parameter whose results are dense.
OF_SPARSE_DATA = PRODUCTS | ADDED_PRODUCTS | {torch.nn.functional.linear}


def run_on_tracked(tracker: Context, func, args: tuple[Any, ...], kwargs: dict[str, Any]):
    """Run an operation that has a tracked tensor of this context among its operands."""
    seen = tracker.visibility
    if seen is not None and (tracker.fetching or seen.later or get_ident() != seen.thread):
        seen.check_operation(func, fetching=tracker.fetching > 0)
    with torch._C.DisableTorchFunctionSubclass():
        if not torch.is_grad_enabled():
            if tracker.functions.seen is not None and not reads_property(func):
                tracker.functions.note_inside(operands_of(args, kwargs))
            return note_alias(func(*args, **kwargs), args, kwargs)
        level, hidden = transform_level(), torch._C._dispatch_tls_is_dispatch_key_excluded(AUTOGRAD)
        inside = hidden or level is not None
        alike = None if inside else likeness_of_use(tracker, func, args, kwargs)
        if alike is not None and (repeat := NOTED.get(alike[0])) is not None:
            result = repeat(tracker, alike[1])
            if result is not None:
                return result
        operands = operands_of(args, kwargs)
        nodes, data, is_complex, is_sparse = _found_among(tracker, func, operands)
        if hidden and func not in DETACHES:
            # This is how torch's own loops run where they are not compiled.
            refuse(
                func,
                nodes[0],
                "inside an operator (torch's scan or while_loop, or a custom one), where no "
                "gradients are recorded, has no rule",
                "Write the loop in Python; give a custom operator a detached copy.",
            )
        if func in READS_ONLY_FIRST:
            if node_of(args[0]) is None:
                return func(*args, **kwargs)
            if level is not None and wraps_results():
                raise _hidden(nodes)
            return derive(tracker, func, args, kwargs)
        if level is not None:
            if data or any(unwrapped(item) is not item for item in operands) or wraps_results():
                raise _hidden(nodes)
        if not data:
            return _without_data(tracker, func, args, kwargs, nodes[0])
        if (
            tracker.marks.values.slots
            and (result := run_on_slots(tracker, func, args, kwargs)) is not None
        ):
            return result
        if is_sparse:
            args, kwargs = _made_dense(tracker, func, nodes[0], operands, args, kwargs)
        rule = tracker.rules.get(func)
        if rule is None:
            return _without_rule(tracker, func, nodes, args, kwargs)
        if is_complex and not (func in COMPLEX or isinstance(rule, Grafted)):
            refuse(func, nodes[0], "of complex numbers has no rule")
        if not (RENAMED.isdisjoint(kwargs) or isinstance(rule, Registered)):
            if kwargs.get("out") is not None:
                return func(*args, **kwargs)  # which PyTorch refuses
            kwargs = in_pytorchs_names(func, kwargs)
        try:
            result = rule(tracker, func, *args, **kwargs)
        finally:
            decided, tracker.decided = tracker.decided, None
        # Another result: the rule did more, or the decision is that of an operation inside it.
        if alike is not None and decided is not None and decided.result is result:
            keep(alike[0], decided.remembered(tracker, alike[1]))
        return result


def _found_among(
    tracker: Context, func, operands: Sequence[Tensor]
) -> tuple[list[Node], bool, bool, bool]:
    """Inspect an operation's operands; raise if the parameters of two contexts meet.

    Returns:
        The nodes of the tracked operands; whether any operand is data, complex, or sparse.
    """
    nodes: list[Node] = []
    data = is_complex = is_sparse = False
    for item in operands:
        is_complex = is_complex or item.dtype.is_complex
        is_sparse = is_sparse or item.layout is not torch.strided or item.is_nested
        node = node_of(item)
        if node is None:
            data = data or tracker.marks.may_hold_rows(item)
            continue
        nodes.append(node)
        if node.tracker is not tracker:
            raise TrackingError(
                f"{function_name(func)} combines {nodes[0].describe()} with a parameter that "
                "another tracking context owns. Track the two models one after the other."
            )
    return nodes, data, is_complex, is_sparse


def _hidden(nodes: Sequence[Node]) -> HiddenError:
    """Return the error about parameters that meet data inside a transform of torch.func."""
    names = [root.name for root in unique_roots(nodes)]
    return HiddenError(
        f"{nodes[0].describe()} is used inside a torch.func transform (vmap, grad, jacrev, "
        "jvp …), which hides the examples. Expected plain autograd: write derivatives of the "
        "network with torch.autograd.grad(..., create_graph=True) on the whole batch. Otherwise "
        'per_example_norms(..., fallback="vmap") computes one example at a time, and '
        f"exclude={names!r} leaves the parameter out.",
        names,
    )


def _without_data(tracker: Context, func, args, kwargs, node: Node):
    """Run an operation on tracked tensors and constants; its result belongs to no example."""
    if kwargs and not args:
        args, kwargs = by_place(func, args, in_pytorchs_names(func, kwargs))
    if func in IN_PLACE or kwargs.get("inplace"):
        return change(tracker, func, args, kwargs, node)
    if changed_by(func, args, kwargs):
        refuse_change(func, node)
    return derive(tracker, func, args, kwargs)


def _made_dense(tracker: Context, func, node: Node, operands: Sequence[Tensor], args, kwargs):
    """Return the arguments of an operation on sparse data with dense data, or refuse.

    The result is dense with dense operands too.
    """
    check_nested(func, operands)
    if func not in OF_SPARSE_DATA:
        refuse(func, node, "of sparse data has no rule", "Make them dense: x.to_dense().")

    def dense(item):
        if not isinstance(item, Tensor) or item.layout is torch.strided:
            return item
        found = item.to_dense()
        tracker.marks.place_like(found, item)
        return found

    return rebuild((args, kwargs), dense)


def _number(item):
    """Return the value of a 0-dim integer tensor; anything else unchanged."""
    integer = isinstance(item, Tensor) and item.dim() == 0 and item.dtype in INTEGERS
    return int(item) if integer and node_of(item) is None else item


def _without_rule(tracker: Context, func, nodes: list[Node], args, kwargs):
    """Run an operation that has no rule if no example's gradient passes it; refuse it otherwise."""
    if not is_compiling():
        # Sizes that the batch contains, such as an image's, belong to no example. Nor do values
        # that the forward was given, such as indices of rows.
        marks = tracker.marks
        data = [item for item in operands_of(args, kwargs) if node_of(item) is None]
        given = [item for item in data if is_given(marks, item)]
        plain, named = rebuild(as_constants(marks, given, (args, kwargs)), _number)
        left = [item for item in operands_of(plain, named) if node_of(item) is None]
        if not any(map(marks.is_data, left)):
            with suppress(TypeError):  # from operations that take no numbers
                return _without_data(tracker, func, plain, named, nodes[0])
    changed = changed_by(func, args, kwargs)
    if not (func in IN_PLACE or any(item.requires_grad for item in changed)):
        with torch.set_grad_enabled(bool(changed)):
            result = func(*args, **kwargs)
        found = tensors_in(result)
        differentiable = any(item.is_floating_point() or item.is_complex() for item in found)
        if not (differentiable or any(item.requires_grad for item in changed)):
            return result
    names = [root.name for root in unique_roots(nodes)]
    remedy = (
        'Have per_example_norms compute it one example at a time with fallback="vmap", add a rule '
        f"with gs.register_rule, or leave the parameter out by name with exclude={names!r}."
    )
    if isinstance(func, SCRIPTS):
        remedy = (
            "Use the layer without torch.jit (for e3nn, call "
            "e3nn.set_optimization_defaults(jit_script_fx=False) before building the model), have "
            f'per_example_norms compute one example at a time with fallback="vmap", or '
            f"exclude={names!r}."
        )
    refuse(func, nodes[0], remedy=remedy)
