"""Arguments by name and by position, defaults among them, and ``out=None``."""

from __future__ import annotations

import copy
import inspect
import re
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

import gradstats as gs
from tests.oracle import assert_sqnorms, oracle_sqnorms
from tests.rules.operation import uneven_loss

BATCH, WIDTH = 3, 4


class Operation(nn.Module):
    """An operation on (BATCH, WIDTH) data and parameters, with arguments in some form."""

    def __init__(self, function, arguments, form):
        super().__init__()
        self.function, self.arguments, self.form = function, arguments, form
        sizes = {"v": (WIDTH,), "w": (WIDTH, WIDTH), "r": (BATCH, WIDTH), "one": (1,)}
        for name, size in sizes.items():
            setattr(self, name, nn.Parameter(torch.rand(size).double() + 0.5))

    def forward(self, x):
        return self.form(self.function, self.arguments(self, x)).reshape(BATCH, -1)


def picks(x):
    return (x > 0).long()


def slices(m):
    return m.v.expand(BATCH, WIDTH)


# Arguments by PyTorch's names, in its order.
WITH_OUT = {
    torch.addr: lambda m, x: dict(input=m.r, vec1=x[:, 0], vec2=m.v, beta=1, alpha=1),
    torch.outer: lambda m, x: dict(input=x[:, 0], vec2=m.v),
    torch.inner: lambda m, x: dict(input=x, other=m.w),
    torch.take_along_dim: lambda m, x: dict(input=m.w[None], indices=picks(x)[:, None], dim=1),
    torch.linalg.multi_dot: lambda m, x: dict(tensors=[x, m.w, m.w]),
    torch.linalg.vecdot: lambda m, x: dict(x=x, y=m.v, dim=-1),
    torch.linalg.solve: lambda m, x: dict(A=m.w, B=x, left=False),
    torch.linalg.solve_triangular: lambda m, x: dict(
        input=m.w.triu(), B=x, upper=True, left=False, unitriangular=False
    ),
    torch.cholesky_solve: lambda m, x: dict(input=x[:, :, None], input2=m.w.tril(), upper=False),
    torch.masked_select: lambda m, x: dict(input=slices(m), mask=x < 9),
    torch.mul: lambda m, x: dict(input=x, other=m.v),
    torch.add: lambda m, x: dict(input=x, other=m.v, alpha=1),
    torch.div: lambda m, x: dict(input=x, other=m.v, rounding_mode=None),
    torch.clamp: lambda m, x: dict(input=x, min=m.v, max=None),
    torch.where: lambda m, x: dict(condition=x > 0, input=x, other=m.v),
    torch.lerp: lambda m, x: dict(input=x, end=m.v, weight=0.5),
    torch.addcmul: lambda m, x: dict(input=m.v, tensor1=x, tensor2=m.v, value=1),
    torch.maximum: lambda m, x: dict(input=x, other=m.v),
    torch.matmul: lambda m, x: dict(input=x, other=m.w),
    torch.mm: lambda m, x: dict(input=x, mat2=m.w),
    torch.mv: lambda m, x: dict(input=x, vec=m.v),
    torch.bmm: lambda m, x: dict(input=x[:, None], mat2=m.w.expand(BATCH, WIDTH, WIDTH)),
    torch.addmm: lambda m, x: dict(input=m.v, mat1=x, mat2=m.w, beta=1, alpha=1),
    torch.baddbmm: lambda m, x: dict(
        input=m.one[None, None], batch1=x[:, None], batch2=m.w.expand(BATCH, WIDTH, WIDTH), beta=1,
        alpha=1,
    ),
    torch.cat: lambda m, x: dict(tensors=[x, slices(m)], dim=1),
    torch.stack: lambda m, x: dict(tensors=[x, slices(m)], dim=1),
    torch.hstack: lambda m, x: dict(tensors=[x, slices(m)]),
    torch.index_select: lambda m, x: dict(input=m.w, dim=0, index=picks(x)[:, 0]),
    torch.gather: lambda m, x: dict(input=slices(m), dim=1, index=picks(x), sparse_grad=False),
    torch.sum: lambda m, x: dict(input=m.w * x[:, :, None], dim=1, keepdim=False, dtype=None),
}  # fmt: skip

