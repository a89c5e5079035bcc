"""Tensors that data are written into: what is written says where their examples lie."""

from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional

import gradstats as gs
from tests.oracle import assert_sqnorms, check_model, oracle_on_the_batch, oracle_sqnorms
from tests.rules.operation import check_operation, check_refused, normal

BATCH, WIDTH = 3, 4
ORDER = torch.tensor([2, 0, 1])
ROWS = ORDER.view(-1, 1, 1)


def empty(x, *shape):
    """Return memory that holds nothing of any example."""
    return torch.zeros(shape, dtype=x.dtype)


def by_position(h):
    out = empty(h, *h.shape)
    for position in range(h.shape[1]):
        out[:, position] = h[:, position]
    return out


def by_two_indices(h):
    out = empty(h, *h.transpose(0, 1).shape)
    out[torch.arange(h.shape[1])[:, None], torch.arange(BATCH)] = h.transpose(0, 1)
    return out.transpose(0, 1)


def time_major(h):
    out = empty(h, *h.transpose(0, 1).shape)
    for position in range(h.shape[1]):
        out[position] = h[:, position]
    return out.transpose(0, 1)


def one_by_one(h):
    out = torch.empty_like(h)
    for example in range(len(h)):
        out[example] = h[example].softmax(-1)
    return out


def through_a_view(h):
    out = empty(h, *h.shape)
    out[:, :1].copy_(h[:, :1])
    out[:, 1:] += h[:, 1:]
    return out


def by_mask(h):
    out, mask = empty(h, *h.shape), h.detach().flatten(1).sum(1) > 0
    out[mask] = 2 * h[mask]
    out[~mask] = h[~mask].tanh()
    return out


def put_back(h):
    """Rows in another order, worked on and put back into what has their form."""
    rows = h.flatten(0, -2)
    order = rows.detach().sum(1).argsort()
    moved = rows[order].sin()
    out, back = torch.zeros_like(moved), torch.empty_like(moved)
    back[order] = moved
    out.index_copy_(0, order, moved)
    return (out + back).view(h.shape)


def other_rows(h):
    """What has the form of data takes up rows in any order, and axes that are exchanged."""
    order = torch.arange(len(h)).flip(0)
    rows, exchanged = torch.zeros_like(h), torch.empty_like(h.transpose(0, 1).contiguous())
    rows.copy_(h[order])
    exchanged.copy_(h.transpose(0, 1))
    return rows[order] + exchanged.transpose(0, 1)


def rows_added(h):
    rows, chosen = h.flatten(0, -2), torch.tensor([2, 0, 2])
    out = empty(h, *rows.shape).index_add_(0, chosen, rows[chosen])
    return out.index_add(0, torch.tensor([1]), rows[[1]]).view(h.shape)


def grouped(h):
    """Rows in groups, each group's results written behind the last one's, then put back."""
    rows = h.flatten(0, -2)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    rows = rows[order]
    out, back = torch.empty_like(rows), empty(h, *rows.shape)
    for first in range(0, len(rows), 2):
        out[first : first + 2] = rows[first : first + 2].sin() * (first + 1)
    back[order] = out
    return (back + out[order.argsort()]).view(h.shape)


def in_another_order(h):
    """The rows of the first pieces happen to lie where the batch has them."""
    order, out = [0, 2, 1], torch.zeros_like(h)
    for place, example in enumerate(order):
        out[place, :1], out[place, 1:] = h[example, :1], h[example, 1:]
    return out[order]


def some_in_their_places(h):
    out = empty(h, *h.shape)
    out[[1, 0]] = h[:2]
    out[2:] = h[2:]
    return out[[1, 0, 2]]


def copied_while_it_fills(h):
    out = empty(h, *h.shape).index_put((ORDER[:2],), h[:2])
    first, other = (out.index_put((ORDER[2:],), rows) for rows in (h[2:], h[2:].exp()))
    return first[ORDER] * other[ORDER]


def scaled_while_it_fills(h):
    out = empty(h, *h.shape)
    out[:2] = h[:2]
    out.mul_(h.exp())
    out[2:] = h[2:]
    return out


def by_no_index(h):
    out = empty(h, *h.shape)
    out[()] = h
    return out


def without_columns(h):
    out = empty(h, *h.shape[:2], 0)
    out[..., :0].copy_(h[..., :0])
    return torch.cat([out, h], 2)


def moved(h, change):
    out = h.detach().clone()
    change(out)
    return out


def shifted(out, h):
    for example in range(BATCH):
        out[(example + 1) % BATCH] = h[example]


def written_over_itself(h):
    out = h.sin()
    out[ORDER] = out.clone()
    return out


def overwritten(h):
    out = empty(h, *h.shape)
    out[ORDER] = h
    out[:] = h[[1, 0, 2]]
    return out


def through_another_view(h):
    out = empty(h, *h.shape)
    out.view(h.shape).index_copy_(0, ORDER, h)
    return out[ORDER]


def one_by_one_through_views(h):
    out, other = empty(h, *h.shape), h.clone()
    for place, example in enumerate(ORDER):
        out[place].copy_(h[example])
        other[place].copy_(h[example])
    return (out * other)[ORDER.argsort()]


