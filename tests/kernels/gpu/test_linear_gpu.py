"""Every kernel on a real GPU: the interpreter's cases, larger shapes, every shipped tile, twice."""

import functools

import pytest
import torch

from tests.kernels import reference
from tests.kernels.cases import CASES, cancelling, dense, ragged, random
from tests.kernels.reference import assert_close
from tests.kernels.samples import operator_samples
from tests.kernels.tensor_cores import gram_factor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = "cuda"
FACTOR = 64.0  # tensor cores cut sums where the interpreter rounds them, so errors add up faster
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LARGE = {
    "qkv of GPT-2": dense(4, 1024, 768, 2304),
    "unaligned": dense(3, 333, 1001, 515),
    "short": dense(64, 16, 256, 512),
    "many examples": dense(700, 3, 64, 48),
    "ragged large": ragged([511, 0, 1024, 3, 700, 129], 384, 640, front=3, back=9),
}
BLOCK = 64


def of_each_dtype(small, large):
    """All pairs of dtype and name but those of float16 with a small case.

    Each is compiled anew, which takes most of the tests' time, and what the shapes of small cases
    could break is the same code for both half types.
    """
    return [
        (dtype, name)
        for dtype in DTYPES
        for name in [*([] if dtype == torch.float16 else small), *large]
    ]


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request):
    return request.param


@pytest.fixture(params=of_each_dtype(CASES, LARGE), ids=lambda pair: "-".join(map(str, pair)))
def case(request):
    dtype, name = request.param
    return {**CASES, **LARGE}[name](dtype, BLOCK, DEVICE)


@pytest.fixture(autouse=True)
def exact_references():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def twice(function):
    """The result of `function`, after checking that a second run gives the same bits."""
    first, second = function(), function()
    pairs = zip(first, second, strict=True) if isinstance(first, tuple) else [(first, second)]
    for one, other in pairs:
        # outputs that nothing wrote would be equal by chance if memory was reused: see NaN there
        assert one.isfinite().all()
        assert torch.equal(one, other), "two runs differ"
    return first


def factor_of_grams(dtype, length):
    """The factor for sums of squares of `length` elements; see `gram_factor`."""
    return max(FACTOR, gram_factor(dtype, length, torch.cuda.get_device_capability()))


def squares_scale(a, g, cu_seqlens, want):
    """What a sum of squares rounds by when its elements round by eps of their absolute terms."""
    terms = reference.gradients(a.abs(), g.abs(), cu_seqlens).square().sum((1, 2))
    return 2 * (terms * want).sqrt() + want


def test_sequences(case):
    from gradstats.kernels import direct, gram, vector, weight_gradient

    a, g, cu_seqlens = case
    want = reference.sqnorm_reference(a, g, cu_seqlens)
    scale = squares_scale(a, g, cu_seqlens, want)
    magnitude = reference.magnitude_reference(a, g, cu_seqlens)
    bias_magnitude = reference.bias_magnitude_reference(g, cu_seqlens)
    bias_want = reference.bias_sqnorm_reference(g, cu_seqlens)
    factor = factor_of_grams(a.dtype, a.shape[-1] + g.shape[-1])
    got = reference.gram_sums(
        lambda *rounding: twice(lambda: gram.gram_sqnorm(a, g, 1, *rounding, cu_seqlens=cu_seqlens))
    )
    again = twice(lambda: gram.gram_sqnorm(a, g, 1, 1.0, 1.0, 1.0, 0.0, cu_seqlens=cu_seqlens))
    assert_close(again[0], want, scale, FACTOR)
    assert_close(got[0], want, magnitude, factor)
    assert_close(got[1], magnitude, factor=factor)
    assert_close(got[2], reference.size_reference(a, g, cu_seqlens), factor=factor)
    got = twice(lambda: direct.direct_sqnorm(a, g, cu_seqlens=cu_seqlens))
    assert_close(got, want, scale, FACTOR)
    got = twice(lambda: vector.vector_sqnorm(g, cu_seqlens=cu_seqlens))
    assert_close(got, bias_want, bias_magnitude, FACTOR)
    gradient, sqnorm = twice(
        lambda: weight_gradient.weight_gradient_sqnorm(
            a, g, cu_seqlens=cu_seqlens, gradient_dtype=torch.float32
        )
    )
    assert_close(sqnorm, want, scale, FACTOR)
    terms = reference.gradients(a.abs(), g.abs(), cu_seqlens).sum(0)
    assert_close(gradient, reference.weight_gradient_reference(a, g, cu_seqlens), terms, FACTOR)


