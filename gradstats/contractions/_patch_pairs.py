"""Inner products of Patches factors: through products of patches, or of tiles of gradients.

On a GPU, kernels address patches in the image in both forms. Elsewhere, if there are few positions,
patches are written out for as many examples as a quarter of the workspace holds.
"""

from __future__ import annotations

import math
from functools import partial

from torch import Tensor

from gradstats import _cost
from gradstats._factors import Patches
from gradstats.contractions import _outer_pairs, _tiles, _triton, _triton_layers
from gradstats.contractions._outer_pairs import Sizes
from gradstats.contractions._rounding import product_roundoff


def pairs(first: Patches, second: Patches, workspace: int, sizes: Sizes) -> Tensor:
    """Return ⟨G_i, G'_j⟩ for all pairs, (B, B') float64, by the form that costs least."""
    if _triton.convolves(first, second):
        return _outer_pairs.by_form(
            first, second, sizes, _form(first, second, first.batch, second.batch, on_chip=True),
            _triton_layers.convolution_gram_pairs,
            partial(_triton_layers.convolution_pairs, workspace=workspace),
        )  # fmt: skip
    if _form(first, second, first.batch, second.batch) == "direct":
        return _outer_pairs.formed_pairs(first, second, workspace)
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
    if _triton.convolves(first, second):
        return _outer_pairs.by_form(
            first, second, sizes, _form(first, second, 1, 1, on_chip=True),
            _triton_layers.convolution_gram_diagonal,
            partial(_triton_layers.convolution_diagonal, workspace=workspace),
        )  # fmt: skip
    if _form(first, second, 1, 1) == "direct":
        return _outer_pairs.formed_diagonal(first, second, workspace)
    result = _tiles.zeros([first], first.batch)
    larger = first if first.positions > second.positions else second
    for here in _unfolded_chunks(larger, workspace):
        left, right = first.select(here).unfolded(), second.select(here).unfolded()
        norms = sizes[0][here], sizes[1][here]
        result[here] = _outer_pairs.diagonal(left, right, workspace // 2, norms)
    return result


def _form(
    first: Patches, second: Patches, examples1: int, examples2: int, *, on_chip: bool = False
) -> _cost.Form:
    groups = first.geometry.groups
    if groups != second.geometry.groups or (on_chip and first.shape[1] == 1):
        return "direct"  # one channel to a group is no matrix product
    p, q = first.shape[0] // groups, math.prod(first.shape[1:])
    positions = first.positions, second.positions
    roundoff = product_roundoff(*first.sides, *second.sides)
    return _cost.choose_pair_form(
        *positions, p, q, examples1, examples2, on_chip=on_chip, roundoff=roundoff
    )


def _unfolded_chunks(factor: Patches, workspace: int):
    chunk = _cost.fitting(4 * factor.patch_bytes, factor.batch, workspace)
    return _tiles.chunks(factor.batch, chunk)
