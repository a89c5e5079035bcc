"""What rounding does to contractions in float32, bfloat16 and float16, and the guard against it."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

import gradstats as gs
from gradstats import _cost, contractions
from gradstats._factors import (
    Distances,
    Outer,
    Path,
    Ragged,
    Rows,
    Tangent,
    Vector,
    map_tensors,
)
from gradstats.contractions import _outer
from gradstats.contractions._result import Contraction, WellConditioned, sum_of_parts
from tests.oracle import gradients_of, perturbed, sqnorms_of
from tests.test_contractions import WORKSPACE, assert_exact, defined, in_a_graph, outer


@pytest.mark.parametrize("kind", ["outer", "rows"])
def test_uses_that_cancel_each_other(kind):
    """What is left of two large uses must not be the rounding of the large ones."""
    large = outer(p=4, positions=6)
    large = Outer(large.left.float(), large.right.float(), (4, 2))
    gradient = Outer(large.left.double(), large.right.double(), (4, 2)).dense()
    opposite = (1e-3 * torch.randn(3, 4, 2) - gradient).float()
    if kind == "rows":
        example = torch.arange(3).repeat_interleave(4)
        other = Rows(torch.arange(4).repeat(3), opposite.reshape(12, 2), example, 3, (4, 2))
    else:
        other = Outer(torch.eye(4).expand(3, 1, 4, 4), opposite[:, None], (4, 2))
    torch.testing.assert_close(other.dense(), opposite)
    expected = (gradient + opposite.double()).square().sum((1, 2))
    result = contractions.sqnorm([large, other], WORKSPACE)
    torch.testing.assert_close(result.value, expected, rtol=2e-3, atol=0)


def wide(factor):
    return map_tensors(factor, lambda x: x.double() if x.is_floating_point() else x)


def cancelling(dtype: torch.dtype, noise: float, width: int = 64, batch: int = 8) -> Outer:
    """Return a factor of which the Gram form loses all digits: a = 3 + noise, Σ_t g = 0."""
    generator = torch.Generator().manual_seed(0)
    a = 3 + noise * torch.randn(batch, 1, 256, width, generator=generator)
    g = torch.randn(batch, 1, 256, width, generator=generator)
    return Outer((g - g.mean(2, keepdim=True)).to(dtype), a.to(dtype), (width, width))


ADVERSARIAL = [(torch.float32, 1e-3), (torch.bfloat16, 0.1)]


@pytest.mark.parametrize("dtype, noise", ADVERSARIAL, ids=str)
@pytest.mark.parametrize("width", [64, 512])
def test_cancellation(dtype, noise, width):
    factor = cancelling(dtype, noise, width, batch=8 if width == 64 else 2)
    # The sum of rounded gradients is part of the inputs, not of the error.
    exact = Outer(factor.left.double(), factor.right.double(), factor.shape)
    expected = defined(exact)

    def error(result):
        return ((result.value - expected).abs() / expected).max().item()

    assert error(contractions.sqnorm([factor], WORKSPACE)) < 1e-3
    assert error(contractions.sqnorm_and_sum(factor, WORKSPACE)[0]) < 1e-3
    with in_a_graph():
        assert error(contractions.sqnorm([factor], WORKSPACE)) < 1e-3
    assert error(_outer.guarded_gram(factor, WORKSPACE)) < 1e-3
    halves = [
        Outer(factor.left[:, :, part], factor.right[:, :, part], factor.shape)
        for part in (slice(0, 100), slice(100, None))
    ]
    assert error(contractions.sqnorm(halves, WORKSPACE)) < 1e-3
    if dtype == torch.float32:
        assert error(_outer.gram(factor, WORKSPACE)) > 1e-2
    # At this width the Gram form is the cheaper one: only the guard makes the result right.
    assert _cost.choose_outer_form(256, width, width) == ("direct" if width == 64 else "gram")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("noise", [3.0, 1.0, 0.1, 1e-2, 1e-3])
def test_the_bound_of_the_gram_form_is_honest(dtype, noise):
    factor = cancelling(dtype, noise)
    exact = Outer(factor.left.double(), factor.right.double(), factor.shape)
    result = _outer.gram(factor, WORKSPACE)
    assert ((result.value - defined(exact)).abs() <= result.bound).all()


def test_the_guard_recomputes_suspects_alone(monkeypatch):
    calm, wild = outer(2, positions=256, p=64, q=64), cancelling(torch.float32, 1e-3, batch=2)
    left = torch.stack([calm.left[0].float(), wild.left[0], calm.left[1].float(), wild.left[1]])
    right = torch.stack(
        [calm.right[0].float(), wild.right[0], calm.right[1].float(), wild.right[1]]
    )
    factor = Outer(left, right, (64, 64))
    recomputed = []
    direct = _outer.direct
    monkeypatch.setattr(
        _outer, "direct", lambda f, workspace: recomputed.append(f) or direct(f, workspace)
    )
    result = _outer.guarded_gram(factor, WORKSPACE)
    assert len(recomputed) == 1 and torch.equal(recomputed[0].left, left[[1, 3]])
    assert_exact(result, Outer(left.double(), right.double(), (64, 64)), rtol=1e-4)


def test_the_guard_recomputes_every_example_of_many_uncorrelated_positions():
    """Where the choice of form expects it to, and not before."""
    for positions, recomputed in ((1600, False), (1700, True)):
        factor = Outer(*torch.randn(2, 2, 1, positions, 512).unbind(), (512, 512))
        result = _outer.gram(factor, WORKSPACE)
        assert (result.bound > _cost.GUARD_TOLERANCE * result.value).tolist() == [recomputed] * 2
    for dtype, form in ((torch.float32, "direct"), (torch.float64, "gram")):
        one = torch.ones((), dtype=dtype)
        wide = Outer(one.expand(1, 1, 1700, 4096), one.expand(1, 1, 1700, 4096), (4096, 4096))
        assert _outer.cheapest_form(wide) == form


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_products_of_low_precision_operands_accumulate_in_float32(dtype):
    # Sums of this size overflow float16 and have no digits left in bfloat16.
    left, right = torch.randn(2, 1, 256, 300).to(dtype), torch.randn(2, 1, 256, 300).to(dtype)
    factor = Outer(left, right, (300, 300))
    exact = Outer(left.double(), right.double(), (300, 300))
    for form in (_outer.gram, _outer.direct):
        assert_exact(form(factor, WORKSPACE), exact, rtol=1e-5)
    first = factor.left[:, :, :1], factor.right[:, :, :1]
    one = Outer(first[0], first[1], (300, 300))
    assert_exact(_outer.rank_one(one), Outer(*(t.double() for t in first), (300, 300)), rtol=1e-5)
    vector = Vector(100 * right[:, 0, 0], (300,))
    assert_exact(
        contractions.sqnorm([vector], WORKSPACE), Vector(vector.values.double(), (300,)), rtol=1e-5
    )


@pytest.mark.parametrize("positions", [3, 64, 70, 250])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gram_form_below_the_range_of_normal_numbers(dtype, positions):
    """Products of gradients of 1e-22 are gone before those of inputs make them large again."""
    torch.manual_seed(0)
    scale = 10.0 ** -torch.arange(10, 30)[:, None, None, None]
    left = (torch.randn(len(scale), 1, positions, 40) * scale).to(dtype)
    right = (300 * torch.randn(len(scale), 1, positions, 40)).to(dtype)
    left[0] = left[1, 0, 0] = 0
    for swapped in (False, True):
        sides = (right, left) if swapped else (left, right)
        factor = Outer(*sides, (40, 40))
        exact = defined(Outer(*(side.double() for side in sides), (40, 40)))
        result = _outer.gram(factor, WORKSPACE)
        error, bound = (result.value - exact).abs(), result.bound
        assert bool((error <= bound).all())
        assert bool((bound[1:4] < _cost.GUARD_TOLERANCE * exact[1:4]).all())
        guarded = _outer.guarded_gram(factor, WORKSPACE)
        torch.testing.assert_close(guarded.value[:10], exact[:10], rtol=1e-5, atol=0)
        assert guarded.value[0] == guarded.bound[0] == 0


@pytest.mark.parametrize("size", [3e-23, 1e-22])
def test_the_gram_form_of_long_rows_each_of_whose_squares_is_rounded_off(size):
    signs = torch.randint(2, (3, 1, 3, 2**14)) * 2.0 - 1
    for sides in ((size * signs, torch.ones(3, 1, 3, 8)), (torch.ones(3, 1, 3, 8), size * signs)):
        factor = Outer(*sides, (sides[0].shape[3], sides[1].shape[3]))
        exact = defined(Outer(*(side.double() for side in sides), factor.shape))
        result = _outer.gram(factor, WORKSPACE)
        assert bool(((result.value - exact).abs() <= result.bound).all())


@pytest.mark.parametrize("positions", [3, 64, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_whose_squares_vanish_beside_large_ones(dtype, positions):
    """Gradients of 1e-24 beside inputs of 1e8: squares are gone, and the norm is in range."""
    torch.manual_seed(0)
    vanishing, large = (1e-24, 1e8) if dtype == torch.float32 else (1e-170, 1e20)
    left = vanishing * torch.randn(4, 1, positions, 40).to(dtype)
    right = large * torch.randn(4, 1, positions, 40).to(dtype)
    left[1], left[2, 0, 0] = 0, 0
    right[3, 0, 1:] /= large
    for sides in ((left, right), (right, left)):
        factor = Outer(*sides, (40, 40))
        exact = defined(Outer(*(side.double() for side in sides), (40, 40)))
        guarded = _outer.guarded_gram(factor, WORKSPACE)
        torch.testing.assert_close(guarded.value, exact, rtol=1e-5, atol=0)
        assert guarded.value[1] == guarded.bound[1] == 0


@pytest.mark.parametrize("small, large", [(1e-21, 1e3), (1e-22, 1e6)])
def test_the_bound_of_groups_of_one_position_each(small, large):
    """A matrix for each position: squares of small rows have lost digits, and norms have not."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(3, 6, 6))
    model = nn.ParameterDict({"weight": weight})
    x, z = large * torch.randn(4, 3, 6), small * torch.randn(4, 3, 6)

    def losses(model, batch):
        x, z = batch
        return (torch.einsum("btd,tde->bte", x, model["weight"]) * z).sum((1, 2))

    gradients = torch.einsum("btd,bte->btde", x.double(), z.double())
    expected = gradients.square().sum((1, 2, 3))
    stats = gs.per_example_norms(model, (x, z), losses)
    error = (stats.norm.double().square() / expected - 1).abs()
    assert bool((error <= stats.error_bound + 2e-6).all())
    # Every square of a wide row is lost.
    vanishing = Outer(torch.full((2, 3, 1, 64), 2.5e-23), 1e3 * torch.ones(2, 3, 1, 5), (3, 64, 5))
    result = _outer.rank_one(vanishing)
    assert bool(((result.value - defined(wide(vanishing))).abs() <= result.bound).all())


