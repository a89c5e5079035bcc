"""Tracking traces under torch.compile(fullgraph=True), and steps do not recompile."""

from __future__ import annotations

import logging
import operator
import re
from collections import Counter

import pytest
import torch
from torch import nn
from torch._dynamo import trace_rules
from torch._dynamo.backends.distributed import DDPOptimizer
from torch._dynamo.backends.registry import lookup_backend
from torch.nn import functional

import gradstats as gs
from gradstats.capture.compiled import _graphs
from tests.functions import Kernel
from tests.losses import losses_of
from tests.oracle import assert_sqnorms, oracle_sqnorms
from tests.zoo import hugging_face

B = 6

pytestmark = [
    pytest.mark.usefixtures("graphs_run_on_cpus"),
    # torch.compile looks at .grad of what enters a graph; it hides the warning, not from pytest.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


@pytest.fixture
def all_is_compiled(caplog):
    """Raise for a graph that runs operation by operation."""
    caplog.set_level(logging.INFO, _graphs.LOG.name)
    yield
    records = caplog.get_records("call")
    assert [each.message for each in records if each.name == _graphs.LOG.name] == []


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.norm = nn.LayerNorm(8)
        self.scale = nn.Parameter(torch.randn(8))
        self.mix = nn.Parameter(torch.randn(8, 8))
        self.expand = nn.Linear(8, 16)
        self.head = nn.Linear(16, 3)

    def forward(self, ids):
        hidden = self.norm(self.embed(ids)) * self.scale
        return self.head(functional.gelu(self.expand(hidden @ self.mix))).mean(1)


def models():
    labels = torch.randint(3, (B,))
    yield nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)), (torch.randn(B, 5), labels)
    convolutional = nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
        nn.Conv2d(8, 4, 3, stride=2, groups=2), nn.GroupNorm(2, 4), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(4, 3),
    ).eval()  # fmt: skip
    yield convolutional, (torch.randn(B, 2, 9, 9), labels)
    yield Tokens(), (torch.randint(11, (B, 5)), labels)


# That Inductor takes such graphs is shown beside the kernels, on the fake device.
@pytest.mark.usefixtures("all_is_compiled")
@pytest.mark.parametrize("number", range(3))
def test_fullgraph(number):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    guarded = []

    def note(guards):
        names = " ".join(each.name for each in guards)
        guarded.append(Counter(re.findall(r"gradstats\w*'\]\.(\w+)", names)))
        return [True] * len(guards)

    model, batch = list(models())[number]
    expected = oracle_sqnorms(model, batch, losses_of)
    options = {"guard_filter_fn": note}
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", options=options)
    for _ in range(3):
        batch = tuple(part.clone() for part in batch)
        stats = gs.per_example_norms(compiled, batch, losses_of)
        assert_sqnorms(stats, expected, 1e-5)
        model.zero_grad()
        with gs.track(compiled, batch_size=B) as tracker:
            losses_of(compiled, batch).mean().backward()
        assert_sqnorms(tracker.stats, expected, 1e-5)
        gradients = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        losses_of(model, batch).mean().backward()
        for got, want in zip(gradients, model.parameters(), strict=True):
            torch.testing.assert_close(got, want.grad, rtol=1e-4, atol=1e-6)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    # Guards of a table's entries, compared whenever a graph is entered, take longer than the graph.
    assert all(0 < max(each.values(), default=0) < 60 for each in guarded), guarded


class Positioned(nn.Module):
    """Positions from a table: what they belong to cannot be read off their shape."""

    def __init__(self, kind, positions):
        super().__init__()
        self.kind, self.positions = kind, positions
        self.tokens = nn.Embedding(11, 8)
        self.head = nn.Linear(8, 3)
        if kind == "parameter":
            self.table = nn.Parameter(torch.randn(positions + 2, 8))
        else:
            self.table = nn.Embedding(positions + 2, 8)
        self.register_buffer("ids", torch.arange(positions + 2))

    def forward(self, ids):
        hidden = self.tokens(ids)
        if self.kind == "parameter":
            hidden = hidden + self.table[: self.positions]
        elif self.kind == "buffer":
            hidden = hidden + self.table(self.ids[: self.positions])
        elif self.kind == "arange":
            hidden = hidden + self.table(torch.arange(self.positions) + 1)
        else:
            hidden = hidden + self.table(torch.arange(self.positions).expand_as(ids))
        return self.head(hidden.tanh()).mean(1)


