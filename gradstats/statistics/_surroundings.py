"""Attributes and containers of modules, and restoring them."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from gradstats.capture.parameters._attributes import PLAIN_TYPES

CONTAINERS = (OrderedDict, dict, list, set, deque)
SEARCHED = (tuple, *CONTAINERS)


class Surroundings:
    """Which attributes modules have, and what lists, dicts, sets and deques there hold.

    Among them are their parts, tensors and hooks: a forward may register others. Tensors are not
    copied: what is written into them stays.
    """

    def __init__(self, model: nn.Module):
        # All but the mode.
        self._attributes = [
            (module, {name: value for name, value in vars(module).items() if name != "training"})
            for module in ordinary_modules(model)
        ]
        every = (value for _, kept in self._attributes for value in kept.values())
        self._contents = contents_of(every)

    def restore(self) -> None:
        """Restore everything that has changed."""
        for module, kept in self._attributes:
            return_to(vars(module), {"training": module.training, **kept})
        refill(self._contents)


def ordinary_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules that hold themselves what they hold, unlike those of TorchScript."""
    return [each for each in model.modules() if not isinstance(each, torch.jit.ScriptModule)]


def return_to(now: dict[str, Any], then: dict[str, Any]) -> None:
    """Have a dictionary hold what it did."""
    for name in now.keys() - then.keys():
        del now[name]
    now.update(then)


def contents_of(items: Iterable[Any]) -> list[tuple[Any, Any]]:
    """Return the containers among some values and inside of these, each with a copy."""
    return [(each, _kind(each)(each)) for each in _containers_in(items)]


def _containers_in(items: Iterable[Any]) -> Iterator[Any]:
    """Yield the containers among some values and inside of these, each once."""
    pending, met = list(items), set()
    while pending:
        item = pending.pop()
        if not issubclass(type(item), SEARCHED) or id(item) in met:
            continue
        met.add(id(item))  # a container may hold itself
        if not isinstance(item, tuple):
            yield item
        entries = item.values() if isinstance(item, dict) else item
        if not PLAIN_TYPES.issuperset(map(type, entries)):
            pending += entries


def refill(contents: Iterable[tuple[Any, Any]]) -> None:
    """Have containers that have changed hold what they did, as ``contents_of`` returned it."""
    for container, content in contents:
        if _identities(container) != _identities(content):
            kind = _kind(container)  # not by methods of its own, which may refuse to
            kind.clear(container)
            (kind.extend if kind in (list, deque) else kind.update)(container, content)


def _kind(container: Any) -> Any:
    """Return a class to copy and refill by: the user's may lack methods or have others."""
    own = type(container)
    return own if own in CONTAINERS else next(k for k in CONTAINERS if issubclass(own, k))


def _identities(container: Any) -> list[int]:
    """Return what tells whether a container holds the same objects in the same order."""
    values = container.values() if isinstance(container, dict) else ()
    return [*map(id, container), *map(id, values)]