def tiny_losses(model, batch):
    """Losses whose gradients are sigmoid(−z): the smaller, the more certain the model is."""
    x, z = batch
    logits = model(x).flatten(1).sum(1) - z
    return torch.nn.functional.softplus(logits)


CONFIDENT = [10.0, 44, 48, 50, 52, 60, 70]


class Affine(nn.Module):
    """A scale and a shift."""

    def __init__(self, width: int):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.shift = nn.Parameter(torch.zeros(width))

    def forward(self, x):
        return x * self.scale + self.shift


@pytest.mark.parametrize("positions", [50, 6000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_over_positions_of_low_precision_data_accumulate_in_float32(dtype, positions):
    """Rounded to the data's own precision, they would be off by a thousandth."""
    torch.manual_seed(0)
    weights, x = torch.randn(2, 4, positions, 3).to(dtype).unbind()
    model = Affine(3).to(dtype)

    def losses(model, batch):
        x, weights = batch
        return (model(x) * weights).float().sum((1, 2))

    stats = gs.per_example_norms(model, (x, weights), losses)
    with gs.track(model, batch_size=4) as tracker:
        tracker.backward(losses(model, (x, weights)))
    double = weights.double(), x.double()
    expected = {
        "scale": (double[0] * double[1]).sum(1).square().sum(1),
        "shift": double[0].sum(1).square().sum(1),
    }
    for name, sqnorm in expected.items():
        for found in (stats, tracker.stats):
            got = found.by_parameter[name].double()
            torch.testing.assert_close(got, sqnorm, rtol=1e-5, atol=0)


@pytest.mark.parametrize("positions", [None, 1, 5])
@pytest.mark.parametrize("hidden", [False, True])
def test_norms_whose_squares_float32_cannot_hold(positions, hidden):
    """Every norm is within the bound that is stated of its square, which is tight in range."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(8, 8), torch.nn.LayerNorm(8)] if hidden else []
    model = torch.nn.Sequential(*layers, torch.nn.Linear(8, 1))
    torch.nn.init.zeros_(model[-1].bias)
    model[-1].weight.data.mul_(1e-3)
    x = torch.randn(len(CONFIDENT), *([] if positions is None else [positions]), 8)
    batch = x, torch.tensor(CONFIDENT)
    stats = gs.per_example_norms(model, batch, tiny_losses)
    parameters = list(model.parameters())
    for number, (norm, square) in enumerate(zip(stats.norm, stats.sqnorm, strict=True)):
        # Plain float32 gradients are the input here; only their squares leave the range.
        gradients = torch.autograd.grad(tiny_losses(model, batch)[number], parameters)
        expected = torch.cat([g.flatten() for g in gradients]).double().norm().item()
        bound = stats.error_bound[number].item()
        if expected > 1e-19:
            assert bound < 1e-5
        else:
            assert bound > 1e-6
        if norm > 0:
            assert abs((norm.item() / expected) ** 2 - 1) <= bound + 2e-6
            assert abs(square.item() / expected**2 - 1) <= bound + 2e-6
        else:
            assert bound == 0 and expected < 1e-21


def test_a_norm_is_not_the_root_of_a_rounded_square():
    """One position: both sides of the product are in range, and so is the norm."""
    model = torch.nn.Linear(4, 1, bias=False)
    x = torch.full((2, 4), 1e-12)
    stats = gs.per_example_norms(model, x, lambda model, x: 1e-12 * model(x).sum(1))
    torch.testing.assert_close(stats.norm, torch.full((2,), 2e-24), rtol=1e-6, atol=0)
    assert (stats.sqnorm == 0).all() and (stats.error_bound > 1).all()


def test_the_bound_of_a_scalar_that_is_used_as_a_matrix():
    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.tensor(0.5))

        def forward(self, x):
            return x @ self.scale.view(1, 1)

    x = torch.randn(3, 1)
    stats = gs.per_example_norms(Scaled(), x, lambda model, x: model(x).sum(1))
    torch.testing.assert_close(stats.norm, x[:, 0].abs())
    assert (stats.error_bound > 0).all() and (stats.error_bound < 1e-5).all()


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(11, 8)

    def forward(self, ids):
        return functional.linear(self.tokens(ids).tanh(), self.tokens.weight)


class Normalised(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7, 8))

    def forward(self, ids):
        x = functional.one_hot(ids, 8).to(self.weight.dtype)
        return functional.linear(x, functional.normalize(self.weight))


@pytest.mark.parametrize("model", [Tied, Normalised])
def test_bounds_of_double_precision(model):
    """Of norms that are differences, or sums of products, too."""
    ids = torch.randint(8, (4, 5))
    stats = gs.per_example_norms(model().double(), ids, lambda m, x: m(x).square().sum((1, 2)))
    assert stats.error_bound.max() < 1e-13


RESULTS = {
    "norms": ["one norm", "one norm"],
    "norms and products of norms": ["one norm", "two norms", "none"],
    "sums of terms of either sign": ["bound", "bound"],
    "everything": ["bound", "one norm", "none", "two norms", "bound"],
    "both precisions": ["one norm", "double", "two norms"],
    "double precision": ["double", "double"],
}


@pytest.mark.parametrize("order", [None, torch.tensor([2, 0, 1])], ids=["in order", "reordered"])
@pytest.mark.parametrize("kinds", RESULTS.values(), ids=RESULTS)
def test_the_bound_of_a_sum_is_the_sum_of_the_bounds(kinds, order):
    """Of squares so small that what underflows is as large as what is rounded."""
    smallest = 2.0**-1074 if set(kinds) == {"double"} else 2.0**-149
    results, shapes, expected = [], [], 3.0 * smallest
    for number, kind in enumerate(kinds):
        shape = (4 * number + 2, 3, 2)
        norm = 1e-19 * (1 + torch.rand(3))
        bound = torch.zeros(3).double()
        if kind == "two norms":
            other = 1 + torch.rand(3)
            result = WellConditioned(torch.float32, (norm, other))
            others = norm.double().square() + other.double().square()
            bound = 2.0**-20 * result.value + max(shape[0], 6) * smallest * others
        elif kind == "one norm":
            result = WellConditioned(torch.float32, (norm,))
            bound = 2.0**-20 * norm.double().square()
        elif kind == "double":
            result = WellConditioned(torch.float64, (norm.double(),))
            bound = 2.0**-49 * norm.double().square()
        elif kind == "bound":
            bound = 1e-44 * (1 + torch.rand(3).double())
            result = Contraction(norm.double().square(), bound)
        else:
            result = None
        if result is not None:
            torch.testing.assert_close(result.whole_bound(shape), bound, rtol=1e-12, atol=0)
        if kind != "two norms":
            bound = bound + math.prod(shape) * smallest
        results.append(result)
        shapes.append(shape)
        expected = expected + bound
    values = contractions.stack(results, 3, torch.device("cpu"))
    if order is not None:
        values, expected = values[:, order], expected[order]
    total = values.sum(0)
    found = contractions.relative_error(
        results, values, total, shapes=shapes, order=order, unit=3.0
    )
    torch.testing.assert_close(found, expected / total, rtol=1e-12, atol=0)


def test_the_bounds_of_uses_and_of_disjoint_parts_add_up():
    first = Contraction(torch.tensor([4.0, 9]).double(), torch.tensor([1e-6, 2e-6]).double())
    second = Contraction(torch.tensor([1.0, 16]).double(), torch.tensor([3e-6, 4e-6]).double())
    both = sum_of_parts([first, second], [torch.tensor([-1.5, 10]).double()], torch.float32)
    assert both.value.tolist() == [2, 45]
    expected = first.bound + second.bound + 2.0**-20 * torch.tensor([8, 45])
    torch.testing.assert_close(both.bound, expected, rtol=1e-12, atol=0)

    uses = [outer(p=4), Vector(torch.randn(3, 4, 2).double(), (4, 2))]  # formed, then added
    sizes = sum(defined(use).sqrt() for use in uses)
    expected = 2.0**-49 * sizes * defined(*uses).sqrt()
    formed = contractions.sqnorm(uses, WORKSPACE)
    torch.testing.assert_close(formed.bound, expected, rtol=1e-9, atol=0)

    paths = [Path((("chunk", "3", number),), 9 * number, 9 * number + 8) for number in range(3)]
    parts = [SimpleNamespace(path=path, inner=outer()) for path in paths]
    whole = contractions.sqnorm(parts, WORKSPACE)
    each = [contractions.sqnorm([part.inner], WORKSPACE) for part in parts]
    for name in ("value", "bound"):
        expected = sum(getattr(result, name) for result in each)
        torch.testing.assert_close(getattr(whole, name), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("width", [8, 64, 4000, 60_000])
@pytest.mark.parametrize("positions", [2, 3, 8])
def test_the_bound_of_the_gram_form_is_honest_where_nothing_cancels(positions, width):
    torch.manual_seed(0)
    batch = max(20, min(2000, 1_000_000 // width))
    left, right = torch.randn(batch, 1, positions, 8), torch.randn(batch, 1, positions, width)
    for scaled in (right, right.abs()):
        factor = Outer(left, scaled, (8, width))
        result, expected = _outer.gram(factor, WORKSPACE), defined(wide(factor))
        assert ((result.value - expected).abs() <= result.bound).all()
        assert (result.bound < 1e-4 * expected).all()


@pytest.mark.parametrize("width", [64, 2048, 4096, 6000])
def test_sums_of_squares_lose_no_more_than_the_bound_says(width):
    """In the simplest models, of which every digit is that of a norm."""
    torch.manual_seed(0)
    x, slope = torch.randn(4000, width), torch.randn(4000, 3)
    for parts in ((x, slope), (x**3, slope / 1e3)):
        one, other = (part.double().square().sum(1) for part in parts)
        for bias in (False, True):
            layer = nn.Linear(width, 3, bias)
            stats = gs.per_example_norms(layer, parts, lambda m, b: (m(b[0]) * b[1]).sum(1))
            expected, bound = (one + bias) * other, stats.error_bound.double()
            assert ((stats.sqnorm.double() - expected).abs() <= bound * expected).all()
            assert ((stats.norm.double() - expected.sqrt()).abs() <= bound * stats.norm / 2).all()
            assert (bound <= 1e-6).all()


LONG = 600_001

LONG_ROWS = {
    "rows of two operands": lambda: Outer(signs(3, 1, 1, 2), torch.randn(3, 1, 1, LONG), (2, LONG)),
    "rows of groups": lambda: Outer(signs(3, 2, 1, 1), torch.randn(3, 2, 1, LONG), (2, LONG)),
    "gradients formed one by one": lambda: Outer(
        signs(3, 1, 2, 2), torch.randn(3, 1, 2, LONG), (2, LONG)
    ),
    "gradients of groups": lambda: Outer(signs(3, 2, 2, 1), torch.randn(3, 2, 2, LONG), (2, LONG)),
    "gradients of packed examples": lambda: Ragged(
        signs(4, 2), torch.randn(4, LONG), (0, 1, 4), (2, LONG)
    ),
    "a vector": lambda: Vector(torch.randn(3, LONG), (LONG,)),
    "several axes": lambda: Vector(torch.randn(3, 2, LONG), (2, LONG)),
    "looked-up rows": lambda: Rows(
        torch.tensor([1, 0, 1]), torch.randn(3, LONG), torch.tensor([0, 0, 1]), 2, (2, LONG)
    ),
    "rows looked up twice": lambda: Rows(
        torch.tensor([1, 1, 1]), torch.randn(3, LONG), torch.tensor([0, 0, 1]), 2, (2, LONG)
    ),
    "distances": lambda: Distances(
        torch.randn(3, 1, LONG), torch.ones(3, 1, LONG), torch.zeros(3, 1, 1), torch.ones(LONG, 1)
    ),
}


def signs(*shape: int) -> torch.Tensor:
    return torch.randint(2, shape) * 2.0 - 1


@pytest.mark.parametrize("factor", LONG_ROWS.values(), ids=LONG_ROWS)
def test_long_rows_lose_no_more_than_the_bound_says(factor):
    """Added up in one row, their squares would lose ten times as much, products of rows apart."""
    torch.manual_seed(0)
    factor = factor()
    exact = defined(wide(factor))
    result = contractions.sqnorm([factor], WORKSPACE)
    assert ((result.value - exact).abs() <= result.bound).all()
    assert (result.bound < 1e-4 * exact).all()


def test_few_long_looked_up_rows_lose_no_more_than_the_bound_says():
    torch.manual_seed(0)
    for ids in (torch.tensor([[0], [1]]), torch.tensor([[0, 0], [1, 0]])):
        grad = torch.randn(*ids.shape, LONG)
        table = grad.new_zeros(2, 2, LONG).double()
        table.scatter_add_(1, ids[..., None].expand(grad.shape), grad.double())
        result, exact = contractions.sqnorm_of_few(ids, grad), table.square().sum((1, 2))
        assert ((result.value - exact).abs() <= result.bound).all()


@pytest.mark.parametrize("offset", [0.0, 1e3])
def test_small_distances_between_large_points(offset):
    """By products their squares lose all digits, and so do differences of what was rounded."""
    torch.manual_seed(0)
    points = offset + 10 * torch.randn(40, 16)
    apart = torch.logspace(-3, 1, 30)[:, None] * torch.randn(30, 16)
    rows = points[:30] + apart
    distances, grad = torch.cdist(rows, points), torch.eye(40)[:30]
    factor = Distances(*(side.unsqueeze(1) for side in (grad, distances, rows)), points)
    unit = (points.double()[:30] - rows.double()) / distances.diagonal().double()[:, None]
    expected = unit.square().sum(1).where(distances.diagonal() > 0, 0)
    assert (expected - 1).abs().max() > 1e-3  # as PyTorch's distances are not exact
    result = contractions.sqnorm([factor], WORKSPACE)
    torch.testing.assert_close(result.value, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("share", [1.0, 0.4])
@pytest.mark.parametrize("left", [1.0, 0.3, 1e-3])
def test_the_bound_of_what_a_projection_leaves(left, share):
    """The less it is of the whole, the larger; where that is too much, it is computed again."""
    torch.manual_seed(0)
    unit = functional.normalize(torch.randn(5, 300))
    rows = (0.5 + torch.rand(200, 1, 1, 1)) * unit[0] + left * torch.randn(
        200, 1, 1, 300
    ) / 300**0.5
    inner = Outer(torch.eye(5)[:1].expand(200, 1, 1, 5), rows, (5, 300))
    along = (inner.dense() * unit).sum(2, keepdim=True)
    factor = Tangent(inner, unit, along, torch.full((5, 1), share))
    exact = wide(inner).dense()
    exact = exact - (exact * unit.double()).sum(2, keepdim=True) * share * unit.double()
    expected = exact.square().sum((1, 2))
    found, whole = contractions.sqnorm([factor], WORKSPACE), contractions.sqnorm([inner], WORKSPACE)
    removed = along.double().square().sum((1, 2)) * share * (2 - share)
    bound = whole.bound + 2.0**-20 * (whole.value + removed)
    again = bound > _cost.GUARD_TOLERANCE * (whole.value - removed)
    assert again.any() == (left == 1e-3 and share == 1)
    torch.testing.assert_close(found.bound[~again], bound[~again], rtol=1e-5, atol=0)
    assert ((found.value - expected).abs() <= found.bound)[~again].all()
    torch.testing.assert_close(found.value[again], expected[again], rtol=1e-3, atol=0)


def test_zero_gradients_are_exact():
    model = torch.nn.Linear(4, 2)
    stats = gs.per_example_norms(model, torch.randn(3, 4), lambda m, x: 0 * m(x).sum(1))
    assert (stats.norm == 0).all() and (stats.error_bound == 0).all()


def test_nothing_is_said_of_norms_that_are_no_numbers():
    x = torch.tensor([[float("nan"), 1.0], [1.0, 2.0], [0.0, 0.0]])
    for layer in (nn.Linear(2, 1, bias=False), nn.Linear(2, 1)):
        found = gs.per_example_norms(layer, x, lambda m, b: m(b).sum(1), nonfinite="keep")
        bound = found.error_bound
        assert bool(bound[0].isnan()) and 0 < bound[1] < 1e-6
        assert bound[2] == 0 or layer.bias is not None


@pytest.mark.parametrize("shape", [(3, 2), (3, 7, 2), (3, 80, 2)])
@pytest.mark.parametrize("bias", [False, True])
def test_nothing_is_said_of_squares_that_overflow(shape, bias):
    x = torch.randn(shape)
    x[0] *= 1e21
    layer = nn.Linear(2, 5, bias=bias)
    found = gs.per_example_norms(
        layer, x, lambda m, b: m(b).flatten(1).sum(1), nonfinite="keep", workspace=1
    )
    assert bool(found.norm[0].isinf()) and bool(found.error_bound[0].isnan())
    assert bool((found.error_bound[1:] < 1e-4).all())


def test_squares_that_overflow_are_not_called_infinite_gradients():
    model = torch.nn.Linear(3, 2)
    x = torch.ones(2, 3)
    x[0] = 1e20

    def losses(model, x):
        return model(x).sum(1)

    with pytest.raises(gs.NonFiniteGradientError, match=r"example 0 .*overflowed float32"):
        gs.per_example_norms(model, x, losses)
    x[0] = float("nan")
    with pytest.raises(gs.NonFiniteGradientError, match=r"gradient of example 0 is not finite"):
        gs.per_example_norms(model, x, losses)
    x[0] = 1e20
    wide = gs.per_example_norms(model.double(), x.double(), losses)
    assert wide.norm[0].item() == pytest.approx(6**0.5 * 1e20, rel=1e-6)


def test_a_sum_over_parameters_that_overflows():
    """Each parameter's squared norm is a float32 number, that of all of them is none."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    for layer in model:
        nn.init.ones_(layer.weight)
    x = torch.tensor([[1.5e19], [1.0]])
    with pytest.raises(gs.NonFiniteGradientError, match=r"example 0 .*sum over all parameters"):
        gs.per_example_norms(model, x, lambda model, x: model(x).sum(1))
    kept = gs.per_example_norms(model, x, lambda m, x: m(x).sum(1), nonfinite="keep")
    assert kept.norm[0].item() == pytest.approx(2**0.5 * 1.5e19, rel=1e-6)
    assert kept.norm[1].item() == pytest.approx(2**0.5, rel=1e-6)


class Product(nn.Module):
    """A layer whose weight is a product of two parameters, which is computed again in backward."""

    def __init__(self, d_in: int, d_out: int):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(d_out, 2)), nn.Parameter(torch.randn(2, d_in))

    def forward(self, x):
        return nn.functional.linear(x, self.up @ self.down)


def squares(model, batch):
    with torch.autocast("cpu", enabled=False):
        return (model(batch[0]).square().mean((1, 2)) - batch[1]).square()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_inside_autocast_contractions_have_the_precision_of_their_operands(dtype):
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), Product(16, 6), nn.Linear(6, 4))
    single = nn.Linear(8, 16)
    batch = torch.randn(5, 40, 8), torch.randn(5)
    other = perturbed(model)

    def measured():
        stats = gs.per_example_norms(model, batch, squares, gram=True, alignment=True)
        # Of one layer, whose backward autocast has nothing to round in.
        with gs.track(single, batch_size=5, gram=True, alignment=True) as tracker:
            tracker.backward(squares(single, batch))
        return {
            "sqnorm": stats.sqnorm,
            "gram": stats.gram,
            "alignment": stats.alignment,
            "beside training": tracker.stats.sqnorm,
            "gram beside training": tracker.stats.gram,
            "alignment beside training": tracker.stats.alignment,
            "pairs": gs.inner_products(model, batch, other, batch, squares),
            "diagonal": gs.inner_products(model, batch, other, batch, squares, pairs="diagonal"),
        }

    expected = measured()
    with torch.autocast("cpu", dtype):
        found = measured()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


