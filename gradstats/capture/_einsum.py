"""Parsing of equations in Einstein's notation, as ``torch.einsum`` takes them."""

from __future__ import annotations

import string


def parse_equation(equation: str, dims: list[int]) -> tuple[list[list[str]], list[str]]:
    """Return the index lists of operands and result, with an ellipsis written out."""
    text = equation.replace(" ", "")
    left, _, right = text.partition("->")
    terms = left.split(",")
    free = [c for c in string.ascii_letters if c not in text]
    hidden = [
        dim - len(term.replace("...", ""))
        for term, dim in zip(terms, dims, strict=True)
        if "..." in term
    ]
    longest = max(hidden, default=0)
    ellipsis = free[:longest]

    def spell(term: str, dim: int | None) -> list[str]:
        head, dots, tail = term.partition("...")
        count = longest if dim is None else dim - len(head) - len(tail)
        middle = ellipsis[len(ellipsis) - count :] if dots and count else []
        return [*head, *middle, *tail]

    inputs = [spell(term, dim) for term, dim in zip(terms, dims, strict=True)]
    if "->" in text:
        return inputs, spell(right, None)
    letters = [letter for term in inputs for letter in term]
    once = sorted(i for i in set(letters) if letters.count(i) == 1 and i not in ellipsis)
    return inputs, [*ellipsis, *once]
