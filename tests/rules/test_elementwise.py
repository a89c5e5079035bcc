"""Parameters that broadcast against data, or stand beside them."""

import inspect
import operator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

import gradstats as gs
from tests.oracle import assert_sqnorms, oracle_on_the_batch
from tests.rules.operation import Operation, check_operation, check_refused, normal, uneven_loss

BATCH, POSITIONS, WIDTH = 3, 4, 2

SHAPES = [
    (),
    (1,),
    (WIDTH,),
    (POSITIONS, 1),
    (POSITIONS, WIDTH),
    (1, POSITIONS, WIDTH),
    (1, 1, WIDTH),
    (1, 1, 1),
    (BATCH, POSITIONS, WIDTH),
    (BATCH, 1, WIDTH),
    (BATCH, 1, 1),
]

OPERATIONS = {
    "x + w": operator.add,
    "w + x": lambda x, w: w + x,
    "x - w": operator.sub,
    "w - x": lambda x, w: w - x,
    "x * w": operator.mul,
    "w * x": lambda x, w: w * x,
    "x / w": lambda x, w: x / (w.abs() + 1),
    "w / x": lambda x, w: w / (x.abs() + 1),
    "x ** w": lambda x, w: (x.abs() + 0.5) ** w,
    "w ** x": lambda x, w: (w.abs() + 0.5) ** x,
    "torch.add": lambda x, w: torch.add(x, w, alpha=2.5),
    "torch.add reversed": lambda x, w: torch.add(input=w, other=x, alpha=-2.5),
    "torch.sub": lambda x, w: torch.sub(w, x, alpha=3),
    "torch.rsub": lambda x, w: torch.rsub(x, w, alpha=3),
    "torch.add of a multiple in a tensor": lambda x, w: x.add(w, alpha=torch.tensor(2.5)),
    "torch.sub of a multiple in a tensor": lambda x, w: torch.sub(w, x, alpha=torch.tensor(3)),
    "torch.mul": lambda x, w: torch.mul(w, other=x),
    "method mul": lambda x, w: w.mul(x),
    "torch.div": lambda x, w: torch.div(w, x.abs() + 1),
    "torch.pow": lambda x, w: torch.pow(w.abs() + 1, x),
    "torch.where": lambda x, w: torch.where(x > 0, w, x),
    "torch.where reversed": lambda x, w: torch.where(x > 0, x, w),
    "method where": lambda x, w: x.where(x > 0, w),
    "torch.addcmul": lambda x, w: torch.addcmul(x, x, w, value=0.5),
    "torch.addcmul of the parameter": lambda x, w: torch.addcmul(w, x, x, value=0.5),
    "method addcmul": lambda x, w: x.addcmul(w, x),
    "torch.addcdiv": lambda x, w: torch.addcdiv(x, w, x.abs() + 1),
    "torch.lerp": lambda x, w: torch.lerp(x, w, 0.25),
    "torch.lerp weight": lambda x, w: torch.lerp(x, 2 * x.detach(), w),
    "torch.maximum": torch.maximum,
    "torch.max": torch.max,
    "torch.minimum": lambda x, w: torch.minimum(w, x),
    "torch.logaddexp": torch.logaddexp,
    "torch.atan2": torch.atan2,
    "torch.hypot": torch.hypot,
    "torch.fmax": torch.fmax,
    "torch.clamp": lambda x, w: torch.clamp(x, min=w, max=w + 0.5),
    "method clamp": lambda x, w: x.clamp(min=-w.abs()),
    "clamp_max": lambda x, w: torch.clamp_max(x, w),
    "float_power": lambda x, w: torch.float_power(w.abs() + 1, x),
    "copysign": lambda x, w: torch.copysign(w, x),
    "xlog1py": lambda x, w: torch.special.xlog1py(x, w.abs()),
    "masked_fill": lambda x, w: x * w.masked_fill(x > 0, 0.5),
    "torch.masked_fill": lambda x, w: torch.masked_fill(w, value=torch.tensor(0.5), mask=x > 0),
    "masked_fill of a trained value": lambda x, w: x.masked_fill(x > 0, w.sum()),
    "masked_fill with both": lambda x, w: w.masked_fill(x > 0, w.mean()),
    "masked_fill_": lambda x, w: w.expand(x.shape).clone().masked_fill_(x > 0, 0.5),
}

