"""Hashes of what batches and checkpoints hold: equal where the contents are, pickling nothing."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import hashlib
import pathlib
from collections.abc import Mapping, Set
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradstats.capture.operations._memory import parts_of, wraps_others

# Their repr says everything that they hold.
PLAIN = (
    str, bytes, bytearray, bool, int, float, complex, type(None), range, slice, enum.Enum,
    decimal.Decimal, datetime.date, datetime.time, datetime.timedelta, pathlib.PurePath,
    torch.Size, torch.dtype, torch.device,
)  # fmt: skip


class ContentHash:
    """A SHA-256 over nested containers of tensors, arrays and plain values.

    Args:
        elements: of each larger tensor or array about so many elements, evenly spread, stand for
            all; None for every one.

    Attributes:
        unread: names of the types of values whose contents are not known; these types count, the
            values do not.
    """

    def __init__(self, elements: int | None = None):
        self._digest = hashlib.sha256()
        self._elements = elements
        self.unread: set[str] = set()

    def add(self, value: Any) -> None:
        """Feed a value with everything that it holds."""
        if isinstance(value, Tensor) and value.is_nested:
            self.add(value.unbind())
        elif isinstance(value, Tensor) and wraps_others(value):
            self._say("wrapper", type(value).__name__, tuple(value.shape), value.dtype)
            self.add(parts_of(value))
        elif isinstance(value, Tensor):
            self._say("tensor", tuple(value.shape), value.dtype)
            dense = value.detach() if value.layout == torch.strided else value.detach().to_dense()
            flat = dense.reshape(-1)
            flat = flat[:: self._step(flat.numel())].to("cpu").resolve_conj().resolve_neg()
            self._digest.update(flat.contiguous().view(torch.uint8).numpy().data)
        elif isinstance(value, (np.ndarray, np.generic)):
            self._add_array(np.asarray(value))
        elif isinstance(value, PLAIN):
            self._say(type(value).__name__, repr(value))
        elif isinstance(value, Mapping) or _is_readable(value):
            keys = list(value.keys())
            self._say("mapping", len(keys))
            for key in keys:
                self.add(key)
                self.add(value[key])
        elif isinstance(value, (tuple, list)):
            self._say("sequence", len(value))
            for item in value:
                self.add(item)
        elif isinstance(value, Set):
            self._say("set", *sorted(self._apart(item) for item in value))
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            self._say("dataclass", type(value).__name__)
            for field in dataclasses.fields(value):
                self.add(getattr(value, field.name, None))
        else:
            name = type(value).__qualname__
            self._say("unread", name)
            self.unread.add(name)

    def hexdigest(self) -> str:
        """Return the hash of all that was added, in order."""
        return self._digest.hexdigest()

    def _apart(self, item: Any) -> str:
        """Return the hash of one item alone, for items without an order."""
        content = ContentHash(self._elements)
        content.add(item)
        self.unread |= content.unread
        return content.hexdigest()

    def _add_array(self, array: np.ndarray) -> None:
        self._say("array", array.shape, array.dtype)
        if array.dtype.hasobject:
            self.add(array.reshape(-1).tolist())
            return
        flat = array.reshape(-1)
        self._digest.update(np.ascontiguousarray(flat[:: self._step(flat.size)]).tobytes())

    def _step(self, count: int) -> int:
        # Odd, so that rows of an even length are not met at one column alone.
        return 1 if self._elements is None else (count // self._elements) | 1

    def _say(self, *words: Any) -> None:
        # Every entry tells its own length, so that two sequences of entries never read the same.
        text = " ".join(map(str, words)).encode()
        self._digest.update(b"%d:%b" % (len(text), text))


def _is_readable(value: Any) -> bool:
    """Whether ``dict(value)`` would hold all that it offers, as of batches of graphs."""
    instance = not isinstance(value, type)
    return instance and callable(getattr(value, "keys", None)) and hasattr(value, "__getitem__")
