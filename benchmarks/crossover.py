"""Where does the Gram form stop paying, and does the cost model know?

For layers of several widths both forms are timed over T in one run, for the norms alone and with
the weight gradient, and the cost model's choice is compared with the faster one.

    python -m benchmarks.crossover [--rounds 9] [--no-csv]
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.harness import interleave, lost_by, machine, parser_of, write_csv
from gradstats._factors import Outer
from gradstats.contractions._outer import (
    cheapest_form,
    direct,
    direct_and_sum,
    guarded_gram,
    summed,
)

WIDTHS = ((64, 64), (256, 256), (1024, 256), (768, 768), (2048, 512))
POSITIONS = (8, 16, 32, 64, 128, 256, 512, 1024)
WORKSPACE = 256 * 1024 * 1024


def forms(factor: Outer, with_sum: bool) -> dict[str, Callable[[], object]]:
    """Return both ways to a factor's norms, and to its sum where it is wanted."""
    if not with_sum:
        return {
            "direct": lambda: direct(factor, WORKSPACE),
            "gram": lambda: guarded_gram(factor, WORKSPACE),
        }
    return {
        "direct": lambda: direct_and_sum(factor, WORKSPACE),
        "gram": lambda: (guarded_gram(factor, WORKSPACE), summed(factor)),
    }


def compare(p: int, q: int, positions: int, with_sum: bool, rounds: int) -> dict[str, object]:
    """Time both forms for one layer and print what the cost model's choice loses."""
    factor = Outer(torch.randn(16, 1, positions, p), torch.randn(16, 1, positions, q), (p, q))
    timings = interleave(forms(factor, with_sum), "direct", rounds)
    ratio = timings["gram"].ratio
    chosen = cheapest_form(factor, with_sum=with_sum)
    lost = lost_by(chosen, timings)
    print(f"{p:4d}  {q:4d}  {positions:4d}   {ratio:11.2f}   {chosen:6}   {lost:6.0%}", flush=True)
    return {
        "p": p, "q": q, "positions": positions,
        "weight_gradient": "yes" if with_sum else "no", "chosen": chosen,
        "gram_ms": f"{timings['gram'].milliseconds:.3f}",
        "direct_ms": f"{timings['direct'].milliseconds:.3f}",
        "ratio": f"{ratio:.3f}", "low": f"{timings['gram'].low:.3f}",
        "high": f"{timings['gram'].high:.3f}", "rounds": rounds,
    }  # fmt: skip


def main() -> None:
    options = parser_of(__doc__, rounds=9).parse_args()
    print(f"{machine()}, torch {torch.__version__}, 16 examples, float32")
    rows = []
    for with_sum in (False, True):
        print("\nnorms and weight gradient" if with_sum else "\nnorms alone")
        print("   p     q     T   gram/direct   chosen   lost by the choice")
        for p, q in WIDTHS:
            for positions in POSITIONS:
                rows.append(compare(p, q, positions, with_sum, options.rounds))
    if not options.no_csv:
        print(f"appended to {write_csv('crossover', rows, folder=options.out).name}")


if __name__ == "__main__":
    main()
