"""Where the examples lie in results of data whose examples lie along two axes."""

from __future__ import annotations

from dataclasses import replace

from gradstats.capture.following._examples import MIXED, Examples, Grid, Mixed, Whole, same_layout
from gradstats.capture.following._layout import follow
from gradstats.capture.following._marks import Marks
from gradstats.capture.following._reductions import OVER_AXES, REDUCES, runs_over
from gradstats.capture.following._reindexed import PICKS, picked
from gradstats.capture.operations._call import Call
from gradstats.capture.operations._operations import BROADCASTS, MOVES, PADS, RESHAPES, variants
from gradstats.capture.operations._rowwise import POINTWISE

# Operations that only move, cut or pick elements of their first operand.
REARRANGES = MOVES | RESHAPES | PICKS.keys() | frozenset(variants("as_strided"))

# Operations that compute each element from the same place, or along some axes only.
COMPUTES = POINTWISE | BROADCASTS | OVER_AXES.keys() | PADS


def meets_grid(marks: Marks, call: Call) -> bool:
    """Whether an operand that determines an operation's layout has examples along two axes."""
    if not marks.has_grids:
        return False
    trained = [item for item in call.data if item.requires_grad]
    return any(isinstance(marks.placed(item), Grid) for item in trained or call.data)


def after_grid(marks: Marks, call: Call) -> Examples | Whole | Grid | Mixed | None:
    """Return the layout of the result of an operation of which ``meets_grid`` holds.

    Note where trained values of different examples meet.
    """
    func, args, kwargs, data, result = call
    trained = [item for item in data if item.requires_grad]
    placed = [(item, marks.placed(item)) for item in trained or data]
    source, grid = next((item, own) for item, own in placed if isinstance(own, Grid))
    first = bool(args) and args[0] is source
    if func in REARRANGES:
        return picked(call, source, grid) if first else None
    if func not in COMPUTES:
        return None
    for item, own in placed if trained else ():
        before = source.dim() - item.dim()  # axes it lacks, in broadcasting
        if not isinstance(own, Grid) or not same_layout(own.behind(before), grid):
            if own is not None:
                marks.meetings.note(result)
            return MIXED if own is MIXED else None
    if func in OVER_AXES and any(runs_over(func, args, kwargs, axis) for axis in grid.axes):
        if not first or not result.requires_grad:
            return None
        if func not in REDUCES:
            marks.meetings.couple(result, "runs over the examples")
        return MIXED
    rows, columns = (follow(call, source, side) for side in grid.sides)
    if not isinstance(rows, Examples) or not isinstance(columns, Examples):
        return None
    as_before = all(side.plain and side.fits(result) for side in (rows, columns))
    if not as_before or rows.axis >= columns.axis:
        return None
    return replace(grid, axes=(rows.axis, columns.axis))
