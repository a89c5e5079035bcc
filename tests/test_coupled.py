"""Losses that depend on several examples have no per-example gradients, and are refused."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import gradstats as gs

from .oracle import assert_sqnorms, oracle_sqnorms

BATCH, WIDTH = 3, 4


def batch():
    torch.manual_seed(0)
    return torch.randn(BATCH, WIDTH).double()


# What brings together the hidden values h (B, d) of all examples.
MIXES = {
    "centred": lambda h: h - h.mean(0),
    "centred, kept axis": lambda h: h - h.mean(dim=0, keepdim=True),
    "divided by a number": lambda h: h / h.std(),
    "centred, as numpy has it": lambda h: h - torch.mean(input=h, axis=0),
    "normalised": lambda h: functional.normalize(h, dim=0),
    "softmax": lambda h: h.softmax(0),
    "log_softmax": lambda h: functional.log_softmax(h, dim=-2),
    "cumsum": lambda h: h.cumsum(0),
    "norm over all": lambda h: functional.layer_norm(h, h.shape),
    "attention": lambda h: functional.scaled_dot_product_attention(h, h, h),
    "joined": lambda h: torch.cat([h, h.amax(0).expand_as(h)], 1),
    "written": lambda h: torch.zeros_like(h).copy_(h.mean(0).expand_as(h)),
}


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_values_of_all_examples(mix):
    model = nn.Linear(WIDTH, WIDTH).double()
    with pytest.raises(gs.CoupledExamplesError, match="depends on several examples"):
        gs.per_example_norms(model, batch(), lambda m, x: mix(m(x)).square().sum(1))
    assert type(model.weight) is nn.Parameter


def test_rows_summed_by_a_constant_matrix():
    """What it does with the examples is not looked at: it might move them, or mix them."""
    model, matrix = nn.Linear(WIDTH, WIDTH).double(), torch.eye(BATCH).double().roll(1, 0)
    with pytest.raises(gs.ExampleAxisError, match="lost on the way"):
        gs.per_example_norms(model, batch(), lambda m, x: (matrix @ m(x)).square().sum(1))


def test_a_loss_beside_a_mean_over_the_batch():
    """Where the losses are one scalar the graph shows what they were."""

    def losses(m, x):
        h = m(x)
        return h.square().sum(1) / h.square().sum(1).sum()

    model = nn.Linear(WIDTH, WIDTH).double()
    with pytest.raises(gs.CoupledExamplesError, match="several examples"):
        gs.per_example_norms(model, batch(), losses)
    with pytest.raises(gs.CoupledExamplesError, match="brings what was computed over all examples"):
        with gs.track(model, batch_size=BATCH):
            losses(model, batch()).mean().backward()


# What takes values of other examples as given, or stays within each.
APART = {
    "inputs centred": lambda m, x: m(x - x.mean(0)),
    "detached mean": lambda m, x: m(x) - m(x).mean(0).detach(),
    "softmax": lambda m, x: m(x).softmax(1),
    "mean of each": lambda m, x: m(x) - m(x).mean(-1, keepdim=True),
    "mean of each, as numpy has it": lambda m, x: m(x) - m(x).mean(axis=1, keepdims=True),
    "norm of each": lambda m, x: functional.layer_norm(m(x), (WIDTH,)),
    "largest of two": lambda m, x: torch.max(m(x), x),
}


@pytest.mark.parametrize("function", APART.values(), ids=APART)
def test_examples_that_stay_apart(function):
    model = nn.Linear(WIDTH, WIDTH).double()
    given = model(batch()).mean(0).detach()

    def losses(m, x):
        return function(m, x).square().sum(1)

    x = batch()
    rows = x - x.mean(0)

    def alone(m, pair):
        """The same with what other examples give written out."""
        own, centred = pair
        if function is APART["inputs centred"]:
            return m(centred).square().sum(1)
        if function is APART["detached mean"]:
            return (m(own) - given).square().sum(1)
        return losses(m, own)

    expected = oracle_sqnorms(model, (x, rows), alone)
    assert_sqnorms(gs.per_example_norms(model, x, losses), expected, 1e-10)


def test_a_batch_of_one_couples_nothing():
    model, x = nn.Linear(WIDTH, WIDTH).double(), batch()[:1]

    def losses(m, x):
        h = m(x)
        return (h - 2 * h.mean(0)).square().sum(1)

    expected = oracle_sqnorms(model, x, losses)
    with gs.track(model, batch_size=1) as tracker:
        losses(model, x).mean().backward()
    assert_sqnorms(tracker.stats, expected, 1e-10)
