"""The printed report, and the scores as CSV."""

from __future__ import annotations

import csv
import textwrap
from collections.abc import Sequence
from pathlib import Path

from gradstats._tables import aligned
from gradstats.demo._experiment import (
    GRAND_AT_INITIALISATION,
    SELF_INFLUENCE,
    Outcome,
    Ranked,
)
from gradstats.scoring._metrics import chance_halfwidth

# AUROCs that differ by no more than this are called close.
CLOSE = 0.01
WIDTH = 88


def report(outcome: Outcome) -> str:
    """Return the printed report of a run."""
    data, epochs = outcome.data, outcome.settings.checkpoints[-1]
    introduction = (
        f"{len(data.ids)} training digits, {data.flipped.sum()} of them with a flipped label "
        f"(seed {outcome.settings.seed}). After {epochs} epochs the network "
        f"has memorised {outcome.memorised:.0%} of the flipped labels, and is right on "
        f"{outcome.held_out_accuracy:.1%} of {len(data.held_out_labels)} held-out digits."
    )
    conclusion = verdict(outcome.ranking)
    sanity = chance(outcome.ranking, chance_halfwidth(data.flipped))
    paragraphs = [textwrap.fill(text, WIDTH) for text in (introduction, conclusion, sanity)]
    return "\n\n".join([paragraphs[0], table(outcome.ranking), *paragraphs[1:]])


def table(ranking: Sequence[Ranked]) -> str:
    """Return an aligned table with one line per score, in the order given."""
    header = ("score", "needs", "AUROC", "recall at noise rate")
    rows = [
        (
            ranked.title,
            "forward passes" if ranked.forward_only else "gradient norms",
            f"{ranked.detection.auroc:.4f}",
            f"{ranked.detection.recall_at_noise_rate:.3f}",
        )
        for ranked in ranking
    ]
    rule = ["-" * max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return "\n".join(aligned([header, rule, *rows], left=2))


def verdict(ranking: Sequence[Ranked]) -> str:
    """Return one sentence that compares self-influence with the scores that need no gradient."""
    own = _find(ranking, SELF_INFLUENCE)
    baselines = [ranked for ranked in ranking if ranked.forward_only]
    best = max(baselines, key=lambda ranked: ranked.detection.auroc)
    ahead = sum(ranked.detection.auroc >= own.detection.auroc for ranked in baselines)
    if ahead == 0:
        return (
            f"Self-influence ({_numbers(own)}) is ahead of all {len(baselines)} cheap baselines; "
            f"the best of them is {best.title} ({_numbers(best)})."
        )
    gap = best.detection.auroc - own.detection.auroc
    distance = "close to but not better than" if gap <= CLOSE else "behind"
    which = "the cheap baselines" if ahead == len(baselines) else "the best cheap baseline"
    return (
        f"Self-influence ({_numbers(own)}) is {distance} {which}: {best.title} gets "
        f"{_numbers(best)} from forward passes alone."
    )


def chance(ranking: Sequence[Ranked], halfwidth: float) -> str:
    """Return one sentence on whether GraNd at initialisation differs from a random ranking.

    Args:
        ranking: the scores.
        halfwidth: AUROCs this close to 0.5 are what random rankings get.
    """
    auroc = _find(ranking, GRAND_AT_INITIALISATION).detection.auroc
    if abs(auroc - 0.5) <= halfwidth:
        relation = "no better than chance"
    else:
        relation = "above chance" if auroc > 0.5 else "below chance"
    return (
        f"GraNd at initialisation (AUROC {auroc:.4f}) is {relation}: random rankings of this many "
        f"labels get 0.500 +- {halfwidth:.3f}."
    )


def write_csv(path: Path, outcome: Outcome) -> None:
    """Write one line for each training digit: labels, whether flipped, prediction, every score."""
    data = outcome.data
    header = ["id", "given_label", "true_label", "flipped", "predicted_label"]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(header + [ranked.name for ranked in outcome.scores])
        columns = [data.ids, data.given, data.true, data.flipped.astype(int), outcome.predicted]
        columns += [ranked.values for ranked in outcome.scores]
        writer.writerows(zip(*(column.tolist() for column in columns), strict=True))


def _find(ranking: Sequence[Ranked], name: str) -> Ranked:
    return next(ranked for ranked in ranking if ranked.name == name)


def _numbers(ranked: Ranked) -> str:
    detection = ranked.detection
    return f"AUROC {detection.auroc:.4f}, recall {detection.recall_at_noise_rate:.3f}"
