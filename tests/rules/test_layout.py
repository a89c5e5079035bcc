"""Examples moved to another axis by the model itself; with T = B shape cannot tell."""

import copy
import functools
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd import Variable

import gradstats as gs
from tests.oracle import assert_sqnorms, gradients_of, oracle_sqnorms, sqnorms_of
from tests.rules.operation import Operation, check_operation, check_refused, normal

BATCH = 3

MOVES = {
    "transpose": lambda x: x.transpose(0, 1),
    "permute": lambda x: x.permute(1, 0, 2),
    "movedim": lambda x: x.movedim(0, 1),
    "swapaxes": lambda x: torch.swapaxes(x, 0, 1),
    "contiguous": lambda x: x.transpose(0, 1).contiguous(),
    "arithmetic": lambda x: 2 * x.transpose(0, 1).tanh() + 1,
    "through a layer": lambda x: nn.functional.layer_norm(x.transpose(0, 1), (4,)),
    "rearranged": lambda x: torch.einsum("btd->tbd", x),
}


@pytest.mark.parametrize("positions", [2, BATCH, 5])
@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_time_major(move, positions):
    check_operation(
        lambda m, x: m.layer(move(x)).transpose(0, 1),
        {"layer": nn.Linear(4, 2)},
        normal(BATCH, positions, 4),
    )


@pytest.mark.parametrize("positions", [2, BATCH, 5])
def test_time_major_rows_folded(positions):
    """Rows of one example do not stand together: each row's example is followed."""

    def function(m, x):
        rows = x.transpose(0, 1).reshape(-1, 4)
        return m.layer(rows).view(positions, BATCH, 2).transpose(0, 1)

    check_operation(function, {"layer": nn.Linear(4, 2)}, normal(BATCH, positions, 4))


@pytest.mark.parametrize("positions", [2, BATCH, 5])
def test_attention_written_as_einsum(positions):
    def function(m, x):
        q, k, v = m.qkv(x).chunk(3, dim=-1)
        weights = torch.einsum("bqd,bkd->bqk", q, k).softmax(-1)
        return m.out(torch.einsum("bqk,bkd->bqd", weights, v))

    parameters = {"qkv": nn.Linear(4, 12), "out": nn.Linear(4, 2)}
    check_operation(function, parameters, normal(BATCH, positions, 4))


JOINED = {
    "one alone in front": lambda x: torch.cat([x[0][None], x[1:]]),
    "one alone behind": lambda x: torch.cat([x[:-1], x[-1].unsqueeze(0)]),
    "one alone between": lambda x: torch.cat([x[:1], x[1][None], x[2:]]),
    "in another order": lambda x: torch.cat([x[1:], x[0][None]])[torch.tensor([2, 0, 1])],
}


@pytest.mark.parametrize("name", JOINED)
def test_rows_of_one_example_beside_rows_of_others(name):
    check_operation(
        lambda m, x: m.last(JOINED[name](m.layer(x).tanh())),
        {"layer": nn.Linear(4, 4), "last": nn.Linear(4, 2)},
        normal(BATCH, 5, 4),
    )


QUANTILES = {
    "one": lambda x, dim: x.quantile(0.3, dim),
    "one in a tensor": lambda x, dim: x.nanquantile(torch.tensor(0.3).double(), dim),
    "several": lambda x, dim: x.quantile(torch.tensor([0.2, 0.7]).double(), dim)[0],
    "several along an axis that is kept": lambda x, dim: x.quantile(
        torch.tensor([0.2, 0.7]).double(), dim, keepdim=True
    ).sum((0, 1 + dim)),
}


@pytest.mark.parametrize("positions", [2, BATCH])
@pytest.mark.parametrize("name", QUANTILES)
def test_quantiles(name, positions):
    """Several stand along a new axis in front of the examples'."""

    def function(m, x):
        of_positions = QUANTILES[name](m.layer(x), 1)
        of_features = QUANTILES[name](m.layer(x), 2)
        return torch.cat([m.last(of_positions), of_features], 1)

    parameters = {"layer": nn.Linear(4, 4), "last": nn.Linear(4, 2)}
    check_operation(function, parameters, normal(BATCH, positions, 4))


@pytest.mark.filterwarnings("ignore:Implicit dimension choice:UserWarning")
@pytest.mark.parametrize("name", ["softmax", "log_softmax", "softmin"])
def test_an_axis_that_is_chosen_by_the_number_of_axes(name):
    """The first of one or three axes, the second of two or four."""
    layer, function = {"layer": nn.Linear(4, 4)}, getattr(nn.functional, name)
    for shape in ((BATCH, 4), (BATCH, 2, 1, 4)):
        check_operation(lambda m, x: m.layer(function(m.layer(x))), layer, normal(*shape))
    check_refused(
        lambda m, x: function(m.layer(x)), layer, normal(BATCH, 2, 4),
        error=gs.CoupledExamplesError, match="normalised",
    )  # fmt: skip


BY_NUMPYS_NAMES = {
    "sum": lambda x: torch.sum(x=x.transpose(0, 1), axis=0),
    "add": lambda x: torch.add(x1=x, x2=x.tanh()),
    "reshape": lambda x: torch.reshape(a=x.transpose(0, 1), shape=(-1, 2, 2)).unflatten(
        0, (-1, BATCH)
    )[0],
    "index_select": lambda x: torch.index_select(a=x, dim=1, index=torch.tensor([1, 0])),
    "transpose": lambda x: torch.transpose(x=x, dim0=0, dim1=1).transpose(0, 1),
}


@pytest.mark.parametrize("name", BY_NUMPYS_NAMES)
def test_operands_by_numpys_names(name):
    check_operation(
        lambda m, x: BY_NUMPYS_NAMES[name](m.layer(x)),
        {"layer": nn.Linear(4, 4)},
        normal(BATCH, BATCH, 4),
    )


def test_parameters_by_numpys_names():
    def function(m, x):
        product = torch.mm(x=x, mat2=torch.mul(x1=m.w, x2=m.v))
        return torch.add(x1=product, x2=torch.sum(a=m.w, axis=1))

    check_operation(function, {"w": (4, 4), "v": (4,)}, normal(BATCH, 4))


OF_DATA = {
    "linear": lambda m, x, weight: nn.functional.linear(x, weight, m.bias),
    "rows": lambda m, x, weight: nn.functional.linear(x[:, None], weight, m.bias)[:, 0],
    "conv1d": lambda m, x, weight: nn.functional.conv1d(
        x[:, None], weight[:, None], m.bias
    ).squeeze(2),
    "padded": lambda m, x, weight: nn.functional.conv2d(
        x[:, None, None], weight[:, None, None], m.bias, padding=1
    ).sum((2, 3)),
}


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", OF_DATA)
def test_bias_beside_a_weight_of_data(name, fused):
    """Each example scores data of all others that are not trained: it lies along the columns."""
    model = nn.Linear(4, BATCH).double()
    given, (x, others) = nn.Linear(4, 4).double(), normal(2, BATCH, 4)
    model.layer = given
    with gs.track(model, batch_size=BATCH, fused=fused) as tracker:
        losses = OF_DATA[name](model, others, model.layer(x)).sin().sum(0)
        tracker.backward(losses)
    losses = OF_DATA[name](model, others, model.layer(x)).sin().sum(0)
    expected = sqnorms_of(gradients_of(model, losses))
    for key in ("bias", "layer.weight"):
        torch.testing.assert_close(tracker.stats.by_parameter[key], expected[key])


@pytest.mark.parametrize("first", [True, False])
def test_inner_product_with_a_number(first):
    def function(m, x):
        operands = m.layer(x), torch.tensor(0.5).double()
        return torch.inner(*(operands if first else reversed(operands)))

    check_operation(function, {"layer": nn.Linear(4, 2)}, normal(BATCH, 4))


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("positions", [2, BATCH, 5])
def test_attention_whose_logits_are_added_to_a_constant(positions, named):
    """Heads folded into the batch, the distances of positions added by the product."""

    def function(m, x):
        q, k, v = (
            heads.unflatten(-1, (2, 3)).transpose(1, 2).flatten(0, 1)
            for heads in m.qkv(x).chunk(3, dim=-1)
        )
        distance = torch.arange(positions).double().repeat(BATCH * 2, 1, 1)
        pair = {"batch1": q, "batch2": k.mT}
        logits = distance.baddbmm(**pair) if named else distance.baddbmm(*pair.values())
        mixed = torch.bmm(logits.softmax(-1), v).unflatten(0, (BATCH, 2))
        return m.out(mixed.transpose(1, 2).flatten(2))

    parameters = {"qkv": nn.Linear(4, 18), "out": nn.Linear(6, 2)}
    check_operation(function, parameters, normal(BATCH, positions, 4))


PICKS = {
    "overlapping windows": lambda x: x.contiguous().as_strided(
        (BATCH, 2, 2, 4), (x.shape[1] * 4, 4, 4, 1)
    ),
    "windows of what was transposed": lambda x: (
        x.transpose(0, 1)
        .contiguous()
        .as_strided((2, 2, BATCH, 4), (12, 12, 4, 1))
        .permute(2, 0, 1, 3)
    ),
    "windows of chunks, as long as these": lambda x: (
        x.repeat(1, 2, 1)
        .unflatten(1, (2, -1))
        .as_strided((BATCH, x.shape[1] + 1, *x.shape[1:]), (x.shape[1] * 8, 4, 4, 1))
    ),
    "unfolded": lambda x: x.transpose(0, 1).unfold(0, 2, 1).permute(1, 0, 3, 2),
    "made diagonal": lambda x: torch.diag_embed(x.transpose(0, 1), 1, 1, dim2=0).movedim(3, 0),
    "diagonal": lambda x: torch.einsum("btd,bse->btsde", x, x).diagonal(dim1=1, dim2=2).mT,
    "diagonal of what is expanded": lambda x: (
        x[:, None].expand(-1, x.shape[1], -1, -1).diagonal(dim1=1, dim2=2).mT
    ),
    "taken": lambda x: x.take(torch.arange(x.numel()).view(x.shape).flip(1)),
    "indices apart": lambda x: x.unsqueeze(2).expand(-1, -1, 5, -1)[
        torch.tensor([0, 1, 2]), :, torch.tensor([3, 0, 1])
    ],
    "each at its own place": lambda x: x.diagonal(dim1=0, dim2=1).T,
    "each of one product": lambda x: (x.sum(1) @ x.detach()[:, 0].T).diag()[:, None] * x[:, 1],
    "turned": lambda x: x.rot90(2, (0, 1)).flip(0, 1),
    "gathered": lambda x: x.gather(0, torch.tensor([2, 0, 1])[:, None, None].expand_as(x))[
        torch.tensor([1, 2, 0])
    ],
}


@pytest.mark.parametrize("positions", [BATCH, 5])
@pytest.mark.parametrize("pick", PICKS.values(), ids=PICKS)
def test_elements_picked_one_by_one(pick, positions):
    check_operation(
        lambda m, x: m.last(pick(m.layer(x))),
        {
            "layer": nn.Linear(4, 4),
            "last": nn.Linear(pick(normal(BATCH, positions, 4)).shape[-1], 2),
        },
        normal(BATCH, positions, 4),
    )