@pytest.mark.parametrize("name", ["qkv of GPT-2", "short"])
def test_descriptors(dtype, name):
    from gradstats.kernels import weight_gradient

    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs compute capability 9.0")
    a, g, _ = LARGE[name](dtype, BLOCK, DEVICE)
    gradient, sqnorm = twice(
        lambda: weight_gradient.weight_gradient_sqnorm(
            a, g, gradient_dtype=torch.float32, descriptors=True
        )
    )
    want = reference.sqnorm_reference(a, g)
    assert_close(sqnorm, want, squares_scale(a, g, None, want), FACTOR)
    terms = reference.gradients(a.abs(), g.abs()).sum(0)
    assert_close(gradient, reference.weight_gradient_reference(a, g), terms, FACTOR)


def test_pairs(case):
    from gradstats.kernels import diagonal, direct, direction, pairwise, pairwise_direct

    a, g, bounds = case
    if bounds is None and a.shape[0] * a.shape[1] > 2000:
        a, g = a[:, :100], g[:, :100]
    a2, g2 = random(a.shape, a.dtype, DEVICE, 3), random(g.shape, g.dtype, DEVICE, 4)
    factors = (a, g, a2, g2)
    absolute = tuple(operand.abs() for operand in factors)
    options = {"cu_seqlens1": bounds, "cu_seqlens2": bounds}
    scale = reference.pairwise_reference(*absolute, bounds, bounds)
    want = reference.pairwise_reference(*factors, bounds, bounds)
    for launcher in (pairwise.pairwise_gram, pairwise_direct.pairwise_direct):
        got = twice(functools.partial(launcher, *factors, **options))
        assert_close(got, want, scale, FACTOR)
    want = reference.diagonal_reference(*factors, bounds, bounds)
    got, _ = twice(lambda: diagonal.diagonal_gram(*factors, **options))
    assert_close(got, want, scale.diagonal(), FACTOR)
    got = twice(lambda: direct.direct_inner(*factors, **options))
    assert_close(got, want, scale.diagonal(), FACTOR)
    for vector_dtype in {a.dtype, torch.float32}:
        vector = random((g.shape[-1], a.shape[-1]), vector_dtype, DEVICE, 5)
        got = twice(
            lambda vector=vector: direction.direction_inner(a, g, vector, cu_seqlens=bounds)
        )
        want = reference.direction_reference(a, g, vector, bounds)
        limit = reference.direction_reference(absolute[0], absolute[1], vector.abs(), bounds)
        assert_close(got, want, limit, FACTOR)


def test_rank_one(dtype):
    from gradstats.kernels import rank_one

    for batch, d_in, d_out in ((1, 1, 1), (64, 1024, 4096), (33, 20001, 7), (5000, 48, 80)):
        a, g = random((batch, d_in), dtype, DEVICE, 1), random((batch, d_out), dtype, DEVICE, 2)
        sqnorm = twice(lambda a=a, g=g: rank_one.rank_one_sqnorm(a, g))
        assert_close(sqnorm, a.double().square().sum(1) * g.double().square().sum(1))


def test_cancelling_halves(dtype):
    from gradstats.kernels import direct, gram

    a, g, _ = cancelling(dtype, BLOCK, DEVICE)
    want = reference.sqnorm_reference(a, g)
    magnitude = reference.magnitude_reference(a, g)
    plain, _ = gram.gram_sqnorm(a, g, 1, 1.0, 1.0, 1.0, reference.NOBODY_SUSPECT)
    assert_close(plain, want, magnitude, FACTOR)
    guarded, _ = twice(lambda: gram.gram_sqnorm(a, g, 1, *reference.ROUNDING))
    assert_close(guarded, want, squares_scale(a, g, None, want), FACTOR)
    assert_close(direct.direct_sqnorm(a, g), want, squares_scale(a, g, None, want), FACTOR)


def test_few_programs_form_many_tiles_of_suspects(dtype, monkeypatch):
    from gradstats.kernels import gram, guard

    monkeypatch.setattr(guard, "PROGRAMS", 4)
    a, g, _ = cancelling(dtype, BLOCK, DEVICE, 700, 600)  # of this size no plan is remembered
    want = reference.sqnorm_reference(a, g)
    guarded, _ = twice(lambda: gram.gram_sqnorm(a, g, 1, *reference.ROUNDING))
    assert_close(guarded, want, squares_scale(a, g, None, want), FACTOR)


def shipped(architecture, kind, aligned):
    """(operation, configuration) of the table's part for one class of inputs."""
    from gradstats.kernels import _config

    for operation in ("gram", "direct", "weight_gradient", "pairwise", "direction"):
        for config in _config.shipped(operation).get((architecture, kind, aligned), ()):
            yield operation, config