@pytest.mark.usefixtures("all_is_compiled")
@pytest.mark.parametrize(
    ("kind", "positions"),
    [("parameter", B), ("buffer", B), ("arange", B), ("expanded", B), ("buffer", 5)],
)
def test_positions(kind, positions):
    """What meets no data inside a graph belongs to no example there either, T = B included."""
    torch._dynamo.reset()
    model = Positioned(kind, positions)
    batch = torch.randint(11, (B, positions)), torch.randint(3, (B,))
    expected = oracle_sqnorms(model, batch, losses_of)
    compiled = torch.compile(model, backend="aot_eager")
    for _ in range(2):
        assert_sqnorms(gs.per_example_norms(compiled, batch, losses_of), expected, 1e-5)
        with gs.track(compiled, batch_size=B) as tracker:
            losses_of(compiled, batch).mean().backward()
        assert_sqnorms(tracker.stats, expected, 1e-5)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert_sqnorms(gs.per_example_norms(compiled, batch, losses_of), expected, 1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


# What makes a tensor of B positions inside a graph, each in its own way.
MAKERS = {
    "arange": lambda positions: torch.arange(B) + 1,
    "linspace": lambda positions: torch.linspace(0, B, B).long(),
    "eye": lambda positions: torch.eye(B).argmax(0),
    "tril_indices": lambda positions: torch.tril_indices(B, 1)[0],
    "full": lambda positions: torch.full((B,), 2),
    "as_strided": lambda positions: torch.as_strided(positions, (B,), (1,)),
    "fill": lambda positions: torch.fill(positions[:B], 1),
    "vander": lambda positions: torch.vander(torch.ones(B), 2)[:, 0].long(),
}


class Made(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.make = make
        self.tokens, self.table = nn.Embedding(11, 8), nn.Embedding(B + 2, 8)
        self.head = nn.Linear(8, 3)
        self.register_buffer("positions", torch.arange(B + 2))

    def forward(self, ids):
        hidden = self.tokens(ids) + self.table(self.make(self.positions))
        return self.head(hidden.tanh()).mean(1)


@pytest.mark.usefixtures("all_is_compiled")
@pytest.mark.parametrize("kind", MAKERS)
def test_what_a_graph_makes_belongs_to_no_example(kind):
    torch._dynamo.reset()
    model = Made(MAKERS[kind])
    batch = torch.randint(11, (B, B)), torch.randint(3, (B,))
    expected = oracle_sqnorms(model, batch, losses_of)
    compiled = torch.compile(model, backend="aot_eager")
    assert_sqnorms(gs.per_example_norms(compiled, batch, losses_of), expected, 1e-5)


class Asking(nn.Module):
    """Reads properties of parameters, as Hugging Face's models do before they cast."""

    def __init__(self):
        super().__init__()
        self.tokens, self.table = nn.Embedding(11, 8), nn.Embedding(B + 2, 8)
        self.head = nn.Linear(8, 3)
        self.register_buffer("positions", torch.arange(B + 2))

    def forward(self, ids):
        weight = self.table.weight
        positions = self.positions[: min(B, weight.shape[0])]
        hidden = self.tokens(ids).to(weight.device, weight.dtype) + self.table(positions)
        return self.head(hidden.tanh()).mean(1) if weight.requires_grad else hidden


class Held(nn.Module):
    """Uses values of a parameter, with a row for each example by accident, and of activations."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(B, B), nn.Linear(B, 3)
        self.table, self.scale = nn.Parameter(torch.randn(B, B)), nn.Parameter(torch.rand(B, B))

    def forward(self, x):
        hidden = self.first(x) @ self.table.data + self.scale * self.table.data
        return self.last(hidden.tanh() + hidden.data @ self.table).mean(1)


@pytest.mark.usefixtures("all_is_compiled")
def test_values_without_a_gradient_are_read_in_a_graph():
    torch._dynamo.reset()
    model, batch = Held(), (torch.randn(B, B, B), torch.randint(3, (B,)))
    expected = oracle_sqnorms(model, batch, losses_of)
    compiled = torch.compile(model, backend="aot_eager")
    assert_sqnorms(gs.per_example_norms(compiled, batch, losses_of), expected, 1e-4)


def test_properties_of_parameters_are_read_in_a_graph():
    torch._dynamo.reset()
    model = Asking()
    batch = torch.randint(11, (B, B)), torch.randint(3, (B,))
    expected = oracle_sqnorms(model, batch, losses_of)
    compiled = torch.compile(model, backend="aot_eager")
    assert_sqnorms(gs.per_example_norms(compiled, batch, losses_of), expected, 1e-5)


@pytest.mark.usefixtures("all_is_compiled")
def test_the_graphs_of_a_model_in_several_processes():
    """DistributedDataParallel looks for the parameters among the operands of what it compiles."""
    torch._dynamo.reset()
    optimizer = DDPOptimizer(64, lookup_backend("aot_eager"), first_bucket_cap=16)
    model, batch = next(iter(models()))
    expected = oracle_sqnorms(model, batch, losses_of)
    compiled = torch.compile(model, backend=optimizer.compile_fn)
    assert_sqnorms(gs.per_example_norms(compiled, batch, losses_of), expected, 1e-5)


class Moved(nn.Module):
    """Examples that leave their axis inside the model and come back to it."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.inner, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        if self.kind == "sequence first":
            x = self.inner(x.transpose(0, 1)).tanh().transpose(0, 1)
        elif self.kind == "folded":
            x = self.inner(x.reshape(-1, 8)).tanh().reshape(x.shape)
        else:
            heads = self.inner(x).view(*x.shape[:2], 2, 4).transpose(1, 2)
            scores = (heads @ heads.mT).softmax(-1)
            x = (scores @ heads).transpose(1, 2).flatten(2)
        return self.head(x).mean(1)


@pytest.mark.usefixtures("all_is_compiled")
@pytest.mark.parametrize(
    ("kind", "positions"), [("sequence first", B), ("folded", B), ("heads", B), ("folded", 5)]
)
def test_moved_examples(kind, positions):
    torch._dynamo.reset()
    model = Moved(kind)
    batch = torch.randn(B, positions, 8), torch.randint(3, (B,))
    expected = oracle_sqnorms(model, batch, losses_of)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=kind == "heads")
    for _ in range(2):
        assert_sqnorms(gs.per_example_norms(compiled, batch, losses_of), expected, 1e-5)
        with gs.track(compiled, batch_size=B) as tracker:
            losses_of(compiled, batch).mean().backward()
        assert_sqnorms(tracker.stats, expected, 1e-5)


def rotated(x):
    """Turn pairs of features by the angle of their position."""
    angles = torch.arange(x.shape[-2], dtype=x.dtype, device=x.device)[:, None]
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), -1)
    return x * angles.cos() + turned * angles.sin()


