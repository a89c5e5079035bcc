"""Whether two tensors hold the same numbers, exactly or up to rounding."""

from __future__ import annotations

import torch
from torch import Tensor

from gradstats._complex import as_real


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors hold the same numbers, NaN being equal to NaN."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    if first.layout != second.layout:
        return False
    if first.layout != torch.strided:
        pairs = zip(_parts(first), _parts(second), strict=True)
        return all(same_bits(*pair) for pair in pairs)
    if first.is_complex():  # PyTorch cannot compare them in half precision
        first, second = as_real(first), as_real(second)
    if torch.equal(first, second):
        return True
    if not first.is_floating_point():
        return False
    return bool(((first == second) | (first.isnan() & second.isnan())).all())


def half_the_digits(*tensors: Tensor) -> float:
    """Return the relative difference up to which results in these dtypes count as equal.

    Half of the digits of the coarsest dtype have to agree.
    """
    dtypes = {each.dtype for each in tensors if each.is_floating_point()}
    return max(torch.finfo(dtype).eps for dtype in dtypes) ** 0.5


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the strided parts of a tensor with another layout, in a canonical order."""
    if tensor.is_mkldnn:
        return (tensor.to_dense(),)
    sparse = (tensor if tensor.is_sparse else tensor.to_sparse()).coalesce()
    return sparse.indices(), sparse.values()
