"""Sample arguments for every registered operator."""

from __future__ import annotations

import torch

from tests.kernels.cases import random

# adding, products, cut_off and tolerance of Gram forms: nobody is suspect, or everybody
ROUNDINGS = ((0.5, 0.25, 1.0, 1e9), (0.5, 0.25, 1.0, 0.0))


def operator_samples(dtype, device="cpu"):
    """Yields (operator name, positional arguments, keyword arguments)."""
    a, g = random((3, 5, 18), dtype, device, 1), random((3, 5, 20), dtype, device, 2)
    # permuted strides: fakes must allocate contiguous results all the same
    a2 = random((18, 7, 4), dtype, device, 3).permute(2, 1, 0)
    g2 = random((4, 7, 20), dtype, device, 4)
    bounds = torch.tensor([1, 4, 4, 15], dtype=torch.int32, device=device)
    bounds2 = torch.tensor([0, 20, 28], dtype=torch.int32, device=device)
    packed = a.flatten(0, 1), g.flatten(0, 1)
    packed2 = a2.reshape(28, 18), g2.reshape(28, 20)
    segments = {"cu_seqlens": bounds, "max_seqlen": 11}
    two_segments = {"cu_seqlens1": bounds, "cu_seqlens2": bounds2}
    weight, bias = random((20, 18), dtype, device, 5), random((20,), dtype, device, 6)

    yield "rank_one_sqnorm", (a[:, 0], g[:, 0]), {}
    yield "vector_sqnorm", (g,), {}
    yield "vector_sqnorm", (packed[1],), segments
    yield "vector_sum", (g2,), {}
    yield "vector_sum", (packed[1],), segments
    for name in ("direct_sqnorm", "weight_gradient_sqnorm"):
        yield name, (a, g), {}
        yield name, (a2, g2), {}
        yield name, packed, segments
    yield "weight_gradient_sqnorm", (a, g), {"gradient_dtype": torch.float32}
    for rounding in ROUNDINGS:
        yield "gram_sqnorm", (a, g, 1, *rounding), {}
        yield "gram_sqnorm", (a2, g2, 2, *rounding), {}
        yield "gram_sqnorm", (*packed, 1, *rounding), segments
    for name in ("direct_inner", "diagonal_gram"):
        yield name, (a, g, a.flip(0), g.flip(1)), {}
        yield name, (*packed, *packed), {"cu_seqlens1": bounds, "cu_seqlens2": bounds}
    for name in ("pairwise_gram", "pairwise_direct"):
        yield name, (a, g, a2, g2), {}
        yield name, (*packed, *packed2), two_segments
    yield "pairwise_direct", (a, g, a2, g2), {"workspace": 1000}
    yield "direction_inner", (a, g, weight), {}
    yield "direction_inner", (*packed, weight), segments

    x = random((3, 5, 20), dtype, device, 7)
    rows = x.flatten(0, 1)
    mean, rstd = (random((20,), torch.float32, device, seed).abs() for seed in (8, 9))
    yield "scale_sum", (x, g), {}
    yield "scale_sum", (x, g, mean, rstd), {}
    yield "scale_sum", (g2.mT.contiguous().mT, g2), {}
    yield "scale_sum", (rows, packed[1]), segments
    yield "scale_backward", (g, x, bias, mean, rstd), {}
    yield "scale_backward", (g2, g2.mT.contiguous().mT, bias), {"shift": False}
    yield "scale_backward", (g, None), {"input_gradient": False}
    yield "scale_backward", (packed[1], rows), segments
    yield "scale_backward", (g, x, None, mean, rstd), {"sums": False}
    for x_or_none in (x, None):
        yield "scale_direction", (g, x_or_none, bias), {}
    yield "scale_direction", (packed[1], rows, bias), segments
    for name in ("group_norm_sqnorm", "group_norm_sum"):
        yield name, (x, g, 4, 1e-5), {}
        yield name, (x[:0], g[:0], 4, 1e-5), {}
    for name in ("layer_norm_sqnorm", "layer_norm_sum"):
        yield name, (x, g, 1e-5), {}
        yield name, (g2.mT.contiguous().mT, g2, 1e-5), {"rms": True}
        yield name, (rows, packed[1], 1e-5), segments
    for weight_or_none in (bias, None):
        yield "layer_norm_backward", (x, g, weight_or_none, 1e-5), {}
        yield "layer_norm_backward", (x, g, weight_or_none, 1e-5), {"rms": True}
        yield "group_norm_backward", (x, g, weight_or_none, 4, 1e-5), {}
        yield "group_norm_backward", (x.mT.contiguous().mT, g, weight_or_none, 20, 1e-5), {}
    yield "layer_norm_backward", (rows, packed[1], bias, 1e-5), segments
    yield "layer_norm_backward", (x, g, bias, 1e-5), {"sums": False}
    yield "group_norm_backward", (x, g, bias, 1, 1e-5), {"sums": False}
    narrow = {"gradient_dtype": torch.float16}
    yield "layer_norm_backward", (x, g, bias, 1e-5), narrow
    yield "group_norm_backward", (x, g, bias, 4, 1e-5), narrow
    yield "scale_backward", (g, None), narrow
    yield "scale_backward", (g, x), {"sums": False} | narrow

    ids = torch.tensor([[3, 1, 3, 0, 3], [2, 2, 2, 2, 2], [0, 1, 2, 3, 4]], device=device)
    ids2 = ids.flatten().repeat(2)[:28].view(4, 7).to(torch.int32)
    table = random((5, 20), dtype, device, 10)
    head = random((3, 7, 5), dtype, device, 11), random((3, 7, 20), dtype, device, 12)
    yield "rows_sqnorm", (ids, g), {}
    yield "rows_sqnorm", (ids.flatten(), packed[1]), segments
    yield "rows_direction", (ids, g, table), {}
    yield "rows_direction", (ids.flatten(), packed[1], table), segments
    yield "rows_inner", (ids, g, ids.flip(0).int(), g.flip(1)), {}
    yield "pairwise_rows", (ids, g, ids2, g2), {}
    yield "pairwise_rows", (ids.flatten(), packed[1], ids2.flatten(), packed2[1]), two_segments
    yield "tied_inner", (head[1], head[0], ids, g), {}
    both = {"cu_seqlens1": bounds, "cu_seqlens2": bounds}
    yield "rows_inner", (ids.flatten(), packed[1], ids.flatten(), packed[1]), both
    yield "tied_inner", (packed[1], random((15, 5), dtype, device), ids.flatten(), packed[1]), both

    yield from convolution_samples(dtype, device)