FOLLOWED = {
    "grouped": grouped,
    "in another order": in_another_order,
    "columns in another order": lambda h: (
        empty(h, *h.transpose(0, 1).shape)
        .index_copy(1, ORDER, h.transpose(0, 1))[:, ORDER]
        .transpose(0, 1)
    ),
    "some in their places": some_in_their_places,
    "copied while it fills": copied_while_it_fills,
    "scaled while it fills": scaled_while_it_fills,
    "by no index": by_no_index,
    "without columns": without_columns,
    "a column filled by name": lambda h: h.index_fill(1, torch.tensor([0]), value=0.5),
    "a vector scattered": lambda h: (
        empty(h, BATCH).scatter(0, ORDER, h.sum((1, 2)))[ORDER, None, None] * h
    ),
    "rows added in another order": lambda h: empty(h, *h.shape).index_add(0, ORDER, h)[ORDER],
    "rows scattered": lambda h: empty(h, *h.shape).scatter(0, ROWS.expand_as(h), h)[ORDER],
    "by position": by_position,
    "time major": time_major,
    "by two indices": by_two_indices,
    "one by one": one_by_one,
    "all at once": lambda h: empty(h, *h.shape).copy_(h),
    "through a view": through_a_view,
    "by mask": by_mask,
    "put back": put_back,
    "other rows": other_rows,
    "rows added": rows_added,
    "rows copied": lambda h: torch.zeros_like(h).index_copy_(0, ORDER, h[ORDER]),
    "scattered along positions": lambda h: empty(h, *h.shape).scatter(
        1, torch.ones_like(h, dtype=torch.long), h
    ),
    "put": lambda h: empty(h, *h.shape).index_put_((ORDER,), h[ORDER]),
    "elements where a mask is true": lambda h: h.masked_scatter(
        torch.tensor([[True], [False], [True]]).expand_as(h[..., 0])[..., None].expand_as(h),
        h.exp()[[0, 2]].flatten(0, -2),
    ),
    "moved in place": lambda h: h.clone().transpose_(0, 1).contiguous().transpose(0, 1),
    "rows added by name": lambda h: torch.zeros_like(h).index_add_(
        dim=0, index=torch.arange(BATCH), source=h
    ),
    "put by name": lambda h: empty(h, *h.shape).index_put(indices=(ORDER,), values=h[ORDER]),
    "a new axis in place": lambda h: h.clone().unsqueeze_(1).transpose_(0, 2)[:, 0].transpose(0, 1),
    "scattered rows": lambda h: empty(h, *h.shape).scatter_add_(
        0, torch.arange(BATCH).view(-1, 1, 1).expand_as(h), h
    ),
    "pooled": lambda h: (
        empty(h, BATCH, WIDTH).scatter_add_(
            0,
            torch.arange(len(h)).repeat_interleave(h.shape[1])[:, None].expand(-1, WIDTH),
            h.flatten(0, 1),
        )[:, None]
        + h
    ),
    "joined to nothing": lambda h: torch.cat([h[:0].detach(), empty(h, 0, *h.shape[1:]), h]),
    "reversed twice": lambda h: reversed(torch.stack(list(reversed(h)))),
    "stacked one by one": lambda h: torch.stack([row.softmax(-1) for row in h]),
    "rows moved": lambda h: moved(h, lambda out: out.copy_(h[ORDER]))[ORDER.argsort()],
    "rows assigned": lambda h: moved(h, lambda out: out.__setitem__(ORDER, h))[ORDER],
    "some rows copied": lambda h: moved(h, lambda out: out.index_copy_(0, ORDER, h))[ORDER],
    "rows scattered over others": lambda h: moved(
        h, lambda out: out.scatter_(0, ROWS.expand_as(h), h)
    )[ORDER],
    "rows scattered into a copy": lambda h: h.scatter(0, ROWS.expand_as(h), h)[ORDER],
    "rows moved one by one": lambda h: moved(h, partial(shifted, h=h))[[1, 2, 0]],
    "rows moved in what is trained": lambda h: written_over_itself(h)[ORDER],
    "axes exchanged": lambda h: moved(h, lambda out: out.copy_(h.transpose(0, 1))).transpose(0, 1),
    "written over": lambda h: overwritten(h)[[1, 0, 2]],
    "rows moved through a view": through_another_view,
    "rows moved one by one through views": one_by_one_through_views,
    "lists into a constant": lambda h: torch._foreach_add_([empty(h, *h.shape)], [h[ORDER]])[0][
        ORDER.argsort()
    ],
    "chosen one by one": lambda h: torch.cat([h.select(0, i)[None] for i in range(BATCH)]),
}


# Where shape alone tells, as the whole of what a view belongs to.
BY_SHAPE = ("through a view",)


@pytest.mark.parametrize("name", FOLLOWED)
def test_writes_that_are_followed(name):
    """With as many positions as examples, unless shape has to tell."""
    write, positions = FOLLOWED[name], 2 if name in BY_SHAPE else BATCH

    def function(m, x):
        return m.second(write(torch.tanh(m.first(x)))) + x

    parameters = {"first": nn.Linear(WIDTH, WIDTH), "second": nn.Linear(WIDTH, WIDTH)}
    check_operation(function, parameters, normal(BATCH, positions, WIDTH))


def of_data(m, x):
    """The steps of packed sequences, which are longer in the first examples."""
    filled, start = torch.zeros(6, WIDTH).to(x), torch.tensor(0)
    for size in torch.tensor([3, 2, 1]):
        filled[start : start + size] = m.first(x[:size, 0]) * size
        start += size
    padded, _ = nn.utils.rnn.pad_packed_sequence(
        nn.utils.rnn.PackedSequence(filled, torch.tensor([3, 2, 1])), batch_first=True
    )
    return m.second(padded.sum(1).tanh())


def of_weights(m, x):
    filled, start = torch.zeros(WIDTH, WIDTH).to(x), torch.tensor(0)
    for size in torch.tensor([1, WIDTH - 1]):
        filled[start : start + size] = m.first.weight[start : start + size] * size
        start += size
    return m.second((x[:, 0] @ filled.T).tanh())


@pytest.mark.parametrize("function", [of_data, of_weights])
def test_slices_whose_start_moves_on(function):
    """In place, after they were written."""
    parameters = {"first": nn.Linear(WIDTH, WIDTH, bias=False), "second": nn.Linear(WIDTH, WIDTH)}
    check_operation(function, parameters, normal(BATCH, 2, WIDTH))


def test_layers_on_one_example_after_the_other():
    """Of different lengths, as loops over a batch have them."""

    def function(m, x):
        rows = [m.first(row[: n + 1]).tanh().mean(0, keepdim=True) for n, row in enumerate(x)]
        return m.second(torch.cat(rows))

    parameters = {"first": nn.Linear(WIDTH, WIDTH), "second": nn.Linear(WIDTH, WIDTH)}
    check_operation(function, parameters, normal(BATCH, 5, WIDTH))


def in_place(change):
    def moved(h):
        out = h.detach().clone()
        change(out, h)
        return out

    return moved


INDEX = ORDER[:, None].expand(BATCH, WIDTH)


def filled(fill):
    def moved(h):
        out = empty(h, *h.shape)
        fill(out, h)
        return out

    return moved


def another_copy(h):
    begun = empty(h, *h.shape).index_put((ORDER[:1],), h[:1])
    begun.index_put((ORDER[1:],), h[1:])
    return begun.index_put((ORDER[2:],), h[2:])


