"""Every contract has its own error, and an error costs the user nothing."""

from __future__ import annotations

import copy
import dataclasses
import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import gradstats as gs
from gradstats.statistics._batches import Given
from tests.functions import Kernel, linear_without_rule
from tests.losses import losses_of as per_example_cross_entropy
from tests.oracle import (
    assert_products,
    assert_sqnorms,
    assert_unchanged,
    check_model,
    flat,
    oracle_gradients,
    oracle_on_the_batch,
    oracle_sqnorms,
    snapshot,
)

B = 5


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


@pytest.fixture
def batch():
    return torch.randn(B, 4), torch.randint(3, (B,))


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (lambda m, b: functional.cross_entropy(m(b[0]), b[1]), r'scalar.*reduction="none"'),
        (lambda m, b: m(b[0]), r"shape \(5, 3\), expected \(5,\)"),
        (lambda m, b: m(b[0])[:3, 0], r"shape \(3,\), expected \(5,\)"),
        (lambda m, b: m(b[0]).argmax(1), r"dtype torch.int64"),
        (lambda m, b: m(b[0]).sum(1).detach(), r"do not require grad.*no_grad"),
        (lambda m, b: [0.0] * B, r"losses are list, expected a tensor of shape \(5,\)"),
        (lambda m, b: None, r"losses are NoneType.*returned by loss_fn"),
    ],
)
def test_losses_that_are_not_one_per_example(model, batch, loss_fn, message):
    state = snapshot(model)
    with pytest.raises(gs.LossShapeError, match=message):
        gs.per_example_norms(model, batch, loss_fn)
    assert_unchanged(model, state)


def test_targets_that_broadcast_to_pairs_are_told_apart_by_their_shapes(batch):
    x, y = batch

    def losses(model, batch):
        return (model(batch[0]) - batch[1]).square().mean(0)  # (B, 1) - (B,)

    shapes = r"predictions and targets one shape \(\(B, 1\) and \(B,\)"
    with pytest.raises(gs.CoupledExamplesError, match=shapes):
        gs.per_example_norms(nn.Linear(4, 1), (x, y.float()), losses)


def test_an_example_left_out(model, batch):
    """Rows are followed; an example without a row has no gradient."""

    def drops_an_example(m, b):
        losses = m(b[0][1:]).sum(1)
        return torch.stack([losses.new_zeros(()), *losses])

    expected = oracle_sqnorms(model, batch, lambda m, b: m(b[0]).sum(1))
    expected = {name: value * (torch.arange(B) > 0) for name, value in expected.items()}
    got = gs.per_example_norms(model, batch, drops_an_example)
    assert_sqnorms(got, expected, 1e-5)


def test_losses_whose_examples_were_lost(model, batch):
    """Which loss is whose cannot be told once they were shifted."""
    with pytest.raises(gs.ExampleAxisError, match="losses"):
        gs.per_example_norms(model, batch, lambda m, b: functional.pad(m(b[0][1:]).sum(1), (0, 1)))


def test_rows_that_are_not_examples(model, batch):
    def invents_rows(m, b):
        return functional.pad(m(b[0].mean() * torch.ones(4, 4)).sum(1), (1, 0))

    state = snapshot(model)
    with pytest.raises(
        gs.ExampleAxisError,
        match=r"(?s)parameter '0.weight'.*module '0'.*\(4, 4\).*5 examples.*batch_dim",
    ):
        gs.per_example_norms(model, batch, invents_rows)
    assert_unchanged(model, state)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_batch_norm_in_training_mode(affine, frozen):
    norm = nn.BatchNorm1d(6, affine=affine)
    norm.requires_grad_(not frozen)
    model = nn.Sequential(nn.Linear(4, 6), norm, nn.Linear(6, 3)).train()
    batch = torch.randn(B, 4), torch.randint(3, (B,))
    with pytest.raises(gs.CoupledExamplesError, match=r"training mode.*eval\(\).*GroupNorm"):
        gs.per_example_norms(model, batch, per_example_cross_entropy)
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert norm.num_batches_tracked == 0  # the module counts before its operation is refused
    assert norm.running_mean.tolist() == [0] * 6


def test_batch_norm_whose_statistics_are_frozen(batch):
    """What the message advises: the layers in eval mode, the rest of the model in training."""
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).train()
    remedy = "Call model.eval() first, or .eval() on these layers alone, or replace them by Group"
    with pytest.raises(gs.CoupledExamplesError, match=re.escape(f"{remedy}Norm.")):
        gs.per_example_norms(model, batch, per_example_cross_entropy)
    model[1].eval()
    check_model(model.double(), (batch[0].double(), batch[1]), per_example_cross_entropy)
    assert model.training


