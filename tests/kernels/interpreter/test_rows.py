"""Embeddings against float64 tables, on tiles of 16."""

import pytest
import torch
from gradstats.kernels import (
    _check,
    _order,
    _runs,
    _streaming,
    operators,
    rows,
    rows_direction,
    rows_inner,
    rows_pairs,
    tied,
)
from gradstats.kernels._config import TileConfig

from tests.kernels.cases import CASES, random
from tests.kernels.reference import assert_close

BLOCK = 16
ROWS = TileConfig(1, 32, 4, num_warps=1, num_stages=1)
TILE = TileConfig(BLOCK, BLOCK, BLOCK, num_warps=1, num_stages=1)
PAIRS = TileConfig(2, 32, 4, num_warps=1, num_stages=1)
TABLE = 7


NAMES = ("one position", "block + 1", "transposed", "expanded", "sliced", "all empty")
RAGGED = ("ragged with empty", "ragged int64")


@pytest.fixture(params=[*NAMES, *RAGGED])
def case(request, monkeypatch):
    monkeypatch.setattr(rows_inner, "COMPARED", 16)
    monkeypatch.setattr(_order, "BLOCK", 8)
    monkeypatch.setattr(_order, "COMPARED", 16)
    dtype = torch.bfloat16 if request.param == "sliced" else torch.float32
    _, g, bounds = CASES[request.param](dtype, BLOCK, "cpu")
    index_dtype = torch.int32 if bounds is None else torch.int64
    return ids_for(g, 1).to(index_dtype), g, bounds


def ids_for(g, seed):
    """Ids of few values, so that many meet, every other element of a larger tensor."""
    generator = torch.Generator().manual_seed(seed)
    shape = (*g.shape[:-2], 2 * g.shape[-2])
    return torch.randint(TABLE, shape, generator=generator)[..., ::2]


def limit(ids1, g1, ids2, g2, bounds1=None, bounds2=None):
    return operators.pairwise_rows(
        ids1, g1.double().abs(), ids2, g2.double().abs(), bounds1, bounds2
    )


@pytest.mark.parametrize("longest_compared", [0, 10**6])
def test_norms(case, longest_compared):
    ids, g, bounds = case
    got = rows.rows_sqnorm(
        ids, g, cu_seqlens=bounds, longest_compared=longest_compared, config=ROWS
    )
    want = operators.rows_sqnorm(ids, g.double(), bounds)
    assert_close(got, want, limit(ids, g, ids, g, bounds, bounds).diagonal())


