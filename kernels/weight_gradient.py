"""The summed weight gradient and every example's squared norm from one pass over the data.

Each program owns one tile of the weight gradient and walks the examples inside it. One accumulator
holds the current example's tile; where an example ends, its squares leave as a partial norm, the
tile joins the sum over examples, and the accumulator starts again from zero.

It takes 1.3 to 1.4 times as long as cuBLAS takes for the sum alone on an NVIDIA H100, and 1.27 to
1.40 times on an H200. With two accumulators there is no room for a larger tile of powers of two,
and tiles of 128 x 128 read 1.2 GB from L2 for 16 x 1024 positions of 768 and 3072 features; in
cuBLAS, neighbours share what they read. A pipeline that runs ahead across examples was 11 to 14 %
faster there, at about 10 TB/s, no faster for 768 x 768 features, and a fifth slower for 4096 x
4096, where programs drift apart. Tiles of 128 x 192, computed as two products in each step, fit
without spills and took 1.04 to 1.4 times as long with the best split of examples. Rows that do not
start at multiples of 16 bytes cannot have descriptors: a box must start at such a multiple within a
row too, or the device reports an illegal instruction.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from gradstats.kernels import _check, _config
from gradstats.kernels._launching import Launch, launch_of, remembered
from gradstats.kernels._results import added
from gradstats.kernels._tile import dot, example_base, grouped, load_tile, segment
from triton.tools.tensor_descriptor import TensorDescriptor

GROUP = 8  # rows of tiles walked together, so that neighbours share operands in L2
ADDED_ROWS = 8  # of a tile, whose parts one program adds up

# Multiply-adds of a launch from which on the tensor memory accelerator pays: it saves a fifth of
# the time of a large product, and costs the host tens of microseconds.
WORTH_DESCRIPTORS = 2**33


@triton.jit(do_not_specialize=["batch", "positions", "total_rows", "whole", "examples_per_split"])
def weight_gradient_kernel(
    a_ptr,  # (B, T, d_in) or packed (N, d_in); a descriptor of [1, INNER, COLUMNS] if DESCRIPTORS
    g_ptr,  # (B, T, d_out) or packed (N, d_out); a descriptor of [1, INNER, ROWS] if DESCRIPTORS
    cu_seqlens_ptr,  # int (B + 1,), read if RAGGED
    gradient_ptr,  # (d_out, d_in) contiguous
    parts_ptr,  # fp32 (splits, tiles - whole, ROWS, COLUMNS), written if SPLIT: sums over ranges
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
    whole,  # tiles that one program walks through all examples; the others are split
    examples_per_split,
    SPLIT: tl.constexpr,  # some tiles are
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
    tile = index
    first_example = 0
    last_example = batch
    if SPLIT:
        if index >= whole:
            split = (index - whole) // (tiles - whole)
            tile = whole + (index - whole) % (tiles - whole)
            first_example = split * examples_per_split
            last_example = tl.minimum(first_example + examples_per_split, batch)
    row_tile, column_tile = grouped(tile, row_tiles, column_tiles, GROUP_ROWS)
    rows = row_tile * ROWS + tl.arange(0, ROWS)
    columns = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    inner = tl.arange(0, INNER)

    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for example in range(first_example, last_example):
        first_row, length, poison = segment(cu_seqlens_ptr, example, positions, total_rows, RAGGED)
        gradient = tl.zeros((ROWS, COLUMNS), tl.float32)
        if DESCRIPTORS:
            for position in range(0, length, INNER):
                # a three-dimensional box reads zeros past T, the end of its example
                g = g_ptr.load([example, position, row_tile * ROWS]).reshape(INNER, ROWS)
                a = a_ptr.load([example, position, column_tile * COLUMNS]).reshape(INNER, COLUMNS)
                gradient = dot(g.T, a, gradient, PRECISION)
        else:
            # the bases move and the offsets inside the tile stay, so they are computed once
            g_base = example_base(g_ptr, example, stride_gb, first_row, stride_gt)
            a_base = example_base(a_ptr, example, stride_ab, first_row, stride_at)
            for position in range(0, length, INNER):
                left = length - position
                g = load_tile(g_base, inner, stride_gt, left, rows, stride_gd, d_out)
                a = load_tile(a_base, inner, stride_at, left, columns, stride_ad, d_in)
                gradient = dot(g.T, a, gradient, PRECISION)
                g_base += tl.cast(INNER, tl.int64) * stride_gt
                a_base += tl.cast(INNER, tl.int64) * stride_at
        squares = tl.sum(gradient * gradient) + poison
        tl.store(partial_ptr + tl.cast(example, tl.int64) * tiles + tile, squares)
        total += gradient
        if RAGGED:
            total += poison

    if SPLIT:
        if index >= whole:
            part = parts_ptr + tl.cast(index - whole, tl.int64) * ROWS * COLUMNS
            within = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
            tl.store(part + within, total)
            return
    offsets = tl.cast(rows, tl.int64)[:, None] * d_in + tl.cast(columns, tl.int64)[None, :]
    mask = (rows < d_out)[:, None] & (columns < d_in)[None, :]
    tl.store(gradient_ptr + offsets, total.to(gradient_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["whole", "splits"])
def add_parts_kernel(
    parts_ptr,  # fp32 (splits, tiles - whole, ROWS, COLUMNS)
    gradient_ptr,  # (d_out, d_in) contiguous
    d_in,
    d_out,
    whole,
    splits,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    ADDED: tl.constexpr,
):
    """A few rows of a tile of the gradient, the sum of its parts in order."""
    row_tiles = tl.cdiv(d_out, ROWS)
    column_tiles = tl.cdiv(d_in, COLUMNS)
    index = tl.program_id(0) // (ROWS // ADDED)
    row = tl.program_id(0) % (ROWS // ADDED) * ADDED + tl.arange(0, ADDED)
    column = tl.arange(0, COLUMNS)
    stride = tl.cast(row_tiles * column_tiles - whole, tl.int64) * ROWS * COLUMNS
    part = parts_ptr + tl.cast(index, tl.int64) * ROWS * COLUMNS
    total = tl.zeros((ADDED, COLUMNS), tl.float32)
    for _ in range(0, splits):
        total += tl.load(part + row[:, None] * COLUMNS + column[None, :])
        part += stride
    row_tile, column_tile = grouped(whole + index, row_tiles, column_tiles, GROUP_ROWS)
    rows = row_tile * ROWS + row
    columns = column_tile * COLUMNS + column
    offsets = tl.cast(rows, tl.int64)[:, None] * d_in + tl.cast(columns, tl.int64)[None, :]
    mask = (rows < d_out)[:, None] & (columns < d_in)[None, :]
    tl.store(gradient_ptr + offsets, total.to(gradient_ptr.dtype.element_ty), mask=mask)


def is_expanded(*operands: torch.Tensor) -> bool:
    """Whether an axis of an operand is expanded: many elements at one address."""
    return any(
        stride == 0 and size > 1
        for operand in operands
        for stride, size in zip(operand.stride(), operand.shape, strict=True)
    )


def weight_gradient_sqnorm(
    a: torch.Tensor,
    g: torch.Tensor,
    *,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    gradient_dtype: torch.dtype | None = None,
    descriptors: bool | None = None,
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
        gradient_dtype: dtype of the gradient; None means that of `a`. Sums are fp32 either way.
        descriptors: read operands through the tensor memory accelerator (compute capability 9.0
            and later); needs dense, aligned operands. None for where that pays.
        config: overrides the tile table.
        splits: overrides the number of ranges that the examples are split into, for all tiles.
    Returns:
        (gradient (d_out, d_in), sqnorm fp64 (B,)). A packed example whose bounds are wrong makes
        its norm and the gradient NaN.
    Raises:
        KernelInputError: before any launch, for inputs that no kernel serves.
    Cost: 2 T d_in d_out flops per example, those of the weight gradient alone, with T rounded up
    to a multiple of the configuration's `inner`: far shorter examples are better served by a plain
    weight gradient beside `gram_sqnorm`, and T = 1 by `rank_one_sqnorm`. Workspace 8 bytes
    per example and tile, and for tiles whose examples are split 4 bytes per element and part, at
    most as many parts as the device runs programs at once.
    """
    plan = _plan(
        weight_gradient_kernel, (a, g), cu_seqlens, max_seqlen,
        _check.precision_of(a.dtype), gradient_dtype, descriptors, config, splits,
    )  # fmt: skip
    return plan(a, g)


