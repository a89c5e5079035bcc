"""Paired, interleaved timing: every variant runs once in each round, in rotating order.

A machine's speed drifts by more than the differences of interest. Ratios are therefore taken within
a round, between neighbours in time, and their median is given with a bootstrap interval.

What one variant leaves in the allocator affects the time of the next one. So ``take_turns`` runs
each in a process of its own, where a step follows a step of the same kind, as in training.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import datetime
import multiprocessing
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from unittest import mock

import numpy
import torch

import gradstats

RESULTS = Path(__file__).parent / "results"

# By default glibc may return the top of its heap to the system and get it back page by page.
# Whether it does so depends on chance, and makes the same step take up to a fifth longer.
KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(2**33), "MALLOC_MMAP_THRESHOLD_": str(2**25)}

# Seconds to wait between turns: idle threads of the last process spin before they sleep, and made a
# step of one millisecond wait for five.
SPINNING = 0.05


@dataclass(frozen=True)
class Timing:
    """Times of one variant, and their ratio to the reference of the same round.

    Attributes:
        milliseconds: median time of one run.
        ratio, low, high: median of the ratios and its 95 % bootstrap interval.
    """

    milliseconds: float
    ratio: float
    low: float
    high: float


def turns(variants: Iterable[str], rounds: int) -> Iterator[tuple[int, str]]:
    """Yield (round, name): every name once in each round, another one first each time."""
    names = list(variants)
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            yield number, name


def rounds_of(
    variants: dict[str, Callable[[], object]],
    rounds: int = 31,
    warmup: int = 3,
    device: str = "cpu",
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, numpy.ndarray]:
    """Run every variant once in each round, in rotating order.

    Args:
        variants: name → a call that does the whole work once.
        rounds: how many times each variant is timed.
        warmup: how many rounds are not counted.
        device: "cuda" for times between CUDA events, including waits for the host's launches.
        clock: gives seconds, on a CPU.

    Returns:
        name → (rounds,) seconds.
    """
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for number, name in turns(variants, warmup + rounds):
        elapsed = duration(variants[name], device, clock)
        if number >= warmup:
            seconds[name].append(elapsed)
    return {name: numpy.array(each) for name, each in seconds.items()}


def duration(
    call: Callable[[], object],
    device: str = "cpu",
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Return the seconds that one call takes."""
    if device != "cuda":
        start = clock()
        call()
        return clock() - start
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    first.record()
    call()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) / 1e3


def restart_keeping_memory() -> None:
    """Restart this program with an allocator that keeps freed memory, unless it has one."""
    if not KEEP_MEMORY.items() <= os.environ.items():
        os.execve(sys.executable, sys.orig_argv, {**os.environ, **KEEP_MEMORY})


def take_turns(
    variants: Mapping[str, Callable[[], Callable[[], object]]],
    rounds: int = 31,
    *,
    keep_memory: bool = True,
) -> dict[str, numpy.ndarray]:
    """Run every variant once in each round, in rotating order, each in a process of its own.

    Each timed call follows an untimed one, which refills the caches after other turns.

    Args:
        variants: name → a function, which can be pickled, that makes the call in the new process.
        rounds: how many times each variant is timed.
        keep_memory: let the allocator keep freed memory, which by default it may not.

    Returns:
        name → (rounds,) seconds.
    """
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    context = multiprocessing.get_context("spawn")
    ends: dict[str, Connection] = {}
    variables = KEEP_MEMORY if keep_memory else {}
    with mock.patch.dict(os.environ, variables), contextlib.ExitStack() as stack:
        for name, make in variants.items():
            ends[name], theirs = context.Pipe()
            process = context.Process(target=_serve, args=(make, theirs), daemon=True)
            process.start()
            theirs.close()
            stack.callback(process.join)
            stack.callback(ends[name].close)
            ends[name].recv()
        for _, name in turns(variants, rounds):
            time.sleep(SPINNING)
            ends[name].send("go")
            seconds[name].append(ends[name].recv())
    return {name: numpy.array(each) for name, each in seconds.items()}


def _serve(make: Callable[[], Callable[[], object]], end: Connection) -> None:
    """Time a call on every message, until the other end is closed."""
    call = make()
    for _ in range(2):
        call()
    end.send("ready")
    with contextlib.suppress(EOFError):
        while end.recv():
            call()
            end.send(duration(call))


