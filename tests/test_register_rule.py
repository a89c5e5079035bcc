"""Rules for users' own operations: exact, explicit, and taken back without a trace."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections import OrderedDict
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function

import gradstats as gs
from gradstats.capture.rules import RULES
from tests.losses import losses_of as classify
from tests.oracle import assert_sqnorms, check_model, oracle_sqnorms

B, T, WIDTH = 5, 3, 4


class ScaledSiLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * torch.sigmoid(x) * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        s = torch.sigmoid(x)
        dx = grad * weight * s * (1 + x * (1 - s))
        return dx, (grad * x * s).flatten(0, -2).sum(0)


def scaled_silu(x, weight):
    return functional.silu(x) * weight


class Model(nn.Module):
    def __init__(self, operation):
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.head = nn.Linear(WIDTH, 3)
        self.operation = operation

    def forward(self, x):
        return self.head(self.operation(self.body(x), self.weight).relu_()).mean(1)


@pytest.fixture
def batch():
    return torch.randn(B, T, WIDTH, dtype=torch.float64), torch.randint(3, (B,))


@pytest.fixture(autouse=True)
def no_rule_is_left():
    before = dict(RULES)
    yield
    assert before == RULES
    assert "apply" not in ScaledSiLU.__dict__


def test_an_autograd_function(batch):
    model = Model(lambda x, w: ScaledSiLU.apply(x, w)).double()
    with pytest.raises(gs.UnsupportedOperationError, match=r"ScaledSiLU.*register_rule"):
        gs.per_example_norms(model, batch, classify)
    with gs.register_rule(ScaledSiLU, scaled_silu):
        check_model(model, batch, classify)
    with pytest.raises(gs.UnsupportedOperationError, match="ScaledSiLU"):
        gs.per_example_norms(model, batch, classify)


def test_apply_names_the_function_and_a_handle_is_enough(batch):
    model = Model(lambda x, w: ScaledSiLU.apply(x, w)).double()
    handle = gs.register_rule(ScaledSiLU.apply, scaled_silu)
    check_model(model, batch, classify)
    handle.remove()
    handle.remove()


def test_an_apply_that_was_kept_from_before(batch):
    kept = ScaledSiLU.apply
    model = Model(lambda x, w: kept(kept(x, w), 1 + w)).double()
    with gs.register_rule(ScaledSiLU, scaled_silu):
        check_model(model, batch, classify)
    with pytest.raises(gs.UnsupportedOperationError, match="ScaledSiLU"):
        gs.per_example_norms(model, batch, classify)


BEFORE = """
import torch, gradstats as gs
from tests.test_register_rule import ScaledSiLU, scaled_silu

gs.register_rule(ScaledSiLU, scaled_silu)
model, x = torch.nn.Linear(4, 4).double(), torch.randn(3, 3, 4).double()
model.scale = torch.nn.Parameter(torch.randn(4).double())

def loss_fn(model, x):
    return ScaledSiLU.apply(model(x).transpose(0, 1), model.scale).square().sum((0, 2))

for i, norm in enumerate(gs.per_example_norms(model, x, loss_fn).sqnorm):
    gradients = torch.autograd.grad(loss_fn(model, x)[i], list(model.parameters()))
    torch.testing.assert_close(sum(each.square().sum() for each in gradients), norm)
"""


def test_a_function_with_a_rule_before_the_first_context():
    """It runs as one that is seen, on data whose examples lie elsewhere."""
    subprocess.run([sys.executable, "-c", BEFORE], check=True)


def test_the_operation_itself_runs(batch):
    """Its values and gradients are the training step's, whatever the decomposition rounds to."""
    calls = []

    class Counted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            calls.append("forward")
            ctx.save_for_backward(x, weight)
            return x * weight

        @staticmethod
        def backward(ctx, grad):
            calls.append("backward")
            x, weight = ctx.saved_tensors
            return 2 * grad * weight, 3 * (grad * x).flatten(0, -2).sum(0)  # recognisable

    model = Model(lambda x, w: Counted.apply(x, w)).double()
    plain = copy.deepcopy(model)
    classify(plain, batch).mean().backward()
    calls.clear()
    with gs.register_rule(Counted, torch.mul):
        for fused in (True, False):
            model.zero_grad()
            with gs.track(model, batch_size=B, fused=fused) as tracker:
                tracker.backward(classify(model, batch))
            for got, want in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(got.grad, want.grad, rtol=1e-12, atol=1e-15)
    assert calls == ["forward", "backward"] * 2


