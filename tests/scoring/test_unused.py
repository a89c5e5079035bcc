"""Batches whose losses use none of the parameters that are scored: their gradients are zero."""

from __future__ import annotations

import copy
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import gradstats as gs
from tests.oracle import flat, oracle_gradients
from tests.scoring.setting import batches, loss_fn

RATES = (0.5, 0.25)
CHOICES = {"by pattern": {"parameters": "first.*"}, "by exclusion": {"exclude": ["second.*"]}}


class Experts(nn.Module):
    """Each example is served by one of two experts, which its first number chooses."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(3, 4)

    def forward(self, x):
        chosen = x[:, 0] > 0
        result = x.new_zeros(len(x), 4)
        for expert, rows in ((self.first, chosen), (self.second, ~chosen)):
            if rows.any():
                result[rows] = expert(x[rows])
        return result


def data(signs):
    """Return examples in batches of two, of which each is served by the expert of its sign."""
    x, y = torch.randn(2 * len(signs), 3).double(), torch.randint(4, (2 * len(signs),))
    x[:, 0] = x[:, 0].abs() * torch.tensor(signs).repeat_interleave(2)
    return batches((x, y), 2)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Experts().double()


def run_of(model, rates=RATES):
    states = []
    for _ in RATES:
        states.append(copy.deepcopy(model.state_dict()))
        for parameter in model.parameters():
            parameter.data.mul_(1.5)
    return gs.Checkpoints(states, lr=rates), states


def expected_gradients(model, states, loader):
    """Return (N, d) for each checkpoint."""
    found = []
    for state in states:
        model.load_state_dict(state)
        each = [oracle_gradients(model, batch, loss_fn) for batch in loader]
        chosen = [{n: g for n, g in one.items() if n.startswith("first")} for one in each]
        found.append(torch.cat([flat(one) for one in chosen]))
    return found


@pytest.mark.parametrize("options", CHOICES.values(), ids=CHOICES)
@pytest.mark.parametrize("signs", [(1, -1, 1), (-1, 1, -1)], ids=str)
def test_self_influence_is_zero(model, signs, options):
    loader = data(signs)
    run, states = run_of(model)
    expected = expected_gradients(model, states, loader)
    table = gs.self_influence(model, loader, loss_fn, run, progress=False, **options)
    scores = sum(rate * g.square().sum(1) for rate, g in zip(RATES, expected, strict=True))
    np.testing.assert_allclose(table.columns["self_influence"], scores, rtol=1e-9)
    model.load_state_dict(states[-1])
    losses = torch.cat([loss_fn(model, batch) for batch in loader]).detach()
    np.testing.assert_allclose(table.by_checkpoint["loss"][-1], losses, rtol=1e-9)


@pytest.mark.parametrize("where", ["memory", "disk", "lists"])
@pytest.mark.parametrize("rates", [RATES, "each parameter's"], ids=str)
def test_influence_is_zero(model, where, rates, tmp_path):
    train, query = data((-1, 1, -1)), data((1, -1))
    if rates is not RATES:
        names = dict(model.named_parameters())
        rates = [dict.fromkeys(names, rate) for rate in RATES]
        rates[0]["first.bias"] = 0.0
    run, states = run_of(model, rates)
    sides = [expected_gradients(model, states, loader) for loader in (train, query)]
    if isinstance(rates[0], dict):
        sides[0][0][:, -4:] = 0  # of the first checkpoint's bias
    expected = sum(rate * a @ b.T for rate, a, b in zip(RATES, *sides, strict=True))
    options = {"out": tmp_path / "scores"} if where == "disk" else {}
    options |= {"top_k": 2} if where == "lists" else {}
    call = partial(
        gs.influence, model, train, query, loss_fn, run, parameters="first.*", progress=False,
        **options,
    )  # fmt: skip
    scores = call()
    if where == "lists":
        best = scores.proponents(query=0, k=2).scores
        np.testing.assert_allclose(best, expected[:, 0].topk(2).values, rtol=1e-9)
        return
    np.testing.assert_allclose(np.asarray(scores), expected, rtol=1e-9, atol=1e-12)
    np.testing.assert_array_equal(np.asarray(scores.cosine) == 0, expected == 0)
    if where == "disk":  # and where all is there already
        np.testing.assert_array_equal(np.asarray(call()), np.asarray(scores))


def test_parameters_that_no_batch_uses_are_an_error(model):
    used, unused = data((1, -1)), data((-1, -1))
    run, _ = run_of(model)
    options = {"parameters": "first.*", "progress": False}
    for call, which in (
        (lambda: gs.self_influence(model, unused, loss_fn, run, **options), "training"),
        (lambda: gs.influence(model, unused, used, loss_fn, run, **options), "training"),
        (lambda: gs.influence(model, used, unused, loss_fn, run, **options), "query"),
        (lambda: gs.influence(model, used, unused, loss_fn, run, top_k=1, **options), "query"),
    ):
        with pytest.raises(gs.TrackingError, match=f"no {which} batch uses any of the parameters"):
            call()


def test_a_batch_alone_is_an_error(model):
    (batch,) = data((-1,))
    with pytest.raises(gs.TrackingError, match="none of the tracked parameters"):
        gs.per_example_norms(model, batch, loss_fn, parameters="first.*")
