"""Memory that data were written into, and all tensors that share it."""

from __future__ import annotations

import torch
from torch import Tensor


class WrittenMemory:
    """Storages of constants that data were written into.

    Attributes:
        storages: by address; kept alive, since the address of a freed one might be reused. Callers
            read it directly, as they check at every operation whether it is empty.
    """

    def __init__(self) -> None:
        self.storages: dict[int, torch.UntypedStorage] = {}

    def __contains__(self, tensor: Tensor) -> bool:
        storage = storage_of(tensor)
        return storage is not None and storage._cdata in self.storages

    def add(self, tensor: Tensor) -> None:
        storage = storage_of(tensor)
        if storage is not None:
            self.storages[storage._cdata] = storage

    def discard(self, tensor: Tensor) -> None:
        storage = storage_of(tensor)
        if storage is not None:
            self.storages.pop(storage._cdata, None)

    def clear(self) -> None:
        self.storages.clear()


class RearrangedMemory:
    """Writes that moved the examples of a tensor, for the other tensors that share its memory.

    Attributes:
        count: number of these writes.
        storages: by address: a storage, and for each range of its bytes that was written to, the
            number of the last write.
    """

    def __init__(self) -> None:
        self.count = 0
        self.storages: dict[int, tuple[torch.UntypedStorage, dict[tuple[int, int], int]]] = {}

    def add(self, tensor: Tensor) -> None:
        storage = storage_of(tensor)
        if storage is not None:
            self.count += 1
            _, times = self.storages.setdefault(storage._cdata, (storage, {}))
            times[_range_of(tensor)] = self.count

    def touched(self, tensor: Tensor, since: int) -> bool:
        """Whether memory of a tensor was written to after the first ``since`` writes."""
        storage = storage_of(tensor)
        found = None if storage is None else self.storages.get(storage._cdata)
        if found is None:
            return False
        first, last = _range_of(tensor)
        return any(
            time > since and first < stop and start < last
            for (start, stop), time in found[1].items()
        )

    def clear(self) -> None:
        self.storages.clear()


def unwrapped(tensor: Tensor) -> Tensor:
    """Return a tensor as it is outside the transforms of torch.func."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """Return the storage of a tensor; None for layouts without one, such as sparse tensors."""
    tensor = unwrapped(tensor)
    return tensor.untyped_storage() if tensor.layout == torch.strided else None


def wraps_others(tensor: Tensor) -> bool:
    """Whether a tensor's values are held by other tensors, as in torchao's quantised weights.

    Such wrapper subclasses have a storage without memory: reading its address fails, and copying it
    crashes the process.
    """
    return tensor.layout == torch.strided and hasattr(tensor, "__tensor_flatten__")


def parts_of(tensor: Tensor) -> list[Tensor]:
    """Return the tensors that hold a tensor's values: itself, unless it wraps others."""
    if not wraps_others(tensor):
        return [tensor]
    held = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]  # type: ignore[attr-defined]
    # A DTensor names its mesh as well.
    return [part for each in held if isinstance(each, Tensor) for part in parts_of(each)]


def _range_of(tensor: Tensor) -> tuple[int, int]:
    """Return the range of bytes of its storage that a tensor's elements span."""
    tensor = unwrapped(tensor)
    if tensor.numel() == 0:
        return 0, 0
    first = int(tensor.storage_offset())
    return first * tensor.itemsize, (first + int(extent(tensor)) + 1) * tensor.itemsize


def extent(tensor: Tensor) -> int:
    """Return the distance in memory between a tensor's first and last element."""
    return sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
