"""One position per example: the weight gradient is g_i a_i^T, so its statistics factor."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from gradstats.kernels import _check, _config, _streaming
from gradstats.kernels._launching import Launch, launch_of, remembered
from gradstats.kernels._results import apart
from gradstats.kernels._tile import load_tile


@triton.jit(do_not_specialize=["batch", "splits"])
def rank_one_kernel(
    a_ptr,  # (B, d_in)
    g_ptr,  # (B, d_out)
    partial_ptr,  # fp64 (2, B, splits): partial squares of inputs, then of output gradients
    stride_ab,
    stride_ad,
    stride_gb,
    stride_gd,
    batch,
    d_in,
    d_out,
    splits,
    features_per_split,  # a multiple of INNER
    ROWS: tl.constexpr,
    INNER: tl.constexpr,
):
    """partial[0, b, s] = |a_b|^2 and partial[1, b, s] = |g_b|^2 over the s-th features."""
    index = tl.program_id(0)
    split = index % splits
    examples = (index // splits) * ROWS + tl.arange(0, ROWS)
    inner = tl.arange(0, INNER)
    start = tl.cast(split, tl.int64) * features_per_split
    output = partial_ptr + tl.cast(examples, tl.int64) * splits + split

    # sum over lanes once, at the end: a reduction inside the loop would stall every load
    squares = tl.zeros((ROWS, INNER), tl.float32)
    for feature in range(start, tl.minimum(start + features_per_split, d_in), INNER):
        a = load_tile(a_ptr, examples, stride_ab, batch, feature + inner, stride_ad, d_in)
        squares += a.to(tl.float32) * a.to(tl.float32)
    tl.store(output, tl.sum(squares, axis=1), mask=examples < batch)

    squares = tl.zeros((ROWS, INNER), tl.float32)
    for feature in range(start, tl.minimum(start + features_per_split, d_out), INNER):
        g = load_tile(g_ptr, examples, stride_gb, batch, feature + inner, stride_gd, d_out)
        squares += g.to(tl.float32) * g.to(tl.float32)
    output += tl.cast(batch, tl.int64) * splits
    tl.store(output, tl.sum(squares, axis=1), mask=examples < batch)


def rank_one_sqnorm(
    a: torch.Tensor,
    g: torch.Tensor,
    *,
    config: _config.TileConfig | None = None,
    splits: int | None = None,
) -> torch.Tensor:
    """Squared norms of the per-example weight gradients, one position per example.

    sqnorm_i = |a_i|^2 |g_i|^2

    Args:
        a: layer inputs (B, d_in), bf16, fp16 or fp32, any strides.
        g: gradients with respect to the outputs (B, d_out), same dtype and device.
        config: overrides the tile table.
        splits: overrides into how many parts the features are divided.
    Returns:
        fp64 (B,).
    Raises:
        KernelInputError: before any launch, for inputs that no kernel serves.
    Cost: one read of both operands, O(B (d_in + d_out)).
    Source: Goodfellow, arXiv 1510.01799.
    """
    return _plan(rank_one_kernel, (a, g), config, splits)(a, g)


def prepare(a: torch.Tensor, g: torch.Tensor) -> _Plan:
    """What `rank_one_sqnorm` does, for operands of the same layout."""
    return _plan(rank_one_kernel, (a, g), None, None)


class _Plan(NamedTuple):
    """All of a call but its tensors."""

    shape: tuple[int, int, int]  # of the partial results
    launch: Launch | None  # None where there are no examples

    def __call__(self, a: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        """Squared norms of operands of the plan's layout."""
        partial = torch.empty(self.shape, dtype=torch.float64, device=a.device)
        if self.launch is not None:
            self.launch(a, g, partial)
        inputs, outputs = apart(partial)
        return inputs * outputs


@remembered
def _plan(
    kernel: Any,
    operands: tuple[torch.Tensor, torch.Tensor],
    config: _config.TileConfig | None,
    splits: int | None,
) -> _Plan:
    a, g = operands
    if a.dim() != 2 or g.dim() != 2 or a.shape[0] != g.shape[0]:
        raise _check.KernelInputError(
            f"expected a (B, d_in) and g (B, d_out) with one row per example; got "
            f"{tuple(a.shape)} and {tuple(g.shape)}: sequences go to gram_sqnorm or "
            "direct_sqnorm"
        )
    _check.check_operands(a[:, None], g[:, None])
    batch, d_in, d_out = a.shape[0], a.shape[1], g.shape[1]
    widest = max(d_in, d_out)
    architecture = _check.architecture(a.device)
    config = config or _streaming.choose_rank_one(widest, a.element_size())
    row_blocks = _config.cdiv(batch, config.rows)
    steps = max(1, _config.cdiv(widest, config.inner))
    # several programs share a long row, so that few rows still fill the device
    splits = min(steps, splits or _config.choose_row_splits(row_blocks, steps, architecture))
    features_per_split = _config.cdiv(steps, splits) * config.inner
    splits = max(1, _config.cdiv(widest, features_per_split))
    launch = None
    if batch:
        launch = launch_of(
            kernel,
            row_blocks * splits,
            *a.stride(),
            *g.stride(),
            batch,
            d_in,
            d_out,
            splits,
            features_per_split,
            ROWS=config.rows,
            INNER=config.inner,
            **config.options,
        )
    return _Plan((2, batch, splits), launch)
