"""What do norms cost beside a plain training step, in time and in memory?

python -m benchmarks.step_overhead [mlp cnn gpt] [--rounds 31] [--no-csv]
"""

from __future__ import annotations

import argparse

import torch

import gradstats as gs
from benchmarks.harness import interleave, machine, write_csv
from benchmarks.ledger import peak_memory
from benchmarks.workloads import WORKLOADS, Workload


def variants(work: Workload) -> dict:
    """Return the calls to compare: a plain step, norms alone, norms beside the step."""

    def plain():
        work.model.zero_grad()
        work.loss_fn(work.model, work.batch).mean().backward()

    def norms():
        return gs.per_example_norms(work.model, work.batch, work.loss_fn)

    def training():
        work.model.zero_grad()
        with gs.track(work.model, batch_size=len(work.batch[0])) as tracker:
            tracker.backward(work.loss_fn(work.model, work.batch))
        return tracker.stats

    return {"plain": plain, "norms": norms, "norms and gradients": training}


def check(work: Workload, calls: dict) -> None:
    """Raise unless the numbers to be timed are right, on a few examples, against plain autograd."""
    norms = calls["norms"]()
    beside = calls["norms and gradients"]()
    losses = work.loss_fn(work.model, work.batch)
    for example in (0, len(losses) - 1):
        gradients = torch.autograd.grad(
            losses[example], list(work.model.parameters()), retain_graph=True
        )
        expected = sum(gradient.double().square().sum() for gradient in gradients)
        for got in (norms.sqnorm[example], beside.sqnorm[example]):
            torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workloads", nargs="*", help=f"of {', '.join(WORKLOADS)}; all by default")
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--no-csv", action="store_true", help="do not append to the results")
    options = parser.parse_args()
    print(f"{machine()}, torch {torch.__version__}")
    rows = []
    for name in options.workloads or WORKLOADS:
        torch.manual_seed(0)
        work = WORKLOADS[name]()
        calls = variants(work)
        check(work, calls)
        timings = interleave(calls, "plain", options.rounds)
        peaks = {}
        for variant, call in calls.items():
            work.model.zero_grad()
            peaks[variant] = peak_memory(call).peak
        print(f"\n{work.name} (bars {work.bar_norms:.2f} / {work.bar_training:.2f})")
        for variant, timing in timings.items():
            memory = peaks[variant] / peaks["plain"]
            print(
                f"  {variant:20} {timing.milliseconds:8.1f} ms   {timing.ratio:5.2f}  "
                f"[{timing.low:.2f}, {timing.high:.2f}]   memory {memory:5.2f}"
            )
            rows.append(
                {
                    "workload": work.name,
                    "variant": variant,
                    "milliseconds": f"{timing.milliseconds:.2f}",
                    "ratio": f"{timing.ratio:.3f}",
                    "low": f"{timing.low:.3f}",
                    "high": f"{timing.high:.3f}",
                    "peak_bytes": peaks[variant],
                    "rounds": options.rounds,
                }
            )
    if not options.no_csv:
        print(f"\nappended to {write_csv('step_overhead', rows).name}")


if __name__ == "__main__":
    main()
