"""What is decided once for layers that are alike is, to the bit, what is decided each time."""

from functools import partial

import pytest
import torch
from gradstats.kernels import _precision
from torch import nn
from torch.nn import functional

import gradstats as gs
from gradstats.capture.following._repeated import NOTED
from gradstats.capture.rules._affine import AffineFactors
from gradstats.capture.uses._layer import Layer
from gradstats.capture.uses._prepared import Preparable
from tests.losses import mean_square
from tests.oracle import assert_sqnorms, oracle_sqnorms

B = 3


@pytest.fixture(autouse=True)
def prepared(monkeypatch):
    """What is prepared, of which nothing is there at first."""
    NOTED.clear()
    found = []
    for kind in (Layer, AffineFactors):

        def record(*args, prepare=kind.prepare):
            found.append(prepare(*args))
            return found[-1]

        monkeypatch.setattr(kind, "prepare", record)
    return found


def frozen(layer, name):
    getattr(layer, name).requires_grad_(False)
    return layer


class InputsFirst(nn.Module):
    """A layer whose weight has its inputs first, as those of GPT-2."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs))
        self.bias = nn.Parameter(torch.randn(outputs))

    def forward(self, x):
        rows = torch.addmm(self.bias, x.flatten(0, -2), self.weight)
        return rows.view(*x.shape[:-1], -1)


class Reordered(nn.Module):
    """A layer whose data, or whose gradient, lie in memory in another order."""

    def __init__(self, layer, first, second):
        super().__init__()
        self.layer, self.first, self.second = layer, first, second

    def forward(self, x):
        return self.second(self.layer(self.first(x)))


class ChannelsLast(nn.Conv2d):
    """A convolution of inputs whose channels are adjacent."""

    def forward(self, x):
        return super().forward(x.contiguous(memory_format=torch.channels_last))


def half(x):
    return x.bfloat16() if x.dtype == torch.float32 else x


def whole(x):
    return x.float() if x.dtype == torch.bfloat16 else x


def transposed(x):
    return x.mT.contiguous().mT


def swapped(x):
    return x.mT


LAYERS = {
    "one position": (lambda: nn.Linear(4, 6), (4,)),
    "short": (lambda: nn.Linear(17, 18), (2, 17)),
    "long": (lambda: nn.Linear(4, 3), (20, 4)),
    "several axes": (lambda: nn.Linear(4, 3, bias=False), (2, 3, 4)),
    "inputs first": (lambda: InputsFirst(16, 6), (2, 16)),
    "frozen weight": (lambda: frozen(nn.Linear(4, 3), "weight"), (2, 4)),
    "frozen bias": (lambda: frozen(nn.Linear(4, 3), "bias"), (2, 4)),
    "data in another order": (lambda: Reordered(nn.Linear(4, 3), transposed, torch.relu), (2, 4)),
    "gradients in another": (lambda: Reordered(nn.Linear(4, 3), torch.relu, transposed), (2, 4)),
    "unaligned": (lambda: Reordered(nn.Linear(3, 3), lambda x: x[..., 1:], torch.relu), (2, 4)),
}  # fmt: skip


def measured(model, batch, beside):
    """The norms and bounds of every parameter, and the gradients."""
    model.zero_grad()
    if not beside:
        found = gs.per_example_norms(model, batch, mean_square)
    else:
        with gs.track(model, batch_size=B) as tracker:
            tracker.backward(mean_square(model, batch))
        found = tracker.stats
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [found.sqnorm, found.error_bound, *found.by_parameter.values(), *grads]


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside training"])
@pytest.mark.parametrize("name", LAYERS)
def test_prepared_as_decided(name, beside, prepared, monkeypatch):
    make, shape = LAYERS[name]
    model = nn.Sequential(nn.Linear(shape[-1], shape[-1]), make()).cuda()
    check_as_decided(model, shape, beside, prepared, monkeypatch)


def check_as_decided(model, shape, beside, prepared, monkeypatch):
    batch = torch.randn(B, *shape).cuda(), torch.randn(B).cuda()
    first = measured(model, batch, beside)
    known = len(prepared)
    assert known
    again = measured(model, batch, beside)
    assert len(prepared) == known
    monkeypatch.setattr(Preparable, "prepared", lambda *_: None)
    for parts in zip(first, again, measured(model, batch, beside), strict=True):
        assert torch.equal(parts[0], parts[2]) and torch.equal(parts[1], parts[2])
    return batch


def accuracy_of(model):
    """The relative error that norms may have."""
    return 3e-2 if torch.bfloat16 in {each.dtype for each in model.parameters()} else 1e-4


CONVOLUTIONS = {
    "direct": (lambda: nn.Conv2d(3, 4, 3, padding=1), (3, 8, 8)),
    "gram": (lambda: nn.Conv2d(8, 12, 3), (8, 4, 4)),
    "copied": (lambda: nn.Conv2d(16, 16, 3, stride=2, padding=1, bias=False), (16, 8, 8)),
    "copied, gram": (lambda: nn.Conv2d(16, 32, 3), (16, 4, 4)),
    "in groups": (lambda: nn.Conv2d(4, 6, 3, dilation=2, groups=2), (4, 8, 8)),
    "one axis": (lambda: nn.Conv1d(3, 4, 3), (3, 6)),
    "three axes": (lambda: nn.Conv3d(2, 3, 2), (2, 3, 3, 4)),
    "frozen weight": (lambda: frozen(nn.Conv2d(3, 4, 3), "weight"), (3, 5, 5)),
    "frozen bias": (lambda: frozen(nn.Conv2d(3, 4, 3), "bias"), (3, 5, 5)),
    "depthwise": (lambda: nn.Conv2d(4, 4, 3, groups=4), (4, 5, 5)),
    "depthwise, two outputs": (lambda: nn.Conv2d(3, 6, 3, groups=3), (3, 5, 5)),
    "depthwise, copied": (lambda: nn.Conv2d(16, 16, 3, groups=16), (16, 5, 5)),
    "gradients copied": (
        lambda: Reordered(nn.Conv2d(3, 16, 3, bias=False), torch.relu, swapped), (3, 5, 6)
    ),
    "gradients copied twice": (
        lambda: Reordered(nn.Conv2d(16, 32, 3, bias=False), torch.relu, swapped), (16, 5, 6)
    ),
    "pointwise": (lambda: nn.Conv2d(4, 5, 1), (4, 3, 3)),
    "pointwise, direct": (lambda: nn.Conv2d(4, 5, 1), (4, 8, 8)),
    "pointwise, one position": (lambda: nn.Conv2d(4, 5, 1), (4, 1, 1)),
    "pointwise, half": (
        lambda: Reordered(nn.Conv2d(4, 5, 1).bfloat16(), half, whole), (4, 3, 4)
    ),
    "pointwise, channels last": (lambda: ChannelsLast(4, 5, 1), (4, 8, 8)),
    "pointwise in groups": (lambda: nn.Conv2d(4, 6, 1, groups=2), (4, 3, 3)),
    "transposed": (lambda: nn.ConvTranspose2d(4, 3, 3, stride=2), (4, 3, 3)),
    "transposed, gram": (lambda: nn.ConvTranspose2d(12, 8, 2, stride=2), (12, 2, 2)),
    "transposed, copied": (lambda: nn.ConvTranspose2d(16, 16, 3, stride=2), (16, 3, 3)),
    "transposed, depthwise": (lambda: nn.ConvTranspose2d(4, 4, 3, groups=4), (4, 4, 4)),
    "transposed, pointwise": (lambda: nn.ConvTranspose2d(4, 5, 1), (4, 3, 3)),
    "transposed, cropped": (
        lambda: nn.ConvTranspose2d(4, 3, 3, 2, output_padding=1), (4, 3, 3)
    ),
    "transposed, padded": (
        lambda: nn.ConvTranspose2d(4, 3, 2, 1, output_padding=1, dilation=2), (4, 3, 3)
    ),
    "channels last": (lambda: ChannelsLast(16, 16, 3), (16, 5, 5)),
    "gradients in another order": (
        lambda: Reordered(nn.Conv2d(3, 4, 3), torch.relu, transposed), (3, 5, 5)
    ),
}  # fmt: skip


# Those for which nothing is prepared.
EACH_TIME = {"transposed, padded", "pointwise in groups"}


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside training"])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_prepared_as_decided(name, beside, prepared, monkeypatch):
    make, shape = CONVOLUTIONS[name]
    model = nn.Sequential(nn.Tanh(), make(), nn.Flatten(), nn.LazyLinear(2))
    model(torch.zeros(1, *shape))
    batch = check_as_decided(model.cuda(), shape, beside, prepared, monkeypatch)
    expected = oracle_sqnorms(model, batch, mean_square)
    assert_sqnorms(gs.per_example_norms(model, batch, mean_square), expected, accuracy_of(model))
    assert (None in prepared) == (name in EACH_TIME)


def test_settings_are_part_of_what_is_known(prepared, monkeypatch):
    model = nn.Linear(4, 3).cuda()
    batch = torch.randn(B, 2, 4).cuda(), torch.randn(B).cuda()
    counts = []

    def measure():
        measured(model, batch, False)
        counts.append(len(prepared))

    measure()
    monkeypatch.setattr(_precision, "tf32_allowed", lambda: True)
    measure()
    monkeypatch.setenv("GRADSTATS_BACKEND", "torch")
    measure()
    model.bias.requires_grad_(False)
    measure()
    measure()
    assert counts == [1, 2, 3, 4, 4]


def test_what_others_need_is_delivered(prepared):
    """Parameters with several uses, and consumers of factors, get these."""
    layer = nn.Linear(4, 4).cuda()
    batch = torch.randn(B, 2, 4).cuda(), torch.randn(B).cuda()
    gs.per_example_norms(nn.Sequential(layer, layer), batch, mean_square)
    gs.per_example_norms(layer, batch, mean_square, gram=True)
    assert not any(prepared)


class Images(nn.GroupNorm):
    """Groups of channels that are adjacent."""

    def forward(self, x):
        return super().forward(x.contiguous(memory_format=torch.channels_last))


NORMALISATIONS = {
    "rows": (lambda: nn.LayerNorm(6), (3, 6)),
    "several axes": (lambda: nn.LayerNorm((3, 6)), (2, 3, 6)),
    "one position": (lambda: nn.LayerNorm(6), (6,)),
    "without a shift": (lambda: nn.LayerNorm(6, bias=False), (3, 6)),
    "frozen scale": (lambda: frozen(nn.LayerNorm(6), "weight"), (3, 6)),
    "half": (lambda: nn.LayerNorm(6).bfloat16(), (3, 6)),
    "rms": (lambda: nn.RMSNorm(6), (3, 6)),
    "rms with eps": (lambda: nn.RMSNorm(6, eps=1e-3), (3, 6)),
    "rows in another order": (lambda: Reordered(nn.LayerNorm(6), transposed, torch.relu), (3, 6)),
    "gradients of rows in another": (
        lambda: Reordered(nn.LayerNorm(6), torch.relu, transposed), (3, 6)
    ),
    "unaligned": (lambda: Reordered(nn.LayerNorm(5), lambda x: x[..., 1:], torch.relu), (3, 6)),
    "groups": (lambda: nn.GroupNorm(2, 4), (4, 2, 3)),
    "groups of channels last": (lambda: Images(2, 4), (4, 2, 3)),
    "groups without positions": (lambda: nn.GroupNorm(2, 4), (4,)),
    "groups of sequences": (lambda: Reordered(nn.GroupNorm(2, 4), transposed, torch.relu), (4, 5)),
    "running": (lambda: nn.BatchNorm1d(4).eval(), (4, 3)),
    "running without positions": (lambda: nn.BatchNorm1d(4).eval(), (4,)),
    "running of images": (lambda: nn.BatchNorm2d(4).eval(), (4, 2, 3)),
    "running of one pixel": (lambda: nn.BatchNorm2d(4).eval(), (4, 1, 1)),
}  # fmt: skip


def given_to(data):
    """The gradient of data and how it lies, where there is one."""
    return [] if data.grad is None else [data.grad, torch.tensor(data.grad.stride())]


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside training"])
@pytest.mark.parametrize("trained", [False, True], ids=["first", "behind others"])
@pytest.mark.parametrize("name", NORMALISATIONS)
def test_normalisations(name, beside, trained, prepared, monkeypatch):
    make, shape = NORMALISATIONS[name]
    model = nn.Sequential(nn.Tanh(), make(), nn.Tanh()).cuda()
    dtype = next(model.parameters()).dtype
    data = torch.randn(B, *shape).cuda().to(dtype).requires_grad_(trained)
    batch = data, torch.randn(B).cuda()
    measured(model, batch, beside)
    known, notes = len(prepared), len(NOTED)
    assert known and (None in prepared) == (not (beside or trained))
    for number, buffer in enumerate(model.buffers()):
        if buffer.dtype == torch.float32:
            buffer += number + 1  # what was remembered holds no tensor
    data.grad = None
    again = [*measured(model, batch, beside), *given_to(data)]
    assert len(NOTED) == notes
    if name != "running of one pixel":
        assert len(prepared) == known
    monkeypatch.setattr(Preparable, "prepared", lambda *_: None)
    NOTED.clear()
    data.grad = None
    decided = [*measured(model, batch, beside), *given_to(data)]
    for one, other in zip(again, decided, strict=True):
        assert torch.equal(one, other)
    assert_sqnorms(gs.per_example_norms(model, batch, mean_square),
                   oracle_sqnorms(model, batch, mean_square),
                   accuracy_of(model))  # fmt: skip


BY_STATISTICS = [
    functional.batch_norm,
    partial(functional.instance_norm, use_input_stats=False),
]

STATISTICS = {
    "a parameter": lambda layer, x: layer.mean,
    "of a parameter": lambda layer, x: 2 * layer.mean,
    "of the batch": lambda layer, x: x.mean(0),
    "of each example": lambda layer, x: x.mean(1),
}


class ByTrainedStatistics(nn.Module):
    """Normalisation by statistics that require a gradient, which PyTorch does not compute."""

    def __init__(self, layer, statistics):
        super().__init__()
        self.layer, self.statistics = layer, statistics
        self.first, self.weight = nn.Linear(B, B), nn.Parameter(torch.randn(B))
        self.mean = nn.Parameter(torch.randn(B))

    def forward(self, x):
        x = self.first(x)
        statistics = self.statistics(self, x), torch.ones(B, device=x.device)
        return self.layer(x[..., None].expand(-1, -1, 2), *statistics, self.weight)


@pytest.mark.parametrize("layer", BY_STATISTICS, ids=["batch", "instance"])
@pytest.mark.parametrize("name", STATISTICS)
def test_trained_statistics(name, layer):
    model = ByTrainedStatistics(layer, STATISTICS[name]).cuda()
    batch = torch.randn(B, B).cuda(), torch.randn(B).cuda()
    with pytest.raises(RuntimeError, match="is not differentiable"):
        gs.per_example_norms(model, batch, mean_square)
