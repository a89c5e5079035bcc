"""Patches factors: per-example weight gradients of convolutions.

On a GPU, kernels address patches in the image. Elsewhere, PyTorch's own weight gradient forms the
gradients of a chunk of examples, as groups, without patches in memory; or, where that costs less,
the patches of a chunk are written out and contracted as outer products.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from gradstats import _convolution_cost, _cost
from gradstats._factors import Patches, compute_dtype, weight_gradient
from gradstats.contractions import _outer, _triton, _triton_layers
from gradstats.contractions._result import Contraction, WellConditioned, concatenated
from gradstats.contractions._rounding import product_roundoff, row_norms
from gradstats.contractions._tiles import chunks, zeros


def sqnorm(factor: Patches, workspace: int) -> Contraction:
    """Return ‖G_i‖² by the form that costs least for this geometry."""
    if _triton.convolves(factor):
        return _by_kernels(factor)
    if not factor.writes_patches(workspace):
        return _convolved(factor, workspace, alone=factor.way == "alone", with_sum=False)[0]
    return concatenated(
        [
            _outer.sqnorm(factor.select(rows).unfolded(), workspace)
            for rows in _pieces(factor, workspace)
        ]
    )


def sqnorm_and_sum(factor: Patches, workspace: int) -> tuple[Contraction, Tensor]:
    """Return ‖G_i‖² and Σ_i G_i, from the same per-example gradients where that pays."""
    if _triton.convolves(factor):
        # One kernel for both takes as long as cuDNN's weight gradient alone for depthwise layers,
        # and two to twenty times as long for others (NVIDIA H100).
        if factor.shape[1] == 1:
            return _triton_layers.depthwise_and_sum(factor)
        dtype = torch.promote_types(factor.input.dtype, factor.grad.dtype)
        return _by_kernels(factor), summed(factor, dtype)
    if not factor.writes_patches(workspace):
        return _convolved(factor, workspace, alone=factor.way == "alone", with_sum=True)
    results, whole = [], None
    for rows in _pieces(factor, workspace):
        result, total = _outer.sqnorm_and_sum(factor.select(rows).unfolded(), workspace)
        whole = total if whole is None else whole.add_(total)
        results.append(result)
    assert whole is not None
    return concatenated(results), whole


def _pieces(factor: Patches, workspace: int) -> Iterator[slice]:
    """Return slices of the examples whose patches are written out at once.

    Slices, not patches: a compiler that reads strides in a backward starts over, and if it stopped
    inside a generator it cannot close that (PyTorch 2.15).
    """
    chunk = max(1, factor.batch)
    if not factor.pointwise:
        # Chunks of 16 MiB take 0.6 to 1.0 of the time of 1 MiB (two cores of an AMD EPYC).
        chunk = _cost.fitting(factor.patch_bytes, factor.batch, min(workspace, _cost.FRESH_BYTES))
    return chunks(factor.batch, chunk)


def _by_kernels(factor: Patches) -> Contraction:
    if form_on_chip(factor) == "gram":
        return _triton_layers.convolution_gram(factor)
    return _triton_layers.convolution(factor)


def form_on_chip(factor: Patches) -> _cost.Form:
    """Return which form costs least on a GPU."""
    if factor.shape[1] == 1:
        return "direct"  # depthwise: nothing is a matrix product
    p, q = factor.shape[0] // factor.geometry.groups, math.prod(factor.shape[1:])
    roundoff = product_roundoff(*factor.sides)
    return _cost.choose_outer_form(factor.positions, p, q, on_chip=True, roundoff=roundoff)


def magnitude(factor: Patches) -> Tensor:
    """Return Σ_t ‖patch_t‖‖grad_t‖ over the groups, (B,) float64.

    Only the norms of pixels over the channels are unfolded: a patch's norm is the norm of these.
    """
    channels = factor.input.unflatten(1, (factor.geometry.groups, factor.shape[1]))
    pixels = torch.linalg.vector_norm(channels, dim=2, dtype=torch.float32)
    shape = (factor.shape[0], 1, *factor.shape[2:])
    norms = replace(factor, input=pixels, shape=shape).unfolded()
    return _outer.magnitude(norms)


def summed(factor: Patches, dtype: torch.dtype) -> Tensor:
    """Return Σ_i G_i by PyTorch's own weight gradient, its operands cast to ``dtype``."""
    sizes = (*factor.shape[:2], *factor.kernel)
    operands = factor.input.to(dtype), factor.grad.to(dtype)
    return weight_gradient(*operands, sizes, factor.geometry).reshape(factor.shape)


def direction(factor: Patches, direction: Tensor, workspace: int) -> Tensor:
    """Return ⟨G_i, V⟩: the convolution with V, multiplied by the output gradient."""
    if _triton.convolves(factor):
        weight = direction.reshape(*factor.shape[:2], *factor.kernel)
        return _triton_layers.convolution_direction(factor, weight)
    result = zeros([factor], factor.batch)
    for here, products in row_products(factor, direction, workspace):
        result[here] = products.sum(1, dtype=torch.float64)
    return result


def row_products(
    factor: Patches, direction: Tensor, workspace: int
) -> Iterator[tuple[slice, Tensor]]:
    """Yield slices of examples with ⟨G_i[o], V[o]⟩ for each output channel o, (b, O)."""
    dtype = compute_dtype(*factor.sides, direction)
    weight = direction.reshape(*factor.shape[:2], *factor.kernel).to(dtype)
    size = (factor.input[0].numel() + 3 * factor.grad[0].numel()) * dtype.itemsize
    for here in chunks(factor.batch, _cost.fitting(size, factor.batch, workspace)):
        output = convolve(factor.input[here].to(dtype), weight, factor)
        products = output * factor.grad[here].to(dtype)
        yield here, products.flatten(2).sum(2)


def convolve(x: Tensor, weight: Tensor, factor: Patches) -> Tensor:
    """Return the convolution with a weight, as a factor's geometry says."""
    geometry = factor.geometry
    return torch.ops.aten.convolution(
        x, weight, None, geometry.stride, geometry.padding, geometry.dilation, False,
        [0] * len(geometry.stride), geometry.groups,
    )  # fmt: skip


def total(factor: Patches) -> Tensor:
    """Return Σ_i G_i in the accumulation dtype."""
    return summed(factor, compute_dtype(*factor.sides))


def _convolved(factor: Patches, workspace: int, *, alone: bool, with_sum: bool):
    """Return ‖G_i‖², and Σ_i G_i if wanted, from gradients that convolutions form."""
    dtype = compute_dtype(*factor.sides)
    # Regrouped operands and gradients both count against the workspace.
    operands = (factor.input[0].numel() + factor.grad[0].numel()) * dtype.itemsize
    gradient = math.prod(factor.shape) * dtype.itemsize
    chunk = _convolution_cost.convolution_chunk(operands, gradient, factor.batch, workspace)
    chunk = 1 if alone else chunk
    total, norms = None, []
    for start in range(0, factor.batch, chunk):
        gradients = factor.select(slice(start, start + chunk)).as_groups()
        norms.append(row_norms(gradients.flatten(2), dtype))
        if with_sum:
            total = _plus(total, gradients)
        del gradients  # before the next are formed
    return WellConditioned(dtype, value=torch.cat(norms).double().square_().sum(1)), total


def _plus(total: Tensor | None, gradients: Tensor) -> Tensor:
    """Return the sum of some examples' gradients, added to the total if there is one."""
    part = gradients[0] if len(gradients) == 1 else gradients.sum(0)
    return part if total is None else total.add_(part)
