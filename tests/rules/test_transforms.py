"""torch.vmap of trained data and of parameters, and what other transforms hide."""

import pytest
import torch
from torch import Tensor, nn
from torch._functorch import vmap as functorch
from torch.nn import functional

import gradstats as gs
from tests.oracle import assert_sqnorms, oracle_sqnorms
from tests.rules.operation import Operation, check_operation, check_refused, normal, uneven_loss

BATCH, WIDTH = 3, 4  # positions are as many as examples, so that shapes tell nothing


def alone(row: Tensor) -> Tensor:
    return row.sin() * row.sum(-1, keepdim=True)


# Made before all contexts, as modules make them.
NORMS = torch.vmap(torch.linalg.norm)


def in_the_order_of_positions(m, x):
    turned = torch.vmap(alone, in_dims=1)(m.layer(x))  # (T, B, d)
    return turned.transpose(0, 1)


LAYER = {"layer": nn.Linear(WIDTH, 2)}

OVER_EXAMPLES = {
    "to the front": lambda m, x: torch.vmap(alone)(m.layer(x)),
    "made before": lambda m, x: NORMS(m.layer(x))[:, None],
    "to another axis": lambda m, x: torch.vmap(alone, out_dims=1)(m.layer(x)).transpose(0, 1),
    "each with its own": lambda m, x: torch.vmap(torch.dot)(m.layer(x)[:, 0], x[:, 1, :2]),
    "several results": lambda m, x: torch.cat(
        torch.vmap(lambda r: (r.cos(), r.sum(1)), in_dims=0, out_dims=(1, 0))(m.layer(x))[1:], 1
    ),
    "one in another": lambda m, x: torch.vmap(torch.vmap(alone))(m.layer(x)),
}
OVER_OTHERS = {
    "positions": lambda m, x: torch.vmap(alone, in_dims=1, out_dims=1)(m.layer(x)),
    "positions first": in_the_order_of_positions,
    "features": lambda m, x: torch.vmap(alone, in_dims=-1, out_dims=-1)(m.layer(x)),
    "of what the function has": lambda m, x: each_position(m.layer(x)),
    "one in another": lambda m, x: torch.vmap(torch.vmap(alone), in_dims=1, out_dims=1)(m.layer(x)),
    "several results": lambda m, x: torch.vmap(
        lambda r: (r.sum(-1), r.cos()), in_dims=1, out_dims=(0, 2)
    )(m.layer(x))[1],
    "in pieces": lambda m, x: torch.vmap(alone, in_dims=1, out_dims=1, chunk_size=2)(m.layer(x)),
}


def each_position(h: Tensor) -> Tensor:
    return torch.vmap(lambda place: h[:, place].tanh())(torch.arange(BATCH)).transpose(0, 1)


@pytest.mark.parametrize("function", OVER_EXAMPLES.values(), ids=OVER_EXAMPLES)
def test_trained_data_mapped_over_the_examples(function):
    check_operation(function, LAYER, normal(BATCH, BATCH, WIDTH))


@pytest.mark.parametrize("function", OVER_OTHERS.values(), ids=OVER_OTHERS)
def test_trained_data_mapped_over_something_else(function):
    check_operation(function, LAYER, normal(BATCH, BATCH, WIDTH), fusing=(True,))


RETURNED = {
    "mapped over examples": lambda h, x: torch.vmap(lambda row: h)(x),
    "beside what is mapped": lambda h, x: torch.vmap(lambda row: (row, h))(x)[1],
    "mapped over numbers": lambda h, x: torch.vmap(lambda number: h)(torch.arange(BATCH)),
    "mapped twice": lambda h, x: torch.vmap(torch.vmap(lambda each: h))(x).select(1, 0),
}


@pytest.mark.parametrize("name", RETURNED)
def test_trained_data_that_is_returned_as_it_is(name):
    """It is repeated along the mapped axis, and has its examples along its own."""
    x = normal(BATCH, 3, WIDTH)
    function = RETURNED[name]
    check_operation(lambda m, x: function(m.layer(x), x)[0], LAYER, x, fusing=(True,))
    one = Operation(lambda m, x: function(m.layer(x), x)[:, 0], LAYER, upstream=False)
    with pytest.raises(gs.ExampleAxisError, match=r"belong to the examples \[0, 0, 0\]"):
        gs.per_example_norms(one, (x,), uneven_loss)


