"""Batches with lists of one entry for each example, as those for detection have them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import gradstats as gs
from tests.oracle import assert_sqnorms, flat, oracle_gradients, oracle_sqnorms


def model() -> nn.ModuleDict:
    return nn.ModuleDict({
        "image": nn.Conv2d(3, 4, 3),
        "label": nn.Embedding(5, 4),
        "box": nn.Linear(4, 4),
    }).double()  # fmt: skip


def given(counts: list[int], *, listed: bool):
    """Return images, in a list or in one tensor, and the boxes and labels of each."""
    images = [torch.randn(3, 5 + i * listed, 5).double() for i in range(len(counts))]
    targets = [
        {
            "boxes": torch.randn(n, 4).double(),
            "labels": torch.randint(5, (n,)),
            "area": torch.ones(7),
        }
        for n in counts
    ]
    return (images if listed else torch.stack(images)), targets


def normalised(image):
    """An image less the mean of each channel, as given values."""
    return image - torch.tensor([0.5, 0.4, 0.6], dtype=image.dtype)[:, None, None]


def features(m, image):
    return m["image"](normalised(image)[None]).tanh().mean((2, 3))[0]


def nearest(m, image, target):
    return (features(m, image) - target["boxes"]).abs().amin(0).sum()


def embedded(m, image, target):
    return (m["label"](target["labels"]) @ features(m, image)).tanh().sum()


def transformed(m, image, target):
    return m["box"](target["boxes"]).tanh().sum() + features(m, image).square().sum()


def by_image(loss):
    return lambda m, batch: torch.stack([loss(m, *each) for each in zip(*batch, strict=True)])


def padded(m, batch):
    """One forward of all images, padded to one size, and one look-up of all labels."""
    images, targets = batch
    x = images[0].new_zeros(len(images), 3, 8, 8)
    for i, image in enumerate(images):
        x[i, :, : image.shape[1], : image.shape[2]].copy_(normalised(image))
    rows = m["image"](x).tanh().mean((2, 3))
    labels = m["label"](torch.cat([target["labels"] for target in targets]))
    counts = [len(target["labels"]) for target in targets]
    return torch.stack(
        [(each @ rows[i]).sin().sum() for i, each in enumerate(labels.split(counts))]
    )


@pytest.mark.parametrize("counts", [[1, 2, 4], [2, 3, 3], [2, 1]], ids=str)
@pytest.mark.parametrize("listed", [False, True], ids=["images in a tensor", "images in a list"])
@pytest.mark.parametrize(
    "loss_fn",
    [by_image(nearest), by_image(embedded), by_image(transformed), padded],
    ids=["nearest", "embedded", "transformed", "padded"],
)
def test_entries_of_lists_belong_to_the_examples_in_order(loss_fn, listed, counts):
    """Also where one has as many boxes as there are examples, or images as many channels."""
    net, batch, other = model(), given(counts, listed=listed), given([5, 1], listed=listed)
    expected = oracle_gradients(net, batch, loss_fn)
    assert_sqnorms(
        gs.per_example_norms(net, batch, loss_fn), oracle_sqnorms(net, batch, loss_fn), 1e-9
    )
    products = flat(expected) @ flat(oracle_gradients(net, other, loss_fn)).T
    got = gs.inner_products(net, batch, net, other, loss_fn)
    torch.testing.assert_close(got, products, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("loss_fn", [by_image(embedded), padded], ids=["embedded", "padded"])
def test_lists_are_verified_one_entry_at_a_time(loss_fn):
    assert gs.verify(model(), given([1, 3, 2], listed=True), loss_fn).ok


@pytest.mark.parametrize("counts", [[1, 3, 2], [1, 3]], ids=str)
def test_lists_by_name(counts):
    batch = dict(zip(("images", "targets"), given(counts, listed=True), strict=True))

    def losses(m, batch):
        return padded(m, (batch["images"], batch["targets"]))

    assert gs.verify(model(), batch, losses).ok


def test_two_tensors_of_two_examples_each():
    """A list of as many tensors as there are examples, each of which has rows of both."""
    net, batch = nn.Linear(4, 3).double(), {"both": [*torch.randn(2, 2, 4).double()]}

    def losses(m, batch):
        inputs, mask = batch["both"]
        return m(inputs * mask).square().sum(1)

    assert gs.verify(net, batch, losses).ok
    assert gs.verify(net, batch, losses).check("coupling").ok


def same_for_all(m, batch):
    x, levels = batch
    values = torch.cat(levels)[None].expand(len(x), -1, -1)
    rows = m["box"](x)[:, None]
    return functional.scaled_dot_product_attention(rows, values, values).square().sum((1, 2))


def test_lists_of_what_is_the_same_for_all_examples():
    """There may be as many of them as there are examples."""
    net, batch = model(), (torch.randn(3, 4).double(), list(torch.randn(3, 5, 4).double()))
    assert_sqnorms(
        gs.per_example_norms(net, batch, same_for_all),
        oracle_sqnorms(net, batch, same_for_all),
        1e-9,
    )


@pytest.mark.parametrize("first", [True, False])
def test_entries_of_one_example_in_the_losses_of_others_are_refused(first):
    def losses(m, batch):
        x, levels = batch
        shared = m["box"](levels[0]) if first else sum(map(m["box"], levels))
        return (m["box"](x) * shared.tanh().sum(0)).square().sum(1)

    batch = torch.randn(3, 4).double(), list(torch.randn(3, 5, 4).double())
    with pytest.raises(gs.CoupledExamplesError, match="several examples"):
        gs.per_example_norms(model(), batch, losses)


def by_bag(m, batch):
    """Multiple-instance learning: one forward of all bags' rows, and a label for each bag."""
    bags, labels = batch.values() if isinstance(batch, dict) else batch
    rows = m["box"](torch.cat(bags)).split([len(bag) for bag in bags])
    scores = torch.stack([each.amax(0) for each in rows])
    return functional.cross_entropy(scores, labels, reduction="none")


