"""Convolutions whose backward computes the weight gradient and the norms together."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradstats._compiler import is_compiling
from gradstats._factors import (
    ConvolutionGeometry,
    Elementwise,
    Factor,
    Images,
    Patches,
    Segments,
    Vector,
    compute_dtype,
    convolved,
)
from gradstats.capture.following._examples import Examples
from gradstats.capture.parameters._nodes import Node
from gradstats.capture.uses._linear import bias_factor, bias_report
from gradstats.capture.uses._together import Joinable
from gradstats.capture.uses._uses import Use, attach, derived, fuse, unseen
from gradstats.contractions import Fused, _triton, on_chip


@dataclass(frozen=True, slots=True)
class ConvolutionFactors(Joinable):
    """The factors of a convolution.

    Attributes:
        weight, bias: whether each of the two is tracked.
        examples: where the examples lie.
        shape: of the weight: (O, C / groups, *kernel), transposed (C, O / groups, *kernel).
        call: (stride, padding, dilation, transposed, output padding, groups).
        data: whether each of the two was computed from trained data (see ``LinearFactors``).
    """

    weight: bool
    bias: bool
    examples: Examples
    shape: tuple[int, ...]
    call: tuple
    data: tuple[bool, bool] = (False, False)

    def __call__(self, grad: Tensor, x: Tensor) -> list:
        factors: list = []
        if self.weight:
            factors.append(convolution_factor(self.examples, grad, x, self.shape, self.call))
        if self.bias:
            factors.append(channel_factor(self.examples, grad))
        return factors

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return what PyTorch computes."""
        return torch.convolution(x, weight, bias, *self.call)

    def likeness(self) -> Hashable:
        return self.weight, self.bias, self.shape, self.call

    def data_gradients(self, nodes: Sequence[Node], grad: Tensor, x: Tensor) -> tuple[Tensor]:
        """Return the gradient of x, computed by tracked operations."""
        return (self.data_gradient(nodes[0], grad, x),)

    def data_gradient(self, node: Node, grad: Tensor, x: Tensor) -> Tensor:
        """Return the gradient of x, by an operation that counts as one more use of the weight."""
        call = adjoint_convolution(self.call, x.shape[2:], self.shape[2:], grad.shape[2:])
        if node.value.dtype != grad.dtype:
            node = derived(node, Tensor.to, grad.dtype)
        again = ConvolutionFactors(True, False, self.examples, self.shape, call)
        return attach(ConvolutionUse, Use([node]), again, grad, node.value, None)


def _convolution_again(ctx, grad: Tensor, x: Tensor, weight: Tensor):
    layer = ctx.layer
    weight_is_data, bias_is_data = layer.data
    found: list[tuple[int, Tensor]] = []
    if bias_is_data:
        found.append((4, _channel_sum(grad).to(ctx.bias_dtype)))
    if weight_is_data:
        wanted = [False, True, False]
        found.append((3, convolution_gradients(layer.call, grad, x, weight, wanted)[1]))
    if ctx.needs_input_grad[2] and layer.weight:
        found.append((2, layer.data_gradient(ctx.use.nodes[0], grad, x)))
    elif ctx.needs_input_grad[2]:
        call = adjoint_convolution(layer.call, x.shape[2:], weight.shape[2:], grad.shape[2:])
        found.append((2, torch.convolution(grad, weight, None, *call)))
    return found


def adjoint_convolution(call, input, kernel, output):
    """Return the call that maps a convolution's output gradient to its input gradient.

    Args:
        call: (stride, padding, dilation, transposed, output padding, groups).
        input, kernel, output: spatial sizes.
    """
    stride, padding, dilation, transposed, _, groups = call
    rest = [
        0 if transposed else i - ((o - 1) * s - 2 * p + d * (k - 1) + 1)
        for i, k, o, s, p, d in zip(
            input, kernel, output, stride, padding, dilation, strict=True
        )
    ]  # fmt: skip
    return stride, padding, dilation, not transposed, tuple(rest), groups


def convolution_gradients(call, grad: Tensor, x: Tensor, weight: Tensor, wanted: list[bool]):
    """Return PyTorch's gradients of a convolution's input, weight and bias, those ``wanted``."""
    stride, padding, dilation, transposed, output_padding, groups = call
    return torch.ops.aten.convolution_backward(
        grad, x, weight, None, stride, padding, dilation, transposed, output_padding, groups,
        wanted,
    )  # fmt: skip


