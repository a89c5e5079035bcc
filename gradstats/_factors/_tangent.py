"""Gradients of a weight that was normalised: row by row, column by column, or as a whole."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from gradstats._factors._factor import Changed
from gradstats._factors._outer import Outer
from gradstats._factors._patches import Patches


@dataclass(eq=False)
class Tangent(Changed):
    """G_i = inner_i - share ∘ along_i ∘ unit: inner_i less a share of its components along unit.

    The unit vectors are the rows of the parameter, its columns, or all of it, each divided by its
    norm. A normalised weight does not change along them, so the share is 1, or less if an epsilon
    was added to the norm.

    Attributes:
        inner: the factor of the gradients before projection.
        unit: of the parameter's shape, in the accumulation dtype; zeros where nothing is removed.
        along: (B, *) inner products of inner_i with each unit vector, whose axes have size 1.
        share: (*) how much is removed, from 0 to 1.
    """

    inner: Outer | Patches | Tangent
    unit: Tensor
    along: Tensor
    share: Tensor

    def select(self, rows) -> Tangent:
        return replace(self, inner=self.inner.select(rows), along=self.along[rows])

    def narrow(self, start: int, stop: int) -> Tangent:
        along, share = self.along, self.share
        if len(share) > 1:
            along, share = along[:, start:stop], share[start:stop]
        return Tangent(self.inner.narrow(start, stop), self.unit[start:stop], along, share)

    def dense(self) -> Tensor:
        gradient = self.inner.dense()
        return gradient.sub_((self.along * self.share).to(gradient) * self.unit.to(gradient))
