"""Operations on the data of one example at a time, as loops over a batch take them."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import gradstats as gs
from tests.oracle import (
    are_right,
    assert_sqnorms,
    check_model,
    oracle_on_the_batch,
    oracle_sqnorms,
)
from tests.rules.operation import check_operation, normal
from tests.rules.test_complex import numbers, real

BATCH, POSITIONS, WIDTH = 4, 3, 5

OPERATIONS = {
    "einsum": (lambda x, w: torch.einsum("...td,de->...te", x, w), (WIDTH, 4)),
    "einsum transposed": (lambda x, w: torch.einsum("...td,ed->...et", x, w), (4, WIDTH)),
    "einsum of everything": (
        lambda x, w: torch.einsum("...td,td->...", x, w),
        (POSITIONS, WIDTH),
    ),
    "einsum in groups": (
        lambda x, w: torch.einsum("...td,tde->...te", x, w),
        (POSITIONS, WIDTH, 2),
    ),
    "einsum to two axes": (lambda x, w: torch.einsum("...td,def->...tef", x, w), (WIDTH, 2, 3)),
    "x @ w": (lambda x, w: x @ w, (WIDTH, 4)),
    "w @ x": (lambda x, w: w @ x, (4, POSITIONS)),
    "w @ x.mT": (lambda x, w: w @ x.mT, (4, WIDTH)),
    "x @ vector": (lambda x, w: x @ w, (WIDTH,)),
    "x w x": (lambda x, w: x @ w @ x.mT, (WIDTH, WIDTH)),
    "a matrix for each position": (lambda x, w: x.unsqueeze(-2) @ w, (POSITIONS, WIDTH, 2)),
    "attention pooling": (lambda x, w: torch.softmax(w, 0) @ x, (POSITIONS,)),
    "tensordot": (lambda x, w: torch.tensordot(x, w, 2), (POSITIONS, WIDTH, 2)),
    "vecdot": (lambda x, w: torch.linalg.vecdot(x, w), (WIDTH,)),
    "bilinear": (lambda x, w: functional.bilinear(x, x.sin(), w), (2, WIDTH, WIDTH)),
    "bilinear to many": (lambda x, w: functional.bilinear(x, x.sin(), w), (7, WIDTH, WIDTH)),
    "product": (lambda x, w: (x * w).sum(), (POSITIONS, WIDTH)),
    "rows of a table": (lambda x, w: w[(x[..., 0] > 0).long()], (2, 4)),
}


@pytest.mark.parametrize("keep", [True, False], ids=["x[i : i + 1]", "x[i]"])
@pytest.mark.parametrize(("function", "shape"), OPERATIONS.values(), ids=OPERATIONS)
def test_operations_on_one_example_at_a_time(function, shape, keep):
    def each(m, x):
        parts = [x[i : i + 1] if keep else x[i] for i in range(len(x))]
        return torch.stack([function(part, m.w).flatten() for part in parts])

    check_operation(each, {"w": shape}, normal(BATCH, POSITIONS, WIDTH))


ON_VECTORS = {
    "dot": (lambda x, w: torch.dot(x, w), (WIDTH,)),
    "method dot": (lambda x, w: w.dot(x), (WIDTH,)),
    "mv": (lambda x, w: torch.mv(w, x), (4, WIDTH)),
    "w @ x": (lambda x, w: w @ x, (4, WIDTH)),
    "outer": (lambda x, w: torch.outer(x, w), (3,)),
}


@pytest.mark.parametrize(("function", "shape"), ON_VECTORS.values(), ids=ON_VECTORS)
def test_operations_on_vectors_of_one_example(function, shape):
    check_operation(
        lambda m, x: torch.stack([function(row, m.w).reshape(-1) for row in x]),
        {"w": shape},
        normal(BATCH, WIDTH),
    )


@pytest.mark.parametrize("lengths", [(1, 3, 2, 1), (2, 2, 2, 1)], ids=str)
def test_products_of_examples_of_different_lengths(lengths):
    """Rows of examples that differ in number are positions of the product."""

    def each(m, x):
        rows = torch.cat([row[:length] for row, length in zip(x, lengths, strict=True)])
        made = torch.einsum("td,hde->the", rows, m.w), m.v @ rows.unsqueeze(-1)
        sums = [torch.cat([part.flatten(1) for part in made], 1).split(lengths)]
        return torch.stack([part.sum(0) for part in sums[0]])

    check_operation(each, {"w": (2, WIDTH, 3), "v": (3, WIDTH)}, normal(BATCH, POSITIONS, WIDTH))


def test_complex_products_of_one_example_at_a_time():
    check_operation(
        lambda m, x: real(torch.stack([torch.fft.fft(row) @ m.w for row in x])),
        {"w": numbers(WIDTH, 2)},
        normal(BATCH, POSITIONS, WIDTH),
    )


def test_derivatives_of_products_of_one_example():
    def loss_fn(model, batch):
        (x,) = batch
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        return slope.square().flatten(1).sum(1)

    check_operation(
        lambda m, x: torch.stack([(m.w @ row).tanh().flatten() for row in x]),
        {"w": (2, POSITIONS)},
        normal(BATCH, POSITIONS, WIDTH),
        loss_fn=loss_fn,
        fusing=(True,),
    )


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("first", [True, False])
def test_a_number_of_nobodys_beside_one_of_one_examples(shape, first):
    """As the coefficients of an integrator stand beside the length of its step."""
    number = torch.full(shape, 0.3, dtype=torch.float64)

    def each(m, x):
        rows = []
        for i in range(len(x)):
            hidden = (x[i : i + 1] @ m.w).tanh()
            step = hidden.mean()
            rows.append((hidden * (number * step if first else step * number)) @ m.v)
        return torch.cat(rows)

    check_operation(each, {"w": (WIDTH, 3), "v": (3, 2)}, normal(BATCH, WIDTH))


def folded(x):
    """Return (B, 3, 5) as (3, B, 5)."""
    return x.transpose(0, 1).reshape(POSITIONS, -1, WIDTH)


ONLY_EXAMPLES = {
    "members of an ensemble": (
        lambda x, w, b: torch.baddbmm(b, x[:, 0].unsqueeze(0).expand(3, -1, -1), w).movedim(1, 0),
        (3, 1, 4),
    ),
    "matrices of members": (
        lambda x, w, b: (torch.bmm(x[:, 0].unsqueeze(0).repeat(3, 1, 1), w) + b).movedim(1, 0),
        (3, 1, 4),
    ),
    "einsum in groups": (
        lambda x, w, b: torch.einsum("gnd,gde->gne", folded(x), w).movedim(1, 0) * b,
        (3, 4),
    ),
    "channels behind their only row": (
        lambda x, w, b: torch.stack([torch.mv(w[0].T, part) for part in x[0]], 1).T @ b,
        (4, 2),
    ),
    "rows and a part for each": (lambda x, w, b: (x @ w[0]).flatten(0, 1) * b, (3, 4)),
    "a number of its own": (lambda x, w, b: ((x @ w[0]).sum() + b).view(1, 1), ()),
    "numbers side by side": (lambda x, w, b: torch.stack([(x @ w[0]).sum(), b]).view(1, 2), ()),
}


@pytest.mark.parametrize(("function", "shape"), ONLY_EXAMPLES.values(), ids=ONLY_EXAMPLES)
def test_operations_on_the_only_example(function, shape):
    """All of it is one example's, along whichever axis it was found."""

    def alone(m, x):
        return function(x, m.w, m.b).reshape(1, -1)

    check_operation(alone, {"w": (3, WIDTH, 4), "b": shape}, normal(1, POSITIONS, WIDTH))