@pytest.mark.parametrize(
    "pick",
    [
        lambda x: x.contiguous().as_strided((BATCH, 6, 4), (8, 4, 1)),
        lambda x: x[:, :4].as_strided((BATCH, 5, 4), (20, 4, 1)),
        lambda x: x.gather(
            0, (torch.arange(BATCH)[:, None, None] + torch.arange(5)[:, None]).expand_as(x) % BATCH
        ),
        lambda x: x[1:].as_strided(x.shape, x.stride(), 0),
        lambda x: x.sum((1, 2)).diag_embed().sum(1)[:, None, None] * x,
        lambda x: x.sum((1, 2)).diag().sum(1)[:, None, None] * x,
    ],
)
def test_elements_of_several_examples_side_by_side_are_refused(pick):
    check_refused(
        lambda m, x: m.layer(pick(m.first(x))),
        {"first": nn.Linear(4, 4), "layer": nn.Linear(4, 2)},
        normal(BATCH, 5, 4),
        error=(gs.ExampleAxisError, gs.CoupledExamplesError),
        match="linear.*'layer.weight'|SumBackward1 combines trained values of different examples",
    )


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: m.layer(x.unfold(1, 4, 4)),
        lambda m, x: torch.cat([m.layer(part) for part in x.split(2)]),
    ],
    ids=["windows", "parts"],
)
def test_picks_from_a_row_that_was_expanded_for_all_examples_are_refused(function):
    """All examples lie at one place in memory, which does not say whose a part of it is."""
    check_refused(
        function,
        {"layer": nn.Linear(4, 2)},
        normal(1, 4).expand(BATCH, -1),
        error=gs.ExampleAxisError,
        match="linear.*'layer.weight'",
    )


def test_inputs_of_one_example_taken_off_those_of_all():
    check_operation(
        lambda m, x: m.layer(x - x[1][None]),
        {"layer": nn.Linear(4, 2)},
        normal(BATCH, 4),
        gradient_of_data=False,
    )


@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("positions", [2, 3])
def test_systems_of_equations_with_a_vector_for_each_matrix(batch, positions):
    """As accelerations follow from a learned mass matrix."""

    def function(m, x):
        matrices = m.layer(x).unflatten(-1, (2, 2)) + 3 * torch.eye(2)
        solved = torch.linalg.solve(matrices, m.right(x))
        one = torch.linalg.solve(matrices, torch.ones(2).double())
        first = torch.linalg.solve_ex(matrices[:, 0], x[:, 0, :2]).result
        return m.last(solved + one).flatten(1) + m.last(first).repeat(1, positions)

    parameters = {"layer": nn.Linear(4, 4), "right": nn.Linear(4, 2), "last": nn.Linear(2, 2)}
    check_operation(function, parameters, normal(batch, positions, 4))


def test_systems_of_equations():
    def function(m, x):
        matrices = m.layer(x).unflatten(-1, (2, 2)) + 3 * torch.eye(2)
        right = m.right(x).unflatten(-1, (2, 2))
        solved = torch.linalg.solve(matrices, right).flatten(2)
        triangular = torch.linalg.solve_triangular(
            matrices.transpose(0, 1), right.transpose(0, 1), upper=False
        )
        shared = torch.linalg.solve(torch.eye(2).double() * 2, right)
        return m.last(torch.cat([solved, (triangular.transpose(0, 1) + shared).flatten(2)], -1))

    parameters = {"layer": nn.Linear(4, 4), "right": nn.Linear(4, 4), "last": nn.Linear(8, 2)}
    for positions in (BATCH, 5):
        check_operation(function, parameters, normal(BATCH, positions, 4))


def test_a_system_of_equations_of_all_examples_is_refused():
    check_refused(
        lambda m, x: m.layer(torch.linalg.solve(torch.eye(BATCH).double() + 1, m.layer(x))),
        {"layer": nn.Linear(4, 4)},
        normal(BATCH, 4),
        error=gs.ExampleAxisError,
        match="linear.*'layer.weight'",
    )


@pytest.mark.parametrize("positions", [1, BATCH, 5])
def test_products_of_groups_of_folded_rows(positions):
    def function(m, x):
        groups = x.flatten(0, 1).unflatten(1, (2, 4)).transpose(0, 1)
        product = torch.bmm(groups, m.w) + torch.einsum("gnd,gde->gne", groups, m.w) ** 2
        product = product + torch.matmul(m.v, groups.mT).mT
        product = product + torch.baddbmm(m.b[:, None], groups, m.u)
        return product.transpose(0, 1).unflatten(0, (BATCH, positions)).flatten(2)

    parameters = {"w": (2, 4, 3), "v": (2, 3, 4), "u": (2, 4, 3), "b": (2, 3)}
    check_operation(function, parameters, normal(BATCH, positions, 8))


@pytest.mark.parametrize("positions", [2, BATCH, 5])
def test_a_relative_position_bias_as_attention_mask(positions):
    def function(m, x):
        index = torch.arange(positions)
        bias = m.table((index[:, None] - index).abs()).permute(2, 0, 1).unsqueeze(0)
        heads = m.layer(x).unflatten(-1, (2, -1)).transpose(1, 2)
        mixed = nn.functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=bias)
        return mixed.transpose(1, 2).flatten(2)

    parameters = {"layer": nn.Linear(4, 6), "table": nn.Embedding(positions, 2)}
    check_operation(function, parameters, normal(BATCH, positions, 4))


@pytest.mark.parametrize("positions", [BATCH, 5])
def test_positions_kept_as_an_attribute(positions):
    """A tensor that a module keeps belongs to no example, registered as a buffer or not."""
    layer = nn.Embedding(positions, 4)
    layer.positions = torch.arange(positions)
    check_operation(
        lambda m, x: x + m.layer(m.layer.positions), {"layer": layer}, normal(BATCH, positions, 4)
    )


class Kept(nn.Module):
    """Positions that a model keeps elsewhere than in an attribute of their own."""

    def __init__(self, where):
        super().__init__()
        self.scale, self.where = nn.Parameter(torch.randn(BATCH)), where
        self.made = {"list": [self.make()], "tuple": (self.make(), [self.make()]), "dict": {}}
        if where in ("list", "tuple"):
            self.kept = self.made[where]

    @staticmethod
    def make():
        return torch.arange(BATCH) * 0.5

    @functools.cache  # noqa: B019
    def cached(self):
        return self.make()

    def forward(self, x):
        if self.where == "cache":
            return x + self.scale * self.cached()
        if self.where == "dict":
            self.made["dict"].setdefault(BATCH, self.make())
            return x + self.scale * self.made["dict"][BATCH]
        return x + self.scale * self.kept[0]


@pytest.mark.parametrize("where", ["list", "tuple", "dict", "cache"])
def test_positions_kept_by_the_model(where):
    """As many as examples; the first call makes some of them, and the second finds them."""
    model, x = Kept(where).double(), normal(BATCH, BATCH)

    def losses(m, x):
        return m(x).square().sum(1)

    slopes = 2 * (x + model.scale.detach() * model.make()) * model.make()
    expected = {"scale": slopes.square().sum(1)}
    for _ in range(2):
        assert_sqnorms(gs.per_example_norms(model, x, losses), expected, 1e-12)


@pytest.mark.parametrize("index", [True, torch.tensor(True), (slice(None), True)])
def test_an_axis_added_by_a_truth_value(index):
    def losses(m, x):
        return m(x)[index].square().sum((0, 2) if not isinstance(index, tuple) else (1, 2))

    def summed(m, x):
        return m(x).square().sum(1)

    model, x = nn.Linear(3, BATCH).double(), normal(BATCH, 3)
    expected = oracle_sqnorms(model, x, summed)
    assert_sqnorms(gs.per_example_norms(model, x, losses), expected, 1e-12)


COLUMNS = torch.tensor([1, 0, 2])


@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")
@pytest.mark.parametrize(
    ("index", "same"),
    [
        ([slice(None), slice(1, None)], (slice(None), slice(1, None))),
        ([torch.arange(BATCH), COLUMNS], (torch.arange(BATCH), COLUMNS)),
        ([list(range(BATCH)), COLUMNS.tolist()], (torch.arange(BATCH), COLUMNS)),
        ([torch.arange(BATCH)], (torch.arange(BATCH),)),
        ([torch.ones(BATCH, dtype=torch.bool)], (torch.arange(BATCH),)),
        ((slice(None), COLUMNS[0]), (slice(None), int(COLUMNS[0]))),
    ],
    ids=["slices", "tensors", "lists", "one tensor", "a mask", "a number as a tensor of data"],
)
@pytest.mark.parametrize("written", [False, True], ids=["read", "written"])
def test_indices_of_the_batch(index, same, written):
    """PyTorch takes a list that holds slices or tensors for a tuple."""
    model, x = nn.Linear(3, BATCH).double(), normal(BATCH, 3)

    def losses(index):
        def of_part(m, x):
            h = m(x)
            if written:
                filled = torch.zeros_like(h)
                filled[index] = h[same].square()
                return (filled * h).sum(1)
            return h[index].square().reshape(BATCH, -1).sum(1)

        return of_part

    assert_sqnorms(
        gs.per_example_norms(model, x, losses(index)),
        oracle_sqnorms(model, x, losses(same)),
        1e-12,
    )


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8:UserWarning")
@pytest.mark.parametrize("written", [False, True], ids=["read", "written"])
def test_masks_of_bytes(written):
    """PyTorch takes them for masks of truth values."""
    mask = torch.tensor([[1, 0, 1], [0, 1, 1], [1, 1, 0]], dtype=torch.uint8)

    def function(m, x):
        h = m.first(x)
        if written:
            h = h.clone()
            h[mask] = x[mask.bool()]
            return m.last(h)
        return m.last(h[mask]).view(BATCH, 2, 2)

    parameters = {"first": nn.Linear(4, 4), "last": nn.Linear(4, 2)}
    check_operation(function, parameters, normal(BATCH, 3, 4), gradient_of_data=False)


@pytest.mark.parametrize("number", [np.int64(1), np.array(1), 1], ids=repr)
@pytest.mark.parametrize("positions", [2, BATCH])
def test_a_table_with_a_number_before_indices_of_data(positions, number):
    """A number of NumPy takes an axis, as any other."""

    def function(m, ids):
        table = torch.arange(40, dtype=torch.float64).view(2, 5, 4)
        return m.last(table[number, ids])

    ids = torch.arange(BATCH * positions).view(BATCH, positions) % 5
    check_operation(function, {"last": nn.Linear(4, 2)}, ids)


def test_values_made_like_a_tensor_of_data():
    """Where each field's rows begin in one table, with as many fields as examples."""
    starts = [0, 4, 8]

    def losses(m, ids):
        return m(ids + ids.new_tensor(starts).unsqueeze(0)).flatten(1).sin().square().sum(1)

    model, ids = nn.Embedding(12, 4).double(), torch.randint(4, (BATCH, len(starts)))
    expected = oracle_sqnorms(model, ids, losses)
    assert_sqnorms(gs.per_example_norms(model, ids, losses), expected, 1e-12)


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: m[1](Variable(m[0](x).sin().transpose(0, 1))[-1]),
        lambda m, x: x[:, 0] @ (m[0].weight * Variable(torch.arange(4.0)[:, None].double())).mT,
        lambda m, x: m[1](m[0](Variable(x[:, 0], requires_grad=True))),
    ],
    ids=["moved", "constant", "inputs"],
)
def test_variables_of_old_code(function):
    """They are detached tensors, whose examples lie as before; as many positions as examples."""
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double(), normal(BATCH, BATCH, 3)

    def losses(m, x):
        return function(m, x).square().sum(1)

    expected = oracle_sqnorms(model, x, losses)
    assert_sqnorms(gs.per_example_norms(model, x, losses), expected, 1e-12)
    with gs.track(model, batch_size=BATCH) as tracker:
        losses(model, x).mean().backward()
    assert_sqnorms(tracker.stats, expected, 1e-12)


class Labelled(torch.Tensor):
    """A subclass of tensors, as those of images are in libraries for them."""


@pytest.mark.parametrize("kind", [torch.Tensor, Labelled])
@pytest.mark.parametrize(
    "function",
    [
        lambda m, x, kind: m.second(m.first(x).swapaxes(0, 1).as_subclass(kind)).swapaxes(0, 1),
        lambda m, x, kind: m.second(m.first(x).flip(0).as_subclass(kind)).flip(0),
        lambda m, x, kind: m.second(x.swapaxes(0, 1).as_subclass(kind)).swapaxes(0, 1),
        lambda m, x, kind: m.second(m.first(x) + m.first(m.first.table.as_subclass(kind))),
        lambda m, x, kind: m.second(x @ m.first.weight.as_subclass(torch.Tensor).tanh()),
    ],
    ids=["moved", "reordered", "inputs", "constant", "weight"],
)
def test_tensors_taken_for_those_of_another_class(function, kind):
    """Their examples lie as before; as many positions as examples."""

    def of_class(m, x):
        return function(m, x, kind).as_subclass(torch.Tensor)

    parameters = {"first": nn.Linear(BATCH, BATCH), "second": nn.Linear(BATCH, BATCH)}
    parameters["first"].register_buffer("table", normal(BATCH, BATCH))
    check_operation(of_class, parameters, normal(BATCH, BATCH, BATCH))


