"""Scales, shifts and norm layers, against float64 autograd, on tiles of 16."""

import itertools

import pytest
import torch
from gradstats.kernels import (
    _check,
    _config,
    group_norm,
    layer_norm,
    scale_backward,
    scale_gradients,
    statistics,
)
from gradstats.kernels._config import TileConfig

from tests.kernels import normalization_reference as reference
from tests.kernels.cases import CASES, SPANNED, random

BLOCK = 16
ROWS = TileConfig(4, 64, 1, num_warps=1, num_stages=1)
TILE = TileConfig(1, 16, 8, num_warps=1, num_stages=1)
EPS = 1e-5


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def dtype(request):
    return request.param


@pytest.fixture(
    params=[each for each in SPANNED if not each[0].startswith("block")],
    ids=lambda item: f"{item[0]}-{item[1]}",
)
def case(request):
    name, dtype = request.param
    return reference.operands(CASES[name](dtype, BLOCK, "cpu"))


@pytest.mark.parametrize("rms, splits", [(False, 1), (True, 3)], ids=["layer", "rms"])
def test_layer_norm(case, rms, splits):
    x, g, bounds = case
    want = reference.layer_norm(x, g, bounds, EPS, rms)
    options = {"rms": rms, "cu_seqlens": bounds, "config": ROWS, "splits": splits}
    reference.check_sums(layer_norm.layer_norm_sum(x, g, EPS, **options), want)
    reference.check_squares(layer_norm.layer_norm_sqnorm(x, g, EPS, **options), want)


@pytest.mark.parametrize("rms", [False, True], ids=["layer", "rms"])
@pytest.mark.parametrize("name", ["prime", "sliced", "transposed", "ragged in padding"])
def test_the_whole_backward(dtype, name, rms):
    x, g, bounds = reference.operands(CASES[name](dtype, BLOCK, "cpu"))
    for weight, splits in itertools.product((None, random(x.shape[-1:], dtype, "cpu", 5)), (1, 3)):
        got = layer_norm.layer_norm_backward(
            x, g, weight, EPS, rms=rms, cu_seqlens=bounds, config=ROWS, splits=splits
        )
        reference.check_backward(got, x, g, weight, bounds, EPS, rms)


def test_examples_that_share_a_program(dtype, monkeypatch):
    monkeypatch.setattr(layer_norm._config, "choose_partition", lambda *sizes: (3, 1))
    x, g, _ = reference.operands(CASES["prime"](dtype, BLOCK, "cpu"))
    x, g = x.repeat(4, 1, 1), torch.cat([g, -2 * g, g / 2, 3 * g])
    got = layer_norm.layer_norm_backward(x, g, None, EPS, config=ROWS)
    reference.check_backward(got, x, g, None, None, EPS, False)
    want = reference.layer_norm(x, g, None, EPS, False)
    reference.check_sums(layer_norm.layer_norm_sum(x, g, EPS, config=ROWS), want)
    reference.check_squares(layer_norm.layer_norm_sqnorm(x, g, EPS, config=ROWS), want)


@pytest.mark.parametrize(
    ("name", "rms", "dtype"),
    [
        *itertools.product(
            ("prime", "transposed", "ragged in padding"), (False, True), (torch.float32,)
        ),
        ("prime", False, torch.bfloat16),
        ("ragged in padding", True, torch.bfloat16),
    ],
)
def test_rows_too_long_for_one_program(name, rms, dtype, monkeypatch):
    monkeypatch.setattr(layer_norm, "WIDEST", 0)
    x, g, bounds = reference.operands(CASES[name](dtype, BLOCK, "cpu"))
    if bounds is not None:
        x = torch.where(x.isnan(), 1.0, x)  # statistics are taken of every row
    want = reference.layer_norm(x, g, bounds, EPS, rms)
    options = {"rms": rms, "cu_seqlens": bounds}
    reference.check_sums(layer_norm.layer_norm_sum(x, g, EPS, **options), want)
    reference.check_squares(layer_norm.layer_norm_sqnorm(x, g, EPS, **options), want)
    for weight in (None, random(x.shape[-1:], dtype, "cpu", 5)):
        got = layer_norm.layer_norm_backward(x, g, weight, EPS, **options)
        reference.check_backward(got, x, g, weight, bounds, EPS, rms)
    got = layer_norm.layer_norm_backward(x, g, weight, EPS, sums=False, **options)
    assert got[1].numel() == got[2].numel() == 0
    reference.check_squares(got[3:], want)


