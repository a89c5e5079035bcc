"""The attributes of modules and the containers in these, and restoring them."""

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
    """Which attributes modules have, and what the lists, dicts, sets and deques in them hold.

    Submodules, parameters, buffers and hooks are among these, since a forward may register others.
    Tensors are not copied, so numbers written into them stay.
    """

    def __init__(self, model: nn.Module):
        # Everything but the training mode.
        self._attributes = [
            (module, {name: value for name, value in vars(module).items() if name != "training"})
            for module in ordinary_modules(model)
        ]
        every = (value for _, kept in self._attributes for value in kept.values())
        self._contents = contents_of(every)

    def restore(self) -> None:
        """Restore all attributes and containers."""
        for module, kept in self._attributes:
            return_to(vars(module), {"training": module.training, **kept})
        refill(self._contents)


def ordinary_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules that are Python objects throughout, unlike those of TorchScript."""
    return [each for each in model.modules() if not isinstance(each, torch.jit.ScriptModule)]


def return_to(current: dict[str, Any], earlier: dict[str, Any]) -> None:
    """Make a dictionary hold what it held earlier."""
    for name in current.keys() - earlier.keys():
        del current[name]
    current.update(earlier)


def contents_of(items: Iterable[Any]) -> list[tuple[Any, Any]]:
    """Return the containers among and inside some values, each with a copy of what it holds."""
    return [(each, _kind(each)(each)) for each in _containers_in(items)]


def _containers_in(items: Iterable[Any]) -> Iterator[Any]:
    """Yield the containers among and inside some values, each once."""
    pending, seen = list(items), set()
    while pending:
        item = pending.pop()
        if not issubclass(type(item), SEARCHED) or id(item) in seen:
            continue
        seen.add(id(item))  # a container may hold itself
        if not isinstance(item, tuple):
            yield item
        entries = item.values() if isinstance(item, dict) else item
        if not PLAIN_TYPES.issuperset(map(type, entries)):
            pending += entries


def refill(contents: Iterable[tuple[Any, Any]]) -> None:
    """Make containers hold again what ``contents_of`` found in them."""
    for container, content in contents:
        if _identities(container) != _identities(content):
            kind = _kind(container)  # a subclass may have methods that refuse to
            kind.clear(container)
            (kind.extend if kind in (list, deque) else kind.update)(container, content)


def _kind(container: Any) -> Any:
    """Return the class whose methods copy and refill a container; a subclass may change them."""
    kind = type(container)
    return kind if kind in CONTAINERS else next(k for k in CONTAINERS if issubclass(kind, k))


def _identities(container: Any) -> list[int]:
    """Return the ids of what a container holds, in order."""
    values = container.values() if isinstance(container, dict) else ()
    return [*map(id, container), *map(id, values)]
