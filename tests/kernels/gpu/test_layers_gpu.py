"""Norm layers, embeddings and convolutions on a real GPU: every case and shipped tile, twice."""

import functools
import math

import pytest
import torch

from tests.kernels import convolution_reference, normalization_reference
from tests.kernels.cases import CASES, ragged, random
from tests.kernels.gpu.test_linear_gpu import (
    DEVICE,
    DTYPES,
    FACTOR,
    factor_of_grams,
    of_each_dtype,
    twice,
)
from tests.kernels.reference import NOBODY_SUSPECT, assert_close

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BLOCK = 64
EPS = 1e-5
NORMS = {
    "GPT-2": (4, 1024, 768),
    "Llama 7B": (2, 100, 4096),
    "too long for one program": (2, 5, 20000),
    "unaligned": (3, 333, 1001),
    "many examples": (1500, 3, 200),
}
# input sizes, output channels, (kernel, stride, padding, dilation, groups)
CONVOLUTIONS = {
    "stem of ResNet": ([3, 64, 64], 64, ([7, 7], [2, 2], [3, 3], [1, 1], 1)),
    "stage 1 of ResNet": ([64, 28, 28], 64, ([3, 3], [1, 1], [1, 1], [1, 1], 1)),
    "stage 4 of ResNet": ([256, 7, 7], 128, ([3, 3], [1, 1], [1, 1], [1, 1], 1)),
    "strided": ([128, 14, 14], 100, ([3, 3], [2, 2], [1, 1], [1, 1], 1)),
    "one tap": ([96, 14, 14], 160, ([1, 1], [2, 2], [0, 0], [1, 1], 1)),
    "ResNeXt": ([128, 14, 14], 128, ([3, 3], [1, 1], [1, 1], [1, 1], 32)),
    "ConvNeXt": ([96, 28, 28], 96, ([7, 7], [1, 1], [3, 3], [1, 1], 96)),
    "MobileNet": ([40, 14, 14], 80, ([3, 3], [2, 2], [1, 1], [1, 1], 40)),
    "patches of ViT": ([3, 64, 64], 192, ([16, 16], [16, 16], [0, 0], [1, 1], 1)),
    "dilated sequence": ([48, 500], 33, ([5], [1], [4], [2], 1)),
    "video": ([20, 6, 12, 10], 24, ([3, 3, 3], [1, 2, 1], [1, 1, 0], [1, 1, 2], 2)),
}


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request):
    return request.param


@pytest.mark.parametrize("dtype, name", of_each_dtype(CASES, NORMS))
def test_layer_norm(dtype, name):
    from gradstats.kernels import layer_norm

    if name in NORMS:
        case = random(NORMS[name], dtype, DEVICE, 1), None, None
    else:
        case = CASES[name](dtype, BLOCK, DEVICE)
    x, g, bounds = normalization_reference.operands(case)
    for rms in (False, True):
        want = normalization_reference.layer_norm(x, g, bounds, EPS, rms)
        options = {"rms": rms, "cu_seqlens": bounds}
        got = twice(functools.partial(layer_norm.layer_norm_sum, x, g, EPS, **options))
        normalization_reference.check_sums(got, want, FACTOR)
        got = twice(functools.partial(layer_norm.layer_norm_sqnorm, x, g, EPS, **options))
        normalization_reference.check_squares(got, want, FACTOR)
        weight = random(x.shape[-1:], dtype, DEVICE, 5)
        backward = layer_norm.layer_norm_backward
        got = twice(functools.partial(backward, x, g, weight, EPS, **options))
        normalization_reference.check_backward(got, x, g, weight, bounds, EPS, rms, FACTOR)


@pytest.mark.parametrize("dtype, name", of_each_dtype(CASES, NORMS))
def test_scales(dtype, name):
    from gradstats.kernels import scale_backward, scale_gradients

    if name in NORMS:
        case = random(NORMS[name], dtype, DEVICE, 1), None, None
    else:
        case = CASES[name](dtype, BLOCK, DEVICE)
    x, g, bounds = normalization_reference.operands(case)
    weight = random(x.shape[-1:], dtype, DEVICE, 5)
    mean, rstd = (random(x.shape[-1:], torch.float32, DEVICE, seed).abs() for seed in (3, 4))
    check = normalization_reference.check_scale_backward
    whole = functools.partial(scale_backward.scale_backward, weight=weight, cu_seqlens=bounds)
    check(twice(lambda: whole(g, x, shift=False)), x, g, weight, bounds, factor=FACTOR)
    check(twice(lambda: whole(g.float(), x)), x, g.float(), weight, bounds, factor=FACTOR)
    check(twice(lambda: whole(g, None, input_gradient=False)), None, g, weight, bounds,
          factor=FACTOR)  # fmt: skip
    got = twice(lambda: whole(g, x, mean=mean, rstd=rstd))
    check(got, x, g, weight, bounds, mean, rstd, FACTOR)
    sums, terms = normalization_reference.scale(x, g, bounds)
    direction = weight.double().cpu()
    for kind, operand in enumerate((x, None)):
        along = functools.partial(scale_gradients.scale_direction, g, operand, weight)
        got = twice(functools.partial(along, cu_seqlens=bounds))
        assert_close(got, sums[kind] @ direction, terms[kind] @ direction.abs(), FACTOR)


