"""Inner products of whole models' gradients: between batches, checkpoints, and with directions."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations

import gradstats as gs
from benchmarks.workloads import Transformer, classification, next_token
from gradstats._factors import Outer
from gradstats.capture import _tracker
from gradstats.capture.parameters._consumers import WithinBatch
from gradstats.contractions import _outer_pairs, _tiles
from gradstats.statistics._kept import keep, products
from tests.oracle import (
    assert_products,
    assert_unchanged,
    check_model,
    check_products,
    flat,
    oracle_gradients,
    perturbed,
    snapshot,
)
from tests.test_models import Checkpointed, gpt2, sequence_losses, token_batch

B = 5


def labelled(*shape: int, classes: int = 3, dtype=torch.float64):
    return torch.randn(shape, dtype=dtype), torch.randint(classes, (shape[0],))


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def rows_of(model, batch, loss_fn=classification):
    return flat(oracle_gradients(model, batch, loss_fn))


def test_two_checkpoints_on_one_mini_batch():
    """Every ⟨∇ℓ_i(w₁), ∇ℓ_j(w₂)⟩ of a small network, with w₂ one step of descent from w₁."""
    first, batch = mlp(), labelled(8, 4)
    second = copy.deepcopy(first)
    classification(second, batch).mean().backward()
    torch.optim.SGD(second.parameters(), lr=0.5).step()
    second.zero_grad()
    expected = rows_of(first, batch) @ rows_of(second, batch).T
    cross = gs.inner_products(first, batch, second, batch, classification)
    torch.testing.assert_close(cross, expected)
    assert (cross - cross.T).abs().max() > 1e-3  # unlike a Gram matrix it is not symmetric
    diagonal = gs.inner_products(first, batch, second, batch, classification, pairs="diagonal")
    torch.testing.assert_close(diagonal, expected.diagonal())
    # First order: what the step by the mean gradient did to each loss.
    step = 0.5 * gs.inner_products(first, batch, first, batch, classification).mean(0)
    change = classification(first, batch) - classification(second, batch)
    assert torch.corrcoef(torch.stack([step, change.detach()]))[0, 1] > 0.9


def test_batches_of_different_sizes_and_lengths():
    model = Transformer(layers=2, width=16, heads=2, vocabulary=50, positions=12).double()
    model.head.weight = model.tokens.weight
    other = perturbed(model)
    for positions in ((4, 9), (12, 1), (5, 7)):
        long, short = token_batch(6, positions[0]), token_batch(7, positions[1])
        check_products(model, long, next_token, other=(other, short))


@pytest.mark.parametrize("tied", [True, False])
def test_stock_gpt2(tied):
    model = gpt2(tie_word_embeddings=tied).double()
    batch = token_batch(B, B)
    check_products(model, batch, sequence_losses, other=(perturbed(model), token_batch(3, 9)))


def test_float32():
    model = gpt2()
    batch = token_batch(B, 9)
    other = perturbed(model, 0.02), token_batch(3, 7)
    check_products(model, batch, sequence_losses, other=other, rtol=5e-6)
    values = gs.inner_products(model, batch, *other, sequence_losses)
    assert values.dtype == torch.float32
    network = nn.Sequential(nn.Conv2d(2, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 3))
    data = labelled(B, 2, 8, 8, dtype=torch.float32)
    check_products(network, data, classification, rtol=5e-6)


@pytest.mark.parametrize("cancelling", [False, True])
@pytest.mark.parametrize(
    "size, scale",
    [(3e-10, 3e-10), (1e-6, 1e-12), (1e9, 1e6), (1e16, 1.0), (3e3, 1e-22), (1e-22, 3e3)],
)
def test_small_and_large_gradients_in_float32(size, scale, cancelling):
    """Their products are float32 numbers, though those of a factor may be none, nor its terms."""
    model, other = nn.Linear(96, 64, bias=False), nn.Linear(96, 64, bias=False)
    opposite = 30.0 * cancelling * torch.randn(96) * torch.tensor([1.0, -1.0])[:, None]
    first, second = (size * (torch.randn(n, 2, 96) + opposite) for n in (4, 4))

    def losses(model, x):
        return scale * model(x.to(model.weight.dtype)).sum((1, 2))

    wide = [copy.deepcopy(each).double() for each in (model, other)]
    rows, columns = (rows_of(*pair, losses) for pair in zip(wide, (first, second), strict=True))
    products = gs.inner_products(model, first, other, second, losses)
    assert_products(products, rows, columns, 1e-5)
    diagonal = gs.inner_products(model, first, other, second, losses, pairs="diagonal")
    assert_products(diagonal, rows, columns, 1e-5)


@pytest.mark.parametrize("positions", [(0, 0), (0, 3), (3, 0)])
def test_sequences_without_positions(positions):
    first, second = (torch.randn(B, count, 4).double() for count in positions)
    check_products(
        nn.Linear(4, 3).double(), first, lambda model, x: model(x).square().sum((1, 2)),
        other=(nn.Linear(4, 3).double(), second),
    )  # fmt: skip


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2), nn.GroupNorm(2, 6), nn.GELU(),
        nn.ConvTranspose2d(6, 4, 3, stride=2, output_padding=1, groups=2), nn.Tanh(),
        nn.Conv2d(4, 4, 3, groups=4), nn.InstanceNorm2d(4, affine=True), nn.Conv2d(4, 3, 1),
        nn.PReLU(3), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.LayerNorm(12), nn.Linear(12, 3),
    )  # fmt: skip


def test_convolutions_and_norms():
    model = convolutions().double()
    other = perturbed(model), labelled(4, 4, 11, 6)
    check_products(model, labelled(B, 4, 8, 8), classification, other=other)
    check_products(model, labelled(B, 4, 8, 8), classification, workspace=1)


def cut_one_by_one(model, batch):
    """Images of two sizes, in two uses each."""
    losses = []
    for number, (image, label) in enumerate(zip(*batch, strict=True)):
        sizes = image[None, :, number % 2 :], image[None, :, :, : 7 + number % 2]
        losses.append(classification(model, (sizes[0], label[None])))
        losses[-1] = losses[-1] + classification(model, (sizes[1], label[None]))
    return torch.cat(losses)


@pytest.mark.parametrize("workspace", [1, 2**20])
def test_convolutions_of_one_example_at_a_time(workspace):
    model = convolutions().double()
    other = perturbed(model), labelled(B, 4, 8, 8)
    check_products(model, labelled(B, 4, 8, 8), cut_one_by_one, other=other, workspace=workspace)


class Derived(nn.Module):
    """Weights that are computed from parameters, or shared, before they meet data."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 6, padding_idx=2)
        self.scale = nn.Parameter(torch.randn(6))
        self.mixed = nn.Parameter(torch.randn(18, 6))
        self.normed = parametrizations.weight_norm(nn.Linear(6, 6))
        self.low = nn.Parameter(torch.randn(6, 2))
        self.high = nn.Parameter(torch.randn(2, 6))
        self.register_buffer("mask", torch.ones(6, 6).tril())
        self.shared = nn.Linear(6, 6)

    def forward(self, ids):
        x = self.table(ids) * (1 + self.scale)
        query, key, value = (x @ part.t() for part in self.mixed.chunk(3))
        x = torch.softmax(query @ key.mT, -1) @ value
        x = x + torch.tanh(self.normed(x)) + x @ (self.mask * (self.low @ self.high))
        x = self.shared(torch.tanh(self.shared(x)))
        return x.sum(1) @ self.table.weight.T


