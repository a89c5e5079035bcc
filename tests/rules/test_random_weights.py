"""Random computations on parameters before they meet data: every norm and product is right."""

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import gradstats as gs
from tests.oracle import flat, oracle_gradients

PROGRAMS = 100

# A step takes a matrix, and a function that returns a parameter of a shape.
Step = Callable[[Tensor, Callable[..., Tensor]], Tensor]


def constant(*shape: int) -> Tensor:
    return torch.arange(max(1, torch.Size(shape).numel())).double().cos().reshape(shape)


STEPS: tuple[Step, ...] = (
    lambda m, new: 0.7 * m,
    lambda m, new: m / 3,
    lambda m, new: 1 - m,
    lambda m, new: m / (constant(1) + 2),
    lambda m, new: m * constant(m.shape[0], 1),
    lambda m, new: constant(m.shape[1]) * m,
    lambda m, new: m * (constant(*m.shape) > 0).double(),
    lambda m, new: constant(*m.shape) + m,
    lambda m, new: m @ constant(m.shape[1], 3),
    lambda m, new: torch.matmul(constant(2, m.shape[0]), m),
    lambda m, new: m.mm(new(m.shape[1], 2)),
    lambda m, new: new(4, m.shape[0]) @ m,
    lambda m, new: m * new(*m.shape),
    lambda m, new: m + new(*m.shape),
    lambda m, new: torch.add(m, new(*m.shape), alpha=2),
    lambda m, new: m + new(m.shape[1]),
    lambda m, new: m * new(m.shape[0], 1),
    lambda m, new: new(m.shape[1]) * m,
    lambda m, new: m * new(),
    lambda m, new: m / (2 + new(1, 1).square()),
    lambda m, new: new(1, m.shape[1]).expand_as(m) * m,
    lambda m, new: torch.where(m > 0, m, new(*m.shape)),
    lambda m, new: torch.lerp(m, new(*m.shape), 0.3),
    lambda m, new: torch.cat([m, new(1, m.shape[1])]),
    lambda m, new: torch._weight_norm(m, new(m.shape[0], 1), 0),
    lambda m, new: m.T,
    lambda m, new: m.unsqueeze(1).permute(2, 1, 0).squeeze(1),
    lambda m, new: m.reshape(m.shape[1], m.shape[0]),
    lambda m, new: m.flatten().view(m.shape),
    lambda m, new: m.clone().contiguous(),
    lambda m, new: m[torch.tensor([0, -1, 0])],
    lambda m, new: m[torch.tensor([[0], [-1]])].permute(1, 0, 2)[0],
    lambda m, new: functional.embedding(torch.tensor([m.shape[0] - 1, 0]), m),
    lambda m, new: m[: max(1, m.shape[0] - 1)],
    lambda m, new: m.chunk(2)[0],
    lambda m, new: m.tanh(),
    lambda m, new: m.clamp(-0.5, 0.7),
    lambda m, new: (1 + m * m) ** 0.7,
    lambda m, new: m.tril(),
    lambda m, new: m.softmax(1),
    lambda m, new: m / m.norm(dim=1, keepdim=True).detach(),
    lambda m, new: m / (1 + m.norm(dim=1, keepdim=True)),
    lambda m, new: m / (1 + torch.linalg.vector_norm(m, 3, 0, True)),
    lambda m, new: m / (1 + m.norm()),
    lambda m, new: (m - m.mean(1, keepdim=True)) / (1 + m.var(1, unbiased=False)).sqrt()[:, None],
    lambda m, new: m - m.mean(0),
    lambda m, new: m + m.sum(dim=(0, 1)),
    lambda m, new: new(m.shape[1]) - m,
    lambda m, new: torch.sub(m, new(m.shape[0], 1)),
    lambda m, new: torch.rsub(m, new(1, m.shape[1])),
    lambda m, new: torch.sub(input=m, other=new(*m.shape)),
    lambda m, new: torch.add(m, other=new(m.shape[1])),
    lambda m, new: m / (2 + new(m.shape[0], 1).square()),
    lambda m, new: (3 + constant(*m.shape)) / (2 + m * m),
    lambda m, new: m / (2 + m.logsumexp(1, True).exp()),
    lambda m, new: m * m.amax(0),
    lambda m, new: m / (1 + torch.dot(m[:, 0], m.mv(constant(m.shape[1])))).square().add(1),
    lambda m, new: m * (1 + torch.vdot(constant(m.shape[0]), m @ constant(m.shape[1]))),
    lambda m, new: m * (new(m.shape[0]) @ m),
    lambda m, new: m + torch.matmul(m, new(m.shape[1]))[:, None],
    lambda m, new: m * torch.linalg.matrix_norm(m),
    lambda m, new: functional.normalize(m),
    lambda m, new: functional.normalize(m, dim=0),
    lambda m, new: functional.normalize(m, p=3.0, dim=1),
    lambda m, new: functional.normalize(m, dim=(0, 1), eps=2.0),
    lambda m, new: functional.normalize(m.flatten(1).view_as(m), 2, -1, 0.7),
    lambda m, new: torch._weight_norm(m, new(1, m.shape[1]), 1),
    lambda m, new: torch._weight_norm(m, new(), -1),
    lambda m, new: m * m.sigmoid(),
    lambda m, new: torch.cat([new(m.shape[0], 2), m, new(m.shape[0], 1)], 1),
    lambda m, new: torch.cat([torch.cat([m, -new(*m.shape)], 1), torch.cat([new(*m.shape), m], 1)]),
    lambda m, new: torch.hstack((constant(m.shape[0], 2), m)),
    lambda m, new: torch.stack([m, new(*m.shape)], 1).flatten(0, 1),
    lambda m, new: torch.stack([new(*m.shape), m.exp()], 2).flatten(1),
    lambda m, new: torch.stack([m, new(*m.shape)]).sum(0),
    lambda m, new: torch.block_diag(m, constant(1, 2), new(2, 1)),
    lambda m, new: functional.pad(m, (1, 0, 0, 2)),
    lambda m, new: functional.pad(m, (0, 1), value=0.5),
    lambda m, new: functional.pad(m[None], (1, 1), mode="circular")[0],
    lambda m, new: m.flip(0),
    lambda m, new: m.flip(0, 1),
    lambda m, new: torch.roll(m, 1, 1),
    lambda m, new: m.roll(1),
    lambda m, new: m.rot90(),
    lambda m, new: m.repeat(2, 1),
    lambda m, new: m.tile(1, 2),
    lambda m, new: m.repeat_interleave(2, 0),
    lambda m, new: m.index_select(1, torch.tensor([m.shape[1] - 1, 0, 0])),
    lambda m, new: m[:, [0, -1]],
    lambda m, new: m.gather(1, torch.zeros(m.shape[0], 3).long()),
    lambda m, new: m.diag().diag(),
    lambda m, new: torch.kron(m, new(1, 2)),
    lambda m, new: new(2, 3).kron(m),
    lambda m, new: torch.kron(constant(3, 2), m),
    lambda m, new: torch.kron(m, new(2)),
    lambda m, new: torch.diag_embed(m[:, 0]) @ m,
    lambda m, new: (m @ m.T).diagonal()[None] * m[:1].T,
    lambda m, new: written(m, new(1, m.shape[1]), m[0]),
)


