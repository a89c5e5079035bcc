"""Inner products of factors against the definition: factor.dense() of both sides, in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradstats import _convolution_cost, _cost, contractions
from gradstats._factors import (
    ConvolutionGeometry,
    Distances,
    Elementwise,
    Factor,
    Images,
    Masked,
    Outer,
    Patches,
    Path,
    Rows,
    Tangent,
    Vector,
    add_at,
    added,
    map_tensors,
)
from gradstats.contractions import _outer_pairs, _row_pairs, _tiles
from tests.test_contractions import (
    TINY,
    WORKSPACE,
    experts,
    normal,
    outer,
    patches,
    ragged,
    rows,
    vectors,
)
from tests.test_precision import ADVERSARIAL, cancelling, wide


def gradient_rows(factors) -> Tensor:
    """Return Σ_u F_u as rows (B, d), float64."""
    total = sum(wide(factor).dense() for factor in factors)
    return total.reshape(len(total), -1)


def sizes_of(*sides):
    return tuple(gradient_rows(side).norm(dim=1) for side in sides)


def assert_inner(first: list[Factor], second: list[Factor], rtol: float = 1e-12) -> None:
    """Check all pairs, and the diagonal of as many examples as both sides have."""
    left, right = gradient_rows(first), gradient_rows(second)
    sizes = left.norm(dim=1), right.norm(dim=1)
    for workspace in (WORKSPACE, TINY):
        pairs = contractions.inner_pairs(first, second, workspace, sizes)
        allowed = rtol * sizes[0][:, None] * sizes[1] + 1e-200
        assert pairs.dtype == torch.float64 and pairs.shape == allowed.shape
        assert bool(((pairs - left @ right.T).abs() <= allowed).all())
        common = slice(0, min(len(left), len(right)))
        one, two = ([f.select(common) for f in side] for side in (first, second))
        norms = sizes[0][common], sizes[1][common]
        diagonal = contractions.inner_diagonal(one, two, workspace, norms)
        expected = (left[common] * right[common]).sum(1)
        assert diagonal.dtype == torch.float64 and diagonal.shape == expected.shape
        assert bool(((diagonal - expected).abs() <= rtol * norms[0] * norms[1] + 1e-200).all())
        itself = contractions.inner_pairs(first, first, workspace, (sizes[0], sizes[0]))
        allowed = rtol * sizes[0][:, None] * sizes[0] + 1e-200
        assert bool(((itself - left @ left.T).abs() <= allowed).all())
    direction = torch.randn(first[0].shape, dtype=torch.float64)
    for workspace in (WORKSPACE, TINY):
        along = contractions.direction_inner(first, direction, workspace)
        allowed = rtol * sizes[0] * direction.norm() + 1e-200
        assert bool(((along - left @ direction.flatten()).abs() <= allowed).all())
    torch.testing.assert_close(contractions.total(first).flatten(), left.sum(0))
    folded = contractions.fold(first)
    torch.testing.assert_close(gradient_rows(folded), left, rtol=rtol, atol=1e-12)


@settings(max_examples=25)
@given(
    st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(0, 5), st.integers(1, 5),
    st.integers(1, 5), st.integers(1, 5),
)  # fmt: skip
def test_outer(batch, other, groups, positions, longer, p, q):
    first, second = outer(batch, groups, positions, p, q), outer(other, groups, longer, p, q)
    assert_inner([first], [second])
    expected = gradient_rows([first]) @ gradient_rows([second]).T
    if positions:
        for workspace in (WORKSPACE, 200, TINY):
            gram = _outer_pairs.gram_pairs(first, second, workspace)
            torch.testing.assert_close(gram, expected)
            same = _outer_pairs.gram_pairs(first, first, workspace)
            torch.testing.assert_close(same, gradient_rows([first]) @ gradient_rows([first]).T)
    torch.testing.assert_close(_tiles.dense_pairs([first], [second], 100), expected)


def test_chunks_of_a_batch_with_itself():
    """Whatever fits: of the chunks on both sides of the diagonal, one is computed."""
    factor = outer(9, 1, 2, 1, 1)
    expected = gradient_rows([factor]) @ gradient_rows([factor]).T
    for workspace in range(16, 2048, 16):
        gram = _outer_pairs.gram_pairs(factor, factor, workspace)
        torch.testing.assert_close(gram, expected)


@pytest.mark.parametrize("positions", [(1, 1), (2, 3), (40, 50), (1, 60)])
def test_every_form_is_chosen_and_agrees(positions):
    first, second = outer(3, 1, positions[0], 30, 20), outer(4, 1, positions[1], 30, 20)
    form = _cost.choose_pair_form(*positions, 30, 20, 3, 4)
    assert (
        form == {(1, 1): "rank_one", (2, 3): "gram", (40, 50): "direct", (1, 60): "gram"}[positions]
    )
    assert_inner([first], [second])


def test_permuted_axes():
    def factor(batch, positions):
        operands = normal(batch, 2, positions, 6), normal(batch, 2, positions, 4)
        return Outer(*operands, (4, 2, 3, 2), (3, 0, 1, 2), (2, 3, 2, 4))

    assert_inner([factor(3, 5)], [factor(4, 2)])
    assert_inner([factor(3, 50)], [factor(4, 60)])


@pytest.mark.parametrize("groups", [1, 2])
def test_patches(groups):
    first, second = patches(3, groups=groups), patches(5, groups=groups)
    assert_inner([first], [second])
    small = replace(second, input=second.input[..., :4, :3], grad=second.grad[..., :2, :1])
    assert small.unfolded().right.shape[2] == 2
    assert_inner([first], [small])
    # With few positions and a large kernel the patches are written out.
    few, others = (
        Patches(normal(n, 8, 2, 2), normal(n, 16, 1, 1), (16, 8 // groups, 2, 2),
                replace(first.geometry, stride=(1, 1), padding=(0, 0), dilation=(1, 1)))
        for n in (4, 3)
    )  # fmt: skip
    assert_inner([few], [others])
    assert_inner([first, first], [second])


def masked(inner):
    return Masked(inner, normal(*inner.shape))


def test_convolutions_with_other_numbers_of_groups():
    """Of as many input channels to a group, so that their weights have one shape."""
    first, second = (patches(3, 8 * n, 24, groups=n, stride=(4, 3)) for n in (1, 2))
    assert _cost.choose_pair_form(first.positions, second.positions, 24, 48, 3, 3) == "gram"
    assert_inner([first], [second])


def test_more_convolutions_than_are_grouped(monkeypatch):
    monkeypatch.setattr(_tiles, "GROUPED_EXAMPLES", 4)
    first, second = patches(9), patches(3)
    assert_inner([first], [second])
    assert_inner([masked(first)], [masked(second)])


def test_packed_examples_and_experts():
    one, two = ragged([2, 0, 3, 1]), ragged([4, 1])
    assert_inner([one], [two])
    assert_inner([masked(one)], [masked(two)])
    first, second = experts([[2, 0, 1], [0, 0, 3]]), experts([[1, 2], [1, 0]])
    assert_inner([first], [second])
    assert_inner([first], [Vector(normal(2, *first.shape), first.shape)])


def test_factors_of_derived_weights():
    """Those without a rule for pairs are formed for a few rows of the parameter at a time."""

    def tangent(inner, axes):
        unit = normal(*inner.shape)
        unit /= torch.linalg.vector_norm(unit, dim=axes, keepdim=True)
        along = (inner.dense() * unit).sum([axis + 1 for axis in axes], keepdim=True)
        share = torch.rand(along.shape[1:], dtype=torch.float64)
        return Tangent(inner, unit, along, share)

    one, two = outer(3, 1, 4, 6, 5), outer(4, 1, 2, 6, 5)
    assert_inner([masked(one)], [masked(two)])
    assert_inner([masked(one)], [two])
    for axes in ((1,), (0,), (0, 1)):
        assert_inner([tangent(one, axes)], [tangent(two, axes)])
    first, second = patches(3, groups=2), patches(2, groups=2)
    assert_inner([masked(first)], [masked(second)])
    assert_inner([tangent(first, (1, 2, 3))], [tangent(second, (1, 2, 3))])


def test_images_and_distances():
    pieces = [patches(batch) for batch in (1, 2, 1)]
    small = replace(pieces[0], input=pieces[0].input[..., :5, :4], grad=pieces[0].grad[..., :3, :2])
    first = Images((*pieces, small), (0, 2, 0, 1), 3)
    assert_inner([first], [Images((small, pieces[1]), (1, 0), 2)])
    points = normal(5, 3)

    def distances(batch, positions):
        rows = normal(batch, positions, 3)
        return Distances(normal(batch, positions, 5), torch.cdist(rows, points), rows, points)

    assert_inner([distances(3, 2)], [distances(4, 1)])


def test_rows():
    first, second = rows([3, 0, 4]), rows([2, 5, 1, 3])
    assert_inner([first], [second])
    for one, two in ((rows([0, 0]), second), (second, rows([0, 0]))):
        assert_inner([one], [two])
    assert_inner([rows([2, 1]), rows([0, 3])], [second])


def test_ids_that_all_have_and_ids_that_few_have():
    """A table of positions, where every id meets every example, and rare ids beside it."""

    def factor(batch):
        common = torch.arange(4).repeat(batch)
        rare = 4 + torch.randint(0, 100, (batch, 6)).flatten()
        ids = torch.cat([common.view(batch, 4), rare.view(batch, 6)], 1).flatten()
        example = torch.arange(batch).repeat_interleave(10)
        return Rows(ids, normal(10 * batch, 3), example, batch, (104, 3))

    first, second = factor(8), factor(9)
    counts = [torch.bincount(_row_pairs._runs(each).ids, minlength=104) for each in (first, second)]
    few = 2 * _cost.ELEMENT_COST * counts[0] * counts[1] <= 8 * 9
    assert few[(counts[0] > 0) & (counts[1] > 1)].any()
    # The last row that the one side has is beyond all that the other has.
    assert first.ids.max() != second.ids.max()
    assert_inner([first], [second])
    assert_inner([second], [first])


@pytest.mark.parametrize("shape", [(), (3,), (2, 2)], ids=str)
def test_rows_added_where_they_belong(shape, monkeypatch):
    """By either means: the one for CUDA adds in no other order in another run."""
    values, index = normal(7, *shape), torch.tensor([3, 0, 3, 3, 1, 0, 3])
    expected = torch.zeros(5, *shape, dtype=torch.float64)
    for row, place in zip(values, index, strict=True):
        expected[place] += row
    for is_cpu in (True, False):
        monkeypatch.setattr(Tensor, "is_cpu", is_cpu)
        assert torch.equal(added(values, index, 5), expected)
        result = torch.ones_like(expected)
        add_at(result, index, values)
        torch.testing.assert_close(result, 1 + expected)


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_two_runs_of_tied_products_give_the_same_bits():
    """Rows that many positions look up, beside a projection; also where no kernel runs."""
    examples, positions = 4, 700
    ids = torch.randint(0, 3, (examples * positions,))
    example = torch.arange(examples).repeat_interleave(positions)
    table = Rows(ids, normal(len(ids), 2), example, examples, (4, 2))
    head = Outer(normal(examples, 1, 5, 4), normal(examples, 1, 5, 2), (4, 2))
    factors = [map_tensors(factor, lambda x: x.to(DEVICE)) for factor in (head, table)]
    sizes = torch.ones(examples, dtype=torch.float64, device=DEVICE)

    def run() -> list[Tensor]:
        direction = torch.ones(4, 2, dtype=torch.float64, device=DEVICE)
        return [
            factors[1].dense(),
            contractions.sqnorm(factors[1:], WORKSPACE).value,
            contractions.inner_pairs(factors, factors, WORKSPACE, (sizes, sizes)),
            contractions.inner_diagonal(factors[1:], factors[1:], WORKSPACE, (sizes, sizes)),
            contractions.direction_inner(factors, direction, WORKSPACE),
            contractions.total(factors),
        ]

    for first, second in zip(run(), run(), strict=True):
        assert torch.equal(first, second)


def test_vectors():
    assert_inner([Vector(normal(3, 4, 2), (4, 2))], [Vector(normal(5, 4, 2), (4, 2))])
    assert_inner([Vector(normal(3), ())], [Vector(normal(2), ())])
    sliced = Vector(normal(3, 4, 2), (4, 3, 2), axis=1)
    others = Vector(normal(5, 4, 2), (4, 3, 2), 1, torch.tensor([2, 0, 0, 1, 2]))
    assert_inner([sliced], [others])
    assert_inner([sliced], [Vector(normal(2, 4, 3, 2), (4, 3, 2))])
    assert_inner([Vector(normal(3), (3,), axis=0)], [Vector(normal(3), (3,), axis=0)])


def test_uses_of_different_kinds():
    """A tied embedding: every term between the kinds of either side counts."""

    def uses(batch, positions):
        head = Outer(normal(batch, 1, positions, 4), normal(batch, 1, positions, 2), (4, 2))
        return [head, rows([positions] * batch), Vector(normal(batch, 4, 2), (4, 2))]

    first, second = uses(3, 5), uses(2, 4)
    assert_inner(first[:2], second[:2])
    assert_inner(first[:1], second[1:2])
    assert_inner(first[1:2], second[:1])
    assert_inner(first, second[:2])
    assert_inner(first, second)


def test_other_layouts_meet_in_the_definition():
    grouped = Outer(normal(3, 2, 4, 2), normal(3, 2, 4, 3), (4, 3))
    whole = Outer(normal(2, 1, 5, 4), normal(2, 1, 5, 3), (4, 3))
    assert_inner([grouped], [whole])
    turned = Outer(normal(2, 1, 5, 3), normal(2, 1, 5, 4), (4, 3), (1, 0), (3, 4))
    assert_inner([grouped], [turned])
    for other in (grouped, turned):
        looked_up = rows([2, 0, 3], width=3)
        assert_inner([other], [looked_up])
        assert_inner([looked_up], [other])


def test_examples_selected_in_another_order():
    points, own = normal(5, 3), normal(3, 2, 3)
    distances = Distances(normal(3, 2, 5), torch.cdist(own, points), own, points)
    pieces = tuple(patches(batch) for batch in (1, 2, 1))
    packed = Elementwise(normal(6, 2), normal(6, 2), (2,), (0, 1, 4, 6))
    factors = [
        outer(), patches(), rows([3, 0, 4]), ragged([2, 0, 3]), experts([[2, 0, 1], [0, 1, 3]]),
        *vectors(), Images(pieces, (0, 2, 0), 3), distances, masked(outer()), packed,
    ]  # fmt: skip
    for factor in factors:
        for order in ([2, 0, 1], [1, 0], [2]):
            found = factor.select(torch.tensor(order))
            assert torch.equal(found.dense(), factor.dense()[order]), factor
            assert found.batch == len(order)
            if factor is not packed:  # which is for kernels alone
                assert_inner([found], [factor])


@pytest.mark.parametrize("dtype, noise", ADVERSARIAL, ids=str)
def test_pairs_that_cancel_are_computed_again(dtype, noise):
    both = cancelling(dtype, noise, width=512, batch=4)
    first, second = both.select(slice(0, 2)), both.select(slice(2, 4))
    assert _cost.choose_pair_form(256, 256, 512, 512, 2, 2) == "gram"
    assert _cost.choose_pair_form(256, 256, 512, 512, 1, 1) == "gram"
    expected = gradient_rows([first]) @ gradient_rows([second]).T
    sizes = sizes_of([first], [second])

    def error(value, scale):
        exact = expected if value.dim() == 2 else expected.diagonal()
        return ((value - exact).abs() / scale).max().item()

    scale = sizes[0][:, None] * sizes[1]
    assert error(contractions.inner_pairs([first], [second], WORKSPACE, sizes), scale) < 1e-3
    diagonal = contractions.inner_diagonal([first], [second], WORKSPACE, sizes)
    assert error(diagonal, scale.diagonal()) < 1e-3
    if dtype == torch.float32:
        assert error(_outer_pairs.gram_pairs(first, second, WORKSPACE), scale) > 5e-3
        gram = _outer_pairs.gram_diagonal(first, second, WORKSPACE)
        assert error(gram, scale.diagonal()) > 5e-3


@pytest.mark.parametrize("side", [0, 1])
def test_only_doubtful_examples_are_computed_again(side, monkeypatch):
    bad = cancelling(torch.float32, 0.5, width=512, batch=2)
    peak = torch.full((256, 1), 1e-4)
    peak[0] = 1  # one position makes the gradient: nothing cancels
    good = peak * torch.randn(1, 1, 256, 512), torch.randn(1, 1, 256, 512)
    mixed = Outer(
        torch.cat([good[0], bad.left[:1]]), torch.cat([good[1], bad.right[:1]]), bad.shape
    )
    first, second = (bad, mixed) if side else (mixed, bad)
    formed = []
    direct = _outer_pairs.formed_pairs

    def record(one, two, workspace):
        formed.append((one.batch, two.batch))
        return direct(one, two, workspace)

    monkeypatch.setattr(_outer_pairs, "formed_pairs", record)
    contractions.inner_pairs([first], [second], WORKSPACE, sizes_of([first], [second]))
    assert formed == [(2, 1) if side else (1, 2)]


@pytest.mark.parametrize("mine", [(0, 3, 0, 3), (1, 1, 1, 1), (3, 3, 3, 1)], ids=str)
@pytest.mark.parametrize("theirs", [(3, 0, 3, 0, 0), (1, 1, 1, 1, 1), (3, 3, 0, 3, 3)], ids=str)
def test_doubtful_pairs_are_replaced(mine, theirs):
    first, second = outer(4, 1, 2, 3, 2), outer(5, 1, 3, 3, 2)
    exact = gradient_rows([first]) @ gradient_rows([second]).T
    mine, theirs = (_cost.GUARD_TOLERANCE**0.5 * torch.tensor(c).double() for c in (mine, theirs))

    def again(one, two):
        return gradient_rows([one]) @ gradient_rows([two]).T

    found = _outer_pairs.recompute_pairs(
        torch.full_like(exact, torch.nan), first, second, (mine, theirs), again
    )
    again_there = found.isfinite()
    torch.testing.assert_close(found[again_there], exact[again_there])
    assert bool(again_there[mine[:, None] * theirs > _cost.GUARD_TOLERANCE].all())


@pytest.mark.parametrize("positions", [1, 3])
@pytest.mark.parametrize("size", [1e-20, 1e-17, 1e17, 1e19])
def test_products_that_leave_the_range_of_float32(size, positions):
    first = outer(3, 1, positions, 8, 6)
    first = Outer((first.left * size).float(), first.right.float(), first.shape)
    second = Outer(first.left[:2] * 1.5, first.right[:2], first.shape)
    vectors = Vector(first.left[:, 0, 0], (8,)), Vector(second.left[:, 0, 0], (8,))
    for one, two in ((first, second), vectors):
        sizes = sizes_of([one], [two])
        expected = gradient_rows([one]) @ gradient_rows([two]).T
        scale = sizes[0][:, None] * sizes[1]
        pairs = contractions.inner_pairs([one], [two], WORKSPACE, sizes)
        assert bool(((pairs - expected).abs() <= 1e-6 * scale).all())
        norms = sizes[0][:2], sizes[1]
        diagonal = contractions.inner_diagonal([one.select(slice(0, 2))], [two], WORKSPACE, norms)
        assert bool(((diagonal - expected.diagonal()).abs() <= 1e-6 * scale.diagonal()).all())


def test_long_products_are_added_up_in_parts():
    """In one float32 sum all terms would be rounded to what the sum of millions of them rounds."""
    torch.manual_seed(0)
    first, second = (Vector(torch.rand(count, 3_000_000), (3_000_000,)) for count in (3, 2))
    sizes = sizes_of([first], [second])
    expected = gradient_rows([first]) @ gradient_rows([second]).T
    pairs = contractions.inner_pairs([first], [second], WORKSPACE, sizes)
    formed = _tiles.dense_pairs([first], [second], WORKSPACE)
    for found in (pairs, formed):
        torch.testing.assert_close(found, expected, rtol=2e-6, atol=0)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("groups, positions", [(1, 1), (1, 2), (2, 2)])
def test_products_of_long_rows_are_added_up_in_parts(groups, positions, turned):
    torch.manual_seed(0)
    width = 3_000_000

    def factor():
        sides = torch.rand(2, groups, positions, 2), torch.rand(2, groups, positions, width)
        left, right = sides[::-1] if turned else sides
        return Outer(left, right, (groups * left.shape[3], right.shape[3]))

    first, second = factor(), factor()
    terms = [
        torch.einsum("iktd,jksd->ijkts", one.double(), other.double())
        for one, other in ((first.left, second.left), (first.right, second.right))
    ]
    expected = (terms[0] * terms[1]).sum((2, 3, 4))
    pairs = _outer_pairs.gram_pairs(first, second, WORKSPACE)
    torch.testing.assert_close(pairs, expected, rtol=2e-6, atol=0)
    diagonal = _outer_pairs.gram_diagonal(first, second, WORKSPACE)
    torch.testing.assert_close(diagonal, expected.diagonal(), rtol=2e-6, atol=0)


@pytest.mark.parametrize("small, large", [(1e-30, 1e-10), (1e10, 1e30)])
@pytest.mark.parametrize("turned", [False, True])
def test_products_of_which_one_side_leaves_the_range_of_float32(small, large, turned):
    """Beside another that is inside: what either side's examples need is done by itself."""

    def vectors(*sizes):
        values = normal(len(sizes), 8) * torch.tensor(sizes, dtype=torch.float64)[:, None]
        return Vector(values.float(), (8,))

    def looked_up(*sizes):
        scale = torch.tensor(sizes, dtype=torch.float64).repeat_interleave(2)[:, None]
        table = rows([2] * len(sizes), table=2)
        return replace(table, grad=(table.grad * scale).float())

    for make in (vectors, looked_up):
        first, second = make(small, large, small, small), make(large, small, small, small)
        both = make(large, large, large, small), make(small, large, large, small)
        for one, two in ((second, first) if turned else (first, second), both):
            sizes = sizes_of([one], [two])
            expected = gradient_rows([one]) @ gradient_rows([two]).T
            allowed = 1e-6 * sizes[0][:, None] * sizes[1]
            pairs = contractions.inner_pairs([one], [two], WORKSPACE, sizes)
            assert bool(((pairs - expected).abs() <= allowed).all())
            diagonal = contractions.inner_diagonal([one], [two], WORKSPACE, sizes)
            assert bool(((diagonal - expected.diagonal()).abs() <= allowed.diagonal()).all())


