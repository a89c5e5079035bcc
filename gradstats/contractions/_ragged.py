"""Ragged factors: products of packed examples, one by one or in groups of similar length."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor

from gradstats import _cost
from gradstats._compiler import is_compiling
from gradstats._factors import Ragged, compute_dtype, segment_sum
from gradstats.contractions import _outer, _triton
from gradstats.contractions._formed import form_each
from gradstats.contractions._multiply import WORTH_CALLING, multiply
from gradstats.contractions._result import Contraction, WellConditioned
from gradstats.contractions._rounding import product_roundoff
from gradstats.contractions._tensor_cores import cut_off_of
from gradstats.contractions._tiles import chunks

# From this number of elements of both operands, copying an example into a group costs more than
# contracting it where it lies. The first is for examples whose gradient is formed, which takes two
# operations each, the second for all others (two cores of an AMD EPYC).
FORMED_ALONE, ALONE = 40_000, 100_000

# The fixed cost of a group, in elements copied in that time, and the multiply-adds that take as
# long as copying one element.
ANOTHER_GROUP, PRODUCTS = 600_000, 16


def sqnorm(factor: Ragged, workspace: int) -> Contraction:
    """Return ‖G_i‖² by the form that costs least for each example, or each group of short ones.

    Cost: as for examples of one length, plus padding, which at most doubles a group's rows or costs
    less than another group.
    """
    if _triton.serves(factor):
        return _on_chip(factor)
    alone = formed_alone(factor, workspace)
    parts = [(alone, _formed(factor, alone))] if alone else []
    for examples in groups(factor, set(range(factor.batch)).difference(alone), workspace):
        result = _outer.sqnorm(factor.padded(examples), workspace)
        parts.append((examples, result))
    value = factor.left.new_zeros(factor.batch, dtype=torch.float64)
    bound = torch.zeros_like(value)
    for examples, result in parts:
        rows = torch.tensor(examples, device=value.device)
        value[rows], bound[rows] = result.value, result.bound
    return Contraction(value, bound)


def formed_alone(factor: Ragged, workspace: int) -> list[int]:
    """Return the examples whose gradients are formed one by one, from rows where they lie.

    Not the largest ones: for these the choice of the library matters more than the number of calls,
    so they are contracted like all others, in groups of one.
    """
    p, q = factor.left.shape[1], factor.right.shape[1]
    sides = factor.left, factor.right
    if is_compiling() or p * q * compute_dtype(*sides).itemsize > workspace:
        return []
    choose = partial(
        _cost.choose_outer_form, d_left=p, d_right=q, examples=1,
        roundoff=product_roundoff(*sides), cut_off=cut_off_of(*sides),
    )  # fmt: skip
    lengths = factor.lengths
    chosen = {
        n for n in set(lengths)
        if n * (p + q) >= FORMED_ALONE and n * p * q < WORTH_CALLING and choose(n) == "direct"
    }  # fmt: skip
    return [example for example, length in enumerate(lengths) if length in chosen]


def _formed(factor: Ragged, examples: list[int]) -> Contraction:
    """Return ‖Σ_t left_t right_tᵀ‖² of each example, whose gradient is formed."""
    dtype = compute_dtype(factor.left, factor.right)
    left, right = factor.left, factor.right
    if _cost.pays_to_transpose(left.shape[1], right.shape[1], len(examples), with_sum=False):
        left, right = right, left
    rows = [slice(*factor.offsets[example : example + 2]) for example in examples]
    transposed = left.t()
    sides = [transposed[:, span] for span in rows], [right[span] for span in rows]
    norms, _ = form_each(*sides, dtype, with_sum=False)
    return WellConditioned(dtype, value=norms.double().square_().sum(1))


def sqnorm_and_sum(factor: Ragged, workspace: int) -> tuple[Contraction, Tensor]:
    """Return ‖G_i‖² and Σ_i G_i; the sum is one product over all rows."""
    if _triton.serves(factor):
        norms, total = _triton.direct_and_sum(factor)
        return norms, total.reshape(factor.shape)
    total = multiply(factor.left.t(), factor.right).reshape(factor.shape)
    return sqnorm(factor, workspace), total


def _on_chip(factor: Ragged) -> Contraction:
    widths = factor.left.shape[1], factor.right.shape[1]
    roundoff = product_roundoff(factor.left, factor.right)
    form = _cost.choose_outer_form(
        factor.longest, *widths, on_chip=True, roundoff=roundoff,
        cut_off=cut_off_of(factor.left, factor.right),
    )  # fmt: skip
    return _triton.direct(factor) if form == "direct" else _triton.gram(factor)


def magnitude(factor: Ragged) -> Tensor:
    """Return Σ_t ‖left_t‖‖right_t‖ of shape (B,); its square bounds Σ|terms| of the Gram form."""
    dtype = compute_dtype(factor.left, factor.right)
    left = torch.linalg.vector_norm(factor.left, dim=-1, dtype=dtype)
    right = torch.linalg.vector_norm(factor.right, dim=-1, dtype=dtype)
    return segment_sum((left * right).double(), torch.tensor(factor.lengths, device=left.device))


def direction(factor: Ragged, direction: Tensor, workspace: int) -> Tensor:
    """Return ⟨G_i, V⟩ = Σ_t left_tᵀ V right_t."""
    direction = direction.reshape(factor.left.shape[1], factor.right.shape[1])
    if _triton.serves(factor):
        return _triton.ragged_direction(factor, direction)
    dtype = compute_dtype(factor.left, factor.right, direction)
    matrix = direction.to(dtype)
    rows = factor.left.new_zeros(factor.left.shape[0], dtype=torch.float64)
    size = 2 * (factor.left.shape[1] + factor.right.shape[1]) * dtype.itemsize
    for here in chunks(len(rows), _cost.fitting(size, len(rows), workspace)):
        products = multiply(factor.right[here].to(dtype), matrix.t())
        products.mul_(factor.left[here].to(dtype))
        rows[here] = products.sum(1, dtype=torch.float64)
    return segment_sum(rows, torch.tensor(factor.lengths, device=rows.device))


def total(factor: Ragged) -> Tensor:
    """Return Σ_i G_i in the accumulation dtype."""
    dtype = compute_dtype(factor.left, factor.right)
    return multiply(factor.left.to(dtype).t(), factor.right.to(dtype)).reshape(factor.shape)


def groups(factor: Ragged, examples: Iterable[int], workspace: int) -> list[list[int]]:
    """Return the examples that have rows, in groups whose padded rows fit the workspace.

    The longest example of a group has at most twice as many rows as the shortest, unless padding
    the shorter ones costs less than another group. Large examples stay alone.
    """
    lengths = factor.lengths
    p, q = factor.left.shape[1], factor.right.shape[1]
    widths = (p + q) * factor.left.element_size()
    row = p + q + p * q / PRODUCTS
    found: list[list[int]] = []
    rows = 0
    for example in sorted((e for e in examples if lengths[e]), key=lambda e: lengths[e]):
        group, longest = found[-1] if found else [], lengths[example]
        padded = longest * (len(group) + 1)
        alike = group and longest <= 2 * lengths[group[0]]
        cheap = group and (padded - rows - longest) * row < ANOTHER_GROUP
        fits = padded * widths <= workspace // 2 and longest * (p + q) < ALONE
        if (alike or cheap) and fits:
            group.append(example)
            rows += longest
        else:
            found.append([example])
            rows = longest
    # Callers select ascending rows.
    return [sorted(group) for group in found]


def merge(factors: list[Ragged]) -> Ragged:
    """Return the sum of several uses as one factor, each example's rows concatenated."""
    bounds = torch.tensor([factor.offsets for factor in factors])
    lengths = bounds.diff()
    # Only pieces that have rows: in a model that is called once for each example, every use of a
    # parameter has rows of one example only.
    examples, uses = lengths.T.nonzero().unbind(1)
    rows = (bounds[uses, examples], bounds[uses, examples + 1])
    pieces = [
        (factors[use].left[start:end], factors[use].right[start:end])
        for use, start, end in zip(*(each.tolist() for each in (uses, *rows)), strict=True)
    ]
    if not pieces:
        return factors[0]
    left, right = (torch.cat(side) for side in zip(*pieces, strict=True))
    offsets = (0, *lengths.sum(0).cumsum(0).tolist())
    return Ragged(left, right, offsets, factors[0].shape)
