"""Convolutions, embeddings and norm layers: their operands, and the kernels beside their rivals.

Rivals: the backend's own backward alone, unfolded patches multiplied example by example, and vmap
of a gradient. `bench_layer_kernels` times them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import torch
from torch.nn import functional

from benchmarks.kernel_harness import ROUNDING, Operands, Provider

EPS = 1e-5


@dataclasses.dataclass(frozen=True)
class Layer:
    """A named layer: what kind, how many examples, and its sizes.

    Convolution: (channels, outputs, image side, kernel side, stride, padding, groups).
    Norm layer: (positions, features); with groups: (positions, channels, groups).
    Scale: (positions, features), x ∘ w + b as hand-written norms, LayerScale and biases have it.
    Embedding: (positions, width, rows of the table).
    """

    name: str
    kind: str
    batch: int
    sizes: tuple[int, ...]


def operands(
    layer: Layer, dtype: torch.dtype, seed: int, device: str = "cuda", channels_last: bool = False
) -> Operands:
    """(x, g, weight) of random data; ids stand in place of x for an embedding."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def random(*size):
        return torch.randn(size, generator=generator, device=device).to(dtype)

    if layer.kind == "convolution":
        channels, outputs, side, kernel, stride, padding, groups = layer.sizes
        out = (side + 2 * padding - kernel) // stride + 1
        x, g = random(layer.batch, channels, side, side), random(layer.batch, outputs, out, out)
        if channels_last:
            x, g = (each.to(memory_format=torch.channels_last) for each in (x, g))
        return x, g, random(outputs, channels // groups, kernel, kernel)
    positions, features, *rest = layer.sizes
    g = random(layer.batch, positions, features)
    if layer.kind == "embedding":
        # frequencies fall with rank, as words do
        share = torch.rand(layer.batch, positions, generator=generator, device=device)
        ids = (rest[0] ** share).long() - 1
        return ids, g, random(rest[0], features)
    x = random(layer.batch, positions, features)
    if layer.kind in ("group_norm", "scale_first"):
        x, g = (each.mT.contiguous().mT for each in (x, g))
    return x, g, random(features)


def providers(layer: Layer, dtype: torch.dtype) -> Iterator[Provider]:
    """The kernels that serve this layer, beside what they compete with."""
    size = torch.empty((), dtype=dtype).element_size()
    if layer.kind == "convolution":
        yield from _convolution(layer, size)
    elif layer.kind == "embedding":
        yield from _embedding(layer, size)
    elif layer.kind.startswith("scale"):
        yield from _scale(layer, size)
    else:
        yield from _norm_layer(layer, size)


def _convolution(layer: Layer, size: int) -> Iterator[Provider]:
    from gradstats.kernels import (
        convolution,
        convolution_gram,
        convolution_pair_gram,
        convolution_pairs,
    )
    from gradstats.kernels.convolution_weight_gradient import convolution_weight_gradient_sqnorm

    channels, outputs, side, kernel, stride, padding, groups = layer.sizes
    out = (side + 2 * padding - kernel) // stride + 1
    positions, weights = out * out, outputs * (channels // groups) * kernel**2
    own = ([kernel] * 2, [stride] * 2, [padding] * 2, [1, 1], groups)
    read = size * layer.batch * (channels * side**2 + outputs * positions)
    product = 2.0 * layer.batch * positions * weights

    def native(x, g, w):
        return torch.ops.aten.convolution_backward(
            g, x, w, None, own[1], own[2], own[3], False, [0, 0], groups, [False, True, False]
        )[1]

    def exact(x, g, w):
        each = zip(x.split(1), g.split(1), strict=True)
        return torch.stack([native(a, b, w).square().sum() for a, b in each])

    def exact_direction(x, g, w):
        y = functional.conv2d(x, w, None, stride, padding, 1, groups)
        return (y * g).sum((1, 2, 3))

    def loss(w, x, g):
        y = functional.conv2d(x[None], w, None, stride, padding, 1, groups)
        return (y * g[None]).sum()

    per_example = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))

    yield Provider(
        "direct", "gradstats", lambda x, g, w: convolution.convolution_sqnorm(x, g, *own),
        product, read, exact,
    )  # fmt: skip
    if positions <= 1024 and groups == 1:
        yield Provider(
            "gram", "gradstats",
            lambda x, g, w: convolution_gram.convolution_gram_sqnorm(x, g, *own, *ROUNDING),
            layer.batch * positions * (positions + 1.0) * (weights / outputs + outputs), read,
            exact, lambda result: result[0],
        )  # fmt: skip
    if groups == 1 and size * layer.batch * positions * channels * kernel**2 < 16 * 2**30:

        def unfolded(x, g, w):
            patches = functional.unfold(x, kernel, 1, padding, stride)
            return (g.flatten(2) @ patches.mT).float().square().sum((1, 2))

        yield Provider("direct", "unfold and bmm", unfolded, product, read, exact)
    if 4 * layer.batch * weights < 16 * 2**30:
        yield Provider(
            "direct", "vmap",
            lambda x, g, w: per_example(w, x, g).float().flatten(1).square().sum(1),
            product, read, exact,
        )  # fmt: skip
    yield Provider("weight_gradient", "cudnn", native, product, read + size * weights)
    if channels == groups:
        yield Provider(
            "weight_gradient", "gradstats",
            lambda x, g, w: convolution_weight_gradient_sqnorm(x, g, *own),
            product, read + size * weights, exact, lambda result: result[1],
        )  # fmt: skip
    yield Provider(
        "direction", "gradstats",
        lambda x, g, w: convolution.convolution_direction(x, g, w, *own),
        product, read, exact_direction,
    )  # fmt: skip
    if weights * layer.batch * 4 < 2**31:
        yield Provider(
            "pairwise", "gradstats",
            lambda x, g, w: convolution_pairs.pairwise_convolution(x, g, x, g, *own),
            product + 2.0 * layer.batch**2 * weights, read, exact, lambda result: result.diagonal(),
        )  # fmt: skip
    if positions <= 64 and groups == 1:
        yield Provider(
            "pairwise", "gradstats gram",
            lambda x, g, w: convolution_pair_gram.pairwise_convolution_gram(x, g, x, g, *own),
            2.0 * (layer.batch * positions) ** 2 * (weights / outputs + outputs), read,
            exact, lambda result: result.diagonal(),
        )  # fmt: skip


