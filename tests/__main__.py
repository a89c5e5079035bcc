"""Run every lane of the tests, each in a process of its own:  python -m tests  [pytest options]

Triton's interpreter and its compiler cannot live in one process, and neither may touch the plain
lane, which must not see a CUDA device that is not there either. The plain lane is most of the work
and comes first, on all cores; then the lanes of the kernels share these.
"""

from __future__ import annotations

import os
import subprocess
import sys

PLAIN = ["tests", "--ignore=tests/kernels/interpreter", "--ignore=tests/kernels/compiled",
         "--ignore=tests/kernels/fake_device", "-n", "logical", "--dist", "worksteal"]  # fmt: skip
KERNELS = (
    ("kernels in Triton's interpreter", ["tests/kernels/interpreter"], {"TRITON_INTERPRET": "1"}),
    ("CUDA tensors on a fake device", ["tests/kernels/fake_device"],
     {"TRITON_INTERPRET": "1", "PYTEST_PLUGINS": "tests.kernels.fake_device.plugin"}),
    ("kernels compiled for real targets", ["tests/kernels/compiled"], {}),
)  # fmt: skip


def start(arguments: list[str], environment: dict[str, str], **options) -> subprocess.Popen:
    """Start pytest, each of its processes on one thread."""
    command = [sys.executable, "-m", "pytest", "-q", *arguments, *sys.argv[1:]]
    environment = {"OMP_NUM_THREADS": "1", **os.environ, **environment}
    return subprocess.Popen(command, env=environment, **options)


def main() -> int:
    failed = []
    name = "rules, models and contracts"
    print(f"\n{name}", flush=True)
    if start(PLAIN, {}).wait():
        failed.append(name)
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    # On two cores each lane is a single process: three of them keep both busy to the end.
    workers = str((os.cpu_count() or 1) // len(KERNELS))
    running = [
        (name, start([*paths, "-n", workers, "--dist", "worksteal"], environment, **pipes))
        for name, paths, environment in KERNELS
    ]
    for name, lane in running:
        said, _ = lane.communicate()
        print(f"\n{name}\n{said.decode()}", flush=True)
        if lane.returncode:
            failed.append(name)
    print(f"\nfailed: {', '.join(failed)}" if failed else "\nall lanes passed")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
