"""Memory that data were written into, whichever tensors show it."""

from __future__ import annotations

import torch
from torch import Tensor


class WrittenMemory:
    """Storages of constants that data were written into.

    They are kept alive: the address of a freed one might be given to another.
    """

    def __init__(self) -> None:
        self._storages: dict[int, torch.UntypedStorage] = {}

    def __bool__(self) -> bool:
        return bool(self._storages)

    def __contains__(self, tensor: Tensor) -> bool:
        storage = storage_of(tensor)
        return storage is not None and storage._cdata in self._storages

    def add(self, tensor: Tensor) -> None:
        storage = storage_of(tensor)
        if storage is not None:
            self._storages[storage._cdata] = storage

    def clear(self) -> None:
        self._storages.clear()


class RearrangedMemory:
    """Writes that put the examples of a tensor elsewhere, for the other tensors that show them.

    Attributes:
        count: how many there were.
    """

    def __init__(self) -> None:
        self.count = 0
        # By the storage's address: it, and when each range of its bytes was written to last.
        self._writes: dict[int, tuple[torch.UntypedStorage, dict[tuple[int, int], int]]] = {}

    def __bool__(self) -> bool:
        return bool(self._writes)

    def add(self, tensor: Tensor) -> None:
        storage = storage_of(tensor)
        if storage is not None:
            self.count += 1
            _, times = self._writes.setdefault(storage._cdata, (storage, {}))
            times[_range_of(tensor)] = self.count

    def touched(self, tensor: Tensor, since: int) -> bool:
        """Whether a tensor shows any of what was written after the first ``since`` writes."""
        storage = storage_of(tensor)
        found = None if storage is None else self._writes.get(storage._cdata)
        if found is None:
            return False
        first, last = _range_of(tensor)
        return any(
            time > since and first < stop and start < last
            for (start, stop), time in found[1].items()
        )

    def clear(self) -> None:
        self._writes.clear()


def unwrapped(tensor: Tensor) -> Tensor:
    """Return a tensor as it is outside the transforms of torch.func."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """Return the storage of a tensor; None for layouts without one, such as sparse tensors."""
    tensor = unwrapped(tensor)
    return tensor.untyped_storage() if tensor.layout == torch.strided else None


def _range_of(tensor: Tensor) -> tuple[int, int]:
    """Return the range of its storage's bytes between which the elements of a tensor lie."""
    tensor = unwrapped(tensor)
    if tensor.numel() == 0:
        return 0, 0
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    last = int(tensor.storage_offset() + sum((size - 1) * stride for size, stride in pairs))
    return int(tensor.storage_offset()) * tensor.itemsize, (last + 1) * tensor.itemsize
