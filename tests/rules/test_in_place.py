"""Changes in place: of data, and of what was made of parameters where no other tensor shows it."""

import pytest
import torch
from torch import nn
from torch.nn import functional

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


def written_into_a_constant(m, x):
    hidden = torch.zeros(BATCH, POSITIONS, WIDTH).double()
    hidden[:, 0] = m.w
    return hidden + x


def added_to_a_constant(m, x):
    return torch.zeros(POSITIONS, WIDTH).double().add_(m.w) * x


@pytest.mark.parametrize("function", [written_into_a_constant, added_to_a_constant])
def test_constants_are_not_changed_in_place(function):
    check_refused(
        function,
        {"w": (WIDTH,)},
        normal(BATCH, POSITIONS, WIDTH),
        match=r"in place.*'w'.*out of place",
    )


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


CHANGES = {
    "scaled": lambda m, x: x * m.w[0].clone().mul_(3),
    "overwritten": lambda m, x: x * overwritten(m.w[0].clone(), 0),
    "by another": lambda m, x: x * (m.w[0] + 1).mul_(m.w[1]),
    "twice": lambda m, x: x * (m.w[0] * 2).add_(1).clamp_(min=0.5),
    "read without gradients": lambda m, x: read_afterwards(m.w[0] * 2, x),
    "a part": part_cleared,
    "rows": lambda m, x: x * rows_raised(m.w * 2).prod(0),
    "a part that is used": part_used,
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


@pytest.mark.parametrize(
    "function",
    [with_a_view, with_its_base, detached_before, shown_without_gradients],
)
def test_what_another_tensor_shows_is_not_changed_in_place(function):
    check_refused(
        function,
        {"w": (WIDTH,)},
        normal(BATCH, POSITIONS, WIDTH),
        match=r"in place.*'w'.*out of place",
    )
