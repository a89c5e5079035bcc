"""Real digits with 10 % of the labels flipped: who opposes clean validation digits?"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import gradstats as gs
from gradstats.demo._data import load_noisy_digits
from gradstats.demo._experiment import one_thread
from gradstats.scoring._metrics import detect
from tests.scoring.setting import batches, loss_fn

KEPT = (1, 2, 5, 10)


@one_thread()
@pytest.mark.filterwarnings("ignore::gradstats.GradStatsWarning")
def test_cosine_finds_flipped_labels_that_raw_products_miss():
    """Opponents of clean digits, averaged: products are led by large gradients, cosines are not."""
    pytest.importorskip("sklearn")
    random = np.random.default_rng(0)
    data = load_noisy_digits(random, held_out=0.22, noise_rate=0.10)
    given = torch.from_numpy(data.given)
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(),
        nn.Linear(64, 10),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    states = []
    for epoch in range(1, max(KEPT) + 1):
        for chosen in torch.from_numpy(random.permutation(len(given))).split(32):
            optimizer.zero_grad()
            functional.cross_entropy(model(data.images[chosen]), given[chosen]).backward()
            optimizer.step()
        if epoch in KEPT:
            state = {name: value.clone() for name, value in model.state_dict().items()}
            states.append({"model": state, "optimizer": optimizer.state_dict()})
    checkpoints = gs.Checkpoints(states, lr="optimizer")
    train = batches((data.images, given), 256)
    clean = batches((data.held_out_images, torch.from_numpy(data.held_out_labels)), 256)
    scores = gs.influence(model, train, clean, loss_fn, checkpoints, progress=False)
    forms = (scores.raw, scores.cosine)
    raw, cosine = (detect(-np.asarray(form).mean(1), data.flipped).auroc for form in forms)
    assert cosine - raw >= 0.15, (raw, cosine)
    assert cosine >= 0.95, cosine
    table = gs.self_influence(model, train, loss_fn, checkpoints, progress=False)
    report = table.report(data.flipped)
    assert report.rows["self-influence"].auroc >= 0.99, str(report)
    assert report.warnings == []
