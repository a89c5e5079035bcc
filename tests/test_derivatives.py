"""Losses that contain derivatives of the network: the parameters are used once more in them."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import gradstats as gs

from .functions import Cubed
from .oracle import (
    assert_sqnorms,
    check_model,
    check_products,
    oracle_gradients,
    oracle_sqnorms,
)
from .pages import page_with


def laplacian(model, points):
    """The residual of Δu = u, as physics-informed networks form it."""
    points = points.detach().requires_grad_()
    u = model(points)
    (slope,) = torch.autograd.grad(u.sum(), points, create_graph=True)
    total = -u[:, 0]
    for axis in range(points.shape[1]):
        (curvature,) = torch.autograd.grad(slope[:, axis].sum(), points, create_graph=True)
        total = total + curvature[:, axis]
    return total.square()


def gradient_penalty(model, images):
    """The critic's loss of WGAN-GP."""
    images = images.detach().requires_grad_()
    score = model(images)
    (slope,) = torch.autograd.grad(score.sum(), images, create_graph=True)
    return score.flatten(1).sum(1) + 10 * (slope.flatten(1).norm(dim=1) - 1).square()


class Mixed(nn.Module):
    """Normalisation, products with bare parameters and broadcasting between linear layers."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(2, 12)
        self.norm = nn.LayerNorm(12)
        self.rms = nn.RMSNorm(12)
        self.groups = nn.Parameter(torch.randn(3, 4, 4))
        self.scale = nn.Parameter(torch.randn(12))
        self.matrix = nn.Parameter(torch.randn(12, 12))
        self.last = nn.Linear(12, 1)

    def forward(self, x):
        x = torch.tanh(self.norm(self.first(x)))
        x = torch.einsum("bkp,kpq->bkq", x.unflatten(1, (3, 4)), self.groups).flatten(1)
        x = self.rms(torch.sigmoid(x) * self.scale)
        return self.last(torch.sin(x @ self.matrix))


def tied():
    middle = nn.Linear(4, 4)
    return nn.Sequential(
        weight_norm(nn.Linear(2, 4)), nn.Tanh(), middle, nn.Tanh(), middle, nn.Tanh(),
        nn.Linear(4, 1),
    )  # fmt: skip


NETWORKS = {
    "mlp": lambda: nn.Sequential(
        nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 1)
    ),
    "frozen weight": lambda: nn.Sequential(
        nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1).requires_grad_(False), nn.Linear(1, 1)
    ),
    "mixed": Mixed,
    "tied": tied,
}


@pytest.mark.parametrize("size", ["small", "large"])
@pytest.mark.parametrize("name", NETWORKS)
def test_laplacian_by_double_backward(name, size):
    torch.manual_seed(0)
    points = torch.randn(5, 2, dtype=torch.float64)
    check_model(NETWORKS[name]().double(), points, laplacian, fusing=(True,), size=size)


CRITICS = {
    "strided, grouped, transposed": lambda: nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1),
        nn.SiLU(),
        nn.Conv2d(8, 8, 3, stride=2, dilation=2, groups=2, padding=2),
        nn.Softplus(),
        nn.ConvTranspose2d(8, 4, 2, stride=2, output_padding=1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(4 * 7 * 7, 1),
    ),
    "normalised": lambda: nn.Sequential(
        nn.Conv2d(3, 8, 3, padding="same", bias=False),
        nn.GroupNorm(2, 8),
        nn.SiLU(),
        nn.BatchNorm2d(8).eval(),
        nn.Conv2d(8, 8, 3, groups=8, bias=False),
        nn.InstanceNorm2d(8, affine=True),
        nn.SiLU(),
        nn.Flatten(),
        nn.Linear(8 * 10 * 9, 1),
    ),
}


@pytest.mark.parametrize("size", ["small", "large"])
@pytest.mark.parametrize("name", CRITICS)
def test_gradient_penalty(name, size):
    torch.manual_seed(0)
    images = torch.randn(4, 3, 12, 11, dtype=torch.float64)
    check_model(CRITICS[name]().double(), images, gradient_penalty, fusing=(True,), size=size)


def batched(u, points, **options):
    """Return the gradients of each output (N, B, *), by one call for all."""
    directions = torch.eye(u.shape[1], dtype=u.dtype).unsqueeze(1).expand(-1, len(u), -1)
    options["is_grads_batched"] = True
    return torch.autograd.grad(u, points, grad_outputs=directions, **options)[0]


def mapped(u, points, **options):
    directions = torch.eye(u.shape[1], dtype=u.dtype).unsqueeze(1).expand(-1, len(u), -1)
    along = torch.vmap(lambda v: torch.autograd.grad(u, points, v, retain_graph=True, **options)[0])
    return along(directions)


JACOBIANS = {
    "linear": lambda: nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)),
    "as many outputs as examples": lambda: nn.Sequential(nn.Linear(2, 5), nn.Tanh()),
    "positions": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 1)), nn.Linear(1, 4), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3)
    ),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 2)), nn.Conv1d(1, 3, 2), nn.Tanh(), nn.Flatten()
    ),
    "normalised": lambda: nn.Sequential(nn.Linear(2, 4), nn.LayerNorm(4), nn.Tanh()),
}


@pytest.mark.parametrize("several", [batched, mapped])
@pytest.mark.parametrize("name", JACOBIANS)
def test_jacobians_whose_rows_are_computed_at_once(name, several):
    def loss(model, points):
        points = points.detach().requires_grad_()
        u = model(points).sin()
        jacobian = several(u, points, create_graph=True)
        return u.sum(1) + jacobian.square().sum((0, 2))

    torch.manual_seed(0)
    points = torch.randn(5, 2, dtype=torch.float64)
    check_model(JACOBIANS[name]().double(), points, loss, fusing=(True,))


@pytest.mark.parametrize("name", JACOBIANS)
def test_jacobians_without_a_graph(name):
    """Constants, of which each example's own rows lie along the second axis."""

    def loss(model, points):
        points = points.detach().requires_grad_()
        jacobian = batched(model(points).sin(), points, retain_graph=True)
        return model(jacobian.mean(0)).sum(1) + model(jacobian[0]).square().sum(1)

    torch.manual_seed(0)
    points = torch.randn(5, 2, dtype=torch.float64)
    check_model(JACOBIANS[name]().double(), points, loss)


