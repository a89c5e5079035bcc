"""Where the examples lie after operations that move, cut, pick or repeat along their axis.

One table, ``REINDEXES``, says what each does to the layout of its first operand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import takewhile
from math import gcd
from typing import Any

import torch
from torch import Tensor

from gradstats._compiler import is_compiling
from gradstats.capture.following._examples import Examples, Whole, spread
from gradstats.capture.following._indexing import INDEX_SELECT, REPEATS, items_of, read_at
from gradstats.capture.following._reductions import KEYWORD
from gradstats.capture.operations._call import Call
from gradstats.capture.operations._memory import extent
from gradstats.capture.operations._operations import EXPANDS, PADS, variants
from gradstats.capture.parameters._nodes import same_storage

# Stands for the example of memory between a tensor's elements, which has none.
BETWEEN = -2


def moved(source: Tensor, layout: Examples, result: Tensor) -> Examples | None:
    """Follow moved axes by their strides, which they keep."""
    # An axis keeps its stride wherever it is moved, and an axis with another stride is another one.
    # Two axes have the same stride only if one of them has size 1 or is expanded.
    stride, size = source.stride(layout.axis), source.shape[layout.axis]
    found = [
        axis
        for axis in range(result.dim())
        if result.stride(axis) == stride and result.shape[axis] == size
    ]
    # A single row lies along any axis of size 1.
    return layout.along(found[0]) if len(found) == 1 or (size == 1 and found) else None


def reshaped(source: Tensor, layout: Examples, result: Tensor) -> Examples | Whole | None:
    """Follow reshapes by the order of the elements, which they keep."""
    if result.shape[: layout.axis + 1] == source.shape[: layout.axis + 1]:
        return layout
    if result.numel() != source.numel() or not result.numel():
        return None  # a view as another dtype; or no elements, which may be anyone's
    width = math.prod(source.shape[layout.axis + 1 :])
    for axis in range(result.dim()) if layout.segments is None else ():
        step, example = math.prod(result.shape[axis + 1 :]), layout.fold * width
        if result.shape[axis] * step == layout.rows * width and example % step == 0:
            return Examples(layout.batch, axis, example // step)
    found = owner_in_reshaped(source, layout.of_elements(source), layout.axis, result)
    return None if found is None else spread(found, layout.batch)


def owner_in_reshaped(source: Tensor, owner: Tensor, last: int, result: Tensor) -> Tensor | None:
    """Return the example of each element after a reshape; 1 stands for axes that stay.

    Args:
        source: the operand.
        owner: the example of each of its elements, expanded.
        last: the last axis along which these differ.
        result: of the reshape.
    """
    if is_compiling() or not result.numel() or result.numel() != source.numel():
        return None  # a graph has no values to look at
    # Of the axes behind, which stay as they are, one element stands for all.
    same = same_behind(source.shape[last + 1 :], result.shape)
    sizes = [*result.shape[: result.dim() - same], *[1] * same]
    return first_behind(owner, same).reshape(sizes)


def first_behind(tensor: Tensor, axes: int) -> Tensor:
    """Return the first element along each of so many last axes, of size 1 then."""
    first: tuple[Any, ...] = (..., *[slice(1)] * axes)
    return tensor[first]


def same_behind(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return how many entries two sequences share at their ends."""
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(reversed(first), reversed(second)))  # noqa: B905
    return len(list(pairs))


def _indexed(call: Call, source, layout) -> Examples | Whole | None:
    """x[…]: the index at the example axis selects the examples too."""
    found = read_at(source, items_of(source, call.args[1]), layout)
    return picked(call, source, layout) if found is None else found


def _along(name: str, position: int, change):
    """Return a rule for operations that rearrange rows along a ``dim``, perhaps the examples'.

    Args:
        name, position: name and position of the axis among the operation's arguments.
        change: called as change(owner, call) with the example of each row, returns that of
            each new row; None if elements are picked one by one.
    """

    def rule(call: Call, source, layout):
        dim = call.argument(position, name)
        dims = dim if isinstance(dim, (tuple, list)) else (dim,)
        if name == "dims" and len(dims) == 1:
            dims = (*dims, *call.args[position + 1 :])  # x.flip(0, 1)
        # Without an axis, a roll goes over all elements.
        if dims and dim is not None and all(d % source.dim() != layout.axis for d in dims):
            return layout
        if dim is None or len(dims) != 1 or change is None:
            return picked(call, source, layout)
        owner = change(layout.owner(source.device), call)
        return layout.owned_by(owner.reshape(-1), layout.axis)

    return rule


def _ranked(position: int, default: int):
    """Return a rule for operations that sort elements along an axis."""

    def rule(call: Call, source, layout):
        dim = call.argument(position, "dim", default)
        return None if dim % source.dim() == layout.axis else layout

    return rule


