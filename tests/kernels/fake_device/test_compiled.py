"""Compiled models around the launchers, which are operators that the compiler cannot look into."""

import warnings

import pytest
import torch
from functorch.compile import make_boxed_func
from gradstats.kernels import operators
from torch import nn
from torch._dynamo.backends.common import aot_autograd

import gradstats as gs
from gradstats.contractions import _triton
from tests.kernels.fake_device.test_models import MODELS
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


@pytest.mark.parametrize("name", ["tied transformer", "convolutions", "embedding", "scale"])
def test_graphs_of_models(name):
    """Through the kernels, with a tied table and what is used several times."""
    torch._dynamo.reset()
    model, batch, losses = MODELS[name][0]()
    expected = oracle_sqnorms(model, batch, losses)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_sqnorms(gs.per_example_norms(compiled, batch, losses), expected, 1e-3)
    with gs.track(compiled, batch_size=len(losses(model, batch))) as tracker:
        tracker.backward(losses(compiled, batch))
    assert_sqnorms(tracker.stats, expected, 1e-3)


@pytest.mark.parametrize(
    ("layer", "shape", "alone", "beside"),
    [
        (nn.Linear(64, 96), (B, 4, 64), {"gram_sqnorm"}, {"gram_sqnorm"}),
        (nn.Linear(16, 16), (B, 64, 16), {"direct_sqnorm"}, {"weight_gradient_sqnorm"}),
        (
            nn.Conv2d(6, 6, 3, groups=6),
            (B, 6, 8, 8),
            {"convolution_sqnorm"},
            {"convolution_weight_gradient_sqnorm"},
        ),
        (
            nn.Conv2d(8, 16, 3),
            (B, 8, 4, 4),
            {"convolution_gram_sqnorm"},
            {"convolution_gram_sqnorm"},
        ),
    ],
    ids=["short", "long", "depthwise", "convolution"],
)
def test_graphs_contract_with_kernels_that_guard_themselves(layer, shape, alone, beside):
    """Also those that give the weight gradient too."""
    found = set()

    def note(graph, inputs):
        targets = [node.target for node in graph.graph.nodes if node.op == "call_function"]
        names = [getattr(target, "_opname", "") for target in targets]
        found.update(name for name in names if hasattr(torch.ops.gradstats, name))
        found.discard("stack_rows")  # which contracts nothing
        return make_boxed_func(graph)

    torch._dynamo.reset()
    layer.bias = None
    model, x = layer.cuda(), torch.randn(shape).cuda()
    compiled = torch.compile(model, fullgraph=True, backend=aot_autograd(fw_compiler=note))
    batch = (x,)

    def losses_of(model, batch):
        return model(batch[0]).square().flatten(1).sum(1)

    expected = oracle_sqnorms(model, batch, losses_of)
    assert_sqnorms(gs.per_example_norms(compiled, batch, losses_of), expected, 1e-3)
    assert found == alone
    found.clear()
    with gs.track(compiled, batch_size=B) as tracker:
        tracker.backward(losses_of(compiled, batch))
    assert_sqnorms(tracker.stats, expected, 1e-3)
    assert found == beside


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
    from torch._inductor import graph

    # No code is made for the fake device: everything here lies on the CPU.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(graph, "should_assume_input_aligned", lambda example: True)
    torch._dynamo.reset()
    model, batch = case()
    check(model, torch.compile(model), batch)
