"""What modules keep in plain attributes."""

from __future__ import annotations

from itertools import filterfalse
from typing import Any

from torch import Tensor, nn

from gradstats.capture._nested import rebuild
from gradstats.capture._tensors import DerivedTensor, unwrap

# What every module has.
STANDARD_ATTRIBUTES = frozenset(vars(nn.Module()))

# What fills long containers that hold no tensors, as vocabularies do.
PLAIN_TYPES = frozenset({int, float, str, bool, type(None)})


def kept_by(module: nn.Module) -> list[str]:
    """Return the names of the plain attributes of a module that may hold tensors."""
    own = module.__dict__
    names = filterfalse(STANDARD_ATTRIBUTES.__contains__, own)
    return [name for name in names if type(own[name]) not in PLAIN_TYPES]


def tensors_kept(item: Any) -> list[Tensor]:
    """Return the tensors of an attribute: itself, or what it holds in lists, tuples and dicts."""
    if isinstance(item, Tensor):
        return [] if isinstance(item, nn.Parameter) else [item]
    if not isinstance(item, (list, tuple, dict)):
        return []
    entries = item.values() if isinstance(item, dict) else item
    if PLAIN_TYPES.issuperset(map(type, entries)):
        return []
    return [tensor for entry in entries for tensor in tensors_kept(entry)]


def restore_attributes(module: nn.Module) -> None:
    """Leave plain tensors where a forward left derived ones, as hooks that compute weights do."""
    own = vars(module)
    for name in kept_by(module):
        if any(isinstance(leaf, DerivedTensor) for leaf in tensors_kept(own[name])):
            own[name] = _unwrapped(own[name])


def _unwrapped(item):
    """Return an attribute with plain tensors for derived ones; lists and dicts stay the same."""
    if isinstance(item, list):
        item[:] = map(_unwrapped, item)
    elif isinstance(item, dict):
        item.update({key: _unwrapped(value) for key, value in item.items()})
    elif isinstance(item, tuple):
        return rebuild(item, unwrap)
    return unwrap(item)
