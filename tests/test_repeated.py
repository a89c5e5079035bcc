"""What is noted again of operations that are alike is what following them finds."""

from contextlib import suppress

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

import gradstats as gs
from gradstats.capture import _mode
from gradstats.capture.following import _repeated
from gradstats.capture.following._repeated import NOTED, likeness, noted, remember
from gradstats.capture.parameters._tensors import DerivedTensor
from gradstats.capture.uses import _dispatch
from gradstats.capture.uses._hooked import hooked_on

from .oracle import assert_sqnorms, check_model, oracle_on_the_batch, oracle_sqnorms
from .test_random_programs import Program, losses

SIZE, WIDTH = 3, 4


pytestmark = pytest.mark.usefixtures("nothing_remembered")


class Followed:
    """Counts what is followed, and what is noted again instead.

    Attributes:
        times: how often operations were followed.
        again: how often one was alike that had been followed.
        wrong: functions whose results would have been noted otherwise than they are.
    """

    def __init__(self, monkeypatch, *, check: bool = False):
        self.times = self.again = 0
        self.wrong: list = []
        follow, repeated = _repeated.follow_results, _repeated.follow_repeated

        def counted(tracker, *call):
            self.times += 1
            follow(tracker, *call)

        def checked(tracker, func, args, kwargs, result):
            marks = tracker.marks
            alike = likeness(marks, func, args, kwargs, result)
            if alike is None or alike[0] not in NOTED:
                repeated(tracker, func, args, kwargs, result)
                return
            self.again += 1
            found, before = NOTED.pop(alike[0]), noted(marks)
            follow(tracker, func, args, kwargs, result)
            remember(marks, *alike, before)
            if NOTED.get(alike[0]) != found:
                self.wrong.append(func)

        monkeypatch.setattr(_repeated, "follow_results", counted)
        if check:
            monkeypatch.setattr(_mode, "follow_repeated", checked)


class Folded(nn.Module):
    """A linear layer on rows of all examples together, with what surrounds it in a block."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.double()

    def forward(self, x):
        for layer in self.layers:
            rows = layer(x.view(-1, x.shape[-1]))
            x = x + functional.gelu(rows.view(x.shape)).transpose(1, 2).mT.contiguous()
        return x


def squares(model, batch):
    return model(batch).square().flatten(1).sum(1)


def check(model, batch, loss_fn=squares, **options):
    got = gs.per_example_norms(model, batch, loss_fn, **options)
    assert_sqnorms(got, oracle_sqnorms(model, batch, loss_fn), rtol=1e-10)


def test_a_second_step_follows_nothing(monkeypatch):
    model, batch = Folded(), torch.randn(SIZE, SIZE, WIDTH).double()
    followed = Followed(monkeypatch)
    check(model, batch)
    first, followed.times = followed.times, 0
    check(model, batch)
    assert first > 5
    assert followed.times == 0


class Multiplied(nn.Module):
    """Products of a tensor with itself, and with another of its form."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.double()

    def forward(self, x):
        first, second = (layer(x) for layer in self.layers)
        return first * first + first * second


def test_an_operation_that_is_given_one_tensor_twice(monkeypatch):
    model, batch = Multiplied(), torch.randn(SIZE, WIDTH).double()
    followed = Followed(monkeypatch)
    check(model, batch)
    followed.times = 0
    check(model, batch)
    assert followed.times == 0
    patterns = {key[-1] for key in NOTED if key[0] is torch.Tensor.mul and key[-1]}
    assert (0, 0, 2) in patterns  # the product with itself has a key of its own


@pytest.mark.parametrize("batch_dim", [0, 1])
def test_programs_at_random(monkeypatch, batch_dim):
    followed = Followed(monkeypatch, check=True)
    for seed in range(150):
        model = Program(seed, batch_dim)
        if model.axis is None:
            continue
        for _ in range(2):
            try:
                gs.per_example_norms(model, model.batch, losses, batch_dim=batch_dim)
            except gs.GradStatsError:
                break
    assert followed.again > 100
    assert followed.wrong == []


