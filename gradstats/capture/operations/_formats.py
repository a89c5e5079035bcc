"""Memory formats that the backward of normalisation layers reads correctly.

If an axis has size one, such as the example axis of a single example, strides may fit two formats
at once. On a CPU, PyTorch 2.11 to 2.15 then read the input in one and the gradient in the other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from gradstats._compiler import imported_compiler
from gradstats.capture.operations._nested import operands_of

BATCH_NORMS = frozenset({functional.batch_norm, torch.batch_norm})

# Instance normalisation reads its gradient as contiguous, whatever the format of its input.
NORMALISATIONS = BATCH_NORMS | {functional.instance_norm, torch.instance_norm}

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def settle_format(func, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> None:
    """Give the gradient of a normalisation's result the memory format that its backward reads."""
    source = operands_of(args, kwargs)[0]
    last = CHANNELS_LAST.get(source.dim())
    if last is None or 1 not in source.shape or not result.requires_grad:
        return
    is_last = source.is_contiguous(memory_format=last) and not source.is_contiguous()
    expected = last if func in BATCH_NORMS and is_last else torch.contiguous_format
    mistaken = torch.contiguous_format if expected is last else last

    def settle(grad: Tensor) -> Tensor:
        # Batch normalisation reads other formats correctly; a copy would change its rounding.
        if func in BATCH_NORMS and not grad.is_contiguous(memory_format=mistaken):
            return grad
        return grad.contiguous(memory_format=expected)

    result.register_hook(settle)


class SettledFormats(TorchFunctionMode):
    """Settles formats where nothing is tracked: for references, one example at a time."""

    def __init__(self) -> None:
        super().__init__()
        if (dynamo := imported_compiler()) is not None:
            # Between graphs the compiler would compile the handler, again for each operation.
            dynamo.eval_frame.skip_code(SettledFormats.__torch_function__.__code__)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func in NORMALISATIONS:
            settle_format(func, args, kwargs, result)
        return result
