"""Everything that needs a GPU, in one command: speed, then correctness.

    python3 -m pip install --no-build-isolation --no-deps -e . && \\
        python3 -m benchmarks.gpu --out FOLDER

What a step prints goes to FOLDER/log.txt, what it measures to a table beside it. A step that fails
does not keep the others from running: the scripts time no kernel whose result is wrong. The exit
status says whether all went well. All steps together end within ten minutes, the installation
included; the tests come last and deserve a call of their own, `--steps tests`, for most of what
they take is compiling. `--dry-run` takes the same steps without a GPU, on small shapes in Triton's
interpreter, to see that the command runs to its end.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.limited import run_python

# For all steps together: with installing the package a command ends within ten minutes.
SECONDS = 540


@dataclass(frozen=True)
class Step:
    """One thing to run, most informative first.

    Attributes:
        name: what the log calls it.
        command: arguments of the interpreter, "{out}" standing for the folder.
        seconds: how long it may take; it is stopped then.
        dry: what a dry run adds to the command; None where a dry run takes another.
        instead: the command of a dry run in that case.
    """

    name: str
    command: Sequence[str]
    seconds: int
    dry: Sequence[str] | None = ("--dry-run",)
    instead: Sequence[str] = ()


def steps() -> list[Step]:
    kernels, layers = "benchmarks.bench_linear_kernels", "benchmarks.bench_layer_kernels"
    models = "backend_models", "inner_products", "flex_attention"
    files = [*(f"tests/test_{name}.py" for name in models), "tests/kernels/gpu"]
    # named one by one as they end, so that tests that are stopped have said what failed; a plugin
    # that complains of being run in parallel stays out, as warnings are errors
    tests = ["-m", "pytest", "-p", "no:benchmark", "-v", "--tb=short", "-m", "gpu", *files]
    # most of the tests' time is the compiler's, which uses one core a process; two are left for
    # what drives the others and for the system
    workers = str(max(1, (os.cpu_count() or 1) - 2))
    parallel = ["-n", workers, "--dist", "worksteal"] if importlib.util.find_spec("xdist") else []
    steps = ["-m", "benchmarks.step_overhead"]
    gpt = [*steps, "gpt2", "--device", "cuda", "--dtype", "bfloat16", "--rounds", "15"]
    tiny = [*steps, "small", "--rounds", "1", "--out", "{out}", "--providers", "plain", "norms"]
    recorded = [*gpt, "--providers", "plain", "--recorded", "--out", "{out}"]
    reduced = ["--providers", "norms", "training", "--reduced", "--out", "{out}"]
    row = [*gpt, *reduced, "--in-a-row", "8"]
    small = [*steps, "mlp", "cnn", "gpt", "--device", "cuda", "--rounds", "15", *reduced]
    times = ["-m", "benchmarks.kernel_times"]
    compared = ["plain", "norms", "training", "plain-reduced", "norms-reduced", "training-reduced"]
    profiled = [*times, "gpt2", "--dtype", "bfloat16", "--out", "{out}", "--providers", *compared]
    found = ["-m", "pytest", "-q", "--collect-only", *files]
    return [
        Step("quick", ["-m", kernels, "--quick", "--out", "{out}/kernels.csv"], 90),
        Step("training", [*gpt, "--peers", "--out", "{out}"], 120, None, tiny),
        Step("recorded", recorded, 60, None, [*steps, "--help"]),
        Step("reduced", [*gpt, *reduced], 240, None, [*steps, "--help"]),
        Step("row", row, 120, None, [*steps, "--help"]),
        Step("small", small, 150, None, [*steps, "--help"]),
        Step("times", profiled, 120, None, [*times, "small", "--out", "{out}"]),
        Step(
            "kernels",
            ["-m", kernels, "--seconds", "120", "--out", "{out}/kernels.csv"],
            180,
            None,
            ["-m", kernels, "--help"],
        ),
        Step("layers", ["-m", layers, "--seconds", "100", "--out", "{out}/layers.csv"], 150),
        Step("tests", [*tests, *parallel], SECONDS, None, found),
    ]


def run(step: Step, folder: Path, left: float, dry: bool) -> str:
    """Runs a step and returns what came of it; its output goes to the log."""
    command = list(step.command)
    if dry:
        command = [*command, *step.dry] if step.dry is not None else list(step.instead)
    command = [argument.replace("{out}", str(folder)) for argument in command]
    # the tests' workers and the compiler keep all cores busy
    variables = {"OMP_NUM_THREADS": "1"} if step.name == "tests" else {}
    if dry and step.dry is not None:
        variables["TRITON_INTERPRET"] = "1"
    start = time.monotonic()
    with (folder / "log.txt").open("a") as log:
        print(f"\n== {step.name}: {' '.join(command)}", file=log, flush=True)
        status = run_python(command, min(step.seconds, left), log, variables)
        outcome = "stopped: out of time" if status is None else f"failed ({status})"
        outcome = f"{outcome if status != 0 else 'ok'}, {time.monotonic() - start:.0f} s"
        print(f"== {step.name}: {outcome}", file=log)
    return outcome


def versions() -> str:
    """Return the versions of what a run, and the installation before it, rest on."""
    found = [f"python {platform.python_version()}"]
    for package in ("torch", "triton", "setuptools"):
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"no {package}")
    return ", ".join(found)


def kernels_are_installed() -> bool:
    """Whether the library finds its kernels, which lie beside it in a checkout, not within."""
    return importlib.util.find_spec("gradstats.kernels") is not None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the log and the tables")
    parser.add_argument("--dry-run", action="store_true", help="small shapes, without a GPU")
    parser.add_argument("--steps", nargs="+", help=f"of {', '.join(s.name for s in steps())}")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for all steps together")
    options = parser.parse_args(arguments)
    unknown = set(options.steps or ()) - {step.name for step in steps()}
    if unknown:
        parser.error(f"--steps: {', '.join(sorted(unknown))} is no step")
    if not kernels_are_installed():
        parser.error(
            "gradstats.kernels cannot be imported: the installation maps the folder kernels/ to "
            "it. Run `python3 -m pip install --no-build-isolation --no-deps -e .` in the "
            "repository's root, with the Python that runs this. Without isolation it needs "
            f"setuptools of 64 or later; here are {versions()}"
        )
    options.out.mkdir(parents=True, exist_ok=True)
    print(versions(), flush=True)
    with (options.out / "log.txt").open("a") as log:
        print(versions(), file=log)
    end = time.monotonic() + options.seconds
    failed = False
    for step in steps():
        if options.steps and step.name not in options.steps:
            continue
        left = end - time.monotonic()
        outcome = run(step, options.out, left, options.dry_run) if left > 5 else "left out"
        failed |= not outcome.startswith("ok")
        print(f"{step.name}: {outcome}", flush=True)
        if not outcome.startswith("ok"):
            print("".join((options.out / "log.txt").read_text().splitlines(keepends=True)[-25:]))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