def test_derived_parameters():
    model = Derived().double()
    first = torch.randint(7, (B, 4)), torch.randint(7, (B,))
    second = torch.randint(7, (4, 6)), torch.randint(7, (4,))
    check_products(model, first, classification, other=(perturbed(model), second))


def test_parts_of_parameters_that_lie_elsewhere_in_memory():
    """Slices are told apart by where they lie: in one model, in a flat buffer."""

    class Sliced(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(6, 6).double()
            self.w = nn.Parameter(torch.randn(4, 6).double())

        def forward(self, x):
            x = self.first(x)
            return torch.cat([x * self.w[0], x[:, :4] * self.w[:, 3]], 1)

    def losses(model, x):
        return model(x).square().sum(1)

    model, other, x = Sliced(), Sliced(), torch.randn(3, 6).double()
    flat = torch.randn(100).double()
    w = flat[50:74].view(4, 6)
    other.load_state_dict({**other.state_dict(), "w": w}, assign=True)
    check_products(model, x, losses, other=(other, x))


@pytest.mark.parametrize(
    "part", [lambda w: w[2:3], lambda w: w[2:, 1:3], lambda w: w[:2, 3:], lambda w: w.chunk(4)[3]]
)
@pytest.mark.parametrize("form", ["row by row", "column by column", "of a wider one", "float32"])
def test_a_part_of_parameters_whose_memory_has_another_form(part, form):
    """Where a part lies in the memory of one model tells nothing of that of another."""

    class Sliced(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(4, 6).double())

        def forward(self, x):
            own = part(self.w)
            return x[:, : own.shape[1]] @ own.t()

    def losses(model, x):
        return model(x.to(model.w.dtype)).double().sin().sum(1)

    model, other, x = Sliced(), Sliced(), torch.randn(3, 6).double()
    w = other.w.detach()
    forms = {
        "row by row": w,
        "column by column": w.t().contiguous().t(),
        "of a wider one": functional.pad(w, (0, 30))[:, :6],
        "float32": w.float(),
    }
    other.w = nn.Parameter(forms[form])
    expected = rows_of(model, x, losses) @ rows_of(other, x, losses).double().T
    got = gs.inner_products(model, x, other, x, losses)
    rtol = 1e-5 if form == "float32" else 1e-10
    torch.testing.assert_close(got, expected, rtol=rtol, atol=rtol)


def test_checkpointed_blocks():
    model = Checkpointed(reentrant=False, shared=True).double()
    check_products(model, token_batch(5, 4, 20), next_token)


def test_an_inner_gradient_does_not_count():
    """torch.autograd.grad inside the loss runs the uses' backward too."""
    model, batch = mlp(), labelled(B, 4)

    def losses(model, batch):
        x = batch[0].clone().requires_grad_()
        out = model(x)
        torch.autograd.grad(out.sum(), x, retain_graph=True)
        return functional.cross_entropy(out, batch[1], reduction="none")

    expected = rows_of(model, batch)
    kept = keep(model, batch, losses)
    (result,) = products([kept], model, batch, losses)
    assert_products(result.values, expected, expected, 1e-9)
    stats = gs.per_example_norms(model, batch, losses, gram=True, alignment=True)
    assert_products(stats.gram, expected, expected, 1e-9)


def test_another_example_axis():
    model = nn.Linear(4, 2).double()
    batch = torch.randn(6, B, 4, dtype=torch.float64)

    def losses(model, batch):
        return model(batch).square().sum((0, 2))

    check_products(model, batch, losses, batch_dim=1)


def test_by_parameter():
    model, batch = convolutions().double(), labelled(B, 4, 8, 8)
    other, others = perturbed(model), labelled(4, 4, 8, 8)
    first = oracle_gradients(model, batch, classification)
    second = oracle_gradients(other, others, classification)
    got = gs.inner_products(model, batch, other, others, classification, per_parameter=True)
    assert list(got) == [name for name, _ in model.named_parameters()]
    for name, value in got.items():
        assert_products(value, flat({name: first[name]}), flat({name: second[name]}), 1e-9)
    same = gs.inner_products(model, batch, model, batch, classification, per_parameter=True)
    for name, value in same.items():
        assert_products(value, flat({name: first[name]}), flat({name: first[name]}), 1e-9)
    arguments = (model, batch, model, batch, classification)
    assert_products(gs.inner_products(*arguments), flat(first), flat(first), 1e-9)
    diagonal = gs.inner_products(*arguments, pairs="diagonal", per_parameter=True)
    for name, value in diagonal.items():
        torch.testing.assert_close(value, flat({name: first[name]}).square().sum(1))
    itself = gs.inner_products(*arguments, pairs="diagonal")
    torch.testing.assert_close(itself, flat(first).square().sum(1))
    direction = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    along = gs.alignment(model, batch, classification, direction, per_parameter=True)
    for name, value in along.items():
        torch.testing.assert_close(
            value, flat({name: first[name]}) @ direction[name].flatten(), rtol=1e-9, atol=1e-12
        )


def test_some_parameters_only():
    model, batch = mlp(), labelled(B, 4)
    gradients = oracle_gradients(model, batch, classification)
    chosen = {name: gradients[name] for name in ("0.weight", "2.weight")}
    for options in ({"parameters": "*.weight"}, {"exclude": "*.bias"}):
        got = gs.inner_products(model, batch, perturbed(model, 0), batch, classification, **options)
        assert_products(got, flat(chosen), flat(chosen), 1e-9)
        direction = {name: torch.ones_like(value[0]) for name, value in chosen.items()}
        along = gs.alignment(model, batch, classification, direction, **options)
        torch.testing.assert_close(along, flat(chosen).sum(1))


def test_parameters_that_one_side_does_not_use():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.shared, self.first = nn.Linear(4, 3), nn.Linear(3, 3)
            self.second, self.nowhere = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, batch):
            x = self.shared(batch["x"])
            return (self.first if batch["first"] else self.second)(x)

    def losses(model, batch):
        return model(batch).square().sum(1)

    model = Branches().double()
    batches = [{"x": labelled(n, 4)[0], "first": n == 3} for n in (3, 4)]

    def oracle(batch):
        def plain(model, x):
            return losses(model, {"x": x, "first": batch["first"]})

        return oracle_gradients(model, batch["x"], plain)

    first, second = map(oracle, batches)
    got = gs.inner_products(model, batches[0], model, batches[1], losses, per_parameter=True)
    for name, value in got.items():
        torch.testing.assert_close(value, flat({0: first[name]}) @ flat({0: second[name]}).T)
        assert value.any() == (name.split(".")[0] == "shared")
    zero = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    along = gs.alignment(model, batches[0], losses, zero, per_parameter=True)
    assert not along["nowhere.weight"].any() and not along["second.bias"].any()


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_parameters_of_no_elements():
    """A layer of no width, as the last clusters of an adaptive softmax may have."""
    head = nn.AdaptiveLogSoftmaxWithLoss(8, 12, [3, 6], div_value=4).double()
    assert any(not parameter.numel() for parameter in head.parameters())
    batch = torch.randn(4, 8, dtype=torch.float64), torch.tensor([1, 4, 7, 11])
    check_model(head, batch, lambda model, batch: -model(*batch).output)
    check_products(head, batch, lambda model, batch: -model(*batch).output)


