"""The checks of this lane reject kernels that are broken in one line."""

import pytest
import torch
from gradstats.kernels import (
    _order,
    _patches,
    _tile,
    convolution,
    convolution_pair_gram,
    direct,
    gram,
    group_norm,
    layer_norm,
    means,
    operators,
    rows,
    scale,
    scale_backward,
    weight_gradient,
)
from gradstats.kernels._config import TileConfig

from tests.kernels import convolution_reference, normalization_reference, reference
from tests.kernels.cases import CASES, random
from tests.kernels.mutants import mutant
from tests.kernels.reference import assert_close

TILE = TileConfig(16, 16, 16, num_warps=1, num_stages=1)


def operands(case):
    return CASES[case](torch.float32, 16, "cpu")


def check_direct(module, case):
    a, g, cu_seqlens = operands(case)
    got = module.direct_sqnorm(a, g, cu_seqlens=cu_seqlens, config=TILE)
    assert_close(got, reference.sqnorm_reference(a, g, cu_seqlens))


def check_fused_norm(module, case):
    a, g, cu_seqlens = operands(case)
    _, got = module.weight_gradient_sqnorm(a, g, cu_seqlens=cu_seqlens, config=TILE, splits=1)
    assert_close(got, reference.sqnorm_reference(a, g, cu_seqlens))


def check_fused_gradient(module, case):
    a, g, cu_seqlens = operands(case)
    got, _ = module.weight_gradient_sqnorm(a, g, cu_seqlens=cu_seqlens, config=TILE, splits=1)
    terms = reference.gradients(a.abs(), g.abs(), cu_seqlens).sum(0)
    assert_close(got, reference.weight_gradient_reference(a, g, cu_seqlens), terms)


def check_gram(module, case):
    a, g, cu_seqlens = operands(case)
    got, _ = module.gram_sqnorm(
        a, g, 1, 0.0, 0.0, 0.0, reference.NOBODY_SUSPECT, cu_seqlens=cu_seqlens, config=TILE
    )
    magnitude = reference.magnitude_reference(a, g, cu_seqlens)
    assert_close(got, reference.sqnorm_reference(a, g, cu_seqlens), magnitude)


def check_layer_norm(module, case):
    x, g, bounds = normalization_reference.operands(operands(case))
    tile = TileConfig(4, 64, 1, num_warps=1, num_stages=1)
    got = module.layer_norm_sqnorm(x, g, 1e-5, cu_seqlens=bounds, config=tile, splits=1)
    want = normalization_reference.layer_norm(x, g, bounds, 1e-5, False)
    normalization_reference.check_squares(got, want)


def check_rows(module, longest_compared):
    g = random((2, 37, 40), torch.float32, "cpu", 2)
    ids = 1 + torch.arange(37).expand(2, 37) * 5 % 3
    tile = TileConfig(1, 64, 4, num_warps=1, num_stages=1)
    got = module.rows_sqnorm(ids, g, config=tile, longest_compared=longest_compared)
    want = operators.rows_sqnorm(ids, g.double())
    assert_close(got, want, operators.rows_sqnorm(ids, g.double().abs()))


def check_convolution(module, groups):
    layer = ([2, 3], [1, 2], [1, 1], [1, 1], groups)
    x, g = (
        random((2, 18, 4, 5), torch.float32, "cpu", 1),
        random((2, 6, 5, 3), torch.float32, "cpu"),
    )
    got = module.convolution_sqnorm(x, g, *layer, config=TILE)
    want = operators.convolution_sqnorm(x.double(), g.double(), *layer)
    assert_close(got, want)


def check_products_of_patches(module, _):
    layer = ([2, 2], [1, 1], [0, 0], [1, 1], 2)
    # 6 and 4 positions: tiles of 2 and of 4 examples
    x1, g1 = convolution_reference.build([6, 3, 4], 4, layer, "last", torch.float32, 3)
    x2, g2 = convolution_reference.build([6, 3, 3], 4, layer, "first", torch.float32, 3, seed=5)
    convolution_reference.check_pair_grams(x1, g1, x2, g2, layer, TILE, module=module)


