"""Small operations that are alike: what waits, for how long, and that the norms are right."""

import gc
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

import gradstats as gs
from gradstats.capture.uses import _together

from .functions import ScaleGradient
from .oracle import assert_sqnorms, check_model, oracle_sqnorms, taken_for

BATCH, DEPTH = 5, 7


class Scale(nn.Module):
    """x ∘ w + b."""

    def __init__(self, *shape):
        super().__init__()
        self.scale, self.shift = (nn.Parameter(torch.randn(shape)) for _ in range(2))

    def forward(self, x):
        return x * self.scale + self.shift


class Tables(nn.Module):
    """The sum of several embeddings of the same tokens."""

    def __init__(self, **options):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(9, 4, **options) for _ in range(DEPTH))

    def forward(self, tokens):
        return sum(table(tokens) for table in self.tables)


def stacked(make):
    return nn.Sequential(*(make() for _ in range(DEPTH)))


def grouped():
    return nn.Conv1d(4, 4, 3, padding=2, dilation=2, groups=2)


def transposed():
    return nn.ConvTranspose1d(4, 4, 3, padding=1)


# A model of alike layers, and the shape of one example.
MODELS = {
    "linear": (lambda: stacked(lambda: nn.Linear(6, 6)), (3, 6)),
    "linear, no bias": (lambda: stacked(lambda: nn.Linear(6, 6, bias=False)), (2, 3, 6)),
    "layer norm": (lambda: stacked(lambda: nn.LayerNorm(6)), (6,)),
    "layer norm, positions": (lambda: stacked(lambda: nn.LayerNorm((3, 6))), (2, 3, 6)),
    "layer norm, no bias": (lambda: stacked(lambda: nn.LayerNorm(6, bias=False)), (3, 6)),
    "group norm": (lambda: stacked(lambda: nn.GroupNorm(2, 6)), (6, 3)),
    "convolution": (lambda: stacked(lambda: nn.Conv2d(4, 4, 3, padding=1)), (4, 3, 5)),
    "grouped": (lambda: stacked(grouped), (4, 6)),
    "pointwise": (lambda: stacked(lambda: nn.Conv1d(4, 4, 1, bias=False)), (4, 6)),
    "transposed": (lambda: stacked(transposed), (4, 6)),
    "scale": (lambda: stacked(lambda: Scale(3, 1)), (3, 6)),
}


def losses_of(model, x):
    result = model(x).flatten(1)
    slope = torch.linspace(0.5, 1.5, result.shape[1], dtype=result.dtype)
    return (result * slope + result.square() / 3).sum(1)


def model_and_data(name, seed=0):
    torch.manual_seed(seed)
    make, shape = MODELS[name]
    model = make().double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.7)
    return model, torch.randn(BATCH, *shape, dtype=torch.float64)


@pytest.fixture
def contracted(monkeypatch):
    """Record how many operations each contraction serves."""
    counts = []
    contract = _together.Group.contract

    def record(group):
        counts.extend([len(group._waiting)] if group._waiting else [])
        contract(group)

    monkeypatch.setattr(_together.Group, "contract", record)
    return counts


@pytest.mark.parametrize("name", MODELS)
def test_alike_layers_are_contracted_at_once(name, contracted):
    model, x = model_and_data(name)
    expected = oracle_sqnorms(model, x, losses_of)
    assert_sqnorms(gs.per_example_norms(model, x, losses_of), expected, 1e-11)
    uses = 2 if name == "scale" else 1  # a product and a sum
    assert contracted == [DEPTH] * uses
    with gs.track(model, batch_size=BATCH) as tracker:
        tracker.backward(losses_of(model, x))
    assert_sqnorms(tracker.stats, expected, 1e-11)
    assert contracted == [DEPTH] * uses * 2


@pytest.mark.parametrize("options", [{}, {"padding_idx": 2}])
def test_tables(options, contracted):
    torch.manual_seed(0)
    model, tokens = Tables(**options).double(), torch.randint(9, (BATCH, 4))
    tokens[0] = 2
    check = oracle_sqnorms(model, tokens, losses_of)
    assert_sqnorms(gs.per_example_norms(model, tokens, losses_of), check, 1e-11)
    assert contracted == [DEPTH]


