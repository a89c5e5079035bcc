"""gs.verify tells what is right from what is wrong, says why, and leaves no trace."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import MutableMapping
from dataclasses import dataclass
from functools import partial

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import gradstats as gs
from gradstats.statistics import _reference, _verify
from tests.functions import Kernel, linear_without_rule, recomputing
from tests.losses import losses_of as classify
from tests.oracle import assert_sqnorms, assert_unchanged, oracle_sqnorms, snapshot
from tests.test_fallback import Doubled
from tests.test_models import gpt2, sequence_losses, token_batch

B = 6


def network(*between):
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), *between, nn.Linear(8, 3))


@pytest.fixture
def batch():
    return torch.randn(B, 4), torch.randint(3, (B,))


def failed(report):
    return [check.name for check in report.checks if check.ok is False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_model_that_is_right(batch, dtype):
    model = network(nn.LayerNorm(8)).to(dtype)
    report = gs.verify(model, (batch[0].to(dtype), batch[1]), classify)
    assert report.ok and failed(report) == []
    assert report.examples == (0, 2, 5)
    assert [row.name for row in report.rows] == [name for name, _ in model.named_parameters()]
    assert all(row.status == "counted" and row.error < 1e-12 for row in report.rows)
    assert report.rows[0].operations == ("torch.nn.functional.linear",)
    assert report.rows[2].operations == ("torch.nn.functional.layer_norm",)
    assert "float64 on a copy" in report.reference


def test_the_report_in_a_shell(batch):
    """One line: the tables are what print shows."""
    report = gs.verify(network(), batch, classify)
    assert repr(report) == "VerifyReport(ok=True, parameters=4, failed=[])"
    report = gs.verify(network(nn.BatchNorm1d(8)), batch, classify)
    assert repr(report) == "VerifyReport(ok=False, parameters=6, failed=['coverage', 'coupling'])"


def test_the_report_in_a_notebook(batch):
    report = gs.verify(network(), batch, classify)
    assert report._repr_mimebundle_(include=None, exclude=None) == {"text/plain": str(report)}


def test_the_table():
    report = gs.verify(gpt2(), token_batch(B, 5), sequence_losses, examples=2)
    text = str(report)
    assert text.startswith("gradstats.verify: ok\n")
    assert "examples 0, 5" in text
    lines = text.splitlines()
    (line,) = [line for line in lines if line.startswith("transformer.wte.weight ")]
    assert "50×16" in line and "counted" in line
    assert line.endswith("torch.nn.functional.embedding, torch.nn.functional.linear")
    (line,) = [line for line in lines if line.startswith("transformer.wpe.weight ")]
    assert line.endswith("torch.nn.functional.embedding, Tensor.to, Tensor.add")
    assert len([line for line in lines if " counted " in line]) == len(report.rows) == 28
    assert all(len(line) == len(line.rstrip()) for line in lines)


def test_what_was_found_is_broken_into_lines_under_its_column(batch):
    report = gs.verify(network(nn.BatchNorm1d(8)), batch, classify)
    checks = str(report).split("\n\n")[1].splitlines()
    assert max(map(len, checks)) <= 100 < len(report.check("coupling").detail)
    start = checks[0].index("found")
    texts = {}
    for line in checks[1:]:
        name = line[:start].split(" ")[0] or name  # noqa: F821
        texts[name] = f"{texts.get(name, '')} {line[start:]}".strip()
    assert texts == {each.name: " ".join(each.detail.split()) for each in report.checks}


def test_nothing_of_the_users_is_changed(batch):
    model = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 8))
    model = nn.Sequential(model, nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3)).train()
    state = snapshot(model)
    generators = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    for mode in (True, False):
        model.train(mode)
        state["training"] = snapshot(model)["training"]
        gs.verify(model, batch, classify)
        assert_unchanged(model, state)
    assert torch.equal(generators[0], torch.get_rng_state())
    assert generators[1:] == (random.getstate(), numpy.random.get_state()[1].tolist())
    model.eval()
    classify(model, batch).sum().backward()
    gradients = {name: (p.grad, p.grad.clone()) for name, p in model.named_parameters()}
    gs.verify(model, batch, classify)
    for name, parameter in model.named_parameters():
        assert parameter.grad is gradients[name][0]
        assert torch.equal(parameter.grad, gradients[name][1])


def test_batch_norm_in_training_mode(batch):
    report = gs.verify(network(nn.BatchNorm1d(8)), batch, classify)
    assert not report.ok
    assert not report, "assert gs.verify(...) says what the report does"
    assert {"coverage", "coupling"} <= set(failed(report))
    assert "eval()" in report.check("coverage").detail
    assert "depend on each other" in report.check("coupling").detail
    assert gs.verify(network(nn.BatchNorm1d(8)).eval(), batch, classify).ok


class WithoutMean(nn.Module):
    """Takes the mean over the examples away."""

    def forward(self, x):
        return x - x.mean(0)


def test_what_the_call_itself_is_refused_for(batch):
    """Not for what follows from it further on, which the survey comes to."""
    model = network(WithoutMean())
    with pytest.raises(gs.ExampleAxisError) as refusal:
        gs.per_example_norms(model, batch, classify)
    detail = gs.verify(model, batch, classify).check("coverage").detail
    assert "brings what was computed over all examples" in detail
    assert str(refusal.value) in detail


class Centre(torch.autograd.Function):
    """Mixes the examples in a way that no operation gives away."""

    @staticmethod
    def forward(ctx, x):
        return x - x.mean(0)

    @staticmethod
    def backward(ctx, grad):
        return grad - grad.mean(0)


class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(Centre.apply(self.body(x)))


def test_losses_that_depend_on_others_by_a_number_alone(batch):
    """Their gradients do not."""

    def losses(model, batch):
        return classify(model, batch) + batch[0].detach().numpy().sum().item()

    report = gs.verify(nn.Linear(4, 3), batch, losses)
    assert failed(report) == ["coupling"]
    detail = report.check("coupling").detail
    assert "the gradient is the same" in detail and "divided" not in detail


def test_coupling_that_no_operation_shows(batch):
    report = gs.verify(Centred(), batch, classify)
    assert not report.ok
    assert "depend on each other" in report.check("coupling").detail
    assert "was not divided" not in report.check("coupling").detail
    assert report.check("exactness").ok is False
    assert "coupled" in report.check("exactness").detail
    assert "report it" not in report.check("exactness").detail


def test_losses_in_another_order_than_the_batch(batch):
    report = gs.verify(network(), batch, lambda model, batch: classify(model, batch).flip(0))
    assert "losses in another order than the batch" in report.check("coupling").detail


def test_a_contrastive_loss(batch):
    def losses(model, batch):
        out = functional.normalize(model(batch[0]), dim=1)
        return functional.cross_entropy(out @ out.t(), torch.arange(B), reduction="none")

    report = gs.verify(network(), batch, losses)
    assert "coupling" in failed(report) and not report.ok


@pytest.mark.parametrize("what", ["size", "weights"])
def test_a_loss_divided_by_something_of_the_whole_batch(batch, what):
    def losses(model, batch):
        by = len(batch[1]) if what == "size" else (batch[1] + 1.0).sum()
        return classify(model, batch) / by

    report = gs.verify(network(), batch, losses)
    assert failed(report) == ["coupling"]
    detail = report.check("coupling").detail
    assert "same direction" in detail and "divided" in detail
    if what == "size":
        assert "0.166667 times the length" in detail
    assert all(row.ok and row.error < 1e-12 for row in report.rows)


def test_losses_that_are_not_finite_alone(batch):
    """Of deviations over the batch one example has none: the difference has no size to report."""

    def losses(model, batch):
        values = classify(model, batch)
        apart = values - values.detach().mean()
        return apart / (apart.detach().square().sum() / (len(values) - 1)).sqrt()

    detail = gs.verify(network(), batch, losses).check("coupling").detail
    assert "but nan and nan alone: the examples depend on each other, so" in detail


def test_randomness_is_taken_into_account(batch):
    model = network(nn.Dropout(0.5)).train()
    report = gs.verify(model, batch, classify)
    assert report.ok
    assert all(row.error < 1e-12 for row in report.rows)
    assert "random" in report.check("coupling").detail
    assert "eval()" in report.check("coupling").detail
    coupled = gs.verify(nn.Sequential(nn.Dropout(0.2), Centred()), batch, classify)
    assert coupled.check("coupling").ok is False


class Adapter(nn.Linear):
    """A low-rank update as it begins: zero, behind dropout."""

    def __init__(self):
        super().__init__(4, 8)
        self.down, self.up = nn.Linear(4, 2, bias=False), nn.Linear(2, 8, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return super().forward(x) + self.up(self.down(functional.dropout(x, 0.5, self.training)))


def test_randomness_that_no_loss_shows(batch):
    """Other random numbers give the same losses and other gradients."""
    adapted = nn.Sequential(Adapter(), nn.Tanh(), nn.Linear(8, 3)).train()
    report = gs.verify(adapted, batch, classify)
    assert report.ok
    assert all(row.error < 1e-12 for row in report.rows)
    assert "random" in report.check("coupling").detail
    coupled = gs.verify(nn.Sequential(Adapter(), nn.Linear(8, 4), Centred()), batch, classify)
    assert coupled.check("coupling").ok is False


def test_padding_is_not_checked_where_gradients_are_random(batch):
    """An example that is shorter draws other random numbers."""
    adapted = nn.Sequential(Adapter(), nn.Tanh(), nn.Linear(8, 3)).train()
    mask = torch.ones(B, 5, dtype=torch.long)
    mask[1:, 3:] = 0
    given = {"x": torch.randn(B, 5, 4), "y": batch[1], "attention_mask": mask}

    def losses(model, batch):
        mask = batch["attention_mask"][..., None]
        mean = (model(batch["x"]) * mask).sum(1) / mask.sum(1)
        return functional.cross_entropy(mean, batch["y"], reduction="none")

    assert [each.name for each in gs.verify(adapted, given, losses).checks if not each.ok] == []
    assert gs.verify(adapted.eval(), given, losses).check("padding").ok


@pytest.mark.parametrize("lengths", [(3, 4, 5), (4, 4, 4)])
@pytest.mark.parametrize("packed", [True, False])
def test_randomness_of_examples_of_different_sizes(lengths, packed):
    """Among copies of itself an example has another place, and draws other random numbers."""
    rows, labels = torch.randn(12, 4), torch.randint(3, (3,))
    bounds = torch.tensor([0, *lengths]).cumsum(0) if packed else None
    positions = torch.cat([torch.arange(length) for length in lengths])
    given = (rows, labels, positions) if packed else (list(rows.split(lengths)), labels)

    def losses(model, batch):
        if packed:
            starts = (batch[2] == 0).nonzero()[:, 0].tolist()
            parts = model(batch[0]).tensor_split(starts[1:])
        else:
            parts = model(torch.cat(batch[0])).split(list(map(len, batch[0])))
        means = torch.stack([part.mean(0) for part in parts])
        return functional.cross_entropy(means, batch[1], reduction="none")

    model = network(nn.Dropout(0.5)).train()
    report = gs.verify(model, given, losses, cu_seqlens=bounds)
    check = report.check("coupling")
    assert report.ok and all(row.error < 1e-12 for row in report.rows)
    if len(set(lengths)) == 1:
        assert check.ok and "copies of itself" in check.detail
    else:
        assert check.ok is None and "model.eval()" in check.detail
    assert gs.verify(model.eval(), given, losses, cu_seqlens=bounds).check("coupling").ok


def test_randomness_of_other_generators(batch):
    """Python's and numpy's generators are restored between runs like PyTorch's own."""

    def losses(model, batch):
        return classify(model, batch) * (1 + random.random()) * (1 + numpy.random.rand())

    report = gs.verify(network(), batch, losses)
    assert report.ok and report.check("determinism").ok


