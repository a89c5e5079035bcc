"""The two pictures: the most suspicious digits, and how fast each score finds flipped labels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from gradstats.demo._experiment import SELF_INFLUENCE, Outcome
from gradstats.scoring._pictures import BAD_COLOUR, GOOD_COLOUR, NEUTRAL_COLOUR, STYLES

ROWS, COLUMNS = 4, 6


def draw_suspicious_digits(path: Path, outcome: Outcome) -> None:
    """Write a PNG with the training digits of largest self-influence.

    Args:
        path: the file to write.
        outcome: of a run.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    values = next(ranked.values for ranked in outcome.scores if ranked.name == SELF_INFLUENCE)
    top = np.argsort(-values, kind="stable")[: ROWS * COLUMNS]
    flipped = outcome.data.flipped
    figure = Figure(figsize=(9.6, 8.2), dpi=120)
    grid = figure.subplots(ROWS, COLUMNS)
    for axes, index in zip(grid.flat, top, strict=True):
        axes.imshow(outcome.data.images[index, 0].numpy(), cmap="gray_r", vmin=0, vmax=1)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.set_title(
            f"given {outcome.data.given[index]}, model {outcome.predicted[index]}", fontsize=11
        )
        for side in axes.spines.values():
            side.set_color(BAD_COLOUR if flipped[index] else GOOD_COLOUR)
            side.set_linewidth(4)
    found = int(flipped[top].sum())
    figure.suptitle(
        f"The {len(top)} training digits with the largest self-influence", fontsize=16, y=0.98
    )
    figure.text(
        0.5,
        0.925,
        "given: the label trained on.  model: the class of highest probability after epoch "
        f"{outcome.settings.early_epoch}.",
        ha="center",
        fontsize=11,
    )
    figure.legend(
        handles=[
            Patch(color=BAD_COLOUR, label=f"the given label was flipped ({found})"),
            Patch(color=GOOD_COLOUR, label=f"the given label is original ({len(top) - found})"),
        ],
        loc="lower center",
        ncols=2,
        frameon=False,
        fontsize=12,
    )
    figure.subplots_adjust(left=0.03, right=0.97, top=0.86, bottom=0.07, hspace=0.28, wspace=0.12)
    figure.savefig(path)


def draw_curves(path: Path, outcome: Outcome) -> None:
    """Write a PNG with the ROC and the inspection curve of every score.

    Args:
        path: the file to write.
        outcome: of a run.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    figure = Figure(figsize=(12, 6.4), dpi=120)
    roc, inspection = figure.subplots(1, 2)
    roc_corner = roc.inset_axes((0.62, 0.1, 0.35, 0.29))
    inspection_corner = inspection.inset_axes((0.56, 0.4, 0.41, 0.42))
    rate = outcome.settings.noise_rate
    _draw_scores(outcome, (roc, roc_corner), "false_alarm_fraction")
    _draw_scores(outcome, (inspection, inspection_corner), "inspected_fraction")
    roc.set_title("ROC curve", fontsize=14)
    roc.set_xlabel("unflipped labels inspected (false positive rate)", fontsize=12)
    roc.set_xlim(0, 1)
    roc_corner.set_xlim(0, 0.05)
    roc_corner.set_ylim(0.8, 1.005)
    inspection.set_title("Inspection curve", fontsize=14)
    inspection.set_xlabel("training digits inspected, most suspicious first", fontsize=12)
    inspection.set_xlim(0, 3 * rate)
    inspection.axvline(rate, color=NEUTRAL_COLOUR, linewidth=1, zorder=0)
    inspection.text(1.04 * rate, 0.02, f"noise rate {rate:.0%}", color=NEUTRAL_COLOUR, fontsize=11)
    inspection_corner.set_xlim(0.8 * rate, 1.3 * rate)
    inspection_corner.set_ylim(0.8, 1.005)
    for axes in (roc, inspection):
        axes.set_ylabel("flipped labels found (true positive rate)", fontsize=12)
        axes.set_ylim(0, 1.02)
    for axes in (roc_corner, inspection_corner):
        axes.set_title("the corner, enlarged", fontsize=10)
    for axes in (roc, roc_corner, inspection, inspection_corner):
        axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        axes.grid(color="#E4E4E4", linewidth=0.8)
        axes.set_axisbelow(True)
    figure.legend(
        *roc.get_legend_handles_labels(), loc="lower center", ncols=2, frameon=False, fontsize=11
    )
    figure.subplots_adjust(left=0.07, right=0.98, top=0.93, bottom=0.255, wspace=0.2)
    figure.savefig(path)


def _draw_scores(outcome: Outcome, panels: tuple[Any, ...], horizontal: str) -> None:
    """Plot the fraction of flipped labels found against a fraction of Detection."""
    for ranked, style in zip(outcome.scores, STYLES, strict=True):
        for axes in panels:
            axes.plot(
                getattr(ranked.detection, horizontal),
                ranked.detection.found_fraction,
                label=f"{ranked.title}: AUROC {ranked.detection.auroc:.4f}",
                **{"linewidth": 1.7, "zorder": 3, **style},
            )
