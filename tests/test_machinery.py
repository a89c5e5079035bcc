"""The machinery around a training step: everything of the user's works as without gradstats."""

from __future__ import annotations

import copy
import io
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import gradstats as gs
from gradstats.capture.following import _marks
from tests.functions import recomputing
from tests.losses import losses_of as classify
from tests.oracle import assert_sqnorms, assert_unchanged, check_model, oracle_sqnorms, snapshot

B = 6


def convolutional():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(inplace=True),
        nn.Conv2d(4, 6, 1, stride=2), nn.ReLU(), nn.Conv2d(6, 6, 3, groups=3),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3),
    )  # fmt: skip


def images(dtype=torch.float64):
    return torch.randn(B, 3, 8, 8, dtype=dtype), torch.randint(3, (B,))


def dense():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3))


def vectors(dtype=torch.float64):
    return torch.randn(B, 4, dtype=dtype), torch.randint(3, (B,))


def alone(model, batch, loss_fn, scale=1.0):
    """Squared norms by plain autograd of one example at a time, in the model's own precision."""
    expected = {name: [] for name, _ in model.named_parameters()}
    for row in range(B):
        loss = loss_fn(model, tuple(part[row : row + 1] for part in batch))
        gradients = torch.autograd.grad(scale * loss.sum(), list(model.parameters()))
        for name, gradient in zip(expected, gradients, strict=True):
            expected[name].append((gradient.double() / scale).square().sum())
    return {name: torch.stack(rows) for name, rows in expected.items()}


def gradients_of(model):
    return {
        name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()
    }


# Autocast and scaled losses


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("build", [convolutional, dense])
@pytest.mark.parametrize("fused", [True, False])
def test_autocast_with_a_scaler(dtype, build, fused):
    model = build()
    batch = (images if build is convolutional else vectors)(torch.float32)
    plain = copy.deepcopy(model)

    def losses(model, batch):
        with torch.autocast("cpu", dtype=dtype):
            out = model(batch[0])
        return functional.cross_entropy(out.float(), batch[1], reduction="none")

    # Low precision alone and in the batch differ by its rounding only.
    expected = alone(model, batch, losses, scale=256.0)
    scalers = [torch.amp.GradScaler("cpu", init_scale=256.0 * B) for _ in range(2)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    scalers[1].scale(losses(plain, batch).mean()).backward()
    with gs.track(model, batch_size=B, scaler=scalers[0], fused=fused) as tracker:
        tracker.backward(losses(model, batch))
    assert_sqnorms(tracker.stats, expected, 0.05 if dtype is torch.bfloat16 else 0.01)
    assert_sqnorms(
        gs.per_example_norms(copy.deepcopy(plain), batch, losses),
        expected,
        0.05 if dtype is torch.bfloat16 else 0.01,
    )
    for got, want in zip(model.parameters(), plain.parameters(), strict=True):
        if fused:
            assert (got.grad - want.grad).norm() <= 0.02 * want.grad.norm()
        else:
            assert torch.equal(got.grad, want.grad)
    for scaler, optimizer in zip(scalers, optimizers, strict=True):
        scaler.step(optimizer)
        scaler.update()
    assert scalers[0].get_scale() == scalers[1].get_scale()


def test_a_scaled_step_that_overflows():
    """The scaler skips the step, as always; the statistics say so and nothing raises."""
    model, batch = dense(), vectors(torch.float32)
    before = [p.detach().clone() for p in model.parameters()]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gs.track(model, batch_size=B, scaler=scaler) as tracker:
        tracker.backward(1e3 * classify(model, batch))
    assert not tracker.stats.sqnorm.isfinite().all()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**126
    assert all(torch.equal(a, p) for a, p in zip(before, model.parameters(), strict=True))


def test_float64_under_autocast():
    """Autocast leaves float64 alone, and so do the rules."""

    def losses(model, batch):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return classify(model, batch)

    check_model(dense().double(), vectors(), losses)
    check_model(convolutional().double(), images(), losses)


# Activation checkpoints


ALONE = partial(checkpoint, use_reentrant=False)
REENTRANT = partial(checkpoint, use_reentrant=True)


class Checkpointed(nn.Module):
    def __init__(self, run=ALONE, *, shared=False):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Dropout(0.0), nn.Tanh())
            for _ in range(3)
        )
        self.head = nn.Linear(8, 3)
        self.run = run
        if shared:
            self.blocks[2] = self.blocks[0]

    def forward(self, x):
        x = self.first(x)
        if not x.requires_grad:
            x = x.clone().requires_grad_()
        for block in self.blocks:
            x = x + self.run(block, x)
        return self.head(x)