class Named:
    """Tensors by name, no tensor itself: a function is applied to each, as in a TensorDict."""

    def __init__(self, **values):
        self.values = values

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if not all(issubclass(kind, cls) for kind in types):
            return NotImplemented

        def pick(name, item):
            if isinstance(item, Named):
                return item.values[name]
            return [pick(name, each) for each in item] if isinstance(item, list) else item

        first = args[0][0] if isinstance(args[0], list) else args[0]
        picked = {name: [pick(name, item) for item in args] for name in first.values}
        return cls(**{name: func(*items, **kwargs or {}) for name, items in picked.items()})


class Quantised(NamedTuple):
    """A weight with its scale, which layers take in place of a weight."""

    weight: torch.Tensor
    scale: torch.Tensor

    def __torch_function__(self, func, types, args=(), kwargs=None):
        first, own, *others = args
        assert own is self
        return func(first.flip(0), own.weight * own.scale, *others, **kwargs or {}).flip(0)


@pytest.mark.filterwarnings("ignore:Defining your `__torch_function__` as a plain method")
@pytest.mark.filterwarnings("ignore:Defining your `__torch_function__ as a plain method")
@pytest.mark.parametrize("inside", [True, False], ids=["values", "inputs"])
@pytest.mark.parametrize(
    "function",
    [
        lambda m, h: m.first(torch.permute(Named(h=h), (1, 0, 2)).values["h"]).transpose(0, 1),
        lambda m, h: torch.flip(Named(g=h.sin(), h=h), (0,)).values["h"].flip(0),
        lambda m, h: torch.cat([Named(h=h[1:]), Named(h=h[:1])]).values["h"].roll(1, 0),
        lambda m, h: torch.mul(Named(h=h, g=h), m.scale).values["g"],
        lambda m, h: nn.functional.conv1d(h, Quantised(m.weight.tanh(), m.scale), m.bias),
    ],
    ids=["moved", "reordered", "joined", "scaled", "layer"],
)
def test_operands_that_are_no_tensors(function, inside):
    """They say what a function does, and its operations are seen; as many positions as examples."""
    parameters = {"scale": normal(), "weight": normal(4, BATCH, 1), "bias": normal(4)}
    parameters |= {"first": nn.Linear(BATCH, BATCH), "last": nn.Linear(BATCH, 2)}

    def losses(m, x):
        return m.last(function(m, m.first(x) if inside else x))

    check_operation(losses, parameters, normal(BATCH, BATCH, BATCH))


@pytest.mark.parametrize("inside", [True, False], ids=["values", "inputs"])
@pytest.mark.parametrize(
    "function",
    [
        lambda h: torch._foreach_mul([h.cos(), h], 2.0)[1],
        lambda h: torch._foreach_mul([h, h.cos()], [3.0, 2.0])[0],
        lambda h: torch._foreach_add([h.mT, h.swapdims(0, 1)], [h, h.swapdims(0, 1)])[1].swapdims(
            0, 1
        ),
        lambda h: torch._foreach_tanh([h, h.flip(0)])[1].flip(0),
        lambda h: torch._foreach_lerp([h], [h.exp()], 0.3)[0],
        lambda h: torch._foreach_mul_([h.cos(), h * 1.5], 2.0)[1],
        lambda h: changed(h.clone(), lambda own: torch._foreach_add_([own], [h.exp()])),
        lambda h: changed(h.mT.clone(), lambda own: torch._foreach_add_([own], [h.mT])).mT,
        lambda h: changed(h.clone(), lambda own: torch._foreach_lerp_([own], [h.exp()], 0.3)),
        lambda h: changed(h.clone(), lambda own: torch._foreach_zero_([own])) + h,
    ],
    ids=[
        "number",
        "numbers",
        "moved",
        "reordered",
        "three",
        "in place",
        "added in place",
        "moved in place",
        "three in place",
        "zeros in place",
    ],
)
def test_operations_on_each_of_a_list(function, inside):
    """The arithmetic of containers of tensors; as many positions as examples."""
    parameters = {"first": nn.Linear(BATCH, BATCH), "last": nn.Linear(BATCH, 2), "scale": normal()}

    def losses(m, x):
        return m.last(function(m.first(x) if inside else x) * m.scale)

    check_operation(losses, parameters, normal(BATCH, BATCH, BATCH))


def changed(tensor, change):
    """Return a tensor after a change in place."""
    change(tensor)
    return tensor


def test_a_container_of_the_model_that_holds_itself():
    """As trees do whose nodes know their parents; a forward may leave derived tensors in it."""

    class Tree(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.randn(3))
            self.root = {"children": [], "size": torch.ones(3)}
            self.root["children"].append({"parent": self.root})

        def forward(self, x):
            self.root["children"][0]["weights"] = (self.scale.exp(), self.root)
            return x * self.root["children"][0]["weights"][0] * self.root["size"].to(x.dtype)

    model, x = Tree().double(), normal(BATCH, 3)
    root = model.root
    got = gs.per_example_norms(model, x, lambda m, x: m(x).sum(1))
    expected = {"scale": (x * model.scale.detach().exp()).square().sum(1)}
    assert_sqnorms(got, expected, 1e-12)
    assert model.root is root and root["children"][0].keys() == {"parent"}
    with gs.track(model, batch_size=BATCH) as tracker:
        tracker.backward(model(x).sum(1))
    assert_sqnorms(tracker.stats, expected, 1e-12)
    weights, parent = root["children"][0]["weights"]
    assert type(weights) is torch.Tensor
    assert model.root is parent is root


def test_buffers_are_left_as_they_were():
    model = nn.Linear(2, 2)
    model.register_buffer("scale", torch.ones(2))
    gs.per_example_norms(model, torch.randn(3, 2), lambda m, x: (m(x) * m.scale.to(x.dtype)).sum(1))
    assert not model.scale.__dict__  # a mark would keep the context alive


def windows(x, size):
    """(B, T, d) → (B·T/size, size, d), as windowed attention cuts its input."""
    return x.view(x.shape[0], -1, size, x.shape[-1]).reshape(-1, size, x.shape[-1])


@pytest.mark.parametrize("size", [1, 2, BATCH])
def test_windows_folded_into_the_batch(size):
    """Windowed attention with a bias of relative positions, as in Swin."""

    def function(m, x):
        cut = windows(x, size)
        q, k = m.layer(m.norm(cut)).chunk(2, -1)
        index = torch.arange(size)
        bias = m.table[(index[:, None] - index).abs()]
        weights = (q @ k.transpose(1, 2) + bias.unsqueeze(0)).softmax(-1)
        return (weights @ cut * m.scale).reshape(x.shape)

    parameters = {
        "layer": nn.Linear(4, 6),
        "norm": nn.LayerNorm(4),
        "table": (size,),
        "scale": (size, 4),
    }
    check_operation(function, parameters, normal(BATCH, 2 * size, 4))


@pytest.mark.parametrize("frames", [2, BATCH])
def test_frames_folded_into_the_batch(frames):
    """Convolutions frame by frame, as in models of videos."""

    def function(m, x):
        rows = x.flatten(0, 1)
        rows = m.norm(torch.relu(m.layer(rows)))
        return m.point(m.depthwise(rows)).unflatten(0, (BATCH, frames))

    parameters = {
        "layer": nn.Conv2d(2, 4, 3, padding=1, stride=2),
        "norm": nn.GroupNorm(2, 4),
        "depthwise": nn.ConvTranspose2d(4, 4, 3, groups=4),
        "point": nn.Conv2d(4, 2, 1),
    }
    check_operation(function, parameters, normal(BATCH, frames, 2, 6, 5))


def test_a_layer_on_frames_and_on_single_images():
    def function(m, x):
        return m.layer(x.flatten(0, 1)).unflatten(0, x.shape[:2]) + m.layer(x[:, 0])[:, None]

    check_operation(function, {"layer": nn.Conv1d(2, 3, 2)}, normal(BATCH, 2, 2, 5))


ORDER = torch.tensor([2, 0, 1])


@pytest.mark.parametrize(
    "there, back",
    {
        "index": (lambda x: x[ORDER], lambda x: x[ORDER.argsort()]),
        "index_select": (lambda x: x.index_select(0, ORDER), lambda x: x[ORDER.argsort(), :]),
        "flip": (lambda x: x.flip(0), lambda x: torch.flip(x, (0,))),
        "roll": (lambda x: x.roll(1, 0), lambda x: torch.roll(x, shifts=-1, dims=0)),
        "chunks": (
            lambda x: torch.cat(x.split([1, 2])[::-1]),
            lambda x: torch.cat([x[2:], x.narrow(0, 0, 2)]),
        ),
    }.values(),
    ids=["index", "index_select", "flip", "roll", "chunks"],
)
def test_reordered_examples(there, back):
    """A model may sort its examples and put them back."""

    def function(m, x):
        hidden = there(torch.tanh(m.first(x))) * m.scale
        return back(m.second(hidden))

    parameters = {"first": nn.Linear(4, 4), "second": nn.Linear(4, 2), "scale": (4,)}
    check_operation(function, parameters, normal(BATCH, 4))
    check_operation(function, parameters, normal(BATCH, BATCH, 4))


@pytest.mark.parametrize(
    "there, back",
    {
        "flip": (lambda x: x.flip(0, 1), lambda x: x.flip((0, 1))),
        "flipud": (torch.flipud, torch.flipud),
        "stack": (
            lambda x: torch.stack([x[i] for i in ORDER.tolist()]),
            lambda x: torch.stack([x.select(0, i) for i in ORDER.argsort().tolist()]),
        ),
        "rot90": (lambda x: torch.rot90(x, 2), lambda x: torch.rot90(x, -2)),
        "fftshift": (torch.fft.fftshift, torch.fft.ifftshift),
        "msort": (torch.msort, torch.msort),
    }.values(),
    ids=["flip", "flipud", "stack", "rot90", "fftshift", "msort"],
)
def test_reordered_examples_are_followed_or_refused(there, back):
    """With as many columns as rows, and more."""

    def function(m, x):
        return back(m.second(there(torch.tanh(m.first(x)))))

    parameters = {"first": nn.Linear(4, 4), "second": nn.Linear(4, 4)}
    if there is not torch.msort:
        check_operation(function, parameters, normal(BATCH, 4))
        return
    check_refused(
        function, parameters, normal(BATCH, 4), error=gs.ExampleAxisError, match="'second.weight'"
    )


# What lays the examples along another axis, (B, B, 4) like what it is given.
PRODUCTS = {
    "tensordot": lambda h, c: torch.tensordot(c, h, dims=([1], [1])),
    "tensordot, axes in a tensor": lambda h, c: torch.tensordot(c, h, torch.tensor([[1], [1]])),
    "tensordot, a number": lambda h, c: torch.tensordot(c, h.movedim(1, 0), torch.tensor([1])),
    "linear": lambda h, c: nn.functional.linear(c, h[:, 0, :3]).unsqueeze(-1).expand(-1, -1, 4),
}


@pytest.mark.parametrize("move", PRODUCTS.values(), ids=PRODUCTS)
def test_axes_of_products(move):
    check_operation(
        lambda m, x: m.second(move(m.first(x), torch.eye(BATCH).double())).transpose(0, 1),
        {"first": nn.Linear(4, 4), "second": nn.Linear(4, 4)},
        normal(BATCH, BATCH, 4),
    )


