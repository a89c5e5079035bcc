"""What do per-example norms of packed examples cost, beside a plain step and beside padding them?

    python -m benchmarks.packed [graphs tokens] [--rounds 31] [--no-csv]

The reference is a plain forward and backward of the packed rows. Graphs are packed as in every
library of graph networks; of tokens there is a padded form too, which computes what is padded.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import gradstats as gs
from benchmarks.harness import against, machine, reported, take_turns, write_csv

Losses = Callable[[nn.Module, tuple[Tensor, ...]], Tensor]
Step = Callable[[], Tensor | None]


class Packed:
    """Examples of random lengths in one row.

    Args:
        batch: number of examples B.
        least, most: rows of an example.
    """

    def __init__(self, batch: int, least: int, most: int):
        self.batch, self.most = batch, most
        self.lengths = torch.randint(least, most + 1, (batch,))
        self.bounds = functional.pad(self.lengths.cumsum(0), (1, 0))
        self.rows = int(self.bounds[-1])
        self.owner = torch.arange(batch).repeat_interleave(self.lengths)

    def sums(self, values: Tensor) -> Tensor:
        """Return the sum of each example's values (rows,): (B,)."""
        return values.new_zeros(self.batch).index_add(0, self.owner, values)


class GraphNetwork(nn.Module):
    """Layers that add up what their nodes' neighbours say."""

    def __init__(self, width: int, layers: int = 4):
        super().__init__()
        self.embed = nn.Embedding(16, width)
        self.speak = nn.ModuleList([nn.Linear(width, width) for _ in range(layers)])
        self.listen = nn.ModuleList([nn.Linear(2 * width, width) for _ in range(layers)])
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(layers)])
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

    def __init__(self, width: int, layers: int = 4):
        super().__init__()
        self.embed = nn.Embedding(1000, width)
        self.blocks = nn.ModuleList(
            [
                nn.Sequential(
                    nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(),
                    nn.Linear(4 * width, width),
                )
                for _ in range(layers)
            ]
        )  # fmt: skip
        self.head = nn.Linear(width, 100)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


@dataclass(frozen=True)
class Case:
    """A model and packed examples, and what else computes their norms.

    Attributes:
        name: what a table calls it.
        packed: where the examples lie.
        model, batch, losses: as for ``gs.per_example_norms``.
        padded: another batch and its losses, of the same examples side by side; None without one.
    """

    name: str
    packed: Packed
    model: nn.Module
    batch: tuple[Tensor, ...]
    losses: Losses
    padded: tuple[tuple[Tensor, ...], Losses] | None = None

    def steps(self) -> dict[str, Step]:
        """Return the steps that are timed: name → a call, which returns squared norms or None."""
        where = {"cu_seqlens": self.packed.bounds}
        found: dict[str, Step] = {
            "plain": partial(plain, self.model, self.batch, self.losses),
            "norms": partial(norms, self.model, self.batch, self.losses, **where),
            "norms + training": self.training,
        }
        if self.padded is not None:
            found["padded"] = partial(plain, self.model, *self.padded)
            found["padded, norms"] = partial(norms, self.model, *self.padded)
        return found

    def training(self) -> Tensor:
        """Take the norms beside a training step."""
        self.model.zero_grad()
        with gs.track(
            self.model, batch_size=self.packed.batch, cu_seqlens=self.packed.bounds
        ) as tracker:
            self.losses(self.model, self.batch).mean().backward()
        return tracker.stats.sqnorm

    def check(self) -> None:
        """Raise unless what is timed agrees with plain autograd."""
        parameters = list(self.model.parameters())
        chosen = [0, self.packed.batch // 2, self.packed.batch - 1]
        expected = []
        for loss in self.losses(self.model, self.batch)[chosen]:
            gradients = torch.autograd.grad(loss, parameters, retain_graph=True)
            expected.append(torch.stack([each.double().square().sum() for each in gradients]).sum())
        for step in self.steps().values():
            found = step()
            if found is not None:
                got = found[chosen].double()
                torch.testing.assert_close(got, torch.stack(expected), rtol=1e-3, atol=0)


def plain(model: nn.Module, batch: tuple[Tensor, ...], losses: Losses) -> None:
    """Take a training step without norms."""
    model.zero_grad()
    losses(model, batch).mean().backward()


def norms(model: nn.Module, batch: tuple[Tensor, ...], losses: Losses, **where) -> Tensor:
    """Take norms alone."""
    return gs.per_example_norms(model, batch, losses, **where).sqnorm


def graphs() -> Case:
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
    return Case(name, packed, GraphNetwork(64), (kinds,), losses)


def tokens() -> Case:
    """32 sequences of 8 to 64 tokens, packed and padded."""
    packed = Packed(32, 8, 64)
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
    return Case(name, packed, Tagger(128), (ids, tags), losses, (padded, padded_losses))


CASES = {"graphs": graphs, "tokens": tokens}


def build(name: str) -> Case:
    """Return one of ``CASES``, always the same."""
    torch.manual_seed(0)
    return CASES[name]()


def ready(case: str, step: str) -> Step:
    """Return one step of a case of its own."""
    return build(case).steps()[step]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; all")
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--no-csv", action="store_true", help="do not append to the results")
    parser.add_argument("--out", type=Path, help="folder of the results")
    options = parser.parse_args()
    unknown = set(options.cases) - set(CASES)
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))} is not of {', '.join(CASES)}")
    print(f"{machine()}, torch {torch.__version__}")
    rows: list[dict[str, object]] = []
    for name in options.cases or CASES:
        case = build(name)
        case.check()
        print(f"\n{case.name}", flush=True)
        makers = {step: partial(ready, name, step) for step in case.steps()}
        timings = against("plain", take_turns(makers, options.rounds))
        rows += reported(case.name, timings, options.rounds)
    if not options.no_csv:
        print(f"\nappended to {write_csv('packed', rows, folder=options.out).name}")


if __name__ == "__main__":
    main()
