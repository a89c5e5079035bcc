"""Image patches: convolutions of all kinds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradstats._convolution_cost import ConvolutionWay, convolution_way
from gradstats._cost import FRESH_BYTES
from gradstats._factors._factor import compute_dtype
from gradstats._factors._outer import Outer


@dataclass(frozen=True)
class ConvolutionGeometry:
    """Stride, padding and dilation per spatial axis, and the number of groups."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


@dataclass(frozen=True)
class Patches:
    """G_i = Σ_t grad[i,·,t] patch_t(input_i)ᵀ: convolutions, without patches in memory.

    A transposed convolution is the same with its input and its output gradient exchanged.

    Attributes:
        input: (B, C, *spatial).
        grad: (B, O, *positions), the gradient with respect to the convolution's output.
        shape: (O, C / groups, *kernel).
        geometry: how patches are cut. It may have one more axis in front of the kernel's, for
            frames that are convolved one by one.
    """

    input: Tensor
    grad: Tensor
    shape: tuple[int, ...]
    geometry: ConvolutionGeometry

    @property
    def batch(self) -> int:
        return self.input.shape[0]

    @property
    def sides(self) -> tuple[Tensor, Tensor]:
        return self.input, self.grad

    @property
    def form(self) -> tuple:
        """What two factors must have in common so that their images can be convolved together."""
        return self.input.shape[1:], self.grad.shape[1:], self.geometry

    @property
    def positions(self) -> int:
        return math.prod(self.grad.shape[2:])

    @property
    def kernel(self) -> tuple[int, ...]:
        """The kernel's size along each axis of the geometry."""
        kernel = self.shape[2:]
        return (1,) * (len(self.geometry.stride) - len(kernel)) + kernel

    def select(self, rows) -> Patches:
        return Patches(self.input[rows], self.grad[rows], self.shape, self.geometry)

    @property
    def way(self) -> ConvolutionWay:
        """How per-example gradients are best formed."""
        outputs, channels = self.shape[:2]
        return convolution_way(
            channels, outputs, self.kernel, self.positions, self.geometry.groups, self.batch
        )

    @property
    def pointwise(self) -> bool:
        """Whether the patches are the input itself, so that none need be written."""
        geometry = self.geometry
        return {*self.kernel, *geometry.stride} == {1} and not any(geometry.padding)

    @property
    def patch_bytes(self) -> int:
        """Bytes of one example's patches."""
        row = self.geometry.groups * math.prod(self.shape[1:])
        return self.positions * row * compute_dtype(*self.sides).itemsize

    def writes_patches(self, budget: int) -> bool:
        """Whether to write patches out.

        Only if that is the fastest way, and one example's patches fit the budget or are no larger
        than its gradient, which a convolution would form instead.
        """
        if self.way != "patches":
            return False
        gradient = math.prod(self.shape) * compute_dtype(*self.sides).itemsize
        return self.pointwise or self.patch_bytes <= max(budget, gradient)

    def dense(self) -> Tensor:
        if self.writes_patches(FRESH_BYTES):
            return self.unfolded().dense()
        return self.as_groups()

    def as_groups(self) -> Tensor:
        """Return the same as ``dense`` by PyTorch's own kernel, without unfolding the input.

        The examples become the groups of one convolution, whose weight gradient consists of theirs.
        """
        dtype = compute_dtype(self.input, self.grad)
        examples, geometry = self.batch, self.geometry
        spatial = self.input.shape[2:]
        # Flattened first: a last axis of size 1 may have any stride, and PyTorch takes some strides
        # for channels-last data, for which it has no weight gradient in float64.
        x = self.input.to(dtype).flatten().view(1, examples * self.input.shape[1], *spatial)
        g = self.grad.to(dtype).flatten().view(1, examples * self.shape[0], *self.grad.shape[2:])
        sizes = (examples * self.shape[0], self.shape[1], *self.kernel)
        groups = examples * geometry.groups
        return weight_gradient(x, g, sizes, geometry, groups).view(examples, *self.shape)

    @property
    def granule(self) -> int:
        # The rows of one group share their input channels.
        return 1 if self.geometry.groups == 1 else self.shape[0] // self.geometry.groups

    def narrow(self, start: int, stop: int) -> Patches:
        grad, shape = self.grad[:, start:stop], (stop - start, *self.shape[1:])
        if self.geometry.groups == 1:
            return replace(self, grad=grad, shape=shape)
        first, last = start // self.granule, stop // self.granule
        channels = self.input[:, first * self.shape[1] : last * self.shape[1]]
        geometry = replace(self.geometry, groups=last - first)
        return Patches(channels, grad, shape, geometry)

    def unfolded(self) -> Outer:
        """Return the same factor with its patches written out: T·q numbers an example."""
        geometry, kernel = self.geometry, self.kernel
        pad = [amount for side in reversed(geometry.padding) for amount in (side, side)]
        x = torch.nn.functional.pad(self.input, pad) if any(pad) else self.input
        examples, channels = x.shape[:2]
        groups, positions = geometry.groups, self.grad.shape[2:]
        sizes = (channels // groups, *kernel)
        # Not by as_strided: a compiled graph may store operands with other strides than traced.
        windows = x.unflatten(1, (groups, -1))
        steps = zip(kernel, geometry.dilation, geometry.stride, strict=True)
        for axis, (size, apart, step) in enumerate(steps, 3):
            windows = windows.unfold(axis, (size - 1) * apart + 1, step)[..., ::apart]
        # The longer of the two innermost axes last, so that longer runs are copied.
        rows_last = positions[-1] > kernel[-1]
        inner = 3 + len(positions)
        places, offsets = range(3, inner), range(inner, windows.dim())
        order = (2, *offsets, *places) if rows_last else (*places, 2, *offsets)
        shape = (sizes, positions) if rows_last else (positions, sizes)
        right = windows.permute(0, 1, *order).reshape(examples, groups, *map(math.prod, shape))
        left = self.grad.reshape(examples, groups, self.shape[0] // groups, math.prod(positions)).mT
        return Outer(left, right.mT if rows_last else right, self.shape)


def convolved(
    x: Tensor, grad: Tensor, shape: tuple[int, ...], geometry: ConvolutionGeometry
) -> Outer | Patches:
    """Return the factor of a convolution's weight; 1×1 convolutions are plain products.

    Args:
        x: (B, C, *spatial), or (B, images, C, *spatial) if an example has several images. Several
            volumes are not possible: they would need a convolution over four axes.
        grad: the gradient of the output, likewise.
        shape: of the weight.
        geometry: how patches are cut.
    """
    if x.dim() > len(shape) and x.shape[1] == 1:
        x, grad = x.squeeze(1), grad.squeeze(1)
    elif x.dim() > len(shape):
        # An example's images are one more axis, along which the kernel has size 1.
        x, grad = x.transpose(1, 2), grad.transpose(1, 2)
        stride, padding, dilation = geometry.stride, geometry.padding, geometry.dilation
        geometry = ConvolutionGeometry((1, *stride), (0, *padding), (1, *dilation), geometry.groups)
    patches = Patches(x, grad, shape, geometry)
    if not patches.pointwise:
        return patches
    groups = geometry.groups
    left = grad.flatten(2).unflatten(1, (groups, -1)).mT  # (B, K, T, O / K)
    right = x.flatten(2).unflatten(1, (groups, -1)).mT
    return Outer(left, right, shape)


def weight_gradient(
    x: Tensor,
    grad: Tensor,
    sizes: Sequence[int],
    geometry: ConvolutionGeometry,
    groups: int | None = None,
) -> Tensor:
    """Return Σ_i G_i of a convolution's weight as PyTorch computes it, in the operands' dtype.

    Args:
        x: (B, C, *spatial).
        grad: (B, O, *positions).
        sizes: of the weight, (O, C / groups, *kernel).
        geometry: how patches are cut.
        groups: the number of groups, if not the geometry's.
    """
    # Only the weight's shape is read. (A single expanded number would be copied to that shape.)
    weight = x.new_empty(tuple(sizes))
    return torch.ops.aten.convolution_backward(
        grad, x, weight, None, geometry.stride, geometry.padding, geometry.dilation, False,
        [0] * len(geometry.stride), groups or geometry.groups, [False, True, False],
    )[1]  # fmt: skip
