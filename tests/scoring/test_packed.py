"""Examples of uneven length packed into one row, told apart by the bounds that each batch holds."""

from __future__ import annotations

import copy
import types
from itertools import chain

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import gradstats as gs
from gradstats.errors import ExampleAxisError, LoaderError
from tests.oracle import oracle_gradients
from tests.scoring.setting import RATES, make_setting

LENGTHS = {"train": [[3, 1, 4], [2, 2], [5, 1, 1, 2]], "query": [[2, 3], [1]]}


def packed_loss(model, batch) -> Tensor:
    """The cross-entropy of the mean of each example's rows."""
    lengths = batch["bounds"].diff()
    owner = torch.arange(len(lengths)).repeat_interleave(lengths)
    logits = model(batch["x"])
    sums = logits.new_zeros(len(lengths), 3).index_add(0, owner, logits)
    return functional.cross_entropy(sums / lengths[:, None], batch["y"], reduction="none")


class Packed:
    """A model, packed batches of both sides, and what plain autograd says of them."""

    def __init__(self):
        self.setting = make_setting()
        self.model, self.states = self.setting.model, self.setting.states
        generator = torch.Generator().manual_seed(1)
        self.sides = {
            side: [
                {
                    "x": torch.randn(sum(lengths), 5, generator=generator, dtype=torch.float64),
                    "y": torch.randint(3, (len(lengths),), generator=generator),
                    "bounds": torch.tensor([0, *np.cumsum(lengths)]),
                }
                for lengths in batches
            ]
            for side, batches in LENGTHS.items()
        }
        self.checkpoints = gs.Checkpoints(self.states, lr=list(RATES))

    def gradients(self, state, side: str) -> Tensor:
        """Return (N, d) gradients at a checkpoint."""
        model = copy.deepcopy(self.model)
        model.load_state_dict(state)
        rows = []
        for batch in self.sides[side]:
            found = oracle_gradients(model, batch, packed_loss)
            rows.append(torch.cat([gradient.flatten(1) for gradient in found.values()], 1))
        return torch.cat(rows)

    def influence(self, loss=packed_loss, **options):
        train, query = self.sides["train"], self.sides["query"]
        options = {"cu_seqlens": "bounds", "progress": False, **options}
        return gs.influence(self.model, train, query, loss, self.checkpoints, **options)

    def self_influence(self, loss=packed_loss, **options):
        options = {"cu_seqlens": "bounds", "progress": False, **options}
        return gs.self_influence(self.model, self.sides["train"], loss, self.checkpoints, **options)

    @property
    def products(self) -> np.ndarray:
        """(N, Q) raw scores."""
        parts = [
            rate * self.gradients(state, "train") @ self.gradients(state, "query").T
            for state, rate in zip(self.states, RATES, strict=True)
        ]
        return sum(parts).numpy()

    @property
    def squares(self) -> np.ndarray:
        """(N,) self-influence."""
        parts = [
            rate * self.gradients(state, "train").square().sum(1)
            for state, rate in zip(self.states, RATES, strict=True)
        ]
        return sum(parts).numpy()


@pytest.fixture
def packed():
    return Packed()


