"""Checks of losses and batches, which never guess what the caller has to say."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from gradstats._factors import Segments
from gradstats._values import integer, unlike_numbers
from gradstats.capture._coverage import check_data
from gradstats.capture.following._examples import WHERE_THE_NUMBER_IS_FROM
from gradstats.capture.following._losses import order_of
from gradstats.capture.operations._modes import innermost_mode
from gradstats.capture.operations._nested import tensors_in
from gradstats.capture.parameters._refusals import PACK
from gradstats.errors import ExampleAxisError, LossShapeError, TrackingError
from gradstats.statistics._batches import opaque_in
from gradstats.statistics._division import Division, listed_with_labels


def check_losses(losses, batch_size: int) -> Tensor:
    """Return the losses as a plain (B,) tensor, or raise."""
    if not isinstance(losses, Tensor):
        raise LossShapeError(
            f"the losses are {type(losses).__name__}, expected a tensor of shape ({batch_size},): "
            "one unreduced loss for each example, returned by loss_fn or given to tracker.backward."
        )
    if (found := unlike_numbers(losses)) is not None:
        raise LossShapeError(f"the losses are {found}, expected a dense tensor ({batch_size},).")
    if losses.dim() == 0:
        raise LossShapeError(
            f"the loss is a scalar, expected shape ({batch_size},): one unreduced loss for each "
            'example. Pass reduction="none" to the loss function, and sum or average over the '
            "positions of each example. If the model returns its own mean, as Hugging Face's do, "
            "compute the losses from its logits instead."
        )
    if tuple(losses.shape) != (batch_size,):
        raise LossShapeError(
            f"the losses have shape {tuple(losses.shape)}, expected ({batch_size},): one loss for "
            f"each example. Reduce every axis but the example axis. {WHERE_THE_NUMBER_IS_FROM}"
        )
    if not losses.is_floating_point():
        raise LossShapeError(
            f"the losses have dtype {losses.dtype}, expected a floating-point dtype."
        )
    if not losses.requires_grad:
        raise LossShapeError(
            "the losses do not require grad, expected a differentiable function of the model's "
            "parameters. Was the model run under torch.no_grad(), or were its outputs detached?"
        )
    check_data([losses])
    return losses


def order_here(rows: Tensor) -> Tensor | None:
    """Return which example each of B rows belongs to, (B,), as the current context knows it.

    None if they are in the batch's order, and if there are not B of them.

    Raises:
        ExampleAxisError, CoupledExamplesError: the rows are not one of each example, or are not
            known to be.
    """
    mode = innermost_mode()
    assert mode is not None
    tracker = mode.tracker
    if rows.dim() == 0 or len(rows) != tracker.batch_size:
        return None
    with torch._C.DisableTorchFunction():
        return order_of(tracker.marks, rows)


def check_batch_size(batch_size: int) -> int:
    """Return the batch size, or raise unless it is a positive integer."""
    number = integer(batch_size, 1)
    if number is None:
        raise ExampleAxisError(
            f"batch_size is {_shown(batch_size)}, expected a positive integer: the number of "
            "examples in the batch."
        )
    return number


def check_batch_dim(batch_dim: int) -> int:
    """Return the example axis, or raise unless it is a non-negative integer."""
    number = integer(batch_dim, 0)
    if number is None:
        raise ExampleAxisError(
            f"batch_dim is {_shown(batch_dim)}, expected a non-negative integer: the example axis, "
            "counted from the front."
        )
    return number


def _shown(value: Any) -> str:
    """Describe an argument for an error, without a tensor's values, which would fill the screen."""
    return type(value).__name__ if getattr(value, "ndim", 0) else reprlib.repr(value)


def plain_tensors_in(batch) -> list[Tensor]:
    """Return the tensors in a batch, or raise if one is a nested tensor."""
    tensors = tensors_in(batch)
    if any([tensor.is_nested for tensor in tensors]):
        raise ExampleAxisError(f"the batch holds a nested tensor, expected plain ones. {PACK}")
    return tensors


