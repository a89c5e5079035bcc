"""Tensors that a loss function finds where it was written, and that belong to no example."""

from __future__ import annotations

from functools import cache, lru_cache, partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

import gradstats as gs
from gradstats.capture.following._enclosed import enclosed_tensors
from gradstats.capture.parameters._attributes import tensors_kept
from tests.losses import losses_of as classify
from tests.oracle import assert_sqnorms, check_products, oracle_sqnorms

WIDTH, HIDDEN, CLASSES = 8, 16, 4


def network():
    layers = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))
    return layers.double()


def like(model):
    return {name: torch.randn_like(parameter) for name, parameter in model.named_parameters()}


# What a notebook holds.
EARLIER = like(network())


def pull_towards_earlier(model):
    return sum((p - EARLIER[name]).square().sum() for name, p in model.named_parameters())


def of_globals(model, batch):
    return classify(model, batch) + pull_towards_earlier(model)


def of_a_closure(model, batch, kept=None):
    kept = kept or like(network())

    def losses(model, batch):
        pulls = [(p - kept[name]).square().sum() for name, p in model.named_parameters()]
        return classify(model, batch) + 5 * sum(pulls)

    return losses


def with_defaults(model, batch, kept=EARLIER):
    return classify(model, batch) + (model[0].weight * kept["0.weight"]).sum()


def given(kept, model, batch):
    return classify(model, batch) + (model[0].weight - kept).square().sum()


class Penalised:
    """A loss that is an object."""

    def __init__(self):
        self.masks = {name: (value > 0).double() for name, value in EARLIER.items()}

    def __call__(self, model, batch):
        hidden = functional.linear(batch[0], model[0].weight * self.masks["0.weight"])
        logits = functional.linear(hidden.relu(), model[2].weight * self.masks["2.weight"])
        return functional.cross_entropy(logits, batch[1], reduction="none")

    def method(self, model, batch):
        return self(model, batch)


LOSSES = {
    "globals": of_globals,
    "closure": of_a_closure(None, None),
    "defaults": with_defaults,
    "partial": partial(given, EARLIER["0.weight"]),
    "object": Penalised(),
    "method": Penalised().method,
    "inner function": lambda model, batch: sum(
        [f(model, batch) for f in (lambda m, b: of_globals(m, b),)], torch.zeros(())
    ),
}


@pytest.mark.parametrize(
    ("name", "size"),
    [*((name, HIDDEN) for name in LOSSES), *(("globals", size) for size in (6, WIDTH, CLASSES))],
)
def test_they_are_constants_where_they_cannot_be_data(name, size):
    """Whether the batch has as many examples as such a tensor has rows, or not."""
    model, losses = network(), LOSSES[name]
    batch = torch.randn(size, WIDTH).double(), torch.randint(CLASSES, (size,))
    expected = oracle_sqnorms(model, batch, losses)
    assert_sqnorms(gs.per_example_norms(model, batch, losses), expected, 1e-9)
    check_products(model, batch, losses)
    assert gs.verify(model, batch, losses).ok
    run = gs.Checkpoints([model.state_dict()], lr=1.0)
    scores = gs.self_influence(model, [batch], losses, run, progress=False)
    torch.testing.assert_close(torch.tensor(scores.self_influence), sum(expected.values()))


MASK = (torch.arange(HIDDEN * WIDTH) % 3 > 0).double().view(HIDDEN, WIDTH)
SQUARE = torch.linspace(-1, 1, HIDDEN**2).double().view(HIDDEN, HIDDEN)
ORDER = torch.arange(HIDDEN).flip(0)
KERNEL = torch.linspace(-1, 1, 9).double().view(1, 1, 3, 3)
PLACES = torch.arange(WIDTH)


def masked(weight):
    return MASK * weight


class Masked(nn.Module):
    """A layer whose constants stand in the file that it is written in."""

    def __init__(self, form):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(HIDDEN, WIDTH).double())
        self.form = form

    def forward(self, x):
        return functional.linear(x, getattr(self, f"by_{self.form}")(self.weight))

    def by_product(self, weight):
        return weight * MASK

    def by_difference(self, weight):
        return EARLIER["0.weight"] - weight

    def by_function(self, weight):
        return masked(weight)

    def by_a_matrix(self, weight):
        return SQUARE @ weight

    def by_order(self, weight):
        return weight[ORDER]

    def by_comparison(self, weight):
        return torch.where(MASK > 0, weight, EARLIER["0.weight"])

    def by_joining(self, weight):
        return torch.cat([weight[:4], EARLIER["0.weight"][4:]])

    def by_kernel(self, weight):
        return functional.conv2d(weight[None, None], KERNEL, padding=1)[0, 0]