def test_a_mean_gradient_of_another_batch_is_a_direction():
    model, batch, validation = mlp(), labelled(B, 4), labelled(9, 4)
    classification(model, validation).mean().backward()
    mean = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    expected = rows_of(model, batch) @ rows_of(model, validation).mean(0)
    torch.testing.assert_close(gs.alignment(model, batch, classification, mean), expected)
    wrapped = {f"module.{name}": value for name, value in mean.items()}
    torch.testing.assert_close(gs.alignment(model, batch, classification, wrapped), expected)
    own = gs.alignment(model, batch, classification, "mean")
    torch.testing.assert_close(own, rows_of(model, batch) @ rows_of(model, batch).mean(0))


def test_a_direction_has_none_where_a_parameter_is_not_used():
    model, x = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)).double(), torch.randn(4, 3).double()
    (model[0](x).square().sum()).backward()
    direction = {name: p.grad for name, p in model.named_parameters()}
    assert direction["1.weight"] is None

    def losses(model, x):
        return model(x).square().sum(1)

    got = gs.alignment(model, x, losses, direction)
    zeros = {name: p.new_zeros(p.shape) for name, p in model.named_parameters()}
    given = {name: value for name, value in direction.items() if value is not None}
    along = torch.cat([value.flatten() for value in {**zeros, **given}.values()])
    torch.testing.assert_close(got, rows_of(model, x, losses) @ along)
    by_parameter = gs.alignment(model, x, losses, direction, per_parameter=True)
    assert by_parameter["1.weight"].tolist() == [0.0] * 4


