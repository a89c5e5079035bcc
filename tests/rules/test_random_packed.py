"""Random programs on packed examples: norms are right or refused.

Rows are moved, sent along edges, pooled, padded, attended, written and brought back; some programs
also mix rows of different examples, or have as many rows or edges as examples.
"""

from __future__ import annotations

import random
from contextlib import suppress
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import gradstats as gs
from tests.oracle import are_right, oracle_sqnorms

WIDTH = 4
LENGTHS = [[2, 3], [2, 0], [0, 5], [1, 0, 2], [3, 1, 5], [2, 2, 2, 2], [1, 1, 0, 2], [5, 0, 1, 1]]

# Programs of each part, and how many of them have to be followed.
PROGRAMS, FOLLOWED = 200, {False: 100, True: 65}


class Packed:
    """Examples in one row, and edges inside each of them."""

    def __init__(self, draw: random.Random, dtype: torch.dtype = torch.float64):
        self.dtype = dtype
        self.lengths = draw.choice(LENGTHS)
        self.count, self.most, self.size = len(self.lengths), max(self.lengths), sum(self.lengths)
        counts = torch.tensor(self.lengths)
        self.owner = torch.arange(self.count).repeat_interleave(counts)
        self.bounds = functional.pad(counts.cumsum(0), (1, 0))
        self.place = torch.arange(self.size) - self.bounds[self.owner]
        self.order = torch.tensor(draw.sample(range(self.size), self.size))
        every = [(i, j) for i in range(self.size) for j in range(self.size)]
        inside = [pair for pair in every if self.owner[pair[0]] == self.owner[pair[1]]]
        self.edges = torch.tensor(draw.sample(inside, draw.randint(1, min(9, len(inside))))).T
        self.apart = self.owner[:, None] != self.owner

    def zeros(self, *shape: int) -> Tensor:
        return torch.zeros(*shape, WIDTH, dtype=self.dtype)


def attended(p: Packed, rows: Tensor, others: Tensor) -> Tensor:
    return (rows @ others.T).masked_fill(p.apart, -torch.inf).softmax(-1) @ rows


def written(target: Tensor, index, values: Tensor) -> Tensor:
    target[index] = values
    return target


def of_few(p: Packed, rows: Tensor, others: Tensor) -> Tensor:
    chosen = rows.detach()[:, 0] > 0
    return written(written(others.clone(), chosen, rows[chosen].sin()), ~chosen, rows[~chosen])


def piece_by_piece(p: Packed, rows: Tensor) -> Tensor:
    result = torch.empty_like(rows)
    for part in p.order.split(2):
        result[part] = rows[part].sin()
    return result


def largest(rows: Tensor, owner: Tensor, none: Tensor) -> Tensor:
    places = owner[:, None].expand(-1, WIDTH)
    return none.scatter_reduce(0, places, rows, "amax", include_self=False)


# What becomes of two tensors of a kind: "rows", "edges", "examples" or "padded".
STEPS = {
    "rows": [
        ("edges", lambda p, t, u: t[p.edges[0]]),
        ("examples", lambda p, t, u: p.zeros(p.count).index_add(0, p.owner, t)),
        ("examples", lambda p, t, u: largest(t, p.owner, p.zeros(p.count))),
        ("examples", lambda p, t, u: torch.stack([part.sum(0) for part in t.split(p.lengths)])),
        ("padded", lambda p, t, u: nn.utils.rnn.pad_sequence(t.split(p.lengths), True)),
        ("padded", lambda p, t, u: written(p.zeros(p.count, p.most), (p.owner, p.place), t)),
        ("rows", attended),
        ("rows", of_few),
        ("rows", lambda p, t, u: piece_by_piece(p, t)),
        ("rows", lambda p, t, u: t[p.order].sin()[p.order.argsort()]),
        ("rows", lambda p, t, u: torch.cat([part * part.sum() for part in t.split(p.lengths)])),
        ("rows", lambda p, t, u: t[None].transpose(0, 1).sin().transpose(0, 1)[0]),
        ("rows", lambda p, t, u: functional.scaled_dot_product_attention(t, u, t, ~p.apart)),
        ("rows", lambda p, t, u: t * u),
    ],
    "edges": [
        ("rows", lambda p, t, u: p.zeros(p.size).index_add(0, p.edges[1], t)),
        ("rows", lambda p, t, u: largest(t, p.edges[1], p.zeros(p.size))),
        ("examples", lambda p, t, u: p.zeros(p.count).index_add(0, p.owner[p.edges[1]], t)),
        ("edges", lambda p, t, u: t * p.zeros(p.size).index_add(0, p.edges[1], u)[p.edges[1]]),
        ("edges", lambda p, t, u: t + u),
    ],
    "examples": [
        ("rows", lambda p, t, u: t[p.owner]),
        ("rows", lambda p, t, u: t.repeat_interleave(torch.tensor(p.lengths), 0)),
        ("edges", lambda p, t, u: t[p.owner[p.edges[0]]]),
        ("padded", lambda p, t, u: t[:, None].expand(p.count, p.most, WIDTH) * 1.5),
        ("examples", lambda p, t, u: torch.stack([row.tanh() for row in t]) * u),
    ],
    "padded": [
        ("rows", lambda p, t, u: t[torch.arange(p.most) < torch.tensor(p.lengths)[:, None]]),
        ("rows", lambda p, t, u: t[p.owner, p.place]),
        ("rows", lambda p, t, u: t.reshape(-1, WIDTH)[p.owner * p.most + p.place]),
        ("examples", lambda p, t, u: t.sum(1)),
        ("padded", lambda p, t, u: (t @ t.mT).softmax(-1) @ u),
    ],
}  # fmt: skip

