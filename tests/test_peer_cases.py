"""The cases in which other libraries are wrong, fail or form (batch, d) gradients, one test each.

The documentation compares libraries row by row; the column of gradstats names these tests.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import gradstats as gs
from benchmarks.ledger import peak_memory
from tests import forked
from tests.functions import linear_without_rule
from tests.losses import losses_of as classify
from tests.oracle import (
    assert_sqnorms,
    check_model,
    oracle_gradients,
    oracle_sqnorms,
)
from tests.pages import README, page_with
from tests.rules.operation import check_operation, normal, uneven_loss

B, T, WIDTH = 4, 5, 6


def tokens(rows=7, positions=T):
    return torch.randint(rows, (B, positions))


def check_layer(layer, *data):
    check_operation(lambda m, *x: m.layer(*x), {"layer": layer}, *data)


def check_function(function, parameters, *data):
    check_operation(function, parameters, *data)


# Layers


def test_norm_vector():
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    batch = normal(B, WIDTH), torch.randint(3, (B,))
    stats = gs.per_example_norms(model, batch, classify)
    expected = oracle_sqnorms(model, batch, classify)
    torch.testing.assert_close(stats.norm, sum(expected.values()).sqrt(), rtol=1e-10, atol=0)
    assert_sqnorms(stats, expected, 1e-10)


def test_linear():
    check_layer(nn.Linear(WIDTH, 3), normal(B, WIDTH))


def test_linear_with_positions():
    for positions in (1, B, 30):
        check_layer(nn.Linear(WIDTH, 3), normal(B, positions, WIDTH))


def test_linear_of_four_axes():
    layer = nn.Linear(WIDTH, 3)
    check_layer(layer, normal(B, 2, 3, WIDTH))
    # Nothing of an earlier step is left: a hundredfold input gives other norms.
    x = normal(B, 2, 3, WIDTH)
    small, large = (
        gs.per_example_norms(layer.double(), scale * x, lambda m, x: m(x).sum((1, 2, 3)))
        for scale in (1, 100)
    )
    ratio = large.by_parameter["weight"] / small.by_parameter["weight"]
    torch.testing.assert_close(ratio, torch.full_like(ratio, 1e4))


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_convolutions(dims):
    layer = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1](2, 3, 3, stride=2, dilation=1, padding=1)
    check_layer(layer, normal(B, 2, *(6, 5, 4)[:dims]))


@pytest.mark.parametrize("groups", [2, 4])
def test_groups(groups):
    check_layer(nn.Conv2d(4, 8, 3, groups=groups), normal(B, 4, 6, 5))
    check_layer(nn.Conv1d(4, 4, 3, groups=groups), normal(B, 4, 6))


@pytest.mark.parametrize("padding", ["circular", "reflect", "same"])
def test_padding(padding):
    options = {"padding": "same"} if padding == "same" else {"padding": 1, "padding_mode": padding}
    check_layer(nn.Conv2d(2, 3, 3, **options), normal(B, 2, 5, 4))


def test_channels_last():
    inputs = normal(B, 2, 6, 4).contiguous(memory_format=torch.channels_last)
    check_layer(nn.Conv2d(2, 3, 2, 2), inputs)


@pytest.mark.parametrize("groups", [1, 2])
def test_transposed_convolutions(groups):
    layer = nn.ConvTranspose2d(2, 4, 3, stride=2, padding=1, output_padding=1, groups=groups)
    check_layer(layer, normal(B, 2, 4, 3))


def test_embedding():
    check_layer(nn.Embedding(7, WIDTH), tokens())


def test_padding_idx():
    ids = tokens()
    ids[:, 0] = 2
    check_layer(nn.Embedding(7, WIDTH, padding_idx=2), ids)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.LayerNorm(WIDTH), (B, T, WIDTH)),
        (nn.LayerNorm(WIDTH, bias=False), (B, T, WIDTH)),
        (nn.RMSNorm(WIDTH), (B, T, WIDTH)),
        (nn.GroupNorm(2, WIDTH), (B, WIDTH, T)),
        (nn.InstanceNorm1d(WIDTH, affine=True), (B, WIDTH, T)),
    ],
    ids=str,
)
def test_normalisation(layer, shape):
    check_layer(layer, normal(*shape))


# Sharing


class TiedLinear(nn.Linear):
    """A subclass, which look-ups by exact type pass over."""


@pytest.mark.parametrize("kind", [nn.Linear, TiedLinear])
def test_tied_across_modules(kind):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(7, WIDTH), kind(WIDTH, 7, bias=False)
            self.head.weight = self.table.weight

        def forward(self, ids):
            return self.head(self.table(ids).tanh())

    check_layer(Tied(), tokens())


def test_module_reused():
    def twice(m, x):
        return m.layer(m.layer(x).tanh())

    check_function(twice, {"layer": nn.Linear(WIDTH, WIDTH)}, normal(B, T, WIDTH))
    check_function(twice, {"layer": nn.Conv1d(2, 2, 3, padding=1)}, normal(B, 2, T))


# Composite operations


def test_multihead_attention():
    layer = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def attend(m, x):
        return m.layer(x, x, x)[0]

    check_function(attend, {"layer": layer}, normal(B, T, WIDTH))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers(kind):
    layer = kind(WIDTH, 4, num_layers=2, bidirectional=True, batch_first=True)
    check_function(lambda m, x: m.layer(x)[0], {"layer": layer}, normal(B, T, WIDTH))


def test_hugging_face_conv1d():
    utilities = pytest.importorskip("transformers.pytorch_utils")
    check_layer(utilities.Conv1D(3, WIDTH), normal(B, T, WIDTH))


class Positions(nn.Module):
    """Position embeddings looked up once for all examples, as in the stock GPT-2."""

    def __init__(self, one):
        super().__init__()
        self.table, self.position = nn.Embedding(7, WIDTH), nn.Embedding(9, WIDTH)
        self.one = one

    def forward(self, ids):
        positions = torch.arange(ids.shape[1], device=ids.device)
        return self.table(ids) + self.position(positions[None] if self.one else positions)


@pytest.mark.parametrize("positions", [B - 1, B, B + 1])  # B positions look like B examples
@pytest.mark.parametrize("one", [True, False])
def test_broadcast_positions(positions, one):
    check_layer(Positions(one), tokens(positions=positions))


def test_bare_parameters():
    def function(m, x):
        x = torch.cat([m.token.expand(x.shape[0], 1, -1), x], 1)
        return x * m.scale + m.shift

    shapes = {"token": (1, 1, WIDTH), "scale": (WIDTH,), "shift": (T + 1, WIDTH)}
    check_function(function, shapes, normal(B, T, WIDTH))


# Batches


@pytest.mark.parametrize("positions", [3, B])
def test_batch_dim(positions):
    class SequenceFirst(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.norm = nn.Linear(WIDTH, 3), nn.LayerNorm(3)

        def forward(self, x):
            return self.norm(self.layer(x)).mean(0)

    batch = normal(positions, B, WIDTH), torch.randint(3, (B,))
    check_model(SequenceFirst().double(), batch, classify, batch_dim=1)


def test_packed_examples():
    bounds = torch.tensor([0, 3, 4, 9])
    model = nn.Sequential(nn.Embedding(7, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)).double()
    ids, weight = torch.randint(7, (1, 9)), torch.randn(9, 3, dtype=torch.float64)

    def losses(model, batch):
        rows = (model(batch[0])[0] * batch[1]).square().sum(1)
        return torch.stack([part.sum() for part in rows.split(bounds.diff().tolist())])

    stats = gs.per_example_norms(model, (ids, weight), losses, cu_seqlens=bounds)
    assert_sqnorms(stats, oracle_sqnorms(model, (ids, weight), losses), 1e-10)


# The training step


def test_autocast_and_grad_scaler():
    model = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, 3))
    batch = torch.randn(B, WIDTH), torch.randint(3, (B,))

    def losses(model, batch):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return functional.cross_entropy(model(batch[0]).float(), batch[1], reduction="none")

    expected = {name: [] for name, _ in model.named_parameters()}
    for row in range(B):
        loss = losses(model, tuple(part[row : row + 1] for part in batch)).sum()
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        for name, gradient in zip(expected, gradients, strict=True):
            expected[name].append(gradient.double().square().sum())
    expected = {name: torch.stack(rows) for name, rows in expected.items()}
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with gs.track(model, batch_size=B, scaler=scaler) as tracker:
        tracker.backward(losses(model, batch))
    assert tracker.stats.sqnorm.dtype == torch.float32
    assert_sqnorms(tracker.stats, expected, 0.05)


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant
        self.table = nn.Embedding(7, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, ids):
        x = self.table(ids)
        for block in (*self.blocks, self.blocks[0]):
            x = x + checkpoint(lambda x, b=block: b(x).tanh(), x, use_reentrant=self.reentrant)
        return x


def test_checkpoints():
    check_layer(Checkpointed(reentrant=False), tokens())
    model, ids = Checkpointed(reentrant=True).double(), tokens()

    def without_checkpoints(model, ids):
        x = model.table(ids)
        for block in (*model.blocks, model.blocks[0]):
            x = x + block(x).tanh()
        return x.square().flatten(1).sum(1)

    stats = gs.per_example_norms(model, ids, lambda m, b: m(b).square().flatten(1).sum(1))
    assert_sqnorms(stats, oracle_sqnorms(model, ids, without_checkpoints), 1e-9)


def test_gradient_accumulation():
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    batch = normal(B, WIDTH), torch.randint(3, (B,))
    plain = copy.deepcopy(model)
    classify(plain, batch).mean().backward()
    norms = []
    for rows in (slice(0, 1), slice(1, B)):
        part = tuple(item[rows] for item in batch)
        weights = torch.full((len(part[0]),), 1 / B, dtype=torch.float64)
        with gs.track(model, batch_size=len(part[0]), weights=weights) as tracker:
            (classify(model, part).sum() / B).backward()
        norms.append(tracker.stats.sqnorm)
    expected = sum(oracle_sqnorms(plain, batch, classify).values())
    torch.testing.assert_close(torch.cat(norms), expected, rtol=1e-10, atol=0)
    for got, want in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad)


# Dynamo itself asks for .grad of tensors between two graphs.
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.usefixtures("graphs_run_on_cpus")
@pytest.mark.parametrize("fullgraph", [True, False])
def test_compile(fullgraph):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(WIDTH, 8), nn.Linear(8, 3)

        def forward(self, x):
            x = self.body(x).tanh()
            if not fullgraph:
                torch._dynamo.graph_break()
            return self.head(x)

    torch._dynamo.reset()
    model = Model()
    batch = torch.randn(B, WIDTH), torch.randint(3, (B,))
    compiled = torch.compile(model, fullgraph=fullgraph, backend="aot_eager")
    expected = oracle_sqnorms(model, batch, classify)
    for _ in range(2):
        assert_sqnorms(gs.per_example_norms(compiled, batch, classify), expected, 1e-5)


ABOUT_EXAMPLES = "ExampleAxisError", "CoupledExamplesError"

# Activations that processes exchange, in which rows of the others' examples are.
GATHERS = [
    lambda rows: torch.distributed.nn.functional.all_reduce(rows) / 2,
    lambda rows: sum(torch.distributed.nn.functional.all_gather(rows)),
    lambda rows: torch.ops._c10d_functional.wait_tensor(
        torch.ops._c10d_functional_autograd.all_to_all_single(
            rows, [1, 1], [1, 1], torch.distributed.group.WORLD.group_name
        )
    ),
]


def _refusal_of(gather, model, batch):
    try:
        with gs.track(model, batch_size=2) as tracker:
            losses = classify(lambda x: model[2](gather(model[:2](x))), batch)
            tracker.backward(losses)
    except gs.GradStatsError as error:
        return type(error).__name__
    return ""


def _step_of_one_process(rank, folder):
    address = f"file://{folder}/rendezvous"
    torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    batch = normal(B, WIDTH), torch.randint(3, (B,))
    mine = tuple(part[2 * rank : 2 * rank + 2] for part in batch)
    replicated = nn.parallel.DistributedDataParallel(model)
    with gs.track(replicated, batch_size=2) as tracker:
        tracker.backward(classify(replicated, mine))
    result = {
        "sqnorms": tracker.stats.by_parameter,
        "alone": gs.per_example_norms(replicated, mine, classify).by_parameter,
        "gradients": [parameter.grad for parameter in model.parameters()],
        "refused": "",
        "not verified": "",
    }
    sharded = copy.deepcopy(model)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    torch.distributed.fsdp.fully_shard(sharded, mesh=mesh)
    result["sharded"] = gs.per_example_norms(sharded, mine, classify).by_parameter
    try:
        gs.verify(sharded, mine, classify)
    except gs.TrackingError as error:
        result["not verified"] = str(error)
    split = copy.deepcopy(model)
    plan = {"0": torch.distributed.tensor.parallel.ColwiseParallel()}
    torch.distributed.tensor.parallel.parallelize_module(split, mesh, plan)
    try:
        gs.per_example_norms(split, mine, classify)
    except gs.UnsupportedOperationError as error:
        result["refused"] = str(error)
    other = copy.deepcopy(model)
    result["exchanged"] = [_refusal_of(gather, other, mine) for gather in GATHERS]
    with gs.track(other, batch_size=2) as tracker:
        (torch.distributed.nn.functional.all_reduce(classify(other, mine).sum()) / B).backward()
    result["summed"] = tracker.stats.by_parameter
    torch.save(result, f"{folder}/{rank}.pt")
    # Whoever leaves first would break what the other is still receiving.
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def test_distributed(tmp_path):
    """Each process measures its own examples; tensor parallelism is refused by name."""
    forked.run(_step_of_one_process, str(tmp_path))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    batch = normal(B, WIDTH), torch.randint(3, (B,))
    expected = oracle_sqnorms(model, batch, classify)
    classify(model, batch).mean().backward()
    results = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for rank, result in enumerate(results):
        for name, value in expected.items():
            for kind in ("sqnorms", "alone", "sharded", "summed"):
                got = result[kind][name]
                torch.testing.assert_close(got, value[2 * rank : 2 * rank + 2], rtol=1e-10, atol=0)
        for got, want in zip(result["gradients"], model.parameters(), strict=True):
            torch.testing.assert_close(got, want.grad)
        assert all(name in ABOUT_EXAMPLES for name in result["exchanged"])
        assert re.search(r"'0.weight'.*DTensor", result["refused"])
        assert "'0.weight' is sharded over processes" in result["not verified"]


def test_input_gradients():
    def penalty(model, x):
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return (slope.norm(dim=1) - 1).square() + model(x)[:, 0]

    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.Softplus(), nn.Linear(8, 1)).double()
    x = normal(B, WIDTH)
    stats = gs.per_example_norms(model, x, penalty)
    assert_sqnorms(stats, oracle_sqnorms(model, x, penalty), 1e-9)


# What must not be guessed


def test_reduction():
    """A scalar is refused where losses are asked for, and gs.verify sees a hidden division."""
    model = nn.Sequential(nn.Linear(WIDTH, 3)).double()
    batch = normal(B, WIDTH), torch.randint(3, (B,))
    with pytest.raises(gs.LossShapeError, match='reduction="none"'):
        gs.per_example_norms(model, batch, lambda m, b: classify(m, b).mean())
    expected = oracle_sqnorms(model, batch, classify)
    for reduction in ("mean", "sum"):
        with gs.track(model, batch_size=B, loss_reduction=reduction) as tracker:
            functional.cross_entropy(model(batch[0]), batch[1], reduction=reduction).backward()
        assert_sqnorms(tracker.stats, expected, 1e-10)
    report = gs.verify(model, batch, lambda m, b: classify(m, b) / len(b[1]))
    assert report.check("coupling").ok is False


def test_uncovered_parameters():
    class Distances(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.centres = nn.Linear(WIDTH, 6), nn.Parameter(torch.randn(7, 6))

        def forward(self, x):
            return linear_without_rule(self.body(x), self.centres)

    model, batch = Distances().double(), (normal(B, WIDTH), torch.randint(3, (B,)))
    with pytest.raises(gs.UnsupportedOperationError, match="'centres'"):
        gs.per_example_norms(model, batch, classify)
    expected = oracle_sqnorms(model, batch, classify)
    stats = gs.per_example_norms(model, batch, classify, fallback="vmap")
    assert_sqnorms(stats, expected, 1e-10)
    del expected["centres"]
    stats = gs.per_example_norms(model, batch, classify, exclude="centres")
    assert_sqnorms(stats, expected, 1e-10)


def test_batch_norm():
    layer = nn.BatchNorm1d(WIDTH)
    with pytest.raises(gs.CoupledExamplesError, match="eval"):
        gs.per_example_norms(layer, torch.randn(B, WIDTH), lambda m, x: m(x).sum(1))
    check_layer(layer.eval(), normal(B, WIDTH))


# Pairs


def flat_gradients(model, batch, loss_fn):
    gradients = oracle_gradients(model, batch, loss_fn)
    return torch.cat([gradient.flatten(1) for gradient in gradients.values()], 1)


class Tagger(nn.Module):
    """Positions and a tied table, so that a parameter's uses have cross terms between pairs."""

    def __init__(self):
        super().__init__()
        self.table, self.norm = nn.Embedding(7, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, ids):
        return self.norm(self.table(ids)) @ self.table.weight.t()


