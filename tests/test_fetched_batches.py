"""Batches that a DataLoader fetches inside of an open context: data, however they are made."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

import gradstats as gs
from tests.losses import losses_of as loss_fn
from tests.oracle import assert_sqnorms, assert_unchanged, oracle_sqnorms, snapshot

B = 4

pytestmark = [
    # From Python 3.12 on said of every process that has threads, PyTorch's own among them.
    pytest.mark.filterwarnings("ignore:This process:DeprecationWarning"),
    # Said where one core has to do.
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]


class Positions(nn.Module):
    """As many positions as examples, made in the forward: they are data to no context."""

    def __init__(self):
        super().__init__()
        self.embed, self.first, self.last = nn.Embedding(B, 6), nn.Linear(1, 6), nn.Linear(6, 3)

    def forward(self, x):
        places = self.embed(torch.arange(x.shape[1]))
        return self.last((self.first(x[..., None]) + places).tanh().mean(1))


def example(number):
    """One example, by operations none of which takes any data."""
    x = torch.zeros(B, dtype=torch.float64)
    x[number % B] = 1.0
    x += torch.full((B,), 0.1 * number, dtype=torch.float64)
    return x + torch.arange(B) + torch.rand(B), torch.tensor(number % 3)


class Map(Dataset):
    def __len__(self):
        return 4 * B

    def __getitem__(self, number):
        return example(number)


class Iterable(IterableDataset):
    def __iter__(self):
        own = torch.utils.data.get_worker_info()
        first, step = (own.id, own.num_workers) if own else (0, 1)
        return (example(number) for number in range(first, 4 * B, step))


class Whole(IterableDataset):
    """Whole batches, made as the iteration begins."""

    def __iter__(self):
        x = torch.linspace(-1, 1, 4 * B * B, dtype=torch.float64).view(4, B, B)
        return iter([(part, torch.arange(B) % 3) for part in x.unbind()])


def collate(examples):
    """One tensor for all, filled example by example."""
    x = torch.empty(len(examples), B, dtype=torch.float64)
    for row, (own, _) in enumerate(examples):
        x[row].copy_(own)
    return x, torch.stack([label for _, label in examples])


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Positions().double()


def check_step(model, fetch):
    """Check a step that fetches its own batch."""
    with gs.track(model, batch_size=B) as tracker:
        batch = fetch()
        tracker.backward(loss_fn(model, batch))
    assert_sqnorms(tracker.stats, oracle_sqnorms(model, batch, loss_fn), 1e-9)
    model.zero_grad()


@pytest.mark.parametrize("opened", ["before", "inside"])
@pytest.mark.parametrize("dataset", [Map(), Iterable()], ids=["map", "iterable"])
@pytest.mark.parametrize("workers", [0, 2])
def test_every_step_fetches_its_batch(model, workers, dataset, opened):
    loader = DataLoader(dataset, B, num_workers=workers)
    state = snapshot(model)
    if opened == "before":
        batches = iter(loader)
    else:
        with gs.track(model, batch_size=B) as tracker:
            batches = iter(loader)
            batch = next(batches)
            tracker.backward(loss_fn(model, batch))
        assert_sqnorms(tracker.stats, oracle_sqnorms(model, batch, loss_fn), 1e-9)
    for _ in range(3):
        check_step(model, lambda: next(batches))
    batch = next(batches, None)
    assert (batch is None) == (opened == "inside")
    model.zero_grad()
    assert_unchanged(model, state)


@pytest.mark.parametrize(
    "loader",
    [DataLoader(Map(), B, collate_fn=collate), DataLoader(Whole(), None)],
    ids=["collated", "whole"],
)
def test_batches_that_are_put_together_otherwise(model, loader):
    with gs.track(model, batch_size=B) as tracker:
        batches = iter(loader)
        batch = next(batches)
        ahead = next(batches)
        tracker.backward(loss_fn(model, batch))
    assert_sqnorms(tracker.stats, oracle_sqnorms(model, batch, loss_fn), 1e-9)
    check_step(model, lambda: ahead)  # fetched in one context, used in the next
    for batch in batches:
        check_step(model, lambda batch=batch: batch)


def test_norms_and_monitors_of_a_step_that_fetches(model):
    batches, seen = iter(DataLoader(Map(), B)), []

    def fetching(model, _):
        seen.append(next(batches))
        return loss_fn(model, seen[-1])

    stats = gs.per_example_norms(model, torch.zeros(B), fetching)
    assert_sqnorms(stats, oracle_sqnorms(model, seen[-1], loss_fn), 1e-9)
    monitor = gs.Monitor(model, every=1)
    with monitor.step(batch_size=B):
        fetching(model, None).mean().backward()
    expected = sum(oracle_sqnorms(model, seen[-1], loss_fn).values()).sqrt().mean()
    assert monitor.metrics()["example_grad_norm/mean"] == pytest.approx(float(expected))


def own_class():
    class Own(_SingleProcessDataLoaderIter):
        def __next__(self):
            return self._next_data()

    return Own


EARLIER = own_class()


@pytest.mark.parametrize(
    "of_class", [lambda: EARLIER, own_class], ids=["made before all contexts", "made later"]
)
def test_a_subclass_that_fetches_by_itself(model, of_class):
    batches = of_class()(DataLoader(Map(), B))
    for _ in range(4):
        check_step(model, lambda: next(batches))
    with pytest.raises(StopIteration):
        check_step(model, lambda: next(batches))


def test_what_other_bases_do_with_a_subclass_is_done():
    seen = []

    class Registered:
        def __init_subclass__(cls, **options):
            seen.append(options)

    class Own(_SingleProcessDataLoaderIter, Registered, name="own"):
        pass

    assert seen == [{"name": "own"}]


class Failing(Map):
    def __getitem__(self, number):
        torch.empty(1)
        raise LookupError


def test_a_fetch_that_fails_and_a_default_device(model):
    """The context goes on seeing what the forward makes; other modes than its own stay on."""
    whole = iter(DataLoader(Map(), None))
    with gs.track(model, batch_size=B) as tracker:
        with pytest.raises(LookupError):
            next(iter(DataLoader(Failing(), B)))
        with torch.device("meta"):
            assert next(whole)[0].device.type == "meta"
        batch = next(iter(DataLoader(Map(), B)))
        tracker.backward(loss_fn(model, batch))
    assert_sqnorms(tracker.stats, oracle_sqnorms(model, batch, loss_fn), 1e-9)


class WithModel(Map):
    def __init__(self, model):
        self.model = model


class Using(WithModel):
    """A data set that uses the model, as one that looks for hard examples does."""

    def __getitem__(self, number):
        x, label = example(number)
        return x + self.model(x[None]).mean(), label


def test_a_data_set_that_uses_the_model(model):
    batches = iter(DataLoader(Using(model), B))
    with torch.no_grad():
        check = next(batches)
        assert not check[0].requires_grad
    with gs.track(model, batch_size=B) as tracker:
        with torch.no_grad():
            batch = next(batches)
        with pytest.raises(gs.TrackingError, match="a DataLoader fetches"):
            next(batches)
        tracker.backward(loss_fn(model, batch))
    assert_sqnorms(tracker.stats, oracle_sqnorms(model, batch, loss_fn), 1e-9)


class Measuring(WithModel):
    """A data set that opens contexts of its own."""

    def __getitem__(self, number):
        x, label = example(number)
        one = x[None], label[None]
        stats = gs.per_example_norms(self.model, one, loss_fn)
        assert_sqnorms(stats, oracle_sqnorms(self.model, one, loss_fn), 1e-9)
        return x, label


def test_a_data_set_that_measures(model):
    batches = iter(DataLoader(Measuring(Positions().double()), B))
    for _ in range(2):
        check_step(model, lambda: next(batches))


def test_a_compiled_model(model):
    compiled = torch.compile(model, backend="eager")
    batches = iter(DataLoader(Map(), B))
    compiled(next(batches)[0])
    for _ in range(2):
        with gs.track(compiled, batch_size=B) as tracker:
            batch = next(batches)
            tracker.backward(loss_fn(compiled, batch))
        assert_sqnorms(tracker.stats, oracle_sqnorms(model, batch, loss_fn), 1e-9)
