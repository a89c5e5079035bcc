"""Commands that end in time, with everything that they started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO

# What a command that is told to end may take to say what it had found.
GRACE = 5.0


def run_python(
    arguments: Sequence[str],
    seconds: float | None = None,
    output: IO[str] | None = None,
    variables: Mapping[str, str] | None = None,
) -> int | None:
    """Run this interpreter and return its exit status, None where it was out of time.

    Args:
        arguments: of the interpreter.
        seconds: how long it may take, ``GRACE`` included; None for as long as it likes.
        output: what it prints and what it complains of; None for where this process prints.
        variables: environment variables, beside this process's.
    """
    process = subprocess.Popen(
        [sys.executable, *arguments], stdout=output,
        stderr=None if output is None else subprocess.STDOUT,
        env={**os.environ, **(variables or {})}, start_new_session=True,
    )  # fmt: skip
    try:
        return process.wait(None if seconds is None else max(0.0, seconds - GRACE))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            pass
        return None
    finally:
        # Whatever computes on would slow down what is measured next. Its leader may be gone.
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
