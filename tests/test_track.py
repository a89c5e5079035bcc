"""Norms inside the user's own training step: nothing of it changes, the scale is right."""

from __future__ import annotations

import copy
import re
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import gradstats as gs
from gradstats.capture.parameters._tensors import node_of
from tests.dispatched import Operations
from tests.losses import losses_of
from tests.oracle import (
    assert_products,
    assert_sqnorms,
    assert_unchanged,
    check_model,
    flat,
    oracle_gradients,
    oracle_sqnorms,
    snapshot,
)

B = 6


@pytest.fixture
def model():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(144, 8), nn.Linear(8, 3)
    ).double()


@pytest.fixture
def batch():
    return torch.randn(B, 1, 8, 8, dtype=torch.float64), torch.randint(3, (B,))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weighted", [False, True])
def test_losses_of_low_precision(dtype, weighted):
    """What multiplies them is rounded, for all examples alike, and divided out as it was."""
    model, x = nn.Linear(3, 2).double(), torch.randn(13, 3, dtype=torch.float64)
    weights = torch.linspace(0.1, 0.9, 13) if weighted else None
    with gs.track(model, batch_size=13, weights=weights, alignment=True) as tracker:
        losses = model(x).pow(2).sum(1)
        tracker.backward(losses.to(dtype))
    stats = gs.per_example_norms(model, x, lambda model, x: model(x).pow(2).sum(1))
    torch.testing.assert_close(tracker.stats.norm, stats.norm)


class Picks(nn.Module):
    """Takes rows of a table by numbers that stand in its forward, as many as there are examples."""

    def __init__(self, meet):
        super().__init__()
        self.table, self.meet = nn.Parameter(torch.randn(3, 4).double()), meet

    def forward(self, x):
        return self.meet(x, self.table[torch.tensor([2, 0, 1])])


@pytest.mark.parametrize("opened", [gs.track, lambda m, batch_size: gs.Monitor(m, 1).step(3)])
@pytest.mark.parametrize(
    "meet",
    [
        lambda x, rows: x * rows[0],
        lambda x, rows: x * rows.mean(0),
        lambda x, rows: x @ rows.T.cov(),
    ],
    ids=["one row", "their mean", "their covariance"],
)
def test_given_numbers_that_turn_out_to_belong_to_no_example(meet, opened):
    """Of a loss that is a scalar already nothing else would show it."""
    model, x = Picks(meet), torch.randn(3, 4).double()
    with pytest.raises(
        (gs.ExampleAxisError, gs.CoupledExamplesError),
        match=r"tensor made a tensor of shape \(3,\)\. .* keep it in the model",
    ):
        with opened(model, batch_size=3):
            model(x).square().mean().backward()
    assert model.table.grad is None


def test_given_numbers_of_the_examples():
    model, x = Picks(lambda x, rows: x * rows), torch.randn(3, 4).double()
    with gs.track(model, batch_size=3) as tracker:
        model(x).square().sum(1).mean().backward()
    rows = model.table.detach()[[2, 0, 1]]
    torch.testing.assert_close(tracker.stats.norm, (2 * x.square() * rows).norm(dim=1))


@pytest.mark.parametrize(
    "meet",
    [
        lambda x, given: x @ given,
        lambda x, given: torch.einsum("ij,bcj->bic", given, x),
        lambda x, given: functional.conv1d(x, given.expand(3, 3, 3), padding=1),
        lambda x, given: x * given.div_(given.sum()),
        lambda x, given: x * (x.new_tensor([[1.0], [2.0], [4.0]]) - x.new_tensor([1.0, 2.0, 5.0])),
    ],
    ids=["product", "equation", "kernel", "changed in place", "of the batch's dtype"],
)
def test_given_numbers_beside_those_of_the_batch_belong_to_no_example(meet):
    """A colour transform or a blur that stands in a forward, with as many rows as examples."""

    def loss_fn(model, x):
        given = torch.tensor([[0.3, 0.6, 0.1], [-0.2, -0.3, 0.4], [0.6, -0.5, -0.1]]).double()
        return meet(model(meet(x, given.clone())), given).square().flatten(1).sum(1)

    check_model(nn.Conv1d(3, 3, 1).double(), torch.randn(3, 3, 3).double(), loss_fn)


def test_a_batch_of_another_size_is_told_where_its_size_is_from(model, batch):
    """As the last, smaller batch under a batch_size= that is written down once."""
    tracked = gs.track(model, batch_size=B + 2)
    with pytest.raises(
        gs.ExampleAxisError, match=r"(?s)expected: 8 .* it is batch_size= of a context"
    ):
        with tracked as tracker:
            tracker.backward(losses_of(model, batch))
    pieces = [torch.randn(size, 1, 8, 8, dtype=torch.float64) for size in (2, 3)]
    with pytest.raises(gs.ExampleAxisError, match=r"the size of the batch's first tensor"):
        gs.per_example_norms(
            model, pieces, lambda m, b: torch.stack([m(piece).square().mean() for piece in b])
        )


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_scale_of_a_scalar_loss_is_divided_out(model, batch, reduction):
    expected = oracle_sqnorms(model, batch, losses_of)
    with gs.track(model, batch_size=B, loss_reduction=reduction) as tracker:
        functional.cross_entropy(model(batch[0]), batch[1], reduction=reduction).backward()
    assert_sqnorms(tracker.stats, expected, 1e-9)
    assert tracker.stats.loss is None


def test_a_scalar_beside_what_was_computed_outside_of_the_context(model, batch):
    """Of which nothing is known but that no parameter was used in it there."""
    x, y = batch
    other = nn.Linear(x.shape[-1], 1).to(x)
    outside = other(x).square().mean().sqrt()
    with gs.track(model, batch_size=B) as tracker:
        losses = functional.cross_entropy(model(x), y, reduction="none")
        (losses[None].mean() * 2 + 3 * outside).backward()
    expected = oracle_sqnorms(model, batch, lambda m, b: 2 * losses_of(m, b))
    assert_sqnorms(tracker.stats, expected, 1e-4)
    (slope,) = torch.autograd.grad(3 * other(x).square().mean().sqrt(), other.bias)
    torch.testing.assert_close(other.bias.grad, slope)


