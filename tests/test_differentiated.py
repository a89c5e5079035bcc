"""Losses with grad, vjp and jvp of torch.func, and what is made of them."""

import pytest
import torch
from torch import nn
from torch.autograd import Function
from torch.func import (
    functional_call,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    vjp,
    vmap,
)
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.parametrizations import weight_norm

import gradstats as gs

from .oracle import assert_sqnorms, check_model, check_products, oracle_sqnorms
from .test_derivatives import Fields, points

B = 3


def network(outputs=3):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, outputs)).double()


def data(*shape):
    return torch.randn(B, *(shape or (2,)), dtype=torch.float64)


def squares(found):
    return found.square().flatten(1).sum(1)


def check(model, batch, losses):
    """Norms alone and beside training, .grad and losses as in PyTorch, and inner products."""
    check_model(model, batch, losses, fusing=(True,))
    check_products(model, batch, losses)


class Flow(nn.Module):
    """The average velocity between two times, with a normalisation layer."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.norm = nn.LayerNorm(6)

    def forward(self, z, r, t):
        h = self.first(torch.cat([z, r[:, None], t[:, None]], 1)).tanh()
        return self.last(self.norm(h + self.second(h)).sin())


def mean_flow(model, batch):
    """Geng et al., arXiv 2505.13447."""
    x, noise, r, t = batch
    z, v = x + t[:, None] * (noise - x), noise - x
    u, slope = jvp(lambda *at: model(*at), (z, r, t), (v, torch.zeros_like(r), torch.ones_like(t)))
    return (u - (v - (t - r)[:, None] * slope).detach()).square().sum(1)


def test_mean_flow():
    torch.manual_seed(0)
    check(Flow().double(), (data(), data(), torch.rand(B).double(), data()[:, 0]), mean_flow)


def of_several(m, x):
    (first, second), (value, extra) = grad_and_value(
        lambda v, w, scale=1: ((m(v * w) * scale).sum(), m(v)), argnums=(0, 1), has_aux=True
    )(x, x.cos(), scale=2)
    u, slope, sine = jvp(lambda v: (m(v), v.sin()), (x,), (x,), has_aux=True)
    last, (w,) = grad(lambda v, w: (m(v + w).sum(), (w,)), -1, has_aux=True)(x, x.sin())
    assert value.dim() == 0
    return squares(first * second * last * sine) + squares(u * slope) + squares(extra * w.sum())


def of_structures(m, x):
    found, pull = vjp(lambda d: {"u": m(d["a"]), "w": m(d["b"])}, {"a": x, "b": x.cos()})
    (slopes,) = pull({"u": torch.ones(B, 3).double(), "w": found["u"]})
    return squares(slopes["a"]) + squares(slopes["b"] * found["w"][:, :2])


def without_gradients(m, x):
    """Inside, gradients are enabled; results have none."""
    with torch.no_grad():
        slope, (_, along) = grad(lambda v: m(v).sum())(x), jvp(m, (x,), (x.cos(),))
    assert not slope.requires_grad and not along.requires_grad
    return (m(slope) * along).square().sum(1)


def stopped(function):
    def run(v):
        with torch.no_grad():
            weight = function(v).exp()
        return function(v) * weight + function(v).detach() * function(v)

    return run


LOSSES = {
    "grad": lambda m, x: squares(grad(lambda v: m(v).sum())(x)),
    "grad of what is trained": lambda m, x: squares(grad(lambda v: m(v).sum())(x + m(x)[:, :2])),
    "grad of grad": lambda m, x: squares(
        grad(lambda w: grad(lambda v: m(v).sum())(w).square().sum())(x)
    ),
    "grad of layers alone": lambda m, x: squares(grad(lambda h: m[1:](h).sum())(m[0](x))),
    "grad beside parameters": lambda m, x: squares(
        grad(lambda v, p: functional_call(m, p, (v,)).sum())(x, dict(m.named_parameters()))
    ),
    "vjp": lambda m, x: squares(vjp(m, x)[1](m(x).sin())[0]),
    "vjp of the identity": lambda m, x: squares(vjp(lambda v: v, x)[1](m(x)[:, :2])[0]),
    "jvp": lambda m, x: squares(sum(jvp(m, (x,), (x.cos(),)))),
    "jvp along what is trained": lambda m, x: squares(jvp(m, (x,), (m(x)[:, :2],))[1]),
    "jvp of a constant": lambda m, x: squares(m(x + jvp(torch.ones_like, (x,), (x,))[1])),
    "jvp of a product with a detached factor": lambda m, x: squares(
        jvp(lambda v: m(v).detach() * m(v), (x,), (x,))[1]
    ),
    "Hessian and vector": lambda m, x: squares(
        jvp(grad(lambda v: m(v).sum()), (x,), (x.cos(),))[1]
    ),
    "jacrev": lambda m, x: squares(jacrev(m)(x).diagonal(dim1=0, dim2=2).movedim(-1, 0)),
    "jacrev of sums": lambda m, x: squares(jacrev(lambda v: m(v).sum(0))(x).transpose(0, 1)),
    "jacrev in pieces": lambda m, x: squares(
        jacrev(lambda v: m(v).sum(0), chunk_size=2)(x).transpose(0, 1)
    ),
    "jacfwd": lambda m, x: squares(jacfwd(m)(x).sum(2)),
    "each its grad": lambda m, x: squares(vmap(grad(lambda one: m(one).sum()))(x)),
    "each its grad and value": lambda m, x: (lambda g, v: squares(g) * v)(
        *vmap(grad_and_value(lambda one: m(one).sin().sum()))(x)
    ),
    "each its grad beside parameters": lambda m, x: squares(
        vmap(grad(lambda one, p: functional_call(m, p, (one,)).sum()), (0, None))(
            x, dict(m.named_parameters())
        )
    ),
    "each its jacrev": lambda m, x: squares(vmap(jacrev(m))(x)),
    "each its jacfwd": lambda m, x: squares(vmap(jacfwd(m))(x)),
    "each its jvp": lambda m, x: squares(vmap(lambda one: jvp(m, (one,), (one.cos(),))[1])(x)),
    "each its Hessian": lambda m, x: squares(vmap(hessian(lambda one: m(one).sum()))(x)),
    "each its Laplacian": lambda m, x: vmap(
        lambda one: hessian(lambda at: m(at)[0])(one).trace()
    )(x).square(),
    "jacrev of jacrev": lambda m, x: squares(vmap(jacrev(jacrev(m)))(x)),
    "several arguments": of_several,
    "structures": of_structures,
    "without gradients": without_gradients,
    "parts without gradients": lambda m, x: squares(grad(lambda v: stopped(m)(v).sum())(x)),
}  # fmt: skip


@pytest.mark.parametrize("losses", LOSSES.values(), ids=LOSSES)
def test_transforms_of_the_network(losses):
    model = network()
    check_model(model, data(), lambda m, x: losses(m, x) + squares(m(x)), fusing=(True,))
    check_products(model, data(), lambda m, x: losses(m, x) + squares(m(x)))


@pytest.mark.parametrize("losses", [
    lambda m, x: squares(vmap(grad(lambda one: m(one[None]).sum()))(x)),
    lambda m, x: squares(vmap(lambda one: jvp(m, (one[None],), (one[None].cos(),))[1])(x)),
    lambda m, x: squares(vmap(lambda one: vjp(m, one[None])[1](m(one[None]).exp())[0])(x)),
])  # fmt: skip
def test_weights_that_are_computed_inside(losses):
    """What vmap's first attempt made of parameters alone is not used in its second."""
    model = weight_norm(nn.Linear(2, 3)).double()
    check(model, data(), lambda m, x: losses(lambda v: m(v).sin(), x))


