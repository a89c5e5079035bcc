"""Gradients of a weight whose rows, columns or all of whose elements were normalised."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from gradstats._factors._outer import Outer
from gradstats._factors._patches import Patches


@dataclass(eq=False)
class Tangent:
    """G_i = inner_i - along_i ∘ unit: the part of inner_i that is orthogonal to a unit vector.

    The unit vectors are the rows of the parameter, its columns, or all of it, each divided by its
    norm: a normalised weight does not change along them.

    Attributes:
        inner: the factor of what is projected.
        unit: of the parameter's shape, in the accumulation dtype; zeros where nothing is removed.
        along: (B, *) the inner products of inner_i with each unit vector, its axes kept as 1.
    """

    inner: Outer | Patches
    unit: Tensor
    along: Tensor

    @property
    def batch(self) -> int:
        return self.inner.batch

    @property
    def shape(self) -> tuple[int, ...]:
        return self.inner.shape

    def select(self, rows) -> Tangent:
        return replace(self, inner=self.inner.select(rows), along=self.along[rows])

    @property
    def granule(self) -> int:
        return self.inner.granule

    def narrow(self, start: int, stop: int) -> Tangent:
        along = self.along if self.along.shape[1] == 1 else self.along[:, start:stop]
        return Tangent(self.inner.narrow(start, stop), self.unit[start:stop], along)

    def dense(self) -> Tensor:
        gradient = self.inner.dense()
        return gradient.sub_(self.along.to(gradient) * self.unit.to(gradient))
