"""Matrix products added to something: addmm, baddbmm, in place too."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradstats.capture.parameters._refusals import refuse
from gradstats.capture.parameters._tensors import first_node, node_of
from gradstats.capture.rules._common import are_of_one
from gradstats.capture.rules._products import linear_layer
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
    result = (_addmm if one in ADDMM else Composed(_baddbmm))(tracker, one, *tensors, **named)
    return args[0].copy_(result) if func in IN_PLACE else result


def _addmm(tracker: Context, func, input, mat1, mat2, *, beta=1, alpha=1):
    """With β = α = 1 and a vector of full width it is a linear layer."""
    layer = (beta, alpha) == (1, 1) and input.shape == mat2.shape[1:]
    layer = layer and tracker.marks.is_of_data(mat1)
    # A matrix that was computed from other examples is no layer's weight.
    if layer and (not tracker.marks.is_trained(mat2) or are_of_one(tracker, (mat1, mat2))):
        return linear_layer(tracker, func, mat1, mat2, input, inputs_first=True)
    return Composed(_scaled_addmm)(tracker, func, input, mat1, mat2, beta=beta, alpha=alpha)


def _scaled_addmm(input: Tensor, mat1: Tensor, mat2: Tensor, *, beta, alpha) -> Tensor:
    return _scaled_sum(input, torch.mm(mat1, mat2), beta, alpha)


def _baddbmm(input: Tensor, batch1: Tensor, batch2: Tensor, *, beta=1, alpha=1) -> Tensor:
    return _scaled_sum(input, torch.bmm(batch1, batch2), beta, alpha)


def _scaled_sum(input: Tensor, product: Tensor, beta, alpha) -> Tensor:
    input = input if beta else input.nan_to_num(0, 0, 0)  # which is not read, but has a gradient
    return beta * input.to(product.dtype) + alpha * product


ADDMM = (torch.addmm, Tensor.addmm)

# Forms that change their first operand, with those that return a new tensor.
IN_PLACE = {Tensor.addmm_: Tensor.addmm, Tensor.baddbmm_: Tensor.baddbmm}

RULES = dict.fromkeys((*ADDMM, torch.baddbmm, Tensor.baddbmm, *IN_PLACE), added_product)
