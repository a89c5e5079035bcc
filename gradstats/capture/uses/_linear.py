"""Products of data with a weight matrix whose backward computes gradients and norms together."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from gradstats._compiler import is_compiling
from gradstats._factors import (
    Elementwise,
    Factor,
    Outer,
    Ragged,
    Vector,
    cast,
    compute_dtype,
)
from gradstats.capture.following._examples import Examples
from gradstats.capture.parameters._nodes import Node
from gradstats.capture.uses._together import Joinable, is_small
from gradstats.capture.uses._uses import Settings, Use, attach, derived, free_of_views, fuse, unseen
from gradstats.contractions import Contraction, Fused, _triton, on_chip, one_position, summed
from gradstats.contractions._multiply import multiply, pays


@dataclass(frozen=True, slots=True)
class LinearFactors(Joinable):
    """The factors of a linear layer, y = x Wᵀ + b or, with ``inputs_first``, y = x W + b.

    Attributes:
        weight, bias: whether each of the two is tracked.
        examples: where the examples lie in x.
        shape: of the weight as the operation takes it.
        inputs_first: that shape is (d_in, d_out), not (d_out, d_in).
        data: whether each of the two was computed from trained data, as in hypernetworks: then
            its gradient leads on to tracked parameters, and is needed even for norms alone.
    """

    weight: bool
    bias: bool
    examples: Examples
    shape: tuple[int, ...]
    inputs_first: bool = False
    data: tuple[bool, bool] = (False, False)

    def __call__(self, grad: Tensor, x: Tensor) -> list:
        factors: list = []
        if self.weight:
            factors.append(self.of_weight(grad, x))
        if self.bias:
            factors.append(bias_factor(self.examples, grad))
        return factors

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return what PyTorch computes."""
        if not self.inputs_first:
            return functional.linear(x, weight, bias)
        return torch.matmul(x, weight) if bias is None else torch.addmm(bias, x, weight)

    def norms(self, grad: Tensor, x: Tensor) -> list[Contraction] | None:
        """Return the squared norms of weight and bias where each row is one example, else None."""
        if not (self.weight and grad.dim() == 2 and self.examples.plain and grad.is_cpu):
            return None
        norms = one_position(grad, x)
        # An example's gradient of the bias is its row of grad, whose norm is a factor of these.
        return [norms, norms.first()] if self.bias else [norms]

    def likeness(self) -> Hashable | None:
        if self.examples.plain:
            return None  # the norms of single rows cost no more than copying them
        return self.weight, self.bias, self.shape, self.inputs_first

    def of_weight(self, grad: Tensor, x: Tensor) -> Outer | Ragged:
        """Return the weight's factor."""
        return outer_factor(self.examples, *self._sides(grad, x), self.shape)

    def weight_gradient(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """Return Σ_i G_i with the weight's strides, so that accumulating it takes no copy."""
        left, right = (rows_of(side) for side in self._sides(grad, cast(x, grad.dtype)))
        if weight.stride(0) == 1:
            return multiply(right.t(), left).t()
        return multiply(left.t(), right)

    def _sides(self, grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return (x, grad) if self.inputs_first else (grad, x)

    def data_gradients(self, nodes: Sequence[Node], grad: Tensor, x: Tensor) -> tuple[Tensor]:
        """Return the gradient of x, computed by tracked operations."""
        return (self.data_gradient(nodes[0], grad),)

    def data_gradient(self, node: Node, grad: Tensor) -> Tensor:
        """Return the gradient of x, by an operation that counts as one more use of the weight."""
        if node.value.dtype != grad.dtype:
            node = derived(node, Tensor.to, grad.dtype)
        again = LinearFactors(True, False, self.examples, self.shape, not self.inputs_first)
        return attach(LinearUse, Use([node]), again, grad, node.value, None)


def _linear_again(ctx, grad: Tensor, x: Tensor, weight: Tensor):
    layer = ctx.layer
    found: list[tuple[int, Tensor]] = []
    if ctx.needs_input_grad[2] and layer.weight:
        found.append((2, layer.data_gradient(ctx.use.nodes[0], grad)))
    elif ctx.needs_input_grad[2]:
        matrix = weight.to(grad.dtype)
        found.append((2, grad.matmul(matrix.t() if layer.inputs_first else matrix)))
    weight_is_data, bias_is_data = layer.data
    if weight_is_data:
        found.append((3, cast(layer.weight_gradient(grad, x, weight), ctx.dtypes[0])))
    if bias_is_data:
        found.append((4, cast(grad.flatten(0, -2).sum(0), ctx.dtypes[1])))
    return found


class LinearUse(torch.autograd.Function):
    """A linear layer whose backward computes norms together with the weight gradient.

    Shapes: x (B, *, d_in), weight (d_out, d_in) or (d_in, d_out), bias (d_out,) or None.
    """

    @staticmethod
    def forward(ctx, use, layer, x, weight, bias):
        ctx.use, ctx.layer = use, layer
        ctx.save_for_backward(x, weight)
        ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
        result = layer.forward(x, weight, bias)
        if x.dim() == 2:
            return result
        # With more than two axes it is a view, which a later relu_ could not change in place. A
        # view of that in turn would leave a graph without its gradient.
        return free_of_views(result) if is_compiling() else result.detach()

    @staticmethod
    @unseen(_linear_again)
    def backward(ctx, grad, x, weight):
        use, settings, layer = ctx.use, ctx.use.settings, ctx.layer
        weight_dtype, bias_dtype = ctx.dtypes
        grad_x = grad_weight = grad_bias = None
        _, _, want_x, want_weight, want_bias = ctx.needs_input_grad
        weight_is_data, bias_is_data = layer.data
        want_weight = want_weight and (settings.weight_gradients or weight_is_data)
        want_bias = want_bias and (settings.weight_gradients or bias_is_data)
        factors: list[Factor | Fused] = []
        if layer.weight:
            factor = layer.of_weight(grad, x)
            if not _is_contracted_here(use, factor, want_weight):
                factors.append(factor)
            else:
                fused = fuse(factor, settings, want_weight)
                if fused.total is not None:
                    grad_weight = cast(fused.total, weight_dtype)
                factors.append(fused)
        if want_weight and grad_weight is None:
            grad_weight = cast(layer.weight_gradient(grad, x, weight), weight_dtype)
        if layer.bias:
            bias = bias_factor(layer.examples, grad)
            reported, grad_bias = bias_report(
                use, bias, len(factors), bias_dtype if want_bias else None
            )
            factors.append(reported)
        elif want_bias:
            grad_bias = grad.flatten(0, -2).sum(0)
        use.deliver(factors)
        # Last, so that the layer below finds its gradient still in the cache.
        if want_x:
            weight = cast(weight, grad.dtype)
            matrix = weight.t() if layer.inputs_first else weight
            # Beside training, the product must be PyTorch's own: differences in rounding would grow
            # from layer to layer in the training gradients.
            product = torch.mm if settings.weight_gradients else multiply
            grad_x = product(rows_of(grad), matrix).view(*grad.shape[:-1], matrix.shape[1])
        return None, None, grad_x, grad_weight, grad_bias


def is_pytorchs_own(
    settings: Settings, x: Tensor, weight: Tensor, examples: Examples, inputs_first: bool
) -> bool:
    """Whether a linear layer is best left to PyTorch, with a hook that reports.

    Who takes inner products takes factors and the training gradient, and a Function's own products
    may be faster than PyTorch's.
    """
    if settings.consumer is not None or not x.is_cpu:
        return False
    if not (x.dim() == 2 and examples.plain):
        outputs, width = reversed(weight.shape) if inputs_first else weight.shape
        small = is_small(settings, x, width, outputs)
        if not (small and examples.joinable and x.is_contiguous()):
            return False
    return settings.exact or not _multiplies_faster(x, weight)


def by_rows(examples: Examples, x: Tensor) -> Examples:
    """Return where the examples lie in data (rows, *, d_in) as PyTorch multiplies them: by rows."""
    return Examples(examples.batch, 0, examples.fold * math.prod(x.shape[1:-1]))


def _multiplies_faster(x: Tensor, weight: Tensor) -> bool:
    """Whether products of our own with data or gradients of these sizes beat PyTorch's."""
    return x.dtype == torch.float32 and pays(math.prod(x.shape[:-1]) * weight.numel())


def _is_contracted_here(use: Use, factor: Outer | Ragged, want_sum: bool) -> bool:
    """Whether the norms of a weight's factor are computed in the backward of its layer.

    In a graph they are where a kernel gives both: loops over the examples would be unrolled there.
    """
    settings = use.settings
    with_sum = want_sum and settings.fused
    if is_compiling() and not on_chip(factor):
        return False
    # A consumer that wants no sum has its own way to norms and products.
    if use.is_sole(0):
        return with_sum or settings.consumer is None
    return with_sum and settings.consumer is None and use.is_tied(factor)


def rows_of(tensor: Tensor) -> Tensor:
    """Return (…, width) as (rows, width)."""
    return tensor if tensor.dim() == 2 else tensor.flatten(0, -2)


def bias_gradient(examples: Examples, grad: Tensor) -> Tensor:
    """Return Σ_t g_t for each example: (B, width) in the accumulation dtype."""
    rows = examples.lead(grad)
    if rows.dim() == 2 and examples.plain:
        return rows
    dtype = compute_dtype(grad)
    if examples.segments is None:
        return examples.positions(grad).sum(1, dtype=dtype)
    return examples.reduce(
        rows.to(dtype) if rows.dim() == 2 else rows.flatten(1, -2).sum(1, dtype=dtype)
    )


def bias_factor(examples: Examples, grad: Tensor, *, channel: int = -1) -> Vector | Elementwise:
    """Return the factor of a bias, Σ_t g_t of each example, summed where no kernel will do that.

    Args:
        examples: where the examples of ``grad`` lie.
        grad: (…, width), or with the width along ``channel``.
        channel: the axis of the bias.
    """
    if channel != -1:
        grad = grad.movedim(channel, -1)
    segments, shape = examples.segments, tuple(grad.shape[-1:])
    alone = grad.dim() == 2 and examples.plain
    if alone or not _triton.streams(grad) or (segments is not None and segments.order is not None):
        return Vector(bias_gradient(examples, grad), shape)
    if segments is None:
        return Elementwise(examples.positions(grad), None, shape)
    rows = examples.lead(grad).flatten(0, -2)
    return Elementwise(rows, None, shape, segments.offsets_of(len(rows)))


def bias_report(
    use: Use,
    factor: Vector | Elementwise,
    place: int,
    wanted: torch.dtype | None,
) -> tuple[Factor | Fused, Tensor | None]:
    """Return what to report of a bias, and Σ_i G_i where wanted, in one pass where possible.

    Args:
        use: of the operation.
        factor: the factor of the bias.
        place: the bias's place among the use's nodes.
        wanted: the dtype of the bias's gradient; None where it is not wanted.
    """
    sole = use.settings.consumer is None and use.is_sole(place)
    if sole and isinstance(factor, Elementwise):
        fused = fuse(factor, use.settings, wanted is not None, wanted)
        return fused, None if fused.total is None else fused.total.to(wanted)
    if wanted is None:
        return factor, None
    vector = summed(factor) if isinstance(factor, Elementwise) else factor
    return vector, cast(vector.values.sum(0), wanted)


def outer_factor(
    examples: Examples, left: Tensor, right: Tensor, shape: tuple[int, ...]
) -> Outer | Ragged:
    """Return the factor Σ_t left_t right_tᵀ, of a parameter in that shape.

    Args:
        examples: where the examples lie in both.
        left, right: (…, p) and (…, q): gradient and data of a product, or data and gradient.
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
