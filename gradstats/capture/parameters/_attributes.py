"""The tensors in plain attributes of modules, which are neither parameters nor buffers."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterable
from functools import _lru_cache_wrapper, partial
from itertools import filterfalse
from types import FunctionType
from typing import Any

from torch import Tensor, nn

from gradstats.capture.parameters._tensors import DerivedTensor, unwrap

# The attributes that every module has.
STANDARD_ATTRIBUTES = frozenset(vars(nn.Module()))

# Types of entries without tensors, so that containers of them, such as long vocabularies, need not
# be searched.
PLAIN_TYPES = frozenset({int, float, str, bool, type(None)})

# Types of entries that are not searched.
NOT_SEARCHED = PLAIN_TYPES | {type, FunctionType}

# Types that are searched.
HOLDERS = (list, tuple, dict, deque, partial, _lru_cache_wrapper)

# Types found to be neither tensors nor holders, so that ``issubclass``, which may run code of the
# class, is asked once. Emptied when it has ``MOST_OPAQUE``.
OPAQUE: set[type] = set()
MOST_OPAQUE = 4096


def kept_by(module: nn.Module) -> dict[str, Any]:
    """Return the plain attributes of a module that may hold tensors, by name."""
    attributes = module.__dict__
    found = {}
    for name in filterfalse(STANDARD_ATTRIBUTES.__contains__, attributes):
        held = attributes[name]
        kind = type(held)
        if kind in PLAIN_TYPES or (kind is tuple and PLAIN_TYPES.issuperset(map(type, held))):
            continue  # as sizes and strides are
        found[name] = held
    return found


def tensors_kept(attribute: Any) -> list[Tensor]:
    """Return the tensors of an attribute: itself, or what it holds in containers and caches.

    A cache that was given tensors is left out: what it returned may belong to a batch. Each
    container and cache is searched once, since many functions of a library share a few caches.
    """
    found: list[Tensor] = []
    searched: set[int] = set()
    pending = [attribute]
    while pending:
        item = pending.pop()
        kind = type(item)
        if kind in OPAQUE:
            continue
        if issubclass(kind, Tensor):
            if not isinstance(item, nn.Parameter):
                found.append(item)
        elif not issubclass(kind, HOLDERS):
            if len(OPAQUE) >= MOST_OPAQUE:
                OPAQUE.clear()
            OPAQUE.add(kind)
        elif (number := id(item)) not in searched:
            searched.add(number)  # a container may hold itself
            if issubclass(kind, partial):
                pending += (item.func, item.args, item.keywords)
            elif kind is _lru_cache_wrapper:
                held = gc.get_referents(item)  # among others a dict, arguments → result
                arguments = [key for each in held if type(each) is dict for key in each]
                if not (arguments and tensors_kept(arguments)):
                    pending += _possible_holders(held)
            else:
                pending += _possible_holders(item.values() if issubclass(kind, dict) else item)
    return found


def _possible_holders(entries: Iterable[Any]) -> list[Any]:
    """Return the entries that may be tensors, or hold some."""
    if NOT_SEARCHED.issuperset(map(type, entries)):
        return []  # long vocabularies take no loop in Python
    return [e for e in entries if type(e) not in NOT_SEARCHED and type(e) not in OPAQUE]


def keep_derived(modules: Iterable[nn.Module]) -> bool:
    """Whether modules keep a derived tensor in a buffer, an attribute or a container there."""
    kept: list[Any] = []
    for module in modules:
        kept += kept_by(module).values()
        if module._buffers:
            kept += module._buffers.values()
    return _holds_derived(kept)


def _holds_derived(attribute: Any) -> bool:
    return any([isinstance(leaf, DerivedTensor) for leaf in tensors_kept(attribute)])


def restore_attributes(module: nn.Module) -> None:
    """Replace the derived tensors that a forward, or a hook in it, left by plain ones."""
    for name, held in kept_by(module).items():
        if _holds_derived(held):
            vars(module)[name] = _unwrapped(held, set())
    for name, buffer in module._buffers.items():
        module._buffers[name] = unwrap(buffer)


def _unwrapped(item: Any, visited: set[int]) -> Any:
    """Return an attribute with plain tensors for the derived ones, which it replaces in place.

    Args:
        item: the attribute, or something inside it. A tuple is replaced as a whole.
        visited: ids of the containers seen so far; a container may hold itself.
    """
    if isinstance(item, (list, dict, deque)):
        if id(item) not in visited:
            visited.add(id(item))
            for key in item if isinstance(item, dict) else range(len(item)):
                item[key] = _unwrapped(item[key], visited)
        return item
    if isinstance(item, tuple):
        entries = [_unwrapped(entry, visited) for entry in item]
        if all(new is old for new, old in zip(entries, item, strict=True)):
            return item
        return type(item)(*entries) if hasattr(item, "_fields") else tuple(entries)
    return unwrap(item)
