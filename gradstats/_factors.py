"""Factors: lean descriptions of one use's per-example gradient of one parameter.

Symbols, here and everywhere: B examples, T positions, K groups, ``left`` and ``right`` the two
operands whose outer products, summed over positions, are the gradient. A factor holds tensors that
the training step has anyway; it never holds a (B, d) gradient.

"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from gradstats._cost import product


class Factor(Protocol):
    """What every description of per-example gradients of one parameter offers."""

    @property
    def batch(self) -> int:
        """The number of examples it describes."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the parameter."""

    def select(self, rows) -> Factor:
        """Return the same restricted to some examples: a slice or ascending indices."""

    def dense(self) -> Tensor:
        """Return the per-example gradients themselves, (B, *shape).

        This is the definition that every contraction agrees with, called on a few examples.
        """


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """Return the accumulation dtype: float64 where any input is float64, else float32."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


@dataclass(frozen=True)
class Outer:
    """G_i[k] = Σ_t left[i,k,t] right[i,k,t]ᵀ: linear layers and every matrix product.

    Attributes:
        left: (B, K, T, p), any strides.
        right: (B, K, T, q), any strides.
        shape: shape of the parameter; ``G`` of shape (K, p, q) holds the same numbers.
        permutation: order of the axes of ``unfolded`` that gives ``shape``; None where they agree.
        unfolded: sizes of K, p and q, each written out axis by axis; None without permutation.
    """

    left: Tensor
    right: Tensor
    shape: tuple[int, ...]
    permutation: tuple[int, ...] | None = None
    unfolded: tuple[int, ...] | None = None

    @property
    def batch(self) -> int:
        return self.left.shape[0]

    def select(self, rows) -> Outer:
        return replace(self, left=self.left[rows], right=self.right[rows])

    def dense(self) -> Tensor:
        dtype = compute_dtype(self.left, self.right)
        gradient = self.left.to(dtype).mT @ self.right.to(dtype)  # (B, K, p, q)
        if self.permutation is not None:
            assert self.unfolded is not None
            gradient = gradient.reshape(self.batch, *self.unfolded)
            gradient = gradient.permute(0, *(axis + 1 for axis in self.permutation))
        return gradient.reshape(self.batch, *self.shape)

    @property
    def layout(self) -> tuple:
        """What two factors must share for their positions to stand one after the other."""
        sizes = (self.left.shape[1], self.left.shape[3], self.right.shape[3])
        return (*sizes, self.permutation, self.unfolded)

    @property
    def spans_rows(self) -> bool:
        """Whether ``left`` spans the first axis of the parameter and nothing else."""
        one_group = self.left.shape[1] == 1 and self.permutation is None
        return one_group and self.left.shape[3] == self.shape[0]

    def transposed(self) -> Outer:
        """Return the factor of the transpose of a two-dimensional parameter."""
        return Outer(self.right, self.left, (self.shape[1], self.shape[0]))


@dataclass(frozen=True)
class ConvolutionGeometry:
    """Stride, padding and dilation per spatial axis, and the number of groups."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


