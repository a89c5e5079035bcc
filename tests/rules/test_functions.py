"""Custom autograd Functions of parameters and constants alone, pulled back by their backward."""

from __future__ import annotations

import copy
import itertools
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.modules._functions import SyncBatchNorm
from torch.utils.checkpoint import checkpoint

import gradstats as gs
from gradstats.capture.operations._graph import INNERMOST
from gradstats.capture.parameters._functions import HOST, SHARED_APPLY
from tests.functions import Kernel
from tests.oracle import (
    assert_sqnorms,
    check_model,
    check_products,
    oracle_gradients,
    oracle_on_the_batch,
    oracle_sqnorms,
)
from tests.rules.operation import Operation, check_operation, check_refused, normal, uneven_loss

BATCH, POSITIONS, WIDTH = 4, 3, 5


class Rounded(torch.autograd.Function):
    """Rounds, with the gradient of the identity."""

    @staticmethod
    def forward(ctx, w):
        return w.round()

    @staticmethod
    def backward(ctx, grad):
        return grad


class Binarised(torch.autograd.Function):
    """Signs times a scale; numbers beyond one have no gradient, as in binarised networks."""

    @staticmethod
    def forward(ctx, w, scale):
        ctx.save_for_backward(w, scale)
        return w.sign() * scale

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        w, scale = ctx.saved_tensors
        inside = grad * scale * (w.abs() <= 1)
        return inside, torch.from_numpy((grad * w.sign()).numpy().sum(1, keepdims=True))


class LearnedStep(torch.autograd.Function):
    """Quantised to learned steps, with bounds that are no tensors."""

    @staticmethod
    def forward(ctx, w, step, factor, low, high):
        ctx.save_for_backward(w / step)
        ctx.others = factor, low, high
        return (w / step).round().clamp(low, high) * step

    @staticmethod
    def backward(ctx, grad):
        (w,) = ctx.saved_tensors
        factor, low, high = ctx.others
        below, above = w < low, w > high
        inside = ~(below | above)
        slope = below * low + above * high + inside * (w.round() - w)
        return grad * inside, (grad * slope).sum().view(1) * factor, None, None, None


class Hadamard(torch.autograd.Function):
    """The product of two products, as LoHa has it."""

    @staticmethod
    def forward(ctx, a, b, c, d, scale):
        ctx.save_for_backward(a, b, c, d, scale)
        return (a @ b) * (c @ d) * scale

    @staticmethod
    def backward(ctx, grad):
        a, b, c, d, scale = ctx.saved_tensors
        first, second = grad * scale * (c @ d), grad * scale * (a @ b)
        return first @ b.T, a.T @ first, second @ d.T, c.T @ second, None


class Setup(torch.autograd.Function):
    """In the newer form, with a default."""

    @staticmethod
    def forward(w, power=2):
        return w**power

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])
        ctx.power = inputs[1]

    @staticmethod
    def backward(ctx, grad):
        (w,) = ctx.saved_tensors
        return 3 * grad * w ** (ctx.power - 1), None


class Halves(torch.autograd.Function):
    """Several results: one without gradient, one that is no tensor, one of some operands only."""

    @staticmethod
    def forward(ctx, w, v):
        codes = (w > 0).to(w.dtype)
        ctx.mark_non_differentiable(codes)
        ctx.save_for_backward(v)
        return w[:2] * 2, codes, w[2:] * v, 3

    @staticmethod
    def backward(ctx, first, _codes, second, _count):
        (v,) = ctx.saved_tensors
        return torch.cat([first * 2, second * v]), None  # v is given nothing


class Unforgiving(torch.autograd.Function):
    """Gives up where one of its results was not used."""

    @staticmethod
    def forward(ctx, w):
        ctx.set_materialize_grads(False)
        return w * 2, w * 3

    @staticmethod
    def backward(ctx, first, second):
        return None if first is None or second is None else first * 2 + second * 3