def checkpointed(run, **options):
    """Return a model, and the same with checkpoints of the other kind, which hide nothing."""
    model, twin = Checkpointed(run, **options).double(), Checkpointed(**options).double()
    twin.load_state_dict(model.state_dict())
    return model, twin


def assert_steps(model, batch, expected, plain):
    """Check norms beside training, and the gradients, with ``fused=False`` to the bit."""
    for fused in (True, False):
        model.zero_grad()
        with gs.track(model, batch_size=B, fused=fused) as tracker:
            tracker.backward(classify(model, batch))
        assert_sqnorms(tracker.stats, expected, 1e-9)
        for parameter, want in zip(model.parameters(), plain, strict=True):
            exact = {} if fused else {"rtol": 0, "atol": 0}
            torch.testing.assert_close(parameter.grad, want, **exact)


def test_checkpoints():
    check_model(Checkpointed().double(), vectors(), classify)


SELECTIVE = partial(
    ALONE,
    context_fn=partial(
        create_selective_checkpoint_contexts,
        [torch.ops.aten.addmm.default, torch.ops.aten.native_layer_norm.default],
    ),
)


def test_selective_checkpoints():
    """They keep some results, and look whether these were changed."""
    (model, twin), batch = checkpointed(SELECTIVE), vectors()
    expected = oracle_sqnorms(twin, batch, classify)
    assert_sqnorms(gs.per_example_norms(model, batch, classify), expected, 1e-9)
    for fused in (True, False):
        with gs.track(model, batch_size=B, fused=fused) as tracker:
            tracker.backward(classify(model, batch))
        assert_sqnorms(tracker.stats, expected, 1e-9)


@pytest.mark.parametrize("shared", [False, True])
def test_reentrant_checkpoints(shared):
    """Their part of the graph appears in an inner backward only, where each adds to gradients."""
    (model, twin), batch = checkpointed(REENTRANT, shared=shared), vectors()
    expected = oracle_sqnorms(twin, batch, classify)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    assert_sqnorms(gs.per_example_norms(model, batch, classify), expected, 1e-9)
    assert all(bool((parameter.grad == 1).all()) for parameter in model.parameters())
    model.zero_grad()
    classify(model, batch).mean().backward()
    plain = [parameter.grad for parameter in model.parameters()]
    assert_steps(model, batch, expected, plain)


@pytest.mark.parametrize("frozen", [(), ("first",), ("first", "head")])
def test_checkpoints_of_other_libraries(frozen):
    """Where nothing trained lies before them in the graph that shows, they are reached as well."""
    (model, twin), batch = checkpointed(recomputing), vectors()
    for each in (model, twin):
        for name in frozen:
            getattr(each, name).requires_grad_(False)
    expected = oracle_sqnorms(twin, batch, classify)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    assert_sqnorms(gs.per_example_norms(model, batch, classify), expected, 1e-9)
    assert all(bool((parameter.grad == 1).all()) for parameter in model.parameters())


def test_a_parameter_that_such_checkpoints_share_is_refused():
    model, _ = checkpointed(recomputing, shared=True)
    with pytest.raises(gs.CoverageError, match=r"'blocks\.0\..*of another library"):
        gs.per_example_norms(model, vectors(), classify)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_backward_that_may_leave_such_checkpoints_out_is_refused():
    """With inputs= it runs only what leads to these; norms of the others would be zeros."""
    model, _ = checkpointed(recomputing)
    model.first.requires_grad_(False)
    with gs.track(model, batch_size=B):
        losses = classify(model, vectors())
        with pytest.raises(gs.CoverageError, match=r"inputs=.*'blocks\.0\..*another library"):
            losses.mean().backward(inputs=[model.head.weight])
    assert all(parameter.grad is None for parameter in model.parameters())


