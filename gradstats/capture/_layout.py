"""Where the examples lie in a tensor of data, followed through what the user's code does to it.

By contract data have their examples along the caller's ``batch_dim``. Code that transposes or folds
that axis leaves tensors in which shape alone would mislead: with as many positions as examples a
transposed batch looks like an untransposed one. Such tensors carry their layout with them; where it
is lost, parameters that meet them are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gradstats._cost import product
from gradstats._factors import Segments
from gradstats.capture._einsum import parse_equation


@dataclass(frozen=True)
class Examples:
    """Where the examples of a tensor lie.

    Attributes:
        batch: number of examples B.
        axis: the example axis.
        fold: rows of ``axis`` that belong to one example; rows of one example stand together.
        segments: the example of each row where the rows of examples differ in number; None where
            ``fold`` says it all.
    """

    batch: int
    axis: int
    fold: int = 1
    segments: Segments | None = None

    @property
    def plain(self) -> bool:
        """Whether each row of the axis is one example, in order."""
        return self.fold == 1 and self.segments is None

    @property
    def rows(self) -> int:
        """The size of the example axis."""
        return self.batch * self.fold if self.segments is None else self.segments.rows

    def along(self, axis: int) -> Examples:
        """Return the same with the examples along another axis."""
        return self if axis == self.axis else replace(self, axis=axis)

    def lead(self, tensor: Tensor) -> Tensor:
        """Return a view with the example axis in front: (rows, *)."""
        return tensor if self.axis == 0 else tensor.movedim(self.axis, 0)

    def first(self, tensor: Tensor) -> Tensor:
        """Return a view of shape (B, *), (B, fold, *) where rows are folded."""
        tensor = self.lead(tensor)
        return tensor if self.fold == 1 else tensor.unflatten(0, (self.batch, self.fold))

    def reduce(self, values: Tensor) -> Tensor:
        """Return the sum over each example's rows of (rows, *): (B, *)."""
        if self.segments is not None:
            return self.segments.sum(values)
        return values if self.fold == 1 else values.unflatten(0, (self.batch, self.fold)).sum(1)

    def owner(self, device: torch.device) -> Tensor:
        """Return the example of each row, (rows,) int64."""
        if self.segments is not None:
            return self.segments.owner
        return torch.arange(self.batch, device=device).repeat_interleave(self.fold)

    def owned_by(self, owner: Tensor, axis: int) -> Examples:
        """Return the layout of rows along ``axis`` that belong to these examples."""
        batch = self.batch
        if owner.numel() and owner.numel() % batch == 0:
            fold = owner.numel() // batch
            regular = torch.arange(batch, device=owner.device).repeat_interleave(fold)
            if torch.equal(owner, regular):
                return Examples(batch, axis, fold)
        return Examples(batch, axis, 1, Segments(owner, batch))

    def whole(self, row: int) -> Whole:
        """Return what a row of the axis is."""
        row %= self.rows
        owner = row // self.fold if self.segments is None else self.segments.owner[row]
        return Whole(int(owner))


@dataclass(frozen=True)
class Whole:
    """All of a tensor belongs to one example, whose number this is."""

    example: int


class Mixed:
    """What was computed over all examples: all of them are in each element of a tensor."""


MIXED = Mixed()


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
    if func in MOVES:
        return _moved(source, layout, result)
    if func in RESHAPES:
        return _reshaped(source, layout, result)
    if func in REINDEXES or func in REDUCES:
        rule = REINDEXES.get(func) or REDUCES[func]
        return rule(func, args, kwargs, source, layout, result)
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


def keeps_rows(operands: Sequence[Tensor], axis: int) -> bool:
    """Whether a product multiplies, of either operand, what lies at one place along an axis."""
    if len(operands) != 2:
        return False
    first, second = operands
    return first.dim() == second.dim() > axis + 2 and second.shape[axis] != 1


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


def contracted(args: tuple[Any, ...], source: Tensor, layout: Examples) -> Examples | None:
    """An equation says where the example's index goes."""
    equation, *operands = args
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = list(operands[0])
    if not isinstance(equation, str):
        return None
    inputs, out = parse_equation(equation, [operand.dim() for operand in operands])
    position = next(i for i, operand in enumerate(operands) if operand is source)
    letter = inputs[position][layout.axis]
    return layout.along(out.index(letter)) if letter in out else None