class Rotary(nn.Module):
    """Attention with rotary positions, written out: views, slices, splits, stacks, a mask."""

    def __init__(self):
        super().__init__()
        self.qkv, self.head = nn.Linear(8, 24), nn.Linear(8, 3)

    def forward(self, x):
        batch, positions, width = x.shape
        query, key, value = self.qkv(x).split(width, -1)
        query, key = (
            rotated(side.view(batch, positions, 2, -1).transpose(1, 2)) for side in (query, key)
        )
        value = torch.stack(value.chunk(2, -1), 1)
        future = torch.ones(positions, positions, dtype=torch.bool).triu(1)
        scores = torch.einsum("bhqd,bhkd->bhqk", query, key).masked_fill(future, -1e9)
        best = scores.sort(-1).values[..., 1:]
        mixed = scores.softmax(-1) @ value + best.mean(-1, keepdim=True)
        gate, up = mixed.transpose(1, 2).flatten(2).unflatten(-1, (2, -1)).unbind(2)
        return self.head(torch.cat((gate.sigmoid() * up, up), -1)).mean(1)


@pytest.mark.usefixtures("all_is_compiled")
def test_what_attention_is_made_of_stands_in_one_graph():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, batch = Rotary(), (torch.randn(B, B, 8), torch.randint(3, (B,)))
    expected = oracle_sqnorms(model, batch, losses_of)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        assert_sqnorms(gs.per_example_norms(compiled, batch, losses_of), expected, 1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.usefixtures("all_is_compiled")
@pytest.mark.parametrize("name", ["GPT-2", "Qwen3", "ViT"])
def test_models_of_hugging_face_are_one_graph(name):
    """A tied table, positions that belong to no example, examples folded into rows: all of it."""
    pytest.importorskip("transformers")
    (case,) = (case for case in hugging_face.CASES if case.name == name)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, batch = case.prepare()
    for module in [*model.modules()]:
        for child, layers in module.named_children():
            if isinstance(layers, nn.ModuleList):
                setattr(module, child, layers[:1])
    expected = oracle_sqnorms(model, batch, case.loss_fn)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        stats = gs.per_example_norms(compiled, batch, case.loss_fn)
        assert_sqnorms(stats, expected, case.tolerances["rtol"])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.LSTM(8, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.layer(self.head.weight.new_ones(()) * x)[0]).mean(1)


class Computed(nn.Module):
    """A product with what is computed from parameters alone."""

    def __init__(self):
        super().__init__()
        self.matrix, self.head = nn.Parameter(torch.randn(8, 6)), nn.Linear(6, 3)

    def forward(self, x):
        return self.head((x @ self.matrix.exp()).tanh()).mean(1)


class Normalised(nn.Module):
    """A weight in direction and length, which PyTorch computes in a function of its own."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(8, 6), nn.Linear(6, 3)
        nn.utils.parametrizations.weight_norm(self.layer)

    def forward(self, x):
        return self.head(self.layer(x).tanh()).mean(1)


class Mapped(nn.Module):
    """torch.vmap over positions: of what is trained, and of a layer."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(8, 6), nn.Linear(6, 3)

    def forward(self, x):
        hidden = torch.vmap(lambda row: row.tanh() * row.sum(-1, keepdim=True), 1)(self.layer(x))
        return torch.vmap(self.head)(hidden).mean(0)


class Masked(nn.Module):
    """A mask that torch.vmap makes of places, one call in another, as language models make it."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(8, 6), nn.Linear(6, 3)

    def forward(self, x):
        places = torch.arange(x.shape[1])
        of_row = torch.vmap(lambda row, column: row >= column, in_dims=(None, 0))
        mask = torch.vmap(of_row, in_dims=(0, None))(places, places)
        hidden = self.layer(x)
        mixed = functional.scaled_dot_product_attention(hidden, hidden, hidden, attn_mask=mask)
        return self.head(mixed).mean(1)


@pytest.mark.usefixtures("all_is_compiled")
def test_places_that_are_mapped_stand_in_a_graph():
    torch._dynamo.reset()
    model, batch = Masked(), (torch.randn(B, B, 8), torch.randint(3, (B,)))
    expected = oracle_sqnorms(model, batch, losses_of)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_sqnorms(gs.per_example_norms(compiled, batch, losses_of), expected, 1e-5)


class Scaled(nn.Module):
    """A layer whose outputs are scaled by a function of a parameter."""

    def __init__(self, scale_by):
        super().__init__()
        self.layer, self.scale_by = nn.Linear(5, 4), scale_by
        self.weight = nn.Parameter(torch.rand(4) + 1)

    def forward(self, x):
        return self.scale_by(self.layer(x).tanh(), self.weight)


# Functions and methods of PyTorch in Python, which the compiler looks into.
IN_PYTHON = {
    "rms_norm": lambda hidden, weight: functional.rms_norm(hidden, (4,), weight),
    "pad": lambda hidden, weight: hidden * functional.pad(weight[1:], (0, 1), value=2.0),
    "norm": lambda hidden, weight: hidden * weight.norm(),
    "split": lambda hidden, weight: hidden * torch.cat(weight.split(3)[::-1]),
    "split by name": lambda hidden, weight: hidden * torch.cat(weight.split(split_size=3)[::-1]),
}
OPERATORS = {
    "1 - w": lambda hidden, weight: hidden * (1 - weight),
    "1 / w": lambda hidden, weight: hidden * (1 / weight),
    "w ** 2": lambda hidden, weight: hidden * weight**2,
    "2 ** w": lambda hidden, weight: hidden * 2**weight,
}


@pytest.mark.usefixtures("all_is_compiled")
@pytest.mark.parametrize(
    ("scale_by", "fullgraph"),
    [(function, True) for function in IN_PYTHON.values()]
    # PyTorch 2.15 records no operators of a subclass.
    + [(function, torch.__version__ < "2.15") for function in OPERATORS.values()],
    ids=[*IN_PYTHON, *OPERATORS],
)
def test_functions_of_pytorch_in_python_stand_in_a_graph(scale_by, fullgraph):
    torch._dynamo.reset()
    model, batch = Scaled(scale_by), (torch.randn(B, 5), torch.randint(4, (B,)))
    expected = oracle_sqnorms(model, batch, losses_of)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=fullgraph)
    with gs.track(compiled, batch_size=B) as tracker:
        tracker.backward(losses_of(compiled, batch))
    assert_sqnorms(tracker.stats, expected, 1e-5)


@pytest.mark.parametrize("kind", [Recurrent, Computed, Normalised, Mapped])
def test_parts_that_cannot_stand_in_a_graph(kind):
    """The function that holds them runs as it does without a compiler."""
    torch._dynamo.reset()
    model = kind()
    batch = torch.randn(B, B, 8), torch.randint(3, (B,))
    expected = oracle_sqnorms(model, batch, losses_of)
    compiled = torch.compile(model, backend="aot_eager")
    for _ in range(2):
        assert_sqnorms(gs.per_example_norms(compiled, batch, losses_of), expected, 1e-5)
        with gs.track(compiled, batch_size=B) as tracker:
            losses_of(compiled, batch).mean().backward()
        assert_sqnorms(tracker.stats, expected, 1e-5)


class Labelled(torch.Tensor):
    """A subclass of tensors, as those of images are in libraries for them."""


TAKEN_FOR = [
    lambda x, kind: x.as_subclass(kind),
    lambda x, kind: torch.Tensor.as_subclass(x, kind),
]


class Taken(nn.Module):
    """Rows in another order that are taken for those of another class."""

    def __init__(self, taken_for):
        super().__init__()
        self.taken_for = taken_for
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.second(self.taken_for(self.first(x).flip(0), Labelled)).flip(0)


@pytest.mark.parametrize("taken_for", TAKEN_FOR, ids=["method", "function"])
def test_tensors_taken_for_those_of_another_class(taken_for):
    """Also in graphs that are compiled once no context is open.

    The compiler finds PyTorch's methods when it first meets one, perhaps after the first context.
    """
    trace_rules.get_tensor_method.cache_clear()
    model, x = Taken(taken_for).double(), torch.randn(3, 4).double()

    def loss_fn(model, x):
        return model(x).as_subclass(torch.Tensor).square().sum(1)

    expected = oracle_sqnorms(model, x, loss_fn)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_sqnorms(gs.per_example_norms(compiled, x, loss_fn), expected, 1e-12)
    apart = torch.compile(lambda x: taken_for(x, Labelled) * 2, fullgraph=True, backend="eager")
    assert torch.equal(apart(x), 2 * x)
    assert type(apart(x)) is Labelled


class Reused(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(self.layer(x).tanh())


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.embed(ids).tanh().mean(1))


class Slices(nn.Module):
    """A parameter of which each use takes a part, computed from it first."""

    def __init__(self):
        super().__init__()
        self.weights = nn.Parameter(torch.randn(2, 4, 4))

    def forward(self, x):
        first, second = self.weights.exp().unbind()
        return (x @ first).tanh() @ second.t()


@pytest.mark.usefixtures("all_is_compiled")
@pytest.mark.parametrize("model", [Reused, Tied, Slices])
def test_a_graph_adds_up_all_uses_of_a_parameter(model):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = model()
    batch = torch.randn(B, 4), torch.randint(4, (B,))
    if isinstance(model, Tied):
        batch = torch.randint(11, (B, 5)), torch.randint(11, (B,))
    expected = oracle_sqnorms(model, batch, losses_of)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        assert_sqnorms(gs.per_example_norms(compiled, batch, losses_of), expected, 1e-5)
        with gs.track(compiled, batch_size=B) as tracker:
            losses_of(compiled, batch).mean().backward()
        assert_sqnorms(tracker.stats, expected, 1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


class Cancelling(nn.Module):
    """A weight, or what was made of it, whose gradients are small sums of large terms."""

    def __init__(self, made):
        super().__init__()
        self.weight, self.made = nn.Parameter(torch.randn(256, 256) / 256), made

    def forward(self, x):
        signs = x.new_tensor([1.0, -1.0]).repeat(x.shape[1] // 2)[:, None]
        return (functional.linear(x, self.made(self.weight)) * signs).sum((1, 2))


@pytest.mark.usefixtures("all_is_compiled")
@pytest.mark.parametrize("made", [lambda w: w, torch.t, lambda w: w + 1], ids=["w", "t", "sum"])
def test_a_graph_takes_forms_that_need_no_guard(made):
    torch._dynamo.reset()
    model = Cancelling(made)
    batch = 100 + 1e-4 * torch.randn(4, 16, 256)
    expected = gs.per_example_norms(model, batch, lambda m, x: m(x))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    found = gs.per_example_norms(compiled, batch, lambda m, x: m(x))
    torch.testing.assert_close(found.norm, expected.norm)


class Again(nn.Module):
    """A weight through which gradients are pulled back by computing it again."""

    def __init__(self, function):
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.randn(4, 4)), function
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x):
        scale = self.scale.clone()
        weight = self.function(self.weight * scale, scale)
        return (x @ weight @ weight.sin()).tanh()


def scaled(weight, scale):
    return torch.linalg.solve(weight + 5 * torch.eye(4), torch.eye(4))


def scaled_by_what_is_changed_later(weight, scale):
    column = torch.linalg.solve(weight + 5 * torch.eye(4), scale)
    scale.mul_(3)
    return weight * column


def dropped(weight, scale):
    return functional.dropout(weight, 0.5)


@pytest.mark.parametrize(
    ("function", "compiles"),
    [(scaled, True), (scaled_by_what_is_changed_later, False), (dropped, False)],
)
def test_what_is_computed_again_in_a_graph(function, compiles, caplog):
    """A graph has no numbers to compare: it holds what is sure to be the same."""
    caplog.set_level(logging.INFO, _graphs.LOG.name)
    torch._dynamo.reset()
    model, batch = Again(function), (torch.randn(B, 4), torch.randint(4, (B,)))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    found = []
    for each in (model, compiled):
        torch.manual_seed(0)
        try:
            found.append(gs.per_example_norms(each, batch, losses_of))
        except gs.UnsupportedOperationError as error:
            found.append(str(error))
    if isinstance(found[0], str):
        assert found[0] == found[1]
    else:
        torch.testing.assert_close(found[1].sqnorm, found[0].sqnorm, rtol=1e-4, atol=0)
    told = [each for each in caplog.records if each.name == _graphs.LOG.name]
    assert bool(told) is not compiles


class Part(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x).tanh()


class Outside(nn.Module):
    """A layer that is used inside a graph and outside of it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.part = Part(self.layer)

    def forward(self, x):
        return self.layer(self.part(x))


def outside():
    torch._dynamo.reset()
    model, batch = Outside(), (torch.randn(B, 4), torch.randint(4, (B,)))
    expected = oracle_sqnorms(model, batch, losses_of)
    model.part.compile(backend="aot_eager")
    return model, batch, expected


def test_uses_in_a_graph_and_outside_of_it():
    model, batch, expected = outside()
    for _ in range(2):
        assert_sqnorms(gs.per_example_norms(model, batch, losses_of), expected, 1e-5)


def test_the_step_that_runs_again_finds_the_batch_as_it_was():
    """The loss writes into its batch."""
    model, (x, labels), _ = outside()

    def losses(model, batch):
        batch[0].mul_(3)
        return losses_of(model, batch)

    expected = oracle_sqnorms(model, (3 * x, labels), losses_of)
    for _ in range(2):
        given = x.clone()
        assert_sqnorms(gs.per_example_norms(model, (given, labels), losses), expected, 1e-5)
        torch.testing.assert_close(given, 3 * x)


def test_uses_in_a_graph_and_outside_of_it_are_refused_in_the_first_step():
    """A training step cannot be run again: the first one says what the next will do."""
    model, batch, expected = outside()

    def step():
        with gs.track(model, batch_size=B) as tracker:
            losses_of(model, batch).mean().backward()
        return tracker.stats

    with pytest.raises(gs.CoverageError, match=r"graphs.* use 'layer.weight', 'layer.bias'"):
        step()
    assert all(parameter.grad is None for parameter in model.parameters())
    for _ in range(2):
        assert_sqnorms(step(), expected, 1e-5)


class Halved(torch.autograd.Function):
    """A weight made of a parameter, with a gradient of its own."""

    @staticmethod
    def forward(ctx, weight):
        return weight / 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 3


class UsesFunction(nn.Module):
    """A parameter that an operation uses beside a Function."""

    def __init__(self, function):
        super().__init__()
        self.layer = nn.Linear(5, 5)
        self.function = function

    def forward(self, x):
        return self.function(self.layer, x)


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("derived", [False, True])
def test_a_function_of_a_parameter_in_a_graph(twice, derived):
    def apply(layer, x):
        weight = Halved.apply(layer.weight * 2 if derived else layer.weight)
        x = functional.linear(x, weight).tanh()
        return functional.linear(x, layer.weight) if twice else x + layer.bias

    torch._dynamo.reset()
    model, batch = UsesFunction(apply), (torch.randn(B, 5), torch.randint(5, (B,)))
    compiled = torch.compile(model, backend="aot_eager")
    expected = oracle_sqnorms(model, batch, losses_of)
    for _ in range(2):
        assert_sqnorms(gs.per_example_norms(compiled, batch, losses_of), expected, 1e-5)


def test_what_cannot_stand_in_a_graph_says_so_where_one_graph_is_demanded():
    torch._dynamo.reset()
    model = UsesFunction(lambda layer, x: layer(x) * Halved.apply(layer.bias))
    batch = torch.randn(B, 5), torch.randint(5, (B,))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match=r"contains .*apply\. Compile without fullgraph=True"):
        gs.per_example_norms(compiled, batch, losses_of)