def test_randomness_of_a_generator_of_its_own(batch):
    """It is not restored: no two forwards are alike, and nothing can be said of the examples."""
    generator = torch.Generator()

    def losses(model, batch):
        return classify(model, (batch[0] + torch.randn(4, generator=generator), batch[1]))

    report = gs.verify(network(), batch, losses)
    assert failed(report) == ["exactness", "determinism"] and all(row.ok for row in report.rows)
    assert "draws from a generator of its own" in report.check("determinism").detail
    assert "not compared: the same random numbers" in report.check("exactness").detail
    assert report.check("coupling").ok is None and report.examples == ()


def test_a_forward_that_is_not_deterministic(batch):
    calls = []

    def losses(model, batch):
        calls.append(None)
        return classify(model, batch) * (1 + 0.01 * len(calls))

    report = gs.verify(network(), batch, losses)
    assert not report.ok
    assert "model itself is not deterministic" in report.check("determinism").detail


def test_a_run_that_differs_is_named(batch, monkeypatch):
    calls = []

    def noisy(model, *args, **kwargs):
        stats = gs.per_example_norms(model, *args, **kwargs)
        calls.append(model)
        if len(calls) == 3:
            stats.by_parameter["0.bias"][1] += 1e-6
        return stats

    monkeypatch.setattr(_verify, "per_example_norms", noisy)
    report = gs.verify(network(), batch, classify)
    assert failed(report) == ["determinism"]
    assert "0.bias" in report.check("determinism").detail