class Scaled(nn.Module):
    """A layer, an operation with parameters, and a layer."""

    def __init__(self, function, *shapes):
        super().__init__()
        self.first, self.last, self.function = nn.Linear(8, 8), nn.Linear(8, 8), function
        self.own = nn.ParameterList(nn.Parameter(0.3 + torch.rand(shape)) for shape in shapes)

    def forward(self, x):
        hidden = self.function(self.first(x), *self.own)
        self.seen = hidden.dtype
        return self.last(hidden.sin())


def attend_with_mask(hidden, inward, outward, mask):
    """Attention of an example's two halves to each other, by its mean weights."""
    x = hidden.unflatten(1, (2, 4)).transpose(0, 1)
    attended, weights = functional.multi_head_attention_forward(
        x, x, x, 4, 2, inward, None, None, None, False, 0.0, outward, None, attn_mask=mask
    )
    return torch.cat([attended.transpose(0, 1).flatten(1)[:, :4], weights.flatten(1)], 1)


def regular(w):
    return w + 4 * torch.eye(8)


# Autocast casts no operand of elementwise operations: a number leaves bfloat16 as it is, a vector
# does not. Products along an axis and PReLU it does cast.
BESIDE_LOW_PRECISION = {
    "times a number": (lambda h, t: h * t, ()),
    "a number plus": (lambda h, t: t + h, ()),
    "minus the exponential of a number": (lambda h, t: h - t.exp(), ()),
    "in place": (lambda h, t: h.clone().mul_(t), ()),
    "the larger of a number": (lambda h, t: torch.maximum(h, t), ()),
    "to the power of a number": (lambda h, t: h.abs().pow(t), ()),
    "as large as a number": (lambda h, t: h + torch.maximum(0 * h + t.detach(), t), ()),
    "interpolated by a number": (lambda h, t: torch.lerp(h, h.sin(), t), ()),
    "interpolated in place": (lambda h, t: h.clone().lerp_(h.sin(), t), ()),
    "where": (lambda h, t: torch.where(h > 0, h, t), ()),
    "numbers of a vector": (lambda h, t: h * t[0] + t[1], (2,)),
    "scaled and shifted by numbers": (lambda h, t, b: torch.addcmul(b, h, t), (), ()),
    "times a vector": (lambda h, t: h * t, (8,)),
    "PReLU": (torch.prelu, (1,)),
    "PReLU of channels": (torch.prelu, (8,)),
    "product along an axis": (lambda h, t: h * torch.linalg.vecdot(h, t)[:, None], (8,)),
    "matrix and vector": (lambda h, t: h * torch.mv(h.float(), t)[:, None], (8,)),
    "linear layer with one bias": (lambda h, w, b: functional.linear(h, w, b), (8, 8), (1,)),
    "scaled product and a vector": (lambda h, w, b: torch.addmm(b, h, w, alpha=2), (8, 8), (8,)),
    "products and a vector": (
        lambda h, w, b: torch.baddbmm(b, h[:, None], w.expand(5, -1, -1)).squeeze(1),
        (8, 8),
        (8,),
    ),
    "product added in place": (
        lambda h, w: h.float().sin().addmm_(h.float(), w, alpha=2),
        (8, 8),
    ),
    "products added in place": (
        lambda h, w: (
            h.float()[:, None].sin().baddbmm_(h.float()[:, None], w.expand(5, -1, -1))[:, 0]
        ),
        (8, 8),
    ),
    "solutions": (lambda h, w: torch.linalg.solve(regular(w), h.T).T, (8, 8)),
    "solutions of float32": (
        lambda h, w: torch.linalg.solve(regular(w.T), h.float(), left=False),
        (8, 8),
    ),
    "solution of a vector": (
        lambda h, w: torch.linalg.solve(regular(w).expand(5, 8, 8), h.float()),
        (8, 8),
    ),
    "solutions by a triangle": (
        lambda h, w: torch.linalg.solve_triangular(regular(w.tril()), h.float().T, upper=False).T,
        (8, 8),
    ),
    "solutions by a factor": (
        lambda h, w: torch.cholesky_solve(h.float().T, regular(w.tril())).T,
        (8, 8),
    ),
    "attention with a trained mask": (attend_with_mask, (12, 4), (4, 4), (2, 2)),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", BESIDE_LOW_PRECISION.values(), ids=BESIDE_LOW_PRECISION)
def test_the_forward_under_autocast_is_the_users(case, dtype):
    model, x = Scaled(*case), torch.randn(5, 8)

    def losses_of(model, x):
        with torch.autocast("cpu", dtype):
            result = model(x)
        return result.float().square().sum(1)

    losses = losses_of(model, x)
    seen = model.seen
    sqnorms = sqnorms_of(gradients_of(model, losses))
    largest = torch.cat([*sqnorms.values()]).max().sqrt().item()

    def check(stats):
        assert model.seen == seen
        assert torch.equal(stats.loss, losses)
        for name, expected in sqnorms.items():
            found = stats.by_parameter[name].double().sqrt()
            torch.testing.assert_close(found, expected.sqrt(), rtol=0.03, atol=1e-3 * largest)

    check(gs.per_example_norms(model, x, losses_of))
    for fused in (True, False):
        with gs.track(model, batch_size=5, fused=fused) as tracker:
            tracker.backward(losses_of(model, x))
        check(tracker.stats)
