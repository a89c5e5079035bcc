"""The guard of Gram forms: bounds of their rounding errors, and what replaces doubtful results.

A Gram form is three launches, and nobody waits for the device. Its own kernel leaves sums of terms
for tiles. A second kernel adds them up, and of examples whose bound is too large it forms the
gradient: of others its programs end at once. The last puts what that comes to in their places.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from gradstats.kernels._launching import Launch, launch_of

AT_ONCE = 1024  # sums of tiles, or squares of parts, that are read together

# Programs that look after suspects, of all examples together: enough to fill a device. One that
# finds nothing to do has its multiprocessor for half a microsecond all the same.
PROGRAMS = 512


class Rounding(NamedTuple):
    """What rounding does to a Gram form, and how much of it is accepted.

    Attributes:
        adding: relative error of adding terms up, also those of the form without products of rows.
        products: relative error of one product of two numbers.
        cut_off: what may be cut off an inner product of rows and its partner, relative to both.
        tolerance: largest bound, relative to the squared norm, that is not suspect.
    """

    adding: float
    products: float
    cut_off: float
    tolerance: float


@triton.jit
def exceeds(value, bound, tolerance):
    """Whether a bound is too large; of what is not a number nothing better can be had."""
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
    """Sums up what a Gram form left of one example, and says whether its bound is too large.

    All programs of a kernel come to the same answer, as they compute the same of the same sums.
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
        # not `maximum`, which may lose what is not a number
        bounds += magnitude * adding + tl.where(of_sums > of_products, of_sums, of_products)
    value = tl.sum(values)
    bound = tl.sum(bounds)
    if first:
        tl.store(result_ptr + example, value)
        tl.store(result_ptr + batch + example, bound)
    return exceeds(value, bound, tolerance)


@triton.jit
def first_square(example, batch, groups, pairs, parts):
    """Where the squares of an example's parts begin in scratch: behind the sums of all examples."""
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
    """The squared norm and the bound of one example, if it is suspect, by the squares' sum."""
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
        scratch: fp64 numbers that the launches leave for each other.
        launches: of the form itself, of the gradients of suspects, and of what replaces their
            results; None where there is nothing to compute.
        bounds: what the first two take behind the operands.
    """

    batch: int
    scratch: int
    launches: tuple[Launch, Launch, Launch] | None
    bounds: tuple[torch.Tensor | None, ...] = ()

    def __call__(self, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """(squared norms, bounds), each fp64 (B,), of operands that lie as the plan's do."""
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
    """What a Gram form leaves of a batch, and in how many parts suspects are computed again.

    Attributes:
        batch, groups: examples, and factors of each, which stand side by side.
        pairs: tiles of the terms of one factor.
        parts: tiles of the gradient of one example, at least one.
    """

    batch: int
    groups: int
    pairs: int
    parts: int

    @property
    def size(self) -> int:
        """How many numbers they are."""
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
    """Of examples without positions, or of no examples."""
    return Guarded(batch, 0, None)