def test_a_wrong_rule_is_found(batch):
    """A rule with the right value and a gradient twice too large, as a user may register one."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(4, 3)
            self.scale = nn.Parameter(torch.rand(3) + 0.5)

        def forward(self, x):
            return Kernel.apply(self.body(x), self.scale)

    wrong = lambda x, weight: x * (2 * weight - weight.detach())  # noqa: E731
    with gs.register_rule(Kernel, wrong):
        report = gs.verify(Scaled(), batch, classify)
    assert failed(report) == ["exactness"] and not report.ok
    detail = report.check("exactness").detail
    assert "scale" in detail and "Kernel.apply" in detail and "not coupled" in detail
    rows = {row.name: row for row in report.rows}
    assert not rows["scale"].ok and 2.9 < rows["scale"].error <= 3
    assert rows["body.weight"].ok
    with gs.register_rule(Kernel, torch.mul):
        assert gs.verify(Scaled(), batch, classify).ok


class Hidden(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 3)
        self.centres = nn.Parameter(torch.randn(3, 3))
        self.scale = nn.Parameter(torch.rand(3) + 0.5)
        self.idle = nn.Parameter(torch.rand(2))

    def forward(self, x):
        return Doubled.apply(linear_without_rule(self.body(x), self.centres), self.scale)


def test_coverage(batch):
    report = gs.verify(Hidden(), batch, classify, exclude="body.bias")
    status = {row.name: (row.status, row.ok) for row in report.rows}
    assert status == {
        "body.weight": ("counted", True),
        "body.bias": ("excluded", True),
        "centres": ("refused", False),
        "scale": ("refused", False),
        "idle": ("unused", True),
    }
    assert not report.ok and failed(report) == ["coverage"]
    detail = report.check("coverage").detail
    assert "1 counted, 1 unused, 1 excluded" in detail
    assert "gradstats_tests.linear" in detail and "DoubledBackward" in detail
    rows = {row.name: row for row in report.rows}
    assert rows["centres"].operations == ("torch.ops.gradstats_tests.linear",)
    assert rows["body.weight"].error < 1e-12 and rows["scale"].error is None
    report = gs.verify(Hidden(), batch, classify, fallback="vmap")
    assert report.ok
    rows = {row.name: row for row in report.rows}
    assert rows["centres"].status == rows["scale"].status == "fallback"
    assert max(row.error for row in report.rows) < 1e-12
    report = gs.verify(Hidden(), batch, classify, parameters="body.*")
    assert report.ok
    assert [row.status for row in report.rows].count("excluded") == 3


def test_padding():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=16, num_labels=3,
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(config).eval()
    lengths = torch.tensor([7, 3, 5, 7, 6, 2])
    mask = (torch.arange(7) < lengths[:, None]).long()
    ids = torch.randint(1, 30, (B, 7)) * mask
    batch = {"input_ids": ids, "attention_mask": mask, "labels": torch.randint(3, (B,))}

    def losses(model, batch, masked=True):
        mask = batch["attention_mask"] if masked else None
        logits = model(input_ids=batch["input_ids"], attention_mask=mask).logits
        return functional.cross_entropy(logits, batch["labels"], reduction="none")

    report = gs.verify(model, batch, losses)
    assert report.ok and report.check("padding").ok

    def leaking(model, batch, share):
        return losses(model, batch) + share * losses(model, batch, masked=False)

    # A little of it turns the gradients by a small angle.
    for share in (1, 0.01):
        report = gs.verify(model, batch, partial(leaking, share=share))
        assert failed(report) == ["padding"] and not report.ok
        detail = report.check("padding").detail
        assert "example 5" in detail and "is the mask used?" in detail
        assert "same direction" not in detail and "batch normalisation" not in detail
        assert re.search(r"gradients that differ by \d\.\de-0[1-6] of the larger", detail)

    def of_one_length(model, batch):
        assert batch["input_ids"].shape[1] == 7
        return losses(model, batch)

    check = gs.verify(model, batch, of_one_length).check("padding")
    assert check.ok is None and "5 without its padding failed with AssertionError" in check.detail
    check = gs.verify(model, {**batch, "attention_mask": torch.ones_like(mask)}, losses)
    assert check.check("padding").detail == "no example has trailing padding"
    with pytest.raises(KeyError, match=r"no check 'order', only .*'padding'"):
        report.check("order")


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (lambda m, b: classify(m, b).mean(), "LossShapeError.*scalar.*none"),
        (lambda m, b: m(b[0]), r"LossShapeError.*\(6, 3\)"),
        (lambda m, b: 1 / 0, "ZeroDivisionError"),
        (lambda m, b: m(b[1]), "RuntimeError"),
    ],
)
def test_a_loss_that_cannot_be_served_is_reported(batch, loss_fn, message):
    model = network()
    state = snapshot(model)
    report = gs.verify(model, batch, loss_fn)
    assert not report.ok and failed(report) == ["loss"]
    assert re.search(message, report.check("loss").detail)
    assert {row.status for row in report.rows} == {"unknown"}
    assert "FAILED" in str(report) and "compared with" not in str(report)
    assert_unchanged(model, state)


class Renewed(nn.Module):
    """As Keras copies its models: the copy's parameters have names of their own."""

    made = 0

    def __init__(self, layer):
        super().__init__()
        self.name = f"layer_{Renewed.made}"
        Renewed.made += 1
        self.add_module(self.name, layer)

    def forward(self, x):
        return getattr(self, self.name)(x)

    def __deepcopy__(self, memo):
        return Renewed(copy.deepcopy(getattr(self, self.name), memo))


