"""Weights that modules and hooks compute before use: normalised, quantised, adapted."""

from collections import deque

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize

import gradstats as gs
from tests.oracle import assert_sqnorms, check_model, oracle_sqnorms
from tests.rules.operation import Operation, check_operation, normal, uneven_loss

BATCH, WIDTH = 3, 4

LAYERS = {
    "linear": (lambda: nn.Linear(WIDTH, 5), (BATCH, 2, WIDTH)),
    "convolution": (lambda: nn.Conv1d(WIDTH, 5, 2), (BATCH, WIDTH, 4)),
    "transposed convolution": (lambda: nn.ConvTranspose1d(WIDTH, 5, 2), (BATCH, WIDTH, 4)),
    "attention": (lambda: nn.MultiheadAttention(WIDTH, 2, batch_first=True), (BATCH, 4, WIDTH)),
    "embedding": (lambda: nn.Embedding(7, WIDTH), None),
}

# PyTorch's recurrent layers read their weights before parametrizations are computed, not hooks'.
RECURRENT = {"recurrent": (lambda: nn.LSTM(WIDTH, 5, batch_first=True), (BATCH, 4, WIDTH))}

NAMES = {"recurrent": "weight_hh_l0", "attention": "in_proj_weight"}


def run(layer: nn.Module, x: Tensor) -> Tensor:
    if isinstance(layer, nn.MultiheadAttention):
        return layer(x, x, x)[0]
    out = layer(x)
    return out[0] if isinstance(out, tuple) else out


def sample(shape):
    return torch.randint(7, (BATCH, 4)) if shape is None else normal(*shape)


class Symmetric(nn.Module):
    """A parametrization as users write them."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight + weight.flip(-1) * 0.5


class Gain(nn.Module):
    """A parametrization with a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.5))

    def forward(self, weight: Tensor) -> Tensor:
        return weight.tanh() * self.gain.exp()


USERS = {"without parameters": Symmetric, "with a parameter": Gain}


@pytest.mark.parametrize("parametrization", USERS.values(), ids=USERS)
@pytest.mark.parametrize("name", LAYERS)
def test_parametrizations_of_users(name, parametrization):
    build, shape = LAYERS[name]
    layer = build()
    parametrize.register_parametrization(layer, NAMES.get(name, "weight"), parametrization())
    model = Operation(lambda m, x: run(m.layer, x), {"layer": layer}, upstream=False)
    check_model(model, (sample(shape),), uneven_loss)


@pytest.mark.parametrize("name", LAYERS)
def test_weight_norm(name):
    build, shape = LAYERS[name]
    layer = parametrizations.weight_norm(build(), NAMES.get(name, "weight"))
    check_operation(lambda m, x: run(m.layer, x), {"layer": layer}, sample(shape))


def attribute_types(model: nn.Module) -> list[type]:
    """Return the types of all that modules keep, in lists and deques too."""
    kept = [item for module in model.modules() for item in vars(module).values()]
    inside = (each for item in kept if type(item) in (list, deque) for each in item)
    return [type(item) for item in [*kept, *inside]]


def check_each_forward(make, x: Tensor) -> None:
    """Compare with the oracle where a forward leaves something on the model: on fresh ones."""

    def losses(model, x):
        return uneven_loss(lambda x: run(model, x), (x,))

    expected = oracle_sqnorms(make(), x, losses)
    assert_sqnorms(gs.per_example_norms(make(), x, losses), expected, 1e-9)
    plain = make()
    losses(plain, x).mean().backward()
    for fused in (True, False):
        model = make()
        kinds = attribute_types(model)
        with gs.track(model, batch_size=BATCH, fused=fused) as tracker:
            tracker.backward(losses(model, x))
        assert_sqnorms(tracker.stats, expected, 1e-9)
        assert attribute_types(model) == kinds
        for got, want in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(got.grad, want.grad, rtol=1e-12, atol=1e-14)
            assert fused or torch.equal(got.grad, want.grad)


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", LAYERS | RECURRENT)
def test_weight_norm_as_a_hook(name):
    build, shape = (LAYERS | RECURRENT)[name]
    weight = NAMES.get(name, "weight")

    def make():
        torch.manual_seed(0)
        layer = nn.utils.weight_norm(build().double(), weight)
        # Computed anew before each forward; the oracle cannot copy a tensor that has a history.
        setattr(layer, weight, getattr(layer, weight).detach())
        return layer

    check_each_forward(make, sample(shape))


