"""The guard of Gram forms: bounds of their rounding errors, and replacement of doubtful results.

A Gram form takes three launches, and the host waits for none. Its own kernel writes sums of terms
for each tile. A second kernel adds these up and forms the gradients of examples whose bound is too
large; for the other examples its programs end at once. A third writes the replaced results.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from gradstats.kernels._launching import Launch, launch_of

AT_ONCE = 1024  # sums of tiles, or squares of parts, that are read together

# Programs that recompute suspects, over all examples: enough to fill a device. A program that finds
# nothing to do still occupies its multiprocessor for half a microsecond.
PROGRAMS = 512


class Rounding(NamedTuple):
    """Rounding errors of a Gram form, and how large an error is accepted.

    Attributes:
        adding: relative error of adding up terms, of the Gram form and of the direct form.
        products: relative error of one product of two numbers.
        cut_off: truncation of a product of inner products of rows, relative to it.
        tolerance: largest bound, relative to the squared norm, that is not suspect.
    """

    adding: float
    products: float
    cut_off: float
    tolerance: float


@triton.jit
def exceeds(value, bound, tolerance):
    """Whether a bound is too large; NaN is not suspect, since nothing better can be computed."""
    return bound > value * tolerance


@triton.jit
def is_suspect(
    sums_ptr,  # fp64 (3, B * groups, pairs): of terms, of absolute terms, of |a_t| |g_t|
    result_ptr,  # fp64 (2, B): squared norms of examples and their bounds
    example,
    first,  # whether this program is the one that writes them
    batch,
    groups,
    pairs,
    adding,
    products,
    cut_off,
    tolerance,
    GROUPS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Adds up a Gram form's sums for one example, and returns whether its bound is too large.

    All programs of an example return the same, as they add the same numbers in the same order.
    """
    kind = tl.cast(batch, tl.int64) * groups * pairs
    values = tl.zeros((GROUPS,), tl.float64)
    bounds = tl.zeros((GROUPS,), tl.float64)
    for first_group in range(0, groups, GROUPS):
        group = first_group + tl.arange(0, GROUPS)
        rows = (tl.cast(example, tl.int64) * groups + group) * pairs
        totals = tl.zeros((GROUPS, PAIRS), tl.float64)
        magnitudes = tl.zeros((GROUPS, PAIRS), tl.float64)
        sizes = tl.zeros((GROUPS, PAIRS), tl.float64)
        for first_pair in range(0, pairs, PAIRS):
            pair = first_pair + tl.arange(0, PAIRS)
            inside = (group < groups)[:, None] & (pair < pairs)[None, :]
            places = sums_ptr + rows[:, None] + pair[None, :]
            totals += tl.load(places, mask=inside, other=0.0)
            magnitudes += tl.load(places + kind, mask=inside, other=0.0)
            sizes += tl.load(places + 2 * kind, mask=inside, other=0.0)
        magnitude = tl.sum(magnitudes, axis=1)
        size = tl.sum(sizes, axis=1)
        of_products = size * size * products
        of_sums = magnitude * cut_off
        values += tl.sum(totals, axis=1)
        # not `maximum`, which may drop NaN
        bounds += magnitude * adding + tl.where(of_sums > of_products, of_sums, of_products)
    value = tl.sum(values)
    bound = tl.sum(bounds)
    if first:
        tl.store(result_ptr + example, value)
        tl.store(result_ptr + batch + example, bound)
    return exceeds(value, bound, tolerance)


@triton.jit
def first_square(example, batch, groups, pairs, parts):
    """Offset in scratch of the squares of an example's parts: behind the sums of all examples."""
    sums = 3 * tl.cast(batch, tl.int64) * groups * pairs
    return sums + tl.cast(example, tl.int64) * parts