def test_jacobians_of_torch_autograd_functional():
    def loss(model, points):
        def outputs(points):
            return model(points).sin().sum(0)

        options = {"create_graph": True, "vectorize": True}
        jacobian = torch.autograd.functional.jacobian(outputs, points, **options)
        return model(points).sum(1) + jacobian.square().sum((0, 2))

    torch.manual_seed(0)
    points = torch.randn(5, 2, dtype=torch.float64)
    check_model(JACOBIANS["linear"]().double(), points, loss, fusing=(True,))


def test_batched_gradients_need_as_many_vectors_for_each_output():
    model = JACOBIANS["linear"]()
    with gs.track(model, batch_size=5):
        points = torch.randn(5, 2, requires_grad=True)
        u = model(points)
        stacks = torch.ones(3, *u.shape), torch.ones(2, *u.shape)
        with pytest.raises(ValueError, match="same size"):
            torch.autograd.grad([u, u], points, stacks, is_grads_batched=True)


def test_derivatives_of_a_sequence_model():
    """Points (B, T, 2): every example has several positions."""

    def loss(model, points):
        points = points.detach().requires_grad_()
        u = model(points)
        (slope,) = torch.autograd.grad(u.square().sum(), points, create_graph=True)
        return slope.square().sum((1, 2))

    torch.manual_seed(0)
    points = torch.randn(4, 7, 2, dtype=torch.float64)
    check_model(NETWORKS["mlp"]().double(), points, loss, fusing=(True,))


def of_rows(function):
    return lambda m, x: torch.cat([function(m, x[i : i + 1]) for i in range(len(x))])


# Operations one operand of which is made of the data, each example its own.
MADE_OF_DATA = {
    "weight": of_rows(lambda m, x: functional.linear(x, m.maker(x).view(4, 2), m.p)),
    "bias": of_rows(lambda m, x: functional.linear(x, m.w, m.maker(x)[0, :4])),
    "scale of several positions": of_rows(
        lambda m, x: functional.linear(x.view(1, 2, 1), m.maker(x)[:, :4].T, m.p).sum(1)
    ),
    "addmm": of_rows(lambda m, x: torch.addmm(m.p, x, m.maker(x).view(2, 4))),
    "addmm with a sum of data": of_rows(lambda m, x: torch.addmm(m.maker(x)[0, :4], x, m.w.T)),
    "kernel": of_rows(
        lambda m, x: functional.conv1d(x[..., None], m.maker(x).view(4, 2, 1), m.p)[..., 0]
    ),
    "bias of channels": of_rows(
        lambda m, x: functional.conv1d(
            torch.stack([x, x], 2), m.w[..., None], m.maker(x)[0, :4], padding=1
        ).sum(2)
    ),
    "transposed kernel": of_rows(
        lambda m, x: functional.conv_transpose1d(
            x[..., None], m.maker(x).view(2, 4, 1), m.p, stride=2
        )[..., 0]
    ),
    "scale": of_rows(
        lambda m, x: functional.layer_norm(x.repeat(1, 2) * m.p, (4,), m.maker(x)[0, :4], m.p)
    ),
    "shift": of_rows(
        lambda m, x: functional.layer_norm(
            torch.cat([x, x.sin()], 1), (4,), m.p, m.maker(x)[0, :4]
        )
    ),
    "shift of channels": of_rows(
        lambda m, x: functional.group_norm(
            torch.stack([x, x.sin()], 1).view(1, 4, 1) * m.w.view(1, 4, 2), 2, m.p,
            m.maker(x)[0, :4],
        ).sum(2)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MADE_OF_DATA)
def test_derivatives_through_operands_made_of_data(name):
    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.maker = nn.Linear(2, 8)
            self.w = nn.Parameter(torch.randn(4, 2))
            self.p = nn.Parameter(torch.randn(4))

        def forward(self, x):
            return torch.tanh(MADE_OF_DATA[name](self, x)).sum(1, keepdim=True)

    torch.manual_seed(0)
    points = torch.randn(3, 2, dtype=torch.float64)
    check_model(Network().double(), points, laplacian, fusing=(True,))


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: torch.addmm(x, m.first(x), m.matrix, beta=0.5),
        lambda m, x: torch.baddbmm(m.bias, m.first(x)[:, None], m.matrix.expand(len(x), -1, -1)),
        lambda m, x: functional.linear(m.first(x), m.matrix.T, m.bias[:1]),
    ],
    ids=["addmm, scaled", "baddbmm", "linear with one bias"],
)
def test_derivatives_through_sums_of_products(function):
    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(2, 4)
            self.matrix, self.bias = (nn.Parameter(torch.randn(s)) for s in ((4, 2), (2,)))

        def forward(self, x):
            return function(self, x).flatten(1).tanh().sum(1, keepdim=True)

    points = torch.randn(5, 2, dtype=torch.float64)
    check_model(Network().double(), points, laplacian, fusing=(True,))


