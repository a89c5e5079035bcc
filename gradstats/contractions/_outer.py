"""Outer factors: G_i = Σ_t left_t right_tᵀ, in three forms that give the same number.

rank one (T = 1)  ‖G_i‖² = ‖left‖²‖right‖²                            Goodfellow, arXiv 1510.01799
Gram              ‖G_i‖² = Σ_{t,s} (left_t·left_s)(right_t·right_s)   Rochette et al., 1912.06015
direct            G_i formed tile by tile, squared at once
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial, reduce

import torch
from torch import Tensor

from gradstats import _cost
from gradstats._compiler import is_compiling
from gradstats._factors import (
    ConvolutionGeometry,
    Factor,
    Outer,
    compute_dtype,
    weight_gradient,
)
from gradstats.contractions import _triton
from gradstats.contractions._formed import form_at_once, form_chunks, form_each
from gradstats.contractions._gram import gram
from gradstats.contractions._multiply import SCRATCH, multiply_groups, pays
from gradstats.contractions._result import (
    Contraction,
    WellConditioned,
    recompute_suspects,
)
from gradstats.contractions._rounding import (
    ROW_ELEMENTS,
    SMALLEST,
    product_roundoff,
    relative_bound,
    row_norms,
)
from gradstats.contractions._tensor_cores import cut_off_of
from gradstats.contractions._tiles import chunks, zeros

# The most squares to sum in the accumulation dtype: the sum then loses no more digits than its
# terms have lost already.
SMALL = 4096


def sqnorm(factor: Outer, workspace: int) -> Contraction:
    """Return ‖G_i‖² by the form that costs least for these shapes."""
    on_chip = _triton.serves(factor)
    form = cheapest_form(factor, on_chip=on_chip)
    if form == "rank_one":
        return rank_one(factor, on_chip=on_chip)
    if form == "gram":
        return guarded_gram(factor, workspace, on_chip=on_chip)
    return _triton.direct(factor) if on_chip else direct(factor, workspace)


def sqnorm_and_sum(factor: Outer, workspace: int) -> tuple[Contraction, Tensor]:
    """Return ‖G_i‖² and Σ_i G_i; the direct form gives both from one product."""
    on_chip = _triton.serves(factor)
    if on_chip and is_of_images(factor):
        # For 1×1 convolutions, separate norms and cuDNN's weight gradient take half to nine tenths
        # of the time of one kernel for both (NVIDIA H100).
        return sqnorm(factor, workspace), summed(factor)
    form = cheapest_form(factor, with_sum=True, on_chip=on_chip)
    if form == "direct" and on_chip and factor.left.shape[1] == 1:
        result, total = _triton.direct_and_sum(factor)
        return result, _arrange(total, factor)
    if form == "direct":
        return direct_and_sum(factor, workspace)
    if form == "rank_one":
        return rank_one(factor, on_chip=on_chip), summed(factor)
    return guarded_gram(factor, workspace, on_chip=on_chip), summed(factor)


def cheapest_form(
    factor: Outer,
    *,
    with_sum: bool = False,
    on_chip: bool | None = None,
) -> _cost.Form:
    """Return the form that costs least for these shapes, including the sum if it is wanted."""
    if on_chip is None:
        on_chip = _triton.serves(factor)
    (batch, groups, positions, p), q = factor.left.shape, factor.right.shape[3]
    # Kernels recompute inaccurate results themselves. PyTorch's are read back first, which a
    # compiled graph cannot do.
    guarded = on_chip or not is_compiling()
    choose = partial(
        _cost.choose_outer_form, positions, p, q, with_sum=with_sum, guarded=guarded,
        on_chip=on_chip, alone=not on_chip and _forms_alone(factor), examples=batch * groups,
    )  # fmt: skip
    form = choose(roundoff=0.0)
    if form != "gram":
        return form  # its rounding errors do not matter
    sides = factor.left, factor.right
    return choose(roundoff=product_roundoff(*sides), cut_off=cut_off_of(*sides))


def _forms_alone(factor: Outer) -> bool:
    """Whether gradients are best formed one at a time, whatever their size."""
    batch, groups, positions, p = factor.left.shape
    size = p * factor.right.shape[3]
    if groups > 1 or 4 * size > SCRATCH:
        return False
    return pays(positions * size, factor.left, factor.right, times=batch)


def rank_one(factor: Outer, *, on_chip: bool = False) -> Contraction:
    """Return Σ_k ‖left_k‖²‖right_k‖² for factors with at most one position."""
    _, groups, positions, _ = factor.left.shape
    if on_chip and positions:
        return _triton.rank_one(factor)
    if groups == positions == 1:
        return one_position(factor.left[:, 0, 0], factor.right[:, 0, 0])
    dtype = compute_dtype(factor.left, factor.right)
    sides = (factor.left, factor.right)
    left, right = (row_norms(side, dtype).double() for side in sides)
    value = (left * right).square().sum((1, 2))
    # What underflow takes from one squared norm is multiplied by the other.
    factors = (left.square() + right.square()).sum((1, 2))
    lost = max(side.shape[-1] for side in sides) * SMALLEST[dtype] * factors
    return Contraction(value, relative_bound(dtype) * value + lost)


def one_position(left: Tensor, right: Tensor) -> WellConditioned:
    """Return ‖left_i‖²‖right_i‖² of rows (B, p) and (B, q), by PyTorch."""
    dtype = compute_dtype(left, right)
    if max(left.shape[1], right.shape[1]) > ROW_ELEMENTS:
        return WellConditioned(dtype, (row_norms(left, dtype), row_norms(right, dtype)))
    norm = torch.linalg.vector_norm
    norms = norm(left, dim=1, dtype=dtype), norm(right, dim=1, dtype=dtype)
    return WellConditioned(dtype, norms)


def guarded_gram(factor: Outer, workspace: int, *, on_chip: bool = False) -> Contraction:
    """Return the Gram form's result, with inaccurate examples recomputed by the direct form."""
    if on_chip:
        return _triton.gram(factor)
    return recompute_suspects(
        gram(factor, workspace), lambda rows: direct(factor.select(rows), workspace)
    )