@triton.jit(do_not_specialize=["batch", "sums", "parts"])
def replace_kernel(
    scratch_ptr,  # fp64: `sums` numbers, then squares (B, parts) of suspects
    result_ptr,  # fp64 (2, B), as `is_suspect` leaves it
    batch,
    sums,
    parts,
    adding,
    tolerance,
    PARTS: tl.constexpr,
):
    """Replaces the squared norm and the bound of one example, if suspect, by the sum of squares."""
    example = tl.program_id(0)
    value = tl.load(result_ptr + example)
    bound = tl.load(result_ptr + batch + example)
    if exceeds(value, bound, tolerance):
        base = scratch_ptr + tl.cast(sums, tl.int64) + tl.cast(example, tl.int64) * parts
        squares = tl.zeros((PARTS,), tl.float64)
        for first in range(0, parts, PARTS):
            part = first + tl.arange(0, PARTS)
            squares += tl.load(base + part, mask=part < parts, other=0.0)
        better = tl.sum(squares)
        tl.store(result_ptr + example, better)
        tl.store(result_ptr + batch + example, better * adding)


class Guarded(NamedTuple):
    """All of a call of a Gram form but its operands.

    Attributes:
        batch: number of examples.
        scratch: fp64 numbers that the launches pass to each other.
        launches: of the Gram form, of the gradients of suspects, and of the replacement of their
            results; None where there is nothing to compute.
        bounds: of packed examples, which the first two launches take behind the operands.
    """

    batch: int
    scratch: int
    launches: tuple[Launch, Launch, Launch] | None
    bounds: tuple[torch.Tensor | None, ...] = ()

    def __call__(self, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """(squared norms, bounds), each fp64 (B,), of operands of the plan's layout."""
        batch, size, launches, bounds = self
        device = operands[0].device
        if launches is None:
            return torch.zeros((2, batch), dtype=torch.float64, device=device).unbind(0)
        scratch = torch.empty(size, dtype=torch.float64, device=device)
        result = torch.empty((2, batch), dtype=torch.float64, device=device)
        gram, recompute, replace = launches
        gram(*operands, *bounds, scratch)
        recompute(*operands, *bounds, scratch, result)
        replace(scratch, result)
        return result.unbind(0)


class Sums(NamedTuple):
    """The sums that a Gram form writes, and the number of parts in which suspects are recomputed.

    Attributes:
        batch, groups: examples, and factors of each, adjacent in the batch.
        pairs: tiles of the terms of one factor.
        parts: tiles of the gradient of one example, at least one.
    """

    batch: int
    groups: int
    pairs: int
    parts: int

    @property
    def size(self) -> int:
        """How many numbers the sums are."""
        return 3 * self.batch * self.groups * self.pairs

    def recompute(
        self, kernel: Any, *numbers: float, rounding: Rounding, **constants: Any
    ) -> Launch:
        """The launch of a kernel that begins with `is_suspect`."""
        pairs = min(AT_ONCE, triton.next_power_of_2(self.pairs))
        programs = min(self.parts, triton.cdiv(PROGRAMS, self.batch))
        return launch_of(
            kernel,
            self.batch * programs,
            *numbers,
            *self,
            programs,
            *rounding,
            GROUPS=min(AT_ONCE // pairs, triton.next_power_of_2(self.groups)),
            PAIRS=pairs,
            **constants,
        )

    def guarded(
        self,
        gram: Launch,
        recompute: Launch,
        rounding: Rounding,
        *bounds: torch.Tensor | None,
    ) -> Guarded:
        """All launches of a Gram form, given the first two."""
        replace = launch_of(
            replace_kernel,
            self.batch,
            self.batch,
            self.size,
            self.parts,
            rounding.adding,
            rounding.tolerance,
            PARTS=min(AT_ONCE, triton.next_power_of_2(self.parts)),
            num_warps=1,
        )
        scratch = self.size + self.batch * self.parts
        return Guarded(self.batch, scratch, (gram, recompute, replace), bounds)


def nothing_to_compute(batch: int) -> Guarded:
    """The call for examples without positions, or for no examples."""
    return Guarded(batch, 0, None)