@pytest.mark.parametrize("like", [torch.zeros_like, torch.ones_like, torch.randn_like])
def test_derivatives_along_a_direction(like):
    """By two backwards, the second of which runs through a stand-in for a gradient."""

    def loss_fn(model, batch):
        points, direction = batch
        points = points.detach().requires_grad_()
        u = model(points)
        stand_in = like(u, requires_grad=True)
        (slope,) = torch.autograd.grad(u, points, stand_in, create_graph=True)
        (along,) = torch.autograd.grad(slope, stand_in, direction, create_graph=True)
        return (u - along).square().sum(1)

    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4)).double()
    batch = torch.randn(4, 3).double(), torch.randn(4, 3).double()
    check_model(model, batch, loss_fn, rtol=1e-8, fusing=(True,))


class Turned(nn.Module):
    """Operations that find the examples along other axes, inside a checkpoint."""

    def __init__(self, nested, reentrant):
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(2, 4), nn.Linear(4, 4), nn.Linear(4, 1)
        self.attention = nn.MultiheadAttention(4, 1, batch_first=True)
        self.positions = nn.Parameter(torch.randn(3, 1, 4))
        self.nested, self.reentrant = nested, reentrant

    def turned(self, x):
        x = (x.transpose(0, 1) * self.positions).transpose(0, 1)
        x = self.layer(x.flatten(0, 1)).tanh().view_as(x) + self.positions[torch.arange(3), 0]
        return self.attention(x, x, x)[0]

    def forward(self, x):
        alone = partial(checkpoint, use_reentrant=False)
        block = partial(alone, self.turned) if self.nested else self.turned
        return self.last(checkpoint(block, self.first(x), use_reentrant=self.reentrant))


@pytest.mark.parametrize("batch", [2, 3])  # 3 positions
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("nested", [False, True])
def test_derivatives_through_checkpoints(nested, reentrant, batch):
    """What they compute again within the inner backward is followed as in their forward."""
    model, twin = Turned(nested, reentrant).double(), Turned(nested, False).double()
    twin.load_state_dict(model.state_dict())
    x = torch.randn(batch, 3, 2, dtype=torch.float64)
    expected = oracle_sqnorms(twin, x, gradient_penalty)
    assert_sqnorms(gs.per_example_norms(model, x, gradient_penalty), expected, 1e-9)


class Marked(torch.Tensor):
    """A subclass of the user's, whose operations run with those of subclasses off."""


def test_derivatives_inside_checkpoints_by_tensors_of_a_subclass():
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(2, 4), nn.Linear(4, 1)
            self.scale = nn.Parameter(torch.rand(4))

        def inner(self, h, scale):
            h = h.as_subclass(Marked)
            values = (h * scale).sin()
            (slopes,) = torch.autograd.grad(values.sum(), h, create_graph=True)
            return (values * slopes).as_subclass(torch.Tensor)

        def forward(self, x):
            inner = checkpoint(self.inner, self.first(x), self.scale, use_reentrant=False)
            return self.last(inner)

    model, x = Inner().double(), torch.randn(5, 2, dtype=torch.float64)
    check_model(model, x, lambda model, x: model(x).square().sum(1), fusing=(True,))


