"""Write the tables of the documentation, and the plots, from ``benchmarks/results/*.csv``.

    python -m benchmarks.report

Only what stands between ``<!-- table: NAME -->`` and ``<!-- end -->`` is replaced. Of several runs
of the same case on the same machine the last one counts.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import plots
from benchmarks.harness import read_csv
from benchmarks.providers import PROVIDERS, RECORDED, REDUCED_LAUNCHES
from benchmarks.tables import Row, by_line, by_machine, grouped, latest, span, table

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "gradstats" / "docs"
PAGES = (ROOT / "README.md", *sorted(DOCS.glob("*.md")), ROOT / "benchmarks" / "README.md")
REGION = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

NORMS, TRAINING = PROVIDERS["norms"].label, PROVIDERS["training"].label
# Of the kernels' tables, which hold every case, what is shown.
SHOWN_LAYERS = (
    "gpt2_projection", "gpt2_mlp_up", "llama_7b_projection", "vit_b_mlp", "bert_short", "unaligned",
    "mlp_wide", "resnet50_stem", "resnet50_stage2", "resnet50_stage4", "resnext50_stage2",
    "convnext_t_stage1",
    "gpt2_layer_norm", "llama_7b_rms_norm", "resnet50_group_norm", "gpt2_bias", "gpt2_embedding",
)  # fmt: skip
SHOWN_OPERATIONS = (
    "rank_one", "gram", "direct", "weight_gradient", "norms", "backward", "bias", "pairwise",
    "pairwise_gram",
)  # fmt: skip
# The workloads that have bars; the others stand in the table of all libraries.
FIRST = "MLP 784-2048-2048-10, B=", "CNN of the tutorial", "GPT 4×256, T=128", "GPT-2 small, T=1024"
TITLES = {each.label: each.title for each in PROVIDERS.values()}
# What says of a step's timing which case it is of, beside the provider.
CASE = ("machine", "dtype", "float32_products", "workload")
# Ours in other forms than those that are compared with other libraries.
OTHER_FORMS = tuple(each.label for each in PROVIDERS.values() if each.form)


def steps() -> list[Row]:
    """Return the last step timing of each provider on each workload."""
    rows = read_csv("step_overhead")
    for row in rows:
        # Columns that older rows lack.
        row["dtype"] = row.get("dtype") or "float32"
        row["float32_products"] = row.get("float32_products") or "ieee"
    return latest(rows, *CASE, "variant")


def measured_with(name: str) -> list[Row]:
    """Return the step timings of workloads, on machines, where a provider was measured too."""
    cases = grouped(steps(), *CASE).values()
    label = PROVIDERS[name].label
    return [row for rows in cases if any(row["variant"] == label for row in rows) for row in rows]


def ratio(row: Row) -> str:
    if not row.get("ratio"):
        return short(row.get("note", "")) or "–"
    return f"{float(row['ratio']):.2f} [{float(row['low']):.2f}, {float(row['high']):.2f}]"


def memory(row: Row, plain: Row) -> str:
    if not row.get("peak_bytes") or not plain.get("peak_bytes"):
        return "–"
    return f"{int(row['peak_bytes']) / int(plain['peak_bytes']):.2f}"


def step_table() -> str:
    """Return what norms cost, alone and beside training, and the fastest of all other ways to them.

    For the workloads that have bars, on machines where other ways were timed.
    """

    def cells(named: dict[str, Row]) -> list[str]:
        found: list[str] = []
        for variant in (NORMS, TRAINING):
            row = named.get(variant, {})
            found += [ratio(row), memory(row, named["plain"])]
        others = [row for name, row in named.items() if name not in variants and row["ratio"]]
        best = min(others, key=lambda row: float(row["ratio"]), default=None)
        if best is None:
            return [*found, "–", "–"]
        return [*found, f"{TITLES[best['variant']]}: {ratio(best)}", memory(best, named["plain"])]

    variants = ("plain", NORMS, TRAINING)
    rows = [row for row in steps() if row["variant"] not in OTHER_FORMS]
    rows = [row for row in rows if row["workload"].startswith(FIRST)]
    compared = {row["machine"] for row in rows if row["variant"] not in variants}
    header = ["model", "norms alone", "memory", "norms beside training", "memory"]
    header += ["fastest other way", "memory"]
    return by_line([row for row in rows if row["machine"] in compared], header, cells)


def recorded_table() -> str:
    """Return steps as CUDA graphs beside eager ones, where both were measured."""
    plain, norms, training = (PROVIDERS[name].label for name in RECORDED)

    def cells(named: dict[str, Row]) -> list[str]:
        least = float(named[plain]["milliseconds"])
        own = [float(named[each]["milliseconds"]) / least for each in (norms, training)]
        return [f"{least:.2f} ms", *(f"{each:.2f}" for each in own)]

    header = ["plain step as a graph", "norms as a graph", "both as a graph"]
    return beside_eager(RECORDED, header, cells)


def reduced_table() -> str:
    """Return compiled steps with CUDA graphs inside beside eager ones, where both were measured."""
    labels = [PROVIDERS[name].label for name in REDUCED_LAUNCHES]

    def cells(named: dict[str, Row]) -> list[str]:
        return [f"{float(named[each]['ratio']):.2f}" for each in labels]

    return beside_eager(REDUCED_LAUNCHES, ["plain, compiled", "norms", "both"], cells)


def beside_eager(
    names: Sequence[str], header: list[str], cells: Callable[[dict[str, Row]], list[str]]
) -> str:
    """Return a table of steps in another form beside eager ones, where both were measured.

    Args:
        names: keys of ``PROVIDERS``, all of which a row needs.
        header: of the columns behind those of eager steps.
        cells: a workload's rows by variant → what stands in these columns.
    """
    wanted = ("plain", NORMS, TRAINING, *(PROVIDERS[name].label for name in names))
    rows = [row for row in measured_with(names[-1]) if row["variant"] in wanted]
    cases = grouped((row for row in rows if row["milliseconds"]), *CASE).values()

    def both(named: dict[str, Row]) -> list[str]:
        own = [f"{float(named[each]['ratio']):.2f}" for each in (NORMS, TRAINING)]
        return [f"{float(named['plain']['milliseconds']):.1f} ms", *own, *cells(named)]

    whole = [row for case in cases if len(case) == len(wanted) for row in case]
    eager = ["eager plain step", "norms", "norms and gradients"]
    return by_line(whole, ["model", *eager, *header], both)


def short(note: str) -> str:
    """Return a note cut to a cell: the kind of an error without what it says."""
    for reason, cell in (("not run: would hold ", "holds "), ("not run: took longer than ", "> ")):
        if note.startswith(reason):
            return cell + note.removeprefix(reason)
    return note.partition(":")[0]


def peer_table() -> str:
    """Return every provider on every workload, as multiples of the plain step in time, memory."""
    rows = measured_with("vmap")

    def make(rows: list[Row]) -> str:
        labels = [row["variant"] for row in latest(rows, "variant") if row["variant"] != "plain"]
        order = [each.label for each in PROVIDERS.values() if each.label in labels]
        body = []
        for (workload,), group in grouped(rows, "workload").items():
            named = {row["variant"]: row for row in group}
            timed = [row for row in group if row["ratio"] and row["variant"] != "plain"]
            best = min((float(row["ratio"]) for row in timed), default=None)
            cells = [workload]
            for label in order:
                row = named.get(label)
                if row is None:
                    cells.append("–")
                elif not row["ratio"]:
                    cells.append(short(row["note"]))
                else:
                    time = f"{float(row['ratio']):.2f}"
                    time = f"**{time}**" if float(row["ratio"]) == best else time
                    cells.append(f"{time}, {memory(row, named['plain'])}")
            body.append(cells)
        return table(["model", *(TITLES[label] for label in order)], body)

    return by_machine([row for row in rows if row["variant"] not in OTHER_FORMS], make)


def tutorial_table() -> str:
    """Return the comparison of PyTorch's per-sample-gradients tutorial, with more rows."""
    rows = [row for row in measured_with("loop") if row["workload"].startswith("CNN of the")]

    def make(rows: list[Row]) -> str:
        named = {row["variant"]: row for row in rows}
        loop = float(named[PROVIDERS["loop"].label]["milliseconds"])
        body = [
            [
                TITLES[label],
                f"{float(row['milliseconds']):.1f} ms",
                f"{loop / float(row['milliseconds']):.1f}×",
                memory(row, named["plain"]),
            ]
            for label in (each.label for each in PROVIDERS.values())
            if (row := named.get(label)) and row["milliseconds"]
        ]
        return table(["B = 64", "a step", "faster than the loop", "memory, of a plain step"], body)

    return by_machine(rows, make)


