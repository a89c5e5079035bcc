"""The linear-layer kernels on one GPU: checked first, then timed against their floors and rivals.

    python -m benchmarks.bench_linear_kernels --out benchmarks/results/linear_kernels.csv

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
import functools
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

CACHE_BYTES = 200 * 2**20
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclasses.dataclass(frozen=True)
class Shape:
    """A named layer: B examples of T positions."""

    name: str
    batch: int
    positions: int
    d_in: int
    d_out: int


SHAPES = (
    Shape("gpt2_qkv", 16, 1024, 768, 2304),
    Shape("gpt2_projection", 16, 1024, 768, 768),
    Shape("gpt2_mlp_up", 16, 1024, 768, 3072),
    Shape("gpt2_mlp_down", 16, 1024, 3072, 768),
    Shape("llama_7b_projection", 4, 2048, 4096, 4096),
    Shape("vit_b_mlp", 64, 197, 768, 3072),
    Shape("bert_short", 128, 64, 768, 768),
    Shape("unaligned", 16, 500, 1001, 1001),
    Shape("mlp_wide", 4096, 1, 4096, 4096),
    Shape("mlp_mnist", 256, 1, 784, 2048),
)
QUICK = ("gpt2_qkv", "mlp_wide")
DRY = (Shape("sequence", 2, 9, 32, 48), Shape("one_position", 5, 1, 32, 48))


@dataclasses.dataclass
class Provider:
    """One way to compute a statistic.

    `call` maps (a, g, weight) to a result; `flops` and `bytes` are those that the statistic
    requires, whatever this provider spends; `want` gives the fp64 result of the first examples.
    """

    operation: str
    name: str
    call: Callable
    flops: float
    bytes: float
    result: Callable | None = None  # picks what is compared out of the call's result
    reference: Callable | None = None  # (a, g, weight) in fp64 to what result should be


def providers(shape: Shape, dtype: torch.dtype, descriptors: bool) -> Iterator[Provider]:
    """Every kernel that serves this shape, beside what it competes with.

    With `descriptors`, the variants for compute capability 9.0 too.
    """
    from gradstats.kernels import (
        direct,
        direction,
        gram,
        pairwise,
        pairwise_direct,
        rank_one,
        vector,
    )
    from gradstats.kernels import weight_gradient as fused

    batch, positions, d_in, d_out = shape.batch, shape.positions, shape.d_in, shape.d_out
    size = torch.empty((), dtype=dtype).element_size()
    read = batch * positions * (d_in + d_out) * size
    product = 2.0 * batch * positions * d_in * d_out
    gradient_bytes = d_in * d_out * size

    def squares(a, g, weight):
        return torch.stack([(y.T @ x).square().sum() for x, y in zip(a, g, strict=True)])

    def first_examples(out):
        return out

    def loss(weight, a, g):
        return (torch.nn.functional.linear(a, weight) * g).sum()

    per_example = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))

    def flat_product(a, g, weight):
        return g.flatten(0, 1).T @ a.flatten(0, 1)

    if positions == 1:
        yield Provider(
            "rank_one", "gradstats", lambda a, g, w: rank_one.rank_one_sqnorm(a[:, 0], g[:, 0]),
            0.0, read, lambda out: out[0], squares,
        )  # fmt: skip
        yield Provider(
            "rank_one", "torch",
            lambda a, g, w: a.float().square().sum((1, 2)) * g.float().square().sum((1, 2)),
            0.0, read, first_examples, squares,
        )  # fmt: skip
    else:
        gram_flops = batch * positions * (positions + 1.0) * (d_in + d_out)
        yield Provider(
            "gram", "gradstats", lambda a, g, w: gram.gram_sqnorm(a, g),
            gram_flops, read, lambda out: out[0], squares,
        )  # fmt: skip
        yield Provider(
            "gram", "opacus formula",
            lambda a, g, w: ((a @ a.mT) * (g @ g.mT)).sum((1, 2), dtype=torch.float32),
            gram_flops, read,
        )  # fmt: skip
        yield Provider(
            "direct", "gradstats", lambda a, g, w: direct.direct_sqnorm(a, g),
            product, read, first_examples, squares,
        )  # fmt: skip
        if 4 * batch * d_in * d_out < 16 * 2**30:
            yield Provider(
                "direct", "einsum",
                lambda a, g, w: torch.einsum("bto,bti->boi", g, a).float().square().sum((1, 2)),
                product, read, first_examples, squares,
            )  # fmt: skip
            yield Provider(
                "direct", "vmap",
                lambda a, g, w: per_example(w, a, g).float().square().sum((1, 2)),
                product, read, first_examples, squares,
            )  # fmt: skip
        yield Provider(
            "vector", "gradstats", lambda a, g, w: vector.vector_sqnorm(g),
            0.0, batch * positions * d_out * size, first_examples,
            lambda a, g, w: g.sum(1).square().sum(1),
        )  # fmt: skip

    yield Provider("weight_gradient", "cublas", flat_product, product, read + gradient_bytes)
    # of one position norms need no gradient, and nothing beside a plain product
    fused_options: dict[str, dict] = {"gradstats": {}} if positions > 1 else {}
    if fused_options and d_in % 16 == 0 and d_out % 16 == 0 and descriptors:
        fused_options["gradstats descriptors"] = {"descriptors": True}
        fused_options["gradstats pointers"] = {"descriptors": False}
    for name, options in fused_options.items():
        yield Provider(
            "weight_gradient", name,
            lambda a, g, w, options=options: fused.weight_gradient_sqnorm(a, g, **options),
            product, read + gradient_bytes, lambda out: out[1], squares,
        )  # fmt: skip

    if batch * positions <= 8192 or positions == 1:
        pair_flops = 2.0 * batch**2 * positions**2 * (d_in + d_out)
        yield Provider(
            "pairwise_gram", "gradstats", lambda a, g, w: pairwise.pairwise_gram(a, g, a, g),
            pair_flops, read + 4 * batch**2, lambda out: out.diagonal(), squares,
        )  # fmt: skip
        if positions == 1:
            yield Provider(
                "pairwise_gram", "torch",
                lambda a, g, w: (a[:, 0] @ a[:, 0].T) * (g[:, 0] @ g[:, 0].T),
                pair_flops, read + 4 * batch**2,
            )  # fmt: skip
    if positions > 1:
        yield Provider(
            "pairwise_direct", "gradstats",
            lambda a, g, w: pairwise_direct.pairwise_direct(a, g, a, g),
            product + 2.0 * batch**2 * d_in * d_out, read, lambda out: out.diagonal(), squares,
        )  # fmt: skip
    yield Provider(
        "direction", "gradstats", lambda a, g, w: direction.direction_inner(a, g, w),
        product, read + gradient_bytes, first_examples,
        lambda a, g, w: ((g @ w) * a).sum((1, 2)),
    )  # fmt: skip
    yield Provider(
        "direction", "torch",
        lambda a, g, w: ((g @ w).float() * a.float()).sum((1, 2)), product, read + gradient_bytes,
    )  # fmt: skip


def operands(shape: Shape, dtype: torch.dtype, seed: int, device: str = "cuda"):
    """(a, g, weight) of random data."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def random(*size):
        return torch.randn(size, generator=generator, device=device).to(dtype)

    a = random(shape.batch, shape.positions, shape.d_in)
    g = random(shape.batch, shape.positions, shape.d_out)
    return a, g, random(shape.d_out, shape.d_in)


