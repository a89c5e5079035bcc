"""What benchmarks rest on: providers are checked, results keep, tables say what the results say."""

from __future__ import annotations

import contextlib
import csv
import importlib
import importlib.util
import math
import os
import time
from functools import partial
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn

from benchmarks import all as every_benchmark
from benchmarks import (
    checking,
    convolution_forms,
    crossover,
    harness,
    op_overhead,
    packed,
    pair_forms,
    plots,
    providers,
    report,
    scaling,
    step_overhead,
    wrong_labels,
)
from benchmarks.checking import oracle, prepare
from benchmarks.ledger import host_peak
from benchmarks.providers import PROVIDERS, Provider
from benchmarks.workloads import DTYPES, WORKLOADS, Workload, classification, next_token
from gradstats.demo._settings import Settings
from tests.oracle import oracle_gradients, oracle_sqnorms
from tests.turns import in_this_process, noting

B = 6
EAGER = [name for name, each in PROVIDERS.items() if not each.form]


def layers() -> Workload:
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
    return Workload("layers", model, (torch.randn(B, 5), torch.randint(3, (B,))), classification)


def sequences() -> Workload:
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
    batch = (torch.randn(B, 4, 5), torch.randint(3, (B, 4)))
    return Workload("sequences", model, batch, next_token)


def convolutions(groups: int = 1) -> Workload:
    model = nn.Sequential(
        nn.Conv2d(4, 8, 3, groups=groups), nn.ReLU(), nn.Flatten(), nn.Linear(72, 3)
    )
    batch = (torch.randn(B, 4, 5, 5), torch.randint(3, (B,)))
    return Workload("convolutions", model, batch, classification)


def need(name: str) -> Provider:
    """Return a provider, or skip where its package is not installed."""
    if PROVIDERS[name].package is not None and not PROVIDERS[name].version:
        pytest.skip(f"{PROVIDERS[name].package} is not installed")
    return PROVIDERS[name]


@pytest.mark.parametrize("make", [layers, sequences, convolutions])
@pytest.mark.parametrize("name", EAGER)
def test_every_provider_agrees_with_the_oracle_again_and_again(name, make):
    work, provider = make(), need(name)
    prepared = prepare(provider, work, oracle(work))
    assert prepared.note == ""
    expected = sum(oracle_sqnorms(work.model, work.batch, work.loss_fn).values())
    for _ in range(2):
        found = prepared.call()
        if name == "plain":
            assert found is None
        else:
            torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0)
    if name in ("plain", "training"):
        mean = oracle_gradients(work.model, work.batch, work.loss_fn)
        for key, parameter in work.model.named_parameters():
            torch.testing.assert_close(
                parameter.grad.double(), mean[key].mean(0), rtol=1e-4, atol=1e-7
            )


def test_the_model_is_left_to_the_next_provider():
    work = layers()
    before = {key: each.clone() for key, each in work.model.state_dict().items()}
    expected = oracle(work)
    for name in EAGER:
        prepare(PROVIDERS[name], work, expected)
    work.model.zero_grad()
    for parameter in work.model.parameters():
        assert not parameter.__dict__
    assert not any(each._forward_hooks or each._backward_hooks for each in work.model.modules())
    torch.testing.assert_close(work.model.state_dict(), before, rtol=0, atol=0)


def test_a_library_that_is_wrong_is_told_so():
    work = convolutions(groups=4)
    prepared = prepare(need("backpack"), work, oracle(work))
    assert prepared.call is None
    assert prepared.note.startswith("wrong (relative error")


