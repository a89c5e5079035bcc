"""Norms and the fused weight gradient of sequences, against float64, on tiles of 16."""

import functools
import itertools
import math

import pytest
import torch
from gradstats.kernels import _check, _config, direct, gram, vector, weight_gradient
from gradstats.kernels._config import TileConfig

from gradstats._cost import GUARD_TOLERANCE
from gradstats.contractions._triton import rounding
from tests.kernels import reference
from tests.kernels.cases import CASES, SPANNED, cancelling, dense, random
from tests.kernels.mutants import mutant
from tests.kernels.reference import NOBODY_SUSPECT, assert_close

BLOCK = 16
TILE = TileConfig(BLOCK, BLOCK, BLOCK, num_warps=1, num_stages=1)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def names(dtype):
    return str(dtype).removeprefix("torch.")


def gram_sums(a, g, cu_seqlens=None, module=gram):
    """(sqnorm, magnitude, size), nobody computed again."""
    return reference.gram_sums(
        lambda *rounding: module.gram_sqnorm(
            a, g, 1, *rounding, cu_seqlens=cu_seqlens, config=TILE, direct_config=TILE
        )
    )


def guarded(a, g, tolerance, **options):
    numbers = *rounding(a, g, 0.0)[:3], tolerance
    return gram.gram_sqnorm(a, g, 1, *numbers, config=TILE, direct_config=TILE, **options)


@pytest.fixture(params=DTYPES, ids=names)
def dtype(request):
    return request.param


@pytest.fixture(params=SPANNED, ids=lambda item: f"{item[0]}-{names(item[1])}")
def case(request):
    name, dtype = request.param
    return CASES[name](dtype, BLOCK, "cpu")


def test_gram(case):
    a, g, cu_seqlens = case
    got = gram_sums(a, g, cu_seqlens)
    magnitude = reference.magnitude_reference(a, g, cu_seqlens)
    assert_close(got[0], reference.sqnorm_reference(a, g, cu_seqlens), magnitude)
    assert_close(got[1], magnitude)
    assert_close(got[2], reference.size_reference(a, g, cu_seqlens))


