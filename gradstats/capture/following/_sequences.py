"""Where the examples lie in results of attention, recurrent layers, packed sequences, sorts, bags.

Also in places and distinct values that are found. These operations prescribe the axes of their
operands and results, whatever the caller's ``batch_dim``; shapes alone would mislead if there are
as many layers, steps or places as examples.

``pack_padded_sequence`` sorts the sequences of a batch by length and writes the first step of each,
then the second steps, and so on, as rows; later steps have fewer. A *place* is the position of a
sequence within a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradstats._compiler import is_compiling
from gradstats.capture.following._apart import mask_keeps_apart
from gradstats.capture.following._examples import (
    Examples,
    Whole,
    same_rows,
    sole_of,
)
from gradstats.capture.following._flex_attention import FLEX_ATTENTION, taken_beside
from gradstats.capture.following._marks import Marks
from gradstats.capture.following._slots import placed
from gradstats.capture.operations._nested import argument_of
from gradstats.capture.operations._operations import variants

MULTI_HEAD_ATTENTION = torch.nn.functional.multi_head_attention_forward

# Operands of attention with a row for each example, and with one for each head of each example, by
# name and by position.
PADDING_MASK = frozenset({"key_padding_mask", 14})
FOR_EACH_HEAD = frozenset({"attn_mask", 16, "static_k", 21, "static_v", 22})

RECURRENT_LAYERS = torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu

RECURRENT_CELLS = torch.lstm_cell, torch.gru_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell

# The layout of each result; None if the operation prescribes none.
Layouts = Sequence[Examples | Whole | None] | None


def _of_bags(marks: Marks, args, kwargs, results) -> Layouts:
    argument = partial(argument_of, args, kwargs)
    offsets, shares = argument(2, "offsets"), argument(8, "per_sample_weights")
    others = [item for item in (*args, *kwargs.values()) if item is not shares]
    if offsets is None or any(map(marks.is_trained, others)):
        return None
    last = bool(argument(9, "include_last_offset"))
    return [layout_of_bags(marks, argument(0, "input"), shares, offsets, last)]


def _of_alignments(marks: Marks, args, kwargs, results) -> Layouts:
    """The losses (B,) of (steps, B, classes); if reduced or of one example, they have no axis."""
    layout = _common_along(marks, args[:1], 1) if args[0].dim() == 3 else None
    return [layout.along(0)] if layout is not None and results[0].dim() == 1 else None


def _of_attention(marks: Marks, args, kwargs, results) -> Layouts:
    # Operands of two axes have only positions and features.
    common = _common_along(marks, args[:3], 1) if args[0].dim() == 3 else None
    if not _lie_beside(marks, common, args, kwargs):
        return [None] * len(results)
    return [common, common and common.along(0)][: len(results)]


def is_out_of_the_ordinary(marks: Marks, *args, **kwargs) -> bool:
    """Whether attention has further keys, no axis for examples, or rows of several packed ones.

    Whether a mask keeps packed examples apart shows where it meets the scores, inside of PyTorch's
    function.
    """
    # PyTorch always passes modes the first 13 arguments by position, and all others by name.
    if args[7] is not None or args[9] or args[0].dim() != 3:
        return True
    if kwargs["static_k"] is not None or kwargs["static_v"] is not None:
        return True
    if not marks.packed:
        return False
    owners = [sole_of(marks.owned(item)) for item in marks.data_among(args[:3])]
    return any(isinstance(layout, Examples) and layout.axis == 0 for layout in owners)


def _of_flex_attention(marks: Marks, args, kwargs, results) -> Layouts:
    """The layout of the queries, unless examples meet or trained values change the scores."""
    lost: list[Examples | None] = [None] * len(results)
    if any(map(marks.is_trained, taken_beside(*args, **kwargs))):
        return lost
    rows = _common_along(marks, args[:3], 2 if marks.packed else 0)
    if marks.packed and (rows is None or not mask_keeps_apart(args[4][-1], args[0].shape, rows)):
        marks.meetings.note(results[0])
        return lost
    return [rows] * len(results)


def _of_packing(marks: Marks, args, kwargs, results) -> Layouts:
    source, _, batch_first = args
    places = _common_along(marks, (source,), 0 if batch_first else 1)
    if places is None:
        return [None, None]
    owner = places.owner(source.device)
    rows = torch.cat([owner[:size] for size in results[1].tolist()])
    return [places.owned_by(rows, 0), None]


def _of_padding(marks: Marks, args, kwargs, results) -> Layouts:
    places = packed_places(marks, *args[:2])
    return [places and places.along(0 if args[2] else 1), None]


def _of_cell(marks: Marks, args, kwargs, results) -> Layouts:
    if any(map(marks.is_trained, args[2:])):
        return [None] * len(results)
    return [_common_along(marks, (args[0], *states_of(args[1])), 0)] * len(results)


def _of_recurrent_layer(marks: Marks, args, kwargs, results) -> Layouts:
    lost: list[Examples | None] = [None] * len(results)
    packed = isinstance(args[3], (list, tuple))
    source, hx, weights = args[0], args[2 if packed else 1], args[3 if packed else 2]
    if any(map(marks.is_trained, weights)):
        return lost
    axis = 0 if packed or args[8] else 1
    of_steps = packed_places(marks, *args[:2]) if packed else _common_along(marks, (source,), axis)
    states = telling_states(marks, hx)
    if states:
        of_states = _common_along(marks, states, 1)
        if of_steps is None and not (packed or marks.is_trained(source)):
            of_steps = of_states  # the steps are constants
        trained = marks.batch_size > 1 and any(each.requires_grad for each in states)
        if trained and not (of_steps and of_states and same_rows(of_steps, of_states)):
            return lost
    if of_steps is None:
        return lost
    output = marks.layout_of_rows(source) if packed else of_steps.along(axis)
    return [output, *[of_steps.along(1)] * (len(results) - 1)]


def _of_sort(position: int) -> Callable[..., Layouts]:
    """Return the rule of an operation that sorts elements along a ``dim``, its argument there."""

    def rule(marks: Marks, args, kwargs, results) -> Layouts:
        """Where the examples lie after elements of several were sorted."""
        source = args[0]
        layout = marks.layout_of_rows(source)
        if layout is None or is_compiling() or not source.numel():
            return None
        axis = argument_of(args, kwargs, position, "dim", -1) % source.dim()
        if axis != layout.axis:
            return None
        chosen = results[-1]  # the place that each element came from
        # Columns may be sorted differently, and be put back in the order of the examples later.
        found = placed(marks, results[0], layout.of_elements(source).gather(axis, chosen))
        return [found] * len(results)

    return rule


def _of_nonzero(marks: Marks, args, kwargs, results) -> Layouts:
    """Each place that is found belongs to the example in whose row it lies."""
    layout = marks.layout_of_rows(args[0])
    if layout is None or is_compiling():
        return [None] * len(results)
    single = results[0].dim() > 1  # places, or their numbers along each axis
    rows = results[0][:, layout.axis] if single else results[layout.axis]
    return [layout.owned_by(layout.owner(rows.device)[rows], 0)] * len(results)


def _of_unique(marks: Marks, args, kwargs, results) -> Layouts:
    """Distinct values may be those of several examples; only their inverse has rows of each."""
    found: list[Examples | None] = [None] * len(results)
    layout, dim = marks.layout_of_rows(args[0]), kwargs.get("dim")
    if layout is not None and kwargs.get("return_inverse"):
        if dim is None:
            found[1] = layout
        elif dim % args[0].dim() == layout.axis:
            found[1] = layout.along(0)
    return found


def starts_of_bags(offsets: Tensor, include_last_offset: bool) -> Tensor:
    """Return where the bags of ids begin, given the offsets."""
    return offsets[:-1] if include_last_offset else offsets


def layout_of_bags(
    marks: Marks, ids: Tensor, shares: Tensor | None, offsets: Tensor, last: bool
) -> Examples | None:
    """Return to which examples the bags of ids belong; None if that is not known.

    Args:
        ids: (N,), the bags one after the other.
        shares: (N,) what the rows of a table are multiplied by; None for ones.
        offsets: where the bags begin.
        last: whether ``offsets`` includes the end of the last bag.
    """
    starts = starts_of_bags(offsets, last)
    # Rows about which nothing was noted may be as many as the examples by accident.
    tell = [
        rows
        for rows in marks.data_among((ids, shares))
        if rows.requires_grad or marks.packed or marks.is_marked(rows)
    ]
    found = [layout and layout.in_pieces(starts) for layout in map(marks.layout_of_rows, tell)]
    if not found:
        return marks.layout_of(starts)
    first = found[0]
    known = first is not None and all(each and same_rows(first, each) for each in found)
    return first if known else None


def packed_places(marks: Marks, rows: Tensor, batch_sizes: Tensor) -> Examples | None:
    """Return the layout of the places of a step of packed rows, along axis 0; None if not known."""
    sizes = batch_sizes.tolist()
    layout = marks.layout_of_rows(rows) or marks.rows_of_one(rows, 0)
    if layout is None or layout.axis != 0:
        return None
    owner = layout.owner(rows.device)
    places = owner[: sizes[0]]
    if not torch.equal(owner, torch.cat([places[:size] for size in sizes])):
        return None
    return layout.owned_by(places, 0)


def _lie_beside(
    marks: Marks, common: Examples | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Whether trained operands of attention have their examples where query, key and value do.

    Only operands with a row for each example, or for each head of each example, can.
    """
    given: list[tuple[int | str, Any]] = [*enumerate(args[3:], 3), *kwargs.items()]
    trained = [(name, item) for name, item in given if marks.is_trained(item)]
    if not trained or marks.batch_size == 1:
        return True
    for name, item in trained:
        layout = marks.layout_of_rows(item)
        rows_first = PADDING_MASK if item.dim() == 2 else FOR_EACH_HEAD
        if common is None or layout is None or layout.axis != 0 or name not in rows_first:
            return False
        owner = common.owner(item.device).repeat_interleave(layout.rows // common.rows)
        if not torch.equal(layout.owner(item.device), owner):
            return False
    return True


def states_of(hx) -> list[Tensor]:
    """Return the states that a recurrent operation was given: those of an LSTM are two."""
    return list(hx) if isinstance(hx, (list, tuple)) else [hx]


def telling_states(marks: Marks, hx) -> list[Tensor]:
    """Return the initial states that tell to which examples the steps belong: trained ones have to.

    The layout of others, such as those of the batch before, need not be known.
    """
    return [
        state
        for state in marks.data_among(states_of(hx))
        if state.requires_grad or ((layout := marks.layout_of_rows(state)) and layout.axis == 1)
    ]


def _common_along(marks: Marks, tensors: Sequence[Tensor], axis: int) -> Examples | None:
    """Return the layout of the data among tensors, if it is the same in all, along ``axis``."""
    data = marks.data_among(tensors)
    # Data without a gradient may be of other examples: gradients are those of trained values.
    found = [marks.layout_of_rows(item) for item in data if item is data[0] or item.requires_grad]
    first = found[0] if found else None
    common = first is not None and all(
        each and each.axis == axis and same_rows(first, each) for each in found
    )
    return first if common else None


# Rules, called as rule(marks, args, kwargs, results), that return the layout of each result, or
# None if the operation prescribes none.
PRESCRIBES: dict[Any, Callable[..., Layouts]] = {
    MULTI_HEAD_ATTENTION: _of_attention,
    FLEX_ATTENTION: _of_flex_attention,
    torch.nn.functional.embedding_bag: _of_bags,
    **dict.fromkeys(variants("sort", "argsort"), _of_sort(1)),
    **dict.fromkeys(variants("topk"), _of_sort(2)),
    **dict.fromkeys(variants("nonzero", "argwhere"), _of_nonzero),
    **dict.fromkeys(variants("unique", "unique_consecutive"), _of_unique),
    **dict.fromkeys((torch.nn.functional.ctc_loss, torch.ctc_loss), _of_alignments),
    torch._VF._pack_padded_sequence: _of_packing,
    torch._VF._pad_packed_sequence: _of_padding,
    **dict.fromkeys(RECURRENT_CELLS, _of_cell),
    **dict.fromkeys(RECURRENT_LAYERS, _of_recurrent_layer),
}
