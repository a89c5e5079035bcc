"""Loaders: which example is which, what is refused, and what a loader may give."""

from __future__ import annotations

import random
import time
from collections import defaultdict, namedtuple
from dataclasses import InitVar, dataclass, field
from itertools import islice

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)
from torch.utils.data.distributed import DistributedSampler

import gradstats as gs
from gradstats.scoring._batches import BatchLayout, to_device
from gradstats.scoring._loaders import Data
from tests.scoring.setting import Rows, batches, loss_fn, make_setting


@pytest.fixture
def setting():
    return make_setting()


def score(setting, loader, loss=loss_fn, **options):
    checkpoints = gs.Checkpoints(setting.states, lr=0.1)
    return gs.self_influence(setting.model, loader, loss, checkpoints, progress=False, **options)


def reference(setting):
    return score(setting, setting.train_batches).self_influence


class Numbered(Rows):
    """Gives each example with its number, counted from 100, as a dict."""

    def __getitem__(self, index):
        return {"x": self.data[0][index], "y": self.data[1][index], "number": 100 + index}


def dict_loss(model, batch):
    return loss_fn(model, (batch["x"], batch["y"]))


def test_a_shuffled_loader_is_refused(setting):
    data = TensorDataset(*setting.train)
    shuffled = BatchSampler(RandomSampler(data), 4, drop_last=False)
    for loader, reason in (
        (DataLoader(data, 4, shuffle=True), "its sampler is RandomSampler"),
        (DataLoader(setting.train_batches, None, shuffle=True), "its sampler is RandomSampler"),
        (
            DataLoader(data, 4, sampler=DistributedSampler(data, num_replicas=2, rank=0)),
            "its sampler is DistributedSampler",
        ),
        (DataLoader(data, batch_sampler=[[3, 2, 1, 0], [4, 5]]), "its batch sampler does not"),
        (DataLoader(data, batch_sampler=shuffled), "its batch sampler does not"),
    ):
        with pytest.raises(gs.LoaderError, match=rf"{reason}.*shuffle=False.*ids="):
            score(setting, loader)
        with pytest.raises(gs.LoaderError, match="the query loader does not give"):
            gs.influence(
                setting.model, setting.train_batches, loader, loss_fn,
                gs.Checkpoints(setting.states, lr=0.1), progress=False,
            )  # fmt: skip


@pytest.mark.parametrize("ids", ["number", lambda batch: batch["number"]])
def test_a_shuffled_loader_with_ids(setting, ids):
    loader = DataLoader(Numbered(setting.train), 4, shuffle=True)
    table = score(setting, loader, dict_loss, ids=ids)
    found = dict(zip(table.ids.tolist(), table.self_influence, strict=True))
    for number, value in enumerate(reference(setting)):
        assert found[100 + number] == pytest.approx(value, rel=1e-12)


def test_random_numbers_stay_as_they_would_be(setting):
    """Those of PyTorch, NumPy and Python, and of the generators of the loader and its sampler."""

    class Own(RandomSampler):
        def __iter__(self):
            random.random(), np.random.rand()
            return super().__iter__()

    class Around:
        """Draws as data sets may, and as the loader inside it does to begin."""

        def __init__(self, loader):
            self.loader = loader

        def __iter__(self):
            random.random(), np.random.rand(), torch.rand(())
            return iter(self.loader)

    data = Numbered(setting.train)
    own = torch.Generator()
    for loader in (
        DataLoader(data, 4, shuffle=True),
        DataLoader(data, 4, shuffle=True, generator=own),
        DataLoader(data, 4, sampler=Own(data, generator=own)),
        DataLoader(data, batch_sampler=BatchSampler(Own(data), 4, drop_last=False)),
        DataLoader(list(DataLoader(data, 4)), batch_size=None),
        Around(DataLoader(data, 4)),
        DataLoader(Stream([data[number] for number in range(11)]), 4, generator=own),
    ):
        before = torch.get_rng_state(), own.get_state(), np.random.get_state(), random.getstate()
        score(setting, loader, dict_loss, ids="number")
        assert torch.equal(torch.get_rng_state(), before[0])
        assert torch.equal(own.get_state(), before[1])
        np.testing.assert_equal(np.random.get_state(), before[2])
        assert random.getstate() == before[3]


