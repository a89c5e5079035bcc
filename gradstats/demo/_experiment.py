"""The experiment: flip labels, train, measure at every checkpoint, score."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from gradstats.demo._data import NoisyDigits, load_noisy_digits
from gradstats.demo._measurement import Measurement, measure
from gradstats.demo._scores import Score, all_scores
from gradstats.demo._settings import Settings
from gradstats.demo._training import Checkpoint, digit_network, train
from gradstats.scoring._metrics import Detection, detect


@dataclass(frozen=True)
class Ranked:
    """A score and how well it does."""

    score: Score
    detection: Detection


@dataclass(frozen=True)
class Outcome:
    """Everything one run produced.

    Attributes:
        settings: what was asked for.
        data: the digits and their labels.
        checkpoints: of the training run.
        predicted: (N,) class of highest probability, averaged over the checkpoints.
        scores: every score and how well it does, always in the same order.
        held_out_accuracy: of the last checkpoint.
        memorised: fraction of the flipped labels that the last checkpoint predicts as given.
    """

    settings: Settings
    data: NoisyDigits
    checkpoints: list[Checkpoint]
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

    The order of sums, and so the result, then depends on the seed and not on the number of cores,
    and operations this small gain nothing from more.
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
    checkpoints = train(model, data.images, torch.from_numpy(data.given), settings, random)
    measurements, at_initialisation = _measure_all(model, data, checkpoints, model_seeds)
    scores = all_scores(
        checkpoints, measurements, at_initialisation, data.given, settings.early_epoch
    )
    last = measurements[-1].probability.argmax(1)
    with torch.no_grad():
        held_out = model(data.held_out_images).argmax(1).numpy()
    return Outcome(
        settings=settings,
        data=data,
        checkpoints=checkpoints,
        predicted=np.mean([each.probability for each in measurements], axis=0).argmax(1),
        scores=[Ranked(score, detect(score.values, data.flipped)) for score in scores],
        held_out_accuracy=float((held_out == data.held_out_labels).mean()),
        memorised=float((last == data.given)[data.flipped].mean()),
    )


def _measure_all(
    model: nn.Module,
    data: NoisyDigits,
    checkpoints: Sequence[Checkpoint],
    model_seeds: Sequence[int],
) -> tuple[list[Measurement], list[Measurement]]:
    """Measure the training set at every checkpoint and at every initialisation."""
    given = torch.from_numpy(data.given)
    measurements, at_initialisation = [], []
    passes = len(checkpoints) + len(model_seeds)
    with tqdm(total=passes, desc="measuring gradient norms", unit="pass") as progress:
        for checkpoint in checkpoints:
            model.load_state_dict(checkpoint.state)
            measurements.append(measure(model, data.images, given))
            progress.update()
        for seed in model_seeds:
            at_initialisation.append(measure(digit_network(seed), data.images, given))
            progress.update()
    return measurements, at_initialisation