def assert_close(got, expected) -> None:
    np.testing.assert_allclose(np.asarray(got), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("source", ["bounds", lambda batch: batch["bounds"]])
def test_scores_of_packed_examples(packed, source):
    scores = packed.influence(cu_seqlens=source)
    assert scores.shape == (9, 3) and scores.train_ids.tolist() == list(range(9))
    assert_close(scores, packed.products)
    table = packed.self_influence(cu_seqlens=source)
    assert_close(table.self_influence, packed.squares)
    assert np.isfinite(table.margin).all()


def test_the_strongest_of_packed_examples(packed):
    top = packed.influence(top_k=2)
    expected = packed.products
    for query in range(3):
        order = np.argsort(-expected[:, query])
        assert top.proponents(query=query, k=2).ids.tolist() == order[:2].tolist()
        assert top.opponents(query=query, k=2).ids.tolist() == order[::-1][:2].tolist()
    assert top.plot(0, k=2).axes[0].get_xlabel() == "influence on query 0 (raw)"  # no images


def test_packed_batches_can_be_halved(packed):
    fitting = 2

    def hungry(model, batch):
        if len(batch["y"]) > fitting:
            raise torch.OutOfMemoryError("out of memory")
        return packed_loss(model, batch)

    assert_close(packed.influence(hungry), packed.products)
    assert_close(packed.self_influence(hungry).self_influence, packed.squares)
    fitting, labels = 1, packed.sides["train"][1]["y"]
    packed.sides["train"][1]["y"] = packed.sides["train"][1]["bounds"][:-1]  # 0 and 2
    with pytest.raises(LoaderError, match=r"cannot be divided: .*\(2,\) .*begin, or .* labels"):
        packed.self_influence(hungry)
    packed.sides["train"][1]["y"] = labels
    for batch in packed.sides["train"]:
        batch["edges"] = torch.zeros(2, 7, dtype=torch.long)
    with pytest.raises(LoaderError, match=r"packed examples cannot be divided: .*edges of graphs"):
        packed.self_influence(hungry)


def test_other_bounds_are_other_data(packed, tmp_path):
    """Of the same rows and as many examples."""
    table = packed.self_influence(out=tmp_path)
    again = packed.self_influence(out=tmp_path)
    np.testing.assert_array_equal(again.self_influence, table.self_influence)
    moved = {id(batch): batch["bounds"].clone() for batch in packed.sides["train"]}
    for bounds in moved.values():
        bounds[1] += 1

    def shifted(batch):
        return moved[id(batch)] if id(batch) in moved else batch["bounds"]

    with pytest.raises(gs.errors.StoreError, match="data"):
        packed.self_influence(out=tmp_path, cu_seqlens=shifted)


class Items(Dataset):
    """The training examples one by one, and an empty one among them; or pairs of them."""

    def __init__(self, packed, pairs: bool):
        x = torch.cat([batch["x"] for batch in packed.sides["train"]])
        y = torch.cat([batch["y"] for batch in packed.sides["train"]])
        parts = x.split([length for lengths in LENGTHS["train"] for length in lengths])
        examples = [*zip(parts, y, strict=True)]
        examples.insert(4, (x[:0], y[0]))
        self.items = [examples[i : i + 2] for i in range(0, 10, 2)] if pairs else examples

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


def pack(examples):
    """As DataCollatorWithFlattening does, without those that are empty."""
    whole = [(x, y) for x, y in examples if len(x)]
    lengths = [len(x) for x, _ in whole]
    return {
        "x": torch.cat([x for x, _ in whole]),
        "y": torch.stack([y for _, y in whole]),
        "bounds": torch.tensor([0, *np.cumsum(lengths)]),
    }


def test_packed_examples_that_were_left_out(packed):
    """Those behind them would have the ids of others."""

    def score(loader):
        return gs.self_influence(
            packed.model, loader, packed_loss, packed.checkpoints, cu_seqlens="bounds",
            progress=False,
        )  # fmt: skip

    loader = DataLoader(Items(packed, pairs=False), 4, collate_fn=pack)
    with pytest.raises(LoaderError, match=r"gives 9 examples, expected 10 as its batch sampler"):
        score(loader)
    assert_close(score(list(loader)).self_influence, packed.squares)
    pairs = Items(packed, pairs=True)  # items of several examples, whose number is their own
    loader = DataLoader(pairs, 2, collate_fn=lambda items: pack([*chain.from_iterable(items)]))
    assert_close(score(loader).self_influence, packed.squares)


def test_ids_of_packed_examples(packed):
    names = iter("abcdefghi")
    for batch in packed.sides["train"]:
        batch["id"] = [next(names) for _ in batch["y"]]
    table = packed.self_influence(ids="id")
    assert "".join(table.ids) == "abcdefghi"
    assert_close(table.self_influence, Packed().squares)


class Graphs:
    """A batch of graphs: attributes by name, that moves itself, and is changed by that."""

    def __init__(self, stored: dict):
        self.stored, self.moved = stored, False

    def __getattr__(self, name: str):
        if name == "stored" or name not in self.stored:
            raise AttributeError(name)
        return self.stored[name]

    def __getitem__(self, name: str):
        return self.stored[name]

    def keys(self):
        return list(self.stored)

    def to(self, device):
        self.moved = True
        return self


def test_batches_of_graphs(packed, tmp_path):
    for side, batches in packed.sides.items():
        packed.sides[side] = [Graphs(batch) for batch in batches]

    def loss(model, batch):
        assert batch.moved
        return packed_loss(model, batch)

    scores = packed.influence(loss, cu_seqlens=lambda batch: batch.bounds, out=tmp_path)
    assert_close(scores, Packed().products)
    assert not any(batch.moved for batches in packed.sides.values() for batch in batches)
    packed.sides["train"][1].x.mul_(2)
    with pytest.raises(gs.errors.StoreError, match="train"):
        packed.influence(loss, cu_seqlens=lambda batch: batch.bounds, out=tmp_path)


def test_a_nested_tensor_beside_its_bounds(packed):
    batch = {**packed.sides["train"][0]}
    batch["x"] = torch.nested.nested_tensor(
        [torch.ones(2, 3), torch.ones(3, 3)], layout=torch.jagged
    )
    packed.sides["train"] = [batch]
    with pytest.raises(ExampleAxisError, match="the batch holds a nested tensor"):
        packed.self_influence()


def test_graphs_beside_other_things(packed):
    """What a batch holds beside others stays as the loader gives it."""
    for side, batches in packed.sides.items():
        packed.sides[side] = [(Graphs(batch), batch["y"]) for batch in batches]

    def loss(model, batch):
        assert not batch[0].moved
        return packed_loss(model, batch[0])

    scores = packed.influence(loss, cu_seqlens=lambda batch: batch[0].bounds)
    assert_close(scores, Packed().products)


def test_batches_that_cannot_be_looked_into(packed):
    for side, batches in packed.sides.items():
        packed.sides[side] = [types.SimpleNamespace(**batch) for batch in batches]

    def loss(model, batch):
        return packed_loss(model, vars(batch))

    bounds = {"cu_seqlens": lambda batch: batch.bounds}
    assert_close(packed.influence(loss, **bounds), Packed().products)


@pytest.mark.parametrize(
    "source, error, message",
    [
        (
            torch.tensor([0, 3, 4, 8]),
            LoaderError,
            "cu_seqlens is Tensor, expected the place where each",
        ),
        ("ends", LoaderError, "has no cu_seqlens at 'ends'"),
        ("x", ExampleAxisError, "cu_seqlens has dtype torch.float64"),
        (lambda batch: batch["bounds"][:-1], ExampleAxisError, "cu_seqlens ends with 4 rows"),
    ],
)
def test_bounds_that_are_none(packed, source, error, message):
    with pytest.raises(error, match=message):
        packed.self_influence(cu_seqlens=source)