LOSSES = {
    "mse": lambda x, w: functional.mse_loss(x, w.expand_as(x), reduction="none"),
    "smooth l1": lambda x, w: functional.smooth_l1_loss(w.expand_as(x), x, reduction="none"),
    "binary": lambda x, w: functional.binary_cross_entropy_with_logits(
        w.expand_as(x), x.sigmoid(), reduction="none"
    ),
    "gaussian": lambda x, w: functional.gaussian_nll_loss(
        x, torch.ones_like(x), w.exp().expand_as(x), reduction="none"
    ),
    "gaussian, a variance of each row": lambda x, w: functional.gaussian_nll_loss(
        x, torch.ones_like(x), var=w.exp().expand_as(x)[..., 0], reduction="none"
    ),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_losses_of_each_element(loss):
    for shape in [(WIDTH,), (1, POSITIONS, WIDTH)]:
        check_operation(lambda m, x: loss(x, m.w), {"w": shape}, normal(BATCH, POSITIONS, WIDTH))


CLASS_LOSSES = {
    "cross entropy": lambda w, y: functional.cross_entropy(w, y, reduction="none"),
    "smoothed": lambda w, y: functional.cross_entropy(
        w, y, label_smoothing=0.1, ignore_index=1, reduction="none"
    ),
    "negative log likelihood": lambda w, y: functional.nll_loss(
        w.log_softmax(1), y, reduction="none"
    ),
}


@pytest.mark.parametrize("loss", CLASS_LOSSES.values(), ids=CLASS_LOSSES)
def test_losses_of_classes_whose_scores_no_data_have_met(loss):
    """Such as those of the first token, which follows a start that is the same for all."""
    labels = torch.randint(WIDTH, (BATCH, POSITIONS))
    start = torch.zeros(BATCH, 2).double()
    vector, table, layer = (WIDTH,), (POSITIONS, WIDTH), nn.Linear(2, WIDTH)
    scores = [
        (vector, lambda m, y: loss(m.w.expand(BATCH, WIDTH), y[:, 0])),
        (layer, lambda m, y: loss(m.w(start), y[:, 0])),
        (table, lambda m, y: loss(m.w.mT.expand(BATCH, -1, -1), y).sum(1)),
        (table, lambda m, y: loss(m.w.repeat(BATCH, 1), y.flatten()).view(y.shape).sum(1)),
    ]
    for parameter, function in scores:
        check_operation(function, {"w": parameter}, labels)


def test_losses_against_trained_probabilities():
    check_operation(
        lambda m, x: functional.cross_entropy(
            x, m.w.softmax(0).expand(BATCH, WIDTH), reduction="none"
        ),
        {"w": (WIDTH,)},
        normal(BATCH, WIDTH),
    )


def test_losses_that_are_reduced_are_refused():
    check_refused(
        lambda m, y: functional.cross_entropy(m.w.expand(BATCH, WIDTH), y).expand(BATCH),
        {"w": (WIDTH,)},
        torch.randint(WIDTH, (BATCH,)),
        match=r'cross_entropy.*\'w\'.*reduction="none"',
    )
    check_refused(
        lambda m, x: functional.mse_loss(x, m.w.expand_as(x)).expand(BATCH),
        {"w": (WIDTH,)},
        normal(BATCH, WIDTH),
        match=r'mse_loss.*\'w\'.*reduction="none"',
    )


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_every_operation(operation):
    for shape in [(WIDTH,), (1, POSITIONS, WIDTH), (BATCH, 1, WIDTH)]:
        check_operation(
            lambda m, x: operation(x, m.w), {"w": shape}, normal(BATCH, POSITIONS, WIDTH)
        )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ["x + w", "w * x", "torch.where"])
def test_every_shape(name, shape):
    operation = OPERATIONS[name]
    check_operation(lambda m, x: operation(x, m.w), {"w": shape}, normal(BATCH, POSITIONS, WIDTH))


@settings(max_examples=25)
@given(st.data())
def test_broadcast_sweep(data):
    """Data and parameter of any number of axes, either of which may be broadcast."""
    sizes = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    keep = data.draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes)))
    shape = [size if kept else 1 for size, kept in zip(sizes, keep, strict=True)]
    shape = shape[data.draw(st.integers(0, len(shape))) :]
    # Beyond the example axis, the data may be broadcast to the parameter too.
    narrow = data.draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes)))
    extent = [sizes[0], *(1 if n else s for n, s in zip(narrow[1:], sizes[1:], strict=True))]
    name = data.draw(st.sampled_from(["x + w", "w - x", "x * w", "w / x", "torch.where"]))
    operation = OPERATIONS[name]
    check_operation(lambda m, x: operation(x, m.w), {"w": tuple(shape)}, normal(*extent))


