"""What was decided of uses of tensors made of parameters serves others of the same form.

Whatever these were made of and how: models differ in nothing else, and take turns.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional

import gradstats as gs
from gradstats.capture.rules import _elementwise, _products

from .oracle import assert_sqnorms, oracle_on_the_batch, oracle_sqnorms
from .test_repeated import SIZE, WIDTH, check, squares

pytestmark = pytest.mark.usefixtures("nothing_remembered")


def written(m):
    made = m.first.clone()
    made[1] = m.other[0]
    return made.mul_(m.other)


def held(m):
    made = torch.zeros(WIDTH, WIDTH).double()
    made[1:] = m.first[:-1]
    return made


# All of shape (WIDTH, WIDTH), and contiguous.
MADE = {
    "other": lambda m: m.other[:WIDTH],
    "part": lambda m: m.first[:WIDTH],
    "looked up": lambda m: m.table(torch.arange(WIDTH)),
    "in any order": lambda m: m.first[torch.tensor([2, 0, 2, 1])],
    "scaled": lambda m: m.first * 2,
    "of several": lambda m: m.first.tanh() * m.other + m.first,
    "expanded": lambda m: m.first[0].expand(WIDTH, WIDTH).contiguous(),
    "low rank": lambda m: m.first[:, :1] @ m.other[:1],
    "standardised": lambda m: functional.layer_norm(m.first, (WIDTH,)),
    "written": written,
    "held": held,
}

USED = {
    "added": lambda x, made: x + made,
    "added to": lambda x, made: made + x,
    "product": lambda x, made: x * made,
    "product with": lambda x, made: made * x,
    "linear": functional.linear,
    "with bias": lambda x, made: functional.linear(x, made, made[0] + 0),
    "matmul": lambda x, made: x @ made,
    "normalised": lambda x, made: functional.layer_norm(x, (WIDTH,), made[0], made[1] + 0),
    "convolution": lambda x, made: functional.conv1d(x.mT, made[:, :, None]).mT,
    "given twice": lambda x, made: (x * made + made) @ made,
    "used by a layer": lambda x, made: functional.linear(x + made, made).tanh() * made,
}


class Made(nn.Module):
    """Uses a tensor that is made of parameters of its own."""

    def __init__(self, make, use):
        super().__init__()
        self.make, self.use = make, use
        self.layer, self.table = nn.Linear(WIDTH, WIDTH), nn.Embedding(6, WIDTH)
        self.first, self.other = (nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(2))
        self.double()

    def forward(self, x):
        return self.use(self.layer(x).tanh(), self.make(self)).sin()


def check_training(model, batch):
    """Check norms beside training, and the gradients, forgetting nothing of what was decided."""
    parameters, losses = [*model.parameters()], squares(model, batch).mean()
    expected = oracle_sqnorms(model, batch, squares)
    gradients = torch.autograd.grad(losses, parameters, allow_unused=True)
    for fused in (True, False):
        model.zero_grad()
        with gs.track(model, batch_size=len(batch), fused=fused) as tracker:
            tracker.backward(squares(model, batch))
        assert_sqnorms(tracker.stats, expected, rtol=1e-10)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None:
                torch.testing.assert_close(parameter.grad, gradient, rtol=1e-10, atol=1e-12)


def takes_turns(models, *batches):
    """Check steps of all models, in which what one decides is there for the next."""
    for _ in range(2):
        for model in models:
            for batch in batches:
                check(model, batch)
                check_training(model, batch)


@pytest.mark.parametrize("use", USED.values(), ids=USED)
def test_other_tensors_of_the_same_form(use):
    models = [Made(make, use) for make in MADE.values()]
    takes_turns(models, torch.randn(SIZE, WIDTH, WIDTH).double())


@pytest.mark.parametrize("use", USED.values(), ids=USED)
def test_as_many_examples_as_positions(use):
    models = [Made(MADE[name], use) for name in ("looked up", "part", "expanded", "other")]
    sizes = (WIDTH, WIDTH, WIDTH), (SIZE, WIDTH, WIDTH), (1, WIDTH, WIDTH)
    takes_turns(models, *(torch.randn(size).double() for size in sizes))


def test_another_number_of_positions():
    models = [
        Made(lambda m: m.table(torch.arange(m.length)), lambda x, made: x + made),
        Made(lambda m: m.first[: m.length], lambda x, made: x + made),
    ]
    for length in (4, 2, 3, 4, 3):
        for model in models:
            model.length = length
        takes_turns(models, torch.randn(SIZE, length, WIDTH).double())


# As data of (WIDTH, WIDTH, WIDTH) may meet.
SHAPES = {
    "number": lambda m: m.first.sum(),
    "vector": lambda m: m.first[1] * 2,
    "column": lambda m: m.first[:, :1] * 2,
    "matrix": MADE["scaled"],
    "turned": lambda m: m.first.t(),
    "matrix behind one": lambda m: m.first[None] * 2,
    "slices": lambda m: (m.first[:, None] * m.other).tanh(),
    "slices of one": lambda m: m.first[:, None].tanh(),
    "slices of numbers": lambda m: m.first[:, :1, None].tanh(),
}


@pytest.mark.parametrize("name", ["added", "added to", "product", "product with"])
def test_other_shapes(name):
    models = [Made(make, USED[name]) for make in SHAPES.values()]
    takes_turns(models, torch.randn(WIDTH, WIDTH, WIDTH).double())


def test_other_numbers_of_outputs():
    models = [Made(lambda m, n=n: m.first[:n] * 2, USED["linear"]) for n in (2, WIDTH, 3)]
    takes_turns(models, torch.randn(SIZE, WIDTH, WIDTH).double())


@pytest.mark.parametrize("name", ["added", "product"])
def test_other_rows_of_folded_examples(name):
    def folded(x, made):
        return USED[name](x.flatten(0, 1), made).unflatten(0, (SIZE, WIDTH))

    made = (
        lambda m: m.first[:1] * 2,
        lambda m: (m.first * 2).repeat(SIZE, 1),
        lambda m: m.first[:1].expand(SIZE * WIDTH, WIDTH).contiguous(),
    )
    takes_turns([Made(make, folded) for make in made], torch.randn(SIZE, WIDTH, WIDTH).double())


# A slice for each example, which may be one that was repeated.
REPEATED = {
    "expanded": lambda m: m.first[:1].expand(SIZE, WIDTH).contiguous(),
    "each its own": lambda m: m.first[:SIZE].contiguous(),
    "repeated": lambda m: m.first[:1].repeat(SIZE, 1),
    "rearranged": lambda m: m.first[torch.tensor([2, 0, 2])],
    "after a layer": lambda m: functional.linear(m.first[:1].repeat(SIZE, 1), m.other).tanh(),
}


@pytest.mark.parametrize("name", ["added", "product", "product with"])
def test_a_slice_for_each_example(name):
    models = [Made(make, USED[name]) for make in REPEATED.values()]
    takes_turns(models, torch.randn(SIZE, WIDTH).double())


@pytest.mark.parametrize("use", USED.values(), ids=USED)
def test_parameters_are_frozen_between_steps(use):
    model, batch = Made(MADE["of several"], use), torch.randn(SIZE, WIDTH, WIDTH).double()
    for _ in range(2):
        for frozen in ((), (model.other,), (model.first,), (model.first, model.other)):
            for parameter in frozen:
                parameter.requires_grad_(False)
            check(model, batch)
            for parameter in frozen:
                parameter.requires_grad_(True)


@pytest.mark.parametrize("name", ["added", "product", "linear"])
def test_a_parameter_in_place_of_what_is_made_of_it(name):
    models = [Made(make, USED[name]) for make in (lambda m: m.first, MADE["scaled"])]
    takes_turns(models, torch.randn(SIZE, WIDTH, WIDTH).double())


@pytest.mark.parametrize("name", ["product", "product with", "linear"])
def test_losses_of_derivatives(name):
    def penalty(model, batch):
        batch = batch.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(batch).sum(), batch, create_graph=True)
        return slope.square().sum((1, 2)) + squares(model, batch)

    models = [Made(MADE[each], USED[name]) for each in ("scaled", "looked up", "of several")]
    batch = torch.randn(SIZE, WIDTH, WIDTH).double()
    for _ in range(2):
        for model in models:
            got = gs.per_example_norms(model, batch, penalty)
            assert_sqnorms(got, oracle_on_the_batch(model, batch, penalty), rtol=1e-10)
            check(model, batch)


def test_what_was_changed_unseen_is_refused_where_others_were_decided():
    def changed(m):
        made = held(m)
        with torch.no_grad():
            made.mul_(2)
        return made

    batch = torch.randn(SIZE, WIDTH, WIDTH).double()
    for name in ("added", "product", "linear"):
        for _ in range(2):
            check(Made(held, USED[name]), batch)
            with pytest.raises(gs.UnsupportedOperationError, match=r"under torch\.no_grad"):
                check(Made(changed, USED[name]), batch)


def test_what_belongs_to_another_context_is_refused_where_others_were_decided():
    def biased(model, batch, bias):
        hidden = functional.linear(model.layer(batch).tanh(), model.first * 2, bias)
        return hidden.square().sum((1, 2))

    one, other = (Made(MADE["scaled"], None) for _ in range(2))
    batch = torch.randn(SIZE, WIDTH, WIDTH).double()
    with gs.track(other, batch_size=SIZE):
        elsewhere = other.first[0] * 2
    for _ in range(2):
        with gs.track(one, batch_size=SIZE) as tracker:
            tracker.backward(biased(one, batch, one.first[0] * 2))
        with gs.track(one, batch_size=SIZE):
            with pytest.raises(gs.TrackingError, match="another tracking context"):
                biased(one, batch, elsewhere)


@pytest.mark.parametrize("name", ["added", "product", "linear", "matmul"])
def test_a_second_step_decides_nothing_of_them(monkeypatch, name):
    model, batch = Made(MADE["part"], USED[name]), torch.randn(SIZE, WIDTH, WIDTH).double()
    decided = []
    for module, function in ((_elementwise, "_product_or_sum"), (_products, "linear_layer")):
        own = getattr(module, function)

        def counted(*args, own=own, **options):
            decided.append(own)
            return own(*args, **options)

        monkeypatch.setattr(module, function, counted)
    for made in ("part", "of several", "written"):
        model.make = MADE[made]
        check(model, batch)
    assert len(decided) == 2  # the layer and the use
