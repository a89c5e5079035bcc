"""Where the examples lie in a tensor of data, followed through what the user's code does to it.

By contract data have their examples along the caller's ``batch_dim``. Code that transposes or folds
that axis leaves tensors in which shape alone would mislead: with as many positions as examples a
transposed batch looks like an untransposed one. Such tensors carry their layout with them; where it
is lost, parameters that meet them are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gradstats._cost import product
from gradstats.capture._einsum import parse_equation
from gradstats.capture._examples import Examples, Whole
from gradstats.capture._indexing import argument_of, items_of, read_at
from gradstats.capture._nodes import flatten, same_storage
from gradstats.capture._operations import (
    ADDED_PRODUCTS,
    BATCH_FIRST,
    BROADCASTS,
    CONVOLUTIONS,
    JOINS,
    KEEPS,
    LOOKS_AT_FIRST,
    MOVES,
    OUTER_PRODUCTS,
    PRODUCTS,
    RESHAPES,
    ROW_PRODUCTS,
    SCRAMBLES,
    SHARED_WEIGHT,
    SOLVES,
    SUM_LAST,
    TENSOR_PRODUCTS,
    TRANSPOSED_CONVOLUTIONS,
    UNFOLLOWED,
    variants,
)
from gradstats.capture._reductions import KEYWORD, OVER_AXES, QUANTILES, reduced
from gradstats.capture._tensors import node_of


def follow(
    func,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    source: Tensor,
    layout: Examples,
    result: Tensor,
) -> Examples | Whole | None:
    """Return the layout of an operation's result, given the layout of its first data operand.

    Args:
        func, args, kwargs: the operation and its arguments.
        source: the operand.
        layout: its layout.
        result: the operation's result.

    Returns:
        The layout, or None where the operation may have lost it.
    """
    if func in SCRAMBLES or (func in BATCH_FIRST and layout.axis != 0) or is_one(func, source):
        return None
    if func in MOVES:
        return _moved(source, layout, result)
    if func in RESHAPES:
        return _reshaped(source, layout, result)
    if func in REINDEXES:
        return REINDEXES[func](func, args, kwargs, source, layout, result)
    if func in OVER_AXES and (func in QUANTILES or result.dim() < source.dim()):
        return reduced(func, args, kwargs, source, layout, result)
    if func in OVER_AXES and result.dim() > source.dim():
        return None  # broadcast against other operands
    if result.dim() <= layout.axis:
        return None
    lead = layout.axis + 1
    return layout if result.shape[:lead] == source.shape[:lead] else None


def stays(func, source: Tensor, layout: Examples, result: Tensor) -> bool:
    """Whether it shows at once that the result of one of ``PLAIN_VIEWS`` lies as its operand does.

    Where it does not, ``follow`` has the answer, for ten times the time.
    """
    lead = layout.axis + 1
    if result.shape[:lead] != source.shape[:lead]:
        return False
    if func not in MOVES:
        return True
    # As in ``_moved``: the same axis, and no other like it.
    stride, strides = source.stride(layout.axis), result.stride()
    return strides[layout.axis] == stride and strides.count(stride) == 1


def is_one(func, source: Tensor) -> bool:
    """Whether a convolution takes its operand for one example."""
    return func in CONVOLUTIONS and source.dim() == CONVOLUTIONS[func] + 1


def aligned(func, args: Sequence[Any]) -> bool:
    """Whether it shows at once that trained operands lie as the first does.

    Where they are broadcast, from the right, the examples of one may meet positions of another.
    """
    for item in args[1:]:
        if type(item) is Tensor and (item.requires_grad or item.dim() > args[0].dim()):
            if func in SHARED or item.dim() != args[0].dim():
                return False
    return True


def keeps_examples(func, args: Sequence[Any], axis: int, result) -> bool:
    """Whether it shows at once that an operation that is not watched leaves the examples alone."""
    if not isinstance(result, Tensor):
        return not any(isinstance(item, Tensor) and item.requires_grad for item in flatten(result))
    first = args[0]
    if func in BROADCASTS and not all(
        item.dim() in (0, result.dim())
        for item in args
        if isinstance(item, Tensor) and node_of(item) is None
    ):
        return False
    if is_one(func, first) or not aligned(func, args):
        return False
    if func in SUM_LAST and first.dim() == axis + 1:
        return False  # the axis that it sums
    if func in BATCH_FIRST and axis != 0:
        return False  # which it takes for channels or positions
    if not result.requires_grad:
        return True
    if func not in KEEPS:
        return False
    if first.dim() <= axis:
        return True
    return result.dim() > axis and result.shape[axis] == first.shape[axis]


def leaves(func, source: Tensor, axis: int, result) -> bool:
    """Whether an operation over other axes leaves that of the examples at its place."""
    if not isinstance(result, Tensor):
        result = result[0]
    if axis == 0:
        return 0 < result.dim() <= source.dim() and func not in QUANTILES
    return result.dim() == source.dim()


def keeps_rows(operands: Sequence[Tensor], axis: int) -> bool:
    """Whether a product multiplies, of either operand, what lies at one place along an axis."""
    if len(operands) != 2:
        return False
    first, second = operands
    return first.dim() == second.dim() > axis + 2 and second.shape[axis] != 1


def contracted(args: tuple[Any, ...], place: int, layout: Examples) -> Examples | None:
    """An equation says where the example's index goes, of the operand at that place."""
    equation, *operands = args
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = list(operands[0])
    if not isinstance(equation, str):
        return None
    inputs, out = parse_equation(equation, [operand.dim() for operand in operands])
    letter = inputs[place][layout.axis]
    return layout.along(out.index(letter)) if letter in out else None