@pytest.mark.parametrize(
    "losses", [LOSSES["grad"], lambda m, x: squares(sum(jvp(m, (x,), (x.sin(),))))]
)
def test_transforms_of_convolutions(losses):
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU(),
        nn.Conv2d(8, 4, 3, stride=2, groups=2), nn.Softplus(), nn.Flatten(), nn.Linear(16, 3),
    ).double()  # fmt: skip
    check(model, data(3, 6, 6), losses)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer, self.norm = nn.Linear(4, 12), nn.Linear(4, 4), nn.RMSNorm(4)
        self.positions = nn.Parameter(torch.randn(B, 4))  # as many as examples

    def forward(self, x):
        parts = self.inner(self.norm(x + self.positions)).chunk(3, -1)
        return x + self.outer(functional.scaled_dot_product_attention(*parts))


@pytest.mark.parametrize("name", ["grad", "jvp"])
def test_transforms_of_attention(name):
    with sdpa_kernel(SDPBackend.MATH):
        check(Attention().double(), data(B, 4), LOSSES[name])


WITHOUT_DATA = {
    "grad": lambda f: grad(lambda at: f(at).sum())(points()),
    "jvp": lambda f: jvp(f, (points(),), (torch.ones_like(points()),))[1],
    "jacrev": lambda f: jacrev(lambda at: f(at).sum(0))(points())[0],
    "each its grad": lambda f: vmap(grad(lambda at: f(at).sum()))(points()),
    "each its Hessian": lambda f: vmap(hessian(lambda at: f(at).sum()))(points())[..., 0],
}


