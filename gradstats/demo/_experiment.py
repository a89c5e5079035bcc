"""The experiment: flip labels, train, score the training digits, compare the scores."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

import gradstats as gs
from gradstats.demo._data import NoisyDigits, load_noisy_digits
from gradstats.demo._settings import Settings
from gradstats.demo._training import digit_network, loss_fn, train
from gradstats.scoring._metrics import Detection

SELF_INFLUENCE = "self_influence"
GRAND_AT_INITIALISATION = "grand_at_initialisation"
EXAMPLES_PER_BATCH = 256


@dataclass(frozen=True)
class Ranked:
    """One ranking of the training examples, and how well it finds the flipped labels.

    Attributes:
        name: the column in the CSV file.
        title: for people.
        forward_only: True where no gradient is needed.
        values: (N,) larger is more suspicious.
        detection: how well.
    """

    name: str
    title: str
    forward_only: bool
    values: np.ndarray
    detection: Detection


@dataclass(frozen=True)
class Outcome:
    """Everything one run produced.

    Attributes:
        settings: what was asked for.
        data: the digits and their labels.
        checkpoints: epoch → the state of model and optimizer.
        predicted: (N,) class of highest probability after the early epoch.
        scores: every score and how well it does, always in the same order.
        held_out_accuracy: of the last checkpoint.
        memorised: fraction of the flipped labels that the last checkpoint predicts as given.
    """

    settings: Settings
    data: NoisyDigits
    checkpoints: dict[int, dict[str, Any]]
    predicted: np.ndarray
    scores: list[Ranked]
    held_out_accuracy: float
    memorised: float

    @property
    def ranking(self) -> list[Ranked]:
        """The scores, the highest AUROC first."""
        return sorted(self.scores, key=lambda ranked: ranked.detection.auroc, reverse=True)


@contextmanager
def one_thread() -> Iterator[None]:
    """Let PyTorch compute on one thread inside the context.

    Then the order of sums, and with it the result, does not depend on the number of cores; and
    operations this small gain nothing from more threads.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@one_thread()
def run_experiment(settings: Settings) -> Outcome:
    """Return the outcome of one run, the same for the same settings.

    Args:
        settings: the numbers of the run, the seed among them.

    Returns:
        Outcome: data, checkpoints, scores and how well they do.
    """
    data_seed, training_seed = np.random.SeedSequence(settings.seed).spawn(2)
    data = load_noisy_digits(
        np.random.default_rng(data_seed), settings.held_out, settings.noise_rate
    )
    random = np.random.default_rng(training_seed)
    model_seeds = [int(seed) for seed in random.integers(2**31, size=settings.initialisations)]
    model = digit_network(model_seeds[0])
    given = torch.from_numpy(data.given)
    checkpoints = train(model, data.images, given, settings, random)
    with torch.no_grad():
        held_out = model(data.held_out_images).argmax(1).numpy()
    loader = DataLoader(TensorDataset(data.images, given), EXAMPLES_PER_BATCH)
    initial = [digit_network(seed).state_dict() for seed in model_seeds]
    run, early, untrained = (
        gs.self_influence(model, loader, loss_fn, weights)
        for weights in (
            gs.Checkpoints(list(checkpoints.values()), lr="optimizer"),
            gs.Checkpoints(checkpoints[settings.early_epoch], lr="optimizer"),
            # Only their mean norm is used, on which the rates have no effect.
            gs.Checkpoints(initial, lr=1.0),
        )
    )
    return Outcome(
        settings=settings,
        data=data,
        checkpoints=checkpoints,
        predicted=early.predicted,
        scores=compare(run, early, untrained, data.flipped, settings.early_epoch),
        held_out_accuracy=float((held_out == data.held_out_labels).mean()),
        memorised=float((run.predicted == data.given)[data.flipped].mean()),
    )


def compare(
    run: gs.SelfInfluence,
    early: gs.SelfInfluence,
    untrained: gs.SelfInfluence,
    flipped: np.ndarray,
    epoch: int,
) -> list[Ranked]:
    """Return every score of the demo with how well it finds the flipped labels.

    Args:
        run: over the checkpoints of one training run.
        early: at one of these checkpoints.
        untrained: over some random initialisations.
        flipped: (N,) bool.
        epoch: of the early checkpoint.

    Source:
        TracIn: Pruthi et al., arXiv 2002.08484. GraNd and EL2N: Paul et al., arXiv 2107.07075.
    """
    span, seeds = f"{len(run.checkpoints)} checkpoints", f"{len(untrained.checkpoints)} seeds"
    # Column, title, whether forward passes are enough, values; the table and the row of its report.
    scores = (
        (SELF_INFLUENCE, f"self-influence (TracIn), {span}", False, run.self_influence,
         run, "self-influence"),
        ("mean_loss", f"mean loss, {span}", True, run.loss, run, "mean loss"),
        ("negated_mean_margin", f"mean probability margin, {span}", True, -run.margin,
         run, "mean margin"),
        (f"el2n_epoch_{epoch}", f"EL2N, epoch {epoch}", True, early.el2n, early, "mean EL2N"),
        (f"squared_norm_epoch_{epoch}", f"squared gradient norm, epoch {epoch}", False,
         early.sqnorm[0], early, "mean gradient norm"),
        (GRAND_AT_INITIALISATION, f"GraNd at initialisation, {seeds}", False, untrained.grad_norm,
         untrained, "mean gradient norm"),
    )  # fmt: skip
    return [
        Ranked(name, title, forward_only, values, table.report(flipped).rows[row])
        for name, title, forward_only, values, table, row in scores
    ]
