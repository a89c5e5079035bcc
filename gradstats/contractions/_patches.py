"""Patches factors: per-example weight gradients of convolutions.

On a GPU the kernels address patches where they need them. Elsewhere the direct form lets the
backend's grouped weight-gradient kernel produce the gradients of a chunk of examples (the examples
are the groups), which needs no patches in memory; where an example has few positions, the Gram form
on patches written out for a chunk costs less.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradstats import _cost
from gradstats._factors import Patches, compute_dtype
from gradstats.contractions import _outer, _triton
from gradstats.contractions._result import (
    Contraction,
    recompute_suspects,
    squared_norms,
    well_conditioned,
)


def sqnorm(factor: Patches, workspace: int, *, guarded: bool) -> Contraction:
    """Return ‖G_i‖² by the form that costs least for this geometry."""
    groups = factor.geometry.groups
    p, q = factor.shape[0] // groups, _cost.product(factor.shape[1:])
    if _triton.convolves(factor):
        return _by_kernels(factor, guarded=guarded)
    form = _cost.choose_outer_form(factor.positions, p, q, guarded=guarded)
    if form == "direct":
        return _direct(factor, workspace, with_sum=False)[0]
    dtype = compute_dtype(factor.input, factor.grad)
    patches = groups * factor.positions * q * torch.finfo(dtype).bits // 8
    chunk = _cost.examples_per_chunk(patches, factor.batch, workspace)
    parts = [
        _outer.sqnorm(
            factor.select(slice(start, start + chunk)).unfolded(), workspace, guarded=guarded
        )
        for start in range(0, factor.batch, chunk)
    ]
    return Contraction(torch.cat([p.value for p in parts]), torch.cat([p.bound for p in parts]))


def sqnorm_and_sum(factor: Patches, workspace: int) -> tuple[Contraction, Tensor]:
    """Return ‖G_i‖² and Σ_i G_i, from the same per-example gradients where that pays."""
    if _triton.convolves(factor):
        if _form_on_chip(factor, with_sum=True) != "gram":
            return _triton.convolution_and_sum(factor)
        return _by_kernels(factor, guarded=True), _total(factor)
    result, total = _direct(factor, workspace, with_sum=True)
    assert total is not None
    return result, total


def _by_kernels(factor: Patches, *, guarded: bool) -> Contraction:
    if _form_on_chip(factor, guarded=guarded) != "gram":
        return _triton.convolution(factor)
    return recompute_suspects(
        _triton.convolution_gram(factor), lambda rows: _triton.convolution(factor.select(rows))
    )


def _form_on_chip(factor: Patches, **options: bool) -> _cost.Form:
    groups = factor.geometry.groups
    p, q = factor.shape[0] // groups, _cost.product(factor.shape[1:])
    if factor.shape[1] == 1:
        return "direct"  # depthwise: nothing is a matrix product
    return _cost.choose_outer_form(factor.positions, p, q, on_chip=True, **options)


def _total(factor: Patches) -> Tensor:
    """Return Σ_i G_i by PyTorch's own weight gradient."""
    geometry = factor.geometry
    weight = factor.input.new_empty(1).expand(factor.shape)
    return torch.ops.aten.convolution_backward(
        factor.grad,
        factor.input,
        weight,
        None,
        geometry.stride,
        geometry.padding,
        geometry.dilation,
        False,
        [0] * len(geometry.stride),
        geometry.groups,
        [False, True, False],
    )[1]


def _direct(factor: Patches, workspace: int, *, with_sum: bool):
    dtype = compute_dtype(factor.input, factor.grad)
    elements = _cost.product(factor.shape)
    itemsize = torch.finfo(dtype).bits // 8
    # The operands are regrouped, the gradient written: all of it counts against the workspace.
    operands = factor.input[0].numel() + factor.grad[0].numel()
    chunk = _cost.convolution_chunk((operands + elements) * itemsize, factor.batch, workspace)
    total = factor.input.new_zeros(factor.shape, dtype=dtype) if with_sum else None
    values = []
    for start in range(0, factor.batch, chunk):
        gradient = factor.select(slice(start, start + chunk)).dense()
        values.append(squared_norms(gradient.flatten(2), dtype))
        if total is not None:
            total += gradient.sum(0)
    return well_conditioned(torch.cat(values), dtype), total
