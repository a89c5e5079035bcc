"""Exported programs, which call PyTorch's own operators, and these operators called by hand."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import gradstats as gs

from .losses import losses_of
from .oracle import assert_sqnorms, oracle_sqnorms
from .rules.operation import check_operation, normal

B, T, WIDTH, CLASSES = 5, 6, 8, 3
ATEN, PRIMS = torch.ops.aten, torch.ops.prims


class Language(nn.Module):
    """Tied tables, positions, attention, slices."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(20, WIDTH)
        self.places = nn.Embedding(T, WIDTH, padding_idx=1)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, ids):
        hidden = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        hidden = self.norm(self.layer(hidden))[:, 1:]
        return functional.linear(hidden, self.tokens.weight).mT.amax(-1)


class Images(nn.Module):
    """Convolutions, norms of all kinds, pools, indices, contractions."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, WIDTH, 3), nn.Conv2d(WIDTH, WIDTH, 3, groups=2)
        self.group, self.instance = nn.GroupNorm(2, WIDTH), nn.InstanceNorm2d(WIDTH, affine=True)
        self.batch, self.head = nn.BatchNorm2d(WIDTH).eval(), nn.Linear(WIDTH, CLASSES)
        self.mixing, self.scale = nn.Parameter(torch.randn(WIDTH, 3)), nn.Parameter(torch.randn(3))

    def forward(self, images):
        hidden = functional.silu(self.group(self.first(images)))
        hidden = self.instance(self.batch(functional.max_pool2d(hidden, 2)))
        hidden = functional.adaptive_avg_pool2d(self.second(hidden), 1)[:, :, 0, 0]
        order = torch.arange(WIDTH).flip(0)
        logits = self.head(hidden[:, order] + torch.einsum("bi,bi->b", hidden, hidden)[:, None])
        mixed = torch.einsum("bi,ij->bj", hidden, self.mixing)
        return logits * mixed + torch.einsum("bi,ij,j->bj", hidden, self.mixing, self.scale)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells, self.head = nn.LSTM(4, WIDTH, batch_first=True), nn.Linear(WIDTH, CLASSES)

    def forward(self, series):
        first, last = self.cells(series)[0].split(T // 2, 1)
        return self.head((first * last).to(torch.float64).mean(1))


MODELS = {
    "language": (Language, lambda: torch.randint(20, (B, T))),
    "images": (Images, lambda: torch.randn(B, 3, 10, 10).double()),
    "recurrent": (Recurrent, lambda: torch.randn(B, T, 4).double()),
}


@pytest.mark.filterwarnings("ignore:The tensor attributes")  # of recurrent layers
@pytest.mark.parametrize("kind", MODELS)
def test_exported_programs(kind):
    torch.manual_seed(0)
    made, inputs = MODELS[kind]
    model, data = made().double(), inputs()
    batch = data, torch.randint(CLASSES, (B,))
    program = torch.export.export(model, (data,)).module()
    expected = oracle_sqnorms(model, batch, losses_of)
    assert_sqnorms(gs.per_example_norms(program, batch, losses_of), expected, 1e-10)
    with gs.track(program, batch_size=B) as tracker:
        losses_of(program, batch).mean().backward()
    assert_sqnorms(tracker.stats, expected, 1e-10)


class Trained(nn.Module):
    """A model with its losses, as it is exported to be trained."""

    def __init__(self, reduction):
        super().__init__()
        self.head, self.reduction = nn.Linear(WIDTH, CLASSES), reduction

    def forward(self, x, classes):
        logits = self.head(x)
        how = {"reduction": self.reduction}
        wrong = functional.cross_entropy(logits, classes, label_smoothing=0.1, **how)
        wrong = wrong + functional.nll_loss(logits.log_softmax(1), classes, **how)
        far = functional.mse_loss(logits, torch.ones_like(logits), **how)
        if self.reduction == "none":
            return wrong + far.mean(1)
        return wrong + (far / CLASSES if self.reduction == "sum" else far)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_exported_losses(reduction):
    torch.manual_seed(0)
    model = Trained(reduction).double()
    batch = torch.randn(B, WIDTH).double(), torch.randint(CLASSES, (B,))
    program = torch.export.export(model, batch).module()

    def loss(model, batch):
        return model(*batch)

    model.reduction = "none"
    expected = oracle_sqnorms(model, batch, loss)
    if reduction == "none":
        assert_sqnorms(gs.per_example_norms(program, batch, loss), expected, 1e-10)
        return
    with gs.track(program, batch_size=B, loss_reduction=reduction) as tracker:
        loss(program, batch).backward()
    assert_sqnorms(tracker.stats, expected, 1e-10)


@pytest.mark.parametrize(
    "losses",
    [
        lambda w, x: ATEN.mse_loss(x, w.expand_as(x), 0),
        lambda w, x: ATEN.cross_entropy_loss(w.expand_as(x), x.argmax(1), None, 0),
        lambda w, x: ATEN.nll_loss(w.log_softmax(0).expand_as(x), x.argmax(1), None, 0),
    ],
    ids=["mse", "cross entropy", "nll"],
)
def test_losses_of_parameters_by_operators(losses):
    check_operation(lambda m, x: losses(m.w, x), {"w": (WIDTH,)}, normal(B, WIDTH))


ORDER = torch.tensor([1, 0, 3, 4, 2])

# What moves the examples (B, CLASSES), whose losses are then each of one of them.
MOVES = {
    "flip": lambda h: ATEN.flip(h, [0]),
    "an overload": lambda h: ATEN.roll.default(h, [1], [0]),
    "index": lambda h: ATEN.index(h, [ORDER]),
    "index_select": lambda h: ATEN.index_select(h, 0, ORDER),
    "gather": lambda h: ATEN.gather(h, 0, ORDER[:, None].expand(B, CLASSES)),
    "scatter": lambda h: ATEN.scatter(torch.zeros_like(h), 0, ORDER[:, None].expand_as(h), h),
    "cat": lambda h: ATEN.cat([ATEN.slice(h, 0, 2), ATEN.slice(h, 0, 0, 2)]),
    "columns": lambda h: ATEN.t(ATEN.flip(ATEN.t(h), [1])),
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_operators_that_move_the_examples(move):
    torch.manual_seed(0)
    model, x = nn.Linear(4, CLASSES).double(), torch.randn(B, 4).double()

    def losses(model, x):
        return move(model(x)).exp().sum(1)

    parameters = dict(model.named_parameters())
    rows = [torch.autograd.grad(losses(model, x)[i], [*parameters.values()]) for i in range(B)]
    expected = {
        name: torch.stack([part.square().sum() for part in parts])
        for name, parts in zip(parameters, zip(*rows, strict=True), strict=True)
    }
    assert_sqnorms(gs.per_example_norms(model, x, losses), expected, 1e-10)


MIXES = {
    "softmax": lambda h: ATEN.softmax.int(h, 0),
    "what has no function": lambda h: ATEN._softmax(h, 0, False),
    "cumsum": lambda h: ATEN.cumsum(h, 0),
    "sort": lambda h: ATEN.sort(h, 0)[0],
    "norm over all": lambda h: ATEN.layer_norm(h, h.shape),
    "statistics of the batch": lambda h: ATEN.native_batch_norm(h, *[None] * 4, True, 0.1, 1e-5)[0],
    "product": lambda h: ATEN.mm(torch.ones(B, B).double(), h),
    "centred": lambda h: ATEN.sub(h, ATEN.mean.dim(h, [0], True)),
    "transformed": lambda h: ATEN.fft_fft(h, None, 0).abs(),
}


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_operators_that_mix_the_examples(mix):
    model, x = nn.Linear(4, CLASSES).double(), torch.randn(B, 4).double()
    with pytest.raises((gs.CoupledExamplesError, gs.ExampleAxisError)):
        gs.per_example_norms(model, x, lambda model, x: mix(model(x)).exp().sum(1))


# Primitives of numbers x (B, B), with other arguments than torch's functions of these names, or
# another result.
PRIMITIVES = {
    "axes": lambda x: PRIMS.transpose(x, [0, 1]),
    "axes, an overload": lambda x: PRIMS.transpose.default(x, [0, 1]),
    "factors": lambda x: PRIMS.svd(x, full_matrices=False)[0],
    "variances": lambda x: PRIMS.var(x, [1], 0.0)[:, None],
    "products": lambda x: PRIMS.prod(x, [1])[:, None],
    "quotients": lambda x: PRIMS.div((9 * x).long(), torch.full((B, B), 2)),
}


@pytest.mark.parametrize("primitive", PRIMITIVES.values(), ids=PRIMITIVES)
def test_primitives_unlike_functions(primitive):
    torch.manual_seed(0)
    model, batch = nn.Linear(B, CLASSES).double(), tuple(torch.randn(2, B, B).double())

    def losses(model, batch):
        x, y = batch
        return (model(x).exp() * primitive(y)[:, :1]).sum(1)

    expected = oracle_sqnorms(model, batch, losses)
    assert_sqnorms(gs.per_example_norms(model, batch, losses), expected, 1e-10)


def test_a_primitive_that_moves_the_examples():
    model, x = nn.Linear(B, CLASSES).double(), torch.randn(B, B).double()
    with pytest.raises(gs.ExampleAxisError, match=r"lost at torch\.ops\.prims\.transpose"):
        gs.per_example_norms(model, x, lambda m, x: m(PRIMS.transpose(x, [1, 0])).sum(1))


def test_an_operator_for_which_a_rule_is_registered():
    torch.manual_seed(0)
    weight, data, called = nn.Parameter(torch.randn(WIDTH).double()), torch.randn(B, WIDTH), []
    model = nn.ParameterDict({"weight": weight})

    def product(x, w):
        called.append(x.shape)
        return x * w

    def losses(model, x):
        return ATEN.mul.Tensor(x, model["weight"]).square().sum(1)

    expected = oracle_sqnorms(model, data.double(), losses)
    with gs.register_rule(ATEN.mul.Tensor, product):
        assert_sqnorms(gs.per_example_norms(model, data.double(), losses), expected, 1e-10)
    assert called
