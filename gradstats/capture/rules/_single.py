"""Operations on data of one example that have no axis for it, as loops over a batch take them.

An axis of size 1 is put in front of the data and taken off the result.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn import functional

from gradstats.capture.following._examples import Whole
from gradstats.capture.following._operands import sole_example
from gradstats.capture.operations._operations import AXES_OF_FACTORS, CONVOLUTIONS, PRODUCTS
from gradstats.capture.parameters._tensors import node_of
from gradstats.capture.uses._grafted import Composed

if TYPE_CHECKING:
    from gradstats.capture._context import Context


def widened(func, x: Tensor, *args, **kwargs) -> Tensor:
    """The operation on a batch of one."""
    return func(x.unsqueeze(0), *args, **kwargs).squeeze(0)


def multiplied(func, x: Tensor, other: Tensor) -> Tensor:
    """The product of a vector as that of a row."""
    if other.dim() == 1:
        return (x * other).sum(0)
    return func(x.unsqueeze(0), other).squeeze(-2)


# How many axes data of a single example have, and how they become a batch of one.
SINGLE: dict[Any, tuple[int, Callable[..., Any]]] = {
    functional.linear: (1, widened),
    functional.embedding: (0, widened),
    functional.layer_norm: (1, widened),
    functional.rms_norm: (1, widened),
    **{function: (axes + 1, widened) for function, axes in CONVOLUTIONS.items()},
    **dict.fromkeys(PRODUCTS - AXES_OF_FACTORS.keys(), (1, multiplied)),
}


def _example_of(tracker: Context, x: Tensor) -> Whole | None:
    """Return the example to which all of a tensor belongs; None where it is not one."""
    return Whole(0) if tracker.batch_size == 1 else sole_example(tracker.marks, [x])


def alone(func: Any, rule: Callable[..., Any]) -> Callable[..., Any]:
    """Return the rule of an operation that serves data of a single example as well."""
    axes, composition = SINGLE[func]

    def run(tracker: Context, called, *args, **kwargs):
        first = args[0] if args else None
        if isinstance(first, Tensor) and node_of(first) is None and first.dim() == axes:
            whole = _example_of(tracker, first)
            if whole is not None:
                composed = Composed(partial(composition, called))
                result = composed(tracker, called, *args, **kwargs)
                tracker.marks.place(result, whole)
                return result
        return rule(tracker, called, *args, **kwargs)

    return run
