"""Operations on parameters and constants alone: their results are derived.

A derived tensor belongs to no example yet. After a change in place the same tensor of the user's
code stands for a new node.
"""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradstats._compiler import is_compiling
from gradstats.capture.following._marks import CONSTANTS, Marks
from gradstats.capture.operations._names import function_class_of
from gradstats.capture.operations._nested import (
    flatten,
    like,
    of_numbers,
    operands_of,
    rebuild,
    replace,
    tensors_in,
)
from gradstats.capture.operations._operations import MOVES_IN_PLACE, is_about_object
from gradstats.capture.parameters._derivation import QUANTISES, Derived
from gradstats.capture.parameters._drawn import DRAWS, Draw
from gradstats.capture.parameters._nodes import Node, same_form, same_storage
from gradstats.capture.parameters._refusals import refuse, refuse_change
from gradstats.capture.parameters._tensors import (
    DerivedTensor,
    first_node,
    node_of,
    show,
    value_of,
    wrap,
)

if TYPE_CHECKING:
    from gradstats.capture._context import Context


def derive(tracker: Context, func, args: tuple[Any, ...], kwargs: dict[str, Any]):
    """Run an operation on parameters and constants; its differentiable results become derived."""
    if is_about_object(func):
        return note_alias(func(*args, **kwargs), args, kwargs)

    def seen(value: Tensor, index: int | None) -> Tensor:
        """Return the tensor that user code gets for a result."""
        if value.layout is not torch.strided or value.is_nested:
            refuse(
                func, first_node(*operands), "makes a sparse or nested tensor, which has no rule"
            )
        if kwargs.get("out") is not None:
            refuse_change(func, first_node(*operands))
        node = Derived(tracker, value, again, node_args, node_kwargs, index)
        if node.parents:
            return wrap(node)
        # It depends on excluded parameters alone; the tracked ones gave a shape, or other results.
        tracker.marks.mark_constant(value)
        return note_alias(value, args, kwargs)

    # Scales are often overwritten later, some by this operation itself, so copies are recorded.
    copies = func in QUANTISES or function_class_of(func) is not None
    operands: list[Tensor] = []
    recorded: dict[int, Any] = {}
    values: dict[int, Tensor] = {}
    for item in flatten((args, kwargs)):
        if isinstance(item, Tensor):
            operands.append(item)
            node = node_of(item)
            if node is not None:
                recorded[id(item)], values[id(item)] = node, node.value
                continue
            if item.requires_grad:
                tracker.derived_from_leaves = True
            if copies:
                recorded[id(item)] = item.detach().clone()
        elif type(item) is slice:
            recorded[id(item)] = of_numbers(item)
    node_args, node_kwargs = replace(args, recorded), replace(kwargs, recorded)
    draws = func in DRAWS or (isinstance(func, OutOfPlace) and func.function in DRAWS)
    again = Draw(func, operands[0].device) if draws else func
    result = func(*replace(args, values), **replace(kwargs, values))
    if isinstance(result, Tensor):
        if not result.requires_grad:
            return note_alias(result, args, kwargs)
        return seen(result, None)
    if isinstance(result, (tuple, list)) and any(isinstance(item, Tensor) for item in result):
        wrapped = [
            seen(item, index) if isinstance(item, Tensor) and item.requires_grad else item
            for index, item in enumerate(result)
        ]
        return like(result, wrapped)
    # A question about a tensor (is it a view? where is its memory?) is one about the object itself.
    return func(*args, **kwargs)


def real_numbers(tracker: Context, item: Tensor) -> Tensor:
    """Return the real numbers (*, 2) of a tracked complex tensor (*), tracked too."""
    if item.is_conj():
        item = derive(tracker, torch.resolve_conj, (item,), {})
    return derive(tracker, torch.view_as_real, (item,), {})


def note_alias(result, args: tuple[Any, ...], kwargs: dict[str, Any]):
    """Return an untracked result, and note on derived operands that they share its memory."""
    if not isinstance(result, Tensor) and type(result) not in (tuple, list):
        return result  # a shape, a device: most questions about a tensor
    found = tensors_in(result)
    for operand in operands_of(args, kwargs):
        node = node_of(operand)
        if isinstance(node, Derived) and any(same_storage(item, node.value) for item in found):
            node.aliased = True
    return result


class OutOfPlace:
    """The out-of-place form of an operation that changes its first operand in place."""

    def __init__(self, function):
        self.function = function
        self.__name__ = getattr(function, "__name__", "in place")
        self.__module__ = "Tensor"

    def __call__(self, first: Tensor, *args, **kwargs) -> Tensor:
        result = first.clone()
        self.function(result, *args, **kwargs)
        return result


