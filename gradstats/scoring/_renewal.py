"""Caches that a model computes from its weights in eval mode, and renewing them.

Some models cache what they compute from their parameters, such as relative positions, until they
are trained again. For another checkpoint's weights the cache would be wrong, and one that belongs
to a forward's graph cannot be differentiated in the next. Setting the mode to training and back
makes such models drop it, but may do more: exchange weights, reset statistics, or lose calibrated
values. So it is tried out first, and done only if it does nothing but drop tensors, of which those
that the next forward does not compute again are given back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradstats._comparison import same_bits
from gradstats.capture.operations._modes import without_contexts
from gradstats.capture.parameters._attributes import tensors_kept
from gradstats.scoring._surroundings import (
    CONTAINERS,
    Surroundings,
    content_of,
    plain_attributes,
    refill,
)
from gradstats.statistics._state import Versions


class Renewal:
    """Whether a borrowed model can be made to drop what it caches from its weights."""

    def __init__(self) -> None:
        # What setting the mode drops, until a forward has shown what is made again; None where it
        # does more. Then what is not.
        self._dropped: list[Attribute] | None = None
        self._given_back: list[Attribute] = []
        self._surroundings: Surroundings | None = None

    def begin(self, surroundings: Surroundings) -> None:
        """Note what a model holds before the first forward at a checkpoint's weights."""
        self._surroundings = surroundings

    def begin_anew(self) -> None:
        """Restore what was noted: what forwards cached since belongs to other weights."""
        assert self._surroundings is not None
        self._surroundings.restore()
        for each in self._given_back:
            each.restore()

    def try_out(self, model: nn.Module, memory: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Find out what setting the mode of a model to training and back does, and undo it.

        Args:
            model: in eval mode.
            memory: its tensors, each with one that holds its numbers.
        """
        before = Before(model)
        try:
            _there_and_back(model)
            self._dropped = before.dropped()
        except Exception:  # the user's: it may not be meant to be trained
            model.eval()
        if self._dropped is None:
            before.restore(memory)

    def renew(self, model: nn.Module, forward: Callable[[], object]) -> None:
        """Have the model drop its caches, if setting the mode does nothing but drop tensors.

        Args:
            model: in eval mode.
            forward: runs it; once, to see which of these are made again.
        """
        if self._dropped is None:
            return
        if self._dropped:
            with without_contexts(), torch.no_grad():
                forward()
            # Not known where the forward has raised an error, such as for memory that ran out.
            self._given_back = [each for each in self._dropped if not each.is_there()]
            self._dropped = []
        _there_and_back(model)
        for each in self._given_back:
            each.restore()


def _there_and_back(model: nn.Module) -> None:
    model.train(True)
    model.eval()


class Attribute:
    """A plain attribute or a buffer of a module as it was: containers with what they held."""

    def __init__(self, place: dict[str, Any], name: str):
        self._place, self._name = place, name
        self._value = place[name]
        kept = isinstance(self._value, CONTAINERS)
        self._content = content_of(self._value) if kept else self._value
        self._held_tensors = bool(tensors_kept(self._content))

    def is_there(self) -> bool:
        """Whether the attribute holds tensors now."""
        return bool(tensors_kept(self._place.get(self._name)))

    def was_dropped(self) -> bool | None:
        """Whether it held tensors and holds none now; None if it changed in any other way."""
        if self._held_tensors and not self.is_there():
            return True
        now = self._place.get(self._name)
        same = type(now) is type(self._value) and _is_same(now, self._content)
        return False if same else None

    def restore(self) -> None:
        """Put it back, its content too."""
        if isinstance(self._value, CONTAINERS):
            refill(self._value, self._content)
        self._place[self._name] = self._value


def _is_same(now: Any, before: Any) -> bool:
    """Whether a value is what it was, as far as can be told: of objects of other kinds, the kind.

    Args:
        now: the value.
        before: the same then; for a container that may be a copy.
    """
    if now is before:
        return True
    if isinstance(before, Tensor) or not isinstance(now, type(before)):
        return False
    if isinstance(before, set):
        return set.__eq__(now, before)
    if isinstance(before, (tuple, *CONTAINERS)):
        one, other = (
            [*each, *each.values()] if isinstance(each, dict) else [*each] for each in (now, before)
        )
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(before, (str, Number, np.generic)):
        return bool(now == before or now != now)
    return True


def _identities(parameters: dict[str, nn.Parameter | None]) -> dict[str, int]:
    return {name: id(each) for name, each in parameters.items()}


class Before:
    """A model before its mode was set."""

    def __init__(self, model: nn.Module):
        modules = [m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)]
        self._surroundings = Surroundings(modules)
        self._parameters = [(m, _identities(m._parameters)) for m in modules]
        self._trained = [(p, p.requires_grad) for p in model.parameters()]
        self._versions = Versions((*model.parameters(), *model.buffers()))
        self._attributes = {
            m: {n: Attribute(vars(m), n) for n in plain_attributes(m)} for m in modules
        }
        self._buffers = [(m, {n: Attribute(m._buffers, n) for n in m._buffers}) for m in modules]

    def dropped(self) -> list[Attribute] | None:
        """Return the attributes whose tensors were dropped; None if anything else changed."""
        others = any(_identities(m._parameters) != before for m, before in self._parameters)
        trained = any(each.requires_grad != before for each, before in self._trained)
        if others or trained or self._versions.are_old:
            return None
        found = []
        kept = [
            *((plain_attributes(m), attributes) for m, attributes in self._attributes.items()),
            *((module._buffers, buffers) for module, buffers in self._buffers),
        ]
        for names, attributes in kept:
            if set(names) - attributes.keys():
                return None
            for attribute in attributes.values():
                dropped = attribute.was_dropped()
                if dropped is None:
                    return None
                if dropped:
                    found.append(attribute)
        return found

    def restore(self, memory: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Put everything back; ``memory`` holds each tensor with its numbers."""
        self._surroundings.restore()
        for parameter, trained in self._trained:
            parameter.requires_grad_(trained)
        for tensor, own in memory:
            if not same_bits(tensor.detach(), own):
                tensor.detach().copy_(own)