@pytest.mark.parametrize(
    "batch, positions, apart",
    [(3, 48, 0), (3, 12, 0), (2, 9, 0), (1, 24, 4), (3, 16, 4), (2, 16, 5), (3, 1, 0)],
)
def test_positions_that_are_adjacent(batch, positions, apart, dtype):
    """As 1x1 convolutions leave them; sizes and distances that are multiples of 8, 4 or 1."""
    sides = (torch.randn(batch, width, positions + apart).to(dtype) for width in (11, 20))
    a, g = (side[..., :positions].mT for side in sides)
    run = math.gcd(16 // dtype.itemsize, positions, positions + apart)
    assert _check.adjacent(1, a, g) == (run if positions > 1 else 1)
    want = reference.sqnorm_reference(a, g)
    assert_close(direct.direct_sqnorm(a, g, config=TILE), want)
    got, magnitude, size = gram_sums(a, g)
    assert_close(guarded(a, g, 0.0)[0], want)
    assert_close(got, want, reference.magnitude_reference(a, g))
    assert_close(magnitude, reference.magnitude_reference(a, g))
    assert_close(size, reference.size_reference(a, g))
    assert_close(direct.direct_inner(a, g, a.flip(0), g, config=TILE),
                 reference.diagonal_reference(a, g, a.flip(0), g))  # fmt: skip
    got = vector.vector_sqnorm(g)
    assert_close(got, reference.bias_sqnorm_reference(g), reference.bias_magnitude_reference(g))
    assert_close(vector.vector_sum(a), a.double().sum(1), a.double().abs().sum(1))


def test_runs_of_positions_of_one_example_or_one_feature():
    one = torch.randn(1, 6, 16).mT.as_strided((1, 16, 6), (5, 1, 16))
    assert _check.adjacent(1, one) == 4
    assert _check.adjacent(1, torch.randn(2, 1, 16).mT.as_strided((2, 16, 1), (16, 1, 3))) == 4
    assert _check.adjacent(1, torch.randn(2, 16, 6)) == 1
    assert _check.adjacent(1, torch.randn(6, 16).mT.expand(2, 16, 6)) == 4


def test_rounding_of_inner_products_is_within_the_bound(tmp_path):
    """Orthogonal rows: absolute terms alone would promise more than inner products can hold."""
    roundoff = torch.finfo(torch.float32).eps / 2
    positions, width = 4 * BLOCK, 4 * BLOCK
    a = 2.0 * torch.eye(positions, width)[None]
    g = torch.ones(1, positions, 5)
    exact = reference.sqnorm_reference(a, g)
    # every inner product of rows off by as much as one rounding of its largest partial sum may be
    line = "dot(left, right.T, products, PRECISION)\n    return products"
    broken = mutant(gram, line, f"{line} + {0.9 * roundoff} * 4.0", tmp_path)
    value, magnitude, _ = gram_sums(a, g, module=broken)
    error = (value - exact).abs()
    assert bool((error > 4 * roundoff * magnitude).all())
    numbers = *rounding(a, g, 0.0)[:3], NOBODY_SUSPECT
    _, bound = broken.gram_sqnorm(a, g, 1, *numbers, config=TILE)
    assert bool((error <= bound).all())


def test_the_bound_holds_what_leaves_the_range_of_normal_numbers():
    scale = 10.0 ** -torch.arange(14, 30)[:, None, None]
    a, g = 300 * torch.randn(len(scale), 40, 24), torch.randn(len(scale), 40, 24) * scale
    g[0] = g[1, 0] = 0
    for operands in ((a, g), (g, a)):
        exact = reference.sqnorm_reference(*operands)
        value, bound = guarded(*operands, NOBODY_SUSPECT)
        error = (value - exact).abs()
        assert bool((error <= bound + 1e-6 * exact).all())
        assert value[0] == 0
        if operands[1] is g:
            assert bound[0] == 0  # known to be without gradient, so that none is formed
        suspect = guarded(*operands, GUARD_TOLERANCE)[1] != bound
        assert suspect[6:10].all() and not suspect[1:4].any()


def test_rows_whose_squares_vanish_beside_large_ones():
    """Gradients of 1e-24 beside inputs of 1e8: squares are gone, and the norm is in range."""
    a, g = 1e8 * torch.randn(3, 40, 24), 1e-24 * torch.randn(3, 40, 24)
    g[1], g[2, 0] = 0, 0
    for operands in ((a, g), (g, a)):
        value, bound = guarded(*operands, GUARD_TOLERANCE)
        want = reference.sqnorm_reference(*operands)
        torch.testing.assert_close(value, want, rtol=1e-5, atol=0)
        assert value[1] == bound[1] == 0


def test_direct(case):
    a, g, cu_seqlens = case
    got = direct.direct_sqnorm(a, g, cu_seqlens=cu_seqlens, config=TILE)
    assert_close(got, reference.sqnorm_reference(a, g, cu_seqlens))


def test_vector(case):
    _, g, cu_seqlens = case
    config = TileConfig(1, 16, 8, 1, 1)
    got = vector.vector_sqnorm(g, cu_seqlens=cu_seqlens, config=config)
    magnitude = reference.bias_magnitude_reference(g, cu_seqlens)
    assert_close(got, reference.bias_sqnorm_reference(g, cu_seqlens), magnitude)


@pytest.mark.parametrize("splits", [1, 2, 3])
def test_weight_gradient(case, splits):
    a, g, cu_seqlens = case
    gradient, sqnorm = weight_gradient.weight_gradient_sqnorm(
        a, g, cu_seqlens=cu_seqlens, config=TILE, splits=splits, gradient_dtype=torch.float32
    )
    assert_close(sqnorm, reference.sqnorm_reference(a, g, cu_seqlens))
    terms = reference.gradients(a.abs(), g.abs(), cu_seqlens).sum(0)
    assert_close(gradient, reference.weight_gradient_reference(a, g, cu_seqlens), terms)


def test_some_tiles_of_a_weight_gradient_are_split(monkeypatch, case):
    """One program walks through all examples of some tiles, and several share those of others."""
    a, g, cu_seqlens = case
    config = TileConfig(16, 16, 16, 1, 1)
    tiles = _config.tiles_of(config, g.shape[-1], a.shape[-1])
    monkeypatch.setattr(_config, "split_tiles", lambda *_: (tiles - 1, 2))
    gradient, sqnorm = weight_gradient.weight_gradient_sqnorm(
        a, g, cu_seqlens=cu_seqlens, config=config, gradient_dtype=torch.float32
    )
    assert_close(sqnorm, reference.sqnorm_reference(a, g, cu_seqlens))
    terms = reference.gradients(a.abs(), g.abs(), cu_seqlens).sum(0)
    assert_close(gradient, reference.weight_gradient_reference(a, g, cu_seqlens), terms)


@pytest.mark.parametrize("name", ["one position", "block", "block + 1", "prime"])
def test_weight_gradient_with_descriptors(dtype, name):
    positions = CASES[name](dtype, BLOCK, "cpu")[0].shape[1]
    a, g, _ = dense(3, positions, 48, 32)(dtype, BLOCK, "cpu")
    gradient, sqnorm = weight_gradient.weight_gradient_sqnorm(
        a, g, config=TILE, descriptors=True, gradient_dtype=torch.float32
    )
    assert_close(sqnorm, reference.sqnorm_reference(a, g))
    terms = reference.gradients(a.abs(), g.abs()).sum(0)
    assert_close(gradient, reference.weight_gradient_reference(a, g), terms)


def test_weight_gradient_keeps_the_operands_dtype(dtype):
    a, g, _ = CASES["prime"](dtype, BLOCK, "cpu")
    for splits in (1, 2):
        gradient, _ = weight_gradient.weight_gradient_sqnorm(a, g, config=TILE, splits=splits)
        assert gradient.dtype == dtype
        want = reference.weight_gradient_reference(a, g)
        terms = reference.gradients(a.abs(), g.abs()).sum(0)
        rounding = torch.finfo(dtype).eps / torch.finfo(torch.float32).eps * want.abs()
        assert_close(gradient, want, 32 * terms + rounding, factor=1)


@pytest.mark.parametrize("shape", [(0, 3, 4, 5), (2, 0, 4, 5), (2, 3, 0, 5), (2, 3, 4, 0)], ids=str)
def test_weight_gradient_of_nothing(shape):
    batch, positions, d_in, d_out = shape
    a, g = torch.ones(batch, positions, d_in), torch.ones(batch, positions, d_out)
    gradient, sqnorm = weight_gradient.weight_gradient_sqnorm(a, g)
    assert torch.equal(gradient, torch.zeros(d_out, d_in))
    assert torch.equal(sqnorm, torch.zeros(batch).double())


@pytest.mark.parametrize(
    "bounds", [(0, 5, 3, 20), (0, 5, 19, 26), (-1, 5, 19, 20), (0, 1, 20, 20)], ids=str
)
def test_bounds_that_only_the_device_knows_give_nan_not_numbers(monkeypatch, bounds):
    """Decreasing, past the rows, before the rows, longer than promised: NaN there, right beside."""
    monkeypatch.setattr(_check, "check_segments", lambda cu_seqlens, rows, max_seqlen: max_seqlen)
    a, g = random((20, 17), torch.float32, "cpu"), random((20, 18), torch.float32, "cpu")
    valid = [0 <= s <= e <= 20 and e - s <= 16 for s, e in itertools.pairwise(bounds)]
    assert not all(valid)
    options = {"cu_seqlens": torch.tensor(bounds), "max_seqlen": 16, "config": TILE}
    gradient, fused = weight_gradient.weight_gradient_sqnorm(a, g, splits=2, **options)
    assert gradient.isnan().all()
    form = functools.partial(
        gram.gram_sqnorm, a, g, 1, 1.0, 1.0, 1.0, direct_config=TILE, **options
    )
    grams = *form(tolerance=0.0), *form(tolerance=NOBODY_SUSPECT)
    for got in (fused, direct.direct_sqnorm(a, g, **options), *grams):
        assert got.isfinite().tolist() == valid


def test_cancelling_halves(dtype):
    """The Gram form errs by its magnitude, the direct form by the norm: that is why both exist."""
    a, g, _ = cancelling(dtype, BLOCK, "cpu")
    want = reference.sqnorm_reference(a, g)
    magnitude = reference.magnitude_reference(a, g)
    assert (magnitude > 1e4 * want).all()
    sqnorm, got_magnitude, _ = gram_sums(a, g)
    assert_close(sqnorm, want, magnitude)
    assert_close(got_magnitude, magnitude)
    terms = reference.gradients(a.abs(), g.abs()).square().sum((1, 2))
    # an element's error is eps times its absolute terms; squared and summed, twice their product
    limit = 2 * (terms * want).sqrt()
    assert_close(direct.direct_sqnorm(a, g, config=TILE), want, limit)
    value, bound = guarded(a, g, GUARD_TOLERANCE)
    assert_close(value, want, limit)
    assert bool((bound <= GUARD_TOLERANCE * value).all())
