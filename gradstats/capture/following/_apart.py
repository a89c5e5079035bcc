"""Whether packed examples are kept apart where rows meet rows: in attention, and in products.

They are if the weights between rows of different examples are zero, or masked; values are read to
find out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from gradstats._compiler import is_compiling
from gradstats.capture.following._examples import Examples, Scores, same_rows
from gradstats.capture.following._flex_attention import operands_inside
from gradstats.capture.following._layout import follow
from gradstats.capture.following._marks import Marks
from gradstats.capture.following._reductions import OVER_AXES, REDUCES
from gradstats.capture.following._reindexed import REINDEXES
from gradstats.capture.operations._call import Call
from gradstats.capture.operations._nested import is_among, operands_of
from gradstats.capture.operations._operations import BROADCASTS, MOVES, RESHAPES, variants
from gradstats.capture.operations._rowwise import POINTWISE

# Operations over scores. Zeros among their operands or results show that no other example counted.
SOFTMAX = frozenset([*variants("softmax"), functional.softmax, torch.special.softmax])
SUMS = frozenset(variants("sum"))
# Operations in which each score counts with the weight that its softmax has.
EXPONENTIATED = frozenset(
    [
        *variants("log_softmax", "logsumexp"),
        functional.log_softmax,
        torch.special.log_softmax,
        torch.special.logsumexp,
    ]
)
PICKED = frozenset(variants("amax", "amin", "max", "min"))
ADDS_UP = SUMS | frozenset(variants("mean"))
CONCATENATES = frozenset({torch.cat, torch.concat, torch.concatenate})

# The exponential of this number, or of a smaller one, is zero in every precision.
NO_WEIGHT = -746.0

# To see whether trained operands count, the first is changed by this number, the second by its
# square, and so on.
MOVED_BY = 0.7390851


def weights_keep_apart(weights: Tensor, rows: Examples, columns: Examples) -> bool:
    """Whether all weights between rows of different examples are zero.

    Args:
        weights: of a product that sums over the columns.
        rows, columns: where the examples of the product's rows, and of the rows that it sums, lie
            in ``weights``.
    """
    differs = differing_pairs(rows, columns, weights.device)
    values = weights.detach()
    if values.layout is torch.strided:
        pairs = values.movedim((rows.axis, columns.axis), (-2, -1))
        return not bool((pairs.ne(0) & differs).any())
    values = values.to_sparse_coo().coalesce()
    row, column = values.indices()[[rows.axis, columns.axis]]
    return not bool((values.values().ne(0) & differs[row, column]).any())


def attention_keeps_apart(marks: Marks, call: Call) -> bool:
    """Whether ``scaled_dot_product_attention`` keeps packed examples along its last axes apart."""
    layouts = [_from_the_right(marks, call, place) for place in range(3)]
    trained = [item for item in call.data if item.requires_grad]
    if marks.batch_size > 1 and any(marks.layout_of(item) is None for item in trained):
        return False  # values over all examples, of one example, or of unknown ones
    query, *rest = (each if each is not None and each.axis >= -2 else None for each in layouts)
    keys = [layout for layout in rest if layout is not None]
    if (query or keys) and any(each is not None and each.axis < -2 for each in layouts):
        return False  # each row of a batch meets rows of all examples
    mask = call.argument(3, "attn_mask")
    is_trained = marks.is_trained(mask)
    of_mask = marks.layout_of(mask) if is_trained else None
    if not keys:
        if query is None or of_mask is None:
            return query is None or query.axis == -2
        # The mask's rows must be those of the queries, and its columns nobody's.
        along = of_mask.along(of_mask.axis - mask.dim())
        rows_only = along.axis == query.axis == -2 and not isinstance(of_mask, Scores)
        return rows_only and same_rows(along, query)
    if query is None or mask is None or any(each.axis != -2 for each in (query, *keys)):
        return False  # without a mask, or with examples along features, all are summed
    if is_trained:
        # The mask's rows and columns must be those of the queries and keys.
        first = mask.dim() - 2
        pairs = [query.along(first), *(each.along(first + 1) for each in keys)]
        if of_mask is None or scores([*pairs, of_mask], mask) is None:
            return False
    allowed = _allowed(call, mask.detach())
    differs = [differing_pairs(query, each, mask.device) for each in keys]
    return not any(bool((allowed & each).any()) for each in differs)


def _allowed(call: Call, mask: Tensor) -> Tensor:
    """Return which pairs of rows a mask of attention may leave a weight that is not zero.

    If all scores lie within ±b, the weight of a pair is at most exp(2b + m − m_max), where m is the
    mask's number for the pair, and m_max the largest one in its row. If a row is masked as a whole,
    its pairs thus keep their weights.
    """
    if mask.dtype == torch.bool:
        return mask
    query, key = (
        call.argument(place, name).detach() for place, name in enumerate(("query", "key"))
    )
    if not (query.numel() and key.numel() and mask.numel()):
        return mask > -torch.inf
    scale = call.argument(6, "scale")
    largest = abs(query.shape[-1] ** -0.5 if scale is None else scale)
    for each in (query, key):
        dtype = torch.promote_types(each.dtype, torch.float32)
        largest = torch.linalg.vector_norm(each, dim=-1, dtype=dtype).max() * largest
    # If scores are not finite, neither are the losses, whatever the mask.
    room = 2 * largest.nan_to_num(0, 0)
    return mask - mask.amax(-1, keepdim=True) > NO_WEIGHT - room


def mask_keeps_apart(mask_mod, shape: Sequence[int], rows: Examples) -> bool:
    """Whether a mask of flex_attention keeps the rows of different packed examples apart.

    Args:
        mask_mod: the mask.
        shape: (N, H, T, d) of the queries; the mask may differ between the N entries of the batch
            and between the H heads.
        rows: the layout of the T positions.
    """
    if is_compiling():
        return False
    assert rows.segments is not None
    place = torch.arange(rows.rows, device=rows.segments.owner.device)
    of_pairs = torch.vmap(torch.vmap(mask_mod, (None, None, None, 0)), (None, None, 0, None))
    differs = differing_pairs(rows, rows, place.device)
    meets = torch.zeros((), dtype=torch.bool, device=place.device)
    # Most masks use neither the entry nor the head, so that one of each is enough.
    numbers = [place.new_zeros(()) for _ in range(4)]
    inside = {*map(id, operands_inside(mask_mod, *numbers))}
    sizes = [size if id(each) in inside else 1 for size, each in zip(shape, numbers, strict=True)]
    for row, head in torch.cartesian_prod(*(place.new_tensor(range(size)) for size in sizes[:2])):
        meets |= (of_pairs(row, head, place, place) & differs).any()
    return not meets


def _from_the_right(marks: Marks, call: Call, place: int) -> Examples | None:
    """Return the layout of an operand of attention, its axis counted from the right."""
    item = call.argument(place, ("query", "key", "value")[place])
    layout = marks.layout_of(item) if is_among(item, call.data) else None
    return layout and layout.along(layout.axis - item.dim())


def packs(marks: Marks, layouts: Iterable[Examples]) -> bool:
    """Whether examples may be packed, by the caller or by the model itself.

    Their rows then lie side by side, and only values tell which of them meet.
    """
    if marks.packed:
        return True
    if marks.batch_size == 1 or is_compiling():
        return False  # a graph has no values to read
    return any(layout.most > 1 for layout in layouts)


def scores(layouts: Sequence[Examples], result: Tensor) -> Scores | None:
    """Return the layout of a result over pairs of rows, such as queries and keys.

    Args:
        layouts: where the examples of the operands lie in the result.
        result: of the operation.

    Returns:
        The layout; None unless the operands' examples lie along two axes, and those along the same
        axis agree.
    """
    sides: dict[int, Examples] = {}
    for layout in layouts:
        for side in layout.sides if isinstance(layout, Scores) else (layout,):
            if not same_rows(sides.setdefault(side.axis, side), side):
                return None
    if len(sides) != 2:
        return None
    rows, columns = (sides[axis] for axis in sorted(sides))
    differs = differing_pairs(rows, columns, result.device)
    return _paired(rows, columns, fixed=not bool(differs.any()))


def _paired(rows: Examples, columns: Examples, fixed: bool) -> Scores | None:
    """Return the layout of scores of these rows and columns; None if some rows are nobody's."""
    if _has_sinks(rows):
        return None
    return Scores(rows.batch, rows.axis, rows.fold, rows.segments, columns=columns, fixed=fixed)