class Turned(torch.autograd.Function):
    """Moves elements: what it makes of a gradient of ones does not tell."""

    @staticmethod
    def forward(ctx, w):
        return w.roll(1, 1)

    @staticmethod
    def backward(ctx, grad):
        return grad.roll(-1, 1)


class Pruned(torch.autograd.Function):
    """Gradients of the largest numbers alone."""

    @staticmethod
    def forward(ctx, w):
        ctx.save_for_backward(w)
        return w.sign()

    @staticmethod
    def backward(ctx, grad):
        (w,) = ctx.saved_tensors
        return grad * (w.abs() > 0.5) * 0.3


SHAPES = {"w": (2, WIDTH), "v": (2, WIDTH)}
FUNCTIONS = {
    "a weight": lambda m, x: functional.linear(x, Rounded.apply(m.w * 2)),
    "a parameter itself": lambda m, x: functional.linear(x, Rounded.apply(m.w)),
    "transposed": lambda m, x: x @ Rounded.apply(m.w * 2).t(),
    "element by element": lambda m, x: x * Rounded.apply(m.w * 2)[0] + Rounded.apply(m.v)[1],
    "numpy, once differentiable": lambda m, x: functional.linear(
        x, Binarised.apply(m.w, m.v[:, :1])
    ),
    "one after another": lambda m, x: functional.linear(
        x, Rounded.apply(Setup.apply(m.w * Rounded.apply(m.v + 1)))
    ),
    "used twice": lambda m, x: (
        functional.linear(functional.linear(x, Rounded.apply(m.w)), Rounded.apply(m.w).t().exp())
        + x * m.w[0]
    ),
    "one result used twice": lambda m, x: (
        lambda w: functional.linear(functional.linear(x, w), w.t()) + x * m.w[0] * m.v[0]
    )(Rounded.apply(3 * m.w)),
    "learned steps": lambda m, x: functional.linear(
        x, LearnedStep.apply(m.w, m.v[0, :1].abs() / 4, 0.3, -2, 3)
    ),
    "the newer form": lambda m, x: (
        functional.linear(x, Setup.apply(m.w)) + (x * Setup.apply(m.v[0], 3))[..., :2]
    ),
    "constants beside": lambda m, x: functional.linear(
        x, Hadamard.apply(m.w[:, :2], m.v[:, :2], m.w[:, 2:4], m.v[:, 2:4], torch.tensor(0.5))
        @ torch.ones(2, WIDTH).double()
    ),
    "moved": lambda m, x: functional.linear(x, Turned.apply(m.w)),
    "pruned": lambda m, x: functional.linear(x, Pruned.apply(m.w * 2).exp()) + x[..., :2],
    "a shift": lambda m, x: x + Pruned.apply(m.w)[0],
    "several results": lambda m, x: several_results(m, x),
    "results that are used together": lambda m, x: (
        lambda first, second: functional.linear(x, first.exp()) + functional.linear(x, second)
    )(*Unforgiving.apply(m.w)),
    "rows as many as examples": lambda m, x: (
        x + Rounded.apply(m.w[:1].expand(BATCH, WIDTH) * m.v[0])
        if x.dim() == 2
        else x + Rounded.apply(m.w[:1].expand(POSITIONS, WIDTH) * m.v[0])
    ),
}  # fmt: skip


def several_results(m, x):
    first, codes, second, count = Halves.apply(torch.cat([m.w, m.w.exp()]), m.v)
    assert count == 3
    return functional.linear(x, first * codes[:2]) * functional.linear(x, second)


@pytest.mark.parametrize("positions", [False, True])
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_a_weight_made_by_a_function(function, positions):
    """Beside other uses of the parameters, and alone."""
    shape = (BATCH, POSITIONS, WIDTH) if positions else (BATCH, WIDTH)
    data = normal(*shape)
    if positions:
        used = {name: shape for name, shape in SHAPES.items() if name in names_used(function)}
        check_operation(function, used, data)
        return
    check_operation(
        lambda m, x: function(m, x) + (x * m.v[0] * m.w[1]).sum(-1, keepdim=True), SHAPES, data
    )