def test_float32_and_mixed_dtypes():
    for positions in ((1, 1), (3, 4), (60, 60)):
        first, second = outer(3, 1, positions[0], 20, 12), outer(4, 1, positions[1], 20, 12)
        half = map_tensors(first, lambda x: x.bfloat16())
        assert_close_in_float32(map_tensors(first, lambda x: x.float()), second)
        assert_close_in_float32(half, map_tensors(second, lambda x: x.float()))
        assert_close_in_float32(half, map_tensors(second, lambda x: x.bfloat16()))
        direction = torch.randn(20, 12)
        along = contractions.direction_inner([half], direction, WORKSPACE)
        torch.testing.assert_close(
            along, gradient_rows([half]) @ direction.double().flatten(), rtol=1e-5, atol=1e-5
        )
        torch.testing.assert_close(
            contractions.total([half]).double().flatten(), gradient_rows([half]).sum(0),
            rtol=1e-5, atol=1e-5,
        )  # fmt: skip


def assert_close_in_float32(first, second):
    sizes = sizes_of([first], [second])
    got = contractions.inner_pairs([first], [second], WORKSPACE, sizes)
    expected = gradient_rows([first]) @ gradient_rows([second]).T
    assert bool(((got - expected).abs() <= 1e-6 * sizes[0][:, None] * sizes[1]).all())