def convolution_samples(dtype, device):
    """One convolution of each kind: with groups, depthwise, in one and three dimensions."""
    layers = (
        ((4, 5, 4), (3, 2), (2, 1), (1, 0), (1, 2), 2, 6),
        ((3, 7), (3,), (1,), (1,), (1,), 3, 6),
        ((2, 3, 3, 3), (2, 3, 1), (1, 2, 1), (0, 1, 0), (1, 1, 2), 1, 3),
    )
    for size, *layer, outputs in layers:
        kernel, groups = layer[0], layer[-1]
        x = random((3, *size), dtype, device, 20)
        weight = random((outputs, size[0] // groups, *kernel), dtype, device, 21)
        positions = [
            (length + 2 * pad - spread * (taps - 1) - 1) // step + 1
            for length, taps, step, pad, spread in zip(size[1:], *layer[:4], strict=True)
        ]
        g = random((3, outputs, *positions), dtype, device, 22)
        x2, g2 = x.flip(0).movedim(1, -1).contiguous().movedim(-1, 1), g.flip(0)
        lists = [list(values) for values in layer[:4]]
        yield "convolution_sqnorm", (x, g, *lists, groups), {}
        for rounding in ROUNDINGS:
            yield "convolution_gram_sqnorm", (x2, g2, *lists, groups, *rounding), {}
        if groups == size[0]:
            yield "convolution_weight_gradient_sqnorm", (x, g, *lists, groups), {}
        yield "convolution_inner", (x, g, x2, g2, *lists, groups), {}
        yield "pairwise_convolution", (x, g, x2[:2], g2[:2], *lists, groups), {"workspace": 500}
        yield "convolution_inner_gram", (x, g, x2, g2, *lists, groups), {}
        yield "pairwise_convolution_gram", (x, g, x2[:2], g2[:2], *lists, groups), {}
        yield "convolution_direction", (x, g, weight, *lists, groups), {}
