"""Complex numbers as pairs of real ones.

All gradients are real: that of a complex tensor has one more axis at the end, (real, imaginary), as
in ``torch.view_as_real``. The same holds for factors, and a complex parameter's norm is that of its
real numbers.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def as_real(tensor: Tensor) -> Tensor:
    """Return a complex tensor (*) as real numbers (*, 2), and a real one as it is."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def real_shape(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape of ``as_real(tensor)``."""
    return (*tensor.shape, 2) if tensor.is_complex() else tuple(tensor.shape)


def any_double(tensors: Iterable[Tensor]) -> bool:
    """Whether any of several tensors is in double precision, so that results are as well."""
    dtypes = {tensor.dtype for tensor in tensors}
    return any(dtype.to_real() == torch.float64 for dtype in dtypes)


def real_product(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Return real factors of Σ_t left_t conj(right_t)ᵀ, the gradient of a complex matrix.

    Args:
        left, right: (…, T, p) and (…, T, q), complex.

    Returns:
        (…, 2T, p) and (…, 2T, 2q), real; their outer products sum to (…, p, 2q).
    """
    conjugate = right.conj()
    first = torch.view_as_real(left.resolve_conj()).mT.flatten(-3, -2)
    parts = (as_real(conjugate), as_real(1j * conjugate))
    return first, torch.stack(parts, dim=-3).flatten(-2).flatten(-3, -2)