def _has_sinks(columns: Examples) -> bool:
    """Whether some columns are nobody's."""
    segments = columns.segments
    return segments is not None and bool((segments.owner == columns.batch).any())


def without_columns(layout: Examples) -> Examples:
    """Return the layout of the rows alone."""
    return layout.sides[0] if isinstance(layout, Scores) else layout


def after_scores(marks: Marks, call: Call, after: Examples | None) -> Examples | None:
    """Return the layout of an operation's result; None if scores of different examples meet in it.

    Args:
        marks: what is noted about the operands.
        call: the operation; an operand or the result has scores.
        after: the layout of the result if each score belonged to the example of its row.
    """
    func, result = call.func, call.result
    if func in POINTWISE or func in BROADCASTS:
        if not (isinstance(after, Scores) and after.fits(result)):
            return None  # the columns may be real and imaginary parts, which became one number
        return replace(after, fixed=are_fixed(marks, call, after))
    trained = [item for item in call.data if item.requires_grad]
    found = [(item, layout) for item in trained if isinstance(layout := marks.owned(item), Scores)]
    if not found:
        return after
    if func in CONCATENATES:
        return _joined(marks, call)
    item, layout = found[0]
    if len(trained) > 1 or item is not call.argument(0, "input"):
        return None
    if func in MOVES or func in RESHAPES or func in REINDEXES:
        return _followed(call, item, layout)
    if func is functional.linear:
        sums = any(side.axis == item.dim() - 1 for side in layout.sides)
        # Even scores that were fixed depend on parameters now.
        return None if sums else scores(layout.sides, result)
    over = call.argument(1, "dim")
    if not isinstance(over, int) or func not in OVER_AXES:
        return None
    over %= item.dim()
    if over not in [side.axis for side in layout.sides]:
        return _followed(call, item, layout) if func in ADDS_UP else None
    return _along(call, item, layout, over)