def test_pairs():
    model, ids = Tagger().double(), tokens()
    gradients = flat_gradients(model, ids, lambda m, x: uneven_loss(m, (x,)))
    products = gs.inner_products(model, ids, model, ids, lambda m, x: uneven_loss(m, (x,)))
    torch.testing.assert_close(products, gradients @ gradients.t(), rtol=1e-9, atol=1e-9)


def test_two_models():
    first, second, losses = Tagger().double(), Tagger().double(), lambda m, x: uneven_loss(m, (x,))
    a, b = tokens(), tokens(positions=3)[:-1]
    expected = flat_gradients(first, a, losses) @ flat_gradients(second, b, losses).t()
    products = gs.inner_products(first, a, second, b, losses)
    torch.testing.assert_close(products, expected, rtol=1e-9, atol=1e-9)


# Numerics and memory


def test_workspace():
    """No tensor holds a gradient for each example, and scratch memory is what was allowed."""
    model = nn.Sequential(nn.Conv1d(8, 128, 3), nn.Flatten(), nn.Linear(128 * 14, 10))
    batch = torch.randn(32, 8, 16), torch.randint(10, (32,))
    elements = sum(parameter.numel() for parameter in model.parameters())
    gs.per_example_norms(model, batch, classify)
    ledger = peak_memory(lambda: gs.per_example_norms(model, batch, classify, workspace=2**18))
    assert ledger.largest < 32 * elements / 4
    expected = oracle_sqnorms(model, batch, classify)
    for workspace in (2**12, 2**18, None):
        stats = gs.per_example_norms(model, batch, classify, workspace=workspace)
        assert_sqnorms(stats, expected, 1e-4)


