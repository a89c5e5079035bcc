"""Whole models through the kernels, against the float64 oracle.

On a GPU where there is one, else on the CPU implementations of the same operators.
"""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import gradstats as gs
from benchmarks.workloads import Transformer, next_token
from gradstats.contractions import _triton
from tests.losses import mean_square
from tests.oracle import (
    assert_products,
    assert_sqnorms,
    check_model,
    flat,
    oracle_gradients,
    oracle_sqnorms,
    perturbed,
)
from tests.pages import GUIDE, blocks

pytestmark = [
    pytest.mark.gpu,
    # cuDNN's, about the weights of a copied model
    pytest.mark.filterwarnings("ignore:RNN module weights are not part of single"),
]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def through_operators(monkeypatch):
    def runs(*operands):
        kernels = os.environ.get(_triton.BACKEND_VARIABLE) != "torch"
        (dtype, *others) = {operand.dtype for operand in operands}
        return kernels and not others and dtype in _triton.DTYPES

    if DEVICE == "cpu":
        monkeypatch.setattr(_triton, "runs", runs)


@pytest.fixture(autouse=True)
def exact_products():
    cudnn = torch.backends.cudnn
    before = torch.get_float32_matmul_precision(), cudnn.allow_tf32, cudnn.deterministic
    torch.set_float32_matmul_precision("highest")
    # The convolutions' own forward and backward are PyTorch's, whose fastest ones add atomically.
    cudnn.allow_tf32, cudnn.deterministic = False, True
    torch.manual_seed(0)
    yield
    torch.set_float32_matmul_precision(before[0])
    cudnn.allow_tf32, cudnn.deterministic = before[1:]


def transformer(tied=False):
    model = Transformer(layers=2, width=64, heads=4, vocabulary=300, positions=96)
    if tied:
        model.head.weight = model.tokens.weight
    tokens = torch.randint(300, (6, 97), device=DEVICE)
    return model.to(DEVICE), (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()), next_token


def convolutions():
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, stride=2, padding=1), nn.GroupNorm(4, 32), nn.GELU(),
        nn.Conv2d(32, 32, 7, padding=3, groups=32), nn.InstanceNorm2d(32, affine=True),
        nn.Conv2d(32, 48, 1), nn.BatchNorm2d(48), nn.ReLU(),
        nn.Conv2d(48, 64, 3, padding=1, groups=2), nn.ConvTranspose2d(64, 20, 2, stride=2),
        nn.GroupNorm(1, 20), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(80, 10),
    ).eval()  # fmt: skip
    batch = torch.randn(6, 3, 24, 20, device=DEVICE), torch.randn(6, device=DEVICE)
    return model.to(DEVICE), batch, mean_square


def perceptron():
    model = nn.Sequential(
        nn.Linear(50, 300), nn.RMSNorm(300, eps=1e-6), nn.SiLU(), nn.Linear(300, 200, bias=False),
        nn.LayerNorm(200), nn.Tanh(), nn.Linear(200, 7),
    )  # fmt: skip
    batch = torch.randn(40, 50, device=DEVICE), torch.randn(40, device=DEVICE)
    return model.to(DEVICE), batch, mean_square