def _along(call: Call, item: Tensor, layout: Scores, over: int) -> Examples | None:
    """Return the layout of a result over one axis of scores; None if different examples met in it.

    Args:
        call: the operation.
        item: its operand.
        layout: the operand's layout.
        over: the axis, that of the rows or of the columns.
    """
    weights = _counting(call, item, layout, over)
    if over == layout.axis and _has_sinks(layout.columns):
        return None  # the sinks' columns run over the rows of all examples
    if weights is None or not weights_keep_apart(weights, *layout.sides):
        return None
    if call.func in EXPONENTIATED and call.func not in REDUCES:
        return layout  # the log-probabilities of masked scores are not zero: they may be used
    rows, columns = layout.sides
    kept = follow(call, item, columns if over == rows.axis else rows)
    return kept if isinstance(kept, Examples) else None


def _counting(call: Call, item: Tensor, layout: Scores, over: int) -> Tensor | None:
    """Return values that are zero where scores do not count in a result over one of their axes.

    Takes what ``_along`` takes. The values have the operand's shape; None if it is not known which
    scores count.
    """
    func, values = call.func, item.detach()
    if func in SOFTMAX:
        return call.result.detach()
    if func in EXPONENTIATED:
        return values.softmax(over)
    if func in PICKED and layout.fixed:
        picked = call.result.detach()
        return values == (picked if picked.dim() == item.dim() else picked.unsqueeze(over))
    return values if func in SUMS and layout.fixed else None


def _followed(call: Call, item: Tensor, layout: Scores) -> Examples | None:
    """Return the layout of the result of an operation that only moves scores.

    If rows and columns lie along the same axis now, as after picking pairs, each pair that is left
    must be of one example.
    """
    rows, columns = (follow(call, item, side) for side in layout.sides)
    if not (isinstance(rows, Examples) and isinstance(columns, Examples)):
        return None
    if rows.axis != columns.axis:
        return _paired(rows, columns, layout.fixed)
    return rows if same_rows(rows, columns) else None


