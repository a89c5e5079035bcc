"""Convolutions."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from gradstats._factors import (
    ConvolutionGeometry,
    Factor,
    Images,
    Outer,
    Patches,
    Segments,
    convolved,
)
from gradstats.capture.uses._layer import Layer
from gradstats.capture.uses._linear import is_copied
from gradstats.capture.uses._uses import Settings
from gradstats.contractions import _prepared
from gradstats.contractions._prepared import OfOuter


@dataclass(frozen=True, slots=True)
class ConvolutionFactors(Layer):
    """The factors of a convolution.

    Attributes:
        shape: of the weight: (O, C / groups, *kernel), transposed (C, O / groups, *kernel).
        call: (stride, padding, dilation, transposed, output padding, groups).
    """

    call: tuple

    channel: ClassVar[int] = 1
    reads_weight: ClassVar[bool] = True  # as in PyTorch
    reads_data: ClassVar[bool] = True

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.convolution(x, weight, bias, *self.call)

    def cast(self, x: Tensor, parameters: list[Tensor | None]) -> list[Tensor | None]:
        return [None if each is None else each.to(x.dtype) for each in parameters]

    def likeness(self) -> Hashable:
        return self.weight, self.bias, self.shape, self.call

    def of_weight(self, grad: Tensor, x: Tensor) -> Factor:
        examples, shape = self.examples, self.shape
        stride, padding, dilation, transposed, output_padding, groups = self.call
        grad, x = self._sides(grad, x)
        steps = zip(output_padding, stride, strict=True)
        if transposed and any(extra >= step for extra, step in steps):
            # Equal padding of both sides would give more positions than the input has: crop.
            sides = [(p, p - extra) for p, extra in zip(padding, output_padding, strict=True)]
            x = functional.pad(x, [amount for side in reversed(sides) for amount in side])
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

    def prepared_weight(self, grad: Tensor, x: Tensor, want_weight: bool) -> OfOuter | None:
        if self.examples.fold != 1:
            return None
        factor, sides = self.of_weight(grad, x), self._sides(grad, x)
        if isinstance(factor, Outer):
            if is_copied((factor.left, factor.right), sides):
                return None
            again = replace(self)._of_sides  # a copy's: self holds the plan, and would hold itself
            found = _prepared.of_outer(factor, with_sum=want_weight, again=again)
        else:
            assert isinstance(factor, Patches)
            if is_copied((factor.grad, factor.input), sides):
                return None
            found = _prepared.of_patches(factor, with_sum=want_weight)
        if found is None or not self.call[3]:
            return found
        return lambda grad, x: found(x, grad)

    def _sides(self, grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return both, first the side of the weight's rows: the data if transposed."""
        return (x, grad) if self.call[3] else (grad, x)

    def _of_sides(self, first: Tensor, second: Tensor) -> Factor:
        return self.of_weight(*self._sides(first, second))

    def adjoint(self, grad: Tensor, x: Tensor) -> ConvolutionFactors:
        stride, padding, dilation, transposed, _, groups = self.call
        spatial = x.shape[2:], self.shape[2:], grad.shape[2:], stride, padding, dilation
        rest = [
            0 if transposed else i - ((o - 1) * s - 2 * p + d * (k - 1) + 1)
            for i, k, o, s, p, d in zip(*spatial, strict=True)
        ]
        call = stride, padding, dilation, not transposed, tuple(rest), groups
        return ConvolutionFactors(True, False, self.examples, self.shape, (False, False), call)

    def gradients(
        self, settings: Settings, grad: Tensor, x: Tensor, weight: Tensor, wanted: Sequence[bool]
    ) -> Sequence[Tensor | None]:
        if not any(wanted):
            return None, None
        stride, padding, dilation, transposed, output_padding, groups = self.call
        return torch.ops.aten.convolution_backward(
            grad, x, weight, None, stride, padding, dilation, transposed, output_padding, groups,
            [*wanted, False],
        )[:2]  # fmt: skip