class ByKey(Rows):
    """Takes keys that are no numbers, which cannot be ordered, or slices of numbers."""

    def __getitem__(self, key):
        return super().__getitem__(key["row"] if isinstance(key, dict) else key)

    def __getitems__(self, keys):
        keys = range(len(self))[keys] if isinstance(keys, slice) else keys
        return [self[key] for key in keys]


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_data_set_that_gives_whole_batches(setting, drop_last):
    data = TensorDataset(*setting.train)
    sampler = BatchSampler(SequentialSampler(data), 4, drop_last)
    expected = reference(setting)
    expected = expected[: len(expected) // 4 * 4] if drop_last else expected
    found = score(setting, DataLoader(data, batch_size=None, sampler=sampler)).self_influence
    torch.testing.assert_close(torch.as_tensor(found), torch.as_tensor(expected))
    sampler = BatchSampler(RandomSampler(data), 4, drop_last)
    with pytest.raises(gs.LoaderError, match="its sampler is RandomSampler"):
        score(setting, DataLoader(data, batch_size=None, sampler=sampler))


class LastFirst(SequentialSampler):
    def __iter__(self):
        return iter(range(len(self.data_source))[::-1])


class LastBatchFirst(BatchSampler):
    def __iter__(self):
        return iter([*super().__iter__()][::-1])


def test_samplers_of_whole_batches_that_have_an_order_of_their_own(setting):
    data = TensorDataset(*setting.train)
    for sampler in (
        BatchSampler(LastFirst(data), 4, False),
        LastBatchFirst(SequentialSampler(data), 4, False),
    ):
        with pytest.raises(gs.LoaderError, match="does not go through them in order"):
            score(setting, DataLoader(data, batch_size=None, sampler=sampler))
    batches = setting.train_batches
    with pytest.raises(gs.LoaderError, match="does not go through them in order"):
        score(setting, DataLoader(batches, batch_size=None, sampler=LastFirst(batches)))


class Lazily:
    """A batch sampler whose batches are generators of indices."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return ((index for index in batch) for batch in self.batches)


def test_a_batch_sampler_that_gives_generators(setting):
    loader = DataLoader(TensorDataset(*setting.train), batch_sampler=Lazily([[0, 1, 2], [3]]))
    found = score(setting, loader).self_influence
    torch.testing.assert_close(torch.as_tensor(found), torch.as_tensor(reference(setting)[:4]))


def test_keys_of_no_order(setting):
    numbered = Numbered(setting.train)

    class Keyed(ByKey):
        def __getitem__(self, key):
            return numbered[key["row"]]

    keys = [{"row": row} for row in (3, 1, 2)]
    table = score(
        setting, DataLoader(Keyed(setting.train), 2, sampler=keys), dict_loss, ids="number"
    )
    assert table.ids.tolist() == [103, 101, 102]
    torch.testing.assert_close(
        torch.as_tensor(table.self_influence), torch.as_tensor(reference(setting)[[3, 1, 2]])
    )
    once = (key for key in keys)
    with pytest.raises(gs.LoaderError, match="its sampler is generator"):
        score(setting, DataLoader(Keyed(setting.train), 2, sampler=once), dict_loss, ids="number")


@pytest.mark.parametrize("batch", [slice(0, 4), 3, None, torch.tensor(3)])
def test_a_batch_sampler_that_gives_no_list(setting, batch):
    loader = DataLoader(ByKey(setting.train), batch_sampler=[batch])
    with pytest.raises(gs.LoaderError, match=r"batch sampler of the training loader gives .* list"):
        score(setting, loader)


def test_a_sampler_that_draws_other_examples_each_time_is_refused(setting, tmp_path):
    data = Numbered(setting.train)
    own = torch.Generator().manual_seed(0)
    weighted = WeightedRandomSampler([1.0] * 11, 6, replacement=False, generator=own)
    for loader in (
        DataLoader(data, 4, shuffle=True, drop_last=True, generator=own),
        DataLoader(data, 4, sampler=RandomSampler(data, num_samples=5, generator=own)),
        DataLoader(data, 4, sampler=weighted),
    ):
        with pytest.raises(gs.LoaderError, match=r"other examples in each pass .*drop_last=False"):
            score(setting, loader, dict_loss, ids="number", out=tmp_path / "scores")
    # Nothing is dropped of 11 batches of one.
    loader = DataLoader(data, 1, shuffle=True, drop_last=True)
    table = score(setting, loader, dict_loss, ids="number")
    np.testing.assert_allclose(table.self_influence, reference(setting), rtol=1e-12)


def test_batches_of_similar_length_with_ids(setting):
    loader = DataLoader(Numbered(setting.train), batch_sampler=[[5, 0], [7, 3, 1]])
    table = score(setting, loader, dict_loss, ids="number")
    assert table.ids.tolist() == [105, 100, 107, 103, 101]
    np.testing.assert_allclose(table.self_influence, reference(setting)[[5, 0, 7, 3, 1]])


@pytest.mark.parametrize("options", [
    {"batch_size": 3}, {"batch_size": 4, "num_workers": 1}, {"batch_size": 20},
    {"batch_sampler": [[0, 1], [2, 3, 4, 5, 6, 7, 8, 9, 10]]},
    {"batch_size": 2, "sampler": SequentialSampler(range(11))},
])  # fmt: skip
def test_loaders_in_order(setting, options):
    loader = DataLoader(TensorDataset(*setting.train), **options)
    np.testing.assert_allclose(
        score(setting, loader).self_influence, reference(setting), rtol=1e-12
    )


def test_drop_last_scores_what_the_loader_gives(setting):
    loader = DataLoader(TensorDataset(*setting.train), 4, drop_last=True)
    with pytest.warns(gs.GradStatsWarning, match=r"training loader leaves out 3 of 11 examples"):
        found = score(setting, loader).self_influence
    np.testing.assert_allclose(found, reference(setting)[:8], rtol=1e-12)
    # Where nothing is left out there is nothing to say.
    whole = DataLoader(TensorDataset(*setting.train), 11, drop_last=True)
    np.testing.assert_allclose(score(setting, whole).self_influence, reference(setting), rtol=1e-12)


Pair = namedtuple("Pair", ["x", "y"])


@dataclass
class Fields:
    x: Tensor
    y: Tensor


@dataclass
class Counted(Fields):
    examples: int = field(init=False)

    def __post_init__(self):
        self.examples = len(self.x)


@dataclass
class Scaled(Fields):
    """Its constructor changes what it is given; one field is filled in later, another never."""

    scale: Tensor = field(init=False)
    unused: Tensor = field(init=False)

    def __post_init__(self):
        self.x = self.x / 2


@dataclass(frozen=True)
class Offset:
    """Its constructor takes what it does not keep."""

    x: Tensor
    y: Tensor
    offset: InitVar[float] = 0.5

    def __post_init__(self, offset):
        object.__setattr__(self, "x", self.x + offset)


def scaled(x, y):
    batch = Scaled(x * 2, y)
    batch.scale = torch.ones(len(x), 1)
    return batch


class Described(list):
    """A list with an attribute."""

    divisor = 0.0


def described(x, y):
    batch = Described([x * 2, y])
    batch.divisor = 2.0
    return batch


class Ordered(tuple):
    """A tuple with a constructor of its own."""

    def __new__(cls, x, y):
        return super().__new__(cls, (x, y))


def defaulting(x, y):
    """A mapping whose constructor takes no items first."""
    batch = defaultdict(list)
    batch["x"], batch["y"] = x, y
    return batch


def test_every_kind_of_batch(setting):
    expected = reference(setting)
    by_name = lambda model, batch: loss_fn(model, (batch.x, batch.y))  # noqa: E731
    cases = [
        ([list(batch) for batch in setting.train_batches], loss_fn),
        ([Pair(*batch) for batch in setting.train_batches], by_name),
        ([Fields(*batch) for batch in setting.train_batches], by_name),
        ([dict(zip("xy", batch, strict=True)) for batch in setting.train_batches], dict_loss),
        (tuple(setting.train_batches), loss_fn),
        ([defaulting(*batch) for batch in setting.train_batches], dict_loss),
        ([Counted(*batch) for batch in setting.train_batches], by_name),
        ([Ordered(*batch) for batch in setting.train_batches], loss_fn),
        (
            [described(*batch) for batch in setting.train_batches],
            lambda model, batch: loss_fn(model, (batch[0] / batch.divisor, batch[1])),
        ),
        (
            [scaled(*batch) for batch in setting.train_batches],
            lambda model, batch: loss_fn(model, (batch.x * batch.scale, batch.y)),
        ),
        (
            [Offset(x, y, 0.0) for x, y in setting.train_batches],
            lambda model, batch: loss_fn(model, (batch.x, batch.y)),
        ),
    ]
    for loader, loss in cases:
        np.testing.assert_array_equal(score(setting, loader, loss).self_influence, expected)


@pytest.mark.parametrize("kind", ["pair", "fields", "counted", "dict", "defaulting"])
def test_every_kind_of_batch_can_be_halved(setting, kind):
    make = {
        "counted": Counted,
        "defaulting": defaulting,
        "pair": lambda x, y: Pair(x, y),
        "fields": lambda x, y: Fields(x, y),
        "dict": lambda x, y: {"x": x, "y": y, "name": "shared", "more": [x]},
    }[kind]

    def hungry(model, batch):
        x, y = (batch["x"], batch["y"]) if kind.startswith("d") else (batch.x, batch.y)
        if len(x) > 2:
            raise torch.OutOfMemoryError("out of memory")
        return loss_fn(model, (x, y))

    got = score(setting, [make(*batch) for batch in setting.train_batches], hungry)
    np.testing.assert_allclose(got.self_influence, reference(setting), rtol=1e-12)


class Stream(IterableDataset):
    """Batches that can only be read from the start."""

    def __init__(self, items):
        self.items = items

    def __iter__(self):
        return iter(self.items)


def test_loaders_that_are_read_from_the_start(setting):
    stream = Stream(setting.train_batches)
    for loader in (DataLoader(stream, batch_size=None), stream):
        np.testing.assert_array_equal(score(setting, loader).self_influence, reference(setting))


def test_workers_that_persist_serve_both_sides(setting):
    """Such a loader has one iterator, begun anew by whoever asks; queries and data take turns."""
    loader = DataLoader(
        Stream(setting.train_batches), batch_size=None, num_workers=1, persistent_workers=True
    )
    begun = iter(loader)
    expected = next(begun)
    checkpoints = gs.Checkpoints(setting.states, lr=0.1)
    sides = [loader, setting.train_batches]
    got, want = (
        gs.influence(
            setting.model, side, side, loss_fn, checkpoints, budget=1, progress=False
        ).raw[:]
        for side in sides
    )  # fmt: skip
    np.testing.assert_array_equal(got, want)
    # The caller is still in the middle of a pass.
    assert not torch.equal(expected[0], next(begun)[0])
    assert loader._iterator is begun


@pytest.mark.parametrize("kind", ["self", "matrix"])
def test_what_is_complete_is_not_read_again(setting, tmp_path, kind):
    """A loader that can only be read from the start is not, for nothing."""
    reads = 0

    class Counted(Stream):
        def __iter__(self):
            nonlocal reads
            for item in self.items:
                reads += 1
                yield item

    loader = DataLoader(Counted(setting.train_batches), batch_size=None)

    def call():
        if kind == "self":
            score(setting, loader, out=tmp_path)
        else:
            gs.influence(
                setting.model, loader, setting.query_batches, loss_fn,
                gs.Checkpoints(setting.states, lr=0.1), out=tmp_path, progress=False,
            )  # fmt: skip

    call()
    reads = 0
    call()
    # Once to know the data; the first batch at each checkpoint, by whose losses it is recognised.
    assert reads == 3 + 1 + 1


class Changing:
    """Other batches in the passes after the first."""

    def __init__(self, first, then):
        self.passes = [first, then]

    def __iter__(self):
        return iter(self.passes.pop(0) if len(self.passes) > 1 else self.passes[0])


def test_a_loader_that_changes_is_an_error(setting):
    whole = setting.train_batches
    cases = [
        (whole[:2], r"gave 2 of the 3 batches"),
        ([*whole, whole[0]], r"gave more than the 3 batches of its first pass"),
        (whole[1:], r"batch 0 .* holds other data than when it was first read"),
        (batches(setting.train, 3), r"batch 0 .* has 3 examples, expected 4 as when it was fir"),
    ]
    for then, message in cases:
        with pytest.raises(gs.LoaderError, match=message):
            score(setting, Changing(whole, then))


def test_a_collate_fn_that_leaves_examples_out(setting):
    """Their positions are not those in the data set: the caller says which are meant."""

    def collate(examples):
        return default_collate([each for each in examples if each["number"] % 3])

    loader = DataLoader(Numbered(setting.train), 4, collate_fn=collate)
    message = r"has 3 examples, expected 4 as its .*collate_fn.*cu_seqlens"
    with pytest.raises(gs.LoaderError, match=message):
        score(setting, loader, dict_loss)
    kept = [place for place in range(11) if (100 + place) % 3]
    table = score(setting, loader, dict_loss, ids="number")
    assert table.ids.tolist() == [100 + place for place in kept]
    np.testing.assert_allclose(table.self_influence, reference(setting)[kept])
    table = score(setting, list(loader), dict_loss)
    assert table.ids.tolist() == list(range(len(kept)))
    np.testing.assert_allclose(table.self_influence, reference(setting)[kept])


class SameEachTime(RandomSampler):
    """Draws the same order in each pass, as samplers do that are seeded with the epoch."""

    def __iter__(self):
        generator = torch.Generator().manual_seed(5)
        return iter(torch.randperm(len(self.data_source), generator=generator).tolist())


class Shuffled:
    """A sampler of batches of one's own."""

    def __init__(self, size):
        self.size = size

    def __iter__(self):
        order = torch.randperm(self.size, generator=torch.Generator().manual_seed(5))
        return iter(part.tolist() for part in order.split(4))


class OwnLoader(DataLoader):
    """As libraries for training have them, whose passes are their own."""


@pytest.mark.parametrize("kind", [DataLoader, OwnLoader])
def test_what_is_shuffled_in_the_sampler_of_batches(setting, kind):
    """The loader's own sampler is in order there, and not asked for anything."""
    data = Rows(setting.train)
    for sampler in (BatchSampler(SameEachTime(data), 4, False), Shuffled(len(data))):
        with pytest.raises(gs.LoaderError, match="in the order of its data set"):
            score(setting, kind(data, batch_sampler=sampler))
    loader = kind(data, batch_sampler=BatchSampler(SequentialSampler(data), 4, False))
    np.testing.assert_array_equal(score(setting, loader).self_influence, reference(setting))
    numbered = Numbered(setting.train)
    loader = kind(numbered, batch_sampler=BatchSampler(SameEachTime(numbered), 4, False))
    table = score(setting, loader, dict_loss, ids="number")
    expected = reference(setting)[table.ids - 100]
    np.testing.assert_allclose(table.self_influence, expected, rtol=1e-12)


class Doubled(DataLoader):
    """Changes batches as they come."""

    def __iter__(self):
        return ((2 * x, labels) for x, labels in super().__iter__())


def test_a_loader_of_ones_own_gives_the_batches_that_are_scored(setting):
    x, labels = setting.train
    expected = score(setting, batches((2 * x, labels), 4)).self_influence
    np.testing.assert_array_equal(
        score(setting, Doubled(Rows(setting.train), 4)).self_influence, expected
    )


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_copy_to_the_host_is_waited_for(device):
    """PyTorch makes such a copy in pinned memory, and returns before it is complete."""
    ahead = []

    class Elsewhere(Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            if function is Tensor.to:
                ahead.append(kwargs["non_blocking"])
            return super().__torch_function__(function, types, args, kwargs)

    to_device({"x": torch.ones(2).as_subclass(Elsewhere)}, torch.device(device))
    assert ahead == [device != "cpu"]


class Resumable(DataLoader):
    """Goes on where it is told to, once, as torchdata's StatefulDataLoader does."""

    next_iter_state = None
    _initial_iter_for_state_dict = False

    def __iter__(self):
        if self._initial_iter_for_state_dict:  # made to ask it for the state
            self._initial_iter_for_state_dict = False
            assert self._iterator is not None
            return self._iterator
        first, self.next_iter_state = self.next_iter_state or 0, None
        return islice(super().__iter__(), first, None)

    def state_dict(self):
        self._iterator = iter(self)
        self._initial_iter_for_state_dict = True


@pytest.mark.parametrize("iterable", [False, True])
def test_a_loader_that_was_told_to_go_on_is_read_from_the_start(setting, iterable):
    data = Stream([*zip(*setting.train, strict=True)]) if iterable else Rows(setting.train)
    resumed, asked = Resumable(data, 4), Resumable(data, 4)
    resumed.next_iter_state = 1
    asked.state_dict()
    for loader in (resumed, asked):
        np.testing.assert_array_equal(score(setting, loader).self_influence, reference(setting))
    # The caller's own passes begin where they did.
    assert len(list(resumed)) == 2
    assert len(list(asked)) == 3


class Later(DataLoader):
    """Begins with the second batch."""

    def __iter__(self):
        return islice(super().__iter__(), 1, None)


def test_a_loader_that_leaves_batches_out_needs_ids(setting):
    """Places among its examples are not those in the data set."""
    loader = Later(Numbered(setting.train), 4)
    with pytest.raises(gs.LoaderError, match=r"gives 7 examples, expected 11 as its batch sampler"):
        score(setting, loader, dict_loss)
    table = score(setting, loader, dict_loss, ids="number")
    assert table.ids.tolist() == [*range(104, 111)]
    np.testing.assert_array_equal(table.self_influence, reference(setting)[4:])


class Repeated:
    """Goes through a sampler again and again."""

    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        for passes in range(1000):
            assert passes < 10, "the order of a pass is known by now"
            yield from self.sampler


class SameWorkers(DataLoader):
    """Its workers outlive a pass, as those of timm's and ultralytics' loaders for training do."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.own = self.batch_sampler
        object.__setattr__(self, "batch_sampler", Repeated(self.own))
        self.iterator = super().__iter__()

    def __len__(self):
        return len(self.own)

    def __iter__(self):
        for _ in range(len(self)):
            yield next(self.iterator)


def test_a_loader_whose_sampler_never_ends(setting):
    data = Rows(setting.train)
    table = score(setting, SameWorkers(data, 4))
    np.testing.assert_array_equal(table.self_influence, reference(setting))
    with pytest.raises(gs.LoaderError, match="in the order of its data set"):
        score(setting, SameWorkers(data, batch_sampler=BatchSampler(SameEachTime(data), 4, False)))


def test_the_training_loader_of_accelerate(setting):
    """Its order is drawn by the epoch, so that two passes may well agree."""
    accelerate = pytest.importorskip("accelerate")
    settings = accelerate.DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = accelerate.Accelerator(cpu=True, dataloader_config=settings)
    for shuffle in (True, False):
        loader = accelerator.prepare(DataLoader(Rows(setting.train), 4, shuffle=shuffle))
        if shuffle:
            with pytest.raises(gs.LoaderError, match="its batch sampler does not go through"):
                score(setting, loader)
        else:
            np.testing.assert_array_equal(score(setting, loader).self_influence, reference(setting))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_pass_of_accelerates_loader_goes_on_after_a_call(setting, workers):
    """Its workers persist in a loader inside it, and gradients accumulate up to its end."""
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    loader = accelerator.prepare(
        DataLoader(Rows(setting.train), 4, num_workers=workers, persistent_workers=workers > 0)
    )
    begun = iter(loader)
    given = [next(begun)]
    checkpoints = gs.Checkpoints(setting.states, lr=0.1)
    table = gs.self_influence(setting.model, loader, loss_fn, checkpoints)
    np.testing.assert_array_equal(table.self_influence, reference(setting))
    assert accelerator.gradient_state.active_dataloader is loader
    given.extend(begun)
    for batch, expected in zip(given, setting.train_batches, strict=True):
        assert torch.equal(batch[0], expected[0])
    assert not accelerator.gradient_state.in_dataloader


def test_a_loader_of_accelerate_that_resumes_an_epoch_is_read_from_the_start(setting):
    accelerate = pytest.importorskip("accelerate")
    stream = DataLoader(Stream([*zip(*setting.train, strict=True)]), 4)
    loader = accelerate.skip_first_batches(accelerate.Accelerator(cpu=True).prepare(stream), 1)
    np.testing.assert_array_equal(score(setting, loader).self_influence, reference(setting))
    assert len(list(loader)) == 2


class Shared(IterableDataset):
    """Examples of which each worker gives a part, with their places in the data set."""

    def __init__(self, data):
        self.data = data

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for index in range(first, len(self.data[0]), step):
            yield (*(each[index] for each in self.data), index)


def test_an_iterable_data_set_in_several_workers_is_in_another_order(setting):
    """Batches of the workers alternate, so that places among them are none in the data set."""
    loader = DataLoader(Shared(setting.train), batch_size=4, num_workers=2)

    def loss(model, batch):
        return loss_fn(model, batch[:2])

    with pytest.raises(gs.LoaderError, match=r"2 workers, .* num_workers=0, or pass as ids="):
        score(setting, loader, loss=loss)
    for workers in (0, 1):
        ordered = DataLoader(Shared(setting.train), batch_size=4, num_workers=workers)
        table = score(setting, ordered, loss=loss)
        np.testing.assert_allclose(table.self_influence, reference(setting), rtol=1e-12)
    table = score(setting, loader, loss=loss, ids=2)
    assert table.ids.tolist() != list(range(11))
    np.testing.assert_allclose(table.self_influence, reference(setting)[table.ids], rtol=1e-12)


class SlowFirst(Rows):
    """Whole batches, of which the first takes longest to read."""

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        time.sleep(0.5 * (index == 0))
        return self.data[index]


def test_workers_that_give_batches_as_they_finish(setting):
    data = SlowFirst(setting.train_batches)
    loader = DataLoader(data, batch_size=None, num_workers=2, in_order=False)
    checkpoints = gs.Checkpoints(setting.states[:1], lr=0.1)
    scores = [
        gs.self_influence(setting.model, each, loss_fn, checkpoints, progress=False).self_influence
        for each in (loader, setting.train_batches)
    ]
    np.testing.assert_array_equal(*scores)


class Shuffling(IterableDataset):
    """Examples in another order in each pass."""

    def __init__(self, data):
        self.data = data

    def __iter__(self):
        return iter([tuple(each[i] for each in self.data) for i in torch.randperm(11).tolist()])


class Augmenting(Rows):
    """Examples with noise of their own in each pass."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + 1e-9 * torch.randn_like(x), y


class Reordering:
    """No DataLoader at all."""

    def __init__(self, data):
        self.data = data

    def __iter__(self):
        order = torch.randperm(11)
        return iter([tuple(each[part] for each in self.data) for part in order.split(4)])


@pytest.mark.parametrize("make", [
    lambda data: DataLoader(Shuffling(data), 4),
    lambda data: DataLoader(Augmenting(data), 4),
    Reordering,
])  # fmt: skip
def test_a_loader_that_yields_other_data_in_each_pass_is_refused(setting, make):
    message = "batch 0 of the (training|train) loader holds other data than when it was first read"
    with pytest.raises(gs.LoaderError, match=message):
        score(setting, make(setting.train))
    with pytest.raises(gs.LoaderError, match=message):
        gs.influence(
            setting.model, make(setting.train), setting.query_batches, loss_fn,
            gs.Checkpoints(setting.states, lr=0.1), progress=False,
        )  # fmt: skip


def test_large_batches_are_compared_by_some_of_their_elements(setting, monkeypatch):
    from gradstats.scoring import _loaders

    monkeypatch.setattr(_loaders, "COMPARED", 3)
    with pytest.raises(gs.LoaderError, match="holds other data"):
        score(setting, Reordering(setting.train))
    np.testing.assert_array_equal(
        score(setting, setting.train_batches).self_influence, reference(setting)
    )


def test_a_loss_that_writes_into_the_batch_is_refused(setting):
    def writing(model, batch):
        batch[0].mul_(2)
        return loss_fn(model, batch)

    with pytest.raises(gs.LoaderError, match="If loss_fn writes into the batch"):
        score(setting, setting.train_batches, writing)


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (iter([]), "is an iterator .*can be read only once"),
        ([], "is empty: it gives no batch"),
        (DataLoader(TensorDataset(torch.ones(0, 5))), "is empty: it gives no batch"),
        (3, "is int, expected a DataLoader"),
        ("abc", "is str, expected a DataLoader"),
        (make_setting().train, r"is a single batch \(tuple of tensors\)\. Wrap it in a list"),
        (list(make_setting().train), r"is a single batch \(list of tensors\)"),
        (make_setting().train[0], r"is a single batch \(Tensor\)"),
        ({"x": torch.ones(2)}, r"is a single batch \(dict\)"),
        (np.ones((2, 5)), r"is a single batch \(ndarray\)"),
        (np.array(3), r"is a single batch \(ndarray\)"),
        (nn.Linear(1, 1), "is Linear, expected a DataLoader"),
        (TensorDataset(torch.ones(2)), r"data set \(TensorDataset\).*DataLoader\(data"),
    ],
)
def test_loaders_that_are_none(setting, loader, message):
    with pytest.raises(gs.LoaderError, match=message):
        score(setting, loader)


