"""Everything that needs a GPU, in one command: correctness first, then the kernels' speed.

    python -m benchmarks.gpu --out FOLDER

Nothing is timed unless the tests pass.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for logs and tables")
    folder = parser.parse_args().out
    folder.mkdir(parents=True, exist_ok=True)
    steps = {
        "tests": ["-m", "pytest", "-q", "-m", "gpu", "tests/kernels/gpu"],
        "kernels": ["-m", "benchmarks.bench_linear_kernels", "--out", str(folder / "kernels.csv")],
        "layers": ["-m", "benchmarks.bench_layer_kernels", "--out", str(folder / "layers.csv")],
    }
    for name, arguments in steps.items():
        done = subprocess.run(
            [sys.executable, *arguments], capture_output=True, text=True, check=False
        )
        (folder / f"{name}.log").write_text(done.stdout + done.stderr)
        print(f"{name}: exit {done.returncode}\n{done.stdout[-2000:]}", flush=True)
        if done.returncode:
            print(done.stderr[-2000:])
            return done.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
