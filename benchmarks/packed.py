"""What do per-example norms of packed examples cost, beside a plain step and beside padding them?

    python -m benchmarks.packed [graphs tokens] [--rounds 31] [--no-csv]

The reference is a plain forward and backward of the packed rows. Graphs are packed as in every
library of graph networks; of tokens there is a padded form too, which computes what is padded.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.harness import against, machine, one_of, parser_of, reported, take_turns, write_csv
from benchmarks.providers import Call, norms, plain, training
from benchmarks.workloads import Workload

# Of both models.
LAYERS = 4


class Packed:
    """Examples of random lengths in one row.

    Args:
        batch: number of examples B.
        least, most: rows of an example.
    """

    def __init__(self, batch: int, least: int, most: int):
        self.batch = batch
        self.lengths = torch.randint(least, most + 1, (batch,))
        self.bounds = functional.pad(self.lengths.cumsum(0), (1, 0))
        self.rows = int(self.bounds[-1])
        self.owner = torch.arange(batch).repeat_interleave(self.lengths)

    def sums(self, values: Tensor) -> Tensor:
        """Return the sum of each example's values (rows,): (B,)."""
        return values.new_zeros(self.batch).index_add(0, self.owner, values)


class GraphNetwork(nn.Module):
    """Layers that add up what their nodes' neighbours say."""

    def __init__(self, width: int):
        super().__init__()
        self.embed = nn.Embedding(16, width)
        self.speak = nn.ModuleList([nn.Linear(width, width) for _ in range(LAYERS)])
        self.listen = nn.ModuleList([nn.Linear(2 * width, width) for _ in range(LAYERS)])
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(LAYERS)])
        self.head = nn.Linear(width, 1)

    def forward(self, kinds: Tensor, edges: Tensor) -> Tensor:
        nodes = self.embed(kinds)
        for speak, listen, norm in zip(self.speak, self.listen, self.norms, strict=True):
            said = speak(nodes)[edges[0]]
            heard = torch.zeros_like(nodes).index_add(0, edges[1], said)
            nodes = nodes + functional.gelu(listen(torch.cat([norm(nodes), heard], 1)))
        return self.head(nodes).squeeze(1)


class Tagger(nn.Module):
    """Residual layers that say something of each token."""

    def __init__(self, width: int):
        super().__init__()
        self.embed = nn.Embedding(1000, width)
        self.blocks = nn.ModuleList(
            [
                nn.Sequential(
                    nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(),
                    nn.Linear(4 * width, width),
                )
                for _ in range(LAYERS)
            ]
        )  # fmt: skip
        self.head = nn.Linear(width, 100)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def graphs() -> tuple[Workload, None]:
    """128 graphs of 10 to 40 nodes, each of which hears of four others of its graph."""
    packed = Packed(128, 10, 40)
    targets = torch.randn(packed.batch)
    hearers = torch.arange(packed.rows).repeat(4)
    graph = packed.owner[hearers]
    places = (torch.rand(len(hearers)) * packed.lengths[graph]).long()
    edges = torch.stack([packed.bounds[graph] + places, hearers])

    def losses(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return (packed.sums(model(*batch, edges)) - targets).square()

    kinds = torch.randint(16, (packed.rows,))
    name = "graph network, 4×64, 10 to 40 nodes, B=128"
    return Workload(name, GraphNetwork(64), (kinds,), losses, cu_seqlens=packed.bounds), None


def tokens() -> tuple[Workload, Workload]:
    """32 sequences of 8 to 64 tokens, packed and padded."""
    packed, model = Packed(32, 8, 64), Tagger(128)
    ids, tags = torch.randint(1000, (packed.rows,)), torch.randint(100, (packed.rows,))

    def losses(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        ids, tags = batch
        return packed.sums(functional.cross_entropy(model(ids), tags, reduction="none"))

    def padded_losses(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        ids, tags = batch
        logits = model(ids).transpose(1, 2)
        return functional.cross_entropy(logits, tags, reduction="none", ignore_index=-1).sum(1)

    pad = partial(nn.utils.rnn.pad_sequence, batch_first=True)
    lengths = packed.lengths.tolist()
    padded = pad(ids.split(lengths)), pad(tags.split(lengths), padding_value=-1)
    name = "residual layers, 4×128, 8 to 64 tokens, B=32"
    return (
        Workload(name, model, (ids, tags), losses, cu_seqlens=packed.bounds),
        Workload(name, model, padded, padded_losses),
    )


CASES: dict[str, Callable[[], tuple[Workload, Workload | None]]] = {
    "graphs": graphs, "tokens": tokens
}  # fmt: skip


def build(name: str) -> tuple[Workload, Workload | None]:
    """Return one of ``CASES``, always the same: packed, and padded if there is such a form."""
    torch.manual_seed(0)
    return CASES[name]()


def steps(work: Workload, padded: Workload | None) -> dict[str, Call]:
    """Return the steps that are timed: name → call."""
    found = {"plain": plain(work), "norms": norms(work), "norms + training": training(work)}
    if padded is not None:
        found |= {"padded": plain(padded), "padded, norms": norms(padded)}
    return found


def ready(case: str, step: str) -> Call:
    """Return one step of a case of its own."""
    return steps(*build(case))[step]


def check(work: Workload, calls: dict[str, Call]) -> None:
    """Raise unless what is timed agrees with plain autograd."""
    parameters = list(work.model.parameters())
    chosen = [0, work.examples // 2, work.examples - 1]
    expected = []
    for loss in work.loss_fn(work.model, work.batch)[chosen]:
        gradients = torch.autograd.grad(loss, parameters, retain_graph=True)
        expected.append(torch.stack([each.double().square().sum() for each in gradients]).sum())
    for call in calls.values():
        found = call()
        if found is not None:
            got = found[chosen].double()
            torch.testing.assert_close(got, torch.stack(expected), rtol=1e-3, atol=0)


def main() -> None:
    parser = parser_of(__doc__, rounds=31)
    parser.add_argument(
        "cases", nargs="*", type=one_of(CASES), metavar="CASE", help=f"of {', '.join(CASES)}; all"
    )
    options = parser.parse_args()
    print(f"{machine()}, torch {torch.__version__}")
    rows: list[dict[str, object]] = []
    for name in options.cases or CASES:
        work, padded = build(name)
        calls = steps(work, padded)
        check(work, calls)
        print(f"\n{work.name}", flush=True)
        makers = {step: partial(ready, name, step) for step in calls}
        timings = against("plain", take_turns(makers, options.rounds))
        rows += reported(work.name, timings, options.rounds)
    if not options.no_csv:
        print(f"\nappended to {write_csv('packed', rows, folder=options.out).name}")


if __name__ == "__main__":
    main()