@pytest.mark.parametrize("name", ["linear", "convolution", "scale"])
@pytest.mark.parametrize(
    "limits, most",
    [
        ({"MOST": 2}, [2, 2, 2, 1]),
        ({"MOST_BYTES": 3}, [3, 3, 1]),
        ({"MOST_BYTES": 0}, [1] * DEPTH),
        ({"HELD": 0}, None),
    ],
)
def test_within_limits(name, limits, most, contracted, monkeypatch):
    model, x = model_and_data(name)
    for limit, value in limits.items():
        # A shift has no operand beside the gradient, of the size of x.
        size = x.nbytes * 2 if limit == "MOST_BYTES" else 1
        monkeypatch.setattr(_together, limit, value * size)
    expected = oracle_sqnorms(model, x, losses_of)
    assert_sqnorms(gs.per_example_norms(model, x, losses_of), expected, 1e-11)
    if name == "scale":
        assert sum(contracted) == 2 * DEPTH
    else:
        assert contracted == (most or [DEPTH])


def test_no_more_is_held_than_the_limit(monkeypatch):
    """Whatever the number of groups."""
    torch.manual_seed(0)
    widths = range(8, 40)
    model = nn.ModuleList(stacked(partial(nn.LayerNorm, width)) for width in widths)
    data = [torch.randn(BATCH, width) for width in widths]
    monkeypatch.setattr(_together, "HELD", 16 * 1024)
    held = []
    reserve = _together.Together.reserve

    def record(together, operands, expected):
        memory = reserve(together, operands, expected)
        groups = together._groups.values()
        held.append(sum(each.nbytes for g in groups for each in g._memory))
        held[-1] += sum(each.nbytes for each in memory)
        return memory

    monkeypatch.setattr(_together.Together, "reserve", record)

    def losses(model, data):
        return sum(losses_of(layer, x) for layer, x in zip(model, data, strict=True))

    stats = gs.per_example_norms(model, data, losses)
    assert_sqnorms(stats, oracle_sqnorms(model, data, losses), 1e-5)
    assert len(held) >= len(widths)
    assert 8 * 1024 < max(held) <= 16 * 1024


DIFFERENT = {
    "layer norm": ((6,), lambda: nn.LayerNorm(6), lambda: nn.LayerNorm(6, eps=1.0)),
    "what is trained": ((6,), lambda: nn.LayerNorm(6), lambda: nn.LayerNorm(6, bias=False)),
    "group norm": ((6, 3), lambda: nn.GroupNorm(2, 6), lambda: nn.GroupNorm(3, 6)),
    "both norms": ((6, 6), lambda: nn.LayerNorm(6), lambda: nn.GroupNorm(1, 6)),
    "linear": ((3, 6), lambda: nn.Linear(6, 6), lambda: nn.Linear(6, 6, bias=False)),
    "convolution": (
        (4, 6),
        lambda: nn.Conv1d(4, 4, 3, padding=1),
        lambda: nn.Conv1d(4, 4, 3, padding=2, dilation=2),
    ),
    "transposed": (
        (4, 6),
        lambda: nn.Conv1d(4, 4, 3, padding=1),
        lambda: nn.ConvTranspose1d(4, 4, 3, padding=1),
    ),
    "scale": ((6, 6), lambda: Scale(6, 1), lambda: Scale(1, 6)),
    "table": (
        (6,),
        lambda: OfRanks(nn.Embedding(6, 6)),
        lambda: OfRanks(nn.Embedding(6, 6, padding_idx=1)),
    ),
}


class OfRanks(nn.Module):
    """A table looked up by the order of its data."""

    def __init__(self, table):
        super().__init__()
        self.table = table

    def forward(self, x):
        return x + self.table(x.detach().argsort(1)).sum(2)


@pytest.mark.parametrize("name", DIFFERENT)
def test_layers_that_differ_are_not_joined(name):
    torch.manual_seed(0)
    shape, *makers = DIFFERENT[name]
    model = nn.Sequential(*(make() for _ in range(3) for make in makers)).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.7)
    check_model(model, torch.randn(BATCH, *shape, dtype=torch.float64), losses_of)