@pytest.mark.parametrize("equation", ["dbc,dc->b", "dbc,dce->be", "dbc,ed->bce"])
def test_an_index_of_size_one_in_front_of_the_only_example(equation):
    """Either axis of size 1 could be the examples'; both are the one example's."""
    sizes = {"c": WIDTH}
    shape = [sizes.get(index, 1) for index in equation.partition(",")[2].partition("->")[0]]

    def function(m, x):
        return torch.einsum(equation, x[None], m.w)

    check_operation(function, {"w": shape}, normal(1, WIDTH))


def test_steps_of_the_only_example():
    """A recurrent layer has its examples along another axis than data of one step by contract."""

    def steps(m, x):
        state, seen = torch.zeros(1, 1, 4, dtype=x.dtype), []
        for row in x.transpose(0, 1):
            hidden, state = m.cell(row.reshape(-1, WIDTH).view(1, -1, WIDTH).contiguous(), state)
            seen.append(hidden.view(1, -1))
        return torch.cat(seen, 1)

    check_operation(steps, {"cell": torch.nn.GRU(WIDTH, 4)}, normal(1, POSITIONS, WIDTH))


@pytest.mark.parametrize("batch", [1, 2])
def test_attention_of_the_only_example_with_padding_and_a_trained_mask(batch):
    """Padding that is repeated for the heads is no mask that all heads share."""

    def attend(m, x):
        padding = x[..., 0].detach().cos()
        return m.attention(x, x, x, key_padding_mask=padding, attn_mask=m.mask)[0]

    attention = torch.nn.MultiheadAttention(6, 2, batch_first=True)
    parameters = {"attention": attention, "mask": (POSITIONS, POSITIONS)}
    check_operation(attend, parameters, normal(batch, POSITIONS, 6))


