"""How do time and memory of norms grow with B, T and d, as multiples of a plain step?

    python -m benchmarks.scaling [B T d] [--providers norms vmap ...] [--rounds 9] [--no-csv]

One of the three is varied, the others stay at their middle. The model is layers of one width on
sequences, which every library in the comparison gets right; those that would hold more per-example
gradients than ``--limit`` are not run at that size.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from benchmarks.checking import GIBIBYTE
from benchmarks.harness import machine, one_of, parser_of, write_csv
from benchmarks.providers import PROVIDERS, elements
from benchmarks.step_overhead import Conditions, measure, show
from benchmarks.workloads import Workload, next_token

DEFAULT = (
    "norms", "training", "vmap", "vmap-chunks", "expanded-weights", "opacus-ghost", "backpack",
    "torchjd",
)  # fmt: skip
MIDDLE = {"B": 16, "T": 32, "width": 256}
VALUES = {
    "B": (2, 4, 8, 16, 32, 64, 128),
    "T": (1, 4, 16, 64, 256, 1024),
    "width": (32, 64, 128, 256, 512, 1024),
}
AXES = {"B": "B", "T": "T", "d": "width"}
LAYERS, CLASSES = 4, 16


def stack(sizes: dict[str, int], device: str = "cpu") -> Workload:
    """Return linear layers of one width on sequences, a loss at each position."""
    torch.manual_seed(0)
    width = sizes["width"]
    layers: list[nn.Module] = []
    for _ in range(LAYERS):
        layers += [nn.Linear(width, width), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(width, CLASSES))
    shape = (sizes["B"], sizes["T"])
    batch = (torch.randn(*shape, width), torch.randint(CLASSES, shape))
    name = ", ".join(f"{key}={value}" for key, value in sizes.items())
    return Workload(name, model, batch, next_token).on(device)


def main() -> None:
    parser = parser_of(__doc__, rounds=9)
    parser.add_argument(
        "axes", nargs="*", type=one_of(AXES), metavar="AXIS", help="of B, T, d; all by default"
    )
    parser.add_argument("--providers", nargs="+", choices=PROVIDERS, default=list(DEFAULT))
    parser.add_argument("--points", type=int, help="only the first sizes of each axis")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--limit", type=float, default=1.0, metavar="GIB")
    options = parser.parse_args()
    print(f"{machine(options.device)}, torch {torch.__version__}, float32")
    conditions = Conditions(options.rounds, options.device, limit=options.limit * GIBIBYTE)
    for axis in options.axes or AXES:
        for value in VALUES[AXES[axis]][: options.points]:
            sizes = {**MIDDLE, AXES[axis]: value}
            make = partial(stack, sizes, options.device)
            work = make()
            size = {"axis": axis, **sizes, "d": elements(work)}
            print(f"\n{axis}: {work.name}, d={size['d']:,}", flush=True)
            rows = measure(make, options.providers, conditions)
            show(rows, rows[0]["peak_bytes"])
            if not options.no_csv:
                found = [{**size, **row} for row in rows]
                write_csv("scaling", found, options.device, options.out)


if __name__ == "__main__":
    main()
