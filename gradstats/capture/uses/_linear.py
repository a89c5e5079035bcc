"""Products of data with a weight matrix."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from gradstats._factors import Outer, Ragged, cast
from gradstats.capture.following._examples import Examples
from gradstats.capture.uses._layer import Layer
from gradstats.capture.uses._together import is_small
from gradstats.capture.uses._uses import Settings
from gradstats.contractions import Contraction, _prepared, one_position
from gradstats.contractions._multiply import multiply, pays
from gradstats.contractions._prepared import OfOuter


@dataclass(frozen=True, slots=True)
class LinearFactors(Layer):
    """The factors of a linear layer, y = x Wᵀ + b or, with ``inputs_first``, y = x W + b.

    Attributes:
        inputs_first: whether the shape is (d_in, d_out), not (d_out, d_in).
        by_columns: whether the weight's columns are contiguous. Its gradient is laid out likewise,
            so that accumulating it takes no copy.
    """

    inputs_first: bool
    by_columns: bool

    channel: ClassVar[int] = -1
    reads_weight: ClassVar[bool] = False
    reads_data: ClassVar[bool] = False

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not self.inputs_first:
            return functional.linear(x, weight, bias)
        return torch.matmul(x, weight) if bias is None else torch.addmm(bias, x, weight)

    def norms(self, grad: Tensor, x: Tensor) -> list[Contraction] | None:
        """Return the squared norms of weight and bias if each row is one example, else None."""
        if not (self.weight and grad.dim() == 2 and self.examples.plain and grad.is_cpu):
            return None
        norms = one_position(grad, x)
        # The bias's gradient is the example's row of grad; ``norms`` has its norm as a factor.
        return [norms, norms.first()] if self.bias else [norms]

    def likeness(self) -> Hashable | None:
        if self.examples.plain:
            return None  # copying single rows would cost as much as their norms
        return self.weight, self.bias, self.shape, self.inputs_first

    def of_weight(self, grad: Tensor, x: Tensor) -> Outer | Ragged:
        return outer_factor(self.examples, *self._sides(grad, x), self.shape)

    def prepared_weight(self, grad: Tensor, x: Tensor, want_weight: bool) -> OfOuter | None:
        factor = self.of_weight(grad, x)
        assert isinstance(factor, Outer)
        if is_copied((factor.left, factor.right), self._sides(grad, x)):
            return None
        found = _prepared.of_outer(factor, with_sum=want_weight)
        if found is None or not self.inputs_first:
            return found
        return lambda grad, x: found(x, grad)

    def adjoint(self, grad: Tensor, x: Tensor) -> LinearFactors:
        of_weight = True, False, self.examples, self.shape, (False, False)
        return LinearFactors(*of_weight, not self.inputs_first, self.by_columns)

    def gradients(
        self, settings: Settings, grad: Tensor, x: Tensor, weight: Tensor, wanted: Sequence[bool]
    ) -> Sequence[Tensor | None]:
        grad_x = grad_weight = None
        want_x, want_weight = wanted
        if want_weight:
            left, right = map(rows_of, self._sides(grad, cast(x, grad.dtype)))
            if self.by_columns:
                grad_weight = multiply(right.t(), left).t()
            else:
                grad_weight = multiply(left.t(), right)
        if want_x:
            weight = cast(weight, grad.dtype)
            matrix = weight.t() if self.inputs_first else weight
            # For training gradients, the product must be PyTorch's own: differences in rounding
            # would grow from layer to layer.
            product = torch.mm if settings.weight_gradients else multiply
            grad_x = product(rows_of(grad), matrix).view(*grad.shape[:-1], matrix.shape[1])
        return grad_x, grad_weight

    def _sides(self, grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return (x, grad) if self.inputs_first else (grad, x)


def is_pytorchs_own(
    settings: Settings, x: Tensor, weight: Tensor, examples: Examples, inputs_first: bool
) -> bool:
    """Whether a linear layer is best left to PyTorch, with a hook that reports.

    Not for a consumer, which needs factors and the training gradient too, and not if our own
    products are faster than PyTorch's.
    """
    if settings.consumer is not None or not x.is_cpu:
        return False
    if not (x.dim() == 2 and examples.plain):
        outputs, width = reversed(weight.shape) if inputs_first else weight.shape
        small = is_small(settings, x, width, outputs)
        if not (small and examples.joinable and x.is_contiguous()):
            return False
    positions = math.prod(x.shape[:-1])
    return settings.exact or x.dtype != torch.float32 or not pays(positions * weight.numel())


def is_copied(held: Sequence[Tensor], sides: Sequence[Tensor]) -> bool:
    """Whether a factor holds copies of the tensors that it was made of."""
    return [each.data_ptr() for each in held] != [each.data_ptr() for each in sides]


def by_rows(examples: Examples, x: Tensor) -> Examples:
    """Return the layout of data (rows, *, d_in) after flattening to rows, as PyTorch does."""
    return Examples(examples.batch, 0, examples.fold * math.prod(x.shape[1:-1]))


def rows_of(tensor: Tensor) -> Tensor:
    """Return (…, width) as (rows, width)."""
    return tensor if tensor.dim() == 2 else tensor.flatten(0, -2)


def outer_factor(
    examples: Examples, left: Tensor, right: Tensor, shape: tuple[int, ...]
) -> Outer | Ragged:
    """Return the factor Σ_t left_t right_tᵀ of a parameter.

    Args:
        examples: where the examples lie in both.
        left, right: (…, p) and (…, q): a product's gradient and data, or data and gradient.
        shape: of the parameter.
    """
    if examples.segments is None:
        return Outer(_one_group(examples, left), _one_group(examples, right), shape)
    left, right = (
        examples.segments.sorted(examples.lead(side)).flatten(0, -2) for side in (left, right)
    )
    return Ragged(left, right, examples.segments.offsets_of(len(left)), shape)


def _one_group(examples: Examples, tensor: Tensor) -> Tensor:
    """Return (rows, *, width) as (B, 1, T, width)."""
    if tensor.dim() == 2 and examples.axis == 0:
        return tensor.view(examples.batch, 1, examples.fold, tensor.shape[1])
    return examples.positions(tensor).unsqueeze(1)