@pytest.mark.parametrize("shape", [(3,), (3, 3), (1, 3, 3), (3, 1, 1), (3, 1), (1, 3)], ids=str)
def test_as_many_positions_and_channels_as_examples(shape):
    check_operation(lambda m, x: x * m.w + x, {"w": shape}, normal(3, 3, 3))
    check_operation(lambda m, x: x - m.w, {"w": shape}, normal(3, 3, 3))


def test_data_that_are_fewer_dimensional_than_the_parameter():
    # The parameter's first axis stands before the examples.
    check_operation(
        lambda m, x: (m.w * x).transpose(0, 1), {"w": (5, 1, WIDTH)}, normal(BATCH, WIDTH)
    )
    check_operation(lambda m, x: (m.w + x).T, {"w": (5, 1)}, normal(BATCH))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_another_example_axis(shape):
    check_operation(
        lambda m, x: x * m.w,
        {"w": shape},
        normal(BATCH, POSITIONS, WIDTH),
        batch_dim=1,
        loss_fn=lambda m, b: m(*b).square().sum((0, 2)),
    )


@pytest.mark.filterwarnings("ignore:where received a uint8 condition")
def test_a_condition_in_bytes():
    check_operation(
        lambda m, x: torch.where((x > 0).byte(), x, m.w),
        {"w": (WIDTH,)},
        normal(BATCH, POSITIONS, WIDTH),
    )


IN_PLACE = {
    "add_": lambda x, w: x.add_(w, alpha=2),
    "add_ of a multiple in a tensor": lambda x, w: x.add_(w, alpha=torch.tensor(2.0)),
    "sub_": lambda x, w: x.sub_(w),
    "mul_": lambda x, w: x.mul_(w),
    "div_": lambda x, w: x.div_(w),
    "pow_": lambda x, w: x.abs().pow_(w),
    "addcmul_": lambda x, w: x.addcmul_(w, w * 2),
    "lerp_": lambda x, w: x.lerp_(w, 0.25),
    "+=": operator.iadd,
    "-=": operator.isub,
    "*=": operator.imul,
    "/=": operator.itruediv,
}


@pytest.mark.parametrize("operation", IN_PLACE.values(), ids=IN_PLACE)
def test_data_changed_in_place(operation):
    # The copy is what a network has computed so far: an activation, not the caller's batch.
    for shape in [(WIDTH,), (POSITIONS, WIDTH), ()]:
        check_operation(
            lambda m, x: operation(x + 2, m.w), {"w": shape}, normal(BATCH, POSITIONS, WIDTH)
        )


def test_a_part_of_the_data_changed_in_place():
    def function(m, x):
        hidden = x * 2
        hidden[:, 1:].mul_(m.w)
        hidden[:, 0] += m.w
        return hidden

    check_operation(function, {"w": (WIDTH,)}, normal(BATCH, POSITIONS, WIDTH))


@pytest.mark.parametrize(
    "index",
    [
        (slice(None), 0),
        (slice(None), slice(1, None)),
        (slice(None), slice(None, None, 2), 1),
        (slice(None), None, 1),
        (slice(None), ..., 0),
        (..., 1, slice(None)),
        (..., 0),
        ...,
        (),
        slice(None),
    ],
    ids=str,
)
def test_parameters_written_into_data(index):
    def function(m, x):
        hidden = torch.zeros_like(x)
        hidden[:] = 2 * x
        hidden[index] = m.w[: hidden[index].shape[-1]] if hidden[index].dim() > 1 else m.w[0]
        return hidden

    check_operation(function, {"w": (POSITIONS,)}, normal(BATCH, POSITIONS, WIDTH))


@pytest.mark.parametrize(
    "index", [[0, 2], (0, 2), range(2), np.array([0, 2]), torch.tensor([0, 2])], ids=repr
)
def test_parameters_written_where_numbers_say_are_refused(index):
    """Numbers in whatever form select a copy, which what is written would be lost in."""

    def function(m, x):
        hidden = 2 * x
        hidden[:, index] = m.w
        return hidden

    check_refused(function, {"w": (2,)}, normal(BATCH, POSITIONS), match="__setitem__.*'w'")


def test_parameters_copied_into_data():
    check_operation(
        lambda m, x: (2 * x).copy_(m.w) + x, {"w": (WIDTH,)}, normal(BATCH, POSITIONS, WIDTH)
    )