def change(tracker: Context, func, args: tuple[Any, ...], kwargs: dict[str, Any], node: Node):
    """Run an in-place operation on a tensor that belongs to no example.

    From then on that tensor stands for a new derived node.

    Args:
        node: of a tracked operand, for errors.
    """
    if is_compiling():
        # No tensor can take other values in a trace. The graph then runs operation by operation.
        refuse_change(func, node)
    target = args[0]
    before = node_of(target)
    if func is Tensor.__setitem__ and _is_part(node_of(args[2]), before, args[1]):
        return None  # the last step of x[i] += w, which writes back what was changed in place
    if before is None and (whole := _free_base(tracker.marks, target)) is not None:
        _change_constant(tracker, func, args, kwargs, whole)
    elif not isinstance(before, Derived) or not (
        _change_whole(tracker, func, args, kwargs, before)
        or _change_part(tracker, func, args, kwargs, before, node)
    ):
        # Views of the old value may still be in use, and would continue to describe it.
        refuse_change(func, node)
    return None if func is Tensor.__setitem__ else target


def _change_constant(tracker: Context, func, args, kwargs, whole: Tensor) -> None:
    """Change a constant in place, which becomes derived; ``whole`` is its base, or itself."""
    target = args[0]
    view = (target.shape, target.stride(), target.storage_offset())

    @wraps(func)
    def change_view(first, *operands, **options):
        func(first.as_strided(*view), *operands, **options)

    # A copy, because the operation overwrites the values that it reads.
    copied = (whole.clone(), *args[1:])
    changed = node_of(derive(tracker, OutOfPlace(change_view), copied, kwargs))
    func(*args, **kwargs)
    if isinstance(changed, Derived):
        _stand_for(changed, whole)
        part = node_of(derive(tracker, Tensor.as_strided, (whole, *view), {}))
        if whole is not target and isinstance(part, Derived):
            _stand_for(part, target)


def _change_whole(tracker: Context, func, args, kwargs, before: Derived) -> bool:
    """Change a derived tensor that shares its memory with no other; return whether that is so."""
    target, moves = args[0], func in MOVES_IN_PLACE
    # If only axes move, no value changes in other tensors that share the memory.
    if not (moves or before.is_alone()):
        return False
    function = MOVES_IN_PLACE[func] if moves else OutOfPlace(func)
    changed = node_of(derive(tracker, function, args, kwargs))
    if not isinstance(changed, Derived) or not (moves or same_form(changed.value, before.value)):
        return False
    before.shown = lambda: None
    if same_storage(target, before.value):
        target.data = changed.value.detach()  # for readers of the plain numbers
        show(changed, target)
    else:
        func(*args, **kwargs)
        _stand_for(changed, target)
    return True


def _change_part(tracker: Context, func, args, kwargs, before: Derived, node: Node) -> bool:
    """Change the tensor that a derived one is a view of, and take the view again.

    Returns whether it is one. Of other operands, as of view_as, a view has at most the shape.
    """
    base = before.args[0] if before.index is None else None
    if not isinstance(base, Derived) or not same_storage(before.value, base.value):
        return False
    view_args, view_options = rebuild(
        (before.args[1:], before.kwargs),
        lambda item: item.value if isinstance(item, Node) else item,
    )
    shown = base.shown()
    whole = wrap(base) if shown is None else shown

    @wraps(func)
    def change_part(first, *operands, **options):
        part = before.function(first, *view_args, **view_options)
        func(part, *operands, **options)

    change_part.__module__ = "Tensor"
    before.shown = lambda: None
    change(tracker, change_part, (whole, *args[1:]), kwargs, node)
    part = node_of(derive(tracker, before.function, (whole, *view_args), view_options))
    assert isinstance(part, Derived)
    target = args[0]
    target.data = part.value.detach()
    show(part, target)
    return True


def _is_part(value: Node | None, whole: Node | None, index) -> bool:
    """Whether a tensor is the view of another at an index."""
    if not (isinstance(value, Derived) and isinstance(whole, Derived)):
        return False
    part, expected = value.value, whole.value.detach()[rebuild(index, value_of)]
    same = same_storage(part, expected) and same_form(part, expected)
    return same and bool(part.storage_offset() == expected.storage_offset())


def _free_base(marks: Marks, constant: Tensor) -> Tensor | None:
    """Return the base of a constant, or itself, if that may stand for a derived node.

    It may if this forward made it, perhaps of excluded parameters. Tensors that the model keeps or
    that are trained may not, since they outlive the context.
    """
    base = constant if constant._base is None else constant._base
    plain = type(constant) is type(base) is Tensor and base.layout == torch.strided
    trained = base.requires_grad and base.is_leaf
    if not plain or trained or marks.may_hold_rows(base) or marks.is_kept(base):
        return None
    dense = base.storage_offset() == 0 and same_form(torch.empty_like(base), base)
    return base if dense else None


def _stand_for(node: Derived, constant: Tensor) -> None:
    """Have a constant that was changed in place stand for a derived node, in its own memory.

    Other tensors that share this memory have changed as well. A use of one of them shows in the
    autograd graph, as one that was not seen.
    """
    CONSTANTS.pop(id(constant), None)
    constant.__class__ = DerivedTensor
    node.version = constant._version
    node.tracker.shown[constant.grad_fn] = node
    show(node, constant)