class Uses(nn.Module):
    """Uses of parameters that differ in little else than what is asked of the parameters."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second.bias.requires_grad_(False)
        self.turned = nn.Parameter(torch.randn(WIDTH, WIDTH).t())
        self.scales = nn.ParameterList(torch.randn(WIDTH) for _ in range(3))
        self.rows = nn.Parameter(torch.randn(SIZE, 1))
        self.wide = nn.Conv1d(WIDTH, WIDTH, 3, padding="same")
        self.odd = nn.Conv1d(WIDTH, WIDTH, 3, padding=2, dilation=2)
        self.large = nn.Linear(WIDTH, 2000)
        self.double()

    def forward(self, x):
        one, other, last = self.scales
        h = self.first(x)
        h = h + self.second(h) + functional.linear(h, self.first.weight)
        h = h + functional.linear(h, self.turned) + h @ self.turned
        h = h + torch.addmm(one, h[:, 0], self.turned).unsqueeze(1)
        normalised = [
            functional.layer_norm(h, (WIDTH,), *affine)
            for affine in ((one, one), (one, other), (one, other, 0.5), (None, last))
        ]
        h = torch.stack(normalised).sum(0) * last + other
        h = (last * h.tanh() + h.tanh() * self.rows).mT
        h = self.wide(h) + self.odd(h)
        return h.flatten(1).sum(1, keepdim=True) + self.large(h.mT).sin().sum((1, 2))[:, None]


class Decisions:
    """Counts what rules decided, of operations that had not been decided already."""

    def __init__(self, monkeypatch):
        self.times = 0
        found = _dispatch._found_among

        def counted(*call):
            self.times += 1
            return found(*call)

        monkeypatch.setattr(_dispatch, "_found_among", counted)


@pytest.mark.parametrize("workspace", [None, 1000])
def test_what_was_decided_of_a_use_is_done_again(monkeypatch, workspace):
    model, batch = Uses(), torch.randn(SIZE, SIZE, WIDTH).double()
    decisions = Decisions(monkeypatch)
    check(model, batch, workspace=workspace)
    first, decisions.times = decisions.times, 0
    check(model, batch, workspace=workspace)
    assert first > 15
    assert decisions.times == 0
    check_model(model, batch, squares, rtol=1e-10)
    check(model, torch.randn(SIZE, SIZE, WIDTH).double())
    check(model, torch.randn(1, SIZE, WIDTH).double())


def test_what_was_decided_of_uses_depends_on_what_is_asked():
    model, batch = Uses(), torch.randn(SIZE, SIZE, WIDTH).double()
    for _ in range(2):
        check(model, batch)
        check_model(model, batch, squares, rtol=1e-10, fusing=(False,))
        model.scales[2].requires_grad_(False)
        check(model, batch)
        model.scales[2].requires_grad_(True)
        with saved_tensors_hooks(lambda tensor: tensor.clone(), lambda kept: kept):
            check(model, batch)


def test_hooks_on_saved_tensors_decide_nothing_for_operations_without_them(monkeypatch):
    layer, batch = nn.Linear(WIDTH, WIDTH).double(), torch.randn(SIZE, WIDTH).double()
    expected = oracle_sqnorms(layer, batch, squares)
    decisions = Decisions(monkeypatch)

    def is_hooked():
        with gs.track(layer, batch_size=SIZE) as tracker:
            result = layer(batch)
            tracker.backward(result.square().sum(1))
        assert_sqnorms(tracker.stats, expected, rtol=1e-10)
        return hooked_on(result.grad_fn) is not None

    for times in (2, 0):  # either is decided once
        with saved_tensors_hooks(lambda tensor: tensor.clone(), lambda kept: kept):
            assert not is_hooked()
        assert is_hooked()
        assert decisions.times == times
        decisions.times = 0


class Cast(nn.Module):
    """Layers whose operands autocast casts, the second of data that it has cast already."""

    def __init__(self):
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv1d(WIDTH, WIDTH, 1) for _ in range(2))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.odd = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        dtype = x.dtype
        for layer in (*self.convolutions, *self.layers):
            x = layer(x)
        return self.odd(x.to(dtype)).tanh() @ self.odd.weight


@pytest.mark.parametrize("fused", [True, False, None], ids=["fused", "exact", "norms alone"])
def test_what_was_decided_of_uses_depends_on_autocast(monkeypatch, fused):
    model, batch = Cast(), torch.randn(WIDTH, WIDTH, WIDTH)

    def found(dtype):
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            if fused is None:
                return gs.per_example_norms(model, batch, squares)
            with gs.track(model, batch_size=WIDTH, fused=fused) as tracker:
                tracker.backward(squares(model, batch))
            return tracker.stats

    dtypes, first = (torch.bfloat16, None, torch.float16), {}
    for dtype in dtypes:
        NOTED.clear()
        first[dtype] = found(dtype)
    check(model.double(), batch.double())
    model.float()
    decisions = Decisions(monkeypatch)
    for times in (2, 0):
        for dtype in dtypes:
            again = found(dtype)
            for name, sqnorm in first[dtype].by_parameter.items():
                assert torch.equal(again.by_parameter[name], sqnorm), (dtype, name)
        if not times and fused is not False:
            assert decisions.times == 0
        decisions.times = 0
    sizes = [first[dtype].sqnorm for dtype in dtypes]
    assert not torch.equal(sizes[0], sizes[1]) and not torch.equal(sizes[1], sizes[2])


class Turned(nn.Module):
    """The same operations on a square of examples and positions, as it is and turned."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x):
        straight = self.layer(x.tanh().view(-1, WIDTH)).view(x.shape)
        turned = self.layer(x.transpose(0, 1).contiguous().tanh())
        return straight + turned.sin().transpose(0, 1)


