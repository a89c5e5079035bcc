"""The factors of the scale and shift of normalisation layers.

PyTorch computes the layer and its gradients. The backward computes the normalised input x̂ again,
from the input, which the layer keeps anyway.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from gradstats._compiler import is_compiling
from gradstats._factors import Vector, cast, compute_dtype, segment_sum
from gradstats.capture.following._examples import Examples
from gradstats.capture.parameters._nodes import Node
from gradstats.capture.uses._prepared import Preparable
from gradstats.capture.uses._uses import Settings, Use, derived
from gradstats.capture.uses._views import ExampleLayout, example_view
from gradstats.contractions import Contraction, _triton, _vector
from gradstats.contractions._prepared import OfNorm
from gradstats.contractions._triton_layers import NormGradients, Wanted

# Bytes of x̂ and its product with the gradient that are computed at once.
SCRATCH = 8 * 1024 * 1024


class Normalise(Protocol):
    """How a layer normalises."""

    def __call__(self, x: Tensor, *statistics: Tensor) -> Tensor:
        """Return x̂."""

    def sums(
        self, x: Tensor, g: Tensor, offsets: Sequence[int] | None, *statistics: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return Σ_t g·x̂ and Σ_t g by the kernels, from operands as ``backward`` takes them."""

    def backward(
        self,
        x: Tensor,
        g: Tensor,
        weight: Tensor | None,
        offsets: Sequence[int] | None,
        wanted: Wanted,
        *statistics: Tensor,
    ) -> NormGradients:
        """Return the layer's backward by the kernels, from operands (B, T, features) or packed.

        Called only where ``AffineFactors.one_pass`` holds.
        """

    def prepare(
        self, x: Tensor, g: Tensor, weight: Tensor | None, wanted: Wanted, *statistics: Tensor
    ) -> OfNorm | None:
        """Return what does ``backward`` for operands that lie as these do, or None.

        It is called with (g, x, weight, *statistics), in any shape.
        """


