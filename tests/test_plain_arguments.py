"""Arguments that are no plain numbers: each is refused by name, and nothing has changed."""

from __future__ import annotations

import copy
import warnings
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import nn

import gradstats as gs
from tests.losses import losses_of
from tests.oracle import assert_unchanged, oracle_sqnorms, snapshot

B = 5

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # nested and quantised tensors say that they may change
    UNLIKE_NUMBERS = {
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "quantised": torch.quantize_per_tensor(torch.ones(B), 0.5, 0, torch.qint8),
        "meta": torch.ones(B, device="meta"),
        "sparse": torch.ones(B).to_sparse(),
    }
each_unlike_numbers = pytest.mark.parametrize(
    ("kind", "value"), UNLIKE_NUMBERS.items(), ids=UNLIKE_NUMBERS
)


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


@pytest.fixture
def batch():
    return torch.randn(B, 4), torch.randint(3, (B,))


@pytest.fixture
def run(model):
    return gs.Checkpoints([model.state_dict()], lr=0.1)


@each_unlike_numbers
def test_weights_and_bounds(model, kind, value):
    state = snapshot(model)
    with pytest.raises(gs.LossShapeError, match=f"weights are a .*{kind}.* tensor"):
        gs.track(model, batch_size=B, weights=value)
    with pytest.raises(gs.ExampleAxisError, match=f"cu_seqlens is a .*{kind}.* tensor"):
        gs.track(model, batch_size=B, cu_seqlens=value)
    monitor = gs.Monitor(model, every=1)
    with pytest.raises(gs.LossShapeError, match=f"weights are a .*{kind}.* tensor"):
        with monitor.step(B, weights=value):
            raise AssertionError("not reached")
    with pytest.raises(gs.TrackingError, match=f"ids are a .*{kind}.* tensor"):
        with monitor.step(B, ids=value):
            raise AssertionError("not reached")
    assert_unchanged(model, state)


@each_unlike_numbers
def test_patterns(model, batch, kind, value):
    for name in ("parameters", "exclude"):
        with pytest.raises(gs.CoverageError, match=f"{name} (is|holds) Tensor, expected an fnm"):
            gs.per_example_norms(model, batch, losses_of, **{name: value})
    with pytest.raises(gs.CoverageError, match=r"layers (is|holds) Tensor, expected an fnmatch"):
        gs.Monitor(model, layers=value)


LOSSES = {
    "meta": lambda losses: losses.to("meta"),
    "sparse": lambda losses: losses.to_sparse(),
}


@pytest.mark.parametrize("kind", LOSSES)
def test_losses(model, batch, kind):
    def losses(model, batch):
        return LOSSES[kind](losses_of(model, batch))

    state = snapshot(model)
    for call in (
        lambda: gs.per_example_norms(model, batch, losses),
        lambda: gs.per_example_norms(model, batch, losses, fallback="vmap"),
        lambda: gs.inner_products(model, batch, model, batch, losses),
        lambda: gs.alignment(model, batch, losses, "mean"),
    ):
        with pytest.raises(gs.LossShapeError, match=f"the losses are a .*{kind}.* tensor"):
            call()
    check = gs.verify(model, batch, losses).check("loss")
    assert check.ok is False and "the losses are a " in check.detail
    assert_unchanged(model, state)


@each_unlike_numbers
def test_owners_of_rows(model, batch, kind, value):
    def losses(model, batch):
        gs.assign_rows(batch[0], value)
        return losses_of(model, batch)

    with pytest.raises(gs.ExampleAxisError, match=f"owner is a .*{kind}.* tensor"):
        gs.per_example_norms(model, batch, losses)


@pytest.mark.parametrize("dim", [None, "0", 1.0, True, torch.ones(2), [0]])
def test_axes_of_rows(model, batch, dim):
    def losses(model, batch):
        gs.assign_rows(batch[0], torch.arange(B), dim)
        return losses_of(model, batch)

    with pytest.raises(gs.ExampleAxisError, match=r"assign_rows got dim=.* number of one of its 2"):
        gs.per_example_norms(model, batch, losses)