def operation_table() -> str:
    """Return the microseconds that following one operation costs."""
    rows = latest(read_csv("op_overhead"), "machine", "operation", "variant")

    def cells(named: dict[str, Row]) -> list[str]:
        times = [
            f"{row['microseconds']} [{row['low']}, {row['high']}]"
            for row in (named[NORMS], named[TRAINING])
        ]
        return [named[NORMS]["plain_microseconds"], *times, named[TRAINING]["call_microseconds"]]

    header = ["operation", "plain, µs", "norms alone, + µs", "beside training, + µs"]
    return by_line(rows, [*header, "the call itself, + µs"], cells, "operation")


def influence_table() -> str:
    """Return the time and peak memory of a train × query matrix."""
    rows = latest(
        read_csv("influence"), "machine", "model", "width", "train", "queries", "implementation"
    )

    def make(rows: list[Row]) -> str:
        names = [row["implementation"] for row in latest(rows, "implementation")]
        body = []
        cases = grouped(rows, "model", "parameters", "train")
        for case in sorted(cases, key=lambda case: tuple(map(int, case[1:]))):
            (model, parameters, train), group = case, cases[case]
            named = {row["implementation"]: row for row in group}
            best = min(float(row["milliseconds"]) for row in group)
            cells = [f"{model.upper()}, d = {int(parameters) / 1e6:.2f} M", train]
            for name in names:
                if name not in named:
                    cells.append("–")
                    continue
                milliseconds = float(named[name]["milliseconds"])
                seconds = milliseconds / 1e3
                time = f"{milliseconds:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
                time = f"**{time}**" if milliseconds == best else time
                cells.append(f"{time}, {int(named[name]['peak_bytes']) / 1e6:.0f} MB")
            body.append(cells)
        return table(["model", "N", *names], body)

    return by_machine(rows, make)


