"""Which example each loss belongs to."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gradstats.capture.following._examples import (
    IF_A_CONSTANT,
    MIXED,
    MORE_IF_COUPLED,
    MORE_REMEDIES,
    Examples,
    Whole,
)
from gradstats.capture.following._marks import Marks
from gradstats.errors import CoupledExamplesError, ExampleAxisError, TrackingError

NOBODYS = (
    "nothing was written to some rows of a tensor, or constants were joined to its rows, so that "
    "it is not known which example these rows belong to"
)


def order_of(marks: Marks, losses: Tensor) -> Tensor | None:
    """Return the example of each loss, (B,); None if they are in the batch's order."""
    if marks.batch_size == 1:
        return None
    owned = marks.owned(losses)
    if owned is MIXED:
        raise CoupledExamplesError(
            "each loss depends on several examples: trained values were summed, averaged, "
            "normalised or multiplied by a matrix along the example axis, as in a contrastive "
            "loss, which has no gradient of one example. Expected losses that depend on one "
            "example each: reduce over other axes only, give predictions and targets one shape "
            "((B, 1) and (B,) combine to (B, B)), or detach what comes from other examples. "
            f"{IF_A_CONSTANT} {MORE_IF_COUPLED}"
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
            f"but {NOBODYS}. Expected losses in the order of the batch: put them back by indexing, "
            "or say with gs.assign_rows which example each row belongs to."
        )
    return owner


def check_start(marks: Marks, losses: Sequence[Tensor], start: Sequence[Tensor | None]) -> None:
    """Raise if a backward starts from the examples' losses instead of their mean.

    Args:
        marks: what is noted about the losses.
        losses: the tensors that the backward starts from.
        start: the gradients that it starts with.
    """
    if len(losses) == 1 and not losses[0].shape:
        return  # a scalar does not show its terms
    owned = [marks.owned(loss) for loss in losses]
    of_one = {each.example for each in owned if isinstance(each, Whole)}
    of_each = len(of_one) == len(losses) == marks.batch_size
    if not (of_each or all([isinstance(each, Examples) for each in owned])):
        return
    if all([each is not None and bool((each == 1).all()) for each in start]):
        raise TrackingError(
            "the backward starts from losses of one example each with a gradient of 1 for each, "
            "which is the backward of their sum. Expected that of their mean over "
            f"{marks.batch_size} examples. "
            "Write losses.mean().backward(), or tracker.backward(losses) inside track(), or pass "
            "loss_reduction='sum'. If the losses are divided already, write "
            "losses.sum().backward()."
        )


def check_sum(marks: Marks, loss: Tensor, *, crossed: bool, supposed: bool) -> None:
    """Raise unless a loss is known to be a sum over the examples.

    Args:
        marks: what is noted about the loss.
        loss: a loss over all examples.
        crossed: whether it may depend on values that were taken for those of other examples.
        supposed: whether parameters may have been used on rows that are nobody's.
    """
    if not marks.is_additive(loss):
        raise ExampleAxisError(
            f"which values belong to which example was lost {_where_lost(marks, loss)}: they "
            "were moved or combined along the example axis in a way that cannot be followed, so "
            "that the loss may be more than a sum over the examples. Expected a sum, a mean or a "
            "weighted sum of losses that depend on one example each: combine each example's own "
            "rows alone, or, if you know which example the values belong to, say so with "
            f"gs.assign_rows. {IF_A_CONSTANT} {MORE_REMEDIES}"
        )
    if crossed and not marks.knows_losses:
        raise ExampleAxisError(
            "values with one row for each example were combined with inputs whose examples lie "
            "along another axis, as where these rows are broadcast along as many positions. A loss "
            "over all examples does not tell which example the result belongs to. Expected the "
            "examples along the same axis of both, as in x * h[:, None], and along axis "
            f"{marks.batch_dim} of all inputs, masks and labels too (or say with gs.assign_rows "
            "where they lie); or one loss for each example, as tracker.backward(losses) takes. "
            f"{IF_A_CONSTANT} {MORE_REMEDIES}"
        )
    if supposed and not marks.knows_losses:
        raise ExampleAxisError(
            f"{NOBODYS}, and a loss over all examples does not tell. Expected one loss for each "
            "example, as tracker.backward(losses) takes; or say with gs.assign_rows which example "
            "each row belongs to."
        )


def _refusal_of_lost(marks: Marks, losses: Tensor) -> ExampleAxisError | CoupledExamplesError:
    """Return the error for losses whose examples are not known."""
    met = marks.meetings.behind(losses)
    if met is not None:
        return marks.meetings.refusal(met)
    return ExampleAxisError(
        f"which loss belongs to which example was lost {_where_lost(marks, losses)}: the losses, "
        "or what was combined with them, were moved or reduced along the example axis in a way "
        "that cannot be followed. Expected losses in the order of the batch, each of one example: "
        "reduce each example's own rows, put rows back by indexing, or, if you know which example "
        "each loss belongs to, say so with gs.assign_rows. Otherwise per_example_norms(..., "
        'fallback="vmap") computes all parameters one example at a time. '
        f"{IF_A_CONSTANT} {MORE_REMEDIES}"
    )


def _where_lost(marks: Marks, losses: Tensor) -> str:
    operation = marks.lost_at(losses)
    return f"at {operation}" if operation else "on the way"