def put(out, place, rows):
    out[place : place + len(rows)] = rows


def emptied(out, h):
    out[ORDER[:2]] = h[:2]
    out.zero_()
    out[ORDER[2:]] = h[2:]
    out[ORDER[2:]] = h[2:]


def raised(function):
    """Return a move of rows, made by an operation that lets each be no smaller than another's."""

    def move(h):
        out = h.clone()
        function(out, h[ORDER] + 3)
        return out

    return move


# Rows that are not all written: the others are supposed to be those of neighbours.
NOT_ALL = {
    "not all rows": lambda h: empty(h, *h.shape).index_add(0, ORDER[:2], h[:2]),
    "one row three times": filled(lambda out, h: [put(out, 1, h[:1]) for _ in h]),
    "scattered from more rows": lambda h: empty(h, *h.shape).scatter(0, INDEX[:2], h),
    "a copy that is not full": another_copy,
}

# Rows that other examples' are added to, or that are replaced unseen.
LOST = {
    "index_add_": in_place(lambda out, h: out.index_add_(0, ORDER, h)),
    "two in one row": lambda h: empty(h, *h.shape).index_add(
        0, torch.tensor([0, 1, 2, 2]), h[[1, 0, 2, 1]]
    ),
    "its own and another's added to one row": lambda h: h.index_add(
        0, torch.tensor([0, 0]), h[[1, 0]]
    ),
    "emptied in between": filled(emptied),
    "torch.clamp_": raised(lambda out, h: torch.clamp_(out, min=h)),
    "torch.xlogy_": raised(lambda out, h: torch.xlogy_(out, h.exp())),
    "lists": raised(lambda out, h: torch._foreach_add_([out], [h])),
    "an operator": raised(torch.ops.aten.add_),
    "an overload": raised(torch.ops.aten.add_.Tensor),
    "an overload of lists": raised(lambda out, h: torch.ops.aten._foreach_add_.List([out], [h])),
}
if hasattr(torch, "foreach"):
    LOST["public lists"] = raised(lambda out, h: torch.foreach.add_([out], [h]))


@pytest.mark.parametrize("empty_before", [True, False])
def test_one_example_written_into_the_places_of_all_through_views_is_refused(empty_before):
    def function(m, x):
        h = m.first(x)
        out = empty(h, *h.shape) if empty_before else h.clone()
        for place in range(BATCH):
            out[place].copy_(h[0])
        return m.last(out)

    check_refused(
        function,
        {"first": nn.Linear(WIDTH, WIDTH), "last": nn.Linear(WIDTH, 2)},
        normal(BATCH, WIDTH),
        error=gs.ExampleAxisError,
        match="expected one loss for each|linear.*'last.weight'",
    )


def check_lost(move, match):
    """Expect that whose the rows are is lost where hidden values (B, d) are moved."""
    check_refused(
        lambda m, x: m.second(move(m.first(x)))[ORDER],
        {"first": nn.Linear(WIDTH, WIDTH), "second": nn.Linear(WIDTH, WIDTH)},
        normal(BATCH, WIDTH),
        error=gs.ExampleAxisError,
        match=match,
    )


@pytest.mark.parametrize("move", LOST.values(), ids=LOST)
def test_rows_written_elsewhere_are_refused(move):
    check_lost(move, "'second.weight'")


@pytest.mark.parametrize("move", NOT_ALL.values(), ids=NOT_ALL)
def test_losses_of_rows_that_are_not_all_written_are_refused(move):
    check_lost(move, "expected one loss for each")


@pytest.mark.parametrize(
    "add",
    [
        lambda h, to: torch.zeros_like(h).index_add(0, to, h),
        lambda h, to: torch.zeros_like(h).index_add_(0, to, h),
        lambda h, to: torch.zeros_like(h).scatter_add(0, to[:, None].expand(-1, WIDTH), h),
    ],
)
def test_the_operation_that_adds_rows_of_several_examples_is_named(add):
    """As the nodes of one graph pass messages."""
    to = torch.tensor([0, 0, 1])
    check_lost(
        lambda h: add(h, to),
        r"(?s)'second.weight'.*lost at Tensor\.(index|scatter)_add_?, or rows of several meet",
    )


@pytest.mark.parametrize(
    "change",
    [
        torch.exp_, functional.selu_, nn.ReLU(inplace=True), torch.ops.aten.exp_,
        torch.ops.aten.exp_.default,
    ],
    ids=["torch.exp_", "functional.selu_", "relu", "an operator", "an overload"],
)  # fmt: skip
def test_data_changed_in_place_element_by_element(change):
    def function(m, x):
        h = m.first(x)
        change(h)
        return m.second(h)

    parameters = {"first": nn.Linear(WIDTH, WIDTH), "second": nn.Linear(WIDTH, WIDTH)}
    check_operation(function, parameters, normal(BATCH, WIDTH))


def transposed_sum(h):
    out = h.detach().clone()
    out += h.transpose(0, 1)
    return out


def strided(h):
    """Return as many rows of fewer elements, which belong to other examples."""
    return h.clone().as_strided_((BATCH, 2, WIDTH), (2 * WIDTH, WIDTH, 1)).transpose(0, 1)


@pytest.mark.parametrize(
    "move",
    [
        lambda h: h.clone()[None].squeeze_().transpose(0, 1),
        transposed_sum,
        strided,
        lambda h: strided(h.detach()),
    ],
    ids=["squeeze_", "sum", "as_strided_", "as_strided_ of what is not trained"],
)
def test_axes_exchanged_by_writing_are_refused(move):
    """With as many positions as examples shape does not tell."""
    check_refused(
        lambda m, x: m.second(move(m.first(x))).transpose(0, 1),
        {"first": nn.Linear(WIDTH, WIDTH), "second": nn.Linear(WIDTH, WIDTH)},
        normal(BATCH, BATCH, WIDTH),
        error=gs.ExampleAxisError,
        match="'second.weight'",
    )


@pytest.mark.parametrize(
    "change",
    [lambda x: x.squeeze_(1), lambda x: x.resize_(BATCH, WIDTH)],
    ids=["squeeze_", "resize_"],
)
def test_inputs_given_another_form_in_place(change):
    check_operation(
        lambda m, x: m.layer(change(x.clone())),
        {"layer": nn.Linear(WIDTH, 2)},
        normal(BATCH, 1, WIDTH),
        gradient_of_data=False,
    )


