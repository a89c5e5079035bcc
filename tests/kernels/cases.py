"""The inputs that every sequence kernel is checked on, in the interpreter and on a GPU.

A case maps (dtype, block, device) to (a, g, cu_seqlens); `block` is the tile side, so that each
case spans several tiles whatever the tile.
"""

from __future__ import annotations

import torch


def random(shape, dtype, device, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype).to(device)


def dense(batch, positions, d_in, d_out):
    def build(dtype, block, device):
        t = positions(block) if callable(positions) else positions
        a = random((batch, t, d_in), dtype, device, 1)
        return a, random((batch, t, d_out), dtype, device, 2), None

    return build


def ragged(lengths, d_in, d_out, front=0, back=0, index_dtype=torch.int32):
    """Packed segments with NaN rows before, after: what lies outside the segments is poison."""

    def build(dtype, block, device):
        sizes = [length(block) if callable(length) else length for length in lengths]
        rows = front + sum(sizes) + back
        a, g = random((rows, d_in), dtype, device, 3), random((rows, d_out), dtype, device, 4)
        for operand in (a, g):
            operand[:front] = float("nan")
            operand[rows - back :] = float("nan")
        cu_seqlens = torch.tensor([front, *sizes]).cumsum(0).to(index_dtype)
        return a, g, cu_seqlens

    return build


def channels_first(batch, positions, d_in, d_out):
    """As 1x1 convolutions leave them: positions are adjacent."""

    def make(dtype, block, device):
        a, g, _ = dense(batch, positions, d_in, d_out)(dtype, block, device)
        return a.mT.contiguous().mT, g.mT.contiguous().mT, None

    return make


def transposed(dtype, block, device):
    """Features outermost, as a convolution's output or a .mT view hands them over."""
    a = random((2, 19, 2 * block + 3), dtype, device, 5).transpose(1, 2)
    g = random((2, 21, 2 * block + 3), dtype, device, 6).transpose(1, 2)
    return a, g, None


def expanded(dtype, block, device):
    """One input row shared by all positions, one gradient shared by all examples: strides 0."""
    a = random((3, 1, 20), dtype, device, 7).expand(3, block + 1, 20)
    g = random((1, block + 1, 18), dtype, device, 8).expand(3, block + 1, 18)
    return a, g, None


def sliced(dtype, block, device):
    """Views into larger tensors whose other elements are NaN."""
    a = torch.full((4, block + 9, 50), float("nan"), dtype=dtype, device=device)
    g = torch.full((4, 2 * block + 9, 70), float("nan"), dtype=dtype, device=device)
    a, g = a[1:3, 2 : block + 4, 3:37], g[1:3, : 2 * block + 4 : 2, 1:69:3]
    a.copy_(random(a.shape, dtype, device, 9))
    g.copy_(random(g.shape, dtype, device, 10))
    return a, g, None


def zero_example(dtype, block, device):
    a, g, _ = dense(3, block + 3, 17, 33)(dtype, block, device)
    a[1], g[1] = 0, 0
    return a, g, None


CASES = {
    "one position": dense(3, 1, 40, 24),
    "block - 1": dense(2, lambda block: block - 1, 16, 32),
    "block": dense(2, lambda block: block, 33, 17),
    "block + 1": dense(2, lambda block: block + 1, 32, 16),
    "prime": dense(2, lambda block: 2 * block + 5, 19, 37),
    "one example": dense(1, lambda block: block + 2, 50, 35),
    "odd features": dense(2, 5, 1, 3),
    "transposed": transposed,
    "channels first": channels_first(2, lambda block: 2 * block, 33, 48),
    "channels first, by four": channels_first(3, lambda block: block + 4, 20, 17),
    "expanded": expanded,
    "sliced": sliced,
    "zero example": zero_example,
    "ragged": ragged([3, lambda block: block, 1, lambda block: 2 * block + 3], 20, 34),
    "ragged with empty": ragged([0, lambda block: block + 1, 0, 0, 2, 0], 17, 16),
    "ragged in padding": ragged([lambda block: block + 1, 4], 33, 18, front=5, back=7),
    "ragged int64": ragged([2, 5], 16, 16, front=1, index_dtype=torch.int64),
    "all empty": ragged([0, 0], 16, 16, back=3),
}

# Every case in float32, and the same code on each kind of case in the others: what follows from a
# type does not follow from the case.
SPANNED = [
    *((name, torch.float32) for name in CASES),
    ("prime", torch.float16), ("ragged in padding", torch.float16), ("sliced", torch.bfloat16),
    ("channels first", torch.bfloat16), ("ragged", torch.bfloat16),
]  # fmt: skip


def cancelling(dtype, block, device, d_in=24, d_out=40):
    """Second half repeats the first with the gradient's sign turned and a small rest: the terms
    of the Gram form are far larger than their sum."""
    a, g, _ = dense(2, block + 2, d_in, d_out)(dtype, block, device)
    rest = random(g.shape, dtype, device, 11) / 256
    return torch.cat([a, a], 1), torch.cat([g, rest - g], 1), None
