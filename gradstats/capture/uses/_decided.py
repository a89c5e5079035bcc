"""What a rule decided about an operation, to be done at once for operations that are alike.

A rule inspects operands: where their examples lie, whether they are small, what is tracked. All of
that depends on what a key of ``_repeated`` holds. If a rule did nothing but run the operation with
factors attached, the decision is remembered, without any tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from gradstats.capture.following._examples import Examples

if TYPE_CHECKING:
    from gradstats.capture._context import Context


class Decided(NamedTuple):
    """What a rule did last.

    Attributes:
        result: what it got.
        again: what it called, as again(tracker, x, parameters, examples, *rest).
        x, parameters: the operands that it passed: data, and the weight, bias or scale.
        examples: where the examples lie in the result.
        rest: what else it passed; no tensors.
    """

    result: Tensor
    again: Callable[..., Tensor | None]
    x: Tensor
    parameters: Sequence[Tensor | None]
    examples: Examples
    rest: tuple[Any, ...]

    def remembered(
        self, tracker: Context, operands: Sequence[Tensor]
    ) -> Callable[[Context, Sequence[Tensor]], Tensor | None] | None:
        """Return what does the same with other operands, or returns None where it cannot.

        It holds no tensor. None if the rule passed others than the operation's operands.
        """
        ids = [*map(id, operands)]
        passed = self.x, *self.parameters
        if not all(item is None or id(item) in ids for item in passed):
            return None
        take = itemgetter(*[-1 if item is None else ids.index(id(item)) for item in passed])
        again, rest = self.again, self.rest
        own = None if self.examples is tracker.marks.contract else self.examples

        def repeat(tracker: Context, operands: Sequence[Tensor]) -> Tensor | None:
            x, *parameters = take((*operands, None))
            return again(tracker, x, parameters, own or tracker.marks.contract, *rest)

        return repeat


def decide(
    tracker: Context,
    again: Callable[..., Tensor | None],
    x: Tensor,
    parameters: Sequence[Tensor | None],
    examples: Examples,
    *rest: Any,
) -> Tensor | None:
    """Do what is to be done again at once for operations that are alike, as ``Decided`` says it."""
    result = again(tracker, x, parameters, examples, *rest)
    if result is not None:
        tracker.decided = Decided(result, again, x, parameters, examples, rest)
    return result