# The same of functions that take no ``out``.
WITHOUT = {
    torch.tensordot: lambda m, x: dict(a=x, b=m.w, dims=1),
    torch.cdist: lambda m, x: dict(x1=x, x2=m.w),
    functional.cosine_similarity: lambda m, x: dict(x1=x, x2=m.v, dim=1, eps=1e-8),
    functional.pairwise_distance: lambda m, x: dict(x1=x, x2=m.v, p=2.0, eps=1e-6, keepdim=False),
    functional.linear: lambda m, x: dict(input=x, weight=m.w, bias=None),
    functional.bilinear: lambda m, x: dict(input1=x, input2=x, weight=m.w[None], bias=None),
    functional.embedding: lambda m, x: dict(input=picks(x), weight=m.w),
    functional.embedding_bag: lambda m, x: dict(input=picks(x), weight=m.w),
    functional.layer_norm: lambda m, x: dict(
        input=x, normalized_shape=(WIDTH,), weight=m.v, bias=m.one.expand(WIDTH)
    ),
    functional.rms_norm: lambda m, x: dict(input=x, normalized_shape=(WIDTH,), weight=m.v),
    functional.group_norm: lambda m, x: dict(
        input=x[:, :, None], num_groups=1, weight=m.v, bias=None
    ),
    functional.instance_norm: lambda m, x: dict(input=x[:, None].tanh(), weight=m.one),
    functional.prelu: lambda m, x: dict(input=x, weight=m.one),
    functional.conv1d: lambda m, x: dict(
        input=x[:, None], weight=m.w[:, None], bias=None, stride=1, padding=0, dilation=1, groups=1
    ),
    functional.conv_transpose1d: lambda m, x: dict(
        input=x[:, None], weight=m.w[:1, None], bias=None, stride=1, padding=0, output_padding=0,
        groups=1, dilation=1,
    ),
    functional.mse_loss: lambda m, x: dict(
        input=x, target=slices(m), reduction="none", weight=None
    ),
    functional.cross_entropy: lambda m, x: dict(
        input=x, target=slices(m).softmax(1), weight=None, reduction="none", label_smoothing=0.0
    ),
}  # fmt: skip

# Arguments that PyTorch takes by name alone.
NAMED = {
    torch.addr: ("beta", "alpha"),
    torch.linalg.vecdot: ("dim",),
    torch.linalg.solve: ("left",),
    torch.linalg.solve_triangular: ("upper", "left", "unitriangular"),
    torch.add: ("alpha",),
    torch.div: ("rounding_mode",),
    torch.addcmul: ("value",),
    torch.addmm: ("beta", "alpha"),
    torch.baddbmm: ("beta", "alpha"),
    torch.gather: ("sparse_grad",),
    torch.sum: ("dtype",),
}


def with_defaults(function, arguments):
    """Return all arguments, where a function is written in Python and tells its defaults."""
    try:
        bound = inspect.signature(function).bind(**arguments)
    except ValueError:
        return arguments
    bound.apply_defaults()
    return bound.arguments


def by_name(function, arguments):
    return function(**with_defaults(function, arguments))


def by_place(function, arguments):
    arguments = with_defaults(function, arguments)
    named = {name: arguments.pop(name) for name in NAMED.get(function, ())}
    return function(*arguments.values(), **named)


def without_out(function, arguments):
    return function(**arguments, out=None)


CALLS = [
    (function, arguments, form)
    for function, arguments in (WITH_OUT | WITHOUT).items()
    for form in (by_name, by_place, without_out)
    if form is not without_out or function in WITH_OUT
]


@pytest.mark.parametrize(
    ("function", "arguments", "form"),
    CALLS,
    ids=[f"{function.__name__}, {form.__name__}" for function, _, form in CALLS],
)
def test_arguments(function, arguments, form):
    torch.manual_seed(0)
    model, x = Operation(function, arguments, form), torch.randn(BATCH, WIDTH).double()
    expected = oracle_sqnorms(model, (x,), uneven_loss)
    assert_sqnorms(gs.per_example_norms(model, (x,), uneven_loss), expected, 1e-9)
    with gs.track(model, batch_size=BATCH, fused=False) as tracker:
        tracker.backward(uneven_loss(model, (x,)))
    assert_sqnorms(tracker.stats, expected, 1e-9)


def weighted(loss, m, x):
    return loss(x, torch.zeros_like(x), weight=m.v, reduction="none")


