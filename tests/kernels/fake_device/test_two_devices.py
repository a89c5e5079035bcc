"""Models whose layers lie on two devices: a parameter's gradients are contracted on its own."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import gradstats as gs
from tests.oracle import assert_products, flat, oracle_gradients

B, POSITIONS, WIDTH, IDS = 5, 4, 6, 7

DEVICES = ("cuda", "cpu"), ("cpu", "cuda")
RTOL = 2e-4


class Apart(nn.Module):
    """An embedding and a layer on one device, and what a function computes on another."""

    def __init__(self, function, first, second):
        super().__init__()
        self.shift = nn.Parameter(torch.randn(WIDTH, device=second))  # the first of all parameters
        self.table = nn.Embedding(IDS, WIDTH, device=first)
        self.layer = nn.Linear(WIDTH, WIDTH, device=first)
        self.other = nn.Linear(WIDTH, WIDTH, device=second)
        self.places = nn.Embedding(IDS, WIDTH, device=second)
        self.norm = nn.LayerNorm(WIDTH, device=second)
        self.function, self.second = function, second

    def forward(self, ids):
        hidden = torch.tanh(self.layer(self.table(ids.to(self.table.weight.device))))
        return self.function(self, hidden.to(self.second), ids.to(self.second))


def _to_host_or_device(weight: Tensor, device: str) -> Tensor:
    return weight.cpu() if device == "cpu" else weight.cuda()


FUNCTIONS = {
    "layers": lambda m, h, ids: m.other(m.norm(h)) + m.shift,
    "tables": lambda m, h, ids: h * m.places(ids) * m.shift,
    "a weight of another device": lambda m, h, ids: functional.linear(
        h, m.table.weight.to(m.second)
    ),
    "a copy of a weight": lambda m, h, ids: functional.linear(
        h, _to_host_or_device(m.table.weight, m.second)
    ),
    "rows of a copy": lambda m, h, ids: functional.linear(h, m.table.weight.to(m.second)[:3]),
    "a function of a copy": lambda m, h, ids: functional.linear(
        h, m.other.weight + m.layer.weight.to(m.second).exp()
    ),
}


def losses(model, ids):
    return model(ids).square().flatten(1).sum(1)


def reversed_losses(model, ids):
    return losses(model, ids.flip(0))


def packed_losses(model, ids):
    rows = losses(model, ids)
    owner = torch.tensor(OWNERS, device=rows.device)
    return rows.new_zeros(B).index_add(0, owner, rows)


OWNERS = [0, 0, 0, 1, 3, 3, 3, 3, 4, 4]
BOUNDS = torch.tensor([0, 3, 4, 4, 8, 10])


@pytest.mark.parametrize("devices", DEVICES, ids=lambda pair: f"{pair[0]} before {pair[1]}")
@pytest.mark.parametrize("packed", [False, True], ids=["examples", "packed examples"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_all_statistics(name, packed, devices):
    model = Apart(FUNCTIONS[name], *devices)
    host = copy.deepcopy(model).cpu()
    host.second = "cpu"
    if packed:
        options, loss_fn = {"cu_seqlens": BOUNDS}, packed_losses
        ids = torch.randint(IDS, (len(OWNERS),))
    else:
        options, loss_fn, ids = {}, losses, torch.randint(IDS, (B, POSITIONS))
    rows = flat(oracle_gradients(host, ids, loss_fn))
    mean = rows.mean(0, keepdim=True)

    stats = gs.per_example_norms(model, ids, loss_fn, gram=True, alignment=True, **options)
    assert_products(stats.gram.cpu(), rows, rows, RTOL)
    assert_products(stats.alignment[:, None].cpu(), rows, mean, RTOL)
    norms = gs.per_example_norms(model, ids, loss_fn, **options).sqnorm
    assert_products(norms.cpu(), rows, rows, RTOL)
    assert bool((stats.error_bound < 1e-3).all())

    with gs.track(model, batch_size=B, **options) as tracker:
        tracker.backward(loss_fn(model, ids))
    assert_products(tracker.stats.sqnorm.cpu(), rows, rows, RTOL)
    model.zero_grad()

    other = copy.deepcopy(model)
    products = gs.inner_products(model, ids, other, ids.clone(), loss_fn, **options)
    assert_products(products.cpu(), rows, rows, RTOL)

    direction = {key: torch.randn(value.shape) for key, value in model.named_parameters()}
    along = torch.cat([value.flatten() for value in direction.values()])[None].double()
    got = gs.alignment(model, ids, loss_fn, direction, **options)
    assert_products(got[:, None].cpu(), rows, along, RTOL)


@pytest.mark.parametrize("devices", DEVICES, ids=lambda pair: f"{pair[0]} before {pair[1]}")
def test_losses_in_another_order(devices):
    model = Apart(FUNCTIONS["layers"], *devices)
    host = copy.deepcopy(model).cpu()
    host.second = "cpu"
    ids = torch.randint(IDS, (B, POSITIONS))
    rows = flat(oracle_gradients(host, ids, losses)).flip(0)
    stats = gs.per_example_norms(model, ids, reversed_losses, gram=True)
    assert_products(stats.gram.cpu(), rows, rows, RTOL)
    assert_products(stats.sqnorm.cpu(), rows, rows, RTOL)
    assert bool((stats.error_bound < 1e-3).all())