def test_a_list_of_batches_that_are_tensors(setting):
    def squared(model, batch):
        return model(batch).square().sum(1)

    got = score(setting, list(setting.train[0].split(4)), squared).self_influence
    expected = score(
        setting, [(x,) for x in setting.train[0].split(4)], lambda m, b: squared(m, *b)
    )
    np.testing.assert_array_equal(got, expected.self_influence)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (5, "has no ids at 5"),
        ("missing", "has no ids at 'missing'"),
        (lambda batch: [1.5] * len(batch[0]), "expected one integer or string"),
        (lambda batch: [1], "gives 1 id for a batch of 4 examples, expected one integer or"),
        (
            lambda batch: [-1, 2**63, *range(2, len(batch[0]))],
            "the ids have dtype float64, expected strings, or integers of 64 bits",
        ),
        (lambda batch: [2**64, *range(1, len(batch[0]))], "dtype object, expected strings, or"),
        (lambda batch: ["1", *range(1, len(batch[0]))], "are integers and strings, expected all"),
        (lambda batch: batch[1], "ids are not unique"),
        (lambda batch: 5, r"gives 5 \(int\) for a batch of 4 examples, expected one integer or"),
        (lambda batch: None, r"gives None \(NoneType\) for a batch of 4 examples"),
        (lambda batch: torch.tensor(3), r"gives 3 \(int\) for a batch of 4 examples"),
        (lambda batch: "abcd", r"gives 'abcd' \(str\) for a batch of 4"),
        (lambda batch: [[1], [2, 3], [4], [5]], r"gives \[1\] \(list\) for an example, expected"),
        (lambda batch: [True] * len(batch[0]), r"gives True \(bool\) for an example"),
        (lambda batch: set(range(4)), r"gives \{0, 1, 2, 3\} \(set\) for a batch"),
        (lambda batch: range(3), "gives 3 ids for a batch of 4 examples"),
    ],
)
def test_ids_that_name_nothing(setting, ids, message):
    with pytest.raises(gs.LoaderError, match=message):
        score(setting, setting.train_batches, ids=ids)