def prepare(a: torch.Tensor, g: torch.Tensor) -> _Plan:
    """What `weight_gradient_sqnorm` does, for dense operands of the same layout."""
    precision = _check.precision_of(a.dtype)
    return _plan(weight_gradient_kernel, (a, g), None, None, precision, None, None, None, None)


class _Plan(NamedTuple):
    """All of a call but its tensors.

    Attributes:
        bounds: of packed examples.
        gradient, dtype: the gradient's.
        partial: shape of the partial norms: examples and tiles.
        parts: shape of the sums of tiles that are split.
        boxes: descriptors of a and g without the tensors; None for pointers.
        launch: None where there is nothing to compute.
        addition: of the parts; None where there are none.
    """

    bounds: torch.Tensor | None
    gradient: tuple[int, int]
    dtype: torch.dtype
    partial: tuple[int, int]
    parts: tuple[int, int, int, int] = (0, 0, 0, 0)
    boxes: tuple[TensorDescriptor, TensorDescriptor] | None = None
    launch: Launch | None = None
    addition: Launch | None = None

    def __call__(self, a: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(gradient, squared norms) of operands of the plan's layout."""
        device = a.device
        partial = torch.empty(self.partial, dtype=torch.float64, device=device)
        if self.launch is None:
            return torch.zeros(self.gradient, dtype=self.dtype, device=device), added(partial)
        gradient = torch.empty(self.gradient, dtype=self.dtype, device=device)
        parts = None
        if self.addition is not None:
            parts = torch.empty(self.parts, dtype=torch.float32, device=device)
        operands: tuple[Any, Any] = (a, g)
        if self.boxes is not None:
            operands = (_descriptor(self.boxes[0], a), _descriptor(self.boxes[1], g))
        self.launch(*operands, self.bounds, gradient, parts, partial)
        if self.addition is not None:
            self.addition(parts, gradient)
        return gradient, added(partial)


@remembered
def _plan(
    kernel: Any,
    operands: tuple[torch.Tensor, torch.Tensor],
    cu_seqlens: torch.Tensor | None,
    max_seqlen: int | None,
    _precision: str,  # part of the cache's key
    gradient_dtype: torch.dtype | None,
    descriptors: bool | None,
    config: _config.TileConfig | None,
    splits: int | None,
) -> _Plan:
    a, g = operands
    segments = _check.check_operands(a, g, cu_seqlens, max_seqlen)
    batch, d_in, d_out = segments.batch, a.shape[-1], g.shape[-1]
    architecture = _check.architecture(a.device)
    aligned = _check.is_aligned(a, g)
    dense = not segments.ragged and aligned and architecture >= 90 and not is_expanded(a, g)
    if descriptors is None:
        large = segments.total_rows * d_in * d_out >= WORTH_DESCRIPTORS
        descriptors = dense and large and _config.family(architecture) == 90
    if descriptors and not dense:
        raise _check.KernelInputError(
            "descriptors need dense operands with aligned rows, not expanded, on compute "
            f"capability 9.0 or later; got {'packed' if segments.ragged else 'dense'} operands "
            f"with strides {a.stride()} and {g.stride()} on {architecture}: leave descriptors=None"
        )
    operation = "weight_gradient_descriptor" if descriptors else "weight_gradient"
    config = config or _config.choose_weight_gradient(
        operation, d_out, d_in, batch, *_check.kind(a, aligned)
    )
    tiles = _config.tiles_of(config, d_out, d_in)
    shapes = (segments.cu_seqlens, (d_out, d_in), gradient_dtype or a.dtype, (batch, tiles))
    if not batch * tiles:
        return _Plan(*shapes)
    if splits is None:
        whole, splits = _config.split_tiles(config, tiles, batch, architecture)
    else:
        whole = 0
    examples_per_split = _config.cdiv(batch, min(splits, batch))
    splits = _config.cdiv(batch, examples_per_split)
    if splits == 1:
        whole = tiles
    split_tiles = tiles - whole
    launch = launch_of(
        kernel,
        whole + split_tiles * splits,
        *segments.strides(a),
        *segments.strides(g),
        batch,
        segments.positions,
        segments.total_rows,
        d_in,
        d_out,
        whole,
        examples_per_split,
        SPLIT=split_tiles > 0,
        RAGGED=segments.ragged,
        DESCRIPTORS=descriptors,
        GROUP_ROWS=GROUP,
        **config.of_gradients,
    )
    addition = None
    if split_tiles:
        rows = min(ADDED_ROWS, config.rows)
        addition = launch_of(
            add_parts_kernel,
            split_tiles * (config.rows // rows),
            d_in,
            d_out,
            whole,
            splits,
            ROWS=config.rows,
            COLUMNS=config.columns,
            GROUP_ROWS=GROUP,
            ADDED=rows,
        )
    boxes = None
    if descriptors:
        boxes = (
            TensorDescriptor.from_tensor(a, [1, config.inner, config.columns]),
            TensorDescriptor.from_tensor(g, [1, config.inner, config.rows]),
        )
        for box in boxes:
            box.base = None  # the cached plan must not keep an operand alive
    parts = (splits, split_tiles, config.rows, config.columns)
    return _Plan(*shapes, parts, boxes, launch, addition)


def _descriptor(box: TensorDescriptor, operand: torch.Tensor) -> TensorDescriptor:
    """The descriptor of an operand of the layout that was checked when the box was made."""
    found = object.__new__(TensorDescriptor)
    found.__dict__.update(box.__dict__, base=operand)
    return found
