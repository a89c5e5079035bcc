"""gradstats on CUDA tensors, kernels interpreted, against the float64 oracle.

What no CPU tensor can show: branches on is_cuda, operands on one device, launchers behind their
operators, and rules that run in the device's own autograd thread.
"""

from __future__ import annotations

import pytest
import torch
from gradstats.kernels import (
    convolution,
    convolution_gram,
    convolution_weight_gradient,
    direct,
    gram,
    group_norm,
    layer_norm,
    rank_one,
    scale_backward,
    vector,
    weight_gradient,
)
from torch import nn

import gradstats as gs
from benchmarks.workloads import Transformer, next_token
from gradstats import contractions
from gradstats._cost import GUARD_TOLERANCE
from gradstats._factors import Outer, map_tensors
from gradstats.capture.following._repeated import NOTED
from gradstats.capture.rules._affine import AffineFactors
from gradstats.contractions import _outer, _triton
from tests.dispatched import Operations, tensors_in
from tests.losses import mean_square
from tests.oracle import (
    assert_sqnorms,
    check_model,
    check_products,
    flat,
    oracle_gradients,
    oracle_sqnorms,
    perturbed,
)
from tests.test_backend import CANCELLING, cancelling
from tests.test_inner_products import check_pairs_of_rows

B = 5


@pytest.fixture(autouse=True)
def launched(monkeypatch, operators_called):
    """Record which kernels were launched, each behind its operator or prepared for a layer."""
    names = operators_called
    NOTED.clear()  # and with it what was prepared
    modules = [convolution, convolution_gram, direct, gram, rank_one, vector, weight_gradient]
    modules.append(convolution_weight_gradient)
    prepares = {module: module.__name__.rpartition(".")[2] + "_sqnorm" for module in modules}
    prepares |= {layer_norm: "layer_norm_backward", group_norm: "group_norm_backward"}
    prepares[scale_backward] = "scale_backward"
    for module, name in prepares.items():

        def prepare(*args, name=name, prepared=module.prepare, **options):
            if len(args) < 2 or args[1] is not None:  # not that of a bias alone
                names.append(name)
            return prepared(*args, **options)

        monkeypatch.setattr(module, "prepare", prepare)
    return names


def on_device(model, *shape):
    return model.cuda(), (torch.randn(B, *shape).cuda(), torch.randn(B).cuda()), mean_square


def perceptron():
    return on_device(
        nn.Sequential(nn.Linear(6, 9), nn.RMSNorm(9, eps=1e-6), nn.SiLU(), nn.Linear(9, 3)), 6
    )


def sequences():
    """Linear layers at more positions than products of positions pay for."""
    return on_device(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)), 40, 6)


def convolutions():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.GroupNorm(4, 8), nn.GELU(),
        nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.BatchNorm2d(8),
        nn.Conv2d(8, 6, 1), nn.Flatten(),
    ).eval()  # fmt: skip
    return on_device(model, 3, 6, 5)


def classifier():
    """Layers whose results are finished by kernels, before one of PyTorch's, with a bias."""
    head = nn.Sequential(nn.Flatten(), nn.Linear(24, 5), nn.ReLU(), nn.Linear(5, 4))
    return on_device(nn.Sequential(nn.Conv2d(2, 6, 3, stride=2, padding=1), head), 2, 4, 4)


class Scaled(nn.Module):
    """A scale and a shift of one's own, between layers."""

    def __init__(self):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.randn(7)), nn.Parameter(torch.randn(7))
        self.project = nn.Linear(7, 4)

    def forward(self, x):
        return self.project(torch.sin(x * self.scale + self.shift))


def embedding():
    model = nn.Sequential(nn.Embedding(11, 6), nn.LayerNorm(6), nn.Linear(6, 3))
    model, (_, labels), losses = on_device(model)
    return model, (torch.randint(11, (B, 4)).cuda(), labels), losses


def tied_transformer():
    model = Transformer(layers=1, width=8, heads=2, vocabulary=11, positions=5).cuda()
    model.head.weight = model.tokens.weight
    tokens = torch.randint(11, (B, 6)).cuda()
    return model, (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()), next_token


