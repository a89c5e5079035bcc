"""Compiled graphs that run inside contexts: what they consist of was followed when traced."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.registry import lookup_backend
from torch.nn import functional
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

import gradstats as gs
from gradstats.capture import _mode
from tests.dispatched import Operations
from tests.losses import losses_of
from tests.oracle import assert_sqnorms, oracle_gradients, oracle_sqnorms, sqnorms_of

B = 6

pytestmark = [
    pytest.mark.usefixtures("graphs_run_on_cpus"),
    # torch.compile looks at .grad of what enters a graph; it hides the warning, not from pytest.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


class Compiled(nn.Module):
    """Several modules as one graph; ``nn.Sequential.compile`` compiles nothing."""

    def __init__(self, *modules):
        super().__init__()
        self.modules_in_turn = nn.ModuleList(modules)
        self.compile(backend="aot_eager", fullgraph=True)

    def forward(self, x):
        for module in self.modules_in_turn:
            x = module(x)
        return x


class Model(nn.Module):
    """A compiled part between two that run eagerly, of which the first is computed twice."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Embedding(11, 8), nn.LayerNorm(8), nn.Tanh())
        self.middle = Compiled(nn.Embedding(11, 8), nn.Linear(8, 8), nn.GELU())
        self.last = nn.Linear(8, 3)

    def forward(self, ids):
        first = checkpoint(self.first, ids, use_reentrant=False)
        return self.last(self.middle(ids) * first).mean(1)


class After(nn.Module):
    """A compiled part whose gradient goes on through one that is computed again."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Embedding(11, 8), nn.LayerNorm(8), nn.Tanh())
        self.positions = nn.Parameter(torch.randn(B, 8))
        self.last = Compiled(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, ids):
        if self.positions is None:
            return self.last(self.first(ids)).mean(1)
        hidden = checkpoint(lambda ids: self.first(ids) + self.positions, ids, use_reentrant=False)
        return self.last(hidden).mean(1)


class Other(TorchFunctionMode):
    """A mode of the user's."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def batch_of(kind):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    return kind(), (torch.randint(11, (B, B)), torch.randint(3, (B,)))


@pytest.mark.parametrize("kind", [Model, After])
def test_what_a_graph_consists_of_is_not_followed_again(kind, monkeypatch):
    model, batch = batch_of(kind)
    expected = oracle_sqnorms(model, batch, losses_of)
    assert_sqnorms(gs.per_example_norms(model, batch, losses_of), expected, 1e-5)
    followed = []

    def note(tracker, func, *rest, follow=_mode.follow_repeated):
        followed.append(func)
        follow(tracker, func, *rest)

    monkeypatch.setattr(_mode, "follow_repeated", note)
    with gs.track(model, batch_size=B) as tracker:
        tracker.backward(losses_of(model, batch))
    assert_sqnorms(tracker.stats, expected, 1e-5)
    assert torch.tanh in followed  # of the part that runs eagerly
    parts = torch._ops.OpOverload, torch._ops.OpOverloadPacket
    assert not [func for func in followed if isinstance(func, parts)]