def test_axes_of_rows_of_another_library(model, batch):
    def losses(model, batch):
        gs.assign_rows(batch[0], torch.arange(B), np.int64(0))
        return losses_of(model, batch)

    expected = sum(oracle_sqnorms(model, batch, losses_of).values())
    got = gs.per_example_norms(model, batch, losses)
    torch.testing.assert_close(got.sqnorm.double(), expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("axis", [np.int64(1), torch.tensor(1), torch.tensor([1])])
def test_example_axes_of_another_library(model, run, tmp_path, axis):
    """Also where results on disk say which it was."""
    batch = torch.randn(2, B, 4), torch.randint(3, (B,))
    summed = batch[0].sum(0), batch[1]

    def losses(model, batch):
        return losses_of(model, (batch[0].sum(0), batch[1]))

    expected = sum(oracle_sqnorms(model, summed, losses_of).values())
    got = gs.per_example_norms(model, batch, losses, batch_dim=axis)
    torch.testing.assert_close(got.sqnorm.double(), expected, rtol=1e-4, atol=0)
    assert gs.verify(model, batch, losses, batch_dim=axis).ok
    options = {"batch_dim": axis, "progress": False, "out": tmp_path / "table"}
    table = gs.self_influence(model, [batch], losses, run, **options)
    np.testing.assert_allclose(table.sqnorm[0], expected, rtol=1e-4)
    gram = gs.per_example_norms(model, summed, losses_of, gram=True).gram
    products = gs.inner_products(model, batch, model, (*batch,), losses, batch_dim=axis)
    torch.testing.assert_close(products, gram)
    options |= {"out": tmp_path / "lists", "top_k": np.int64(B)}
    ranking = gs.influence(model, [batch], [batch], losses, run, **options).proponents(np.int64(2))
    found = 0.1 * gram.numpy()[ranking.positions, 2]
    np.testing.assert_allclose(ranking.scores, found, rtol=1e-4, atol=1e-6)


def test_directions(model, batch):
    named = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    for kind in ("nested", "quantised", "meta"):
        direction = {**named, "2.bias": UNLIKE_NUMBERS[kind]}
        with pytest.raises(gs.TrackingError, match=f"direction for '2.bias' is a .*{kind}.* te"):
            gs.alignment(model, batch, losses_of, direction)
    for key in (None, 3):
        message = f"direction holds {key}, expected parameter names"
        with pytest.raises(gs.TrackingError, match=message):
            gs.alignment(model, batch, losses_of, {**named, key: torch.ones(3)})


@pytest.mark.parametrize("value", [np.array(["mean", "sum"]), np.ones(3), torch.ones(3), ["mean"]])
def test_choices(model, batch, run, value):
    with pytest.raises(gs.TrackingError, match=r"loss_reduction is .*, expected .*mean"):
        gs.track(model, batch_size=B, loss_reduction=value)
    with pytest.raises(gs.TrackingError, match=r"loss_reduction is .*, expected one of"):
        gs.Monitor(model, loss_reduction=value)
    with pytest.raises(gs.TrackingError, match=r'by is .*, expected "norm" or "alignment"'):
        gs.Monitor(model).examples(by=value)
    with pytest.raises(gs.ScoreError, match=r'normalize is .*, expected None or "cosine"'):
        gs.influence(model, [batch], [batch], losses_of, run, normalize=value, progress=False)


@each_unlike_numbers
def test_checkpoints_and_rates(model, kind, value):
    with pytest.raises(gs.CheckpointError, match="Tensor, expected a file, a glob or a state"):
        gs.Checkpoints(value, lr=0.1)
    with pytest.raises(gs.CheckpointError, match="expected a number"):
        gs.Checkpoints([model.state_dict()], lr=[value])
    with pytest.raises(gs.CheckpointError, match=f"lr is a .*{kind}.* tensor"):
        gs.Checkpoints([model.state_dict()], lr=value)


def test_sources_that_are_one_number(model):
    with pytest.raises(gs.CheckpointError, match="checkpoint 0 is Tensor, expected a file"):
        gs.Checkpoints(torch.tensor(3), lr=0.1)


@pytest.mark.parametrize("rate", [np.ones(3), 10**400, torch.tensor(0.1, device="meta")])
def test_rates_that_are_no_number(model, rate):
    state = model.state_dict()
    for lr in ([rate], {"*": rate}):
        with pytest.raises(gs.CheckpointError, match=r"learning rate of .*, expected a .*number"):
            gs.Checkpoints([state], lr=lr)


@pytest.mark.parametrize("key", [None, 3])
def test_names_that_are_no_strings(model, batch, key):
    state = model.state_dict()
    with pytest.raises(gs.CheckpointError, match=f"state dict 0 has the key {key} .*only names"):
        gs.Checkpoints([{**state, key: torch.ones(2)}], lr=0.1)
    with pytest.raises(gs.CheckpointError, match=f"lr holds {key}, expected .* over parameter na"):
        gs.Checkpoints([state], lr={key: 0.1})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1).state_dict()
    optimizer["param_groups"][0]["param_names"] = [key] * 4
    saved = {"model": state, "optimizer": optimizer}
    checkpoints = gs.Checkpoints([saved], lr="optimizer")
    with pytest.raises(gs.CheckpointError, match=r"not that of one torch.optim.Optimizer"):
        gs.self_influence(model, [batch], losses_of, checkpoints, progress=False)


