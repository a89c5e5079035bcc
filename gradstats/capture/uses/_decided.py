"""What a rule decided about an operation, to be done at once for operations that are alike.

A rule inspects operands: where their examples lie, whether they are small, what is tracked. All of
that depends on what a key of ``_repeated`` holds. If a rule did nothing but run the operation with
factors attached, the decision is remembered, without any tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

    def remembered(self, tracker: Context, operands: Sequence[Tensor]) -> Remembered | None:
        """Return the same without tensors; None if it passed others than the operation's."""
        ids = [*map(id, operands)]
        passed = self.x, *self.parameters
        if not all(item is None or id(item) in ids for item in passed):
            return None
        places = [None if item is None else ids.index(id(item)) for item in passed]
        examples = None if self.examples is tracker.marks.contract else self.examples
        return Remembered(self.again, places, examples, self.rest)


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


class Remembered(NamedTuple):
    """A decision for operands of one form.

    Attributes:
        again: what to call.
        places: of the data and the parameters among the operation's operands.
        examples: where the examples lie; None as the contract says.
        rest: what else to pass.
    """

    again: Callable[..., Tensor | None]
    places: Sequence[int | None]
    examples: Examples | None
    rest: tuple[Any, ...]

    def repeat(self, tracker: Context, operands: Sequence[Tensor]) -> Tensor | None:
        """Do the same with other operands; None where that is not possible now."""
        x, *parameters = [None if place is None else operands[place] for place in self.places]
        return self.again(
            tracker, x, parameters, self.examples or tracker.marks.contract, *self.rest
        )