def test_positions_of_one_example_without_an_axis_are_not_the_examples():
    check_refused(
        lambda m, x: torch.stack([m.layer(row[None].squeeze_(0)).sin().sum(0) for row in x]),
        {"layer": nn.Linear(WIDTH, 2)},
        normal(BATCH, BATCH, WIDTH),
        error=gs.ExampleAxisError,
        match="linear.*'layer.weight'",
    )


def test_axes_exchanged_by_giving_other_values():
    def function(m, x):
        h = x.clone()
        h.data = h.data.transpose(0, 1)
        return m.second(h).transpose(0, 1)

    data = normal(BATCH, BATCH, WIDTH)
    check_operation(function, {"second": nn.Linear(WIDTH, WIDTH)}, data, gradient_of_data=False)


def test_axes_exchanged_by_writing_through_views():
    def function(m, x):
        h = m.first(x)
        out = empty(h, *h.shape)
        for position in range(len(h)):
            out[position].copy_(h[:, position])
        return m.second(out).transpose(0, 1)

    parameters = {"first": nn.Linear(WIDTH, WIDTH), "second": nn.Linear(WIDTH, WIDTH)}
    check_operation(function, parameters, normal(BATCH, BATCH, WIDTH))


class Cached(nn.Module):
    """Writes into memory that it keeps, as caches of keys do."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("cache", torch.zeros(BATCH, 5, WIDTH))

    def forward(self, x):
        self.cache.detach_()
        self.cache[:, :2] = self.first(x)
        return functional.gelu(self.second(self.cache))


def test_a_buffer_of_the_model_that_data_are_written_into():
    """Within a context it holds data, and in the next it is the model's."""
    torch.manual_seed(0)
    model, x = Cached().double(), normal(BATCH, 2, WIDTH)

    def losses(m, x):
        return m(x).square().sum((1, 2))

    expected = oracle_on_the_batch(model, x, losses)
    for _ in range(2):
        assert_sqnorms(gs.per_example_norms(model, x, losses), expected, 1e-12)
        with gs.track(model, batch_size=BATCH) as tracker:
            tracker.backward(losses(model, x))
        assert_sqnorms(tracker.stats, expected, 1e-12)


def test_elements_of_a_vector_written_where_a_mask_is_true():
    """One number for each example."""
    check_operation(
        lambda m, x: (x @ m.w).masked_scatter(
            torch.tensor([True, False, True]), (x @ m.w).exp()[[0, 2]]
        ) * m.scale,
        {"w": (WIDTH,), "scale": (1,)},
        normal(BATCH, WIDTH),
    )  # fmt: skip


@pytest.mark.parametrize("first", [True, False])
def test_a_mask_that_is_true_nowhere(first):
    """A batch without any token of one kind, each kind with a layer of its own."""

    def function(m, x):
        hidden = m.mixer(x).tanh()
        mask = torch.full((BATCH, 5, 1), first)
        for kind, layer in ((mask, m.first), (~mask, m.second)):
            hidden = hidden.masked_scatter(kind, layer(hidden[kind[..., 0]]))
        return m.mixer(hidden)

    parameters = {name: nn.Linear(WIDTH, WIDTH) for name in ("mixer", "first", "second")}
    check_operation(function, parameters, normal(BATCH, 5, WIDTH))


def test_elements_that_fall_on_other_examples_are_refused():
    def shifted(m, x):
        hidden = x @ m.w
        return hidden.masked_scatter(torch.tensor([False, True, True]), hidden) * m.scale

    def widened(m, x):
        hidden = x @ m.w
        mask = torch.ones(2, BATCH, dtype=torch.bool)
        return (hidden.masked_scatter(mask, hidden.repeat(2)) * m.scale).sum(0)

    for function in (shifted, widened):
        check_refused(
            function, {"w": (WIDTH,), "scale": (1,)}, normal(BATCH, WIDTH),
            error=gs.GradStatsError, match="axis|examples",
        )  # fmt: skip


def added_elsewhere(m, x):
    hidden = x * m.w
    places = (7 * hidden.detach().abs()).long() % 2
    return x.reshape(2, BATCH, WIDTH).scatter_add(0, places, hidden).transpose(0, 1)


def scaled_in_a_table(m, x):
    table = (x + x.unsqueeze(1)).expand(2, -1, -1, -1, -1).clone()
    table[0].mul_(m.w)
    return table.movedim(2, 0)


@pytest.mark.parametrize("function", [added_elsewhere, scaled_in_a_table])
def test_trained_values_written_into_inputs_whose_order_nobody_knows(function):
    check_refused(
        function,
        {"w": (WIDTH,)},
        normal(BATCH, 2, WIDTH),
        error=gs.ExampleAxisError,
        match="example",
    )


def assigned(m, x, states):
    states[0] = m.first(x)


def scaled(m, x, states):
    states[0].mul_(m.scale)


@pytest.mark.parametrize("write", [assigned, scaled])
def test_trained_values_written_into_inputs_with_the_examples_elsewhere(write):
    """As in states of recurrent layers: the view's axis says which is the whole's."""

    def function(m, x, states):
        states = states.clone()
        write(m, x, states)
        return m.last(states.permute(2, 0, 1)).transpose(0, 2)

    parameters = {
        "first": nn.Linear(WIDTH, BATCH), "scale": (BATCH,), "last": nn.Linear(BATCH, BATCH),
    }  # fmt: skip
    check_refused(
        function, parameters, normal(BATCH, WIDTH), normal(2, BATCH, BATCH),
        error=gs.ExampleAxisError, match="'last.weight'",
    )  # fmt: skip


def test_nothing_written_into_what_has_no_elements():
    """As where no token is of one kind."""

    def function(m, x):
        h = m.first(x)
        rows, none = empty(h, 0, WIDTH), torch.zeros(0, dtype=torch.long)
        rows[:] = h[0, :0]
        rows[none] = h[1, none]
        rows.view(0, 2, 2).copy_(h[2, :0].view(0, 2, 2))
        return m.last(torch.cat([h, rows.expand(BATCH, 0, WIDTH)], 1))

    parameters = {"first": nn.Linear(WIDTH, WIDTH), "last": nn.Linear(WIDTH, 2)}
    check_operation(function, parameters, normal(BATCH, 2, WIDTH))


