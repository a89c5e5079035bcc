"""Inner products between factors and with directions, against float64, on tiles of 16."""

import itertools

import pytest
import torch
from gradstats.kernels import (
    _check,
    diagonal,
    direct,
    direction,
    pairwise,
    pairwise_direct,
    rows_pairs,
)
from gradstats.kernels._config import TileConfig

from tests.kernels import reference
from tests.kernels.cases import CASES, SPANNED, random
from tests.kernels.reference import assert_close

BLOCK = 16
TILE = TileConfig(BLOCK, BLOCK, BLOCK, num_warps=1, num_stages=1)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# per case, how the second factor differs in shape from the first: (B2, T2)
DENSE_PAIRS = {
    "one position": ((20, 1), (5, 1)),
    "two positions": ((9, 2), (3, 2)),
    "three and five": ((6, 3), (4, 5)),
    "block and prime": ((2, 16), (3, 19)),
    "prime and one": ((2, 37), (17, 1)),
    "one example": ((1, 18), (1, 33)),
}


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request):
    return request.param


def factor(batch, positions, dtype, seed, d_in=19, d_out=34):
    a = random((batch, positions, d_in), dtype, "cpu", seed)
    return a, random((batch, positions, d_out), dtype, "cpu", seed + 1)


def pair_scale(a1, g1, a2, g2, bounds1=None, bounds2=None):
    """|K| of absolute values: what a sum of positions can round by."""
    absolute = (a1.abs(), g1.abs(), a2.abs(), g2.abs())
    return reference.pairwise_reference(*absolute, bounds1, bounds2)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float32) for name in DENSE_PAIRS), ("prime and one", torch.float16),
     ("three and five", torch.bfloat16)],
)  # fmt: skip
def test_all_pairs(name, dtype):
    (batch1, positions1), (batch2, positions2) = DENSE_PAIRS[name]
    factors = *factor(batch1, positions1, dtype, 1), *factor(batch2, positions2, dtype, 5)
    want = reference.pairwise_reference(*factors)
    for splits in (1, 3):
        got = pairwise.pairwise_gram(*factors, config=TILE, splits=splits)
        assert_close(got, want, pair_scale(*factors))
    got = pairwise_direct.pairwise_direct(*factors, config=TILE)
    assert_close(got, want, pair_scale(*factors))


@pytest.mark.parametrize("workspace", [1, 1000, 20_000, 10**6])
def test_any_workspace_gives_the_same_pairs(workspace):
    factors = *factor(3, 5, torch.float32, 1), *factor(2, 7, torch.float32, 5)
    rows, columns = pairwise_direct.chunk_shape(34, 19, 5, workspace)
    assert rows * columns * 4 * 5 <= max(workspace, 20)
    if workspace == 1:
        factors = tuple(operand[..., :4] for operand in factors)
    got = pairwise_direct.pairwise_direct(*factors, workspace=workspace, config=TILE)
    assert_close(got, reference.pairwise_reference(*factors), pair_scale(*factors))


def test_all_pairs_with_itself_are_symmetric_with_the_norms_on_the_diagonal(dtype):
    a, g = factor(5, 7, dtype, 1)
    for launcher in (pairwise.pairwise_gram, pairwise_direct.pairwise_direct):
        got = launcher(a, g, a, g, config=TILE)
        scale = pair_scale(a, g, a, g)
        assert_close(got, got.T, scale)
        assert_close(got.diagonal(), reference.sqnorm_reference(a, g), scale.diagonal())


@pytest.mark.parametrize(("name", "dtype"), [each for each in SPANNED if each[0] != "one example"])
def test_pairs_of_views_and_segments(name, dtype):
    a, g, bounds = CASES[name](dtype, BLOCK, "cpu")
    if bounds is None:
        a2, g2, bounds2 = a.flip(0), g.flip(0), None
    else:
        a2 = random((30, a.shape[1]), dtype, "cpu", 3)
        g2 = random((30, g.shape[1]), dtype, "cpu", 4)
        a2[:2], g2[28:] = float("nan"), float("nan")
        bounds2 = torch.tensor([2, 2, 20, 28, 28])
    factors = (a, g, a2, g2)
    options = {"cu_seqlens1": bounds, "cu_seqlens2": bounds2, "config": TILE}
    want = reference.pairwise_reference(*factors, bounds, bounds2)
    scale = pair_scale(*factors, bounds, bounds2)
    assert_close(pairwise.pairwise_gram(*factors, **options), want, scale)
    assert_close(pairwise_direct.pairwise_direct(*factors, **options), want, scale)


