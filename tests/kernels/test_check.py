"""Bad input gets an error that says what, got, expected, and what to do, before any launch."""

import ast
from pathlib import Path

import pytest
import torch
from gradstats.kernels import (
    _check,
    _launching,
    diagonal,
    direct,
    direction,
    gram,
    pairwise,
    pairwise_direct,
    rank_one,
    weight_gradient,
)
from gradstats.kernels._check import KernelInputError

from tests.kernels.reference import ROUNDING

A, G = torch.ones(2, 3, 4), torch.ones(2, 3, 5)
PACKED_A, PACKED_G = A.flatten(0, 1), G.flatten(0, 1)
BOUNDS = torch.tensor([0, 3, 6])


@pytest.fixture(autouse=True)
def nothing_is_launched(monkeypatch):
    """Devices pass, so that the other checks are reached; a launch on these tensors would fail."""
    monkeypatch.setattr(_check, "_runs_here", lambda device: True)


def gram_sqnorm(a, g, **options):
    return gram.gram_sqnorm(a, g, 1, *ROUNDING, **options)


def refused(match, launcher, *operands, **options):
    with pytest.raises(KernelInputError, match=match):
        launcher(*operands, **options)


@pytest.mark.parametrize(
    "launcher",
    [gram_sqnorm, direct.direct_sqnorm, weight_gradient.weight_gradient_sqnorm],
    ids=lambda launcher: launcher.__name__,
)
class TestFactor:
    def test_dimensions(self, launcher):
        refused(r"expected a \(B, T, d_in\)", launcher, A[0], G[0])
        refused(r"expected packed a \(N, d_in\)", launcher, A, G, cu_seqlens=BOUNDS)

    def test_mismatched_batch_or_positions(self, launcher):
        refused("share their batch and position", launcher, A[:1], G)
        refused("share their batch and position", launcher, A[:, :1], G)
        refused("same rows; got 5 and 6", launcher, PACKED_A[:5], PACKED_G, cu_seqlens=BOUNDS)

    def test_dtypes(self, launcher):
        refused("float64: use the PyTorch backend", launcher, A.double(), G.double())
        refused("share one dtype; got torch.float32, torch.bfloat16", launcher, A, G.bfloat16())

    @pytest.mark.parametrize(
        "bounds, match",
        [
            ([0, 4, 3], "must not decrease, or segments overlap; got 4 then 3 at example 1"),
            ([-1, 3, 6], "within the 6 packed rows; got bounds from -1 to 6"),
            ([0, 3, 7], "within the 6 packed rows; got bounds from 0 to 7"),
            ([], "at least one bound"),
        ],
    )
    def test_segments(self, launcher, bounds, match):
        bounds = torch.tensor(bounds, dtype=torch.int64)
        refused(match, launcher, PACKED_A, PACKED_G, cu_seqlens=bounds)

    def test_bounds_are_integers(self, launcher):
        refused("int32 or int64", launcher, PACKED_A, PACKED_G, cu_seqlens=BOUNDS.float())
        refused("int32 or int64", launcher, PACKED_A, PACKED_G, cu_seqlens=BOUNDS[None])

    def test_longest_segment(self, launcher):
        options = {"cu_seqlens": BOUNDS, "max_seqlen": 2}
        refused("at least the longest segment, 3; got 2", launcher, PACKED_A, PACKED_G, **options)

    def test_device(self, launcher, monkeypatch):
        monkeypatch.undo()
        refused("need CUDA tensors; got one on cpu", launcher, A, G)
        monkeypatch.setattr(_check, "_runs_here", lambda device: True)
        refused("lie on one device; got cpu, meta", launcher, A, G.to("meta"))


def test_one_position_per_example():
    refused("one row per example", rank_one.rank_one_sqnorm, A, G)
    refused("one row per example", rank_one.rank_one_sqnorm, A[0], G[0, :2])


def test_two_factors():
    refused("agree in d_in; got 4 and 3", pairwise.pairwise_gram, A, G, A[..., :3], G)
    refused("agree in d_out; got 5 and 3", pairwise_direct.pairwise_direct, A, G, A, G[..., :3])
    refused("share dtype and device", pairwise.pairwise_gram, A, G, A.half(), G.half())
    refused(
        "both be packed|both packed",
        pairwise.pairwise_gram,
        A,
        G,
        PACKED_A,
        PACKED_G,
        cu_seqlens2=BOUNDS,
    )
    for launcher in (direct.direct_inner, diagonal.diagonal_gram):
        refused("equal batches; got 2 and 1", launcher, A, G, A[:1], G[:1])