def test_weights(model, batch):
    expected = oracle_sqnorms(model, batch, losses_of)
    weights = torch.rand(B) + 0.5
    with gs.track(model, batch_size=B, weights=weights) as tracker:
        (losses_of(model, batch) * weights).sum().backward()
    assert_sqnorms(tracker.stats, expected, 1e-9)
    gradient = model[3].weight.grad.clone()
    model.zero_grad()
    with gs.track(model, batch_size=B, weights=weights) as tracker:
        tracker.backward(losses_of(model, batch))
    assert_sqnorms(tracker.stats, expected, 1e-9)
    torch.testing.assert_close(model[3].weight.grad, gradient)


def scaled_step(model, batch, scaler, own_backward, then=lambda: None):
    """Return the statistics of a scaled step, by either of two backwards; then what follows."""
    with gs.track(model, batch_size=B, scaler=scaler) as tracker:
        losses = losses_of(model, batch)
        if own_backward:
            scaler.scale(losses.mean()).backward()
        else:
            tracker.backward(losses)
        then()
    return tracker.stats


@pytest.mark.parametrize("own_backward", [True, False])
def test_the_scale_of_a_grad_scaler_is_divided_out(model, batch, own_backward):
    expected = oracle_sqnorms(model, batch, losses_of)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Operations() as operations:
        stats = scaled_step(model, batch, scaler, own_backward)
    assert_sqnorms(stats, expected, 1e-9)
    assert "_local_scalar_dense" not in operations.found  # the host waits for it
    plain = copy.deepcopy(model)
    plain.zero_grad()
    losses_of(plain, batch).mean().backward()
    scaler.unscale_(optimizer)
    torch.testing.assert_close(model[0].weight.grad, plain[0].weight.grad)


