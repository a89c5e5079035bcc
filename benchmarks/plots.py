"""The plots of ``benchmarks/README.md``, from ``benchmarks/results/*.csv``. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path

from benchmarks.harness import RESULTS, read_csv
from benchmarks.providers import PROVIDERS

# Colours that stay apart for those who see fewer of them (Okabe and Ito).
COLOURS = {
    "plain": "#000000", "norms": "#0072B2", "training": "#56B4E9", "vmap": "#D55E00",
    "vmap-chunks": "#E69F00", "expanded-weights": "#CC79A7", "opacus-ghost": "#009E73",
    "backpack": "#F0E442", "torchjd": "#999999",
}  # fmt: skip
OURS = ("norms", "training")


def write_all() -> list[Path]:
    """Write every plot that there are results for."""
    import matplotlib

    matplotlib.use("agg")
    return [path for path in (scaling(), crossover()) if path is not None]


def last_run(name: str) -> list[dict[str, str]]:
    """Return the rows of the machine that was measured last."""
    rows = read_csv(name)
    return [row for row in rows if row["machine"] == rows[-1]["machine"]] if rows else []


def scaling() -> Path | None:
    """Plot time and memory, as multiples of a plain step, over B, T and d."""
    from matplotlib import pyplot

    rows = last_run("scaling")
    if not rows:
        return None
    labels = {PROVIDERS[key].label: key for key in COLOURS}
    figure, axes = pyplot.subplots(2, 3, figsize=(10, 6), sharey="row")
    for column, axis in enumerate(("B", "T", "d")):
        along = {(int(row[axis]), row["variant"]): row for row in rows if row["axis"] == axis}
        sizes = sorted({size for size, _ in along})
        for line, measure in enumerate(("ratio", "peak_bytes")):
            panel = axes[line][column]
            for label, key in labels.items():
                points = [
                    (size, float(row[measure]) / (1 if line == 0 else float(base["peak_bytes"])))
                    for size in sizes
                    if (row := along.get((size, label))) and row["ratio"]
                    if (base := along[size, "plain"])
                ]
                if points:
                    style = {"linestyle": ":"} if key == "plain" else {"marker": "o"}
                    panel.plot(
                        *zip(*points, strict=True), color=COLOURS[key], label=PROVIDERS[key].title,
                        markersize=3,
                        linewidth=2.2 if key in OURS else 1.2, zorder=3 if key in OURS else 2,
                        **style,
                    )  # fmt: skip
            panel.set(xscale="log", yscale="log")
            panel.grid(alpha=0.3)
            if axis != "d":
                panel.set_xticks(sizes, [str(size) for size in sizes])
                panel.minorticks_off()
        axes[1][column].set_xlabel(
            {"B": "examples B", "T": "positions T", "d": "parameters d"}[axis]
        )
    axes[0][0].set_ylabel("time, of a plain step")
    axes[1][0].set_ylabel("peak memory, of a plain step")
    handles, names = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, names, loc="lower center", ncols=3, frameon=False, fontsize=9)
    figure.suptitle(f"Per-example norms over a plain step; {rows[-1]['machine']}", fontsize=10)
    figure.tight_layout(rect=(0, 0.1, 1, 1))
    return save(figure, "scaling")


def crossover() -> Path | None:
    """Plot the time of both forms over T, the chosen one marked."""
    from matplotlib import pyplot

    rows = last_run("crossover")
    if not rows:
        return None
    rows = [row for row in rows if row["commit"] == rows[-1]["commit"]]  # one run measures all
    questions = {"no": "norms alone", "yes": "with weight gradient"}
    widths = list(dict.fromkeys((int(row["p"]), int(row["q"])) for row in rows))
    figure, axes = pyplot.subplots(
        2, len(widths), figsize=(2.4 * len(widths), 5.2), sharex=True, squeeze=False
    )
    for across, (wanted, question) in zip(axes, questions.items(), strict=True):
        across[0].set_ylabel(f"{question}, ms")
        for panel, width in zip(across, widths, strict=True):
            line = sorted(
                (
                    row
                    for row in rows
                    if (int(row["p"]), int(row["q"])) == width and row["weight_gradient"] == wanted
                ),
                key=lambda row: int(row["positions"]),
            )
            for form, colour in (("gram", "#0072B2"), ("direct", "#D55E00")):
                times = [(int(row["positions"]), float(row[f"{form}_ms"])) for row in line]
                panel.plot(*zip(*times, strict=True), color=colour, label=form)
                dots = [at for at, row in zip(times, line, strict=True) if row["chosen"] == form]
                if dots:
                    panel.plot(*zip(*dots, strict=True), "o", color=colour, markersize=5)
            panel.set(xscale="log", yscale="log")
            ticks = [int(row["positions"]) for row in line][::2]
            panel.set_xticks(ticks, [str(tick) for tick in ticks])
            panel.minorticks_off()
            panel.grid(alpha=0.3)
    for panel, (p, q) in zip(axes[0], widths, strict=True):
        panel.set_title(f"{p} × {q}", fontsize=9)
    for panel in axes[1]:
        panel.set_xlabel("positions T")
    axes[0][0].legend(frameon=False, fontsize=8)
    figure.suptitle(
        f"Squared norms of one layer, 16 examples; dots: the chosen form; {rows[-1]['machine']}",
        fontsize=9,
    )
    figure.tight_layout()
    return save(figure, "crossover")


def save(figure, name: str) -> Path:
    from matplotlib import pyplot

    path = RESULTS / f"{name}.png"
    # Without the date and version that matplotlib writes, the same results give the same file.
    figure.savefig(path, dpi=100, metadata={"Software": None})
    pyplot.close(figure)
    return path