def in_another_thread(function, *args):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(REENTRANT, function, *args).result()


def without_modes(function, *args):
    with torch._C.DisableTorchFunction():
        return REENTRANT(function, *args)


@pytest.mark.parametrize("run", [in_another_thread, without_modes])
def test_reentrant_checkpoints_that_are_not_seen_are_refused(run):
    """Their backward runs on new tensors, of which it is not known which rows are whose."""
    model, _ = checkpointed(run)
    state, batch, refused = snapshot(model), vectors(), r"reentrant checkpoint.*another thread"
    with pytest.raises(gs.TrackingError, match=refused):
        gs.per_example_norms(model, batch, classify)
    with gs.track(model, batch_size=B) as tracker, pytest.raises(gs.TrackingError, match=refused):
        tracker.backward(classify(model, batch))
    assert_unchanged(model, state)


def test_a_reentrant_checkpoint_in_another_thread_of_inputs_alone_is_refused():
    """It is noticed in its own backward, where it uses parameters."""
    model, _ = checkpointed(in_another_thread)
    model.first.requires_grad_(False)
    refused = r"reentrant checkpoint.*another thread"
    with pytest.raises(gs.TrackingError, match=refused):
        gs.per_example_norms(model, vectors(), classify)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_reentrant_checkpoints_before_the_context():
    """As in a generator beside the model: its gradients are as without a context."""
    torch.manual_seed(0)
    generator, model = nn.Linear(4, 3).double(), nn.Linear(3, 1).double()
    noise = torch.randn(B, 4, dtype=torch.float64, requires_grad=True)

    def losses(model, batch):
        return model(batch).square().sum(1)

    expected = oracle_sqnorms(model, generator(noise).detach(), losses)
    losses(model, REENTRANT(generator, noise)).mean().backward()
    plain = [parameter.grad for parameter in (*generator.parameters(), *model.parameters())]
    generator.zero_grad()
    model.zero_grad()
    made = REENTRANT(generator, noise)
    with gs.track(model, batch_size=B) as tracker:
        tracker.backward(losses(model, made))
    assert_sqnorms(tracker.stats, expected, 1e-9)
    for parameter, want in zip((*generator.parameters(), *model.parameters()), plain, strict=True):
        torch.testing.assert_close(parameter.grad, want)


def test_a_reentrant_checkpoint_of_parameters_before_the_context_is_refused():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()
    inputs = torch.ones(B, 3, dtype=torch.float64, requires_grad=True)
    hidden = REENTRANT(model[0], inputs)
    with gs.track(model, batch_size=B):
        loss = model[1](hidden).square().mean()
        with pytest.raises(gs.TrackingError, match=r"reentrant checkpoint.*before the context"):
            loss.backward()


def saved_on_cpu(function, *args):
    with torch.autograd.graph.save_on_cpu():
        return function(*args)


# Checkpoints that get copies of their arguments back.
GET_COPIES = {
    "inside of another": lambda f, *args: ALONE(lambda *again: ALONE(f, *again), *args),
    "inside of a reentrant one": lambda f, *args: REENTRANT(lambda *own: REENTRANT(f, *own), *args),
    "saved on the CPU": lambda f, *args: saved_on_cpu(ALONE, f, *args),
}


# What happens to the examples before, inside of and behind a checkpoint, with T = B.
INSIDE = {
    "sequence first": lambda run, f, h: run(f, h.transpose(0, 1)).transpose(0, 1),
    "turned inside": lambda run, f, h: run(lambda h: f(h).transpose(0, 1), h).transpose(0, 1),
    "in another order": lambda run, f, h: run(f, h.flip(0)).flip(0),
    "with a table": lambda run, f, h: run(
        lambda h, table: f(h) * table, h, torch.arange(B * 8.0).view(B, 8).to(h)
    ),
    "into a table": lambda run, f, h: run(
        lambda h, table: h * f(table), h, torch.arange(B * 8.0).view(B, 8).to(h).sin()
    ),
    "several rows each": lambda run, f, h: run(f, h.flatten(0, 1)).view_as(h),
}