def test_a_sparse_gradient_is_a_direction():
    model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Flatten(), nn.Linear(12, 3)).double()
    batch = torch.randint(9, (B, 3)), torch.randint(3, (B,))
    classification(model, batch).mean().backward()
    direction = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert direction["0.weight"].is_sparse
    model[0].sparse = False
    rows = rows_of(model, batch)
    got = gs.alignment(model, batch, classification, direction)
    torch.testing.assert_close(got, rows @ rows.mean(0))


def test_a_loss_that_takes_from_the_batch():
    """One batch for two checkpoints: the second finds what the first took."""
    model, batch = mlp(), labelled(B, 4)
    other = perturbed(model)

    def losses(model, batch):
        return classification(model, (batch["x"], batch.pop("y")))

    held = dict(zip("xy", batch, strict=True))
    expected = rows_of(model, batch) @ rows_of(other, batch).T
    torch.testing.assert_close(gs.inner_products(model, held, other, held, losses), expected)

    class Two(tuple):
        """Made of two tensors, not of a list."""

        def __new__(cls, x, y):
            return super().__new__(cls, (x, y))

    pair = Two(*batch)
    got = gs.inner_products(model, pair, other, pair, classification)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("pairs", ["all", "diagonal"])
def test_a_loss_that_writes_into_a_batch_of_both_sides(pairs):
    """Unless it writes the same numbers each time, the second side would be of other data."""

    def scaled(model, batch):
        batch[0].mul_(3)
        return classification(model, batch)

    def clamped(model, batch):
        batch[0].clamp_(-1, 1)
        return classification(model, batch)

    model, other, (x, y) = mlp(), mlp(), labelled(B, 4)
    apart = gs.inner_products(model, (x.clone(), y), other, (x.clone(), y), scaled)
    expected = rows_of(model, (3 * x, y)) @ rows_of(other, (3 * x, y)).T
    torch.testing.assert_close(apart, expected)
    with pytest.raises(gs.TrackingError, match="loss_fn writes into the batch"):
        gs.inner_products(model, (x, y), other, (x, y), scaled, pairs=pairs)
    x, y = labelled(B, 4)
    batch = x.clamp(-1, 1), y
    expected = rows_of(model, batch) @ rows_of(other, batch).T
    got = gs.inner_products(model, (x, y), other, (x, y), clamped, pairs=pairs)
    torch.testing.assert_close(got, expected if pairs == "all" else expected.diagonal())


# What is kept.
# What is kept.


def test_kept_gradients_serve_many_batches_and_outlive_the_model():
    for model, make in (
        (mlp(), lambda n: labelled(n, 4)),
        (convolutions().double(), lambda n: labelled(n, 4, 8, 8)),
        (Derived().double(), lambda n: (torch.randint(7, (n, 4)), torch.randint(7, (n,)))),
    ):
        batch, later = make(B), perturbed(model)
        expected = rows_of(model, batch)
        kept = keep(model, batch, classification)
        assert list(kept.shapes) == [name for name, _ in model.named_parameters()]
        torch.testing.assert_close(kept.sqnorm, expected.square().sum(1))
        assert len(kept) == B
        # The next checkpoint is loaded into the same model, the batch's memory is used again.
        model.load_state_dict(later.state_dict())
        for tensor in batch:
            tensor.zero_()
        for size in (3, 4):
            others = make(size)
            (result,) = products([kept], model, others, classification, per_parameter=True)
            columns = rows_of(later, others)
            assert_products(result.values, expected, columns, 1e-9)
            torch.testing.assert_close(result.sqnorm, columns.square().sum(1))
            assert list(result.by_parameter) == list(kept.shapes)
            torch.testing.assert_close(sum(result.by_parameter.values()), result.values)


class Reusing(nn.Module):
    """Computes with memory of its own, which the next forward overwrites."""

    def __init__(self, kind):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8).double(), nn.Linear(8, 8).double()
        self.kind, self.numbers = kind, np.zeros((B, 4))
        self.memory = {"inputs": torch.zeros(B, 4, dtype=torch.float64)}

    def forward(self, x):
        if self.kind == "inputs":
            x = self.memory["inputs"].copy_(x)
        elif self.kind == "numpy":
            self.numbers[:] = x.numpy()
            x = torch.from_numpy(self.numbers)
        hidden = self.first(x).tanh()
        if self.kind == "hidden":
            self.memory.get("hidden", torch.zeros(1)).zero_()
            self.memory["hidden"] = hidden.detach()
        return self.second(hidden)


@pytest.mark.parametrize("kind", ["inputs", "numpy", "hidden"])
def test_kept_gradients_outlive_memory_that_the_next_forward_overwrites(kind):
    model, batch, other = Reusing(kind), *torch.randn(2, B, 4, dtype=torch.float64)

    def losses(model, x):
        return model(x).square().sum(1)

    rows, columns = (rows_of(model, each, losses) for each in (batch, other))
    kept = keep(model, batch, losses)
    (result,) = products([kept], model, other, losses)
    assert_products(result.values, rows, columns, 1e-9)


