"""Figures of scores: the examples themselves where they are images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from gradstats._requirements import require
from gradstats.capture.operations._nested import tensors_in
from gradstats.scoring._loaders import Data
from gradstats.statistics._division import Division

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from gradstats.scoring._rankings import Ranking
    from gradstats.scoring._table import DetectionReport

# Okabe and Ito's colours, which can be told apart with any colour vision.
BAD_COLOUR, GOOD_COLOUR, NEUTRAL_COLOUR = "#D55E00", "#0072B2", "#606060"
SMALLEST_IMAGE = 4
# Styles of curves that may cover each other, beginning with the curve to compare with the others.
STYLES: tuple[dict[str, Any], ...] = (
    {"color": "#000000", "linewidth": 2.6, "zorder": 2},
    {"color": "#0072B2", "linestyle": (0, (5, 2))},
    {"color": "#D55E00", "linestyle": "-"},
    {"color": "#009E73", "linestyle": (0, (1, 1))},
    {"color": "#CC79A7", "linestyle": (0, (4, 1, 1, 1))},
    {"color": "#8C8C8C", "linestyle": "-"},
)


def draw_self_influence(
    scores: np.ndarray, bad: np.ndarray | None, report: DetectionReport | None
) -> Figure:
    """Return the sorted scores and, with a report, the share of bad examples found by each score.

    Args:
        scores: (N,) self-influence.
        bad: (N,) bool, the known bad examples; None if none are known.
        report: how well each score finds them.
    """
    with require("plot"):
        from matplotlib.figure import Figure
    figure = Figure(figsize=(6 if report is None else 12, 4.5), layout="constrained")
    panels = figure.subplots(1, 1 if report is None else 2, squeeze=False)[0]
    order = np.argsort(-scores, kind="stable")
    ranks = np.arange(1, len(scores) + 1)
    groups: Sequence[tuple[np.ndarray, str, str]] = (
        [(np.ones(len(scores), bool), NEUTRAL_COLOUR, "examples")]
        if bad is None
        else [(~bad[order], GOOD_COLOUR, "other examples"), (bad[order], BAD_COLOUR, "known bad")]
    )
    for chosen, colour, label in groups:
        panels[0].plot(
            ranks[chosen], scores[order][chosen], ".", color=colour, label=label, markersize=4
        )
    if scores.min() > 0:
        panels[0].set_yscale("log")
    panels[0].set_xlabel("rank")
    panels[0].set_ylabel("self-influence")
    if bad is not None:
        panels[0].legend(frameon=False)
    if report is not None:
        _draw_found(panels[1], report)
    return figure


def _draw_found(axes: Axes, report: DetectionReport) -> None:
    """Plot the share of bad examples that each score finds, zoomed to where the scores differ."""
    from matplotlib.ticker import PercentFormatter

    axes.set_xlabel("examples inspected, the most suspicious first")
    axes.set_ylabel("known bad examples found")
    if not report.rows:
        axes.text(
            0.5, 0.5, "no score is finite for all examples", ha="center", transform=axes.transAxes
        )
        return
    for (name, detection), style in zip(report.rows.items(), STYLES, strict=False):
        axes.plot(
            detection.inspected_fraction,
            detection.found_fraction,
            label=f"{name}: AUROC {detection.auroc:.4f}",
            **{"linewidth": 1.7, "zorder": 3, **style},
        )
    rate = report.bad / report.examples
    axes.axvline(rate, color=NEUTRAL_COLOUR, linewidth=1, zorder=1)
    axes.text(1.04 * rate, 0.02, f"noise rate {100 * rate:.3g}%", color=NEUTRAL_COLOUR)
    # Up to where the best score has found all: beyond, good scores lie on each other.
    needed = min(
        row.inspected_fraction[row.found_fraction.searchsorted(1)] for row in report.rows.values()
    )
    axes.set_xlim(0, min(1, max(3 * rate, needed)))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(PercentFormatter(1))
    axes.grid(color="#E4E4E4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.legend(edgecolor="none", loc="center right")


def draw_query(
    name: Any,
    rankings: tuple[Ranking, Ranking],
    data: tuple[Data, Data] | None,
    query: int,
    form: str,
) -> Figure:
    """Return a query with its proponents and opponents, as pictures or as bars.

    Args:
        name: the query's id.
        rankings: proponents and opponents.
        data: the two sides; None if only scores are known.
        query: the query's position.
        form: "raw" or "cosine", the form of the scores.
    """
    with require("plot"):
        from matplotlib.figure import Figure
    if data is None or (asked := _picture(data[1], query)) is None:
        return _draw_bars(f"influence on query {name} ({form})", rankings)
    width = max(len(ranking) for ranking in rankings)
    figure = Figure(figsize=(1.6 * (width + 1), 4.2), layout="constrained")
    grid = figure.subplots(2, width + 1, squeeze=False)
    for axes in grid.flat:
        axes.axis("off")
    _show(grid[0, 0], asked, f"query {name}")
    titles = ("proponents", "opponents")
    for line, ranking, title in zip(grid, rankings, titles, strict=True):
        for place, (position, identity, score) in enumerate(
            zip(ranking.positions, ranking.ids, ranking.scores, strict=True)
        ):
            head = f"{title} ({form})\n" if place == 0 else "\n"
            found = _picture(data[0], int(position))
            if found is not None:
                _show(line[place + 1], found, f"{head}{identity}: {score:.3g}")
    return figure


def _draw_bars(label: str, rankings: tuple[Ranking, Ranking]) -> Figure:
    from matplotlib.figure import Figure

    proponents, opponents = rankings
    names = [str(each) for each in (*proponents.ids, *opponents.ids[::-1])]
    scores = [*proponents.scores, *opponents.scores[::-1]]
    figure = Figure(figsize=(6, 0.3 * len(names) + 1.2), layout="constrained")
    axes = figure.subplots()
    places = np.arange(len(names))
    axes.barh(places, scores, color=[GOOD_COLOUR if s > 0 else BAD_COLOUR for s in scores])
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    axes.set_xlabel(label)
    axes.set_ylabel("training example")
    return figure


def _picture(data: Data, position: int) -> tuple[np.ndarray, str] | None:
    """Return an example as an image with its label; None if it is not an image."""
    if data.layout.packed:
        return None
    batch, place = data.example(position)
    division = Division(data.layout.count(batch), data.layout.batch_dim)
    axes = [(each, division.axis(each)) for each in tensors_in(batch)]
    slices = [each.select(axis, place) for each, axis in axes if axis is not None]
    image = slices[0].detach().cpu() if slices else None
    if image is None or not _is_image(image):
        return None
    pixels = image.double().numpy()
    if pixels.ndim == 3:
        pixels = np.moveaxis(pixels, 0, -1)
    low, high = pixels.min(), pixels.max()
    pixels = (pixels - low) / (high - low) if high > low else np.zeros_like(pixels)
    label = ""
    if len(slices) > 1 and slices[1].dim() == 0 and not slices[1].is_floating_point():
        label = f"label {slices[1].item()}"
    return pixels.squeeze(), label


def _is_image(tensor: Tensor) -> bool:
    if tensor.dim() not in (2, 3) or min(tensor.shape[-2:]) < SMALLEST_IMAGE:
        return False
    return tensor.dim() == 2 or tensor.shape[0] in (1, 3)


def _show(axes: Any, picture: tuple[np.ndarray, str], title: str) -> None:
    pixels, label = picture
    axes.imshow(pixels, cmap="gray", vmin=0, vmax=1)
    axes.set_title(f"{title}\n{label}" if label else title, fontsize=8)
