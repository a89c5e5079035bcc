"""What happens to an operation that touches a tracked tensor.

no data among its operands    the result is derived: it belongs to no example yet
data, and a rule              the rule attaches the use's factor to the result's gradient
data, no rule                 refused, naming the operation and the parameter
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from gradstats.capture._drawn import DRAWS, Draw
from gradstats.capture._grafted import Grafted
from gradstats.capture._marks import CONSTANTS, leave_graph, unwrapped
from gradstats.capture._names import function_name
from gradstats.capture._nested import flatten, operands_of, rebuild
from gradstats.capture._nodes import Derived, Node, same_storage, unique_roots
from gradstats.capture._operations import ADDED_PRODUCTS, COMPLEX, PRODUCTS
from gradstats.capture._tensors import (
    TRACKED_TYPES,
    DerivedTensor,
    first_node,
    node_of,
    show,
    value_of,
    wrap,
)
from gradstats.capture._transforms import HiddenError, transform_level
from gradstats.errors import TrackingError, UnsupportedOperationError

# Operations on the tensor as an object: they must reach the parameter itself, not its alias.
ON_THE_OBJECT = frozenset(
    {
        "register_hook",
        "register_post_accumulate_grad_hook",
        "requires_grad_",
        "retain_grad",
        "backward",
        "detach_",
        "share_memory_",
        "set_",
        "__set__",
        "__delete__",
        "__repr__",
        "__deepcopy__",
        "__reduce_ex__",
        "__hash__",
    }
)

# Getters that give a view of the same numbers; every other getter reads a property.
TRANSPOSING_GETTERS = tuple(getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH"))
VIEW_GETTERS = (*TRANSPOSING_GETTERS, Tensor.real.__get__, Tensor.imag.__get__)  # type: ignore[attr-defined]

# Operations that read only shape, dtype or device of the operands after the first.
READS_ONLY_FIRST = frozenset(
    {
        Tensor.to, Tensor.type_as, Tensor.view_as, Tensor.reshape_as, Tensor.expand_as,
        Tensor.new_tensor, Tensor.new_zeros, Tensor.new_ones, Tensor.new_empty, Tensor.new_full,
    }
)  # fmt: skip


# The remedy where tensors are nested.
PACK = (
    "Pack the examples into one row: a jagged tensor's values() as the batch, with "
    "cu_seqlens=x.offsets()."
)

# The remedy where gradients are changed on their way to a parameter.
BACKWARD_OF_ONES_OWN = (
    "Register the hook on the parameter, if it changes what training does alone; where it belongs "
    "to the gradients that are measured, have a torch.autograd.Function return the tensor and "
    "change its gradient in backward."
)

# Operations of sparse data and a parameter whose results are dense.
OF_SPARSE_DATA = PRODUCTS | ADDED_PRODUCTS.keys() | {torch.nn.functional.linear}

# Operations that change their first operand.
IN_PLACE = frozenset(
    getattr(Tensor, name)
    for name in dir(Tensor)
    if name not in ON_THE_OBJECT
    and (
        name == "__setitem__"
        or (name.endswith("_") and not name.startswith("_"))
        or (name.startswith("__i") and name.endswith("__") and hasattr(Tensor, f"__{name[3:]}"))
    )
)

# Those of them that only move axes, with their counterparts that return a view.
MOVES_IN_PLACE = {
    getattr(Tensor, f"{name}_"): getattr(Tensor, name)
    for name in ("transpose", "swapaxes", "swapdims", "t", "squeeze", "unsqueeze")
}


def dispatch(
    tracker,
    rules: Mapping,
    func,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    operands: Sequence[Tensor],
):
    """Run an operation that has a tracked tensor among its operands."""
    if torch.compiler.is_dynamo_compiling() and _reads_property(func):
        # Where a mode is on, the compiler leads every property of a subclass back here. This cannot
        # move into the next block: the compiler of PyTorch 2.11 would then leave the mode off for
        # the whole graph.
        with torch._C.DisableTorchFunction():
            return func(*args, **kwargs)
    with torch._C.DisableTorchFunctionSubclass():
        if not torch.is_grad_enabled():
            # This may be the forward of an autograd Function, whose uses no graph would show.
            leave_graph("a parameter where gradients are not recorded")
            if tracker.seen is not None and not _reads_property(func):
                tracker.note_inside(operands)
            return _note_alias(func(*args, **kwargs), args, kwargs)
        nodes, data, is_complex, is_sparse = [], False, False, False
        for item in operands:
            is_complex = is_complex or item.dtype.is_complex
            is_sparse = is_sparse or item.layout is not torch.strided or item.is_nested
            node = getattr(item, "_gradstats", None) if type(item) in TRACKED_TYPES else None
            if node is None:
                data = data or tracker.is_data(item)
                continue
            nodes.append(node)
            if isinstance(node, Derived):
                leave_graph(node.describe)
            if node.tracker is not tracker:
                raise TrackingError(
                    f"{function_name(func)} combines {nodes[0].describe()} with a parameter that "
                    "another tracking context owns. Track both models in turn, not at once."
                )
        if func in READS_ONLY_FIRST:
            if node_of(args[0]) is None:
                return func(*args, **kwargs)
            return derive(tracker, func, args, kwargs)
        if transform_level() is not None and (
            data or any(unwrapped(item) is not item for item in operands)
        ):
            names = [root.name for root in unique_roots(nodes)]
            raise HiddenError(
                f"{nodes[0].describe()} is used inside a torch.func transform (vmap, grad, jacrev, "
                "jvp …), which hides the examples. Expected plain autograd: write derivatives of "
                "the network with torch.autograd.grad(..., create_graph=True) on the whole batch, "
                f"or leave the parameter out by name with exclude={names!r}.",
                names,
            )
        if not data:
            if func in IN_PLACE:
                return change(tracker, func, args, kwargs, nodes[0])
            return derive(tracker, func, args, kwargs)
        rule = rules.get(func)
        if is_sparse:
            check_nested(func, operands)
            if func not in OF_SPARSE_DATA:
                refuse(
                    func, nodes[0], "of sparse data has no rule", "Make them dense: x.to_dense()."
                )
            # The result is dense in either case.
            args, kwargs = rebuild(args, _dense), rebuild(kwargs, _dense)
        if is_complex:
            leave_graph(f"complex numbers with {nodes[0].describe()}")
            if not (rule is None or func in COMPLEX or isinstance(rule, Grafted)):
                refuse(func, nodes[0], "of complex numbers has no rule")
        if rule is not None:
            return rule(tracker, func, *args, **kwargs)
        return _without_rule(func, nodes, args, kwargs)


def check_nested(func, operands: Sequence[Tensor]) -> None:
    """Refuse an operation of nested tensors and parameters."""
    if any(item.is_nested for item in operands):
        refuse(func, first_node(*operands), "of nested tensors has no rule", PACK)


def refuse_on_derived(func, tensor: Tensor, remedy: str) -> None:
    """Refuse an operation that changes how gradients pass a tensor derived from parameters."""
    node = node_of(tensor)
    if isinstance(node, Derived):
        refuse(func, node, "changes its gradient in a way that is not followed", remedy)


def _dense(item):
    sparse = isinstance(item, Tensor) and item.layout is not torch.strided
    return item.to_dense() if sparse else item


def _reads_property(func) -> bool:
    return getattr(func, "__name__", "") == "__get__" and func not in VIEW_GETTERS


def is_about_object(func) -> bool:
    """Whether an operation asks for, or changes, what belongs to the tensor object alone."""
    return _reads_property(func) or getattr(func, "__name__", "") in ON_THE_OBJECT


def _note_alias(result, args: tuple[Any, ...], kwargs: dict[str, Any]):
    """Return a result that is not tracked; note which derived operands share its memory."""
    if not isinstance(result, Tensor) and type(result) not in (tuple, list):
        return result  # a shape, a device: most questions about a tensor
    found = [item for item in flatten((result,)) if isinstance(item, Tensor)]
    for operand in operands_of(args, kwargs):
        node = node_of(operand)
        if isinstance(node, Derived) and any(same_storage(item, node.value) for item in found):
            node.aliased = True
    return result


def derive(tracker, func, args: tuple[Any, ...], kwargs: dict[str, Any]):
    """Run an operation on parameters and constants; its differentiable results become derived."""
    if is_about_object(func):
        return _note_alias(func(*args, **kwargs), args, kwargs)
    if torch.compiler.is_dynamo_compiling():
        described = first_node(*operands_of(args, kwargs)).describe()
        leave_graph(f"a computation without data on {described}")

    def as_node(item):
        node = node_of(item)
        return item if node is None else node

    def as_value(item):
        return item.value if isinstance(item, Node) else item

    node_args, node_kwargs = rebuild(args, as_node), rebuild(kwargs, as_node)
    again = Draw(func, operands_of(args, kwargs)[0].device) if func in DRAWS else func
    result = func(*rebuild(node_args, as_value), **rebuild(node_kwargs, as_value))
    if isinstance(result, Tensor):
        if not result.requires_grad:
            return _note_alias(result, args, kwargs)
        return wrap(Derived(tracker, result, again, node_args, node_kwargs, None))
    if isinstance(result, (tuple, list)) and any(isinstance(item, Tensor) for item in result):
        wrapped = [
            wrap(Derived(tracker, item, again, node_args, node_kwargs, index))
            if isinstance(item, Tensor) and item.requires_grad
            else item
            for index, item in enumerate(result)
        ]
        return wrapped if type(result) is list else type(result)(wrapped)
    # A question about the tensor (is it a view? where is its memory?) is about the object itself.
    return func(*args, **kwargs)


class Changed:
    """The out-of-place form of an operation that changes its first operand in place."""

    def __init__(self, function):
        self.function = function
        self.__name__ = getattr(function, "__name__", "in place")
        self.__module__ = "Tensor"

    def __call__(self, first: Tensor, *args, **kwargs) -> Tensor:
        result = first.clone()
        self.function(result, *args, **kwargs)
        return result


def change(tracker, func, args: tuple[Any, ...], kwargs: dict[str, Any], node: Node):
    """Run an operation that changes in place a tensor that belongs to no example.

    From now on that tensor stands for a new derived node.
    """
    target = args[0]
    own = node_of(target)
    if func is Tensor.__setitem__ and _is_part(node_of(args[2]), own, args[1]):
        return None  # the last step of x[i] += w: it writes back a part that was changed in place
    if own is None and (whole := _free_base(tracker, target)) is not None:
        view = (target.shape, target.stride(), target.storage_offset())

        @wraps(func)
        def change_view(first, *others, **named):
            func(first.as_strided(*view), *others, **named)

        # A copy, since the operation overwrites the values that it reads.
        copied = (whole.clone(), *args[1:])
        changed = node_of(derive(tracker, Changed(change_view), copied, kwargs))
        func(*args, **kwargs)
        if isinstance(changed, Derived):
            _stand_for(changed, whole)
            part = node_of(derive(tracker, Tensor.as_strided, (whole, *view), {}))
            if whole is not target and isinstance(part, Derived):
                _stand_for(part, target)
        return _returned(func, target)
    moves = func in MOVES_IN_PLACE
    if isinstance(own, Derived) and (moves or own.is_alone()):
        # Where only axes move, no other tensor that shows the same memory sees a number change.
        function = MOVES_IN_PLACE[func] if moves else Changed(func)
        changed = node_of(derive(tracker, function, args, kwargs))
        if isinstance(changed, Derived) and (moves or same_form(changed.value, own.value)):
            own.shown = lambda: None
            if same_storage(target, own.value):
                target.data = changed.value.detach()  # for readers of the plain numbers
                show(changed, target)
            else:
                func(*args, **kwargs)
                _stand_for(changed, target)
            return _returned(func, target)
    if isinstance(own, Derived) and own.index is None and not own.aliased:
        base, others, named = own.args[0], own.args[1:], own.kwargs
        whole = base.shown() if isinstance(base, Derived) else None
        if whole is not None and same_storage(own.value, base.value):
            # The target is a view: change the tensor that it is a part of, and take it anew.
            @wraps(func)
            def change_part(first, *operands, **options):
                func(own.function(first, *others, **named), *operands, **options)

            own.shown = lambda: None
            change(tracker, change_part, (whole, *args[1:]), kwargs, node)
            part = node_of(derive(tracker, own.function, (whole, *others), named))
            if isinstance(part, Derived):
                target.data = part.value.detach()
                show(part, target)
                return _returned(func, target)
    # Views of the old value may still be in use, and would go on to describe that one.
    refuse(
        func,
        node,
        "changes a tensor in place that belongs to no example, which has no rule",
        "Write it out of place.",
    )


def _is_part(value: Node | None, whole: Node | None, index) -> bool:
    """Whether a tensor shows the memory of another at an index."""
    if not (isinstance(value, Derived) and isinstance(whole, Derived)):
        return False
    part, again = value.value, whole.value.detach()[rebuild(index, value_of)]
    same = same_storage(part, again) and part.storage_offset() == again.storage_offset()
    return same and same_form(part, again)


def _free_base(tracker, constant: Tensor) -> Tensor | None:
    """Return the tensor whose memory a constant shows, if it may stand for a derived node.

    It may if it was made in this forward. What the model keeps outlives the context, and must not.
    """
    base = constant if constant._base is None else constant._base
    plain = type(constant) is type(base) is Tensor and base.layout == torch.strided
    if not plain or base.requires_grad or tracker.is_data(base) or tracker.is_kept(base):
        return None
    dense = base.storage_offset() == 0 and same_form(torch.empty_like(base), base)
    return base if dense else None


def _stand_for(node: Derived, constant: Tensor) -> None:
    """Let a constant that was changed in place stand for a derived node.

    It keeps its own memory. Other tensors that show this memory have changed as well; if one of
    them is used, the autograd graph shows it as a use that was not seen.
    """
    CONSTANTS.pop(id(constant), None)
    constant.__class__ = DerivedTensor
    node.version = constant._version
    node.tracker.shown[constant.grad_fn] = node
    show(node, constant)


def _returned(func, target: Tensor) -> Tensor | None:
    return None if func is Tensor.__setitem__ else target


def same_form(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors agree in all but their numbers."""
    return (first.shape, first.stride(), first.dtype) == (
        second.shape,
        second.stride(),
        second.dtype,
    )


