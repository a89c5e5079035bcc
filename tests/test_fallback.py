"""Parameters without a rule, one example at a time: as exact as the rest, and only when asked."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy
import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import gradstats as gs
from benchmarks.ledger import peak_memory
from tests.functions import linear_without_rule, recomputing
from tests.losses import losses_of as classify
from tests.oracle import assert_sqnorms, assert_unchanged, oracle_sqnorms, snapshot

B = 5


class Doubled(torch.autograd.Function):
    """A user's Function: PyTorch reports no use of its parameter, and vmap cannot run it."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return 2 * x * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return 2 * grad * weight, 2 * (grad * x).sum(0)


class Awkward(nn.Module):
    """Two operations without a rule, one hidden, beside one that has a rule."""

    def __init__(self, hidden: bool):
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.centres = nn.Parameter(torch.randn(3, 4))
        self.scale = nn.Parameter(torch.rand(3) + 0.5)
        self.head = nn.Linear(3, 3)
        self.hidden = hidden

    def forward(self, x):
        x = linear_without_rule(self.body(x).tanh(), self.centres)
        x = Doubled.apply(x, self.scale) if self.hidden else x * self.scale
        return self.head(x)


class ShiftedAttention(nn.Module):
    """Subtracts the largest score of the batch from all, as Grounding DINO does.

    Attributes:
        function: what follows; a softmax cancels what was subtracted.
    """

    def __init__(self, function):
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)
        self.function = function

    def forward(self, x):
        scores = self.first(x)
        return self.last(self.function(scores - scores.max()))


def test_what_is_subtracted_from_all_examples_and_cancels(batch):
    model = ShiftedAttention(lambda scores: scores.softmax(-1)).double()
    with pytest.raises(gs.ExampleAxisError, match=r"this is checked\), .*fallback="):
        gs.per_example_norms(model, batch, classify)
    stats = gs.per_example_norms(model, batch, classify, fallback="vmap")
    assert_sqnorms(stats, oracle_sqnorms(model, batch, classify), rtol=1e-9)


def test_what_is_subtracted_from_all_examples_and_does_not_cancel(batch):
    model = ShiftedAttention(torch.sin).double()
    with pytest.raises(gs.CoupledExamplesError, match="alone"):
        gs.per_example_norms(model, batch, classify, fallback="vmap")


@pytest.fixture
def batch():
    return torch.randn(B, 4, dtype=torch.float64), torch.randint(3, (B,))


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("workspace", [None, 1, 800])
def test_what_has_no_rule_comes_out_exact(batch, hidden, workspace):
    model = Awkward(hidden).double()
    state = snapshot(model)
    with pytest.raises(gs.UnsupportedOperationError, match=r'fallback="vmap"'):
        gs.per_example_norms(model, batch, classify)
    stats = gs.per_example_norms(model, batch, classify, fallback="vmap", workspace=workspace)
    assert_sqnorms(stats, oracle_sqnorms(model, batch, classify), 1e-9)
    assert list(stats.by_parameter) == [name for name, _ in model.named_parameters()]
    torch.testing.assert_close(stats.loss, classify(model, batch).detach())
    assert_unchanged(model, state)


class ClassTokens(nn.Module):
    """Takes the token of its class, which all rows have, from those of the first frames."""

    def __init__(self):
        super().__init__()
        self.token, self.body = nn.Parameter(torch.randn(1, 1, 6)), nn.Linear(4, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        frames = self.body(x.flatten(0, 1))
        frames = torch.cat([self.token.expand(len(frames), 1, -1), frames.unsqueeze(1)], 1)
        token, rest = frames[: len(x), :1], frames[:, 1].unflatten(0, (-1, 2))
        return self.head(torch.cat([token, rest], 1).tanh()).mean(1)


def test_all_parameters_where_it_is_not_known_whose_the_losses_are():
    """As in TimeSformer."""
    model = ClassTokens().double()
    batch = torch.randn(B, 2, 4, dtype=torch.float64), torch.randint(3, (B,))
    with pytest.raises(gs.ExampleAxisError, match=r'fallback="vmap"'):
        gs.per_example_norms(model, batch, classify)
    with pytest.raises(gs.ExampleAxisError, match=r'which loss .* fallback="vmap"'):
        gs.per_example_norms(model, batch, classify, exclude=["head.*"])
    stats = gs.per_example_norms(model, batch, classify, fallback="vmap")
    assert_sqnorms(stats, oracle_sqnorms(model, batch, classify), 1e-9)


@pytest.mark.parametrize("hidden", [False, True])
def test_gradients_are_those_before_hooks(batch, hidden):
    """With a rule and without: hooks may scale or mask what arrives in .grad."""
    model = Awkward(hidden).double()
    expected = oracle_sqnorms(model, batch, classify)
    seen = []
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: seen.append(gradient) or 2 * gradient)
    stats = gs.per_example_norms(model, batch, classify, fallback="vmap")
    assert_sqnorms(stats, expected, 1e-10)
    seen.clear()
    classify(model, batch).sum().backward()
    assert len(seen) == len(list(model.parameters()))


