"""The operators' CUDA implementations, interpreted, against their CPU implementations."""

import pytest
import torch
from gradstats.kernels import operators
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.kernels.samples import operator_samples

SAMPLES = list(operator_samples(torch.float32))
every_sample = pytest.mark.parametrize(
    "sample", SAMPLES, ids=[f"{index}-{name}" for index, (name, *_) in enumerate(SAMPLES)]
)


def launched(sample):
    name, arguments, options = sample
    return as_tuple(operators._launch(name)(*arguments, **options))


def as_tuple(outputs):
    return (outputs,) if isinstance(outputs, torch.Tensor) else tuple(outputs)


@every_sample
def test_kernels_compute_what_the_reference_computes(sample):
    name, arguments, options = sample
    got = launched(sample)
    want = as_tuple(getattr(operators, name)(*arguments, **options))
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)


@every_sample
def test_every_output_begins_memory_of_its_own_and_looks_as_the_fake_says(sample):
    name, arguments, options = sample
    got = launched(sample)
    assert all(out.storage_offset() == 0 for out in got)
    operands = [each for each in (*arguments, *options.values()) if isinstance(each, torch.Tensor)]
    storages = [each.untyped_storage() for each in (*got, *operands)]
    # tensors without elements may all be at address 0, and are still different allocations
    assert len({storage._cdata for storage in storages[: len(got)]}) == len(got)
    taken = {storage.data_ptr() for storage in storages[len(got) :]}
    assert not any(storage.data_ptr() in taken for storage in storages[: len(got)])
    with FakeTensorMode(allow_non_fake_inputs=True):
        want = as_tuple(getattr(operators, name)(*arguments, **options))
    assert [layout(out) for out in got] == [layout(out) for out in want]


def layout(tensor):
    return tensor.shape, tensor.dtype, tensor.stride() if tensor.numel() else None


def test_positional_and_named_arguments_mean_the_same():
    a, g = torch.randn(2, 3, 4), torch.randn(2, 3, 5)
    launch = operators._launch("weight_gradient_sqnorm")
    named = launch(a, g, gradient_dtype=torch.float16)
    positional = launch(a, g, None, None, torch.float16)
    assert named[0].dtype == positional[0].dtype == torch.float16
    torch.testing.assert_close(named, positional)