def test_a_parameter_that_is_one_number():
    """As the step of a quantisation is."""
    shapes = {"w": (2, WIDTH), "step": ()}
    check_operation(
        lambda m, x: functional.linear(x, LearnedStep.apply(m.w, m.step, 1, -8, 7)),
        shapes,
        normal(BATCH, WIDTH),
    )


SEEN = HOST is SHARED_APPLY  # from PyTorch 2.14 on a kept apply is PyTorch's innermost


def apply_of(function):
    """Return the apply of a Function as it is before the first context."""
    return function.apply if SEEN else INNERMOST.__get__(None, function)


KEPT = apply_of(Rounded)


def check_kept(function, shapes, data, match):
    """Check an operation that is seen before PyTorch 2.14, and refused since."""
    if SEEN:
        check_operation(function, shapes, data)
    else:
        check_refused(function, shapes, data, match=match)


def test_an_apply_that_was_kept_from_before_all_contexts():
    check_kept(
        lambda m, x: functional.linear(x, KEPT(m.w)),
        {"w": SHAPES["w"]},
        normal(BATCH, WIDTH),
        match=r"RoundedBackward uses parameter 'w'.*apply was kept in.*where it is used",
    )


def test_a_kept_apply_of_data():
    check_operation(
        lambda m, x: functional.linear(KEPT(functional.linear(x, m.w)), m.v),
        {"w": (WIDTH, WIDTH), "v": (WIDTH, WIDTH)},
        normal(BATCH, WIDTH),
    )


def test_a_kept_apply_of_data_that_were_written():
    """Their examples were noted, to lie as the contract says."""

    def function(m, x):
        padded = x.new_zeros(BATCH, WIDTH + 1)
        padded[:, :WIDTH] = functional.linear(x, m.w)
        return functional.linear(KEPT(padded), m.v)

    shapes = {"w": (WIDTH, WIDTH), "v": (WIDTH, WIDTH + 1)}
    check_operation(function, shapes, normal(BATCH, WIDTH))


class Noting(torch.autograd.Function):
    """Keeps something on its node under a name that this library uses as well."""

    @staticmethod
    def forward(ctx, x):
        ctx.use = "rounding"
        return x.round()

    @staticmethod
    def backward(ctx, grad):
        return grad


@pytest.mark.parametrize("function, kept", [(Rounded, KEPT), (Noting, apply_of(Noting))])
def test_a_kept_apply_of_data_whose_examples_lie_elsewhere(function, kept):
    """As many positions as examples: where its result has them, the shape does not say."""
    check_kept(
        lambda m, x: functional.linear(kept(functional.linear(x, m.w).transpose(0, 1)), m.v)
        .transpose(0, 1),
        {"w": (WIDTH, WIDTH), "v": (WIDTH, WIDTH)},
        normal(BATCH, BATCH, WIDTH),
        match=rf"Function {function.__name__} was given values whose examples.*Write "
        rf"{function.__name__}\.apply where",
    )  # fmt: skip


def names_used(function):
    """Return the parameters that a function reads."""
    model = Operation(None, {name: torch.zeros(shape) for name, shape in SHAPES.items()}, False)
    read = set()

    class Watched:
        def __getattr__(self, name):
            read.add(name)
            return getattr(model, name)

    function(Watched(), normal(BATCH, WIDTH))
    return read


@pytest.mark.parametrize("workspace", [1, 1000])
def test_in_chunks(workspace):
    check_operation(FUNCTIONS["learned steps"], SHAPES, normal(BATCH, WIDTH), workspace=workspace)


