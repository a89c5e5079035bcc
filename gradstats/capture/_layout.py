"""Where the examples lie in a tensor of data after each of the user's operations on it.

By contract, data have their examples along the caller's ``batch_dim``. Where code transposes or
folds that axis, shape alone would mislead: with as many positions as examples, a transposed batch
looks like an untransposed one. Such tensors carry their layout with them. Where it is lost, they
are refused when they meet a parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradstats.capture._einsum import parse_equation
from gradstats.capture._examples import Examples, Grid, Whole
from gradstats.capture._nested import argument_of, flatten
from gradstats.capture._operations import (
    ADDED_PRODUCTS,
    BATCH_FIRST,
    BROADCASTS,
    CONVOLUTIONS,
    JOINS,
    KEEPS,
    LOOKS_AT_FIRST,
    MOVES,
    OUTER_PRODUCTS,
    POINTWISE,
    POOLS,
    PRODUCTS,
    RESHAPES,
    ROW_PRODUCTS,
    SCRAMBLES,
    SHARED_WEIGHT,
    SOLVES,
    SUM_LAST,
    TENSOR_PRODUCTS,
    TRANSPOSED_CONVOLUTIONS,
    UNFOLLOWED,
    variants,
)
from gradstats.capture._reductions import OVER_AXES, QUANTILES, REDUCES, reduced
from gradstats.capture._reindexed import REINDEXES, moved, reshaped
from gradstats.capture._tensors import node_of


def follow(
    func,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    source: Tensor,
    layout: Examples,
    result: Tensor,
) -> Examples | Whole | Grid | None:
    """Return the layout of an operation's result, given the layout of its first data operand.

    Args:
        func, args, kwargs: the operation and its arguments.
        source: the operand.
        layout: its layout.
        result: the operation's result.

    Returns:
        The layout; None if the operation may have lost it.
    """
    if func in SCRAMBLES or takes_for_channels(func, source, layout) or is_one(func, source):
        return None
    if func in MOVES:
        return moved(source, layout, result)
    if func in RESHAPES:
        return reshaped(source, layout, result)
    if func in REINDEXES:
        return REINDEXES[func](func, args, kwargs, source, layout, result)
    if func in OVER_AXES:
        if func in QUANTILES or result.dim() < source.dim():
            return reduced(func, args, kwargs, source, layout, result)
        # It may have more axes where it was broadcast against other operands, and the axes that
        # were reduced may be kept with size 1.
        kept = result.shape[layout.axis] == source.shape[layout.axis]
        return layout if kept and result.dim() == source.dim() else None
    if result.dim() <= layout.axis:
        return None
    lead = layout.axis + 1
    return layout if result.shape[:lead] == source.shape[:lead] else None


def stays(func, source: Tensor, layout: Examples, result: Tensor) -> bool:
    """Whether a result of ``PLAIN_VIEWS`` obviously has its examples where the operand has them.

    Where this is not obvious, ``follow`` has the answer, but takes ten times as long.
    """
    lead = layout.axis + 1
    if result.shape[:lead] != source.shape[:lead]:
        return False
    if func not in MOVES:
        return True
    # As in ``moved``: the axis has kept its stride, and no other axis has the same.
    stride, strides = source.stride(layout.axis), result.stride()
    return strides[layout.axis] == stride and strides.count(stride) == 1


def is_one(func, source: Tensor) -> bool:
    """Whether a convolution takes its operand for one example."""
    return func in CONVOLUTIONS and source.dim() == CONVOLUTIONS[func] + 1


def takes_for_channels(func, source: Tensor, layout: Examples) -> bool:
    """Whether an operation on images takes the examples for channels, or places, that it mixes."""
    apart = source.dim() - POOLS[func] if func in POOLS else 1
    return func in BATCH_FIRST and layout.axis >= apart


def aligned(func, args: Sequence[Any]) -> bool:
    """Whether trained operands obviously have their examples where the first operand has them.

    Broadcasting aligns axes from the right, so the examples of one may meet positions of another.
    """
    for item in args[1:]:
        if not isinstance(item, Tensor) or node_of(item) is not None:
            continue
        if item.requires_grad or item.dim() > args[0].dim():
            if func in SHARED or item.dim() != args[0].dim():
                return False
    return True


def keeps_examples(func, args: Sequence[Any], axis: int, result) -> bool:
    """Whether an operation that is not in ``WATCHED`` obviously leaves the examples where they are.

    Args:
        func: the operation.
        args: its operands; the first is data.
        axis: the example axis.
        result: what it returned.
    """
    if not isinstance(result, Tensor):
        return not any(isinstance(item, Tensor) and item.requires_grad for item in flatten(result))
    first = args[0]
    if func in BROADCASTS and not all(
        item.dim() in (0, result.dim())
        for item in args
        if isinstance(item, Tensor) and node_of(item) is None
    ):
        return False
    if is_one(func, first) or not aligned(func, args):
        return False
    if func in SUM_LAST and first.dim() == axis + 1:
        return False  # the examples' axis is summed
    if func in BATCH_FIRST and axis != 0:
        return False  # it takes the examples' axis for channels or positions
    if not result.requires_grad:
        return True
    if func not in KEEPS:
        return False
    if first.dim() <= axis:
        return True
    return result.dim() > axis and result.shape[axis] == first.shape[axis]


def leaves(func, source: Tensor, axis: int, result) -> bool:
    """Whether an operation over other axes leaves the examples' axis in its place."""
    if not isinstance(result, Tensor):
        result = result[0]
    if axis == 0:
        return 0 < result.dim() <= source.dim() and func not in QUANTILES
    return result.dim() == source.dim()


