"""Whether packed examples are kept apart where rows meet rows: in attention, and in products.

Values are read to find out: weights between rows of different examples are zero, or masked.
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
from gradstats.capture.operations._nested import operands_of
from gradstats.capture.operations._operations import BROADCASTS, MOVES, RESHAPES, variants
from gradstats.capture.operations._rowwise import POINTWISE

# Operations over scores, where zeros before or after show that no other example counted.
SOFTMAX = frozenset([*variants("softmax"), functional.softmax, torch.special.softmax])
SUMS = frozenset(variants("sum"))
# Operations in which each score counts by its softmax.
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

# The exponential function of this or less is zero in every precision.
NO_WEIGHT = -746.0

# By how much trained values are changed to see whether they count; later ones by powers of it.
MOVED_BY = 0.7390851


def weights_keep_apart(weights: Tensor, rows: Examples, columns: Examples) -> bool:
    """Whether all weights between rows of different examples are zero.

    Args:
        weights: of a product that sums over the columns.
        rows, columns: where the examples of the product's rows, and of those that are summed, lie
            in ``weights``.
    """
    others = of_others(rows, columns, weights.device)
    values = weights.detach()
    if values.layout is torch.strided:
        pairs = values.movedim((rows.axis, columns.axis), (-2, -1))
        return not bool((pairs.ne(0) & others).any())
    values = values.to_sparse_coo().coalesce()
    row, column = values.indices()[[rows.axis, columns.axis]]
    return not bool((values.values().ne(0) & others[row, column]).any())


def attention_keeps_apart(marks: Marks, call: Call) -> bool:
    """Whether ``scaled_dot_product_attention`` keeps packed examples along its last axes apart."""
    layouts = [_from_the_right(marks, call, place) for place in range(3)]
    trained = [item for item in call.data if item.requires_grad]
    if marks.batch_size > 1 and any(marks.layout_of(item) is None for item in trained):
        return False  # of all rows, of one example, or not known
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
        # Its rows must be those of the queries, and its columns nobody's.
        along = of_mask.along(of_mask.axis - mask.dim())
        rows_only = along.axis == query.axis == -2 and not isinstance(of_mask, Scores)
        return rows_only and same_rows(along, query)
    if query is None or mask is None or any(each.axis != -2 for each in (query, *keys)):
        return False  # features are all summed
    if is_trained:
        # As for scores, its rows and columns must be those of the queries and keys.
        first = mask.dim() - 2
        pairs = [query.along(first), *(each.along(first + 1) for each in keys)]
        if of_mask is None or scores([*pairs, of_mask], mask) is None:
            return False
    allowed = _allowed(call, mask.detach())
    others = [of_others(query, each, mask.device) for each in keys]
    return not any(bool((allowed & each).any()) for each in others)


def _allowed(call: Call, mask: Tensor) -> Tensor:
    """Return between which pairs of rows a mask leaves attention a weight.

    With scores within ±b, a pair has at most the weight exp(2b + m − m_max), where m_max is the
    largest number of the mask in its row: those of a row that is masked as a whole remain.
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
    # Where scores are not finite, neither are the losses, whatever is masked.
    room = 2 * largest.nan_to_num(0, 0)
    return mask - mask.amax(-1, keepdim=True) > NO_WEIGHT - room


def mask_keeps_apart(mask_mod, shape: Sequence[int], rows: Examples) -> bool:
    """Whether a mask of flex_attention keeps the rows of different packed examples apart.

    Args:
        mask_mod: the mask.
        shape: (N, H, T, d) of the queries; the mask may differ between the N rows and the heads.
        rows: the layout of the T positions.
    """
    if is_compiling():
        return False
    assert rows.segments is not None
    place = torch.arange(rows.rows, device=rows.segments.owner.device)
    of_pairs = torch.vmap(torch.vmap(mask_mod, (None, None, None, 0)), (None, None, 0, None))
    others = of_others(rows, rows, place.device)
    meets = torch.zeros((), dtype=torch.bool, device=place.device)
    # Most masks are the same for all rows and heads.
    numbers = [place.new_zeros(()) for _ in range(4)]
    inside = {*map(id, operands_inside(mask_mod, *numbers))}
    sizes = [size if id(each) in inside else 1 for size, each in zip(shape, numbers, strict=True)]
    for row, head in torch.cartesian_prod(*(place.new_tensor(range(size)) for size in sizes[:2])):
        meets |= (of_pairs(row, head, place, place) & others).any()
    return not meets


