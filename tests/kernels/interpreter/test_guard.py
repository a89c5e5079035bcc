"""The guard of Gram forms: who is suspect, and what takes the place of suspects.

Whatever no program wrote is NaN here, so that nothing is read of examples that are not suspect.
"""

import pytest
import torch
from gradstats.kernels import convolution_gram, gram, guard, operators
from gradstats.kernels._config import TileConfig

from tests.kernels import reference
from tests.kernels.cases import ragged, random
from tests.kernels.mutants import mutant
from tests.kernels.reference import NOBODY_SUSPECT, ROUNDING, assert_close

TILE = TileConfig(16, 16, 16, num_warps=1, num_stages=1)
TOLERANCE = ROUNDING[3]


def some_cancel(count, positions=21, d_in=40, d_out=24, dtype=torch.float32):
    """Factors of which every other one, from the second on, cancels; the third is zero."""
    a, g = (
        random((count, positions, d_in), dtype, "cpu", 1),
        random((count, positions, d_out), dtype, "cpu", 2),
    )
    half = positions // 2
    a[1::2, half : 2 * half] = a[1::2, :half]
    g[1::2, half : 2 * half] = random((half, d_out), dtype, "cpu", 3) / 256 - g[1::2, :half]
    a[1::2, 2 * half :] = 0
    if count > 2:
        g[2] = 0
    return a, g


def form(a, g, groups=1, tolerance=TOLERANCE, module=gram, **options):
    numbers = *ROUNDING[:3], tolerance
    return module.gram_sqnorm(a, g, groups, *numbers, config=TILE, direct_config=TILE, **options)


def check(got, a, g, groups=1, cu_seqlens=None):
    """Values and bounds, and who was suspect."""
    plain, limit = form(a, g, groups, NOBODY_SUSPECT, cu_seqlens=cu_seqlens)
    better = reference.sqnorm_reference(a, g, cu_seqlens).view(-1, groups).sum(1)
    terms = reference.gradients(a.abs(), g.abs(), cu_seqlens).square().sum((1, 2))
    value, bound = got
    suspect = limit > TOLERANCE * plain
    assert torch.equal(value[~suspect], plain[~suspect])
    assert torch.equal(bound[~suspect], limit[~suspect])
    scale = 2 * (terms.view(-1, groups).sum(1) * better).sqrt()
    assert_close(value[suspect], better[suspect], scale[suspect])
    assert torch.equal(bound[suspect], value[suspect] * ROUNDING[0])
    return suspect.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_suspects_are_replaced_and_nobody_else(dtype):
    a, g = some_cancel(5, dtype=dtype)
    assert check(form(a, g), a, g) == [False, True, False, True, False]


def test_groups_of_an_example_are_replaced_together():
    a, g = some_cancel(9)
    a[2], g[5] = 0, 0
    a[6:] = random((3, 21, 40), torch.float32, "cpu", 4)
    g[6:] = random((3, 21, 24), torch.float32, "cpu", 5)
    # the first and the second have groups that cancel beside one that does not
    assert check(form(a, g, 3), a, g, 3) == [False, False, False]
    g[3:6:2], a[4] = g[1], 0
    a[3:6:2] = a[1]
    assert check(form(a, g, 3), a, g, 3) == [False, True, False]


def test_one_example():
    a, g = (side[1:] for side in some_cancel(2))
    assert check(form(a, g), a, g) == [True]
    a, g = some_cancel(1)
    assert check(form(a, g), a, g) == [False]


def test_packed_examples():
    a, g, bounds = ragged([0, 18, 40, 1, 0], 33, 18, front=2, back=3)(torch.float32, 16, "cpu")
    first = int(bounds[2])
    a[first + 20 : first + 40] = a[first : first + 20]
    rest = random((20, 18), torch.float32, "cpu", 6) / 256
    g[first + 20 : first + 40] = rest - g[first : first + 20]
    suspect = check(form(a, g, cu_seqlens=bounds), a, g, cu_seqlens=bounds)
    assert suspect == [False, False, True, False, False]


def test_strided_operands():
    a, g = some_cancel(4, positions=20)
    for turned in ((a.mT.contiguous().mT, g), (a, g.mT.contiguous().mT)):
        assert check(form(*turned), a, g) == [False, True, False, True]
    turned = a.mT.contiguous().mT, g.mT.contiguous().mT
    assert check(form(*turned), *turned) == [False, True, False, True]


def test_operands_of_nobody_and_nothing():
    for shape in ((0, 3), (2, 0)):
        value, bound = form(torch.ones(*shape, 5), torch.ones(*shape, 4))
        assert value.tolist() == bound.tolist() == [0.0] * shape[0]
    for d_in, d_out in ((0, 4), (5, 0)):
        value, bound = form(torch.ones(2, 3, d_in), torch.ones(2, 3, d_out), tolerance=0.0)
        assert value.tolist() == bound.tolist() == [0.0, 0.0]


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_what_is_no_number_is_no_number_afterwards(number):
    a, g = some_cancel(4)
    a[3, 2, 1] = number
    value, bound = form(a, g)
    assert value.isfinite().tolist() == bound.isfinite().tolist() == [True, True, True, False]
    torch.testing.assert_close(
        value[:3], reference.sqnorm_reference(a[:3], g[:3]), rtol=1e-4, atol=0
    )


