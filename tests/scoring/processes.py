"""Runs scoring calls in processes of their own, to be killed, limited, or to share the work.

    python -m tests.scoring.processes

One process imports PyTorch; each run is a fork of it. It takes commands from its standard input,
each a JSON list of strings: COMMAND, FOLDER, [ARGUMENTS]. It answers each with a JSON line: how the
runs ended, and what they wrote to standard error.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from torch import distributed, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import gradstats as gs
from gradstats.scoring import _tiles, _top
from tests.scoring.setting import RATES, loss_fn, make_setting, setting_state

CALLS = ("matrix", "top", "self")
# Bytes of the scores, in both forms, of eight training examples and six queries.
TWO_BATCHES = 16 * 8 * 6


def call(kind: str, out: Path | None, loss=loss_fn, **options):
    """Make one scoring call on the shared setting."""
    setting = make_setting()
    checkpoints = gs.Checkpoints(setting.states, lr=list(RATES))
    options = {"progress": False, "out": out, **options}
    if kind == "self":
        return gs.self_influence(setting.model, setting.train_batches, loss, checkpoints, **options)
    if kind == "top":
        # A budget of one chunk for each train batch.
        options = {"top_k": 3, "budget": 1, **options}
    return gs.influence(
        setting.model, setting.train_batches, setting.query_batches, loss, checkpoints, **options
    )


def arrays(kind: str, result) -> dict[str, np.ndarray]:
    """Return everything that a call computed, to be compared bit by bit."""
    if kind == "self":
        return {"values": result._values}
    if kind == "matrix":
        return {"raw": np.asarray(result), "cosine": np.asarray(result.cosine)}
    return {
        name: values
        for kind, held in result._lists.items()
        for name, values in zip(_top.names_of(*kind), held, strict=True)
    }


def fork(action: Callable[[], None]) -> int:
    """Start a process that does something, and return its id."""
    child = os.fork()
    if child:
        return child
    code = 1
    signal.alarm(300)  # which ends a process that waits for ever
    try:
        action()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def ended(child: int) -> int:
    """Return a process's exit code, or minus the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill_at(count: int, kind: str, out: Path) -> None:
    """Make a call that is killed at its count-th write, with half of the bytes written."""
    writes = 0
    put, fsync = _tiles.put, os.fsync

    def tick() -> bool:
        nonlocal writes
        writes += 1
        return writes == count

    def dying_put(file, data):
        if tick():
            put(file, data[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return put(file, data)

    def dying_fsync(descriptor):
        if tick():
            os.kill(os.getpid(), signal.SIGKILL)
        return fsync(descriptor)

    _tiles.put, os.fsync = dying_put, dying_fsync
    call(kind, out)


def slow_writing(seconds: float) -> None:
    """Have every file take long enough for another process to come in between."""
    fsync = os.fsync

    def slow_fsync(descriptor):
        time.sleep(seconds)
        return fsync(descriptor)

    os.fsync = slow_fsync


def list_at_once(out: Path) -> None:
    """Make the lists that another process makes in the same folder."""
    slow_writing(0.2)
    call("top", out)


def beside(number: int, size: int, out: Path) -> None:
    """Add three checkpoints to a folder that others fill too; the last process is killed."""
    setting = make_setting()
    states = [setting_state(setting.model, 3 * number + each) for each in range(3)]
    slow_writing(0.02)
    for each in range(3):
        if number == size - 1 and each == 1:
            os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
        gs.influence(
            setting.model, setting.train_batches, setting.query_batches, loss_fn,
            gs.Checkpoints(states[each : each + 1], lr=0.1), out=out, progress=False,
        )  # fmt: skip


def limit_at(count: int, out: Path) -> None:
    """Make a call whose files may not grow or be written any more from its count-th write on."""
    writes = 0
    put = _tiles.put

    def limited(file, data):
        nonlocal writes
        writes += 1
        if writes == count:
            resource.setrlimit(resource.RLIMIT_FSIZE, (16, 16))
        return put(file, data)

    _tiles.put = limited
    if count == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (256, 256))
    try:
        call("matrix", out)
    except gs.StoreError as error:
        resource.setrlimit(resource.RLIMIT_FSIZE, (16, 16))
        print(error, file=sys.stderr)
        return
    raise AssertionError("nothing was refused")


def normalised() -> nn.Module:
    """Return a model with buffers, whose values DistributedDataParallel exchanges in forwards."""
    return nn.Sequential(nn.BatchNorm1d(5, momentum=None).double(), make_setting().model)


def stopped_after_a_chunk(out: Path) -> None:
    """Make lists of two chunks in a call that fails once the first of them is on the disk."""
    save = _top.TopLists.save

    def failing(lists, *args):
        save(lists, *args)
        raise gs.StoreError("stopped")

    with mock.patch.object(_top.TopLists, "save", failing):
        try:
            call("top", out, budget=TWO_BATCHES)
        except gs.StoreError:
            return
    raise AssertionError("nothing was raised")


def share(rank: int, size: int, folder: Path) -> None:
    """Make every call as one of several processes, then one that fails in the last of them."""
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder / 'rendezvous'}", rank=rank, world_size=size,
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    examples = 0

    def counting(model, batch):
        nonlocal examples
        examples += len(batch[0])
        return loss_fn(model, batch)

    counting.__qualname__ = loss_fn.__qualname__
    for kind in CALLS:
        for name, out in (("memory", None), ("disk", folder / kind)):
            result = call(kind, out, loss=counting)
            np.savez(folder / f"{kind}-{name}-{rank}.npz", **arrays(kind, result))
    (folder / f"examples-{rank}").write_text(str(examples))

    setting, model = make_setting(), normalised()
    parallel = nn.parallel.DistributedDataParallel(model)
    for name, wrapped in (
        ("parallel", parallel), ("compiled", torch.compile(parallel, backend="eager")),
    ):  # fmt: skip
        state = {key: 2 * value for key, value in wrapped.state_dict().items()}
        table = gs.self_influence(
            wrapped, setting.train_batches, loss_fn, gs.Checkpoints([state], lr=0.1),
            progress=False,
        )  # fmt: skip
        np.save(folder / f"{name}-{rank}.npy", table.self_influence)

    def failing(model, batch):
        if rank == size - 1:
            raise ValueError("only here")
        return loss_fn(model, batch)

    try:
        call("matrix", None, loss=failing)
    except (ValueError, gs.GradStatsError) as error:
        (folder / f"error-{rank}").write_text(f"{type(error).__name__}: {error}")

    def unsent(model, batch):
        error = ValueError("no label")
        error.lock = threading.Lock()  # which no other process can be sent
        raise error

    # Of the first batch one process finds the losses for all.
    try:
        call("self", folder / "unsent", loss=unsent)
    except (ValueError, gs.GradStatsError) as error:
        (folder / f"unsent-{rank}").write_text(f"{type(error).__name__}: {error}")
    # Disks of their own: lists lie on that of the first process, a matrix would have to on all.
    own = folder / f"disk-{rank}"
    stopped_after_a_chunk(own)
    np.savez(folder / f"top-own-{rank}.npz", **arrays("top", call("top", own, budget=TWO_BATCHES)))
    try:
        call("matrix", folder / f"matrix-{rank}")
    except gs.StoreError as error:
        (folder / f"apart-{rank}").write_text(str(error))
    # An argument that is wrong in one process.
    for kind in CALLS:
        try:
            call(kind, None, **({"parameters": "nowhere"} if rank == size - 1 else {}))
        except gs.GradStatsError as error:
            (folder / f"argument-{kind}-{rank}").write_text(f"{type(error).__name__}: {error}")
    # A file that one process does not see.
    missing = folder / f"missing-{rank}.pt"
    torch.save(setting.states[0], missing)
    checkpoints = gs.Checkpoints(missing, lr=0.1)
    if rank == size - 1:
        missing.unlink()
    for name, score, loaders in (
        ("matrix", gs.influence, (setting.train_batches, setting.query_batches)),
        ("self", gs.self_influence, (setting.train_batches,)),
    ):
        try:
            score(setting.model, *loaders, loss_fn, checkpoints, progress=False)
        except gs.GradStatsError as error:
            (folder / f"missing-{name}-{rank}").write_text(str(error))
    try:
        call("matrix", folder / "matrix", parameters="0.*")
    except gs.StoreError as error:
        (folder / f"refused-{rank}").write_text(str(error))
    # Data, weights or a learning rate of its own in each process.
    numbered = TensorDataset(*setting.train, torch.arange(len(setting.train[0])))
    own_data = DataLoader(numbered, 2, sampler=DistributedSampler(numbered))
    own_state = {key: (1 + rank) * value for key, value in setting.states[0].items()}
    whole, state = DataLoader(numbered, 2), setting.states[0]
    for name, loader, own, rate in (
        ("data", own_data, state, 0.1), ("weights", whole, own_state, 0.1),
        ("learning rates", whole, state, 0.1 * (1 + rank)),
    ):  # fmt: skip
        try:
            gs.self_influence(
                setting.model, loader, lambda model, batch: loss_fn(model, batch[:2]),
                gs.Checkpoints([own], lr=rate), ids=2, progress=False,
            )  # fmt: skip
        except gs.GradStatsError as error:
            (folder / f"{name}-{rank}").write_text(str(error))
    # Queries of which one process has another label, in a batch that is neither first nor last.
    images, labels = (torch.cat([each, each, each]) for each in setting.query)
    labels[7] = (labels[7] + rank) % 3
    query = DataLoader(TensorDataset(images, labels), 2)
    try:
        gs.influence(
            setting.model, setting.train_batches, query, loss_fn,
            gs.Checkpoints(setting.states[:1], lr=0.1), out=folder / "queries", progress=False,
        )  # fmt: skip
    except gs.GradStatsError as error:
        (folder / f"queries-{rank}").write_text(str(error))
    # Whoever leaves first would break what the other is still receiving.
    distributed.barrier()
    distributed.destroy_process_group()


def run(command: str, folder: Path, *arguments: str) -> list[int]:
    """Run one command and return how its processes ended."""
    if command == "kill":
        kind, *counts = arguments
        return [
            ended(fork(lambda count=count: kill_at(int(count), kind, folder))) for count in counts
        ]
    if command == "limit":
        return [ended(fork(lambda each=each: limit_at(int(each), folder))) for each in arguments]
    size = int(arguments[0])
    actions = {
        "lists": lambda rank: list_at_once(folder),
        "beside": lambda rank: beside(rank, size, folder),
        "share": lambda rank: share(rank, size, folder),
    }
    children = [fork(lambda rank=rank: actions[command](rank)) for rank in range(size)]
    return [ended(child) for child in children]


def main() -> None:
    for line in sys.stdin:
        command, folder, *arguments = json.loads(line)
        standard_error = os.dup(2)
        reading, writing = os.pipe()  # not a file, whose size a command may limit
        os.dup2(writing, 2)
        os.close(writing)
        codes = run(command, Path(folder), *arguments)
        os.dup2(standard_error, 2)
        os.close(standard_error)
        with open(reading) as said:
            print(json.dumps([codes, said.read()]), flush=True)


if __name__ == "__main__":
    main()