def test_a_function_of_data_and_a_parameter_in_a_graph_is_refused():
    """The graph takes the parameter, and reports its other use alone."""
    torch._dynamo.reset()
    model = UsesFunction(lambda layer, x: layer(Kernel.apply(x, layer.bias)).tanh())
    batch = torch.randn(B, 5), torch.randint(5, (B,))
    compiled = torch.compile(model, backend="aot_eager")
    for _ in range(2):
        with pytest.raises(gs.UnsupportedOperationError, match=r"KernelBackward.*'layer.bias'"):
            gs.per_example_norms(compiled, batch, losses_of)


ORDER = torch.tensor([2, 0, 5, 1, 3, 4])


class Between(nn.Module):
    """Two layers, and a function of the values between them."""

    def __init__(self, function):
        super().__init__()
        self.first, self.last, self.function = nn.Linear(4, 4), nn.Linear(4, 2), function

    def forward(self, x):
        return self.last(self.function(self.first(x).tanh()))


def check_between(function, examples=B, **options):
    torch._dynamo.reset()
    model, x = Between(function).double(), torch.randn(examples, 4).double()
    compiled = torch.compile(model, backend="aot_eager", **options)

    def loss_fn(model, x):
        return model(x).sin().sum(1)

    stats = gs.per_example_norms(compiled, x, loss_fn)
    assert_sqnorms(stats, oracle_sqnorms(model, x, loss_fn), 1e-9)


