"""The tensors that modules keep in plain attributes: neither parameters nor buffers."""

from __future__ import annotations

import gc
from collections import deque
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


def kept_by(module: nn.Module) -> list[str]:
    """Return the names of the plain attributes of a module that may hold tensors."""
    own = module.__dict__
    found = []
    for name in filterfalse(STANDARD_ATTRIBUTES.__contains__, own):
        kind = type(own[name])
        if kind in PLAIN_TYPES or (kind is tuple and PLAIN_TYPES.issuperset(map(type, own[name]))):
            continue  # as sizes and strides are
        found.append(name)
    return found


def tensors_kept(attribute: Any) -> list[Tensor]:
    """Return the tensors of an attribute: itself, or what it holds in containers and caches.

    Each container and cache is searched once: many functions of a library use the same few caches.
    Except those of a cache that was given tensors: what it returned may belong to a batch.
    """
    found: list[Tensor] = []
    pending, met = [attribute], set()
    while pending:
        item = pending.pop()
        if isinstance(item, Tensor):
            if not isinstance(item, nn.Parameter):
                found.append(item)
        elif isinstance(item, HOLDERS) and id(item) not in met:
            met.add(id(item))  # a container may hold itself
            if isinstance(item, partial):
                pending += (item.func, item.args, item.keywords)
            elif isinstance(item, _lru_cache_wrapper):
                held = gc.get_referents(item)  # what it was given and returned; keys are the former
                given = [key for each in held if isinstance(each, dict) for key in each]
                if not tensors_kept(given):
                    pending += [each for each in held if type(each) not in ENDS]
            else:
                entries = item.values() if isinstance(item, dict) else item
                if not ENDS.issuperset(map(type, entries)):
                    pending += [each for each in entries if type(each) not in ENDS]
    return found


def keeps_derived(module: nn.Module) -> bool:
    """Whether a module keeps a derived tensor, as an attribute or buffer or in containers."""
    own = vars(module)
    return _holds_derived([own[name] for name in kept_by(module)] + [*module._buffers.values()])


def _holds_derived(attribute: Any) -> bool:
    return any(isinstance(leaf, DerivedTensor) for leaf in tensors_kept(attribute))


def restore_attributes(module: nn.Module) -> None:
    """Replace derived tensors that a forward (or a hook in it) left by plain ones."""
    own = vars(module)
    for name in kept_by(module):
        if _holds_derived(own[name]):
            own[name] = _unwrapped(own[name], set())
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
