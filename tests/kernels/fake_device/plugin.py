"""A CUDA device that is not there: import before torch, in a process of its own.

``fake_device.cpp`` gives a CPU build of PyTorch a device "cuda:0" in the host's memory, this file
what ``torch.cuda`` says about it. With TRITON_INTERPRET=1 the kernels run on its tensors. It is a
plugin of pytest because PyTorch asks for devices once, when it is imported, which the tests'
conftest does:

    TRITON_INTERPRET=1 PYTEST_PLUGINS=tests.kernels.fake_device.plugin \\
        python -m pytest tests/kernels/fake_device
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import types
from pathlib import Path

SOURCE = Path(__file__).with_name("fake_device.cpp")
# Ignored by git. The library is compiled again when its source or PyTorch changes.
BUILT = Path(__file__).resolve().parents[3] / "build" / "fake_device"


def torch_folder() -> Path:
    """Return where PyTorch is installed, without importing it."""
    found = importlib.util.find_spec("torch")
    assert found is not None and found.origin is not None
    return Path(found.origin).parent


def reason_against() -> str | None:
    """Return why there can be no fake device here, None if there can."""
    if sys.platform != "linux":
        return f"the fake device is built for Linux, and this is {sys.platform}"
    if list((torch_folder() / "lib").glob("libtorch_cuda*")):
        return "this PyTorch has CUDA of its own; a CPU build takes a fake device"
    if compiler() is None:
        return "the fake device needs a C++ compiler, and neither g++ nor c++ was found"
    return None


def compiler() -> str | None:
    return shutil.which("g++") or shutil.which("c++")


def library() -> Path:
    """Return the compiled library, about ten seconds of work where it is not there yet."""
    recipe = SOURCE.read_bytes() + importlib.metadata.version("torch").encode()
    path = BUILT / f"{hashlib.sha256(recipe).hexdigest()[:16]}.so"
    if path.exists():
        return path
    torch = torch_folder()
    BUILT.mkdir(parents=True, exist_ok=True)
    # Not optimised: most of the time goes into PyTorch's headers.
    with tempfile.TemporaryDirectory(dir=BUILT) as folder:
        output = Path(folder) / path.name
        command = [
            str(compiler()), "-shared", "-fPIC", "-O0", "-std=c++20", str(SOURCE),
            "-o", str(output),
            "-isystem", str(torch / "include"),
            "-isystem", str(torch / "include" / "torch" / "csrc" / "api" / "include"),
            f"-L{torch / 'lib'}", f"-Wl,-rpath,{torch / 'lib'}", "-lc10", "-ltorch_cpu",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{SOURCE} does not compile:\n{done.stderr[-4000:]}")
        os.replace(output, path)
    return path


def install() -> None:
    """Load the library and let ``torch.cuda`` speak for the device."""
    if "torch" in sys.modules:
        raise RuntimeError(
            "the fake device has to be there before torch is imported. Set "
            "PYTEST_PLUGINS=tests.kernels.fake_device.plugin in the environment of pytest"
        )
    ctypes.CDLL(str(library()), mode=ctypes.RTLD_GLOBAL)
    import torch

    properties = types.SimpleNamespace(
        name="fake device",
        major=9,
        minor=0,
        total_memory=80 << 30,
        multi_processor_count=132,
        L2_cache_size=50 << 20,
        shared_memory_per_block_optin=232448,
        gcnArchName="sm_90",  # asked for where PyTorch has no CUDA, as if it had ROCm
        warp_size=32,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
    )
    state = [torch.Generator().manual_seed(0).get_state()]

    def set_rng_state(new_state, device="cuda"):
        state[0] = new_state.clone()

    answers = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_capability": lambda device=None: (properties.major, properties.minor),
        "get_device_name": lambda device=None: properties.name,
        "get_device_properties": lambda device=None: properties,
        "mem_get_info": lambda device=None: (70 << 30, properties.total_memory),
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        # Random numbers come from the CPU's generator.
        "get_rng_state": lambda device="cuda": state[0].clone(),
        "set_rng_state": set_rng_state,
        "get_rng_state_all": lambda: [state[0].clone()],
        "set_rng_state_all": lambda states: set_rng_state(states[0]),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    torch.backends.cudnn.enabled = False
    torch.UntypedStorage.clone = cloned_storage
    operations = torch.library.Library("aten", "IMPL")
    # The forms with a derivative, as autograd would otherwise look for CUDA's.
    for key in ("CUDA", "AutogradCUDA"):
        operations.impl("_thnn_fused_lstm_cell", lstm_cell, key)
    torch.cuda.fake_operations = operations  # type: ignore[attr-defined]


def cloned_storage(storage):
    """Return a copy, where PyTorch without CUDA can make no storage there."""
    import torch

    shape, device = (storage.nbytes(),), storage.device
    return torch.empty(shape, dtype=torch.uint8, device=device).untyped_storage().copy_(storage)


def lstm_cell(from_input, from_hidden, memory, input_bias=None, hidden_bias=None):
    """Return the hidden state, the memory and the gates, which CUDA keeps for its backward."""
    gates = from_input + from_hidden
    if input_bias is not None:
        gates = gates + input_bias + hidden_bias
    enter, forget, content, leave = gates.chunk(4, 1)
    memory = forget.sigmoid() * memory + enter.sigmoid() * content.tanh()
    return leave.sigmoid() * memory.tanh(), memory, gates


REASON = reason_against()
if REASON is None:
    install()
