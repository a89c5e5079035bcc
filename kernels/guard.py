"""The guard of Gram forms: bounds of their rounding errors, and what replaces doubtful results.

Both are a few operations on one number for each example: one launch each, as a small operation
takes the host as long as a kernel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from gradstats.kernels import _config
from gradstats.kernels._launching import launch_kernel

EXAMPLES = 128  # of one program


@triton.jit(do_not_specialize=["batch", "groups"])
def bound_kernel(
    sqnorm_ptr,  # fp64 (B * groups,), as the next two
    magnitude_ptr,
    size_ptr,
    bounded_ptr,  # fp64 (2, B): squared norms of examples and their bounds
    suspect_ptr,  # uint8 (B,)
    batch,
    groups,
    adding,
    products,
    cut_off,
    tolerance,
    EXAMPLES: tl.constexpr,
):
    """Sums over the groups of some examples, and whether their bounds are too large."""
    example = tl.program_id(0) * EXAMPLES + tl.arange(0, EXAMPLES)
    inside = example < batch
    value = tl.zeros((EXAMPLES,), tl.float64)
    bound = tl.zeros((EXAMPLES,), tl.float64)
    for group in range(0, groups):
        place = tl.cast(example, tl.int64) * groups + group
        value += tl.load(sqnorm_ptr + place, mask=inside, other=0.0)
        magnitude = tl.load(magnitude_ptr + place, mask=inside, other=0.0)
        size = tl.load(size_ptr + place, mask=inside, other=0.0)
        of_products = size * size * products
        of_sums = magnitude * cut_off
        # not `maximum`, which may lose what is not a number
        bound += magnitude * adding + tl.where(of_sums > of_products, of_sums, of_products)
    tl.store(bounded_ptr + example, value, mask=inside)
    tl.store(bounded_ptr + batch + example, bound, mask=inside)
    suspect = tl.where(bound > value * tolerance, 1, 0)
    tl.store(suspect_ptr + example, suspect.to(tl.uint8), mask=inside)


@triton.jit(do_not_specialize=["batch"])
def replace_kernel(
    sqnorm_ptr,  # fp64 (B,), as the next and the one after `suspect_ptr`
    bound_ptr,
    suspect_ptr,  # uint8 (B,)
    better_ptr,
    replaced_ptr,  # fp64 (2, B)
    batch,
    relative,
    EXAMPLES: tl.constexpr,
):
    """Squared norms and bounds of some examples, of the suspects by another form."""
    example = tl.program_id(0) * EXAMPLES + tl.arange(0, EXAMPLES)
    inside = example < batch
    value = tl.load(sqnorm_ptr + example, mask=inside, other=0.0)
    bound = tl.load(bound_ptr + example, mask=inside, other=0.0)
    better = tl.load(better_ptr + example, mask=inside, other=0.0)
    suspect = tl.load(suspect_ptr + example, mask=inside, other=0) != 0
    tl.store(replaced_ptr + example, tl.where(suspect, better, value), mask=inside)
    bound = tl.where(suspect, better * relative, bound)
    tl.store(replaced_ptr + batch + example, bound, mask=inside)


def bound_gram(
    sqnorm: torch.Tensor,
    magnitude: torch.Tensor,
    size: torch.Tensor,
    *,
    groups: int,
    adding: float,
    products: float,
    cut_off: float,
    tolerance: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """How far the results of a Gram form may be off, and which of them are too far.

    bound_i = sum over groups of adding * magnitude + max(products * size^2, cut_off * magnitude)

    Args:
        sqnorm, magnitude, size: fp64 (B * groups,), what `gram.gram_sqnorm` returns.
        groups: factors of one example, which stand side by side.
        adding: relative error of adding terms up.
        products: relative error of one product of two numbers.
        cut_off: what may be cut off an inner product of rows and its partner, relative to both.
        tolerance: largest bound, relative to the squared norm, that is not suspect.
    Returns:
        (sqnorm fp64 (B,), bound fp64 (B,), suspect bool (B,)).
    """
    batch = sqnorm.shape[0] // groups
    bounded = torch.empty((2, batch), dtype=torch.float64, device=sqnorm.device)
    suspect = torch.empty(batch, dtype=torch.bool, device=sqnorm.device)
    if batch:
        launch_kernel(
            bound_kernel,
            _config.cdiv(batch, EXAMPLES),
            sqnorm,
            magnitude,
            size,
            bounded,
            suspect.view(torch.uint8),
            batch,
            groups,
            adding,
            products,
            cut_off,
            tolerance,
            EXAMPLES=EXAMPLES,
        )
    value, bound = bounded.unbind(0)
    return value, bound, suspect


def replace_suspects(
    sqnorm: torch.Tensor,
    bound: torch.Tensor,
    suspect: torch.Tensor,
    better: torch.Tensor,
    *,
    relative: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `bound_gram` returned, the results of suspects replaced.

    Args:
        sqnorm, bound, suspect: what `bound_gram` returned.
        better: fp64 (B,), read where an example is suspect.
        relative: bound of the better results, relative to them.
    Returns:
        (sqnorm, bound), each fp64 (B,).
    """
    batch = sqnorm.shape[0]
    replaced = torch.empty((2, batch), dtype=torch.float64, device=sqnorm.device)
    if batch:
        launch_kernel(
            replace_kernel,
            _config.cdiv(batch, EXAMPLES),
            sqnorm,
            bound,
            suspect.view(torch.uint8),
            better,
            replaced,
            batch,
            relative,
            EXAMPLES=EXAMPLES,
        )
    value, bound = replaced.unbind(0)
    return value, bound
