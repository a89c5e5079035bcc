"""A small convolutional network and its training, with checkpoints kept at some epochs."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from gradstats.demo._settings import Settings


def digit_network(seed: int) -> nn.Sequential:
    """Return a network (B, 1, 8, 8) → (B, 10) with weights drawn from ``seed``."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, 16, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, kernel_size=3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 10),
        )


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return one cross-entropy (B,) for each example."""
    images, labels = batch
    return F.cross_entropy(model(images), labels, reduction="none")


def train(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    settings: Settings,
    random: np.random.Generator,
) -> dict[int, dict[str, Any]]:
    """Train in place with SGD on the mean cross-entropy.

    Args:
        model: the network.
        images: (N, 1, 8, 8).
        labels: (N,) given labels.
        settings: epochs, checkpoints and the optimizer's numbers.
        random: source of the order of the examples.

    Returns:
        dict: after each epoch of ``settings.checkpoints`` the state of model and optimizer, as a
        training loop would save them.
    """
    optimizer = torch.optim.SGD(
        model.parameters(), lr=settings.learning_rate, momentum=settings.momentum
    )
    checkpoints = {}
    for epoch in tqdm(range(1, settings.epochs + 1), desc="training", unit="epoch"):
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate_at(epoch)
        run_epoch(model, optimizer, images, labels, settings.batch_size, random)
        if epoch in settings.checkpoints:
            checkpoints[epoch] = copy.deepcopy(
                {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            )
    return checkpoints


def run_epoch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    images: Tensor,
    labels: Tensor,
    batch_size: int,
    random: np.random.Generator,
) -> None:
    """Take a step on the mean loss of each batch, with the examples in an order of their own."""
    order = torch.from_numpy(random.permutation(len(images)))
    for chosen in order.split(batch_size):
        optimizer.zero_grad()
        loss_fn(model, (images[chosen], labels[chosen])).mean().backward()
        optimizer.step()