def norms_of_scale(x, g, **options):
    *_, scale, shift = scale_backward.scale_backward(
        g, x, input_gradient=False, sums=False, **options
    )
    return scale, shift


def test_scale(case):
    x, g, bounds = case
    mean, rstd = (random(x.shape[-1:], torch.float32, "cpu", seed) for seed in (3, 4))
    for given in ({}, {"mean": mean, "rstd": rstd.abs()}):
        want = reference.scale(x, g, bounds, **given)
        options = {"cu_seqlens": bounds, "config": TILE, **given}
        reference.check_sums(scale_gradients.scale_sum(x, g, **options), want)
        reference.check_squares(norms_of_scale(x, g, **options), want)


@pytest.mark.parametrize("splits", [1, 3])
def test_the_whole_backward_of_scales_and_shifts(case, splits):
    x, g, bounds = case
    channels, whole = x.shape[-1], scale_backward.scale_backward
    options = {"cu_seqlens": bounds, "config": TILE, "splits": splits}
    weight = random((channels,), x.dtype, "cpu", 5)
    got = whole(g, x, weight=weight, **options)
    assert all(part.numel() for part in got[1:3])
    reference.check_scale_backward(got, x, g, weight, bounds)
    got = whole(g, x, weight=weight, shift=False, **options)
    assert [part.numel() > 0 for part in got] == [True, True, False, True, False]
    reference.check_scale_backward(got, x, g, weight, bounds)
    got = whole(g, None, input_gradient=False, **options)
    assert [part.numel() > 0 for part in got] == [False, False, True, False, True]
    reference.check_scale_backward(got, None, g, None, bounds)
    got = whole(g, x, sums=False, input_gradient=False, **options)
    assert [part.numel() > 0 for part in got] == [False, False, False, True, True]
    reference.check_scale_backward(got, x, g, None, bounds)
    mean = random((channels,), torch.float32, "cpu", 3)
    rstd = random((channels,), torch.float32, "cpu", 4).abs()
    got = whole(g, x, weight=weight, mean=mean, rstd=rstd, **options)
    reference.check_scale_backward(got, x, g, weight, bounds, mean, rstd)


@pytest.mark.parametrize("splits", [1, 3])
def test_scales_along_a_direction(case, splits):
    x, g, bounds = case
    direction = random((x.shape[-1],), torch.float32, "cpu", 5)
    (sums, terms) = reference.scale(x, g, bounds)
    options = {"cu_seqlens": bounds, "config": TILE, "splits": splits}
    for kind, operand in enumerate((x, None)):
        got = scale_gradients.scale_direction(g, operand, direction, **options)
        limit = terms[kind] @ direction.double().abs()
        reference.assert_close(got, sums[kind] @ direction.double(), limit)


@pytest.mark.parametrize("name", ["prime", "ragged in padding"])
def test_scales_that_widen_their_input(name):
    x, g, bounds = reference.operands(CASES[name](torch.bfloat16, BLOCK, "cpu"))
    g = g.float() * 1.0001
    weight = random((x.shape[-1],), torch.float32, "cpu", 5)
    options = {"cu_seqlens": bounds, "config": TILE}
    got = scale_backward.scale_backward(g, x, weight=weight, **options)
    assert got[0].dtype == torch.bfloat16
    reference.check_scale_backward(got, x, g, weight, bounds)


