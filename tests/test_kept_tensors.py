"""Tensors that outlive a call: what a model keeps of its batch, and a user of a context."""

from __future__ import annotations

import copy
import io
import pickle
from weakref import ref

import pytest
import torch
from torch import nn
from torch.nn import functional

import gradstats as gs
from tests.functions import Kernel
from tests.losses import losses_of as loss_of
from tests.oracle import assert_sqnorms, flat, gradients_of, oracle_sqnorms

BATCH, WIDTH = 5, 3


class Remembers(nn.Module):
    """A network that keeps what it was called with, as probes and caches do."""

    def __init__(self, norm: bool = False):
        super().__init__()
        self.inner = nn.Linear(WIDTH, 4)
        self.norm = nn.BatchNorm1d(4) if norm else nn.Identity()
        self.outer = nn.Linear(4, 2)

    def forward(self, x):
        self.last = {"input": x, "views": [x[:, :1], x.T]}
        return self.outer(torch.tanh(self.norm(self.inner(x))))


def square_of(model, batch):
    return model(batch).square().sum(1)


@pytest.fixture
def batch():
    return torch.randn(BATCH, WIDTH).double(), torch.randint(2, (BATCH,))


def test_a_batch_that_the_model_kept_is_data_again(batch):
    model = Remembers().double()
    expected = oracle_sqnorms(model, batch, loss_of)
    for _ in range(2):
        assert_sqnorms(gs.per_example_norms(model, batch, loss_of), expected, 1e-12)
    assert model.last["input"] is batch[0]
    products = gs.inner_products(model, batch, model, batch, loss_of)
    torch.testing.assert_close(products.diagonal(), sum(expected.values()))
    report = gs.verify(model, batch, loss_of)
    assert report.ok, report


def test_a_batch_without_labels_that_the_model_kept(batch):
    model = Remembers().double()
    expected = oracle_sqnorms(model, batch[0], square_of)
    for _ in range(2):
        assert_sqnorms(gs.per_example_norms(model, batch[0], square_of), expected, 1e-12)
        with gs.track(model, batch_size=BATCH) as tracker:
            tracker.backward(square_of(model, batch[0]))
        assert_sqnorms(tracker.stats, expected, 1e-12)
    assert not model._forward_pre_hooks


def test_a_batch_that_the_model_kept_is_coupled_again(batch):
    model = Remembers(norm=True).double()
    for _ in range(2):
        with pytest.raises(gs.CoupledExamplesError):
            gs.per_example_norms(model, batch, loss_of)
        with pytest.raises(gs.CoupledExamplesError), gs.track(model, batch_size=BATCH) as tracker:
            tracker.backward(loss_of(model, batch))
    assert not model._forward_pre_hooks


def test_a_closed_context_keeps_nothing_of_what_the_model_kept_before(batch):
    """Such as the graph of the step before, which the next step replaces."""
    model = Remembers().double()
    model.last = {"input": model(batch[0])}
    before = ref(model.last["input"])
    with gs.track(model, batch_size=BATCH) as tracker:
        tracker.backward(loss_of(model, batch))
    assert model.last["input"] is batch[0] and tracker.stats is not None
    assert before() is None


class Positions(nn.Module):
    """Adds scaled positions that it keeps in a plain attribute, as many as there are examples."""

    def __init__(self):
        super().__init__()
        self.table = torch.randn(BATCH, WIDTH).double()
        self.scale = nn.Parameter(torch.randn(WIDTH).double())

    def forward(self, x):
        return x * (self.table * self.scale)


def test_a_table_with_as_many_rows_as_examples_stays_constant():
    model, x = Positions(), torch.randn(BATCH, BATCH, WIDTH).double()

    def loss_fn(model, batch):
        return model(batch).square().sum((1, 2))

    expected = oracle_sqnorms(model, x, loss_fn)
    assert_sqnorms(gs.per_example_norms(model, x, loss_fn), expected, 1e-12)
    with gs.track(model, batch_size=BATCH) as tracker:
        tracker.backward(loss_fn(model, x))
    assert_sqnorms(tracker.stats, expected, 1e-12)


def test_nothing_of_a_context_stays_on_what_the_user_keeps():
    model, x = nn.Linear(WIDTH, 4), torch.randn(BATCH, 6, WIDTH)
    with gs.track(model, batch_size=BATCH) as tracker:
        hidden = model(x)
        moved = hidden.transpose(0, 1).detach()
        blank = torch.zeros_like(hidden)
        blank[0] = hidden[0].detach()
        tracker.backward(hidden.square().sum((1, 2)))
        optimizer = torch.optim.Adam(model.parameters())
        optimizer.step()  # its state is made inside
        mask = torch.ones(6, 6).tril()
    assert not vars(moved) and not vars(blank) and not vars(mask)
    held = [value for state in optimizer.state.values() for value in state.values()]
    gradients = [parameter.grad for parameter in model.parameters()]
    assert not any(map(vars, (*held, *gradients)))
    file = io.BytesIO()
    torch.save({"features": moved}, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True)["features"], moved)