def test_a_model_whose_copy_has_parameters_of_other_names(batch):
    report = gs.verify(Renewed(network()), batch, classify)
    assert report.ok and len(report.rows) == len(list(network().parameters()))
    assert "float32 on the model itself" in report.reference
    assert "a copy of the model has other parameters" in report.reference


class Copied(nn.Module):
    """Copies itself in a way of its own: with the very same layer, or with one that is new."""

    def __init__(self, made):
        super().__init__()
        self.layer, self.made = network(), made

    def forward(self, x):
        return self.layer(x)

    def __deepcopy__(self, memo):
        copied = Copied(self.made)
        if self.made == "shared":
            copied.layer = self.layer
        else:
            nn.init.ones_(copied.layer[0].weight)
        return copied


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        ("shared", "a float64 copy failed with ValueError: its tensors are the model's own"),
        ("new", "a copy of the model has other parameters"),
    ],
)
def test_a_model_whose_copy_is_none(batch, made, reason):
    """What a copy shares with the model would be converted to float64 in the model too."""
    model = Copied(made)
    state = snapshot(model)
    report = gs.verify(model, batch, classify)
    assert report.ok and report.reference == f"float32 on the model itself, because {reason}"
    assert all(each.dtype == torch.float32 for each in model.parameters())
    assert_unchanged(model, state)


def test_a_model_that_cannot_be_copied(batch):
    model = network()
    model.tensor = torch.ones(2, requires_grad=True) * 2  # deepcopy refuses tensors with a graph
    report = gs.verify(model, batch, classify)
    assert report.ok
    assert "float32 on the model itself" in report.reference and "copy failed" in report.reference
    # It would be compared with itself.
    assert "precision" not in [check.name for check in report.checks]
    report = gs.verify(model, batch, lambda m, b: classify(m, b) / len(b[1]))
    assert failed(report) == ["coupling"]


