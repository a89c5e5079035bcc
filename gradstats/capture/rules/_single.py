"""Operations on the data of a single example without an example axis, as in loops over a batch.

They run on data with an axis of size 1 in front, which is removed from the result.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn import functional

from gradstats.capture.following._examples import Whole
from gradstats.capture.following._operands import sole_example
from gradstats.capture.operations._operations import CONVOLUTIONS
from gradstats.capture.parameters._tensors import node_of
from gradstats.capture.uses._grafted import Composed

if TYPE_CHECKING:
    from gradstats.capture._context import Context


def widened(func, x: Tensor, *args, **kwargs) -> Tensor:
    """The operation, run on a batch of one."""
    return func(x.unsqueeze(0), *args, **kwargs).squeeze(0)


# How many axes the data of a single example have.
SINGLE: dict[Any, int] = {
    functional.linear: 1,
    functional.embedding: 0,
    functional.layer_norm: 1,
    functional.rms_norm: 1,
    **{function: axes + 1 for function, axes in CONVOLUTIONS.items()},
}


def alone(func: Any, rule: Callable[..., Any]) -> Callable[..., Any]:
    """Return an operation's rule, extended to data of a single example without an axis for it."""

    def run(tracker: Context, called, *args, **kwargs):
        first = args[0] if args else None
        if isinstance(first, Tensor) and node_of(first) is None and first.dim() == SINGLE[func]:
            one = tracker.batch_size == 1
            whole = Whole(0) if one else sole_example(tracker.marks, [first])
            if whole is not None:
                composed = Composed(partial(widened, called))
                result = composed(tracker, called, *args, **kwargs)
                tracker.marks.place(result, whole)
                return result
        return rule(tracker, called, *args, **kwargs)

    return run