def test_fold_keeps_gradients_up_to_twice_the_size_of_the_factors():
    short, long = outer(3, 1, 1, 6, 4), outer(3, 1, 2, 6, 4)
    assert contractions.fold([short]) == [short]
    (folded,) = contractions.fold([long])
    assert isinstance(folded, Vector) and torch.equal(folded.values, long.dense())
    assert_inner([folded], [short])
    assert_inner([short, short], [folded])


def test_pieces_of_one_split_never_meet():
    def path(*steps, first=0, last=9):
        return Path(steps, first, last)

    third = path(("chunk", "3", 0))
    assert third.is_disjoint(path(("chunk", "3", 1)))
    assert path(("chunk", "3", 0), ("t", "", None)).is_disjoint(path(("chunk", "3", 2)))
    assert not third.is_disjoint(path(("chunk", "2", 1)))
    assert not path(("t", "", None)).is_disjoint(path(("view", "", None)))
    # Other places in memory, however they were reached.
    assert third.is_disjoint(path(("select", "1", None), first=10, last=12))
    assert not third.is_disjoint(path(("select", "1", None), first=9, last=12))


def test_runs_of_equal_ids():
    factor = Rows(torch.tensor([2, 1, 2, 1]), normal(4, 3), torch.tensor([0, 0, 0, 1]), 2, (3, 3))
    runs = _row_pairs._runs(factor)
    assert runs.ids.tolist() == [1, 1, 2] and runs.example.tolist() == [0, 1, 0]
    expected = torch.stack([factor.grad[1], factor.grad[3], factor.grad[0] + factor.grad[2]])
    torch.testing.assert_close(runs.sums(slice(0, 3), torch.float64), expected)


@pytest.mark.parametrize("groups", [1, 4])
def test_tiles_of_a_convolution_hold_whole_blocks_of_channels(groups, monkeypatch):
    """A backend computes 8 or 16 channels at once, whether they are wanted or not."""
    monkeypatch.setattr(_cost, "PAIR_TILE_BYTES", 30 * 9 * 16 // groups * 8 * 4)
    geometry = ConvolutionGeometry((1, 1), (1, 1), (1, 1), groups)
    factor = Patches(normal(2, 16, 5, 5), normal(2, 80, 5, 5), (80, 16 // groups, 3, 3), geometry)
    tiles = [left[0].shape[0] for left, _, _ in _tiles._tiles([factor], [factor], 2, 1 << 30)]
    assert len(tiles) > 1 and sum(tiles) == 80
    block = _convolution_cost.CHANNEL_BLOCK if groups == 1 else 80 // groups
    assert all(rows % block == 0 for rows in tiles[:-1])