@pytest.mark.parametrize("kind", [list, tuple, numpy.array])
def test_what_each_example_has_outside_of_tensors(batch, kind):
    """Strings and targets of different lengths, as collating leaves them."""
    model, x = Awkward(hidden=False).double(), batch[0]
    names = kind(["one", "two", "four", "one", "two"])
    factors = {"one": 1.0, "two": 2.0, "four": 4.0}
    targets = [{"labels": torch.randint(3, (count,))} for count in (1, 3, 2, 4, 1)]

    def losses(model, batch):
        return torch.stack(
            [
                factors[str(name)] * functional.cross_entropy(row.expand(len(wanted), -1), wanted)
                for row, name, wanted in zip(
                    model(batch["x"]), batch["names"],
                    [target["labels"] for target in batch["targets"]], strict=True,
                )
            ]
        )  # fmt: skip

    held = {"x": x, "names": names, "targets": targets, "scale": 2.0}
    expected = oracle_sqnorms(model, x, lambda model, x: losses(model, {**held, "x": x}))
    assert_sqnorms(gs.per_example_norms(model, held, losses, fallback="vmap"), expected, 1e-9)
    served = nn.Linear(4, 3).double()
    report = gs.verify(served, held, losses)
    assert report.ok and report.check("coupling").ok


def test_a_model_of_nothing_else(batch):
    class Only(nn.Module):
        def __init__(self):
            super().__init__()
            self.centres = nn.Parameter(torch.randn(3, 4))

        def forward(self, x):
            return linear_without_rule(x, self.centres)

    model = Only().double()
    stats = gs.per_example_norms(model, batch, classify, fallback="vmap")
    assert_sqnorms(stats, oracle_sqnorms(model, batch, classify), 1e-9)


@pytest.mark.parametrize("hidden", [False, True])
def test_what_no_loss_uses_beside_what_has_no_rule(batch, hidden):
    class Beside(nn.Module):
        def __init__(self):
            super().__init__()
            self.unused = nn.Parameter(torch.ones(2))
            self.weight = nn.Parameter(torch.randn(4) if hidden else torch.randn(3, 4))

        def forward(self, x):
            function = Doubled.apply if hidden else linear_without_rule
            return function(x, self.weight)

    model = Beside().double()
    stats = gs.per_example_norms(model, batch, classify, fallback="vmap")
    assert_sqnorms(stats, oracle_sqnorms(model, batch, classify), 1e-9)
    assert list(stats.by_parameter) == ["unused", "weight"]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # of nested ones