@pytest.mark.parametrize("place", INSIDE.values(), ids=INSIDE)
def test_examples_that_are_followed_through_checkpoints(place):
    """Not through those of other libraries: their backward runs on tensors of its own."""

    class Sequences(nn.Module):
        def __init__(self, run):
            super().__init__()
            self.first, self.inner, self.head = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)
            self.run = run

        def forward(self, x):
            h = place(self.run, lambda h: self.inner(h).tanh(), self.first(x))
            return self.head(h).sum(1)

    batch = torch.randn(B, B, 4, dtype=torch.float64), torch.randint(3, (B,))
    model = Sequences(lambda f, *args: f(*args)).double()
    expected = oracle_sqnorms(model, batch, classify)
    for model.run in (ALONE, REENTRANT, *GET_COPIES.values()):
        assert_sqnorms(gs.per_example_norms(model, batch, classify), expected, 1e-9)
    model.run = recomputing
    with pytest.raises(
        gs.UnsupportedOperationError, match=r"Recomputing.*inner\.weight.*batch_dim"
    ):
        gs.per_example_norms(model, batch, classify)


# What a checkpoint computes of the tensors that it is given, with B = T.
GIVEN = {
    "parameter": lambda run, h, weight: run(lambda h, w: functional.linear(h, w).tanh(), h, weight),
    "first": lambda run, h, weight: run(lambda w, h: functional.linear(h, w).tanh(), weight, h),
    "derived": lambda run, h, weight: run(lambda h, w: (h @ w).tanh(), h, weight.t() * 2),
    "saved alike": lambda run, h, weight: run(lambda h, w: h.tanh() * w, h, weight),
}


@pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN)
@pytest.mark.parametrize("inner", [ALONE, REENTRANT])
@pytest.mark.parametrize("outer", [saved_on_cpu, ALONE, REENTRANT])
def test_a_parameter_that_a_checkpoint_is_given(outer, inner, given):
    """Hooks on saved tensors, such as another checkpoint's, keep copies of what it is given."""

    class Given(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.weight = nn.Linear(4, B), nn.Parameter(torch.randn(B, B))
            self.head = nn.Linear(B, 3)

        def forward(self, x):
            h = self.first(x).unsqueeze(1).expand(-1, B, -1)
            return self.head(self.outer(self.inside, h)).sum(1)

        def inside(self, h):
            return given(self.inner, h, self.weight)

    def call(function, *args):
        return function(*args)

    model, batch = Given().double(), vectors()
    model.inner = model.outer = call
    expected = oracle_sqnorms(model, batch, classify)
    classify(model, batch).mean().backward()
    plain = [parameter.grad for parameter in model.parameters()]
    model.inner, model.outer = inner, outer
    for trained in (call, outer):
        model.outer = trained
        assert_sqnorms(gs.per_example_norms(model, batch, classify), expected, 1e-9)
        assert_steps(model, batch, expected, plain)


@pytest.mark.parametrize("run", [ALONE, REENTRANT, recomputing])
def test_examples_that_meet_inside_a_checkpoint(run):
    model, _ = checkpointed(lambda f, x: run(lambda h: f(h) - f(h).mean(0), x))
    with pytest.raises((gs.CoupledExamplesError, gs.ExampleAxisError), match="over all examples"):
        gs.per_example_norms(model, vectors(), classify)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_checkpoints_under_autocast():
    model, batch = Checkpointed(), vectors(torch.float32)

    def losses(model, batch):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(batch[0])
        return functional.cross_entropy(out.float(), batch[1], reduction="none")

    expected = alone(model, batch, losses)
    assert_sqnorms(gs.per_example_norms(model, batch, losses), expected, 0.05)


# Accumulation, and several forwards


@pytest.mark.parametrize("fused", [True, False])
def test_gradients_accumulate(fused):
    model, batch = convolutional().double(), images()
    plain = copy.deepcopy(model)
    halves = [tuple(part[rows] for part in batch) for rows in (slice(0, 4), slice(4, 6))]
    norms = []
    for half in halves:
        (classify(plain, half).sum() / B).backward()
        weights = torch.full((len(half[0]),), 1 / B, dtype=torch.float64)
        with gs.track(model, batch_size=len(half[0]), weights=weights, fused=fused) as tracker:
            (classify(model, half).sum() / B).backward()
        norms.append(tracker.stats.sqnorm)
    expected = sum(oracle_sqnorms(plain, batch, classify).values())
    torch.testing.assert_close(torch.cat(norms), expected, rtol=1e-9, atol=0)
    for got, want in zip(model.parameters(), plain.parameters(), strict=True):
        if fused:
            torch.testing.assert_close(got.grad, want.grad, rtol=1e-10, atol=1e-14)
        else:
            assert torch.equal(got.grad, want.grad)


def test_several_forwards_before_one_backward():
    def losses(model, batch):
        first, second = model(batch[0]), model(batch[0] * 0.5)
        apart = (first - second).square().sum(1)
        return functional.cross_entropy(first, batch[1], reduction="none") + apart

    check_model(dense().double(), vectors(), losses)
    check_model(convolutional().double(), images(), losses)


def test_a_forward_whose_result_is_dropped():
    def losses(model, batch):
        model(batch[0] + 1)
        with torch.no_grad():
            target = model(batch[0] - 1).softmax(1)
        return -(model(batch[0]).log_softmax(1) * target).sum(1)

    check_model(dense().double(), vectors(), losses)


def test_two_models_in_one_loss():
    """A frozen teacher, and a second tracked network in a context of its own."""
    student, teacher, batch = dense().double(), dense().double().requires_grad_(False), vectors()

    def losses(model, batch):
        return (model(batch[0]) - teacher(batch[0])).square().sum(1)

    check_model(student, batch, losses)


# Memory formats


@pytest.mark.parametrize("what", ["model", "input", "both"])
def test_channels_last(what):
    model, (x, y) = convolutional().double(), images()
    if what != "input":
        model = model.to(memory_format=torch.channels_last)
    if what != "model":
        x = x.contiguous(memory_format=torch.channels_last)
    check_model(model, (x, y), classify)
    plain = copy.deepcopy(model)
    classify(plain, (x, y)).mean().backward()
    for fused in (True, False):
        model.zero_grad()
        with gs.track(model, batch_size=B, fused=fused) as tracker:
            tracker.backward(classify(model, (x, y)))
        assert tracker.stats.sqnorm.isfinite().all()
        for got, want in zip(model.parameters(), plain.parameters(), strict=True):
            if want.dim() == 4:
                layouts = [
                    gradient.is_contiguous(memory_format=torch.channels_last)
                    for gradient in (got.grad, want.grad)
                ]
                assert layouts[0] == layouts[1]
    with gs.track(model, batch_size=B):
        hidden = model[0](x)
    assert hidden.stride() == plain[0](x).stride()


# What requires grad


def test_requires_grad_toggled_between_steps():
    model, batch = convolutional().double(), images()
    names = [name for name, _ in model.named_parameters()]
    for frozen in (set(), {"0.weight", "1.bias"}, set(names[:-1]), {"8.weight"}, set()):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in frozen)
        expected = oracle_sqnorms(model, batch, classify)
        assert set(expected) == set(names) - frozen
        check_model(model, batch, classify)


def test_requires_grad_toggled_inside_a_context():
    """As in adversarial training, where one network is frozen while another learns."""
    model, batch = dense().double(), vectors()
    expected = oracle_sqnorms(model, batch, classify)
    with gs.track(model, batch_size=B) as tracker:
        model.requires_grad_(False)
        classify(model, batch)
        model.requires_grad_(True)
        tracker.backward(classify(model, batch))
    assert_sqnorms(tracker.stats, expected, 1e-9)
    assert all(p.requires_grad for p in model.parameters())


