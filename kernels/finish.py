"""Sums over all examples, and squared norms of each, from the partial results of a kernel.

One launch does all of it: on the host, one small operation takes as long as another.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from gradstats.kernels import _config
from gradstats.kernels._launching import Launch, launch_of, remembered

# At most so many parts of an example, rows of all examples, and numbers are read at once. With few
# parts more features are read, so that a program waits for memory only a few times.
PARTS, ROWS, NUMBERS = 32, 128, 8192
COLUMNS = 64  # features of a sum over all examples that one program adds up


@triton.jit(do_not_specialize=["batch", "parts"])
def finish_kernel(
    partial_ptr,  # fp32 (KINDS, B, parts, features) contiguous
    first_ptr,  # (features,): the sum of the first kind, written if SUMS
    last_ptr,  # (features,), as the first: of the last
    sqnorm_ptr,  # fp64 (KINDS, B), written if SQUARES
    batch,
    parts,
    features,
    KINDS: tl.constexpr,
    SUMS: tl.constexpr,
    SQUARES: tl.constexpr,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The squared norm of one example, or the sum over all of them for a few features."""
    index = tl.program_id(0)
    examples = 0
    if SQUARES:
        examples = KINDS * batch
        if index < examples:
            base = partial_ptr + tl.cast(index, tl.int64) * parts * features
            squares = tl.zeros((WIDTH,), tl.float64)
            for column in range(0, features, WIDTH):
                columns = column + tl.arange(0, WIDTH)
                sums = tl.zeros((PARTS, WIDTH), tl.float64)
                for part in range(0, parts, PARTS):
                    rows = part + tl.arange(0, PARTS)
                    sums += read(base, rows, parts, columns, features).to(tl.float64)
                total = tl.sum(sums, axis=0)
                squares += total * total
            tl.store(sqnorm_ptr + index, tl.sum(squares))
    if SUMS:
        if index >= examples:
            tiles = tl.cdiv(features, COLUMNS)
            kind = (index - examples) // tiles
            columns = (index - examples) % tiles * COLUMNS + tl.arange(0, COLUMNS)
            count = batch * parts
            base = partial_ptr + tl.cast(kind, tl.int64) * count * features
            # sum over lanes once, at the end: a reduction inside the loop would stall every load
            sums = tl.zeros((ROWS, COLUMNS), tl.float32)
            for row in range(0, count, ROWS):
                sums += read(base, row + tl.arange(0, ROWS), count, columns, features)
            total = tl.sum(sums, axis=0).to(first_ptr.dtype.element_ty)
            if kind == 0:
                tl.store(first_ptr + columns, total, mask=columns < features)
            else:
                tl.store(last_ptr + columns, total, mask=columns < features)


@triton.jit
def read(base, rows, count, columns, features):
    """[rows, columns] of a contiguous matrix, zero past its end."""
    offsets = tl.cast(rows, tl.int64)[:, None] * features + columns[None, :]
    inside = (rows < count)[:, None] & (columns < features)[None, :]
    return tl.load(base + offsets, mask=inside, other=0.0)


def finish(
    partial: torch.Tensor, *, sums: bool, squares: bool, dtype: torch.dtype | None = None
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Finishes a kernel's results, of one kind or two.

    Args:
        partial: fp32 (kinds, B, parts, features) contiguous; an example is the sum of its parts.
        sums, squares: which results are wanted.
        dtype: of the sums over everything, which are fp32 until they are stored; None for fp32.
    Returns:
        (sums over everything, each (features,) in memory of its own because users may resize
        parameters' gradients; squared norms of the examples, each fp64 (B,)). Either is empty if
        not wanted.
    """
    return run(_prepared(finish_kernel, (partial,), sums, squares, dtype), partial)


class Finish(NamedTuple):
    """All of a call but its tensors.

    Attributes:
        totals: how many sums over everything are wanted.
        features, dtype: of each.
        sqnorm: shape of the squared norms, without an axis for one kind; None if not wanted.
        launch: None where there is nothing to compute.
    """

    totals: int
    features: int
    dtype: torch.dtype
    sqnorm: tuple[int, ...] | None
    launch: Launch | None


def prepare(
    shape: tuple[int, ...], sums: bool, squares: bool, dtype: torch.dtype | None = None
) -> Finish:
    """What `run` needs to finish partial results of a shape; arguments as of `finish`."""
    kinds, batch, parts, features = shape
    programs = kinds * _config.cdiv(features, COLUMNS) if sums else 0
    if squares:
        programs += kinds * batch
    launch = None
    if programs:
        at_once = min(PARTS, triton.next_power_of_2(max(1, parts)))
        launch = launch_of(
            finish_kernel,
            programs,
            batch,
            parts,
            features,
            KINDS=kinds,
            SUMS=sums,
            SQUARES=squares,
            PARTS=at_once,
            WIDTH=min(NUMBERS // at_once, triton.next_power_of_2(max(1, features))),
            ROWS=min(ROWS, triton.next_power_of_2(max(1, batch * parts))),
            COLUMNS=COLUMNS,
            num_warps=8,
        )
    sqnorm = (batch,) if kinds == 1 else (kinds, batch)
    return Finish(
        kinds if sums else 0, features, dtype or torch.float32, sqnorm if squares else None, launch
    )


@remembered
def _prepared(
    _: Any,
    operands: tuple[torch.Tensor],
    sums: bool,
    squares: bool,
    dtype: torch.dtype | None,
) -> Finish:
    return prepare(tuple(operands[0].shape), sums, squares, dtype)


def run(
    plan: Finish, partial: torch.Tensor
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """As `finish`, with what was prepared for the shape."""
    count, features, dtype, shape, launch = plan
    device = partial.device
    totals: tuple[torch.Tensor, ...] = ()
    first = last = None
    if count:
        first = last = torch.empty(features, dtype=dtype, device=device)
        totals = (first,)
        if count == 2:
            last = torch.empty(features, dtype=dtype, device=device)
            totals = (first, last)
    sqnorm = None
    if shape is not None:
        sqnorm = torch.empty(shape, dtype=torch.float64, device=device)
    if launch is not None:
        launch(partial, first, last, sqnorm)
    if sqnorm is None:
        return totals, ()
    return totals, sqnorm.unbind(0) if sqnorm.dim() == 2 else (sqnorm,)
