"""Every benchmark of one machine, and the documentation's tables from them.

    python -m benchmarks.all [--device cuda] [--only NAME ...] [--seconds 270] [--out FOLDER]

Each part is a command of its own, printed before it runs; one that fails or is out of time does not
stop the others, and keeps what it has measured. The quick ones come first: what is cut short has
lost the least. With a folder the results are appended there, the documentation is left as it is,
and its tables come from the rows once they are added to benchmarks/results.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from pathlib import Path

from benchmarks.limited import run_python

CPU = {
    "operations": "benchmarks.op_overhead",
    "steps": "benchmarks.step_overhead mlp cnn gpt --peers --compiled",
    "models": "benchmarks.step_overhead small gpt-expanded lstm resnet convnext vit gpt2"
    " adapted pruned normalised --peers --rounds 9",
    "crossover": "benchmarks.crossover",
    "scaling": "benchmarks.scaling",
    "monitor": "benchmarks.monitor_overhead",
    "packed": "benchmarks.packed",
    "influence": "benchmarks.influence --train 512 --rounds 3",
    "labels": "benchmarks.wrong_labels",
    "products": "benchmarks.matrix_products",
    "pairs": "benchmarks.pair_forms",
    "convolutions": "benchmarks.convolution_forms",
}
CUDA = {
    "operations": "benchmarks.op_overhead --device cuda",
    "steps": "benchmarks.step_overhead mlp cnn gpt gpt-expanded small --peers --compiled --reduced"
    " --device cuda",
    "models": "benchmarks.step_overhead lstm resnet convnext vit gpt2 --peers --device cuda",
    "autocast": "benchmarks.step_overhead gpt2 vit --peers --compiled --device cuda"
    " --dtype autocast",
    "bfloat16": "benchmarks.step_overhead gpt2 llama --peers --compiled --device cuda"
    " --dtype bfloat16 --rounds 15",
    "graphs": "benchmarks.step_overhead vit resnet convnext --reduced --recorded --device cuda"
    " --dtype bfloat16 --rounds 11",
    "scaling": "benchmarks.scaling --device cuda --limit 16",
}
REPORT = "benchmarks.report"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help=f"of {', '.join({**CPU, **CUDA})}"
    )
    parser.add_argument("--seconds", type=float, help="for each part; without end by default")
    parser.add_argument("--out", type=Path, help="folder of the results")
    parser.add_argument("--dry-run", action="store_true", help="print the commands")
    options = parser.parse_args()
    parts = CUDA if options.device == "cuda" else CPU
    unknown = set(options.only or ()) - set(parts)
    if unknown:
        parser.error(f"--only: {', '.join(sorted(unknown))} is not of {', '.join(parts)}")
    chosen = [parts[name] for name in parts if not options.only or name in options.only]
    if options.out is None:
        chosen.append(REPORT)
    else:
        chosen = [f"{command} --out {shlex.quote(str(options.out))}" for command in chosen]
    failed = []
    for command in chosen:
        print(f"\n$ python -m {command}", flush=True)
        if options.dry_run:
            continue
        start = time.perf_counter()
        status = run_python(["-m", *shlex.split(command)], options.seconds)
        outcome = "out of time" if status is None else f"exit {status}"
        print(f"{time.perf_counter() - start:.0f} s, {outcome}", flush=True)
        if status != 0:
            failed.append(command)
    if failed:
        print(f"\nfailed: {'; '.join(failed)}")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
