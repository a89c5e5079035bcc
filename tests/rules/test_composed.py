"""Operations that are written with others: distances, similarities, equations of many operands."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import gradstats as gs
from benchmarks.ledger import peak_memory
from tests.oracle import check_model
from tests.rules.operation import Operation, check_operation, check_refused, normal

BATCH, WIDTH = 3, 4
DIRECT = "donot_use_mm_for_euclid_dist"


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: torch.tensordot(x, m.w, 1) + m.b,
        lambda m, x: torch.addmm(m.b, x, m.w, alpha=2),
        lambda m, x: torch.baddbmm(m.b, x[:, None], m.w.expand(len(x), -1, -1)),
        lambda m, x: functional.linear(x, m.w.T, m.b[:1]),
    ],
    ids=["tensordot", "addmm", "baddbmm", "linear"],
)
def test_inside_a_checkpoint(function):
    """Which stops what it runs again as soon as it has the tensors that the backward needs."""

    def run(m, x):
        return checkpoint(function, m, x, use_reentrant=False).sin()

    check_operation(run, {"w": (WIDTH, 2), "b": (2,)}, normal(BATCH, WIDTH))
    model = Operation(run, {"w": (WIDTH, 2), "b": (2,)}, upstream=True)
    check_model(model, (normal(BATCH, WIDTH),), penalised_loss, fusing=(True,))


def penalised_loss(model, batch):
    """The outputs' squares and those of their derivatives with respect to the inputs."""
    x = batch[0].detach().requires_grad_()
    losses = model(x).square().flatten(1).sum(1)
    (slope,) = torch.autograd.grad(losses.sum(), x, create_graph=True)
    return losses + slope.square().sum(1)


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0])
@pytest.mark.parametrize("count", [1, BATCH, 5])
@pytest.mark.parametrize(
    "shape", [(WIDTH,), (2, WIDTH), (BATCH, WIDTH), (2, 2, WIDTH)], ids=lambda s: f"{len(s)}:{s[0]}"
)
def test_distances_to_prototypes(shape, count, p):
    check_operation(
        lambda m, x: torch.cdist(x, m.w, p=p),
        {"w": (count, WIDTH)},
        normal(BATCH, *shape),
    )


def test_distances_to_so_many_prototypes_that_products_find_them():
    check_operation(lambda m, x: torch.cdist(x, m.w), {"w": (30, WIDTH)}, normal(BATCH, WIDTH))


def test_distances_from_prototypes():
    check_operation(lambda m, x: torch.cdist(m.w, x).mT, {"w": (5, WIDTH)}, normal(BATCH, WIDTH))
    check_operation(lambda m, x: torch.cdist(m.w, x), {"w": (5, WIDTH)}, normal(BATCH, 2, WIDTH))


def test_distances_of_folded_rows_and_of_heads():
    def folded(m, x):
        return torch.cdist(x.flatten(0, 1), m.w).unflatten(0, (BATCH, -1))

    check_operation(folded, {"w": (5, WIDTH)}, normal(BATCH, 2, WIDTH))
    # Prototypes of two heads.
    check_operation(
        lambda m, x: torch.cdist(x.transpose(0, 1), m.w).transpose(0, 1),
        {"w": (2, 5, WIDTH)},
        normal(BATCH, 2, WIDTH),
    )


def test_distances_of_points_used_twice():
    def function(m, x):
        near = torch.cdist(x.flatten(0, 1), m.w * 2) + torch.cdist(m.w, x.flatten(0, 1)).T
        return (near @ m.w).unflatten(0, (BATCH, -1))

    check_operation(function, {"w": (5, WIDTH)}, normal(BATCH, 2, WIDTH))
    check_operation(function, {"w": (5, WIDTH)}, normal(BATCH, 1, WIDTH))