def tensordot(func, args: tuple[Any, ...], kwargs, place: int, layout: Examples) -> Examples | None:
    """What is left of the first operand's axes, and behind them of the second's."""
    first, second = args[:2]
    if func is torch.tensordot:
        dims = argument_of((*args, 2), kwargs, 2, "dims")
    else:
        dims = ([], []) if func in OUTER_PRODUCTS else ([-1], [-1])
    if isinstance(dims, Tensor):
        return None
    if isinstance(dims, int):
        dims = range(first.dim() - dims, first.dim()), range(dims)
    summed = [[axes] if isinstance(axes, int) else axes for axes in dims]
    left = [
        [axis for axis in range(tensor.dim()) if axis not in {a % tensor.dim() for a in axes}]
        for tensor, axes in zip((first, second), summed, strict=True)
    ]
    if layout.axis not in left[place]:
        return None
    return layout.along(left[place].index(layout.axis) + (len(left[0]) if place else 0))


def convolved(
    func, args: tuple[Any, ...], kwargs, result: Tensor, place: int, layout: Examples
) -> Examples | None:
    """In groups of channels, as many for each example, every example has a kernel of its own."""
    if layout.batch == 1:
        return Examples(1, 0, len(result))
    if place == 0 and layout.axis == 0:
        return layout
    if layout.axis != (1 if place == 0 else 0):
        return None
    owner = layout.owner(result.device)
    if place == 0 or (place == 1 and func in TRANSPOSED_CONVOLUTIONS):
        groups = argument_of((*args, *(1,) * 7)[:7], kwargs, 6, "groups")
        owners = owner.view(groups, -1)
        if not bool((owners == owners[:, :1]).all()):
            return None  # examples are summed
        owner = owners[:, 0].repeat_interleave(result.shape[1] // groups)
    return layout.owned_by(owner, 1)


def _moved(source: Tensor, layout: Examples, result: Tensor) -> Examples | None:
    # Strides name the axes: an axis keeps its stride wherever it is moved, and an axis of another
    # stride is another axis. Where two axes share a stride, one of them has size 1 or is expanded.
    stride, size = source.stride(layout.axis), source.shape[layout.axis]
    found = [
        axis
        for axis in range(result.dim())
        if result.stride(axis) == stride and result.shape[axis] == size
    ]
    # One row has the same layout along every axis of size one.
    return layout.along(found[0]) if len(found) == 1 or (size == 1 and found) else None


def _reshaped(source: Tensor, layout: Examples, result: Tensor) -> Examples | None:
    """Reshapes keep the order of elements, which says whose each row of the result is."""
    if result.shape[: layout.axis + 1] == source.shape[: layout.axis + 1]:
        return layout
    if result.numel() != source.numel():
        return None  # seen as another dtype
    if result.numel() == 0:
        places = [axis for axis in range(result.dim()) if result.shape[axis] == layout.rows]
        return layout.along(places[0]) if len(places) == 1 else None
    rows, width = layout.rows, product(source.shape[layout.axis + 1 :])
    owners: Tensor | None = None
    for axis in range(result.dim()):
        size, step = result.shape[axis], product(result.shape[axis + 1 :])
        if layout.segments is None and size * step == rows * width:
            example = layout.fold * width
            if example % step == 0:
                return Examples(layout.batch, axis, example // step)
        if (size * step) % width or max(step, width) % min(step, width):
            continue
        if owners is None:
            # The example of each run of `width` elements, in the order of memory.
            owners = layout.owner(source.device).repeat(source.numel() // (rows * width))
        inner = max(1, step // width)
        blocks = owners.view(-1, size * step // width // inner, inner)
        if bool((blocks == blocks[:1, :, :1]).all()):
            owner = blocks[0, :, 0].repeat_interleave(max(1, width // step))
            return layout.owned_by(owner, axis)
    return None


def _indexed(func, args, kwargs, source, layout, result) -> Examples | Whole | None:
    """x[…]: whichever index stands at the example axis selects the examples too."""
    found = read_at(source, items_of(source, args[1]), layout)
    return _picked(func, args, kwargs, source, layout, result) if found is None else found


def _along(name: str, position: int, change, default: int | tuple[int, ...] | None = None):
    """Return a rule for operations that rearrange rows along a ``dim`` that may be the examples'.

    Args:
        name, position: keyword and place of the axis among the operation's arguments.
        change: called as change(owner, args, kwargs), it returns the owners of the new rows; None
            where elements are picked one by one.
        default: the axis where none is given.
    """

    def rule(func, args, kwargs, source, layout, result):
        dim = kwargs.get(name, args[position] if len(args) > position else default)
        dims = dim if isinstance(dim, (tuple, list)) else (dim,)
        if name == "dims" and len(dims) == 1:
            dims = (*dims, *args[position + 1 :])  # x.flip(0, 1)
        if dim is not None and all(d % source.dim() != layout.axis for d in dims):
            return layout
        if dim is None or len(dims) != 1 or change is None:
            return _picked(func, args, kwargs, source, layout, result)
        owner = change(layout.owner(source.device), args, kwargs)
        return layout.owned_by(owner.reshape(-1), layout.axis)

    return rule


def _ranked(position: int, default: int):
    """Return a rule for operations that put elements in an order of their own along an axis."""

    def rule(func, args, kwargs, source, layout, result):
        dim = kwargs.get("dim", args[position] if len(args) > position else default)
        return None if dim % source.dim() == layout.axis else layout

    return rule


def _sliced(position: int, default: int = 0):
    """Return a rule for operations whose results are slices of their operand."""

    def rule(func, args, kwargs, source, layout, result):
        dim = kwargs.get("dim", args[position] if len(args) > position else default)
        dim %= source.dim()
        lost = source.dim() - result.dim()
        if dim != layout.axis:
            return layout.along(layout.axis - (lost if dim < layout.axis else 0))
        if source.stride(layout.axis) == 0:
            return None
        start = (result.storage_offset() - source.storage_offset()) // source.stride(layout.axis)
        if lost:
            return layout.whole(start)
        owner = layout.owner(source.device)[start : start + result.shape[layout.axis]]
        return layout.owned_by(owner, layout.axis)

    return rule


def _chosen(func, args, kwargs, source, layout, result) -> Examples | Whole:
    """One place along an axis."""
    dim = argument_of(args, kwargs, 1, "dim") % source.dim()
    if dim == layout.axis:
        return layout.whole(argument_of(args, kwargs, 2, "index"))
    return layout.along(layout.axis - (dim < layout.axis))


def _expanded(func, args, kwargs, source, layout, result) -> Examples | None:
    """New axes stand in front; an axis of size 1 that is expanded holds no examples but one."""
    after = layout.axis + result.dim() - source.dim()
    return layout.along(after) if result.shape[after] == source.shape[layout.axis] else None


def _masked(func, args, kwargs, source, layout, result) -> Examples | Whole | None:
    """The elements where a mask is true, one after the other."""
    mask = argument_of(args, kwargs, 1, "mask")
    if torch.broadcast_shapes(mask.shape, source.shape) != source.shape:
        return None  # the mask repeats the operand
    return read_at(source, [mask.expand(source.shape)], layout)


def _with_axes(func, args, kwargs, source, layout, result) -> Examples | None:
    """As many axes as an operation wants at least, of one tensor."""
    return _reshaped(source, layout, result) if len(args) == 1 and args[0] is source else None


def _made_diagonal(func, args, kwargs, source, layout, result) -> Examples | None:
    """The last axis becomes two, which may stand anywhere among the others."""
    if layout.axis == source.dim() - 1:
        return None
    given = tuple(args[1:]) + (0, -2, -1)[len(args) - 1 :]
    made = {kwargs.get(f"dim{k}", given[k]) % result.dim() for k in (1, 2)}
    return layout.along([axis for axis in range(result.dim()) if axis not in made][layout.axis])


def _padded(func, args, kwargs, source, layout, result) -> Examples | None:
    """Widths for both sides of each axis, the last axis first."""
    place = 2 * (source.dim() - 1 - layout.axis)
    return None if any(argument_of(args, kwargs, 1, "pad")[place : place + 2]) else layout


def _repeated(func, args, kwargs, source, layout, result) -> Examples | None:
    """The whole is put side by side, along new axes in front and along its own."""
    after = layout.axis + result.dim() - source.dim()
    times = result.shape[after] // source.shape[layout.axis]
    if times == 1:
        return layout.along(after)
    return layout.owned_by(layout.owner(source.device).repeat(times), after)


def _picked(func, args, kwargs, source, layout, result) -> Examples | Whole | None:
    """Elements picked one by one: what happens to the elements happens to their owners."""
    if not source.numel() or not result.numel() or torch.compiler.is_compiling():
        return None  # a graph has no values to look at
    owner = layout.owner(source.device).int()
    owner = owner.view([-1, *(1 for _ in source.shape[layout.axis + 1 :])])
    if not (result._is_view() and same_storage(result, source)):
        found = func(owner.expand(source.shape).contiguous(), *args[1:], **kwargs)
    else:
        start = result.storage_offset() - source.storage_offset()
        reach = 1 + _extent(source)
        if start < 0 or start + _extent(result) >= reach or source.stride(layout.axis) == 0:
            return None
        memory = torch.full((reach,), -1, dtype=torch.int32, device=source.device)
        # What is repeated is written once.
        sizes = [n if step else 1 for n, step in zip(source.shape, source.stride(), strict=True)]
        memory.as_strided(sizes, source.stride()).copy_(owner)
        found = memory.as_strided(result.shape, result.stride(), start)
    if bool((found < 0).any()):
        return None  # between the operand's elements lie others
    if layout.batch > 1 and bool((found == found.flatten()[0]).all()):
        return Whole(int(found.flatten()[0]))
    for axis in range(found.dim()):
        rows = found.movedim(axis, 0).reshape(found.shape[axis], -1)
        if bool((rows == rows[:, :1]).all()):
            return layout.owned_by(rows[:, 0].long(), axis)
    return None


def _extent(tensor: Tensor) -> int:
    """Return how far a tensor's last element lies from its first in memory."""
    return sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def _of_batch(dims: int) -> Callable[..., Examples | None]:
    """Return the rule of an operation that takes data of so many axes for a batch."""

    def rule(func, args, kwargs, source, layout, result) -> Examples | None:
        return layout if layout.axis == 0 and source.dim() == dims else None

    return rule


# Operations that select, repeat or reorder rows, with how the examples go along.
REINDEXES = {
    Tensor.__getitem__: _indexed,
    **dict.fromkeys(
        variants("index_select"),
        _along("dim", 1, lambda owner, a, k: owner[argument_of(a, k, 2, "index")]),
    ),
    **dict.fromkeys(
        variants("repeat_interleave"),
        _along(
            "dim", 2, lambda owner, a, k: owner.repeat_interleave(argument_of(a, k, 1, "repeats"))
        ),
    ),
    **dict.fromkeys(variants("flip"), _along("dims", 1, lambda owner, a, k: owner.flip(0))),
    Tensor.__reversed__: _along("", 1, lambda owner, a, k: owner.flip(0), 0),
    **dict.fromkeys(variants("flipud"), _along("", 1, lambda owner, a, k: owner.flip(0), 0)),
    **dict.fromkeys(variants("fliplr"), _along("", 1, lambda owner, a, k: owner.flip(0), 1)),
    **dict.fromkeys(variants("rot90"), _along("dims", 2, None, (0, 1))),
    torch.fft.fftshift: _along("dim", 1, None),
    torch.fft.ifftshift: _along("dim", 1, None),
    **dict.fromkeys(
        variants("roll"),
        _along("dims", 2, lambda owner, a, k: owner.roll(argument_of(a, k, 1, "shifts"))),
    ),
    **dict.fromkeys(variants("gather"), _along("dim", 1, None)),
    **dict.fromkeys(variants("take_along_dim"), _along("dim", 2, None)),
    **dict.fromkeys(variants("sort", "argsort"), _ranked(1, -1)),
    **dict.fromkeys(variants("msort"), _ranked(1, 0)),
    **dict.fromkeys(variants("topk"), _ranked(2, -1)),
    **{function: _sliced(2) for name in ("chunk", "split", "tensor_split", "split_with_sizes",
       "unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes")
       for function in variants(name)},
    **dict.fromkeys(variants("narrow"), _sliced(1)),
    **dict.fromkeys(variants("unbind"), _sliced(1)),
    **dict.fromkeys(variants("select"), _chosen),
    **{function: _expanded for name in ("expand", "expand_as", "broadcast_to")
       for function in variants(name)},
    **{function: _repeated for name in ("repeat", "tile") for function in variants(name)},
    **dict.fromkeys((functional.pad, torch.constant_pad_nd), _padded),
    **dict.fromkeys(variants("masked_select"), _masked),
    **dict.fromkeys(variants("vsplit"), _sliced(KEYWORD, 0)),
    **dict.fromkeys(variants("hsplit"), _sliced(KEYWORD, 1)),
    **dict.fromkeys(variants("dsplit"), _sliced(KEYWORD, 2)),
    **dict.fromkeys(variants("atleast_1d", "atleast_2d", "atleast_3d"), _with_axes),
    **dict.fromkeys(variants("diag_embed"), _made_diagonal),
    **dict.fromkeys(variants("stft"), _of_batch(2)),
    **dict.fromkeys(variants("istft"), _of_batch(3)),
    **dict.fromkeys(variants("as_strided", "diagonal", "take"), _picked),
    torch.linalg.diagonal: _picked,
    Tensor.unfold: _picked,
}  # fmt: skip

# Operations that may give data another layout than the contract's.
CHANGES = frozenset().union(
    MOVES, RESHAPES, JOINS, REINDEXES, UNFOLLOWED, SCRAMBLES, PRODUCTS, ADDED_PRODUCTS,
    SOLVES, TENSOR_PRODUCTS,
)  # fmt: skip

# Views of one operand in which rows keep their order, if any are left on the example axis.
PLAIN_VIEWS = (MOVES - {torch.einsum}) | RESHAPES | frozenset(variants("chunk"))

# Operations whose layouts are known; what any other does is not.
FOLLOWED = KEEPS | CHANGES | frozenset(OVER_AXES) | frozenset({torch.broadcast_tensors})

# Operations with operands that all examples share, unless they were computed from data.
SHARED = LOOKS_AT_FIRST | ROW_PRODUCTS | frozenset(SHARED_WEIGHT)
