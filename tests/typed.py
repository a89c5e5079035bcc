"""What a type checker says of the public functions: ``mypy`` reads this file, nothing runs it."""

from __future__ import annotations

import numpy as np
from torch import Tensor, nn
from typing_extensions import assert_type

import gradstats as gs

Batch = tuple[Tensor, Tensor]


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    """One loss for each example."""
    loss: Tensor = nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return loss


class Net(nn.Module):
    """A model of the user's own."""


def own_loss(model: Net, batch: Batch) -> Tensor:
    """A loss function says which model it takes."""
    return loss_fn(model, batch)


def norms(model: Net, batch: Batch) -> None:
    """Any model, and what looks like a list of numbers."""
    assert_type(gs.per_example_norms(model, batch, own_loss), gs.GradientNorms)
    gs.Monitor(model).step(batch_size=2, ids=np.arange(2))
    gs.monitor.plot(gs.Monitor(model)).savefig("run.png")


def products(model: nn.Module, batch: Batch) -> None:
    """What is returned follows from ``per_parameter``."""
    sides = (model, batch, model, batch)
    assert_type(gs.inner_products(*sides, loss_fn), Tensor)
    assert_type(gs.inner_products(*sides, loss_fn, per_parameter=True), dict[str, Tensor])
    assert_type(gs.alignment(model, batch, loss_fn, "mean"), Tensor)
    parts = gs.alignment(model, batch, loss_fn, "mean", per_parameter=True)
    assert_type(parts, dict[str, Tensor])


def scores(model: nn.Module, batch: Batch, k: int | None) -> None:
    """What is returned follows from ``top_k``."""
    data = (model, [batch], [batch])
    run = gs.Checkpoints([model.state_dict()], lr=0.1)
    assert_type(gs.influence(*data, loss_fn, run), gs.InfluenceScores)
    assert_type(gs.influence(*data, loss_fn, run, top_k=3), gs.TopScores)
    assert_type(gs.influence(*data, loss_fn, run, top_k=k), gs.InfluenceScores | gs.TopScores)