@pytest.mark.parametrize("dynamic", [None, True])
def test_sizes_that_vary(dynamic, caplog):
    """From the second size on, or from the first, they are symbols; B is one of the lengths."""
    caplog.set_level("INFO", "gradstats")
    model, _ = batch_of(After)
    model.positions = None
    model.first = Compiled(*model.first, nn.Linear(8, 8))
    model.first.compile(backend="aot_eager", fullgraph=True, dynamic=dynamic)
    model.last.compile(backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for batch_size, length in ((6, 5), (6, 7), (6, 9), (6, 6), (5, 8)):
        batch = torch.randint(11, (batch_size, length)), torch.randint(3, (batch_size,))
        expected = oracle_sqnorms(model, batch, losses_of)
        assert_sqnorms(gs.per_example_norms(model, batch, losses_of), expected, 1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 6
    assert not caplog.messages, "a graph ran operation by operation"


def test_a_graph_that_takes_drawn_values(caplog):
    """They are data there as others are."""
    caplog.set_level("INFO", "gradstats")
    torch._dynamo.reset()
    model, noise = Compiled(nn.Linear(4, 4), nn.Tanh()), torch.Generator().manual_seed(0)
    targets = torch.randn(B, 4)

    def losses(model, targets):
        drawn = torch.randn(B, 4, generator=noise.manual_seed(1)).to(targets.dtype)
        return (model(2 * drawn) - targets).square().sum(1)

    with gs.track(model, batch_size=B) as tracker:
        tracker.backward(losses(model, targets))
    assert_sqnorms(tracker.stats, oracle_sqnorms(model, targets, losses), 1e-5)
    assert not caplog.messages, "a graph ran operation by operation"


def test_sizes_that_the_user_marks_as_dynamic():
    """A graph would be of one batch size: the compiler refuses it where it must be of any."""
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for size in (5, 7):
        batch = torch.randn(size, 4), torch.randint(3, (size,))
        torch._dynamo.mark_dynamic(batch[0], 0)
        stats = gs.per_example_norms(compiled, batch, losses_of)
        assert_sqnorms(stats, oracle_sqnorms(model, batch, losses_of), 1e-5)


def test_under_autocast_norms_are_as_precise_as_eagerly():
    """A graph's backward is traced with the autocast that the forward is called in."""

    def losses_under_autocast(model, batch):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return losses_of(model, batch)

    model, batch = batch_of(After)
    model.positions = None
    eagerly = gs.per_example_norms(model, batch, losses_under_autocast).by_parameter
    model.first = Compiled(*model.first)
    found = gs.per_example_norms(model, batch, losses_under_autocast).by_parameter
    for one, other in zip(eagerly.values(), found.values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=0)


def test_modes_of_others_may_have_any_attributes():
    class Tracking(Other):
        tracker = None

    model, batch = batch_of(Model)
    expected = oracle_sqnorms(model, batch, losses_of)
    with Tracking(), gs.track(model, batch_size=B) as tracker, Tracking():
        tracker.backward(losses_of(model, batch))
    assert_sqnorms(tracker.stats, expected, 1e-5)


def test_a_graph_that_fails_leaves_the_modes_as_they_were():
    model, batch = batch_of(Model)
    expected = oracle_sqnorms(model, batch, losses_of)
    gs.per_example_norms(model, batch, losses_of)
    with Other(), gs.track(model, batch_size=B) as tracker, Other():
        before = _get_current_function_mode_stack()
        with pytest.raises(IndexError):
            model.middle(batch[0] + 11)
        assert _get_current_function_mode_stack() == before
        tracker.backward(losses_of(model, batch))
        assert _get_current_function_mode_stack() == before
    assert_sqnorms(tracker.stats, expected, 1e-5)


class Weighted(Compiled):
    """Takes what it weights its values by from outside of its graph."""

    def forward(self, x, weights):
        return super().forward(x) * weights


class Choosing(nn.Module):
    """Calls one graph with operands of several kinds, all of one shape, B positions long."""

    def __init__(self):
        super().__init__()
        self.graph = Weighted(nn.Linear(8, 8), nn.Tanh())
        self.embed, self.last = nn.Embedding(11, 8), nn.Linear(8, 3)
        self.trained = nn.Parameter(torch.randn(B, 8))
        self.register_buffer("kept", torch.randn(B, 8))
        self.kind = ""

    def forward(self, ids):
        hidden = self.embed(ids)
        weights = {
            "constant": lambda: self.kept.cos(),
            "derived": lambda: self.trained.sin(),
            "data": lambda: self.embed(ids[:, 0]),
            "turned": lambda: self.embed(ids[:, :B]).mean(1).flip(0),
        }[self.kind]()
        pooled = hidden.mean(1)
        return self.last(self.graph(pooled, weights) if self.kind != "constant" else
                         self.graph(hidden, weights).mean(1))  # fmt: skip


def test_a_graph_is_given_other_operands_than_it_was_traced_with():
    """Shapes and types agree, so that the compiler takes the graph that it has."""
    model, batch = batch_of(Choosing)
    for kind in ("data", "derived", "data", "constant", "data"):
        model.kind = kind
        expected = oracle_sqnorms(model, batch, losses_of)
        assert_sqnorms(gs.per_example_norms(model, batch, losses_of), expected, 1e-5)
    model.kind = "turned"
    with pytest.raises(gs.ExampleAxisError, match="MulBackward0 combines"):
        gs.per_example_norms(model, batch, losses_of)


class Several(nn.Module):
    """A graph that returns, beside its values, what belongs to no example or lies elsewhere."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.embed, self.table = nn.Embedding(11, 8), nn.Parameter(torch.randn(B, 8))
        self.compile(backend="aot_eager", fullgraph=True)

    def forward(self, ids):
        hidden = self.embed(ids)
        others = {
            "positions": lambda: torch.arange(ids.shape[1]),
            "table": lambda: self.table.tanh(),
            "folded": lambda: hidden.flatten(0, 1),
            "turned": lambda: hidden.transpose(0, 1),
        }
        return hidden, others[self.kind]()


class Returning(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.part, self.last = Several(kind), nn.Linear(8, 3)

    def forward(self, ids):
        hidden, other = self.part(ids)
        if self.kind == "positions":
            return self.last(hidden * self.part.table[other]).mean(1)
        if self.kind == "table":
            return self.last(hidden * other).mean(1)
        sums = self.last(other).tanh()
        sums = sums.view(B, -1, 3).sum(1) if self.kind == "folded" else sums.sum(0)
        return self.last(hidden).mean(1) + sums


@pytest.mark.parametrize("kind", ["positions", "table", "folded", "turned"])
def test_what_graphs_return_is_followed_outside_of_them(kind):
    """With as many positions as examples no shape tells what is what."""
    model, batch = batch_of(lambda: Returning(kind))
    expected = oracle_sqnorms(model, batch, losses_of)
    for _ in range(2):
        assert_sqnorms(gs.per_example_norms(model, batch, losses_of), expected, 1e-5)


def test_a_backend_that_traces_nothing():
    model, batch = batch_of(After)
    model.positions = None
    model.last.compile(backend="eager", fullgraph=True)
    expected = oracle_sqnorms(model, batch, losses_of)
    for _ in range(2):
        assert_sqnorms(gs.per_example_norms(model, batch, losses_of), expected, 1e-5)


@pytest.mark.parametrize("options", [{}, {"padding": 1, "dilation": 2}, {"groups": 2, "stride": 2}])
def test_no_graph_relies_on_the_strides_of_what_it_keeps(options):
    """Inductor may keep operands of a convolution with others than they were traced with."""
    targets = set()

    def note(graph, inputs):
        targets.update(node.target for node in graph.graph.nodes)
        return make_boxed_func(graph)

    torch._dynamo.reset()
    layers = nn.Conv2d(2, 4, 3, **options), nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    model = nn.Sequential(*layers).double()
    batch = torch.randn(B, 2, 9, 9).double(), torch.randint(3, (B,))
    expected = oracle_sqnorms(model, batch, losses_of)
    compiled = torch.compile(model, backend=aot_autograd(fw_compiler=note))
    with gs.track(compiled, batch_size=B) as tracker:
        tracker.backward(losses_of(compiled, batch))
    assert_sqnorms(tracker.stats, expected, 1e-9)
    assert torch.ops.aten.convolution.default in targets
    assert torch.ops.aten.as_strided.default not in targets


def test_rows_of_examples_as_long_as_they_vary():
    """A graph that returns them folded does not know how many rows an example has."""
    model, _ = batch_of(lambda: Returning("folded").double())
    for length in (5, 7, 9, 6):
        batch = torch.randint(11, (B, length)), torch.randint(3, (B,))
        expected = oracle_sqnorms(model, batch, losses_of)
        assert_sqnorms(gs.per_example_norms(model, batch, losses_of), expected, 1e-5)


class Meeting(Compiled):
    """Adds one number of every example to the values of each, along the wrong axis."""

    def forward(self, x):
        hidden = super().forward(x)
        return functional.linear(hidden, torch.eye(B), hidden[:, 0])


def test_examples_that_meet_in_a_graph_are_refused():
    torch._dynamo.reset()
    model = Meeting(nn.Linear(4, B), nn.Tanh())
    with pytest.raises(gs.CoupledExamplesError, match="different examples"):
        gs.per_example_norms(model, (torch.randn(B, 4), torch.randint(3, (B,))), losses_of)


def chained(hidden, weight):
    hidden.add_(weight).mul_(weight)


def changed_afterwards(hidden, weight):
    hidden.add_(weight).mul_(2)


def in_a_column(hidden, weight):
    hidden[:, 0] = weight[0]


def through_a_view(hidden, weight):
    hidden.view(B, 2, 2).mul_(weight.view(2, 2))


WRITES = [chained, changed_afterwards, in_a_column, through_a_view]


def check_graphs(model, x, loss_fn):
    """Check norms and training gradients of a compiled model against the oracle."""
    gradients = oracle_gradients(model, x, loss_fn)
    check_against(gradients, model, x, loss_fn)


def check_against(gradients, model, x, loss_fn):
    """Check the same against the per-example gradients of the oracle."""
    expected = sqnorms_of(gradients)
    assert_sqnorms(gs.per_example_norms(model, x, loss_fn), expected, 1e-9)
    for fused in (True, False):
        model.zero_grad()
        with gs.track(model, batch_size=B, fused=fused) as tracker:
            tracker.backward(loss_fn(model, x))
        assert_sqnorms(tracker.stats, expected, 1e-9)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, gradients[name].mean(0))


class OfAList(nn.Module):
    """Contracts operands that stand in a list."""

    def __init__(self):
        super().__init__()
        self.first, self.weight = nn.Linear(4, 4), nn.Parameter(torch.randn(4, 2))

    def forward(self, x):
        return torch.einsum("bi,io->bo", [self.first(x), self.weight])


def test_an_equation_of_a_list_in_a_graph():
    model = Compiled(OfAList()).double()
    check_graphs(model, torch.randn(B, 4).double(), sines)


class Written(nn.Module):
    """Changes data in place, by a parameter, in a statement of its own."""

    def __init__(self, write):
        super().__init__()
        self.first, self.last, self.write = nn.Linear(4, 4), nn.Linear(4, 2), write
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x):
        hidden = self.first(x) * 1
        self.write(hidden, self.weight)
        return self.last(hidden)


def sines(model, x):
    return model(x).sin().sum(1)


@pytest.mark.parametrize("write", WRITES)
def test_what_a_graph_changes_in_place(write):
    model = Written(write).double()
    model.compile(backend="aot_eager")
    check_graphs(model, torch.randn(B, 4).double(), sines)


class Adding(nn.Module):
    """A graph that writes into its operand."""

    def __init__(self, values):
        super().__init__()
        self.layer, self.values = nn.Linear(B, B), values

    def forward(self, x, total):
        total.add_(self.values(self.layer(x)))


def into_an_operand(model, x):
    total = x.cos()
    model(x, total)
    return total.sin().sum(1)


def test_what_a_graph_writes_into_its_operand():
    model = Adding(torch.tanh).double()
    model.compile(backend="aot_eager")
    check_graphs(model, torch.randn(B, B).double(), into_an_operand)


def test_examples_that_meet_in_what_a_graph_writes_are_refused():
    model = Adding(lambda hidden: hidden @ hidden.mT).double()
    model.compile(backend="aot_eager")
    with pytest.raises(gs.CoupledExamplesError, match="every example with every other"):
        gs.per_example_norms(model, torch.randn(B, B).double(), into_an_operand)


def part(model, x):
    return model.activation(model.second(model.first(x).tanh()))


compiled_part = torch.compile(part, backend="aot_eager")
compiled_activation = torch.compile(lambda x: x.sin() * x.tanh(), backend="aot_eager")


class Checkpointed(nn.Module):
    """A part that is computed again in the backward: a graph, or around one."""

    def __init__(self, graph, use_reentrant):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.activation = compiled_activation if graph == "activation" else torch.sin
        self.part = compiled_part if graph == "part" else part
        self.use_reentrant = use_reentrant
        # By this it is seen that there are graphs.
        self.last.compile(backend="aot_eager")

    def forward(self, x):
        return self.last(checkpoint(self.part, self, x, use_reentrant=self.use_reentrant))


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("graph", ["part", "activation"])
def test_checkpoints_around_graphs(graph, use_reentrant):
    torch._dynamo.reset()
    model = Checkpointed(graph, use_reentrant=False).double()
    x = torch.randn(B, 4).double().requires_grad_()
    # torch.autograd.grad, by which the oracle is found, finds no parameters in reentrant ones.
    gradients = oracle_gradients(model, x, sines)
    model.use_reentrant = use_reentrant
    check_against(gradients, model, x, sines)


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        hidden = self.first(x)
        return self.last(torch.cond(x.sum() > 0, torch.sin, torch.cos, (hidden,)))


def test_bodies_that_a_backend_does_not_trace_are_refused():
    torch._dynamo.reset()
    model, x = Branches(), torch.randn(B, 4)
    compiled = torch.compile(model, backend="eager")
    with pytest.raises(gs.UnsupportedOperationError, match=r"cond of data.*force_eager"):
        gs.per_example_norms(compiled, x, sines)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_branches_between_graphs():
    """What contexts see in place of torch.cond runs nothing that is compiled."""
    torch._dynamo.reset()
    model, x = Branches().double(), torch.randn(B, 4).double()
    torch.compile(nn.Linear(3, 3), backend="eager")(torch.randn(2, 3))
    check_against(oracle_gradients(model, x, sines), model, x, sines)


@torch.compile(backend="aot_eager")
def scaled_part(model, x):
    return model.first(x), model.first.weight.sum()


class Summing(nn.Module):
    """A graph that returns what it computes of a parameter alone, which cannot be traced."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)
        self.last.compile(backend="aot_eager")

    def forward(self, x):
        hidden, scale = scaled_part(self, x)
        return self.last(hidden * scale)


def test_a_graph_that_cannot_be_traced_keeps_no_model_alive():
    def measured():
        model, x = Summing().double(), torch.randn(B, 4).double()
        assert_sqnorms(gs.per_example_norms(model, x, sines), oracle_sqnorms(model, x, sines), 1e-9)
        return weakref.ref(model.last.weight)

    torch._dynamo.reset()
    weight = measured()
    gc.collect()
    assert weight() is None


class Keeping(nn.Module):
    """Keeps the batch that it was given last."""

    def __init__(self):
        super().__init__()
        self.layer, self.kept = nn.Linear(4, 2), None

    def forward(self, x):
        self.kept = x
        return self.layer(x * self.kept)


def test_a_compiled_model_that_keeps_its_batch():
    torch._dynamo.reset()
    model, x = Keeping().double(), torch.randn(B, 4).double()
    compiled = torch.compile(model, backend="aot_eager")
    compiled(x)
    expected = oracle_sqnorms(model, x, sines)
    for _ in range(2):
        with gs.track(compiled, batch_size=B) as tracker:
            tracker.backward(sines(compiled, x))
        assert_sqnorms(tracker.stats, expected, 1e-9)


class Shifted(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4))

    def forward(self, x):
        return x + torch.stack([self.weight, self.weight]).sum(0)


def test_under_autocast_gradients_are_pulled_back_as_precisely_as_eagerly():
    """Through what is computed from parameters alone, which each example sees."""

    def losses(model, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return sines(model, x)

    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Shifted(), torch.randn(B, 4)
    expected = oracle_sqnorms(model, x, sines)
    model.compile(backend="aot_eager")
    assert_sqnorms(gs.per_example_norms(model, x, losses), expected, 1e-5)


class Mapping(nn.Module):
    """Maps over what is trained, which no graph can show inside a context."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.last(torch.vmap(lambda row: row * 2)(self.first(x)))


def test_what_contexts_cannot_run_as_a_graph_remains_one_outside():
    torch._dynamo.reset()
    model, x, runs = Mapping().double(), torch.randn(B, 4).double(), []

    def backend(graph, operands):
        compiled = lookup_backend("aot_eager")(graph, operands)

        def run(*operands):
            runs.append(graph)
            return compiled(*operands)

        return run

    def graphs_of_a_step():
        runs.clear()
        sines(compiled, x).mean().backward()
        return [*runs]

    compiled = torch.compile(model, backend=backend)
    expected = oracle_sqnorms(model, x, sines)
    # The first context of all changes torch.vmap, for which the compiler records anew.
    assert_sqnorms(gs.per_example_norms(model, x, sines), expected, 1e-9)
    before = graphs_of_a_step()
    assert len(before) == 1
    for number in range(3):
        seen = torch._dynamo.utils.counters["frames"]["total"]
        assert_sqnorms(gs.per_example_norms(compiled, x, sines), expected, 1e-9)
        # What is skipped is not recorded anew.
        assert number == 0 or torch._dynamo.utils.counters["frames"]["total"] == seen
        assert graphs_of_a_step() == before


class Acting(nn.Module):
    """A layer and any function."""

    def __init__(self, act):
        super().__init__()
        self.layer, self.act = nn.Linear(4, 4), act

    def forward(self, x):
        return self.act(self.layer(x))


def test_a_reset_forgets_what_was_skipped():
    torch._dynamo.reset()
    x = torch.randn(B, 4).double()
    mapping = Acting(lambda hidden: torch.vmap(torch.sin)(hidden)).double()
    skipped = torch.compile(mapping, backend="aot_eager")
    assert_sqnorms(gs.per_example_norms(skipped, x, sines), oracle_sqnorms(mapping, x, sines), 1e-9)
    torch._dynamo.reset()
    model = Acting(torch.sin).double()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_sqnorms(gs.per_example_norms(compiled, x, sines), oracle_sqnorms(model, x, sines), 1e-9)


@pytest.mark.parametrize("fullgraph", [True, False])
def test_many_sizes_of_batches_leave_graphs_to_steps_outside(fullgraph):
    """A graph is recorded for each; from the fifth on the model runs eagerly."""
    model, _ = batch_of(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double())
    compiled = torch.compile(model, backend="aot_eager", fullgraph=fullgraph)

    def graphs():
        return torch._dynamo.utils.counters["stats"]["unique_graphs"]

    for size in range(2, 12):
        x = torch.randn(size, 4).double()
        expected = oracle_sqnorms(model, x, sines)
        assert_sqnorms(gs.per_example_norms(compiled, x, sines), expected, 1e-9)
    assert graphs() == 4
    sines(compiled, x).mean().backward()
    assert graphs() == 5


class Filled(nn.Module):
    """A weight whose first row is another parameter."""

    def __init__(self):
        super().__init__()
        self.weight, self.row = nn.Parameter(torch.rand(4, 4)), nn.Parameter(torch.rand(4))

    def forward(self, x):
        weight = self.weight.clone()
        weight[0] = self.row
        return x @ weight


class FilledWithData(Filled):
    """Copies of a weight that data are written into."""

    def forward(self, x):
        weight = self.weight.expand(B, 4, 4).clone()
        weight[:, 0] = x.sin() * self.row
        return (x.unsqueeze(1) @ weight).squeeze(1)


@pytest.mark.parametrize("kind", [Filled, FilledWithData])
def test_copies_of_parameters_that_a_graph_writes_into(kind, monkeypatch):
    # What nobody has written is not a number.
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch._dynamo.reset()
    model = kind().double()
    model.compile(backend="aot_eager")
    torch.use_deterministic_algorithms(True)
    try:
        check_graphs(model, torch.randn(B, 4).double(), sines)
    finally:
        torch.use_deterministic_algorithms(False)


def overwriting(written):
    """Return a backend whose graphs write their results where the next run will, as CUDA graphs."""

    def compiled(graph, examples):
        kept = []

        def run(*operands):
            results = graph(*operands)
            if not kept:
                kept.extend(item.clone() if isinstance(item, Tensor) else item for item in results)
            for place, item in zip(kept, results, strict=True):
                if isinstance(item, Tensor):
                    place.copy_(item)
            return [place.detach() if isinstance(place, Tensor) else place for place in kept]

        written.append((examples, graph))
        return make_boxed_func(run)

    return aot_autograd(fw_compiler=compiled, bw_compiler=compiled)


def test_statistics_outlast_what_graphs_overwrite():
    torch._dynamo.reset()
    model = nn.Sequential(nn.Embedding(11, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    compiled = torch.compile(model, backend=overwriting([]), fullgraph=True)

    def losses(model, batch):
        return functional.cross_entropy(model(batch[0]).mean(1), batch[1], reduction="none")

    found, expected, bounds = [], [], []
    for _ in range(3):
        batch = torch.randint(11, (B, 5)), torch.randint(3, (B,))
        expected.append(oracle_sqnorms(model, batch, losses))
        bounds.append(gs.per_example_norms(compiled, batch, losses).error_bound)
        with gs.track(compiled, batch_size=B) as tracker:
            tracker.backward(losses(compiled, batch))
        found += [tracker.stats, gs.per_example_norms(compiled, batch, losses)]
    for number, stats in enumerate(found):
        assert_sqnorms(stats, expected[number // 2], 1e-5)
        torch.testing.assert_close(stats.error_bound, bounds[number // 2], rtol=0, atol=0)


def test_graphs_of_norms_alone_form_no_weight_gradients():
    torch._dynamo.reset()
    model = nn.Sequential(nn.Embedding(11, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    written = []
    compiled = torch.compile(model, backend=overwriting(written), fullgraph=True)
    batch = torch.randint(11, (B, 5)), torch.randint(3, (B,))

    def losses(model, batch):
        return functional.cross_entropy(model(batch[0]).mean(1), batch[1], reduction="none")

    gs.per_example_norms(compiled, batch, losses)
    (examples, _), (_, backward) = written
    probes = [example for example in examples if example.dtype == torch.float64]
    assert [tuple(probe.shape) for probe in probes] == [(5, 2, B)]
    (output,) = backward.graph.find_nodes(op="output")
    (report,) = [node for node in output.args[0] if node is not None]
    assert report.meta["val"].shape == (5, 2, B)


def test_a_compiled_step_reads_no_number():
    model, batch = batch_of(Model)
    for _ in range(2):
        tracker = gs.track(model, batch_size=B)
        tracker.__enter__()
        try:
            losses = losses_of(model, batch)
            with Operations() as operations:
                tracker.backward(losses)
                tracker.__exit__(None, None, None)
                assert tracker.stats.error_bound.shape == (B,)
                losses.mean().item()  # which is counted
        finally:
            tracker.__exit__(None, None, None)
        # the host reads a number of the device's, and waits for it
        assert operations.found.count("_local_scalar_dense") == 1


def test_many_contexts_leave_graphs_to_steps_outside():
    """Modes of the model and selections of parameters are recorded anew as well."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0), nn.Linear(4, 3))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x, y = torch.randn(6, 4), torch.randint(3, (6,))
    for size in (6, 5):
        batch = x[:size], y[:size]
        expected = oracle_sqnorms(model, batch, losses_of)
        losses_of(compiled.train(), batch).mean().backward()
        with gs.track(compiled, batch_size=size) as tracker:
            tracker.backward(losses_of(compiled, batch))
        assert_sqnorms(tracker.stats, expected, 1e-5)
        for mode in (compiled.train, compiled.eval):
            assert_sqnorms(gs.per_example_norms(mode(), batch, losses_of), expected, 1e-5)
        for name in expected:
            stats = gs.per_example_norms(compiled, batch, losses_of, parameters=name)
            assert_sqnorms(stats, {name: expected[name]}, 1e-5)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    with torch.no_grad():
        compiled(x)
        compiled(x[:5])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > graphs


def test_a_late_backward_of_norms_alone_is_refused():
    """Its graph forms no gradients of weights, which would silently be missing."""
    _, batch = batch_of(Model)
    kept = []

    def losses(model, batch):
        kept.append(model(batch[0]).square().mean())
        return losses_of(model, batch)

    model = nn.Sequential(nn.Embedding(11, 8), nn.Flatten(), nn.Linear(8 * B, 3))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    gs.per_example_norms(compiled, batch, losses)
    with pytest.raises(gs.TrackingError, match="after its tracking context was closed"):
        kept[-1].backward()


class Broken(nn.Module):
    """Two graphs that share a weight, compiled with whatever calls it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        hidden = self.layer(x).tanh()
        torch._dynamo.graph_break()
        return self.layer(hidden)


def test_uses_in_two_graphs_of_a_loss_function_are_computed_again():
    torch._dynamo.reset()
    model, batch = Broken(), (torch.randn(B, 4), torch.randint(4, (B,)))
    stats = gs.per_example_norms(model, batch, torch.compile(losses_of, backend="aot_eager"))
    assert_sqnorms(stats, oracle_sqnorms(model, batch, losses_of), 1e-5)


@pytest.mark.parametrize("fallback", [None, "vmap"])
def test_uses_in_two_graphs_are_computed_again(fallback):
    torch._dynamo.reset()
    layer = Compiled(nn.Linear(4, 4), nn.Tanh())
    model, batch = nn.Sequential(layer, layer), (torch.randn(B, 4), torch.randint(4, (B,)))
    stats = gs.per_example_norms(model, batch, losses_of, fallback=fallback)
    assert_sqnorms(stats, oracle_sqnorms(model, batch, losses_of), 1e-5)


def test_a_context_whose_backward_was_refused_can_try_again():
    torch._dynamo.reset()
    layer = Compiled(nn.Linear(4, 4), nn.Tanh())
    model, batch = nn.Sequential(layer, layer), (torch.randn(B, 4), torch.randint(4, (B,)))
    with gs.track(model, batch_size=B) as tracker:
        with pytest.raises(gs.CoverageError, match="several compiled graphs"):
            tracker.backward(losses_of(model, batch))
        with torch.compiler.set_stance("force_eager"):
            tracker.backward(losses_of(model, batch))
    assert_sqnorms(tracker.stats, oracle_sqnorms(model, batch, losses_of), 1e-5)


class OutOfOrder(nn.Module):
    """Layers that are used in another order than the model has them, one of them not at all."""

    def __init__(self, breaks: bool):
        super().__init__()
        self.last, self.unused = nn.Linear(8, 3), nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.rand(8) + 0.5)
        self.norm, self.first = nn.LayerNorm(8), nn.Embedding(11, 8)
        self.breaks = breaks

    def forward(self, ids):
        hidden = self.norm(self.first(ids))
        if self.breaks:
            torch._dynamo.graph_break()
        return self.last((self.scale * hidden).tanh()).mean(1)


@pytest.mark.parametrize("breaks", [False, True])
def test_reports_in_another_order_than_the_parameters(breaks):
    torch._dynamo.reset()
    model = OutOfOrder(breaks)
    compiled = torch.compile(model, backend="aot_eager")
    batch = torch.randint(11, (B, 5)), torch.randint(3, (B,))
    expected = oracle_sqnorms(model, batch, losses_of)
    with gs.track(compiled, batch_size=B) as tracker:
        tracker.backward(losses_of(compiled, batch))
    for stats in (tracker.stats, gs.per_example_norms(compiled, batch, losses_of)):
        assert_sqnorms(stats, expected, 1e-5)
        assert list(stats.by_parameter) == [name for name, _ in model.named_parameters()]
        eager = gs.per_example_norms(model, batch, losses_of)
        torch.testing.assert_close(stats.error_bound, eager.error_bound, rtol=1e-3, atol=0)


@pytest.mark.parametrize("size", [3e-20, 3e-22])
def test_bounds_of_squares_that_underflow(size):
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(8, 16, bias=False))
    batch = torch.randn(B, 8) * 1e4, torch.randn(B, 16) * size

    def losses(model, batch):
        return (model(batch[0]) * batch[1]).sum(1)

    first, second = (each.double().square().sum(1) for each in batch)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with gs.track(compiled, batch_size=B) as tracker:
        tracker.backward(losses(compiled, batch))
    eager = gs.per_example_norms(model, batch, losses)
    for stats in (gs.per_example_norms(compiled, batch, losses), tracker.stats):
        error = (stats.norm.double().square() / (first * second) - 1).abs()
        assert (error <= 2 * stats.error_bound).all()
    # beside training the losses, and with them all gradients, are smaller by the batch size
    found = gs.per_example_norms(compiled, batch, losses).error_bound
    torch.testing.assert_close(found, eager.error_bound, rtol=1e-2, atol=0)
