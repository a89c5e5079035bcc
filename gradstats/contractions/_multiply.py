"""Products of two matrices, by the faster of PyTorch's libraries.

On AMD processors from Zen 5 on, PyTorch's own products (MKL) use half the width of the float32
vector units. oneDNN uses the full width and takes 0.4 to 0.6 of the time
(benchmarks/matrix_products.py).
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from gradstats._compiler import is_compiling

# Multiply-adds per thread from which oneDNN is no slower even if the sizes never recur: it first
# generates code for each new size, which takes a quarter of a millisecond.
WORTH_PREPARING = 2**24

# Multiply-adds from which oneDNN gains more than its call and its copies cost; the second where it
# need not copy the left operand.
WORTH_CALLING, WORTH_CALLING_ON_ROWS = 2**24, 2**21

# Bytes of the copies that oneDNN may make of operands in its own memory order.
SCRATCH = 16 * 1024 * 1024

# Operands that are copied are multiplied in parts, so that the copies stay in the cache. Each part
# sums over at least so many terms, and copies about so many elements.
LENGTH_BLOCK, BLOCK_ELEMENTS = 512, 2**20


def multiply(left: Tensor, right: Tensor, *, times: int = 1) -> Tensor:
    """Return left @ right.

    Args:
        left, right: matrices (n, k) and (k, m).
        times: how many products of these sizes will be computed.
    """
    rows, length = left.shape
    columns = right.shape[1]
    on_rows = left.is_contiguous()
    if not pays(rows * length * columns, left, right, times=times, on_rows=on_rows):
        return torch.mm(left, right)
    if not on_rows and rows * columns * left.itemsize > SCRATCH:
        return torch.mm(left, right)
    return by_onednn(left, right)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x @ weightᵀ + bias, rows (R, d_in) and weight (d_out, d_in)."""
    if not pays(x.numel() * len(weight), x, weight):
        return functional.linear(x, weight, bias)
    product = multiply(x, weight.t())
    return product if bias is None else product.add_(bias)


def by_onednn(left: Tensor, right: Tensor) -> Tensor:
    """Return left @ right by oneDNN, of float32 matrices on a CPU that need no gradient."""
    return _by_columns(left, right) if left.is_contiguous() else _by_length(left, right)


def multiply_groups(left: Tensor, right: Tensor) -> Tensor:
    """Return left @ right of each group: (K, n, k) and (K, k, m)."""
    if len(left) == 1:
        return multiply(left[0], right[0]).unsqueeze(0)
    return torch.bmm(left, right)


def pays(work: int, *operands: Tensor, times: int = 1, on_rows: bool = False) -> bool:
    """Whether a matrix product takes less time in oneDNN.

    Args:
        work: multiply-adds of one product.
        operands: its matrices.
        times: how many products of the same sizes will be computed.
        on_rows: whether the left operand is contiguous.
    """
    return (
        not is_compiling()
        and has_faster_products()
        and work >= (WORTH_CALLING_ON_ROWS if on_rows else WORTH_CALLING)
        and work * times >= WORTH_PREPARING * torch.get_num_threads()
        and all(map(_is_served, operands))
        and torch._C._get_mkldnn_enabled()
    )


@cache
def has_faster_products() -> bool:
    """Whether oneDNN uses wider vectors on this processor than PyTorch's own products."""
    both = torch.backends.mkl.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    if not both or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    processor = torch.cpu.get_capabilities()
    # Zen 4 has AVX-512 too, and computes half of such a vector at a time.
    return processor.get("cpu_name", "").startswith("AMD") and processor.get("avx_vnni", False)


def _is_served(matrix: Tensor) -> bool:
    """Whether oneDNN can take a matrix: it needs no gradient, and no subclass must see the call."""
    return (
        matrix.is_cpu
        and matrix.dtype == torch.float32
        and matrix.layout is torch.strided
        and type(matrix).__torch_dispatch__ is Tensor.__torch_dispatch__
        and not (torch.is_grad_enabled() and matrix.requires_grad)
    )


def _by_columns(left: Tensor, right: Tensor) -> Tensor:
    """Return left @ right, some columns at a time where ``right`` is large."""
    rows, columns = len(left), right.shape[1]
    size = right.numel() * right.itemsize
    if size <= SCRATCH:
        return _product(left, right)
    # A piece is copied twice: by itself, and in oneDNN's order.
    pieces = -(-2 * size // SCRATCH)
    step = -(-columns // pieces)
    result = left.new_empty(rows, columns)
    for place, piece in zip(result.split(step, 1), right.split(step, 1), strict=True):
        place.copy_(_product(left, piece))
    return result


def _by_length(left: Tensor, right: Tensor) -> Tensor:
    """Return left @ right, copying ``left``, a part of the summed axis at a time."""
    total: Tensor | None = None
    length = max(LENGTH_BLOCK, BLOCK_ELEMENTS // (len(left) + right.shape[1]))
    for left_part, right_part in zip(left.split(length, 1), right.split(length), strict=True):
        product = _product(left_part, right_part)
        total = product if total is None else total.add_(product)
    assert total is not None
    return total


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Return left @ right by oneDNN: a linear layer whose weight is the transpose of ``right``."""
    weight = right.t()
    if not (right.is_contiguous() or weight.is_contiguous()):
        # With other strides, oneDNN's copies take thousands of times as long.
        weight = right.contiguous().t() if right.stride(1) == 1 else weight.contiguous()
    return torch.ops.mkldnn._linear_pointwise.default(left, weight, None, "none", [], "")
