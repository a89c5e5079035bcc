"""The monitor in a plain loop, against the oracle's per-example gradients."""

from __future__ import annotations

import contextlib
import copy
import math
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import gradstats as gs
from gradstats.monitor._records import ExampleRecord
from gradstats.monitor._run import WATCHED
from tests.dispatched import Operations
from tests.functions import recomputing
from tests.losses import losses_of
from tests.monitor.expected import (
    assert_metrics,
    gradient_rows,
    metrics_of,
    noise,
    weighted_tests,
)
from tests.oracle import assert_unchanged, oracle_gradients, snapshot

B = 6
ALIGNMENT = [False, True]


def batch_of(size: int = B):
    return torch.randn(size, 5, dtype=torch.float64), torch.randint(3, (size,))


def lacks_influence(monitor) -> bool:
    with pytest.raises(gs.TrackingError, match="lacked a learning rate, or gradients that are fin"):
        monitor.self_influence.top(1)
    return True


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


@pytest.mark.parametrize(
    "asked",
    [
        lambda monitor: monitor.metrics()["nonfinite/examples"],
        lambda monitor: B - len(monitor.histograms()["example_grad_norm"]),
        lambda monitor: len(monitor.nonfinite),
        lambda monitor: monitor.history["nonfinite/examples"][0],
        lambda monitor: len(monitor.spikes),
        lacks_influence,
        lambda monitor: not math.isfinite(monitor.examples(1)[0].norm),
        lambda monitor: len(monitor.state_dict()["nonfinite"]),
    ],
)
def test_whatever_is_asked_first_has_the_last_step(model, asked):
    monitor = gs.Monitor(model, every=1, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    inputs, labels = batch_of()
    with monitor.step(batch_size=B, ids=range(B)):
        losses = losses_of(model, (inputs, labels))
        (losses.mean() + torch.tensor(math.inf) * losses[2]).backward()
    assert asked(monitor) == 1


@pytest.mark.parametrize("alignment", ALIGNMENT)
@pytest.mark.parametrize("reduction", ["mean", "sum", "step_mean"])
def test_metrics_against_the_oracle(model, reduction, alignment):
    batch = batch_of()
    rows = gradient_rows(model, batch, losses_of)
    monitor = gs.Monitor(
        model, every=1, loss_reduction=reduction, alignment=alignment, gram=alignment, clip=1.0
    )
    with monitor.step(batch_size=B):
        losses = losses_of(model, batch)
        (losses.sum() if reduction == "sum" else losses.mean()).backward()
    expected = metrics_of(rows)
    norm = np.linalg.norm(rows, axis=1)
    expected |= {
        "gradient_diversity/batch_bound": B * expected["gradient_diversity"],
        "gns/b_simple": expected["gns/tr_sigma"] / expected["gns/g2"],
        "coherence/alpha": expected["gns/g2"] / (norm**2).mean(),
        "clip/frac": (norm > 1).mean(),
        "batch_loss": losses.mean().item(),
        "nonfinite/examples": 0,
        "nonfinite/steps": 0,
        "spike": 0,
    }
    if reduction == "sum":
        expected["grad_norm"] *= B
    if expected["gns/g2"] <= 0:
        expected["gns/b_simple"] = expected["coherence/alpha"] = math.nan
    assert_metrics(monitor.metrics(), expected)
    histograms = monitor.histograms()
    np.testing.assert_allclose(histograms["example_grad_norm"], norm)
    assert ("align/mean_cos_to_mean" in monitor.metrics()) == alignment
    if alignment:
        cosine = rows @ rows.mean(0) / norm / np.linalg.norm(rows.mean(0))
        np.testing.assert_allclose(histograms["align/cos_to_mean"], cosine)


def test_examples_along_another_axis(model):
    def losses(model, x):
        return model(x).square().mean((0, 2))

    x = torch.randn(4, B, 5, dtype=torch.float64)
    rows = gradient_rows(model, x, losses)
    monitor = gs.Monitor(model, every=1)
    with monitor.step(batch_size=B, batch_dim=1):
        losses(model, x).mean().backward()
    assert_metrics(monitor.metrics(), metrics_of(rows))
    with pytest.raises(gs.ExampleAxisError, match="batch_dim is -1"):
        with monitor.step(batch_size=B, batch_dim=-1):
            losses(model, x).mean().backward()


@pytest.mark.parametrize("alignment", ALIGNMENT)
@pytest.mark.parametrize("reduction", ["mean", "sum", "step_mean"])
def test_explicit_weights(model, alignment, reduction):
    """They say how the scalar is formed, whatever is said of scalars without them."""
    batch = batch_of()
    rows = gradient_rows(model, batch, losses_of)
    weights = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    monitor = gs.Monitor(model, every=1, alignment=alignment, loss_reduction=reduction)
    with monitor.step(batch_size=B, weights=weights):
        (losses_of(model, batch) * weights).sum().backward()
    metrics, share = monitor.metrics(), (weights.double() / weights.double().sum()).numpy()
    gram = rows @ rows.T
    products = np.outer(share, share)
    apart = ~np.eye(B, dtype=bool)
    gradient = (products * gram)[apart].sum() / products[apart].sum()
    assert metrics["gns/g2"] == pytest.approx(gradient)
    assert metrics["gns/tr_sigma"] == pytest.approx(share @ gram.diagonal() - gradient)
    assert metrics["grad_norm"] == pytest.approx(np.linalg.norm(weights.double().numpy() @ rows))
    for name, value in weighted_tests(rows, share).items():
        assert (name in metrics) == alignment
        assert not alignment or metrics[name] == pytest.approx(value, rel=1e-9)
    np.testing.assert_allclose(
        np.sort([record.norm for record in monitor.examples(B)]),
        np.sort(np.sqrt(gram.diagonal())),
    )
    with (
        pytest.raises(gs.TrackingError, match="positive numbers"),
        monitor.step(batch_size=B, weights=-weights),
    ):
        raise AssertionError("not reached")


def test_weights_and_ids_in_memory_that_the_next_micro_batch_takes(model):
    """They are those that the micro-batch was opened with."""
    monitor = gs.Monitor(model, every=1)
    weights = torch.zeros(B, dtype=torch.float64)
    ids, norms = np.zeros(B, dtype=np.int64), {}
    for number in range(2):
        batch = batch_of()
        rows = gradient_rows(model, batch, losses_of)
        own = torch.rand(B, dtype=torch.float64) + 0.1
        weights[:] = own
        ids[:] = number * B + np.arange(B)
        norms |= dict(zip(ids.tolist(), np.linalg.norm(rows, axis=1), strict=True))
        with monitor.step(batch_size=B, ids=ids, weights=weights, accumulation=(number, 2)):
            weights[:], ids[:] = 0, -1
            ((losses_of(model, batch) * own).sum() / 2).backward()
    found = {record.id: record.norm for record in monitor.examples(2 * B)}
    assert found == pytest.approx(norms)


@pytest.mark.parametrize("alignment", ALIGNMENT)
def test_examples_packed_into_one_row(model, alignment):
    """Rows of one micro-batch belong to three examples, those of the other to two."""
    lengths = [(3, 1, 4), (2, 5)]

    def losses(model, batch, lengths):
        rows = losses_of(model, batch)
        return torch.stack([part.mean() for part in rows.split(list(lengths))])

    batches = [batch_of(sum(each)) for each in lengths]
    rows = np.concatenate([
        gradient_rows(model, batch, lambda m, b, own=own: losses(m, b, own))
        for batch, own in zip(batches, lengths, strict=True)
    ])  # fmt: skip
    monitor = gs.Monitor(model, every=1, loss_reduction="step_mean", alignment=alignment)
    for index, (batch, own) in enumerate(zip(batches, lengths, strict=True)):
        bounds = torch.tensor([0, *own]).cumsum(0)
        with monitor.step(len(own), accumulation=(index, 2), cu_seqlens=bounds):
            (losses(model, batch, own).sum() / 5).backward()
    found, expected = monitor.metrics(), metrics_of(rows)
    for name in ("grad_norm", "gns/g2", "gns/tr_sigma", "gradient_diversity"):
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-9, err_msg=name)
    norm = np.linalg.norm(rows, axis=1)
    np.testing.assert_allclose(monitor.histograms()["example_grad_norm"], norm)


def test_bounds_that_do_not_fit_the_size(model):
    monitor = gs.Monitor(model, every=1)
    with pytest.raises(gs.ExampleAxisError, match="bounds 2 examples, but batch_size is 3"):
        with monitor.step(3, cu_seqlens=torch.tensor([0, 2, 6])):
            raise AssertionError("opened")
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())