def test_a_grad_scaler_that_scaled_nothing(model, batch):
    """Its scale would be divided out of gradients that never had it."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with pytest.raises(gs.TrackingError, match=r"has not scaled any loss.*scaler\.scale\(loss\)"):
        with gs.track(model, batch_size=B, scaler=scaler):
            losses_of(model, batch).mean().backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    disabled = torch.amp.GradScaler("cpu", enabled=False)
    expected = oracle_sqnorms(model, batch, losses_of)
    assert_sqnorms(scaled_step(model, batch, disabled, own_backward=True), expected, 1e-9)


@pytest.mark.parametrize("own_backward", [True, False])
def test_a_grad_scaler_that_is_updated_inside_the_context(model, batch, own_backward):
    """The scale is the one at the backward."""
    expected = oracle_sqnorms(model, batch, losses_of)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        scaler.step(optimizer)
        scaler.update()

    stats = scaled_step(model, batch, scaler, own_backward, then=step)
    assert scaler.get_scale() == 2048
    assert_sqnorms(stats, expected, 1e-9)


@pytest.mark.parametrize("fused", [True, False])
def test_a_training_run_is_the_same_with_and_without(model, batch, fused):
    """Clipping and the optimizer run inside the context, for several steps."""
    plain = copy.deepcopy(model)
    optimizers = [
        torch.optim.Adam(m.parameters(), lr=0.01, weight_decay=0.1) for m in (model, plain)
    ]
    for _ in range(4):
        optimizers[1].zero_grad()
        losses_of(plain, batch).mean().backward()
        size = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizers[1].step()

        expected = oracle_sqnorms(model, batch, losses_of)
        with gs.track(model, batch_size=B, fused=fused) as tracker:
            optimizers[0].zero_grad()
            tracker.backward(losses_of(model, batch))
            tracked_size = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizers[0].step()
        assert_sqnorms(tracker.stats, expected, 1e-9)
        torch.testing.assert_close(tracked_size, size, rtol=1e-12, atol=0)
    for got, want in zip(model.parameters(), plain.parameters(), strict=True):
        if fused:
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)
        else:
            assert torch.equal(got, want)


def penalty_of(model):
    return 0.1 * sum(parameter.square().sum() for parameter in model.parameters())


ADDED = {
    "+": (lambda loss, penalty: loss + penalty, 1),
    "after it": (lambda loss, penalty: penalty + loss, 1),
    "alpha": (lambda loss, penalty: torch.add(loss, penalty, alpha=3), 3),
    "sub": (lambda loss, penalty: torch.sub(loss, penalty), -1),
    "add_": (lambda loss, penalty: loss.add_(penalty), 1),
    "added in place": (lambda loss, penalty: penalty.add_(loss), 1),
    "alpha in place": (lambda loss, penalty: penalty.mul_(2).add_(loss, alpha=1), 2),
    "added to a total": (lambda loss, penalty: torch.zeros(1).double().add_(penalty).add_(loss), 1),
    "beside a number made unseen": (
        lambda loss, penalty: torch.Tensor([0]).double().add_(loss).add_(penalty),
        1,
    ),
    "one by one": (lambda loss, penalty: (loss + penalty / 2)[None] + penalty / 2, 1),
}


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(("reduction", "size"), [("mean", B), ("sum", B), ("mean", 1)])
@pytest.mark.parametrize(("join", "times"), ADDED.values(), ids=ADDED)
def test_a_penalty_on_a_reduced_loss_is_a_part_of_every_examples(
    model, batch, join, times, reduction, size, fused
):
    batch = [each[:size] for each in batch]

    def losses(model, batch):
        share = times * penalty_of(model) / (1 if reduction == "mean" else size)
        return losses_of(model, batch) + share

    def loss_of(model):
        return join(getattr(losses_of(model, batch), reduction)(), penalty_of(model))

    plain = copy.deepcopy(model)
    loss_of(plain).backward()
    state = snapshot(model)
    with gs.track(model, batch_size=size, loss_reduction=reduction, fused=fused) as tracker:
        loss_of(model).backward()
    assert_sqnorms(tracker.stats, oracle_sqnorms(plain, batch, losses), 1e-9)
    for got, want in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad, rtol=1e-12, atol=1e-15)
        assert fused or torch.equal(got.grad, want.grad)
    model.zero_grad()
    assert_unchanged(model, state)


@pytest.mark.parametrize("join", [torch.add, lambda *parts: torch.stack(parts).sum()])
def test_a_penalty_whose_shares_are_not_known_is_refused_with_the_ways_on(model, batch, join):
    state = snapshot(model)
    weights = torch.ones(B) / B if join is torch.add else None
    with (
        pytest.raises(gs.ExampleAxisError, match=r"parameters alone.* scalar .* \+ penalty\)"),
        gs.track(model, batch_size=B, weights=weights),
    ):
        join(losses_of(model, batch).mean(), penalty_of(model)).backward()
    assert_unchanged(model, state)


def test_a_penalty_among_weighted_losses(model, batch):
    """As its refusal says: the losses are reduced as they were without it."""
    weights = torch.rand(B, dtype=torch.float64) + 0.5
    with (
        pytest.raises(
            gs.ExampleAxisError, match=r"\(weight \* losses \+ penalty\), reduced as before"
        ),
        gs.track(model, batch_size=B, weights=weights),
    ):
        ((losses_of(model, batch) * weights).sum() + penalty_of(model)).backward()

    def losses(model, batch):
        return losses_of(model, batch) + penalty_of(model)

    with gs.track(model, batch_size=B, weights=weights) as tracker:
        (losses(model, batch) * weights).sum().backward()
    assert_sqnorms(tracker.stats, oracle_sqnorms(model, batch, losses), 1e-9)


class Uncertain(nn.Module):
    """Two tasks, whose losses are weighed by trained variances."""

    def __init__(self):
        super().__init__()
        self.body, self.variances = nn.Linear(4, 3), nn.Parameter(torch.tensor([0.3, -0.5]))


def tasks(model, batch, reduction):
    out = model.body(batch[0])
    losses = functional.cross_entropy(out, batch[1], reduction=reduction)
    return losses, functional.smooth_l1_loss(out[:, 0], batch[0][:, 0], reduction=reduction)


WEIGHED = {
    "one by one": lambda s, parts: sum((-s[i]).exp() * part + s[i] for i, part in enumerate(parts)),
    "together": lambda s, parts: ((-s).exp() * torch.stack([*parts]) + s).sum(),
    "a product": lambda s, parts: torch.stack([*parts]) @ (-s).exp() + s.sum(),
}


@pytest.mark.parametrize("weighed", WEIGHED.values(), ids=WEIGHED)
def test_trained_weights_of_reduced_losses(weighed):
    """Refused with the ways on, each of which is right."""
    model = Uncertain().double()
    batch = torch.randn(B, 4).double(), torch.randint(3, (B,))
    ways = r"parameters alone.*weight of a loss.*examples were summed.*weight \* losses.*exclude="
    with pytest.raises(gs.ExampleAxisError, match=ways), gs.track(model, batch_size=B):
        weighed(model.variances, tasks(model, batch, "mean")).backward()

    def losses(m, batch):
        return WEIGHED["one by one"](m.variances, tasks(m, batch, "none"))

    expected = oracle_sqnorms(model, batch, losses)
    with gs.track(model, batch_size=B) as tracker:
        losses(model, batch).mean().backward()
    assert_sqnorms(tracker.stats, expected, 1e-9)
    with gs.track(model, batch_size=B, exclude="variances") as tracker:
        weighed(model.variances, tasks(model, batch, "mean")).backward()
    del expected["variances"]
    assert_sqnorms(tracker.stats, expected, 1e-9)


def test_a_refusal_names_the_first_of_many_parameters():
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(30)))
    message = r"parameter '1.bias' \(of module '1'\) and 56 more: what is computed"
    with (
        pytest.raises(gs.ExampleAxisError, match=message) as caught,
        gs.track(model, batch_size=B),
    ):
        (model(torch.randn(B, 3)).mean() * penalty_of(model)).backward()
    assert len(str(caught.value)) < 1000 and len(caught.value.parameters) == 60


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("checkpointed", [True, False])
def test_gradients_that_say_how_losses_weigh(checkpointed, fused):
    """As adaptive weights do: numbers, of which nothing is differentiated."""
    model = Towers().double()
    parametrizations.weight_norm(model.outer)
    unused = nn.Parameter(torch.ones(2, dtype=torch.float64))
    model.register_parameter("unused", unused)
    batch = torch.randn(B, 5, dtype=torch.float64), torch.randint(3, (B,))

    def size_of(loss, m):
        inputs = [p for name, p in m.named_parameters() if not name.startswith("inner")]
        if not checkpointed:
            inputs.append(m.outer.weight)  # which is computed
        gradients = torch.autograd.grad(loss, inputs, retain_graph=True, materialize_grads=True)
        assert [each.shape for each in gradients] == [each.shape for each in inputs]
        return sum(each.square().sum() for each in gradients).sqrt()

    def adapted(m, b):
        with nullcontext() if checkpointed else parametrize.cached():
            hidden = checkpoint(m, b[0], use_reentrant=False) if checkpointed else m(b[0])
            losses = functional.cross_entropy(hidden, b[1], reduction="none")
            penalties = hidden.square().sum(1)
            ratio = size_of(losses.mean(), m) / size_of(penalties.mean(), m)
            return losses + ratio * penalties

    expected = oracle_sqnorms(model, batch, adapted)
    plain = copy.deepcopy(model)
    adapted(plain, batch).mean().backward()
    with gs.track(model, batch_size=B, fused=fused) as tracker:
        tracker.backward(adapted(model, batch))
    assert_sqnorms(tracker.stats, expected, 1e-9)
    for got, want in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad)
    with pytest.raises(gs.CoupledExamplesError, match="which sums over the examples"):
        gs.per_example_norms(model, batch, adapted)


@pytest.mark.parametrize("place", ["beside the loss", "alone"])
def test_a_penalty_with_a_backward_in_the_context_is_refused(model, batch, place):
    """Its gradient would be in param.grad and in no example's."""
    state = snapshot(model)
    with (
        pytest.raises(gs.ExampleAxisError, match=r"without any data.*\(losses \+ penalty\)"),
        gs.track(model, batch_size=B),
    ):
        losses = [losses_of(model, batch).mean(), penalty_of(model)]
        torch.autograd.backward(losses if place == "beside the loss" else losses[1])
    assert_unchanged(model, state)


