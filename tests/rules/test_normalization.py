"""Normalisation layers."""

import contextlib
import copy
import functools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

import gradstats as gs
from gradstats.capture.rules import _affine
from gradstats.contractions import _triton
from tests.oracle import assert_sqnorms, oracle_sqnorms
from tests.rules.operation import Operation, check_operation, check_refused, normal, uneven_loss

size = st.integers(1, 4)


def scrambled(layer: nn.Module) -> nn.Module:
    """Return a layer whose scale, shift and running statistics are not their initial values."""
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    for name, buffer in layer.named_buffers():
        if buffer.is_floating_point():
            buffer.copy_(torch.rand_like(buffer) + (0.5 if "var" in name else -0.5))
    return layer


def check_layer(layer: nn.Module, *shape: int, **options) -> None:
    check_operation(lambda m, x: m.layer(x), {"layer": scrambled(layer)}, normal(*shape), **options)


@settings(max_examples=25)
@given(
    st.lists(size, min_size=1, max_size=2),
    st.lists(size, max_size=2),
    size,
    st.sampled_from(["layer", "layer without bias", "root mean square"]),
)
def test_layer_and_rms_norm_sweep(shape, between, batch, kind):
    layers = {
        "layer": lambda: nn.LayerNorm(shape),
        "layer without bias": lambda: nn.LayerNorm(shape, bias=False),
        "root mean square": lambda: nn.RMSNorm(shape),
    }
    if math.prod(shape) == 1:
        shape = [2]  # a single number less its own mean is zero, and so is its gradient
    check_layer(layers[kind](), batch, *between, *shape)


def test_root_mean_square_with_epsilon():
    check_layer(nn.RMSNorm(4, eps=0.1), 3, 5, 4)
    check_layer(nn.LayerNorm(4, eps=0.1), 3, 5, 4)


@contextlib.contextmanager
def casting_as_cuda_does():
    """Autocast to bfloat16 on the CPU, with CUDA's policy for rms_norm: inputs become float32."""

    def rms_norm(x, shape, weight=None, eps=None):
        excluded = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
        with torch._C._ExcludeDispatchKeyGuard(excluded):
            return torch.ops.aten.rms_norm(x.float(), shape, weight, eps)

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("rms_norm", rms_norm, "AutocastCPU")
        with torch.autocast("cpu", torch.bfloat16):
            yield


