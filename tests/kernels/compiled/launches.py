"""What every launcher launches, recorded on meta tensors for one configuration."""

from __future__ import annotations

import dataclasses
from unittest import mock

import torch
from gradstats.kernels import (
    _check,
    _config,
    _order,
    _patches,
    _row_sums,
    _runs,
    _streaming,
    _tile,
    convolution,
    convolution_gram,
    convolution_pair_gram,
    convolution_pairs,
    convolution_weight_gradient,
    depthwise,
    diagonal,
    direct,
    direction,
    finish,
    gram,
    group_norm,
    guard,
    layer_norm,
    means,
    pairwise,
    pairwise_direct,
    rank_one,
    rows,
    rows_direction,
    rows_inner,
    rows_pairs,
    scale,
    scale_backward,
    scale_gradients,
    statistics,
    tied,
    vector,
    weight_gradient,
)

from tests.kernels.compiled import aot
from tests.kernels.compiled.cases import Case
from tests.kernels.reference import ROUNDING

ALIGNED, UNALIGNED = 1024, 1001
DTYPES = {"half": torch.bfloat16, "ieee": torch.float32, "tf32x3": torch.float32}
DTYPES["tf32"] = torch.float32


MODULES = (
    rank_one,
    vector,
    gram,
    guard,
    diagonal,
    direct,
    weight_gradient,
    pairwise,
    pairwise_direct,
    direction,
    finish,
    layer_norm,
    group_norm,
    statistics,
    means,
    scale,
    _order,
    rows,
    rows_direction,
    rows_inner,
    rows_pairs,
    _row_sums,
    _runs,
    tied,
    convolution,
    convolution_gram,
    convolution_pair_gram,
    convolution_pairs,
    convolution_weight_gradient,
    depthwise,
)
DEVICE_FUNCTIONS = (_tile, _patches)


def factor(dtype, aligned, layout, batch=8, positions=1024):
    """(a, g, cu_seqlens, max_seqlen) on the meta device, where allocation and launch cost nothing.

    Layout: "dense", "ragged", or "transposed" (features outermost, so positions are adjacent).
    """
    features = ALIGNED if aligned else UNALIGNED
    shape = (batch, positions, features)
    if layout == "transposed":
        a = torch.empty((batch, features, positions), dtype=dtype, device="meta").mT
        return a, a.clone(memory_format=torch.preserve_format), None, None
    a, g = (torch.empty(shape, dtype=dtype, device="meta") for _ in range(2))
    if layout == "dense":
        return a, g, None, None
    cu_seqlens = torch.empty(batch + 1, dtype=torch.int32, device="meta")
    return a.flatten(0, 1), g.flatten(0, 1), cu_seqlens, positions


def positions_adjacent(*operands):
    """The same (B, T, d) as images whose channels come first have them."""
    return tuple(operand.mT.contiguous().mT for operand in operands)


def of(case: Case) -> list[aot.Launch]:
    """The launches of one case."""
    dtype = DTYPES[case.kind]
    return launches(case.operation, case.config, dtype, case.aligned, case.layout)


