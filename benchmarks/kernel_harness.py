"""How kernels are checked, timed and written down: what the scripts for kernels share.

A kernel's floor is the larger of its bytes over the measured copy bandwidth and its required
operations over the measured matrix rate of the same dtype, both measured in the same run. Every
call is timed inside a CUDA graph that rotates over input sets larger than the L2 cache. A kernel
whose result is off its float64 reference is reported and not timed; rows are written as they come.
With --dry-run small shapes are interpreted on the CPU (TRITON_INTERPRET=1), each call timed once:
that shows that the script runs to its end, and no more.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import datetime
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from benchmarks.harness import commit

CACHE_BYTES = 200 * 2**20
# What rounding does to Gram forms and how much is accepted: `gradstats.kernels.guard.Rounding`.
ROUNDING = (2.0**-22, 2.0**-24, 0.0, 1e-4)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Columns of every table, after those that say which layer it was.
MEASURED = (
    "dtype ms ms_20 ms_80 floor_ms percent_of_floor tflops gigabytes_per_second peak_bytes error "
    "flops bytes note gpu driver torch triton commit date"
).split()

# (a, g, weight) of random data; what a layer reads may be integers, or images, in place of a.
Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Provider:
    """One way to compute a statistic of a layer.

    Attributes:
        operation: what is computed, as tables name it.
        name: who computes it.
        call: takes the operands.
        flops, bytes: those that the statistic requires, whatever this provider spends.
        reference: what one value for each example should be, from the operands of the first ones in
            fp64; None for what nobody compares.
        result: picks these values out of what the call returns.
    """

    operation: str
    name: str
    call: Callable
    flops: float
    bytes: float
    reference: Callable | None = None
    result: Callable = lambda returned: returned


def error(provider: Provider, inputs: Operands) -> float | None:
    """Largest relative error over the first four examples, of random data, against fp64."""
    if provider.reference is None:
        return None
    got = provider.result(provider.call(*inputs))[:4].double()
    first, g, weight = inputs
    exact = (first[:4], g[:4], weight)
    want = provider.reference(*(x.double() if x.is_floating_point() else x for x in exact))
    return float(((got - want).abs() / want.abs().clamp_min(want.abs().mean())).max())


def time_graph(call: Callable, sets: list) -> tuple[float, float, float]:
    """(median, 20th, 80th percentile) milliseconds of one call, over rotated input sets."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for inputs in sets:
            call(*inputs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for inputs in sets:
            call(*inputs)
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(25):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / len(sets))
    del graph
    low, *_, high = statistics.quantiles(times, n=5)
    return statistics.median(times), low, high


