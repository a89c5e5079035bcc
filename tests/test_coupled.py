"""Losses that depend on several examples have no per-example gradients, and are refused."""

import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

import gradstats as gs

from .oracle import assert_sqnorms, check_model, oracle_on_the_batch, oracle_sqnorms

BATCH, WIDTH = 3, 4


def batch():
    torch.manual_seed(0)
    return torch.randn(BATCH, WIDTH).double()


def written_out(h: torch.Tensor) -> torch.Tensor:
    """Return a contraction of each example's values, which PyTorch writes for the caller."""
    written = torch.empty(0).double()
    torch.tensordot(h, SQUARE, 1, out=written)
    return written


# What brings together the hidden values h (B, d) of all examples.
MIXES = {
    "centred": lambda h: h - h.mean(0),
    "centred, kept axis": lambda h: h - h.mean(dim=0, keepdim=True),
    "divided by a number": lambda h: h / h.std(),
    "centred, as numpy has it": lambda h: h - torch.mean(input=h, axis=0),
    "normalised": lambda h: functional.normalize(h, dim=0),
    "softmax": lambda h: h.softmax(0),
    "log_softmax": lambda h: functional.log_softmax(h, dim=-2),
    "cumsum": lambda h: h.cumsum(0),
    "norm over all": lambda h: functional.layer_norm(h, h.shape),
    "attention": lambda h: functional.scaled_dot_product_attention(h, h, h),
    "joined": lambda h: torch.cat([h, h.amax(0).expand_as(h)], 1),
    "written": lambda h: torch.zeros_like(h).copy_(h.mean(0).expand_as(h)),
    "written out": lambda h: h * written_out(h).mean(0),
}


# The same where a constant comes first, and the numbers of its columns stand for losses.
BEHIND_A_CONSTANT = {
    "cosine": lambda c, h: functional.cosine_similarity(c, h, dim=0),
    "cosine, broadcast": lambda c, h: functional.cosine_similarity(c.expand(2, -1, -1), h, dim=1)[
        0
    ],
    "distance": lambda c, h: functional.pairwise_distance(c, h.T),
    "vecdot": lambda c, h: torch.linalg.vecdot(c, h, dim=0),
    "cross": lambda c, h: torch.cross(c, h, dim=0).sum(1),
    "linalg.cross": lambda c, h: torch.linalg.cross(c, h, dim=0).sum(1),
    "trapezoid": lambda c, h: torch.trapezoid(c, h, dim=0),
}


@pytest.mark.parametrize("mix", BEHIND_A_CONSTANT.values(), ids=BEHIND_A_CONSTANT)
def test_values_of_all_examples_behind_a_constant(mix):
    model = nn.Linear(WIDTH, BATCH).double()
    model.register_buffer("constant", torch.randn(BATCH, BATCH).double())
    with pytest.raises(gs.CoupledExamplesError, match="depends on several examples"):
        gs.per_example_norms(model, batch(), lambda m, x: mix(m.constant, m(x)))


def test_a_mean_over_the_examples_beside_their_losses():
    """As of losses that spread examples over experts: refused with a way on, which is right."""
    model = nn.Linear(WIDTH, 3).double()

    def losses(m, x, each):
        shares = m(x).softmax(1)
        chosen = functional.one_hot(shares.argmax(1), 3).double().mean(0)
        spread = (chosen * shares).sum(1)
        return m(x).square().sum(1) + (spread if each else spread.mean())

    with pytest.raises(gs.CoupledExamplesError, match=r"help\(gs\.CoupledExamplesError\)"):
        gs.per_example_norms(model, batch(), partial(losses, each=False))
    assert "load-balancing" in gs.CoupledExamplesError.__doc__
    assert "Add these values to the losses" in gs.CoupledExamplesError.__doc__
    served = partial(losses, each=True)
    expected = oracle_sqnorms(model, batch(), served)
    assert_sqnorms(gs.per_example_norms(model, batch(), served), expected, 1e-9)


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_values_of_all_examples(mix):
    model = nn.Linear(WIDTH, WIDTH).double()
    with pytest.raises(gs.CoupledExamplesError, match="depends on several examples"):
        gs.per_example_norms(model, batch(), lambda m, x: mix(m(x)).square().sum(1))
    assert type(model.weight) is nn.Parameter


# What makes of all examples' hidden values one number, which a regulariser may add to each loss.
REGULARISERS = {
    "covariance": lambda h: (h.T @ h - torch.eye(WIDTH)).square().sum(),
    "off the diagonal": lambda h: (h.T @ h).fill_diagonal_(0).square().sum(),
    "cov": lambda h: torch.cov(h.T).square().sum(),
    "distances": lambda h: torch.cdist(h, h).mean(),
    "einsum": lambda h: torch.einsum("bd->d", h).square().sum(),
    "differences": lambda h: (h[1:] - h[:-1]).square().sum(),
    "a sum in Python": lambda h: sum(row.sum() for row in h),
    "mean loss": lambda h: functional.cross_entropy(h, torch.arange(BATCH)),
    "mean squared error": lambda h: functional.mse_loss(h, torch.zeros_like(h)),
    "norm": lambda h: torch.linalg.norm(h),
    "dot": lambda h: torch.dot(h[:, 0], h[:, 1]),
    "quantile": lambda h: h.quantile(0.5),
    "one example": lambda h: h[0].sum(),
    "one number": lambda h: h[0, 0],
}


@pytest.mark.parametrize("regulariser", REGULARISERS.values(), ids=REGULARISERS)
def test_one_number_of_all_examples(regulariser):
    def losses(m, x):
        h = m(x)
        return h.square().sum(1) + regulariser(h)

    with pytest.raises((gs.CoupledExamplesError, gs.ExampleAxisError)):
        gs.per_example_norms(nn.Linear(WIDTH, WIDTH).double(), batch(), losses)


PAIRS = {
    "cdist": lambda h: torch.cdist(h, h),
    "pdist": torch.pdist,
    "functional.pdist": functional.pdist,
    "cov": torch.cov,
    "corrcoef": torch.corrcoef,
    "products": lambda h: h @ h.T,
}


@pytest.mark.parametrize("pairs", PAIRS.values(), ids=PAIRS)
def test_every_example_with_every_other_in_a_backward_of_ones_own(pairs):
    """As many pairs as examples: shapes tell nothing."""
    model, x = nn.Linear(WIDTH, WIDTH).double(), torch.randn(3, WIDTH).double()
    refused = "every example with every other|more than a sum over the examples"
    with (
        pytest.raises((gs.CoupledExamplesError, gs.ExampleAxisError), match=refused),
        gs.track(model, batch_size=3),
    ):
        pairs(model(x)).square().mean().backward()
    with gs.track(model, batch_size=3) as tracker:
        weight = pairs(model(x)).square().mean().detach()
        tracker.backward(weight * model(x).sum(1))
    expected = oracle_sqnorms(model, x, lambda m, batch: weight * m(batch).sum(1))
    assert_sqnorms(tracker.stats, expected, 1e-9)