@dataclass(frozen=True, slots=True)
class AffineFactors(Preparable):
    """The factors of scale and shift.

    Attributes:
        examples: where the examples lie.
        normalise: how x̂ comes from what was saved.
        channels: whether the parameters are those of channels, the second axis of the input;
            otherwise they span the last axes.
        scale, shift: which of the two are tracked.
        shape: shape of both.
    """

    examples: Examples
    normalise: Normalise
    channels: bool
    scale: bool
    shift: bool
    shape: tuple[int, ...]
    plans: dict = field(default_factory=dict, init=False, repr=False, compare=False)

    def __call__(self, grad: Tensor, x: Tensor, *statistics: Tensor) -> list:
        if not self._on_chip(grad, x):
            return [Vector(each, self.shape) for each in self._formed(grad, x, *statistics)]
        # Summed, (B, features) is all that has to be held until other uses or batches are known.
        both = self.normalise.sums(*self._operands(x, grad), *statistics)
        return [Vector(v.view(-1, *self.shape), self.shape) for v in self.of_tracked(*both)]

    def of_tracked(self, of_scale: Any, of_shift: Any) -> list:
        """Return the items of scale and shift, each only if it is tracked."""
        return [*([of_scale] if self.scale else []), *([of_shift] if self.shift else [])]

    def _formed(self, grad: Tensor, x: Tensor, *statistics: Tensor) -> list[Tensor]:
        """Return Σ_t g·x̂ and Σ_t g, where tracked, by PyTorch's own operations."""
        dtype = compute_dtype(grad)
        grad, x = self.examples.lead(grad), self.examples.lead(x)
        # x̂ and its product with the gradient, which are dropped as soon as they are summed.
        held = 2 * grad.numel() * dtype.itemsize
        if held <= SCRATCH and self.examples.segments is None:
            return self._part(grad, x, dtype, statistics, None)
        offsets = self._offsets()
        count = len(offsets) - 1
        chunk = max(1, SCRATCH * count // max(1, held))
        bounds = [offsets[start : start + chunk + 1] for start in range(0, count, chunk)]
        parts = [self._part(grad, x, dtype, statistics, each) for each in bounds]
        return parts[0] if len(parts) == 1 else [*map(torch.cat, zip(*parts, strict=True))]

    def _part(
        self,
        grad: Tensor,
        x: Tensor,
        dtype: torch.dtype,
        statistics: tuple[Tensor, ...],
        bounds: Sequence[int] | None,
    ) -> list[Tensor]:
        """Return the same for the examples whose rows begin and end at ``bounds``; None for all."""
        if bounds is not None:
            grad, x = self._rows(grad, bounds), self._rows(x, bounds)
        grad = cast(grad, dtype)
        values = []
        if self.scale:
            normalised = self.normalise(cast(x, dtype), *statistics)
            values.append(self._sum(normalised.mul_(grad), bounds))
        if self.shift:
            values.append(self._sum(grad, bounds))
        return values

    def norms(self, grad: Tensor, x: Tensor, *statistics: Tensor) -> list[Contraction]:
        """Return squared norms; the kernels take them without writing a gradient."""
        if not self._on_chip(grad, x):
            values = self._formed(grad, x, *statistics)
            return [_vector.sqnorm_of(each) for each in values]
        found = self.backward(grad, x, None, (False, None), *statistics)
        return self.of_tracked(found.scale_norms, found.shift_norms)

    def likeness(self) -> Hashable:
        return self.normalise, self.channels, self.scale, self.shift, self.shape

    def _on_chip(self, grad: Tensor, x: Tensor) -> bool:
        """Whether the kernels can read the examples' rows where they lie."""
        if not _triton.runs(grad, x):
            return False
        segments = self.examples.segments
        if self.channels:
            return self.examples.plain
        return segments is None or segments.order is None

    def _operands(self, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, tuple[int, ...] | None]:
        """Return both as (B, T, features), or packed (rows, features) with the examples' bounds."""
        examples = self.examples
        if examples.segments is None:
            rows, g = self._positions(examples.first(x), examples.first(grad))
            return rows, g, None
        features = math.prod(self.shape)
        rows, g = (examples.lead(side).reshape(-1, features) for side in (x, grad))
        return rows, g, examples.segments.offsets_of(len(rows))

    def _positions(self, *operands: Tensor) -> list[Tensor]:
        """Return the operands as (B, T, features); channels in front of positions as a view."""
        if self.channels:
            return [operand.reshape(*operand.shape[:2], -1).mT for operand in operands]
        features = math.prod(self.shape)
        return [
            operand
            if operand.dim() == 3 and operand.shape[2] == features
            else operand.reshape(operand.shape[0], -1, features)
            for operand in operands
        ]

    def one_pass(self, settings: Settings, x: Tensor) -> bool:
        """Whether the kernels compute the layer's backward: gradients and norms in one pass."""
        if is_compiling() or settings.consumer is not None or settings.exact:
            return False
        return self._on_chip(x, x)

    def backward(
        self,
        grad: Tensor,
        x: Tensor,
        weight: Tensor | None,
        wanted: Wanted,
        *statistics: Tensor,
    ) -> NormGradients:
        """Return gradients and squared norms, by the kernels."""
        if weight is not None:
            weight = weight.flatten()
        rows, g, offsets = self._operands(x, grad)
        result = self.normalise.backward(rows, g, weight, offsets, wanted, *statistics)
        if result.input is None:
            return result
        return result._replace(input=self._like_input(result.input, x))

    def prepare(
        self,
        use: Use,
        wanted: Wanted,
        grad: Tensor,
        x: Tensor,
        weight: Tensor | None,
        *statistics: Tensor,
    ) -> OfNorm | None:
        """Return what does ``backward`` for such operands; see ``Preparable``."""
        if wanted == (False, None) or self.examples.axis or self.examples.segments is not None:
            return None
        if weight is not None:
            if not weight.is_contiguous():
                return None
            weight = weight.flatten()
        rows, g, _ = self._operands(x, grad)
        if rows.data_ptr() != x.data_ptr() or g.data_ptr() != grad.data_ptr():
            return None  # they are copied
        as_rows, as_input = (torch.empty_like(each, device="meta") for each in (rows, x))
        if self._like_input(as_rows, x).stride() != as_input.stride():
            return None
        return self.normalise.prepare(rows, g, weight, wanted, *statistics)

    def _like_input(self, gradient: Tensor, x: Tensor) -> Tensor:
        """Return the gradient of the rows that the kernels read in the input's layout."""
        examples = self.examples
        leading = examples.first(x) if examples.segments is None else examples.lead(x)
        if self.channels:
            gradient = gradient.mT
        if gradient.shape != leading.shape:
            gradient = gradient.reshape(leading.shape)
        if examples.segments is None and examples.fold != 1:
            gradient = gradient.flatten(0, 1)
        return gradient if examples.axis == 0 else gradient.movedim(0, examples.axis)

    def _offsets(self) -> Sequence[int]:
        """Return where each example's rows begin when they are sorted by example."""
        if self.examples.segments is not None:
            return self.examples.segments.offsets
        return range(0, self.examples.rows + 1, self.examples.fold)

    def _rows(self, tensor: Tensor, bounds: Sequence[int]) -> Tensor:
        segments = self.examples.segments
        if segments is None or segments.order is None:
            return tensor[bounds[0] : bounds[-1]]
        return tensor[segments.order[bounds[0] : bounds[-1]]]

    def _sum(self, product: Tensor, bounds: Sequence[int] | None) -> Tensor:
        """Return each example's sum over all axes but the parameters': (n, *shape)."""
        if self.channels:
            rows = product.unsqueeze(-1).flatten(2).mT
        elif product.dim() == 1 + len(self.shape) and self.examples.plain:
            return product
        else:
            rows = product.unsqueeze(1).flatten(1, -1 - len(self.shape))
        if self.examples.segments is None:
            # An example's rows become positions, so that one sum takes both.
            if self.examples.fold != 1:
                batch = self.examples.batch if bounds is None else len(bounds) - 1
                rows = rows.unflatten(0, (batch, self.examples.fold)).flatten(1, 2)
            return rows.sum(1)
        assert bounds is not None
        counts = torch.tensor(bounds, device=product.device).diff()
        return segment_sum(rows.sum(1), counts)

    def data_gradients(self, nodes: Sequence[Node], grad: Tensor, x: Tensor, *statistics: Tensor):
        """Differentiate x̂·w, with a scale for each example."""
        if not self.scale:
            return None
        gradient = self.input_gradient(nodes, grad, x, None, *statistics)
        return gradient, *(None for _ in statistics)

    def input_gradient(
        self,
        nodes: Sequence[Node],
        grad: Tensor,
        x: Tensor,
        weight: Tensor | None,
        *statistics: Tensor,
    ) -> Tensor:
        """Return the input's gradient as tracked operations compute it.

        Args:
            nodes: of the tracked parameters.
            grad, x: the output's gradient and the input.
            weight: the scale if it is not tracked; None for 1.
            statistics: as they were saved.
        """
        normalised = self.normalise(self.examples.lead(x).to(grad.dtype), *statistics)
        shape = (-1, *(1,) * (normalised.dim() - 2)) if self.channels else self.shape
        if self.scale:
            node = derived(nodes[0], Tensor.view, shape) if self.channels else nodes[0]
            layout = ExampleLayout(normalised.dim(), self.examples.along(0))
            normalised = normalised * example_view(node, layout)
        elif weight is not None:
            normalised = normalised * weight.view(shape)
        gradients = torch.autograd.grad(normalised, x, self.examples.lead(grad), create_graph=True)
        return gradients[0]
