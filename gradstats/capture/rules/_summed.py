"""Sums of tracked terms, scaled and broadcast, of which one may be a product."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from gradstats._factors import compute_dtype
from gradstats.capture.following._examples import Examples
from gradstats.capture.parameters._nodes import Node
from gradstats.capture.parameters._refusals import refuse
from gradstats.capture.parameters._tensors import first_node, node_of
from gradstats.capture.rules._common import lined_up
from gradstats.capture.uses._together import Joinable
from gradstats.capture.uses._uses import free_of_views, tap
from gradstats.capture.uses._views import ExampleLayout

if TYPE_CHECKING:
    from gradstats.capture._context import Context


@dataclass(frozen=True)
class Part:
    """A tracked operand of a sum, with its factors and the number that multiplies it."""

    node: Node
    factors: Callable[..., list]
    scale: float = 1


@dataclass(frozen=True)
class SumFactors:
    """The factors of a sum of scaled terms."""

    factors: tuple[Callable[..., list], ...]
    scales: tuple[float, ...]

    def __call__(self, grad: Tensor, x: Tensor | None) -> list:
        return [
            factor
            for factors, scale in zip(self.factors, self.scales, strict=True)
            for factor in factors(grad if scale == 1 else grad * scale, x)
        ]


@dataclass(frozen=True)
class BroadcastFactors(Joinable):
    """The factor of a term that was broadcast to the result's shape."""

    layout: ExampleLayout
    shape: tuple[int, ...]

    @property
    def examples(self) -> Examples:  # type: ignore[override]
        return self.layout.examples

    def likeness(self) -> Hashable | None:
        whole = self.layout.rows_of(self.shape) == 1
        return (self.shape, self.layout.dims) if whole else None

    def joined(self, count: int) -> BroadcastFactors:
        layout = replace(self.layout, examples=self.examples.times(count))
        return replace(self, layout=layout)

    def data_gradients(self, nodes: Sequence[Node], grad: Tensor, *saved: Tensor) -> Any:
        """What a sum hands on does not depend on its terms: None."""

    def __call__(self, grad: Tensor, x: Tensor | None = None) -> list:
        sizes, own = self.layout.padded(self.shape), self.layout.examples.axis
        repeated = [axis for axis, size in enumerate(sizes) if size == 1 and axis != own]
        if repeated:
            dtype = None if grad.is_complex() else compute_dtype(grad)
            grad = grad.sum(repeated, keepdim=True, dtype=dtype)
        return [self.layout.factor(grad, self.shape)]


def summed(tracker: Context, func, result, x, parts, *terms):
    """Attach the factors of ``parts`` and of the tracked terms that are added to them.

    Args:
        result: what the operation returned.
        x: the data that the parts' factors need, None without parts.
        parts: the factors of a product that is one of the terms.
        terms: operands with the number that multiplies them; None for operands of a product, which
            only say where the examples lie.
    """
    operands = [term for term, _ in terms]
    node = parts[0].node if parts else first_node(*operands)
    layout = lined_up(tracker, func, node, operands)
    for term, scale in terms:
        node = node_of(term)
        if node is not None:
            if not layout.serves(term.shape):
                refuse(func, node, "with a part for each of an example's rows has no rule")
            parts.append(Part(node, BroadcastFactors(layout, tuple(term.shape)), scale))
    factors = SumFactors(tuple(part.factors for part in parts), tuple(part.scale for part in parts))
    nodes = [part.node for part in parts]
    return tap(nodes, free_of_views(result), factors, x)