# Products of every example with every other that PyTorch returns as a view of what it computed.
VIEWS = {
    "einsum": lambda h: torch.einsum("id,jd->ij", h, h),
    "tensordot": lambda h: torch.tensordot(h, h, dims=([1], [1])),
    "linear": lambda h: functional.linear(h[:, None], h, torch.zeros(BATCH).double())[:, 0],
}
# What gives it another autograd node.
CHANGES = {
    "divided": lambda s: s.div_(0.5),
    "masked": lambda s: s.masked_fill_(torch.eye(BATCH, dtype=torch.bool), -9.0),
    "assigned": lambda s: s.__setitem__(torch.eye(BATCH, dtype=torch.bool), -9.0),
    "another view": lambda s: s.diagonal().fill_(-9.0),
    "function": lambda s: functional.relu(s, inplace=True),
    "twice": lambda s: s.add_(1).mul_(2),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("pairs", VIEWS.values(), ids=VIEWS)
def test_every_example_with_every_other_changed_in_place(pairs, change):
    def losses(m, x):
        scores = pairs(m(x))
        change(scores)
        return functional.cross_entropy(scores, torch.arange(BATCH), reduction="none")

    model = nn.Linear(WIDTH, WIDTH).double()
    with pytest.raises(gs.CoupledExamplesError, match="every example with every other"):
        gs.per_example_norms(model, batch(), losses)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("pairs", VIEWS.values(), ids=VIEWS)
def test_weights_from_all_examples_that_have_no_gradient(pairs, change):
    def losses(m, x):
        scores = pairs(m(x))
        change(scores)
        return scores.detach().sum(1) * m(x).sum(1)

    model = nn.Linear(WIDTH, WIDTH).double()
    expected = oracle_sqnorms(model, batch(), losses)
    assert_sqnorms(gs.per_example_norms(model, batch(), losses), expected, 1e-9)


SWAPPED = torch.tensor([1, 0, *range(2, BATCH)])
SQUARE = torch.eye(WIDTH).double()
GATES = [torch.linspace(-1, 1, 3 * WIDTH**2).double().view(3 * WIDTH, WIDTH)] * 2
GATES += [torch.zeros(3 * WIDTH).double()] * 2


def recurrent(h, state, bias=GATES[2]):
    """Return a GRU's outputs (B, d) on sequences of one step."""
    weights = [*GATES[:2], bias, GATES[3]]
    return torch.gru(h[:, None], state[None], weights, True, 1, 0.0, False, False, True)[0][:, 0]


def attention(h, keys, bias=SQUARE[0]):
    """Return the attention (B, d) of each example's one query to its one key."""
    shared = (GATES[0], GATES[2], None, None, False, 0.0, SQUARE, bias)
    keys = keys[None]
    return functional.multi_head_attention_forward(h[None], keys, keys, WIDTH, 2, *shared)[0][0]


# What moves or mixes rows and keeps their number.
SCRAMBLES = {
    "cumsum_": lambda h: h.clone().cumsum_(0),
    "take": lambda h: h.take(torch.arange(BATCH * WIDTH).view(WIDTH, BATCH).t()),
    "select_scatter": lambda h: h.select_scatter(h[1], 0, 0),
    "put": lambda h: h.put(torch.tensor([0]), h[2, :1]),
    "embedding": lambda h: functional.embedding(torch.arange(BATCH).flip(0), h),
    "fft": lambda h: torch.fft.fft(h, dim=0).real,
    "renorm": lambda h: h.renorm(2, 1, 1.0),
    "addmm": lambda h: torch.addmm(h, torch.ones(BATCH, BATCH).double(), h),
    "linear": lambda h: functional.linear(h.T, torch.ones(BATCH, BATCH).double()).T,
    "pooling": lambda h: functional.avg_pool1d(h.T, 3, 1, 1).T,
    "solve": lambda h: torch.linalg.solve(torch.eye(BATCH).double() + 1, h),
    "group_norm": lambda h: functional.group_norm(h[None], 1)[0],
    "pairs": lambda h: (h[:, None] * h).sum(1),
    "divided": lambda h: h / torch.linalg.norm(h, dim=0),
    "padding": lambda h: functional.pad(h[:-1], (0, 0, 1, 0)),
    "sparse.mm": lambda h: torch.sparse.mm(torch.ones(BATCH, BATCH).double().to_sparse(), h),
    "linalg.matmul": lambda h: torch.linalg.matmul(torch.ones(BATCH, BATCH).double(), h),
    "__rmatmul__": lambda h: h.__rmatmul__(torch.ones(BATCH, BATCH).double()),
    "addmm_": lambda h: (h * 1).addmm_(torch.ones(BATCH, BATCH).double(), h),
    "addmm, numbers first": lambda h: h.addmm(1, 2, torch.ones(BATCH, BATCH).double(), h),
    "addmm_, numbers first": lambda h: (h * 1).addmm_(
        1, -2, h, torch.ones(BATCH, WIDTH).double().T @ h
    ),
    "baddbmm, numbers first": lambda h: torch.baddbmm(
        1, h[None], 2, torch.ones(1, BATCH, BATCH).double(), h[None]
    )[0],
    "renorm_": lambda h: (h * 1).renorm_(2, 1, 1.0),
    "solve_ex": lambda h: torch.linalg.solve_ex(torch.eye(BATCH).double() + 1, h)[0],
    "lstsq": lambda h: torch.linalg.lstsq(torch.eye(BATCH).double() + 1, h)[0],
    "tensorsolve": lambda h: torch.linalg.tensorsolve(torch.eye(BATCH).double() + 1, h[:, 0])[
        :, None
    ],
    "householder_product": lambda h: torch.linalg.householder_product(
        h[:, :3], torch.ones(3).double()
    ),
    "ormqr": lambda h: torch.ormqr(torch.eye(BATCH).double() + 1, torch.ones(BATCH).double(), h),
    "beside others": lambda h: torch.cat([h.sort(0).values, h], 1)[:, 2 : 2 + WIDTH],
    "beside inputs": lambda h: torch.cat([h.sort(0).values, h.detach()], 1)[:, 2 : 2 + WIDTH],
    "stacked": lambda h: torch.stack([h.sort(0).values, h], 2).sum(2),
    "a mask over all": lambda h: h.masked_select(h > h.sort().values[:, 2:3]),
    "a bias of each": lambda h: functional.linear(torch.ones(BATCH, 2).double(), h[:, :2], h[:, 0]),
    "bilinear": lambda h: functional.bilinear(h[:, :2], h[:, :2], h[:, :4].view(BATCH, 2, 2)),
    "a cell's state of another": lambda h: torch.gru_cell(h, h[SWAPPED], *GATES),
    "a cell's bias of one": lambda h: torch.rnn_tanh_cell(h, h, SQUARE, SQUARE, h[0], h[0]),
    "a layer's state of others": lambda h: recurrent(h, h[SWAPPED]),
    "a layer's bias of one": lambda h: recurrent(h, h.detach(), bias=torch.cat([h[0]] * 3)),
    "keys of others": lambda h: attention(h, h[SWAPPED]),
    "an attention's bias of one": lambda h: attention(h, h, bias=h[0]),
}


@pytest.mark.filterwarnings("ignore:This overload")
@pytest.mark.parametrize("scramble", SCRAMBLES.values(), ids=SCRAMBLES)
def test_rows_that_are_moved_or_mixed_unseen(scramble):
    first, second = nn.Linear(WIDTH, WIDTH).double(), nn.Linear(WIDTH, WIDTH).double()
    model = nn.ModuleList([first, second])
    with pytest.raises((gs.CoupledExamplesError, gs.ExampleAxisError)):
        gs.per_example_norms(model, batch(), lambda m, x: m[1](scramble(m[0](x))).square().sum(1))


def test_a_row_of_zeros_in_the_place_of_an_example():
    """Its loss has a gradient too, as those of the others have that stay in their places."""
    model = nn.ModuleList([nn.Linear(WIDTH, WIDTH).double(), nn.Linear(WIDTH, WIDTH).double()])

    def losses(m, x):
        return m[1](functional.pad(m[0](x)[1:], (0, 0, 1, 0))).square().sum(1)

    stats = gs.per_example_norms(model, batch(), losses)
    assert_sqnorms(stats, oracle_on_the_batch(model, batch(), losses), 1e-9)


# Operations on the hidden values h (B, B) and one number y (B,) of each example, which stands where
# h has its positions; operands are given by name.
BY_NAME = {
    "add": lambda h, y: torch.add(h, other=y),
    "mul": lambda h, y: h.mul(other=y),
    "pow": lambda h, y: torch.pow(h.exp(), exponent=y),
    "atan2": lambda h, y: torch.atan2(h, other=y),
    "clamp": lambda h, y: torch.clamp(h, max=y),
    "lerp": lambda h, y: torch.lerp(h, end=h.sin(), weight=y),
    "addcmul": lambda h, y: torch.addcmul(h, tensor1=y, tensor2=h),
    "where": lambda h, y: torch.where(h > 0, h, other=y),
    "cosine_similarity": lambda h, y: functional.cosine_similarity(h, x2=y, dim=1)[:, None],
    "layer_norm": lambda h, y: functional.layer_norm(h, y.shape, weight=y),
    "linear": lambda h, y: functional.linear(h, weight=h.sin()),
    "a bias": lambda h, y: functional.linear(h, weight=h.detach().sin(), bias=y),
    "conv1d": lambda h, y: functional.conv1d(h[:, None], weight=h[:, None, :2]).flatten(1),
    "bilinear": lambda h, y: functional.bilinear(
        h, input2=h, weight=torch.ones(1, BATCH, BATCH).double(), bias=y[:1]
    ),
}


@pytest.mark.parametrize("meet", BY_NAME.values(), ids=BY_NAME)
def test_operands_given_by_name(meet):
    model = nn.Linear(WIDTH, BATCH).double()

    def loss_fn(m, x):
        h = m(x)
        return meet(h, h.sum(1)).square().sum(1)

    with pytest.raises((gs.CoupledExamplesError, gs.ExampleAxisError)):
        gs.per_example_norms(model, batch(), loss_fn)


# Operations of constants c (4, 4) and of the hidden values h (4, 4) of four examples: the constants
# come first, or have more axes.
BESIDE_CONSTANTS = {
    "similarities": lambda c, h: functional.cosine_similarity(h, c[:, None], dim=-1),
    "similarities of": lambda c, h: functional.cosine_similarity(c[:, None], x2=h, dim=-1),
    "distances": lambda c, h: functional.pairwise_distance(h, c[:, None]),
    "distances of": lambda c, h: functional.pairwise_distance(c[:, None], h),
    "vecdot": lambda c, h: torch.linalg.vecdot(h, c[:, None]),
    "a bag's table": lambda c, h: functional.embedding_bag(c.argsort(1), h),
    "a bilinear layer": lambda c, h: functional.bilinear(c[:, :2], c[:, 2:], h.view(4, 2, 2)),
    "products in groups": lambda c, h: (
        torch._grouped_mm(
            c.float().repeat(1, 2),
            h.float().repeat(1, 16).view(4, 8, 8),
            offs=torch.arange(1, 5, dtype=torch.int32),
        )
        .double()
        .roll(1, 0)
    ),
    "a batch norm's weight": lambda c, h: functional.batch_norm(c, c[0], c[1].exp(), h[:, 0]),
    "a group norm's bias": lambda c, h: functional.group_norm(c, 2, None, h[:, 0]),
    "a right-hand side": lambda c, h: torch.linalg.solve(torch.diag_embed(c.exp()), h[:, 0]),
}


@pytest.mark.parametrize("meet", BESIDE_CONSTANTS.values(), ids=BESIDE_CONSTANTS)
def test_each_row_of_a_result_depends_on_all_examples(meet):
    model, x = nn.Linear(4, 4).double(), torch.randn(4, 4).double()
    model.register_buffer("constants", torch.randn(4, 4).double())

    def losses(m, batch):
        return meet(m.constants, m(batch)).square().sum(1)

    with pytest.raises((gs.CoupledExamplesError, gs.ExampleAxisError)):
        gs.per_example_norms(model, x, losses)
    with gs.track(model, batch_size=4) as tracker:
        with pytest.raises((gs.CoupledExamplesError, gs.ExampleAxisError)):
            tracker.backward(losses(model, x))


def test_a_layer_behind_attention_between_examples():
    """The layer's rows are as many as the examples, so that their number explains nothing."""
    model = nn.Linear(WIDTH, WIDTH).double()

    def loss_fn(m, x):
        h = m(x)
        return m((h @ h.mT).softmax(-1) @ h).sum(1)

    with pytest.raises(
        gs.ExampleAxisError, match=r"\(\d, .*\)\. Before it .* multiplies every example with every"
    ):
        gs.per_example_norms(model, batch(), loss_fn)


def test_a_layer_on_a_mean_over_all_examples():
    model = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2)).double()

    def losses(model, x):
        return (x * model[1](model[0](x).mean(0))).sum(1)

    with pytest.raises(gs.ExampleAxisError, match="computed from all examples together"):
        gs.per_example_norms(model, batch(), losses)


def test_rows_summed_by_a_constant_matrix():
    """What it does with the examples is not looked at: it might move them, or mix them."""
    model, matrix = nn.Linear(WIDTH, WIDTH).double(), torch.eye(BATCH).double().roll(1, 0)
    with pytest.raises(gs.CoupledExamplesError, match="multiplied by a matrix along the example"):
        gs.per_example_norms(model, batch(), lambda m, x: (matrix @ m(x)).square().sum(1))


@pytest.mark.parametrize(
    "mix",
    [
        lambda h: functional.group_norm(h, 1),
        lambda h: functional.instance_norm(h.mT[None])[0].mT,
        lambda h: functional.avg_pool1d(h[:, :, 0], 3, 1, 1),
        lambda h: functional.interpolate(h.mT, BATCH).mT,
    ],
    ids=["group_norm", "instance_norm", "avg_pool1d", "interpolate"],
)
def test_operations_that_take_the_first_axis_for_the_examples(mix):
    """With the examples along another axis these mix them."""
    model, x = nn.Linear(WIDTH, WIDTH).double(), torch.randn(5, BATCH, WIDTH).double()
    with pytest.raises((gs.CoupledExamplesError, gs.ExampleAxisError)):
        gs.per_example_norms(
            model, x, lambda m, x: mix(m(x)).square().movedim(1, 0).flatten(1).sum(1), batch_dim=1
        )


