"""Tensors that flex_attention's score_mod and mask_mod use."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from gradstats.capture.operations._modes import ContextMode
from gradstats.capture.operations._nested import operands_of
from gradstats.capture.parameters._refusals import refuse
from gradstats.capture.parameters._tensors import first_node, node_of

FLEX_ATTENTION = torch.ops.higher_order.flex_attention


def check_flex_attention(mode: ContextMode, *args, **kwargs) -> None:
    """Refuse parameters in a score_mod or mask_mod: PyTorch does not show their use there."""
    tracked = [item for item in taken_beside(*args, **kwargs) if node_of(item) is not None]
    if tracked:
        refuse(
            FLEX_ATTENTION, first_node(*tracked), "with a score_mod or mask_mod that takes it has "
            "no rule", "Add it to the scores with scaled_dot_product_attention(attn_mask=...).",
        )  # fmt: skip


def taken_beside(query, key, value, score_mod, block_mask, *others, **named) -> list[Tensor]:
    """Return the tensors that flex_attention takes beside query, key and value."""
    taken = operands_of(others, named)
    if isinstance(score_mod, fx.GraphModule):
        return taken  # the compiler has made operands of what the graph uses
    score, place = query.new_zeros(()), torch.zeros((), dtype=torch.int64, device=query.device)
    taken += operands_inside(score_mod, score, *[place] * 4)
    return taken + operands_inside(block_mask[-1], *[place] * 4)


def operands_inside(modification: Callable[..., Tensor], *numbers: Tensor) -> list[Tensor]:
    """Return the operands of all operations that a score_mod or mask_mod runs on these numbers."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    taken: list[Tensor] = []
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        # As PyTorch does, run the first mode, so that indexing does not read the value of an index.
        with TransformGetItemToIndex(), _Taking(taken):
            modification(*numbers)
    return taken


class _Taking(TorchFunctionMode):
    """Notes the operands of all operations that run."""

    def __init__(self, taken: list[Tensor]):
        super().__init__()
        self._taken = taken

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self._taken += operands_of(args, kwargs or {})
        return func(*args, **kwargs or {})