class Endless(BatchSampler):
    """Draws batches for ever."""

    def __init__(self, data):
        super().__init__(SequentialSampler(data), 4, drop_last=False)

    def __iter__(self):
        while True:
            yield from super().__iter__()


class EndlessSampler(SequentialSampler):
    """Draws examples for ever."""

    def __iter__(self):
        while True:
            yield from super().__iter__()


class EndlessStream(IterableDataset):
    """Gives the examples of a data set for ever."""

    def __init__(self, data):
        self.data = data

    def __iter__(self):
        while True:
            yield from (self.data[index] for index in range(len(self.data)))


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (lambda data: DataLoader(data, batch_sampler=Endless(data)), "Endless.*without end"),
        (lambda data: DataLoader(data, 4, sampler=EndlessSampler(data)), "EndlessSampler"),
        (lambda data: DataLoader(EndlessStream(data), 4), "ids are not unique"),
    ],
)
def test_a_loader_without_end_is_refused(setting, form, message):
    data = Numbered(setting.train)
    with pytest.raises(gs.LoaderError, match=message):
        score(setting, form(data), dict_loss, ids="number")


def test_a_batch_sampler_without_end_is_refused(setting):
    data = TensorDataset(*setting.train)
    with pytest.raises(gs.LoaderError, match="draws more examples than the 11 of its data set"):
        score(setting, DataLoader(data, batch_sampler=Endless(data)))


