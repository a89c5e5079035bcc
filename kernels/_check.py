"""Input validation: everything a kernel assumes is checked here, before any launch."""

from __future__ import annotations

import dataclasses
import functools
import math

import torch
import triton
from gradstats.kernels._precision import tf32_allowed

SUPPORTED = (torch.bfloat16, torch.float16, torch.float32)
MAX_PROGRAMS = 2**31 - 1


class KernelInputError(ValueError):
    """An input that no kernel can serve; the message says what, got, expected, and what to do."""


@dataclasses.dataclass(frozen=True)
class Segments:
    """How the rows of a pair of operands divide into examples.

    Dense operands are (B, T, .): `positions` is T. Packed operands are (N, .): `positions` is the
    longest segment that the launch allows for, and `cu_seqlens` (B + 1,) lies on the device.
    """

    batch: int
    positions: int
    total_rows: int
    cu_seqlens: torch.Tensor | None

    @property
    def ragged(self) -> bool:
        return self.cu_seqlens is not None

    def strides(self, operand: torch.Tensor) -> tuple[int, int, int]:
        """As `strides_of`."""
        return strides_of(operand, self.ragged)

    def adjacent_positions(self, *operands: torch.Tensor) -> int:
        """As `adjacent`, along positions; 1 for packed rows, whose examples may start anywhere."""
        return 1 if self.ragged else adjacent(1, *operands)


def strides_of(operand: torch.Tensor, ragged: bool) -> tuple[int, int, int]:
    """(example, position, feature) strides; packed rows have no example stride."""
    *outer, position, feature = operand.stride()
    return (0 if ragged else outer[0], position, feature)


def check_operands(
    a: torch.Tensor,
    g: torch.Tensor,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    *,
    mixed: bool = False,
) -> Segments:
    """Checks one factor (a, g) and returns how its rows divide into examples.

    With `mixed` the two may differ in dtype: the kernel multiplies no matrices.

    Raises: KernelInputError for anything a kernel cannot serve. Segment bounds that lie on the
    host are checked here and uploaded without waiting for the device. Bounds that lie on the
    device are copied back to be checked, which waits for the device. Pass `max_seqlen` to avoid the
    wait: kernels then return NaN for an example whose bounds are wrong or that is longer.
    """
    for operands in ((a,), (g,)) if mixed and a.device == g.device else ((a, g),):
        check_tensors(*operands)
    if cu_seqlens is None:
        if a.dim() != 3 or g.dim() != 3:
            raise KernelInputError(
                f"expected a (B, T, d_in) and g (B, T, d_out); got {tuple(a.shape)} and "
                f"{tuple(g.shape)}: add a position axis of length 1, or pass cu_seqlens for "
                "packed rows"
            )
        if a.shape[:2] != g.shape[:2]:
            raise KernelInputError(
                f"a and g must share their batch and position axes; got {tuple(a.shape)} and "
                f"{tuple(g.shape)}: pass the inputs and output gradients of one layer call"
            )
        return Segments(a.shape[0], a.shape[1], a.shape[0] * a.shape[1], None)
    if a.dim() != 2 or g.dim() != 2:
        raise KernelInputError(
            f"with cu_seqlens, expected packed a (N, d_in) and g (N, d_out); got "
            f"{tuple(a.shape)} and {tuple(g.shape)}: flatten the rows of all examples"
        )
    if a.shape[0] != g.shape[0]:
        raise KernelInputError(
            f"a and g must have the same rows; got {a.shape[0]} and {g.shape[0]}: pass the inputs "
            "and output gradients of one layer call"
        )
    longest = check_segments(cu_seqlens, a.shape[0], max_seqlen)
    on_device = cu_seqlens.to(a.device, non_blocking=True).contiguous()
    return Segments(cu_seqlens.numel() - 1, longest, a.shape[0], on_device)


def check_pair(
    x: torch.Tensor,
    g: torch.Tensor,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    *,
    mixed: bool = False,
) -> Segments:
    """As `check_operands`, for two operands of one shape that are multiplied elementwise."""
    if x.shape != g.shape:
        raise KernelInputError(
            f"inputs and gradients must have one shape; got {tuple(x.shape)} and "
            f"{tuple(g.shape)}: pass the input and the output gradient of one layer call"
        )
    return check_operands(x, g, cu_seqlens, max_seqlen, mixed=mixed)