def test_several_kept_batches_in_one_backward(monkeypatch):
    model, batch = mlp(), labelled(B, 4)
    blocks = [labelled(n, 4) for n in (2, 3)]
    kept = [keep(model, block, classification) for block in blocks]
    calls = []
    run_backward = _tracker.run_backward
    monkeypatch.setattr(
        _tracker, "run_backward", lambda *a, **k: (calls.append(1), run_backward(*a, **k))[1]
    )
    results = products(kept, model, batch, classification)
    assert len(calls) == 1
    for block, result in zip(blocks, results, strict=True):
        assert result.by_parameter is None
        assert_products(result.values, rows_of(model, block), rows_of(model, batch), 1e-9)
    (diagonal,) = products(kept[1:], model, blocks[1], classification, diagonal=True)
    assert_products(diagonal.values, rows_of(model, blocks[1]), rows_of(model, blocks[1]), 1e-9)


def test_kept_gradients_are_consumed_when_asked():
    model, batch = mlp(), labelled(B, 4)
    kept = keep(model, batch, classification)
    assert kept.nbytes > 0
    (result,) = products([kept], model, batch, classification, consume=True)
    assert_products(result.values, rows_of(model, batch), rows_of(model, batch), 1e-9)
    assert kept.nbytes == 0


def test_kept_bytes_are_those_of_the_factors():
    model = nn.Linear(20, 30)
    kept = keep(model, torch.randn(4, 20), lambda m, x: m(x).square().sum(1))
    # Inputs and output gradients; the bias has the same gradients.
    assert kept.nbytes == 4 * 4 * (20 + 30)
    # One example of T = 40 positions: the gradient (3, 2) is smaller than what it is made of.
    small = nn.Linear(2, 3, bias=False)
    kept = keep(small, torch.randn(4, 40, 2), lambda m, x: m(x).square().sum((1, 2)))
    assert kept.nbytes == 4 * 4 * 6


# What is refused.


def test_models_that_differ():
    batch = labelled(B, 4)
    wide = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    state = snapshot(wide)
    with pytest.raises(gs.CoverageError, match=r"'0.weight' is of shape \(6, 4\).*\(7, 4\)"):
        gs.inner_products(mlp(), batch, wide, batch, classification)
    with pytest.raises(gs.CoverageError, match=r"'2.bias'.*missing in the second"):
        short = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3, bias=False)).double()
        gs.inner_products(mlp(), batch, short, batch, classification)
    kept = keep(mlp(), batch, classification)
    deep = nn.Sequential(*mlp(), nn.Tanh(), nn.Linear(3, 3), nn.Linear(3, 3)).double()
    with pytest.raises(gs.CoverageError, match=r"missing in the first.*and 1 more"):
        products([kept], deep, batch, classification)
    assert_unchanged(wide, state)


def test_diagonals_of_different_sizes():
    model = mlp()
    with pytest.raises(gs.ExampleAxisError, match="have 5 and 4 examples"):
        gs.inner_products(
            model, labelled(5, 4), model, labelled(4, 4), classification, pairs="diagonal"
        )


def test_choices():
    model, batch = mlp(), labelled(B, 4)
    arguments = (model, batch, model, batch, classification)
    with pytest.raises(gs.TrackingError, match="pairs is 'some'"):
        gs.inner_products(*arguments, pairs="some")
    with pytest.raises(gs.TrackingError, match="nonfinite is 'skip'"):
        gs.inner_products(*arguments, nonfinite="skip")
    with pytest.raises(gs.TrackingError, match="workspace is 0"):
        gs.inner_products(*arguments, workspace=0)
    with pytest.raises(gs.ExampleAxisError, match="batch_dim"):
        gs.inner_products(*arguments, batch_dim=-1)
    with pytest.raises(gs.CoverageError, match="'nothing'"):
        gs.inner_products(*arguments, parameters="nothing")
    with pytest.raises(gs.TrackingError, match="direction is 'median'"):
        gs.alignment(model, batch, classification, "median")


def test_directions_that_do_not_fit():
    model, batch = mlp(), labelled(B, 4)
    good = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for direction, message in (
        ({k: v for k, v in good.items() if k != "2.bias"}, r"\['2.bias'\] are missing"),
        ({**good, "3.bias": torch.zeros(3)}, r"\['3.bias'\] are not tracked"),
        ({**good, "2.bias": torch.zeros(2)}, r"'2.bias' has shape \(2,\).*\(3,\)"),
        (dict.fromkeys(good), r"None for every parameter, .* before zero_grad\(\) clears them"),
    ):
        with pytest.raises(gs.CoverageError, match=message):
            gs.alignment(model, batch, classification, direction)
    for direction, message in (
        ({**good, "2.bias": torch.zeros(3, dtype=torch.long)}, "int64"),
        ({**good, "2.bias": 0.0}, "'2.bias' is float"),
        ([1.0], "direction is list"),
    ):
        with pytest.raises(gs.TrackingError, match=message):
            gs.alignment(model, batch, classification, direction)