@pytest.mark.parametrize("alignment", ALIGNMENT)
@pytest.mark.parametrize("reduction", ["mean", "step_mean"])
def test_accumulated_micro_batches_are_one_step(model, reduction, alignment):
    """Statistics are those of one batch of all examples; alignments those of each micro-batch."""
    batch, count = batch_of(), 2
    model.register_parameter("unused", nn.Parameter(torch.ones(2, dtype=torch.float64)))
    rows = gradient_rows(model, batch, losses_of)
    monitor = gs.Monitor(model, every=1, loss_reduction=reduction, alignment=alignment)
    for k in range(count):
        half = tuple(part[3 * k : 3 * k + 3] for part in batch)
        with monitor.step(batch_size=3, ids=torch.arange(3) + 3 * k, accumulation=(k, count)):
            (losses_of(model, half).mean() / count).backward()
    expected = metrics_of(rows)
    halves = [metrics_of(half) for half in np.split(rows, 2)]
    for name in list(expected):
        if name.startswith(("stiffness", "confusion", "inner", "ortho")) or name.endswith("_se"):
            del expected[name]
    for name in ("align/mean_cos_to_mean", "align/fraction_negative"):
        expected[name] = np.mean([half[name] for half in halves])
    expected["batch_loss"] = losses_of(model, batch).mean().item()
    assert_metrics(monitor.metrics(), expected)
    assert monitor.steps == 1
    norms = {record.id: record.norm for record in monitor.examples(B)}
    np.testing.assert_allclose([norms[i] for i in range(B)], np.linalg.norm(rows, axis=1))


@pytest.mark.parametrize("several", [False, True])
def test_accumulation_by_accelerate_that_the_monitor_was_not_told_of(model, several):
    """Its backward divides by a number that the loop does not show: norms would be as small."""
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    try:
        weights = list(model.parameters())
        parts = [weights[:1], weights[1:]] if several else [weights]
        optimizers = [accelerator.prepare(torch.optim.SGD(part, lr=0.1)) for part in parts]
        optimizer = optimizers if several else optimizers[0]
        monitor, batch = gs.Monitor(model, every=2, optimizer=optimizer), batch_of()
        norms = np.linalg.norm(gradient_rows(model, batch, losses_of), axis=1)
        for _ in range(2):
            with pytest.raises(gs.TrackingError, match=r"_steps=2.*accumulation=\(k, 2\)"):
                monitor.step(batch_size=B)
        for k in range(2):
            half = tuple(part[3 * k : 3 * k + 3] for part in batch)
            with monitor.step(batch_size=3, accumulation=(k, 2)):
                accelerator.backward(losses_of(model, half).mean())
        assert monitor.metrics()["example_grad_norm/mean"] == pytest.approx(norms.mean())
        # A step cut short by the end of an epoch, whose losses are to be divided by its own number.
        accelerator.gradient_accumulation_steps = 5
        short = gs.Monitor(model, every=1, optimizer=optimizer)
        model.zero_grad()
        for k in range(2):
            half = tuple(part[3 * k : 3 * k + 3] for part in batch)
            with short.step(batch_size=3, accumulation=(k, 2)):
                accelerator.backward(losses_of(model, half).mean() * 5 / 2)
        assert short.metrics()["example_grad_norm/mean"] == pytest.approx(norms.mean())
        accelerator.gradient_accumulation_steps = 1
        monitor.step(batch_size=B)
    finally:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerate.state.GradientState._reset_state()


@pytest.mark.parametrize("every", [1, 2])
def test_a_step_whose_micro_batches_begin_anew(model, every):
    """An epoch ended within it, and the loop drops what it had accumulated."""
    monitor, batch = gs.Monitor(model, every=every), batch_of()
    rows = gradient_rows(model, batch, losses_of)
    for whole, cut in ((True, False), (False, False), (True, True), (True, False)):
        model.zero_grad()
        for k in range(2 if whole else 1):
            anew = pytest.warns(gs.GradStatsWarning, match="micro-batch 1 of .*divide its losses")
            with anew if cut and k == 0 else contextlib.nullcontext():
                step = monitor.step(batch_size=B, accumulation=(k, 2))
            with step:
                (losses_of(model, batch).mean() / 2).backward()
    assert monitor.steps == 3
    assert monitor.history["step"] == [step for step in range(3) if step % every == 0]
    assert monitor.metrics()["gns/g2"] == pytest.approx(noise(np.concatenate([rows, rows]))[1])


def test_unequal_micro_batches_of_a_token_mean(model):
    """ "step_mean": each scalar is a sum over the micro-batch, divided by what the step holds."""
    batch = batch_of()
    tokens = torch.tensor([1.0, 2, 3, 4, 5, 6], dtype=torch.float64)

    def normalised(model, batch):
        return losses_of(model, batch[:2]) * batch[2] * (B / tokens.sum())

    rows = gradient_rows(model, (*batch, tokens), normalised)
    monitor = gs.Monitor(model, every=1, loss_reduction="step_mean", alignment=False)
    for k, part in enumerate((slice(0, 2), slice(2, 6))):
        some = tuple(item[part] for item in batch)
        with monitor.step(batch_size=len(some[1]), accumulation=(k, 2)):
            ((losses_of(model, some) * tokens[part]).sum() / tokens.sum()).backward()
    assert_metrics(monitor.metrics(), {
        name: value for name, value in metrics_of(rows).items() if "gns" in name or "norm" in name
    })  # fmt: skip


def test_unequal_micro_batches_of_means(model):
    """ "mean": the examples of the smaller micro-batch weigh more; norms are those of ℓ_i."""
    batch = batch_of()
    rows = gradient_rows(model, batch, losses_of)
    share = np.array([1 / 4] * 2 + [1 / 8] * 4)
    monitor = gs.Monitor(model, every=1, alignment=False)
    for k, part in enumerate((slice(0, 2), slice(2, 6))):
        some = tuple(item[part] for item in batch)
        with monitor.step(batch_size=len(some[1]), accumulation=(k, 2)):
            (losses_of(model, some).mean() / 2).backward()
    metrics, gram = monitor.metrics(), rows @ rows.T
    apart, products = ~np.eye(B, dtype=bool), np.outer(share, share)
    assert metrics["grad_norm"] == pytest.approx(np.linalg.norm(share @ rows))
    assert metrics["example_grad_norm/max"] == pytest.approx(np.sqrt(gram.diagonal().max()))
    assert metrics["gns/g2"] == pytest.approx(
        (products * gram)[apart].sum() / products[apart].sum()
    )