def _joined(marks: Marks, call: Call) -> Scores | None:
    """Return the layout of scores joined to each other, or to sinks.

    Sinks are columns that belong to their rows' examples, such as learned numbers that share a
    softmax with the scores of each row: torch.cat([scores, sinks], -1).softmax(-1)[..., :-1].
    """
    tensors = [item for item in call.argument(0, "tensors") if item.numel()]
    placed = [marks.owned(item) if marks.is_of_data(item) else None for item in tensors]
    of_scores = [layout for layout in placed if isinstance(layout, Scores)]
    rows, columns = of_scores[0].sides
    if call.argument(1, "dim", 0) % call.result.dim() != columns.axis:
        return None
    owners = []
    for item, layout in zip(tensors, placed, strict=True):
        if isinstance(layout, Examples):
            if layout.axis != rows.axis or not same_rows(layout, rows):
                return None
            if isinstance(layout, Scores) and layout.columns.axis != columns.axis:
                return None
        elif layout is not None or marks.is_trained(item):
            return None  # only constants, and sinks that a rule has placed, may have no layout
        if isinstance(layout, Scores):
            owners.append(layout.columns.owner(item.device))
        else:
            owners.append(torch.full((item.shape[columns.axis],), rows.batch, device=item.device))
    columns = columns.owned_by(torch.cat(owners), columns.axis)
    return _paired(rows, columns, all(layout.fixed for layout in of_scores))


def scores_keep_apart(item: Tensor, layout: Scores) -> bool:
    """Whether scores between different examples are zero, whatever the trained values are."""
    return layout.fixed and weights_keep_apart(item, *layout.sides)


def are_fixed(marks: Marks, call: Call, after: Scores) -> bool:
    """Whether scores between different examples are independent of trained values, as if masked.

    To find out, the operation is repeated with other trained values. It would not be enough that
    the scores are zero: a layer may start with zero weights.

    Args:
        marks: what is noted about the operands.
        call: an operation on scores, element by element.
        after: the layout of its result.
    """
    trained = {
        id(item): item.detach()
        for item in operands_of(call.args, call.kwargs)
        if item.requires_grad and not _is_fixed(marks, item)
    }
    if not trained:
        return True
    if call.func not in BROADCASTS:
        return False
    # Both upwards and downwards, as a change in one direction may be without effect; and each by an
    # amount that is no simple multiple of another's, as equal changes may cancel.
    for sign in (1, -1):
        moved = {
            key: item + sign * MOVED_BY**place
            for place, (key, item) in enumerate(trained.items(), start=1)
        }
        with torch.no_grad():
            again = call.func(
                *(moved.get(id(item), item) for item in call.args),
                **{name: moved.get(id(item), item) for name, item in call.kwargs.items()},
            )
        if not weights_keep_apart(again.ne(call.result.detach()), *after.sides):
            return False
    return True


def _is_fixed(marks: Marks, item: Tensor) -> bool:
    """Whether an operand has scores that are fixed between different examples."""
    layout = marks.owned(item) if marks.is_of_data(item) else None
    return isinstance(layout, Scores) and layout.fixed


def sums_own(func, item: Tensor, layout: Scores) -> bool:
    """Whether a number computed from scores is a sum over the examples.

    Args:
        func: the operation.
        item: its only trained operand.
        layout: the operand's layout.
    """
    if func in ADDS_UP:
        return scores_keep_apart(item, layout)
    if func is functional.cross_entropy and layout.columns.axis == 1:
        return weights_keep_apart(item.detach().softmax(1), *layout.sides)
    return False


def differing_pairs(rows: Examples, columns: Examples, device: torch.device) -> Tensor:
    """Return which pairs of rows are of different examples: (rows, columns) of booleans."""
    of_columns = columns.owner(device)
    return (rows.owner(device).unsqueeze(1) != of_columns) & (of_columns < columns.batch)