@pytest.mark.parametrize("of", ["positions", "elements", "T = B", "constant"])
def test_parameters_written_where_a_mask_is_true(of):
    """Mask tokens, as masked autoencoders and speech models put them into what they hide."""
    length = BATCH if of == "T = B" else POSITIONS
    generator = torch.Generator().manual_seed(1)
    shape = (BATCH, length, WIDTH) if of == "elements" else (BATCH, length)
    mask = torch.rand(shape, generator=generator) < 0.5
    shapes = [()] if of == "elements" else [(WIDTH,), (1, WIDTH), (1,)]

    def function(m, x, mask):
        for number in range(len(shapes)):
            hidden = x * (number + 1)
            if of == "constant":
                mask = torch.arange(BATCH * length).view(BATCH, length) % 2 == 0
            hidden[mask] = getattr(m, f"w{number}")
            x = x + hidden * m.scale
        part = x[:, 1:] * 2
        part[mask[:, 1:]] = m.w0 * 2
        return torch.cat([x, part], 1)

    parameters = {f"w{number}": shape for number, shape in enumerate(shapes)}
    x = normal(BATCH, length, WIDTH)
    check_operation(function, {**parameters, "scale": (WIDTH,)}, x, mask)


SELECTED = {
    "one position of each": lambda places: (torch.arange(len(places)), places[:, 0]),
    "two positions of each": lambda places: (torch.arange(len(places))[:, None], places[:, :2]),
    "positions found": lambda places: (places == 0).nonzero(as_tuple=True),
    "positions of all": lambda places: (slice(None), torch.tensor([0, 2])),
    "a list": lambda places: (..., [0, 2], slice(None)),
    "some examples": lambda places: (places[:, 0] > 0).nonzero()[:, 0],
    "a number and positions": lambda places: (torch.tensor(1), torch.tensor([2, 0])),
    "a part of each": lambda places: (torch.arange(len(places)), places[:, 0], slice(1, None)),
}


@pytest.mark.parametrize("length", [BATCH, POSITIONS], ids=["T = B", "T ≠ B"])
@pytest.mark.parametrize("selected", SELECTED)
def test_parameters_written_where_indices_say(selected, length):
    """As the token of a masked word, or of each sequence's end, is put in its place."""
    shape = (1,) if selected == "a part of each" else (WIDTH,)

    def function(m, x, places):
        hidden = x @ m.layer
        hidden[SELECTED[selected](places)] = m.w * 2
        return torch.tanh(hidden) @ m.layer

    places = normal(BATCH, length).argsort(1)
    x = normal(BATCH, length, WIDTH)
    check_operation(function, {"w": shape, "layer": (WIDTH, WIDTH)}, x, places)


def test_parameters_written_where_indices_say_into_merged_rows():
    def function(m, x):
        hidden = x.flatten(0, 1) * m.scale
        hidden[torch.arange(BATCH) * POSITIONS + 1] = m.w
        return torch.tanh(hidden).view(x.shape)

    check_operation(function, {"w": (WIDTH,), "scale": ()}, normal(BATCH, POSITIONS, WIDTH))


def test_parameters_written_into_examples_of_fixed_numbers():
    def losses(m, x):
        hidden = x * m.scale
        hidden[torch.tensor([2, 0])] = m.w
        return hidden.sin().sum(1)

    model = nn.Module()
    model.w, model.scale = (nn.Parameter(normal(2)) for _ in range(2))
    x = normal(BATCH, 2)
    expected = oracle_on_the_batch(model, x, losses)
    assert_sqnorms(gs.per_example_norms(model, x, losses), expected, 1e-12)


def test_parameters_written_twice_to_one_place_are_refused():
    """Their gradient counts it twice, and which write remains is not determined."""

    def function(m, x):
        hidden = 2 * x
        hidden[:, torch.tensor([1, 1])] = m.w
        return hidden

    check_refused(
        function, {"w": (2,)}, normal(BATCH, POSITIONS, 2),
        match="__setitem__ to places that are selected twice.*'w'",
    )  # fmt: skip


