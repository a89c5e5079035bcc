"""What was decided of uses of tensors made of parameters serves others, on CUDA tensors as well."""

import pytest
import torch

import gradstats as gs
from gradstats.capture.following._repeated import NOTED
from gradstats.capture.rules import _elementwise
from tests.oracle import assert_sqnorms, oracle_sqnorms
from tests.test_repeated import squares
from tests.test_repeated_derived import MADE, USED, Made

B, WIDTH = 3, 4


@pytest.mark.parametrize("name", ["added", "product with", "linear", "normalised"])
def test_tensors_of_the_same_form_take_turns(monkeypatch, name):
    decided, decide = [], _elementwise.on_chip

    def counted(*args, **options):
        decided.append(args)
        return decide(*args, **options)

    monkeypatch.setattr(_elementwise, "on_chip", counted)
    NOTED.clear()
    torch.manual_seed(0)
    made = ("part", "in any order", "scaled", "of several", "written")
    models = [Made(MADE[each], USED[name]).float().cuda() for each in made]
    batch = torch.randn(B, WIDTH, WIDTH).cuda()
    for _ in range(2):
        for model in models:
            expected = oracle_sqnorms(model, batch, squares)
            assert_sqnorms(gs.per_example_norms(model, batch, squares), expected, rtol=1e-4)
            with gs.track(model, batch_size=B) as tracker:
                tracker.backward(squares(model, batch))
            assert_sqnorms(tracker.stats, expected, rtol=1e-4)
    if name in ("added", "product with"):
        assert len(decided) == 2  # for norms alone, and beside training