@pytest.mark.parametrize("at_once", [1, 4])
def test_sums_of_many_tiles_and_groups(monkeypatch, at_once):
    """However few of them are read at once."""
    monkeypatch.setattr(guard, "AT_ONCE", at_once)
    a, g = (
        random((6, 40, 20), torch.float32, "cpu", 1),
        random((6, 40, 18), torch.float32, "cpu", 2),
    )
    for groups in (1, 3):
        numbers = 0.5, 0.25, 0.75
        for tolerance in (NOBODY_SUSPECT, 0.0):
            rounding = *numbers, tolerance
            got = gram.gram_sqnorm(a, g, groups, *rounding, config=TILE, direct_config=TILE)
            want = operators.gram_sqnorm(a, g, groups, *rounding)
            for one, other in zip(got, want, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=0)


@pytest.mark.parametrize(("groups", "programs"), [(1, 1), (2, 4), (1, 10)])
def test_however_few_programs_look_after_suspects(monkeypatch, groups, programs):
    """The same is computed and added up, by fewer programs than an example has tiles."""
    a, g = some_cancel(4)
    x, y = a.mT, g.mT
    if groups == 2:
        x, y = x.reshape(2, 80, 21), y.reshape(2, 48, 21)
    layer = (1,), (1,), (0,), (1,), groups
    tiles = {"config": TILE, "direct_config": TILE}

    def both():
        linear = form(a, g, groups, tolerance=0.0)
        numbers = *ROUNDING[:3], 0.0
        return *linear, *convolution_gram.convolution_gram_sqnorm(x, y, *layer, *numbers, **tiles)

    want = both()
    monkeypatch.setattr(guard, "PROGRAMS", programs)
    for one, other in zip(both(), want, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("cut_off, counts", [(1e-5, "magnitude"), (0.0, "size")])
def test_the_larger_of_two_bounds_counts(cut_off, counts):
    a, g = some_cancel(2)
    adding, products = 2.0**-22, 2.0**-40 if counts == "magnitude" else 2.0**-20
    _, bound = gram.gram_sqnorm(a, g, 1, adding, products, cut_off, NOBODY_SUSPECT, config=TILE)
    magnitude = reference.magnitude_reference(a, g)
    size = reference.size_reference(a, g)
    other = cut_off * magnitude if counts == "magnitude" else products * size.square()
    torch.testing.assert_close(bound, adding * magnitude + other, rtol=1e-5, atol=0)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("channels", [4, 20])
def test_convolutions(groups, channels):
    """Of the second example the second half of the positions takes away what the first adds."""
    layer = (3,), (1,), (0,), (1,), groups
    x, g = (
        random((3, channels, 44), torch.float32, "cpu", 1),
        random((3, 18, 42), torch.float32, "cpu", 2),
    )
    # the two halves see the same patches where the input repeats itself
    x[1] = x[1, :, :22].repeat(1, 2)
    g[1, :, 22:] = 1e-3 * random((18, 20), torch.float32, "cpu", 3) - g[1, :, :20]
    g[1, :, 20:22] = 0
    layer_of = (x, g, *layer)
    tiles = {"config": TILE, "direct_config": TILE}
    call = convolution_gram.convolution_gram_sqnorm
    value, bound = call(*layer_of, *ROUNDING, **tiles)
    plain, limit = call(*layer_of, *ROUNDING[:3], NOBODY_SUSPECT, **tiles)
    suspect = limit > TOLERANCE * plain
    assert suspect.tolist() == [False, True, False]
    want = operators.convolution_sqnorm(*layer_of)
    torch.testing.assert_close(value, want, rtol=1e-4, atol=0)
    assert torch.equal(value[~suspect], plain[~suspect])
    assert torch.equal(bound, torch.where(suspect, value * ROUNDING[0], limit))


BROKEN = {
    "one group": (gram, "example * groups + part // tiles", "example * groups"),
    "another example": (gram, "example * groups + part // tiles", "part // tiles"),
    "one tile": (gram, "grouped(part % tiles, row", "grouped(0 * part, row"),
    "the first tiles alone": (gram, "(first_part, parts, programs,", "(first_part, 2, 1,"),
    "parts left out": (guard, "squares += tl.load(base + part", "squares = tl.load(base + part"),
    "sums of one group": (guard, "* groups + group) * pairs", "* groups + 0 * group) * pairs"),
    "bound of one group": (guard, "bounds += magnitude", "bounds = magnitude"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_guard_that_is_broken_in_one_line_is_seen(name, tmp_path, monkeypatch):
    module, old, new = BROKEN[name]
    broken = mutant(module, old, new, tmp_path)
    monkeypatch.setattr(guard, "AT_ONCE", 2)
    monkeypatch.setattr(guard, "PROGRAMS", 4)
    broken.AT_ONCE = 2
    if module is guard:
        monkeypatch.setattr(gram, "is_suspect", broken.is_suspect)
        monkeypatch.setattr(guard, "replace_kernel", broken.replace_kernel)
    else:
        monkeypatch.setattr(gram, "recompute_kernel", broken.recompute_kernel)
    a, g = (
        random((6, 40, 40), torch.float32, "cpu", 1),
        random((6, 40, 24), torch.float32, "cpu", 2),
    )
    rounding = 0.5, 0.25, 0.75
    wrong = 0
    for tolerance in (NOBODY_SUSPECT, 0.0):
        numbers = *rounding, tolerance
        got = gram.gram_sqnorm(a, g, 3, *numbers, config=TILE, direct_config=TILE)
        want = operators.gram_sqnorm(a, g, 3, *numbers)
        wrong += not all(map(torch.allclose, got, want))
    assert wrong