def test_scales_of_examples_that_share_a_program(dtype, monkeypatch):
    monkeypatch.setattr(_config, "choose_partition", lambda *sizes: (3, 1))
    x, g, _ = reference.operands(CASES["prime"](dtype, BLOCK, "cpu"))
    x, g = x.repeat(4, 1, 1), torch.cat([g, -2 * g, g / 2, 3 * g])
    mean, rstd = (random(x.shape[-1:], torch.float32, "cpu", seed).abs() for seed in (3, 4))
    statistics_ = {"mean": mean, "rstd": rstd}
    got = scale_backward.scale_backward(g, x, **statistics_, config=TILE)
    reference.check_scale_backward(got, x, g, None, None, **statistics_)
    want = reference.scale(x, g, None, **statistics_)
    reference.check_sums(scale_gradients.scale_sum(x, g, **statistics_, config=TILE), want)
    reference.check_squares(norms_of_scale(x, g, **statistics_, config=TILE), want)


@pytest.mark.parametrize("shape", [(0, 5, 12), (2, 0, 12), (2, 1, 12), (2, 5, 0)])
def test_scales_of_nothing(shape):
    x, g = torch.randn(shape), torch.randn(shape)
    weight = torch.randn(shape[-1])
    gradient, *rest = scale_backward.scale_backward(g, x, weight=weight)
    torch.testing.assert_close(gradient, g * weight)
    sums = (x.double() * g).sum(1), g.double().sum(1)
    want = [value.sum(0).float() for value in sums] + [value.square().sum(1) for value in sums]
    torch.testing.assert_close(rest, want)
    for kind, operand in enumerate((x, None)):
        along = scale_gradients.scale_direction(g, operand, weight)
        torch.testing.assert_close(along, sums[kind] @ weight.double())
    for got, value in zip(scale_gradients.scale_sum(x, g), sums, strict=True):
        torch.testing.assert_close(got, value.float())


def test_layer_norms_of_no_examples():
    x = torch.zeros(0, 5, 12)
    for got in (layer_norm.layer_norm_sum(x, x, EPS), scale_gradients.scale_sum(x, x)):
        assert [each.shape for each in got] == [(0, 12), (0, 12)]
    for got in (layer_norm.layer_norm_sqnorm(x, x, EPS), norms_of_scale(x, x)):
        assert [each.shape for each in got] == [(0,), (0,)]


@pytest.mark.parametrize("groups, channels_first", [(1, False), (3, True), (12, True), (12, False)])
def test_group_norm(dtype, groups, channels_first):
    x, g = random((3, 19, 12), dtype, "cpu", 1), random((3, 19, 12), dtype, "cpu", 2)
    if channels_first:
        x, g = x.mT.contiguous().mT, g.mT.contiguous().mT
    x = x + 3  # a mean larger than the deviation
    want = reference.group_norm(x, g, groups, EPS)
    for config in (TILE, None):
        got = group_norm.group_norm_sum(x, g, groups, EPS, config=config)
        reference.check_sums(got, want)
        got = group_norm.group_norm_sqnorm(x, g, groups, EPS, config=config)
        reference.check_squares(got, want)


@pytest.mark.parametrize("groups, channels_first", [(1, False), (3, True), (12, True), (12, False)])
def test_the_whole_backward_of_groups(dtype, groups, channels_first):
    x, g = (2 + random((2, 19, 12), dtype, "cpu", seed) for seed in (1, 2))
    if channels_first:
        x, g = x.mT.contiguous().mT, g.mT.contiguous().mT
    for weight, config in ((None, TILE), (random((12,), dtype, "cpu", 5), None)):
        got = group_norm.group_norm_backward(x, g, weight, groups, EPS, config=config)
        reference.check_group_backward(got, x, g, weight, groups, EPS)
        alone = group_norm.group_norm_backward(x, g, weight, groups, EPS, sums=False, config=config)
        assert torch.equal(alone[0], got[0]) and torch.equal(alone[3], got[3])
        assert alone[1].shape == alone[2].shape == (0,)


@pytest.mark.parametrize("channels_first", [True, False], ids=["first", "last"])
@pytest.mark.parametrize("positions", [1, 15, 16, 17, 32, 33, 48])
def test_groups_around_the_size_of_a_tile(dtype, positions, channels_first):
    """Positions of several vectors, of a part of one, and of none; one channel, fewer, and all."""
    config = TileConfig(1, 8, 16, num_warps=1, num_stages=1)
    for width in (1, 6, 8) if positions > 1 else (6, 8):  # one number has no deviation
        x, g = (1 + random((2, positions, 2 * width), dtype, "cpu", seed) for seed in (1, 2))
        if channels_first:
            x, g = x.mT.contiguous().mT, g.mT.contiguous().mT
        weight = random((2 * width,), dtype, "cpu", 5)
        got = group_norm.group_norm_backward(x, g, weight, 2, EPS, config=config)
        reference.check_group_backward(got, x, g, weight, 2, EPS)