def test_axes_that_nobody_follows():
    """Where two axes have the batch's size, shape does not say where the examples are."""
    check_refused(
        lambda m, x: m.second(
            torch.ops.aten._reshape_alias(m.first(x), [BATCH, BATCH, 4], [4, 4 * BATCH, 1])
        ).transpose(0, 1),
        {"first": nn.Linear(4, 4), "second": nn.Linear(4, 4)},
        normal(BATCH, BATCH, 4),
        error=gs.ExampleAxisError,
        match="'second.weight'",
    )


def table():
    """Return a constant: nothing that comes from outside of a call."""
    return torch.linspace(-1, 1, BATCH * 9).view(BATCH, 9).double()


# Examples along the second axis of (3, B).
SECOND_AXIS = {
    "indexed": lambda m, x: table()[:, x],
    "index_select": lambda m, x: table().index_select(1, x),
    "index of several axes": lambda m, x: table()[torch.arange(BATCH)[:, None], x],
    "constant times data": lambda m, x: table()[:, :1] * (m.w * x),
    "data times constant": lambda m, x: (m.w * x) * table()[:, :1],
}


@pytest.mark.parametrize("function", SECOND_AXIS.values(), ids=SECOND_AXIS)
def test_examples_along_the_axis_of_the_data(function):
    """A constant with more axes, or one that is looked up, says where the examples go."""
    check_operation(
        lambda m, x: (m.v[:, None] * function(m, x)).T + m.w * x[:, None],
        {"v": (BATCH,), "w": ()},
        torch.tensor([1, 5, 7]),
    )


def test_examples_left_in_another_order():
    """Norms come in the order of the losses."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    batch = normal(BATCH, 4)
    there = gs.per_example_norms(model, batch, lambda m, x: m(x)[ORDER].square().sum(1))
    plain = gs.per_example_norms(model, batch, lambda m, x: m(x).square().sum(1))
    torch.testing.assert_close(there.loss, plain.loss[ORDER])
    torch.testing.assert_close(there.sqnorm, plain.sqnorm[ORDER], rtol=1e-12, atol=0)


@pytest.mark.parametrize("lengths", [(2, 5, 1), (0, 3, 4), (4, 4, 4)], ids=str)
def test_padding_taken_out(lengths):
    """Only the positions that a mask selects go through the layers."""
    mask = torch.arange(5) < torch.tensor(lengths)[:, None]

    def function(m, x, mask):
        rows = m.first(m.norm(x[mask])) + m.shift
        out = torch.zeros(*x.shape[:2], 3, dtype=x.dtype)
        out[mask] = m.second(torch.tanh(rows) * m.scale)
        return out

    parameters = {
        "first": nn.Linear(4, 4),
        "norm": nn.LayerNorm(4),
        "second": nn.Linear(4, 3),
        "shift": (1, 4),
        "scale": (4,),
    }
    check_operation(function, parameters, normal(BATCH, 5, 4), mask)


def test_tokens_routed_to_experts():
    """Each row goes through the layer that its values choose, as in a mixture of experts."""

    def function(m, x):
        rows = x.reshape(-1, 4)
        choice = m.router(rows).argmax(-1)
        out = torch.zeros_like(rows)
        for number, expert in enumerate([m.one, m.two]):
            (chosen,) = torch.where(choice == number)
            out.index_add_(0, chosen, torch.tanh(expert(rows[chosen])))
        return (out * m.router(rows).softmax(-1)[:, :1]).view(x.shape)

    parameters = {name: nn.Linear(4, 4) for name in ("one", "two")}
    check_operation(function, {**parameters, "router": nn.Linear(4, 2)}, normal(BATCH, 5, 4))


@pytest.mark.parametrize("expert", [nn.Linear(4, 4), nn.LayerNorm(4), nn.GroupNorm(2, 4)])
def test_an_expert_that_gets_no_rows(expert):
    def function(m, x):
        nothing = torch.zeros(0, dtype=torch.long)
        return x.index_add(0, nothing, m.expert(x[nothing])) * m.scale

    check_operation(function, {"expert": expert, "scale": (4,)}, normal(BATCH, 4))


def test_stacked_experts_chosen_by_number():
    """The experts' weights in one tensor, indexed by a number that the data gave."""

    def function(m, x):
        rows = x.reshape(-1, 4)
        choice = rows.sum(1).gt(0).long()
        out = torch.zeros_like(rows)
        for number in choice.unique():
            chosen = (choice == number).nonzero().squeeze(1)
            hidden = torch.tanh(nn.functional.linear(rows[chosen], m.up[number]))
            out.index_add_(0, chosen, nn.functional.linear(hidden, m.down[number]))
        return out.view(x.shape)

    check_operation(function, {"up": (2, 6, 4), "down": (2, 4, 6)}, normal(BATCH, 5, 4))


def test_two_halves_side_by_side():
    """Siamese networks put both views of a batch into one."""

    def function(m, x, y):
        both = m.second(torch.tanh(m.first(torch.cat([x, y]))))
        left, right = both.chunk(2)
        return left * right

    parameters = {"first": nn.Linear(4, 4), "second": nn.Linear(4, 2)}
    check_operation(function, parameters, normal(BATCH, 4), normal(BATCH, 4))


@pytest.mark.parametrize("positions", [2, BATCH])
def test_tokens_sequence_first(positions):
    """Ids that are turned before they are looked up."""

    def function(m, ids):
        return m.layer(torch.tanh(m.tokens(ids.t()))).transpose(0, 1)

    parameters = {"tokens": nn.Embedding(7, 4), "layer": nn.Linear(4, 2)}
    check_operation(function, parameters, torch.randint(7, (BATCH, positions)))


def test_data_through_a_frozen_product():
    """As an adapter's frozen weight multiplies rows of all positions."""

    def function(m, x):
        rows = m.first(x).flatten(0, 1)
        weight, bias = m.second.weight.detach(), m.second.bias.detach()
        return m.third(torch.addmm(bias, rows, weight.t()).view(x.shape))

    layers = {name: nn.Linear(4, 4) for name in ("first", "second", "third")}
    check_operation(function, layers, normal(BATCH, 5, 4))


def test_data_seen_as_bytes():
    """Something else may be computed of it; a layer that meets it does not know its examples."""

    def function(m, x):
        signs = (x[:, 0].contiguous().view(torch.uint8)[7::8] > 127).double()
        return m.layer(x) * (1 + 0 * signs.sum())

    check_operation(function, {"layer": nn.Linear(4, 2)}, normal(BATCH, 4), gradient_of_data=False)


def test_examples_repeated():
    def function(m, x):
        return m.layer(x.repeat_interleave(2, dim=0)).view(BATCH, 2, -1)

    check_operation(function, {"layer": nn.Linear(4, 2)}, normal(BATCH, 4))


@pytest.mark.parametrize("counts", [[0, 1, 2], [2, 1, 0], [1, 1, 1], [3, 1, 4]])
def test_numbers_of_examples_repeated(counts):
    """The rows of a table for each example's own nodes, of which examples have as many as told."""

    def function(m, x):
        table = torch.eye(BATCH, 4, dtype=torch.float64)
        numbers = torch.repeat_interleave(x[:, 0].long())
        hidden = m.layer(table[numbers])
        return hidden.new_zeros(BATCH, 2).index_add(0, numbers, hidden.square())

    counted = torch.tensor(counts)[:, None].expand(BATCH, 4).double()
    check_operation(function, {"layer": nn.Linear(4, 2)}, counted)


def test_the_last_position_of_each_example():
    def function(m, x):
        hidden = torch.tanh(m.first(x))
        return m.second(hidden[torch.arange(BATCH), torch.tensor([1, 0, 3])])

    parameters = {"first": nn.Linear(4, 4), "second": nn.Linear(4, 2)}
    check_operation(function, parameters, normal(BATCH, 4, 4))


def test_mixed_inputs():
    """Mixup: inputs of other examples enter a loss, which is still one example's."""
    batch = normal(BATCH, 4)
    model = nn.Linear(4, 2).double()
    got = gs.per_example_norms(
        model, batch, lambda m, x: m(0.7 * x + 0.3 * x[ORDER]).square().sum(1)
    )
    mixed = 0.7 * batch + 0.3 * batch[ORDER]
    want = gs.per_example_norms(model, mixed, lambda m, x: m(x).square().sum(1))
    torch.testing.assert_close(got.sqnorm, want.sqnorm, rtol=1e-12, atol=0)


def test_mixed_hidden_values_are_refused():
    """Each loss depends on two examples' hidden values: rows belong to no single example."""
    check_refused(
        lambda m, x: m.second(m.first(x) + m.first(x)[ORDER]),
        {"first": nn.Linear(4, 4), "second": nn.Linear(4, 2)},
        normal(BATCH, 4),
        error=gs.ExampleAxisError,
        match="'second.weight'",
    )


def test_rows_sorted_by_a_score():
    def function(m, x):
        rows = x.flatten(0, 1)
        order = rows.sum(1).argsort()
        hidden = m.first(torch.take_along_dim(rows, order[:, None], 0))
        back = torch.zeros(len(rows), 4, dtype=x.dtype).index_copy(0, order, hidden)
        scores, chosen = m.score(rows)[:, 0].topk(4)
        best = torch.zeros_like(back).index_add(0, chosen, rows[chosen] * scores[:, None])
        return m.second(back + best).view(*x.shape[:2], 2)

    parameters = {"first": nn.Linear(4, 4), "second": nn.Linear(4, 2), "score": nn.Linear(4, 1)}
    check_operation(function, parameters, normal(BATCH, BATCH, 4))
    check_operation(function, parameters, normal(BATCH, 5, 4))


@pytest.mark.parametrize(
    "move",
    [
        lambda x: torch.sort(x, dim=0).values,
        lambda x: x.gather(0, (ORDER[:, None] + torch.arange(4)) % BATCH),
        lambda x: torch.take_along_dim(x, (ORDER[:, None] + torch.arange(4)) % BATCH, 0),
        lambda x: torch.scatter(x, 0, (ORDER[:, None] + torch.arange(4)) % BATCH, x),
        lambda x: x.topk(BATCH, dim=0).values,
    ],
    ids=["sort", "gather", "take_along_dim", "scatter", "topk"],
)
def test_examples_moved_one_by_one_are_refused(move):
    """Where a row went cannot be told."""
    check_refused(
        lambda m, x: m.layer(move(x)),
        {"layer": nn.Linear(4, 2)},
        normal(BATCH, 4),
        error=gs.ExampleAxisError,
        match="'layer.weight'",
    )


@pytest.mark.parametrize(
    "move",
    [
        lambda x: torch.sort(x, dim=1).values,
        lambda x: x.gather(1, torch.tensor([[3, 0]]).expand(BATCH, -1)),
        lambda x: torch.take_along_dim(x, torch.tensor([[3, 0, 1]]), -1),
        lambda x: x.topk(2).values,
        lambda x: x.sort(stable=True).values,
        lambda x: x.roll(1, -1).flip(1),
        lambda x: x[..., [2, 1]],
        lambda x: x[:, torch.tensor([2, 1])],
        lambda x: x[:, None, 1:, None].squeeze(1).squeeze(-1),
        lambda x: torch.stack(x.unbind(1), 1)[:, 0:3],
    ],
)
def test_columns_moved(move):
    """Moves along other axes leave the examples where they are, with as many columns as rows."""
    check_operation(
        lambda m, x: m.layer(move(torch.tanh(m.first(x)))),
        {"first": nn.Linear(4, 4), "layer": ScaleColumns()},
        normal(BATCH, 4),
    )