def direct(factor: Outer, workspace: int) -> Contraction:
    """Return Σ over tiles of ‖left_tileᵀ right‖², by PyTorch. It is well conditioned.

    Cost: T·p·q multiply-adds an example; scratch of one tile.
    """
    return _direct(factor, workspace, with_sum=False)[0]


def direct_and_sum(factor: Outer, workspace: int) -> tuple[Contraction, Tensor]:
    """Return ‖G_i‖² and Σ_i G_i by PyTorch, forming each gradient once."""
    result, total = _direct(factor, workspace, with_sum=True)
    assert total is not None
    return result, total


def _direct(factor: Outer, workspace: int, *, with_sum: bool) -> tuple[Contraction, Tensor | None]:
    dtype = compute_dtype(factor.left, factor.right)
    left, right = factor.left, factor.right
    (batch, groups, positions, p), q = left.shape, right.shape[3]
    transposed, rows, chunk = _cost.direct_plan(
        batch, groups, p, q, dtype.itemsize, workspace, with_sum=with_sum
    )
    if transposed:
        left, right, p, q = right, left, q, p
    cast_widths = sum(side.shape[3] for side in (left, right) if side.dtype != dtype)
    if cast_widths:
        # Casting the operands of a chunk writes more than the gradients if T is large.
        size = groups * (rows * q + positions * cast_widths) * dtype.itemsize
        chunk = min(chunk, _cost.examples_per_chunk(size, batch, workspace))
    alone = _forms_alone(factor)
    each = (alone or chunk == groups == 1) and rows >= p
    if each and batch and not is_compiling():
        norms, total = form_each(
            left[:, 0].mT.unbind(), right[:, 0].unbind(), dtype, with_sum=with_sum, reuse=not alone
        )
    elif chunk >= batch and rows >= p and groups * p * q <= SMALL:
        norms, total = form_at_once(left, right, dtype, with_sum)
    else:
        norms, total = form_chunks(left, right, dtype, with_sum, chunk, rows)
    if norms.dim() == 1:
        result = WellConditioned(dtype, (norms,))
    else:
        # Sums over the gradients' rows are in float64, once for all examples.
        result = WellConditioned(dtype, value=norms.double().square_().flatten(1).sum(1))
    if total is None:
        return result, None
    return result, _arrange(total.mT.contiguous() if transposed else total, factor)


def direction(factor: Outer, direction: Tensor, workspace: int) -> Tensor:
    """Return ⟨G_i, V⟩ = Σ_t left_tᵀ V right_t."""
    groups, p, q = factor.left.shape[1], factor.left.shape[3], factor.right.shape[3]
    if factor.permutation is not None:
        sizes = [factor.unfolded[axis] for axis in factor.permutation]  # type: ignore[index]
        order = sorted(range(len(sizes)), key=factor.permutation.__getitem__)
        direction = direction.reshape(sizes).permute(order)
    direction = direction.reshape(groups, p, q)
    if _triton.serves(factor):
        return _triton.direction(factor, direction)
    dtype = compute_dtype(factor.left, factor.right, direction)
    # Multiply the direction with the wider side: the result has the width of the narrower.
    one, two = (factor.left, factor.right) if p <= q else (factor.right, factor.left)
    matrix = (direction.mT if p <= q else direction).to(dtype)  # (K, wide, narrow)
    result = zeros([factor], factor.batch)
    size = 2 * (math.prod(one.shape[1:]) + math.prod(two.shape[1:])) * dtype.itemsize
    for here in chunks(factor.batch, _cost.fitting(size, factor.batch, workspace)):
        # One product for all examples: a batched product would read V once for each.
        rows = two[here].to(dtype).transpose(0, 1)  # (K, B, T, wide)
        applied = multiply_groups(rows.flatten(1, 2), matrix).unflatten(1, rows.shape[1:3])
        products = applied.mul_(one[here].to(dtype).transpose(0, 1))
        result[here] = products.sum(3).sum((0, 2), dtype=torch.float64)
    return result