def _embedding(layer: Layer, size: int) -> Iterator[Provider]:
    from gradstats.kernels import operators, rows, rows_direction, rows_pairs

    positions, width, table = layer.sizes
    read = layer.batch * positions * (size * width + 8)

    def exact(ids, g, w):
        return operators.rows_sqnorm(ids.cpu(), g.cpu()).to(g.device)

    for name, longest in (("gradstats compared", 10**6), ("gradstats sorted", 0)):
        yield Provider(
            "norms", name,
            lambda ids, g, w, longest=longest: rows.rows_sqnorm(ids, g, longest_compared=longest),
            0.0, read, exact,
        )  # fmt: skip

    def native(ids, g, w):
        return torch.ops.aten.embedding_dense_backward(g, ids, table, -1, False)

    def gram(ids, g, w):
        same_id = ids[:, :, None] == ids[:, None, :]
        return ((g @ g.mT) * same_id).sum((1, 2), dtype=torch.float32)

    yield Provider("norms", "backward alone", native, 0.0, read + size * table * width)
    yield Provider("norms", "opacus formula", gram, 0.0, read, exact)
    yield Provider(
        "direction", "gradstats", lambda ids, g, w: rows_direction.rows_direction(ids, g, w),
        0.0, 2.0 * read, lambda ids, g, w: (g * functional.embedding(ids, w)).sum((1, 2)),
    )  # fmt: skip
    yield Provider(
        "pairwise", "gradstats", lambda ids, g, w: rows_pairs.pairwise_rows(ids, g, ids, g),
        0.0, read, exact, lambda result: result.diagonal(),
    )  # fmt: skip


