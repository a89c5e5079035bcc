"""What does following one operation cost, in microseconds, whatever its size?

    python -m benchmarks.op_overhead [NAME ...] [--rounds 31] [--no-csv]

Small operations are stacked SHALLOW and DEEP times. What a tracked step takes beyond a plain one at
both depths gives the cost of one more operation (the slope) and of the call itself (the rest).
Norms alone skip the weight gradient that the plain step forms, and are credited with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.checking import oracle, prepare
from benchmarks.harness import (
    machine,
    median_interval,
    one_of,
    parser_of,
    restart_keeping_memory,
    rounds_of,
    write_csv,
)
from benchmarks.providers import OURS, PROVIDERS
from benchmarks.workloads import Workload

BATCH, WIDTH, POSITIONS = 8, 16, 4
SHALLOW, DEEP = 8, 72
BAR = {"Linear": 40.0}


class Scale(nn.Module):
    """A bare parameter that multiplies its input."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class EmbeddingSum(nn.Module):
    """The sum of several embeddings of the same tokens."""

    def __init__(self, layers: list[nn.Module]):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, tokens: Tensor) -> Tensor:
        result = self.layers[0](tokens)
        for layer in self.layers[1:]:
            result = result + layer(tokens)
        return result


def linear(bias: bool) -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH, bias=bias)
    nn.init.orthogonal_(layer.weight)  # a deep stack must neither vanish nor overflow
    return layer


def convolution() -> nn.Module:
    layer = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
    nn.init.dirac_(layer.weight)
    return layer


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "Linear": (lambda: linear(bias=True), (WIDTH,)),
    "Linear, no bias": (lambda: linear(bias=False), (WIDTH,)),
    "Linear, positions": (lambda: linear(bias=True), (POSITIONS, WIDTH)),
    "LayerNorm": (lambda: nn.LayerNorm(WIDTH), (WIDTH,)),
    "Conv2d": (convolution, (WIDTH, 4, 4)),
    "Embedding and add": (lambda: nn.Embedding(50, WIDTH), (POSITIONS,)),
    "bare scale": (Scale, (WIDTH,)),
}


def squares(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
    """Return half the squared output of each example."""
    return model(batch[0]).square().flatten(1).sum(1) / 2


def stack(name: str, depth: int) -> Workload:
    """Return a model of ``depth`` operations of one kind, and its batch."""
    make, shape = LAYERS[name]
    layers = [make() for _ in range(depth)]
    model: nn.Module
    if name.startswith("Embedding"):
        model, inputs = EmbeddingSum(layers), torch.randint(50, (BATCH, *shape))
    else:
        model, inputs = nn.Sequential(*layers), torch.randn(BATCH, *shape)
    return Workload(f"{name} × {depth}", model, (inputs,), squares)


def measure(name: str, rounds: int, device: str = "cpu") -> list[dict[str, object]]:
    """Return one row for each variant: microseconds for an operation and for the call."""
    calls = {}
    for depth in (SHALLOW, DEEP):
        work = stack(name, depth).on(device)
        expected = oracle(work)
        for provider in OURS:
            prepared = prepare(PROVIDERS[provider], work, expected)
            if prepared.call is None:
                raise SystemExit(f"{work.name}, {provider}: {prepared.note}")
            calls[provider, depth] = prepared.call
    # The calling thread's own time, because it leaves out what else the machine does.
    seconds = rounds_of(calls, rounds, device=device, clock=time.thread_time)
    plain = {depth: seconds.pop(("plain", depth)) for depth in (SHALLOW, DEEP)}
    step = (plain[DEEP] - plain[SHALLOW]) / (DEEP - SHALLOW)
    rows = []
    for variant in dict.fromkeys(variant for variant, _ in seconds):
        shallow, deep = (seconds[variant, depth] - plain[depth] for depth in (SHALLOW, DEEP))
        slope = (deep - shallow) / (DEEP - SHALLOW)
        median, low, high = median_interval(slope * 1e6)
        rows.append(
            {
                "operation": name,
                "variant": PROVIDERS[variant].label,
                "microseconds": f"{median:.1f}",
                "low": f"{low:.1f}",
                "high": f"{high:.1f}",
                "call_microseconds": f"{median_interval(shallow - SHALLOW * slope)[0] * 1e6:.0f}",
                "plain_microseconds": f"{median_interval(step)[0] * 1e6:.1f}",
                "rounds": rounds,
            }
        )
    return rows


def main() -> None:
    parser = parser_of(__doc__, rounds=31)
    layers = ", ".join(map(repr, LAYERS))  # their names hold commas
    parser.add_argument(
        "names", nargs="*", type=one_of(LAYERS), help=f"of {layers}; all by default"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    print(f"{machine(options.device)}, torch {torch.__version__}; microseconds beyond a plain step")
    print(f"{'':20} {'':20} {'each':>6} {'interval':>16} {'plain':>7} {'call':>7}")
    rows = []
    for name in options.names or LAYERS:
        torch.manual_seed(0)
        for row in measure(name, options.rounds, options.device):
            bar = f"   bar {BAR[name]:.0f}" if name in BAR else ""
            interval = f"[{row['low']}, {row['high']}]"
            print(
                f"{name:20} {row['variant']:20} {row['microseconds']:>6} {interval:>16} "
                f"{row['plain_microseconds']:>7} {row['call_microseconds']:>7}{bar}",
                flush=True,
            )
            rows.append(row)
    if not options.no_csv:
        print(f"\nappended to {write_csv('op_overhead', rows, options.device, options.out).name}")


if __name__ == "__main__":
    # With small tensors alone, each one of a few megabytes would be given back to the system.
    restart_keeping_memory()
    torch.set_num_threads(1)  # threads that wait for one another would hide what is asked for
    main()