INVALID = {
    "unequal numbers of axes": lambda m, x: torch.take_along_dim(m.w, picks(x)[:, None], 1),
    "no such axis": lambda m, x: torch.take_along_dim(m.w[None], picks(x)[:, None], 5),
    "sizes that do not match": lambda m, x: torch.inner(x[:, :2], m.w),
    "a result to write to": lambda m, x: torch.mul(x, m.v, out=torch.empty_like(x)),
    "a result to write a product to": lambda m, x: torch.matmul(x, m.w, out=torch.empty_like(x)),
    "matrices as vectors": lambda m, x: torch.dot(x, m.r),
    "vectors of unequal lengths": lambda m, x: torch.dot(x[0], m.one),
    "the outer product of a matrix": lambda m, x: torch.outer(x, m.v),
    "a matrix as a vector": lambda m, x: torch.mv(x, m.w),
    "a vector as a matrix": lambda m, x: torch.stack([torch.mm(row, m.w) for row in x]),
    "a batch as a matrix": lambda m, x: torch.mm(x[:, None], m.w),
    "a matrix as a batch": lambda m, x: torch.bmm(x, m.w),
    **{
        f"weights of {loss.__name__} of another shape": partial(weighted, loss)
        for loss in (functional.mse_loss, functional.l1_loss, functional.huber_loss)
    },
    "targets of another shape": lambda m, x: functional.binary_cross_entropy(
        x.sigmoid(), m.v.sigmoid(), reduction="none"
    ),
    "targets of logits of another shape": lambda m, x: functional.binary_cross_entropy_with_logits(
        x, m.v, reduction="none"
    ),
}


@pytest.mark.parametrize("name", INVALID)
def test_calls_that_pytorch_refuses(name):
    model = Operation(None, INVALID[name], lambda function, out: out)
    x = torch.randn(BATCH, WIDTH).double()
    with pytest.raises((RuntimeError, IndexError, ValueError)) as plain:
        model(x)
    with pytest.raises(type(plain.value)) as ours:
        gs.per_example_norms(model, (x,), uneven_loss)
    assert str(ours.value) == str(plain.value)


def test_weights_of_absolute_errors():
    """PyTorch leaves them out where a function mode is on."""
    weights = torch.rand(BATCH, WIDTH).double()

    def losses(model, batch):
        error = functional.l1_loss(model(batch[0]), batch[1], weight=batch[2], reduction="none")
        return error.sum(1)

    def by_hand(model, batch):
        return ((model(batch[0]) - batch[1]).abs() * batch[2]).sum(1)

    model = nn.Linear(WIDTH, WIDTH).double()
    batch = *torch.randn(2, BATCH, WIDTH).double(), weights
    stats = gs.per_example_norms(model, batch, losses)
    assert_sqnorms(stats, oracle_sqnorms(model, batch, by_hand), 1e-9)
    torch.testing.assert_close(stats.loss, by_hand(model, batch).detach())


def test_what_has_no_rule():
    x = torch.randn(BATCH, WIDTH).double()
    model = Operation(
        None, lambda m, x: m.v.sum().gather(0, picks(x)[:, 0] * 0), lambda _, out: out
    )
    with pytest.raises(gs.UnsupportedOperationError, match=r"of a single number.*w.expand\(n\)"):
        gs.per_example_norms(model, (x,), uneven_loss)

    def weighted(m, x):
        target = x.softmax(1)
        return functional.cross_entropy(x, target, m.v, reduction="none")

    model = Operation(None, weighted, lambda _, out: out)
    with pytest.raises(gs.UnsupportedOperationError, match="tracked weight of the classes"):
        gs.per_example_norms(model, (x,), uneven_loss)


TARGETS = {
    "probabilities": (
        torch.rand(BATCH, WIDTH).double(),
        "-(weight * target * input.log_softmax(1)).sum(1)",
    ),
    "numbers": (
        torch.arange(BATCH) % WIDTH,
        'weight[target] * cross_entropy(input, target, reduction="none")',
    ),
}


@pytest.mark.parametrize(("target", "product"), TARGETS.values(), ids=TARGETS)
def test_a_trained_weight_of_the_classes_is_multiplied_in_the_model(target, product):
    class Weighted(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.weight = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.rand(WIDTH))

        def forward(self, x):
            return self.layer(x)

    def refused(model, batch):
        return functional.cross_entropy(model(batch[0]), batch[1], model.weight, reduction="none")

    def losses(model, batch):
        names = {"weight": model.weight, "input": model(batch[0]), "target": batch[1]}
        return eval(product, {"cross_entropy": functional.cross_entropy, **names})

    model, batch = Weighted().double(), (torch.randn(BATCH, WIDTH).double(), target)
    with pytest.raises(gs.UnsupportedOperationError, match=re.escape(f"in the model: {product}.")):
        gs.per_example_norms(model, batch, refused)
    constant = copy.deepcopy(model).requires_grad_(False)
    torch.testing.assert_close(losses(constant, batch), refused(constant, batch))
    expected = oracle_sqnorms(model, batch, losses)
    assert_sqnorms(gs.per_example_norms(model, batch, losses), expected, 1e-9)