def failing(kind: str) -> Provider:
    def make(work):
        right = PROVIDERS["norms"].make(work)

        def call():
            if kind == "refused":
                raise NotImplementedError("no rule for this layer\nand more")
            if kind == "slow":
                time.sleep(2)
            if kind == "shape":
                return right()[1:]
            return right() * {"nan": math.nan, "double": 2.0}.get(kind, 1.0)

        if kind == "absent":
            raise ModuleNotFoundError("No module named 'absent'")
        return call

    return Provider(
        kind, make,
        package="no-such-distribution" if kind == "missing" else None,
        held=lambda work: 2**40 if kind == "large" else 0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "note"),
    [
        ("double", "wrong (relative error 1)"),
        ("nan", "wrong (relative error inf)"),
        ("shape", "wrong (shape (5,))"),
        ("refused", "NotImplementedError: no rule for this layer"),
        ("missing", "not installed"),
        ("absent", "cannot be imported: No module named 'absent'"),
        ("large", "not run: would hold 4096 GiB"),
        ("slow", "not run: took longer than 1 s"),
    ],
)
def test_what_is_wrong_or_fails_is_named_and_not_timed(kind, note, monkeypatch):
    monkeypatch.setattr(checking, "PATIENCE", 1.0)
    monkeypatch.setitem(PROVIDERS, "failing", failing(kind))
    timed: list[str] = []

    def take_turns(makers, rounds, keep_memory):
        timed.extend(makers)
        return {name: numpy.ones(rounds) for name in makers}

    monkeypatch.setattr(step_overhead, "take_turns", take_turns)
    (_, row) = step_overhead.measure(layers, ("failing",), step_overhead.Conditions(rounds=1))
    assert row["note"] == note and timed == ["plain"]
    assert not row["milliseconds"] and not row["ratio"] and not row["peak_bytes"]


@pytest.mark.parametrize("name", providers.RECORDED)
def test_a_step_is_recorded_once_and_replayed(name, monkeypatch):
    """With stand-ins for what CUDA has: a stream, a graph, and the context that records one."""
    events = []

    class Stream:
        def wait_stream(self, other):
            events.append("waits")

    class Graph:
        def replay(self):
            events.append("replays")

    @contextlib.contextmanager
    def records(graph):
        events.append("records")
        yield

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", records)
    work = layers()
    found = prepare(PROVIDERS[name], work, oracle(work))
    assert found.note == "" and events == ["waits", "waits", "records", "replays"]
    assert (found.error == found.error) == PROVIDERS[name].ours


@pytest.mark.parametrize("dtype", DTYPES)
def test_precisions(dtype):
    work = convolutions().on("cpu", dtype)
    expected = oracle(work)
    assert expected.tolerance >= checking.TOLERANCE
    assert (expected.tolerance > checking.TOLERANCE) == (dtype != "float32")
    for name in ("norms", "training", "loop", "vmap"):
        assert prepare(PROVIDERS[name], work, expected).note == ""


@pytest.mark.parametrize("name", ["small", "lstm", "resnet", "adapted", "pruned", "normalised"])
def test_workloads_are_followed(name):
    torch.manual_seed(0)
    work = WORKLOADS[name]()
    expected = oracle(work)
    for provider in ("norms", "training"):
        assert prepare(PROVIDERS[provider], work, expected).note == ""


def test_rounds_rotate_and_count():
    calls: list[str] = []
    work = {name: lambda name=name: calls.append(name) for name in "abc"}
    seconds = harness.rounds_of(work, rounds=4, warmup=1)
    assert "".join(calls) == "abcbcacababcbca"
    assert all(len(each) == 4 and (each > 0).all() for each in seconds.values())
    assert harness.median_interval(numpy.full(5, 3.0)) == (3.0, 3.0, 3.0)
    median, low, high = harness.median_interval(numpy.arange(101.0))
    assert median == 50 and 30 < low < 50 < high < 70


def test_turns_are_taken_by_processes(tmp_path):
    path, before = tmp_path / "calls", dict(os.environ)
    makers = {name: partial(noting, path, name) for name in "ab"}
    seconds = harness.take_turns(makers, rounds=2)
    lines = [line.split() for line in path.read_text().splitlines()]
    # Two calls to get ready; then in each round one that is not timed and one that is.
    assert "".join(name for name, _, _ in lines) == "aabb" + "aabb" + "bbaa"
    assert len({(name, process) for name, process, _ in lines}) == 2
    assert str(os.getpid()) not in {process for _, process, _ in lines}
    assert {setting for _, _, setting in lines} == {harness.KEEP_MEMORY["MALLOC_TRIM_THRESHOLD_"]}
    assert dict(os.environ) == before
    assert all(len(each) == 2 and (each > 0).all() for each in seconds.values())


