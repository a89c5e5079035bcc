"""Functions of TorchScript, of which nobody knows what they do to the examples."""

import pytest
import torch
from torch import nn

import gradstats as gs
from tests.rules.operation import check_operation, check_refused, normal

BATCH, WIDTH = 3, 4
LAYER = {"layer": nn.Linear(WIDTH, 2)}


@torch.jit.script
def turned(t: torch.Tensor) -> torch.Tensor:
    return t.transpose(0, 1).sin()


@torch.jit.script
def scaled(t: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return t * w


class Turned(nn.Module):
    def forward(self, t):
        return t.transpose(0, 1).sin()


SCRIPTS = {
    "function": turned,
    "traced function": torch.jit.trace(lambda t: t.transpose(0, 1).sin(), torch.randn(2, 3, 2)),
    "module": torch.jit.script(Turned()),
    "traced module": torch.jit.trace(Turned(), torch.randn(2, 3, 2)),
}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_a_script_that_moves_the_examples(script):
    for positions in (5, BATCH):  # as many positions as examples: shapes tell nothing
        check_refused(
            lambda m, x: script(m.layer(x)).transpose(0, 1), LAYER, normal(BATCH, positions, WIDTH),
            error=gs.GradStatsError, match="lost at.*of TorchScript",
        )  # fmt: skip


def test_a_script_that_keeps_the_examples():
    keep = torch.jit.script(torch.nn.functional.silu)
    check_operation(lambda m, x: keep(m.layer(x)), LAYER, normal(BATCH, 5, WIDTH))


def test_a_script_of_constants_makes_constants():
    """Otherwise a tensor of as many rows as examples would pass for theirs."""
    check_operation(
        lambda m, x: m.layer(x) @ (scaled(torch.eye(2).double(), torch.ones(2)) @ m.w),
        {**LAYER, "w": (2, BATCH)},
        normal(2, WIDTH),
    )


def test_a_script_with_a_parameter_is_refused():
    check_refused(
        lambda m, x: scaled(x, m.w), {"w": (WIDTH,)}, normal(BATCH, WIDTH),
        match="parameter 'w'.*without passing through",
    )  # fmt: skip


class Scaled(nn.Module):
    def forward(self, t, w):
        return t * w


def test_a_script_module_that_is_given_a_parameter():
    """As e3nn compiles its layers."""
    script = torch.jit.script(Scaled())
    check_refused(
        lambda m, x: script(x, m.w), {"w": (WIDTH,)}, normal(BATCH, WIDTH),
        match="forward of TorchScript .*parameter 'w'.*as it was before torch.jit .*exclude=",
    )  # fmt: skip