def _from_the_right(marks: Marks, call: Call, place: int) -> Examples | None:
    """Return where examples lie in an operand of attention, with axes counted from the right."""
    item = call.argument(place, ("query", "key", "value")[place])
    layout = marks.layout_of(item) if any(item is tensor for tensor in call.data) else None
    return layout and layout.along(layout.axis - item.dim())


def packs(marks: Marks, layouts: Iterable[Examples]) -> bool:
    """Whether examples have several rows, side by side, of which values tell what they meet.

    Whether the caller packed the examples or the model itself did.
    """
    if marks.packed:
        return True
    if marks.batch_size == 1 or is_compiling():
        return False  # a graph has no values to look at
    return any(layout.most > 1 for layout in layouts)


def scores(layouts: Sequence[Examples], result: Tensor) -> Scores | None:
    """Return the layout of a result over pairs of rows, such as queries and keys.

    Args:
        layouts: where the examples of the operands lie in the result.
        result: of the operation.

    Returns:
        The layout; None unless they lie along two axes, along each of which they are the same.
    """
    sides: dict[int, Examples] = {}
    for layout in layouts:
        for side in layout.sides if isinstance(layout, Scores) else (layout,):
            if not same_rows(sides.setdefault(side.axis, side), side):
                return None
    if len(sides) != 2:
        return None
    rows, columns = (sides[axis] for axis in sorted(sides))
    return _paired(rows, columns, fixed=not bool(of_others(rows, columns, result.device).any()))