GETTERS = ["T", "mT", "H", "mH"]


@pytest.mark.usefixtures("all_is_compiled")
def test_getters_that_transpose():
    def there_and_back(hidden):
        for name in GETTERS:
            hidden = getattr(getattr(hidden, name).sin(), name)
        return hidden

    check_between(there_and_back, examples=4)


@pytest.mark.parametrize("name", GETTERS)
def test_what_is_transposed_by_a_getter_is_refused(name):
    with pytest.raises(gs.ExampleAxisError, match=r"'last.weight'"):
        check_between(lambda hidden: getattr(hidden, name).sin(), examples=4)


def unpacked(hidden):
    first, second, *rest = hidden
    return [first, second, *rest]


def looped(hidden):
    rows = []
    for row in hidden:
        rows.append(row)
    return rows


APART = [unpacked, looped, list]


def test_rows_that_are_taken_apart():
    """They are as long as there are examples, and yet none of them holds one number of each."""

    def stacked(hidden):
        for rows_of in APART:
            hidden = torch.stack(rows_of(hidden)[::-1]).sin()
        return hidden

    check_between(stacked, examples=4)


@pytest.mark.parametrize("rows_of", APART)
def test_rows_that_are_stacked_elsewhere_are_refused(rows_of):
    with pytest.raises(gs.ExampleAxisError, match=r"'last.weight'"):
        check_between(lambda hidden: torch.stack(rows_of(hidden), 1), examples=4)