def few_ids(batch, positions):
    """Ids of every length of run: one over whole examples, pairs across blocks, none twice."""
    position = torch.arange(positions)
    ids = [torch.zeros_like(position), position // 2, position.flip(0), (position - 9).clamp(0)]
    return torch.stack(ids)[:batch]


@pytest.mark.parametrize("longest_compared", [0, 100])
def test_runs_of_equal_ids_through_many_blocks(monkeypatch, longest_compared):
    monkeypatch.setattr(rows, "AHEAD", 2)
    ids, g = few_ids(4, 37), random((4, 37, 40), torch.bfloat16, "cpu", 1)
    want = operators.rows_sqnorm(ids, g.double())
    scale = operators.rows_sqnorm(ids, g.double().abs())
    for config in (ROWS, TileConfig(1, 64, 16, num_warps=1, num_stages=1), None):
        got = rows.rows_sqnorm(ids, g, longest_compared=longest_compared, config=config)
        assert_close(got, want, scale)
        again = rows.rows_sqnorm(ids, g, longest_compared=longest_compared, config=config)
        torch.testing.assert_close(got, again, rtol=0, atol=0)


def test_rows_are_found_whatever_their_strides():
    wide = random((37, 3, 64), torch.float32, "cpu", 1)
    for g in (wide[..., 16:48], wide[..., 1:48:3], wide[:, :1].expand(37, 3, 64)):
        g = g.transpose(0, 1)
        ids = few_ids(3, 37)
        got = rows.rows_sqnorm(ids, g, config=ROWS)
        want = operators.rows_sqnorm(ids, g.double())
        assert_close(got, want, operators.rows_sqnorm(ids, g.double().abs()))


def test_an_example_that_is_not_finite_leaves_its_neighbours_alone():
    # examples of five rows share blocks of sixteen
    ids, g = few_ids(4, 5) % 3, random((4, 5, 40), torch.float32, "cpu", 1)
    want = rows.rows_sqnorm(ids, g)
    g[1, 2], g[2, 0] = float("nan"), float("inf")
    got = rows.rows_sqnorm(ids, g)
    assert got.isfinite().tolist() == [True, False, False, True]
    torch.testing.assert_close(got[::3], want[::3], rtol=0, atol=0)


def test_examples_without_rows_and_without_features():
    ids = torch.zeros((2, 0), dtype=torch.int64)
    assert (rows.rows_sqnorm(ids, torch.zeros(2, 0, 3)) == 0).all()
    assert (rows.rows_sqnorm(ids[:0], torch.zeros(0, 0, 3)).shape) == (0,)
    without = torch.zeros(2, 5).int(), torch.zeros(2, 5, 0)
    assert (rows.rows_sqnorm(*without) == 0).all()
    for factor in ((ids, torch.zeros(2, 0, 3)), without):
        assert (rows_pairs.pairwise_rows(*factor, *factor) == torch.zeros(2, 2)).all()


def test_pairs_and_directions(case):
    ids, g, bounds = case
    ids2, g2 = ids_for(g, 2), random(g.shape, g.dtype, "cpu", 3)
    factors = (ids, g, ids2, g2)
    options = {"cu_seqlens1": bounds, "cu_seqlens2": bounds}
    want = operators.pairwise_rows(ids, g.double(), ids2, g2.double(), **options)
    scale = limit(*factors, bounds, bounds)
    for splits in (1, 2):
        got = rows_pairs.pairwise_rows(*factors, **options, config=PAIRS, splits=splits)
        assert_close(got, want, scale)
    got = rows_inner.rows_inner(*factors, **options, config=ROWS)
    assert_close(got, want.diagonal(), scale.diagonal())

    table = random((g.shape[-1], TABLE), torch.float32, "cpu", 4).T
    got = rows_direction.rows_direction(ids, g, table, cu_seqlens=bounds, config=ROWS)
    want = operators.rows_direction(ids, g.double(), table, bounds)
    scale = operators.rows_direction(ids, g.double().abs(), table.abs(), bounds)
    assert_close(got, want, scale)


def test_pairs_of_many_examples_in_any_workspace(monkeypatch):
    """Tiles of sixteen examples on both sides, and runs of more rows than are read at once."""
    ids, ids2 = (torch.randint(TABLE, (size, 9)) for size in (17, 19))
    g, g2 = random((17, 9, 72), torch.float32, "cpu", 1), random((19, 9, 72), torch.float32, "cpu")
    factors, scale = (ids, g, ids2, g2), limit(ids, g, ids2, g2)
    want = operators.pairwise_rows(ids, g.double(), ids2, g2.double())
    tile = TileConfig(4, 64, 16, num_warps=1, num_stages=1)
    monkeypatch.setattr(_streaming, "choose_run_sums", lambda width, positions: ROWS)
    for workspace in (1, 10**6):
        got = rows_pairs.pairwise_rows(*factors, workspace=workspace, config=tile)
        assert_close(got, want, scale)
    again = rows_pairs.pairwise_rows(*factors, workspace=workspace, config=tile)
    torch.testing.assert_close(got, again, rtol=0, atol=0)


def test_pairs_of_a_factor_with_itself_sort_it_once(monkeypatch):
    sorts = []
    sort_rows = _runs.sort_rows
    monkeypatch.setattr(_runs, "sort_rows", lambda *one: sorts.append(one) or sort_rows(*one))
    ids, g = few_ids(4, 12), random((4, 12, 40), torch.bfloat16, "cpu", 1)
    want, scale = operators.pairwise_rows(ids, g.double(), ids, g.double()), limit(ids, g, ids, g)
    for count, other in ((1, (ids.view(4, 12), g)), (2, (ids, g.clone())), (2, (ids.int(), g))):
        sorts.clear()
        assert_close(rows_pairs.pairwise_rows(ids, g, *other, config=PAIRS), want, scale)
        assert len(sorts) == count


@pytest.mark.filterwarnings("ignore:invalid value")  # of products that are not picked
def test_pairs_with_an_example_that_is_not_finite():
    ids, g = few_ids(4, 5) % 3, random((4, 5, 40), torch.float32, "cpu", 1)
    want = rows_pairs.pairwise_rows(ids, g, ids, g, config=PAIRS)
    g[1, 2], g[2, 0] = float("nan"), float("inf")
    got = rows_pairs.pairwise_rows(ids, g, ids, g, config=PAIRS)
    assert not got[1, 1].isfinite() and not got[2, 2].isfinite()
    torch.testing.assert_close(got[::3, ::3], want[::3, ::3], rtol=0, atol=0)


def test_the_cross_term_with_a_tied_projection(case):
    ids, g, bounds = case
    a = random(g.shape, g.dtype, "cpu", 5)
    head = random((*g.shape[:-1], TABLE), g.dtype, "cpu", 6)
    if bounds is not None:
        a[: bounds[0]] = float("nan")
        head[bounds[-1] :] = float("nan")
    options = {"cu_seqlens1": bounds, "cu_seqlens2": bounds}
    got = tied.tied_inner(a, head, ids, g, **options, config=TILE)
    operands = (a.double(), head.double(), ids, g.double())
    want = operators.tied_inner(*operands, **options)
    absolute = (a.double().abs(), head.double().abs(), ids, g.double().abs())
    assert_close(got, want, operators.tied_inner(*absolute, **options))


def test_a_projection_over_other_positions_than_the_look_up():
    ids, g = ids_for(torch.empty(3, 5, 1), 1), random((3, 5, 20), torch.float32, "cpu", 2)
    a, head = (
        random((3, 19, 20), torch.float32, "cpu", 3),
        random((3, 19, TABLE), torch.float32, "cpu"),
    )
    got = tied.tied_inner(a, head, ids, g, config=TILE)
    want = operators.tied_inner(a.double(), head.double(), ids, g.double())
    assert_close(
        got,
        want,
        operators.tied_inner(a.double().abs(), head.double().abs(), ids, g.double().abs()),
    )


def test_bounds_that_only_the_device_knows_give_nan_not_numbers(monkeypatch):
    monkeypatch.setattr(_check, "check_segments", lambda cu_seqlens, rows, max_seqlen: max_seqlen)
    g = random((20, 17), torch.float32, "cpu")
    ids = ids_for(g, 1)
    for bounds, valid in (((0, 5, 9, 20), [True] * 3), ((0, 1, 20, 20), [True, False, True])):
        options = {"cu_seqlens": torch.tensor(bounds), "max_seqlen": 17, "config": ROWS}
        for longest in (0, 100):
            got = rows.rows_sqnorm(ids, g, longest_compared=longest, **options)
            assert got.isfinite().tolist() == valid
        both = {f"{name}{side}": options[name] for name in options for side in (1, 2)}
        both = {name: both[name] for name in both if not name.startswith("config")}
        pairs = rows_pairs.pairwise_rows(ids, g, ids, g, **both, config=PAIRS).isfinite()
        each = torch.tensor(valid)
        assert (pairs == each[:, None] & each[None, :]).all()
    options = {"cu_seqlens": torch.tensor((0, 5, 3, 20)), "max_seqlen": 17, "config": ROWS}
    assert rows.rows_sqnorm(ids, g, **options).isnan().all()
    both |= {"cu_seqlens2": options["cu_seqlens"]}
    assert rows_pairs.pairwise_rows(ids, g, ids, g, **both, config=PAIRS).isnan().all()


def test_what_no_kernel_serves_is_refused():
    ids, g = torch.zeros(2, 5, dtype=torch.int64), torch.zeros(2, 5, 3)
    with pytest.raises(_check.KernelInputError, match="int32 or int64; got"):
        rows.rows_sqnorm(ids.float(), g)
    with pytest.raises(_check.KernelInputError, match=r"got \(2, 5\) on cpu and \(2, 4, 3\)"):
        rows.rows_sqnorm(ids, g[:, :4])
    with pytest.raises(_check.KernelInputError, match="equal batches; got 2 and 1"):
        rows_inner.rows_inner(ids, g, ids[:1], g[:1])
    with pytest.raises(_check.KernelInputError, match=r"direction must be \(rows, 3\)"):
        rows_direction.rows_direction(ids, g, torch.zeros(7, 4))