def check_group_norm(module, _):
    """Groups that a tile holds, and groups of three tiles."""
    x, g = (
        4 + random((3, 19, 12), torch.float32, "cpu", 1),
        random((3, 19, 12), torch.float32, "cpu"),
    )
    weight = random((12,), torch.float32, "cpu", 5)
    for inner in (8, 32):
        tile = TileConfig(1, 4, inner, num_warps=1, num_stages=1)
        got = module.group_norm_backward(x, g, weight, 3, 1e-5, config=tile)
        normalization_reference.check_group_backward(got, x, g, weight, 3, 1e-5)


def check_scale(module, case):
    x, g, bounds = normalization_reference.operands(operands(case))
    weight, mean, rstd = (
        random((x.shape[-1],), torch.float32, "cpu", seed).abs() for seed in (3, 4, 5)
    )
    tile = TileConfig(1, 16, 8, num_warps=1, num_stages=1)
    for statistics in ({}, {"mean": mean, "rstd": rstd}):
        got = module.scale_backward(
            g, x, weight=weight, **statistics, cu_seqlens=bounds, config=tile
        )
        normalization_reference.check_scale_backward(got, x, g, weight, bounds, **statistics)


def check_wide(module, _):
    for case in ("prime", "expanded"):
        x, g, _ = normalization_reference.operands(operands(case))
        weight = random(x.shape[-1:], torch.float32, "cpu", 5)
        got = module.layer_norm_backward(x, g, weight, 1e-5)
        normalization_reference.check_backward(got, x, g, weight, None, 1e-5, False)


def rejects(check, module, case):
    with pytest.raises(AssertionError, match=r"times the limit|not finite"):
        check(module, case)


def test_the_checks_accept_what_is_shipped():
    for case in ("prime", "ragged in padding"):
        check_direct(direct, case)
        check_fused_norm(weight_gradient, case)
        check_fused_gradient(weight_gradient, case)
        check_gram(gram, case)
        check_layer_norm(layer_norm, case)
    for longest_compared in (0, 100):
        check_rows(rows, longest_compared)
    for groups in (1, 3):
        check_convolution(convolution, groups)
    check_products_of_patches(convolution_pair_gram, None)
    check_group_norm(group_norm, None)
    for case in ("prime", "ragged in padding"):
        check_scale(scale_backward, case)


WRAPPED_LOAD = (
    "    return tl.load(base + offsets, mask=mask, other=0.0)",
    "    offsets = (tl.cast(rows, tl.int64) % row_limit)[:, None] * row_stride + (\n"
    "        tl.cast(columns, tl.int64) % column_limit\n"
    "    )[None, :] * column_stride\n"
    "    return tl.load(base + offsets)",
)


def test_a_wrapped_load(tmp_path, monkeypatch):
    broken = mutant(_tile, *WRAPPED_LOAD, tmp_path)
    for module, check in ((direct, check_direct), (weight_gradient, check_fused_norm)):
        monkeypatch.setattr(module, "load_tile", broken.load_tile)
        rejects(check, module, "prime")


def test_a_mask_by_multiplication(tmp_path, monkeypatch):
    broken = mutant(
        _tile,
        "    return tl.load(base + offsets, mask=mask, other=0.0)",
        "    inside = (columns < column_limit)[None, :] & (rows < row_limit + 4)[:, None]\n"
        "    return tl.load(base + offsets, mask=inside, other=0.0) * mask",
        tmp_path,
    )
    monkeypatch.setattr(direct, "load_tile", broken.load_tile)
    rejects(check_direct, direct, "ragged in padding")


def test_a_missing_off_diagonal_factor(tmp_path):
    broken = mutant(gram, "total += 2.0 * tl.sum(terms)", "total += tl.sum(terms)", tmp_path)
    rejects(check_gram, broken, "prime")
    check_gram(broken, "block")


def test_a_missing_example_boundary_is_seen_in_the_norms_alone(tmp_path):
    broken = mutant(
        weight_gradient,
        "squares = tl.sum(gradient * gradient) + poison",
        "squares = tl.sum((total + gradient) * (total + gradient)) + poison",
        tmp_path,
    )
    # what makes this mistake dangerous: the weight gradient itself is right
    check_fused_gradient(broken, "prime")
    rejects(check_fused_norm, broken, "prime")


