"""What modules hold beside their parameters, put back as it was: buffers and plain attributes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import nn

from gradstats.capture._attributes import PLAIN_TYPES, STANDARD_ATTRIBUTES


class Surroundings:
    """Which buffers and plain attributes modules have, and what lists, dicts and sets there hold.

    Tensors are not copied: what is written into them stays.

    Args:
        modules: those of TorchScript hold what they hold elsewhere.
    """

    def __init__(self, modules: Sequence[nn.Module]):
        # A forward may assign or register others.
        self._buffers = [
            (module, dict(module._buffers), set(module._non_persistent_buffers_set))
            for module in modules
        ]
        self._attributes = [(module, plain_attributes(module)) for module in modules]
        every = (value for _, kept in self._attributes for value in kept.values())
        self._contents = [(each, _content(each)) for each in _containers(every)]

    def restore(self) -> None:
        """Put everything back where something else stands now."""
        for module, named, transient in self._buffers:
            for name in module._buffers.keys() - named.keys():
                del module._buffers[name]
            module._buffers.update(named)
            module._non_persistent_buffers_set.clear()
            module._non_persistent_buffers_set.update(transient)
        for module, kept in self._attributes:
            for name in plain_attributes(module).keys() - kept.keys():
                del vars(module)[name]
            vars(module).update(kept)
        for container, content in self._contents:
            if _entries(container) != _entries(content):
                if isinstance(container, list):
                    container[:] = content
                else:
                    container.clear()
                    container.update(content)


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the plain attributes of a module: no parameters, buffers, modules, modes or hooks."""
    return {name: value for name, value in vars(module).items() if name not in STANDARD_ATTRIBUTES}


def _containers(items: Iterable[Any]) -> Iterator[Any]:
    """Yield the lists, dicts and sets among some values and inside of these, each once."""
    pending, met = list(items), set()
    while pending:
        item = pending.pop()
        if not isinstance(item, (list, tuple, dict, set)) or id(item) in met:
            continue
        met.add(id(item))  # a container may hold itself
        if not isinstance(item, tuple):
            yield item
        entries = item.values() if isinstance(item, dict) else item
        if not PLAIN_TYPES.issuperset(map(type, entries)):
            pending += entries


def _content(container: Any) -> Any:
    """Return a copy; not by ``copy()``, which a class of the user's may lack or have otherwise."""
    kind = next(kind for kind in (dict, list, set) if isinstance(container, kind))
    return kind(container)


def _entries(container: Any) -> list[Any]:
    """Return what tells whether a container holds the same objects in the same order."""
    if isinstance(container, dict):
        return [(key, id(value)) for key, value in container.items()]
    return list(map(id, container))