@pytest.mark.parametrize("convert", [torch.Tensor.long, torch.Tensor.bool])
def test_whole_numbers_are_no_weights(model, batch, convert):
    """PyTorch converts them, and what was quantised would be scored as if it were the weights."""
    state = model.state_dict()
    state["0.weight"] = convert(state["0.weight"])
    before = snapshot(model)
    message = r"'0.weight' has dtype torch\.(int64|bool), expected torch.float32"
    with pytest.raises(gs.CheckpointError, match=message):
        gs.self_influence(model, [batch], losses_of, gs.Checkpoints([state], lr=1.0),
                          progress=False)  # fmt: skip
    assert_unchanged(model, before)


def test_nor_are_they_complex_weights():
    model = nn.Linear(4, 3, dtype=torch.complex64)
    batch, states = torch.randn(5, 4, dtype=torch.complex64), []
    for convert in (torch.Tensor.long, torch.Tensor.double):
        weight = convert(4 * model.weight.detach().real)
        states.append({**model.state_dict(), "weight": weight})

    def losses(model, batch):
        return model(batch).abs().square().sum(1)

    with pytest.raises(gs.CheckpointError, match=r"'weight' has dtype torch.int64, expected torch"):
        gs.self_influence(model, [batch], losses, gs.Checkpoints(states[0], lr=1.0), progress=False)
    found = gs.self_influence(
        model, [batch], losses, gs.Checkpoints(states[1], lr=1.0), progress=False
    )
    model.load_state_dict(states[1])
    expected = gs.per_example_norms(model, batch, losses).sqnorm
    torch.testing.assert_close(torch.tensor(found.self_influence), expected, check_dtype=False)


def test_known_bad_examples(model, batch, run):
    table = gs.self_influence(model, [batch], losses_of, run, progress=False)
    mask = torch.tensor([True, False, False, True, False])
    wanted = str(table.report(mask.numpy()))
    assert str(table.report(mask)) == wanted
    assert str(table.report(torch.tensor([0.0, 3.0], requires_grad=True))) == wanted
    others = [UNLIKE_NUMBERS[kind] for kind in ("nested", "quantised", "meta", "sparse")]
    lists = np.array([[1], [2, 3]], dtype=object)
    for known_bad in (*others, [[1], [1, 2]], lists, [None, "a"], (None, None)):
        with pytest.raises(
            gs.ScoreError, match=r"known_bad is .*, expected ids, or one bool for e"
        ):
            table.report(known_bad)


@pytest.mark.parametrize("tolerance", [True, np.ones(2)])
def test_tolerances_of_verify(model, batch, tolerance):
    with pytest.raises(gs.TrackingError, match=r"tolerance is .*, expected a positive relative er"):
        gs.verify(model, batch, losses_of, tolerance=tolerance)


def test_fractions_are_numbers(model, batch):
    report = gs.verify(model, batch, losses_of, tolerance=Fraction(1, 100))
    assert report.ok and "tolerance 1e-02" in report.check("exactness").detail


def calls_of(model, batch, run, other):
    """Return calls that each measure a model; ``other`` is one of the same architecture."""
    return (
        lambda: gs.per_example_norms(model, batch, losses_of),
        lambda: gs.per_example_norms(model, batch, losses_of, fallback="vmap"),
        lambda: gs.track(model, batch_size=B).__enter__(),
        lambda: gs.inner_products(other, batch, model, batch, losses_of),
        lambda: gs.alignment(model, batch, losses_of, "mean"),
        lambda: gs.verify(model, batch, losses_of),
        lambda: gs.self_influence(model, [batch], losses_of, run, progress=False),
    )


@pytest.mark.parametrize("part", ["0.weight", "1.running_var"])
def test_models_without_values(batch, run, part):
    held = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3).eval())
    model = copy.deepcopy(held)
    if part == "0.weight":
        model.to("meta")
    else:
        model[1].running_var = torch.ones(3, device="meta")
    for call in calls_of(model, batch, run, held):
        with pytest.raises(gs.TrackingError, match=f"'{part}' of the model is on the meta device"):
            call()


def test_lazy_models(batch, run):
    """Before its first forward a lazy layer has no weight, and after it is as any other."""
    model = nn.Sequential(nn.LazyLinear(3))
    monitored = gs.Monitor(model, every=1).step(B).__enter__
    for call in (*calls_of(model, batch, run, model), monitored):
        with pytest.raises(gs.UnsupportedOperationError, match=r"'0\.weight'.* one forward first"):
            call()
    assert isinstance(model[0].weight, nn.UninitializedParameter)
    model(batch[0])
    assert gs.verify(model, batch, losses_of).ok