def test_forms_that_agree_with_examples_along_other_axes():
    model, batch = Turned(), torch.randn(SIZE, SIZE, WIDTH).double()
    for _ in range(2):
        check(model, batch)


def test_the_same_forms_with_another_batch_dim():
    model, batch = Turned(), torch.randn(SIZE, SIZE, WIDTH).double()

    def along_the_second(model, batch):
        return model(batch).square().sum((0, 2))

    for _ in range(2):
        check(model, batch)
        check(model, batch, along_the_second, batch_dim=1)


def test_the_same_forms_packed_and_not():
    rows, bounds = torch.randn(6, 6).double(), torch.tensor([0, 1, 3, 6])
    model = nn.Linear(6, 2).double()

    def beside_others(model, batch):
        x, others = batch
        return model(x).square().sum(1) + others.t().sum()

    def turned(model, rows):
        squares = model(rows.t()).square().sum(1)
        return torch.stack([part.sum() for part in squares.split(bounds.diff().tolist())])

    for _ in range(2):
        check(model, (rows[:3], rows), beside_others)
        with pytest.raises(gs.GradStatsError):
            gs.per_example_norms(model, rows, turned, cu_seqlens=bounds)


class Weighted(nn.Module):
    """Multiplies with a square that is a constant in one step and data in the next."""

    def __init__(self, change):
        super().__init__()
        self.change = change
        self.layer = nn.Linear(SIZE, SIZE).double()
        self.register_buffer("constant", torch.randn(SIZE, SIZE).double())

    def forward(self, x, square=None):
        square = self.change(self.constant if square is None else square)
        return torch.tanh(self.layer(x) @ square)


@pytest.mark.parametrize("change", [lambda t: t, torch.tanh], ids=["itself", "computed"])
def test_what_was_a_constant_is_data_in_the_next_step(change):
    model, x = Weighted(change), torch.randn(SIZE, SIZE).double()

    def of_both(model, batch):
        return model(*batch).square().sum(1)

    for _ in range(2):
        check(model, x)
        with pytest.raises(gs.ExampleAxisError, match="which loss belongs to which example"):
            gs.per_example_norms(model, (x, x.cos()), of_both)