@pytest.mark.parametrize("layer", [nn.LSTM(WIDTH, 2), nn.TransformerEncoderLayer(WIDTH, 1, 8, 0)])
def test_layers_that_take_another_axis_for_the_examples(layer):
    """As many positions as examples: batch_first=True was forgotten."""
    x = torch.randn(BATCH, BATCH, WIDTH)

    def loss_fn(m, x):
        output = m(x)
        return (output[0] if isinstance(output, tuple) else output).square().sum((1, 2))

    says = r"takes axis 1 .* along axis 0.*batch_first=.*assign_rows"
    with pytest.raises(gs.ExampleAxisError, match=says):
        gs.per_example_norms(layer, x, loss_fn)


@pytest.mark.parametrize(
    "meet",
    [torch.linalg.vecdot, functional.cosine_similarity, functional.pairwise_distance, torch.mul],
)
def test_one_examples_values_beside_everybodys_inputs(meet):
    """The losses depend on what the first example alone was looked up by."""
    model = nn.Embedding(WIDTH, WIDTH).double()

    def loss_fn(m, x):
        looked_up = m((x[0].abs() * 9).long()[:BATCH] % WIDTH)
        return meet(looked_up, x).reshape(BATCH, -1).sum(1)

    with pytest.raises((gs.CoupledExamplesError, gs.ExampleAxisError)):
        gs.per_example_norms(model, batch(), loss_fn)


OF_ONE_AND_ALL = {
    "matmul": lambda h: h @ h[0].T,
    "einsum": lambda h: torch.einsum("btd,sd->bts", h, h[0]),
    "tensordot": lambda h: torch.tensordot(h, h[0], ([2], [1])),
}


@pytest.mark.parametrize("name", OF_ONE_AND_ALL)
def test_products_of_one_examples_values_with_those_of_all(name):
    model, x = nn.Linear(WIDTH, WIDTH).double(), torch.randn(3, 2, WIDTH).double()
    with pytest.raises(gs.CoupledExamplesError, match="combines trained values of different"):
        gs.per_example_norms(model, x, lambda m, x: OF_ONE_AND_ALL[name](m(x)).sum((1, 2)))


def test_a_loss_beside_a_mean_over_the_batch():
    """Where the losses are one scalar the graph shows what they were."""

    def losses(m, x):
        h = m(x)
        return h.square().sum(1) / h.square().sum(1).sum()

    model = nn.Linear(WIDTH, WIDTH).double()
    with pytest.raises(gs.CoupledExamplesError, match="several examples"):
        gs.per_example_norms(model, batch(), losses)
    with pytest.raises(gs.CoupledExamplesError, match="brings what was computed over all examples"):
        with gs.track(model, batch_size=BATCH):
            losses(model, batch()).mean().backward()


# A (B, WIDTH) @ (WIDTH, B) and a (B, B) matrix of numbers, which belong to no example.
MATRIX = torch.linspace(-1, 1, BATCH * BATCH).view(BATCH, BATCH).double()

# Scalars of all examples' hidden values that are no sums over the examples.
NO_SUMS = {
    "root of a mean": lambda h: h.square().mean().sqrt(),
    "square of a mean": lambda h: h.mean(0).square().sum(),
    "squared error of a mean": lambda h: functional.mse_loss(h.mean(0), torch.ones(WIDTH).double()),
    "ratio of sums": lambda h: h.sum() / h.square().sum(),
    "squared errors divided by the sum of their weights": lambda h: functional.mse_loss(
        h, torch.zeros_like(h), weight=h.sigmoid()
    ),
    "given errors divided by the sum of their weights": lambda h: functional.l1_loss(
        torch.ones_like(h).cumsum(1), torch.zeros_like(h), weight=h.sigmoid()
    ),
    "errors of means weighted by means": lambda h: functional.l1_loss(
        h.mean(0), torch.zeros(WIDTH).double(), weight=h.mean(0), reduction="sum"
    ),
    "given errors divided by means as weights": lambda h: functional.l1_loss(
        torch.arange(WIDTH).double(), torch.zeros(WIDTH).double(), weight=h.exp().mean(0)
    ),
    "numbers divided by a sum": lambda h: torch.ones(2).double() / h.exp().sum(),
    "a number divided by a sum and added": lambda h: torch.addcdiv(
        torch.zeros(2).double(), torch.ones(2).double(), h.exp().sum()
    ),
    "product of sums": lambda h: h.sum() * h.square().sum(),
    "log of summed exponentials": lambda h: h.sum(1).logsumexp(0),
    "product": lambda h: h.sum(1).prod(),
    "norm": lambda h: h.norm(),
    "norms along the examples": lambda h: torch.linalg.vector_norm(h, dim=0).sum(),
    "variance": lambda h: h.var(0).sum(),
    "standard deviation": lambda h: (1 - h.std(dim=0)).relu().mean(),
    "square of a product along the examples": lambda h: (h.T @ h - torch.eye(WIDTH)).square().sum(),
    "square of an inner product": lambda h: torch.dot(h.flatten(), h.sin().flatten()) ** 2,
    "square of a contraction": lambda h: torch.einsum("bi,bj->ij", h, h.sin()).square().sum(),
    "determinant": lambda h: torch.logdet(h.T @ h),
    "propagated": lambda h: (MATRIX @ h).square().sum(),
    "propagated, as einsum has it": lambda h: torch.einsum("ij,jd->id", MATRIX, h).exp().sum(),
    "attention to given keys": lambda h: (MATRIX.softmax(1) @ h).square().sum(),
    "rows against columns": lambda h: (h[:, :BATCH] @ h.sin()).sum(),
    "channels": lambda h: functional.conv1d(h[None], MATRIX[:, :, None]).square().sum(),
    "flattened": lambda h: functional.linear(h.flatten(), torch.ones(2, h.numel()).double()).exp(),
    "function of a mean loss": lambda h: functional.cross_entropy(h, torch.arange(BATCH)).exp(),
    "two rows": lambda h: (h[0] * h[1]).sum(),
    "square of rows added in Python": lambda h: sum(row for row in h).square().sum(),
    "squares of a sum in a number made unseen": lambda h: (
        torch.Tensor([0]).double().add_(h.sum()).square().sum()
    ),
    "products of sums in numbers made unseen": lambda h: (
        torch.Tensor([0]).double().add_(h.sum()).mul_(h.exp().sum()).sum()
    ),
    "residuals from a sum, in place": lambda h: h.detach().sin().sub_(h.sum(0)).square().sum(),
    "centred in place": lambda h: h.clone().sub_(h.mean(0)).square().sum(),
    "beside the neighbour": lambda h: functional.mse_loss(h, h.roll(1, 0)),
    "moved first": lambda h: h.mT.contiguous().sum(1).square().sum(),
    "attention without an axis for examples": lambda h: functional.multi_head_attention_forward(
        *[h.mT] * 3,
        BATCH,
        1,
        torch.ones(3 * BATCH, BATCH).double(),
        None,
        None,
        None,
        False,
        0.0,
        torch.eye(BATCH).double(),
        None,
    )[0],
    "root in place": lambda h: h.square().mean().sqrt_(),
    "product of sums in place": lambda h: h.sum().mul_(h.square().sum()),
    "ratio of what was halved in place": lambda h: h.sum().mul_(0.5) / h.square().sum(),
    "root of what was stored": lambda h: stored(h.square().mean())[1].sqrt(),
    "square of what was copied": lambda h: torch.zeros(WIDTH).double().copy_(h.mean(0)).square(),
    "a norm that was squared beside": lambda h: [n := h.norm(), n**2][0],
    "a norm beside its square": lambda h: [n := h.norm(), n**2][1] + n,
    "a norm, and later its square": lambda h: [n := h.norm(), 3 * n][1] + n**2,
    "fourth power of a norm": lambda h: (h.norm() ** 2) ** 2,
    "power of two": lambda h: 2 ** h.norm(),
    "between two sums, by a third": lambda h: torch.lerp(h.sum(), h.exp().sum(), h.sin().sum()),
    "square of a norm of sums": lambda h: h.mean(0).norm() ** 2,
    "square of a spectral norm": lambda h: torch.linalg.norm(h, 2).square(),
    "square of a spectral norm over given axes": lambda h: torch.linalg.norm(
        h[:, None, :], ord=2, dim=(0, 2)
    ).square(),
    "squared derivative by one scale": lambda h: by_scale(h.sin()).square(),
    "distance": lambda h: torch.dist(h, h.detach() + 1),
    "squared distance of mirrored rows": lambda h: torch.dist(h, h.flip(0)) ** 2,
    "squared distance of means": lambda h: torch.dist(h.mean(0), ONES[0]) ** 2,
    "square of a norm of order 3": lambda h: h.norm(p=3) ** 2,
    "square of the largest sum of a column": lambda h: torch.linalg.norm(h, ord=1) ** 2,
    "square of a trace": lambda h: torch.trace(h.T @ ONES) ** 2,
    "squares of each and the mean": lambda h: torch.cat([h, h.mean(0)[None]]).square().sum(),
    "a root by an operator of torch.ops": lambda h: torch.ops.aten.sqrt(h.square().mean()),
    "what an operator of torch.ops sums": lambda h: torch.ops.aten.logsumexp(h, [0]),
    "absolute value of complex sums": lambda h: torch.complex(h.mean(), h.exp().mean()).abs(),
    "norm of order 1 of complex sums": lambda h: torch.linalg.vector_norm(
        torch.complex(h.mean(0), h.exp().mean(0)), ord=1
    ),
    "sums over two indices": lambda h: torch.einsum("bd,cd->", h, h.exp()),
    "sums over two indices of three": lambda h: torch.einsum("bd,ij,cd->d", h, MATRIX, h),
    "axes crossed": lambda h: torch.tensordot(
        h[:, :BATCH], h.exp()[:, :BATCH], dims=([0, 1], [1, 0])
    ),
    "windows of the examples": lambda h: functional.conv1d(h.mT[None], h.mT[None], padding=1),
    "logits of one row": lambda h: functional.cross_entropy(h[:, 0], torch.tensor(1)),
    "margins in one row": lambda h: functional.multi_margin_loss(h[:, 0].exp(), torch.tensor(1)),
    "steps of a sequence": lambda h: functional.ctc_loss(
        h[:, None].log_softmax(2), torch.tensor([[1]]), torch.tensor([BATCH]), torch.tensor([1])
    ),
    "steps of one sequence": lambda h: functional.ctc_loss(
        h.log_softmax(1), torch.tensor([1]), torch.tensor(BATCH), torch.tensor(1)
    ),
}


