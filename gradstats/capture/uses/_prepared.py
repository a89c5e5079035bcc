"""Factors of operations on a GPU whose backward is planned once for operands that lie alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from gradstats.capture.uses._together import Joinable
from gradstats.capture.uses._uses import Use
from gradstats.contractions._prepared import layout_of


class Preparable(Joinable):
    """Factors that are one object for all operations that are alike (see ``_decided``).

    Attributes:
        plans: the prepared functions, by what is wanted and the operands' layouts. No tensors.
        prepare: called as prepare(use, wanted, grad, *saved) for the only use of its parameters.
            Returns a function that computes the backward, for these operands and for others that
            lie alike, or None if the backward has to be decided each time.
    """

    __slots__ = ()

    plans: dict[tuple[Any, ...], Callable[..., Any] | None]
    prepare: Callable[..., Any]

    def prepared(self, use: Use, wanted: tuple[Any, ...], grad: Tensor, *saved: Tensor | None):
        """Return what ``prepare`` returns, which is called once for operands that lie alike."""
        if not (grad.is_cuda and use.direct and use.all_sole):
            return None
        layout = layout_of(grad, *saved)
        if layout is None:
            return None
        key = wanted, layout
        try:
            return self.plans[key]
        except KeyError:
            self.plans[key] = plan = self.prepare(use, wanted, grad, *saved)
            return plan
