"""The guard of Gram forms against plain torch."""

import pytest
import torch
from gradstats.kernels import _reference
from gradstats.kernels.guard import EXAMPLES, bound_gram, replace_suspects

NUMBERS = {"adding": 2.0**-22, "products": 2.0**-24, "cut_off": 1e-5, "tolerance": 1e-4}


def sums(count):
    """Sums of terms, most of which cancel, of absolute terms, and of sizes."""
    magnitude = torch.rand(count, dtype=torch.float64) + 0.5
    value = magnitude * 10 ** -torch.linspace(0, 6, count, dtype=torch.float64)
    return value, magnitude, 3 * torch.rand(count, dtype=torch.float64)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("batch", [0, 1, 5, EXAMPLES, EXAMPLES + 3])
def test_bounds(batch, groups):
    found = sums(batch * groups)
    got = bound_gram(*found, groups=groups, **NUMBERS)
    want = _reference.bound_gram(*found, groups, *NUMBERS.values())
    for one, other in zip(got[:2], want[:2], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=0)
    assert torch.equal(got[2], want[2])
    assert batch < 5 or 0 < got[2].sum() < batch


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_what_is_no_number_is_no_number_afterwards(which, number):
    found = sums(6)
    found[which][2] = number
    value, bound, suspect = bound_gram(*found, groups=2, **NUMBERS)
    want, limit, doubtful = _reference.bound_gram(*found, 2, *NUMBERS.values())
    torch.testing.assert_close(value, want, rtol=1e-12, atol=0, equal_nan=True)
    torch.testing.assert_close(bound, limit, rtol=1e-6, atol=0, equal_nan=True)
    assert torch.equal(suspect, doubtful)


@pytest.mark.parametrize("batch", [0, 1, EXAMPLES + 3])
def test_suspects_are_replaced_and_nobody_else(batch):
    value, bound, better = torch.rand(3, batch, dtype=torch.float64)
    suspect = torch.arange(batch) % 3 == 0
    better[~suspect] = float("nan")
    got, limit = replace_suspects(value, bound, suspect, better, relative=2.0**-20)
    assert torch.equal(got, torch.where(suspect, better, value))
    assert torch.equal(limit, torch.where(suspect, better * 2.0**-20, bound))