def moved(name, inputs, result):
    """Find the operations that move what is in memory between host and device."""
    places = {tensor.is_cuda for tensor in tensors_in((inputs, result))}
    # a tensor of Python's numbers is copied before anybody sees the copy
    copied = name == "lift_fresh" and result.is_cuda
    asked = name in ("_local_scalar_dense", "bincount", "nonzero", "equal")
    return name if len(places) == 2 or copied or asked else None


@pytest.mark.parametrize("name", ["tied transformer", "sequences", "convolutions", "classifier"])
@pytest.mark.parametrize("alone", [False, True])
def test_a_step_moves_nothing_between_host_and_device(name, alone):
    """The device never stands idle until the host has launched more, and a CUDA graph can record
    the step."""
    model, (x, labels), losses = MODELS[name][0]()
    with Operations(moved) as moves:
        if alone:
            gs.per_example_norms(model, (x, labels), losses, nonfinite="keep")
        else:
            with gs.track(model, batch_size=B) as tracker:
                tracker.backward(losses(model, (x, labels)))
    assert moves.found == []


def cast(name, inputs, result):
    """Find from which dtype to which tensors are copied."""
    casts = name == "_to_copy" and inputs[0].dtype != result.dtype
    return (inputs[0].dtype, result.dtype) if casts else None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_summed_gradients_are_stored_as_the_parameters_are(dtype):
    model = nn.Sequential(nn.Linear(7, 24), nn.LayerNorm(24), nn.Linear(24, 7), Scaled())
    model, (x, _), _ = on_device(model, 40, 7)
    model, x = model.to(dtype), x.to(dtype)
    model(x).float().square().mean().backward()
    want = {name: each.grad for name, each in model.named_parameters()}
    model.zero_grad()
    with gs.track(model, batch_size=B) as tracker, Operations(cast) as casts:
        tracker.backward(model(x).float().square().mean((1, 2)))
    of_the_loss = int(dtype != torch.float32)
    assert casts.found.count((torch.float32, dtype)) == of_the_loss, "a kernel for each parameter"
    for name, each in model.named_parameters():
        size = want[name].abs().max().item()
        error = (each.grad.float() - want[name].float()).abs().max().item()
        assert each.grad.dtype == dtype and error <= 16 * torch.finfo(dtype).eps * size, name


@pytest.mark.parametrize("width, form", [(3072, "gram"), (50257, "direct")])
def test_long_rows_take_the_form_that_tensor_cores_cut_little_off(width, form):
    left, right = (torch.zeros(1, 1, 64, size).cuda().bfloat16() for size in (width, 768))
    assert _outer.cheapest_form(Outer(left, right, (width, 768))) == form


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("positions", [1, 7, 36, 340])
def test_gradients_of_images_are_summed_where_they_lie(positions, dtype, launched):
    left, right = (torch.randn(B, width, positions).cuda().to(dtype) for width in (5, 3))
    factor = Outer(left.mT.unsqueeze(1), right.mT.unsqueeze(1), (5, 3, 1, 1))
    result, total = contractions.sqnorm_and_sum(factor, 1 << 20)
    each = left.double() @ right.double().mT
    torch.testing.assert_close(result.value, each.square().sum((1, 2)), rtol=1e-4, atol=0)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(
        total.double().flatten(1), each.sum(0), rtol=2 * eps, atol=4 * eps * positions**0.5
    )
    assert total.dtype == dtype and total.shape == (5, 3, 1, 1)
    in_one = dtype == torch.float32 and positions > 20
    assert ("weight_gradient_sqnorm" in launched) == in_one


