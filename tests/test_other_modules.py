"""Loss functions that use other modules, whose buffers belong to no example: discriminators."""

from __future__ import annotations

import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, spectral_norm
from torch.utils.checkpoint import checkpoint

import gradstats as gs
from gradstats.capture.following._enclosed import buffers_beside
from tests.oracle import (
    assert_products,
    assert_sqnorms,
    assert_unchanged,
    flat,
    gradients_of,
    oracle_on_the_batch,
    snapshot,
)
from tests.oracle import sqnorms_of as squared

WIDTH, HIDDEN = 5, 6
# As many examples as one of the discriminator's tensors has rows, or not.
SIZES = [1, 2, WIDTH, HIDDEN]


def generator():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, WIDTH)).double()


def discriminator(normed):
    torch.manual_seed(1)
    layers = normed(nn.Linear(WIDTH, HIDDEN)), nn.Tanh(), normed(nn.Linear(HIDDEN, 1))
    return nn.Sequential(*layers).double()


class Whitened(nn.Module):
    """Turns its inputs by a matrix that is scaled by what it is trained to."""

    def __init__(self):
        super().__init__()
        self.scale, self.layer = nn.Parameter(torch.rand(WIDTH) + 0.5), nn.Linear(WIDTH, 1)
        self.register_buffer("rotation", torch.linalg.qr(torch.randn(WIDTH, WIDTH))[0])

    def forward(self, x):
        return self.layer(x @ (self.rotation * self.scale))


def whitened(_=None):
    torch.manual_seed(1)
    return Whitened().double()


CRITICS = {
    "parametrization": lambda: discriminator(parametrizations.spectral_norm),
    "hook": lambda: discriminator(spectral_norm),
    "buffer": whitened,
}


def deceive(critic, model, z):
    return functional.softplus(-critic(model(z)).squeeze(1))


class Trainer:
    """Keeps its networks, as scripts do."""

    def __init__(self, critic):
        self.parts = {"critic": critic}

    def losses(self, model, z):
        return deceive(self.parts["critic"], model, z)

    def __call__(self, model, z):
        return self.losses(model, z)


def of_a_closure(critic):
    return lambda model, z: deceive(critic, model, z)


def of_a_default(critic):
    def losses(model, z, critic=critic):
        return deceive(critic, model, z)

    return losses