class Weighted(nn.Module):
    """Values weighted by their own gradients, as numbers, in a checkpoint."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(2, 4), nn.Linear(4, 1)
        self.scale = nn.Parameter(torch.rand(4))

    def inner(self, h):
        values = torch.where(h > 0, h, self.scale) * self.scale
        (slopes,) = torch.autograd.grad(values.square().sum(), h, retain_graph=True)
        return values * slopes

    def forward(self, x):
        return self.last(self.run(self.inner, self.first(x)))


@pytest.mark.parametrize("early_stop", [False, True])
def test_gradients_as_numbers_inside_checkpoints(early_stop):
    """They report nothing, so that the checkpoint saves what it saves without a context."""

    def loss_fn(model, x):
        with set_checkpoint_early_stop(early_stop):
            return model(x).square().sum(1)

    model, x = Weighted().double(), torch.randn(5, 2, dtype=torch.float64)
    model.run = lambda function, h: function(h)
    expected = oracle_gradients(model, x, loss_fn)
    model.run = partial(checkpoint, use_reentrant=False)
    check_model(model, x, loss_fn, gradients=expected)


def test_training_gradient_beside_the_norms():
    torch.manual_seed(0)
    model = NETWORKS["mlp"]().double()
    points = torch.randn(5, 2, dtype=torch.float64)
    laplacian(model, points).mean().backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    with gs.track(model, batch_size=5) as tracker:
        tracker.backward(laplacian(model, points))
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-12, atol=1e-14)
    assert_sqnorms(tracker.stats, oracle_sqnorms(model, points, laplacian), 1e-10)


def test_an_inner_gradient_without_a_graph_is_a_constant():
    """Saliency used as a weight: nothing of the inner backward is counted."""

    def loss(model, points):
        points = points.detach().requires_grad_()
        (slope,) = torch.autograd.grad(model(points).sum(), points)
        return model(points)[:, 0].square() * slope.norm(dim=1)

    torch.manual_seed(0)
    check_model(NETWORKS["mlp"]().double(), torch.randn(5, 2, dtype=torch.float64), loss)


def edges_as_inputs(hidden, losses):
    torch.autograd.grad(losses.sum(), [get_gradient_edge(hidden)], retain_graph=True)


def edge_as_input(hidden, losses):
    torch.autograd.grad(losses.sum(), get_gradient_edge(hidden), retain_graph=True)


def edge_as_output(hidden, losses):
    torch.autograd.grad(get_gradient_edge(losses.sum()), [hidden], retain_graph=True)


@pytest.mark.parametrize("differentiate", [edges_as_inputs, edge_as_input, edge_as_output])
def test_gradient_edges_are_refused(differentiate):
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    message = "was given a GradientEdge.*Expected tensors"
    with pytest.raises(gs.UnsupportedOperationError, match=message):
        with gs.track(model, batch_size=5):
            hidden = model[0](torch.randn(5, 3).double())
            differentiate(hidden, model[1:](hidden).square().sum(1))


def test_gradients_of_parameters_in_the_loss_are_refused():
    """Their sum over the batch couples the examples."""

    def loss(model, points):
        losses = model(points)[:, 0].square()
        (slope,) = torch.autograd.grad(losses.sum(), model[0].weight, create_graph=True)
        return losses + slope.square().sum()

    model = NETWORKS["mlp"]()
    with pytest.raises(gs.CoupledExamplesError, match=r"parameter '0\.weight'.*exclude"):
        gs.per_example_norms(model, torch.randn(5, 2), loss)


@pytest.mark.parametrize(
    ("layer", "width"),
    [
        (partial(nn.Linear, 4, 3), 3),
        (partial(nn.Conv1d, 3, 2, 2), 3),
        (partial(nn.ConvTranspose1d, 3, 2, 2), 5),
    ],
)
@pytest.mark.parametrize("excluded", ["1.weight", "1.bias"])
@pytest.mark.parametrize("unused", [False, True])
def test_gradients_of_a_parameter_that_is_excluded_beside_a_tracked_one(
    layer, width, excluded, unused
):
    """Their layer's backward is the context's, and must not lose the gradient in the loss."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), layer(), nn.Linear(width, 2)).double()

    def loss(model, data):
        losses = model(data).sin().square().sum((1, 2))
        parameter = model.get_parameter(excluded)
        (slope,) = torch.autograd.grad(
            losses.sum(), parameter, create_graph=True, allow_unused=unused
        )
        return losses + slope.square().sum()

    data = torch.randn(5, 3, 4).double()
    with pytest.raises(gs.CoupledExamplesError):
        gs.per_example_norms(model, data, loss, exclude=excluded)
    of_one = data[:1]
    others = [each for name, each in model.named_parameters() if name != excluded]
    gradients = torch.autograd.grad(loss(model, of_one).sum(), others, allow_unused=True)
    expected = sum(each.square().sum() for each in gradients if each is not None)
    stats = gs.per_example_norms(model, of_one, loss, exclude=excluded)
    torch.testing.assert_close(stats.sqnorm, expected[None])


def test_a_differentiable_training_gradient_is_refused():
    model = NETWORKS["mlp"]()
    with (
        gs.track(model, batch_size=5),
        pytest.raises(gs.UnsupportedOperationError, match="create_graph=False"),
    ):
        model(torch.randn(5, 2)).mean().backward(create_graph=True)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_unfused_is_refused_with_the_remedy():
    model = NETWORKS["mlp"]()
    with (
        gs.track(model, batch_size=5, fused=False),
        pytest.raises(gs.UnsupportedOperationError, match=r"parameter '4\.weight'.*fused=True"),
    ):
        laplacian(model, torch.randn(5, 2))


