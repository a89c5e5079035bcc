"""Launches with little host overhead, and a cache of the plans that precede them.

At every launch Triton examines all arguments for properties that it specializes kernels on: dtypes,
which addresses and numbers are multiples of 16, and which numbers are one. Here the compiled kernel
is cached for launches that agree in all of these and in every number, and is started as Triton
would start it. Where something observes launches or changes how kernels are compiled (hooks, the
interpreter, a kernel's stand-in), Triton's own launch is used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import triton
from gradstats.kernels._calls import VALUES
from gradstats.kernels._check import check_programs
from triton.compiler import CompiledKernel
from triton.knobs import HookChain
from triton.runtime import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

Options = ParamSpec("Options")
Result = TypeVar("Result")
Operands = tuple[torch.Tensor | None, ...]

# Layouts that a cache holds before it is cleared. Every step repeats the launches of every layer.
REMEMBERED = 1024

# Stands in a key for an operand that is None.
NOTHING = (None,)

_driver, _runtime, _compilation = (
    triton.runtime.driver,
    triton.knobs.runtime,
    triton.knobs.compilation,
)
INSPECTS_STAGES = hasattr(_runtime, "add_stages_inspection_hook")


class Launch:
    """A launch of a kernel, complete but for its tensors, which are the first arguments."""

    __slots__ = ("compiled", "constants", "kernel", "numbers", "programs", "values")

    def __init__(self, kernel: Any, programs: int, *numbers: float, **constants: Any):
        self.kernel = kernel
        self.programs = check_programs(programs)
        self.numbers = numbers
        self.constants = constants
        # by device, dtypes and alignment of the tensors
        self.compiled: dict[tuple, tuple] = {}
        self.values: tuple | None = None
        if type(kernel) is JITFunction:
            names = [each.name for each in kernel.params]
            named = [name for name in names if name in constants]
            if names[len(names) - len(named) :] == named:
                self.values = (*numbers, *(constants[name] for name in named))

    def __call__(self, *tensors: Any) -> None:
        """Launch for tensors, tensor descriptors, or None where a kernel reads nothing.

        All lie on the current device.
        """
        values = self.values
        if values is None or _watched(self.kernel):
            self.kernel[(self.programs,)](*tensors, *self.numbers, **self.constants)
            return
        # read the device off a tensor: asking PyTorch takes longer
        device: Any = None
        pointers, marks = [*tensors], [*tensors]
        for place, tensor in enumerate(tensors):
            if type(tensor) is TensorDescriptor:
                marks[place] = _mark(tensor)
            elif tensor is not None:
                device = tensor.device
                pointers[place] = pointer = tensor.data_ptr()
                marks[place] = (tensor.dtype,) if pointer % 16 else tensor.dtype
        known = (device, *marks)
        try:
            start, function, packed, stream, _ = self.compiled[known]
        except KeyError:
            compiled = self.kernel[(self.programs,)](*tensors, *self.numbers, **self.constants)
            self._remember(known, compiled)
            return
        start(
            self.programs, 1, 1, stream(device.index), function, packed, None, None, None,
            *pointers, *values,
        )  # fmt: skip

    def _remember(self, known: tuple, compiled: Any) -> None:
        """Cache what Triton launched, if this version is known to start it like that."""
        assert self.values is not None
        # the key holds the device and one mark for each tensor
        complete = len(known) - 1 + len(self.values) == len(self.kernel.params)
        parts = ("run", "function", "packed_metadata")
        if complete and isinstance(compiled, CompiledKernel):
            if all(hasattr(compiled, part) for part in parts):
                started = [getattr(compiled, part) for part in parts]
                # keep the kernel itself: it is unloaded when its last reference is gone
                self.compiled[known] = *started, _driver.active.get_current_stream, compiled


def _mark(descriptor: Any) -> tuple:
    """Everything about a tensor descriptor that Triton may specialize a kernel on."""
    base = descriptor.base
    return (
        base.dtype, base.data_ptr() % 16, *descriptor.shape, *descriptor.strides,
        *descriptor.block_shape, getattr(descriptor, "padding", None),
        getattr(descriptor, "round_f32_to_tf32", None),
    )  # fmt: skip


def _watched(kernel: JITFunction) -> bool:
    """Whether something observes launches, or changes how kernels are compiled."""
    enter, leave = _runtime.launch_enter_hook, _runtime.launch_exit_hook
    return bool(
        (enter.calls if type(enter) is HookChain else enter)
        or (leave.calls if type(leave) is HookChain else leave)
        or kernel.pre_run_hooks
        or _runtime.debug
        or _compilation.instrumentation_mode
        or (INSPECTS_STAGES and _runtime.add_stages_inspection_hook)
    )


_launches: dict[tuple, Launch] = {}


def launch_kernel(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
    """Launch a kernel over a one-dimensional grid, as `kernel[(programs,)](...)` does.

    Args:
        kernel: what is launched; its tensors stand before its numbers.
        programs: the size of the grid.
        arguments: all tensors and numbers, by position.
        constants: what it is compiled for, and options.
    Raises:
        KernelInputError: where the device can launch no grid of this size.
    """
    count = 0
    for argument in arguments:
        if isinstance(argument, (int, float)):
            break
        count += 1
    launch_of(kernel, programs, *arguments[count:], **constants)(*arguments[:count])


def launch_of(kernel: Any, programs: int, *numbers: float, **constants: Any) -> Launch:
    """The launch of a kernel: one object for all calls that are equal in everything but tensors.

    Nothing else makes a `Launch`. So calls without a remembered plan (packed examples, whose bounds
    are values) still find the kernel that an earlier call compiled.
    """
    # 1, True and 1.0 are equal in Python, but not to a compiler
    key = (id(kernel), programs, numbers, (*map(type, numbers),), (*constants.items(),))
    found = _launches.get(key)
    if found is None:
        found = Launch(kernel, programs, *numbers, **constants)
        _store(_launches, key, found)
    return found


def remembered(
    prepare: Callable[Concatenate[Any, Operands, Options], Result],
) -> Callable[Concatenate[Any, Operands, Options], Result]:
    """Cache a function that prepares a kernel's launches for operands and options.

    It may depend on the operands only through shape, strides, dtype, device and whether the address
    is a multiple of 16. Calls with a tensor among the options, whose values count, or with a
    stand-in for the kernel are not cached.
    """
    found: dict[tuple, tuple[Any, Result]] = {}

    @functools.wraps(prepare)
    def find(
        kernel: Any, operands: Operands, *options: Options.args, **named: Options.kwargs
    ) -> Result:
        values = VALUES.issuperset(map(type, options))
        if not values and any(isinstance(option, torch.Tensor) for option in options):
            return prepare(kernel, operands, *options, **named)
        if type(kernel) is not JITFunction:
            return prepare(kernel, operands, *options, **named)
        key: list[Any] = [id(kernel), options]
        if named:
            key += named.items()
        for each in operands:
            if each is None:
                key += NOTHING
            else:
                key += (each.shape, each.stride(), each.dtype, each.device, each.data_ptr() % 16)
        known = tuple(key)
        try:
            return found[known][1]
        except KeyError:
            pass
        # keep the kernel: while it lives, no other has its id
        found_now = kernel, prepare(kernel, operands, *options, **named)
        _store(found, known, found_now)
        return found_now[1]

    return find


def _store(found: dict[tuple, Any], key: tuple, value: Any) -> None:
    if len(found) >= REMEMBERED:
        found.clear()
    found[key] = value