def test_several_uses_and_derived_parameters(batch):
    def operation(x, w):
        x = ScaledSiLU.apply(x, w)
        x = ScaledSiLU.apply(x + w, 1 + w.exp())
        return x * w

    model = Model(operation).double()
    with gs.register_rule(ScaledSiLU, scaled_silu):
        check_model(model, batch, classify)


def test_a_decomposition_of_several_operations_and_results(batch):
    class Gated(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, projection, bias, count):
            ctx.save_for_backward(x, projection)
            up = x @ projection.t() + bias
            return up[..., :WIDTH].contiguous(), up[..., WIDTH:].contiguous(), count

        @staticmethod
        def backward(ctx, left, right, _):
            x, projection = ctx.saved_tensors
            grad = torch.cat((left, right), -1)
            rows = grad.flatten(0, -2)
            return grad @ projection, rows.t() @ x.flatten(0, -2), rows.sum(0), None

    def gated(x, projection, bias, count):
        scaled = projection * 1.0  # derived inside the decomposition
        up = functional.linear(x, scaled, bias)
        return (*up.chunk(2, -1), count)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(WIDTH, WIDTH)
            self.projection = nn.Parameter(torch.randn(2 * WIDTH, WIDTH))
            self.bias = nn.Parameter(torch.randn(2 * WIDTH))
            self.head = nn.Linear(WIDTH, 3)

        def forward(self, x):
            left, right, count = Gated.apply(self.body(x), self.projection, self.bias, 2)
            assert count == 2
            return self.head(left * right.sigmoid()).mean(1)

    with gs.register_rule(Gated, gated):
        check_model(Model().double(), batch, classify)


class Halves(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


def halves(x, w):
    if has_torch_function((x, w)):
        return handle_torch_function(halves, (x, w), x, w)
    return Halves(*(x * w).chunk(2, -1))


def test_results_with_names(batch):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH))
            self.head = nn.Linear(WIDTH // 2, 3)

        def forward(self, x):
            both = halves(x, self.weight)
            return self.head(both.left * both.right.sigmoid()).mean(1)

    with gs.register_rule(halves, lambda x, w: (x * w).chunk(2, -1)):
        check_model(Model().double(), batch, classify)


def test_a_decomposition_with_a_second_result_that_is_not_finite(batch):
    model = Model(lambda x, w: sum(halves(x, w)).repeat(1, 1, 2)).double()

    def wrong(x, w):
        left, right = (x * w).chunk(2, -1)
        return left, right * torch.nan

    with (
        gs.register_rule(halves, wrong),
        pytest.raises(gs.UnsupportedOperationError, match="values that differ by inf"),
    ):
        gs.per_example_norms(model, batch, classify)


@pytest.mark.parametrize("returned", [None, 1.0], ids=["nothing", "a number"])
def test_a_decomposition_that_returns_no_tensor(batch, returned):
    model = Model(ScaledSiLU.apply).double()
    with (
        gs.register_rule(ScaledSiLU, lambda x, w: returned),
        pytest.raises(gs.UnsupportedOperationError, match=r"of shape \[None\], expected \[\(5, 3"),
    ):
        gs.per_example_norms(model, batch, classify)


def test_a_straight_through_estimator(batch):
    class Round(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, scale):
            ctx.save_for_backward(x)
            return (x * scale).round()

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return None, (grad * x).flatten(0, -2).sum(0)

    def straight_through(x, scale):
        y = x * scale
        return y + (y.round() - y).detach()

    model = Model(lambda x, w: Round.apply(x, 3 * w)).double()
    with gs.register_rule(Round, straight_through):
        check_model(model, batch, classify)


def test_a_parameter_alone(batch):
    """A Function applied to the parameter before any data needs no rule, and may have one."""

    class Ternary(torch.autograd.Function):
        @staticmethod
        def forward(ctx, weight):
            return weight.sign() * 0.5

        @staticmethod
        def backward(ctx, grad):
            return grad * 1.5

    model = Model(lambda x, w: x * Ternary.apply(w)).double()
    check_model(model, batch, classify)
    with gs.register_rule(Ternary, lambda w: w + (w.sign() * 0.5 - w).detach()):
        check_model(model, batch, classify)


@torch.library.custom_op("gradstats_tests::scaled", mutates_args=())
def scaled(x: torch.Tensor, weight: torch.Tensor, power: float = 1.0) -> torch.Tensor:
    return x * weight**power


def _keep(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:2])
    ctx.power = inputs[2]