@pytest.mark.parametrize("function", WITHOUT_DATA.values(), ids=WITHOUT_DATA)
def test_transforms_at_points_that_the_loss_makes(function):
    torch.manual_seed(0)

    def losses(model, x):
        return (function(model.field).squeeze(-1) - model.head(x)).square().mean(1)

    check(Fields().double(), data(3), losses)


def test_results_of_what_is_not_trained_have_no_gradient():
    teacher = network().requires_grad_(False)

    def losses(model, x):
        slope, value = grad_and_value(lambda v: teacher(v).sum())(x)
        output, along = jvp(teacher, (x,), (x.sin(),))
        jacobian = jacrev(lambda v: teacher(v).sum(0))(x)  # (3, B, 2)
        result, pull = vjp(teacher, x)
        found = slope, value, output, along, jacobian, result, *pull(result)
        assert not any(each.requires_grad for each in found)
        return model(slope + jacobian.sum(0)).square().sum(1) * (along * output).sum(1)

    check_model(network(), data(), losses, fusing=(True,))


def test_random_numbers_and_values_are_those_of_the_plain_step():
    model = nn.Sequential(nn.Linear(2, 20), nn.Dropout(), nn.Linear(20, 3)).double()
    calls = []

    def losses(model, x):
        torch.manual_seed(1)

        def called(v):
            calls.append(v.shape)
            return model(v)

        return squares(sum(jvp(called, (x,), (x,)))) + LOSSES["grad"](called, x) + torch.rand(1)

    x = data()
    expected = oracle_sqnorms(model, x, losses)
    calls.clear()
    stats = gs.per_example_norms(model, x, losses)
    assert calls == [x.shape] * 2
    assert_sqnorms(stats, expected, 1e-9)
    torch.testing.assert_close(stats.loss, losses(model, x).detach())


class Straight(Function):
    """Forward it has another derivative than backward."""

    @staticmethod
    def forward(x):
        return x.round()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, gradient):
        return gradient

    @staticmethod
    def jvp(ctx, tangent):
        return 0 * tangent


def inside_without_gradients(m):
    def run(v):
        with torch.no_grad():
            slope = grad(lambda w: m(w).sum())(v)
        return m(v)[:, :2] * slope

    return run


ALONG = {
    "an operation": stopped,
    "a transform": inside_without_gradients,
    "an inverse": lambda m: (
        lambda v: torch.cholesky_inverse(
            m(v)[:, :2, None].cos().matmul(m(v)[:, None, :2].sin()).tril() + 2 * torch.eye(2)
        )
    ),
    "a Function": lambda m: lambda v: Straight.apply(m(v)),
}