@pytest.mark.parametrize("channels_first", [False, True])
@pytest.mark.parametrize(
    "sizes, groups",
    [((6, 784, 64), 32), ((5, 49, 70), 7), ((3, 500, 12), 12), ((2, 9, 5000), 2)],
)
def test_channel_norms(dtype, sizes, groups, channels_first):
    from gradstats.kernels import group_norm, scale_backward

    x, g = random(sizes, dtype, DEVICE, 1), random(sizes, dtype, DEVICE, 2)
    if channels_first:
        x, g = x.mT.contiguous().mT, g.mT.contiguous().mT
    want = normalization_reference.group_norm(x, g, groups, EPS)
    got = twice(lambda: group_norm.group_norm_sum(x, g, groups, EPS))
    normalization_reference.check_sums(got, want, FACTOR)
    got = twice(lambda: group_norm.group_norm_sqnorm(x, g, groups, EPS))
    normalization_reference.check_squares(got, want, FACTOR)
    weight = random(sizes[2:], dtype, DEVICE, 5)
    got = twice(lambda: group_norm.group_norm_backward(x, g, weight, groups, EPS))
    normalization_reference.check_group_backward(got, x, g, weight, groups, EPS, FACTOR)
    mean = random(sizes[2:], torch.float32, DEVICE, 3)
    rstd = random(sizes[2:], torch.float32, DEVICE, 4).abs()
    want = normalization_reference.scale(x, g, None, mean, rstd)
    norms_alone = {"input_gradient": False, "sums": False}
    got = twice(lambda: scale_backward.scale_backward(g, x, mean=mean, rstd=rstd, **norms_alone))
    normalization_reference.check_squares(got[3:], want, FACTOR)


@pytest.mark.parametrize("table", [50, 50257])
@pytest.mark.parametrize("name", ["GPT-2", "unaligned", "ragged"])
def test_embeddings(dtype, name, table):
    from gradstats.kernels import (
        operators,
        rows,
        rows_direction,
        rows_inner,
        rows_pairs,
        tied,
    )

    if name == "ragged":
        _, g, bounds = ragged([511, 0, 700, 3], 16, 384, front=3, back=9)(dtype, BLOCK, DEVICE)
    else:
        g, bounds = random(NORMS[name], dtype, DEVICE, 1)[:, :300], None
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(table, g.shape[:-1], generator=generator)
    host = g.double().cpu()
    on_device = ids.to(DEVICE)
    want = operators.rows_sqnorm(ids, host, bounds)
    scale = operators.rows_sqnorm(ids, host.abs(), bounds)
    for longest in (0, 10**6):
        norms = functools.partial(rows.rows_sqnorm, cu_seqlens=bounds, longest_compared=longest)
        assert_close(twice(functools.partial(norms, on_device, g)), want, scale, FACTOR)
    both = {"cu_seqlens1": bounds, "cu_seqlens2": bounds}
    factors, exact = (on_device, g, on_device.int(), g), (ids, host, ids, host)
    absolute = (ids, host.abs(), ids, host.abs())
    want, scale = (operators.pairwise_rows(*each, **both) for each in (exact, absolute))
    got = twice(lambda: rows_pairs.pairwise_rows(*factors, **both))
    assert_close(got, want, scale, FACTOR)
    got = twice(lambda: rows_inner.rows_inner(*factors, **both))
    assert_close(got, want.diagonal(), scale.diagonal(), FACTOR)
    direction = random((table, g.shape[-1]), torch.float32, DEVICE, 6)
    got = twice(lambda: rows_direction.rows_direction(on_device, g, direction, cu_seqlens=bounds))
    want = operators.rows_direction(ids, host, direction.cpu(), bounds)
    scale = operators.rows_direction(ids, host.abs(), direction.cpu().abs(), bounds)
    assert_close(got, want, scale, FACTOR)
    if table == 50:
        head, a = random((*ids.shape, table), dtype, DEVICE, 7), random(g.shape, dtype, DEVICE, 8)
        got = twice(lambda: tied.tied_inner(a, head, on_device, g, **both))
        operands = [operand.double().cpu() for operand in (a, head)]
        want = operators.tied_inner(*operands, ids, host, **both)
        scale = operators.tied_inner(*(o.abs() for o in operands), ids, host.abs(), **both)
        assert_close(got, want, scale, FACTOR)


