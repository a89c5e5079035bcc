"""Inner products of Patches factors: tiles of gradients, or patches written out for few positions.

On a GPU the kernels form the gradients, of patches that they address where they need them. Patches
are written out for as many examples as a quarter of the workspace holds.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradstats import _cost
from gradstats._factors import Patches, compute_dtype
from gradstats.contractions import _outer_pairs, _tiles, _triton
from gradstats.contractions._outer_pairs import Sizes


def pairs(first: Patches, second: Patches, workspace: int, sizes: Sizes) -> Tensor:
    """Return ⟨G_i, G'_j⟩ for all pairs, (B, B') float64, by the form that costs least."""
    on_chip = _triton.convolves(first, second)
    if _form(first, second, first.batch, second.batch, on_chip) == "direct":
        if on_chip:
            return _triton.convolution_pairs(first, second, workspace)
        one = [first]
        return _tiles.dense_pairs(one, one if first is second else [second], workspace)
    result = _tiles.zeros([first], first.batch, second.batch)
    for here in _unfolded_chunks(first, workspace):
        left = first.select(here).unfolded()
        for there in _unfolded_chunks(second, workspace):
            same = first is second and here == there
            right = left if same else second.select(there).unfolded()
            norms = sizes[0][here], sizes[1][there]
            result[here, there] = _outer_pairs.pairs(left, right, workspace // 2, norms)
    return result


def diagonal(first: Patches, second: Patches, workspace: int, sizes: Sizes) -> Tensor:
    """Return ⟨G_i, G'_i⟩ for each example, (B,) float64, by the form that costs least."""
    on_chip = _triton.convolves(first, second)
    if _form(first, second, 1, 1, on_chip) == "direct":
        if on_chip:
            return _triton.convolution_diagonal(first, second)
        return _tiles.dense_diagonal([first], [second], workspace)
    result = _tiles.zeros([first], first.batch)
    larger = first if first.positions > second.positions else second
    for here in _unfolded_chunks(larger, workspace):
        left, right = first.select(here).unfolded(), second.select(here).unfolded()
        norms = sizes[0][here], sizes[1][here]
        result[here] = _outer_pairs.diagonal(left, right, workspace // 2, norms)
    return result


def _form(
    first: Patches, second: Patches, examples1: int, examples2: int, on_chip: bool
) -> _cost.Form:
    groups = first.geometry.groups
    # The kernels would contract written-out patches group by group.
    if groups != second.geometry.groups or (on_chip and groups > 1):
        return "direct"
    p, q = first.shape[0] // first.geometry.groups, _cost.product(first.shape[1:])
    positions = first.positions, second.positions
    return _cost.choose_pair_form(*positions, p, q, examples1, examples2, on_chip=on_chip)


def _unfolded_chunks(factor: Patches, workspace: int):
    dtype = compute_dtype(factor.input, factor.grad)
    q = factor.geometry.groups * _cost.product(factor.shape[1:])
    size = factor.positions * q * torch.finfo(dtype).bits // 8
    return _tiles.chunks(factor.batch, max(1, workspace // (4 * max(1, size))))
