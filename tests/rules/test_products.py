"""Matrix products with one tracked operand."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

import gradstats as gs
from tests.oracle import (
    assert_products,
    assert_sqnorms,
    check_model,
    flat,
    oracle_gradients,
    oracle_sqnorms,
    perturbed,
    taken_for,
)
from tests.rules.operation import (
    Operation,
    check_operation,
    check_refused,
    normal,
    uneven_loss,
)

size = st.integers(1, 4)


@settings(max_examples=25)
@given(st.lists(size, max_size=3), size, size, size, st.booleans())
def test_linear_on_inputs_of_two_to_five_dimensions(between, batch, inputs, outputs, bias):
    layer = nn.Linear(inputs, outputs, bias=bias)
    check_operation(lambda m, x: m.layer(x), {"layer": layer}, normal(batch, *between, inputs))


def test_linear_with_more_positions_than_a_gram_block():
    check_operation(lambda m, x: m.layer(x), {"layer": nn.Linear(70, 60)}, normal(2, 150, 70))
    check_operation(lambda m, x: m.layer(x), {"layer": nn.Linear(3, 2)}, normal(2, 150, 3))


def test_linear_along_another_example_axis():
    options = {"batch_dim": 1, "loss_fn": lambda m, b: m(*b).square().sum((0, 2))}
    check_operation(lambda m, x: m.layer(x), {"layer": nn.Linear(4, 2)}, normal(5, 3, 4), **options)
    # As many positions as examples: only batch_dim tells them apart.
    check_operation(lambda m, x: m.layer(x), {"layer": nn.Linear(4, 2)}, normal(3, 3, 4), **options)


@pytest.mark.parametrize("batch", [1, 3, 5])
@pytest.mark.parametrize("made", ["weight", "bias"])
def test_linear_of_a_constant_vector_with_what_was_made_of_one_example(made, batch):
    """With as many elements as there are examples too: it holds nothing of any."""

    def forward(m, x):
        constant = torch.linspace(0.5, 1.5, 3).double()
        if made == "weight":
            return torch.stack([functional.linear(constant, m.h(r).view(4, 3), m.own) for r in x])
        return torch.stack([functional.linear(constant, m.own, m.h(r)[:4]) for r in x])

    own = (4,) if made == "weight" else (4, 3)
    check_operation(forward, {"h": nn.Linear(3, 12), "own": own}, normal(batch, 3))


def test_linear_that_sums_over_the_examples_is_refused():
    x = normal(3)
    check_refused(
        lambda m, x: m.layer(x).expand(3),
        {"layer": nn.Linear(3, 1)},
        x,
        error=gs.ExampleAxisError,
        match="layer",
    )
    check_refused(
        lambda m, x: m.layer(x).mT,
        {"layer": nn.Linear(3, 3)},
        normal(5, 3),
        error=gs.ExampleAxisError,
        match="layer",
        batch_dim=1,
    )


def test_linear_whose_weight_is_data_is_refused():
    check_refused(
        lambda m, x: functional.linear(m.w, x).mT, {"w": (2, 4)}, normal(3, 4), match=r"linear.*'w'"
    )


def of_each(function):
    """Return what applies ``function(model, row)`` to the examples one by one."""
    return lambda m, x: torch.cat([function(m, x[i : i + 1]) for i in range(len(x))])


# Layers of which a network makes the weight or the bias, each example its own.
MADE_OF_DATA = {
    "weight": lambda m, x: functional.linear(x, m.made(x).view(5, 4), m.b),
    "weight, with positions": lambda m, x: functional.linear(
        x.view(1, 2, 2), m.made(x).view(5, 4)[:, :2], m.b
    ).sum(1),
    "bias": lambda m, x: functional.linear(x, m.w, m.made(x)[0, :5]),
    "both": lambda m, x: functional.linear(
        functional.linear(x, m.w, m.made(x)[0, :5]), m.made(x).view(4, 5), m.b[:4]
    ),
    "addmm": lambda m, x: torch.addmm(m.b, x, m.made(x).view(4, 5)),
    "addmm, scaled": lambda m, x: torch.addmm(m.b, x, m.made(x).view(4, 5), beta=0.5, alpha=-2),
    "addmm without its input": lambda m, x: torch.addmm(
        m.b[:2], x @ m.w.T, m.made(x).view(5, 4)[:, :2], beta=0
    ),
    "addmm of a matrix of data": lambda m, x: torch.addmm(m.made(x)[0, :5], x, m.w.T),
}


@pytest.mark.parametrize("function", MADE_OF_DATA.values(), ids=MADE_OF_DATA)
def test_layers_of_which_each_example_makes_its_own(function):
    """Conditional biases and hypernetworks: what is data has a gradient of its own."""
    parameters = {"made": nn.Linear(4, 20), "b": (5,), "w": (5, 4)}
    check_operation(of_each(function), parameters, normal(3, 4))


def test_a_bias_that_the_only_example_makes():
    parameters = {"made": nn.Linear(4, 5), "w": (5, 4)}
    check_operation(lambda m, x: functional.linear(x, m.w, m.made(x)[0]), parameters, normal(1, 4))


def test_baddbmm_of_two_operands_of_data():
    def function(m, x):
        return torch.baddbmm(m.b, x, m.made(x), beta=0.5, alpha=2)

    check_operation(function, {"made": nn.Linear(4, 2), "b": (2,)}, normal(3, 4, 4))


def test_a_sum_that_is_multiplied_by_zero_is_not_read():
    def function(m, x):
        return torch.baddbmm(m.b + torch.nan, x, m.made(x), beta=0)

    model = Operation(function, {"made": nn.Linear(4, 2), "b": (2,)}, upstream=False)
    with gs.track(model, batch_size=3) as tracker:
        tracker.backward(model(normal(3, 4, 4)).sin().sum((1, 2)))
    assert tracker.stats.sqnorm.isfinite().all()
    assert not model.b.grad.any()


SHARED_BY_ALL = {
    "weight": lambda m, h: functional.linear(h, h[:, :4], m.b[:3]),
    "weight of one": lambda m, h: functional.linear(h[:, :2], h[0].view(2, 2), m.b[:2]),
    "bias of one": lambda m, h: functional.linear(h, m.w, h[0]),
    "bias of all": lambda m, h: functional.linear(h, m.w[:3], h[:, 0]),
    "addmm": lambda m, h: torch.addmm(m.b[:4], h[:, :3], h),
    "addmm of one": lambda m, h: torch.addmm(m.b[:2], h[:, :2], h[0].view(2, 2)),
    "addmm, transposed": lambda m, h: torch.addmm(m.b[:3], h, h.T),
    "addmm, scaled": lambda m, h: torch.addmm(m.b[:4], h[:, :3], h, alpha=2),
    "addmm with a sum of one": lambda m, h: torch.addmm(h[0], h, m.w),
}


@pytest.mark.parametrize("function", SHARED_BY_ALL.values(), ids=SHARED_BY_ALL)
def test_layers_that_examples_make_for_others_are_refused(function):
    check_refused(
        lambda m, x: function(m, m.layer(x)),
        {"layer": nn.Linear(4, 4), "b": (4,), "w": (4, 4)},
        normal(3, 4),
        error=gs.GradStatsError,
        match="example",
    )


SPELLINGS = {
    "matmul": torch.matmul,
    "method": lambda x, w: x.matmul(w),
    "operator": lambda x, w: x @ w,
    "keyword": lambda x, w: torch.matmul(x, other=w),
}
MATRIX_SPELLINGS = {
    "mm": torch.mm,
    "mm method": lambda x, w: x.mm(w),
    "mm keyword": lambda x, w: torch.mm(x, mat2=w),
}


@pytest.mark.parametrize("spelling", SPELLINGS.values(), ids=SPELLINGS)
@pytest.mark.parametrize("shape", [(3, 4), (3, 5, 4), (3, 3, 4), (3, 2, 5, 4)], ids=str)
def test_data_times_matrix(spelling, shape):
    check_operation(lambda m, x: spelling(x, m.w), {"w": (4, 2)}, normal(*shape))


@pytest.mark.parametrize("spelling", MATRIX_SPELLINGS.values(), ids=MATRIX_SPELLINGS)
def test_two_dimensional_products(spelling):
    check_operation(lambda m, x: spelling(x, m.w), {"w": (4, 2)}, normal(3, 4))


MATMUL_CASES = {
    # name: (parameter, data, function)
    "matrix times data": ((5, 4), (3, 4, 2), lambda w, x: w @ x),
    "matrix times square data": ((3, 3), (3, 3, 3), lambda w, x: w @ x),
    "matrix times four axes": ((5, 4), (3, 2, 4, 2), lambda w, x: w @ x),
    "data times vector": ((4,), (3, 4), lambda w, x: x @ w),
    "positions times vector": ((4,), (3, 5, 4), lambda w, x: x @ w),
    "vector times data": ((4,), (3, 4, 5), lambda w, x: w @ x),
    "head by head": ((2, 4, 5), (3, 2, 6, 4), lambda w, x: x @ w),
    "head by head, weight first": ((2, 5, 4), (3, 2, 4, 6), lambda w, x: w @ x),
    "broadcast head of the weight": ((1, 4, 5), (3, 2, 6, 4), lambda w, x: x @ w),
    "broadcast head of the data": ((2, 4, 5), (3, 1, 6, 4), lambda w, x: x @ w),
    "as many heads as examples": ((3, 4, 5), (3, 3, 6, 4), lambda w, x: x @ w),
    "leading one": ((1, 4, 5), (3, 6, 4), lambda w, x: x @ w),
    "expanded for bmm": ((4, 5), (3, 6, 4), lambda w, x: torch.bmm(x, w.expand(3, 4, 5))),
    "unsqueezed for bmm": ((4, 5), (3, 6, 4), lambda w, x: x.bmm(w[None].expand(3, -1, -1))),
    "bmm, weight first": ((6, 4), (3, 4, 5), lambda w, x: torch.bmm(w.expand(3, 6, 4), x)),
    "expanded within the matrix": ((1, 4, 1), (3, 6, 4), lambda w, x: x @ w.expand(1, 4, 2)),
    "column": ((4, 1), (3, 5, 4), lambda w, x: x @ w),
    "data reused by every head": ((2, 4, 5), (3, 6, 4), lambda w, x: x.unsqueeze(1) @ w),
}


@pytest.mark.parametrize("case", MATMUL_CASES.values(), ids=MATMUL_CASES)
def test_matmul_shapes(case):
    parameter, data, function = case
    check_operation(lambda m, x: function(m.w, x), {"w": parameter}, normal(*data))


def test_a_vector_given_by_name():
    check_operation(lambda m, x: torch.mv(x, vec=m.w), {"w": (4,)}, normal(3, 4))


def test_options_of_products_are_refused():
    """They would be left out: a product in another dtype is another forward."""
    check_refused(
        lambda m, x: torch.mm(x, m.w, out_dtype=torch.float64), {"w": (4, 2)}, normal(3, 4),
        match="mm with out_dtype= has no rule.*'w'",
    )  # fmt: skip


def test_one_weight_for_each_example_is_refused():
    check_refused(
        lambda m, x: torch.bmm(x, m.w), {"w": (3, 4, 2)}, normal(3, 5, 4), match="bmm.*example.*'w'"
    )


ODD_BIASES = [(1,), (), (1, 2), (5, 2), (3, 5, 2)]


@pytest.mark.parametrize("bias", ODD_BIASES, ids=str)
def test_linear_with_a_bias_that_broadcasts(bias):
    parameters = {"w": (2, 4), "b": bias}
    check_operation(lambda m, x: functional.linear(x, m.w, m.b), parameters, normal(3, 5, 4))


@pytest.mark.parametrize("alpha, beta", [(1, 1), (2.5, 1), (1, -0.5), (0.25, 3), (2, 0), (0, 1)])
@pytest.mark.parametrize("bias", [(2,), (1, 2), (1,), (3, 2), (3, 1)], ids=str)
def test_addmm(alpha, beta, bias):
    def function(m, x):
        return torch.addmm(m.b, x, m.w, alpha=alpha, beta=beta)

    check_operation(function, {"w": (4, 2), "b": bias}, normal(3, 4))


def test_addmm_as_a_method_and_with_data_as_the_sum():
    check_operation(lambda m, x: m.b.addmm(x, m.w), {"w": (4, 2), "b": (2,)}, normal(3, 4))
    data = normal(3, 4), normal(3, 2)
    check_operation(lambda m, x, y: torch.addmm(y, x, m.w, beta=2), {"w": (4, 2)}, *data)
    check_operation(lambda m, x, y: y.addmm(x, m.w), {"w": (4, 2)}, *data)
    check_operation(lambda m, x: torch.addmm(m.b, x, matrix(), alpha=2), {"b": (2,)}, data[0])
    # The product belongs to no example; the sum does.
    parameters = {"v": (3, 4), "w": (4, 2)}
    check_operation(lambda m, y: torch.addmm(y, m.v, m.w, alpha=2), parameters, data[1])


# As losses that pull examples to trained centres have them, in PyTorch's older forms too.
DISTANCES = {
    "in place": lambda d, m, x: d.addmm_(x, m.w, beta=0.5, alpha=-2),
    "in place of them": lambda d, m, x: d.addmm_(x, m.w, beta=0),
    "in place, numbers first": lambda d, m, x: d.addmm_(1, -2, x, m.w),
    "numbers first": lambda d, m, x: torch.addmm(2, d, -2, x, m.w),
    "one number first": lambda d, m, x: d.addmm(3, x, m.w),
    "in batches, in place": lambda d, m, x: (
        d[:, None].clone().baddbmm_(x[:, None], m.w.expand(3, -1, -1))
    ),
    "in batches, numbers first": lambda d, m, x: torch.baddbmm(
        2, d[:, None], -2, x[:, None], m.w.expand(3, -1, -1)
    ),
    "in batches, a weight on the left": lambda d, m, x: (
        d[:, :, None].clone().baddbmm_(m.w.t().expand(3, -1, -1), x[:, :, None], alpha=2)
    ),
    "in batches, in place of them": lambda d, m, x: (
        d[:, None].clone().baddbmm_(x[:, None], m.w.expand(3, -1, -1), beta=0)
    ),
}


@pytest.mark.filterwarnings("ignore:This overload")
@pytest.mark.parametrize("added", DISTANCES.values(), ids=DISTANCES)
def test_products_added_to_distances(added):
    def function(m, x):
        distances = x.square().sum(1, keepdim=True) * m.scale
        result = added(distances, m, x)
        return distances + result.reshape(3, -1)

    check_operation(function, {"w": (4, 2), "scale": (2,)}, normal(3, 4))
    check_operation(function, {"w": (3, 2), "scale": (2,)}, normal(3, 3))


@pytest.mark.filterwarnings("ignore:This overload")
def test_products_added_in_place_where_others_show_it():
    """Each row of the view stays with its example."""

    def function(m, x):
        distances = x.square().sum(1, keepdim=True) * m.scale
        distances[:, :1].addmm_(1, -2, x, m.w)
        return distances.exp()

    check_operation(function, {"w": (4, 1), "scale": (2,)}, normal(3, 4))


@pytest.mark.filterwarnings("ignore:This overload")
def test_products_added_in_place_to_what_holds_no_example_are_refused():
    for function in (
        lambda m, x: m.b.clone().addmm_(x, m.w),
        lambda m, x: m.b.clone().addmm_(1, 2, x, m.w),
    ):
        check_refused(function, {"w": (4, 2), "b": (3, 2)}, normal(3, 4), match="addmm_ .*'b'")


def test_addmm_that_sums_over_the_examples_is_refused():
    check_refused(
        lambda m, x: torch.addmm(m.b, matrix(), x),
        {"b": (4,)},
        normal(2, 4),
        error=gs.ExampleAxisError,
        match="parameter 'b'.*which example each row",
    )


def test_addmm_with_a_row_for_each_of_an_examples_rows():
    check_operation(
        lambda m, x: torch.addmm(m.b, x.flatten(0, 1), m.w).unflatten(0, x.shape[:2]),
        {"w": (4, 2), "b": (6, 2)},
        normal(3, 2, 4),
    )


def matrix():
    """Return a constant of shape (4, 2)."""
    return torch.arange(8.0, dtype=torch.float64).view(4, 2).sin()


@pytest.mark.parametrize("positions", [1, 3, 5])
def test_addmm_on_rows_of_examples_and_positions_folded(positions):
    def conv1d(m, x):
        out = torch.addmm(m.b, x.view(-1, x.size(-1)), m.w)
        return out.view(*x.shape[:-1], m.b.shape[0])

    check_operation(conv1d, {"w": (4, 2), "b": (2,)}, normal(3, positions, 4))


@pytest.mark.parametrize("fold", ["view", "reshape", "flatten", "torch.reshape"])
def test_layers_on_folded_rows(fold):
    def function(m, x):
        rows = {
            "view": lambda: x.view(-1, 4),
            "reshape": lambda: x.reshape(10 * 3, 4),
            "flatten": lambda: x.flatten(0, 1),
            "torch.reshape": lambda: torch.reshape(x, (-1, 4)),
        }[fold]()
        return m.second(m.norm(m.first(rows))).view(3, 10, 2)

    layers = {
        "first": nn.Linear(4, 4),
        "norm": nn.LayerNorm(4),
        "second": nn.Linear(4, 2, bias=False),
    }
    check_operation(function, layers, normal(3, 10, 4))


@pytest.mark.parametrize("alpha, beta", [(1, 1), (2.5, -0.5), (2, 0)])
@pytest.mark.parametrize("bias", [(3, 5, 2), (1, 5, 2), (5, 2), (2,), (1, 1, 1)], ids=str)
def test_baddbmm(alpha, beta, bias):
    def function(m, x):
        return torch.baddbmm(m.b, x, m.w.expand(3, 4, 2), alpha=alpha, beta=beta)

    check_operation(function, {"w": (4, 2), "b": bias}, normal(3, 5, 4))


OWN_SLICES = {
    "matmul": lambda m, x: torch.matmul(x, m.w.expand(3, -1, -1).tanh()),
    "from the left": lambda m, x: torch.matmul(m.w.expand(3, -1, -1).tanh().mT, x.mT),
    "bmm": lambda m, x: torch.bmm(x, m.w.unsqueeze(0).repeat(3, 1, 1)),
    "baddbmm": lambda m, x: torch.baddbmm(x[..., :2], x, m.w.repeat(3, 1, 1), beta=2, alpha=-1),
    "baddbmm, tracked twice": lambda m, x: torch.baddbmm(
        m.w.expand(3, -1, -1).tanh()[:, :1], x, m.w.repeat(3, 1, 1), beta=2
    ),
    "einsum": lambda m, x: torch.einsum("btd,bde->tbe", x, m.w.expand(3, 4, 2).exp()).mT.mT,
    "repeated again": lambda m, x: torch.matmul(
        x, m.w.expand(3, -1, -1).tanh().expand(2, 3, 4, 2)
    ).transpose(0, 1),
    "among other batch axes": lambda m, x: x[:, None] @ m.w.expand(3, 2, 4, 2).tanh(),
}


@pytest.mark.parametrize("function", OWN_SLICES.values(), ids=OWN_SLICES)
def test_what_was_repeated_for_each_example_before_it_was_changed(function):
    def examples_first(m, x):
        out = function(m, x)
        return out.transpose(0, 1) if out.shape[:2] == (5, 3) else out

    check_operation(examples_first, {"w": (4, 2)}, normal(3, 5, 4))


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("widths", [(0, 0), (0, 5), (5, 0)])
@pytest.mark.parametrize("positions", [1, 4])
def test_layers_without_inputs_or_outputs(widths, positions):
    """Beside a layer that has both: of losses that use nothing else no gradient has elements."""
    model = nn.ModuleList([nn.Linear(*widths), nn.Linear(2, 1)]).double()
    nn.init.constant_(model[0].bias, 0.5)

    def losses(model, batch):
        return (
            model[0](batch[0]).square().sum((1, 2)) * batch[2] + model[1](batch[1]).square()[:, 0]
        )

    batch = normal(3, positions, widths[0]), normal(3, 2), normal(3)
    check_model(model, batch, losses)
    model.requires_grad_(False)
    for weight in (model[0].weight, model[0].bias):
        weight.requires_grad_()
    if widths[1]:
        check_model(model, batch, losses)
        return
    with pytest.raises(gs.TrackingError, match="or that have no elements"):
        gs.per_example_norms(model, batch, losses)
    with gs.track(model, batch_size=3) as tracker:
        tracker.backward(losses(model, batch))
    assert model[0].weight.grad.shape == model[0].weight.shape
    with pytest.raises(gs.TrackingError, match="no backward reached the tracked parameters"):
        tracker.stats.sqnorm.sum()


@pytest.mark.parametrize("shape", [(4, 5), (4, 3, 5), (4, 4, 5), (4, 3, 1), (1, 5)], ids=str)
def test_linear_layer_with_a_vector(shape):
    check_operation(
        lambda m, x: functional.linear(x, m.w).sin(), {"w": (shape[-1],)}, normal(*shape)
    )


def test_linear_layer_with_a_vector_and_a_bias_is_refused():
    check_refused(
        lambda m, x: functional.linear(x, m.w, m.b), {"w": (5,), "b": ()}, normal(4, 3, 5),
        match="linear with a vector and a bias",
    )  # fmt: skip


def triangle(m) -> torch.Tensor:
    return m.w.tril(-1) + torch.diag(m.w.diagonal().exp())


SYSTEMS = {
    "columns": lambda m, x: torch.linalg.solve(triangle(m), x.T).T,
    "rows": lambda m, x: torch.linalg.solve(triangle(m), x, left=False),
    "triangular": lambda m, x: torch.linalg.solve_triangular(triangle(m), x.T, upper=False).T,
    "triangular, of many": lambda m, x: torch.linalg.solve_triangular(
        triangle(m).expand(2, 4, 4), x.T.expand(2, 4, 3), upper=False, unitriangular=True
    ).permute(2, 0, 1),
    "from its root": lambda m, x: torch.cholesky_solve(x[:, :, None], triangle(m)),
    "density": lambda m, x: torch.distributions.MultivariateNormal(
        m.v, scale_tril=triangle(m)
    ).log_prob(x),
    "each its own": lambda m, x: torch.linalg.solve(torch.diag_embed(x.exp()), triangle(m)),
}


@pytest.mark.parametrize("system", SYSTEMS)
def test_systems_of_equations(system):
    check_operation(
        lambda m, x: SYSTEMS[system](m, x * m.v), {"w": (4, 4), "v": (4,)}, normal(3, 4)
    )


SOLVERS = {
    "solve": lambda m, x: torch.linalg.solve(triangle(m), x.mT),
    "solve from the right": lambda m, x: torch.linalg.solve(triangle(m), x, left=False),
    "solve_triangular": lambda m, x: torch.linalg.solve_triangular(triangle(m), x.mT, upper=False),
    "solve_triangular from the right": lambda m, x: torch.linalg.solve_triangular(
        triangle(m), x, upper=False, left=False
    ),
    "cholesky_solve": lambda m, x: torch.cholesky_solve(x.mT, triangle(m)),
}


@pytest.mark.parametrize("solver", SOLVERS)
def test_solutions_lie_in_memory_as_they_do_outside(solver):
    strides = []

    def forward(m, x):
        solved = SOLVERS[solver](m, x * m.v)
        strides.append(solved.stride())
        return solved

    check_operation(forward, {"w": (4, 4), "v": (4,)}, normal(3, 5, 4))
    assert len(set(strides)) == 1, strides


def test_vectors_times_vectors():
    check_operation(lambda m, x: torch.outer(x @ m.v, m.v), {"v": (4,)}, normal(3, 4))
    check_operation(lambda m, x: m.v.ger((x @ m.v).tanh()).mT, {"v": (4,)}, normal(3, 4))
    fixed = normal(2)
    check_operation(
        lambda m, x: m.layer(torch.outer(fixed, x @ m.v).mT),
        {"v": (4,), "layer": nn.Linear(2, 3)},
        normal(3, 4),
    )


SPARSE_PRODUCTS = {
    "matmul": lambda m, x: x @ m.w,
    "mm": lambda m, x: torch.mm(x, m.w) * m.b,
    "sparse.mm": lambda m, x: torch.sparse.mm(x, m.w) + m.b,
    "addmm": lambda m, x: torch.addmm(m.b, x, m.w),
    "linear": lambda m, x: functional.linear(x, m.w.t(), m.b),
}


@pytest.mark.filterwarnings("ignore:Sparse CS[RC] tensor support")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc], ids=str)
@pytest.mark.parametrize("function", SPARSE_PRODUCTS.values(), ids=SPARSE_PRODUCTS)
def test_sparse_data(function, layout):
    """As counts of words are."""
    torch.manual_seed(0)
    data = normal(5, 6)
    data[torch.rand(5, 6) < 0.6] = 0
    model = Operation(function, {"w": (6, 3), "b": (3,)}, upstream=False)
    expected = oracle_sqnorms(model, (data,), uneven_loss)
    sparse = (data.to_sparse(layout=layout),)
    assert_sqnorms(gs.per_example_norms(model, sparse, uneven_loss), expected, 1e-9)
    with gs.track(model, batch_size=5) as tracker:
        tracker.backward(uneven_loss(model, sparse))
    assert_sqnorms(tracker.stats, expected, 1e-9)
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    uneven_loss(model, sparse).mean().backward()
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-12, atol=1e-14)
    model.zero_grad()
    other = perturbed(model)
    first, second = (flat(oracle_gradients(each, (data,), uneven_loss)) for each in (model, other))
    products = gs.inner_products(model, sparse, other, sparse, uneven_loss)
    assert_products(products, first, second, 1e-9)
    checkpoints = gs.Checkpoints([model.state_dict()], lr=1.0)
    scores = gs.influence(model, [sparse], [sparse], uneven_loss, checkpoints, progress=False)
    assert_products(torch.tensor(np.asarray(scores)), first, first, 1e-9)


def test_operations_of_sparse_data_without_a_rule():
    check_refused(
        lambda m, x: (x * m.w).to_dense(), {"w": (6,)}, normal(5, 6).to_sparse(),
        match=r"mul of sparse data has no rule.*'w'.*x\.to_dense\(\)",
    )  # fmt: skip


@pytest.mark.parametrize("repeat", ["repeat", "repeat_interleave"])
def test_positions_repeated_for_examples_and_heads(repeat):
    """Each row of the examples' heads meets a matrix of its own, in either order."""

    def function(m, x):
        times = {"repeat": (len(x), 1, 1), "repeat_interleave": (len(x), 0)}[repeat]
        rows = getattr(m.w, repeat)(*times)
        return torch.bmm(x.flatten(0, 1), rows).unflatten(0, (len(x), 2))

    check_operation(function, {"w": (2, 4, 3)}, normal(3, 2, 5, 4))


