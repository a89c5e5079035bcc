"""Small models on which gradient libraries are known to go wrong in silence."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import gradstats as gs
from tests.zoo.case import BATCH, Case, classify, labelled, sequence_loss, tokens, uneven

WIDTH = 6


class Net(nn.Module):
    """``function(model, *inputs)`` with the given modules and parameters as attributes."""

    def __init__(self, function: Callable[..., Tensor], **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(self, *inputs)


class Head(nn.Linear):
    """A subclass, which exact-type look-ups miss."""


def losses(model: nn.Module, batch) -> Tensor:
    return uneven(model(*batch))


def next_token(model: nn.Module, batch) -> Tensor:
    ids, targets = batch
    return sequence_loss(model(ids), targets)


def data(*shapes: tuple[int, ...]):
    return lambda: tuple(torch.randn(BATCH, *shape) for shape in shapes)


def convolution(layer: Callable[[], nn.Module], *shape: int):
    def build() -> nn.Module:
        return nn.Sequential(layer(), nn.Tanh(), nn.Flatten(), nn.LazyLinear(4))

    def ready() -> nn.Module:
        model = build()
        model(torch.zeros(1, *shape))
        return model

    return ready, labelled(*shape)


def tied(head: type[nn.Linear]):
    def build() -> nn.Module:
        table = nn.Embedding(40, WIDTH)
        layer = head(WIDTH, 40, bias=False)
        layer.weight = table.weight
        return nn.Sequential(table, nn.LayerNorm(WIDTH), layer)

    return build


def positions(length: int, kind: str):
    def function(m: nn.Module, ids: Tensor) -> Tensor:
        place = torch.arange(length)
        if kind == "(1, T)":
            place = place.unsqueeze(0)
        added = m.added[:, :length] if kind == "parameter" else m.position(place)
        return m.head(torch.tanh(m.table(ids) + added))

    return lambda: Net(
        function,
        table=nn.Embedding(40, WIDTH),
        head=nn.Linear(WIDTH, 40),
        **(
            {"added": nn.Parameter(torch.randn(1, 9, WIDTH))}
            if kind == "parameter"
            else {"position": nn.Embedding(9, WIDTH)}
        ),
    )


def conv1d_of_hugging_face() -> nn.Module:
    from transformers.pytorch_utils import Conv1D

    return nn.Sequential(Conv1D(9, WIDTH), nn.GELU(), Conv1D(2, 9))


def skipping(m: nn.Module, x: Tensor) -> Tensor:
    """A layer that this batch skips, and one that only some examples take."""
    y = torch.where(x[:, :1] > 0, m.some(x), m.others(x))
    return m.skipped(y) if len(x) > 100 else y


class UnseenFunction(torch.autograd.Function):
    """A custom Function takes a parameter where no operation can be seen."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


def checkpointed(m: nn.Module, x: Tensor) -> Tensor:
    x = checkpoint(lambda x: m.block(x).tanh(), x, use_reentrant=False)
    return m.block(x)


GROUPED = {
    "Conv2d, groups": lambda: nn.Conv2d(4, 6, 3, groups=2),
    "Conv2d, depthwise": lambda: nn.Conv2d(4, 8, 3, groups=4, padding=1),
    "Conv2d, circular padding": lambda: nn.Conv2d(4, 3, 3, padding=1, padding_mode="circular"),
    "Conv2d, reflected padding": lambda: nn.Conv2d(4, 3, 3, padding=1, padding_mode="reflect"),
    "Conv2d, padding 'same', even kernel": lambda: nn.Conv2d(4, 3, 4, padding="same"),
    "Conv2d, stride, dilation": lambda: nn.Conv2d(4, 3, 3, stride=2, dilation=2, padding=2),
    "ConvTranspose2d, groups": lambda: nn.ConvTranspose2d(4, 6, 3, groups=2),
    "ConvTranspose2d, output padding": lambda: nn.ConvTranspose2d(4, 3, 3, 2, 1, 1),
}

CONVOLUTIONS = [
    *(Case(name, *convolution(layer, 4, 6, 6), classify) for name, layer in GROUPED.items()),
    Case("Conv3d", *convolution(lambda: nn.Conv3d(2, 3, 2), 2, 3, 3, 3), classify),
    Case("Conv1d", *convolution(lambda: nn.Conv1d(4, 3, 3), 4, 7), classify),
]

SHARED = [
    Case("embedding tied to the head", tied(nn.Linear), tokens, next_token),
    Case("embedding tied to a subclass of Linear", tied(Head), tokens, next_token),
    Case(
        "weight used again transposed",
        lambda: Net(
            lambda m, x: functional.linear(m.layer(x).tanh(), m.layer.weight.t()),
            layer=nn.Linear(WIDTH, 4),
        ),
        data((5, WIDTH)),
        losses,
    ),
    Case(
        "one module called three times",
        lambda: Net(
            lambda m, x: m.layer(torch.tanh(m.layer(torch.tanh(m.layer(x))))),
            layer=nn.Linear(WIDTH, WIDTH),
        ),
        data((5, WIDTH)),
        losses,
    ),
    Case(
        "one module called in and after a checkpoint",
        lambda: Net(checkpointed, block=nn.Linear(WIDTH, WIDTH)),
        data((5, WIDTH)),
        losses,
    ),
    Case(
        "two forwards before one backward",
        lambda: Net(
            lambda m, x, y: functional.cosine_similarity(m.net(x), m.net(y)).unsqueeze(1),
            net=nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, 4)),
        ),
        data((WIDTH,), (WIDTH,)),
        losses,
    ),
    Case(
        "layers that an example or a batch skips",
        lambda: Net(
            skipping,
            some=nn.Linear(WIDTH, 4),
            others=nn.Linear(WIDTH, 4),
            skipped=nn.Linear(4, 4),
        ),
        data((WIDTH,)),
        losses,
    ),
]

