"""Matrix products added to something: addmm, baddbmm, in place too."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradstats.capture.parameters._derived import derive
from gradstats.capture.parameters._refusals import refuse
from gradstats.capture.parameters._tensors import first_node, node_of, value_of
from gradstats.capture.rules._common import are_of_one
from gradstats.capture.rules._products import cast_data, linear_layer, own_parts, product_factors
from gradstats.capture.rules._summed import Part, summed
from gradstats.capture.uses._grafted import Composed

if TYPE_CHECKING:
    from gradstats.capture._context import Context


def added_product(tracker: Context, func, *args, **kwargs):
    """β·input + α·first second, perhaps in place, its numbers by name or, as it once was, first."""
    if func in IN_PLACE and node_of(args[0]) is not None:
        refuse(
            func, first_node(args[0]), "to a tensor that holds nothing of any example has no rule"
        )
    numbers = [item for item in args if not isinstance(item, Tensor)]
    named = dict(zip(("beta", "alpha"), numbers, strict=False)) | kwargs
    tensors = [item for item in args if isinstance(item, Tensor)]
    one = IN_PLACE.get(func, func)
    result = (_addmm if one in ADDMM else _baddbmm)(tracker, one, *tensors, **named)
    return args[0].copy_(result) if func in IN_PLACE else result


def _addmm(tracker: Context, func, input, mat1, mat2, *, beta=1, alpha=1):
    """β·input + α·mat1 mat2; with β = α = 1 and a vector of full width it is a linear layer."""
    layer = (beta, alpha) == (1, 1) and input.shape == mat2.shape[1:]
    layer = layer and tracker.marks.is_of_data(mat1)
    # A matrix that was computed from other examples is no layer's weight.
    if layer and (not tracker.marks.is_trained(mat2) or are_of_one(tracker, (mat1, mat2))):
        return linear_layer(tracker, func, mat1, mat2, input, inputs_first=True)
    return _scaled_sum(tracker, func, torch.mm, input, mat1, mat2, beta, alpha)


def _baddbmm(tracker: Context, func, input, batch1, batch2, *, beta=1, alpha=1):
    """β·input + α·batch1 batch2."""
    batch1, batch2 = own_parts(tracker, func, batch1, batch2)
    if all(node_of(item) is None for item in (input, batch1, batch2)):
        return func(input, batch1, batch2, beta=beta, alpha=alpha)
    return _scaled_sum(tracker, func, torch.bmm, input, batch1, batch2, beta, alpha)


def _scaled_sum(tracker: Context, func, multiply, input, first, second, beta, alpha):
    tracked = [node_of(item) is not None for item in (first, second)]
    if not any(tracked):
        apart = Composed(partial(_apart, multiply))
        return apart(tracker, func, input, first, second, beta=beta, alpha=alpha)
    x = None
    parts: list[Part] = []
    terms: list[tuple[Tensor, float | None]] = [(input, beta)]
    if not tracker.marks.data_among((first, second)):
        # The product belongs to no example: a derived tensor is added to data.
        terms.append((derive(tracker, multiply, (first, second), {}), alpha))
    else:
        first, second = cast_data(tracker, first), cast_data(tracker, second)
        node, x, factors = product_factors(tracker, func, first, second)
        parts.append(Part(node, factors, alpha))
        terms.append((second if tracked[0] else first, None))
    result = func(value_of(input), value_of(first), value_of(second), beta=beta, alpha=alpha)
    return summed(tracker, func, result, x, parts, *terms)


def _apart(multiply, input: Tensor, first: Tensor, second: Tensor, *, beta, alpha) -> Tensor:
    """The same of a product of data, whose examples may meet in it."""
    product = multiply(first, second)
    input = input if beta else input.nan_to_num(0, 0, 0)  # which is not read, but has a gradient
    return beta * input.to(product.dtype) + alpha * product


ADDMM = (torch.addmm, Tensor.addmm)

# Forms that change their first operand, with those that return a new tensor.
IN_PLACE = {Tensor.addmm_: Tensor.addmm, Tensor.baddbmm_: Tensor.baddbmm}

RULES = dict.fromkeys((*ADDMM, torch.baddbmm, Tensor.baddbmm, *IN_PLACE), added_product)