@pytest.mark.parametrize("size", ["small", "large"])
@pytest.mark.parametrize("kind", ["linear", "matmul", "addmm"])
def test_a_weight_that_changes_once_it_was_used_on_data_without_a_gradient(kind, size):
    """PyTorch's own backward does not read it there."""

    def function(m, x):
        products = {
            "linear": lambda: functional.linear(x, m.w.T, m.b),
            "matmul": lambda: x @ m.w + m.b,
            "addmm": lambda: torch.addmm(m.b, x.flatten(0, 1), m.w).unflatten(0, x.shape[:2]),
        }
        result = products[kind]()
        with torch.no_grad():
            m.w.clamp_(-0.1, 0.1)
        return result.sin()

    model = Operation(function, {"w": (6, 3), "b": (3,)}, upstream=False)
    batch = (normal(5, 4, 6),)
    expected = oracle_sqnorms(model, batch, uneven_loss)
    with taken_for(size):
        got = gs.per_example_norms(copy.deepcopy(model), batch, uneven_loss)
        assert_sqnorms(got, expected, 1e-9)
        for fused in (True, False):
            plain, own = copy.deepcopy(model), copy.deepcopy(model)
            with gs.track(own, batch_size=5, fused=fused) as tracker:
                tracker.backward(uneven_loss(own, batch))
            assert_sqnorms(tracker.stats, expected, 1e-9)
            uneven_loss(plain, batch).mean().backward()
            for one, other in zip(own.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(one.grad, other.grad)


def test_sparse_data_of_one_example_at_a_time():
    """With as many rows as there are examples, these were taken for one of each."""

    def function(m, x):
        rows = [(row.T.to_sparse() @ m.w) for row in x]
        return torch.stack(rows).sin()

    # A dense product adds in another order than a sparse one.
    check_operation(
        function, {"w": (4, 2)}, normal(3, 4, 3), gradient_of_data=False, fusing=(True,)
    )


class AddsConstants(nn.Module):
    """Adds a product of the model's own tensors, which has as many rows as there are examples."""

    def __init__(self, add):
        super().__init__()
        self.layer = nn.Linear(3, 4).double()
        self.register_buffer("first", normal(4, 5))
        self.register_buffer("second", normal(5, 4))
        self.add = add

    def forward(self, x):
        return self.add(self.layer(x), self.first, self.second).sin()


ADDS_CONSTANTS = {
    "to rows": torch.addmm,
    "to columns": lambda h, a, b: torch.addmm(h.T, a, b).T,
    "to one column": lambda h, a, b: torch.addmm(h[:, :1], a, b),
    "to a stack": lambda h, a, b: torch.baddbmm(h[None], a[None], b[None])[0],
}


@pytest.mark.parametrize("add", ADDS_CONSTANTS.values(), ids=ADDS_CONSTANTS)
def test_products_of_constants_added_to_data(add):
    def losses(model, x):
        return model(x).square().sum(1)

    model, x = AddsConstants(add), normal(4, 3)
    gradients = torch.autograd.functional.jacobian(
        lambda w, b: torch.func.functional_call(
            model, {"layer.weight": w, "layer.bias": b}, (x,)
        ).square().sum(1),
        (model.layer.weight.detach(), model.layer.bias.detach()),
    )  # fmt: skip
    expected = sum(each.flatten(1).square().sum(1) for each in gradients)
    got = gs.per_example_norms(model, x, losses)
    torch.testing.assert_close(got.sqnorm, expected, rtol=1e-9, atol=0, check_dtype=False)