def test_masks_made_by_vmap_after_a_write():
    """As models make masks of a function of positions; what vmap shows has no memory to ask for."""

    def function(m, x):
        buffer = torch.zeros(BATCH, 5 + 1, WIDTH, dtype=x.dtype)
        buffer[:, 1:] = x
        keep = x[..., 0] > 0
        rows, places = torch.arange(BATCH), torch.arange(5)
        of_row = lambda row: torch.vmap(lambda place: keep[row, place])(places)  # noqa: E731
        mask = torch.vmap(of_row)(rows)
        return m.layer(x) * mask[..., None] + buffer[:, 1:].sum(-1, keepdim=True) * m.scale

    parameters = {"layer": nn.Linear(WIDTH, 2), "scale": (2,)}
    check_operation(function, parameters, normal(BATCH, 5, WIDTH), gradient_of_data=False)


def test_the_form_of_data_in_inference_mode():
    def function(m, x):
        with torch.inference_mode():
            first = torch.zeros_like(x)
            first[:, 0] = x.detach()[:, 0]
        return m.layer(x + first.clone())

    check_operation(function, {"layer": nn.Linear(WIDTH, 2)}, normal(BATCH, WIDTH))


def test_numbers_at_places_that_the_batch_names():
    """As many as there are examples, in another order: by contract each row is one example."""

    def function(m, x, order):
        kept = torch.zeros(BATCH).double()
        kept[order] = 0.5
        return m.layer(x) * kept[:, None, None] + m.shift * kept[:, None, None]

    parameters = {"layer": nn.Linear(WIDTH, 2), "shift": (2,)}
    check_operation(function, parameters, normal(BATCH, 4, WIDTH), torch.randperm(BATCH))


@pytest.mark.parametrize("slots", [BATCH, 5])
def test_values_of_one_example_at_places_that_an_index_names(slots):
    """Targets as detectors make them: the classes found for some slots, no class for the others."""

    def loss_fn(model, batch):
        losses = []
        for example, classes, matched in zip(model(*batch), *batch[1:], strict=True):
            targets = torch.full((slots,), WIDTH - 1)
            targets[matched] = classes
            losses.append(functional.cross_entropy(example, targets))
        return torch.stack(losses)

    classes = torch.randint(WIDTH, (BATCH, 2))
    matched = torch.stack([torch.randperm(slots)[:2] for _ in range(BATCH)])
    check_operation(
        lambda m, x, classes, matched: x @ m.w,
        {"w": (WIDTH, WIDTH)},
        normal(BATCH, slots, WIDTH),
        classes,
        matched,
        loss_fn=loss_fn,
    )


@pytest.mark.parametrize("missing", [[], [3]], ids=["all", "all but one"])
@pytest.mark.parametrize("read", [[1, 0, 2], [1, 3, 2]], ids=str)
def test_values_of_several_examples_at_places_that_an_index_names(missing, read):
    """Rows that nothing was written to are nobody's, whatever the others are."""

    def function(m, x):
        out = torch.zeros(5, WIDTH).double()
        for example, places in enumerate(([4, 1], [0, 3], [2])):
            places = [place for place in places if place not in missing]
            out[torch.tensor(places)] = (x[example] @ m.w)[: len(places)]
        return out[read]

    if 3 in missing and 3 in read:
        check_refused(
            function, {"w": (WIDTH, WIDTH)}, normal(BATCH, 2, WIDTH), error=gs.ExampleAxisError,
            match="lost",
        )  # fmt: skip
    else:
        check_operation(function, {"w": (WIDTH, WIDTH)}, normal(BATCH, 2, WIDTH))


def test_parts_of_other_inputs_written_into_each():
    """CutMix: as in sums of inputs of different examples, those written into decide."""

    def function(m, x):
        mixed = x.clone()
        mixed[:, 1:] = mixed[ORDER, 1:]
        return m.last(m.first(mixed).sin())

    parameters = {"first": nn.Linear(WIDTH, WIDTH), "last": nn.Linear(WIDTH, 2)}
    check_operation(function, parameters, normal(BATCH, 3, WIDTH), gradient_of_data=False)


@pytest.mark.parametrize("moved", [lambda x: x.flip(0), lambda x: x.roll(1, 0), lambda x: x[ORDER]])
def test_other_inputs_added_to_each_in_place(moved):
    """Mixup: as in sums of inputs of different examples, those added to decide."""

    def function(m, x):
        others = moved(x).mul_(0.3)
        mixed = x.clone().mul_(0.7).add_(others)
        mixed -= 0.1 * others
        mixed.scatter_reduce_(0, torch.arange(BATCH).view(-1, 1, 1).expand_as(x), others, "amax")
        return m.last(m.first(mixed).sin())

    parameters = {"first": nn.Linear(WIDTH, WIDTH), "last": nn.Linear(WIDTH, 2)}
    check_operation(function, parameters, normal(BATCH, 3, WIDTH), gradient_of_data=False)


# What loops write into a copy of inputs, of one example and the next.
INTO_ROWS = {
    "a mixture": lambda out, x, i, j: out.__setitem__(i, out[i] * 0.7 + x[j] * 0.3),
    "a mixture of slices": lambda out, x, i, j: out.__setitem__(
        slice(i, i + 1), out[i : i + 1] * 0.7 + x[j : j + 1] * 0.3
    ),
    "added": lambda out, x, i, j: out[i].mul_(0.7).add_(x[j] * 0.3),
    "chosen": lambda out, x, i, j: out.__setitem__(i, torch.where(x[j] > 0, out[i], x[j])),
    "columns": lambda out, x, i, j: out[i].__setitem__((slice(None), 0), x[j][:, 0]),
    "columns of slices": lambda out, x, i, j: out[i : i + 1].__setitem__(
        (..., slice(1, 3)), x[j : j + 1, :, 1:3]
    ),
    "positions": lambda out, x, i, j: out[i].__setitem__(slice(1, None), x[j][1:]),
    "positions copied": lambda out, x, i, j: out[i][1:].copy_(x[j][1:]),
    "one position": lambda out, x, i, j: out.__setitem__((i, 0), x[j, 0]),
    "positions of all": lambda out, x, i, j: out.__setitem__((i, 0), x.mean(0)[0]),
}


