"""Launches that are remembered: each starts what Triton itself would have started.

A stand-in for the CUDA driver notes what is started instead of starting it; everything before that,
up to the machine code, is Triton's own.
"""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from gradstats.kernels import (
    _check,
    _launching,
    direct,
    layer_norm,
    scale_backward,
    vector,
    weight_gradient,
)
from gradstats.kernels._launching import Launch, launch_kernel, remembered
from triton.backends.compiler import GPUTarget
from triton.runtime import driver


@triton.jit(do_not_specialize=["count"])
def copy_kernel(
    source_ptr, chosen_ptr, target_ptr, stride, count, scale,
    CHOSEN: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    value = tl.load(source_ptr + index * stride, mask=index < count, other=0)
    if CHOSEN:
        value = tl.where(tl.load(chosen_ptr) > 0, value, 0)
    tl.store(
        target_ptr + index, (value * scale).to(target_ptr.dtype.element_ty), mask=index < count
    )


class Driver:
    """What Triton asks of a driver; notes (source, grid, stream, arguments) of every launch."""

    def __init__(self):
        self.device, self.streams, self.started = 0, {}, []
        started = self.started

        class Launcher:
            def __init__(self, source, metadata):
                self.source, self.warps = source, metadata.num_warps

            def __call__(
                self, x, y, z, stream, function, packed, metadata, enter, leave, *arguments
            ):
                if getattr(enter, "calls", None):
                    enter(metadata)
                started.append((self, (x, y, z), stream, arguments))

        class Utils:
            def load_binary(self, name, kernel, shared, device):
                return 1, 1, 64, 0, 1024

            def get_device_properties(self, device):
                return {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32}

            def unload_module(self, module):
                pass

        self.launcher_cls, self.utils = Launcher, Utils()

    def get_current_device(self):
        return self.device

    def get_current_stream(self, device=None):
        return self.streams.get(device, 7)

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_device_capability(self, device=None):
        return 9, 0

    def get_active_torch_device(self):
        return torch.device("cpu")

    def map_python_to_cpp_type(self, kind):
        return "int"


@pytest.fixture
def stand_in(monkeypatch):
    found = Driver()
    monkeypatch.setattr(driver, "_active", found)
    monkeypatch.setattr(_launching, "_launches", {})
    yield found
    copy_kernel.device_caches.clear()


def tensors(dtype=torch.float32, offset=0, target=torch.float32):
    return torch.zeros(64, dtype=dtype)[offset:], None, torch.zeros(64, dtype=target)


def named(chosen=False, size=16, warps=4):
    return {"CHOSEN": chosen, "SIZE": size, "num_warps": warps}


# launches of which any two differ in one respect that a kernel may be compiled for
LAUNCHES = {
    "plain": (tensors(), (3, 40, 0.5), named()),
    "address": (tensors(offset=1), (3, 40, 0.5), named()),
    "dtype": (tensors(torch.bfloat16), (3, 40, 0.5), named()),
    "another dtype": (tensors(torch.float16), (3, 40, 0.5), named()),
    "dtype of the target": (tensors(target=torch.float64), (3, 40, 0.5), named()),
    "a stride of one": (tensors(), (1, 40, 0.5), named()),
    "a multiple of 16": (tensors(), (16, 40, 0.5), named()),
    "a wide stride": (tensors(), (2**31 + 3, 40, 0.5), named()),
    "a wide multiple of 16": (tensors(), (2**31, 40, 0.5), named()),
    "a count of one": (tensors(), (3, 1, 0.5), named()),
    "a wide count": (tensors(), (3, 2**40, 0.5), named()),
    "a scale that is a whole number": (tensors(), (3, 40, 1), named()),
    "a scale that is one": (tensors(), (3, 40, 1.0), named()),
    "a tensor": ((tensors()[0], tensors()[0], tensors()[2]), (3, 40, 0.5), named(chosen=True)),
    "size": (tensors(), (3, 40, 0.5), named(size=32)),
    "warps": (tensors(), (3, 40, 0.5), named(warps=8)),
}


def numbers_of(arguments):
    """What a kernel reads: addresses where tensors were given."""
    return [each.data_ptr() if isinstance(each, torch.Tensor) else each for each in arguments]


def test_a_remembered_launch_starts_what_triton_starts(stand_in):
    want = {}
    for name, (operands, numbers, constants) in LAUNCHES.items():
        copy_kernel[(5,)](*operands, *numbers, **constants)
        want[name] = stand_in.started[-1]
    # from the second time on nothing is left to Triton
    for _ in range(3):
        for name, (operands, numbers, constants) in LAUNCHES.items():
            launch_kernel(copy_kernel, 5, *operands, *numbers, **constants)
            launcher, *rest, arguments = stand_in.started[-1]
            assert launcher is want[name][0], name
            assert rest == [*want[name][1:3]], name
            assert numbers_of(arguments) == numbers_of(want[name][3]), name
            types = [type(each) for each in numbers_of(arguments)]
            assert types == [type(each) for each in numbers_of(want[name][3])], name
    assert len({id(each[0]) for each in want.values()}) > 12


def test_operands_of_a_launch_may_change(stand_in):
    launch = Launch(copy_kernel, 5, 3, 40, 0.5, **named())
    kinds = ["plain", "address", "dtype", "another dtype", "dtype of the target"]
    for _ in range(2):
        for name in kinds:
            operands, numbers, constants = LAUNCHES[name]
            copy_kernel[(5,)](*operands, *numbers, **constants)
            want = stand_in.started[-1]
            launch(*operands)
            assert stand_in.started[-1][0] is want[0], name
    assert len(launch.compiled) == len(kinds)


def test_remembered_launches_leave_triton_alone(stand_in, monkeypatch):
    operands, numbers, constants = LAUNCHES["plain"]
    launch_kernel(copy_kernel, 5, *operands, *numbers, **constants)
    monkeypatch.setattr(type(copy_kernel), "run", None)
    launch_kernel(copy_kernel, 5, *operands, *numbers, **constants)
    assert len(stand_in.started) == 2


ROWS = torch.ones(12, 32, dtype=torch.bfloat16)
PACKED = {"cu_seqlens": torch.tensor([0, 5, 12], dtype=torch.int32), "max_seqlen": 7}
LAUNCHERS = {
    "vector": lambda: vector.vector_sqnorm(ROWS, **PACKED),
    "vector sum": lambda: vector.vector_sum(ROWS, **PACKED),
    "direct": lambda: direct.direct_sqnorm(ROWS, ROWS, **PACKED),
    "weight gradient": lambda: weight_gradient.weight_gradient_sqnorm(
        ROWS, ROWS, splits=2, **PACKED
    ),
    "layer norm": lambda: layer_norm.layer_norm_backward(
        ROWS, ROWS, ROWS[0], 1e-5, splits=2, **PACKED
    ),
    "scale": lambda: scale_backward.scale_backward(ROWS, ROWS, splits=2, **PACKED),
}


@pytest.mark.parametrize("name", LAUNCHERS)
def test_packed_examples_whose_bounds_count_find_their_launches_too(stand_in, monkeypatch, name):
    monkeypatch.setattr(_check, "_runs_here", lambda device: True)
    LAUNCHERS[name]()
    count = len(stand_in.started)
    monkeypatch.setattr(type(copy_kernel), "run", None)
    LAUNCHERS[name]()
    assert len(stand_in.started) == 2 * count > 0


class Elsewhere:
    """A tensor on a device of its own."""

    def __init__(self, tensor, index):
        self.dtype, self.data_ptr = tensor.dtype, tensor.data_ptr
        self.device = torch.device("cuda", index)


def test_a_launch_goes_to_its_tensors_device_and_the_current_stream(stand_in):
    operands, numbers, constants = LAUNCHES["plain"]
    for device, stream in ((0, 7), (1, 8), (0, 9), (1, 8)):
        stand_in.device, stand_in.streams = device, {device: stream}
        there = [each if each is None else Elsewhere(each, device) for each in operands]
        launch_kernel(copy_kernel, 5, *there, *numbers, **constants)
        ours = stand_in.started[-1]
        copy_kernel[(5,)](*there, *numbers, **constants)
        assert ours[0] is stand_in.started[-1][0] and ours[2] == stream


def test_whoever_looks_on_sees_every_launch(stand_in):
    operands, numbers, constants = LAUNCHES["plain"]
    seen = []
    launch_kernel(copy_kernel, 5, *operands, *numbers, **constants)
    hooks = triton.knobs.runtime.launch_enter_hook
    hooks.add(seen.append)
    try:
        for _ in range(2):
            launch_kernel(copy_kernel, 5, *operands, *numbers, **constants)
    finally:
        hooks.remove(seen.append)
    launch_kernel(copy_kernel, 5, *operands, *numbers, **constants)
    assert len(stand_in.started) == 4
    assert [each.get()["name"] for each in seen] == ["copy_kernel"] * 2


def test_grids_that_no_device_launches_are_refused(stand_in):
    operands, numbers, constants = LAUNCHES["plain"]
    with pytest.raises(_check.KernelInputError, match="at most 2147483647 programs"):
        launch_kernel(copy_kernel, 2**31, *operands, *numbers, **constants)
    assert not stand_in.started


def test_what_is_remembered_is_bounded(stand_in, monkeypatch):
    monkeypatch.setattr(_launching, "REMEMBERED", 3)
    operands, (_, *numbers), constants = LAUNCHES["plain"]
    for stride in (*range(3, 12, 2), 3):
        launch_kernel(copy_kernel, 5, *operands, stride, *numbers, **constants)
        assert len(_launching._launches) <= 3
        assert stand_in.started[-1][3][3] == stride


def test_what_is_prepared_is_remembered_by_layout():
    asked = []

    @remembered
    def prepare(kernel, operands, *options):
        asked.append((operands, options))
        return len(asked)

    x = torch.zeros(8, 4)
    alike = torch.ones(8, 4)
    assert prepare(copy_kernel, (x, None), 1) == prepare(copy_kernel, (alike, None), 1) == 1
    others = [
        ((x.mT, None), 1), ((x[1:], None), 1), ((x.double(), None), 1), ((None, x), 1),
        ((x.view(4, 8), None), 1), ((x.new_zeros(33)[1:].view(8, 4), None), 1),
        ((x.to("meta"), None), 1), ((x, x), 1), ((x, None), 2), ((x, None), 1, 2),
    ]  # fmt: skip
    answers = [prepare(copy_kernel, *other) for other in others]
    assert answers == [prepare(copy_kernel, *other) for other in others]
    assert len({1, *answers}) == len(others) + 1


def test_nothing_is_remembered_of_values_or_for_stand_ins():
    asked = []

    @remembered
    def prepare(kernel, operands, *options):
        asked.append(options)

    bounds = torch.zeros(3)
    for kernel, options in ((copy_kernel, (bounds,)), (None, ())):
        for _ in range(2):
            prepare(kernel, (bounds,), *options)
    assert len(asked) == 4
