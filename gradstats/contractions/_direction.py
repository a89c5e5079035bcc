"""Inner products with one dense direction, and the sum of per-example gradients.

⟨G_i, V⟩ for G_i = Σ_t left_t right_tᵀ is Σ_t left_tᵀ V right_t; for patches it is the convolution
with V, multiplied by the output gradient; rows and vectors meet only the elements of V they touch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from gradstats import _cost
from gradstats._factors import (
    Distances,
    Elementwise,
    Experts,
    Factor,
    Images,
    Masked,
    Outer,
    Patches,
    Ragged,
    Rows,
    Tangent,
    Vector,
    add_at,
    added,
    cast,
    compute_dtype,
    segment_sum,
)
from gradstats.contractions import (
    _distances,
    _experts,
    _images,
    _outer,
    _patches,
    _tiles,
    _triton,
    _triton_layers,
)
from gradstats.contractions._elementwise import summed
from gradstats.contractions._multiply import multiply, multiply_groups
from gradstats.contractions._precision import in_full_precision


@in_full_precision
def direction_inner(factors: Sequence[Factor], direction: Tensor, workspace: int) -> Tensor:
    """Return ⟨Σ_u F_u[i], V⟩ for each example, (B,) float64.

    Args:
        factors: factors of one parameter, one for each use.
        direction: V, of the parameter's shape.
        workspace: bytes of scratch memory that may be allocated at once.

    Cost: for products and convolutions as much as their forward pass.
    """
    result = _tiles.zeros(factors, factors[0].batch)
    for factor in factors:
        rule = DIRECTION.get(type(factor))
        if rule is not None:
            result += rule(factor, direction, workspace)
            continue
        # Push the direction forward to the derived tensor that this is a factor of.
        pushed = factor.push(direction)  # type: ignore[attr-defined]
        if pushed is None:
            result += _formed_direction(factor, direction, workspace)
        else:
            result += direction_inner([factor.inner], pushed, workspace)  # type: ignore[attr-defined]
    return result


@in_full_precision
def total(factors: Sequence[Factor]) -> Tensor:
    """Return Σ_i Σ_u F_u[i], the gradient of the summed losses, in the accumulation dtype."""
    result: Tensor | None = None
    for factor in factors:
        rule = TOTAL.get(type(factor))
        if rule is not None:
            part = rule(factor)
        else:
            part = factor.pull(total([factor.inner]))  # type: ignore[attr-defined]
        result = part if result is None else result + part
    assert result is not None
    return result


def _outer_direction(factor: Outer, direction: Tensor, workspace: int) -> Tensor:
    groups, p, q = factor.left.shape[1], factor.left.shape[3], factor.right.shape[3]
    if factor.permutation is not None:
        sizes = [factor.unfolded[axis] for axis in factor.permutation]  # type: ignore[index]
        order = sorted(range(len(sizes)), key=factor.permutation.__getitem__)
        direction = direction.reshape(sizes).permute(order)
    direction = direction.reshape(groups, p, q)
    if _triton.serves(factor):
        return _triton.direction(factor, direction)
    dtype = compute_dtype(factor.left, factor.right, direction)
    # Apply the direction to the wider side, so that the narrower is written.
    one, two = (factor.left, factor.right) if p <= q else (factor.right, factor.left)
    matrix = (direction.mT if p <= q else direction).to(dtype)  # (K, wide, narrow)
    result = _tiles.zeros([factor], factor.batch)
    size = 2 * (math.prod(one.shape[1:]) + math.prod(two.shape[1:])) * dtype.itemsize
    for here in _tiles.chunks(factor.batch, _cost.fitting(size, factor.batch, workspace)):
        # One product for all examples: a batched one would read V once for each.
        rows = two[here].to(dtype).transpose(0, 1)  # (K, B, T, wide)
        applied = multiply_groups(rows.flatten(1, 2), matrix).unflatten(1, rows.shape[1:3])
        products = applied.mul_(one[here].to(dtype).transpose(0, 1))
        result[here] = products.sum(3).sum((0, 2), dtype=torch.float64)
    return result


def _patches_direction(factor: Patches, direction: Tensor, workspace: int) -> Tensor:
    if _triton.convolves(factor):
        weight = direction.reshape(*factor.shape[:2], *factor.kernel)
        return _triton_layers.convolution_direction(factor, weight)
    result = _tiles.zeros([factor], factor.batch)
    for here, products in _patch_rows(factor, direction, workspace):
        result[here] = products.sum(1, dtype=torch.float64)
    return result


def _patch_rows(
    factor: Patches, direction: Tensor, workspace: int
) -> Iterator[tuple[slice, Tensor]]:
    """Yield slices of examples with ⟨G_i[o], V[o]⟩ for each output channel o, (b, O)."""
    dtype = compute_dtype(*factor.sides, direction)
    weight = direction.reshape(*factor.shape[:2], *factor.kernel).to(dtype)
    size = (factor.input[0].numel() + 3 * factor.grad[0].numel()) * dtype.itemsize
    for here in _tiles.chunks(factor.batch, _cost.fitting(size, factor.batch, workspace)):
        output = _convolved(factor.input[here].to(dtype), weight, factor)
        products = output * factor.grad[here].to(dtype)
        yield here, products.flatten(2).sum(2)


def _convolved(x: Tensor, weight: Tensor, factor: Patches) -> Tensor:
    """Return the convolution with a weight, at the positions of a factor's output gradient."""
    geometry, positions = factor.geometry, factor.grad.shape[2:]
    output = torch.ops.aten.convolution(
        x, weight, None, geometry.stride, geometry.padding, geometry.dilation, False,
        [0] * len(positions), geometry.groups,
    )  # fmt: skip
    for axis, count in enumerate(positions):
        output = output.narrow(axis + 2, 0, count)
    return output


