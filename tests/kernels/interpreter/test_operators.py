"""The operators' CUDA implementations, interpreted, against their CPU implementations."""

import pytest
import torch
from gradstats.kernels import _reference, operators

from tests.kernels.samples import operator_samples

SAMPLES = list(operator_samples(torch.float32))


@pytest.mark.parametrize(
    "sample", SAMPLES, ids=[f"{index}-{name}" for index, (name, *_) in enumerate(SAMPLES)]
)
def test_kernels_compute_what_the_reference_computes(sample):
    name, arguments, options = sample
    got = operators._launch(name, *operators.LAUNCHERS[name])(*arguments, **options)
    want = getattr(_reference, name)(*arguments, **options)
    got, want = ((out,) if isinstance(out, torch.Tensor) else tuple(out) for out in (got, want))
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)


def test_positional_and_named_arguments_mean_the_same():
    a, g = torch.randn(2, 3, 4), torch.randn(2, 3, 5)
    launch = operators._launch("weight_gradient_sqnorm", "weight_gradient", 2)
    named = launch(a, g, gradient_dtype=torch.float16)
    positional = launch(a, g, None, None, None, torch.float16)
    assert named[0].dtype == positional[0].dtype == torch.float16
    torch.testing.assert_close(named, positional)