def ratios(name: str) -> Callable[[], str]:
    """Return what makes a table of variants, one a row, as multiples of the plain step."""

    def make(rows: list[Row]) -> str:
        names = [row["variant"] for row in latest(rows, "variant") if row["variant"] != "plain"]
        workloads = grouped(rows, "workload")
        body = []
        for name in names:
            cells = [name]
            for group in workloads.values():
                named = {row["variant"]: row for row in group}
                cells.append(f"{float(named[name]['ratio']):.2f}" if name in named else "–")
            body.append(cells)
        return table(["a step", *(workload for (workload,) in workloads)], body)

    return lambda: by_machine(latest(read_csv(name), "machine", "workload", "variant"), make)


def label_table() -> str:
    """Return how well each score finds flipped labels: the AUROC of the worst and best seed."""

    def make(rows: list[Row]) -> str:
        names = list(rows[0])[2 : list(rows[0]).index("rounds")]
        body = []
        for (way,), group in grouped(rows, "way").items():
            found = [sorted(f"{float(row[name]):.2f}" for row in group) for name in names]
            body.append([way, *map(span, found)])
        return table(["training", *names], body)

    return by_machine(latest(read_csv("wrong_labels"), "machine", "way", "seed"), make)


def kernel_table() -> str:
    """Return the times of kernels beside their floors and what else computes the same."""

    def layer(row: Row) -> str:
        return row["name"] + (", channels last" if row.get("channels_last") == "True" else "")

    def make(rows: list[Row]) -> str:
        body = []
        named = [{**row, "layer": layer(row)} for row in rows]
        for (operation, name), group in grouped(named, "operation", "layer").items():
            timed = [row for row in group if row["ms"]]
            ours = [row for row in timed if row["provider"].startswith("gradstats")]
            if not ours:
                continue
            best = min(ours, key=lambda row: float(row["ms"]))
            others = [
                f"{row['provider']} {float(row['ms']) / float(best['ms']):.2f}×"
                for row in sorted(timed, key=lambda row: float(row["ms"]))
                if not row["provider"].startswith("gradstats")
            ]
            time, share = 1e3 * float(best["ms"]), float(best["percent_of_floor"])
            cells = [operation.replace("_", " "), name, f"{time:.0f}", f"{share:.0f} %"]
            body.append([*cells, ", ".join(others) or "–"])
        header = ["operation", "layer", "µs", "of the floor", "others' times, of ours"]
        return table(header, body)

    keys = ("gpu", "dtype", "operation", "name", "channels_last", "provider")
    rows = [
        row
        for name in ("kernels", "layers")
        for row in read_csv(name)
        if row["name"] in SHOWN_LAYERS and row["operation"] in SHOWN_OPERATIONS
    ]
    tables = []
    for (gpu, dtype), group in grouped(latest(rows, *keys), "gpu", "dtype").items():
        versions = f"PyTorch {group[0]['torch']}, Triton {group[0]['triton']}"
        dates = span(sorted({row["date"] for row in group}))
        tables.append(f"{gpu}; {dtype}; {versions}; {dates}:\n\n{make(group)}")
    return "\n\n".join(tables)