@pytest.mark.parametrize("refused", [False, True])
def test_a_model_that_kept_the_graph_of_an_earlier_forward(batch, refused):
    """Plain autograd fails too: its second backward goes through the same graph."""

    class Membrane(nn.Module):
        def forward(self, x):
            self.kept = x + self.kept
            return self.kept

    model = nn.Sequential(nn.Linear(4, 8), membrane := Membrane(), nn.Linear(8, 3))
    membrane.register_buffer("kept", torch.zeros(B, 8))
    classify(model, batch)
    if refused:
        with pytest.raises(gs.UnsupportedOperationError, match="an earlier forward"):
            gs.per_example_norms(model, batch, classify)
    report = gs.verify(model, batch, classify)
    assert failed(report) == ["coverage", "exactness"]
    detail = next(check.detail for check in report.checks if check.name == "exactness")
    assert detail.startswith("plain autograd failed with ")


def test_a_loss_that_uses_another_model_than_it_is_given(batch):
    model = network().double()
    batch = batch[0].double(), batch[1]
    report = gs.verify(model, batch, lambda _, b: classify(model, b))
    assert report.ok
    assert "does not use the model that it is given" in report.reference
    assert all(row.status == "counted" and row.error < 1e-12 for row in report.rows)


class Recomputed(nn.Module):
    """Layers in nested checkpoints, all of them, on inputs that require grad as hooks make them."""

    def __init__(self, run):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.run = run

    def forward(self, x):
        x = self.run(self.outer, x.clone().requires_grad_())
        return self.head(x) if self.head.weight.requires_grad else x[:, :3]

    def outer(self, x):
        return self.run(self.second, self.first(x).tanh())


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # of nested ones
@pytest.mark.parametrize("trained", [True, False])
def test_reentrant_checkpoints(batch, trained):
    """Their parameters appear in their backward alone, where torch.autograd.grad does not look."""
    model = Recomputed(partial(checkpoint, use_reentrant=True))
    model.head.requires_grad_(trained)
    report = gs.verify(model, batch, classify)
    assert report.ok and report.check("exactness").ok
    assert "float64 on a copy" in report.reference
    assert all(row.status == "counted" and row.error < 1e-12 for row in report.rows)
    assert all(row.operations == ("torch.nn.functional.linear",) for row in report.rows)
    assert "apply" not in vars(torch.utils.checkpoint.CheckpointFunction)


def test_a_checkpoint_that_no_gradient_comes_through(batch):
    """Inputs that do not require grad: PyTorch warns, and trains nothing inside."""
    model = Recomputed(lambda f, x: checkpoint(f, x.detach(), use_reentrant=True))
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad"):
        report = gs.verify(model, batch, classify)
    assert report.ok
    assert [row.status for row in report.rows] == ["unused"] * 4 + ["counted"] * 2


def test_checkpoints_of_other_libraries(batch):
    model = Recomputed(recomputing)
    report = gs.verify(model, batch, classify)
    assert report.ok and report.check("exactness").ok is None
    assert "not compared: ['first.weight'" in report.check("exactness").detail
    assert [row.status for row in report.rows] == ["counted"] * 6
    assert [row.error is None for row in report.rows] == [True] * 4 + [False] * 2
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_copy_that_does_not_fit(batch, monkeypatch):
    monkeypatch.setattr(_reference.os, "sysconf", lambda _: 10)
    report = gs.verify(network(), batch, classify)
    assert report.ok and "needs" in report.reference and "GiB" in report.reference


@dataclass(frozen=True)
class Pairs:
    left: torch.Tensor
    right: torch.Tensor
    label: torch.Tensor
    name: str = "pairs"


def test_batches_of_other_kinds():
    model = nn.Bilinear(4, 4, 3)
    model = nn.ModuleDict({"left": nn.Linear(4, 3), "right": nn.Linear(4, 3)})

    def losses(model, batch):
        assert batch.name == "pairs"
        out = model["left"](batch.left) * model["right"](batch.right)
        return functional.cross_entropy(out, batch.label, reduction="none")

    pairs = Pairs(torch.randn(B, 4), torch.randn(B, 4), torch.randint(3, (B,)))
    assert gs.verify(model, pairs, losses).ok


