"""Sums and squares of what programs left, against float64."""

import pytest
import torch
from gradstats.kernels.finish import finish


@pytest.mark.parametrize("sums, squares", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize(
    "shape",
    [(2, 3, 5, 7), (1, 2, 70, 300), (2, 200, 1, 64), (2, 1, 1, 1), (2, 0, 3, 5), (1, 3, 0, 5)],
    ids=str,
)
def test_sums_and_squares(shape, sums, squares):
    partial = torch.randn(shape)
    totals, sqnorm = finish(partial, sums=sums, squares=squares)
    exact = partial.double()
    assert len(totals) == (shape[0] if sums else 0)
    for kind, total in enumerate(totals):
        assert total.dtype == torch.float32 and total.untyped_storage().nbytes() == total.nbytes
        torch.testing.assert_close(total.double(), exact[kind].sum((0, 1)), rtol=1e-5, atol=1e-5)
    assert len(sqnorm) == (shape[0] if squares else 0)
    for kind, found in enumerate(sqnorm):
        want = exact[kind].sum(1).square().sum(1)
        torch.testing.assert_close(found, want, rtol=1e-12, atol=0)


def test_an_example_that_is_not_a_number_spoils_no_other():
    partial = torch.randn(2, 3, 4, 5)
    partial[0, 1] = float("nan")
    _, (first, last) = finish(partial, sums=False, squares=True)
    assert first.isnan().tolist() == [False, True, False] and not last.isnan().any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_sums_are_rounded_once_when_they_are_stored(dtype):
    # in float16 none of the ones would change what was summed before
    partial = torch.ones(2, 40, 1, 5)
    partial[:, 0] = 2048
    totals, _ = finish(partial, sums=True, squares=True, dtype=dtype)
    for total in totals:
        assert total.dtype == dtype and total.untyped_storage().nbytes() == total.nbytes
        assert torch.equal(total, torch.full((5,), 2087.0).to(dtype))