def test_layers_on_the_rows_of_the_only_example():
    """What was moved in front is still its own, as is what has no axis for examples."""

    def function(m, x):
        hidden = m.first(x[0]).view(-1, 1).T
        return m.last(hidden) + m.norm(x[0, 0])[:2]

    parameters = {
        "first": torch.nn.Linear(WIDTH, WIDTH), "norm": torch.nn.LayerNorm(WIDTH),
        "last": torch.nn.Linear(POSITIONS * WIDTH, 2),
    }  # fmt: skip
    check_operation(function, parameters, normal(1, POSITIONS, WIDTH))


PUT_TOGETHER = {
    "where": lambda m, h, x: torch.where(x > 0, h, m.p),
    "cat": lambda m, h, x: torch.cat([m.p.expand(len(h), -1, -1), h], 1),
    "written": lambda m, h, x: torch.zeros_like(h).index_copy(0, torch.arange(len(h)), h) + m.p,
    "assigned": lambda m, h, x: torch.stack([*h]) * m.p,
}


@pytest.mark.parametrize("examples", [1, 3])
@pytest.mark.parametrize("function", PUT_TOGETHER.values(), ids=PUT_TOGETHER)
def test_examples_computed_one_by_one_and_put_together(function, examples):
    """The last batch of a data set may hold a single one."""

    def each(m, x):
        return function(m, torch.stack([functional.linear(row, m.w) for row in x]), x)

    shapes = {"w": (WIDTH, WIDTH), "p": (POSITIONS, WIDTH)}
    check_operation(each, shapes, normal(examples, POSITIONS, WIDTH))


# Rows of one example each, filled up with zeros of the form of the first one's.
FILLED_UP = {
    "behind": lambda row, zero: torch.cat([row, zero.expand(2, -1)]),
    "in front": lambda row, zero: torch.cat([zero[None].repeat(2, 1), row]),
    "a list": lambda row, zero: torch.cat([row, torch.stack([zero] * 2).to(row)]),
    "around": lambda row, zero: torch.stack([zero, *row, zero]),
    "joined": lambda row, zero: torch.vstack([row, zero]),
    "where": lambda row, zero: torch.where(row.detach() > 0, row, zero),
}


