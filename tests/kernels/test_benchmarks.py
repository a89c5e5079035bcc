"""The GPU scripts parse, refuse to run without a GPU, and write the table that is committed."""

import contextlib
import csv
import dataclasses
import importlib
import multiprocessing.dummy
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gradstats.kernels import _config
from gradstats.kernels._table import TABLE
from triton.runtime.errors import OutOfResources

from benchmarks import (
    bench_layer_kernels,
    bench_linear_kernels,
    gpu,
    kernel_harness,
    limited,
    step_overhead,
    tune_linear_kernels,
)
from tests.turns import in_this_process


@pytest.mark.parametrize("script", [bench_linear_kernels, bench_layer_kernels, tune_linear_kernels])
def test_help_and_the_need_for_a_gpu(script, capsys):
    with pytest.raises(SystemExit) as done:
        script.main(["--help"])
    assert done.value.code == 0
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit) as done:
            script.main([])
        assert done.value.code == 2
        assert "CUDA device" in capsys.readouterr().err


def test_the_one_command_runs_to_its_end(tmp_path, monkeypatch, capsys):
    """The steps that interpret kernels have a test of their own in that lane, and what collects
    tests is seen wherever they run."""

    def run_python(command, seconds, log, variables):
        _, module, *arguments = command
        if module == "pytest":
            return int(not all(Path(each).exists() for each in arguments if each[0] != "-"))
        if variables:
            return int(variables != {"TRITON_INTERPRET": "1"})
        monkeypatch.setattr(sys, "argv", [module, *arguments])
        with contextlib.redirect_stdout(log):
            try:
                return importlib.import_module(module).main() or 0
            except SystemExit as done:
                return done.code

    monkeypatch.setattr(gpu, "run_python", run_python)
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: multiprocessing.dummy)
    monkeypatch.setattr(step_overhead, "take_turns", in_this_process)
    assert gpu.main(["--out", str(tmp_path), "--dry-run"]) == 0, capsys.readouterr().out
    first, *printed = capsys.readouterr().out.splitlines()
    assert first == gpu.versions() and "setuptools " in first
    assert [line.partition(",")[0] for line in printed] == [
        "quick: ok", "training: ok", "recorded: ok", "reduced: ok", "row: ok", "small: ok",
        "times: ok", "kernels: ok", "layers: ok", "tests: ok",
    ]  # fmt: skip
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "kernel_times.csv", "log.txt", "step_overhead.csv"
    ]  # fmt: skip


def test_a_step_that_fails_keeps_no_other_from_running(tmp_path, monkeypatch, capsys):
    steps = [
        gpu.Step("wrong", ["-c", "raise SystemExit('this is why')"], 20, ()),
        gpu.Step("slow", ["-c", "import time; time.sleep(60)"], 1, ()),
        gpu.Step("right", ["-c", "open('{out}/table.csv', 'w').close()"], 20, ()),
    ]
    monkeypatch.setattr(gpu, "steps", lambda: steps)
    assert gpu.main(["--out", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    for line in ("wrong: failed (1)", "this is why", "slow: stopped: out of time", "right: ok"):
        assert line in printed
    assert (tmp_path / "table.csv").exists()


def running(mark: str) -> list[str]:
    """The command lines of other processes that hold a mark."""
    lines = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    return [line for line in lines.stdout.splitlines() if mark in line]


def test_a_step_out_of_time_leaves_nothing_running(tmp_path, monkeypatch):
    mark = f"mark-{tmp_path.name}-{os.getpid()}"
    child = f"import time; time.sleep(60)  # {mark}"
    command = (
        "import subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-c', {child!r}])\n"
        "print('what was found', flush=True)\n"
        "try: time.sleep(60)\n"
        "finally: print('told to end', flush=True)"
    )
    monkeypatch.setattr(limited, "GRACE", 1.0)
    step = gpu.Step("slow", ["-c", command], 4)
    assert gpu.run(step, tmp_path, 60.0, False).startswith("stopped: out of time")
    log = (tmp_path / "log.txt").read_text()
    assert "what was found" in log and "told to end" in log
    assert running(mark) == []


def test_a_child_that_outlives_a_step_is_ended(tmp_path):
    mark = f"mark-{tmp_path.name}-{os.getpid()}"
    child = f"import time; time.sleep(60)  # {mark}"
    command = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}])"
    assert limited.run_python(["-c", command]) == 0
    assert running(mark) == []


