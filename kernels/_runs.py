"""Runs: the rows of one id in one example, and their sums, in the order of tiles of examples.

A tile of examples looks up its rows by id. So rows are sorted by (tile, id, example): one 64-bit
key, whose lowest bits are the example within its tile.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from gradstats.kernels import _check, _config, _streaming
from gradstats.kernels._launching import launch_kernel
from gradstats.kernels._tile import load_rows, segment

EXAMPLE_BITS = tl.constexpr(4)
EXAMPLES = tl.constexpr(16)  # of a tile
ID_BITS = tl.constexpr(40)
NOBODY = tl.constexpr(2**62)  # key of packed rows outside every segment, after all others
BLOCK = 256  # rows whose keys one program computes


@triton.jit(do_not_specialize=["positions", "total_rows", "blocks"])
def run_keys_kernel(
    ids_ptr,  # int (B, T), or packed (N,)
    cu_seqlens_ptr,  # int (B + 1,), read if RAGGED
    keys_ptr,  # int64 (N,)
    offsets_ptr,  # int64 (N,): offsets of rows in units
    stride_ib,
    stride_it,
    stride_gb,
    stride_gt,
    positions,
    total_rows,
    blocks,
    RAGGED: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The keys and the offsets of some rows of one example."""
    index = tl.program_id(0)
    example = index // blocks
    position = (index - example * blocks) * BLOCK + tl.arange(0, BLOCK)
    example = tl.cast(example, tl.int64)
    first_row, length, _ = segment(cu_seqlens_ptr, example, positions, total_rows, RAGGED)
    inside = position < length
    row = first_row + tl.cast(position, tl.int64)
    own = tl.load(ids_ptr + example * stride_ib + row * stride_it, mask=inside, other=0)
    group = ((example // EXAMPLES) << ID_BITS) + tl.cast(own, tl.int64)
    key = (group << EXAMPLE_BITS) + example % EXAMPLES
    if RAGGED:
        place = row
    else:
        place = example * positions + row
    tl.store(keys_ptr + place, key, mask=inside)
    offset = (example * stride_gb + row * stride_gt) // UNIT
    tl.store(offsets_ptr + place, offset, mask=inside)


@triton.jit(do_not_specialize=["total_rows", "tiles"])
def run_sums_kernel(
    g_ptr,
    sorted_ptr,  # int64 (N,): keys in ascending order
    offsets_ptr,  # int64 (N,): offsets of the rows, in that order
    runs_ptr,  # int64 (N - 1,): the run of each slot after the first
    keys_ptr,  # int64 (N,), by runs
    sums_ptr,  # fp32 (N, width), by runs
    stride_gd,
    total_rows,
    start,  # first of the features that are summed
    end,  # where they end
    width,  # at least as many; zeros follow them
    tiles,
    UNIT: tl.constexpr,
    INNER: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The key of the run that begins at a slot, and the sum of its rows over some features."""
    index = tl.program_id(0)
    slot = tl.cast(index // tiles, tl.int64)
    tile = index % tiles
    key = tl.load(sorted_ptr + slot)
    previous = tl.load(sorted_ptr + slot - 1, mask=slot > 0, other=-1)
    if (key != previous) & (key < NOBODY):
        run = tl.load(runs_ptr + slot - 1, mask=slot > 0, other=0)
        within = tl.cast(tile * COLUMNS + tl.arange(0, COLUMNS), tl.int64)
        columns = start + within
        # most runs have one row
        offset = tl.load(offsets_ptr + slot) * UNIT
        sums = tl.load(g_ptr + offset + columns * stride_gd, mask=columns < end, other=0.0)
        sums = sums.to(tl.float32)
        slot += 1
        more = tl.load(sorted_ptr + slot, mask=slot < total_rows, other=NOBODY) == key
        while more:
            slots = slot + tl.arange(0, INNER)
            there = tl.load(sorted_ptr + slots, mask=slots < total_rows, other=NOBODY)
            equal = there == key
            offsets = tl.load(offsets_ptr + slots, mask=equal, other=0) * UNIT
            values = load_rows(g_ptr, offsets, equal, columns, stride_gd, end)
            sums += tl.sum(values.to(tl.float32), axis=0)
            slot += INNER
            more = tl.sum(equal.to(tl.int32)) == INNER
        tl.store(sums_ptr + run * width + within, sums, mask=within < width)
        if tile == 0:
            tl.store(keys_ptr + run, key)


@triton.jit
def keys_below(
    keys_ptr,  # int64 (size,) in ascending order
    keys,
    size,
    top,  # a power of two, at least half of size + 1
):
    """Number of the keys in memory that are less than each of `keys`."""
    count = keys * 0
    step = top
    while step > 0:
        last = count + step - 1
        found = tl.load(keys_ptr + last, mask=last < size, other=NOBODY)
        count = tl.where(found < keys, count + step, count)
        step = step // 2
    return count


@dataclasses.dataclass(frozen=True)
class SortedRows:
    """The rows of a factor in the order of their keys.

    Attributes:
        g, segments: the factor.
        keys: (N,) in ascending order.
        offsets: (N,) of the rows in that order, in units of `unit` elements.
        unit: 16 where rows are aligned.
        runs: (N - 1,) the run of each slot after the first, which is of run 0.
    """

    g: torch.Tensor
    segments: _check.Segments
    keys: torch.Tensor
    offsets: torch.Tensor
    unit: int
    runs: torch.Tensor

    @property
    def count(self) -> int:
        """Number of rows, which is the largest possible number of runs."""
        return self.segments.total_rows

    @property
    def top(self) -> int:
        """First step of the search among the keys of runs, a power of two."""
        return 1 << max(0, self.count.bit_length() - 1)

    def sums(
        self, start: int, width: int, config: _config.TileConfig | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(keys, sums): int64 (N,) and fp32 (N, width) of each run, over features from `start`.

        Runs take the first places, in the order of their keys; the other keys are NOBODY.
        """
        config = config or _streaming.choose_run_sums(width, self.segments.positions)
        device = self.g.device
        keys = torch.full((self.count,), NOBODY.value, dtype=torch.int64, device=device)
        sums = torch.empty((self.count, width), dtype=torch.float32, device=device)
        tiles = _config.cdiv(width, config.columns)
        if sums.numel():
            launch_kernel(
                run_sums_kernel,
                self.count * tiles,
                self.g,
                self.keys,
                self.offsets,
                self.runs,
                keys,
                sums,
                self.g.stride(-1),
                self.count,
                start,
                min(start + width, self.g.shape[-1]),
                width,
                tiles,
                UNIT=self.unit,
                INNER=config.inner,
                COLUMNS=config.columns,
                num_warps=config.num_warps,
            )
        return keys, sums


def sort_rows(ids: torch.Tensor, g: torch.Tensor, segments: _check.Segments) -> SortedRows:
    """Sorts the rows of one factor, without waiting for the device."""
    rows = segments.total_rows
    unit = 16 if _check.is_aligned(g) else 1
    keys, offsets = (torch.empty(rows, dtype=torch.int64, device=g.device) for _ in range(2))
    if segments.ragged:
        keys.fill_(NOBODY.value)
    blocks = _config.cdiv(segments.positions, BLOCK)
    if rows and blocks and segments.batch:
        launch_kernel(
            run_keys_kernel,
            segments.batch * blocks,
            ids,
            segments.cu_seqlens,
            keys,
            offsets,
            *segments.strides(ids[..., None])[:2],
            *segments.strides(g)[:2],
            segments.positions,
            rows,
            blocks,
            RAGGED=segments.ragged,
            UNIT=unit,
            BLOCK=BLOCK,
            num_warps=4,
        )
    # stable: rows of a run are added in their order
    keys, order = torch.sort(keys, stable=True)
    runs = torch.cumsum(keys[1:] != keys[:-1], 0)
    return SortedRows(g, segments, keys, offsets[order], unit, runs)
