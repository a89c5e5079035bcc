"""Where does the Gram form stop paying, and does the cost model know?

For layers of several widths both forms are timed over T in one run, and the cost model's choice is
compared with the faster one.

    python -m benchmarks.crossover [--rounds 9] [--no-csv]
"""

from __future__ import annotations

import argparse

import torch

from benchmarks.harness import interleave, machine, write_csv
from gradstats._cost import choose_outer_form
from gradstats._factors import Outer
from gradstats.contractions._outer import direct, gram

WIDTHS = ((256, 256), (1024, 256), (1000, 256), (768, 768), (64, 64))
POSITIONS = (8, 16, 32, 64, 128, 256, 512, 1024)
WORKSPACE = 256 * 1024 * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--no-csv", action="store_true", help="do not append to the results")
    options = parser.parse_args()
    print(f"{machine()}, torch {torch.__version__}, 16 examples, float32")
    print("   p     q     T   gram/direct   chosen   lost by the choice")
    rows = []
    for p, q in WIDTHS:
        for positions in POSITIONS:
            factor = Outer(
                torch.randn(16, 1, positions, p), torch.randn(16, 1, positions, q), (p, q)
            )
            timings = interleave(
                {
                    "direct": lambda factor=factor: direct(factor, WORKSPACE),
                    "gram": lambda factor=factor: gram(factor, WORKSPACE),
                },
                "direct",
                options.rounds,
            )
            ratio = timings["gram"].ratio
            chosen = choose_outer_form(positions, p, q)
            lost = max(1.0, ratio if chosen == "gram" else 1 / ratio) - 1
            print(f"{p:4d}  {q:4d}  {positions:4d}   {ratio:11.2f}   {chosen:6}   {lost:6.0%}")
            rows.append(
                {
                    "p": p, "q": q, "positions": positions, "chosen": chosen,
                    "gram_ms": f"{timings['gram'].milliseconds:.3f}",
                    "direct_ms": f"{timings['direct'].milliseconds:.3f}",
                    "ratio": f"{ratio:.3f}", "low": f"{timings['gram'].low:.3f}",
                    "high": f"{timings['gram'].high:.3f}", "rounds": options.rounds,
                }
            )  # fmt: skip
    if not options.no_csv:
        print(f"appended to {write_csv('crossover', rows).name}")


if __name__ == "__main__":
    main()