class ScaleColumns(nn.Module):
    """A parameter that is broadcast against however many columns there are."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(1))

    def forward(self, x):
        return x * self.scale


@pytest.mark.parametrize(
    "move",
    [
        lambda x: x.expand(BATCH, BATCH, 4),
        lambda x: x.repeat(BATCH, 1, 1),
        lambda x: torch.stack([x * (1 + i) for i in range(BATCH)]),
        lambda x: x[None] * torch.linspace(1, 2, BATCH, dtype=x.dtype)[:, None, None],
    ],
    ids=["expand", "repeat", "stack", "broadcast"],
)
def test_new_axes_in_front(move):
    """As many copies of the batch as it has examples: the examples lie behind them."""
    check_operation(
        lambda m, x: m.second(move(torch.tanh(m.first(x)))).sum(0),
        {"first": nn.Linear(4, 4), "second": nn.Linear(4, 2)},
        normal(BATCH, 4),
    )


def test_the_batch_side_by_side():
    check_operation(
        lambda m, x: m.layer(x.repeat(2, 1)).view(2, BATCH, 2).prod(0),
        {"layer": nn.Linear(4, 2)},
        normal(BATCH, 4),
    )


def test_reductions_in_front_of_the_examples():
    check_operation(
        lambda m, x: m.layer(torch.tanh(m.first(x)).transpose(0, 1).mean(0)),
        {"first": nn.Linear(BATCH, BATCH), "layer": nn.Linear(BATCH, 2)},
        normal(BATCH, BATCH, BATCH),
    )


@pytest.mark.parametrize(
    "pairs",
    [
        lambda x, y: x @ y.T,
        lambda x, y: torch.einsum("id,jd->ij", x, y),
    ],
    ids=["matmul", "einsum"],
)
def test_examples_against_examples_are_refused(pairs):
    """Contrastive losses: each depends on all examples."""
    check_refused(
        lambda m, x: pairs(m.first(x), m.second(x)).log_softmax(-1),
        {"first": nn.Linear(4, 4), "second": nn.Linear(4, 4)},
        normal(BATCH, 4),
        error=gs.CoupledExamplesError,
        match="contrastive",
    )
    check_operation(
        lambda m, x: pairs(m.first(x), x).log_softmax(-1), {"first": nn.Linear(4, 4)},
        normal(BATCH, 4), gradient_of_data=False,
    )  # fmt: skip


def test_differences_of_examples_are_refused():
    check_refused(
        lambda m, x: m.layer((x[:, None] - x[None]).abs()).sum(0),
        {"layer": nn.Linear(4, 4)},
        normal(BATCH, 4),
        error=gs.ExampleAxisError,
        match="'layer.weight'",
    )


def shifted_windows(m, x, attend):
    """Windows with a mask of their own each, beside a bias of positions, as shifted windows."""
    cut = windows(x, 2)
    mask = torch.linspace(-1, 1, len(cut) // BATCH).double()[:, None, None, None]
    bias = (m.table + mask).repeat(BATCH, 1, 1, 1)
    q, k, v = (part.unflatten(-1, (2, 3)).transpose(1, 2) for part in m.layer(cut).chunk(3, -1))
    return attend(q, k, v, bias).reshape(x.shape[0], -1)


def test_a_bias_for_each_window():
    def attend(q, k, v, bias):
        return (q @ k.mT + bias).softmax(-1) @ v

    parameters = {"layer": nn.Linear(4, 18), "table": (2, 2, 2)}
    check_operation(lambda m, x: shifted_windows(m, x, attend), parameters, normal(BATCH, 6, 4))


def test_a_mask_for_each_window():
    attend = nn.functional.scaled_dot_product_attention
    parameters = {"layer": nn.Linear(4, 18), "table": (2, 2, 2)}
    check_operation(lambda m, x: shifted_windows(m, x, attend), parameters, normal(BATCH, 6, 4))


UNDER_AUTOCAST = {
    "einsum": lambda m, x: torch.einsum("tbi,ij->tbj", x, m.w[0]),
    "matmul": lambda m, x: torch.matmul(m.w.mT, x.unsqueeze(-1)),
    "linear": lambda m, x: nn.functional.linear(x, m.w[0].t(), m.b),
}


@pytest.mark.parametrize("operation", UNDER_AUTOCAST.values(), ids=UNDER_AUTOCAST)
def test_positions_first_under_autocast(operation):
    """As many positions as examples: autocast's copy has its examples where they were."""
    model = Operation(operation, {"w": (1, 5, 3), "b": (4, 1, 1)}, upstream=False).float()
    x = torch.randn(4, 4, 5)

    def loss_fn(model, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return model(batch.transpose(0, 1)).float().square().transpose(0, 1).flatten(1).sum(1)

    stats = gs.per_example_norms(model, x, loss_fn)
    assert_sqnorms(stats, oracle_sqnorms(model, x, loss_fn), rtol=0.02)


def of_joined_vectors(join, batch):
    def function(m, x):
        joined = join([x @ m.a, x @ m.b]).reshape(2, batch)
        return (joined * m.p).sin().sum(0)

    return function, {"a": (5,), "b": (5,), "p": (batch,)}, normal(batch, 5)


@pytest.mark.parametrize("join", [torch.vstack, torch.row_stack, torch.hstack])
@pytest.mark.parametrize("batch", [2, 4])
def test_vectors_made_rows_by_a_join(join, batch):
    check_operation(*of_joined_vectors(join, batch))


@pytest.mark.parametrize("batch", [2, 4])
def test_vectors_made_columns_by_a_join_are_refused(batch):
    """Where they are read as rows, the values of several examples are added."""
    operation = of_joined_vectors(torch.dstack, batch)
    check_refused(*operation, error=gs.CoupledExamplesError, match="depends on several examples")


def test_a_product_with_a_frozen_vector():
    """As many positions as examples."""
    check_operation(lambda m, x: (x @ m.v) * m.w, {"v": (5,), "w": (3,)}, normal(3, 3, 5))
    check_operation(
        lambda m, x: torch.matmul(m.v, x) * m.w, {"v": (3,), "w": (3,)}, normal(3, 3, 3)
    )


REPEATS = {
    "repeat": lambda w, rows: w.repeat(rows, 1, 1),
    "expand": lambda w, rows: w.expand(rows, *w.shape).flatten(0, 1),
    "cat": lambda w, rows: torch.cat([w] * rows),
}


@pytest.mark.parametrize("positions", [2, BATCH])
@pytest.mark.parametrize("repeat", REPEATS.values(), ids=REPEATS)
def test_relative_positions_repeated_for_examples_and_heads(repeat, positions):
    """As disentangled attention has them: heads are folded into the batch."""

    def function(m, x):
        heads = m.layer(x).unflatten(-1, (2, 3)).transpose(1, 2).flatten(0, 1)
        keys = repeat(m.keys.view(-1, 2, 3).transpose(0, 1), len(x))
        scores = torch.bmm(heads, keys.transpose(1, 2)) + heads @ keys.mT.sin()
        scores = scores + torch.einsum("ntd,nsd->nts", heads, keys.square())
        return scores.unflatten(0, (-1, 2)).flatten(1)

    parameters = {"layer": nn.Linear(4, 6), "keys": (5, 6)}
    check_operation(function, parameters, normal(BATCH, positions, 4))


def modulated(m, x):
    """Kernels that each example scales for itself, as StyleGAN has them."""
    kernels = m.kernels * m.first(x).view(-1, 1, 2, 1, 1)
    kernels = kernels * kernels.square().sum((2, 3, 4), keepdim=True).rsqrt()
    image = x.view(1, -1, 2, 2)
    folded = nn.functional.conv2d(image, kernels.flatten(0, 1), padding=1, groups=len(x))
    return folded.view(len(x), 3, 2, 2)


def mixed(m, x):
    """Kernels and biases that each example mixes for itself, upwards."""
    shares = m.first(x).softmax(1)
    kernels = (shares @ m.kernels.view(2, -1)).view(-1, 3, 3, 3)
    biases = (shares @ m.kernels[:, 0, 0, 0]).flatten()
    folded = nn.functional.conv_transpose2d(
        x.view(1, -1, 2, 2), kernels, bias=biases, groups=len(x)
    )
    return folded.view(len(x), 3, -1)


def correlated(m, x):
    """Channels of one image with those of another, as trackers compare them."""
    image, template = m.kernels[0, 0] * x.view(-1, 2, 2, 2).repeat(1, 1, 2, 2), m.first(x)
    folded = nn.functional.conv1d(
        image[..., 0].reshape(1, -1, 4), template.view(-1, 1, 1), groups=2 * len(x)
    )
    return folded.view(len(x), 2, -1)


KERNELS = {modulated: (3, 2, 3, 3), mixed: (2, 2, 3, 3, 3), correlated: (2, 1, 4, 4)}


@pytest.mark.parametrize("function", KERNELS)
def test_kernels_of_each_example(function):
    """The examples are folded into the channels, whose groups they are."""
    check_operation(
        function, {"first": nn.Linear(8, 2), "kernels": KERNELS[function]}, normal(BATCH, 8)
    )


def test_kernels_of_other_examples_are_refused():
    def function(m, x):
        kernels = m.first(x).view(-1, 1, 1, 1)[torch.tensor([1, 1, 2, 2, 0, 0])]
        folded = nn.functional.conv2d(m.first(x).view(1, -1, 1, 1), kernels, groups=2 * BATCH)
        return folded.view(BATCH, 2)

    check_refused(
        function,
        {"first": nn.Linear(8, 2)},
        normal(BATCH, 8),
        error=gs.CoupledExamplesError,
        match="ConvolutionBackward0 combines trained values of different examples",
    )


@pytest.mark.parametrize("positions", [2, BATCH])
def test_heads_side_by_side(positions):
    """As set transformers have them, with learned points that are repeated for the batch."""

    def heads(x):
        return torch.cat(x.split(3, -1))

    def function(m, x):
        keys, queries = heads(m.layer(x)), heads(m.queries.repeat(len(x), 1, 1))
        mixed = (queries + torch.bmm(queries.bmm(keys.mT).softmax(-1), keys)) * queries.exp()
        mixed = mixed + torch.einsum("nsd,nqd->nqs", keys, queries).sum(-1, keepdim=True)
        return torch.cat(mixed.split(len(x)), -1)

    parameters = {"layer": nn.Linear(4, 6), "queries": (1, 5, 6)}
    check_operation(function, parameters, normal(BATCH, positions, 4))


def test_members_of_an_ensemble_side_by_side():
    def function(m, x):
        rows = x.repeat(2, 1) * m.scales.repeat_interleave(len(x), 0)
        return m.layer(rows).unflatten(0, (2, -1)).mean(0)

    check_operation(function, {"scales": (2, 4), "layer": nn.Linear(4, 3)}, normal(BATCH, 4))


ALONE = {
    "attention": lambda a: (a @ a.T).softmax(-1) @ a,
    "softmax": lambda a: a.softmax(0),
    "centred": lambda a: a - a.mean(0),
    "scaled dot products": lambda a: nn.functional.scaled_dot_product_attention(*[a[None]] * 3)[0],
}


@pytest.mark.parametrize("positions", [2, BATCH])
@pytest.mark.parametrize("function", ALONE.values(), ids=ALONE)
def test_rows_of_one_example_among_themselves(function, positions):
    """Images or sequences in one list, split by their lengths."""

    def split(m, x):
        pieces = m.first(x.flatten(0, 1)).split([positions] * len(x))
        return m.second(torch.cat([function(piece) for piece in pieces])).view(len(x), -1)

    def taken(m, x):
        hidden = m.first(x)
        return m.second(torch.stack([function(hidden[i]) for i in range(len(x))])).flatten(1)

    parameters = {"first": nn.Linear(4, 4), "second": nn.Linear(4, 2)}
    check_operation(split, parameters, normal(BATCH, positions, 4))
    check_operation(taken, parameters, normal(BATCH, positions, 4))


class Word(nn.Module):
    """What composes the words of a sentence one by one, as recursive networks do."""

    def __init__(self):
        super().__init__()
        self.table, self.pair = nn.Embedding(9, 4), nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.randn(4, 4))
        self.norm = nn.LayerNorm(4)

    def forward(self, sentence):
        whole = self.table(sentence).mean(0)
        for word in sentence:
            whole = self.norm(self.pair(torch.cat([self.table(word), whole])).tanh())
        return whole @ self.scale + whole @ self.scale[0]


def test_sizes_that_are_tensors():
    """As many as examples, for example, as where images of different sizes are put together."""

    def function(m, x):
        hidden, (height, width) = m.layer(x), torch.tensor([3, 2])
        return torch.cat([one[: height * width].reshape(1, height, width, -1) for one in hidden])

    check_operation(function, {"layer": nn.Linear(4, 3)}, normal(2, 7, 4))