def _reshaped(source: Tensor, layout: Examples, result: Tensor) -> Examples | None:
    """Reshapes keep the order of elements, which says whose each row of the result is."""
    if result.shape[: layout.axis + 1] == source.shape[: layout.axis + 1]:
        return layout
    if result.numel() == 0:
        return None
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
    return read_at(source, items_of(source, args[1]), layout)


def read_at(source: Tensor, items: list, layout: Examples) -> Examples | Whole | None:
    """Return the layout of what ``items``, as ``items_of`` gives them, pick out of a tensor."""
    if any(not isinstance(item, (int, slice, Tensor, type(None))) for item in items):
        return None
    advanced = [i for i, item in enumerate(items) if isinstance(item, Tensor) and item.dim() > 0]
    if advanced and advanced[-1] - advanced[0] + 1 != len(advanced):
        return None
    axis = after = 0
    for position, item in enumerate(items):
        span = _axes_taken(item)
        if position in advanced:
            touched = [items[i] for i in advanced]
            first_axis, span = axis, sum(_axes_taken(item) for item in touched)
            dims = torch.broadcast_shapes(*(_selected_shape(item) for item in touched))
            if first_axis <= layout.axis < first_axis + span:
                return _selected(touched, first_axis, dims, after, layout, source)
            if position != advanced[-1]:
                continue
            axis, after = axis + span, after + len(dims)
            continue
        if axis == layout.axis and span:
            if isinstance(item, slice):
                if item == slice(None):
                    break
                return layout.owned_by(layout.owner(source.device)[item], after)
            return layout.whole(int(item))
        axis += span
        after += item is None or isinstance(item, slice)
    return layout.along(layout.axis - axis + after)


def looked_up(func, args, kwargs, index: Tensor, layout: Examples) -> Examples | None:
    """Return where the examples lie in what indices of data pick out of a constant.

    Args:
        func, args, kwargs: the operation and its arguments.
        index: the indices, and ``layout``, where the examples lie in them.
    """
    if func in INDEX_SELECT:
        return layout.along(_argument(args, kwargs, 1, "dim") % args[0].dim())
    if func is not Tensor.__getitem__:
        return layout if func in ALONG_INDICES else None
    items = items_of(*args)
    places = [i for i, item in enumerate(items) if isinstance(item, Tensor) and item.dim() > 0]
    if index.dtype == torch.bool or places[-1] - places[0] + 1 != len(places):
        return None
    sizes = torch.broadcast_shapes(*(_selected_shape(items[place]) for place in places))
    before = sum(item is None or isinstance(item, slice) for item in items[: places[0]])
    return layout.along(before + len(sizes) - index.dim() + layout.axis)


def items_of(source: Tensor, index) -> list:
    """Return what source[index] takes: tensors for lists, slices for an ellipsis."""
    items = list(index) if isinstance(index, tuple) else [index]
    items = [torch.as_tensor(item) if isinstance(item, (list, range)) else item for item in items]
    dots = [position for position, item in enumerate(items) if item is ...]
    if dots:
        taken = sum(_axes_taken(item) for item in items if item is not ...)
        items[dots[0] : dots[0] + 1] = [slice(None)] * (source.dim() - taken)
    return items


def dims_at(source: Tensor, items: list) -> int:
    """Return how many axes ``items`` leave."""
    chosen = [item for item in items if isinstance(item, Tensor) and item.dim() > 0]
    sizes = torch.broadcast_shapes(*map(_selected_shape, chosen)) if chosen else ()
    left = sum(item is None or isinstance(item, slice) for item in items)
    return left + len(sizes) + source.dim() - sum(map(_axes_taken, items))


def _axes_taken(item) -> int:
    if item is None:
        return 0
    return item.dim() if isinstance(item, Tensor) and item.dtype == torch.bool else 1


def _selected_shape(item: Tensor) -> tuple[int, ...]:
    return (int(item.sum()),) if item.dtype == torch.bool else tuple(item.shape)


def _selected(items, first_axis, dims, after, layout, source) -> Examples | None:
    """Return the layout where index tensors select along the example axis."""
    offset = layout.axis - first_axis
    for item in items:
        if offset >= _axes_taken(item):
            offset -= _axes_taken(item)
            continue
        index = item.nonzero()[:, offset] if item.dtype == torch.bool else item
        index = index.to(source.device).expand(dims)
        owner = layout.owner(source.device)[index]
        if owner.dim() != 1:
            # Several axes are selected at once: the rows of one of them must have one owner each.
            blocks = owner.flatten(1)
            if owner.dim() == 0 or not bool((blocks == blocks[:, :1]).all()):
                return None
            owner = blocks[:, 0].contiguous()
        return layout.owned_by(owner, after)
    return None