def test_a_direction_under_both_names_of_a_tied_parameter():
    """As a difference of state dicts has it; the second name is that of no other parameter."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    model[2].weight = model[0].weight
    direction = model.state_dict()
    message = r"\['2.weight'\] are not tracked.*tied parameters have one name, the first"
    with pytest.raises(gs.CoverageError, match=message):
        gs.alignment(model, labelled(B, 3), classification, direction)
    direction.pop("2.weight")
    gs.alignment(model, labelled(B, 3), classification, direction)


@pytest.mark.parametrize("side", [0, 1])
def test_gradients_that_are_not_finite(side):
    model = mlp()
    batches = [labelled(B, 4), labelled(B, 4)]
    batches[side][0][3, 0] = float("nan")
    (x, y), (x_b, y_b) = batches
    arguments = (model, (x, y), model, (x_b, y_b), classification)
    for pairs in ("all", "diagonal"):
        with pytest.raises(gs.NonFiniteGradientError, match="example 3 "):
            gs.inner_products(*arguments, pairs=pairs)
    bad = gs.inner_products(*arguments, nonfinite="keep").isnan()
    assert bool((bad if side == 0 else bad.T)[3].all()) and bad.sum() == B
    direction = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    for along in (direction, "mean"):
        with pytest.raises(gs.NonFiniteGradientError):
            gs.alignment(model, batches[side], classification, along)
    kept = gs.alignment(model, batches[side], classification, direction, nonfinite="keep")
    assert kept.isnan().tolist() == [i == 3 for i in range(B)]


@pytest.mark.parametrize("pairs", ["all", "diagonal"])
@pytest.mark.parametrize("same", [True, False])
def test_products_that_float32_does_not_hold(pairs, same):
    """Each parameter's share is a float32 number, the sum of all of them is none."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    for layer in model:
        nn.init.ones_(layer.weight)
    x = torch.tensor([[1.5e19], [1.0]])
    other = x if same else x.clone()

    def losses(model, x):
        return model(x).sum(1)

    with pytest.raises(gs.NonFiniteGradientError, match=r"4\.5e\+38.*model\.double"):
        gs.inner_products(model, x, model, other, losses, pairs=pairs)
    kept = gs.inner_products(model, x, model, other, losses, pairs=pairs, nonfinite="keep")
    assert kept.flatten()[-1].item() == pytest.approx(2)
    with pytest.raises(gs.NonFiniteGradientError, match=r"direction .*example 0\."):
        gs.alignment(model, x, losses, {"0.weight": x[:1] * 2, "1.weight": x[:1]})


def test_errors_in_the_loss_leave_the_models_as_they_were():
    models = [mlp(), mlp()]
    states = list(map(snapshot, models))
    calls = []

    def losses(model, batch):
        calls.append(model)
        if model is models[1]:
            raise RuntimeError("user")
        return classification(model, batch)

    batch = labelled(B, 4)
    with pytest.raises(RuntimeError, match="user"):
        gs.inner_products(models[0], batch, models[1], batch, losses)
    assert calls == models
    for model, state in zip(models, states, strict=True):
        assert_unchanged(model, state)


# Inside a training step.


MADE = {
    "mlp": lambda: (mlp(), labelled(B, 4), classification),
    "convolutions": lambda: (convolutions().double(), labelled(B, 4, 8, 8), classification),
    "gpt2": lambda: (gpt2().double(), token_batch(B, 7), sequence_losses),
    "images": lambda: (convolutions().double(), labelled(B, 4, 8, 8), cut_one_by_one),
    "derived": lambda: (
        Derived().double(), (torch.randint(7, (B, 4)), torch.randint(7, (B,))), classification
    ),
}  # fmt: skip


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", ["mlp", "convolutions", "gpt2"])
def test_alignment_and_gram_beside_training(kind, fused):
    model, batch, loss_fn = MADE[kind]()
    named = oracle_gradients(model, batch, loss_fn)
    rows = flat(named)
    plain = copy.deepcopy(model)
    loss_fn(plain, batch).mean().backward()
    options = {"batch_size": B, "fused": fused, "alignment": True, "gram": True}
    with gs.track(model, **options) as tracker:
        tracker.backward(loss_fn(model, batch))
    stats, mean = tracker.stats, rows.mean(0)
    assert_products(stats.gram, rows, rows, 1e-9)
    assert_products(stats.alignment[:, None], rows, mean[None], 1e-9)
    torch.testing.assert_close(stats.mean_sqnorm, mean @ mean)
    torch.testing.assert_close(stats.sqnorm, rows.square().sum(1))
    size = rows.norm(dim=1) * mean.norm()
    for name, value in stats.alignment_by_parameter.items():
        expected = flat({name: named[name]}) @ named[name].mean(0).flatten()
        assert bool(((value - expected).abs() <= 1e-9 * size).all()), name
    for got, want in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad)
        assert fused or torch.equal(got.grad, want.grad)


def turned(loss_fn, order):
    """Return the same losses in another order than the batch."""
    return lambda model, batch: loss_fn(model, batch)[order]


@pytest.mark.parametrize("order", [[2, 4, 0, 1, 3], [4, 3, 2, 1, 0], [1, 0, 2, 3, 4]], ids=str)
@pytest.mark.parametrize("kind", MADE)
def test_losses_in_another_order(kind, order):
    """Products come in the order of the losses, as norms do."""
    model, batch, loss_fn = MADE[kind]()
    check_products(model, batch, turned(loss_fn, order))
    rows = rows_of(model, batch, turned(loss_fn, order))
    in_order = rows_of(model, batch, loss_fn)
    half = gs.inner_products(model, batch, model, batch, loss_fn)
    assert_products(half, in_order, in_order, 1e-9)
    with gs.track(model, batch_size=B, alignment=True, gram=True) as tracker:
        tracker.backward(turned(loss_fn, order)(model, batch))
    assert_products(tracker.stats.gram, rows, rows, 1e-9)
    assert_products(tracker.stats.alignment[:, None], rows, rows.mean(0)[None], 1e-9)