class Quantised(nn.Module):
    """A network of which every forward quantises the weights."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 6), nn.Linear(6, 3)
        self.step = nn.Parameter(torch.tensor([0.1]))

    def forward(self, x):
        for layer in (self.first, self.second):
            weight = LearnedStep.apply(layer.weight, self.step, 0.5, -8, 7)
            x = torch.tanh(functional.linear(x, weight, Rounded.apply(layer.bias * 8) / 8))
        return x


def test_a_network_that_quantises_its_weights():
    torch.manual_seed(0)
    model, batch = Quantised().double(), (normal(BATCH, WIDTH),)
    check_model(model, batch, uneven_loss)
    check_products(model, batch, uneven_loss)
    report = gs.verify(model, batch, uneven_loss)
    assert report.ok, report
    assert any("LearnedStep.apply" in name for row in report.rows for name in row.operations)


def test_in_single_precision_and_under_autocast():
    torch.manual_seed(0)
    model, batch = Quantised(), (torch.randn(BATCH, WIDTH),)
    check_model(model, batch, uneven_loss, rtol=1e-4, gradient_rtol=1e-5)

    def losses(model, batch):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return uneven_loss(model, batch).float()

    stats = gs.per_example_norms(model, batch, losses)
    expected = sum(oracle_on_the_batch(model, batch, losses).values())
    torch.testing.assert_close(stats.sqnorm.double(), expected, rtol=0.05, atol=0)


def test_checkpoints():
    def function(m, x):
        return checkpoint(FUNCTIONS["learned steps"], m, x, use_reentrant=False)

    check_operation(function, SHAPES, normal(BATCH, WIDTH))


def test_with_the_monitor():
    torch.manual_seed(0)
    model, x = Quantised().double(), normal(BATCH, WIDTH)
    plain = copy.deepcopy(model)
    expected = oracle_sqnorms(model, (x,), uneven_loss)
    monitor = gs.Monitor(model, every=1, alignment=True)
    for network in (model, plain):
        optimizer = torch.optim.SGD(network.parameters(), lr=0.0)
        for _ in range(2):
            optimizer.zero_grad()
            if network is model:
                with monitor.step(batch_size=BATCH):
                    uneven_loss(network, (x,)).mean().backward()
            else:
                uneven_loss(network, (x,)).mean().backward()
            optimizer.step()
    for got, want in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad, rtol=1e-12, atol=1e-14)
    largest = monitor.examples(1)
    assert largest[0].norm == pytest.approx(sum(expected.values()).max().sqrt().item())


def test_derivatives_of_the_network():
    def penalised(model, batch):
        x = batch[0].clone().requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out.sum(1) + slope.square().sum(1)

    torch.manual_seed(0)
    check_model(Quantised().double(), (normal(BATCH, WIDTH),), penalised, fusing=(True,))


@pytest.mark.parametrize("compiled", [False, True])
def test_functions_outside_of_contexts_are_pytorchs(compiled):
    model = Quantised()
    with gs.track(model, batch_size=BATCH) as tracker:
        tracker.backward(model(torch.randn(BATCH, WIDTH)).sum(1))

    def steps(w):
        return (w * Rounded.apply(w)).sum()

    w = torch.tensor([0.6, -1.2, 2.5], requires_grad=True)
    run = torch.compile(steps, backend="aot_eager", fullgraph=True) if compiled else steps
    run(w).backward()
    # That of what is rounded passes straight through.
    assert torch.equal(w.grad, w.detach() + w.detach().round())


def test_the_function_runs_once_in_the_forward_and_once_in_the_training_backward():
    calls = []

    class Counted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, w):
            calls.append("forward")
            return 2 * w

        @staticmethod
        def backward(ctx, grad):
            calls.append("backward")
            return 2 * grad

    model = Operation(lambda m, x: functional.linear(x, Counted.apply(m.w)), {"w": (2, 3)}, False)
    with gs.track(model, batch_size=BATCH) as tracker:
        losses = uneven_loss(model, (normal(BATCH, 3),))
        assert calls == ["forward"]
        tracker.backward(losses)
    # Once more for the statistic, whose backward is tried out on seven gradients.
    assert calls.count("forward") == 2
    assert calls.count("backward") == 1 + 7


# What a Function must not do.


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w):
        return w * 1

    @staticmethod
    def backward(ctx, grad):
        return grad.clamp(-1, 1)


class Signs(Clipped):
    @staticmethod
    def backward(ctx, grad):
        return grad.sign()


class Saturated(Clipped):
    """Numbers beyond one get gradients that bring them back alone."""

    @staticmethod
    def forward(ctx, w):
        ctx.save_for_backward(w)
        return w.clamp(-1, 1)

    @staticmethod
    def backward(ctx, grad):
        (w,) = ctx.saved_tensors
        return grad * ((w.abs() <= 1) | (w.sign() == grad.sign()))


class Decaying(torch.autograd.Function):
    """Remembers how often it was differentiated."""

    @staticmethod
    def forward(ctx, w):
        ctx.scale = 1.0
        return w * 1

    @staticmethod
    def backward(ctx, grad):
        ctx.scale /= 2
        return grad * ctx.scale


class Centred(Turned):
    """Constant gradients vanish."""

    @staticmethod
    def backward(ctx, grad):
        return grad - grad.roll(-1, 1)


@pytest.mark.parametrize("function", [Turned, Centred])
def test_gradients_that_cancel_or_are_the_same_for_all(function):
    """Their sum does not tell what the backward does to one of them."""
    model = Operation(lambda m, x: functional.linear(x, function.apply(m.w)), {"w": (2, 8)}, False)
    half = normal(BATCH, 8)
    for x in (torch.cat([half, -half]), torch.eye(8).double()):
        expected = oracle_sqnorms(model, (x,), outputs)
        assert_sqnorms(gs.per_example_norms(model, (x,), outputs), expected, 1e-9)


def outputs(model, batch):
    return model(*batch).sum(1)


@pytest.mark.parametrize(
    "function, batch",
    [
        *itertools.product([Clipped, Signs, Decaying], [1, BATCH]),
        (Saturated, BATCH),  # of one example it is as good as linear
    ],
)
def test_a_backward_that_is_not_linear_is_refused(function, batch):
    check_refused(
        lambda m, x: functional.linear(x, function.apply(3 * m.w)),
        {"w": (2, 3)},
        normal(batch, 3),
        match=rf"{function.__name__}\.apply.*'w'.*linear.*exclude",
    )


@pytest.mark.parametrize("scale", [1e-6, 1e6])
@pytest.mark.parametrize("function", [Signs, Decaying, Saturated])
def test_a_backward_that_is_not_linear_is_refused_at_any_scale(function, scale):
    check_refused(
        lambda m, x: scale * functional.linear(x, function.apply(3 * m.w)),
        {"w": (2, 3)},
        normal(BATCH, 3),
        match=rf"{function.__name__}\.apply.*'w'.*linear.*exclude",
    )


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, scale):
        ctx.save_for_backward(weight, scale)
        return weight * scale

    @staticmethod
    def backward(ctx, grad):
        weight, scale = ctx.saved_tensors
        return grad * scale, (grad * weight).sum()


class Overwriting(torch.autograd.Function):
    """Its backward writes into the gradient that it is given."""

    @staticmethod
    def forward(ctx, weight):
        return weight.flip(0) * 2

    @staticmethod
    def backward(ctx, grad):
        return grad.mul_(2).flip(0)


def test_a_backward_that_writes_into_the_gradient_it_is_given():
    check_operation(
        lambda m, x: x @ Overwriting.apply(m.w).sin(),
        {"w": (WIDTH, WIDTH)},
        normal(BATCH, POSITIONS, WIDTH),
    )


@pytest.mark.parametrize("seed", range(4))
def test_a_gradient_that_is_nothing_but_rounding_is_not_refused(seed):
    torch.manual_seed(seed)
    model = Operation(
        lambda m, x: functional.linear(x, functional.normalize(Scaled.apply(m.w, m.s), dim=(0, 1))),
        {"w": (5, 4), "s": torch.tensor(1.3)},
        upstream=False,
    )
    batch = (normal(8, 4),)
    got = gs.per_example_norms(model, batch, uneven_loss)
    torch.testing.assert_close(
        got.sqnorm, sum(oracle_sqnorms(model, batch, uneven_loss).values()), rtol=1e-9, atol=0
    )


class Dropped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w):
        ctx.mask = torch.rand_like(w) > 0.5
        return w * ctx.mask

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.mask


def test_a_random_function_is_refused():
    check_refused(
        lambda m, x: functional.linear(x, Dropped.apply(m.w)),
        {"w": (20, 20)},
        normal(BATCH, 20),
        match=r"Dropped\.apply.*'w'.*random",
    )


class DoubledInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w):
        ctx.mark_dirty(w)
        return w.mul_(2)

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def test_a_function_that_changes_its_operand_is_refused():
    check_refused(
        lambda m, x: functional.linear(x, DoubledInPlace.apply(m.w * 3)),
        {"w": (2, 3)},
        normal(BATCH, 3),
        match=r"DoubledInPlace\.apply.*'w'.*in place",
    )


class ScalesItsGradient(torch.autograd.Function):
    """Changes the gradient that it is given."""

    @staticmethod
    def forward(ctx, w):
        return w.round()

    @staticmethod
    def backward(ctx, grad):
        return grad.mul_(1.5)


def test_a_backward_that_changes_its_gradient():
    def function(m, x):
        return functional.linear(x, ScalesItsGradient.apply(m.w * 2))

    check_operation(function, {"w": (2, WIDTH)}, normal(BATCH, POSITIONS, WIDTH))


class Logged(LearnedStep):
    """Keeps something of every gradient that its backward is given."""

    norms: ClassVar[list[torch.Tensor]] = []

    @classmethod
    def backward(cls, ctx, grad):
        cls.norms.append(grad.norm())
        return LearnedStep.backward(ctx, grad)


def test_what_a_backward_keeps_are_numbers_afterwards():
    """Under a transform they would be tensors that belong to it, and break what reads them."""
    model = Operation(
        lambda m, x: functional.linear(x, Logged.apply(m.w, m.step, 1, -8, 7)),
        {"w": (2, WIDTH), "step": ()}, upstream=False,
    )  # fmt: skip
    data = (normal(8, WIDTH),)
    gs.per_example_norms(model, data, uneven_loss)
    assert all(norm.item() > 0 for norm in Logged.norms)


class Rematerialised(torch.autograd.Function):
    """A checkpoint of somebody's own: its backward runs a backward of its own."""

    @staticmethod
    def forward(ctx, function, w):
        ctx.function, ctx.operand = function, w.detach()
        return function(w)

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            operand = ctx.operand.clone().requires_grad_()
            torch.autograd.backward(ctx.function(operand), grad)
        return None, operand.grad


