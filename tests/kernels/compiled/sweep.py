"""Every shipped configuration × {sm_80, sm_90, sm_100} × {aligned, unaligned}, in one command.

    python -m tests.kernels.compiled.sweep --store FILE

What the compiler made of a launch is appended to FILE, keyed by the kernel's source, its arguments,
the architecture and the compiler: a sweep that was stopped goes on where it was, and after a change
only what changed is compiled again.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import inspect
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import triton
from gradstats.kernels import _config

from tests.kernels.compiled import aot, cases, checks, launches, sass

# what is read off a compiled kernel is part of its key
READING = "".join(map(inspect.getsource, (checks.check_offsets, checks.check_tensor_cores, sass)))


@dataclasses.dataclass(frozen=True)
class Facts:
    """What is kept of a compiled launch; the complaints are those that need its whole text."""

    name: str
    shared: int
    registers: int
    spills: sass.Local
    tensor_cores: bool
    complaints: list[str]


def facts_of(launch: aot.Launch, case: cases.Case) -> Facts:
    try:
        compiled = aot.compile_launch(launch, case.architecture)
    except Exception as error:
        last = (str(error).strip().splitlines() or [""])[-1]
        message = f"{launch.kernel.fn.__name__} does not compile: {type(error).__name__}: {last}"
        return Facts(launch.kernel.fn.__name__, 0, 0, sass.Local(), False, [message])
    complaints = complaints_of(
        lambda: checks.check_no_atomics(compiled), lambda: checks.check_offsets(compiled)
    )
    rows = case.config.rows
    no_tensor_cores = complaints_of(
        lambda: checks.check_tensor_cores(compiled, case.architecture, rows)
    )
    numbers = (compiled.name, compiled.shared, compiled.registers, compiled.spills)
    return Facts(*numbers, not no_tensor_cores, complaints)


def complaints_of(*attempts) -> list[str]:
    """The messages of the checks that fail."""
    messages = []
    for attempt in attempts:
        try:
            attempt()
        except AssertionError as error:
            messages.append(str(error))
    return messages


def findings(facts: Facts, case: cases.Case) -> list[str]:
    """What is wrong with a launch, given the limits as they are now."""
    found = list(facts.complaints)
    found += complaints_of(
        lambda: checks.check_shared(facts, _config.shared_limit(case.architecture)),
        lambda: checks.check_spills(
            facts, checks.allowed_spills(case.operation, case.architecture, case.config)
        ),
    )
    if cases.needs_tensor_cores(case, facts.name) and not facts.tensor_cores:
        found.append(f"{facts.name}: no tensor-core instruction for sm_{case.architecture}")
    return found


def key_of(launch: aot.Launch, case: cases.Case) -> str:
    """What the compiler's output depends on, and what is read off it."""
    parts = (
        aot.source_of(launch).hash(),
        sorted(launch.options.items()),
        case.architecture,
        case.config.rows,  # which tensor-core instruction is looked for
        triton.__version__,
        READING,
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def forget_line_numbers() -> None:
    """Lets a kernel's hash depend on its text alone, not on where in its file it stands."""
    for module in (*launches.MODULES, *launches.DEVICE_FUNCTIONS):
        for value in vars(module).values():
            if isinstance(value, triton.runtime.JITFunction):
                value.starting_line_number = 0


class Store:
    """Facts of launches, in a file if there is one: what it holds is not compiled again."""

    def __init__(self, path: Path | None):
        forget_line_numbers()
        self.path = path
        self.known: dict[str, Facts] = {}
        if path is not None and path.exists():
            for line in path.read_text().splitlines():
                row = json.loads(line)
                key = row.pop("key")
                self.known[key] = Facts(**row | {"spills": sass.Local(*row["spills"])})

    def facts(self, launch: aot.Launch, case: cases.Case) -> Facts:
        key = key_of(launch, case)
        if key not in self.known:
            self.known[key] = facts_of(launch, case)
            if self.path is not None:
                row = {"key": key, **dataclasses.asdict(self.known[key])}
                with self.path.open("a") as output:
                    output.write(json.dumps(row) + "\n")
        return self.known[key]


def sweep(chosen: list[cases.Case], store: Store) -> Iterator[tuple[cases.Case, Facts]]:
    """The facts of every launch of some cases."""
    for case in chosen:
        for launch in launches.of(case):
            yield case, store.facts(launch, case)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--store", type=Path, required=True, help="file of what is known already")
    parser.add_argument("--operation", action="append", help="sweep only these operations")
    parser.add_argument(
        "--shard", default="1/1", metavar="I/N", help="the I-th of every N configurations"
    )
    arguments = parser.parse_args()
    index, count = map(int, arguments.shard.split("/"))
    chosen = [
        case
        for case in cases.cases()
        if not arguments.operation or case.operation in arguments.operation
    ]
    # what the gate compiles comes first, then each class of inputs' largest tile, and so on
    chosen.sort(key=lambda case: (not case.default, case.rank))
    chosen = chosen[index - 1 :: count]
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["TRITON_CACHE_DIR"] = scratch  # the store is the cache
        os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # triton 3.9 wants it said
        return report(chosen, arguments.store, scratch)


def report(chosen: list[cases.Case], store: Path, scratch: str) -> int:
    """Sweeps, prints what is found, and returns the exit status."""
    start, failed, done, launched = time.time(), {}, set(), 0
    spills: dict[tuple[str, int, str, str], sass.Local] = {}
    for case, facts in sweep(chosen, Store(store)):
        launched += 1
        if case not in done:
            done.add(case)
            if len(done) % 50 == 0:
                minutes = (time.time() - start) / 60
                print(f"{len(done)} of {len(chosen)} configurations, {minutes:.0f} min", flush=True)
                shutil.rmtree(scratch, ignore_errors=True)
        if any(facts.spills):
            spilled = (case.operation, case.architecture, str(case.config), facts.name)
            most = spills.get(spilled, sass.Local())
            spills[spilled] = sass.Local(*map(max, most, facts.spills))
        for finding in findings(facts, case):
            if (case, finding) not in failed:
                failed[case, finding] = None
                print(f"FAILED {case}: {finding}", flush=True)
    print(f"\ntriton {triton.__version__}: {len(done)} configurations, {launched} launches")
    print(f"{len(failed)} findings, {len(spills)} kernels and tiles that spill at all:")
    for spilled, most in sorted(spills.items()):
        print(f"  {spilled}: {most}")
    return bool(failed)


if __name__ == "__main__":
    raise SystemExit(main())