def median_interval(values: numpy.ndarray) -> tuple[float, float, float]:
    """Return the median of one value for each round, and its 95 % bootstrap interval."""
    picks = numpy.random.default_rng(0).integers(0, len(values), size=(2000, len(values)))
    low, high = numpy.percentile(numpy.median(values[picks], axis=1), [2.5, 97.5])
    return float(numpy.median(values)), float(low), float(high)


def interleave(
    variants: dict[str, Callable[[], object]],
    reference: str,
    rounds: int = 31,
    warmup: int = 3,
    device: str = "cpu",
) -> dict[str, Timing]:
    """Time several variants of the same work against one of them.

    Args:
        variants: name → a call that does the whole work once.
        reference: the variant that stands as 1.00.
        rounds: how many times each variant is timed.
        warmup: how many rounds are not counted.
        device: as in ``rounds_of``.

    Returns:
        name → Timing.
    """
    return against(reference, rounds_of(variants, rounds, warmup, device))


def against(reference: str, seconds: Mapping[str, numpy.ndarray]) -> dict[str, Timing]:
    """Return name → Timing of seconds in each round, with one variant as 1.00."""
    return {
        name: Timing(float(numpy.median(each) * 1e3), *median_interval(each / seconds[reference]))
        for name, each in seconds.items()
    }


def reported(workload: str, timings: Mapping[str, Timing], rounds: int) -> list[dict[str, object]]:
    """Print the timings of a workload's variants and return the rows of a table of them."""
    rows: list[dict[str, object]] = []
    for variant, timing in timings.items():
        print(
            f"  {variant:34} {timing.milliseconds:8.1f} ms   {timing.ratio:6.3f}  "
            f"[{timing.low:.3f}, {timing.high:.3f}]",
            flush=True,
        )
        rows.append(
            {
                "workload": workload,
                "variant": variant,
                "milliseconds": f"{timing.milliseconds:.2f}",
                "ratio": f"{timing.ratio:.4f}",
                "low": f"{timing.low:.4f}",
                "high": f"{timing.high:.4f}",
                "rounds": rounds,
            }
        )
    return rows


def lost_by(chosen: str, timings: Mapping[str, Timing]) -> float:
    """Return by what share of the fastest variant's time a chosen variant is slower."""
    return timings[chosen].ratio / min(timing.ratio for timing in timings.values()) - 1


def machine(device: str = "cpu") -> str:
    """Return the name of the accelerator, or of the processor and what PyTorch uses of it."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    # Virtual machines hide the exact processor; its instructions make products up to 4× faster.
    instructions = torch.backends.cpu.get_cpu_capability()
    return f"{model} ({instructions}), {torch.get_num_threads()} threads"


def commit() -> str:
    """Return the short hash of the checkout, "unknown" outside one and without git."""
    if shutil.which("git") is None:
        return "unknown"
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=Path(__file__).parent, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.stdout.strip() or "unknown"


def parser_of(description: str, rounds: int) -> argparse.ArgumentParser:
    """Return a parser of the options of every benchmark: rounds, and where results go."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--no-csv", action="store_true", help="do not append to the results")
    parser.add_argument("--out", type=Path, help="folder of the results")
    return parser


def one_of(names: Iterable[str]) -> Callable[[str], str]:
    """Return an argparse type that accepts one of several names."""

    def check(name: str) -> str:
        if name not in names:
            known = ", ".join(map(repr, names))  # some hold commas
            raise argparse.ArgumentTypeError(f"{name!r} is not of {known}")
        return name

    return check


def write_csv(
    name: str, rows: Iterable[dict[str, object]], device: str = "cpu", folder: Path | None = None
) -> Path:
    """Append rows to ``FOLDER/NAME.csv``, each with the machine, versions, commit and date.

    A file with fewer or other columns is written again with the columns of both.
    """
    stamp = {
        "machine": machine(device),
        "torch": torch.__version__,
        "gradstats": gradstats.__version__,
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
    }
    folder = folder or RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.csv"
    table = [*read_csv(name, folder), *({**row, **stamp} for row in rows)]
    columns = dict.fromkeys(column for row in reversed(table) for column in row)
    # As a draft that is moved into place: a run that is killed here loses no earlier results.
    draft = path.with_suffix(".tmp")
    with draft.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(columns), restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)
    draft.replace(path)
    return path


def read_csv(name: str, folder: Path | None = None) -> list[dict[str, str]]:
    """Return the rows of ``FOLDER/NAME.csv``, none where there is no such file."""
    path = (folder or RESULTS) / f"{name}.csv"
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