def test_distances_of_zero():
    """Have no gradient."""
    x = normal(BATCH, WIDTH)
    model = Operation(lambda m, x: torch.cdist(x, m.w), {"w": (5, WIDTH)}, False)
    with torch.no_grad():
        model.w[2] = x[1]
    stats = gs.per_example_norms(model, x, lambda m, x: m(x).sum(1))
    torch.testing.assert_close(stats.sqnorm, torch.tensor([5.0, 4, 5]).double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_distances_that_rounding_keeps_from_zero(dtype):
    """Where products find them, prototypes that began as data are not quite there."""
    torch.manual_seed(0)
    model = Operation(lambda m, x: torch.cdist(x, m.w).square(), {"w": (40, WIDTH)}, False).to(
        dtype
    )
    x = model.w.detach()[:BATCH].clone()
    x[1:] += 1e-2 * torch.randn(BATCH - 1, WIDTH, dtype=dtype)

    def nearest(model, x):
        return model(x).min(1).values

    apart = torch.cdist(x.double(), model.w.detach().double(), compute_mode=DIRECT).min(1).values
    found = gs.per_example_norms(model, x, nearest).sqnorm.double()
    torch.testing.assert_close(found, 4 * apart.square(), rtol=1e-2, atol=1e-9)


def test_distances_hold_no_gradient_of_each_example():
    x, model = normal(64, 32), Operation(lambda m, x: torch.cdist(x, m.w), {"w": (48, 32)}, False)
    ledger = peak_memory(lambda: gs.per_example_norms(model, x, lambda m, x: m(x).sum(1)))
    assert ledger.largest < len(x) * model.w.numel() / 8


def test_distances_of_rows_in_another_order():
    order = torch.tensor([2, 0, 1])
    check_operation(
        lambda m, x: torch.cdist(x[order], m.w)[order.argsort()],
        {"w": (5, WIDTH)},
        normal(BATCH, WIDTH),
    )


def test_distances_along_the_examples_are_refused():
    check_refused(
        lambda m, x: torch.cdist(x.t(), m.w),
        {"w": (5, BATCH)},
        normal(BATCH, WIDTH),
        error=gs.ExampleAxisError,
        match="cdist.*'w'",
    )


@pytest.mark.parametrize("dim", [-1, 1, 2])
def test_cosine_similarity(dim):
    check_operation(
        lambda m, x: functional.cosine_similarity(x[:, None], m.w[None], dim=dim),
        {"w": (BATCH, WIDTH)},
        normal(BATCH, WIDTH),
    )


def test_cosine_similarity_along_an_axis_counted_from_the_front_of_the_larger():
    check_operation(
        lambda m, x: functional.cosine_similarity(m.w, x), {"w": (2, WIDTH)},
        normal(BATCH, 2, WIDTH),
    )  # fmt: skip


def test_cosine_similarity_with_integers():
    check_operation(
        lambda m, x: functional.cosine_similarity(x, m.w, dim=-1),
        {"w": (WIDTH,)},
        torch.tensor([[1, -2, 3, 0], [0, 4, 1, 1], [2, 2, -5, 1]]),
    )


@pytest.mark.parametrize("size", [1e-9, 0.0])
def test_cosine_similarity_of_vectors_shorter_than_epsilon(size):
    """PyTorch divides by epsilon there, and differentiates as if by the norm."""

    def function(m, x):
        scale = torch.tensor([[1.0], [size]], dtype=x.dtype)
        return functional.cosine_similarity(m.first(x) * scale, m.w * scale, dim=-1)

    layers = {"first": nn.Linear(WIDTH, WIDTH), "w": (2, WIDTH)}
    check_operation(function, layers, normal(BATCH, 2, WIDTH))


def test_cosine_similarity_to_one_vector():
    check_operation(
        lambda m, x: functional.cosine_similarity(m.w, x, dim=-1), {"w": (WIDTH,)},
        normal(BATCH, 2, WIDTH),
    )  # fmt: skip
    check_operation(
        lambda m, x: functional.cosine_similarity(x, m.w[None]) + x[:, 0], {"w": (WIDTH,)},
        normal(BATCH, WIDTH),
    )  # fmt: skip


@pytest.mark.parametrize("keepdim", [True, False])
@pytest.mark.parametrize("p", [1.0, 2.0])
def test_pairwise_distance(p, keepdim):
    check_operation(
        lambda m, x: functional.pairwise_distance(x, m.w, p=p, keepdim=keepdim),
        {"w": (2, WIDTH)},
        normal(BATCH, 2, WIDTH),
    )


@pytest.mark.parametrize(
    "equation, data, weights",
    [
        ("bi,oij,bj->bo", [(BATCH, 4), (BATCH, 5)], [(6, 4, 5)]),
        ("bi,ir,or->bo", [(BATCH, 4)], [(4, 2), (6, 2)]),
        ("ir,or,bi->bo", [(BATCH, 4)], [(4, 2), (6, 2)]),
        ("bthd,hde,bt->bthe", [(BATCH, BATCH, 2, 4), (BATCH, BATCH)], [(2, 4, 4)]),
        ("b...d,de,e->b...e", [(BATCH, 2, 4)], [(4, 5), (5,)]),
        ("bi,ia,ja,jk->bk", [(BATCH, 4)], [(4, 2), (5, 2), (5, 3)]),
        ("tbi,ij,bj->bt", [(2, BATCH, 4), (BATCH, 5)], [(4, 5)]),
    ],
)
def test_equations_of_many_operands(equation, data, weights):
    terms = equation.split("->")[0].split(",")
    names = [f"w{number}" for number in range(len(weights))]
    shapes = dict(zip(names, weights, strict=True))

    def function(m, *xs):
        xs, ws = [*xs], [getattr(m, name) for name in names]
        operands = [xs.pop(0) if "b" in term else ws.pop(0) for term in terms]
        return torch.einsum(equation, *operands)

    if equation.startswith("t"):
        check_operation(
            lambda m, x, y: function(m, x.transpose(0, 1), y), shapes,
            normal(BATCH, 2, 4), normal(BATCH, 5),
        )  # fmt: skip
    else:
        check_operation(function, shapes, *(normal(*shape) for shape in data))


def test_equations_of_many_operands_that_bring_examples_together_are_refused():
    check_refused(
        lambda m, x, y: torch.einsum("bi,ij,cj->bc", x, m.w, y * m.v),
        {"w": (4, 5), "v": (5,)},
        normal(BATCH, 4),
        normal(BATCH, 5),
        error=gs.CoupledExamplesError,
        match="several examples",
    )


@pytest.mark.parametrize("positions", [2, BATCH])
def test_tensor_products(positions):
    def function(m, x):
        last = torch.tensordot(x, m.w, dims=1) + torch.tensordot(x, m.w, ([2], [0])) ** 2
        middle = torch.tensordot(m.v, x, dims=([0], [1])).transpose(0, 1)
        both = torch.tensordot(x, m.u, 2)[:, None]
        rows = (
            torch.inner(x, m.w.t())
            + m.w.t().inner(x).movedim(0, -1)
            + x.inner(m.w[:, 0])[..., None]
        )
        return torch.cat([part.flatten(1) for part in (last, middle, both, rows)], 1)

    parameters = {"w": (WIDTH, 5), "v": (positions, 2), "u": (positions, WIDTH)}
    check_operation(function, parameters, normal(BATCH, positions, WIDTH))


def test_solutions_for_vectors():
    """As many matrices as right-hand sides, or one of both for an example in a loop."""

    def function(m, x):
        matrices = x + 5 * torch.eye(WIDTH).double()
        own = torch.linalg.solve(matrices, m.w)
        each = [torch.linalg.solve(matrix, m.w[0]) for matrix in matrices]
        return own * torch.stack([torch.linalg.solve(m.v, row) for row in each])

    parameters = {"w": (BATCH, WIDTH), "v": torch.randn(WIDTH, WIDTH) + 5 * torch.eye(WIDTH)}
    check_operation(function, parameters, normal(BATCH, WIDTH, WIDTH))


def test_products_with_vectors():
    check_operation(lambda m, x: x.mv(m.w) + torch.mv(x, m.w) ** 2, {"w": (4,)}, normal(BATCH, 4))


def test_chains_of_products():
    parameters = {"w": (WIDTH, 5), "u": (5, 3), "v": (3,)}
    for shape in ((), (WIDTH,)):
        check_operation(
            lambda m, x: torch.linalg.multi_dot([x.view(-1, WIDTH), m.w, m.u, m.v]).view(BATCH, -1),
            parameters,
            normal(BATCH, *shape, WIDTH),
        )
    check_operation(
        lambda m, x: torch.linalg.multi_dot([x, m.w, m.w.mT, m.w @ m.u]),
        {"w": (WIDTH, 5), "u": (5, 3)},
        normal(BATCH, WIDTH),
    )


@pytest.mark.parametrize("scales", [{}, {"beta": 0.5, "alpha": 2.0}], ids=str)
def test_outer_products_that_are_added(scales):
    def function(m, x):
        rows = torch.addr(x, x[:, 0], m.w, **scales)
        return rows + x.T.addr(m.w, x[:, 1], **scales).T * m.w.addr(m.w, m.w)[:1]

    check_operation(function, {"w": (WIDTH,)}, normal(BATCH, WIDTH))
    model = Operation(function, {"w": (WIDTH,)}, upstream=True)
    check_model(model, (normal(BATCH, WIDTH),), penalised_loss, fusing=(True,))


@pytest.mark.parametrize("scales", [{}, {"beta": 0.5, "alpha": 2.0}, {"beta": 0}], ids=str)
def test_products_with_a_vector_that_are_added(scales):
    def function(m, x):
        one = torch.addmv(m.b, x, m.w, **scales)
        return one * x[:, 0].addmv(x.sin(), m.w, **scales)

    for size in (1, BATCH):
        check_operation(function, {"w": (WIDTH,), "b": (size,)}, normal(BATCH, WIDTH))


@pytest.mark.parametrize("count", [2, BATCH])
def test_elements_taken_along_an_axis(count):
    """At indices of the examples: of a table that all share, broadcast, or of all its elements."""

    def function(m, x):
        places = (x[:, None, :] > 0).long()
        whole = torch.take_along_dim(m.w, places.flatten(1) * count).view(BATCH, -1)
        return (
            m.w[None].take_along_dim(places, 1).flatten(1)
            * torch.take_along_dim((x @ m.w.T)[:, :, None], places[:, :, :1], dim=-2).flatten(1)
            + whole
        )

    check_operation(function, {"w": (count, WIDTH)}, normal(BATCH, WIDTH))


@pytest.mark.parametrize("dim", [0, -2])
def test_rows_taken_along_the_first_axis(dim):
    ids = torch.randint(3, (BATCH, WIDTH))
    check_operation(
        lambda m, x: torch.take_along_dim(m.w, ids[: len(x)] * (x > 0), dim) * x,
        {"w": (3, WIDTH)}, normal(BATCH, WIDTH),
    )  # fmt: skip


def test_elements_selected_by_a_mask():
    def function(m, x):
        result = torch.zeros_like(x)
        result[x > 0] = m.w.masked_select(x > 0) * torch.masked_select(x, x > 0)
        return result + (x * m.w).masked_fill(x > 0, 0)

    check_operation(function, {"w": (WIDTH,)}, normal(BATCH, WIDTH))


@pytest.mark.skipif(
    not hasattr(functional, "linear_cross_entropy"), reason="PyTorch 2.11 does not have it"
)
@pytest.mark.parametrize("classes", [(5,), (5, 2)], ids=str)
@pytest.mark.parametrize("biased", [True, False])
def test_cross_entropy_of_a_layer(classes, biased):
    """The output layer and the loss of language models as one function."""
    targets = torch.randint(5, (4, *classes[1:]))
    targets[1] = -100

    def function(m, x, targets):
        bias = m.bias if biased else None
        return functional.linear_cross_entropy(
            x, m.weight, targets, linear_bias=bias, reduction="none"
        )

    parameters = {"weight": (*classes, 3)} | ({"bias": classes} if biased else {})
    check_operation(function, parameters, normal(4, 3), targets)


@pytest.mark.skipif(
    not hasattr(functional, "linear_cross_entropy"), reason="PyTorch 2.11 does not have it"
)
def test_cross_entropy_of_a_layer_in_chunks_is_refused():
    """Its operator computes the weight's gradient of all examples at once."""
    targets, options = torch.randint(5, (4,)), nn.LinearCrossEntropyOptions(batch_chunk_size=2)

    def function(m, x, targets):
        return functional.linear_cross_entropy(
            x, m.weight, targets, reduction="none", options=options
        )

    check_refused(function, {"weight": (5, 3)}, normal(4, 3), targets, match="'weight'")
