"""Random programs: whatever they do with the examples, every norm is right or refused.

With as many positions as examples, and rows moved, mixed, repeated and put side by side, shapes
tell nothing. What is right is found by differentiating each loss.
"""

import random
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import gradstats as gs
from tests.oracle import oracle_sqnorms

PROGRAMS = 300
# Compiling one takes as long as running hundreds.
COMPILED = 40


# It has no derivative before.
AMINMAX = [lambda t, axis: torch.aminmax(t, dim=axis).max] if torch.__version__ >= "2.13" else []


def changed(tensor: Tensor, change: Callable[[Tensor], object]) -> Tensor:
    """Return a copy of a tensor that was changed in place."""
    copy = tensor.clone()
    change(copy)
    return copy


def attends(tensor: Tensor, width: int, masked: float, whole: bool = False) -> Tensor:
    """Return the attention of rows that are put into one, each to those of its block.

    Args:
        tensor: (n, m, d).
        width: of the blocks.
        masked: what is added to the scores of other pairs.
        whole: whether the first row is masked as a whole.
    """
    rows = tensor.flatten(0, 1)[None]
    block = torch.arange(rows.shape[1]) // width
    mask = torch.where(block[:, None] == block, 0.0, masked)
    mask[:1] += masked if whole else 0.0
    return functional.scaled_dot_product_attention(rows, rows, rows, mask).view(tensor.shape)


def standardised(tensor: Tensor, given: bool) -> Tensor:
    """Return the product with what another module makes of a tensor by statistics of the batch."""
    other = torch.nn.BatchNorm1d(tensor.shape[1], affine=False)(tensor)
    return tensor * (other.detach() if given else other)


def apart(row: Tensor) -> Tensor:
    return row.sin() * row.sum()


