"""What does a monitor cost a training step, measured and not, and what do others cost?

python -m benchmarks.monitor_overhead [mlp cnn gpt] [--rounds 31] [--no-csv]

The reference is a plain forward and backward. "every = 50" is computed: one measured step and 49
that are not. Beside it stand Lightning's ``grad_norm`` (one norm for each parameter, no example
seen) and per-example norms by BackPACK on each step, on which Cockpit is built; BackPACK is left
out where it is not installed or cannot run the model.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

import gradstats as gs
from benchmarks.harness import (
    Timing,
    against,
    machine,
    one_of,
    parser_of,
    reported,
    take_turns,
    write_csv,
)
from benchmarks.providers import plain
from benchmarks.workloads import DEFAULT, WORKLOADS, Workload, build

EVERY = 50
MEASURED = ("monitor, norms", "monitor, alignments")
IDLE = "monitor, step not measured"
OURS = ("plain", *MEASURED, IDLE)


def monitored(work: Workload, alignment: bool, every: int = 1) -> Callable[[], object]:
    """Return a training step under a monitor: measured, or with ``every`` > 1 never."""
    model, batch = work.model, work.batch
    size = len(batch[0])
    ids = torch.arange(size)
    monitor = gs.Monitor(model, every, alignment=alignment)
    idle = int(every > 1)
    monitor.steps = idle

    def step():
        model.zero_grad()
        with monitor.step(size, ids):
            work.loss_fn(model, batch).mean().backward()
        if idle:
            monitor.steps = idle
        return monitor.metrics()

    return step


def lightning(work: Workload) -> Callable[[], object]:
    """Return a step followed by the norms of Lightning's utility, read as a logger reads them."""
    from lightning.pytorch.utilities import grad_norm

    def step():
        work.model.zero_grad()
        work.loss_fn(work.model, work.batch).mean().backward()
        norms = grad_norm(work.model, norm_type=2)
        return {name: float(value) for name, value in norms.items()}

    return step


def backpack(work: Workload) -> Callable[[], object]:
    """Return a step beside which BackPACK takes the norm of every example's gradient."""
    from backpack import backpack as extensions
    from backpack import extend
    from backpack.extensions import BatchL2Grad

    if not isinstance(work.model, nn.Sequential):
        raise NotImplementedError("the model is not a sequence of modules that BackPACK knows")
    model, loss = extend(copy.deepcopy(work.model)), extend(nn.CrossEntropyLoss())
    inputs, labels = work.batch

    def step():
        model.zero_grad()
        with extensions(BatchL2Grad()):
            loss(model(inputs), labels).backward()
        squares = sum(parameter.batch_l2 for parameter in model.parameters())
        return {"example_grad_norm/mean": len(inputs) * squares.sqrt().mean().item()}

    return step


VARIANTS: dict[str, Callable[[Workload], Callable[[], object]]] = {
    "plain": plain,
    MEASURED[0]: partial(monitored, alignment=False),
    MEASURED[1]: partial(monitored, alignment=True),
    IDLE: partial(monitored, alignment=True, every=EVERY),
    "Lightning grad_norm": lightning,
    "BackPACK norms": backpack,
}


def ready(workload: str, name: str) -> Callable[[], object]:
    """Return the call of one of ``VARIANTS`` on a workload of its own."""
    warnings.simplefilter("ignore")
    return VARIANTS[name](build(workload))


def runnable(work: Workload) -> dict[str, Callable[[], object]]:
    """Return the calls that are installed and serve a workload."""
    calls = {}
    for name, make in VARIANTS.items():
        try:
            call = make(work)
            call()
        except (ImportError, NotImplementedError, AttributeError, RuntimeError) as error:
            if name in OURS:
                raise
            print(f"  {name} left out: {type(error).__name__}: {str(error).splitlines()[0][:80]}")
        else:
            calls[name] = call
    return calls


def check(work: Workload, calls: dict[str, Callable[[], object]]) -> None:
    """Raise unless the numbers to be timed are right, against plain autograd and each other."""
    found: dict[str, Any] = {name: call() for name, call in calls.items()}
    losses = work.loss_fn(work.model, work.batch)
    parameters = list(work.model.parameters())
    mean = torch.autograd.grad(losses.mean(), parameters, retain_graph=True)
    norm = sum(gradient.double().square().sum() for gradient in mean).sqrt().item()
    for name in MEASURED:
        torch.testing.assert_close(found[name]["grad_norm"], norm, rtol=1e-4, atol=0)
    monitor = gs.Monitor(work.model, 1, alignment=False)
    with monitor.step(len(losses)):
        work.model.zero_grad()
        work.loss_fn(work.model, work.batch).mean().backward()
    record = monitor.examples(1)[0]
    gradients = torch.autograd.grad(losses[record.position], parameters)
    expected = sum(gradient.double().square().sum() for gradient in gradients).sqrt().item()
    torch.testing.assert_close(record.norm, expected, rtol=1e-4, atol=0)
    assert found[IDLE] == {}
    if "BackPACK norms" in found:
        name = "example_grad_norm/mean"
        theirs, ours = found["BackPACK norms"][name], found[MEASURED[0]][name]
        torch.testing.assert_close(theirs, ours, rtol=1e-3, atol=0)


def every_fifty(measured: Timing, idle: Timing) -> Timing:
    """Return the mean cost of a step when one in EVERY is measured."""

    def mean(name: str) -> float:
        return (getattr(measured, name) + (EVERY - 1) * getattr(idle, name)) / EVERY

    return Timing(*(mean(name) for name in ("milliseconds", "ratio", "low", "high")))


def main() -> None:
    parser = parser_of(__doc__, rounds=31)
    parser.add_argument(
        "workloads", nargs="*", type=one_of(WORKLOADS), help=f"{', '.join(DEFAULT)} by default"
    )
    options = parser.parse_args()
    print(f"{machine()}, torch {torch.__version__}")
    rows: list[dict[str, object]] = []
    for name in options.workloads or DEFAULT:
        work = build(name)
        print(f"\n{work.name} (bar {work.bar_training or float('nan'):.2f} on each step)")
        calls = runnable(work)
        check(work, calls)
        makers = {each: partial(ready, name, each) for each in calls}
        timings = against("plain", take_turns(makers, options.rounds))
        idle = timings[IDLE]
        for variant in MEASURED:
            timings[f"{variant}, every = {EVERY}"] = every_fifty(timings[variant], idle)
        rows += reported(work.name, timings, options.rounds)
    if not options.no_csv:
        print(f"\nappended to {write_csv('monitor_overhead', rows, folder=options.out).name}")


if __name__ == "__main__":
    main()
