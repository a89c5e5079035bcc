"""Caches that a model computes from its weights in eval mode, and renewing them.

Some models cache what they compute from their parameters, such as relative positions, until they
are trained again. For another checkpoint's weights the cache would be wrong, and one that belongs
to a forward's graph cannot be differentiated in the next. Setting the mode to training and back
makes such models drop it, but may do more: exchange weights, reset statistics, or lose calibrated
values. So it is tried out first, and done only if it changes no more than attributes, of which
those that the next forward does not make again are given back.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterable
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradstats._comparison import same_bits
from gradstats.capture.operations._modes import without_contexts
from gradstats.capture.parameters._attributes import STANDARD_ATTRIBUTES, tensors_kept
from gradstats.scoring._memory import is_out_of_memory
from gradstats.scoring._surroundings import (
    CONTAINERS,
    Surroundings,
    containers_in,
    content_of,
    plain_attributes,
    refill,
)
from gradstats.statistics._state import Versions


class Renewal:
    """Whether a borrowed model can be made to drop what it caches from its weights."""

    def __init__(self) -> None:
        # What setting the mode changes, None where it does more; nothing once it is known for all
        # batches what the next forward does not make again, and that is given back.
        self._changed: list[Attribute] | None = None
        self._given_back: list[Attribute] = []
        self._surroundings: Surroundings | None = None

    def begin(self, surroundings: Surroundings) -> None:
        """Note what a model holds before the first forward at a checkpoint's weights."""
        self._surroundings = surroundings

    def begin_anew(self) -> None:
        """Restore what was noted: what forwards cached since belongs to other weights."""
        assert self._surroundings is not None
        self._surroundings.restore()

    def try_out(self, model: nn.Module, memory: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Find out what setting the mode of a model to training and back does, and undo it.

        Args:
            model: in eval mode.
            memory: its tensors, each with one that holds its numbers.
        """
        before = Before(model)
        try:
            _there_and_back(model)
            self._changed = before.changed()
        except Exception:  # the user's: it may not be meant to be trained
            model.eval()
        before.restore(memory)

    def renew(self, model: nn.Module, forward: Callable[[], object]) -> None:
        """Have the model drop its caches, if setting the mode changes attributes alone.

        Args:
            model: in eval mode.
            forward: runs it, to see what is made again: once, or before each batch where some of
                what was dropped is not, since another batch may need it.
        """
        if self._changed is None:
            return
        if self._changed:
            _there_and_back(model)
            emptied = [each for each in self._changed if each.is_emptied()]
            try:
                with without_contexts(), torch.no_grad():
                    forward()
            except Exception as error:
                if is_out_of_memory(error):
                    raise  # what is made again is not known
                for each in self._changed:  # it may need what it lacks now
                    each.restore()
                self._changed = None
                return
            made = [e for e in self._changed if e.is_same() or (e in emptied and e.is_refilled())]
            self._given_back = [each for each in self._changed if each not in made]
            if not any(each in emptied for each in self._given_back):
                self._changed = []
        _there_and_back(model)
        for each in self._given_back:
            each.restore()


def _there_and_back(model: nn.Module) -> None:
    model.train(True)
    model.eval()


class Attribute:
    """An attribute or a buffer of a module as it was: containers with what they held.

    Args:
        place: the attributes or the buffers of the module.
        name: in these.
        was_there: whether it was; else it is there now alone.
    """

    def __init__(self, place: dict[str, Any], name: str, was_there: bool = True):
        self._place, self._name, self._was_there = place, name, was_there
        self._value = place[name] if was_there else None
        self._contents = [(each, content_of(each)) for each in containers_in([self._value])]
        self._then = _as_it_is(self._value, {})
        self._held_tensors = bool(tensors_kept(self._then))

    def holds_tensors(self) -> bool:
        """Whether it holds tensors now."""
        return bool(tensors_kept(self._now))

    def is_same(self) -> bool:
        """Whether it is as it was."""
        there = self._name in self._place
        return there == self._was_there and _is_same(self._now, self._then)

    def is_emptied(self) -> bool:
        """Whether nothing is left of it, or no tensors where it held some, beside all else."""
        if self._held_tensors and not self.holds_tensors():
            return _is_same(self._now, self._then, emptied=True)
        return _is_empty(self._now)

    def is_refilled(self) -> bool:
        """Whether it holds something again; tensors where it did."""
        return self.holds_tensors() if self._held_tensors else not _is_empty(self._now)

    def restore(self) -> None:
        """Put it back, its content too."""
        for container, content in self._contents:
            refill(container, content)
        if self._was_there:
            self._place[self._name] = self._value
        else:
            self._place.pop(self._name, None)

    @property
    def _now(self) -> Any:
        return self._place.get(self._name)


# Kinds of containers that are compared by what they hold, whichever class of one they are.
KINDS: tuple[tuple[type, ...], ...] = ((dict,), (list, deque), (tuple,))
# Kinds of objects that equality alone compares, whatever attributes they have.
VALUES = (str, bytes, Number, np.generic, frozenset)


def _as_it_is(value: Any, met: dict[int, Any]) -> Any:
    """Return a value whose containers, and those inside of these, no longer change.

    Args:
        value: dicts of any class come as dicts, lists and deques as lists.
        met: id → copy of the containers so far: one may hold itself.
    """
    if id(value) in met:
        return met[id(value)]
    if isinstance(value, dict):
        met[id(value)] = entries = dict(value)
        entries.update((key, _as_it_is(entry, met)) for key, entry in value.items())
        return entries
    if isinstance(value, (list, deque)):
        listed: list[Any] = []
        met[id(value)] = listed
        listed += (_as_it_is(entry, met) for entry in value)
        return listed
    if isinstance(value, tuple):
        return tuple(_as_it_is(entry, met) for entry in value)
    return set(value) if isinstance(value, set) else value


def _is_empty(value: Any) -> bool:
    """Whether nothing is kept here."""
    kept = isinstance(value, (tuple, *CONTAINERS))
    return not len(value) if kept else value is None or value is False


def _is_same(
    now: Any, then: Any, emptied: bool = False, met: frozenset[tuple[int, int]] = frozenset()
) -> bool:
    """Whether a value is what it was.

    Args:
        now: the value.
        then: the same as ``_as_it_is`` gave it.
        emptied: whether tensors that it held are gone, rather than the same.
        met: ids of what this is inside of, now and then: a container may hold itself.
    """
    if isinstance(then, Tensor):
        return now is None if emptied else now is then
    if emptied and tensors_kept(then) and _is_empty(now):
        return True
    for kind in KINDS:
        if isinstance(then, kind):
            pair = id(now), id(then)
            inside = met | {pair}
            return pair in met or (isinstance(now, kind) and _hold_same(now, then, emptied, inside))
    if now is then:
        return True
    if isinstance(then, set):
        return isinstance(now, set) and set.__eq__(now, then)
    if type(now) is not type(then):
        return False
    if isinstance(then, np.ndarray):
        alike = now.shape == then.shape and now.dtype == then.dtype
        return alike and now.tobytes() == then.tobytes()
    if callable(then):
        return bool(inspect.unwrap(now) == inspect.unwrap(then))  # such as a cache made anew
    if hasattr(then, "__dict__") and not isinstance(then, VALUES):
        # Of an object that takes the place of another.
        return any(_is_same(vars(now), vars(then), each, met) for each in (False, True))
    return bool(now == then or now != now)


def _hold_same(now: Any, then: Any, emptied: bool, met: frozenset[tuple[int, int]]) -> bool:
    if not isinstance(then, dict):
        now, then = dict(enumerate(now)), dict(enumerate(then))
    elif not emptied and list(now) != list(then):
        return False
    keys = {**then, **now}
    return all(_is_same(now.get(key), then.get(key), emptied, met) for key in keys)


def _structure(module: nn.Module) -> dict[str, Any]:
    """Return what tells whether a module has other parameters, modules or hooks."""
    held = {name: each for name, each in vars(module).items() if name in STANDARD_ATTRIBUTES}
    for name in ("training", "_buffers", "_non_persistent_buffers_set"):
        held.pop(name, None)
    return {
        name: [(key, id(part)) for key, part in each.items()] if isinstance(each, dict) else each
        for name, each in held.items()
    }


class Before:
    """A model before its mode was set."""

    def __init__(self, model: nn.Module):
        modules = [m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)]
        self._surroundings = Surroundings(modules)
        self._structures = [(module, _structure(module)) for module in modules]
        self._modes = [(module, module.training) for module in modules]
        self._trained = [(p, p.requires_grad) for p in model.parameters()]
        self._versions = Versions((*model.parameters(), *model.buffers()))
        self._attributes = {
            m: {n: Attribute(vars(m), n) for n in plain_attributes(m)} for m in modules
        }
        self._buffers = [(m, {n: Attribute(m._buffers, n) for n in m._buffers}) for m in modules]

    def changed(self) -> list[Attribute] | None:
        """Return the attributes and buffers that are others now; None if anything else is.

        Or if some hold other tensors: they may be made of the weights where the mode is set.
        """
        others = any(_structure(module) != before for module, before in self._structures)
        trained = any(each.requires_grad != before for each, before in self._trained)
        if others or trained or self._versions.are_old:
            return None
        kept = [
            *((vars(m), plain_attributes(m), held) for m, held in self._attributes.items()),
            *((module._buffers, module._buffers, held) for module, held in self._buffers),
        ]
        found = []
        for place, names, held in kept:
            found += [attribute for attribute in held.values() if not attribute.is_same()]
            found += [Attribute(place, name, was_there=False) for name in names if name not in held]
        return None if any(map(Attribute.holds_tensors, found)) else found

    def restore(self, memory: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Put everything back; ``memory`` holds each tensor with its numbers."""
        self._surroundings.restore()
        for module, training in self._modes:
            module.training = training
        for parameter, trained in self._trained:
            parameter.requires_grad_(trained)
        for tensor, own in memory:
            if not same_bits(tensor.detach(), own):
                tensor.detach().copy_(own)
