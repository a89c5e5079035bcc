"""The tensors that modules keep in plain attributes: neither parameters nor buffers."""

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

# Types of entries of containers that need not be searched, such as long vocabularies.
PLAIN_TYPES = frozenset({int, float, str, bool, type(None)})

# The same, of what is not searched.
ENDS = PLAIN_TYPES | {type, FunctionType}

# Types of what is searched.
HOLDERS = (list, tuple, dict, deque, partial, _lru_cache_wrapper)

# Types that were met and are none of these, nor tensors': to ask of an object may run code of its
# class, and takes longer. Cleared at ``MOST``.
OTHERS: set[type] = set()
MOST = 4096


def kept_by(module: nn.Module) -> dict[str, Any]:
    """Return the plain attributes of a module that may hold tensors, by name."""
    own = module.__dict__
    found = {}
    for name in filterfalse(STANDARD_ATTRIBUTES.__contains__, own):
        held = own[name]
        kind = type(held)
        if kind in PLAIN_TYPES or (kind is tuple and PLAIN_TYPES.issuperset(map(type, held))):
            continue  # as sizes and strides are
        found[name] = held
    return found


def tensors_kept(attribute: Any) -> list[Tensor]:
    """Return the tensors of an attribute: itself, or what it holds in containers and caches.

    Each container and cache is searched once: many functions of a library use the same few caches.
    Except those of a cache that was given tensors: what it returned may belong to a batch.
    """
    found: list[Tensor] = []
    met: set[int] = set()
    pending = [attribute]
    while pending:
        item = pending.pop()
        kind = type(item)
        if kind in OTHERS:
            continue
        if issubclass(kind, Tensor):
            if not isinstance(item, nn.Parameter):
                found.append(item)
        elif not issubclass(kind, HOLDERS):
            if len(OTHERS) >= MOST:
                OTHERS.clear()
            OTHERS.add(kind)
        elif (number := id(item)) not in met:
            met.add(number)  # a container may hold itself
            if issubclass(kind, partial):
                pending += (item.func, item.args, item.keywords)
            elif kind is _lru_cache_wrapper:
                held = gc.get_referents(item)  # what it was given and returned; keys are the former
                given = [key for each in held if type(each) is dict for key in each]
                if not (given and tensors_kept(given)):
                    pending += _searched(held)
            else:
                pending += _searched(item.values() if issubclass(kind, dict) else item)
    return found


def _searched(entries: Iterable[Any]) -> list[Any]:
    """Return those in which there may be tensors."""
    if ENDS.issuperset(map(type, entries)):
        return []  # as long vocabularies are
    return [each for each in entries if type(each) not in ENDS and type(each) not in OTHERS]


def keep_derived(modules: Iterable[nn.Module]) -> bool:
    """Whether modules keep a derived tensor, as an attribute or buffer or in containers."""
    kept: list[Any] = []
    for module in modules:
        kept += kept_by(module).values()
        if module._buffers:
            kept += module._buffers.values()
    return _holds_derived(kept)


def _holds_derived(attribute: Any) -> bool:
    return any([isinstance(leaf, DerivedTensor) for leaf in tensors_kept(attribute)])


def restore_attributes(module: nn.Module) -> None:
    """Replace derived tensors that a forward (or a hook in it) left by plain ones."""
    for name, held in kept_by(module).items():
        if _holds_derived(held):
            vars(module)[name] = _unwrapped(held, set())
    for name, buffer in module._buffers.items():
        module._buffers[name] = unwrap(buffer)


def _unwrapped(item: Any, met: set[int]) -> Any:
    """Replace the derived tensors in an attribute by plain ones, in place where that is possible.

    Args:
        item: the attribute, or something inside it.
        met: ids of the containers seen so far; a container may hold itself.
    """
    if isinstance(item, (list, dict, deque)):
        if id(item) not in met:
            met.add(id(item))
            for key in item if isinstance(item, dict) else range(len(item)):
                item[key] = _unwrapped(item[key], met)
        return item
    if isinstance(item, tuple):
        entries = [_unwrapped(entry, met) for entry in item]
        if all(new is old for new, old in zip(entries, item, strict=True)):
            return item
        return type(item)(*entries) if hasattr(item, "_fields") else tuple(entries)
    return unwrap(item)
