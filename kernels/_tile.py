"""Device helpers shared by all kernels: masked loads, dots, segment bounds, tile orders."""

import triton
import triton.language as tl

INTERPRET = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def dot(a, b, accumulator, PRECISION: tl.constexpr):
    """accumulator + a @ b with fp32 accumulation."""
    if INTERPRET:  # the interpreter would multiply the raw bits of bfloat16
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, accumulator, input_precision=PRECISION)


@triton.jit
def load_tile(
    base,  # pointer to element (0, 0) of the matrix that the tile is cut from
    rows,  # [R] row indices
    row_stride,
    row_limit,  # rows at or past this index read as zero
    columns,  # [C] column indices
    column_stride,
    column_limit,  # columns at or past this index read as zero
):
    """The [R, C] tile at `rows` x `columns`; zero outside the limits, whatever memory holds there.

    A reduced tile must not see its neighbours, so nothing is wrapped and nothing is multiplied by
    a mask (0 * NaN is NaN). Offsets are 64-bit before they meet a stride.
    """
    offsets = (
        tl.cast(rows, tl.int64)[:, None] * row_stride
        + tl.cast(columns, tl.int64)[None, :] * column_stride
    )
    mask = (rows < row_limit)[:, None] & (columns < column_limit)[None, :]
    return tl.load(base + offsets, mask=mask, other=0.0)


@triton.jit
def multiple(number, RUN: tl.constexpr):
    """The number, which is a multiple of RUN, with a hint of that to the compiler.

    Kernels are not specialized on sizes that differ from layer to layer. Without the hint, loads
    that such a size bounds are not vectorised.
    """
    return number // RUN * RUN


@triton.jit
def load_rows(pointer, offsets, inside, columns, column_stride, column_limit):
    """[R, C] tile whose rows start at `offsets`; zero for rows not `inside` and past the limit."""
    addresses = offsets[:, None] + tl.cast(columns, tl.int64)[None, :] * column_stride
    mask = inside[:, None] & (columns < column_limit)[None, :]
    return tl.load(pointer + addresses, mask=mask, other=0.0)


@triton.jit
def segment_length(start, end, positions, total_rows):
    """(length, valid): 0 and False where bounds decrease, leave the rows, or exceed `positions`."""
    start = tl.cast(start, tl.int64)
    end = tl.cast(end, tl.int64)
    valid = (start >= 0) & (end >= start) & (end <= total_rows) & (end - start <= positions)
    return tl.cast(tl.where(valid, end - start, 0), tl.int32), valid


@triton.jit
def segment(
    cu_seqlens_ptr,  # int32 or int64 (B + 1,): first rows of the examples, or any pointer if dense
    example,
    positions,  # dense: T, the length of every example; ragged: the longest length allowed
    total_rows,  # ragged: number of rows of the packed tensors
    RAGGED: tl.constexpr,
):
    """(first row, length, poison) of one example.

    `poison` is 0, or NaN where the bounds are out of range, decrease, or span more than the launch
    allows for. Such an example reads no rows, and the caller adds `poison` to all that it writes,
    so that wrong bounds, which only the device knows, never yield a plausible number.
    """
    if RAGGED:
        start = tl.load(cu_seqlens_ptr + example)
        end = tl.load(cu_seqlens_ptr + example + 1)
        length, valid = segment_length(start, end, positions, total_rows)
        return tl.cast(start, tl.int64), length, tl.where(valid, 0.0, float("nan"))
    else:
        return tl.cast(0, tl.int64), positions, 0.0


@triton.jit
def example_base(pointer, example, example_stride, first_row, row_stride):
    """Pointer to the first row of one example; 64-bit before any multiplication."""
    return pointer + tl.cast(example, tl.int64) * example_stride + first_row * row_stride


@triton.jit
def triangle(index):
    """(row, column) of the index-th tile of a lower triangle walked row by row, column <= row."""
    row = tl.cast((tl.sqrt(8.0 * tl.cast(index, tl.float32) + 1.0) - 1.0) * 0.5, tl.int64)
    # the root is rounded: step back or forward where it fell on the wrong side of an integer
    row = tl.where(row * (row + 1) // 2 > index, row - 1, row)
    row = tl.where((row + 1) * (row + 2) // 2 <= index, row + 1, row)
    return tl.cast(row, tl.int32), tl.cast(index - row * (row + 1) // 2, tl.int32)


@triton.jit
def grouped(index, row_tiles, column_tiles, GROUP: tl.constexpr):
    """(row, column) of the index-th tile, GROUP rows of tiles at a time, for reuse in L2."""
    tiles_per_group = GROUP * column_tiles
    group = index // tiles_per_group
    first_row = group * GROUP
    rows_here = tl.minimum(row_tiles - first_row, GROUP)
    within = index - group * tiles_per_group
    return first_row + within % rows_here, within // rows_here
