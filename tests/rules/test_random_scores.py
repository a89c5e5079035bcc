"""Random programs on scores of packed rows: norms are right or refused.

Scores of pairs of rows are made in many ways, masked, moved, layered, normalised along either axis
and reduced. Some masks let pairs of different examples through, some rows are in another order, and
some parameters are zero, so that zeros show by accident.
"""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import gradstats as gs
from tests.oracle import are_right, oracle_sqnorms

WIDTH = 4
LENGTHS = [[2, 3], [3, 1, 4], [2, 2], [1, 2, 1], [4, 0, 2], [1, 1, 1, 1]]

# Programs of each part, and how many of them have to be followed.
PROGRAMS, FOLLOWED = 200, {False: 34, True: 18}


def in_one_row(lengths: list[int], model: nn.Module, padded: Tensor) -> Tensor:
    """The losses of padded examples, which are packed before the program runs on them."""
    parts = zip(padded, lengths, strict=True)
    return model(torch.cat([example[:length] for example, length in parts]))


def written(scores: Tensor, mask: Tensor, value: float) -> Tensor:
    scores = scores.clone()
    scores[mask] = value
    return scores


class Program(nn.Module):
    """Scores, random steps on them, and what becomes of them."""

    def __init__(self, seed: int, lengths: list[int], leaks: bool, zeros: bool):
        super().__init__()
        self.seed, self.leaks = seed, leaks
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.left, self.right = (nn.Parameter(torch.randn(WIDTH, 1)) for _ in range(2))
        self.scale, self.mix = nn.Parameter(torch.randn(())), nn.Linear(1, 1)
        self.bias = nn.Embedding(5, 1)
        draw = random.Random(seed)
        for parameter in self.parameters() if zeros else ():
            if draw.random() < 0.4:
                nn.init.zeros_(parameter)
        self.size, self.count = sum(lengths), len(lengths)
        self.owner = torch.arange(self.count).repeat_interleave(torch.tensor(lengths))
        self.others = self.owner[:, None] != self.owner
        self.places = (torch.arange(self.size)[:, None] - torch.arange(self.size)).clamp(-2, 2) + 2
        self.order = torch.tensor(draw.sample(range(self.size), self.size))

    def mask(self, draw: random.Random) -> Tensor:
        kind, later = draw.random(), torch.ones_like(self.others).triu(1)
        if self.leaks and kind < 0.15:
            mask = self.others.clone()
            mask[draw.randrange(self.size), draw.randrange(self.size)] = False
            return mask
        if self.leaks and kind < 0.25:
            return draw.choice([later, self.others[self.order][:, self.order]])
        return self.others | later if kind < 0.35 else self.others

    def rows(self, draw: random.Random, hidden: list[Tensor]) -> Tensor:
        rows = draw.choice(hidden)
        return rows[self.order] if self.leaks and draw.random() < 0.1 else rows

    def sums(self, picked: Tensor, rows: Tensor) -> Tensor:
        return picked.new_zeros(self.size).index_add(0, rows, picked)

    def scores(self, draw: random.Random, q: Tensor, k: Tensor) -> Tensor:
        return draw.choice(
            [
                lambda: q @ k.T,
                lambda: torch.einsum("id,jd->ij", q, k),
                lambda: torch.tensordot(q, k, ([1], [1])),
                lambda: torch.baddbmm(q.new_zeros(1, 1, 1), q[None], k.T[None])[0],
                lambda: q @ self.left + (k @ self.right).T,
                lambda: (q[:, None] - k).square().sum(-1),
                lambda: (q[:, None] * k).tanh().mean(-1),
                lambda: ((q[:, None] + k) @ self.left)[..., 0],
                lambda: torch.cdist(q, k),
            ]
        )()

    def step(self, draw: random.Random, hidden: list[Tensor], t: Tensor) -> Tensor:
        o, q, k = self.mask(draw), self.rows(draw, hidden), self.rows(draw, hidden)
        return draw.choice(
            [
                lambda: t.masked_fill(o, 0),
                lambda: t.masked_fill(o, -torch.inf),
                lambda: t.clone().masked_fill_(o, 0),
                lambda: torch.where(o, -1e9, t),
                lambda: t * ~o,
                lambda: t + torch.where(o, -torch.inf, 0.0).to(t),
                lambda: written(t, o, 0.0),
                lambda: written(t, o, -torch.inf),
                lambda: t.T,
                lambda: (t + t.T) / 2,
                lambda: t[self.order][:, self.order] if self.leaks else t.exp(),
                lambda: t.relu(),
                lambda: t * self.scale,
                lambda: t + self.scale,
                lambda: t + self.bias(self.places)[..., 0],
                lambda: self.mix(t[..., None])[..., 0],
                lambda: t + self.scores(draw, q, k),
                lambda: t * self.scores(draw, q, k),
                lambda: t + q @ self.left,
                lambda: t.clone().add_(q @ self.left),
                lambda: t * (q @ self.left).T,
                lambda: t.softmax(-1),
                lambda: t.softmax(0),
                lambda: t.log_softmax(-1),
                lambda: t - t.amax(-1, keepdim=True),
                lambda: t - t.logsumexp(0, keepdim=True),
                lambda: t / (t.sum(-1, keepdim=True) + 3),
                lambda: t / (t.sum(0, keepdim=True) + 3),
                lambda: t[None].expand(2, *t.shape).mean(0),
                lambda: t.reshape(-1).reshape(t.shape),
            ]
        )()

    def forward(self, rows: Tensor) -> Tensor:
        draw = random.Random(self.seed)
        hidden = [layer(rows) for layer in self.layers]
        t = self.scores(draw, self.rows(draw, hidden), self.rows(draw, hidden))
        for _ in range(draw.randint(1, 5)):
            t = self.step(draw, hidden, t)
        o, v = self.mask(draw), self.rows(draw, hidden)
        if draw.random() < 0.6:
            t = t.masked_fill(o, 0)
        out = draw.choice(
            [
                lambda: t @ v,
                lambda: t.T @ v,
                lambda: torch.einsum("ij,jd->id", t, v),
                lambda: t.sum(-1, keepdim=True) * v,
                lambda: t.sum(0)[:, None] * v,
                lambda: t.amax(-1, keepdim=True) * v,
                lambda: t.logsumexp(0)[:, None] * v,
                lambda: t.min(1)[0][:, None] + v,
                lambda: t.diagonal()[:, None] * v,
                lambda: v + self.sums(t[~o], (~o).nonzero()[:, 0])[:, None],
                lambda: (t @ torch.eye(self.size, WIDTH).to(t)) * v,
            ]
        )()  # fmt: skip
        losses = (self.layers[0](out).sin() * torch.linspace(0.5, 1.5, WIDTH).to(out)).sum(1)
        return losses.new_zeros(self.count).index_add(0, self.owner, losses)


@pytest.mark.parametrize("inside", [False, True], ids=["given in one row", "put into one row"])
@pytest.mark.parametrize("leaks", [False, True], ids=["apart", "some leak"])
def test_norms_are_right_or_refused(leaks, inside):
    followed = 0
    for seed in range(PROGRAMS):
        torch.manual_seed(seed)
        draw = random.Random(seed)
        lengths = draw.choice(LENGTHS)
        model = Program(seed, lengths, leaks, zeros=draw.random() < 0.5).double()
        if inside:
            batch, losses = (
                torch.randn(len(lengths), max(lengths), WIDTH).double(),
                partial(in_one_row, lengths),
            )
            options = {}
        else:
            batch, losses = torch.randn(sum(lengths), WIDTH).double(), Program.__call__
            options = {"cu_seqlens": functional.pad(torch.tensor(lengths).cumsum(0), (1, 0))}
        expected = oracle_sqnorms(model, batch, losses)
        if all(bool(value.isfinite().all()) for value in expected.values()):
            norms = partial(gs.per_example_norms, model, batch, losses, **options)
            followed += are_right(norms, expected, f"program {seed}")
    assert followed > FOLLOWED[leaks]