def peak_bytes(call: Callable, inputs) -> int:
    """Device memory that a call needs beyond its inputs."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call(*inputs)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def ceilings(dtype: torch.dtype) -> tuple[float, float]:
    """(bytes per second of a copy, operations per second of a matrix product), measured."""
    source = torch.randn(2**28, device="cuda")
    target = torch.empty_like(source)
    milliseconds, _, _ = time_graph(lambda: target.copy_(source), [()] * 4)
    bandwidth = 2 * source.numel() * 4 / milliseconds * 1e3
    side = 8192 if dtype != torch.float32 else 4096
    left, right = (torch.randn(side, side, device="cuda").to(dtype) for _ in range(2))
    milliseconds, _, _ = time_graph(lambda: left @ right, [()] * 4)
    return bandwidth, 2.0 * side**3 / milliseconds * 1e3


@dataclasses.dataclass(frozen=True)
class Meter:
    """Where calls run and how they are measured."""

    device: str
    time: Callable  # (call, input sets) to (median, low, high) milliseconds
    peak: Callable  # (call, inputs) to bytes
    ceilings: Callable  # dtype to (bytes per second, operations per second)
    check: Callable  # raises where no more calls can run


def time_once(call: Callable, sets: list) -> tuple[float, float, float]:
    """The milliseconds of one call, three times over."""
    start = time.perf_counter()
    call(*sets[0])
    return ((time.perf_counter() - start) * 1e3,) * 3


ON_GPU = Meter("cuda", time_graph, peak_bytes, ceilings, torch.cuda.synchronize)
IN_A_DRY_RUN = Meter(
    "cpu", time_once, lambda call, inputs: 0, lambda dtype: (1e12, 1e12), lambda: None
)


def environment() -> dict[str, str]:
    """What a row was measured on, with which versions, and when."""
    import triton

    def output(*command):
        if shutil.which(command[0]) is None:
            return "unknown"
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stdout.strip().splitlines()[0] if done.stdout.strip() else "unknown"

    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "driver": output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
    }


def bench(
    layer: dict,
    providers: Iterator[Provider],
    operands: Callable[[int], Operands],
    most_sets: int,
    limits: tuple[float, float],
    meter: Meter,
) -> Iterator[dict]:
    """One row for each operation and provider of a layer.

    Args:
        layer: the columns that say which it is.
        providers: of the layer.
        operands: draws a set of inputs from a seed.
        most_sets: how many of them may exist at once.
        limits: of ``Meter.ceilings``.
        meter: where calls run and how they are measured.
    """
    sets = [operands(0)]
    if meter.device == "cuda":
        # As many as the cache does not hold together.
        own = sum(operand.numel() * operand.element_size() for operand in sets[0])
        sets += map(operands, range(1, max(2, min(most_sets, -(-CACHE_BYTES // own)))))
    for provider in providers:
        yield layer | measure(provider, sets, limits, meter)


def measure(
    provider: Provider,
    sets: list[Operands],
    limits: tuple[float, float],
    meter: Meter,
) -> dict:
    """What one provider takes, if its result is right; rivals of ours may round as they like."""
    bandwidth, rate = limits
    row = {
        "operation": provider.operation,
        "provider": provider.name,
        "flops": provider.flops,
        "bytes": provider.bytes,
    }
    try:
        off = error(provider, sets[0])
        if provider.name.startswith("gradstats") and off is not None and not off < 1e-3:
            return row | {"note": f"wrong by {off:.3g}, not timed"}
        memory = meter.peak(provider.call, sets[0])
        median, low, high = meter.time(provider.call, sets)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return row | {"note": "out of memory"}
    except Exception as problem:
        # what cannot be compiled, run or captured in a graph must not end the run, unless the
        # device is lost: then this raises again, as everything after it would
        meter.check()
        return row | {"note": f"failed: {(str(problem).splitlines() or [''])[0][:80]}"}
    floor = max(provider.bytes / bandwidth, provider.flops / rate) * 1e3
    return row | {
        "error": off,
        "ms": median,
        "ms_20": low,
        "ms_80": high,
        "floor_ms": floor,
        "percent_of_floor": 100 * floor / median,
        "tflops": provider.flops / median / 1e9,
        "gigabytes_per_second": provider.bytes / median / 1e6,
        "peak_bytes": memory,
        "note": "",
    }


def parser_of(description: str) -> argparse.ArgumentParser:
    """The options that the scripts for kernels share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, help="CSV file to append to")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES)
    parser.add_argument("--quick", action="store_true", help="a few shapes in bf16 alone")
    parser.add_argument("--seconds", type=float, help="begin with no further shape after this time")
    parser.add_argument("--dry-run", action="store_true", help="small shapes, interpreted")
    return parser


def meter_of(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Meter:
    """The meter that the options ask for; an error of the parser without a GPU."""
    if options.dry_run:
        return IN_A_DRY_RUN
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    return ON_GPU


def write(
    options: argparse.Namespace,
    columns: list[str],
    work: Iterator[tuple[str, Callable[[], Iterator[dict]]]],
) -> int:
    """Prints and appends the rows of one piece of work after the other; the exit status."""
    stamp, start, failed = environment(), time.monotonic(), 0
    print(", ".join(f"{key} {value}" for key, value in stamp.items()))
    for name, rows in work:
        if options.seconds is not None and time.monotonic() - start > options.seconds:
            print(f"{name}: left out, {options.seconds:.0f} s are over", flush=True)
            continue
        for row in rows():
            show(name, row)
            append(options.out, columns, [row | stamp])
            failed += row["provider"].startswith("gradstats") and "ms" not in row
    print(f"{failed} kernels failed" if failed else "all kernels are right")
    return int(failed > 0)


def show(name: str, row: dict) -> None:
    """Prints one row."""
    timing = row["note"]
    if "ms" in row:
        timing = f"{row['ms']:9.4f} ms  {row['percent_of_floor']:5.1f} % of floor"
    label = f"{name:24} {row['dtype']} {row['operation']:16} {row['provider']:30}"
    print(label, timing, flush=True)


def append(path: Path | None, columns: list[str], rows: list[dict]) -> None:
    """Appends rows to a CSV file, which is started if it does not exist."""
    if path is None:
        return
    new = not path.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=columns, restval="")
        if new:
            writer.writeheader()
        writer.writerows(rows)