def keeps_rows(operands: Sequence[Tensor], axis: int) -> bool:
    """Whether a product only multiplies entries at the same place along an axis."""
    if len(operands) != 2:
        return False
    first, second = operands
    return first.dim() == second.dim() > axis + 2 and second.shape[axis] != 1


def _indices(args: tuple[Any, ...]) -> tuple[list[list[str]], list[str]]:
    """Return the indices of an equation's operands and of its result."""
    equation, *operands = args
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = list(operands[0])
    return parse_equation(equation, [operand.dim() for operand in operands])


def contracted(args: tuple[Any, ...], place: int, layout: Examples) -> Examples | None:
    """Return where an equation puts the examples of the operand at ``place``."""
    inputs, out = _indices(args)
    letter = inputs[place][layout.axis]
    return layout.along(out.index(letter)) if letter in out else None


def contracted_over(args: tuple[Any, ...], place: int, layout: Examples) -> str:
    """Return the index by which an equation knows the examples of the operand at ``place``."""
    return _indices(args)[0][place][layout.axis]


def summed_against(args: tuple[Any, ...], layout: Examples) -> int | None:
    """Return the axis of the first of two operands over which the second's examples are summed."""
    equation, *operands = args
    if len(operands) != 2:
        return None
    (first, second), out = parse_equation(equation, [operand.dim() for operand in operands])
    letter = second[layout.axis]
    return first.index(letter) if letter in first and letter not in out else None


def in_front(result: Tensor, place: int, layout: Examples) -> Examples | None:
    """Axes in front of a result's last one stay where they are in the operands."""
    return layout if layout.axis < result.dim() - 1 else None


def tensordot(func, args: tuple[Any, ...], kwargs, place: int, layout: Examples) -> Examples | None:
    """The result has the first operand's remaining axes, then those of the second."""
    summed = _summed_by_tensordot(func, args, kwargs)
    left = [
        [axis for axis in range(tensor.dim()) if axis not in axes]
        for tensor, axes in zip(args[:2], summed, strict=True)
    ]
    if layout.axis not in left[place]:
        return None
    return layout.along(left[place].index(layout.axis) + (len(left[0]) if place else 0))


