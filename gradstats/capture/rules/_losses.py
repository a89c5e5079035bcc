"""Losses of elements and of classes with a tracked operand."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor
from torch.nn import functional

from gradstats.capture.operations._nested import argument_of, flatten, rebuild
from gradstats.capture.operations._operations import ELEMENT_LOSSES
from gradstats.capture.parameters._refusals import refuse
from gradstats.capture.parameters._tensors import first_node, node_of, value_of
from gradstats.capture.rules._common import as_data, rows_along
from gradstats.capture.rules._elementwise import broadcast

if TYPE_CHECKING:
    from gradstats.capture._context import Context

# Losses that require an operand to have the input's shape, with its place and name.
LIKE_INPUT = {
    functional.mse_loss: (5, "weight"),
    functional.l1_loss: (5, "weight"),
    functional.huber_loss: (4, "weight"),
    functional.binary_cross_entropy: (1, "target"),
    functional.binary_cross_entropy_with_logits: (1, "target"),
}


def element_loss(tracker: Context, func, *args, **kwargs):
    """Losses of elements with tracked targets, variances or weights."""
    _check_reduction(func, args, kwargs)
    if func in LIKE_INPUT:
        input = argument_of(args, kwargs, 0, "input")
        other = argument_of(args, kwargs, *LIKE_INPUT[func])
        if isinstance(other, Tensor) and other.shape != input.shape:
            return func(*rebuild(args, value_of), **rebuild(kwargs, value_of))  # PyTorch's error
    return broadcast(tracker, func, *args, **kwargs)


def class_loss(tracker: Context, func, input, target, *args, **kwargs):
    """Losses of classes with tracked scores that have a slice for each example."""
    _check_reduction(func, (input, target, *args), kwargs)
    weight = argument_of(args, kwargs, 0, "weight")
    if node_of(weight) is not None:
        product = "-(weight * target * input.log_softmax(1)).sum(1)"
        if not target.is_floating_point():
            product = 'weight[target] * cross_entropy(input, target, reduction="none")'
        remedy = f"Multiply in the model: {product}."
        refuse(func, first_node(weight), "with a tracked weight of the classes has no rule", remedy)
    node = first_node(input, target)
    examples = rows_along(tracker, func, node, (input, target), 0)
    operands = (as_data(tracker, func, node, item, examples) for item in (input, target))
    return func(*operands, *args, **kwargs)


def _check_reduction(func, args, kwargs) -> None:
    if kwargs.get("reduction") != "none":
        node = first_node(*flatten((args, kwargs)))
        refuse(func, node, "sums over the examples", 'Pass reduction="none".')


RULES = {
    **dict.fromkeys(ELEMENT_LOSSES, element_loss),
    functional.cross_entropy: class_loss,
    functional.nll_loss: class_loss,
}
