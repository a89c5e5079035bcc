"""Rows of parameters among rows of examples, made again where another example reads them.

A class token that was expanded to the batch, joined to the patches of images and moved by trained
positions still holds values of no example: models may take the copy in an example's place for that
of another, or have all read one row of padding. As data, such rows are those of the examples in
whose places they are. Where that does not fit, operations run on what parameters make instead, by
the same operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.nn import functional

from gradstats._compiler import is_compiling
from gradstats.capture.following._examples import Examples
from gradstats.capture.following._indexing import INDEX_SELECT, items_of
from gradstats.capture.following._marks import Marks
from gradstats.capture.following._numbered import NOBODY
from gradstats.capture.following._slots import (
    ELEMENT_BY_ELEMENT,
    REARRANGES,
    filled,
    rows_of_one_each,
)
from gradstats.capture.operations._nested import argument_of, operands_of, rebuild, replace
from gradstats.capture.operations._operations import BROADCASTS, IN_PLACE, JOINS, variants
from gradstats.capture.parameters._drawn import DRAWS, Draw
from gradstats.capture.parameters._tensors import node_of
from gradstats.errors import GradStatsError

if TYPE_CHECKING:
    from gradstats.capture._context import Context

CONCATENATES = frozenset((torch.cat, torch.concat, torch.concatenate))
# Operations that do the same to some rows as to all: not to those in certain places, and not at
# random.
BY_ELEMENT = ELEMENT_BY_ELEMENT.difference(
    IN_PLACE, DRAWS,
    variants(
        "tril", "triu", "bernoulli", "normal", "native_dropout", "_standard_gamma",
        "fake_quantize_per_channel_affine",
    ),
)  # fmt: skip
DROPOUTS = frozenset((torch.dropout, functional.dropout))
COMBINES = (JOINS.keys() | BROADCASTS).difference(IN_PLACE)
NARROWS, SELECTS = frozenset(variants("narrow")), frozenset(variants("select"))

# Stands for the rows among the arguments of an operation that is to be run again on them.
ROWS = object()
WHOLE = slice(None)


class Part(NamedTuple):
    """Rows that parameters alone make: from where to where, and what makes them, tracked."""

    start: int
    stop: int
    make: Callable[[], Tensor]


class Made(NamedTuple):
    """What of a tensor parameters alone make.

    Attributes:
        axis: along which rows lie; None where it is all of the tensor, one part.
        parts: these rows.
        behind: the tensors that it was computed from, whose hooks would not see the rows.
        beside: constants that it was computed with, each with its version.
    """

    axis: int | None
    parts: Sequence[Part]
    behind: tuple[ref[Tensor], ...] = ()
    beside: tuple[tuple[Tensor, int], ...] = ()


def made_of(marks: Marks, item: Any) -> Made | None:
    """Return what of a tensor parameters alone make, if anything was noted."""
    return marks.values.held_by(item).get("made") if type(item) is Tensor else None


def drawn_again(marks: Marks, func, args: tuple[Any, ...]) -> Callable[..., Any]:
    """Return a function that can draw the numbers again of one that drops elements; else it."""
    if func not in DROPOUTS or not args or made_of(marks, args[0]) is None or is_compiling():
        return func
    source: Tensor = args[0]
    # How memory is laid out decides which element gets which number.
    if not source.is_contiguous() or source.storage_offset():
        return func
    return Draw(func, source.device)


def note_made(marks: Marks, func, args: tuple[Any, ...], kwargs: dict[str, Any], result) -> None:
    """Note what of the result of an operation parameters alone make."""
    if type(result) is not Tensor or not result.requires_grad:
        return
    if kwargs.get("out") is not None or not args:
        return
    if func in CONCATENATES:
        if is_compiling():
            return
        made = _joined(marks, args, kwargs, result)
    else:
        source = next((item for item in args if made_of(marks, item) is not None), None)
        if source is None or source is result or is_compiling():
            return
        made = _after(marks, func, args, kwargs, source, result)
    if made is not None and made.parts:
        marks.made = True
        marks.values.note(result, made=made)


def _joined(marks: Marks, args, kwargs, result: Tensor) -> Made | None:
    axis = argument_of(args, kwargs, 1, "dim", kwargs.get("axis", 0)) % result.dim()
    found, place, dtype = Made(axis, []), 0, result.dtype
    for item in args[0]:
        if item.dim() != result.dim():
            return None
        own = made_of(marks, item) or Made(axis, [])
        stop = place + item.shape[axis]
        if node_of(item) is not None:
            parts = [Part(place, stop, partial(item.to, dtype))]
        elif own.axis is None:
            parts = [Part(place, stop, partial(_cast, own.parts[0].make, dtype))]
        else:
            of_own = own.parts if own.axis == axis and item.dtype == dtype else ()
            parts = [Part(place + start, place + end, make) for start, end, make in of_own]
        if parts:
            behind = (*found.behind, *own.behind, ref(item))
            found = Made(axis, [*found.parts, *parts], behind, (*found.beside, *own.beside))
        place = stop
    return found


def _after(marks: Marks, func, args, kwargs, source: Tensor, result: Tensor) -> Made | None:
    """Return what of the result of an operation parameters make, as noted of an operand."""
    made = made_of(marks, source)
    others = [item for item in operands_of(args, kwargs) if item is not source]
    constants = [item for item in others if node_of(item) is None]
    if made is None or any(marks.is_data(item) or item.is_inference() for item in constants):
        return None
    made = made._replace(
        behind=(*made.behind, ref(source)),
        beside=(*made.beside, *((item, item._version) for item in constants)),
    )
    args, kwargs = replace((args, kwargs), {id(source): ROWS})
    axis = made.axis
    if isinstance(func, Draw):
        ones = torch.ones((), dtype=source.dtype, device=source.device).expand(source.shape)
        drop = partial(_dropped, marks, func, args, kwargs, ones, axis)
        return made._replace(parts=[p._replace(make=partial(drop, p)) for p in made.parts])
    if func in BY_ELEMENT and result.shape == source.shape:
        along = None if axis is None else axis - source.dim()
        parts = [p._replace(make=_by_element(func, args, kwargs, along, p)) for p in made.parts]
        return made._replace(parts=parts)
    if func not in REARRANGES or args[0] is not ROWS:
        return None
    if axis is None:
        (part,) = made.parts
        again = part._replace(make=lambda: func(part.make(), *args[1:], **kwargs))
        return made._replace(parts=[again])
    items = _items(func, args, kwargs, source)
    found = None if items is None else _read(items, axis, source.shape[axis], made.parts)
    return None if found is None else made._replace(axis=found[0], parts=found[1])


def _cast(make: Callable[[], Tensor], dtype: torch.dtype) -> Tensor:
    return make().to(dtype)


def _by_element(func, args, kwargs, axis: int | None, part: Part) -> Callable[[], Tensor]:
    def own(item):
        if item is ROWS:
            return part.make()
        if axis is None or not isinstance(item, Tensor):
            return item
        if item.dim() < -axis or item.shape[axis] == 1:
            return item
        return item.narrow(axis, part.start, part.stop - part.start)

    return lambda: func(*rebuild(args, own), **rebuild(kwargs, own))


def _dropped(
    marks: Marks, draw: Draw, args, kwargs, ones: Tensor, axis: int | None, part: Part
) -> Tensor:
    with torch._C.DisableTorchFunction(), torch.no_grad():
        kept = draw(*(ones.contiguous() if item is ROWS else item for item in args), **kwargs)
        if axis is not None:
            kept = kept.narrow(axis, part.start, part.stop - part.start)
    marks.mark_constant(kept)
    return part.make() * kept


def _items(func, args, kwargs, source: Tensor) -> list[Any] | None:
    """Return what an operation reads as an index of numbers, slices and new axes alone."""
    if func is Tensor.__getitem__:
        items = items_of(source, args[1])
    elif func in NARROWS:
        start = argument_of(args, kwargs, 2, "start")
        items = [slice(start, start + argument_of(args, kwargs, 3, "length"))]
    elif func in SELECTS:
        items = [argument_of(args, kwargs, 2, "index")]
    else:
        return None
    if func is not Tensor.__getitem__:
        items = [WHOLE] * (argument_of(args, kwargs, 1, "dim") % source.dim()) + items
    basic = (type(item) in (int, slice) or item is None for item in items)
    return items if all(basic) else None


def _read(
    items: list[Any], axis: int, size: int, parts: Sequence[Part]
) -> tuple[int | None, list[Part]] | None:
    """Return what of source[items] parameters make.

    Args:
        items: numbers, slices and None.
        axis, size, parts: of the source.
    """
    of_axes = [place for place, item in enumerate(items) if item is not None]
    place = of_axes[axis] if len(of_axes) > axis else len(items)
    after = axis + items[:place].count(None) - sum(type(item) is int for item in items[:place])
    if place == len(items):
        return after, [_picked(part, items) for part in parts]
    before, item, behind = items[:place], items[place], items[place + 1 :]
    if type(item) is int:
        start, stop = item % size, item % size + 1
    else:
        start, stop, step = item.indices(size)
        if step != 1:
            return None
    for part in parts:
        if part.start <= start < stop <= part.stop:
            own = item if item == WHOLE else slice(start - part.start, stop - part.start)
            own = start - part.start if type(item) is int else own
            return None, [_picked(part, [*before, own, *behind])]
    within = [part for part in parts if start <= part.start and part.stop <= stop]
    moved = [part._replace(start=part.start - start, stop=part.stop - start) for part in within]
    return after, [_picked(part, [*before, WHOLE, *behind]) for part in moved]


def _picked(part: Part, items: Sequence[Any]) -> Part:
    return part._replace(make=lambda: part.make()[tuple(items)])


def run_on_parameters(
    tracker: Context, func, args: tuple[Any, ...], kwargs: dict[str, Any], result
) -> Tensor | None:
    """Run an operation again on parameters, where others read their rows than it was supposed.

    Returns:
        The new result; None where nothing was noted of its operands, or this is refused.
    """
    marks = tracker.marks
    if type(result) is not Tensor or not result.requires_grad or tracker.settings.exact:
        return None  # gradients would be summed in another order
    reads = func is Tensor.__getitem__ or func in INDEX_SELECT
    if reads:
        source = argument_of(args, kwargs, 0, "input")
        if made_of(marks, source) is None:
            return None
    elif func not in COMBINES or not marks.is_lost(result):
        return None
    try:
        with tracker.watching():
            if reads:
                return _by_readers(marks, func, source, args, kwargs)
            whole: dict[int, Tensor] = {}
            for item in operands_of(args, kwargs):
                made = made_of(marks, item)
                if made is not None and made.axis is None:
                    again = _made_again(marks, item, made, made.parts[0])
                    whole |= {} if again is None else {id(item): again}
            return func(*replace(args, whole), **replace(kwargs, whole)) if whole else None
    except GradStatsError:
        return None  # nothing may be computed from it


def _made_again(marks: Marks, item: Tensor, made: Made, part: Part) -> Tensor | None:
    """Return rows of a tensor made again of parameters, tracked; None if they may differ."""
    behind = (item, *(each() for each in made.behind))
    if any(each is not None and (each._backward_hooks or each.retains_grad) for each in behind):
        return None  # these want the gradient of all that was computed from a tensor
    if any(each._version != version for each, version in made.beside):
        return None
    again = part.make()
    with torch._C.DisableTorchFunctionSubclass():
        if made.axis is not None:
            item = item.narrow(made.axis, part.start, part.stop - part.start)
        # Parameters may have been changed in place, or autocast been left, in the meantime.
        form = again.shape == item.shape and again.dtype == item.dtype
        same = form and torch.allclose(again, item, equal_nan=True)
    return again if same and node_of(again) is not None else None


def _by_readers(marks: Marks, func, source: Tensor, args, kwargs) -> Tensor | None:
    """Read rows at an index, with a row of its own for each place that reads one of parameters."""
    made, layout = made_of(marks, source), marks.layout_of(source)
    if made is None or layout is None or layout.axis != made.axis:
        return None
    axis, size = layout.axis, source.shape[layout.axis]
    if func in INDEX_SELECT:
        items = [*[WHOLE] * axis, argument_of(args, kwargs, 2, "index")]
        if argument_of(args, kwargs, 1, "dim") % source.dim() != axis:
            return None
    else:
        items = items_of(source, args[1])
    index = items[axis] if len(items) > axis else None
    others = [*items[:axis], *items[axis + 1 :]]
    if not isinstance(index, Tensor) or index.dtype != torch.long or not index.dim():
        return None
    if any(item != WHOLE for item in others):
        return None
    with torch._C.DisableTorchFunction():
        places = torch.where(index < 0, index + size, index)
        here = [(places >= part.start) & (places < part.stop) for part in made.parts]
        read = layout.owner(places.device)[places]
        owner = _readers(marks, index, read.masked_fill(torch.stack(here).any(0), NOBODY))
    if owner is None:
        return None
    rows = [source]
    for part, at in zip(made.parts, here, strict=True):
        with torch._C.DisableTorchFunction():
            ids = places[at] - part.start
            places[at] = torch.arange(size, size + len(ids), device=places.device)
            marks.place(ids, Examples(marks.batch_size, 0).owned_by(owner[at].long(), 0))
        if len(ids):
            again = _made_again(marks, source, made, part)
            if again is None:
                return None
            rows.append(again.index_select(axis, ids))
            size += len(ids)
    if len(rows) == 1:
        return None
    marks.place_like(places, index)
    wide = torch.cat(rows, axis)
    return wide[tuple([*items[:axis], places])]


def _readers(marks: Marks, index: Tensor, owner: Tensor) -> Tensor | None:
    """Return the example of each place that reads, given those whose rows they read."""
    own = marks.layout_of(index) if marks.is_of_data(index) else None
    if own is not None:
        return owner.where(owner != NOBODY, own.of_elements(index).to(owner.dtype))
    found = rows_of_one_each(owner)
    if found is None:
        return None
    axis, whose = found
    return filled(marks, whose).view(-1, *[1] * (owner.dim() - axis - 1)).expand_as(owner)