def stored(value):
    """Return three numbers, the second of which is this one."""
    numbers = torch.zeros(3).double()
    numbers[1] = value
    return numbers


def several_losses(h):
    """Return three losses in one tensor, the first two of them scaled there, as YOLO's are."""
    losses = torch.zeros(3).double()
    losses[0], losses[1] = h.square().sum(), h.sin().sum()
    losses[0] *= 3
    losses[1].div_(2)
    losses[:2] *= torch.tensor([1, 4])
    return losses


def one_by_one(h):
    """Return three losses in one tensor, one of which is summed in a loop over the examples."""
    losses, loss = torch.zeros(3).double(), 0
    for each in h:
        loss += each.square().sum()
    losses[0] = loss
    losses[0] *= 3
    losses[1] = h.sin().sum()
    losses[2] = h[0].sum()
    losses[1] *= 2
    return losses


def totals(h):
    """Return three numbers, two of which started as zeros."""
    numbers = torch.zeros(3).double()
    numbers[0] += h.exp().sum()
    numbers[0] += h.cos().sum()
    numbers[2] += h.sum()
    return numbers


def of_which_one_was_changed(name, function):
    """Return a function of several losses after one was changed in place, and another added to."""

    def changed(h):
        losses = several_losses(h)
        getattr(losses[0], name)(*function(losses))
        losses[1] += h.exp().sum()
        return losses

    return changed


def by_scale(values):
    """Return the derivative of a mean by a factor of all values, as penalties of invariance do."""
    scale = torch.ones((), requires_grad=True).double()
    (derivative,) = torch.autograd.grad((scale * values).exp().mean(), scale, create_graph=True)
    return derivative


@pytest.mark.parametrize("scalar", NO_SUMS.values(), ids=NO_SUMS)
def test_scalars_that_are_no_sums_over_the_examples(scalar):
    model = nn.Linear(WIDTH, WIDTH).double()
    with pytest.raises(gs.CoupledExamplesError, match=r"several examples|every example"):
        with gs.track(model, batch_size=BATCH):
            scalar(model(batch())).sum().backward()
    assert model.weight.grad is None


@pytest.mark.parametrize(
    "scalar",
    [
        of_which_one_was_changed("sqrt_", lambda losses: ()),
        of_which_one_was_changed("mul_", lambda losses: (losses[1].clone(),)),
        of_which_one_was_changed("pow_", lambda losses: (2,)),
        lambda h: several_losses(h).square(),
        lambda h: one_by_one(h).square(),
        lambda h: one_by_one(h).square_(),
        lambda h: [losses := one_by_one(h), losses[0].sqrt_(), losses][2],
        lambda h: totals(h).square(),
        lambda h: [losses := totals(h), losses[0].square_(), losses][2],
        lambda h: [losses := totals(h), losses[0].mul_(losses[2].clone()), losses][2],
    ],
)
def test_losses_in_one_tensor_that_are_no_sums(scalar):
    model = nn.Linear(WIDTH, WIDTH).double()
    with pytest.raises((gs.CoupledExamplesError, gs.ExampleAxisError)):
        with gs.track(model, batch_size=BATCH):
            scalar(model(batch())).sum().backward()


# What combines inputs x (B, T, d) and a row for each example e (B, d) as if that were a position's.
CROSSED = {
    "added": lambda x, e: x + e,
    "einsum": lambda x, e: torch.einsum("btd,td->bt", x, e),
    "kernel": lambda x, e: functional.conv1d(x.mT, e[:, :, None]),
}


@pytest.mark.parametrize("cross", CROSSED.values(), ids=CROSSED)
@pytest.mark.parametrize("runs", [1, 2])
def test_a_row_for_each_example_along_positions(cross, runs):
    """As many positions as examples. What is remembered of the first step holds for the second."""
    model, x = nn.Linear(WIDTH, WIDTH).double(), torch.randn(BATCH, BATCH, WIDTH).double()
    for _ in range(runs):
        with pytest.raises(gs.ExampleAxisError, match="another axis"):
            with gs.track(model, batch_size=BATCH):
                cross(x, model(x[:, 0])).sin().mean().backward()
        assert model.weight.grad is None
    with pytest.raises((gs.CoupledExamplesError, gs.ExampleAxisError)):
        gs.per_example_norms(model, x, lambda m, x: cross(x, m(x[:, 0])).sin().flatten(1).sum(1))


def changed(rows, change):
    """Return the square of a copy that was changed in place."""
    rows = rows.clone()
    change(rows)
    return rows * rows


# What combines inputs x (B, T, d), labels y (B, T) and trained rows (B, T, d).
ROWWISE = {
    "mean error": lambda x, y, rows: functional.mse_loss(rows, x),
    "smooth error": lambda x, y, rows: functional.smooth_l1_loss(rows, x),
    "cosine": lambda x, y, rows: functional.cosine_similarity(x, rows, dim=-1),
    "products": lambda x, y, rows: torch.linalg.vecdot(rows, x),
    "cross products": lambda x, y, rows: torch.linalg.cross(x[..., :3], rows[..., :3]),
    "distances": lambda x, y, rows: functional.pairwise_distance(x, rows),
    "form": lambda x, y, rows: functional.bilinear(x, rows.contiguous(), FORM),
    "flattened": lambda x, y, rows: x.flatten(0, 1) * rows.flatten(0, 1).sin(),
    "classes": lambda x, y, rows: functional.cross_entropy(rows.mT, y),
    "classes of each": lambda x, y, rows: functional.cross_entropy(rows.mT, y, reduction="none"),
    "classes, flattened": lambda x, y, rows: functional.cross_entropy(
        rows.flatten(0, 1), y.flatten()
    ),
    "shares": lambda x, y, rows: functional.cross_entropy(rows.mT, x.softmax(-1).mT),
    "gathered": lambda x, y, rows: rows.gather(2, y[..., None]).sin(),
    "taken": lambda x, y, rows: rows.take_along_dim(y[..., None], 2),
    "indexed": lambda x, y, rows: rows[torch.arange(len(y))[:, None], torch.arange(BATCH), y],
    "masked": lambda x, y, rows: rows[x[..., 0] > 0].sum() / len(x),
    "selected": lambda x, y, rows: rows.masked_select(x > 0).sum() / len(x),
    "written to": lambda x, y, rows: changed(rows, lambda r: r.__setitem__(x[..., 0] > 0, 0.0)),
    "scattered": lambda x, y, rows: torch.zeros_like(x).scatter(2, y[..., None], rows[..., :1]),
    "stacked": lambda x, y, rows: torch.stack([x, rows]) * x,
    "joined": lambda x, y, rows: torch.cat([x, rows], -1) * x[..., :1],
}

# What multiplies inputs x (B, T, d) with values e (B, d), as a row for each position, and for each
# example.
MULTIPLIED = {
    "to b": ("btd,td->b", "btd,bd->b"),
    "to t": ("btd,td->t", "btd,bd->t"),
    "to d": ("btd,td->d", "btd,bd->d"),
    "to bt": ("btd,td->bt", "btd,bd->bt"),
    "to tb": ("btd,td->tb", "btd,bd->tb"),
    "to a number": ("btd,td->", "btd,bd->"),
    "with weights": ("btd,td,bd->b", "btd,bd,bd->b"),
}


def data_at_coincidence():
    """Return inputs (B, B, d) and labels (B, B) of as many positions as examples."""
    return torch.randn(BATCH, BATCH, WIDTH).double(), torch.randint(WIDTH, (BATCH, BATCH))


def assert_crossed(model, loss, batch_dim=0):
    with pytest.raises(gs.ExampleAxisError, match="another axis"):
        with gs.track(model, batch_size=BATCH, batch_dim=batch_dim):
            loss().backward()
    assert model.weight.grad is None


def assert_apart(model, loss, part, batch_dim=0):
    """Compare with the gradients of each part, of which the loss is the sum."""
    expected = [
        sum(gradient.square().sum() for gradient in torch.autograd.grad(part(i), [model.weight]))
        for i in range(BATCH)
    ]
    with gs.track(model, batch_size=BATCH, batch_dim=batch_dim, loss_reduction="sum") as tracker:
        loss().backward()
    got = tracker.stats.by_parameter["weight"]
    torch.testing.assert_close(got, torch.stack(expected), rtol=1e-10, atol=0)


@pytest.mark.parametrize("cross", ROWWISE.values(), ids=ROWWISE)
def test_rows_that_are_expanded_along_examples(cross):
    model, (x, y) = nn.Linear(WIDTH, WIDTH, bias=False).double(), data_at_coincidence()
    assert_crossed(model, lambda: cross(x, y, model(x[:, 0]).expand_as(x)).sum())

    def of(i):
        rows = model(x[i, 0]).expand(1, BATCH, WIDTH)
        return cross(x[i : i + 1], y[i : i + 1], rows).mean()

    def loss():
        return cross(x, y, model(x[:, 0])[:, None].expand_as(x)).mean() * BATCH

    assert_apart(model, loss, of)


@pytest.mark.parametrize(
    "cross", [lambda x, e: x + e, lambda x, e: torch.cat([x, e.expand_as(x)], -1)]
)
def test_a_row_for_each_example_along_inputs_that_lost_their_axis(cross):
    """As where positions come with the batch, and are added to its inputs first."""
    model, (x, _) = nn.Linear(WIDTH, WIDTH).double(), data_at_coincidence()
    positions = torch.randn(BATCH, WIDTH).double()
    assert_crossed(model, lambda: cross(x + positions, model(positions)).sin().mean())


def test_rows_beside_inputs_that_lost_their_axis():
    """Whose the sum is, is not known; what it is multiplied by does not tell either."""
    model, (x, _) = nn.Linear(WIDTH, WIDTH).double(), data_at_coincidence()
    rows = torch.randn(BATCH, WIDTH).double()
    with pytest.raises(gs.ExampleAxisError, match="which example each row"):
        with gs.track(model, batch_size=BATCH):
            model((x + rows) * rows).sin().mean().backward()


# Products of inputs (B, T, d), T = B, and a matrix of as many positions.
BY_POSITIONS = {
    "matmul": lambda x, matrix: matrix @ x,
    "from the right": lambda x, matrix: (x.mT @ matrix.mT).mT,
    "bmm": lambda x, matrix: torch.bmm(matrix.expand(BATCH, -1, -1), x),
    "einsum": lambda x, matrix: torch.einsum("ts,bsd->btd", matrix, x),
    "positions first": lambda x, matrix: torch.einsum("ts,bsd->tbd", matrix, x).transpose(0, 1),
}