@pytest.mark.parametrize("write", INTO_ROWS.values(), ids=INTO_ROWS)
@pytest.mark.parametrize("positions", [2, BATCH])
def test_other_inputs_written_into_one_row_at_a_time(write, positions):
    """Mixup and CutMix by loops: the row of the batch that is written into decides."""

    def loss_fn(model, x):
        out = x.clone()
        for example in range(BATCH):
            write(out, x, example, (example + 1) % BATCH)
        return torch.stack([model(row).sin().sum() for row in out])

    check_model(nn.Linear(WIDTH, 2).double(), normal(BATCH, positions, WIDTH), loss_fn)


def test_mixtures_written_into_rows_of_nothing_are_refused():
    """Of as many positions as examples, the rows may be one example's."""

    def loss(model, x, i):
        out = torch.zeros_like(x[i])
        for place in range(BATCH):
            out[place] = x[i, place] * 0.7 + x[i - 1, place] * 0.3
        return model(out).sin().sum()

    model, x = nn.Linear(WIDTH, 2), normal(BATCH, BATCH, WIDTH).float()
    with pytest.raises(gs.ExampleAxisError, match="which example each row"):
        with gs.track(model, batch_size=BATCH):
            sum(loss(model, x, i) for i in range(BATCH)).backward()


# Ways to write a part of h (B, 3, d), or all of it, into inputs of that shape.
INTO_INPUTS = {
    "index_add": lambda x, h: torch.index_add(x, 1, torch.arange(3), h),
    "index_add along the examples": lambda x, h: x.index_add(0, torch.arange(BATCH), h),
    "index_copy": lambda x, h: x.index_copy(1, torch.arange(2), h[:, 1:]),
    "index_put": lambda x, h: x.index_put(
        (torch.arange(BATCH), torch.ones(BATCH).long()), h[:, 0], accumulate=True
    ),
    "scatter_add": lambda x, h: x.scatter_add(1, torch.zeros(h.shape).long(), h),
}


# Where it is known whose each element is, the layer is served, and the sum of each loss refused.
MIXED_LATER = {
    "error": (gs.ExampleAxisError, gs.CoupledExamplesError),
    "match": "'last|SumBackward1 combines trained values of different examples",
}


@pytest.mark.parametrize("write", INTO_INPUTS.values(), ids=INTO_INPUTS)
def test_trained_rows_of_other_examples_written_into_inputs_are_refused(write):
    """Other than among inputs alone, it does not say which loss depends on which of them."""

    def function(m, x):
        return m.last(write(x, m.first(x)[ORDER]))

    parameters = {"first": nn.Linear(WIDTH, WIDTH), "last": nn.Linear(WIDTH, 2)}
    check_refused(function, parameters, normal(BATCH, 3, WIDTH), **MIXED_LATER)


def test_a_part_of_some_inputs_written_over_others_is_refused():
    def function(m, x):
        x = x.clone()
        x[1:, 0] = x[:2, 0]
        return m.layer(x)

    check_refused(
        function, {"layer": nn.Linear(WIDTH, 2)}, normal(BATCH, 3, WIDTH),
        error=gs.ExampleAxisError, match="'layer.weight'",
    )  # fmt: skip


@pytest.mark.parametrize("back", [True, False])
def test_rows_of_inputs_written_over_others(back):
    """A row that takes the place of another is another example's, which has two losses then."""

    def function(m, x):
        x = x.clone()
        if back:
            x[:] = x[ORDER]
            return m.layer(x)[ORDER.argsort()]
        x[1:] = x[:2].clone()
        return m.layer(x)

    parameters, x = {"layer": nn.Linear(WIDTH, 2)}, normal(BATCH, 3, WIDTH)
    if back:
        check_operation(function, parameters, x, gradient_of_data=False)
    else:
        check_refused(
            function, parameters, x, error=gs.ExampleAxisError, match="expected one loss for each"
        )


BEHIND_THE_FIRST = (slice(None), slice(1, None))


@pytest.mark.parametrize(
    "write", [lambda h: h.__setitem__(BEHIND_THE_FIRST, h[ORDER, 1:]), lambda h: h.add_(h[ORDER])]
)
def test_trained_rows_written_into_others_are_refused(write):
    def function(m, x):
        h = m.first(x).clone()
        write(h)
        return m.last(h)

    check_refused(
        function, {"first": nn.Linear(WIDTH, WIDTH), "last": nn.Linear(WIDTH, 2)},
        normal(BATCH, 3, WIDTH), **MIXED_LATER,
    )  # fmt: skip


ADDED_OUT_OF_PLACE = {
    "put": lambda x, h: x.index_put((torch.arange(BATCH), torch.zeros(BATCH).long()), h[ORDER, 0]),
    "put and added": lambda x, h: x.index_put((torch.arange(BATCH),), h[ORDER], accumulate=True),
    "index_add": lambda x, h: x.index_add(0, torch.arange(BATCH), h.flip(0)),
    "scatter_add": lambda x, h: x.scatter_add(1, torch.zeros_like(x).long(), h[ORDER]),
    "scatter": lambda x, h: x.scatter(1, torch.zeros_like(x[:, :1]).long(), h[ORDER, :1]),
}


@pytest.mark.parametrize("write", ADDED_OUT_OF_PLACE.values(), ids=ADDED_OUT_OF_PLACE)
def test_trained_rows_of_others_beside_inputs_in_a_new_tensor_are_refused(write):
    check_refused(
        lambda m, x: m.last(write(x, m.first(x))).sin(),
        {"first": nn.Linear(WIDTH, WIDTH), "last": nn.Linear(WIDTH, 2)},
        normal(BATCH, 3, WIDTH), **MIXED_LATER,
    )  # fmt: skip


INTO_A_RESULT = {
    "added": lambda h, x: h.index_add(0, ORDER, x),
    "added in place": lambda h, x: h.index_add_(0, ORDER, x),
    "multiplied": lambda h, x: h.scatter_reduce(0, ROWS.expand_as(x), x, "prod"),
}


