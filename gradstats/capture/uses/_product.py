"""Contractions of data with a tracked operand, described index by index."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from gradstats._complex import real_product
from gradstats._factors import Outer, Ragged
from gradstats.capture.following._examples import Examples
from gradstats.capture.parameters._nodes import Node
from gradstats.capture.parameters._refusals import refuse
from gradstats.capture.uses._tap import Factors, tap
from gradstats.capture.uses._uses import derived


@dataclass(frozen=True)
class ProductFactor(Factors):
    """The factor of the tracked operand of a two-operand contraction.

    Each index is of one kind: that of the examples; groups K, in both operands and the result;
    positions T, in data and result; p, in parameter and result; q, in parameter and data; or an
    index that only the data have, which is summed over.

    Attributes:
        examples: to which examples the rows of the example axis belong.
        left: the result's axes in the order (example, K, T, p).
        right: the data's axes in the order (example, K, T, q, data only).
        sizes: sizes of K, p and q, axis by axis.
        shape: shape of the parameter.
        permutation: order of the axes (K, p, q) that gives the parameter's own.
        alone: the result belongs to one example as a whole, without an example axis in front.
    """

    examples: Examples
    left: tuple[int, ...]
    right: tuple[int, ...]
    sizes: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    shape: tuple[int, ...]
    permutation: tuple[int, ...]
    alone: bool = False

    @staticmethod
    def between(func, node: Node, shape, param, letter: str, data_spec, out, examples, *, alone):
        """Return the factor for index lists of parameter, data and result, or refuse.

        Args:
            func, node: the operation, and the tracked operand.
            shape: of the parameter, and ``param``, its indices.
            letter: the index of the examples.
            data_spec, out: the indices of data and result.
            examples, alone: as the attributes.
        """
        size = dict(zip(param, shape, strict=True))
        if letter in param or letter not in out:
            refuse(func, node, "contracts the example axis with the parameter, which has no rule")
        k = [i for i in param if i in data_spec and i in out]
        p = [i for i in param if i in out and i not in data_spec]
        q = [i for i in param if i in data_spec and i not in out]
        t = [i for i in data_spec if i in out and i not in param and i != letter]
        rest = [i for i in data_spec if i not in out and i not in param]
        order = [*k, *p, *q]
        return ProductFactor(
            examples,
            tuple(out.index(i) for i in [letter, *k, *t, *p]),
            tuple(data_spec.index(i) for i in [letter, *k, *t, *q, *rest]),
            (tuple(size[i] for i in k), tuple(size[i] for i in p), tuple(size[i] for i in q)),
            tuple(shape),
            tuple(order.index(i) for i in param),
            alone,
        )

    @property
    def _kept(self) -> int:
        """How many of the data's axes are not summed over."""
        return len(self.left) - len(self.sizes[1]) + len(self.sizes[2])

    def _left(self, grad: Tensor) -> Tensor:
        """Return the result's gradient by rows: (rows, K, T, p)."""
        grad = grad.unsqueeze(0) if self.alone else grad
        return self._grouped(grad.permute(self.left), len(self.sizes[1]))

    def _right(self, x: Tensor) -> Tensor:
        """Return the data by rows: (rows, K, T, q)."""
        right = x.permute(self.right)
        if right.dim() > self._kept:
            right = right.sum(tuple(range(self._kept, right.dim())))
        return self._grouped(right, len(self.sizes[2]))

    def _grouped(self, rows: Tensor, last: int) -> Tensor:
        """Return rows with axes of K, of T, and so many others as (rows, K, T, width)."""
        groups, others = 1 + len(self.sizes[0]), rows.dim() - last
        parts = rows.shape[1:groups], rows.shape[groups:others], rows.shape[others:]
        return rows.reshape(len(rows), *map(math.prod, parts))

    def _by_example(self, rows: Tensor) -> Tensor:
        """Return (rows, K, T, width) as (B, K, T, width), an example's rows as positions."""
        if self.examples.plain:
            return rows
        return self.examples.along(0).first(rows).movedim(1, 2).flatten(2, 3)

    def __call__(self, grad: Tensor, x: Tensor) -> list:
        left, right = self._left(grad), self._right(x)
        segments = self.examples.segments
        ordered = self.permutation == tuple(range(len(self.permutation)))
        if segments is not None and ordered and not left.is_complex():
            if not self.sizes[0] and len(self.sizes[1]) == 1:
                left, right = (segments.sorted(side).flatten(0, 2) for side in (left, right))
                return [Ragged(left, right, segments.offsets_of(len(left)), self.shape)]
        left, right = self._by_example(left), self._by_example(right)
        if left.is_complex():
            # Real and imaginary parts are one more index of parameter and data.
            left, right = real_product(left, right)
            order = *self.permutation, len(self.permutation)
            return [Outer(left, right, (*self.shape, 2), order, (*chain(*self.sizes), 2))]
        if ordered:
            return [Outer(left, right, self.shape)]
        n_p, n_q = len(self.sizes[1]), len(self.sizes[2])
        if self.permutation == (*range(n_p, n_p + n_q), *range(n_p)):
            return [Outer(right, left, self.shape)]
        return [Outer(left, right, self.shape, self.permutation, (*chain(*self.sizes),))]

    def data_gradients(self, nodes: Sequence[Node], grad: Tensor, x: Tensor) -> list[Tensor]:
        """Return the data's gradient: one more product with the parameter, as (K, p, q)."""
        (node,) = nodes
        groups, p, q = (math.prod(sizes) for sizes in self.sizes)
        order = [self.permutation.index(axis) for axis in range(len(self.permutation))]
        if node.value.is_complex():
            node = derived(node, Tensor.conj)
        matrix = derived(derived(node, Tensor.permute, order), Tensor.reshape, (groups, p, q))
        left = self._left(grad)
        again = ProductFactor(
            self.examples,
            (0, 1, 2, 3),
            (0, 1, 2, 3),
            ((groups,), (q,), (p,)),
            (groups, p, q),
            (0, 2, 1),
        )
        result = torch.einsum("bktp,kpq->bktq", left, matrix.value)
        result = tap([matrix], result, again, left)
        # The gradient is constant along axes that the product summed over.
        sizes = [x.shape[axis] for axis in self.right]
        rest = sizes[self._kept :]
        result = result.reshape(*sizes[: self._kept], *(1 for _ in rest)).expand(sizes)
        return [result.permute([self.right.index(axis) for axis in range(x.dim())])]