def test_layers_that_some_steps_skip():
    class Skips(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
            self.which = 0

        def forward(self, x):
            layer = (self.first, self.second)[self.which]
            for _ in range(2):
                x = layer(x).tanh()
            return self.head(x)

    model = Skips().double()
    for step, which in enumerate((0, 1, 0, 1)):
        model.which = which
        batch = vectors()
        check_model(model, (batch[0] * (step + 1), batch[1]), classify)


# The user's hooks


class Hooks:
    """Every kind of hook on a model, writing down when it was called and with which values."""

    def __init__(self, model):
        self.seen = []
        self.handles = []
        for name, module in model.named_modules():
            self.handles += [
                module.register_forward_pre_hook(self.note(f"{name} before")),
                module.register_forward_hook(self.note(f"{name} after")),
            ]
            if name in ("2", "3"):
                self.handles.append(module.register_full_backward_hook(self.note(f"{name} back")))
        for name, parameter in model.named_parameters():
            self.handles += [
                parameter.register_hook(self.note(f"{name} gradient")),
                parameter.register_post_accumulate_grad_hook(self.note(f"{name} accumulated")),
            ]

    def note(self, name):
        def hook(*items):
            values = items[-1][0] if isinstance(items[-1], tuple) else items[-1]
            self.seen.append((name, values.detach().clone()))

        return hook

    def remove(self):
        for handle in self.handles:
            handle.remove()


def test_hooks_are_called_as_always():
    model, batch = dense().double(), vectors()
    recorded = []
    for tracked in (False, True):
        hooks = Hooks(model)
        model.zero_grad()
        if tracked:
            with gs.track(model, batch_size=B, fused=False) as tracker:
                tracker.backward(classify(model, batch))
        else:
            classify(model, batch).mean().backward()
        recorded.append(hooks.seen)
        hooks.remove()
    assert sorted(name for name, _ in recorded[0]) == sorted(name for name, _ in recorded[1])
    forward = [name for name, _ in recorded[0] if "before" in name or "after" in name]
    assert [name for name, _ in recorded[1]][: len(forward)] == forward
    for name, value in recorded[1]:
        wanted = next(v for n, v in recorded[0] if n == name)
        torch.testing.assert_close(value, wanted, rtol=1e-12, atol=1e-15, msg=name)
    model.zero_grad()
    expected = oracle_sqnorms(model, batch, classify)
    assert_sqnorms(tracker.stats, expected, 1e-9)


def test_a_hook_that_changes_gradients():
    """A tensor hook on an activation changes what flows on, for every example alike."""

    class Reverses(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 3)

        def forward(self, x):
            x = self.body(x)
            x.register_hook(lambda gradient: -0.5 * gradient)
            return self.head(x.tanh())

    check_model(Reverses().double(), vectors(), classify)


@pytest.mark.parametrize("run", [ALONE, REENTRANT, recomputing])
def test_a_backward_without_gradients_adds_none_to_inputs(run):
    (model, twin), (x, y) = checkpointed(run), vectors()
    x.requires_grad_()
    stats = gs.per_example_norms(model, (x, y), classify)
    assert x.grad is None
    assert_sqnorms(stats, oracle_sqnorms(twin, (x.detach(), y), classify), 1e-9)


@pytest.mark.parametrize("run", [ALONE, REENTRANT, recomputing])
def test_a_backward_without_gradients_is_not_under_autocast(run):
    """Where it runs a forward again, that has the precision of the first one."""

    def exact(model, batch):
        with torch.autocast("cpu", enabled=False):
            return classify(model, batch)

    (model, twin), batch = checkpointed(run), vectors(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        stats = gs.per_example_norms(model.float(), batch, exact)
    expected = oracle_sqnorms(twin, (batch[0].double(), batch[1]), classify)
    assert_sqnorms(stats, expected, 1e-4)


@pytest.mark.parametrize("run", [REENTRANT, recomputing])
def test_hooks_on_parameters_see_no_backward_without_gradients(run):
    """As a hook that masks the rows of a table: it can take a gradient, but not its absence."""

    class Looked(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.matrix = nn.Embedding(5, 4), nn.Parameter(torch.randn(3, 4))
            self.run = run

        def forward(self, x):
            return self.run(self.block, x.clone().requires_grad_())

        def block(self, x):
            return (x + self.table(torch.arange(5)).sum(0)) @ self.matrix.exp().T

    model, batch, seen = Looked().double(), vectors(), []
    twin = copy.deepcopy(model)
    twin.run = ALONE
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: seen.append(gradient) or 2 * gradient)
    stats = gs.per_example_norms(model, batch, classify)
    assert_sqnorms(stats, oracle_sqnorms(twin, batch, classify), 1e-9)
    assert not seen
    classify(model, batch).mean().backward()
    assert len(seen) == 2


def test_hooks_registered_inside_a_context_stay():
    model, batch, seen = dense().double(), vectors(), []
    with gs.track(model, batch_size=B, fused=False) as tracker:
        model[0].weight.register_hook(lambda gradient: seen.append(gradient.clone()))
        tracker.backward(classify(model, batch))
    classify(model, batch).mean().backward()
    assert len(seen) == 2 and torch.equal(*seen)


@pytest.mark.parametrize("kind", ["parametrize", "weight_norm", "spectral_norm", "orthogonal"])
def test_parametrizations(kind):
    torch.manual_seed(2)
    parametrizations = nn.utils.parametrizations

    class Symmetric(nn.Module):
        def forward(self, weight):
            return weight.triu() + weight.triu(1).mT

    layer = nn.Linear(4, 4)
    if kind == "parametrize":
        nn.utils.parametrize.register_parametrization(layer, "weight", Symmetric())
    elif kind == "orthogonal":
        parametrizations.orthogonal(layer, orthogonal_map="cayley")
    else:
        getattr(parametrizations, kind)(layer)
    model = nn.Sequential(layer, nn.Tanh(), nn.Linear(4, 3)).double().eval()
    kinds = [type(module) for module in model.modules()]
    check_model(model, vectors(), classify)
    assert [type(module) for module in model.modules()] == kinds
    with nn.utils.parametrize.cached():
        expected = oracle_sqnorms(model, vectors(), classify)
    assert expected


# Copies


def same_model(first, second):
    assert type(first) is type(second)
    for (name, a), (other, b) in zip(
        first.named_parameters(), second.named_parameters(), strict=True
    ):
        assert name == other and type(a) is type(b) is nn.Parameter
        assert torch.equal(a, b) and a.requires_grad == b.requires_grad
        assert a is not b and a.data_ptr() != b.data_ptr()
        assert not hasattr(b, "_gradstats")


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies_after_tracking(how):
    model, batch = dense(), vectors(torch.float32)
    with gs.track(model, batch_size=B) as tracker:
        tracker.backward(classify(model, batch))
    if how == "deepcopy":
        again = copy.deepcopy(model)
    elif how == "pickle":
        again = pickle.loads(pickle.dumps(model))
    else:
        buffer = io.BytesIO()
        torch.save(model.state_dict(), buffer)
        buffer.seek(0)
        again = dense()
        again.load_state_dict(torch.load(buffer, weights_only=True))
    same_model(model, again)
    again.double()
    model.zero_grad()
    check_model(again, (batch[0].double(), batch[1]), classify)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "state_dict", "copied parameter"])
