"""What do per-example norms cost beside a plain training step, in time and in memory?

    python -m benchmarks.step_overhead [mlp cnn gpt ...] [--peers] [--compiled] [--rounds 31]
        [--providers norms vmap ...] [--device cuda] [--dtype bfloat16] [--trim] [--no-csv]

The reference is a plain forward and backward of the same model in the same precision. What is wrong
or cannot run a model has that in its row, and no time. On a CPU each library takes its turns in a
process of its own. Memory is the peak of what a step allocates: live tensors on a CPU, the
allocator's on a GPU.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import nn

from benchmarks.harness import (
    Timing,
    against,
    duration,
    interleave,
    machine,
    take_turns,
    write_csv,
)
from benchmarks.ledger import peak_memory
from benchmarks.providers import (
    COMPILED,
    GIBIBYTE,
    OURS,
    PEERS,
    PROVIDERS,
    Call,
    oracle,
    prepare,
    ready,
)
from benchmarks.workloads import DEFAULT, DTYPES, WORKLOADS, Workload, build

# What takes longer than this many plain steps is timed in fewer rounds.
SLOW = 4.0
SLOW_SECONDS = 20.0


def measure(
    make: Callable[[], Workload],
    names: tuple[str, ...],
    rounds: int,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    limit: float = 4 * GIBIBYTE,
    keep_memory: bool = True,
) -> list[dict[str, object]]:
    """Check and time providers on one workload.

    Args:
        make: makes the workload, on its device and in its precision, always the same; it can be
            pickled.
        names: keys of ``PROVIDERS``; "plain" is added.
        rounds: of those that are not slow.
        device, dtype, limit: see ``prepare``.
        keep_memory: see ``take_turns``.

    Returns:
        One row for each provider: time, ratio to the plain step, peak memory, error, or a note.
    """
    names = tuple(dict.fromkeys(("plain", *names)))
    work = make()
    expected = oracle(work)
    prepared = {name: prepare(PROVIDERS[name], work, expected, limit=limit) for name in names}
    calls = {name: each.call for name, each in prepared.items() if each.call is not None}

    def run(names: list[str], rounds: int) -> dict[str, Timing]:
        if device == "cuda":
            chosen = {name: calls[name] for name in names}
            return interleave(chosen, "plain", rounds, min(3, rounds), device)
        makers = {name: partial(ready, make, name) for name in names}
        return against("plain", take_turns(makers, rounds, keep_memory=keep_memory))

    timings = timed(calls, rounds, device, run)
    rows: list[dict[str, object]] = []
    for name in names:
        provider, timing = PROVIDERS[name], timings.get(name)
        row: dict[str, object] = {
            "workload": work.name,
            "variant": provider.label,
            "milliseconds": "",
            "ratio": "",
            "low": "",
            "high": "",
            "peak_bytes": "",
            "relative_error": f"{prepared[name].error:.1e}",
            "gradients": "yes" if provider.gradients else "no",
            "note": prepared[name].note,
            "device": device,
            "dtype": dtype,
            "provider": provider.version,
            "rounds": "",
        }
        if timing is not None:
            row["milliseconds"] = f"{timing[0].milliseconds:.3f}"
            for part in ("ratio", "low", "high"):
                row[part] = f"{getattr(timing[0], part):.3f}"
            # The ledger sees the operations that PyTorch dispatches, not those inside a graph.
            if not provider.compiled or device == "cuda":
                row["peak_bytes"] = peak_bytes(calls[name], device)
            row["rounds"] = timing[1]
        rows.append(row)
    return rows


def timed(
    calls: dict[str, Call],
    rounds: int,
    device: str,
    run: Callable[[list[str], int], dict[str, Timing]],
) -> dict[str, tuple[Timing, int]]:
    """Return each call's timing and its number of rounds; slow ones have a run of their own.

    Args:
        calls: name → call.
        rounds: of those that are not slow.
        device: that they run on.
        run: times the calls of these names in so many rounds.
    """
    once = {name: duration(call, device) for name, call in calls.items()}
    slow = [name for name in calls if once[name] > SLOW * once["plain"]]
    fast = [name for name in calls if name not in slow]
    found = {name: (each, rounds) for name, each in run(fast, rounds).items()}
    if slow:
        fewer = int(SLOW_SECONDS / sum(once[name] for name in slow))
        fewer = max(min(rounds, 3), min(rounds, fewer))
        again = run(["plain", *slow], fewer)
        found.update({name: (again[name], fewer) for name in slow})
    return found


def peak_bytes(call: Call, device: str) -> int:
    """Return the most bytes alive at once during a call beyond those alive before it."""
    if device != "cuda":
        return peak_memory(call).peak
    gc.collect()
    # Gradients of the last call: a step would free them first, and seem to need less by that much.
    # Libraries keep copies of the model, which nothing here can list otherwise.
    for item in gc.get_objects():
        if isinstance(item, nn.Parameter):
            item.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def show(rows: list[dict[str, object]]) -> None:
    """Print one workload's rows."""
    plain = rows[0]["peak_bytes"]
    for row in rows:
        if row["note"]:
            print(f"  {row['variant']:32} {row['note']}")
            continue
        memory = f"{row['peak_bytes'] / plain:5.2f}" if row["peak_bytes"] else "    –"
        print(
            f"  {row['variant']:32} {float(row['milliseconds']):9.2f} ms   {row['ratio']:>7}  "
            f"[{row['low']}, {row['high']}]   memory {memory}"
        )