def test_a_function_that_runs_a_backward_of_its_own_is_refused():
    model = Operation(
        lambda m, x: x * Rematerialised.apply(lambda w: w * m.hidden, m.w),
        {"w": (3,), "hidden": (3,)},
        False,
    )
    with pytest.raises(
        gs.UnsupportedOperationError, match=r"Rematerialised\.apply.*'w'.*starts another backward"
    ):
        gs.per_example_norms(model, (normal(BATCH, 3),), uneven_loss)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_function_of_data_and_a_parameter_is_refused():
    for function in (
        lambda m, x: Kernel.apply(x, m.w),
        lambda m, x: Kernel.apply(x, Rounded.apply(m.w)),
    ):
        check_refused(function, {"w": (3,)}, normal(BATCH, 3), match=r"KernelBackward.*'w'.*rule")


def test_what_a_function_does_without_gradients_is_constant():
    def function(m, x):
        with torch.no_grad():
            steps = Rounded.apply(m.w * 4)[0]
        return functional.linear(x * steps, m.w)

    check_operation(function, {"w": (2, WIDTH)}, normal(WIDTH, WIDTH))


def unseen_sine(allocate):
    """Return a Function of data that fills its result as a kernel does, which nobody sees."""

    class Sine(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            result = allocate(x)
            result.numpy()[...] = x.detach().sin().numpy()
            return result

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return grad * x.cos()

    return Sine


def by_nobody(x):
    """Return memory as a library's own code makes it."""
    with torch._C.DisableTorchFunction():
        return torch.empty(x.shape, dtype=x.dtype)


def by_nobody_after_scratch(x):
    """The result's object has the memory, and so the number, of one that was seen and is gone."""
    scratch = x * 2
    del scratch
    with torch._C.DisableTorchFunction():
        return x * 0


ALLOCATIONS = {
    "empty": lambda x: torch.empty(x.shape, dtype=x.dtype),
    "new_zeros": lambda x: x.new_zeros(*x.shape),
    "empty_like": torch.empty_like,
    "a view": lambda x: torch.empty(x.numel(), dtype=x.dtype).view(x.shape),
    "by nobody": by_nobody,
    "by nobody, after scratch": by_nobody_after_scratch,
}
PLACES = {
    "in order": lambda f, h: f(h),
    "positions first": lambda f, h: f(h.transpose(0, 1).contiguous()).transpose(0, 1),
    "layer between": lambda f, h: f(h.transpose(0, 1)),
    "flat": lambda f, h: f(h.flatten(0, 1)).view(h.shape),
    "one by one": lambda f, h: torch.stack([f(row) for row in h]),
    "in another order": lambda f, h: f(h[[2, 0, 3, 1]])[[1, 3, 0, 2]],
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("allocate", ALLOCATIONS.values(), ids=ALLOCATIONS)
def test_functions_leave_the_examples_of_their_data_where_they_are(allocate, place):
    """With as many positions as examples shape does not tell."""
    sine = unseen_sine(allocate)

    def function(m, x):
        result = place(sine.apply, m.first(x))
        return m.last(result.transpose(0, 1) if place is PLACES["layer between"] else result)

    layers = {"first": nn.Linear(WIDTH, WIDTH), "last": nn.Linear(WIDTH, 2)}
    check_operation(function, layers, normal(BATCH, BATCH, WIDTH))


def test_a_function_that_moves_the_examples_where_it_is_seen():
    class Turned(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, scale):
            return (x * scale).transpose(0, 1)

        @staticmethod
        def backward(ctx, grad):
            return 2 * grad.transpose(0, 1), None

    def function(m, x):
        scale = torch.full((), 2.0, dtype=x.dtype)
        return m.last(Turned.apply(Turned.apply(m.first(x), scale), scale))

    layers = {"first": nn.Linear(WIDTH, WIDTH), "last": nn.Linear(WIDTH, 2)}
    check_operation(function, layers, normal(BATCH, BATCH, WIDTH))


def test_a_function_that_returns_a_constant_as_it_is():
    class WithTable(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, table):
            ctx.mark_non_differentiable(table)
            return 2 * x, table

        @staticmethod
        def backward(ctx, grad, _):
            return 2 * grad, None

    def function(m, x):
        doubled, table = WithTable.apply(m.first(x), torch.arange(float(BATCH)).to(x))
        return m.last(doubled) + functional.linear(m.w * table, m.last.weight[:, :BATCH])

    layers = {"first": nn.Linear(WIDTH, WIDTH), "last": nn.Linear(WIDTH, 2), "w": (BATCH,)}
    check_operation(function, layers, normal(BATCH, WIDTH))


def test_a_function_of_data_whose_examples_were_lost_does_not_find_them():
    squared = unseen_sine(lambda x: x * x)

    def function(m, x):
        images = m.first(x).movedim(0, 2)[None]  # as if the examples were positions
        lost = functional.interpolate(images, scale_factor=2)
        return squared.apply(lost).movedim(2, 0) * m.scale

    check_refused(
        function,
        {"first": nn.Linear(WIDTH, BATCH // 2), "scale": (1,)},
        normal(BATCH, 3, WIDTH),
        error=gs.ExampleAxisError,
        match="interpolate",
    )


class WithPenalty(torch.autograd.Function):
    """The identity, whose backward adds a penalty's gradient to that of any loss."""

    passes = staticmethod(lambda x: x)

    @staticmethod
    def around(passes):
        return type("Penalty", (WithPenalty,), {"passes": staticmethod(passes)})

    @classmethod
    def forward(cls, ctx, x, penalty):
        return cls.passes(x)

    @staticmethod
    def backward(ctx, grad):
        return grad, torch.ones((), dtype=grad.dtype)


PASSES = {"as it is": lambda x: x, "seen": lambda x: x + 0, "unseen": unseen_sine(by_nobody).apply}
PENALTIES = {
    "mean over the batch": lambda p: p.mean(0).square().sum(),
    "mean of each example's": lambda p: p.square().sum(-1).mean(),
    "a sum in Python": lambda p: sum(row.square().sum() for row in p),
    "one example's": lambda p: p[0].square().sum(),
    "lost on the way": lambda p: functional.interpolate(p[None, None], scale_factor=2).sum(),
}


@pytest.mark.parametrize("penalise", PENALTIES.values(), ids=PENALTIES)
@pytest.mark.parametrize("passes", PASSES.values(), ids=PASSES)
def test_a_function_that_gives_everybody_the_gradient_of_what_all_share(passes, penalise):
    """As mixtures of experts have it, which balance the load of a whole batch in training."""
    penalty = WithPenalty.around(passes)

    def function(m, x):
        h = m.first(x)
        return m.last(penalty.apply(h, penalise(h.softmax(-1))))

    layers = {"first": nn.Linear(WIDTH, WIDTH), "last": nn.Linear(WIDTH, 2)}
    check_refused(function, layers, normal(BATCH, WIDTH), error=gs.ExampleAxisError, match="last")
    check_operation(function, layers, normal(1, WIDTH))


def test_a_direction_needs_no_second_derivative():
    torch.manual_seed(0)
    model = Operation(FUNCTIONS["numpy, once differentiable"], SHAPES, False)
    batch = (normal(BATCH, WIDTH),)
    direction = {name: normal(*p.shape) for name, p in model.named_parameters()}
    rows = oracle_gradients(model, batch, uneven_loss)
    expected = sum((rows[name] * other).flatten(1).sum(1) for name, other in direction.items())
    got = gs.alignment(model, batch, uneven_loss, direction)
    torch.testing.assert_close(got.double(), expected, rtol=1e-10, atol=0)
    assert_sqnorms(
        gs.per_example_norms(model, batch, uneven_loss),
        oracle_sqnorms(model, batch, uneven_loss),
        1e-10,
    )


def test_functions_under_modes_of_others():
    """The topmost mode runs what it is shown, and no other would be shown a Function."""

    class Coarse(nn.Linear):
        def forward(self, x):
            return functional.linear(x, Rounded.apply(self.weight), self.bias)

    def losses(model, batch):
        with torch.device("cpu"):
            return model(batch).square().sum(1)

    model, batch = Coarse(4, 3).double(), torch.randn(6, 4, dtype=torch.float64)
    check_model(model, batch, losses)
    table = gs.self_influence(
        model, [batch], losses, gs.Checkpoints([model.state_dict()], lr=[1.0]), progress=False
    )
    expected = sum(oracle_sqnorms(model, batch, losses).values())
    torch.testing.assert_close(torch.tensor(table.self_influence), expected)


def test_batch_normalisation_over_processes_is_refused(monkeypatch):
    """On a CPU by a stand-in: PyTorch's own takes a GPU and a second process."""

    def forward(ctx, x, *settings):
        return x - x.mean(0)

    def backward(ctx, grad):
        return grad - grad.mean(0), *[None] * 7

    monkeypatch.setattr(SyncBatchNorm, "forward", staticmethod(forward))
    monkeypatch.setattr(SyncBatchNorm, "backward", staticmethod(backward))
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    settings = None, None, None, None, 1e-5, None, 2
    check_refused(
        lambda m, x: torch.tanh(SyncBatchNorm.apply(x @ m.w, *settings)),
        {"w": (3, 4)},
        normal(BATCH, 3),
        error=gs.CoupledExamplesError,
        match="examples of others",
    )