def total(factor: Outer) -> Tensor:
    """Return Σ_i G_i in the accumulation dtype."""
    dtype = compute_dtype(factor.left, factor.right)
    if factor.left.dtype == factor.right.dtype == dtype:
        return summed(factor)
    # The product of half-precision operands must not be rounded to half precision.
    parts = (
        summed(replace(chunk, left=chunk.left.to(dtype), right=chunk.right.to(dtype)))
        for chunk in map(factor.select, chunks(factor.batch, 8))
    )
    return reduce(torch.add, parts)


def pieces(factors: Sequence[Factor], workspace: int) -> list[list[Outer]]:
    """Return factors of a few examples at a time, if all are outer and can be merged; else none.

    Merging copies all operands while autograd still holds the originals: for all examples at once
    that would double the activations of all uses of the parameter.
    """
    uses = [factor for factor in factors if isinstance(factor, Outer)]
    if is_compiling() or len(uses) < len(factors) or len({use.layout for use in uses}) > 1:
        return []
    sides = [side for use in uses for side in (use.left, use.right)]
    size, batch = sum(side.nbytes for side in sides), uses[0].batch
    budget = workspace if sides[0].is_cuda else min(workspace, _cost.MERGED_BYTES)
    chunk = max(1, batch * budget // max(1, size))
    if chunk >= batch:
        return []
    return [[use.select(rows) for use in uses] for rows in chunks(batch, chunk)]


def merge(factors: list[Outer]) -> Outer:
    """Return the sum of several uses as one factor, their positions concatenated."""
    first = factors[0]
    left = torch.cat([factor.left for factor in factors], dim=2)
    right = torch.cat([factor.right for factor in factors], dim=2)
    return Outer(left, right, first.shape, first.permutation, first.unfolded)


def magnitude(factor: Outer) -> Tensor:
    """Return Σ_t ‖left_t‖‖right_t‖ over the groups, (B,); its square bounds Σ|terms| of Gram."""
    dtype = compute_dtype(factor.left, factor.right)
    left = torch.linalg.vector_norm(factor.left, dim=-1, dtype=dtype)
    right = torch.linalg.vector_norm(factor.right, dim=-1, dtype=dtype)
    return (left * right).sum((1, 2), dtype=torch.float64)


def summed(factor: Outer) -> Tensor:
    """Return Σ_i G_i in the parameter's shape by one product over examples and positions."""
    if is_of_images(factor):
        return _arrange(_summed_images(factor), factor)
    left = factor.left.transpose(0, 1).flatten(1, 2)  # (K, B·T, p)
    right = factor.right.transpose(0, 1).flatten(1, 2)
    return _arrange(multiply_groups(left.mT, right), factor)


def is_of_images(factor: Outer) -> bool:
    """Whether a GPU sums the gradients fastest as those of a 1×1 convolution.

    It does if positions are adjacent in both operands, which a matrix product would have to copy.
    Only in half precision: in float32 cuDNN may use TF32 though the user forbids it for products.
    """
    left, right = factor.left, factor.right
    if not left.is_cuda or left.shape[1] != 1 or left.dtype != right.dtype:
        return False
    if left.dtype not in (torch.bfloat16, torch.float16):
        return False
    return all(side.stride(2) == 1 and min(side.shape[2:]) > 1 for side in (left, right))


def _summed_images(factor: Outer) -> Tensor:
    """Return Σ_i G_i, (p, q, 1, 1), as the weight gradient of a 1×1 convolution.

    The positions are laid out as near to a square as possible: cuDNN is slower on one long row.
    """
    count = factor.left.shape[2]
    height = next(size for size in range(math.isqrt(count), 0, -1) if count % size == 0)
    grad, x = (
        side.squeeze(1).mT.unflatten(2, (height, -1)) for side in (factor.left, factor.right)
    )
    sizes = (grad.shape[1], x.shape[1], 1, 1)
    return weight_gradient(x, grad, sizes, ConvolutionGeometry((1, 1), (0, 0), (1, 1), 1))


def _arrange(total: Tensor, factor: Outer) -> Tensor:
    if factor.permutation is not None:
        assert factor.unfolded is not None
        total = total.reshape(factor.unfolded).permute(factor.permutation)
    return total if total.shape == factor.shape else total.reshape(factor.shape)