@pytest.mark.parametrize("function", ALONG.values(), ids=ALONG)
def test_what_tangents_pass_and_gradients_do_not_is_refused(function):
    model, x = network(), data()

    def losses(model, x):
        return squares(sum(jvp(function(model), (x,), (x,))))

    with pytest.raises(gs.UnsupportedOperationError, match=r"tangents pass.*fallback=\"vmap\""):
        gs.per_example_norms(model, x, losses)
    stats = gs.per_example_norms(model, x, losses, fallback="vmap")
    assert_sqnorms(stats, oracle_sqnorms(model, x, losses), 1e-9)


def hooked(m, x):
    def run(v):
        h = m[0](v)
        h.register_hook(lambda gradient: gradient / 2)
        return m[1:](h).sum()

    return squares(grad(run)(x))


def hooked_on_a_node(m, x):
    def run(v):
        h = m[0](v)
        h.grad_fn.register_prehook(lambda gradients: (gradients[0] / 2,))
        return m[1:](h).sum()

    return squares(grad(run)(x))


def hooked_on_slices(m, x):
    def run(v):
        h = m(v)
        if h.requires_grad:  # under torch.vmap, PyTorch says that it does not
            h.register_hook(lambda gradient: gradient / 2)
        return h

    return squares(torch.vmap(run)(x))


def changing(m, x):
    return squares(jvp(lambda v: v.mul_(2).square(), (m(x),), (m(x).detach(),))[1])


def without_recording(m, x):
    with torch.inference_mode():
        slope = grad(lambda v: m(v).sum())(x)
    return squares(m(slope.clone()))


REFUSED = {
    "inference mode": (without_recording, "torch.inference_mode.*torch.no_grad"),
    "hook": (hooked, "without hooks"),
    "hook on a node": (hooked_on_a_node, "without hooks"),
    "hook on slices": (hooked_on_slices, "without hooks"),
    "change in place": (changing, "in place.*clone"),
    "by weights": (
        lambda m, x: (
            squares(m(x))
            + grad(lambda p: functional_call(m, p, (x,)).square().sum())(
                dict(m.named_parameters())
            )["0.bias"].sum()
        ),
        "sums over the examples",
    ),
    "of several examples": (
        lambda m, x: squares(grad(lambda v: m(v).mean(0).square().sum())(x)),
        "several examples met",
    ),
}


@pytest.mark.parametrize("losses, message", REFUSED.values(), ids=REFUSED)
def test_refused(losses, message):
    with pytest.raises(gs.GradStatsError, match=message):
        gs.per_example_norms(network(), data(), losses)


NORMALISED = {
    "layer norm": lambda: nn.LayerNorm(5),
    "instance norm": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 5)), nn.InstanceNorm1d(1), nn.Flatten()
    ),
    "batch norm": lambda: nn.BatchNorm1d(5).eval(),
}


@pytest.mark.parametrize("name", NORMALISED)
def test_gradients_that_pytorch_computes_wrongly_are_refused(name):
    """The derivative of a tangent; a detached one is right, and so is a gradient's."""
    model = nn.Sequential(nn.Linear(2, 5), NORMALISED[name](), nn.Tanh(), nn.Linear(5, 3)).double()
    x = data()

    def detached(m, x):
        u, along = jvp(m, (x,), (x.cos(),))
        return squares(u - along.detach())

    check(model, x, detached)
    check(model, x, LOSSES["grad"])
    with pytest.raises(gs.UnsupportedOperationError, match="norm, which PyTorch differentiates"):
        gs.per_example_norms(model, x, LOSSES["jvp"])


def test_transforms_outside_contexts_are_as_before():
    model, x = network(), data()
    gs.per_example_norms(model, x, lambda m, x: m(x)[:, 0])
    hidden = []

    def seen(v):
        hidden.append(torch._C._functorch.is_functorch_wrapped_tensor(v))
        return v.sin().sum()

    torch.testing.assert_close(grad(seen)(x), x.cos())
    torch.testing.assert_close(jvp(seen, (x,), (x,))[1], (x * x.cos()).sum())
    torch.testing.assert_close(vjp(seen, x)[1](torch.ones(()).double())[0], x.cos())
    assert hidden == [True] * 3
    for transform in (grad, jacrev, jacfwd, hessian):
        function = transform(lambda v: v.sin().sum())
        compiled = torch.compile(function, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(x), function(x))