def report(name: str, options: argparse.Namespace) -> None:
    """Measure one workload, print its rows and append them to the results."""
    names = (
        *options.providers,
        *(PEERS if options.peers else ()),
        *(COMPILED if options.compiled else ()),
    )
    limit = options.limit or (48 if options.device == "cuda" else 4)
    make = partial(build, name, options.device, options.dtype)
    try:
        work = make()
    except ImportError as error:
        print(f"\n{name} left out: {error}")
        return
    bars = f" (bars {work.bar_norms} / {work.bar_training})" if work.bar_norms else ""
    print(f"\n{work.name}{bars}", flush=True)
    rows = measure(
        make, names, options.rounds, device=options.device, dtype=options.dtype,
        limit=limit * GIBIBYTE, keep_memory=not options.trim,
    )  # fmt: skip
    show(rows)
    # Workload by workload: a run that is cut short keeps what it has.
    if not (options.no_csv or options.trim):
        write_csv("step_overhead", rows, options.device, options.out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "workloads", nargs="*", metavar="WORKLOAD",
        help=f"of {', '.join(WORKLOADS)}; {', '.join(DEFAULT)} by default",
    )  # fmt: skip
    parser.add_argument("--providers", nargs="+", choices=PROVIDERS, default=list(OURS))
    parser.add_argument("--peers", action="store_true", help="and all other libraries")
    parser.add_argument("--compiled", action="store_true", help="and ours under torch.compile")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument(
        "--limit", type=float, default=None, metavar="GIB",
        help="per-example gradients that a library may hold; 4 on a CPU, 48 on a GPU",
    )  # fmt: skip
    parser.add_argument(
        "--trim", action="store_true",
        help="let the C library give memory back as it does by default; not for the results",
    )  # fmt: skip
    parser.add_argument("--no-csv", action="store_true", help="do not append to the results")
    parser.add_argument("--out", type=Path, help="folder of the results")
    options = parser.parse_args()
    unknown = [name for name in options.workloads if name not in WORKLOADS]
    if unknown:
        parser.error(f"{', '.join(unknown)} is not of {', '.join(WORKLOADS)}")
    print(f"{machine(options.device)}, torch {torch.__version__}, {options.dtype}", flush=True)
    for name in options.workloads or DEFAULT:
        # In a process of its own: graphs, modules and memory go with it.
        process = multiprocessing.get_context("spawn").Process(target=report, args=(name, options))
        process.start()
        process.join()
        if process.exitcode:
            sys.exit(process.exitcode)


if __name__ == "__main__":
    main()