class Kept(nn.Module):
    """A layer that multiplies its weight by a copy of what it makes of a parameter."""

    def __init__(self, how: str):
        super().__init__()
        self.inner, self.scale, self.how = nn.Linear(WIDTH, 4), nn.Parameter(torch.randn(4)), how

    def forward(self, x):
        scale = 2 * self.scale
        scale = copy.copy(scale) if self.how == "copy" else pickle.loads(pickle.dumps(scale))
        return self.inner(x) * scale


def test_copies_made_inside_a_context_hold_nothing_of_it():
    """Files and copies do not outlive it with what was noted: loading one would take gradstats."""
    model, x = nn.Linear(WIDTH, 4), torch.randn(BATCH, 6, WIDTH)
    model.register_buffer("seen", torch.zeros(6, BATCH, 4))
    files = {"features": io.BytesIO(), "state": io.BytesIO(), "scaled": io.BytesIO()}
    with gs.track(model, batch_size=BATCH) as tracker:
        hidden = model(x)
        moved = hidden.transpose(0, 1).detach()
        model.seen.copy_(moved)
        averaged, copied = copy.deepcopy(model), copy.copy(moved)
        torch.save(moved, files["features"])
        torch.save(model.state_dict(), files["state"])
        torch.save(2 * model.weight, files["scaled"])
        tracker.backward(hidden.square().sum((1, 2)))
    assert not vars(copied) and not any(map(vars, averaged.state_dict().values()))
    assert torch.equal(averaged.seen, moved)
    for file in files.values():
        file.seek(0)
    loaded = {name: torch.load(file, weights_only=True) for name, file in files.items()}
    assert torch.equal(loaded["features"], moved)
    assert torch.equal(loaded["state"]["seen"], moved)
    assert torch.equal(loaded["scaled"], 2 * model.weight)
    assert type(loaded["scaled"]) is torch.Tensor


@pytest.mark.parametrize("how", ["copy", "pickle"])
def test_a_copy_of_a_derived_tensor_is_a_leaf(how):
    """As it is outside of contexts: no gradient goes through it."""
    model, x = Kept(how).double(), torch.randn(BATCH, WIDTH).double()
    expected = oracle_sqnorms(model, x, square_of)
    assert not expected["scale"].any()
    assert_sqnorms(gs.per_example_norms(model, x, square_of), expected, 1e-12)
    with gs.track(model, batch_size=BATCH) as tracker:
        tracker.backward(square_of(model, x))
    assert_sqnorms(tracker.stats, expected, 1e-12)
    assert model.scale.grad is None


def test_deep_copies_of_data_have_their_examples_where_those_have_them():
    """With as many positions as examples, and the positions first."""
    model, x = nn.Linear(WIDTH, 4).double(), torch.randn(BATCH, BATCH, WIDTH).double()

    def loss_fn(model, batch):
        copied = copy.deepcopy(batch.transpose(0, 1))
        return model(copied).square().sum((0, 2))

    expected = oracle_sqnorms(model, x, loss_fn)
    assert_sqnorms(gs.per_example_norms(model, x, loss_fn), expected, 1e-12)