def test_cancellation():
    """Activations that hardly vary and gradients that sum to zero: pairs of positions cancel."""
    layer = nn.Linear(64, 64, bias=False)
    x = 3 + 1e-3 * torch.randn(16, 256, 64)
    slope = torch.randn(16, 256, 64)
    slope = slope - slope.mean(1, keepdim=True)

    def losses(model, batch):
        return (model(batch[0]) * batch[1]).sum((1, 2))

    stats = gs.per_example_norms(layer, (x, slope), losses)
    expected = oracle_sqnorms(layer, (x, slope), losses)["weight"]
    relative = (stats.sqnorm.double() - expected).abs() / expected
    # The sum over positions itself is rounded in float32: 3e-5 is what forming the gradient gives.
    assert relative.max() < 1e-3


def comparison(page: Path) -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows of a page's table of libraries."""
    table = page.read_text().partition("## Where other libraries stand")[2].partition("\n## ")[0]
    lines = [line.strip("|") for line in table.splitlines() if line.startswith("| ")]
    header, *rows = [[cell.strip() for cell in line.split("|")] for line in lines]
    return header, rows


def test_the_table_names_its_tests():
    """Every row of the comparison names tests of this file, and every test is named there."""
    _, rows = comparison(page_with("`test_norm_vector`"))
    named = {name for row in rows for cell in row for name in re.findall(r"`(test_\w+)`", cell)}
    assert all(re.search("`test_|`tests/", row[1]) for row in rows)
    here = {name for name in globals() if name.startswith("test_")}
    assert len(rows) >= 30
    assert named == here - {"test_the_table_names_its_tests", "test_the_readme_counts_its_rows"}


def test_the_readme_counts_its_rows():
    """How often each library is silently wrong or partial."""
    header, rows = comparison(page_with("`test_norm_vector`"))
    wrong = [str(sum("**S**" in cell for cell in column)) for column in zip(*rows, strict=True)]
    assert comparison(README) == (header[1:], [wrong[1:]])
    assert f" has {len(rows)} rows" in README.read_text()
