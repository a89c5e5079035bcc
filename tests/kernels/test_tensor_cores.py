"""The limit of Gram matrices' errors, against an emulation of the hardware's additions."""

import numpy
import pytest
import torch

from tests.kernels.tensor_cores import gram_factor

EPS = 2.0**-23
BITS = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 11}  # of the operands' significands


def cut(values, below):
    """Values without what is smaller than a power of two."""
    return numpy.trunc(values / below) * below


def power(values):
    """The largest power of two in each of some positive values."""
    return 2.0 ** numpy.floor(numpy.log2(values))


def sums(products, block, bits):
    """The sums of (N, length) products, `block` of which are added at once with `bits` kept."""
    total = numpy.zeros(len(products))
    for start in range(0, products.shape[1], block):
        terms = numpy.column_stack([total, products[:, start : start + block]])
        kept = cut(terms, power(terms.max(1, keepdims=True)) * 2.0**-bits).sum(1)
        total = cut(kept, power(kept) * EPS)
    return total


@pytest.mark.parametrize("capability, block, bits", [((9, 0), 16, 25), ((8, 0), 8, 24)])
@pytest.mark.parametrize("length", [512, 768, 2304])
@pytest.mark.parametrize("dtype", BITS, ids=str)
def test_the_limit_is_met_with_no_more_than_is_needed(dtype, length, capability, block, bits):
    rows = numpy.random.default_rng(0).standard_normal((300, length))
    significand, exponent = numpy.frexp(rows)
    rows = numpy.ldexp(numpy.rint(significand * 2 ** BITS[dtype]) / 2 ** BITS[dtype], exponent)
    # tf32 is twice as long as the half types, so that a block holds half as many
    block = block // 2 if dtype == torch.float32 else block
    exact = (rows * rows).sum(1)
    lost = (exact - sums(rows * rows, block, bits)) / exact / EPS
    assert (lost > 0).all()
    assert gram_factor(dtype, length, capability) / 3 < lost.max()
    assert lost.max() < gram_factor(dtype, length, capability)
