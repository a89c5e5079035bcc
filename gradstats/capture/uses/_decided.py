"""What a rule decided about an operation, repeated without the rule for operations that are alike.

A rule inspects operands: where their examples lie, whether they are small, what is tracked. All of
this is a function of the operation's key in ``_repeated``. So if a rule did nothing but run the
operation with factors attached, its decision is remembered under that key, without any tensor.
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
    """The last decision of a rule.

    Attributes:
        result: the result of the call that it decided on.
        again: the function called, as again(tracker, x, parameters, examples, *rest).
        x, parameters: the operands passed to it: data, and the weight, bias or scale.
        examples: where the examples lie in the result.
        rest: the other arguments; no tensors.
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
        """Return what makes the same call for other operands; it returns None if it cannot.

        None if the rule passed tensors other than the operation's operands.
        """
        ids = [*map(id, operands)]
        passed = self.x, *self.parameters
        if not all(item is None or id(item) in ids for item in passed):
            return None
        take = itemgetter(*[-1 if item is None else ids.index(id(item)) for item in passed])
        again, rest = self.again, self.rest
        # The contract is that of the context in which the call is repeated.
        examples = None if self.examples is tracker.marks.contract else self.examples

        def repeat(tracker: Context, operands: Sequence[Tensor]) -> Tensor | None:
            x, *parameters = take((*operands, None))
            return again(tracker, x, parameters, examples or tracker.marks.contract, *rest)

        return repeat


def decide(
    tracker: Context,
    again: Callable[..., Tensor | None],
    x: Tensor,
    parameters: Sequence[Tensor | None],
    examples: Examples,
    *rest: Any,
) -> Tensor | None:
    """Make a call and remember it, to be repeated for operations that are alike (``Decided``)."""
    result = again(tracker, x, parameters, examples, *rest)
    if result is not None:
        tracker.decided = Decided(result, again, x, parameters, examples, rest)
    return result