@pytest.mark.parametrize("write", INTO_A_RESULT.values(), ids=INTO_A_RESULT)
def test_rows_of_others_written_into_what_a_layer_returned_are_refused(write):
    """It may be a view of a tensor that nobody saw, which is not one that held nothing."""
    check_refused(
        lambda m, x: write(m.first(x), x),
        {"first": nn.Linear(WIDTH, WIDTH)},
        normal(BATCH, 3, WIDTH),
        error=gs.ExampleAxisError, match="which loss belongs to which example was lost",
    )  # fmt: skip


@pytest.mark.parametrize("in_place", [False, True])
def test_rows_of_their_own_examples_written_into_what_a_layer_returned(in_place):
    def function(m, x):
        add = torch.Tensor.index_add_ if in_place else torch.index_add
        return m.last(add(m.first(x), 0, torch.arange(BATCH), x))

    parameters = {"first": nn.Linear(WIDTH, WIDTH), "last": nn.Linear(WIDTH, 2)}
    check_operation(function, parameters, normal(BATCH, 3, WIDTH))


MET_IN_A_VIEW = {
    "summed": lambda h, x: h[:, 0].cumsum_(0),
    "summed where axes are exchanged": lambda h, x: h.transpose(0, 1).cumsum_(1),
    "multiplied": lambda h, x: h[:, 1:].cumprod_(0),
    "other examples' products": lambda h, x: h[:, :2].baddbmm_(x.flip(0)[:, :2, :3], h.flip(0)),
    "a product of examples": lambda h, x: h[:, 0].addmm_(h[:, 0, :3].clone(), x[:, 0]),
    "norms over examples": lambda h, x: h[:, 1].renorm_(2, 1, 0.5),
}


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("meet", MET_IN_A_VIEW.values(), ids=MET_IN_A_VIEW)
def test_examples_that_meet_in_a_view_are_refused(meet, copied):
    """What the view shows is another tensor's too, itself perhaps a view of one nobody saw."""

    def function(m, x):
        h = m.first(x)
        h = h.clone() if copied else h
        meet(h, x)
        return m.last(h)

    check_refused(
        function, {"first": nn.Linear(WIDTH, WIDTH), "last": nn.Linear(WIDTH, 2)},
        normal(BATCH, 3, WIDTH), error=gs.GradStatsError, match="example",
    )  # fmt: skip


@pytest.mark.parametrize("copied", [False, True])
def test_changes_of_a_view_that_keep_examples_apart(copied):
    def function(m, x):
        h = m.first(x)
        h = h.clone() if copied else h
        h[:, :2].baddbmm_(x[:, :2, :3], x)
        h[:, 0].cumsum_(1)
        return m.last(h)

    parameters = {"first": nn.Linear(WIDTH, WIDTH), "last": nn.Linear(WIDTH, 2)}
    check_operation(function, parameters, normal(BATCH, 3, WIDTH))


@pytest.mark.parametrize("back", ["by an index", "by a write"])
@pytest.mark.parametrize("drawn", range(3))
def test_packed_rows_in_groups(back, drawn):
    """Rows of examples of different lengths, sorted by group; some groups may be empty."""
    bounds, groups = torch.tensor([0, 4, 9, 10, 17]), 6
    owner = torch.repeat_interleave(torch.arange(4), bounds.diff())

    def function(m, x, group):
        group, order = group.sort(stable=True)
        ends = [0, *group.bincount(minlength=groups).cumsum(0).tolist()]
        rows = m.first(x)[order]
        out = rows.new_empty(len(x), 2)
        for place, (first, last) in enumerate(pairwise(ends)):
            out[first:last] = functional.linear(rows[first:last], m.weights[place])
        if back == "by an index":
            return out[order.argsort()]
        sorted_back = torch.empty_like(out)
        sorted_back[order] = out
        return sorted_back

    def loss_fn(model, batch):
        out = model(*batch)
        sums = out.new_zeros(4, 2).index_add(0, owner, out.sin())
        return sums.square().sum(1)

    torch.manual_seed(drawn)
    check_operation(
        function,
        {"first": nn.Linear(WIDTH, WIDTH), "weights": (groups, 2, WIDTH)},
        normal(17, WIDTH),
        torch.randint(groups, (17,)),
        loss_fn=loss_fn,
        cu_seqlens=bounds,
    )


def test_packed_rows_padded_with_less_than_all_values():
    """As graphs are before their nodes are sorted: the padding is told by its value."""
    bounds, places = torch.tensor([0, 2, 5]), torch.tensor([0, 1, 3, 4, 5])

    def function(m, x):
        hidden = x @ m.w
        padding = hidden.detach().min() - 1
        dense = padding.repeat(6, WIDTH)
        dense[places] = hidden
        dense = dense.view(2, 3, WIDTH).sort(dim=1, descending=True).values
        return m.last(dense.masked_fill(dense == padding, 0.0).flatten(1))

    check_operation(
        function, {"w": (WIDTH, WIDTH), "last": nn.Linear(3 * WIDTH, 2)}, normal(5, WIDTH),
        cu_seqlens=bounds,
    )  # fmt: skip


def test_packed_rows_that_are_not_all_written():
    """Rows that nothing was written to count for the example that reads them."""
    bounds, order = torch.tensor([0, 2, 5]), torch.tensor([3, 0, 4, 2, 1])
    model, x = nn.Linear(WIDTH, WIDTH, bias=False).double(), normal(5, WIDTH)

    def losses(model, x):
        rows = model(x)[order]
        out = empty(x, 5, WIDTH)
        out[:2], out[2:4] = rows[:2], rows[2:4]
        sums = empty(x, 2, WIDTH).index_add(0, torch.tensor([0, 0, 1, 1, 1]), out[order.argsort()])
        return sums.sin().sum(1)

    got = gs.per_example_norms(model, x, losses, cu_seqlens=bounds)
    each = [torch.autograd.grad(losses(model, x)[i], model.weight)[0] for i in range(2)]
    assert_sqnorms(got, {"weight": torch.stack([own.square().sum() for own in each])}, rtol=1e-9)


def shown_by_blank(h):
    out = torch.zeros_like(h)
    view = out.view(BATCH, WIDTH)
    out[ORDER] = h
    return view


def shown_by_a_constant(h):
    out = empty(h, *h.shape)
    view = out[:]
    out[ORDER] = h
    return view


def shown_while_it_fills(h):
    out = torch.zeros_like(h)
    out[:1] = h[:1]
    view = out[:]
    out[1], out[2] = h[2], h[1]
    return view