def test_norms_beside_products_are_in_the_order_of_the_losses(monkeypatch):
    """They tell which products have to be computed again."""
    seen = {}
    take = WithinBatch.take

    def noted(self, arrival):
        seen[arrival.name] = arrival.sqnorm
        take(self, arrival)

    monkeypatch.setattr(WithinBatch, "take", noted)
    model, x = nn.Linear(3, 2).double(), torch.randn(4, 3).double()
    stats = gs.per_example_norms(model, x, lambda m, x: m(x).flip(0).square().sum(1), gram=True)
    for name, row in stats.by_parameter.items():
        torch.testing.assert_close(seen[name], row, rtol=1e-12, atol=0)


def test_weighted_losses_in_another_order():
    """Weights are those of the losses as they stand."""
    model, batch, order = mlp(), labelled(B, 4), [2, 4, 0, 1, 3]
    rows = rows_of(model, batch)[order]
    weights = torch.rand(B, dtype=torch.float64) + 0.5
    with gs.track(model, batch_size=B, weights=weights, alignment=True, gram=True) as tracker:
        tracker.backward(turned(classification, order)(model, batch))
    whole = weights[None] @ rows
    assert_products(tracker.stats.gram, rows, rows, 1e-9)
    assert_products(tracker.stats.alignment[:, None], rows, whole, 1e-9)


def test_weights_and_scales_are_divided_out():
    model, batch = mlp(), labelled(B, 4)
    rows = rows_of(model, batch)
    weights = torch.tensor([0.1, -0.5, 2.0, 1.0, 0.25], dtype=torch.float64)
    whole = weights @ rows
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    both = {"alignment": True, "gram": True, "batch_size": B}
    with gs.track(model, weights=weights, scaler=scaler, **both) as tracker:
        tracker.backward(classification(model, batch))
    assert_products(tracker.stats.gram, rows, rows, 1e-9)
    assert_products(tracker.stats.alignment[:, None], rows, whole[None], 1e-9)
    torch.testing.assert_close(tracker.stats.mean_sqnorm, whole @ whole)
    with gs.track(model, loss_reduction="sum", **both) as tracker:
        classification(model, batch).sum().backward()
    total = rows.sum(0)
    assert_products(tracker.stats.gram, rows, rows, 1e-9)
    assert_products(tracker.stats.alignment[:, None], rows, total[None], 1e-9)
    torch.testing.assert_close(tracker.stats.mean_sqnorm, total @ total)


def test_nothing_is_measured_that_was_not_asked_for():
    model, batch = mlp(), labelled(B, 4)
    stats = gs.per_example_norms(model, batch, classification)
    extras = ("alignment", "alignment_by_parameter", "mean_sqnorm", "gram")
    assert all(getattr(stats, name) is None for name in extras)
    with gs.track(model, batch_size=B, gram=True) as tracker:
        tracker.backward(classification(model, batch))
    assert [getattr(tracker.stats, name) is None for name in extras] == [True, True, True, False]
    with gs.track(model, batch_size=B, alignment=True) as tracker:
        tracker.backward(classification(model, batch))
    assert [getattr(tracker.stats, name) is None for name in extras] == [False, False, False, True]


def test_compiled_models_run_eagerly():
    torch._dynamo.reset()
    model, batch = mlp(), labelled(B, 4)
    compiled = torch.compile(model, backend="aot_eager")
    rows = rows_of(model, batch)
    gs.per_example_norms(compiled, batch, classification)
    got = gs.inner_products(compiled, batch, perturbed(model, 0), batch, classification)
    assert_products(got, rows, rows, 1e-9)
    with gs.track(compiled, batch_size=B, alignment=True, gram=True) as tracker:
        tracker.backward(classification(compiled, batch))
    assert_products(tracker.stats.gram, rows, rows, 1e-9)
    # Afterwards it runs compiled again.
    assert torch._dynamo.eval_frame._stance.stance == "default"


@pytest.mark.parametrize("pairs", ["all", "diagonal"])
def test_layers_without_outputs_have_no_gradients(pairs):
    model, x = nn.Linear(3, 1), torch.randn(4, 2, 3)
    model.weight, model.bias = (nn.Parameter(each[:0]) for each in model.parameters())
    for other in (perturbed(model), model):
        with pytest.raises(gs.TrackingError, match="or that have no elements"):
            gs.inner_products(model, x, other, x, lambda m, x: m(x).sum((1, 2)), pairs=pairs)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("positions", [3, 12])
def test_on_a_gpu(positions):
    model = Transformer(layers=2, width=64, heads=2, vocabulary=300, positions=12)
    model.head.weight = model.tokens.weight
    other = perturbed(model, 0.02)
    first, second = token_batch(6, positions, 300), token_batch(5, positions, 300)
    rows, columns = rows_of(model, first, next_token), rows_of(other, second, next_token)
    model, other = model.cuda(), other.cuda()
    first, second = (tuple(x.cuda() for x in batch) for batch in (first, second))
    kept = keep(model, first, next_token)
    for pairs, chosen in (("all", second), ("diagonal", first)):
        (result,) = products([kept], other, chosen, next_token, diagonal=pairs == "diagonal")
        theirs = (
            columns
            if pairs == "all"
            else rows_of(other.cpu(), tuple(x.cpu() for x in chosen), next_token)
        )
        other = other.cuda()
        assert_products(result.values.cpu(), rows, theirs, 1e-4)
    direction = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    along = torch.cat([value.flatten() for value in direction.values()])[None].double().cpu()
    got = gs.alignment(model, first, next_token, direction)
    assert_products(got[:, None].cpu(), rows, along, 1e-4)


