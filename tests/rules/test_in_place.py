"""Changes in place: data may be changed; what belongs to no example may be aliased, and may not."""

import pytest
import torch
from torch import nn

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


def copy_changed(m, x):
    return x * m.w.clone().mul_(3)


def copy_overwritten(m, x):
    copy = m.w.clone()
    copy[0] = 0
    return x * copy


@pytest.mark.parametrize(
    "function", [written_into_a_constant, added_to_a_constant, copy_changed, copy_overwritten]
)
def test_what_belongs_to_no_example_is_not_changed_in_place(function):
    check_refused(
        function,
        {"w": (WIDTH,)},
        normal(BATCH, POSITIONS, WIDTH),
        match=r"in place.*'w'.*out of place",
    )
