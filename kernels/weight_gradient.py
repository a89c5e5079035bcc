"""The summed weight gradient and every example's squared norm from one pass over the data.

Each program owns one tile of the weight gradient and walks the examples inside it. One accumulator
holds the current example's tile; where an example ends, its squares leave as a partial norm, the
tile joins the sum over examples, and the accumulator starts again from zero. The walk is one flat
loop over (example, block of positions), so the memory pipeline never drains between examples.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from gradstats.kernels import _check, _config
from gradstats.kernels._launching import launch_kernel
from gradstats.kernels._tile import (
    dot,
    example_base,
    grouped,
    load_tile,
    segment,
    segment_length,
)
from triton.tools.tensor_descriptor import TensorDescriptor

GROUP = 8  # rows of tiles walked together, so that neighbours share operands in L2


@triton.jit
def steps_of(
    cu_seqlens_ptr,
    first_example,
    last_example,
    positions,
    total_rows,
    INNER: tl.constexpr,
    RAGGED: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Number of position blocks in a range of examples; an empty example still takes one."""
    if RAGGED:
        steps = tl.zeros((), tl.int32)
        for first in range(first_example, last_example, CHUNK):
            examples = first + tl.arange(0, CHUNK)
            inside = examples < last_example
            starts = tl.load(cu_seqlens_ptr + examples, mask=inside, other=0)
            ends = tl.load(cu_seqlens_ptr + examples + 1, mask=inside, other=0)
            lengths, _ = segment_length(starts, ends, positions, total_rows)
            blocks = tl.maximum(tl.cdiv(lengths, INNER), 1)
            steps += tl.sum(tl.where(inside, blocks, 0))
        return steps
    else:
        return (last_example - first_example) * tl.maximum(tl.cdiv(positions, INNER), 1)


@triton.jit(do_not_specialize=["batch", "positions", "total_rows", "examples_per_split"])
def weight_gradient_kernel(
    a_ptr,  # (B, T, d_in) or packed (N, d_in); a descriptor of [1, INNER, COLUMNS] if DESCRIPTORS
    g_ptr,  # (B, T, d_out) or packed (N, d_out); a descriptor of [1, INNER, ROWS] if DESCRIPTORS
    cu_seqlens_ptr,  # int (B + 1,), read if RAGGED
    gradient_ptr,  # (splits, d_out, d_in) contiguous: sums over each range of examples
    partial_ptr,  # fp64 (B, tiles)
    stride_ab,
    stride_at,
    stride_ad,
    stride_gb,
    stride_gt,
    stride_gd,
    batch,
    positions,
    total_rows,
    d_in,
    d_out,
    examples_per_split,
    RAGGED: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
):
    """One tile of sum_b G_b over a range of examples, and partial[b, tile] = |tile of G_b|^2."""
    index = tl.program_id(0)
    row_tiles = tl.cdiv(d_out, ROWS)
    column_tiles = tl.cdiv(d_in, COLUMNS)
    tiles = row_tiles * column_tiles
    split = index // tiles
    tile = index - split * tiles
    row_tile, column_tile = grouped(tile, row_tiles, column_tiles, GROUP_ROWS)
    rows = row_tile * ROWS + tl.arange(0, ROWS)
    columns = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    inner = tl.arange(0, INNER)

    example = split * examples_per_split
    last_example = tl.minimum(example + examples_per_split, batch)
    steps = steps_of(
        cu_seqlens_ptr, example, last_example, positions, total_rows, INNER, RAGGED, CHUNK=256
    )
    first_row, length, poison = segment(cu_seqlens_ptr, example, positions, total_rows, RAGGED)
    poisoned = poison
    position = 0

    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    gradient = tl.zeros((ROWS, COLUMNS), tl.float32)
    for _ in range(0, steps):
        if DESCRIPTORS:
            # a three-dimensional box ends with its example: past T it reads zeros
            g = g_ptr.load([example, position, row_tile * ROWS]).reshape(INNER, ROWS)
            a = a_ptr.load([example, position, column_tile * COLUMNS]).reshape(INNER, COLUMNS)
        else:
            # the base moves and the offsets inside the tile stay, so they are computed once
            g_base = example_base(g_ptr, example, stride_gb, first_row + position, stride_gt)
            a_base = example_base(a_ptr, example, stride_ab, first_row + position, stride_at)
            left = length - position
            g = load_tile(g_base, inner, stride_gt, left, rows, stride_gd, d_out)
            a = load_tile(a_base, inner, stride_at, left, columns, stride_ad, d_in)
        gradient = dot(g.T, a, gradient, PRECISION)

        ends = position + INNER >= length
        if ends:
            squares = tl.sum(gradient * gradient)
            if RAGGED:
                squares += poison
                poisoned += poison
            tl.store(partial_ptr + tl.cast(example, tl.int64) * tiles + tile, squares)
            total += gradient
            gradient = tl.zeros((ROWS, COLUMNS), tl.float32)
        # where the walk stands is kept apart from the sums, so that loads can run ahead of them
        position = tl.where(ends, 0, position + INNER)
        example = tl.where(ends, example + 1, example)
        if RAGGED:
            first_row, length, poison = segment(
                cu_seqlens_ptr,
                tl.minimum(example, batch - 1),
                positions,
                total_rows,
                RAGGED,
            )

    if RAGGED:
        total += poisoned
    output = gradient_ptr + tl.cast(split, tl.int64) * d_out * d_in
    offsets = tl.cast(rows, tl.int64)[:, None] * d_in + tl.cast(columns, tl.int64)[None, :]
    mask = (rows < d_out)[:, None] & (columns < d_in)[None, :]
    tl.store(output + offsets, total.to(gradient_ptr.dtype.element_ty), mask=mask)


