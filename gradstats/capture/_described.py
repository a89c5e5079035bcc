"""Uses as compiled graphs hold them: one call each, with what describes the use as constants.

What such a call computes is traced below the graph, where Python runs as always: to trace what
Python does, step by step, takes several times as long.
"""

from __future__ import annotations

import sys
from dataclasses import fields
from typing import Any

import torch

# Stands before what a description consists of.
DESCRIBED = "described"


class Described:
    """A base of frozen dataclasses of plain values, tensors and others like them.

    A graph holds them as nested tuples. As the nodes that it would make of dataclasses they could
    be cut off from the call that takes them, where DistributedDataParallel has a graph split.
    """

    __slots__ = ()

    def __fx_create_arg__(self, tracer: Any) -> tuple[Any, ...]:
        kind = type(self)
        own = [tracer.create_arg(getattr(self, field.name)) for field in fields(self)]  # type: ignore[arg-type]
        return (DESCRIBED, kind.__module__, kind.__qualname__, *own)


class InGraph(torch.autograd.Function):
    """A base of autograd Functions whose calls stand in graphs as they are (see ``IN_GRAPHS``)."""

    @classmethod
    def apply(cls, *args: Any) -> Any:  # type: ignore[override]
        return super().apply(*map(restored, args))  # type: ignore[no-untyped-call]


def restored(item: Any) -> Any:
    """Return an argument with the descriptions in it as they were before the graph held them."""
    if isinstance(item, dict):
        return {key: restored(value) for key, value in item.items()}
    if isinstance(item, list):
        return [restored(value) for value in item]
    if not isinstance(item, tuple):
        return item
    if item[:1] != (DESCRIBED,):
        return tuple(restored(value) for value in item)
    _, module, name, *own = item
    return getattr(sys.modules[module], name)(*map(restored, own))