def test_examples_along_another_axis_and_one_example():
    class SequenceFirst(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(4, 3)

        def forward(self, x):
            return self.head(x).mean(0)

    batch = torch.randn(7, B, 4), torch.randint(3, (B,))
    report = gs.verify(SequenceFirst(), batch, classify, batch_dim=1)
    assert report.ok and report.check("coupling").ok
    # As many steps as examples: which axis of the mask is which is not known, so nothing is said.
    mask = torch.ones(B, B).tril()
    named = {"x": torch.randn(B, B, 4), "y": batch[1], "attention_mask": mask}
    report = gs.verify(
        SequenceFirst(), named, lambda m, b: classify(m, (b["x"], b["y"])), batch_dim=1
    )
    assert report.ok and "padding" not in [check.name for check in report.checks]
    one = torch.randn(1, 4), torch.randint(3, (1,))
    report = gs.verify(network(), one, classify)
    assert report.ok and report.check("coupling").ok is None and report.examples == (0,)


@pytest.mark.parametrize("leaks", [False, True])
def test_packed_examples(leaks):
    """Examples of one row, kept apart by their bounds; or not, when they attend to each other."""

    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.mix, self.head = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9)

        def forward(self, batch):
            bounds = batch["cu_seqlens"]
            hidden = self.table(batch["ids"])
            rows = torch.arange(hidden.shape[1])
            owner = torch.searchsorted(bounds[1:].contiguous(), rows, right=True)
            apart = owner[:, None] != owner
            scores = hidden @ self.mix(hidden).mT
            if not leaks:
                scores = scores.masked_fill(apart, -torch.inf)
            logits = self.head(scores.softmax(-1) @ hidden)
            tokens = functional.cross_entropy(logits[0], batch["targets"][0], reduction="none")
            spans = zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
            return torch.stack([tokens[start:end].mean() for start, end in spans])

    batch = {
        "ids": torch.randint(9, (1, 11)),
        "targets": torch.randint(9, (1, 11)),
        "cu_seqlens": torch.tensor([0, 4, 5, 8, 11], dtype=torch.int32),
    }
    losses = lambda model, batch: model(batch)  # noqa: E731
    report = gs.verify(Packed(), batch, losses, cu_seqlens=batch["cu_seqlens"], examples=4)
    assert report.examples == (0, 1, 2, 3)
    assert report.ok is not leaks
    assert report.check("coupling").ok is not leaks
    if not leaks:
        assert max(row.error for row in report.rows) < 1e-12


class Graphs(nn.Module):
    """Packed examples that sum their rows by a tensor that says whose each row is."""

    def __init__(self):
        super().__init__()
        self.rows, self.head = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x, owner, size):
        rows = self.rows(x).tanh()
        return self.head(rows.new_zeros(size, 6).index_add(0, owner.flatten(), rows))


class Unknown:
    """A batch that nobody can look into, as those of torch_geometric are."""

    def __init__(self, *held):
        self.held = held


@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("kind", ["owner", "edges", "unknown", "partly unknown", "array"])
def test_batches_that_cannot_be_taken_apart(kind, coupled):
    """Nothing is said of what was not checked, and owners of rows are counted anew."""
    bounds = torch.tensor([0, 3, 3, 5])
    x, y, owner = torch.randn(5, 4), torch.randint(3, (3,)), torch.tensor([[0, 0, 0, 2, 2]])
    edges = torch.tensor([[0, 1, 4, 3], [1, 2, 3, 4]])
    batch = {
        "owner": (x, owner, y),
        "edges": (x, owner, y, edges),
        "unknown": Unknown(x, owner, y),
        "partly unknown": (Unknown(x, owner), y),
        "array": (x, owner.numpy(), y),
    }[kind]

    def losses(model, batch):
        held = batch.held if isinstance(batch, Unknown) else batch
        if isinstance(held[0], Unknown):
            held = (*held[0].held, *held[1:])
        x, owner, y, *edges = held
        if edges:
            x = x + x[edges[0][0]].sum() / len(x) * 0
        outputs = model(x, torch.as_tensor(owner), len(y))
        values = functional.cross_entropy(outputs, y, reduction="none")
        return values * (1 + outputs.detach().std()) if coupled else values

    report = gs.verify(Graphs(), batch, losses, cu_seqlens=bounds)
    assert report.check("exactness").ok
    check = report.check("coupling")
    if kind == "owner":
        assert check.ok is not coupled
    else:
        what = {"edges": r"integers of shape \(2, 4\)", "array": "ndarray"}.get(kind, "Unknown")
        assert check.ok is None
        assert re.search(f"not checked: the batch holds .*{what}", check.detail)


class Shared(MutableMapping):
    """A mapping whose copies hold the same dict."""

    def __init__(self, held):
        self.held = held

    def __getitem__(self, key):
        return self.held[key]

    def __setitem__(self, key, value):
        self.held[key] = value

    def __delitem__(self, key):
        del self.held[key]

    def __iter__(self):
        return iter(self.held)

    def __len__(self):
        return len(self.held)


def test_a_mapping_of_the_users_own_is_left_alone(batch):
    held = {"x": batch[0], "y": batch[1]}
    shared = Shared(dict(held))
    report = gs.verify(network(), shared, lambda m, b: classify(m, (b["x"], b["y"])))
    assert report.ok and report.check("coupling").ok
    assert all(shared[name] is tensor for name, tensor in held.items())