class Kept(Masked):
    """A layer that keeps a function of its constants."""

    def __init__(self):
        super().__init__("function")
        hidden = MASK.flip(0)
        self.by_function = lambda weight: weight * hidden


class Held(Masked):
    """A layer that keeps an object that is no module, which holds its constants."""

    def __init__(self):
        super().__init__("an_object")
        self.held = SimpleNamespace(matrices=[SQUARE.flip(0)])

    def by_an_object(self, weight):
        return self.held.matrices[0] @ weight


LAYERS = ("product", "difference", "function", "kept", "held", "a_matrix", "order", "comparison",
          "joining", "kernel")  # fmt: skip


@pytest.mark.parametrize(
    ("layer", "size"),
    [*((layer, HIDDEN) for layer in LAYERS), *(("function", size) for size in (6, WIDTH, CLASSES))],
)
def test_so_are_those_of_layers(layer, size):
    first = {"kept": Kept, "held": Held}.get(layer, partial(Masked, layer))()
    model = nn.Sequential(first, nn.ReLU(), nn.Linear(HIDDEN, CLASSES)).double()
    batch = torch.randn(size, WIDTH).double(), torch.randint(CLASSES, (size,))
    expected = oracle_sqnorms(model, batch, classify)
    assert_sqnorms(gs.per_example_norms(model, batch, classify), expected, 1e-9)
    check_products(model, batch, classify)
    assert gs.verify(model, batch, classify).ok


class Positions(nn.Module):
    """A model that adds to each position what it looks up for it."""

    def __init__(self):
        super().__init__()
        self.table, self.first = nn.Embedding(WIDTH, 3), nn.Linear(1, 3)
        self.last = nn.Linear(3, CLASSES)
        self.double()

    def forward(self, x):
        return self.last((self.first(x[..., None]) + self.table(PLACES)).tanh().mean(1))


@pytest.mark.parametrize("size", [5, WIDTH])
def test_so_are_positions_of_layers(size):
    model = Positions()
    batch = torch.randn(size, WIDTH).double(), torch.randint(CLASSES, (size,))
    expected = oracle_sqnorms(model, batch, classify)
    assert_sqnorms(gs.per_example_norms(model, batch, classify), expected, 1e-9)
    check_products(model, batch, classify)
    assert gs.verify(model, batch, classify).ok


@lru_cache(maxsize=4)
def distances(count):
    return (torch.arange(count)[:, None] - torch.arange(count)).abs()


class Biased(nn.Module):
    """A model with relative positions, which it remembers, as those of images often do."""

    def __init__(self, remember):
        super().__init__()
        self.table, self.last = nn.Parameter(torch.randn(9)), nn.Linear(WIDTH, CLASSES)
        self.distances = remember(distances.__wrapped__) if remember else distances
        self.double()

    def forward(self, x):
        bias = torch.cat([self.table, self.table.neg()])[self.distances(WIDTH).view(-1)]
        return self.last((x[:, None] * bias.view(WIDTH, WIDTH)).softmax(-1).mean(1))


def compilable(remember):
    """Return a decorator like those of libraries whose caches the compiler is not to see."""

    def decorate(function):
        remembered = remember(function)

        def call(*given):
            return remembered(*given)

        return call

    return decorate


class BiasedByMethod(Biased):
    @staticmethod
    @compilable(lru_cache(maxsize=4))
    def of_class(count):
        return {"all": [distances.__wrapped__(count)]}

    def __init__(self, remember):
        super().__init__(None)
        self.distances = lambda count: self.of_class(count)["all"][0]


class BiasedByOwn(BiasedByMethod):
    @cache  # noqa: B019
    def of_class(self, count):
        return {"all": [distances.__wrapped__(count)]}


class BiasedByAnotherName(BiasedByMethod):
    __module__ = nn.Linear.__module__  # as of classes that libraries derive from a layer's


class BiasedByFunction(Biased):
    def __init__(self, remember):
        super().__init__(None)
        del self.distances

    def distances(self, count):
        return through_functions(count)


@compilable(lambda function: function)
def through_functions(count):
    return distances(count)