def check_rows(
    ids: torch.Tensor,
    g: torch.Tensor,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
) -> Segments:
    """As `check_operands`, for ids and the gradients of the rows they look up."""
    if ids.dtype not in (torch.int32, torch.int64):
        raise KernelInputError(f"ids must be int32 or int64; got {ids.dtype}: cast them")
    if ids.shape != g.shape[:-1] or ids.device != g.device:
        raise KernelInputError(
            f"expected ids (B, T) and g (B, T, d), or packed (N,) and (N, d), on one device; got "
            f"{tuple(ids.shape)} on {ids.device} and {tuple(g.shape)} on {g.device}: pass the ids "
            "and the output gradient of one look-up"
        )
    return check_operands(g, g, cu_seqlens, max_seqlen)


def check_groups(x: torch.Tensor, groups: int) -> None:
    """Checks that the channels of x (B, T, C) divide into groups."""
    if x.dim() != 3 or groups < 1 or x.shape[-1] % groups:
        raise KernelInputError(
            f"expected (B, T, C) inputs whose C channels divide into the groups; got "
            f"{tuple(x.shape)} and {groups} groups: pass channels that come first as a transposed "
            "view"
        )


def check_scale(weight: torch.Tensor | None, x: torch.Tensor) -> None:
    """Checks the scale of a norm layer against the layer's inputs."""
    if weight is not None and (tuple(weight.shape) != (x.shape[-1],) or weight.device != x.device):
        raise KernelInputError(
            f"weight must be ({x.shape[-1]},) on {x.device}; got {tuple(weight.shape)} on "
            f"{weight.device}: pass the scale of the layer that was called"
        )


def check_segments(cu_seqlens: torch.Tensor, rows: int, max_seqlen: int | None) -> int:
    """Checks segment bounds over `rows` packed rows; returns the longest length to allow for."""
    if cu_seqlens.dtype not in (torch.int32, torch.int64) or cu_seqlens.dim() != 1:
        raise KernelInputError(
            f"cu_seqlens must be an int32 or int64 vector of B + 1 bounds; got "
            f"{cu_seqlens.dtype} {tuple(cu_seqlens.shape)}: pass cumulative sums of the lengths"
        )
    if cu_seqlens.numel() < 1:
        raise KernelInputError("cu_seqlens must hold at least one bound; got none: start it with 0")
    if max_seqlen is not None and cu_seqlens.device.type != "cpu":
        return min(int(max_seqlen), rows)
    bounds = cu_seqlens.to("cpu", torch.int64)
    if bounds[0] < 0 or bounds[-1] > rows:
        raise KernelInputError(
            f"cu_seqlens must stay within the {rows} packed rows; got bounds from "
            f"{int(bounds[0])} to {int(bounds[-1])}: bounds are row numbers, not byte offsets or "
            "token ids"
        )
    lengths = bounds.diff()
    if bool((lengths < 0).any()):
        first = int((lengths < 0).nonzero()[0])
        raise KernelInputError(
            f"cu_seqlens must not decrease, or segments overlap; got {int(bounds[first])} then "
            f"{int(bounds[first + 1])} at example {first}: pass cumulative sums of the lengths"
        )
    longest = int(lengths.max()) if lengths.numel() else 0
    if max_seqlen is not None and longest > max_seqlen:
        raise KernelInputError(
            f"max_seqlen must be at least the longest segment, {longest}; got {max_seqlen}: pass "
            "that, or None"
        )
    return longest


def check_match(first: torch.Tensor, second: torch.Tensor, axis: str) -> None:
    """Checks that two operands that are contracted with each other agree."""
    if first.shape[-1] != second.shape[-1]:
        raise KernelInputError(
            f"the two factors must agree in {axis}; got {first.shape[-1]} and "
            f"{second.shape[-1]}: both must come from the same layer"
        )
    if first.dtype != second.dtype or first.device != second.device:
        raise KernelInputError(
            f"the two factors must share dtype and device; got {first.dtype} on {first.device} "
            f"and {second.dtype} on {second.device}: move or cast one of them"
        )


def check_batches(first: int, second: int) -> None:
    """Checks that two factors, whose i-th examples are multiplied, have equal batches."""
    if first != second:
        raise KernelInputError(
            f"examples that meet one by one need equal batches; got {first} and {second}: pass as "
            "many examples on either side"
        )


def check_layouts(first: Segments, second: Segments) -> None:
    """Checks that both factors are dense or both are packed."""
    if first.ragged != second.ragged:
        raise KernelInputError(
            "both factors must be dense or both packed; got one of each: give the dense one "
            "cu_seqlens = arange(B + 1) * T over its flattened rows"
        )