def test_data_that_is_returned_as_it_is():
    check_operation(
        lambda m, x: m.layer(torch.vmap(lambda n: (n, x), out_dims=(0, None))(torch.arange(2))[1]),
        LAYER,
        normal(BATCH, 3, WIDTH),
        fusing=(True,),
    )


@pytest.mark.parametrize("axis", [0, 1])
def test_trained_data_with_the_examples_along_another_axis(axis):
    def losses(model: nn.Module, batch) -> Tensor:
        rows = torch.vmap(alone, in_dims=axis, out_dims=axis)(model(batch)).transpose(0, 1)
        return (rows * torch.arange(1, 3)).cos().sum((1, 2))

    model, x = nn.Linear(WIDTH, 2).double(), normal(BATCH, BATCH, WIDTH)
    turned = oracle_sqnorms(model, x.transpose(0, 1), lambda m, b: losses(m, b.transpose(0, 1)))
    found = gs.per_example_norms(model, x, losses, batch_dim=1)
    assert_sqnorms(found, turned, 1e-9)


MATRIX = {"w": (3, WIDTH)}
MODELS = {"weights": (2, 5, WIDTH), "biases": (2, 5)}

PARAMETERS = {
    "a layer": (LAYER, lambda m, x: torch.vmap(m.layer, in_dims=1, out_dims=1)(x)),
    "a layer of each example": (LAYER, lambda m, x: torch.vmap(m.layer)(x)),
    "a layer of each vector": (LAYER, lambda m, x: torch.vmap(torch.vmap(m.layer))(x)),
    "as a dict": (
        LAYER,
        lambda m, x: torch.vmap(
            lambda p, rows: torch.func.functional_call(m.layer, p, (rows,)), in_dims=(None, 0)
        )(dict(m.layer.named_parameters()), x),
    ),
    "a result's axis in a tuple": (LAYER, lambda m, x: torch.vmap(m.layer, out_dims=(0,))(x)),
    "rows of a matrix": (
        MATRIX,
        lambda m, x: x @ torch.vmap(functional.softmax, (0, None))(m.w, 0).T,
    ),
    "rows by their numbers": (
        MATRIX,
        lambda m, x: x @ torch.vmap(lambda i: m.w[i] * i)(torch.arange(1, 3)).T,
    ),
    "several models": (
        MODELS,
        lambda m, x: torch.vmap(
            lambda w, b, rows: functional.linear(rows, w, b).tanh(), in_dims=(0, 0, None)
        )(m.weights, m.biases, x).transpose(0, 1),
    ),
}  # fmt: skip


@pytest.mark.parametrize("parameters, function", PARAMETERS.values(), ids=PARAMETERS)
def test_vmap_of_parameters(parameters, function):
    x = normal(BATCH, BATCH, WIDTH)
    check_operation(function, parameters, x, fusing=(True,))
    model = Operation(function, parameters, upstream=False)
    with (
        pytest.raises(gs.UnsupportedOperationError, match=r"torch\.vmap.*fused=True: pass that"),
        gs.track(model, batch_size=BATCH, fused=False),
    ):
        model(x)


def test_losses_mapped_over_the_examples_are_computed_at_once():
    calls = []

    def one(output: Tensor, target: Tensor) -> Tensor:
        calls.append(output.shape)
        return functional.cross_entropy(output, target)

    def losses(model: nn.Module, batch) -> Tensor:
        x, y = batch
        return torch.vmap(one)(model(x), y)

    model = nn.Linear(WIDTH, 5).double()
    batch = normal(BATCH, WIDTH), torch.tensor([1, 0, 4])
    expected = oracle_sqnorms(model, batch, losses)
    calls.clear()
    assert_sqnorms(gs.per_example_norms(model, batch, losses), expected, 1e-9)
    assert calls == [(5,)]


def test_the_same_random_numbers_for_all_are_refused_with_parameters():
    def dropped(m, x):
        drop = lambda row: functional.dropout(m.layer(row), 0.5)  # noqa: E731
        return torch.vmap(drop, randomness="same")(x)

    parameters = {"layer": nn.Linear(WIDTH, 2)}
    check_refused(dropped, parameters, normal(BATCH, WIDTH), match="inside a torch.func transform")


