"""Contractions at once or through their operators: what torch adds to an operator is never lost."""

import warnings

import pytest
import torch
from gradstats.kernels import operators
from torch.overrides import TorchFunctionMode

from tests.dispatched import Operations
from tests.kernels.reference import ROUNDING, sqnorm_reference


class Named(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Tagged(torch.Tensor):
    pass


@pytest.fixture
def operands():
    return torch.randn(3, 5, 4).cuda(), torch.randn(3, 5, 6).cuda()


@pytest.fixture
def dispatched():
    """Count the launches behind the operator, none of which are those made at once."""
    launches = []
    library = torch.library.Library("gradstats", "IMPL")
    launch = operators._launch("direct_sqnorm")

    def count(*args, **kwargs):
        launches.append(args)
        return launch(*args, **kwargs)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators|.*Overriding")
        library.impl("direct_sqnorm", count, "CUDA", allow_override=True)
    yield launches
    library._destroy()


def check(got, a, g):
    torch.testing.assert_close(got.cpu(), sqnorm_reference(a.cpu(), g.cpu()), rtol=1e-5, atol=1e-5)


def test_plain_tensors_are_contracted_at_once(operands, dispatched):
    with torch.no_grad():
        check(operators.direct_sqnorm(*operands), *operands)
        check(operators.direct_sqnorm(torch.nn.Parameter(operands[0]), operands[1]), *operands)
    assert dispatched == []


def test_derivatives_are_refused_aloud(operands, dispatched):
    a, g = operands
    with pytest.warns(UserWarning, match="autograd kernel was not registered"):
        operators.direct_sqnorm(a.requires_grad_(), g).sum().backward()
    assert len(dispatched) == 1


def test_modes_see_the_operator(operands, dispatched):
    with torch.no_grad(), Operations() as seen:
        check(operators.direct_sqnorm(*operands), *operands)
    assert "gradstats::direct_sqnorm" in seen.found
    with torch.no_grad(), Named() as named:
        operators.direct_sqnorm(*operands)
    assert any("direct_sqnorm" in name for name in named.names)
    assert len(dispatched) == 2


def test_tensors_that_are_more_than_their_memory_take_the_operator(operands, dispatched):
    a, g = operands
    with torch.no_grad():
        operators.direct_sqnorm(a.as_subclass(Tagged), g)
        # whose sign the device's own dispatch resolves
        check(operators.direct_sqnorm(torch._neg_view(a), g), a, g)
    assert len(dispatched) == 2


def test_transforms_take_the_operator(operands, dispatched):
    a, g = operands
    with torch.no_grad():
        each = torch.func.vmap(lambda a, g: operators.direct_sqnorm(a[None], g[None])[0])(a, g)
    check(each, a, g)
    assert dispatched


def test_results_of_operators_share_no_memory(operands):
    a, g = operands
    at_once = operators.gram_sqnorm(a, g, 1, *ROUNDING)
    apart = torch.ops.gradstats.gram_sqnorm(a, g, 1, *ROUNDING)
    for one, other in zip(at_once, apart, strict=True):
        torch.testing.assert_close(one.cpu(), other.cpu(), rtol=0, atol=0)
    assert len({each.untyped_storage().data_ptr() for each in apart}) == 2