def test_operations_without_a_formula_are_refused():
    class Picked(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(2, 4)
            self.matrix = nn.Parameter(torch.randn(2, 4, 2))

        def forward(self, x):
            return functional.bilinear(self.first(x), x, self.matrix)

    with pytest.raises(gs.UnsupportedOperationError, match=r"parameter 'matrix'.*exclude"):
        gs.per_example_norms(Picked(), torch.randn(5, 2), gradient_penalty)


def test_operations_that_run_as_they_are_in_low_precision_are_left_to_the_fallback():
    class Along(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.scale = nn.Linear(2, 4), nn.Parameter(torch.randn(4))

        def forward(self, x):
            return torch.linalg.vecdot(self.first(x), self.scale)[:, None].tanh()

    model, points = Along().bfloat16(), torch.randn(5, 2).bfloat16()
    with pytest.raises(gs.UnsupportedOperationError, match=r"'scale'.*float64.*fallback=\"vmap"):
        gs.per_example_norms(model, points, gradient_penalty)
    stats = gs.per_example_norms(model, points, gradient_penalty, fallback="vmap")
    for name, expected in oracle_sqnorms(model, points, gradient_penalty).items():
        allowed = 0.03 * expected.max().item()  # eight bits of each gradient
        torch.testing.assert_close(
            stats.by_parameter[name].double(), expected, rtol=0.03, atol=allowed
        )


def of_outputs(combine):
    """Return a loss on the derivative of what ``combine`` makes of a batch's outputs."""

    def loss_fn(model, points):
        points = points.detach().requires_grad_()
        outputs = model(points)
        (slope,) = torch.autograd.grad(combine(outputs), points, create_graph=True)
        return slope.square().sum(1) + outputs.sum(1)

    return loss_fn


def added_in_place(u):
    total = torch.zeros((), dtype=u.dtype)
    total += u.exp().mean()
    total -= functional.mse_loss(u, torch.ones_like(u))
    return total / len(u)


# Sums of terms of one example each: the derivative at one point depends on no other.
SUMS = {
    "a mean": lambda u: -u.exp().mean() * 3 + 1,
    "sums over the examples": lambda u: u.exp().sum(0)[1] + u.exp().mean(0).select(0, 0),
    "a loss": lambda u: functional.cross_entropy(u, torch.zeros(len(u), dtype=torch.long)),
    "a product": lambda u: torch.ones(1, len(u)).double().matmul(u.exp()).sum(),
    "an inner product": lambda u: u[:, 0].dot(u[:, 1]),
    "one by one": lambda u: sum(row.exp().sum() for row in u),
    "stacked": lambda u: torch.stack([u.exp().mean(), u.square().sum()]).mean(),
    "a part of itself": lambda u: u.exp().mean() / u.exp().mean().detach(),
    "in place": added_in_place,
}
OTHERS = {
    "a root": lambda u: functional.mse_loss(u, torch.ones_like(u)).sqrt(),
    "a square": lambda u: u.sum().square(),
    "squares of sums": lambda u: u.sum(0).square().sum(),
    "a quotient": lambda u: 1 / u.exp().mean(),
    "a product of all": lambda u: u.prod(0).sum(),
    "a norm": torch.norm,
    "a spread": lambda u: u.std(0).sum(),
    "pairs": lambda u: (u @ u.T).sum(),
    "neighbours": lambda u: (u[1:] * u[:-1]).sum(),
    "a product of two": lambda u: u[0].sum() * u[1].sum(),
    "a loss against others": lambda u: functional.mse_loss(u, u.flip(0)),
    "a product with others": lambda u: u[:, 0].exp() @ u[:, 1].flip(0),
    "in place": lambda u: u.exp().mean().square_() + u.sum(),
    "along a direction": lambda u: u.exp().sum() * u.sum(),
    "squares of rows added by an index": lambda u: (
        torch.zeros_like(u[:2]).index_add(0, torch.arange(len(u)) % 2, u).square().sum()
    ),
    "a covariance": lambda u: torch.cov(u.T).square().sum(),
    "pooled in windows": lambda u: functional.avg_pool1d(u.mT[None], 2).square().sum(),
}


@pytest.mark.parametrize("combine", SUMS.values(), ids=SUMS)
def test_derivatives_of_sums_over_the_examples(combine):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    check_model(model, torch.randn(4, 2).double(), of_outputs(combine), fusing=(True,))


@pytest.mark.parametrize("combine", OTHERS.values(), ids=OTHERS)
def test_derivatives_that_depend_on_other_examples_are_refused(combine):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    with pytest.raises(gs.CoupledExamplesError, match="derivative of values in which several"):
        gs.per_example_norms(model, torch.randn(4, 2).double(), of_outputs(combine))


def along_trained(combine, **options):
    """Return a loss on the derivative along a vector that is trained as well."""

    def loss_fn(model, points):
        points = points.detach().requires_grad_()
        outputs = model(points)
        vectors = [None, model(points).sin()]
        if options:
            vectors = [torch.stack([points[:, 0]] * 2), torch.stack([vectors[1]] * 2)]
        found = torch.autograd.grad(
            [outputs[:, 0] if options else outputs.sum(), combine(outputs)], points, vectors,
            create_graph=True, **options,
        )[0]  # fmt: skip
        return (found.sum(0) if options else found).square().sum(1)

    return loss_fn


@pytest.mark.parametrize("options", [{}, {"is_grads_batched": True}])
@pytest.mark.parametrize("combine", [torch.exp, lambda u: u.flip(0).exp().flip(0)])
def test_derivatives_along_vectors_that_are_trained(combine, options):
    model = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    points = torch.randn(4, 2).double()
    check_model(model, points, along_trained(combine, **options), fusing=(True,))


WEIGHS_OTHERS = {
    "rolled": lambda u: u.roll(1, 0),
    "in another order": lambda u: u[torch.tensor([1, 0, 2, 3])],
    "centred": lambda u: u - u.mean(0),
}


@pytest.mark.parametrize("options", [{}, {"is_grads_batched": True}])
@pytest.mark.parametrize("combine", WEIGHS_OTHERS.values(), ids=WEIGHS_OTHERS)
def test_derivatives_along_trained_vectors_of_other_examples_are_refused(combine, options):
    """Their gradients were counted for the example whose value was weighed."""
    model = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    points = torch.randn(4, 2).double()
    with pytest.raises(gs.CoupledExamplesError, match="several examples met"):
        gs.per_example_norms(model, points, along_trained(combine, **options))


def test_derivatives_by_what_is_not_used():
    def losses(model, x):
        x, unused = x.clone().requires_grad_(), x.clone().requires_grad_()
        slope, none = torch.autograd.grad(
            model(x).sum(), (x, unused), create_graph=True, allow_unused=True
        )
        assert none is None
        return slope.square().sum(1)

    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    check_model(model, torch.randn(4, 3).double(), losses, fusing=(True,))


def test_derivatives_of_zeros_that_stand_for_what_is_not_used():
    """As in PyTorch, they can be differentiated again if a graph was asked for."""

    def losses(model, x):
        x, unused = x.clone().requires_grad_(), x.clone().requires_grad_()
        slope, zeros = torch.autograd.grad(
            model(x).sum(), (x, unused), create_graph=True, materialize_grads=True
        )
        (again,) = torch.autograd.grad(
            zeros.sum(), x, create_graph=True, allow_unused=True, materialize_grads=True
        )
        assert torch.equal(again, torch.zeros_like(x))
        directions = torch.ones(2, len(x), 1).double()
        _, each = torch.autograd.grad(
            model(x), (x, unused), directions, create_graph=True, is_grads_batched=True,
            materialize_grads=True,
        )  # fmt: skip
        return slope.square().sum(1) + again.sum(1) + each.sum(1)

    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    check_model(model, torch.randn(4, 3).double(), losses, fusing=(True,))


def test_zeros_that_stand_for_gradients_of_unused_parameters_belong_to_no_example():
    """The parameter has as many rows as there are examples."""
    model = nn.Linear(3, 1).double()
    model.unused, model.scale = (nn.Parameter(torch.ones(4).double()) for _ in range(2))

    def losses(model, x):
        hidden = model(x).squeeze(1)
        _, zeros = torch.autograd.grad(
            hidden.sum(), (model.weight, model.unused), retain_graph=True, materialize_grads=True
        )
        return hidden + ((zeros + 1) * model.scale.sin()).sum()

    x = torch.randn(4, 3).double()
    expected = oracle_sqnorms(model, x, losses)
    with gs.track(model, batch_size=4) as tracker:
        tracker.backward(losses(model, x))
    assert_sqnorms(tracker.stats, expected, 1e-9)


def points(**options):
    return torch.linspace(0, 1, 5, dtype=torch.float64, **options)[:, None]


def slope(field, at):
    (found,) = torch.autograd.grad(field(at).sum(), at, create_graph=True)
    return found


def curvature(field):
    at = points().requires_grad_()
    return slope(lambda at: slope(field, at), at)


def along_two_directions(field):
    at = points().requires_grad_()
    vectors = torch.stack([torch.ones(5, 1), torch.linspace(1, 2, 5)[:, None]]).double()
    (found,) = torch.autograd.grad(field(at), at, vectors, create_graph=True, is_grads_batched=True)
    return found.prod(0)


def descent(field):
    at = points().requires_grad_()
    for _ in range(2):
        at = at - 0.1 * slope(lambda at: field(at).square(), at)
    return field(at)


def by_a_parameter(field):
    at = points()
    (found,) = torch.autograd.grad(field(at).square().sum(), field[2].weight, create_graph=True)
    return found.sum() + at


def of_functional(field):
    at = points().squeeze(1)
    jacobian = torch.autograd.functional.jacobian
    return jacobian(lambda at: field(at[:, None]).squeeze(1), at, create_graph=True).sum(0)[:, None]


class CubedOnce(Cubed):
    """The slope of its slope is zero."""

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 3 * x.detach() ** 2


class Fields(nn.Module):
    """A function of coordinates that belong to no example, and a layer of data."""

    def __init__(self):
        super().__init__()
        self.field = nn.Sequential(nn.Linear(1, 6), nn.Tanh(), nn.Linear(6, 1))
        self.head = nn.Linear(3, 1)


WITHOUT_DATA = {
    "slope": lambda field: slope(field, points().requires_grad_()),
    "curvature": curvature,
    "along two directions": along_two_directions,
    "descent": descent,
    "by a parameter": by_a_parameter,
    "through a Function": lambda field: slope(
        lambda at: Cubed.apply(field(at)), points().requires_grad_()
    ),
    "through a Function of one derivative": lambda field: slope(
        lambda at: CubedOnce.apply(field(at)), points().requires_grad_()
    ),
    "jacobian": of_functional,
}


@pytest.mark.parametrize("function", WITHOUT_DATA.values(), ids=WITHOUT_DATA)
def test_derivatives_at_points_that_the_loss_makes(function):
    """Nothing of them belongs to an example: they are derived, like weights that are computed."""
    torch.manual_seed(0)

    def losses(model, x):
        return (function(model.field).squeeze(-1) - model.head(x)).square().mean(1)

    model, x = Fields().double(), torch.randn(4, 3, dtype=torch.float64)
    check_model(model, x, losses)
    check_products(model, x, losses)


def test_derivatives_by_points_that_then_meet_data_are_refused():
    """They are the examples' own, or shared by all of them: zeros do not tell."""
    model = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 4))
    x = torch.randn(3, 4)

    def losses(model, x, start=torch.zeros):
        latent = start(len(x), 2, requires_grad=True)
        (step,) = torch.autograd.grad((model(latent) - x).square().sum(), latent, create_graph=True)
        return (model(latent - 0.1 * step) - x).square().sum(1)

    with pytest.raises(gs.UnsupportedOperationError, match="belongs to no example"):
        gs.per_example_norms(model, x, losses)
    with (
        pytest.raises(gs.UnsupportedOperationError, match="belongs to no example"),
        gs.track(model, batch_size=3) as tracker,
    ):
        tracker.backward(losses(model, x))

    def of_the_batch(model, x):
        return losses(model, x, lambda *size, **options: torch.zeros_like(x[:, :2], **options))

    expected = oracle_sqnorms(model, x, of_the_batch)
    assert_sqnorms(gs.per_example_norms(model, x, of_the_batch), expected, 1e-4)