def _scaled_backward(ctx, grad):
    x, weight = ctx.saved_tensors
    slope = ctx.power * weight ** (ctx.power - 1)
    return grad * weight**ctx.power, (grad * x * slope).flatten(0, -2).sum(0), None


scaled.register_autograd(_scaled_backward, setup_context=_keep)


@pytest.mark.parametrize(
    "call",
    [
        lambda x, w: scaled(x, w, 2.0),
        lambda x, w: torch.ops.gradstats_tests.scaled(x, w, power=2.0),
        lambda x, w: torch.ops.gradstats_tests.scaled.default(x, weight=w, power=2.0),
    ],
)
@pytest.mark.parametrize("registered", [0, 1, 2])
def test_a_custom_operator(batch, call, registered):
    operators = (scaled, torch.ops.gradstats_tests.scaled, torch.ops.gradstats_tests.scaled.default)
    model = Model(call).double()
    with pytest.raises(gs.UnsupportedOperationError, match=r"scaled.*'weight'.*register_rule"):
        gs.per_example_norms(model, batch, classify)

    def decomposition(x, weight, power=1.0):
        return x * weight**power

    with gs.register_rule(operators[registered], decomposition):
        check_model(model, batch, classify)


READ: list[torch.Tensor] = []


@torch.library.custom_op("gradstats_tests::beside", mutates_args=())
def beside(x: torch.Tensor) -> torch.Tensor:
    return x * READ[0].detach().mean()


beside.register_autograd(lambda ctx, grad: grad * READ[0].detach().mean())


@pytest.mark.parametrize(
    "use",
    [
        lambda x, w: functional.layer_norm(x, (WIDTH,), w),
        lambda x, w: x * w.exp(),
        lambda x, w: torch.stack([x, w.expand_as(x)]).sum(0),
    ],
    ids=["normalised", "derived", "repeated"],
)
def test_an_operator_reads_a_parameter_before_its_first_use(batch, use):
    def call(x, weight):
        READ[:] = [weight]
        return use(x + beside(x.detach()), weight)

    check_model(Model(call).double(), batch, classify)


@pytest.mark.filterwarnings("ignore:.*chain_matmul is deprecated")
def test_an_operation_of_pytorch_without_a_rule(batch):
    def product(first, second):
        return first @ second

    def multiply(x, w):
        rows = torch.chain_matmul(x.flatten(0, 1), w.expand(WIDTH, WIDTH))
        return rows.view_as(x) * 1.0

    model = Model(multiply).double()
    with gs.register_rule(torch.chain_matmul, product):
        check_model(model, batch, classify)


def test_a_python_function_that_can_be_overridden(batch):
    def shifted(x, weight):
        if has_torch_function((x, weight)):
            return handle_torch_function(shifted, (x, weight), x, weight)
        return torch.from_numpy(x.detach().numpy() + weight.detach().numpy()) + 0 * x + 0 * weight

    model = Model(shifted).double()
    with gs.register_rule(shifted, torch.add):
        stats = gs.per_example_norms(model, batch, classify)
    expected = oracle_sqnorms(Model(torch.add).double(), batch, classify)
    assert set(stats.by_parameter) == set(expected)
    assert (stats.by_parameter["weight"] > 0).all()


@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_parameters_in_a_dict(batch, kind):
    def affine(x, weights):
        operands = (x, *weights.values())
        if has_torch_function(operands):
            return handle_torch_function(affine, operands, x, weights)
        return torch.add(x * weights["scale"], weights["shift"])

    class Affine(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.rand(WIDTH))
            self.shift = nn.Parameter(torch.rand(WIDTH))

        def forward(self, x):
            return affine(x, kind(scale=self.scale, shift=self.shift)).mean(1)

    with gs.register_rule(affine, lambda x, weights: x * weights["scale"] + weights["shift"]):
        check_model(Affine().double(), batch, classify)


def test_a_decomposition_with_other_values_is_refused(batch):
    model = Model(lambda x, w: ScaledSiLU.apply(x, w)).double()
    with (
        gs.register_rule(ScaledSiLU, lambda x, w: functional.gelu(x) * w),
        pytest.raises(
            gs.UnsupportedOperationError,
            match=r"ScaledSiLU.*'weight'.*differ by \d+\.\d\d%.*within 0\.01%",
        ),
    ):
        gs.per_example_norms(model, batch, classify)
    with (
        gs.register_rule(ScaledSiLU, lambda x, w: x.sum(1) * w),
        pytest.raises(gs.UnsupportedOperationError, match=r"shape \[\(5, 4\)\], expected"),
    ):
        gs.per_example_norms(model, batch, classify)
    with (
        gs.register_rule(ScaledSiLU, lambda x, w: functional.gelu(x) * w),
    ):  # the fallback needs no decomposition
        stats = gs.per_example_norms(model, batch, classify, fallback="vmap")
    assert_sqnorms(stats, oracle_sqnorms(model, batch, classify), 1e-9)