@pytest.mark.parametrize("fill", FILLED_UP.values(), ids=FILLED_UP)
def test_rows_of_one_example_filled_up_with_zeros_like_another_ones(fill):
    def function(m, x):
        hidden = m.first(x)
        zero = torch.zeros_like(hidden[0, 0])
        return m.last(torch.stack([fill(row, zero) for row in hidden]))

    parameters = {"first": nn.Linear(WIDTH, WIDTH), "last": nn.Linear(WIDTH, 2)}
    check_operation(function, parameters, normal(BATCH, POSITIONS, WIDTH))


@pytest.mark.parametrize("constant", [False, True])
def test_places_of_one_example_filled_up_with_zeros_like_another_ones(constant):
    """As where a model joins the boxes of patches without words to those of words."""

    def function(m, x):
        places = (x * 3).long().abs()
        table = torch.arange(WIDTH).expand_as(places) if constant else places
        picked = [own[row > 0] for own, row in zip(table[:, 0], x[:, 0], strict=True)]
        zero = torch.zeros_like(places[0, 0, 0])
        filled = [torch.cat([own, zero.repeat(WIDTH - len(own))]) for own in picked]
        return m.table(torch.stack(filled)) * x[:, 0, :, None]

    check_operation(function, {"table": nn.Embedding(20, 3)}, normal(BATCH, POSITIONS, WIDTH))


IN_ITS_PLACE = {
    "skipped": lambda h: [torch.zeros_like(row) if i != 1 else row for i, row in enumerate(h)],
    "between": lambda h: [part for row in h for part in (torch.zeros_like(row), row)],
}


@pytest.mark.parametrize("rows", IN_ITS_PLACE.values(), ids=IN_ITS_PLACE)
def test_zeros_in_the_place_of_the_example_whose_form_they_take(rows):
    def function(m, x):
        return m.last(torch.stack(rows(m.first(x)))).unflatten(0, (len(x), -1))

    parameters = {"first": nn.Linear(WIDTH, WIDTH), "last": nn.Linear(WIDTH, 2)}
    check_operation(function, parameters, normal(BATCH, POSITIONS, WIDTH))


# Rows of examples, in the place of some of which there are zeros of the form of another one's.
REPLACED = {
    "stacked": torch.stack,
    "joined": lambda rows: torch.cat([row[None] for row in rows]),
    "joined along positions": lambda rows: torch.cat(rows).unflatten(0, (len(rows), -1)),
}


@pytest.mark.parametrize("put_together", REPLACED.values(), ids=REPLACED)
@pytest.mark.parametrize("form", [0, BATCH - 1, None])
def test_zeros_in_the_place_of_examples(form, put_together):
    def function(m, x):
        zeros = [torch.zeros_like(x[i if form is None else form]) for i in range(len(x))]
        rows = [row if i % 2 else zeros[i] for i, row in enumerate(x)]
        return m.layer(put_together(rows))

    check_operation(function, {"layer": nn.Linear(WIDTH, 2)}, normal(BATCH, POSITIONS, WIDTH))


@pytest.mark.parametrize("place", [0, BATCH - 1, BATCH])
def test_zeros_beside_all_examples_that_are_cut_away_again(place):
    def function(m, x):
        rows = [*x]
        rows.insert(place, torch.zeros_like(x[0]))
        h = m.layer(torch.stack(rows))
        return torch.cat([h[:place], h[place + 1 :]])

    check_operation(function, {"layer": nn.Linear(WIDTH, 2)}, normal(BATCH, POSITIONS, WIDTH))