def test_results_of_other_columns_keep(tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    harness.write_csv("some", [{"case": "one, two", "old": 1}])
    harness.write_csv("some", [{"case": "three", "new": 2}])
    first, second = harness.read_csv("some")
    assert (first["case"], first["old"], first["new"]) == ("one, two", "1", "")
    assert (second["case"], second["old"], second["new"]) == ("three", "", "2")
    assert first["machine"] == harness.machine() and second["torch"] == torch.__version__
    assert harness.read_csv("none") == []


def test_processors_of_one_name_are_told_apart(monkeypatch):
    names = []
    for instructions in ("AVX2", "AVX512"):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda has=instructions: has)
        names.append(harness.machine())
    assert names[0] != names[1] and names[1].endswith(
        f"(AVX512), {torch.get_num_threads()} threads"
    )


def test_the_pages_say_what_the_results_say():
    texts = [page.read_text() for page in report.PAGES]
    assert [report.filled(text) for text in texts] == texts
    shown = [match[2] for text in texts for match in report.REGION.finditer(text)]
    assert sorted(shown) == sorted(report.TABLES)


def fill(folder, name: str, rows: list[dict[str, str]]) -> None:
    stamp = {"machine": "M, 2 threads", "torch": "2.13.0", "date": "2026-01-02", "rounds": "5"}
    stamp["commit"] = "abc1234"
    with (folder / f"{name}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list({**rows[0], **stamp}))
        writer.writeheader()
        writer.writerows({**stamp, **row} for row in rows)


def step_row(variant: str, ratio: str, peak: str = "100", note: str = "") -> dict[str, str]:
    return {
        "workload": "CNN of the tutorial, B=64", "variant": variant, "ratio": ratio, "low": ratio,
        "high": ratio, "milliseconds": ratio and str(10 * float(ratio)), "peak_bytes": peak,
        "note": note, "dtype": "float32", "provider": "opacus 9" if "Opacus" in variant else "",
        "rounds": "5" if ratio else "",
    }  # fmt: skip


def test_tables_show_the_last_run_and_the_reasons(tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    rows = [
        step_row("norms", "9.9"),
        step_row("plain", "1.0"), step_row("norms", "0.9", "50"),
        step_row("norms and gradients", "1.1"), step_row("norms, compiled", "0.5"),
        step_row("loop", "4.0", "25"), step_row("vmap(grad)", "2.0", "900"),
        step_row("Opacus, ghost", "", "", "RuntimeError: stack expects tensors"),
        step_row("BackPACK BatchL2Grad", "", "", "wrong (relative error 0.5)"),
        step_row("TorchJD Gramian", "", "", "not run: would hold 8 GiB"),
    ]  # fmt: skip
    fill(tmp_path, "step_overhead", rows)
    caption = "M, 2 threads; float32; PyTorch 2.13.0, opacus 9; 5 rounds; 2026-01-02:"
    assert report.step_table().splitlines() == [
        caption, "",
        "| model | norms alone | memory | norms beside training | memory "
        "| fastest other way | memory |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| CNN of the tutorial, B=64 | 0.90 [0.90, 0.90] | 0.50 | 1.10 [1.10, 1.10] | 1.00 "
        "| vmap(grad): 2.00 [2.00, 2.00] | 9.00 |",
    ]  # fmt: skip
    assert report.peer_table().splitlines()[2:] == [
        "| model | gradstats, norms | gradstats, norms and gradients | loop | vmap(grad) "
        "| Opacus, ghost | BackPACK BatchL2Grad | TorchJD Gramian |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        "| CNN of the tutorial, B=64 | **0.90**, 0.50 | 1.10, 1.00 | 4.00, 0.25 | 2.00, 9.00 "
        "| RuntimeError | wrong (relative error 0.5) | holds 8 GiB |",
    ]
    assert "PyTorch 2.13.0, opacus 9;" in report.peer_table()
    assert "| vmap(grad) | 20.0 ms | 2.0× | 9.00 |" in report.tutorial_table()
    text = "a\n<!-- table: operations -->\nold\n<!-- end -->\nb\n"
    assert "Not measured yet: `python -m benchmarks.op_overhead`." in report.filled(text)
    assert report.filled(text).startswith("a\n") and report.filled(text).endswith("-->\nb\n")


def test_precisions_of_products_stand_apart(tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    rows = [
        {**row, "float32_products": ""}
        for row in (
            step_row("plain", "1.0"),
            step_row("loop", "9.0"),
            step_row("norms", "0.9", "50"),
        )
    ]
    rows += [{**row, "float32_products": kind} for kind in ("ieee", "tf32") for row in rows[:3]]
    # of a machine on which no other way was timed there is nothing to compare
    rows += [{**row, "machine": "another"} for row in rows if row["variant"] != "loop"]
    fill(tmp_path, "step_overhead", rows)
    captions = [line for line in report.step_table().splitlines() if line.endswith(":")]
    # a row that does not say is as one of exact products
    assert len(captions) == 2
    assert "; float32; " in captions[0] and "; float32 (products: tf32); " in captions[1]


def test_groups_are_written_as_they_come(monkeypatch):
    names = ("plain", "norms", "training", "norms-compiled", "loop", "vmap", "loop")
    assert step_overhead.groups_of(names) == [
        ("plain", "norms", "training"), ("plain", "norms-compiled"), ("plain", "loop"),
        ("plain", "vmap"),
    ]  # fmt: skip
    assert step_overhead.groups_of(("vmap",)) == [("plain",), ("plain", "vmap")]
    monkeypatch.setitem(PROVIDERS, "failing", failing("refused"))
    timed: list[list[str]] = []

    def take_turns(makers, rounds, keep_memory):
        timed.append(list(makers))
        return {name: numpy.full(rounds, len(timed)) for name in makers}

    monkeypatch.setattr(step_overhead, "take_turns", take_turns)
    monkeypatch.setattr(step_overhead, "SLOW", math.inf)
    names, conditions = ("norms", "failing", "loop"), step_overhead.Conditions(rounds=2)
    groups = step_overhead.measure_in_groups(layers, names, conditions)
    first = next(groups)
    assert [row["variant"] for row in first] == ["plain", "norms"]
    assert timed == [["plain", "norms"]]  # the others wait until these are written
    rest = list(groups)
    assert [[row["variant"] for row in rows] for rows in rest] == [["refused"], ["loop"]]
    assert timed == [["plain", "norms"], ["plain", "loop"]]
    assert all(row["ratio"] == "1.000" for row in (*first, *rest[1]))


def test_steps_in_a_row_are_timed_together_and_one_is_reported(monkeypatch):
    calls = {"plain": 0, "norms": 0}

    def interleave(variants, reference, rounds, warmup, device):
        assert (reference, rounds, device) == ("plain", 5, "cuda")
        for name, call in variants.items():
            calls[name] = 0
            call()
        return {
            "plain": harness.Timing(40.0, 1.0, 1.0, 1.0),
            "norms": harness.Timing(50.0, 1.25, 1.2, 1.3),
        }

    def call(name):
        calls[name] += 1

    monkeypatch.setattr(step_overhead, "interleave", interleave)
    monkeypatch.setattr(step_overhead, "duration", lambda call, device: 1.0)
    conditions = step_overhead.Conditions(rounds=5, device="cuda", in_a_row=4)
    steps = {name: partial(call, name) for name in calls}
    found = step_overhead.timed_together(layers, steps, conditions)
    assert calls == {"plain": 4, "norms": 4}
    assert found["plain"] == (harness.Timing(10.0, 1.0, 1.0, 1.0), 5)
    assert found["norms"] == (harness.Timing(12.5, 1.25, 1.2, 1.3), 5)


def test_calls_are_warm_before_they_are_called_slow():
    counts = {"plain": 0, "compiled twice": 0}

    def call(name):
        counts[name] += 1
        if name != "plain" and counts[name] == 1:
            time.sleep(0.3)
        time.sleep(0.005)

    calls = {name: partial(call, name) for name in counts}
    runs = []

    def run(names, rounds):
        runs.append(list(names))
        return dict.fromkeys(names, harness.Timing(1.0, 1.0, 1.0, 1.0))

    step_overhead.timed(calls, 3, "cpu", run)
    assert runs == [list(counts)]


def test_compiled_providers_keep_each_other_s_code(monkeypatch):
    monkeypatch.setattr(torch._dynamo, "reset", lambda: pytest.fail("forgets what was compiled"))
    modes = []
    monkeypatch.setattr(torch, "compile", lambda model, mode: modes.append(mode) or model)
    work = layers()
    expected = oracle(work)
    for name in (*providers.COMPILED, *providers.REDUCED_LAUNCHES):
        assert prepare(PROVIDERS[name], work, expected).note == ""
    assert modes == [None] * 3 + ["reduce-overhead"] * 3


def test_gradients_are_let_go_before_memory_is_measured(monkeypatch):
    """Without asking every object what class it claims to be."""

    class Claims:
        @property
        def __class__(self):
            raise RuntimeError("asked")

    work, claims = layers(), Claims()
    call = PROVIDERS["plain"].make(work)
    call()
    held = []
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 7)

    def memory_allocated():
        held.extend(each.grad for each in work.model.parameters() if each.grad is not None)
        return 3

    monkeypatch.setattr(torch.cuda, "memory_allocated", memory_allocated)
    assert step_overhead.peak_bytes(call, "cuda") == 4
    assert held == [] and type(claims) is Claims


@pytest.mark.parametrize("tf32", [True, False])
def test_products_of_float32_are_chosen_and_recorded(tf32):
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        step_overhead.choose_float32_products(tf32)
        kind = "tf32" if tf32 else "ieee"
        assert torch.backends.cuda.matmul.fp32_precision == kind
        assert step_overhead.float32_products("cuda") == kind
        assert step_overhead.float32_products("cpu") == "ieee"
        torch.backends.cudnn.allow_tf32 = not tf32
        assert "convolutions" in step_overhead.float32_products("cuda")
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


@pytest.mark.parametrize("case", packed.CASES)
def test_packed_workloads_are_followed(case):
    work, padded = packed.build(case)
    packed.check(work, packed.steps(work, padded))


def test_operations_scaling_and_plots_run_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(step_overhead, "take_turns", in_this_process)
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    monkeypatch.setattr(plots, "RESULTS", tmp_path)
    run = "sys.argv"
    arguments = ["op_overhead", "Linear", "Embedding and add", "--rounds", "1"]
    monkeypatch.setattr(run, [*arguments, "--out", str(tmp_path)])
    op_overhead.main()
    arguments = ["scaling", "T", "--points", "2", "--rounds", "1", "--providers", "norms"]
    monkeypatch.setattr(run, arguments)
    scaling.main()
    rows = harness.read_csv("op_overhead")
    assert [(row["operation"], row["variant"]) for row in rows] == [
        (operation, variant)
        for operation in ("Linear", "Embedding and add")
        for variant in ("norms", "norms and gradients")
    ]
    assert all(math.isfinite(float(row["microseconds"])) for row in rows)
    assert report.operation_table().count("\n| ") == 4  # header, rule, two operations
    rows = harness.read_csv("scaling")
    assert [(row["T"], row["variant"]) for row in rows] == [
        (positions, variant) for positions in "14" for variant in ("plain", "norms")
    ]
    assert {row["d"] for row in rows} == {str(4 * (256 * 256 + 256) + 256 * 16 + 16)}
    fill(
        tmp_path,
        "crossover",
        [
            {
                "p": "8", "q": "8", "positions": t, "weight_gradient": wanted, "chosen": form,
                "gram_ms": t, "direct_ms": "5",
            }
            for wanted in ("no", "yes")
            for t, form in (("2", "gram"), ("9", "direct"))
        ],
    )  # fmt: skip
    assert [path.name for path in plots.write_all()] == ["scaling.png", "crossover.png"]
    assert all((tmp_path / name).stat().st_size > 5000 for name in ("scaling.png", "crossover.png"))
    assert "scaling.png" in report.TABLES["scaling"][0]()


def test_wrong_labels_are_found_and_shown(tmp_path, monkeypatch):
    pytest.importorskip("sklearn")
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    monkeypatch.setattr(wrong_labels, "DEMO", Settings(epochs=4, checkpoints=(2, 4), early_epoch=2))
    monkeypatch.setattr(wrong_labels, "WAYS", {"MLP, SGD": wrong_labels.WAYS["MLP, SGD"]})
    monkeypatch.setattr("sys.argv", ["wrong_labels", "--rounds", "2"])
    wrong_labels.main()
    rows = harness.read_csv("wrong_labels")
    assert [(row["way"], row["seed"]) for row in rows] == [("MLP, SGD", "0"), ("MLP, SGD", "1")]
    for row in rows:
        assert 0.9 < float(row["self-influence"]) <= 1 and 0.9 < float(row["mean loss"]) <= 1
        assert 0.5 < float(row["raw products, mean"]) < float(row["self-influence"])
    losses = sorted(f"{float(row['mean loss']):.2f}" for row in rows)
    last = report.label_table().splitlines()[-1]
    assert last.startswith("| MLP, SGD | ") and last.endswith(f"| {report.span(losses)} |")


@pytest.mark.parametrize("module", [crossover, pair_forms])
def test_forms_of_linear_layers_are_timed(tmp_path, monkeypatch, module):
    monkeypatch.setattr(module, "WIDTHS", ((4, 6),))
    monkeypatch.setattr(module, "POSITIONS", (2, 5))
    if module is pair_forms:
        monkeypatch.setattr(module, "BATCHES", (3, 4))
    monkeypatch.setattr("sys.argv", ["forms", "--rounds", "1", "--out", str(tmp_path)])
    module.main()
    rows = harness.read_csv(module.__name__.rpartition(".")[2], tmp_path)
    assert [row["positions"] for row in rows] == (
        ["2", "2", "5", "5"] if module is pair_forms else ["2", "5", "2", "5"]
    )
    assert all(float(row["gram_ms"]) > 0 and row["chosen"] in ("gram", "direct") for row in rows)


def test_what_a_choice_loses_is_a_share_of_the_fastest():
    timings = {
        name: harness.Timing(1.0, ratio, ratio, ratio)
        for name, ratio in (("slow", 1.0), ("fast", 0.5), ("slower", 2.0))
    }
    assert [harness.lost_by(name, timings) for name in timings] == [1.0, 0.0, 3.0]


def test_forms_of_convolutions_are_timed(tmp_path, monkeypatch, capsys):
    layers = (
        convolution_forms.Layer(4, 8, 3, 2, 6),
        convolution_forms.Layer(4, 4, 3, 1, 5, groups=4),
    )
    monkeypatch.setattr(convolution_forms, "LAYERS", layers)
    monkeypatch.setattr("sys.argv", ["forms", "--rounds", "1", "--out", str(tmp_path)])
    convolution_forms.main()
    rows = harness.read_csv("convolution_forms", tmp_path)
    assert [(row["groups"], row["weight_gradient"], row["positions"]) for row in rows] == [
        ("1", "no", "9"), ("4", "no", "25"), ("1", "yes", "9"), ("4", "yes", "25"),
    ]  # fmt: skip
    for row, with_sum in zip(rows, (False, False, True, True), strict=True):
        factor = convolution_forms.factor_of(layers[row["groups"] == "4"])
        gradients = factor.dense()
        ways = convolution_forms.ways(factor, with_sum)
        assert all(float(row[f"{name}_ms"]) > 0 for name in ways) and row["chosen"] in ways
        (patches,) = ways["patches"]()
        results = [patches] if with_sum else [(patches, None)]
        results += [ways["groups"](), ways["alone"]()]
        for contraction, total in results:
            expected = gradients.square().sum((1, 2, 3, 4))
            torch.testing.assert_close(contraction.value.float(), expected)
            if with_sum:
                torch.testing.assert_close(total, gradients.sum(0))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_list_of_all_benchmarks_parses(device, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["all", "--dry-run", "--device", device])
    assert every_benchmark.main() == 0
    commands = [line[12:] for line in capsys.readouterr().out.splitlines() if line]
    assert len(commands) == 1 + len(
        every_benchmark.CUDA if device == "cuda" else every_benchmark.CPU
    )
    for command in commands:
        assert importlib.util.find_spec(command.split()[0]) is not None


def test_all_benchmarks_end_in_time_and_write_where_they_are_told(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "a folder"
    (tmp_path / "quick.py").write_text(
        "import os, sys\nassert sys.argv[1:-1] == ['word', '--out']\nos.mkdir(sys.argv[-1])\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    parts = {"wrong": "no_such_module", "quick": "quick word"}
    monkeypatch.setattr(every_benchmark, "CPU", parts)
    arguments = ["all", "--seconds", "100", "--out", str(folder)]
    monkeypatch.setattr("sys.argv", arguments)
    pages = [page.read_bytes() for page in report.PAGES]
    assert every_benchmark.main() == 1
    assert f"failed: no_such_module --out '{folder}'" in capsys.readouterr().out
    assert folder.is_dir()
    assert [page.read_bytes() for page in report.PAGES] == pages
    monkeypatch.setattr("sys.argv", [*arguments, "--only", "quick", "--seconds", "0"])
    assert every_benchmark.main() == 1
    assert "out of time" in capsys.readouterr().out


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_benchmark_takes_a_folder(device, monkeypatch, capsys):
    for command in (every_benchmark.CUDA if device == "cuda" else every_benchmark.CPU).values():
        module, *arguments = command.split()
        monkeypatch.setattr("sys.argv", [module, *arguments, "--out", "folder", "--help"])
        with pytest.raises(SystemExit) as done:
            importlib.import_module(module).main()
        assert done.value.code == 0 and "--out" in capsys.readouterr().out


def test_results_are_kept_where_git_is_not_installed(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert harness.commit() == "unknown"


def test_arrays_count_beside_tensors():
    """What is alive at once: a peak of arrays between two tensors, and both kinds together."""
    size = 2**22

    def together():
        array = numpy.ones(size, dtype=numpy.uint8)
        tensor = torch.ones(size, dtype=torch.uint8)
        return array, tensor

    def one_after_the_other():
        torch.ones(size, dtype=torch.uint8)
        numpy.ones(size, dtype=numpy.uint8)
        torch.ones(size, dtype=torch.uint8)

    def in_between():
        tensor = torch.ones(size, dtype=torch.uint8)
        numpy.ones(2 * size, dtype=numpy.uint8)
        return tensor

    def of_a_tensor():
        return torch.ones(size, dtype=torch.uint8).numpy()

    expected = {together: 2, one_after_the_other: 1, in_between: 3, of_a_tensor: 1}
    for run, count in expected.items():
        assert host_peak(run) == pytest.approx(count * size, rel=0.02), run.__name__


@pytest.mark.parametrize("name", ["influence", "monitor_overhead", "op_overhead", "report"])
def test_a_word_that_means_nothing_is_named(name, monkeypatch, capsys):
    command = importlib.import_module(f"benchmarks.{name}")
    monkeypatch.setattr("sys.argv", [name, "nope"])
    with pytest.raises(SystemExit):
        command.main()
    assert "nope" in capsys.readouterr().err


def test_the_list_of_commands_is_whole():
    folder = Path(report.__file__).parent
    commands = [
        file.stem for file in folder.glob("*.py") if '__name__ == "__main__"' in file.read_text()
    ]
    package = importlib.import_module("benchmarks")
    assert [name for name in commands if name not in (package.__doc__ or "")] == []