class Recurrent(nn.Module):
    """Two layers of an LSTM, in training mode without dropout, where cuDNN computes them."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(60, 24)
        self.lstm = nn.LSTM(24, 40, num_layers=2, batch_first=True)
        self.head = nn.Linear(40, 9)

    def forward(self, tokens):
        return self.head(self.lstm(self.tokens(tokens))[0])


def recurrent():
    batch = torch.randint(60, (6, 30), device=DEVICE), torch.randn(6, device=DEVICE)
    return Recurrent().to(DEVICE), batch, mean_square


MODELS = {
    "transformer": transformer,
    "tied transformer": lambda: transformer(tied=True),
    "convolutions": convolutions,
    "perceptron": perceptron,
    "recurrent": recurrent,
}


@pytest.fixture(params=MODELS)
def case(request):
    return MODELS[request.param]()


def test_norms_and_gradients(case):
    check_model(*case, rtol=1e-3, gradient_rtol=1e-4, fusing=(True,))


def test_two_runs_give_the_same_bits(case):
    first, second = (gs.per_example_norms(*case, gram=True, alignment=True) for _ in range(2))
    for name in ("sqnorm", "gram", "alignment"):
        assert torch.equal(getattr(first, name), getattr(second, name)), name


def test_products(case):
    model, batch, losses = case
    named = oracle_gradients(model, batch, losses)
    rows = flat(named)
    stats = gs.per_example_norms(model, batch, losses, gram=True, alignment=True)
    assert_products(stats.gram, rows, rows, 1e-4)
    assert_products(stats.alignment[:, None], rows, rows.mean(0, keepdim=True), 1e-4)
    other = perturbed_on_device(model)
    columns = flat(oracle_gradients(other, batch, losses))
    arguments = (model, batch, other, batch, losses)
    assert_products(gs.inner_products(*arguments), rows, columns, 1e-4)
    assert_products(gs.inner_products(*arguments, pairs="diagonal"), rows, columns, 1e-4)
    direction = {name: torch.randn_like(value[0]).float() for name, value in named.items()}
    along = torch.cat([value.flatten() for value in direction.values()])[None].double()
    assert_products(gs.alignment(model, batch, losses, direction)[:, None], rows, along, 1e-4)


def perturbed_on_device(model):
    device = next(model.parameters()).device
    moved = perturbed(model.cpu())
    model.to(device)
    return moved.to(device)


@pytest.mark.parametrize("tokens", [False, True], ids=["rows", "tokens"])
def test_packed_examples(tokens):
    first = nn.Embedding(50, 64) if tokens else nn.Linear(40, 64)
    model = nn.Sequential(first, nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 30)).to(DEVICE)
    lengths = torch.tensor([30, 1, 0, 55])
    bounds = functional.pad(lengths.cumsum(0), (1, 0))
    owner = torch.arange(4).repeat_interleave(lengths).to(DEVICE)
    count = int(bounds[-1])
    x = torch.randint(50, (count,)) if tokens else torch.randn(count, 40)
    x = x.to(DEVICE)

    def losses(model, x):
        values = model(x).square().sum(1)
        return values.new_zeros(4).index_add(0, owner, values)

    expected = oracle_sqnorms(model, x, losses)
    bounds = bounds.to(DEVICE)
    stats = gs.per_example_norms(model, x, losses, cu_seqlens=bounds)
    assert_sqnorms(stats, expected, 1e-3)
    with gs.track(model, batch_size=4, loss_reduction="sum", cu_seqlens=bounds) as tracker:
        losses(model, x).sum().backward()
    assert_sqnorms(tracker.stats, expected, 1e-3)
    rows = flat(oracle_gradients(model, x, losses))
    stats = gs.per_example_norms(model, x, losses, cu_seqlens=bounds, gram=True, alignment=True)
    assert_products(stats.gram, rows, rows, 1e-4)
    assert_products(stats.alignment[:, None], rows, rows.mean(0, keepdim=True), 1e-4)


# PyTorch says so where a layer in float32 is given less
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_agrees_with_the_other_backend(case, dtype, monkeypatch, lstm_under_autocast):
    model, batch, losses = case

    def narrow(model, batch):
        with torch.autocast(DEVICE, dtype=dtype):
            return losses(model, batch).float()

    ours = gs.per_example_norms(model, batch, narrow).sqnorm
    monkeypatch.setenv(_triton.BACKEND_VARIABLE, "torch")
    theirs = gs.per_example_norms(model, batch, narrow).sqnorm
    torch.testing.assert_close(ours, theirs, rtol=3e-2, atol=0)


def other_data(batch):
    """Another batch of the same shapes: examples in another order, tokens and images changed."""
    x, y = batch
    return (x.flip(0, 1) if x.dtype == torch.int64 else 1.5 * x.flip(0)), y.flip(0)


class Sequences(nn.Module):
    """A recurrent layer in both directions on sequences of uneven length, packed or padded."""

    def __init__(self, kind, packed):
        super().__init__()
        self.packed = packed
        self.before = nn.Linear(12, 10)
        self.layer = kind(10, 24, 2, batch_first=True, bidirectional=True)
        self.after = nn.Linear(48, 5)

    def forward(self, x):
        x = self.before(x)
        if self.packed:
            x = pack_padded_sequence(x, torch.tensor([9, 17, 1, 17]), True, enforce_sorted=False)
        output, states = self.layer(x)
        if self.packed:
            output, _ = pad_packed_sequence(output, batch_first=True)
        state = states[0] if isinstance(states, tuple) else states
        return self.after(output).flatten(1).sin() + state.sum((0, 2)).unsqueeze(1)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers(kind, packed):
    model, x = Sequences(kind, packed).to(DEVICE), torch.randn(4, 17, 12, device=DEVICE)

    def losses(model, x):
        return model(x).square().mean(1)

    check_model(model, x, losses, rtol=1e-3, gradient_rtol=1e-4, fusing=(True,))
    first, second = (gs.per_example_norms(model, x, losses).sqnorm for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.skipif(DEVICE == "cpu", reason="CUDA graphs need a GPU")
@pytest.mark.filterwarnings("ignore")  # of the compiler, about itself
@pytest.mark.parametrize("name", ["perceptron", "tied transformer", "convolutions"])
def test_graphs_that_the_compiler_records_keep_no_result_of_a_step(name):
    torch._dynamo.reset()
    model, batch, losses = MODELS[name]()
    compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    found, expected = [], []
    for _ in range(6):
        batch = tuple(part.roll(7, 0) for part in batch)
        expected.append(oracle_sqnorms(model, batch, losses))
        model.zero_grad()
        with gs.track(compiled, batch_size=len(batch[0])) as tracker:
            tracker.backward(losses(compiled, batch))
        # these are the graph's, as without a context, and last until the next graph runs
        gradients = [parameter.grad.clone() for parameter in model.parameters()]
        model.zero_grad()
        found += [tracker.stats, gs.per_example_norms(compiled, batch, losses)]
        losses(model, batch).mean().backward()
        for got, parameter in zip(gradients, model.parameters(), strict=True):
            torch.testing.assert_close(got, parameter.grad, rtol=1e-3, atol=1e-6)
    for number, stats in enumerate(found):
        assert_sqnorms(stats, expected[number // 2], 1e-3)


@pytest.mark.skipif(DEVICE == "cpu", reason="CUDA graphs need a GPU")
@pytest.mark.filterwarnings("ignore")  # of the compiler, about itself
def test_gradients_accumulate_over_graphs_that_the_compiler_records():
    torch._dynamo.reset()
    model, batch, losses = MODELS["perceptron"]()
    compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    for _ in range(3):
        # graphs add to memory of the user's; what they return themselves they write anew
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for _ in range(2):
            batch = tuple(part.roll(7, 0) for part in batch)
            with gs.track(compiled, batch_size=len(batch[0])) as tracker:
                tracker.backward(losses(compiled, batch))
            assert_sqnorms(tracker.stats, oracle_sqnorms(model, batch, losses), 1e-3)
        gradients = [parameter.grad.clone() for parameter in model.parameters()]
        model.zero_grad()
        losses(model, batch).mean().backward()  # of the same examples in another order
        for got, parameter in zip(gradients, model.parameters(), strict=True):
            torch.testing.assert_close(got, 2 * parameter.grad, rtol=1e-3, atol=1e-6)


@pytest.mark.skipif(DEVICE == "cpu", reason="CUDA graphs need a GPU")
def test_a_step_recorded_in_a_cuda_graph_computes_what_an_eager_one_does(case):
    model, batch, losses = case
    batch = tuple(part.clone() for part in batch)  # the memory that other batches are copied to

    def step():
        model.zero_grad()
        with gs.track(model, batch_size=len(batch[0])) as tracker:
            tracker.backward(losses(model, batch))
        return tracker.stats

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stats = step()
    recorded = {name: value.grad for name, value in model.named_parameters()}
    for part, value in zip(batch, other_data(batch), strict=True):
        part.copy_(value)
    graph.replay()
    assert_sqnorms(stats, oracle_sqnorms(model, batch, losses), 1e-3)
    got = {name: grad.clone() for name, grad in recorded.items()}
    eager = step()
    torch.testing.assert_close(stats.sqnorm, eager.sqnorm, rtol=1e-5, atol=0)
    for name, value in model.named_parameters():
        size = value.grad.abs().max().item()
        torch.testing.assert_close(got[name], value.grad, rtol=1e-4, atol=1e-5 * size)


@pytest.mark.skipif(DEVICE == "cpu", reason="CUDA graphs need a GPU")
def test_the_documented_recipe_for_cuda_graphs():
    recipes = [block for page in GUIDE for block in blocks(page, "py")]
    (recipe,) = [block for block in recipes if "CUDAGraph" in block]
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).to(DEVICE)

    def loss_fn(model, batch):
        return functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    # which does not move the model, so that the oracle finds it as the last step did
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loader = [(torch.randn(16, 64), torch.randint(10, (16,))) for _ in range(3)]
    names = {
        "torch": torch, "gs": gs, "model": model, "loss_fn": loss_fn, "optimizer": optimizer,
        "loader": loader,
    }  # fmt: skip
    exec(compile(recipe, "the recipe", "exec"), names)
    last = tuple(part.to(DEVICE) for part in loader[-1])
    want = sum(oracle_sqnorms(model, last, loss_fn).values())
    torch.testing.assert_close(names["sqnorm"].double(), want, rtol=1e-4, atol=0)
