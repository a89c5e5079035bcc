"""What do per-example norms cost beside a plain training step, in time and in memory?

    python -m benchmarks.step_overhead [mlp cnn gpt ...] [--peers] [--compiled] [--rounds 31]
        [--providers norms vmap ...] [--device cuda] [--reduced] [--recorded] [--dtype bfloat16]
        [--in-a-row 8] [--tf32] [--trim] [--no-csv]

The reference is a plain forward and backward of the same model in the same precision, interleaved
with ours, with ours compiled or recorded, and with each other library; each of these is written
when it is done. What is wrong or cannot run a model has that in its row, and no time. On a CPU each
library takes its turns in a process of its own. Memory is the peak of what a step allocates: live
tensors on a CPU, the allocator's on a GPU.

Each step is waited for, unless several run in a row, as in training: the host then prepares the
next one while a GPU still runs the last.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import torch
from torch import nn

from benchmarks.checking import GIBIBYTE, Prepared, oracle, prepare, ready
from benchmarks.harness import (
    Timing,
    against,
    duration,
    interleave,
    machine,
    one_of,
    parser_of,
    take_turns,
    write_csv,
)
from benchmarks.ledger import peak_memory
from benchmarks.providers import (
    COMPILED,
    OURS,
    PEERS,
    PROVIDERS,
    RECORDED,
    REDUCED_LAUNCHES,
    Call,
)
from benchmarks.workloads import DEFAULT, DTYPES, WORKLOADS, Workload, build

# What takes longer than this many plain steps is timed in fewer rounds.
SLOW = 4.0
SLOW_SECONDS = 20.0


@dataclass(frozen=True)
class Conditions:
    """How providers are timed.

    Attributes:
        rounds: of those that are not slow.
        device: "cpu" or "cuda".
        dtype: of ``DTYPES``.
        limit: bytes of per-example gradients that a provider may hold.
        keep_memory: see ``take_turns``.
        in_a_row: steps that a GPU is given before one waits for it.
    """

    rounds: int
    device: str = "cpu"
    dtype: str = "float32"
    limit: float = 4 * GIBIBYTE
    keep_memory: bool = True
    in_a_row: int = 1


def measure(
    make: Callable[[], Workload], names: Sequence[str], conditions: Conditions
) -> list[dict[str, object]]:
    """Return all rows of ``measure_in_groups``, called with the same."""
    return list(chain.from_iterable(measure_in_groups(make, names, conditions)))


def groups_of(names: Sequence[str]) -> list[tuple[str, ...]]:
    """Return which providers are timed together, every other library by itself.

    The plain step is timed in each group, so that every ratio is of the same rounds; its own row
    is of the first.
    """
    names = tuple(dict.fromkeys(name for name in names if name != "plain"))
    kinds = OURS, COMPILED, REDUCED_LAUNCHES, RECORDED
    ours, *forms = (tuple(name for name in names if name in kind) for kind in kinds)
    others = [(name,) for name in names if not any(name in kind for kind in kinds)]
    groups = [group for group in (*forms, *others) if group]
    return [("plain", *ours), *(("plain", *group) for group in groups)]


def measure_in_groups(
    make: Callable[[], Workload], names: Sequence[str], conditions: Conditions
) -> Iterator[list[dict[str, object]]]:
    """Check and time providers on one workload, a group at a time.

    Args:
        make: makes the workload, on its device and in its precision, always the same; it can be
            pickled.
        names: keys of ``PROVIDERS``; "plain" is added.
        conditions: how they are timed.

    Yields:
        The rows of a group, one for each provider: time, ratio to the plain step of the same
        rounds, peak memory, error, or a note. The plain step's own is among the first rows.
    """
    work = make()
    expected = oracle(work)
    for number, group in enumerate(groups_of(names)):
        prepared = {
            name: prepare(PROVIDERS[name], work, expected, limit=conditions.limit) for name in group
        }
        calls = {name: each.call for name, each in prepared.items() if each.call is not None}
        # The plain step alone is timed once, and not for a library that cannot run.
        first = number == 0
        timings = timed_together(make, calls, conditions) if first or len(calls) > 1 else {}
        yield [
            row_of(work, name, prepared[name], timings.get(name), conditions)
            for name in group
            if first or name != "plain"
        ]


def timed_together(
    make: Callable[[], Workload], calls: dict[str, Call], conditions: Conditions
) -> dict[str, tuple[Timing, int]]:
    """Return the timings of some providers in the same rounds, and how many rounds these were.

    Args:
        make: makes the workload.
        calls: key of ``PROVIDERS`` → its call, "plain" among them.
        conditions: how they are timed.
    """
    device = conditions.device

    def run(names: list[str], rounds: int) -> dict[str, Timing]:
        if device == "cuda":
            steps = conditions.in_a_row
            chosen = {name: partial(in_a_row, calls[name], steps) for name in names}
            found = interleave(chosen, "plain", rounds, min(3, rounds), device)
            return {
                name: replace(timing, milliseconds=timing.milliseconds / steps)
                for name, timing in found.items()
            }
        makers = {name: partial(ready, make, name) for name in names}
        return against("plain", take_turns(makers, rounds, keep_memory=conditions.keep_memory))

    return timed(calls, conditions.rounds, device, run)


def in_a_row(call: Call, steps: int) -> None:
    """Do so many steps, of which only what they ask of a GPU themselves is waited for."""
    for _ in range(steps):
        call()


def row_of(
    work: Workload,
    name: str,
    prepared: Prepared,
    timing: tuple[Timing, int] | None,
    conditions: Conditions,
) -> dict[str, object]:
    """Return what a table says of one provider, and measure its memory.

    Args:
        work: the workload.
        name: key of ``PROVIDERS``.
        prepared: the provider, checked.
        timing: and the number of its rounds, None where there is nothing to time.
        conditions: of the timing.
    """
    provider, device = PROVIDERS[name], conditions.device
    row: dict[str, object] = {
        "workload": work.name,
        "variant": provider.label,
        "milliseconds": "",
        "ratio": "",
        "low": "",
        "high": "",
        "peak_bytes": "",
        "relative_error": f"{prepared.error:.1e}",
        "gradients": "yes" if provider.gradients else "no",
        "note": prepared.note,
        "device": device,
        "dtype": conditions.dtype,
        "float32_products": float32_products(device),
        "provider": provider.version,
        "rounds": "",
    }
    if timing is not None and prepared.call is not None:
        row["milliseconds"] = f"{timing[0].milliseconds:.3f}"
        for part in ("ratio", "low", "high"):
            row[part] = f"{getattr(timing[0], part):.3f}"
        # The ledger sees the operations that PyTorch dispatches, not those inside a graph; CUDA
        # graphs have their memory before they are called.
        if not provider.form or (provider.form == "compiled" and device == "cuda"):
            row["peak_bytes"] = peak_bytes(prepared.call, device)
        row["rounds"] = timing[1]
    return row


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
    for call in calls.values():
        call()  # a second call may compile once more
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
    # Libraries keep copies of the model, which nothing here can list otherwise. By its type: asked
    # by isinstance, what stands for a module that is not imported yet imports it, or complains.
    for item in gc.get_objects():
        if issubclass(type(item), nn.Parameter):
            item.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def choose_float32_products(tf32: bool) -> None:
    """Say whether PyTorch's products of float32 matrices may be of TF32: cuDNN's are by default.

    By the older setters, which keep the newer fp32_precision in step; after the newer ones
    torch.compile cannot read the setting.
    """
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32


def float32_products(device: str) -> str:
    """Return what products of float32 are made of on a device: "ieee" or "tf32"."""
    if device != "cuda":
        return "ieee"
    products = "tf32" if torch.get_float32_matmul_precision() != "highest" else "ieee"
    convolutions = "tf32" if torch.backends.cudnn.allow_tf32 else "ieee"
    return products if products == convolutions else f"{products}, convolutions {convolutions}"


def show(rows: list[dict[str, object]], plain: object) -> None:
    """Print rows of one workload, of which the plain step took so many bytes."""
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
        *(COMPILED if options.compiled else ()),
        *(REDUCED_LAUNCHES if options.reduced else ()),
        *(RECORDED if options.recorded else ()),
        *(PEERS if options.peers else ()),
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
    choose_float32_products(options.tf32)
    conditions = Conditions(
        options.rounds,
        options.device,
        options.dtype,
        limit * GIBIBYTE,
        not options.trim,
        options.in_a_row,
    )
    # The reports' tables compare steps that are waited for.
    waited_for = options.in_a_row == 1
    table = "step_overhead" if waited_for else "steps_in_a_row"
    more: dict[str, object] = {} if waited_for else {"in_a_row": options.in_a_row}
    plain: object = ""
    for number, rows in enumerate(measure_in_groups(make, names, conditions)):
        plain = rows[0]["peak_bytes"] if number == 0 else plain
        show(rows, plain)
        # Group by group: a run that is cut short keeps what it has.
        if not (options.no_csv or options.trim):
            write_csv(table, ({**row, **more} for row in rows), options.device, options.out)


def main() -> None:
    parser = parser_of(__doc__, rounds=31)
    parser.add_argument(
        "workloads", nargs="*", type=one_of(WORKLOADS), metavar="WORKLOAD",
        help=f"of {', '.join(WORKLOADS)}; {', '.join(DEFAULT)} by default",
    )  # fmt: skip
    parser.add_argument("--providers", nargs="+", choices=PROVIDERS, default=list(OURS))
    parser.add_argument("--peers", action="store_true", help="and all other libraries")
    parser.add_argument("--compiled", action="store_true", help="and ours under torch.compile")
    parser.add_argument(
        "--reduced", action="store_true", help="and ours compiled in the mode reduce-overhead"
    )
    parser.add_argument(
        "--recorded", action="store_true", help="and ours as CUDA graphs, which one launch replays"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument(
        "--tf32", action="store_true", help="products of float32 in TF32 on a GPU; exact without"
    )
    parser.add_argument(
        "--in-a-row", type=int, default=1, metavar="STEPS",
        help="steps that a GPU is given before one waits for it, in a table of their own",
    )  # fmt: skip
    parser.add_argument(
        "--limit", type=float, default=None, metavar="GIB",
        help="per-example gradients that a library may hold; 4 on a CPU, 48 on a GPU",
    )  # fmt: skip
    parser.add_argument(
        "--trim", action="store_true",
        help="let the C library give memory back as it does by default; not for the results",
    )  # fmt: skip
    options = parser.parse_args()
    if options.tf32 and options.device != "cuda":
        parser.error("--tf32 is a GPU's: give --device cuda with it")
    if options.in_a_row > 1 and options.device != "cuda":
        parser.error("--in-a-row is a GPU's: give --device cuda with it")
    for name in ("reduced", "recorded"):
        if getattr(options, name) and options.device != "cuda":
            parser.error(f"--{name} is a GPU's: give --device cuda with it")
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
