"""Turns of benchmarks that tests take."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path


def noting(path: Path, name: str) -> Callable[[], None]:
    """Return a call that notes in a file who made it, where, and in which environment."""

    def call() -> None:
        setting = os.environ.get("MALLOC_TRIM_THRESHOLD_")
        with path.open("a") as file:
            file.write(f"{name} {os.getpid()} {setting}\n")

    return call


def in_this_process(makers: Mapping[str, Callable], rounds: int, keep_memory: bool):
    """Time what would be timed in processes of their own, once it was sent as it is to those."""
    from benchmarks import harness

    calls = {name: pickle.loads(pickle.dumps(make))() for name, make in makers.items()}
    return harness.rounds_of(calls, rounds)
