"""Adapters over frozen weights that are quantised: what holds them need not be a plain tensor."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_map_only

import gradstats as gs
from tests.oracle import flat, gradients_of
from tests.scoring.setting import loss_fn


class Quantised(Tensor):
    """Bytes times a scale, shown as one tensor that has no memory of its own, as torchao's are."""

    @staticmethod
    def __new__(cls, values: Tensor, scale: Tensor):
        return Tensor._make_wrapper_subclass(cls, values.shape, dtype=scale.dtype)

    def __init__(self, values: Tensor, scale: Tensor):
        self.values_, self.scale, self.form = values, scale, "as DTensor names its mesh"

    def __tensor_flatten__(self):
        return ["values_", "scale", "form"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].values_.detach(), args[0].scale.detach())
        if func is torch.ops.aten.copy_.default and isinstance(args[1], cls):
            args[0].values_.copy_(args[1].values_)
            args[0].scale.copy_(args[1].scale)
            return args[0]
        plain = tree_map_only(cls, lambda each: each.values_ * each.scale, (args, kwargs or {}))
        return func(*plain[0], **plain[1])


class Adapted(nn.Module):
    """A frozen weight and an update of rank two."""

    def __init__(self, wrapped: bool):
        super().__init__()
        weight = torch.randint(-9, 9, (4, 4), dtype=torch.int8), torch.rand(4, 1).double()
        held = Quantised(*weight) if wrapped else weight[0] * weight[1]
        self.weight = nn.Parameter(held, requires_grad=False)
        self.down = nn.Parameter(torch.randn(2, 4).double())
        self.up = nn.Parameter(torch.randn(4, 2).double())

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight) + x @ self.down.T @ self.up.T


class Described(Adapted):
    """Saves beside its weight what it cannot load, as layers of bitsandbytes do."""

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight.state"] = torch.tensor([4, 2], dtype=torch.uint8)


class Stubborn(nn.Linear):
    """Loads nothing of what it saves, as layers of eight bits do on a CPU."""

    def _load_from_state_dict(self, state_dict, prefix, *args):
        if f"{prefix}weight" in state_dict:
            raise RuntimeError("cannot be loaded")


def make(kind) -> nn.Module:
    torch.manual_seed(0)
    layer = Described(False) if kind == "described" else Adapted(kind == "wrapped")
    return nn.Sequential(layer, nn.Tanh(), nn.Linear(4, 3).double())


def expected(model: nn.Module, batch) -> Tensor:
    """Return (B, B) inner products by plain autograd, one example at a time."""
    rows = flat(gradients_of(model, loss_fn(model, batch)))
    return rows @ rows.T


@pytest.mark.parametrize("kind", ["plain", "wrapped", "described"])
def test_adapters_over_weights_that_stay(kind, tmp_path):
    model, batch = make(kind), (torch.randn(6, 4).double(), torch.arange(6) % 3)
    own, first = model.state_dict(), expected(model, batch)
    torch.testing.assert_close(gs.inner_products(model, batch, model, batch, loss_fn), first)
    adapters = {name: own[name] * 1.5 for name in ("0.down", "0.up")}
    other = make(kind)
    with torch.no_grad():
        other[0].down.mul_(1.5), other[0].up.mul_(1.5)
    products = first + expected(other, batch)
    checkpoints = gs.Checkpoints([own, {**own, **adapters}], lr=1.0)
    scores = gs.influence(
        model, [batch], [batch], loss_fn, checkpoints, out=tmp_path / "scores", progress=False
    )
    torch.testing.assert_close(torch.tensor(scores.raw[:]).double(), products, rtol=1e-5, atol=0)
    table = gs.self_influence(model, [batch], loss_fn, checkpoints, progress=False)
    found = torch.tensor(table.self_influence).double()
    torch.testing.assert_close(found, products.diagonal(), rtol=1e-5, atol=0)
    torch.testing.assert_close(expected(model, batch), first, rtol=0, atol=0)


def test_weights_that_cannot_be_loaded_and_stay():
    torch.manual_seed(0)
    batch = torch.randn(6, 4).double(), torch.arange(6) % 3
    model = nn.Sequential(Stubborn(4, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    model[0].requires_grad_(False)
    own, weight = model.state_dict(), model[2].weight.detach().clone()
    checkpoints = gs.Checkpoints([{**own, "2.weight": 2 * weight}], lr=1.0)
    table = gs.self_influence(model, [batch], loss_fn, checkpoints, progress=False)
    assert torch.equal(model[2].weight, weight)
    with torch.no_grad():
        model[2].weight.mul_(2)
    found = torch.tensor(table.self_influence).double()
    torch.testing.assert_close(found, expected(model, batch).diagonal(), rtol=1e-5, atol=0)
    with pytest.raises(gs.CheckpointError, match="cannot be loaded"):
        state = {**own, "0.weight": own["0.weight"] * 2}
        gs.self_influence(model, [batch], loss_fn, gs.Checkpoints([state], lr=1.0), progress=False)


def test_weights_that_stay_are_not_copied():
    model, batch = make("plain"), (torch.randn(6, 4).double(), torch.arange(6) % 3)
    own, used = model.state_dict(), set()

    def losses(model, batch):
        used.add((model[0].weight.data_ptr(), model[2].weight.data_ptr()))
        return loss_fn(model, batch)

    state = {**own, "2.weight": own["2.weight"] * 2}
    checkpoints = gs.Checkpoints([own, state], lr=1.0)
    gs.self_influence(model, [batch], losses, checkpoints, progress=False)
    frozen, trained = zip(*used, strict=True)
    assert {*frozen} == {own["0.weight"].data_ptr()} and len({*trained}) == 2


def test_a_checkpoint_of_other_quantised_weights():
    model, batch = make("wrapped"), (torch.randn(6, 4).double(), torch.arange(6) % 3)
    before, own = expected(model, batch), model.state_dict()
    weight = own["0.weight"]
    halved = Quantised(weight.values_, weight.scale / 2)
    other = make("wrapped")
    other[0].weight = nn.Parameter(halved, requires_grad=False)
    checkpoints = gs.Checkpoints([{**own, "0.weight": halved}], lr=1.0)
    table = gs.self_influence(model, [batch], loss_fn, checkpoints, progress=False)
    found = torch.tensor(table.self_influence).double()
    torch.testing.assert_close(found, expected(other, batch).diagonal(), rtol=1e-5, atol=0)
    torch.testing.assert_close(expected(model, batch), before, rtol=0, atol=0)


def test_what_a_layer_cannot_load_must_be_what_it_holds():
    model, batch = make("described"), (torch.randn(6, 4).double(), torch.arange(6) % 3)
    state = {**model.state_dict(), "0.weight.state": torch.tensor([8, 2], dtype=torch.uint8)}
    with pytest.raises(gs.CheckpointError, match=r"no way to take '0\.weight\.state'"):
        gs.self_influence(model, [batch], loss_fn, gs.Checkpoints([state], lr=1.0), progress=False)