def test_copies_inside_a_context(how):
    """As an exponential moving average of the weights, started or saved within a step."""
    model, batch = dense().double(), vectors()
    expected = oracle_sqnorms(model, batch, classify)
    with gs.track(model, batch_size=B) as tracker:
        losses = classify(model, batch)
        if how == "deepcopy":
            again = copy.deepcopy(model)
        elif how == "pickle":
            again = pickle.loads(pickle.dumps(model))
        elif how == "state_dict":
            again = dense().double()
            again.load_state_dict({k: v.clone() for k, v in model.state_dict().items()})
        else:
            again = dense().double()
            for mine, theirs in zip(again.parameters(), model.parameters(), strict=True):
                mine.data = theirs.data.clone()
        tracker.backward(losses)
    assert_sqnorms(tracker.stats, expected, 1e-9)
    same_model(model, again)
    again.zero_grad()
    state = snapshot(again)
    assert_sqnorms(gs.per_example_norms(again, batch, classify), expected, 1e-9)
    assert_unchanged(again, state)


class MakesParameters(nn.Module):
    """A forward that makes a parameter of what was computed from another, as peft's HiRA does."""

    def __init__(self, made):
        super().__init__()
        self.weight, self.head, self.made = nn.Parameter(torch.randn(4, 4)), nn.Linear(4, 3), made

    def forward(self, x):
        own = self.made(self.weight)
        assert type(own) is nn.Parameter and own.is_leaf
        return self.head(functional.linear(x, own))