@pytest.mark.parametrize("multiply", BY_POSITIONS.values(), ids=BY_POSITIONS)
@pytest.mark.parametrize("own", [False, True])
def test_inputs_by_a_matrix_of_as_many_positions_as_there_are_examples(multiply, own):
    """An adjacency matrix that is no buffer of the model looks like an input with B rows."""
    model, (x, _) = nn.Linear(WIDTH, WIDTH).double(), data_at_coincidence()
    matrix = torch.randn(BATCH, BATCH).double()

    def losses(m, batch):
        return m(multiply(*batch)).sin().mean((1, 2))

    with pytest.raises(gs.ExampleAxisError, match="which example each row"):
        with gs.track(model, batch_size=BATCH) as tracker:
            found = losses(model, (x, matrix))
            tracker.backward(found) if own else found.mean().backward()


@pytest.mark.parametrize("crossed,right", MULTIPLIED.values(), ids=MULTIPLIED)
@pytest.mark.parametrize("backwards", [False, True])
def test_products_with_a_row_for_each_example(crossed, right, backwards):
    model, (x, _) = nn.Linear(WIDTH, WIDTH, bias=False).double(), data_at_coincidence()

    def product(equation, x):
        inputs, out = equation.split("->")
        inputs = inputs.split(",")
        operands = [x, model(x[:, 0]), x[:, 1]][: len(inputs)]
        order = slice(None, None, -1 if backwards else 1)
        return torch.einsum(f"{','.join(inputs[order])}->{out}", *operands[order]).sum()

    assert_crossed(model, lambda: product(crossed, x))
    assert_apart(model, lambda: product(right, x), lambda i: product(right, x[i : i + 1]))


# Other products, and functions under vmap, that take e's rows for those of positions.
AS_POSITIONS = {
    "tensordot": lambda x, e: torch.tensordot(x, e, 2),
    "mv": lambda x, e: torch.mv(x[..., 0], e[:, 0]),
    "matrix": lambda x, e: x[..., 0] @ e,
    "added": lambda x, e: torch.addmm(x[0, 0, :1], x[..., 0], e),
    "linear": lambda x, e: functional.linear(x[..., 0], e.T),
    "kernels": lambda x, e: functional.conv1d(x, e.T[:, :, None]),
    "kernels, transposed": lambda x, e: functional.conv_transpose1d(x, e[:, :, None]),
    "vmap": lambda x, e: torch.vmap(lambda x, e: (x * e).sum(), in_dims=(0, None))(x, e),
    "vmap, enclosed": lambda x, e: torch.vmap(lambda x: (x * e).sum())(x),
    "a loop": lambda x, e: torch.stack([(each * e).sum() for each in x]),
    "moved inputs": lambda x, e: x.transpose(0, 1) * e[:, None],
    "indexed by labels": lambda x, e: e[torch.arange(BATCH), x[..., 0].long() % WIDTH],
}


@pytest.mark.parametrize("cross", AS_POSITIONS.values(), ids=AS_POSITIONS)
def test_a_row_for_each_example_as_one_of_each_position(cross):
    model, (x, _) = nn.Linear(WIDTH, WIDTH).double(), data_at_coincidence()
    assert_crossed(model, lambda: cross(x, model(x[:, 0])).sum())


def written(tensor, place, values):
    """Return a copy of a tensor with values at a place."""
    copy = tensor.clone()
    copy[place] = values
    return copy


def copied(tensor, other):
    """Return a copy of a tensor with a row of another, written through a view."""
    copy = tensor.clone()
    copy[0].copy_(other[0])
    return copy


# What a loop makes of one example's inputs (T, d), others' x (B, T, d), and what may have a row for
# each position or for each example.
BESIDE_OTHERS = {
    "mixed": lambda own, other, x, rows: own * 0.7 + other * 0.3,
    "one row of another": lambda own, other, x, rows: own - other[:1],
    "chosen": lambda own, other, x, rows: torch.where(rows[:, :1] > 0, own, other),
    "centred": lambda own, other, x, rows: own - x.mean(0),
    "masked": lambda own, other, x, rows: own * rows[:, :1],
    "noisy": lambda own, other, x, rows: own + torch.randn(BATCH, WIDTH).double(),
    "squared": lambda own, other, x, rows: (own - rows) ** 2,
    "stacked": lambda own, other, x, rows: torch.stack([own, rows.expand_as(own)]).sum(0),
    "mixed and noisy": lambda own, other, x, rows: (
        own * 0.7 + other * 0.3 + torch.randn(BATCH, WIDTH).double()
    ),
    "mixed and joined": lambda own, other, x, rows: torch.cat(
        [own * 0.7 + other * 0.3, rows.view(BATCH, WIDTH)], 1
    )[:, :WIDTH],
    "mixed in place and masked": lambda own, other, x, rows: (
        own.clone().lerp_(other, 0.3) * rows.view(BATCH, WIDTH)
    ),
    "a sum in place beside others": lambda own, other, x, rows: torch.maximum(
        own.clone().unsqueeze(0).add_(other), rows.view(BATCH, WIDTH)
    )[0],
    "a row written over": lambda own, other, x, rows: written(own, 0, other[0]),
    "a row copied over": lambda own, other, x, rows: copied(own, other),
    "one of joined rows": lambda own, other, x, rows: written(
        torch.cat([own, rows.view(BATCH, WIDTH)])[:BATCH], 0, other[0]
    ),
    "rows of noise": lambda own, other, x, rows: written(
        own, slice(1, None), torch.randn(BATCH, WIDTH).double()[1:]
    ),
    "in a copy": lambda own, other, x, rows: written(
        torch.zeros_like(own).copy_(own), 0, rows.squeeze(0)[0]
    ),
    "attention": lambda own, other, x, rows: functional.scaled_dot_product_attention(
        own.view(1, BATCH, WIDTH), rows[None], other[None]
    )[0],
}


@pytest.mark.parametrize("make", BESIDE_OTHERS.values(), ids=BESIDE_OTHERS)
@pytest.mark.parametrize("batched", [False, True])
def test_inputs_of_one_example_beside_rows_that_may_be_of_all(make, batched):
    """In a loop over examples with as many positions, shape does not tell whose the rows are."""
    model, (x, _) = nn.Linear(WIDTH, WIDTH).double(), data_at_coincidence()
    rows = torch.randn(BATCH, WIDTH).double()

    def of(i):
        inputs = make(x[i], x[i - 1], x, rows)
        return model(inputs[None] if batched else inputs).square().sum()

    with pytest.raises(gs.ExampleAxisError, match="which example each row"):
        with gs.track(model, batch_size=BATCH):
            sum(map(of, range(BATCH))).backward()
    assert model.weight.grad is None


@pytest.mark.parametrize(
    "add", [lambda own, other, rows: own + rows, lambda own, other, rows: own * 0.7 + other * 0.3]
)
def test_slices_of_one_example_beside_others_that_lose_their_axis(add):
    model, (x, _) = nn.Linear(WIDTH, WIDTH).double(), data_at_coincidence()
    rows = torch.randn(BATCH, WIDTH).double()

    def of(i):
        return model(add(x[i : i + 1], x.roll(1, 0)[i : i + 1], rows)[0]).square().sum()

    with pytest.raises(gs.ExampleAxisError, match="which example each row"):
        with gs.track(model, batch_size=BATCH):
            sum(map(of, range(BATCH))).backward()


@pytest.mark.parametrize("place", [0, 1])
def test_inputs_of_one_example_that_all_share(place):
    """As the grid of the first one, or a single row of any, which is given to all."""

    def loss_fn(model, x):
        shared = x[0] if place == 0 else x[place, 0]
        return model(x - shared).square().sum((1, 2))

    model, (x, _) = nn.Linear(WIDTH, WIDTH).double(), data_at_coincidence()
    check_model(model, x, loss_fn)


def test_rows_along_positions_of_data_by_their_second_axis():
    """Data (T, B, d): a row for each example needs no further axis, unless the data are moved."""
    model, (x, y) = nn.Linear(WIDTH, WIDTH, bias=False).double(), data_at_coincidence()
    assert_crossed(model, lambda: (x.transpose(0, 1) + model(x[0])).sin().sum(), batch_dim=1)
    assert_crossed(model, lambda: (x + model(x[0])[:, None]).sin().sum(), batch_dim=1)

    def of(i):
        labels = functional.cross_entropy(model(x[:, i]), y[i], reduction="sum")
        return (x[:, i] + model(x[0, i])).sin().sum() + labels

    def loss():
        gs.assign_rows(y, torch.arange(BATCH))  # (B, T)
        labels = functional.cross_entropy(model(x).permute(1, 2, 0), y, reduction="sum")
        return (x + model(x[0])).sin().sum() + labels

    assert_apart(model, loss, of, batch_dim=1)


# What makes d numbers of one for each example, which has no axis 1, where the contract has them.
OF_ONE_EACH = {
    "expanded": lambda t: t[:, None].expand(-1, WIDTH),
    "waves": lambda t: (t[:, None] * torch.arange(WIDTH)).cos(),
    "outer": lambda t: torch.outer(t, torch.arange(WIDTH).double()),
    "einsum": lambda t: torch.einsum("b,d->bd", t, torch.arange(WIDTH).double()),
    "stacked": lambda t: torch.stack([t**power for power in range(WIDTH)], 1),
    "looked up": lambda t: torch.eye(WIDTH).double()[(9 * t).long() % WIDTH],
    "one of each class": lambda t: functional.one_hot((9 * t).long() % WIDTH, WIDTH).double(),
}


@pytest.mark.parametrize("numbers", OF_ONE_EACH.values(), ids=OF_ONE_EACH)
@pytest.mark.parametrize("batch", [WIDTH, WIDTH + 1])
def test_numbers_of_one_for_each_example_of_data_by_their_second_axis(numbers, batch):
    """Data (T, B, d): with d = B the numbers (B, d) look like data, with their examples along d."""
    model, t = nn.Linear(WIDTH, WIDTH, bias=False).double(), torch.rand(batch).double()
    x = torch.randn(2, batch, WIDTH).double()
    with pytest.raises(gs.ExampleAxisError, match="belongs to is not known"):
        with gs.track(model, batch_size=batch, batch_dim=1):
            (numbers(t) * model.weight[0]).sin().sum().backward()

    def losses(h, t):
        return (h - numbers(t)).square().sum()

    with gs.track(model, batch_size=batch, batch_dim=1, loss_reduction="sum") as tracker:
        losses(model(x).sum(0), t).backward()
    for i in range(batch):
        (own,) = torch.autograd.grad(losses(model(x[:, i]).sum(0), t[i : i + 1]), [model.weight])
        torch.testing.assert_close(tracker.stats.sqnorm[i], own.square().sum(), rtol=1e-9, atol=0)


