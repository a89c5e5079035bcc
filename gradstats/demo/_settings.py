"""The numbers of a run of the demo."""

from __future__ import annotations

from dataclasses import dataclass

from gradstats.errors import GradStatsError


class DemoError(GradStatsError):
    """The demo cannot run as asked."""


@dataclass(frozen=True)
class Settings:
    """The numbers of one run.

    Attributes:
        seed: of the split, the flips, the initialisations and the order of training.
        held_out: fraction of the digits kept out of training, with clean labels.
        noise_rate: fraction of the training labels that are flipped.
        epochs: length of training.
        checkpoints: epochs after which the weights are kept, ascending, from 1 to ``epochs``.
        early_epoch: the epoch whose checkpoint is also scored on its own.
        initialisations: number of random initialisations that GraNd is averaged over.
        learning_rate: of SGD; a tenth of it after 50% of the epochs, a hundredth after 80%.
        momentum: of SGD.
        batch_size: of training.
    """

    seed: int = 0
    held_out: float = 0.22
    noise_rate: float = 0.1
    epochs: int = 100
    checkpoints: tuple[int, ...] = (1, 2, 5, 10, 20, 50, 100)
    early_epoch: int = 10
    initialisations: int = 5
    learning_rate: float = 0.05
    momentum: float = 0.9
    batch_size: int = 128

    def learning_rate_at(self, epoch: int) -> float:
        """Return the step size in use during an epoch, counted from 1."""
        steps = (epoch > 0.5 * self.epochs) + (epoch > 0.8 * self.epochs)
        return self.learning_rate * 0.1**steps