@in_full_precision
def row_products(factor: Outer | Patches, direction: Tensor) -> Tensor:
    """Return ⟨G_i[p], V[p]⟩ for each row p of the parameter, (B, p) in the accumulation dtype.

    Args:
        factor: of a convolution, or one whose ``left`` spans the parameter's rows.
        direction: V, of the parameter's shape.

    Cost: as much as the forward pass.
    """
    # More than fits one core's cache: V is read once for each chunk, and products of few rows take
    # a third longer (one core of an AMD EPYC).
    budget = _cost.FRESH_BYTES if direction.is_cuda else 4 * _cost.CACHE_BYTES
    if isinstance(factor, Patches):
        if not factor.batch:
            return factor.grad.new_empty(0, factor.shape[0], dtype=direction.dtype)
        return torch.cat([each for _, each in _patch_rows(factor, direction, budget)])
    dtype = compute_dtype(factor.left, factor.right, direction)
    left, right = factor.left[:, 0], factor.right[:, 0]
    matrix = cast(direction, dtype).reshape(left.shape[2], right.shape[2])
    result = matrix.new_empty(factor.batch, left.shape[2])
    size = left.shape[1] * (2 * left.shape[2] + right.shape[2]) * dtype.itemsize
    for here in _tiles.chunks(factor.batch, _cost.fitting(size, factor.batch, budget)):
        products = multiply(cast(right[here], dtype).flatten(0, 1), matrix.mT)
        products = products.view(-1, *left.shape[1:]).mul_(left[here])
        torch.sum(products, 1, out=result[here])
    return result


@in_full_precision
def row_sums(factor: Outer | Patches) -> Tensor:
    """Return the sum of each row of G_i, (B, p) in the accumulation dtype.

    Args:
        factor: as for ``row_products``.

    Cost: as much as a forward pass with one input channel for each group.
    """
    if isinstance(factor, Outer):
        dtype = compute_dtype(factor.left, factor.right)
        left, sums = cast(factor.left[:, 0], dtype), factor.right[:, 0].sum(2, dtype=dtype)
    else:
        dtype, groups = compute_dtype(*factor.sides), factor.geometry.groups
        channels = factor.input.unflatten(1, (groups, -1)).sum(2, dtype=dtype)
        weight = channels.new_ones(1).expand(groups, 1, *factor.kernel)
        sums = _convolved(channels, weight, factor)
        left = cast(factor.grad, dtype).unflatten(1, (groups, -1)).flatten(3).mT
        sums = sums.flatten(2)
    return (left.mT @ sums.unsqueeze(-1)).flatten(1)


