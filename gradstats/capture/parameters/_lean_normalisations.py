"""Steps back through normalisations: rows, columns or all of w over a norm or a deviation.

The gradient of w is that of the result times a constant, without its component along w and, if the
mean was subtracted, without its mean.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gradstats._cost import pays_to_pull_apart
from gradstats._factors import Factor, Outer, Patches, Tangent, Vector, compute_dtype, tensors_of
from gradstats.capture.operations._nested import argument_of
from gradstats.capture.parameters._derivation import Derived
from gradstats.capture.parameters._lean_products import Scaled, numbers_of, times
from gradstats.capture.parameters._nodes import Node
from gradstats.contractions import row_products, row_sums


@dataclass(eq=False)
class Flattened:
    """The factor of a reshaped weight, on the way back from the reshaped tensor to the weight.

    Attributes:
        inner: a factor of a kind that has one shape alone, as a rule that of the weight.
        shape: the shape of the tensor that it belongs to here.
    """

    inner: Patches | Tangent
    shape: tuple[int, ...]


def in_shape(factor: Outer | Patches | Tangent, shape: tuple[int, ...]) -> Any:
    """Return a factor in another shape; unchanged if that has other rows."""
    if factor.shape[:1] != shape[:1]:
        return factor
    if isinstance(factor, Outer):
        return replace(factor, shape=shape)
    if not isinstance(factor, Tangent) or (inner := in_shape(factor.inner, shape)).shape != shape:
        return factor
    sizes = (-1, *(1,) * (len(shape) - 1))
    along = factor.along.reshape(factor.batch, *sizes)
    return Tangent(inner, factor.unit.reshape(shape), along, factor.share.reshape(sizes))


def normalised(factor: Factor, node: Derived, parent: Node) -> Factor | None:
    """w / ‖w‖."""
    argument = partial(argument_of, node.args, node.kwargs)
    if argument(1, "p", 2.0) != 2 or not _pays(factor):
        return None
    node.check_step()
    dim, eps = argument(2, "dim", 1), argument(3, "eps", 1e-12)
    weight = _numbers(parent)
    norm = weight.norm(2, dim, keepdim=True)
    # Shorter vectors are divided by the constant eps.
    unit = torch.where(norm < eps, 0, weight / norm)
    return _tangent(factor, node, unit, norm.clamp(min=eps).reciprocal())


def weight_normalised(factor: Factor, node: Derived, parent: Node) -> Factor | None:
    """g v / ‖v‖, for v and for g."""
    if len(node.args) < 2 or not isinstance(factor, Scaled) or not _pays(factor):
        return None
    node.check_step()
    direction, length = node.args[:2]
    weight = _numbers(direction)
    norm = torch.norm_except_dim(weight, 2, argument_of(node.args, node.kwargs, 2, "dim", 0))
    if parent is direction:
        length = numbers_of(length)
        if length.shape != norm.shape:
            return None  # several lengths share a norm, or several norms a length
        return _tangent(factor, node, weight / norm, length.to(norm) / norm)
    dtype = compute_dtype(weight, *tensors_of(factor))
    return node.once(factor, lambda: times(factor, (weight / norm).to(dtype), parent.shape))


def standardised(
    factor: Factor | Flattened, node: Derived, parent: Node
) -> Factor | Flattened | None:
    """(w - mean) / deviation of each row, scaled and shifted by a number for each."""
    operands = STANDARDISES[node.function](node)
    inner = factor.inner if isinstance(factor, Flattened) else factor
    if operands is None or not isinstance(inner, (Outer, Patches)) or not _pays(inner):
        return None
    if isinstance(inner, Outer):
        inner = replace(inner, shape=(operands.rows, inner.right.shape[3]))
        if not inner.spans_rows:
            return None
    elif inner.shape[0] != operands.rows:
        return None
    node.check_step()
    dtype = compute_dtype(node.value, *tensors_of(inner))
    if parent is operands.shift:
        return Vector(row_sums(inner).reshape(inner.batch, *parent.shape), tuple(parent.shape))
    weight = _numbers(operands.weight).to(dtype).reshape(operands.rows, -1)
    centred = weight - weight.mean(1, keepdim=True)
    length = centred.norm(dim=1, keepdim=True)
    variance = length.square() / weight.shape[1]
    deviation = (variance + operands.eps).sqrt()
    unit = centred.div_(torch.where(length > 0, length, 1))
    along = node.once(factor, lambda: row_products(inner, unit))
    if parent is operands.scale:
        values = along * (length / deviation).mT
        return Vector(values.reshape(inner.batch, *parent.shape), tuple(parent.shape))
    multiple = deviation.reciprocal()
    if operands.scale is not None:
        multiple = multiple * _numbers(operands.scale).to(dtype).reshape(-1, 1)
    # The mean is the component along a unit vector with equal elements.
    element = weight.shape[1] ** -0.5
    even, means = unit.new_full((1, 1), element).expand_as(unit), row_sums(inner) * element
    parts = (even, means, torch.ones_like(variance)), (unit, along, variance / deviation.square())
    sizes = (operands.rows, *(1,) * (len(inner.shape) - 1))
    found: Any = times(inner, multiple.reshape(sizes), inner.shape)
    for vector, size, share in parts:
        size = (size * multiple.mT).reshape(inner.batch, *sizes)
        found = Tangent(found, vector.reshape(inner.shape), size, share.reshape(sizes))
    shape = tuple(parent.shape)
    return found if found.shape == shape else Flattened(found, shape)


@dataclass(eq=False)
class Operands:
    """The operands of a standardisation, each a node, a tensor or None.

    Attributes:
        weight: of ``rows`` rows, each of which is standardised.
        scale, shift: (rows,) what each row is multiplied by, and what is added then.
        eps: added to the variance.
    """

    weight: Any
    rows: int
    scale: Any
    shift: Any
    eps: float


def _of_batch_norm(node: Derived) -> Operands | None:
    """A batch of one, each channel of which is standardised."""
    argument = partial(argument_of, node.args, node.kwargs)
    weight = argument(0, "input")
    if not argument(5, "training", False) or weight.shape[0] != 1:
        return None
    scale, shift = argument(3, "weight"), argument(4, "bias")
    return Operands(weight, weight.shape[1], scale, shift, argument(7, "eps", 1e-5))


def _of_layer_norm(node: Derived) -> Operands | None:
    """Rows of the last axes."""
    argument = partial(argument_of, node.args, node.kwargs)
    if argument(2, "weight") is not None or argument(3, "bias") is not None:
        return None  # these scale and shift columns
    weight, shape = argument(0, "input"), tuple(argument(1, "normalized_shape"))
    rows = weight.shape.numel() // math.prod(shape)
    return Operands(weight, rows, None, None, argument(4, "eps", 1e-5))


STANDARDISES = {functional.batch_norm: _of_batch_norm, functional.layer_norm: _of_layer_norm}


def _tangent(factor: Factor, node: Derived, unit: Tensor, scale: Tensor) -> Factor | None:
    """Return the factor of a tensor whose rows, columns or whole was multiplied by ``scale``.

    Args:
        unit: the tensor over its norms, along which the gradient has no component.
        scale: the inverse norms, times any lengths.
    """
    if not isinstance(factor, (Outer, Patches)):
        return None
    dtype = compute_dtype(unit, *tensors_of(factor))
    unit, scale = unit.to(dtype), scale.to(dtype)
    inner: Any = times(factor, scale, unit.shape)
    along = node.once(factor, lambda: times(factor, unit, scale.shape))
    if not isinstance(along, Vector):
        return None  # each element is divided by its own size
    shape = (1,) * (unit.dim() - scale.dim()) + tuple(scale.shape)
    values = (along.values * scale).reshape(factor.batch, *shape)
    return Tangent(inner, unit, values, torch.ones_like(scale).reshape(shape))


def _pays(factor: Factor) -> bool:
    """Whether it pays to pull a factor back in two ways: directly, and through the norm."""
    if isinstance(factor, Patches):
        return pays_to_pull_apart(factor.positions, 2)
    return not isinstance(factor, Outer) or pays_to_pull_apart(factor.left.shape[2], 2)


def _numbers(item: Node | Tensor) -> Tensor:
    """Return a tensor's values in the accumulation dtype."""
    value = numbers_of(item)
    return value.to(compute_dtype(value))
