"""Examples in another order than the caller's: what packing sequences of unequal length does.

``pack_padded_sequence`` sorts a batch by length and writes the examples' first steps one after the
other, then their second steps, and so on; ``pad_packed_sequence`` undoes both. Tensors in between
carry the order of their examples, and no layout: parameters other than those of recurrent layers
are refused on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradstats.capture._layout import RECURRENT_LAYERS

if TYPE_CHECKING:
    from gradstats.capture._tracker import Tracker


@dataclass(frozen=True)
class Order:
    """Whose slices a tensor holds.

    Attributes:
        example: (B,) the example that stands in each place.
        axis: the axis of the places; None for packed rows.
    """

    example: Tensor
    axis: int | None

    @property
    def is_identity(self) -> bool:
        return torch.equal(
            self.example, torch.arange(len(self.example), device=self.example.device)
        )


def order_of(tracker: Tracker, tensor: Tensor) -> Order | None:
    """Return the order of a tensor's examples where it is one of its own."""
    owner, order = getattr(tensor, "_gradstats_order", (None, None))
    return order if owner is tracker else None


def follow_order(
    tracker: Tracker, func, args: tuple[Any, ...], kwargs: dict[str, Any], results: Sequence[Tensor]
) -> bool:
    """Note the order of the results of an operation that changes it; False for every other."""
    if func in SELECTS and not kwargs and len(args) == 3:
        source, axis, index = args
        before = _places(tracker, source, axis % source.dim())
        if before is None or index.shape != before.shape:
            return False
        _mark(tracker, results[0], before.to(index.device)[index], axis % source.dim())
        return True
    if func is torch._VF._pack_padded_sequence:
        source, _, batch_first = args
        before = _places(tracker, source, 0 if batch_first else 1)
        results[0]._gradstats_layout = (tracker, None)  # type: ignore[attr-defined]
        tracker.follows_layouts = True
        if before is not None:
            _mark(tracker, results[0], before, None)
        return True
    order = order_of(tracker, args[0]) if args and isinstance(args[0], Tensor) else None
    if order is None or order.axis is not None:
        return False
    if func is torch._VF._pad_packed_sequence:
        _mark(tracker, results[0], order.example, 0 if args[2] else 1)
        return True
    if func in RECURRENT_LAYERS:
        _mark(tracker, results[0], order.example, None)
        for state in results[1:]:
            _mark(tracker, state, order.example, 1)
        return True
    return False


def _places(tracker: Tracker, tensor: Tensor, axis: int) -> Tensor | None:
    """Return the example in each place along an axis, None where it is not known."""
    order = order_of(tracker, tensor)
    if order is not None:
        return order.example if order.axis == axis else None
    layout = tracker.layout_of(tensor)
    if layout is None or layout.axis != axis or layout.fold != 1:
        return None
    return torch.arange(tracker.batch_size, device=tensor.device)


def _mark(tracker: Tracker, tensor: Tensor, example: Tensor, axis: int | None) -> None:
    order = Order(example, axis)
    if axis is not None and order.is_identity:
        tracker.place(tensor, axis)
        return
    tensor._gradstats_order = (tracker, order)  # type: ignore[attr-defined]
    tensor._gradstats_layout = (tracker, None)  # type: ignore[attr-defined]
    tracker.follows_layouts = True


SELECTS = frozenset({Tensor.index_select, torch.index_select})

REORDERED = SELECTS | {torch._VF._pack_padded_sequence, torch._VF._pad_packed_sequence}
