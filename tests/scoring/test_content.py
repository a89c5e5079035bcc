"""Contents are recognised by what they hold, whatever holds them."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from datetime import date

import numpy as np
import pytest
import torch
from torch.nn import functional
from torch.utils.data import DataLoader

import gradstats as gs
from gradstats.scoring._content import ContentHash
from tests.scoring.setting import loss_fn, make_setting
from tests.scoring.test_quantised import Quantised

Pair = namedtuple("Pair", ["x", "y"])


@dataclass
class Fields:
    x: object
    y: object = 3


class Opaque:
    """Says nothing of what it holds."""


class Closed(Opaque):
    """Nor does this."""


class OtherwiseQuantised(Quantised):
    """The same bytes may stand for other numbers here."""


def quantised(number, kind=Quantised):
    return kind(torch.full((2, 2), number, dtype=torch.int8), torch.ones(2, 1))


def content_hash(*values, elements=None):
    content = ContentHash(elements)
    for value in values:
        content.add(value)
    return content.hexdigest()


DIFFERENT = [
    (np.array([1, 2]), np.array([1, 3])),
    (np.array([1, 2]), np.array([1, 2], dtype=np.int32)),
    (np.arange(4).reshape(2, 2), np.arange(4)),
    (np.arange(9).reshape(3, 3)[:, 1], np.arange(9).reshape(3, 3)[:, 2]),
    (np.float64(0.1), np.float64(0.2)),
    (np.datetime64("2020-01-01"), np.datetime64("2020-01-02")),
    (np.array(["a", "b"]), np.array(["a", "c"])),
    (np.array(["a", None], dtype=object), np.array(["b", None], dtype=object)),
    (np.array([(1, 2.0)], dtype="i4,f8"), np.array([(1, 3.0)], dtype="i4,f8")),
    (np.array([(1,)], dtype=[("a", "i4")]), np.array([(1,)], dtype=[("b", "i4")])),
    ([1, 23], [12, 3]),
    (["a", "bc"], ["ab", "c"]),
    ([[1], 2], [[1, 2]]),
    (1, 1.0),
    (1, True),
    ("1", 1),
    (2j, 3j),
    (date(2020, 1, 1), date(2020, 1, 2)),
    (range(3), range(4)),
    ({1, 2}, {1, 3}),
    ({"a": np.zeros(2)}, {"a": np.ones(2)}),
    ({"a": 1}, {"b": 1}),
    (Pair(1, np.zeros(1)), Pair(1, np.ones(1))),
    (Fields(np.zeros(1)), Fields(np.ones(1))),
    (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
    (torch.eye(2).to_sparse(), 2 * torch.eye(2).to_sparse()),
    (torch.zeros(()), torch.ones(())),
    (Opaque(), Fields(1)),
    (Opaque(), Closed()),
    (quantised(1), quantised(2)),
    (quantised(1), quantised(1, OtherwiseQuantised)),
]


@pytest.mark.parametrize("number", range(len(DIFFERENT)))
def test_other_contents_have_another_hash(number):
    one, other = DIFFERENT[number]
    assert content_hash(one) == content_hash(one)
    assert content_hash(one) != content_hash(other)


def test_types_that_say_nothing_are_named():
    content = ContentHash()
    content.add([{"a": Opaque()}, {(Closed(), 1)}])
    assert content.unread == {"Opaque", "Closed"}


def test_equal_contents_have_one_hash():
    strided = torch.arange(12.0).reshape(3, 4)[:, ::2]
    assert content_hash(strided) == content_hash(strided.clone())
    assert content_hash(np.arange(8)[::2]) == content_hash(np.arange(0, 8, 2))
    spectrum = torch.randn(3, dtype=torch.complex64)
    assert content_hash(spectrum.conj()) == content_hash(spectrum.conj().resolve_conj())
    negated = torch._neg_view(torch.ones(3))
    assert content_hash(negated) == content_hash(-torch.ones(3))
    assert content_hash({1, "b", (2, 3)}) == content_hash({(2, 3), 1, "b"})


def test_some_elements_may_stand_for_all():
    """Every odd stride meets every column of rows whose length is even."""
    values = torch.zeros(64, 64)
    reference = content_hash(values, elements=64)
    for column in range(64):
        changed = values.clone()
        changed[:, column] = 1
        assert content_hash(changed, elements=64) != reference, column
        assert content_hash(changed.numpy(), elements=64) != content_hash(
            values.numpy(), elements=64
        ), column


def numpy_loss(model, batch):
    labels = torch.from_numpy(np.asarray(batch["y"]))
    return functional.cross_entropy(model(batch["x"]), labels, reduction="none")


def numpy_batches(setting, flipped=0):
    batches = [{"x": x, "y": y.numpy().copy()} for x, y in setting.train_batches]
    batches[1]["y"][:flipped] = (batches[1]["y"][:flipped] + 1) % 3
    return batches


def test_labels_in_arrays_are_part_of_the_data(tmp_path):
    setting = make_setting()
    checkpoints = gs.Checkpoints(setting.states, lr=0.1)

    def run(flipped, kind, **options):
        batches = numpy_batches(setting, flipped)
        if kind == "self":
            return gs.self_influence(
                setting.model, batches, numpy_loss, checkpoints, progress=False, **options
            ).self_influence
        return np.asarray(
            gs.influence(
                setting.model, batches, batches, numpy_loss, checkpoints, progress=False, **options
            )
        )

    for kind in ("self", "matrix"):
        out = tmp_path / kind
        assert np.array_equal(run(0, kind, out=out), run(0, kind))
        with pytest.raises(gs.StoreError, match=r"hash: on disk '\w+', now '\w+'"):
            run(1, kind, out=out)


def test_objects_without_known_contents_are_refused_on_disk_only(tmp_path):
    setting = make_setting()
    checkpoints = gs.Checkpoints(setting.states, lr=0.1)
    batches = [{**batch, "note": [Opaque()]} for batch in numpy_batches(setting)]
    with pytest.raises(gs.LoaderError, match="training loader hold objects of type Opaque"):
        gs.self_influence(
            setting.model, batches, numpy_loss, checkpoints, out=tmp_path / "out", progress=False
        )
    with pytest.raises(gs.LoaderError, match="query loader hold objects of type Opaque"):
        gs.influence(
            setting.model, numpy_batches(setting), batches, numpy_loss, checkpoints,
            out=tmp_path / "out", progress=False,
        )  # fmt: skip
    assert not (tmp_path / "out").exists()
    # Of whichever batch: a loader's sampler says how many examples there are without reading all.
    pairs = [*zip(*setting.train, strict=True)]

    def collate(rows):
        note = Opaque() if any(x is pairs[2][0] for x, _ in rows) else None
        return *map(torch.stack, zip(*rows, strict=True)), note

    def loss(model, batch):
        return loss_fn(model, batch[:2])

    loader = DataLoader(pairs, 2, collate_fn=collate)
    with pytest.raises(gs.LoaderError, match="training loader hold objects of type Opaque"):
        gs.self_influence(
            setting.model, loader, loss, checkpoints, out=tmp_path / "out", progress=False
        )
    table = gs.self_influence(setting.model, batches, numpy_loss, checkpoints, progress=False)
    expected = gs.self_influence(
        setting.model, numpy_batches(setting), numpy_loss, checkpoints, progress=False
    )
    assert np.array_equal(table.self_influence, expected.self_influence)
