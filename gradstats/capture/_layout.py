"""Where the examples lie in a tensor of data, followed through what the user's code does to it.

By contract data have their examples along the caller's ``batch_dim``. Code that transposes or folds
that axis leaves tensors in which shape alone would mislead: with as many positions as examples a
transposed batch looks like an untransposed one. Such tensors carry their layout with them; where it
is lost, parameters that meet them are refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradstats.capture._einsum import parse_equation


@dataclass(frozen=True)
class Examples:
    """Where the examples of a tensor lie.

    Attributes:
        batch: number of examples B.
        axis: the example axis.
        fold: rows of ``axis`` that belong to one example; rows of one example stand together.
    """

    batch: int
    axis: int
    fold: int = 1

    def first(self, tensor: Tensor) -> Tensor:
        """Return a view of shape (B, *), (B, fold, *) where rows are folded."""
        if self.fold != 1:
            return tensor.unflatten(0, (self.batch, self.fold))
        return tensor if self.axis == 0 else tensor.movedim(self.axis, 0)


def follow(
    func, args: tuple[Any, ...], source: Tensor, layout: Examples | None, result: Tensor
) -> Examples | None:
    """Return the layout of an operation's result, given the layout of its first data operand.

    Args:
        func, args: the operation and its positional arguments.
        source: the operand.
        layout: its layout; None where it is not known.
        result: the operation's result.

    Returns:
        The layout, or None where the operation may have lost it.
    """
    if layout is None:
        return None
    if func is torch.einsum:
        return _contracted(args, source, layout)
    if func is torch.stack:
        dim = (args[1] if len(args) > 1 else 0) % result.dim()
        return Examples(layout.batch, layout.axis + (dim <= layout.axis), layout.fold)
    if func in MOVES:
        return _moved(source, layout, result)
    if func in RESHAPES:
        return _reshaped(source, layout, result)
    if func is Tensor.__getitem__:
        return _indexed(args[1], layout)
    if func in REORDERS or result.dim() <= layout.axis:
        return None
    lead = layout.axis + 1
    return layout if result.shape[:lead] == source.shape[:lead] else None


def _moved(source: Tensor, layout: Examples, result: Tensor) -> Examples | None:
    if layout.fold != 1 and layout.axis != 0:
        return None
    # Strides name the axes: an axis keeps its stride wherever it is moved, and an axis of another
    # stride is another axis. Where two axes share a stride, one of them has size 1 or is expanded.
    stride, size = source.stride(layout.axis), source.shape[layout.axis]
    found = [
        axis
        for axis in range(result.dim())
        if result.stride(axis) == stride and result.shape[axis] == size
    ]
    if len(found) != 1 or (layout.fold != 1 and found[0] != 0):
        return None
    return Examples(layout.batch, found[0], layout.fold)


def _indexed(index, layout: Examples) -> Examples | None:
    """Numbers and slices before the example axis, nothing but a whole slice on it."""
    items = index if isinstance(index, tuple) else (index,)
    if any(not isinstance(item, (int, slice)) or isinstance(item, bool) for item in items):
        return None
    before, own = items[: layout.axis], items[layout.axis : layout.axis + 1]
    if own not in ((), (slice(None),)):
        return None
    dropped = sum(isinstance(item, int) for item in before)
    return Examples(layout.batch, layout.axis - dropped, layout.fold)


def _contracted(args: tuple[Any, ...], source: Tensor, layout: Examples) -> Examples | None:
    """An equation says where the example's index goes."""
    equation, *operands = args
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = list(operands[0])
    if not isinstance(equation, str):
        return None
    inputs, out = parse_equation(equation, [operand.dim() for operand in operands])
    position = next(i for i, operand in enumerate(operands) if operand is source)
    letter = inputs[position][layout.axis]
    return Examples(layout.batch, out.index(letter), layout.fold) if letter in out else None


def _reshaped(source: Tensor, layout: Examples, result: Tensor) -> Examples | None:
    """Reshapes keep the order of elements: examples in front stay in front, folded or not."""
    # With as many elements before it and as many in it, an axis is the same axis.
    before, size = source.shape[: layout.axis].numel(), source.shape[layout.axis]
    for axis in range(result.dim() if size > 1 else 0):
        if result.shape[axis] == size and result.shape[:axis].numel() == before:
            return Examples(layout.batch, axis, layout.fold)
    if result.shape[: layout.axis + 1] == source.shape[: layout.axis + 1]:
        return layout
    rows = result.shape[0] if result.dim() else 0
    if layout.axis != 0 or rows == 0 or rows % layout.batch:
        return None
    return Examples(layout.batch, 0, rows // layout.batch)


def result_axes(func, args: tuple[Any, ...]) -> tuple[int, ...] | None:
    """Return the example axis of each result of an operation that prescribes them.

    Attention and recurrent layers are sequence first, whatever the caller's ``batch_dim``; None for
    every other operation.
    """
    if func is torch.nn.functional.multi_head_attention_forward:
        return (1, 0)
    if func in RECURRENT_CELLS:
        return (0, 0)
    if func in RECURRENT_LAYERS and isinstance(args[3], bool):
        return (0 if args[8] else 1, 1, 1)
    return None


RECURRENT_LAYERS = frozenset({torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu})

RECURRENT_CELLS = frozenset(
    {torch.lstm_cell, torch.gru_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell}
)

PRESCRIBES = RECURRENT_LAYERS | RECURRENT_CELLS | {torch.nn.functional.multi_head_attention_forward}

MOVES = frozenset(
    {
        torch.einsum,
        torch.stack,
        torch.transpose,
        Tensor.transpose,
        torch.swapaxes,
        Tensor.swapaxes,
        torch.swapdims,
        Tensor.swapdims,
        torch.permute,
        Tensor.permute,
        torch.movedim,
        Tensor.movedim,
        torch.moveaxis,
        Tensor.moveaxis,
        torch.t,
        Tensor.t,
        Tensor.T.__get__,  # type: ignore[attr-defined]
        Tensor.mT.__get__,  # type: ignore[attr-defined]
        Tensor.H.__get__,  # type: ignore[attr-defined]
        Tensor.mH.__get__,  # type: ignore[attr-defined]
    }
)

RESHAPES = frozenset(
    {
        Tensor.view,
        Tensor.reshape,
        torch.reshape,
        Tensor.flatten,
        torch.flatten,
        Tensor.unflatten,
        torch.unflatten,
        Tensor.view_as,
        Tensor.reshape_as,
        Tensor.unsqueeze,
        torch.unsqueeze,
        Tensor.squeeze,
        torch.squeeze,
    }
)

# Operations that may put rows in another order while the shape stays.
REORDERS = frozenset(
    {
        Tensor.__getitem__,
        *(
            getattr(owner, name)
            for name in (
                "index_select", "gather", "take", "take_along_dim", "flip", "fliplr", "flipud",
                "roll", "rot90", "sort", "argsort", "msort", "topk", "scatter", "scatter_add",
                "index_add", "index_copy", "index_fill", "index_put", "masked_scatter",
            )
            for owner in (torch, Tensor)
            if hasattr(owner, name)
        ),
    }
)  # fmt: skip
