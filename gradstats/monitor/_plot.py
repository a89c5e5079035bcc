"""A figure of a monitored run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from gradstats._requirements import require
from gradstats.errors import TrackingError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from gradstats.monitor._monitor import Monitor

# Okabe and Ito's colours, which can be told apart with any colour vision.
BLUE, ORANGE, BLACK = "#0072B2", "#D55E00", "#000000"
# How many ids label a spike.
LABELLED = 3

# Norms of examples are shown down to this share of the least training gradient norm.
SHOWN_BELOW = 1e-3


def plot(monitor: Monitor) -> Figure:
    """Return a figure of a run: norms with quantile bands, noise scale with its band, spikes.

    Top: the median of the per-example norms with a band from the 5th to the 95th percentile, their
    maximum, the norm of the training gradient, and the spikes with the ids of their largest
    examples. Bottom: the noise scale B_simple ± two standard errors, with gaps where it is
    undefined, and the number of examples per step.

    Args:
        monitor: after some measured steps.

    Returns:
        a matplotlib figure: ``figure.savefig("run.png")``.

    Raises:
        MissingPackageError: without matplotlib.
        TrackingError: ``monitor`` is something else, or has measured nothing yet.
    """
    if not hasattr(monitor, "history"):
        raise TrackingError(
            f"monitor is {type(monitor).__name__}, expected a gs.Monitor. A trainer's callback "
            "keeps it as callback.monitor, once training has started."
        )
    with require("plot"):
        from matplotlib.figure import Figure
        from matplotlib.ticker import LogFormatter, MaxNLocator
    history = {name: np.array(values) for name, values in monitor.history.items()}
    if not history:
        raise TrackingError(
            "the monitor has measured no step yet, so there is nothing to plot. Expected at least "
            "one forward and backward inside monitor.step(...)."
        )
    figure = Figure(figsize=(9, 7), dpi=120, layout="constrained")
    norms, noise = figure.subplots(2, 1, sharex=True)
    steps = history["step"]

    class Plain(LogFormatter):
        """Labels the ticks that matplotlib would label, but as 0.6, not 6e-01."""

        def __call__(self, x, pos=None):
            return f"{x:g}" if super().__call__(x, pos) else ""

    def draw(axes: Any, name: str, **style: Any) -> None:
        axes.plot(steps, history[name], **_marked(history[name]), **style)

    low, high = history["example_grad_norm/p05"], history["example_grad_norm/p95"]
    norms.fill_between(steps, low, high, color=BLUE, alpha=0.25, label="5 % to 95 % of examples")
    draw(norms, "example_grad_norm/p50", color=BLUE, label="median example")
    draw(norms, "example_grad_norm/max", color=BLUE, lw=0.8, ls=":", mfc="none", label="largest")
    draw(norms, "grad_norm", color=BLACK, label="training gradient")
    labelled: set[int] = set()
    for spike in monitor.spikes:
        if spike.step in labelled or not np.isfinite(spike.value):
            continue
        labelled.add(spike.step)
        top = spike.examples[0].norm if spike.examples else spike.value
        norms.plot([spike.step], [top], marker="v", color=ORANGE, ls="none")
        ids = [str(e.id if e.id is not None else e.position) for e in spike.examples[:LABELLED]]
        norms.annotate(
            ", ".join(ids), (spike.step, top), xytext=(4, 4), textcoords="offset points",
            fontsize=8, color=ORANGE,
        )  # fmt: skip
    if labelled:
        norms.plot([], [], marker="v", color=ORANGE, ls="none", label="spike, largest examples")
    if any((line.get_ydata() > 0).any() for line in norms.get_lines()):
        norms.set_yscale("log")
        # Over less than a decade, ticks between powers of ten are labelled too: 2, not 2 × 10⁰.
        norms.yaxis.set_major_formatter(Plain())
        norms.yaxis.set_minor_formatter(Plain(minor_thresholds=(1.5, 0.5)))
    norms.set_ylabel("gradient norm")
    norms.margins(y=0.1)  # room for the ids above spikes, which are the highest points
    # Norms of examples that are fitted to the last digit must not flatten all other lines.
    gradient = history["grad_norm"]
    least = SHOWN_BELOW * np.min(gradient[gradient > 0], initial=np.inf)
    if norms.get_ylim()[0] < least < np.inf:
        drawn = np.concatenate([line.get_ydata() for line in norms.get_lines()])
        highest = np.max(drawn[np.isfinite(drawn)], initial=least)
        norms.set_ylim(least, highest * (highest / least) ** 0.1)

    value, spread = history["gns/b_simple"], 2 * history["gns/b_simple_se"]
    noise.fill_between(
        steps, value - spread, value + spread, color=BLUE, alpha=0.25, label="± 2 standard errors"
    )
    draw(noise, "gns/b_simple", color=BLUE, label="noise scale $B_{simple}$")
    # Estimates with large errors must not set the scale, nor large errors flatten the line.
    known = np.isfinite(value + spread)
    if not known.any():
        # There is no standard error before the second step.
        known, spread = np.isfinite(value), np.zeros(len(value))
    if known.any():
        examples = history["gradient_diversity/batch_bound"] / history["gradient_diversity"]
        usual = np.nanmedian(examples)
        label = f"a step: {usual:,.0f} examples"
        noise.plot(steps, examples, color=BLACK, ls="--", label=label, **_marked(examples))
        line, band = (np.percentile(each[known], 90) for each in (value, value + spread))
        noise.set_ylim(0, 1.2 * min(band, 3 * line))
        if np.isnan(value).any():
            noise.plot([], [], " ", label="gaps: undefined")
    else:
        noise.set_yticks([])
        undefined = "undefined so far: the average of gns/g2 is not positive"
        noise.text(0.5, 0.5, undefined, ha="center", transform=noise.transAxes)
    noise.set_ylabel("number of examples")
    noise.set_xlabel("optimizer step")
    noise.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    for axes in (norms, noise):
        # Above the axes: inside, it would cover a spike or a line somewhere.
        axes.legend(
            fontsize=8, ncols=5, loc="lower left", bbox_to_anchor=(0, 1), frameon=False,
            borderaxespad=0, columnspacing=1,
        )  # fmt: skip
        axes.grid(color="#E4E4E4", linewidth=0.8)
        axes.set_axisbelow(True)
    return figure


def _marked(values: np.ndarray) -> dict[str, Any]:
    """Return a line style that marks single values between gaps, which no line would show."""
    finite = np.pad(np.isfinite(values), 1)
    alone = np.flatnonzero(finite[1:-1] & ~finite[:-2] & ~finite[2:])
    return {"marker": ".", "markevery": alone.tolist()} if len(alone) else {}