def factor_of_patches(x, g, layer):
    """The factor for sums of squares of a patch's elements and of an output's."""
    patch = x.shape[1] // layer[-1] * math.prod(layer[0])
    return factor_of_grams(x.dtype, patch + g.shape[1] // layer[-1])


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("dtype, layout", of_each_dtype(["first"], ["last"]))
def test_convolutions(dtype, name, layout):
    sizes, outputs, layer = CONVOLUTIONS[name]
    x, g = convolution_reference.build(sizes, outputs, layer, layout, dtype, 3, device=DEVICE)
    grams = factor_of_patches(x, g, layer)
    convolution_reference.check_norms(x, g, layer, factor=FACTOR, gram_factor=grams, run=twice)
    x2, g2 = convolution_reference.build(sizes, outputs, layer, "first", dtype, 3, 7, DEVICE)
    convolution_reference.check_pairs(x, g, x2, g2, layer, factor=FACTOR, run=twice)


@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("kind", ["half", "ieee", "tf32x3", "tf32"])
def test_every_shipped_tile_of_convolutions(kind, aligned):
    from gradstats.kernels import (
        _check,
        _config,
        convolution,
        convolution_gram,
        operators,
    )

    family = _config.family(_check.architecture(torch.device(DEVICE)))
    dtype = torch.bfloat16 if kind == "half" else torch.float32
    key = (family, kind, aligned)
    # channels that lie last and fill whole pieces of 16 are what tiles for aligned inputs get
    inputs = [(144, "last")] if aligned else [(144, "first"), (3, "last")]
    for channels, layout in inputs:
        layer = ([3, 3], [1, 2], [1, 1], [1, 1], 1)
        sizes = [channels, 12, 10]
        x, g = convolution_reference.build(sizes, 160, layer, layout, dtype, device=DEVICE)
        few = convolution_reference.build(
            [channels, 3, 2], 160, layer, layout, dtype, 9, device=DEVICE
        )
        # tf32 keeps 10 bits of every fp32 input, so products err by 2^13 times more
        factor = 2.0**15 if kind == "tf32" else FACTOR
        grams = max(factor, factor_of_patches(x, g, layer))
        want = operators.convolution_sqnorm(x.cpu(), g.cpu(), *layer)
        _, scale, _ = convolution_reference.sums_of_gram(x, g, layer)
        for config in _config.shipped("convolution").get(key, ()):
            got = convolution.convolution_sqnorm(x, g, *layer, config=config)
            assert_close(got, want, scale, factor)
            got, _ = convolution_gram.convolution_gram_sqnorm(
                x, g, *layer, 1.0, 1.0, 1.0, 0.0, direct_config=config
            )
            assert_close(got, want, scale, factor)
        for config in _config.shipped("convolution_fused").get(key, ()):
            got = convolution.convolution_inner(x, g, x, g, *layer, config=config)
            assert_close(got, want, scale, factor)
        if channels > 16:
            # groups of 9 channels and 10 outputs, four of which stand side by side
            grouped = (*layer[:4], 16)
            want_grouped = operators.convolution_sqnorm(x.cpu(), g.cpu(), *grouped)
            for config in _config.shipped("convolution").get(key, ()):
                got = convolution.convolution_sqnorm(x, g, *grouped, config=config)
                assert_close(got, want_grouped, scale, factor)
                got = convolution.convolution_inner(x, g, x, g, *grouped, config=config)
                assert_close(got, want_grouped, scale, factor)
        for config in _config.shipped("convolution_gram").get(key, ()):
            numbers = (1.0, 1.0, 1.0, NOBODY_SUSPECT)
            got, _ = convolution_gram.convolution_gram_sqnorm(x, g, *layer, *numbers, config=config)
            assert_close(got, want, scale, grams)
            convolution_reference.check_pair_grams(x, g, x, g, layer, config, factor)
            convolution_reference.check_pair_grams(*few, *few, layer, config, factor)