@pytest.mark.parametrize("kernels", [False, True], ids=["torch", "kernels"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("autocast", [False, True], ids=["own dtype", "autocast"])
def test_root_mean_square_without_epsilon(dtype, autocast, kernels, monkeypatch):
    """The epsilon is PyTorch's own, which weighs most where inputs are small."""
    if kernels:
        monkeypatch.setattr(
            _triton, "runs", lambda one, *others: all(each.dtype == one.dtype for each in others)
        )
    inputs = (1e-3 * torch.randn(4, 3, 64)).to(dtype)
    model = scrambled(nn.RMSNorm(64)).to(torch.float32 if autocast else dtype)
    direction = torch.randn(64)

    def loss_fn(model, inputs):
        with casting_as_cuda_does() if autocast else contextlib.nullcontext():
            return (model(inputs).float() * direction).sum((1, 2))

    expected = []
    for index in range(4):
        (gradient,) = torch.autograd.grad(
            loss_fn(model, inputs[index : index + 1]).sum(), [model.weight]
        )
        expected.append(gradient.double().square().sum())
    got = gs.per_example_norms(model, inputs, loss_fn).sqnorm
    torch.testing.assert_close(got.double(), torch.stack(expected), rtol=2e-2, atol=0)


def test_layer_norm_along_another_example_axis():
    options = {"batch_dim": 1, "loss_fn": lambda m, b: m(*b).square().sum((0, 2))}
    check_layer(nn.LayerNorm(4), 5, 3, 4, **options)
    check_layer(nn.RMSNorm(4), 3, 3, 4, **options)


def test_normalisation_over_the_examples_is_refused():
    for layer in (nn.LayerNorm((3, 4)), nn.RMSNorm((3, 4))):
        check_refused(
            lambda m, x: m.layer(x),
            {"layer": layer},
            normal(3, 4),
            error=gs.ExampleAxisError,
            match=r"layer\.weight.*last 2 of 2 axes",
        )


@settings(max_examples=25)
@given(st.integers(1, 3), st.integers(1, 3), st.lists(size, max_size=3), size)
def test_group_norm_sweep(groups, width, spatial, batch):
    if groups * width == 1 or (width == 1 and not spatial):
        width = 2
    check_layer(nn.GroupNorm(groups, groups * width), batch, groups * width, *spatial)


def test_group_norm_of_as_many_channels_as_examples():
    check_layer(nn.GroupNorm(2, 4), 4, 4, 4, 4)


@pytest.mark.parametrize("running", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_instance_norm(dims, running, training):
    kind = {1: nn.InstanceNorm1d, 2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}[dims]
    layer = kind(4, affine=True, track_running_stats=running).train(training)
    shape = (3, 4, *(3 for _ in range(dims)))
    if running and training:
        # Each example is normalised by its own statistics; the running ones only follow.
        check_running_update(scrambled(layer).double(), normal(*shape))
    else:
        check_layer(layer, *shape)


def test_instance_norm_of_one_channel_sums_in_the_order_of_pytorch():
    """Its result is a view, whose gradient is the same number everywhere."""
    layer, x = scrambled(nn.InstanceNorm1d(1, affine=True)), torch.randn(3, 1, 5)
    layer(x).sum((1, 2)).mean().backward()
    expected = layer.weight.grad
    layer.weight.grad = None
    with gs.track(layer, batch_size=3, fused=False) as tracker:
        tracker.backward(layer(x).sum((1, 2)))
    assert torch.equal(layer.weight.grad, expected)


def check_running_update(layer: nn.Module, x: torch.Tensor) -> None:
    """Check norms where a forward changes the layer's buffers, as it does without us."""
    still = Operation(lambda m, x: functional.instance_norm(x, None, None, m.w, m.b), {
        "w": layer.weight.detach().clone(), "b": layer.bias.detach().clone()}, False)  # fmt: skip
    expected = gs.per_example_norms(still, (x,), uneven_loss)
    model = Operation(lambda m, x: m.layer(x), {"layer": layer}, upstream=False)
    before = layer.running_mean.clone()
    stats = gs.per_example_norms(model, (x,), uneven_loss)
    torch.testing.assert_close(stats.sqnorm, expected.sqnorm, rtol=1e-9, atol=0)
    mean = 0.9 * before + 0.1 * x.flatten(2).mean((0, 2))
    torch.testing.assert_close(layer.running_mean, mean, rtol=1e-9, atol=0)


@pytest.mark.parametrize(
    "layer, shape",
    [
        (nn.BatchNorm1d(4), (3, 4)),
        (nn.BatchNorm1d(4), (3, 4, 5)),
        (nn.BatchNorm1d(4), (4, 4, 4)),
        (nn.BatchNorm2d(4, eps=0.1), (3, 4, 2, 5)),
        (nn.BatchNorm3d(4), (3, 4, 2, 3, 2)),
        (nn.SyncBatchNorm(4), (3, 4, 5)),
        (nn.BatchNorm2d(4), (1, 4, 2, 5)),
    ],
    ids=str,
)
def test_batch_norm_in_evaluation(layer, shape):
    check_layer(layer.eval(), *shape)


def written_out(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return what a layer computes, by operations on elements."""
    features = (-1, *(1 for _ in x.shape[2:]))
    if layer.running_mean is None:
        axes = tuple(range(2, x.dim()))
        mean, variance = x.mean(axes, keepdim=True), x.var(axes, correction=0, keepdim=True)
    else:
        mean, variance = layer.running_mean.view(features), layer.running_var.view(features)
    x = (x - mean) / (variance + layer.eps).sqrt()
    if layer.weight is None:
        return x
    return x * layer.weight.view(features) + layer.bias.view(features)


BEHIND = {
    "positions": lambda x: x.flatten(2).transpose(1, 2),
    "squeezed": lambda x: x.squeeze(-1).movedim(1, -1),
    "channels last": lambda x: x.movedim(1, -1),
}


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("shape", [(1, 4, 2, 3), (3, 4, 5, 1), (1, 4, 2, 1, 3)], ids=str)
@pytest.mark.parametrize("behind", BEHIND.values(), ids=BEHIND)
@pytest.mark.parametrize("kind", ["Batch", "Batch, not affine", "Batch, frozen", "Instance"])
def test_strides_that_fit_two_memory_formats(kind, behind, shape, channels_last):
    """PyTorch's own gradients are wrong here, so the layer is written out to compare with."""
    make = getattr(nn, f"{kind.partition(',')[0]}Norm{len(shape) - 2}d")
    layer = scrambled(make(4, affine="not" not in kind)).requires_grad_("frozen" not in kind)

    def function(m, x, normalise=lambda layer, x: layer(x)):
        if channels_last:
            x = x.flatten(2).transpose(1, 2).contiguous().transpose(1, 2).view(x.shape)
        return m.last(behind(normalise(m.layer, x)))

    parameters = {"layer": layer.eval(), "last": nn.Linear(4, 2)}
    model, x = Operation(function, parameters, True), normal(*shape)
    got = gs.per_example_norms(model, (x,), uneven_loss)
    report = gs.verify(model, (x,), uneven_loss)
    model.function = functools.partial(function, normalise=written_out)
    assert_sqnorms(got, oracle_sqnorms(model, (x,), uneven_loss), rtol=1e-10)
    assert report.ok, report


@pytest.mark.parametrize("shape", [(1, 4, 6, 5), (6, 1, 4, 5)], ids=str)
def test_gradients_that_fit_neither_memory_format_are_pytorchs_own(shape):
    """Beside axes of size one, where the gradient's positions lie in another order."""
    torch.manual_seed(0)
    layer = scrambled(nn.BatchNorm2d(shape[1])).double().eval()

    def losses():
        x = layer(normal(*shape)).transpose(1, 3).contiguous()
        return (x * torch.arange(x[0].numel()).view(x[0].shape).cos()).sin().flatten(1).sum(1)

    for seed in range(10):
        torch.manual_seed(seed)
        layer.zero_grad()
        losses().mean().backward()
        expected = [parameter.grad for parameter in layer.parameters()]
        torch.manual_seed(seed)
        layer.zero_grad()
        with gs.track(layer, batch_size=shape[0], fused=False) as tracker:
            tracker.backward(losses())
        for parameter, gradient in zip(layer.parameters(), expected, strict=True):
            assert torch.equal(parameter.grad, gradient)


def frozen(layer: nn.Module) -> nn.Module:
    return layer.requires_grad_(False)


@pytest.mark.parametrize(
    "layer",
    [
        nn.BatchNorm2d(4),
        nn.BatchNorm2d(4, affine=False),
        frozen(nn.BatchNorm2d(4)),
        nn.BatchNorm2d(4, track_running_stats=False),
        nn.BatchNorm2d(4, track_running_stats=False).eval(),
        nn.BatchNorm2d(4, track_running_stats=False, affine=False).eval(),
    ],
    ids=["affine", "plain", "frozen", "own statistics", "own in evaluation", "plain in evaluation"],
)
@pytest.mark.parametrize("place", ["before", "after"])
def test_batch_norm_by_statistics_of_the_batch_is_refused(layer, place):
    model = nn.Sequential(nn.Conv2d(4, 4, 1), layer)
    if place == "before":
        model = nn.Sequential(layer, model[0])
    mode = [module.training for module in model.modules()]
    own = r"Replace these .*GroupNorm.*track_running_stats=True and call \.eval\(\)"
    remedy = r"model\.eval\(\)" if layer.track_running_stats else own
    with pytest.raises(gs.CoupledExamplesError, match=rf"mixes the examples.*{remedy}"):
        gs.per_example_norms(model, torch.randn(3, 4, 2, 2), uneven_loss_of_one)
    with pytest.raises(gs.CoupledExamplesError), gs.track(model, batch_size=3) as tracker:
        tracker.backward(uneven_loss_of_one(model, torch.randn(3, 4, 2, 2)))
    assert [module.training for module in model.modules()] == mode
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())


@pytest.mark.parametrize(
    "layer, shape",
    [
        (nn.BatchNorm2d(4), (3, 2)),
        (nn.BatchNorm2d(4, momentum=None), (3, 2)),
        (nn.BatchNorm2d(4).requires_grad_(False), (3, 2)),
        (nn.BatchNorm2d(4, affine=False), (3, 2)),
        (nn.BatchNorm2d(4, track_running_stats=False).eval(), (3, 2)),
        (nn.BatchNorm1d(4), (5,)),
        (nn.BatchNorm3d(4), (2, 1, 3)),
    ],
    ids=["affine", "averages", "frozen", "plain", "own statistics", "1d", "3d"],
)
@pytest.mark.parametrize("fused", [True, False])
def test_batch_norm_by_statistics_of_the_only_example(layer, shape, fused):
    torch.manual_seed(0)
    dims = len(shape)
    before, after = (getattr(nn, f"Conv{dims}d")(4, 4, 1) for _ in range(2))
    model = nn.Sequential(before, copy.deepcopy(layer), nn.Tanh(), after).double()
    x = torch.randn(1, 4, *shape).double()
    expected = oracle_sqnorms(model, x, uneven_loss_of_one)
    plain, moved = copy.deepcopy(model), copy.deepcopy(model)
    uneven_loss_of_one(plain, x).sum().backward()
    assert_sqnorms(gs.per_example_norms(moved, x, uneven_loss_of_one), expected, 1e-9)
    with gs.track(model, batch_size=1, fused=fused) as tracker:
        tracker.backward(uneven_loss_of_one(model, x))
    assert_sqnorms(tracker.stats, expected, 1e-9)
    for own, other in zip(model.parameters(), plain.parameters(), strict=True):
        if fused:
            torch.testing.assert_close(own.grad, other.grad)
        else:
            assert own.grad is other.grad is None or torch.equal(own.grad, other.grad)
    # Running statistics count the batch once, as they do in the plain step.
    for other in (model, moved):
        for own, wanted in zip(other.buffers(), plain.buffers(), strict=True):
            assert torch.equal(own, wanted)


def test_batch_norm_of_the_rows_of_the_only_example():
    """Of packed rows, or positions that stand along the batch's axis, one example has all."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).double()
    rows = torch.randn(5, 3).double()

    def packed(model, rows):
        return model(rows).square().sum()[None]

    def folded(model, x):
        return model(x.flatten(0, 1)).square().sum()[None]

    expected = oracle_sqnorms(model, rows, packed)
    got = gs.per_example_norms(model, rows, packed, cu_seqlens=torch.tensor([0, 5]))
    assert_sqnorms(got, expected, 1e-9)
    assert_sqnorms(gs.per_example_norms(model, rows[None], folded), expected, 1e-9)
    with pytest.raises(gs.CoupledExamplesError, match="mixes the examples"):
        gs.per_example_norms(
            model, rows, lambda m, x: m(x).sum(1)[:2], cu_seqlens=torch.tensor([0, 3, 5])
        )


def uneven_loss_of_one(model, x):
    return uneven_loss(model, (x,))


def test_frozen_statistics_with_trained_affine():
    model = nn.Sequential(nn.Conv2d(2, 4, 1), scrambled(nn.BatchNorm2d(4)))
    model[1].eval()
    check_operation(lambda m, x: m.layer(x), {"layer": model}, normal(3, 2, 3, 3))


def test_layers_without_parameters_pass():
    layer = nn.Sequential(
        nn.Linear(4, 4), nn.LayerNorm(4, elementwise_affine=False), nn.Linear(4, 2)
    )
    check_operation(lambda m, x: m.layer(x), {"layer": layer}, normal(3, 5, 4))


def test_scale_derived_from_a_parameter():
    # Gemma's normalisation: the scale is 1 + weight.
    def function(m, x):
        return functional.rms_norm(x, (4,), 1 + m.w)

    check_operation(function, {"w": (4,)}, normal(3, 5, 4))
    check_operation(
        lambda m, x: functional.layer_norm(x, (4,), 1 + m.w, 2 * m.b),
        {"w": (4,), "b": (4,)},
        normal(3, 5, 4),
    )


NORMALISATIONS = {
    "layer": lambda x, w, b: functional.layer_norm(x, (4,), w, b),
    "group": lambda x, w, b: functional.group_norm(x.mT, 2, w, b).mT,
}


@pytest.mark.parametrize("made", ["scale", "shift"])
@pytest.mark.parametrize("normalise", NORMALISATIONS.values(), ids=NORMALISATIONS)
def test_scales_and_shifts_of_which_each_example_makes_its_own(normalise, made):
    """Adaptive normalisation, example by example."""

    def function(m, x):
        def one(row):
            own = m.maker(row.mean(1))[0]
            return normalise(row, *((own, m.p) if made == "scale" else (m.p, own)))

        return torch.cat([one(row) for row in x.split(1)])

    check_operation(function, {"maker": nn.Linear(4, 4), "p": (4,)}, normal(3, 5, 4))


@pytest.mark.parametrize("normalise", NORMALISATIONS.values(), ids=NORMALISATIONS)
def test_a_shift_that_one_example_makes_for_all_is_refused(normalise):
    check_refused(
        lambda m, x: normalise(x, m.p, m.maker(x.mean(1))[0]),
        {"maker": nn.Linear(4, 4), "p": (4,)},
        normal(3, 5, 4),
        error=gs.GradStatsError,
        match="example",
    )


def test_batch_norm_of_torch_itself_in_training_mode_is_refused():
    def function(m, x):
        return torch.batch_norm(x * m.w, None, None, None, None, True, 0.1, 1e-5, False)

    check_refused(
        function,
        {"w": (4,)},
        normal(3, 4),
        error=gs.CoupledExamplesError,
        match=r"mixes the examples",
    )


def test_normalisations_of_torch_itself():
    def function(m, x):
        layer = torch.layer_norm(x, (4,), m.w, m.b, cudnn_enable=False)
        return layer + torch.group_norm(x.mT, 2, m.v, m.c, cudnn_enabled=False).mT

    check_operation(function, {name: (4,) for name in "wbvc"}, normal(3, 5, 4))


SCALED = {
    "layer_norm": lambda m, x: functional.layer_norm(m.w, (4,), x[0]),
    "layer_norm, shifted": lambda m, x: functional.layer_norm(m.w, (4,), m.w[0], x[0]),
    "rms_norm": lambda m, x: functional.rms_norm(m.w, (4,), x[0]),
    "group_norm": lambda m, x: functional.group_norm(m.w, 2, x[0]),
    "batch_norm": lambda m, x: functional.batch_norm(m.w, m.w[0].detach(), m.w[0].detach(), x[0]),
    "instance_norm": lambda m, x: functional.instance_norm(m.w[None], weight=x[0, :3])[0],
}


@pytest.mark.parametrize("scaled", SCALED.values(), ids=SCALED)
def test_parameters_scaled_by_data_are_refused(scaled):
    check_refused(scaled, {"w": (3, 4)}, normal(3, 4), match="computed from data has no rule .*'w'")


@pytest.mark.parametrize("scratch", [1, 400])
def test_layers_that_are_normalised_a_few_examples_at_a_time(monkeypatch, scratch):
    monkeypatch.setattr(_affine, "SCRATCH", scratch)
    check_layer(nn.LayerNorm(4), 5, 4)
    check_layer(nn.LayerNorm((2, 4)), 5, 3, 2, 4)
    check_layer(nn.RMSNorm(4), 5, 3, 4)
    check_layer(nn.GroupNorm(2, 4), 5, 4, 3)
    check_layer(nn.BatchNorm1d(4).eval(), 5, 4, 2)

    def folded(m, x):
        return m.layer(x.flatten(0, 1)).unflatten(0, (5, 3))

    for layer, shape in (
        (nn.LayerNorm(4), (5, 3, 4)),
        (nn.RMSNorm(4), (5, 3, 4)),
        (nn.GroupNorm(2, 4), (5, 3, 4, 2)),
    ):
        check_operation(folded, {"layer": scrambled(layer)}, normal(*shape))


def test_a_list_of_vectors_with_as_many_numbers_as_there_are_examples():
    """Refused with a remedy that works: rows that are stacked before the context is opened."""
    layer = nn.LayerNorm(4).double()
    vectors = [normal(4) for _ in range(4)]

    def losses(model, batch):
        return model(batch).sin().sum(1)

    message = r"reduces over the last 1.* before the context is opened.*torch\.stack"
    inside = (lambda: vectors[0], lambda: vectors[0][None], lambda: torch.stack(vectors))
    for row in inside:
        with pytest.raises(gs.ExampleAxisError, match=message), gs.track(layer, batch_size=4):
            layer(row())
    batch = torch.stack(vectors)
    with gs.track(layer, batch_size=4) as tracker:
        tracker.backward(losses(layer, batch))
    assert_sqnorms(tracker.stats, oracle_sqnorms(layer, batch, losses), 1e-12)