def plot(name: str, what: str) -> Callable[[], str]:
    """Return the maker of a link to a plot, "" where there is nothing to plot."""
    return lambda: f"![{what}](results/{name}.png)" if read_csv(name) else ""


TABLES: dict[str, tuple[Callable[[], str], str]] = {
    "step": (step_table, "step_overhead"),
    "peers": (peer_table, "step_overhead --peers"),
    "tutorial": (tutorial_table, "step_overhead cnn --peers"),
    "operations": (operation_table, "op_overhead"),
    "scaling": (
        plot("scaling", "Time and memory over a plain step, as B, T and d grow"),
        "scaling",
    ),
    "crossover": (
        plot("crossover", "Time of both forms over T, the chosen one marked"),
        "crossover",
    ),
    "recorded": (recorded_table, "step_overhead --recorded"),
    "reduced": (reduced_table, "step_overhead --reduced"),
    "kernels": (kernel_table, "gpu"),
    "influence": (influence_table, "influence"),
    "monitor": (ratios("monitor_overhead"), "monitor_overhead"),
    "packed": (ratios("packed"), "packed"),
    "labels": (label_table, "wrong_labels"),
}


def filled(text: str) -> str:
    """Return a text with its marked regions written from the results.

    Raises:
        KeyError: a region has a name that is not in ``TABLES``.
    """

    def region(match: re.Match[str]) -> str:
        make, command = TABLES[match[2]]
        content = make() or f"Not measured yet: `python -m benchmarks.{command}`."
        return f"{match[1]}{content}\n{match[3]}"

    return REGION.sub(region, text)


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0]).parse_args()
    for page in PAGES:
        page.write_text(filled(page.read_text()))
    print(f"wrote {', '.join(TABLES)}")
    for path in plots.write_all():
        print(f"wrote {path.name}")


if __name__ == "__main__":
    main()