SINGLE = {
    "convolution": (nn.Conv1d(4, 2, 2), lambda layer, x: layer(x.T)),
    "attention": (
        nn.MultiheadAttention(4, 2),
        lambda layer, x: torch.cat([item.mean(0) for item in layer(x, x, x)]),
    ),
    "masked attention": (
        nn.MultiheadAttention(4, 2, add_bias_kv=True),
        lambda layer, x: layer(x[:2], x, x, key_padding_mask=x[:, 0] > 9, need_weights=False)[0],
    ),
    "recurrence": (nn.LSTM(4, 3, bidirectional=True), lambda layer, x: layer(x)[0]),
    "cell": (nn.GRUCell(4, 3), lambda layer, x: layer(x[1], layer(x[0]))),
    "words": (Word(), lambda layer, x: layer((x.abs() * 3).long().clamp(max=8)[:, 0])),
}


@pytest.mark.parametrize("case", SINGLE)
def test_layers_on_examples_without_an_axis_for_them(case):
    layer, function = SINGLE[case]
    check_operation(
        lambda m, x: torch.stack([function(m.layer, one) for one in x]),
        {"layer": layer},
        normal(BATCH, 5, 4),
        gradient_of_data=case != "words",
    )


def test_rows_of_two_examples_among_themselves_are_refused():
    def function(m, x):
        pieces = m.first(x.flatten(0, 1)).split([3, 5, 4])
        return m.second(torch.cat([piece.softmax(0) for piece in pieces])).view(len(x), -1)

    check_refused(
        function,
        {"first": nn.Linear(4, 4), "second": nn.Linear(4, 2)},
        normal(BATCH, 4, 4),
        error=(gs.ExampleAxisError, gs.CoupledExamplesError),
        match="second|several examples",
    )


PLACES = [torch.tensor([1, 4]), torch.tensor([0]), torch.tensor([2, 0, 4, 3])]
FOUND = torch.arange(28.0).double().view(7, 4).sin().split([2, 1, 4])
MATCHES = {
    "indexed": lambda rows, places, found: rows[places] - found,
    "selected": lambda rows, places, found: found * rows.index_select(0, places),
    "masked": lambda rows, places, found: rows[torch.isin(torch.arange(5), places)] - found,
    "gathered": lambda rows, places, found: rows.gather(0, places[:, None].expand(-1, 4)) * found,
    "cut off": lambda rows, places, found: nn.functional.smooth_l1_loss(
        rows[: len(found)], found, reduction="none"
    ),
    "a target of its own": lambda rows, places, found: (
        rows - torch.zeros(5, 4).double().index_copy(0, places, found)
    ),
    "every pair": lambda rows, places, found: torch.cdist(rows, found),
    "the nearest": lambda rows, places, found: (rows @ found.T).topk(2, 0).values,
}


@pytest.mark.parametrize("match", MATCHES.values(), ids=MATCHES)
def test_examples_taken_one_by_one_meet_what_belongs_to_each(match):
    """As detectors compare what they find in an image with the boxes in it, of any number."""

    def losses(m, batch):
        rows = m(*batch)
        return torch.stack(
            [
                match(rows[i], places, found).square().sum()
                for i, (places, found) in enumerate(zip(PLACES, FOUND, strict=True))
            ]
        )

    check_operation(lambda m, x: m.last(m.first(x).tanh()), {
        "first": nn.Linear(3, 4), "last": nn.Linear(4, 4)
    }, normal(BATCH, 5, 3), loss_fn=losses)  # fmt: skip


@pytest.mark.parametrize("lengths", [(4, 2, 5), (4, 3, 2), (1, 3, 1)], ids=str)
@pytest.mark.parametrize("first", [True, False], ids=["batch first", "steps first"])
def test_sequences_of_each_example_padded_in_the_forward(lengths, first):
    """As a list of them comes from a loader; one may be as long as there are examples."""
    given = torch.arange(4.0 * sum(lengths)).double().view(-1, 4).sin().split(lengths)

    def function(m, x):
        rows = m.layer(nn.utils.rnn.pad_sequence(given, batch_first=first))
        rows = rows if first else rows.transpose(0, 1)
        kept = torch.arange(rows.shape[1]) < torch.tensor(lengths)[:, None]
        return m.last((rows.tanh() * kept[..., None]).sum(1) + x)

    check_operation(function, {"layer": nn.Linear(4, 3), "last": nn.Linear(3, 2)}, normal(BATCH, 3))


def test_operations_on_an_example_without_rows_at_a_level():
    """As regions of an image are pooled level by level, whatever the operation does."""

    def image(m, x):
        regions, rows = torch.cat([x, x]), x.new_zeros(4, 12)
        for level in (regions[:, 0] > -9, regions[:, 0] < -9):
            chosen = level.nonzero()[:, 0]
            rows[chosen] = torch.kron(m.layer(x[:1]), regions[chosen])
        return rows.sum(0)

    check_operation(
        lambda m, x: torch.stack([image(m, each) for each in x]),
        {"layer": nn.Linear(3, 4)}, normal(BATCH, 2, 3),
    )  # fmt: skip


def test_losses_of_one_example_against_targets_of_all_are_refused():
    check_refused(
        lambda m, x: m.first(x)[0] - x.cumsum(0), {"first": nn.Linear(4, 4)}, normal(BATCH, 4),
        error=gs.ExampleAxisError, match="losses",
    )  # fmt: skip


def test_a_parameter_beside_the_rows_of_one_example():
    """As a learned end of line is put behind each row of an image's features."""

    def image(m, rows):
        grid = rows[1:].view(1, 2, 4).permute(2, 0, 1)
        ends = m.newline[:, None, None].expand(*grid.shape[:-1], 1)
        lines = torch.cat((grid * m.scale[:, None, None], ends), dim=-1).flatten(1).transpose(0, 1)
        return torch.cat((rows[:1] + m.newline, lines, m.newline[None]), dim=0)

    def split(m, x):
        pieces = m.first(x.flatten(0, 1)).split([3] * len(x))
        return m.last(torch.stack([image(m, piece) for piece in pieces])).flatten(1)

    def taken(m, x):
        hidden = m.first(x)
        return m.last(torch.stack([image(m, hidden[i]) for i in range(len(x))])).flatten(1)

    parameters = {
        "first": nn.Linear(4, 4), "last": nn.Linear(4, 2), "newline": (4,), "scale": (4,),
    }  # fmt: skip
    check_operation(split, parameters, normal(BATCH, 3, 4))
    check_operation(taken, parameters, normal(BATCH, 3, 4))


@pytest.mark.parametrize("row", [lambda x: x[1:], lambda x: x[1][None]])
def test_a_parameter_in_the_place_of_one_of_two_examples_is_refused(row):
    """Beside one example's rows it is this one's, in its own place the other's."""
    model = nn.ParameterList([torch.ones(1, 4).double()])
    with pytest.raises((gs.ExampleAxisError, gs.UnsupportedOperationError)):
        gs.per_example_norms(
            model, normal(2, 4), lambda m, x: torch.cat([m[0] * 1, row(x)]).square().sum(1)
        )


@pytest.mark.parametrize("bias", [True, False])
def test_patches_of_videos_in_one_list(bias):
    def function(m, x):
        patches = x.reshape(-1, 3, 2, 2, 2)
        return m.embed(patches).flatten(1).view(len(x), -1)

    parameters = {"embed": nn.Conv3d(3, 4, 2, stride=2, bias=bias)}
    check_operation(function, parameters, normal(BATCH, 5, 24))
    check_operation(function, parameters, normal(BATCH, BATCH, 24))


def test_one_of_many_written_into_folded_rows():
    def function(m, x):
        rows = m.first(x).flatten(0, 1)
        chosen = rows.new_zeros(rows.shape).scatter_(-1, rows.argmax(-1, keepdim=True), 1.0)
        return m.second(chosen * rows).view(len(x), -1)

    parameters = {"first": nn.Linear(4, 4), "second": nn.Linear(4, 2)}
    check_operation(function, parameters, normal(BATCH, BATCH, 4))
    check_operation(function, parameters, normal(BATCH, 5, 4))


def test_samples_at_places_that_are_learned():
    def function(m, x):
        places = m.places.tanh().expand(len(x), -1, -1, -1)
        return nn.functional.grid_sample(x, places, align_corners=False).flatten(1)

    check_operation(function, {"places": (1, 2, 3, 2)}, normal(BATCH, 2, 4, 4))


def test_samples_at_places_that_are_learned_head_by_head():
    """As deformable attention samples in its first layer, where queries are parameters alone."""

    def function(m, x):
        places = (m.queries.expand(len(x), -1, -1) @ m.offsets.T).tanh()
        places = places.view(len(x), 3, 2, 4, 2).transpose(1, 2).flatten(0, 1)
        heads = x.unflatten(1, (2, 3)).flatten(0, 1)
        return nn.functional.grid_sample(heads, places, align_corners=False).view(len(x), -1)

    check_operation(function, {"queries": (1, 3, 5), "offsets": (16, 5)}, normal(BATCH, 6, 4, 4))


@pytest.mark.parametrize("apart", [True, False], ids=["padded targets", "targets in one row"])
def test_connectionist_temporal_classification(apart):
    """Steps stand in front of the examples, and targets of all examples perhaps in one row."""
    targets, sizes = torch.randint(1, 5, (BATCH, 2)), torch.tensor([2, 1, 2])

    def losses(m, batch):
        scores = m(*batch).transpose(0, 1).log_softmax(-1)
        given = targets if apart else targets[torch.arange(2) < sizes[:, None]]
        steps = torch.tensor([6, 5, 6])
        return nn.functional.ctc_loss(scores, given, steps, sizes, reduction="none")

    check_operation(
        lambda m, x: m.layer(x),
        {"layer": nn.Linear(4, 5)},
        normal(BATCH, 6, 4),
        loss_fn=losses,
        gradient_of_data=False,
    )


@pytest.mark.parametrize("size", [2, BATCH, 5])
def test_a_product_with_a_stack_of_weights(size):
    """The product's first axis is the stack's, whatever its size."""

    def function(m, x):
        out = torch.tanh(x @ m.stack + m.bias)
        return m.out((out * m.scale).movedim(0, -2).flatten(-2))

    parameters = {
        "stack": (size, 4, 2),
        "bias": (size, 1, 2),
        "scale": (2,),
        "out": nn.Linear(size * 2, 2),
    }
    check_operation(function, parameters, normal(BATCH, 4))


@pytest.mark.parametrize("size", [2, BATCH])
def test_members_of_an_ensemble_averaged(size):
    members = {"stack": (size, 4, 2), "out": nn.Linear(2, 1)}
    check_operation(
        lambda m, x: m.out(torch.tanh(torch.matmul(x, m.stack)).mean(0)), members, normal(BATCH, 4)
    )


STACKS = {
    "rsub": lambda m, h: torch.rsub(h, m.stack),
    "xlog1py": lambda m, h: torch.special.xlog1py(m.stack.exp(), h.exp()),
    "hypot": lambda m, h: torch.hypot(h, m.stack),
    "mod": lambda m, h: h - torch.rsub(h, m.stack) % 7.0,
    "baddbmm": lambda m, h: torch.baddbmm(h, m.stack, m.square),
    "cdist": lambda m, h: torch.cdist(h, m.stack + 1),
    "expanded": lambda m, h: h @ m.square[0].expand(BATCH, 4, 4),
}


@pytest.mark.parametrize("function", STACKS.values(), ids=STACKS)
def test_a_stack_that_is_broadcast_against_data(function):
    """As many in the stack as there are examples: the axis of the stack comes first."""

    def averaged(m, x):
        out = function(m, m.layer(x))
        return torch.tanh(out * m.scale[: out.shape[-1]]).mean(0)

    parameters = {
        "layer": nn.Linear(4, 4),
        "stack": (BATCH, BATCH, 4),
        "square": (BATCH, 4, 4),
        "scale": (4,),
    }
    check_operation(averaged, parameters, normal(BATCH, 4), fusing=(True,))