def test_a_penalty_among_the_losses_and_outside_the_context(model, batch):
    """The two ways on: each example's loss contains it, or none does."""

    def penalised(model, batch):
        return losses_of(model, batch) + penalty_of(model)

    plain = copy.deepcopy(model)
    penalised(plain, batch).mean().backward()
    with gs.track(model, batch_size=B) as tracker:
        penalised(model, batch).mean().backward()
    assert_sqnorms(tracker.stats, oracle_sqnorms(plain, batch, penalised), 1e-9)
    for got, want in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad)
    model.zero_grad()
    with gs.track(model, batch_size=B) as tracker:
        losses_of(model, batch).mean().backward()
    penalty_of(model).backward()
    assert_sqnorms(tracker.stats, oracle_sqnorms(plain, batch, losses_of), 1e-9)
    for got, want in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad)


def test_clipping_as_the_readme_has_it(model, batch):
    """A second pass of losses weighted by the norms of the first: Σ_i g_i min(1, C/‖g_i‖) / B."""
    gradients = oracle_gradients(model, batch, losses_of)
    lengths = sum(g.flatten(1).square().sum(1) for g in gradients.values()).sqrt()
    clip = lengths.median()
    assert 0 < (lengths > clip).sum() < B
    norm = gs.per_example_norms(model, batch, losses_of).norm
    weight = (clip / norm).clamp(max=1)
    (weight * losses_of(model, batch)).mean().backward()
    for name, parameter in model.named_parameters():
        rows = gradients[name].flatten(1)
        clipped = (rows * (clip / lengths).clamp(max=1)[:, None]).mean(0)
        torch.testing.assert_close(parameter.grad.flatten(), clipped, rtol=1e-10, atol=1e-12)


def test_a_second_backward_with_other_weights_is_told_how(model, batch):
    """As clipping by the norms needs one: the graph of the first belongs to its context."""
    with gs.track(model, batch_size=B) as tracker:
        losses = losses_of(model, batch)
        losses.mean().backward(retain_graph=True)
    weight = (1 / tracker.stats.norm).clamp(max=1)
    message = (
        "a backward reached parameter '4.weight' (of module '4') after its tracking context was "
        "closed. Run the backward inside the context; for a second one, as clipping by the "
        "norms needs, run the forward again outside of it."
    )
    with pytest.raises(gs.TrackingError, match=f"^{re.escape(message)}$"):
        (weight * losses).mean().backward()


def test_gradients_accumulate_over_contexts(model, batch):
    plain = copy.deepcopy(model)
    losses_of(plain, batch).mean().backward()
    halves = [tuple(part[rows] for part in batch) for rows in (slice(0, 3), slice(3, 6))]
    collected = []
    for half in halves:
        with gs.track(model, batch_size=3, weights=torch.full((3,), 1 / B)) as tracker:
            tracker.backward(losses_of(model, half))
        collected.append(tracker.stats.sqnorm)
    expected = sum(oracle_sqnorms(plain, batch, losses_of).values())
    torch.testing.assert_close(torch.cat(collected), expected, rtol=1e-9, atol=0)
    for got, want in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad)


def test_hooks_and_gradients_of_the_user_are_left_alone(model, batch):
    seen = []
    handle = model[3].weight.register_hook(lambda grad: seen.append(grad.clone()))
    model[0].register_forward_hook(lambda *_: seen.append("forward"))
    gs.per_example_norms(model, batch, losses_of)
    assert seen == ["forward"]  # no weight gradient was made, so nothing called its hook
    assert all(p.grad is None for p in model.parameters())
    with gs.track(model, batch_size=B) as tracker:
        tracker.backward(losses_of(model, batch))
    assert seen[1] == "forward"
    torch.testing.assert_close(seen[2], model[3].weight.grad)
    handle.remove()


@pytest.mark.parametrize("where", ["forward", "loss"])
def test_an_exception_leaves_nothing_behind(model, batch, where):
    state = snapshot(model)
    kind = RuntimeError("the user's own")

    def fails(m, b):
        if where == "forward":
            handle = m[3].register_forward_hook(lambda *_: (_ for _ in ()).throw(kind))
            try:
                return losses_of(m, b)
            finally:
                handle.remove()
        losses_of(m, b)
        raise kind

    with pytest.raises(RuntimeError, match="the user's own"):
        gs.per_example_norms(model, batch, fails)
    assert_unchanged(model, state)
    with pytest.raises(RuntimeError, match="the user's own"), gs.track(model, batch_size=B):
        fails(model, batch)
    assert_unchanged(model, state)
    assert_sqnorms(
        gs.per_example_norms(model, batch, losses_of), oracle_sqnorms(model, batch, losses_of), 1e-9
    )


def test_frozen_parameters_and_patterns(model, batch):
    model[0].weight.requires_grad_(False)
    expected = oracle_sqnorms(model, batch, losses_of)
    assert "0.weight" not in expected
    assert_sqnorms(gs.per_example_norms(model, batch, losses_of), expected, 1e-9)
    some = gs.per_example_norms(
        model, batch, losses_of, parameters=["3.*", "4.*"], exclude="*.bias"
    )
    assert_sqnorms(some, {n: expected[n] for n in ("3.weight", "4.weight")}, 1e-9)


