"""Whether fp32 products may be rounded to TF32, as set by the user in torch."""

from __future__ import annotations

import torch


def tf32_allowed() -> bool:
    """Whether torch's matrix products of fp32 operands on CUDA round them to TF32.

    All ways to allow it are seen here; torch.get_float32_matmul_precision() raises after the newer
    ones.
    """
    return torch.backends.cuda.matmul.fp32_precision == "tf32"