@pytest.mark.parametrize("size", [1, 3, 4])
def test_derivatives_by_a_constant_of_all_examples(size):
    """They are sums over the examples, also of a constant with as many numbers as examples."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    x = torch.randn(size, 4, dtype=torch.float64)

    def shifted(model, x, like):
        shift = like().requires_grad_()
        found = model(x + shift).square().sum(1)
        return found, *torch.autograd.grad(found.sum(), shift, create_graph=True)

    def losses(model, x):
        found, slope = shifted(model, x, lambda: torch.zeros_like(x))
        return found + size * slope.sum(1)

    def backward(of_slope):
        with gs.track(model, batch_size=size) as tracker:
            found, slope = shifted(model, x, lambda: torch.zeros(4).double())
            (found.mean() + of_slope(slope).sum()).backward()
        return tracker.stats

    assert_sqnorms(backward(lambda slope: slope), oracle_sqnorms(model, x, losses), 1e-9)
    if size > 1:
        with pytest.raises(gs.CoupledExamplesError, match="makes more than a sum"):
            backward(torch.square)


POINTS = {
    "ones": lambda size: torch.ones(size, 1).double().requires_grad_(),
    "full": lambda size: torch.full((size, 1), 0.5, dtype=torch.float64, requires_grad=True),
    "linspace": lambda size: torch.linspace(0, 1, size).double().view(-1, 1).requires_grad_(),
    "arange": lambda size: torch.arange(size).view(-1, 1).double().requires_grad_(),
}
MEET = {
    "joined": lambda x, at: torch.cat([x, at], 1),
    "multiplied": lambda x, at: torch.cat([x, x[:, :1] * at], 1),
    "encoded": lambda x, at: torch.cat([x, (at[:, 0] * 3).sin().unsqueeze(1)], 1),
    "encoded at frequencies": lambda x, at: torch.cat(
        [x, (at[..., None] * torch.tensor([1.0, 2.0])).cos().flatten(1)[:, 1:]], 1
    ),
    "stacked": lambda x, at: torch.stack([x[:, :1], x[:, 1:], at], -1).squeeze(1),
}


@pytest.mark.parametrize("meet", MEET.values(), ids=MEET)
@pytest.mark.parametrize("points", POINTS.values(), ids=POINTS)
def test_derivatives_by_points_beside_the_data(points, meet):
    """Constants with a row for each example which they meet as such are the examples' own."""
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    x = torch.randn(5, 2, dtype=torch.float64)

    def losses(model, x):
        at = points(len(x))
        found = model(meet(x, at))
        (slope,) = torch.autograd.grad(found.sum(), at, create_graph=True)
        return (found + slope).square().sum(1)

    expected = oracle_sqnorms(model, x, losses)
    assert_sqnorms(gs.per_example_norms(model, x, losses), expected, 1e-9)
    for _ in range(2):
        with gs.track(model, batch_size=5) as tracker:
            losses(model, x).mean().backward()
        assert_sqnorms(tracker.stats, expected, 1e-9)