def test_batch_norm_without_running_statistics(batch):
    """It takes the batch's in either mode, so that another mode is no way on."""
    norm = nn.BatchNorm1d(6, track_running_stats=False)
    model = nn.Sequential(nn.Linear(4, 6), norm, nn.Linear(6, 3)).eval()
    message = (
        "batch normalisation without running statistics (parameter '1.weight' (of module '1')) "
        "mixes the examples of a batch: each loss depends on all examples, so per-example "
        "gradients do not exist. Replace these layers by GroupNorm, or train them with "
        "track_running_stats=True and call .eval() on them before you measure."
    )
    with pytest.raises(gs.CoupledExamplesError, match=re.escape(message)):
        gs.per_example_norms(model, batch, per_example_cross_entropy)


class UsesKernel(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.scale = nn.Module()
        self.scale.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return Kernel.apply(self.layer(x), self.scale.weight)


def test_a_function_that_hides_its_parameter_is_refused(batch):
    model = UsesKernel()
    with pytest.raises(
        gs.UnsupportedOperationError, match=r"KernelBackward.*'scale.weight'.*exclude"
    ):
        gs.per_example_norms(model, batch, per_example_cross_entropy)
    with (
        pytest.raises(gs.UnsupportedOperationError, match=r"KernelBackward.*'scale.weight'"),
        gs.track(model, batch_size=B),
    ):
        per_example_cross_entropy(model, batch).mean().backward()
    assert all(p.grad is None for p in model.parameters())
    stats = gs.per_example_norms(model, batch, per_example_cross_entropy, exclude=["scale.*"])
    assert list(stats.by_parameter) == ["layer.weight", "layer.bias"]


class AddsByHand(torch.autograd.Function):
    """A checkpoint that puts the gradients of its layer into ``.grad`` itself."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        ctx.save_for_backward(x)
        with torch.no_grad():
            return layer(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            result = ctx.layer(x)
        parameters = list(ctx.layer.parameters())
        own, *gradients = torch.autograd.grad(result, [x, *parameters], grad)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        return own, None


def test_gradients_that_a_backward_adds_by_hand_are_refused(batch):
    class ByHand(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.inner = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x):
            return AddsByHand.apply(self.first(x), self.inner)

    model = ByHand()
    message = r"inside a backward asks.*'inner.weight'.*torch\.autograd\.backward"
    for fused in (True, False):
        with (
            pytest.raises(gs.UnsupportedOperationError, match=message),
            gs.track(model, batch_size=B, fused=fused) as tracker,
        ):
            tracker.backward(per_example_cross_entropy(model, batch))
    with pytest.raises(gs.UnsupportedOperationError, match=message):
        gs.per_example_norms(model, batch, per_example_cross_entropy)
    assert all(parameter.grad is None for parameter in model.parameters())


class UsesCumulative(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Module()
        self.embed.weight = nn.Parameter(torch.randn(4, 3))

    def forward(self, x):
        return linear_without_rule(x, self.embed.weight.t())


def test_a_step_by_autograd_grad_is_told_to_run_backward(model, batch):
    with gs.track(model, batch_size=B) as tracker:
        losses = per_example_cross_entropy(model, batch)
        torch.autograd.grad(losses.mean(), list(model.parameters()))
    with pytest.raises(gs.TrackingError, match=r"Run tracker\.backward.*torch\.autograd\.grad"):
        _ = tracker.stats


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_a_scripted_model_is_refused_with_what_to_measure_instead(model, batch):
    scripted = torch.jit.script(model)
    message = r"a TorchScript module, .* with the model as it was before torch\.jit\."
    with pytest.raises(gs.UnsupportedOperationError, match=message):
        gs.per_example_norms(scripted, batch, per_example_cross_entropy)


def test_an_operation_without_a_rule_is_named(batch):
    model = UsesCumulative()
    with pytest.raises(
        gs.UnsupportedOperationError,
        match=r"linear.*parameter 'embed.weight' \(of module 'embed'\).*exclude=\['embed.weight'\]",
    ):
        gs.per_example_norms(model, batch, per_example_cross_entropy)


def test_a_gradient_that_is_not_finite_is_named(model, batch):
    batch[0][2, 1] = float("nan")
    with pytest.raises(gs.NonFiniteGradientError, match=r"example 2 .*'0.weight'.*keep"):
        gs.per_example_norms(model, batch, per_example_cross_entropy)
    kept = gs.per_example_norms(model, batch, per_example_cross_entropy, nonfinite="keep")
    assert kept.sqnorm.isnan().nonzero().flatten().tolist() == [2]
    clean = torch.arange(B) != 2
    alone = gs.per_example_norms(
        model, (batch[0][clean], batch[1][clean]), per_example_cross_entropy
    )
    torch.testing.assert_close(kept.sqnorm[clean], alone.sqnorm)


def test_no_parameter_that_requires_grad(model, batch):
    model.requires_grad_(False)
    with pytest.raises(gs.CoverageError, match="no parameter that requires grad"):
        gs.per_example_norms(model, batch, per_example_cross_entropy)


@pytest.mark.parametrize(
    ("bad_batch", "message"),
    [
        ((torch.randn(0, 4), torch.zeros(0, dtype=torch.long)), r"empty.*\(0, 4\)"),
        (3, r"batch is int and holds no tensor"),
        ((np.zeros((2, 4)), np.zeros(2)), r"tuple of ndarray and holds.*torch\.as_tensor"),
        (dataclasses.make_dataclass("Rows", ["x"])(np.zeros(2)), r"batch is Rows of ndarray and"),
        ((), r"holds no tensor"),
        ({"x": "text"}, r"holds no tensor"),
        (iter([(torch.randn(2, 4),)]), r"batch is list_iterator, .*expected one batch"),
        (DataLoader(TensorDataset(torch.randn(2, 4))), r"DataLoader.*next\(iter\(loader\)\)"),
        (TensorDataset(torch.randn(2, 4)), r"batch is TensorDataset, .*DataLoader\("),
    ],
)
def test_batches_without_examples(model, bad_batch, message):
    with pytest.raises(gs.ExampleAxisError, match=message):
        gs.per_example_norms(model, bad_batch, per_example_cross_entropy)


def test_names_with_signs_of_patterns_can_be_left_out_as_errors_say(batch):
    class Keyed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)
            self.tables = nn.ParameterDict({"a[0]": nn.Parameter(torch.randn(2, 2))})

        def forward(self, x):
            table = self.tables["a[0]"]
            return torch.stack([torch.kron(row, table).sum(0) for row in self.layer(x)])

    model = Keyed()
    with pytest.raises(
        gs.UnsupportedOperationError, match=r"exclude=\['tables\.a\[0\]'\]"
    ) as caught:
        gs.per_example_norms(model, batch, per_example_cross_entropy)
    stats = gs.per_example_norms(
        model, batch, per_example_cross_entropy, exclude=caught.value.parameters
    )
    assert set(stats.by_parameter) == {"layer.weight", "layer.bias"}


def test_a_pattern_for_the_other_name_of_a_tied_parameter():
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5))
    model[1].weight = model[0].weight
    with pytest.raises(
        gs.CoverageError, match=r"'1\.weight' is tied to '0\.weight': use that name"
    ):
        gs.per_example_norms(
            model, (torch.arange(4), torch.arange(4)), per_example_cross_entropy, exclude="1.wei*"
        )


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"batch_dim": -1}, gs.ExampleAxisError, "batch_dim is -1"),
        ({"workspace": 0}, gs.TrackingError, "workspace is 0"),
        ({"nonfinite": "drop"}, gs.TrackingError, "nonfinite is 'drop'"),
        (
            {"exclude": ["decoder.*"]},
            gs.CoverageError,
            r"'decoder.\*' matches no parameter.*0.weight",
        ),
        (
            {"exclude": "bias"},
            gs.CoverageError,
            r"a pattern that matches a whole name.*'\*bias\*' matches 2",
        ),
        (
            {"exclude": "bias*"},
            gs.CoverageError,
            r"a pattern that matches a whole name.*'\*bias\*' matches 2",
        ),
        ({"parameters": "*", "exclude": "*"}, gs.CoverageError, "leave no parameter"),
        ({"alignment": torch.ones(3)}, gs.TrackingError, "alignment is tensor.*True or False"),
        ({"alignment": {"0.weight": 1}}, gs.TrackingError, "alignment is .*True or False"),
        ({"gram": "all"}, gs.TrackingError, "gram is 'all', expected True or False"),
        ({"fallback": "loop"}, gs.TrackingError, "fallback is 'loop'.*vmap"),
        (
            {"fallback": "vmap", "gram": True},
            gs.UnsupportedOperationError,
            "fallback='vmap' was given together with gram=True",
        ),
    ],
)
def test_options(model, batch, options, error, message):
    with pytest.raises(error, match=message):
        gs.per_example_norms(model, batch, per_example_cross_entropy, **options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"batch_size": 0}, gs.ExampleAxisError, "batch_size is 0"),
        ({"batch_size": 5.0}, gs.ExampleAxisError, "batch_size is 5.0"),
        ({"batch_size": True}, gs.ExampleAxisError, "batch_size is True"),
        (
            {"batch_size": B, "scaler": 3},
            gs.TrackingError,
            "scaler is 3, expected a torch.amp.GradScaler",
        ),
        ({"batch_size": B, "weights": [1.0, 1, 1, 1, float("nan")]}, gs.LossShapeError, "finite"),
        ({"batch_size": B, "weights": [1.0, 1, 1, 1, float("inf")]}, gs.LossShapeError, "finite"),
        ({"batch_size": B, "weights": [1, 1, 1, 1, 1j]}, gs.LossShapeError, "real"),
        ({"batch_size": B, "weights": "abcde"}, gs.LossShapeError, "weights are 'abcde'"),
        ({"batch_size": B, "fused": np.ones(2)}, gs.TrackingError, "fused is array"),
        ({"batch_size": B, "alignment": "mean"}, gs.TrackingError, "alignment is 'mean'"),
        ({"batch_size": B, "nonfinite": ["raise"]}, gs.TrackingError, "nonfinite is"),
        ({"batch_size": B, "nonfinite": np.array([1, 2])}, gs.TrackingError, "nonfinite is"),
        ({"batch_size": 5, "loss_reduction": "max"}, gs.TrackingError, "loss_reduction is 'max'"),
        (
            {"batch_size": 5, "weights": torch.ones(4)},
            gs.LossShapeError,
            r"\(4,\), expected \(5,\)",
        ),
        ({"batch_size": 5, "weights": torch.zeros(5)}, gs.LossShapeError, "non-zero"),
    ],
)
def test_track_options(model, options, error, message):
    with pytest.raises(error, match=message):
        gs.track(model, **options)


def test_one_context_one_backward(model, batch):
    with gs.track(model, batch_size=B) as tracker:
        losses = per_example_cross_entropy(model, batch)
        losses.mean().backward(retain_graph=True)
        gradient = model[0].weight.grad.clone()
        with pytest.raises(gs.TrackingError, match=r"second backward.*their sum.*each micro-batch"):
            losses.mean().backward()
        assert torch.equal(model[0].weight.grad, gradient)
    assert tracker.stats.sqnorm.isfinite().all()


def test_a_backward_inside_the_loss(model, batch):
    """As of examples made to mislead the model: it would be taken for that of the losses."""

    def misled(m, batch):
        inputs = batch[0].clone().requires_grad_()
        functional.cross_entropy(m(inputs), batch[1]).backward()
        return per_example_cross_entropy(m, (batch[0] + 0.1 * inputs.grad.sign(), batch[1]))

    def misled_too(m, batch):
        inputs = batch[0].clone().requires_grad_()
        (slope,) = torch.autograd.grad(functional.cross_entropy(m(inputs), batch[1]), inputs)
        return per_example_cross_entropy(m, (batch[0] + 0.1 * slope.sign(), batch[1]))

    with pytest.raises(gs.TrackingError, match=r"second backward.*torch.autograd.grad"):
        gs.per_example_norms(model, batch, misled)
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    model.zero_grad()
    check_model(model.double(), (batch[0].double(), batch[1]), misled_too)


def test_a_backward_after_the_context_closed(model, batch):
    with gs.track(model, batch_size=B) as tracker:
        losses = per_example_cross_entropy(model, batch)
    with pytest.raises(gs.TrackingError, match="after its tracking context was closed"):
        losses.mean().backward()
    with pytest.raises(gs.TrackingError, match="no backward reached"):
        _ = tracker.stats
    with pytest.raises(gs.TrackingError, match="outside its context"):
        tracker.backward(losses)
    with pytest.raises(gs.TrackingError, match="has been used"), tracker:
        pass


def test_a_derivative_after_the_context_closed(model, batch):
    x, y = batch
    x = x.clone().requires_grad_()
    with gs.track(model, batch_size=B) as tracker:
        losses = per_example_cross_entropy(model, (x, y))
        tracker.backward(per_example_cross_entropy(model, (x, y)))
    with pytest.raises(gs.TrackingError, match="after its tracking context was closed"):
        torch.autograd.grad(losses.sum(), x, create_graph=True)


def test_a_backward_before_the_context_was_opened(model, batch):
    tracker = gs.track(model, batch_size=B)
    with pytest.raises(gs.TrackingError, match="outside its context"):
        tracker.backward(per_example_cross_entropy(model, batch))
    assert all(parameter.grad is None for parameter in model.parameters())


class NamedModule(nn.Module):
    """A model that calls a part of its own as wrappers call what they wrap."""

    def __init__(self):
        super().__init__()
        self.module = nn.Linear(4, 3)
        self.weight = nn.Parameter(torch.rand(3) + 0.5)
        self.bias = nn.Parameter(torch.randn(3))

    def forward(self, x):
        return self.module(x) * self.weight + self.bias


def test_a_part_called_module_is_no_wrapper(batch):
    model = NamedModule()
    expected = oracle_sqnorms(model, batch, per_example_cross_entropy)
    assert len(expected) == 4
    wrapped = torch.optim.swa_utils.AveragedModel(model), nn.DataParallel(model)
    for each in (model, *wrapped, nn.DataParallel(wrapped[0])):
        stats = gs.per_example_norms(each, batch, per_example_cross_entropy)
        assert_sqnorms(stats, expected, 1e-4)
    chosen = gs.per_example_norms(
        model, batch, per_example_cross_entropy, parameters="module.*", exclude="*.bias"
    )
    assert chosen.names == ("module.weight",)
    direction = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    within = gs.alignment(model, batch, per_example_cross_entropy, direction)
    wrapped_direction = {f"module.{name}": value for name, value in direction.items()}
    same = gs.alignment(model, batch, per_example_cross_entropy, wrapped_direction)
    gradients = oracle_gradients(model, batch, per_example_cross_entropy)
    torch.testing.assert_close(within.double(), flat(gradients).sum(1), rtol=1e-5, atol=1e-5)
    assert torch.equal(within, same)


class AveragedWithHead(torch.optim.swa_utils.AveragedModel):
    """A wrapper around a model that adds a layer of its own."""

    def __init__(self, model):
        super().__init__(model)
        self.head = nn.Linear(3, 3)

    def forward(self, x):
        return self.head(self.module(x))


def test_a_wrapper_has_a_parameter_of_the_same_name_as_the_model_in_it(batch):
    inner = nn.Sequential()
    inner.add_module("head", nn.Linear(4, 3))
    model = AveragedWithHead(inner)
    message = r"'module.head.weight' and 'head.weight' have the same name, 'head.weight'.*rename"
    with pytest.raises(gs.CoverageError, match=message):
        gs.per_example_norms(model, batch, per_example_cross_entropy)
    model = AveragedWithHead(nn.Sequential(inner))
    stats = gs.per_example_norms(model, batch, per_example_cross_entropy)
    expected = oracle_sqnorms(model, batch, per_example_cross_entropy)
    assert_sqnorms(stats, {k.removeprefix("module."): v for k, v in expected.items()}, 1e-4)


def test_nested_contexts(model, batch):
    with (
        gs.track(model, batch_size=B),
        pytest.raises(gs.TrackingError, match=r"'0.weight'.*already tracked"),
    ):
        gs.per_example_norms(model, batch, per_example_cross_entropy)
    gs.per_example_norms(model, batch, per_example_cross_entropy)


def test_a_context_within_itself(model, batch):
    with gs.track(model, batch_size=B) as tracker:
        with pytest.raises(gs.TrackingError, match="is open already, or has been used"), tracker:
            raise AssertionError("not reached")
        tracker.backward(per_example_cross_entropy(model, batch))
    expected = oracle_sqnorms(model, batch, per_example_cross_entropy)
    assert_sqnorms(tracker.stats, expected, 1e-4)


@pytest.mark.parametrize("apart", [False, True])
def test_contexts_of_two_models_at_once(model, batch, apart):
    """Their backward reaches one of them: the way on is one context of both."""
    (x, y), other = batch, nn.Linear(4, 3)
    with pytest.raises(gs.TrackingError, match=r"several models.*torch.nn.ModuleList"):
        with gs.track(model, batch_size=B) as outer:
            loss = functional.cross_entropy(model(x), y)
            with gs.track(other, batch_size=B):
                second = functional.cross_entropy(other(x), y)
                for each in (loss, second) if apart else [loss + second]:
                    each.backward()
        assert outer.stats
    model.zero_grad()
    both = nn.ModuleList([model, other])

    def joint(both, batch):
        return sum(per_example_cross_entropy(m, batch) for m in both)

    with gs.track(both, batch_size=B) as tracker:
        joint(both, batch).mean().backward()
    assert_sqnorms(tracker.stats, oracle_sqnorms(both, batch, joint), 1e-4)


def test_a_loss_without_data(model):
    with (
        gs.track(model, batch_size=B) as tracker,
        pytest.raises(gs.ExampleAxisError, match="without any data"),
    ):
        tracker.backward(model(torch.zeros(B, 4)).sum(1))


def test_a_batch_that_was_made_inside_another_context(model, batch):
    def logits(model, x):
        return model(x).logsumexp(1)

    with gs.track(model, batch_size=B) as tracker:
        made = torch.full((B, 4), 0.5)  # there of no example
        tracker.backward(per_example_cross_entropy(model, batch))
    expected = flat(oracle_gradients(model, made, logits))
    stats = gs.per_example_norms(model, made, logits)
    assert_sqnorms(stats, oracle_sqnorms(model, made, logits), 1e-4)
    got = gs.inner_products(model, made, model, made, logits)
    assert_products(got.double(), expected, expected, 1e-4)


class ScaledParameter(nn.Parameter):
    """A subclass of the user's: it may compute with values that its data do not show."""


def test_parameter_subclasses_are_refused(model, batch):
    model[0].weight = ScaledParameter(torch.randn(6, 4))
    with pytest.raises(gs.UnsupportedOperationError, match=r"'0.weight'.*ScaledParameter.*exclude"):
        gs.per_example_norms(model, batch, per_example_cross_entropy)
    assert type(model[0].weight) is ScaledParameter
    assert type(model[2].weight) is nn.Parameter


CALLS = {
    "per_example_norms": lambda m, b, f, **options: gs.per_example_norms(m, b, f, **options),
    "inner_products": lambda m, b, f, **options: gs.inner_products(m, b, m, b, f, **options),
    "alignment": lambda m, b, f, **options: gs.alignment(m, b, f, "mean", **options),
    "verify": lambda m, b, f, **options: gs.verify(m, b, f, **options),
}


def test_a_loss_function_that_uses_another_model(model, batch):
    """Zeros would be the gradients of the model that was given, and nobody's question."""
    other = copy.deepcopy(model)

    def losses(_, batch):
        return per_example_cross_entropy(other, batch)

    direction = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    run = gs.Checkpoints(model.state_dict(), lr=1.0)
    message = "use none of the tracked parameters.*the model that loss_fn is given"
    for call in (
        lambda: gs.per_example_norms(model, batch, losses),
        lambda: gs.per_example_norms(model, batch, losses, fallback="vmap"),
        lambda: gs.inner_products(model, batch, model, batch, losses),
        lambda: gs.inner_products(model, batch, copy.deepcopy(model), batch, losses),
        lambda: gs.alignment(model, batch, losses, "mean"),
        lambda: gs.alignment(model, batch, losses, direction),
        lambda: gs.self_influence(model, [batch], losses, run, progress=False),
        lambda: gs.influence(model, [batch], [batch], losses, run, progress=False),
    ):
        with pytest.raises(gs.TrackingError, match=message):
            call()
    assert message.partition(".*")[0] in gs.verify(model, batch, losses).check("coverage").detail


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_loss_of_pytorch_is_no_loss_function(call, model, batch):
    """It takes outputs and targets; a loss function takes the model and the batch."""
    with pytest.raises(gs.TrackingError, match=r"CrossEntropyLoss, expected a.*\(model, batch\)"):
        call(model, batch, nn.CrossEntropyLoss(reduction="none"))


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("name", ["parameters", "exclude"])
def test_parameters_in_place_of_their_names_are_not_printed(call, name, model, batch):
    expected = (
        f"{name} holds Parameter, expected an fnmatch pattern over names, or a list of several."
    )
    with pytest.raises(gs.CoverageError, match=f"^{re.escape(expected)}$"):
        call(model, batch, per_example_cross_entropy, **{name: list(model.parameters())})


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("name", ["parameters", "exclude"])
def test_patterns_that_can_be_read_only_once(call, name, model, batch):
    """At the second look nothing would be excluded."""
    expected = f"^{name} is a generator, which can be read only once, expected .* or a list of"
    with pytest.raises(gs.CoverageError, match=expected):
        call(model, batch, per_example_cross_entropy, **{name: (n for n in ["0.*"])})


def test_a_batch_in_place_of_its_size_is_not_printed(model, batch):
    expected = "batch_size is Tensor, expected a positive integer: the number of examples in the "
    with pytest.raises(gs.ExampleAxisError, match=f"^{re.escape(expected)}batch.$"):
        with gs.track(model, batch_size=batch[0]):
            raise AssertionError("not reached")
    with pytest.raises(gs.ExampleAxisError, match="batch_dim is Tensor, expected a non-negative"):
        gs.per_example_norms(model, batch, per_example_cross_entropy, batch_dim=batch[0])


def test_results_can_be_compared_and_kept_in_sets(model, batch):
    one, other = (gs.per_example_norms(model, batch, per_example_cross_entropy) for _ in range(2))
    assert one == one and one != other and len({one, other, one}) == 2


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_arguments_that_are_none(call, model, batch):
    losses = per_example_cross_entropy
    call(model, batch, losses, exclude=None)
    for options in ({}, {"cu_seqlens": torch.tensor([0, 2, 5])}):
        with pytest.raises(gs.TrackingError, match=r"model.* is NoneType, expected a torch\.nn"):
            call(None, batch, losses, **options)
    with pytest.raises(gs.TrackingError, match="loss_fn is NoneType, expected a function"):
        call(model, batch, None)
    message = r"loss_fn is torch\.nn\.functional\.nll_loss, expected a function that runs the model"
    with pytest.raises(gs.TrackingError, match=message):
        call(model, batch, torch.nn.functional.nll_loss)
    for name in ("parameters", "exclude"):
        for value in (3, [3]):
            with pytest.raises(gs.CoverageError, match=rf"{name} is .*3.*, expected an fnmatch"):
                call(model, batch, losses, **{name: value})
        with pytest.raises(gs.CoverageError, match=rf"{name} is Tensor, expected an fnmatch"):
            call(model, batch, losses, **{name: torch.zeros(2)})
    with pytest.raises(gs.ExampleAxisError, match="cu_seqlens is 'abc'"):
        call(model, batch, losses, cu_seqlens="abc")
    before = snapshot(model)
    with torch.inference_mode(), pytest.raises(gs.TrackingError, match="inference_mode"):
        call(model, batch, losses)
    assert_unchanged(model, before)


def test_the_second_model_is_looked_at(model, batch):
    with pytest.raises(gs.TrackingError, match="model_b is NoneType"):
        gs.inner_products(model, batch, None, batch, per_example_cross_entropy)
    for checkpoint in ("epoch-0.pt", model.state_dict()):
        with pytest.raises(gs.TrackingError, match=r"model_b is .*other\.load_state_dict"):
            gs.inner_products(model, batch, checkpoint, batch, per_example_cross_entropy)
    with pytest.raises(gs.ExampleAxisError, match=r"cu_seqlens is a tuple of 3.* pair"):
        gs.inner_products(
            model, batch, model, batch, per_example_cross_entropy, cu_seqlens=(None, None, None)
        )


@pytest.mark.parametrize(
    "options, message",
    [
        ({"tolerance": "a"}, "tolerance is 'a'"),
        ({"tolerance": float("nan")}, "tolerance is nan"),
        ({"examples": True}, "examples is True"),
        ({"examples": 2.0}, "examples is 2.0"),
    ],
)
def test_verify_options(model, batch, options, message):
    with pytest.raises(gs.TrackingError, match=message):
        gs.verify(model, batch, per_example_cross_entropy, **options)


def test_integers_of_numpy_are_integers(model, batch):
    report = gs.verify(model, batch, per_example_cross_entropy, examples=np.int64(2))
    assert report.ok
    expected = gs.per_example_norms(model, batch, per_example_cross_entropy).norm
    options = {"batch_dim": np.int32(0), "workspace": np.int64(2**20)}
    stats = gs.per_example_norms(model, batch, per_example_cross_entropy, **options)
    torch.testing.assert_close(stats.norm, expected)
    with gs.track(model, batch_size=np.int64(B), **options) as tracker:
        tracker.backward(per_example_cross_entropy(model, batch))
    torch.testing.assert_close(tracker.stats.norm, expected)
    monitor = gs.Monitor(model, every=np.int64(1), top=np.int64(2))
    model.zero_grad()
    with monitor.step(np.int64(B), accumulation=(np.int64(0), np.int64(1))):
        per_example_cross_entropy(model, batch).mean().backward()
    assert monitor.metrics()["example_grad_norm/max"] == pytest.approx(expected.max().item())


def test_a_model_elsewhere_than_new_tensors():
    """What is kept for later calls lies where the model does, not on the default device."""
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3))
    batch = torch.randn(29, 4), torch.randint(3, (29,))  # as many examples as in no other test
    expected = oracle_sqnorms(model, batch, per_example_cross_entropy)
    for device in ("meta", None):
        torch.set_default_device(device)
        try:
            stats = gs.per_example_norms(model, batch, per_example_cross_entropy)
        finally:
            torch.set_default_device(None)
        assert_sqnorms(stats, expected, rtol=1e-5)


