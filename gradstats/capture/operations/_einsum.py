"""Contractions as equations in Einstein's notation: those of ``torch.einsum``, and products."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradstats.capture.operations._operations import OUTER_PRODUCTS


class Equation(NamedTuple):
    """A contraction, index by index.

    Attributes:
        inputs: for each operand, the index of each of its axes.
        out: the same for the result; it is summed over all other indices.
    """

    inputs: list[list[str]]
    out: list[str]


def parse_equation(equation: str, operands: Sequence[Tensor]) -> Equation:
    """Return the index lists of operands and result, with an ellipsis written out."""
    dims = [operand.dim() for operand in operands]
    text = equation.replace(" ", "")
    left, _, right = text.partition("->")
    terms = left.split(",")
    free = [c for c in string.ascii_letters if c not in text]
    pairs = zip(terms, dims, strict=True)
    longest = max(dim - len(term.replace("...", "")) for term, dim in pairs)
    ellipsis = free[:longest]

    def spell(term: str, dim: int | None) -> list[str]:
        head, dots, tail = term.partition("...")
        count = longest if dim is None else dim - len(head) - len(tail)
        middle = ellipsis[len(ellipsis) - count :] if dots else []
        return [*head, *middle, *tail]

    inputs = [spell(term, dim) for term, dim in zip(terms, dims, strict=True)]
    if "->" in text:
        return Equation(inputs, spell(right, None))
    letters = [letter for term in inputs for letter in term]
    once = sorted(i for i in set(letters) if letters.count(i) == 1 and i not in ellipsis)
    return Equation(inputs, [*ellipsis, *once])


def matrix_product(first: int, second: int, *, of_rows: bool = False) -> Equation:
    """Return ``torch.matmul`` of two operands with these numbers of axes as an equation.

    Args:
        first, second: numbers of axes.
        of_rows: multiply rows with rows, as linear does, not with columns.
    """
    row, inner, column, *batch = [*string.ascii_letters[: 1 + max(first, second, 2)]]

    def spell(dim: int, matrix: list[str]) -> list[str]:
        return [inner] if dim < 2 else [*batch[len(batch) - (dim - 2) :], *matrix]

    inputs = [
        spell(first, [row, inner]),
        spell(second, [column, inner] if of_rows else [inner, column]),
    ]
    out = [*batch, *([row] if first > 1 else []), *([column] if second > 1 else [])]
    return Equation(inputs, out)


def tensor_product(func, dims: Any, first: int, second: int) -> Equation:
    """Return an operation of ``TENSOR_PRODUCTS`` on two operands as an equation.

    Args:
        func: the operation.
        dims: of ``torch.tensordot``: how many axes are summed, or which axes of both operands.
        first, second: numbers of axes.
    """
    if func is not torch.tensordot:
        of_all = func in OUTER_PRODUCTS or 0 in (first, second)
        dims = ([], []) if of_all else ([-1], [-1])
    letters = iter(string.ascii_letters)
    inputs = [[next(letters) for _ in range(count)] for count in (first, second)]
    for one, other in zip(*_summed_axes(dims, first), strict=True):
        inputs[1][other] = inputs[0][one]
    left, right = inputs
    return Equation(inputs, [i for i in (*left, *right) if (i in left) != (i in right)])


def _summed_axes(dims: Any, count: int) -> list[Sequence[int]]:
    """Return the axes of each operand that tensordot sums; the first operand has ``count`` axes."""
    if isinstance(dims, Tensor):
        dims = dims.tolist() if dims.numel() > 1 else int(dims)
    if isinstance(dims, int):
        dims = range(count - dims, count), range(dims)
    return [[axes] if isinstance(axes, int) else axes for axes in dims]
