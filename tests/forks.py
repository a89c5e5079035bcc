"""Processes of their own that are forks of one: it has imported what they need, once."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch

METHOD = "forkserver"
CONTEXT = multiprocessing.get_context(METHOD)
# What cannot be imported is left out.
CONTEXT.set_forkserver_preload(
    ["tests.monitor.trainer_process", "tests.scoring.processes", "tests.test_peer_cases"]
)


def run_ranks(body: Callable[..., None], *arguments: Any) -> None:
    """Call ``body(rank, *arguments)`` in two processes at once; raise what they raise."""
    torch.multiprocessing.start_processes(body, arguments, nprocs=2, start_method=METHOD)


def run_each(body: Callable[..., Any], calls: Sequence[tuple]) -> list[tuple[int, Any]]:
    """Call ``body(*arguments)`` for each of some arguments, at once.

    Returns:
        for each its exit code, or minus the signal that killed it, and what it returned, or the
        traceback of what it raised; None if it was killed.
    """
    started = []
    for arguments in calls:
        receiver, sender = CONTEXT.Pipe(duplex=False)
        child = CONTEXT.Process(target=_run, args=(sender, body, arguments))
        child.start()
        sender.close()
        started.append((child, receiver))
    return [ended(*each) for each in started]


def ended(child, receiver) -> tuple[int, Any]:
    try:
        said = receiver.recv()
    except EOFError:
        said = None
    child.join()
    return child.exitcode, said


def _run(sender, body, arguments) -> None:
    try:
        sender.send(body(*arguments))
    except BaseException:
        sender.send(traceback.format_exc())
        raise