def weight_gradient_sqnorm(
    a: torch.Tensor,
    g: torch.Tensor,
    *,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    precision: str | None = None,
    gradient_dtype: torch.dtype | None = None,
    descriptors: bool = False,
    config: _config.TileConfig | None = None,
    splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight gradient of the summed loss and the squared norm of every example's share in it.

    gradient = sum_i G_i,  sqnorm_i = |G_i|_F^2,  G_i = sum_t g_it a_it^T

    Args:
        a: layer inputs (B, T, d_in), or packed (N, d_in) with cu_seqlens; bf16, fp16 or fp32,
            any strides.
        g: gradients with respect to the outputs, (B, T, d_out) or (N, d_out), same dtype.
        cu_seqlens: int (B + 1,) first rows of the examples, on the host or the device. Rows
            outside every segment join neither result.
        max_seqlen: with device bounds, the longest segment; avoids a wait for the device.
        precision: of fp32 products, "ieee", "tf32x3" or "tf32"; None follows
            torch.backends.cuda.matmul.fp32_precision.
        gradient_dtype: dtype of the gradient; None means that of `a`. Sums are fp32 either way.
        descriptors: read operands through the tensor memory accelerator (compute capability 9.0
            and later); needs dense, aligned operands.
        config: overrides the tile table.
        splits: overrides the number of ranges that the examples are split into.
    Returns:
        (gradient (d_out, d_in), sqnorm fp64 (B,)). A packed example whose bounds are wrong makes
        its norm and the gradient NaN.
    Raises:
        KernelInputError: before any launch, for inputs that no kernel serves.
    Cost: 2 T d_in d_out flops per example, those of the weight gradient alone, with T rounded up
    to a multiple of the configuration's `inner`: far shorter examples are better served by a plain
    weight gradient beside `gram_sqnorm`, and T = 1 by `rank_one_sqnorm`. Workspace 8 bytes
    per example and tile, and 4 splits d_in d_out bytes where the examples are split.
    """
    segments = _check.check_operands(a, g, cu_seqlens, max_seqlen)
    batch, d_in, d_out = segments.batch, a.shape[-1], g.shape[-1]
    precision = _check.check_precision(a.dtype, precision)
    gradient_dtype = gradient_dtype or a.dtype
    architecture = _check.architecture(a.device)
    aligned = _check.is_aligned(a, g)
    expanded = any(
        stride == 0 and size > 1
        for operand in (a, g)
        for stride, size in zip(operand.stride(), operand.shape, strict=True)
    )
    if descriptors and (segments.ragged or not aligned or expanded or architecture < 90):
        raise _check.KernelInputError(
            "descriptors need dense operands with aligned rows, not expanded, on compute "
            f"capability 9.0 or later; got {'packed' if segments.ragged else 'dense'} operands "
            f"with strides {a.stride()} and {g.stride()} on {architecture}: leave descriptors=False"
        )
    config = config or _config.choose_direct(
        d_out,
        d_in,
        a.element_size(),
        precision,
        architecture,
        aligned,
        "weight_gradient_descriptor" if descriptors else "weight_gradient",
    )
    tiles = triton.cdiv(d_out, config.rows) * triton.cdiv(d_in, config.columns)
    partial = torch.empty((batch, tiles), dtype=torch.float64, device=a.device)
    if not partial.numel():
        gradient = torch.zeros((d_out, d_in), dtype=gradient_dtype, device=a.device)
        return gradient, partial.sum(1)

    splits = min(splits or _config.choose_splits(tiles, batch, architecture), batch)
    examples_per_split = triton.cdiv(batch, splits)
    splits = triton.cdiv(batch, examples_per_split)
    gradient = torch.empty(
        (splits, d_out, d_in),
        dtype=gradient_dtype if splits == 1 else torch.float32,
        device=a.device,
    )
    if descriptors:
        operands = (
            TensorDescriptor.from_tensor(a, [1, config.inner, config.columns]),
            TensorDescriptor.from_tensor(g, [1, config.inner, config.rows]),
        )
    else:
        operands = (a, g)
    launch_kernel(
        weight_gradient_kernel,
        tiles * splits,
        *operands,
        segments.cu_seqlens,
        gradient,
        partial,
        *segments.strides(a),
        *segments.strides(g),
        batch,
        segments.positions,
        segments.total_rows,
        d_in,
        d_out,
        examples_per_split,
        RAGGED=segments.ragged,
        DESCRIPTORS=descriptors,
        PRECISION=config.precision,
        ROWS=config.rows,
        COLUMNS=config.columns,
        INNER=config.inner,
        GROUP_ROWS=GROUP,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    summed = gradient[0] if splits == 1 else gradient.sum(0).to(gradient_dtype)
    return summed, partial.sum(1, dtype=torch.float64)