# Steps that let examples meet, on rows and on examples alike.
MIXES = [
    lambda t: t.roll(1, 0),
    lambda t: t + t.flip(0),
    lambda t: t - t.mean(0),
    lambda t: t.cumsum(0),
    lambda t: functional.normalize(t, dim=0),
    lambda t: t[torch.arange(len(t)) // 2 * 2],
    lambda t: (t @ t.T).softmax(-1) @ t,
    lambda t: (t[:, None] - t[None]).exp().sum(1),
    lambda t: functional.scaled_dot_product_attention(t, t, t),
]


class Program(nn.Module):
    """Random steps on packed rows, with layers in between."""

    def __init__(self, seed: int, mixes: bool):
        super().__init__()
        self.seed, self.mixes = seed, mixes
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.norm, self.table = nn.LayerNorm(WIDTH), nn.Embedding(6, WIDTH)
        self.shift = nn.Parameter(torch.randn(WIDTH))

    def layer(self, draw: random.Random, t: Tensor) -> Tensor:
        ids = (3 * t.detach().abs()[..., 0]).long() % 6
        return draw.choice(
            [
                lambda: draw.choice(self.layers)(t).tanh(),
                lambda: self.norm(t),
                lambda: t + self.table(ids),
                lambda: t + 0.5 * self.shift,
                lambda: functional.linear(t, functional.normalize(self.layers[0].weight)).tanh(),
            ]
        )()

    def forward(self, rows: Tensor, packed: Packed) -> Tensor:
        draw = random.Random(self.seed)
        pool = [("rows", self.layers[0](rows) if draw.random() < 0.5 else rows)]
        for _ in range(draw.randint(3, 9)):
            kind, t = draw.choice([pool[-1], draw.choice(pool)])
            u = draw.choice([other for name, other in pool if name == kind])
            if draw.random() < 0.35:
                pool.append((kind, self.layer(draw, t)))
            elif self.mixes and kind != "padded" and draw.random() < 0.2:
                with suppress(RuntimeError):  # such as a mean over no rows
                    pool.append((kind, draw.choice(MIXES)(t)))
            else:
                name, step = draw.choice(STEPS[kind])
                pool.append((name, step(packed, t, u)))
        kind, t = next(
            (kind, t) for kind, t in [*pool[::-1], ("rows", self.layers[0](rows))]
            if kind in ("rows", "examples") and t.requires_grad
        )  # fmt: skip
        losses = (t.sin() * torch.linspace(0.5, 1.5, WIDTH)).sum(1)
        if kind == "examples":
            return losses
        return torch.zeros(packed.count, dtype=losses.dtype).index_add(0, packed.owner, losses)


def losses_of(packed: Packed, model: Program, rows: Tensor) -> Tensor:
    return model(rows, packed)


@pytest.mark.parametrize("mixes", [False, True], ids=["apart", "some mixed"])
def test_norms_are_right_or_refused(mixes):
    followed = 0
    for seed in range(PROGRAMS):
        torch.manual_seed(seed)
        packed, model = Packed(random.Random(seed)), Program(seed, mixes).double()
        rows, loss_fn = torch.randn(packed.size, WIDTH).double(), partial(losses_of, packed)
        expected = oracle_sqnorms(model, rows, loss_fn)
        norms = partial(gs.per_example_norms, model, rows, loss_fn, cu_seqlens=packed.bounds)
        followed += are_right(norms, expected, f"program {seed}")
    assert followed > FOLLOWED[mixes]
