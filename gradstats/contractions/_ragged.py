"""Ragged factors: products on packed examples, contracted in groups of examples of like length."""

from __future__ import annotations

import torch
from torch import Tensor

from gradstats import _cost
from gradstats._factors import Ragged, segment_sum
from gradstats.contractions import _outer, _triton
from gradstats.contractions._multiply import multiply
from gradstats.contractions._result import Contraction, product_roundoff
from gradstats.contractions._tensor_cores import cut_off_of

# From so many elements of both operands on, copying an example into a group takes longer than
# contracting it alone adds (60 µs on a core of an AMD EPYC).
ALONE = 40_000


def sqnorm(factor: Ragged, workspace: int, *, guarded: bool) -> Contraction:
    """Return ‖G_i‖² by the form that costs least for each group of examples.

    Cost: as for examples of one length, and padding that at most doubles a group's rows.
    """
    if _triton.serves(factor):
        return _on_chip(factor, guarded=guarded)
    value = factor.left.new_zeros(factor.batch, dtype=torch.float64)
    bound = torch.zeros_like(value)
    for examples in groups(factor, workspace):
        result = _outer.sqnorm(factor.padded(examples), workspace, guarded=guarded)
        rows = torch.tensor(examples, device=value.device)
        value[rows], bound[rows] = result.value, result.bound
    return Contraction(value, bound)


def sqnorm_and_sum(factor: Ragged, workspace: int) -> tuple[Contraction, Tensor]:
    """Return ‖G_i‖² and Σ_i G_i; the sum is one product over all rows."""
    if _triton.serves(factor):
        return _triton.ragged_and_sum(factor)
    total = multiply(factor.left.t(), factor.right).reshape(factor.shape)
    return sqnorm(factor, workspace, guarded=True), total


def _on_chip(factor: Ragged, *, guarded: bool) -> Contraction:
    widths = factor.left.shape[1], factor.right.shape[1]
    roundoff = product_roundoff(factor.left, factor.right)
    form = _cost.choose_outer_form(
        factor.longest, *widths, guarded=guarded, on_chip=True, roundoff=roundoff,
        cut_off=cut_off_of(factor.left, factor.right),
    )  # fmt: skip
    if form == "direct":
        return _triton.ragged_direct(factor)
    return _triton.ragged_gram(factor)


def magnitude(factor: Ragged, dtype: torch.dtype) -> Tensor:
    """Return Σ_t ‖left_t‖‖right_t‖ of shape (B,); its square bounds Σ|terms| of the Gram form."""
    left = torch.linalg.vector_norm(factor.left, dim=-1, dtype=dtype)
    right = torch.linalg.vector_norm(factor.right, dim=-1, dtype=dtype)
    return segment_sum((left * right).double(), torch.tensor(factor.lengths, device=left.device))


def groups(factor: Ragged, workspace: int) -> list[list[int]]:
    """Return the examples that have rows, in groups whose padded rows fit the workspace.

    The longest of a group has at most twice as many rows as the shortest. Examples with much to
    copy stay alone: they are contracted where they are.
    """
    lengths = factor.lengths
    elements = factor.left.shape[1] + factor.right.shape[1]
    widths = elements * factor.left.element_size()
    ascending = sorted((e for e, n in enumerate(lengths) if n), key=lambda e: lengths[e])
    found: list[list[int]] = []
    for example in ascending:
        group = found[-1] if found else []
        padded = lengths[example] * (len(group) + 1) * widths
        alike = group and lengths[example] <= 2 * lengths[group[0]]
        if alike and padded <= workspace // 2 and lengths[example] * elements < ALONE:
            group.append(example)
        else:
            found.append([example])
    # Callers select ascending rows.
    return [sorted(group) for group in found]


def merge(factors: list[Ragged]) -> Ragged:
    """Return the sum of several uses as one: each example's rows stand one after the other."""
    batch = factors[0].batch
    lengths = [factor.lengths for factor in factors]
    pieces = [
        (factor.left[start:end], factor.right[start:end])
        for example in range(batch)
        for factor in factors
        for start, end in [factor.offsets[example : example + 2]]
    ]
    offsets = [0]
    for example in range(batch):
        offsets.append(offsets[-1] + sum(length[example] for length in lengths))
    left, right = (torch.cat(side) for side in zip(*pieces, strict=True))
    return Ragged(left, right, tuple(offsets), factors[0].shape)