@pytest.mark.parametrize("length", [BATCH, POSITIONS], ids=["T = B", "T ≠ B"])
@pytest.mark.parametrize("of", ["positions", "elements", "first axis behind"])
@pytest.mark.parametrize("value", [0, 0.5, torch.tensor(2.0).double()], ids=str)
def test_numbers_written_into_repeated_parameters_where_a_mask_of_data_is_true(value, of, length):
    """As queries are hidden that an example has no use for."""

    def function(m, x):
        queries = m.queries.tanh().repeat(len(x), 1, 1)
        mask = x > 0 if of == "elements" else x[..., 0] > 0
        if of == "first axis behind":
            queries, mask = queries.transpose(0, 1).clone(), mask.T
        queries[mask] = value
        queries = queries.transpose(0, 1) if of == "first axis behind" else queries
        return (queries * m.scale + x) @ m.w

    parameters = {"queries": (length, WIDTH), "scale": (WIDTH,), "w": (WIDTH, 2)}
    check_operation(function, parameters, normal(BATCH, length, WIDTH))


def test_parameters_written_where_a_mask_of_other_examples_is_true_are_refused():
    def function(m, x, mask):
        hidden = 2 * x
        hidden[mask.t()] = m.w
        return hidden

    mask = torch.ones(BATCH, BATCH, dtype=torch.bool)
    check_refused(function, {"w": (2,)}, normal(BATCH, BATCH, 2), mask, match="__setitem__.*'w'")


def test_a_slice_for_each_place_of_a_mask_is_refused():
    def function(m, x, mask):
        hidden = 2 * x
        hidden[mask] = m.w
        return hidden

    mask = torch.eye(BATCH, dtype=torch.bool)
    for shape in ((BATCH, 2), (1, BATCH, 2)):
        check_refused(
            function, {"w": shape}, normal(BATCH, BATCH, 2), mask,
            match="__setitem__ of a different slice for each selected place.*'w'",
        )  # fmt: skip


def test_a_slice_for_each_row_of_an_example_is_not_written_by_a_mask():
    def function(m, x):
        hidden = x.flatten(0, 1).t() * 2
        hidden[torch.arange(5) > 2] = m.w
        return hidden.t().view_as(x)

    check_operation(function, {"w": (1,)}, normal(BATCH, 2, 5))
    check_refused(
        function, {"w": (2 * BATCH,)}, normal(BATCH, 2, 5),
        match="__setitem__ of a slice for each row of an example.*'w'",
    )  # fmt: skip


def test_writing_into_a_tensor_of_no_example_is_refused():
    def function(m, x):
        table = torch.zeros(2, dtype=torch.float64)
        table[x[0, :2] > 0] = m.w
        return x * table.sum()

    check_refused(
        function, {"w": ()}, normal(BATCH, 4), match="to a tensor that belongs to no example"
    )


def test_prelu_of_infinite_and_other_special_inputs():
    x = torch.tensor([[torch.inf, -2, 3], [0, torch.inf, -1], [-0.0, 0, 1]]).double()
    for count in (1, 3):
        check_operation(
            lambda m, x: functional.prelu(x, m.w).atan(), {"w": torch.rand(count)}, x,
            gradient_of_data=False,
        )  # fmt: skip


def test_prelu_of_a_derived_input_is_refused():
    check_refused(
        lambda m, x: functional.prelu(m.w * 2, x[0, :1]), {"w": (BATCH, 4)}, normal(BATCH, 4),
        match="prelu of a derived input.*'w'",
    )  # fmt: skip


@pytest.mark.parametrize("index", [0, slice(1, 3), (0, ...)], ids=str)
def test_parameters_written_into_some_of_the_examples_are_refused(index):
    def function(m, x):
        hidden = 2 * x
        hidden[index] = m.w
        return hidden

    check_refused(function, {"w": (2,)}, normal(BATCH, 2), match="__setitem__.*'w'")


def test_data_added_in_place_to_what_others_show_are_refused():
    def function(m, x):
        doubled = 2 * m.w
        first = doubled[:, :1]
        return first * doubled.add_(x)

    check_refused(function, {"w": (BATCH, 2)}, normal(BATCH, 2), match="in place")


def test_data_added_in_place_to_a_slice_for_each_example():
    check_operation(lambda m, x: (2 * m.w).add_(x), {"w": (BATCH, 2)}, normal(BATCH, 2))


@pytest.mark.parametrize(
    "mixed", [torch.cat, torch.concat, torch.concatenate], ids=["cat", "concat", "concatenate"]
)
def test_class_token_before_the_patches(mixed):
    def function(m, x):
        token = m.token.expand(x.shape[0], -1, -1)
        return m.layer(mixed((token, x), dim=1))

    parameters = {"token": (1, 1, WIDTH), "layer": nn.Linear(WIDTH, 3)}
    check_operation(function, parameters, normal(BATCH, POSITIONS, WIDTH))
    check_operation(function, parameters, normal(1, POSITIONS, WIDTH))