# Of numbers read past the end, which may be anything.
@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_an_example_that_reads_its_neighbours_rows(tmp_path):
    broken = mutant(
        weight_gradient,
        "g = load_tile(g_base, inner, stride_gt, left, rows, stride_gd, d_out)",
        "g = load_tile(g_base, inner, stride_gt, total_rows, rows, stride_gd, d_out)",
        tmp_path,
    )
    rejects(check_fused_norm, broken, "ragged in padding")


@pytest.mark.parametrize(
    "right, wrong",
    [
        ("tl.where(inside[None, :], x - mean[:, None], 0.0)", "x - mean[:, None]"),
        ("tl.sum(scale_sums, axis=0) + poison", "tl.sum(scale_sums, axis=0) + scale_total"),
    ],
    ids=["lanes past the features", "sums that run on into the next example"],
)
def test_a_broken_layer_norm(tmp_path, monkeypatch, right, wrong):
    monkeypatch.setattr(layer_norm._config, "choose_partition", lambda *sizes: (2, 1))
    broken = mutant(layer_norm, right, wrong, tmp_path)
    rejects(check_layer_norm, broken, "prime")


@pytest.mark.parametrize(
    "right, wrong",
    [
        ("tl.where(run == previous, sums + row, row)", "row"),
        ("whole = (run >= first) & (run != following)", "whole = run != following"),
        ("tl.where((run >= 0) & (run < first), sums, earlier)", "sums"),
        ("more = tl.sum(tl.where(goes_on, 1, 0)) == AHEAD", "more = False"),
        ("tl.load(edges, mask=columns < features, other=0.0) + tl.sum", "tl.sum"),
    ],
    ids=["every row answers", "a run that opens earlier", "a run that ends", "a run cut short",
         "a run without its first rows"],
)  # fmt: skip
def test_broken_runs_of_ids(tmp_path, monkeypatch, right, wrong):
    monkeypatch.setattr(rows, "AHEAD", 1)
    source = mutant(rows, "AHEAD = 8  # blocks", "AHEAD = 1  # blocks", tmp_path)
    check_rows(source, 100)
    rejects(check_rows, mutant(source, right, wrong, tmp_path), 100)


@pytest.mark.parametrize(
    "right, wrong",
    [
        ("total_rows, tl.int64) + slot, run,", "total_rows, tl.int64) + slot, slot,"),
        ("example * stride_gb + row * stride_gt", "row * stride_gt"),
    ],
    ids=["runs of one row", "another example's rows"],
)
def test_a_broken_order(tmp_path, monkeypatch, right, wrong):
    broken = mutant(_order, right, wrong, tmp_path)
    monkeypatch.setattr(rows, "_order", broken)
    rejects(check_rows, rows, 100)


@pytest.mark.filterwarnings("ignore:overflow encountered")  # of numbers read past the end
@pytest.mark.parametrize(
    "right, wrong",
    [
        ("& (w >= 0) & (w < width)\n        mask = inside", "& (w >= 0)\n        mask = inside"),
        ("d = (rest // out_height) * WINDOW[3]", "d = position * 0 + WINDOW[3]"),
        ("    tap_w = (tap % WINDOW[2]) * WINDOW[11]", "    tap_w = tap % WINDOW[1]"),
    ],
    ids=["an image row that runs into the next", "a shifted axis", "taps of the wrong axis"],
)
def test_broken_patches(tmp_path, monkeypatch, right, wrong):
    broken = mutant(_patches, right, wrong, tmp_path)
    monkeypatch.setattr(convolution, "patch_tile", broken.patch_tile)
    rejects(check_convolution, convolution, 1)


def test_groups_side_by_side_that_meet(tmp_path):
    right = "gradient = tl.where(own, gradient, 0.0)"
    rejects(check_convolution, mutant(convolution, right, "gradient += 0.0", tmp_path), 3)


