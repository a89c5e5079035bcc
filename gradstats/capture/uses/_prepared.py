"""Factors of operations on a GPU whose backward is decided once for operands that lie alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from gradstats.capture.uses._together import Joinable
from gradstats.capture.uses._uses import Use
from gradstats.contractions._prepared import layout_of


class Preparable(Joinable):
    """Factors that are the same object for all operations that are alike (see ``_decided``).

    Attributes:
        plans: what was prepared, by what is wanted and by the operands' layouts. No tensors.
        prepare: called as prepare(use, wanted, grad, *saved) for the only use of its parameters;
            returns what computes the backward of such operands, called with others that lie alike,
            or None where that is to be decided each time.
    """

    __slots__ = ()

    plans: dict[tuple[Any, ...], Callable[..., Any] | None]
    prepare: Callable[..., Any]

    def prepared(self, use: Use, wanted: tuple[Any, ...], grad: Tensor, *saved: Tensor | None):
        """Return what ``prepare`` does, for operands that are alike only once."""
        if not (grad.is_cuda and use.direct and use.all_sole):
            return None
        layout = layout_of(grad, *saved)
        if layout is None:
            return None
        known = wanted, layout
        try:
            return self.plans[known]
        except KeyError:
            self.plans[known] = found = self.prepare(use, wanted, grad, *saved)
            return found