def test_direction():
    launcher = direction.direction_inner
    refused(r"shape \(5, 4\); got \(4, 5\)", launcher, A, G, torch.ones(4, 5))
    refused("cast or move it", launcher, A, G, torch.ones(5, 4, dtype=torch.float16))


def test_descriptors_need_aligned_dense_operands():
    launcher = weight_gradient.weight_gradient_sqnorm
    refused("leave descriptors=None", launcher, A, G, descriptors=True)
    options = {"cu_seqlens": BOUNDS, "descriptors": True}
    refused("leave descriptors=None", launcher, PACKED_A, PACKED_G, **options)


def parsed_kernels():
    for path in sorted(Path(_check.__file__).parent.glob("*.py")):
        yield from ast.walk(ast.parse(path.read_text()))


def test_every_error_says_what_to_do():
    errors = [
        ast.unparse(node.exc)
        for node in parsed_kernels()
        if isinstance(node, ast.Raise) and "KernelInputError" in ast.unparse(node)
    ]
    assert len(errors) > 20
    assert [error for error in errors if ": " not in error] == []


def test_every_kernel_is_launched_where_grids_are_checked():
    grids = [
        ast.unparse(node.slice)
        for node in parsed_kernels()
        if isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("kernel")
    ]
    assert set(grids) == {"(self.programs,)"}
    with pytest.raises(KernelInputError, match="split the batch"):
        _launching.Launch(None, 2**31)


def test_a_grid_that_cannot_be_launched():
    assert _check.check_programs(2**31 - 1) == 2**31 - 1
    with pytest.raises(KernelInputError, match="split the batch"):
        _check.check_programs(2**31)


@pytest.fixture
def precision_of_products():
    """Leaves PyTorch's settings as they were, whichever way a test sets them."""
    products = torch.backends.cuda.matmul
    before = torch.get_float32_matmul_precision(), products.fp32_precision
    products.fp32_precision = "none"  # whatever was set before goes before what is set for all
    yield products
    torch.backends.fp32_precision = "none"
    torch.set_float32_matmul_precision(before[0])
    products.fp32_precision = before[1]


WAYS_TO_SET_THE_PRECISION = {
    "nothing": (lambda products: None, "highest"),
    "highest": (lambda products: torch.set_float32_matmul_precision("highest"), "highest"),
    "high": (lambda products: torch.set_float32_matmul_precision("high"), "tf32"),
    "medium": (lambda products: torch.set_float32_matmul_precision("medium"), "tf32"),
    "allow_tf32": (lambda products: setattr(products, "allow_tf32", True), "tf32"),
    "of products, tf32": (lambda products: setattr(products, "fp32_precision", "tf32"), "tf32"),
    "of products, ieee": (lambda products: setattr(products, "fp32_precision", "ieee"), "highest"),
    "of all, tf32": (lambda _: setattr(torch.backends, "fp32_precision", "tf32"), "tf32"),
    "of all, ieee": (lambda _: setattr(torch.backends, "fp32_precision", "ieee"), "highest"),
}


@pytest.mark.parametrize("way", WAYS_TO_SET_THE_PRECISION)
def test_precision_follows_torch(way, precision_of_products):
    setting, want = WAYS_TO_SET_THE_PRECISION[way]
    setting(precision_of_products)
    assert _check.precision_of(torch.float32) == want
    assert _check.precision_of(torch.bfloat16) == "ieee"


def test_the_precision_of_products_goes_before_that_of_all(precision_of_products):
    torch.backends.fp32_precision = "tf32"
    precision_of_products.fp32_precision = "ieee"
    assert _check.precision_of(torch.float32) == "highest"


def test_alignment():
    rows = torch.ones(4, 32, 64)
    assert _check.is_aligned(rows)
    assert _check.is_aligned(rows[:, ::2], rows[1:], rows[..., :32], rows[:1].expand(4, 32, 64))
    assert not _check.is_aligned(rows.mT)
    assert not _check.is_aligned(rows[..., 1:17])
    assert not _check.is_aligned(rows[..., :20])
    assert not _check.is_aligned(rows, torch.ones(4, 32, 65))


def test_zero_length_segments_and_empty_batches_are_legal():
    for bounds, batch in (([2], 0), ([0, 0], 1), ([6, 6, 6], 2)):
        segments = _check.check_operands(PACKED_A, PACKED_G, torch.tensor(bounds))
        assert (segments.batch, segments.positions) == (batch, 0)
