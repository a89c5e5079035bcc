"""Biases, scales and everything else that broadcasts."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradstats._factors._factor import Undivided, compute_dtype, selected
from gradstats._factors._segments import padded, padding_index


@dataclass(eq=False)
class Vector:
    """G_i = values[i]: biases, scales and everything that broadcasts.

    Attributes:
        values: (B, *shape), or with ``axis`` (B, *shape without that axis).
        shape: of the parameter.
        axis: the parameter's own example axis, if each example touches only its own slice: then
            G_i is ``values[i]`` in that slice and zero elsewhere.
        slices: (B,) index along ``axis`` of each example's slice; None for 0, 1, …, B − 1.
    """

    values: Tensor
    shape: tuple[int, ...]
    axis: int | None = None
    slices: Tensor | None = None

    @property
    def batch(self) -> int:
        return self.values.shape[0]

    @property
    def own_slices(self) -> Tensor:
        """``slices`` written out, (B,)."""
        if self.slices is not None:
            return self.slices
        return torch.arange(self.batch, device=self.values.device)

    def select(self, rows) -> Vector:
        slices = None if self.axis is None else self.own_slices[rows]
        return replace(self, values=self.values[rows], slices=slices)

    @property
    def granule(self) -> int:
        return 0 if self.axis == 0 or not self.shape else 1

    def narrow(self, start: int, stop: int) -> Vector:
        values = self.values
        if self.axis is None:
            values = values.reshape(self.batch, *self.shape)
        shape = (stop - start, *self.shape[1:])
        return replace(self, values=values[:, start:stop], shape=shape)

    def dense(self) -> Tensor:
        if self.axis is None:
            return self.values.to(compute_dtype(self.values)).reshape(self.batch, *self.shape)
        gradient = self.values.new_zeros(self.batch, *self.shape, dtype=compute_dtype(self.values))
        rows = torch.arange(self.batch, device=self.values.device)
        gradient.movedim(self.axis + 1, 1)[rows, self.own_slices] = self.values.to(gradient.dtype)
        return gradient


@dataclass(eq=False)
class Elementwise(Undivided):
    """G_i = Σ_t input[i,t] ∘ grad[i,t]: scales that broadcast, or without input shifts and biases.

    Only for kernels, which contract it without writing products or sums. Elsewhere, and where a
    factor has to be kept, a ``Vector`` of the sums over positions is leaner.

    Attributes:
        grad: (B, T, C), or packed (rows, C) with offsets.
        input: of the same shape; None for ones.
        shape: of the parameter, with C elements, or one that all channels share.
        offsets: (B + 1,) where each example's rows begin and end; None if all examples have T.
    """

    grad: Tensor
    input: Tensor | None
    shape: tuple[int, ...]
    offsets: tuple[int, ...] | None = None

    @property
    def batch(self) -> int:
        return self.grad.shape[0] if self.offsets is None else len(self.offsets) - 1

    @property
    def shared(self) -> bool:
        """Whether all channels share one element of the parameter."""
        return math.prod(self.shape) != self.grad.shape[-1]

    def select(self, rows) -> Elementwise:
        if self.offsets is None:
            chosen = None if self.input is None else self.input[rows]
            return replace(self, grad=self.grad[rows], input=chosen)
        # Padded with zeros to one length.
        index, missing = padding_index(self.offsets, selected(rows, self.batch).tolist())
        grad = padded(self.grad, index, missing)
        x = None if self.input is None else padded(self.input, index, missing)
        return Elementwise(grad, x, self.shape)

    def dense(self) -> Tensor:
        if self.offsets is not None:
            return self.select(slice(None)).dense()
        values = self.grad.to(compute_dtype(self.grad))
        if self.input is not None:
            values = values * self.input.to(values.dtype)
        values = values.sum((1, 2) if self.shared else 1)
        return values.reshape(self.batch, *self.shape)