@dataclass(frozen=True)
class Patches:
    """G_i = Σ_t grad[i,·,t] patch_t(input_i)ᵀ: convolutions, patches addressed implicitly.

    A transposed convolution is the same with its input and its output gradient exchanged.

    Attributes:
        input: (B, C, *spatial).
        grad: (B, O, *positions), the gradient with respect to the convolution's output.
        shape: (O, C / groups, *kernel).
        geometry: how patches are cut.
    """

    input: Tensor
    grad: Tensor
    shape: tuple[int, ...]
    geometry: ConvolutionGeometry

    @property
    def batch(self) -> int:
        return self.input.shape[0]

    @property
    def positions(self) -> int:
        return product(self.grad.shape[2:])

    def select(self, rows) -> Patches:
        return replace(self, input=self.input[rows], grad=self.grad[rows])

    def dense(self) -> Tensor:
        # The examples become the groups of one grouped convolution, so that the backend's own
        # weight-gradient kernel produces all per-example gradients without unfolding the input.
        dtype = compute_dtype(self.input, self.grad)
        examples, geometry = self.batch, self.geometry
        spatial = self.input.shape[2:]
        x = self.input.to(dtype).reshape(1, examples * self.input.shape[1], *spatial)
        g = self.grad.to(dtype).reshape(1, examples * self.shape[0], *self.grad.shape[2:])
        # Only the weight's shape is read: one number stands for all of it.
        weight = x.new_empty(1).expand(examples * self.shape[0], *self.shape[1:])
        gradient = torch.ops.aten.convolution_backward(
            g,
            x,
            weight,
            None,
            geometry.stride,
            geometry.padding,
            geometry.dilation,
            False,
            [0] * len(spatial),
            examples * geometry.groups,
            [False, True, False],
        )[1]
        return gradient.view(examples, *self.shape)

    def unfolded(self) -> Outer:
        """Return the same factor with its patches written out: T·q numbers an example."""
        geometry, kernel = self.geometry, self.shape[2:]
        dims = len(kernel)
        pad = [amount for side in reversed(geometry.padding) for amount in (side, side)]
        x = torch.nn.functional.pad(self.input, pad).contiguous()
        examples, channels = x.shape[:2]
        positions = self.grad.shape[2:]
        groups = geometry.groups
        strides = x.stride()
        windows = x.as_strided(
            (examples, groups, *positions, channels // groups, *kernel),
            (
                strides[0],
                strides[1] * (channels // groups),
                *(strides[2 + axis] * geometry.stride[axis] for axis in range(dims)),
                strides[1],
                *(strides[2 + axis] * geometry.dilation[axis] for axis in range(dims)),
            ),
        )
        right = windows.reshape(examples, groups, product(positions), product(self.shape[1:]))
        left = self.grad.reshape(examples, groups, self.shape[0] // groups, product(positions)).mT
        return Outer(left, right, self.shape)


@dataclass(frozen=True)
class Rows:
    """G_i = Σ_n e_{ids[n]} grad[n]ᵀ over the rows n of example i: embeddings and integer indexing.

    Attributes:
        ids: (N,) row of the parameter that each gradient row belongs to.
        grad: (N, width).
        example: (N,) example of each row, ascending.
        examples: number of examples B.
        shape: shape of the parameter, (rows, ...) with width = product of the rest.
        longest: most rows that one example has, None where only ``example`` knows.
    """

    ids: Tensor
    grad: Tensor
    example: Tensor
    examples: int
    shape: tuple[int, ...]
    longest: int | None = None

    @property
    def batch(self) -> int:
        return self.examples

    def select(self, rows) -> Rows:
        number = torch.full((self.examples,), -1, device=self.ids.device)
        chosen = torch.arange(self.examples, device=self.ids.device)[rows]
        number[chosen] = torch.arange(chosen.numel(), device=self.ids.device)
        keep = (number[self.example] >= 0).nonzero().squeeze(1)
        # Ascending order of examples survives: callers select ascending rows.
        return Rows(
            self.ids[keep],
            self.grad[keep],
            number[self.example[keep]],
            chosen.numel(),
            self.shape,
            self.longest,
        )

    def dense(self) -> Tensor:
        dtype = compute_dtype(self.grad)
        gradient = self.grad.new_zeros(
            self.examples * self.shape[0], self.grad.shape[1], dtype=dtype
        )
        gradient.index_add_(0, self.example * self.shape[0] + self.ids, self.grad.to(dtype))
        return gradient.view(self.examples, *self.shape)


@dataclass(frozen=True)
class Vector:
    """G_i = values[i]: biases, scales and everything that broadcasts.

    Attributes:
        values: (B, *shape) without ``axis``; with it (B, *shape without that axis).
        shape: shape of the parameter.
        axis: the parameter's own example axis, where each example touches only its own slice: then
            G_i is ``values[i]`` at that slice and zero elsewhere.
        slices: (B,) index along ``axis`` of each example's slice; None for 0, 1, …, B − 1.
    """

    values: Tensor
    shape: tuple[int, ...]
    axis: int | None = None
    slices: Tensor | None = None

    @property
    def batch(self) -> int:
        return self.values.shape[0]

    def select(self, rows) -> Vector:
        slices = self.slices
        if self.axis is not None:
            if slices is None:
                slices = torch.arange(self.batch, device=self.values.device)
            slices = slices[rows]
        return replace(self, values=self.values[rows], slices=slices)

    def dense(self) -> Tensor:
        if self.axis is None:
            return self.values.to(compute_dtype(self.values)).reshape(self.batch, *self.shape)
        slices = self.slices
        if slices is None:
            slices = torch.arange(self.batch, device=self.values.device)
        gradient = self.values.new_zeros(self.batch, *self.shape, dtype=compute_dtype(self.values))
        own = torch.arange(self.batch, device=self.values.device)
        gradient.movedim(self.axis + 1, 1)[own, slices] = self.values.to(gradient.dtype)
        return gradient
