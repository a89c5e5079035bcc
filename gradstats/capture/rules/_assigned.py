"""Parameters written into data, where slices, numbers, indices or a mask select."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradstats._compiler import is_compiling
from gradstats.capture.following._indexing import as_tuple, axes_until, items_of
from gradstats.capture.operations._nested import tensors_in
from gradstats.capture.parameters._nodes import Node
from gradstats.capture.parameters._refusals import refuse
from gradstats.capture.parameters._tensors import first_node, node_of
from gradstats.capture.rules._common import lined_up, locate, run
from gradstats.capture.rules._elementwise import BroadcastFactors, broadcast
from gradstats.capture.rules._in_place import write_data
from gradstats.capture.uses._tap import Factors, tap

if TYPE_CHECKING:
    from gradstats.capture._context import Context


def assign(tracker: Context, func, input, index, value):
    """x[:, ...] = w and x[mask] = w: a part of the data is overwritten."""
    node = first_node(*tensors_in((input, index, value)))
    if node_of(input) is not None:
        return write_data(tracker, func, (input, index, value), {})
    if not tracker.marks.is_data(input):
        refuse(func, node, "to a tensor that belongs to no example has no rule")
    given = as_tuple(index)
    if len(given) == 1 and isinstance(given[0], Tensor) and given[0].dtype == torch.bool:
        return _assign_where(tracker, func, node, input, index, given[0], value)
    items = items_of(input, index)
    if any(isinstance(item, Tensor) for item in items):
        selected = _selected(tracker, func, node, input, items)
        return _assign_where(tracker, func, node, input, index, selected, value)
    axis = locate(tracker, func, node, input).axis
    # The part must hold all examples, along the same axis.
    if any(item != slice(None) for item in items[: axis + 1]):
        refuse(func, node, "to some of the examples has no rule")
    part = input[index]
    tracker.marks.place_like(part, input)
    if value.dim() > part.dim():
        # PyTorch drops leading axes of size 1, and refuses others.
        value = run(tracker, Tensor.view, value, value.shape[value.dim() - part.dim() :])
    return broadcast(tracker, Tensor.copy_, part, value)


def _selected(tracker: Context, func, node: Node, input, items: list) -> Tensor:
    """Return the mask of the places that indices select, over the axes up to their last."""
    if is_compiling():
        refuse(func, node, "by index tensors has no rule in a compiled graph")
    axes = axes_until(items)
    mask = torch.zeros(input.shape[:axes], dtype=torch.bool, device=input.device)
    numbers = torch.arange(mask.numel(), device=input.device)
    places = numbers.view(*mask.shape, *(1 for _ in range(input.dim() - axes)))[tuple(items)]
    mask.view(-1)[places.flatten()] = True
    if int(mask.sum()) != places.numel():
        # PyTorch's gradient counts such a place as often as it is selected.
        refuse(func, node, "to places that are selected twice has no rule")
    if locate(tracker, func, node, input, folds=True).axis < axes:
        tracker.marks.place_like(mask, input)
    else:
        tracker.marks.mark_constant(mask)
    return mask


def _assign_where(tracker: Context, func, node: Node, input, index, mask, value) -> None:
    """Write one slice of a tracked tensor to all places that an index selects, as mask tokens are.

    Args:
        mask: true at the places that ``index`` selects.
    """
    rest = input.dim() - mask.dim()
    one = value.dim() <= rest or (value.dim() == rest + 1 and value.shape[0] == 1)
    if not one:
        refuse(func, node, "of a different slice for each selected place has no rule")
    shown = mask.reshape(*mask.shape, *(1 for _ in range(rest)))
    tracker.marks.place_like(shown, mask)
    layout = lined_up(tracker, func, node, (input, shown))
    if not layout.serves(value.shape):
        refuse(func, node, "of a slice for each row of an example has no rule")
    func(input, index, node.value)
    factors = MaskedFactors(BroadcastFactors(layout, tuple(value.shape)))
    tap([node], input, factors, shown)


@dataclass(frozen=True)
class MaskedFactors(Factors):
    """The factor of a term that was written where a mask is true."""

    factors: BroadcastFactors

    def __call__(self, grad: Tensor, mask: Tensor) -> list:
        return self.factors(grad.masked_fill(~mask, 0))


def masked_fill_in_place(tracker: Context, func, input, *args, **kwargs):
    """A tracked tensor filled where a mask of data is true."""
    if node_of(input) is None:
        node = first_node(*args, *kwargs.values())
        refuse(func, node, "of a trained value has no rule", "Write x = x.masked_fill(mask, w).")
    return write_data(tracker, func, (input, *args), kwargs)


RULES = {Tensor.__setitem__: assign, Tensor.masked_fill_: masked_fill_in_place}