class Retains(nn.Module):
    """Tensors made of a parameter that retain their gradient, two of them changed afterwards."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x):
        self.made = {name: 2 * self.weight for name in ("plain", "changed")}
        self.made["with data"] = self.weight[0].expand(BATCH, -1).clone()
        self.made["view"] = self.made["plain"][1:]
        for made in self.made.values():
            made.retain_grad()
            assert made.retains_grad
        self.made["changed"].mul_(3.0)
        self.made["with data"].mul_(x)
        hidden = functional.linear(functional.linear(x, self.made["changed"]), self.made["plain"])
        return (
            hidden.sin() * self.made["with data"] + functional.linear(x, self.made["view"])[:, :1]
        )


@pytest.mark.parametrize("fused", [True, False])
def test_tensors_made_of_parameters_retain_their_gradients(fused):
    model, x = Retains().double(), torch.randn(BATCH, WIDTH).double()
    expected = oracle_sqnorms(copy.deepcopy(model), x, square_of)
    square_of(model, x).mean().backward()
    retained = {name: made.grad for name, made in model.made.items()}
    model.made.clear()
    model.zero_grad()
    with gs.track(model, batch_size=BATCH, fused=fused) as tracker:
        tracker.backward(square_of(model, x))
        inside = {name: made.grad for name, made in model.made.items()}
        model.made["plain"].grad = None
    assert_sqnorms(tracker.stats, expected, 1e-12)
    torch.testing.assert_close(inside, retained)
    assert model.made.pop("plain").grad is None
    for name, made in model.made.items():
        torch.testing.assert_close(made.grad, retained[name])


class Logs(nn.Module):
    """A layer with a trained temperature, which is logged."""

    def __init__(self):
        super().__init__()
        self.layer, self.scale, self.log = nn.Linear(WIDTH, 4), nn.Parameter(torch.randn(())), []

    def forward(self, x):
        temperature = self.scale.exp()
        self.log.append(f"{temperature:.3f} {temperature:8.1e} {temperature.detach():.3f}")
        return self.layer(x) * temperature


def test_numbers_made_of_parameters_are_formatted_as_numbers():
    model, x = Logs().double(), torch.randn(BATCH, WIDTH).double()
    expected = oracle_sqnorms(model, x, square_of)
    assert_sqnorms(gs.per_example_norms(model, x, square_of), expected, 1e-12)
    with gs.track(model, batch_size=BATCH) as tracker:
        tracker.backward(square_of(model, x))
    assert_sqnorms(tracker.stats, expected, 1e-12)
    number = float(model.scale.detach().exp())
    assert set(model.log) == {f"{number:.3f} {number:8.1e} {number:.3f}"}


class Generates(nn.Module):
    """A layer whose weight is made from the only example there is."""

    def __init__(self):
        super().__init__()
        self.make = nn.Linear(WIDTH, 4 * WIDTH)
        self.bias = nn.Parameter(torch.randn(4))

    def forward(self, x):
        return functional.linear(x, self.make(x).tanh().view(4, WIDTH)) + self.bias


def test_all_of_a_batch_of_one_is_that_example():
    model, x = Generates().double(), torch.randn(1, WIDTH).double()
    expected = oracle_sqnorms(model, x, square_of)
    assert_sqnorms(gs.per_example_norms(model, x, square_of), expected, 1e-12)


class Pulled(nn.Module):
    """Dropout, a count of calls, and a penalty on as many values as there are examples."""

    def __init__(self, counts):
        super().__init__()
        self.layer, self.dropout, self.counts = nn.Linear(3, 4), nn.Dropout(0.5), counts
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        if self.counts:
            self.calls += 1
        pull = self.layer.bias[torch.tensor([0, 3, 1, 2])].cumsum(0).square().sum()
        return self.layer(self.dropout(x)).square().sum(1) + pull


def test_a_forward_that_is_run_again_draws_the_same_numbers():
    model, x = Pulled(counts=False), torch.randn(4, 3)
    model.calls_seen = []

    def losses(model, x):
        model.calls_seen.append(len(x))
        return model(x)

    torch.manual_seed(5)
    found = gs.per_example_norms(model, x, losses)
    assert model.calls_seen == [4]  # those of one forward
    after = torch.get_rng_state()
    torch.manual_seed(5)
    expected = losses(model, x)
    assert torch.equal(found.loss, expected.detach()) and torch.equal(after, torch.get_rng_state())
    norms = flat(gradients_of(model, expected)).norm(dim=1)
    torch.testing.assert_close(found.norm, norms)


def test_a_forward_that_counts_its_calls_is_not_run_again():
    model = Pulled(counts=True)
    with pytest.raises(gs.CoupledExamplesError, match="keep it in the model"):
        gs.per_example_norms(model, torch.randn(4, 3), lambda model, x: model(x))
    assert model.calls == 1


class Caches(nn.Module):
    """Keeps in eval mode what it computes of its parameters, in several ways."""

    def __init__(self):
        super().__init__()
        self.table, self.scale = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(2))
        self.layer = nn.Linear(WIDTH, 2)
        self.cache: dict[str, torch.Tensor] = {}
        self.steps = {"history": [torch.ones(2)], "mean": torch.ones(2)}
        self.width = None

    def forward(self, x):
        if "bias" not in self.cache:
            self.cache["bias"] = self.table[[1, 3, 1]].sum(0)[:2]
        if self.width is None:
            self.width = self.scale.exp()
        self.steps["mean"] = (self.steps["mean"] + self.scale) / 2
        self.steps["history"].append(self.steps["mean"])
        drift = sum(self.steps["history"])
        return torch.tanh(self.layer(x) * self.width + self.cache["bias"]) * drift


def test_what_a_model_caches_of_its_parameters_does_not_outlive_a_call(batch):
    torch.manual_seed(0)
    model = Caches().double().eval()
    expected = oracle_sqnorms(model, batch, loss_of)
    steps, history, first = model.steps, model.steps["history"], model.steps["mean"]
    for _ in range(2):
        assert_sqnorms(gs.per_example_norms(model, batch, loss_of), expected, 1e-12)
    assert_sqnorms(gs.per_example_norms(model, batch, loss_of, fallback="vmap"), expected, 1e-12)
    one = tuple(each[:2] for each in batch)
    products = gs.inner_products(model, batch, model, one, loss_of)
    whole = gs.per_example_norms(model, batch, loss_of, gram=True).gram
    torch.testing.assert_close(products, whole[:, :2])
    gs.alignment(model, batch, loss_of, "mean")
    report = gs.verify(model, batch, loss_of)
    assert report.ok, report
    assert model.cache == {} and model.width is None and model.steps is steps
    assert steps["history"] is history and len(history) == 1 and steps["mean"] is first


def test_what_a_model_caches_does_not_outlive_a_call_that_fails(batch):
    model = Caches().double().eval()

    def coupled(model, batch):
        return loss_of(model, batch) * loss_of(model, batch).sum()

    with pytest.raises(gs.CoupledExamplesError):
        gs.per_example_norms(model, batch, coupled)
    assert model.cache == {} and model.width is None and len(model.steps["history"]) == 1


class Marked(nn.Module):
    """Keeps what it computes of its weights, and notes elsewhere that it did."""

    def __init__(self, note):
        super().__init__()
        self.layer, self.other = nn.Linear(WIDTH, 2), nn.Module()
        self.note, self.table = note, torch.zeros(2, WIDTH, dtype=torch.float64)
        self.known, self.other.kinds, self.other.ready = set(), [], False
        self.register_buffer("flag", torch.zeros(()))

    def forward(self, x):
        if not (self.known or self.other.kinds or self.other.ready or self.flag):
            self.table = self.layer.weight.exp()
            self.note(self)
        return torch.tanh(x @ self.table.mT + self.layer.bias)


NOTES = {
    "in a set": lambda model: model.known.add("table"),
    "in another module": lambda model: setattr(model.other, "ready", True),
    "in another module's list": lambda model: model.other.kinds.append("table"),
    "in a buffer": lambda model: model.flag.fill_(1),
}


@pytest.mark.parametrize("where", NOTES)
def test_a_model_works_as_before_after_a_call_in_which_it_noted_that_it_keeps_something(
    where, batch
):
    torch.manual_seed(0)
    model = Marked(NOTES[where]).double().eval()
    untouched = copy.deepcopy(model)
    expected, losses = oracle_sqnorms(model, batch, loss_of), loss_of(untouched, batch)
    assert_sqnorms(gs.per_example_norms(model, batch, loss_of), expected, 1e-12)
    if where == "in a buffer":  # what was written there stays, and so does what it speaks of
        with pytest.raises(gs.UnsupportedOperationError, match=r"'layer\.weight'"):
            gs.per_example_norms(model, batch, loss_of)
    else:
        assert_sqnorms(gs.per_example_norms(model, batch, loss_of), expected, 1e-12)
    torch.testing.assert_close(loss_of(model, batch), losses, rtol=0, atol=0)


class InABuffer(nn.Module):
    """Keeps in eval mode what it computes of its weights as a buffer."""

    def __init__(self, served: bool):
        super().__init__()
        self.layer, self.scale = nn.Linear(WIDTH, 2), nn.Parameter(torch.randn(2))
        self.served = served
        self.register_buffer("table", None, persistent=False)

    def forward(self, x):
        if self.table is None:
            self.table = self.layer.weight.exp()
        x = torch.tanh(x @ self.table.mT + self.layer.bias)
        return x * self.scale if self.served else Kernel.apply(x, self.scale)


@pytest.mark.parametrize("served", [True, False], ids=["with rules", "by the fallback"])
def test_what_a_model_caches_as_a_buffer_does_not_outlive_a_call(served, batch):
    torch.manual_seed(0)
    model = InABuffer(served).double().eval()
    expected = oracle_sqnorms(model, batch, loss_of)
    for _ in range(2):
        stats = gs.per_example_norms(model, batch, loss_of, fallback="vmap")
        assert_sqnorms(stats, expected, 1e-12)
        assert model.table is None
    assert gs.verify(model, batch, loss_of).ok is served and model.table is None


class WithoutRule(Caches):
    """The same with an operation that has no rule."""

    def forward(self, x):
        return Kernel.apply(super().forward(x), self.scale)


def test_what_a_model_caches_does_not_outlive_the_fallback(batch):
    model = WithoutRule().double().eval()
    expected = oracle_sqnorms(model, batch, loss_of)
    for _ in range(2):
        found = gs.per_example_norms(model, batch, loss_of, fallback="vmap")
        assert_sqnorms(found, expected, 1e-12)
    assert model.cache == {} and model.width is None and len(model.steps["history"]) == 1
