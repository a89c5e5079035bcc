"""Changes in place: of data, and of what was made of parameters where no other tensor shows it."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import gradstats as gs
from tests.rules.operation import check_operation, check_refused, normal

BATCH, POSITIONS, WIDTH = 3, 4, 2


def test_in_place_after_a_tracked_operation():
    def function(m, x):
        hidden = m.layer(x)
        hidden += m.shift
        hidden.relu_()
        return m.scale * hidden

    parameters = {"layer": nn.Linear(WIDTH, 5), "shift": (5,), "scale": (1,)}
    check_operation(function, parameters, normal(BATCH, POSITIONS, WIDTH))


# Their derivatives do not depend on the numbers that they take, so that these may change.
AFFINE = {
    "added": lambda h, m: h + m.w,
    "twice added": lambda h, m: torch.add(h, m.w, alpha=2),
    "subtracted": lambda h, m: h - m.w,
    "subtracted from": lambda h, m: m.w - h,
    "subtracted in reverse": lambda h, m: torch.rsub(h, m.w),
    "put where a condition holds": lambda h, m: torch.where(h > 0, m.w, h),
    "put side by side": lambda h, m: torch.cat([h[:, :1], m.w[:1].expand(len(h), 1, -1)], 1),
    "stacked": lambda h, m: torch.stack([h[:, 0], m.w[0].expand(len(h), -1)], 1),
    "added in place": lambda h, m: h.clone().add_(m.w),
}


@pytest.mark.parametrize("name", AFFINE)
def test_data_that_are_overwritten_once_parameters_were_put_to_them(name):
    """As Graphormer writes the distance of its virtual node over a part of a table of distances."""

    def function(m, x):
        table = torch.zeros(BATCH, 3, WIDTH).double()
        table[:, :2] = m.scale * x
        table[:, :2] = AFFINE[name](table[:, :2], m)
        return table.exp()

    check_operation(function, {"scale": (WIDTH,), "w": (2, WIDTH)}, normal(BATCH, 2, WIDTH))


# Of the operations that write their result, those that PyTorch differentiates all the same.
WRITTEN_OUT = {
    "norm": torch.linalg.norm,
    "condition number": torch.linalg.cond,
    "median": lambda w, out: torch.quantile(w, 0.5, out=out),
    "inner product": lambda w, out: torch.inner(w, w, out=out),
    "contraction": lambda w, out: torch.tensordot(w, w, 2, out=out),
}


@pytest.mark.parametrize("write", WRITTEN_OUT.values(), ids=WRITTEN_OUT)
def test_what_operations_on_parameters_write_out_is_refused(write):
    def function(m, x):
        written = torch.empty(0).double()
        write(m.w, out=written)
        return m.scale * x + written.flatten()[:1]

    parameters = {"w": (WIDTH, WIDTH), "scale": (WIDTH,)}
    check_refused(function, parameters, normal(BATCH, WIDTH), match="in place.*'w'.*out of place")


def test_what_has_no_gradient_may_be_written_out():
    def function(m, x):
        large, total = torch.empty(0, dtype=torch.bool), torch.empty(0).double()
        torch.gt(m.w, 0, out=large)
        with torch.no_grad():
            torch.sum(m.w, 0, out=total)
        return m.w * x * (large + total)

    check_operation(function, {"w": (WIDTH,)}, normal(BATCH, WIDTH))


def triangle(m, x):
    """As Cholesky factors and LU layers are put together."""
    matrix = torch.zeros(WIDTH, WIDTH).double()
    rows, columns = torch.tril_indices(WIDTH, WIDTH, -1)
    matrix[rows, columns] = m.w[0, :1]
    matrix[range(WIDTH), range(WIDTH)] = 1.0
    return x @ matrix


def diagonal(m, x):
    matrix = x.new_zeros(WIDTH, WIDTH)
    matrix.diagonal().copy_(m.w[0].exp())
    matrix.t()[1:] -= m.w[1]
    return x @ matrix


def rows_added(m, x):
    matrix = torch.eye(WIDTH).double()
    matrix[0, 1:] *= m.w[0, 1:]
    matrix.index_add_(0, torch.tensor([1, 1]), m.w)
    return x @ (matrix * m.w)


def through_a_part(m, x):
    matrix = torch.zeros(2, WIDTH, WIDTH).double()
    matrix[1][0] = m.w[1]
    matrix += 1
    return torch.einsum("btd,kde->btke", x, matrix)


def first_position(m, x):
    hidden = torch.zeros(BATCH, POSITIONS, WIDTH).double()
    hidden[:, 0] = m.w[0]
    return hidden + x


def summed(m, x):
    return torch.zeros(POSITIONS, WIDTH).double().add_(m.w[0]) * x


def shown_by_a_constant(m, x):
    """Numbers alone: what was detached changes with the tensor, and has no gradient."""
    matrix = torch.zeros(WIDTH, WIDTH).double()
    numbers = matrix.detach()
    matrix[0] = m.w[0]
    matrix[1] = m.w[1]
    return x @ numbers + x @ matrix


def total(m, x):
    """A sum over layers that begins at a number whose creation is not seen."""
    found = torch.Tensor([0]).double()
    for row in m.w:
        found += row.square().sum()
    return x * found


CONSTANTS = (
    triangle, diagonal, rows_added, through_a_part, first_position, summed, total,
    shown_by_a_constant,
)  # fmt: skip


@pytest.mark.parametrize("function", CONSTANTS)
def test_parameters_written_into_a_constant(function):
    check_operation(function, {"w": (WIDTH, WIDTH)}, normal(BATCH, POSITIONS, WIDTH))


def token_first(m, x):
    hidden = torch.zeros(x.shape[0], x.shape[1] + 1, WIDTH).double()
    hidden[:, 0] = m.w[0]
    hidden[:, 1:] = x @ m.w
    return hidden * m.w[1]


def positions_first(m, x):
    hidden = torch.zeros(x.shape[1], x.shape[0], WIDTH).double()
    hidden[0] = m.w[0]
    hidden[1:] = x.transpose(0, 1)[1:]
    return (hidden @ m.w).transpose(0, 1)


def queries(m, x):
    return x @ m.w.expand(len(x), -1, -1).clone().add_(x[:, :1]).transpose(1, 2)


def part_of_the_positions(m, x):
    hidden = m.w[:1].repeat(len(x), x.shape[1] + 1, 1)
    hidden[:, 1:] += x
    hidden[:, 0].mul_(x[:, 0])
    return hidden @ m.w


def beside_a_parameter(m, x):
    hidden = m.w[:2].expand(len(x), -1, -1).clone()
    return hidden.addcmul_(x[:, :1], m.w[0])


def running_total(m, x):
    """As flows add up their terms, some of which no example changes."""
    total = x.new_zeros(len(x))
    total += m.w.sum() * torch.ones(len(x)).double()
    total += x.sum((1, 2))
    total += m.w.prod()
    return m.w[0, 0] * total[:, None]


@pytest.mark.parametrize("batch", [BATCH, POSITIONS])
@pytest.mark.parametrize(
    "function",
    [
        token_first,
        positions_first,
        queries,
        part_of_the_positions,
        beside_a_parameter,
        running_total,
    ],
)
def test_data_written_into_what_was_made_of_parameters(function, batch):
    check_operation(function, {"w": (WIDTH, WIDTH)}, normal(batch, POSITIONS, WIDTH))


def steps(m, x):
    states = torch.zeros(x.shape).double()
    states[:, 0] = m.start
    for step in range(1, x.shape[1]):
        states[:, step] = torch.tanh(states[:, step - 1].clone() @ m.w + x[:, step])
    return states


def test_steps_written_after_a_learned_one():
    parameters = {"w": (WIDTH, WIDTH), "start": (WIDTH,)}
    check_operation(steps, parameters, normal(BATCH, POSITIONS, WIDTH))


def view_of_a_constant(m, x):
    matrix = torch.zeros(WIDTH, WIDTH).double()
    row = matrix[0]
    matrix[0] = m.w[0]
    return x * row


def unseen_by_autograd(m, x):
    matrix = torch.zeros(WIDTH, WIDTH).double()
    matrix[0] = m.w[0]
    with torch.no_grad():
        matrix *= 2
    return x @ matrix


def part_of_what_others_show(m, x):
    hidden = m.w[0].repeat(len(x), x.shape[1] + 1, 1)
    first = hidden[:, 0]
    hidden[:, 1:] += x
    return hidden * first[:, None]


def view_of_what_data_are_written_into(m, x):
    hidden = torch.zeros(len(x), WIDTH).double()
    row = hidden[:, 0]
    hidden += m.w[0]
    hidden += x[:, 0]
    return hidden * row[:, None]


@pytest.mark.parametrize(
    "function",
    [
        view_of_a_constant,
        unseen_by_autograd,
        part_of_what_others_show,
        view_of_what_data_are_written_into,
    ],
)
def test_what_shows_a_changed_constant_is_refused(function):
    check_refused(function, {"w": (WIDTH, WIDTH)}, normal(BATCH, POSITIONS, WIDTH), match="'w'")


@pytest.mark.parametrize(
    "memory",
    [lambda: torch.zeros(2 * WIDTH).double()[WIDTH:], lambda: torch.zeros(WIDTH, 2).double()[:, 0]],
    ids=["the end", "every other"],
)
def test_parameters_written_into_a_part_of_what_was_lost_are_refused(memory):
    """Of a tensor in the middle of its memory that is no view, as ``.data`` returns them."""

    def function(m, x):
        constant = memory().data
        constant[:2] = m.w
        return x * constant

    check_refused(function, {"w": (2,)}, normal(BATCH, WIDTH), match="in place.*out of place")


def test_a_buffer_is_not_changed_in_place():
    def function(m, x):
        m.kept.running_mean[0] = m.w[0]
        return x * m.kept.running_mean

    parameters = {"w": (WIDTH,), "kept": nn.BatchNorm1d(WIDTH)}
    check_refused(function, parameters, normal(BATCH, WIDTH), match="in place.*'w'")


def divided(m, x):
    positions = m.layer(m.table).view(POSITIONS, 2, -1).permute(1, 0, 2)
    positions /= torch.tensor(1.5)
    return torch.einsum("btd,htd->bht", x @ m.w, positions)


def part_cleared(m, x):
    """As the shifted windows of torchvision clear the biases of keys."""
    bias = m.w[0].clone()
    bias[1:].zero_()
    return x * bias


def rows_raised(tensor):
    row = tensor[:1]
    row += 1
    return tensor


def part_used(m, x):
    doubled = 2 * m.w[0]
    part = doubled[1:]
    first = x[..., 1:] + part
    part.mul_(m.w[1, 1:]).add_(1)
    return x * doubled + functional.pad(first * part, (1, 0))


def parts_of_parts(m, x):
    tensor = m.w * 2
    for place in range(WIDTH):
        tensor[place][place:].mul_(m.w[0, place])
    tensor.T[1:][0][1:] = m.w[1, 1:]
    part = tensor[1:]
    part[0].unsqueeze(0).t()[:1] += m.w[:1, :1]
    return x * tensor.prod(0) + part[0]


CHANGES = {
    "parts of parts": parts_of_parts,
    "scaled": lambda m, x: x * m.w[0].clone().mul_(3),
    "overwritten": lambda m, x: x * overwritten(m.w[0].clone(), 0),
    "by another": lambda m, x: x * (m.w[0] + 1).mul_(m.w[1]),
    "twice": lambda m, x: x * (m.w[0] * 2).add_(1).clamp_(min=0.5),
    "read without gradients": lambda m, x: read_afterwards(m.w[0] * 2, x),
    "a part": part_cleared,
    "rows": lambda m, x: x * rows_raised(m.w * 2).prod(0),
    "a part that is used": part_used,
    "made to require grad": lambda m, x: x * (m.w[0] * 2).requires_grad_(),
    "seen before": lambda m, x: seen_before(m.w[0] * 2, x),
}


def overwritten(tensor, index):
    tensor[index] = 0
    return tensor


def read_afterwards(tensor, x):
    tensor += 1
    with torch.no_grad():
        value = tensor * 3
    return x * tensor * value * tensor.data


def seen_before(tensor, x):
    """The old value was used, and the name stands for the new one afterwards."""
    first = x + tensor
    same = tensor
    tensor += 1
    return first + x.sin() * same


@pytest.mark.parametrize("function", CHANGES.values(), ids=CHANGES)
def test_what_was_made_of_parameters_may_be_changed_in_place(function):
    check_operation(function, {"w": (WIDTH, WIDTH)}, normal(BATCH, POSITIONS, WIDTH))


# In-place operations that are not methods, and what they do to numbers on either side of 0.
FUNCTIONS = {
    "torch.exp_": torch.exp_,
    "torch.clamp_": lambda tensor: torch.clamp_(tensor, max=0.5),
    "torch.xlogy_": lambda tensor: torch.xlogy_(tensor, torch.tensor(3.0).double()),
    "torch.index_put_": lambda tensor: torch.index_put_(
        tensor, (torch.tensor([0]),), torch.tensor(2.0).double()
    ),
    "functional.selu_": functional.selu_,
    "functional.relu_": functional.relu_,
    "functional.hardtanh_": functional.hardtanh_,
    "relu": nn.ReLU(inplace=True),
    "silu": nn.SiLU(inplace=True),
    "elu": lambda tensor: functional.elu(tensor, 1.0, True),
    "threshold": nn.Threshold(0.1, -1.0, inplace=True),
    "dropout": nn.Dropout(0.5, inplace=True),
}


@pytest.mark.parametrize("used", ["argument", "result"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_that_change_in_place_what_was_made_of_parameters(name, used):
    def function(m, x):
        torch.manual_seed(0)
        tensor = m.w[0] * 2 - 0.1
        result = FUNCTIONS[name](tensor)
        return x * (tensor if used == "argument" else result) * m.w[1]

    check_operation(function, {"w": (WIDTH, WIDTH)}, normal(BATCH, POSITIONS, WIDTH))


@pytest.mark.parametrize(
    "write",
    [
        lambda constant, m: torch.xlogy_(constant, m.w[0].exp()),
        lambda constant, m: torch.clamp_(constant, max=m.w[0]),
        lambda constant, m: torch.index_put_(constant, (torch.tensor([0]),), m.w[0, 0]),
    ],
    ids=["xlogy_", "clamp_", "index_put_"],
)
def test_functions_that_write_parameters_into_a_constant(write):
    def function(m, x):
        constant = torch.full((WIDTH,), 0.1).double()
        write(constant, m)
        return x * constant * m.w[1]

    check_operation(function, {"w": (WIDTH, WIDTH)}, normal(BATCH, POSITIONS, WIDTH))


def test_a_constant_that_parameters_were_written_into_is_thinned_out():
    """The numbers that are dropped are drawn once."""

    def function(m, x):
        torch.manual_seed(0)
        constant = torch.ones(8).double()
        constant.mul_(m.w)
        functional.dropout(constant, 0.5, inplace=True)
        return x * constant.exp()

    check_operation(function, {"w": (8,)}, normal(BATCH, 8))


# Operations that change tensors in lists, or that only the dispatcher knows.
UNSEEN = {
    "lists": lambda tensor, other: torch._foreach_add_([tensor], [other]),
    "lists and a number": lambda tensor, other: torch._foreach_mul_([tensor], 2.0),
    "an operator of lists": lambda tensor, other: torch.ops.aten._foreach_add_([tensor], [other]),
    "an overload of lists": lambda tensor, other: torch.ops.aten._foreach_add_.List(
        [tensor], [other]
    ),
}
if hasattr(torch, "foreach"):
    UNSEEN["public lists"] = lambda tensor, other: torch.foreach.add_([tensor], [other])
    UNSEEN["public lists alone"] = lambda tensor, other: torch.foreach.exp_([tensor])

# Those of them that take no second tensor.
ALONE = ("lists and a number", "public lists alone")


@pytest.mark.parametrize("name", UNSEEN)
def test_what_was_made_of_parameters_is_not_changed_unseen(name):
    def function(m, x):
        tensor = m.w[0] * 2
        UNSEEN[name](tensor, torch.ones(WIDTH).double())
        return x * tensor

    check_refused(
        function, {"w": (WIDTH, WIDTH)}, normal(BATCH, POSITIONS, WIDTH), match="in place.*'w'"
    )


@pytest.mark.parametrize("name", [name for name in UNSEEN if name not in ALONE])
def test_parameters_are_not_written_unseen(name):
    def into_a_constant(m, x):
        tensor = torch.ones(WIDTH).double()
        UNSEEN[name](tensor, m.w[0])
        return x * tensor

    def into_data(m, x):
        UNSEEN[name](x, m.w[0].expand(x.shape))
        return x * m.w[1]

    for function in (into_a_constant, into_data):
        data = normal(BATCH, POSITIONS, WIDTH)
        check_refused(function, {"w": (WIDTH, WIDTH)}, data, match="'w'")


@pytest.mark.parametrize("add", [torch.ops.aten.add_, torch.ops.aten.add_.Tensor])
def test_operators_that_change_what_was_made_of_parameters(add):
    def function(m, x):
        tensor = m.w * 2
        add(tensor, m.v)
        return x * tensor.exp()

    check_operation(function, {"w": (WIDTH,), "v": (WIDTH,)}, normal(BATCH, POSITIONS, WIDTH))


def test_positions_scaled_in_place():
    """A view of a view of what a layer made, which nobody else has."""
    parameters = {"w": (WIDTH, 2), "table": (POSITIONS, WIDTH), "layer": nn.Linear(WIDTH, 4)}
    check_operation(divided, parameters, normal(BATCH, POSITIONS, WIDTH))


def with_a_view(m, x):
    tensor = m.w * 2
    row = tensor[:2]
    tensor += 1
    return x[..., :2] * row


def with_its_base(m, x):
    tensor = (m.w * 2).view(1, -1)
    base = m.w.view(-1)
    base.mul_(2)
    return x * tensor


def detached_before(m, x):
    tensor = m.w * 2
    value = tensor.detach()
    tensor += 1
    return x * tensor * value


def shown_without_gradients(m, x):
    tensor = m.w * 2
    with torch.no_grad():
        value = tensor.view(-1)
    tensor += 1
    return x * tensor * value


def added_axis(m, x):
    position = m.w * 2
    position.unsqueeze_(1)
    flat = (m.w * 3).unsqueeze_(0).squeeze_()
    return x * position.squeeze(1) * flat


def turned(m, x):
    weight = m.v * 2
    return x @ weight.t_() + x @ (m.v + 1).transpose_(0, 1).swapaxes_(0, -1).swapdims_(0, 1)


def moved_while_shown(m, x):
    position = m.w * 2
    part = position[:]
    return x * position.unsqueeze_(0) * part


def moved_and_changed(m, x):
    position = m.w * 2
    position.mul_(3)
    position.unsqueeze_(0)
    position += m.v[:1]
    return x * position


def constant_moved(m, x):
    position = torch.zeros(WIDTH).double()
    position += m.w
    position.unsqueeze_(0)
    return x * position


@pytest.mark.parametrize(
    "function", [added_axis, turned, moved_while_shown, moved_and_changed, constant_moved]
)
@pytest.mark.parametrize("batch", [1, WIDTH, BATCH, POSITIONS])
def test_axes_moved_in_place(function, batch):
    shapes = {"w": (WIDTH,), "v": (WIDTH, WIDTH)}
    used = shapes if function is moved_and_changed else {"v": shapes["v"]}
    used = used if function in (turned, moved_and_changed) else {"w": shapes["w"]}
    check_operation(function, used, normal(batch, POSITIONS, WIDTH))


@pytest.mark.parametrize("by_name", [False, True])
def test_views_in_the_shape_of_another_changed_in_place(by_name):
    def function(m, x):
        tensor, other = m.w * 2, m.v.exp()
        view = tensor.view_as(other=other) if by_name else tensor.view_as(other)
        view[:1].mul_(other[:1])
        return x * tensor + other.sum()

    shapes = {"w": (POSITIONS * WIDTH,), "v": (POSITIONS, WIDTH)}
    check_operation(function, shapes, normal(BATCH, POSITIONS * WIDTH))


def moved_then_changed_while_shown(m, x):
    tensor = m.w * 2
    part = tensor[1:]
    tensor.unsqueeze_(0)
    tensor.mul_(3)
    return x * tensor * part


def part_changed_after_a_move(m, x):
    tensor = m.w * 2
    part = tensor[1:]
    tensor.unsqueeze_(0)
    part.mul_(3)
    return x * tensor * part


def made_of_what_is_shown(m, x):
    source = m.w * 2
    tensor = source.sin()
    part = tensor[1:]
    tensor.mul_(3)
    return x * tensor * part * source


def written_from_another_part(m, x):
    tensor = m.w * 2
    tensor[:1] = tensor[1:]
    return x * tensor


def part_detached_before(m, x):
    tensor = m.w * 2
    part = tensor[1:]
    seen = part.detach()
    part.mul_(3)
    return x * tensor * seen


def part_of_a_part_detached_before(m, x):
    tensor = m.w * 2
    seen = tensor[1:].detach()
    tensor[1:].view(-1)[1:].mul_(3)
    return x * tensor + seen.sum()


def part_of_a_part_with_another(m, x):
    tensor = m.w * 2
    part = tensor[:1]
    tensor[1:].view(-1)[1:].mul_(3)
    return x * tensor * part


def made_of_another_with_a_view(m, x):
    other = m.w * 2
    tensor = other * 3
    part = tensor[1:]
    tensor.add_(1)
    return x * tensor + other + part.sum()


@pytest.mark.parametrize(
    "function",
    [
        with_a_view, with_its_base, detached_before, shown_without_gradients,
        moved_then_changed_while_shown, part_changed_after_a_move, made_of_what_is_shown,
        part_detached_before, written_from_another_part, part_of_a_part_detached_before,
        part_of_a_part_with_another, made_of_another_with_a_view,
    ],
)  # fmt: skip
def test_what_another_tensor_shows_is_not_changed_in_place(function):
    check_refused(
        function,
        {"w": (WIDTH,)},
        normal(BATCH, POSITIONS, WIDTH),
        match=r"^(Tensor\.\w+|__setitem__) changes .* in place.*'w'.*out of place",
    )


PLACES = torch.tensor([[4, 0, 2], [1, 3, 0], [5, 2, 1], [0, 4, 3]])
AT = PLACES[:, :, None].expand(-1, -1, 4)
MASK = torch.zeros(4, 6, 1, dtype=torch.bool).scatter(1, PLACES[:, :, None], True)
AMONG_TOKENS = {
    "scatter": lambda t, v: torch.scatter(t, 1, AT, v),
    "scatter_add": lambda t, v: t.scatter_add(1, AT, v),
    "scatter_": lambda t, v: t.clone().scatter_(1, AT, v),
    "index_put": lambda t, v: t.index_put((torch.arange(4)[:, None], PLACES), v),
    "masked_scatter": lambda t, v: t.masked_scatter(MASK, v),
}


@pytest.mark.parametrize("name", AMONG_TOKENS)
def test_data_written_into_a_copy_of_repeated_tokens(name):
    """As a masked autoencoder's decoder puts what it was given among mask tokens."""

    def function(m, x):
        tokens = m.token.repeat(len(x), 6, 1) + m.position
        return AMONG_TOKENS[name](tokens, m.layer(x)).tanh()

    check_operation(
        function, {"token": (1, 1, 4), "position": (6, 4), "layer": nn.Linear(3, 4)},
        normal(4, 3, 3),
    )  # fmt: skip


@pytest.mark.parametrize(
    "write",
    [lambda t, v: t.scatter(1, AT, v.flip(0)), lambda t, v: t.scatter(0, AT % 4, v)],
    ids=["rows of others", "along the examples"],
)
def test_data_written_into_tokens_of_other_examples_are_refused(write):
    check_refused(
        lambda m, x: write(m.token.expand(len(x), 6, 4), m.layer(x)),
        {"token": (1, 1, 4), "layer": nn.Linear(3, 4)}, normal(4, 3, 3),
        error=gs.UnsupportedOperationError, match="examples are not known",
    )  # fmt: skip


def test_an_operation_that_is_refused_leaves_the_batch_as_it_was():
    """One without a rule, in place, on data that the user passed."""
    batch = normal(3, 4)
    before = batch.clone()
    check_refused(
        lambda m, x: x.put_(torch.arange(4), m.w), {"w": (4,)}, batch, match="put_ has no rule"
    )
    assert torch.equal(batch, before)