def test_numbers_of_one_for_each_example_expanded_in_front():
    model, t = nn.Linear(WIDTH, WIDTH, bias=False).double(), torch.rand(BATCH).double()
    x = torch.randn(BATCH, BATCH, WIDTH).double()

    def loss(x, t):
        rows = t.expand(BATCH, -1) + t[None] + t.repeat(BATCH, 1)
        return (model(x * rows[..., None]) + model(rows[..., None].expand_as(x))).sin().sum()

    with gs.track(model, batch_size=BATCH, batch_dim=1, loss_reduction="sum") as tracker:
        loss(x, t).backward()
    for i in range(BATCH):
        (own,) = torch.autograd.grad(loss(x[:, i : i + 1], t[i : i + 1]), [model.weight])
        torch.testing.assert_close(tracker.stats.sqnorm[i], own.square().sum(), rtol=1e-9, atol=0)


def test_a_number_expanded_to_fewer_axes_than_the_examples_are_along():
    model, x = nn.Linear(WIDTH, WIDTH).double(), torch.randn(2, BATCH, WIDTH).double()

    def losses(model, x):
        return model(x * x.std().expand(BATCH)[:, None]).square().mean((0, 2))

    with gs.track(model, batch_size=BATCH, batch_dim=1) as tracker:
        losses(model, x).mean().backward()
    assert_sqnorms(tracker.stats, oracle_on_the_batch(model, x, losses), rtol=1e-10)


# What meets inputs x (B, T, d) after rows were taken for those of positions, but not in the graph.
HIDDEN = {
    "written through a view": lambda x, rows: [
        rows := rows.expand_as(x).clone(),
        rows[..., :2].index_put_((x[..., 0] > 0,), torch.zeros(()).double()),
    ][0],
    "a derivative": lambda x, rows: (
        torch.autograd.grad((x * (own := rows.detach().requires_grad_())).sum(), own)[0] * rows
    ),
}


@pytest.mark.parametrize("cross", HIDDEN.values(), ids=HIDDEN)
def test_a_row_for_each_example_behind_what_the_graph_does_not_show(cross):
    model, (x, _) = nn.Linear(WIDTH, WIDTH).double(), data_at_coincidence()
    assert_crossed(model, lambda: cross(x, model(x[:, 0])).square().sum())


# Numbers to be logged, which the loss does not depend on, of trained rows h (B, d) and inputs.
LOGGED = {
    "similarities": lambda x, h: (x[:, 1] @ h.T).argmax(0),
    "distances": lambda x, h: (x[:, 1, None] - h).square().sum(2).amin(0),
    "a loss": lambda x, h: functional.mse_loss(x, h.expand_as(x)).item(),
}


@pytest.mark.parametrize("log", LOGGED.values(), ids=LOGGED)
def test_inputs_of_others_beside_the_loss(log):
    model, (x, y) = nn.Linear(WIDTH, WIDTH, bias=False).double(), data_at_coincidence()

    def loss():
        h = model(x[:, 0])
        logged.append(log(x, h))
        return functional.cross_entropy(h, y[:, 0], reduction="sum")

    logged = []
    assert_apart(model, loss, lambda i: functional.cross_entropy(model(x[i, 0]), y[i, 0]))


def test_the_first_examples_grid_for_all():
    """What all examples share is often taken from the first: with B points, its axis is as long."""
    model, (x, _) = nn.Linear(WIDTH, WIDTH, bias=False).double(), data_at_coincidence()
    grid = x[..., 0].sort().values

    def integral(h):
        return torch.trapezoid(h.square().sum(2), grid[0]).sum() + (grid[0] @ h[..., 0].T).sum()

    assert_apart(model, lambda: integral(model(x)), lambda i: integral(model(x[i : i + 1])))


def test_inputs_of_others_along_another_axis():
    """Each example beside the inputs of all, which have no gradient: it keeps the batch's axis."""
    model, x = nn.Linear(WIDTH, WIDTH).double(), batch()

    def losses(model, x):
        return (model(x)[:, None] - x).square().sum(2).logsumexp(1)

    with gs.track(model, batch_size=BATCH) as tracker:
        losses(model, x).mean().backward()
    assert_sqnorms(tracker.stats, oracle_sqnorms(model, x, losses), 1e-9)


# Each example beside its own inputs: the results have the examples along their second axis, and the
# inputs have them along their first.
MOVED = {
    "einsum": lambda h, x: torch.einsum("bij,bjd->ibd", x @ x.mT, h),
    "cosine": lambda h, x: functional.cosine_similarity(
        h.transpose(0, 1), x.transpose(0, 1), dim=-1
    ),
    "kernels": lambda h, x: functional.conv1d(
        h.mT.reshape(1, -1, h.shape[1]), x.mT.reshape(-1, 1, x.shape[1]), groups=x[:, 0].numel()
    ),
}


@pytest.mark.parametrize("positions", [BATCH, BATCH + 2])
@pytest.mark.parametrize("name", MOVED)
def test_inputs_of_their_own_along_another_axis(name, positions):
    model, x = nn.Linear(WIDTH, WIDTH).double(), torch.randn(BATCH, positions, WIDTH).double()

    def losses(model, x):
        result = MOVED[name](model(x), x)
        return result.transpose(0, 1).reshape(len(x), -1).sin().sum(1)

    with gs.track(model, batch_size=BATCH) as tracker:
        losses(model, x).mean().backward()
    assert_sqnorms(tracker.stats, oracle_sqnorms(model, x, losses), 1e-9)


def pooled(h):
    """Return what the examples of each of two groups add up to."""
    return torch.zeros(2, WIDTH).double().index_add(0, torch.tensor([0, 1, 1]), h)


# Scalars of which it is not known that they are sums, nor to whose values what they are made of.
LOST = {
    "squares of what was added by index": lambda h: pooled(h).square(),
    "distances of what was added by index": lambda h: functional.pdist(pooled(h)),
    "squares of what was scattered": lambda h: (
        torch.zeros(2, WIDTH).double().scatter_add(0, (h > 0).long(), h).square()
    ),
    "squares of means by index": lambda h: (
        torch.zeros(2, WIDTH)
        .double()
        .scatter_reduce(0, (h > 0).long(), h, "mean", include_self=False)
        .square()
    ),
    "propagated along edges": lambda h: functional.cross_entropy(
        torch.zeros_like(h).index_add(0, torch.tensor([1, 1, 2]), h), torch.arange(BATCH)
    ),
    "pooled in windows": lambda h: functional.avg_pool1d(h.mT[None], 2).square(),
    "grown": lambda h: functional.interpolate(h.mT[None], scale_factor=2).square(),
    "covariance": lambda h: torch.cov(h.T).square().sum(),
    "an outer product": lambda h: torch.kron(torch.ones(1, 2).double(), h).square(),
    "segments": lambda h: torch.segment_reduce(h, "sum", lengths=torch.tensor([1, 2])).exp(),
    "products of segments": lambda h: torch.segment_reduce(h, "prod", lengths=torch.tensor([1, 2])),
}


def test_a_scalar_of_examples_beside_zeros():
    model = nn.Linear(WIDTH, WIDTH).double()
    with pytest.raises(gs.CoupledExamplesError, match="LogsumexpBackward0 combines trained values"):
        with gs.track(model, batch_size=BATCH):
            h = torch.cat([torch.zeros(1, WIDTH).double(), model(batch())])
            h.logsumexp(0).sum().backward()
    assert model.weight.grad is None


@pytest.mark.parametrize("scalar", LOST.values(), ids=LOST)
def test_scalars_that_are_not_known_to_be_sums(scalar):
    model = nn.Linear(WIDTH, WIDTH).double()
    with pytest.raises(gs.ExampleAxisError, match="may be more than a sum over the examples"):
        with gs.track(model, batch_size=BATCH):
            scalar(model(batch())).sum().backward()
    assert model.weight.grad is None


# Pairs of rows of three examples, of two rows, one and three.
OTHERS = torch.block_diag(torch.ones(2, 2), torch.ones(1, 1), torch.ones(3, 3)) == 0
OF_SCORES = {
    "their sum": lambda scores, rows: scores.sum(),
    "their mean, as of powers": lambda scores, rows: scores.exp().mean(),
    "a contrastive loss": lambda scores, rows: functional.cross_entropy(scores, rows),
    "sums of rows": lambda scores, rows: scores.sum(1).sum(),
    "those of one row": lambda scores, rows: scores.square()[0].sum(),
    "the smallest": lambda scores, rows: scores.sort(0).values.square()[0].sum(),
}


@pytest.mark.parametrize("scalar", OF_SCORES.values(), ids=OF_SCORES)
def test_scalars_of_scores_between_packed_examples(scalar):
    model, x = nn.Linear(WIDTH, WIDTH).double(), torch.randn(6, WIDTH).double()
    options = {"batch_size": 3, "cu_seqlens": torch.tensor([0, 2, 3, 6]), "loss_reduction": "sum"}
    with pytest.raises((gs.CoupledExamplesError, gs.ExampleAxisError)):
        with gs.track(model, **options):
            h = model(x)
            scalar(h @ h.mT, torch.arange(6)).backward()


@pytest.mark.parametrize("fill", [0.0, float("-inf")])
def test_scalars_of_scores_of_packed_examples_under_a_mask(fill):
    model, x = nn.Linear(WIDTH, WIDTH).double(), torch.randn(6, WIDTH).double()
    bounds = torch.tensor([0, 2, 3, 6])

    def loss(h, others):
        scores = (h @ h.mT).masked_fill(others, fill)
        if fill:
            return functional.cross_entropy(scores, torch.arange(len(h)), reduction="sum")
        return scores.square().sum()

    with gs.track(model, batch_size=3, cu_seqlens=bounds, loss_reduction="sum") as tracker:
        loss(model(x), OTHERS).backward()
    for i, (first, end) in enumerate(bounds.unfold(0, 2, 1)):
        model.zero_grad()
        loss(model(x[first:end]), OTHERS[first:end, first:end]).backward()
        expected = sum(p.grad.square().sum() for p in model.parameters())
        torch.testing.assert_close(tracker.stats.sqnorm[i], expected, rtol=1e-9, atol=0)


FORM = torch.linspace(-1, 1, WIDTH * WIDTH).view(1, WIDTH, WIDTH).double()
ONES, FIRST = torch.ones(BATCH, WIDTH).double(), torch.arange(BATCH) == 0