@pytest.mark.parametrize("lengths", [[2, 4, 1, 3], [2, 2, 2], [3, 2, 5], [5]], ids=str)
@pytest.mark.parametrize("named", [False, True])
def test_a_list_of_sequences_may_come_first(lengths, named):
    bags = [torch.randn(length, 4).double() for length in lengths]
    batch = bags, torch.randint(4, (len(bags),))
    net = model()
    expected = oracle_sqnorms(net, batch, by_bag)
    given = dict(zip(("bags", "labels"), batch, strict=True)) if named else batch
    assert_sqnorms(gs.per_example_norms(net, given, by_bag), expected, 1e-9)


def test_a_list_of_tensors_of_all_examples_may_come_first():
    """There may be as many of them as something else has rows."""
    net = nn.Linear(4, 3).double()
    batch = [*torch.randn(2, 5, 4).double()], torch.randint(3, (5,)), torch.rand(2).double()

    def losses(m, batch):
        (first, second), labels, weights = batch
        scores = weights[0] * m(first) + weights[1] * m(second)
        return functional.cross_entropy(scores, labels, reduction="none")

    expected = oracle_sqnorms(net, batch, losses)
    assert_sqnorms(gs.per_example_norms(net, batch, losses), expected, 1e-9)


@pytest.mark.parametrize("lengths", [[2, 4, 1], [3, 3, 3], [5]], ids=str)
def test_a_context_is_told_whose_the_entries_are(lengths):
    net, bags = model(), [torch.randn(length, 4).double() for length in lengths]
    batch, count = (bags, torch.randint(4, (len(bags),))), len(bags)

    def assigned(m, batch):
        for i, bag in enumerate(batch[0]):
            gs.assign_rows(bag, torch.full((len(bag),), i))
        return by_bag(m, batch)

    if lengths[0] != count > 1:
        with (
            pytest.raises(gs.ExampleAxisError, match=r"help\(gs\.ExampleAxisError\)"),
            gs.track(net, batch_size=count) as tracker,
        ):
            tracker.backward(by_bag(net, batch))
        assert "gs.assign_rows(x, torch.full((len(x),), i))" in gs.ExampleAxisError.__doc__
    expected = oracle_sqnorms(net, batch, by_bag)
    for own in (False, True):
        with gs.track(net, batch_size=count) as tracker:
            losses = assigned(net, batch)
            losses.mean().backward() if own else tracker.backward(losses)
        assert_sqnorms(tracker.stats, expected, 1e-9)


@pytest.mark.parametrize(
    "make",
    [
        lambda rows, boxes, labels: (rows - boxes).abs().sum(),
        lambda rows, boxes, labels: functional.smooth_l1_loss(rows, boxes),
        lambda rows, boxes, labels: rows[labels > 1].sum(),
        lambda rows, boxes, labels: functional.cross_entropy(rows, labels % 4),
    ],
    ids=["differences", "distances", "chosen", "classes"],
)
def test_a_loss_over_all_images_with_as_many_targets_as_there_are_images(make):
    """Inside a context nothing says whose the targets are; what they are compared with does."""
    net, (images, targets) = model(), given([3, 3, 3], listed=False)

    def losses(m, images):
        rows = m["image"](images).tanh().flatten(2)[..., :3].transpose(1, 2)
        made = [
            make(each, target["boxes"], target["labels"])
            for each, target in zip(rows, targets, strict=True)
        ]
        return torch.stack(made)

    with gs.track(net, batch_size=3) as tracker:
        losses(net, images).mean().backward()
    assert_sqnorms(tracker.stats, oracle_sqnorms(net, images, losses), 1e-9)