def test_a_mask_that_keeps_as_many_elements_as_there_are_examples():
    mask = torch.zeros(BATCH, 4, dtype=torch.bool)
    mask[0, :2] = mask[2, 1] = True
    check_refused(
        lambda m, x: m.layer(x).masked_select(mask) * m.scale,
        {"layer": nn.Linear(4, 4), "scale": (1,)},
        normal(BATCH, 4),
        error=gs.ExampleAxisError,
        match="belong to the examples",
    )


def test_elements_that_a_mask_selects():
    mask = torch.zeros(BATCH, 4, dtype=torch.bool)
    mask[:, 1:3] = True
    check_operation(
        lambda m, x: (m.layer(x).masked_select(mask) * m.scale).view(BATCH, 2),
        {"layer": nn.Linear(4, 4), "scale": (1,)},
        normal(BATCH, 4),
    )


def test_elements_taken_without_an_axis():
    places = torch.arange(BATCH * 4).flip(0)
    check_operation(
        lambda m, x: torch.take_along_dim(m.layer(x), places).view(BATCH, 4).flip(0),
        {"layer": nn.Linear(4, 4)},
        normal(BATCH, 4),
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32])
@pytest.mark.parametrize(
    "pick",
    [
        lambda x, places, out: torch.gather(x, 0, places, out=out),
        lambda x, places, out: torch.take_along_dim(x, places, 0, out=out),
        lambda x, places, out: torch.take(x, places, out=out),
        lambda x, places, out: torch.masked_select(x, x > -1, out=out),
    ],
)
def test_elements_picked_into_a_tensor_that_is_given(pick, dtype):
    ids = torch.arange(12, dtype=dtype).view(BATCH, 4)
    places = torch.tensor([[1, 0, 2, 1]])
    found = []

    def losses(model, ids):
        found.append(pick(ids, places, torch.empty(0, dtype=dtype)))
        return model(ids.double()).sum(1)

    gs.per_example_norms(nn.Linear(4, 2).double(), ids, losses)
    assert torch.equal(found[0], pick(ids, places, None))


@pytest.mark.parametrize("summed", [False, True])
def test_rows_picked_into_a_tensor_that_held_others(summed):
    model, x = nn.Linear(4, 2).double(), normal(BATCH, 4)
    places = torch.arange(BATCH)
    with gs.track(model, batch_size=BATCH, loss_reduction="sum") as tracker:
        buffer = torch.empty_like(x)
        for rows in (places, places.roll(1)):
            torch.index_select(x, 0, rows, out=buffer)
        losses = mean_of_outputs(model, buffer)
        if summed:
            losses.sum().backward()
        else:
            tracker.backward(losses[places.roll(-1)])
    assert_sqnorms(tracker.stats, oracle_sqnorms(model, x, mean_of_outputs), 1e-9)