REMEMBERED = {
    "function": lambda: Biased(None),
    "attribute": lambda: Biased(lru_cache),
    "unbounded": lambda: Biased(cache),
    "partial": lambda: Biased(lambda function: partial(lru_cache(function))),
    "static method": lambda: BiasedByMethod(None),
    "method": lambda: BiasedByOwn(None),
    "another name": lambda: BiasedByAnotherName(None),
    "functions": lambda: BiasedByFunction(None),
}


@pytest.fixture(params=REMEMBERED)
def biased(request):
    model = REMEMBERED[request.param]()
    distances.cache_clear()
    return model


@pytest.mark.parametrize("size", [WIDTH, WIDTH**2])
def test_so_is_what_a_cache_of_layers_holds_from_earlier_forwards(biased, size):
    batch = torch.randn(size, WIDTH).double(), torch.randint(CLASSES, (size,))
    expected = oracle_sqnorms(biased, batch, classify)  # outside of contexts
    with gs.track(biased, batch_size=size) as tracker:
        tracker.backward(classify(biased, batch))
    assert_sqnorms(tracker.stats, expected, 1e-9)
    biased.zero_grad()
    assert_sqnorms(gs.per_example_norms(biased, batch, classify), expected, 1e-9)
    check_products(biased, batch, classify)
    assert gs.verify(biased, batch, classify).ok


def test_what_a_cache_returned_for_a_batch_is_not_taken_for_a_constant():
    features = lru_cache(lambda x: {"all": x.tanh()})
    assert torch.equal(features(torch.zeros(2))["all"], torch.zeros(2))
    assert not tensors_kept([features])


def test_tensors_that_the_loss_function_finds_too_stay_data():
    model, batch = Positions(), (torch.randn(5, WIDTH).double(), torch.randint(CLASSES, (5,)))

    def losses(model, batch):
        return classify(model, batch) + model.table(PLACES).sum()

    with pytest.raises(gs.ExampleAxisError, match="keep them in the model"):
        gs.per_example_norms(model, batch, losses)


def test_the_loss_runs_once():
    """So that what it keeps between calls moves on once."""
    model, average, calls = network(), like(network()), []
    batch = torch.randn(6, WIDTH).double(), torch.randint(CLASSES, (6,))

    def losses(model, batch):
        calls.append(len(batch[0]))
        pull = sum((p - average[name]).square().sum() for name, p in model.named_parameters())
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                average[name].lerp_(parameter, 0.5)
        return classify(model, batch) + pull

    before = {name: value.clone() for name, value in average.items()}
    found = gs.per_example_norms(model, batch, losses)
    assert calls == [6]
    average.update(before)
    assert_sqnorms(found, oracle_sqnorms(model, batch, losses), 1e-9)


def test_operands_that_are_not_broadcast():
    """A variance may lack the last axis of what it is the variance of."""
    model, target = nn.Linear(WIDTH, 3).double(), torch.randn(5, 2).double()
    model.spread = nn.Parameter(torch.rand(5).double())
    batch = (torch.randn(5, WIDTH).double(),)

    def losses(model, batch):
        given = functional.gaussian_nll_loss(target, target + 1, model.spread, reduction="none")
        return model(batch[0]).square().sum(1) + given.sum(1)

    expected = oracle_sqnorms(model, batch, losses)
    assert_sqnorms(gs.per_example_norms(model, batch, losses), expected, 1e-9)


def test_a_batch_that_is_global_too_is_data():
    """Its rows meet one another here, as in a contrastive loss."""
    model, x = network(), torch.randn(6, WIDTH).double()

    def losses(model, batch):
        assert batch[0] is x
        logits = model(x) @ model(batch[0]).T
        return functional.cross_entropy(logits, torch.arange(6), reduction="none")

    with pytest.raises(gs.CoupledExamplesError):
        gs.per_example_norms(model, (x,), losses)


def test_a_context_is_told_to_keep_them_in_the_model():
    model = network()
    batch = torch.randn(6, WIDTH).double(), torch.randint(CLASSES, (6,))
    with pytest.raises(gs.ExampleAxisError, match="keep them in the model"):
        with gs.track(model, batch_size=6) as tracker:
            tracker.backward(of_globals(model, batch))
    model.earlier = EARLIER
    with gs.track(model, batch_size=6) as tracker:
        tracker.backward(of_globals(model, batch))
    expected = oracle_sqnorms(model, batch, of_globals)
    assert_sqnorms(tracker.stats, expected, 1e-9)