@pytest.mark.parametrize("put_together", REPLACED.values(), ids=REPLACED)
@pytest.mark.parametrize("own", [False, True])
def test_zeros_in_the_place_of_all_examples_but_one(own, put_together):
    """They are told from zeros that fill up its rows by the examples whose form they have."""
    torch.manual_seed(0)
    model, x = nn.Linear(WIDTH, 2).double(), torch.randn(BATCH, POSITIONS, WIDTH).double()

    def losses(model, x):
        rows = [row if i == 1 else torch.zeros_like(x[i * own]) for i, row in enumerate(x)]
        weights = torch.arange(1, len(x) + 1)
        return model(put_together(rows)).exp().sum((1, 2)) * weights

    def norms():
        with gs.track(model, batch_size=BATCH) as tracker:
            losses(model, x).mean().backward()
        return tracker.stats

    assert are_right(norms, oracle_sqnorms(model, x, losses), "zeros") == own


# Values that have the form of one example's but hold none.
CONSTANTS = {
    "zeros": torch.zeros_like,
    "ones": torch.ones_like,
    "full": lambda row: torch.full_like(row, 0.3),
    "drawn": lambda row: torch.rand_like(row),
    "times zero": lambda row: row * 0 + 0.3,
    "filled": lambda row: row.clone().fill_(0.3),
    "drawn in place": lambda row: torch.empty_like(row).uniform_(),
}


def _written(x, value, empty):
    rows = empty(x)
    for i, row in enumerate(x):
        rows[i] = value if i == 1 else row
    return rows


def _copied(x, value):
    rows = x.clone()
    rows[1].copy_(value)
    return rows