def error(provider: Provider, inputs, examples: int = 4) -> float | None:
    """Largest relative error over the first examples, of random data, against fp64."""
    if provider.result is None or provider.reference is None:
        return None
    got = provider.result(provider.call(*inputs))[:examples].double()
    a, g, weight = inputs
    want = provider.reference(a[:examples].double(), g[:examples].double(), weight.double())
    return float(((got - want).abs() / want.abs().clamp_min(want.abs().mean())).max())


def time_graph(call: Callable, sets: list, rounds: int = 25) -> tuple[float, float, float]:
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
    for _ in range(rounds):
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
        "commit": output("git", "rev-parse", "--short", "HEAD"),
        "date": datetime.date.today().isoformat(),
    }


def bench(
    shape: Shape, dtype_name: str, limits: tuple[float, float], meter: Meter
) -> Iterator[dict]:
    """One row per operation and provider."""
    dtype = DTYPES[dtype_name]
    inputs = operands(shape, dtype, 0, meter.device)
    own = sum(operand.numel() * operand.element_size() for operand in inputs)
    count = max(2, min(32, -(-CACHE_BYTES // own)))
    sets = rotated(inputs, count, meter, lambda seed: operands(shape, dtype, seed, meter.device))
    on_gpu = meter.device == "cuda"
    descriptors = on_gpu and torch.cuda.get_device_capability() >= (9, 0)
    for provider in providers(shape, dtype, descriptors):
        row = dataclasses.asdict(shape) | {"dtype": dtype_name}
        yield row | measure(provider, inputs, sets, limits, error, meter)


def rotated(inputs, count: int, meter: Meter, another: Callable) -> list:
    """As many sets of inputs as the cache does not hold together; in a dry run the first alone."""
    return [inputs, *map(another, range(1, count if meter.device == "cuda" else 1))]


def measure(
    provider: Provider,
    inputs,
    sets: list,
    limits: tuple[float, float],
    error: Callable[[Provider, tuple], float | None],
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
        off = error(provider, inputs)
        if provider.name.startswith("gradstats") and off is not None and not off < 1e-3:
            return row | {"note": f"wrong by {off:.3g}, not timed"}
        memory = meter.peak(provider.call, inputs)
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


COLUMNS = (
    "operation provider name batch positions d_in d_out dtype ms ms_20 ms_80 floor_ms "
    "percent_of_floor tflops gigabytes_per_second peak_bytes error flops bytes note "
    "gpu driver torch triton commit date"
).split()


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
    if options.dry_run:
        return IN_A_DRY_RUN
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    return ON_GPU


def main(arguments: list[str] | None = None) -> int:
    parser = parser_of(__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=[shape.name for shape in SHAPES])
    options = parser.parse_args(arguments)
    meter = meter_of(parser, options)
    names = options.shapes or (QUICK if options.quick else [shape.name for shape in SHAPES])
    shapes = DRY if options.dry_run else [shape for shape in SHAPES if shape.name in names]
    dtypes = options.dtypes or (["bf16"] if options.quick else ["bf16", "fp32"])

    def work() -> Iterator[tuple[str, Callable[[], Iterator[dict]]]]:
        for dtype_name in dtypes:
            limits = meter.ceilings(DTYPES[dtype_name])
            bandwidth, rate = limits[0] / 1e12, limits[1] / 1e12
            print(f"{dtype_name}: copy {bandwidth:.2f} TB/s, matmul {rate:.0f} TFLOP/s")
            for shape in shapes:
                yield shape.name, functools.partial(bench, shape, dtype_name, limits, meter)

    return write(options, COLUMNS, work())


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


if __name__ == "__main__":
    raise SystemExit(main())