def _sliced(position: int):
    """Return a rule for operations whose results are slices of their operand."""

    def rule(call: Call, source, layout):
        result = call.result
        dim = call.argument(position, "dim", 0) % source.dim()
        lost = source.dim() - result.dim()
        if dim != layout.axis:
            return layout.along(layout.axis - (lost if dim < layout.axis else 0))
        if source.is_nested:
            starts = source.offsets() * source.values().stride(0)
            # Empty ones begin where the next one does; the last that begins here has rows.
            return layout.whole(int((starts == result.storage_offset()).nonzero()[-1]))
        if source.stride(layout.axis) == 0:
            return None
        start = (result.storage_offset() - source.storage_offset()) // source.stride(layout.axis)
        if lost:
            return layout.whole(start)
        owner = layout.owner(source.device)[start : start + result.shape[layout.axis]]
        return layout.owned_by(owner, layout.axis)

    return rule


def _chosen(call: Call, source, layout) -> Examples | Whole:
    """One place along an axis."""
    dim = call.argument(1, "dim") % source.dim()
    if dim == layout.axis:
        return layout.whole(call.argument(2, "index"))
    return layout.along(layout.axis - (dim < layout.axis))


_rows_repeated = _along(
    "dim", 2, lambda owner, call: owner.repeat_interleave(call.argument(1, "repeats"))
)


def _repeated_in_place(call: Call, source, layout) -> Examples | Whole | None:
    """Each row repeated in place; given counts alone, each row's number."""
    if len(call.args) == 1 and "repeats" not in call.kwargs:
        return layout.owned_by(layout.owner(source.device).repeat_interleave(source), 0)
    return _rows_repeated(call, source, layout)


def _expanded(call: Call, source, layout) -> Examples | None:
    """New axes stand in front; a single row that is expanded itself stays one example's."""
    result = call.result
    after = layout.axis + result.dim() - source.dim()
    return layout.along(after) if result.shape[after] == source.shape[layout.axis] else None


def _with_axes(call: Call, source, layout) -> Examples | Whole | None:
    """A reshape to at least so many axes, if a single tensor was given."""
    return reshaped(source, layout, call.result) if len(call.args) == 1 else None


def _made_diagonal(call: Call, source, layout) -> Examples | None:
    """The last axis becomes the diagonal of two, which may stand anywhere among the others."""
    if layout.axis == source.dim() - 1:
        return None
    args, kwargs, result = call.args, call.kwargs, call.result
    given = tuple(args[1:]) + (0, -2, -1)[len(args) - 1 :]
    made = {kwargs.get(f"dim{k}", given[k]) % result.dim() for k in (1, 2)}
    return layout.along([axis for axis in range(result.dim()) if axis not in made][layout.axis])


def _diagonal(call: Call, source, layout) -> Examples | Whole | None:
    """The diagonal of a matrix; a vector becomes one, whose examples lie along no axis."""
    return picked(call, source, layout) if source.dim() == 2 else None


def _padded(call: Call, source, layout) -> Examples | None:
    """Padding by widths for both sides of each axis, the last axis first."""
    place = 2 * (source.dim() - 1 - layout.axis)
    return None if any(call.argument(1, "pad")[place : place + 2]) else layout


def _repeated(call: Call, source, layout) -> Examples | None:
    """The whole tensor several times, along new axes in front and along its own."""
    result = call.result
    after = layout.axis + result.dim() - source.dim()
    if result.shape[after] == source.shape[layout.axis]:
        return layout.along(after)
    times = result.shape[after] // source.shape[layout.axis]
    return layout.owned_by(layout.owner(source.device).repeat(times), after)


def picked(call: Call, source: Tensor, layout: Examples) -> Examples | Whole | None:
    """Elements picked one by one: the operation is repeated on each element's example."""
    found = owner_of_picked(call, source, layout.of_elements(source), layout.axis)
    return None if found is None else spread(found, layout.batch)


def owner_of_picked(call: Call, source: Tensor, owner: Tensor, last: int) -> Tensor | None:
    """Return the example of each element of a result, given those of the operand's elements.

    Args:
        call: an operation that moves or picks elements.
        source: its first operand.
        owner: the example of each of its elements, expanded.
        last: the last axis along which these differ.
    """
    func, args, kwargs, _, result = call
    if not result.numel() or is_compiling():
        return None  # a graph has no values to look at
    if same_storage(result, source):
        return _owner_in_view(source, owner, last, result)
    return func(owner.contiguous(), *args[1:], **kwargs)


