"""Outer products summed over positions: linear layers and every matrix product."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from gradstats._factors._factor import compute_dtype


@dataclass(eq=False)
class Outer:
    """G_i[k] = Σ_t left[i,k,t] right[i,k,t]ᵀ: linear layers and every matrix product.

    Attributes:
        left: (B, K, T, p), any strides.
        right: (B, K, T, q), any strides.
        shape: of the parameter, which has the same number of elements as G, (K, p, q).
        permutation: the order in which the axes of ``unfolded`` give ``shape``; None if G reshaped
            is the gradient.
        unfolded: the sizes of all axes that K, p and q consist of; None without a permutation.
    """

    left: Tensor
    right: Tensor
    shape: tuple[int, ...]
    permutation: tuple[int, ...] | None = None
    unfolded: tuple[int, ...] | None = None

    @property
    def batch(self) -> int:
        return self.left.shape[0]

    @property
    def longest(self) -> int:
        """Number of positions of each example."""
        return self.left.shape[2]

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
    def granule(self) -> int:
        if self.permutation is not None or not self.shape:
            return 0
        groups, p = self.left.shape[1], self.left.shape[3]
        unit = groups * p // self.shape[0]  # rows of (K, p) for each row of the parameter
        if unit * self.shape[0] != groups * p or (groups > 1 and p % unit and unit % p):
            return 0
        return p // unit if groups > 1 and p % unit == 0 else 1

    def narrow(self, start: int, stop: int) -> Outer:
        groups, p = self.left.shape[1], self.left.shape[3]
        unit = groups * p // self.shape[0]
        shape = (stop - start, *self.shape[1:])
        if groups == 1:
            return replace(self, left=self.left[..., start * unit : stop * unit], shape=shape)
        kept = slice(start * unit // p, stop * unit // p)
        return replace(self, left=self.left[:, kept], right=self.right[:, kept], shape=shape)

    @property
    def layout(self) -> tuple:
        """What two factors must have in common so that their positions can be concatenated."""
        sizes = (self.left.shape[1], self.left.shape[3], self.right.shape[3])
        return (*sizes, self.permutation, self.unfolded)

    @property
    def spans_rows(self) -> bool:
        """Whether ``left`` spans the first axis of the parameter and nothing else."""
        one_group = self.left.shape[1] == 1 and self.permutation is None
        return one_group and self.shape[:1] == (self.left.shape[3],)

    def transposed(self) -> Outer:
        """Return the factor of the transpose of a matrix whose rows ``left`` spans."""
        return Outer(self.right, self.left, (self.shape[1], self.shape[0]))