EXPANSIONS = {
    "expand": lambda w: w.expand(BATCH, 2, WIDTH),
    "expand -1": lambda w: w.expand(BATCH, -1, -1),
    "repeat": lambda w: w.repeat(BATCH, 1, 1),
    "tile": lambda w: w.tile(BATCH, 1, 1),
    "broadcast_to": lambda w: torch.broadcast_to(w, (BATCH, 2, WIDTH)),
    "repeat_interleave": lambda w: w.repeat_interleave(BATCH, dim=0),
    "index": lambda w: w[torch.zeros(BATCH, dtype=torch.int64)],
}


@pytest.mark.parametrize("expansion", EXPANSIONS.values(), ids=EXPANSIONS)
def test_tokens_repeated_for_each_example(expansion):
    check_operation(
        lambda m, x: torch.cat([expansion(m.w), x], 1),
        {"w": (1, 2, WIDTH)},
        normal(BATCH, 3, WIDTH),
    )
    check_operation(
        lambda m, x: torch.cat([x, expansion(m.w)], dim=-2),
        {"w": (1, 2, WIDTH)},
        normal(BATCH, 3, WIDTH),
    )


def test_tokens_in_a_row_with_data():
    for stacked in (torch.hstack, torch.column_stack):
        check_operation(
            lambda m, x, stacked=stacked: stacked([m.w.expand(BATCH, -1, -1), x, x]),
            {"w": (1, 2, WIDTH)},
            normal(BATCH, 3, WIDTH),
        )
        check_operation(
            lambda m, x, stacked=stacked: stacked((x, m.w.expand(BATCH, 2))),
            {"w": (2,)},
            normal(BATCH, WIDTH),
        )
    check_operation(
        lambda m, x: torch.dstack([x, m.w.expand(BATCH, 3, -1)]),
        {"w": (1, 3, 2)},
        normal(BATCH, 3, WIDTH),
    )
    check_operation(
        lambda m, x: torch.vstack([m.w.expand(2, BATCH, -1), x.transpose(0, 1)]).transpose(0, 1),
        {"w": (2, 1, WIDTH)},
        normal(BATCH, 3, WIDTH),
    )


def test_columns_of_numbers_are_refused():
    check_refused(
        lambda m, x: torch.hstack([m.w.expand(BATCH), x]),
        {"w": (1,)},
        normal(BATCH),
        match="Use torch.cat or torch.stack",
    )


def test_a_parameter_expanded_along_several_axes():
    data = normal(BATCH, POSITIONS, WIDTH)
    for shape in [(), (1,), (1, 1), (POSITIONS, 1), (1, 1, 1), (1, 1, WIDTH)]:
        check_operation(lambda m, x: x * m.w.expand(*x.shape), {"w": shape}, data)
        check_operation(lambda m, x: m.w.expand(*x.shape[1:]) + x, {"w": shape[-2:]}, data)


@pytest.mark.parametrize("dim", [1, 2, -1])
def test_stack_with_a_token(dim):
    check_operation(
        lambda m, x: torch.stack((x, m.w.expand(BATCH, WIDTH), x), dim),
        {"w": (WIDTH,)},
        normal(BATCH, WIDTH),
    )


def test_stack_before_the_examples():
    check_operation(
        lambda m, x: torch.stack([x, m.w.expand(BATCH, WIDTH)]).transpose(0, 1),
        {"w": (WIDTH,)},
        normal(BATCH, WIDTH),
    )
    # Three in a row look like a batch of three.
    check_operation(
        lambda m, x: torch.stack([x, m.w.expand(BATCH, WIDTH), x]).transpose(0, 1),
        {"w": (WIDTH,)},
        normal(BATCH, WIDTH),
    )


@pytest.mark.parametrize("dim", [1, 2, -1, -2])
def test_cat_with_a_token_for_each_of_an_examples_rows(dim):
    """Frames of videos, folded into the batch, each with a token before its patches."""

    def function(m, x):
        rows = (x @ m.layer).flatten(0, 1)
        shape = list(rows.shape)
        shape[dim] = 1
        return torch.cat([m.token.expand(shape), rows], dim).view(len(x), -1).sin()

    check_operation(
        function, {"token": (1, 1, 1), "layer": (WIDTH, WIDTH)}, normal(BATCH, 3, 2, WIDTH)
    )
    check_operation(function, {"token": (1, 1, 1), "layer": (WIDTH, WIDTH)}, normal(1, 3, 2, WIDTH))


