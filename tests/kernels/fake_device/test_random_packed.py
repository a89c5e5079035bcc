"""Random programs on packed rows, contracted by kernels."""

from __future__ import annotations

import random
from functools import partial

import torch

import gradstats as gs
from tests.oracle import are_right, oracle_sqnorms
from tests.rules.test_random_packed import WIDTH, Packed, Program, losses_of

# Programs, and how many of them have to be followed.
PROGRAMS, FOLLOWED = 100, 50


def test_norms_are_right_or_refused():
    followed = 0
    for seed in range(PROGRAMS):
        torch.manual_seed(seed)
        with torch.device("cuda"):
            exact, packed = (
                Packed(random.Random(seed), dtype) for dtype in (torch.float64, torch.float32)
            )
            model, rows = Program(seed, mixes=False), torch.randn(packed.size, WIDTH)
            expected = oracle_sqnorms(model, rows, partial(losses_of, exact))
            loss_fn = partial(losses_of, packed)
            options = {"cu_seqlens": packed.bounds, "nonfinite": "keep"}
            norms = partial(gs.per_example_norms, model, rows, loss_fn, **options)
            followed += are_right(norms, expected, f"program {seed}", rtol=2e-3)
    assert followed > FOLLOWED
