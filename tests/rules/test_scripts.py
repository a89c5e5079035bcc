"""Functions of TorchScript: followed through their source, or nobody knows what they do."""

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


@torch.jit.script
def snake(t: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    rows = t.reshape(t.shape[0], t.shape[1], -1)
    return (rows + (w + 1e-9).reciprocal() * torch.sin(w * rows).pow(2)).reshape(t.shape)


@torch.jit.script
def gated(t: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    gate, rows = torch.chunk(t + w, 2, -1)
    return torch.nn.functional.silu(gate) * torch.nn.functional.relu(rows)


@torch.jit.script
def combined(a: tuple[torch.Tensor, torch.Tensor], b: list[torch.Tensor], w: torch.Tensor):
    parts = []
    for part in b:
        parts.append(torch.addcmul(a[1], part, a[0]).transpose(0, 1) * w)
    return a[0], parts[0] + parts[1]


@torch.jit.script
def drawn(t: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.dropout(t, 0.5) * w


@torch.jit.script
def written(t: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return t.mul_(2) * w


@torch.jit.script
def differs(t: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return t * w if torch.jit.is_scripting() else t * w.flip(0)


SCRIPTS = {
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


@pytest.mark.parametrize("positions", [5, BATCH])
@pytest.mark.parametrize(
    "run",
    [
        lambda m, h: snake(h, m.w),
        lambda m, h: gated(h, m.w),
        lambda m, h: combined((h, h + 1), [h, h.cos()], m.w)[1].transpose(0, 1),
        lambda m, h: turned(h).transpose(0, 1) * m.w,
    ],
    ids=["a parameter", "functions that may write", "lists", "data alone"],
)
def test_a_script_is_followed_through_its_source(run, positions):
    """As audio codecs' activations, fused biases and associative scans are written."""
    check_operation(
        lambda m, x: run(m, m.layer(x)),
        {"layer": nn.Linear(WIDTH, 2), "w": (1, 2)},
        normal(BATCH, positions, WIDTH),
    )


@pytest.mark.parametrize(
    ("run", "match"),
    [
        (lambda m, x: drawn(x, m.w), "without passing through"),
        (lambda m, x: written(x + 0, m.w), "without passing through"),
        (lambda m, x: x * scaled(m.w, m.w), "without passing through"),
        (lambda m, x: differs(x, m.w), "compiled from returned values that differ"),
    ],
    ids=["draws", "writes", "of parameters", "differs"],
)
def test_a_script_with_a_parameter_that_cannot_be_followed(run, match):
    check_refused(run, {"w": (WIDTH,)}, normal(BATCH, WIDTH), match=f"parameter 'w'.*{match}")


class Scaled(nn.Module):
    def forward(self, t, w):
        return t * w


def test_a_script_module_that_is_given_a_parameter():
    """As e3nn compiles its layers."""
    script = torch.jit.script(Scaled())
    check_refused(
        lambda m, x: script(x, m.w), {"w": (WIDTH,)}, normal(BATCH, WIDTH),
        match="forward of TorchScript .*parameter 'w'.*without torch.jit .*exclude=",
    )  # fmt: skip


def test_scripts_where_no_mode_sees_operations():
    """They are as opaque as other operations there."""

    def unseen(m, x):
        h = m.layer(x)
        with torch._C.DisableTorchFunction():
            return scaled(h, x[:, :2])

    check_operation(unseen, LAYER, normal(BATCH, WIDTH))