@pytest.mark.parametrize(
    "made",
    [
        nn.Parameter,
        lambda weight: nn.Parameter(weight.T),
        lambda weight: nn.Parameter(data=1 + weight, requires_grad=False),
    ],
    ids=["parameter", "view", "computed, frozen"],
)
def test_a_parameter_made_of_another_is_a_new_leaf(made):
    model, batch = MakesParameters(made).double(), vectors()
    stats = gs.per_example_norms(model, batch, classify)
    expected = oracle_sqnorms(model, batch, classify)
    assert_sqnorms(stats, expected, 1e-9)
    assert not stats.by_parameter["weight"].any()
    with gs.track(model, batch_size=B) as tracker:
        tracker.backward(classify(model, batch))
    assert_sqnorms(tracker.stats, expected, 1e-9)
    assert model.weight.grad is None
    shared = nn.Parameter(model.weight)
    assert type(shared) is nn.Parameter and shared.data_ptr() == model.weight.data_ptr()


@pytest.mark.parametrize("bias", [True, False])
def test_a_parameter_that_takes_the_place_of_another_is_refused(bias):
    """As of a critic that clips its weights: of the new one nobody would measure the gradient."""

    class Clipped(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = nn.Linear(4, 4, bias=bias), nn.Linear(4, 3)

        def forward(self, x):
            self.layer.weight = nn.Parameter(self.layer.weight.detach().clamp(-0.1, 0.1))
            return self.head(self.layer(x))

    model, batch = Clipped(), vectors(torch.float32)
    message = r"given parameters inside the context, \['layer.weight'\].*write into them instead"
    with pytest.raises(gs.CoverageError, match=message):
        gs.per_example_norms(model, batch, classify)
    for fused in (True, False):
        with pytest.raises(gs.CoverageError, match=message):
            with gs.track(model, batch_size=B, fused=fused) as tracker:
                tracker.backward(classify(model, batch))


def test_a_moving_average_inside_a_context():
    model, batch = dense().double(), vectors()
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    plain, plain_average = copy.deepcopy(model), copy.deepcopy(average)
    for network, mean, tracked in ((plain, plain_average, False), (model, average, True)):
        optimizer = torch.optim.SGD(network.parameters(), lr=0.5)
        for _ in range(3):
            optimizer.zero_grad()
            if tracked:
                with gs.track(network, batch_size=B, fused=False) as tracker:
                    tracker.backward(classify(network, batch))
                    optimizer.step()
                    mean.update_parameters(network)
            else:
                classify(network, batch).mean().backward()
                optimizer.step()
                mean.update_parameters(network)
    for got, want in zip(average.parameters(), plain_average.parameters(), strict=True):
        assert type(got) is nn.Parameter
        assert torch.equal(got, want)
    assert tracker.stats.sqnorm.isfinite().all()


def test_constants_that_outlive_the_library(monkeypatch):
    """At the end of a program, when modules have lost their names, nothing is complained about."""
    kept = []

    class Weighted(nn.Linear):
        def forward(self, x):
            kept.append(torch.arange(1.0, 1.0 + self.out_features))
            return super().forward(x) * kept[-1]

    gs.per_example_norms(Weighted(3, 2), torch.randn(4, 3), lambda m, x: m(x).square().sum(1))
    complaints = []
    monkeypatch.setattr(sys, "unraisablehook", complaints.append)
    monkeypatch.setattr(_marks, "CONSTANTS", None)
    kept.clear()
    assert complaints == []