@pytest.mark.parametrize(
    "shared",
    [
        lambda x, at: x + at.mean() + at,
        lambda x, at: x + (at * torch.ones(4)).mean(0) + at,
        lambda x, at: (x[:, None] + at).mean(1) + at,
        lambda x, at: x + at.mT + at,
        lambda x, at: x + at.sin().flip(0) + at,
        lambda x, at: torch.cat([x[:, 1:], at.cos().cumsum(0)], 1) + at,
        lambda x, at: x + at[:, 0] + at,
        lambda x, at: x + (at[:, 0] * 2).sin() + at,
        lambda x, at: x + at.roll(1, 0),
        lambda x, at: x + at.roll(shifts=1, dims=0),
        lambda x, at: x + at.flip(dims=(0,)),
        lambda x, at: x + at.expand(4, 4).transpose(dim0=0, dim1=1),
        lambda x, at: x + at[torch.tensor([1, 0, 3, 2])],
    ],
)
@pytest.mark.parametrize("first", [True, False])
def test_derivatives_by_points_that_examples_share_are_refused(shared, first):
    """Though they also meet the examples row by row, before or after."""
    model, x = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)), torch.randn(4, 4)

    def losses(model, x):
        at = torch.linspace(0, 1, 4).view(-1, 1).requires_grad_()
        mixed = shared(x, at) if first else (x + at) * shared(x, at)
        found = model(mixed)
        (slope,) = torch.autograd.grad(found.sum(), at, create_graph=True)
        return (found + slope).square().sum(1)

    with pytest.raises(gs.GradStatsError), gs.track(model, batch_size=4) as tracker:
        tracker.backward(losses(model, x))


def points_of_each(codes):
    return torch.linspace(0, 1, 4).double()[:, None].expand(len(codes), 4, 1).clone()


def slopes(model, codes, points):
    """Return losses (B,) of a field's slopes at points (B, 4, 1), each example's own."""
    points.requires_grad_()
    field = model(torch.cat([codes[:, None].expand(-1, points.shape[1], -1), points], -1))
    (slope,) = torch.autograd.grad(field.sum(), points, create_graph=True)
    return (slope - 1).square().sum((1, 2))


@pytest.mark.parametrize("batch", [1, 3, 4])
def test_derivatives_by_points_that_are_repeated_for_each_example(batch):
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    for _ in range(2):  # also where the operations are repeated
        check_model(
            model,
            torch.randn(batch, 3, dtype=torch.float64),
            lambda model, codes: slopes(model, codes, points_of_each(codes)),
            fusing=(True,),
        )