def assigned(target, index, rows):
    target[index] = rows
    return target


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin")
@pytest.mark.parametrize(
    "write",
    [
        lambda target, rows: assigned(target, ORDER, rows),
        lambda target, rows: target.index_copy(0, ORDER, rows),
        lambda target, rows: target.index_add_(0, ORDER, rows),
        lambda target, rows: target.scatter_add(0, ORDER[:, None].expand(-1, 4), rows),
    ],
    ids=["assigned", "index_copy", "index_add_", "scatter_add"],
)
def test_rows_that_are_written_in_another_order(write):
    """Whose they are afterwards is not traced: the write ends the graph."""
    check_between(lambda hidden: write(hidden.new_zeros(B, 4), hidden))


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin")
@pytest.mark.parametrize(
    "assign",
    [assigned, lambda target, *place: operator.setitem(target, *place) or target],
    ids=["statement", "function"],
)
def test_rows_assigned_to_those_of_other_examples(assign):
    check_between(lambda hidden: assign(hidden.clone(), ORDER, hidden.sin())[ORDER])


class AlongPositions(nn.Module):
    """Adds a row for each example to all positions of its own, or to one of everybody's."""

    def __init__(self, crossed):
        super().__init__()
        self.layer = nn.Linear(5, 5)
        self.crossed = crossed

    def forward(self, x):
        row = self.layer(x[:, 0])
        return (x + (row if self.crossed else row[:, None])).sin().sum()


