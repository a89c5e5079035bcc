"""One position per example: the weight gradient is g_i a_i^T, so its statistics factor."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from gradstats.kernels import _check, _config, _streaming
from gradstats.kernels._launching import Launch, remembered
from gradstats.kernels._results import apart
from gradstats.kernels._tile import load_tile


@triton.jit(do_not_specialize=["batch", "splits"])
def rank_one_kernel(
    a1_ptr,  # (B, d_in) inputs of the first factor
    g1_ptr,  # (B, d_out) output gradients of the first factor
    a2_ptr,  # the second factor, read if PAIRED
    g2_ptr,
    partial_ptr,  # fp64 (2, B, splits): partial dots of inputs, then of output gradients
    stride_a1b,
    stride_a1d,
    stride_g1b,
    stride_g1d,
    stride_a2b,
    stride_a2d,
    stride_g2b,
    stride_g2d,
    batch,
    d_in,
    d_out,
    splits,
    features_per_split,  # a multiple of INNER
    PAIRED: tl.constexpr,  # dots between two factors instead of squares of the first
    ROWS: tl.constexpr,
    INNER: tl.constexpr,
):
    """partial[0, b, s] = a1_b . a2_b and partial[1, b, s] = g1_b . g2_b over the s-th features."""
    index = tl.program_id(0)
    split = index % splits
    examples = (index // splits) * ROWS + tl.arange(0, ROWS)
    inner = tl.arange(0, INNER)
    start = tl.cast(split, tl.int64) * features_per_split
    output = partial_ptr + tl.cast(examples, tl.int64) * splits + split

    # lanes are summed once at the end: a reduction inside the loop would stall every load
    dots = tl.zeros((ROWS, INNER), tl.float32)
    for feature in range(start, tl.minimum(start + features_per_split, d_in), INNER):
        first = load_tile(a1_ptr, examples, stride_a1b, batch, feature + inner, stride_a1d, d_in)
        second = first
        if PAIRED:
            second = load_tile(
                a2_ptr, examples, stride_a2b, batch, feature + inner, stride_a2d, d_in
            )
        dots += first.to(tl.float32) * second.to(tl.float32)
    tl.store(output, tl.sum(dots, axis=1), mask=examples < batch)

    dots = tl.zeros((ROWS, INNER), tl.float32)
    for feature in range(start, tl.minimum(start + features_per_split, d_out), INNER):
        first = load_tile(g1_ptr, examples, stride_g1b, batch, feature + inner, stride_g1d, d_out)
        second = first
        if PAIRED:
            second = load_tile(
                g2_ptr, examples, stride_g2b, batch, feature + inner, stride_g2d, d_out
            )
        dots += first.to(tl.float32) * second.to(tl.float32)
    output += tl.cast(batch, tl.int64) * splits
    tl.store(output, tl.sum(dots, axis=1), mask=examples < batch)


def rank_one_sqnorm(
    a: torch.Tensor,
    g: torch.Tensor,
    *,
    config: _config.TileConfig | None = None,
    splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Squared norms of the per-example weight and bias gradients, one position per example.

    sqnorm_i = |a_i|^2 |g_i|^2,  bias_sqnorm_i = |g_i|^2

    Args:
        a: layer inputs (B, d_in), bf16, fp16 or fp32, any strides.
        g: gradients with respect to the outputs (B, d_out), same dtype and device.
        config: overrides the tile table.
        splits: overrides into how many parts the features are divided.
    Returns:
        (sqnorm, bias_sqnorm), each fp64 (B,).
    Raises:
        KernelInputError: before any launch, for inputs that no kernel serves.
    Cost: one read of both operands, O(B (d_in + d_out)).
    Source: Goodfellow, arXiv 1510.01799.
    """
    inputs, outputs = _row_dots(a, g, a, g, paired=False, config=config, splits=splits)
    return inputs * outputs, outputs


def rank_one_inner(
    a1: torch.Tensor,
    g1: torch.Tensor,
    a2: torch.Tensor,
    g2: torch.Tensor,
    *,
    config: _config.TileConfig | None = None,
    splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Inner products of the i-th per-example gradients of two factors, one position per example.

    inner_i = (a1_i . a2_i)(g1_i . g2_i),  bias_inner_i = g1_i . g2_i

    Args, returns, raises and cost: as `rank_one_sqnorm`, for two factors of the same batch.
    """
    _check.check_match(a1, a2, "d_in")
    _check.check_match(g1, g2, "d_out")
    _check.check_batches(a1.shape[0], a2.shape[0])
    inputs, outputs = _row_dots(a1, g1, a2, g2, paired=True, config=config, splits=splits)
    return inputs * outputs, outputs


def _row_dots(
    a1: torch.Tensor,
    g1: torch.Tensor,
    a2: torch.Tensor,
    g2: torch.Tensor,
    *,
    paired: bool,
    config: _config.TileConfig | None,
    splits: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(a1_i . a2_i, g1_i . g2_i), each fp64 (B,)."""
    shape, launch = _plan(rank_one_kernel, (a1, g1, a2, g2), paired, config, splits)
    partial = torch.empty(shape, dtype=torch.float64, device=a1.device)
    if launch is not None:
        launch(a1, g1, a2, g2, partial)
    inputs, outputs = apart(partial)
    return inputs, outputs


@remembered
def _plan(
    kernel: Any,
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    paired: bool,
    config: _config.TileConfig | None,
    splits: int | None,
) -> tuple[tuple[int, int, int], Launch | None]:
    """(shape of the partial results, launch): None where there are no examples."""
    a1, g1, a2, g2 = operands
    for a, g in ((a1, g1), (a2, g2)):
        if a.dim() != 2 or g.dim() != 2 or a.shape[0] != g.shape[0]:
            raise _check.KernelInputError(
                f"expected a (B, d_in) and g (B, d_out) with one row per example; got "
                f"{tuple(a.shape)} and {tuple(g.shape)}: sequences go to gram_sqnorm or "
                "direct_sqnorm"
            )
        _check.check_operands(a[:, None], g[:, None])
    batch, d_in, d_out = a1.shape[0], a1.shape[1], g1.shape[1]
    widest = max(d_in, d_out)
    architecture = _check.architecture(a1.device)
    config = config or _streaming.choose_rank_one(widest, a1.element_size())
    row_blocks = _config.cdiv(batch, config.rows)
    steps = max(1, _config.cdiv(widest, config.inner))
    # a long row is shared by several programs, so that few rows still fill the machine
    splits = min(steps, splits or _config.choose_row_splits(row_blocks, steps, architecture))
    features_per_split = _config.cdiv(steps, splits) * config.inner
    splits = max(1, _config.cdiv(widest, features_per_split))
    launch = None
    if batch:
        launch = Launch(
            kernel,
            row_blocks * splits,
            *a1.stride(),
            *g1.stride(),
            *a2.stride(),
            *g2.stride(),
            batch,
            d_in,
            d_out,
            splits,
            features_per_split,
            PAIRED=paired,
            ROWS=config.rows,
            INNER=config.inner,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
    return (2, batch, splits), launch
