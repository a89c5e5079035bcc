"""torch.cond: the branch that it takes is followed as any other code."""

import pytest
import torch
from torch import nn

from tests.oracle import check_model

# Compiling the plain step's branches warns so.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")

BATCH, WIDTH = 3, 4
EARLIER = torch.cond  # as code has it that was imported before the first context


class Branching(nn.Module):
    """A trained operand, and parameters in both branches and among the operands."""

    def __init__(self, bound, cond):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.bound, self.cond = bound, cond

    def forward(self, x):
        h = self.first(x)

        def above(h, weight):
            within = h.sum() > 1e9, torch.sin, lambda h: self.second(h).tanh(), (h,)
            return self.cond(*within) @ weight

        def below(h, weight):
            return self.second(h.cos()) * weight[0]

        return self.cond(x.sum() > self.bound, above, below, (h, self.first.weight))


def losses(model, x):
    return model(x).square().sum(1)


@pytest.mark.parametrize(
    ("bound", "cond"), [(-1e9, lambda *call: torch.cond(*call)), (1e9, EARLIER)]
)
def test_the_branch_that_is_taken(bound, cond):
    check_model(Branching(bound, cond).double(), torch.randn(BATCH, WIDTH).double(), losses)


def test_branches_of_each_example():
    """Under torch.vmap each example takes a branch of its own."""

    class Each(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            def of_one(h):
                return torch.cond(h[0] > 0, torch.sin, torch.cos, (h,))

            return torch.vmap(of_one)(self.layer(x))

    check_model(Each().double(), torch.randn(BATCH, WIDTH).double(), losses, fusing=(True,))


def test_compiled_branches_outside_of_contexts():
    """What contexts see in place of torch.cond, the compiler takes for that."""
    model, x = Branching(0.0, torch.cond).double(), torch.randn(BATCH, WIDTH).double()
    check_model(model, x, losses)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.parametrize("bound", [-1e9, 1e9])
def test_nested_operands(bound):
    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            def above(first, others):
                return first @ others["weight"] + others["more"][0]

            def below(first, others):
                return first * others["more"][0] * others["weight"][0]

            h = self.layer(x)
            others = {"weight": self.layer.weight, "more": [h.tanh()]}
            return torch.cond(x.sum() > bound, above, below, (h, others))

    check_model(Nested().double(), torch.randn(BATCH, WIDTH).double(), losses)
