"""Statistics of one position per example, against float64."""

import pytest
import torch
from gradstats.kernels import rank_one
from gradstats.kernels._config import TileConfig

from tests.kernels.cases import random
from tests.kernels.reference import assert_close

TILE = TileConfig(4, 1, 16, num_warps=1, num_stages=1)
SHAPES = [(1, 1, 1), (3, 16, 16), (4, 17, 40), (5, 33, 3), (9, 70, 100)]


@pytest.fixture(params=[torch.float32, torch.float16, torch.bfloat16], ids=str)
def dtype(request):
    return request.param


SPLITS = (1, 3, None)


def check_sqnorm(a, g, splits=None):
    sqnorm = rank_one.rank_one_sqnorm(a, g, config=TILE, splits=splits)
    assert_close(sqnorm, a.double().square().sum(1) * g.double().square().sum(1))


@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sqnorm(dtype, shape, splits):
    batch, d_in, d_out = shape
    a, g = random((batch, d_in), dtype, "cpu", 1), random((batch, d_out), dtype, "cpu", 2)
    check_sqnorm(a, g, splits)


def test_sqnorm_of_views(dtype):
    wide = torch.full((20, 90), float("nan"), dtype=dtype)
    a, g = wide[3:17:2, 5:40], random((1, 21), dtype, "cpu").expand(7, 21)
    a.copy_(random((7, 35), dtype, "cpu"))
    check_sqnorm(a, g)
    check_sqnorm(random((35, 7), dtype, "cpu").T, a)


def test_a_zero_example_is_zero(dtype):
    a, g = random((5, 20), dtype, "cpu", 1), random((5, 30), dtype, "cpu", 2)
    a[2] = 0
    sqnorm = rank_one.rank_one_sqnorm(a, g, config=TILE)
    assert sqnorm[2] == 0
    check_sqnorm(a, g)


def test_an_empty_batch_has_no_norms():
    assert rank_one.rank_one_sqnorm(torch.zeros(0, 4), torch.zeros(0, 5)).shape == (0,)