def _images_direction(factor: Images, direction: Tensor, workspace: int) -> Tensor:
    result = _tiles.zeros([factor], factor.batch)
    for examples, parts in _images.alike(factor, workspace):
        result[examples] = direction_inner(parts, direction, workspace)
    return result


def _ragged_direction(factor: Ragged, direction: Tensor, workspace: int) -> Tensor:
    direction = direction.reshape(factor.left.shape[1], factor.right.shape[1])
    if _triton.serves(factor):
        return _triton.ragged_direction(factor, direction)
    dtype = compute_dtype(factor.left, factor.right, direction)
    matrix = direction.to(dtype)
    rows = factor.left.new_zeros(factor.left.shape[0], dtype=torch.float64)
    size = 2 * (factor.left.shape[1] + factor.right.shape[1]) * dtype.itemsize
    for here in _tiles.chunks(len(rows), _cost.fitting(size, len(rows), workspace)):
        products = multiply(factor.right[here].to(dtype), matrix.t())
        products.mul_(factor.left[here].to(dtype))
        rows[here] = products.sum(1, dtype=torch.float64)
    return segment_sum(rows, torch.tensor(factor.lengths, device=rows.device))


def _experts_direction(factor: Experts, direction: Tensor, workspace: int) -> Tensor:
    result = _tiles.zeros([factor], factor.batch)
    for number in factor.busy:
        result += _ragged_direction(factor.of_expert(number), direction[number], workspace)
    return result


def _rows_direction(factor: Rows, direction: Tensor, workspace: int) -> Tensor:
    dtype = compute_dtype(factor.grad, direction)
    count, width = factor.grad.shape
    table = direction.reshape(factor.shape[0], width)
    if _triton.runs(factor.grad):
        return _triton_layers.rows_direction(factor, table)
    result = _tiles.zeros([factor], factor.batch)
    for here in _tiles.chunks(count, _cost.fitting(3 * width * dtype.itemsize, count, workspace)):
        products = table[factor.ids[here]].to(dtype) * factor.grad[here].to(dtype)
        add_at(result, factor.example[here], products.sum(1, dtype=torch.float64))
    return result


def _vector_direction(factor: Vector, direction: Tensor, workspace: int) -> Tensor:
    dtype = compute_dtype(factor.values, direction)
    values = factor.values.reshape(factor.batch, -1)
    result = _tiles.zeros([factor], factor.batch)
    size = 2 * values.shape[1] * dtype.itemsize
    for here in _tiles.chunks(
        factor.batch, _cost.examples_per_chunk(size, factor.batch, workspace)
    ):
        if factor.axis is None:
            chosen = direction.reshape(1, -1)
        else:
            slices = direction.reshape(factor.shape).movedim(factor.axis, 0)
            index = factor.own_slices[here]
            chosen = slices[index].flatten(1) if slices.dim() > 1 else slices[index, None]
        products = values[here].to(dtype) * chosen.to(dtype)
        result[here] = products.sum(1, dtype=torch.float64)
    return result


def _elementwise_direction(factor: Elementwise, direction: Tensor, workspace: int) -> Tensor:
    return _triton_layers.elementwise_direction(factor, direction)


def _elementwise_total(factor: Elementwise) -> Tensor:
    return _vector_total(summed(factor))


