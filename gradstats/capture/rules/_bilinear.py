"""Bilinear layers: y_o = x₁ᵀ W_o x₂ + b_o."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor
from torch.nn import functional

from gradstats._factors import cast, compute_dtype
from gradstats.capture.following._examples import Examples
from gradstats.capture.parameters._refusals import refuse
from gradstats.capture.parameters._tensors import first_node, node_of, nodes_of, value_of
from gradstats.capture.rules._common import common_rows, locate
from gradstats.capture.uses._layer import bias_factor
from gradstats.capture.uses._linear import outer_factor
from gradstats.capture.uses._tap import Factors, tap

if TYPE_CHECKING:
    from gradstats.capture._context import Context


def bilinear(tracker: Context, func, input1, input2, weight, bias=None):
    """Outer(g, x₁⊗x₂) for the weight, or Outer(g⊗x₁, x₂) if smaller; Vector(Σ_t g) for the bias."""
    nodes = nodes_of((weight, bias))
    if node_of(input1) is not None or node_of(input2) is not None:
        refuse(func, first_node(input1, input2), "with a tracked input has no rule")
    if tracker.marks.is_trained(weight):
        refuse(func, nodes[0], "with a weight that was computed from data has no rule")
    if bias is not None and bias.dim() > 1:
        refuse(func, nodes[0], "with a bias of several axes has no rule", "Add it to the result.")
    data = tracker.marks.data_among((input1, input2))
    layouts = [locate(tracker, func, nodes[0], x, folds=True, trailing=1) for x in data]
    examples = common_rows(func, nodes[0], layouts)
    result = func(input1, input2, value_of(weight), value_of(bias))
    tracked = (node_of(weight) is not None, node_of(bias) is not None)
    factors = BilinearFactors(*tracked, examples, tuple(weight.shape))
    return tap(nodes, result, factors, input1, input2)


@dataclass(frozen=True)
class BilinearFactors(Factors):
    """The factors of a bilinear layer's weight (d_out, d_1, d_2) and bias."""

    weight: bool
    bias: bool
    examples: Examples
    shape: tuple[int, ...]

    def __call__(self, grad: Tensor, first: Tensor, second: Tensor) -> list:
        factors: list = []
        if self.weight:
            # In half precision the products of two operands would be rounded, or overflow.
            dtype = compute_dtype(grad, first, second)
            grad, first, second = (cast(side, dtype) for side in (grad, first, second))
            outputs, _, width = self.shape
            if outputs < width and self.examples.segments is None:
                left, right = _pairs(grad, first), second
            else:
                left, right = grad, _pairs(first, second)
            factors.append(outer_factor(self.examples, left, right, self.shape))
        if self.bias:
            factors.append(bias_factor(self.examples, grad))
        return factors


def _pairs(left: Tensor, right: Tensor) -> Tensor:
    return (left.unsqueeze(-1) * right.unsqueeze(-2)).flatten(-2)


RULES = {functional.bilinear: bilinear}
