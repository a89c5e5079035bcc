"""Which example each loss belongs to."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gradstats.capture.following._examples import IF_A_CONSTANT, MIXED, Examples, Whole
from gradstats.capture.following._marks import Marks
from gradstats.errors import CoupledExamplesError, ExampleAxisError, TrackingError

# For values that start alike for all examples, as the log-density of a continuous flow does.
MADE_OF_THE_BATCH = (
    "Zeros that are joined to the examples' values, one row for each, make of the batch "
    "(zeros_like)."
)

NOBODYS = (
    "nothing was written to some rows of a tensor, or constants were joined to its rows, so that "
    "it is not known to which example they belong"
)


def order_of(marks: Marks, losses: Tensor) -> Tensor | None:
    """Return the example of each loss, (B,); None if they are in the batch's order."""
    if marks.batch_size == 1:
        return None
    owned = marks.owned(losses)
    if owned is MIXED:
        raise CoupledExamplesError(
            "each loss depends on several examples: trained values were summed, averaged, "
            "normalised or multiplied by a matrix along the example axis on the way. Such a "
            "loss, a contrastive one for instance, has no gradient of one example. Expected "
            "losses that depend on one example each: reduce over other axes, or detach what "
            "comes from other examples. Predictions (B, 1) and targets (B,) combine to (B, B): "
            "give both one shape. Of a term that is a mean of values of one example each, "
            "as a load-balancing loss is for given shares of the experts, add these values, or run "
            f"the backward of one scalar inside track(). {IF_A_CONSTANT}"
        )
    plain = isinstance(owned, Examples) and owned.plain
    if plain or not marks.is_marked(losses):
        return None
    if isinstance(owned, Whole):
        owned = marks.rows_of_one(losses, 0)
    if not isinstance(owned, Examples):
        raise _refusal_of_lost(marks, losses)
    owner = owned.owner(losses.device)
    if owner.numel() != marks.batch_size or owner.unique().numel() != marks.batch_size:
        raise ExampleAxisError(
            f"the losses belong to the examples {owner.tolist()}, as followed through the "
            f"model, expected one loss for each of {marks.batch_size} examples. Sum the losses "
            "of each example."
        )
    if marks.meetings.supposes_behind(losses):
        raise ExampleAxisError(
            f"the losses belong to the examples {owner.tolist()}, as followed through the model, "
            f"but {NOBODYS}. Expected losses in the order of the batch: put them back by indexing; "
            "or say whose rows these are with gs.assign_rows."
        )
    return owner


def check_start(marks: Marks, losses: Sequence[Tensor], start: Sequence[Tensor | None]) -> None:
    """Raise for the backward of the examples' losses themselves, where it is to be of their mean.

    Args:
        losses: what the backward starts from.
        start: the gradients that it starts with.
    """
    if len(losses) == 1 and not losses[0].shape:
        return  # a scalar, whose terms are not seen here
    owned = [marks.owned(loss) for loss in losses]
    of_one = {each.example for each in owned if isinstance(each, Whole)}
    of_each = len(of_one) == len(losses) == marks.batch_size
    if not (of_each or all([isinstance(each, Examples) for each in owned])):
        return
    if all([each is not None and bool((each == 1).all()) for each in start]):
        raise TrackingError(
            "the backward starts from losses of one example each, with a gradient of 1 for each: "
            f"that of their sum, expected that of their mean over {marks.batch_size} examples. "
            "Write losses.mean().backward(), or tracker.backward(losses) inside track(), or pass "
            "loss_reduction='sum'. If the losses are divided already, write "
            "losses.sum().backward()."
        )


def check_sum(marks: Marks, loss: Tensor, *, crossed: bool, supposed: bool) -> None:
    """Raise unless a loss is known to be a sum over the examples.

    Args:
        loss: over all examples.
        crossed: whether it may depend on values that were taken for those of other examples.
        supposed: whether parameters may have been used on rows that are nobody's on the way.
    """
    if not marks.is_additive(loss):
        raise ExampleAxisError(
            f"which values belong to which example was lost {_where_lost(marks, loss)}: they "
            "were moved or combined along the example axis in a way that cannot be followed, "
            "and the loss may be more than a sum over the examples, so that it has no gradient "
            f"of one example. {IF_A_CONSTANT} {MADE_OF_THE_BATCH} Expected a sum, a mean or a "
            "weighted sum of losses that depend on one example each: combine each example's own "
            "rows alone; if you know whose values they are, say so with gs.assign_rows."
        )
    if crossed and not marks.knows_losses:
        raise ExampleAxisError(
            "values with one row for each example were combined with inputs that have their "
            "examples along another axis, as where a row for each example is broadcast along as "
            "many positions. Whose the result is cannot be told from a loss over all examples. "
            "Expected the examples along one axis of both, as in x * h[:, None], and along axis "
            f"{marks.batch_dim} of what comes from outside, masks and labels too (or say with "
            "gs.assign_rows where they lie); or one loss for each example, as "
            "tracker.backward(losses) takes. What belongs to no example, such as positions, keep "
            "in the model (register_buffer). "
            f"{IF_A_CONSTANT}"
        )
    if supposed and not marks.knows_losses:
        raise ExampleAxisError(
            f"{NOBODYS}, and a loss over all examples does not tell. Expected one loss for each "
            "example, as tracker.backward(losses) takes; or say whose rows these are with "
            "gs.assign_rows."
        )


def _refusal_of_lost(marks: Marks, losses: Tensor) -> ExampleAxisError | CoupledExamplesError:
    """Return the error for losses whose examples are not known."""
    met = marks.meetings.behind(losses)
    if met is not None:
        return marks.meetings.refusal(met)
    return ExampleAxisError(
        f"which loss belongs to which example was lost {_where_lost(marks, losses)}: the losses, "
        "or what was combined with them, were moved or reduced along the example axis in a way "
        f"that cannot be followed. {IF_A_CONSTANT} {MADE_OF_THE_BATCH} Expected losses in the "
        "order of the batch, each of one example: reduce each example's own rows, or put rows back "
        "by indexing; if you know whose loss each is, say so with gs.assign_rows; "
        'per_example_norms(..., fallback="vmap") computes all parameters one example at a time.'
    )


def _where_lost(marks: Marks, losses: Tensor) -> str:
    operation = marks.lost_at(losses)
    return f"at {operation}" if operation else "on the way"