def _formed_direction(factor: Factor, direction: Tensor, workspace: int) -> Tensor:
    """Return the products of per-example gradients formed a few examples at a time."""
    result = _tiles.zeros([factor], factor.batch)
    flat = direction.flatten()
    size = 2 * flat.numel() * direction.dtype.itemsize
    for here in _tiles.chunks(
        factor.batch, _cost.examples_per_chunk(size, factor.batch, workspace)
    ):
        formed = _tiles.gradients([factor], here)
        result[here] = (formed * flat.to(formed)).sum(1, dtype=torch.float64)
    return result


def _outer_total(factor: Outer) -> Tensor:
    dtype = compute_dtype(factor.left, factor.right)
    if factor.left.dtype == factor.right.dtype == dtype:
        return _outer.summed(factor)
    # Half-precision operands: their product must not be rounded to half precision again.
    parts = (
        _outer.summed(replace(chunk, left=chunk.left.to(dtype), right=chunk.right.to(dtype)))
        for chunk in map(factor.select, _tiles.chunks(factor.batch, 8))
    )
    return reduce(torch.add, parts)


def _patches_total(factor: Patches) -> Tensor:
    return _patches.summed(factor, compute_dtype(*factor.sides))


def _images_total(factor: Images) -> Tensor:
    parts = (total(parts) for _, parts in _images.alike(factor, _cost.MERGED_BYTES))
    return reduce(torch.add, parts, factor.select(slice(0)).dense().sum(0))


def _ragged_total(factor: Ragged) -> Tensor:
    dtype = compute_dtype(factor.left, factor.right)
    return multiply(factor.left.to(dtype).t(), factor.right.to(dtype)).reshape(factor.shape)


def _rows_total(factor: Rows) -> Tensor:
    rows = cast(factor.grad, compute_dtype(factor.grad))
    return added(rows, factor.ids, factor.shape[0]).reshape(factor.shape)


def _vector_total(factor: Vector) -> Tensor:
    dtype = compute_dtype(factor.values)
    if factor.axis is None:
        return factor.values.sum(0, dtype=dtype).reshape(factor.shape)
    result = factor.values.new_zeros(factor.shape, dtype=dtype)
    places = factor.own_slices
    result.movedim(factor.axis, 0).index_add_(0, places, factor.values.to(dtype))
    return result


def _masked_direction(factor: Masked, direction: Tensor, workspace: int) -> Tensor:
    return direction_inner([factor.inner], direction * factor.mask, workspace)


def _tangent_direction(factor: Tangent, direction: Tensor, workspace: int) -> Tensor:
    # The projection is symmetric: it may be applied to the direction instead.
    return direction_inner([factor.inner], _projected(factor, direction), workspace)


def _tangent_total(factor: Tangent) -> Tensor:
    return _projected(factor, total([factor.inner]))


def _projected(factor: Tangent, direction: Tensor) -> Tensor:
    """Return a direction without its share of the parts along the unit vectors."""
    unit = factor.unit.to(compute_dtype(factor.unit, direction))
    over = [axis for axis, size in enumerate(factor.along.shape[1:]) if size == 1]
    direction = direction.to(unit)
    return direction - (direction * unit).sum(over, keepdim=True) * factor.share * unit


def _masked_total(factor: Masked) -> Tensor:
    return total([factor.inner]) * factor.mask


DIRECTION: dict[type, Callable[[Any, Tensor, int], Tensor]] = {
    Outer: _outer_direction,
    Patches: _patches_direction,
    Images: _images_direction,
    Ragged: _ragged_direction,
    Experts: _experts_direction,
    Rows: _rows_direction,
    Vector: _vector_direction,
    Elementwise: _elementwise_direction,
    Masked: _masked_direction,
    Tangent: _tangent_direction,
    Distances: _distances.direction,
}

TOTAL: dict[type, Callable[[Any], Tensor]] = {
    Outer: _outer_total,
    Patches: _patches_total,
    Images: _images_total,
    Ragged: _ragged_total,
    Experts: _experts.total,
    Rows: _rows_total,
    Vector: _vector_total,
    Elementwise: _elementwise_total,
    Masked: _masked_total,
    Tangent: _tangent_total,
    Distances: _distances.total,
}