class Squared(torch.autograd.Function):
    """What is not seen, of sums."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient * ctx.saved_tensors[0]


@torch.jit.script
def script_of_sums(h: torch.Tensor) -> torch.Tensor:
    return torch.exp(h)


UNSEEN = {"a Function": Squared.apply, "a script": script_of_sums}


@pytest.mark.parametrize("function", UNSEEN.values(), ids=UNSEEN)
def test_what_is_not_seen_of_sums(function):
    model = nn.Linear(WIDTH, WIDTH).double()
    # The last where a Function is not seen at all, as a kept apply from PyTorch 2.14 on.
    refusals = gs.ExampleAxisError, gs.CoupledExamplesError, gs.UnsupportedOperationError
    with pytest.raises(refusals):
        with gs.track(model, batch_size=BATCH):
            function(model(batch()).mean(0)).sum().backward()
    assert model.weight.grad is None


class Doubled(torch.autograd.Function):
    """What is not seen, and trusted to leave the examples apart."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


class Added(torch.autograd.Function):
    """The same, of a loss that is computed at once."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square().sum(0).sum() / 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0]


@torch.jit.script
def script_of_a_loss(h: torch.Tensor) -> torch.Tensor:
    return torch.exp(h).mean()


# Scalars that are, with the part of example i, of its h (1, d) and what all are given.
SUMS = {
    "errors and their weights": (
        lambda h: functional.mse_loss(h, torch.zeros_like(h), weight=h.sigmoid(), reduction="sum"),
        lambda h, i, given: h.square() * h.sigmoid(),
    ),
    "errors and their weights, by the older flag": (
        lambda h: functional.l1_loss(
            h, torch.zeros_like(h), size_average=False, weight=h.sigmoid()
        ),
        lambda h, i, given: h.abs() * h.sigmoid(),
    ),
    "weighted": (
        lambda h: MATRIX[0] @ h.square().sum(1),
        lambda h, i, given: MATRIX[0, i] * h.square(),
    ),
    "weighted, the other way": (
        lambda h: h.square().sum(1) @ MATRIX[0],
        lambda h, i, given: MATRIX[0, i] * h.square(),
    ),
    "a contraction": (
        lambda h: torch.einsum("bi,bj->ij", h, h.sin()).trace(),
        lambda h, i, given: h * h.sin(),
    ),
    "a contraction without its diagonal": (
        lambda h: torch.einsum("bi,bj->ij", h, h.sin()).fill_diagonal_(0).sum(),
        lambda h, i, given: h.sum(-1, keepdim=True) * h.sin() - h * h.sin(),
    ),
    "a product along the examples": (
        lambda h: (h.T @ h.sin()).diagonal().sum(),
        lambda h, i, given: h * h.sin(),
    ),
    "an inner product": (
        lambda h: torch.dot(h.flatten(), h.sin().flatten()),
        lambda h, i, given: h * h.sin(),
    ),
    "a share of what is given": (
        lambda h: h.exp().sum() / batch().sum(),
        lambda h, i, given: h.exp() / batch().sum(),
    ),
    "clipped": (
        lambda h: h.square().mean(0).nan_to_num().clamp(min=0, max=1e9).abs().sum() / 2,
        lambda h, i, given: h.square() / BATCH / 2,
    ),
    "terms": (
        lambda h: torch.stack([h.exp().mean(), 3 * h.square().mean()]).sum(),
        lambda h, i, given: (h.exp() + 3 * h.square()) / BATCH / WIDTH,
    ),
    "balanced": (  # as losses that spread tokens over experts
        lambda h: (h.softmax(1).mean(0) * (h > 0).double().mean(0)).sum(),
        lambda h, i, given: h.softmax(1) / BATCH * (given > 0).double().mean(0),
    ),
    "each example beside the mean": (
        lambda h: (h.square().sum(1) + 3 * h.exp().mean()).mean(),
        lambda h, i, given: h.square() / BATCH + 3 * h.exp() / BATCH / WIDTH,
    ),
    "losses of classes, of which one has one example": (
        lambda h: torch.stack([functional.mse_loss(h[k], ONES[k]) for k in (FIRST, ~FIRST)]).sum(),
        lambda h, i, given: (h - 1).square() / WIDTH / (1 if i == 0 else BATCH - 1),
    ),
    "added in place": (
        lambda h: h.exp().sum().add_(h[1].sum()).mul_(2),
        lambda h, i, given: 2 * (h.exp() + (i == 1) * h),
    ),
    "absolute values": (
        lambda h: functional.l1_loss(h.mean(0), ONES[0], reduction="sum"),
        lambda h, i, given: h * (given.mean(0) - 1).sign() / BATCH,
    ),
    "norms of order 1": (
        lambda h: (
            h.norm(p=1) / 3
            + torch.linalg.norm(h.flatten(), ord=1)
            + torch.dist(h, h.detach().sin(), 1)
            + torch.linalg.norm(h, ord=math.inf)
        ),
        lambda h, i, given: (
            h.abs() * (4 / 3 + int(given.abs().sum(1).argmax() == i))
            + h * (given[i] - given[i].sin()).sign()
        ),
    ),
    "the largest": (
        lambda h: h.mean(0).topk(2).values.sum(),
        lambda h, i, given: h[:, given.mean(0).topk(2).indices] / BATCH,
    ),
    "derivative by one scale": (
        lambda h: by_scale(h.sin()),
        lambda h, i, given: h.sin().exp() * h.sin() / BATCH / WIDTH,
    ),
    "square of a norm": (
        lambda h: (
            h.norm() ** 2
            + torch.linalg.norm(h).square()
            + torch.linalg.norm(h, 2, dim=0).square().sum()
            + torch.linalg.norm(h.sum(1), ord=2).square()
            + torch.norm(h, dim=0).pow(2).sum()
        ),
        lambda h, i, given: 4 * h.square() + h.sum(1, keepdim=True).square() / WIDTH,
    ),
    "powers of norms": (
        lambda h: (
            torch.linalg.vector_norm(h, 3) ** 3
            + torch.dist(h, ONES) ** 2 / 2
            + torch.dist(h, h.sin(), p=4).pow(4)
        ),
        lambda h, i, given: h.abs() ** 3 + (h - 1).square() / 2 + (h - h.sin()) ** 4,
    ),
    "traces": (
        lambda h: torch.trace(h.T @ ONES) + (h.exp() @ h.detach().T).trace(),
        lambda h, i, given: h + h.exp() * given[i],
    ),
    "square of a root": (
        lambda h: h.square().mean().sqrt().pow(2) / 2,
        lambda h, i, given: h.square() / BATCH / WIDTH / 2,
    ),
    "padded": (
        lambda h: functional.pad(h.mean(0), (0, 2)).sum(),
        lambda h, i, given: h / BATCH,
    ),
    "added by index": (
        lambda h: (pooled(h.exp()) * MATRIX[:2, :1]).sum() + pooled(h).amax(0).sum(),
        lambda h, i, given: (
            h.exp() * MATRIX[int(i > 0), 0] + h * (pooled(given).argmax(0) == int(i > 0))
        ),
    ),
    "a number by index": (
        lambda h: (
            torch.zeros(()).double().index_add(0, torch.tensor([0]), h.sum())
            + torch.zeros(()).double().scatter_add(0, torch.tensor(0), h.exp().sum())
        ),
        lambda h, i, given: h + h.exp(),
    ),
    "through what is not seen": (
        lambda h: (
            Doubled.apply(Doubled.apply(h).mean()) / 2 + script_of_a_loss(h) + 2 * Added.apply(h.mT)
        ),
        lambda h, i, given: (2 * h + h.exp()) / BATCH / WIDTH + h.square(),
    ),
    "means of groups, as PyTorch has them": (
        lambda h: (
            torch.segment_reduce(h.exp(), "mean", lengths=torch.tensor([1, 2])).sum()
            + torch.nn.utils.rnn.pad_sequence(h.split([1, 2])).sum(0).sum()
        ),
        lambda h, i, given: h.exp() / (1 if i == 0 else 2) + h,
    ),
    "repeated, and the real part": (
        lambda h: h.mean(0).repeat_interleave(2).sum() + torch.complex(h.sum(), h.sum()).real,
        lambda h, i, given: 2 * h / BATCH + h,
    ),
    "a form that all examples share": (
        lambda h: functional.bilinear(h, h, FORM).sum(),
        lambda h, i, given: h @ FORM[0] * h,
    ),
    "plain powers, products and quotients": (
        lambda h: (
            torch.addcmul(ONES[0, 0], h.exp().sum() ** 1, ONES[0, 0], value=2)
            + torch.addcdiv(ONES[0, 0], h.sum(), 4 * ONES[0, 0])
        ),
        lambda h, i, given: 2 * h.exp() + h / 4,
    ),
    "several losses in one tensor": (
        lambda h: several_losses(h).sum(),
        lambda h, i, given: 3 * h.square() + 2 * h.sin(),
    ),
    "losses summed in a loop": (
        lambda h: one_by_one(h).sum(),
        lambda h, i, given: 3 * h.square() + 2 * h.sin() + (h if i == 0 else 0),
    ),
    "totals in one tensor": (
        lambda h: totals(h) @ torch.tensor([1.0, 1.0, 4.0]).double(),
        lambda h, i, given: h.exp() + h.cos() + 4 * h,
    ),
    "in units of itself": (
        lambda h: h.square().sum() / h.square().sum().detach() * 2,
        lambda h, i, given: h.square() / given.square().sum() * 2,
    ),
}


@pytest.mark.filterwarnings("ignore:size_average and reduce")
@pytest.mark.parametrize("scalar,part", SUMS.values(), ids=SUMS)
def test_scalars_that_are_sums_over_the_examples(scalar, part):
    model, x = nn.Linear(WIDTH, WIDTH).double(), batch()
    hidden = model(x).detach()
    with gs.track(model, batch_size=BATCH, loss_reduction="sum") as tracker:
        scalar(model(x)).backward()
    for i in range(BATCH):
        weights = torch.autograd.grad(
            part(model(x[i : i + 1]), i, hidden).sum(), [*model.parameters()]
        )
        expected = sum(gradient.square().sum() for gradient in weights)
        torch.testing.assert_close(tracker.stats.sqnorm[i], expected, rtol=1e-10, atol=0)


# What is done to a mean loss before its backward.
KEPT = {
    "signs": lambda s: 1 - (-s) + 1,
    "parts": lambda s: torch.stack([s / 2, s.clone() / 2]).sum(),
    "joined": lambda s: torch.cat([s.view(1), s[None]]).nanmean(),
    "kinds": lambda s: torch.atleast_1d(s.to(torch.float64).cpu().type(torch.float64)).squeeze(),
    "limits": lambda s: torch.maximum(s.nan_to_num().clamp(max=1e9), torch.zeros(()).double()),
    "flooded": lambda s: (s - 1e-3).abs() + 1e-3,
    "where it is finite": lambda s: torch.where(s.isfinite(), s, torch.zeros_like(s)),
    "in place": lambda s: torch.zeros(()).double().add_(s).mul_(4).div_(4),
    "in place of a number made unseen": lambda s: torch.Tensor([0]).double().add_(s).add_(1),
    "weighted": lambda s: torch.stack([s, s]) @ torch.tensor([0.25, 0.75]).double(),
    "its own size": lambda s: s / s.detach() * s.item(),
    "between two": lambda s: torch.lerp(s, 3 * s, 0.25) / 1.5,
    "leaks": lambda s: functional.leaky_relu(functional.hardtanh(s, -1e9, 1e9)),
    "stored": lambda s: stored(s)[1:].sum(),
    "a layer": lambda s: functional.linear(s.view(1, 1), torch.ones(1, 1).double()).sum(),
}


@pytest.mark.parametrize("kept", KEPT.values(), ids=KEPT)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_what_leaves_a_mean_loss_a_mean(kept, reduction):
    model, x = nn.Linear(WIDTH, WIDTH).double(), batch()

    def losses(m, x, reduction="none"):
        return functional.mse_loss(m(x), x.sin(), reduction=reduction)

    expected = oracle_sqnorms(model, x, lambda m, x: losses(m, x).mean(1))
    with gs.track(model, batch_size=BATCH) as tracker:
        kept(losses(model, x, reduction).mean()).backward()
    assert_sqnorms(tracker.stats, expected, 1e-10)


# What takes values of other examples as given, or stays within each.
APART = {
    "inputs centred": lambda m, x: m(x - x.mean(0)),
    "detached mean": lambda m, x: m(x) - m(x).mean(0).detach(),
    "a sum over all, times 0": lambda m, x: m(x) + m(x).sin().sum() * 0,
    "a mean over all, times 0": lambda m, x: m(0.0 * m(x).mean(0) + m(x).sin()),
    "softmax": lambda m, x: m(x).softmax(1),
    "mean of each": lambda m, x: m(x) - m(x).mean(-1, keepdim=True),
    "mean of each, as numpy has it": lambda m, x: m(x) - m(x).mean(axis=1, keepdims=True),
    "norm of each": lambda m, x: functional.layer_norm(m(x), (WIDTH,)),
    "largest of two": lambda m, x: torch.max(m(x), x),
    "largest of two, given by name": lambda m, x: torch.max(m(x), other=m(x).sin()),
    "sum of two, given by name": lambda m, x: torch.add(m(x), other=m(x).sin(), alpha=2),
    "outer product, given by name": lambda m, x: torch.outer(
        m(x).sum(1), vec2=torch.arange(3).double()
    ),
    "inner products, given by name": lambda m, x: torch.inner(m(x), other=SQUARE),
    "solutions, given by name": lambda m, x: torch.linalg.solve(
        SQUARE + m(x)[:, :, None].sin() * m(x)[:, None].sin(), B=m(x)
    ),
    "contractions written to a buffer": lambda m, x: m(x) * written_out(m(x).sin()),
    "products written to a buffer": lambda m, x: m(torch.mul(x, x, out=torch.empty_like(x))),
    "sums written to a buffer": lambda m, x: m(
        torch.sum(x, 1, keepdim=True, out=torch.empty(len(x), 1).double()).expand_as(x)
    ),
    "a cell": lambda m, x: torch.gru_cell(m(x), m(x).sin(), *GATES),
    "a recurrent layer": lambda m, x: recurrent(m(x), m(x).sin()),
    "attention": lambda m, x: attention(m(x), m(x).sin()),
}


@pytest.mark.parametrize("function", APART.values(), ids=APART)
def test_examples_that_stay_apart(function):
    model = nn.Linear(WIDTH, WIDTH).double()
    given = model(batch()).mean(0).detach()

    def losses(m, x):
        return function(m, x).square().sum(1)

    x = batch()
    rows = x - x.mean(0)

    def alone(m, pair):
        """The same with what other examples give written out."""
        own, centred = pair
        if function is APART["inputs centred"]:
            return m(centred).square().sum(1)
        if function is APART["detached mean"]:
            return (m(own) - given).square().sum(1)
        return losses(m, own)

    expected = oracle_sqnorms(model, (x, rows), alone)
    assert_sqnorms(gs.per_example_norms(model, x, losses), expected, 1e-10)


def test_a_batch_of_one_couples_nothing():
    model, x = nn.Linear(WIDTH, WIDTH).double(), batch()[:1]

    def losses(m, x):
        h = m(x)
        return (h - 2 * h.mean(0)).square().sum(1)

    expected = oracle_sqnorms(model, x, losses)
    with gs.track(model, batch_size=1) as tracker:
        losses(model, x).mean().backward()
    assert_sqnorms(tracker.stats, expected, 1e-10)


# Of inputs (B, B), with an axis that is as long as the batch and not the examples'.
STATISTICS = {
    "mean": lambda x: x.mean(0).t(),
    "mean, kept axis": lambda x: x.mean(0, keepdim=True).t(),
    "product": lambda x: (torch.ones(1, BATCH).double() @ x).t(),
    "layer": lambda x: functional.linear(torch.ones(1, BATCH).double(), x.t())[0],
    "pooled": lambda x: functional.avg_pool1d(x.t()[None], BATCH)[0].squeeze(-1),
    "places": lambda x: torch.isin(torch.arange(BATCH), (x[:, 0] > 0).long()),
}


@pytest.mark.parametrize("statistic", STATISTICS.values(), ids=STATISTICS)
def test_statistics_of_a_batch_are_not_taken_for_its_examples(statistic):
    """A scalar loss would not tell."""
    torch.manual_seed(0)
    model, x = nn.Linear(BATCH, BATCH).double(), torch.randn(BATCH, BATCH).double()
    scale = model.scale = nn.Parameter(torch.randn(BATCH).double())
    with (
        pytest.raises(gs.ExampleAxisError, match="'scale'"),
        gs.track(model, batch_size=BATCH),
    ):
        (model(x).square().sum(1).mean() + (scale * statistic(x)).tanh().sum()).backward()


# Of inputs (B, d), as each example gets them.
GIVEN = {
    "centred": lambda m, x: m(x - x.mean(0, keepdim=True)),
    "divided": lambda m, x: m(x) / x.std(0, keepdim=True),
    "expanded": lambda m, x: m(x) * m(x.mean(0, keepdim=True).expand(BATCH, -1)),
    "expanded in front": lambda m, x: m(x) * m(x.mean(0).expand_as(x)),
    "repeated": lambda m, x: m(x) * m(x.mean(0, keepdim=True).repeat(BATCH, 1)),
    "repeated one by one": lambda m, x: (
        m(x) * m(x.amax(0, keepdim=True).repeat_interleave(BATCH, 0))
    ),
    "a number, tiled": lambda m, x: m(x) * m(x.std().tile(BATCH, x.shape[1])),
    "places": lambda m, x: m(x) * torch.isin(torch.arange(x.shape[1]), (x[:, 0] > 0).long()),
    "places of examples": lambda m, x: (
        m(x) * torch.isin(torch.arange(BATCH), torch.tensor([0, 2]))[:, None]
    ),
}


@pytest.mark.parametrize("width", [BATCH, WIDTH])
@pytest.mark.parametrize("function", GIVEN.values(), ids=GIVEN)
def test_statistics_of_a_batch_are_given(function, width):
    torch.manual_seed(0)
    model, x = nn.Linear(width, width).double(), torch.randn(BATCH, width).double()
    x[0, 0] = x[0, 0].abs()

    def losses(m, x):
        return function(m, x).square().sum(1)

    expected = oracle_on_the_batch(model, x, losses)
    assert_sqnorms(gs.per_example_norms(model, x, losses), expected, 1e-10)
    with gs.track(model, batch_size=BATCH) as tracker:
        losses(model, x).mean().backward()
    assert_sqnorms(tracker.stats, expected, 1e-10)


def _filled(x, empty, put=lambda means, place, mean: means.__setitem__(place, mean)):
    means = empty(x)
    for place, column in enumerate(x.mT):
        put(means, place, column.mean())
    return means / 2


ONE = torch.ones((), requires_grad=True)


# Statistics of inputs (B, d) over the batch, one for each feature, with as many of these as there
# are examples.
STATISTICS = {
    "stacked": lambda x: torch.stack([column.mean() for column in x.mT]),
    "of unbound columns": lambda x: torch.stack([column.amax() for column in x.unbind(1)]),
    "of indexed columns": lambda x: torch.stack([x[:, i].norm() for i in range(x.shape[1])]),
    "joined": lambda x: torch.cat([column.std()[None] for column in x.mT]),
    "made a tensor": lambda x: torch.tensor([column.mean() for column in x.mT]),
    "filled in": lambda x: _filled(x, lambda x: torch.zeros(x.shape[1]).double()),
    "filled in, new": lambda x: _filled(x, lambda x: x.new_empty(x.shape[1])),
    "copied to a row": lambda x: _filled(
        x,
        lambda x: torch.zeros(x.shape).double(),
        lambda means, place, mean: means[place].copy_(mean),
    )[:, 0],
    "detached": lambda x: torch.stack([column.mean().detach() for column in (x * ONE).mT]),
    "variances": lambda x: torch.stack([torch.cov(column) for column in x.mT]),
    "products": lambda x: torch.stack([column @ column for column in x.mT]),
    "combined": lambda x: torch.stack([c.max() - 2 * c.min() for c in x.mT]).sqrt().abs(),
    "changed in place": lambda x: torch.stack([c.mean().mul_(2).add_(c.std()) for c in x.mT]),
    "between bounds": lambda x: torch.linspace(x.min(), x.max(), x.shape[1]).double(),
    "a number and constants": lambda x: x.mean() * torch.arange(x.shape[1]),
    "counts": lambda x: torch.stack([(x.argmax(1) == k).sum() for k in range(3)]).double(),
}


@pytest.mark.parametrize("statistic", STATISTICS.values(), ids=STATISTICS)
@pytest.mark.parametrize("runs", [1, 2])
def test_statistics_of_as_many_features_as_there_are_examples(statistic, runs):
    """They are no rows of the examples, and inputs are normalised by them as by ``x.mean(0)``."""
    torch.manual_seed(0)
    model, x = nn.Linear(3, 3).double(), torch.randn(3, 3).double()

    def norms(loss):
        with gs.track(model, batch_size=3) as tracker:
            loss().backward()
        return tracker.stats

    def normalised(model, x):
        return model((x - statistic(x)) / 2).square().mean(1)

    for _ in range(runs):
        with pytest.raises(gs.ExampleAxisError):
            norms(lambda: (model.bias[:1] * statistic(x)).exp().mean() + model(x).square().mean())
        found = norms(lambda: normalised(model, x).mean())
        assert_sqnorms(found, oracle_on_the_batch(model, x, normalised), rtol=1e-8)