@pytest.mark.parametrize("kind", ["reentrant", "nested", "not reentrant", "another library's"])
def test_inside_checkpoints(batch, kind):
    """Parameters of reentrant ones appear where torch.autograd.grad does not look."""

    class Inside(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(3, 3)
            self.centres = nn.Parameter(torch.randn(3, 4))
            self.scale = nn.Parameter(torch.rand(3) + 0.5)

        def forward(self, x):
            return self.last(run(self.inside, self.first(x)))

        def inside(self, x):
            x = linear_without_rule(x.tanh(), self.centres)
            return run(self.innermost, x) if kind == "nested" else self.innermost(x)

        def innermost(self, x):
            return Doubled.apply(x, self.scale)

    def run(function, x):
        if kind == "another library's" and not plain:
            return recomputing(function, x)
        reentrant = kind in ("reentrant", "nested") and not plain
        return checkpoint(function, x, use_reentrant=reentrant)

    model, plain = Inside().double(), True
    expected = oracle_sqnorms(model, batch, classify)
    state, plain = snapshot(model), False
    if kind == "another library's":
        with pytest.raises(gs.UnsupportedOperationError, match=r"found for \['centres'"):
            gs.per_example_norms(model, batch, classify, fallback="vmap")
    else:
        stats = gs.per_example_norms(model, batch, classify, fallback="vmap")
        assert_sqnorms(stats, expected, 1e-9)
    assert_unchanged(model, state)


def test_patterns_and_frozen_parameters(batch):
    model = Awkward(hidden=True).double()
    model.scale.requires_grad_(False)
    expected = oracle_sqnorms(model, batch, classify)
    stats = gs.per_example_norms(model, batch, classify, fallback="vmap", exclude="head.*")
    assert_sqnorms(stats, {n: v for n, v in expected.items() if not n.startswith("head")}, 1e-9)
    stats = gs.per_example_norms(model, batch, classify, fallback="vmap", parameters="centres")
    assert_sqnorms(stats, {"centres": expected["centres"]}, 1e-9)


def test_rows_in_an_order_of_their_own():
    """Routing by matrices of zeros and ones tells which example a row belongs to."""

    class Routes(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)
            self.head = nn.Linear(3, 3)

        def forward(self, x):
            flat = x.reshape(-1, 4)
            order = flat.sum(1).argsort()
            there = torch.eye(len(flat), dtype=x.dtype)[order]
            out = there.t() @ self.layer(there @ flat)
            return self.head(out.view(*x.shape[:2], 3).mean(1))

    batch = torch.randn(B, 2, 4, dtype=torch.float64), torch.randint(3, (B,))
    model = Routes().double()
    expected = oracle_sqnorms(model, batch, classify)
    for fallback in (None, "vmap"):
        stats = gs.per_example_norms(model, batch, classify, fallback=fallback)
        assert_sqnorms(stats, expected, 1e-9)


def test_a_batch_that_cannot_be_taken_apart(batch):
    class Unknown:
        x, y = batch

    losses = lambda model, batch: classify(model, (batch.x, batch.y))  # noqa: E731
    bounds = torch.arange(B + 1)
    with pytest.raises(gs.ExampleAxisError, match=r"holds a Unknown.*cannot be taken apart.*vmap"):
        gs.per_example_norms(
            Awkward(hidden=True).double(), Unknown(), losses, cu_seqlens=bounds, fallback="vmap"
        )


def test_fields_that_are_not_given_when_a_batch_is_made(batch):
    """A dataclass may compute some of its tensors, here the first."""

    @dataclass
    class Batch:
        doubled: torch.Tensor = field(init=False)
        x: torch.Tensor
        target: torch.Tensor

        def __post_init__(self):
            self.doubled = 2 * self.x

    def squares(model, batch):
        return (model(batch[0]) - batch[1][:, :3]).square().sum(1)

    losses = lambda model, batch: squares(model, (batch.doubled - batch.x, batch.target))  # noqa: E731
    model, pair = Awkward(hidden=False).double(), (batch[0], batch[0].flip(0) + 1)
    stats = gs.per_example_norms(model, Batch(*pair), losses, fallback="vmap")
    assert_sqnorms(stats, oracle_sqnorms(model, pair, squares), 1e-9)


def test_a_loss_that_takes_from_the_batch(batch):
    held = {"x": batch[0], "labels": batch[1]}
    losses = lambda model, batch: classify(model, (batch["x"], batch.pop("labels")))  # noqa: E731
    model = Awkward(hidden=True).double()
    stats = gs.per_example_norms(model, held, losses, fallback="vmap")
    assert_sqnorms(stats, oracle_sqnorms(model, batch, classify), 1e-9)
    assert set(held) == {"x", "labels"}


@pytest.mark.parametrize("workspace", [None, 1])
@pytest.mark.parametrize("hidden", [False, True])
def test_a_loss_that_writes_into_the_batch(batch, hidden, workspace):
    """Each forward finds the batch as it was; the call leaves it as one forward does."""

    def losses(model, batch):
        batch[0].mul_(3).sub_(1)
        return classify(model, batch)

    model = Awkward(hidden).double()
    held = batch[0].clone(), batch[1]
    options = {"fallback": "vmap", "workspace": workspace}
    stats = gs.per_example_norms(model, held, losses, **options)
    written = batch[0] * 3 - 1
    assert_sqnorms(stats, oracle_sqnorms(model, (written, batch[1]), classify), 1e-9)
    assert torch.equal(held[0], written)


def test_an_expanded_tensor_in_the_batch_is_not_copied_whole(batch):
    """Here the copy would have a petabyte; and what was written through its base is restored."""
    base = torch.ones(1, 1, 1, dtype=torch.float64)
    shown = base.expand(B, 1 << 22, 1 << 22)

    def losses(model, batch):
        batch[3].mul_(3)
        return classify(model, batch[:2]) * batch[2][:, 0, 0]

    model = Awkward(False).double()
    stats = gs.per_example_norms(model, (*batch, shown, base), losses, fallback="vmap")
    assert_sqnorms(stats, oracle_sqnorms(model, batch, lambda *held: 3 * classify(*held)), 1e-9)
    assert base.item() == 3


def test_packed_examples():
    class Distances(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.centres = nn.Linear(4, 4), nn.Parameter(torch.randn(3, 4))

        def forward(self, batch):
            rows, bounds = (
                linear_without_rule(self.body(batch["x"]), self.centres),
                batch["bounds"],
            )
            spans = zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
            return torch.stack([rows[start:end].square().sum() for start, end in spans])

    batch = {
        "x": torch.randn(9, 4, dtype=torch.float64),
        "bounds": torch.tensor([0, 2, 3, 9], dtype=torch.int32),
    }
    model, losses = Distances().double(), lambda m, b: m(b) * 0.5
    with pytest.raises(gs.UnsupportedOperationError, match=r"gradstats_tests\.linear"):
        gs.per_example_norms(model, batch, losses, cu_seqlens=batch["bounds"])
    stats = gs.per_example_norms(model, batch, losses, cu_seqlens=batch["bounds"], fallback="vmap")
    assert_sqnorms(stats, oracle_sqnorms(model, batch, losses), 1e-9)


def test_edges_of_packed_graphs():
    """They number the nodes of all graphs, and are not cut."""

    class Messages(nn.Module):
        def __init__(self):
            super().__init__()
            self.centres = nn.Parameter(torch.randn(3, 4))

        def forward(self, batch):
            x, (start, end), owner = batch
            h = linear_without_rule(x, self.centres)
            h = h.index_add(0, end, h[start])
            return h.new_zeros(int(owner.max()) + 1).index_add(0, owner, h.square().sum(1))

    edges = torch.tensor([[0, 3, 5, 6], [1, 4, 4, 7]])
    batch = torch.randn(9, 4, dtype=torch.float64), edges, torch.tensor([0, 0, 1, 2, 2, 2, 2, 2, 2])
    options = {"cu_seqlens": torch.tensor([0, 2, 3, 9]), "fallback": "vmap"}
    with pytest.raises(gs.ExampleAxisError, match=r"edges of graphs.*IndexError"):
        gs.per_example_norms(Messages().double(), batch, lambda m, b: m(b) / 2, **options)


def test_tied_parameters_and_batches_that_are_mappings():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(6, 4)
            self.again = self.table

        def forward(self, ids, mask):
            return linear_without_rule(self.table(ids) * mask[..., None], self.again.weight).mean(1)

    def losses(model, batch):
        out = model(batch["ids"], batch["mask"])
        return functional.cross_entropy(out, batch["inner"][0], reduction="none")

    batch = {
        "ids": torch.randint(6, (B, 3)),
        "mask": torch.ones(B, 3, dtype=torch.float64),
        "inner": [torch.randint(6, (B,)), "kept"],
    }
    model = Tied().double()
    expected = {}
    for row in range(B):
        one = {
            "ids": batch["ids"][row : row + 1],
            "mask": batch["mask"][row : row + 1],
            "inner": [batch["inner"][0][row : row + 1]],
        }
        gradient = torch.autograd.grad(losses(model, one).sum(), model.table.weight)[0]
        expected.setdefault("table.weight", []).append(gradient.square().sum())
    expected = {name: torch.stack(values) for name, values in expected.items()}
    assert_sqnorms(gs.per_example_norms(model, batch, losses, fallback="vmap"), expected, 1e-9)


def test_examples_along_another_axis():
    class SequenceFirst(nn.Module):
        def __init__(self):
            super().__init__()
            self.centres = nn.Parameter(torch.randn(3, 4))
            self.shift = nn.Parameter(torch.randn(3))

        def forward(self, x):
            return (linear_without_rule(x, self.centres) + self.shift).mean(0)

    model = SequenceFirst().double()
    batch = torch.randn(7, B, 4, dtype=torch.float64), torch.randint(3, (B,))
    stats = gs.per_example_norms(model, batch, classify, batch_dim=1, fallback="vmap")
    assert_sqnorms(stats, oracle_sqnorms(model, batch, classify), 1e-9)


@pytest.mark.parametrize("loss", ["normalised", "dropout", "accident"])
def test_examples_that_depend_on_their_batch_are_refused(batch, loss):
    model = nn.Sequential(Awkward(hidden=False), nn.Dropout(0.5)).double()
    model.train(loss == "dropout")

    def losses(model, batch):
        values = classify(model, batch)
        if loss == "normalised":
            return values / values.numel()
        return values * batch[2].sum() if loss == "accident" else values

    if loss == "accident":  # a weight for each of B positions looks like one for each example
        batch = (*batch, torch.rand(B, dtype=torch.float64))
    with pytest.raises(gs.CoupledExamplesError, match=r"example \d.*alone.*eval"):
        gs.per_example_norms(model, batch, losses, fallback="vmap")


class Scaled(nn.Module):
    """Data divided by something of the whole batch while training."""

    def forward(self, x):
        return x / x.abs().amax(0) if self.training else x


class ZeroHead(nn.Module):
    """A head without a rule, zero as some initialise it: every loss is log 3, whatever it sees."""

    def __init__(self, before: nn.Module):
        super().__init__()
        self.before = before
        self.head = nn.Parameter(torch.zeros(3, 4))

    def forward(self, x):
        return linear_without_rule(self.before(x), self.head)


@pytest.mark.parametrize("workspace", [None, 1])
@pytest.mark.parametrize("before", [nn.Dropout(0.5), Scaled()])
def test_equal_losses_do_not_hide_that_examples_depend_on_their_batch(batch, before, workspace):
    model = ZeroHead(before).double().train()
    options = {"fallback": "vmap", "workspace": workspace}
    with pytest.raises(gs.CoupledExamplesError, match=r"gradients of 'head' .*eval"):
        gs.per_example_norms(model, batch, classify, **options)
    model.eval()
    stats = gs.per_example_norms(model, batch, classify, **options)
    assert_sqnorms(stats, oracle_sqnorms(model, batch, classify), 1e-9)


def in_another_order(model, batch):
    """Losses that stand in another order than the batch."""
    return classify(model, batch)[[3, 0, 4, 1, 2] if len(batch[0]) == B else [0]]


@pytest.mark.parametrize("size", [1, 1e-7])
@pytest.mark.parametrize("workspace", [None, 1])
def test_losses_in_another_order_than_the_batch(batch, workspace, size):
    """Also where all are alike, as those of a new head, so that their values do not tell."""
    model, losses = Awkward(hidden=False).double(), in_another_order
    with torch.no_grad():
        model.head.weight.mul_(size)
        model.head.bias.mul_(size)
    stats = gs.per_example_norms(model, batch, losses, fallback="vmap", workspace=workspace)
    torch.testing.assert_close(stats.loss, losses(model, batch).detach())
    for name, expected in oracle_sqnorms(model, batch, losses).items():
        torch.testing.assert_close(stats.by_parameter[name], expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("workspace", [None, 1])
def test_an_order_of_losses_that_is_not_known_is_refused(batch, workspace):
    """All losses are equal, and so are the sums of their gradients in any order."""
    model = ZeroHead(nn.Identity()).double()
    options = {"fallback": "vmap", "workspace": workspace}
    with pytest.raises(gs.CoupledExamplesError, match=r"gradients of 'head' .*another order"):
        gs.per_example_norms(model, batch, in_another_order, **options)


def test_state_is_that_of_one_forward(batch):
    """Buffers that a forward changes, and the random generator, move on by one step."""

    def build():
        torch.manual_seed(3)
        layer = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
        return nn.Sequential(layer, Awkward(hidden=True)).double().train()

    model, plain = build(), build()
    expected = oracle_sqnorms(build(), batch, classify)
    stats = gs.per_example_norms(model, batch, classify, fallback="vmap")
    assert_sqnorms(stats, expected, 1e-9)
    classify(plain, batch)
    for (name, got), want in zip(model.named_buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(got, want, msg=name)


@pytest.mark.parametrize("workspace", [None, 1, 800])
def test_every_forward_finds_the_buffers_as_they_were(batch, workspace):
    class Counting(Awkward):
        def __init__(self):
            super().__init__(hidden=False)
            self.register_buffer("steps", torch.zeros(()))

        def forward(self, x):
            self.steps = self.steps + 1
            return super().forward(x) / self.steps

    model = Counting().double()
    stats = gs.per_example_norms(model, batch, classify, fallback="vmap", workspace=workspace)
    model.steps.zero_()
    assert_sqnorms(stats, oracle_sqnorms(model, batch, classify), 1e-9)


def test_a_fault_of_the_users_own_is_not_hidden(batch):
    def fails(model, batch):
        raise ZeroDivisionError("the user's own")

    with pytest.raises(ZeroDivisionError, match="own"):
        gs.per_example_norms(Awkward(True).double(), batch, fails, fallback="vmap")
    with pytest.raises(gs.LossShapeError, match="scalar"):
        gs.per_example_norms(
            Awkward(True).double(), batch, lambda m, b: classify(m, b).mean(), fallback="vmap"
        )


def test_a_failure_alone_leaves_what_the_forward_of_the_batch_left():
    class Counting(Awkward):
        def __init__(self):
            super().__init__(hidden=True)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x):
            self.seen += x.sum()
            return super().forward(x)

    def losses(model, batch):
        if len(batch[0]) == 1:
            model(batch[0])
            raise ZeroDivisionError("the user's own")
        return classify(model, batch)

    batch = torch.randn(B, 4).double(), torch.randint(3, (B,))
    model = Counting().double()
    state = torch.get_rng_state()
    with pytest.raises(gs.ExampleAxisError, match=r"not example 0 alone.*ZeroDivisionError.*own"):
        gs.per_example_norms(model, batch, losses, fallback="vmap")
    torch.testing.assert_close(model.seen, batch[0].sum())
    assert torch.equal(torch.get_rng_state(), state)


def test_losses_of_another_shape_alone_are_those_of_one_example(batch):
    """The shape is right for the batch: it is not there that something has to change."""

    def squeezed(model, batch):
        return classify(model, batch).squeeze()

    message = r"not example 0 alone \(LossShapeError: the loss is a scalar, expected shape \(1,\)"
    with pytest.raises(gs.ExampleAxisError, match=message):
        gs.per_example_norms(Awkward(False).double(), batch, squeezed, fallback="vmap")


@pytest.mark.parametrize("sparse", [False, True])
def test_parameters_of_a_class_of_their_own(sparse):
    class Own(nn.Parameter):
        pass

    model = nn.Sequential(
        nn.Embedding(7, 4, sparse=sparse), nn.Flatten(), nn.Linear(12, 3)
    ).double()
    model[0].weight = Own(model[0].weight.detach())
    batch = torch.randint(7, (B, 3)), torch.randint(3, (B,))
    with pytest.raises(gs.UnsupportedOperationError, match="is a Own, expected a plain"):
        gs.per_example_norms(model, batch, classify)
    stats = gs.per_example_norms(model, batch, classify, fallback="vmap")
    assert_sqnorms(stats, oracle_sqnorms(model, batch, classify), 1e-9)


def test_one_forward_where_all_has_a_rule(batch):
    model, calls = nn.Linear(4, 3).double(), []

    def counted(model, batch):
        calls.append(len(batch[0]))
        return classify(model, batch)

    state = torch.get_rng_state()
    stats = gs.per_example_norms(model, batch, counted, fallback="vmap")
    assert calls == [B] and torch.equal(torch.get_rng_state(), state)
    assert torch.equal(stats.sqnorm, gs.per_example_norms(model, batch, classify).sqnorm)


def test_coupled_losses_are_refused_before_examples_are_taken_apart(batch):
    """Even where losses and gradients alone do not show it."""
    model, calls = nn.Linear(4, 3).double(), []

    def coupled(model, batch):
        calls.append(len(batch[0]))
        losses = classify(model, batch)
        return losses + 1e-30 * losses.mean()

    with pytest.raises(gs.CoupledExamplesError, match="each loss depends on several examples"):
        gs.per_example_norms(model, batch, coupled, fallback="vmap")
    assert calls == [B]


def test_a_gradient_that_is_not_finite(batch):
    batch[0][1] = float("inf")
    model = Awkward(hidden=False).double()
    with pytest.raises(gs.NonFiniteGradientError, match="example 1 "):
        gs.per_example_norms(model, batch, classify, fallback="vmap")
    kept = gs.per_example_norms(model, batch, classify, fallback="vmap", nonfinite="keep")
    assert (~kept.sqnorm.isfinite()).nonzero().flatten().tolist() == [1]


def test_the_workspace_is_honoured():
    """With room for two examples' gradients no more are made at once, however many examples."""

    class Distances(nn.Module):
        def __init__(self):
            super().__init__()
            self.centres = nn.Parameter(torch.randn(100, 50))

        def forward(self, x):
            return linear_without_rule(x, self.centres)

    model, x = Distances(), torch.randn(16, 50)
    losses = lambda m, x: m(x).square().sum(1)  # noqa: E731

    def largest(workspace):
        run = lambda: gs.per_example_norms(m, x, losses, fallback="vmap", workspace=workspace)  # noqa: E731
        return peak_memory(run).largest

    m = model
    room = 3 * 8 * 5000
    assert largest(2 * room) == 2 * 5000
    assert largest(room) == 5000
    assert largest(None) == 16 * 5000


class Recurrent(nn.Module):
    """A recurrent layer before what has no rule."""

    def __init__(self):
        super().__init__()
        self.layer, self.awkward = nn.LSTM(4, 4, batch_first=True), Awkward(hidden=False)

    def forward(self, x):
        return self.awkward(self.layer(x.unsqueeze(1))[0].squeeze(1))


@pytest.mark.parametrize("training", [False, True])
def test_recurrent_layers_without_cudnn_where_it_refuses_gradients(batch, training):
    """In evaluation mode, and only where PyTorch itself differentiates them."""
    seen = []

    def losses(model, batch):
        tracked = type(model.layer.weight_hh_l0) not in (nn.Parameter, torch.Tensor)
        seen.append((torch.backends.cudnn.enabled, tracked))
        return classify(model, batch)

    model = Recurrent().double().train(training)
    expected = oracle_sqnorms(model, batch, classify)
    for enabled in (True, False):
        torch.backends.cudnn.enabled = enabled
        try:
            seen.clear()
            stats = gs.per_example_norms(model, batch, losses, fallback="vmap")
            assert_sqnorms(stats, expected, 1e-9)
            references = [each for each, tracked in seen if not tracked]
            assert references and set(references) == {enabled and training}
            assert seen[0] == (enabled, True)
            seen.clear()
            report = gs.verify(model, batch, losses, exclude="awkward.*")
            assert report.ok, str(report)
            assert {(enabled, True), (enabled and training, False)} == set(seen)
            assert torch.backends.cudnn.enabled == enabled
        finally:
            torch.backends.cudnn.enabled = True


def adapted_in_turn(model, tasks):
    """Each task's loss at weights that two steps on its support set have led to (MAML)."""
    losses = []
    for support, labels, queries, answers in zip(*tasks, strict=True):
        own = dict(model.named_parameters())
        for _ in range(2):
            loss = functional.cross_entropy(functional_call(model, own, (support,)), labels)
            steps = torch.autograd.grad(loss, list(own.values()), create_graph=True)
            own = {n: w - 0.1 * g for (n, w), g in zip(own.items(), steps, strict=True)}
        losses.append(functional.cross_entropy(functional_call(model, own, (queries,)), answers))
    return torch.stack(losses)


def adapted_at_once(model, tasks):
    """The same with transforms."""
    weights = dict(model.named_parameters())

    def loss_of(weights, x, labels):
        return functional.cross_entropy(functional_call(model, weights, (x,)), labels)

    def loss_of_task(support, labels, queries, answers):
        own = weights
        for _ in range(2):
            steps = torch.func.grad(loss_of)(own, support, labels)
            own = {name: own[name] - 0.1 * steps[name] for name in own}
        return loss_of(own, queries, answers)

    return torch.vmap(loss_of_task)(*tasks)


def adapted_to_the_batch(model, tasks):
    """All tasks' losses at the weights to which one step on all support sets leads."""
    own = dict(model.named_parameters())
    support, labels, queries, answers = tasks
    loss = functional.cross_entropy(functional_call(model, own, (support,)).mT, labels)
    steps = torch.autograd.grad(loss, list(own.values()), create_graph=True)
    own = {n: w - 0.1 * g for (n, w), g in zip(own.items(), steps, strict=True)}
    scores = functional_call(model, own, (queries,))
    return functional.cross_entropy(scores.mT, answers, reduction="none").mean(1)


@pytest.fixture
def tasks():
    torch.manual_seed(0)
    support, queries = torch.randn(B, 4, 4).double(), torch.randn(B, 5, 4).double()
    return support, torch.randint(3, (B, 4)), queries, torch.randint(3, (B, 5))


@pytest.mark.parametrize("losses", [adapted_in_turn, adapted_at_once])
def test_weights_that_each_task_adapts_for_itself(tasks, losses):
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    with pytest.raises(gs.GradStatsError, match=r'fallback="vmap"'):
        gs.per_example_norms(model, tasks, losses)
    stats = gs.per_example_norms(model, tasks, losses, fallback="vmap")
    assert_sqnorms(stats, oracle_sqnorms(model, tasks, losses), 1e-9)


def test_weights_that_are_adapted_to_the_batch_are_refused(tasks):
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    with pytest.raises(gs.CoupledExamplesError, match="when it is computed alone"):
        gs.per_example_norms(model, tasks, adapted_to_the_batch, fallback="vmap")


def dual(model, x):
    with forward_ad.dual_level():
        made = forward_ad.make_dual(x, torch.ones_like(x))
        return forward_ad.unpack_dual(model(made)).tangent.square().sum(1)


def test_derivatives_by_forward_mode():
    """The last bias has no gradient, and there is no Function that might hide one."""
    model = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    x = torch.randn(B, 2).double()
    with pytest.raises(gs.UnsupportedOperationError, match=r'fallback="vmap"'):
        gs.per_example_norms(model, x, dual)
    stats = gs.per_example_norms(model, x, dual, fallback="vmap")
    assert_sqnorms(stats, oracle_sqnorms(model, x, dual), 1e-9)
    assert not stats.by_parameter["2.bias"].any()


def test_derivatives_through_recurrent_layers():
    model, x = nn.LSTM(3, 4, batch_first=True).double(), torch.randn(B, 6, 3).double()

    def losses(model, x):
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x)[0].sum(), x, create_graph=True)
        return slope.square().sum((1, 2))

    with pytest.raises(gs.UnsupportedOperationError, match=r'fallback="vmap"'):
        gs.per_example_norms(model, x, losses)
    stats = gs.per_example_norms(model, x, losses, fallback="vmap")
    assert_sqnorms(stats, oracle_sqnorms(model, x, losses), 1e-9)


def test_what_a_survey_cannot_end_is_refused_where_a_function_may_hide_uses():
    """A checkpoint of another library, beside dual numbers and a parameter that is not used."""
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 1), nn.Linear(1, 1)]).double()
    x = torch.randn(B, 2).double()

    def losses(model, x):
        rows = recomputing(model[0], x.clone().requires_grad_()).tanh()
        return dual(nn.Sequential(model[1], nn.Tanh(), model[2]), rows)

    with pytest.raises(
        gs.UnsupportedOperationError, match=r"no gradient was found for .* do not use them"
    ):
        gs.per_example_norms(model, x, losses, fallback="vmap")
