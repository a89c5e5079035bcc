"""Nothing of a model is remembered that may be otherwise in the next step."""

from fnmatch import fnmatch

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import gradstats as gs

from .oracle import assert_sqnorms, check_model, oracle_sqnorms

SIZE, WIDTH = 3, 4


class Changing(nn.Module):
    """Layers, a parameter of its own, and a tensor that it keeps."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        )
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.shift = torch.rand(WIDTH).double()
        self.double()

    def forward(self, x):
        return self.layers(x) * self.scale + self.shift


class Tripled(nn.Module):
    """Three times a weight."""

    def forward(self, weight):
        return 3 * weight


def squares(model, batch):
    return model(batch).square().sum(1)


def linear(inputs, outputs):
    return nn.Linear(inputs, outputs).double()


def fresh(*shape):
    return nn.Parameter(torch.randn(*shape).double())


def change(model):
    """Change a model again and again; yield what was done."""
    layers = model.layers
    layers[0].weight = fresh(WIDTH, WIDTH)
    yield "another parameter"
    layers[0].weight.data = torch.rand(WIDTH, WIDTH).double().t()
    yield "other numbers"
    layers[3].weight.requires_grad_(False)
    yield "frozen"
    layers[3].weight.requires_grad_(True)
    layers[3].bias.requires_grad_(False)
    yield "another one frozen"
    layers[3].weight = layers[0].weight
    yield "tied"
    layers[0].bias = None
    yield "no bias"
    layers[3].weight = fresh(WIDTH, WIDTH)
    yield "no longer tied"
    layers.append(linear(WIDTH, WIDTH))
    yield "one more layer"
    layers.append(layers[4])
    yield "a layer used twice"
    layers[5] = linear(2, WIDTH)
    layers[4].weight, layers[4].bias = fresh(2, WIDTH), fresh(2)
    yield "parameters of another shape"
    layers[2] = linear(WIDTH, WIDTH)
    yield "another layer"
    hook = layers[0].register_forward_hook(lambda module, args, result: result * 3)
    yield "a hook on a layer"
    hook.remove()
    yield "no hook any more"
    layers[3].weight.register_hook(lambda grad: grad)
    yield "a hook on a parameter"
    parametrize.register_parametrization(layers[0], "weight", Tripled())
    yield "a parametrization"
    layers[0].forward = torch.sin
    yield "a layer that no longer uses its weight"
    model.shift = torch.rand(SIZE, 1).double()
    yield "a tensor of as many rows as examples"
    del model.shift
    model.register_buffer("shift", torch.rand(SIZE, WIDTH).double())
    yield "a buffer"
    del model.shift
    model.shift = fresh(WIDTH)
    yield "a parameter in its place"
    model.layers[4].requires_grad_(False)
    yield "a frozen layer"
    del layers[1]
    yield "a layer left out"


def test_a_model_that_is_changed_between_steps():
    model, batch = Changing(), torch.randn(SIZE, WIDTH).double()
    check_model(model, batch, squares, rtol=1e-10)
    for done in change(model):
        try:
            for _ in range(2):
                stats = gs.per_example_norms(model, batch, squares)
                assert_sqnorms(stats, oracle_sqnorms(model, batch, squares), rtol=1e-10)
                model.zero_grad()
                with gs.track(model, batch_size=SIZE) as tracker:
                    tracker.backward(squares(model, batch))
                assert_sqnorms(tracker.stats, stats.by_parameter, rtol=1e-10)
        except Exception as error:
            raise AssertionError(f"after {done}") from error


def test_a_precision_that_is_changed_between_steps():
    model, batch = Changing(), torch.randn(SIZE, WIDTH).double()
    for dtype in (torch.float64, torch.float32) * 2:
        model.shift = model.to(dtype).shift.to(dtype)
        stats = gs.per_example_norms(model, batch.to(dtype), squares)
        assert {stats.sqnorm.dtype, stats.norm.dtype, stats.rows.dtype} == {dtype}
        expected = oracle_sqnorms(model, batch, squares)
        assert_sqnorms(stats, expected, rtol=1e-10 if dtype == torch.float64 else 1e-4)


@pytest.mark.parametrize("exclude", [(), [], "layers.0.bias"])
def test_other_parameters_are_chosen_in_each_step(exclude):
    model, batch = Changing(), torch.randn(SIZE, WIDTH).double()
    expected = oracle_sqnorms(model, batch, squares)
    for pattern in ("*", "layers.0.*", "scale", "*.weight", "*"):
        stats = gs.per_example_norms(model, batch, squares, parameters=pattern, exclude=exclude)
        names = [name for name in expected if fnmatch(name, pattern) and name != exclude]
        assert_sqnorms(stats, {name: expected[name] for name in names}, rtol=1e-10)


@pytest.mark.parametrize("make", [tuple, list, lambda pair: {"x": pair[0], "y": [pair[1]]}])
def test_a_batch_in_other_containers_in_each_step(make):
    model, pair = Changing(), (torch.randn(SIZE, WIDTH).double(), torch.rand(SIZE).double())

    def losses(model, batch):
        x, y = batch.values() if isinstance(batch, dict) else batch
        return (model(x).sum(1) - (y[0] if isinstance(y, list) else y)).square()

    expected = oracle_sqnorms(model, pair, losses)
    for batch in (pair, make(pair)):
        assert_sqnorms(gs.per_example_norms(model, batch, losses), expected, rtol=1e-10)