def check_two_factors(
    a1: torch.Tensor,
    g1: torch.Tensor,
    a2: torch.Tensor,
    g2: torch.Tensor,
    cu_seqlens1: torch.Tensor | None,
    cu_seqlens2: torch.Tensor | None,
    max_seqlen1: int | None,
    max_seqlen2: int | None,
) -> tuple[Segments, Segments]:
    """Checks two factors that are to be contracted with each other; returns their segments."""
    first = check_operands(a1, g1, cu_seqlens1, max_seqlen1)
    second = check_operands(a2, g2, cu_seqlens2, max_seqlen2)
    check_match(a1, a2, "d_in")
    check_match(g1, g2, "d_out")
    check_layouts(first, second)
    return first, second


def precision_of(dtype: torch.dtype) -> str:
    """The input precision of dots: "ieee" for half types, else what torch asks for.

    "highest", where torch does not allow tf32, is true fp32 accuracy; which of "ieee" and "tf32x3"
    serves it is for the tile table to choose.
    """
    if dtype != torch.float32:
        return "ieee"
    return "tf32" if tf32_allowed() else "highest"


def kind(operand: torch.Tensor, aligned: bool) -> tuple[int, str, int, bool]:
    """What the tile table tells operands apart by: (itemsize, precision, architecture, aligned)."""
    return (
        operand.element_size(),
        precision_of(operand.dtype),
        architecture(operand.device),
        aligned,
    )


def check_factors(factors: int, groups: int, ragged: bool) -> None:
    """Checks that factors divide into groups, and that packed rows are of one group."""
    if groups < 1 or factors % groups or (ragged and groups > 1):
        raise KernelInputError(
            f"groups must divide the {factors} factors, and be 1 for packed rows; got {groups}: "
            "pass how many factors of each example stand side by side"
        )


def check_programs(programs: int) -> int:
    """The size of a one-dimensional grid, if the device can launch it."""
    if programs > MAX_PROGRAMS:
        raise KernelInputError(
            f"at most {MAX_PROGRAMS} programs fit one launch; this input needs {programs}: split "
            "the batch"
        )
    return programs


def is_aligned(*operands: torch.Tensor) -> bool:
    """Whether rows can be copied asynchronously: 16-byte bases, features adjacent, and all other
    strides and the number of features multiples of 16 (what the compiler specializes on)."""
    for operand in operands:
        *outer, feature = operand.stride()
        if feature != 1 or operand.shape[-1] % 16 or operand.data_ptr() % 16:
            return False
        for stride in outer:
            if stride % 16:
                return False
    return True


def adjacent(axis: int, *operands: torch.Tensor) -> int:
    """How many elements along an axis of (B, T, d), from each multiple of that number on, are
    adjacent in all operands at offsets that are multiples of it: what a vector of 16 bytes may
    hold. 1 where another axis is adjacent."""
    numbers = [16 // operands[0].element_size()]
    for operand in operands:
        if operand.stride(axis) != 1:
            return 1
        numbers.append(operand.shape[axis])
        # an axis of size 1 adds no offset
        layout = enumerate(zip(operand.shape, operand.stride(), strict=True))
        numbers += [step for other, (size, step) in layout if other != axis and size > 1]
    return math.gcd(*numbers)


def architecture(device: torch.device) -> int:
    """Compute capability as one number (90 for 9.0); 90 where there is no CUDA device."""
    if device.type != "cuda":
        return 90
    return _capability(device)


@functools.cache
def _capability(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def check_tensors(*operands: torch.Tensor) -> None:
    """Checks that operands are of one dtype and on one device, and that kernels take both."""
    dtype, device = operands[0].dtype, operands[0].device
    if dtype in SUPPORTED and _runs_here(device):
        for operand in operands:
            if operand.dtype != dtype or operand.device != device:
                break
        else:
            return
    for operand in operands:
        if operand.dtype not in SUPPORTED:
            raise KernelInputError(
                f"the kernels support bfloat16, float16 and float32; got {operand.dtype}: use the "
                "PyTorch backend for float64"
            )
        if not _runs_here(operand.device):
            raise KernelInputError(
                f"the kernels need CUDA tensors; got one on {operand.device}: move it, or use the "
                "PyTorch backend"
            )
    if len({operand.device for operand in operands}) > 1:
        raise KernelInputError(
            f"operands must lie on one device; got "
            f"{', '.join(str(operand.device) for operand in operands)}: move them together"
        )
    raise KernelInputError(
        f"operands must share one dtype; got "
        f"{', '.join(str(operand.dtype) for operand in operands)}: cast to the wider one"
    )


def _runs_here(device: torch.device) -> bool:
    return device.type == "cuda" or bool(triton.knobs.runtime.interpret)
