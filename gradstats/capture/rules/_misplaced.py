"""The errors for data whose examples do not lie where a rule needs them.

``func`` and ``node`` are the operation and the tracked operand that messages name.
"""

from __future__ import annotations

from torch import Tensor

from gradstats.capture.following._examples import (
    IF_A_CONSTANT,
    IF_ATTENDING,
    IF_KNOWN,
    MIXED,
    WHERE_THE_NUMBER_IS_FROM,
    Examples,
)
from gradstats.capture.following._marks import Marks
from gradstats.capture.operations._names import function_name
from gradstats.capture.parameters._nodes import Node
from gradstats.errors import ExampleAxisError


def along_another_axis(
    marks: Marks, func, node: Node, data: Tensor, layout: Examples, axis: int | None
) -> ExampleAxisError:
    """Return the error for data whose examples lie along another axis than the prescribed one."""
    of_batch = f"If that is where the batch's examples lie, pass batch_dim={axis}. Otherwise move"
    remedy = (
        f"{'Move' if axis == marks.batch_dim else of_batch} the axis before this operation, or "
        f"pass batch_first= to recurrent and attention layers. {IF_KNOWN}"
    )
    if marks.packed:
        remedy = "It takes packed rows for positions: call it on each example's slice."
    return ExampleAxisError(
        f"{function_name(func)} on {node.describe()} takes axis {axis} of its data, of shape "
        f"{tuple(data.shape)}, as the example axis, but the examples lie along axis "
        f"{layout.axis}, so that it mixes them. Expected the examples along axis {axis}. "
        f"{remedy}",
        node.names,
    )


def of_reduced_losses(func, node: Node, data: Tensor, batch_size: int) -> ExampleAxisError:
    """Return the error for a penalty that meets losses that were summed already."""
    return ExampleAxisError(
        f"{function_name(func)} on {node.describe()}: what is computed from parameters alone, "
        "such as a penalty on the weights or a trained weight of a loss, meets "
        f"{'values' if data.dim() else 'a scalar'} in which the {batch_size} examples "
        "were summed, so that its share in each example's loss is not known. Expected it in "
        "the unreduced losses, (weight * losses + penalty), reduced as before. To keep it out of "
        "them, run the penalty's own backward after the context has closed, or use weight_decay; "
        "parameters without any other use can be left out with exclude=.",
        node.names,
    )


def reduced_over(
    func, node: Node, data: Tensor, layout: Examples, trailing: int
) -> ExampleAxisError:
    """Return the error for examples along one of the last axes, over which an operation runs."""
    return ExampleAxisError(
        f"{function_name(func)} on {node.describe()} reduces over the last {trailing} of "
        f"{data.dim()} axes of its data, of shape {tuple(data.shape)}, but the {layout.batch} "
        f"examples lie along axis {layout.axis}, so that it mixes them. Expected them along an "
        "axis before those: give each example a row of its own before the context is opened "
        "(x[None] for a single one, torch.stack for a list), or correct batch_dim=. "
        f"{WHERE_THE_NUMBER_IS_FROM}",
        node.names,
    )


def unknown(marks: Marks, func, node: Node, data: Tensor, axis: int) -> ExampleAxisError:
    """Return the error for data of which it is not known whose rows are whose."""
    got, expected = f"data of shape {tuple(data.shape)}", marks.expected_along(axis)
    lost, meeting = marks.lost_at(data), marks.meetings.behind(data)
    why = []
    if meeting is not None:
        why.append(f"Before it {meeting.name()} {marks.meetings.how_met(meeting)}.")
    if lost is not None:
        why.append(f"Which row is whose was lost at {lost}, or rows of several meet there.")
    if not why and marks.owned(data) is MIXED:
        why.append("It was computed from all examples together, by a sum or a mean for instance.")
    if why:
        got, expected = f"{got}. {' '.join(why)}", f"rows of one example each, {expected}"
        remedies = [
            "Combine each example with values of its own only, or detach what comes from others.",
            IF_A_CONSTANT,
        ]
        if marks.packed:
            remedies.insert(0, IF_ATTENDING)
    else:
        remedies = [
            WHERE_THE_NUMBER_IS_FROM,
            "If the examples lie along another axis, pass batch_dim=.",
            "If these are not data of the batch but weights, or a mask that all examples share, "
            "keep them in the model (an attribute will do).",
        ]
    remedies += [
        "If examples were merged with positions or moved to another axis, keep the example axis as "
        "it is up to this operation; if they were taken out one by one, take x[i : i + 1].",
        IF_KNOWN,
    ]
    alone = "If each loss depends on its own example only all the same (this is checked),"
    remedies.append(
        f'{"Otherwise" if meeting is None else alone} per_example_norms(..., fallback="vmap") '
        "computes this parameter one example at a time, and exclude= leaves it out."
    )
    listed = "".join(f"\n  - {remedy}" for remedy in remedies)
    return ExampleAxisError(
        f"{function_name(func)} on {node.describe()}: which example each row of its data belongs "
        "to is not known, and is not guessed.\n"
        f"  got:      {got}\n"
        f"  expected: {expected}{listed}",
        node.names,
    )
