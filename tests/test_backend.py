"""The CUDA backend's wiring, exercised on the CPU implementations of the same operators."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn
from torch.nn import functional

import gradstats as gs
from benchmarks.workloads import Transformer, next_token
from gradstats._cost import GUARD_TOLERANCE, choose_outer_form
from gradstats._factors import ConvolutionGeometry, Outer, Patches, Ragged, Rows, map_tensors
from gradstats.contractions import (
    _outer,
    _patches,
    _rounding,
    _tied,
    _triton,
    _triton_layers,
    direction_inner,
    inner_diagonal,
    inner_pairs,
    sqnorm,
    sqnorm_and_sum,
)
from tests.dispatched import Operations, shapes
from tests.losses import mean_square
from tests.oracle import assert_sqnorms, check_products, oracle_sqnorms

WORKSPACE = 1 << 20


@pytest.mark.parametrize(
    ("positions", "groups", "expected"),
    [(1, 1, "rank_one_sqnorm"), (1, 3, "rank_one_sqnorm"), (2, 1, "gram_sqnorm"),
     (7, 2, "gram_sqnorm"), (300, 1, "direct_sqnorm"), (300, 2, "direct_sqnorm")],
)  # fmt: skip
def test_squared_norms(kernels, positions, groups, expected):
    left = torch.randn(4, groups, positions, 40)
    right = torch.randn(4, groups, positions, 24)
    factor = Outer(left, right, (groups, 40, 24))
    result = sqnorm([factor], WORKSPACE)
    want = Outer(left.double(), right.double(), factor.shape).dense().flatten(1).square().sum(1)
    assert kernels == [expected]
    torch.testing.assert_close(result.value, want, rtol=1e-4, atol=0)


def test_a_gram_result_that_cancels_is_recomputed(kernels):
    left = torch.randn(3, 1, 20, 64)
    left -= left.mean(2, keepdim=True)
    factor = Outer(left, 3 + 1e-3 * torch.randn(3, 1, 20, 64), (64, 64))
    assert choose_outer_form(20, 64, 64, on_chip=True) == "gram"
    result = sqnorm([factor], WORKSPACE)
    want = Outer(factor.left.double(), factor.right.double(), (64, 64)).dense()
    assert kernels == ["gram_sqnorm"]
    torch.testing.assert_close(result.value, want.flatten(1).square().sum(1), rtol=1e-3, atol=0)


def _are_single(operands):
    return any(each.dtype == torch.float32 for each in operands)


@pytest.fixture
def tensor_cores(monkeypatch):
    """Take float32 operands to lie on CUDA; yields what sets whether TF32 is allowed."""
    monkeypatch.setattr(_rounding, "_on_tensor_cores", _are_single)
    allowed = torch.backends.cuda.matmul.allow_tf32

    def allow(value):
        torch.backends.cuda.matmul.allow_tf32 = value

    yield allow
    allow(allowed)


def test_the_roundoff_of_products_is_that_of_their_dtype_device_and_settings():
    from torch._subclasses.fake_tensor import FakeTensorMode

    def roundoffs():
        return [_rounding.product_roundoff(each, each) for each in (*wide, *narrow, *on_cpu)]

    allowed = torch.backends.cuda.matmul.allow_tf32
    dtypes = torch.float32, torch.float64, torch.bfloat16, torch.float16
    with FakeTensorMode():
        wide = [torch.empty(1, dtype=dtype, device="cuda") for dtype in dtypes[:2]]
        narrow = [torch.empty(1, dtype=dtype, device="cuda") for dtype in dtypes[2:]]
        mixed = _rounding.product_roundoff(wide[0], narrow[0])
    on_cpu = [torch.empty(1, dtype=dtype) for dtype in dtypes]
    single, double, split = 2.0**-24, 2.0**-53, 2.0**-24 + 2.0**-22
    assert mixed == split
    rest = [double, single, single, single, double, single, single]
    try:
        torch.backends.cuda.matmul.allow_tf32 = False
        assert roundoffs() == [split, *rest]
        torch.backends.cuda.matmul.allow_tf32 = True
        assert roundoffs() == [2.0**-11, *rest]
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed


def test_products_rounded_to_tf32_are_never_cancelled(kernels, tensor_cores):
    """TF32 leaves three digits of a product: fewer than the guard asks of a sum."""
    factor = Outer(torch.randn(4, 1, 7, 40), torch.randn(4, 1, 7, 24), (40, 24))
    ragged = Ragged(factor.left.flatten(0, 2), factor.right.flatten(0, 2), (0, 8, 28), (40, 24))
    geometry = ConvolutionGeometry((1, 1), (0, 0), (1, 1), 1)
    images = torch.randn(3, 8, 4, 4), torch.randn(3, 8, 2, 2)
    convolution = Patches(*images, (8, 8, 3, 3), geometry)
    for value, form in ((False, "gram"), (True, "direct")):
        tensor_cores(value)
        kernels.clear()
        sizes = [sqnorm([each], WORKSPACE).value.sqrt() for each in (factor, ragged)]
        sqnorm([convolution], WORKSPACE)
        norms = (sizes[0], sizes[0])
        inner_pairs([factor], [factor], WORKSPACE, norms)
        inner_diagonal([factor], [factor], WORKSPACE, norms)
        inner_pairs([ragged], [ragged], WORKSPACE, (sizes[1], sizes[1]))
        named = [name for name in kernels if "convolution" not in name]
        assert len(named) == 5 and all(
            (form in name) or (value and name == "direct_inner") for name in named
        ), named
        assert ("convolution_gram_sqnorm" in kernels) != value


@pytest.mark.usefixtures("kernels")
def test_the_bound_counts_what_products_lose(monkeypatch, request):
    monkeypatch.setattr(_triton, "GUARD_TOLERANCE", math.inf)
    factor = Outer(torch.randn(4, 1, 7, 40), torch.randn(4, 1, 7, 24), (40, 24))
    exact = _triton.gram(factor).bound
    tensor_cores = request.getfixturevalue("tensor_cores")
    tensor_cores(False)
    split = _triton.gram(factor).bound
    tensor_cores(True)
    tf32 = _triton.gram(factor).bound
    size = _outer.magnitude(factor).square()
    torch.testing.assert_close(split - exact, 2.0**-22 * size)
    torch.testing.assert_close(tf32 - exact, (2.0**-11 - 2.0**-24) * size)


CANCELLING = ("dense", "groups", "packed", "convolution")


def cancelling(kind: str) -> Outer | Ragged | Patches:
    """Return a factor of three examples: one that cancels, one that does not, one of zeros."""
    left, right = torch.randn(3, 2, 20, 64), 3 + 1e-3 * torch.randn(3, 2, 20, 64)
    left -= left.mean(2, keepdim=True)
    right[1] = torch.randn(2, 20, 64)
    left[2], right[2] = 0.0, 0.0
    if kind == "packed":
        rows = [side[:, 0].flatten(0, 1) for side in (left, right)]
        return Ragged(*rows, (0, 20, 40, 60), (64, 64))
    if kind == "convolution":
        images = right[:, 0].mT.contiguous(), left[:, 0].mT.contiguous()
        return Patches(*images, (64, 64, 1), ConvolutionGeometry((1,), (0,), (1,), 1))
    groups = 2 if kind == "groups" else 1
    return Outer(left[:, :groups], right[:, :groups], (groups, 64, 64))


@pytest.mark.parametrize("kind", CANCELLING)
def test_doubtful_examples_are_recomputed_without_waiting(kernels, kind, monkeypatch):
    factor = cancelling(kind)
    form = "convolution_gram" if kind == "convolution" else "gram"
    with monkeypatch.context() as patch:
        patch.setattr(_triton, "GUARD_TOLERANCE", math.inf)
        found = getattr(_triton_layers if kind == "convolution" else _triton, form)(factor)
    assert (found.bound > GUARD_TOLERANCE * found.value).tolist() == [True, False, False]
    want = found.value.clone()
    want[0] = map_tensors(factor, torch.Tensor.double).dense()[0].square().sum()
    with Operations() as operations:
        result = sqnorm([factor], WORKSPACE)
    # where a number or a shape depends on what a tensor holds, a device is waited for
    assert not {"_local_scalar_dense", "nonzero", "index.Tensor"} & {*operations.found}
    torch.testing.assert_close(result.value, want, rtol=1e-3, atol=0)
    assert bool((result.bound <= GUARD_TOLERANCE * result.value).all())
    assert kernels == 2 * ["convolution_gram_sqnorm" if kind == "convolution" else "gram_sqnorm"]


@pytest.mark.parametrize(
    ("positions", "expected"),
    [(1, "rank_one_sqnorm"), (2, "gram_sqnorm"), (70, "weight_gradient_sqnorm")],
)
def test_weight_gradient_with_norms(kernels, positions, expected):
    left, right = torch.randn(4, 1, positions, 6), torch.randn(4, 1, positions, 3)
    result, total = sqnorm_and_sum(Outer(left, right, (6, 3)), WORKSPACE)
    want = Outer(left.double(), right.double(), (6, 3)).dense()
    assert kernels == [expected]
    torch.testing.assert_close(total.double(), want.sum(0), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(result.value, want.flatten(1).square().sum(1), rtol=1e-5, atol=0)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(
    ("positions", "expected"),
    [((1, 1), ["pairwise_gram", "diagonal_gram"]), ((2, 3), ["pairwise_gram", "diagonal_gram"]),
     ((60, 50), ["pairwise_direct", "direct_inner"])],
)  # fmt: skip
def test_inner_products(kernels, positions, groups, expected):
    first, second = (
        Outer(torch.randn(n, groups, t, 40), torch.randn(n, groups, t, 24), (groups, 40, 24))
        for n, t in zip((4, 5), positions, strict=True)
    )
    left, right = (
        Outer(f.left.double(), f.right.double(), f.shape).dense().flatten(1)
        for f in (first, second)
    )
    sizes = left.norm(dim=1), right.norm(dim=1)
    result = inner_pairs([first], [second], WORKSPACE, sizes)
    torch.testing.assert_close(result, left @ right.T, rtol=1e-4, atol=1e-3)
    assert kernels == expected[:1] * groups
    itself = inner_pairs([first], [first], WORKSPACE, (sizes[0], sizes[0]))
    torch.testing.assert_close(itself, left @ left.T, rtol=1e-4, atol=1e-3)
    kernels.clear()
    norms = sizes[0], sizes[1][:4]
    result = inner_diagonal([first], [second.select(slice(0, 4))], WORKSPACE, norms)
    torch.testing.assert_close(result, (left * right[:4]).sum(1), rtol=1e-4, atol=1e-3)
    assert kernels == expected[1:]
    kernels.clear()
    direction = torch.randn(groups, 40, 24)
    for given in (direction, direction.double(), direction.bfloat16()):
        result = direction_inner([first], given, WORKSPACE)
        torch.testing.assert_close(result, left @ given.double().flatten(), rtol=1e-4, atol=1e-3)
    assert kernels == ["direction_inner"] * 3 * groups


def check_halves(whole, double):
    """Check products of the first two of four examples with the last two, known in float64 too."""
    first, second = whole.select(slice(0, 2)), whole.select(slice(2, 4))
    rows = double.dense().flatten(1)
    sizes = rows[:2].norm(dim=1), rows[2:].norm(dim=1)
    scale = sizes[0][:, None] * sizes[1]
    pairs = inner_pairs([first], [second], WORKSPACE, sizes)
    assert bool(((pairs - rows[:2] @ rows[2:].T).abs() <= 1e-3 * scale).all())
    diagonal = inner_diagonal([first], [second], WORKSPACE, sizes)
    expected = (rows[:2] * rows[2:]).sum(1)
    assert bool(((diagonal - expected).abs() <= 1e-3 * scale.diagonal()).all())


def test_pairs_that_cancel_are_computed_again(kernels):
    left = torch.randn(4, 1, 20, 64)
    left -= left.mean(2, keepdim=True)
    whole = Outer(left, 3 + 1e-3 * torch.randn(4, 1, 20, 64), (64, 64))
    check_halves(whole, Outer(left.double(), whole.right.double(), (64, 64)))
    assert kernels == ["pairwise_gram", "pairwise_direct", "diagonal_gram", "direct_inner"]


def test_a_transformer(kernels):
    model = Transformer(layers=2, width=16, heads=2, vocabulary=50, positions=70)
    tokens = torch.randint(50, (5, 71))
    batch = (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    expected = oracle_sqnorms(model, batch, next_token)
    assert_sqnorms(gs.per_example_norms(model, batch, next_token), expected, 1e-4)
    with gs.track(model, batch_size=5) as tracker:
        tracker.backward(next_token(model, batch))
    assert_sqnorms(tracker.stats, expected, 1e-4)
    assert {"direct_sqnorm", "weight_gradient_sqnorm"} <= set(kernels)
    model.zero_grad()
    check_products(model, batch, next_token, rtol=1e-5)
    assert {"pairwise_direct", "direction_inner"} <= set(kernels)


NORM_LAYERS = pytest.mark.parametrize(
    ("layer", "shape", "family"),
    [
        (nn.LayerNorm(6), (5, 3, 6), "layer_norm"),
        (nn.LayerNorm((4, 6)), (5, 3, 4, 6), "layer_norm"),
        (nn.LayerNorm(6, bias=False), (5, 2, 3, 6), "layer_norm"),
        (nn.RMSNorm(6, eps=1e-5), (5, 6), "layer_norm"),
        (nn.GroupNorm(2, 6), (5, 6, 3, 4), "group_norm"),
        (nn.GroupNorm(2, 6), (5, 6), "group_norm"),
        (nn.InstanceNorm1d(6, affine=True), (5, 6, 7), "group_norm"),
        (nn.BatchNorm2d(6).eval(), (5, 6, 3, 4), "scale"),
        (nn.InstanceNorm1d(6, affine=True, track_running_stats=True).eval(), (5, 6, 7), "scale"),
    ],
    ids=lambda item: str(item).replace(" ", ""),
)


class Scaled(nn.Module):
    """A layer whose input depends on a parameter, so that it has a gradient."""

    def __init__(self, layer):
        super().__init__()
        self.factor = nn.Parameter(torch.randn(()))
        self.layer = layer

    def forward(self, x):
        return self.layer(self.moved(x))

    def moved(self, x):
        # not by a common factor or term: norm layers undo those
        return torch.sin(3 * x + self.factor)


def of_layer(kernels):
    """What was called for the layer in ``Scaled``, not for the number that moves its input."""
    return [name for name in kernels if name != "scale_direction"]


def random_parameters(layer):
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    return layer


@NORM_LAYERS
def test_norm_layers_alone(kernels, layer, shape, family):
    random_parameters(layer)
    batch = torch.randn(shape), torch.randn(5)
    expected = oracle_sqnorms(layer, batch, mean_square)
    assert_sqnorms(gs.per_example_norms(layer, batch, mean_square), expected, 1e-4)
    assert kernels == ["scale_backward" if family == "scale" else f"{family}_sqnorm"]


@NORM_LAYERS
def test_norm_layers_in_one_pass(kernels, layer, shape, family):
    model = Scaled(random_parameters(layer))
    batch = torch.randn(shape), torch.randn(5)
    expected = oracle_sqnorms(model, batch, mean_square)
    assert_sqnorms(gs.per_example_norms(model, batch, mean_square), expected, 1e-4)
    assert of_layer(kernels) == [f"{family}_backward"]
    check_training(model, batch, mean_square, expected)
    assert of_layer(kernels) == [f"{family}_backward"] * 2
    kernels.clear()
    model.zero_grad()
    check_products(model, batch, mean_square, rtol=1e-5)
    assert set(of_layer(kernels)) == {f"{family}_sum"}


def check_training(model, batch, losses, expected, fused=True):
    """Norms against ``expected``, gradients against a backward without tracking."""
    model.zero_grad()
    losses(model, batch).mean().backward()
    want = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    with gs.track(model, batch_size=len(batch[1]), fused=fused) as tracker:
        tracker.backward(losses(model, batch))
    assert_sqnorms(tracker.stats, expected, 1e-4)
    for name, parameter in model.named_parameters():
        if fused:
            torch.testing.assert_close(parameter.grad, want[name], rtol=1e-4, atol=1e-6)
        else:
            assert torch.equal(parameter.grad, want[name])


@pytest.mark.parametrize("kind", ["layer", "group"])
def test_one_pass_only_where_it_is_the_same(kernels, kind):
    layer = nn.LayerNorm(6) if kind == "layer" else nn.GroupNorm(2, 6)
    model = Scaled(random_parameters(layer))
    batch = torch.randn(5, 6), torch.randn(5)
    expected = oracle_sqnorms(model, batch, mean_square)
    check_training(model, batch, mean_square, expected, fused=False)
    assert kernels == [f"{kind}_norm_sqnorm"]
    kernels.clear()
    layer.weight.requires_grad_(False)
    expected = oracle_sqnorms(model, batch, mean_square)
    check_training(model, batch, mean_square, expected)
    assert kernels == [f"{kind}_norm_backward"]
    kernels.clear()
    layer.weight.requires_grad_(True)

    def twice(model, batch):
        output = model.layer(model.moved(model(batch[0])))
        return functional.mse_loss(output.square().mean(1), batch[1], reduction="none")

    expected = oracle_sqnorms(model, batch, twice)
    check_training(model, batch, twice, expected)
    # gradients from the one pass, factors beside it: the layer's uses must meet
    assert sorted(kernels) == [f"{kind}_norm_backward"] * 2 + [f"{kind}_norm_sum"] * 2


def test_norm_layers_along_another_example_axis(kernels):
    layer = random_parameters(nn.LayerNorm(6))

    class Sequences(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.project = layer, nn.Linear(6, 6)

        def forward(self, x):  # (T, B, 6)
            return self.norm(self.project(x)).square().sum(0)

    def by_sequence(model, batch):
        return model(batch[0].transpose(0, 1)).sum(1).sin()

    def along_columns(model, batch):
        return model(batch[0]).sum(1).sin()

    model, x = Sequences(), torch.randn(4, 5, 6)
    expected = oracle_sqnorms(model, (x.transpose(0, 1), torch.zeros(5)), by_sequence)
    stats = gs.per_example_norms(model, (x,), along_columns, batch_dim=1)
    assert_sqnorms(stats, expected, 1e-4)
    assert "layer_norm_backward" in kernels


def test_norm_layers_of_packed_examples(kernels):
    model = nn.Sequential(nn.Linear(4, 6), random_parameters(nn.LayerNorm(6)), nn.Linear(6, 2))
    lengths = torch.tensor([3, 1, 0, 4])
    bounds = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    x = torch.randn(8, 4)

    def losses(model, batch):
        values = model(batch).square().sum(1)
        owner = torch.arange(4).repeat_interleave(lengths)
        return torch.zeros(4).index_add(0, owner, values)

    stats = gs.per_example_norms(model, x, losses, cu_seqlens=bounds)
    for example, (start, end) in enumerate(itertools.pairwise(bounds.tolist())):
        model.zero_grad()
        model(x[start:end]).square().sum().backward()
        for name, parameter in model.named_parameters():
            got = stats.by_parameter[name][example]
            torch.testing.assert_close(got, parameter.grad.square().sum(), rtol=1e-4, atol=1e-9)
    assert "layer_norm_backward" in kernels
    kernels.clear()
    pairs = gs.inner_products(model, x, model, x, losses, cu_seqlens=bounds)
    want = sum(stats.by_parameter.values())
    torch.testing.assert_close(pairs.diagonal().double(), want.double(), rtol=1e-4, atol=1e-9)
    assert "layer_norm_sum" in kernels


@pytest.mark.parametrize("weight_tracked", [True, False])
@pytest.mark.parametrize("kind", ["layer", "group"])
def test_losses_with_derivatives_through_norm_layers(kernels, kind, weight_tracked):
    layer = nn.LayerNorm(6) if kind == "layer" else nn.GroupNorm(2, 6)
    model = nn.Sequential(nn.Linear(4, 6), random_parameters(layer), nn.Tanh(), nn.Linear(6, 1))
    layer.weight.requires_grad_(weight_tracked)

    def penalty(model, batch):
        x = batch[0].detach().requires_grad_()
        output = model(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        return output.squeeze(1) * batch[1] + slope.square().sum(1)

    batch = torch.randn(5, 4), torch.randn(5)
    expected = oracle_sqnorms(model, batch, penalty)
    assert_sqnorms(gs.per_example_norms(model, batch, penalty), expected, 1e-4)


def test_a_norm_layer_that_autocast_widens(kernels, monkeypatch):
    native = torch.layer_norm
    # CUDA's autocast normalises in float32 whatever it is given; the CPU's does not
    monkeypatch.setattr(torch, "layer_norm", lambda x, *rest: native(x.float(), *rest))
    monkeypatch.setattr(_triton, "runs", lambda *operands: True)

    def losses(model, batch):
        output = model.layer(model.moved(batch[0]).bfloat16()).flatten(1)
        return functional.mse_loss(output.square().mean(1), batch[1], reduction="none")

    model, batch = (
        Scaled(random_parameters(nn.LayerNorm(6))),
        (torch.randn(5, 3, 6), torch.randn(5)),
    )
    stats = gs.per_example_norms(model, batch, losses)
    assert of_layer(kernels) == ["layer_norm_backward"]
    monkeypatch.setattr(torch, "layer_norm", native)
    wide = model.moved(batch[0]).bfloat16().float().detach()
    expected = oracle_sqnorms(model.layer, (wide, batch[1]), mean_square)
    for name, want in expected.items():
        got = stats.by_parameter[f"layer.{name}"].double()
        torch.testing.assert_close(got, want, rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    ("layer", "size", "norms", "beside"),
    [
        (nn.Conv2d(3, 4, 3), (16, 16), "convolution_sqnorm", "convolution_sqnorm"),
        (nn.Conv2d(32, 40, 3, stride=2, padding=1), (5, 4), "convolution_gram_sqnorm",
         "convolution_gram_sqnorm"),
        (nn.Conv1d(6, 6, 3, groups=6), (20,), "convolution_sqnorm",
         "convolution_weight_gradient_sqnorm"),
        (nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2), (5, 6),
         "convolution_sqnorm", "convolution_sqnorm"),
        (nn.Conv3d(2, 3, (2, 3, 1), dilation=(1, 2, 1)), (4, 6, 5), "convolution_sqnorm",
         "convolution_sqnorm"),
    ],
    ids=lambda item: str(item).partition("(")[0],
)  # fmt: skip
def test_convolutions(kernels, layer, size, norms, beside):
    layer.reset_parameters()  # it was made before the seed was set
    batch, losses = (torch.randn(5, layer.in_channels, *size), torch.randn(5)), mean_square
    expected = oracle_sqnorms(layer, batch, losses)
    assert_sqnorms(gs.per_example_norms(layer, batch, losses), expected, 1e-4)
    assert sorted(kernels) == [norms, "vector_sqnorm"]
    kernels.clear()
    losses(layer, batch).mean().backward()
    want = layer.weight.grad.clone()
    layer.weight.grad = None
    with gs.track(layer, batch_size=5) as tracker:
        tracker.backward(losses(layer, batch))
    assert_sqnorms(tracker.stats, expected, 1e-4)
    torch.testing.assert_close(layer.weight.grad, want, rtol=1e-4, atol=1e-6)
    assert kernels == [beside, "scale_backward"]
    layer.zero_grad()
    kernels.clear()
    check_products(layer, batch, mean_square, rtol=1e-5)
    assert "convolution_direction" in kernels
    assert {"pairwise_convolution", "pairwise_convolution_gram"} & set(kernels)


@pytest.mark.parametrize("size", [(9, 9), (2, 2)])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_products_of_convolutions(kernels, groups, size):
    geometry = ConvolutionGeometry((1, 1), (1, 1), (1, 1), groups)

    def factor(batch):
        x = torch.randn(batch, 4, *size)
        return Patches(x, torch.randn(batch, 8, *size), (8, 4 // groups, 3, 3), geometry)

    first, second = factor(3), factor(4)
    left, right = (side.dense().double().flatten(1) for side in (first, second))
    sizes = left.norm(dim=1), right.norm(dim=1)
    norms = sizes[0], sizes[1][:3]
    with Operations(shapes) as operations:
        pairs = inner_pairs([first], [second], WORKSPACE, sizes)
        diagonal = inner_diagonal([first], [second.select(slice(0, 3))], WORKSPACE, norms)
    torch.testing.assert_close(pairs, left @ right.T, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(diagonal, (left * right[:3]).sum(1), rtol=1e-5, atol=1e-4)
    gram = ["pairwise_convolution_gram", "convolution_inner_gram"]
    # one channel to a group: there is no product of matrices
    few = size == (2, 2) and groups < 4
    assert kernels == (gram if few else ["pairwise_convolution", "convolution_inner"])
    patches = 3 * first.positions * 4 * 9
    written = (shape for shapes in operations.found for shape in shapes)
    assert max(torch.Size(shape).numel() for shape in written) < patches


def test_products_of_convolutions_with_one_position(kernels):
    geometry = ConvolutionGeometry((1, 1), (0, 0), (1, 1), 2)
    x, g = torch.randn(3, 6, 2, 3), torch.randn(3, 4, 1, 1)
    factor = Patches(x, g, (4, 3, 2, 3), geometry)
    rows = factor.dense().double().flatten(1)
    norms = rows.norm(dim=1)
    pairs = inner_pairs([factor], [factor], WORKSPACE, (norms, norms))
    torch.testing.assert_close(pairs, rows @ rows.T, rtol=1e-5, atol=1e-4)
    assert kernels == ["pairwise_convolution_gram"]


@pytest.mark.parametrize("size", [(9, 8), (2, 1)])
def test_products_of_convolutions_of_two_sizes(kernels, size):
    geometry = ConvolutionGeometry((1, 1), (1, 1), (1, 1), 1)
    shapes = (size, (size[0] + 1, size[1]))
    first, second = (
        Patches(torch.randn(3, 4, *own), torch.randn(3, 8, *own), (8, 4, 3, 3), geometry)
        for own in shapes
    )
    left, right = (side.dense().double().flatten(1) for side in (first, second))
    sizes = left.norm(dim=1), right.norm(dim=1)
    diagonal = inner_diagonal([first], [second], WORKSPACE, sizes)
    torch.testing.assert_close(diagonal, (left * right).sum(1), rtol=1e-5, atol=1e-4)
    # the kernel that forms both sides' tiles of equal indices wants images of one size
    direct = ["pairwise_convolution"] * 3
    assert kernels == (direct if size == (9, 8) else ["convolution_inner_gram"])
    nothing = [first.select(slice(0, 0))], [second.select(slice(0, 0))]
    none = inner_diagonal(*nothing, WORKSPACE, (sizes[0][:0], sizes[1][:0]))
    assert none.shape == (0,) and none.dtype == torch.float64


def test_products_with_no_examples(kernels):
    geometry = ConvolutionGeometry((1, 1), (1, 1), (1, 1), 1)
    convolution = Patches(torch.randn(3, 4, 2, 2), torch.randn(3, 8, 2, 2), (8, 4, 3, 3), geometry)
    linear = Outer(torch.randn(3, 1, 2, 40), torch.randn(3, 1, 2, 24), (1, 40, 24))
    for factor in (convolution, linear):
        norms, none = torch.ones(3, dtype=torch.float64), factor.select(slice(0, 0))
        pairs = inner_pairs([factor], [none], WORKSPACE, (norms, norms[:0]))
        assert pairs.shape == (3, 0) and pairs.dtype == torch.float64
        assert inner_pairs([none], [factor], WORKSPACE, (norms[:0], norms)).shape == (0, 3)
    assert set(kernels) == {"pairwise_convolution_gram", "pairwise_gram"}


@pytest.mark.parametrize("groups", [1, 2])
def test_products_of_convolutions_that_cancel_are_computed_again(kernels, groups):
    geometry = ConvolutionGeometry((1, 1), (0, 0), (1, 1), groups)
    grad = torch.randn(4, 32, 3, 4)
    grad -= grad.mean((2, 3), keepdim=True)
    x = 3 + 1e-3 * torch.randn(4, 32, 4, 5)
    whole = Patches(x, grad, (32, 32 // groups, 2, 2), geometry)
    check_halves(whole, Patches(x.double(), grad.double(), whole.shape, geometry))
    again = ["pairwise_convolution", "convolution_inner"]
    assert kernels == ["pairwise_convolution_gram", again[0], "convolution_inner_gram", again[1]]


@pytest.mark.parametrize("groups", [1, 3])
def test_the_size_of_products_of_patches_needs_no_patches(groups):
    geometry = ConvolutionGeometry((2, 1), (1, 0), (1, 2), groups)
    x = torch.randn(3, 6, 7, 5).to(memory_format=torch.channels_last)
    factor = Patches(x, torch.randn(3, 9, 4, 3), (9, 6 // groups, 2, 2), geometry)
    want = _outer.magnitude(map_tensors(factor, torch.Tensor.double).unfolded())
    torch.testing.assert_close(_patches.magnitude(factor), want, rtol=1e-5, atol=0)


@pytest.mark.parametrize("padding_idx", [None, 3])
def test_embeddings(kernels, padding_idx):
    table = nn.Embedding(97, 6, padding_idx=padding_idx)
    batch = torch.randint(11, (5, 9)), torch.randn(5)

    def losses(model, batch):
        output = model(batch[0]).flatten(1)
        return functional.mse_loss(output.square().sum(1), batch[1], reduction="none")

    expected = oracle_sqnorms(table, batch, losses)
    assert_sqnorms(gs.per_example_norms(table, batch, losses), expected, 1e-4)
    assert kernels == ["rows_sqnorm"]
    kernels.clear()
    check_products(table, batch, losses, rtol=1e-5)
    assert {"pairwise_rows", "rows_inner", "rows_direction"} <= set(kernels)


def test_look_ups_of_one_length_meet_look_ups_of_several(kernels):
    shape, generator = (11, 6), torch.Generator().manual_seed(1)

    def factor(lengths):
        count, examples = sum(lengths), len(lengths)
        example = torch.arange(examples).repeat_interleave(torch.tensor(lengths))
        longest = max(lengths) if len(set(lengths)) == 1 else None
        ids = torch.randint(11, (count,), generator=generator)
        return Rows(
            ids, torch.randn(count, 6, generator=generator), example, examples, shape, longest
        )

    first, second = factor([4, 4, 4]), factor([2, 0, 7])
    left, right = (side.dense().double().flatten(1) for side in (first, second))
    sizes = left.norm(dim=1), right.norm(dim=1)
    for one, two, rows, columns in ((first, second, left, right), (second, first, right, left)):
        torch.testing.assert_close(
            inner_pairs([one], [two], WORKSPACE, sizes), rows @ columns.T, rtol=1e-5, atol=1e-5
        )
        torch.testing.assert_close(
            inner_diagonal([one], [two], WORKSPACE, sizes), (rows * columns).sum(1),
            rtol=1e-5, atol=1e-5,
        )  # fmt: skip
    assert kernels == ["pairwise_rows", "rows_inner"] * 2


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [((3, 0, 5), ["pairwise_gram", "diagonal_gram"]),
     ((60, 0, 90), ["pairwise_direct", "direct_inner"])],
)  # fmt: skip
def test_packed_examples_meet_unpadded(kernels, lengths, expected):
    def factor(lengths):
        offsets = (0, *itertools.accumulate(lengths))
        rows = offsets[-1]
        return Ragged(torch.randn(rows, 20), torch.randn(rows, 16), offsets, (20, 16))

    first, second = factor(lengths), factor(lengths[::-1])
    left, right = (side.dense().double().flatten(1) for side in (first, second))
    sizes = left.norm(dim=1), right.norm(dim=1)
    kernels.clear()
    pairs = inner_pairs([first], [second], WORKSPACE, sizes)
    torch.testing.assert_close(pairs, left @ right.T, rtol=1e-5, atol=1e-3)
    diagonal = inner_diagonal([first], [second], WORKSPACE, sizes)
    torch.testing.assert_close(diagonal, (left * right).sum(1), rtol=1e-5, atol=1e-3)
    assert kernels == expected


def test_packed_pairs_that_cancel_are_computed_again(kernels):
    left = torch.randn(2, 20, 64)
    left -= left.mean(1, keepdim=True)
    right = 3 + 1e-3 * torch.randn(2, 20, 64)
    whole = Ragged(left.flatten(0, 1), right.flatten(0, 1), (0, 20, 40), (64, 64))
    rows = (left.double().mT @ right.double()).flatten(1)
    sizes = rows.norm(dim=1), rows.norm(dim=1)
    scale = sizes[0][:, None] * sizes[1]
    pairs = inner_pairs([whole], [whole], WORKSPACE, sizes)
    assert bool(((pairs - rows @ rows.T).abs() <= 1e-3 * scale).all())
    diagonal = inner_diagonal([whole], [whole], WORKSPACE, sizes)
    assert bool(((diagonal - rows.square().sum(1)).abs() <= 1e-3 * scale.diagonal()).all())
    assert kernels == ["pairwise_gram", "pairwise_direct", "diagonal_gram", "direct_inner"]


@pytest.mark.parametrize("dtype", _triton.HALF, ids=str)
def test_packed_examples_of_one_row_at_most_are_no_matrix_of_rows(dtype):
    offsets = (0, 1, 1, 2)  # the second has none
    first, second = (
        Ragged(torch.randn(2, 6).to(dtype), torch.randn(2, 4).to(dtype), offsets, (6, 4))
        for _ in range(2)
    )
    rows = (map_tensors(each, torch.Tensor.double).dense().flatten(1) for each in (first, second))
    expected = next(rows) @ next(rows).T
    torch.testing.assert_close(_triton.gram_pairs(first, second), expected, rtol=1e-5, atol=1e-5)


def test_packed_examples_meet_a_direction(kernels):
    offsets = (0, 3, 3, 8)
    factor = Ragged(torch.randn(8, 6), torch.randn(8, 4), offsets, (6, 4))
    direction = torch.randn(6, 4)
    got = direction_inner([factor], direction, WORKSPACE)
    want = factor.dense().double().flatten(1) @ direction.double().flatten()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    assert kernels == ["direction_inner"]


@pytest.mark.parametrize("operand", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_directions_come_in_a_dtype_that_kernels_multiply(operand):
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        direction = torch.randn(3).to(dtype)
        found = _triton.narrow(direction, torch.empty(3, dtype=operand))
        assert found is direction if dtype == operand else found.dtype == torch.float32


def test_a_projection_meets_look_ups_of_several_lengths(kernels):
    lengths, ids = torch.tensor([2, 0, 6]), torch.randint(7, (8,))
    example = torch.arange(3).repeat_interleave(lengths)
    factor = Outer(torch.randn(3, 1, 5, 7), torch.randn(3, 1, 5, 4), (7, 4))
    for longest in (6, None):
        rows = Rows(ids, torch.randn(8, 4), example, 3, (7, 4), longest)
        got = _tied.inner_with_rows(factor, rows, WORKSPACE)
        want = (factor.dense().double() * rows.dense().double()).sum((1, 2))
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert kernels == 2 * ["tied_inner"]


def test_a_tied_output_projection(kernels):
    model = Transformer(layers=1, width=16, heads=2, vocabulary=50, positions=12)
    model.head.weight = model.tokens.weight
    tokens = torch.randint(50, (5, 13))
    batch = (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    expected = oracle_sqnorms(model, batch, next_token)
    assert_sqnorms(gs.per_example_norms(model, batch, next_token), expected, 1e-4)
    assert "rows_sqnorm" in kernels
    again = tuple(part.clone() for part in batch)
    products = gs.inner_products(model, batch, model, again, next_token, pairs="diagonal")
    torch.testing.assert_close(products.double(), sum(expected.values()), rtol=1e-4, atol=0)
    assert "tied_inner" in kernels


def test_a_tied_projection_is_contracted_with_its_weight_gradient(kernels):
    """At more positions than products of positions pay for: from one pass, of one operand."""
    model = Transformer(layers=1, width=16, heads=2, vocabulary=50, positions=90)
    model.head.weight = model.tokens.weight
    tokens = torch.randint(50, (4, 91))
    batch = (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    next_token(model, batch).mean().backward()
    gradient = model.head.weight.grad.clone()
    expected = oracle_sqnorms(model, batch, next_token)
    layers = sum(isinstance(module, nn.Linear) for module in model.modules())
    for fused, contracted in ((True, "weight_gradient_sqnorm"), (False, "direct_sqnorm")):
        kernels.clear()
        model.zero_grad()
        with gs.track(model, batch_size=4, fused=fused) as tracker:
            tracker.backward(next_token(model, batch))
        assert_sqnorms(tracker.stats, expected, 1e-4)
        torch.testing.assert_close(model.head.weight.grad, gradient, rtol=1e-4, atol=1e-6)
        assert kernels.count(contracted) == layers
        assert {"weight_gradient_sqnorm", "direct_sqnorm"} & set(kernels) == {contracted}


@pytest.mark.usefixtures("graphs_run_on_cpus")
def test_compiled(monkeypatch):
    monkeypatch.setattr(_triton, "runs", lambda *operands: True)
    monkeypatch.setattr(
        _triton_layers, "layer_norm_sum", lambda *args: pytest.fail("sums are written")
    )
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3))
    batch = torch.randn(5, 7, 4), torch.randn(5)

    def losses(model, batch):
        return functional.mse_loss(model(batch[0]).mean((1, 2)), batch[1], reduction="none")

    expected = oracle_sqnorms(model, batch, losses)
    stats = gs.per_example_norms(
        torch.compile(model, fullgraph=True, backend="aot_eager"), batch, losses
    )
    assert_sqnorms(stats, expected, 1e-4)


def test_cuda_without_triton(monkeypatch):
    monkeypatch.setattr(_triton, "HAS_TRITON", False)
    with pytest.raises(gs.BackendError, match=r"triton>=3.6.*GRADSTATS_BACKEND=torch"):
        _triton.require_triton()


@pytest.mark.skipif(not _triton.HAS_TRITON, reason="needs Triton")
def test_graphs_look_for_triton_without_a_warning():
    def function(x):
        _triton.require_triton()
        return x + 1

    torch._dynamo.reset()
    compiled = torch.compile(function, backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))