@pytest.mark.parametrize("kind", CANCELLING)
def test_what_cancels_is_computed_again_where_it_lies(kind, launched):
    """By the operator of the Gram form alone."""
    factor = map_tensors(cancelling(kind), torch.Tensor.cuda)
    expected = map_tensors(factor, torch.Tensor.double).dense().flatten(1).square().sum(1)
    for _ in range(2):
        result = contractions.sqnorm([factor], 1 << 20)
        torch.testing.assert_close(result.value, expected, rtol=1e-3, atol=0)
        assert bool((result.bound <= GUARD_TOLERANCE * result.value).all())
    assert launched == 2 * ["convolution_gram_sqnorm" if kind == "convolution" else "gram_sqnorm"]


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_pairs_of_rows(dtype, groups, launched):
    check_pairs_of_rows(dtype, groups)
    assert ("pairwise_gram" in launched) == (dtype == torch.float32)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(6, 5, num_layers=2, batch_first=True)

    def forward(self, x):
        return self.lstm(x)[0]


# what norms and products of each model are made of, so that none of it goes another way unseen
MODELS = {
    "perceptron": (
        perceptron,
        {"rank_one_sqnorm", "layer_norm_backward", "layer_norm_sqnorm"},
        {"pairwise_gram", "diagonal_gram", "direction_inner", "layer_norm_sum"},
    ),
    "sequences": (
        sequences,
        {"direct_sqnorm", "weight_gradient_sqnorm", "vector_sqnorm"},
        {"pairwise_direct", "direction_inner", "vector_sum"},
    ),
    "short sequences": (
        lambda: on_device(
            nn.Sequential(nn.Linear(24, 40), nn.LayerNorm(40), nn.Linear(40, 24)), 3, 24
        ),
        {"gram_sqnorm", "layer_norm_backward"},
        {"pairwise_gram", "diagonal_gram", "layer_norm_sum"},
    ),
    "convolutions": (
        convolutions,
        {
            "convolution_sqnorm", "convolution_gram_sqnorm", "convolution_weight_gradient_sqnorm",
            "group_norm_backward", "group_norm_sqnorm", "scale_backward",
        },
        {"pairwise_convolution", "convolution_direction", "group_norm_sum", "scale_sum"},
    ),
    "classifier": (
        classifier,
        {"convolution_gram_sqnorm", "rank_one_sqnorm", "vector_sqnorm"},
        {"pairwise_convolution_gram", "pairwise_gram", "vector_sum"},
    ),
    "scale": (
        lambda: on_device(Scaled(), 4, 7),
        {"scale_backward"},
        {"scale_sum", "scale_direction"},
    ),
    "embedding": (
        embedding,
        {"rows_sqnorm", "gram_sqnorm", "layer_norm_backward"},
        {"rows_direction", "rows_inner", "pairwise_rows", "layer_norm_sum"},
    ),
    "tied transformer": (
        tied_transformer,
        {"rows_sqnorm", "gram_sqnorm", "layer_norm_backward"},
        {"tied_inner", "pairwise_rows", "rows_direction"},
    ),
    "recurrent": (
        lambda: on_device(Recurrent(), 4, 6),
        {"gram_sqnorm", "vector_sqnorm"},
        {"pairwise_gram", "vector_sum"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_norms_and_gradients(name, launched):
    make, expected, _ = MODELS[name]
    check_model(*make(), rtol=1e-3, gradient_rtol=1e-4)
    assert expected <= set(launched)


@pytest.mark.parametrize("name", MODELS)
def test_products(name, launched):
    make, _, expected = MODELS[name]
    check_products(*make(), rtol=1e-4)
    assert expected <= set(launched)


class Normalised(nn.Module):
    """Normalisations that are alike, and others that differ in one respect."""

    def __init__(self):
        super().__init__()
        rows = [{}, {}, {"eps": 0.5}, {"bias": False}, {}]
        self.rows = nn.ModuleList(nn.LayerNorm(6, **options) for options in rows)
        self.channels = nn.ModuleList(nn.GroupNorm(2, 6, eps) for eps in (1e-5, 1e-5, 0.5))
        self.groups = nn.GroupNorm(3, 6)
        with torch.no_grad():
            for each in self.parameters():
                each.add_(0.5 * torch.randn_like(each))

    def forward(self, x):
        for number, layer in enumerate(self.rows):
            x = layer(x).tanh() * (1 + number)
        for layer in (*self.channels, self.groups):
            x = layer(x.mT).sin().mT
        return x


def test_what_is_decided_about_a_normalisation_is_remembered(monkeypatch):
    model, batch, _ = on_device(Normalised(), 5, 6)
    expected = oracle_sqnorms(model, batch, mean_square)
    asked, one_pass = [], AffineFactors.one_pass

    def ask(self, *args):
        asked.append(self)
        return one_pass(self, *args)

    monkeypatch.setattr(AffineFactors, "one_pass", ask)  # also forgets what others decided
    for backend in ("", "torch"):
        monkeypatch.setenv(_triton.BACKEND_VARIABLE, backend)
        asks = []
        for _ in range(2):
            assert_sqnorms(gs.per_example_norms(model, batch, mean_square), expected, 1e-3)
            with gs.track(model, batch_size=B) as tracker:
                tracker.backward(mean_square(model, batch))
            assert_sqnorms(tracker.stats, expected, 1e-3)
            asks.append(len(asked))
        assert asks[0] == asks[1] > 0
        asked.clear()
    monkeypatch.undo()
    cast = []
    for _ in range(2):
        with torch.autocast("cuda", torch.bfloat16):
            cast.append(gs.per_example_norms(model, batch, mean_square).sqnorm)
        assert_sqnorms(gs.per_example_norms(model, batch, mean_square), expected, 1e-3)
    assert torch.equal(*cast)


def test_a_gradient_scaler():
    model, batch, losses = perceptron()
    expected = oracle_sqnorms(model, batch, losses)
    scaler = torch.amp.GradScaler("cuda")
    with gs.track(model, batch_size=B, scaler=scaler) as tracker:
        scaler.scale(losses(model, batch).mean()).backward()
    assert_sqnorms(tracker.stats, expected, 1e-3)


def test_weights_on_the_cpu():
    model, batch, losses = perceptron()
    expected, weights = oracle_sqnorms(model, batch, losses), torch.rand(B)
    with gs.track(model, batch_size=B, loss_reduction=None, weights=weights) as tracker:
        (losses(model, batch) * weights.cuda()).sum().backward()
    assert_sqnorms(tracker.stats, expected, 1e-3)


def test_monitor():
    model, batch, losses = perceptron()
    expected = sum(oracle_sqnorms(model, batch, losses).values()).sqrt()
    rows = flat(oracle_gradients(model, batch, losses))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    monitor = gs.Monitor(model, every=1, optimizer=optimizer, alignment=True, gram=True)
    with monitor.step(batch_size=B, ids=torch.arange(B)):
        losses(model, batch).mean().backward()
    optimizer.step()
    metrics = monitor.metrics()
    assert metrics["grad_norm"] == pytest.approx(rows.mean(0).norm().item(), rel=1e-3)
    found = torch.from_numpy(monitor.histograms()["example_grad_norm"]).double()
    torch.testing.assert_close(found, expected.cpu(), rtol=1e-3, atol=0)
    assert len(monitor.examples(2)) == 2


def test_scores_over_checkpoints(tmp_path):
    model, batch, losses = perceptron()
    # data lie where a loader leaves them; the loss function moves them
    data = [tuple(part.cpu() for part in batch)]

    def moved(model, batch):
        return losses(model, tuple(part.cuda() for part in batch))

    rows = []
    for number in range(2):
        if number:
            model = perturbed(model)
        torch.save(model.state_dict(), tmp_path / f"epoch-{number}.pt")
        rows.append(flat(oracle_gradients(model, batch, losses)))
    run = gs.Checkpoints(str(tmp_path / "epoch-*.pt"), lr=[0.1, 0.2])
    weighted = sum(rate * each @ each.T for rate, each in zip((0.1, 0.2), rows, strict=True)).cpu()
    table = gs.self_influence(model, data, moved, run)
    got = torch.tensor(table.self_influence).double()
    torch.testing.assert_close(got, weighted.diagonal(), rtol=1e-3, atol=0)
    scores = gs.influence(model, data, data, moved, run)
    size = weighted.diagonal().sqrt()
    wrong = (torch.tensor(scores[:, :]).double() - weighted).abs()
    assert bool((wrong <= 1e-4 * size[:, None] * size).all())


def test_verify():
    report = gs.verify(*perceptron())
    assert report.ok, str(report)