def infer_batch_size(batch, batch_dim: int) -> int:
    """Return the number of examples of a batch: the size of its first tensor's example axis.

    In a batch of lists of images and targets, and in one that begins with a list of tensors of
    different lengths (bags, sequences) beside as many labels, it is the number of entries.
    """
    for tensor in plain_tensors_in(batch):
        if tensor.dim() > 0:
            size = tensor.shape[min(batch_dim, tensor.dim() - 1)]
            if size == 0:
                raise ExampleAxisError(
                    f"the batch is empty: its first tensor has shape {tuple(tensor.shape)}, "
                    f"expected at least one example along axis {batch_dim}."
                )
            lists = Division(size, batch_dim).lists_with_targets(batch)
            return len(lists[0]) if lists else listed_with_labels(batch, batch_dim) or size
    if isinstance(batch, (Iterator, DataLoader, Dataset)):
        raise ExampleAxisError(
            f"the batch is {type(batch).__name__}, which yields batches, expected one batch, such "
            "as next(iter(loader)). For a data set make a loader first: "
            "torch.utils.data.DataLoader(data, batch_size=64)."
        )
    held = {type(item).__name__ for item in opaque_in(batch) if item is not batch}
    of = f" of {', '.join(sorted(held))}" if held else ""
    raise ExampleAxisError(
        f"the batch is {type(batch).__name__}{of} and holds no tensor with an example axis, so the "
        "number of examples is not known. Expected a tensor, or a tuple, list, mapping or "
        "dataclass of tensors: convert arrays with torch.as_tensor. For any other type, such as "
        "graphs in one batch, pass cu_seqlens=, the rows at which the examples begin (batch.ptr)."
    )


def examples_in(
    batch, batch_dim: int, cu_seqlens: Tensor | None, model: nn.Module
) -> tuple[int, Segments | None]:
    """Return a batch's number of examples and, if they are packed, which example each row is of."""
    if cu_seqlens is None:
        return infer_batch_size(batch, batch_dim), None
    tensors = plain_tensors_in(batch)
    segments = packed_segments(cu_seqlens, model)
    if not opaque_in(batch):  # else there may be other tensors
        check_packed(tensors, batch_dim, segments)
    return segments.batch, segments


def checked_bounds(cu_seqlens: Tensor) -> Tensor:
    """Return the bounds of packed examples as a tensor, or raise if they are invalid."""
    expected = (
        "expected a vector of B + 1 integers: 0, the ends of the first B − 1 examples, and the "
        "number of rows."
    )
    try:
        bounds = torch.as_tensor(cu_seqlens)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ExampleAxisError(
            f"cu_seqlens is {reprlib.repr(cu_seqlens)} ({error}), {expected}"
        ) from error
    if (found := unlike_numbers(bounds)) is not None:
        raise ExampleAxisError(f"cu_seqlens is {found}, {expected}")
    integers = bounds.dtype in (torch.int32, torch.int64)
    if not integers or bounds.dim() != 1 or bounds.numel() < 2:
        raise ExampleAxisError(
            f"cu_seqlens has dtype {bounds.dtype} and shape {tuple(bounds.shape)}, {expected}"
        )
    if int(bounds[0]) != 0 or bool((bounds.diff() < 0).any()) or int(bounds[-1]) == 0:
        raise ExampleAxisError(
            f"cu_seqlens is {bounds.tolist()[:8]}…, expected bounds that begin with 0, never "
            "decrease, and end with the number of packed rows."
        )
    return bounds