def _norm_layer(layer: Layer, size: int) -> Iterator[Provider]:
    from gradstats.kernels import group_norm, layer_norm

    features = layer.sizes[1]
    elements = float(layer.batch * math.prod(layer.sizes[:2]))
    rms = layer.kind == "rms_norm"

    def normalised(x):
        if layer.kind == "group_norm":
            return functional.group_norm(x.mT, layer.sizes[2], eps=EPS).mT
        function = functional.rms_norm if rms else functional.layer_norm
        return function(x, (features,), eps=EPS)

    def exact(x, g, w):
        return (normalised(x) * g).sum(1).square().sum(1)

    def first(result):
        return result[0]

    def native(x, g, w):
        if layer.kind != "layer_norm":
            leaf = x.detach().requires_grad_()
            with torch.enable_grad():
                y = normalised(leaf) * w
            return torch.autograd.grad(y, leaf, g)[0]
        y, mean, rstd = torch.ops.aten.native_layer_norm(x, (features,), w, w, EPS)
        return torch.ops.aten.native_layer_norm_backward(
            g, x, (features,), mean, rstd, w, w, [True, True, True]
        )[0]

    if layer.kind == "group_norm":
        yield Provider(
            "norms", "gradstats",
            lambda x, g, w: group_norm.group_norm_sqnorm(x, g, layer.sizes[2], EPS),
            0.0, 2 * size * elements, exact, first,
        )  # fmt: skip
        yield Provider(
            "backward", "gradstats",
            lambda x, g, w: group_norm.group_norm_backward(x, g, w, layer.sizes[2], EPS),
            0.0, 3 * size * elements, exact, lambda result: result[3],
        )  # fmt: skip
    else:
        yield Provider(
            "norms", "gradstats",
            lambda x, g, w: layer_norm.layer_norm_sqnorm(x, g, EPS, rms=rms),
            0.0, 2 * size * elements, exact, first,
        )  # fmt: skip
        yield Provider(
            "backward", "gradstats",
            lambda x, g, w: layer_norm.layer_norm_backward(x, g, w, EPS, rms=rms),
            0.0, 3 * size * elements, exact, lambda result: result[3],
        )  # fmt: skip
    yield Provider("backward", "forward and backward", native, 0.0, 5 * size * elements)
    yield Provider(
        "norms", "torch", lambda x, g, w: (normalised(x) * g).float().sum(1).square().sum(1),
        0.0, 2 * size * elements, exact,
    )  # fmt: skip


def _scale(layer: Layer, size: int) -> Iterator[Provider]:
    from gradstats.kernels import scale_backward, scale_gradients, vector

    whole = scale_backward.scale_backward
    read = size * float(layer.batch * math.prod(layer.sizes))

    def exact(x, g, w):
        return (x * g).sum(1).square().sum(1)

    def exact_shift(x, g, w):
        return g.sum(1).square().sum(1)

    def statistics(w):
        return {"mean": w.float() * 0, "rstd": w.float() * 0 + 1}

    yield Provider(
        "norms", "gradstats",
        lambda x, g, w: whole(g, x, shift=False, input_gradient=False, sums=False),
        0.0, 2 * read, exact, lambda result: result[3],
    )  # fmt: skip
    yield Provider(
        "backward", "gradstats", lambda x, g, w: whole(g, x, weight=w, shift=False),
        0.0, 3 * read, exact, lambda result: result[3],
    )  # fmt: skip
    yield Provider(
        "batch norm", "gradstats", lambda x, g, w: whole(g, x, weight=w, **statistics(w)),
        0.0, 3 * read, exact, lambda result: result[3],
    )  # fmt: skip
    yield Provider(
        "direction", "gradstats", lambda x, g, w: scale_gradients.scale_direction(g, x, w),
        0.0, 2 * read, lambda x, g, w: (x * g * w).sum((1, 2)),
    )  # fmt: skip
    yield Provider(
        "norms", "torch", lambda x, g, w: (x * g).float().sum(1).square().sum(1),
        0.0, 2 * read, exact,
    )  # fmt: skip
    yield Provider(
        "backward", "backward alone", lambda x, g, w: (g * w, (g * x).sum((0, 1)))[0],
        0.0, 3 * read,
    )  # fmt: skip
    yield Provider(
        "bias", "gradstats", lambda x, g, w: whole(g, None, input_gradient=False),
        0.0, read, exact_shift, lambda result: result[4],
    )  # fmt: skip
    yield Provider(
        "bias", "gradstats norms", lambda x, g, w: vector.vector_sqnorm(g),
        0.0, read, exact_shift,
    )  # fmt: skip
    yield Provider("bias", "backward alone", lambda x, g, w: g.sum((0, 1)), 0.0, read)
    yield Provider(
        "bias", "torch", lambda x, g, w: g.sum(1, dtype=torch.float32).square().sum(1),
        0.0, read, exact_shift,
    )  # fmt: skip