@pytest.mark.parametrize("alignment", ALIGNMENT)
@pytest.mark.parametrize("tensor_rates", [False, True])
def test_what_steps_inside_the_context_changes_nothing(model, alignment, tensor_rates):
    """The loss scale, which is divided out, and the learning rates are those at the backward."""
    batch = batch_of()
    rows = gradient_rows(model, batch, losses_of)
    rate = torch.tensor(0.1, dtype=torch.float64) if tensor_rates else 0.1
    optimizer = torch.optim.SGD(model.parameters(), rate)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    monitor = gs.Monitor(model, every=1, alignment=alignment, optimizer=optimizer, scaler=scaler)
    with monitor.step(batch_size=B, ids=range(B)):
        losses = losses_of(model, batch)
        scaler.scale(losses.mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
    assert scaler.get_scale() == 2048
    expected = metrics_of(rows)
    expected["batch_loss"] = losses.mean().item()
    expected["cabs"] = 0.1 * expected["gns/tr_sigma"] / losses.mean().item()
    assert_metrics(monitor.metrics(), {k: v for k, v in expected.items() if "sti" not in k})
    np.testing.assert_allclose(monitor.self_influence.values, 0.1 * (rows**2).sum(1))


@pytest.mark.parametrize("alignment", ALIGNMENT)
def test_steps_that_a_scaler_skips_have_no_influence(model, alignment):
    """As it does where the gradient of one example is not finite."""
    inputs, labels = batch_of()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    monitor = gs.Monitor(model, every=1, alignment=alignment, optimizer=optimizer, scaler=scaler)
    expected, steps = np.zeros(B), 0
    for factor in (1.0, math.inf, 1.0):
        optimizer.zero_grad()
        rows, before = gradient_rows(model, (inputs, labels), losses_of), copy.deepcopy(model)
        with monitor.step(batch_size=B, ids=range(B)):
            losses = losses_of(model, (inputs, labels)) * torch.tensor([factor, 1, 1, 1, 1, 1])
            scaler.scale(losses.mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        if not torch.equal(model[0].weight, before[0].weight):
            expected, steps = expected + 0.1 * (rows**2).sum(1), steps + 1
    np.testing.assert_allclose(monitor.self_influence.values, expected)
    assert steps == 2 and set(monitor.self_influence.visits) == {2}


def test_norms_are_those_before_clipping(model):
    batch = batch_of()
    rows = gradient_rows(model, batch, losses_of)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = gs.Monitor(model, every=1, alignment=False)
    with monitor.step(batch_size=B):
        losses_of(model, batch).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
    assert monitor.metrics()["grad_norm"] == pytest.approx(np.linalg.norm(rows.mean(0)))


@pytest.mark.parametrize("fused", [False, True])
def test_training_is_the_same_with_and_without(model, fused):
    plain = copy.deepcopy(model)
    models = {"monitored": model, "plain": plain}
    optimizers = {n: torch.optim.Adam(m.parameters(), lr=0.01) for n, m in models.items()}
    monitor = gs.Monitor(
        model, every=2, fused=fused, optimizer=optimizers["monitored"], alignment=False
    )
    for _ in range(5):
        batch = batch_of()
        for name, each in models.items():
            optimizers[name].zero_grad()
            if name == "monitored":
                with monitor.step(batch_size=B):
                    losses_of(each, batch).mean().backward()
            else:
                losses_of(each, batch).mean().backward()
            optimizers[name].step()
    for got, want in zip(model.parameters(), plain.parameters(), strict=True):
        if fused:
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-12)
        else:
            assert torch.equal(got, want)


def test_off_steps_touch_nothing(model):
    """The same operations run as without a monitor, on an untouched model."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = gs.Monitor(model, every=3, optimizer=optimizer, alignment=False)
    batch = batch_of()
    with Operations() as plain:
        losses_of(model, batch).mean().backward()
    seen, examples, histograms = [], [], {}
    for step in range(7):
        model.zero_grad()
        before = snapshot(model)
        with monitor.step(batch_size=B, ids=range(B)) as context:
            seen.append(type(model[0].weight) is not nn.Parameter)
            if not context.measured:
                assert_unchanged(model, before)
            with Operations() as operations:
                losses_of(model, batch).mean().backward()
        metrics = monitor.metrics()
        if step % 3:
            assert operations.found == plain.found
            assert metrics == {}
            np.testing.assert_equal(monitor.histograms(), histograms)
            # as text, for alignments that were not measured are NaN
            assert str(monitor.examples()) == str(examples) and len(examples) == B
        else:
            assert operations.found != plain.found
            assert metrics["grad_norm"] > 0
            histograms, examples = monitor.histograms(), monitor.examples()
            assert sorted(record.id for record in examples) == list(range(B))
            assert examples[0].norm == histograms["example_grad_norm"].max() > 0
        model.zero_grad()
        assert_unchanged(model, before)
    assert seen == [True, False, False, True, False, False, True]


def test_averages_weigh_steps_by_their_numbers_of_examples(model):
    monitor = gs.Monitor(model, every=1, alignment=False, decay=0.9, layers="*")
    x, y = torch.randn(1, 5, dtype=torch.float64), torch.zeros(1, dtype=torch.long)
    sizes, steps = (9, 2, 6), []
    for size in sizes:
        model.zero_grad()
        rows = x + 0.1 * torch.randn(size, 5, dtype=torch.float64)  # alike: no average below zero
        with monitor.step(batch_size=size):
            losses_of(model, (rows, y.expand(size))).mean().backward()
        steps.append(monitor.metrics())
    weights = np.array(sizes) * [0.81, 0.9, 1]
    for prefix in ("gns/", "gns/0/", "gns/2/"):
        spread, gradient = (
            weights @ [step[prefix + name] for step in steps] for name in ("tr_sigma", "g2")
        )
        assert steps[-1][f"{prefix}b_simple"] == pytest.approx(spread / gradient)
    sqnorms = [step["gns/tr_sigma"] + step["gns/g2"] for step in steps]
    alpha = weights @ [step["gns/g2"] for step in steps] / (weights @ sqnorms)
    assert steps[-1]["coherence/alpha"] == pytest.approx(alpha)


def test_one_copy_to_the_host_for_each_measured_step(model, monkeypatch):
    copies = []
    original = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda t: copies.append(len(t)) or original(t))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu")
    monitor = gs.Monitor(
        model, every=1, alignment=False, layers="*", optimizer=optimizer, scaler=scaler
    )
    batch = batch_of()
    scaler.scale(torch.ones(()))
    with Operations() as operations:
        with monitor.step(batch_size=B, ids=torch.arange(B)):
            scaler.scale(losses_of(model, batch).mean()).backward()
        assert copies == []  # nothing waits before the optimizer's step
        monitor.metrics()
        monitor.histograms()
        monitor.examples()
        monitor.state_dict()
    assert len(copies) == 1
    assert not {"_local_scalar_dense", "equal"} & {*operations.found}  # the host waits for these


def test_layers(model):
    batch = batch_of()
    gradients = oracle_gradients(model, batch, losses_of)
    monitor = gs.Monitor(model, every=1, layers="*", alignment=False)
    with monitor.step(batch_size=B):
        losses_of(model, batch).mean().backward()
    metrics = monitor.metrics()
    for layer in ("0", "2"):
        names = [name for name in gradients if name.startswith(f"{layer}.")]
        rows = torch.cat([gradients[name].flatten(1) for name in names], 1).numpy()
        spread, gradient = noise(rows)
        norm = np.linalg.norm(rows, axis=1)
        assert metrics[f"grad_norm/{layer}"] == pytest.approx(np.linalg.norm(rows.mean(0)))
        assert metrics[f"example_grad_norm/{layer}/mean"] == pytest.approx(norm.mean())
        assert metrics[f"gns/{layer}/tr_sigma"] == pytest.approx(spread)
        assert metrics[f"gns/{layer}/g2"] == pytest.approx(gradient)
    for pattern in ("blocks.*", "0.weight.*"):
        with pytest.raises(gs.CoverageError, match="matches the beginning of no"):
            gs.Monitor(model, layers=["0", pattern])


@pytest.mark.parametrize("patterns, layer", [(None, "2.weight"), ("*", "2")])
def test_examples_say_which_and_where(model, patterns, layer):
    batch = batch_of()
    with torch.no_grad():
        model[2].weight.mul_(0.01)  # so that the last layer's gradient dominates
    gradients = oracle_gradients(model, batch, losses_of)
    squares = {name: g.flatten(1).square().sum(1) for name, g in gradients.items()}
    whole = sum(squares.values())
    monitor = gs.Monitor(model, every=1, layers=patterns, alignment=False)
    ids = torch.tensor([30, 10, 50, 20, 60, 40])
    with monitor.step(batch_size=B, ids=ids):
        losses_of(model, batch).mean().backward()
    records = monitor.examples(3)
    order = whole.argsort(descending=True)[:3]
    assert [record.id for record in records] == ids[order].tolist()
    assert [record.position for record in records] == order.tolist()
    part = squares["2.weight"] + (squares["2.bias"] if patterns else 0)
    for record, place in zip(records, order, strict=True):
        assert record.norm == pytest.approx(whole[place].sqrt().item())
        assert record.layer == layer
        assert record.share == pytest.approx((part[place] / whole[place]).item())


def test_a_spike_names_its_examples():
    model = nn.Linear(5, 3).double()
    monitor = gs.Monitor(model, every=1, top=2)
    for step in range(8):
        inputs, labels = batch_of()
        if step == 6:
            inputs[4] *= 200
            labels[4] = model(inputs)[4].argmin()
        with monitor.step(batch_size=B, ids=torch.arange(B) + 100):
            losses_of(model, (inputs, labels)).mean().backward()
        model.zero_grad()
        if step == 6:
            rows = gradient_rows(model, (inputs, labels), losses_of)
        assert monitor.metrics()["spike"] == (step == 6)
    norm, mean = np.linalg.norm(rows, axis=1), rows.mean(0)
    along = rows @ mean / np.linalg.norm(mean)
    expected = set(np.argsort(-norm)[:2]) | set(np.argsort(-along)[:2])
    assert [spike.quantity for spike in monitor.spikes] == ["grad_norm", "example_grad_norm/max"]
    for spike in monitor.spikes:
        assert spike.step == 6 and spike.value > 5 * spike.typical > 0
        assert [e.id - 100 for e in spike.examples] == sorted(expected, key=lambda i: -norm[i])
        for example in spike.examples:
            assert example.norm == pytest.approx(norm[example.position])
            assert example.alignment == pytest.approx(along[example.position])
    median = np.median(monitor.history["grad_norm"][:6])
    assert monitor.spikes[0].typical == pytest.approx(median)
    spike = monitor.spikes[0]
    shown = f"grad_norm={spike.value:.4g}, typical={median:.4g}, examples=[104, "
    assert repr(spike).startswith(f"Spike(step=6, {shown}") and len(repr(spike)) < 120


def test_an_example_is_shown_in_one_line():
    record = ExampleRecord(26, 5, 0.7965611213103997, math.nan, "2.weight", 0.6709850698286224)
    assert repr(record) == (
        "ExampleRecord(id=26, position=5, norm=0.7966, alignment=nan, layer='2.weight', "
        "share=0.671)"
    )


def test_gradients_that_are_not_finite_are_counted_and_named(model):
    monitor = gs.Monitor(model, every=1, alignment=False)
    inputs, labels = batch_of()
    with monitor.step(batch_size=B):
        losses_of(model, (inputs, labels)).mean().backward()
    before = monitor.metrics()
    model.zero_grad()
    inputs[3] = math.nan
    with monitor.step(batch_size=B, ids=torch.arange(B) + 7):
        losses_of(model, (inputs, labels)).mean().backward()
    metrics = monitor.metrics()
    assert metrics["nonfinite/examples"] == metrics["nonfinite/steps"] == metrics["spike"] == 1
    assert monitor.nonfinite == [(1, 10)]
    assert math.isnan(metrics["grad_norm"]) and math.isnan(metrics["gns/tr_sigma"])
    assert metrics["example_grad_norm/mean"] > 0
    assert metrics["gns/b_simple"] == pytest.approx(before["gns/b_simple"], nan_ok=True)
    assert monitor.examples(1)[0].id == 10


def test_a_weight_that_is_derived_and_not_a_number_is_counted(model):
    """A run that has diverged goes on."""
    model = nn.utils.parametrizations.weight_norm(model[0])
    with torch.no_grad():
        model.parametrizations.weight.original0[0] = math.nan
    for alignment in ALIGNMENT:
        monitor = gs.Monitor(model, every=1, alignment=alignment, gram=alignment)
        with monitor.step(batch_size=B):
            losses_of(model, batch_of()).mean().backward()
        metrics = monitor.metrics()
        assert (metrics["nonfinite/examples"], metrics["nonfinite/steps"]) == (B, 1)
        model.zero_grad()


def test_steps_that_are_not_finite_one_after_the_other_are_one_spike(model):
    monitor = gs.Monitor(model, every=1, alignment=False, top=1)
    inputs, labels = batch_of()
    spoilt = inputs.clone()
    spoilt[3] = math.nan
    for step in range(9):
        if step == 5:
            # Resumed in the middle of a stretch.
            state, monitor = monitor.state_dict(), gs.Monitor(model, every=1, top=1)
            monitor.load_state_dict(state)
        model.zero_grad()
        with monitor.step(batch_size=B):
            losses_of(model, (spoilt if step not in (2, 7) else inputs, labels)).mean().backward()
        assert monitor.metrics()["spike"] == (step not in (2, 7))
    assert [spike.step for spike in monitor.spikes] == [0, 3, 8]
    assert [spike.examples[0].position for spike in monitor.spikes] == [3, 3, 3]


def test_only_the_last_spikes_are_kept(model, monkeypatch):
    monkeypatch.setattr("gradstats.monitor._run.SPIKES", 3)
    monitor = gs.Monitor(model, every=1, alignment=False, top=1)
    inputs, labels = batch_of()
    for step in range(12):
        model.zero_grad()
        with monitor.step(batch_size=B):
            (losses_of(model, (inputs, labels)) * (math.nan if step % 2 else 1)).mean().backward()
    named = [(spike.step, spike.quantity) for spike in monitor.spikes]
    assert named == [(9, WATCHED[1]), (11, WATCHED[0]), (11, WATCHED[1])]
    again = gs.Monitor(model, every=1)
    again.load_state_dict(monitor.state_dict())
    assert str(again.spikes) == str(monitor.spikes)


@pytest.mark.parametrize("several", [False, True], ids=["one optimizer", "one for each group"])
def test_self_influence_over_a_run_survives_shuffling_and_resuming(model, tmp_path, several):
    """S_i = Σ_t η_t ‖g_i(w_t)‖², summed over parameter groups with their own learning rates."""
    inputs, labels = batch_of(10)

    def groups(model):
        return [
            {"params": model[0].parameters(), "lr": 0.1},
            {"params": model[2].parameters(), "lr": 0.01},
        ]

    sets = [[group] for group in groups(model)] if several else [groups(model)]
    optimizers = [torch.optim.SGD(each) for each in sets]
    given = optimizers if several else optimizers[0]
    schedules = [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in optimizers]
    monitor = gs.Monitor(model, every=1, optimizer=given, alignment=False)
    expected, visits = np.zeros(10), np.zeros(10)
    for step in range(6):
        picked = torch.randperm(10)[:4]
        batch = (inputs[picked], labels[picked])
        gradients = oracle_gradients(model, batch, losses_of)
        for name, gradient in gradients.items():
            moved = [group for each in optimizers for group in each.param_groups]
            rate = moved[0 if name.startswith("0") else 1]["lr"]
            expected[picked] += rate * gradient.flatten(1).square().sum(1).numpy()
        visits[picked] += 1
        model.zero_grad()
        with monitor.step(batch_size=4, ids=picked):
            losses_of(model, batch).mean().backward()
        for each in (*optimizers, *schedules):
            each.step()
        if step == 3:
            torch.save(monitor.state_dict(), tmp_path / "monitor.pt")
            metrics = monitor.metrics()
            monitor = gs.Monitor(model, every=1, optimizer=given, alignment=False)
            monitor.load_state_dict(torch.load(tmp_path / "monitor.pt", weights_only=True))
            assert monitor.history["gns/tr_sigma"][-1] == metrics["gns/tr_sigma"]
    table = monitor.self_influence
    seen = np.flatnonzero(visits)
    assert table.ids.tolist() == seen.tolist()
    np.testing.assert_allclose(table.values, expected[seen])
    np.testing.assert_array_equal(table.visits, visits[seen])
    assert [i for i, _ in table.top(2)] == np.argsort(-expected)[:2].tolist()
    assert monitor.history["step"] == list(range(6)) and monitor.steps == 6


def test_a_resumed_monitor_continues_its_averages(model):
    batches = [batch_of() for _ in range(8)]
    whole, first, second = (gs.Monitor(model, every=1, alignment=False) for _ in range(3))

    def run(monitor, some):
        for batch in some:
            model.zero_grad()
            with monitor.step(batch_size=B):
                losses_of(model, batch).mean().backward()
        return monitor.metrics()

    expected = run(whole, batches)
    run(first, batches[:5])
    second.load_state_dict(first.state_dict())
    got = run(second, batches[5:])
    assert got == expected or all(
        got[name] == value or (math.isnan(value) and math.isnan(got[name]))
        for name, value in expected.items()
    )
    with pytest.raises(gs.TrackingError, match="saved by another version"):
        second.load_state_dict({"version": 99})


def test_numbers_of_numpy_are_as_good_as_pythons(model, tmp_path):
    """Averages stay in float64, and the state is read without unpickling."""
    batches = [batch_of() for _ in range(4)]
    options = {"every": 2, "decay": 0.5, "spike": 1.5, "top": 3, "clip": 0.25}
    converted = {"every": np.int64(2), "top": np.int64(3)}
    converted |= {name: np.float32(options[name]) for name in ("decay", "spike", "clip")}
    monitors = [gs.Monitor(model, **given) for given in (options, converted)]
    for monitor in monitors:
        take_steps(model, monitor, batches)
        torch.save(monitor.state_dict(), tmp_path / "state.pt")
        state = torch.load(tmp_path / "state.pt")
        history = {name: values.tolist() for name, values in state["history"].items()}
        np.testing.assert_equal(history, monitors[0].history)
        assert state["ratios"] == monitors[0].state_dict()["ratios"]


def take_steps(model, monitor, batches):
    for batch in batches:
        model.zero_grad()
        with monitor.step(batch_size=B):
            losses_of(model, batch).mean().backward()
    return monitor.metrics()


def test_a_state_replaces_all_that_was_measured(model):
    """Averages that the state does not hold start anew, with the monitor's own decay."""
    batches = [batch_of() for _ in range(6)]
    used = gs.Monitor(model, every=1, layers="*")
    take_steps(model, used, batches[:3])
    fresh = gs.Monitor(model, every=1, layers="*")
    used.load_state_dict(fresh.state_dict())
    assert used.metrics() == used.histograms() == used.history == {} and used.examples() == []
    np.testing.assert_equal(
        take_steps(model, used, batches[3:]), take_steps(model, fresh, batches[3:])
    )
    np.testing.assert_equal(used.history, fresh.history)
    state = used.state_dict()
    del state["self_influence"]
    whole = fresh.state_dict()
    counts = ("steps", "undefined", "nonfinite_steps")
    numbers = [{**whole, name: value} for name in counts for value in (None, math.inf)]
    influence = {**whole["self_influence"], "values": torch.zeros(len(fresh.history["step"]))}
    others = [{**whole, "history": {"step": None}}, {**whole, "self_influence": influence}]
    missing = [{**state, "steps": 0}, {"version": state["version"]}]
    for damaged in (*missing, *numbers, *others):
        with pytest.raises(gs.TrackingError, match="state is damaged"):
            used.load_state_dict(damaged)
    np.testing.assert_equal(used.history, fresh.history)
    assert used.steps == 3


def test_a_history_over_other_options_is_aligned_with_its_steps(model):
    """A metric is NaN at the steps at which it was not measured."""
    batches = [batch_of() for _ in range(4)]
    first = gs.Monitor(model, every=1, layers="0", clip=1.0)
    second = gs.Monitor(model, every=1, alignment=False, layers="2")
    take_steps(model, first, batches[:2])
    before = first.history
    second.load_state_dict(first.state_dict())
    take_steps(model, second, batches[2:3])
    take_steps(model, second, batches[3:])
    history = second.history
    assert history["step"] == [0, 1, 2, 3]
    for name, values in history.items():
        assert len(values) == 4
        np.testing.assert_array_equal(values[:2], before.get(name, [math.nan] * 2))
    last = second.metrics()
    for name in before.keys() - last.keys() - {"step"}:
        assert name.startswith(("align", "inner", "ortho", "clip")) or "/0" in name
        assert all(math.isnan(value) for value in history[name][2:])
    for name, value in last.items():
        np.testing.assert_array_equal(history[name][3], value)


def test_an_exception_leaves_nothing_behind_and_is_not_counted(model):
    monitor = gs.Monitor(model, every=1, alignment=False)
    state = snapshot(model)
    with pytest.raises(RuntimeError, match="the user's own"), monitor.step(batch_size=B) as step:
        losses_of(model, batch_of())
        raise RuntimeError("the user's own")
    assert_unchanged(model, state)
    assert monitor.steps == 0 and monitor.metrics() == {} and not step.measured
    with monitor.step(batch_size=B):
        losses_of(model, batch_of()).mean().backward()
    assert monitor.metrics()["grad_norm"] > 0


def test_an_exception_in_a_step_that_is_not_measured_is_the_users(model):
    monitor = gs.Monitor(model, every=2)
    with monitor.step(batch_size=B):
        losses_of(model, batch_of()).mean().backward()
    with pytest.raises(RuntimeError, match="the user's own"), monitor.step(batch_size=B):
        raise RuntimeError("the user's own")
    assert monitor.steps == 1 and monitor.history["step"] == [0]


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("failing, again", [(1, 2), (1, 1), (1, 0), (2, 2), (2, 0)])
def test_a_micro_batch_whose_exception_the_loop_catches(model, every, failing, again):
    """It leaves out that one of three, takes it again, or begins the whole step anew."""
    anew = again == 0
    monitor, batch, state = gs.Monitor(model, every=every), batch_of(), snapshot(model)

    def run(k, fails):
        with monitor.step(batch_size=B, accumulation=(k, 3)) as step:
            loss = losses_of(model, batch).mean() / 3
            if fails:
                raise MemoryError
            loss.backward()
        return step.measured

    for number in range(4):
        fails = number in (1, 2)
        for k in range(failing + 1 if fails else 0):
            with contextlib.suppress(MemoryError):
                run(k, fails=k == failing)
        if anew:
            model.zero_grad()
        measured = [run(k, fails=False) for k in range(again if fails else 0, 3)]
        assert any(measured) == (number % every == 0 and (anew or not fails))
        assert bool(monitor.metrics()) == any(measured)
        model.zero_grad()
        assert_unchanged(model, state)
    assert monitor.steps == 4
    lost = () if anew else (1, 2)
    assert monitor.history["step"] == [n for n in range(0, 4, every) if n not in lost]


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda m: gs.Monitor(m, every=0), "every is 0"),
        (lambda m: gs.Monitor(m, loss_reduction="max"), "loss_reduction is 'max'"),
        (lambda m: gs.Monitor(m, decay=1.0), "decay is 1.0"),
        (lambda m: gs.Monitor(m, spike=1.0), "spike is 1.0"),
        (lambda m: gs.Monitor(m, decay="slow"), "decay is 'slow'"),
        (lambda m: gs.Monitor(m, spike=None), "spike is None"),
        (lambda m: gs.Monitor(m, top=-1), "top is -1"),
        (lambda m: gs.Monitor(m, clip=-1), "clip is -1"),
        (lambda m: gs.Monitor(m, clip=10**400), "clip is 1000.*, expected a positive norm"),
        (lambda m: gs.Monitor(m, spike=10**400), "spike is 1000.*, expected a factor"),
        (lambda m: gs.Monitor(m, workspace=0), "workspace is 0"),
        (lambda m: gs.Monitor(m, alignment="mean"), "alignment is 'mean', expected True or False"),
        (lambda m: gs.Monitor(None), "model is NoneType, expected a torch.nn.Module"),
        (lambda m: gs.Monitor("run.pt"), r"model is str, .*other\.load_state_dict"),
        (lambda m: gs.Monitor(type(m)), "model is the class Sequential, expected a torch.nn"),
        (lambda m: gs.Monitor(m, optimizer=torch.optim.SGD), "optimizer is <class .*, expected a"),
        (lambda m: gs.Monitor(m, optimizer=0.1), "optimizer is 0.1"),
        (lambda m: gs.Monitor(m, optimizer=2 * [torch.optim.SGD(m.parameters())]), "each once"),
        (lambda m: gs.Monitor(m, optimizer=["SGD"]), r"optimizer is \['SGD'\], .*, or a list of"),
        (lambda m: gs.Monitor(m, scaler=torch.amp.GradScaler), "scaler is <class"),
        (lambda m: gs.Monitor(m, scaler=1024.0), "scaler is 1024.0"),
        (lambda m: gs.Monitor(m, process_group=0), "process_group is 0, expected a torch.dist"),
        (lambda m: gs.Monitor(m).step(2, accumulation=(2, 2)), "expected \\(k, K\\)"),
        (lambda m: gs.Monitor(m).step(2, accumulation=(-1, 2)), "expected \\(k, K\\)"),
        (lambda m: gs.Monitor(m).step(2, accumulation=2), "accumulation is 2, expected \\(k, K\\)"),
        (lambda m: gs.Monitor(m).step(2, accumulation=(0, 1, 2)), "expected \\(k, K\\)"),
        (lambda m: gs.Monitor(m).examples(-1), "k is -1"),
        (lambda m: gs.Monitor(m).step(2, accumulation=(1, 2)), "micro-batch 0 was expected"),
        (lambda m: gs.Monitor(m).examples(by="loss"), "by is 'loss'"),
        (lambda m: gs.Monitor(m).self_influence.top(-1), "k is -1"),
        (lambda m: gs.Monitor(m).self_influence.top("a"), "k is 'a'"),
        (lambda m: gs.Monitor(m).load_state_dict(None), "state is NoneType"),
    ],
)
def test_bad_arguments(model, call, message):
    with pytest.raises(gs.TrackingError, match=message):
        call(model)


