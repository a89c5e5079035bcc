"""The protocol of all factors, and what they have in common."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor


class Factor(Protocol):
    """A description of the per-example gradients of one parameter."""

    @property
    def batch(self) -> int:
        """The number of examples B."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the parameter."""

    def select(self, rows) -> Factor:
        """Return the factor of some of the examples, given as a slice or as distinct indices."""

    def dense(self) -> Tensor:
        """Return the per-example gradients themselves, (B, *shape).

        This is the definition that every contraction agrees with. Call it on a few examples.
        """

    @property
    def granule(self) -> int:
        """How many neighbouring rows of the parameter ``narrow`` must keep together; 0 for all."""

    def narrow(self, start: int, stop: int) -> Factor:
        """Return the factor of rows start … stop of the parameter, multiples of the granule."""


class Undivided:
    """A factor that cannot form some rows of the gradient without the others."""

    granule = 0

    def narrow(self, start: int, stop: int) -> Factor:
        raise NotImplementedError


class Changed:
    """Base of dataclasses whose gradients are computed from an inner factor's, one by one.

    Shape and granule are the inner factor's, unless a class has its own.
    """

    inner: Any

    @property
    def batch(self) -> int:
        return self.inner.batch

    @property
    def shape(self) -> tuple[int, ...]:
        return self.inner.shape

    @property
    def granule(self) -> int:
        return self.inner.granule

    def select(self, rows) -> Any:
        return replace(self, inner=self.inner.select(rows))  # type: ignore[type-var]


def selected(rows, batch: int) -> Tensor:
    """Return the indices of the examples given to ``select``, (n,) int64 on the CPU."""
    return torch.arange(batch)[rows.cpu() if isinstance(rows, Tensor) else rows]


def elements_of(factor: Factor) -> int:
    """Return how many numbers are written to form the gradient of one example."""
    return getattr(factor, "elements", math.prod(factor.shape))


def tensors_of(factor) -> list[Tensor]:
    """Return the tensors that a factor holds."""
    values = [getattr(factor, field.name) for field in fields(factor)]
    values += [item for value in values if isinstance(value, tuple) for item in value]
    nested = [tensor for value in values if is_dataclass(value) for tensor in tensors_of(value)]
    return [value for value in values if isinstance(value, Tensor)] + nested


def map_tensors(factor, change: Callable[[Tensor], Tensor]):
    """Return a factor with every tensor that it holds replaced by ``change(tensor)``."""
    changed: dict[str, Any] = {}
    for field in fields(factor):
        value = getattr(factor, field.name)
        if isinstance(value, Tensor):
            changed[field.name] = change(value)
        elif is_dataclass(value):
            changed[field.name] = map_tensors(value, change)
        elif isinstance(value, tuple) and any(map(is_dataclass, value)):
            changed[field.name] = tuple(map_tensors(item, change) for item in value)
    return replace(factor, **changed)


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``tensor.to(dtype)``, saving the call if the dtype is right."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device, without waiting for the copy unless the host may read it."""
    return tensor.to(device, non_blocking=device.type != "cpu")


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """Return the accumulation dtype: float64 where any input is float64, else float32."""
    for tensor in tensors:
        if tensor.dtype == torch.float64:
            return torch.float64
    return torch.float32
