"""Tensors that count as data but may be constants.

These are tensors of given values (``torch.tensor([...])``) or of drawn ones (``torch.randn(...)``)
that have the size of data, tensors in closures and globals, and lists with an entry per example.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from gradstats.capture.following._enclosed import EnclosedTensors, buffers_beside, of_layers
from gradstats.capture.following._examples import Whole
from gradstats.capture.following._marks import Marks
from gradstats.capture.operations._names import function_name
from gradstats.capture.operations._nested import is_among, rebuild, tensors_in
from gradstats.capture.operations._operations import (
    CONVOLUTIONS,
    GIVEN_VALUES,
    PRODUCTS,
    ROW_PRODUCTS,
)
from gradstats.errors import CoupledExamplesError, ExampleAxisError, UnsupportedOperationError

LAYERS = PRODUCTS | ROW_PRODUCTS | CONVOLUTIONS.keys()

# Errors about values that may belong to several examples, or to an unknown one.
ABOUT_EXAMPLES = (ExampleAxisError, CoupledExamplesError, UnsupportedOperationError)


def take_call(
    marks: Marks,
    loss_fn: Any,
    model: nn.Module,
    batch: Sequence[Tensor],
    entries: Iterable[Sequence[Any]],
) -> None:
    """Prepare for a call of a loss function.

    Args:
        marks, loss_fn, model: the context's marks, and what is called.
        batch: the tensors of the batch.
        entries: lists in the batch whose i-th entry is taken for that of the i-th example.
    """
    marks.keep_constant(buffers_beside(loss_fn))
    marks.take_batch(batch)
    if not marks.doubtful_are_data:
        marks.keep_constant(of_layers(model, loss_fn, batch))
    elif not marks.packed:
        for held in entries:
            marks.took_entries = True
            for example, entry in enumerate(held):
                for tensor in tensors_in(entry):
                    marks.mark(tensor, Whole(example))
    marks.enclosed = EnclosedTensors(loss_fn, model, batch)


def took_doubtful(marks: Marks, loss_fn: Any, model: nn.Module, batch: Iterable[Tensor]) -> bool:
    """Whether the forward of a call may have taken constants for data."""
    took = marks.taken is not None or marks.took_entries
    return took or bool(of_layers(model, loss_fn, batch))


def takes_for_data(marks: Marks, function: Callable[..., Any], tensor: Tensor) -> bool:
    """Whether a new tensor of given or drawn values counts as data because of its size.

    If it does, this is noted on the tensor, and for ``explain``.
    """
    given = function in GIVEN_VALUES
    # With packed examples a mistake would go unnoticed, as their rows may meet.
    if marks.packed or not marks.doubtful_are_data:
        return False
    if not marks.has_example_axis(tensor):
        return False
    if given or marks.taken is None:
        marks.taken = function, tuple(tensor.shape)
    marks.values.note(tensor, **({"given": True} if given else {"drawn": True}))
    return True


def took_given(marks: Marks) -> bool:
    """Whether tensors made from given values were taken for data because of their size."""
    return marks.taken is not None and marks.taken[0] in GIVEN_VALUES


def explain(marks: Marks, error: BaseException | None) -> None:
    """Add to an error about examples that a tensor was taken for data because of its size."""
    if marks.taken is not None and isinstance(error, ABOUT_EXAMPLES):
        function, shape = marks.taken
        instead = "keep it in the model (register_buffer)"
        if function not in GIVEN_VALUES:
            instead = "draw it like a parameter (torch.randn_like(weight)) or into a buffer"
            instead += " (buffer.normal_())"
        error.args = (
            f"{error} In this forward {function_name(function)} made a tensor of shape {shape}. "
            "Since it has as many rows as there are examples, it was taken to hold one row of "
            f"each. If it belongs to no example, {instead}, or use another batch size.",
        )


def is_given(marks: Marks, tensor: Tensor, writes: int = 0) -> bool:
    """Whether a tensor is of given values, and counts as data only because of its size.

    With ``writes``, whether this was so before its last ``writes`` changes.
    """
    given = took_given(marks) and "given" in marks.values.held_by(tensor, writes)
    return given and not tensor.requires_grad


def is_drawn(marks: Marks, tensor: Tensor, writes: int = 0) -> bool:
    """Whether the same is so of a tensor of drawn values."""
    return "drawn" in marks.values.held_by(tensor, writes)


def note_made(
    marks: Marks,
    function: Callable[..., Any],
    results: Iterable[Any],
    data: Iterable[Tensor],
    changed: Any,
) -> None:
    """Note which results are of given or drawn values, if all of their data operands are.

    Results of layers on drawn values are excepted: such values are latent variables, not noise of
    weights.

    Args:
        marks: where to note it.
        function, results: the operation and what it returned.
        data: its operands that count as data.
        changed: the operand that it changed in place; None if there is none.
    """
    given = True
    for item in data:
        writes = item is changed
        if not is_given(marks, item, writes):
            given = False
            if function in LAYERS or not is_drawn(marks, item, writes):
                return
    for tensor in (*results, changed):
        # What requires a gradient was computed from parameters too.
        if isinstance(tensor, Tensor) and not tensor.requires_grad:
            marks.values.note(tensor, **({"given": True} if given else {"drawn": True}))


def as_constants(marks: Marks, data: Sequence[Tensor], items):
    """Return operands with constants in the place of ``data``, which are left as they are."""

    def constant(item):
        if not is_among(item, data):
            return item
        # If values were drawn into a buffer, all that shares its memory is data, views too.
        written = marks.written.storages and item in marks.written
        copy = item.clone() if written else item.view_as(item)
        marks.mark_constant(copy)
        return copy

    return rebuild(items, constant)


def without_given(marks: Marks, data: list[Tensor]) -> list[Tensor]:
    """Return the data operands that determine where the examples lie.

    Given values do not, whatever their size, if they meet data of the batch.
    """
    of_batch = [item for item in data if not is_given(marks, item)]
    known = any(marks.owned(item) is not None for item in of_batch)
    return of_batch if known else data