def packed_segments(
    cu_seqlens: Tensor, model: nn.Module, batch_size: int | None = None
) -> Segments:
    """Return which example each row of packed examples belongs to, or raise.

    Args:
        cu_seqlens: (B + 1,) integers, the rows at which the examples begin; the last is the number
            of rows.
        model: its parameters are on the device of the data.
        batch_size: B, if the caller gave it beside the bounds.
    """
    bounds = checked_bounds(cu_seqlens)
    lengths = bounds.diff()
    if batch_size not in (None, len(lengths)):
        raise ExampleAxisError(
            f"cu_seqlens bounds {len(lengths)} examples, but batch_size is {batch_size}: expected "
            "the same number."
        )
    if int(bounds[-1]) == len(lengths) and bool((lengths != 1).any()):
        raise ExampleAxisError(
            f"cu_seqlens is {bounds.tolist()[:8]}…: as many rows as examples, though some examples "
            "have no row. It cannot be told whether a tensor of that size holds one number for "
            "each row or for each example. Leave out the empty examples."
        )
    owner = torch.arange(len(lengths), device=bounds.device).repeat_interleave(lengths)
    device = next((parameter.device for parameter in model.parameters()), owner.device)
    return Segments(owner.to(device), len(lengths))


def check_packed(tensors: Iterable[Tensor], batch_dim: int, segments: Segments) -> None:
    """Raise unless the first tensor of a batch has as many rows as its segments say."""
    for tensor in tensors:
        if tensor.dim() > batch_dim:
            sizes = tuple(tensor.shape[batch_dim : batch_dim + 2])
            if segments.rows in (sizes[0], *(sizes[1:] if sizes[0] == 1 else ())):
                return
            raise ExampleAxisError(
                f"cu_seqlens ends with {segments.rows} rows, but the batch's first tensor has "
                f"shape {tuple(tensor.shape)}: expected {segments.rows} rows along axis "
                f"{batch_dim}, or along the next one after an axis of size 1."
            )


def loss_scale(scaler, device: torch.device) -> Tensor | float:
    """Return the factor by which a torch.amp.GradScaler multiplies the loss now.

    () float64 on the device; 1.0 without a scaler.
    """
    if scaler is None:
        return 1.0
    # A disabled scaler has no such attribute.
    if getattr(scaler, "_scale", device) is None:
        raise TrackingError(
            "scaler= is a GradScaler that has not scaled any loss, so this backward is not "
            "scaled. Run scaler.scale(loss).backward(), or leave scaler= out."
        )
    # Not get_scale(), which waits for the device.
    return scaler.scale(torch.ones((), dtype=torch.float64, device=device))


def loss_weights(loss_reduction: str, weights: Tensor | None, batch_size: int) -> Tensor | float:
    """Return the weight of each ℓ_i in the caller's scalar, as they say they formed it."""
    if weights is not None:
        expected = (
            f"expected ({batch_size},) finite, real, non-zero numbers: scalar = Σ weights_i ℓ_i"
        )
        try:
            weights = torch.as_tensor(weights).detach()
        except (TypeError, ValueError, RuntimeError) as error:
            raise LossShapeError(
                f"weights are {reprlib.repr(weights)} ({error}), {expected}."
            ) from error
        if (found := unlike_numbers(weights)) is not None:
            raise LossShapeError(f"weights are {found}, {expected}.")
        if weights.is_complex():
            raise LossShapeError(f"weights have dtype {weights.dtype}, {expected}.")
        if tuple(weights.shape) != (batch_size,):
            raise LossShapeError(f"weights have shape {tuple(weights.shape)}, {expected}.")
        if not bool((weights.isfinite() & (weights != 0)).all()):
            raise LossShapeError(
                f"weights are {reprlib.repr(weights.tolist())}, {expected}. An example of weight "
                "zero has no gradient to measure: leave it out of the batch."
            )
        # A copy: the caller may write the next batch's weights into the same memory.
        return weights.to(torch.float64, copy=True)
    if isinstance(loss_reduction, str):
        if loss_reduction == "mean":
            return 1 / batch_size
        if loss_reduction == "sum":
            return 1.0
    raise TrackingError(
        f'loss_reduction is {loss_reduction!r}, expected "mean" (scalar = (1/B) Σ ℓ_i) or "sum"; '
        "for any other scalar pass weights=, with scalar = Σ weights_i ℓ_i."
    )
