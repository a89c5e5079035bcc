"""Gradients of a weight whose elements were multiplied by constants."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gradstats._factors._factor import Changed
from gradstats._factors._outer import Outer
from gradstats._factors._patches import Patches
from gradstats._factors._ragged import Ragged


@dataclass(eq=False)
class Masked(Changed):
    """G_i = mask ∘ inner_i: pruned and masked weights, elementwise products of two weights.

    Attributes:
        inner: the factor of the product.
        mask: what the parameter was multiplied by, of its shape, in the accumulation dtype.
    """

    inner: Outer | Patches | Ragged
    mask: Tensor

    @property
    def layout(self) -> int:
        """What two factors must have in common for their masks to be added."""
        return id(self.inner)

    @property
    def is_rank_one(self) -> bool:
        """Whether each inner gradient is a single outer product, in one group."""
        inner = self.inner
        if not isinstance(inner, Outer) or inner.permutation is not None:
            return False
        return inner.left.shape[1:3] == (1, 1)

    def narrow(self, start: int, stop: int) -> Masked:
        return Masked(self.inner.narrow(start, stop), self.mask[start:stop])

    def transposed(self) -> Masked:
        """Return the factor of the transpose of a two-dimensional parameter."""
        assert not isinstance(self.inner, Patches)  # a convolution's weight has three axes or more
        return Masked(self.inner.transposed(), self.mask.mT)

    def dense(self) -> Tensor:
        return self.inner.dense().mul_(self.mask)