def test_examples_mapped_inside_a_function_that_is_mapped_over_them_are_refused():
    """Inside, each meets every other, which took the losses for those of one example each."""

    def pairs(m, x):
        h = m.layer(x)
        return torch.vmap(lambda a: torch.vmap(lambda b: (a * b).sum())(h).sum())(h)

    check_refused(
        pairs,
        {"layer": nn.Linear(WIDTH, 2)},
        normal(BATCH, WIDTH),
        error=(gs.ExampleAxisError, gs.CoupledExamplesError),
        match="example",
    )


HIDDEN = {
    "functionalize": lambda h: torch.func.functionalize(torch.sin)(h),
    "gradient, the same random numbers": lambda h: torch.vmap(
        torch.func.grad(lambda v: (v * h[0, 0]).sum()), randomness="same"
    )(h),
}


@pytest.mark.parametrize("function", HIDDEN.values(), ids=HIDDEN)
def test_other_transforms_of_trained_data_are_refused(function):
    check_refused(
        lambda m, x: function(m.layer(x).transpose(0, 1)).transpose(0, 1),
        {"layer": nn.Linear(WIDTH, 2)},
        normal(BATCH, BATCH, WIDTH),
        match=r"inside a torch\.func transform.*detach",
    )


def test_transforms_of_what_has_no_gradient_are_served():
    def slopes(m, x):
        return m.layer(x) * torch.func.grad(lambda v: v.pow(3).sum())(x)[..., :2]

    parameters = {"layer": nn.Linear(WIDTH, 2)}
    check_operation(slopes, parameters, normal(BATCH, WIDTH), gradient_of_data=False)


OVER_NUMBERS = {
    "seen": lambda x, n: torch.vmap(lambda one: (x * one).sum(-1))(n).t(),
    "seen, then no more": lambda x, n: torch.vmap(lambda one: (x * one).sum(-1) + one + one)(n).t(),
    "returned beside": lambda x, n: torch.vmap(lambda one: (x, one + one))(n)[0].sum((0, 2))[
        :, None
    ],
    "returned, then seen no more": lambda x, n: torch.vmap(torch.vmap(lambda one: x), out_dims=0)(
        n[:, None]
    ).sum((0, 1)),
}


@pytest.mark.parametrize("function", OVER_NUMBERS.values(), ids=OVER_NUMBERS)
def test_numbers_mapped_by_functions_of_data(function):
    """What comes of data that the function sees is of the examples, without a gradient too."""

    def of_data(x):
        return function(x, torch.arange(1, 3).to(x))

    width = of_data(normal(1, WIDTH)).shape[1]
    check_operation(
        lambda m, x: m.layer(of_data(x)),
        {"layer": nn.Linear(width, 2)},
        normal(BATCH, WIDTH),
        gradient_of_data=False,
    )


def test_rows_mapped_beside_those_of_other_examples_are_refused():
    def paired(m, x):
        h = m.layer(x)  # (B, T, 2)
        return torch.vmap(torch.dot)(h.flatten(0, 1), h.transpose(0, 1).flatten(0, 1)).view(
            BATCH, 2
        )

    error = (gs.ExampleAxisError, gs.CoupledExamplesError)
    check_refused(paired, LAYER, normal(BATCH, 2, WIDTH), error=error, match="example")


SERVED = {
    "gradient": lambda h: torch.func.grad(lambda v: v.pow(3).sum())(h),
    "slope": lambda h: torch.func.jvp(torch.sin, (h,), (torch.ones_like(h),))[1],
    "gradients of each position": lambda h: torch.vmap(
        torch.func.grad(lambda v: v.pow(3).sum()), 1, 1
    )(h),
    "gradients of each example": lambda h: torch.vmap(torch.func.grad(lambda v: v.pow(3).sum()))(h),
}


@pytest.mark.parametrize("function", SERVED.values(), ids=SERVED)
def test_other_transforms_of_trained_data(function):
    check_operation(
        lambda m, x: function(m.layer(x).transpose(0, 1)).transpose(0, 1),
        LAYER,
        normal(BATCH, BATCH, WIDTH),
        fusing=(True,),
    )


FIRST_USED = {
    "cast": lambda w, v: functional.linear(v, w.to(v.dtype)),
    "cast like data": lambda w, v: functional.linear(v, w.to(v)),
    "expanded": lambda w, v: (w[0].expand_as(v) * v).sum() * w,
    "zeros": lambda w, v: functional.linear(
        v, w.new_zeros(3, 2).index_add(0, torch.tensor([2, 0]), w)
    ),
}


