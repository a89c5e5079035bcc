"""The kernels as operators of torch, `torch.ops.gradstats.<name>`, for eager and compiled code.

Importing this module registers them. On CUDA they launch the Triton kernels, which are imported at
the first call; elsewhere they compute the same in plain torch. Operators have no autograd formula:
statistics are computed in the backward pass, beside the gradients.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable

import torch
from gradstats.kernels import _config, _reference
from torch import Tensor

SEGMENTS = "Tensor? cu_seqlens=None, SymInt? max_seqlen=None"
TWO_SEGMENTS = (
    "Tensor? cu_seqlens1=None, Tensor? cu_seqlens2=None, "
    "SymInt? max_seqlen1=None, SymInt? max_seqlen2=None"
)
TWO_FACTORS = f"Tensor a1, Tensor g1, Tensor a2, Tensor g2, {TWO_SEGMENTS}"
TWO_ROWS = f"Tensor ids1, Tensor g1, Tensor ids2, Tensor g2, {TWO_SEGMENTS}"
LAYER = (
    "SymInt[] kernel, SymInt[] stride, SymInt[] padding, SymInt[] dilation, SymInt groups,"
    " str? precision=None"
)
WORKSPACE = f"SymInt workspace={_config.WORKSPACE}"
TWO_IMAGES = "Tensor x1, Tensor g1, Tensor x2, Tensor g2"

SCHEMAS = {
    "rank_one_sqnorm": "(Tensor a, Tensor g) -> (Tensor, Tensor)",
    "rank_one_inner": "(Tensor a1, Tensor g1, Tensor a2, Tensor g2) -> (Tensor, Tensor)",
    "vector_sqnorm": f"(Tensor v, {SEGMENTS}) -> Tensor",
    "vector_sum": f"(Tensor v, {SEGMENTS}) -> Tensor",
    "vector_inner": f"(Tensor v1, Tensor v2, {SEGMENTS}) -> Tensor",
    "gram_sqnorm": (
        f"(Tensor a, Tensor g, {SEGMENTS}, str? precision=None) -> (Tensor, Tensor, Tensor)"
    ),
    "direct_sqnorm": (
        f"(Tensor a, Tensor g, {SEGMENTS}, str? precision=None, Tensor? chosen=None) -> Tensor"
    ),
    "direct_inner": f"({TWO_FACTORS}, str? precision=None) -> Tensor",
    "diagonal_gram": (f"({TWO_FACTORS}, bool bias=False, str? precision=None) -> (Tensor, Tensor)"),
    "weight_gradient_sqnorm": (
        f"(Tensor a, Tensor g, {SEGMENTS}, str? precision=None, ScalarType? gradient_dtype=None,"
        " bool descriptors=False) -> (Tensor, Tensor)"
    ),
    "pairwise_gram": f"({TWO_FACTORS}, bool bias=False, str? precision=None) -> Tensor",
    "pairwise_direct": (
        f"({TWO_FACTORS}, bool bias=False, str? precision=None, {WORKSPACE}) -> Tensor"
    ),
    "direction_inner": (
        f"(Tensor a, Tensor g, Tensor direction, Tensor? bias_direction=None, {SEGMENTS},"
        " str? precision=None) -> Tensor"
    ),
    "scale_sqnorm": (
        f"(Tensor x, Tensor g, Tensor? mean=None, Tensor? rstd=None, {SEGMENTS})"
        " -> (Tensor, Tensor)"
    ),
    "scale_sum": (
        f"(Tensor x, Tensor g, Tensor? mean=None, Tensor? rstd=None, {SEGMENTS})"
        " -> (Tensor, Tensor)"
    ),
    "scale_backward": (
        "(Tensor g, Tensor? x, Tensor? weight=None, Tensor? mean=None, Tensor? rstd=None,"
        f" bool shift=True, bool input_gradient=True, bool sums=True, {SEGMENTS})"
        " -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
    "scale_direction": f"(Tensor g, Tensor? x, Tensor direction, {SEGMENTS}) -> Tensor",
    "group_norm_sqnorm": "(Tensor x, Tensor g, SymInt groups, float eps) -> (Tensor, Tensor)",
    "group_norm_sum": "(Tensor x, Tensor g, SymInt groups, float eps) -> (Tensor, Tensor)",
    "layer_norm_sqnorm": (
        f"(Tensor x, Tensor g, float eps, bool rms=False, {SEGMENTS}) -> (Tensor, Tensor)"
    ),
    "layer_norm_sum": (
        f"(Tensor x, Tensor g, float eps, bool rms=False, {SEGMENTS}) -> (Tensor, Tensor)"
    ),
    "layer_norm_backward": (
        "(Tensor x, Tensor g, Tensor? weight, float eps, bool rms=False, bool sums=True,"
        f" {SEGMENTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
    "group_norm_backward": (
        "(Tensor x, Tensor g, Tensor? weight, SymInt groups, float eps, bool sums=True)"
        " -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
    "rows_sqnorm": f"(Tensor ids, Tensor g, {SEGMENTS}, SymInt? padding_idx=None) -> Tensor",
    "rows_inner": f"({TWO_ROWS}, SymInt? padding_idx=None) -> Tensor",
    "pairwise_rows": f"({TWO_ROWS}, SymInt? padding_idx=None, str? precision=None) -> Tensor",
    "rows_direction": (
        f"(Tensor ids, Tensor g, Tensor direction, {SEGMENTS}, SymInt? padding_idx=None) -> Tensor"
    ),
    "tied_inner": (
        f"(Tensor a, Tensor g, Tensor ids, Tensor rows, {TWO_SEGMENTS},"
        " SymInt? padding_idx=None, str? precision=None) -> Tensor"
    ),
    "convolution_sqnorm": f"(Tensor x, Tensor g, {LAYER}, Tensor? chosen=None) -> Tensor",
    "convolution_gram_sqnorm": f"(Tensor x, Tensor g, {LAYER}) -> (Tensor, Tensor, Tensor)",
    "convolution_weight_gradient_sqnorm": (
        f"(Tensor x, Tensor g, {LAYER}, ScalarType? gradient_dtype=None) -> (Tensor, Tensor)"
    ),
    "convolution_inner": f"({TWO_IMAGES}, {LAYER}) -> Tensor",
    "pairwise_convolution": f"({TWO_IMAGES}, {LAYER}, {WORKSPACE}) -> Tensor",
    "convolution_inner_gram": f"({TWO_IMAGES}, {LAYER}) -> (Tensor, Tensor)",
    "pairwise_convolution_gram": f"({TWO_IMAGES}, {LAYER}) -> Tensor",
    "convolution_direction": f"(Tensor x, Tensor g, Tensor direction, {LAYER}) -> Tensor",
}

# the module that holds each operator's launcher, and how many arguments it takes by position
LAUNCHERS = {
    "rank_one_sqnorm": ("rank_one", 2),
    "rank_one_inner": ("rank_one", 4),
    "vector_sqnorm": ("vector", 1),
    "vector_sum": ("vector", 1),
    "vector_inner": ("vector", 2),
    "gram_sqnorm": ("gram", 2),
    "direct_sqnorm": ("direct", 2),
    "direct_inner": ("direct", 4),
    "diagonal_gram": ("diagonal", 4),
    "weight_gradient_sqnorm": ("weight_gradient", 2),
    "pairwise_gram": ("pairwise", 4),
    "pairwise_direct": ("pairwise_direct", 4),
    "direction_inner": ("direction", 3),
    "scale_sqnorm": ("scale", 2),
    "scale_sum": ("scale", 2),
    "scale_backward": ("scale_backward", 2),
    "scale_direction": ("scale_backward", 3),
    "group_norm_sqnorm": ("group_norm", 4),
    "group_norm_sum": ("group_norm", 4),
    "layer_norm_sqnorm": ("layer_norm", 3),
    "layer_norm_sum": ("layer_norm", 3),
    "layer_norm_backward": ("layer_norm", 4),
    "group_norm_backward": ("group_norm", 5),
    "rows_sqnorm": ("rows", 2),
    "rows_inner": ("rows", 4),
    "rows_direction": ("rows_direction", 3),
    "pairwise_rows": ("rows_pairs", 4),
    "tied_inner": ("tied", 4),
    "convolution_sqnorm": ("convolution", 7),
    "convolution_gram_sqnorm": ("convolution_gram", 7),
    "convolution_weight_gradient_sqnorm": ("convolution_weight_gradient", 7),
    "convolution_inner": ("convolution", 9),
    "pairwise_convolution": ("convolution_pairs", 9),
    "convolution_inner_gram": ("convolution_pair_gram", 9),
    "pairwise_convolution_gram": ("convolution_pair_gram", 9),
    "convolution_direction": ("convolution", 8),
}


def _launch(name: str, module: str, leading: int) -> Callable:
    """The CUDA implementation of an operator: its launcher, imported at the first call."""

    def implementation(*args, **kwargs):
        try:
            launcher = getattr(importlib.import_module(f"gradstats.kernels.{module}"), name)
        except ImportError as error:
            raise RuntimeError(
                f"gradstats::{name} on CUDA needs triton, which cannot be imported ({error}): "
                "install triton>=3.6, or choose the PyTorch backend"
            ) from error
        # launchers take everything after the operands by name
        named = dict(zip(_argument_names(name)[leading:], args[leading:], strict=False))
        device = args[0].device
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            # a launch goes to the current device, wherever its operands lie
            with torch.cuda.device(device):
                return launcher(*args[:leading], **named, **kwargs)
        return launcher(*args[:leading], **named, **kwargs)

    return implementation


@functools.cache
def _argument_names(name: str) -> list[str]:
    schema = getattr(torch.ops.gradstats, name).default._schema
    return [argument.name for argument in schema.arguments]


def _batch(operand: Tensor, cu_seqlens: Tensor | None) -> int:
    return operand.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def _per_example(operand: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    dtype = _reference.result_dtype(operand)
    return operand.new_empty((_batch(operand, cu_seqlens),), dtype=dtype)


def _per_channel(operand: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    shape = (_batch(operand, cu_seqlens), operand.shape[-1])
    return operand.new_empty(shape, dtype=_reference.result_dtype(operand))


def _fake_rank_one_sqnorm(a, g):
    return _per_example(a), _per_example(a)


def _fake_rank_one_inner(a1, g1, a2, g2):
    return _per_example(a1), _per_example(a1)


def _fake_vector_sqnorm(v, cu_seqlens=None, max_seqlen=None):
    return _per_example(v, cu_seqlens)


def _fake_vector_sum(v, cu_seqlens=None, max_seqlen=None):
    return _per_channel(v, cu_seqlens)


def _fake_vector_inner(v1, v2, cu_seqlens=None, max_seqlen=None):
    return _per_example(v1, cu_seqlens)


def _fake_gram_sqnorm(a, g, cu_seqlens=None, max_seqlen=None, precision=None):
    return _per_example(a, cu_seqlens), _per_example(a, cu_seqlens), _per_example(a, cu_seqlens)


def _fake_direct_sqnorm(a, g, cu_seqlens=None, max_seqlen=None, precision=None, chosen=None):
    return _per_example(a, cu_seqlens)


def _fake_direct_inner(a1, g1, a2, g2, cu_seqlens1=None, *rest, **options):
    return _per_example(a1, cu_seqlens1)


def _fake_diagonal_gram(a1, g1, a2, g2, cu_seqlens1=None, *rest, **options):
    return _per_example(a1, cu_seqlens1), _per_example(a1, cu_seqlens1)


def _fake_weight_gradient_sqnorm(
    a,
    g,
    cu_seqlens=None,
    max_seqlen=None,
    precision=None,
    gradient_dtype=None,
    descriptors=False,
):
    shape = (g.shape[-1], a.shape[-1])
    gradient = a.new_empty(shape, dtype=gradient_dtype or a.dtype)
    return gradient, _per_example(a, cu_seqlens)


def _fake_pairwise(a1, g1, a2, g2, cu_seqlens1=None, cu_seqlens2=None, *rest, **options):
    shape = (_batch(a1, cu_seqlens1), _batch(a2, cu_seqlens2))
    return a1.new_empty(shape, dtype=_reference.result_dtype(a1))


def _fake_direction_inner(
    a, g, direction, bias_direction=None, cu_seqlens=None, max_seqlen=None, precision=None
):
    return _per_example(a, cu_seqlens)


def _fake_scale_sqnorm(x, g, mean=None, rstd=None, cu_seqlens=None, max_seqlen=None):
    return _per_example(x, cu_seqlens), _per_example(x, cu_seqlens)


def _fake_scale_sum(x, g, mean=None, rstd=None, cu_seqlens=None, max_seqlen=None):
    return _per_channel(x, cu_seqlens), _per_channel(x, cu_seqlens)


def _fake_scale_backward(
    g,
    x,
    weight=None,
    mean=None,
    rstd=None,
    shift=True,
    input_gradient=True,
    sums=True,
    cu_seqlens=None,
    max_seqlen=None,
):
    like, dtype = g if x is None else x, _reference.result_dtype(g if x is None else x)

    def own(wanted, size):
        return g.new_empty((size if wanted else 0,), dtype=dtype)

    channels, batch = g.shape[-1], _batch(g, cu_seqlens)
    return (
        torch.empty_like(like) if input_gradient else like.new_empty((0,)),
        own(sums and x is not None, channels),
        own(sums and shift, channels),
        own(x is not None, batch),
        own(shift, batch),
    )


def _fake_scale_direction(g, x, direction, cu_seqlens=None, max_seqlen=None):
    return _per_example(g, cu_seqlens)


def _fake_group_norm_sqnorm(x, g, groups, eps):
    return _per_example(x), _per_example(x)


def _fake_group_norm_sum(x, g, groups, eps):
    return _per_channel(x), _per_channel(x)


def _fake_layer_norm_sqnorm(x, g, eps, rms=False, cu_seqlens=None, max_seqlen=None):
    return _per_example(x, cu_seqlens), _per_example(x, cu_seqlens)


def _fake_layer_norm_sum(x, g, eps, rms=False, cu_seqlens=None, max_seqlen=None):
    return _per_channel(x, cu_seqlens), _per_channel(x, cu_seqlens)


def _fake_layer_norm_backward(
    x, g, weight, eps, rms=False, sums=True, cu_seqlens=None, max_seqlen=None
):
    channels = x.shape[-1] if sums else 0
    totals = [x.new_empty((channels,), dtype=_reference.result_dtype(x)) for _ in range(2)]
    return torch.empty_like(x), *totals, _per_example(x, cu_seqlens), _per_example(x, cu_seqlens)


def _fake_group_norm_backward(x, g, weight, groups, eps, sums=True):
    return _fake_layer_norm_backward(x, g, weight, eps, sums=sums)


def _fake_rows_sqnorm(ids, g, cu_seqlens=None, max_seqlen=None, padding_idx=None):
    return _per_example(g, cu_seqlens)


def _fake_rows_direction(ids, g, direction, cu_seqlens=None, max_seqlen=None, padding_idx=None):
    return _per_example(g, cu_seqlens)


def _fake_rows_inner(ids1, g1, ids2, g2, cu_seqlens1=None, *rest, **options):
    return _per_example(g1, cu_seqlens1)


def _fake_pairwise_rows(ids1, g1, ids2, g2, cu_seqlens1=None, cu_seqlens2=None, *rest, **options):
    shape = (_batch(g1, cu_seqlens1), _batch(g2, cu_seqlens2))
    return g1.new_empty(shape, dtype=_reference.result_dtype(g1))


def _fake_tied_inner(a, g, ids, rows, cu_seqlens1=None, *rest, **options):
    return _per_example(a, cu_seqlens1)


def _fake_convolution_sqnorm(x, g, *layer, **options):
    return _per_example(x)


def _fake_convolution_gram_sqnorm(x, g, *layer, **options):
    return _per_example(x), _per_example(x), _per_example(x)


def _fake_convolution_weight_gradient_sqnorm(
    x, g, kernel, stride, padding, dilation, groups, precision=None, gradient_dtype=None
):
    shape = (g.shape[1], x.shape[1] // groups, *kernel)
    return x.new_empty(shape, dtype=gradient_dtype or x.dtype), _per_example(x)


def _fake_convolution_inner(x1, g1, x2, g2, *layer, **options):
    return _per_example(x1)


def _fake_pairwise_convolution(x1, g1, x2, g2, *layer, **options):
    return x1.new_empty((x1.shape[0], x2.shape[0]), dtype=_reference.result_dtype(x1))


def _fake_convolution_inner_gram(x1, g1, x2, g2, *layer, **options):
    return _per_example(x1), _per_example(x1)


def _fake_convolution_direction(x, g, direction, *layer, **options):
    return _per_example(x)


FAKES = {
    "rank_one_sqnorm": _fake_rank_one_sqnorm,
    "rank_one_inner": _fake_rank_one_inner,
    "vector_sqnorm": _fake_vector_sqnorm,
    "vector_sum": _fake_vector_sum,
    "vector_inner": _fake_vector_inner,
    "gram_sqnorm": _fake_gram_sqnorm,
    "direct_sqnorm": _fake_direct_sqnorm,
    "direct_inner": _fake_direct_inner,
    "diagonal_gram": _fake_diagonal_gram,
    "weight_gradient_sqnorm": _fake_weight_gradient_sqnorm,
    "pairwise_gram": _fake_pairwise,
    "pairwise_direct": _fake_pairwise,
    "direction_inner": _fake_direction_inner,
    "scale_sqnorm": _fake_scale_sqnorm,
    "scale_sum": _fake_scale_sum,
    "scale_backward": _fake_scale_backward,
    "scale_direction": _fake_scale_direction,
    "group_norm_sqnorm": _fake_group_norm_sqnorm,
    "group_norm_sum": _fake_group_norm_sum,
    "layer_norm_sqnorm": _fake_layer_norm_sqnorm,
    "layer_norm_sum": _fake_layer_norm_sum,
    "layer_norm_backward": _fake_layer_norm_backward,
    "group_norm_backward": _fake_group_norm_backward,
    "rows_sqnorm": _fake_rows_sqnorm,
    "rows_inner": _fake_rows_inner,
    "rows_direction": _fake_rows_direction,
    "pairwise_rows": _fake_pairwise_rows,
    "tied_inner": _fake_tied_inner,
    "convolution_sqnorm": _fake_convolution_sqnorm,
    "convolution_gram_sqnorm": _fake_convolution_gram_sqnorm,
    "convolution_weight_gradient_sqnorm": _fake_convolution_weight_gradient_sqnorm,
    "convolution_inner": _fake_convolution_inner,
    "pairwise_convolution": _fake_pairwise_convolution,
    "convolution_inner_gram": _fake_convolution_inner_gram,
    "pairwise_convolution_gram": _fake_pairwise_convolution,
    "convolution_direction": _fake_convolution_direction,
}

for _name, _schema in SCHEMAS.items():
    torch.library.define(f"gradstats::{_name}", _schema)
    torch.library.impl(f"gradstats::{_name}", "CUDA")(_launch(_name, *LAUNCHERS[_name]))
    torch.library.impl(f"gradstats::{_name}", "CPU")(getattr(_reference, _name))
    torch.library.register_fake(f"gradstats::{_name}")(FAKES[_name])

# bound once: a lookup through torch.ops at every call costs more than a small launch
rank_one_sqnorm = torch.ops.gradstats.rank_one_sqnorm.default
rank_one_inner = torch.ops.gradstats.rank_one_inner.default
vector_sqnorm = torch.ops.gradstats.vector_sqnorm.default
vector_sum = torch.ops.gradstats.vector_sum.default
vector_inner = torch.ops.gradstats.vector_inner.default
gram_sqnorm = torch.ops.gradstats.gram_sqnorm.default
direct_sqnorm = torch.ops.gradstats.direct_sqnorm.default
direct_inner = torch.ops.gradstats.direct_inner.default
diagonal_gram = torch.ops.gradstats.diagonal_gram.default
weight_gradient_sqnorm = torch.ops.gradstats.weight_gradient_sqnorm.default
pairwise_gram = torch.ops.gradstats.pairwise_gram.default
pairwise_direct = torch.ops.gradstats.pairwise_direct.default
direction_inner = torch.ops.gradstats.direction_inner.default
scale_sqnorm = torch.ops.gradstats.scale_sqnorm.default
scale_sum = torch.ops.gradstats.scale_sum.default
scale_backward = torch.ops.gradstats.scale_backward.default
scale_direction = torch.ops.gradstats.scale_direction.default
group_norm_sqnorm = torch.ops.gradstats.group_norm_sqnorm.default
group_norm_sum = torch.ops.gradstats.group_norm_sum.default
layer_norm_sqnorm = torch.ops.gradstats.layer_norm_sqnorm.default
layer_norm_sum = torch.ops.gradstats.layer_norm_sum.default
layer_norm_backward = torch.ops.gradstats.layer_norm_backward.default
group_norm_backward = torch.ops.gradstats.group_norm_backward.default
rows_sqnorm = torch.ops.gradstats.rows_sqnorm.default
rows_inner = torch.ops.gradstats.rows_inner.default
rows_direction = torch.ops.gradstats.rows_direction.default
pairwise_rows = torch.ops.gradstats.pairwise_rows.default
tied_inner = torch.ops.gradstats.tied_inner.default
convolution_sqnorm = torch.ops.gradstats.convolution_sqnorm.default
convolution_gram_sqnorm = torch.ops.gradstats.convolution_gram_sqnorm.default
convolution_weight_gradient_sqnorm = torch.ops.gradstats.convolution_weight_gradient_sqnorm.default
convolution_inner = torch.ops.gradstats.convolution_inner.default
pairwise_convolution = torch.ops.gradstats.pairwise_convolution.default
convolution_inner_gram = torch.ops.gradstats.convolution_inner_gram.default
pairwise_convolution_gram = torch.ops.gradstats.pairwise_convolution_gram.default
convolution_direction = torch.ops.gradstats.convolution_direction.default