def test_a_layer_that_is_skipped_reports_zeros_afterwards(batch):
    class Skips(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(64, 64)
            self.head = nn.Linear(64, 3)
            self.skip = False

        def forward(self, x):
            x = x.flatten(1)
            return self.head(x if self.skip else self.body(x).tanh())

    model = Skips().double()
    assert (gs.per_example_norms(model, batch, losses_of).by_parameter["body.weight"] > 0).all()
    model.skip = True
    stats = gs.per_example_norms(model, batch, losses_of)
    assert_sqnorms(stats, oracle_sqnorms(model, batch, losses_of), 1e-9)
    assert not stats.by_parameter["body.weight"].any()


def test_the_result(model, batch):
    stats = gs.per_example_norms(model.float(), (batch[0].float(), batch[1]), losses_of)
    assert stats.sqnorm.dtype == stats.norm.dtype == torch.float32
    torch.testing.assert_close(stats.norm**2, stats.sqnorm)
    torch.testing.assert_close(stats.sqnorm, sum(stats.by_parameter.values()))
    assert list(stats.by_parameter) == [name for name, _ in model.named_parameters()]
    assert (stats.error_bound >= 0).all() and (stats.error_bound < 1e-5).all()
    assert not stats.loss.requires_grad


def test_a_context_in_a_shell(model, batch):
    tracker = gs.track(model, batch_size=len(batch[0]))
    shown = f"track(batch_size={len(batch[0])}, stats="
    assert repr(tracker) == f"{shown}None)"
    with tracker:
        losses = losses_of(model, batch)
        assert repr(tracker) == f"{shown}None)"
        tracker.backward(losses)
    assert repr(tracker) == f"{shown}{tracker.stats!r})"
    low, high = tracker.stats.norm.min(), tracker.stats.norm.max()
    parameters = len(list(model.parameters()))
    assert repr(tracker.stats) == (
        f"GradientNorms(examples={len(batch[0])}, parameters={parameters}, "
        f"norm={low:.4g}…{high:.4g})"
    )


def test_a_backward_that_is_told_what_to_compute():
    """Norms are of all parameters, gradients of those that were asked for."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    batch = torch.randn(6, 5, dtype=torch.float64), torch.randint(3, (6,))
    expected = oracle_sqnorms(model, batch, losses_of)
    with gs.track(model, batch_size=6) as tracker:
        losses_of(model, batch).mean().backward(inputs=[model[2].weight])
    assert_sqnorms(tracker.stats, expected, 1e-9)
    asked = [name for name, p in model.named_parameters() if p.grad is not None]
    assert asked == ["2.weight"]


class Towers(nn.Module):
    """Two layers of every kind of use, of which one may be trained and the other not."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(5, 7)
        self.norm = nn.LayerNorm(7)
        self.scale = nn.Parameter(torch.rand(7))
        self.mix = nn.Parameter(torch.randn(7, 7))
        self.spread = nn.Conv1d(1, 2, 3)
        self.outer = nn.Linear(7, 3)

    def forward(self, x):
        hidden = self.norm(self.inner(x)).tanh() * self.scale
        hidden = hidden @ self.mix.exp() + self.spread(hidden[:, None]).sum((1, 2))[:, None]
        return self.outer(hidden)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(
    "frozen", ["inner", "norm", "scale", "mix", "spread", "outer", "outer.weight"]
)
def test_what_is_frozen_inside_the_context_has_no_gradient(frozen, fused):
    model = Towers().double()
    batch = torch.randn(B, 5, dtype=torch.float64), torch.randint(3, (B,))

    def train(wanted):
        for name, parameter in model.named_parameters():
            if name.startswith(frozen):
                parameter.requires_grad = wanted

    train(False)
    expected = oracle_sqnorms(model, batch, losses_of)
    plain = copy.deepcopy(model)
    losses_of(plain, batch).mean().backward()
    train(True)
    with gs.track(model, batch_size=B, fused=fused) as tracker:
        train(False)
        losses = losses_of(model, batch)
        train(True)  # what was frozen as it was used is, whatever follows
        tracker.backward(losses)
    for name, parameter in model.named_parameters():
        own = tracker.stats.by_parameter[name]
        torch.testing.assert_close(own, expected.get(name, torch.zeros_like(own)))
        want = plain.get_parameter(name).grad
        assert (want is None) == (parameter.grad is None), name
        if want is not None:
            torch.testing.assert_close(parameter.grad, want)
        assert type(parameter) is nn.Parameter and parameter.requires_grad
    train(False)
    train(True)
    gs.per_example_norms(model, batch, losses_of)


@pytest.mark.parametrize("detach", [torch.Tensor.detach_, torch.detach_])
@pytest.mark.parametrize("fused", [True, False])
def test_what_is_detached_in_place_inside_the_context_has_no_gradient(detach, fused):
    model = Towers().double()
    batch = torch.randn(B, 5, dtype=torch.float64), torch.randint(3, (B,))
    frozen = "inner.weight", "norm.bias", "scale", "mix", "spread.weight", "outer.bias"
    plain = copy.deepcopy(model)
    for name in frozen:
        plain.get_parameter(name).requires_grad_(False)
    expected = oracle_sqnorms(plain, batch, losses_of)
    with gs.track(model, batch_size=B, fused=fused) as tracker:
        for name in frozen:
            detach(model.get_parameter(name))
        tracker.backward(losses_of(model, batch))
    for name, parameter in model.named_parameters():
        own = tracker.stats.by_parameter[name]
        torch.testing.assert_close(own, expected.get(name, torch.zeros_like(own)))
        assert parameter.requires_grad == (name not in frozen)


def test_what_is_frozen_stays_so_after_the_context(model, batch):
    with gs.track(model, batch_size=B) as tracker:
        model[3].requires_grad_(False)
        tracker.backward(losses_of(model, batch))
    assert not tracker.stats.by_parameter["3.weight"].any()
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert [p.requires_grad for p in model.parameters()] == [True, True, False, False, True, True]


def test_what_is_frozen_already_and_what_is_trained_already_stays_so(model, batch):
    with gs.track(model, batch_size=B) as tracker:
        model[0].requires_grad_(True)
        model[3].requires_grad_(False)
        model[3].requires_grad_(False)
        assert type(model[3].weight) is nn.Parameter
        tracker.backward(losses_of(model, batch))
    expected = oracle_sqnorms(model, batch, losses_of)
    for name, own in tracker.stats.by_parameter.items():
        torch.testing.assert_close(own, expected.get(name, torch.zeros_like(own)))


def test_a_parameter_that_is_trained_from_within_the_context_is_named(model, batch):
    model[3].requires_grad_(False)
    expected = oracle_sqnorms(model, batch, losses_of)
    with gs.track(model, batch_size=B) as tracker:  # as switching between adapters does
        model[3].requires_grad_(True)
        model[3].requires_grad_(False)
        tracker.backward(losses_of(model, batch))
    assert_sqnorms(tracker.stats, expected, 1e-9)
    model.zero_grad()
    with (
        pytest.raises(gs.CoverageError, match=r"\['3\.bias', '3\.weight'\].*before the context"),
        gs.track(model, batch_size=B) as tracker,
    ):
        model[3].requires_grad_(True)
        tracker.backward(losses_of(model, batch))
    assert all(parameter.grad is None for parameter in model.parameters())


class BuildsItsHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(5, 7)
        self.head = None

    def forward(self, x):
        hidden = self.body(x)
        if self.head is None:
            self.head = nn.Linear(hidden.shape[1], 3, dtype=hidden.dtype)
        return self.head(hidden)


def test_a_parameter_that_a_forward_makes_is_named():
    """Its gradient would be missing from the norms of the first batch."""
    batch = torch.randn(B, 5, dtype=torch.float64), torch.randint(3, (B,))
    for call in (
        lambda m: gs.per_example_norms(m, batch, losses_of),
        lambda m: gs.inner_products(m, batch, m, batch, losses_of),
    ):
        model = BuildsItsHead().double()
        with pytest.raises(gs.CoverageError, match=r"'head\.bias', 'head\.weight'.* one forward"):
            call(model)
        call(model)
    model = BuildsItsHead().double()
    with pytest.raises(gs.CoverageError, match=r"'head\.bias', 'head\.weight'.* one forward"):
        with gs.track(model, batch_size=B) as tracker:
            tracker.backward(losses_of(model, batch))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_parameter_of_another_model_may_be_made_inside_the_context(model, batch):
    expected = oracle_sqnorms(model, batch, losses_of)
    with gs.track(model, batch_size=B) as tracker:
        critic = nn.Linear(3, 3, bias=False).double()
        nn.init.eye_(critic.weight)
        tracker.backward(
            functional.cross_entropy(critic(model(batch[0])), batch[1], reduction="none")
        )
    assert_sqnorms(tracker.stats, expected, 1e-9)
    assert critic.weight.grad is not None


# Ways to a layer's weights, each through what stands for a parameter in a graph.
WAYS = {
    "einsum": lambda m, x: torch.einsum("bd,dc->bc", x, m.w),
    "matmul": lambda m, x: x @ m.w,
    "linear": lambda m, x: functional.linear(x, m.w.T, m.v[:3]),
    "layer norm": lambda m, x: functional.layer_norm(x, (4,), m.v) @ m.w,
}


def halved(model):
    for parameter in model.parameters():
        parameter.data = parameter.data / 2


def flattened(model):
    """The numbers of both parameters stand in one piece of memory, one after the other."""
    flat = torch.randn(16, dtype=torch.float64)
    model.w.data, model.v.data = flat[:12].view(4, 3), flat[12:]
    model.w.data = flat[4:].view(4, 3)


PUTS = {
    "other numbers": halved,
    "other places in the same memory": flattened,
    "another dtype": lambda model: model.double(),
    "another dtype in between": lambda model: halved(model.double().float().double()),
}


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("put", PUTS.values(), ids=PUTS)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_numbers_that_are_put_in_the_place_of_a_parameters(way, put, fused):
    """As who evaluates averaged weights inside a step does, after a forward that used others."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.v = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(4))

        def forward(self, x):
            return way(self, x.to(self.w.dtype))

    model = Layer() if put is PUTS["another dtype"] else Layer().double()
    batch = torch.randn(B, 4, dtype=torch.float64), torch.randint(3, (B,))
    with gs.track(model, batch_size=B, fused=fused) as tracker:
        losses_of(model, batch)
        put(model)
        tracker.backward(losses_of(model, batch))
    assert_sqnorms(tracker.stats, oracle_sqnorms(model, batch, losses_of), 1e-12)
    got = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    model.zero_grad()
    losses_of(model, batch).mean().backward()
    for name, each in model.named_parameters():
        if each.grad is not None:
            torch.testing.assert_close(got[name], each.grad, rtol=1e-12, atol=1e-15)


class Twice(nn.Module):
    """Meets its data in several ways whose backward needs the parameters' numbers."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.rand(4) + 1)
        self.matrix = nn.Parameter(torch.randn(4, 3))
        self.cell = nn.GRU(4, 4, batch_first=True)
        self.norm = nn.LayerNorm(4)

    def forward(self, x):
        hidden = self.norm(self.layer(x)) / self.scale
        hidden = self.cell(hidden.unsqueeze(1))[0].squeeze(1)
        return torch.cdist(hidden, self.layer.weight) @ self.matrix


@contextmanager
def others_in_place(model):
    """Have other numbers in the place of the parameters' for a while, as averaged weights are."""
    own = [parameter.data for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.data = parameter.data * 1.5
    yield
    for parameter, numbers in zip(model.parameters(), own, strict=True):
        parameter.data = numbers


@pytest.mark.parametrize("fused", [True, False])
def test_numbers_that_are_put_in_place_for_a_teacher(fused):
    """The student's backward finds the parameters as its forward did."""

    def distilled(model, batch):
        losses = losses_of(model, batch)
        with others_in_place(model):
            teacher = model(batch[0]).detach()
        return losses + (model(batch[0]) - teacher).square().sum(1)

    def first_the_student(model, batch):
        student = model(batch[0])
        with others_in_place(model):
            teacher = model(batch[0]).detach()
        return (student - teacher).square().sum(1)

    model = Twice().double()
    batch = torch.randn(B, 4, dtype=torch.float64), torch.randint(3, (B,))
    for loss_fn in (distilled, first_the_student):
        check_model(model, batch, loss_fn, fusing=(fused,))
        rows = flat(oracle_gradients(model, batch, loss_fn))
        got = gs.inner_products(model, batch, model, batch, loss_fn)
        assert_products(got, rows, rows, 1e-9)


def assert_refused(model, batch, loss_fn, said, fused):
    """All ways to a backward refuse it before anything was added to the gradients."""
    with pytest.raises(gs.UnsupportedOperationError, match=said):
        gs.per_example_norms(model, batch, loss_fn)
    with pytest.raises(gs.UnsupportedOperationError, match=said):
        gs.inner_products(model, batch, model, batch, loss_fn)
    with (
        pytest.raises(gs.UnsupportedOperationError, match=said),
        gs.track(model, batch_size=B, fused=fused) as tracker,
    ):
        tracker.backward(loss_fn(model, batch))
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("when", ["between uses", "before the backward"])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_uses_of_several_numbers_in_the_place_of_one_parameter_are_refused(way, when):
    """PyTorch's backward would take the former for some operations and the latter for others."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.v = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(4))

        def forward(self, x):
            return way(self, x)

    def of_both(model, batch):
        losses = losses_of(model, batch)
        with others_in_place(model):
            return losses + losses_of(model, batch)

    def of_former(model, batch):
        losses = losses_of(model, batch)
        halved(model)
        return losses

    model = Layer().double()
    batch = torch.randn(B, 4, dtype=torch.float64), torch.randint(3, (B,))
    loss_fn = of_both if when == "between uses" else of_former
    assert_refused(model, batch, loss_fn, r"given other numbers.*functional", fused=False)


def of_squares(model, x):
    return model(x).square().sum((1, 2))


def check_renumbered(model, maker, fused):
    """A model that gives a tensor other numbers early is served, and refused if it does so late."""
    x = torch.randn(B, 4, 4, dtype=torch.float64)
    check_model(model.double(), x, of_squares, fusing=(fused,))
    model.early = False
    assert_refused(model, x, of_squares, rf"a tensor that {maker}.*other numbers", fused)


class Renumbered(nn.Module):
    """Gives an activation other numbers, before or after its first use."""

    def __init__(self, use, early):
        super().__init__()
        self.use = use
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3)
        self.matrix = nn.Parameter(torch.randn(4, 4))
        self.cell = nn.GRU(4, 4, batch_first=True)
        self.early = early

    def forward(self, x):
        hidden = self.first(x).tanh()
        if self.early:
            hidden.data = (hidden.data * 8).round() / 8
        used = self.use(self, hidden)
        if not self.early:
            hidden.data = (hidden.data * 8).round() / 8
        return self.second(hidden + used)


class RenumberedWeight(nn.Module):
    """Gives what it made of its weight other numbers, before or after that met data."""

    def __init__(self, use, early):
        super().__init__()
        self.use = use
        self.first = nn.Linear(4, 4)
        self.matrix = nn.Parameter(torch.randn(4, 4))
        self.early = early

    def forward(self, x):
        weight = self.matrix * 2
        if self.early:
            weight.data = (weight.data * 8).round() / 8
        used = self.use(self.first(x), weight)
        if not self.early:
            weight.data = (weight.data * 8).round() / 8
        return used


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("way", ["product", "linear", "scale"])
def test_derived_weights_that_are_given_other_numbers(way, fused):
    """Rounded before their first use they are served; after it, an operation may have either."""
    use = {
        "product": lambda h, w: h @ w,
        "linear": functional.linear,
        "scale": lambda h, w: h * w,
    }[way]

    check_renumbered(RenumberedWeight(use, early=True), "Mul", fused)


def test_a_part_that_is_given_other_numbers_after_another_was_used():
    """Only the part is changed: what was made of the others has theirs."""

    class Halves(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.scale = nn.Parameter(torch.randn(2))

        def forward(self, x):
            left, right = self.first(x).unflatten(1, (2, 2)).unbind(1)
            left = left * self.scale
            right.data = (right.data * 8).round() / 8
            return (left * right).square().sum(1)

    check_model(Halves().double(), torch.randn(B, 4, dtype=torch.float64), lambda m, x: m(x))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("way", ["product", "recurrent", "scale"])
def test_activations_that_are_given_other_numbers(way, fused):
    """Rounded before their first use, as quantised training does, they are served."""
    use = {
        "product": lambda self, h: h @ self.matrix,
        "recurrent": lambda self, h: self.cell(h)[0],
        "scale": lambda self, h: h * self.matrix[0],
    }[way]

    check_renumbered(Renumbered(use, early=True), "Tanh", fused)


def test_products_with_a_sum_that_is_kept_in_half_precision():
    """The gradient in .grad has lost digits that its terms still have."""
    model = nn.Linear(64, 32, bias=False).bfloat16()
    x, slope = torch.randn(16, 64).bfloat16(), torch.randn(16, 32).bfloat16()
    with gs.track(model, batch_size=16, alignment=True, loss_reduction="sum") as tracker:
        (model(x) * slope).sum(1).double().sum().backward()
    gradients = slope.double()[:, :, None] * x.double()[:, None]
    along = (gradients * gradients.mean(0)).sum((1, 2))
    expected = along / gradients.flatten(1).norm(dim=1) / gradients.mean(0).norm()
    torch.testing.assert_close(tracker.stats.cosine.double(), expected, rtol=0, atol=1e-6)


def test_a_batch_size_that_does_not_fit_is_said_line_by_line():
    """What was got and expected stand on lines of their own, each remedy on one of its own."""
    model, x = nn.Linear(4, 3), torch.randn(5, 4)
    with pytest.raises(gs.ExampleAxisError) as raised, gs.track(model, batch_size=6) as tracker:
        tracker.backward(model(x).sum(1))
    lines = str(raised.value).splitlines()
    assert lines[0].startswith("torch.nn.functional.linear on parameter 'weight'")
    assert lines[1:3] == ["  got:      data of shape (5, 4)", "  expected: 6 examples along axis 0"]
    assert lines[3].startswith("  - If the number of examples is wrong: it is batch_size=")
    assert all(line.startswith("  - ") for line in lines[3:]) and len(lines) == 9


def test_loops_of_torchs_where_no_gradients_are_recorded():
    """They are compiled elsewhere; in a context the parameter would count as unused."""
    while_loop = pytest.importorskip("torch._higher_order_ops.while_loop").while_loop
    model, x = nn.Linear(3, 3).double(), torch.randn(2, 3).double()

    def losses(model, x):
        def step(i, h):
            return i + 1, model(h).tanh()

        return (while_loop(lambda i, h: i < 2, step, (torch.tensor(0), x))[1] + model(x)).sum(1)

    losses(model, x)  # outside of contexts the compiler runs it
    with pytest.raises(gs.UnsupportedOperationError, match="gradients are recorded"):
        gs.per_example_norms(model, x, losses)

    def scaled(model, x):
        def step(i, h):
            return i + 1, h * model.bias.detach()

        return (while_loop(lambda i, h: i < 2, step, (torch.tensor(0), x))[1] * model(x)).sum(1)

    scaled(model, x)
    assert_sqnorms(gs.per_example_norms(model, x, scaled), oracle_sqnorms(model, x, scaled), 1e-9)


def test_a_parameter_first_read_without_gradients_has_its_gradient():
    torch.manual_seed(0)
    model, x = nn.Linear(4, 3).double(), torch.randn(5, 4, dtype=torch.float64)
    (expected,) = torch.autograd.grad(model(x).square().sum(1).mean(), model.weight)
    for fused in (True, False):
        model.zero_grad()
        with gs.track(model, batch_size=5, fused=fused) as tracker:
            with torch.no_grad():
                assert torch.equal(node_of(model.weight).value, model.weight)
            tracker.backward(model(x).square().sum(1))
        torch.testing.assert_close(model.weight.grad, expected)


STARTS = {
    "ones": lambda losses: losses.backward(torch.ones(B).double()),
    "expanded ones": lambda losses: losses.backward(torch.ones(()).double().expand(B)),
    "torch.autograd.backward": lambda losses: torch.autograd.backward(
        losses, grad_tensors=torch.ones_like(losses)
    ),
    "one by one": lambda losses: torch.autograd.backward(list(losses)),
    "one by one, indexed": lambda losses: torch.autograd.backward(
        [losses[i] for i in reversed(range(B))]
    ),
}


@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
def test_the_backward_of_the_sum_is_not_taken_for_that_of_the_mean(model, batch, start):
    """It would give norms of B times each loss."""
    expected = oracle_sqnorms(model, batch, losses_of)
    with (
        pytest.raises(gs.TrackingError, match=r"the backward of their sum.*loss_reduction='sum'"),
        gs.track(model, batch_size=B),
    ):
        start(losses_of(model, batch))
    assert all(parameter.grad is None for parameter in model.parameters())
    with gs.track(model, batch_size=B, loss_reduction="sum") as tracker:
        start(losses_of(model, batch))
    assert_sqnorms(tracker.stats, expected, 1e-9)
    monitor = gs.Monitor(model, every=1)
    with pytest.raises(gs.TrackingError, match="the backward of their sum"), monitor.step(B):
        start(losses_of(model, batch))


MEANS = {
    "a vector": lambda losses: losses.backward(torch.full((B,), 1 / B, dtype=torch.float64)),
    "one by one": lambda losses: torch.autograd.backward(
        list(losses), grad_tensors=[torch.tensor(1 / B, dtype=torch.float64)] * B
    ),
    "parts": lambda losses: torch.autograd.backward([losses[:2].sum() / B, losses[2:].sum() / B]),
    # As many terms as there are examples, each of all of them.
    "a vector of terms": lambda losses: torch.stack([losses.mean() / B] * B).backward(
        torch.ones(B).double()
    ),
    "terms": lambda losses: torch.autograd.backward([losses.mean() / B for _ in range(B)]),
}


@pytest.mark.parametrize("start", MEANS.values(), ids=MEANS)
def test_backwards_that_start_from_several_numbers_may_be_that_of_the_mean(model, batch, start):
    expected = oracle_sqnorms(model, batch, losses_of)
    with gs.track(model, batch_size=B) as tracker:
        start(losses_of(model, batch))
    assert_sqnorms(tracker.stats, expected, 1e-9)


def test_the_only_example_may_have_several_losses():
    model, x = nn.Linear(4, 3).double(), torch.randn(1, 5, 4).double()
    with gs.track(model, batch_size=1) as tracker:
        model(x).square().sum(2)[0].backward(torch.ones(5).double())
    expected = oracle_sqnorms(model, x, lambda model, x: model(x).square().sum((1, 2)))
    assert_sqnorms(tracker.stats, expected, 1e-9)