def test_vectors_are_no_longer_than_what_is_adjacent_and_aligned():
    def found(positions, width, layout, dtype=torch.bfloat16, **options):
        x = torch.empty((2, positions, 4 * width), dtype=dtype)
        if layout == "first":
            x = x.mT.contiguous().mT
        return group_norm.adjacent(width, x, **options)

    for size, run in ((784, 8), (196, 4), (50, 2), (49, 1)):
        assert found(size, 2, "first") == (run, 1)
        assert found(49, size, "last") == (1, run)
    assert found(784, 2, "first", torch.float32) == (4, 1)
    assert found(8, 2, "last") == (1, 2)
    # lines cut out of longer ones, layouts that differ, the same for every example
    x = torch.empty(2, 64, 21, dtype=torch.bfloat16).mT
    assert group_norm.adjacent(4, x[:, :16]) == (1, 1)
    assert group_norm.adjacent(4, x[:, :16], x[:, :16].contiguous()) == (1, 1)
    assert group_norm.adjacent(2, torch.empty(64, 8).mT.expand(2, 8, 64)) == (4, 1)


@pytest.mark.parametrize("channels_first", [True, False], ids=["first", "last"])
@pytest.mark.parametrize("inner", [8, 64])
def test_groups_with_a_mean_far_larger_than_the_deviation(inner, channels_first):
    """The last tile is another's mean away from the first, by which all are centred."""
    x, g = (random((2, 40, 8), torch.float32, "cpu", seed) for seed in (1, 2))
    x += 1000
    x[:, 32:] += 20
    if channels_first:
        x, g = x.mT.contiguous().mT, g.mT.contiguous().mT
    config = TileConfig(1, 4, inner, num_warps=1, num_stages=1)
    got = group_norm.group_norm_backward(x, g, None, 2, EPS, config=config)
    wide = x.double().requires_grad_()
    shape = torch.ones(8, dtype=torch.float64, requires_grad=True)
    out = torch.nn.functional.group_norm(wide.mT, 2, shape, torch.zeros_like(shape), EPS)
    want = torch.autograd.grad(out, (wide, shape), g.double().mT)
    # half a unit in the last place of the mean is 3e-5 of a deviation
    torch.testing.assert_close(got[0].double(), want[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got[1].double(), want[1], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("value", [0.0, 0.3, 1000.1])
def test_groups_of_one_value_have_no_deviation(dtype, value):
    x, g = torch.full((1, 20, 4), value, dtype=dtype), random((1, 20, 4), dtype, "cpu", 2)
    for inner in (8, 32):
        config = TileConfig(1, 2, inner, num_warps=1, num_stages=1)
        got = group_norm.group_norm_backward(x, g, None, 2, EPS, config=config)
        blocks = g.double().mT.reshape(1, 2, -1)
        centred = (blocks - blocks.mean(2, keepdim=True)).reshape(1, 4, 20).mT / EPS**0.5
        torch.testing.assert_close(got[0].double(), centred, rtol=2e-2, atol=0.5)


@pytest.mark.parametrize("groups, channels_first", [(1, False), (3, True), (12, True)])
def test_groups_too_wide_for_one_program(dtype, groups, channels_first, monkeypatch):
    monkeypatch.setattr(group_norm, "WIDEST", 0)
    x, g = (2 + random((3, 19, 12), dtype, "cpu", seed) for seed in (1, 2))
    if channels_first:
        x, g = x.mT.contiguous().mT, g.mT.contiguous().mT
    for weight in (None, random((12,), dtype, "cpu", 5)):
        got = group_norm.group_norm_backward(x, g, weight, groups, EPS)
        reference.check_group_backward(got, x, g, weight, groups, EPS)


@pytest.mark.parametrize("widest", [0, 2048])
def test_groups_of_nothing_have_no_gradient(widest, monkeypatch):
    monkeypatch.setattr(group_norm, "WIDEST", widest)
    for shape in ((3, 0, 12), (0, 5, 12)):
        x = torch.ones(shape)
        gradient, scale_, shift, *squares = group_norm.group_norm_backward(x, x, None, 3, EPS)
        assert gradient.shape == shape
        assert all(bool((part == 0).all()) for part in (scale_, shift, *squares))
        assert scale_.shape == shift.shape == (12,)


def test_a_mean_far_larger_than_the_deviation_costs_no_digits():
    x = 1000 + random((2, 40, 8), torch.float32, "cpu", 1)
    for groups in (1, 8):
        found = statistics.group_statistics(x, groups, 0.0)
        blocks = x.double().mT.reshape(2, groups, -1)
        want = blocks.var(2, correction=0).rsqrt()
        torch.testing.assert_close(found.mean.double(), blocks.mean(2), rtol=2e-7, atol=0)
        torch.testing.assert_close(found.rstd.double(), want, rtol=1e-4, atol=0)


def test_rows_of_zeros_past_the_end_do_not_count_without_eps():
    x, g = random((2, 5, 20), torch.float32, "cpu", 1), random((2, 5, 20), torch.float32, "cpu", 2)
    want = reference.layer_norm(x, g, None, 0.0, True)
    got = layer_norm.layer_norm_sqnorm(x, g, 0.0, rms=True, config=ROWS)
    reference.check_squares(got, want)


def test_bounds_that_only_the_device_knows_give_nan_not_numbers(monkeypatch):
    monkeypatch.setattr(_check, "check_segments", lambda cu_seqlens, rows, max_seqlen: max_seqlen)
    x, g = random((20, 17), torch.float32, "cpu", 1), random((20, 17), torch.float32, "cpu", 2)
    options = {"cu_seqlens": torch.tensor([0, 5, 3, 20]), "max_seqlen": 17}
    for splits in (1, 2):
        for got in layer_norm.layer_norm_sqnorm(x, g, EPS, config=ROWS, splits=splits, **options):
            assert got.isfinite().tolist() == [True, False, True]
    for got in norms_of_scale(x, g, config=TILE, **options):
        assert got.isfinite().tolist() == [True, False, True]


def test_what_no_kernel_serves_is_refused():
    x = torch.randn(2, 5, 12)
    with pytest.raises(
        _check.KernelInputError, match=r"one shape; got \(2, 5, 12\) and \(2, 5, 6\)"
    ):
        layer_norm.layer_norm_sqnorm(x, x[..., :6], EPS)
    with pytest.raises(_check.KernelInputError, match="weight must be"):
        layer_norm.layer_norm_backward(x, x, torch.ones(6), EPS)
    with pytest.raises(_check.KernelInputError, match=r"divide into the groups.*5 groups"):
        group_norm.group_norm_sqnorm(x, x, 5, EPS)
    with pytest.raises(_check.KernelInputError, match=r"divide into the groups.*5 groups"):
        group_norm.group_norm_backward(x, x, None, 5, EPS)
    with pytest.raises(_check.KernelInputError, match="weight must be"):
        group_norm.group_norm_backward(x, x, torch.ones(6), 4, EPS)
    with pytest.raises(_check.KernelInputError, match="leave the choice of the tile"):
        group_norm.group_norm_backward(x, x, None, 1, EPS, config=TileConfig(1, 8, 1, 1, 1))
    with pytest.raises(_check.KernelInputError, match="both be given"):
        scale_gradients.scale_sum(x, x, mean=torch.ones(12))
    with pytest.raises(_check.KernelInputError, match="one number for each channel"):
        scale_gradients.scale_sum(x, x, mean=torch.ones(5), rstd=torch.ones(5))
    with pytest.raises(_check.KernelInputError, match="leave the choice of the tile"):
        layer_norm.layer_norm_backward(x, x, None, EPS, config=TileConfig(1, 8, 1, 1, 1))