POSITIONS = [
    Case(f"position ids {kind}, T {'=' if length == BATCH else '≠'} B", positions(length, kind),
         lambda length=length: tokens(length), next_token)
    for kind in ("(T,)", "(1, T)", "parameter")
    for length in (BATCH, 5)
]  # fmt: skip

PARAMETERS = [
    Case(
        "Linear on five axes",
        lambda: nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh(), nn.Linear(4, 2)),
        data((2, 3, 2, WIDTH)),
        losses,
    ),
    Case("Conv1D of Hugging Face", conv1d_of_hugging_face, data((5, WIDTH)), losses),
    Case(
        "Embedding with padding_idx",
        lambda: nn.Sequential(nn.Embedding(40, WIDTH, padding_idx=4), nn.Linear(WIDTH, 40)),
        lambda: tuple(ids.masked_fill(ids % 3 == 0, 4) for ids in tokens()),
        next_token,
    ),
    Case(
        "EmbeddingBag, mean",
        lambda: nn.Sequential(nn.EmbeddingBag(40, WIDTH), nn.Linear(WIDTH, 4)),
        lambda: (tokens()[0], torch.randint(4, (BATCH,))),
        classify,
    ),
    Case(
        "LayerNorm without bias, RMSNorm, PReLU",
        lambda: nn.Sequential(nn.LayerNorm(WIDTH, bias=False), nn.RMSNorm(WIDTH), nn.PReLU()),
        data((5, WIDTH)),
        losses,
    ),
    Case(
        "GroupNorm, InstanceNorm",
        lambda: nn.Sequential(nn.GroupNorm(2, 4), nn.InstanceNorm1d(4, affine=True)),
        data((4, WIDTH)),
        losses,
    ),
    Case(
        "bare parameters: scale, shift, matrix, token",
        lambda: Net(
            lambda m, x: torch.cat([m.token.expand(len(x), 1, -1), m.scale * x + m.shift], 1)
            @ m.matrix,
            scale=nn.Parameter(torch.randn(WIDTH)),
            shift=nn.Parameter(torch.randn(5, 1)),
            matrix=nn.Parameter(torch.randn(WIDTH, 2)),
            token=nn.Parameter(torch.randn(1, 1, WIDTH)),
        ),
        data((5, WIDTH)),
        losses,
    ),
    Case(
        "two inputs, nn.Bilinear",
        lambda: nn.Bilinear(WIDTH, 4, 3),
        data((5, WIDTH), (5, 4)),
        losses,
    ),
    Case(
        "low-rank adaptation of a frozen weight",
        lambda: Net(
            lambda m, x: functional.linear(x, m.weight.detach() + m.up @ m.down),
            weight=nn.Parameter(torch.randn(5, WIDTH)),
            up=nn.Parameter(torch.randn(5, 2)),
            down=nn.Parameter(torch.randn(2, WIDTH)),
        ),
        data((5, WIDTH)),
        losses,
    ),
    Case(
        "weight normalisation",
        lambda: nn.Sequential(
            parametrizations.weight_norm(nn.Conv1d(4, 3, 3)), parametrizations.weight_norm(
                nn.Linear(5, 2))
        ),
        data((4, 7)),
        losses,
    ),
]  # fmt: skip

AXES = [
    Case(
        "examples along the second axis",
        lambda: nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 2)),
        lambda: (torch.randn(5, BATCH, WIDTH),),
        lambda model, batch: uneven(model(*batch).transpose(0, 1)),
        options={"batch_dim": 1},
    ),
    Case(
        "sequence first inside, T = B",
        lambda: Net(lambda m, x: m.layer(x.transpose(0, 1)).transpose(0, 1),
                    layer=nn.Linear(WIDTH, 4)),
        data((BATCH, WIDTH)),
        losses,
    ),
    Case(
        "examples folded together with positions",
        lambda: Net(lambda m, x: m.layer(x.flatten(0, 1)).view(BATCH, 5, -1),
                    layer=nn.Linear(WIDTH, 4)),
        data((5, WIDTH)),
        losses,
    ),
    Case(
        "a custom autograd Function with a parameter",
        lambda: Net(lambda m, x: UnseenFunction.apply(x, m.weight),
                    weight=nn.Parameter(torch.randn(4, WIDTH))),
        data((WIDTH,)),
        losses,
        refused=(gs.UnsupportedOperationError, "UnseenFunction"),
    ),
]  # fmt: skip

CASES = [*CONVOLUTIONS, *SHARED, *POSITIONS, *PARAMETERS, *AXES]