def check_pairs_of_rows(dtype, groups):
    """Compare all pairs' products of factors with one position each on CUDA with plain products."""
    torch.manual_seed(0)
    sides = [torch.randn(n, groups, 1, width).to(dtype) for n in (5, 4) for width in (6, 9)]
    left, right, other_left, other_right = (side.cuda() for side in sides)
    factors = [Outer(*both, (6, 9)) for both in ((left, right), (other_left, other_right))]
    got = _outer_pairs.pairs(*factors, 1 << 20, (torch.ones(5), torch.ones(4)))
    exact = [side.double() for side in sides]
    rows, columns = ((one.mT @ other).flatten(1) for one, other in (exact[:2], exact[2:]))
    assert_products(got.cpu(), rows, columns, 1e-6)
    same = _outer_pairs.pairs(factors[0], factors[0], 1 << 20, (torch.ones(5), torch.ones(5)))
    assert_products(same.cpu(), rows, rows, 1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_pairs_of_rows_on_a_gpu(dtype, groups):
    check_pairs_of_rows(dtype, groups)


@pytest.mark.parametrize("parts", [((0, 4), (4, 8)), ((0, 4), (8, 12)), ((0, 6), (4, 12))], ids=str)
@pytest.mark.parametrize("pairs", ["all", "diagonal"])
def test_batches_that_use_different_rows_of_a_weight(parts, pairs):
    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(12, 8, dtype=torch.float64))

        def forward(self, x):
            which = 0 if x.shape[1] == 1 else 1
            return functional.linear(x, self.weight[slice(*parts[which])])

    def losses(model, x):
        return model(x).sin().sum((1, 2))

    model = Parts()
    other = perturbed(model)
    first, second = torch.randn(B, 1, 8).double(), torch.randn(B, 2, 8).double()
    expected = rows_of(model, first, losses) @ rows_of(other, second, losses).T
    expected = expected if pairs == "all" else expected.diagonal()
    got = gs.inner_products(model, first, other, second, losses, pairs=pairs)
    torch.testing.assert_close(got, expected)


def test_slices_looked_up_beside_a_product_whose_rows_are_another_axis():
    class Slices(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 6, 4, dtype=torch.float64))

    def losses(model, batch):
        x, ids = batch
        products = torch.einsum("btnc,nac->bta", x, model.weight)
        return products.sin().sum((1, 2)) + model.weight[ids].sin().sum((1, 2, 3))

    model, batch = Slices(), (torch.randn(4, 1, 6, 4).double(), torch.randint(6, (4, 1)))
    check_products(model, batch, losses, other=(perturbed(model), batch))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("direction", ["mean", "given"])
def test_dtypes_of_products_with_a_direction(dtype, direction):
    model, (x, y) = mlp().to(dtype), labelled(B, 4, dtype=dtype)
    if direction == "given":
        direction = {name: p.detach() for name, p in model.named_parameters()}
    wanted = torch.float64 if dtype == torch.float64 else torch.float32
    assert gs.alignment(model, (x, y), classification, direction).dtype == wanted
    parts = gs.alignment(model, (x, y), classification, direction, per_parameter=True)
    assert {part.dtype for part in parts.values()} == {wanted}


@pytest.mark.parametrize("pairs", ["all", "diagonal"])
def test_parts_that_share_no_element(pairs, monkeypatch):
    """Their products are zero, and no gradient is formed to find that out."""

    class Half(nn.Module):
        def __init__(self, start):
            super().__init__()
            self.weight, self.start = nn.Parameter(torch.randn(64, 32)), start

        def forward(self, x):
            return x @ self.weight[self.start :][:32].t()

    def formed(*_):
        raise AssertionError

    for name in ("dense_pairs", "dense_diagonal"):
        monkeypatch.setattr(_tiles, name, formed)
    x = torch.randn(5, 2, 32)
    found = gs.inner_products(
        Half(0), x, Half(32), x, lambda m, x: m(x).square().sum((1, 2)), pairs=pairs
    )
    assert found.shape == ((5, 5) if pairs == "all" else (5,)) and not found.any()


class Weighed(nn.Module):
    """A layer whose weight is used as it is, masked, or normalised; or what lies near its rows."""

    def __init__(self, kind: str):
        super().__init__()
        self.weight, self.kind = nn.Parameter(torch.randn(7, 5).double()), kind
        self.register_buffer("mask", torch.rand(7, 5).double())

    def forward(self, x):
        if self.kind == "distances":
            return torch.cdist(x, self.weight)
        if self.kind == "masked":
            return functional.linear(x, self.weight * self.mask)
        dim = 1 if self.kind == "rows" else 0
        return functional.linear(x, functional.normalize(self.weight, dim=dim))


@pytest.mark.parametrize("workspace", [300, 2000])
@pytest.mark.parametrize("kind", ["distances", "masked", "rows", "columns"])
def test_a_few_rows_of_the_parameter_at_a_time(kind, workspace):
    for shape in ((6, 5), (6, 3, 5)):
        batch = torch.randn(shape).double()
        check_products(
            Weighed(kind), batch, lambda m, x: m(x).square().flatten(1).sum(1).sin(),
            workspace=workspace,
        )  # fmt: skip