def launches(
    operation: str,
    config: _config.TileConfig,
    dtype: torch.dtype,
    aligned: bool,
    layout: str = "dense",
) -> list[aot.Launch]:
    """The launches of `operation` with every optional output that its kernel can have."""
    a, g, cu_seqlens, max_seqlen = factor(dtype, aligned, layout)
    one = {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen, "config": config}
    two = {f"{name}{index}": one[name] for name in ("cu_seqlens", "max_seqlen") for index in (1, 2)}
    two["config"] = config
    with (
        aot.recorded(*MODULES) as recorded,
        mock.patch.object(_check, "_runs_here", lambda device: True),
    ):
        if operation.startswith("rank_one"):
            a, g = (operand.flatten(0, -2) for operand in (a, g))
            rank_one.rank_one_sqnorm(a, g, config=config)
        elif operation == "vector":
            vector.vector_sqnorm(g, **one)
            vector.vector_sum(g, **one)
        elif operation.startswith(("convolution", "depthwise")):
            convolution_launches(operation, config, dtype, aligned, layout)
        elif operation in ("rows", "runs", "run_sums", "long_run_sums", "rows_pairs", "tied"):
            ids = torch.empty(g.shape[:-1], dtype=torch.int64, device="meta")
            if operation == "rows_pairs":
                rows_pairs.pairwise_rows(ids, g, ids, g, splits=1, **two)
            elif operation.endswith("run_sums"):
                segments = _check.check_rows(ids, g, cu_seqlens, max_seqlen)
                width = 16 * _config.cdiv(g.shape[-1], 16)
                _runs.sort_rows(ids, g, segments).sums(0, width, config)
            elif operation == "tied":
                tied.tied_inner(g, a, ids, g, **two)
            elif operation == "runs":
                for longest in (0, 10**6):
                    rows.rows_sqnorm(ids, g, longest_compared=longest, **one)
            else:
                rows_inner.rows_inner(ids, g, ids.int(), g, **two)
                rows_direction.rows_direction(ids, g, g.flatten(0, -2), **one)
        elif operation == "layer_norm":
            width = config.columns if aligned else config.columns - 7
            shape = (*a.shape[:-1], width)
            x, g = (torch.empty(shape, dtype=dtype, device="meta") for _ in range(2))
            weight = torch.empty(width, dtype=dtype, device="meta")
            for rms in (False, True):
                layer_norm.layer_norm_sqnorm(x, g, 1e-5, rms=rms, splits=1, **one)
            layer_norm.layer_norm_sum(x, g, 1e-5, splits=4, **one)
            layer_norm.layer_norm_backward(x, g, weight, 1e-5, splits=1, **one)
        elif operation.startswith("group_norm"):
            group_norm_launches(operation, config, dtype, aligned, layout)
        elif operation in ("scale", "scale_positions_adjacent"):
            if operation == "scale_positions_adjacent" and layout == "dense":
                a, g = (operand.transpose(1, 2) for operand in (a, g))
            scale_launches(a, g, one)
        elif operation == "scale_one_position":
            statistics.row_statistics(a, 1e-5, False)
            if layout == "dense":
                wide_launches(a, g, config)
        elif operation == "gram":
            gram.gram_sqnorm(a, g, 1, *ROUNDING, **one)
            if layout == "dense":
                gram.gram_sqnorm(*positions_adjacent(a, g), 1, *ROUNDING, **one)
            diagonal.diagonal_gram(a, g, a, g, **two)
        elif operation == "direct":
            direct.direct_sqnorm(a, g, **one)
            if layout == "dense":
                direct.direct_sqnorm(*positions_adjacent(a, g), **one)
            one["direct_config"] = one.pop("config")
            gram.gram_sqnorm(a, g, 1, *ROUNDING, **one)
            if layout == "dense":
                gram.gram_sqnorm(*positions_adjacent(a, g), 1, *ROUNDING, **one)
        elif operation == "diagonal":
            direct.direct_inner(a, g, a, g, **two)
        elif operation == "weight_gradient":
            weight_gradient.weight_gradient_sqnorm(a, g, splits=1, **one)
            weight_gradient.weight_gradient_sqnorm(a, g, splits=4, **one)
        elif operation == "weight_gradient_descriptor":
            weight_gradient.weight_gradient_sqnorm(a, g, splits=1, descriptors=True, **one)
        elif operation == "pairwise":
            pairwise.pairwise_gram(a, g, a, g, splits=1, **two)
            if layout == "dense":
                short = a[:, :5], g[:, :5]
                pairwise.pairwise_gram(*short, *short, splits=1, **two)
        elif operation == "example_tiles":
            pairwise_direct.pairwise_direct(a, g, a, g, workspace=2**40, **two)
        elif operation == "direction":
            weight = torch.empty((g.shape[-1], a.shape[-1]), dtype=dtype, device="meta")
            direction.direction_inner(a, g, weight, **one)
        else:
            raise AssertionError(operation)
    return [each for each in recorded if takes_tile(operation, each)]


def takes_tile(operation, launch):
    """Whether a launch has the tile of the operation: Gram forms have two, for two operations."""
    name = launch.kernel.fn.__name__
    if operation in ("gram", "convolution_gram"):
        return not name.endswith("recompute_kernel")
    return operation not in ("direct", "convolution") or not name.endswith("gram_kernel")


def scale_launches(x, g, one):
    """Norms alone, whole backwards of scales, of shifts and of both, products with a direction."""
    channels = torch.empty(x.shape[-1], device="meta")
    weight = torch.empty(x.shape[-1], dtype=x.dtype, device="meta")
    scale_gradients.scale_sum(x, g, splits=4, **one)
    whole = scale_backward.scale_backward
    norms_alone = {"input_gradient": False, "sums": False}
    whole(g, x, mean=channels, rstd=channels, splits=1, **norms_alone, **one)
    whole(g, x, weight=weight, mean=channels, rstd=channels, splits=1, **one)
    whole(g, x, weight=weight, shift=False, splits=1, **one)
    # under autocast a scale in float32 widens its half-precision input
    whole(g.float(), x, weight=weight.float(), shift=False, splits=1, **one)
    whole(g, None, input_gradient=False, splits=1, **one)
    scale_gradients.scale_direction(g, x, weight, **one)


def wide_launches(x, g, config):
    """Rows and groups that no program holds, and scales of one position."""
    weight = torch.empty(x.shape[-1], dtype=x.dtype, device="meta")
    statistics.group_statistics(x.transpose(1, 2), 16, 1e-5)
    with mock.patch.multiple(layer_norm, WIDEST=0), mock.patch.multiple(group_norm, WIDEST=0):
        layer_norm.layer_norm_sqnorm(x, g, 1e-5, rms=True)
        for rms in (False, True):
            layer_norm.layer_norm_backward(x, g, weight, 1e-5, rms=rms)
        group_norm.group_norm_backward(x, g, weight, 1, 1e-5)
    one = {"config": config, "splits": 1}
    scale_backward.scale_backward(g[:, :1], x[:, :1], weight=weight, shift=False, **one)
    scale_backward.scale_backward(g[:, :1], None, input_gradient=False, sums=False, **one)


