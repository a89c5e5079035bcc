"""Where the examples lie in an indexed tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradstats.capture.following._examples import Examples, Whole
from gradstats.capture.operations._call import Call
from gradstats.capture.operations._nested import is_among, of_numbers
from gradstats.capture.operations._operations import variants

INDEX_SELECT = frozenset(variants("index_select"))
REPEATS = frozenset(variants("repeat_interleave"))

# Operations whose result has the layout of the indices.
ALONG_INDICES = frozenset(variants("gather", "take_along_dim", "take"))

# Types of the numbers of masks; PyTorch still takes uint8, which it warns of.
MASKS = frozenset({torch.bool, torch.uint8})


def items_of(source: Tensor, index) -> list:
    """Return the items of source[index], sequences as tensors and an ellipsis as slices."""
    items = [*map(_as_item, as_tuple(index))]
    dots = [position for position, item in enumerate(items) if item is ...]
    if dots:
        taken = sum(_axes_taken(item) for item in items if item is not ...)
        items[dots[0] : dots[0] + 1] = [slice(None)] * (source.dim() - taken)
    return items


def _as_item(item):
    if is_sequence(item):
        return torch.as_tensor(item, dtype=None if len(item) else torch.long)
    if isinstance(item, slice):
        return of_numbers(item)
    is_numpys = not isinstance(item, Tensor) and getattr(item, "ndim", None) == 0
    return item.item() if is_numpys else item


def as_tuple(index) -> tuple:
    """Return the items of an index; PyTorch takes a short list of more than numbers for a tuple."""
    if isinstance(index, list) and len(index) < 32 and any(map(_is_no_number, index)):
        index = tuple(index)
    return index if isinstance(index, tuple) else (index,)


def is_sequence(item) -> bool:
    """Whether PyTorch converts an item to an index tensor: lists, tuples, ranges and arrays."""
    if isinstance(item, Tensor):
        return False
    return isinstance(item, Sequence) or getattr(item, "ndim", 0) > 0


def _is_no_number(item) -> bool:
    return item is None or item is ... or isinstance(item, (slice, Tensor)) or is_sequence(item)


def dims_at(source: Tensor, items: list) -> int:
    """Return how many axes source[items] has."""
    _, found = found_at(items)
    left = sum(item is None or isinstance(item, slice) for item in items)
    return left + found + source.dim() - sum(map(_axes_taken, items))


def axes_until(items: list) -> int:
    """Return how many axes items take, without the last ones that are left whole."""
    while items and isinstance(items[-1], slice) and items[-1] == slice(None):
        items = items[:-1]
    return sum(map(_axes_taken, items))


def read_at(source: Tensor, items: list, layout: Examples) -> Examples | Whole | None:
    """Return the layout of source[items], with ``items`` as ``items_of`` gives them."""
    if not all(map(_is_ordinary, items)):
        return None
    advanced = [i for i, item in enumerate(items) if isinstance(item, Tensor) and item.dim() > 0]
    if advanced and advanced[-1] - advanced[0] + 1 != len(advanced):
        return None
    axis = after = 0
    for position, item in enumerate(items):
        span = _axes_taken(item)
        if position in advanced:
            if position != advanced[0]:
                continue  # handled with the first
            touched = [items[i] for i in advanced]
            span = sum(map(_axes_taken, touched))
            dims = torch.broadcast_shapes(*map(_selected_shape, touched))
            if axis <= layout.axis < axis + span:
                return _selected(touched, axis, dims, after, layout, source)
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


def _is_ordinary(item) -> bool:
    """Whether an item is None or takes axes; a bool, also as a 0-dim tensor, adds one."""
    if isinstance(item, Tensor):
        return item.dim() > 0 or item.dtype not in MASKS
    return item is None or (isinstance(item, (int, slice)) and not isinstance(item, bool))


def looked_up(call: Call, index: Tensor, layout: Examples) -> Examples | None:
    """Return the layout of a constant indexed by data, or repeated as often as data say.

    Args:
        call: the operation.
        index, layout: the indices or numbers of repeats, and where the examples lie in them.
    """
    if call.func in REPEATS:
        dim = call.argument(2, "dim")
        owner = layout.owner(index.device).repeat_interleave(index)
        return layout.owned_by(owner, 0 if dim is None else dim % call.args[0].dim())
    places = places_of_index(call, index)
    return None if places is None else layout.along(places[layout.axis])


def places_of_index(call: Call, index: Tensor) -> Sequence[int] | None:
    """Return which axis of an operation's result each axis of its indices becomes, if known."""
    if call.func in INDEX_SELECT:
        return [call.argument(1, "dim") % call.args[0].dim()]
    if call.func is not Tensor.__getitem__:
        return range(index.dim()) if call.func in ALONG_INDICES else None
    if index.dtype in MASKS:
        return None
    before, dims = found_at(items_of(*call.args))
    return range(before + dims - index.dim(), before + dims)


def places_of_mask(call: Call, mask: Tensor) -> range | None:
    """Return along which axes of an operation's first operand a mask picks elements, if known."""
    source = call.args[0]
    if call.func is Tensor.__getitem__:
        items = items_of(*call.args)
        if not is_among(mask, items):
            return None
        first = axis_of(items, mask)
        return range(first, first + mask.dim())
    return range(source.dim() - mask.dim(), source.dim())


def found_at(items: list) -> tuple[int, int]:
    """Return where the axes of index tensors begin in the result, and how many there are.

    Args:
        items: as ``items_of`` gives them. PyTorch applies numbers before index tensors, also those
            in tensors without axes, so there may be none left. If other items then stand between
            index tensors, their axes come first in the result.
    """
    left = [item for item in items if not isinstance(item, int) and not _is_number(item)]
    places = [place for place, item in enumerate(left) if isinstance(item, Tensor)]
    if not places:
        return 0, 0
    sizes = torch.broadcast_shapes(*(_selected_shape(left[place]) for place in places))
    apart = places[-1] - places[0] + 1 != len(places)
    return 0 if apart else places[0], len(sizes)


def _is_number(item) -> bool:
    return isinstance(item, Tensor) and item.dim() == 0 and item.dtype not in MASKS


def axis_of(items: list, index: Tensor) -> int:
    """Return the first axis that the item ``index`` is applied to, of ``items_of``'s items."""
    place = next(place for place, item in enumerate(items) if item is index)
    return sum(map(_axes_taken, items[:place]))


def _axes_taken(item) -> int:
    if item is None:
        return 0
    return item.dim() if isinstance(item, Tensor) and item.dtype in MASKS else 1


def _selected_shape(item: Tensor) -> tuple[int, ...]:
    return (int(item.count_nonzero()),) if item.dtype in MASKS else tuple(item.shape)


def _selected(items, first_axis, dims, after, layout, source) -> Examples | None:
    """Return the layout where index tensors select along the example axis."""
    offset = layout.axis - first_axis
    item, *others = items
    while offset >= _axes_taken(item):
        offset -= _axes_taken(item)
        item, *others = others
    index = item.nonzero()[:, offset] if item.dtype in MASKS else item
    owner = layout.owner(source.device)[index.to(source.device).expand(dims)]
    if owner.dim() > 1:
        # The index has several axes: each row along its first one must belong to one example.
        blocks = owner.flatten(1)
        if not blocks.shape[1] or not bool((blocks == blocks[:, :1]).all()):
            return None  # or no row tells whose it is
        owner = blocks[:, 0].contiguous()
    return layout.owned_by(owner, after)