def test_operands_of_other_sizes():
    """Strides let inputs of two sizes give results of one; whoever differs does not wait."""
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Conv1d(2, 3, 3, stride=2) for _ in range(6)).double()
    data = [torch.randn(BATCH, 2, 7 + n % 2, dtype=torch.float64) for n in range(6)]

    def losses(model, data):
        return sum(losses_of(layer, x) for layer, x in zip(model, data, strict=True))

    assert layers[0](data[0]).shape == layers[1](data[1]).shape
    check = oracle_sqnorms(layers, data, losses)
    assert_sqnorms(gs.per_example_norms(layers, data, losses), check, 1e-11)


@pytest.mark.parametrize("name", MODELS)
def test_what_changes_after_it_was_used(name):
    """Operands are copied: data may change once the backward is past them, and gradients too."""

    def overwritten(tensor):
        tensor.data.fill_(7)

    def losses(model, x):
        for layer in model:
            kept = x * 1
            x = layer(kept)
            if kept.requires_grad:
                kept.register_hook(lambda grad, kept=kept: overwritten(kept))
        return losses_of(nn.Identity(), x)

    model, x = model_and_data(name)
    expected = oracle_sqnorms(model, x, losses_of)
    assert_sqnorms(gs.per_example_norms(model, x, losses), expected, 1e-11)

    def beside(model, x):
        return losses_of(nn.Identity(), sum(layer(x) for layer in model) + x)

    def changed(model, x):
        x.register_hook(overwritten)
        return beside(model, x)

    expected = oracle_sqnorms(model, x, beside)
    x.requires_grad_()
    assert_sqnorms(gs.per_example_norms(model, x, changed), expected, 1e-11)


def test_some_get_no_gradient_and_some_are_shared():
    torch.manual_seed(0)
    model = stacked(lambda: nn.Linear(6, 6)).double()
    model[1] = model[4]
    x = torch.randn(BATCH, 3, 6, dtype=torch.float64)

    def losses(model, x):
        beside = ScaleGradient.apply(model[6](model[5](x)), None)
        for layer in model[:5]:
            x = layer(x).tanh()
        return losses_of(nn.Identity(), x + beside)

    check_model(model, x, losses)


def test_examples_elsewhere():
    torch.manual_seed(0)
    for name in ("linear", "layer norm, positions", "scale"):
        model, x = model_and_data(name)
        x = x.transpose(0, 1).contiguous()

        def losses(model, x):
            return losses_of(nn.Identity(), model(x).transpose(0, 1))

        if name == "scale":
            model = stacked(lambda: Scale(6)).double()
        expected = oracle_sqnorms(model, x, losses)
        stats = gs.per_example_norms(model, x, losses, batch_dim=1)
        assert_sqnorms(stats, expected, 1e-11)


def test_half_precision():
    model, x = model_and_data("linear")
    model, x = model.bfloat16(), x.bfloat16()
    stats = gs.per_example_norms(model, x, losses_of)
    with taken_for("large"):
        apart = gs.per_example_norms(model, x, losses_of)
    torch.testing.assert_close(stats.sqnorm, apart.sqnorm, rtol=1e-5, atol=0)


def test_nothing_is_held_after_a_backward_that_failed(monkeypatch):
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            raise ArithmeticError

    held = []
    reserve = _together.Together.reserve

    def record(together, operands, expected):
        memory = reserve(together, operands, expected)
        held.extend(weakref.ref(each) for each in memory)
        return memory

    monkeypatch.setattr(_together.Together, "reserve", record)
    model, x = model_and_data("linear")
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(ArithmeticError), gs.track(model, batch_size=BATCH) as tracker:
            tracker.backward(losses_of(model[1:], Fails.apply(model[0](x))))
        assert len(held) == 2
        assert all(each() is None for each in held)
    finally:
        gc.enable()


def test_the_only_example():
    for name in MODELS:
        model, x = model_and_data(name)
        check_model(model, x[:1], losses_of)


def test_functional_layers_of_several_dtypes():
    """Layers in float32 and in float64 are alike in all but that."""
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.LayerNorm(6) for _ in range(8))
    for layer in layers[::2]:
        layer.double()

    def losses(model, x):
        for layer in model:
            x = functional.tanh(layer(x.to(layer.weight.dtype)))
        return losses_of(nn.Identity(), x.double())

    x = torch.randn(BATCH, 6)
    stats = gs.per_example_norms(layers, x, losses)
    assert_sqnorms(stats, oracle_sqnorms(layers, x, losses), 1e-5)