PLACES_FOUND = {
    "nonzero": lambda mask: mask.nonzero().unbind(1),
    "nonzero as a tuple": lambda mask: mask.nonzero(as_tuple=True),
    "argwhere": lambda mask: torch.argwhere(mask).unbind(1),
    "where": torch.where,
    "flat": lambda mask: [mask.flatten().nonzero()[:, 0] // 4, mask.flatten().nonzero()[:, 0] % 4],
}


@pytest.mark.parametrize("count", [2, BATCH, 4])
@pytest.mark.parametrize("find", PLACES_FOUND.values(), ids=PLACES_FOUND)
def test_places_that_are_found(find, count):
    """They belong to the examples in whose rows they are, also if there are as many."""
    mask = torch.zeros(BATCH, 4, dtype=torch.bool)
    mask[[0, 0, 2, 2][:count], [1, 2, 0, 3][:count]] = True
    model = nn.Embedding(4, 2).double()

    def loss(model, mask):
        _, columns = find(mask)
        return model(columns).square().sum()

    with gs.track(model, batch_size=BATCH, loss_reduction="sum") as tracker:
        loss(model, mask).backward()
    model.zero_grad()
    expected = oracle_sqnorms(
        model, mask, lambda m, b: torch.stack([loss(m, b[i : i + 1]) for i in range(BATCH)])
    )
    assert_sqnorms(tracker.stats, expected, 1e-9)


@pytest.mark.parametrize(
    "values",
    [
        lambda ids: ids.unique(),
        lambda ids: torch.unique(ids, return_inverse=True)[0],
        lambda ids: torch.unique_consecutive(ids),
        lambda ids: torch.bincount(ids % BATCH),
        lambda ids: ids.double().histc(BATCH).long(),
    ],
)
def test_distinct_values_and_counts_are_no_rows_of_examples(values):
    """Even if there are as many."""
    model = nn.Embedding(8, 2).double()
    with (
        pytest.raises(gs.ExampleAxisError, match="which example each row"),
        gs.track(model, batch_size=BATCH, loss_reduction="sum"),
    ):
        model(values(torch.tensor([5, 2, 7]))).square().sum().backward()


def test_numbers_of_distinct_values():
    """They lie as the values do, along any axis."""

    def function(m, ids):
        _, first = torch.unique(ids, return_inverse=True)
        _, second, _ = ids.T.unique_consecutive(return_inverse=True, return_counts=True)
        _, third = torch.unique(ids, dim=0, return_inverse=True)
        return m.table(first) * m.table(second).transpose(0, 1) + m.table(third)[:, None]

    ids = torch.tensor([[3, 1, 3], [1, 1, 2], [3, 1, 3]])
    check_operation(function, {"table": nn.Embedding(8, 2)}, ids)


def mean_of_outputs(model, x):
    return model(x).square().mean(1)


@pytest.mark.parametrize(
    ("after", "match"),
    [
        (lambda h: h, r"the examples \[0, 0, 1\]"),
        (lambda h: h.as_strided((BATCH, 4), (1, BATCH)), "'scale'"),
    ],
)
def test_fewer_rows_gathered_than_there_are(after, match):
    """Of rows that stand twice only the first are left: as many as examples, of other examples."""
    places = torch.zeros(BATCH, 4, dtype=torch.long)
    check_refused(
        lambda m, x: m.scale * after(m.layer(x).repeat_interleave(2, 0).gather(1, places)),
        {"layer": nn.Linear(4, 4), "scale": (1,)},
        normal(BATCH, 4),
        error=gs.ExampleAxisError,
        match=match,
    )


@pytest.mark.parametrize("positions", [2, BATCH, 5])
def test_rows_repeated_once_in_memory_of_their_own(positions):
    """Without an axis the operation copies what is not contiguous, and shows a view of the copy."""
    check_operation(
        lambda m, x: (
            (m.layer(x).transpose(0, 1).repeat_interleave(1) * m.scale)
            .view(positions, BATCH, 2)
            .transpose(0, 1)
        ),
        {"layer": nn.Linear(4, 2), "scale": (1,)},
        normal(BATCH, positions, 4),
    )


@pytest.mark.parametrize("positions", [2, BATCH, 5])
def test_a_part_of_each_position_overwritten(positions):
    """The operation that writes it is another one, on a view of the data."""

    def function(m, x):
        h = m.layer(x).transpose(0, 1).clone()
        h[:, :, :2] = m.value
        h[:, :, 3] = m.wide
        return m.out(torch.tanh(h)).transpose(0, 1)

    parameters = {
        "layer": nn.Linear(4, 4), "value": (2,), "wide": (1, 1, 1), "out": nn.Linear(4, 1),
    }  # fmt: skip
    check_operation(function, parameters, normal(BATCH, positions, 4))


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("frames", [1, 2, BATCH])
def test_uneven_padding(frames):
    """PyTorch pads for even kernels by itself, which is written here as a step of its own."""

    def function(m, x):
        if frames == 1:
            return m.layer(x[:, 0].flip(0)).flip(0)
        return m.layer(x.flatten(0, 1)).unflatten(0, (BATCH, frames))

    layer = nn.Conv1d(3, 2, 2, padding="same")
    check_operation(function, {"layer": layer}, normal(BATCH, frames, 3, 5))


@pytest.mark.parametrize("positions", [2, BATCH, 5])
@pytest.mark.parametrize("dim", [0, -1])
@pytest.mark.parametrize("parameter", [True, False])
def test_cosines_of_positions(positions, dim, parameter):
    def function(m, x):
        h = m.layer(x).transpose(0, 1)
        other = m.other if parameter else h.detach().flip(2) + 1
        cosine = nn.functional.cosine_similarity(h, other, dim=dim)
        return cosine if dim == 0 else cosine.transpose(0, 1)

    parameters = {"layer": nn.Linear(4, 3), "other": (positions, 1, 3)}
    check_operation(function, parameters, normal(BATCH, positions, 4), fusing=(True,))


KEPT = {
    "mean": lambda h: h.mean(0, keepdim=True),
    "vector_norm": lambda h: torch.linalg.vector_norm(h, dim=-3, keepdim=True),
    "amax": lambda h: h.amax((0, 2), keepdim=True),
    "max": lambda h: h.max(0, keepdim=True).values,
    "quantile": lambda h: h.quantile(0.3, dim=0, keepdim=True),
    "quantile in a tensor": lambda h: h.quantile(torch.tensor(0.3).double(), 0, keepdim=True),
}


@pytest.mark.parametrize("positions", [1, 2, BATCH, 5])
@pytest.mark.parametrize("reduce", KEPT.values(), ids=KEPT)
def test_an_axis_in_front_of_the_batch_that_a_reduction_keeps(reduce, positions):
    def function(m, x):
        h = m.layer(x).transpose(0, 1)
        return (h + reduce(h) * m.scale).transpose(0, 1)

    parameters = {"layer": nn.Linear(4, 3), "scale": (3,)}
    check_operation(function, parameters, normal(BATCH, positions, 4))


@pytest.mark.parametrize("size", [2, BATCH, 5])
def test_a_mean_over_an_axis_in_front_of_the_batch(size):
    check_operation(
        lambda m, x: torch.tanh(m.layer(x)).mean(0) * m.scale,
        {"layer": nn.Linear(4, size), "scale": (size,)},
        normal(5, BATCH, 4),
        batch_dim=1,
    )


@pytest.mark.parametrize("positions", [2, BATCH, 5])
@pytest.mark.parametrize("hard", [True, False])
def test_a_learned_temperature(positions, hard):
    def function(m, x):
        torch.manual_seed(3)
        h = m.layer(x).transpose(0, 1)
        soft = nn.functional.gumbel_softmax(h, m.temperature.exp(), hard=hard)
        slope = torch.arange(1, positions + 1).double()[:, None, None]
        return (soft * slope + h).transpose(0, 1)

    parameters = {"layer": nn.Linear(4, 3), "temperature": ()}
    check_operation(function, parameters, normal(BATCH, positions, 4))


@pytest.mark.parametrize("positions", [2, BATCH, 5])
def test_a_learned_bound(positions):
    check_operation(
        lambda m, x: nn.functional.normalize(
            m.layer(x).transpose(0, 1), dim=2, eps=m.least
        ).transpose(0, 1),
        {"layer": nn.Linear(4, 3), "least": torch.tensor(10.0)},
        normal(BATCH, positions, 4),
    )


def test_a_learned_metric():
    def function(m, x):
        h = m.layer(x).flip(0)
        other = h.detach()
        loss = nn.functional.triplet_margin_with_distance_loss(
            h,
            other.roll(1, 1),
            -other,
            distance_function=lambda a, b: ((a - b).square() * m.weight).sum(1),
            margin=5.0,
            reduction="none",
        )
        return loss.flip(0)

    check_operation(function, {"layer": nn.Linear(4, 3), "weight": (3,)}, normal(BATCH, 4))


def test_asking_for_the_tensor_that_a_view_shows():
    def function(m, x):
        hidden = m.first(x) * 1
        assert hidden.view_as(hidden)._base is hidden
        return m.last(hidden)

    layers = {"first": nn.Linear(4, 5), "last": nn.Linear(5, 2)}
    check_operation(function, layers, normal(3, 4))


@pytest.mark.parametrize(
    "function",
    [
        lambda h, g: torch.mul(h, other=g),
        lambda h, g: torch.add(input=h, other=g),
        lambda h, g: torch.addcmul(h, tensor1=h, tensor2=g),
        lambda h, g: torch.linalg.vecdot(h, y=g),
        lambda h, g: torch.outer(g, vec2=g),
        lambda h, g: nn.functional.linear(h, weight=h),
        lambda h, g: nn.functional.linear(h, torch.eye(BATCH).double(), bias=g),
    ],
)
def test_operands_of_other_examples_given_by_name_are_refused(function):
    check_refused(
        lambda m, x: function(m.layer(x), m.layer(x.sin())[:, 0]),
        {"layer": nn.Linear(BATCH, BATCH)},
        normal(BATCH, BATCH),
        error=gs.GradStatsError,
        match="which loss belongs to which example was lost|every other|each loss depends on",
    )


@pytest.mark.parametrize(
    "function",
    [
        lambda h, weight: torch.mul(h, other=h.sin()),
        lambda h, weight: torch.max(h, other=h.sin()),
        lambda h, weight: torch.gru_cell(h, hx=h.sin(), w_ih=weight, w_hh=weight),
        lambda h, weight: torch.gru_cell(input=h, hx=h.sin(), w_ih=weight, w_hh=weight),
    ],
)
def test_operands_given_by_name(function):
    check_operation(
        lambda m, x: function(m.layer(x), torch.eye(12, 4, dtype=torch.float64)),
        {"layer": nn.Linear(4, 4)},
        normal(BATCH, 4),
    )


@torch.library.custom_op("gradstats_tests::turned", mutates_args=())
def turned(scale: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    return scale * h.T


turned.register_autograd(
    lambda ctx, grad: (None, (ctx.scale * grad).T),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "scale", inputs[0]),
)


@pytest.mark.parametrize(
    "function",
    [
        lambda scale, h: torch.addr(scale, h[:, 0], h[:, 1]),
        turned,
    ],
)
def test_data_without_examples_before_data_with_them(function):
    """The first operand does not say where the examples lie, and nobody follows the operation."""
    check_refused(
        lambda m, x: function(x.mean(), m.layer(x)),
        {"layer": nn.Linear(BATCH, BATCH)},
        normal(BATCH, BATCH),
        error=gs.ExampleAxisError,
        match=r"was lost at torch\.(addr|ops\.gradstats_tests\.turned)",
    )


@torch.library.custom_op("gradstats_tests::added_up", mutates_args=())
def added_up(h: torch.Tensor, axis: int) -> torch.Tensor:
    return h.sum(axis)


def _keep_form(ctx, inputs, output):
    h, ctx.axis = inputs
    ctx.shape = h.shape


added_up.register_autograd(
    lambda ctx, grad: (grad.unsqueeze(ctx.axis).expand(ctx.shape).clone(), None),
    setup_context=_keep_form,
)


def test_an_operator_of_the_users_own_is_trusted_where_shape_tells():
    """To leave the examples where they are, but only as the batch has them, along one axis."""
    parameters = {"layer": nn.Linear(4, 4), "last": nn.Linear(4, 2)}
    check_operation(
        lambda m, x: m.last(added_up(m.layer(x), 1).sin()), parameters, normal(BATCH, 2, 4)
    )
    refused = {"error": gs.ExampleAxisError, "match": "lost at torch.ops.gradstats_tests.added_up"}
    order = torch.tensor([2, 0, 1])
    check_refused(
        lambda m, x: m.last(added_up(m.layer(x)[order], 1).sin())[order.argsort()],
        parameters, normal(BATCH, 2, 4), **refused,
    )  # fmt: skip
    # With as many positions as examples, the rows are those of positions, or of examples.
    check_refused(
        lambda m, x: m.last(added_up(m.layer(x), 0).sin()),
        parameters, normal(BATCH, BATCH, 4), **refused,
    )  # fmt: skip


def test_a_roll_along_no_axis_goes_over_all_elements():
    def function(m, x):
        return m.layer(x).roll(3, ())[[1, 2, 3, 0]]

    check_operation(function, {"layer": nn.Linear(3, 3)}, normal(4, 3))


def test_indices_with_an_axis_between_them():
    """Theirs comes first in the result, before the examples'."""

    def function(m, x):
        chosen = m.layer(x)[:, [2, 0, 1], :, [3, 1, 0]]
        return m.last(chosen).transpose(0, 1)

    parameters = {"layer": nn.Linear(4, 4), "last": nn.Linear(5, 2)}
    check_operation(function, parameters, normal(BATCH, 4, 5, 4))


@pytest.mark.parametrize("flip", [lambda h: h.flip(0, 1), lambda h: h.flip((0, 1))])
def test_examples_flipped_along_with_another_axis(flip):
    def function(m, x):
        flipped = flip(m.layer(x.transpose(0, 1)))
        return m.last(flipped.flip(1)).transpose(0, 1)

    parameters = {"layer": nn.Linear(4, 4), "last": nn.Linear(4, 2)}
    check_operation(function, parameters, normal(BATCH, BATCH, 4))


def test_windows_over_rows_of_two_examples_are_refused():
    def function(m, x):
        windows = m.layer(x).contiguous().as_strided((5, 2, 4), (4, 4, 1))
        return m.last(windows[[1, 3, 4]])

    check_refused(
        function,
        {"layer": nn.Linear(4, 4), "last": nn.Linear(4, 2)},
        normal(BATCH, 2, 4),
        error=gs.ExampleAxisError,
        match="was lost at Tensor.as_strided",
    )


def test_rows_of_none_are_folded():
    """Nothing is sent to one of the experts."""

    def function(m, x):
        hidden, results = m.layer(x), x.new_zeros(BATCH, 2, 2)
        for expert in range(3):
            own = (torch.tensor([0, 0, 2]) == expert).nonzero()[:, 0]
            found = m.last(hidden[own].flatten(0, 1)).view(-1, 2, 2)
            results = results.index_add(0, own, found)
        return results

    parameters = {"layer": nn.Linear(4, 4), "last": nn.Linear(4, 2)}
    check_operation(function, parameters, normal(BATCH, 2, 4))


def test_a_copy_is_followed_anew_in_a_later_context():
    """What was noted on the tensor is copied with it."""
    kept = []

    def losses(model, x):
        h = model(x)
        kept.append(copy.deepcopy(h.detach().transpose(0, 1)))
        return h.square().sum((1, 2))

    model = nn.Linear(4, 4).double()
    gs.per_example_norms(model, normal(BATCH, BATCH, 4), losses)
    x = kept[0]
    assert_sqnorms(gs.per_example_norms(model, x, losses), oracle_sqnorms(model, x, losses), 1e-9)


def test_examples_that_a_bilinear_layer_sums_are_refused():
    """With as many features as examples its result looks like its operands."""
    weight = torch.randn(BATCH, BATCH, BATCH).double()
    check_refused(
        lambda m, x: nn.functional.bilinear(m.layer(x).T, x.T, weight).T,
        {"layer": nn.Linear(4, 4)},
        normal(BATCH, 4),
        error=gs.GradStatsError,
        match="bilinear|which loss belongs to which example was lost",
    )


def in_pairs(m, rows):
    """Children of one example side by side, up a tree; zeros stand for one that is missing."""
    while len(rows) > 1:
        others = torch.cat([rows[1:], torch.zeros_like(rows[:1])])
        rows = m[1](torch.cat([rows[::2], others[::2]], 1)).tanh()
    return rows[0]


def in_order(m, rows):
    """Each row with the one before it, of which the first has none."""
    before = torch.cat([rows.new_zeros(1, 4), rows[:-1]])
    return m[1](torch.cat([rows, before], -1)).tanh().amax(0)


def in_lists(m, rows):
    nodes = list(rows.split(1))
    while len(nodes) > 1:
        nodes = [m[1](torch.hstack(nodes[:2])).tanh(), *nodes[2:]]
    return nodes[0][0]


@pytest.mark.parametrize("combined", [in_pairs, in_order, in_lists])
@pytest.mark.parametrize("rows", [2, BATCH, 5, 8])
def test_rows_of_one_example_side_by_side(combined, rows):
    """In a loop over the examples, as trees and recurrences are written."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(8, 4)).double()
    x, weights = normal(BATCH, rows, 4), normal(4)

    def losses(m, x):
        return torch.stack([combined(m, m[0](each)) @ weights for each in x])

    expected = oracle_sqnorms(model, x, losses)
    assert_sqnorms(gs.per_example_norms(model, x, losses), expected, 1e-12)
    with gs.track(model, batch_size=BATCH) as tracker:
        losses(model, x).mean().backward()
    assert_sqnorms(tracker.stats, expected, 1e-12)


def test_rows_of_two_examples_side_by_side_are_refused():
    model, x = nn.Linear(8, 1).double(), normal(BATCH, 1, 4)
    first = nn.Linear(4, 4).double()

    def losses(m, x):
        rows = m[0](x)
        pairs = [torch.cat([rows[i], rows[(i + 1) % BATCH]], 1) for i in range(BATCH)]
        return torch.cat([m[1](pair) for pair in pairs])[:, 0].sin()

    with pytest.raises((gs.ExampleAxisError, gs.CoupledExamplesError)):
        gs.per_example_norms(nn.Sequential(first, model), x, losses)


OVER_AN_AXIS = {
    "sum": lambda h, axis: h.sum(axis),
    "mean": lambda h, axis: h.mean(dim=axis),
    "softmax": lambda h, axis: h.softmax(axis),
    "largest": lambda h, axis: h.amax(axis),
    "running sum": lambda h, axis: h.cumsum(axis),
    "norm": lambda h, axis: torch.linalg.norm(h, 2, dim=axis),
    "normalised": lambda h, axis: nn.functional.normalize(h, dim=axis),
}


@pytest.mark.parametrize("name", OVER_AN_AXIS)
def test_an_axis_given_as_a_number_of_numpy(name):
    function, layer = OVER_AN_AXIS[name], {"layer": nn.Linear(4, 2, bias=False)}
    data = normal(BATCH, 2, 4)
    check_operation(lambda m, x: function(m.layer(x), np.int64(1)), layer, data)
    check_refused(
        lambda m, x: function(m.layer(x), np.int64(0)) + m.layer(x),
        layer, data, error=gs.GradStatsError, match="example",
    )  # fmt: skip


@pytest.mark.parametrize("axis", [np.int64(0), (0,), np.int64(1)])
def test_squares_of_norms_along_an_axis_in_a_loss_over_all_examples(axis):
    layer, x = nn.Linear(4, 2).double(), normal(BATCH, 4)
    with gs.track(layer, batch_size=BATCH, loss_reduction="sum") as tracker:
        (torch.linalg.norm(layer(x), 2, dim=axis) ** 2).sum().backward()
    expected = oracle_sqnorms(layer, x, lambda model, rows: model(rows).square().sum(1))
    assert_sqnorms(tracker.stats, expected, 1e-10)


@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
def test_images_without_channels_are_resized_as_channels(mode):
    """As padding masks of detection models are, beside the features of their images."""

    def function(m, x, mask):
        small = torch.nn.functional.interpolate(mask[None], size=(2, 2), mode=mode)[0]
        hidden = m.layer(small.flatten(1)).view(len(x), 2, 2) * x
        return torch.nn.functional.interpolate(hidden[None], scale_factor=2, mode=mode)[0]

    check_operation(function, {"layer": nn.Linear(4, 4)}, normal(BATCH, 2, 2), normal(BATCH, 4, 4))


def test_examples_resized_along_their_own_axis_are_refused():
    check_refused(
        lambda m, x: torch.nn.functional.interpolate(m.layer(x).T[None], size=BATCH)[0].T,
        {"layer": nn.Linear(4, 4)},
        normal(BATCH, 4),
        error=gs.ExampleAxisError,
        match="which loss belongs to which example",
    )
