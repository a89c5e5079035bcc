"""Compiled models around the launchers, which are operators that the compiler cannot look into."""

import warnings

import pytest
import torch
from gradstats.kernels import operators
from torch import nn

import gradstats as gs
from gradstats.contractions import _triton
from tests.losses import losses_of
from tests.oracle import assert_sqnorms, oracle_sqnorms

B = 5


def case():
    model = nn.Sequential(nn.Linear(6, 9), nn.LayerNorm(9), nn.GELU(), nn.Linear(9, 3))
    return model, (torch.randn(B, 6), torch.randint(3, (B,)))


def check(model, compiled, batch):
    expected = oracle_sqnorms(model, batch, losses_of)
    assert_sqnorms(gs.per_example_norms(compiled, batch, losses_of), expected, 1e-3)
    with gs.track(compiled, batch_size=B) as tracker:
        tracker.backward(losses_of(compiled, batch))
    assert_sqnorms(tracker.stats, expected, 1e-3)


def test_graphs_on_cuda_tensors():
    torch._dynamo.reset()
    model, batch = case()
    model, batch = model.cuda(), tuple(part.cuda() for part in batch)
    check(model, torch.compile(model, fullgraph=True, backend="aot_eager"), batch)


@pytest.fixture
def launchers_on_the_cpu(monkeypatch):
    """Have the operators launch kernels for CPU tensors too, which Inductor can compile around."""
    library = torch.library.Library("gradstats", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators|.*Overriding")
        for name in operators.OPERATORS:
            launch = operators._launch(name)
            library.impl(name, launch, "CPU", allow_override=True)
    monkeypatch.setattr(_triton, "runs", lambda first, *others: first.dtype == torch.float32)
    yield
    library._destroy()


@pytest.mark.usefixtures("launchers_on_the_cpu", "graphs_run_on_cpus")
def test_outputs_are_as_aligned_as_code_for_cuda_expects(monkeypatch):
    # No code is made for the fake device: everything here lies on the CPU.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch._inductor.graph, "should_assume_input_aligned", lambda example: True)
    torch._dynamo.reset()
    model, batch = case()
    check(model, torch.compile(model), batch)
