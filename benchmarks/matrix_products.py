"""Which of PyTorch's libraries multiplies float32 matrices faster on this CPU, and is it taken?

For linear layers the gradient of the data, that of the weight, and 16 examples' gradients one by
one are computed by ``torch.mm`` and by oneDNN, whether it would be taken or not. It is taken on
processors on which it is known to be faster; on others the last column says what that loses.

    python -m benchmarks.matrix_products [--rounds 9] [--no-csv]
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.harness import interleave, lost_by, machine, parser_of, write_csv
from gradstats.contractions import _multiply

EXAMPLES = 16
KINDS = ("data gradient", "weight gradient", "each example")
# Rows (positions of an example, for the last kind), d_out and d_in.
SHAPES = (
    (64, 64, 64), (64, 256, 256), (128, 128, 128), (128, 256, 256), (128, 1024, 256),
    (256, 2048, 784), (256, 2048, 2048), (512, 768, 768), (2048, 768, 256), (2048, 256, 1024),
    (1024, 768, 3072),
)  # fmt: skip


def products(kind: str, rows: int, d_out: int, d_in: int) -> list[tuple[Tensor, Tensor]]:
    """Return the matrices that are multiplied."""
    if kind == "data gradient":
        return [(torch.randn(rows, d_out), torch.randn(d_out, d_in))]
    count = 1 if kind == "weight gradient" else EXAMPLES
    return [(torch.randn(rows, d_out).t(), torch.randn(rows, d_in)) for _ in range(count)]


def multiply_all(multiply: Callable[[Tensor, Tensor], Tensor], pairs) -> None:
    """Multiply every pair, and keep nothing."""
    for left, right in pairs:
        multiply(left, right)


def compare(kind: str, rows: int, d_out: int, d_in: int, rounds: int) -> dict[str, object]:
    """Time both libraries for one layer and print what the choice loses."""
    pairs = products(kind, rows, d_out, d_in)
    left, right = pairs[0]
    forms = {"mm": partial(multiply_all, torch.mm, pairs)}
    forms["onednn"] = partial(multiply_all, _multiply.by_onednn, pairs)
    timings = interleave(forms, "mm", rounds)
    ratio = timings["onednn"].ratio
    taken = _multiply.pays(rows * d_out * d_in, left, right, times=len(pairs))
    chosen = "onednn" if taken else "mm"
    print(
        f"{kind:15}  {rows:4d}  {d_out:4d}  {d_in:4d}   {ratio:9.2f}   {chosen:6}   "
        f"{lost_by(chosen, timings):6.0%}",
        flush=True,
    )
    return {
        "kind": kind, "rows": rows, "d_out": d_out, "d_in": d_in, "chosen": chosen,
        "mm_ms": f"{timings['mm'].milliseconds:.3f}",
        "onednn_ms": f"{timings['onednn'].milliseconds:.3f}",
        "ratio": f"{ratio:.3f}", "low": f"{timings['onednn'].low:.3f}",
        "high": f"{timings['onednn'].high:.3f}", "rounds": rounds,
    }  # fmt: skip


def main() -> None:
    options = parser_of(__doc__, rounds=9).parse_args()
    print(f"{machine()}, torch {torch.__version__}, float32; {EXAMPLES} examples one by one")
    print(f"{'kind':15}  rows  d_out d_in   onednn/mm   chosen   lost by the choice")
    rows = [compare(kind, *shape, options.rounds) for kind in KINDS for shape in SHAPES]
    if not options.no_csv:
        print(f"appended to {write_csv('matrix_products', rows, folder=options.out).name}")


if __name__ == "__main__":
    main()