def test_steps_are_known_and_kernels_installed_before_any_runs(tmp_path, monkeypatch, capsys):
    for prepare, message in (
        (lambda: None, "wrong is no step"),
        (lambda: monkeypatch.setattr(gpu, "kernels_are_installed", lambda: False), "pip install"),
    ):
        prepare()
        steps = ["wrong"] if message.startswith("wrong") else ["quick"]
        with pytest.raises(SystemExit) as done:
            gpu.main(["--out", str(tmp_path / "new"), "--steps", *steps])
        assert done.value.code == 2 and message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_checkout_that_is_not_installed_has_no_kernels():
    root = Path(gpu.__file__).parents[1]
    code = (
        f"import sys; sys.path.insert(0, {str(root)!r})\n"
        "sys.meta_path[:] = [each for each in sys.meta_path if 'editable' not in str(each)]\n"
        "from benchmarks import gpu\n"
        "print(gpu.kernels_are_installed())"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "False", done.stderr


def test_a_kernel_that_is_wrong_is_not_timed(tmp_path, monkeypatch):
    module = bench_linear_kernels

    def providers(shape, dtype, descriptors):
        def broken(*inputs):
            raise ValueError("no such tile")

        def want(a, g, weight):
            return torch.ones(2)

        yield module.Provider("one", "gradstats", lambda *i: torch.full((2,), 2.0), 0, 0, want)

        def too_large(*inputs):
            raise OutOfResources(300_000, 232_448, "shared memory")

        yield module.Provider("two", "gradstats", broken, 0, 0, want)
        yield module.Provider("large", "gradstats", too_large, 0, 0, want)
        yield module.Provider("three", "gradstats", lambda *i: torch.ones(2), 0, 1, want)

    monkeypatch.setattr(module, "providers", providers)
    path = tmp_path / "kernels.csv"
    arguments = ["--dry-run", "--quick", "--out", str(path)]
    assert module.main(arguments) == 1
    with path.open() as file:
        rows = list(csv.DictReader(file))[:4]
    notes = [row["note"] for row in rows]
    assert notes[:2] == ["wrong by 1, not timed", "failed: no such tile"] and notes[3] == ""
    assert notes[2].startswith("failed: out of resource: shared memory, Required: 300000")
    assert [bool(row["ms"]) for row in rows] == [False, False, False, True]


def test_a_lost_device_ends_the_run():
    """No later kernel could run, and each would be said to have failed."""

    def broken(*inputs):
        raise ValueError("no such tile")

    def lost():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    meter = dataclasses.replace(kernel_harness.IN_A_DRY_RUN, check=lost)
    provider = kernel_harness.Provider("one", "gradstats", broken, 0, 0)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        kernel_harness.measure(provider, [()], (1.0, 1.0), meter)


def test_the_committed_table_is_what_the_script_writes(tmp_path):
    written = tune_linear_kernels.render(TABLE)
    assert Path(_config.__file__).with_name("_table.py").read_text() == written
    (tmp_path / "table.py").write_text(written)
    assert runpy.run_path(str(tmp_path / "table.py"))["TABLE"] == TABLE


@pytest.mark.parametrize("kind", _config.KINDS)
@pytest.mark.parametrize("operation", _config.MATMULS)
def test_candidates_are_distinct_tiles_that_a_dot_can_take(operation, kind):
    groups = tune_linear_kernels.candidates(operation, kind)
    areas = [{row[0] * row[1] for row in group} for group in groups]
    assert all(len(area) == 1 for area in areas)
    assert [max(area) for area in areas] == sorted((max(area) for area in areas), reverse=True)
    assert all(min(row[:3]) >= 16 for group in groups for row in group)


def test_every_shape_has_floors():
    shapes = bench_linear_kernels.SHAPES
    assert len({shape.name for shape in shapes}) == len(shapes)
    assert set(bench_linear_kernels.QUICK) <= {shape.name for shape in shapes}


def test_every_layer_has_a_name_of_its_own():
    names = [layer.name for layer in bench_layer_kernels.LAYERS]
    assert len(set(names)) == len(names)
    assert set(bench_layer_kernels.QUICK) <= set(names)