@pytest.mark.parametrize("container", [list, deque])
def test_weights_that_a_forward_keeps_in_containers(container):
    class Keeping(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.kept = nn.Linear(WIDTH, 3), container([torch.zeros(1)])

        def forward(self, x):
            self.kept[0] = self.layer.weight.tanh()
            return functional.linear(x, self.kept[0], self.layer.bias)

    def make():
        torch.manual_seed(0)
        return Keeping().double()

    check_each_forward(make, normal(BATCH, WIDTH))


@pytest.mark.parametrize("name", LAYERS)
def test_spectral_norm_in_evaluation(name):
    build, shape = LAYERS[name]
    layer = parametrizations.spectral_norm(build(), NAMES.get(name, "weight")).eval()
    check_operation(lambda m, x: run(m.layer, x), {"layer": layer}, sample(shape))


@pytest.mark.parametrize("old", [False, True], ids=["parametrization", "hook"])
def test_spectral_norm_in_training(old):
    """Each forward runs a power iteration: on equal buffers the results agree."""
    wrap = nn.utils.spectral_norm if old else parametrizations.spectral_norm

    def make():
        torch.manual_seed(0)
        layer = wrap(nn.Linear(WIDTH, 5)).double().train()
        if old:
            layer.weight = layer.weight.detach()
        return layer

    check_each_forward(make, normal(BATCH, 2, WIDTH))


def test_standardised_weights():
    """Batch normalisation of a weight takes its statistics from no example."""

    def function(m, x):
        flat = m.w.reshape(1, len(m.w), -1)
        weight = functional.batch_norm(flat, None, None, training=True).reshape_as(m.w)
        return functional.conv1d(x, weight, m.b)

    check_operation(function, {"w": (5, WIDTH, 2), "b": (5,)}, normal(BATCH, WIDTH, 4))


def straight_through(weight: Tensor) -> Tensor:
    """Round to eighths; the gradient passes as if nothing were rounded."""
    return weight + ((weight * 8).round() / 8 - weight).detach()


QUANTISED = {
    "detached difference": straight_through,
    "fake_quantize_per_tensor_affine": lambda w: torch.fake_quantize_per_tensor_affine(
        w, 0.1, 0, -8, 7
    ),
    "fake_quantize_per_channel_affine": lambda w: torch.fake_quantize_per_channel_affine(
        w, torch.full((len(w),), 0.1), torch.zeros(len(w)), 0, -8, 7
    ),
    "clamp": lambda w: w.clamp(-0.5, 0.5),
    "sign": lambda w: w.sign() * w.abs().mean(),
}


@pytest.mark.parametrize("quantise", QUANTISED.values(), ids=QUANTISED)
def test_quantisation(quantise):
    x = normal(BATCH, 2, WIDTH)
    check_operation(
        lambda m, x: functional.linear(x, quantise(m.w.float()).to(x.dtype), m.b),
        {"w": (5, WIDTH), "b": (5,)},
        x,
        rtol=1e-5,
        gradient_rtol=1e-6,
    )


class LowRank(nn.Module):
    """A linear layer adapted by two small matrices, as published (arXiv 2106.09685)."""

    def __init__(self, base: nn.Linear, rank: int, merged: bool):
        super().__init__()
        self.base, self.merged = base.requires_grad_(False), merged
        self.down = nn.Parameter(torch.randn(rank, base.in_features))
        self.up = nn.Parameter(torch.randn(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        if self.merged:
            return functional.linear(x, self.base.weight + 2 * self.up @ self.down, self.base.bias)
        return self.base(x) + 2 * (x @ self.down.T @ self.up.T)


@pytest.mark.parametrize("merged", [False, True])
def test_low_rank_adaptation(merged):
    model = nn.Sequential(
        LowRank(nn.Linear(WIDTH, 6), 2, merged), nn.GELU(), LowRank(nn.Linear(6, 3), 2, merged)
    ).double()
    x = normal(BATCH, 5, WIDTH)
    check_model(model, x, lambda m, x: uneven_loss(m, (x,)))


@pytest.mark.filterwarnings("ignore::FutureWarning")  # one library's use of another
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"use_rslora": True}], ids=str)
def test_adapters_of_peft(options):
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2, n_head=2, n_embd=16, vocab_size=40, n_positions=16, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    adapters = peft.LoraConfig(
        r=2, target_modules=["c_attn", "c_fc", "wte"], fan_in_fan_out=True,
        init_lora_weights=False, **options,
    )  # fmt: skip
    model = peft.get_peft_model(transformers.GPT2LMHeadModel(config), adapters).double().eval()

    def losses(model, ids):
        logits = model(input_ids=ids).logits[:, :-1]
        found = functional.cross_entropy(
            logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
        )
        return found.view(BATCH, -1).mean(1)

    ids = torch.randint(3, 40, (BATCH, 5))
    with torch.no_grad():
        losses(model, ids)
    check_model(model, ids, losses)