def test_tracking_needs_recorded_gradients(model):
    with torch.inference_mode():
        with pytest.raises(gs.TrackingError, match="inference_mode"):
            with gs.track(model, batch_size=B):
                raise AssertionError("not reached")
        monitor = gs.Monitor(model)
        with pytest.raises(gs.TrackingError, match="inference_mode"):
            with monitor.step(batch_size=B):
                raise AssertionError("not reached")


class Quantiles(nn.Module):
    """Three numbers of the forward's own look like one for each of three examples."""

    def __init__(self, kept: bool = False):
        super().__init__()
        levels = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
        self.register_buffer("levels", levels if kept else None)
        self.scale = nn.Parameter(torch.randn(3, dtype=torch.float64))

    def forward(self, x):
        made = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
        levels = made if self.levels is None else self.levels
        return (x * (levels * self.scale)).sum(1)


class Negatives(nn.Module):
    """The same rows of a table for every example."""

    def __init__(self):
        super().__init__()
        self.layer, self.table = nn.Linear(3, 5).double(), nn.Embedding(7, 5).double()

    def forward(self, x):
        rows = self.table(torch.tensor([0, 3, 5]))
        return functional.logsigmoid(self.layer(x) @ rows.T).sum(1)


class Noisy(nn.Module):
    """Noise of weights, drawn by their shape."""

    def __init__(self):
        super().__init__()
        self.weight, self.spread = nn.Parameter(torch.randn(3, 3)), nn.Parameter(torch.rand(3, 3))
        self.double()

    def forward(self, x):
        numbers = torch.Generator().manual_seed(0)
        noise = torch.randn(self.weight.shape, generator=numbers, dtype=x.dtype)
        return functional.linear(x, self.weight + self.spread * noise).tanh().sum(1)