def _owner_in_view(source: Tensor, owner: Tensor, last: int, result: Tensor) -> Tensor | None:
    """Return the example of each element of a view; None if it shows other memory as well.

    The examples' numbers are laid out in memory as the elements are, and seen in the same way.

    Args:
        source, owner, last: as for ``owner_of_picked``.
        result: the view.
    """
    start = int(result.storage_offset() - source.storage_offset())
    if start < 0 or start + extent(result) > extent(source) or source.stride(last) == 0:
        return None
    # Of the axes behind, which stay as they are, one element stands for all.
    same = same_behind(
        list(zip(source.shape, source.stride(), strict=True))[last + 1 :],
        list(zip(result.shape, result.stride(), strict=True)),
    )
    while same and not _steps_over(same, source, result, start):
        same -= 1
    first: tuple[Any, ...] = (..., *[0] * same)
    whole, part, owner = source[first], result[first], owner[first]
    unit = gcd(start, *whole.stride(), *part.stride()) or 1
    whole_steps, part_steps = ([step // unit for step in item.stride()] for item in (whole, part))
    size = 1 + extent(whole) // unit
    memory = torch.full((size,), BETWEEN, dtype=torch.int32, device=source.device)
    # Along expanded axes, of stride 0, one element stands for all.
    sizes = [n if step else 1 for n, step in zip(whole.shape, whole_steps, strict=True)]
    memory.as_strided(sizes, whole_steps).copy_(owner[tuple(map(slice, sizes))])
    ones = [1] * same
    found = memory.as_strided([*part.shape, *ones], [*part_steps, *ones], start // unit)
    return None if bool((found == BETWEEN).any()) else found


def _steps_over(same: int, source: Tensor, result: Tensor, start: int) -> bool:
    """Whether no other axis steps into the last ones, as windows that overlap do.

    Args:
        same: how many of the last axes both tensors share.
        source, result: the tensors.
        start: the distance in memory between them.
    """
    block = max(1, source.shape[-same] * source.stride(-same))
    others = (*source.stride()[:-same], *result.stride()[:-same], start)
    return all(step % block == 0 for step in others)


def _of_batch(dims: int) -> Callable[..., Examples | None]:
    """Return the rule of an operation to which data with this many axes are a batch."""

    def rule(call: Call, source, layout) -> Examples | None:
        return layout if layout.axis == 0 and source.dim() == dims else None

    return rule


def _jagged(call: Call, source, layout) -> Examples | None:
    """The rows between two bounds become one row of a nested tensor."""
    if layout.axis != 0 or is_compiling() or call.argument(3, "lengths") is not None:
        return None
    return layout.in_pieces(call.args[1][:-1])


def _segments(call: Call, source, layout) -> Examples | None:
    """The rows between two bounds become one row."""
    axis = call.argument(KEYWORD, "dim", 0) % source.dim()
    if layout.axis != axis:
        return layout
    if axis or is_compiling():
        return None
    lengths, offsets = (call.argument(KEYWORD, name) for name in ("lengths", "offsets"))
    return layout.in_pieces(lengths.cumsum(0) - lengths if offsets is None else offsets[:-1])


# Operations that cut, repeat or pick elements of their first operand unchanged, with the rule for
# the layout.
PICKS: dict[Any, Callable[..., Any]] = {
    Tensor.__getitem__: _indexed,
    **dict.fromkeys(
        INDEX_SELECT,
        _along("dim", 1, lambda owner, call: owner[call.argument(2, "index")]),
    ),
    **dict.fromkeys(REPEATS, _repeated_in_place),
    **dict.fromkeys(variants("flip"), _along("dims", 1, lambda owner, call: owner.flip(0))),
    **dict.fromkeys(
        variants("roll"),
        _along("dims", 2, lambda owner, call: owner.roll(call.argument(1, "shifts"))),
    ),
    **dict.fromkeys(
        (torch.fft.fftshift, torch.fft.ifftshift, *variants("gather")), _along("dim", 1, None)
    ),
    **dict.fromkeys(variants("take_along_dim"), _along("dim", 2, None)),
    **dict.fromkeys(
        variants(
            "chunk", "split", "tensor_split", "split_with_sizes", "unsafe_chunk", "unsafe_split",
            "unsafe_split_with_sizes",
        ),
        _sliced(2),
    ),
    **dict.fromkeys(variants("narrow", "unbind"), _sliced(1)),
    **dict.fromkeys(variants("select"), _chosen),
    **dict.fromkeys(EXPANDS, _expanded),
    **dict.fromkeys(variants("repeat", "tile"), _repeated),
    **dict.fromkeys(variants("diag"), _diagonal),
    # Any other, rarely used, is repeated on each element's example.
    **dict.fromkeys(
        (
            *variants(
                "diagonal", "take", "flipud", "fliplr", "rot90", "vsplit", "hsplit", "dsplit",
                "masked_select",
            ),
            torch.linalg.diagonal, Tensor.unfold, Tensor.__reversed__,
        ),
        picked,
    ),
}  # fmt: skip

# The same, and others that select, repeat or reorder rows.
REINDEXES = {
    **PICKS,
    **dict.fromkeys(variants("sort", "argsort"), _ranked(1, -1)),
    **dict.fromkeys(variants("msort"), _ranked(1, 0)),
    **dict.fromkeys(variants("topk"), _ranked(2, -1)),
    **dict.fromkeys(PADS, _padded),
    **dict.fromkeys(variants("atleast_1d", "atleast_2d", "atleast_3d"), _with_axes),
    **dict.fromkeys(variants("diag_embed"), _made_diagonal),
    torch._nested_view_from_jagged: _jagged,
    torch.segment_reduce: _segments,
    **dict.fromkeys(variants("stft"), _of_batch(2)),
    **dict.fromkeys(variants("istft"), _of_batch(3)),
    **dict.fromkeys(variants("as_strided"), picked),
}