@pytest.mark.parametrize("axis", [1, 2])
def test_cat_of_rows_along_another_axis(axis):
    """The axis of the join stands before that of the examples, or behind it."""

    def function(m, x):
        rows = (x @ m.layer).flatten(0, 1).movedim(0, axis)
        joined = torch.cat([m.token.expand(1, *rows.shape[1:]), rows], dim=0)
        return joined.movedim(axis, 0).reshape(BATCH, -1).sin()

    check_operation(
        function, {"token": (1, 1, 1), "layer": (WIDTH, WIDTH)}, normal(BATCH, 3, 2, WIDTH)
    )


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2, -3])
def test_stack_with_a_token_for_each_of_an_examples_rows(dim):
    def function(m, x):
        rows = (x @ m.layer).flatten(0, 1)
        stacked = torch.stack([m.token.expand(rows.shape), rows, rows], dim)
        return stacked.movedim(dim, -1).reshape(BATCH, -1).sin()

    check_operation(
        function, {"token": (1, WIDTH), "layer": (WIDTH, WIDTH)}, normal(BATCH, 2, WIDTH)
    )


def test_attention_of_a_token_to_each_of_an_examples_rows():
    def function(m, x):
        rows = (x @ m.layer).reshape(-1, WIDTH)
        pairs = torch.stack([m.token.expand(rows.shape), rows], dim=1)
        out = functional.scaled_dot_product_attention(pairs, pairs, pairs)[:, 0]
        return out.reshape(BATCH, -1)

    check_operation(
        function, {"token": (1, WIDTH), "layer": (WIDTH, WIDTH)}, normal(BATCH, 2, WIDTH)
    )


def test_joins_under_numpys_name_of_the_axis():
    check_operation(
        lambda m, x: torch.concatenate([m.w.expand(1, BATCH, WIDTH), x[None]], axis=0)
        .transpose(0, 1).reshape(BATCH, -1),
        {"w": (WIDTH,)},
        normal(BATCH, WIDTH),
    )  # fmt: skip


def test_joining_along_the_examples_is_refused():
    check_refused(
        lambda m, x: torch.cat([m.w, x])[1:],
        {"w": (1, 2)},
        normal(BATCH, 2),
        match="cat along the example",
    )


@pytest.mark.parametrize("shape", [(3,), (3, 2), (3, 2, 4), (2, 2, 2)], ids=str)
def test_parametric_relu(shape):
    check_operation(lambda m, x: m.layer(x), {"layer": nn.PReLU()}, normal(*shape))
    if len(shape) > 1:
        check_operation(lambda m, x: m.layer(x), {"layer": nn.PReLU(shape[1])}, normal(*shape))
        check_operation(lambda m, x: functional.prelu(x, m.w), {"w": (shape[1],)}, normal(*shape))


# Not of each element alone, or not of one argument.
OTHER_ACTIVATIONS = {
    "LogSoftmax", "MultiheadAttention", "PReLU", "Softmax", "Softmax2d", "Softmin", "Threshold",
}  # fmt: skip


def activations():
    """Return PyTorch's activations, in place too where they offer it."""
    found = []
    for name in sorted(set(nn.modules.activation.__all__) - OTHER_ACTIVATIONS):
        kind = getattr(nn, name)
        found.append(pytest.param(kind(), id=name))
        if "inplace" in inspect.signature(kind).parameters:
            found.append(pytest.param(kind(inplace=True), id=f"{name}, in place"))
    return found


@pytest.mark.parametrize("activation", activations())
def test_activations_keep_examples_apart(activation):
    activation.eval()  # in which RReLU has one slope
    layers = {"first": nn.Linear(3, 4), "last": nn.Linear(1, 2)}
    check_operation(
        lambda m, x: m.last(activation(m.first(x)).mean(-1, keepdim=True)), layers, normal(4, 3)
    )


def test_data_without_an_example_axis_are_refused():
    check_refused(
        lambda m, x, y: x + (m.w * y).sum(),
        {"w": (5,)},
        normal(3),
        normal(5),
        error=gs.ExampleAxisError,
        match=r"(?s)'w'.*\(5,\)",
    )


