"""Hashes of the contents of batches and checkpoints, computed without pickling."""

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

# Types whose repr shows their whole value.
PLAIN = (
    str, bytes, bytearray, bool, int, float, complex, type(None), range, slice, enum.Enum,
    decimal.Decimal, datetime.date, datetime.time, datetime.timedelta, pathlib.PurePath,
    torch.Size, torch.dtype, torch.device,
)  # fmt: skip


class ContentHash:
    """A SHA-256 over nested containers of tensors, arrays and plain values.

    Args:
        elements: hash about this many elements, evenly spread, of each larger tensor or array; None
            for all.

    Attributes:
        unread: names of the types of values whose contents cannot be read; of such a value the hash
            covers only the type.
    """

    def __init__(self, elements: int | None = None):
        self._digest = hashlib.sha256()
        self._elements = elements
        self.unread: set[str] = set()

    def add(self, value: Any) -> None:
        """Add a value with everything in it to the hash."""
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
            self._say("set", *sorted(self._hash_of(item) for item in value))
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

    def _hash_of(self, item: Any) -> str:
        """Return the hash of one item alone."""
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
        # Odd: an even step could meet rows of an even length in the same column each time.
        return 1 if self._elements is None else (count // self._elements) | 1

    def _say(self, *words: Any) -> None:
        # With its length: otherwise different sequences of entries could read the same.
        text = " ".join(map(str, words)).encode()
        self._digest.update(b"%d:%b" % (len(text), text))


def _is_readable(value: Any) -> bool:
    """Whether a value can be read like a mapping, as batches of graphs can."""
    instance = not isinstance(value, type)
    return instance and callable(getattr(value, "keys", None)) and hasattr(value, "__getitem__")
