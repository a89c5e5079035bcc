"""What is known about a tensor, which is noted on others that are computed in the same way."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from gradstats.capture.following._examples import Examples, Layout
from gradstats.capture.following._marks import Marks
from gradstats.capture.following._taken import is_given
from gradstats.capture.following._values import VALUES


class Note(NamedTuple):
    """What is known about a tensor.

    Attributes:
        constant: whether it is a constant.
        place: its layout; None if that is the contract's.
        held: the properties of its values: see ``Values``.
    """

    constant: bool
    place: Layout
    held: dict[str, Any]


def is_unusual(marks: Marks, tensor: Tensor) -> bool:
    """Whether anything beyond the contract is known about a data tensor.

    That its values are drawn does not count: it does not matter where the tensor is used as data.
    """
    written = bool(marks.written.storages) and tensor in marks.written
    if written or marks.is_marked(tensor):
        return True
    return hasattr(tensor, VALUES) and marks.values.held_by(tensor) != {"drawn": True}


def note_of(marks: Marks, tensor: Tensor) -> Note | None:
    """Return what is known about a tensor; None if some of it may hold for this tensor only."""
    if not marks.is_data(tensor):
        return Note(True, None, {})
    held = marks.values.held_by(tensor)
    if "owner" in held or is_given(marks, tensor):
        return None
    mark = marks.mark_of(tensor)
    place = None if mark is None else mark[0]
    if mark is not None and place is None:
        return None
    if isinstance(place, Examples) and place.segments is not None:
        return None  # the segments depend on this tensor's values
    return Note(False, place, held)


def note_as(marks: Marks, tensor: Tensor, note: Note) -> None:
    """Note on a tensor what is known about one that was computed in the same way."""
    if note.constant:
        marks.mark_constant(tensor)
    if note.place is not None:
        marks.mark(tensor, note.place)
    if note.held:
        marks.values.note(tensor, **note.held)