def test_operations_without_a_gradient_pass():
    def function(m, x):
        return torch.where(x > m.w, x * m.w, x) + (m.w == x) + torch.zeros_like(m.w)

    check_operation(function, {"w": (WIDTH,)}, normal(BATCH, WIDTH))


def test_a_trained_value_filled_in_place_is_refused():
    check_refused(
        lambda m, x: (x * 2).masked_fill_(x > 0, m.w),
        {"w": ()},
        normal(BATCH, WIDTH),
        match=r"masked_fill_ of a trained value.*'w'.*x.masked_fill\(mask, w\)",
    )


def test_an_operation_without_a_rule_is_refused():
    check_refused(
        lambda m, x: torch.linalg.householder_product(m.w.expand(3, 4, 2), x),
        {"w": (4, 2)},
        normal(3, 2),
        match=r"householder_product.*'w'.*exclude=\['w'\]",
    )


REPEATED = {
    "add": lambda m, x: x + m.w,
    "mul": lambda m, x: m.w * x,
    "where": lambda m, x: torch.where(x > 0, x, m.w),
    "einsum": lambda m, x: torch.einsum("bd,bd->b", x, m.w.exp()),
    "baddbmm": lambda m, x: torch.baddbmm(x[None], m.w[..., None], torch.ones(3, 1, 5).double()),
}


@pytest.mark.parametrize("operation", REPEATED.values(), ids=REPEATED)
def test_repeating_the_only_example_is_refused(operation):
    check_refused(
        lambda m, x: operation(m, x).square().sum()[None],
        {"w": (3, 5)},
        normal(1, 5),
        match="repeats the only example",
    )


@pytest.mark.parametrize("name", ["add", "mul", "where"])
def test_sizes_that_do_not_fit_get_pytorchs_error(name):
    model = Operation(REPEATED[name], {"w": (3, 5)}, upstream=False)
    with pytest.raises(RuntimeError, match=r"must match .*size"):
        gs.per_example_norms(model, (normal(4, 5),), uneven_loss)


BESIDE_A_LOOP = {
    "a number": lambda row, w: torch.lerp(row, w, 0.3),
    "a constant": lambda row, w: torch.addcmul(row, w, torch.arange(4).double(), value=0.5),
}


@pytest.mark.parametrize("name", BESIDE_A_LOOP)
def test_one_example_after_the_other_with(name):
    check_operation(
        lambda m, x: torch.stack([BESIDE_A_LOOP[name](row, m.w) for row in x]),
        {"w": (4,)},
        normal(3, 4),
    )


@pytest.mark.parametrize("shape", [(5,), (1, 5), (1,), (), (2, 5), (2, 1)], ids=str)
def test_broadcast_tensors(shape):
    def function(m, x):
        mean, scale, other = torch.broadcast_tensors(x[..., :1], m.w.exp(), x)
        return (mean * scale - other).square() * scale

    check_operation(function, {"w": shape}, normal(4, 2, 5))
    check_operation(function, {"w": shape}, normal(1, 2, 5))
    check_operation(
        lambda m, x: function(m, x.flatten(0, 1)).unflatten(0, (4, 3)),
        {"w": shape},
        normal(4, 3, 2, 5),
    )
    # As many positions as examples, which stand first.
    check_operation(
        lambda m, x: function(m, x.transpose(0, 1)).transpose(0, 1), {"w": shape}, normal(2, 2, 5)
    )


def test_a_policy_with_a_free_standard_deviation():
    def loss(m, x):
        policy = torch.distributions.Normal(m.layer(x), m.log_std.exp())
        sample = policy.mean.detach() + torch.linspace(-1, 1, 3).double()
        return -policy.log_prob(sample).exp() - 0.1 * policy.entropy()

    for shape in [(3, 5), (3, 3, 5)]:
        check_operation(loss, {"layer": nn.Linear(5, 3), "log_std": (3,)}, normal(*shape))


def test_a_bernoulli_distribution_of_a_parameter():
    check_operation(
        lambda m, x: torch.distributions.Bernoulli(logits=m.w).log_prob((x > 0).double()),
        {"w": (5,)},
        normal(3, 5),
    )


def test_samples_that_are_differentiated():
    """Each is drawn from the values in its place."""

    def function(m, x):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            shape = functional.softplus(m.layer(x)) + 0.3
            gamma, student = torch.distributions.Gamma, torch.distributions.StudentT
            return gamma(shape, shape).rsample() + student(shape + 2).rsample()

    check_operation(function, {"layer": nn.Linear(4, 3)}, normal(BATCH, 4))
