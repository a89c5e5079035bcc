"""Operations of parameters and data with rows along two axes, as of experts of fixed capacity.

They are taken apart along one of the two axes, so that each part has its rows along the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from gradstats.capture.following._examples import axes_of
from gradstats.capture.following._slots import settled, slots_of
from gradstats.capture.operations._einsum import matrix_product, parse_equation
from gradstats.capture.operations._nested import operands_of, rebuild
from gradstats.capture.operations._operations import (
    BROADCASTS,
    ELEMENT_LOSSES,
    IN_PLACE,
    PRODUCTS,
)
from gradstats.capture.parameters._tensors import node_of
from gradstats.capture.uses._grafted import Composed

if TYPE_CHECKING:
    from gradstats.capture._context import Context

# Operations that treat all rows of their first operand alike.
OF_ROWS = frozenset({functional.linear, functional.layer_norm, functional.rms_norm})

# Operations that return a new tensor of their operands' broadcast shape.
ELEMENTWISE = BROADCASTS.difference(IN_PLACE, ELEMENT_LOSSES, {torch.broadcast_tensors})


def run_on_slots(
    tracker: Context, func, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor | None:
    """Run an operation of parameters and rows along two axes; None if it is not one."""
    marks = tracker.marks
    operands = operands_of(args, kwargs)
    found = None
    for item in operands:
        owner = slots_of(marks, item) if node_of(item) is None else None
        if owner is not None and settled(marks, item) is None and found is None:
            found = item, axes_of(owner)
    if found is None or kwargs.get("out") is not None:
        return None
    item, axes = found
    cuts = [(_cut(func, args, operands, item, axis), item.shape[axis]) for axis in axes]
    possible = [(*cut, parts) for cut, parts in cuts if cut is not None]
    if not possible:
        return None
    # Preferably along an axis that the weights have too, such as that of the experts.
    along, result_axis, parts = min(possible, key=lambda cut: cut[0].count(None))
    run = partial(_in_parts, func, along, parts, result_axis)
    return Composed(run)(tracker, func, *args, **kwargs)


def _in_parts(
    func, along: Sequence[int | None], parts: int, result_axis: int, /, *args, **kwargs
) -> Tensor:
    """Run an operation part by part.

    Args:
        func, args, kwargs: the operation.
        along: for each operand, the axis along which it is cut; None if all parts share it.
        parts: the number of parts.
        result_axis: the axis along which the results are concatenated.
    """
    results = []
    for part in range(parts):
        axes = iter(along)

        def cut(item, axes=axes, part=part):
            if not isinstance(item, Tensor):
                return item
            axis = next(axes)
            return item if axis is None else item.narrow(axis, part, 1)

        results.append(func(*rebuild(args, cut), **rebuild(kwargs, cut)))
    return torch.cat(results, result_axis)


def _cut(
    func, args: tuple[Any, ...], operands: Sequence[Tensor], item: Tensor, axis: int
) -> tuple[list[int | None], int] | None:
    """Return the axes of operands and result along which to take an operation apart, or None.

    Args:
        func, args, operands: the operation.
        item, axis: the operand with rows along two axes, and one of the two.
    """
    if func in OF_ROWS:
        if item is not operands[0] or axis > item.dim() - 3:
            return None
        return [axis, *[None] * (len(operands) - 1)], axis
    if func in ELEMENTWISE:
        dims = max(map(Tensor.dim, operands))
        inputs = [[*range(dims - each.dim(), dims)] for each in operands]
        out = [*range(dims)]
    elif func in PRODUCTS and len(operands) == 2:
        inputs, out = matrix_product(*map(Tensor.dim, operands))
    elif func is torch.einsum and len(operands) == 2:
        inputs, out = parse_equation(args[0], operands)
    else:
        return None
    place = next(place for place, each in enumerate(operands) if each is item)
    index = inputs[place][axis]
    if index not in out or any(spec.count(index) > 1 for spec in inputs):
        return None
    along = [
        spec.index(index) if index in spec and each.shape[spec.index(index)] > 1 else None
        for spec, each in zip(inputs, operands, strict=True)
    ]
    return along, out.index(index)