@pytest.mark.parametrize(("name", "dtype"), SPANNED)
def test_diagonal(name, dtype):
    a, g, bounds = CASES[name](dtype, BLOCK, "cpu")
    a2, g2 = random(a.shape, dtype, "cpu", 3), random(g.shape, dtype, "cpu", 4)
    factors = (a, g, a2, g2)
    options = {"cu_seqlens1": bounds, "cu_seqlens2": bounds, "config": TILE}
    want = reference.diagonal_reference(*factors, bounds, bounds)
    scale = pair_scale(*factors, bounds, bounds).diagonal()
    got, magnitude = diagonal.diagonal_gram(*factors, **options)
    assert_close(got, want, scale)
    assert (magnitude.double() * 1.001 >= want.abs()).all()
    assert_close(direct.direct_inner(*factors, **options), want, scale)


@pytest.mark.parametrize("positions", [(1, 1), (3, 18), (33, 2)], ids=str)
def test_diagonal_of_different_lengths(positions):
    factors = (
        *factor(3, positions[0], torch.float32, 1),
        *factor(3, positions[1], torch.float32, 5),
    )
    want = reference.diagonal_reference(*factors)
    scale = pair_scale(*factors).diagonal()
    assert_close(diagonal.diagonal_gram(*factors, config=TILE)[0], want, scale)
    assert_close(direct.direct_inner(*factors, config=TILE), want, scale)


def test_pairs_with_no_examples():
    some, none = (factor(batch, 3, torch.float32, 1) for batch in (2, 0))
    ids = {len(a): torch.zeros(a.shape[:2], dtype=torch.int64) for a, _ in (some, none)}
    for first, second in ((none, some), (some, none), (none, none)):
        shape = (len(first[0]), len(second[0]))
        assert pairwise.pairwise_gram(*first, *second).shape == shape
        assert pairwise_direct.pairwise_direct(*first, *second).shape == shape
        rows = ids[shape[0]], first[1], ids[shape[1]], second[1]
        assert rows_pairs.pairwise_rows(*rows).shape == shape


@pytest.mark.parametrize(("name", "dtype"), SPANNED)
def test_direction(name, dtype):
    a, g, bounds = CASES[name](dtype, BLOCK, "cpu")
    d_in, d_out = a.shape[-1], g.shape[-1]
    for direction_dtype in {dtype, torch.float32}:
        vector = random((d_in, d_out), direction_dtype, "cpu", 5).T
        got = direction.direction_inner(a, g, vector, cu_seqlens=bounds, config=TILE)
        want = reference.direction_reference(a, g, vector, bounds)
        scale = reference.direction_reference(a.abs(), g.abs(), vector.abs(), bounds)
        assert_close(got, want, scale)


@pytest.mark.parametrize("bounds", [(0, 5, 3, 20), (0, 5, 19, 26), (-1, 5, 19, 20)], ids=str)
def test_bounds_that_only_the_device_knows_give_nan_not_numbers(monkeypatch, bounds):
    monkeypatch.setattr(_check, "check_segments", lambda cu_seqlens, rows, max_seqlen: max_seqlen)
    a, g = random((20, 17), torch.float32, "cpu"), random((20, 18), torch.float32, "cpu")
    valid = torch.tensor([0 <= s <= e <= 20 and e - s <= 17 for s, e in itertools.pairwise(bounds)])
    cu_seqlens = torch.tensor(bounds)
    options = {"cu_seqlens1": cu_seqlens, "cu_seqlens2": cu_seqlens, "config": TILE}
    options |= {"max_seqlen1": 17, "max_seqlen2": 17}
    both = valid[:, None] & valid[None, :]
    assert (pairwise.pairwise_gram(a, g, a, g, **options).isfinite() == both).all()
    assert (pairwise_direct.pairwise_direct(a, g, a, g, **options).isfinite() == both).all()
    assert (diagonal.diagonal_gram(a, g, a, g, **options)[0].isfinite() == valid).all()
    assert (direct.direct_inner(a, g, a, g, **options).isfinite() == valid).all()
    got = direction.direction_inner(
        a, g, torch.ones(18, 17), cu_seqlens=cu_seqlens, max_seqlen=17, config=TILE
    )
    assert (got.isfinite() == valid).all()