def test_a_decomposition_of_other_arguments_is_refused(batch):
    model = Model(lambda x, w: ScaledSiLU.apply(x, w)).double()
    with (
        gs.register_rule(ScaledSiLU, lambda x: x),
        pytest.raises(
            gs.UnsupportedOperationError,
            match=r"ScaledSiLU.*'weight'.*does not take the operation's arguments.*1 positional",
        ),
    ):
        gs.per_example_norms(model, batch, classify)

    def broken(x, w):
        return x * w + None

    # What goes wrong inside it is the caller's to see.
    with (
        gs.register_rule(ScaledSiLU, broken),
        pytest.raises(TypeError, match="unsupported operand"),
    ):
        gs.per_example_norms(model, batch, classify)


def test_a_decomposition_that_calls_the_operation_itself_is_refused(batch):
    model = Model(lambda x, w: ScaledSiLU.apply(x, w)).double()
    with (
        gs.register_rule(ScaledSiLU, lambda x, w: ScaledSiLU.apply(x, w)),
        pytest.raises(gs.UnsupportedOperationError, match=r"weight.*calls.*ScaledSiLU.*itself"),
    ):
        gs.per_example_norms(model, batch, classify)
    of_data = Model(lambda x, w: ScaledSiLU.apply(x, x.detach()) * w).double()
    with (
        gs.register_rule(ScaledSiLU, lambda x, w: ScaledSiLU.apply(x, w)),
        pytest.raises(gs.UnsupportedOperationError, match=r"SiLU.* of data.*calls.*SiLU.*itself"),
    ):
        gs.per_example_norms(of_data, batch, classify)


def test_a_handle_says_what_it_is_of():
    with gs.register_rule(ScaledSiLU, scaled_silu) as handle:
        assert repr(handle).startswith("RuleHandle(") and "ScaledSiLU.apply)" in repr(handle)
    assert repr(handle).endswith("ScaledSiLU.apply, removed)")


@pytest.mark.parametrize("derived", [False, True])
def test_a_decomposition_that_does_not_use_a_parameter_is_refused(batch, derived):
    """Its values are right, and the parameter's per-example gradients would be zero."""
    model = Model(lambda x, w: ScaledSiLU.apply(x, w.exp() if derived else w)).double()

    def detached(x, w):
        return functional.silu(x) * w.detach()

    with (
        gs.register_rule(ScaledSiLU, detached),
        pytest.raises(
            gs.UnsupportedOperationError,
            match=r"'weight'.*: detached returned nothing that depends on it.*model\)\. Correct",
        ),
    ):
        gs.per_example_norms(model, batch, classify)


