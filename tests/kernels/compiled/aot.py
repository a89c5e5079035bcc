"""Compiles kernels for real GPUs on a machine without one, and reads what the compiler did.

A launcher runs on meta tensors while its kernels are replaced by recorders, so what is compiled
is what that launcher would launch: same arguments, same specialization, same constants.
"""

from __future__ import annotations

import contextlib
import dataclasses

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from tests.kernels.compiled import sass

POINTER_TYPES = {
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


@dataclasses.dataclass
class Launch:
    """One recorded launch: the kernel with its arguments bound by name."""

    kernel: object
    arguments: dict[str, object]
    options: dict[str, int]


@dataclasses.dataclass
class Compiled:
    """What the compiler made of one launch."""

    name: str
    shared: int
    registers: int
    spills: sass.Local
    ttir: str
    ptx: str


class Recorder:
    """Stands in for a jitted kernel and remembers how it was launched."""

    def __init__(self, kernel, launches: list[Launch]):
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid):
        def launch(*positional, **named):
            options = {key: named.pop(key) for key in ("num_warps", "num_stages") if key in named}
            names = [parameter.name for parameter in self.kernel.params]
            arguments = dict(zip(names, positional, strict=False)) | named
            assert set(arguments) == set(names), set(arguments) ^ set(names)
            self.launches.append(Launch(self.kernel, arguments, options))

        return launch


@contextlib.contextmanager
def recorded(*modules):
    """Replaces every jitted kernel of `modules` by a recorder; yields the list of launches."""
    launches: list[Launch] = []
    originals = []
    for module in modules:
        for name, value in list(vars(module).items()):
            if isinstance(value, triton.runtime.JITFunction) and name.endswith("_kernel"):
                originals.append((module, name, value))
                setattr(module, name, Recorder(value, launches))
    try:
        yield launches
    finally:
        for module, name, value in originals:
            setattr(module, name, value)


def source_of(launch: Launch) -> ASTSource:
    """The launch as the just-in-time compiler would specialize it."""
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[parameter.name] = "constexpr"
            constants[(index,)] = value
        elif isinstance(value, TensorDescriptor):
            element = POINTER_TYPES[value.base.dtype].removeprefix("*")
            signature[parameter.name] = f"tensordesc<{element}{value.block_shape}>"
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = POINTER_TYPES[value.dtype]
            if value.data_ptr() % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, int):
            specialize = not parameter.do_not_specialize
            if value == 1 and specialize:
                signature[parameter.name] = "constexpr"
                constants[(index,)] = 1
                continue
            signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and specialize:
                attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "fp32"
    return ASTSource(launch.kernel, signature, constants, attributes)


def compile_launch(launch: Launch, architecture: int) -> Compiled:
    """Compiles a launch for sm_<architecture>; registers and spills are read off what ships."""
    target = GPUTarget("cuda", architecture, 32)
    compiled = triton.compile(source_of(launch), target=target, options=launch.options)
    registers, spills = sass.read(compiled.asm["cubin"])
    return Compiled(
        launch.kernel.fn.__name__,
        compiled.metadata.shared,
        registers,
        spills,
        str(compiled.asm["ttir"]),
        compiled.asm["ptx"],
    )