def _without_rule(func, nodes: list[Node], args, kwargs):
    """Run an operation without a rule if its result has no gradient; refuse it otherwise."""
    name = getattr(func, "__name__", "")
    if not (name.endswith("_") and not name.endswith("__")):
        with torch.no_grad():
            result = func(*args, **kwargs)
        leaves = flatten(result if isinstance(result, (tuple, list)) else (result,))
        found = [item for item in leaves if isinstance(item, Tensor)]
        if not any(item.is_floating_point() or item.is_complex() for item in found):
            return result
    refuse(func, nodes[0])


def refuse(func, node: Node, reason: str = "has no rule", remedy: str = "") -> None:
    """Raise the error for an operation whose factor is not known."""
    raise refusal(func, node, reason, remedy)


def refusal(func, node: Node, reason: str, remedy: str) -> UnsupportedOperationError:
    """Return the error for an operation whose factor is not known."""
    names = [root.name for root in node.roots]
    return UnsupportedOperationError(
        f"{function_name(func)} {reason} for {node.describe()}, so its per-example gradient is not "
        "known. Expected an operation that gradstats has a rule for. "
        + (
            remedy
            or "Write the step with such operations, add a rule with gs.register_rule, have "
            'per_example_norms compute it one example at a time with fallback="vmap", or leave the '
            f"parameter out by name with exclude={names!r}."
        ),
        names,
    )