def squares(model, x):
    return model(x).square()


@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("make", [Quantiles, Negatives, Noisy])
def test_as_many_values_as_examples_are_not_one_for_each(make, size):
    model, other = make(), make()
    batch, others = (torch.randn(size, 3, dtype=torch.float64) for _ in range(2))
    rows = flat(oracle_gradients(model, batch, squares))
    columns = flat(oracle_gradients(other, others, squares))
    stats = gs.per_example_norms(model, batch, squares, gram=True, alignment=True)
    assert_sqnorms(stats, oracle_sqnorms(model, batch, squares), 1e-9)
    assert_products(stats.gram, rows, rows, 1e-9)
    assert_products(gs.inner_products(model, batch, other, others, squares), rows, columns, 1e-9)
    torch.testing.assert_close(gs.alignment(model, batch, squares, "mean"), rows @ rows.mean(0))
    assert gs.verify(model, batch, squares).ok


class Normalised(nn.Module):
    """Images whose channels are shifted and scaled by numbers that the forward makes."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Conv2d(3, 4, 2).double(), nn.Linear(4, 2).double()

    def forward(self, x):
        mean = torch.tensor([0.4, 0.5, 0.6]).double()[:, None, None]
        spread = torch.as_tensor([0.2, 0.3, 0.1]).to(x).view(1, 3, 1, 1) + mean
        x = torch.where(x > mean, (x - mean) / spread, torch.maximum(mean, x))
        return self.head(self.layer(x).tanh().mean((2, 3))).sum(1)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_given_values_beside_the_batch_say_nothing_about_the_examples(size):
    """In a context too, where nothing can be called again."""
    model, x = Normalised(), torch.randn(size, 3, 4, 4, dtype=torch.float64)
    expected = oracle_sqnorms(model, x, squares)
    with gs.track(model, batch_size=size) as tracker:
        tracker.backward(squares(model, x))
    assert_sqnorms(tracker.stats, expected, 1e-9)
    assert_sqnorms(gs.per_example_norms(model, x, squares), expected, 1e-9)


def test_a_loss_function_is_called_again_with_what_it_took_out_of_its_batch():
    model, x = Negatives(), torch.randn(3, 3, dtype=torch.float64)
    stats = gs.per_example_norms(model, {"x": x}, lambda m, b: squares(m, b.pop("x")))
    assert_sqnorms(stats, oracle_sqnorms(model, x, squares), 1e-9)


def test_a_loss_function_that_wrote_into_its_batch_is_not_called_again():
    """What it finds there would be another batch."""
    x = torch.randn(3, 3, dtype=torch.float64)
    with pytest.raises(gs.CoupledExamplesError, match="taken to hold one row of each"):
        gs.per_example_norms(Negatives(), x, lambda model, x: squares(model, x.mul_(2)))


class Shuffled(Noisy):
    """Weights in an order that is drawn."""

    def forward(self, x):
        return functional.linear(x, self.weight[torch.randperm(3)]).tanh().sum(1)


def test_what_is_drawn_for_weights_in_a_context_says_how_to_draw_it():
    model, x = Shuffled(), torch.randn(3, 3, dtype=torch.float64)
    drawn = r"torch\.randperm made a tensor of shape \(3,\).*torch\.randn_like\(weight\)"
    refused = pytest.raises(gs.CoupledExamplesError, match=drawn)
    with refused, gs.track(model, batch_size=3) as tracker:
        tracker.backward(squares(model, x))


def test_as_many_values_as_packed_rows_are_not_one_for_each():
    model, x = Negatives(), torch.randn(3, 3, dtype=torch.float64)
    stats = gs.per_example_norms(model, x, squares, cu_seqlens=torch.arange(4))
    assert_sqnorms(stats, oracle_sqnorms(model, x, squares), 1e-9)


class Drawn(nn.Module):
    """Draws as many numbers as a batch may have rows, the same each time."""

    def __init__(self, draw):
        super().__init__()
        self.draw = draw
        self.project, self.table = nn.Linear(3, 3).double(), nn.Embedding(7, 3).double()

    def forward(self, x):
        return self.draw(self, self.project(x), torch.Generator().manual_seed(3))


DRAWN = {
    "negatives": lambda m, h, g: h @ m.table(torch.randint(7, (3,), generator=g)).T,
    "order": lambda m, h, g: h @ m.table(torch.randperm(3, generator=g)).T,
    "anchors": lambda m, h, g: h @ m.project(torch.randn(3, 3, generator=g).double()).T,
    "noise": lambda m, h, g: h + torch.randn(3, 1, generator=g).double() * m.table.weight[0],
    "mask": lambda m, h, g: m.project(h * (torch.rand(3, 1, generator=g) > 0.3)),
    "inputs": lambda m, h, g: h + m.project(torch.randn(3, 3, generator=g).double()),
}


def sums_of_squares(model, x):
    return squares(model, x).sum(1)


@pytest.mark.parametrize("kind", DRAWN)
def test_as_many_draws_as_packed_rows_are_not_one_for_each(kind):
    model, x = Drawn(DRAWN[kind]), torch.randn(3, 3, dtype=torch.float64)
    stats = gs.per_example_norms(model, x, sums_of_squares, cu_seqlens=torch.arange(4))
    for name, want in oracle_on_the_batch(model, x, sums_of_squares).items():
        torch.testing.assert_close(stats.by_parameter[name].double(), want)


def test_a_batch_that_cannot_be_looked_into_is_not_given_again():
    """Its loss function may have changed it where nobody sees that."""
    assert Given(object()).again() is None
    assert Given([torch.ones(2), object()]).again() is None
    batch = {"x": torch.ones(2)}
    given = Given(batch)
    x = batch.pop("x")
    (again,) = given.again()
    assert again["x"] is x
    x.add_(1)
    assert given.again() is None


def test_what_a_loss_function_leaves_in_its_batch_stays_there(model, batch):
    inputs = {"x": batch[0], "y": batch[1]}

    def losses(model, inputs):
        inputs["logits"] = model(inputs["x"])
        return functional.cross_entropy(inputs["logits"], inputs["y"], reduction="none")

    gs.per_example_norms(model, inputs, losses)
    assert inputs["logits"].shape == (B, 3)


def test_an_error_names_what_was_taken_for_data_by_its_size():
    """A training step cannot be run again."""

    x = torch.randn(3, 3, dtype=torch.float64)
    model = Negatives()
    with pytest.raises(gs.GradStatsError, match=r"torch\.tensor made .*\(3,\).*register_buf"):
        with gs.track(model, batch_size=len(x)) as tracker:
            tracker.backward(squares(model, x))
    check_model(Quantiles(kept=True), x, squares)
    check_model(Quantiles(), torch.randn(4, 3, dtype=torch.float64), squares)