@pytest.mark.parametrize("crossed", [True, False])
def test_a_row_for_each_example_along_positions(crossed):
    """As many positions as examples: a loss over all examples does not tell whose a row is."""
    torch._dynamo.reset()
    model, x = AlongPositions(crossed), torch.randn(B, B, 5)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        if crossed:
            with pytest.raises(gs.ExampleAxisError, match="another axis"):
                with gs.track(compiled, batch_size=B, loss_reduction="sum"):
                    compiled(x).backward()
            continue
        with gs.track(compiled, batch_size=B, loss_reduction="sum") as tracker:
            compiled(x).backward()
        one_by_one = oracle_sqnorms(model, x, lambda m, x: torch.stack([*map(m, x.split(1))]))
        assert_sqnorms(tracker.stats, one_by_one, 1e-5)


@pytest.mark.usefixtures("all_is_compiled")
def test_constants_that_are_written_into_data_stay_in_the_graph():
    check_between(lambda hidden: assigned(hidden.clone(), (slice(None), 0), 0.5), fullgraph=True)


def in_a_compiled_function(function, *arguments):
    torch._dynamo.reset()
    return torch.compile(function, backend="eager")(*arguments)


def test_calls_inside_a_compiled_function_run_in_python():
    model, batch = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double(), (
        torch.randn(6, 4).double(), torch.randint(3, (6,)),
    )  # fmt: skip

    expected = oracle_sqnorms(model, batch, losses_of)
    assert_sqnorms(
        in_a_compiled_function(
            lambda x, y: gs.per_example_norms(model, (2 * x / 2, y), losses_of), *batch
        ),
        expected,
        1e-9,
    )
    total = sum(expected.values())
    products = in_a_compiled_function(
        lambda x, y: gs.inner_products(model, (x, y), model, (x, y), losses_of).diagonal() + 1,
        *batch,
    )
    torch.testing.assert_close(products, total + 1)
    assert in_a_compiled_function(lambda x, y: gs.verify(model, (x, y), losses_of).ok, *batch)


@pytest.mark.parametrize("kind", ["track", "monitor"])
def test_a_context_inside_a_compiled_function_is_refused(kind):
    model, x = nn.Linear(4, 3), torch.randn(6, 4)
    monitor = gs.Monitor(model, every=1)

    def step(x):
        with gs.track(model, batch_size=6) if kind == "track" else monitor.step(batch_size=6):
            model(2 * x).square().mean().backward()

    with pytest.raises(gs.TrackingError, match="Compile the model instead of the step"):
        in_a_compiled_function(step, x)
    assert type(model.weight) is nn.Parameter and model.weight.grad is None
    torch.compiler.disable(step)(x)
    assert model.weight.grad is not None


def test_contexts_where_nothing_is_compiled_anew():
    torch._dynamo.reset()
    model, x = nn.Linear(4, 3), torch.randn(6, 4)

    def step(x):
        with gs.track(model, batch_size=6) as tracker:
            tracker.backward(model(x).square().sum(1))
        return tracker.stats.norm

    expected = step(x)
    with torch.compiler.set_stance("eager_on_recompile"):
        torch.testing.assert_close(torch.compiler.disable(step)(x), expected)
    torch.testing.assert_close(torch._dynamo.run(step)(x), expected)