class Floor(torch.autograd.Function):
    """Writes over its data, which a second run would leave as they are."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x < weight)
        ctx.mark_dirty(x)
        return x.copy_(torch.maximum(x, weight))

    @staticmethod
    def backward(ctx, grad):
        (below,) = ctx.saved_tensors
        return grad * ~below, (grad * below).flatten(0, -2).sum(0)


class Filling(torch.autograd.Function):
    """Writes its result into a tensor that it is given for that."""

    @staticmethod
    def forward(ctx, x, weight, out):
        ctx.save_for_backward(x, weight)
        ctx.mark_dirty(out)
        return torch.mul(x, weight, out=out)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).flatten(0, -2).sum(0), None


@pytest.mark.parametrize("trained", [False, True])
def test_an_operation_that_writes_over_its_data_is_refused(batch, trained):
    """Its decomposition was given what it had written: ties in place of x < w, other gradients."""

    def floor(x, w):
        written = (x if trained else x.detach()).clone()
        Floor.apply(written, w)
        return written + x

    model = Model(floor).double()
    match = r"Floor.apply on parameter 'weight'.*changed an operand in place.*exclude=\['weight'\]"
    with (
        gs.register_rule(Floor, torch.maximum),
        pytest.raises(gs.UnsupportedOperationError, match=match),
    ):
        gs.per_example_norms(model, batch, classify)


def test_a_decomposition_that_writes_over_data_is_refused(batch):
    """The model uses them once more, and had other numbers there."""

    def scaled(x, w):
        data = x.detach().clone()
        return ScaledSiLU.apply(data, w) + data + x

    model = Model(scaled).double()
    match = r"ScaledSiLU.apply on parameter 'weight'.*scaled_silu_ changed an operand in place"

    def scaled_silu_(x, weight):
        return functional.silu(x, inplace=True) * weight

    with (
        gs.register_rule(ScaledSiLU, scaled_silu_),
        pytest.raises(gs.UnsupportedOperationError, match=match),
    ):
        gs.per_example_norms(model, batch, classify)


@pytest.mark.parametrize("make", [torch.empty_like, torch.zeros_like])
def test_an_operation_that_fills_a_tensor(batch, make):
    model = Model(lambda x, w: Filling.apply(x, w, make(x))).double()
    with gs.register_rule(Filling, lambda x, w, out: x * w):
        check_model(model, batch, classify)


def test_derivatives_of_the_network_are_refused(batch):
    model = Model(lambda x, w: ScaledSiLU.apply(x, w)).double()

    def penalty(m, batch):
        x = batch[0].clone().requires_grad_()
        out = m(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return slope.square().sum((1, 2)) + out.sum(1)

    with (
        gs.register_rule(ScaledSiLU, scaled_silu),
        pytest.raises(gs.UnsupportedOperationError, match="derivatives of the network"),
    ):
        gs.per_example_norms(model, batch, penalty)


def test_under_autocast_and_checkpoints(batch):
    class Checkpointed(Model):
        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)

    model = Checkpointed(lambda x, w: ScaledSiLU.apply(x, w)).double()
    with gs.register_rule(ScaledSiLU, scaled_silu):
        check_model(model, batch, classify)


@pytest.mark.parametrize(
    ("function", "decomposition", "message"),
    [
        (scaled_silu, torch.mul, r"scaled_silu.*cannot be seen.*register the operations inside"),
        (torch.matmul, torch.mul, r"matmul has a rule already"),
        (ScaledSiLU, None, r"decomposition is NoneType"),
        (3, torch.mul, r"3 cannot be seen"),
        ([ScaledSiLU], torch.mul, r"cannot be seen"),
        (torch.autograd.Function, torch.mul, r"'Function' cannot be seen"),
        (torch.autograd.Function.apply, torch.mul, r"'.*apply' cannot be seen"),
    ],
)
def test_what_cannot_be_registered(function, decomposition, message):
    with pytest.raises(gs.TrackingError, match=message):
        gs.register_rule(function, decomposition)


def test_registered_twice():
    with (
        gs.register_rule(ScaledSiLU, scaled_silu),
        pytest.raises(gs.TrackingError, match=r"ScaledSiLU.apply has a rule already.*remove"),
    ):
        gs.register_rule(ScaledSiLU, scaled_silu)


def test_operations_that_cannot_be_given_a_rule_are_refused_with_other_remedies(batch):
    model = Model(lambda x, w: functional.linear(w.expand(len(x), 1, -1), x[0])).double()
    with pytest.raises(gs.UnsupportedOperationError, match=r"linear .*fallback.*exclude") as caught:
        gs.per_example_norms(
            model, batch, lambda model, batch: model.operation(batch[0], model.weight).sum((1, 2))
        )
    assert "register_rule" not in str(caught.value)
    with pytest.raises(gs.TrackingError, match="linear has a rule already"):
        gs.register_rule(functional.linear, torch.mul)


def test_a_subclass_keeps_its_own_forward(batch):
    class Tripled(ScaledSiLU):
        @staticmethod
        def forward(ctx, x, weight):
            return 3 * ScaledSiLU.forward(ctx, x, weight)

        @staticmethod
        def backward(ctx, grad):
            return ScaledSiLU.backward(ctx, 3 * grad)

    x, weight = batch[0], torch.rand(WIDTH, dtype=torch.float64)
    model = Model(lambda x, w: Tripled.apply(x, w)).double()
    with gs.register_rule(ScaledSiLU, scaled_silu):
        torch.testing.assert_close(Tripled.apply(x, weight), 3 * scaled_silu(x, weight))
        with pytest.raises(gs.UnsupportedOperationError, match=r"Tripled.*register_rule"):
            gs.per_example_norms(model, batch, classify)
        with gs.register_rule(Tripled, lambda x, w: 3 * scaled_silu(x, w)):
            check_model(model, batch, classify)
            torch.testing.assert_close(ScaledSiLU.apply(x, weight), scaled_silu(x, weight))
    assert "apply" not in Tripled.__dict__
