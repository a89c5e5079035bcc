"""Side effects of a forward, and undoing them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from gradstats._comparison import same_bits
from gradstats.capture.parameters._attributes import keep_derived
from gradstats.capture.parameters._tensors import DerivedTensor
from gradstats.statistics._surroundings import Surroundings, contents_of, refill, return_to


class RandomNumbers:
    """The global random generators of Python, NumPy, and PyTorch on some devices."""

    def __init__(self, devices: Iterable[torch.device]):
        self._python, self._numpy = random.getstate(), numpy.random.get_state()
        self._torch = torch.get_rng_state()
        self._devices = [
            (device, torch.get_device_module(device).get_rng_state(device))
            for device in set(devices)
            if device.type not in ("cpu", "meta")
        ]

    def restore(self) -> None:
        """Restore the state of the generators at construction."""
        random.setstate(self._python)
        numpy.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        for device, state in self._devices:
            torch.get_device_module(device).set_rng_state(state, device)


@contextmanager
def random_numbers_kept(*devices: torch.device) -> Iterator[None]:
    """Restore the random generators of the host and of devices after a block."""
    numbers = RandomNumbers(devices)
    try:
        yield
    finally:
        numbers.restore()


class Versions:
    """The version counters of some tensors."""

    def __init__(self, tensors: Iterable[Tensor]):
        self._tensors = list(tensors)
        self._then = self._now()

    def _now(self) -> list[int | None]:
        return list(map(_version_of, self._tensors))

    @property
    def changed(self) -> bool:
        """Whether one of the tensors has been written into since."""
        return self._now() != self._then


def _version_of(tensor: Tensor) -> int | None:
    try:
        return tensor._version
    except RuntimeError:  # inference tensors have no version counter
        return None


class Start:
    """The state before a forward that may have to run again; cheaper than ``State``.

    It restores the host's random generator and which attributes and buffers modules have. No tensor
    is copied: if one was written into, that is noticed but cannot be undone.

    Args:
        modules: the model and all in it.
        attributes: the values of their plain attributes that may hold tensors.
        kept: the tensors that the modules keep.
    """

    def __init__(
        self, modules: Iterable[nn.Module], attributes: Iterable[Any], kept: Iterable[Tensor]
    ):
        self._versions = Versions(kept)
        self._numbers = torch.get_rng_state()
        self._held = [
            (module, vars(module).copy(), module._buffers.copy())
            for module in modules
            if type(module._buffers) is dict  # not one of TorchScript
        ]
        self._contents = contents_of(attributes)

    def drop_derived(self) -> bool:
        """Restore the modules if some of them keep tensors that this call derived from parameters.

        A model may cache what it computes from its weights. The next forward would find the cache,
        through which no gradient reaches the weights. But other attributes, or numbers written into
        buffers, may record that the cache is filled: where those cannot be restored, it stays too.

        Returns:
            Whether no derived tensor is left.
        """
        if not keep_derived([module for module, _, _ in self._held]):
            return True
        for module, _, buffers in self._held:
            for name, now in module._buffers.items():
                if now is not buffers.get(name) and not isinstance(now, DerivedTensor):
                    return False
        return self._return()

    def restore(self) -> bool:
        """Restore the state; do nothing and return False if kept tensors were written into."""
        if not self._return():
            return False
        torch.set_rng_state(self._numbers)
        return True

    def _return(self) -> bool:
        """Do the same, except for the random generator."""
        if self._versions.changed:
            return False
        refill(self._contents)
        for module, attributes, buffers in self._held:
            return_to(vars(module), attributes)
            return_to(module._buffers, buffers)
        return True


class Contents:
    """The numbers in the tensors of a batch, into which a loss function may write."""

    def __init__(self, tensors: Iterable[Tensor]):
        self._values = [(tensor, _unexpanded(tensor.detach()).clone()) for tensor in tensors]
        self._versions = self._now()

    def _now(self) -> Versions:
        return Versions(tensor for tensor, _ in self._values)

    @property
    def changed(self) -> bool:
        """Whether other numbers have been written into one of the tensors since."""
        return self._versions.changed and not all(
            same_bits(_unexpanded(tensor), value) for tensor, value in self._values
        )

    def restore(self) -> None:
        """Write back, in place, what was written over."""
        if self._versions.changed:
            with torch.no_grad():
                for tensor, value in self._values:
                    numbers = _unexpanded(tensor)
                    if numbers.shape == value.shape and not same_bits(numbers, value):
                        numbers.copy_(value)
            self._versions = self._now()


def _unexpanded(tensor: Tensor) -> Tensor:
    """Return a view of a tensor that shows each number once, as before ``expand``."""
    if tensor.layout is torch.strided and not tensor.is_nested:
        for axis, stride in enumerate(tensor.stride()):
            if stride == 0:
                tensor = tensor.narrow(axis, 0, min(tensor.shape[axis], 1))
    return tensor


def shortened_tables(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Return the embedding tables whose rows a look-up renormalises in place (``max_norm``)."""
    return [
        module.weight
        for module in modules
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None
    ]


class State:
    """What a loss may change as a side effect: generators, attributes, buffers, tables, its batch.

    After ``restore`` the next forward is the same as the first one after construction.

    Args:
        model: the model.
        beside: other modules that the loss uses.
        batch: the tensors of its batch.
    """

    def __init__(
        self,
        model: nn.Module,
        beside: Iterable[nn.Module] = (),
        batch: Iterable[Tensor] = (),
    ):
        modules = [inner for each in (model, *beside) for inner in each.modules()]
        self._buffers = [
            (module, name, buffer, buffer.detach().clone())
            for module in modules
            for name, buffer in module._buffers.items()
            if buffer is not None and buffer.is_leaf  # not one computed from parameters
        ]
        self._tables = [(table, table.detach().clone()) for table in shortened_tables(modules)]
        self._surroundings = [Surroundings(each) for each in (model, *beside)]
        self._batch = Contents(batch)
        kept = (each for module in modules for each in (module._parameters, module._buffers))
        tensors = (tensor for each in kept for tensor in each.values())
        self._numbers = RandomNumbers(tensor.device for tensor in tensors if tensor is not None)

    def restore(self, *, generators: bool = True, attributes: bool = True) -> None:
        """Restore everything, tensors in place; generators and attributes unless told not to."""
        if attributes:
            for surroundings in self._surroundings:
                surroundings.restore()
        with torch.no_grad():
            for module, name, buffer, value in self._buffers:
                module._buffers[name] = buffer
                if not same_bits(buffer, value):
                    buffer.copy_(value)
            for table, value in self._tables:
                if not same_bits(table, value):
                    table.copy_(value)
        self._batch.restore()
        if generators:
            self._numbers.restore()