@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("kind", ["half", "ieee", "tf32x3", "tf32"])
def test_every_shipped_tile(kind, aligned):
    from gradstats.kernels import (
        _check,
        _config,
        direct,
        direction,
        gram,
        pairwise,
        weight_gradient,
    )

    family = _config.family(_check.architecture(torch.device(DEVICE)))
    dtype = torch.bfloat16 if kind == "half" else torch.float32
    d_in, d_out = (320, 288) if aligned else (301, 275)
    a, g, _ = dense(3, 200, d_in, d_out)(dtype, BLOCK, DEVICE)
    weight = random((d_out, d_in), dtype, DEVICE, 5)
    want = reference.sqnorm_reference(a, g)
    pairs = reference.pairwise_reference(a, g, a, g)
    absolute = reference.pairwise_reference(a.abs(), g.abs(), a.abs(), g.abs())
    along = reference.direction_reference(a, g, weight)
    along_scale = reference.direction_reference(a.abs(), g.abs(), weight.abs())
    # tf32 keeps 10 bits of every fp32 input, so products err by 2^13 times more
    factor = 2.0**15 if kind == "tf32" else FACTOR
    for operation, config in shipped(family, kind, aligned):
        if operation == "gram":
            numbers = (1.0, 1.0, 1.0, reference.NOBODY_SUSPECT)
            got = gram.gram_sqnorm(a, g, 1, *numbers, config=config)[0]
            assert_close(got, want, reference.magnitude_reference(a, g), factor)
        elif operation == "direct":
            got = direct.direct_sqnorm(a, g, config=config)
            assert_close(got, want, squares_scale(a, g, None, want), factor)
            got = gram.gram_sqnorm(a, g, 1, 1.0, 1.0, 1.0, 0.0, direct_config=config)[0]
            assert_close(got, want, squares_scale(a, g, None, want), factor)
        elif operation == "weight_gradient":
            for splits in (1, 3):
                _, got = weight_gradient.weight_gradient_sqnorm(a, g, config=config, splits=splits)
                assert_close(got, want, squares_scale(a, g, None, want), factor)
        elif operation == "pairwise":
            got = pairwise.pairwise_gram(a, g, a, g, config=config)
            assert_close(got, pairs, absolute, factor)
        else:
            got = direction.direction_inner(a, g, weight, config=config)
            assert_close(got, along, along_scale, factor)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_device_bounds_need_no_wait(dtype):
    from gradstats.kernels import direct

    a, g, bounds = LARGE["ragged large"](dtype, BLOCK, DEVICE)
    want = direct.direct_sqnorm(a, g, cu_seqlens=bounds)
    on_device = bounds.cuda()
    try:
        torch.cuda.set_sync_debug_mode("error")
        got = direct.direct_sqnorm(a, g, cu_seqlens=on_device, max_seqlen=1024)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(got, want)
    wrong = on_device.clone()
    wrong[2] = 10**6
    got = direct.direct_sqnorm(a, g, cu_seqlens=wrong, max_seqlen=1024)
    assert got.isnan().tolist() == [False, True, True, False, False, False]


def test_more_than_2_to_the_31_elements():
    from gradstats.kernels import direct

    rows = 2**31 // 4096 + 64
    if torch.cuda.get_device_properties(0).total_memory < 24 * 2**30:
        pytest.skip("needs 24 GiB")
    a = torch.zeros((rows, 4096), dtype=torch.bfloat16, device=DEVICE)
    g = torch.zeros((rows, 32), dtype=torch.bfloat16, device=DEVICE)
    a[-40:] = random((40, 4096), torch.bfloat16, DEVICE, 1)
    g[-40:] = random((40, 32), torch.bfloat16, DEVICE, 2)
    bounds = torch.tensor([0, rows - 40, rows])
    got = direct.direct_sqnorm(a, g, cu_seqlens=bounds)
    want = reference.sqnorm_reference(a[-40:][None], g[-40:][None])
    assert got[0] == 0
    assert_close(got[1:], want, factor=FACTOR)


def test_operators_on_cuda_compute_what_the_cpu_computes():
    from gradstats.kernels import operators

    on_gpu = operator_samples(torch.float32, DEVICE)
    on_cpu = operator_samples(torch.float32)
    for (name, arguments, options), (_, host_arguments, host_options) in zip(
        on_gpu, on_cpu, strict=True
    ):
        got = getattr(operators, name)(*arguments, **options)
        want = getattr(operators, name)(*host_arguments, **host_options)
        for one, other in zip(
            torch.utils._pytree.tree_leaves(got), torch.utils._pytree.tree_leaves(want), strict=True
        ):
            torch.testing.assert_close(one.cpu(), other, rtol=1e-4, atol=1e-3)


def test_operators_compile_into_one_graph():
    from gradstats.kernels import operators

    a, g, _ = dense(3, 40, 48, 64)(torch.float32, BLOCK, DEVICE)

    def step(a, g):
        gradient, sqnorm = operators.weight_gradient_sqnorm(a * 2, g)
        return gradient + 1, sqnorm.sqrt()

    compiled = torch.compile(step, fullgraph=True)(a, g)
    torch.testing.assert_close(compiled, step(a, g))