def test_a_loss_that_takes_from_the_batch(batch):
    """As losses around models of Hugging Face do."""
    held = {"x": batch[0], "labels": batch[1]}

    def losses(model, batch):
        labels = batch.pop("labels")
        return functional.cross_entropy(model(batch["x"]), labels, reduction="none")

    report = gs.verify(network(), held, losses)
    assert report.ok and report.check("coupling").ok and set(held) == {"x", "labels"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_loss_that_writes_into_the_batch(batch, dtype):
    """Each call of the loss finds the batch as it was, and so does the caller."""

    def losses(model, batch):
        x, labels, mask = batch["x"], batch["labels"], batch["attention_mask"]
        x.mul_(3).sub_(1)
        x = functional.pad(x * mask, (0, 4 - x.shape[1]))
        mask.zero_()
        labels[labels == 2] = -100
        return functional.cross_entropy(model(x), labels, reduction="none")

    mask = torch.ones(B, 4, dtype=torch.long)
    mask[0, 2:] = 0
    whole = batch[0].to(dtype)
    held = {"x": whole[:, :4], "labels": batch[1], "attention_mask": mask}
    labels = batch[1].clone()
    before = whole.clone()
    report = gs.verify(network().to(dtype), held, losses)
    assert report.ok and report.check("padding").ok, str(report)
    assert torch.equal(whole, before) and torch.equal(batch[1], labels) and mask[0].sum() == 2


def test_a_batch_that_does_not_work_alone(batch):
    """The model wants two examples at least: compared among copies of itself instead."""

    def losses(model, batch):
        assert len(batch[0]) > 1
        return classify(model, batch)

    report = gs.verify(network(), batch, losses)
    assert report.ok and "batch of one failed" in report.check("coupling").detail


def test_losses_and_gradients_that_are_not_finite(batch):
    spoilt = batch[0].clone()
    spoilt[1, 1] = float("nan")
    report = gs.verify(network(), (spoilt, batch[1]), classify)
    assert failed(report) == ["loss"] and "examples [1]" in report.check("loss").detail

    def steep(model, batch):  # a finite loss with an infinite slope, for the first example only
        return classify(model, batch) + (model(batch[0]).sum(1) * batch[2]).abs().sqrt()

    reach = torch.ones(B)
    reach[0] = 0
    report = gs.verify(network(), (*batch, reach), steep)
    assert not report.ok
    assert "NaN or infinity of another example" in report.check("coupling").detail


def test_gradients_that_only_the_models_own_precision_spoils():
    """The float32 exponential overflows: the loss is zero, and its gradient not a number."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 100.0)
    x = torch.tensor([[1.0], [0.01], [-1.0]])
    report = gs.verify(model, x, lambda model, x: 1 / (1 + model(x)[:, 0].exp()))
    assert failed(report) == ["precision"]
    assert "inf of a squared norm" in report.check("precision").detail


@pytest.mark.parametrize("low", [0, 1])
def test_the_precision_is_the_lowest_of_the_model(batch, low):
    """Wherever it is: what rounding there changes is for information."""
    model = nn.Sequential(nn.Linear(4, 16), nn.Linear(16, 3))
    model[low].bfloat16()

    def losses(model, batch):
        hidden = batch[0]
        for layer in model:
            hidden = layer(hidden.to(layer.weight.dtype)).tanh()
        return functional.cross_entropy(hidden, batch[1], reduction="none")

    check = gs.verify(model, batch, losses).check("precision")
    assert check.ok is None and check.detail.startswith("bfloat16 against float64")


@pytest.mark.usefixtures("graphs_run_on_cpus")
def test_compiled(batch):
    model = network()
    torch._dynamo.reset()
    report = gs.verify(torch.compile(model, backend="aot_eager"), batch, classify)
    assert report.ok and report.check("precision").ok
    assert report.rows[0].name == "0.weight"


def test_a_compiled_model_that_goes_wrong(batch, monkeypatch):
    """What only the model itself does wrong shows against the reference."""

    def wrong(model, *args, **kwargs):
        stats = gs.per_example_norms(model, *args, **kwargs)
        if next(model.parameters()).dtype == torch.float32:
            stats.sqnorm.mul_(1.5)
        return stats

    monkeypatch.setattr(_verify, "per_example_norms", wrong)
    assert failed(gs.verify(network(), batch, classify)) == ["precision"]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"examples": 0}, gs.TrackingError, "examples is 0"),
        ({"examples": 2.5}, gs.TrackingError, "examples is 2.5"),
        ({"tolerance": 0}, gs.TrackingError, "tolerance is 0"),
        ({"tolerance": 10**400}, gs.TrackingError, "tolerance is 1000"),
        ({"fallback": "loop"}, gs.TrackingError, "fallback is 'loop'"),
        ({"batch_dim": -1}, gs.ExampleAxisError, "batch_dim is -1"),
        ({"exclude": "decoder.*"}, gs.CoverageError, "matches no parameter"),
        ({"parameters": "*", "exclude": "*"}, gs.CoverageError, "leave no parameter"),
    ],
)
def test_options(batch, options, error, message):
    with pytest.raises(error, match=message):
        gs.verify(network(), batch, classify, **options)


def test_the_tolerance_is_the_callers(batch):
    model = network()
    model.tensor = torch.ones(2, requires_grad=True) * 2
    assert oracle_sqnorms(network(), batch, classify)["0.weight"].dtype == torch.float64
    report = gs.verify(model, batch, classify, tolerance=1e-12)
    assert "exactness" in failed(report)
    assert "tolerance 1e-12" in report.check("exactness").detail


def test_a_loss_with_input_gradients():
    def penalty(model, batch):
        x = batch.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return (slope.norm(dim=1) - 1).square()

    model = nn.Sequential(nn.Linear(4, 8), nn.Softplus(), nn.Linear(8, 1))
    report = gs.verify(model, torch.randn(B, 4), penalty)
    assert report.ok and failed(report) == []
    assert all(row.error < 1e-12 for row in report.rows if row.status == "counted")


def test_a_mapped_function_that_uses_a_parameter(batch):
    class Mapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.own = network(), nn.Parameter(torch.randn(4, 4))

        def forward(self, x):
            return self.layer(torch.vmap(lambda row: torch.tanh(row @ self.own))(x))

    report = gs.verify(Mapped(), batch, classify)
    assert report.ok, str(report)
    assert report.rows[0].status == "counted"


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_tables_whose_rows_are_shortened_when_looked_up(kind):
    class Looks(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.last = kind(11, 8, max_norm=1.0), nn.Linear(8, 4)

        def forward(self, ids):
            return self.last(self.table(ids).reshape(len(ids), -1, 8).mean(1))

    model, ids = Looks(), torch.randint(11, (4, 3))
    table = model.table.weight
    before = table.detach().clone()
    report = gs.verify(model, (ids, torch.randint(4, (4,))), classify)
    assert report.ok, str(report)
    assert model.table.weight is table and torch.equal(table, before)


def test_what_could_not_be_divided_is_said_beside_coupled_examples():
    """Ids of all examples one after the other: alone an example has the others' too."""

    class Bags(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.last = nn.EmbeddingBag(11, 8, mode="sum"), nn.Linear(8, 4)

        def forward(self, offsets, ids):
            return self.last(self.table(ids, offsets))

    def loss(model, batch):
        labels, offsets, ids = batch
        return functional.cross_entropy(model(offsets, ids), labels, reduction="none")

    data = torch.randint(4, (3,)), torch.tensor([0, 2, 3]), torch.randint(11, (7,))
    report = gs.verify(Bags(), data, loss)
    checks = {check.name: check for check in report.checks}
    assert checks["exactness"].ok
    assert checks["coupling"].ok is False
    assert "it holds a tensor of shape (7,) without an axis of 3 at 0" in checks["coupling"].detail


def test_labels_that_look_like_the_starts_of_bags_are_said_beside_coupled_examples():
    """The second of two sentences has two words before it, and the label 2."""

    class Sentences(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.EmbeddingBag(11, 8, include_last_offset=True)
            self.last = nn.Linear(8, 4)

        def forward(self, batch):
            return self.last(self.table(batch["ids"], batch["bounds"]))

    def loss(model, batch):
        return functional.cross_entropy(model(batch), batch["labels"], reduction="none")

    bounds = torch.tensor([0, 2, 5])
    batch = {"ids": torch.randint(11, (5,)), "bounds": bounds, "labels": torch.tensor([0, 2])}
    report = gs.verify(Sentences(), batch, loss, cu_seqlens=bounds)
    (coupling,) = (check for check in report.checks if check.name == "coupling")
    assert coupling.ok is False
    assert "integers of shape (2,) that may say where its examples begin" in coupling.detail
    batch["labels"] = torch.tensor([0, 3])
    assert gs.verify(Sentences(), batch, loss, cu_seqlens=bounds).ok


def test_the_workspace_is_that_of_the_norms_it_verifies(batch, monkeypatch):
    used = []

    def norms(*args, **options):
        used.append(options["workspace"])
        return gs.per_example_norms(*args, **options)

    monkeypatch.setattr(_verify, "per_example_norms", norms)
    assert gs.verify(network(), batch, classify, workspace=1000).ok
    assert len(used) > 1 and set(used) == {1000}
    with pytest.raises(gs.TrackingError, match="workspace"):
        gs.verify(network(), batch, classify, workspace=-1)


def test_values_of_others_that_are_given_are_reported():
    """Served, as gradients of the losses as they stand, which depend on the batch."""
    model = nn.Linear(4, 3).double()
    batch = torch.randn(6, 4).double(), torch.randint(3, (6,)), torch.randn(6).double()

    def policy(m, batch):
        states, actions, advantages = batch
        advantages = (advantages - advantages.mean()) / (advantages.square().mean().sqrt() + 1)
        return advantages * functional.cross_entropy(m(states), actions, reduction="none")

    report = gs.verify(model, batch, policy)
    (coupling,) = (check for check in report.checks if not check.ok)
    assert coupling.name == "coupling" and "as given" in coupling.detail
    expected = oracle_sqnorms(model, batch, policy)
    assert_sqnorms(gs.per_example_norms(model, batch, policy), expected, 1e-9)


@pytest.mark.parametrize("other", ["given", "divided"])
def test_a_generator_in_training_mode_beside_the_model(other):
    """What it makes of the batch is given; its buffers are as they were."""
    generate = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double()
    critic, z = nn.Linear(4, 1).double(), torch.randn(6, 3).double()

    def losses(m, z):
        found = functional.softplus(m(generate(z).detach())).squeeze(1)
        return found / found.detach().mean() if other == "divided" else found

    before = {name: value.clone() for name, value in generate.state_dict().items()}
    report = gs.verify(critic, z, losses)
    assert all(torch.equal(before[name], now) for name, now in generate.state_dict().items())
    assert all(module.training for module in generate.modules())
    (coupling,) = (check for check in report.checks if check.name == "coupling")
    assert report.ok is coupling.ok is (other == "given")
    assert ("beside the model (Sequential) in eval mode" in coupling.detail) is report.ok
    assert_sqnorms(gs.per_example_norms(critic, z, losses), oracle_sqnorms(critic, z, losses), 1e-9)