@pytest.mark.parametrize(
    "module, right, wrong",
    [
        (convolution_pair_gram, "first2 = (tile % column_tiles) * EXAMPLES2", "first2 = first1"),
        (convolution_pair_gram, "group * outputs * stride_g2c", "0 * group"),
        (
            convolution_pair_gram,
            "block * POSITIONS + lane % POSITIONS",
            "block * POSITIONS + lane",
        ),
        (
            _patches,
            "width2, out_height2, out_width2, WINDOW",
            "width2, out_height1, out_width1, WINDOW",
        ),
        (convolution_pair_gram, "tl.sum(tl.abs(terms))", "tl.abs(tl.sum(terms))"),
    ],
    ids=["pairs of equal tiles", "another group's", "another example's",
         "positions of the other side", "a magnitude that cancels"],
)  # fmt: skip
def test_broken_products_of_patches(tmp_path, monkeypatch, module, right, wrong):
    broken = mutant(module, right, wrong, tmp_path)
    if module is _patches:
        monkeypatch.setattr(convolution_pair_gram, "patch_products", broken.patch_products)
        broken = convolution_pair_gram
    rejects(check_products_of_patches, broken, None)


@pytest.mark.parametrize(
    "right, wrong",
    [
        (" - shift_mean * rstd\n", "\n"),
        ("scale * weight, shift * weight", "scale, shift * weight"),
        ("first_channel + columns, mask=inside, other=0.0", "columns, mask=inside, other=0.0"),
        ("sqnorm_ptr + example * groups + group", "sqnorm_ptr + example * groups"),
        ("x = tl.where(held, x, pivot)\n", "\n"),
        ("features, pivot,\n", "features, 0.0,\n"),
        (" - off * shift)", ")"),
        (" - off * off,", ","),
        ("scale += more[2]", "scale = more[2]"),
        ("row = last - before", "row = last"),
    ],
    ids=[
        "a missing mean",
        "a missing scale",
        "another group's",
        "one group",
        "zeros past the end",
        "zeros past the end of the last tile",
        "sums about the first tile's mean",
        "squares about the first tile's mean",
        "a missing tile",
        "one tile",
    ],
)
def test_a_broken_group_norm(tmp_path, right, wrong):
    broken = mutant(group_norm, right, wrong, tmp_path)
    with pytest.raises(AssertionError):
        check_group_norm(broken, None)


@pytest.mark.parametrize(
    "right, wrong",
    [
        ("scale_total += scale_sum", "scale_total = scale_sum"),
        ("tl.sum(shift_sums, axis=0) + poison", "tl.sum(shift_sums, axis=0) + shift_total"),
        ("                    g = g * rstd\n", "                    g = g * 1.0\n"),
        ("                    x = (x - mean) * rstd\n", "                    x = x * rstd\n"),
        ("g = g * weight[None, :]", "g = g * 1.0"),
        ("first_row, stride_gt)", "0, stride_gt)"),
    ],
    ids=["a missing example", "sums that run on", "a missing deviation", "a missing mean",
         "a missing scale", "another example's rows"],
)  # fmt: skip
def test_a_broken_scale(tmp_path, monkeypatch, right, wrong):
    monkeypatch.setattr(scale._config, "choose_partition", lambda *sizes: (2, 1))
    broken = mutant(scale, right, wrong, tmp_path)
    monkeypatch.setattr(scale_backward, "scale", broken)
    with pytest.raises(AssertionError):
        for case in ("prime", "ragged in padding"):
            check_scale(scale_backward, case)


def test_a_wrapped_load_of_scales(tmp_path, monkeypatch):
    broken = mutant(_tile, *WRAPPED_LOAD, tmp_path)
    monkeypatch.setattr(scale, "load_tile", broken.load_tile)
    rejects(check_scale, scale_backward, "prime")


@pytest.mark.parametrize(
    "module, right, wrong",
    [
        (scale, "g = g - shift_mean - x * scale_mean", "g = g - shift_mean"),
        (means, "if not RMS:", "if RMS:"),
        (means, "g = g * weight[None, :]", "g = g * 1.0"),
    ],
    ids=["a missing term", "a missing mean", "a missing scale"],
)
def test_broken_means(tmp_path, monkeypatch, module, right, wrong):
    monkeypatch.setattr(layer_norm, "WIDEST", 0)
    check_wide(layer_norm, None)
    broken = mutant(module, right, wrong, tmp_path)
    if module is means:
        monkeypatch.setattr(layer_norm, "with_means", broken.with_means)
    else:
        monkeypatch.setattr(scale_backward, "scale", broken)
    with pytest.raises(AssertionError):
        check_wide(layer_norm, None)