def written(*parts: Tensor) -> Tensor:
    """Return a matrix of rows that are written into it one after the other."""
    whole = torch.ones(4, parts[0].shape[-1])
    for place, part in enumerate(parts):
        whole[place : place + 1] = part[:1]
    return whole


# How a matrix meets data (B, T, 1).
USES: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    lambda x, m: functional.linear(x * torch.linspace(1, 2, m.shape[1]), m),
    lambda x, m: (x * torch.linspace(1, 2, m.shape[0])) @ m,
    lambda x, m: (x[:, 0] * torch.linspace(1, 2, m.shape[0])) @ m,
    lambda x, m: x * m.flatten(),
    lambda x, m: x + m[0],
    lambda x, m: functional.conv1d(x.mT, m.unsqueeze(1), padding=m.shape[1]),
    lambda x, m: functional.embedding((3 * x).long().abs() % m.shape[0], m) * x.unsqueeze(-1),
    lambda x, m: (x * torch.linspace(1, 2, m.shape[0]))[:, None] @ torch.stack([m, m.exp()]),
    lambda x, m: torch.cat(
        [functional.linear(x * torch.linspace(1, 2, m.shape[1]), part) for part in m.split(1)], 2
    ),
    lambda x, m: x * m[:, 0] + (x * m.flatten()[-2:]).sum(-1, keepdim=True),
    lambda x, m: functional.conv1d(
        x.mT.cos() * torch.linspace(1, 2, m.shape[1])[:, None],
        torch.stack([m, 2 * m], 2),
        padding=1,
    ),
)


class Program(nn.Module):
    """Up to two uses of matrices that are computed from parameters, drawn from a seed."""

    def __init__(self, seed: int):
        super().__init__()
        self.seed = seed
        self.made = nn.ParameterDict()
        self(torch.ones(1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        draw, losses = random.Random(self.seed), torch.zeros(len(x))

        def new(*shape: int) -> Tensor:
            # one of two of each shape, so that some are used again
            name = "×".join(map(str, shape)) + draw.choice("ab")
            if name not in self.made:
                self.made[name] = nn.Parameter(torch.randn(shape))
            return self.made[name]

        for _ in range(draw.choice((1, 1, 2))):
            matrix = new(draw.randint(1, 4), draw.randint(1, 4))
            for _ in range(draw.randint(1, 5)):
                matrix = draw.choice(STEPS)(matrix, new)
            out = draw.choice(USES)(x, matrix).flatten(1)
            losses = losses + (out * torch.linspace(0.5, 1.5, out.shape[1]) + out.square()).sum(1)
        return losses


@pytest.fixture(autouse=True)
def in_double_precision():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("workspace", [1, 2**28])
def test_norms_and_products_are_right(workspace):
    for seed in range(PROGRAMS):
        torch.manual_seed(seed)
        model, batch = Program(seed), torch.randn(1 + seed % 4, 1 + seed % 3, 1)
        gradients = flat(oracle_gradients(model, batch, lambda model, x: model(x)))
        if not gradients.isfinite().all():
            continue
        products = gradients @ gradients.T
        tolerance = {"rtol": 0.0, "atol": 1e-9 * (float(products.diagonal().max()) + 1e-18)}
        # Beside products gradients of a few elements are formed and kept.
        alone = gs.per_example_norms(model, batch, lambda model, x: model(x), workspace=workspace)
        got = gs.per_example_norms(
            model, batch, lambda model, x: model(x), gram=True, alignment=True, workspace=workspace
        )
        assert got.gram is not None and got.alignment is not None
        for found, expected in (
            (alone.sqnorm, products.diagonal()),
            (got.sqnorm, products.diagonal()),
            (got.gram, products),
            (got.alignment, products.mean(1)),
        ):
            torch.testing.assert_close(found, expected, **tolerance, msg=f"program {seed}")