def test_derivatives_by_points_of_all_examples_are_refused():
    """There are as many points as examples, but each example meets them all."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    codes = torch.randn(4, 3, dtype=torch.float64)

    def losses(model, codes):
        points = torch.linspace(0, 1, 4).double()[:, None].requires_grad_()
        each = points.expand(4, 4, 1)
        field = model(torch.cat([codes[:, None].expand(-1, 4, -1), each], -1))
        (slope,) = torch.autograd.grad(field.sum(), points, create_graph=True)
        return field.sum((1, 2)) + slope[:, 0].square()

    with pytest.raises(gs.GradStatsError):
        gs.per_example_norms(model, codes, losses)
    with pytest.raises(gs.GradStatsError), gs.track(model, batch_size=4):
        losses(model, codes).mean().backward()


@pytest.mark.parametrize("at", ["points", "data"])
def test_forward_mode_is_refused(at):
    """What tangents depend on leaves no trace in the graph of the losses."""
    model, x = Fields(), torch.randn(1, 3)

    def losses(model, x):
        at_ = points().float() if at == "points" else x[:, :1]
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(at_, torch.ones_like(at_))
            tangent = forward_ad.unpack_dual(model.field(dual)).tangent
        return (tangent.squeeze(-1) - model.head(x)).square().mean(1)

    for fused in (True, False):
        with (
            pytest.raises(gs.UnsupportedOperationError, match="forward_ad"),
            gs.track(model, batch_size=1, fused=fused),
        ):
            losses(model, x)


def test_a_linearised_function_is_refused_and_jvp_is_not():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    batch = torch.randn(5, 3).double(), torch.randn(5, 3).double()

    def linearised(model, batch):
        result, along = torch.func.linearize(model, batch[0])
        return result.sum(1) + along(batch[1]).square().sum(1)

    def by_jvp(model, batch):
        result, slope = torch.func.jvp(model, batch[:1], batch[1:])
        return result.sum(1) + slope.square().sum(1)

    with pytest.raises(gs.UnsupportedOperationError, match=r"linearize.*torch\.func\.jvp"):
        gs.per_example_norms(model, batch, linearised)
    expected = oracle_sqnorms(model, batch, by_jvp)
    assert_sqnorms(gs.per_example_norms(model, batch, by_jvp), expected, 1e-9)


class Learner(nn.Module):
    """A classifier whose weights each task adapts for itself before it is judged."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = (nn.Parameter(torch.randn(*s).double()) for s in ((3, 4), (3,)))

    def forward(self, support, labels, queries):
        one = torch.zeros_like(support[:, :1, :1])
        of_weight = one.expand(-1, 3, 4).clone().requires_grad_()
        of_bias = one[..., 0].expand(-1, 3).clone().requires_grad_()
        weight, bias = self.weight + of_weight, self.bias + of_bias
        for _ in range(2):
            scores = support @ weight.mT + bias[:, None]
            losses = functional.cross_entropy(scores.mT, labels, reduction="none").mean(1)
            found = torch.autograd.grad(losses.sum(), (of_weight, of_bias), create_graph=True)
            weight, bias = weight - 0.1 * found[0], bias - 0.1 * found[1]
        return queries @ weight.mT + bias[:, None]


def test_weights_that_each_example_adapts_for_itself():
    """As meta-learning does (MAML), through its own gradient steps."""
    tasks = torch.randn(5, 6, 4).double(), torch.randint(3, (5, 6)), torch.randn(5, 7, 4).double()

    def losses(model, tasks):
        return model(*tasks).square().sum((1, 2))

    model = Learner()
    check_model(model, tasks, losses, fusing=(True,))
    check_products(model, tasks, losses)


def test_the_recipe_for_weights_that_each_example_adapts():
    """As the guide has it; nearer at hand are ``new_zeros`` and derivatives by the weights."""
    made = "torch.zeros_like(x[:, :1, None]).expand(-1, *w.shape).clone().requires_grad_()"
    page_with(f"`delta = {made}`")
    model, x = nn.Linear(4, 3, bias=False).double(), torch.randn(5, 4).double()

    def losses(model, x, made=made):
        w = model.weight
        delta = eval(made, {"torch": torch, "x": x, "w": w})
        first = ((w + delta) @ x[..., None]).tanh() - x[:, :3, None].sin()
        (step,) = torch.autograd.grad(first.square().sum(), delta, create_graph=True)
        return ((w + delta - 0.1 * step) @ x.cos()[..., None]).square().sum((1, 2))

    check_model(model, x, losses, fusing=(True,))
    with pytest.raises(gs.UnsupportedOperationError, match="belongs to no example"):
        elsewhere = "x.new_zeros(len(x), *w.shape).requires_grad_()"
        gs.per_example_norms(model, x, partial(losses, made=elsewhere))


@pytest.mark.parametrize("differentiated", [False, True])
def test_gradients_of_weights_in_the_loss_say_how_to_write_them(differentiated):
    model, x = nn.Linear(4, 3), torch.randn(5, 4)

    def losses(model, x):
        each = model(x).square().sum(1)
        (found,) = torch.autograd.grad(
            each.mean(), model.weight, retain_graph=True, create_graph=differentiated
        )
        return each / found.norm()

    with pytest.raises(gs.CoupledExamplesError, match=r"zeros_like\(x\[:, :1, None\]\)") as caught:
        gs.per_example_norms(model, x, losses)
    assert ("gs.track" in str(caught.value)) is not differentiated
    if not differentiated:
        expected = oracle_sqnorms(model, x, losses)
        with gs.track(model, batch_size=5) as tracker:
            tracker.backward(losses(model, x))
        assert_sqnorms(tracker.stats, expected, 1e-4)
