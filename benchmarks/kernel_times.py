"""Where does the device's time go in a step? The kernels of each provider, slowest first.

    python -m benchmarks.kernel_times gpt2 --dtype bfloat16 [--out FOLDER] [--top 25]

Next to the sum over all kernels stand the time of a step and that in which the host has started all
of it: a step takes as long as the slower of device and host.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from pathlib import Path

import torch

from benchmarks.harness import machine, write_csv
from benchmarks.providers import PROVIDERS, Call
from benchmarks.step_overhead import choose_float32_products
from benchmarks.workloads import DTYPES, WORKLOADS, build

STEPS = 3


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def host_and_step(step: Call) -> tuple[float, float]:
    """Return the milliseconds until a call returns, and until the device is done, of many calls."""
    hosts, steps = [], []
    for _ in range(5 * STEPS):
        synchronize()
        start = time.perf_counter()
        step()
        hosts.append(time.perf_counter() - start)
        synchronize()
        steps.append(time.perf_counter() - start)
    return 1e3 * sorted(hosts)[len(hosts) // 2], 1e3 * sorted(steps)[len(steps) // 2]


def kernels_of(step: Call) -> tuple[Counter[str], Counter[str]]:
    """Return the microseconds and the calls of each kernel in one step, by name."""
    on_device = torch.cuda.is_available()
    chosen = torch.profiler.ProfilerActivity
    activities = [chosen.CPU, chosen.CUDA] if on_device else [chosen.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(STEPS):
            step()
        synchronize()
    times: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for event in profile.events() or ():
        if on_device and event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        spent = event.device_time if on_device else event.self_cpu_time_total
        times[event.name] += spent / STEPS
        calls[event.name] += 1 / STEPS
    return times, calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--providers", nargs="+", choices=PROVIDERS,
                        default=["plain", "norms", "training"])  # fmt: skip
    parser.add_argument("--top", type=int, default=25, help="kernels that are listed")
    parser.add_argument("--out", type=Path, help="folder of a table with all kernels")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    choose_float32_products(False)
    work = build(options.workload, device, options.dtype)
    print(f"{machine(device)}, torch {torch.__version__}, {work.name}, {options.dtype}")
    for name in options.providers:
        step = PROVIDERS[name].make(work)
        for _ in range(3):
            step()
        host, whole = host_and_step(step)
        times, calls = kernels_of(step)
        print(
            f"\n{PROVIDERS[name].label}: {whole:.2f} ms a step, {host:.2f} ms of the host, "
            f"{times.total() / 1e3:.2f} ms of {calls.total():.0f} kernels"
        )
        for kernel, spent in times.most_common(options.top):
            print(f"{spent:9.1f} µs {calls[kernel]:6.1f} x  {kernel[:100]}", flush=True)
        if options.out is not None:
            rows = [
                {
                    "workload": work.name,
                    "variant": PROVIDERS[name].label,
                    "dtype": options.dtype,
                    "kernel": kernel,
                    "microseconds": f"{spent:.1f}",
                    "calls": f"{calls[kernel]:.1f}",
                    "milliseconds": f"{whole:.3f}",
                    "host_milliseconds": f"{host:.3f}",
                }
                for kernel, spent in times.most_common()
            ]
            write_csv("kernel_times", rows, device, options.out)


if __name__ == "__main__":
    main()