def test_what_is_found():
    first, second, third = (torch.zeros(1) for _ in range(3))
    unset = None

    def inner(model):
        return [first + each for each in [second]]

    def outer(model, batch, *, weight=third):
        return inner(model), unset, later

    found = enclosed_tensors(partial(outer, batch={"x": [first]}))
    assert set(found) == {id(first), id(second), id(third)}
    later = None
    assert enclosed_tensors(functional.cross_entropy) == {}
    assert enclosed_tensors(nn.Linear(2, 2)) == {}


class Remembering(nn.Module):
    """A model whose forward leaves something behind, and reads a matrix from where it stands."""

    def __init__(self, kind):
        super().__init__()
        self.weight, self.kind = nn.Parameter(torch.randn(HIDDEN, WIDTH).double()), kind
        self.register_buffer("average", torch.zeros(HIDDEN).double())
        self.calls, self.hidden = 0, None

    def forward(self, x):
        y = functional.linear(x, SQUARE @ self.weight)
        self.calls += 1
        if self.kind == "counter":
            return y * self.calls
        if self.kind == "buffer":
            self.average = 0.9 * self.average + y.detach().abs().mean(0)
            return y + self.average
        y = y if self.hidden is None else y + self.hidden.tanh()
        self.hidden = y.detach()
        return y


@pytest.mark.parametrize("size", [6, HIDDEN])
@pytest.mark.parametrize("kind", ["counter", "buffer", "hidden state"])
def test_a_second_run_starts_where_the_first_one_did(kind, size):
    model = Remembering(kind)
    batch = torch.randn(size, WIDTH).double(), torch.randint(HIDDEN, (size,))
    expected = oracle_sqnorms(model, batch, classify)
    assert_sqnorms(gs.per_example_norms(model, batch, classify), expected, 1e-9)
    assert model.calls == 1


def test_running_out_of_memory_in_a_second_run_is_no_refusal():
    """So that influence goes on with smaller batches."""
    model, calls = Remembering("counter"), []
    batch = torch.randn(6, WIDTH).double(), torch.randint(HIDDEN, (6,))

    def losses(model, batch):
        calls.append(len(batch[0]))
        if len(calls) == 2:
            raise torch.OutOfMemoryError
        return classify(model, batch)

    with pytest.raises(torch.OutOfMemoryError):
        gs.per_example_norms(model, batch, losses)


TEMPERATURE = torch.tensor(2.0).double()

# Losses that combine a parameter with one number that stands nowhere in the model.
WITH_A_NUMBER = {
    "scaled": lambda w, x: functional.linear(x, w * TEMPERATURE),
    "of one element": lambda w, x: functional.linear(x, w * TEMPERATURE.view(1, 1)),
    "a power": lambda w, x: functional.linear(x, w.abs() ** TEMPERATURE),
    "beside data": lambda w, x: torch.lerp(x, w[0], TEMPERATURE),
    "from the batch": lambda w, x: functional.linear(x, w / x.norm()),
    "from activations": lambda w, x: functional.linear(x, w * (x @ w.T).mean().detach()),
    "by an old constructor": lambda w, x: x @ w.T + (torch.Tensor([0]).double() + w.sum()),
}


@pytest.mark.parametrize("layer", WITH_A_NUMBER.values(), ids=WITH_A_NUMBER)
def test_one_number_beside_parameters(layer):
    torch.manual_seed(0)
    model, x = nn.Linear(WIDTH, WIDTH).double(), torch.randn(6, WIDTH).double()

    def losses(model, x):
        return layer(model.weight, x).square().sum(1)

    expected = oracle_sqnorms(model, x, losses)
    assert_sqnorms(gs.per_example_norms(model, x, losses), expected, 1e-9)
    with gs.track(model, batch_size=6) as tracker:
        losses(model, x).mean().backward()
    assert_sqnorms(tracker.stats, expected, 1e-9)


def test_numbers_of_one_example_each_beside_parameters():
    torch.manual_seed(0)
    model, x = nn.Linear(WIDTH, WIDTH).double(), torch.randn(6, WIDTH).double()

    def losses(model, x):
        return torch.stack([(model.weight * row[0]).sum().square() for row in x])

    expected = oracle_sqnorms(model, x, losses)
    assert_sqnorms(gs.per_example_norms(model, x, losses), expected, 1e-9)
    with gs.track(model, batch_size=6) as tracker:
        losses(model, x).mean().backward()
    assert_sqnorms(tracker.stats, expected, 1e-9)