def list_of_tensors(ids):
    return [torch.tensor(each) for each in ids]


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor, list_of_tensors])
def test_ids_in_every_kind_of_sequence(setting, kind):
    ends = iter(np.cumsum([0, 4, 4]).tolist())

    def ids(batch):
        start = next(ends)
        return kind([start + each for each in range(len(batch[0]))])

    assert score(setting, setting.train_batches, ids=ids).ids.tolist() == list(range(11))


@pytest.mark.parametrize("largest", [2**63 - 1, 2**63, 2**64 - 1])
def test_ids_on_both_sides_of_half_the_range(setting, largest):
    given = [largest, *range(10)]
    ends = iter([0, 4, 8])

    def ids(batch):
        start = next(ends)
        return given[start : start + len(batch[0])]

    found = score(setting, setting.train_batches, ids=ids).ids
    assert found.tolist() == given
    assert found.dtype == (np.int64 if largest < 2**63 else np.uint64)


def test_the_fingerprint_covers_sizes_contents_and_ids(setting):
    def fingerprint(batches, ids=None):
        return Data(batches, "train", ids, BatchLayout()).description()["hash"]

    first = fingerprint(setting.train_batches)
    assert first == fingerprint(setting.train_batches)
    other = [tuple(each.clone() for each in batch) for batch in setting.train_batches]
    other[2][0][1, 1] += 1e-12
    regrouped = list(zip(*(each.split(5) for each in setting.train), strict=True))
    named = fingerprint(setting.train_batches, lambda batch: batch[0][:, 0].mul(1e9).long())
    found = {first, fingerprint(other), fingerprint(regrouped), named}
    assert len(found) == 4


def test_an_example_is_found_again(setting):
    for loader in (DataLoader(TensorDataset(*setting.train), 4), Stream(setting.train_batches)):
        data = Data(loader, "train", None, BatchLayout())
        for position in range(11):
            batch, place = data.example(position)
            assert torch.equal(batch[0][place], setting.train[0][position])


class AugmentsOne(Rows):
    """Data of which one example is augmented at random, in whichever process reads it."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + (1e-9 * torch.randn_like(x) if index == 5 else 0), y


@pytest.mark.parametrize("workers", [0, 1])
def test_augmentation_of_one_example_is_refused(setting, workers):
    """Also where workers draw it, whose seeds are others in each pass."""
    loader = DataLoader(AugmentsOne(setting.train), 2, num_workers=workers)
    with pytest.raises(gs.LoaderError, match="batch 2 of the training loader holds other data"):
        gs.self_influence(
            setting.model, loader, loss_fn, gs.Checkpoints(setting.states, lr=0.1), progress=False
        )
