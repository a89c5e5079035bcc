"""For which shapes do products of positions beat tiles of gradients, and does the cost model know?

Inner products of all pairs of two batches are computed in both forms, over positions and batch
sizes, and the cost model's choice is compared with the faster one.

    python -m benchmarks.pair_forms [--rounds 9] [--no-csv]
"""

from __future__ import annotations

import torch

from benchmarks.harness import interleave, lost_by, machine, parser_of, write_csv
from gradstats._cost import choose_pair_form
from gradstats._factors import Outer
from gradstats.contractions._outer_pairs import gram_pairs
from gradstats.contractions._tiles import dense_pairs

WIDTHS = ((256, 256), (768, 768), (64, 576))
POSITIONS = (2, 4, 8, 16, 64)
BATCHES = (4, 32, 128)
WORKSPACE = 256 * 1024 * 1024


def compare(p: int, q: int, positions: int, batch: int, rounds: int) -> dict[str, object]:
    """Time both forms for one layer and print what the cost model's choice loses."""
    first, second = (
        Outer(torch.randn(batch, 1, positions, p), torch.randn(batch, 1, positions, q), (p, q))
        for _ in range(2)
    )
    forms = {
        "direct": lambda: dense_pairs([first], [second], WORKSPACE),
        "gram": lambda: gram_pairs(first, second, WORKSPACE),
    }
    timings = interleave(forms, "direct", rounds)
    ratio = timings["gram"].ratio
    chosen = choose_pair_form(positions, positions, p, q, batch, batch)
    lost = lost_by(chosen, timings)
    print(f"{p:4d}  {q:4d}  {positions:4d}  {batch:4d}   {ratio:11.2f}   {chosen:6}   {lost:6.0%}")
    return {
        "p": p, "q": q, "positions": positions, "batch": batch, "chosen": chosen,
        "gram_ms": f"{timings['gram'].milliseconds:.3f}",
        "direct_ms": f"{timings['direct'].milliseconds:.3f}",
        "ratio": f"{ratio:.3f}", "low": f"{timings['gram'].low:.3f}",
        "high": f"{timings['gram'].high:.3f}", "rounds": rounds,
    }  # fmt: skip


def main() -> None:
    options = parser_of(__doc__, rounds=9).parse_args()
    print(f"{machine()}, torch {torch.__version__}, float32, both batches of the same size")
    print("   p     q     T     B   gram/direct   chosen   lost by the choice")
    rows = [
        compare(p, q, positions, batch, options.rounds)
        for p, q in WIDTHS
        for positions in POSITIONS
        for batch in BATCHES
    ]
    if not options.no_csv:
        print(f"appended to {write_csv('pair_forms', rows, folder=options.out).name}")


if __name__ == "__main__":
    main()
