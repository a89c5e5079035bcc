"""How much operations on floating-point numbers round, and what underflow loses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradstats._compiler import is_compiling
from gradstats._factors import compute_dtype

# The relative error of one rounded operation in the accumulation dtype.
UNIT_ROUNDOFF = {dtype: torch.finfo(dtype).eps / 2 for dtype in (torch.float32, torch.float64)}
# The smallest positive number: squares below the normal numbers are rounded to multiples of it.
SMALLEST = {
    dtype: torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps for dtype in UNIT_ROUNDOFF
}

# TF32 keeps 11 bits of each factor.
TF32_ROUNDOFF = 2.0**-11
# If TF32 is not allowed, tensor cores may split each factor into two such parts and leave out the
# product of the low parts, at most 2^-22 of the whole.
SPLIT_ROUNDOFF = 2.0**-24 + 2.0**-22

# Elements whose squares are summed at once: shorter rows take up to 1.7 times as long (a core with
# AVX-512), and longer ones lose digits.
ROW_ELEMENTS = 2048


def row_norms(rows: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """Return the norms of rows (…, width) in the accumulation dtype, (…), in pieces for long rows.

    For rows up to ``ROW_ELEMENTS``, PyTorch's own function gives the same with one call less.
    """
    while rows.shape[-1] > ROW_ELEMENTS:
        whole = rows.shape[-1] // ROW_ELEMENTS * ROW_ELEMENTS
        pieces = rows[..., :whole].unflatten(-1, (-1, ROW_ELEMENTS)), rows[..., None, whole:]
        norms = [torch.linalg.vector_norm(piece, dim=-1, dtype=dtype) for piece in pieces]
        rows = torch.cat(norms, -1)
    return torch.linalg.vector_norm(rows, dim=-1, dtype=dtype, out=out)


def relative_bound(dtype: torch.dtype) -> float:
    """Return a bound on the relative error of a sum of squares accumulated in a dtype.

    Measured errors are up to 8 roundings for rows of 2048 squares, 12 for 4096, and 7 for each of
    two norms that are multiplied (random rows of any size, one core with AVX-512).
    """
    return 16 * UNIT_ROUNDOFF[dtype]


def product_roundoff(*operands: Tensor) -> float:
    """Return the relative error of one product of operands, as matrix products form it.

    Products of half-precision numbers are exact before they are added in float32.
    """
    dtype = compute_dtype(*operands)
    # Traced code cannot read torch's settings; it uses forms that need no guard.
    if not _on_tensor_cores(operands) or is_compiling():
        return UNIT_ROUNDOFF[dtype]
    from gradstats.kernels._precision import tf32_allowed

    return TF32_ROUNDOFF if tf32_allowed() else SPLIT_ROUNDOFF


def _on_tensor_cores(operands: Sequence[Tensor]) -> bool:
    """Whether tensor cores may form products of these operands from parts of float32 numbers."""
    dtypes = [operand.dtype for operand in operands] if operands[0].is_cuda else []
    return torch.float32 in dtypes and torch.float64 not in dtypes