@pytest.mark.parametrize("function", FIRST_USED.values(), ids=FIRST_USED)
def test_parameters_first_used_inside_a_gradient_of_each_example(function):
    """What a transform makes of a parameter is its own, also of the parameter alone."""

    def gradients(m, x):
        return torch.vmap(torch.func.grad(lambda v: function(m.w, v).sin().sum()))(x)

    check_operation(gradients, {"w": (2, 2)}, normal(BATCH, 2), fusing=(True,))


@pytest.mark.parametrize("width", [BATCH, WIDTH])
def test_jacobians_of_data_by_vmap(width):
    """Nothing of them is mapped, but they belong to the examples; they were taken for constants."""

    def jacobian(x):
        x = x.clone().requires_grad_()
        sums = alone(x).sum(0)
        each = lambda v: torch.autograd.grad(sums, x, v, retain_graph=True)[0]  # noqa: E731
        return torch.vmap(each)(torch.eye(width).double()).sum(0)

    parameters = {"layer": nn.Linear(width, 2)}
    check_operation(
        lambda m, x: m.layer(jacobian(x)),
        parameters,
        normal(BATCH, width),
        gradient_of_data=False,
        fusing=(True,),
    )


def test_transforms_with_detached_weights_are_served():
    def slopes(m, x):
        return m.layer(x) * torch.func.grad(
            lambda v: (v @ m.layer.weight.detach().t()).sin().sum()
        )(x)

    parameters = {"layer": nn.Linear(WIDTH, WIDTH)}
    check_operation(slopes, parameters, normal(BATCH, WIDTH), gradient_of_data=False)


def test_vmap_outside_contexts_is_as_before():
    gs.per_example_norms(nn.Linear(2, 1), torch.randn(3, 2), lambda m, x: m(x)[:, 0])
    x = torch.randn(3, 2)
    calls = []

    def function(row):
        calls.append(row.shape)
        return row.sum()

    torch.testing.assert_close(torch.vmap(function)(x), x.sum(1))
    assert calls == [(2,)]
    compiled = torch.compile(torch.vmap(torch.sin), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), x.sin())


def test_results_that_out_dims_do_not_fit():
    with pytest.raises(ValueError, match=r"out_dims=\(0, 1, 2\)"):
        torch.vmap(lambda r: (r, r), out_dims=(0, 1, 2))(torch.randn(2, 3))
    model = Operation(
        lambda m, x: torch.vmap(lambda r: (r, r), 1, (0, 1, 2))(m.layer(x))[0],
        {"layer": nn.Linear(WIDTH, 2)},
        False,
    )
    with pytest.raises(ValueError, match=r"out_dims=\(0, 1, 2\)"):
        gs.per_example_norms(model, (normal(BATCH, BATCH, WIDTH),), uneven_loss)


class Boxed:
    """An operand of torch.vmap that is no tensor, as those of tensordict are."""

    def __init__(self, tensor):
        self.tensor = tensor


def test_operands_of_other_libraries(monkeypatch):
    """Which replace functions of PyTorch's for them, some after gradstats was imported."""
    open_operands = functorch._process_batched_inputs

    def opened(in_dims, args, function):
        args = tuple(item.tensor if isinstance(item, Boxed) else item for item in args)
        count, dims, operands, structure = open_operands(in_dims, args, function)
        return count, dims, [Boxed(operands[0]), *operands[1:]], structure

    def batched(dims, operands, level, structure):
        inner = [getattr(item, "tensor", item) for item in operands]
        return create(dims, inner, level, structure)

    create = functorch._create_batched_inputs
    monkeypatch.setattr(functorch, "_process_batched_inputs", opened)
    monkeypatch.setattr(functorch, "_create_batched_inputs", batched)
    weights = Boxed(normal(4, 3))

    def function(m, x):
        return x * m.w + torch.vmap(lambda row, own: row * own)(weights, x)

    check_operation(function, {"w": (3,)}, normal(4, 3))

    def of_parameters(m, x):
        return torch.vmap(lambda row, own: row * own * m.w)(weights, x)

    check_refused(of_parameters, {"w": (3,)}, normal(4, 3), match="a loop over their slices")
