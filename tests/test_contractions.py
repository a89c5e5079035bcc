"""Contractions against the definition: factor.dense(), squared and summed in float64."""

from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from gradstats import _convolution_cost, _cost, contractions
from gradstats._factors import (
    ConvolutionGeometry,
    Distances,
    Elementwise,
    Experts,
    Images,
    Masked,
    Outer,
    Patches,
    Ragged,
    Rows,
    Tangent,
    Vector,
    map_tensors,
)
from gradstats.contractions import _outer, _patches, _ragged, _rows, _tied
from gradstats.contractions._table import MODULES
from tests.dispatched import Operations, tensors_in

WORKSPACE = 2**28
TINY = 1


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def outer(batch=3, groups=1, positions=4, p=3, q=2) -> Outer:
    shape = (p, q) if groups == 1 else (groups, p, q)
    return Outer(normal(batch, groups, positions, p), normal(batch, groups, positions, q), shape)


def patches(batch=3, channels=4, out=6, groups=2, kernel=(3, 2), stride=(2, 1)) -> Patches:
    x = normal(batch, channels, 7, 6)
    geometry = ConvolutionGeometry(stride, (1, 0), (1, 2), groups)
    weight = normal(out, channels // groups, *kernel)
    y = functional.conv2d(x, weight, None, stride, (1, 0), (1, 2), groups)
    return Patches(x, normal(*y.shape), tuple(weight.shape), geometry)


def rows(counts, width=2, table=4) -> Rows:
    example = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    count = sum(counts)
    return Rows(
        torch.randint(0, table, (count,)),
        normal(count, width),
        example,
        len(counts),
        (table, width),
    )


def ragged(lengths: list[int], p: int = 3, q: int = 2) -> Ragged:
    offsets = (0, *torch.tensor(lengths).cumsum(0).tolist())
    return Ragged(normal(offsets[-1], p), normal(offsets[-1], q), offsets, (p, q))


def vectors() -> list[Vector]:
    return [
        Vector(normal(3, 4, 2), (4, 2)),
        Vector(normal(3), ()),
        Vector(normal(3, 4, 2), (4, 3, 2), axis=1),
    ]


def defined(*factors) -> Tensor:
    """Return ‖Σ_u F_u[i]‖² by the definition."""
    total = sum(factor.dense().double() for factor in factors)
    return total.reshape(len(total), -1).square().sum(1)


def assert_exact(result: contractions.Contraction, *factors, rtol: float = 1e-12) -> None:
    expected = defined(*factors)
    assert result.value.dtype == result.bound.dtype == torch.float64
    assert result.value.shape == result.bound.shape == (factors[0].batch,)
    torch.testing.assert_close(result.value, expected, rtol=rtol, atol=1e-200)
    assert (result.bound >= 0).all()


@pytest.mark.parametrize("kind", MODULES, ids=lambda kind: kind.__name__)
def test_the_module_of_a_kind_of_factor_has_all_its_contractions(kind):
    assert all(callable(getattr(MODULES[kind], name)) for name in ("sqnorm", "direction", "total"))


@contextmanager
def in_a_graph():
    """Take the forms that compiled graphs take, which cannot read results back."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_outer, "is_compiling", lambda: True)
        yield


@settings(max_examples=25)
@given(
    st.integers(1, 4), st.integers(1, 3), st.integers(1, 6), st.integers(1, 5), st.integers(1, 5)
)
def test_every_form_agrees_with_the_definition(batch, groups, positions, p, q):
    factor = outer(batch, groups, positions, p, q)
    for workspace in (WORKSPACE, TINY):
        assert_exact(_outer.gram(factor, workspace), factor)
        assert_exact(_outer.direct(factor, workspace), factor)
        assert_exact(contractions.sqnorm([factor], workspace), factor)
        with in_a_graph():
            assert_exact(contractions.sqnorm([factor], workspace), factor)
        result, total = contractions.sqnorm_and_sum(factor, workspace)
        assert_exact(result, factor)
        torch.testing.assert_close(total, factor.dense().sum(0))
    if positions == 1:
        assert_exact(_outer.rank_one(factor), factor)


@pytest.mark.parametrize("positions", [64, 96, 127, 128, 129, 200, 512])
def test_gram_blocks(positions):
    factor = outer(2, 2, positions, 3, 4)
    for workspace in (WORKSPACE, 2**16, TINY):
        result = _outer.gram(factor, workspace)
        assert_exact(result, factor)
        sizes = factor.left.norm(dim=-1) * factor.right.norm(dim=-1)
        bound = torch.finfo(torch.float64).eps / 2 * sizes.sum(2).square().sum(1)
        torch.testing.assert_close(result.bound, bound)


@pytest.mark.parametrize("positions", [96, 128])
def test_gram_of_rows_that_lie_apart(positions):
    left = normal(3, 1, positions + 5, 8)[:, :, 2:-3, ::2]
    right = normal(1, positions, 3, 6).permute(2, 0, 1, 3)
    factor = Outer(left, right, (4, 6))
    assert_exact(_outer.gram(factor, WORKSPACE), factor)
    assert_exact(_outer.gram(factor, TINY), factor)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("p, q", [(300, 220), (220, 300)])
def test_large_gradients_are_formed_one_at_a_time(groups, p, q):
    factor = outer(3, groups, 5, p, q)
    for workspace in (WORKSPACE, 8 * 100 * p):
        assert_exact(_outer.direct(factor, workspace), factor)
        result, total = _outer._direct(factor, workspace, with_sum=True)
        assert_exact(result, factor)
        torch.testing.assert_close(total, factor.dense().sum(0))
        assert total.is_contiguous()


def test_large_gradients_of_narrow_operands():
    wide = outer(3, 1, 5, 400, 500)
    factor = Outer(wide.left.bfloat16(), wide.right.half(), wide.shape)
    result, total = _outer._direct(factor, WORKSPACE, with_sum=True)
    rounded = Outer(factor.left.double(), factor.right.double(), factor.shape)
    assert_exact(result, rounded, rtol=1e-6)
    assert total.dtype == torch.float32
    torch.testing.assert_close(total.double(), rounded.dense().sum(0), rtol=1e-5, atol=1e-5)


def test_no_positions_give_zero():
    factor = outer(positions=0)
    assert torch.equal(contractions.sqnorm([factor], WORKSPACE).value, torch.zeros(3).double())
    result, total = contractions.sqnorm_and_sum(factor, WORKSPACE)
    assert not result.value.any() and not total.any() and total.shape == (3, 2)


def test_operands_of_any_stride():
    left = normal(5, 3, 1, 4).transpose(0, 2).transpose(0, 1).expand(3, 2, 5, 4)
    factor = Outer(left, normal(3, 5, 2, 2).transpose(1, 2), (2, 4, 2))
    for form in (_outer.gram, _outer.direct):
        assert_exact(form(factor, WORKSPACE), factor)


def test_the_parameters_axes_may_be_permuted():
    factor = Outer(normal(3, 2, 5, 6), normal(3, 2, 5, 4), (4, 2, 3, 2), (3, 0, 1, 2), (2, 3, 2, 4))
    gradient = torch.einsum("bktp,bktq->bkpq", factor.left, factor.right)
    expected = gradient.view(3, 2, 3, 2, 4).permute(0, 4, 1, 2, 3)
    torch.testing.assert_close(factor.dense(), expected)
    result, total = contractions.sqnorm_and_sum(factor, WORKSPACE)
    assert_exact(result, factor)
    torch.testing.assert_close(total, expected.sum(0))


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("out, kernel", [(6, (3, 2)), (2, (1, 1)), (40, (3, 3))])
def test_patches(groups, out, kernel):
    factor = patches(batch=5, out=out, groups=groups, kernel=kernel)
    x, g = factor.input, factor.grad
    for example in range(factor.batch):
        weight = normal(*factor.shape).requires_grad_()
        y = functional.conv2d(
            x[example : example + 1], weight, None, (2, 1), (1, 0), (1, 2), groups
        )
        (gradient,) = torch.autograd.grad(y, weight, g[example : example + 1])
        torch.testing.assert_close(factor.dense()[example], gradient)
    torch.testing.assert_close(factor.unfolded().dense(), factor.dense())
    for workspace in (WORKSPACE, TINY):
        assert_exact(contractions.sqnorm([factor], workspace), factor)
        for alone in (False, True):
            result, total = _patches._convolved(factor, workspace, alone=alone, with_sum=True)
            assert_exact(result, factor)
            torch.testing.assert_close(total, factor.dense().sum(0))
        result, total = contractions.sqnorm_and_sum(factor, workspace)
        assert_exact(result, factor)
        torch.testing.assert_close(total, factor.dense().sum(0))


CONVOLUTIONS = {
    # channels, out, size, kernel, stride, padding, groups: how its gradients are formed
    "few channels": (3, 20, (12, 11), (3, 3), (1, 1), (1, 1), 1),
    "pointwise": (9, 5, (8, 8), (1, 1), (1, 1), (0, 0), 1),
    "pointwise with a stride": (9, 5, (17, 18), (1, 1), (2, 2), (0, 0), 1),
    "pointwise with few positions": (40, 50, (3, 3), (1, 1), (1, 1), (0, 0), 1),
    "one position": (10, 12, (3, 3), (3, 3), (1, 1), (0, 0), 1),
    "few positions": (24, 40, (4, 4), (3, 3), (1, 1), (1, 1), 1),
    "few positions in groups": (48, 80, (4, 4), (3, 3), (1, 1), (1, 1), 2),
    "many positions": (8, 8, (12, 12), (3, 3), (1, 1), (1, 1), 1),
    "channels each on its own": (8, 8, (12, 12), (3, 3), (1, 1), (1, 1), 8),
    "one axis": (9, 12, (30,), (5,), (2,), (1,), 1),
    "frame by frame": (9, 12, (4, 6, 6), (3, 3), (1, 1, 1), (0, 1, 1), 1),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "channels last"])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_every_form_of_a_convolution(name, layout, dtype):
    channels, out, size, kernel, stride, padding, groups = CONVOLUTIONS[name]
    geometry = ConvolutionGeometry(stride, padding, (1,) * len(stride), groups)
    full = (1,) * (len(stride) - len(kernel)) + kernel
    convolve = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}[len(stride)]
    weight = normal(out, channels // groups, *full).requires_grad_()
    x = normal(5, channels, *size)
    y = convolve(x, weight, None, stride, padding, 1, groups)
    g = normal(*y.shape)
    x, g = x.to(dtype), g.to(dtype)
    wide_x, wide_g = x.double(), g.double()
    gradients = []
    for example in range(5):
        one = slice(example, example + 1)
        y = convolve(wide_x[one], weight, None, stride, padding, 1, groups)
        gradients.append(torch.autograd.grad(y, weight, wide_g[one])[0])
    expected = torch.stack(gradients).reshape(5, out, channels // groups, *kernel)
    if layout == "channels last":
        x, g = (side.movedim(1, -1).contiguous().movedim(-1, 1) for side in (x, g))
    factor = Patches(x, g, expected.shape[1:], geometry)
    roundoff = 1e-12 if dtype == torch.float64 else 1e-5
    sum_roundoff = 1e-2 if dtype == torch.bfloat16 else roundoff
    sqnorm = expected.flatten(1).square().sum(1)
    for workspace in (WORKSPACE, TINY):
        found = contractions.sqnorm([factor], workspace).value
        torch.testing.assert_close(found, sqnorm, rtol=roundoff, atol=0)
        result, total = contractions.sqnorm_and_sum(factor, workspace)
        torch.testing.assert_close(result.value, sqnorm, rtol=roundoff, atol=0)
        torch.testing.assert_close(
            total.double(), expected.sum(0), rtol=sum_roundoff, atol=10 * sum_roundoff
        )
        formed = factor.dense().double()
        torch.testing.assert_close(formed, expected, rtol=roundoff, atol=100 * roundoff)


def test_large_images_of_few_channels_are_convolved_one_by_one(monkeypatch):
    geometry = ConvolutionGeometry((1, 2), (1, 1), (1, 1), 1)
    factor = Patches(normal(5, 3, 9, 12), normal(5, 20, 9, 6), (20, 3, 3, 3), geometry)
    for limit, way in ((factor.positions * 27, "patches"), (factor.positions * 27 - 1, "alone")):
        monkeypatch.setattr(_convolution_cost, "MANY_PATCHES", limit)
        assert factor.way == way
        assert_exact(contractions.sqnorm([factor], WORKSPACE), factor)
        result, total = contractions.sqnorm_and_sum(factor, WORKSPACE)
        assert_exact(result, factor)
        torch.testing.assert_close(total, factor.unfolded().dense().sum(0))


def test_patches_are_written_for_a_few_examples_at_a_time():
    """Pieces that the C library maps afresh each time cost more than writing there."""
    geometry = ConvolutionGeometry((1,), (0,), (1,), 1)
    images, grad = (torch.empty(99, *size, device="meta") for size in ((32, 1025), (4, 1024)))
    factor = Patches(images, grad, (4, 32, 2), geometry)
    for workspace, most in ((WORKSPACE, 64), (2 * factor.patch_bytes + 1, 2), (1, 1)):
        sizes = [rows.stop - rows.start for rows in _patches._pieces(factor, workspace)]
        assert max(sizes) == sizes[0] == most and sum(sizes) == 99


def test_what_a_convolution_writes_anew_is_limited():
    """Pieces that the C library maps afresh each time cost more than the gradients in them."""
    images, grad = torch.randn(32, 128, 20, 20), torch.randn(32, 128, 20, 20)
    geometry = ConvolutionGeometry((1, 1), (1, 1), (1, 1), 1)
    factor = Patches(images, grad, (128, 128, 3, 3), geometry)
    with Operations(created) as operations:
        contractions.sqnorm([factor], WORKSPACE)
    assert max(operations.found) <= _cost.FRESH_BYTES < 32 * 128 * 128 * 9 * 4


@pytest.mark.parametrize("counts", [[3, 2, 4], [0, 3, 0], [0, 0, 5, 0], [0, 0], [1]], ids=str)
def test_rows_of_examples_with_any_number_of_ids(counts, monkeypatch):
    factor = rows(counts)
    expected = torch.zeros(len(counts), 4, 2).double()
    for n, example in enumerate(factor.example.tolist()):
        expected[example, factor.ids[n]] += factor.grad[n]
    torch.testing.assert_close(factor.dense(), expected)
    assert_exact(contractions.sqnorm([factor], WORKSPACE), factor)
    assert_exact(contractions.sqnorm([factor], TINY), factor)
    keys = (factor.example * 4 + factor.ids).sort().values
    ascending = replace(factor, ids=keys % 4)  # equal ids are neighbours
    assert_exact(contractions.sqnorm([ascending], WORKSPACE), ascending)
    monkeypatch.setattr(_rows, "BLOCK", 1)  # a few examples at a time
    assert_exact(contractions.sqnorm([factor], WORKSPACE), factor)


@pytest.mark.parametrize("scratch", [2**20, 1])
def test_rows_that_are_compared_pair_by_pair(scratch, monkeypatch):
    monkeypatch.setattr(_rows, "SCRATCH", scratch)
    factor = rows([5, 5, 5])
    ids, grad = factor.ids.view(3, 5), factor.grad.view(3, 5, -1)
    assert_exact(contractions.sqnorm_of_few(ids, grad), factor)


def test_vectors():
    for factor in vectors():
        assert_exact(contractions.sqnorm([factor], WORKSPACE), factor)
    own = vectors()[2]
    for example in range(3):
        gradient = own.dense()[example]
        assert torch.equal(gradient[:, example], own.values[example])
        gradient[:, example] = 0
        assert not gradient.any()


@pytest.mark.parametrize("index", [slice(1, 3), torch.tensor([0, 2]), torch.tensor([2])], ids=str)
def test_select(index):
    for factor in (outer(), patches(), rows([2, 0, 3]), *vectors()):
        part = factor.select(index)
        torch.testing.assert_close(part.dense(), factor.dense()[index])
        assert_exact(contractions.sqnorm([part], WORKSPACE), part)
    twice = vectors()[2].select(slice(1, 3))
    torch.testing.assert_close(twice.select(slice(1, 2)).dense(), twice.dense()[1:2])


def test_transposed():
    factor = outer()
    torch.testing.assert_close(factor.transposed().dense(), factor.dense().mT)


SUMS = {
    "outer + outer": lambda: [outer(positions=4), outer(positions=1), outer(positions=9)],
    "rows + rows": lambda: [rows([2, 0, 3], table=2), rows([1, 4, 3], table=2)],
    "vector + vector": lambda: [vectors()[0], vectors()[0]],
    "slice + slice": lambda: [vectors()[2], vectors()[2]],
    "slice + vector": lambda: [vectors()[2], Vector(normal(3, 4, 3, 2), (4, 3, 2))],
    "outer + rows": lambda: [outer(p=4), rows([2, 0, 3])],
    "rows + outer": lambda: [rows([0, 5, 1]), outer(p=4, positions=2), rows([1, 1, 1])],
    "outer + vector": lambda: [outer(p=4), Vector(normal(3, 4, 2), (4, 2))],
    "rows + vector + outer": lambda: [rows([2, 0, 3]), Vector(normal(3, 4, 2), (4, 2)), outer(p=4)],
    "patches + patches": lambda: [patches(), patches()],
    "groups + one group": lambda: [
        Outer(normal(3, 4, 5, 2), normal(3, 4, 5, 1), (4, 2)),
        outer(p=4),
    ],
    "groups + rows": lambda: [
        rows([2, 0, 3]),
        Outer(normal(3, 4, 5, 2), normal(3, 4, 5, 1), (4, 2)),
    ],
    "rows of rows + rows": lambda: [
        Outer(normal(3, 1, 5, 8), normal(3, 1, 5, 3), (4, 2, 3)),
        Rows(torch.arange(4), normal(4, 6), torch.tensor([0, 0, 1, 2]), 3, (4, 2, 3)),
    ],
    "permuted + rows": lambda: [
        Outer(normal(3, 1, 5, 4), normal(3, 1, 5, 4), (4, 4), (1, 0), (4, 4)),
        rows([2, 1, 3], width=4),
    ],
    "permuted + not": lambda: [
        Outer(normal(3, 1, 5, 2), normal(3, 1, 5, 4), (4, 2), (1, 0), (2, 4)),
        outer(p=4),
    ],
}


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("workspace", [WORKSPACE, TINY])
def test_sums_of_uses(name, workspace):
    factors = SUMS[name]()
    assert_exact(contractions.sqnorm(factors, workspace), *factors)
    assert not torch.allclose(defined(*factors), sum(defined(factor) for factor in factors))


@pytest.mark.parametrize("workspace", [WORKSPACE, TINY])
@pytest.mark.parametrize("counts", [[2, 0, 6], [1, 3, 1, 3], [6, 2, 6, 2]], ids=str)
def test_cross_term_of_a_projection_and_an_embedding(workspace, counts):
    left, right = outer(len(counts), p=4, positions=5), rows(counts)
    expected = (left.dense() * right.dense()).sum((1, 2))
    cross = _tied.inner_with_rows(left, right, workspace)
    torch.testing.assert_close(cross, expected)
    assert all(cross[i] == 0 for i, count in enumerate(counts) if not count)
    assert cross.dtype == torch.float64


@pytest.mark.parametrize("workspace", [WORKSPACE, TINY])
@pytest.mark.parametrize("kind", [outer, ragged], ids=lambda kind: kind.__name__)
def test_cross_term_with_rows_of_which_shapes_tell_how_many(kind, workspace):
    left = outer(p=4) if kind is outer else ragged([3, 0, 2], p=4)
    alike = replace(rows([2, 2, 2]), longest=2)
    # As many rows as two for each example, but not two for each.
    uneven = _rows.merge([replace(rows([2, 0, 1]), longest=2), rows([0, 3, 0])])
    assert (alike.each, uneven.each) == (2, None)
    for right in (alike, uneven):
        expected = (left.dense() * right.dense()).sum((1, 2))
        torch.testing.assert_close(_tied.inner_with_rows(left, right, workspace), expected)


def created(name, inputs, result):
    """Find the bytes of the largest storage that an operation created."""
    known = {tensor.untyped_storage().data_ptr() for tensor in tensors_in(inputs)}
    storages = [tensor.untyped_storage() for tensor in tensors_in(result)]
    return max((each.nbytes() for each in storages if each.data_ptr() not in known), default=0)


def test_nothing_larger_than_the_workspace_is_created():
    workspace = 64 * 1024
    wide = outer(16, positions=40, p=100, q=120)  # a gradient of 96 kB for each example
    large = rows([50] * 16, width=64, table=500)  # a gradient of 256 kB for each example
    longer = rows([400, 50], width=64, table=500)  # rows of 200 kB for one example
    table = Outer(normal(16, 1, 4, 500), normal(16, 1, 4, 64), (500, 64))
    images = patches(batch=64)
    for call in (
        lambda: _outer.gram(wide, workspace),
        lambda: _outer.direct(wide, workspace),
        lambda: contractions.sqnorm([wide], workspace),
        lambda: contractions.sqnorm([large], workspace),
        lambda: contractions.sqnorm([longer], workspace),
        lambda: contractions.sqnorm([images], workspace),
        lambda: _tied.inner_with_rows(table, large, workspace),
        lambda: contractions.sqnorm([table, large], workspace),
    ):
        call()
        with Operations(created) as operations:
            call()
        assert 0 < max(operations.found) <= workspace


@pytest.mark.parametrize("every", [1, 2], ids=["one each", "some without rows"])
def test_uses_of_one_example_each_meet_in_linear_time(every):
    """As of a model that is called for one example at a time."""

    def count(batch: int) -> int:
        uses = [
            ragged([2 * (example == use) for example in range(batch)])
            for use in range(0, batch, every)
        ]
        dense = sum(use.dense() for use in uses)
        with Operations() as operations:
            (merged,) = contractions.merge(uses)
        torch.testing.assert_close(merged.dense(), dense, rtol=0, atol=0)
        assert merged.offsets[-1] == 2 * len(uses)
        return len(operations.found)

    assert count(64) < 2.2 * count(32)


def test_uses_without_rows_meet():
    (merged,) = contractions.merge([ragged([0, 0, 0]), ragged([0, 0, 0])])
    assert merged.dense().shape == (3, 3, 2)
    assert not merged.dense().any()


@pytest.mark.parametrize("alone", [0, 25, None], ids=["each alone", "some alone", "together"])
@pytest.mark.parametrize("widths", [(3, 2), (400, 300)], ids=["formed", "Gram matrices"])
def test_packed_examples(alone, widths, monkeypatch):
    """Long examples are contracted where they are, short ones side by side; none has no rows."""
    if alone is not None:
        monkeypatch.setattr(_ragged, "ALONE", alone * sum(widths) // 5)
        monkeypatch.setattr(_ragged, "FORMED_ALONE", alone * sum(widths) // 5)
    lengths = [3, 1, 0, 9, 4, 5, 1]
    factor = ragged(lengths, *widths)
    dense = torch.stack(
        [
            factor.left[start:end].T @ factor.right[start:end]
            for start, end in pairwise(factor.offsets)
        ]
    )
    torch.testing.assert_close(factor.dense(), dense)
    formed = _ragged.formed_alone(factor, WORKSPACE)
    assert formed == ({0: [0, 3, 4, 5], 25: [3, 5], None: []}[alone] if sum(widths) < 9 else [])
    for workspace in (WORKSPACE, TINY):
        assert_exact(contractions.sqnorm([factor], workspace), factor)
        result, total = contractions.sqnorm_and_sum(factor, workspace)
        assert_exact(result, factor)
        torch.testing.assert_close(total, dense.sum(0))


def test_groups_of_packed_examples(monkeypatch):
    """Few rows are filled up, unless that takes less than another group."""
    factor, every = ragged([3, 1, 0, 9, 4, 5, 1]), range(7)
    assert _ragged.groups(factor, every, WORKSPACE) == [[0, 1, 3, 4, 5, 6]]
    assert _ragged.groups(factor, [1, 2, 5], WORKSPACE) == [[1, 5]]
    assert _ragged.groups(factor, every, TINY) == [[1], [6], [0], [4], [5], [3]]
    monkeypatch.setattr(_ragged, "ANOTHER_GROUP", 0)
    assert _ragged.groups(factor, every, WORKSPACE) == [[1, 6], [0, 4, 5], [3]]
    monkeypatch.setattr(_ragged, "ALONE", 25)
    assert _ragged.groups(factor, every, WORKSPACE) == [[1, 6], [0, 4], [5], [3]]
    monkeypatch.setattr(_ragged, "ALONE", 0)
    assert _ragged.groups(factor, every, WORKSPACE) == [[1], [6], [0], [4], [5], [3]]


def experts(counts, p=3, q=2) -> Experts:
    """Return experts with given numbers of rows of each example."""
    lengths = torch.tensor(counts)
    offsets = (0, *lengths.flatten().cumsum(0).tolist())
    pairs = Ragged(normal(offsets[-1], p), normal(offsets[-1], q), offsets, (p, q))
    return Experts(pairs, lengths.shape[1], (len(counts), p, q))


@pytest.mark.parametrize(
    "counts",
    [
        [[1, 0, 2], [3, 4, 1], [0, 0, 0], [9, 0, 1]],
        [[0, 0], [0, 0]],
        [[5]],
        [[2, 2, 2], [2, 2, 2]],
    ],
    ids=str,
)
def test_experts(counts):
    first, second = experts(counts), experts(counts[::-1])
    dense, other = (factor.dense() for factor in (first, second))
    for workspace in (WORKSPACE, TINY):
        assert_exact(contractions.sqnorm([first], workspace), first)
        both = contractions.sqnorm([first, second], workspace)
        assert_exact(both, first, second)
        sizes = tuple(t.flatten(1).norm(dim=1) for t in (dense, other))
        pairs = contractions.inner_pairs([first], [second], workspace, sizes)
        torch.testing.assert_close(pairs, dense.flatten(1) @ other.flatten(1).T)
        diagonal = contractions.inner_diagonal([first], [second], workspace, sizes)
        torch.testing.assert_close(diagonal, (dense * other).flatten(1).sum(1))
        direction = normal(*first.shape)
        along = contractions.direction_inner([first], direction, workspace)
        torch.testing.assert_close(along, (dense * direction).flatten(1).sum(1))
    torch.testing.assert_close(contractions.total([first]), dense.sum(0))
    torch.testing.assert_close(first.transposed().dense(), dense.mT)
    torch.testing.assert_close(first.select([first.batch - 1]).dense(), dense[-1:])


def images() -> Images:
    pieces = tuple(patches(count) for count in (2, 1, 0, 2))
    return Images(pieces, (0, 2, 1, 2), 3)


def masked(inner) -> Masked:
    return Masked(inner, normal(*inner.shape))


def tangent(inner, over: tuple[int, ...]) -> Tangent:
    """Return gradients less half of their components along unit vectors over some of the axes."""
    weight = normal(*inner.shape)
    unit = weight / torch.linalg.vector_norm(weight, dim=over, keepdim=True)
    along = (inner.dense() * unit).sum([axis + 1 for axis in over], keepdim=True)
    return Tangent(inner, unit, along, torch.full(along.shape[1:], 0.5, dtype=torch.float64))


MET = {
    "a product": lambda: outer(p=6),
    "one position": lambda: outer(positions=1, p=6),
    "a product of rows in groups": lambda: Outer(normal(3, 2, 4, 3), normal(3, 2, 4, 2), (6, 2)),
    "a transposed product": lambda: Outer(
        normal(3, 1, 4, 2), normal(3, 1, 4, 6), (6, 2), (1, 0), (2, 6)
    ),
    "one position, transposed": lambda: Outer(
        normal(3, 1, 1, 2), normal(3, 1, 1, 6), (6, 2), (1, 0), (2, 6)
    ),
    "one position, of elements": lambda: Outer(normal(3, 1, 1, 12), normal(3, 1, 1, 1), (6, 2)),
    "look-ups": lambda: rows([2, 0, 3], table=6),
    "packed": lambda: ragged([2, 0, 3], p=6),
}


@pytest.mark.parametrize("first", MET)
@pytest.mark.parametrize("second", [kind for kind in MET if kind != "look-ups"])
def test_masked_uses_meet_others(first, second):
    one, two = MET[first](), masked(MET[second]())
    others = [two, masked(two.inner)] if first == "look-ups" else [two, masked(one)]
    for workspace in (WORKSPACE, TINY):
        assert_exact(contractions.sqnorm([two], workspace), two)
        assert_exact(contractions.sqnorm([one, two], workspace), one, two)
        assert_exact(contractions.sqnorm(others, workspace), *others)


def distances() -> Distances:
    rows, points = normal(3, 4, 2), normal(6, 2)
    apart = torch.cdist(rows, points)
    apart[0, 1, 2] = apart[2, 0, 5] = 0
    return Distances(normal(3, 4, 6), apart, rows, points)


NARROWED = {
    "outer": outer(p=6),
    "groups": outer(groups=3),
    "rows of groups": Outer(normal(3, 2, 4, 3), normal(3, 2, 4, 2), (6, 2)),
    "groups of a row": Outer(normal(3, 6, 4, 2), normal(3, 6, 4, 2), (3, 4, 2)),
    "a row of several": Outer(normal(3, 1, 4, 6), normal(3, 1, 4, 2), (3, 2, 2)),
    "patches": patches(groups=1),
    "patches of groups": patches(),
    "images": images(),
    "rows": rows([2, 0, 3], table=6),
    "ragged": ragged([2, 0, 3], p=6),
    "experts": experts([[1, 0, 2], [3, 4, 1], [0, 0, 0], [9, 0, 1], [0, 1, 0], [2, 1, 1]]),
    "vector": Vector(normal(3, 6, 2), (6, 2)),
    "slices": Vector(normal(3, 6, 2), (6, 3, 2), axis=1),
    "masked": masked(outer(p=6)),
    "masked patches": masked(patches()),
    "masked ragged": masked(ragged([2, 0, 3], p=6)),
    "without parts along rows": tangent(outer(p=6), (1,)),
    "without parts along columns": tangent(outer(p=6), (0,)),
    "without the part along all": tangent(patches(), (0, 1, 2, 3)),
    "twice": tangent(tangent(outer(p=6), (1,)), (0, 1)),
    "distances": distances(),
}


@pytest.mark.parametrize("factor", NARROWED.values(), ids=NARROWED)
def test_narrow(factor):
    """Rows of the parameter, and examples, are those of the whole gradients."""
    dense, step = factor.dense(), factor.granule
    assert step > 0
    for start in range(0, factor.shape[0], step):
        for stop in range(start + step, factor.shape[0] + 1, step):
            part = factor.narrow(start, stop)
            assert tuple(part.shape) == tuple(dense[0, start:stop].shape)
            torch.testing.assert_close(part.dense(), dense[:, start:stop])
            torch.testing.assert_close(part.select(slice(1, 3)).dense(), dense[1:3, start:stop])


def test_factors_that_cannot_be_narrowed():
    undivided = [
        Outer(normal(3, 2, 5, 6), normal(3, 2, 5, 4), (4, 2, 3, 2), (3, 0, 1, 2), (2, 3, 2, 4)),
        Outer(normal(3, 1, 4, 1), normal(3, 1, 4, 1), ()),
        Outer(normal(3, 1, 4, 1), normal(3, 1, 4, 6), (6,)),
        Outer(normal(3, 4, 5, 3), normal(3, 4, 5, 2), (6, 4)),
        Vector(normal(3), ()),
        Vector(normal(3, 2), (3, 2), axis=0),
    ]
    assert not any(factor.granule for factor in undivided)


@pytest.mark.parametrize("chosen", [slice(None), slice(1, 3), torch.tensor([0, 3])], ids=str)
def test_packed_scales_do_not_see_each_others_rows(chosen):
    """What fills up shorter examples is zero, whatever the first row holds."""
    grad, x = torch.randn(9, 5), torch.randn(9, 5)
    offsets = (0, 2, 6, 6, 9)
    rows = [slice(*bounds) for bounds in pairwise(offsets)]
    want = torch.stack([(grad[own] * x[own]).sum(0) for own in rows])[chosen]
    torch.testing.assert_close(Elementwise(grad, x, (5,), offsets).select(chosen).dense(), want)
    x[0] = torch.inf
    got = Elementwise(grad, x, (5,), offsets).dense()
    assert got.isfinite().all(1).tolist() == [False, True, True, True]


def test_no_packed_examples():
    assert Elementwise(torch.zeros(0, 5), None, (5,), (0,)).dense().shape == (0, 5)
    nothing = Ragged(torch.zeros(0, 2), torch.zeros(0, 3), (0,), (2, 3))
    assert nothing.dense().shape == (0, 2, 3)
    assert contractions.sqnorm([nothing], WORKSPACE).value.shape == (0,)
    for widths in ((3, 0), (0, 2), (0, 0)):
        assert (
            contractions.sqnorm([ragged([2, 0, 1], *widths)], WORKSPACE).value.tolist() == [0] * 3
        )


OF_LOW_PRECISION = {
    **{name: make for name, make in SUMS.items() if "groups" not in name},
    "outer": lambda: [outer(positions=300)],
    "patches": lambda: [patches()],
    "rows": lambda: [rows([300, 200, 0], table=2)],
    "vector": lambda: [vectors()[0]],
    "slice": lambda: [vectors()[2]],
    "outer + as many rows each": lambda: [outer(p=4), replace(rows([2, 2, 2]), longest=2)],
    "ragged + ragged": lambda: [ragged([300, 0, 200]), ragged([1, 2, 3])],
    "experts": lambda: [experts([[1, 0, 2], [3, 4, 1]])],
    "images": lambda: [images()],
}


@pytest.mark.parametrize("name", OF_LOW_PRECISION)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_operands_of_low_precision_are_summed_in_float32(name, dtype):
    def like(factors, dtype):
        def cast(tensor: Tensor) -> Tensor:
            return tensor.to(dtype) if tensor.is_floating_point() else tensor

        return [map_tensors(factor, cast) for factor in factors]

    factors = like(OF_LOW_PRECISION[name](), dtype)
    exact = sum(factor.dense() for factor in like(factors, torch.float64))
    size = exact.flatten(1).norm(dim=1)
    found = contractions.sqnorm(factors, WORKSPACE)
    torch.testing.assert_close(found.value, size.square(), rtol=1e-5, atol=0)
    direction = torch.randn(exact.shape[1:]).to(dtype)
    along = contractions.direction_inner(factors, direction, WORKSPACE)
    wrong = (along - (exact * direction.double()).flatten(1).sum(1)).abs()
    assert bool((wrong <= 1e-6 * size * direction.double().norm()).all())
    total = contractions.total(factors)
    assert total.dtype == torch.float32
    torch.testing.assert_close(
        total.double(), exact.sum(0), rtol=1e-5, atol=1e-6 * size.max().item()
    )
    pairs = contractions.inner_pairs(factors, factors, WORKSPACE, (size, size))
    expected = exact.flatten(1) @ exact.flatten(1).T
    assert bool(((pairs - expected).abs() <= 1e-6 * size[:, None] * size).all())
    same = contractions.inner_diagonal(factors, factors, WORKSPACE, (size, size))
    torch.testing.assert_close(same, size.square(), rtol=1e-5, atol=0)