def group_norm_launches(operation, config, dtype, aligned, layout):
    """Groups of few and many channels that fill a tile, or nearly, or three tiles. Layout: channels
    last, or "first"."""
    vectors, _ = _streaming.tiles("group_norm_walked")
    # what is not aligned still has vectors of two where the tile is for vectors
    less = 0 if aligned else 2 if config == vectors else 1
    tiles = 1 if operation == "group_norm" else 3
    widths = (1, 8, 64, min(config.inner, group_norm.WIDEST))
    if operation == "group_norm_wide":
        widths = (_streaming.MANY_CHANNELS, *widths[2:])
    for columns in widths:
        tile = dataclasses.replace(config, columns=columns, inner=config.inner // columns)
        width, positions = (max(size - less, 1) for size in (columns, tile.inner * tiles))
        x, g = (torch.empty((8, positions, 4 * width), dtype=dtype, device="meta") for _ in "xg")
        if layout == "first":
            x, g = (side.mT.contiguous().mT for side in (x, g))
        walked = operation == "group_norm_walked"
        if walked and config == vectors and group_norm.adjacent(width, x) == (1, 1):
            continue
        weight = torch.empty(4 * width, dtype=dtype, device="meta")
        group_norm.group_norm_backward(x, g, weight, 4, 1e-5, config=tile)
        group_norm.group_norm_backward(x, g, None, 4, 1e-5, sums=False, config=tile)


def convolution_launches(operation, config, dtype, aligned, layout):
    """Channels last where aligned, else first.

    Layout: "dense", "stem" with three channels, or "grouped" with eight in each group.
    """
    format_ = torch.channels_last if aligned else torch.contiguous_format
    channels = 3 if layout == "stem" else 128
    x, g = (
        torch.empty((8, count, 28, 28), dtype=dtype, device="meta").to(memory_format=format_)
        for count in (channels, 128)
    )
    groups = 128 if operation.startswith("depthwise") else 16 if layout == "grouped" else 1
    layer = ((3, 3), (1, 1), (1, 1), (1, 1), groups)
    with mock.patch.object(_patches.Convolution, "arranged", lambda self: self):
        tiled_convolution_launches(operation, config, layout, x, g, layer)


def tiled_convolution_launches(operation, config, layout, x, g, layer):
    """What takes the table's tiles."""
    channels = x.shape[1]
    if layout == "grouped":
        convolution.convolution_sqnorm(x, g, *layer, config=config)
        convolution_gram.convolution_gram_sqnorm(x, g, *layer, *ROUNDING, direct_config=config)
        return
    if operation == "convolution_gram":
        convolution_gram.convolution_gram_sqnorm(x, g, *layer, *ROUNDING, config=config)
        checked = _patches.check_convolution(x, g, *layer)
        largest = convolution_pair_gram.largest_tile(checked, checked)
        if config.rows <= largest:
            config = dataclasses.replace(config, inner=min(config.inner, largest))
            pair_gram_launches(x, g, layer, config)
        return
    if operation.startswith("depthwise"):
        convolution_weight_gradient.convolution_weight_gradient_sqnorm(
            x, g, *layer, config=config, splits=1
        )
    if operation != "convolution":
        convolution.convolution_inner(x, g, x, g, *layer, config=config)
    if operation != "convolution_fused":
        convolution.convolution_sqnorm(x, g, *layer, config=config)
    if operation == "convolution":
        convolution_gram.convolution_gram_sqnorm(x, g, *layer, *ROUNDING, direct_config=config)
    if operation != "convolution_fused" and layout == "dense":
        shape = (128, 1 if layer[-1] > 1 else channels, 3, 3)
        weight = torch.empty(shape, dtype=x.dtype, device="meta")
        convolution.convolution_direction(x, g, weight, *layer, config=config)
        convolution_pairs.pairwise_convolution(x, g, x, g, *layer, workspace=2**40, config=config)


def pair_gram_launches(x, g, layer, config):
    """Products of patches, of equal indices and of all pairs, also of several examples to a tile:
    a kernel of 3 x 3 has 3 x 3 positions over 5 x 5."""
    pairwise = convolution_pair_gram.pairwise_convolution_gram
    convolution_pair_gram.convolution_inner_gram(x, g, x, g, *layer, config=config)
    pairwise(x, g, x, g, *layer, config=config)
    few = x[:, :, :5, :5], g[:, :, :3, :3]
    pairwise(*few, *few, *layer[:2], (0, 0), *layer[3:], config=config)
