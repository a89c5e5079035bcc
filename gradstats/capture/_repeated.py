"""What following came to for one operation, noted again for the next one like it.

A model's layers do the same to operands of the same form, step after step. Two operations are alike
where everything agrees that following reads: the function and its arguments, and of each tensor the
form, whose its rows are and whether it has a gradient. What reads numbers, or finds more than that
a result is constant or in which rows its examples lie, is followed each time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gradstats.capture._data import Data
from gradstats.capture._dispatch import IN_PLACE
from gradstats.capture._examples import Examples
from gradstats.capture._layout import FOLLOWED
from gradstats.capture._marks import CONSTANTS
from gradstats.capture._operations import BLANKS, CALLERS_VALUES, FACTORIES, variants
from gradstats.capture._reductions import QUANTILES
from gradstats.capture._reindexed import REINDEXES
from gradstats.capture._sequences import PRESCRIBES
from gradstats.capture._tensors import TRACKED_TYPES, node_of
from gradstats.capture._writes import WRITES

# Operations that pick rows by numbers among their arguments, not in tensors.
REINDEXES_BY_NUMBERS = frozenset(
    variants(
        "chunk", "split", "split_with_sizes", "unbind", "narrow", "select", "expand", "expand_as",
        "broadcast_to", "repeat", "tile", "flip", "roll",
    )
) | {Tensor.__getitem__}  # fmt: skip

# Operations whose results lie as forms say, of which nothing else is noted.
REPEATABLE = FOLLOWED.difference(
    REINDEXES.keys() - REINDEXES_BY_NUMBERS, WRITES, IN_PLACE, PRESCRIBES, QUANTILES, FACTORIES,
    BLANKS, CALLERS_VALUES,
)  # fmt: skip

# Types of arguments that are equal where they say the same.
VALUES = frozenset(
    {int, bool, str, type(None), type(...), torch.Size, torch.dtype, torch.device, torch.layout,
     torch.memory_format}
)  # fmt: skip

# What may be noted of a tensor beside where its examples lie.
NOTHING, CONSTANT = "nothing", "constant"

# What was noted of the results of operations that are alike. All is forgotten before it is much.
NOTED: dict[tuple[Any, ...], tuple[Examples | str, ...]] = {}
MOST = 8192


class Repeated(Data):
    """Data of one batch, of which an operation is followed once where it is done often."""

    def likeness(
        self, func, args: tuple[Any, ...], kwargs: dict[str, Any], result
    ) -> tuple[tuple[Any, ...], list[Tensor]] | None:
        """Return all that following an operation reads, and what is new among its results.

        None where it may read more than can be said in short.
        """
        if func not in REPEATABLE or self._written or self.packed:
            return None
        constants = self._constants
        key: list[Any] = [func, self.batch_size, self.batch_dim, self.follows_layouts, len(args)]
        if kwargs:
            key.append((*kwargs,))
        operands: list[Tensor] = []
        try:
            for item in (*args, *kwargs.values()) if kwargs else args:
                kind = type(item)
                # Most arguments are of these; a call for each would take longer than the rest.
                if kind is Tensor:
                    known = id(item) in constants or id(item) in CONSTANTS
                    note: Any = CONSTANT if known else NOTHING
                    if item.__dict__:
                        note = self._note_of(item)
                        if note is None:
                            return None
                    key += (note, item.shape, item.stride(), item.requires_grad)
                    operands.append(item)
                elif kind in VALUES:
                    key += (kind, item)
                elif not self._add_argument(item, key, operands):
                    return None
            if not operands or (func is Tensor.__getitem__ and len(operands) > 1):
                return None  # numbers in an index
            results: list[Tensor] = []
            for item in (result,) if isinstance(result, Tensor) else result:
                if item is operands[0]:
                    key.append(NOTHING)  # it stays what it is
                elif type(item) is not Tensor or item.__dict__:
                    return None
                elif id(item) in constants or id(item) in CONSTANTS:
                    return None
                else:
                    key += (item.shape, item.stride(), item.requires_grad)
                    results.append(item)
        except RuntimeError:
            return None  # a layout without strides
        # Which of several tensors one is may decide.
        if len(operands) > 1:
            every = operands + results
            if len({*map(id, every)}) < len(every):
                return None
        return tuple(key), results

    def _add_argument(self, item: Any, key: list[Any], operands: list[Tensor]) -> bool:
        """Add what following may read of an argument; return whether that is all."""
        kind = type(item)
        if kind is Tensor:
            note = self._note_of(item)
            if note is None:
                return False
            key += (note, item.shape, item.stride(), item.requires_grad)
            operands.append(item)
        elif kind in VALUES:
            key += (kind, item)
        elif kind is tuple or kind is list:
            key += (kind, len(item))
            return all(self._add_argument(each, key, operands) for each in item)
        elif kind is slice:
            key.append(kind)
            ends = item.start, item.stop, item.step
            return all(self._add_argument(each, key, operands) for each in ends)
        elif kind is nn.Parameter:
            key += (kind, item.shape, item.stride(), item.requires_grad)
            operands.append(item)
        elif kind in TRACKED_TYPES:
            if node_of(item) is None:
                return False
            with torch._C.DisableTorchFunctionSubclass():
                key += (kind, item.shape)
            operands.append(item)
        else:
            key.append(kind)
            return kind is float  # of which no number says where examples lie
        return True

    def _note_of(self, tensor: Tensor) -> tuple[int, ...] | str | None:
        """Return what was noted of a tensor; None where that is more than can be said in short."""
        notes = tensor.__dict__
        constant = id(tensor) in self._constants or id(tensor) in CONSTANTS
        if not notes:
            return CONSTANT if constant else NOTHING
        constant |= "_gradstats_constant" in notes
        mark = notes.get("_gradstats_layout")
        if mark is None or mark[0] != self.serial:
            return CONSTANT if constant else NOTHING
        owned = mark[1]
        if constant or type(owned) is not Examples or owned.segments is not None:
            return None
        return owned.batch, owned.axis, owned.fold

    @property
    def noted(self) -> tuple[int, int]:
        """How many tensors were marked, and in how many nodes examples met."""
        return len(self._marked), len(self.coupled)

    def remember(
        self, key: tuple[Any, ...], results: list[Tensor], before: tuple[int, int]
    ) -> None:
        """Remember what was noted of the results of an operation, where it can be said in short.

        Args:
            key: what the operation is like.
            results: what is new among them.
            before: what had been noted before it.
        """
        marked, coupled = before
        found: list[Examples | str] = []
        for tensor in results:
            notes = tensor.__dict__
            layout = notes["_gradstats_layout"][1] if "_gradstats_layout" in notes else None
            if layout is not None and len(notes) == 1 and self._note_of(tensor) is not None:
                found.append(layout)
                marked += 1
            elif not notes or notes.keys() == {"_gradstats_constant"}:
                found.append(CONSTANT if notes or id(tensor) in CONSTANTS else NOTHING)
            else:
                return
        if (marked, coupled) != self.noted:
            return
        if len(NOTED) >= MOST:
            NOTED.clear()
        NOTED[key] = () if found.count(NOTHING) == len(found) else tuple(found)

    def note_again(self, results: list[Tensor], found: tuple[Examples | str, ...]) -> None:
        """Note of results what was noted of those of an operation that was alike."""
        for tensor, note in zip(results, found, strict=True):
            if note is CONSTANT:
                self.mark_constant(tensor)
            elif note is not NOTHING:
                self._mark(tensor, note)