def _channel_sum(grad: Tensor) -> Tensor:
    """Return the gradient of a bias, summed over the batch: (C,) in the accumulation dtype."""
    return grad.sum((0, *range(2, grad.dim())), dtype=compute_dtype(grad))


class ConvolutionUse(torch.autograd.Function):
    """A convolution whose backward computes weight gradient and squared norms in one pass.

    Shapes: x (B, C, *spatial), the weight as ``ConvolutionFactors`` has it.
    """

    @staticmethod
    def forward(ctx, use, layer, x, weight, bias):
        ctx.use, ctx.layer = use, layer
        ctx.save_for_backward(x, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return layer.forward(x, weight, bias)

    @staticmethod
    @unseen(_convolution_again)
    def backward(ctx, grad, x, weight):
        use, settings, layer = ctx.use, ctx.use.settings, ctx.layer
        weight_is_data, bias_is_data = layer.data
        _, _, want_x, want_weight, want_bias = ctx.needs_input_grad
        want_weight = want_weight and (settings.weight_gradients or weight_is_data)
        want_bias = want_bias and (settings.weight_gradients or bias_is_data)
        factors: list[Factor | Fused] = []
        grad_weight = grad_bias = None
        if layer.weight:
            patches = convolution_factor(layer.examples, grad, x, layer.shape, layer.call)
            here = use.is_sole(0) and (on_chip(patches) or not is_compiling())
            here = here and not isinstance(patches, Images)  # whose sum is a product apart
            if here and want_weight and settings.fused:
                fused = fuse(patches, settings, want_sum=True)
                assert fused.total is not None
                grad_weight = fused.total.to(weight.dtype)
                want_weight = False
                factors.append(fused)
            else:
                factors.append(patches)
        if layer.bias:
            bias = channel_factor(layer.examples, grad)
            reported, grad_bias = bias_report(
                use, bias, len(factors), ctx.bias_dtype if want_bias else None
            )
            factors.append(reported)
        elif want_bias:
            grad_bias = _channel_sum(grad).to(ctx.bias_dtype)
        use.deliver(factors)
        grad_x = None
        if want_x or want_weight:
            wanted = [want_x, want_weight, False]
            grad_x, native, _ = convolution_gradients(layer.call, grad, x, weight, wanted)
            grad_weight = native if want_weight else grad_weight
        return None, None, grad_x, grad_weight, grad_bias


def channel_factor(examples: Examples, grad: Tensor) -> Vector | Elementwise:
    """Return the factor of a bias of channels, already summed where no kernel will do that."""
    if _triton.streams(grad):
        return bias_factor(examples, grad, channel=1)
    of_rows = grad.to(compute_dtype(grad)).flatten(2).sum(2)
    return Vector(examples.reduce(of_rows), (grad.shape[1],))


def convolution_factor(
    examples: Examples, grad: Tensor, x: Tensor, shape: tuple[int, ...], call
) -> Factor:
    """Return the factor of a convolution's weight."""
    stride, padding, dilation, transposed, output_padding, groups = call
    if transposed:
        x, grad = grad, x
        if any(extra >= step for extra, step in zip(output_padding, stride, strict=True)):
            # Padding both sides alike would give more positions than the input has: crop the end.
            sides = [(p, p - extra) for p, extra in zip(padding, output_padding, strict=True)]
            x = torch.nn.functional.pad(x, [amount for side in reversed(sides) for amount in side])
            padding = (0,) * len(padding)
    geometry = ConvolutionGeometry(tuple(stride), tuple(padding), tuple(dilation), groups)
    if examples.even and (len(stride) < 3 or examples.most == 1):
        return convolved(examples.first(x), examples.first(grad), shape, geometry)
    segments = examples.segments
    if segments is None:
        segments = Segments(examples.owner(x.device), examples.batch)
    rows = Patches(segments.sorted(x), segments.sorted(grad), shape, geometry)
    owners = segments.counts.nonzero().squeeze(1).tolist() or [0]
    pieces = (rows.select(slice(*segments.offsets[owner : owner + 2])) for owner in owners)
    return Images(tuple(pieces), tuple(owners), examples.batch)