def _along(name: str, position: int, change, default: int | tuple[int, ...] | None = None):
    """Return a rule for operations that rearrange rows along a ``dim`` that may be the examples'.

    Args:
        name, position: keyword and place of the axis among the operation's arguments.
        change: called as change(owner, args, kwargs), it returns the owners of the new rows; None
            where they cannot be told.
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
            return None
        return layout.owned_by(change(layout.owner(source.device), args, kwargs), layout.axis)

    return rule


def _sliced(position: int):
    """Return a rule for operations whose results are slices of their operand."""

    def rule(func, args, kwargs, source, layout, result):
        dim = kwargs.get("dim", args[position] if len(args) > position else 0) % source.dim()
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
    dim = _argument(args, kwargs, 1, "dim") % source.dim()
    if dim == layout.axis:
        return layout.whole(_argument(args, kwargs, 2, "index"))
    return layout.along(layout.axis - (dim < layout.axis))


def _expanded(func, args, kwargs, source, layout, result) -> Examples | None:
    """New axes stand in front; an axis of size 1 that is expanded holds no examples but one."""
    after = layout.axis + result.dim() - source.dim()
    return layout.along(after) if result.shape[after] == source.shape[layout.axis] else None


def _repeated(func, args, kwargs, source, layout, result) -> Examples | None:
    """The whole is put side by side, along new axes in front and along its own."""
    after = layout.axis + result.dim() - source.dim()
    times = result.shape[after] // source.shape[layout.axis]
    if times == 1:
        return layout.along(after)
    return layout.owned_by(layout.owner(source.device).repeat(times), after)


def _reduced(position: int):
    """Return a rule for reductions over the axes ``dim``, all of them by default."""

    def rule(func, args, kwargs, source, layout, result):
        dim = kwargs.get("dim", args[position] if len(args) > position else None)
        if dim is None or isinstance(dim, str):
            return None
        dims = {d % source.dim() for d in (dim if isinstance(dim, (tuple, list)) else (dim,))}
        if layout.axis in dims or not dims:
            return None
        if result.dim() == source.dim():
            return layout
        return layout.along(layout.axis - sum(d < layout.axis for d in dims))

    return rule


def _argument(args, kwargs, position: int, name: str):
    return kwargs[name] if name in kwargs else args[position]


def function_variants(*names: str) -> list[Any]:
    """Return the functions, methods and operators under which an operation returns a new tensor."""
    keys = [(owner, name) for name in names for owner in (torch, Tensor)]
    keys += [(Tensor, f"__{side}{name}__") for name in names for side in ("", "r")]
    return [getattr(owner, key) for owner, key in keys if hasattr(owner, key)]


def variants(*names: str) -> list[Any]:
    """Return the functions and methods of these names."""
    keys = [(owner, name) for name in names for owner in (torch, Tensor)]
    return [getattr(owner, name) for owner, name in keys if hasattr(owner, name)]


# Operations that select, repeat or reorder rows, with how the examples go along.
REINDEXES = {
    Tensor.__getitem__: _indexed,
    **dict.fromkeys(
        variants("index_select"),
        _along("dim", 1, lambda owner, a, k: owner[_argument(a, k, 2, "index")]),
    ),
    **dict.fromkeys(
        variants("repeat_interleave"),
        _along(
            "dim", 2, lambda owner, a, k: owner.repeat_interleave(_argument(a, k, 1, "repeats"))
        ),
    ),
    **dict.fromkeys(variants("flip"), _along("dims", 1, lambda owner, a, k: owner.flip(0))),
    **dict.fromkeys(variants("flipud"), _along("", 1, lambda owner, a, k: owner.flip(0), 0)),
    **dict.fromkeys(variants("fliplr"), _along("", 1, lambda owner, a, k: owner.flip(0), 1)),
    **dict.fromkeys(variants("rot90"), _along("dims", 2, None, (0, 1))),
    torch.fft.fftshift: _along("dim", 1, None),
    torch.fft.ifftshift: _along("dim", 1, None),
    **dict.fromkeys(
        variants("roll"),
        _along("dims", 2, lambda owner, a, k: owner.roll(_argument(a, k, 1, "shifts"))),
    ),
    **dict.fromkeys(variants("gather"), _along("dim", 1, None)),
    **dict.fromkeys(variants("take_along_dim"), _along("dim", 2, None)),
    **{function: _along("dim", 1, None, -1) for name in ("sort", "argsort")
       for function in variants(name)},
    **dict.fromkeys(variants("msort"), _along("dim", 1, None, 0)),
    **dict.fromkeys(variants("topk"), _along("dim", 2, None, -1)),
    **{function: _sliced(2) for name in ("chunk", "split", "tensor_split", "split_with_sizes")
       for function in variants(name)},
    **dict.fromkeys(variants("narrow"), _sliced(1)),
    **dict.fromkeys(variants("unbind"), _sliced(1)),
    **dict.fromkeys(variants("select"), _chosen),
    **{function: _expanded for name in ("expand", "expand_as", "broadcast_to")
       for function in variants(name)},
    **{function: _repeated for name in ("repeat", "tile") for function in variants(name)},
}  # fmt: skip

INDEX_SELECT = frozenset(variants("index_select"))

# Operations whose result lies as the indices do.
ALONG_INDICES = frozenset(variants("gather") + variants("take_along_dim"))

# Operations over some axes of their operand; as long as every operand lies as the contract says,
# shape tells what they leave.
REDUCES = {
    **{function: _reduced(1) for name in (
        "sum", "mean", "amax", "amin", "max", "min", "prod", "logsumexp", "var", "std", "median",
        "argmax", "argmin", "any", "all", "nansum", "nanmean", "std_mean", "var_mean",
        "count_nonzero",
    ) for function in variants(name)},
    **dict.fromkeys(variants("norm"), _reduced(2)),
    torch.linalg.vector_norm: _reduced(2),
}  # fmt: skip


# Operations along an axis after which each element depends on all along it, with the place of the
# axis among their arguments and the axis by default.
SPREADS: dict[Any, tuple[int, int | None]] = {
    **dict.fromkeys(
        variants("softmax", "log_softmax", "cumsum", "cumprod", "logcumsumexp", "cummax", "cummin"),
        (1, None),
    ),
    functional.softmax: (1, None),
    functional.log_softmax: (1, None),
    functional.softmin: (1, None),
    functional.normalize: (2, 1),
    functional.gumbel_softmax: (4, -1),
}

# Operations over the last axes of their operand, as many as a shape among their arguments has.
OVER_LAST = frozenset({functional.layer_norm, torch.layer_norm, functional.rms_norm})

ATTENTION = functional.scaled_dot_product_attention

# Where the operations that may run over the examples are told their axes, and the axes by default;
# None for all.
OVER_AXES: dict[Any, tuple[int, int | None]] = {
    **SPREADS,
    **dict.fromkeys(REDUCES, (1, None)),
    **dict.fromkeys(variants("norm"), (2, None)),
    torch.linalg.vector_norm: (2, None),
    **dict.fromkeys((*OVER_LAST, ATTENTION), (1, None)),
}


def runs_over(func, args, kwargs, axis: int) -> bool:
    """Whether an operation of ``OVER_AXES`` on args[0] runs over an axis."""
    dims = args[0].dim()
    if func is ATTENTION:
        return axis == dims - 2
    position, default = OVER_AXES[func]
    if func in OVER_LAST:
        return axis >= dims - len(_argument(args, kwargs, position, "normalized_shape"))
    dim = kwargs.get("dim", args[position] if len(args) > position else default)
    if isinstance(dim, Tensor):
        return False  # the larger of two tensors, for example
    if dim is None or dim == ():
        return func not in SPREADS
    over = dim if isinstance(dim, (tuple, list)) else (dim,)
    return axis in over or axis - dims in over


def joined(layouts: Sequence[Examples | None], dim: int, device: torch.device) -> Examples | None:
    """Return the layout of tensors joined along ``dim``; each layout is that of one tensor."""
    known = [layout for layout in layouts if layout is not None]
    if len(known) != len(layouts) or len({layout.axis for layout in known}) != 1:
        return None
    first = known[0]
    if dim != first.axis:
        return first if all(same_rows(first, layout) for layout in known) else None
    return first.owned_by(torch.cat([layout.owner(device) for layout in known]), dim)


def candidates(target: Tensor, contract: Examples, owned: Examples | Whole) -> Iterator[Examples]:
    """Yield the layouts that a tensor may have which held nothing of any example.

    Args:
        target: the tensor.
        contract: where examples lie by contract.
        owned: whose a value is that is written into it.
    """
    axes = range(target.dim())
    for layout in (contract, owned):
        if isinstance(layout, Examples):
            yield from (layout.along(a) for a in axes if target.shape[a] == layout.rows)
    if contract.segments is None and contract.batch:
        for axis in axes:
            rows, rest = divmod(target.shape[axis], contract.batch)
            if rows > 1 and not rest:
                yield Examples(contract.batch, axis, rows)


def same_rows(first: Examples, second: Examples) -> bool:
    """Whether rows of two layouts belong to the same examples, along whichever axes they lie."""
    if first.segments is None or second.segments is None:
        return first.segments is second.segments and first.fold == second.fold
    one, other = first.segments.owner, second.segments.owner
    return one is other or (one.shape == other.shape and bool(torch.equal(one, other)))


MOVES = frozenset(
    {
        torch.einsum,
        torch.transpose,
        Tensor.transpose,
        torch.swapaxes,
        Tensor.swapaxes,
        torch.swapdims,
        Tensor.swapdims,
        torch.permute,
        Tensor.permute,
        torch.movedim,
        Tensor.movedim,
        torch.moveaxis,
        Tensor.moveaxis,
        torch.t,
        Tensor.t,
        Tensor.T.__get__,  # type: ignore[attr-defined]
        Tensor.mT.__get__,  # type: ignore[attr-defined]
        Tensor.H.__get__,  # type: ignore[attr-defined]
        Tensor.mH.__get__,  # type: ignore[attr-defined]
    }
)

RESHAPES = frozenset(
    {
        Tensor.view,
        Tensor.reshape,
        torch.reshape,
        Tensor.flatten,
        torch.flatten,
        Tensor.unflatten,
        torch.unflatten,
        Tensor.view_as,
        Tensor.reshape_as,
        Tensor.unsqueeze,
        torch.unsqueeze,
        Tensor.squeeze,
        torch.squeeze,
    }
)

PRODUCTS = frozenset(
    {
        torch.matmul,
        Tensor.matmul,
        Tensor.__matmul__,
        torch.mm,
        Tensor.mm,
        torch.bmm,
        Tensor.bmm,
    }
)

# Operations on several operands of data, element by element.
ELEMENTWISE = (
    "add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "truediv", "pow",
    "maximum", "minimum", "lerp", "addcmul", "addcdiv", "where", "atan2", "fmod", "remainder",
    "hypot", "logaddexp", "xlogy",
)  # fmt: skip

BROADCASTS = frozenset(
    function_variants(
        *ELEMENTWISE, "eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "and", "or",
        "xor", "masked_fill", "copysign",
    )
)  # fmt: skip

# Operations that put tensors side by side, with the axis where they take none.
JOINS: dict[Any, int | None] = {
    **dict.fromkeys((torch.cat, torch.concat, torch.concatenate, torch.stack), None),
    **dict.fromkeys((torch.vstack, torch.row_stack), 0),
    **dict.fromkeys((torch.hstack, torch.column_stack), 1),
    torch.dstack: 2,
}

# Operations whose results have axes of other operands, or none of their operands': where sizes
# agree by accident nobody knows where the examples are.
UNFOLLOWED = frozenset(
    function
    for name in (
        "tensordot", "outer", "ger", "inner", "cdist", "meshgrid", "kron", "cartesian_prod",
        "block_diag", "combinations", "vander", "diag", "diag_embed", "diagonal", "as_strided",
        "broadcast_tensors", "chain_matmul", "cov", "corrcoef", "take", "addr",
    )
    for function in variants(name)
)  # fmt: skip

# Operations of a library's own, of which nothing is known.
OPAQUE = frozenset({torch._ops.OpOverload, torch._ops.OpOverloadPacket})

# Operations that may give data another layout than the contract's.
CHANGES = MOVES | RESHAPES | frozenset(JOINS) | frozenset(REINDEXES) | UNFOLLOWED | PRODUCTS

# Views of one operand in which rows keep their order, if any are left on the example axis.
PLAIN_VIEWS = (MOVES - {torch.einsum}) | RESHAPES | frozenset(variants("chunk"))