class Filled(nn.Module):
    """Reads what it has made, with and without data that it writes there."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(SIZE, SIZE).double()
        self.writes = False

    def forward(self, x):
        held = torch.zeros(SIZE, SIZE).double()
        if self.writes:
            held.copy_(x)
        hidden = self.layer(held.cos())
        self.kinds.append(type(hidden))
        return hidden * x


def test_what_was_empty_is_written_in_the_next_step():
    model, x = Filled(), torch.randn(SIZE, SIZE).double()
    for model.writes in (False, True, False, True):
        model.kinds = []
        check(model, x)
        assert model.kinds[0] is (torch.Tensor if model.writes else DerivedTensor)


def test_what_the_model_kept_is_data_where_it_is_called_with_it():
    model = Folded()
    batch = torch.randn(SIZE, SIZE, WIDTH).double()
    model.last = batch
    for _ in range(2):
        check(model, batch)
    del model.last
    check(model, batch)


def test_values_of_its_own_are_told_from_data_of_the_same_form():
    """As many as there are examples by accident: in a context of their own, and beside data."""

    def step(function, *batch):
        model = nn.Linear(SIZE, 1)
        with gs.track(model, batch_size=SIZE) as tracker:
            tracker.backward(function(model, *batch).squeeze(1))

    def own() -> torch.Tensor:
        return torch.tensor([1.0, 2.0, 3.0])

    x, y = torch.randn(SIZE, SIZE), torch.randn(SIZE)
    step(lambda m, x: m(x + own()), x)
    with pytest.raises(gs.ExampleAxisError):
        step(lambda m, x, y: m(x + y), x, y)
    step(lambda m, x, y: m(x) * (y * 2)[:, None], x, y)
    step(lambda m, x: m(x + own() * 2), x)


@pytest.mark.parametrize(
    ("shape", "rows"),
    [((WIDTH, SIZE), torch.Tensor.t), ((1, WIDTH), lambda row: torch.cat([row] * SIZE))],
    ids=["turned", "joined"],
)
def test_a_trained_leaf_is_told_from_what_was_computed_unseen(shape, rows):
    layer, leaf = nn.Linear(WIDTH, 1).double(), torch.randn(shape).double().requires_grad_()

    def step(tensor):
        with gs.track(layer, batch_size=SIZE) as tracker:
            tracker.backward(layer(rows(tensor)).square().sum(1))

    for _ in range(2):
        step(leaf)
        with pytest.raises(gs.ExampleAxisError):
            step(leaf.cumsum(1))


def test_noise_is_told_from_data_also_after_noise_made_in_inference_mode():
    layer, noisy = nn.Linear(WIDTH, WIDTH).double(), nn.Linear(WIDTH, SIZE, bias=False).double()
    model, batch = nn.ModuleList([layer, noisy]), torch.randn(SIZE, WIDTH).double()

    def outputs(x, inference: bool):
        noise = torch.randn(SIZE, WIDTH).double()
        with torch.inference_mode(inference):
            noise = noise * 2
        return layer(x) @ (noisy.weight + noise).t()

    def step(inference: bool):
        torch.manual_seed(1)
        with gs.track(model, batch_size=SIZE) as tracker:
            tracker.backward(outputs(batch, inference).square().sum(1))
        return tracker.stats

    with suppress(gs.GradStatsError):  # nothing can be noted on these
        step(True)
    got = step(False)
    torch.manual_seed(1)
    losses = outputs(batch, False).square().sum(1)
    expected = oracle_on_the_batch(model, batch, lambda *_: losses)
    assert_sqnorms(got, expected, rtol=1e-10)


def test_little_is_remembered(monkeypatch):
    monkeypatch.setattr(_repeated, "MOST", 5)
    model = Folded()
    for length in range(2, 9):
        check(model, torch.randn(SIZE, length, WIDTH).double())
        assert len(NOTED) <= 5
