"""The Gram form of outer factors: half of the products between positions are computed."""

from __future__ import annotations

import torch
from torch import Tensor

from gradstats import _cost
from gradstats._factors import Outer, cast, compute_dtype
from gradstats.contractions._result import Contraction
from gradstats.contractions._rounding import (
    SMALLEST,
    UNIT_ROUNDOFF,
    product_roundoff,
    relative_bound,
)

# Error bounds count the product of two rows' squared norms as at least LEAST_PRODUCT, and each
# squared norm as at least LEAST_SQUARE. One rounding error of these covers what underflow loses: in
# one product, and in the up to 2^17 products that a squared norm adds up.
LEAST_PRODUCT = {dtype: SMALLEST[dtype] / roundoff for dtype, roundoff in UNIT_ROUNDOFF.items()}
LEAST_SQUARE = {dtype: 2.0**18 * least for dtype, least in LEAST_PRODUCT.items()}
# A squared norm of zero may be that of a row whose squares underflow. It may count as zero beside a
# squared norm of at most this: the product with 2^12 such squares would underflow too.
MOST_BESIDE_ZERO = {dtype: 2.0**-12 / roundoff for dtype, roundoff in UNIT_ROUNDOFF.items()}

# A squared norm from a matrix product loses one more rounding for so many elements of the row
# (2^14 to 2^19 random elements, one core with AVX-512).
LONG_ROW = 512


def gram(factor: Outer, workspace: int) -> Contraction:
    """Return Σ_{t,s} (left_t·left_s)(right_t·right_s), computing half of the terms.

    Cost: about T(T + block)/2 · (p + q) multiply-adds an example; scratch of two T/2 × T/2 tiles,
    or of two T × block tiles if that is too much.
    """
    dtype = compute_dtype(factor.left, factor.right)
    batch, groups, positions, p = factor.left.shape
    q = factor.right.shape[3]
    itemsize = dtype.itemsize
    # Operands may have to be copied, to cast them or because their rows are not adjacent.
    alike = all(
        side.dtype == dtype and side.is_contiguous() for side in (factor.left, factor.right)
    )
    halvings, tile = _cost.gram_halvings(positions, 2 * groups * itemsize, workspace)
    scratch = groups * (2 * tile + (0 if alike else positions * (p + q))) * itemsize
    # On one core of an AMD EPYC 2 MiB take 0.83 to 1.01 of the time of 1 MiB (T from 16 to 512).
    chunk = _cost.fitting(scratch, batch, min(workspace, 2 * _cost.CACHE_BYTES))
    parts = []
    for start in range(0, batch, chunk):
        left, right = factor.left, factor.right
        if chunk < batch:
            left, right = left[start : start + chunk], right[start : start + chunk]
        left, right = cast(left, dtype).flatten(0, 1), cast(right, dtype).flatten(0, 1)
        whole = _gram_rows(left, right) if halvings is None else _gram_halves(left, right, halvings)
        parts.append(whole)
    total, size = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
    # (Σ_t ‖left_t‖‖right_t‖)² bounds Σ|terms|. In squared norms errors of one sign add up, the more
    # the longer the rows are.
    of_squares = relative_bound(dtype) + (p + q) / LONG_ROW * UNIT_ROUNDOFF[dtype]
    bound = size.double().square_().mul_(product_roundoff(factor.left, factor.right))
    bound.add_(total, alpha=of_squares)
    if groups > 1:
        total, bound = total.view(-1, groups).sum(1), bound.view(-1, groups).sum(1)
    return Contraction(total, bound)


def _gram_halves(left: Tensor, right: Tensor, halvings: int) -> tuple[Tensor, Tensor]:
    """Return Σ_{t,s} (left_t·left_s)(right_t·right_s) in float64, and Σ_t ‖left_t‖‖right_t‖.

    Products of the first half of the positions with the second count twice, for their mirror
    images; then each half is treated as an example of its own.

    Args:
        left, right: (n, T, p) and (n, T, q).
        halvings: how often to halve; 2^halvings divides T.
    """
    count, positions, _ = left.shape
    if halvings:
        left, right = _evenly_spaced(left), _evenly_spaced(right)
    apart = None
    for halving in range(halvings):
        halves = count << halving, 2, positions >> (halving + 1)
        a, b = left.view(*halves, left.shape[2]), right.view(*halves, right.shape[2])
        products = torch.bmm(a[:, 0], a[:, 1].mT).mul_(torch.bmm(b[:, 0], b[:, 1].mT))
        part = products.view(count, -1).sum(1)
        apart = part if apart is None else apart + part
    blocks = count << halvings, positions >> halvings
    a, b = left.view(*blocks, left.shape[2]), right.view(*blocks, right.shape[2])
    products, others = torch.bmm(a, a.mT), torch.bmm(b, b.mT)
    sizes = _row_sizes(products, others)
    total = products.mul_(others).view(count, -1).sum(1).double()
    if apart is not None:
        total.add_(apart, alpha=2)
    return total, sizes.view(count, -1).sum(1)


def _evenly_spaced(rows: Tensor) -> Tensor:
    """Return (n, T, width) with evenly spaced rows, so that they can be regrouped as views."""
    even = rows.stride(0) == rows.shape[1] * rows.stride(1)
    return rows if even else rows.contiguous()


def _gram_rows(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Return the same as ``_gram_halves``, by products of a few positions with all later ones."""
    count, positions, _ = left.shape
    block = _cost.GRAM_BLOCK
    sizes = left.new_empty(count, positions)
    rows = range(0, positions, block)
    wholes, tiles = left.new_empty(2, len(rows), count).unbind()
    for row, whole, tile in zip(rows, wholes.unbind(), tiles.unbind(), strict=True):
        here = slice(row, row + block)
        products = torch.bmm(left[:, here], left[:, row:].mT)
        others = torch.bmm(right[:, here], right[:, row:].mT)
        sizes[:, here] = _row_sizes(products, others)
        products.mul_(others)
        torch.sum(products, (1, 2), out=whole)
        torch.sum(products[:, :, :block], (1, 2), out=tile)
    # What lies right of the diagonal tile counts twice, for its mirror image.
    total = 2 * wholes.sum(0, dtype=torch.float64) - tiles.sum(0, dtype=torch.float64)
    return total, sizes.sum(1)


def _row_sizes(left: Tensor, right: Tensor) -> Tensor:
    """Return ‖left_t‖‖right_t‖, (n, T), for an error bound, of two Gram matrices (n, T, ≥ T).

    Rows so small that their products underflow count for more, so that the bound covers the loss.
    Rows that are zero count as zero, unless they stand beside rows so large that much would be lost
    if they were only nearly zero.
    """
    left, right = left.diagonal(dim1=1, dim2=2), right.diagonal(dim1=1, dim2=2)
    square, product = LEAST_SQUARE[left.dtype], LEAST_PRODUCT[left.dtype]
    sizes = (left + square).mul_(right + square).add_(product).sqrt_()
    large = torch.maximum(left, right) > MOST_BESIDE_ZERO[left.dtype]
    return sizes.mul_((left * right != 0) | large)