# Constants in the place of the second example, or joined to each.
PLACES = {
    "stacked": lambda x, value: torch.stack([value if i == 1 else row for i, row in enumerate(x)]),
    "joined": lambda x, value: torch.cat([x[:1], value[None], *x[2:].split(1)]),
    "written": lambda x, value: _written(x, value, torch.clone),
    "written to zeros": lambda x, value: _written(x, value, lambda x: torch.zeros(x.shape).to(x)),
    "written to zeros of the batch": lambda x, value: _written(x, value, torch.zeros_like),
    "copied": _copied,
    "by numbers": lambda x, value: x.index_copy(0, torch.tensor([1]), value[None]),
    "appended": lambda x, value: [torch.cat([row, value]) for row in x],
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("constant", CONSTANTS.values(), ids=CONSTANTS)
@pytest.mark.parametrize("form", [0, BATCH - 1])
def test_constants_of_the_form_of_another_example_under_one_loss(form, constant, place):
    torch.manual_seed(0)
    model, x = nn.Linear(WIDTH, 2).double(), torch.randn(BATCH, POSITIONS, WIDTH).double()

    def losses(model, x):
        torch.manual_seed(1)
        rows = place(x, constant(x[form]))
        if isinstance(rows, list):
            return torch.stack([model(row).exp().mean() for row in rows])
        return (model(rows).exp() * x[..., :2]).sum((1, 2))

    with gs.track(model, batch_size=BATCH) as tracker:
        losses(model, x).mean().backward()
    assert_sqnorms(tracker.stats, oracle_on_the_batch(model, x, losses), rtol=1e-8)


@pytest.mark.parametrize("form", [0, 1])
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize(
    "join",
    [lambda rows: torch.stack(rows), lambda rows: torch.cat([row[None] for row in rows])],
)
def test_constants_beside_the_rows_of_one_of_two_examples(join, place, form):
    """They may be in the other one's place, or fill up the one's rows: a loss of all is refused."""
    model, x = nn.Linear(WIDTH, 2).double(), torch.randn(2, POSITIONS, WIDTH).double()

    def losses(model, x):
        rows = list(x)
        rows[place] = torch.ones_like(x[form])
        return model(join(rows)).exp().mean((1, 2))

    def of_one_loss():
        with gs.track(model, batch_size=2) as tracker:
            losses(model, x).mean().backward()
        return tracker.stats

    expected = oracle_on_the_batch(model, x, losses)
    assert are_right(of_one_loss, expected, "ones") == (form == place == 1)
    if form == place:
        assert_sqnorms(gs.per_example_norms(model, x, losses), expected, rtol=1e-8)


@pytest.mark.parametrize("terms", [lambda h: h.new_zeros(3), lambda h: torch.zeros(3).double()])
@pytest.mark.parametrize("scaled", [False, True])
def test_several_losses_of_each_example_in_one_tensor(scaled, terms):
    """In a loop over the examples, as in detection: each tensor holds those of one of them."""

    def losses(model, x):
        every = []
        for h in model(x):
            kept = terms(h)
            kept[0] += h.square().sum()
            kept[1] += h.sin().sum()
            if scaled:
                kept[0] *= 3
                kept[1].div_(2)
                kept /= POSITIONS
            every.append(kept.sum())
        return torch.stack(every)

    model, x = nn.Linear(WIDTH, 2).double(), torch.randn(BATCH, POSITIONS, WIDTH).double()
    check_model(model, x, losses)
    with gs.track(model, batch_size=BATCH) as tracker:
        losses(model, x).mean().backward()
    assert_sqnorms(tracker.stats, oracle_sqnorms(model, x, losses), rtol=1e-8)


@pytest.mark.parametrize("batch", [2, 3])
def test_constants_before_the_rows_of_each_example(batch):
    """Of two examples, such a row of the first's form may be in the first one's place instead."""
    model, x = nn.Linear(WIDTH, 2).double(), torch.randn(batch, POSITIONS, WIDTH).double()

    def losses(model, x):
        first = torch.ones_like(x[0, :1])
        return torch.stack([model(torch.cat([first, row])).exp().mean() for row in x])

    def of_one_loss():
        with gs.track(model, batch_size=batch) as tracker:
            losses(model, x).mean().backward()
        return tracker.stats

    assert are_right(of_one_loss, oracle_sqnorms(model, x, losses), "ones") == (batch > 2)
    model.zero_grad()
    check_model(model, x, losses)


# Operations that take for rows what are positions of the only example, or its features.
ON_OTHER_AXES = {
    "linear": (lambda m, x: m.linear(x.mT[0, :, :1]), {"linear": nn.Linear(1, 2)}),
    "linear on columns": (lambda m, x: m.linear(x[:, 0].T), {"linear": nn.Linear(1, 2)}),
    "product with columns": (lambda m, x: x[:, 0].T @ m.w, {"w": (1, 3)}),
    "convolution": (
        lambda m, x: m.layer(x.transpose(0, 1)),
        {"layer": nn.Conv1d(1, 2, 3, padding=1)},
    ),
    "recurrence": (
        lambda m, x: m.layer(x)[0].cos(),
        {"layer": nn.GRU(WIDTH, 3)},
    ),
    "norm of columns": (lambda m, x: m.layer(x[:, 0].T + x[:, 0]), {"layer": nn.LayerNorm(WIDTH)}),
    "norm of channels": (lambda m, x: m.layer(x.transpose(0, 1)), {"layer": nn.GroupNorm(1, 1)}),
    "scale": (lambda m, x: functional.prelu(x.transpose(0, 1), m.w), {"w": (1,)}),
}


@pytest.mark.parametrize(("function", "parameters"), ON_OTHER_AXES.values(), ids=ON_OTHER_AXES)
def test_the_only_example_lies_along_every_axis(function, parameters):
    check_operation(
        lambda m, x: function(m, x.sin()).reshape(1, -1), parameters, normal(1, POSITIONS, WIDTH)
    )


@pytest.mark.parametrize(
    "back",
    [
        lambda value: value.unsqueeze(0),
        lambda value: value.view(1),
        lambda value: value.expand(2).sum()[None],
        lambda value: torch.atleast_1d(value.movedim(0, -1)),
    ],
)
def test_a_single_number_gets_its_axis_back(back):
    def loss_fn(model, x):
        return back(model(x).sin().squeeze())

    check_model(nn.Linear(3, 1).double(), torch.randn(1, 3).double(), loss_fn)