WAYS = {
    "closure": of_a_closure,
    "default": of_a_default,
    "partial": lambda critic: partial(deceive, critic),
    "method": lambda critic: Trainer(critic).losses,
    "object": Trainer,
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("kind", CRITICS)
def test_a_generator_by_its_discriminator(kind, training, size):
    critic, model = CRITICS[kind]().train(training), generator()
    z = torch.randn(size, 4, dtype=torch.float64)
    losses = of_a_closure(critic)
    before = {name: value.clone() for name, value in critic.state_dict().items()}
    expected = gradients_of(model, losses(model, z))
    after = {name: value.clone() for name, value in critic.state_dict().items()}
    state = snapshot(model)
    for options in ({}, {"gram": True, "alignment": True}):
        critic.load_state_dict(before)
        stats = gs.per_example_norms(model, z, losses, **options)
        assert_sqnorms(stats, squared(expected), 1e-9)
        # One forward, and so one step of the iteration that estimates spectral norms.
        torch.testing.assert_close(dict(critic.state_dict()), after, rtol=0, atol=0)
    rows = flat(expected)
    assert_products(stats.gram, rows, rows, 1e-9)
    critic.load_state_dict(before)
    direction = {name: torch.ones_like(value) for name, value in model.named_parameters()}
    along = gs.alignment(model, z, losses, direction)
    assert_products(along[:, None], rows, torch.ones_like(rows[:1]), 1e-9)
    assert_unchanged(model, state)
    assert all(parameter.grad is None for parameter in critic.parameters())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("way", WAYS)
def test_wherever_the_loss_function_has_it_from(way, size):
    critic, model = CRITICS["parametrization"]().eval(), generator()
    z = torch.randn(size, 4, dtype=torch.float64)
    losses = WAYS[way](critic)
    expected = gradients_of(model, losses(model, z))
    assert_sqnorms(gs.per_example_norms(model, z, losses), squared(expected), 1e-9)
    rows = flat(expected)
    assert_products(gs.inner_products(model, z, model, z.clone(), losses), rows, rows, 1e-9)
    run = gs.Checkpoints([model.state_dict()], lr=1.0)
    scores = gs.influence(model, [z], [z], losses, run, progress=False)
    assert_products(torch.tensor(scores[:, :]), rows, rows, 1e-9)
    assert gs.verify(model, z, losses).ok


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", CRITICS)
def test_in_a_context_both_are_one_model(kind, size):
    """As the guide says: there no loss function says what it uses."""
    critic, model = CRITICS[kind]().eval(), generator()
    z = torch.randn(size, 4, dtype=torch.float64)
    expected = gradients_of(model, of_a_closure(critic)(model, z))
    if size > 1 and kind != "buffer":
        refused, hint = (
            (gs.ExampleAxisError, gs.CoupledExamplesError),
            r"help\(gs\.(ExampleAxis|CoupledExamples)Error\)",
        )
        assert "ModuleList([model, other])" in gs.ExampleAxisError.__doc__
        with pytest.raises(refused, match=hint), gs.track(model, batch_size=size) as tracker:
            tracker.backward(deceive(critic, model, z))
    both = nn.ModuleList([model, critic])
    with gs.track(both, batch_size=size, parameters="0.*") as tracker:
        tracker.backward(deceive(critic, model, z))
    assert_sqnorms(tracker.stats, squared({f"0.{n}": g for n, g in expected.items()}), 1e-9)


@pytest.mark.parametrize("form", [Trainer, lambda critic: Trainer(critic).losses])
def test_each_of_several_is_found(form):
    critics = [whitened() for _ in range(6)]
    parts = [form(critic) for critic in critics]

    def losses(model, z):
        return sum(part(model, z) for part in parts)

    found = {id(buffer) for buffer in buffers_beside(losses)}
    assert found == {id(critic.rotation) for critic in critics}


class Remembering(nn.Module):
    """Keeps what it compares with, the batch itself."""

    def __init__(self, targets):
        super().__init__()
        self.register_buffer("targets", targets)

    def forward(self, outputs):
        return (outputs - self.targets).square().sum(1)


@pytest.mark.parametrize("size", SIZES)
def test_a_buffer_that_is_of_the_batch(size):
    """Given as data it is data, and else a constant with as many rows as there are examples."""
    model, z = generator(), torch.randn(size, 4, dtype=torch.float64)
    targets = torch.randn(size, WIDTH, dtype=torch.float64)
    criterion = Remembering(targets)
    expected = gradients_of(model, criterion(model(z)))
    stats = gs.per_example_norms(model, z, lambda model, z: criterion(model(z)))
    assert_sqnorms(stats, squared(expected), 1e-9)
    stats = gs.per_example_norms(model, (z, targets), lambda model, b: criterion(model(b[0])))
    assert_sqnorms(stats, squared(expected), 1e-9)


class Unread:
    """Fails where it is read, as an object made lazily does outside of its surroundings."""

    @property
    def __dict__(self):
        raise LookupError("no surroundings")

    @property
    def __class__(self):
        raise LookupError("no surroundings")

    def __call__(self, losses):
        return losses


UNREAD = {
    "object": Unread,
    "method": lambda: Unread().__call__,
    "gone": lambda: weakref.proxy(Unread()),
}


@pytest.mark.parametrize("made", UNREAD.values(), ids=UNREAD)
def test_beside_objects_that_cannot_be_read(made):
    """They hold no buffers; the critic beside them is found all the same."""
    model, critic, unread, z = generator(), whitened(), made(), torch.randn(WIDTH, 4).double()

    def losses(model, z, kept=(critic, unread)):
        return deceive(kept[0], model, z)

    expected = oracle_on_the_batch(model, z, losses)
    assert_sqnorms(gs.per_example_norms(model, z, losses), expected, 1e-9)


def standardised_generator():
    torch.manual_seed(2)
    layers = nn.Linear(4, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH)
    return nn.Sequential(*layers).double().train()


def made(generate, z, way):
    """What a generator makes, without a gradient to pass on."""
    if way == "detached":
        return generate(z).detach()
    with torch.no_grad():
        return generate(z)


@pytest.mark.parametrize("size", [2, WIDTH, HIDDEN])
@pytest.mark.parametrize("way", ["detached", "no_grad"])
@pytest.mark.parametrize("joined", [False, True])
def test_a_discriminator_of_what_is_made_by_statistics_of_the_batch(joined, way, size):
    """Its generator is in training mode; what that makes of the whole batch is given."""
    generate = standardised_generator()
    critic = discriminator(parametrizations.spectral_norm).eval()
    batch = torch.randn(size, WIDTH).double(), torch.randn(size, 4).double()

    def losses(m, batch):
        real, z = batch
        fake = made(generate, z, way)
        if joined:
            scores = m(torch.cat([real, fake])).squeeze(1)
            return functional.softplus(-scores[: len(z)]) + functional.softplus(scores[len(z) :])
        return (functional.softplus(-m(real)) + functional.softplus(m(fake))).squeeze(1)

    expected = gradients_of(critic, losses(critic, batch))
    assert_sqnorms(gs.per_example_norms(critic, batch, losses), squared(expected), 1e-9)
    for _ in range(2):
        with gs.track(critic, batch_size=size) as tracker:
            losses(critic, batch).mean().backward()
        assert_sqnorms(tracker.stats, squared(expected), 1e-9)
    assert generate.training and generate[1].num_batches_tracked == 4


@pytest.mark.parametrize("reentrant", [None, True, False])
def test_statistics_of_a_batch_that_pass_gradients_on(reentrant):
    """A generator by a discriminator that standardises what it sees, or by one that did before."""
    model, z = generator(), torch.randn(3, 4).double()
    critic = nn.Sequential(nn.Linear(WIDTH, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    losses = of_a_closure(critic)
    if reentrant is not None:  # whose first forward passes no gradient on
        losses = of_a_closure(partial(checkpoint, critic, use_reentrant=reentrant))
    remedy = r"statistics of the batch.*\.eval\(\)"
    with pytest.raises(gs.CoupledExamplesError, match=remedy):
        gs.per_example_norms(model, z, losses)
    with (
        pytest.raises(gs.CoupledExamplesError, match=remedy),
        gs.track(model, batch_size=3),
    ):
        losses(model, z).mean().backward()
    critic.eval()
    expected = gradients_of(model, of_a_closure(critic)(model, z))
    assert_sqnorms(gs.per_example_norms(model, z, losses), squared(expected), 1e-9)


class Inside(torch.autograd.Function):
    """Runs a module where gradients are not recorded, and again in its backward."""

    @staticmethod
    def forward(ctx, x, module):
        ctx.save_for_backward(x)
        ctx.module = module
        return module(x)

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            result = ctx.module(x)
        return torch.autograd.grad(result, x, grad)[0], None


@pytest.mark.parametrize("native", [False, True])
def test_statistics_of_a_batch_inside_an_autograd_function(native):
    """There the graph does not show that they pass gradients on."""
    model, z = generator(), torch.randn(3, 4).double()
    layer = nn.BatchNorm1d(WIDTH, affine=False).double()

    def normalise(x):
        if not native:
            return layer(x)
        return torch.batch_norm(
            x, None, None, layer.running_mean, layer.running_var, True, 0.1, 1e-5, False
        )

    with pytest.raises(gs.CoupledExamplesError, match="batch normalisation in training mode"):
        gs.per_example_norms(model, z, lambda m, z: Inside.apply(m(z), normalise).sin().sum(1))


@pytest.mark.parametrize("size", [1, 3])
def test_statistics_of_one_example_alone(size):
    """Of its own positions: nothing meets there."""
    model, x = nn.Linear(4, 4).double(), torch.randn(size, 6, 4).double()
    critic = nn.Sequential(nn.BatchNorm1d(4), nn.Tanh()).double()

    def losses(m, x):
        each = [critic(m(row).transpose(1, 2)).square().sum() for row in x.split(1)]
        return torch.stack(each)

    expected = gradients_of(model, losses(model, x))
    assert_sqnorms(gs.per_example_norms(model, x, losses), squared(expected), 1e-9)


def test_a_layer_of_the_model_that_takes_statistics_of_the_batch():
    """Refused also where no gradient passes through it."""
    model = nn.Sequential(nn.BatchNorm1d(4, affine=False), nn.Linear(4, 1)).double()
    with pytest.raises(gs.CoupledExamplesError, match=r"in training mode.*torch\.no_grad\(\)"):
        gs.per_example_norms(model, torch.randn(3, 4).double(), lambda m, x: m(x).squeeze(1))


@pytest.mark.parametrize("size", [2, WIDTH, HIDDEN])
@pytest.mark.parametrize("parameters", [None, "student.*"])
def test_a_teacher_that_is_a_part_of_the_model(parameters, size):
    """In training mode, where no gradients are recorded; a reentrant checkpoint records them."""
    model = nn.ModuleDict({"student": generator(), "teacher": standardised_generator()})
    x = torch.randn(size, 4).double()

    def losses(m, x):
        with torch.no_grad():
            target = m["teacher"](x)
        return (m["student"](x) - target).square().sum(1)

    expected = squared(gradients_of(model["student"], losses(model, x)))
    expected = {f"student.{name}": value for name, value in expected.items()}
    if parameters is None:
        zeros = torch.zeros(size).double()
        expected |= {f"teacher.{name}": zeros for name, _ in model["teacher"].named_parameters()}
    stats = gs.per_example_norms(model, x, losses, parameters=parameters)
    assert_sqnorms(stats, expected, 1e-9)
    with gs.track(model, batch_size=size, parameters=parameters) as tracker:
        losses(model, x).mean().backward()
    assert_sqnorms(tracker.stats, expected, 1e-9)

    def through(m, x):
        x = x.clone().requires_grad_()
        return checkpoint(m["teacher"], x, use_reentrant=True).square().sum(1)

    with pytest.raises(gs.CoupledExamplesError, match="in training mode"):
        gs.per_example_norms(model, x, through)