def tensordot_over(func, args: tuple[Any, ...], kwargs, place: int, layout: Examples) -> int:
    """Return which pair of axes that are summed the examples of an operand lie along."""
    return _summed_by_tensordot(func, args, kwargs)[place].index(layout.axis)


def _summed_by_tensordot(func, args: tuple[Any, ...], kwargs) -> list[list[int]]:
    """Return over which axes of both operands is summed, counted from the first."""
    if func is torch.tensordot:
        dims = argument_of(args, kwargs, 2, "dims", 2)
    else:
        dims = ([], []) if func in OUTER_PRODUCTS else ([-1], [-1])
    summed = summed_axes(dims, args[0].dim())
    return [
        [axis % tensor.dim() for axis in axes]
        for tensor, axes in zip(args[:2], summed, strict=True)
    ]


def summed_axes(dims: Any, count: int) -> list[Sequence[int]]:
    """Return over which axes of each operand tensordot sums; the first one has ``count`` axes."""
    if isinstance(dims, Tensor):
        dims = dims.tolist() if dims.numel() > 1 else int(dims)
    if isinstance(dims, int):
        dims = range(count - dims, count), range(dims)
    return [[axes] if isinstance(axes, int) else axes for axes in dims]


def convolved(
    func, args: tuple[Any, ...], kwargs, result: Tensor, place: int, layout: Examples
) -> Examples | None:
    """With groups of channels, the same number for each example, each has a kernel of its own."""
    if layout.batch == 1:
        return Examples(1, 0, len(result))
    if place == 0 and layout.axis == 0:
        return layout
    if layout.axis != (1 if place == 0 else 0):
        return None
    owner = layout.owner(result.device)
    if place == 0 or (place == 1 and func in TRANSPOSED_CONVOLUTIONS):
        groups = argument_of(args, kwargs, 6, "groups", 1)
        owners = owner.view(groups, -1)
        if not bool((owners == owners[:, :1]).all()):
            return None  # examples are summed
        owner = owners[:, 0].repeat_interleave(result.shape[1] // groups)
    return layout.owned_by(owner, 1)


def convolved_over(func, place: int, layout: Examples) -> tuple[int, int] | str:
    """Return over what a convolution sums the examples of an operand: its channels, or places."""
    channels = 0 if place == 1 and func in TRANSPOSED_CONVOLUTIONS else 1
    return "channels" if layout.axis == channels else (place, layout.axis)


# Operations that may give data another layout than the contract's.
CHANGES = frozenset().union(
    MOVES, RESHAPES, JOINS, REINDEXES, UNFOLLOWED, SCRAMBLES, PRODUCTS, ADDED_PRODUCTS,
    SOLVES, TENSOR_PRODUCTS,
)  # fmt: skip

# Views of one operand in which the rows that are left on the example axis keep their order.
PLAIN_VIEWS = (MOVES - {torch.einsum}) | RESHAPES | frozenset(variants("chunk"))

# Operations whose effect on layouts is known.
FOLLOWED = KEEPS | CHANGES | frozenset(OVER_AXES) | frozenset({torch.broadcast_tensors})

# Operations that are followed on nested tensors, whose rows are examples, too.
ON_NESTED = (
    POINTWISE
    | BROADCASTS
    | frozenset([*REDUCES, torch._nested_view_from_jagged, *variants("unbind")])
)


def is_shared(func, args: tuple[Any, ...], kwargs: dict[str, Any], tensor: Tensor) -> bool:
    """Whether a tensor is the weight of an operation of ``SHARED_WEIGHT``."""
    place = SHARED_WEIGHT.get(func)
    if place is None:
        return False
    return tensor is argument_of(args, kwargs, place, "weight")


# Operations with an operand that all examples share, unless it was computed from data.
SHARED = LOOKS_AT_FIRST | ROW_PRODUCTS | frozenset(SHARED_WEIGHT)