# Operations along one axis of a tensor.
ALONG: tuple[Callable[[Tensor, int], Tensor], ...] = (
    lambda t, axis: t.transpose(0, axis),
    lambda t, axis: t.movedim(axis, -1),
    lambda t, axis: t.unsqueeze(axis),
    lambda t, axis: t.flip(axis),
    lambda t, axis: t.roll(1, axis),
    lambda t, axis: t.select(axis, -1),
    lambda t, axis: t.narrow(axis, 0, 1),
    lambda t, axis: t.unbind(axis)[0],
    lambda t, axis: t.unfold(axis, 2, 1),
    lambda t, axis: t.repeat_interleave(2, axis),
    lambda t, axis: t.index_select(axis, torch.arange(t.shape[axis]) // 2),
    lambda t, axis: t.gather(axis, torch.zeros_like(t, dtype=torch.long)),
    lambda t, axis: t.unflatten(axis, (2, -1)),
    lambda t, axis: torch.cat(t.chunk(2, axis), 0),
    lambda t, axis: torch.cat([t.sort(axis).values, t], axis - 1),
    lambda t, axis: torch.stack([t, t.sin()], axis),
    lambda t, axis: torch.stack([row.tanh() for row in t.unbind(axis)]),
    lambda t, axis: torch.zeros_like(t).index_copy(axis, torch.arange(t.shape[axis]).flip(0), t),
    lambda t, axis: t.sum(axis),
    lambda t, axis: t.mean(axis, keepdim=True),
    lambda t, axis: t.logsumexp(axis),
    lambda t, axis: t.softmax(axis),
    lambda t, axis: t.cumsum(axis),
    lambda t, axis: t - t.amax(axis, keepdim=True),
    lambda t, axis: functional.normalize(t, dim=axis),
    lambda t, axis: torch.vmap(apart, axis)(t),
    lambda t, axis: torch.vmap(apart, axis, axis)(t),
    lambda t, axis: torch.vmap(torch.linalg.norm, axis)(t),
    lambda t, axis: torch.zeros_like(t).scatter(axis, t.detach().argsort(axis), t),
    lambda t, axis: torch.zeros_like(t).scatter_add(axis, t.detach().argsort(axis) // 2, t),
    lambda t, axis: t.select_scatter(t.select(axis, 0) * 2, axis, 1),
    lambda t, axis: torch.fft.rfft(t, dim=axis).abs(),
    lambda t, axis: torch.cat(t.split(1, axis)[::-1], axis),
    lambda t, axis: t.topk(2, axis).values,
    lambda t, axis: changed(t, lambda x: x.transpose_(0, axis)),
    lambda t, axis: changed(t, lambda x: x.select(axis, 0).mul_(2)),
    lambda t, axis: changed(t, lambda x: x.narrow(axis, 0, 1).copy_(x.narrow(axis, 1, 1))),
    lambda t, axis: t.swapaxes(axis, -1),
    lambda t, axis: torch.take_along_dim(t, t.detach().argsort(axis), axis),
    lambda t, axis: t.diff(dim=axis),
    lambda t, axis: t.prod(axis, keepdim=True),
    lambda t, axis: t.var(axis, correction=0, keepdim=True),
    lambda t, axis: t.median(axis).values,
    lambda t, axis: t.cummax(axis).values,
    *AMINMAX,
    lambda t, axis: torch.cat([t, t.mean(axis, keepdim=True)], axis),
    lambda t, axis: t.tensor_split([1], axis)[1],
    lambda t, axis: torch.stack(t.unbind(axis)[::-1], axis),
    lambda t, axis: functional.glu(t.repeat_interleave(2, axis), axis),
    lambda t, axis: torch.zeros_like(t).index_add(axis, torch.arange(t.shape[axis]) // 2, t),
    lambda t, axis: torch.diagonal(t, dim1=axis, dim2=axis - 1),
    lambda t, axis: torch.tile(t, (2,) + (1,) * axis),
    lambda t, axis: torch.renorm(t, 2, axis, 1.0),
    lambda t, axis: t.slice_scatter(t.narrow(axis, 0, 1) * 2, axis, 1, 2),
    lambda t, axis: torch.trapezoid(t, dim=axis),
)

# Operations on a whole tensor.
OF_ONE: tuple[Callable[[Tensor], Tensor], ...] = (
    torch.tanh,
    torch.tril,
    lambda t: t * t.detach(),
    lambda t: t.flatten(0, 1),
    lambda t: t.reshape(t.shape[::-1]),
    lambda t: t.view(2, -1),
    lambda t: t.mT @ t,
    lambda t: t @ t.mT,
    lambda t: torch.ones(t.shape[-2], t.shape[-2]) @ t,
    lambda t: t.expand(2, *t.shape),
    lambda t: t[1:],
    lambda t: t[t.detach().flatten(1).sum(1).argsort()],
    lambda t: t[torch.arange(len(t)) != 0],
    lambda t: t.masked_fill(t > 1, 0.5),
    lambda t: t.clone().index_fill_(0, torch.tensor([0]), 0.5),
    lambda t: functional.layer_norm(t, t.shape[-2:]),
    lambda t: functional.group_norm(t, 1),
    lambda t: functional.avg_pool1d(t, 3, 1, 1),
    lambda t: functional.pad(t, (1, 0)),
    lambda t: functional.interpolate(t, scale_factor=2),
    lambda t: torch.func.functionalize(torch.sin)(t),
    lambda t: torch.vmap(lambda row: t * row.mean())(t),
    lambda t: torch.stack([t[i] * t[i - 1] for i in range(len(t))]),
    lambda t: changed(t, lambda x: x.__setitem__((slice(None), 0), 0.5)),
    lambda t: changed(t, lambda x: x.__setitem__(0, x[1].detach())),
    lambda t: torch.zeros_like(t).index_put((torch.arange(len(t)).flip(0),), t),
    lambda t: torch.cdist(t, t),
    torch.diag_embed,
    lambda t: t.permute(*range(t.dim())[::-1]),
    lambda t: t.movedim((0, 1), (1, 0)),
    lambda t: t.roll((1, 1), (0, 1)),
    lambda t: t.view(-1, *t.shape[2:]),
    lambda t: t[:, [1, 0]],
    lambda t: t[torch.arange(len(t)), 0],
    lambda t: t[..., t.detach().flatten(0, -2).sum(0).argsort()],
    lambda t: torch.vstack([t, t.cos()]),
    lambda t: torch.hstack([t, t.cos()]),
    lambda t: torch.dstack([t, t.cos()]),
    lambda t: torch.masked_select(t, t.detach() < torch.inf).reshape(t.shape),
    lambda t: torch.zeros_like(t).masked_scatter(t.detach() < torch.inf, t),
    lambda t: t.new_zeros(t.shape).copy_(t),
    lambda t: t - t.mean(0, keepdim=True),
    lambda t: t / t.norm(),
    lambda t: functional.pad(t, (0, 0, 1, 0)),
    lambda t: functional.max_pool1d(t, 2, 1),
    functional.instance_norm,
    lambda t: functional.fold(functional.unfold(t[:, None], 2), t.shape[-2:], 2).squeeze(1),
    lambda t: torch.nn.utils.rnn.pad_sequence(list(t)),
    lambda t: functional.pairwise_distance(t, t.flip(0)),
    lambda t: torch.cov(t.flatten(1)),
    lambda t: changed(t, lambda x: x[1:].add_(x[:-1].clone())),
    lambda t: attends(t, t.shape[1], -torch.inf),
    lambda t: attends(t, t.shape[1], -1e9),
    lambda t: attends(t, t.shape[1], -1e9, whole=True),
    lambda t: attends(t, t.shape[1] + 1, -torch.inf),
    lambda t: standardised(t, given=True),
    lambda t: standardised(t, given=False),
)

# Operations on two tensors.
OF_TWO: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    torch.add,
    torch.mul,
    torch.matmul,
    torch.linalg.vecdot,
    lambda a, b: torch.where(a > b, a, b),
    lambda a, b: torch.cat([a, b], 0),
    lambda a, b: torch.cat([a, b], -1),
    lambda a, b: torch.stack([b, a], 1),
    lambda a, b: torch.einsum("abc,adc->abd", a, b),
    lambda a, b: (a.unsqueeze(-2) - b.unsqueeze(-3)).square().sum(-1),
    lambda a, b: functional.scaled_dot_product_attention(a, b, b),
    lambda a, b: torch.vmap(torch.dot)(a, b),
    lambda a, b: torch.vmap(lambda row: (row * b).sum(0))(a),
    lambda a, b: changed(a, lambda x: x[:, 0].copy_(b[:, 0])),
    lambda a, b: a * b.sum(0),
    lambda a, b: a[(7 * b.detach().flatten(1).sum(1).abs()).long() % len(a)],
    torch.hypot,
    torch.cdist,
    lambda a, b: torch.bmm(a, b.mT),
    lambda a, b: torch.tensordot(a, b, ([-1], [-1])),
    lambda a, b: torch.einsum("ab...,ab...->a...", a, b),
    lambda a, b: torch.einsum("abc,dbc->ad", a, b),
    lambda a, b: functional.bilinear(a, b, torch.ones(2, a.shape[-1], b.shape[-1])),
    lambda a, b: functional.conv1d(a, b[:2]),
    lambda a, b: torch.baddbmm(a, a, b),
    lambda a, b: torch.lerp(a, b, 0.3),
    lambda a, b: torch.stack([x * y for x, y in zip(a, b, strict=True)]),
    lambda a, b: a.index_add(0, torch.zeros(len(b), dtype=torch.long), b),
    lambda a, b: torch.where(a.detach().sum(-1, keepdim=True) > 0, a, b),
    lambda a, b: torch.maximum(a, b.flip(0)),
    lambda a, b: a.unsqueeze(0) * b.unsqueeze(1),
    lambda a, b: a[:, :1] + b[:1],
    lambda a, b: changed(a, lambda x: x[1:].copy_(b[1:])),
)

# The shape of a parameter that a tensor can meet, and what they do then.
WITH_PARAMETER: tuple[tuple[Callable[..., tuple[int, ...]], Callable[..., Tensor]], ...] = (
    (lambda t: (3, t.shape[-1]), functional.linear),
    (lambda t: (3, t.shape[-1]), lambda t, p: functional.linear(t, p / p.norm(dim=1)[:, None])),
    (lambda t: (t.shape[-2], t.shape[-2]), lambda t, p: p @ t),
    (lambda t: (t.shape[-1],), torch.mul),
    (lambda t: (len(t), *(1 for _ in t.shape[1:])), torch.mul),
    (lambda t: tuple(t.shape[1:]), lambda t, p: (t + p.expand(t.shape)).sin()),
    (lambda t: tuple(t.shape[1:]), lambda t, p: torch.cat([p.unsqueeze(0), t])),
    (lambda t: tuple(t.shape[1:]), lambda t, p: torch.stack([row * p for row in t])),
    (lambda t: (1, *t.shape[1:]), lambda t, p: torch.cat([p.expand(t.shape), t], -1)),
    (lambda t: (t.shape[-1],), lambda t, p: functional.layer_norm(t, p.shape, p)),
    (lambda t: (5, 3), lambda t, p: functional.embedding((9 * t.detach().abs()).long() % 5, p)),
    (lambda t: (5,), lambda t, p: t * p[(9 * t.detach().abs()).long() % 5]),
    (lambda t: (2, t.shape[1], 1), functional.conv1d),
    (lambda t: (len(t), t.shape[-1], 2), torch.bmm),
    (lambda t: (3, t.shape[-1]), lambda t, p: torch.vmap(lambda row: functional.linear(row, p))(t)),
    (lambda t: (2, t.shape[-1]), lambda t, p: torch.vmap(lambda own: t * own.sin())(p)),
    (lambda t: (t.shape[-1],), lambda t, p: changed(t, lambda x: x.mul_(p))),
    (lambda t: (t.shape[-1], 3), lambda t, p: torch.einsum("...i,ij->j...", t, p)),
    (lambda t: (t.shape[-1],) * 2, lambda t, p: torch.linalg.solve(p.tril().exp(), t.mT).mT),
)


class Step(NamedTuple):
    """One operation, the earlier tensors that it takes, and its parameter if it takes one."""

    function: Callable[..., Tensor]
    places: tuple[int, ...]
    parameter: int | None


class Program(nn.Module):
    """A model of random operations, that a batch of its own can go through.

    Attributes:
        batch: its input, with ``examples`` examples along the axis of that number.
        axis: the axis of its output along which the losses are taken; None where there is none.
    """

    def __init__(self, seed: int, batch_dim: int):
        super().__init__()
        self.draw = random.Random(seed)
        torch.manual_seed(seed)
        self.examples = self.draw.choice([2, 3, 4])
        others = [self.draw.choice([self.examples, 2, 3, 5]) for _ in range(2)]
        self.batch = torch.randn(*others[:batch_dim], self.examples, *others[batch_dim:])
        self.steps: list[Step] = []
        self.weights = nn.ParameterList()
        values, length = [self.batch], self.draw.randrange(3, 9)
        for _ in range(60):
            if len(self.steps) == length:
                break
            step = self.propose(values)
            try:
                value = self.run(step, values)
            except (RuntimeError, IndexError, TypeError, ValueError):
                continue  # whose shapes do not fit
            if value.dim() and 0 < value.numel() < 2000 and value.isfinite().all():
                self.steps.append(step)
                values.append(value)
        axes = [axis for axis, size in enumerate(values[-1].shape) if size == self.examples]
        self.axis = self.draw.choice(axes) if axes and values[-1].requires_grad else None

    def propose(self, values: list[Tensor]) -> Step:
        """Draw an operation on some of the tensors, the last one more often than others."""
        place = self.draw.choice([len(values) - 1, self.draw.randrange(len(values))])
        value = values[place]
        kind = self.draw.choice(["along", "one", "two", "parameter", "parameter"])
        if kind == "along":
            function, axis = self.draw.choice(ALONG), self.draw.randrange(max(1, value.dim()))
            return Step(lambda t: function(t, axis), (place,), None)
        if kind == "one":
            return Step(self.draw.choice(OF_ONE), (place,), None)
        if kind == "two":
            pair = place, self.draw.randrange(len(values))
            return Step(self.draw.choice(OF_TWO), pair, None)
        shape_for, function = self.draw.choice(WITH_PARAMETER)
        shape = shape_for(value) if value.dim() > 1 else tuple(value.shape)
        alike = [i for i, weight in enumerate(self.weights) if weight.shape == shape]
        if not alike or self.draw.random() < 0.5:
            alike = [len(self.weights)]
            self.weights.append(nn.Parameter(torch.randn(shape)))
        return Step(function, (place,), alike[0])

    def run(self, step: Step, values: list[Tensor]) -> Tensor:
        own = () if step.parameter is None else (self.weights[step.parameter],)
        return step.function(*(values[place] for place in step.places), *own)

    def forward(self, batch: Tensor) -> Tensor:
        values = [batch]
        for step in self.steps:
            values.append(self.run(step, values))
        return values[-1].movedim(self.axis, 0)


def losses(model: Program, batch: Tensor) -> Tensor:
    output = model(batch).reshape(model.examples, -1)
    return (output * torch.arange(1, output.shape[1] + 1)).sin().sum(1)


@pytest.fixture(autouse=True)
def in_double_precision():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("batch_dim", [0, 1])
@pytest.mark.parametrize("start", range(0, 2 * PROGRAMS, PROGRAMS))
def test_norms_are_right_or_refused(start, batch_dim):
    right = 0
    for seed in range(start, start + PROGRAMS):
        model = Program(seed, batch_dim)
        if model.axis is None:
            continue
        expected = sum(oracle_sqnorms(model, model.batch, losses).values())
        try:
            found = gs.per_example_norms(model, model.batch, losses, batch_dim=batch_dim).sqnorm
        except gs.GradStatsError:
            continue
        message = f"seed {seed}, batch_dim={batch_dim}"
        torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9, msg=message)
        right += 1
    assert right > PROGRAMS / 10  # most others mix their examples


@pytest.mark.usefixtures("graphs_run_on_cpus")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:Dynamo")
def test_graphs_are_followed_as_eager_code_is():
    """What is right eagerly is right when compiled, and what is refused is refused."""
    right = 0
    for seed in range(COMPILED):
        model = Program(seed, batch_dim=0)
        if model.axis is None:
            continue
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="aot_eager")
        found = []
        for each in (model, compiled):
            try:
                found.append(gs.per_example_norms(each, model.batch, losses).sqnorm)
            except gs.GradStatsError as error:
                found.append(type(error))
            except torch._dynamo.exc.TorchDynamoException as error:
                with pytest.raises(type(error)):
                    losses(compiled, model.batch)  # outside of contexts too
                break
        else:
            eagerly, in_graphs = found
            if not isinstance(eagerly, torch.Tensor):
                assert isinstance(in_graphs, type), f"seed {seed}"
                continue
            assert isinstance(in_graphs, torch.Tensor), f"seed {seed}: {in_graphs}"
            torch.testing.assert_close(in_graphs, eagerly, rtol=1e-7, atol=1e-9, msg=f"seed {seed}")
            right += 1
    assert right > COMPILED / 10