def shown_of_a_copy(h):
    out = h.clone()
    view = out.view(BATCH, WIDTH)
    out.copy_(h[ORDER])
    return view


def shown_by_a_part(h):
    out = h.clone()
    part, other = out[1:], out[:2]
    part[:] = h[[2, 1]]
    return torch.cat([h[:1], other[1:], h[:1]])


def shown_in_another_form(h):
    out = empty(h, 2 * BATCH, WIDTH)
    view = out.view(BATCH, 2, WIDTH)
    out[:] = torch.cat([h, h.sin()])
    return view.sum(1)


def shown_and_worked_on(h):
    """As the same was worked on before that nobody wrote into."""
    out = h.clone()
    view = out.view(BATCH, WIDTH)
    out.copy_(h[ORDER])
    return h.sin() * 0 + view.sin()


SHOWN = [
    shown_by_blank, shown_by_a_constant, shown_while_it_fills, shown_of_a_copy, shown_by_a_part,
    shown_in_another_form, shown_and_worked_on,
]  # fmt: skip


@pytest.mark.parametrize("move", SHOWN)
def test_rows_moved_under_a_view_are_refused(move):
    """A tensor that shows memory holds what is written into it by another one later."""
    check_lost(
        move, "(?s)'second.weight'.*lost at a write into another tensor that shows its memory"
    )


def test_a_row_written_over_that_of_another_example_under_a_view_is_refused():
    def function(m, x):
        h = m.first(x).clone()
        exchanged, rows = h.transpose(0, 1), h.view(-1, WIDTH)
        rows[-1].copy_(rows[0])
        return m.last(exchanged).transpose(0, 1)

    check_refused(
        function, {"first": nn.Linear(WIDTH, WIDTH), "last": nn.Linear(WIDTH, 2)},
        normal(BATCH, BATCH, WIDTH), error=gs.ExampleAxisError, match="'last.weight'",
    )  # fmt: skip


def test_rows_moved_beside_a_view():
    """Other parts of the same memory stay what they are, and views taken later are known."""

    def function(m, x):
        h = m.first(x)
        memory, out = torch.cat([h, h.sin()]), torch.zeros_like(h)
        first, other = memory[:BATCH], memory[BATCH:]
        other[:] = h[ORDER]
        out[ORDER] = h
        later = out.view(BATCH, 1, WIDTH)[ORDER]
        return m.second(first) + m.second(later)[:, 0] + m.second(out)[ORDER]

    parameters = {"first": nn.Linear(WIDTH, WIDTH), "second": nn.Linear(WIDTH, WIDTH)}
    check_operation(function, parameters, normal(BATCH, WIDTH))


class Assigned(torch.autograd.Function):
    """Writes a value into memory of its own unseen, as solvers keep the stages of a step."""

    @staticmethod
    def forward(ctx, memory, value, index):
        ctx.index = index
        memory.data[index] = value
        return memory

    @staticmethod
    def backward(ctx, grad):
        return grad, grad[ctx.index], None


@pytest.mark.parametrize("blank", [torch.empty, torch.zeros])
def test_stages_of_a_solver_as_many_as_examples(blank):
    """A part of the memory is as long as the batch along two axes."""

    def function(m, x):
        h = m.first(x)
        stages = blank(*h.shape, BATCH + 1, dtype=h.dtype)
        for stage in range(BATCH):
            stages = Assigned.apply(stages, h, (..., stage))
            h = m.first(x + (stages[..., : stage + 1] * 0.1 / (stage + 1)).sum(-1)).tanh()
        return stages[..., :BATCH].flatten(1)

    check_operation(function, {"first": nn.Linear(WIDTH, WIDTH)}, normal(BATCH, WIDTH))


# As many rows as there are examples, and more; the second example has none.
KEPT = {
    "as many as examples": [[1, 0, 1, 0], [0, 0, 0, 0], [0, 1, 0, 0]],
    "more": [[1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 0, 0]],
}

PUT_BACK = {
    "by a mask": lambda z, mask, h: z.__setitem__(mask, h),
    "by index": lambda z, mask, h: z.__setitem__(mask.nonzero(as_tuple=True), h),
    "pooled": lambda z, mask, h: z[:, 0].index_add_(0, mask.nonzero()[:, 0], h),
    "pooled by counts": lambda z, mask, h: z[:, 0].index_add_(
        0, torch.arange(BATCH).repeat_interleave(mask.sum(1)), h
    ),
    "the last one": lambda z, mask, h: z[:, 0].index_copy_(0, torch.where(mask)[0], h),
}


def put_back_losses(put_back, model, batch):
    """Losses of a layer on the rows that a mask keeps, put back, and of one on all rows."""
    x, mask = batch
    z = x.new_zeros(x.shape)
    put_back(z, mask, model[0](x[mask]))
    return model[1](z).square().sum((1, 2))


@pytest.mark.parametrize("kept", KEPT.values(), ids=KEPT)
@pytest.mark.parametrize("put_back", PUT_BACK.values(), ids=PUT_BACK)
def test_rows_that_a_mask_keeps_put_back(put_back, kept):
    """Rows that nothing is written to belong to the examples in whose places they are."""
    model = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)]).double()
    batch = normal(BATCH, 4, WIDTH), torch.tensor(kept).bool()
    losses = partial(put_back_losses, put_back)
    check_model(model, batch, losses)
    expected = oracle_sqnorms(model, batch, losses)
    with gs.track(model, batch_size=BATCH, loss_reduction="sum") as tracker:
        losses(model, batch).sum().backward()
    assert_sqnorms(tracker.stats, expected, 1e-9)


def test_rows_put_back_to_other_positions_each():
    """With one row for each position they may be those of examples, or of positions."""
    model = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)]).double()
    mask = torch.tensor([[1, 0, 1], [0, 0, 0], [0, 1, 0]]).bool()
    batch, losses = (normal(BATCH, 3, WIDTH), mask), partial(put_back_losses, PUT_BACK["by a mask"])
    check_model(model, batch, losses)
    with gs.track(model, batch_size=BATCH, loss_reduction="sum"):
        total = losses(model, batch).sum()
        with pytest.raises(gs.ExampleAxisError, match="nothing was written to some rows"):
            total.backward()
