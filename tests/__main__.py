"""Run every lane of the tests, each in a process of its own:  python -m tests  [pytest options]

Triton's interpreter and its compiler cannot live in one process, and neither may touch the plain
lane, which must not see a CUDA device that is not there either.
"""

from __future__ import annotations

import os
import subprocess
import sys

LANES = (
    ("rules, models and contracts", ["tests", "--ignore=tests/kernels/interpreter",
                                     "--ignore=tests/kernels/compiled",
                                     "--ignore=tests/kernels/fake_device"], {}),
    ("kernels in Triton's interpreter", ["tests/kernels/interpreter"], {"TRITON_INTERPRET": "1"}),
    ("CUDA tensors on a fake device", ["tests/kernels/fake_device"],
     {"TRITON_INTERPRET": "1", "PYTEST_PLUGINS": "tests.kernels.fake_device.plugin"}),
    ("kernels compiled for real targets", ["tests/kernels/compiled"], {}),
)  # fmt: skip


def main() -> int:
    failed = []
    for name, paths, environment in LANES:
        print(f"\n{name}", flush=True)
        # One process for each core, each on one thread.
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-n",
            "auto",
            "--dist",
            "worksteal",
            *paths,
        ]
        environment = {"OMP_NUM_THREADS": "1", **os.environ, **environment}
        if subprocess.run([*command, *sys.argv[1:]], env=environment, check=False).returncode:
            failed.append(name)
    print(f"\nfailed: {', '.join(failed)}" if failed else "\nall lanes passed")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
