"""Random programs of views, copies and writes: norms are right or refused.

What a tensor holds may have been written by way of another that shows the same memory.
"""

from __future__ import annotations

import random
from contextlib import suppress
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import gradstats as gs
from tests.oracle import are_right, oracle_sqnorms

BATCH, WIDTH = 3, 4
FORMS = [(3, 4), (3, 2, 2), (3, 1, 4), (1, 3, 4), (6, 2), (2, 3, 2), (4, 3)]

# Programs of each part, and how many of them have to be followed.
PROGRAMS, FOLLOWED = 500, 200


def shuffled(draw, count: int) -> Tensor:
    return torch.tensor(draw.sample(range(count), count))


def rows_written(draw, target: Tensor, source: Tensor) -> None:
    target[shuffled(draw, len(target))] = source


def a_row_written(draw, target: Tensor, source: Tensor) -> None:
    target[draw.randrange(len(target))] = source[draw.randrange(len(source))]


# Called with two tensors of one form, they return another or write into the first.
STEPS = [
    lambda draw, t, _: torch.zeros_like(t),
    lambda draw, t, _: torch.zeros(t.shape, dtype=t.dtype),
    lambda draw, t, _: t.clone(),
    lambda draw, t, _: t[:],
    lambda draw, t, _: t[draw.randrange(len(t)) :],
    lambda draw, t, _: t.view(draw.choice(FORMS)),
    lambda draw, t, _: t.transpose(0, 1),
    lambda draw, t, _: t[shuffled(draw, len(t))],
    lambda draw, t, _: t.sin() * 1.5,
    lambda draw, t, u: t + u,
    lambda draw, t, u: t.copy_(u),
    lambda draw, t, u: t.index_copy_(0, shuffled(draw, len(t)), u),
    rows_written,
    rows_written,
    a_row_written,
]


class Program(nn.Module):
    """A layer, random steps on its values, and another layer."""

    def __init__(self, seed: int, trained: bool):
        super().__init__()
        self.seed = seed
        self.first = nn.Linear(WIDTH, WIDTH) if trained else nn.Identity()
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        draw = random.Random(self.seed)
        pool = [self.first(x).tanh()]
        for _ in range(draw.randint(3, 8)):
            target = draw.choice(pool)
            other = draw.choice([each for each in pool if each.shape == target.shape])
            with suppress(RuntimeError, IndexError):  # PyTorch itself refuses the step
                result = draw.choice(STEPS)(draw, target, other)
                if result is not None and not any(result is each for each in pool):
                    pool.append(result)
        whole = [each for each in pool if each.numel() == BATCH * WIDTH and BATCH in each.shape]
        chosen = draw.choice(whole)
        rows = chosen.movedim(chosen.shape.index(BATCH), 0).reshape(BATCH, WIDTH)
        return (self.last(rows).sin() * torch.linspace(0.5, 1.5, WIDTH, dtype=x.dtype)).sum(1)


@pytest.mark.parametrize("trained", [True, False], ids=["values of a layer", "inputs"])
@pytest.mark.filterwarnings("ignore")
def test_norms_are_right_or_refused(trained):
    followed = 0
    for seed in range(PROGRAMS):
        torch.manual_seed(seed)
        model = Program(seed, trained).double()
        x = torch.randn(BATCH, WIDTH).double()
        try:
            expected = oracle_sqnorms(model, x, lambda m, x: m(x))
        except RuntimeError:
            continue  # PyTorch itself refuses the program
        norms = partial(gs.per_example_norms, model, x, lambda m, x: m(x))
        followed += are_right(norms, expected, f"program {seed}")
    assert followed > FOLLOWED