@pytest.mark.parametrize(
    "given, ids, lacked",
    [
        (False, range(B), r"lacked an optimizer.*Monitor\(optimizer="),
        (True, None, r"lacked the examples' ids: monitor\.step\(.*ids="),
        (None, range(B), "lacked a learning rate"),
        ([], range(B), "lacked an optimizer"),
    ],
    ids=["no optimizer", "no ids", "no learning rate", "no groups of parameters"],
)
def test_self_influence_that_no_step_could_give_is_said(model, given, ids, lacked):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if given is None:
        optimizer.param_groups[0]["lr"] = None
    elif given == []:
        optimizer.param_groups.clear()
    monitor = gs.Monitor(model, every=1, optimizer=None if given is False else optimizer)
    assert monitor.self_influence.top(3) == []  # nothing was measured yet
    with monitor.step(B, ids=ids):
        losses_of(model, batch_of()).mean().backward()
    assert len(monitor.self_influence) == 0
    with pytest.raises(gs.TrackingError, match=lacked):
        monitor.self_influence.top(3)


def test_a_step_without_ids_leaves_the_self_influence_of_those_before(model):
    batch = batch_of()
    norms = np.linalg.norm(gradient_rows(model, batch, losses_of), axis=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = gs.Monitor(model, every=1, optimizer=optimizer, alignment=False)
    for ids in (range(B), None):
        with monitor.step(B, ids=ids):
            losses_of(model, batch).mean().backward()
        model.zero_grad()
    assert monitor.self_influence.top(1) == [
        (norms.argmax(), pytest.approx(0.1 * norms.max() ** 2))
    ]
    with pytest.raises(gs.TrackingError, match="alignments were not measured"):
        monitor.examples(by="alignment")


def test_the_monitor_in_a_shell(model):
    """Looking at it asks the device nothing: a measured step stays there."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = gs.Monitor(model, every=2, optimizer=optimizer)
    assert repr(monitor) == "Monitor(every=2, steps=0, measured=0)"
    for number in range(3):
        model.zero_grad()
        with monitor.step(batch_size=B, ids=range(B)) as step:
            assert repr(step) == f"MonitorStep(batch_size={B}, measured={number != 1})"
            losses_of(model, batch_of()).mean().backward()
    assert repr(monitor) == "Monitor(every=2, steps=3, measured=2)"
    assert monitor._pending is not None
    assert repr(monitor.self_influence) == f"RunningSelfInfluence(examples={B})"
    assert repr(monitor) == "Monitor(every=2, steps=3, measured=2)"


def test_what_was_wrong_with_a_step_is_said_of_that_step(model):
    """By the time it is known the next one may have begun."""
    monitor = gs.Monitor(model, every=2)
    for _ in range(3):
        with monitor.step(batch_size=B):
            losses_of(model, batch_of()).mean().backward()
    message = "^at optimizer step 2, the parameters held a gradient when .*optimizer.zero_grad"
    with pytest.raises(gs.TrackingError, match=message):
        with monitor.step(batch_size=B):
            raise AssertionError("not reached")


@pytest.mark.parametrize("name", ["layers", "parameters", "exclude"])
def test_patterns_that_are_none(model, name):
    with pytest.raises(gs.CoverageError, match=f"{name} is 3, expected an fnmatch pattern"):
        gs.Monitor(model, **{name: 3})
    with pytest.raises(gs.CoverageError, match=f"{name} is a list_iterator, which can be read"):
        gs.Monitor(model, **{name: iter(["*"])})


def test_ids_are_looked_at_before_the_model_is_touched(model):
    monitor = gs.Monitor(model, every=1)
    with pytest.raises(gs.TrackingError, match=r"ids .*expected \(6,\) integers"):
        with monitor.step(batch_size=B, ids=["a"] * B):
            raise AssertionError("not reached")
    with pytest.raises(gs.TrackingError, match="positive numbers"):
        with monitor.step(batch_size=B, weights=[-1.0] * B):
            raise AssertionError("not reached")
    batch = batch_of()
    with monitor.step(batch_size=B, ids=np.arange(B), weights=[1 / B] * B):
        losses_of(model, batch).mean().backward()
    assert monitor.steps == 1 and monitor.examples(1)[0].id is not None


@pytest.mark.parametrize(
    "ids",
    [
        torch.arange(3),
        torch.rand(B),
        torch.full((B,), 2**60),
        np.full(B, 2**63, dtype=np.uint64),
        torch.ones(B, dtype=torch.bool),
        [f"image-{number}" for number in range(B)],
        [2**70] * B,
        "abcdef",
        (1, 2).index,
    ],
)
def test_bad_ids(model, ids):
    monitor = gs.Monitor(model, every=1, alignment=False)
    state = snapshot(model)
    with pytest.raises(gs.TrackingError, match="ids"):
        with monitor.step(batch_size=B, ids=ids):
            losses_of(model, batch_of()).mean().backward()
        monitor.metrics()
    model.zero_grad()
    assert_unchanged(model, state)


def test_ids_that_are_too_large_are_named(model):
    monitor = gs.Monitor(model, every=1)
    with monitor.step(batch_size=B, ids=np.array([*range(B - 1), 2**63], dtype=np.uint64)):
        losses_of(model, batch_of()).mean().backward()
    with pytest.raises(gs.TrackingError, match=r"-2⁵³ and 2⁵³, got \[0, .*, 9223372036854775808\]"):
        monitor.metrics()


@pytest.mark.parametrize("alignment", ALIGNMENT)
@pytest.mark.parametrize("factor", [1.0, math.nan])
def test_a_gradient_from_before_is_refused(model, factor, alignment):
    monitor = gs.Monitor(model, every=1, alignment=alignment)
    (factor * losses_of(model, batch_of()).mean()).backward()
    with monitor.step(batch_size=B):
        losses_of(model, batch_of()).mean().backward()
    with pytest.raises(gs.TrackingError, match="zero_grad"):
        monitor.metrics()
    model.zero_grad(set_to_none=False)
    batch = batch_of()
    rows = gradient_rows(model, batch, losses_of)
    with monitor.step(batch_size=B):
        losses_of(model, batch).mean().backward()
    assert monitor.metrics()["grad_norm"] == pytest.approx(np.linalg.norm(rows.mean(0)))


def cleared(parameters):
    for parameter in parameters:
        parameter.grad = None


def kept_by_a_copy(parameters):
    for parameter in parameters:
        parameter.grad = parameter.grad.clone()


def kept_by_clipping(parameters):
    torch.nn.utils.clip_grad_norm_(parameters, 1e6)


def clipped(parameters):
    torch.nn.utils.clip_grad_norm_(parameters, 1e-3)


@pytest.mark.parametrize("alignment", ALIGNMENT)
@pytest.mark.parametrize("factor", [1.0, math.nan])
@pytest.mark.parametrize("change", [cleared, clipped, kept_by_a_copy, kept_by_clipping])
def test_gradients_changed_between_micro_batches(model, change, factor, alignment):
    """The gradient of the step is then not what its examples add up to."""
    monitor = gs.Monitor(model, every=1, alignment=alignment)
    whole, count = batch_of(3 * B), 3
    rows = gradient_rows(model, whole, losses_of)
    for k, batch in enumerate(zip(*(item.split(B) for item in whole), strict=True)):
        with monitor.step(batch_size=B, accumulation=(k, count)):
            (factor * losses_of(model, batch).mean() / count).backward()
            if k == 1:
                change(list(model[2].parameters()))
    if change is cleared or (change is clipped and factor == 1.0):
        with pytest.raises(gs.TrackingError, match=r"'2.weight', '2.bias' .* between the micro"):
            monitor.metrics()
    elif factor == 1.0:
        assert monitor.metrics()["gns/g2"] == pytest.approx(noise(rows)[1])
    else:
        assert monitor.metrics()["nonfinite/examples"] == 3 * B


@pytest.mark.parametrize("alignment", ALIGNMENT)
@pytest.mark.parametrize("set_to_none", [False, True])
def test_a_backward_that_is_told_what_to_compute(model, set_to_none, alignment):
    """The gradient of the step is that of all measured parameters, or it is refused."""
    batch = batch_of()
    last = gs.Monitor(model, every=1, alignment=alignment, parameters="2.*")
    rows = gradient_rows(model[2], (model[:2](batch[0]).detach(), batch[1]), losses_of)
    losses_of(model, batch).mean().backward()
    model.zero_grad(set_to_none=set_to_none)
    inputs = list(model[2].parameters())
    with last.step(batch_size=B):
        losses_of(model, batch).mean().backward(inputs=inputs)
    assert_metrics(last.metrics(), metrics_of(rows))
    model.zero_grad(set_to_none=set_to_none)
    state = snapshot(model)
    whole = gs.Monitor(model, every=1, alignment=alignment)
    with pytest.raises(gs.TrackingError, match=r"leaves out '0.weight', '0.bias' of .*exclude="):
        with whole.step(batch_size=B):
            losses_of(model, batch).mean().backward(inputs=inputs)
    model.zero_grad()
    assert_unchanged(model, state)


@pytest.mark.parametrize("set_to_none", [False, True])
def test_a_gradient_that_the_optimizer_does_not_clear(model, set_to_none):
    """It is named: the loop did call optimizer.zero_grad()."""
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    monitor = gs.Monitor(model, every=1)
    for _ in range(2):
        optimizer.zero_grad(set_to_none=set_to_none)
        with monitor.step(batch_size=B):
            losses_of(model, batch_of()).mean().backward()
    message = r"\('0.weight', '0.bias'\), so .*model.zero_grad\(\) if the optimizer"
    with pytest.raises(gs.TrackingError, match=message):
        monitor.metrics()


@pytest.mark.parametrize("alignment", ALIGNMENT)
@pytest.mark.parametrize("set_to_none", [False, True])
@pytest.mark.parametrize("count", [1, 2])
def test_sparse_gradients(count, set_to_none, alignment):
    """As embeddings leave them with sparse=True, read before, in and after a step."""
    model = nn.Sequential(nn.Embedding(7, 4, sparse=True), nn.Flatten(), nn.Linear(12, 3)).double()
    dense = copy.deepcopy(model)
    dense[0].sparse = False
    monitor = gs.Monitor(model, every=1, alignment=alignment)
    for _ in range(2):
        model.zero_grad(set_to_none=set_to_none)
        rows = []
        for number in range(count):
            batch = torch.randint(7, (B, 3)), torch.randint(3, (B,))
            rows.append(gradient_rows(dense, batch, losses_of))
            with monitor.step(batch_size=B, accumulation=(number, count)):
                (losses_of(model, batch).mean() / count).backward()
        expected, metrics = metrics_of(np.concatenate(rows)), monitor.metrics()
        for name in ("grad_norm", "example_grad_norm/mean", "gns/g2", "gns/tr_sigma"):
            assert metrics[name] == pytest.approx(expected[name], rel=1e-9), name
    assert model[0].weight.grad.is_sparse


def test_hooks_that_change_gradients(model):
    """With alignments statistics are those before hooks; where gradients are read, a warning."""
    batch = batch_of()
    rows = gradient_rows(model, batch, losses_of)
    for parameter in model[0].parameters():
        parameter.register_hook(lambda gradient: 2 * gradient)
    monitor = gs.Monitor(model, every=1, alignment=True, gram=True)
    with monitor.step(batch_size=B):
        losses_of(model, batch).mean().backward()
    assert_metrics(monitor.metrics(), metrics_of(rows))
    for options, accumulation in (({"alignment": False}, (0, 1)), ({}, (0, 2))):
        model.zero_grad()
        monitor = gs.Monitor(model, every=1, **options)
        message = r"hooks on '0\.weight', '0\.bias' may change"
        with pytest.warns(gs.GradStatsWarning, match=message) as heard:
            with monitor.step(batch_size=B, accumulation=accumulation):
                losses_of(model, batch).mean().backward()
        assert {warning.filename for warning in heard} == {__file__}
    model.zero_grad()
    monitor = gs.Monitor(model, every=1, alignment=False, parameters="2.*")
    with monitor.step(batch_size=B):
        losses_of(model, batch).mean().backward()
    size = sum(parameter.numel() for parameter in model[2].parameters())
    assert monitor.metrics()["grad_norm"] == pytest.approx(np.linalg.norm(rows.mean(0)[-size:]))


@pytest.mark.parametrize("discarded", ["2.", ""])
@pytest.mark.parametrize("count", [1, 2])
def test_gradients_that_hooks_take_away(model, count, discarded):
    """As optimizers do that step within the backward: with alignments none need be read."""
    batch = batch_of()
    rows = gradient_rows(model, batch, losses_of)

    def discard(parameter):
        parameter.grad = None

    for name, parameter in model.named_parameters():
        if name.startswith(discarded):
            parameter.register_post_accumulate_grad_hook(discard)
    for alignment in ALIGNMENT:
        monitor = gs.Monitor(model, every=1, alignment=alignment)
        reads = count > 1 or not alignment
        for k in range(count):
            with contextlib.ExitStack() as stack:
                if reads and k == 0:
                    stack.enter_context(pytest.warns(UserWarning, match="may change"))
                with monitor.step(batch_size=B, accumulation=(k, count)):
                    losses_of(model, batch).mean().backward()
        if reads:
            with pytest.raises(gs.TrackingError, match=r"gradient of .*'2\.bias'.* was gone"):
                monitor.metrics()
        else:
            assert monitor.metrics()["grad_norm"] == pytest.approx(np.linalg.norm(rows.mean(0)))
        model.zero_grad()


def test_bfloat16_autocast():
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    inputs, labels = batch_of(16)
    batch = (inputs.float(), labels)
    rows = gradient_rows(model, batch, losses_of)
    monitor = gs.Monitor(model, every=1, alignment=False)
    with monitor.step(batch_size=16):
        with torch.autocast("cpu", torch.bfloat16):
            loss = losses_of(model, batch).mean()
        loss.backward()
    metrics, expected = monitor.metrics(), metrics_of(rows)
    for name in ("grad_norm", "example_grad_norm/mean", "gns/tr_sigma"):
        assert metrics[name] == pytest.approx(expected[name], rel=0.03)


RUNS = {
    "reentrant": partial(checkpoint, use_reentrant=True),
    "not reentrant": partial(checkpoint, use_reentrant=False),
    "another library's": recomputing,
}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_checkpoints(model, run):
    """The gradient is read after the whole backward, and not after one inside it."""

    def checkpointed(model, batch):
        inputs = batch[0].clone().requires_grad_()
        hidden = run(model[:2], inputs)
        return functional.cross_entropy(model[2](hidden), batch[1], reduction="none")

    batch = batch_of()
    rows = gradient_rows(model, batch, losses_of)
    monitor = gs.Monitor(model, every=1, alignment=False)
    with monitor.step(batch_size=B):
        checkpointed(model, batch).mean().backward()
    names = ("grad_norm", "gns/tr_sigma", "gns/g2", "example_grad_norm/max")
    assert_metrics(monitor.metrics(), {k: v for k, v in metrics_of(rows).items() if k in names})


@pytest.mark.parametrize("value", [math.nan, 1e200])
def test_one_example_without_a_gradient_leaves_no_estimate(model, value):
    """What is counted or averaged over all examples or pairs is NaN where one of them is."""
    batch = batch_of()
    model[1] = nn.Identity()
    batch[0][2] = value
    monitor = gs.Monitor(model, every=1, gram=True)
    with monitor.step(batch_size=B):
        losses_of(model, batch).mean().backward()
    metrics = monitor.metrics()
    undefined = (
        "align/mean_cos_to_mean", "align/fraction_negative", "inner_test/theta", "ortho_test/nu",
        "stiffness/cos", "stiffness/sign", "confusion/min", "confusion/fraction_negative",
    )  # fmt: skip
    assert {name: metrics[name] for name in undefined if not math.isnan(metrics[name])} == {}
    assert metrics["nonfinite/examples"] == 1


def test_squares_of_products_that_overflow_do_not_stop_a_run(model):
    batch = batch_of()
    model[1] = nn.Identity()
    batch[0][2] = 1e80
    monitor = gs.Monitor(model, every=1, gram=True)
    with monitor.step(batch_size=B):
        losses_of(model, batch).mean().backward()
    metrics = monitor.metrics()
    assert metrics["nonfinite/examples"] == 0 and metrics["example_grad_norm/max"] > 1e79
    assert math.isnan(metrics["ortho_test/nu"])


def test_stiffness_is_that_of_pairs_that_have_gradients(model):
    """Examples without a gradient have no cosine and no sign; products of zero are not negative."""
    batch = batch_of()
    factor = torch.tensor([1.0, 0, 1, 1, 0, 1], dtype=torch.float64)

    def some(model, batch):
        return losses_of(model, batch) * factor

    rows = gradient_rows(model, batch, some)
    kept = metrics_of(rows[factor.numpy() > 0])
    gram = rows @ rows.T
    pairs = gram[~np.eye(B, dtype=bool)]
    monitor = gs.Monitor(model, every=1, gram=True)
    with monitor.step(batch_size=B):
        some(model, batch).mean().backward()
    metrics = monitor.metrics()
    assert metrics["stiffness/cos"] == pytest.approx(kept["stiffness/cos"], rel=1e-9)
    assert metrics["stiffness/sign"] == pytest.approx(kept["stiffness/sign"], rel=1e-9)
    assert metrics["confusion/fraction_negative"] == pytest.approx((pairs < 0).mean())
    monitor = gs.Monitor(model, every=1, gram=True)
    factor = torch.tensor([1.0, 0, 0, 0, 0, 0], dtype=torch.float64)
    model.zero_grad()
    with monitor.step(batch_size=B):
        some(model, batch).mean().backward()
    metrics = monitor.metrics()
    assert math.isnan(metrics["stiffness/cos"]) and math.isnan(metrics["stiffness/sign"])


@pytest.mark.parametrize("sizes", [(2, 4), (5, 1), (1, 1)])
def test_stiffness_of_unequal_micro_batches(model, sizes):
    """Over all pairs that share a micro-batch; one example by itself has none."""
    batch = batch_of(sum(sizes))
    monitor = gs.Monitor(model, every=1, gram=True)
    products, cosines = [], []
    inputs, labels = (each.split(sizes) for each in batch)
    for index, part in enumerate(zip(inputs, labels, strict=True)):
        rows = gradient_rows(model, part, losses_of)
        gram, norm = rows @ rows.T, np.linalg.norm(rows, axis=1)
        apart = ~np.eye(len(rows), dtype=bool)
        products += gram[apart].tolist()
        cosines += (gram / np.outer(norm, norm))[apart].tolist()
        with monitor.step(len(rows), accumulation=(index, 2)):
            (losses_of(model, part).mean() / 2).backward()
    metrics = monitor.metrics()
    expected = dict.fromkeys(
        ("stiffness/cos", "stiffness/sign", "confusion/min", "confusion/fraction_negative"),
        math.nan,
    )
    if products:
        values = np.mean(cosines), np.sign(products).mean(), min(products)
        expected = dict(zip(expected, (*values, np.less(products, 0).mean()), strict=True))
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize("alignment", ALIGNMENT)
@pytest.mark.parametrize("trained", [False, True])
def test_parameters_frozen_or_unfrozen_within_a_step(model, trained, alignment):
    """The micro-batches of one step measure the same parameters; between steps they may change."""
    batch = batch_of()
    monitor = gs.Monitor(model, every=1, alignment=alignment)
    weight = model[0].weight.requires_grad_(not trained)
    with monitor.step(B, accumulation=(0, 2)):
        (losses_of(model, batch).mean() / 2).backward()
    weight.requires_grad_(trained)
    state = snapshot(model)
    message = r"'0\.weight' .* between the micro-batches of one optimizer step"
    with pytest.raises(gs.TrackingError, match=message):
        with monitor.step(B, accumulation=(1, 2)):
            raise AssertionError("not reached")
    model.zero_grad()
    assert_unchanged(model, state)
    rows = gradient_rows(model, batch, losses_of)
    with monitor.step(B):
        losses_of(model, batch).mean().backward()
    assert_metrics(monitor.metrics(), {"grad_norm": metrics_of(rows)["grad_norm"]})


@pytest.mark.parametrize("unknown", [{"lr": None}, {"d": 1e-4}], ids=["Adafactor", "Prodigy"])
@pytest.mark.parametrize("tensor_rates", [False, True])
def test_an_optimizer_that_has_no_learning_rate(model, tensor_rates, unknown):
    """Where it makes its own, or multiplies by an estimate: what it would weigh is not known."""
    batch = batch_of()
    rows = gradient_rows(model, batch, losses_of)
    rate = torch.tensor(0.1, requires_grad=True) if tensor_rates else 0.1
    optimizer = torch.optim.SGD([
        {"params": model[0].parameters(), "lr": rate}, {"params": model[2].parameters(), "lr": 1.0}
    ])  # fmt: skip
    optimizer.param_groups[1].update(unknown)
    monitor = gs.Monitor(model, every=1, optimizer=optimizer)
    with monitor.step(B, ids=range(B)):
        losses_of(model, batch).mean().backward()
    metrics = monitor.metrics()
    assert metrics["grad_norm"] == pytest.approx(np.linalg.norm(rows.mean(0)))
    assert math.isnan(metrics["cabs"]) and len(monitor.self_influence) == 0
    # That of parameters that are not measured need not be known.
    model.zero_grad()
    monitor = gs.Monitor(model, every=1, optimizer=optimizer, exclude="2.*")
    with monitor.step(B, ids=range(B)):
        losses_of(model, batch).mean().backward()
    first = rows[:, : model[0].weight.numel() + model[0].bias.numel()]
    np.testing.assert_allclose(monitor.self_influence.values, 0.1 * (first**2).sum(1), rtol=1e-6)
    expected = 0.1 * noise(first)[0] / losses_of(model, batch).mean().item()
    assert monitor.metrics()["cabs"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("loss", [0.0, -1.0])
def test_no_batch_size_follows_from_a_loss_that_is_not_positive(model, loss):
    monitor = gs.Monitor(model, every=1, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    with monitor.step(B):
        losses = losses_of(model, batch_of())
        (losses - losses.detach() + loss).mean().backward()
    assert monitor.metrics()["batch_loss"] == pytest.approx(loss, abs=1e-12)
    assert math.isnan(monitor.metrics()["cabs"])


@pytest.mark.parametrize("way", ["two losses", "a vector", "a gradient"])
def test_the_loss_of_a_backward_that_does_not_start_from_one_scalar(model, way):
    """It is what the backward differentiates: the sum of losses times what they start from."""
    batch = batch_of()
    rows = gradient_rows(model, batch, losses_of)
    monitor = gs.Monitor(model, every=1)
    with monitor.step(B):
        losses = losses_of(model, batch)
        if way == "two losses":
            torch.autograd.backward([losses[:2].sum() / B, losses[2:].sum() / B])
        elif way == "a vector":
            losses.backward(torch.full_like(losses, 1 / B))
        else:
            losses.sum().backward(torch.tensor(1 / B))
    expected = {"grad_norm": np.linalg.norm(rows.mean(0)), "batch_loss": losses.mean().item()}
    assert_metrics(monitor.metrics(), expected, rtol=1e-7)


def test_parameters_that_patterns_name_may_be_frozen(model):
    """Layers without a trained parameter have no metrics; patterns of nothing are still refused."""
    batch = batch_of()
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    monitor = gs.Monitor(model, every=1, layers=["0", "2"], exclude="0.bias")
    for trained in (False, True, False):
        for parameter in model[0].parameters():
            parameter.requires_grad_(trained)
        model.zero_grad()
        rows = gradient_rows(model, batch, losses_of)
        with monitor.step(B):
            losses_of(model, batch).mean().backward()
        metrics = monitor.metrics()
        assert ("grad_norm/0" in metrics) == trained
        norms = [np.linalg.norm(rows.mean(0)[part]) for part in (slice(35), slice(-24, None))]
        expected = {"grad_norm/0": norms[0]} if trained else {}
        assert_metrics(metrics, {**expected, "grad_norm/2": norms[1]})
    assert np.isnan(monitor.history["grad_norm/0"]).tolist() == [True, False, True]
    with pytest.raises(gs.CoverageError, match="'1' matches the beginning of no"):
        gs.Monitor(model, layers=["0", "1"])
    with pytest.raises(gs.CoverageError, match="'2' matches the beginning of no"):
        gs.Monitor(model.requires_grad_(), layers=["0", "2"], exclude="2.*")
    with pytest.raises(gs.CoverageError, match=r"'1\.\*' matches no parameter"):
        gs.Monitor(model, exclude="1.*")


@pytest.mark.parametrize("factors", [(1, 9), (9, 1), (0, 1)])
def test_examples_in_the_order_of_the_alignments_that_they_show(factors):
    """Which are lengths along the mean of their own micro-batch."""
    model = nn.Linear(5, 3, bias=False).double()
    monitor = gs.Monitor(model, every=1)
    lengths = []
    for index, factor in enumerate(factors):
        inputs, labels = batch_of(4)
        part = inputs * factor, labels
        rows = gradient_rows(model, part, losses_of)
        if factor:
            lengths += (rows @ rows.mean(0) / np.linalg.norm(rows.mean(0))).tolist()
        with monitor.step(4, accumulation=(index, 2)):
            (losses_of(model, part).mean() / 2).backward()
    found = [record.alignment for record in monitor.examples(8, by="alignment")]
    # Where a mean is zero nothing lies along it.
    negative = sum(length < 0 for length in lengths)
    where = slice(len(found) - negative - 4 * factors.count(0), len(found) - negative)
    assert all(map(math.isnan, found[where]))
    del found[where]
    assert found == pytest.approx(sorted(lengths)[::-1])


@pytest.mark.parametrize("count", [1, 3])
def test_a_step_that_the_loop_skips(model, count):
    """As loops do where a loss is not finite: no run ends because there is nothing to measure."""
    batch, state = batch_of(), snapshot(model)
    monitor = gs.Monitor(model, every=1)

    def step(skipped):
        for k in range(count):
            with monitor.step(batch_size=B, accumulation=(k, count)) as micro_batch:
                loss = losses_of(model, batch).mean() / count
                if not (skipped and k == count // 2):
                    loss.backward()
        model.zero_grad()
        return micro_batch.measured

    assert step(skipped=False)
    first = monitor.metrics()
    with pytest.warns(gs.GradStatsWarning, match="no backward reached the measured param"):
        assert not step(skipped=True)
    assert monitor.metrics() == {}
    assert_unchanged(model, state)
    assert step(skipped=False)
    assert monitor.history["step"] == [0, 2] and monitor.steps == 3
    assert monitor.metrics()["grad_norm"] == first["grad_norm"]


def test_a_warning_that_is_an_error_leaves_nothing_behind(model):
    monitor, state = gs.Monitor(model, every=1), snapshot(model)
    with (
        pytest.raises(gs.GradStatsWarning, match="no backward"),
        monitor.step(batch_size=B) as step,
    ):
        losses_of(model, batch_of())
    assert_unchanged(model, state)
    assert monitor.steps == 0 and not step.measured
    take_steps(model, monitor, [batch_of()])
    assert monitor.history["step"] == [0]


def test_a_step_whose_losses_do_not_use_what_is_measured(model):
    """One of several heads, trained in turn."""
    heads = nn.ModuleList([model, copy.deepcopy(model)])
    monitor = gs.Monitor(heads, every=1, parameters="1.*")
    state = snapshot(heads)
    for turn in range(3):
        unused = pytest.warns(gs.GradStatsWarning, match="no backward reached the measured param")
        with contextlib.nullcontext() if turn % 2 else unused:
            with monitor.step(B) as step:
                losses_of(heads[turn % 2], batch_of()).mean().backward()
        assert step.measured == bool(monitor.metrics()) == bool(turn % 2)
        heads.zero_grad()
        assert_unchanged(heads, state)
    assert monitor.steps == 3 and monitor.history["step"] == [1]


def test_a_state_that_is_loaded_inside_a_step(model):
    """The model is given back, and the step is not measured."""
    batch, state = batch_of(), snapshot(model)
    monitor = gs.Monitor(model, every=1)
    with monitor.step(batch_size=B) as step:
        losses_of(model, batch).mean().backward()
        monitor.load_state_dict(gs.Monitor(model, every=1).state_dict())
    model.zero_grad()
    assert not step.measured and monitor.metrics() == {}
    assert_unchanged(model, state)


def test_a_forward_under_no_grad(model):
    """PyTorch says that there is nothing to differentiate, as it does without the monitor."""
    monitor = gs.Monitor(model, every=1)
    with pytest.raises(RuntimeError, match="does not require grad"), monitor.step(B):
        with torch.no_grad():
            loss = losses_of(model, batch_of()).mean()
        loss.backward()


def test_the_optimizer_of_another_model(model):
    """Its learning rates weigh nothing here: the self-influence of zero has a reason to be told."""
    optimizer = torch.optim.SGD(copy.deepcopy(model).parameters(), lr=0.1)
    monitor = gs.Monitor(model, every=1, optimizer=optimizer)
    with pytest.warns(gs.GradStatsWarning, match="holds none of the measured parameters") as heard:
        with monitor.step(B, ids=range(B)):
            losses_of(model, batch_of()).mean().backward()
    assert heard[0].filename == __file__
    assert set(monitor.self_influence.values) == {0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_orthogonal_gradients_are_not_against_each_other(dtype):
    """As those of factors of users and items are, where no two examples share one."""
    users, items = (nn.Embedding(99, 7, dtype=dtype) for _ in range(2))
    monitor = gs.Monitor(nn.ModuleList([users, items]), every=1, gram=True)
    one, other = torch.randperm(99)[:32], torch.randperm(99)[:32]
    with monitor.step(32):
        loss = ((users(one) * items(other)).sum(1).float() - 1).square().mean()
        loss.backward()
    metrics = monitor.metrics()
    assert metrics["confusion/fraction_negative"] == metrics["align/fraction_negative"] == 0


def test_infinite_products_of_both_signs():
    """Without a warning of NumPy, which tests turn into errors."""
    model = nn.Linear(1, 1, bias=False)
    x = torch.tensor([[torch.inf], [3.0], [-2.0]])
    monitor = gs.Monitor(model, every=1)
    for _ in range(7):
        model.zero_grad()
        with monitor.step(batch_size=3):
            model(x).mean().backward()
    for by in ("norm", "alignment"):
        records = {each.position: each for each in monitor.examples(3, by=by)}
        assert [records[row].norm for row in range(3)] == pytest.approx([np.inf, 3, 2])
        assert all(math.isnan(each.alignment) for each in records.values())
    assert monitor.metrics()["nonfinite/examples"] == 1 and len(monitor.spikes) == 1
    assert monitor.histograms()["example_grad_norm"].tolist() == pytest.approx([3, 2])
