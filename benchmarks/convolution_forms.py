"""Do a convolution's norms take the faster way, and as many examples at once as is best?

For layers of convolutional networks the per-example gradients are formed by convolutions, with the
examples as groups or one by one, or patches are written out, for outer products of them in whatever
form is best. All are timed in one run, for the norms alone and with the weight gradient, and the
cost model's choice is compared with the fastest.

    python -m benchmarks.convolution_forms [--rounds 9] [--no-csv]
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from benchmarks.harness import interleave, lost_by, machine, parser_of, write_csv
from gradstats._factors import ConvolutionGeometry, Patches
from gradstats.contractions import _outer, _patches

EXAMPLES = 16
WAYS = ("patches", "groups", "alone")
WORKSPACE = 256 * 1024 * 1024


class Layer(NamedTuple):
    """A square convolution, padded by half its kernel."""

    channels: int
    outputs: int
    kernel: int
    stride: int
    size: int
    groups: int = 1


LAYERS = (
    Layer(3, 64, 7, 2, 64), Layer(3, 64, 7, 2, 224), Layer(3, 64, 3, 1, 32),
    Layer(3, 96, 4, 4, 64), Layer(1, 32, 3, 1, 28), Layer(1, 6, 5, 1, 28), Layer(6, 16, 5, 1, 14),
    Layer(1, 16, 8, 2, 28), Layer(16, 32, 4, 2, 13),
    Layer(16, 16, 3, 1, 32), Layer(32, 32, 3, 1, 16), Layer(64, 64, 3, 1, 8),
    Layer(64, 64, 3, 1, 16), Layer(128, 128, 3, 1, 8), Layer(256, 256, 3, 1, 4),
    Layer(512, 512, 3, 1, 2), Layer(64, 64, 3, 1, 56), Layer(128, 128, 3, 1, 28),
    Layer(256, 256, 3, 1, 14), Layer(512, 512, 3, 1, 7), Layer(96, 96, 7, 1, 16, groups=96),
    Layer(384, 384, 7, 1, 4, groups=384),
)  # fmt: skip


def factor_of(layer: Layer) -> Patches:
    """Return the factor of a layer, of random numbers."""
    channels, outputs, kernel, stride, size, groups = layer
    padding = kernel // 2
    positions = (size + 2 * padding - kernel) // stride + 1
    return Patches(
        torch.randn(EXAMPLES, channels, size, size),
        torch.randn(EXAMPLES, outputs, positions, positions),
        (outputs, channels // groups, kernel, kernel),
        ConvolutionGeometry((stride, stride), (padding, padding), (1, 1), groups),
    )


def ways(factor: Patches, with_sum: bool) -> dict[str, Callable[[], object]]:
    """Return all ways to a factor's norms, and to its sum where it is wanted."""
    contract = _outer.sqnorm_and_sum if with_sum else _outer.sqnorm

    def of_patches() -> list:
        parts = _patches._pieces(factor, WORKSPACE)
        return [contract(factor.select(rows).unfolded(), WORKSPACE) for rows in parts]

    convolved = partial(_patches._convolved, factor, WORKSPACE, with_sum=with_sum)
    return {
        "patches": of_patches,
        "groups": partial(convolved, alone=False),
        "alone": partial(convolved, alone=True),
    }


def compare(layer: Layer, with_sum: bool, rounds: int) -> dict[str, object]:
    """Time all ways for one layer and print what the cost model's choice loses."""
    factor = factor_of(layer)
    timings = interleave(ways(factor, with_sum), "patches", rounds)
    chosen = factor.way
    milliseconds = {name: timing.milliseconds for name, timing in timings.items()}
    fastest = min(timings, key=lambda name: timings[name].ratio)
    lost = lost_by(chosen, timings)
    times = " ".join(f"{milliseconds[name]:11.2f}" for name in WAYS)
    print(
        f"{'×'.join(map(str, layer[:5])):17} {factor.positions:5} {times}   {chosen:11} {lost:5.0%}"
    )
    return {
        **layer._asdict(), "positions": factor.positions,
        "weight_gradient": "yes" if with_sum else "no", "chosen": chosen, "fastest": fastest,
        **{f"{name}_ms": f"{value:.3f}" for name, value in milliseconds.items()},
        "lost": f"{lost:.3f}", "rounds": rounds,
    }  # fmt: skip


def main() -> None:
    options = parser_of(__doc__, rounds=9).parse_args()
    print(f"{machine()}, torch {torch.__version__}, {EXAMPLES} examples, float32; milliseconds")
    rows = []
    for with_sum in (False, True):
        print("\nnorms and weight gradient" if with_sum else "\nnorms alone")
        names = " ".join(f"{name:>11}" for name in WAYS)
        print(f"{'layer':17} {'T':>5} {names}   chosen      lost by the choice")
        rows += [compare(layer, with_sum, options.rounds) for layer in LAYERS]
    if not options.no_csv:
        print(f"appended to {write_csv('convolution_forms', rows, folder=options.out).name}")


if __name__ == "__main__":
    main()
