"""How suspicious is a label? Self-influence and its cheaper rivals; a higher score is worse.

TracIn: Pruthi et al., arXiv 2002.08484. GraNd and EL2N: Paul et al., arXiv 2107.07075.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gradstats.demo._measurement import Measurement
from gradstats.demo._training import Checkpoint
from gradstats.scoring._confidence import el2n, negated_margin

SELF_INFLUENCE = "self_influence"
GRAND_AT_INITIALISATION = "grand_at_initialisation"


@dataclass(frozen=True)
class Score:
    """One ranking of the training examples.

    Attributes:
        name: the column in the CSV file.
        title: for people.
        forward_only: True where no gradient is needed.
        values: (N,) larger is more suspicious.
    """

    name: str
    title: str
    forward_only: bool
    values: np.ndarray


def self_influence(learning_rates: np.ndarray, sqnorms: np.ndarray) -> np.ndarray:
    """Return Σ_c η_c ‖∇ℓ_i(w_c)‖² (N,) from step sizes (C,) and squared norms (C, N)."""
    return learning_rates @ sqnorms


def all_scores(
    checkpoints: Sequence[Checkpoint],
    measurements: Sequence[Measurement],
    at_initialisation: Sequence[Measurement],
    given: np.ndarray,
    early_epoch: int,
) -> list[Score]:
    """Return every score of the demo.

    Args:
        checkpoints: of one training run.
        measurements: at each checkpoint.
        at_initialisation: at each of some random initialisations.
        given: (N,) labels.
        early_epoch: the checkpoint that is scored on its own.

    Returns:
        list[Score]: always in this order.
    """
    learning_rates = np.array([checkpoint.learning_rate for checkpoint in checkpoints])
    sqnorms = np.stack([measurement.sqnorm for measurement in measurements])
    losses = np.stack([measurement.loss for measurement in measurements])
    probability = np.stack([measurement.probability for measurement in measurements])
    initial_norms = np.sqrt([measurement.sqnorm for measurement in at_initialisation])
    early = [checkpoint.epoch for checkpoint in checkpoints].index(early_epoch)
    span = f"{len(checkpoints)} checkpoints"
    return [
        Score(
            SELF_INFLUENCE,
            f"self-influence (TracIn), {span}",
            False,
            self_influence(learning_rates, sqnorms),
        ),
        Score("mean_loss", f"mean loss, {span}", True, losses.mean(0)),
        Score(
            "negated_mean_margin",
            f"mean probability margin, {span}",
            True,
            negated_margin(probability, given).mean(0),
        ),
        Score(
            f"el2n_epoch_{early_epoch}",
            f"EL2N, epoch {early_epoch}",
            True,
            el2n(probability[early], given),
        ),
        Score(
            f"squared_norm_epoch_{early_epoch}",
            f"squared gradient norm, epoch {early_epoch}",
            False,
            sqnorms[early],
        ),
        Score(
            GRAND_AT_INITIALISATION,
            f"GraNd at initialisation, {len(at_initialisation)} seeds",
            False,
            initial_norms.mean(0),
        ),
    ]