def _paired(rows: Examples, columns: Examples, fixed: bool) -> Scores | None:
    """Return the layout of scores of these rows and columns; None for rows that are nobody's."""
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
        call: the operation; an operand or the result has scores.
        after: the layout of the result if only its rows' examples count.
    """
    func, result = call.func, call.result
    if func in POINTWISE or func in BROADCASTS:
        if not isinstance(after, Scores):
            return None
        return replace(after, fixed=are_fixed(marks, call, after))
    trained = [item for item in call.data if item.requires_grad]
    of_scores = [(item, own) for item in trained if isinstance(own := marks.owned(item), Scores)]
    if not of_scores:
        return after
    if func in CONCATENATES:
        return _joined(marks, call)
    item, own = of_scores[0]
    if len(trained) > 1 or item is not call.argument(0, "input"):
        return None
    if func in MOVES or func in RESHAPES or func in REINDEXES:
        return _followed(call, item, own)
    if func is functional.linear:
        sums = any(side.axis == item.dim() - 1 for side in own.sides)
        # Scores that were fixed now depend on parameters.
        return None if sums else scores(own.sides, result)
    over = call.argument(1, "dim")
    if not isinstance(over, int) or func not in OVER_AXES:
        return None
    over %= item.dim()
    if over not in [side.axis for side in own.sides]:
        return _followed(call, item, own) if func in ADDS_UP else None
    return _along(call, item, own, over)


def _along(call: Call, item: Tensor, own: Scores, over: int) -> Examples | None:
    """Return the layout of a result over one axis of scores; None if others' count in it.

    Args:
        call: the operation.
        item: its operand.
        own: the layout of that.
        over: the axis, that of the rows or of the columns.
    """
    weights = _counting(call, item, own, over)
    if over == own.axis and _has_sinks(own.columns):
        return None  # which run over the rows of all examples
    if weights is None or not weights_keep_apart(weights, *own.sides):
        return None
    if call.func in EXPONENTIATED and call.func not in REDUCES:
        return own  # log-probabilities of masked scores may be used
    rows, columns = own.sides
    kept = follow(call, item, columns if over == rows.axis else rows)
    return kept if isinstance(kept, Examples) else None


def _counting(call: Call, item: Tensor, own: Scores, over: int) -> Tensor | None:
    """Return values that are zero where scores do not count in a result over one of their axes.

    Args:
        call: the operation.
        item: its operand.
        own: the layout of that.
        over: the axis.

    Returns:
        The values, in the operand's shape; None if it is not known which scores count.
    """
    func, values = call.func, item.detach()
    if func in SOFTMAX:
        return call.result.detach()
    if func in EXPONENTIATED:
        return values.softmax(over)
    if func in PICKED and own.fixed:
        picked = call.result.detach()
        return values == (picked if picked.dim() == item.dim() else picked.unsqueeze(over))
    return values if func in SUMS and own.fixed else None


def _followed(call: Call, item: Tensor, own: Scores) -> Examples | None:
    """Return the layout of a result that only moves rows and columns of scores.

    If both lie along one axis, as after picking pairs, only pairs of one example may be left.
    """
    rows, columns = (follow(call, item, side) for side in own.sides)
    if not (isinstance(rows, Examples) and isinstance(columns, Examples)):
        return None
    if rows.axis != columns.axis:
        return _paired(rows, columns, own.fixed)
    return rows if same_rows(rows, columns) else None


def _joined(marks: Marks, call: Call) -> Scores | None:
    """Return the layout of scores joined to each other, or to columns of their rows' examples.

    Such columns are sinks, learned numbers that share a softmax with the scores of each row:
    torch.cat([scores, sinks], -1).softmax(-1)[..., :-1].
    """
    tensors = [item for item in call.argument(0, "tensors") if item.numel()]
    placed = [marks.owned(item) if marks.is_of_data(item) else None for item in tensors]
    scores = [own for own in placed if isinstance(own, Scores)]
    rows, columns = scores[0].sides
    if call.argument(1, "dim", 0) % call.result.dim() != columns.axis:
        return None
    owners = []
    for item, own in zip(tensors, placed, strict=True):
        if isinstance(own, Examples):
            if own.axis != rows.axis or not same_rows(own, rows):
                return None
            if isinstance(own, Scores) and own.columns.axis != columns.axis:
                return None
        elif own is not None or marks.is_trained(item):
            return None  # a constant, or what a parameter's rule has put beside the rows, has none
        if isinstance(own, Scores):
            owners.append(own.columns.owner(item.device))
        else:
            owners.append(torch.full((item.shape[columns.axis],), rows.batch, device=item.device))
    columns = columns.owned_by(torch.cat(owners), columns.axis)
    return _paired(rows, columns, all(own.fixed for own in scores))


def scores_keep_apart(item: Tensor, own: Scores) -> bool:
    """Whether scores between different examples are zero, whatever the trained values are."""
    return own.fixed and weights_keep_apart(item, *own.sides)


def are_fixed(marks: Marks, call: Call, after: Scores) -> bool:
    """Whether scores between different examples are independent of trained values, as if masked.

    The operation is repeated with other trained values. That scores are zero says less: a layer may
    start with zero weights.

    Args:
        call: an operation on them, element by element.
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
    # Upwards and downwards, as one of them may not count; each by another amount, which is no
    # simple multiple of the others': what is moved alike may cancel.
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
    """Whether an operand has scores, of which those between different examples are fixed."""
    own = marks.owned(item) if marks.is_of_data(item) else None
    return isinstance(own, Scores) and own.fixed


def sums_own(func, item: Tensor, own: Scores) -> bool:
    """Whether a number computed from scores is a sum over the examples.

    Args:
        func: the operation.
        item: its only trained operand.
        own: the layout of that.
    """
    if func in ADDS_UP:
        return scores_keep_apart(item, own)
    if func is functional.cross_entropy and own.columns.axis == 1:
        return weights_keep_apart(item.detach().softmax(1), *own.sides)
    return False


def of_others(rows: Examples, columns: Examples, device: torch.device) -> Tensor:
    """Return which pairs of rows belong to different examples, (rows, columns)."""
    of_columns = columns.owner(device)
    return (rows.owner(device).unsqueeze(1) != of_columns) & (of_columns < columns.batch)
