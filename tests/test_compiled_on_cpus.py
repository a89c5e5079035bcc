"""Compiled models run eagerly in a context on a CPU, which takes less time than their graphs do."""

import pytest
import torch
from torch import nn

import gradstats as gs
from gradstats.capture import _tracker
from gradstats.capture.operations._formats import SettledFormats
from tests.functions import Kernel
from tests.losses import losses_of
from tests.oracle import assert_sqnorms, oracle_sqnorms

B = 6


class Sequences(nn.Module):
    """What no single graph can hold: trained positions, a recurrent layer, a tied head."""

    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(11, 8), nn.Embedding(5, 8)
        self.layer = nn.LSTM(8, 8, batch_first=True)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        return self.head(self.layer(x)[0].mean(1))


def case(model):
    if isinstance(model, Sequences):
        return torch.randint(11, (B, 5)), torch.randint(11, (B,))
    return torch.randn(B, 4), torch.randint(3, (B,))


def graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


MODELS = {
    "layers": lambda: nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3)),
    "sequences": Sequences,
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("fullgraph", [True, False])
def test_no_graph_is_traced(name, fullgraph):
    torch._dynamo.reset()
    model = MODELS[name]()
    batch = case(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=fullgraph)
    expected, before = oracle_sqnorms(model, batch, losses_of), graphs()
    assert_sqnorms(gs.per_example_norms(compiled, batch, losses_of), expected, 1e-5)
    with gs.track(compiled, batch_size=B) as tracker:
        losses_of(compiled, batch).mean().backward()
    assert_sqnorms(tracker.stats, expected, 1e-5)
    assert graphs() == before


def test_the_models_own_graphs_are_kept():
    """Steps outside a context run the graph that they ran before, and it is not made again."""
    torch._dynamo.reset()
    model = MODELS["layers"]()
    batch = case(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    expected = oracle_sqnorms(model, batch, losses_of)
    losses_of(compiled, batch).mean().backward()
    before = graphs()
    for _ in range(2):
        assert_sqnorms(gs.per_example_norms(compiled, batch, losses_of), expected, 1e-5)
        with torch.compiler.set_stance("fail_on_recompile"):
            losses_of(compiled, batch).mean().backward()
    assert graphs() == before
    assert torch._dynamo.eval_frame._stance.stance == "default"


def test_a_compiled_loss_runs_eagerly_too():
    torch._dynamo.reset()
    model = MODELS["layers"]()
    batch = case(model)
    expected, before = oracle_sqnorms(model, batch, losses_of), graphs()
    compiled = torch.compile(losses_of, backend="aot_eager", fullgraph=True)
    assert_sqnorms(gs.per_example_norms(model, batch, compiled), expected, 1e-5)
    assert graphs() == before


@pytest.mark.parametrize("fullgraph", [True, False])
def test_what_is_first_compiled_inside_a_context(monkeypatch, fullgraph):
    """It runs eagerly there, and as a graph afterwards."""
    torch._dynamo.reset()
    monkeypatch.setattr(_tracker, "compiler_is_used", lambda: False)
    model = MODELS["layers"]()
    batch = case(model)
    expected, before, made = oracle_sqnorms(model, batch, losses_of), graphs(), []

    def losses(model, batch):
        if not made:
            made.append(torch.compile(losses_of, backend="aot_eager", fullgraph=fullgraph))
        return made[0](model, batch)

    assert_sqnorms(gs.per_example_norms(model, batch, losses), expected, 1e-5)
    assert graphs() == before
    assert torch._dynamo.eval_frame._stance.stance == "default"
    losses(model, batch).mean().backward()
    assert graphs() == before + 1


class Apart(nn.Module):
    """Calls a function without a rule, beside others that the compiler is told to leave out."""

    def __init__(self):
        super().__init__()
        self.weight, self.head = nn.Parameter(torch.randn(4)), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.scaled(x))

    @torch.compiler.disable(recursive=False)
    def scaled(self, x):
        return Kernel.apply(x.sin(), self.weight).cos() * 2.0


# torch.compile looks at .grad of what enters a graph; it hides the warning, not from pytest.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_one_example_at_a_time_between_graphs():
    """Between graphs the compiler does not compile what gradstats runs beside each operation."""
    torch._dynamo.reset()
    model = Apart()
    batch = case(model)
    compiled = torch.compile(model, backend="aot_eager")
    expected = oracle_sqnorms(model, batch, losses_of)
    stats = gs.per_example_norms(compiled, batch, losses_of, fallback="vmap")
    assert_sqnorms(stats, expected, 1e-5)
    handler = SettledFormats.__torch_function__.__code__
    assert not torch._dynamo.eval_frame._debug_get_cache_entry_list(handler)


def test_a_compiler_that_was_reset():
    """It holds no backend then, while functions that were compiled are compiled anew."""
    torch._dynamo.reset()
    model = MODELS["layers"]()
    batch = case(model)
    compiled = torch.compile(losses_of, backend="aot_eager", fullgraph=True)
    expected, before = oracle_sqnorms(model, batch, losses_of), graphs()
    compiled(model, batch)
    for _ in range(2):
        assert_sqnorms(gs.per_example_norms(model, batch, compiled), expected, 1e-5)
        torch._dynamo.reset()
    assert graphs() == before + 1
