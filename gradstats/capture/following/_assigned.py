"""Rows of data that the caller assigns to examples."""

from __future__ import annotations

import reprlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradstats._compiler import leave_graph
from gradstats._values import integer, unlike_numbers
from gradstats.capture.following._examples import Examples
from gradstats.capture.following._numbered import numbers_of
from gradstats.capture.operations._modes import innermost_mode
from gradstats.capture.parameters._tensors import node_of
from gradstats.errors import ExampleAxisError

if TYPE_CHECKING:
    from gradstats.capture._context import Context


def assign_rows(tensor: Tensor, owner: Tensor, dim: int = 0) -> Tensor:
    """Say which example each row of a data tensor belongs to, if its shape does not show it.

    Row r of the tensor (its slice r along ``dim``) belongs to example ``owner[r]``; an example may
    have any number of rows, in any order. What the model computes from the rows is then followed as
    for any other data. Call it for rows that are neither one per example nor those described by
    ``cu_seqlens=``, such as the edge features of graphs that are packed by their nodes:

        def loss_fn(model, batch):                           # a batch of torch_geometric
            gs.assign_rows(batch.edge_attr, batch.batch[batch.edge_index[0]])
            return losses(model(batch), batch.y)             # (B,)

        gs.per_example_norms(model, batch, loss_fn, cu_seqlens=batch.ptr)

    Call it in ``loss_fn``, inside the ``with`` block of ``track`` or of a monitor's step, or in the
    model's own forward. It does nothing while nothing is measured, so the call can stay there.

    Args:
        tensor: data, or a tensor computed from data; any shape and dtype.
        owner: (rows,) integers in [0, B), the example of each row along ``dim``.
        dim: the axis along which the rows lie.

    Returns:
        The tensor itself.

    Raises:
        ExampleAxisError: ``owner`` does not name one example for each row, or ``tensor`` is not a
            tensor, is a parameter, or was computed from parameters alone.

    Cost:
        A pass over ``owner`` to check its range, which synchronises with a GPU. Whether the owners
        are correct cannot be checked: they are trusted, as ``cu_seqlens=`` is.
    """
    # has_torch_function() is no substitute: in a graph that is traced under a mode it is False.
    mode = innermost_mode()
    if mode is not None:
        leave_graph("rows that are assigned to examples")
        _note(mode.tracker, tensor, owner, dim)
    return tensor


def _note(tracker: Context, tensor: Tensor, owner: Tensor, dim: int) -> None:
    """Note which example each row of a tensor belongs to, or raise."""
    if not isinstance(tensor, Tensor):
        raise ExampleAxisError(
            f"assign_rows got {type(tensor).__name__}, expected a tensor of data: pass the tensor "
            "that the model takes."
        )
    node = node_of(tensor)
    if node is not None:
        raise ExampleAxisError(
            f"assign_rows got {node.describe()}, which belongs to no example, expected data. "
            "Remove the call: what belongs to which example is found where parameters meet data.",
            node.names,
        )
    with torch._C.DisableTorchFunction():
        number = integer(dim)
        axis = -1 if number is None else number + tensor.dim() if number < 0 else number
        rows = tensor.shape[axis] if 0 <= axis < tensor.dim() else None
        _check(owner, rows, tuple(tensor.shape), dim, tracker.batch_size)
        examples = owner.detach().to(tensor.device, torch.int64)
        marks = tracker.marks
        marks.take_batch([tensor])
        layout = Examples(tracker.batch_size, axis).owned_by(examples, axis)
        marks.place(tensor, layout)
        if marks.values.owner_of(tensor) is not None:
            marks.values.note(tensor, owner=numbers_of(tensor, layout, tensor.dim()))


def _check(owner: Tensor, rows: int | None, shape: tuple[int, ...], dim: Any, batch: int) -> None:
    expected = (
        f"expected a vector of {rows} integers in [0, {batch}): the example of each row along "
        f"axis {dim} of a tensor of shape {shape}."
    )
    if rows is None:
        raise ExampleAxisError(
            f"assign_rows got dim={reprlib.repr(dim)} for a tensor of shape {shape}, expected the "
            f"number of one of its {len(shape)} axes."
        )
    if not isinstance(owner, Tensor):
        raise ExampleAxisError(f"owner is {type(owner).__name__}, {expected}")
    if (found := unlike_numbers(owner)) is not None:
        raise ExampleAxisError(f"owner is {found}, {expected}")
    whole = not (owner.is_floating_point() or owner.is_complex() or owner.dtype == torch.bool)
    if not whole or tuple(owner.shape) != (rows,):
        raise ExampleAxisError(
            f"owner has dtype {owner.dtype} and shape {tuple(owner.shape)}, {expected}"
        )
    if rows:
        low, high = (int(end) for end in owner.aminmax())
        if low < 0 or high >= batch:
            raise ExampleAxisError(f"owner holds numbers from {low} to {high}, {expected}")
