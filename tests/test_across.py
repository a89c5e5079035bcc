"""Operations in which trained values of one example meet those of another are refused.

Whichever operation it is: those that no table names, too.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import rnn

import gradstats as gs

from .functions import Cubed
from .oracle import assert_sqnorms, oracle_on_the_batch

BATCH, WIDTH = 4, 3
LABELS = torch.tensor([0, 1, 2, 0])
SQUARE = torch.arange(16.0).double().view(4, 4)


def turned(h):
    return h.roll(1, 0)


def grid(h):
    """The examples along two axes."""
    return h.unflatten(0, (2, 2))


# What makes of hidden values h (B, d) one loss for each example; values of others enter each.
MEETINGS = {
    "cosine similarity": lambda h: functional.cosine_similarity(h, turned(h)),
    "einsum": lambda h: torch.einsum("bd,bd->b", h, h.flip(0)),
    "einsum of indexed rows": lambda h: torch.einsum("bd,bd->b", h, h[[2, 3, 0, 1]]),
    "einsum of one operand with itself": lambda h: torch.einsum("bd,cd->bc", h, h).logsumexp(1),
    "bmm": lambda h: torch.bmm(h[:, None], h.flip(0)[..., None]).flatten(),
    "linear": lambda h: functional.linear(h, h).logsumexp(1),
    "linear on one row": lambda h: functional.linear(h, h[:1]).flatten(),
    "triplets": lambda h: functional.triplet_margin_loss(h, h + 1, turned(h), reduction="none"),
    "divergence": lambda h: functional.kl_div(
        h.log_softmax(1), turned(h.softmax(1)), reduction="none"
    ).sum(1),
    "distance": lambda h: functional.pairwise_distance(h, turned(h)),
    "largest of two": lambda h: torch.max(h, h.flip(0)).sum(1),
    "smallest of two": lambda h: torch.fmin(h, h.flip(0)).sum(1),
    "clamp": lambda h: h.clamp(min=h.flip(0)).sum(1),
    "arctan2": lambda h: torch.arctan2(h, turned(h)).sum(1),
    "rsub": lambda h: torch.rsub(h, turned(h)).square().sum(1),
    "soft labels": lambda h: functional.cross_entropy(h, turned(h).softmax(1), reduction="none"),
    "bilinear": lambda h: functional.bilinear(h, turned(h), torch.ones(1, 3, 3).double())[:, 0],
    "one row": lambda h: h @ h[0],
    "one row, kept": lambda h: (h[:, None] @ h[:1].mT).flatten(),
    "table": lambda h: functional.embedding(LABELS, h).sum(1),
    "slopes": lambda h: functional.prelu(h[:, None], h[:1, :1].flatten()).sum((1, 2)),
    "distances": lambda h: torch.cdist(h, h).sum(1),
    "differences": lambda h: (h[:, None] - h[None]).square().sum((1, 2)),
    "dot products": lambda h: torch.linalg.vecdot(h, turned(h)),
    "labels beside lost rows": lambda h: functional.cross_entropy(
        h + turned(h), LABELS, reduction="none"
    ),
    "pairs of a reshape": lambda h: (grid(h)[:, 0] - grid(h)[:, 1]).exp().sum(1).repeat(2),
    "pairs, unpacked": lambda h: functional.logsigmoid(torch.sub(*h[:, 0].view(2, -1))).repeat(2),
    "pairs, two forms": lambda h: (grid(h) * h.view(1, BATCH, -1)[:, :2]).view(BATCH, -1).sum(1),
    "rankings": lambda h: functional.cross_entropy(
        h[:, :1].view(2, 2), LABELS[:2], reduction="none"
    ).repeat(2),
    "cosines of all": lambda h: functional.cosine_similarity(h[:, None], h[None], dim=-1).sum(1),
}

# What moves or mixes the examples of h (B, d), or of h (B, 3, d).
MIXES = {
    "padding": lambda h: functional.pad(h, (0, 0, 1, -1)),
    "special softmax": lambda h: torch.special.softmax(h, 0),
    "special log_softmax": lambda h: torch.special.log_softmax(h, 0),
    "fftn": lambda h: torch.fft.fftn(h).real,
    "irfftn": lambda h: torch.fft.hfftn(h + 0j, (BATCH, WIDTH)),
    "rms_norm": lambda h: torch.rms_norm(h, h.shape),
    "cumulative_trapezoid": lambda h: functional.pad(
        torch.cumulative_trapezoid(h, dim=0), (0, 0, 1, 0)
    ),
    "qr": lambda h: torch.linalg.qr(h)[0],
    "svd": lambda h: torch.linalg.svd(h, full_matrices=False)[0],
    "inverse": lambda h: torch.linalg.inv(h @ h.mT + SQUARE),
    "inverse, square": lambda h: torch.linalg.inv(torch.cat([h, h[:, :1].sin()], 1)),
    "exponential": lambda h: torch.linalg.matrix_exp(torch.cat([h, h[:, :1]], 1)),
    "adjoint": lambda h: torch.adjoint(torch.cat([h, h[:, :1]], 1)),
    "copied transpose": lambda h: torch.transpose_copy(torch.cat([h, h[:, :1]], 1), 0, 1),
    "channels": lambda h: functional.conv1d(h, torch.ones(BATCH, BATCH, 1).double()),
    "steps": lambda h: torch.conv_tbc(
        h[:, :, None], torch.ones(3, 1, 1).double(), torch.zeros(1).double(), 1
    ).flatten(1),
    "variances along columns": lambda h: (
        functional.gaussian_nll_loss(SQUARE, SQUARE + 1, h.exp()[:, 0], reduction="none").mT
    ),
    "matrix of a vector": lambda h: (SQUARE @ h[:, 0])[:, None],
    "vector in a matrix": lambda h: (h[:, 0] @ SQUARE)[:, None],
    "views written": lambda h: torch.zeros_like(h)[1:].copy_(h[:-1])._base,
    "tensordot": lambda h: torch.tensordot(SQUARE, h, dims=([0], [0])),
    "linear over the batch": lambda h: functional.linear(h[:, 0], SQUARE)[:, None],
    "bilinear over the batch": lambda h: functional.bilinear(
        h[:, 0], SQUARE[0], torch.ones(BATCH, BATCH, BATCH).double()
    )[:, None],
    "distances of pairs": lambda h: functional.pdist(h)[:BATCH, None],
    "segments": lambda h: torch.segment_reduce(
        h, "sum", lengths=torch.tensor([2, 1, 1, 0]), initial=0
    ),
    "cosine over the batch": lambda h: functional.cosine_similarity(
        SQUARE[:, None, :] + 1, h[:, 0], dim=-1
    ),
    "distance over the batch": lambda h: functional.pairwise_distance(SQUARE[:, None, :], h[:, 0]),
    "gradient": lambda h: torch.gradient(h, dim=0)[0],
    "products of vectors": lambda h: torch.linalg.vecdot(
        torch.cat([h, h[:, :1]], 1), SQUARE, dim=0
    )[:, None],
    "log of a sum": lambda h: torch.special.logsumexp(torch.cat([h, h[:, :1]], 1), 0)[:, None],
    "inner": lambda h: torch.inner(SQUARE, h[:, 0])[:, None],
    "gathered from another": lambda h: h.gather(
        0, (torch.arange(BATCH)[:, None] + torch.arange(WIDTH)) % BATCH
    ),
    "solve": lambda h: torch.linalg.solve(SQUARE + 5 * torch.eye(BATCH), h),
    "chained": lambda h: torch.chain_matmul(SQUARE, h),
    "kron": lambda h: torch.kron(h.flip(0), torch.ones(1, 2).double()),
    "transposed, then reshaped": lambda h: (
        h[:, None].expand(-1, 5, -1).transpose(0, 1).reshape(BATCH, -1)
    ),
    "sorted pairs": lambda h: grid(h).sort(1).values.view(BATCH, -1),
    "written pairs": lambda h: grid(h).clone().add_(grid(h).flip(1)).flatten(0, 1),
    "written pairs, shown": lambda h: grid(h.clone()).copy_(grid(h).flip(1).clone())._base,
    "softmax of three axes": lambda h: functional.softmax(h[:, None], _stacklevel=5)[:, 0],
}


def attended(h):
    """Keys that all examples share, made of the examples: of as many positions."""
    queries = h[:, None] * torch.ones(BATCH, 1).double()
    return functional.scaled_dot_product_attention(queries, h, h).sum((1, 2))


MEETINGS["attention to all"] = attended


# Losses of all examples that add up values of several.
SUMS = {
    "groups": lambda h: sum(h.square().sum(1).view(2, -1)).mean(),
    "chunks": lambda h: torch.add(*h.exp().chunk(2)).sum() / 3,
    "a difference": lambda h: (grid(h)[1] - grid(h)[0]).mean() * 2,
    "strides": lambda h: -(h[::2].cos() + h[1::2].cos()).mean(),
    "rows": lambda h: torch.stack([h[0] + h[1].sin(), h[2] - h[3]]).sum(),
}


@pytest.mark.parametrize("loss", SUMS.values(), ids=SUMS)
def test_losses_of_all_examples_may_add_up_groups(loss):
    m, x = model(), inputs()
    h = m(x)
    (slopes,) = torch.autograd.grad(loss(h), h)
    expected = oracle_on_the_batch(m, x, lambda m, x: (m(x) * slopes).sum(1))
    with gs.track(m, batch_size=BATCH, loss_reduction="sum") as tracker:
        loss(m(x)).backward()
    assert_sqnorms(tracker.stats, expected, 1e-10)


@pytest.mark.parametrize(
    "more",
    [torch.exp, Cubed.apply, lambda s: s.pow_(2), lambda s: s * s, lambda s: s / (1 + s),
     lambda s: s.clone().sigmoid_()],
)  # fmt: skip
def test_of_sums_of_groups_no_more_is_made(more):
    m, x = model(), inputs()
    with pytest.raises(gs.CoupledExamplesError), gs.track(m, batch_size=BATCH):
        more(torch.add(*m(x).chunk(2))).mean().backward()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(WIDTH, WIDTH).double()


def inputs() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(BATCH, WIDTH).double()


REFUSED = (gs.CoupledExamplesError, gs.ExampleAxisError, gs.UnsupportedOperationError)


@pytest.mark.parametrize("meeting", MEETINGS.values(), ids=MEETINGS)
def test_examples_that_meet(meeting):
    with pytest.raises(REFUSED):
        gs.per_example_norms(model(), inputs(), lambda m, x: meeting(m(x)))


@pytest.mark.parametrize("meeting", MEETINGS.values(), ids=MEETINGS)
def test_examples_that_meet_in_a_loss_of_the_users(meeting):
    m = model()
    with pytest.raises(REFUSED), gs.track(m, batch_size=BATCH):
        meeting(m(inputs())).mean().backward()


@pytest.mark.filterwarnings("ignore:Implicit dimension choice")
@pytest.mark.filterwarnings("ignore:torch.chain_matmul is deprecated")
@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_rows_that_move_or_mix(mix):
    def losses(m, x):
        h = mix(m(x))
        return (h * torch.linspace(1, 2, h.shape[1]).double()).sin().sum(1)

    with pytest.raises(REFUSED):
        gs.per_example_norms(model(), inputs(), losses)


# What keeps each example to itself.
APART = {
    "cosine similarity": lambda h, x: functional.cosine_similarity(h, h.flip(1)),
    "cosine similarity, both turned": lambda h, x: turned(
        functional.cosine_similarity(h.roll(-1, 0), h.sin().roll(-1, 0))
    ),
    "distance from data": lambda h, x: functional.pairwise_distance(h, turned(x)),
    "triplets": lambda h, x: functional.triplet_margin_loss(h, h.sin(), x, reduction="none"),
    "soft labels": lambda h, x: functional.cross_entropy(h, h.softmax(1), reduction="none"),
    "variances": lambda h, x: functional.gaussian_nll_loss(
        h, x, h.exp()[:, :1], reduction="none"
    ).sum(1),
    "variances of rows": lambda h, x: functional.gaussian_nll_loss(
        h, x, h.exp()[:, 0], reduction="none"
    ).sum(1),
    "variances of as many rows as columns": lambda h, x: functional.gaussian_nll_loss(
        SQUARE, SQUARE + 1, var=h.exp()[:, 0], reduction="none"
    ).sum(1),
    "einsum": lambda h, x: torch.einsum("bd,bd->b", h, h.sin()),
    "einsum of outer products": lambda h, x: torch.einsum("bi,bj->bij", h, h).sin().sum((1, 2)),
    "times a fixed vector": lambda h, x: (h @ torch.arange(3.0).double()).sin(),
    "positions times a fixed vector": lambda h, x: (
        (h[:, :, None] * x[:, None] @ torch.arange(3.0).double()).sin().sum(1)
    ),
    "a fixed vector times positions": lambda h, x: (
        (torch.arange(3.0).double() @ (h[:, :, None] * x[:, None])).sin().sum(1)
    ),
    "distances within each": lambda h, x: torch.cdist(h[:, :, None], x[:, :, None]).sum((1, 2)),
    "inverse of each": lambda h, x: torch.linalg.inv(
        torch.eye(3).double() * 9 + h[:, :, None] * x[:, None]
    ).sum((1, 2)),
    "padding of each": lambda h, x: functional.pad(h, (1, 2)).sin().cumsum(1).sum(1),
    "padding of turned rows": lambda h, x: turned(
        functional.pad(h.roll(-1, 0), (1, 2)).cumsum(1).sin().sum(1)
    ),
    "written into views": lambda h, x: written(h).sin().sum(1),
    "added row by row": lambda h, x: row_by_row(h).sin().sum(1),
    "sequences filled up": lambda h, x: (
        rnn.pad_sequence([h[i, : 1 + i % WIDTH] for i in range(BATCH)], True).sin().sum(1)
    ),
    "sequences in another order": lambda h, x: (
        rnn.pad_sequence([h[i] for i in (2, 0, 3, 1)]).sin().sum(0)[[1, 3, 0, 2]]
    ),
    "sequences of repeated positions": lambda h, x: (
        rnn.pad_sequence([h[i].repeat_interleave(i + 1) for i in range(BATCH)]).exp().sum(0)
    ),
    "softmax without an axis": lambda h, x: functional.softmax(h, _stacklevel=5)[:, 0],
    "fftn of each": lambda h, x: torch.fft.fftn(h, dim=(1,)).abs().sum(1),
    "segments of turned rows": lambda h, x: turned(
        torch.segment_reduce(
            h.roll(-1, 0).repeat_interleave(2, 0).sin(),
            "mean",
            offsets=torch.tensor([0, 2, 4, 6, 8]),
        ).sum(1)
    ),
    "segments of each": lambda h, x: torch.segment_reduce(
        h, "max", lengths=torch.tensor([[1, 2]] * BATCH), axis=1
    ).prod(1),
    "group by group": lambda h, x: torch.cat(
        [
            functional.cross_entropy(rows, labels, reduction="none")
            for rows, labels in zip(grid(h), grid(LABELS), strict=True)
        ]
    ),
    "groups turned and turned back": lambda h, x: (
        grid(torch.fliplr(grid(h).transpose(0, 1)).reshape(BATCH, -1))
        .transpose(0, 1)
        .flip(1)
        .rot90(2, (0, 1))
        .flatten(0, 1)
        .square()
        .sum(1)
    ),
    "conv1d on channels": lambda h, x: (
        functional.conv1d(h[:, None], torch.ones(2, 1, 2).double()).sin().sum((1, 2))
    ),
}

if hasattr(torch.linalg, "polar"):  # from PyTorch 2.15 on
    MIXES["polar"] = lambda h: torch.linalg.polar(h)[0]
    APART["polar of each"] = lambda h, x: torch.linalg.polar(
        torch.eye(3).double() * 9 + h[:, :, None] * x[:, None]
    )[1].sum((1, 2))
    APART["root of each"] = lambda h, x: torch.linalg.matrix_sqrth(
        torch.eye(3).double() + h[:, :, None] * h[:, None]
    ).sum((1, 2))


def written(h):
    result = torch.zeros(BATCH, 2 * WIDTH).double()
    result[:, :WIDTH].copy_(h)
    result[:, WIDTH:].copy_(h.square())
    return result


def row_by_row(h):
    result = torch.zeros(BATCH, WIDTH).double()
    for row in range(BATCH):
        result[row].add_(h[row])
    return result


@pytest.mark.filterwarnings("ignore:Implicit dimension choice")
@pytest.mark.parametrize("function", APART.values(), ids=APART)
def test_examples_that_stay_apart(function):
    m, x = model(), inputs()

    def losses(m, x):
        return function(m(x), x)

    expected = oracle_on_the_batch(m, x, losses)
    assert_sqnorms(gs.per_example_norms(m, x, losses), expected, 1e-10)


@pytest.mark.parametrize("followed", [True, False])
def test_labels_beside_rows_in_another_order(followed):
    """Labels say where the examples lie only where the trained operand does not."""

    def losses(m, x):
        h = m(x)
        rows = torch.zeros_like(h)
        (rows if followed else rows.view_as(h)).index_add_(0, torch.tensor([2, 0, 3, 1]), h)
        return functional.cross_entropy(rows, LABELS, reduction="none")

    m, x = model(), inputs()
    if followed:
        got = gs.per_example_norms(m, x, losses)
        assert_sqnorms(got, oracle_on_the_batch(m, x, losses), 1e-9)
    else:
        with pytest.raises(gs.ExampleAxisError, match="lost on the way"):
            gs.per_example_norms(m, x, losses)


def test_sums_of_groups_are_no_losses_of_one_example():
    """Whatever is said of their rows."""

    def losses(m, x):
        h = m(x).sum(1)
        return gs.assign_rows((h[:2] + h[2:]).repeat(2), torch.arange(BATCH))

    with pytest.raises(gs.CoupledExamplesError, match="AddBackward0 combines"):
        gs.per_example_norms(model(), inputs(), losses)
