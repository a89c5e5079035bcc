"""Whether packed examples are kept apart where rows meet rows: in attention, and in products.

Values say so: weights between rows of different examples are zero, or a mask forbids them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from gradstats.capture._call import Call
from gradstats.capture._examples import Examples, Scores
from gradstats.capture._marks import Marks
from gradstats.capture._nested import operands_of
from gradstats.capture._operations import BROADCASTS, MOVES, POINTWISE, RESHAPES, variants

# Operations over scores of which zeros, in the result or before, say that no other example counted.
SOFTMAX = frozenset([*variants("softmax"), functional.softmax, torch.special.softmax])
SUMS = frozenset(variants("sum"))
ADDS_UP = SUMS | frozenset(variants("mean"))

# Added to a score, this or less leaves no weight.
FORBIDS = -1e4

# By how much trained values are moved to see whether they count.
MOVED_BY = 0.7390851


def weights_keep_apart(weights: Tensor, rows: Examples, columns: Examples) -> bool:
    """Whether all weights between rows of different examples are zero.

    Args:
        weights: (…, columns), of a product that sums over the columns.
        rows: where the examples of the product's rows lie in ``weights``.
        columns: the layout of the rows that are summed, along any axis.
    """
    others = _others(rows, columns, weights.device)
    values = weights.detach()
    if values.layout is torch.strided:
        return not bool((values.movedim(rows.axis, -2).ne(0) & others).any())
    values = values.to_sparse_coo().coalesce()
    row, column = values.indices()[[rows.axis, -1]]
    return not bool((values.values().ne(0) & others[row, column]).any())


def attention_keeps_apart(marks: Marks, call: Call) -> bool:
    """Whether ``scaled_dot_product_attention`` keeps packed examples along its last axes apart."""
    query, *rest = (_along_last_axes(marks, call, place) for place in range(3))
    keys = [layout for layout in rest if layout is not None]
    if not keys:
        return query is None or query.axis == -2
    if query is None and (own := marks.by_contract(call.result)) is not None:
        # What is no data has its rows where the result has them.
        query = own.along(own.axis - call.result.dim())
    mask = call.argument(3, "attn_mask")
    if query is None or mask is None or any(each.axis != -2 for each in (query, *keys)):
        return False  # of features, all are summed
    allowed = mask.detach() if mask.dtype == torch.bool else mask.detach() > FORBIDS
    others = [_others(query, each, mask.device) for each in keys]
    return not any(bool((allowed & each).any()) for each in others)


def _along_last_axes(marks: Marks, call: Call, place: int) -> Examples | None:
    """Return where examples lie in an operand of attention, if along its last two axes.

    These are counted from the right.
    """
    item = call.argument(place, ("query", "key", "value")[place])
    layout = marks.layout_of(item) if any(item is tensor for tensor in call.data) else None
    if layout is None or layout.axis < item.dim() - 2:
        return None
    return layout.along(layout.axis - item.dim())


def scores(rows: Examples, columns: Examples, result: Tensor) -> Scores | None:
    """Return the layout of products of rows with rows, such as queries and keys; None if unclear.

    Args:
        rows, columns: where the examples of either lie in the result.
        result: the products.
    """
    if columns.axis != result.dim() - 1:
        return None
    fixed = not bool(_others(rows, columns, result.device).any())
    return _scores(rows, columns, fixed)


def _scores(rows: Examples, columns: Examples, fixed: bool) -> Scores:
    return Scores(rows.batch, rows.axis, rows.fold, rows.segments, columns=columns, fixed=fixed)


def without_columns(layout: Examples) -> Examples:
    """Return where the examples of the rows lie alone."""
    if not isinstance(layout, Scores):
        return layout
    return Examples(layout.batch, layout.axis, layout.fold, layout.segments)


def after_scores(marks: Marks, call: Call, after: Examples) -> Examples | None:
    """Return the layout of an operation's result; None where it has examples' scores meet others.

    Args:
        marks: the context's.
        call: the operation.
        after: the layout of the rows of the result.
    """
    given = ((item, marks.owned(item)) for item in call.data)
    found = next(((item, own) for item, own in given if isinstance(own, Scores)), None)
    if found is None:
        return after
    item, own = found
    func, result, last = call.func, call.result, item.dim() - 1
    rows = without_columns(after)
    keeps = func in POINTWISE or func in BROADCASTS
    if func in MOVES or func in RESHAPES:
        keeps = after.axis == result.dim() - 2 and result.shape[-1] == own.columns.rows
    if keeps:
        columns = own.columns.along(result.dim() - 1)
        return _scores(rows, columns, _are_fixed(marks, call, rows, columns))
    over = call.argument(1, "dim")
    if item is not call.args[0] or not isinstance(over, int) or over not in (-1, last):
        return None
    if func in SOFTMAX:
        apart = weights_keep_apart(result, own, own.columns)
    else:
        apart = func in SUMS and scores_keep_apart(item, own)
    return rows if apart else None


def scores_keep_apart(item: Tensor, own: Scores) -> bool:
    """Whether those between rows of different examples are zero, whatever is trained."""
    return own.fixed and weights_keep_apart(item, own, own.columns)


def _are_fixed(marks: Marks, call: Call, rows: Examples, columns: Examples) -> bool:
    """Whether nothing trained counts in those elements of scores that are of different examples.

    As under a mask: the operation is repeated with other trained values. That they are zero says
    less, as where a layer starts with weights of zero.

    Args:
        marks: the context's.
        call: an operation on them, element by element.
        rows, columns: where the examples lie in its result.
    """
    moved = {}
    for item in operands_of(call.args, call.kwargs):
        own = marks.owned(item) if marks.is_of_data(item) else None
        if item.requires_grad and not (isinstance(own, Scores) and own.fixed):
            moved[id(item)] = item.detach() + MOVED_BY
    if not moved:
        return True
    if call.func not in BROADCASTS or "out" in call.kwargs:
        return False
    with torch.no_grad():
        again = call.func(
            *(moved.get(id(item), item) for item in call.args),
            **{name: moved.get(id(item), item) for name, item in call.kwargs.items()},
        )
    counts = again.ne(call.result.detach()).movedim(rows.axis, -2)
    return not bool((counts & _others(rows, columns, counts.device)).any())


def sums_own(func, item: Tensor, own: Scores) -> bool:
    """Whether a number that is made of scores is a sum over the examples.

    Args:
        func: the operation.
        item: its only trained operand.
        own: the layout of that.
    """
    if func in ADDS_UP:
        return scores_keep_apart(item, own)
    if func is functional.cross_entropy and item.dim() == 2:
        return weights_keep_apart(item.detach().softmax(-1), own, own.columns)
    return False


def _others(rows: Examples, columns: Examples, device: torch.device) -> Tensor:
    """Return which pairs of rows are of different examples, (rows, columns)."""
    return rows.owner(device).unsqueeze(1) != columns.owner(device)
